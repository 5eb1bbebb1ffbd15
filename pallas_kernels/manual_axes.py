"""Types of arrays inside `jax.shard_map(check_vma=True)`: the mesh axes over which the devices' values may differ.

Reverse mode sums gradients over an axis if a value does not vary over it and its gradient does. So these types, not
the values, decide where sums over devices are made.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def varying_axes(x) -> frozenset[str]:
    """The mesh axes that x varies over."""
    return getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", None) or frozenset()


def mark_varying(x: jax.Array, axes) -> jax.Array:
    """x, typed as varying over these mesh axes too. Reverse mode sums its gradient over the added ones."""
    missing = tuple(sorted(frozenset(axes) - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def own_zeros(shape: tuple[int, ...], dtype, after, axes) -> jax.Array:
    """Zeros for a loop to fill, typed as varying over these mesh axes, which no other loop begins with.

    XLA makes one array of all equal constants. Loops that begin with it copy it, and it stays in memory beside them.
    after: arrays that differ from loop to loop.
    """
    zero, _ = jax.lax.optimization_barrier((jnp.zeros((), dtype), after))
    return mark_varying(jnp.broadcast_to(zero, shape), axes)


def mark_same(x: jax.Array, axes) -> jax.Array:
    """x, typed as equal on all devices of these mesh axes, which the caller guarantees: the opposite of `mark_varying`.

    Nothing is communicated.
    """
    marked = frozenset(axes) & varying_axes(x)
    return _same.bind(x, axes=marked) if marked else x


def _type_of_same(x, *, axes: frozenset[str]):
    return x.update(manual_axis_type=jax.sharding.ManualAxisType(varying=x.manual_axis_type.varying - axes))


_same = Primitive("same")
_same.def_abstract_eval(_type_of_same)
batching.defvectorized(_same)
mlir.register_lowering(_same, lambda context, x, *, axes: [x])
