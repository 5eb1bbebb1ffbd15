"""Stages of pipeline parallelism in a compiled step: how often the loops run whose rounds depend on the stage.

Such a loop is one thing of a tick, and runs once or not at all (step/pipeline.py). There are two answers:

* `with_rounds`: how often a stage runs it. On average over the ticks, a stage does each thing for every microbatch
  once; what moves activations runs in every tick in which any stage computes in that direction. Counts and bytes of a
  step follow from that.
* `in_lockstep`: how often stages take the time of it. All of them go from tick to tick together, so a pass over a
  stage's layers takes its time in every tick in which any stage makes one: for m microbatches and p stages in m + p - 1
  ticks of each direction. The time of a step follows from that, and is an estimate: a tick takes what its parts take
  one after another in a full stage, and no part of a tick overlaps the next tick.
"""

import re
from collections.abc import Callable, Iterable
from fractions import Fraction

from surojax.assembly import Assembly
from surojax.parallel.schedule import SCHEDULES
from surojax.placement.mesh import pipeline_stages
from surojax.planner import hlo

PASS = re.compile(r'op_name="[^"]*/(forward|backward)/')  # of the named scopes of step/engine.py


def with_rounds(module: hlo.Module, run: Assembly, microbatches: int) -> hlo.Module:
    """The module of a step with the mean number of rounds of these loops; the module itself without stages."""
    return _with_rounds(module, run, microbatches, _moves)


def in_lockstep(module: hlo.Module, run: Assembly, microbatches: int) -> hlo.Module:
    """The module of a step with the mean number of rounds in a tick of which stages take the time."""
    return _with_rounds(module, run, microbatches, lambda body: _moves(body) or _passes(body))


def bubble(run: Assembly, microbatches: int) -> float:
    """The fraction of a step in which a stage idles, without embedding and head; 0 without stages."""
    stages = pipeline_stages(run.mesh)
    return SCHEDULES[run.engine.pp_schedule](microbatches, stages).bubble() if stages > 1 else 0.0


def _moves(body: Iterable[hlo.Instruction]) -> bool:
    """Whether a loop's body moves activations to another stage."""
    return any(i.opcode.startswith("collective-permute") for i in body)


def _passes(body: Iterable[hlo.Instruction]) -> bool:
    """Whether a loop's body is a pass over a stage's layers."""
    return any(PASS.search(i.attributes) for i in body)


def _with_rounds(
    module: hlo.Module, run: Assembly, microbatches: int, in_every_tick: Callable[[Iterable[hlo.Instruction]], bool]
) -> hlo.Module:
    """in_every_tick: whether a loop runs in all ticks in which any stage has a microbatch in its direction."""
    stages = pipeline_stages(run.mesh)
    if stages == 1:
        return module
    ticks = SCHEDULES[run.engine.pp_schedule](microbatches, stages).ticks

    def rounds(body: Iterable[hlo.Instruction]) -> Fraction:
        of_ticks = microbatches + stages - 1 if in_every_tick(body) else microbatches
        return Fraction(of_ticks, ticks)

    return hlo.with_rounds(module, rounds)
