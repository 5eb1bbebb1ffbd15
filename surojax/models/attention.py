"""Scaled dot-product attention: by XLA, by cuDNN or by our kernel. No other file but cudnn.py calls one.

Shape suffixes: B batch, S query positions, T key positions, H query heads, K key/value heads, h head dimension, v that
of values.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, flash_attention as kernel
from surojax.models import cudnn, ring_pairs
from surojax.models.ring_attention import ring_attention
from surojax.numerics.rounding import quotient
from surojax.parallel import context

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "mosaic")


def fits_cudnn(dtype, head_dim: int, value_dim: int = 0, *, hopper: bool) -> bool:
    """True if cuDNN's flash attention supports heads of this dtype and size on NVIDIA GPUs of sm_80 and newer.

    value_dim: of values, 0: the same. hopper: of a GPU of sm_90, which has it for up to 256 channels, and for 192 with
    values of 128; others have it for up to 128.
    """
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if value_dim not in (0, head_dim):
        return half and hopper and (head_dim, value_dim) == cudnn.KEYS_AND_VALUES
    return half and head_dim % 8 == 0 and head_dim <= (256 if hopper else 128)


def fits_mosaic(dtype, head_dim: int, value_dim: int = 0) -> bool:
    """True if our flash attention supports heads of this dtype and size on NVIDIA GPUs of sm_80 and newer."""
    return kernel.fits(dtype, head_dim, value_dim)


def chosen_implementation(
    implementation: str,
    dtype,
    head_dim: int,
    value_dim: int = 0,
    *,
    gpu: bool,
    packed: bool,
    softcap: bool = False,
    sinks: bool = False,
    window: bool = False,
    piece: int = 0,
    hopper: bool = False,
) -> str:
    """The implementation that "auto" selects for these heads: a GPU's flash attention if it supports them, else xla.

    Where cuDNN and our kernel both do, it is cuDNN.

    value_dim: channels of values, 0: as many as of queries and keys. packed: a row has several documents, which cuDNN
    separates by an S x S bias, or with a fixed number of documents in each row. softcap: scores have a softcap,
    which cuDNN does not compute. sinks: heads have them, for which `jax.nn` gives no log-sum-exp of cuDNN; pairs of
    pieces have one. window: of the layer. piece: tokens of each of the pairs of pieces that allgather and
    ring compute; 0: whole sequences. hopper: see `fits_cudnn`.
    """
    if piece:
        how: Any = {"gpu": gpu, "all_seen": not (packed or window), "softcap": softcap, "hopper": hopper}
        return ring_pairs.chosen_for_pairs(implementation, dtype, head_dim, piece, **how)
    if implementation != "auto":
        return implementation
    if not gpu:
        return "xla"
    if not (packed or softcap or sinks) and fits_cudnn(dtype, head_dim, value_dim, hopper=hopper):
        return "cudnn"
    return "mosaic" if fits_mosaic(dtype, head_dim, value_dim) else "xla"


def on_hopper() -> bool:
    """True if a program's device, `jax.default_device` or the first one, is a GPU of sm_90."""
    return (cudnn.capability_here() or (0, 0))[0] == 9


def chosen_here(
    implementation: str,
    dtype,
    head_dim: int,
    value_dim: int = 0,
    *,
    packed: bool,
    softcap: bool = False,
    sinks: bool = False,
    window: bool = False,
    piece: int = 0,
) -> str:
    """The implementation that "auto" selects on a program's device: `jax.default_device` or the default backend.

    Arguments: see `chosen_implementation`.
    """
    # cuDNN is asked by `jax.nn` for what it supports; the kernel knows the GPUs that it is compiled for.
    hopper = on_hopper()
    ours = packed or softcap or sinks or piece or not fits_cudnn(dtype, head_dim, value_dim, hopper=hopper)
    gpu = dispatch.choose("attention", None) == "mosaic" if ours else dispatch.target().platform == "gpu"
    kind: Any = {"packed": packed, "softcap": softcap, "sinks": sinks, "window": window, "piece": piece}
    return chosen_implementation(implementation, dtype, head_dim, value_dim, gpu=gpu, hopper=hopper, **kind)


def attend(
    q_BSHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKv: jax.Array,
    *,
    start: jax.Array | int | None = None,
    starts: jax.Array | None = None,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Causal attention softmax(scale q k^T) v: `[B, S, H, v]`.

    start: position of the first query if the keys are a cache of T positions; None: the queries are the last S of the T
    positions. starts: int32 `[B, S]`, for each token the index in its row at which its document starts, if a row has
    several: a query attends to its own document only. window: number of positions that a query attends to, its own and
    those before it (Beltagy et al. 2020); 0: its own and all before it.
    scale: of the scores; None: 1 / sqrt(h). softcap: scores s become softcap tanh(s / softcap); 0: not. sinks: `[H]`, a
    score of each head beside those of its keys, whose share of the softmax goes to no value; None: there are none.
    implementation: "xla" runs on every backend and has the attention scores in memory, `[B, H, S, T]` of one layer at a
    time. "cudnn" is flash attention on NVIDIA GPUs of sm_80 and newer, for bfloat16 and float16. "mosaic" is flash
    attention with documents, softcaps and sinks, on the same GPUs (pallas_kernels/flash_attention.py). "auto" is what
    `chosen_here` says; xla if `start` is given.
    Raises ValueError for another name, and NotImplementedError if cudnn does not support the dtype, or gets documents,
    a softcap or sinks.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation: expected one of {IMPLEMENTATIONS}, got {implementation!r}")
    half = q_BSHh.dtype in (jnp.bfloat16, jnp.float16)
    if implementation == "auto":
        heads = q_BSHh.dtype, q_BSHh.shape[-1], v_BTKv.shape[-1]
        kind: Any = {"packed": starts is not None, "softcap": softcap > 0, "sinks": sinks is not None}
        implementation = "xla" if start is not None else chosen_here("auto", *heads, **kind)
    if implementation == "cudnn" and not half:
        raise NotImplementedError(
            f"cudnn attention: expected bfloat16 or float16, got {q_BSHh.dtype}; "
            "use model_dtype='bfloat16' or attention='xla'"
        )
    if implementation == "cudnn" and starts is not None:
        raise NotImplementedError(f"cudnn attention: expected one document in a row, got several; {USE_AUTO}")
    if implementation == "cudnn" and softcap:
        raise NotImplementedError(f"cudnn attention: expected no softcap, got {softcap}; {USE_AUTO}")
    if implementation == "cudnn" and sinks is not None:
        raise NotImplementedError(f"cudnn attention: expected no sinks, got some; {USE_AUTO}")
    if implementation == "mosaic":
        starts = jnp.zeros(q_BSHh.shape[:2], jnp.int32) if starts is None else starts
        scores: Any = {"window": window, "scale": scale, "softcap": softcap, "sinks": sinks}
        return kernel.attention(q_BSHh, k_BTKh, v_BTKv, starts, implementation="mosaic", **scores)
    if implementation == "cudnn":
        if k_BTKh.shape[1] > q_BSHh.shape[1]:
            return cudnn.attend_after(q_BSHh, k_BTKh, v_BTKv, window, scale)
        if v_BTKv.shape[-1] != q_BSHh.shape[-1]:
            return cudnn.attend_other_values(q_BSHh, k_BTKh, v_BTKv, window, scale)
        local = (window - 1, 0) if window else None
        options: dict[str, Any] = {"scale": scale, "implementation": implementation}
        return jax.nn.dot_product_attention(q_BSHh, k_BTKh, v_BTKv, is_causal=True, local_window_size=local, **options)
    factor = q_BSHh.shape[-1] ** -0.5 if scale is None else scale

    # Save q, k, v instead of several copies of the scores: O(S) residuals like flash attention, and faster. The mask is
    # made inside, else it would be saved too.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def masked(q, k, v, starts, sinks):
        first = k.shape[1] - q.shape[1] if start is None else start
        mask = visible(first, q.shape[1], k.shape[1], window)[None, None]
        if starts is not None:
            mask = mask & same_document(starts, k.shape[1])
        return by_xla(q, k, v, mask, factor, softcap, sinks)

    return masked(q_BSHh, k_BTKh, v_BTKv, starts, sinks)


def attend_in_context(
    q_BsHh: jax.Array, k_BsKh: jax.Array, v_BsKh: jax.Array, method: context.Method, **how: Any
) -> jax.Array:
    """Computes `attend` for this device's queries and the keys of whole sequences, sharded over the devices of `cp`.

    how: arguments of `attend`; its `starts` are of whole rows.
    """
    sinks = how["sinks"]
    if method == "ulysses":
        how["sinks"] = sinks if sinks is None else context.own_heads(sinks)
        return context.gather_heads(attend(*context.scatter_heads(q_BsHh, k_BsKh, v_BsKh), **how))
    scale = q_BsHh.shape[-1] ** -0.5 if how["scale"] is None else how["scale"]
    starts, window, softcap = (how[name] for name in ("starts", "window", "softcap"))
    kind: Any = {"packed": starts is not None, "softcap": softcap > 0, "window": window > 0}
    heads = q_BsHh.dtype, q_BsHh.shape[-1]
    by = chosen_here(how["implementation"], *heads, **kind, piece=q_BsHh.shape[1] // 2)
    rule = kernel.ScoreSettings(window, scale, softcap)
    return ring_attention(q_BsHh, k_BsKh, v_BsKh, starts, method=method, rule=rule, by=by, sinks_H=sinks)


USE_AUTO = "use attention='auto', or 'xla', which has S x S scores in memory"
# Products of 16-bit numbers that are summed in float32, in the backward pass too.
PRECISION = {"bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32, "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32}


def by_xla(
    q_BSHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKv: jax.Array,
    mask_B1ST: jax.Array,
    scale: float,
    softcap: float,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """softmax(scale q k^T) v over the keys where the mask is True, with float32 scores; softcap 0: no softcap.

    A query that sees no key, such as one of padding, gets a mean of all values, or zeros with sinks.
    The queries of all heads that share keys are rows of one matrix R = G S: with `jax.nn.dot_product_attention`, XLA
    copies the scores from one order into another, which takes half of its time on a CPU (docs/log, 2026-11-22).
    """
    B, S, H, h = q_BSHh.shape
    T, K = k_BTKh.shape[1:3]
    G = H // K
    q_BKRh = q_BSHh.reshape(B, S, K, G, h).transpose(0, 2, 3, 1, 4).reshape(B, K, G * S, h)
    sums: Any = {"precision": PRECISION.get(str(q_BSHh.dtype)), "preferred_element_type": jnp.float32}
    scores_BKRT = scale * jnp.einsum("BKRh,BTKh->BKRT", q_BKRh, k_BTKh, **sums)
    if softcap:
        scores_BKRT = softcap * jnp.tanh(scores_BKRT / softcap)
    scores_BKGST = scores_BKRT.reshape(B, K, G, S, T)
    shown_BKGST = jnp.where(mask_B1ST[:, :, None], scores_BKGST, jnp.finfo(jnp.float32).min)
    sinks_KG11 = None if sinks_H is None else sinks_H.astype(jnp.float32).reshape(K, G, 1, 1)
    weights_BKRT = softmax(shown_BKGST, sinks_KG11).astype(v_BTKv.dtype).reshape(B, K, G * S, T)
    y_BKRv = jnp.einsum("BKRT,BTKv->BKRv", weights_BKRT, v_BTKv)
    return y_BKRv.reshape(B, K, G, S, -1).transpose(0, 3, 1, 2, 4).reshape(B, S, H, -1)


def softmax(x: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Returns the softmax over the last axis.

    sinks `[..., 1]`: one more score in the denominator, not in the result.
    """
    top = jnp.max(x, axis=-1, keepdims=True)
    if sinks is None:
        exps = jnp.exp(x - jax.lax.stop_gradient(top))
        return quotient(exps, jnp.sum(exps, axis=-1, keepdims=True))
    sinks = jnp.expand_dims(sinks, tuple(range(x.ndim - sinks.ndim)))
    top = jax.lax.stop_gradient(jnp.maximum(top, sinks))
    exps = jnp.exp(x - top)
    return quotient(exps, jnp.sum(exps, axis=-1, keepdims=True) + jnp.exp(sinks - top))


def visible(start: jax.Array | int, queries: int, keys: int, window: int) -> jax.Array:
    """The mask `[S, T]` of causal attention within a window: True if a query attends to a key.

    Key t has position t; the first query has position `start`.
    """
    query_S1 = start + jnp.arange(queries)[:, None]
    key_1T = jnp.arange(keys)[None, :]
    causal_ST = key_1T <= query_S1
    return causal_ST & (key_1T > query_S1 - window) if window else causal_ST


def same_document(starts_BS: jax.Array, keys: int) -> jax.Array:
    """A mask `[B, 1, S, T]`: False for keys before the start of the query's document.

    Causal attention needs no more.
    """
    key_111T = jnp.arange(keys)[None, None, None, :]
    return key_111T >= starts_BS[:, None, :, None]
