"""Checks a caller's objective and block by the shapes and dtypes of their results, before anything is compiled.

They are traced abstractly (`jax.eval_shape`) for a few tokens, on one device, as recipe bf16 by XLA. Shape suffixes: N
tokens, V vocabulary, D hidden size.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from surojax.errors import ConfigError
from surojax.models.model import Compute, Model
from surojax.objectives.objective import LABELS, LossOfLogits
from surojax.placement.param import OUTER

ROWS, TOKENS = 2, 32  # of the microbatch that is traced; other numbers than a model's sizes
LOSSES = "losses [N], one for each of the N tokens"
MEMBERS = ("targets", "counted", "count", "loss_and_gradients", "loss")  # of an `Objective`
RETURNED = "(output, cache, routed), as Block.__call__ returns, of what JAX can trace"
TRACEABLE = "a function that JAX can trace"
WRAP = "LossOfLogits(function), or an object with the members of surojax.Objective"


def check_members(objective: Any) -> None:
    """Raises ConfigError if a caller's objective is none."""
    lacks = [name for name in MEMBERS if not hasattr(objective, name)]
    if lacks:
        got = (
            f"a function, {name_or_type(objective)}; wrap it"
            if inspect.isfunction(objective)
            else f"{name_or_type(objective)}, "
        )
        got += "" if inspect.isfunction(objective) else f"which has no {lacks[0]}; pass one"
        raise ConfigError(f"objective: expected {WRAP}, got {got}")


def check_objective(objective: Any, model: Model, dtype: str, *, is_sharded: bool) -> None:
    """Raises ConfigError if the results of a caller's objective have other shapes or dtypes than expected.

    dtype: of work weights. is_sharded: the vocabulary is, over axes that only the run's devices have.
    """
    whole = model.rebuild(Compute(attention="xla"))
    labels_N = jax.ShapeDtypeStruct((TOKENS - 1,), jnp.int32)
    targets = {LABELS: labels_N}
    if isinstance(objective, LossOfLogits):
        if not callable(objective.of_tokens):
            raise ConfigError(f"objective: expected a function in LossOfLogits, got {objective.of_tokens!r}; pass one")
        logits_NV = jax.ShapeDtypeStruct((*labels_N.shape, whole.vocab_size), jnp.float32)
        losses = _traced("objective", objective.of_tokens, logits_NV, labels_N)
        given = "of logits [N, V] and labels [N]"
        if getattr(losses, "shape", None) != labels_N.shape or not jnp.issubdtype(losses.dtype, jnp.floating):
            change = "return each token's loss, not their mean or sum"
            raise ConfigError(f"objective: expected {LOSSES}, {given}, got {described(losses, TOKENS - 1)}; {change}")
        return
    _expect("objective.counted", _traced("objective.counted", objective.counted, targets), labels_N.update(dtype=bool))
    _expect("objective.count", _traced("objective.count", objective.count, targets), _scalar(jnp.int32))
    if is_sharded:
        return
    outer = whole.abstract_params(dtype)[OUTER]
    used = {name: outer[name] for name in whole.head_uses}
    x_ND = jax.ShapeDtypeStruct((*labels_N.shape, whole.hidden_size), dtype)
    loss = _traced("objective.loss", lambda *arrays: objective.loss(whole, *arrays, ()), outer, x_ND, targets)
    _expect("objective.loss", loss, _scalar(None))

    def gradients(used, x_ND, targets, scale):
        return objective.loss_and_gradients(whole, used, tuple(used), x_ND, targets, scale, ())

    name = "objective.loss_and_gradients"
    _expect(name, _traced(name, gradients, used, x_ND, targets, _scalar(jnp.float32)), (_scalar(None), used, x_ND))


def check_block(block: type, model: Model, dtype: str) -> None:
    """Raises ConfigError if a caller's block returns another shape or dtype than its input's. dtype: of weights."""
    whole = model.rebuild(Compute(attention="xla"))
    params = whole.abstract_params(dtype)
    name = f"block: {block.__name__}.__call__"
    x_BSD = jax.ShapeDtypeStruct((ROWS, TOKENS, whole.channels.all), dtype)
    for segment in whole.segments:
        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params[segment.name])

        def apply(weights, x_BSD, segment=segment):
            return segment.block(weights, x_BSD, None, segment.variants[0])

        x, routed = _traced(name, apply, layer, x_BSD, expected=RETURNED)
        _expect(name, x, x_BSD)
        if (segment.statistics is None) != (routed is None):
            expected = "None without experts" if segment.statistics is None else "what mlp() returned"
            raise ConfigError(f"{name}: expected {expected} as its third result, got another; return it")


def build_block(block: type, build: Callable[[], Model]) -> Model:
    """Builds the model of a caller's block. Raises ConfigError if its `__init__` fails."""
    try:
        return build()
    except ConfigError:
        raise
    except Exception as error:
        raise _failed(f"block: {block.__name__}.__init__", error, "(config, *, rngs), as Block.__init__") from error


def name_or_type(value: Any) -> str:
    """Returns the name of a function or class, or the type of another value, for a message."""
    return getattr(value, "__name__", type(value).__name__)


def described(value: Any, tokens: int = 0) -> str:
    """Describes arrays by dtype and shape, in which a length of `tokens` is N: "float32 [N, 8]"."""
    if not hasattr(value, "shape"):
        leaves = jax.tree.leaves(value)
        return f"{type(value).__name__} of {', '.join(described(x, tokens) for x in leaves)}" if leaves else repr(value)
    sizes = ("N" if tokens and size == tokens else str(size) for size in value.shape)
    return f"{value.dtype} [{', '.join(sizes)}]"


def _scalar(dtype) -> jax.ShapeDtypeStruct:
    """A planned scalar; any float if `dtype` is None."""
    return jax.ShapeDtypeStruct((), dtype or jnp.float32)


def _traced(name: str, f: Callable, *arrays: Any, expected: str = TRACEABLE) -> Any:
    try:
        return jax.eval_shape(f, *arrays)
    except ConfigError:
        raise
    except Exception as error:  # of whatever the caller wrote
        raise _failed(name, error, expected) from error


def _failed(name: str, error: Exception, expected: str = TRACEABLE) -> ConfigError:
    reason = " ".join(str(error).split())[:300]
    return ConfigError(f"{name}: expected {expected}, got {type(error).__name__} ({reason}); mend it")


def _expect(name: str, got: Any, expected: Any) -> None:
    """Raises ConfigError unless two trees of planned arrays have equal structures, shapes and kinds of dtypes."""
    leaves = jax.tree.leaves(expected)
    same = jax.tree.structure(got) == jax.tree.structure(expected)
    if same and all(_alike(x, y) for x, y in zip(jax.tree.leaves(got), leaves, strict=True)):
        return
    raise ConfigError(
        f"{name}: expected {described(expected, TOKENS - 1)}, got {described(got, TOKENS - 1)}; return that"
    )


def _alike(got: Any, expected: Any) -> bool:
    floats = jnp.issubdtype(got.dtype, jnp.floating) and jnp.issubdtype(expected.dtype, jnp.floating)
    is_scalar = expected.shape == () and floats
    return got.shape == expected.shape and (got.dtype == expected.dtype or is_scalar)
