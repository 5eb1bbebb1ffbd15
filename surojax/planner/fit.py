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

import dataclasses
import math
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import psutil

from pallas_kernels import dispatch
from surojax import assembly
from surojax.config.fields import Config
from surojax.errors import ConfigError
from surojax.models.model import Model, Recompute, Segment, runs
from surojax.numerics import quantize
from surojax.numerics.quantize import is_quantized
from surojax.numerics.recipes import check_recipe
from surojax.parallel.collectives import check_copy_engine
from surojax.placement.home import DEVICE, HOST, NVME, Home
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import DATA, SHARD
from surojax.placement.param import OUTER, Kind
from surojax.placement.table import Mesh
from surojax.planner import advice
from surojax.planner.advice import SHARDED, Memory, changed, changes_that_help, differing, flags, gib, missing, summed
from surojax.step.state_plan import bytes_per_device
from surojax.step.weights import quantise_with_one_scale

POOL = 0.95  # of a GPU's memory, that JAX takes at most: the driver has its part too
DEFAULT_POOL = 0.75  # that it takes by itself
POOL_SETTING = f"XLA_PYTHON_CLIENT_MEM_FRACTION={POOL}"  # in the environment
NVME_LAYERS = 4  # in host memory at most: one is read ahead, one is in use before and after its update, one is written


def estimate(run: assembly.Assembly, batch: int, sequence_len: int, *, platform: str = "gpu") -> dict[str, int]:
    """Bytes per device by class, for microbatches of `batch` sequences of `sequence_len` tokens.

    Only what is in device memory: see `estimate_host` for the rest. platform: "gpu", or "cpu", where XLA multiplies in
    float32 and fuses less, and where host memory is the device's, so that everything counts.
    """
    homes = (DEVICE, HOST) if platform == "cpu" else (DEVICE,)
    return {k: sum(v[home.name] for home in homes) for k, v in by_class(run, batch, sequence_len, platform).items()}


def estimate_host(run: assembly.Assembly, batch: int, sequence_len: int) -> dict[str, int]:
    """Bytes of pinned host memory per GPU by class; empty when nothing is offloaded."""
    found = {k: v[HOST.name] for k, v in by_class(run, batch, sequence_len, "gpu").items()}
    return {k: size for k, size in found.items() if size}


def host_temporaries(run: assembly.Assembly, batch: int, sequence_len: int) -> int:
    """Bytes of pinned host memory per GPU that a step allocates for itself: accumulators and saved activations."""
    need = by_class(run, batch, sequence_len, "gpu")
    return need["gradients"][HOST.name] + need["activations"][HOST.name]


def by_class(run: assembly.Assembly, batch: int, sequence_len: int, platform: str) -> dict[str, dict[str, int]]:
    """Bytes per device of each class by the name of the memory that it is stored in: {class: {"device": ...}}."""
    plan, engine, model = run.plan, run.engine, run.model
    table = engine.table
    work, grads = table.weights, table.grads
    x = jax.ShapeDtypeStruct((batch, sequence_len, model.hidden_size), work.dtype)
    x_bytes = _bytes(x)
    segments = [_segment_bytes(run, segment, x, platform) for segment in model.segments]
    layer_bytes = max(segment.weights for segment in segments)
    fetched = max(segment.fetched for segment in segments)
    kept = max(segment.kept for segment in segments)  # of a layer, from the forward pass
    block_grads = sum(segment.grads for segment in segments)
    outer = jax.tree.leaves(plan.weights[OUTER])  # their accumulators are sharded like the work weights
    outer_size = sum(math.prod(w.sharding.shard_shape(w.shape)) for w in outer)
    outer_grads = jnp.dtype(grads.dtype).itemsize * outer_size

    wide = 4 if platform == "cpu" else jnp.dtype(work.dtype).itemsize
    logits = wide * (batch * sequence_len // engine.lmhead_chunks) * model.vocab_size
    vocabulary = model.vocab_size // (run.mesh.shape[SHARD] if table.outer.sharded else 1)
    head = logits + max(logits, wide * vocabulary * model.hidden_size)  # and their gradient, then the head's
    activations = sum(segment.activations for segment in segments)

    def at(tree) -> dict[str, int]:
        return {home.name: bytes_per_device(tree, home) for home in (DEVICE, HOST)}

    def stored(home: Home, size: int) -> dict[str, int]:
        """A class that is in one memory."""
        return {DEVICE.name: 0, HOST.name: 0} | {home.name: size}

    in_file = bytes_per_device(plan, NVME)
    layers = [(plan.master[segment.name], plan.moments[segment.name]) for segment in model.segments]
    layer_state = (sum(at(layers).values()) + in_file + block_grads) // model.num_layers
    saved_on_device = 0 if table.residuals.home.streamed else activations
    if platform == "cpu" and run.mesh.size > 1 and not (grads.sharded and table.outer.sharded):
        # XLA's CPU compiler keeps those of the last microbatch apart (gradients.sums_in_last_microbatch).
        activations *= 2
    quants = [x for x in jax.tree.leaves(plan.weights, is_leaf=is_quantized) if is_quantized(x)]
    streamed = work.home.streamed or table.quants.home.streamed
    waiting = fetched if work.sharded or streamed else 0  # while the head computes: the next weights
    ahead = 2 * waiting  # while a layer computes: its weights, and the next one's
    loops = sum(len(runs(segment.variants)) for segment in model.segments) + bool(work.resident)
    ahead += (loops - 1) * fetched if waiting else 0  # and the next one of each other loop over layers
    ahead += fetched // run.mesh.shape[SHARD] if work.sharded and streamed else 0  # shards of the one after
    if table.quants.dtype and platform == "cpu":  # and the matrices in 8 bits that they are made of
        ahead += max(segment.size for segment in model.segments)
    exchanged = {"reduce_scatter": 0, "all_to_all": 2 * layer_bytes, "int8": layer_bytes}[table.reduce]
    exchanged = exchanged if run.mesh.shape[SHARD] > 1 else 0  # gradients of a layer, sent and received
    if grads.home.streamed:  # sums of the layer before it, in flight to the host, and its own, in flight to the device
        ahead += 2 * block_grads // model.num_layers
        waiting += block_grads // model.num_layers  # the last one's of the microbatch before
    if table.residuals.home.streamed:  # the next layer's, and this one's unless they are what is differentiated
        ahead += (2 if engine.recompute_block else 1) * kept
    # The block's backward pass: first all that its forward pass computes, then all of its gradients, of which those
    # that are sharded leave one after the other. The factors are fitted to the measurements above.
    again = (2 if platform == "cpu" else 1.25) if engine.recompute_block else 1
    values = max(int(again * segment.saved) + segment.scores for segment in segments)
    # The layer's weights are free by then, and a gradient is as soon as it is reduced, or added to sums on the device.
    gradients = max(layer_bytes // (2 if grads.sharded or grads.home.streamed else 1), exchanged)
    block = values + 2 * layer_bytes if platform == "cpu" else max(values, gradients)
    update = _update_bytes(run, layer_state) - saved_on_device
    if in_file:  # all tensors of a layer come at once; the outer layers have been updated by then
        update = layer_state + layer_bytes - outer_grads - saved_on_device
    working_space = max(block + ahead, head + waiting, update) + 2 * x_bytes
    unquantised = [x for x in jax.tree.leaves(plan.weights, is_leaf=is_quantized) if not is_quantized(x)]
    of_grads = stored(grads.home, block_grads)
    of_grads[DEVICE.name] += outer_grads
    found = {"weights": at(unquantised)}
    if quants:
        found["quants"] = at(quants)
    found |= {
        "master": at(plan.master),
        "moments": at((plan.moments, plan.history)),
        "gradients": of_grads,
        "activations": stored(table.residuals.home, activations),
        "working space": stored(DEVICE, working_space),
    }
    if in_file:
        found["layers from files"] = stored(HOST, NVME_LAYERS * in_file // model.num_layers)
    return found


class SegmentBytes(NamedTuple):
    """Bytes of a segment on each device. Of one layer: its weights as they are computed with, and as they are gathered;
    what its forward pass keeps; what a forward pass saves that recomputes nothing; the attention scores of its backward
    pass. Of all layers: accumulators, and what the forward pass keeps."""

    weights: int
    fetched: int
    kept: int
    saved: int
    scores: int
    grads: int
    activations: int


def _segment_bytes(run: assembly.Assembly, segment: Segment, x: jax.ShapeDtypeStruct, platform: str) -> SegmentBytes:
    engine, compute = run.engine, run.model.compute
    layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, engine.table.weights.dtype), segment.params)
    fetched = _in_fp8(segment.params, layer) if engine.table.one_scale else layer
    saved, scores = _block_bytes(run.model, segment, layer, x, platform)
    # The backward pass has all of a layer's residuals at once, even if they are recomputed.
    plain = run.model.rebuild(dataclasses.replace(compute, recompute=Recompute()))
    all_saved = saved if plain is run.model else _block_bytes(plain, segment, layer, x, platform)[0]
    kept = _bytes(x) if engine.recompute_block else saved
    sizes = _shard_sizes(run, engine.layouts.grads[segment.name], segment)
    return SegmentBytes(
        weights=_bytes(layer),
        fetched=_bytes(fetched),
        kept=kept,
        saved=all_saved,
        scores=scores,
        grads=jnp.dtype(engine.table.grads.dtype).itemsize * segment.num_layers * sum(sizes),
        activations=segment.num_layers * kept,
    )


def _update_bytes(run: assembly.Assembly, layer_state: int) -> int:
    """What updating a layer at a time takes: its largest tensor, before and after, a third one where some come from the
    host. Where all layers are updated at once, in place, it is more than is needed.

    layer_state: bytes of master weights, moments and gradients of a layer on this device.
    """
    segments = run.model.segments
    sizes = [_shard_sizes(run, run.engine.layouts.master[segment.name], segment) for segment in segments]
    table = run.engine.table
    moved = any(row.home.streamed and not row.home.in_file for row in (table.master, table.moments, table.grads))
    size = max((3 if moved else 2) * layer_state * max(of_layer) // sum(of_layer) for of_layer in sizes)
    if run.optimizer.matrices.gathers:  # and the gathered matrix: as it came, three of float32, products of its sides
        params = jax.tree.leaves([segment.params for segment in segments])
        largest = max((p.shape for p in params if p.kind is Kind.MATRIX), key=math.prod)
        size += math.prod(largest) * (12 + jnp.dtype(table.weights.dtype).itemsize) + 3 * 4 * min(largest) ** 2
    return size


def _block_bytes(model: Model, segment: Segment, layer, x: jax.ShapeDtypeStruct, platform: str) -> tuple[int, int]:
    """(what the block's forward pass saves beside its weights, the attention scores of its backward pass)."""
    (B, S, _), itemsize = x.shape, x.dtype.itemsize
    compute = model.compute
    # What is saved does not depend on whether a kernel serves this microbatch: that is `check_kernels`'s to say.
    kernels = "xla" if compute.precision.kernels == "xla" else "auto"
    precision = dataclasses.replace(compute.precision, kernels=kernels)
    traced = model.rebuild(dataclasses.replace(compute, attention="xla", precision=precision))
    forward = next(s for s in traced.segments if s.name == segment.name).block_forward
    layer = _in_fp8(segment.params, layer) if precision.fp8 else layer
    saved = _bytes(jax.eval_shape(lambda w, x: forward(w, x)[1], layer, x))
    heads = B * S * segment.heads.query
    if compute.attention == "cudnn" or (compute.attention == "auto" and platform != "cpu" and itemsize == 2):
        # Flash attention saves its output and one sum per row.
        return saved + (0 if compute.recompute.att else heads * (segment.heads.channels * itemsize + 4)), 0
    return saved, (4 if platform == "cpu" else 2) * heads * S * 4


def check_fit(c: Config, run: assembly.Assembly, devices, available: int | None = None) -> dict[str, int]:
    """The estimate per device of a run that fits; `available` bytes per device are measured when not given.

    Raises ConfigError naming what is needed, what there is, and changes that would make it fit; also for an attention,
    copy engines, a recipe or kernels that the devices do not have, or that do not serve the model.
    """
    platform, n, kind = devices[0].platform, len(devices), devices[0].device_kind
    if c.attention == "cudnn" and platform != "gpu":
        raise ConfigError(f"attention: expected 'auto' or 'xla' on {kind}, got 'cudnn'; cuDNN needs an NVIDIA GPU")
    check_copy_engine(run.engine.table.copy_engine, platform)
    check_recipe(run.model.precision, kind, devices[0])
    if c.kernels == "mosaic":
        check_kernels(c, run.mesh, devices[0])
    need = estimate(run, c.per_device_batch_size, c.sequence_len, platform=platform)
    available = available_bytes(devices) if available is None else available
    if sum(need.values()) <= available:
        check_host(run, c, devices, available)
        return need
    where = f"the {kind} device" if n == 1 else f"each of the {n} {kind} devices"
    raise ConfigError(
        f"does not fit: needs {summed(need, digits=1)} on {where}, where {gib(available)} are free; "
        f"what would change it: {'; '.join(_advice(c, devices, available))}"
    )


def check_kernels(c: Config, mesh: Mesh, device) -> None:
    """Raises ConfigError for kernels="mosaic" where one of them does not serve the device or the model.

    Which shapes they are given, only tracing the step tells; nothing is compiled.
    """
    found, (major, minor) = dispatch.capability(device), dispatch.OLDEST
    if found is None or found < dispatch.OLDEST:
        raise ConfigError(
            f"kernels: expected 'xla' or 'auto' on {device.device_kind}, got 'mosaic'; they are for NVIDIA GPUs of "
            f"compute capability {major}.{minor} or newer"
        )
    names = ("offload_optimizer", "offload_master")  # not in files: the same shapes in one program
    changes = {"attention": "xla", "nvme_path": ""} | {name: bool(c[name]) for name in names}
    run = assembly.from_config(changed(c, changes), mesh, total_steps=1)
    shape = (c.gradient_accumulation_steps, c.per_device_batch_size * mesh.size, c.sequence_len)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    try:
        jax.eval_shape(run.train_step(), run.plan, tokens, tokens)
    except dispatch.Unserved as error:
        raise unserved(error) from error


def unserved(error: dispatch.Unserved) -> ConfigError:
    """What is said of a model that a kernel does not serve which was asked for."""
    reason = str(error).partition("\n")[0].partition("; use implementation")[0]
    return ConfigError(f"kernels: expected 'xla' or 'auto', got 'mosaic', but {reason}; use kernels='auto'")


def check_host(run: assembly.Assembly, c: Config, devices, available: int) -> None:
    """Raises ConfigError when the machine has less memory free than what is offloaded to it, with what would fit."""
    n, platform = len(devices), devices[0].platform
    need = {} if platform == "cpu" else estimate_host(run, c.per_device_batch_size, c.sequence_len)
    free = psutil.virtual_memory().available
    if n * sum(need.values()) > free:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in need.items())
        raise ConfigError(
            f"does not fit: needs {gib(n * sum(need.values()))} of host memory for {n} GPUs (each {parts}), where "
            f"{gib(free)} are free; what would change it: {'; '.join(_advice(c, devices, available))}"
        )


def needs(c: Config, n: int, platform: str) -> Memory:
    """What a run on n devices needs; builds nothing. On a CPU all of it is the devices'."""
    mesh = jax.sharding.AbstractMesh((c.dp_replicate_size, n // c.dp_replicate_size), DATA)
    rows = by_class(assembly.from_config(c, mesh, total_steps=1000), c.per_device_batch_size, c.sequence_len, platform)
    device, host = (sum(row[home] for row in rows.values()) for home in ("device", "host"))
    return Memory(device + host, 0) if platform == "cpu" else Memory(device, n * host)


def needed(c: Config, n: int, platform: str) -> int:
    """Bytes on each of n devices."""
    return needs(c, n, platform).device


def _advice(c: Config, devices, available: int) -> list[str]:
    """Lines that say what would make it fit; `available` bytes are free on each device."""
    n, platform, lines = len(devices), devices[0].platform, []
    more, chosen = int(available * POOL / DEFAULT_POOL), POOL_SETTING.partition("=")[0] in os.environ
    if platform == "gpu" and not chosen and available < needed(c, n, platform) <= more:
        lines.append(
            f"{POOL_SETTING} in the environment: JAX takes {DEFAULT_POOL} of a GPU's memory by itself, so {gib(more)} "
            "(fits)"
        )
    limit = Memory(available, math.inf if platform == "cpu" else psutil.virtual_memory().available)
    found = changes_that_help(c, n, limit, platform, lambda c, n: needs(c, n, platform))
    lines += [f"{'then ' if i else ''}{line}" for i, line in enumerate(advice.lines(found, limit))]
    if found and not any(missing(found[-1][1], limit)):
        return lines
    lines.append("a smaller model (configs/llama125m.py) or a machine with more memory")
    if platform == "cpu":
        changes = [{"gpus": 1}, {"gpus": 4} | SHARDED, {"gpus": 8} | SHARDED]
        sizes = [gib(needed(changed(c, change), change["gpus"], "gpu")) for change in changes]
        flagged = [flags({"gpus": change["gpus"]} | differing(c, change)) for change in changes]
        lines.append(
            "NVIDIA GPUs: " + ", ".join(f"{f} needs {size} on each" for f, size in zip(flagged, sizes, strict=True))
        )
    return lines


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

    None on devices that do not say (CPU). The peak is the whole process's: initialisation and evaluation are in it. A
    step of several programs (state on NVMe) has no one plan of XLA's.
    """
    stats, planned = device.memory_stats() if device.platform != "cpu" else None, compiled.memory_analysis()
    if not stats or "peak_bytes_in_use" not in stats:
        return None
    if planned is None:
        most = f"at most in use {gib(stats['peak_bytes_in_use'])} (initialisation and evaluation included)"
        return f"memory per device: estimated {gib(sum(need.values()))}, {most}"
    results = planned.output_size_in_bytes - planned.alias_size_in_bytes
    total = planned.argument_size_in_bytes + planned.temp_size_in_bytes + results
    estimated = sum(need.values())
    line = (
        f"memory per device: estimated {gib(estimated)}, compiled {gib(total)}, at most in use "
        f"{gib(stats['peak_bytes_in_use'])} (initialisation and evaluation included)"
    )
    low = total / estimated - 1
    return f"{line}; note: the estimate was {low:.0%} too low" if low > 0.1 else line


def _in_fp8(params, layer):
    """Shapes of a layer whose matrices are in float8 with one scale each."""
    return jax.eval_shape(lambda w: quantise_with_one_scale(params, w, quantize.DTYPES["fp8"]), layer)


def _shard_sizes(run: assembly.Assembly, of_class, segment: Segment) -> list[int]:
    """Elements of each parameter of one layer of a segment on one device, from the layouts of a class."""
    pairs = zip(jax.tree.leaves(segment.params), jax.tree.leaves(of_class), strict=True)
    n = run.mesh.shape[SHARD]
    return [math.prod(p.shape) // (1 if layout.sharded_dim is None else n) for p, layout in pairs]


def _bytes(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
