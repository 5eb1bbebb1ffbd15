"""Does it fit? Adds up the bytes of a run before anything is compiled, and says what to change when it does not.

The state is exact: it is the plan's. What a step needs beside it is computed from shapes: accumulators and saved
activations as the engine allocates them, and a working space, which is the largest moment of one block's backward pass,
one slice of logits, or one layer's optimizer update.

Estimate / `compiled.memory_analysis()` of the real step (arguments and temporaries; jax 0.12, 2026-11):

* XLA's GPU compiler, on a machine without a GPU: configs/llama{125m,1b,7b}.py and qwen32b.py on RTX 4090, llama70b.py
  on H100, on 1 to 8 GPUs, ZeRO 1 to 3, with nothing, one class, the state, or everything offloaded, state in files,
  with and without recomputation, flash attention and communication in 8 bits: 26 variants, 0.99 to 1.06.
* CPU, 32 variants of a 5M-parameter model on 1 and 4 virtual devices: 0.95 to 1.24 (six of them again with the present
  engine, in tests/test_fit.py: within 0.9 and 1.4).

Not counted: cuDNN's workspaces and fragmentation (some hundred MiB on a GPU), and the host's copy of a checkpoint while
it is written (master weights and moments).
"""

import copy
import dataclasses
import math
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import psutil

from surojax import blueprint, placement
from surojax.collectives import WHOLE, check_copy_engine
from surojax.config import RECOMPUTE_PARTS, Config, divisor
from surojax.errors import ConfigError
from surojax.fp8 import quantise_weights
from surojax.mesh import DATA, SHARD
from surojax.models.layers import Recompute
from surojax.models.llama import LlamaConfig, functions
from surojax.precision import check_recipe
from surojax.quantize import is_quantized

GiB = 2**30
POOL, DEFAULT_POOL = (
    0.95,
    0.75,
)  # of a GPU's memory that JAX takes: at most, which leaves the driver its part; by itself
POOL_SETTING = f"XLA_PYTHON_CLIENT_MEM_FRACTION={POOL}"  # in the environment
NVME_LAYERS = 4  # in host memory at most: one is read ahead, one is in use before and after its update, one is written
SHARDED = {
    "zero_level": 3,
    "shard_weights": None,
    "shard_gradients": None,
    "dp_replicate_size": 1,
    "dp_shard_size": -1,
}


def estimate(run: blueprint.Blueprint, batch: int, sequence_len: int, *, platform: str = "gpu") -> dict[str, int]:
    """Bytes per device by class, for microbatches of `batch` sequences of `sequence_len` tokens.

    Only what is in device memory: see `estimate_host` for the rest. platform: "gpu", or "cpu", where XLA multiplies in
    float32 and fuses less, and where host memory is the device's, so that everything counts.
    """
    homes = ("device", "host") if platform == "cpu" else ("device",)
    return {k: sum(v[h] for h in homes) for k, v in by_class(run, batch, sequence_len, platform).items()}


def estimate_host(run: blueprint.Blueprint, batch: int, sequence_len: int) -> dict[str, int]:
    """Bytes of pinned host memory per GPU by class; empty when nothing is offloaded."""
    found = {k: v["host"] for k, v in by_class(run, batch, sequence_len, "gpu").items()}
    return {k: size for k, size in found.items() if size}


def host_temporaries(run: blueprint.Blueprint, batch: int, sequence_len: int) -> int:
    """Bytes of pinned host memory per GPU that a step allocates for itself: accumulators and saved activations."""
    need = by_class(run, batch, sequence_len, "gpu")
    return need["gradients"]["host"] + need["activations"]["host"]


def by_class(run: blueprint.Blueprint, batch: int, sequence_len: int, platform: str) -> dict[str, dict[str, int]]:
    """Bytes per device of each class by the memory it rests in: {class: {"device": ..., "host": ...}}."""
    plan, engine, m = run.plan, run.engine, run.model
    work, grads = engine.placement.weights, engine.placement.grads
    layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], work.dtype), run.params["blocks"])
    x = jax.ShapeDtypeStruct((batch, sequence_len, m.hidden_size), work.dtype)
    layer_bytes, x_bytes = _bytes(layer), _bytes(x)
    fetched = _bytes(jax.eval_shape(quantise_weights, layer)) if engine.placement.one_scale else layer_bytes
    saved_bytes, scores_bytes = _block_bytes(m, layer, x, platform)
    # Its backward pass has all of it at once, however much of that is computed again.
    whole_bytes, _ = _block_bytes(dataclasses.replace(m, recompute=Recompute()), layer, x, platform)
    shards = lambda dim: run.mesh.shape[SHARD] if grads.sharded and dim != WHOLE else 1
    parts = jax.tree.map(lambda p, dim: p.size // shards(dim), run.params["blocks"], engine.dims["blocks"])
    block_grads = jnp.dtype(grads.dtype).itemsize * sum(jax.tree.leaves(parts))
    outer = jax.tree.leaves(plan.weights["outer"])  # their accumulators are cut like the work weights
    outer_size = sum(math.prod(w.sharding.shard_shape(w.shape)) for w in outer)
    outer_grads = jnp.dtype(grads.dtype).itemsize * outer_size

    wide = 4 if platform == "cpu" else jnp.dtype(work.dtype).itemsize
    logits = wide * (batch * sequence_len // engine.lmhead_chunks) * m.vocab_size
    kept = x_bytes if engine.recompute_block else saved_bytes  # of a layer, from the forward pass
    vocabulary = m.vocab_size // (run.mesh.shape[SHARD] if engine.placement.outer.sharded else 1)
    head = logits + max(logits, wide * vocabulary * m.hidden_size)  # and their gradient, then the head's
    activations = m.num_hidden_layers * kept
    at = lambda plan: {home: placement.bytes_per_device(plan, home) for home in ("device", "host")}
    in_file = placement.bytes_per_device(plan, "nvme")
    state = sum(at((plan.master["blocks"], plan.moments["blocks"])).values()) + in_file + block_grads
    saved_on_device = activations if engine.placement.residuals.home == "device" else 0
    if platform == "cpu" and run.mesh.size > 1 and not (grads.sharded and engine.placement.outer.sharded):
        activations *= 2  # XLA's CPU compiler keeps those of the last microbatch apart (engine.left_local)
    quants = [x for x in jax.tree.leaves(plan.weights["blocks"], is_leaf=is_quantized) if is_quantized(x)]
    table = engine.placement
    weights_in_host = "host" in (work.home, table.quants.home)
    waiting = fetched if work.sharded or weights_in_host else 0  # while the head computes: the next weights
    ahead = 2 * waiting  # while a layer computes: its weights, and the next one's
    others = len(m.precision.ranges(m.num_hidden_layers)) - 1 + bool(work.resident)
    ahead += others * fetched if waiting else 0  # and the next one of each other part of the layers
    ahead += fetched // run.mesh.shape[SHARD] if work.sharded and weights_in_host else 0  # shards of the one after
    if table.quants.dtype and platform == "cpu":  # and the matrices in 8 bits that they are made of
        ahead += _bytes(jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, table.quants.dtype), layer))
    exchanged = {"reduce_scatter": 0, "all_to_all": 2 * layer_bytes, "int8": layer_bytes}[table.reduce]
    exchanged = exchanged if run.mesh.shape[SHARD] > 1 else 0  # gradients of a layer, sent and received
    if grads.home == "host":  # of the layer before it, which leave, and its own sums, which come
        ahead += 2 * block_grads // m.num_hidden_layers
        waiting += block_grads // m.num_hidden_layers  # the last one's of the microbatch before
    if table.residuals.home == "host":  # the next layer's, and this one's unless they are what is differentiated
        ahead += (2 if engine.recompute_block else 1) * kept
    # The block's backward pass: first all that its forward pass computes, then all of its gradients, of which those
    # that are sharded leave one after the other. The factors are fitted to the measurements above.
    again = (2 if platform == "cpu" else 1.25) if engine.recompute_block else 1
    values = int(again * whole_bytes) + scores_bytes
    gradients = max(layer_bytes // (2 if grads.sharded else 1), exchanged)  # the layer's weights are free by then
    block = values + 2 * layer_bytes if platform == "cpu" else max(values, gradients)
    update = _update_bytes(run, state // m.num_hidden_layers) - saved_on_device
    if in_file:  # a layer comes whole; the outer layers have been updated by then
        update = state // m.num_hidden_layers + layer_bytes - outer_grads - saved_on_device
    none = {"device": 0, "host": 0}
    return {
        "weights": at([x for x in jax.tree.leaves(plan.weights, is_leaf=is_quantized) if not is_quantized(x)]),
        **({"quants": at(quants)} if quants else {}),
        "master": at(plan.master),
        "moments": at((plan.moments, plan.history)),
        "gradients": none
        | {grads.home: block_grads}
        | {"device": outer_grads + (block_grads if grads.home == "device" else 0)},
        "activations": none | {engine.placement.residuals.home: activations},
        "working space": none | {"device": max(block + ahead, head + waiting, update) + 2 * x_bytes},
    } | ({"layers from files": none | {"host": NVME_LAYERS * in_file // m.num_hidden_layers}} if in_file else {})


def _update_bytes(run: blueprint.Blueprint, layer_state: int) -> int:
    """What updating takes: the largest tensor of a layer, before and after, a third one where some come from the host.

    layer_state: bytes of master weights, moments and gradients of a layer on this device.
    """
    shards = lambda d: run.mesh.shape[SHARD] if d != WHOLE else 1
    sizes = [
        p.size // shards(d)
        for p, d in zip(jax.tree.leaves(run.params["blocks"]), jax.tree.leaves(run.engine.dims["blocks"]), strict=True)
    ]
    table = run.engine.placement
    moved = "host" in (table.master.home, table.moments.home, table.grads.home)
    size = (3 if moved else 2) * layer_state * max(sizes) // sum(sizes)
    if run.optimizer.blocks.gathers:  # and the whole matrix: as it came, three of float32, and products of its sides
        largest = max((p.shape[1:] for p in jax.tree.leaves(run.params["blocks"]) if p.ndim > 2), key=math.prod)
        size += math.prod(largest) * (12 + jnp.dtype(table.weights.dtype).itemsize) + 3 * 4 * min(largest) ** 2
    return size


def _block_bytes(m: LlamaConfig, layer, x: jax.ShapeDtypeStruct, platform: str) -> tuple[int, int]:
    """(what the block's forward pass saves beside its weights, the attention scores of its backward pass)."""
    (B, S, _), itemsize = x.shape, x.dtype.itemsize
    forward = functions(dataclasses.replace(m, attention="xla")).block_forward
    layer = jax.eval_shape(quantise_weights, layer) if m.precision.fp8 else layer
    saved = _bytes(jax.eval_shape(lambda w, x: forward(w, x)[1], layer, x))
    heads = B * S * m.num_attention_heads
    if m.attention == "cudnn" or (m.attention == "auto" and platform != "cpu" and itemsize == 2):
        # Flash attention saves its output and one sum per row.
        return saved + (0 if m.recompute.att else heads * (m.head_dim * itemsize + 4)), 0
    return saved, (4 if platform == "cpu" else 2) * heads * S * 4


def check_fit(c: Config, run: blueprint.Blueprint, devices, available: int | None = None) -> dict[str, int]:
    """The estimate per device of a run that fits; `available` bytes per device are measured when not given.

    Raises ConfigError naming what is needed, what there is, and changes that would make it fit; also for an attention,
    copy engines or a recipe that the devices do not have.
    """
    platform, n, kind = devices[0].platform, len(devices), devices[0].device_kind
    if c.attention == "cudnn" and platform != "gpu":
        raise ConfigError(f"attention: expected 'auto' or 'xla' on {kind}, got 'cudnn'; cuDNN needs an NVIDIA GPU")
    if c.kernels == "mosaic" and platform != "gpu":
        raise ConfigError(f"kernels: expected 'xla' or 'auto' on {kind}, got 'mosaic'; they are for NVIDIA GPUs")
    check_copy_engine(run.engine.placement.copy_engine, platform)
    check_recipe(run.model.precision, kind, getattr(devices[0], "compute_capability", None))
    need = estimate(run, c.per_device_batch_size, c.sequence_len, platform=platform)
    available = available_bytes(devices) if available is None else available
    if sum(need.values()) <= available:
        check_host(run, c, n, platform)
        return need
    parts = ", ".join(f"{name} {size / GiB:.1f}" for name, size in need.items())
    where = f"the {kind} device" if n == 1 else f"each of the {n} {kind} devices"
    raise ConfigError(
        f"does not fit: needs {gib(sum(need.values()))} ({parts}) on {where}, where {gib(available)} are free; "
        f"what would change it: {'; '.join(_advice(c, devices, available))}"
    )


def check_host(run: blueprint.Blueprint, c: Config, n: int, platform: str) -> None:
    """Raises ConfigError when the machine has less memory free than what is offloaded to it."""
    need = {} if platform == "cpu" else estimate_host(run, c.per_device_batch_size, c.sequence_len)
    free = psutil.virtual_memory().available
    if n * sum(need.values()) > free:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in need.items())
        raise ConfigError(
            f"does not fit: needs {gib(n * sum(need.values()))} of host memory for {n} GPUs (each {parts}), where "
            f"{gib(free)} are free; offload less, or store it in 16 bits (opt_m_dtype, opt_v_dtype, master_dtype)"
        )


def changes_that_help(c: Config, n: int, available: int, platform: str) -> list[tuple[dict, int]]:
    """Changes from mild to strong, each on top of those before it, with the bytes per device that they lead to.

    The effective batch stays as it is, except where GPUs are added. The list ends with the first change that fits; what
    saves less than 1 % is left out.
    """
    sofar, least, found = c, needed(c, n, platform), []
    for change in _changes(c, n, platform):
        change = differing(sofar, change)
        tried = changed(sofar, change)
        try:
            need = needed(tried, tried.gpus or n, platform)
        except ConfigError:  # an impossible combination, such as a vocabulary that so many GPUs do not divide
            continue
        if need <= available or need < 0.99 * least:
            sofar, least = tried, need
            found.append((change, need))
        if need <= available:
            break
    return found


def _changes(c: Config, n: int, platform: str) -> Iterator[dict]:
    slice_now = c.per_device_batch_size * c.sequence_len // c.lmhead_chunks
    limit = min(slice_now, 1024)  # tokens of a slice: no smaller ones are needed
    slices = lambda tokens: divisor(tokens, math.ceil(tokens / limit))
    if not c.recompute_block:
        yield {"recompute_norm": True, "recompute_swiglu": True}
    yield {"recompute_block": True} | dict.fromkeys(RECOMPUTE_PARTS, False)
    yield {"lmhead_chunks": slices(c.per_device_batch_size * c.sequence_len)}
    yield {
        "per_device_batch_size": 1,
        "gradient_accumulation_steps": c.per_device_batch_size * c.gradient_accumulation_steps,
        "lmhead_chunks": slices(c.sequence_len),
    }
    if platform != "cpu":
        yield {"model_dtype": "bfloat16"}
    yield dict.fromkeys(("opt_m_dtype", "opt_v_dtype", "accum_dtype"), "bfloat16")
    if n > 1:
        yield SHARDED
    if platform != "cpu":  # there host memory is the devices'
        yield from _offloads(c, n)
        yield from ({"gpus": more} | SHARDED for more in (2, 4, 8, 16, 32, 64) if more > n)


def _offloads(c: Config, n: int) -> Iterator[dict]:
    """What to move to host memory, cheapest traffic per byte first, and the outer layers cut by words."""
    for name in ("residual", "optimizer", "master"):
        yield {f"offload_{name}": True}
    for name in ("grads", "weights"):  # whole ones would cross every GPU's host link
        yield {f"offload_{name}": True} | (SHARDED if n > 1 else {})
    if n > 1:
        yield {"shard_outer": True} | SHARDED


def differing(c: Config, change: dict) -> dict:
    """The part of a change that is one."""
    return {name: value for name, value in change.items() if c[name] != value}


def changed(c: Config, change: dict) -> Config:
    """A copy with other values."""
    c = copy.deepcopy(c)  # copy_and_resolve_references would forget which types `config.either` lets in
    c.update(change)
    return c


def needed(c: Config, n: int, platform: str) -> int:
    """Bytes on each of n devices; builds nothing."""
    mesh = jax.sharding.AbstractMesh((c.dp_replicate_size, n // c.dp_replicate_size), DATA)
    run = blueprint.draw(c, mesh, total_steps=1000)
    return sum(estimate(run, c.per_device_batch_size, c.sequence_len, platform=platform).values())


def _advice(c: Config, devices, available: int) -> list[str]:
    n, platform, lines = len(devices), devices[0].platform, []
    more, chosen = int(available * POOL / DEFAULT_POOL), POOL_SETTING.partition("=")[0] in os.environ
    if platform == "gpu" and not chosen and needed(c, n, platform) <= more:
        lines.append(
            f"{POOL_SETTING} in the environment: JAX takes {DEFAULT_POOL} of a GPU's memory by itself, so {gib(more)} "
            "(fits)"
        )
    found = changes_that_help(c, n, available, platform)
    for i, (change, need) in enumerate(found):
        lines.append(f"{'then ' if i else ''}{flags(change)} -> {gib(need)}{' (fits)' if need <= available else ''}")
    if found and found[-1][1] <= available:
        return lines
    lines.append("a smaller model (configs/llama125m.py) or a device with more memory")
    if platform == "cpu":
        changes = [{"gpus": 1}, {"gpus": 4} | SHARDED, {"gpus": 8} | SHARDED]
        needs = [gib(needed(changed(c, change), change["gpus"], "gpu")) for change in changes]
        flagged = [flags({"gpus": change["gpus"]} | differing(c, change)) for change in changes]
        lines.append(
            "NVIDIA GPUs: " + ", ".join(f"{f} needs {need} on each" for f, need in zip(flagged, needs, strict=True))
        )
    return lines


def gib(size: int) -> str:
    """Bytes in GiB."""
    return f"{size / GiB:.1f} GiB"


def flags(change: dict) -> str:
    """Changed fields as they are written on a command line, without `--config.`."""
    return " ".join(f"{name}={'unset' if value is None else value}" for name, value in change.items())


def available_bytes(devices) -> int:
    """Bytes one device can give: a GPU's own limit; for CPU devices an equal part of the machine's free memory."""
    if (limit := memory_limit(devices[0])) is not None:
        return limit - devices[0].memory_stats().get("bytes_in_use", 0)
    return psutil.virtual_memory().available // len(devices)


def memory_limit(device) -> int | None:
    """Bytes of its memory that JAX may use, with which XLA plans too; None on a CPU and where nothing says so."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return (stats or {}).get("bytes_limit")


def compare(need: dict[str, int], compiled, device) -> str | None:
    """One line: the estimate beside what XLA planned for a compiled step and what the device has given out at most.

    None on devices that do not say (CPU). The peak is the whole process's: initialisation and evaluation are in it.
    """
    stats, planned = device.memory_stats() if device.platform != "cpu" else None, compiled.memory_analysis()
    if not stats or "peak_bytes_in_use" not in stats or planned is None:
        return None
    results = planned.output_size_in_bytes - planned.alias_size_in_bytes
    total = planned.argument_size_in_bytes + planned.temp_size_in_bytes + results
    estimated = sum(need.values())
    line = (
        f"memory per device: estimated {gib(estimated)}, compiled {gib(total)}, at most in use "
        f"{gib(stats['peak_bytes_in_use'])} (initialisation and evaluation included)"
    )
    low = total / estimated - 1
    return f"{line}; note: the estimate was {low:.0%} too low" if low > 0.1 else line


def _bytes(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
