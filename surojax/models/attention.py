"""Scaled dot-product attention: an adapter for the libraries that compute it. No other file calls them.

Shape suffixes: B batch, S query positions, T key positions, H query heads, K key/value heads, h head dimension.
"""

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


def chosen(implementation: str, dtype, head_dim: int, *, gpu: bool, packed: bool) -> str:
    """The meaning of "auto" for heads of this dtype and size: the flash attention of a GPU if it takes them, else xla.

    packed: a row has several documents, which cuDNN separates by an S x S bias only.
    """
    if implementation != "auto":
        return implementation
    if packed:
        return "mosaic" if gpu and fits_mosaic(dtype, head_dim) else "xla"
    return "cudnn" if gpu and fits_cudnn(dtype, head_dim) else "xla"


def chosen_here(implementation: str, dtype, head_dim: int, *, packed: bool) -> str:
    """`chosen` for the device that programs are made for: `jax.default_device`, or else the default backend's."""
    # cuDNN is asked by `jax.nn` for what it supports; the kernel knows the GPUs that it is compiled for.
    gpu = dispatch.choose("attention", None) == "mosaic" if packed else jax.default_backend() == "gpu"
    return chosen(implementation, dtype, head_dim, gpu=gpu, packed=packed)


def attend(
    q_BSHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    *,
    start: jax.Array | int | None = None,
    starts: jax.Array | None = None,
    window: int = 0,
    implementation: str = "auto",
) -> jax.Array:
    """Causal attention softmax(q k^T / sqrt(h)) v: `[B, S, H, h]`.

    start: position of the first query if the keys are a cache of T positions; None: queries and keys have the same
    positions. starts: int32 `[B, S]`, for each token the index in its row at which its document starts, if a row has
    several: a query attends to its own document only. window: number of positions that a query attends to, its own and
    those before it (Beltagy et al. 2020); 0: its own and all before it.
    implementation: "xla" runs on every backend and has the attention scores in memory. "cudnn" is flash attention on
    NVIDIA GPUs of sm_80 and newer, for bfloat16 and float16. "mosaic" is flash attention within documents, on the same
    GPUs (pallas_kernels/attention.py). "auto" is what `chosen_here` says; xla if `start` is given.
    Raises ValueError for another name, and NotImplementedError if cudnn does not support the dtype or gets documents.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation: expected one of {IMPLEMENTATIONS}, got {implementation!r}")
    half = q_BSHh.dtype in (jnp.bfloat16, jnp.float16)
    if implementation == "auto":
        heads = q_BSHh.dtype, q_BSHh.shape[-1]
        implementation = "xla" if start is not None else chosen_here("auto", *heads, packed=starts is not None)
    if implementation == "cudnn" and not half:
        raise NotImplementedError(
            f"cudnn attention: expected bfloat16 or float16, got {q_BSHh.dtype}; "
            "use model_dtype='bfloat16' or attention='xla'"
        )
    if implementation == "cudnn" and starts is not None:
        raise NotImplementedError(f"cudnn attention: expected one document in a row, got several; {USE_AUTO}")
    if implementation == "mosaic":
        starts = jnp.zeros(q_BSHh.shape[:2], jnp.int32) if starts is None else starts
        return kernel.attention(q_BSHh, k_BTKh, v_BTKh, starts, window=window, implementation="mosaic")
    # With XLA, the mask of a window or of documents is made from positions inside `library`. JAX's own mask would be
    # saved as a residual of each layer that has a window.
    masked = start is not None or starts is not None or (window > 0 and implementation == "xla")

    def library(q, k, v, starts):
        if masked:
            mask = visible(0 if start is None else start, q.shape[1], k.shape[1], window)[None, None]
            if starts is not None:
                mask = mask & same_document(starts)
            return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)
        local = (window - 1, 0) if window else None
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=local, implementation=implementation
        )

    if implementation == "xla":
        # Save q, k, v instead of several copies of the scores: O(S) residuals like flash attention, and faster.
        library = jax.checkpoint(library, prevent_cse=False)
    return library(q_BSHh, k_BTKh, v_BTKh, starts)


USE_AUTO = "use attention='auto', or 'xla', which has S x S scores in memory"


def visible(start: jax.Array | int, queries: int, keys: int, window: int) -> jax.Array:
    """A mask `[S, T]`: True if a query attends to a key. Key t has position t; the first query has position `start`."""
    query_S1 = start + jnp.arange(queries)[:, None]
    key_1T = jnp.arange(keys)[None, :]
    causal_ST = key_1T <= query_S1
    return causal_ST & (key_1T > query_S1 - window) if window else causal_ST


def same_document(starts_BS: jax.Array) -> jax.Array:
    """A mask `[B, 1, S, S]`: True if a key is not before the query's document. Causal attention needs no more."""
    key_111S = jnp.arange(starts_BS.shape[1])[None, None, None, :]
    return key_111S >= starts_BS[:, None, :, None]
