"""The part of a model's parameters that each GPU has: layers of its stage, elements of its tensor-parallel group."""

import math

import jax

from surojax.assembly import Assembly
from surojax.memory.host import parts
from surojax.models.model import Segment
from surojax.numerics.base_formats import bytes_per_number
from surojax.optim import optimizer as optim
from surojax.parallel.schedule import layers_of_stage
from surojax.placement.layout import Layout
from surojax.placement.mesh import PIPELINE, TENSOR, pipeline_stages
from surojax.placement.param import OUTER, Param, part_of


def layers_together(run: Assembly, segment: Segment, layout: Layout) -> int:
    """The number of layers of a matrix whose master weights have this layout that are updated together."""
    if run.engine.table.master.home.in_file:
        return 1
    of_parts = [part.stop - part.start for part in parts(run.plan.weights[segment.name])]
    devices = math.prod(run.mesh.shape[axis] for axis in layout.stored_axes)
    of_stage = [layers // pipeline_stages(run.mesh) for layers in of_parts]
    return optim.layers_together(run.optimizer.matrices, of_stage, devices)


def coded_bytes(run: Assembly, segment: Segment, p: Param) -> float:
    """Bytes of each number of a parameter that rests in the base's format; 0 if it does not."""
    planned = run.coded(segment, p)
    return 0.0 if planned is None else bytes_per_number(planned, (planned.codes.shape[0], *p.shape))


def layers_of(run: Assembly, *segments: Segment) -> int:
    """Layers of these segments on a GPU whose stage is full, each of which it computes, gathers and updates."""
    stages = pipeline_stages(run.mesh)
    return sum(layers_of_stage(segment.num_layers, stages) for segment in segments)


def elements(run: Assembly, p: Param, layout: Layout) -> int:
    """Elements of a parameter on each device of a stage's tensor-parallel group, shared over `dp_shard x cp`."""
    divided = math.prod(run.mesh.shape[axis] for axis in (PIPELINE, *TENSOR) if axis in layout.computed_axes)
    return math.prod(p.shape) // divided


def elements_of(run: Assembly, *sections: str) -> tuple[int, int]:
    """(trained parameters whose state is sharded, those whose state is replicated) of sections of the model."""
    layers = {segment.name: layers_of(run, segment) for segment in run.model.segments} | {OUTER: 1}
    sharded = 0
    replicated = 0
    for section in sections:
        for p, master, _ in trained(run, section):
            size = layers[section] * elements(run, p, master)
            if master.sharded_dim is None:
                replicated += size
            else:
                sharded += size
    return sharded, replicated


def segment_names(run: Assembly) -> list[str]:
    """The names of the segments of the model."""
    return [segment.name for segment in run.model.segments]


def trained(run: Assembly, section: str) -> list[tuple[Param, Layout, Layout]]:
    """(param, layout of its master weights, layout of its work weights) for each trained parameter of a section."""
    layouts = run.engine.layouts
    master = layouts.master[section]
    trees = part_of(run.params[section], master), master, part_of(layouts.weights[section], master)
    return list(zip(*map(jax.tree.leaves, trees), strict=True))


def with_layouts(run: Assembly, section: str, of_class: dict) -> list[tuple[Param, Layout]]:
    """(param, layout) for each parameter of a section that a class has."""
    layouts = of_class[section]
    return list(zip(jax.tree.leaves(part_of(run.params[section], layouts)), jax.tree.leaves(layouts), strict=True))
