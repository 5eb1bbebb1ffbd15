"""Pairs of pieces by every implementation: against softmax over all keys written out, and compiled for GPUs.

The kernel of pallas_kernels runs in Pallas' interpreter. cuDNN needs a GPU: its passes are written out in its place.
"""

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
from small import KERNEL, normal, quick_at
from test_chunked import backward_written_out, forward_written_out

from pallas_kernels import dispatch, flash_attention as kernel
from surojax.models import cudnn, decoder_config, decoder_model
from surojax.models.attention import chosen_implementation
from surojax.models.model import Compute
from surojax.models.ring_pairs import (
    Keys,
    Pair,
    Queries,
    Slopes,
    attended,
    chosen_for_pairs,
    merged_pairs,
    pair_gradients,
)
from surojax.placement.mesh import CONTEXT
from surojax.planner import aot

f32, bf16 = jnp.float32, jnp.bfloat16
K, G, h = 2, 2, 16
RULE = kernel.ScoreSettings(0, 0.25, 0.0)
CAPPED = kernel.ScoreSettings(0, 0.5, 2.0)


def piece(seed: int, length: int, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of one piece."""
    heads = ((K, G, h), (K, h), (K, h))
    q, k, v = (normal(3 * seed + i, (2, length, *shape), dtype) for i, shape in enumerate(heads))
    return q, k, v


def written_out(q, keys, values, first, rule: kernel.ScoreSettings):
    """float32 attention of the last tokens of a sequence: the queries see keys `first[b, i]` to their own."""
    s = rule.score(jnp.einsum("btkgh,bukh->bkgtu", q.astype(f32), keys.astype(f32)))
    index = jnp.arange(keys.shape[1])
    own = jnp.arange(keys.shape[1] - q.shape[1], keys.shape[1])
    seen = (index[None, None, :] <= own[None, :, None]) & (index[None, None, :] >= first[:, :, None])
    p = jax.nn.softmax(jnp.where(seen[:, None, None], s, -jnp.inf))
    return jnp.einsum("bkgtu,bukh->btkgh", p, values.astype(f32))


def in_two_parts(by: str, first, rule: kernel.ScoreSettings, all_seen: bool, before, own, dy):
    """(y, dq, dk, dv of the piece before, dk, dv of the own piece), as two hops of a ring make them."""
    length = dy.shape[1]
    queries = Queries(own[0], length + jnp.arange(length), first)
    parts = [
        (Keys(*before[1:], jnp.arange(length)), Pair(by, rule, own=False, all_seen=all_seen)),
        (Keys(*own[1:], length + jnp.arange(length)), Pair(by, rule, own=True, all_seen=all_seen)),
    ]
    y, lse = merged_pairs(*(attended(queries, keys, pair) for keys, pair in parts))
    delta = jnp.moveaxis(jnp.sum(y * dy.astype(f32), axis=-1), 1, 3)
    slopes = Slopes(dy, y.astype(dy.dtype), lse, delta)
    (dq_before, *d_before), (dq_own, *d_own) = (pair_gradients(queries, keys, slopes, pair) for keys, pair in parts)
    return y, dq_before + dq_own, *d_before, *d_own


# Tokens of row 0 and of row 1 see keys from here on: of 64 tokens before, all, from the middle of a tile, and none.
STARTS = np.array([[0] * 30 + [94] * 34, [50] * 64], np.int32)
CASES = [  # implementation, dtype, first key that is seen, rule
    ("mosaic", bf16, STARTS, RULE),
    ("xla", f32, STARTS, CAPPED),
    ("cudnn", f32, np.zeros((1, 64), np.int32), RULE),
    ("mosaic", bf16, np.full((2, 64), 64, np.int32), CAPPED),  # no query sees a key of the piece before
]


@pytest.mark.full(after=1)
@pytest.mark.gpu
@pytest.mark.parametrize("by, dtype, first, rule", quick_at(CASES, 1, 2))
def test_two_pairs_make_attention(monkeypatch, by, dtype, first, rule):
    """Values and all gradients; a pair that nothing is seen of gives zeros, not NaN."""
    for name in ("forward_part", "backward_part"):
        interpreted = functools.partial(getattr(kernel, name), interpret=KERNEL["interpret"])
        monkeypatch.setattr(kernel, name, interpreted)
    monkeypatch.setattr(cudnn, "forward_part", forward_written_out)
    monkeypatch.setattr(cudnn, "backward_part", backward_written_out)
    before, own = piece(0, 64, dtype), piece(1, 64, dtype)
    dy = normal(9, own[0].shape, dtype)
    whole = np.broadcast_to(first, (2, 64))
    parts = jax.jit(functools.partial(in_two_parts, by, first, rule, by == "cudnn"))

    def plain(q, k0, v0, k1, v1):
        return written_out(q, jnp.concatenate([k0, k1], 1), jnp.concatenate([v0, v1], 1), whole, rule)

    @jax.jit
    def passes(*operands):
        y, vjp = jax.vjp(plain, *operands)
        return y, *vjp(dy.astype(f32))

    with jax.default_matmul_precision("highest"):  # TF32 on a GPU otherwise
        found = parts(before, own, dy)
        expected = passes(*(x.astype(f32) for x in (own[0], *before[1:], *own[1:])))
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == f32 and got.shape == want.shape
        # p and ds are rounded to bfloat16 before they are multiplied, as in tests/test_kernel_attention.py.
        bound = 2e-6 if dtype == f32 else 2**-7
        np.testing.assert_allclose(got, want, rtol=2 * bound, atol=bound * max(1, np.abs(want).max()))


def test_auto_is_cudnn_unless_something_hides_keys():
    def auto(dtype="bfloat16", head_dim=128, piece=4096, gpu=True, **how):
        return chosen_implementation("auto", dtype, head_dim, gpu=gpu, piece=piece, **{"packed": False} | how)

    assert auto() == "cudnn"
    assert auto(packed=True) == auto(window=True) == auto(softcap=True) == "mosaic"
    assert auto(piece=4098) == "cudnn" and auto(piece=4098, packed=True) == "xla"
    assert auto(head_dim=40) == "cudnn" and auto(head_dim=40, window=True) == "xla"
    assert auto(head_dim=256) == "mosaic" and auto(head_dim=256, hopper=True) == "cudnn"
    assert auto(dtype="float32") == auto(gpu=False) == auto(piece=4097) == "xla"
    with pytest.raises(
        dispatch.Unserved,
        match=r"cudnn attention of pieces: expected 16-bit heads of 8, .* got .* 4096 tokens, documents or a window; ",
    ):
        chosen_implementation("cudnn", "bfloat16", 128, gpu=True, packed=False, window=True, piece=4096)


# --- compiled for GPUs ------------------------------------------------------------------------------------------------

S = 2816  # in pieces of 704: no other size of the block below, nor a sum of several
BLOCK = decoder_config.DecoderConfig(
    64, 256, 640, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2, head_dim=64
)


def compile_block(kind: str, packed: bool) -> dict:
    """Forward and backward of a block on two GPUs: calls of cuDNN and of our kernels, arrays of scores."""
    mesh = jax.sharding.Mesh(np.array(aot.devices(kind, 2)), (CONTEXT,), axis_types=(jax.sharding.AxisType.Auto,))
    compute = Compute(cp_method="ring")
    (segment,) = decoder_model.build(BLOCK, compute).segments
    everywhere, tokens = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P(None, CONTEXT))
    w = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, bf16, sharding=everywhere), segment.params)
    x = jax.ShapeDtypeStruct((1, S, 256), bf16, sharding=tokens)
    starts = jax.ShapeDtypeStruct((1, S), jnp.int32, sharding=everywhere)

    def passes(w, x, starts, dy):
        starts = starts if packed else None
        w = jax.tree.map(lambda a: jax.lax.pcast(a, CONTEXT, to="varying"), w)
        saved = segment.block_forward(w, x, None, segment.variants[0], starts)[1]
        return segment.block_backward(w, saved, (dy, None), None, segment.variants[0], starts)[1]

    specs = jax.P(), jax.P(None, CONTEXT), jax.P(), jax.P(None, CONTEXT)
    sharded = jax.shard_map(passes, mesh=mesh, in_specs=specs, out_specs=jax.P(None, CONTEXT))
    text = aot.compile_for(jax.jit(sharded), (w, x, starts, x), mesh).text
    calls = re.findall(r'custom_call_target="([^"]*)"', text)
    return {
        "cudnn": sum("fmha" in call for call in calls),
        "mosaic": sum("mosaic" in call for call in calls),
        "scores": sorted(set(re.findall(rf"\w+\[[\d,]*\b{S // 4},\d*\b{S // 4}\]", text))),
    }


@pytest.mark.skipif(not aot.available(), reason=f"no compiler for GPUs here: {aot.EXTRA}")
@pytest.mark.parametrize("kind", ["rtx4090"])
@pytest.mark.full
def test_a_ring_has_no_scores_in_memory(kind):
    """Three pairs are of own keys, two of the other device's; our kernel has two passes backward, cuDNN has one."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    ran = subprocess.run([sys.executable, __file__, kind], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    packed = {"cudnn": 0, "mosaic": 5 * 3, "scores": []}
    plain = {"cudnn": 5 * 2, "mosaic": 0, "scores": []}
    assert json.loads(ran.stdout.splitlines()[-1]) == [packed, plain]


if __name__ == "__main__":
    print(json.dumps([compile_block(sys.argv[1], packed) for packed in (True, False)]))


@pytest.mark.parametrize(
    "all_seen, softcap, got",
    [
        (False, True, ", documents or a window, a softcap"),
        (False, False, ", documents or a window"),
        (True, True, ", a softcap"),
        (True, None, ""),
    ],
)
def test_what_pairs_cudnn_does_not_take(all_seen, softcap, got):
    """Beside heads of other sizes and an odd number of tokens."""
    odd = (33, "33 tokens") if softcap is None else (32, "32 tokens")
    how = {"gpu": True, "all_seen": all_seen, "softcap": bool(softcap)}
    with pytest.raises(
        dispatch.Unserved, match=rf"cudnn attention of pieces: .*, got bfloat16 of 64, {odd[1]}{got}; use"
    ):
        chosen_for_pairs("cudnn", "bfloat16", 64, odd[0], **how)


@pytest.mark.parametrize(
    "head_dim, hopper, takes",
    [
        (128, False, True),
        (136, False, False),
        (136, True, True),
        (256, True, True),
        (264, True, False),
        (60, False, False),
    ],
)
def test_heads_that_cudnn_takes_in_pairs(head_dim, hopper, takes):
    how = {"gpu": True, "all_seen": True, "softcap": False, "hopper": hopper}
    assert (chosen_for_pairs("auto", "bfloat16", head_dim, 32, **how) == "cudnn") == takes
    assert chosen_for_pairs("auto", "float32", head_dim, 32, **how) == "xla"
    assert chosen_for_pairs("auto", "bfloat16", head_dim, 32, **how | {"gpu": False}) == "xla"
