"""The engine equals `jax.grad` of the plain model, however it is placed, split and recomputed."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, needs, plain_loss, quick_at, tokens, worst_relative

from surojax.models.rotary import RopeScaling
from surojax.placement.layout import batch_sharding, replicated_matrices, specs
from surojax.planner import hlo
from surojax.step.engine import evaluate
from surojax.step.train_step import evaluated, passes

QWEN = dataclasses.replace(CONFIG, attention_bias=True, qk_norm=True, tie_word_embeddings=True, head_dim=16)
# Everything that Gemma 2 and 3 have, in one model; caps as small as the scores and logits, so that they matter.
GEMMA = dataclasses.replace(
    CONFIG,
    num_hidden_layers=5,
    tie_word_embeddings=True,
    qk_norm=True,
    norm_plus_one=True,
    sandwich_norms=True,
    hidden_act="gelu_pytorch_tanh",
    scale_embedding=True,
    query_pre_attn_scalar=5.0,
    attn_logit_softcapping=0.5,
    final_logit_softcapping=0.5,
    rope_local_base_freq=100.0,
    sliding_window=5,
    sliding_window_pattern=2,
    initializer_range=0.3,
)
SMOLLM = dataclasses.replace(CONFIG, num_hidden_layers=5, no_rope_layer_interval=2, rope_theta=100.0)
MINISTRAL = dataclasses.replace(
    CONFIG,
    rope_scaling=RopeScaling(
        "yarn", factor=4.0, original_max_position_embeddings=10, partial_rotary_factor=0.5, llama_4_scaling_beta=0.4
    ),
)

# The same sums in another order: blocks of at most a few thousand float32 terms, each rounded to 6e-8. 1e-5 is what the
# issue asks; measured at most 2e-6.
ORDER_OF_SUMS = 1e-5


@functools.cache
def reference(config):
    """Loss and gradients of the plain model on a fixed batch `[2, 8, 24]`."""
    small, batch = Small(config=config), tokens(2, 8, 24)
    params = jax.tree.map(np.asarray, small.state.weights)
    loss, grads = jax.jit(jax.value_and_grad(plain_loss(config)))(params, *batch)
    return batch, float(loss), jax.tree.map(np.asarray, grads)


def engine_gradients(small: Small, batch):
    """Loss and whole gradients as the engine computes them."""
    spec = jax.tree.map(lambda x: x.sharding.spec, small.plan.weights)
    token_spec = batch_sharding(small.mesh).spec
    out = (jax.P(), specs(small.engine.layouts.master), jax.P())
    f = jax.shard_map(
        lambda w, *batch: passes(small.mesh).loss_and_gradients(small.engine, w, *batch)[:3],
        mesh=small.mesh,
        in_specs=(spec, *(token_spec for _ in batch)),
        out_specs=out,
    )
    means, grads, norm = jax.device_get(jax.jit(f)(small.state.weights, *small.put(batch)))
    squares = sum(float(np.sum(np.square(g, dtype=np.float64))) for g in jax.tree.leaves(grads))
    assert float(norm) == pytest.approx(squares**0.5, rel=ORDER_OF_SUMS)
    return float(means["loss"]), grads


PLACED = {
    "1": (CONFIG, 1, {}, True),
    "4-zero2-saved": (CONFIG, 4, {"zero_level": 2}, False),
    "2x4-zero3-saved": (CONFIG, 8, {"zero_level": 3, "replicate": 2}, False),
    "4x1-saved": (CONFIG, 4, {"zero_level": 1, "replicate": 4}, False),
}


OF_CONFIG = ("1", "4-zero2-saved", "2x4-zero3-saved")
OF_OTHERS = ("ministral-1-saved",)
QUICK = [i for i, name in enumerate(PLACED) if name in (*OF_CONFIG, *OF_OTHERS)]


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    "config, devices, placed, recompute_block", quick_at(list(PLACED.values()), *QUICK), ids=PLACED.keys()
)
def test_equals_grad_of_the_plain_model(config, devices, placed, recompute_block):
    batch, loss, grads = reference(config)
    small = Small(devices, config=config, recompute_block=recompute_block, lmhead_chunks=4, **placed)
    ours, our_grads = engine_gradients(small, batch)
    assert ours == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(our_grads, grads) < ORDER_OF_SUMS


@pytest.mark.full
def test_uneven_devices_keep_leaves_whole():
    """Three devices divide none of the matrices: they are kept whole, named, and the result is the same."""
    (inputs, labels), _, _ = reference(CONFIG)
    batch = inputs[:, :6], labels[:, :6]
    small = Small(3)
    params = jax.tree.map(np.asarray, small.state.weights)
    loss, grads = jax.jit(jax.value_and_grad(plain_loss(CONFIG)))(params, *batch)
    ours, our_grads = engine_gradients(small, batch)
    assert ours == pytest.approx(float(loss), rel=ORDER_OF_SUMS)
    assert worst_relative(our_grads, grads) < ORDER_OF_SUMS
    replicated = replicated_matrices(small.run.params, small.engine.layouts.master)
    assert replicated["outer.embed"] == (64, 32) and set(replicated) >= {"blocks.attention.wq", "blocks.mlp.w_up"}


@functools.cache
def of_one_microbatch():
    """(batch `[1, 16, 24]` whose ignored labels are spread unevenly, what one device makes of it)."""
    inputs, labels = tokens(1, 16, 24)
    labels[0, :5] = -1
    return (inputs, labels), engine_gradients(Small(), (inputs, labels))


@pytest.mark.parametrize("devices, accumulation", quick_at([(4, 4)]))
def test_accumulation_does_not_change_the_result(devices, accumulation):
    """The same 16 sequences as one microbatch or four."""
    whole, expected = of_one_microbatch()
    batch = tuple(x.reshape(accumulation, -1, 24) for x in whole)
    ours = engine_gradients(Small(devices), batch)
    assert ours[0] == pytest.approx(expected[0], rel=ORDER_OF_SUMS)
    assert worst_relative(ours[1], expected[1]) < ORDER_OF_SUMS


@pytest.mark.full
def test_zero_levels_and_device_counts_train_alike():
    """Ten steps on 1 device, and on 8 at each level; only the order of float32 sums differs between them."""
    batches = [tokens(1, 16, 24, seed=i) for i in range(10)]
    expected = np.array(Small().train(batches))
    for level in (1, 2, 3):
        # AdamW divides by the root of a tiny second moment early on, which amplifies rounding: 1e-6 grows to 1e-5.
        np.testing.assert_allclose(Small(8, zero_level=level).train(batches), expected, rtol=1e-4)


@pytest.mark.full
def test_bfloat16_work_weights_follow_the_master():
    small = Small(model_dtype="bfloat16", m_dtype="bfloat16")
    small.train([tokens(1, 4, 24)])
    for work, master in zip(jax.tree.leaves(small.state.weights), jax.tree.leaves(small.state.master), strict=True):
        assert work.dtype == jnp.bfloat16 and master.dtype == jnp.float32
        np.testing.assert_array_equal(work, master.astype(jnp.bfloat16))


def test_evaluation_is_the_loss_of_training():
    (inputs, labels), loss, _ = reference(CONFIG)
    small = Small(4, zero_level=3, lmhead_chunks=2)
    spec = jax.tree.map(lambda x: x.sharding.spec, small.plan.weights)
    where = batch_sharding(small.mesh, accumulated=False)
    f = jax.shard_map(
        lambda w, i, l: evaluate(small.engine, w, i, l),
        mesh=small.mesh,
        in_specs=(spec, where.spec, where.spec),
        out_specs=jax.P(),
    )
    sums = [jax.jit(f)(small.state.weights, *jax.device_put(b, where)) for b in zip(inputs, labels, strict=True)]
    total = sum(float(of_batch["loss"]) for of_batch, _ in sums)
    count = sum(int(terms) for _, terms in sums)
    assert count == (labels >= 0).sum()
    assert total / count == pytest.approx(loss, rel=ORDER_OF_SUMS)


def test_all_labels_ignored_is_zero_not_nan():
    inputs, labels = tokens(2, 8, 24)
    loss, grads = engine_gradients(Small(lmhead_chunks=4), (inputs, np.full_like(labels, -1)))
    assert loss == 0 and all(not g.any() for g in jax.tree.leaves(grads))


def compiled_text(small: Small, microbatches: int = 2) -> str:
    shape = (microbatches, 8, 24)
    batch = [jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(small.mesh))] * 2
    return small.step.lower(small.plan, *batch).compile().as_text()


def computations(text: str) -> dict[str, str]:
    """The computations of an HLO module by name."""
    return dict(re.findall(r"^%?([\w.\-]+) \(.*?\) -> .*? \{\n(.*?)^\}", text, flags=re.M | re.S))


@pytest.mark.parametrize("recompute_block", quick_at([(True,), (False,)], 0))
def test_loops_copy_no_stack(recompute_block):
    """No loop body copies a whole stacked parameter, moment or accumulator: layers are read and written in place."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text := compiled_text(Small(recompute_block=recompute_block))))
    stacks = {",".join(map(str, p.shape)) for p in jax.tree.leaves(Small().plan.master["blocks"])}
    assert len(bodies) >= 3 and stacks  # over microbatches, and over layers forward and backward
    for name, body in computations(text).items():
        if name in bodies:
            copied = set(re.findall(r"= f32\[([\d,]+)\]\S* copy\(", body)) & stacks
            assert not copied, f"{name} copies whole stacks {copied}"


def test_zero1_communicates_once_per_step():
    """ZeRO-1 issues no collective inside the loop over microbatches, which is over all but the last one: that one sums
    each layer's gradients, as many times as there are layers (3)."""
    module = hlo.parse_module(compiled_text(Small(8), microbatches=6))
    sums = [(i, times) for i, times, _ in hlo.executed(module) if i.opcode in ("reduce-scatter", "all-reduce")]
    loops = [i for i, _, _ in hlo.executed(module) if i.opcode == "while" and '"n":"5"' in i.attributes]
    assert len(loops) == 1
    body = re.findall(r"body=%?([\w.\-]+)", loops[0].attributes)[0]
    inside = {i.opcode for i, _, _ in hlo.executed(module, body)}
    assert "while" in inside and not inside & {"reduce-scatter", "all-reduce", "all-gather", "all-to-all"}
    # Of a block: 7 matrices and 2 vectors; of the outer layers 3 sums; loss, labels and norm: 3 numbers.
    assert sum(times for _, times in sums) <= 3 * (9 + 1) + 3 + 3
    assert {times for _, times in sums} == {1, 3}


GOLDEN = [
    (4.163446426391602, 0.40963372588157654),
    (4.1573262214660645, 0.4082169830799103),
    (4.162821292877197, 0.4542541801929474),
]


def test_golden_steps():
    """Losses and gradient norms of three steps against stored values, to notice when a refactoring changes numbers.

    If this fails and the change was meant to alter the arithmetic, print the new values with
    `print(Small().train(batches))` and replace GOLDEN, saying why in the commit. rtol: float32, another order of sums.
    """
    batches = [tokens(2, 8, 24, seed=i) for i in range(3)]
    np.testing.assert_allclose(Small().train(batches), GOLDEN, rtol=1e-4)


@needs(2)
def test_a_result_is_there_when_all_devices_are_done():
    """The next step may replace what they read; to read a result waits for the first one alone."""

    def per_device(weights):
        rounds = weights[0] * 300_000  # none on the first device
        slow = jax.lax.fori_loop(0, rounds, lambda i, x: jnp.sin(x + i), jnp.float32(0))
        return jnp.minimum(slow, 0.0) * 0

    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    step = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P(), check_vma=False))
    weights = jax.device_put(np.arange(2), jax.NamedSharding(mesh, jax.P("x")))
    jax.block_until_ready(step(weights))  # compiled
    for result in evaluated(step, weights, [(), ()]):
        assert all(shard.data.is_ready() for shard in result.addressable_shards)
