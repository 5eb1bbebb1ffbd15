"""The loop over layers inside a compiled program: a layer's tensors arrive early and leave late, as passes.py declares.

Stacks `[L, ...]` of layers are in device memory or in pinned host memory; a program reads and writes one layer of them
at a time (memory/host.py). What is on its way is in the loop's carry, so that copies and collectives overlap the layers
that compute. XLA's scheduler decides what starts when (assembly.compiler_options).

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
  (`_over_places`).
* Layers of several segments in turn are one loop, with a slot in its body for each layer of the pattern. Each segment
  has its own layer on the way, so that all stacks are named linearly, and a barrier over the whole carry between slots.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import exchange, read, write_layer
from surojax.models.model import PLAIN, Variant
from surojax.models.order import LayerLoop
from surojax.parallel import collectives
from surojax.step.passes import Lane

# Tokens whose forward pass lasts about as long as the transfers of an update beside it: 2 FLOPs a parameter and token
# at 140 TFLOP/s, 10 bytes a parameter each way at 22 GB/s (RTX 4090). All-gathers take a third of that.
HIDING_TOKENS = 1 << 15


class Layer(NamedTuple):
    """One layer of a pass.

    index: in its segment's stacks, linear in the loop's counter. in_turn: the same, but known only when the layer
    before is done. number: in the model. variant: static. step: to the next layer of its segment, 1 or -1.
    """

    index: Any
    in_turn: Any
    number: Any
    variant: Variant
    step: int


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


class InCarry(NamedTuple):
    """Flights in the carry of a loop: all stacks, then what is early, then what is late; in the order of the lanes.

    XLA's scheduler looks at this order. By lane, or in the order of the alphabet, 7B with five offloads on an RTX 4090
    took 1.5 to 8 % longer (predicted).
    """

    stacks: list
    early: list
    late: list


def over(
    loop: LayerLoop,
    lanes: dict[str, dict[str, Any]],
    bodies: dict[str, Callable],
    carry: Any,
    flights: dict[str, dict[str, Flight]],
    *,
    reverse: bool = False,
    in_body: int | None = None,
    fixed: Callable = jnp.int32,
) -> tuple[Any, dict[str, dict[str, Flight]]]:
    """Runs (carry, results, flights) = body(Layer, values, carry, flights) over a loop; returns (carry, flights).

    lanes, bodies, flights: by segment; a body gets and returns the flights of its own. lanes, flights, values, results:
    by name; lanes have the methods of a `Stream`. The body may return flights that are known later. in_body: layers in
    the body of a loop over one segment, None: the loop's period. fixed: see `_over_places`.
    """
    step = -1 if reverse else 1
    names = [(segment, name) for segment, of_segment in flights.items() for name in of_segment]
    loop = loop if in_body is None else loop._replace(period=in_body)

    def one(place: tuple[Any, Any], in_turn: Any, kind: str, variant: Variant, state):
        before, in_loop = place
        carry, carried = state
        index, in_turn = (loop.index(x, kind, reverse=reverse) for x in (before, in_turn))
        number = loop.number_in_model(index, in_loop, reverse=reverse)
        layer = Layer(index, in_turn, number, variant, step)
        values = {}
        flights = _out_of_carry(names, carried)
        own = flights[kind]
        for name, lane in lanes[kind].items():
            values[name], own[name] = lane.arrive(own[name], layer)
        carry, results, own = bodies[kind](layer, values, carry, own)
        flights[kind] = own | {name: lanes[kind][name].leave(own[name], new, layer) for name, new in results.items()}
        return carry, _in_carry(flights[segment][name] for segment, name in names)

    state = (carry, _in_carry(flights[segment][name] for segment, name in names))
    carry, carried = _over_places(loop, reverse, one, state, fixed)
    return carry, _out_of_carry(names, carried)


def _over_places(loop: LayerLoop, reverse: bool, layer: Callable, carry: tuple[Any, InCarry], fixed: Callable):
    """Computes carry = layer((before, in loop), in_turn, kind, variant, carry) for every layer of a loop.

    before, in loop: layers of its kind, and of the loop, that are visited before it. They are linear in the loop's
    counter; what depends on nothing else, XLA may read ahead. in_turn: the same as `before`, but known only when the
    layer before is done. What is left over behind the last whole period is unrolled, and so is what would be a loop of
    one round, which XLA would dissolve. fixed: makes `before` of a layer that is unrolled.
    """
    places, period = loop.places(reverse=reverse), loop.period
    n = len(places)
    looped = n - n % period if n >= 2 * period else 0

    def after(before, carry):
        """Returns (before, carry) behind a barrier: both known only when the layer before is done.

        Between rounds of a loop its carry has this effect. Without either, XLA merges the transfers of layers that it
        sees side by side, or makes all of them at the beginning, so that several layers are in memory at once, and
        hands activations on unrounded.
        """
        return jax.lax.optimization_barrier((jnp.int32(before), carry))

    def body(i, carry):
        for j, (kind, variant) in enumerate(places[:period]):
            place = loop.visited(i, j, reverse=reverse)
            in_turn = place[0]
            if j:
                in_turn, carry = after(in_turn, carry)
            carry = layer(place, in_turn, kind, variant, carry)
        return carry

    if looped:
        carry = jax.lax.fori_loop(0, looped // period, body, carry)
    for number in range(looped, n):
        in_turn, (carry, flights) = after(number, carry)
        # Prefetched shards are gathered in this layer, on CPUs too only when the layer before is done.
        carry = carry, flights._replace(early=collectives.behind((carry, flights.late), flights.early))
        place = fixed(number)
        carry = layer((place, place), in_turn, *places[number], carry)
    return carry if looped == n else jax.lax.optimization_barrier(carry)


def _in_carry(flights: Iterable[Flight]) -> InCarry:
    return InCarry(*map(list, zip(*flights, strict=True)))


def _out_of_carry(names: Iterable[tuple[str, str]], carried: InCarry) -> dict[str, dict[str, Flight]]:
    flights: dict[str, dict[str, Flight]] = {}
    for (segment, name), *flight in zip(names, *carried, strict=True):
        flights.setdefault(segment, {})[name] = Flight(*flight)
    return flights


def sweep(
    layers: range, lanes: dict[str, Any], body: Callable, carry: Any, flights: dict[str, Flight], **options: Any
) -> tuple[Any, dict[str, Flight]]:
    """Like `over`, for equal layers of one segment and a body (values, carry) -> (carry, results)."""

    def one(layer: Layer, values, carry, flights):
        return *body(values, carry), flights

    n = len(layers)
    loop = LayerLoop({"": layers}, ("",) * n, (PLAIN,) * n, 1, layers.start)
    carry, done = over(loop, {"": lanes}, {"": one}, carry, {"": flights}, **options)
    return carry, done[""]


def hides_transfers(tokens: int) -> bool:
    """True if a pass over so many tokens lasts longer than the transfers beside it."""
    return tokens >= HIDING_TOKENS


def comes_in_pairs(n: int, period: int, *, odd: bool = False) -> bool:
    """True if a loop over n layers may have two of them in its body. odd: n may be odd.

    What is left of an odd number is unrolled. Two layers without a loop crash XLA (jax 0.12).
    """
    return period == 1 and n >= 4 and (odd or n % 2 == 0)
