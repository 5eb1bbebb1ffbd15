"""The layers of one stage of pipeline parallelism: the model that it computes, and when it runs the loops over them.

All stages run one program. The kinds of a stage's layers, in order, are its pattern (`schedule.Patterns`): sliding
windows, rotary embeddings, and layers without the recipe need not repeat from stage to stage. The program has the loops
of each pattern, and a stage runs those of its own, in a loop of one round or none (`when_any`): a loop updates its
carry in place, the branches of a conditional may copy it. Collectives inside are over `dp_shard`, `dp_replicate`, `cp`
and `tp`. All devices of such a group are in the same stage, so that they run the same loop.

The hops of a ring over `cp` (cp_method="ring") are an exception: a collective-permute has the devices of all stages, so
all have to arrive at it. With a ring, stages compute in lockstep: each of them runs its layers in every tick in which
any stage does. A stage that has no microbatch then runs them as if they were padding (padding.py), which leaves
activations and their gradients as they are and adds zeros to the gradients of weights. That takes no time, since the
other stages compute in the same tick. Which loop a stage runs may not differ, so patterns have to be equal.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from surojax.errors import ConfigError
from surojax.models.model import Model, RecipeInputs
from surojax.parallel import collectives, stage_collectives
from surojax.parallel.schedule import (
    NONE,
    check_lockstep,
    check_stages,
    patterns_of_stages,
    stacked_layers,
)
from surojax.step.padding import padded
from surojax.step.spec import Engine
from surojax.step.weights import Layers


def in_lockstep(model: Model) -> bool:
    """True if every stage computes in every tick in which any stage does."""
    return model.compute.cp_method == "ring"


def of_stage(model: Model, stages: int) -> Model:
    """Returns the model of one stage: as many layers as a stage has, with the variants of the first stage.

    Raises ConfigError if a stage would have no layer, if blocks have other parameters in some layers, or if stages that
    compute in lockstep have layers of other kinds.
    """
    check_stages(model.num_layers, stages)
    segment, *others = model.segments
    if others:
        names = ", ".join(segment.name for segment in model.segments)
        raise ConfigError(
            f"pp_size: expected 1 for several segments of layers ({names}), for which more is not built yet, got "
            f"{stages}; leave it out"
        )
    if in_lockstep(model):
        check_lockstep(segment.variants, stages)
    pattern = patterns_of_stages(segment.variants, stages).patterns[0]
    segment = dataclasses.replace(segment, variants=pattern, numbers=range(len(pattern)))
    if _takes_inputs(model, stages):
        segment = padded(segment, idles=in_lockstep(model))
    return dataclasses.replace(model, segments=(segment,))


def _takes_inputs(model: Model, stages: int) -> bool:
    """True if blocks of a stage are `padded`, and ask whether they compute."""
    return in_lockstep(model) or stacked_layers(model.num_layers, stages) > model.num_layers


def stage_engine(engine: Engine) -> Engine:
    """The engine of one stage."""
    return dataclasses.replace(engine, model=of_stage(engine.model, stage_collectives.stage()[1]))


def first_layer_of_stage(engine: Engine) -> jax.Array | int:
    """The number in the model of this stage's first layer. engine: of one stage."""
    return collectives.first_layer(engine.model.num_layers)


def inputs_of_stage(
    model: Model, number: Any, recipe_inputs: RecipeInputs, computes: jax.Array | bool = True
) -> RecipeInputs:
    """The `RecipeInputs` that the block of an entry of the stacks of all stages takes.

    number: of the entry. recipe_inputs: those of the layer. computes: False in a stage that has no microbatch.
    """
    if not _takes_inputs(model, stage_collectives.stage()[1]):
        return recipe_inputs
    return recipe_inputs._replace(computes=(number < model.num_layers) & computes)


class StageLayers:
    """Layer loops of all stage patterns; each stage runs only its own."""

    def __init__(self, model: Model, engine: Engine, weights):
        """model: whole. engine: of one stage. weights: by section."""
        number, stages = stage_collectives.stage()
        (segment,) = engine.model.segments
        patterns, pattern_of_stage = patterns_of_stages(model.segments[0].variants, stages)
        segments = [dataclasses.replace(segment, variants=pattern) for pattern in patterns]
        self.segment = segment.name
        self.of_patterns = [Layers(engine, [segment], weights) for segment in segments]
        self.variants = tuple(dict.fromkeys(model.segments[0].variants))
        self.own_pattern = jnp.asarray(pattern_of_stage)[number]
        self.in_lockstep = in_lockstep(model)
        # Copied in once, outside of the ticks, in which their constant positions would be kernels.
        self.shards = [
            {
                reverse: {i: fetch.first_shards(reverse=reverse) for i, fetch in layers.fetches[self.segment].items()}
                for reverse in (False, True)
            }
            for layers in self.of_patterns
        ]

    def early(self, pattern: int, *, reverse: bool = False) -> dict[int, tuple]:
        """Weights that are prefetched before a pass over the layers of a pattern, for each loop."""
        shards = self.shards[pattern][reverse]
        fetches = self.of_patterns[pattern].fetches[self.segment]
        return {i: fetch.from_shards(shards[i], reverse=reverse) for i, fetch in fetches.items()}

    def when_any(self, of_stages: jax.Array, function: Callable, carry):
        """The carry after function(this stage's pattern, a, computes, carry), if it has a microbatch a.

        pattern: its number in `of_patterns`. of_stages: the microbatch of each stage, int32 [stages]. computes: False
        in lockstep, bool [], if this stage has no microbatch but another one has; the function is then called too, with
        a = 0, and must change nothing. Else True.
        """
        own = of_stages[stage_collectives.stage()[0]]
        if self.in_lockstep:
            assert len(self.of_patterns) == 1

            def together(_, carry):
                return function(0, jnp.maximum(own, 0), own != NONE, carry)

            return when_any(jnp.max(of_stages), together, carry)
        for i in range(len(self.of_patterns)):
            a = own if len(self.of_patterns) == 1 else jnp.where(self.own_pattern == i, own, NONE)

            def alone(a, carry, i=i):
                return function(i, a, True, carry)

            with jax.named_scope(f"pattern{i}"):
                carry = when_any(a, alone, carry)
        return carry


def when_any(a: jax.Array, function: Callable, carry):
    """function(a, carry) if a is a microbatch, else carry. All devices of function's collectives have the same a."""
    return jax.lax.fori_loop(0, (a != NONE).astype(jnp.int32), lambda _, carry: function(a, carry), carry)
