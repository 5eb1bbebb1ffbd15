"""Causal attention by cuDNN for the queries of the last S of T positions: a chunk of a sequence and all earlier keys.

cuDNN aligns a causal mask with the first key, so one call cannot say that the queries begin later.

* Without a window: one call of all queries with the earlier keys, none of them hidden, and a causal one with the
  chunk's own keys. With the logsumexp l of a row's scores in each, and l = log(exp(l1) + exp(l2)) of both:

      o = exp(l1 - l) o1 + exp(l2 - l) o2

  The backward pass of flash attention reads o, its gradient and l: with those of the whole row, each call gives the
  exact gradients of its part. Scores that causality hides are computed in neither.
* With a window only its last keys are earlier ones. Queries of zeros are put before the first one, so that there are as
  many as keys, and one causal call is enough: the added ones cost the window's band for each.

`jax.nn.dot_product_attention` rounds l to 16 bits and ignores its gradient. So this calls the functions behind it,
which have l in float32. A kernel of ours does the same in one call (pallas_kernels/flash_attention.py); cuDNN's are the
fastest that there are, and at 131,072 tokens attention is two thirds of all FLOPs.

Shape suffixes: B batch, S query positions, T key positions, H query heads, K key/value heads, h head dimension.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as stablehlo  # float32 logsumexp: not in the public interface
from jaxlib.version import __version_info__ as jaxlib_version

from pallas_kernels import dispatch

KEYS_AND_VALUES = (192, 128)  # the only channels of keys and of values that differ and have a backward pass, on Hopper
HAS_SCORE_FUNCTIONS = jaxlib_version >= (0, 12)  # whose operator has an argument for them


def capability_here() -> tuple[int, int] | None:
    """The compute capability of a program's device, `jax.default_device` or the first one; None if it is no NVIDIA GPU.

    The planner makes a device that is not there the default.
    """
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    return dispatch.capability(device)


def _is_capable(capability: str) -> bool:
    """Returns True if the program's device has this compute capability, such as "9.0", or a newer one."""
    here = capability_here()
    return here is not None and here >= tuple(map(int, capability.split(".")))


# The shapes that cuDNN takes differ by GPU. JAX asks the GPU of this machine, which may not be the one it compiles for.
stablehlo.check_compute_capability = _is_capable


def attend_after(
    q_BSHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array, window: int, scale: float | None
) -> jax.Array:
    """Causal attention `[B, S, H, h]` for the last S of T positions. window, scale: see `attention.attend`."""
    before = k_BTKh.shape[1] - q_BSHh.shape[1]
    if window:
        odd = k_BTKh.shape[1] % 2  # cuDNN refuses odd lengths; causality hides what is added behind the last position

        def padded(x, first: int) -> jax.Array:
            return jnp.pad(x, ((0, 0), (first, odd), (0, 0), (0, 0)))

        options: Any = {"scale": scale, "implementation": "cudnn", "local_window_size": (window - 1, 0)}
        operands = padded(q_BSHh, before), padded(k_BTKh, 0), padded(v_BTKh, 0)
        y_BTHh = jax.nn.dot_product_attention(*operands, is_causal=True, **options)
        return y_BTHh[:, before : k_BTKh.shape[1]]
    return _in_two_parts(q_BSHh, k_BTKh, v_BTKh, q_BSHh.shape[-1] ** -0.5 if scale is None else scale)


def attend_other_values(
    q_BSHh: jax.Array, k_BSKh: jax.Array, v_BSKv: jax.Array, window: int, scale: float | None
) -> jax.Array:
    """Causal attention `[B, S, H, v]` with values of v channels, which `jax.nn` does not take; h, v: KEYS_AND_VALUES.

    window, scale: see `attention.attend`.
    """
    scale = q_BSHh.shape[-1] ** -0.5 if scale is None else scale
    options: Any = {"scale": scale, "mask_type": stablehlo.MaskType.CAUSAL, "sliding_window_length": window or None}
    attended: Any = stablehlo.dot_product_attention(q_BSHh, k_BSKh, v_BSKv, **options)  # without the log-sum-exp
    return attended


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _in_two_parts(q, k, v, scale: float) -> jax.Array:
    return _forward(q, k, v, scale)[0]


def _forward(q, k, v, scale: float):
    """Returns (attention's output o, residuals for `_backward`)."""
    before = k.shape[1] - q.shape[1]
    o1, lse1_BHS = forward_part(q, k[:, :before], v[:, :before], scale, causal=False)
    o2, lse2_BHS = forward_part(q, k[:, before:], v[:, before:], scale, causal=True)
    lse_BHS = jnp.logaddexp(lse1_BHS, lse2_BHS)

    def share(o_BSHh, lse_of_part_BHS):
        weight_BHS = jnp.exp(lse_of_part_BHS - lse_BHS)
        return weight_BHS.transpose(0, 2, 1)[..., None] * o_BSHh

    o = (share(o1, lse1_BHS) + share(o2, lse2_BHS)).astype(q.dtype)
    return o, (q, k, v, o, lse_BHS)


def _backward(scale: float, saved, do):
    q, k, v, o, lse_BHS = saved
    before = k.shape[1] - q.shape[1]
    rows = lse_BHS, o, do
    dq1, dk1, dv1 = backward_part(q, k[:, :before], v[:, :before], *rows, scale, causal=False)
    dq2, dk2, dv2 = backward_part(q, k[:, before:], v[:, before:], *rows, scale, causal=True)
    dq = (dq1.astype(jnp.float32) + dq2).astype(q.dtype)
    return dq, jnp.concatenate([dk1, dk2], axis=1), jnp.concatenate([dv1, dv2], axis=1)


_in_two_parts.defvjp(_forward, _backward)


def forward_part(q, k, v, scale: float, *, causal: bool) -> tuple[jax.Array, jax.Array]:
    """Returns (o, logsumexp `[B, H, S]` in float32) of attention to these keys only."""
    mask_type = stablehlo.MaskType.CAUSAL if causal else stablehlo.MaskType.NO_MASK
    attended: Any = stablehlo.dot_product_attention(q, k, v, scale=scale, mask_type=mask_type, return_residual=True)
    return attended


def backward_part(q, k, v, lse_BHS, o, do, scale: float, *, causal: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (dq, dk, dv) from a part of the keys. lse_BHS, o, do: of attention to all keys."""
    mask_type = stablehlo.MaskType.CAUSAL if causal else stablehlo.MaskType.NO_MASK
    left_out = [jnp.zeros(0, q.dtype)] * 7  # bias, lengths, offsets and tables of pages
    options: dict[str, Any] = {"score_mod": None} if HAS_SCORE_FUNCTIONS else {}
    dq, dk, dv = stablehlo._dot_product_attention_bwd_p_wrapper.bind(
        *(q, k, v, *left_out, lse_BHS, o, do),
        scale=scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=mask_type,
        layout=stablehlo.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **options,
    )
    return dq, dk, dv
