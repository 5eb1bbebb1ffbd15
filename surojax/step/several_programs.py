"""Steps and evaluations of several programs, which the host runs one after another."""

import copy
from collections import Counter
from collections.abc import Hashable
from typing import Any, NamedTuple, Self

import jax

from surojax.placement.table import Mesh

NO_BYTES = Counter[str]()


class Program(NamedTuple):
    """One of the programs that make up a step.

    function: jitted. arguments: planned arrays. times: number of runs in a step. others: planned state that is in
    memory while the program runs but is no argument or result of it, and layers on their way to and from files.
    name: of the pass that it is one layer of; "" if it runs by itself. read, written: bytes of files that are read for
    it, and written from it, of all devices together, by row of the placement table. put: planned rounds that the host
    puts on the device for it.
    """

    function: Any
    arguments: tuple
    times: int
    others: Any = ()
    name: str = ""
    read: Counter[str] = NO_BYTES
    written: Counter[str] = NO_BYTES
    put: Any = ()


class SeveralPrograms:
    """Base class of a step of several programs, which is lowered and compiled like one jitted function.

    functions: the programs by name, in the order in which they first run. A subclass puts jitted functions there; those
    of the copies that `lower` and `compile` return are lowered and compiled. plan: of the first argument of a call.
    """

    def __init__(self, mesh: Mesh, plan: Any):
        self.mesh = mesh
        self.plan = plan
        self.functions: dict[Any, Any] = {}
        self._planned: list[Program] = []  # `programs`, once lowered

    def programs(self, *batch: jax.ShapeDtypeStruct) -> list[Program]:
        """Plans the arguments of all programs, in the order of `functions`."""
        raise NotImplementedError

    def run(self, name: Hashable, *arguments: Any) -> Any:
        """Runs a program. On virtual CPU devices it waits for the results, since collectives in flight can block."""
        results = self.functions[name](*arguments)
        if jax.default_backend() == "cpu" and self.mesh.size > 1:
            jax.block_until_ready(results)
        return results

    def lower(self, plan: Any, *batch: jax.ShapeDtypeStruct) -> Self:
        """Returns a copy with all programs lowered. plan: the one that this was made from."""
        assert jax.tree.structure(plan) == jax.tree.structure(self.plan), "a step is lowered for its own plan"
        planned = self.programs(*batch)
        lowered = self._with([x.function.lower(*x.arguments) for x in planned])
        lowered._planned = planned
        return lowered

    def compile(self, compiler_options=None) -> Self:
        """Returns a copy with the lowered programs compiled."""
        return self._with([x.compile(compiler_options) for x in self.functions.values()])

    def compiled_programs(self) -> list[Program]:
        """All programs of a lowered and compiled step, with planned arrays as arguments."""
        functions = self.functions.values()
        return [x._replace(function=function) for x, function in zip(self._planned, functions, strict=True)]

    def memory_analysis(self) -> Any:
        """None, because several programs have no single answer: ask each of `compiled_programs`."""

    def _with(self, functions: list) -> Self:
        new = copy.copy(self)
        new.functions = dict(zip(self.functions, functions, strict=True))
        return new
