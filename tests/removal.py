"""Removes collectives from a program while it is traced: each device then computes with its own values only.

A program is traced by Python code that binds JAX's primitives. Within `watching`, every collective that is bound is
shown to a function, which says whether it is left out (not those that are traced for their shapes only). In its place
comes what one device can compute alone, of the same shape:

| collective     | in its place                                              |
|----------------|-----------------------------------------------------------|
| psum, pmax     | the device's own term                                     |
| all-gather     | its own shard, as many times as there are devices         |
| reduce-scatter | its part of its own term                                  |
| all-to-all     | its own parts, joined as if they had come from the others |
| ppermute       | its own value                                             |

Types are those that JAX derives: a value that is not summed still varies over the mesh axes. So `check_vma=True`
refuses the program where only a sum would do.

A collective is known by its kind, its mesh axes and the lines that ask for it (`Collective`). JAX writes some itself:
reverse mode turns an all-gather into a reduce-scatter, and sums the gradient of a value that does not vary. They have
the lines of the forward computation, and are marked as `reverse`, so each can be taken out on its own.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax._src import source_info_util  # of reverse mode, the lines of the forward computation: not public
from jax._src.lax import parallel  # the primitive of a psum with an invariant result: not public

SOURCE = Path(__file__).parents[1]
PACKAGES = tuple(str(SOURCE / package) + "/" for package in ("surojax", "pallas_kernels"))
# Functions of JAX that bind the primitives of a traced program again; the collective is not called from where they are.
AGAIN = ("eval_jaxpr", "backward_pass")


class Collective(NamedTuple):
    """A collective of a program, identified by its source lines.

    lines: "file:line function" of the line that binds it, and of its callers: the first two outside of parallel/.
    reverse: reverse mode has made it.
    """

    kind: str
    axes: tuple[str, ...]
    lines: tuple[str, ...]
    reverse: bool

    def __str__(self) -> str:
        made = ", in reverse mode" if self.reverse else ""
        return f"{self.kind} over {' x '.join(self.axes)}{made}: {' < '.join(self.lines)}"


@contextlib.contextmanager
def watching(left_out: Callable[[Collective], bool]) -> Iterator[None]:
    """Calls a predicate with every collective traced in this context, and removes those for which it returns True.

    What JAX has traced before is traced again: its caches are empty at the beginning and the end.
    """

    def of(kind: str, primitive, alone: Callable):
        bind = primitive.bind

        def watched(*operands, **params):
            names = params["axis_name"] if "axis_name" in params else params["axes"]
            axes = names if isinstance(names, tuple) else (names,)
            stack = _stack()
            computed = not any(frame.function == "eval_shape" for frame in stack)
            if axes and computed and left_out(Collective(kind, axes, *_asked_for(stack))):
                own = [alone(x, axes, params) for x in operands]
                return own if primitive.multiple_results else own[0]
            return bind(*operands, **params)

        return watched

    with contextlib.ExitStack() as until_end:
        jax.clear_caches()
        until_end.callback(jax.clear_caches)
        for kind, primitives, alone in COLLECTIVES:
            for primitive in primitives:
                until_end.callback(vars(primitive).pop, "bind")
                primitive.bind = of(kind, primitive, alone)
        yield


class _Frame(NamedTuple):
    """A frame of the call stack."""

    file: str
    line: int
    function: str


def _asked_for(stack: list[_Frame]) -> tuple[tuple[str, ...], bool]:
    """Returns (`Collective.lines`, `Collective.reverse`) of the primitive bound by a stack, innermost call first."""
    inside = [frame.function for frame in itertools.takewhile(lambda frame: not _is_ours(frame), stack)]
    if any(name.startswith(AGAIN) for name in inside):
        traceback = source_info_util.current().traceback
        stack = [_Frame(f.file_name, f.line_num, f.function_name) for f in traceback.frames] if traceback else []
    return _lines([frame for frame in stack if _is_ours(frame)]), any("backward_pass" in name for name in inside)


def _stack() -> list[_Frame]:
    """Returns the frames of the call stack, innermost first."""
    frame = sys._getframe(1)
    stack = []
    while frame is not None:
        stack.append(_Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return stack


def _is_ours(frame: _Frame) -> bool:
    """Returns True if a frame is in this project, and not in this file."""
    return frame.file.startswith(PACKAGES) and frame.file != __file__


def _lines(calls: list[_Frame]) -> tuple[str, ...]:
    """Returns `Collective.lines` from the frames of this project, innermost first."""
    outside = [call for call in calls[1:] if "/parallel/" not in call.file][:2]
    return tuple(
        f"{c.file.removeprefix(f'{SOURCE}/').removeprefix('surojax/')}:{c.line} {c.function.rpartition('<locals>.')[2]}"
        for c in [*calls[:1], *outside]
    )


# -- What a device computes alone -------------------------------------------------------------------------------------


def _own(x: jax.Array, axes: tuple[str, ...], params: dict) -> jax.Array:
    """Replaces a reduction: returns the device's own value."""
    return x


def _own_shard_everywhere(x: jax.Array, axes: tuple[str, ...], params: dict) -> jax.Array:
    """Replaces an all-gather: returns the device's own shard in all places."""
    join = jnp.concatenate if params["tiled"] else jnp.stack
    return join([x] * jax.lax.axis_size(axes), axis=params["all_gather_dimension"])


def _own_part(x: jax.Array, axes: tuple[str, ...], params: dict) -> jax.Array:
    """Replaces a reduce-scatter: returns the device's part of its own term."""
    number = jax.lax.axis_index(axes)
    dim = params["scatter_dimension"]
    if not params["tiled"]:
        return jax.lax.dynamic_index_in_dim(x, number, dim, keepdims=False)
    length = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, number * length, length, dim)


def _own_parts(x: jax.Array, axes: tuple[str, ...], params: dict) -> jax.Array:
    """Replaces an all-to-all: returns the device's own parts, in the places of the received ones."""
    if not params["tiled"]:
        return jnp.moveaxis(x, params["split_axis"], params["concat_axis"])
    parts = jnp.split(x, jax.lax.axis_size(axes), params["split_axis"])
    return jnp.concatenate(parts, params["concat_axis"])


COLLECTIVES = (  # kind, its primitives, what comes in its place
    ("psum", (parallel.psum_p, parallel.psum_invariant_p), _own),
    ("pmax", (parallel.pmax_p,), _own),
    ("pmin", (parallel.pmin_p,), _own),
    ("all-gather", (parallel.all_gather_p, parallel.all_gather_invariant_p), _own_shard_everywhere),
    ("reduce-scatter", (parallel.reduce_scatter_p,), _own_part),
    ("all-to-all", (parallel.all_to_all_p,), _own_parts),
    ("ppermute", (parallel.ppermute_p,), _own),
)
