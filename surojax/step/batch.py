"""The batch of a step: its microbatches, and the tokens of each microbatch that are on this device.

Labels were shifted before a device takes its part of a sequence. Shape suffixes: A microbatches, B local batch, S
sequence, or its part whose activations are on this device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import read
from surojax.models.model import NO_INPUTS, Compute, Model, RecipeInputs, Routing, Segment
from surojax.numerics.fp8 import delayed_scales
from surojax.objectives.objective import ROUTES, STARTS, Objective, OfLogProbabilities
from surojax.parallel import collectives
from surojax.parallel.context import of_each_chunk, own_tokens
from surojax.parallel.tensor import own_part
from surojax.placement.mesh import BATCH, TOKENS
from surojax.step.spec import Engine
from surojax.step.state import Progress


class Microbatch(NamedTuple):
    """One microbatch's inputs to a pass over layers.

    inputs_BS, and targets: the objective's arrays by name, of this device's tokens. starts_BS: of the documents of
    whole sequences, None if the engine is not packed. counted: a function that returns which of this device's tokens
    have a term in the objective. recipe_inputs: a function of the number of a layer. first: number in the model of the
    first layer of those that numbers are of, which is a stage's.
    """

    inputs_BS: jax.Array
    targets: dict[str, jax.Array]
    starts_BS: jax.Array | None
    counted: Callable
    recipe_inputs: Callable
    first: jax.Array | int = 0

    def of_tokens(self, segment: Segment, number: jax.Array | int) -> tuple:
        """The arguments of a layer that describe tokens: document starts, and if it has a router also `Routing`.

        number: of the layer.
        """
        if segment.statistics is None:
            return (self.starts_BS,)
        return (self.starts_BS, Routing(self.counted(), self.replayed(segment, number)))

    def replayed(self, segment: Segment, number: jax.Array | int) -> jax.Array | None:
        """The experts `[B, S, k]` that a layer's tokens were sent to when they were sampled; None: they choose."""
        if segment.statistics is None or ROUTES not in self.targets:
            return None
        start = (self.first + number) * segment.choices
        routes_BSk = jax.lax.dynamic_slice_in_dim(self.targets[ROUTES], start, segment.choices, axis=-1)
        return routes_BSk.astype(jnp.int32)


class Group(NamedTuple):
    """Microbatches for which a layer is fetched once. first, last: whether it is the step's first, or last, group."""

    number: jax.Array | int
    microbatches: list[Microbatch]
    first: bool
    last: bool


class Batch(NamedTuple):
    """The arrays of a batch `[A, B, S]`, or `[B, S]`, by the names of `Engine.batch_arrays`; sequences are whole."""

    arrays: dict[str, jax.Array]
    objective: Objective | OfLogProbabilities
    compute: Compute

    @classmethod
    def of(cls, engine: Engine, arrays: Sequence[jax.Array]) -> "Batch":
        """Makes a batch from arrays in the order of `Engine.batch_arrays`."""
        return cls(dict(zip(engine.batch_arrays, arrays, strict=True)), engine.objective, engine.model.compute)

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.arrays["inputs"].shape[0]

    @property
    def targets(self) -> list[str]:
        """Names of the target arrays; objectives over answers also get the document starts."""
        of_answers = (STARTS,) if isinstance(self.objective, OfLogProbabilities) else ()
        return [name for name in (*self.objective.targets, *of_answers) if name in self.arrays]

    def terms(self) -> jax.Array:
        """The number of terms of the objective, on all devices together; int32 []."""
        targets = {name: self.arrays[name] for name in self.targets}
        return collectives.add_up(self.objective.count(targets), *BATCH)

    def scale(self) -> jax.Array:
        """1 / the number of terms: the factor of the summed loss; float32 []."""
        return 1.0 / jnp.maximum(self.terms(), 1)

    def microbatch(self, a: jax.Array | int, recipe_inputs: Callable) -> Microbatch:
        """Microbatch a. recipe_inputs: a function (a, number of a layer)."""
        microbatch = self._replace(arrays=read(self.arrays, a))
        return microbatch.on_device(functools.partial(recipe_inputs, a))

    def on_device(self, recipe_inputs: Callable = lambda l: NO_INPUTS) -> Microbatch:
        """Selects the tokens of one microbatch whose activations are on this device."""
        targets = {name: self._own(name) for name in self.targets}
        starts = self.arrays.get(STARTS)
        return Microbatch(self._own("inputs"), targets, starts, lambda: self.objective.counted(targets), recipe_inputs)

    def _own(self, name: str) -> jax.Array:
        """Selects the columns of an array `[B, S]` whose activations are on this device."""

        def own_columns(x_BS: jax.Array) -> jax.Array:
            return own_part(own_tokens(x_BS, self.compute.cp_method))

        return of_each_chunk(own_columns, self.arrays[name], self.compute.sequence_chunks)


def recipe_inputs_of(model: Model, progress: Progress, microbatches: int, scale: jax.Array) -> Callable:
    """Returns a function (microbatch a, number of a layer) -> `RecipeInputs` of its block.

    progress: before the step, which random numbers and delayed scales follow from. scale: of the loss in the gradient,
    which tells the first step how large gradients may be.
    """
    precision = model.precision
    if precision.delayed:
        scales = delayed_scales(progress.history, model.sites, precision.margin, scale)
        return lambda a, l: RecipeInputs(scales=scales[l])
    if model.draws:
        device, devices = collectives.device_number(*TOKENS)

        def word(i) -> jax.Array:
            return jnp.asarray(i, jnp.uint32)

        def inputs(a, l) -> RecipeInputs:
            microbatch = word(progress.step) * microbatches + word(a)
            return RecipeInputs(seed=(microbatch * model.num_layers + word(l)) * devices + word(device))

        return inputs
    return lambda a, l: NO_INPUTS
