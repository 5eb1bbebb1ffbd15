"""Softmax cross-entropy with ignored labels: for the plain model, and for a vocabulary that is sharded over devices.

The engine uses `pallas_kernels.cross_entropy` for a replicated vocabulary; it computes loss and gradient in one pass.
Reported losses are in nats. The term z_loss * lse^2 (PaLM, Chowdhery et al. 2022, section 5: keeps log-sum-exp near 0)
is in the gradients only.

Shape suffixes: N tokens, V vocabulary, v entries of the vocabulary on one device.
"""

import jax
import jax.numpy as jnp

from surojax.parallel.collectives import device_number


@jax.custom_vjp
def cross_entropy(logits_NV: jax.Array, labels_N: jax.Array) -> jax.Array:
    """Sum over tokens of -log softmax(logits)[label], in nats, float32; labels < 0 are ignored.

    The gradient is written out as softmax(logits) - onehot(label), one elementwise pass in the dtype of the logits.
    Reverse mode of `take_along_axis` would scatter into an `[N, V]` array of zeros.
    """
    return _forward(logits_NV, labels_N)[0]


def _forward(logits_NV, labels_N):
    logits32 = logits_NV.astype(jnp.float32)
    lse_N = jax.nn.logsumexp(logits32, axis=-1)
    label_logit_N = jnp.take_along_axis(logits32, jnp.maximum(labels_N, 0)[:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(labels_N >= 0, lse_N - label_logit_N, 0.0)), (logits_NV, labels_N, lse_N)


def _backward(saved, d_loss):
    logits_NV, labels_N, lse_N = saved
    softmax_NV = jnp.exp(logits_NV - lse_N[:, None])
    onehot_NV = jax.lax.broadcasted_iota(jnp.int32, logits_NV.shape, 1) == labels_N[:, None]
    weight_N = jnp.where(labels_N >= 0, d_loss, 0.0)
    return ((softmax_NV - onehot_NV) * weight_N[:, None]).astype(logits_NV.dtype), None


cross_entropy.defvjp(_forward, _backward)


def sharded_cross_entropy(
    logits_Nv: jax.Array, labels_N: jax.Array, mine_N: jax.Array, axes: tuple[str, ...], z_loss: float = 0.0
):
    """Cross-entropy of logits sharded over mesh axes: (this device's term of the loss, float32 d loss / d logits).

    Device i has the entries i v to (i + 1) v - 1 of the vocabulary. All devices have the same N tokens. `mine_N` marks
    tokens whose log-sum-exp this device adds to its term, so that the sum over devices counts every token once. Labels
    < 0 are ignored. The gradient is of the loss plus z_loss * lse^2 of every token.
    """
    logits32 = logits_Nv.astype(jnp.float32)
    lse_N, label_Nv = _sharded_lse_and_label(logits32, labels_N, axes)
    valid_N = labels_N >= 0
    loss = jnp.sum(jnp.where(mine_N & valid_N, lse_N, 0.0))
    loss -= jnp.sum(jnp.where(label_Nv & valid_N[:, None], logits32, 0.0))
    softmax_Nv = jnp.exp(logits32 - lse_N[:, None])
    if z_loss:
        softmax_Nv = softmax_Nv * (1.0 + 2.0 * z_loss * lse_N)[:, None]
    return loss, jnp.where(valid_N[:, None], softmax_Nv - label_Nv, 0.0)


def sharded_logprob(logits_Nv: jax.Array, labels_N: jax.Array, mine_N: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """This device's terms `[N]` of the log-probabilities of the labels; arguments as of `sharded_cross_entropy`."""
    logits32 = logits_Nv.astype(jnp.float32)
    lse_N, label_Nv = _sharded_lse_and_label(logits32, labels_N, axes)
    label_logit_N = jnp.sum(jnp.where(label_Nv, logits32, 0.0), axis=1)
    return jnp.where(labels_N >= 0, label_logit_N - jnp.where(mine_N, lse_N, 0.0), 0.0)


def _sharded_lse_and_label(logits32: jax.Array, labels_N: jax.Array, axes: tuple[str, ...]):
    """Returns (log-sum-exp `[N]` over the whole vocabulary, mask `[N, v]`: this device's logit is the label's)."""
    top_N = jax.lax.pmax(jnp.max(logits32, axis=1), axes)
    lse_N = top_N + jnp.log(jax.lax.psum(jnp.sum(jnp.exp(logits32 - top_N[:, None]), axis=1), axes))
    row_N = labels_N - device_number(*axes)[0] * logits32.shape[1]
    return lse_N, jax.lax.broadcasted_iota(jnp.int32, logits32.shape, 1) == row_N[:, None]
