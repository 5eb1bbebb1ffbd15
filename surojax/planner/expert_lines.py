"""Lines about a model's experts: what multiplies them, and whether gathering them sends less than sending tokens."""

import math

from surojax.assembly.assemble import Assembly
from surojax.config.fields import Config
from surojax.errors import ConfigError
from surojax.models.kinds.experts import choices_of
from surojax.placement.mesh import EXPERT, SHARD
from surojax.planner import choices, layer_sizes
from surojax.planner.amounts import gib
from surojax.planner.changes import changed
from surojax.planner.footprint import assembly
from surojax.planner.gpus import Gpu
from surojax.planner.step_collectives import collective_bytes
from surojax.planner.traffic import batch_of


def lines(c: Config, run: Assembly, gpu: Gpu) -> list[str]:
    """Lines about experts in a plan; none without experts. c: from `run_plan.checked`. run: the assembly of c."""
    return [line for line in (multiplied(run), gathered_or_sent(c, run, gpu)) if line]


def multiplied(run: Assembly, *, served: bool = True) -> str:
    """Returns a line on whether a kernel or a scan multiplies the experts; "" if no kernel was asked for.

    served: whether the GPU is one that the kernel is for.
    """
    if run.model.precision.kernels == "xla":
        return ""
    for segment in run.model.segments:
        for t in layer_sizes.blocks(run, segment):
            if t.param.of_experts and t.is_matrix:
                enabled = any(variant.recipe_enabled for variant in segment.variants)
                reason = layer_sizes.experts_by_loop(run, segment, t, enabled)
                reason = reason or ("" if served else "this GPU is none that the kernel is for")
                how = f"a scan over blocks, whatever `kernels` says: {reason}" if reason else "the grouped kernel"
                return f"experts: multiplied by {how}"
    return ""


def gathered_or_sent(c: Config, run: Assembly, gpu: Gpu) -> str:
    """A line with the bytes that each GPU sends if experts are gathered and if tokens are sent to them.

    "" if GPUs do not divide experts, or `ep_size` is refused. Sending grows with the tokens of a fetch, gathering does
    not: 3 E I D numbers are moved three times for a fetch, and five activations for each token and GPU that it goes to.
    """
    if not c.model.num_experts or run.mesh.size == 1:
        return ""
    shards = math.prod(run.mesh.shape.get(axis, 1) for axis in (SHARD, EXPERT))
    n = max(choices.expert_groups(c, gpu, choices.own_layout(c), shards), default=1)
    n = c.ep_size if c.ep_size > 1 else n
    if n == 1:
        return ""
    try:
        runs = [assembly(changed(c, {"ep_size": size})) for size in (1, n)]
    except ConfigError:
        return ""
    gathering, sending = (sum(collective_bytes(x, batch_of(c)).values()) for x in runs)
    experts, chosen = choices_of(next(segment for segment in run.model.segments if segment.statistics))
    width = c.model.moe_intermediate_size or c.model.intermediate_size
    least = 1.8 * experts * width / (n * (1 - (1 - 1 / n) ** chosen))
    less = "gathering" if gathering <= sending else "sending"
    return (
        f"experts: each GPU sends {gib(gathering)} a step with ep_size=1, which gathers them, and {gib(sending)} with "
        f"ep_size={n}, which sends tokens to them: {less} is less; with sharded weights gathering is from about "
        f"{least:,.0f} tokens of a GPU for each fetch on"
    )
