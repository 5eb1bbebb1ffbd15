"""Pipeline parallelism between blocks: activations move from stage to stage, and are divided over stages outside them.

Within the stages of `pp`, a stage has whole activations of its own microbatch (or its tensor-parallel part of them).
Embedding, head and loss are computed by all stages together, with a part of the vocabulary on each (step/outer.py). For
them every stage has a part of one microbatch's sequences:

    embedding: parts --collect--> stage 0          its gradient: stage 0    --spread--> parts
    head:      last stage --spread--> parts        its gradient: parts --collect--> last stage

All functions are collectives of all stages, so all stages must call them, in the same order. Shape suffixes: B batch, S
sequence, s this stage's part of it, D hidden size.
"""

import jax
import jax.numpy as jnp

from surojax.parallel.collectives import device_number
from surojax.placement.mesh import PIPELINE


def stage() -> tuple[jax.Array | int, int]:
    """(number of this device's stage, number of stages)."""
    return device_number(PIPELINE)


def own_part(x_BS: jax.Array) -> jax.Array:
    """This stage's part of sequences that all stages have: `[B, s]`."""
    number, stages = stage()
    length = x_BS.shape[1] // stages
    return jax.lax.dynamic_slice_in_dim(x_BS, number * length, length, 1)


def collect(x_BsD: jax.Array) -> jax.Array:
    """All-gathers whole sequences from the parts of all stages."""
    return jax.lax.all_gather(x_BsD, PIPELINE, axis=1, tiled=True)


def spread(x_BSD: jax.Array, source: int) -> jax.Array:
    """This stage's part of the sequences that stage `source` has."""
    number, _ = stage()
    x_BSD = jnp.where(number == source, x_BSD, 0)
    return jax.lax.psum_scatter(x_BSD, PIPELINE, scatter_dimension=1, tiled=True)


def to_next(x_BSD: jax.Array) -> jax.Array:
    """Sends values to the next stage; returns the values of the stage before, zeros in the first stage."""
    _, stages = stage()
    return jax.lax.ppermute(x_BSD, PIPELINE, [(i, i + 1) for i in range(stages - 1)])


def to_previous(x_BSD: jax.Array) -> jax.Array:
    """Sends values to the previous stage; returns the values of the stage after, zeros in the last stage."""
    _, stages = stage()
    return jax.lax.ppermute(x_BSD, PIPELINE, [(i + 1, i) for i in range(stages - 1)])
