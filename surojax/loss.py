"""Softmax cross-entropy with ignored labels.

Shape suffixes: N tokens, V vocabulary.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def cross_entropy(logits_NV: jax.Array, labels_N: jax.Array) -> jax.Array:
    """Sum over tokens of -log softmax(logits)[label], in nats, float32; labels < 0 are ignored.

    The gradient is written out: reverse mode of `take_along_axis` would scatter into a zeroed `[N, V]` array, and
    softmax(logits) - onehot(label) is one elementwise pass in the dtype of the logits.
    """
    return _forward(logits_NV, labels_N)[0]


def _forward(logits_NV, labels_N):
    logits32 = logits_NV.astype(jnp.float32)
    lse_N = jax.nn.logsumexp(logits32, axis=-1)
    label_logit_N = jnp.take_along_axis(logits32, jnp.maximum(labels_N, 0)[:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(labels_N >= 0, lse_N - label_logit_N, 0.0)), (logits_NV, labels_N, lse_N)


def _backward(saved, d_loss):
    logits_NV, labels_N, lse_N = saved
    softmax_NV = jnp.exp(logits_NV.astype(jnp.float32) - lse_N[:, None])
    onehot_NV = jax.lax.broadcasted_iota(jnp.int32, logits_NV.shape, 1) == labels_N[:, None]
    weight_N = jnp.where(labels_N >= 0, d_loss, 0.0)
    return ((softmax_NV - onehot_NV) * weight_N[:, None]).astype(logits_NV.dtype), None


cross_entropy.defvjp(_forward, _backward)
