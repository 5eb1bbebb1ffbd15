"""Expert parallelism: tokens that are sent to experts, against experts that come to the tokens.

The rows `experts_ep_*` of `verify` train under every other setting, beside one device and beside the same in memory.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import CONFIG, Small, needs, normal, quick_at, tokens, worst_relative
from test_engine import ORDER_OF_SUMS, engine_gradients
from test_experts import ALL, BOTH, dense, two_products
from test_tensor_parallel_recipes import FLAT, first_steps, in_recipe, on_one_device

from pallas_kernels import nvfp4_format
from surojax.models.grouped import blocks_in_piece, blocks_of, sum_of_experts
from surojax.models.kinds import experts
from surojax.models.linear_fp8 import InFloat8
from surojax.models.lora import Lora
from surojax.models.model import Compute
from surojax.models.operations import Operations
from surojax.numerics.recipes import Precision
from surojax.optim.adamw8bit import adamw8bit
from surojax.optim.normuon import normuon
from surojax.parallel import expert_dispatch
from surojax.parallel.collectives import device_number
from surojax.placement.mesh import BATCH, CONTEXT, TOKENS, data_parallel, make_mesh
from surojax.planner import hlo, stages, step_collectives, traffic
from surojax.run import on_disk
from surojax.run.checkpoint import Checkpoints
from surojax.run.restore import restore

EIGHT = dataclasses.replace(CONFIG, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, num_hidden_layers=2)
CHOICES = {  # of 8 experts by 4 devices with 11 tokens each
    "some": lambda rng: rng.integers(0, 8, (44, 3)),
    "one": lambda rng: np.full((44, 3), 5),  # all tokens to one expert, so that three devices have none
    "own": lambda rng: np.repeat(np.arange(12).reshape(4, 3) * 2 // 3, 11, axis=0),  # nothing leaves its device
    "uneven": lambda rng: np.where(np.arange(44)[:, None] < 11, [[0, 2, 7]], 6),
}


@needs(4)
def test_tokens_reach_the_devices_of_their_experts_and_sums_come_back():
    """Once each, however many of a device's experts they chose; with gradients, and however choices fall."""
    N, E, n = 11, 8, 4
    x, dy = normal(0, (44, 6)), normal(1, (44, 6))

    def sent_and_returned(x_ND, chosen_Nk):
        way = expert_dispatch.routes(expert_dispatch.gathered(chosen_Nk), E)
        own = jax.lax.axis_index("ep")
        return expert_dispatch.combine(N, (1 + own) * expert_dispatch.dispatch(x_ND, way), way)

    specs = {"in_specs": (jax.P("ep"), jax.P("ep")), "out_specs": jax.P("ep")}
    of_group = jax.shard_map(sent_and_returned, mesh=make_mesh(jax.devices()[:4], ep_size=n), **specs)

    @jax.jit
    def program(x, chosen):
        y, vjp = jax.vjp(lambda x: of_group(x, chosen), x)
        return y, vjp(dy)[0]

    for choices in CHOICES.values():
        chosen = choices(np.random.default_rng(0)).astype(np.int32)
        y, dx = program(x, jnp.asarray(chosen))
        # What comes back is multiplied by the number of the device, counted from 1; so is a gradient.
        factor = np.asarray([sum(1 + device for device in set(row // (E // n))) for row in chosen], np.float32)[:, None]
        np.testing.assert_allclose(y, factor * x, rtol=1e-6)
        np.testing.assert_allclose(dx, factor * dy, rtol=1e-6)


def test_parts_of_the_experts_compute_what_all_of_them_do():
    """The sum over devices of their own experts' parts; an expert without a token has exact zeros."""
    T, k, E, n, D, F = 90, 3, 8, 4, 16, 8
    x, weights = normal(0, (T, D)), normal(1, (T, k))
    w = {"up": normal(2, (E, F, D)), "down": normal(3, (E, D, F))}

    def part(w, x, weights, chosen, first):
        own = jnp.where((chosen >= first) & (chosen < first + E // n), chosen - first, E // n)
        of_part = jax.tree.map(lambda w: jax.lax.dynamic_slice_in_dim(w, first, E // n), w)
        piece = blocks_in_piece(own.size // n, E // n)
        return sum_of_experts(two_products, of_part, {}, x, weights, blocks_of(own, E // n, devices=n), piece)

    def of_parts(w, x, weights, chosen):
        return jnp.sin(sum(part(w, x, weights, chosen, first) for first in range(0, E, E // n))).sum()

    def of_all(w, x, weights, chosen):
        return jnp.sin(dense(w, x, weights, chosen)).sum()

    found_program, wanted_program = (jax.jit(jax.value_and_grad(f, (0, 1, 2))) for f in (of_parts, of_all))
    for used in ([0, 1, 2, 3, 4, 6, 7], [4, 5, 7]):
        rng = np.random.default_rng(0)
        chosen = jnp.asarray(np.stack([rng.permutation(used)[:k] for _ in range(T)]), jnp.int32)
        found, wanted = (f(w, x, weights, chosen) for f in (found_program, wanted_program))
        assert worst_relative(found, wanted) < 1e-5
        unused = np.setdiff1d(np.arange(E), used)
        assert all(not np.asarray(gradient)[unused].any() for gradient in found[1][0].values())


WITH_BIAS = {"expert_bias": True}
WITHOUT_GATE = {  # of Nemotron-H
    "layer_types": "full_attention,experts",
    "one_purpose": True,
    "hidden_act": "relu2",
    "lora": Lora(4, 8.0, ("attention.wq", "mlp.w_up", "mlp.w_down")),
}


@needs(8)
@pytest.mark.parametrize(
    "changes, devices, placed",
    quick_at(
        [
            (WITH_BIAS, 4, {"ep_size": 2, "zero_level": 3}),
            (WITH_BIAS, 4, {"ep_size": 4, "zero_level": 1, "recompute_block": False}),
            (WITH_BIAS, 4, {"ep_size": 4, "zero_level": 3, **ALL}),
            (WITH_BIAS, 4, {"ep_size": 2, "zero_level": 2, "replicate": 2}),
            (WITHOUT_GATE, 8, {"ep_size": 2, "tp_size": 2, "zero_level": 3}),
        ],
    ),
)
def test_loss_and_gradients_are_those_of_one_device(changes, devices, placed):
    """With the routers' losses, of all tokens of the step."""
    config = dataclasses.replace(EIGHT, **changes)
    batch = tokens(2, 8, 16)
    losses = {"auxiliary": BOTH, "microbatches_per_fetch": 2}
    loss, grads = engine_gradients(Small(devices, config=config, **losses, **placed), batch)
    wanted_loss, wanted = engine_gradients(Small(config=config, **losses), batch)
    assert all(np.abs(gradient).max() > 0 for gradient in jax.tree.leaves(wanted))
    assert loss == pytest.approx(wanted_loss, rel=ORDER_OF_SUMS)
    assert worst_relative(grads, wanted) < ORDER_OF_SUMS


SENT = [  # (recipe, axes of 4 devices, sequences' parts whose rows are rounded apart): nvfp4 has no powers of two
    ("fp8_current", {"ep_size": 2}, 1),
    ("mxfp8", {"ep_size": 2}, 1),
    ("nvfp4", {"ep_size": 4}, 1),
    ("nvfp4", {"ep_size": 2, "cp_size": 2}, 2),
]


@needs(4)
@pytest.mark.parametrize("recipe, sizes, apart", quick_at(SENT))
def test_scales_are_of_the_rows_of_one_expert(recipe, sizes, apart, monkeypatch):
    """Wherever its rows come from: results and gradients are those of one device, which has all tokens.

    Matrices of every second expert are 2^40 times smaller than the others', and so are gradients behind them: rounded
    with another expert's scale they would be zeros. Random numbers, which differ between devices, are all the same.
    """
    monkeypatch.setattr(nvfp4_format.plain, "random_bits", lambda seed, index: jnp.uint32(0x80008000) | index & 0)
    config = dataclasses.replace(EIGHT, hidden_size=64, moe_intermediate_size=32)
    graph, w = nnx.split(experts.Experts(config, rngs=nnx.Rngs(0)))
    w = {name: x for name, x in nnx.to_pure_dict(w).items() if name.startswith("w_")}
    w["w_down"] = w["w_down"] * jnp.exp2(-40.0 * (jnp.arange(8) % 2))[:, None, None]
    x, dy, weights = normal(0, (8, 16, 64)), normal(1, (8, 16, 64)), jnp.abs(normal(2, (8, 16, 3)))
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation([0, 1, 2, 3, 4, 5, 7])[:3] for _ in range(128)])
    inputs = x, jnp.asarray(chosen.reshape(8, 16, 3), jnp.int32), weights, dy

    def results(w, x, chosen, weights, dy):
        seed = jnp.uint32(3) + jnp.asarray(device_number(*TOKENS)[0], jnp.uint32)
        in_float8 = InFloat8({}) if recipe == "fp8_current" else None
        ops = Operations(Compute(precision=Precision(recipe)), seed=seed, in_float8=in_float8)

        def mixed(w, x, weights):
            return nnx.merge(graph, w | {"router": jnp.zeros((8, 64))}).mix(x, chosen, weights, ops)

        y, vjp = jax.vjp(mixed, w, x, weights)
        return y, *vjp(dy)

    def on_one_device(w, *inputs):
        parts = zip(*(jnp.split(array, apart, axis=1) for array in inputs), strict=True)
        y, dw, dx, d_weights = zip(*(results(w, *part) for part in parts), strict=True)
        return *(jnp.concatenate(each, axis=1) for each in (y, dx, d_weights)), jax.tree.map(lambda *d: sum(d), *dw)

    def on_devices(w, *inputs):
        y, dw, dx, d_weights = results(w, *inputs)
        return y, dx, d_weights, dw

    mesh = make_mesh(jax.devices()[:4], **sizes)
    batch, sequence = (tuple(axis for axis in axes if axis in mesh.shape) for axes in (BATCH, (CONTEXT,)))
    specs = jax.P("ep"), *[jax.P(batch, sequence)] * 4
    sharded = jax.shard_map(on_devices, mesh=mesh, in_specs=specs, out_specs=(*specs[1:4], specs[0]))
    found, expected = (jax.device_get(jax.jit(f)(w, *inputs)) for f in (sharded, on_one_device))
    of_experts = lambda r: (*r[:3], {name: list(dw) for name, dw in r[3].items()})
    assert worst_relative(of_experts(found), of_experts(expected)) < ORDER_OF_SUMS


RECIPES = [
    ("fp8_hybrid", {"ep_size": 2, "recompute_block": False}),
    ("fp8_current", {"ep_size": 2, "tp_size": 2}),
    ("mxfp8", {"ep_size": 4}),
]


@needs(4)
@pytest.mark.parametrize("recipe, placed", RECIPES)
@pytest.mark.full
def test_recipes_equal_one_device(recipe, placed):
    """In some of six batches no number lies at a border of 8 bits, as in tests/test_tensor_parallel_recipes.py.

    nvfp4's scales are of the tokens that a device has, in the attention: `test_scales_are_of_the_rows_of_one_expert`.
    """
    config = dataclasses.replace(FLAT, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64)
    small = Small(4, config=config, compute=in_recipe(recipe), zero_level=3, **placed)
    pairs = list(zip(first_steps(small), on_one_device(config, recipe), strict=True))
    errors = [worst_relative(found.grads, expected.grads) for found, expected in pairs]
    assert min(errors) < ORDER_OF_SUMS and max(errors) < 0.1, errors
    for found, expected in pairs:
        assert found.loss == pytest.approx(expected.loss, rel=ORDER_OF_SUMS)


@needs(4)
@pytest.mark.full
@pytest.mark.parametrize("optimizer, error, apart", [(normuon, 1e-4, 0.0), (adamw8bit, 3e-3, 0.02)])
def test_optimizers_update_experts_as_one_device_does(optimizer, error, apart):
    """A matrix that NorMuon makes orthogonal, and a block of 8-bit moments, is of one expert, wherever that is.

    error: the largest difference, relative to the largest weight of a tensor. apart: the share of its weights that may
    differ by more than 1e-4 of that: gradients are sums in another order, so that some moments are rounded to another
    number of 8 bits.
    """
    expected = Small(config=EIGHT, optimizer=optimizer)
    batches = [tokens(2, 8, 16, seed=seed) for seed in range(3)]
    expected.train(batches)
    small = Small(4, config=EIGHT, optimizer=optimizer, ep_size=2, zero_level=3)
    small.train(batches)
    for ours, theirs in zip(*(jax.tree.leaves(jax.device_get(x.state.master)) for x in (small, expected)), strict=True):
        relative = np.abs(ours - theirs) / np.abs(theirs).max()
        assert relative.max() < error and np.mean(relative > 1e-4) <= apart


def test_experts_rest_where_they_compute():
    """Sharded over ep, and what rests in shards over the other devices too; a router is sharded over all."""
    four = Small(8, config=EIGHT, ep_size=4, zero_level=3).engine.layouts
    of_mlp = four.weights["blocks"]["mlp"]
    assert of_mlp["w_up"].computed == jax.P("ep") and of_mlp["w_up"].stored == jax.P(("ep", "dp_shard"))
    assert of_mlp["router"].computed == jax.P() and of_mlp["router"].stored == jax.P(("dp_shard", "ep"))
    alone = Small(8, config=EIGHT, ep_size=8, zero_level=3).engine.layouts.master["blocks"]["mlp"]["w_up"]
    assert alone.stored == alone.computed == jax.P("ep") and alone.sharded_dim is None


@needs(8)
@pytest.mark.full
@pytest.mark.parametrize("before, after", [(1, 4), (4, 2), (2, 8), (8, 1)])
def test_a_checkpoint_moves_between_sizes_of_ep(tmp_path, before, after):
    rng = np.random.default_rng(0)
    placed = {"config": EIGHT, "zero_level": 3, "model_dtype": "bfloat16"}
    one, other = (Small(8, ep_size=size, **placed) for size in (before, after))
    saved = jax.tree.map(
        lambda p: jax.device_put(jnp.asarray(rng.standard_normal(p.shape) * 9, p.dtype), p.sharding), one.plan
    )
    weights = jax.tree.map(lambda m, w: jax.device_put(m.astype(w.dtype), w.sharding), saved.master, saved.weights)
    saved = saved._replace(step=jnp.int32(5), weights=weights)
    with Checkpoints(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(saved, {"step": 5})
    written = on_disk.find(tmp_path)
    assert written is not None
    found = restore(written, other.plan)
    for x, y, planned in zip(*map(jax.tree.leaves, (found, saved, other.plan)), strict=True):
        assert x.sharding == planned.sharding
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@needs(8)
@pytest.mark.full
@pytest.mark.parametrize("ep_size", [4, 8])
def test_a_compiled_step_moves_what_the_formulas_say(ep_size):
    """With rounds as of experts that are chosen evenly, which no program has inside."""
    small = Small(8, config=dataclasses.replace(EIGHT, num_hidden_layers=4), ep_size=ep_size, zero_level=3)
    of_group = traffic.BatchShape(sequences=2, sequence_len=24, microbatches=3)
    batch = jax.ShapeDtypeStruct((3, 2 * data_parallel(small.mesh), 24), np.int32)
    options = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
    text = small.step.lower(small.plan, batch, batch).compile(options).as_text()
    module = stages.with_rounds(hlo.parse_module(text), small.run, of_group)
    found = {(x.op, x.axis): x.bytes for x in hlo.collectives([(module, 1)], small.mesh.shape)}
    expected = step_collectives.collective_bytes(small.run, of_group)
    assert found["all-to-all", "ep"] == pytest.approx(expected["all-to-all", "ep"], rel=0.02)
    for key in expected.keys() | found.keys():
        assert found.get(key, 0) == pytest.approx(expected.get(key, 0), rel=0.1, abs=2000), key
