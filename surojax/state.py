"""The training state: what a step takes and returns."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from surojax.models.llama import LlamaConfig, init_params
from surojax.offload import MEMORY_KIND, Device, Host, move, put, read, write
from surojax.optim import init_moments
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


def work_weights(master, plan: TrainState):
    """The work copy of master weights, inside `jit`; a layer at a time where either rests in host memory."""
    work = {part: jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), plan.weights[part]) for part in plan.weights}
    homes = {x.sharding.memory_kind for x in jax.tree.leaves((plan.master["blocks"], plan.weights["blocks"]))}
    outer = jax.tree.map(lambda m, w: m.astype(w.dtype), put(master["outer"], "device"), work["outer"])
    dtype = jax.tree.leaves(plan.weights["outer"])[0].dtype
    if homes == {MEMORY_KIND["device"]}:
        blocks = work_copy(master["blocks"], work["blocks"], dtype)
    else:
        num_layers = jax.tree.leaves(work["blocks"])[0].shape[0]
        space = lambda x: Host if x.sharding.memory_kind == MEMORY_KIND["host"] else Device
        stacks = jax.tree.map(lambda z, x: move(z, space(x)), work["blocks"], plan.weights["blocks"])
        layer = lambda l, stack: write(stack, work_copy(read(master["blocks"], l), work["blocks"], dtype), l)
        blocks = jax.lax.fori_loop(0, num_layers, layer, stacks)
    return {"blocks": blocks, "outer": outer}


def shardings(plan):
    """The shardings of a plan's leaves."""
    return jax.tree.map(lambda x: x.sharding, plan)


def init_state(config: LlamaConfig, plan: TrainState, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """A new state, each array created in its own sharding: what is planned in shards is never whole on a device.

    What is planned for host memory is built on the device first, all of it in one program, and moved then: offloading
    does not yet lower what this needs there (24.8 GiB for Llama-7B on one device, compiled), only what a step needs.
    """

    def build(seed):
        master = jax.tree.map(lambda p, m: p.astype(m.dtype), init_params(config, seed), plan.master)
        return TrainState(jnp.int32(0), work_weights(master, plan), master, init_moments(optimizer, master))

    return jax.jit(build, out_shardings=shardings(plan))(seed)
