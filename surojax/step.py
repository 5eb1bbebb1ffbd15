"""One optimizer step, and one evaluation batch, as compiled programs over the mesh.

A step is `engine.loss_and_gradients`, the global norm, and the optimizer applied layer by layer to shards of master
weights and moments; then the work weights are written anew, gathered unless they rest in shards.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from surojax import collectives
from surojax.engine import Engine, evaluate, loss_and_gradients
from surojax.offload import joined, move, parts, put, read, write
from surojax.optim import Schedule, apply_layer
from surojax.placement import Mesh, batch_sharding
from surojax.state import TrainState, shardings


def update(engine: Engine, optimizer: optax.GradientTransformation, state: TrainState, grads, grad_norm) -> TrainState:
    """The state after one optimizer step; runs per device on shards."""

    def one(part, old):
        """(work weights, master, moments) of one layer, or of the outer parameters, from device memory."""
        # The barrier ends the reads before the writes begin; without it XLA fuses slices of the old stack into the
        # update and then has to copy the whole stack, once a layer.
        master, moments, grads = jax.lax.optimization_barrier(old)
        moments, master = apply_layer(optimizer, grads, moments, master, grad_norm)
        work = jax.tree.map(lambda m: m.astype(engine.placement.weights.dtype), master)
        return collectives.gather_same(work, engine.dims[part], engine.resting[part]), master, moments

    master, moments, stacks = state.master["blocks"], state.moments["blocks"], []
    for part in parts(state.weights["blocks"]):

        def layer(l, carry, start=part.start):
            work, *new = one("blocks", read((*carry[1:], grads["blocks"]), l))
            return write(carry[0], work, l - start), *write(carry[1:], tuple(new), l)

        carry = part.stack, master, moments
        stack, master, moments = jax.lax.fori_loop(part.start, part.stop, layer, carry)
        stacks.append(stack)
    blocks = joined(stacks), master, moments
    old = state.weights["outer"], state.master["outer"], state.moments["outer"]
    outer = one("outer", (*put(old[1:], "device"), grads["outer"]))
    outer = jax.tree.map(lambda x, y: move(y, jax.typeof(x).memory_space), old, outer)
    weights, master, moments = ({"blocks": b, "outer": o} for b, o in zip(blocks, outer, strict=True))
    return TrainState(state.step + 1, weights, master, moments)


def make_train_step(
    engine: Engine,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    plan: TrainState,
    mesh: Mesh,
) -> Callable:
    """A jitted (state, inputs `[A, B, S]`, labels) -> (state, {"loss", "grad_norm", "lr"}), float32 scalars.

    The state is donated: its arrays are updated in place. Loss is the mean in nats per label over the whole batch,
    grad_norm the global norm before clipping, lr the rate this step used.
    """
    spec = jax.tree.map(lambda x: x.sharding.spec, plan)
    tokens = batch_sharding(mesh)

    def per_device(state: TrainState, inputs_ABS, labels_ABS):
        loss, grads, grad_norm = loss_and_gradients(engine, state.weights, inputs_ABS, labels_ABS)
        metrics = {"loss": loss, "grad_norm": grad_norm, "lr": jnp.float32(schedule(state.step))}
        return update(engine, optimizer, state, grads, grad_norm), metrics

    step = jax.shard_map(per_device, mesh=mesh, in_specs=(spec, tokens.spec, tokens.spec), out_specs=(spec, jax.P()))
    everywhere = jax.NamedSharding(mesh, jax.P())
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings(plan), everywhere))


def make_eval_step(engine: Engine, plan: TrainState, mesh: Mesh) -> Callable:
    """A jitted (weights, inputs `[B, S]`, labels) -> (summed loss in nats, number of labels)."""
    spec = jax.tree.map(lambda x: x.sharding.spec, plan.weights)
    tokens = batch_sharding(mesh, accumulated=False)

    def per_device(weights, inputs_BS, labels_BS):
        return evaluate(engine, weights, inputs_BS, labels_BS)

    return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=(spec, tokens.spec, tokens.spec), out_specs=jax.P()))
