"""GLM-4.7-Flash, DeepSeek-V2 and -V3 against transformers in float64 (`fixtures/make_deepseek_reference.py`)."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import quick_at
from test_experts import apart
from test_qwen3_5 import GROWN, ByLayer, assert_close, in_float64, mean_loss  # noqa: F401

from surojax import default_config
from surojax.assembly.from_config import architecture
from surojax.config.checks import check
from surojax.exchange.huggingface import model_fields
from surojax.exchange.model_tensors import shapes, tensor_name
from surojax.models import decoder_model
from surojax.models.decoder_config import DecoderConfig
from surojax.models.model import Model
from surojax.optim.adamw import adamw
from surojax.optim.optimizer import TensorContext, scalars
from surojax.placement.layout import Layout

with np.load(Path(__file__).parent / "fixtures" / "deepseek_reference.npz") as arrays:
    REFERENCE = dict(arrays)
CASES = ("glm", "glm_tied", "glm_groups", "v2", "v2_lite", "v2_tied", "v3", "v3_half", "v3_tied")
BIAS = "gate.e_score_correction_bias"


def stored(case: str, what: str) -> dict[str, np.ndarray]:
    """The arrays of a case, by name."""
    start = f"{case}/{what}/"
    return {name.removeprefix(start): x for name, x in REFERENCE.items() if name.startswith(start)}


def given(case: str) -> dict[str, Any]:
    return json.loads(str(REFERENCE[f"{case}/config.json"]))


def config_of(case: str, **changes) -> DecoderConfig:
    c = default_config()
    c.model.update(model_fields(given(case) | changes))
    check(c)
    return architecture(c)


@functools.cache
def model_of(case: str) -> Model:
    return decoder_model.build(config_of(case))


def together(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of transformers 5's modules under our names: gate and up of all experts apart."""
    found = {}
    for name, x in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            halves = np.split(x, 2, axis=1)
            found |= {
                name.replace("gate_up_proj", f"{part}_proj.weight"): half
                for part, half in zip(("gate", "up"), halves, strict=True)
            }
        else:
            found[f"{name}.weight" if name.endswith("experts.down_proj") else name] = x
    return found


def params_of(layers: ByLayer, case: str) -> dict:
    return layers.named({name: x.astype(np.float64) for name, x in together(stored(case, "weight")).items()})


def loss_and_gradients(layers: ByLayer, case: str):
    """The function of parameters."""
    tokens, labels = (jnp.asarray(REFERENCE[f"{case}/{name}"]) for name in ("tokens", "labels"))
    return jax.value_and_grad(lambda params: mean_loss(layers.logits(params, tokens), labels))


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 2))
def test_logits_are_those_of_transformers(in_float64, case):  # noqa: F811
    layers = ByLayer(model_of(case))
    found = layers.logits(params_of(layers, case), jnp.asarray(REFERENCE[f"{case}/tokens"]))
    assert_close(np.asarray(found), REFERENCE[f"{case}/logits"], "logits")


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_transformers(in_float64, case):  # noqa: F811
    """Of all parameters; the bias of the choice has none."""
    layers = ByLayer(model_of(case))
    loss, grads = loss_and_gradients(layers, case)(params_of(layers, case))
    assert_close(np.asarray(loss), REFERENCE[f"{case}/loss"], "loss")
    expected = together(stored(case, "grad"))
    names = layers.of_each(lambda param, segment, l: tensor_name(param, segment, l), lambda param: tensor_name(param))
    found = dict(zip(jax.tree.leaves(names), map(np.asarray, jax.tree.leaves(grads)), strict=True))
    biases = {name: found.pop(name) for name in [*found] if name.endswith(BIAS)}
    assert bool(biases) == (not case.startswith("v2")) and not any(x.any() for x in biases.values())
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert_close(x, expected[name], name)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_steps_of_adamw_are_those_of_torch(in_float64, case):  # noqa: F811
    """Twenty."""
    layers = ByLayer(model_of(case))
    params, both = params_of(layers, case), loss_and_gradients(layers, case)
    optimizer = adamw(lambda done: jnp.float64(1e-3), max_grad_norm=0, m_dtype="float64", v_dtype="float64")
    declared, structure = jax.tree.flatten(layers.of_each(lambda param, segment, l: param, lambda param: param))
    states = [optimizer.rule(param).init(param.shape, 1) for param in declared]

    @jax.jit
    def update(params, grads, states, step):
        context = TensorContext(scalars(optimizer, step, 1.0), Layout(jax.P(), jax.P()), jnp.zeros(2, jnp.uint32))
        arrays = zip(declared, structure.flatten_up_to(params), structure.flatten_up_to(grads), states, strict=True)
        updated = [optimizer.rule(p).apply(x, g, state, context, None)[1:] for p, x, g, state in arrays]
        params, states = zip(*updated, strict=True)
        return structure.unflatten(params), list(states)

    losses = []
    for step in range(len(REFERENCE[f"{case}/losses"])):
        loss, grads = both(params)
        losses.append(loss)
        params, states = update(params, grads, states, jnp.int32(step))
    assert_close(np.asarray(losses), REFERENCE[f"{case}/losses"], "losses of steps", GROWN)


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 0))
def test_answers_are_those_of_transformers(in_float64, case):  # noqa: F811
    """Token by token with a cache of latents; behind padding, which is not seen."""
    layers = ByLayer(model_of(case))
    params = params_of(layers, case)
    prompt, answer = REFERENCE[f"{case}/tokens"][:, :5], REFERENCE[f"{case}/answer"]
    padding, length = 2, 7 + answer.shape[1]
    tokens = np.pad(prompt, ((0, 0), (padding, 0)), constant_values=1)
    caches, first = layers.empty_caches(len(prompt), length), jnp.full(len(prompt), padding)
    found = []
    for start in (0, *range(padding + 5, length - 1)):
        tokens = np.asarray(layers.next_logits(params, tokens, caches, start, first)).argmax(axis=-1)[:, None]
        found.append(tokens)
    np.testing.assert_array_equal(np.concatenate(found, axis=1), answer)
