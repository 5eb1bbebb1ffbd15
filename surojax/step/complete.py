"""The state that a file with two slots keeps complete: its layers, and shards of what is in memory (memory/slots.py).

Work weights are not kept, since they are master weights cast, nor gradients and residuals, which a step makes anew. So
what is in memory is the state of the final norm, and of embedding and head unless that is in files, and the history of
delayed scales.
"""

import math
from typing import Any

import jax
import numpy as np

from surojax.memory.in_file import InFiles
from surojax.memory.layer_file import Store
from surojax.parallel.feed import from_host
from surojax.placement.param import part_of, with_part
from surojax.step.first_state import work_weights
from surojax.step.state import TrainState


def in_memory(state: TrainState) -> list:
    """Arrays of a state or plan that are in memory and cannot be recomputed from others."""
    kept = state.master, state.moments, state.history
    return InFiles(kept).in_memory(kept)


def reserve(plan: TrainState, store: Store) -> None:
    """Reserves room for the shards of a planned state; does nothing for a store without slots."""
    if store.slots is None:
        return
    sizes = []
    for x in in_memory(plan):
        shard = math.prod(x.sharding.shard_shape(x.shape))
        sizes += [shard * x.dtype.itemsize] * (x.size // shard)
    store.places.reserve_others(sizes)


def reserved_shards(state: TrainState) -> list[np.ndarray]:
    """Copies to host the shards of a state for which `reserve` has reserved room."""
    shards = []
    for x in in_memory(state):
        by_start = {_start(shard.index, x.shape): shard.data for shard in x.addressable_shards}
        shards += [jax.device_get(by_start[start]) for start in sorted(by_start)]
    return shards


def complete_state(store: Store, plan: TrainState, step: int, base: dict | None = None) -> TrainState:
    """Reads the complete state of this step from a store. base: work weights that are not trained, see
    `restore.restore`. Raises NvmeError if it is damaged."""
    raw = iter(store.load())

    def one(x: Any) -> jax.Array:
        indices = x.sharding.devices_indices_map(x.shape).values()
        starts = sorted({_start(index, x.shape) for index in indices})
        shape = x.sharding.shard_shape(x.shape)
        by_start = {start: next(raw).view(x.dtype).reshape(shape) for start in starts}
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: by_start[_start(index, x.shape)])

    in_files = InFiles((plan.master, plan.moments, plan.history))
    planned = (plan.master, plan.moments, plan.history)
    master, moments, history = in_files.joined(map(one, in_files.in_memory(planned)), in_files.files(planned))
    trained = plan._replace(weights=part_of(plan.weights, plan.master))
    weights = with_part(base or {}, work_weights(master, trained))
    return TrainState(from_host(np.int32(step), plan.step.sharding), weights, master, moments, history)


def _start(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns where a shard starts in its array."""
    assert index is not None
    return tuple(part.indices(size)[0] for part, size in zip(index, shape, strict=True))
