"""The loops over layers: inside a program, with every way to move a layer, and by the host."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from surojax.memory.by_host import by_host
from surojax.memory.host import balanced, put
from surojax.placement.home import DEVICE, HOST
from surojax.step.passes import Lane
from surojax.step.stream import Stream, sweep

WAYS = [
    (ahead, behind, reverse, home, layers)
    for ahead, behind, reverse, home in itertools.product((0, 1), (0, 1), (False, True), (DEVICE, HOST))
    for layers in (1, 5)
]


@pytest.mark.parametrize("ahead, behind, reverse, home, layers", WAYS)
def test_a_layer_is_read_and_written_once_however_it_moves(ahead, behind, reverse, home, layers):
    """x becomes carry + 2 x, carry becomes carry + x: wrong if a layer is late, out of order, or lost."""
    stack = np.arange(1.0, 3 * layers + 1, dtype=np.float32).reshape(layers, 3)
    stream = Stream(Lane("x", reads=True, writes=True, ahead=ahead, behind=behind))
    first, last, step = (layers - 1, 0, -1) if reverse else (0, layers - 1, 1)

    def body(values, carry):
        return carry + values["x"], {"x": carry + 2 * values["x"]}

    @jax.jit
    def program(stack):
        flights = {"x": stream.begin(put(stack, home), first, step)}
        carry, flights = sweep(range(layers), {"x": stream}, body, jnp.zeros(3), flights, reverse=reverse)
        return carry, put(stream.end(flights["x"], last), DEVICE)

    carry, found = program(stack)
    expected, total = stack.copy(), np.zeros(3, np.float32)
    for l in range(layers)[::step]:
        expected[l] = total + 2 * stack[l]
        total += stack[l]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(carry, total)


def test_the_host_reads_a_layer_early_and_writes_it_late():
    """At most four layers are somewhere between the two; the program of a layer begins when the one before is done."""
    events = []
    done = []

    def read(l):
        events.append(("read", l))
        return l

    def compute(l, layer):
        assert layer == l and [x for kind, x in events if kind == "computed"] == list(range(l))
        assert len([x for kind, x in events if kind == "read"]) - len(done) <= 4
        events.append(("computed", l))
        return 10 * layer

    def write(l, layer):
        done.append((l, layer, threading.current_thread().name))

    by_host(range(6), read, compute, write)
    assert [(l, layer) for l, layer, _ in done] == [(l, 10 * l) for l in range(6)]
    assert all(name.startswith("write-behind") for *_, name in done)


@pytest.mark.parametrize("fails", ["read", "write"])
def test_what_a_thread_raises_ends_the_loop(fails):
    computed = []

    def function(kind):
        def one(l, *_):
            if kind == fails and l == 2:
                raise OSError(kind)
            return l

        return one

    with pytest.raises(OSError, match=fails):
        by_host(range(8), function("read"), lambda l, x: computed.append(l), function("write"))
    assert len(computed) < 8


@pytest.mark.parametrize(
    "sizes, inputs, read_first",
    [  # from the largest on: written first until as many bytes are read first; inputs are read without being written
        ([1, 8, 4, 3, 4], [], [True, False, True, False, True]),
        ([1, 8, 4, 3, 4], [6], [False, False, True, True, False]),
        ([], [6], []),
    ],
)
def test_half_of_the_bytes_are_read_before_they_are_written(sizes, inputs, read_first):
    found = []

    def program(stacks, others):
        in_host = lambda arrays: [put(x, HOST) for x in arrays]
        found.append(balanced([*in_host(stacks), jnp.zeros(99, jnp.int8)], in_host(others)))

    jax.eval_shape(program, *([np.zeros(n, np.int8) for n in of_one] for of_one in (sizes, inputs)))
    assert found[0][:-1] == read_first  # what is on the device has no part in it
