"""Recomputation: the backward pass computes intermediate values from saved inputs, or is given some of them again."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

# For values that are cheap to compute again: only their inputs are saved for the backward pass. If a whole block is
# recomputed anyway, the compiler sees the operation twice in one loop body and keeps one (`prevent_cse=False` lets it).
save_inputs_only = functools.partial(jax.checkpoint, prevent_cse=False)


DECIDED = "decided"  # the `checkpoint_name` of values that are never computed again: they could come out otherwise


def recomputed(f: Callable, enabled: bool = True) -> Callable:
    """Wraps f, if enabled, so that its intermediate values are recomputed in the backward pass, but not its output.

    Values of the name `DECIDED` are saved.
    """
    policy = jax.checkpoint_policies.save_only_these_names(DECIDED)
    return jax.checkpoint(f, prevent_cse=False, policy=policy) if enabled else f


def with_arguments(pullback: Any, arguments: Mapping[int, Any]) -> Any:
    """Gives the pullback of `jax.vjp` the arguments that its `saveable_args` left out, and returns it.

    arguments: {position among the arguments of the function: the value that it was called with}. JAX has no public name
    for where they belong; tests/test_models.py has a test that fails with a version of it that has moved this.
    """
    pullback.args_res = [arguments.get(i, saved) for i, saved in enumerate(pullback.args_res)]
    return pullback
