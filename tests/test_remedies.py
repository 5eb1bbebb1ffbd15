"""Which limits are lifted for a run that does not fit, and in which order they are proposed."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from surojax.config.fields import default_config
from surojax.planner import remedies
from surojax.planner.amounts import Memory
from surojax.planner.gpus import GPUS
from surojax.planner.run_plan import checked
from surojax.planner.search import Space

GPU = "rtx4090"
WORDS = ["adamw8bit", "bf16_master"]


def space(limits: Memory, **options: Any) -> Space:
    return Space(checked(default_config(), GPU), GPUS[GPU], limits, **options)


@pytest.fixture
def found(monkeypatch):
    """What is proposed in a space, as (limit that is lifted, seconds): everything fits if a limit is lifted so far."""

    def of(limits: Memory, fits, seconds=lambda space, least_host: 1.0, **options) -> list[tuple[str, float]]:
        def best(space: Space, *, least_host: bool = False):
            return SimpleNamespace(seconds=seconds(space, least_host)) if fits(space) else None

        monkeypatch.setattr(remedies, "best", best)
        monkeypatch.setattr(remedies, "other_numbers", lambda _: WORDS)
        monkeypatch.setattr(remedies, "_proposal", lambda c, what, candidate: (what, candidate.seconds))
        return remedies.with_limits_lifted(space(limits, **options))

    return of


def test_each_limit_is_lifted_by_itself(found):
    named = lambda *arguments, **options: [what for what, _ in found(*arguments, **options)]
    numbers = [f"other numbers (--allow {word})" for word in WORDS]
    always = lambda _: True
    assert named(Memory(1, 5, 0), always) == ["more host memory", "files on a drive (--nvme)", *numbers, "more GPUs"]
    assert named(Memory(1, 5, 7), always)[:2] == ["more host memory", "more files (--nvme)"]
    assert named(Memory(1, 5, math.inf), always) == ["more host memory", *numbers, "more GPUs"]
    assert named(Memory(1, math.inf, 0), always) == [*numbers, "more GPUs"]
    assert named(Memory(1, 5, 0), always, platform="cpu") == numbers
    kept = named(Memory(1, 5, 0), always, keep=("gpus",), allow=("adamw8bit",))
    assert kept == ["more host memory", "files on a drive (--nvme)", numbers[1], "without --keep"]


def test_a_model_that_is_fine_tuned_is_offered_adapters_first(tmp_path, monkeypatch):
    """The kinds that fit, before more hardware; none if the run trains them already."""

    def lifted(kinds, **fields):
        c = checked(default_config(), GPU)
        c.update(fields)
        monkeypatch.setattr(remedies, "best", lambda space, **_: space if space.config.get(kinds) else None)
        return [what for what, _ in remedies.adapter_candidates(Space(c, GPUS[GPU], Memory(10**9, math.inf, 0)))]

    model = {"model_path": str(tmp_path)}
    assert lifted("lora", **model) == ["adapters (--lora)", "adapters of a base in 4 bits (--qlora)"]
    assert lifted("qlora_bnb", **model) == ["adapters of a base in 4 bits (--qlora)"]
    assert lifted("qlora_bnb", **model, lora=True, qlora_bnb=True) == []
    assert lifted("lora") == lifted("lora", **model, from_scratch=True) == []


def test_each_is_searched_with_nothing_else_lifted(found):
    limits = Memory(1, 5, 0)
    for what, fits in {
        "more host memory": lambda of: of.limits == Memory(1, math.inf, 0),
        "files on a drive (--nvme)": lambda of: of.limits == Memory(1, 5, math.inf),
        "other numbers (--allow bf16_master)": lambda of: of.allow == ("bf16_master",) and of.limits == limits,
        "more GPUs": lambda of: of.config.gpus >= 4 and of.limits == limits,
        "without --keep": lambda of: not of.keep and of.limits == limits and not of.allow and of.config.gpus == 1,
    }.items():
        keep = ("sequence_len",) if what == "without --keep" else ()
        assert [name for name, _ in found(limits, fits, keep=keep)] == [what]


@pytest.mark.parametrize("fastest, proposed", [(0.89, True), (0.91, False), (1.0, False)])
def test_more_host_memory_is_proposed_twice_if_a_step_is_a_tenth_faster(found, fastest, proposed):
    seconds = lambda space, least_host: 1.0 if least_host else fastest
    rows = found(Memory(1, 5, math.inf), lambda of: of.limits.host == math.inf, seconds)
    assert rows == [("more host memory", 1.0), ("more of it, for a faster step", fastest)][: 1 + proposed]


@pytest.mark.parametrize("few", [False, True])
def test_a_faster_step_is_proposed_beside_one_that_needs_less(found, few):
    """Not if only one of the two searches, of all settings or of a few, has any."""
    rows = found(Memory(1, 5, math.inf), lambda of: of.limits.host == math.inf and of.few == few)
    assert rows == [("all of these" if few else "more host memory", 1.0)]


@pytest.mark.parametrize(
    "stages, schedule, schedules",
    [(1, "gpipe", ["gpipe"]), (2, "gpipe", ["gpipe", "1f1b"]), (2, "1f1b", ["1f1b"])],
)
def test_layouts_of_the_same_axes_differ_in_their_schedule(stages, schedule, schedules):
    c = default_config()
    c.update({"gpus": 2, "pp_size": stages, "pp_schedule": schedule})
    assert [layout["pp_schedule"] for layout in remedies.own_layouts(c)] == schedules


def test_all_limits_are_lifted_together_if_none_is_enough(found):
    everything = lambda of: of.limits == Memory(1, math.inf, math.inf) and of.config.optimizer == "adamw8bit"
    assert found(Memory(1, 5, 0), everything) == [("all of these", 1.0)]
    assert found(Memory(1, 5, 0), lambda of: everything(of) and of.config.gpus >= 8) == [("more GPUs", 1.0)]
    assert found(Memory(1, 5, 0), lambda of: False) == []


def test_settings_that_take_as_long_are_one_alternative():
    """To 0.1 % of the one before that is kept, so that a chain of small steps keeps some."""
    candidates: Any = [SimpleNamespace(seconds=x) for x in (1.0, 1.0005, 1.0009, 1.0012, 1.0021, 1.5)]
    assert [x.seconds for x in remedies.unlike(candidates)] == [1.0, 1.0012, 1.5]
