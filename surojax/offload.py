"""Host memory inside a compiled program: stacks of layers that rest there, and the copies to and from the device.

XLA makes each of them an asynchronous copy of the part that is asked for: reading layer l of a stack that rests in host
memory moves one layer. An array's type says where it is, so code that reads and writes layers need not know.
"""

from typing import Any, Literal

import jax

Home = Literal["device", "host", "nvme"]  # arrays are in one of the first two; see nvme.py for the third
Device, Host = jax.memory.Space.Device, jax.memory.Space.Host
SPACE: dict[str, Any] = {"device": Device, "host": Host}
MEMORY_KIND: dict[str, str] = {"device": "device", "host": "pinned_host"}


def put(tree, home: Home):
    """The values in that memory."""
    return jax.tree.map(lambda x: move(x, SPACE[home]), tree)


def move(x: jax.Array, space) -> jax.Array:
    """x in a memory space; nothing happens where it is there already."""
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)


def read(tree, l: jax.Array | int):
    """Layer l of stacked arrays `[L, ...]`, in device memory."""
    one = lambda x: jax.lax.dynamic_index_in_dim(x, l, 0, keepdims=False, allow_negative_indices=False)
    return jax.tree.map(lambda x: move(one(x), Device), tree)


def write(tree, new, l: jax.Array | int):
    """Stacked arrays with layer l replaced, in the memory where they rest, in place when the compiler can."""

    def one(x, y):
        y = move(y.astype(x.dtype), jax.typeof(x).memory_space)
        return jax.lax.dynamic_update_index_in_dim(x, y, l, 0, allow_negative_indices=False)

    return jax.tree.map(one, tree, new)
