"""The plan of the training state: the shape, dtype and sharding of every array. No array is built.

Initialisation, the step, checkpoint restore and the memory report all read the plan.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from surojax.errors import ConfigError
from surojax.memory.host import joined
from surojax.memory.in_file import InFile, own_layers
from surojax.memory.layer_file import Store
from surojax.models.model import Model, Segment
from surojax.numerics import base_formats, quantize
from surojax.optim.optimizer import Optimizer, Rule
from surojax.parallel.schedule import layers_of_stage, stacked_layers
from surojax.placement.home import DEVICE, Home
from surojax.placement.layout import Layout, Layouts, stacked
from surojax.placement.mesh import pipeline_stages
from surojax.placement.param import OUTER, Kind, Param, trainable
from surojax.placement.table import Mesh, Placement
from surojax.step.state import TrainState


def state_plan(
    model: Model,
    table: Placement,
    layouts: Layouts,
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    history: tuple[int, ...] | None = None,
) -> TrainState:
    """A TrainState of `jax.ShapeDtypeStruct`s with shardings, for the `Param`s of a model.

    Stacks of layers whose home is nvme are `InFile`s of one store. The work weights of a segment are `host.Split`s if
    some of its layers stay on the device: of each stage as many. Stacks have padding if stages are not all full
    (step/padding.py). history:
    its shape, see `fp8.history_shape`; None if there is none. Raises ConfigError if `resident_layers` leaves no layer
    to stream, or if a model of several segments has a home of nvme.
    """
    stages = pipeline_stages(mesh)
    of_stage = layers_of_stage(model.num_layers, stages)
    if table.weights.resident >= of_stage:
        whose = " of a stage" if stages > 1 else ""
        raise ConfigError(
            f"resident_layers: expected fewer than the {of_stage} layers{whose}, got {table.weights.resident}; "
            "leave it out with offload_weights=False to keep all on the device"
        )
    in_file = table.master.home.in_file or table.moments.home.in_file
    if in_file and len(model.segments) > 1:
        names = ", ".join(segment.name for segment in model.segments)
        raise ConfigError(
            f"offload_optimizer, offload_master: expected true or false for a model of several segments of layers "
            f"({names}), got 'nvme', whose file has records of equal size; set them to true"
        )
    store = Store(table.master.folder, model.num_layers, own_layers(mesh, model.num_layers))
    entries = {segment.name: stacked_layers(segment.num_layers, stages) for segment in model.segments}

    def array(shape, dtype, spec: jax.P, home: Home) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec, memory_kind=home.memory_kind))

    def stack(layers: int, shape, dtype, layout: Layout):
        """A planned stack of this many layers, each of this shape and layout."""
        spec = stacked(layout)
        if layout.home.in_file:
            return InFile(store, (layers, *shape), dtype, jax.NamedSharding(mesh, spec))
        return array((layers, *shape), dtype, spec, layout.home)

    def outer_array(shape, dtype, layout: Layout):
        """A planned array of the outer layers."""
        return array(shape, dtype, layout.stored, layout.home)

    def quants(param: Param, layout: Layout, work: Any):
        """The planned 8-bit copy of `work`, a planned stack of matrices; a stack of vectors is returned unchanged."""
        if param.kind is not Kind.MATRIX:
            return work
        spec = stacked(layout)
        block = 0 if table.one_scale else quantize.block_size(jax.NamedSharding(mesh, spec).shard_shape(work.shape)[-1])
        like = jax.ShapeDtypeStruct(work.shape, table.weights.dtype)
        planned = quantize.planned(like, table.quants.dtype, block)
        values = array(planned.values.shape, planned.values.dtype, spec, layout.home)
        if table.one_scale:
            return quantize.Quantized(values, array(planned.scales.shape, planned.scales.dtype, jax.P(), DEVICE))
        return quantize.Quantized(values, array(planned.scales.shape, planned.scales.dtype, spec, layout.home))

    def coded_stack(layers: int, param: Param, layout: Layout) -> base_formats.Coded:
        """A planned stack of this many layers of a matrix in the base's format."""
        spec = stacked(layout)
        shape = (layers, *param.shape)
        shard = jax.NamedSharding(mesh, spec).shard_shape(shape)
        divided = (shape[-2] // shard[-2], shape[-1] // shard[-1])
        base = base_formats.FORMATS[table.base_format]
        if not base_formats.fits(table.base_format, shape, divided):
            raise ConfigError(
                f"{base.setting}: expected rows of a multiple of {base.block * divided[1]} numbers, for blocks of "
                f"{base.block} on every device, got {param.name} with rows of {param.shape[1]}; set it to false"
            )
        return base_formats.map_arrays(
            base.planned(shape, divided),
            lambda x: array(x.shape, x.dtype, spec, layout.home),
            lambda x: array(x.shape, x.dtype, jax.P(*spec[:1]), DEVICE),
        )

    def work_stacks(segment: Segment):
        """The planned work weights of a segment: of its resident layers, and of its streamed layers, of all stages."""
        layers = entries[segment.name]
        resident = stages * min(max(table.weights.resident - segment.start, 0), layers // stages)

        def of_layers(layers: int, home: Home | None):
            """Stacks of this many layers in this memory; None: in the memory that each layout names."""

            def one(param: Param, layout: Layout):
                layout = layout if home is None else dataclasses.replace(layout, home=home)
                if table.base_format and param.kind is Kind.MATRIX and not param.trainable:
                    return coded_stack(layers, param, layout)
                return stack(layers, param.shape, param.dtype or table.weights.dtype, layout)

            return jax.tree.map(one, segment.params, layouts.weights[segment.name])

        split = [of_layers(resident, DEVICE)] if resident else []
        streamed = layers - resident
        work = joined(split + [of_layers(streamed, None)] * bool(streamed))
        if table.persistent_quants:
            work = jax.tree.map(quants, segment.params, layouts.quants[segment.name], work)
        return work

    def of_state(make, name: str):
        """The planned (master weights, moments) of what is trained in a section.

        make: (shape, dtype, layout) -> a planned array.
        """

        def moments(param: Param, master_layout: Layout, layout: Layout):
            rule = optimizer.rule(param)
            shard_shape = jax.NamedSharding(mesh, master_layout.stored).shard_shape(param.shape)
            last_dim_shards = param.shape[-1] // shard_shape[-1]
            shapes = _state_shapes(rule, param.shape, last_dim_shards)
            return jax.tree.map(lambda x, layout: make(x.shape, x.dtype, layout), shapes, rule.state_layout(layout))

        params = trainable(model.params[name])
        master_layouts = layouts.master[name]
        master = jax.tree.map(
            lambda param, layout: make(param.shape, table.master.dtype, layout), params, master_layouts
        )
        return master, jax.tree.map(moments, params, master_layouts, layouts.moments[name])

    # Stacks in a file are stored in each layer's record in the order in which they are made here.
    weights = {}
    master = {}
    moments = {}
    for segment in model.segments:
        name = segment.name
        master[name], moments[name] = of_state(functools.partial(stack, entries[name]), name)
        weights[name] = work_stacks(segment)
    master[OUTER], moments[OUTER] = of_state(outer_array, OUTER)
    weights[OUTER] = jax.tree.map(
        lambda param, layout: outer_array(param.shape, table.outer.dtype, layout),
        model.outer_params,
        layouts.weights[OUTER],
    )
    return TrainState(
        step=array((), jnp.int32, jax.P(), DEVICE),
        weights=weights,
        master=master,
        moments=moments,
        history=array(history, jnp.float32, jax.P(), DEVICE) if history else None,
    )


@functools.lru_cache(maxsize=4096)
def _state_shapes(rule: Rule, shape: tuple[int, ...], last_dim_shards: int):
    """The shapes of a rule's state for a tensor; the planner asks for the same ones in every plan that it tries."""
    return jax.eval_shape(lambda: rule.init(shape, last_dim_shards))


def bytes_per_device(plan, home: Home = DEVICE) -> int:
    """Bytes per device that a plan (any tree of ShapeDtypeStructs with shardings) takes in this memory.

    For nvme it is an equal part of the files, in which every tensor is once. With stages that are not all full it is
    that of a device of a full one.
    """
    leaves = jax.tree.leaves(plan)
    if home.in_file:
        return sum(x.size * x.dtype.itemsize // x.sharding.mesh.size for x in leaves if isinstance(x, InFile))
    return sum(
        leaf_bytes(x) for x in leaves if not isinstance(x, InFile) and x.sharding.memory_kind == home.memory_kind
    )


def leaf_bytes(x: jax.ShapeDtypeStruct) -> int:
    """Bytes that one planned array takes on each device."""
    assert x.sharding is not None
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
