"""The training state: the argument and the result of a step."""

from typing import Any, NamedTuple

import jax

from surojax.memory.in_file import InFiles
from surojax.placement.home import DEVICE
from surojax.placement.param import OUTER


class Progress(NamedTuple):
    """How far a run is, and what its steps left for the next one besides weights and moments."""

    step: Any = 0  # int32 scalar: number of optimizer steps done
    history: Any = None  # largest magnitudes in the last steps, see fp8.history_shape; None if the recipe has none

    def next(self) -> "Progress":
        """The progress after an optimizer step."""
        return self._replace(step=self.step + 1)


BEGINNING = Progress()  # of a model that was not trained


class TrainState(NamedTuple):
    """The arrays that a step changes.

    weights, master and moments are dicts by section of the model. A segment has stacks `[L, ...]` of its layers.
    `weights` is always `master` cast to the work dtype, and with `persistent_quants` quantised after the cast, so
    checkpoints contain `master` only. What is not trained has `weights` alone, which no step changes. No random
    generator state is needed: random numbers are derived from a position and either the run's seed (initial weights,
    order of the data) or the step (rounding).
    """

    step: Any  # see Progress, as history
    weights: Any
    master: Any
    moments: Any
    history: Any = None

    @property
    def progress(self) -> Progress:
        """The step and the history."""
        return Progress(self.step, self.history)


class TensorState(NamedTuple):
    """Weights, master weights and moments: of one tensor, or as three trees of several tensors."""

    weights: Any  # work weights
    master: Any
    moments: Any


def section(state: TrainState, name: str) -> TensorState:
    """Selects a section's TensorState from a state, or from a plan."""
    return TensorState(state.weights[name], state.master[name], state.moments[name])


def from_sections(progress: Progress, sections: dict[str, TensorState]) -> TrainState:
    """Builds a state from its sections: the inverse of `section`."""
    weights, master, moments = (
        {name: tensor_state[i] for name, tensor_state in sections.items()} for i in range(len(TensorState._fields))
    )
    return TrainState(progress.step, weights, master, moments, progress.history)


def segment_names(tree: dict) -> list[str]:
    """Names of the segments in a dict by section, in no particular order: all names except OUTER."""
    return [name for name in tree if name != OUTER]


def specs_of(plan):
    """The PartitionSpecs of a plan's leaves."""
    return jax.tree.map(lambda x: x.sharding.spec, plan)


def shardings(plan):
    """The shardings of a plan's leaves."""
    return jax.tree.map(lambda x: x.sharding, plan)


def cast_to_plan(tree, plan):
    """Casts arrays to the dtypes and shardings of a plan, in device memory, inside `jit`."""

    def one(x, p):
        return jax.lax.with_sharding_constraint(x.astype(p.dtype), p.sharding.with_memory_kind(DEVICE.memory_kind))

    return jax.tree.map(one, tree, plan)


def layer_of(plan):
    """The plan of one layer in device memory, from the plan of stacked arrays `[L, ...]`."""

    def one(x):
        sharding = x.sharding.with_memory_kind(DEVICE.memory_kind)
        if isinstance(sharding, jax.NamedSharding):  # the sharding of a single device has no spec
            sharding = sharding.update(spec=jax.P(*sharding.spec[1:]))
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)

    return jax.tree.map(one, plan)


def tables_in_files(outer: TensorState) -> list[str]:
    """Names of the outer layers with master weights or moments in files, in a plan or a state."""
    return [name for name in outer.master if InFiles((outer.master[name], outer.moments[name])).stacks]
