"""Tensor parallelism with recipes, optimizers and transfers in 8 bits: a group equals one device with the same setting.

The scale of an operand must be that of one device exactly, since the rounding to 8 bits would hide a wrong one. Then
both round the same numbers, but for a float32 sum in another order that lies at the border between two of them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, normal, quick_at, target_names, tokens, worst_relative
from test_engine import ORDER_OF_SUMS
from test_tensor_parallel import ALL, moves_what_is_said

from pallas_kernels import nvfp4_format
from pallas_kernels.manual_axes import mark_varying, varying_axes
from surojax.models import decoder_model, linear_fp8
from surojax.models.lora import Lora
from surojax.models.model import Compute
from surojax.numerics.blockscaled import ALL_WHOLE, nvfp4_linear
from surojax.numerics.fp8 import E4M3
from surojax.numerics.quantized import is_quantized, scale_for
from surojax.numerics.recipes import BLOCK_SCALED, Precision
from surojax.optim.adamw8bit import Moments8bit, adamw8bit
from surojax.optim.normuon import normuon
from surojax.optim.reblock import reblocked
from surojax.parallel.collectives import device_number
from surojax.parallel.operands import operand_parts
from surojax.placement.layout import batch_sharding, specs
from surojax.placement.mesh import data_parallel, make_mesh
from surojax.planner import hlo, step_collectives, traffic
from surojax.run.checkpoint import Checkpoints
from surojax.run.on_disk import find
from surojax.run.restore import restore
from surojax.step.engine import loss_and_gradients
from surojax.step.state import Progress
from surojax.step.weights import quantise_with_one_scale

SITES = decoder_model.build(CONFIG).sites

WIDE = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=160, head_dim=16)
EXTRAS = dataclasses.replace(WIDE, attention_bias=True, qk_norm=True)
ADAPTED = dataclasses.replace(EXTRAS, lora=Lora(4, 8.0, target_names("all-linear")))
ONE_KV_HEAD = dataclasses.replace(EXTRAS, num_key_value_heads=1, num_hidden_layers=2)


LATENT = dataclasses.replace(WIDE, head_dim=0, layer_types="latent_attention", q_lora_rank=32, kv_lora_rank=32)
LATENT = dataclasses.replace(LATENT, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)


def in_recipe(recipe: str, **options) -> Compute:
    return Compute(precision=Precision(recipe=recipe, **options))


class FirstStep(NamedTuple):
    """What a device finds in a step from a new state."""

    loss: float
    grads: Any  # whole
    observed: np.ndarray | None  # largest magnitudes `[layers, sites]`


def first_steps(small: Small, sequence_len: int = 16) -> list[FirstStep]:
    """Of several batches."""
    plan = small.plan

    def gradients(weights, history, *batch):
        found = loss_and_gradients(small.engine, weights, *batch, progress=Progress(0, history))
        return found.loss, found.grads, found.progress.history

    spec = jax.tree.map(lambda x: x.sharding.spec, (plan.weights, plan.history))
    token_spec = batch_sharding(small.mesh).spec
    out = (jax.P(), specs(small.engine.layouts.master), spec[1])
    f = jax.jit(jax.shard_map(gradients, mesh=small.mesh, in_specs=(*spec, token_spec, token_spec), out_specs=out))
    done = []
    for seed in range(6):
        batch = small.put(tokens(2, 4, sequence_len, seed=seed))
        loss, grads, history = jax.device_get(f(small.state.weights, small.state.history, *batch))
        done.append(FirstStep(float(loss), grads, None if history is None else history[..., 0]))
    return done


@functools.cache
def on_one_device(config, recipe: str) -> list[FirstStep]:
    return first_steps(Small(config=config, compute=in_recipe(recipe)))


FP8 = [  # (model, recipe, devices of a group, placement)
    (ONE_KV_HEAD, "fp8_hybrid", 2, {"recompute_block": False}),
    (EXTRAS, "fp8_current", 4, {}),
    (ADAPTED, "fp8_current", 4, {}),
    (LATENT, "fp8_current", 2, {}),
]


@pytest.mark.parametrize("config, recipe, tp_size, placed", quick_at(FP8))
def test_float8_equals_one_device(config, recipe, tp_size, placed):
    """In some of six batches no number lies at a border of float8, where the last bit of a sum decides. Then all
    gradients agree to 1e-5, and observed magnitudes to float32's rounding; their scales are equal."""
    small = Small(tp_size, tp_size=tp_size, config=config, compute=in_recipe(recipe), **placed)
    pairs = list(zip(first_steps(small), on_one_device(config, recipe), strict=True))
    errors = [worst_relative(found.grads, expected.grads) for found, expected in pairs]
    assert min(errors) < ORDER_OF_SUMS and max(errors) < 0.1, errors
    found, expected = pairs[int(np.argmin(errors))]
    assert found.loss == pytest.approx(expected.loss, rel=ORDER_OF_SUMS)
    if expected.observed is not None:
        assert (expected.observed > 0).all()
        np.testing.assert_allclose(found.observed, expected.observed, rtol=1e-6)
        np.testing.assert_array_equal(scale_for(found.observed, E4M3), scale_for(expected.observed, E4M3))


def scaled_by(small: Small, monkeypatch) -> np.ndarray:
    """The largest magnitudes that scales were made of in a step, sorted, each once."""
    found = set()

    def recorded(absmax, *how):
        jax.debug.callback(lambda x: found.add(float(x)), absmax)
        return scale_for(absmax, *how)

    monkeypatch.setattr(linear_fp8, "scale_for", recorded)
    jax.block_until_ready(small.step(small.state, *small.put(tokens(1, 1, 16))))
    jax.effects_barrier()
    return np.sort(list(found))


@pytest.mark.full
def test_scales_are_made_of_the_magnitudes_of_a_whole_tensor(monkeypatch):
    """Of fp8_current, which keeps no history. Rounded with a part's scale, nearly all numbers would be the same."""
    how: Any = {"config": dataclasses.replace(ONE_KV_HEAD, num_hidden_layers=1), "compute": in_recipe("fp8_current")}
    expected = scaled_by(Small(**how), monkeypatch)
    found = scaled_by(Small(2, tp_size=2, **how), monkeypatch)
    assert len(expected) == SITES.number
    nearest = expected[np.abs(found[:, None] - expected[None, :]).argmin(axis=1)]
    np.testing.assert_allclose(found, nearest, rtol=1e-6)


def test_matrices_have_the_scales_of_one_device():
    """Of a group's and of `dp_shard`'s devices, each has a part with another largest magnitude."""
    small = Small(8, tp_size=4, zero_level=3, config=WIDE, compute=in_recipe("fp8_current"))
    (segment,) = small.run.model.segments
    layouts = small.engine.layouts.weights["blocks"]

    def growing(param) -> np.ndarray:
        rows = np.exp2(np.arange(param.shape[0]) / 4 + 1)
        return np.float32(rows if len(param.shape) == 1 else rows[:, None] * np.exp2(np.arange(param.shape[1]) / 4))

    def scales(w):
        return [
            x.scales
            for x in jax.tree.leaves(quantise_with_one_scale(segment.params, w, E4M3), is_leaf=is_quantized)
            if is_quantized(x)
        ]

    w = jax.tree.map(growing, segment.params)
    stored = jax.tree.map(lambda layout: layout.stored, layouts)
    found = jax.jit(jax.shard_map(scales, mesh=small.mesh, in_specs=(stored,), out_specs=jax.P()))(w)
    expected = [scale_for(np.max(x), E4M3) for x in jax.tree.leaves(w) if x.ndim == 2]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.full
def test_steps_in_float8():
    """2 x 2 x 2 devices against 4 without groups, and the same offloaded, to the bit.

    From the second step on weights differ in their last bits, and some are rounded to a neighbour in float8.
    """
    batches = [tokens(2, 8, 16, seed=i) for i in range(4)]
    how: Any = {"config": ONE_KV_HEAD, "compute": in_recipe("fp8_hybrid"), "zero_level": 3, "replicate": 2}
    expected = Small(4, **how).train(batches)
    found = Small(8, tp_size=2, **how).train(batches)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(found, expected, rtol=5e-3)
    quants = {"persistent_quants": True, "offload_quants": True}
    assert Small(8, tp_size=2, **how, **ALL, **quants).train(batches) == found


FLAT = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=128, head_dim=32, num_hidden_layers=1)


@pytest.mark.parametrize("recipe", BLOCK_SCALED)
@pytest.mark.full
def test_block_scaled_recipes_equal_one_device(recipe):
    """Blocks do not span two devices, so they are those of one device, with nvfp4's random numbers. Of the four devices
    two share each key/value head. In some of six batches no number lies at a border, as in float8."""
    small = Small(4, tp_size=4, config=FLAT, compute=in_recipe(recipe))
    pairs = list(zip(first_steps(small), on_one_device(FLAT, recipe), strict=True))
    errors = [worst_relative(found.grads, expected.grads) for found, expected in pairs]
    assert min(errors) < ORDER_OF_SUMS and max(errors) < 0.1, errors
    for found, expected in pairs:
        assert found.loss == pytest.approx(expected.loss, rel=ORDER_OF_SUMS)


PRODUCTS = {  # {case: (logical axes of the matrix, sizes of the mesh, how inputs, matrix and outputs are divided)}
    "columns": (("mlp", "embed"), {"tp_size": 2}, (jax.P(), jax.P("tp"), jax.P(None, "tp"))),
    "rows": (("embed", "mlp"), {"tp_size": 2}, (jax.P(None, "tp"), jax.P(None, "tp"), jax.P())),
    "tokens": (("mlp", "embed"), {"cp_size": 2}, (jax.P("cp"), jax.P(), jax.P("cp"))),
}


@pytest.mark.full
@pytest.mark.parametrize("case", quick_at([(case,) for case in PRODUCTS], 0))
def test_a_product_in_nvfp4_is_that_of_one_device(case, monkeypatch):
    """Its scales are made of the same magnitudes, and it is rounded with the same random numbers.

    A scale that is wrong by a power of two would change few numbers. Devices with other tokens rotate and round with
    other random numbers, so that only the forward pass is compared, and magnitudes before the rotation.
    """
    axes, sizes, (x_spec, w_spec, y_spec) = PRODUCTS[case]
    mesh = make_mesh(jax.devices()[:2], **sizes)
    magnitudes = set()

    def recorded(absmax):
        jax.debug.callback(lambda top: magnitudes.add(float(top)), absmax)
        return factors(absmax)

    factors = nvfp4_format.factors
    monkeypatch.setattr(nvfp4_format, "factors", recorded)
    shapes = ((64, 64), (128, 64), (64, 128))
    x, w, g = (normal(i, (m, n)) * jnp.linspace(1, 4, m * n).reshape(m, n) for i, (m, n) in enumerate(shapes))

    def product(x, w, g, parts=ALL_WHOLE, device=0):
        f = functools.partial(nvfp4_linear, seed=jnp.uint32(7 + device), parts=parts, emulate=True)
        y, backward = jax.vjp(f, x, w)
        _, of_frozen = jax.vjp(lambda x: f(x, w, frozen=True), x)
        return y, *backward(g), *of_frozen(g)

    def of_device(x, w, g):
        parts = operand_parts(w.shape, axes)
        y, *gradients = product(x, w, mark_varying(g, varying_axes(x) | varying_axes(w)), parts, device_number("cp")[0])
        return jax.lax.psum(y, "tp") if case == "rows" else y, *gradients

    def run(f):
        found = jax.block_until_ready(jax.jit(f)(x, w, g))
        jax.effects_barrier()
        of_run = set(magnitudes)
        magnitudes.clear()
        return found, of_run

    expected, tops = run(product)
    found, of_parts = run(
        jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=(x_spec, w_spec, y_spec),
            out_specs=(y_spec, x_spec, w_spec, x_spec),
        )
    )
    compared = 1 if case == "tokens" else len(expected)
    for a, b in zip(found[:compared], expected[:compared], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # float32, another order of sums
    assert len(tops) == 5 and len(tops & of_parts) == (3 if case == "tokens" else 5)


def test_a_nan_is_in_the_scale_of_every_device():
    """Whichever device has it."""
    mesh = make_mesh(jax.devices()[:2], tp_size=2)

    def largest(tops):
        return operand_parts((32, 32), ("embed", "mlp")).inputs.largest(tops)

    tops = jnp.asarray([jnp.nan, 2.0, 3.0, 1.0, jnp.nan, 4.0])  # three numbers on each
    found = jax.jit(jax.shard_map(largest, mesh=mesh, in_specs=jax.P("tp"), out_specs=jax.P("tp")))(tops)
    np.testing.assert_array_equal(found, [np.nan, np.nan, 4.0] * 2)


@pytest.mark.full
def test_groups_gather_operands_in_8_bits():
    moves_what_is_said(Small(8, tp_size=4, config=WIDE, compute=in_recipe("fp8_hybrid"), zero_level=3))


# --- optimizers -------------------------------------------------------------------------------------------------------

ROWS = dataclasses.replace(CONFIG, intermediate_size=512, num_hidden_layers=2)  # in blocks of 256, of 128 on 4 devices
BATCHES = [tokens(2, 8, 24, seed=i) for i in range(4)]


@functools.cache
def in_groups(optimizer, **placed) -> list[tuple[float, float]]:
    """Losses and gradient norms of two groups of four devices."""
    return Small(8, config=ROWS, optimizer=optimizer, tp_size=4, zero_level=3, **placed).train(BATCHES)


@pytest.mark.parametrize("optimizer", quick_at([(normuon,), (adamw8bit,)]))
def test_optimizers_update_divided_matrices(optimizer):
    """adamw8bit rounds moments at random, on each device with numbers of its own; the first update has none to read."""
    how: Any = {"config": ROWS, "optimizer": optimizer}
    exact = len(BATCHES) if optimizer is normuon else 2
    expected = Small(**how).train(BATCHES)
    found = in_groups(optimizer)
    np.testing.assert_allclose(found[:exact], expected[:exact], rtol=ORDER_OF_SUMS)
    np.testing.assert_allclose(found, expected, rtol=5e-3)


@pytest.mark.full
def test_normuon_gathers_what_is_said():
    moves_what_is_said(Small(8, tp_size=4, zero_level=3, optimizer=normuon))


def decoded(state: Moments8bit) -> tuple[np.ndarray, np.ndarray]:
    """(m, sqrt(v)) in float64, as pallas_kernels/adamw8bit_update.py defines the codes."""

    def numbers(codes, scales, top: int) -> np.ndarray:
        x = np.asarray(codes, np.float64) / top
        return x * np.abs(x) * np.repeat(np.asarray(scales, np.float64), x.shape[-1] // scales.shape[-1], axis=-1)

    return numbers(state.m, state.m_scale, 127), numbers(state.v, state.v_scale, 255)


def test_blocks_of_another_size():
    rng = np.random.default_rng(0)
    m, v = rng.integers(-127, 128, (3, 96)).astype(np.int8), rng.integers(0, 256, (3, 96)).astype(np.uint8)
    m_scale, v_scale = (rng.random((3, 2), np.float32) * 10.0 ** rng.integers(-6, 1, (3, 2)) for _ in range(2))
    old = Moments8bit(m, np.float32(m_scale), v, np.float32(v_scale))
    smaller = reblocked(old, 6)
    assert [x.dtype for x in smaller] == [x.dtype for x in old]
    for a, b in zip(decoded(smaller), decoded(old), strict=True):
        np.testing.assert_array_equal(a, b)
    again = reblocked(smaller, 2)
    jax.tree.map(np.testing.assert_array_equal, again, old)
    others = reblocked(old, 3)  # the middle one spans both old ones
    for a, b, top in zip(decoded(others), decoded(old), (127, 255), strict=True):
        largest = np.repeat(np.abs(b).reshape(3, 3, 32).max(axis=-1), 32, axis=-1)
        scale = np.repeat(np.asarray(others.m_scale if top == 127 else others.v_scale), 32, axis=-1)
        assert (scale >= largest * (1 - 1e-6)).all()
        roots = np.sqrt(np.abs(np.stack([a, b])) / scale)
        assert (np.abs(roots[0] - roots[1]) <= 1.001 / top).all() and (np.sign(a) * np.sign(b) >= 0).all()
    assert (np.asarray(others.v)[v > 0] > 0).all()


@pytest.mark.full
def test_moments_in_8_bits_move_between_layouts(tmp_path):
    """From one device to 2 x 4 whose blocks are smaller, and back: equal numbers there, equal bits back here."""
    how: Any = {"config": ROWS, "optimizer": adamw8bit}
    one, eight = Small(**how), Small(8, tp_size=4, zero_level=3, offload_optimizer=True, **how)
    one.train(BATCHES[:2])
    saved = one.state
    with Checkpoints(tmp_path / "one", save_total_limit=1) as checkpoints:
        checkpoints.save(saved, {"step": 2})
    there = restore(find(tmp_path / "one"), eight.plan)
    assert jax.tree.map(lambda x: x.sharding, there) == jax.tree.map(lambda x: x.sharding, eight.plan)
    w_down = there.moments["blocks"]["mlp"]["w_down"], saved.moments["blocks"]["mlp"]["w_down"]
    assert [x.m_scale.shape[-1] for x in w_down] == [4, 2]
    for a, b in zip(*map(decoded, w_down), strict=True):
        np.testing.assert_array_equal(a, b)
    with Checkpoints(tmp_path / "eight", save_total_limit=1) as checkpoints:
        checkpoints.save(there, {"step": 2})
    back = restore(find(tmp_path / "eight"), one.plan)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), back, saved)


# --- transfers --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_state_in_files(tmp_path):
    """Equal to the bit to the same layout in memory; its checkpoint is one for any layout."""
    how: Any = {"tp_size": 2, "zero_level": 3}
    memory = Small(4, **how)
    files = Small(
        4, **how, **ALL | dict.fromkeys(("offload_optimizer", "offload_master"), "nvme"), nvme_path=str(tmp_path)
    )
    expected = memory.train(BATCHES[:3])
    assert files.train(BATCHES[:3]) == expected
    with Checkpoints(tmp_path / "saved", save_total_limit=1) as checkpoints:
        checkpoints.save(files.state, {"step": 3})
    found = restore(find(tmp_path / "saved"), Small().plan)
    for a, b in ((found.master, memory.state.master), (found.moments, memory.state.moments)):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), a, b)


BLOCKS = dataclasses.replace(CONFIG, intermediate_size=256, head_dim=64, num_hidden_layers=2)  # of 128 on 1 and on 2


@pytest.mark.parametrize(
    "quantized",
    [{"zero_quantized_weights": "fp8"}, {"zero_quantized_gradients": True}],
)
@pytest.mark.full
def test_what_is_sent_in_8_bits(quantized):
    """As between two devices without groups: the same blocks of the same numbers, of which a few lie at a border."""
    how: Any = {"config": BLOCKS, "zero_level": 3}
    plain = first_steps(Small(2, **how))[0].grads
    expected = first_steps(Small(2, **how, **quantized))[0].grads
    small = Small(4, tp_size=2, **how, **quantized)
    found = first_steps(small)[0].grads

    for alone, over_tp, unquantized in zip(*map(jax.tree.leaves, (expected, found, plain)), strict=True):
        largest = np.abs(alone).max()
        apart = np.abs(over_tp - alone) / largest
        # Sums over tp round otherwise in float32: where that crosses a border of 8 bits, by one step of its block.
        assert np.mean(apart > 1e-5) < 1e-3 and apart.max() < 1.01 / 127
        if alone.ndim == 3:  # matrices of layers
            assert np.mean(np.abs(unquantized - alone) / largest > 1e-5) > 0.5
    batch = jax.ShapeDtypeStruct((2, data_parallel(small.mesh), 24), np.int32)
    compiled = hlo.parse_module(small.step.lower(small.plan, batch, batch).compile().as_text())
    sent = {(x.op, x.axis): x.bytes for x in hlo.collectives([(compiled, 1)], small.mesh.shape)}
    said, more = (
        step_collectives.collective_bytes(small.run, traffic.BatchShape(sequences=1, sequence_len=24, microbatches=n))
        for n in (2, 3)
    )
    gathers = "all-gather", "dp_shard"
    said[gathers] += (more[gathers] - said[gathers]) // 4  # a layer for a forward pass that does not come
    for op in ("all-gather", "reduce-scatter", "all-to-all"):
        assert sent.get((op, "dp_shard"), 0) == pytest.approx(said.get((op, "dp_shard"), 0), rel=0.02, abs=100)
