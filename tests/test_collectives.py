"""Collectives: other ways to gather and reduce give the same numbers, or numbers as far off as 8 bits must be."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, REPLICATED, Small, quick_at, tokens, worst_relative
from test_engine import ORDER_OF_SUMS, compiled_text, computations, engine_gradients, reference

from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import from_config
from surojax.assembly.xla_options import compiler_options
from surojax.config.checks import check
from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.inference.sample import generate
from surojax.models import decoder_model
from surojax.numerics.quantized import DTYPES, block_size, dequantise, dequantise_all, is_quantized, quantise
from surojax.parallel import collectives
from surojax.placement import table as placement
from surojax.placement.home import HOST
from surojax.placement.layout import Layout
from surojax.placement.mesh import DATA, SHARD, make_mesh
from surojax.placement.param import Kind, Param
from surojax.planner import check_fit, footprint
from surojax.planner.traffic import BatchShape
from surojax.step.first_state import work_weights
from surojax.step.state import shardings
from surojax.step.state_plan import bytes_per_device

BATCHES = [tokens(2, 8, 24, seed=i) for i in range(10)]
SHAPES = [(5, 256), (3, 80), (4, 131), (2, 3, 160), (7, 2 * 139), (2, 5), (3, 1)]
F32 = 2.0**-23  # what one float32 operation may lose, relative


# -- Numbers in 8 bits ------------------------------------------------------------------------------------------------


def blocks(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:-1], -1, block_size(x.shape[-1]))


def limit(x: np.ndarray, kind: str) -> np.ndarray:
    """The most that quantising may move each number: half a step, and float32's rounding of scale and product.

    int8 has steps of absmax / 127. e4m3 has steps of 1/8 of the power of two below a number, so half of one is at most
    1/16 of the number; below 2^-6 (of 448) its numbers are 2^-9 apart.
    """
    largest = np.broadcast_to(np.abs(blocks(x)).max(-1, keepdims=True), blocks(x).shape).reshape(x.shape)
    half = largest / 127 / 2 if kind == "int8" else np.maximum(np.abs(x) / 16, largest / 448 * 2.0**-10)
    return half + 4 * F32 * largest


@pytest.mark.full(after=4)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_at_most_half_a_step(shape, kind):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * np.logspace(-6, 3, shape[0]).reshape(
        -1, *[1] * (len(shape) - 1)
    ).astype(np.float32)
    q = jax.jit(lambda x: quantise(x, DTYPES[kind]))(x)
    assert q.values.dtype == DTYPES[kind] and q.values.shape == shape
    assert q.scales.dtype == jnp.float32 and q.scales.shape == (*shape[:-1], shape[-1] // block_size(shape[-1]))
    error = np.abs(np.asarray(dequantise(q, jnp.float32)) - x)
    assert (error <= limit(x, kind)).all()
    assert error.max() > 0 or shape[-1] == 1  # a bound that nothing comes near would hold for anything


def test_blocks_are_whole():
    assert [block_size(n) for n in (4096, 128, 11008, 160, 80, 96, 20, 1)] == [128, 128, 128, 80, 80, 96, 20, 1]
    assert block_size(131) == 131 and block_size(2 * 139) == 2 * 139  # no divisor from 32 to 128: a scale a row


@pytest.mark.parametrize("kind", DTYPES)
def test_zeros_and_tiny_numbers(kind):
    x = np.zeros((2, 256), np.float32)
    x[1, :128] = 1e-38  # absmax / 127 would be subnormal, which is flushed to zero on some devices
    q = quantise(jnp.asarray(x), DTYPES[kind])
    y = np.asarray(dequantise(q, jnp.float32))
    assert (np.asarray(q.scales) > 0).all() and np.isfinite(y).all()
    assert (y[0] == 0).all() and (np.abs(y[1] - x[1]) <= 2e-38).all()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_not_lost(kind, bad):
    """Its block is not finite, so loss and gradient norm are not; other blocks are as they were."""
    x = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)
    again = lambda x: np.asarray(dequantise(quantise(jnp.array(x), DTYPES[kind]), jnp.float32))
    fine = again(x)
    x[0, 3] = bad
    y = again(x)
    assert not np.isfinite(y[0, :128]).any()
    np.testing.assert_array_equal(y.reshape(4, 128)[1:], fine.reshape(4, 128)[1:])


# -- Reductions -------------------------------------------------------------------------------------------------------


@functools.cache
def terms():
    """Each of 8 devices' gradients: matrices cut along either dimension, a vector, and a leaf that is kept whole."""
    rng = np.random.default_rng(1)
    shapes = {"rows": (16, 160), "columns": (3, 8 * 40), "vector": (24,), "whole": (5, 7)}
    return {name: rng.standard_normal((8, *shape)).astype(np.float32) for name, shape in shapes.items()}


LAYOUTS = {
    "rows": Layout(jax.P(SHARD), jax.P()),
    "columns": Layout(jax.P(None, SHARD), jax.P()),
    "vector": Layout(jax.P(SHARD), jax.P()),
    "whole": REPLICATED,
}


def scattered(reduce, tree=None) -> dict[str, np.ndarray]:
    """What 8 devices have after `collectives.reduce_scatter` of `terms`, or of some of them, put together."""
    mesh, tree = make_mesh(jax.devices()), terms() if tree is None else tree
    layouts = {name: LAYOUTS[name] for name in tree}
    specs = {name: layout.stored for name, layout in layouts.items()}
    kinds = {name: Kind.VECTOR if name == "vector" else Kind.MATRIX for name in tree}
    params = {name: Param(name, terms()[name].shape[1:], (), kind) for name, kind in kinds.items()}
    local = lambda tree: collectives.reduce_scatter(jax.tree.map(lambda x: x[0], tree), params, layouts, reduce)
    f = jax.shard_map(local, mesh=mesh, in_specs=jax.P(SHARD), out_specs=specs)
    return jax.tree.map(np.asarray, jax.jit(f)(tree))


def test_all_to_all_adds_up_like_reduce_scatter():
    for name, ours in scattered("all_to_all").items():
        # 8 numbers of at most 5 in another order: 8 roundings
        np.testing.assert_allclose(ours, terms()[name].astype(np.float64).sum(0), atol=8 * F32 * 5 * 8)
        np.testing.assert_allclose(ours, scattered("reduce_scatter")[name], atol=8 * F32 * 5 * 8)


def test_quantised_reduction_is_off_by_the_steps_of_its_terms():
    found = scattered("int8")
    for name in ("rows", "columns"):
        x = terms()[name]  # blocks are of 80 in rows; 8 devices cut columns of 320 into blocks of 40
        cut = x if name == "rows" else x.reshape(8, 3, 8, 40)
        most = np.sum([limit(term, "int8") for term in cut], axis=0).reshape(x.shape[1:])
        error = np.abs(found[name] - x.astype(np.float64).sum(0))
        assert (error <= most + 8 * F32 * 5 * 8).all() and error.max() > 1e-3
    exact = scattered("all_to_all")
    for name in ("vector", "whole"):
        np.testing.assert_array_equal(found[name], exact[name])


@pytest.mark.parametrize("reduce", ["all_to_all", "int8"])
def test_terms_in_bfloat16_are_added_up_in_float32(reduce):
    """The sum of the terms as they arrive, rounded once: at most half a step of bfloat16 away."""
    x = {name: jnp.asarray(terms()[name], jnp.bfloat16) for name in ("rows", "vector")}
    found = scattered(reduce, x)
    for name, term in x.items():
        sent = np.asarray(term, np.float64)
        if reduce == "int8" and name == "rows":
            sent = np.asarray(dequantise(quantise(term, jnp.int8), jnp.float32), np.float64)
        exact = sent.sum(0)
        half_step = 2.0 ** (np.frexp(exact)[1] - 9) + 8 * F32 * 5 * 8  # 8 bits of mantissa
        assert found[name].dtype == jnp.bfloat16
        assert (np.abs(found[name].astype(np.float64) - exact) <= half_step).all()
        narrow = functools.reduce(lambda a, b: a + b, jnp.asarray(sent, jnp.bfloat16)).astype(jnp.float32)
        assert (np.abs(np.asarray(narrow) - exact) > half_step).any()  # a sum in bfloat16 is further away


def test_an_array_is_gathered_along_the_dimension_that_it_is_cut_along():
    """Nothing is sent of one that is stored as it is wanted."""
    whole = {name: x[0] for name, x in terms().items()}
    gathered = lambda tree: {name: collectives.reshard(x, LAYOUTS[name], REPLICATED) for name, x in tree.items()}
    specs = {name: layout.stored for name, layout in LAYOUTS.items()}
    f = jax.shard_map(gathered, mesh=make_mesh(jax.devices()), in_specs=(specs,), out_specs=jax.P())
    chex.assert_trees_all_equal(jax.jit(f)(whole), whole)


def test_the_norm_is_added_up_in_float32():
    """bfloat16 has no number between 4096 and 4112."""
    tree, layouts = {"w": jnp.ones((17, 241), jnp.bfloat16)}, {"w": REPLICATED}
    norm = lambda tree: collectives.norm(collectives.sum_of_squares(tree, layouts))
    f = jax.shard_map(norm, mesh=make_mesh(jax.devices()[:1]), in_specs=jax.P(), out_specs=jax.P())
    assert float(jax.jit(f)(tree)) == np.sqrt(np.float32(17 * 241))


@pytest.mark.parametrize(
    "devices, placed",
    quick_at([(4, {"zero_level": 1, "replicate": 4, "shard_gradients": False})]),
    ids=["4x1"],
)
def test_gradients_by_all_to_all_equal_those_of_the_plain_model(devices, placed):
    batch, loss, grads = reference(CONFIG)
    ours, our_grads = engine_gradients(Small(devices, use_all_to_all_reduce=True, **placed), batch)
    assert ours == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(our_grads, grads) < ORDER_OF_SUMS


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.full
def test_quantised_gradients_are_near_those_of_the_plain_model(level):
    """Each of 4 devices' terms is off by at most 1/254 of its block's largest entry.

    A device sees a quarter of the tokens, so its term of the mean is at most about as large as the whole; level 3 adds
    up two microbatches. So 4 / 254 for level 1 and 8 / 254 for level 3, of the largest entry.
    """
    batch, loss, grads = reference(CONFIG)
    ours, our_grads = engine_gradients(Small(4, zero_level=level, zero_quantized_gradients=True), batch)
    assert ours == pytest.approx(loss, rel=ORDER_OF_SUMS)  # the forward pass is as it was
    assert worst_relative(our_grads["outer"], grads["outer"]) < ORDER_OF_SUMS  # and these are not quantised
    assert 1e-4 < worst_relative(our_grads["blocks"], grads["blocks"]) < (4 if level == 1 else 8) / 254


# -- Quantised weights ------------------------------------------------------------------------------------------------


def by_hand(small: Small, kind: str) -> dict:
    """The state's weights with every matrix of the blocks quantised and dequantised, each shard on its own."""

    def one(x):
        if x.ndim < 3:
            return x
        return dequantise(quantise(x, DTYPES[kind], block_size(*widths[x.shape])), x.dtype)

    blocks = small.state.weights["blocks"]
    widths = {x.shape: {shard.data.shape[-1] for shard in x.addressable_shards} for x in jax.tree.leaves(blocks)}
    make = jax.jit(lambda tree: jax.tree.map(one, tree), out_shardings=shardings(blocks))
    return small.state.weights | {"blocks": make(blocks)}


@pytest.mark.parametrize("kind, devices, recompute_block", quick_at([("fp8", 4, True), ("int8", 5, False)]))
def test_layers_compute_with_the_quantised_weights(kind, devices, recompute_block):
    """To the bit what a run computes whose weights were quantised by hand. 5 devices cut w_down along its rows."""
    batch = tokens(2, 2 * devices, 24)
    small = Small(devices, zero_level=3, recompute_block=recompute_block)
    small.state = small.state._replace(weights=by_hand(small, kind))
    assert worst_relative(small.state.weights, Small(1).state.weights) > 1e-4
    expected = engine_gradients(small, batch)
    quantised = Small(devices, zero_level=3, recompute_block=recompute_block, zero_quantized_weights=kind)
    found = engine_gradients(quantised, batch)
    assert found[0] == expected[0]
    chex.assert_trees_all_equal(found[1], expected[1])


@functools.cache
def trained(kind: str, recompute_block: bool, dtype: str, **placed):
    """Ten steps at 4 devices, ZeRO-3: (losses and norms, the Small)."""
    options = {"zero_quantized_weights": kind, "recompute_block": recompute_block, "model_dtype": dtype}
    small = Small(4, zero_level=3, **options, **placed)
    return small.train(BATCHES), small


EVERYTHING = dict.fromkeys(
    ("offload_weights", "offload_master", "offload_optimizer", "offload_grads", "offload_residual"), True
)


@pytest.mark.parametrize(
    "kind, recompute, dtype, also",
    quick_at(
        [
            ("fp8", True, "bfloat16", {"offload_quants": True, **EVERYTHING}),
        ],
    ),
    ids=["fp8-host"],
)
def test_persistent_quants_change_no_bit(kind, recompute, dtype, also):
    """Made once after the update they are what a fetch would make of the 16-bit weights, wherever they rest."""
    found, small = trained(kind, recompute, dtype, persistent_quants=True, **also)
    assert found == trained(kind, recompute, dtype)[0]
    blocks = jax.tree.leaves(small.state.weights["blocks"], is_leaf=is_quantized)
    quants, vectors = [x for x in blocks if is_quantized(x)], [x for x in blocks if not is_quantized(x)]
    kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
    assert (
        len(quants) == 7 and all(q.values.dtype == DTYPES[kind] for q in quants) and all(v.ndim == 2 for v in vectors)
    )
    assert kinds(quants) == {"pinned_host" if also.get("offload_quants") else "device"}
    assert kinds(vectors) == {"pinned_host" if also.get("offload_weights") else "device"}


@pytest.mark.full
def test_loss_stays_close_to_that_of_unquantised_weights():
    """Ten steps of AdamW. A weight is off by up to 1/16 of itself (fp8) or 1/254 of its block's largest (int8), each
    independently, so activations by about 3 % and 0.5 %, and the loss, which is near that of guessing, by much less
    (measured: 0.006 and 0.002)."""
    expected = np.array(Small(4, zero_level=3).train(BATCHES))[:, 0]
    for kind, recompute, dtype, most in (("fp8", True, "bfloat16", 2e-2), ("int8", False, "float32", 5e-3)):
        found = np.array(trained(kind, recompute, dtype)[0])[:, 0]
        assert 0 < np.max(np.abs(found - expected)) < most


@pytest.mark.full
def test_weights_are_the_same_numbers_on_any_number_of_devices():
    """Blocks lie along the rows, which are not cut here: only the order of sums differs."""
    batch = tokens(2, 8, 24)
    one, four = (engine_gradients(Small(n, zero_level=3, zero_quantized_weights="int8"), batch) for n in (1, 4))
    assert one[0] == pytest.approx(four[0], rel=ORDER_OF_SUMS)
    assert worst_relative(four[1], one[1]) < ORDER_OF_SUMS


@pytest.mark.parametrize("devices, offloaded", [(4, True), (5, False)])
@pytest.mark.full
def test_restored_weights_are_those_of_the_step(devices, offloaded):
    """A checkpoint holds master weights: what is made of them on restore is what the update made, to the bit."""
    options = {"persistent_quants": True, "offload_quants": offloaded, "offload_master": offloaded}
    small = Small(devices, zero_level=3, zero_quantized_weights="fp8", model_dtype="bfloat16", **options)
    small.train([tokens(1, 20, 24)])
    chex.assert_trees_all_equal(work_weights(small.state.master, small.plan), small.state.weights)


@pytest.mark.full
def test_sampling_reads_quantised_weights():
    small = Small(4, zero_level=3, zero_quantized_weights="int8", persistent_quants=True, offload_quants=True)
    weights, prompt = small.state.weights, np.array([3, 1, 4])
    here = jax.device_put(weights, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    plain = {"blocks": dequantise_all(here["blocks"], jnp.float32), "outer": here["outer"]}
    sample = lambda w: list(generate(decoder_model.build(CONFIG), w, prompt, max_tokens=5, temperature=0))
    assert sample(weights) == sample(plain)


# -- Programs ---------------------------------------------------------------------------------------------------------


def gathered(text: str) -> dict[str, int]:
    """Numbers that all-gathers inside loops bring together, by dtype and for matrices only."""
    bodies, found = set(re.findall(r"body=%?([\w.\-]+)", text)), {}
    for name, body in computations(text).items():
        if name in bodies:
            for dtype, shape in re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather\(", body):
                if "," in shape:
                    found[dtype] = found.get(dtype, 0) + int(np.prod([int(n) for n in shape.split(",")]))
    return found


@pytest.mark.full
def test_matrices_travel_as_bytes():
    """In the compiled step, loops gather every weight as one byte, and scales; nothing else, persistent or not."""
    plain = gathered(compiled_text(Small(4, zero_level=3)))
    quantised = gathered(compiled_text(Small(4, zero_level=3, zero_quantized_weights="fp8")))
    persistent = Small(4, zero_level=3, zero_quantized_weights="fp8", persistent_quants=True)
    assert set(plain) == {"f32"} and set(quantised) == {"u8", "f32"}
    assert quantised["u8"] == plain["f32"]
    assert quantised["f32"] <= plain["f32"] / 32  # a scale for 32 numbers or more
    assert gathered(text := compiled_text(persistent)) == quantised
    stacks = {",".join(map(str, x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves(persistent.plan.weights)}
    assert not set(re.findall(r"= f8e4m3fn\[([\d,]+)\]\S* copy\(", text)) & stacks


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.full
def test_gradients_travel_as_bytes(level):
    """Quantised reductions send s8 all-to-all, and no matrix of the blocks by reduce-scatter."""
    text = compiled_text(Small(4, zero_level=level, zero_quantized_gradients=True))
    assert re.search(r"s8\[[\d,]+\]\S* all-to-all\(", text) or re.search(r"\(s8\[.*all-to-all\(", text)
    assert "reduce-scatter(" not in text
    inside = {name for name, body in computations(text).items() if "all-to-all(" in body}
    assert inside & set(re.findall(r"body=%?([\w.\-]+)", text))  # of finish at level 1: a layer at a time


# -- Settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"zero_quantized_weights": "fp4", "zero_level": 3}, "one of none, fp8, int8, got 'fp4'"),
        (
            {"zero_quantized_weights": "fp8"},
            "zero_quantized_weights: .*shard_weights=False.*set shard_weights=True or zero_level=3$",
        ),
        ({"zero_quantized_weights": "int8", "zero_level": 3, "shard_weights": False}, "set shard_weights=True$"),
        (
            {"persistent_quants": True},
            "persistent_quants: .*set shard_weights=True or zero_level=3, and zero_quantized_we",
        ),
        (
            {"persistent_quants": True, "recipe": "fp8_current", "zero_level": 3, "shard_weights": False},
            "persistent_quants: .*set shard_weights=True$",
        ),
        ({"persistent_quants": True, "zero_level": 3}, "set zero_quantized_weights='fp8' or 'int8'"),
        ({"offload_quants": True, "zero_level": 3, "zero_quantized_weights": "fp8"}, "set persistent_quants=True"),
        ({"memcpy_send_recv": True}, "memcpy_send_recv: .*set use_all_to_all_reduce=True"),
    ],
)
@pytest.mark.parametrize("num_shards", [1, 4])
def test_impossible_combinations_are_refused_with_the_fix(settings, message, num_shards):
    with pytest.raises(ConfigError, match=message):
        placement.place(placement.Storage(**settings), num_shards=num_shards)


def test_the_table_has_the_quants():
    placed = {"zero_level": 3, "zero_quantized_weights": "fp8", "persistent_quants": True, "offload_quants": True}
    table = placement.place(placement.Storage(**placed), num_shards=4)
    assert table.quants == placement.TensorClass("float8_e4m3fn", True, HOST) and table.persistent_quants
    assert placement.place(placement.Storage(), num_shards=4).quants.dtype == ""
    both = placement.Storage(use_all_to_all_reduce=True, zero_quantized_gradients=True)
    assert placement.place(both, num_shards=4).reduce == "int8"


def drawn(**settings) -> Assembly:
    c = default_config()
    c.update({"gpus": 4, "zero_level": 3, **settings})
    check(c)
    return from_config(c, jax.sharding.AbstractMesh((1, 4), DATA), total_steps=10)


def test_persistent_quants_halve_the_work_copy():
    """Of the 16-bit matrices; a scale of 4 bytes for 128 numbers is a thirty-second on top."""
    plain = footprint.estimate(drawn(), BatchShape(1, 64, 2))
    ours = footprint.estimate(drawn(zero_quantized_weights="fp8", persistent_quants=True), BatchShape(1, 64, 2))
    run = drawn()
    matrices = bytes_per_device([x for x in jax.tree.leaves(run.plan.weights["blocks"]) if x.ndim > 2])
    assert ours["quants"] == matrices / 2 * (1 + 4 / 128) and plain["weights"] - ours["weights"] == matrices
    host = drawn(zero_quantized_weights="fp8", persistent_quants=True, offload_quants=True)
    assert footprint.estimate_host(host, BatchShape(1, 64, 2)) == {"quants": ours["quants"]}


def test_copy_engines_are_asked_for_when_a_step_is_compiled():
    run = drawn(memcpy_all_gather=True, memcpy_send_recv=True, use_all_to_all_reduce=True)
    asked = {"xla_gpu_all_gather_mode", "xla_gpu_use_memcpy_local_p2p"}
    assert compiler_options(run, "gpu").keys() - compiler_options(drawn(), "gpu").keys() == asked
    assert compiler_options(drawn(), "cpu") == {"xla_cpu_enable_concurrency_optimized_scheduler": False}
    collectives.check_copy_engine(run.engine.table.copy_engine, "gpu")  # the installed jax knows these options


@pytest.mark.parametrize("size", ["tp_size", "cp_size", "pp_size"])
def test_groups_may_gather_by_copy_engine(size):
    """XLA marks every all-gather then, over whichever axis: seen in steps compiled for H100 and RTX 4090."""
    c = default_config()
    c.update({"gpus": 4, "zero_level": 3, "memcpy_all_gather": True, size: 2})
    check(c)


def test_copy_engines_are_refused_where_there_are_none(monkeypatch):
    c = default_config()
    c.update({"gpus": 4, "memcpy_all_gather": True})
    with pytest.raises(ConfigError, match="memcpy_all_gather: expected false on cpu"):
        check_fit.check_fit(c, drawn(memcpy_all_gather=True), jax.devices()[:4], available=2**40)
    monkeypatch.setitem(collectives.COPY_ENGINE, "memcpy_all_gather", {"xla_gpu_of_another_version": True})
    with pytest.raises(ConfigError, match=r"memcpy_all_gather: .*No such compile option"):
        collectives.check_copy_engine(("memcpy_all_gather",), "gpu")
