"""What a step reports beside its new state: loss, gradient norm, learning rate, and which devices had finite values.

Loss and norm are sums over all devices, so a NaN of one of them is a NaN for all. With `Engine.locates_nonfinite`, each
device also reports whether its own values were finite, seen where nothing is summed over data-parallel devices yet:
the activations after its last block, and the gradient of its embeddings, which a NaN in the gradient of any block's
output reaches. That reads two activations `[B, S, D]` a microbatch and communicates nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.parallel.collectives import varying
from surojax.placement.mesh import AXES
from surojax.placement.table import Mesh
from surojax.step.spec import Engine


class Finite(NamedTuple):
    """Flags of one device: its values were finite in all of the step so far; bool scalars.

    activations: after the last block. gradients: of the embeddings.
    """

    activations: jax.Array
    gradients: jax.Array


def all_finite(engine: Engine) -> Finite | None:
    """The flags at the start of a step: finite; None unless `Engine.locates_nonfinite`."""
    return Finite(*varying((jnp.bool(True), jnp.bool(True)), AXES)) if engine.locates_nonfinite else None


def and_activations(finite: Finite | None, xs_BSD: Sequence[jax.Array]) -> Finite | None:
    """Adds to the flags whether microbatches' outputs of the last block are finite."""
    return None if finite is None else finite._replace(activations=finite.activations & _all(xs_BSD))


def and_gradients(finite: Finite | None, dxs_BSD: Sequence[jax.Array]) -> Finite | None:
    """Adds to the flags whether microbatches' gradients of the first block's input are finite."""
    return None if finite is None else finite._replace(gradients=finite.gradients & _all(dxs_BSD))


def _all(xs_BSD: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.logical_and, [jnp.isfinite(x_BSD).all() for x_BSD in xs_BSD])


def metrics_of(gradients, lr: jax.Array) -> dict[str, Any]:
    """The metrics of a step, one device's part. found: its `engine.Gradients`."""
    metrics = {**gradients.means, "grad_norm": gradients.norm, "lr": lr}
    if gradients.auxiliary is not None:
        metrics["auxiliary_loss"] = gradients.auxiliary
    if gradients.statistics:
        metrics["statistics"] = gradients.statistics
    return metrics if gradients.finite is None else metrics | {"finite": jnp.stack(gradients.finite)[None]}


def plan_metrics(engine: Engine, mesh: Mesh) -> dict[str, Any]:
    """The plan of `metrics_of`: float32 scalars, statistics `[L, ...]` by segment, and finite: bool `[devices, 2]` with
    the fields of a `Finite`."""
    everywhere = jax.NamedSharding(mesh, jax.P())
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
    planned: dict[str, Any] = dict.fromkeys((*engine.sums, "grad_norm", "lr"), scalar)
    if engine.auxiliary:
        planned["auxiliary_loss"] = scalar
    statistics = {s.name: s for s in engine.model.segments if s.statistics is not None}
    if statistics:
        planned["statistics"] = {
            name: jax.tree.map(
                lambda x, s=s: jax.ShapeDtypeStruct((s.num_layers, *x.shape), x.dtype, sharding=everywhere),
                s.statistics,
            )
            for name, s in statistics.items()
        }
    if engine.locates_nonfinite:
        by_device = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
        planned["finite"] = jax.ShapeDtypeStruct((mesh.size, len(Finite._fields)), jnp.bool, sharding=by_device)
    return planned
