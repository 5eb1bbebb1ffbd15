"""Host memory inside a compiled step: copies between pinned host memory and the device.

XLA makes each of them an asynchronous copy of the part that is asked for: reading layer l of a stack that rests in host
memory moves one layer. An array's type says where it is, so code that reads and writes layers need not know.
"""

from typing import Literal

import jax

Home = Literal["device", "host"]
Device, Host = jax.memory.Space.Device, jax.memory.Space.Host
SPACE = {"device": Device, "host": Host}
MEMORY_KIND: dict[str, str] = {"device": "device", "host": "pinned_host"}


def put(tree, home: Home):
    """The values in that memory."""
    return jax.tree.map(lambda x: move(x, SPACE[home]), tree)


def move(x: jax.Array, space) -> jax.Array:
    """x in a memory space; nothing happens where it is there already."""
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)
