"""The training state: what a step takes and returns."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from surojax import optim
from surojax.models.llama import LlamaConfig, init_layer, init_outer
from surojax.nvme import InFile, store_of
from surojax.offload import MEMORY_KIND, put, read, write
from surojax.quantize import work_copy


class TrainState(NamedTuple):
    """Everything that changes from step to step; `weights` and `master` are `{"blocks": [L, ...], "outer": ...}`.

    `weights` is always `master` cast to the work dtype, quantised from there with `persistent_quants`, so checkpoints
    hold `master` only. Randomness has no state: every draw is derived from the run's seed (weights, order of the data)
    and a position that is stored.
    """

    step: Any  # int32 scalar: optimizer steps done
    weights: Any
    master: Any
    moments: Any


def parts_of(state: TrainState, part: str) -> tuple:
    """(work weights, master weights, moments) of "blocks" or of "outer"; also of a plan."""
    return state.weights[part], state.master[part], state.moments[part]


def from_parts(step, blocks: tuple, outer: tuple) -> TrainState:
    """A state of what `parts_of` gives."""
    return TrainState(step, *({"blocks": b, "outer": o} for b, o in zip(blocks, outer, strict=True)))


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


def build_stacks(plan, layer: Callable):
    """Stacked arrays as planned, inside `jit`, from a function l -> the arrays of layer l: only one layer at a time is
    anywhere but where the stack rests."""
    of_layer = layer_of(plan)
    leaves, structure = jax.tree.flatten(plan)
    # A constant for each, not zeros: see `offload.allocate`. Every layer of them is written.
    fill = [jax.device_put(jnp.full(p.shape, i % 100, p.dtype), p.sharding) for i, p in enumerate(leaves)]
    stacks = jax.tree.unflatten(structure, fill)
    num_layers = jax.tree.leaves(plan)[0].shape[0]
    return jax.lax.fori_loop(0, num_layers, lambda l, stacks: write(stacks, cast(layer(l), of_layer), l), stacks)


def work_weights(master, plan: TrainState):
    """The work copy of master weights, inside `jit`, a layer at a time."""
    blocks, dtype = plan.weights["blocks"], jax.tree.leaves(plan.weights["outer"])[0].dtype
    blocks = build_stacks(blocks, lambda l: work_copy(read(master["blocks"], l), blocks, dtype))
    return {"blocks": blocks, "outer": cast(put(master["outer"], "device"), plan.weights["outer"])}


def init_state(config: LlamaConfig, plan: TrainState, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """A new state, each array created in its own sharding and memory; see `init_program`."""
    if store_of(plan) is None:
        return init_program(config, plan, optimizer)(seed)
    layer, rest = init_functions(config, plan, optimizer)
    step, outer = jax.jit(rest, out_shardings=shardings((plan.step, parts_of(plan, "outer"))))(seed)
    layer = jax.jit(layer)
    return from_parts(step, fill_layers(parts_of(plan, "blocks"), lambda l: layer(seed, l)), outer)


def init_program(config: LlamaConfig, plan: TrainState, optimizer: optax.GradientTransformation) -> Callable:
    """A jitted seed -> TrainState that draws the blocks layer by layer.

    What is planned in shards is never whole on a device, and of what is planned for host memory one layer at a time is
    there.
    """
    layer, rest = init_functions(config, plan, optimizer)

    def build(seed):
        blocks = build_stacks(parts_of(plan, "blocks"), lambda l: layer(seed, l))
        step, outer = rest(seed)
        return from_parts(step, blocks, outer)

    return jax.jit(build, out_shardings=shardings(plan))


def init_functions(config: LlamaConfig, plan: TrainState, optimizer: optax.GradientTransformation):
    """Functions (seed, l) -> (work weights, master weights, moments) of layer l, and seed -> (step, those outside)."""
    dtype = jax.tree.leaves(plan.weights["outer"])[0].dtype

    def arrays(params, plan):
        master = cast(params, plan[1])
        return cast((work_copy(master, plan[0], dtype), master, optim.init(optimizer, master)), plan)

    def layer(seed, l):
        return arrays(init_layer(config, seed, l), layer_of(parts_of(plan, "blocks")))

    def rest(seed):
        return jnp.int32(0), arrays(init_outer(config, seed), parts_of(plan, "outer"))

    return layer, rest


def fill_layers(plan, layer: Callable):
    """Stacks `[L, ...]` as planned, in memory and in files (nvme.py), from a function l -> layer l, one after another.

    Raises NvmeError when a file cannot be written.
    """
    leaves, structure = jax.tree.flatten(plan)
    in_file = [isinstance(x, InFile) for x in leaves]
    pick = lambda leaves, want: [x for x, f in zip(leaves, in_file, strict=True) if f == want]
    planned, files = pick(leaves, False), pick(leaves, True)
    zeros = lambda: jax.tree.map(lambda p: jax.device_put(jnp.zeros(p.shape, p.dtype), p.sharding), planned)
    stacks = jax.jit(zeros, out_shardings=shardings(planned))()
    replace = jax.jit(write, donate_argnums=0, out_shardings=shardings(planned))
    for l in range(leaves[0].shape[0]):
        new = structure.flatten_up_to(layer(l))
        stacks = jax.block_until_ready(replace(stacks, pick(new, False), l))
        for file, x in zip(files, pick(new, True), strict=True):
            file.write(l, jax.device_get(x))
    stacks, files = iter(stacks), iter(files)
    return structure.unflatten([next(files if f else stacks) for f in in_file])
