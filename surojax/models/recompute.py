"""Recomputation: the backward pass computes intermediate values from saved inputs."""

import functools
from collections.abc import Callable

import jax

# For values that are cheap to compute again: only their inputs are saved for the backward pass. If a whole block is
# recomputed anyway, the compiler sees the operation twice in one loop body and keeps one (`prevent_cse=False` lets it).
save_inputs_only = functools.partial(jax.checkpoint, prevent_cse=False)


def recomputed(f: Callable, enabled: bool = True) -> Callable:
    """Wraps f, if enabled, so that its intermediate values are recomputed in the backward pass, but not its output."""
    return save_inputs_only(f) if enabled else f
