"""The computations of a step on one microbatch: begin, layer, head, layer backward, end. Once a step: finish.

    begin             x = embed(tokens)                             OuterLayers.embed
    layer             x, saved = block(w, x)                        LayerVerbs.forward
    head              loss, dx; adds the head's gradients           head
    layer backward    dw, dx = vjp(block)(w, saved)(dx)             LayerVerbs.backward
    end               adds the embedding's gradient of dx           end
    finish            sums over devices, norm, metrics              finish

Nothing here loops over layers or microbatches, fetches weights or writes gradients. That is the work of drivers, which
call these functions in some order: the groups of microbatches in one program (engine.py, blocks.py), the ticks of
pipeline stages (pipeline.py), and programs of one layer that the host runs (layer_gradients.py). An evaluation calls
`LayerVerbs.infer` in the drivers' loops. What a microbatch adds up on its way is in `Totals` (totals.py).
"""

import dataclasses
from typing import Any, NamedTuple

import jax

from surojax.models.lora import without_adapters
from surojax.models.model import Routing, Segment, Variant
from surojax.step.batch import Batch, Microbatch
from surojax.step.gradients import Sums, add, reduced
from surojax.step.outer import OuterLayers
from surojax.step.residuals import recomputing_segment
from surojax.step.spec import Engine
from surojax.step.state import Progress, TensorState
from surojax.step.stream import Flight
from surojax.step.totals import LayerTotals, OverLayers, Totals, of_whole_model


class Gradients(NamedTuple):
    """The results of forward and backward passes that the update reads.

    metrics: of all microbatches and devices, see `Totals.metrics`; "loss" is in nats per label. grads: by section, the
    shards that the optimizer updates. norm: their global norm. progress: as before the step, but with what it observed.
    updated: by segment, the TensorState after the update that the step before left pending; None without one.
    """

    metrics: dict[str, Any]
    grads: dict
    norm: jax.Array
    progress: Progress
    updated: dict[str, TensorState] | None = None

    @property
    def loss(self) -> jax.Array:
        """The loss among the metrics."""
        return self.metrics["loss"]

    def reported(self, lr: jax.Array) -> dict[str, Any]:
        """All metrics of a step, this device's part."""
        return {**self.metrics, "grad_norm": self.norm, "lr": lr}


@dataclasses.dataclass(frozen=True)
class LayerVerbs:
    """Computes single layers of a segment for one microbatch.

    segment: with blocks as a step runs them: recomputed in the backward pass, or not. reference: the segment without
    its adapters, see `Engine.reference`.

    Arguments of all methods: w: the layer's weights as products read them. number: of the layer in the model.
    """

    segment: Segment
    reference: Segment | None

    @classmethod
    def of(cls, engine: Engine, segment: Segment) -> "LayerVerbs":
        """Makes the verbs of a segment of an engine's model."""
        references = engine.reference.segments if engine.reference else ()
        reference = next((other for other in references if other.name == segment.name), None)
        assert engine.reference is None or reference is not None
        return cls(recomputing_segment(segment) if engine.recompute_block else segment, reference)

    def forward(
        self, w, x_BSD: jax.Array, number: Any, variant: Variant, each: Microbatch
    ) -> tuple[jax.Array, Any, LayerTotals]:
        """Returns (the layer's output, what its backward pass reads besides the weights, what it adds to totals)."""
        inputs = each.recipe_inputs(number)
        tokens = each.of_tokens(self.segment, number)
        (x_BSD, routed), saved = self.segment.block_forward(w, x_BSD, inputs, variant, *tokens)
        return x_BSD, saved, LayerTotals.of_forward(routed)

    def backward(
        self, w, saved, dx_BSD: jax.Array, d_statistics: Any, number: Any, variant: Variant, each: Microbatch
    ) -> tuple[Any, jax.Array, LayerTotals]:
        """Returns (gradients of the trained weights, gradient of the layer's input, what it adds to totals).

        saved: of `forward`. dx_BSD, d_statistics: gradients of its output and of what its router counts, or None.
        """
        inputs, tokens = each.recipe_inputs(number), each.of_tokens(self.segment, number)
        dw, dx_BSD, observed = self.segment.block_backward(w, saved, (dx_BSD, d_statistics), inputs, variant, *tokens)
        return dw, dx_BSD, LayerTotals(observed=observed)

    def infer(self, w, x_BSD: jax.Array, number: Any, variant: Variant, each: Microbatch) -> jax.Array:
        """Returns the layer's output alone: nothing is saved."""
        decided = each.replayed(self.segment, number)
        tokens = (each.starts_BS,) if decided is None else (each.starts_BS, Routing(decided=decided))
        return self.segment.block(w, x_BSD, each.recipe_inputs(number), variant, *tokens)[0]

    def infer_reference(self, w, x_BSD: jax.Array, number: Any, variant: Variant, each: Microbatch) -> jax.Array:
        """`infer` without the layer's adapters, and with the layer's own choice of experts."""
        assert self.reference is not None
        inputs = each.recipe_inputs(number)
        return self.reference.block(without_adapters(w), x_BSD, inputs, variant, each.starts_BS)[0]


def head(
    outer: OuterLayers, x_BSD: jax.Array, targets: dict[str, jax.Array], scale: jax.Array, totals: Totals
) -> tuple[jax.Array, Totals]:
    """Returns (d (scale * loss) / dx, the totals with loss and the head's gradients). dx is written over x.

    x_BSD: the last layer's output. targets: of the same tokens.
    """
    sums, dx_BSD, d_outer = outer.head(totals.d_outer, x_BSD, targets, scale)
    return dx_BSD, totals._replace(d_outer=d_outer, sums=add(totals.sums, sums))


def end(outer: OuterLayers, tokens_BS: jax.Array, dx_BSD: jax.Array, totals: Totals) -> Totals:
    """Adds the embedding's gradient, computed from that of the first layer's input."""
    return totals._replace(d_outer=outer.push_embed(totals.d_outer, tokens_BS, dx_BSD))


def finish(
    engine: Engine,
    sums_of: dict[str, Sums],
    accumulators: dict[str, Flight],
    totals: Totals,
    batch: Batch,
    scale: jax.Array,
    progress: Progress,
    over_layers: OverLayers = of_whole_model,
) -> Gradients:
    """Completes a step after all microbatches: gradients, their norm, metrics and progress, over all devices.

    sums_of, accumulators: by segment; none for segments whose gradients are complete, see `gradients.reduced`.
    over_layers: see `totals.OverLayers`. scale, progress: see `engine.loss_and_gradients`.
    """
    assert totals.squares is not None
    metrics = totals.metrics(engine, batch, scale, over_layers)
    grads, norm = reduced(engine, sums_of, accumulators, totals.d_outer, totals.squares)
    return Gradients(metrics, grads, norm, totals.extended(progress, over_layers))
