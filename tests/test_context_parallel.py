"""Context parallelism: the engine equals `jax.grad` of the plain model on one device, and moves what it should.

The oracle, its batch and the bound are those of tests/test_engine.py.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, needs, normal, plain_loss, tokens, worst_relative
from test_engine import ORDER_OF_SUMS, engine_gradients

from surojax.assembly.from_config import from_config
from surojax.config import checks
from surojax.config.fields import default_config, mesh_sizes
from surojax.errors import ConfigError
from surojax.models import decoder_model
from surojax.models.attention import attend, attend_in_context
from surojax.models.model import Compute
from surojax.parallel import context
from surojax.parallel.context import METHODS
from surojax.placement.layout import layouts
from surojax.placement.mesh import CONTEXT, SHARD, abstract_mesh, data_parallel, make_mesh, mesh_shape, shards
from surojax.placement.table import Storage, place
from surojax.planner import hlo, step_collectives, traffic


def equals(small: Small, batch, loss, grads):
    """The engine's loss and each of its gradients are those expected, up to the order of sums."""
    ours, our_grads = engine_gradients(small, batch)
    assert ours == pytest.approx(float(loss), rel=ORDER_OF_SUMS)
    assert worst_relative(our_grads, grads) < ORDER_OF_SUMS


# Index of the last token of document A. Of 24 tokens, pieces of two devices begin at 6, 12 and 18, of four at 3, 6, 9.
EDGES = (10, 11, 12, 5, 6, 17, 18, 20)


@functools.cache
def packed():
    """Rows of two or three documents, of which one ends at, before or after the edge of a device's tokens.

    The second half of a row has no label: of two devices that have consecutive tokens, the second counts none.
    """
    inputs, labels = tokens(2, 8, 24)
    labels[..., 12:] = -1
    labels[1] = -1  # nor does any in the second microbatch
    starts = np.zeros((8, 24), np.int32)
    for row, last in enumerate(EDGES):
        starts[row, last + 1 :] = last + 1
        starts[row, 22:] = 22
    return inputs, labels, np.broadcast_to(starts, inputs.shape)


@pytest.mark.parametrize("method", ("ring",))
@pytest.mark.full
def test_documents_end_at_any_place_of_a_devices_part(method):
    """Four devices, with a window; tests/test_silent_mistakes.py has two, without one."""
    config = dataclasses.replace(CONFIG, sliding_window=4)
    compute = Compute(cp_method=method)
    small = Small(8, config=config, compute=compute, recompute_block=False, cp_size=4, zero_level=3, packed=True)
    equals(small, packed(), *packed_reference(config))


@functools.cache
def packed_reference(config):
    """(loss, its gradients) of `packed` by `jax.grad` of the plain model."""
    params = jax.tree.map(np.asarray, Small(config=config).state.weights)
    return jax.jit(jax.value_and_grad(plain_loss(config)))(params, *packed())


def attention_over(method: str, cp_size: int, starts, **how):
    """`attend_in_context` of whole arrays, cut and joined again by this function."""
    mesh = make_mesh(jax.devices()[:cp_size], cp_size=cp_size)

    def per_device(*heads):
        own = [context.own_tokens(x, method) for x in heads]
        y = attend_in_context(*own, method, starts=starts, implementation="xla", **how)
        index = context.own_index(y.shape[1], method)
        whole = jnp.zeros_like(heads[0])
        return jax.lax.psum(jax.lax.pcast(whole, CONTEXT, to="varying").at[:, index].set(y), CONTEXT)

    return jax.shard_map(per_device, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())


@pytest.mark.full(after=1)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_crosses_the_edge_of_a_document(method):
    """The gradient of document A's loss by document B's queries, keys and values is 0, not a small number.

    Document A ends at, one before and one after the edge of a device's tokens. Scores of up to 60: a hop of keys that
    are all hidden from some queries must leave no NaN.
    """
    S = 24
    last = np.array(EDGES)
    starts = np.where(np.arange(S)[None] > last[:, None], last[:, None] + 1, 0).astype(np.int32)
    q, k, v, weight = (4 * normal(i, (len(last), S, heads, 8)) for i, heads in enumerate((4, 2, 2, 4)))
    how: Any = {"window": 0, "scale": None, "softcap": 0.0, "sinks": None}
    in_A = (np.arange(S)[None] <= last[:, None])[..., None, None]

    def of_A(attention):
        return jax.jit(jax.value_and_grad(lambda *heads: jnp.sum(attention(*heads) * weight * in_A), (0, 1, 2)))

    value, grads = of_A(attention_over(method, 2, starts, **how))(q, k, v)
    expected = of_A(functools.partial(attend, starts=jnp.asarray(starts), implementation="xla", **how))(q, k, v)
    assert worst_relative((value, grads), expected) < ORDER_OF_SUMS
    for grad in grads:
        assert np.all(np.asarray(grad)[~np.broadcast_to(in_A, grad.shape)] == 0)


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.full
def test_sixteen_bits_are_summed_in_float32(method):
    """Of four hops: as far from float32 as one device is. Rounding a sum after each hop would double the distance."""
    shapes = [(2, 64, heads, 16) for heads in (4, 2, 2, 4)]
    q, k, v, weight = (normal(i, shape) for i, shape in enumerate(shapes))
    how: Any = {"window": 0, "scale": None, "softcap": 0.0, "sinks": None}

    def grads(attention, dtype):
        def loss(*heads):
            return jnp.sum(attention(*heads).astype(jnp.float32) * weight)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*(x.astype(dtype) for x in (q, k, v)))

    one = functools.partial(attend, implementation="xla", **how)
    exact = grads(one, jnp.float32)
    ours = worst_relative(grads(attention_over(method, 4, None, **how), jnp.bfloat16), exact)
    assert ours < 1.2 * worst_relative(grads(one, jnp.bfloat16), exact)


@pytest.mark.parametrize("method, recompute_block", [*((method, True) for method in METHODS), ("ulysses", False)])
@pytest.mark.full
def test_a_compiled_step_moves_what_the_formulas_say(method, recompute_block):
    """Within 2 %: on 2 x 4 devices, of which two share a key/value head. Recomputation moves more with ulysses only."""
    compute = Compute(cp_method=method)
    small = Small(8, cp_size=4, zero_level=3, compute=compute, recompute_block=recompute_block)
    batch = jax.ShapeDtypeStruct((2, data_parallel(small.mesh), 24), np.int32)
    text = small.step.lower(small.plan, batch, batch).compile().as_text()
    found = {(x.op, x.axis): x.bytes for x in hlo.collectives([(hlo.parse_module(text), 1)], small.mesh.shape)}
    of_group = traffic.BatchShape(sequences=1, sequence_len=24, microbatches=2)
    expected = step_collectives.collective_bytes(small.run, of_group)
    del expected["all-gather", "dp_shard+cp"]  # three layers of two microbatches: the first one's prefetch is 8 % more
    assert {axis for _, axis in expected} == {"cp", "dp_shard+cp"}
    for key, size in expected.items():
        assert found.get(key, 0) == pytest.approx(size, rel=0.02, abs=100), key
    assert {axis for (_, axis), size in found.items() if size > 100} == {"cp", "dp_shard+cp"}  # others: scalars


def test_groups_move_what_the_formulas_say():
    """By hand: 2 x 4 GPUs, four query and two key/value heads of 8 channels, 16 tokens, all blocks but one again."""
    L, D, F, V, S, K = 3, 32, 96, 64, 16, 5
    c = default_config()
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L}
    c.model.update(sizes | {"num_attention_heads": 4, "num_key_value_heads": 2})
    c.update({"gpus": 8, "cp_size": 4, "zero_level": 3, "sequence_len": S, "model_dtype": "bfloat16"})
    of_method = {}
    for method in METHODS:
        c.update({"cp_method": method})
        checks.check(c)
        run = from_config(c, abstract_mesh(8, **mesh_sizes(c)), total_steps=10)
        batch = traffic.BatchShape(sequences=1, sequence_len=S, microbatches=K)
        found = step_collectives.collective_bytes(run, batch)
        assert found.pop(("all-gather", "dp_shard+cp")) == pytest.approx(
            7 / 8 * 2 * (2 * L * K * blocks(D, F, 1) + 2 * V * D + D)
        )
        of_method[method] = {op: size for (op, axis), size in found.items() if axis == "cp"}
    tokens, passes = 4, L * K
    both = 2 * passes  # forward passes, again too
    own = 2 * 2 * 8 * tokens  # a device's keys and values, elements
    assert of_method == {
        "ulysses": {"all-to-all": 3 / 4 * (passes + both) * (2 * 4 * 8 + 2 * 4 * 8) * tokens * 2},
        "allgather": {"all-gather": 3 * both * own * 2, "reduce-scatter": 3 * passes * own * 4},
        "ring": {"collective-permute": 3 * both * own * 2 + passes * own * (3 * 4 + 2)},
    }


def blocks(D: int, F: int, L: int) -> int:
    """Parameters of the blocks in the test above: two key/value heads of four."""
    return L * (2 * D * D + 2 * D * D // 2 + 3 * D * F + 2 * D)


def test_layouts_and_meshes():
    """State is sharded over both axes; a mesh without several devices along `cp` is what it was."""
    assert mesh_shape(8, cp_size=2, tp_size=2, kv_heads=2) == {"dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2}
    assert "cp" not in mesh_shape(8)
    with pytest.raises(ConfigError, match=r"^dp_replicate_size x cp_size: expected a divisor of the 8 devices in use"):
        mesh_shape(8, cp_size=3)
    mesh = abstract_mesh(8, cp_size=4)
    found = layouts(decoder_model.build(CONFIG).params, place(Storage(zero_level=3), num_shards=shards(mesh)), mesh)
    wq = found.weights["blocks"]["attention"]["wq"]
    assert wq.stored == jax.P((SHARD, CONTEXT)) and wq.computed == jax.P() and wq.sharded_dim == 0
    alone = abstract_mesh(4, cp_size=4)
    found = layouts(decoder_model.build(CONFIG).params, place(Storage(zero_level=3), num_shards=shards(alone)), alone)
    assert found.weights["blocks"]["attention"]["wq"].stored == jax.P(CONTEXT)


@pytest.mark.parametrize("method, expected", [("ulysses", [[0, 1, 2], [3, 4, 5]]), ("ring", [[0, 3], [1, 2]])])
def test_order_of_tokens(method, expected):
    """Zig-zag: the first device has the first and the last piece."""
    mesh = make_mesh(jax.devices()[:2], cp_size=2)
    length = len(expected[0])
    index = jax.shard_map(lambda: context.own_index(length, method), mesh=mesh, in_specs=(), out_specs=jax.P(CONTEXT))()
    np.testing.assert_array_equal(np.asarray(index).reshape(2, length), expected)


REFUSED = [
    ({"cp_size": 3, "gpus": 3}, "sequence_len: expected a multiple of 3, as cp_size x tp_size GPUs divide it.*use 513"),
    ({"cp_method": "ring", "attention": "xla", "sequence_len": 516}, "sequence_len: expected a multiple of 8.*use 520"),
    (
        {"model.num_attention_heads": 6, "model.num_key_value_heads": 6},
        "model.num_attention_heads: expected a multiple",
    ),
    ({"model.num_key_value_heads": 6}, "model.num_key_value_heads: expected a multiple or a divisor of cp_size = 4"),
    (
        {"cp_method": "allgather", "attention": "mosaic", "model.head_dim": 64, "sequence_len": 256},
        r"sequence_len / \(2 x cp_size\): expected a multiple of 64 with cp_method='allgather'.*got 32; use .* of 512",
    ),
    (
        {"cp_method": "ring", "attention": "cudnn", "model.head_dim": 64, "model.sliding_window": 16},
        "model.sliding_window: expected 0 with cp_method='ring' and attention='cudnn'",
    ),
    (
        {"cp_method": "allgather", "attention": "cudnn", "model.head_dim": 136},
        "model.head_dim: expected at most 128 with cp_method='allgather' and attention='cudnn', got 136",
    ),
    (
        {"cp_method": "ring", "attention": "cudnn", "model.head_dim": 64, "sequence_len": 520},
        r"sequence_len / \(2 x cp_size\): expected an even number",
    ),
    ({"cp_method": "zigzag"}, "cp_method: expected one of"),
    ({"cp_size": 1, "cp_method": "ring"}, "cp_method: expected 'ulysses' with cp_size=1"),
    (
        {"recipe": "fp8_hybrid", "per_device_batch_size": 1, "sequence_len": 72},
        "per_device_batch_size x sequence_len / cp_size: expected a multiple of 16 tokens.* got 18",
    ),
    ({"zero_level": 3, "memcpy_send_recv": True}, "memcpy_send_recv: expected False with cp_size=4"),
    ({"lmhead_chunks": 512}, "lmhead_chunks: expected a divisor of .* / cp_size = 128"),
    (
        {"cp_size": 2, "tp_size": 2, "lmhead_chunks": 256},
        "lmhead_chunks: expected a divisor of .* / cp_size / tp_size = 128",
    ),
]


@pytest.mark.parametrize("changes, said", REFUSED, ids=[",".join(changes) for changes, _ in REFUSED])
def test_what_is_not_built_is_refused(changes, said):
    c = default_config()
    c.update({"gpus": 4, "cp_size": 4})
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=f"^{said}") as error:
        checks.check(c)
    assert "\n" not in str(error.value)


def test_without_several_devices_nothing_is_cut():
    x = np.ones((2, 4), np.float32)
    assert context.own_tokens(x, "ring") is x and not context.is_divided()


@needs(4)
def test_heads_and_tokens_change_places():
    """Four devices with three tokens each: of eight heads each gets two, with all tokens; of two heads two get one."""
    mesh = jax.make_mesh((4,), (CONTEXT,), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    x, y = (np.arange(2 * 12 * n * 5, dtype=np.float32).reshape(2, 12, n, 5) for n in (8, 2))
    tokens, heads, each = jax.P(None, CONTEXT), jax.P(None, None, CONTEXT), jax.P(CONTEXT)

    def exchanged(x, y, sinks):
        many, few = context.scatter_heads(x, y)
        return many, few, context.gather_heads(many), context.own_heads(sinks), jnp.stack(context.own_pieces("ring"))

    specs = {"in_specs": (tokens, tokens, jax.P()), "out_specs": (heads, heads, tokens, each, each), "mesh": mesh}
    many, few, back, sinks, pieces = jax.jit(jax.shard_map(exchanged, **specs))(x, y, np.arange(8.0))
    np.testing.assert_array_equal(many, x)
    np.testing.assert_array_equal(few, np.repeat(y, 2, axis=2))
    np.testing.assert_array_equal(back, x)
    assert sinks.tolist() == [*range(8)] and pieces.tolist() == [0, 7, 1, 6, 2, 5, 3, 4]
    assert context.own_pieces("ring") == context.own_pieces("ulysses") == [0]
