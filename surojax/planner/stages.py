"""Stages of pipeline parallelism in a compiled step: how often the loops run whose rounds depend on the stage.

Such a loop is one thing of a tick, and runs once or not at all (step/pipeline.py). `with_rounds` has two answers:

* How often a stage runs it. On average over the ticks, a stage does each thing for every microbatch
  once; what moves activations runs in every tick in which any stage computes in that direction, and so do passes over
  layers with a ring. A loop that belongs to some of the stages (their pattern, step/stage_layers.py) runs as often on
  average over the stages. Counts and bytes of a step follow from that.
* In lockstep: how often stages take the time of it. All of them go from tick to tick together, so a pass over a
  stage's layers takes its time in every tick in which any stage makes one: for m microbatches and p stages in m + p - 1
  ticks of each direction. Of stages with other kinds of layers, the one that attends to most counts. The time of a step
  follows from that, and is an estimate: a tick takes what its parts take one after another in a full stage, and no part
  of a tick overlaps the next tick.
"""

import math
import re
from fractions import Fraction

from surojax.assembly import Assembly
from surojax.models.model import Variant
from surojax.parallel.schedule import SCHEDULES
from surojax.placement.mesh import pipeline_stages
from surojax.planner import hlo, sizes

PASS = re.compile(r'op_name="[^"]*/(forward|backward)/')  # of the named scopes of step/engine.py
PATTERN = re.compile(r'op_name="[^"]*/pattern(\d+)/')  # of step/stage_layers.py


def slowest(run: Assembly) -> int:
    """The index of the pattern of stages whose layers attend to most positions, of layers without the recipe first."""
    segment = run.model.segments[0]

    def work(pattern: tuple[Variant, ...]) -> tuple[int, float]:
        plain = sum(not variant.recipe_enabled for variant in pattern)
        return plain, sum(variant.window or math.inf for variant in pattern)

    found = [work(pattern) for pattern in sizes.patterns(run, segment).patterns]
    return found.index(max(found))


def bubble(run: Assembly, microbatches: int) -> float:
    """The fraction of a step in which a stage idles, without embedding and head; 0 without stages."""
    stages = pipeline_stages(run.mesh)
    return SCHEDULES[run.engine.pp_schedule](microbatches, stages).bubble() if stages > 1 else 0.0


def with_rounds(module: hlo.Module, run: Assembly, microbatches: int, *, lockstep: bool = False) -> hlo.Module:
    """The module of a step with the mean number of rounds of these loops; the module itself without stages.

    lockstep: rounds of which stages take the time, see the second answer above.
    """
    stages = pipeline_stages(run.mesh)
    if stages == 1:
        return module
    schedule = SCHEDULES[run.engine.pp_schedule](microbatches, stages)
    in_any = microbatches + stages - 1  # ticks in which any stage has a microbatch, in one direction
    of_stages = sizes.patterns(run, run.model.segments[0]).of_stages

    def rounds(body: list[hlo.Instruction]) -> Fraction:
        """Of a loop, by what its body does: a pass over a stage's layers, moving activations to another stage, else."""
        if not any(PASS.search(i.attributes) for i in body):
            moves = any(i.opcode.startswith("collective-permute") for i in body)
            return Fraction(in_any if moves else microbatches, schedule.ticks)
        pattern = 0
        if len(set(of_stages)) > 1:
            pattern = next(int(found[1]) for i in body if (found := PATTERN.search(i.attributes)))
        if lockstep:
            return Fraction(in_any * (pattern == slowest(run)), schedule.ticks)
        share = Fraction(of_stages.count(pattern), stages)
        return share * Fraction(sizes.layer_passes(run, microbatches), schedule.ticks)

    return hlo.with_rounds(module, rounds)
