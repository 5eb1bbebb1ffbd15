"""Saved activations that a GPU's products write into the stacks themselves, without a copy.

What a layer saves usually has other readers, so XLA computes it apart and copies it into its stack. If a product's
result is written as soon as it is computed, and all its readers read the stack, XLA of 0.12 compiles the product and
the write to one call, in place. A barrier between them would undo it. What kernels make or read, and rotated queries
and keys, are not done so: XLA copies slices of a stack for kernels, and they wait for the copies, while copies into the
stacks run beside products (docs/performance.md).

Such products have another workspace and perhaps another algorithm. So with residuals on the device a step may have
other bits than with residuals in host memory. `xla_options="exact"` excludes that, and on CPUs nothing changes.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from pallas_kernels import dispatch
from surojax.memory.host import read, write_layer
from surojax.placement import cuda_plugin
from surojax.step.spec import EXACT, Engine


def saves_in_place(engine: Engine) -> bool:
    """True if layers write what they save while they compute.

    Blocks that are recomputed save only their input, which is there already. Beside weights that arrive from host
    memory or from other devices, or with their update, XLA hides less of the transfers (by 2.5 % of a step of 7B).
    """
    table = engine.table
    on_gpu = dispatch.target().platform == "gpu" and cuda_plugin.plugin_version() >= (0, 12)
    arrive = table.streams_weights or table.weights.sharded or engine.overlap_update
    apart = engine.recompute_block or table.residuals.home.streamed
    return on_gpu and not (arrive or apart) and engine.xla_options != EXACT


def run_in_place(f: Callable, arguments: tuple, stacks: Sequence[jax.Array], index: Any) -> tuple[Any, list[jax.Array]]:
    """Returns (results, stacks) of f(*arguments) -> (results, list of arrays): array i is in layer `index` of stack i.

    f is traced, and evaluated in pieces that end with products whose result is saved. What follows reads the stack.
    """
    closed, (results, _) = jax.make_jaxpr(f, return_shape=True)(*arguments)
    jaxpr, structure = closed.jaxpr, jax.tree.structure(results)
    saved = jaxpr.outvars[structure.num_leaves :]
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *jax.tree.leaves(arguments)), strict=True))
    stacks = list(stacks)
    pending = dict(enumerate(saved))

    products = {equation.outvars[0] for equation in jaxpr.eqns if equation.primitive.name == "dot_general"}

    def value(var) -> Any:
        return jnp.asarray(var.val) if isinstance(var, core.Literal) else values[var]

    def is_product(equation: core.JaxprEqn) -> bool:
        """True for a saved product, and for a saved sum of a product and the residual stream."""
        (var, *_), summed = equation.outvars, products & {*_variables(equation.invars)}
        return var in saved and (var in products or bool(equation.primitive.name == "add" and summed))

    ends = [n for n, equation in enumerate(jaxpr.eqns, 1) if is_product(equation)]
    for start, stop in itertools.pairwise([0, *ends, len(jaxpr.eqns)]):
        piece = jaxpr.eqns[start:stop]
        later = {*_variables(_read(jaxpr.eqns[stop:])), *_variables(jaxpr.outvars)}
        made = [var for equation in piece for var in equation.outvars if var in later]
        inputs = [var for var in dict.fromkeys(_variables(_read(piece))) if var in values]
        part = core.Jaxpr((), inputs, made, piece, jaxpr.effects, jaxpr.debug_info.with_unknown_names())
        run = core.jaxpr_as_fun(core.ClosedJaxpr(part, ()))  # pyright: ignore[reportPrivateImportUsage]
        values.update(zip(made, run(*(values[var] for var in inputs)), strict=True))
        if piece and is_product(piece[-1]):
            var = piece[-1].outvars[0]
            i = saved.index(var)
            stacks[i] = write_layer(stacks[i], values[var], index)
            values[var] = read(stacks[i], index)
            del pending[i]
    for i, var in pending.items():
        stacks[i] = write_layer(stacks[i], value(var), index)
    return structure.unflatten(value(var) for var in jaxpr.outvars[: structure.num_leaves]), stacks


def _read(equations: Iterable[core.JaxprEqn]) -> Iterable[Any]:
    """Yields what equations read."""
    return itertools.chain.from_iterable(equation.invars for equation in equations)


def _variables(atoms: Iterable[Any]) -> list[core.Var]:
    return [var for var in atoms if isinstance(var, core.Var)]
