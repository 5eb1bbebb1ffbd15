"""What a config says is what a step does: each setting of the optimizers, the loss and the evaluation by hand.

Every field has a value of its own, so that none can be taken for another. Formulas here are written out in numpy, from
the papers; gradients are `jax.grad` of the plain model.
"""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import drawn_params, quick_at, tokens, vectors_drawn

from surojax.assembly import from_config as from_config_module
from surojax.assembly.from_config import architecture, from_config
from surojax.config.checks import check
from surojax.config.fields import default_config
from surojax.data.batches import evaluation_batches
from surojax.data.cache import Corpus
from surojax.data.run_data import Evaluated
from surojax.data.samples import Windows
from surojax.models.decoder import Decoder
from surojax.objectives.objective import REFERENCE
from surojax.optim import normuon as muon
from surojax.optim.adamw import Moments
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import make_mesh
from surojax.placement.param import OUTER
from surojax.step.gradients import Sums, outer_sums
from surojax.step.weights import Layers
from surojax.training.evaluation import Evaluation

STEPS = 4
BATCH = tokens(1, 2, 16)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
}
UPDATE = {
    "learning_rate": 0.03,
    "final_lr_fraction": 0.25,
    "weight_decay": 2.0,
    "max_grad_norm": 0.125,
    "adamw_beta1": 0.7,
    "adamw_beta2": 0.6,
    "adamw_epsilon": 1e-3,  # as large as the root of a second moment
    "muon_learning_rate": 0.02,
    "muon_momentum": 0.8,
    "muon_beta2": 0.55,
    "muon_ns_steps": 3,
    "z_loss": 0.05,
    "lmhead_chunks": 4,
    "opt_m_dtype": "bfloat16",
    "opt_v_dtype": "float32",
}
# Settings of the schedule, and the learning rate of each of the four steps as a fraction of the peak.
SCHEDULES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "adamw": ({"lr_scheduler_type": "wsd", "warmup_steps": 2, "cooldown_steps": 1}, [0.5, 1, 1, 0.25]),
    "adamw8bit": ({"lr_scheduler_type": "cosine"}, [1, 0.8125, 0.4375, 0.25]),
    "normuon": ({"lr_scheduler_type": "linear", "warmup_ratio": 0.25}, [1, 1, 0.625, 0.25]),
}


def config(**settings):
    c = default_config()
    c.model.update(SIZES)
    of_optimizer = {k: v for k, v in UPDATE.items() if settings.get("optimizer") == "normuon" or "muon" not in k}
    c.update({"model_dtype": "float32", "sequence_len": 16, "max_steps": STEPS} | of_optimizer | settings)
    check(c)
    return c


MESH = make_mesh(jax.devices()[:1])
GRAPH = nnx.graphdef(nnx.eval_shape(lambda: Decoder(architecture(config()), rngs=nnx.Rngs(0))))


@jax.jit
def gradients(params):
    """Of the mean over labels of loss + z_loss lse^2, by reverse mode of the plain model."""
    inputs, labels = (jnp.asarray(x[0]) for x in BATCH)

    def total(params):
        logits = nnx.merge(GRAPH, params)(inputs)
        lse = jax.nn.logsumexp(logits, axis=-1)
        nats = lse - jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(labels >= 0, nats + UPDATE["z_loss"] * lse**2, 0)) / jnp.sum(labels >= 0)

    return jax.grad(total)(params)


def adamw(p, g, m, v, *, done: int, fraction: float, decay: float):
    """(p, m, v) after a step (Kingma and Ba 2015; Loshchilov and Hutter 2019); g: clipped."""
    b1, b2, lr = UPDATE["adamw_beta1"], UPDATE["adamw_beta2"], UPDATE["learning_rate"] * fraction
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    c1, c2 = 1 - b1 ** (done + 1), 1 - b2 ** (done + 1)
    return p - lr * (m / c1 / (np.sqrt(v / c2) + UPDATE["adamw_epsilon"]) + decay * p), m, v


def polar(x, steps: int):
    """Newton-Schulz iterations of odd polynomials (Amsel et al. 2025, Algorithm 1) of a matrix."""
    y = x / (muon.SAFETY * np.linalg.norm(x))
    for a, b, c in muon.coefficients(steps):
        y = a * y + b * (y @ y.T @ y) + c * (y @ y.T @ y @ y.T @ y)
    return y


def normuon(p, g, m, rows, *, fraction: float):
    """(p, m, rows, what of p's update is near a jump) of one matrix after a step (Li et al. 2025)."""
    lr, b1, b2 = UPDATE["muon_learning_rate"] * fraction, UPDATE["muon_momentum"], UPDATE["muon_beta2"]
    m = b1 * m + (1 - b1) * g
    o = polar(m, UPDATE["muon_ns_steps"])
    rows = b2 * rows + (1 - b2) * np.mean(o**2, axis=1)
    o = o / (np.sqrt(rows)[:, None] + 1e-8)
    o = o * (0.2 * math.sqrt(o.size) / np.linalg.norm(o))
    new = p - lr * (o + UPDATE["weight_decay"] * np.where(o * p > 0, p, 0))
    return new, m, rows, np.abs(o) < 1e-3  # whose sign decides whether the weight decays


def in_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(tree))


def decoded(state):
    """(m, v) of a matrix of adamw8bit from its codes, float64."""
    blocks = lambda codes, scale: codes.reshape(*scale.shape, -1) * np.abs(codes.reshape(*scale.shape, -1))
    m = blocks(state.m, state.m_scale) / 127**2 * state.m_scale[..., None]
    root = blocks(state.v, state.v_scale) / 255**2 * state.v_scale[..., None]
    return m.reshape(state.m.shape), (root**2).reshape(state.v.shape)


def largest_in_blocks(x, scale):
    return np.abs(x).reshape(*scale.shape, -1).max(-1)


def check_tensor(name: str, part: str, old, new, g, done: int, fraction: float, decay: float):
    """Holds one tensor's step, of all layers, to the formulas. old, new: (master, state)."""
    (p, before), (found, after) = old, new
    rule = name if decay and (name == "adamw8bit" or part == "blocks") else "adamw"
    near_jump = np.zeros(p.shape, bool)
    if rule == "normuon":
        layers = [normuon(*layer, fraction=fraction) for layer in zip(p, g, before.m, before.rows, strict=True)]
        expected, m, rows, near_jump = (np.stack(column) for column in zip(*layers, strict=True))
        np.testing.assert_allclose(after.rows, rows, rtol=1e-3)
    elif rule == "adamw8bit":
        expected, m, v = adamw(p, g, *decoded(before), done=done, fraction=fraction, decay=decay)
        np.testing.assert_allclose(after.m_scale, largest_in_blocks(m, after.m_scale), rtol=1e-4)
        np.testing.assert_allclose(after.v_scale, largest_in_blocks(np.sqrt(v), after.v_scale), rtol=1e-4)
    else:
        m, v = before[1]
        expected, m, v = adamw(p, g, m, v, done=done, fraction=fraction, decay=decay)
        after = after[1]
        np.testing.assert_allclose(after.v, v, rtol=1e-4, atol=1e-9)
    if rule != "adamw8bit":
        np.testing.assert_allclose(after.m, m, rtol=2**-8, atol=1e-6)  # stored in bfloat16
    # Gradients of two programs differ by 1e-6 of the largest; three iterations make at most 130 times that of them.
    tolerance = UPDATE["learning_rate"] * (1e-3 if rule == "normuon" else 1e-4)
    assert np.max(np.abs(found - expected)[~near_jump]) < tolerance and near_jump.mean() < 0.05


@pytest.mark.full
@pytest.mark.parametrize("name", quick_at([(name,) for name in SCHEDULES], 0))
def test_a_step_is_the_update_that_the_config_says(name):
    """Four steps, each from the state that it found: master weights and moments."""
    changes, fractions = SCHEDULES[name]
    run = from_config(config(optimizer=name, **changes), MESH, total_steps=STEPS)
    with vectors_drawn():
        state = run.init_state(0)
    batch = jax.device_put(BATCH, batch_sharding(MESH))
    step = run.train_step()
    for done, fraction in enumerate(fractions):
        grads = in_float64(gradients(state.weights))
        norm = math.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grads)))
        assert norm > 1.1 * UPDATE["max_grad_norm"]
        old = in_float64((state.master, state.moments))
        state, metrics = step(state, *batch)
        new = in_float64((state.master, state.moments))
        assert float(metrics["lr"]) == pytest.approx(UPDATE["learning_rate"] * fraction)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
        for part in ("blocks", "outer"):
            masters, structure = jax.tree.flatten(old[0][part])
            others = (new[0][part], old[1][part], new[1][part], grads[part])
            for p, found, before, after, g in zip(masters, *map(structure.flatten_up_to, others), strict=True):
                decay = UPDATE["weight_decay"] if p.ndim - (part == "blocks") > 1 else 0
                clipped = g * UPDATE["max_grad_norm"] / norm
                check_tensor(name, part, (p, before), (found, after), clipped, done, fraction, decay)


DTYPES = ("model_dtype", "master_dtype", "accum_dtype", "opt_m_dtype", "opt_v_dtype")


@pytest.mark.parametrize("name", DTYPES)
def test_each_dtype_is_that_of_its_arrays(name):
    """One in bfloat16, all others in float32: work weights, master weights, accumulators, both moments."""
    run = from_config(config(**dict.fromkeys(DTYPES, "float32") | {name: "bfloat16"}), MESH, total_steps=STEPS)
    spec = jax.tree.map(lambda x: x.sharding.spec, run.plan.weights)
    (segment,) = run.model.segments

    def make(weights):
        layer = Layers(run.engine, [segment], weights).fetch_first(segment.name, segment.variants[0])
        return Sums(run.engine, segment).new(layer), outer_sums(run.engine, weights[OUTER])

    sums = jax.eval_shape(jax.shard_map(make, mesh=MESH, in_specs=(spec,), out_specs=jax.P()), run.plan.weights)
    adam = [x for x in jax.tree.leaves(run.plan.moments, is_leaf=lambda x: isinstance(x, Moments)) if x]
    arrays = (run.plan.weights, run.plan.master, sums, [x.m for x in adam], [x.v for x in adam])
    found = {what: {str(x.dtype) for x in jax.tree.leaves(tree)} for what, tree in zip(DTYPES, arrays, strict=True)}
    assert found == {other: {"float32"} for other in DTYPES} | {name: {"bfloat16"}}


def test_the_engine_has_the_settings_that_change_no_number():
    run = from_config(config(recompute_block=False), MESH, total_steps=STEPS)
    assert (run.engine.lmhead_chunks, run.engine.recompute_block, run.engine.objective.z_loss) == (4, False, 0.05)


def test_evaluation_is_a_mean_over_tokens_and_its_bits_are_over_bytes():
    """101 tokens of 60 bytes: 7 windows, of which the last has 4 labels, in batches of 4 windows on 2 devices. Every
    token but the first counts once, whatever fills up the last batch. 1e-5: order of float32 sums."""
    mesh = make_mesh(jax.devices()[:2])
    c = config(per_device_batch_size=2)
    run = from_config(c, mesh, total_steps=STEPS)
    ids = np.random.default_rng(0).integers(0, 64, 101)
    windows = Windows(Corpus(ids.astype(np.uint16), 60, "", "held out"), 16, with_rest=True)
    batches = list(evaluation_batches(windows, batch_size=4))
    assert [b["inputs"].shape for b in batches] == [(4, 16)] * 2
    evaluate = Evaluation(c, run, mesh, [Evaluated("", batches, 60 / windows.num_labels)])
    params = drawn_params(architecture(c), 0, times=5)  # losses of tokens that are not all alike
    (found,) = evaluate(jax.device_put(params, jax.tree.map(lambda p: p.sharding, run.plan.weights)))

    windows = np.zeros((7, 16), np.int32)
    windows.ravel()[:100] = ids[:-1]
    logits = np.asarray(jax.jit(lambda params: nnx.merge(GRAPH, params)(windows))(params), np.float64)
    logits = logits.reshape(-1, 64)[:100]
    nats = np.log(np.exp(logits).sum(-1)) - logits[np.arange(100), ids[1:]]
    assert found["loss"] == pytest.approx(nats.mean(), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats.sum() / 60 / math.log(2), rel=1e-5)
    of_batches = nats[:64].mean(), nats[64:].mean()
    assert abs(np.mean(of_batches) / nats.mean() - 1) > 1e-3  # a mean over batches is another number


@pytest.mark.parametrize(
    "fields, by_layer, reads, is_computed",
    [
        ({}, False, REFERENCE, True),
        ({"lora": False}, False, REFERENCE, False),
        ({}, False, "labels", False),
        ({"precompute_ref_log_probs": True}, False, REFERENCE, False),
        ({"lora_adapter": "folder"}, False, REFERENCE, False),
        ({"modules_to_save": "embed_tokens"}, False, REFERENCE, False),
        ({"pp_size": 2}, False, REFERENCE, False),
        ({}, True, REFERENCE, False),
    ],
)
def test_when_a_step_computes_its_reference(fields, by_layer, reads, is_computed):
    """The model without its adapters, unless another model is the reference, or stages or files are in the way."""
    c = default_config()
    c.model.update(SIZES)
    c.update({"lora": True, "lora_rank": 2} | fields)
    objective, table = SimpleNamespace(targets=(reads,)), SimpleNamespace(by_layer=by_layer)
    found = from_config_module._reference(c, objective, table)  # type: ignore[arg-type]
    assert (found is not None) == is_computed
    assert found is None or found.num_trained_parameters == found.num_parameters


@pytest.mark.parametrize(
    "fields, has", [({}, False), ({"router_z_loss_coef": 0.1}, True), ({"router_aux_loss_coef": 0.1}, True)]
)
def test_router_losses_of_a_config(fields, has):
    c = default_config()
    c.update({"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0} | fields)
    assert (from_config_module._router_losses(c) is not None) == has
