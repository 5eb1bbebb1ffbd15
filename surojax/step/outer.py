"""The outer layers: embedding, final norm, head and loss; whole on every device, or parallel over the vocabulary.

Whole (the default): every device looks its tokens up in its own copy, and the gradients are summed once per step.

Sharded (`shard_outer`): a device holds the rows of V / n words of the embedding and of the head, their accumulators
too, and no device ever holds the rest. Instead of weights, tokens travel: a lookup gathers the token ids, takes the
rows it has, and reduce-scatters them; the head gathers a slice of activations, computes its part of the logits, and
shares only the maximum and the sum of exponentials (as in Megatron-LM, Shoeybi et al. 2019, there over tensor-parallel
devices). Gathering the weights instead would move V rows three times a microbatch where this moves as many rows as
there are tokens, and its gradient needs no reduction at all; for Qwen's 152k words and 4 x 2048 tokens that is 18
times less, and the 1.5 GB matrix and its gradient are never in memory.

Shape suffixes: B batch, S sequence, D hidden size, N tokens of a slice on this device, M of it on all devices of
`dp_shard`, V vocabulary, v the words of one device.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import cross_entropy as kernel
from surojax.models.loss import sharded_cross_entropy
from surojax.models.model import Model
from surojax.models.operations import linear
from surojax.parallel.collectives import varying
from surojax.placement.mesh import SHARD
from surojax.step.gradients import add


def local_rows(table_vD: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(row of each id in this device's part of a table, whether it is there)."""
    rows = ids - jax.lax.axis_index(SHARD) * table_vD.shape[0]
    return rows, (rows >= 0) & (rows < table_vD.shape[0])


def embed(outer: dict, tokens_BS: jax.Array, sharded: bool) -> jax.Array:
    """Rows of the embedding `[B, S, D]`."""
    if not sharded:
        return outer["embed"][tokens_BS]
    tokens = jax.lax.all_gather(tokens_BS, SHARD, axis=0, tiled=True)
    rows, here = local_rows(outer["embed"], tokens)
    x = jnp.where(here[..., None], outer["embed"][jnp.where(here, rows, 0)], 0)
    return jax.lax.psum_scatter(x, SHARD, scatter_dimension=0, tiled=True)


def push_embed(grads: dict, tokens_BS: jax.Array, dx_BSD: jax.Array, sharded: bool) -> dict:
    """Accumulators of the outer layers with the embedding's gradient added: the transpose of `embed`."""
    table, rows = grads["embed"], tokens_BS
    if sharded:
        tokens, dx_BSD = (jax.lax.all_gather(v, SHARD, axis=0, tiled=True) for v in (tokens_BS, dx_BSD))
        rows, here = local_rows(table, tokens)
        rows = jnp.where(here, rows, table.shape[0])  # out of bounds: dropped
    return grads | {"embed": table.at[rows].add(dx_BSD.astype(table.dtype), mode="drop")}


def head(
    model: Model,
    outer: dict,
    grads: dict,
    x_BSD,
    labels_BS,
    scale,
    *,
    chunks: int,
    sharded: bool,
    z_loss: float,
):
    """(summed loss, d loss x scale / dx, outer accumulators plus the head's gradients), in `chunks` slices of tokens.

    Loss and gradient of a slice are computed together, so logits exist once, for one slice, and are never recomputed;
    dx is written over x. The gradients, not the loss, are those of the loss plus z_loss * lse^2.
    """
    x_ND, labels_N = x_BSD.reshape(-1, x_BSD.shape[-1]), labels_BS.reshape(-1)
    used = {name: outer[name] for name in model.head_uses}
    n = labels_N.size // chunks
    loss_and_gradients = _sharded_slice if sharded else _whole_slice

    def chunk(c, carry):
        x_ND, grads, total = carry
        x, labels = (jax.lax.dynamic_slice_in_dim(v, c * n, n) for v in (x_ND, labels_N))
        loss, d_used, dx = loss_and_gradients(model, used, x, labels, scale, z_loss)
        grads = grads | add({name: grads[name] for name in used}, d_used)
        return jax.lax.dynamic_update_slice_in_dim(x_ND, dx, c * n, 0), grads, total + loss

    x_ND, grads, total = jax.lax.fori_loop(0, chunks, chunk, (x_ND, grads, varying(jnp.float32(0))))
    return total, x_ND.reshape(x_BSD.shape), grads


def loss(model: Model, outer: dict, x_BSD, labels_BS, *, chunks: int, sharded: bool) -> jax.Array:
    """Summed loss of this device's tokens (or, sharded, this device's part of the sum over all), forward only."""
    x_CND, labels_CN = x_BSD.reshape(chunks, -1, x_BSD.shape[-1]), labels_BS.reshape(chunks, -1)

    def chunk(c, total):
        if sharded:
            y_MD, labels_M, mine_M = _gather_slice(model.final(outer, x_CND[c]), labels_CN[c])
            return total + sharded_cross_entropy(linear(y_MD, outer[model.head]), labels_M, mine_M, SHARD)[0]
        logits_NV = linear(model.final(outer, x_CND[c]), outer[model.head])
        return total - jnp.sum(kernel.logprob(logits_NV, labels_CN[c], implementation=model.precision.implementation))

    return jax.lax.fori_loop(0, chunks, chunk, varying(jnp.float32(0)))


def _whole_slice(model: Model, used: dict, x_ND, labels_N, scale, z_loss: float):
    y_ND, final_vjp, table_VD = _final(model, used, x_ND)
    logits_NV = linear(y_ND, table_VD)
    how = {"z_loss": z_loss, "in_place": True, "implementation": model.precision.implementation}
    out = kernel.loss_and_gradient(logits_NV, labels_N, scale, **how)
    d_table_VD, dy_ND = _products(out.d_logits, y_ND, table_VD)
    d_others, dx_ND = final_vjp(dy_ND)
    return -jnp.sum(out.logprob), d_others | {model.head: d_table_VD}, dx_ND


def _final(model: Model, used: dict, x_ND):
    """(x normed for the head, the norm's transpose, the head's matrix)."""
    others = {name: w for name, w in used.items() if name != model.head}
    return *jax.vjp(model.final, others, x_ND), used[model.head]


def _products(d_logits_Mv, y_MD, table_vD):
    """Gradients of the head's matrix and of y, of these logits' part."""
    return jax.lax.dot_general(d_logits_Mv, y_MD, (((0,), (0,)), ((), ()))), d_logits_Mv @ table_vD


def _gather_slice(y_ND, labels_N):
    """(activations of all devices, their labels, whether a token is one of this device's)."""
    y_MD, labels_M = (jax.lax.all_gather(v, SHARD, axis=0, tiled=True) for v in (y_ND, labels_N))
    owner_M = jnp.arange(labels_M.size) // labels_N.size
    return y_MD, labels_M, owner_M == jax.lax.axis_index(SHARD)


def _sharded_slice(model: Model, used: dict, x_ND, labels_N, scale, z_loss: float):
    y_ND, final_vjp, table_vD = _final(model, used, x_ND)
    y_MD, labels_M, mine_M = _gather_slice(y_ND, labels_N)
    value, d_logits_Mv = sharded_cross_entropy(linear(y_MD, table_vD), labels_M, mine_M, SHARD, z_loss)
    d_table_vD, dy_MD = _products((d_logits_Mv * scale).astype(table_vD.dtype), y_MD, table_vD)
    dy_ND = jax.lax.psum_scatter(dy_MD, SHARD, scatter_dimension=0, tiled=True)
    d_others, dx_ND = final_vjp(dy_ND)
    return value, d_others | {model.head: d_table_vD}, dx_ND
