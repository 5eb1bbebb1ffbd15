"""Models whose layers alternate between mixers: gradients and training, whatever the placement."""

import jax
import pytest
import test_lfm2
import test_qwen3_5
from small import Small, needs, plain_loss, tokens, vectors_drawn, worst_relative
from test_engine import ORDER_OF_SUMS, engine_gradients
from test_experts import ALL

from surojax.models import decoder_model
from surojax.verification.settings import NVME_ALL

CONVOLUTIONS, DELTAS = test_lfm2.HYBRID, test_qwen3_5.HYBRID
TENSOR_PARALLEL = {"zero_level": 3, "tp_size": 2, **ALL}


@needs(4)
@pytest.mark.full
@pytest.mark.parametrize(
    "config, devices, placed",
    [
        (CONVOLUTIONS, 4, {"zero_level": 3, **ALL}),
        (CONVOLUTIONS, 1, {}),
        (CONVOLUTIONS, 4, TENSOR_PARALLEL),
        (CONVOLUTIONS, 4, {"zero_level": 2, "replicate": 2, "resident_layers": 3, "offload_weights": True}),
        (test_lfm2.WITH_EXPERTS, 1, ALL),
        (test_lfm2.WITH_EXPERTS, 4, {"zero_level": 3, **ALL}),
        (DELTAS, 4, TENSOR_PARALLEL),
        (DELTAS, 1, {}),
        (DELTAS, 4, {"zero_level": 3, **ALL}),
        (DELTAS, 2, {"tp_size": 2}),
    ],
)
def test_gradients_equal_reverse_mode(config, devices, placed):
    model = decoder_model.build(config)
    small = Small(devices, model=model, microbatches_per_fetch=3, **placed)
    with vectors_drawn():
        params = model.init(0)
    batch = tokens(3, 8, 16)
    expected = jax.jit(jax.value_and_grad(plain_loss(config)))(params, *batch)
    assert worst_relative(engine_gradients(small, batch), expected) < ORDER_OF_SUMS


@pytest.mark.full
@pytest.mark.parametrize("config", [CONVOLUTIONS, DELTAS], ids=["convolutions", "deltas"])
def test_trains_alike_under_every_placement(tmp_path, config):
    """To the bit: with everything offloaded, updated under the next forward pass, and in files."""
    model = decoder_model.build(config)
    batches = [tokens(2, 8, 16, seed=i) for i in range(3)]
    losses = Small(model=model).train(batches)
    assert len(set(losses)) == len(losses)
    for number, late in enumerate((False, True)):
        assert Small(model=model, microbatches_per_fetch=2, overlap_update=late, **ALL).train(batches) == losses
        folder = tmp_path / f"{number}"
        folder.mkdir()
        in_files = Small(model=model, batch=(2, 8, 16), nvme_path=str(folder), overlap_update=late, **NVME_ALL)
        assert in_files.train(batches) == losses
