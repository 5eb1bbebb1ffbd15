"""The values of settings that a search tries, besides layouts: recomputation, batches, placements, and numbers."""

import itertools
import math
from collections.abc import Collection, Iterator

from surojax.config.checks import REFUSALS
from surojax.config.fields import DEFAULTS, RECOMPUTE_PARTS, Config, flat
from surojax.planner import layouts
from surojax.planner.advice import Change, differing
from surojax.planner.layouts import divisors, with_own
from surojax.refusals import about, refused
from surojax.sizes import divisor

SLICES = (4096, 1024)  # most tokens in a slice of the head
SAMPLED = {"recompute_block": True}, {"recompute_block": False, "recompute_swiglu": True, "recompute_ffn": False}
FETCH = "microbatches_per_fetch"
OF_FETCH = about(FETCH, REFUSALS)
BATCH_FIELDS = ("per_device_batch_size", "gradient_accumulation_steps", FETCH)

# Settings that change numbers, by the word that allows them.
ALLOWED: dict[str, Change] = {
    "adamw8bit": {"optimizer": "adamw8bit"},
    "bf16_master": {"master_dtype": "bfloat16"},
    "fp8": {"recipe": "fp8_hybrid"},
}


def numbers(c: Config, allow: Collection[str]) -> list[Change]:
    """Every combination of the settings that change numbers, are allowed and not set yet, none of them first."""
    words = [word for word in allow if differing(c, ALLOWED[word])]
    return [{k: v for word in of for k, v in ALLOWED[word].items()} for of in subsets(words)]


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
    values = flat(c) | layout
    sequences = layouts.sequences(c, layout)
    found = []
    for size, most in itertools.product(divisors(sequences), SLICES):
        microbatches = sequences // size
        tokens = size * c.sequence_len // layouts.group(layout)
        if not tokens:
            continue
        change = {
            "per_device_batch_size": size,
            "gradient_accumulation_steps": microbatches,
            "lmhead_chunks": divisor(tokens, math.ceil(tokens / most)),
        }
        fetches = [n for n in divisors(microbatches) if not refused(values | {FETCH: n}, DEFAULTS, OF_FETCH)]
        changes = [change | {FETCH: group} for group in fetches]
        found += [x for x in changes if x not in found]
    return found if differing(c, layout) else with_own(c, found)


def sample(splits: list[Change]) -> list[Change]:
    """A few of `batches`: small, medium and large microbatches, as many a fetch as there can be, with small slices."""
    sizes = sorted({split["per_device_batch_size"] for split in splits})
    some = {sizes[0], sizes[len(sizes) // 2], sizes[-1]}
    strongest = {split["per_device_batch_size"]: split for split in splits}  # the last of each size
    return [split for size, split in strongest.items() if size in some]


def subsets(names: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Every choice of some of these names, the smallest first."""
    return itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))


def stored_in_files(offloaded: Collection[str]) -> list[tuple[str, ...]]:
    """Offloaded tensors that files can store, in every combination, one class first."""
    return [of for of in subsets([name for name in ("optimizer", "master") if name in offloaded]) if of]
