"""Estimates the memory of a run before anything is compiled, and says what to change if the run does not fit.

The bytes of the state are exact: they are read from its plan. What a step allocates in addition is computed from
shapes: gradient accumulators, saved activations, and a working space. The working space is the largest of three: the
backward pass of one block, one slice of logits, and the optimizer update of one layer.

Ratio of the estimate to `compiled.memory_analysis()` of the real step (arguments and temporaries; jax 0.12, 2026-11):

* XLA's GPU compiler, on a machine without a GPU: configs/llama{125m,1b,7b}.py and qwen32b.py on RTX 4090, llama70b.py
  on H100, on 1 to 8 GPUs, ZeRO 1 to 3, with nothing, one class, the state, or everything offloaded, state in files,
  with and without recomputation, flash attention and communication in 8 bits: 26 variants, 0.99 to 1.06.
* CPU, 32 variants of a 5M-parameter model on 1 and 4 virtual devices: 0.95 to 1.24. tests/test_fit.py compares six of
  them with the present engine: between 0.9 and 1.4.

Not counted: cuDNN's workspaces and fragmentation (a few hundred MiB on a GPU), and the copy of master weights and
moments in host memory while a checkpoint is written.
"""

import dataclasses
import functools
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil

from pallas_kernels import dispatch
from surojax import assembly
from surojax.config import fields as configs
from surojax.config.fields import Config
from surojax.errors import ConfigError
from surojax.models.attention import chosen
from surojax.models.model import Model, Recompute, Segment, runs
from surojax.numerics import quantize
from surojax.numerics.quantize import is_quantized
from surojax.numerics.recipes import check_recipe
from surojax.parallel.collectives import check_copy_engine
from surojax.placement.home import DEVICE, HOMES, HOST, NVME, Home
from surojax.placement.layout import Layout, batch_sharding
from surojax.placement.mesh import SHARD, abstract_mesh, data_parallel, tensor_parallel
from surojax.placement.param import OUTER, Kind, Param
from surojax.placement.table import Mesh
from surojax.planner import advice
from surojax.planner.advice import SHARDED, Memory, changed, changes_that_help, differing, flags, gib, missing, summed
from surojax.step.state_plan import bytes_per_device
from surojax.step.weights import quantise_with_one_scale

POOL = 0.95  # largest fraction of a GPU's memory that JAX can use: the driver needs the remainder
DEFAULT_POOL = 0.75  # fraction that JAX uses by default
POOL_SETTING = f"XLA_PYTHON_CLIENT_MEM_FRACTION={POOL}"  # environment variable that sets the fraction
NVME_LAYERS = 4  # most layers in host memory: a prefetched one, the current one before and after its update, a written


def estimate(run: assembly.Assembly, batch: int, sequence_len: int, *, platform: str = "gpu") -> dict[str, int]:
    """Bytes in device memory per device and class, for microbatches of `batch` sequences of `sequence_len` tokens.

    See `estimate_host` for host memory. platform: "gpu" or "cpu". On CPUs XLA multiplies in float32 and fuses less, and
    host memory is also the devices' memory, so both are counted.
    """
    homes = (DEVICE, HOST) if platform == "cpu" else (DEVICE,)
    return {k: sum(v[home.name] for home in homes) for k, v in by_class(run, batch, sequence_len, platform).items()}


def estimate_host(run: assembly.Assembly, batch: int, sequence_len: int) -> dict[str, int]:
    """Bytes of pinned host memory per GPU and class; empty if nothing is offloaded."""
    found = {k: v[HOST.name] for k, v in by_class(run, batch, sequence_len, "gpu").items()}
    return {k: size for k, size in found.items() if size}


def host_temporaries(run: assembly.Assembly, batch: int, sequence_len: int) -> int:
    """Bytes of pinned host memory per GPU that a step allocates: gradient accumulators and saved activations."""
    need = by_class(run, batch, sequence_len, "gpu")
    return need["gradients"][HOST.name] + need["activations"][HOST.name]


def by_class(run: assembly.Assembly, batch: int, sequence_len: int, platform: str) -> dict[str, dict[str, int]]:
    """Bytes per device of each class in each memory: {class: {"device": bytes, "host": bytes}}."""
    plan = run.plan
    engine = run.engine
    model = run.model
    table = engine.table
    work = table.weights
    grads = table.grads
    tensor = tensor_parallel(run.mesh)
    x = jax.ShapeDtypeStruct((batch, sequence_len // tensor, model.hidden_size), work.dtype)
    x_bytes = _bytes(x)
    segments = [_segment_bytes(run, segment, x, platform) for segment in model.segments]
    layer_bytes = max(segment.weights for segment in segments)
    fetched = max(segment.fetched for segment in segments)
    kept = max(segment.kept for segment in segments)
    block_grads = sum(segment.grads for segment in segments)
    outer = jax.tree.leaves(plan.weights[OUTER])  # accumulators of outer layers are sharded like their work weights
    outer_size = sum(math.prod(w.sharding.shard_shape(w.shape)) for w in outer)
    outer_grads = jnp.dtype(grads.dtype).itemsize * outer_size

    itemsize = 4 if platform == "cpu" else jnp.dtype(work.dtype).itemsize
    logits = itemsize * (batch * sequence_len // engine.lmhead_chunks) * model.vocab_size // tensor
    capped = logits if model.logit_softcap else 0  # the logits before the softcap are in memory too
    vocabulary = model.vocab_size // tensor // (run.mesh.shape[SHARD] if table.outer.sharded else 1)
    head_gradient = itemsize * vocabulary * model.hidden_size
    head = (
        capped + logits + max(logits, head_gradient)
    )  # first the logits with their gradient, then with the head's gradient
    activations = sum(segment.activations for segment in segments)

    def by_home(tree) -> dict[str, int]:
        """Bytes of a planned tree in each memory."""
        return {home.name: bytes_per_device(tree, home) for home in (DEVICE, HOST)}

    def only_in(home: Home, size: int) -> dict[str, int]:
        """Bytes in each memory of a class that is stored in one of them."""
        return {DEVICE.name: 0, HOST.name: 0} | {home.name: size}

    in_file = bytes_per_device(plan, NVME)
    layer_state = max(segment.layer_state for segment in segments)
    layer_grads = [segment.grads // of.num_layers for segment, of in zip(segments, model.segments, strict=True)]
    saved_on_device = 0 if table.residuals.home.streamed else activations
    if platform == "cpu" and run.mesh.size > 1 and not (grads.sharded and table.outer.sharded):
        # XLA's CPU compiler allocates separate activations for the last microbatch
        # (gradients.sums_in_last_microbatch).
        activations *= 2
    quants = [x for x in jax.tree.leaves(plan.weights, is_leaf=is_quantized) if is_quantized(x)]
    streamed = work.home.streamed or table.quants.home.streamed
    # Bytes in flight while the head computes: the prefetched weights of a layer.
    during_head = fetched if work.sharded or streamed else 0
    # Bytes in flight while a layer computes: its weights, and the prefetched weights of the next layer.
    during_layer = 2 * during_head
    # Every other loop over layers has prefetched weights of its own.
    loops = sum(len(runs(segment.variants)) for segment in model.segments) + bool(work.resident)
    during_layer += (loops - 1) * fetched if during_head else 0
    # Shards of the layer after the next are copied from the host before they are all-gathered.
    during_layer += fetched // run.mesh.shape[SHARD] if work.sharded and streamed else 0
    if table.quants.dtype and platform == "cpu":  # the 8-bit matrices that the weights are dequantised from
        during_layer += max(segment.size for segment in model.segments)
    exchanged = {"reduce_scatter": 0, "all_to_all": 2 * layer_bytes, "int8": layer_bytes}[table.reduce]
    exchanged = exchanged if run.mesh.shape[SHARD] > 1 else 0  # gradients of a layer, sent and received
    if grads.home.streamed:
        # In flight: accumulators of the previous layer to the host, of this layer to the device, and of the last layer
        # of every other segment. While the head computes: those of the previous microbatch.
        during_layer += sum(layer_grads) + max(layer_grads)
        during_head += sum(layer_grads)
    if table.residuals.home.streamed:
        # Residuals of the next layer. Those of this layer too if it is recomputed; else `saved` below includes them.
        during_layer += (2 if engine.recompute_block else 1) * kept
    # The backward pass of a block first has all values of its forward pass in memory, then all its gradients. If
    # gradients are sharded, each is freed when it is reduced. The factors are fitted to the measurements above.
    recompute_factor = (2 if platform == "cpu" else 1.25) if engine.recompute_block else 1
    values = max(int(recompute_factor * segment.saved) + segment.scores for segment in segments)
    # The layer's weights are freed by then. A gradient is freed when it is reduced, or added to sums on the device.
    gradients = max(layer_bytes // (2 if grads.sharded or grads.home.streamed else 1), exchanged)
    block = values + 2 * layer_bytes if platform == "cpu" else max(values, gradients)
    update = _update_bytes(run, layer_state) - saved_on_device
    if in_file:  # all tensors of a layer are updated by one program, after the update of the outer layers
        update = layer_state + layer_bytes - outer_grads - saved_on_device
    working_space = max(block + during_layer, head + during_head, update) + 2 * x_bytes
    unquantised = [x for x in jax.tree.leaves(plan.weights, is_leaf=is_quantized) if not is_quantized(x)]
    of_grads = only_in(grads.home, block_grads)
    of_grads[DEVICE.name] += outer_grads
    found = {"weights": by_home(unquantised)}
    if quants:
        found["quants"] = by_home(quants)
    found |= {
        "master": by_home(plan.master),
        "moments": by_home((plan.moments, plan.history)),
        "gradients": of_grads,
        "activations": only_in(table.residuals.home, activations),
        "working space": only_in(DEVICE, working_space),
    }
    if in_file:
        found["layers from files"] = only_in(HOST, NVME_LAYERS * in_file // model.num_layers)
    return found


class SegmentBytes(NamedTuple):
    """Bytes of a segment on each device."""

    weights: int  # weights of one layer, in the dtype that products compute with
    fetched: int  # weights of one layer, as they are all-gathered or copied to the device
    kept: int  # residuals of one layer, from the forward pass to the backward pass
    saved: int  # residuals of one layer if nothing is recomputed
    scores: int  # attention scores in the backward pass of one layer
    layer_state: int  # master weights, moments and gradient accumulators of one layer, in whichever memory
    grads: int  # gradient accumulators of all layers
    activations: int  # residuals of all layers


def _segment_bytes(run: assembly.Assembly, segment: Segment, x: jax.ShapeDtypeStruct, platform: str) -> SegmentBytes:
    """The `SegmentBytes` of a segment whose layers have an input like x."""
    engine = run.engine
    compute = run.model.compute

    def in_products(param: Param, layout: Layout) -> jax.ShapeDtypeStruct:
        shape = jax.NamedSharding(run.mesh, layout.computed).shard_shape(param.shape)
        return jax.ShapeDtypeStruct(shape, engine.table.weights.dtype)

    layer = jax.tree.map(in_products, segment.params, engine.layouts.weights[segment.name])
    fetched = _in_fp8(segment.params, layer) if engine.table.one_scale else layer
    packed = engine.packed
    block_bytes = functools.partial(_block_bytes, segment=segment, layer=layer, x=x, mesh=run.mesh)
    saved, scores = block_bytes(run.model, platform=platform, packed=packed)
    # The backward pass has all residuals of a layer in memory at once, even if they are recomputed.
    plain = run.model.rebuild(dataclasses.replace(compute, recompute=Recompute()))
    all_saved = saved if plain is run.model else block_bytes(plain, platform=platform, packed=packed)[0]
    kept = _bytes(x) if engine.recompute_block else saved
    sizes = _shard_sizes(run, engine.layouts.grads[segment.name], segment)
    grads = jnp.dtype(engine.table.grads.dtype).itemsize * segment.num_layers * sum(sizes)
    state = run.plan.master[segment.name], run.plan.moments[segment.name]
    return SegmentBytes(
        weights=_bytes(layer),
        fetched=_bytes(fetched),
        kept=kept,
        saved=all_saved,
        scores=scores,
        layer_state=(sum(bytes_per_device(state, home) for home in HOMES) + grads) // segment.num_layers,
        grads=grads,
        activations=segment.num_layers * kept,
    )


def _update_bytes(run: assembly.Assembly, layer_state: int) -> int:
    """Bytes that an update of one layer at a time takes.

    Its largest tensor is in memory before and after the update, and a third time if part of its state is copied from
    the host. If all layers are updated at once, in place, less is needed. layer_state: bytes of a layer's master
    weights, moments and gradients on this device.
    """
    segments = run.model.segments
    sizes = [_shard_sizes(run, run.engine.layouts.master[segment.name], segment) for segment in segments]
    table = run.engine.table
    moved = any(row.home.streamed and not row.home.in_file for row in (table.master, table.moments, table.grads))
    size = max((3 if moved else 2) * layer_state * max(of_layer) // sum(of_layer) for of_layer in sizes)
    if run.optimizer.matrices.gathers:
        # The all-gathered matrix in the work dtype, three float32 copies of it, and three float32 square matrices.
        params = jax.tree.leaves([segment.params for segment in segments])
        largest = max((p.shape for p in params if p.kind is Kind.MATRIX), key=math.prod)
        size += math.prod(largest) * (12 + jnp.dtype(table.weights.dtype).itemsize) + 3 * 4 * min(largest) ** 2
    return size


def _block_bytes(
    model: Model, *, segment: Segment, layer, x: jax.ShapeDtypeStruct, mesh: Mesh, platform: str, packed: bool
) -> tuple[int, int]:
    """(bytes of the block's residuals without its weights, bytes that attention needs in its backward pass)."""
    B, S, _ = x.shape
    tensor = tensor_parallel(mesh)
    itemsize = x.dtype.itemsize
    compute = model.compute
    heads_of = segment.heads
    # Residuals are the same with every kernel. "auto" never raises; `check_kernels` reports what is not supported.
    kernels = "xla" if compute.precision.kernels == "xla" else "auto"
    precision = dataclasses.replace(compute.precision, kernels=kernels)
    traced = model.rebuild(dataclasses.replace(compute, attention="xla", precision=precision))
    forward = next(s for s in traced.segments if s.name == segment.name).block_forward
    layer = _in_fp8(segment.params, layer) if precision.fp8 else layer
    variant = next((v for v in segment.variants if v.recipe_enabled), segment.variants[0])

    def residuals(w, x):
        return forward(w, x, None, variant)[1]

    if tensor > 1:  # for the shapes on one device, which are all that is asked
        specs: Any = {"in_specs": jax.P(), "out_specs": jax.P()}
        residuals = jax.shard_map(residuals, mesh=mesh, check_vma=False, **specs)
    saved = _bytes(jax.eval_shape(residuals, layer, x))
    heads = B * S * heads_of.query  # in a tensor-parallel group: of whole sequences, a part of the heads
    kind: Any = {"gpu": platform != "cpu", "packed": packed, "softcap": heads_of.softcapped}
    flash = chosen(compute.attention, x.dtype, heads_of.channels, **kind)
    if flash != "xla":
        # Flash attention saves its output and one float32 sum per row, and no scores. Ours reads transposed copies of
        # queries, keys and the gradient of its output.
        key_value = max(heads_of.key_value, tensor)
        copied = (2 * heads_of.query + key_value) * heads_of.channels if flash == "mosaic" else 0
        kept = 0 if compute.recompute.att else heads * (heads_of.channels * itemsize + 4)
        return saved + kept, B * S * copied * itemsize
    return saved, (4 if platform == "cpu" else 2) * heads * S * tensor * 4


def check_fit(c: Config, run: assembly.Assembly, devices, available: int | None = None) -> dict[str, int]:
    """The `estimate` of a run that fits. available: bytes per device; None: measured.

    Raises ConfigError if the run does not fit, with the bytes that it needs, the bytes that are free, and changes that
    would make it fit. Also raises ConfigError if the devices or the model do not support the attention, the copy
    engine settings, the recipe or the kernels.
    """
    platform = devices[0].platform
    kind = devices[0].device_kind
    n = len(devices)
    if c.attention in ("cudnn", "mosaic") and platform != "gpu":
        why = f"{c.attention!r}; flash attention needs an NVIDIA GPU"
        raise ConfigError(f"attention: expected 'auto' or 'xla' on {kind}, got {why}")
    check_copy_engine(run.engine.table.copy_engine, platform)
    check_recipe(run.model.precision, kind, devices[0])
    if c.kernels == "mosaic":
        check_kernels(c, run.mesh, devices[0])
    need = estimate(run, c.per_device_batch_size, c.sequence_len, platform=platform)
    available = available_bytes(devices) if available is None else available
    if sum(need.values()) <= available:
        check_host(run, c, devices, available)
        return need
    each_device = f"the {kind} device" if n == 1 else f"each of the {n} {kind} devices"
    raise ConfigError(
        f"does not fit: needs {summed(need, digits=1)} on {each_device}, where {gib(available)} are free; "
        f"what would change it: {'; '.join(_advice(c, devices, available))}"
    )


def check_kernels(c: Config, mesh: Mesh, device) -> None:
    """Raises ConfigError for kernels="mosaic" if one of them does not support the device or the model.

    Traces the step, because only the traced step has the shapes that the kernels get. Nothing is compiled.
    """
    found = dispatch.capability(device)
    major, minor = dispatch.OLDEST
    if found is None or found < dispatch.OLDEST:
        raise ConfigError(
            f"kernels: expected 'xla' or 'auto' on {device.device_kind}, got 'mosaic'; they are for NVIDIA GPUs of "
            f"compute capability {major}.{minor} or newer"
        )
    names = ("offload_optimizer", "offload_master")  # host memory instead of files: the same shapes in one program
    changes = {"attention": "xla", "nvme_path": ""} | {name: bool(c[name]) for name in names}
    run = assembly.from_config(changed(c, changes), mesh, total_steps=1)
    shape = (c.gradient_accumulation_steps, c.per_device_batch_size * data_parallel(mesh), c.sequence_len)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    try:
        jax.eval_shape(run.train_step(), run.plan, *(tokens for _ in run.engine.batch_arrays))
    except dispatch.Unserved as error:
        raise unserved(error) from error


def unserved(error: dispatch.Unserved) -> ConfigError:
    """The ConfigError for a model that kernels="mosaic" does not support."""
    reason = str(error).partition("\n")[0].partition("; use implementation")[0]
    return ConfigError(f"kernels: expected 'xla' or 'auto', got 'mosaic', but {reason}; use kernels='auto'")


def check_host(run: assembly.Assembly, c: Config, devices, available: int) -> None:
    """Raises ConfigError if less host memory is free than the run needs, with changes that would make it fit."""
    n = len(devices)
    platform = devices[0].platform
    need = {} if platform == "cpu" else estimate_host(run, c.per_device_batch_size, c.sequence_len)
    free = psutil.virtual_memory().available
    if n * sum(need.values()) > free:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in need.items())
        raise ConfigError(
            f"does not fit: needs {gib(n * sum(need.values()))} of host memory for {n} GPUs (each {parts}), where "
            f"{gib(free)} are free; what would change it: {'; '.join(_advice(c, devices, available))}"
        )


def needs(c: Config, n: int, platform: str) -> Memory:
    """The `Memory` that a run on n devices needs; nothing is built. On CPUs all of it counts as device memory."""
    mesh = abstract_mesh(n, **configs.mesh_sizes(c) | {"dp_shard_size": -1})
    rows = by_class(assembly.from_config(c, mesh, total_steps=1000), c.per_device_batch_size, c.sequence_len, platform)
    device, host = (sum(row[home] for row in rows.values()) for home in ("device", "host"))
    return Memory(device + host, 0) if platform == "cpu" else Memory(device, n * host)


def needed(c: Config, n: int, platform: str) -> int:
    """Bytes of device memory that a run needs on each of n devices."""
    return needs(c, n, platform).device


def _advice(c: Config, devices, available: int) -> list[str]:
    """Lines of text with changes that would make it fit; `available` bytes are free on each device."""
    n = len(devices)
    platform = devices[0].platform
    lines = []
    more = int(available * POOL / DEFAULT_POOL)  # bytes available with POOL_SETTING
    chosen = POOL_SETTING.partition("=")[0] in os.environ
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
        changes = [{"gpus": n} | (SHARDED if n > 1 else {}) for n in (1, 4, 8) if n % c.tp_size == 0]
        sizes = [gib(needed(changed(c, change), change["gpus"], "gpu")) for change in changes]
        flagged = [flags({"gpus": change["gpus"]} | differing(c, change)) for change in changes]
        lines.append(
            "NVIDIA GPUs: " + ", ".join(f"{f} needs {size} on each" for f, size in zip(flagged, sizes, strict=True))
        )
    return lines


def available_bytes(devices) -> int:
    """Free bytes of each device: of the GPU's memory, or for CPU devices an equal part of the free host memory."""
    if (limit := memory_limit(devices[0])) is not None:
        return limit - devices[0].memory_stats().get("bytes_in_use", 0)
    return psutil.virtual_memory().available // len(devices)


def memory_limit(device) -> int | None:
    """Bytes of a device's memory that JAX may use and XLA plans with; None on CPUs and if the device reports none."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return (stats or {}).get("bytes_limit")


def compare(need: dict[str, int], compiled, device) -> str | None:
    """A line that compares the estimate, the bytes that XLA planned for a compiled step, and the device's peak use.

    None on devices that do not report their peak (CPUs). The peak is that of the process, with initialisation and
    evaluation. XLA's bytes are left out for a step of several programs (state in files).
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    planned = compiled.memory_analysis()
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
    """The shapes of a layer after its matrices are quantised to float8 with one scale each."""
    return jax.eval_shape(lambda w: quantise_with_one_scale(params, w, quantize.DTYPES["fp8"]), layer)


def _shard_sizes(run: assembly.Assembly, of_class, segment: Segment) -> list[int]:
    """Number of elements on one device of each parameter of one layer. of_class: the segment's layouts of a class."""
    pairs = zip(jax.tree.leaves(segment.params), jax.tree.leaves(of_class), strict=True)
    return [math.prod(jax.NamedSharding(run.mesh, layout.stored).shard_shape(p.shape)) for p, layout in pairs]


def _bytes(tree) -> int:
    """Bytes of a tree of shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
