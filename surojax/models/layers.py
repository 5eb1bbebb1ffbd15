"""Parameters of Flax modules, with their declarations; matrices with what is added to their products.

A module (models/kinds) holds sizes and weights, and says once what is computed with them; an `Operations` says how.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from surojax.models.linear import Product
from surojax.models.operations import Projection
from surojax.placement.param import Kind


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    initializer,
    kind: Kind = Kind.MATRIX,
    product: Product | None = None,
    **declared: Any,
) -> nnx.Param:
    """Makes a float32 parameter that declares its logical axes, its kind, and the matrix product that reads it.

    product: None if no product with a recipe's numbers does. declared: other fields of its `Param`, which
    `model.collect_params` makes. Everything else follows from axes and kind.
    """
    named = nnx.with_partitioning(initializer, axes, eager_sharding=False)
    return nnx.Param(named(rngs.params(), shape, jnp.float32), kind=kind, product=product, declared=declared)


def vector(rngs: nnx.Rngs, size: int, axis: str, initializer) -> nnx.Param:
    """Makes the parameter `[size]` of a bias or a norm."""
    return parameter(rngs, (size,), (axis,), initializer, Kind.VECTOR)


def norm_weight(rngs: nnx.Rngs, plus_one: bool, size: int, axis: str) -> nnx.Param:
    """Makes the weight `[size]` of an RMSNorm whose initial scale is 1. plus_one: it multiplies by 1 + the weight."""
    initial = nnx.initializers.zeros if plus_one else nnx.initializers.ones
    return vector(rngs, size, axis, initial)


ADAPTER = "_lora"  # appended to the name of a matrix: the name of its adapter (lora.py) in the same module


def projection(module: nnx.Module, weight: str, bias: str = "") -> Projection:
    """Collects a module's matrix, bias and adapter as a `Projection`; None for a bias or adapter that is missing."""
    adapter = getattr(module, weight + ADAPTER, None)
    return Projection(getattr(module, weight), getattr(module, bias, None), adapter)
