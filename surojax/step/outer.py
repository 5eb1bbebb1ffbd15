"""The outer layers: embedding, final norm, head and loss; replicated, or parallel over the vocabulary.

Replicated (the default): every device has all rows of the embedding and of the head. The gradients are summed over the
devices once per step.

Sharded (`shard_outer`: over `dp_shard x cp`; tensor parallelism: over `tp`; or both): each of the n devices has V / n
rows of the embedding and of the head, and of their accumulators. Each has tokens of its own: of other sequences, or of
another part of the same sequences. Weights are never all-gathered; tokens are communicated instead:

* The embedding all-gathers the token ids, looks up the rows that this device has, and reduce-scatters the result.
* The head all-gathers a slice of activations and computes this device's part of the logits. Only the maximum and the
  sum of exponentials are reduced over the devices, as in Megatron-LM (Shoeybi et al. 2019).

All-gathering the weights would send V rows three times per microbatch; this sends as many rows as there are tokens. For
Qwen's vocabulary of 152k and 4 x 2048 tokens that is 18 times less, and the unsharded 1.5 GB matrix and its gradient
are never in memory. The gradient of a shard needs no reduction.

`axes` are the mesh axes over which the vocabulary is sharded; () if it is replicated. Shape suffixes: B batch, S this
device's part of the sequence, D hidden size, C slices of tokens, N tokens of a slice on this device, M tokens of a
slice on all devices of `axes`, V vocabulary, v rows of the vocabulary on one device.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import cross_entropy as kernel
from surojax.models.linear import linear
from surojax.models.loss import sharded_cross_entropy
from surojax.models.model import Model
from surojax.models.operations import softcapped
from surojax.parallel.collectives import device_number, varying
from surojax.placement.mesh import AXES
from surojax.step.gradients import add

Axes = tuple[str, ...]


def local_rows(table_vD: jax.Array, ids: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """(row of each id in this device's shard of a table, whether the shard has that row)."""
    rows = ids - device_number(*axes)[0] * table_vD.shape[0]
    return rows, (rows >= 0) & (rows < table_vD.shape[0])


def embed(outer: dict, tokens_BS: jax.Array, axes: Axes, scale: float = 1.0) -> jax.Array:
    """Embeddings `[B, S, D]` of the tokens, times a scale; it is rounded to their dtype first, as in transformers."""
    x_BSD = _rows(outer, tokens_BS, axes)
    return x_BSD if scale == 1 else x_BSD * jnp.asarray(scale, x_BSD.dtype)


def _rows(outer: dict, tokens_BS: jax.Array, axes: Axes) -> jax.Array:
    """The rows `[B, S, D]` of the embedding that belong to the tokens."""
    if not axes:
        return outer["embed"][tokens_BS]
    tokens = jax.lax.all_gather(tokens_BS, axes, axis=0, tiled=True)
    rows, here = local_rows(outer["embed"], tokens, axes)
    x = jnp.where(here[..., None], outer["embed"][jnp.where(here, rows, 0)], 0)
    return jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)


def push_embed(grads: dict, tokens_BS: jax.Array, dx_BSD: jax.Array, axes: Axes, scale: float = 1.0) -> dict:
    """Adds the gradient of `embed` to the accumulators of the outer layers, if it is trained; returns all of them."""
    if "embed" not in grads:
        return grads
    table = grads["embed"]
    dx_BSD = dx_BSD if scale == 1 else dx_BSD * jnp.asarray(scale, dx_BSD.dtype)
    rows = tokens_BS
    if axes:
        tokens, dx_BSD = (jax.lax.all_gather(v, axes, axis=0, tiled=True) for v in (tokens_BS, dx_BSD))
        rows, here = local_rows(table, tokens, axes)
        rows = jnp.where(here, rows, table.shape[0])  # a row out of bounds is dropped
    return grads | {"embed": table.at[rows].add(dx_BSD.astype(table.dtype), mode="drop")}


@jax.named_scope("head")
def head(
    model: Model,
    outer: dict,
    grads: dict,
    x_BSD,
    labels_BS,
    scale,
    *,
    chunks: int,
    axes: Axes,
    z_loss: float,
):
    """(summed loss, d (scale * loss) / dx, outer accumulators plus the head's gradients).

    The tokens are processed in `chunks` slices. Loss and gradient of a slice are computed together, so the logits of
    one slice are in memory at a time and are never recomputed. dx is written over x. Gradients are of the loss plus
    z_loss * lse^2 per token; the returned loss is without that term. No gradient is computed of what has no accumulator
    in `grads`.
    """
    x_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
    labels_N = labels_BS.reshape(-1)
    used = {name: outer[name] for name in model.head_uses}
    n = labels_N.size // chunks
    loss_and_gradients = functools.partial(_sharded_slice, axes) if axes else _replicated_slice
    trained = [name for name in used if name in grads]

    def chunk(c, carry):
        x_ND, grads, total = carry
        x, labels = (jax.lax.dynamic_slice_in_dim(v, c * n, n) for v in (x_ND, labels_N))
        loss, d_used, dx = loss_and_gradients(model, used, trained, x, labels, scale, z_loss)
        grads = grads | add({name: grads[name] for name in trained}, d_used)
        return jax.lax.dynamic_update_slice_in_dim(x_ND, dx, c * n, 0), grads, total + loss

    x_ND, grads, total = jax.lax.fori_loop(0, chunks, chunk, (x_ND, grads, varying(jnp.float32(0), AXES)))
    return total, x_ND.reshape(x_BSD.shape), grads


def loss(model: Model, outer: dict, x_BSD, labels_BS, *, chunks: int, axes: Axes) -> jax.Array:
    """Summed loss, forward only: of this device's tokens; if sharded, this device's term of the sum over all devices.

    The tokens are processed in `chunks` slices.
    """
    x_CND = x_BSD.reshape(chunks, -1, x_BSD.shape[-1])
    labels_CN = labels_BS.reshape(chunks, -1)

    def chunk(c, total):
        if axes:
            y_MD, labels_M, mine_M = _gather_slice(axes, model.final(outer, x_CND[c]), labels_CN[c])
            logits_Mv, _ = _logits(model, y_MD, outer[model.head])
            return total + sharded_cross_entropy(logits_Mv, labels_M, mine_M, axes)[0]
        logits_NV, _ = _logits(model, model.final(outer, x_CND[c]), outer[model.head])
        return total - jnp.sum(kernel.logprob(logits_NV, labels_CN[c], implementation=model.precision.implementation))

    return jax.lax.fori_loop(0, chunks, chunk, varying(jnp.float32(0), AXES))


def _replicated_slice(model: Model, used: dict, trained: list[str], x_ND, labels_N, scale, z_loss: float):
    """(summed loss, gradients of those of `used` that are trained, gradient of x) of a slice of tokens.

    The head is replicated.
    """
    y_ND, final_vjp, table_VD = _final(model, used, x_ND)
    logits_NV, capped_vjp = _logits(model, y_ND, table_VD)
    out = kernel.loss_and_gradient(
        logits_NV, labels_N, scale, z_loss=z_loss, in_place=True, implementation=model.precision.implementation
    )
    d_table, dy_ND = _products(model, trained, capped_vjp(out.d_logits), y_ND, table_VD)
    d_others, dx_ND = final_vjp(dy_ND)
    return -jnp.sum(out.logprob), _of(trained, d_others | d_table), dx_ND


def _final(model: Model, used: dict, x_ND):
    """(x after the final norm, the norm's vjp, the head's matrix)."""
    others = {name: w for name, w in used.items() if name != model.head}
    return *jax.vjp(model.final, others, x_ND), used[model.head]


def _logits(model: Model, y_ND: jax.Array, table_VD: jax.Array) -> tuple[jax.Array, Callable]:
    """(logits `[N, V]`, a function from their gradient to that of the product of y and the head's matrix)."""
    product_NV = linear(y_ND, table_VD)
    if not model.logit_softcap:
        return product_NV, lambda d_logits_NV: d_logits_NV
    logits_NV, vjp = jax.vjp(lambda z_NV: softcapped(z_NV, model.logit_softcap), product_NV)
    return logits_NV, lambda d_logits_NV: vjp(d_logits_NV)[0]


def _products(model: Model, trained: list[str], d_logits_Mv, y_MD, table_vD) -> tuple[dict, jax.Array]:
    """(gradient of the head's matrix by its name, if it is trained; gradient of y) from these of the logits."""
    d_table = {}
    if model.head in trained:
        d_table[model.head] = jax.lax.dot_general(d_logits_Mv, y_MD, (((0,), (0,)), ((), ())))
    return d_table, d_logits_Mv @ table_vD


def _of(names: list[str], tree: dict) -> dict:
    """These entries of a dict."""
    return {name: tree[name] for name in names}


def _gather_slice(axes: Axes, y_ND, labels_N):
    """(activations of all devices, their labels, whether a token is from this device)."""
    y_MD, labels_M = (jax.lax.all_gather(v, axes, axis=0, tiled=True) for v in (y_ND, labels_N))
    owner_M = jnp.arange(labels_M.size) // labels_N.size
    return y_MD, labels_M, owner_M == device_number(*axes)[0]


def _sharded_slice(axes: Axes, model: Model, used: dict, trained: list[str], x_ND, labels_N, scale, z_loss: float):
    """`_replicated_slice` for a sharded head; the loss is this device's term of the sum over all devices."""
    y_ND, final_vjp, table_vD = _final(model, used, x_ND)
    y_MD, labels_M, mine_M = _gather_slice(axes, y_ND, labels_N)
    logits_Mv, capped_vjp = _logits(model, y_MD, table_vD)
    value, d_logits_Mv = sharded_cross_entropy(logits_Mv, labels_M, mine_M, axes, z_loss)
    d_logits_Mv = capped_vjp((d_logits_Mv * scale).astype(table_vD.dtype))
    d_table, dy_MD = _products(model, trained, d_logits_Mv, y_MD, table_vD)
    dy_ND = jax.lax.psum_scatter(dy_MD, axes, scatter_dimension=0, tiled=True)
    d_others, dx_ND = final_vjp(dy_ND)
    return value, _of(trained, d_others | d_table), dx_ND
