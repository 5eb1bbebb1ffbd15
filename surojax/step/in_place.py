"""On GPUs, matrix products write saved activations into the stacks `[L, ...]` themselves, without a copy.

A saved activation usually has other readers, so XLA computes it into a buffer and copies it into its stack. If it is
written into the stack as soon as it is computed, and its readers read the stack, XLA 0.12 compiles the product and the
write to one call. An optimization barrier between the two would prevent this. Other saved activations are copied as
before, among them attention's queries, keys, values and output: a custom call gets a copy of a stack's slice and waits
for it, while copies into stacks run beside products (docs/performance.md).

Products that write into stacks may have another algorithm. So residuals on the device and residuals in host memory may
give different bits. `xla_options="exact"` therefore copies all saved activations, and so do CPUs.
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
    """True if products write saved activations into the stacks.

    A recomputed block saves only its input. If weights arrive from host memory, XLA would hide less of the transfers
    (2.5 % of a step of 7B); weights from other devices, and weights updated in the forward pass, are excluded likewise.
    """
    table = engine.table
    on_gpu = dispatch.target().platform == "gpu" and cuda_plugin.plugin_version() >= (0, 12)
    arrive = table.streams_weights or table.weights.sharded or engine.overlap_update
    apart = engine.recompute_block or table.residuals.home.streamed
    return on_gpu and not (arrive or apart) and engine.xla_options != EXACT


def run_in_place(f: Callable, arguments: tuple, stacks: Sequence[jax.Array], index: Any) -> tuple[Any, list[jax.Array]]:
    """Calls f(*arguments) -> (results, saved arrays); returns (results, stacks with saved array i in stack i).

    stacks: `[L, ...]`, one for each saved array, which becomes layer `index`. f is traced to a jaxpr and evaluated in
    pieces. Each piece ends with a product whose result is saved; later pieces read that result from its stack.
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
        result = equation.outvars[0]
        adds_product = equation.primitive.name == "add" and not products.isdisjoint(_variables(equation.invars))
        return result in saved and (result in products or adds_product)

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
    """Yields the variables and constants that equations read."""
    return itertools.chain.from_iterable(equation.invars for equation in equations)


def _variables(atoms: Iterable[Any]) -> list[core.Var]:
    return [var for var in atoms if isinstance(var, core.Var)]
