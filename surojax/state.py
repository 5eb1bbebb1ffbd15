"""The training state: what a step takes and returns."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from surojax.models.llama import LlamaConfig, init_layer, init_outer
from surojax.offload import MEMORY_KIND, put, read, write


class TrainState(NamedTuple):
    """Everything that changes from step to step; `weights` and `master` are `{"blocks": [L, ...], "outer": ...}`.

    `weights` is always `master` cast to the work dtype, so checkpoints hold `master` only. Randomness has no state:
    every draw is derived from the run's seed (weights, order of the data) and a position that is stored.
    """

    step: Any  # int32 scalar: optimizer steps done
    weights: Any
    master: Any
    moments: Any


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
    blocks = build_stacks(plan.weights["blocks"], lambda l: read(master["blocks"], l))
    return {"blocks": blocks, "outer": cast(put(master["outer"], "device"), plan.weights["outer"])}


def init_state(config: LlamaConfig, plan: TrainState, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """A new state, each array created in its own sharding and memory; see `init_program`."""
    return init_program(config, plan, optimizer)(seed)


def init_program(config: LlamaConfig, plan: TrainState, optimizer: optax.GradientTransformation) -> Callable:
    """A jitted seed -> TrainState that draws the blocks layer by layer.

    What is planned in shards is never whole on a device, and of what is planned for host memory one layer at a time is
    there.
    """
    blocks, outer = ((plan.weights[k], plan.master[k], plan.moments[k]) for k in ("blocks", "outer"))

    def arrays(params, plan):
        """(work weights, master weights, moments) of new parameters."""
        master = cast(params, plan[1])
        return cast((master, master, optimizer.init(master)), plan)

    def build(seed):
        layer = lambda l: arrays(init_layer(config, seed, l), layer_of(blocks))
        parts = build_stacks(blocks, layer), arrays(init_outer(config, seed), outer)
        weights, master, moments = ({"blocks": b, "outer": o} for b, o in zip(*parts, strict=True))
        return TrainState(jnp.int32(0), weights, master, moments)

    return jax.jit(build, out_shardings=shardings(plan))
