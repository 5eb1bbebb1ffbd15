"""Softmax cross-entropy of a language model's head: loss and gradient of rows of logits (z-loss: PaLM, section 5).

    lse_n    = log(sum_v exp(x_nv))
    logprob  = x_n,label - lse_n                          natural logarithms, so nats
    loss_n   = -logprob + z_loss * lse_n^2
    d_x_nv   = weight_n * (softmax(x)_nv * (1 + 2 z_loss lse_n) - [v = label])

Labels < 0 are ignored: loss, logprob and gradient are 0. A label >= V is nobody's word: nothing is read for it, loss
and logprob are NaN, which training shows, and the gradient is the softmax's alone.

Dtypes: everything is computed in float32; loss, lse and logprob are float32, gradients have the logits' dtype, rounded
once. Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose, need

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

OP = "cross_entropy"
f32 = jnp.float32


class Loss(NamedTuple):
    """What is known of each row; ignored labels: loss, logprob and gradient 0, lse that of the row.

    d_logits: weight * d loss / d logits, None where it was not asked for.
    """

    loss: jax.Array
    lse: jax.Array
    logprob: jax.Array
    d_logits: jax.Array | None = None


# ---- Reference --------------------------------------------------------------------------------------------------


def _reference_forward(logits_NV, labels_N, z_loss: float) -> Loss:
    logits32_NV, V = logits_NV.astype(f32), logits_NV.shape[1]
    lse_N = jax.nn.logsumexp(logits32_NV, axis=-1)
    label_N = jnp.clip(labels_N, 0, V - 1)[:, None]
    label_logit_N = jnp.take_along_axis(logits32_NV, label_N, axis=1, mode="promise_in_bounds")[:, 0]
    nll_N = jnp.where(labels_N < V, lse_N - label_logit_N, jnp.nan)
    nll_N = jnp.where(labels_N >= 0, nll_N, 0.0)
    penalty_N = jnp.where(labels_N >= 0, z_loss * lse_N * lse_N, 0.0) if z_loss else 0.0
    return Loss(nll_N + penalty_N, lse_N, -nll_N)


def _reference_gradient(logits_NV, labels_N, lse_N, weight, z_loss: float):
    """weight: [] or [N]. The gradient is written out: reverse mode would scatter into a zeroed `[N, V]` array."""
    softmax_NV = jnp.exp(logits_NV.astype(f32) - lse_N[:, None])
    if z_loss:
        softmax_NV = softmax_NV * (1.0 + 2.0 * z_loss * lse_N)[:, None]
    onehot_NV = jax.lax.broadcasted_iota(jnp.int32, logits_NV.shape, 1) == labels_N[:, None]
    weight_N = jnp.where(labels_N >= 0, weight, 0.0)
    return ((softmax_NV - onehot_NV) * weight_N[:, None]).astype(logits_NV.dtype)


# ---- Public functions -------------------------------------------------------------------------------------------


def loss_and_gradient(
    logits: Float[Array, "*N V"],
    labels: Int[Array, "*N"],
    weight: Float[Array, ""],
    *,
    z_loss: float = 0.0,
    in_place: bool = False,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Loss:
    """Loss of every row and weight * its gradient, in one kernel.

    logits: float32 or bfloat16. labels: int32, < 0 = ignored. weight: [], float32, what the gradient is multiplied by.
    z_loss: weight of lse^2 in the loss. in_place: the gradient is written over the logits, which saves memory where the
    caller needs them no more (in `jax.jit` they should be an intermediate value or a donated argument); refused in
    `jax.shard_map(check_vma=True)`, where JAX takes no references. Returns Loss with [*N] float32 and d_logits
    [*N, V] of the logits' dtype. Not differentiable itself: `cross_entropy` is. Raises ValueError.
    """
    _check(logits, labels, z_loss)
    need(jnp.shape(weight) == (), OP, "weight", "one number, shape ()", jnp.shape(weight))
    x_NV, labels_N = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    choose(OP, implementation)
    out = _reference_forward(x_NV, labels_N, z_loss)
    out = out._replace(d_logits=_reference_gradient(x_NV, labels_N, out.lse, weight, z_loss))
    return _shaped(out, logits)


def _shaped(out: Loss, logits) -> Loss:
    d_logits = None if out.d_logits is None else out.d_logits.reshape(logits.shape)
    return Loss(*(x.reshape(logits.shape[:-1]) for x in out[:3]), d_logits)


def _check(logits, labels, z_loss) -> None:
    need(logits.ndim >= 1 and logits.shape[-1] >= 1, OP, "logits", "shape [..., V] with V >= 1", logits.shape)
    need(logits.dtype in (f32, jnp.bfloat16), OP, "dtype of logits", "float32 or bfloat16", logits.dtype)
    need(labels.dtype == jnp.int32, OP, "dtype of labels", "int32", labels.dtype)
    need(labels.shape == logits.shape[:-1], OP, "labels", f"shape {logits.shape[:-1]} as logits {logits.shape}", labels.shape)
    need(isinstance(z_loss, int | float) and z_loss >= 0, OP, "z_loss", "a number, 0 or more", z_loss)
