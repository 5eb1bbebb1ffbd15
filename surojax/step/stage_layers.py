"""The layers of one stage of pipeline parallelism: the model that it computes, and when it runs the loops over them.

All stages run one program. The kinds of a stage's layers, in order, are its pattern (`schedule.Patterns`): sliding
windows, rotary embeddings, and layers without the recipe need not repeat from stage to stage. The program has the loops
of each pattern, and a stage runs those of its own, in a loop of one round or none (`when_any`): a loop updates its
carry in place, the branches of a conditional may copy it. Collectives inside are over `dp_shard`, `dp_replicate`, `cp`
and `tp`. All devices of such a group are in the same stage, so that they run the same loop.

Layers of several kinds are a stack for each kind, of which every stage has an equal part (`schedule.check_counts`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from surojax.models.model import Model, RecipeInputs, Segment, Variant
from surojax.parallel import collectives, stage_collectives
from surojax.parallel.schedule import NONE, check_counts, check_stages, patterns_of_stages, stacked_layers
from surojax.step.padding import padded
from surojax.step.spec import Engine
from surojax.step.weights import Layers


def of_stage(model: Model, stages: int) -> Model:
    """Returns the model of one stage: as many layers as a stage has, in the order of the first stage.

    Raises ConfigError if a stage would have no layer, or if stages have other numbers of layers of a kind.
    """
    assert stages == 1 or model.compute.cp_method != "ring", "refusals/pairs.py: not all stages take a hop together"
    check_stages(model.num_layers, stages)
    check_counts([layer.kind for layer in model.order], stages)
    segments = with_pattern(model.segments, patterns_of_stages(layer_patterns(model), stages).patterns[0])
    if _has_padding(model, stages):
        segments = [padded(segment) for segment in segments]
    return dataclasses.replace(model, segments=tuple(segments))


def layer_patterns(model: Model) -> list[tuple[str, Variant]]:
    """Returns (kind, variant) of each layer; patterns of stages are sequences of these."""
    return [(layer.kind, layer.variant) for layer in model.order]


def with_pattern(segments: Sequence[Segment], pattern: Sequence[tuple[str, Variant]]) -> list[Segment]:
    """Returns the segments with the layers of a stage of this pattern."""

    def of_stage(segment: Segment) -> Segment:
        own = {number: variant for number, (kind, variant) in enumerate(pattern) if kind == segment.name}
        return dataclasses.replace(segment, variants=tuple(own.values()), numbers=tuple(own))

    return [of_stage(segment) for segment in segments]


def _has_padding(model: Model, stages: int) -> bool:
    """True if blocks of a stage are `padded` and read `RecipeInputs.computes`."""
    return stacked_layers(model.num_layers, stages) > model.num_layers


def stage_engine(engine: Engine) -> Engine:
    """The engine of one stage."""
    return dataclasses.replace(engine, model=of_stage(engine.model, stage_collectives.stage()[1]))


def first_layer_of_stage(engine: Engine) -> jax.Array | int:
    """The number in the model of this stage's first layer. engine: of one stage."""
    return collectives.first_layer(engine.model.num_layers)


def inputs_of_stage(model: Model, number: Any, recipe_inputs: RecipeInputs) -> RecipeInputs:
    """The `RecipeInputs` that the block of an entry of the stacks of all stages takes.

    number: of the entry. recipe_inputs: those of the layer.
    """
    if not _has_padding(model, stage_collectives.stage()[1]):
        return recipe_inputs
    return recipe_inputs._replace(computes=number < model.num_layers)


class StageLayers:
    """Layer loops of all stage patterns; each stage runs only its own."""

    def __init__(self, model: Model, engine: Engine, weights):
        """model: whole. engine: of one stage. weights: by section."""
        number, stages = stage_collectives.stage()
        patterns, pattern_of_stage = patterns_of_stages(layer_patterns(model), stages)
        segments = [with_pattern(engine.model.segments, pattern) for pattern in patterns]
        self.of_patterns = [Layers(engine, of_pattern, weights) for of_pattern in segments]
        self.variants = {segment.name: tuple(dict.fromkeys(segment.variants)) for segment in model.segments}
        self.own_pattern = jnp.asarray(pattern_of_stage)[number]
        # Copied in once, outside of the ticks, in which their constant positions would be kernels.
        self.shards = [
            {
                reverse: {
                    name: {i: fetch.first_shards(reverse=reverse) for i, fetch in fetches.items()}
                    for name, fetches in layers.fetches.items()
                }
                for reverse in (False, True)
            }
            for layers in self.of_patterns
        ]

    def early(self, pattern: int, *, reverse: bool = False) -> dict[str, dict[int, tuple]]:
        """Weights that are prefetched before a pass over the layers of a pattern, by segment, for each loop."""
        return {
            name: {i: fetches[i].from_shards(shards, reverse=reverse) for i, shards in of_segment.items()}
            for name, of_segment in self.shards[pattern][reverse].items()
            for fetches in [self.of_patterns[pattern].fetches[name]]
        }

    def when_any(self, of_stages: jax.Array, function: Callable, carry):
        """The carry after function(this stage's pattern, a, carry), if it has a microbatch a.

        pattern: its number in `of_patterns`. of_stages: the microbatch of each stage, int32 [stages].
        """
        own = of_stages[stage_collectives.stage()[0]]
        for i in range(len(self.of_patterns)):
            a = own if len(self.of_patterns) == 1 else jnp.where(self.own_pattern == i, own, NONE)
            with jax.named_scope(f"pattern{i}"):
                carry = when_any(a, functools.partial(function, i), carry)
        return carry


def when_any(a: jax.Array, function: Callable, carry):
    """function(a, carry) if a is a microbatch, else carry. All devices of function's collectives have the same a."""
    return jax.lax.fori_loop(0, (a != NONE).astype(jnp.int32), lambda _, carry: function(a, carry), carry)
