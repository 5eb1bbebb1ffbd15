"""Flash attention within documents: in Pallas' interpreter against a mask written out, and compiled for GPUs."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import KERNEL, REFERENCE, needs, normal, quick_at

from pallas_kernels import bench, dispatch, flash_attention as op, shapes
from surojax.models import decoder_config, decoder_model
from surojax.models.attention import attend, chosen_here, chosen_implementation
from surojax.models.model import Compute
from surojax.planner import aot

pytestmark = pytest.mark.full(after=1)

f32, bf16 = jnp.float32, jnp.bfloat16


def starts_of(lengths) -> np.ndarray:
    """int32 `[S]`: the index at which each token's document starts, for the lengths of a row's documents."""
    ends = np.cumsum(lengths)
    return np.repeat(ends - lengths, lengths).astype(np.int32)


def data(lengths, H: int, K: int, h: int | tuple[int, int], dtype=bf16):
    """(q, k, v, gradient of the result, starts) for the documents' lengths of each row; h: also (h, channels of v)."""
    starts = np.stack([starts_of(row) for row in lengths])
    h, of_values = h if isinstance(h, tuple) else (h, h)
    heads = (H, h), (K, h), (K, of_values), (H, of_values)
    q, k, v, do = (normal(i, (*starts.shape, *head), dtype) for i, head in enumerate(heads))
    return q, k, v, do, starts


def written_out(q, k, v, starts, window: int, scale: float | None = None, softcap: float = 0.0):
    """Softmax over the keys that a query sees, listed pair by pair; float32."""
    S = q.shape[1]
    pairs = [[[s[i] <= t <= i and (not window or t > i - window) for t in range(S)] for i in range(S)] for s in starts]
    q, k, v = (x.astype(f32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bshc,bthc->bhst", q, k) * (scale or 1 / np.sqrt(q.shape[-1]))
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    weights = jax.nn.softmax(jnp.where(np.array(pairs)[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhst,bthc->bshc", weights, v)


def with_gradients(f, q, k, v, do):
    o, vjp = jax.vjp(f, q, k, v)
    return o, *vjp(do.astype(o.dtype))


CASES = [
    ([(70, 3, 77), (150,)], 4, 2, 32, 0, {}),  # 150 positions are not whole tiles; documents end within tiles
    ([(70, 3, 77), (150,)], 4, 2, 32, 40, {}),  # a window that is shorter than some documents
    ([(64, 64)], 3, 1, 16, 0, {}),  # documents end with tiles; one head is shared by all
    ([(1,) * 30 + (34,)], 2, 2, 48, 0, {}),
    ([(20, 44)], 2, 1, 16, 0, {"scale": 0.5, "softcap": 2.0}),  # scores up to 10 times the cap
    ([(3, 67)], 2, 1, 16, 40, {}),
    ([(5, 123)], 2, 1, 128, 2, {}),  # a query sees two keys
    ([(20, 44)], 2, 1, 256, 0, {}),  # results in two parts of 128 channels
    ([(20, 44)], 1, 1, (192, 128), 0, {}),  # in parts of 96 and 64
    ([(64,)], 2, 1, (32, 64), 0, {}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths, H, K, h, window, scores", quick_at(CASES, 5))
def test_kernel(lengths, H, K, h, window, scores):
    q, k, v, do, starts = data(lengths, H, K, h)
    kernel = lambda q, k, v: op.attention(q, k, v, starts, window=window, **scores, **KERNEL)
    found = jax.jit(functools.partial(with_gradients, kernel))(q, k, v, do)
    expected = with_gradients(lambda q, k, v: written_out(q, k, v, starts, window, **scores), q, k, v, do)
    for got, want in zip(found, expected, strict=True):
        # p and ds are rounded to bfloat16 before they are multiplied, the results once more: 2^-8 of each number, of
        # which a few errors add up. A key too many or too few is off by its share of the sum.
        assert got.dtype == bf16 and got.shape == want.shape
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, rtol=2**-6, atol=2**-7 * np.abs(want).max())


LATE = [  # documents, the first query, H, K, h, window, the rest
    ([(70, 3, 77), (150,)], 71, 4, 2, 32, 0, {}),  # queries and keys end within tiles, and no tile of theirs coincides
    ([(70, 3, 77), (150,)], 96, 4, 2, 32, 40, {}),  # a window that begins before the first query
    ([(64, 64)], 64, 3, 1, 16, 0, {"scale": 0.5, "softcap": 2.0}),  # a document that begins with the first query
    ([(63, 65), (65, 63)], 64, 2, 1, 16, 0, {}),  # one that begins just before it, or just after
    ([(130,)], 129, 2, 2, 48, 0, {}),  # one query
]


def of_later_queries(f, first, q, k, v, do):
    """(o, dq, dk, dv) of f, whose result is that of queries from `first` on."""
    o, dq, dk, dv = with_gradients(f, q, k, v, do[:, first:])
    return o, dq[:, first:] if dq.shape[1] == do.shape[1] else dq, dk, dv


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("lengths, first, H, K, h, window, scores", quick_at(LATE, 1))
def test_queries_that_begin_later_than_the_keys(lengths, first, H, K, h, window, scores):
    """Against all queries written out, of which only these have a gradient."""
    q, k, v, do, starts = data(lengths, H, K, h)
    kernel = lambda q, k, v: op.attention(q, k, v, starts[:, first:], window=window, **scores, **KERNEL)
    found = jax.jit(functools.partial(of_later_queries, kernel, first))(q[:, first:], k, v, do)
    everything = lambda q, k, v: written_out(q, k, v, starts, window, **scores)[:, first:]
    expected = of_later_queries(everything, first, q, k, v, do)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == bf16 and got.shape == want.shape
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, rtol=2**-6, atol=2**-7 * np.abs(want).max())  # as in `test_kernel`


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 50])
def test_no_gradient_crosses_documents(window):
    """Exactly zero for queries, keys and values, where one tile has parts of both documents."""
    q, k, v, do, starts = data([(70, 58)], 2, 1, 16)
    for document in (0, 70):
        mine = (starts == document)[..., None, None]
        kernel = lambda q, k, v: op.attention(q, k, v, starts, window=window, **KERNEL)
        _, *grads = jax.jit(functools.partial(with_gradients, kernel))(q, k, v, jnp.where(mine, do, 0))
        for grad in grads:
            np.testing.assert_array_equal(np.asarray(grad, np.float32)[:, ~mine[0, :, 0, 0]], 0)
            assert (np.abs(np.asarray(grad, np.float32)[:, mine[0, :, 0, 0]]) > 0).any()


@pytest.mark.gpu
@pytest.mark.full
@needs(2)
def test_each_device_has_rows_of_its_own():
    """Inside shard_map, whose types say that results vary over the devices."""
    q, k, v, do, starts = data([(20, 44), (64,)], 2, 1, 16)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def per_device(q, k, v, do, starts):
        return with_gradients(lambda q, k, v: op.attention(q, k, v, starts, **KERNEL), q, k, v, do)

    rows = jax.P("data")
    shard = jax.shard_map(per_device, mesh=mesh, in_specs=(rows,) * 5, out_specs=(rows,) * 4)
    for got, want in zip(jax.jit(shard)(q, k, v, do, starts), jax.jit(per_device)(q, k, v, do, starts), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.full
def test_the_reference_is_the_mask_written_out():
    q, k, v, do, starts = data([(7, 9), (16,)], 4, 2, 8, f32)
    for how in ({"window": 0}, {"window": 4, "scale": 0.5, "softcap": 2.0}):
        found = with_gradients(lambda q, k, v, how=how: op.attention(q, k, v, starts, **how), q, k, v, do)
        expected = with_gradients(lambda q, k, v, how=how: written_out(q, k, v, starts, **how), q, k, v, do)
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6)
        later = functools.partial(op.attention, starts=starts[:, 5:], **how)
        found = of_later_queries(lambda q, k, v, f=later: f(q, k, v), 5, q[:, 5:], k, v, do)
        everything = lambda q, k, v, how=how: written_out(q, k, v, starts, **how)[:, 5:]
        for got, want in zip(found, of_later_queries(everything, 5, q, k, v, do), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6)


def test_what_the_kernel_does_not_take_is_refused():
    q, k, v, _, starts = data([(7, 9)], 4, 2, 8)
    heads = (
        "attention: expected 16-bit heads of a multiple of 16 up to 128 channels, of 32 up to 256, got bfloat16 of 8"
    )
    with pytest.raises(dispatch.Unserved, match=heads):
        op.attention(q, k, v, starts, implementation="mosaic")
    with pytest.raises(dispatch.Unserved, match="got bfloat16 of 8, values of 4"):
        op.attention(q, k, v[..., :4], starts, implementation="mosaic")
    for wrong in (starts[:, 1:], starts.astype(np.int16)):
        with pytest.raises(ValueError, match=r"attention: starts: expected int32 \(1, 16\), got"):
            op.attention(q, k, v, jnp.asarray(wrong))
    with pytest.raises(ValueError, match="attention: k: expected"):
        op.attention(q, k[:, :, :, :4], v, starts)
    with pytest.raises(ValueError, match=r"attention: k: expected \(1, '16 or more', 'K', 8\), got \(1, 15, 2, 8\)"):
        op.attention(q, k[:, 1:], v[:, 1:], starts)
    for wrong in ((q[0], k, v), (q[:0], k, v), (q, k[0], v), (q, k[:, :, :1].repeat(3, 2), v), (q, k, v[:, :, :1])):
        with pytest.raises(ValueError, match=r"attention: [qkv]: expected"):
            op.attention(*wrong, starts)
    with pytest.raises(ValueError, match=r"attention: v: expected \(1, 16, 2, 'v'\), got \(1, 16, 2\)"):
        op.attention(q, k, v[..., 0], starts)
    with pytest.raises(ValueError, match="attention: window: expected 0 or more, got -1"):
        op.attention(q, k, v, starts, window=-1)
    with pytest.raises(NotImplementedError, match="cudnn attention: expected one document in a row, got several; use"):
        attend(q, k, v, starts=jnp.asarray(starts), implementation="cudnn")


CHOSEN = [  # dtype, channels, those of values, packed; chosen on an Ada or Ampere GPU, on Hopper
    ("bfloat16", 128, 0, False, "cudnn", "cudnn"),
    ("bfloat16", 128, 0, True, "mosaic", "mosaic"),
    ("bfloat16", 40, 0, False, "cudnn", "cudnn"),
    ("bfloat16", 40, 0, True, "xla", "xla"),
    ("bfloat16", 256, 0, False, "mosaic", "cudnn"),
    ("bfloat16", 256, 0, True, "mosaic", "mosaic"),
    ("bfloat16", 136, 0, False, "xla", "cudnn"),
    ("bfloat16", 144, 0, True, "xla", "xla"),  # halves of 72
    ("bfloat16", 264, 0, False, "xla", "xla"),
    ("bfloat16", 288, 0, True, "xla", "xla"),
    ("bfloat16", 192, 128, False, "mosaic", "cudnn"),
    ("bfloat16", 192, 128, True, "mosaic", "mosaic"),
    ("bfloat16", 128, 64, False, "mosaic", "mosaic"),  # no pair of sizes that cuDNN has a backward pass for
    ("float32", 192, 128, False, "xla", "xla"),
    ("float32", 128, 0, False, "xla", "xla"),
    ("float32", 256, 0, True, "xla", "xla"),
]


@pytest.mark.parametrize("dtype, head_dim, value_dim, packed, elsewhere, on_hopper", CHOSEN)
def test_auto_is_flash_attention_where_a_gpu_has_it(dtype, head_dim, value_dim, packed, elsewhere, on_hopper):
    heads = "auto", dtype, head_dim, value_dim
    for hopper, by in ((False, elsewhere), (True, on_hopper)):
        assert chosen_implementation(*heads, gpu=True, packed=packed, hopper=hopper) == by
        assert chosen_implementation(*heads, gpu=False, packed=packed, hopper=hopper) == "xla"


@pytest.mark.parametrize(
    "head_dim, how, by",
    [
        (64, {}, "xla"),  # cuDNN's, for which JAX looks at the device
        (64, {"packed": True}, "mosaic"),
        (64, {"softcap": True}, "mosaic"),
        (64, {"sinks": True}, "mosaic"),
        (64, {"piece": 64}, "cudnn"),
        (160, {}, "mosaic"),
    ],
)
def test_auto_asks_for_the_device_of_what_it_takes(monkeypatch, head_dim, how, by):
    """Where our kernels may be traced, but the program's device is no GPU: those are lowered for another one."""
    monkeypatch.setattr(dispatch, "choose", lambda op, implementation: "mosaic")
    assert chosen_here("auto", "bfloat16", head_dim, **{"packed": False} | how) == by


# --- compiled for GPUs ------------------------------------------------------------------------------------------------

S = 704  # no other size of the block below, nor a sum of several
BLOCK = decoder_config.DecoderConfig(
    64,
    256,
    640,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    sliding_window=100,
    sliding_window_pattern=2,
)


def compile_block(kind: str, implementation: str) -> dict:
    """Forward and backward of a packed block for a GPU: the calls of libraries and kernels, and arrays of S x S."""
    mesh = jax.sharding.Mesh(np.array(aot.devices(kind, 1)), ("one",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.NamedSharding(mesh.abstract_mesh, jax.P())
    (segment,) = decoder_model.build(BLOCK, Compute(attention=implementation)).segments
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    w = jax.tree.map(lambda p: array(p.shape, bf16), segment.params)
    x = array((2, S, 256), bf16)

    def passes(w, x, starts, dy):
        (y, _), saved = segment.block_forward(w, x, None, segment.variants[0], starts)
        return y, segment.block_backward(w, saved, (dy, None), None, segment.variants[0], starts)[:2]

    compiled = aot.compile_for(jax.jit(passes), (w, x, array((2, S), jnp.int32), x), mesh)
    calls = re.findall(r'custom_call_target="([^"]*)"', compiled.text)
    squares = set(re.findall(rf"\w+\[[\d,]*\b{S},{S}\]", compiled.text))
    return {"kernels": sum("mosaic" in call for call in calls), "squares": sorted(squares)}


def compile_heads(kind: str, implementation: str, *sizes: int) -> dict:
    """Attention of 2 x S tokens forward and backward for a GPU; sizes: channels of queries and keys, of values."""
    mesh = jax.sharding.Mesh(np.array(aot.devices(kind, 1)), ("one",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.NamedSharding(mesh.abstract_mesh, jax.P())
    array = lambda h: jax.ShapeDtypeStruct((2, S, 4, h), bf16, sharding=where)

    def passes(q, k, v, do):
        return with_gradients(functools.partial(attend, implementation=implementation), q, k, v, do)

    specs = {"in_specs": jax.P(), "out_specs": jax.P(), "check_vma": False}
    arguments = tuple(map(array, (sizes[0], *sizes, sizes[1])))
    compiled = aot.compile_for(jax.jit(jax.shard_map(passes, mesh=mesh, **specs)), arguments, mesh)
    calls = re.findall(r'custom_call_target="([^"]*)"', compiled.text)
    squares = set(re.findall(rf"\w+\[[\d,]*\b{S},{S}\]", compiled.text))
    return {"calls": calls, "squares": sorted(squares), "temporary": compiled.temp_bytes}


def compiled_elsewhere(function: str, kind: str, *arguments) -> dict:
    """The result of a function of this file in a process that compiles for another kind of GPU."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, function, json.dumps([kind, *arguments])]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


needs_compiler = pytest.mark.skipif(not aot.available(), reason=f"no compiler for GPUs here: {aot.EXTRA}")


@needs_compiler
@pytest.mark.parametrize("kind, implementation", [("h200", "auto"), ("rtx4090", "auto"), ("rtx4090", "xla")])
@pytest.mark.full
def test_a_packed_block_has_no_array_of_s_by_s(kind, implementation):
    """The kernel is called three times: forward, for dq, and for dk and dv. XLA's attention has the scores."""
    found = compiled_elsewhere("compile_block", kind, implementation)
    if implementation == "xla":
        assert found["kernels"] == 0 and any("f16" in square or "f32" in square for square in found["squares"])
    else:
        assert found == {"kernels": 3, "squares": []}


CUDNN = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("sizes", [(256, 256), (192, 128)])
@pytest.mark.parametrize("kind, implementation", [("h200", "cudnn"), ("rtx4090", "mosaic")])
def test_wide_heads_are_compiled_for_a_gpu(kind, implementation, sizes):
    """By the implementation that is chosen there, forward and backward, without scores in memory."""
    assert chosen_implementation("auto", bf16, *sizes, gpu=True, packed=False, hopper=kind == "h200") == implementation
    found = compiled_elsewhere("compile_heads", kind, implementation, *sizes)
    assert found["calls"] == (CUDNN if implementation == "cudnn" else ["mosaic_gpu_v2"] * 3)
    operand = 2 * S * 4 * 2 * sizes[0]  # bytes of queries
    assert found["squares"] == [] and found["temporary"] < 6 * operand


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("heads", [(0, 0), (48, 32)])
def test_the_cases_that_doctor_compares(heads):
    """Four documents in a row, forward and backward, as the reference."""
    for case in op.reference_cases(shapes.Sizes(32, 64, 2, 1, 16, 64), 128, *heads):
        arguments = bench.random_arguments(case, 1)
        found, expected = (jax.jit(functools.partial(case.run, **how))(*arguments) for how in (KERNEL, REFERENCE))
        assert not bench.disagreement(found, expected), case.name
