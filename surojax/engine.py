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

Stacks may rest in pinned host memory (`offload_*`): `read` brings one layer to the device, `write` returns it to where
its stack rests. Where fetching costs time, because weights rest in shards or in host memory, layer l + 1 is fetched
while layer l computes: the loops carry the weights of the next layer, and two layers of weights are on the device.

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
from surojax.mesh import DATA, REPLICATE, SHARD
from surojax.models.llama import ModelFunctions
from surojax.offload import Part, allocate, parts, read, write
from surojax.outer import add, embed, head, loss, push_embed
from surojax.placement import Placement


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model's functions, where its tensors live, and how its memory is spent."""

    model: ModelFunctions
    placement: Placement
    dims: Any  # placement.shard_dims: how shards of master weights and moments are cut
    resting: Any  # placement.resting_dims: how the work weights rest
    recompute_block: bool = True
    lmhead_chunks: int = 1


def fetch(engine: Engine, stack, l: jax.Array | int):
    """The whole weights of layer l of a stack, on this device."""
    w = read(stack, l)
    return collectives.gather(w, engine.dims["blocks"]) if engine.placement.weights.sharded else varying(w)


def push(engine: Engine, grads, dw, l: jax.Array, first: jax.Array):
    """(accumulators with the gradient of layer l added, sum of squares of what they hold now of layer l).

    `first` says that nothing was added to them in this step: then those in host memory may hold anything.
    """
    if engine.placement.grads.sharded:
        dw = collectives.scatter(dw, engine.dims["blocks"])
    old = read(grads["blocks"], l)
    if engine.placement.grads.home == "host":
        old = jax.tree.map(lambda x: jnp.where(first, jnp.zeros_like(x), x), old)
    # As in the update (step.py), a barrier between reads and writes keeps XLA from copying the whole stack.
    total = jax.lax.optimization_barrier(add(old, dw))
    complete = summed_by_push(engine)
    squares = collectives.sum_of_squares(total, engine.dims["blocks"]) if complete else collectives.no_squares()
    return grads | {"blocks": write(grads["blocks"], total, l)}, squares


def summed_by_push(engine: Engine) -> bool:
    """Whether accumulators need no more sums over devices after the last push."""
    one_shard = not collectives.active(SHARD)
    return (one_shard or engine.placement.grads.sharded) and not collectives.active(REPLICATE)


def finish(engine: Engine, grads, squares):
    """(accumulators summed over all devices, as the shards that the optimizer updates; their global norm).

    `squares` is the sum of squares of the blocks' accumulators if `push` completed them; then they are not touched
    again, which saves a pass over the host link where they rest in host memory.
    """
    dims, table = engine.dims, engine.placement.grads
    done = {name for name, d in engine.resting["outer"].items() if d != WHOLE}  # gathered as shards: outer.py
    scatter = lambda name, g: g if name in done else collectives.scatter(g, dims["outer"][name])
    outer = collectives.add_up({name: scatter(name, g) for name, g in grads["outer"].items()}, REPLICATE)
    blocks = grads["blocks"]
    if not summed_by_push(engine):
        if not table.sharded:
            blocks = collectives.scatter(blocks, jax.tree.map(lambda d: d if d == WHOLE else d + 1, dims["blocks"]))
        if table.home == "device":
            blocks = collectives.add_up(blocks, REPLICATE)
        layer, start = functools.partial(_finish_layer, engine), (blocks, collectives.no_squares())
        blocks, squares = jax.lax.fori_loop(0, engine.model.num_layers, layer, start)
        blocks = collectives.same(blocks, REPLICATE)
    squares = add(squares, collectives.sum_of_squares(outer, dims["outer"]))
    return {"blocks": blocks, "outer": outer}, collectives.norm(*squares)


def _finish_layer(engine: Engine, l: jax.Array, carry):
    """(accumulators with layer l summed over `dp_replicate`, sums of squares with those of layer l added)."""
    blocks, squares = carry
    total = collectives.add_up(read(blocks, l), REPLICATE)
    if engine.placement.grads.home == "host" and collectives.active(REPLICATE):  # in device memory they are summed
        total = jax.lax.optimization_barrier(total)
        blocks = write(blocks, varying(total, (REPLICATE,)), l)  # typed like the layers that still differ
    return blocks, add(squares, collectives.sum_of_squares(total, engine.dims["blocks"]))


def loss_and_gradients(engine: Engine, weights, inputs_ABS: jax.Array, labels_ABS: jax.Array):
    """(mean loss in nats per label, gradients as `finish` leaves them, their norm) of all microbatches and devices.

    Labels < 0 are ignored and not counted, so the result does not depend on how a batch is split into microbatches.
    """
    model = engine.model
    scale = 1.0 / jnp.maximum(count(labels_ABS), 1).astype(jnp.float32)
    outer, ahead, sharded = varying(weights["outer"]), Ahead(engine, weights), engine.placement.outer.sharded

    def microbatch(a, carry):
        grads, total, _, held = carry
        inputs_BS, labels_BS = read((inputs_ABS, labels_ABS), a)
        x_BSD, saved, block_vjp, held = forward(engine, ahead, embed(outer, inputs_BS, sharded), held)
        loss, dx_BSD, d_outer = head(
            model, outer, grads["outer"], x_BSD, labels_BS, scale, chunks=engine.lmhead_chunks, sharded=sharded
        )
        grads = grads | {"outer": d_outer}

        def backward(w, l, carry):
            dx_BSD, grads, squares = carry
            dw, dx_BSD = block_vjp(w, read(saved, l), dx_BSD)
            grads, of_layer = push(engine, grads, dw, l, first=a == 0)
            return dx_BSD, grads, add(squares, of_layer)

        start = (dx_BSD, grads, collectives.no_squares())
        (dx_BSD, grads, squares), held = ahead.over_layers(backward, start, held, backward=True)
        d_outer = push_embed(grads["outer"], inputs_BS, dx_BSD, sharded)
        return grads | {"outer": d_outer}, total + loss, squares, held

    start = (accumulators(engine, weights), varying(jnp.float32(0)), collectives.no_squares(), ahead.first())
    grads, total, squares, _ = jax.lax.fori_loop(0, inputs_ABS.shape[0], microbatch, start)
    return collectives.add_up(total, *DATA) * scale, *finish(engine, grads, squares)


class Ahead:
    """Fetches each layer one layer early where fetching costs time; what is `held` travels in the loops' carry.

    The last fetch of a forward pass is what the backward pass starts with, and the other way around.
    """

    def __init__(self, engine: Engine, weights):
        self.engine, self.parts = engine, parts(weights["blocks"])

    def fetch(self, part: Part, l: jax.Array | int):
        """The whole weights of layer l of the model, which is in this part."""
        return fetch(self.engine, part.stack, l - part.start)

    def early(self, part: Part) -> bool:
        """Whether its layers are fetched one layer early. Of a split stack the last part rests in host memory."""
        row = self.engine.placement.weights
        return row.sharded or (row.home == "host" and part is self.parts[-1])

    def first(self):
        """What is held before the first layer, for each part."""
        return [self.fetch(part, part.start) if self.early(part) else None for part in self.parts]

    def over_layers(self, step: Callable, carry, held, *, backward: bool = False):
        """(carry after carry = step(w, l, carry) for every layer, first to last or backward; what is held then)."""
        held = list(held)
        for i, part in sorted(enumerate(self.parts), reverse=backward):
            n = part.stop - part.start

            def layer(k, carry, part=part):
                carry, held = carry
                l, then = part.start + k, jnp.minimum(part.start + k + 1, part.stop - 1)
                if backward:
                    l, then = part.stop - 1 - k, jnp.maximum(part.stop - 2 - k, part.start)
                w, held = (held, self.fetch(part, then)) if self.early(part) else (self.fetch(part, l), None)
                return step(w, l, carry), held

            carry, held[i] = jax.lax.fori_loop(0, n, layer, (carry, held[i]))
        return carry, held


def forward(engine: Engine, ahead: Ahead, x_BSD: jax.Array, held) -> tuple[jax.Array, Any, Callable, Any]:
    """All blocks: (output, what was saved `[L, ...]`, a function (w, saved of one layer, dy) -> (dw, dx), held)."""
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

    like = jax.eval_shape(lambda x: run_and_save(ahead.fetch(ahead.parts[0], 0), x)[1], x_BSD)
    stack = jax.tree.map(lambda s: varying(jnp.zeros((L, *s.shape), s.dtype)), like)
    stack, structure = allocate(stack, engine.placement.residuals.home), jax.tree.structure(like)

    def layer(w, l, carry):
        x_BSD, stack = carry
        x_BSD, saved = run_and_save(w, x_BSD)
        return x_BSD, write(stack, jax.tree.unflatten(structure, jax.tree.leaves(saved)), l)

    (x_BSD, stack), held = ahead.over_layers(layer, (x_BSD, stack), held)
    return x_BSD, stack, block_vjp, held


def evaluate(engine: Engine, weights, inputs_BS: jax.Array, labels_BS: jax.Array):
    """(summed loss in nats, labels counted) over all devices; forward only."""
    model, outer = engine.model, varying(weights["outer"])
    ahead, sharded = Ahead(engine, weights), engine.placement.outer.sharded
    block = lambda w, l, x_BSD: model.block(w, x_BSD)
    x_BSD, _ = ahead.over_layers(block, embed(outer, inputs_BS, sharded), ahead.first())
    total = loss(model, outer, x_BSD, labels_BS, chunks=engine.lmhead_chunks, sharded=sharded)
    return collectives.add_up(total, *DATA), count(labels_BS)


def count(labels: jax.Array) -> jax.Array:
    """Labels that are not ignored, on all devices together."""
    return collectives.add_up(jnp.sum(labels >= 0, dtype=jnp.int32), *DATA)


def accumulators(engine: Engine, weights):
    """Zeros for the gradients: the blocks' as the placement says, the outer ones whole (summed once per step).

    In host memory they may hold anything; see `push`.
    """
    dtype, dims = engine.placement.grads.dtype, engine.dims["blocks"]
    blocks = parts(weights["blocks"])[0].stack  # their layers' shapes are all alike
    if engine.placement.grads.sharded and not engine.placement.weights.sharded:
        blocks = jax.eval_shape(lambda t: jax.vmap(lambda w: collectives.scatter(varying(w), dims))(t), blocks)
    elif engine.placement.weights.sharded and not engine.placement.grads.sharded:
        blocks = jax.eval_shape(lambda t: jax.vmap(lambda w: collectives.gather(w, dims))(t), blocks)
    # A whole leaf of sharded accumulators is summed over dp_shard at every push, so it is the same there.
    axes = lambda d: (REPLICATE,) if engine.placement.grads.sharded and d == WHOLE else DATA
    zeros = lambda w, d: varying(jnp.zeros((engine.model.num_layers, *w.shape[1:]), dtype), axes(d))
    outer = jax.tree.map(lambda w: varying(jnp.zeros(w.shape, dtype)), weights["outer"])
    return {"blocks": allocate(jax.tree.map(zeros, blocks, dims), engine.placement.grads.home), "outer": outer}
