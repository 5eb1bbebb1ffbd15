"""Does it fit? Adds up the bytes of a run before anything is compiled, and says what to change when it does not.

The state is exact: it is the plan's. What a step needs beside it is an estimate from shapes: accumulators and saved
activations exactly as the engine allocates them, plus the largest moment of one block or of one slice of logits.
"""

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import psutil

from surojax import blueprint, placement
from surojax.errors import ConfigError
from surojax.mesh import DATA, SHARD

GiB = 2**30


def estimate(run: blueprint.Blueprint, batch: int, sequence_len: int) -> dict[str, int]:
    """Bytes per device by class, for microbatches of `batch` sequences of `sequence_len` tokens."""
    engine, plan = run.engine, run.plan
    table, blocks = engine.placement, run.params["blocks"]
    itemsize = jnp.dtype(table.weights.dtype).itemsize
    layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], table.weights.dtype), blocks)
    x = jax.ShapeDtypeStruct((batch, sequence_len, run.model.hidden_size), table.weights.dtype)
    saved = jax.eval_shape(lambda w, x: jax.vjp(engine.model.block, w, x, saveable_args=(False, True))[1], layer, x)
    layer_bytes, x_bytes, saved_bytes = _bytes(layer), _bytes(x), _bytes(saved)
    grad_size = jnp.dtype(table.grads.dtype).itemsize
    shards = run.mesh.shape[SHARD]
    logits = batch * sequence_len // engine.lmhead_chunks * run.model.vocab_size
    block = 2 * layer_bytes + (2 * saved_bytes if engine.recompute_block else saved_bytes)
    return {
        "weights": placement.bytes_per_device(plan.weights),
        "master": placement.bytes_per_device(plan.master),
        "moments": placement.bytes_per_device(plan.moments),
        "gradients": _size(blocks) * grad_size // (shards if table.grads.sharded else 1)
        + _size(run.params["outer"]) * grad_size,
        "activations": run.model.num_hidden_layers * (x_bytes if engine.recompute_block else saved_bytes),
        "working space": max(block, logits * (4 + 2 * itemsize)) + 2 * x_bytes,
    }


def check_fit(
    c: ml_collections.ConfigDict, run: blueprint.Blueprint, devices, available: int | None = None
) -> dict[str, int]:
    """The estimate per device of a run that fits; `available` bytes per device are measured when not given.

    Raises ConfigError naming what is needed, what there is, and changes that would make it fit.
    """
    need = estimate(run, c.per_device_batch_size, c.sequence_len)
    available = available_bytes(devices) if available is None else available
    if sum(need.values()) <= available:
        return need
    parts = ", ".join(f"{name} {size / GiB:.1f}" for name, size in need.items())
    what = (
        f"{devices[0].device_kind} device"
        if len(devices) == 1
        else f"of {len(devices)} {devices[0].device_kind} devices"
    )
    raise ConfigError(
        f"does not fit: needs {sum(need.values()) / GiB:.1f} GiB per device ({parts}), each {what} has {available / GiB:.1f} GiB free; "
        f"what would change it: {'; '.join(_advice(c, len(devices), available, devices[0].platform == 'cpu'))}"
    )


def _advice(c, n: int, available: int, cpu: bool) -> list[str]:
    """Changes, from mild to strong, with the bytes each leaves; up to the first that fits."""
    changes = [
        {"recompute_block": True, "lmhead_chunks": max(c.lmhead_chunks, c.per_device_batch_size)},
        {"per_device_batch_size": 1},
        {"opt_m_dtype": "bfloat16", "opt_v_dtype": "bfloat16", "accum_dtype": "bfloat16"},
        {"zero_level": 3, "dp_replicate_size": 1, "dp_shard_size": -1},
    ]
    sofar, lines = ml_collections.ConfigDict(c.to_dict()), []
    for change in changes:
        change = {k: v for k, v in change.items() if sofar[k] != v}
        if not change or (n == 1 and "zero_level" in change):
            continue
        sofar.update(change)
        text = " ".join(f"{k}={v}" for k, v in change.items())
        if fits := _try(sofar, n, available, lines, text):
            return lines
    if cpu:
        return [*lines, "a smaller model (configs/llama125m.py), or a machine with more memory"]
    sofar.update({"zero_level": 3, "dp_replicate_size": 1, "dp_shard_size": -1})
    fits = any(
        _try(sofar, gpus, available, lines, f"gpus={gpus} zero_level=3") for gpus in (2, 4, 8, 16, 32, 64) if gpus > n
    )
    return lines if fits else [*lines, "a smaller model, or larger GPUs"]


def _try(c, n: int, available: int, lines: list[str], text: str) -> bool:
    mesh = jax.sharding.AbstractMesh((c.dp_replicate_size, n // c.dp_replicate_size), DATA)
    need = sum(estimate(blueprint.draw(c, mesh, 1000), c.per_device_batch_size, c.sequence_len).values())
    lines.append(f"{'then ' if lines else ''}{text} -> {need / GiB:.1f} GiB{' (fits)' if need <= available else ''}")
    return need <= available


def available_bytes(devices) -> int:
    """Bytes one device can give: a GPU's own limit; for CPU devices an equal part of the machine's free memory."""
    stats = devices[0].memory_stats() if devices[0].platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return psutil.virtual_memory().available // len(devices)


def _size(tree) -> int:
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(tree))


def _bytes(tree) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
