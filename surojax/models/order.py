"""The order of a model's layers, split into loops whose bodies compute one pattern of layers.

Layers of a kind have equal parameters, stacked by kind, `[layers of the kind, ...]`. A pass visits them in the model's
order. What repeats is a loop: of one kind, with variants that may alternate, or of several kinds in turn. In round i of
a loop a layer of its body has the index stride * i + offset in the stacks of its kind. That is linear in the loop's
counter, so that copy engines move it (memory/host.py).

Nothing here knows arrays.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

LONGEST_PERIOD = 12  # of layers of several kinds, or of variants that a loop over one kind unrolls: 8
LONGEST_PERIOD_OF_VARIANTS = 8


class LayerRef(NamedTuple):
    """A layer of a model. index: in the stacks of its kind. variant: what is static about it besides its kind."""

    kind: str
    index: int
    variant: Any = None


class LayerLoop(NamedTuple):
    """Layers that form one loop, one after another in the model. Kinds and variants repeat after `period` layers.

    layers: of each kind, their indices in its stacks. kinds, variants: of each layer; of one kind, those behind the
    last whole period are unrolled. number: of the first layer in the model.
    """

    layers: Mapping[str, range]
    kinds: tuple[str, ...]
    variants: tuple[Any, ...]
    period: int
    number: int

    @property
    def has_one_kind(self) -> bool:
        return len(self.layers) == 1

    def variant(self, kind: str) -> Any:
        """The variant of the first layer of this kind."""
        return self.variants[self.kinds.index(kind)]

    def part(self, start: int, stop: int) -> "LayerLoop":
        """The loop over its layers `start` to `stop` - 1, if all are of one kind."""
        ((kind, layers),) = self.layers.items()
        number = self.number + start
        return LayerLoop(
            {kind: layers[start:stop]}, self.kinds[start:stop], self.variants[start:stop], self.period, number
        )

    def places(self, *, reverse: bool) -> list[tuple[str, Any]]:
        """(kind, variant) of each layer, in the direction of a pass."""
        places = list(zip(self.kinds, self.variants, strict=True))
        return places[::-1] if reverse else places

    def visited(self, i: Any, j: int, *, reverse: bool) -> tuple[Any, Any]:
        """Counts the layers of a pass before layer j of round i: (those of its kind, all) in this loop.

        i: a number, or the loop's counter.
        """
        if self.has_one_kind:
            before = i if self.period == 1 else i * self.period + j
            return before, before
        kinds = (self.kinds[::-1] if reverse else self.kinds)[: self.period]
        stride, offset = kinds.count(kinds[j]), kinds[:j].count(kinds[j])
        scaled = i if stride == 1 else i * stride
        return scaled + offset if offset else scaled, i * self.period + j

    def index(self, before: Any, kind: str, *, reverse: bool) -> Any:
        """The index in its kind's stacks of the layer before which a pass visits so many of its kind."""
        layers = self.layers[kind]
        return layers.stop - 1 - before if reverse else layers.start + before

    def number_in_model(self, index: Any, before: Any, *, reverse: bool) -> Any:
        """The number in the model of a layer. index: in its kind's stacks. before: layers that a pass visits before."""
        if self.has_one_kind:
            (layers,) = self.layers.values()
            return index + (self.number - layers.start) if self.number != layers.start else index
        return self.number + len(self.kinds) - 1 - before if reverse else self.number + before


class RepeatingLayers(NamedTuple):
    """Layers `start` to `stop` - 1 that repeat after `period` layers."""

    start: int
    stop: int
    period: int


def repeating(variants: Sequence[Any]) -> list[RepeatingLayers]:
    """Splits the layers of one kind into runs, each a loop whose body computes `period` layers.

    Greedy: from the front, the longest run whose period is repeated at least once, or is 1. A period is at most
    `LONGEST_PERIOD_OF_VARIANTS`: layers that are unrolled take their time to compile.
    """
    split: list[RepeatingLayers] = []
    start = 0
    while start < len(variants):
        rest = variants[start:]

        def length(period: int, rest=rest) -> int:
            """Counts the first layers of `rest` that repeat with this period."""
            same = (rest[i] == rest[i - period] for i in range(period, len(rest)))
            return period + next((i for i, equal in enumerate(same) if not equal), len(rest) - period)

        longest = range(1, LONGEST_PERIOD_OF_VARIANTS + 1)
        periods = [p for p in longest if p == 1 or length(p) >= 2 * p]
        period = max(periods, key=length)  # of several as long, the shortest
        split.append(RepeatingLayers(start, start + length(period), period))
        start = split[-1].stop
    return split


def order_of(kinds: Sequence[str], variants: Sequence[Any] = ()) -> tuple[LayerRef, ...]:
    """Makes the order of layers with these kinds. variants: of each of them; none: all are None."""
    layers_of_kind: dict[str, int] = {}
    order = []
    for number, kind in enumerate(kinds):
        index = layers_of_kind.get(kind, 0)
        order.append(LayerRef(kind, index, variants[number] if variants else None))
        layers_of_kind[kind] = index + 1
    return tuple(order)


def repeating_kinds(order: Sequence[LayerRef]) -> list[RepeatingLayers]:
    """Splits layers of several kinds into the runs that cost least, by dynamic programming over where a run begins.

    A layer that is compiled costs 1, and so does a loop, and each end of a loop at which the neighbouring run's layer
    is of another kind, so that transfers wait there. A pattern has at most `LONGEST_PERIOD` layers.
    """
    n = len(order)
    same = [(layer.kind, layer.variant) for layer in order]

    def edges(start: int, stop: int) -> int:
        """Counts the ends of a loop over these layers at which transfers wait."""
        after = stop < n and order[stop].kind != order[start].kind  # the first slot's kind is the one that arrives
        before = start > 0 and order[start - 1].kind != order[stop - 1].kind
        return after + before

    # From each layer on: the least cost, and the runs.
    best: list[tuple[int, list[RepeatingLayers]]] = [(0, [])] * (n + 1)
    for start in reversed(range(n)):
        cost, runs = best[start + 1]
        choices = [(cost + 1, [RepeatingLayers(start, start + 1, 1), *runs])]
        for period in range(1, min(LONGEST_PERIOD, (n - start) // 2) + 1):
            stop = start + 2 * period
            while same[stop - period : stop] == same[start : start + period]:
                cost, runs = best[stop]
                choices.append((cost + period + 1 + edges(start, stop), [RepeatingLayers(start, stop, period), *runs]))
                stop += period
        best[start] = min(choices, key=lambda choice: choice[0])
    return best[0][1]


def loops_of(
    order: Sequence[LayerRef], ends: Mapping[str, Sequence[int]] | None = None, first: int = 0
) -> list[LayerLoop]:
    """Splits the layers of an order into loops, of one kind or of several in turn.

    ends: by kind, the indices in its stacks at which one memory ends and another one begins; a loop has the layers of
    each kind in one memory. first: number in the model of the first layer.
    """
    ends = ends or {}
    loops = []
    memories = [sum(layer.index >= end for end in ends.get(layer.kind, ())) for layer in order]
    runs = repeating_kinds(order) if len({layer.kind for layer in order}) > 1 else [RepeatingLayers(0, len(order), 0)]
    for start, stop, period in runs:
        if len({layer.kind for layer in order[start : start + period or stop]}) == 1:
            loops += _loops_of_one_kind(order, memories, start, stop, first)
            continue
        whole = [memories[i : i + period] for i in range(start, stop, period)]
        begin = 0
        while begin < len(whole):  # rounds of which each kind is in one memory
            end = begin + 1
            while end < len(whole) and whole[end] == whole[begin]:
                end += 1
            a, b = start + begin * period, start + end * period
            of_kind = {(layer.kind, memory) for layer, memory in zip(order[a:b], memories[a:b], strict=True)}
            if end - begin == 1 or len(of_kind) > len({kind for kind, _ in of_kind}):
                for i in range(a, b):
                    loops += _loops_of_one_kind(order, memories, i, i + 1, first)
            else:
                loops.append(_loop(order[a:b], period, first + a))
            begin = end
    return loops


def _loops_of_one_kind(
    order: Sequence[LayerRef], memories: Sequence[int], start: int, stop: int, first: int
) -> list[LayerLoop]:
    """Splits layers `start` to `stop` - 1, which are of one kind. memories: in which each layer is."""
    loops = []
    while start < stop:
        end = start + 1
        while end < stop and memories[end] == memories[start]:
            end += 1
        for run in repeating([layer.variant for layer in order[start:end]]):
            loops.append(_loop(order[start + run.start : start + run.stop], run.period, first + start + run.start))
        start = end
    return loops


def _loop(layers: Sequence[LayerRef], period: int, number: int) -> LayerLoop:
    """Makes the loop of these layers. number: of the first one in the model."""
    kinds, variants = (tuple(x) for x in zip(*((layer.kind, layer.variant) for layer in layers), strict=True))
    indices: dict[str, list[int]] = {}
    for layer in layers:
        indices.setdefault(layer.kind, []).append(layer.index)
    return LayerLoop({kind: range(x[0], x[-1] + 1) for kind, x in indices.items()}, kinds, variants, period, number)
