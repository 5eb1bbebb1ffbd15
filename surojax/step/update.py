"""Update: the optimizer applied to shards of master weights and moments, one tensor after the other.

All layers of a tensor are updated at once if its state is in device memory, one layer at a time if it is copied from
the host. The work weights are written anew with them, all-gathered unless they are stored in shards.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import joined, on_device, parts, sweep
from surojax.numerics.quantize import is_quantized, work_copy
from surojax.optim import optimizer as optim
from surojax.optim.optimizer import Optimizer, Scalars, UpdateContext
from surojax.parallel import collectives
from surojax.parallel.collectives import varying
from surojax.placement.layout import Layout
from surojax.placement.mesh import SHARD
from surojax.placement.param import OUTER, Kind, Param
from surojax.sizes import divisor
from surojax.step.spec import Engine
from surojax.step.state import TensorState, TrainState, from_sections, section


class Tensor(NamedTuple):
    """One tensor in an update: its declaration, layouts, old state and gradient (of all layers, for the blocks)."""

    param: Param
    master_layout: Layout
    weights_layout: Layout
    state: TensorState
    grad: Any


def update(engine: Engine, optimizer: Optimizer, state: TrainState, grads, scalars: Scalars, history) -> TrainState:
    """The state after one optimizer step, tensor by tensor; runs per device on shards."""

    def update_stack(tensor: Tensor) -> TensorState:
        return update_layers(engine, optimizer, tensor, scalars)

    sections = {
        segment.name: each_tensor(update_stack, section(state, segment.name), grads[segment.name], engine, segment.name)
        for segment in engine.model.segments
    }
    sections[OUTER] = update_outer(engine, optimizer, section(state, OUTER), grads, scalars)
    return from_sections(state.step + 1, sections, history)


def update_layers(engine: Engine, optimizer: Optimizer, tensor: Tensor, scalars: Scalars) -> TensorState:
    """A tensor of all layers of a segment after the update."""
    weights, master, moments = tensor.state
    layers = jnp.arange(len(master))
    at = UpdateContext(scalars, layers)
    like = parts(weights)[0].stack

    def layer(old, inputs):
        grad, l = inputs
        new = update_tensor(engine, optimizer, tensor, like, TensorState(None, *old), grad, at._replace(layer=l))
        return new.weights, (new.master, new.moments)

    def work_of_layer(old, master):
        return work_weights(engine, tensor, master.astype(engine.table.weights.dtype), like), ()

    if on_device((master, moments, tensor.grad)):
        # In one pass, if the rule allows it: a loop copies each slice before it writes over it.
        as_updated = tensor.master_layout.stored == tensor.weights_layout.stored
        as_updated = as_updated and on_device(weights) and not is_quantized(weights)
        dtype = engine.table.weights.dtype if as_updated else None
        done = optim.apply_to_stack(
            optimizer, tensor.param, tensor.master_layout, master, tensor.grad, moments, at, dtype
        )
        if done:
            work, master, moments = done
            if not as_updated:
                work, _ = _sweep_parts(work_of_layer, weights, (), master)
            return TensorState(work, master, moments)
    work, (master, moments) = _sweep_parts(layer, weights, (master, moments), (tensor.grad, layers))
    return TensorState(work, master, moments)


def update_tensor(
    engine: Engine, optimizer: Optimizer, tensor: Tensor, like, old: TensorState, grad, at: UpdateContext
) -> TensorState:
    """A tensor of one layer, or of the outer layers, after the update; all of it is in device memory.

    like: the old work weights, or what has their structure.
    """
    dtype = engine.table.weights.dtype
    work, master, moments = optim.apply(
        optimizer, tensor.param, tensor.master_layout, old.master, grad, old.moments, at, dtype
    )
    return TensorState(work_weights(engine, tensor, work, like), master, moments)


def work_weights(engine: Engine, tensor: Tensor, work: jax.Array, like):
    """New work weights from shards of them: all-gathered if they are stored so, and quantised if `like` is."""
    work = collectives.reshard(work, tensor.master_layout, tensor.weights_layout)
    return work_copy(work, like, engine.table.weights.dtype, collectives.largest_of_shards)


def _sweep_parts(function, weights, inout, inputs):
    """(weights, inout) after `sweep` over one part of the work weights after another."""
    done = []
    for out, start, stop in parts(weights):
        out, inout = sweep(function, out, inout, inputs, start, stop)
        done.append(out)
    return joined(done), inout


def update_outer(engine: Engine, optimizer: Optimizer, old: TensorState, grads, scalars: Scalars) -> TensorState:
    """The outer layers after one optimizer step, each array in its home.

    A tensor whose state is in host memory is updated a part at a time, no larger than the largest of a block.
    """
    stacks = jax.tree.leaves([grads[segment.name] for segment in engine.model.segments])
    largest = max(stack.size // len(stack) for stack in stacks)

    def update_one(tensor: Tensor) -> TensorState:
        if on_device((tensor.state.master, tensor.state.moments)):
            at = UpdateContext(scalars)
            return update_tensor(engine, optimizer, tensor, tensor.state.weights, tensor.state, tensor.grad, at)
        return update_in_parts(optimizer, tensor, scalars, largest)

    return each_tensor(update_one, old, grads[OUTER], engine, OUTER)


def update_in_parts(optimizer: Optimizer, tensor: Tensor, scalars: Scalars, largest: int) -> TensorState:
    """A tensor of the outer layers after the update, its rows as a stack of parts with at most `largest` elements."""
    weights, master, moments = tensor.state
    rows = master.shape[0]
    n = 1 if tensor.param.kind is Kind.VECTOR else divisor(rows, -(-master.size // largest))

    def cut(x):
        return x.reshape(n, -1, *x.shape[1:])

    def join(stack, x):
        return stack.reshape(x.shape)

    def part(old, inputs):
        (master, moments), (grad, k) = old, inputs
        at = UpdateContext(scalars, part=(k, n))
        work, *new = optim.apply(
            optimizer, tensor.param, tensor.master_layout, master, grad, moments, at, weights.dtype
        )
        return work, tuple(new)

    if tensor.master_layout.stored == tensor.weights_layout.stored:
        work = cut(weights)
    else:
        work = varying(jnp.zeros(jax.eval_shape(cut, master).shape, weights.dtype), (SHARD,))
    stacks, grads = jax.tree.map(cut, ((master, moments), tensor.grad))
    work, new = sweep(part, work, stacks, (grads, jnp.arange(n)), 0, n)
    work = collectives.reshard(join(work, master), tensor.master_layout, tensor.weights_layout)
    return TensorState(work, *jax.tree.map(join, new, (master, moments)))


def each_tensor(function, old: TensorState, grads, engine: Engine, name: str, *, ordered: bool = True) -> TensorState:
    """The trees of function(Tensor) for every tensor of the section with this name.

    ordered: one after the other, or the last layers of all of them would be on the device at once.
    """
    leaves, structure = jax.tree.flatten(old.master)
    layouts = engine.layouts
    trees = (engine.params[name], layouts.master[name], layouts.weights[name], old.weights, old.moments, grads)
    columns = map(structure.flatten_up_to, trees)
    done: list[TensorState] = []
    for master, param, master_layout, weights_layout, weights, moments, grad in zip(leaves, *columns, strict=True):
        state = TensorState(weights, master, moments)
        if ordered and done:
            done[-1], (state, grad) = jax.lax.optimization_barrier((done[-1], (state, grad)))
        done.append(function(Tensor(param, master_layout, weights_layout, state, grad)))
    return TensorState(*(structure.unflatten(column) for column in zip(*done, strict=True)))
