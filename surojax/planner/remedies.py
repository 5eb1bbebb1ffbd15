"""What to change so that a run fits: the settings that `train`, `plan` and `fit` propose for one that does not.

The proposals are results of one search (search.py). First the fastest settings that fit as things are. If there are
none, each limit is lifted by itself: more host memory, files, settings that change numbers, kept fields, the number of
GPUs. If no single one is enough, all of them are lifted together.
"""

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

from surojax.assembly.from_config import compute
from surojax.config import checks
from surojax.config.changes import Change, changed, differing, flags, wrapped
from surojax.config.fields import Config, flat
from surojax.errors import ConfigError
from surojax.numerics.recipes import check_recipe
from surojax.planner import choices
from surojax.planner.candidate import Candidate
from surojax.planner.choices import NUMBERS
from surojax.planner.search import Space, best, search

ALTERNATIVES = 3  # that are proposed for settings that do not fit
MORE_GPUS = (2, 4, 8, 16, 32, 64)
COMPUTE = ("bf16_weights", "fp8")  # words about products, which on CPUs are in float32
ADAPTERS: dict[str, Change] = {  # of a frozen base, in place of training all weights
    "adapters (--lora)": {"lora": True},
    "adapters of a base in 4 bits (--qlora)": {"lora": True, "qlora_bnb": True},
}
MORE_HOST = "more host memory"
NOTHING = "a smaller model or sequence_len, or a machine with more memory"  # if there are no proposals
ALIKE = 0.001  # relative; of settings whose steps take as long, the fastest stands for all
FASTER = 0.1  # relative; a faster step that needs more host memory than another proposal is worth one of its own


class Proposal(NamedTuple):
    """Settings that fit. lifted: what they need besides, "" if nothing. change: of the config that was given."""

    lifted: str
    candidate: Candidate
    change: Change

    def text(self, *, timed: bool = True, device: str = "GPU") -> str:
        """Describes the memory of the settings and, if timed, the estimated time of a step."""
        lifted = f"{self.lifted}: " if self.lifted else ""
        time = f", estimated {1e3 * self.candidate.seconds:,.0f} ms a step, not compiled" * timed
        return f"{lifted}{self.candidate.need.text(device)} (fits){time}"

    def lines(self) -> list[str]:
        """The text, and the flags on lines of their own, which can be pasted behind a command."""
        return [f"{self.text()}:", *wrapped(flags(self.change), "    ")]

    def line(self, *, timed: bool, device: str) -> str:
        """The flags and the text in one line."""
        return f"{flags(self.change)} -> {self.text(timed=timed, device=device)}"


def proposals(space: Space) -> list[Proposal]:
    """Returns the fastest settings that fit, of the same layout; if there are none, what would fit with a limit lifted.

    Empty if nothing would.
    """
    space = space.of(layouts=own_layouts(space.config))
    candidates = search(space, ALTERNATIVES).candidates
    return [_proposal(space.config, "", candidate) for candidate in unlike(candidates)] or with_limits_lifted(space)


def unlike(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Keeps of candidates, the fastest first, those that take longer than the one before by more than `ALIKE`."""
    kept: list[Candidate] = []
    for candidate in candidates:
        if not kept or candidate.seconds > kept[-1].seconds * (1 + ALIKE):
            kept.append(candidate)
    return kept


def own_layouts(c: Config) -> tuple[Change, ...]:
    """The layouts with the config's own axes, which differ in the schedule of their stages."""
    own = choices.own_layout(c)
    return (own, own | {"pp_schedule": "1f1b"}) if c.pp_size > 1 and c.pp_schedule != "1f1b" else (own,)


def with_limits_lifted(space: Space) -> list[Proposal]:
    """Returns the fastest settings with each limit lifted by itself; if no single one helps, with all of them lifted.

    Of more host memory also the settings that need the least. Empty if nothing fits even so.
    """
    whole, space = space, space.of(few=True)
    limits = space.limits
    unlimited = limits._replace(host=math.inf)
    lifted: list[tuple[str, Candidate | None]] = adapter_candidates(space)
    if limits.host < math.inf and space.platform == "gpu":
        least, fastest = best(whole.of(limits=unlimited), least_host=True), best(space.of(limits=unlimited))
        lifted.append((MORE_HOST, least))
        if least and fastest and fastest.seconds < least.seconds * (1 - FASTER):
            lifted.append(("more of it, for a faster step", fastest))
        if limits.files < math.inf:  # files are for what host memory has no room for
            what = "more files (--nvme)" if limits.files else "files on a drive (--nvme)"
            lifted.append((what, best(space.of(limits=limits._replace(files=math.inf)))))
    words = [word for word in other_numbers(space) if word not in space.allow]
    lifted += [(f"other numbers (--allow {word})", best(space.of(allow=(*space.allow, word)))) for word in words]
    if space.keep:
        lifted.append(("without --keep", best(space.of(keep=()))))
    lifted.append(_with_more_gpus(space))
    if all(candidate is None for _, candidate in lifted):
        other = changed(space.config, *(NUMBERS[word] for word in words if word != "fp8"))
        everything = space.of(config=other, limits=unlimited._replace(files=math.inf))
        candidate = best(everything)
        lifted.append(("all of these", candidate) if candidate else _with_more_gpus(everything))
    return [_proposal(space.config, what, x) for what, x in lifted if x is not None]


def adapter_candidates(space: Space) -> list[tuple[str, Candidate | None]]:
    """The `ADAPTERS` with which a fine-tuned model fits, as limits that are lifted; [] if none does."""
    if not space.config.model_path or space.config.from_scratch:
        return []
    found: list[tuple[str, Candidate | None]] = []
    for what, change in ADAPTERS.items():
        tried = changed(space.config, change)
        try:
            checks.check(tried)
        except ConfigError:
            continue
        if differing(space.config, change) and (candidate := best(space.of(config=tried))):
            found.append((what, candidate))
    return found


def other_numbers(space: Space) -> list[str]:
    """Returns the words of `NUMBERS` that change something and that the checks and the GPU accept."""
    words = []
    for word, change in NUMBERS.items():
        if not differing(space.config, change) or (space.platform == "cpu" and word in COMPUTE):
            continue
        tried = changed(space.config, change)
        try:
            checks.check(tried)
            check_recipe(compute(tried).precision, f"a {space.gpu.name}", space.gpu)
        except ConfigError:
            continue
        words.append(word)
    return words


def _with_more_gpus(space: Space) -> tuple[str, Candidate | None]:
    """The fewest GPUs on which something fits, as a limit that is lifted."""
    c = space.config
    if "gpus" in space.keep or space.platform != "gpu":
        return "", None

    def on(gpus: int) -> Candidate | None:
        more = choices.with_gpus(c, gpus)
        return best(space.of(config=more, layouts=own_layouts(more)))

    tried = {}
    numbers = [gpus for gpus in MORE_GPUS if gpus > c.gpus]
    fewest = bisect.bisect_left(numbers, True, key=lambda gpus: tried.setdefault(gpus, on(gpus)) is not None)
    return ("more GPUs", tried[numbers[fewest]]) if fewest < len(numbers) else ("", None)


def _proposal(c: Config, lifted: str, candidate: Candidate) -> Proposal:
    """The proposal of a candidate, with its changes of this config."""
    own, found = flat(c), flat(candidate.config)
    names = dict.fromkeys((*(name for name in found if name not in candidate.change), *candidate.change))
    return Proposal(lifted, candidate, {name: found[name] for name in names if own[name] != found[name]})
