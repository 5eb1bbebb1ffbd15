"""A training step whose update goes through a file on NVMe: one program for the gradients, one for the update of a
layer, called for each while threads read the next layer and write the last one."""

import copy
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import Part, joined, parts, put, read, write
from surojax.memory.nvme import InFile, store_of
from surojax.numerics.rounding import materialised
from surojax.optim import optimizer as optim
from surojax.optim.optimizer import Optimizer
from surojax.placement.home import DEVICE, HOST
from surojax.placement.layout import batch_sharding, specs
from surojax.placement.param import OUTER
from surojax.placement.table import Mesh
from surojax.step.engine import loss_and_gradients
from surojax.step.spec import Engine
from surojax.step.state import TensorState, TrainState, from_sections, section, shardings, specs_of
from surojax.step.update import as_trees, tensors, update_outer, update_tensor


class Program(NamedTuple):
    """One of the programs that make up a step.

    function: jitted; arguments: planned arrays; times: that it runs in a step. others: the state that is in memory
    meanwhile although the program does not take it. layers_read: layers from files that are in host memory meanwhile,
    not counting arguments and results: one is read ahead, and during the update another is written.
    """

    function: Any
    arguments: tuple
    times: int
    others: Any = ()
    layers_read: int = 0


class FileStep:
    """A training step whose update goes through a file; as `train_step.make_train_step` says, with several programs.

    gradients: (outer state, step, history, block weights, inputs, labels) -> (outer state, step, history, metrics,
    needed): the gradients of all layers, and the whole update of what is not in blocks. needed: what updates of layers
    need: {"grads", "scalars", "l" = 0}. updates, one for each of `host.parts` of the work weights: (work weights,
    stacks, layer, needed) -> (work weights, stacks, layer, l + 1): `update.update_tensor` for layer l, of whose master
    weights and moments some are in stacks in memory, updated in place, and the others are read from the file and
    written back.

    Of what is in the file, host memory holds four layers: one is read ahead, one is in use, before and after its
    update, and one is being written. The first is read while gradients are computed. A layer's copies to and from the
    device do not overlap those of the next one; disks are slower than both.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer, plan: TrainState, mesh: Mesh):
        self.engine, self.optimizer, self.plan, self.mesh = engine, optimizer, plan, mesh
        (self.segment,) = engine.model.segments  # `state_plan` refuses several
        leaves, self.structure = jax.tree.flatten(self._section(plan)[1:])
        self.in_file = [isinstance(x, InFile) for x in leaves]
        self.files = self._pick(leaves, True)
        self.store: Any = store_of(plan)
        self.needed = self._plan_needed()
        self.gradients: Any = self._gradients()
        self.updates: list[Any] = [self._update(part) for part in parts(self._section(plan).weights)]

    def _section(self, state: TrainState) -> TensorState:
        """The state of the layers; also of a plan."""
        return section(state, self.segment.name)

    def __call__(self, state: TrainState, inputs_ABS, labels_ABS):
        """Raises NvmeError when the file cannot be read or written; nothing is to be done with the state then."""
        step = int(jax.device_get(state.step)) + 1
        work, *others = self._section(state)
        stacks, updated, L = self._pick(jax.tree.leaves(others), False), [], self.engine.model.num_layers
        virtual = jax.default_backend() == "cpu" and self.mesh.size > 1
        with ThreadPoolExecutor(1, "nvme-ahead") as ahead, ThreadPoolExecutor(1, "nvme-behind") as behind:
            coming, going = ahead.submit(self._read, 0), deque()
            outer, count, history, metrics, needed = self.gradients(
                section(state, OUTER), state.step, state.history, work, inputs_ABS, labels_ABS
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
        sections = {self.segment.name: TensorState(joined(updated), master, moments), OUTER: outer}
        return from_sections(count, sections, history), metrics

    def programs(self, inputs_ABS, labels_ABS) -> list[Program]:
        """All programs of a step, of planned arrays."""
        plan = self.plan
        layers = self._section(plan)
        rest = section(plan, OUTER), plan.step, plan.history
        in_memory = self._pick(jax.tree.leaves((layers.master, layers.moments)), False)
        found = [Program(self.gradients, (*rest, layers.weights, inputs_ABS, labels_ABS), 1, in_memory, layers_read=1)]
        stacks = parts(layers.weights)
        for update, part in zip(self.updates, stacks, strict=True):
            others = rest, [other.stack for other in stacks if other.start != part.start]
            times = part.stop - part.start
            found.append(Program(update, self._arguments(part), times, others, layers_read=2))
        return found

    def lower(self, plan: TrainState, inputs_ABS, labels_ABS) -> "FileStep":
        """The step with all programs lowered, for the plan that it was made of."""
        assert jax.tree.structure(plan) == jax.tree.structure(self.plan), "a step is lowered for its own plan"
        return self._with([x.function.lower(*x.arguments) for x in self.programs(inputs_ABS, labels_ABS)])

    def compile(self, compiler_options=None) -> "FileStep":
        """The lowered step, compiled."""
        return self._with([lowered.compile(compiler_options) for lowered in (self.gradients, *self.updates)])

    def memory_analysis(self) -> None:
        """None: a step of several programs has no one answer; ask `gradients` and `updates`."""

    def _with(self, programs: list) -> "FileStep":
        step = copy.copy(self)
        step.gradients, *step.updates = programs
        return step

    def _read(self, l: int) -> list[jax.Array]:
        layers = self.store.read(l, self.files)
        put_host = lambda f, x: jax.device_put(x, f.layer_sharding(HOST))
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
            weights = {self.segment.name: blocks, OUTER: outer.weights}
            found = loss_and_gradients(engine, weights, inputs_ABS, labels_ABS, history=history, step=step)
            scalars = optim.scalars(self.optimizer, step, found.norm)
            metrics = {"loss": found.loss, "grad_norm": found.norm, "lr": scalars["lr"]}
            outer = update_outer(engine, self.optimizer, outer, found.grads, scalars)
            needed = {"grads": found.grads[self.segment.name], "scalars": scalars, "l": jnp.int32(0)}
            return outer, step + 1, found.history, metrics, needed

        outer, tokens = section(self.plan, OUTER), batch_sharding(self.mesh).spec
        kept = (outer, self.plan.step, self.plan.history)
        in_specs = (*specs_of((*kept, self._section(self.plan).weights)), tokens, tokens)
        out_specs = (*specs_of(kept), jax.P(), specs_of(self.needed))
        f = jax.shard_map(per_device, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        out = (*shardings(kept), everywhere, shardings(self.needed))
        return jax.jit(f, donate_argnums=(0, 1, 2), out_shardings=out)

    def _update(self, part: Part):
        def per_device(weights, stacks, layer, needed):
            l = needed["l"]
            old = self._merge(read(stacks, l), put(layer, DEVICE))
            (master, moments), grads = materialised((old, read(needed["grads"], l)))  # as in host.sweep
            state = TensorState(weights, master, moments)
            done = []
            for tensor in tensors(self.engine, self.segment.name, state, grads):
                work, new = update_tensor(
                    self.engine,
                    self.optimizer,
                    tensor,
                    needed["scalars"],
                    tensor.state.weights,
                    (tensor.state.master, tensor.state.moments),
                    (tensor.grad, l),
                )
                done.append(TensorState(work, *new))
            work, *new = materialised(tuple(as_trees(done, state)))
            new = jax.tree.leaves(new)
            stacks = write(stacks, self._pick(new, False), l)
            return write(weights, work, l - part.start), stacks, put(self._pick(new, True), HOST), l + 1

        arguments = self._arguments(part)
        specs_in = specs_of(arguments)
        f = jax.shard_map(per_device, mesh=self.mesh, in_specs=specs_in, out_specs=(*specs_in[:3], jax.P()))
        out = (*shardings(arguments[:3]), self.plan.step.sharding)
        return jax.jit(f, donate_argnums=(0, 1), out_shardings=out)

    def _arguments(self, part: Part) -> tuple:
        """What an update takes, as `jax.ShapeDtypeStruct`s."""
        host = lambda f: f.layer_sharding(HOST)
        layer = [jax.ShapeDtypeStruct(f.shape[1:], f.dtype, sharding=host(f)) for f in self.files]
        stacks = self._pick(jax.tree.leaves(self._section(self.plan)[1:]), False)
        return part.stack, stacks, layer, self.needed

    def _plan_needed(self) -> dict:
        plan, table = self.plan, self.engine.table.grads
        mesh, memory_kind = plan.step.sharding.mesh, table.home.memory_kind

        def gradient(p, spec):
            sharding = jax.NamedSharding(mesh, spec, memory_kind=memory_kind)
            return jax.ShapeDtypeStruct(p.shape, table.dtype, sharding=sharding)

        grads = jax.tree.map(gradient, self._section(plan).master, specs(self.engine.layouts.master)[self.segment.name])
        planned = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=plan.step.sharding)
        norm = jax.ShapeDtypeStruct((), jnp.float32)
        scalars = jax.tree.map(planned, jax.eval_shape(self.optimizer.scalars, plan.step, norm))
        return {"grads": grads, "scalars": scalars, "l": planned(plan.step)}
