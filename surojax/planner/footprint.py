"""Estimates the memory of a run before anything is compiled.

The bytes of the state are exact: they are read from its plan. What a step allocates in addition is computed from
shapes: gradient accumulators, saved activations, and a working space. The working space is the largest of three: the
backward pass of one block, one slice of logits, and the optimizer update of one layer.

Ratio of the estimate to `compiled.memory_analysis()` of the real step (arguments and temporaries; jax 0.12, 2026-11):

* XLA's GPU compiler, on a machine without a GPU: configs/llama{1b,7b}.py and qwen32b.py on RTX 4090, llama70b.py on
  H100, on 1 to 8 GPUs, ZeRO 1 and 3, with nothing, one class, the state, or everything offloaded, one to four
  microbatches a step and one or two a fetch: 15 variants, 0.97 to 1.09. With sequence_chunks, 7B and 8B at 32,768 to
  131,072 tokens in 4 to 32 chunks: 8 variants, 0.93 to 1.15; 8B at 1,048,576 tokens in 8 chunks on 8 H200, divided
  over cp (packed or not), tp, or both: 4 variants, 0.96 to 1.16.
* CPU, 32 variants of a 5M-parameter model on 1 and 4 virtual devices: 0.95 to 1.24. tests/test_footprint.py compares
  nine of them with the present engine: between 0.9 and 1.4.

Not counted: cuDNN's workspaces and fragmentation (a few hundred MiB on a GPU), and the copy of master weights and
moments in host memory while a checkpoint is written.
"""

import math

import jax
import jax.numpy as jnp

from surojax import assembly
from surojax.config import fields as configs
from surojax.config.fields import Config
from surojax.numerics.quantize import is_quantized
from surojax.parallel.schedule import layers_of_stage
from surojax.placement.home import DEVICE, HOST, NVME, Home
from surojax.placement.mesh import abstract_mesh, devices_per_sequence, pipeline_stages
from surojax.placement.param import OUTER, part_of
from surojax.planner.amounts import Memory
from surojax.planner.segment_bytes import SegmentBytes, segment_bytes, size
from surojax.planner.stages import slots
from surojax.planner.traffic import Batch, batch_of
from surojax.planner.working_space import working_space
from surojax.step.stage_layers import in_lockstep
from surojax.step.state_plan import bytes_per_device

POOL = 0.95  # largest fraction of a GPU's memory that JAX can use: the driver needs the remainder
DEFAULT_POOL = 0.75  # fraction that JAX uses by default
POOL_SETTING = f"XLA_PYTHON_CLIENT_MEM_FRACTION={POOL}"  # environment variable that sets the fraction
HOST_POOL = 0.9  # largest part of a machine's host memory to pin: the rest is for the system, data, and checkpoints
NVME_LAYERS = 4  # most layers in host memory: a prefetched one, the current one before and after its update, a written


def estimate(run: assembly.Assembly, batch: Batch, *, platform: str = "gpu") -> dict[str, int]:
    """Bytes in device memory per device and class.

    See `estimate_host` for host memory. platform: "gpu" or "cpu". On CPUs XLA multiplies in float32 and fuses less, and
    host memory is also the devices' memory, so both are counted.
    """
    homes = (DEVICE, HOST) if platform == "cpu" else (DEVICE,)
    return {k: sum(v[home.name] for home in homes) for k, v in by_class(run, batch, platform).items()}


def estimate_host(run: assembly.Assembly, batch: Batch) -> dict[str, int]:
    """Bytes of pinned host memory per GPU and class; empty if nothing is offloaded."""
    found = {k: v[HOST.name] for k, v in by_class(run, batch, "gpu").items()}
    return {k: size for k, size in found.items() if size}


def host_temporaries(run: assembly.Assembly, batch: Batch) -> int:
    """Bytes of pinned host memory per GPU that a step allocates: gradient accumulators and saved activations."""
    need = by_class(run, batch, "gpu")
    return need["gradients"][HOST.name] + need["activations"][HOST.name]


def by_class(run: assembly.Assembly, batch: Batch, platform: str) -> dict[str, dict[str, int]]:
    """Bytes per device of each class in each memory: {class: {"device": bytes, "host": bytes}}."""
    plan = run.plan
    table = run.engine.table
    model = run.model
    sequence_len = batch.sequence_len // devices_per_sequence(run.mesh)
    x = jax.ShapeDtypeStruct((batch.sequences, sequence_len, model.hidden_size), table.weights.dtype)
    segments = [segment_bytes(run, segment, x, platform) for segment in model.segments]
    # Accumulators of outer layers are sharded like their work weights.
    outer = jax.tree.leaves(part_of(plan.weights[OUTER], plan.master[OUTER]))
    outer_grads = jnp.dtype(table.grads.dtype).itemsize * sum(math.prod(w.sharding.shard_shape(w.shape)) for w in outer)
    gradients = _in(table.grads.home, sum(segment.grads for segment in segments))
    gradients[DEVICE.name] += outer_grads
    activations = _activations(run, batch, segments)
    space = working_space(
        run,
        batch,
        platform,
        segments,
        x_bytes=size(x),
        kept_bytes=0 if table.residuals.home.streamed else activations,
        outer_grads=outer_grads,
    )
    if platform == "cpu" and run.mesh.size > 1 and not (table.grads.sharded and table.outer.sharded):
        # XLA's CPU compiler allocates separate activations for the last group (gradients.peels_last_group).
        activations *= 2
    work = jax.tree.leaves(plan.weights, is_leaf=is_quantized)
    found = {"weights": _by_home([x for x in work if not is_quantized(x)])}
    if quants := [x for x in work if is_quantized(x)]:
        found["quants"] = _by_home(quants)
    found |= {
        "master": _by_home(plan.master),
        "moments": _by_home((plan.moments, plan.history)),
        "gradients": gradients,
        "activations": _in(table.residuals.home, activations),
        "working space": _in(DEVICE, space),
    }
    if in_file := bytes_per_device(plan, NVME):
        layers = layers_of_stage(model.num_layers, pipeline_stages(run.mesh))
        found["layers from files"] = _in(HOST, NVME_LAYERS * in_file // layers)
    return found


def _activations(run: assembly.Assembly, batch: Batch, segments: list[SegmentBytes]) -> int:
    """Bytes of the residuals of all layers: of a group of microbatches, or of all that a stage has in flight."""
    engine = run.engine
    found = engine.microbatches_per_fetch * sum(segment.activations for segment in segments)
    if pipeline_stages(run.mesh) == 1:
        return found
    kept = max(segment.kept for segment in segments)  # step/pipeline.py; a stack in host memory has an entry more
    in_host = engine.table.residuals.home.streamed
    found = slots(run, batch.microbatches) * (found + in_host * kept)
    return found + in_lockstep(run.model) * (1 + in_host) * kept


def _by_home(tree) -> dict[str, int]:
    """Bytes of a planned tree in each memory."""
    return {home.name: bytes_per_device(tree, home) for home in (DEVICE, HOST)}


def _in(home: Home, size: int) -> dict[str, int]:
    """Bytes in each memory of a class that is stored in this one."""
    return {DEVICE.name: 0, HOST.name: 0} | {home.name: size}


def needs(c: Config, n: int, platform: str, *, in_a_machine: int | None = None) -> Memory:
    """The `Memory` that a run on n devices needs; nothing is built. On CPUs all of it counts as device memory.

    in_a_machine: the devices that share host memory; None: all n.
    """
    mesh = abstract_mesh(n, **configs.mesh_sizes(c) | {"dp_shard_size": -1})
    rows = by_class(assembly.from_config(c, mesh, total_steps=1000), batch_of(c), platform)
    device, host = (sum(row[home] for row in rows.values()) for home in ("device", "host"))
    return Memory(device + host, 0) if platform == "cpu" else Memory(device, (in_a_machine or n) * host)


def needed(c: Config, n: int, platform: str) -> int:
    """Bytes of device memory that a run needs on each of n devices."""
    return needs(c, n, platform).device
