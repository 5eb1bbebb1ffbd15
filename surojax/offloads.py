"""Declares the fields that move a tensor class out of device memory, and what each class is.

`placement.table.Storage` has these fields. Refusals, `fit`, `--safe` and files select from `ROWS`, so that a class
stands here and in no other list.
"""

import dataclasses
from typing import Any, NamedTuple

from surojax.declared import AT_LEAST_0, Facts, declare, declared

FILES = "nvme"  # the value of these fields that means files


class Row(NamedTuple):
    """A row of the placement table, a tensor class, that a field moves out of device memory.

    what: the class in words. to_files: its place in the order in which classes go to files when memory is short; None:
    files do not store it. State is read and written once a step, and nothing waits for it but the update; residuals,
    which both passes wait for, come last. of_state: the class is of the state that a kill must not take, from which
    weights are made; with another class in files, a step has programs of one layer. to_device: its place in the order
    in which classes get room in device memory all the same (`device_memory`); None: it gets none.
    """

    name: str
    what: str
    to_files: int | None = None
    to_device: int | None = None
    of_state: bool = False


def _moves(*row: Any, **options: Any) -> Any:
    """Declares a field that moves a row. Arguments: those of `Row`."""
    return declare(False, words=(FILES,), facts=Facts.COST, row=Row(*row, **options))


@dataclasses.dataclass(frozen=True)
class Offloads:
    """Whether each tensor class is stored in device memory, in host memory or in files: fields of the config."""

    # residuals (saved for the backward pass) in pinned host memory; "nvme" = in a file in nvme_path
    offload_residual: bool | str = _moves("residuals", "residuals", to_files=4)
    # optimizer state in pinned host memory; "nvme" = in a file in nvme_path
    offload_optimizer: bool | str = _moves("moments", "optimizer state", to_files=0, to_device=1, of_state=True)
    # master weights in pinned host memory; "nvme" = in a file in nvme_path
    offload_master: bool | str = _moves("master", "master weights", to_files=1, to_device=0, of_state=True)
    # gradient accumulators of the blocks in host memory; several GPUs: needs shard_gradients; "nvme" = in a file
    offload_grads: bool | str = _moves("grads", "gradients", to_files=2, to_device=2)
    # block weights in host memory, "nvme" = in a file in nvme_path; two layers at a time are in device memory
    offload_weights: bool | str = _moves("weights", "weights", to_files=3)


@dataclasses.dataclass(frozen=True)
class OffloadOptions:
    """How much of what is offloaded is stored where: fields of the config that nothing reads if no class is."""

    # offload_weights: first layers (of each stage) whose weights stay in device memory
    resident_layers: int = declare(0, AT_LEAST_0, facts=Facts.COST)
    # folder on an NVMe disk for what is offloaded to "nvme"; one run at a time. Several on several disks, with commas
    # between them: files are striped over them
    nvme_path: str = declare("", facts=Facts.COST)
    # GiB of what is offloaded to "nvme" that each process keeps in host memory all the same
    files_in_memory: float = declare(0.0, AT_LEAST_0, facts=Facts.COST)
    # GiB of optimizer state, master weights and gradients that each GPU keeps, though they are offloaded to host memory
    # (with any class in "nvme": GiB of one layer's that come to the GPU a layer early)
    device_memory: float = declare(0.0, AT_LEAST_0, facts=Facts.COST)
    # 2: master weights and optimizer state in files twice, so that a kill costs one step; 1: goes on from a checkpoint
    nvme_slots: int = declare(1, choices=(1, 2), facts=Facts.COST)


ROWS: dict[str, Row] = {field.name: field.row for field in declared(Offloads)}  # by the field
FIELDS: dict[str, str] = {row.name: field for field, row in ROWS.items()}  # by the row


OPTIONS: dict[str, Any] = {field.name: field.default for field in declared(OffloadOptions)}  # their defaults


def _ordered(place: str) -> tuple[str, ...]:
    """Sorts the names of the rows that have a place in an order, a field of `Row`."""
    places = {row.name: getattr(row, place) for row in ROWS.values() if getattr(row, place) is not None}
    return tuple(sorted(places, key=lambda name: places[name]))


TO_FILES = _ordered("to_files")
TO_DEVICE = _ordered("to_device")
IN_SLOTS = tuple(name for name in TO_FILES if ROWS[FIELDS[name]].of_state)
BY_LAYER = tuple(name for name in TO_FILES if name not in IN_SLOTS)


def fields_of(rows: tuple[str, ...]) -> tuple[str, ...]:
    """The fields that move these rows."""
    return tuple(FIELDS[row] for row in rows)
