"""Forward and backward, written out layer by layer: fetch the weights, compute, push the gradients.

    for each microbatch:
        x = embed(tokens)
        for l in layers:              w = fetch(l);  save x;  x = block(w, x)
        loss, dx = head(x)            in slices of tokens; its gradient goes into the accumulators
        for l in reversed(layers):    w = fetch(l);  dw, dx = vjp(block)(w, saved x)(dx);  push(l, dw)
        push(embedding, dx)
    finish: sum over devices what is still local

Why not `jax.grad` of the whole model: it holds all gathered weights, or a whole tree of gradients, at once. Here one
layer's weights and gradients exist at a time, whatever the placement.

The loops carry stacked `[L, ...]` arrays and read or write layer l in place. `lax.scan` with xs/ys would copy the stack
(measured on compiled Llama-7B: 123 GiB instead of 85). Without recomputation the saved values are the block's own
reverse mode residuals, except the weights, which are fetched again: `jax.vjp(saveable_args=...)` leaves them out.

Everything here runs inside `jax.shard_map` over the data axes: arrays are one device's part. Communication is only in
`fetch`, `push` and `finish`. Shape suffixes: A microbatches, B local batch, S sequence, D hidden size, N tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from surojax import collectives
from surojax.collectives import WHOLE, varying
from surojax.mesh import DATA
from surojax.models.llama import ModelFunctions
from surojax.placement import Placement


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model's functions, where its tensors live, and how its memory is spent."""

    model: ModelFunctions
    placement: Placement
    dims: Any  # placement.shard_dims
    recompute_block: bool = True
    lmhead_chunks: int = 1


def read(tree, l: jax.Array | int):
    """Layer l of stacked arrays."""
    one = lambda x: jax.lax.dynamic_index_in_dim(x, l, 0, keepdims=False, allow_negative_indices=False)
    return jax.tree.map(one, tree)


def write(tree, new, l: jax.Array | int):
    """Stacked arrays with layer l replaced, in place when the compiler can."""
    one = lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), l, 0, allow_negative_indices=False)
    return jax.tree.map(one, tree, new)


def fetch(engine: Engine, weights, l: jax.Array | int):
    """The whole weights of layer l, on this device."""
    w = read(weights["blocks"], l)
    return collectives.gather(w, engine.dims["blocks"]) if engine.placement.weights.sharded else varying(w)


def push(engine: Engine, grads, dw, l: jax.Array):
    """Accumulators with the gradient of layer l added."""
    if engine.placement.grads.sharded:
        dw = collectives.scatter(dw, engine.dims["blocks"])
    return grads | {"blocks": write(grads["blocks"], _add(read(grads["blocks"], l), dw), l)}


def finish(engine: Engine, grads):
    """Accumulators summed over all devices, as the shards that the optimizer updates."""
    stacked = jax.tree.map(lambda d: d if d == WHOLE else d + 1, engine.dims["blocks"])
    blocks, outer = grads["blocks"], collectives.scatter(grads["outer"], engine.dims["outer"])
    if not engine.placement.grads.sharded:
        blocks = collectives.scatter(blocks, stacked)
    return {
        "blocks": collectives.sum_rest(blocks, engine.dims["blocks"]),
        "outer": collectives.sum_rest(outer, engine.dims["outer"]),
    }


def loss_and_gradients(engine: Engine, weights, inputs_ABS: jax.Array, labels_ABS: jax.Array):
    """(mean loss in nats per label, gradients as `finish` leaves them) of all microbatches and devices together.

    Labels < 0 are ignored and not counted, so the result does not depend on how a batch is split into microbatches.
    """
    model, L = engine.model, engine.model.num_layers
    scale = 1.0 / jnp.maximum(count(labels_ABS), 1).astype(jnp.float32)
    outer = varying(weights["outer"])

    def microbatch(a, carry):
        grads, total = carry
        inputs_BS, labels_BS = read((inputs_ABS, labels_ABS), a)
        x_BSD, saved, block_vjp = forward(engine, weights, model.embed(outer, inputs_BS))
        loss, dx_BSD, grads = head(engine, outer, grads, x_BSD, labels_BS, scale)

        def backward(i, carry):
            dx_BSD, grads = carry
            l = L - 1 - i
            dw, dx_BSD = block_vjp(fetch(engine, weights, l), read(saved, l), dx_BSD)
            return dx_BSD, push(engine, grads, dw, l)

        dx_BSD, grads = jax.lax.fori_loop(0, L, backward, (dx_BSD, grads))
        return grads | {"outer": model.push_embed(grads["outer"], inputs_BS, dx_BSD)}, total + loss

    zero = (accumulators(engine, weights), varying(jnp.float32(0)))
    grads, total = jax.lax.fori_loop(0, inputs_ABS.shape[0], microbatch, zero)
    return jax.lax.psum(total, DATA) * scale, finish(engine, grads)


def forward(engine: Engine, weights, x_BSD: jax.Array) -> tuple[jax.Array, Any, Callable]:
    """All blocks: (output, what was saved `[L, ...]`, a function (w, saved of one layer, dy) -> (dw, dx))."""
    model, L = engine.model, engine.model.num_layers

    def run_and_save(w, x_BSD):
        if engine.recompute_block:
            return model.block(w, x_BSD), x_BSD
        return jax.vjp(model.block, w, x_BSD, saveable_args=(False, True))

    def block_vjp(w, saved, dy_BSD):
        if engine.recompute_block:
            saved = jax.vjp(model.block, w, saved)[1]
        else:
            saved.args_res = [w, saved.args_res[1]]
        return saved(dy_BSD)

    like = jax.eval_shape(lambda w, x: run_and_save(fetch(engine, w, 0), x)[1], weights, x_BSD)
    stack = jax.tree.map(lambda s: varying(jnp.zeros((L, *s.shape), s.dtype)), like)
    structure = jax.tree.structure(like)

    def layer(l, carry):
        x_BSD, stack = carry
        x_BSD, saved = run_and_save(fetch(engine, weights, l), x_BSD)
        return x_BSD, write(stack, jax.tree.unflatten(structure, jax.tree.leaves(saved)), l)

    x_BSD, stack = jax.lax.fori_loop(0, L, layer, (x_BSD, stack))
    return x_BSD, stack, block_vjp


def head(engine: Engine, outer, grads, x_BSD: jax.Array, labels_BS: jax.Array, scale: jax.Array):
    """(summed loss, d loss x scale / dx, accumulators with the head's gradients added), a slice of tokens at a time.

    Loss and gradient of a slice are computed together, so logits exist once, for one slice, and are never recomputed;
    dx is written over x.
    """
    x_ND, labels_N = x_BSD.reshape(-1, x_BSD.shape[-1]), labels_BS.reshape(-1)
    used = {name: outer[name] for name in engine.model.head_uses}
    n = labels_N.size // engine.lmhead_chunks

    def chunk(c, carry):
        x_ND, grads, total = carry
        x, labels = (jax.lax.dynamic_slice_in_dim(v, c * n, n) for v in (x_ND, labels_N))
        loss, vjp = jax.vjp(functools.partial(engine.model.head_loss, labels_N=labels), used, x)
        d_used, dx = vjp(varying(scale))
        grads = grads | {"outer": grads["outer"] | _add({name: grads["outer"][name] for name in used}, d_used)}
        return jax.lax.dynamic_update_slice_in_dim(x_ND, dx, c * n, 0), grads, total + loss

    x_ND, grads, total = jax.lax.fori_loop(0, engine.lmhead_chunks, chunk, (x_ND, grads, varying(jnp.float32(0))))
    return total, x_ND.reshape(x_BSD.shape), grads


def evaluate(engine: Engine, weights, inputs_BS: jax.Array, labels_BS: jax.Array):
    """(summed loss in nats, labels counted) over all devices; forward only."""
    model, outer = engine.model, varying(weights["outer"])
    layer = lambda l, x_BSD: model.block(fetch(engine, weights, l), x_BSD)
    x_BSD = jax.lax.fori_loop(0, model.num_layers, layer, model.embed(outer, inputs_BS))
    x_CND = x_BSD.reshape(engine.lmhead_chunks, -1, x_BSD.shape[-1])
    labels_CN = labels_BS.reshape(engine.lmhead_chunks, -1)
    chunk = lambda c, total: total + model.head_loss(outer, x_CND[c], labels_CN[c])
    total = jax.lax.fori_loop(0, engine.lmhead_chunks, chunk, varying(jnp.float32(0)))
    return jax.lax.psum(total, DATA), count(labels_BS)


def count(labels: jax.Array) -> jax.Array:
    """Labels that are not ignored, on all devices together."""
    return jax.lax.psum(jnp.sum(labels >= 0, dtype=jnp.int32), DATA)


def accumulators(engine: Engine, weights):
    """Zeros for the gradients: the blocks' as the placement says, the outer ones whole (summed once per step)."""
    dtype, dims = engine.placement.grads.dtype, engine.dims["blocks"]
    blocks = weights["blocks"]
    if engine.placement.grads.sharded and not engine.placement.weights.sharded:
        blocks = jax.eval_shape(lambda t: jax.vmap(lambda w: collectives.scatter(varying(w), dims))(t), blocks)
    elif engine.placement.weights.sharded and not engine.placement.grads.sharded:
        blocks = jax.eval_shape(lambda t: jax.vmap(lambda w: collectives.gather(w, dims))(t), blocks)
    return jax.tree.map(lambda w: varying(jnp.zeros(w.shape, dtype)), weights | {"blocks": blocks})


def _add(tree, more):
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, more)
