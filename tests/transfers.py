"""How transfers in the loops of a compiled program overlap with products, read from the order of its instructions."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping

import pytest

from surojax.planner import hlo, stages


@contextlib.contextmanager
def recorded() -> Iterator[list["Transfer"]]:
    """Collects the transfers of the programs that are planned meanwhile."""
    found: list[Transfer] = []
    plain = stages.with_rounds

    def recording(module, run, batch):
        module = plain(module, run, batch)
        found.extend(overlaps(module))
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "with_rounds", recording)
        yield found


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Host copies or collectives in the body of a loop that are alike in all of these fields but bytes."""

    loop: str  # name of the body
    times: int  # how often the body runs in a step
    products: int  # matrix products and attentions in the body
    kind: str  # "h2d", "d2h", "within", or the collective
    asynchronous: bool
    started: int  # products before the transfer starts
    waited: int  # products before an instruction waits for its end
    both_ways: bool  # overlaps with a host copy in the other direction
    count: int  # number of such transfers in the body
    bytes: int  # of all of them: copied, or operands of the collective


def overlaps(module: hlo.Module) -> list[Transfer]:
    """The transfers in each loop, read from the order of its instructions, in which the GPU runs them.

    The text must be of a scheduled module (`is_scheduled=true`): there an asynchronous transfer runs from its "-start"
    to its "-done" and overlaps with the instructions in between.
    """
    weight_by_transfer: dict[tuple, list[int]] = {}
    for i, times, _ in hlo.executed(module):
        if i.opcode == "while":
            body = hlo.called(i, "body")[0]
            for *what, size in _transfers(module, body):
                key = body, round(times * hlo.trips(i)), _products(module, body), *what
                totals = weight_by_transfer.setdefault(key, [0, 0])
                totals[0] += 1
                totals[1] += size
    return [Transfer(*key, *totals) for key, totals in weight_by_transfer.items()]


def _transfers(module: hlo.Module, body: str) -> Iterator[tuple]:
    """Yields (kind, asynchronous, started, waited, both_ways, bytes) of each transfer in a computation."""
    opposite = {"h2d": "d2h", "d2h": "h2d"}
    done = 0  # products so far
    running = {}  # (kind, started, both_ways, bytes) of transfers in flight, by the name of what started them
    for i in module[body].values():
        if i.opcode.endswith("-done") and i.operands[0] in running:
            kind, started, both, size = running.pop(i.operands[0])
            yield kind, True, started, done, both, size
        elif (transfer := _transfer(module, i, module[body])) is not None:
            kind, size = transfer
            if not i.opcode.endswith("-start"):
                yield kind, False, done, done, False, size
                continue
            others = [name for name, (other, *_) in running.items() if other == opposite.get(kind)]
            for name in others:
                running[name] = (*running[name][:2], True, running[name][3])
            running[i.name] = kind, done, bool(others), size
        done += _weight(module, i)


def _transfer(
    module: hlo.Module, i: hlo.Instruction, computation: Mapping[str, hlo.Instruction]
) -> tuple[str, int] | None:
    """(kind, bytes) of an instruction that is or starts a host copy or a collective; else None."""
    started = hlo.collective(module, i)
    if started is not None:
        return started.opcode.removesuffix("-start"), sum(a.bytes for a in hlo.operands(i, computation))
    return hlo.host_copy(i, computation)


def _products(module: hlo.Module, computation: str) -> int:
    """Matrix products and attentions in a computation."""
    return sum(_weight(module, i) for i in module[computation].values())


def _weight(module: hlo.Module, i: hlo.Instruction) -> int:
    """Counts matrix products and attentions that an instruction runs; for a loop, in all iterations."""
    if i.opcode == "while":
        return round(hlo.trips(i) * _products(module, hlo.called(i, "body")[0]))
    if i.opcode == "fusion" and "kind=kCustom" in i.attributes:  # a product that reads or writes a layer of a stack
        return _products(module, hlo.called(i, "calls")[0])
    return int(i.opcode == "custom-call" and re.search(r'custom_call_target="__cu(blas|dnn)', i.attributes) is not None)
