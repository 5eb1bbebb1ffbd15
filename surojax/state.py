"""The training state: what a step takes and returns."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from surojax.models.llama import LlamaConfig, init_layer, init_params
from surojax.nvme import InFile, store_of
from surojax.offload import MEMORY_KIND, Device, Host, move, put, read, write
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

    if store_of(plan) is not None:
        return _init_with_files(config, plan, optimizer, seed)

    def build(seed):
        master = jax.tree.map(lambda p, m: p.astype(m.dtype), init_params(config, seed), plan.master)
        return TrainState(jnp.int32(0), work_weights(master, plan), master, init_moments(optimizer, master))

    return jax.jit(build, out_shardings=shardings(plan))(seed)


def _init_with_files(config: LlamaConfig, plan: TrainState, optimizer, seed: int) -> TrainState:
    """The same where layers rest in files: a program makes layer after layer, so neither memory nor file holds more."""
    parts = lambda state, part: (state.weights[part], state.master[part], state.moments[part])
    cast = lambda tree, like: jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)

    def make(params, part):
        master = cast(params, plan.master[part])
        return cast(master, plan.weights[part]), master, optimizer.init(master)

    def build(seed):
        return jnp.int32(0), make(init_params(config, seed)["outer"], "outer")

    step, outer = jax.jit(build, out_shardings=shardings((plan.step, parts(plan, "outer"))))(seed)
    blocks = fill_layers(parts(plan, "blocks"), jax.jit(lambda l: make(init_layer(config, seed, l), "blocks")))
    return TrainState(step, *({"blocks": b, "outer": o} for b, o in zip(blocks, outer, strict=True)))


def fill_layers(plan, layer):
    """Stacks `[L, ...]` as planned, in memory and in files, from a function l -> layer l of them, one after another."""
    leaves, structure = jax.tree.flatten(plan)
    in_file = [isinstance(x, InFile) for x in leaves]
    pick = lambda leaves, want: [x for x, f in zip(leaves, in_file, strict=True) if f == want]
    stacks, files = pick(leaves, False), pick(leaves, True)
    zeros = lambda x: move(
        jnp.zeros(x.shape, x.dtype), Host if x.sharding.memory_kind == MEMORY_KIND["host"] else Device
    )
    arrays = jax.jit(lambda: [zeros(x) for x in stacks], out_shardings=shardings(stacks))()
    put_layer = jax.jit(write, donate_argnums=0, out_shardings=shardings(stacks))
    for l in range(leaves[0].shape[0]):
        new = structure.flatten_up_to(layer(l))
        arrays = jax.block_until_ready(put_layer(arrays, pick(new, False), l))
        for file, x in zip(files, pick(new, True), strict=True):
            file.write(l, jax.device_get(x))
    arrays, files = iter(arrays), iter(files)
    return structure.unflatten([next(files if f else arrays) for f in in_file])
