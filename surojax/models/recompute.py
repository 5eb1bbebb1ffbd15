"""Values that the backward pass computes again from their inputs."""

import functools
from collections.abc import Callable

import jax

# For values that are cheap to compute again: only their inputs are saved for the backward pass. If a whole block is
# recomputed anyway, the compiler sees the operation twice in one loop body and keeps one (`prevent_cse=False` lets it).
save_inputs_only = functools.partial(jax.checkpoint, prevent_cse=False)


def recomputed(f: Callable, enabled: bool = True) -> Callable:
    """f; the backward pass computes its values again from its inputs, if enabled, but not twice its result."""
    return save_inputs_only(f) if enabled else f
