"""Embedding and head with state in files: the host updates one piece of their rows after another.

A step's gradients are programs that never see this state. They update what else the outer layers have, and return the
gradients of the tables. Work weights and gradients of tables are in device memory.
"""

from collections.abc import Callable
from typing import Any

import jax

from surojax.memory.by_host import by_host
from surojax.memory.host import put, read, write_layer
from surojax.memory.in_file import InFiles
from surojax.optim.optimizer import UpdateContext
from surojax.placement.home import DEVICE, HOST
from surojax.placement.param import OUTER, part_of, with_part
from surojax.step.between import in_rounds
from surojax.step.several_programs import Program
from surojax.step.state import TensorState, section, tables_in_files
from surojax.step.step_parts import StepParts


def without_tables(outer: TensorState) -> TensorState:
    """Drops the master weights and moments of tables with state in files from the outer layers."""
    kept = {name: None for name in outer.master if name not in tables_in_files(outer)}
    return TensorState(outer.weights, part_of(outer.master, kept), part_of(outer.moments, kept))


def planned_gradients(step: StepParts) -> dict[str, jax.ShapeDtypeStruct]:
    """Plans the gradients of tables in files, by name."""
    names = tables_in_files(section(step.plan, OUTER))
    return part_of(step.planned_gradients[OUTER], dict.fromkeys(names)) if names else {}


class Tables:
    """Updates tables with state in files, one piece of their rows after another.

    state: of their (master weights, moments). pieces: their number; 0 if no table is in files. program: (work weights,
    state in memory, piece from files, gradients, scalars, k) -> (work weights, state in memory, its new values, k + 1).
    """

    def __init__(self, step: StepParts):
        self.step = step
        self.outer = section(step.plan, OUTER)
        self.names = dict.fromkeys(tables_in_files(self.outer))
        self.state = InFiles(self._of_tables(self.outer)[1:])
        self.pieces = self.state.stacks[0].layers if self.names else 0
        self.functions = {"tables": self._program()} if self.names else {}

    def updated(self, run: Callable, outer: TensorState, grads: dict, scalars: Any, zero: jax.Array) -> TensorState:
        """Updates the tables and returns the outer layers; grads are donated. Raises NvmeError.

        run: `SeveralPrograms.run`. zero: an int32 scalar.
        """
        if not self.pieces:
            return outer
        weights, *others = self._of_tables(outer)
        stacks = self.state.in_memory(tuple(others))
        number = zero

        def compute(k: int, piece: list[jax.Array]) -> list[jax.Array]:
            nonlocal weights, stacks, number
            weights, stacks, to_files, number = run("tables", weights, stacks, piece, grads, scalars, number)
            return to_files

        by_host(
            range(self.pieces),
            lambda k: self.state.read([k]),
            compute,
            lambda k, to_files: self.state.write([k], to_files),
        )
        for x in grads.values():  # a caller may hold the state that they are part of
            x.delete()
        new = self.state.joined(stacks, self.state.stacks)
        return TensorState(*(with_part(old, x) for old, x in zip(outer, (weights, *new), strict=True)))

    def programs(self, others: Any) -> list[Program]:
        """Plans the program, if there are tables in files. others: see `Program`."""
        early = self.state.planned_round(HOST) if self.pieces else ()
        numbers = self.pieces, (early, early, others), "embedding and head"
        files = self.state.round_read, self.state.round_written
        return [Program(function, self._arguments(), *numbers, *files) for function in self.functions.values()]

    def _of_tables(self, outer: TensorState) -> TensorState:
        return TensorState(*(part_of(tree, self.names) for tree in outer))

    def _arguments(self) -> tuple:
        weights, *others = self._of_tables(self.outer)
        in_memory, step = self.state.in_memory(tuple(others)), self.step
        planned = planned_gradients(step), step.planned_scalars(), step.plan.step
        return weights, in_memory, self.state.planned_round(HOST), *planned

    def _program(self):
        n = self.pieces

        def per_device(weights, in_memory, piece, grads, scalars, k):
            stacks = parts_of_rows(in_memory, n)
            old = self.state.joined(read(stacks, k), [x[0] for x in put(piece, DEVICE)])
            state, context = TensorState(weights, *old), UpdateContext(scalars, part=(k, n))
            new = self.step.update.layer(OUTER, state, read(parts_of_rows(grads, n), k), context)
            rows = {name: len(x) for name, x in new.master.items()}
            weights = {name: with_rows(weights[name], x, k, n, rows[name]) for name, x in new.weights.items()}
            others = tuple(new[1:])
            stacks = write_layer(stacks, self.state.in_memory(others), k)
            in_memory = [x.reshape(old.shape) for x, old in zip(stacks, in_memory, strict=True)]
            return weights, in_memory, put(in_rounds(self.state.files(others)), HOST), k + 1

        weights, in_memory, piece, *_ = arguments = self._arguments()
        results = weights, in_memory, piece, self.step.plan.step
        return self.step.program(per_device, arguments, results, batch=False, donated=(0, 1))


def parts_of_rows(tree: Any, n: int) -> Any:
    """Reshapes a device's tables `[rows, ...]` to stacks `[n, rows / n, ...]`."""
    return jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), tree)


def with_rows(table: jax.Array, new: jax.Array, k: jax.Array, n: int, rows: int) -> jax.Array:
    """Replaces part k of n of each shard's rows in a table by `new`. rows: in one part of a shard."""
    shards = table.reshape(-1, n, rows, *table.shape[1:])
    parts = new.reshape(-1, rows, *new.shape[1:])
    return jax.lax.dynamic_update_index_in_dim(shards, parts, k, 1).reshape(table.shape)
