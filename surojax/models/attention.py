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
    mask: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(q k^T / sqrt(h)) v -> `[B, S, H, h]`.

    Causal when `mask` is None; otherwise `mask` `[B|1, H|1, S, T]` is True where a query sees a key.
    implementation: "xla" runs anywhere and keeps the scores; "cudnn" is flash attention on NVIDIA GPUs from sm_80 on,
    for bfloat16 and float16; "auto" takes cudnn where the default backend is a GPU and the dtype allows it, else xla.
    Raises ValueError for another name, and NotImplementedError when cudnn is asked for with a dtype it does not have.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation: expected one of {IMPLEMENTATIONS}, got {implementation!r}")
    half = q_BSHh.dtype in (jnp.bfloat16, jnp.float16)
    flash = mask is None and fits_cudnn(q_BSHh.dtype, q_BSHh.shape[-1])
    if implementation == "auto":
        implementation = "cudnn" if jax.default_backend() == "gpu" and flash else "xla"
    if implementation == "cudnn" and not half:
        raise NotImplementedError(
            f"cudnn attention: expected bfloat16 or float16, got {q_BSHh.dtype}; "
            "use model_dtype='bfloat16' or attention='xla'"
        )

    def library(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=mask is None, implementation=implementation)

    if implementation == "xla":  # save q, k, v, not several copies of the scores: O(S) like flash attention, and faster
        library = jax.checkpoint(library, prevent_cse=False)
    return library(q_BSHh, k_BTKh, v_BTKh)
