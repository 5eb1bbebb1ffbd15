"""One optimizer step, and one evaluation batch, as compiled programs over the mesh.

A step is `engine.loss_and_gradients`, the global norm, and the optimizer applied to shards of master weights and
moments, one tensor after the other: all layers at once where they rest in device memory, one at a time where they come
from the host. The work weights are written anew with them, gathered unless they rest in shards.

That is one program, unless master weights or moments rest in a file (`nvme.py`): then it is one program for the
gradients and one for the update of a layer, called for each while threads read the next one and write the last one.
"""

import copy
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from surojax import collectives, optim
from surojax.collectives import varying
from surojax.config import divisor
from surojax.engine import Engine, evaluate, loss_and_gradients
from surojax.mesh import SHARD
from surojax.nvme import InFile, store_of
from surojax.offload import MEMORY_KIND, Part, joined, on_device, parts, put, read, sweep, write
from surojax.optim import At, Optimizer, Scalars, apply, apply_at_once
from surojax.placement import Mesh, batch_sharding, specs
from surojax.quantize import is_quantized, work_copy
from surojax.rounding import materialised
from surojax.state import TrainState, from_sections, section, shardings


def updated(engine: Engine, optimizer: Optimizer, like, resting, old, at: At):
    """(work weights, master, moments) of some tensors from their (master, moments, gradients), all in device memory.

    Trees of tensors of one layer, or of the outer layers; like: the old work weights, or what has their structure;
    resting: how these rest.
    """
    master, moments, grads = old
    work, moments, master = apply(optimizer, grads, moments, master, at, engine.placement.weights.dtype)
    return at_rest(engine, work, like, at.dims, resting), master, moments


def at_rest(engine: Engine, work, like, dims, resting):
    """New work weights, cut as `dims` says, gathered as far as they rest so, and quantised where `like` is."""
    work = collectives.gather_same(work, dims, resting)
    return work_copy(work, like, engine.placement.weights.dtype, collectives.largest_of_shards)


def update(engine: Engine, optimizer: Optimizer, state: TrainState, grads, scalars: Scalars, history) -> TrainState:
    """The state after one optimizer step, tensor by tensor; runs per device on shards."""
    layers, work_dtype = jnp.arange(engine.model.num_layers), engine.placement.weights.dtype

    def tensor(master, weights, moments, grads, dims, resting, number):
        at, like = At("blocks", scalars, dims, layers, first=number), parts(weights)[0].stack

        def layer(old, given):
            grads, l = given
            work, *new = updated(engine, optimizer, like, resting, (*old, grads), at._replace(layer=l))
            return work, tuple(new)

        def copied(old, master):
            return at_rest(engine, master.astype(work_dtype), like, dims, resting), ()

        # On the device at once, where the rule allows it: a loop copies each slice before it writes over it.
        here = on_device((master, moments, grads))
        as_updated = dims == resting and on_device(weights) and not is_quantized(weights)
        if here and (new := apply_at_once(optimizer, grads, moments, master, at, work_dtype if as_updated else None)):
            work, moments, master = new
            if not as_updated:
                work, _ = _sweep_parts(copied, weights, (), master)
        else:
            work, (master, moments) = _sweep_parts(layer, weights, (master, moments), (grads, layers))
        return work, master, moments

    blocks = _each_tensor(tensor, section(state, "blocks"), grads["blocks"], engine, "blocks")
    outer = update_outer(engine, optimizer, section(state, "outer"), grads, scalars)
    return from_sections(state.step + 1, blocks, outer, history)


def _sweep_parts(function, weights, inout, given):
    """(weights, inout) after `sweep` over one part of the work weights after another."""
    done = []
    for out, start, stop in parts(weights):
        out, inout = sweep(function, out, inout, given, start, stop)
        done.append(out)
    return joined(done), inout


def update_outer(engine: Engine, optimizer: Optimizer, old, grads, scalars: Scalars):
    """(work weights, master, moments) of the outer layers after one optimizer step, where they rest.

    A tensor whose state rests in host memory is updated a part at a time, no larger than the largest of a block.
    """
    largest = max(g.size // engine.model.num_layers for g in jax.tree.leaves(grads["blocks"]))

    def tensor(master, weights, moments, grad, dims, resting, number):
        at = At("outer", scalars, dims, first=number)
        if on_device((master, moments)):
            return updated(engine, optimizer, weights, resting, (master, moments, grad), at)
        n = divisor(master.shape[0], -(-master.size // largest)) if master.ndim > 1 else 1
        cut = lambda x: x.reshape(n, -1, *x.shape[1:])  # its rows as a stack of n layers
        join = lambda cut, x: cut.reshape(x.shape)

        def part(old, given):
            (master, moments), (grad, k) = old, given
            work, moments, master = apply(optimizer, grad, moments, master, at._replace(cut=(k, n)), weights.dtype)
            return work, (master, moments)

        shards = jax.eval_shape(cut, master).shape
        work = cut(weights) if dims == resting else varying(jnp.zeros(shards, weights.dtype), (SHARD,))
        stacks, grads = jax.tree.map(cut, ((master, moments), grad))
        work, new = sweep(part, work, stacks, (grads, jnp.arange(n)), 0, n)
        work = collectives.gather_same(join(work, master), dims, resting)
        return work, *jax.tree.map(join, new, (master, moments))

    return _each_tensor(tensor, old, grads["outer"], engine, "outer")


def _each_tensor(function, old, grads, engine: Engine, part: str):
    """(work weights, master, moments) from function(master, weights, moments, grads, dims, resting, its number) of each
    tensor."""
    weights, master, moments = old
    leaves, structure = jax.tree.flatten(master)
    others = map(structure.flatten_up_to, (weights, moments, grads, engine.dims[part], engine.resting[part]))
    done = []
    for number, (p, w, m, g, dims, resting) in enumerate(zip(leaves, *others, strict=True)):
        if done:  # one after the other, or the last layers of all of them are on the device at once
            done[-1], (p, w, m, g) = jax.lax.optimization_barrier((done[-1], (p, w, m, g)))
        done.append(function(p, w, m, g, dims, resting, number))
    return tuple(structure.unflatten(column) for column in zip(*done, strict=True))


def make_train_step(
    engine: Engine,
    optimizer: Optimizer,
    plan: TrainState,
    mesh: Mesh,
) -> Callable:
    """A jitted (state, inputs `[A, B, S]`, labels) -> (state, {"loss", "grad_norm", "lr"}), float32 scalars.

    The state is donated: its arrays are updated in place. Loss is the mean in nats per label over the whole batch,
    grad_norm the global norm before clipping, lr the rate this step used. With layers in files it is a `LayerStep`,
    which is called, lowered and compiled alike.
    """
    if store_of(plan) is not None:
        return LayerStep(engine, optimizer, plan, mesh)
    spec = jax.tree.map(lambda x: x.sharding.spec, plan)
    tokens = batch_sharding(mesh)

    def per_device(state: TrainState, inputs_ABS, labels_ABS):
        given = {"history": state.history, "step": state.step}
        loss, grads, grad_norm, history = loss_and_gradients(engine, state.weights, inputs_ABS, labels_ABS, **given)
        scalars = optim.scalars(optimizer, state.step, grad_norm)
        metrics = {"loss": loss, "grad_norm": grad_norm, "lr": scalars["lr"]}
        return update(engine, optimizer, state, grads, scalars, history), metrics

    step = jax.shard_map(per_device, mesh=mesh, in_specs=(spec, tokens.spec, tokens.spec), out_specs=(spec, jax.P()))
    everywhere = jax.NamedSharding(mesh, jax.P())
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings(plan), everywhere))


class LayerStep:
    """A training step whose update goes through a file; as `make_train_step` says, with several programs.

    gradients: (outer state, step, history, block weights, inputs, labels) -> (outer state, step, history, metrics,
    needed): the gradients of all layers, and the whole update of what is not in blocks. needed: what updates of layers
    need: {"grads", "scalars", "l" = 0}. updates, one for each of `offload.parts` of the work weights: (work weights,
    stacks, layer, needed) -> (work weights, stacks, layer, l + 1): `updated` of layer l, of whose master weights and
    moments some are in stacks in memory, updated in place, and the others are read from the file and written back.

    Of what is in the file, host memory holds four layers: one is read ahead, one is in use, before and after its
    update, and one is being written. The first is read while gradients are computed. A layer's copies to and from the
    device do not overlap those of the next one; disks are slower than both.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer, plan: TrainState, mesh: Mesh):
        self.engine, self.optimizer, self.plan, self.mesh = engine, optimizer, plan, mesh
        leaves, self.structure = jax.tree.flatten(section(plan, "blocks")[1:])
        self.in_file = [isinstance(x, InFile) for x in leaves]
        self.files = self._pick(leaves, True)
        self.store: Any = store_of(plan)
        self.needed = self._plan_needed()
        self.gradients: Any = self._gradients()
        self.updates: list[Any] = [self._update(part) for part in parts(plan.weights["blocks"])]

    def __call__(self, state: TrainState, inputs_ABS, labels_ABS):
        """Raises NvmeError when the file cannot be read or written; nothing is to be done with the state then."""
        step = int(jax.device_get(state.step)) + 1
        work, *others = section(state, "blocks")
        stacks, updated, L = self._pick(jax.tree.leaves(others), False), [], self.engine.model.num_layers
        virtual = jax.default_backend() == "cpu" and self.mesh.size > 1
        with ThreadPoolExecutor(1, "nvme-ahead") as ahead, ThreadPoolExecutor(1, "nvme-behind") as behind:
            coming, going = ahead.submit(self._read, 0), deque()
            outer, count, history, metrics, needed = self.gradients(
                section(state, "outer"), state.step, state.history, work, inputs_ABS, labels_ABS
            )
            self.store.begin_update(step)
            for update_layer, (weights, start, stop) in zip(self.updates, parts(work), strict=True):
                for l in range(start, stop):
                    layer = coming.result()
                    if l + 1 < L:
                        coming = ahead.submit(self._read, l + 1)
                    weights, stacks, layer, needed["l"] = update_layer(weights, stacks, layer, needed)
                    if virtual:  # several programs with collectives in flight can block each other
                        jax.block_until_ready(weights)
                    going.append(behind.submit(self._write, l, layer))
                    del layer
                    if len(going) > 1:
                        going.popleft().result()
                updated.append(weights)
            going.popleft().result()
            self.store.end_update(step)
        master, moments = self._merge(stacks, self.files)
        return from_sections(count, (joined(updated), master, moments), outer, history), metrics

    def programs(self, inputs_ABS, labels_ABS) -> list[tuple[Any, tuple, int]]:
        """(jitted function, its arguments, how often it runs in a step), of planned arrays."""
        plan, found = self.plan, parts(self.plan.weights["blocks"])
        rest = section(plan, "outer"), plan.step, plan.history
        gradients = *rest, plan.weights["blocks"], inputs_ABS, labels_ABS
        updates = zip(self.updates, found, strict=True)
        return [
            (self.gradients, gradients, 1),
            *((update, self._arguments(part), part.stop - part.start) for update, part in updates),
        ]

    def lower(self, plan: TrainState, inputs_ABS, labels_ABS) -> "LayerStep":
        """The step with all programs lowered, for the plan that it was made of."""
        assert plan is self.plan, "a step is lowered for its own plan"
        return self._with([f.lower(*arguments) for f, arguments, _ in self.programs(inputs_ABS, labels_ABS)])

    def compile(self, compiler_options=None) -> "LayerStep":
        """The lowered step, compiled."""
        return self._with([lowered.compile(compiler_options) for lowered in (self.gradients, *self.updates)])

    def memory_analysis(self) -> None:
        """None: a step of several programs has no one answer; ask `gradients` and `updates`."""

    def _with(self, programs: list) -> "LayerStep":
        step = copy.copy(self)
        step.gradients, *step.updates = programs
        return step

    def _read(self, l: int) -> list[jax.Array]:
        layers = self.store.read(l, self.files)
        put_host = lambda f, x: jax.device_put(x, f.layer_sharding(MEMORY_KIND["host"]))
        return [put_host(f, x) for f, x in zip(self.files, layers, strict=True)]

    def _write(self, l: int, layer: list[jax.Array]) -> None:
        self.store.write(l, self.files, map(jax.device_get, layer))

    def _pick(self, leaves, in_file: bool) -> list:
        """Those leaves of (master, moments) that are in the file, or those that are not."""
        return [x for x, f in zip(leaves, self.in_file, strict=True) if f == in_file]

    def _merge(self, stacks, layer):
        """Both kinds of leaves as the tree (master, moments)."""
        stacks, layer = iter(stacks), iter(layer)
        return jax.tree.unflatten(self.structure, [next(layer if f else stacks) for f in self.in_file])

    def _gradients(self):
        engine, everywhere = self.engine, self.plan.step.sharding

        def per_device(outer, step, history, blocks, inputs_ABS, labels_ABS):
            weights, given = {"blocks": blocks, "outer": outer[0]}, {"history": history, "step": step}
            loss, grads, grad_norm, history = loss_and_gradients(engine, weights, inputs_ABS, labels_ABS, **given)
            scalars = optim.scalars(self.optimizer, step, grad_norm)
            metrics = {"loss": loss, "grad_norm": grad_norm, "lr": scalars["lr"]}
            outer = update_outer(engine, self.optimizer, outer, grads, scalars)
            needed = {"grads": grads["blocks"], "scalars": scalars, "l": jnp.int32(0)}
            return outer, step + 1, history, metrics, needed

        outer, tokens = section(self.plan, "outer"), batch_sharding(self.mesh).spec
        kept = (outer, self.plan.step, self.plan.history)
        in_specs = (*_specs((*kept, self.plan.weights["blocks"])), tokens, tokens)
        out_specs = (*_specs(kept), jax.P(), _specs(self.needed))
        f = jax.shard_map(per_device, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        out = (*shardings(kept), everywhere, shardings(self.needed))
        return jax.jit(f, donate_argnums=(0, 1, 2), out_shardings=out)

    def _update(self, part: Part):
        def per_device(weights, stacks, layer, needed):
            l = needed["l"]
            old = self._merge(read(stacks, l), put(layer, "device"))
            old = materialised((*old, read(needed["grads"], l)))  # as in offload.sweep
            at = At("blocks", needed["scalars"], self.engine.dims["blocks"], l)
            new = updated(self.engine, self.optimizer, weights, self.engine.resting["blocks"], old, at)
            work, *new = materialised(new)
            new = jax.tree.leaves(new)
            stacks = write(stacks, self._pick(new, False), l)
            return write(weights, work, l - part.start), stacks, put(self._pick(new, True), "host"), l + 1

        arguments = self._arguments(part)
        specs_in = _specs(arguments)
        f = jax.shard_map(per_device, mesh=self.mesh, in_specs=specs_in, out_specs=(*specs_in[:3], jax.P()))
        out = (*shardings(arguments[:3]), self.plan.step.sharding)
        return jax.jit(f, donate_argnums=(0, 1), out_shardings=out)

    def _arguments(self, part: Part) -> tuple:
        """What an update takes, as `jax.ShapeDtypeStruct`s."""
        host = lambda f: f.layer_sharding(MEMORY_KIND["host"])
        layer = [jax.ShapeDtypeStruct(f.shape[1:], f.dtype, sharding=host(f)) for f in self.files]
        stacks = self._pick(jax.tree.leaves(section(self.plan, "blocks")[1:]), False)
        return part.stack, stacks, layer, self.needed

    def _plan_needed(self) -> dict:
        plan, table = self.plan, self.engine.placement.grads
        mesh, memory_kind = plan.step.sharding.mesh, MEMORY_KIND[table.home]

        def gradient(p, spec):
            sharding = jax.NamedSharding(mesh, spec, memory_kind=memory_kind)
            return jax.ShapeDtypeStruct(p.shape, table.dtype, sharding=sharding)

        grads = jax.tree.map(gradient, plan.master["blocks"], specs(self.engine.dims)["blocks"])
        planned = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=plan.step.sharding)
        norm = jax.ShapeDtypeStruct((), jnp.float32)
        scalars = jax.tree.map(planned, jax.eval_shape(self.optimizer.scalars, plan.step, norm))
        return {"grads": grads, "scalars": scalars, "l": planned(plan.step)}


def _specs(plan):
    return jax.tree.map(lambda x: x.sharding.spec, plan)


def make_eval_step(engine: Engine, plan: TrainState, mesh: Mesh) -> Callable:
    """A jitted (weights, inputs `[B, S]`, labels) -> (summed loss in nats, number of labels)."""
    spec = jax.tree.map(lambda x: x.sharding.spec, plan.weights)
    tokens = batch_sharding(mesh, accumulated=False)

    def per_device(weights, inputs_BS, labels_BS):
        return evaluate(engine, weights, inputs_BS, labels_BS)

    return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=(spec, tokens.spec, tokens.spec), out_specs=jax.P()))
