"""The training state: what a step takes and returns."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import MEMORY_KIND, joined, parts, put, read, write
from surojax.memory.nvme import InFile, store_of
from surojax.models.llama import LlamaConfig, init_layer, init_outer
from surojax.numerics.quantize import work_copy
from surojax.optim import optimizer as optim


class TrainState(NamedTuple):
    """Everything that changes from step to step; `weights` and `master` are `{"blocks": [L, ...], "outer": ...}`.

    `weights` is always `master` cast to the work dtype, quantised from there with `persistent_quants`, so checkpoints
    hold `master` only. Randomness has no state: every draw is derived from the run's seed (weights, order of the data)
    or from the step (rounding), and a position.
    """

    step: Any  # int32 scalar: optimizer steps done
    weights: Any
    master: Any
    moments: Any
    history: Any = None  # largest magnitudes in the last steps, fp8.history_shape; None for recipes without


class TensorState(NamedTuple):
    """State of one tensor, or trees of the state of several."""

    weights: Any  # work weights
    master: Any
    moments: Any


def section(state: TrainState, name: str) -> TensorState:
    """The state of the "blocks" or of the "outer" layers; also of a plan."""
    return TensorState(state.weights[name], state.master[name], state.moments[name])


def from_sections(step, blocks: TensorState, outer: TensorState, history) -> TrainState:
    """A state of what `section` gives."""
    weights, master, moments = ({"blocks": b, "outer": o} for b, o in zip(blocks, outer, strict=True))
    return TrainState(step, weights, master, moments, history)


def new_history(plan: TrainState):
    """An empty history as planned, or None."""
    return jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), plan.history)


def specs_of(plan):
    """The PartitionSpecs of a plan's leaves."""
    return jax.tree.map(lambda x: x.sharding.spec, plan)


def shardings(plan):
    """The shardings of a plan's leaves."""
    return jax.tree.map(lambda x: x.sharding, plan)


def cast(tree, plan):
    """Arrays in the dtypes and shardings of a plan, in device memory, inside `jit`."""

    def one(x, p):
        return jax.lax.with_sharding_constraint(x.astype(p.dtype), p.sharding.with_memory_kind(MEMORY_KIND["device"]))

    return jax.tree.map(one, tree, plan)


def layer_of(plan):
    """The plan of one layer, in device memory, from that of stacked arrays `[L, ...]`."""

    def one(x):
        sharding = x.sharding.with_memory_kind(MEMORY_KIND["device"])
        if isinstance(sharding, jax.NamedSharding):  # one of a single device has no spec
            sharding = sharding.update(spec=jax.P(*sharding.spec[1:]))
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)

    return jax.tree.map(one, plan)


def build_stacks(weights, others, layer: Callable):
    """Stacked (work weights, other arrays) as planned, inside `jit`, from a function l -> those of layer l: only one
    layer at a time is anywhere but where the stack rests."""
    leaves, structure = jax.tree.flatten((weights, others))
    # A constant for each, not zeros: see `host.allocate`. Every layer of them is written.
    fill = [jax.device_put(jnp.full(p.shape, i % 100, p.dtype), p.sharding) for i, p in enumerate(leaves)]
    new, built = jax.tree.unflatten(structure, fill)
    of_layer, stacks = (layer_of(parts(weights)[0].stack), layer_of(others)), []
    for part in parts(new):

        def one(l, carry, start=part.start):
            work, rest = cast(layer(l), of_layer)
            return write(carry[0], work, l - start), write(carry[1], rest, l)

        stack, built = jax.lax.fori_loop(part.start, part.stop, one, (part.stack, built))
        stacks.append(stack)
    return joined(stacks), built


def work_function(plan: TrainState) -> Callable:
    """A function of the master weights of a layer to what its work weights are cast from: quantised if those are."""
    like, dtype = parts(plan.weights["blocks"])[0].stack, jax.tree.leaves(plan.weights["outer"])[0].dtype
    return lambda master: work_copy(master, like, dtype)


def work_weights(master, plan: TrainState):
    """The work copy of master weights, inside `jit`, a layer at a time."""
    work = work_function(plan)
    blocks, _ = build_stacks(plan.weights["blocks"], (), lambda l: (work(read(master["blocks"], l)), ()))
    return {"blocks": blocks, "outer": cast(put(master["outer"], "device"), plan.weights["outer"])}


def init_state(
    config: LlamaConfig, params: dict, plan: TrainState, optimizer: optim.Optimizer, seed: int
) -> TrainState:
    """A new state, each array created in its own sharding and memory; see `init_program`."""
    if store_of(plan) is None:
        return init_program(config, params, plan, optimizer)(seed)
    layer, outer = init_functions(config, params, plan, optimizer)
    layer, (weights, *others) = jax.jit(layer), section(plan, "blocks")
    blocks, (master, moments) = fill_layers(weights, tuple(others), lambda l: layer(seed, l))
    rest = jax.jit(outer, out_shardings=shardings(section(plan, "outer")))(seed)
    step = jax.device_put(jnp.int32(0), plan.step.sharding)
    history = jax.device_put(new_history(plan), shardings(plan.history))
    return from_sections(step, TensorState(blocks, master, moments), rest, history)


def init_program(config: LlamaConfig, params: dict, plan: TrainState, optimizer: optim.Optimizer) -> Callable:
    """A jitted seed -> TrainState that draws the blocks layer by layer.

    What is planned in shards is never whole on a device, and of what is planned for host memory one layer at a time is
    there.
    """
    layer, outer = init_functions(config, params, plan, optimizer)

    def build(seed):
        weights, *others = section(plan, "blocks")
        weights, (master, moments) = build_stacks(weights, tuple(others), functools.partial(layer, seed))
        return from_sections(jnp.int32(0), TensorState(weights, master, moments), outer(seed), new_history(plan))

    return jax.jit(build, out_shardings=shardings(plan))


def init_functions(config: LlamaConfig, params: dict, plan: TrainState, optimizer: optim.Optimizer):
    """Functions (seed, l) -> (what work weights are cast from, (master weights, moments)) of a new layer, and seed ->
    (work weights, master weights, moments) of the outer layers."""

    def arrays(drawn, part, master_plan):
        """(master weights, moments) of new parameters, in the master's sharding."""
        master = cast(drawn, master_plan)
        return master, optim.init(optimizer, params[part], master, master_plan)

    def layer(seed, l):
        master, moments = arrays(init_layer(config, seed, l), "blocks", layer_of(plan.master["blocks"]))
        return work_function(plan)(master), (master, moments)

    def outer(seed):
        master, moments = arrays(init_outer(config, seed), "outer", plan.master["outer"])
        return TensorState(cast(master, plan.weights["outer"]), master, moments)

    return layer, outer


def fill_layers(weights, others, layer: Callable):
    """Stacked (work weights, other arrays) as planned, in memory and in files (nvme.py), from a function l -> those of
    layer l, which is called for one layer after another: `build_stacks` outside `jit`.

    Raises NvmeError when a file cannot be written.
    """
    leaves, structure = jax.tree.flatten(others)
    in_file = [isinstance(x, InFile) for x in leaves]
    pick = lambda leaves, want: [x for x, f in zip(leaves, in_file, strict=True) if f == want]
    planned, files, stacks = pick(leaves, False), pick(leaves, True), []
    zeros = lambda p: jax.device_put(jnp.zeros(p.shape, p.dtype), p.sharding)
    empty = lambda plan: jax.jit(lambda: jax.tree.map(zeros, plan), out_shardings=shardings(plan))()
    built = empty(planned)
    for part in parts(weights):

        def replace(stack, built, work, rest, l, start=part.start):
            return write(stack, work, l - start), write(built, rest, l)

        where = shardings(part.stack), shardings(planned)
        replace = jax.jit(replace, donate_argnums=(0, 1), out_shardings=where)
        stack = empty(part.stack)
        for l in range(part.start, part.stop):
            work, new = layer(l)
            new = structure.flatten_up_to(new)
            stack, built = jax.block_until_ready(replace(stack, built, work, pick(new, False), l))
            for file, x in zip(files, pick(new, True), strict=True):
                file.write(l, jax.device_get(x))
        stacks.append(stack)
    built, files = iter(built), iter(files)
    return joined(stacks), structure.unflatten([next(files if f else built) for f in in_file])
