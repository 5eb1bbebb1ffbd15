"""Orders of layers of several kinds: every layer is visited once, in order, by few loops with linear indices."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from surojax.models.model import Model
from surojax.models.order import LONGEST_PERIOD, LayerLoop, RepeatingLayers, loops_of, order_of, repeating_kinds

# Orders of published models by a letter for each kind, and (layers that are compiled, loops of several rounds).
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


@pytest.mark.parametrize("kinds, layers, loops", PUBLISHED.values(), ids=PUBLISHED)
def test_orders_of_published_models_are_few_loops(kinds, layers, loops):
    found = repeating_kinds(order_of(kinds))
    assert sum(run.period for run in found) == layers
    assert sum(run.stop - run.start > run.period for run in found) == loops


def visited(loop: LayerLoop, *, reverse: bool) -> list[tuple]:
    """(kind, variant, index in the kind's stacks, number in the model) of each layer, as a pass computes them."""
    places = loop.places(reverse=reverse)
    layers = []
    for number, (kind, variant) in enumerate(places):
        i, j = divmod(number, loop.period)
        before, in_loop = loop.visited(i, j, reverse=reverse)
        index = loop.index(before, kind, reverse=reverse)
        layers.append((kind, variant, index, loop.number_in_model(index, in_loop, reverse=reverse)))
    return layers


def drawn_orders():
    """300 orders of up to 44 layers: random ones, and repeated patterns with random layers behind them."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        kinds = "".join(rng.choice(list("AME"[: rng.integers(1, 4)]), rng.integers(1, 9)))
        kinds = (kinds * rng.integers(1, 6))[: rng.integers(1, 41)] + "".join(
            rng.choice(list("AM"), rng.integers(0, 4))
        )
        period = rng.integers(1, 4)
        yield order_of(kinds, ["window" if i % period else "all" for i in range(len(kinds))]), rng


def test_every_layer_is_visited_once_in_both_directions():
    """Also where a kind's layers are in two memories, and none of the layers of a loop of one kind in both."""
    mixed = 0
    for order, rng in drawn_orders():
        counts = {kind: sum(layer.kind == kind for layer in order) for kind in {layer.kind for layer in order}}
        for ends in ({}, {kind: [int(rng.integers(0, n + 1))] for kind, n in counts.items()}):
            loops = loops_of(order, ends, first=5)
            expected = [(*layer[::2], layer.index, 5 + number) for number, layer in enumerate(order)]
            found = [layer for loop in loops for layer in visited(loop, reverse=False)]
            assert found == expected
            back = [layer for loop in reversed(loops) for layer in visited(loop, reverse=True)]
            assert back == expected[::-1]
            for loop in loops:
                assert loop.period <= LONGEST_PERIOD
                mixed += not loop.has_one_kind
                for kind, layers in loop.layers.items():
                    assert not any(layers.start < end < layers.stop for end in ends.get(kind, ()))
                    assert len(layers) == loop.kinds.count(kind)
                    assert loop.variant(kind) == order[[x[:2] for x in order].index((kind, layers.start))].variant
    assert mixed > 100


def test_indices_are_linear_in_the_rounds():
    (loop,) = loops_of(order_of("GGGA" * 5))
    assert loop == LayerLoop({"G": range(15), "A": range(5)}, tuple("GGGA" * 5), (None,) * 20, 4, 0)
    for reverse in (False, True):
        for j in range(4):
            counts = [loop.visited(i, j, reverse=reverse)[0] for i in range(5)]
            assert len(set(np.diff(counts))) == 1


def test_a_loop_and_its_edges_cost_a_layer_each():
    """Two equal layers alone are unrolled and three are a loop, but not if transfers wait at both of its ends."""
    rounds = lambda kinds: [(run.stop - run.start) // run.period for run in repeating_kinds(order_of(kinds))]
    assert rounds("AA") == [1, 1]
    assert rounds("AAA") == [3]
    assert rounds("MAAAM") == [1] * 5
    assert rounds("M" + "A" * 5 + "M") == [1, 1, 3, 1, 1]  # at its ends, the layers that arrive are of its kind


def test_variants_repeat_with_their_kind():
    """Windows of every layer but each third make a body of three layers, in stacks and in patterns of kinds."""
    (loop,) = loops_of(order_of("A" * 12, ["w", "w", "g"] * 4))
    assert (loop.period, loop.layers) == (3, {"A": range(12)})
    assert repeating_kinds(order_of("AM" * 6, ["w", "w", "g", "w"] * 3)) == [RepeatingLayers(0, 12, 4)]


def test_part_of_a_loop():
    (loop,) = loops_of(order_of("A" * 6), first=2)
    part = loop.part(4, 6)
    assert (part.layers, part.number, len(part.kinds)) == ({"A": range(4, 6)}, 6, 2)


def test_segments_are_in_the_order_of_their_layers():
    """Those whose layers alternate are one stretch."""
    of = lambda *numbers: SimpleNamespace(numbers=numbers)
    a, b, c, d = of(0, 1), of(2, 4, 6), of(3, 5), of(7, 8)
    model: Any = SimpleNamespace(segments=(d, c, b, a))
    assert Model.stretches.fget(model) == ((a,), (b, c), (d,))  # type: ignore[misc]
