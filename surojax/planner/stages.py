"""Stages of pipeline parallelism in a compiled step: how often the loops run whose rounds depend on the stage.

Such a loop is one thing of a tick, and runs once or not at all (step/pipeline.py). On average over the ticks, a stage
does each of them for every microbatch once; what moves activations runs in every tick in which any stage computes in
that direction. So counts and bytes of a step are right, and the order of ticks is not in the program: no time is
predicted.
"""

from collections.abc import Iterable
from fractions import Fraction

from surojax.assembly import Assembly
from surojax.parallel.schedule import SCHEDULES
from surojax.placement.mesh import pipeline_stages
from surojax.planner import hlo

NOT_PREDICTED = "pipeline parallelism, and what a stage does in a tick is known only when the program runs"


def with_rounds(module: hlo.Module, run: Assembly, microbatches: int) -> hlo.Module:
    """The module of a step with the mean number of rounds of these loops; the module itself without stages."""
    stages = pipeline_stages(run.mesh)
    if stages == 1:
        return module
    ticks = SCHEDULES[run.engine.pp_schedule](microbatches, stages).ticks

    def rounds(body: Iterable[hlo.Instruction]) -> Fraction:
        moves = any(i.opcode.startswith("collective-permute") for i in body)
        return Fraction(microbatches + stages - 1 if moves else microbatches, ticks)

    return hlo.with_rounds(module, rounds)
