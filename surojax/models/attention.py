"""Scaled dot-product attention: an adapter for the libraries that compute it. No other file calls them.

Shape suffixes: B batch, S query positions, T key positions, H query heads, K key/value heads, h head dimension.
"""

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("auto", "xla", "cudnn")


def fits_cudnn(dtype, head_dim: int) -> bool:
    """True if cuDNN's flash attention supports heads of this dtype and size on NVIDIA GPUs of sm_80 and newer."""
    return jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128


def attend(
    q_BSHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    *,
    start: jax.Array | int | None = None,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    implementation: str = "auto",
) -> jax.Array:
    """Causal attention softmax(scale q k^T) v: `[B, S, H, h]`.

    start: position of the first query if the keys are a cache of T positions; None: queries and keys have the same
    positions. window: number of positions that a query attends to, its own and those before it (Beltagy et al. 2020);
    0: its own and all before it.
    scale: of the scores; None: 1 / sqrt(h). softcap: scores s become softcap tanh(s / softcap) (Gemma 2); 0: not. That
    is computed by XLA only, so its scores, `[B, H, S, T]` float32 of one layer at a time, are in memory on GPUs too.
    implementation: "xla" runs on every backend and has the attention scores in memory. "cudnn" is flash attention on
    NVIDIA GPUs of sm_80 and newer, for bfloat16 and float16. "auto" is cudnn if the default backend is a GPU, the heads
    fit (`fits_cudnn`), `start` is None and there is no softcap; else xla.
    Raises ValueError for another name, and NotImplementedError if cudnn does not support the dtype or the softcap.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation: expected one of {IMPLEMENTATIONS}, got {implementation!r}")
    half = q_BSHh.dtype in (jnp.bfloat16, jnp.float16)
    flash = start is None and not softcap and fits_cudnn(q_BSHh.dtype, q_BSHh.shape[-1])
    if implementation == "auto":
        implementation = "cudnn" if jax.default_backend() == "gpu" and flash else "xla"
    if implementation == "cudnn" and not half:
        raise NotImplementedError(
            f"cudnn attention: expected bfloat16 or float16, got {q_BSHh.dtype}; "
            "use model_dtype='bfloat16' or attention='xla'"
        )
    if implementation == "cudnn" and softcap:
        raise NotImplementedError(f"cudnn attention: expected no softcap, got {softcap}; use attention='xla'")
    # With XLA, the mask of a window is made from positions inside `library`. JAX's own mask would be saved as a
    # residual of each layer that has a window.
    masked = start is not None or (window > 0 and implementation == "xla")

    def library(q, k, v):
        if masked or softcap:
            mask = visible(0 if start is None else start, q.shape[1], k.shape[1], window)[None, None]
            if softcap:
                return with_softcap(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
            return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation=implementation)
        local = (window - 1, 0) if window else None
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=local, scale=scale, implementation=implementation
        )

    if implementation == "xla":
        # Save q, k, v instead of several copies of the scores: O(S) residuals like flash attention, and faster.
        library = jax.checkpoint(library, prevent_cse=False)
    return library(q_BSHh, k_BTKh, v_BTKh)


def with_softcap(
    q_BSHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array, mask_11ST: jax.Array, scale: float, softcap: float
) -> jax.Array:
    """softmax(softcap tanh(scale q k^T / softcap)) v of the keys that the mask shows, with float32 scores."""
    B, S, H, h = q_BSHh.shape
    K = k_BTKh.shape[2]
    q_BSKGh = q_BSHh.reshape(B, S, K, H // K, h)
    scores_BKGST = scale * jnp.einsum("BSKGh,BTKh->BKGST", q_BSKGh, k_BTKh, preferred_element_type=jnp.float32)
    scores_BKGST = softcap * jnp.tanh(scores_BKGST / softcap)
    shown_BKGST = jnp.where(mask_11ST[:, :, None], scores_BKGST, -jnp.inf)
    weights_BKGST = jax.nn.softmax(shown_BKGST, axis=-1).astype(v_BTKh.dtype)
    return jnp.einsum("BKGST,BTKh->BSKGh", weights_BKGST, v_BTKh).reshape(B, S, H, h)


def visible(start: jax.Array | int, queries: int, keys: int, window: int) -> jax.Array:
    """A mask `[S, T]`: True if a query attends to a key. Key t has position t; the first query has position `start`."""
    query_S1 = start + jnp.arange(queries)[:, None]
    key_1T = jnp.arange(keys)[None, :]
    causal_ST = key_1T <= query_S1
    return causal_ST & (key_1T > query_S1 - window) if window else causal_ST
