"""Loops of a compiled step whose number of rounds is not in the program: how often they run.

Loops over tokens that are sent to experts run as often as if all experts were chosen evenly
(parallel/expert_dispatch.py, and `grouped.IN_PIECES`). The others depend on the stage of pipeline parallelism.

Such a loop is one thing of a tick, and runs once or not at all (step/pipeline.py). `with_rounds` has two answers:

* How often a stage runs it. On average over the ticks, a stage does each thing for every microbatch once; what moves
  activations runs in every tick in which any stage computes in that direction. A loop that belongs to some of the
  stages (their pattern, step/stage_layers.py) runs as often on average over the stages. Counts and bytes of a step
  follow from that.
* In lockstep: how often stages take the time of it. All of them go from tick to tick together, so a pass over a
  stage's layers takes its time in every tick in which any stage makes one: for m microbatches and p stages in m + p - 1
  ticks of each direction. Of stages with other kinds of layers, the one that attends to most counts. The time of a step
  follows from that, and is an estimate: a tick takes what its parts take one after another in a full stage, and no part
  of a tick overlaps the next tick.
"""

import math
import re
from fractions import Fraction

from surojax.assembly.assemble import Assembly
from surojax.models import grouped
from surojax.models.kinds.experts import choices_of
from surojax.models.model import Variant
from surojax.parallel import expert_dispatch
from surojax.parallel.schedule import SCHEDULES
from surojax.placement.mesh import CONTEXT, EXPERT, pipeline_stages
from surojax.planner import hlo, layer_sizes
from surojax.planner.traffic import BatchShape

SENT = re.compile(rf'op_name="[^"]*\b{expert_dispatch.SCOPE}\b')  # also in the name of a transposition
IN_PIECES = re.compile(rf'op_name="[^"]*\b{grouped.IN_PIECES}\b')
PASS = re.compile(r'op_name="[^"]*/(forward|backward)/')  # of the named scopes of step/engine.py
PATTERN = re.compile(r'op_name="[^"]*/pattern(\d+)/')  # of step/stage_layers.py


def slowest(run: Assembly) -> int:
    """The index of the pattern of stages whose layers attend to most positions, of layers without the recipe first."""

    def work(pattern: tuple[tuple[str, Variant], ...]) -> tuple[int, float]:
        plain = sum(not variant.recipe_enabled for _, variant in pattern)
        return plain, sum(variant.window or math.inf for _, variant in pattern)

    found = [work(pattern) for pattern in layer_sizes.patterns(run).patterns]
    return found.index(max(found))


def bubble(run: Assembly, microbatches: int) -> float:
    """The fraction of a step in which a stage idles, without embedding and head; 0 without stages."""
    return SCHEDULES[run.engine.pp_schedule](microbatches, pipeline_stages(run.mesh)).bubble()


def with_rounds(module: hlo.Module, run: Assembly, batch: BatchShape, *, lockstep: bool = False) -> hlo.Module:
    """The module of a step with the mean number of rounds of these loops; the module itself without any.

    lockstep: rounds of which stages take the time, see the second answer above.
    """
    stages = pipeline_stages(run.mesh)
    of_experts = _even_choices(run, batch) if run.mesh.shape.get(EXPERT, 1) > 1 else {}
    if stages == 1 and not of_experts:
        return module
    microbatches = batch.microbatches
    schedule = SCHEDULES[run.engine.pp_schedule](microbatches, stages)
    in_any = microbatches + stages - 1  # ticks in which any stage has a microbatch, in one direction
    of_stages = layer_sizes.patterns(run).of_stages

    def rounds(body: list[hlo.Instruction]) -> Fraction | None:
        """Counts the rounds of a loop over tokens of others, over layers, of a move of activations, or another one."""
        for scope, number in of_experts.items():
            if any(scope.search(i.attributes) for i in body):
                return Fraction(number)
        if stages == 1:
            return None
        if not any(PASS.search(i.attributes) for i in body):
            moves = any(i.opcode.startswith("collective-permute") for i in body)
            return Fraction(in_any if moves else microbatches, schedule.ticks)
        pattern = 0
        if len(set(of_stages)) > 1:
            pattern = next(int(found[1]) for i in body if (found := PATTERN.search(i.attributes)))
        if lockstep:
            return Fraction(in_any * (pattern == slowest(run)), schedule.ticks)
        share = Fraction(of_stages.count(pattern), stages)
        return share * Fraction(microbatches, schedule.ticks)

    return hlo.with_rounds(module, rounds)


def _even_choices(run: Assembly, batch: BatchShape) -> dict[re.Pattern[str], int]:
    """Rounds of the loops over tokens of other devices if all experts are chosen evenly, by the loops' scope."""
    n = run.mesh.shape[EXPERT]
    tokens = batch.tokens // run.mesh.shape.get(CONTEXT, 1) // run.model.compute.sequence_chunks
    experts, chosen = choices_of(next(segment for segment in run.model.segments if segment.statistics))
    return {
        SENT: expert_dispatch.even_rounds(experts, chosen, n, tokens),
        IN_PIECES: grouped.choice_pieces(tokens * chosen, experts // n),
    }
