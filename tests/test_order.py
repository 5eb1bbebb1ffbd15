"""Orders of layers of several kinds: every layer is visited once, in order, by few loops with linear indices."""

import numpy as np
import pytest

from surojax.models.order import LONGEST_PERIOD, Run, Slot, directed, in_pairs, order_of, runs

# Orders of published models by a letter for each kind, and (slots that are compiled, loops).
PUBLISHED = {
    "Llama 3 8B": ("A" * 32, 1, 1),
    "Qwen3.5 9B": ("GGGA" * 8, 4, 1),
    "Llama 4 Maverick": ("DE" * 24, 2, 1),
    "GLM-4.5": ("DDD" + "E" * 89, 5, 1),
    "Jamba": ("MNMNANMN" * 4, 8, 1),
    "Granite-4-H Tiny": ("MMMMMAMMMM" * 4, 10, 1),
    "LFM2-1.2B": ("CCACCACCACACACAC", 6, 2),
    "Nemotron-H-8B": ("M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-", 13, 2),
    "Nemotron-3-Nano": ("MEMEM*E" * 5 + "MEMEMEM*EMEMEMEME", 14, 3),
}


@pytest.mark.parametrize("kinds, slots, loops", PUBLISHED.values(), ids=PUBLISHED)
def test_orders_of_published_models_are_few_loops(kinds, slots, loops):
    found = runs(order_of(kinds))
    assert sum(len(run.slots) for run in found) == slots
    assert sum(run.rounds > 1 for run in found) == loops


def drawn_orders():
    """300 orders of up to 40 layers: random ones, and repeated patterns with random layers around them."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        kinds = "".join(rng.choice(list("AME"[: rng.integers(1, 4)]), rng.integers(1, 9)))
        kinds = (kinds * rng.integers(1, 6))[: rng.integers(1, 41)] + "".join(
            rng.choice(list("AM"), rng.integers(0, 4))
        )
        period = rng.integers(1, 4)
        yield order_of(kinds, ["window" if i % period else "all" for i in range(len(kinds))])


def test_every_layer_is_visited_once_in_both_directions_and_in_pairs():
    for order in drawn_orders():
        found = runs(order)
        assert all(len(run.slots) <= LONGEST_PERIOD for run in found if run.rounds > 1)
        for reverse in (False, True):
            expected = list(order)[::-1] if reverse else list(order)
            one_way = directed(found, reverse=reverse)
            assert [layer for run in one_way for layer in run.layers()] == expected
            paired = [part for run in one_way for part in in_pairs(run)]
            assert [layer for run in paired for layer in run.layers()] == expected


def test_neighbours_of_a_slot_are_slots_of_its_run():
    """Layers j before or after a round, as transfers ask for them, are those of the rounds beside it."""
    (run,) = runs(order_of("GGGA" * 5))
    layers = run.layers()
    for k in range(1, 4):
        for j in range(-4, 8):
            slot = run.slot(j)
            assert (slot.kind, slot.index(k)) == layers[4 * k + j][:2]


def test_a_loop_and_its_edges_cost_a_layer_each():
    """Two equal layers alone are unrolled and three are a loop, but not if transfers wait at both of its ends."""
    assert runs(order_of("AA")) == [Run(1, (Slot("A", None, 1, 0), Slot("A", None, 1, 1)))]
    assert runs(order_of("AAA")) == [Run(3, (Slot("A", None, 1, 0),))]
    assert [run.rounds for run in runs(order_of("MAAAM"))] == [1]
    assert [run.rounds for run in runs(order_of("M" + "A" * 5 + "M"))] == [1, 3, 1]


def test_variants_repeat_with_their_kind():
    """Windows of every layer but each third make a body of three slots, one stack apart."""
    (run,) = runs(order_of("A" * 12, ["w", "w", "g"] * 4))
    assert run == Run(4, tuple(Slot("A", variant, 3, i) for i, variant in enumerate("wwg")))
