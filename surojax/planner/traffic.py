"""Textbook figures of a step, computed from shapes: FLOPs, and bytes of device memory and host links.

The planner prints them next to the figures of the compiled step. textbook.py has the bytes of collectives.

Times are lower bounds: each resource alone, at its peak rate, perfectly overlapped with all others.
"""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp

from surojax.assembly import Assembly
from surojax.config.fields import Config
from surojax.models.model import Segment
from surojax.numerics.recipes import BLOCK_SCALED, Precision
from surojax.placement.mesh import REPLICATE, devices_per_sequence, pipeline_stages, shards
from surojax.placement.param import OUTER, Kind, Param, part_of
from surojax.planner import shares
from surojax.planner.gpus import Gpu
from surojax.planner.stages import layer_passes, slots
from surojax.step.state_plan import leaf_bytes


@dataclasses.dataclass(frozen=True)
class Batch:
    """The tokens of a step on one GPU, or on one group of GPUs that share sequences."""

    sequences: int  # per microbatch
    sequence_len: int
    microbatches: int

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.sequences * self.sequence_len


def batch_of(c: Config) -> Batch:
    """The `Batch` of a config."""
    return Batch(c.per_device_batch_size, c.sequence_len, c.gradient_accumulation_steps)


def token_flops(run: Assembly, sequence_len: int, *, again: bool = False) -> dict[str, float]:
    """FLOPs of training on one token, by the dtype that is multiplied: "bfloat16", "float32", "float8" or "float4".

    Products with the blocks' matrices have the recipe's dtypes in the layers with the recipe; attention and head have
    model_dtype. again: include the second forward pass of recomputed blocks, in which XLA drops the products that no
    gradient needs (`Segment.last_products`).
    """
    model = run.model
    work_dtype = run.engine.table.weights.dtype
    found = collections.defaultdict[str, float](float)
    attention = sum(segment.attention_flops(sequence_len) for segment in model.segments)
    # One pass forward, two backward: gradients of inputs, and of what is trained.
    total = 2.0 * (2 * model.num_matmul_params + model.trained_matmul_params) + 3 * attention
    total += attention if again else 0
    for segment in model.segments:
        for variant in segment.variants:
            forward, backward = operands(model.precision, variant.recipe_enabled, work_dtype)
            recomputed = segment.recomputed_matmul_size if again else 0
            factors = segment.factor_size  # in model_dtype: among what is left below
            found[forward] += 2 * (segment.matmul_size - factors + recomputed - factors * again)
            found[backward] += 2 * (segment.matmul_size + segment.trained_matmul_size - 2 * factors)
            total += 2 * recomputed
    found[work_dtype] += total - sum(found.values())
    return dict(found)


def operands(precision: Precision, recipe_enabled: bool, dtype: str) -> tuple[str, str]:
    """Dtypes of the factors of a block's matrix products, (forward, backward). dtype: that of the work weights."""
    if not recipe_enabled or precision.recipe == "bf16":
        forward = precision.matmul_dtype or dtype
        return forward, precision.gradient_dtype or forward
    emulated = precision.recipe in BLOCK_SCALED and precision.emulate
    low = "float32" if emulated else "float4" if precision.recipe == "nvfp4" else "float8"
    return low, low


def step_flops(run: Assembly, batch: Batch) -> dict[str, float]:
    """FLOPs of a step on each GPU by dtype, as in `token_flops`, with recomputed blocks and the optimizer."""
    per_token = token_flops(run, batch.sequence_len, again=run.engine.recompute_block)
    tokens = batch.tokens * batch.microbatches / (devices_per_sequence(run.mesh) * pipeline_stages(run.mesh))
    found = {dtype: size * tokens for dtype, size in per_token.items()}
    for segment in run.model.segments:
        for p, master, _ in shares.trained(run, segment.name):
            if p.kind is Kind.MATRIX:
                groups = shares.layers_of(run, segment) // shares.layers_together(run, segment, master)
                found[run.engine.table.weights.dtype] += groups * run.optimizer.matrices.flops(p.shape)
    return found


def compute_time(gpu: Gpu, flops: dict[str, float]) -> float:
    """Seconds that FLOPs take at the peak rate of their dtype; for float32 the tensor cores' TF32 rate."""
    peak = {
        "bfloat16": gpu.bf16_flops,
        "float32": gpu.tf32_flops,
        "float8": gpu.fp8_flops or gpu.bf16_flops,
        "float4": gpu.fp4_flops or gpu.bf16_flops,
    }
    return sum(size / peak[dtype] for dtype, size in flops.items())


def device_traffic(run: Assembly, batch: Batch) -> int:
    """Least bytes that a step reads from and writes to device memory on each GPU: weights, state and residuals."""
    model = run.model
    weights_of = run.engine.layouts.weights
    engine = run.engine
    n = shards(run.mesh)
    k = batch.microbatches
    table = engine.table
    work, accum = (jnp.dtype(row.dtype).itemsize for row in (table.weights, table.grads))
    trained = sum(shares.elements_of(run, *shares.segment_names(run)))
    stored = 1 if table.persistent_quants else work

    def read(segment: Segment, p: Param) -> float:
        """Bytes of a number in a pass. In a base's format codes are read, and numbers written and read."""
        coded = shares.coded_bytes(run, segment, p)
        return coded + 2 * work if coded else stored

    blocks = sum(
        shares.layers_of(run, segment) * shares.elements(run, p, layout) * read(segment, p)
        for segment in model.segments
        for p, layout in shares.with_layouts(run, segment.name, weights_of)
    )
    outer = sum(shares.elements(run, *pair) for pair in shares.with_layouts(run, OUTER, weights_of))
    passes = 3 if engine.recompute_block else 2
    weights = k * (passes * blocks + 3 * work * outer / (n if table.outer.sharded else 1))
    gradients = 2 * k * accum * trained / (n if table.grads.sharded else 1)
    state = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves((run.plan.master, run.plan.moments))
    )
    tokens = batch.tokens // devices_per_sequence(run.mesh)
    layers = shares.layers_of(run, *run.model.segments)
    residuals = 2 * k * layers * tokens * run.model.hidden_size * work
    return round(weights + gradients + 2 * state + residuals)


def host_bytes(run: Assembly, batch: Batch, rows: dict[str, dict[str, int]]) -> tuple[int, int]:
    """(host to device, device to host) bytes per step and GPU; rows: bytes by class of tensors and by memory.

    Weights, or their persistent 8-bit copies, are read twice a group of microbatches; with overlap_update the first
    group's forward pass has them from the update. Those that are trained are written once a step. Gradients are written
    once a group, and read by the next group or the update. Residuals are written and read once a microbatch. Master
    weights and moments are read and written once a step; those in files pass through host memory.
    """
    groups = groups_of(run, batch)
    host = {name: row["host"] + row["nvme"] for name, row in rows.items()}
    weights = host["weights"] + host.get("quants", 0)
    state = host["master"] + host["moments"]
    residuals = groups * host["residuals"]  # a group's are in host memory together
    grads = groups * host["grads"]
    fetched = (2 * groups - run.engine.overlap_update) * weights
    read_grads = written_grads = grads
    stages = pipeline_stages(run.mesh)
    if stages > 1:
        # Residuals in flight are there together. The layers that a pass begins with are copied in once a step. Every
        # backward pass reads and writes accumulators of a layer more. These begin as zeros there, and after the last
        # tick all are read once more, for the norm, and written if sums were still local.
        table = run.engine.table
        layers = shares.layers_of(run, *run.model.segments)
        residuals //= slots(run, batch.microbatches)
        fetched += 2 * (1 + table.weights.sharded) * weights // layers
        grads += groups * host["grads"] // layers
        are_local = run.mesh.shape[REPLICATE] > 1 or (shards(run.mesh) > 1 and not table.grads.sharded)
        read_grads = grads + 2 * host["grads"]
        written_grads = grads + host["grads"] + host["grads"] // layers + are_local * host["grads"]
    read = fetched + read_grads + residuals + state
    written = round(_updated_part(run) * weights) + written_grads + residuals + state
    return read, written


def groups_of(run: Assembly, batch: Batch) -> int:
    """Groups of microbatches in a step; for each, a layer's weights and accumulators are fetched once a pass."""
    return layer_passes(run, batch.microbatches) // run.engine.microbatches_per_fetch


def attention_again(run: Assembly) -> bool:
    """True if the backward pass computes attention again."""
    return run.engine.recompute_block or run.model.compute.recompute.att


def _updated_part(run: Assembly) -> float:
    """The fraction of the bytes of the layers' work weights that a step updates: those that are trained."""
    names = shares.segment_names(run)
    stored = {name: run.plan.weights[name] for name in names}
    trained = part_of(stored, {name: run.plan.master[name] for name in names})
    updated, whole = (sum(map(leaf_bytes, jax.tree.leaves(tree))) for tree in (trained, stored))
    return updated / whole


def bounds(
    gpu: Gpu,
    *,
    flops: dict[str, float],
    device_bytes: int,
    link_bytes: int,
    h2d: int,
    d2h: int,
    link_seconds: float | None = None,
) -> dict[str, float]:
    """Least seconds that each resource is busy in a step. flops: by dtype, from `step_flops`.

    link_seconds: those of the collectives, each at the bandwidth of its link; None: all are within a machine.

    If GPUs communicate over PCI Express, collectives and host copies share it. Then each direction carries the bytes of
    both that a GPU sends, or receives.
    """
    return {
        "compute": compute_time(gpu, flops),
        "device memory": device_bytes / gpu.memory_bandwidth,
        "link": link_bytes / gpu.link_bandwidth if link_seconds is None else link_seconds,
        "pcie": (max(h2d, d2h) + (link_bytes if gpu.shares_pcie else 0)) / gpu.pcie_bandwidth,
    }
