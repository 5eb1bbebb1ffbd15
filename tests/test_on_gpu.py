"""What only a GPU can show: whole training steps there. `pytest -m gpu -n 0` runs this and the kernels' tests on it."""

import dataclasses

import jax
import numpy as np
import pytest
from small import CONFIG, Small, tokens

from pallas_kernels import bench, shapes
from surojax import train
from surojax.config.fields import default_config
from surojax.models.model import Compute
from surojax.numerics.recipes import Precision
from surojax.optim.adamw import adamw
from surojax.verification.rows import verify
from surojax.verification.settings import OFFLOADS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs a GPU: pytest -m gpu -n 0"),
]
WIDE = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=512, head_dim=64, vocab_size=512)


def config(**changes):
    c = default_config()
    c.model.update({k: getattr(WIDE, k) for k in c.model if hasattr(WIDE, k) and k != "rope_scaling"})
    c.update({"sequence_len": 128, "learning_rate": 1e-2, **changes})
    return c


@pytest.mark.parametrize("kernels", ["xla", "mosaic"])
def test_offloading_changes_no_bit(kernels, tmp_path):
    """On the device as on virtual ones: losses and gradient norms of 5 steps."""
    only = [*OFFLOADS, "offload_all", "resident_layers", "offload_master=nvme"]
    rows = verify(config(kernels=kernels, nvme_path=str(tmp_path)), only=only, devices=jax.devices()[:1])
    assert all((row.status, row.loss, row.grad_norm) == ("pass", 0, 0) for row in rows), rows


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_hybrid"])
def test_kernels_train_as_xla_does(recipe):
    """Five steps with the fused kernels and without. They round to bfloat16 (and float8) where XLA's own fusions may
    keep float32: 2^-9 of each number, independently; losses are means over 1024 labels. At a tenth of the tests'
    learning rate, at which this model's losses rise and differences with them."""
    if recipe != "bf16" and float(jax.devices()[0].compute_capability) < 8.9:
        pytest.skip("no float8 on this GPU")
    batches = [tokens(2, 4, 128, seed=i, vocab_size=512) for i in range(5)]

    def losses(kernels):
        precision = Precision(recipe=recipe, kernels=kernels)
        slow = lambda schedule, **options: adamw(lambda count: 0.1 * schedule(count), **options)
        small = Small(config=WIDE, compute=Compute(precision=precision), model_dtype="bfloat16", optimizer=slow)
        return [loss for loss, _ in small.train(batches)]

    np.testing.assert_allclose(losses("mosaic"), losses("xla"), rtol=5e-3)


@pytest.mark.parametrize("op", bench.OPS)
def test_kernels_at_real_sizes(op):
    """Every call that Llama-7B makes, with 2048 tokens, against the reference compiled by XLA."""
    for case in bench.OPS[op].cases(shapes.MODELS["llama7b"], 2048):
        found, expected = (
            bench.compiled_case(case, how)(*bench.random_arguments(case, 1)) for how in ("mosaic", "xla")
        )
        assert not bench.disagreement(found, expected), case.name


def test_a_run_fits_as_estimated(tmp_path, capsys):
    """`train` ends with the estimate beside what the device gave out at most."""
    train(config(output_dir=str(tmp_path), data="stdlib", max_steps=3, sample_tokens=0, eval_steps=0, save_steps=0))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("memory per device: estimated")]
    assert "too low" not in line
