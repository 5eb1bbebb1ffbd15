"""What each GPU has of a model: layers of its stage, elements of its tensor-parallel group."""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from surojax.assembly import Assembly
from surojax.memory.host import parts
from surojax.models.model import Segment
from surojax.numerics.base_formats import bytes_per_number
from surojax.optim import optimizer as optim
from surojax.parallel.schedule import SCHEDULES, Patterns, layers_of_stage, patterns_of_stages
from surojax.placement.layout import Layout
from surojax.placement.mesh import PIPELINE, TENSOR, pipeline_stages
from surojax.placement.param import OUTER, Kind, Param, part_of
from surojax.step.stage_layers import in_lockstep


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A parameter on a GPU whose stage is full.

    section: that it belongs to. layers: of the section on this stage; 1 for the outer layers. elements: of one layer,
    in the GPU's tensor-parallel group, shared over `dp_shard x cp`. trained: it has master weights, else it is frozen.
    weights, master: layouts of work weights and master weights; of a frozen one both are those of work weights.
    itemsize: bytes of each number of the work weights; coded: if it rests in the format of a frozen base, else 0.
    """

    param: Param
    section: str
    layers: int
    elements: int
    trained: bool
    weights: Layout
    master: Layout
    itemsize: int
    coded: float = 0.0

    @property
    def size(self) -> int:
        """Elements in all layers."""
        return self.layers * self.elements

    @property
    def is_matrix(self) -> bool:
        """True for an operand of a block's matrix products, without those of adapters."""
        return self.param.kind is Kind.MATRIX

    @property
    def state_is_sharded(self) -> bool:
        """True if the state, and so the sum of gradients, is sharded over `dp_shard x cp`; else it is replicated."""
        return self.master.sharded_dim is not None


def blocks(run: Assembly, *, trained: bool = False) -> list[Tensor]:
    """The `Tensor`s of all segments; trained: only those with master weights."""
    return [t for segment in run.model.segments for t in _section(run, segment.name, segment) if t.trained >= trained]


def outer(run: Assembly, *, trained: bool = False) -> list[Tensor]:
    """The `Tensor`s of the outer layers; trained: only those with master weights."""
    return [t for t in _section(run, OUTER) if t.trained >= trained]


def _section(run: Assembly, name: str, segment: Segment | None = None) -> Iterator[Tensor]:
    """The `Tensor`s of a section. segment: of its layers, if it has any."""
    master = {p.name: layout for p, layout in with_layouts(run, name, run.engine.layouts.master)}
    for p, weights in with_layouts(run, name, run.engine.layouts.weights):
        divided = math.prod(run.mesh.shape[axis] for axis in (PIPELINE, *TENSOR) if axis in weights.computed_axes)
        yield Tensor(
            param=p,
            section=name,
            layers=layers_of(run, segment) if segment else 1,
            elements=math.prod(p.shape) // divided,
            trained=p.name in master,
            weights=weights,
            master=master.get(p.name, weights),
            itemsize=jnp.dtype(p.dtype).itemsize if p.dtype else itemsize(run, "weights"),
            coded=coded_bytes(run, segment, p) if segment else 0.0,
        )


def with_layouts(run: Assembly, section: str, of_class: dict) -> list[tuple[Param, Layout]]:
    """(param, layout) for each parameter of a section that a class has."""
    layouts = of_class[section]
    return list(zip(jax.tree.leaves(part_of(run.params[section], layouts)), jax.tree.leaves(layouts), strict=True))


def coded_bytes(run: Assembly, segment: Segment, p: Param) -> float:
    """Bytes of each number of a parameter that rests in the base's format; 0 if it does not."""
    planned = run.coded(segment, p)
    return 0.0 if planned is None else bytes_per_number(planned, (planned.codes.shape[0], *p.shape))


def layers_of(run: Assembly, *segments: Segment) -> int:
    """Layers of these segments, or of all, on a GPU whose stage is full."""
    stages = pipeline_stages(run.mesh)
    return sum(layers_of_stage(segment.num_layers, stages) for segment in segments or run.model.segments)


def outer_gradients(run: Assembly) -> int:
    """Bytes of the accumulators of the outer layers, which are sharded like their work weights."""
    weights = part_of(run.plan.weights[OUTER], run.plan.master[OUTER])
    shapes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(weights)]
    return itemsize(run, "grads") * sum(map(math.prod, shapes))


def layers_together(run: Assembly, t: Tensor) -> int:
    """The number of layers of a trained matrix that are updated together."""
    if run.engine.table.in_files:
        return 1
    of_parts = [part.stop - part.start for part in parts(run.plan.weights[t.section])]
    devices = math.prod(run.mesh.shape[axis] for axis in t.master.stored_axes)
    of_stage = [layers // pipeline_stages(run.mesh) for layers in of_parts]
    return optim.layers_together(run.optimizer.matrices, of_stage, devices)


def itemsize(run: Assembly, row: str) -> int:
    """Bytes of a number in a row of the placement table."""
    return jnp.dtype(getattr(run.engine.table, row).dtype).itemsize


def patterns(run: Assembly, segment: Segment) -> Patterns:
    """The kinds of layers of the stages that a segment is divided over."""
    return patterns_of_stages(segment.variants, pipeline_stages(run.mesh))


def layer_passes(run: Assembly, microbatches: int) -> int:
    """The number of passes over its layers that a stage makes in each direction of a step."""
    idle = pipeline_stages(run.mesh) - 1 if in_lockstep(run.model) else 0
    return microbatches + idle


def groups_of(run: Assembly, microbatches: int) -> int:
    """Groups of microbatches in a step; for each, a layer's weights and accumulators are fetched once a pass."""
    return layer_passes(run, microbatches) // run.engine.microbatches_per_fetch


def slots(run: Assembly, microbatches: int) -> int:
    """The number of microbatches whose residuals every stage has room for."""
    return int(SCHEDULES[run.engine.pp_schedule](microbatches, pipeline_stages(run.mesh)).in_flight.max())


def attention_again(run: Assembly) -> bool:
    """True if the backward pass computes attention again."""
    return run.engine.recompute_block or run.model.compute.recompute.att
