"""The training state: what a step takes and returns."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from surojax.models.llama import LlamaConfig, init_layer, init_outer
from surojax.offload import MEMORY_KIND, joined, parts, put, read, write


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


def build_stacks(weights, others, layer: Callable):
    """Stacked (work weights, other arrays) as planned, inside `jit`, from a function l -> those of layer l: only one
    layer at a time is anywhere but where the stack rests."""
    leaves, structure = jax.tree.flatten((weights, others))
    # A constant for each, not zeros: see `offload.allocate`. Every layer of them is written.
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


def work_weights(master, plan: TrainState):
    """The work copy of master weights, inside `jit`, a layer at a time."""
    blocks, _ = build_stacks(plan.weights["blocks"], (), lambda l: (read(master["blocks"], l), ()))
    return {"blocks": blocks, "outer": cast(put(master["outer"], "device"), plan.weights["outer"])}


def init_state(config: LlamaConfig, plan: TrainState, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """A new state, each array created in its own sharding and memory; see `init_program`."""
    return init_program(config, plan, optimizer)(seed)


def init_program(config: LlamaConfig, plan: TrainState, optimizer: optax.GradientTransformation) -> Callable:
    """A jitted seed -> TrainState that draws the blocks layer by layer.

    What is planned in shards is never whole on a device, and of what is planned for host memory one layer at a time is
    there.
    """

    def arrays(params, master_plan):
        """(master weights, moments) of new parameters, in the master's sharding."""
        master = cast(params, master_plan)
        return master, optimizer.init(master)

    def layer(seed, l):
        master, moments = arrays(init_layer(config, seed, l), layer_of(plan.master["blocks"]))
        return master, (master, moments)

    def build(seed):
        others = plan.master["blocks"], plan.moments["blocks"]
        weights, (master, moments) = build_stacks(plan.weights["blocks"], others, functools.partial(layer, seed))
        outer, moments_of_outer = arrays(init_outer(config, seed), plan.master["outer"])
        return TrainState(
            step=jnp.int32(0),
            weights={"blocks": weights, "outer": cast(outer, plan.weights["outer"])},
            master={"blocks": master, "outer": outer},
            moments={"blocks": moments, "outer": moments_of_outer},
        )

    return jax.jit(build, out_shardings=shardings(plan))
