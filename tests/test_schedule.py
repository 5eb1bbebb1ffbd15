"""Schedules of pipeline parallelism, by the definition of a pipeline."""

import numpy as np
import pytest

from surojax.errors import ConfigError
from surojax.parallel.schedule import (
    NONE,
    SCHEDULES,
    check_counts,
    check_stages,
    layers_of_stage,
    patterns_of_stages,
    stacked_layers,
)

SIZES = [(1, 2), (2, 2), (3, 2), (8, 2), (4, 4), (2, 4), (9, 4), (16, 8), (5, 3)]


def times(table, microbatch: int) -> list[int]:
    """The tick in which each stage computes a microbatch; it must be exactly one."""
    found = [np.flatnonzero(table[:, s] == microbatch) for s in range(table.shape[1])]
    assert all(len(ticks) == 1 for ticks in found)
    return [int(ticks[0]) for ticks in found]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches, stages", SIZES)
def test_a_schedule_is_a_pipeline(name, microbatches, stages):
    """Every microbatch once in each direction and stage, in the order that data can move: one stage a tick."""
    schedule = SCHEDULES[name](microbatches, stages)
    assert schedule.forward.shape == schedule.backward.shape == (schedule.ticks, stages)
    assert {*np.unique(schedule.forward)} == {*np.unique(schedule.backward)} == {NONE, *range(microbatches)}
    for a in range(microbatches):
        forward, backward = times(schedule.forward, a), times(schedule.backward, a)
        assert np.diff(forward).tolist() == [1] * (stages - 1)  # what a stage receives, it computes in the next tick
        assert np.diff(backward).tolist() == [-1] * (stages - 1)
        assert backward[-1] >= forward[-1]  # the last stage goes forward first within a tick
    for table in (schedule.forward, schedule.backward):  # sums of gradients are in the order of microbatches
        for column in table.T:
            assert np.all(np.diff(column[column != NONE]) == 1)
    assert (schedule.forward[-1] == NONE).all() and (schedule.backward[-1] != NONE).any()  # nothing after the last


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches, stages", SIZES)
def test_the_bubble_is_that_of_the_formula(name, microbatches, stages):
    """Whatever a backward pass takes: no stage waits for one that computes in the other direction."""
    schedule = SCHEDULES[name](microbatches, stages)
    expected = (stages - 1) / (microbatches + stages - 1)
    for backward in (1.0, 2.0, 3.0):
        assert schedule.bubble(1.0, backward) == pytest.approx(expected)


@pytest.mark.parametrize("microbatches, stages", SIZES)
def test_microbatches_in_flight_are_bounded(microbatches, stages):
    """gpipe keeps all of them; 1f1b as many as there are ticks between a microbatch's two passes, by stage."""
    assert SCHEDULES["gpipe"](microbatches, stages).in_flight.tolist() == [microbatches] * stages
    expected = [min(microbatches, 2 * (stages - 1 - s) + 1) for s in range(stages)]
    assert SCHEDULES["1f1b"](microbatches, stages).in_flight.tolist() == expected


@pytest.mark.parametrize(
    "layers, stages, expected", [(126, 4, [32] * 3 + [30]), (126, 8, [16] * 7 + [14]), (3, 2, [2, 1])]
)
def test_the_last_stage_has_the_rest_of_the_layers(layers, stages, expected):
    check_stages(layers, stages)
    n = layers_of_stage(layers, stages)
    assert [len(range(s * n, min((s + 1) * n, layers))) for s in range(stages)] == expected
    assert stacked_layers(layers, stages) == stages * n


def test_stages_of_equal_kinds_have_one_pattern():
    """Also the last one with fewer layers, if another stage begins as it does."""
    assert patterns_of_stages("abab", 2) == ((("a", "b"),), (0, 0))
    assert patterns_of_stages("aba", 2) == ((("a", "b"),), (0, 0))
    assert patterns_of_stages("ababa", 2) == ((tuple("aba"), tuple("baa")), (0, 1))
    assert patterns_of_stages("aaabaaab", 4) == ((tuple("aa"), tuple("ab")), (0, 1, 0, 1))
    assert patterns_of_stages("aab", 1) == ((tuple("aab"),), (0,))


def test_stages_have_as_many_layers_of_each_kind():
    """In any order; of one kind, the last stage may have fewer."""
    for kinds, stages in (("aab" * 4, 4), ("aabbaa", 2), ("aaa", 2), ("ab", 1)):
        check_counts(kinds, stages)
    for kinds, stages, fits in (("aab" * 3, 2, 1), ("ab" * 6, 4, 3), ("ababa", 2, 1), ("aabb" * 3, 6, 3)):
        with pytest.raises(
            ConfigError, match=rf"^pp_size: expected stages with as many .*, got {stages}.*; use {fits}$"
        ):
            check_counts(kinds, stages)


def test_stages_without_layers_are_refused():
    check_stages(8, 4)
    check_stages(7, 4)
    with pytest.raises(ConfigError, match=r"^pp_size: expected at most 3, .* of 2 have all 6 layers, got 4; use 3, "):
        check_stages(6, 4)
    with pytest.raises(ConfigError, match=r"^pp_size: expected at most 3, .* of 1 have all 3 layers, got 4; use 3, "):
        check_stages(3, 4)
