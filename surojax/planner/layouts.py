"""Ways to divide the work of a step over GPUs that a search tries: the sizes of the mesh's axes.

A *group* is the `tp_size x cp_size x pp_size` GPUs that share sequences. `layouts` has the groups to try, `meshes` the
ways in which the groups share state. The effective batch stays: a larger group has the sequences of all its GPUs.

An axis is left out, with the reason, where it can only cost: `cp_size` divides the activations of long sequences,
`pp_size` needs several microbatches, and `tp_size` sends in every layer, so its groups stay within a machine.
"""

import itertools
import math
from collections.abc import Collection

from surojax.config.fields import Config, default_config, gpus_per_sequence, tokens_of_piece
from surojax.planner.advice import LONG_SEQUENCE, Change
from surojax.planner.gpus import Gpu

AXES = ("tp_size", "cp_size", "pp_size")
MOST_STAGES = 16
LEAST_TOKENS = LONG_SEQUENCE // 4  # of a sequence on each GPU


def layouts(c: Config, gpu: Gpu, keep: Collection[str]) -> tuple[list[Change], dict[str, str]]:
    """(layouts to try, the config's own first; why an axis is not tried, by its name)."""
    why = {axis: reason for axis in AXES if (reason := _why_not(c, axis, keep))}
    sizes = [[c[axis]] if axis in why else _sizes(c, gpu, axis) for axis in AXES]
    own = tuple(c[axis] for axis in AXES)
    tried = [of for of in itertools.product(*sizes) if c.gpus % math.prod(of) == 0 and _sequences(c, math.prod(of))]
    return [layout(c, *of) for of in sorted(tried, key=lambda of: (of != own, math.prod(of)))], why


def layout(c: Config, tp: int, cp: int, pp: int) -> Change:
    """The change of a config to groups of these sizes."""
    schedule = "1f1b" if pp > 1 else default_config().pp_schedule
    method = _method(c, tp, cp, pp)
    in_pieces = cp > 1 and method != "ulysses"
    return {
        "tp_size": tp,
        "cp_size": cp,
        "pp_size": pp,
        "cp_method": method,
        "pp_schedule": c.pp_schedule if c.pp_size > 1 and pp > 1 else schedule,
        "attention": _attention(c) if in_pieces else c.attention,
    }


def _attention(c: Config) -> str:
    """The `attention` of a layout whose attention is in pairs of pieces: the config's own if it is of pieces, too.

    Else "auto" in place of a flash attention, which may not be one that takes these pairs, such as cuDNN's a window.
    """
    return c.attention if c.attention == "xla" or tokens_of_piece(c) else "auto"


def _method(c: Config, tp: int, cp: int, pp: int) -> str:
    """The `cp_method` of a layout: the config's own if the layout can have it.

    Else ulysses, or pairs of pieces if it does not divide the heads. Attention by XLA takes pairs too, which have fewer
    scores in memory: four layers of 8,192 tokens, compiled for two RTX 4090, need 1.2 GiB instead of 2.7.
    """
    if cp == 1:
        return default_config().cp_method
    possible = {"ulysses": _divides_heads(c, tp, cp), "allgather": True, "ring": pp == 1}
    if c.cp_size > 1 and possible[c.cp_method]:
        return c.cp_method
    if possible["ulysses"] and c.attention != "xla":
        return "ulysses"
    return "ring" if possible["ring"] else "allgather"


def _divides_heads(c: Config, tp: int, cp: int) -> bool:
    """True if ulysses can divide the heads of a tensor-parallel group, as config/mesh.py checks."""
    of_group = max(c.model.num_key_value_heads // tp, 1)
    return c.model.num_attention_heads % (cp * tp) == 0 and (of_group % cp == 0 or cp % of_group == 0)


def group(of: Change) -> int:
    """GPUs of a layout that share sequences."""
    return math.prod(of[axis] for axis in AXES)


def sequences(c: Config, of: Change) -> int:
    """Sequences of a step of each group of a layout."""
    return _sequences(c, group(of))


def meshes(c: Config, gpu: Gpu, of: Change, keep: Collection[str], *, few: bool = False) -> list[Change]:
    """Ways to share state between the groups of a layout, the config's own among them.

    With one GPU, its own only if one of its fields is kept. Replicas gather less from each other and store more, so
    they are for sharded gradients or weights only, and of several full machines each replica has whole ones. Larger
    groups have the vocabulary divided already, and are tried, as all are if `few`, with all shards or with those of a
    machine.
    """
    groups = c.gpus // group(of)
    fixed = {"shard_weights": None, "shard_gradients": None, "dp_shard_size": -1}
    if c.gpus == 1:
        plain = fixed | {"zero_level": 1, "dp_replicate_size": 1, "shard_outer": False}
        return [{name: c[name] for name in plain} if any(name in keep for name in plain) else plain]
    machines = math.ceil(c.gpus / gpu.gpus_per_node)
    replicas = [number for number in divisors(groups)[:-1] if c.gpus <= gpu.gpus_per_node or machines % number == 0]
    outer = (False, True)
    if group(of) > 1 or few:
        replicas = [number for number in replicas if number in (1, machines)]
        outer = (False,)
    found = [(1, 1)] + [(level, number) for level in (2, 3) for number in replicas]
    tried = [
        fixed | {"zero_level": level, "dp_replicate_size": number, "shard_outer": sharded}
        for level, number in found
        for sharded in outer
    ]
    is_own = all(c[axis] == of[axis] for axis in AXES)
    return with_own(c, tried) if is_own else tried


def with_own(c: Config, changes: list[Change]) -> list[Change]:
    """The changes, and what the config has itself for their fields if that is none of them."""
    own = {name: c[name] for name in changes[0]}
    return changes if own in changes else [*changes, own]


def divisors(n: int) -> list[int]:
    """The divisors of n in ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _why_not(c: Config, axis: str, keep: Collection[str]) -> str:
    """Why no other size of an axis is tried; "" if there is no reason."""
    if axis in keep:
        return "kept"
    if c.gpus == 1:
        return ""  # there is one size
    if axis == "cp_size" and c.cp_size == 1 and c.sequence_len < LONG_SEQUENCE:
        return f"sequences of {c.sequence_len:,} tokens are shorter than {LONG_SEQUENCE:,}"
    if axis == "pp_size" and c.pp_size == 1 and (_sequences(c, c.gpus) or 0) < 2:
        return "one sequence a step cannot be divided into microbatches"
    return ""


def _sizes(c: Config, gpu: Gpu, axis: str) -> list[int]:
    """The sizes of an axis to try."""
    most = {
        "tp_size": gpu.gpus_per_node,
        "cp_size": c.sequence_len // LEAST_TOKENS,
        "pp_size": min(MOST_STAGES, c.model.num_hidden_layers),
    }
    return [size for size in divisors(c.gpus) if size <= most[axis] or size == c[axis]]


def _sequences(c: Config, gpus: int) -> int:
    """Sequences of a step of each group of so many GPUs; 0 if groups cannot have the same number."""
    of_all = c.per_device_batch_size * c.gradient_accumulation_steps * c.gpus // gpus_per_sequence(c)
    groups = c.gpus // gpus
    return of_all // groups if of_all % groups == 0 else 0
