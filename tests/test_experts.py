"""A mixture of experts: against transformers, whatever its files look like, and under every placement.

`fixtures/make_experts_reference.py` has how the reference was made. DESIGN of the tests: each silent mistake of a layer
with experts has a test here that fails when it is made; `MISTAKES` at the end makes them.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from small import CONFIG, Small, needs, plain_loss, quick_at, tokens, worst_relative
from test_engine import engine_gradients
from test_parity import close

from surojax import default_config
from surojax.assembly import architecture
from surojax.exchange.huggingface import model_fields
from surojax.exchange.model_tensors import SINGLE, Weights, check_tensors, named, stacks
from surojax.models import decoder
from surojax.models.experts import RouterLosses
from surojax.models.grouped import blocks_of, number_of_blocks, rows_of_block, sum_of_experts
from surojax.models.model import Compute, Recompute

with np.load(Path(__file__).parent / "fixtures" / "experts_reference.npz") as arrays:
    REFERENCE = dict(arrays)
CASES = sorted({name.split("/")[0] for name in REFERENCE})
EXPERTS, UNUSED, TIED = 7, 4, (5, 6)
LOSSES = RouterLosses(1.0, 0.1)  # those of the reference
ALL = {f"offload_{name}": True for name in ("residual", "optimizer", "master", "grads", "weights")}


def stored(case: str, what: str) -> dict[str, np.ndarray]:
    """The arrays of a case, by name."""
    start = f"{case}/{what}/"
    return {name.removeprefix(start): x for name, x in REFERENCE.items() if name.startswith(start)}


def apart(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as files of transformers 4 have them: of each expert."""
    found = {}
    for name, x in weights.items():
        before, is_of_experts, last = name.rpartition(".experts.")
        if not is_of_experts:
            found[name] = x
            continue
        halves = np.split(x, 2, axis=1) if last == "gate_up_proj" else [x]
        names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for half, of_all in zip(names, halves, strict=True):
            found |= {f"{before}.experts.{e}.{half}.weight": np.ascontiguousarray(w) for e, w in enumerate(of_all)}
    return found


def written(folder: Path, case: str, weights: dict[str, np.ndarray]) -> Path:
    """A model's folder."""
    folder.mkdir()
    (folder / "config.json").write_text(str(REFERENCE[f"{case}/config.json"]))
    safetensors.numpy.save_file(weights, folder / SINGLE)
    return folder


def config_of(case: str) -> decoder.DecoderConfig:
    c = default_config()
    c.model.update(model_fields(json.loads(str(REFERENCE[f"{case}/config.json"]))))
    return architecture(c)


def in_names(tree, model) -> dict[str, np.ndarray]:
    """Arrays of a tree like the weights, as the modules of transformers 5 have them."""
    found = named(jax.tree.map(np.asarray, tree), model)
    for name in [name for name in found if name.endswith(".experts.gate_proj.weight")]:
        before = name.removesuffix("gate_proj.weight")
        gate, up, down = (found.pop(f"{before}{part}_proj.weight") for part in ("gate", "up", "down"))
        found |= {f"{before}gate_up_proj": np.concatenate([gate, up], axis=1), f"{before}down_proj": down}
    return found


def without_ties(name: str, x: np.ndarray) -> np.ndarray:
    """A gradient in which that of the two equal experts is their sum: which of them is chosen, nobody says."""
    if not name.endswith(("mlp.gate.weight", "gate_up_proj", "experts.down_proj")):
        return x
    return np.concatenate([x[: TIED[0]], x[TIED[0] :].sum(axis=0, keepdims=True)])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("files", ["together", "apart"])
def test_equals_transformers(tmp_path, case, files):
    """Logits, loss, all gradients, the routers' losses and their gradients, through the engine."""
    weights = stored(case, "weight")
    folder = written(tmp_path / "model", case, apart(weights) if files == "apart" else weights)
    config = config_of(case)
    inputs, labels = REFERENCE[f"{case}/tokens"], REFERENCE[f"{case}/labels"]
    model = decoder.build(config)
    tensors = Weights(folder)
    check_tensors(tensors, model)
    params = stacks(tensors, model, "float32", jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for name, x in in_names(params, model).items():
        assert np.array_equal(x, weights[name]), name
    if files == "apart":
        return
    batch = inputs[None], labels[None]
    small = Small(config=config)
    small.state = small.state._replace(weights=params)
    graph = nnx.graphdef(nnx.eval_shape(lambda: decoder.Decoder(config, rngs=nnx.Rngs(0))))
    logits = jax.jit(lambda w: nnx.merge(graph, w)(inputs))(params)
    close(logits, REFERENCE[f"{case}/logits"], "logits")
    loss, grads = engine_gradients(small, batch)
    close(loss, REFERENCE[f"{case}/loss"], "loss")
    expected = stored(case, "grad")
    found = in_names(grads, model)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        close(without_ties(name, x), without_ties(name, expected[name]), f"gradient of {name}")
    with_losses = Small(config=config, auxiliary=LOSSES)
    with_losses.state = small.state
    _, of_both = engine_gradients(with_losses, batch)
    auxiliary = in_names(jax.tree.map(np.subtract, of_both, grads), model)
    for name, x in stored(case, "aux_grad").items():
        close(without_ties(name, auxiliary[name]), without_ties(name, x), f"gradient of the routers' losses of {name}")
    _, metrics = with_losses.step(with_losses.state, *with_losses.put(batch))
    close(metrics["auxiliary_loss"], np.mean(REFERENCE[f"{case}/balance"] + 0.1 * REFERENCE[f"{case}/z"]), "balance")
    chosen = np.asarray(metrics["statistics"]["blocks"].chosen_E)
    of_each, wanted = (without_ties("mlp.gate.weight", x.T) for x in (chosen, REFERENCE[f"{case}/chosen"]))
    assert np.array_equal(of_each, wanted)
    assert not chosen[:, UNUSED].any()
