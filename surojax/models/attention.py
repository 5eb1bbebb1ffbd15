"""Scaled dot-product attention: an adapter over libraries, and the only file that knows their names.

Shape suffixes: B batch, S query positions, T key positions, H query heads, K key/value heads, h head dimension.
"""

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("auto", "xla", "cudnn")


def fits_cudnn(dtype, head_dim: int) -> bool:
    """Whether cuDNN's flash attention takes such heads on every NVIDIA GPU from sm_80 on."""
    return jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128


def attend(
    q_BSHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    *,
    start: jax.Array | int | None = None,
    window: int = 0,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(q k^T / sqrt(h)) v, causal -> `[B, S, H, h]`.

    start: position of the first query, if keys are a cache of T positions; None: queries and keys are the same
    positions. window: latest positions that a query sees, its own included (Beltagy et al. 2020); 0: all of them.
    implementation: "xla" runs anywhere and keeps the scores; "cudnn" is flash attention on NVIDIA GPUs from sm_80 on,
    for bfloat16 and float16; "auto" takes cudnn if the default backend is a GPU and the dtype allows it, else xla.
    Raises ValueError for another name, and NotImplementedError when cudnn is asked for with a dtype it does not have.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation: expected one of {IMPLEMENTATIONS}, got {implementation!r}")
    half = q_BSHh.dtype in (jnp.bfloat16, jnp.float16)
    flash = start is None and fits_cudnn(q_BSHh.dtype, q_BSHh.shape[-1])
    if implementation == "auto":
        implementation = "cudnn" if jax.default_backend() == "gpu" and flash else "xla"
    if implementation == "cudnn" and not half:
        raise NotImplementedError(
            f"cudnn attention: expected bfloat16 or float16, got {q_BSHh.dtype}; "
            "use model_dtype='bfloat16' or attention='xla'"
        )
    # With XLA, a window is a mask made of positions, in here: JAX's own would be residuals of the layers that have it.
    masked = start is not None or (window > 0 and implementation == "xla")

    def library(q, k, v):
        if masked:
            mask = visible(0 if start is None else start, q.shape[1], k.shape[1], window)[None, None]
            return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)
        local = (window - 1, 0) if window else None
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=local, implementation=implementation
        )

    if implementation == "xla":  # save q, k, v, not several copies of the scores: O(S) like flash attention, and faster
        library = jax.checkpoint(library, prevent_cse=False)
    return library(q_BSHh, k_BTKh, v_BTKh)


def visible(start: jax.Array | int, queries: int, keys: int, window: int) -> jax.Array:
    """Which of the first `keys` positions each query sees, `[S, T]`; the first query is at position `start`."""
    at_S1 = start + jnp.arange(queries)[:, None]
    key_1T = jnp.arange(keys)[None, :]
    seen_ST = key_1T <= at_S1
    return seen_ST & (key_1T > at_S1 - window) if window else seen_ST
