"""Chooses the XLA options that a step is compiled with, with the reasons."""

import math
from pathlib import Path

from surojax.assembly.assemble import Assembly
from surojax.models.model import Model
from surojax.parallel import collectives
from surojax.placement import cuda_plugin
from surojax.placement.home import HOST
from surojax.step.spec import EXACT, OVERLAP
from surojax.step.state_plan import bytes_per_device

AUTO = "auto"  # a value of the field cuda_graphs

# Matrix products by cuBLASLt alone, for `plan` and `train` alike. XLA's own (Triton) are chosen by timing, which a
# machine without a GPU cannot do, so that `plan` showed other programs than ran. As candidates for Triton, products
# copy a layer's weights out of their stack, and SwiGLU is cut in four passes (compiled for an H200: 328 ms of passes
# and copies a step of 7B instead of 184), and a step of fp8_hybrid has 21 kinds of products to time instead of 12.
PRODUCTS: dict[str, str | bool | int] = {"xla_gpu_enable_triton_gemm": False}
# XLA of the plugin 0.11 computes a product twice if a fusion writes its result into a stack and others read it (13
# forward products in the loop of 7B instead of 7).
UNFUSED_SLICES: dict[str, str | bool | int] = {"xla_gpu_enable_dynamic_slice_fusion": False}

# The same kernel for the same product in every program, and no kernel whose result differs from run to run, so that an
# offload, a placement or a resumed run changes no bit. Products within fusions that slice have another workspace and
# algorithm; timing may choose another one in each process. cuDNN's backward attention adds in a fixed order under XLA's
# option for the whole program, which would sort every scatter that may write a place twice: a step has none. Its own
# setting, `force_deterministic` in the configuration of the call, is kept by XLA 0.12 but not offered by JAX.
PINNED: dict[str, str | bool | int] = UNFUSED_SLICES | {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_exclude_nondeterministic_ops": True,
}

# Compares, while a step runs, the offsets at which copy engines slice host memory with those that the loop's counter
# gives: XLA once sliced forward in reverse loops (openxla issue 46231). For doctor and the campaign.
VERIFY_OFFSETS: dict[str, str | bool | int] = {"xla_gpu_experimental_dynamic_slice_fusion_verify_offsets": True}

# XLA options that overlap copies and communication with computation. In the engine's program all copies and all-gathers
# of a layer can start when the layer starts (engine.py). With XLA's defaults, each was nevertheless started and awaited
# at the same place in the schedule, most of them after the last matrix product of the layer. Source: schedules compiled
# for an RTX 4090 and an H200 (jax 0.12, 2026-11-21; docs/log). Not timed with and without on a GPU.
SCHEDULE: dict[str, str | bool | int] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,  # False by default, although the documentation says otherwise
    "xla_gpu_experimental_parallel_async_compute_limit": 32,  # host copies in flight: all of a layer; 1 by default
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 32,  # one all-gather per layer, which overlaps with all of it
}
# XLA turns runs of operations, loops and their copies among them, into CUDA graphs, in which it orders every operation
# after the one before. On an H200 (jax 0.11.2, 2026-11-27) a step of eight layers of 7B with five offloads copied for
# 719 of 1,183 ms and computed for 463, none of it at the same time; two copies each way, too few for a graph, had
# 49 GB/s in each direction at once, 32 each way had 31. Where nothing is to overlap, graphs save launches.
NO_GRAPHS: dict[str, str | bool | int] = {"xla_gpu_enable_command_buffer": ""}
# Values of the field cuda_graphs. Copies between host and device are of the kind DYNAMIC_SLICE_FUSION: with neither
# them nor loops in graphs, they stay on their own streams. CONCURRENT orders a graph by the buffers that its operations
# read and write. Which is fastest beside offloads was not timed (benchmarks/silicon.py, item offloads-8).
KERNELS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL"
GRAPHS: dict[str, dict[str, str | bool | int]] = {
    "none": NO_GRAPHS,
    "small": {"xla_gpu_enable_command_buffer": KERNELS},
    "concurrent": {
        "xla_gpu_enable_command_buffer": f"{KERNELS},WHILE,DYNAMIC_SLICE_FUSION",
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    },
}

# XLA takes a collective to last as long as five products, and begins it so much earlier than it is awaited. Over PCI
# Express the link then rested for the first 4.5 of a layer's 60 ms backward (7B at ZeRO-3 on four RTX 4090). There is
# no option for that, but XLA reads a profile: this one has nothing but all-gathers, of eight products. Shards that come
# from host memory are not there as early: 70B with five offloads on 8 H100 gained nothing and needed 5.87 instead of
# 5.76 GiB, so they go without. What the profile lacks is estimated as before, which the check of measured profiles
# would call an error.
GATHERS: dict[str, str | bool | int] = {
    "xla_gpu_pgle_profile_file_or_directory_path": str(Path(__file__).with_name("gathers.pbtxt")),
    "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF",
}

# Percentage of a GPU's memory that XLA lets temporaries of a program use, 95 by default. Above this limit XLA
# recomputes operations and does not prefetch.
# XLA counts temporaries in host memory (accumulators, residuals) as device memory, so `compiler_options` adds them to
# the limit. Qwen-32B with everything offloaded, on 4 RTX 4090: 4,284 operations per step were recomputed without the
# correction and none with it (jax 0.12). Arguments in host memory are not counted, whatever their size, unless one loop
# writes to many of them: with overlap_update the state there is added too (7B with five offloads on one RTX 4090: 112
# operations without that, none with it).
# To XLA's count each write into a stack makes a new one: one in the body of a loop over layers, one around it. A round
# of several kinds writes a stack several times, and resident layers make several loops: accumulators of 12.9 GiB were
# counted 3.5 times, stacks on the device likewise, for Qwen3.5 9B with master weights in files and 14 resident layers.
# With two times XLA recomputed 19,967 operations (27.1 GiB), with enough none. With none resident, all offloaded and
# overlap_update, 20.9 GiB were counted 3.1 times, and two times recomputed 2,369 operations (20.43 s, 20.39 without).
# The percentage applies to the memory that XLA plans with, minus the arguments and what is returned beside them; in
# `plan` too that is what JAX can use of the card (fact 7 of planner/aot.py). With 80 % of the card, Llama-7B at ZeRO-3
# on 4 RTX 4090 had 2.7 GiB instead of 6.4, so that XLA recomputed 2,499 operations and overlapped no all-gather of
# weights.
# XLA's estimate of a step may be above and below what its buffers take: 22.2 and 21.4 GiB for that 7B, 21.3 and 21.9
# for 30B with experts. So a step is compiled for all that JAX can use, and for 95 % if it then does not fit.
MEMORY_LIMIT = "xla_gpu_memory_limit_slop_factor"
ALL_MEMORY = 1.0
LESS_MEMORY = 0.95


# Recipes fp8_*: XLA does not merge products that share an operand (queries, keys, values). To merge them, XLA copies
# the weights into one array and the results out of one: 290 MiB for a 7B block of 2048 tokens, whose products read and
# write 104 MiB. In 16 bits merging costs as much, but there copies overlap worse without it (docs/log). Of experts
# it would merge gate and up for every block of rows: 2 % of a step of Qwen3-30B-A3B.
APART: dict[str, str | bool | int] = {"xla_gpu_dot_merger_threshold_mb": 0}


def schedule_options(model: Model) -> dict[str, str | bool | int]:
    """Returns the XLA options that schedule a step of this model on a GPU."""
    has_experts = any(segment.statistics is not None for segment in model.segments)
    return SCHEDULE | (APART if model.precision.fp8 or has_experts else {})


def has_graphs(run: Assembly) -> bool:
    """Returns True if XLA may make CUDA graphs of a run's step on a GPU."""
    return compiler_options(run, "gpu").get("xla_gpu_enable_command_buffer") != ""


def compiler_options(
    run: Assembly,
    platform: str,
    *,
    memory_bytes: int | None = None,
    host_temporaries: int = 0,
    results: int = 0,
    share: float = LESS_MEMORY,
) -> dict[str, str | bool | int]:
    """Returns the XLA options to compile a run's steps with on a platform, "gpu" or "cpu".

    memory_bytes: memory of a GPU that JAX can use, which XLA plans with. host_temporaries: bytes of host memory that a
    step allocates. results: bytes of device memory that a program returns beside its arguments. share: the part of
    memory_bytes that a step may need. XLA's memory limit is computed of these four, see `MEMORY_LIMIT`; without
    memory_bytes it is not changed. With xla_options="default" there are none but
    `PRODUCTS`, those of the copy engine settings and of cuda_graphs; "exact" adds `PINNED`.
    """
    if platform == "cpu":
        # With the collectives of a device in flight together, two cores deadlocked, and once read what was not
        # there yet (jaxlib 0.12, offloaded quants under tp).
        return {"xla_cpu_enable_concurrency_optimized_scheduler": False} if run.mesh.size > 1 else {}
    table = run.engine.table
    options = PRODUCTS | collectives.copy_engine_flags(table.copy_engine)
    if run.engine.cuda_graphs != AUTO:
        options |= GRAPHS[run.engine.cuda_graphs]
    if cuda_plugin.plugin_version() < (0, 12):
        options |= UNFUSED_SLICES
    if run.engine.xla_options == EXACT:
        options |= PINNED
    elif run.engine.xla_options != OVERLAP:
        return options
    schedule = schedule_options(run.model)
    if table.leaves_device or run.mesh.size > 1:
        schedule |= NO_GRAPHS
    if table.weights.sharded and not table.streams_weights:
        schedule |= GATHERS
    limit = {}
    if memory_bytes:
        taken = bytes_per_device(run.plan) + results
        left = memory_bytes - taken
        in_turn = len(run.model.stretches) < len(run.model.segments)  # layers of several kinds
        counted = 5 if in_turn else 2
        wanted = share * memory_bytes - taken + counted * host_temporaries
        if run.engine.overlap_update and not run.engine.table.in_files:
            wanted += bytes_per_device(run.plan, HOST)
        limit = {MEMORY_LIMIT: math.ceil(100 * wanted / left) if left > 0 else 95}
    return schedule | limit | options


def may_fit_in_less(needed: int, limit: int) -> bool:
    """True if a step that is compiled for `ALL_MEMORY` needs more than the limit, and may not if for `LESS_MEMORY`."""
    return limit < needed <= limit / LESS_MEMORY
