"""Scaled dot-product attention: an adapter for the libraries that compute it. No other file calls them.

Shape suffixes: B batch, S query positions, T key positions, H query heads, K key/value heads, h head dimension.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import attention as kernel, dispatch

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "mosaic")


def fits_cudnn(dtype, head_dim: int) -> bool:
    """True if cuDNN's flash attention supports heads of this dtype and size on NVIDIA GPUs of sm_80 and newer."""
    return jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128


def fits_mosaic(dtype, head_dim: int) -> bool:
    """True if our flash attention supports heads of this dtype and size on NVIDIA GPUs of sm_80 and newer."""
    return kernel.fits(dtype, head_dim)


def chosen(implementation: str, dtype, head_dim: int, *, gpu: bool, packed: bool, softcap: bool = False) -> str:
    """The meaning of "auto" for heads of this dtype and size: the flash attention of a GPU if it takes them, else xla.

    packed: a row has several documents, which cuDNN separates by an S x S bias only. softcap: scores have a softcap,
    which cuDNN does not compute.
    """
    if implementation != "auto":
        return implementation
    if packed or softcap:
        return "mosaic" if gpu and fits_mosaic(dtype, head_dim) else "xla"
    return "cudnn" if gpu and fits_cudnn(dtype, head_dim) else "xla"


def chosen_here(implementation: str, dtype, head_dim: int, *, packed: bool, softcap: bool = False) -> str:
    """`chosen` for the device that programs are made for: `jax.default_device`, or else the default backend's."""
    # cuDNN is asked by `jax.nn` for what it supports; the kernel knows the GPUs that it is compiled for.
    ours = packed or softcap
    gpu = dispatch.choose("attention", None) == "mosaic" if ours else jax.default_backend() == "gpu"
    return chosen(implementation, dtype, head_dim, gpu=gpu, packed=packed, softcap=softcap)


def attend(
    q_BSHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    *,
    start: jax.Array | int | None = None,
    starts: jax.Array | None = None,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    implementation: str = "auto",
) -> jax.Array:
    """Causal attention softmax(scale q k^T) v: `[B, S, H, h]`.

    start: position of the first query if the keys are a cache of T positions; None: queries and keys have the same
    positions. starts: int32 `[B, S]`, for each token the index in its row at which its document starts, if a row has
    several: a query attends to its own document only. window: number of positions that a query attends to, its own and
    those before it (Beltagy et al. 2020); 0: its own and all before it.
    scale: of the scores; None: 1 / sqrt(h). softcap: scores s become softcap tanh(s / softcap) (Gemma 2); 0: not.
    implementation: "xla" runs on every backend and has the attention scores in memory, `[B, H, S, T]` of one layer at a
    time. "cudnn" is flash attention on NVIDIA GPUs of sm_80 and newer, for bfloat16 and float16. "mosaic" is flash
    attention with documents and softcaps, on the same GPUs (pallas_kernels/attention.py). "auto" is what
    `chosen_here` says; xla if `start` is given.
    Raises ValueError for another name, and NotImplementedError if cudnn does not support the dtype, or gets documents
    or a softcap.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation: expected one of {IMPLEMENTATIONS}, got {implementation!r}")
    half = q_BSHh.dtype in (jnp.bfloat16, jnp.float16)
    if implementation == "auto":
        heads = q_BSHh.dtype, q_BSHh.shape[-1]
        kind: Any = {"packed": starts is not None, "softcap": softcap > 0}
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
    if implementation == "mosaic":
        starts = jnp.zeros(q_BSHh.shape[:2], jnp.int32) if starts is None else starts
        scores: Any = {"window": window, "scale": scale, "softcap": softcap}
        return kernel.attention(q_BSHh, k_BTKh, v_BTKh, starts, implementation="mosaic", **scores)
    # With XLA, the mask of a window or of documents is made from positions inside `library`. JAX's own mask would be
    # saved as a residual of each layer that has a window.
    masked = start is not None or starts is not None or softcap > 0 or (window > 0 and implementation == "xla")
    options: dict[str, Any] = {"scale": scale, "implementation": implementation}

    def library(q, k, v, starts):
        if not masked:
            local = (window - 1, 0) if window else None
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local, **options)
        mask = visible(0 if start is None else start, q.shape[1], k.shape[1], window)[None, None]
        if starts is not None:
            mask = mask & same_document(starts, k.shape[1])
        if softcap:
            return with_softcap(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
        return jax.nn.dot_product_attention(q, k, v, mask=mask, **options)

    if implementation == "xla":
        # Save q, k, v instead of several copies of the scores: O(S) residuals like flash attention, and faster.
        library = jax.checkpoint(library, prevent_cse=False)
    return library(q_BSHh, k_BTKh, v_BTKh, starts)


USE_AUTO = "use attention='auto', or 'xla', which has S x S scores in memory"


def with_softcap(
    q_BSHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array, mask_B1ST: jax.Array, scale: float, softcap: float
) -> jax.Array:
    """softmax(softcap tanh(scale q k^T / softcap)) v of the keys that the mask shows, with float32 scores.

    A query that sees no key, such as one of padding, gets a mean of all values.
    """
    B, S, H, h = q_BSHh.shape
    K = k_BTKh.shape[2]
    q_BSKGh = q_BSHh.reshape(B, S, K, H // K, h)
    scores_BKGST = scale * jnp.einsum("BSKGh,BTKh->BKGST", q_BSKGh, k_BTKh, preferred_element_type=jnp.float32)
    scores_BKGST = softcap * jnp.tanh(scores_BKGST / softcap)
    shown_BKGST = jnp.where(mask_B1ST[:, :, None], scores_BKGST, jnp.finfo(jnp.float32).min)
    weights_BKGST = jax.nn.softmax(shown_BKGST, axis=-1).astype(v_BTKh.dtype)
    return jnp.einsum("BKGST,BTKh->BSKGh", weights_BKGST, v_BTKh).reshape(B, S, H, h)


def visible(start: jax.Array | int, queries: int, keys: int, window: int) -> jax.Array:
    """A mask `[S, T]`: True if a query attends to a key. Key t has position t; the first query has position `start`."""
    query_S1 = start + jnp.arange(queries)[:, None]
    key_1T = jnp.arange(keys)[None, :]
    causal_ST = key_1T <= query_S1
    return causal_ST & (key_1T > query_S1 - window) if window else causal_ST


def same_document(starts_BS: jax.Array, keys: int) -> jax.Array:
    """A mask `[B, 1, S, T]`: True if a key is not before the query's document. Causal attention needs no more."""
    key_111T = jnp.arange(keys)[None, None, None, :]
    return key_111T >= starts_BS[:, None, :, None]
