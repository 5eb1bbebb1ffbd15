"""The quantities that a step adds up on each device besides the gradients of layers, and the metrics made of them.

`Totals` has a field for each quantity. Drivers carry them from layer to layer and from microbatch to microbatch
without reading them, so a further quantity is a field here: its zeros, where it grows (a layer's forward or backward
computation, see `LayerTotals`; the end of a forward or backward pass, see `after_forward`, `after_backward`), and its
metric.

Loss and norm are sums over all devices, so a NaN of one of them is a NaN for all. With `Engine.locates_nonfinite`, each
device also reports whether its own values were finite, seen where nothing is summed over data-parallel devices yet:
the activations after its last block, and the gradient of its embeddings, which a NaN in the gradient of any block's
output reaches. That reads two activations `[B, S, D]` a microbatch and communicates nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import read, write_layer
from surojax.models.model import Model, Routed, Segment
from surojax.numerics.fp8 import extended, new_observed
from surojax.objectives.objective import Sums
from surojax.parallel import collectives
from surojax.parallel.collectives import Squares, add_up, varying
from surojax.placement.mesh import AXES
from surojax.placement.table import Mesh
from surojax.step.batch import Batch
from surojax.step.gradients import add
from surojax.step.spec import Engine
from surojax.step.state import Progress

# Reduces per-layer arrays over the devices: (function of arrays of all layers, the arrays `[L, ...]` of this device's
# layers) -> the function's results for all layers of the model, on all devices.
type OverLayers = Callable[[Callable, Any], Any]


class Finite(NamedTuple):
    """Flags of one device: its values were finite in all of the step so far; bool scalars.

    activations: after the last block. gradients: of the embeddings.
    """

    activations: jax.Array
    gradients: jax.Array


class LayerTotals(NamedTuple):
    """Amounts that one layer adds to the `Totals`, in one microbatch or several; None: nothing.

    statistics: sums that its router counts. squares: `Squares` of its gradients. observed: largest magnitudes `[sites]`
    of its products.
    """

    statistics: Any = None
    squares: Squares | None = None
    observed: jax.Array | None = None

    @classmethod
    def of_forward(cls, routed: Routed | None) -> "LayerTotals":
        """Makes the totals of a block's forward computation. routed: its router's results."""
        return cls(statistics=None if routed is None else varying(routed.statistics, AXES))

    def plus(self, other: "LayerTotals") -> "LayerTotals":
        """Adds the totals of another microbatch."""
        return LayerTotals(
            _both(jnp.add, self.statistics, other.statistics),
            _both(jnp.add, self.squares, other.squares),
            _both(jnp.maximum, self.observed, other.observed),
        )


class Totals(NamedTuple):
    """Sums of a step so far on one device.

    d_outer: gradients of embedding and head. sums: of the objective. statistics: of routers, by segment `[L, ...]`.
    squares: `Squares` of the layers' gradients, complete after the last group; None: added up elsewhere. observed:
    largest magnitudes `[L, sites]`; None without delayed scales. finite: None unless
    `Engine.locates_nonfinite`.
    """

    d_outer: Any = None
    sums: Sums | None = None
    statistics: Any = None
    squares: Squares | None = None
    observed: jax.Array | None = None
    finite: Finite | None = None

    @classmethod
    def zeros(cls, engine: Engine, d_outer: Any = None) -> "Totals":
        """Makes the totals before the first microbatch."""
        model = engine.model
        observed = new_observed(model.num_layers, model.sites) if model.precision.delayed else None
        return cls(
            d_outer=d_outer,
            sums=varying({name: jnp.float32(0) for name in engine.sums}, AXES),
            statistics=varying(zero_statistics(engine.model), AXES),
            squares=collectives.no_squares(),
            observed=varying(observed, AXES),
            finite=Finite(*varying((jnp.bool(True), jnp.bool(True)), AXES)) if engine.locates_nonfinite else None,
        )

    def only(self, fields: Sequence[str]) -> "Totals":
        """Copies these fields; the others are None."""
        return Totals(**{name: getattr(self, name) for name in fields})

    def without(self, fields: Sequence[str]) -> "Totals":
        """Copies all fields but these, which are None."""
        return self._replace(**dict.fromkeys(fields))

    def updated(self, part: "Totals") -> "Totals":
        """Replaces the fields that `part` has."""
        return self._replace(**{name: value for name, value in part._asdict().items() if value is not None})

    def plus(self, layer: LayerTotals, segment: str, index: Any, number: Any) -> "Totals":
        """Adds what a layer adds. segment: its name. index, number: of the layer in its segment, and in the model."""
        totals = self
        if layer.statistics is not None:
            stacks = self.statistics[segment]
            sums = jax.tree.map(jnp.add, read(stacks, index), layer.statistics)
            totals = totals._replace(statistics=self.statistics | {segment: write_layer(stacks, sums, index)})
        if layer.squares is not None and self.squares is not None:
            totals = totals._replace(squares=add(self.squares, layer.squares))
        if layer.observed is not None and self.observed is not None:
            totals = totals._replace(observed=self.observed.at[number].max(layer.observed))
        return totals

    def after_forward(self, xs_BSD: Sequence[jax.Array]) -> "Totals":
        """Updates the flags from microbatches' outputs of this device's last block."""
        if self.finite is None:
            return self
        activations = self.finite.activations & _are_finite(xs_BSD)
        return self._replace(finite=self.finite._replace(activations=activations))

    def after_backward(self, dxs_BSD: Sequence[jax.Array]) -> "Totals":
        """Updates the flags from microbatches' gradients of the input of this device's first block."""
        if self.finite is None:
            return self
        gradients = self.finite.gradients & _are_finite(dxs_BSD)
        return self._replace(finite=self.finite._replace(gradients=gradients))

    def metrics(self, engine: Engine, batch: Batch, scale: jax.Array, over_layers: OverLayers) -> dict[str, Any]:
        """Computes the metrics of a complete step, see `plan_metrics`, but for gradient norm and learning rate.

        scale: of the loss, 1 / the number of the objective's terms.
        """
        metrics: dict[str, Any] = {name: add_up(x, *AXES) * scale for name, x in (self.sums or {}).items()}
        statistics = over_layers(sum_of_devices, self.statistics)
        if engine.auxiliary:
            metrics["auxiliary_loss"] = auxiliary_loss(engine, statistics, batch)[0]
        if statistics:
            metrics["statistics"] = statistics
        return metrics if self.finite is None else metrics | {"finite": jnp.stack(self.finite)[None]}

    def extended(self, progress: Progress, over_layers: OverLayers) -> Progress:
        """Adds the largest magnitudes of a complete step, of all devices, to the history."""
        newest = over_layers(collectives.largest_of_devices, self.observed)
        return progress._replace(history=extended(progress.history, newest))


# The fields that layers change: a pass over layers carries these, and the others are None in it.
FORWARD = ("statistics",)
BACKWARD = ("squares", "observed")


def _both(combine: Callable, old: Any, new: Any) -> Any:
    """Combines two trees, or returns the one that is not None."""
    if old is None or new is None:
        return new if old is None else old
    return jax.tree.map(combine, old, new)


def _are_finite(xs_BSD: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.logical_and, [jnp.isfinite(x_BSD).all() for x_BSD in xs_BSD])


def zero_statistics(model: Model) -> dict[str, Any]:
    """Zeros `[L, ...]` for the statistics of each segment that has them."""

    def zeros(segment: Segment):
        return jax.tree.map(lambda x: jnp.zeros((segment.num_layers, *x.shape), x.dtype), segment.statistics)

    return {segment.name: zeros(segment) for segment in model.segments if segment.statistics is not None}


def sum_of_devices(tree: Any) -> Any:
    """Sums over all devices."""
    return add_up(tree, *AXES)


def of_whole_model(reduce: Callable, stacks: Any) -> Any:
    """`OverLayers` of devices that compute all layers."""
    return reduce(stacks)


def auxiliary_loss(engine: Engine, statistics: dict[str, Any], batch: Batch) -> tuple[jax.Array, dict[str, Any]]:
    """Returns (the auxiliary loss of a step, its gradients). statistics: `[L, ...]` by segment, of all tokens."""
    assert engine.auxiliary is not None
    return jax.value_and_grad(engine.auxiliary)(statistics, batch.terms())


def plan_metrics(engine: Engine, mesh: Mesh) -> dict[str, Any]:
    """Plans a step's metrics: float32 scalars, statistics `[L, ...]` by segment, and finite: bool `[devices, 2]`
    with the fields of a `Finite`."""
    everywhere = jax.NamedSharding(mesh, jax.P())
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
    planned: dict[str, Any] = dict.fromkeys((*engine.sums, "grad_norm", "lr"), scalar)
    if engine.auxiliary:
        planned["auxiliary_loss"] = scalar
    statistics = jax.eval_shape(lambda: zero_statistics(engine.model))
    if statistics:
        planned["statistics"] = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), statistics
        )
    if engine.locates_nonfinite:
        by_device = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
        planned["finite"] = jax.ShapeDtypeStruct((mesh.size, len(Finite._fields)), jnp.bool, sharding=by_device)
    return planned
