"""The training state: what a step takes and returns."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from surojax.models.llama import LlamaConfig, init_layer, init_params
from surojax.nvme import InFile, store_of
from surojax.offload import MEMORY_KIND, put, read, write
from surojax.optim import init_moments


class TrainState(NamedTuple):
    """Everything that changes from step to step; `weights` and `master` are `{"blocks": [L, ...], "outer": ...}`.

    `weights` is always `master` cast to the work dtype, so checkpoints hold `master` only. Randomness has no state:
    every draw is derived from the run's seed (weights, order of the data) and a position that is stored.
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
    if homes == {MEMORY_KIND["device"]}:
        blocks = jax.tree.map(lambda m, w: m.astype(w.dtype), master["blocks"], work["blocks"])
    else:
        num_layers = jax.tree.leaves(work["blocks"])[0].shape[0]
        on_device = jax.tree.leaves(plan.weights["blocks"])[0].sharding.memory_kind == MEMORY_KIND["device"]
        home = "device" if on_device else "host"
        layer = lambda l, stack: write(stack, read(master["blocks"], l), l)
        blocks = jax.lax.fori_loop(0, num_layers, layer, put(work["blocks"], home))
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
        return in_memory(
            TrainState(jnp.int32(0), work_weights(master, plan), master, init_moments(optimizer, master)), plan
        )

    state = jax.jit(build, out_shardings=shardings(in_memory(plan, plan)))(seed)
    return with_files(state, plan) if fill_files(config, plan, optimizer, seed) else state


def fill_files(config: LlamaConfig, plan: TrainState, optimizer: optax.GradientTransformation, seed: int) -> bool:
    """Write what a new state has in files (see nvme.py), a layer at a time; whether there is any."""
    store = store_of(plan)
    if store is None:
        return False
    files, structure = jax.tree.flatten((plan.master["blocks"], plan.moments["blocks"]))
    wanted = [isinstance(x, InFile) for x in files]
    take = lambda leaves: [x for x, want in zip(leaves, wanted, strict=True) if want]

    @jax.jit
    def layer(seed, l):
        master = jax.tree.map(lambda p, m: p.astype(m.dtype), init_layer(config, seed, l), plan.master["blocks"])
        return take(structure.flatten_up_to((master, optimizer.init(master))))

    for l in range(config.num_hidden_layers):
        store.write(l, take(files), map(jax.device_get, layer(seed, l)))
    return True


def in_memory(state: TrainState, plan: TrainState) -> TrainState:
    """The state (or a plan) with None where the plan has a file: what a compiled program can take and return."""
    return jax.tree.map(lambda p, x: None if isinstance(p, InFile) else x, plan, state)


def with_files(state: TrainState, plan: TrainState) -> TrainState:
    """What `in_memory` left, with the plan's files back in their places."""
    return jax.tree.map(lambda p, x: p if isinstance(p, InFile) else x, plan, state)
