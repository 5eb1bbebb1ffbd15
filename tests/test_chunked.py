"""A block in chunks of the sequence: the plain model's loss and gradients, and no more products than in one piece.

So on one device, and with each chunk divided over several.
"""

import dataclasses
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
from small import CONFIG, Small, normal, quick_at

from surojax.models import chunked, cudnn, decoder_config, decoder_model
from surojax.models.attention import visible
from surojax.models.model import Compute, Earlier
from surojax.placement.mesh import data_parallel
from surojax.planner import aot, costs, hlo, step_collectives, traffic

MISTRAL = dataclasses.replace(CONFIG, sliding_window=9)  # of a chunk of 8 tokens: the one before it, and a token more
# Documents that end at the edge of two and of four chunks of 32 tokens, one before and one after it.
LENGTHS = [(16, 16), (15, 17), (17, 15), (8, 1, 23), (7, 1, 17, 7), (9, 14, 9), (32,), (24, 8)]
ALL = dict.fromkeys([f"offload_{x}" for x in ("residual", "optimizer", "master", "grads", "weights")], True)


def documents() -> np.ndarray:
    """int32 `[2, 4, 32]`: where the document of each token starts."""
    rows = [np.repeat(np.cumsum(lengths) - lengths, lengths) for lengths in LENGTHS]
    return np.array(rows, np.int32).reshape(2, 4, 32)


CASES = {
    "2-packed": (CONFIG, 2, True, 1, {}),
    "2-one_document-cp4": (CONFIG, 2, False, 4, {"cp_size": 4, "zero_level": 3}),
    "4-window": (MISTRAL, 4, False, 1, {}),
}


@pytest.mark.full
def test_no_gradient_crosses_documents():
    """Exactly zero, wherever a document ends; and not zero from a document's own last token to its first one."""
    (segment,) = decoder_model.build(CONFIG, Compute(sequence_chunks=4)).segments
    w = jax.tree.map(lambda p: normal(p.stream, p.shape), segment.params)
    x = normal(0, (8, 32, CONFIG.hidden_size))
    starts = documents().reshape(8, 32)
    last = np.zeros((8, 32, 1), np.float32)
    last[:, -1] = 1  # of the last document's loss, by its last token

    @jax.jit
    def of_last_token(w, x, starts):
        return segment.block_backward(w, (x, None), (last * x, None), None, segment.variants[0], starts)[1]

    dx = np.asarray(of_last_token(w, x, starts))
    mine = starts == starts[:, -1:]
    np.testing.assert_array_equal(dx[~mine], 0)
    assert (np.abs(dx[mine]).max(axis=-1) > 0).all()


def test_sums_over_chunks_are_rounded_once():
    """Ones after a 256, which bfloat16 would add as nothing: gradients of a weight and of the first key."""

    def handed_on(w, x, earlier, variant, starts):
        return Earlier(x[..., None], x[..., None])

    def body(w, x, earlier, variant, starts, routing):
        seen = 0 if earlier.keys is None else earlier.keys.sum(axis=(1, 3))[:, None]
        return w * x + seen, handed_on(w, x, earlier, variant, starts), None

    _, _, backward = chunked.block_functions(body, handed_on, 4, trained=None)
    x = jnp.ones((1, 4, 1), jnp.bfloat16)
    dw, dx, _ = backward(x[:, :1], (x, None), (x.at[0, -1].set(256), None))  # ends with 256, with which the sums begin
    assert dw.dtype == dx.dtype == jnp.bfloat16
    assert dw[0, 0, 0] == 260  # 259, rounded to even
    assert dx[0, 0, 0] == 260 and dx[0, -1, 0] == 256  # as a factor, and as a key of three later queries: 1 + 258


@pytest.mark.full
def test_divided_chunks_move_what_the_formulas_say():
    """To the byte: keys and values of a chunk once a pass, and gradients of shared parameters once a microbatch."""
    small = Small(4, cp_size=2, tp_size=2, compute=Compute(sequence_chunks=4))
    batch = jax.ShapeDtypeStruct((2, data_parallel(small.mesh), 32), np.int32)
    text = small.step.lower(small.plan, batch, batch).compile().as_text()
    found = {(x.op, x.axis): x.bytes for x in hlo.collectives([(hlo.parse_module(text), 1)], small.mesh.shape)}
    found = {key: size for key, size in found.items() if size > 100}  # others: scalars
    assert found == step_collectives.collective_bytes(
        small.run, traffic.BatchShape(sequences=1, sequence_len=32, microbatches=2)
    )


def test_an_uneven_sequence_is_refused():
    with pytest.raises(ValueError, match="sequence_chunks: expected a divisor of 32 tokens, got 5; choose another"):
        chunked.chunks_of(32, 5)


# --- by cuDNN ---------------------------------------------------------------------------------------------------------


def masked_scores(q, k, scale: float, causal: bool):
    s = scale * jnp.einsum("bshc,bthc->bhst", q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2))
    return jnp.where(visible(0, *s.shape[2:], 0), s, -jnp.inf) if causal else s


def forward_written_out(q, k, v, scale, *, causal):
    """What cuDNN's forward pass returns."""
    s = masked_scores(q, k, scale, causal)
    lse = jax.nn.logsumexp(s, axis=-1)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    return jnp.einsum("bhst,bthc->bshc", jnp.exp(s - lse[..., None]), v), lse


def backward_written_out(q, k, v, lse, o, do, scale, *, causal):
    """What cuDNN's backward pass returns, from the logsumexp and the result that it is given."""
    group = q.shape[2] // k.shape[2]
    p = jnp.exp(masked_scores(q, k, scale, causal) - lse[..., None])
    dp = jnp.einsum("bshc,bthc->bhst", do, jnp.repeat(v, group, axis=2))
    ds = scale * p * (dp - jnp.einsum("bshc,bshc->bhs", do, o)[..., None])
    dk, dv = jnp.einsum("bhst,bshc->bthc", ds, q), jnp.einsum("bhst,bshc->bthc", p, do)
    shared = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(axis=3)
    return jnp.einsum("bhst,bthc->bshc", ds, jnp.repeat(k, group, axis=2)), shared(dk), shared(dv)


@pytest.mark.parametrize("window", quick_at([(0,), (5,), (30,)]))
def test_the_parts_that_cudnn_computes_make_attention(monkeypatch, window):
    """With both of its passes written out in its place, which needs a GPU."""
    monkeypatch.setattr(cudnn, "forward_part", forward_written_out)
    monkeypatch.setattr(cudnn, "backward_part", backward_written_out)
    public = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation, **how: public(*a, **how))
    q, do = normal(1, (2, 6, 4, 8)), normal(2, (2, 6, 4, 8))
    k, v = normal(3, (2, 21, 2, 8)), normal(4, (2, 21, 2, 8))

    def plain(q, k, v):
        s = masked_scores(q, k, 0.5, causal=False)
        s = jnp.where(visible(15, 6, 21, window), s, -jnp.inf)
        return jnp.einsum("bhst,bthc->bshc", jax.nn.softmax(s), jnp.repeat(v, 2, axis=2))

    found, vjp = jax.vjp(lambda q, k, v: cudnn.attend_after(q, k, v, window, 0.5), q, k, v)
    expected, plain_vjp = jax.vjp(plain, q, k, v)
    for got, want in zip((found, *vjp(do)), (expected, *plain_vjp(do)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


# --- compiled for a GPU -----------------------------------------------------------------------------------------------

S = 2816  # in four chunks 704: no other size of the block below, nor a sum of several
BLOCK = decoder_config.DecoderConfig(
    64, 256, 640, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2, head_dim=64
)


def compile_block(implementation: str, chunks: int, packed: bool, window: int) -> dict:
    """Forward and backward of a block for an RTX 4090: FLOPs of cuDNN's attention, our kernels, arrays of scores."""
    mesh = jax.sharding.Mesh(np.array(aot.devices("rtx4090", 1)), ("one",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.NamedSharding(mesh, jax.P())  # not abstract, which cuDNN's operators refuse
    config = dataclasses.replace(BLOCK, sliding_window=window)
    (segment,) = decoder_model.build(config, Compute(attention=implementation, sequence_chunks=chunks)).segments
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    w = jax.tree.map(lambda p: array(p.shape, jnp.bfloat16), segment.params)
    x = array((1, S, 256), jnp.bfloat16)

    def passes(w, x, starts, dy):
        starts = starts if packed else None
        saved = segment.block_forward(w, x, None, segment.variants[0], starts)[1]
        return segment.block_backward(w, saved, (dy, None), None, segment.variants[0], starts)[:2]

    compiled = aot.compile_for(jax.jit(passes), (w, x, array((1, S), jnp.int32), x), mesh)
    flops = 0.0
    for computation in hlo.parse_module(compiled.text).values():
        for i in computation.values():
            if "fmha" in i.attributes:
                flops += costs.attention_flops(i, [computation[name].shape for name in i.operands[:3]])[0]
    calls = re.findall(r'custom_call_target="([^"]*)"', compiled.text)
    scores = set(re.findall(rf"\w+\[[\d,]*\b{S // chunks},\d*\b{S // chunks}\]", compiled.text))
    kernels = sum("mosaic" in call for call in calls)
    return {"flops": flops, "kernels": kernels, "scores": sorted(scores), "temp_bytes": compiled.temp_bytes}


def compiled(*cases: tuple) -> list[dict]:
    """What `compile_block` returns of each case, in a process of its own."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    ran = subprocess.run([sys.executable, __file__, json.dumps(cases)], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


aot_only = pytest.mark.skipif(not aot.available(), reason=f"no compiler for GPUs here: {aot.EXTRA}")


@aot_only
@pytest.mark.full
def test_cudnn_computes_half_of_the_square_and_no_more():
    """Once forward, which is the backward pass's recomputation, and once backward, whose FLOPs are 2.5 times these."""
    half = 4 * S * S / 2 * 8 * 64
    windowless = [("cudnn", chunks, False, 0) for chunks in (1, 4)]
    one, four, banded = compiled(*windowless, ("cudnn", 4, False, 100))
    assert one["flops"] == four["flops"] == half * (1 + 2.5)
    assert four["temp_bytes"] < 0.75 * one["temp_bytes"]
    # With a window of 100: 704 queries, 99 before them and one for an even number. Of half of the square, costs.py
    # leaves out the half of a smaller one, of keys that lie before the window.
    assert banded["flops"] == 4 * 8 * 64 / 2 * ((704**2 - 604**2) + 3 * (804**2 - 704**2)) * (1 + 2.5)


@aot_only
@pytest.mark.full
def test_our_kernel_is_called_for_each_chunk_of_packed_rows():
    """Three times: forward again, for dq, and for dk and dv."""
    (found,) = compiled(("auto", 4, True, 0))
    assert found["kernels"] == 3 * 4 and found["scores"] == [] and found["flops"] == 0


if __name__ == "__main__":
    print(json.dumps([compile_block(*case) for case in json.loads(sys.argv[1])]))
