"""The order of a model's layers of several kinds, split into loops whose bodies compute one pattern of layers.

Layers of a kind have equal parameters, stacked by kind, `[layers of the kind, ...]`. A pass visits them in the model's
order. `runs` splits the order into loops, whose bodies compute one layer for each slot of a repeating pattern.
In round k the layer of a slot has the index `stride * k + offset` in the stacks of its kind. That is linear in the
loop's counter, and so are the indices of its neighbours, whatever their kinds, so that copy engines move them.

Nothing here knows arrays. A step does not run such orders yet: its loops are those of `model.runs`, over one kind.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

LONGEST_PERIOD = 12


class LayerRef(NamedTuple):
    """A layer of a model. index: in the stacks of its kind. variant: what is static about it besides its kind."""

    kind: str
    index: int
    variant: Any = None


class Slot(NamedTuple):
    """A layer of a loop's body, of index stride * k + offset in round k."""

    kind: str
    variant: Any
    stride: int
    offset: int

    def index(self, k: Any) -> Any:
        """The index in round k, a number or a loop's counter; a traced one is spelled as XLA reads it most easily."""
        if isinstance(k, int):
            return self.stride * k + self.offset
        scaled = k if abs(self.stride) == 1 else k * abs(self.stride)
        return scaled + self.offset if self.stride > 0 else self.offset - scaled

    def after(self, rounds: int) -> "Slot":
        """The slot so many rounds later."""
        return self._replace(offset=self.index(rounds))


class Run(NamedTuple):
    """Layers of one loop of `rounds`, whose body computes one layer for each slot; one round is unrolled."""

    rounds: int
    slots: tuple[Slot, ...]

    def slot(self, j: int) -> Slot:
        """The slot of layer j of a round; j < 0 and j >= len(slots) are layers of the rounds before and after it."""
        rounds, j = divmod(j, len(self.slots))
        return self.slots[j].after(rounds)

    def backward(self) -> "Run":
        """The run from its last layer to its first."""
        last = self.rounds - 1
        return Run(self.rounds, tuple(s.after(last)._replace(stride=-s.stride) for s in reversed(self.slots)))

    def layers(self) -> list[LayerRef]:
        """The layers in the order in which the run visits them."""
        return [LayerRef(s.kind, s.index(k), s.variant) for k in range(self.rounds) for s in self.slots]


def order_of(kinds: Sequence[str], variants: Sequence[Any] = ()) -> tuple[LayerRef, ...]:
    """Makes the order of layers with these kinds. variants: of each of them; none: all are None."""
    layers_of_kind: dict[str, int] = {}
    order = []
    for number, kind in enumerate(kinds):
        index = layers_of_kind.get(kind, 0)
        order.append(LayerRef(kind, index, variants[number] if variants else None))
        layers_of_kind[kind] = index + 1
    return tuple(order)


def runs(order: Sequence[LayerRef]) -> list[Run]:
    """Splits an order into the runs that cost least, by dynamic programming over where a run begins.

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

    # From each layer on: the least cost, and the pieces (first layer, rounds, period).
    best: list[tuple[int, list[tuple[int, int, int]]]] = [(0, [])] * (n + 1)
    for start in reversed(range(n)):
        cost, pieces = best[start + 1]
        choices = [(cost + 1, [(start, 1, 1), *pieces])]
        for period in range(1, min(LONGEST_PERIOD, (n - start) // 2) + 1):
            stop = start + 2 * period
            while stop <= n and same[stop - period : stop] == same[start : start + period]:
                cost, pieces = best[stop]
                piece = start, (stop - start) // period, period
                choices.append((cost + period + 1 + edges(start, stop), [piece, *pieces]))
                stop += period
        best[start] = min(choices, key=lambda choice: choice[0])
    return _joined(order, best[0][1])


def _joined(order: Sequence[LayerRef], pieces: list[tuple[int, int, int]]) -> list[Run]:
    """Makes the runs of pieces (first layer, rounds, period); unrolled neighbours become one run."""
    split: list[Run] = []
    for start, rounds, period in pieces:
        body = order[start : start + period]
        of_kind = [layer.kind for layer in body]
        slots = tuple(Slot(layer.kind, layer.variant, of_kind.count(layer.kind), layer.index) for layer in body)
        if rounds == 1 and split and split[-1].rounds == 1:
            slots = split.pop().slots + slots
        split.append(Run(rounds, slots))
    return split


def in_pairs(run: Run) -> list[Run]:
    """Rewrites a loop over single layers as one over pairs, which exchange their places on the device.

    An odd layer is unrolled behind it. Other runs stay: longer bodies exchange places by themselves.
    """
    if len(run.slots) != 1 or run.rounds < 4:
        return [run]
    (slot,) = run.slots
    half, odd = divmod(run.rounds, 2)
    pair = tuple(slot._replace(stride=2 * slot.stride, offset=slot.index(i)) for i in (0, 1))
    return [Run(half, pair)] + [Run(1, (slot.after(run.rounds - 1),))] * odd


def directed(of_model: list[Run], *, reverse: bool) -> list[Run]:
    """The runs of a pass, from the last layer to the first if `reverse`."""
    return [run.backward() for run in reversed(of_model)] if reverse else of_model
