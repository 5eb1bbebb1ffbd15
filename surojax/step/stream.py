"""The loop over layers inside a compiled program: a layer's tensors arrive early and leave late, as passes.py declares.

Stacks `[L, ...]` of layers are in device memory or in pinned host memory; a program reads and writes one layer of them
at a time (memory/host.py). What is on its way is in the loop's carry, so that copies and collectives overlap the layers
that compute. XLA's scheduler decides what starts when (assembly.compiler_options; `hlo.overlaps` reads its decisions).

What XLA needs, and why the loop is as it is:

* Loops carry whole stacks and change one layer in place. `lax.scan` with xs and ys would copy a stack (measured on
  compiled Llama-7B: 123 GiB instead of 85).
* Copy engines copy only what is at an offset that is linear in the loop's counter. So a layer that arrives early or
  leaves late is named by its number, though it may lie beyond the ends of the stack, where slices take the nearest one:
  the first layer written late writes what is there already, and what the last layers read ahead is right for the pass
  in the other direction, or is read again (`Fetch.begin_pass`).
* A stack that is read and written in one layer is written first. Where both directions of the host link are to be busy
  at once, every other stack is read first, with a barrier between, without which XLA copies the stack (`exchange`).
* With one layer in a loop's body, XLA copies what is on its way into the carry. Two layers exchange their places
  (`layers_in_body`). Layers that the loop does not have are unrolled, one after another behind barriers
  (`model.loop_over`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from surojax.memory.host import exchange, read, write_layer
from surojax.models.model import PLAIN, Variant, loop_over
from surojax.step.passes import Lane

# Tokens whose forward pass lasts about as long as the transfers of an update beside it: 2 FLOPs a parameter and token
# at 140 TFLOP/s, 10 bytes a parameter each way at 22 GB/s (RTX 4090). All-gathers take a third of that.
HIDING_TOKENS = 1 << 15


class Layer(NamedTuple):
    """One layer of a pass.

    index: in its segment's stacks, linear in the loop's counter. in_turn: the same, but known only when the layer
    before is done. number: in the model. variant: static. step: to the next layer, 1 or -1.
    """

    index: Any
    in_turn: Any
    number: Any
    variant: Variant
    step: int


class LayerLoop(NamedTuple):
    """Layers of a segment that form one loop: weights in one memory, variants that repeat after `period`."""

    layers: range
    variants: tuple[Variant, ...]
    period: int


class Flight(NamedTuple):
    """State of a lane during a pass: its stacks, prefetched layers (early), and results to write back (late)."""

    stack: Any = None
    early: Any = None
    late: Any = None


class Stream(NamedTuple):
    """Moves a lane's layers to and from its stacks, which are in the memory that their types name.

    index: a function from a layer's index in its segment to that in the stacks. are_read_first: see `host.exchange`, of
    stacks that are read early and written late.
    """

    lane: Lane
    index: Callable = lambda l: l
    are_read_first: Sequence[bool] = ()

    def arrive(self, flight: Flight, layer: Layer) -> tuple[Any, Flight]:
        """Returns (the layer's values, the flight while the layer computes). Lanes are read one layer early at most."""
        stack, early, late = flight
        lane = self.lane
        before, here, after = (self.index(layer.index + i * layer.step) for i in (-1, 0, 1))
        if lane.ahead and lane.behind:
            stack, after_next = exchange(stack, late, before, after, are_read_first=self.are_read_first)
            return early, Flight(stack, after_next, late)
        if lane.behind:
            stack = write_layer(stack, late, before)
        if lane.ahead:
            return early, Flight(stack, read(stack, after), late)
        return read(stack, here) if lane.reads else None, Flight(stack, None, late)

    def leave(self, flight: Flight, new, layer: Layer) -> Flight:
        """Adds the layer's results to the flight."""
        if self.lane.behind:
            return flight._replace(late=new)
        return flight._replace(stack=write_layer(flight.stack, new, self.index(layer.index)))

    def begin(self, stack, first: int, step: int = 1) -> Flight:
        """Starts a flight before layer `first`. What it writes late is there already."""
        early = read(stack, self.index(first)) if self.lane.ahead else None
        return Flight(stack, early, read(stack, self.index(max(first - step, 0))) if self.lane.behind else None)

    def end(self, flight: Flight, last: jax.Array | int) -> Any:
        """Finishes a flight after layer `last` and returns its stacks."""
        return write_layer(flight.stack, flight.late, self.index(last)) if self.lane.behind else flight.stack


def over(
    run: LayerLoop,
    lanes: dict[str, Any],
    body: Callable,
    carry: Any,
    flights: dict[str, Flight],
    *,
    reverse: bool = False,
    first_number: int = 0,
    in_body: int | None = None,
    fixed: Callable = jax.numpy.int32,
) -> tuple[Any, dict[str, Flight]]:
    """Runs (carry, results, flights) = body(Layer, values, carry, flights) over a run; returns (carry, flights).

    lanes, flights, values, results: by name; lanes have the methods of a `Stream`. The body may return flights that are
    known later. first_number: of the segment's first layer in the model. in_body: layers in the body of
    the loop, None: the run's period. fixed: see `model.loop_over`.
    """
    variants = run.variants[::-1] if reverse else run.variants
    step = -1 if reverse else 1
    names = list(flights)

    def one(k, in_turn, variant: Variant, state):
        carry, carried = state
        index, in_turn = (run.layers.stop - 1 - x if reverse else run.layers.start + x for x in (k, in_turn))
        layer = Layer(index, in_turn, index + first_number if first_number else index, variant, step)
        values = {}
        flights = _out_of_carry(names, carried)
        for name, lane in lanes.items():
            values[name], flights[name] = lane.arrive(flights[name], layer)
        carry, results, flights = body(layer, values, carry, flights)
        flights |= {name: lanes[name].leave(flights[name], new, layer) for name, new in results.items()}
        return carry, _in_carry(flights[name] for name in names)

    state = (carry, _in_carry(flights.values()))
    carry, carried = loop_over(variants, in_body or run.period, one, state, fixed)
    return carry, _out_of_carry(names, carried)


class InCarry(NamedTuple):
    """Flights in the carry of a loop: all stacks, then what is early, then what is late; in the order of the lanes.

    XLA's scheduler looks at this order. By lane, or in the order of the alphabet, 7B with five offloads on an RTX 4090
    took 1.5 to 8 % longer (predicted).
    """

    stacks: list
    early: list
    late: list


def _in_carry(flights: Iterable[Flight]) -> InCarry:
    return InCarry(*map(list, zip(*flights, strict=True)))


def _out_of_carry(names: Iterable[str], carried: InCarry) -> dict[str, Flight]:
    return {name: Flight(*flight) for name, *flight in zip(names, *carried, strict=True)}


def sweep(
    layers: range, lanes: dict[str, Any], body: Callable, carry: Any, flights: dict[str, Flight], **options: Any
) -> tuple[Any, dict[str, Flight]]:
    """Like `over`, for equal layers and a body (values, carry) -> (carry, results)."""

    def one(layer: Layer, values, carry, flights):
        return *body(values, carry), flights

    return over(LayerLoop(layers, (PLAIN,) * len(layers), 1), lanes, one, carry, flights, **options)


def hides_transfers(tokens: int) -> bool:
    """True if a pass over so many tokens lasts longer than the transfers beside it."""
    return tokens >= HIDING_TOKENS


def comes_in_pairs(n: int, period: int, *, odd: bool = False) -> bool:
    """True if a loop over n layers may have two of them in its body. odd: n may be odd.

    What is left of an odd number is unrolled. Two layers without a loop crash XLA (jax 0.12).
    """
    return period == 1 and n >= 4 and (odd or n % 2 == 0)
