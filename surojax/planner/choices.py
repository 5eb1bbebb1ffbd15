"""The changes that make a run fit or faster: every field that a search changes, and the values that it tries.

| choice           | fields                                                          | price                         |
|------------------|-----------------------------------------------------------------|-------------------------------|
| `mesh_layouts`   | tp_size, cp_size, pp_size; cp_method, pp_schedule, attention    | time: what a group sends      |
| `meshes`         | zero_level, dp_replicate_size, ep_size, shard_outer, shard_*    | time: gathers and reductions  |
| `recomputations` | recompute_*                                                     | time: products                |
| `batches`        | per_device_batch_size, microbatches, fetches, lmhead_chunks     | time: passes over the weights |
| `chunks`         | sequence_chunks, of long sequences                              | time: smaller products        |
| `placements`     | offload_*, overlap_update; resident_layers, device_memory       | time and host memory          |
| `in_files`       | offload_* = "nvme", nvme_path, files_in_memory                  | time and a drive; if allowed  |
| `numbers`        | `NUMBERS`                                                       | other numbers; if allowed     |

The effective batch stays as it is. Only `with_gpus` and `with_batch` change it or the number of GPUs, for proposals.

A *layout* is how the work of a step is divided: the `tp_size x cp_size x pp_size` GPUs of a *group* share sequences. A
larger group has the sequences of all its GPUs. An axis is left out, with the reason, where it can only cost: `cp_size`
divides the activations of long sequences, `pp_size` needs several microbatches, and `tp_size` sends in every layer, so
its groups stay within a machine.
"""

import itertools
import math
from collections.abc import Collection, Iterator

from surojax.config.changes import Change, changed, differing
from surojax.config.checks import REFUSALS
from surojax.config.fields import (
    DEFAULTS,
    SHARE_SEQUENCES,
    Config,
    default_config,
    flat,
    gpus_per_sequence,
    kinds,
    sequences_of_step,
    tokens_of_piece,
)
from surojax.errors import ConfigError, need
from surojax.offloads import FIELDS as OFFLOADS, IN_SLOTS, OPTIONS, TO_FILES
from surojax.planner.gpus import Gpu
from surojax.planner.roofline import StorageTiers
from surojax.refusals.features import RECOMPUTE_PARTS
from surojax.refusals.refusal import about, refused
from surojax.sizes import divisor, divisors, largest_divisor

AXES = SHARE_SEQUENCES
FETCH = "microbatches_per_fetch"
BATCH_FIELDS = ("per_device_batch_size", "gradient_accumulation_steps", FETCH)
FOLDER = "FOLDER"  # placeholder for a folder on an NVMe disk, which only the user knows
MOST_STAGES = 16
LONG_SEQUENCE = 8192  # tokens on a device; chunks of shorter ones save little
LEAST_TOKENS = LONG_SEQUENCE // 4  # of a sequence on each GPU
SLICES = (4096, 1024)  # most tokens in a slice of the head
SAMPLED = {"recompute_block": True}, {"recompute_block": False, "recompute_swiglu": True, "recompute_ffn": False}

# Settings that change numbers, by the word that allows them.
NUMBERS: dict[str, Change] = {
    "adamw8bit": {"optimizer": "adamw8bit"},
    "bf16_master": {"master_dtype": "bfloat16"},
    "bf16_state": dict.fromkeys(("opt_m_dtype", "opt_v_dtype", "accum_dtype"), "bfloat16"),
    "bf16_weights": {"model_dtype": "bfloat16"},
    "fp8": {"recipe": "fp8_hybrid"},
}


def mesh_layouts(c: Config, gpu: Gpu, keep: Collection[str]) -> tuple[list[Change], dict[str, str]]:
    """(layouts to try, the config's own first; why an axis is not tried, by its name)."""
    why = {axis: reason for axis in AXES if (reason := _why_not(c, axis, keep))}
    sizes = [[c[axis]] if axis in why else _sizes(c, gpu, axis) for axis in AXES]
    own = tuple(c[axis] for axis in AXES)
    tried = [of for of in itertools.product(*sizes) if c.gpus % math.prod(of) == 0 and _sequences(c, math.prod(of))]
    found = [mesh_change(c, *of) for of in sorted(tried, key=lambda of: (of != own, math.prod(of)))]
    found += [of | {"pp_schedule": "1f1b"} for of in found if of["pp_size"] > 1 and of["pp_schedule"] != "1f1b"]
    return found, why


def own_layout(c: Config) -> Change:
    """The config's own layout."""
    return mesh_change(c, *(c[axis] for axis in AXES))


def mesh_change(c: Config, tp: int, cp: int, pp: int) -> Change:
    """The change of a config to groups of these sizes."""
    schedule = "1f1b" if pp > 1 else default_config().pp_schedule
    method = _method(c, tp, cp, pp)
    return {
        "tp_size": tp,
        "cp_size": cp,
        "pp_size": pp,
        "cp_method": method,
        "pp_schedule": c.pp_schedule if c.pp_size > 1 and pp > 1 else schedule,
        "attention": c.attention if method == "ulysses" else _attention(c),
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
    ulysses = all(layer.mixer.exchanges_heads(tp, cp) for layer in kinds(c).values())
    possible = {"ulysses": ulysses, "allgather": True, "ring": pp == 1}
    if c.cp_size > 1 and possible[c.cp_method]:
        return c.cp_method
    if possible["ulysses"] and c.attention != "xla":
        return "ulysses"
    return "ring" if possible["ring"] else "allgather"


def group(of: Change) -> int:
    """GPUs of a layout that share sequences."""
    return math.prod(of[axis] for axis in AXES)


def meshes(
    c: Config, gpu: Gpu, of: Change, keep: Collection[str], *, few: bool = False, outer: bool = True
) -> list[Change]:
    """Ways to share state between the groups of a layout, the config's own among them.

    With one GPU, its own only if one of its fields is kept. Replicas gather less from each other and store more, so
    they are for sharded gradients or weights only, and of several full machines each replica has whole ones. Larger
    groups have the vocabulary divided already, and are tried, as all are if `few`, with all shards or with those of a
    machine. Experts are gathered, or tokens sent to them (`expert_groups`). outer: whether outer layers are divided by
    words, too.
    """
    groups = c.gpus // group(of)
    fixed = {"shard_weights": None, "shard_gradients": None, "dp_shard_size": -1}
    if c.gpus == 1:
        plain = fixed | {"zero_level": 1, "dp_replicate_size": 1, "ep_size": 1, "shard_outer": False}
        return [{name: c[name] for name in plain} if any(name in keep for name in plain) else plain]
    machines = math.ceil(c.gpus / gpu.gpus_per_node)
    replicas = [number for number in divisors(groups)[:-1] if c.gpus <= gpu.gpus_per_node or machines % number == 0]
    if group(of) > 1 or few:
        replicas = [number for number in replicas if number in (1, machines)]
    levels_and_replicas = [(1, 1)] + [(level, number) for level in (2, 3) for number in replicas]
    tried = [
        fixed | {"zero_level": level, "dp_replicate_size": number, "ep_size": experts, "shard_outer": sharded}
        for level, number in levels_and_replicas
        for experts in expert_groups(c, gpu, of, groups // number, few=few)
        for sharded in ((False, True) if outer and group(of) == 1 else (False,))
    ]
    is_own = all(c[axis] == of[axis] for axis in AXES)
    return with_own(c, tried) if is_own else tried


def expert_groups(c: Config, gpu: Gpu, of: Change, shards: int, *, few: bool = False) -> list[int]:
    """The `ep_size`s to try for a layout with so many shards of state: 1, and those that divide shards and experts.

    Tokens are sent in every layer, so the GPUs that share experts are in one machine, together with the other GPUs of
    their groups of tp, cp and pp. few: 1 and the largest.
    """
    most = gpu.gpus_per_node // group(of)
    sizes = [size for size in divisors(math.gcd(shards, c.model.num_experts)) if size <= max(1, most)]
    possible = [size for size in sizes if allows(c, "ep_size", of | {"ep_size": size})]
    return [possible[0], possible[-1]] if few and len(possible) > 1 else possible


def with_own(c: Config, changes: list[Change]) -> list[Change]:
    """Returns the changes, and the config's own values of their fields if no change equals these."""
    own = {name: c[name] for name in changes[0]}
    return changes if own in changes else [*changes, own]


def allows(c: Config, field: str, change: Change) -> bool:
    """Whether no row about this field in the table of refusals refuses a change."""
    return refused(flat(c) | change, DEFAULTS, about(field, REFUSALS)) is None


def _why_not(c: Config, axis: str, keep: Collection[str]) -> str:
    """Why no other size of an axis is tried; "" if there is no reason."""
    if axis in keep:
        return "kept"
    if c.gpus == 1:
        return ""  # there is one size
    if axis == "cp_size" and c.cp_size == 1 and c.sequence_len < LONG_SEQUENCE:
        return f"sequences of {c.sequence_len:,} tokens are shorter than {LONG_SEQUENCE:,}"
    if axis == "pp_size" and c.pp_size == 1 and _sequences(c, c.gpus) < 2:
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
    of_all = sequences_of_step(c)
    groups = c.gpus // gpus
    return of_all // groups if of_all % groups == 0 else 0


def numbers(c: Config, allow: Collection[str]) -> list[Change]:
    """Every combination of the settings that change numbers, are allowed and not set yet, none of them first."""
    words = [word for word in allow if differing(c, NUMBERS[word])]
    return [{k: v for word in of for k, v in NUMBERS[word].items()} for of in subsets(words)]


def recomputations(c: Config) -> list[Change]:
    """Settings of what the backward pass computes again, from nothing to all of a block, and what the config says."""
    none = dict.fromkeys(RECOMPUTE_PARTS, False)
    parts = ((), ("norm", "swiglu"), ("norm", "ffn"), ("norm", "ffn", "att"))
    of_parts = [none | {f"recompute_{part}": True for part in some} | {"recompute_block": False} for some in parts]
    return with_own(c, [*of_parts, none | {"recompute_block": True}])


def batches(c: Config, layout: Change) -> list[Change]:
    """Ways to split the sequences of a group and step into microbatches and slices.

    The config's own is among them for its own layout.
    """
    of_group = _sequences(c, group(layout))
    found = []
    for size, most in itertools.product(divisors(of_group), SLICES):
        microbatches = of_group // size
        tokens = size * c.sequence_len // group(layout)
        if not tokens:
            continue
        change = {
            "per_device_batch_size": size,
            "gradient_accumulation_steps": microbatches,
            "lmhead_chunks": divisor(tokens, math.ceil(tokens / most)),
        }
        fetches = [n for n in divisors(microbatches) if allows(c, FETCH, layout | {FETCH: n})]
        changes = [change | {FETCH: group} for group in fetches]
        found += [x for x in changes if x not in found]
    return found if differing(c, layout) else with_own(c, found)


def sample_batches(splits: list[Change]) -> list[Change]:
    """A few of `batches`: small, medium and large microbatches, as many a fetch as there can be, with small slices."""
    sizes = sorted({split["per_device_batch_size"] for split in splits})
    some = {sizes[0], sizes[len(sizes) // 2], sizes[-1]}
    strongest = {split["per_device_batch_size"]: split for split in splits}  # the last of each size
    return [split for size, split in strongest.items() if size in some]


def smallest(splits: list[Change]) -> Change:
    """The one of `batches` with the least memory: small microbatches, one a fetch, in small slices."""
    return min(splits, key=lambda x: (*(x[name] for name in (BATCH_FIELDS[0], BATCH_FIELDS[2])), -x["lmhead_chunks"]))


def subsets(names: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Every choice of some of these names, the smallest first."""
    return itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))


def chunks(c: Config, layout: Change) -> list[Change]:
    """The config's own chunks of a sequence, and for a long one as many as have `LONG_SEQUENCE` tokens each."""
    length = c.sequence_len // (layout["cp_size"] * layout["tp_size"])
    own = {"sequence_chunks": c.sequence_chunks}
    more = {"sequence_chunks": divisor(length, length // LONG_SEQUENCE)} if length > LONG_SEQUENCE else own
    return with_own(c, [more]) if allows(c, "sequence_chunks", layout | more) else [own]


def offloadable(c: Config) -> tuple[str, ...]:
    """Classes of tensors that host memory can store."""
    return tuple(row for row, field in OFFLOADS.items() if allows(c, field, {field: True}))


def placements(c: Config, offloads: Collection[str], in_files: bool) -> list[StorageTiers]:
    """The placements of these classes to try, without resident layers. in_files: in files is the first of `TO_FILES`
    that is offloaded, or the first few, or only "master"."""
    found = []
    for offloaded in subsets(offloads):
        rows = tuple(row for row in TO_FILES if row in offloaded)
        files: list[tuple[str, ...]] = [rows[:n] for n in range(1, len(rows) + 1)] if in_files else [()]
        if in_files and rows[:2] == ("moments", "master"):
            files.insert(0, ("master",))
        tried = [StorageTiers(offloaded, of, overlaps=late) for of in files for late in (False, True)]
        found += [x for x in tried if allows(c, "overlap_update", placement(c, x))]
    return found


def nothing_offloaded(c: Config) -> Change:
    """The placement with all state on the device."""
    change: Change = dict.fromkeys(OFFLOADS.values(), False) | OPTIONS
    return change | {"overlap_update": False} | ({"offload_quants": False} if c.persistent_quants else {})


def placement(c: Config, stored: StorageTiers) -> Change:
    """The fields that differ from `nothing_offloaded`."""
    change: Change = {OFFLOADS[row]: "nvme" if row in stored.files else True for row in stored.offloaded}
    change |= {"resident_layers": stored.resident, "overlap_update": stored.overlaps}
    if "weights" in stored.offloaded and c.persistent_quants:
        change["offload_quants"] = True
    if set(IN_SLOTS) <= {*stored.files}:
        change["nvme_slots"] = c.nvme_slots
    return change | ({"nvme_path": c.nvme_path or FOLDER} if stored.files else {})


def with_gpus(c: Config, gpus: int) -> Config:
    """The config on so many GPUs, with the same sequences a step if they can be divided, else with more."""
    more = changed(c, {"gpus": gpus, "dp_shard_size": -1, "dp_replicate_size": 1})
    if gpus > 1:
        more.update({"zero_level": 3, "shard_weights": None, "shard_gradients": None})
    try:
        return with_batch(more, sequences_of_step(c))
    except ConfigError:
        return more


def with_batch(c: Config, sequences: int | None) -> Config:
    """The config with so many sequences a step on all GPUs; its microbatches stay as large as they are if they can.

    Raises ConfigError if the GPUs do not divide them.
    """
    if sequences is None:
        return c
    need(sequences < 2**31, "--effective-batch", "less than 2^31 sequences", sequences, "lower it")
    groups = c.gpus // gpus_per_sequence(c)
    if sequences < 1 or groups < 1 or sequences % groups:
        what = "GPUs" if groups == c.gpus else "groups of GPUs"
        raise ConfigError(
            f"--effective-batch: expected a multiple of the {groups} {what}, got {sequences}; it counts sequences of a "
            "step on all GPUs"
        )
    of_group = sequences // groups
    size = largest_divisor(of_group, c.per_device_batch_size)
    tokens = size * c.sequence_len // gpus_per_sequence(c)
    change = {
        "per_device_batch_size": size,
        "gradient_accumulation_steps": of_group // size,
        "microbatches_per_fetch": largest_divisor(of_group // size, c.microbatches_per_fetch),
        "lmhead_chunks": largest_divisor(tokens, c.lmhead_chunks),
    }
    return changed(c, change)
