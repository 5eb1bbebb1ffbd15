"""The plan of the training state: the shape, dtype and sharding of every array. No array is built.

Initialisation, the step, checkpoint restore and the memory report all read the plan.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from surojax.errors import ConfigError
from surojax.memory.host import join_parts
from surojax.memory.in_file import InFile, TableInFile, home_of
from surojax.memory.layer_file import Store
from surojax.models.model import Model, Segment
from surojax.numerics import base_formats, quantized
from surojax.optim.optimizer import Optimizer, UpdateRule
from surojax.parallel.schedule import layers_of_stage, stacked_layers
from surojax.placement.home import DEVICE, HOST, Home
from surojax.placement.layout import Layout, Layouts, stacked
from surojax.placement.mesh import pipeline_stages
from surojax.placement.param import OUTER, VOCABULARY, Kind, Param, trainable
from surojax.placement.table import Mesh, Placement, has_format
from surojax.sizes import row_parts
from surojax.step.state import TrainState


def state_plan(
    model: Model,
    table: Placement,
    layouts: Layouts,
    optimizer: Optimizer,
    mesh: Mesh,
    store: Store,
    *,
    history: tuple[int, ...] | None = None,
) -> TrainState:
    """A TrainState of `jax.ShapeDtypeStruct`s with shardings, for the `Param`s of a model.

    Stacks of layers whose home is nvme are `InFile`s of the store. The work weights of a segment are `host.Split`s if
    some of its layers stay on the device: of each stage as many. Stacks have padding if stages are not all full
    (step/padding.py). history: its shape, see `fp8.history_shape`; None if there is none. Raises ConfigError if
    `resident_layers` leaves no layer to stream.
    """
    check_resident(table, model, mesh)
    planner = StatePlanner(model, table, layouts, optimizer, mesh, store)
    # Stacks in a file are stored in each layer's record in the order in which they are made here.
    weights = {}
    master = {}
    moments = {}
    for segment in model.segments:
        master[segment.name], moments[segment.name] = planner.layers_state(segment)
        weights[segment.name] = planner.work_stacks(segment, master[segment.name])
    master[OUTER], moments[OUTER] = planner.outer_state()
    weights[OUTER] = planner.outer_weights()
    return TrainState(
        step=planner.array((), jnp.int32, jax.P(), DEVICE),
        weights=weights,
        master=master,
        moments=moments,
        history=planner.array(history, jnp.float32, jax.P(), DEVICE) if history else None,
    )


def with_device_memory(
    model: Model, table: Placement, layouts: Layouts, optimizer: Optimizer, mesh: Mesh, store: Store
) -> Layouts:
    """Moves the largest tensors from host to device memory in the layouts, until `device_memory` bytes are used.

    A tensor is there with all its layers, so that each layer has as much less to move. The arguments are those of
    `state_plan`. With classes in files the budget is of what passes through the device, see `file_step.on_their_way`.
    """
    if not table.device_memory or table.in_files:
        return layouts
    planner = StatePlanner(model, table, layouts, optimizer, mesh, store)
    states = {segment.name: planner.layers_state(segment) for segment in model.segments}
    states[OUTER] = planner.outer_state()
    planned = layouts._replace(
        grads=layouts.grads | {segment.name: planner.accumulators(segment) for segment in model.segments},
        master={name: master for name, (master, _) in states.items()},
        moments={name: moments for name, (_, moments) in states.items()},
    )
    flat, structure = jax.tree.flatten(layouts)
    tensors = structure.flatten_up_to(planned)
    sizes = [0 if isinstance(x, Layout) else bytes_per_device(x, HOST) for x in tensors]
    left = table.device_memory
    for i in sorted(range(len(flat)), key=lambda i: -sizes[i]):
        if 0 < sizes[i] <= left:
            left -= sizes[i]
            flat[i] = dataclasses.replace(flat[i], home=DEVICE)
    return structure.unflatten(flat)


def check_resident(table: Placement, model: Model, mesh: Mesh) -> None:
    """Raises ConfigError if `resident_layers` leaves no layer to stream."""
    stages = pipeline_stages(mesh)
    layers_per_stage = layers_of_stage(model.num_layers, stages)
    if table.weights.resident >= layers_per_stage:
        whose = " of a stage" if stages > 1 else ""
        raise ConfigError(
            f"resident_layers: expected fewer than the {layers_per_stage} layers{whose}, got {table.weights.resident}; "
            "leave it out with offload_weights=False to keep all on the device"
        )


@dataclasses.dataclass(frozen=True)
class StatePlanner:
    """Plans the arrays of each section of a state: the outer layers, and the stacks of each segment's layers."""

    model: Model
    table: Placement
    layouts: Layouts
    optimizer: Optimizer
    mesh: Mesh
    store: Store

    def array(self, shape, dtype, spec: jax.P, home: Home) -> jax.ShapeDtypeStruct:
        """A planned array in this memory."""
        sharding = jax.NamedSharding(self.mesh, spec, memory_kind=home.memory_kind)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def stack(self, layers: range, row: str, shape, dtype, layout: Layout, source: Any = None):
        """Plans a stack [layers, *shape] for one tensor class.

        source: see `in_home`.
        """
        return self.in_home(layers, row, shape, dtype, stacked(layout), layout.home, source)

    def in_home(self, layers: range, row: str, layer_shape, dtype, spec: jax.P, home: Home, source: Any = None):
        """A planned stack of these layers in this memory, or in the file. layers: their numbers in the model.

        source: see `InFile`; of a stack in the file.
        """
        shape = (len(layers), *layer_shape)
        if home.in_file:
            return InFile(self.store, row, shape, dtype, jax.NamedSharding(self.mesh, spec), layers.start, source)
        return self.array(shape, dtype, spec, home)

    def coded_stack(self, layers: range, param: Param, layout: Layout) -> base_formats.Coded:
        """A planned stack of these layers of a matrix in the base's format."""
        spec = stacked(layout)
        shape = (len(layers), *param.shape)
        shard = jax.NamedSharding(self.mesh, spec).shard_shape(shape)
        divided = (shape[-2] // shard[-2], shape[-1] // shard[-1])
        base = base_formats.FORMATS[self.table.base_format]
        if not base_formats.has_whole_blocks(self.table.base_format, shape, divided):
            raise ConfigError(
                f"{base.setting}: expected rows of a multiple of {base.block * divided[1]} numbers, for blocks of "
                f"{base.block} on every device, got {param.name} with rows of {param.shape[-1]}; set it to false"
            )
        return base_formats.map_arrays(
            base.planned(shape, divided),
            lambda x: self.in_home(layers, "weights", x.shape[1:], x.dtype, spec, layout.home),
            lambda x: self.array(x.shape, x.dtype, jax.P(*spec[:1], *layout.computed[: x.ndim - 1]), DEVICE),
        )

    def quants(self, param: Param, layout: Layout, work: Any):
        """The planned 8-bit copy of `work`, a planned stack of matrices; a stack of vectors is returned unchanged."""
        if param.kind is not Kind.MATRIX:
            return work
        table = self.table
        spec = stacked(layout)
        row = jax.NamedSharding(self.mesh, spec).shard_shape(work.shape)[-1]
        like = jax.ShapeDtypeStruct(work.shape, table.weights.dtype)
        planned = quantized.planned(like, table.quants.dtype, 0 if table.one_scale else quantized.block_size(row))
        values = self.array(planned.values.shape, planned.values.dtype, spec, layout.home)
        scales_placement = (jax.P(), DEVICE) if table.one_scale else (spec, layout.home)
        return quantized.Quantized(values, self.array(planned.scales.shape, planned.scales.dtype, *scales_placement))

    def work_stacks(self, segment: Segment, master: dict):
        """Plans a segment's work weights for all stages: resident layers and streamed layers. master: its plan."""
        table = self.table
        master_of = {param.name: x for param, x in _leaves(segment.trained_params, master)}
        stages = pipeline_stages(self.mesh)
        entries = self._entries(segment)
        resident = stages * min(max(table.weights.resident - segment.start, 0), len(entries) // stages)

        def of_layers(layers: range, home: Home | None):
            """Stacks of these layers in this memory; None: in the memory that each layout names."""

            def one(param: Param, layout: Layout):
                layout = layout if home is None else dataclasses.replace(layout, home=home)
                if table.base_format and not param.trainable and has_format(param, table.base_format):
                    return self.coded_stack(layers, param, layout)
                dtype = param.dtype or table.weights.dtype
                return self.stack(layers, "weights", param.shape, dtype, layout, master_of.get(param.name))

            return jax.tree.map(one, segment.params, self.layouts.weights[segment.name])

        first = range(segment.start, segment.start + resident)
        rest = range(first.stop, entries.stop)
        work = join_parts([of_layers(part, home) for part, home in ((first, DEVICE), (rest, None)) if part])
        if table.persistent_quants:
            work = jax.tree.map(self.quants, segment.params, self.layouts.quants[segment.name], work)
        return work

    def layers_state(self, segment: Segment):
        """Plans (master weights, moments) of a segment's trained parameters."""
        return self._state(functools.partial(self.stack, self._entries(segment)), segment.name)

    def accumulators(self, segment: Segment):
        """Plans the gradient accumulators of a segment's trained parameters."""
        layers = self._entries(segment)

        def one(param: Param, layout: Layout):
            return self.stack(layers, "grads", param.shape, self.table.grads.dtype, layout)

        return jax.tree.map(one, segment.trained_params, self.layouts.grads[segment.name])

    def _entries(self, segment: Segment) -> range:
        """The numbers of a segment's layers in the model, and behind them of padding."""
        return range(segment.start, segment.start + stacked_layers(segment.num_layers, pipeline_stages(self.mesh)))

    def _outer_array(self, row: str, shape, dtype, layout: Layout):
        """A planned array of the outer layers, in the memory of its layout whatever its row, or in the file."""
        if layout.home.in_file:
            sharding = jax.NamedSharding(self.mesh, layout.stored)
            return TableInFile(self.store, row, shape, dtype, sharding, self.pieces)
        return self.array(shape, dtype, layout.stored, layout.home)

    @functools.cached_property
    def pieces(self) -> int:
        """The number of pieces of tables in files. None has more elements than the largest tensor of a layer."""

        def shard(param: Param, layout: Layout) -> tuple[int, ...]:
            return jax.NamedSharding(self.mesh, layout.stored).shard_shape(param.shape)

        layouts = self.layouts.master
        of_layers = [
            shard(param, layout)
            for segment in self.model.segments
            for param, layout in _leaves(segment.trained_params, layouts[segment.name])
        ]
        outer = _leaves(trainable(self.model.outer_params), layouts[OUTER])
        tables = [shard(param, layout) for param, layout in outer if param.axes[:1] == (VOCABULARY,)]
        return row_parts(tables[0][0], max(map(math.prod, tables)), max(map(math.prod, of_layers)))

    def outer_state(self):
        """Plans (master weights, moments) of the outer layers' trained parameters."""
        return self._state(self._outer_array, OUTER)

    def outer_weights(self):
        """Plans the outer layers' work weights."""

        def one(param: Param, layout: Layout):
            return self._outer_array("outer", param.shape, self.table.outer.dtype, layout)

        return jax.tree.map(one, self.model.outer_params, self.layouts.weights[OUTER])

    def _state(self, make: Callable, section: str):
        """Plans (master weights, moments) of a section's trained parameters.

        make: (row of the placement table, shape, dtype, layout) -> a planned array.
        """

        def master(param: Param, layout: Layout):
            return make("master", param.shape, self.table.master.dtype, layout)

        def moments(param: Param, master_layout: Layout, layout: Layout):
            rule = self.optimizer.rule(param)
            shard_shape = jax.NamedSharding(self.mesh, master_layout.stored).shard_shape(param.shape)
            last_dim_shards = param.shape[-1] // shard_shape[-1]
            shapes = _state_shapes(rule, param.shape, last_dim_shards)
            return jax.tree.map(
                lambda x, layout: make("moments", x.shape, x.dtype, layout), shapes, rule.state_layout(layout)
            )

        params = trainable(self.model.params[section])
        layouts = self.layouts.master[section]
        return (
            jax.tree.map(master, params, layouts),
            jax.tree.map(moments, params, layouts, self.layouts.moments[section]),
        )


def _leaves(params: dict, layouts: dict) -> list[tuple[Param, Layout]]:
    """(param, layout) for each parameter of a section."""
    return list(zip(jax.tree.leaves(params), jax.tree.leaves(layouts), strict=True))


@functools.lru_cache(maxsize=4096)
def _state_shapes(rule: UpdateRule, shape: tuple[int, ...], last_dim_shards: int):
    """The shapes of a rule's state for a tensor; the planner asks for the same ones in every plan that it tries."""
    return jax.eval_shape(lambda: rule.init(shape, last_dim_shards))


def bytes_per_device(plan, home: Home = DEVICE) -> int:
    """Bytes per device that a plan (any tree of ShapeDtypeStructs with shardings) takes in this memory.

    For nvme it is an equal part of the files, in which every tensor is once. With stages that are not all full it is
    that of a device of a full one.
    """
    leaves = [x for x in jax.tree.leaves(plan) if home_of(x) == home]
    if home.in_file:
        return sum(x.size * x.dtype.itemsize // x.sharding.mesh.size for x in leaves)
    return sum(map(leaf_bytes, leaves))


def leaf_bytes(x: jax.ShapeDtypeStruct) -> int:
    """Bytes that one planned array takes on each device."""
    assert x.sharding is not None
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
