"""Forward and backward, written out layer by layer: fetch the weights, compute, push the gradients.

    for each microbatch:
        x = embed(tokens)
        for l in layers:              w = fetch(l);  save x;  x = block(w, x)
        loss, dx = head(x)            in slices of tokens; its gradient goes into the accumulators
        for l in reversed(layers):    w = fetch(l);  dw, dx = vjp(block)(w, saved x)(dx);  push(l, dw)
        push(embedding, dx)
    the last microbatch, peeled off the loop where something is to be summed: push sums over devices what the others
    leave local, and beside each block a part of the head's gradient is summed
    finish: sum over devices what is still local: the embedding and the final norm

Why not `jax.grad` of the whole model: it holds all gathered weights, or a whole tree of gradients, at once. Here one
layer's weights and gradients exist at a time, whatever the placement.

The loops carry stacked `[L, ...]` arrays and read or write layer l in place. `lax.scan` with xs/ys would copy the stack
(measured on compiled Llama-7B: 123 GiB instead of 85). Without recomputation the saved values are the block's own
reverse mode residuals, except the weights, which are fetched again: `jax.vjp(saveable_args=...)` leaves them out.

Stacks may rest in pinned host memory (`offload_*`): `read` brings one layer to the device, `write` returns it to where
its stack rests. A transfer that depends on a layer's computation cannot overlap all of it, so only the reduction of its
gradients does: what a layer needs was asked for one or two layers earlier, and what it leaves in host memory goes there
while the next one computes. In between it travels in the loops' carry: see `Layers` (weights), `Saved` (activations)
and `pull` (gradients, whose old sums are read after the last ones are written: one stack, one direction at a time).
XLA's scheduler then decides what starts when (blueprint.compiler_options; `hlo.overlaps` reads its decisions).

Everything here runs inside `jax.shard_map` over the data axes: arrays are one device's part. Communication is only in
`fetch`, `push` and `finish`. Shape suffixes: A microbatches, B local batch, S sequence, D hidden size, N tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from surojax.memory.host import allocate, parts, read, write
from surojax.memory.prefetch import Ahead, Saved
from surojax.models.llama import ModelFunctions
from surojax.numerics.fp8 import delayed_scales, extended, new_observed, quantise_weights
from surojax.numerics.quantize import dequantise_all, quantise_matrices
from surojax.parallel import collectives
from surojax.parallel.collectives import WHOLE, varying
from surojax.placement.mesh import DATA, REPLICATE, SHARD
from surojax.placement.table import Placement
from surojax.step.outer import add, embed, head, loss, push_embed


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model's functions, where its tensors live, and how its memory is spent."""

    model: ModelFunctions
    placement: Placement
    dims: Any  # placement.shard_dims: how shards of master weights and moments are cut
    resting: Any  # placement.resting_dims: how the work weights rest
    recompute_block: bool = True
    lmhead_chunks: int = 1
    z_loss: float = 0.0  # in the gradients, not in the loss: outer.head


def fetch(engine: Engine, stack, l: jax.Array | int, on: bool = True):
    """The whole weights of layer l of a stack, on this device; on: whether the recipe holds in this layer."""
    return whole(engine, bring(engine, stack, l, on))


def bring(engine: Engine, stack, l: jax.Array | int, on: bool = True):
    """Layer l as it travels between devices: what this device has of it, in device memory, in 8 bits if it is to be."""
    w, table = read(stack, l), engine.placement
    if table.persistent_quants or not table.quants.dtype or (table.one_scale and not on):
        return w
    return quantise_weights(w) if table.one_scale else quantise_matrices(w, table.quants.dtype)


def whole(engine: Engine, w):
    """The weights of a layer to compute with, from what `bring` returns."""
    w = collectives.gather(w, engine.dims["blocks"]) if engine.placement.weights.sharded else varying(w)
    return w if engine.placement.one_scale else dequantise_all(w, engine.placement.weights.dtype)


def pull(engine: Engine, grads, l: jax.Array):
    """(accumulators, what they hold of layer l): asked for before layer l computes if they rest in host memory.

    Those lag by one layer: the sums of the layer before this one in the backward pass are `late`; they leave now.
    """
    if engine.placement.grads.home == "device":
        return grads, None
    grads = settle(engine, grads, (l + 1) % engine.model.num_layers)
    return grads, read(grads["blocks"], l)


def push(engine: Engine, grads, sums, dw, l: jax.Array, *, first: jax.Array | bool, last: bool):
    """(accumulators with the gradient of layer l added to its `sums` from pull, sum of squares of the result).

    `first` says that nothing was added to them in this step: then those in host memory may hold anything. `last` says
    that nothing will be: what is still local is summed over all devices.
    """
    table, dims = engine.placement, engine.dims["blocks"]
    scatter = lambda tree: collectives.scatter_in_turn(tree, dims, table.reduce, part_of_head(engine, grads, l))
    head = None
    if table.grads.sharded:
        dw, head = scatter(dw)
    late = table.grads.home == "host"
    old = jax.tree.map(lambda x: jnp.where(first, jnp.zeros_like(x), x), sums) if late else read(grads["blocks"], l)
    sums = add(old, dw)
    if last:
        if left_local(engine) and not table.grads.sharded:
            sums, head = scatter(sums)
        sums = collectives.add_up(sums, REPLICATE)
    if head is not None:
        grads = grads | {
            "head": jax.lax.dynamic_update_slice_in_dim(grads["head"], head, head_row(engine, grads, l), 0)
        }
    # As in the update (step.py), a barrier between reads and writes keeps XLA from copying the whole stack.
    sums = jax.lax.optimization_barrier(sums)
    squares = collectives.sum_of_squares(sums, dims) if last else collectives.no_squares()
    sums = varying(sums, DATA if whole_stacks(engine) else (REPLICATE,))  # typed like the layers that still differ
    return grads | ({"late": sums} if late else {"blocks": write(grads["blocks"], sums, l)}), squares


def settle(engine: Engine, grads, l: jax.Array | int):
    """Accumulators with what is late written to layer l."""
    return grads if grads["late"] is None else grads | {"blocks": write(grads["blocks"], grads["late"], l)}


def left_local(engine: Engine) -> bool:
    """Whether a step's last microbatch sums over devices what the others leave local."""
    table = engine.placement
    in_shards = table.grads.sharded and table.outer.sharded
    return bool(collectives.active(REPLICATE) or (collectives.active(SHARD) and not in_shards))


def sum_outer(engine: Engine, name: str, grad: jax.Array):
    """The sum over all devices of an outer layer's gradient, or of some of its rows: the shard of this device."""
    if engine.resting["outer"][name] == WHOLE:  # else gathered as shards: outer.py
        reduce = engine.placement.reduce
        reduce = "all_to_all" if reduce == "int8" else reduce  # they travel once a step: not in 8 bits
        grad = collectives.scatter(grad, engine.dims["outer"][name], reduce)
    return collectives.add_up(grad, REPLICATE)


def with_room(engine: Engine, grads):
    """Accumulators with room for the head's gradient summed over devices, if the last microbatch is to do that.

    Where the embedding is the head, it is complete only after the backward pass.
    """
    head = engine.model.head
    if not left_local(engine) or head == "embed":
        return grads
    like = jax.eval_shape(functools.partial(sum_outer, engine, head), grads["outer"][head])
    return grads | {"head": varying(jnp.zeros(like.shape, like.dtype), tuple(like.manual_axis_type.varying))}


def head_row(engine: Engine, grads, l: jax.Array):
    """The first row of part l of the head's sums: of as many parts as layers, as large as the first.

    The last ones repeat rows where layers do not divide them.
    """
    rows = grads["head"].shape[0]
    size = -(-rows // engine.model.num_layers)
    return jnp.minimum(l * size, rows - size)


def part_of_head(engine: Engine, grads, l: jax.Array):
    """(part l of the head's gradient, the function that sums it over devices), or None: nothing is to be summed."""
    if grads["head"] is None:
        return None
    head, rows = engine.model.head, grads["head"].shape[0]
    grad, size = grads["outer"][head], -(-rows // engine.model.num_layers)
    start = head_row(engine, grads, l)
    part = jax.lax.dynamic_slice_in_dim(grad.reshape(-1, rows, grad.shape[1]), start, size, 1)
    return part.reshape(-1, grad.shape[1]), functools.partial(sum_outer, engine, head)


def finish(engine: Engine, grads, squares):
    """(accumulators summed over all devices, as the shards that the optimizer updates; their global norm).

    `squares` is the sum of squares of the blocks' accumulators, which `push` has completed.
    """
    grads = settle(engine, grads, 0)  # the backward pass ends with layer 0
    early = {} if grads["head"] is None else {engine.model.head: grads["head"]}
    outer = {name: early[name] if name in early else sum_outer(engine, name, g) for name, g in grads["outer"].items()}
    blocks = collectives.same(grads["blocks"], REPLICATE)
    if whole_stacks(engine):
        blocks = jax.tree.map(_shard_in_stack, blocks, engine.dims["blocks"])
    squares = add(squares, collectives.sum_of_squares(outer, engine.dims["outer"]))
    return {"blocks": blocks, "outer": outer}, collectives.norm(*squares)


def whole_stacks(engine: Engine) -> bool:
    """Whether accumulators are whole on several devices; `push` leaves the shards of their sums at their beginning."""
    return bool(collectives.active(SHARD)) and not engine.placement.grads.sharded


def _shard_in_stack(stack: jax.Array, d: int):
    """The shards of the sums in a stack of accumulators, of which dimension d of each layer is sharded."""
    if d == WHOLE:
        return collectives.same(stack, SHARD)
    return jax.lax.slice_in_dim(stack, 0, stack.shape[d + 1] // jax.lax.axis_size(SHARD), axis=d + 1)


def loss_and_gradients(engine: Engine, weights, inputs_ABS: jax.Array, labels_ABS: jax.Array, *, history=None, step=0):
    """(mean loss in nats per label, gradients as `finish` leaves them, their norm, history) of all microbatches and
    devices.

    Labels < 0 are ignored and not counted, so the result does not depend on how a batch is split into microbatches.
    history: largest magnitudes in the last steps, see `fp8.history_shape`, which this step adds its own to; None for
    recipes that have none. step: number of the step, int32, which random numbers of a recipe follow from.
    """
    model = engine.model
    scale = 1.0 / jnp.maximum(count(labels_ABS), 1).astype(jnp.float32)
    outer, layers, sharded = varying(weights["outer"]), Layers(engine, weights), engine.placement.outer.sharded
    give = given(engine, history, step, inputs_ABS.shape[0], scale)

    def microbatch(a, carry, *, last):
        grads, total, _, held, observed = carry
        inputs_BS, labels_BS = read((inputs_ABS, labels_ABS), a)
        x_BSD = embed(outer, inputs_BS, sharded)
        x_BSD, saved, (stack, late), block_vjp, held = forward(engine, layers, x_BSD, held, lambda l: give(a, l))
        loss, dx_BSD, d_outer = head(
            model,
            outer,
            grads["outer"],
            x_BSD,
            labels_BS,
            scale,
            chunks=engine.lmhead_chunks,
            sharded=sharded,
            z_loss=engine.z_loss,
        )
        grads = grads | {"outer": d_outer}
        grads = with_room(engine, grads) if last else grads

        def backward(l, on, w, held, carry):
            dx_BSD, grads, squares, late, observed = carry
            of_forward, late = saved.take(stack, late, l)
            grads, sums = pull(engine, grads, l)
            if engine.recompute_block and engine.placement.weights.sharded:
                # The next weights are gathered while the block is recomputed, gradients leave while it is
                # differentiated: one after the other, or the scheduler puts the gather behind the last gradient.
                dx_BSD, gathered = jax.lax.optimization_barrier((dx_BSD, held[0]))
                held = gathered, *held[1:]
            dw, dx_BSD, seen = block_vjp(l, on, w, of_forward, dx_BSD)
            grads, of_layer = push(engine, grads, sums, dw, l, first=a == 0, last=last)
            observed = jax.tree.map(lambda old, new: old.at[l].max(new), observed, seen)
            return (dx_BSD, grads, add(squares, of_layer), late, observed), held

        start = (dx_BSD, grads, collectives.no_squares(), late, observed)
        (dx_BSD, grads, squares, _, observed), held = layers.loop(backward, start, held, reverse=True)
        d_outer = push_embed(grads["outer"], inputs_BS, dx_BSD, sharded)
        return grads | {"outer": d_outer}, total + loss, squares, held, observed

    observed = varying(new_observed(history))
    start = (accumulators(engine, weights), varying(jnp.float32(0)), collectives.no_squares(), layers.first(), observed)
    A, peeled = inputs_ABS.shape[0], left_local(engine)
    if peeled < A:
        start = jax.lax.fori_loop(0, A - peeled, functools.partial(microbatch, last=not peeled), start)
    grads, total, squares, _, observed = microbatch(A - 1, start, last=True) if peeled else start
    loss = collectives.add_up(total, *DATA) * scale
    return loss, *finish(engine, grads, squares), extended(history, observed)


def given(engine: Engine, history, step, microbatches: int, scale: jax.Array) -> Callable:
    """What the recipe is given of microbatch a, layer l: a function (a, l) -> `given` of `ModelFunctions`.

    scale: of the loss in the gradient, which tells the first step how large gradients may be.
    """
    precision, L = engine.model.precision, engine.model.num_layers
    if precision.delayed:
        scales = delayed_scales(history, precision.margin, scale)
        return lambda a, l: scales[l]
    if precision.recipe == "nvfp4":
        word, (device, devices) = lambda i: jnp.asarray(i, jnp.uint32), collectives.device_number(*DATA)
        return lambda a, l: ((word(step) * microbatches + word(a)) * L + word(l)) * devices + word(device)
    return lambda a, l: None


class Layers:
    """Loops over the layers; each layer's weights are fetched before they are needed, where fetching costs time.

    What is `held` of later layers travels in the loops' carry, for each part of the layers: those that rest in one
    memory (`offload.parts`) and that the recipe treats alike.
    """

    def __init__(self, engine: Engine, weights):
        table, found = engine.placement, parts(weights["blocks"])
        in_host = "host" in (table.weights.home, table.quants.home)  # of two parts the last
        self.parts, self.on = [], []
        for part in found:
            stages = table.weights.sharded + (in_host and part is found[-1])
            for start, stop, on in engine.model.precision.ranges(engine.model.num_layers):
                layers = range(max(start, part.start), min(stop, part.stop))
                if layers:
                    of_layer = functools.partial(bring, engine, on=on)
                    self.parts.append(Ahead(of_layer, functools.partial(whole, engine), part, layers, stages=stages))
                    self.on.append(on)

    def first(self) -> list:
        """What is held before a forward pass."""
        return [ahead.first() for ahead in self.parts]

    def loop(self, function: Callable, carry, held: list, *, reverse: bool = False):
        """(carry, held) after (carry, held) = function(l, on, weights, held, carry) for every layer l."""
        held = list(held)
        for i, ahead in sorted(enumerate(self.parts), key=lambda x: x[0], reverse=reverse):
            layers, n, on = ahead.layers, ahead.n, self.on[i]

            def layer(k, carry, ahead=ahead, layers=layers, n=n, on=on):
                carry, held = carry
                w, held = ahead.take(held, n + k if reverse else k)
                return function(layers.stop - 1 - k if reverse else layers.start + k, on, w, held, carry)

            carry, held[i] = jax.lax.fori_loop(0, n, layer, (carry, held[i]))
        return carry, held


def forward(engine: Engine, layers: Layers, x_BSD: jax.Array, held, given: Callable):
    """All blocks: (output, Saved, its (stack, late), block_vjp, held).

    given: from layer to what the recipe is given of it; block_vjp: (l, on, w, saved of layer l, dy) -> (dw, dx,
    observed), see `ModelFunctions.block_backward`.
    """
    model = engine.model

    def run_and_save(l, on, w, x_BSD):
        if engine.recompute_block:
            return model.block(w, x_BSD, given(l), on), x_BSD
        return model.block_forward(w, x_BSD, given(l), on)

    def block_vjp(l, on, w, saved, dy_BSD):
        if engine.recompute_block:
            saved = model.block_forward(w, saved, given(l), on)[1]
        return model.block_backward(w, saved, dy_BSD, given(l), on)

    stack, on = layers.parts[0].part.stack, layers.on[0]  # the layers' shapes are all alike
    like = jax.eval_shape(lambda x: run_and_save(0, on, fetch(engine, stack, 0, on), x)[1], x_BSD)
    saved = Saved(model.num_layers, engine.placement.residuals.home, like)

    def layer(l, on, w, held, carry):
        x_BSD, (stack, late) = carry
        x_BSD, values = run_and_save(l, on, w, x_BSD)
        return (x_BSD, saved.keep(stack, late, values, l)), held

    (x_BSD, kept), held = layers.loop(layer, (x_BSD, saved.first()), held)
    return x_BSD, saved, kept, block_vjp, held


def evaluate(engine: Engine, weights, inputs_BS: jax.Array, labels_BS: jax.Array):
    """(summed loss in nats, labels counted) over all devices; forward only."""
    model, outer = engine.model, varying(weights["outer"])
    layers, sharded = Layers(engine, weights), engine.placement.outer.sharded
    block = lambda l, on, w, held, x_BSD: (model.block(w, x_BSD, None, on), held)
    x_BSD, _ = layers.loop(block, embed(outer, inputs_BS, sharded), layers.first())
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
    scatter = lambda w: collectives.scatter(w, dims) if engine.placement.grads.sharded else w
    stack = parts(weights["blocks"])[0].stack
    layer = jax.eval_shape(lambda: scatter(dequantise_all(fetch(engine, stack, 0), engine.placement.weights.dtype)))
    blocks = jax.tree.map(lambda w: jax.ShapeDtypeStruct((engine.model.num_layers, *w.shape), w.dtype), layer)
    # A whole leaf of sharded accumulators is summed over dp_shard at every push, so it is the same there.
    axes = lambda d: (REPLICATE,) if engine.placement.grads.sharded and d == WHOLE else DATA
    zeros = lambda w, d: varying(jnp.zeros((engine.model.num_layers, *w.shape[1:]), dtype), axes(d))
    outer = jax.tree.map(lambda w: varying(jnp.zeros(w.shape, dtype)), weights["outer"])
    stacks, home = jax.tree.map(zeros, blocks, dims), engine.placement.grads.home
    late = jax.tree.map(lambda w, d: varying(jnp.zeros(w.shape[1:], dtype), axes(d)), blocks, dims)
    late = late if home == "host" else None
    return {"blocks": allocate(stacks, home), "outer": outer, "late": late, "head": None}
