"""The device mesh and its axes, outermost first: `pp`, `dp_replicate`, `dp_shard`, `ep`, `cp`, `tp`, `tp_rep`.

The batch is sharded over `dp_replicate x dp_shard`, and every sequence over `cp` (parallel/context.py). State is
sharded over `dp_shard x cp`, so that each replica stores one complete copy. With several replicas of several shards,
this is HSDP.

`ep` is a part of dp_shard_size: the devices along it have tokens and shards of their own as those along `dp_shard`, but
keep their experts, and send each other tokens instead (parallel/expert_dispatch.py). Wherever `dp_shard` is said
without `ep`, both are meant.

Heads, MLP and vocabulary are sharded over `tp x tp_rep`, the tp_size devices of a tensor-parallel group, which have the
same sequences (parallel/tensor.py). With fewer key/value heads than tp_size, there are as many devices along `tp` as
key/value heads, and those along `tp_rep` share a head's keys and values; else `tp_rep` has one device.

Layers are divided over the stages of `pp`, which have the same sequences (step/pipeline.py), and so is the vocabulary.

The mesh always has the two data axes. Another axis with one device is not in it.
"""

import logging
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from surojax.errors import ConfigError
from surojax.resources import GiB, cores, too_little_to_compile, total_memory, visible_cores

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # environment variable: GiB of host memory that a process pins
XLA_THREADS = "NPROC"  # environment variable: threads of each of XLA's pools
REPLICATE = "dp_replicate"
SHARD = "dp_shard"
EXPERT = "ep"
DATA = (REPLICATE, SHARD)  # every mesh has them
BATCH = (*DATA, EXPERT)  # the batch is sharded over them
CONTEXT = "cp"
SHARDS = (SHARD, EXPERT, CONTEXT)  # state is sharded over them
TOKENS = (*BATCH, CONTEXT)  # their devices have tokens of their own in products with weights
KV_HEADS = "tp"
SAME_KV_HEADS = "tp_rep"
TENSOR = (KV_HEADS, SAME_KV_HEADS)
PIPELINE = "pp"
AXES = (PIPELINE, *TOKENS, *TENSOR)


def find_devices(gpus: int) -> list:
    """The first `gpus` devices of the default backend; 0: all devices. Raises ConfigError if there are fewer.

    Also if a limit of this process leaves no memory to compile programs in.
    """
    expect_no_cuda_without_driver()
    allow_host_memory()
    keep_to_quota()
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200] or f"JAX_PLATFORMS={jax.config.jax_platforms}"
        change = "install what drives them (pip install 'surojax[cuda]'), or set JAX_PLATFORMS=cpu"
        raise ConfigError(f"gpus: expected devices that JAX can use, got none ({reason}); {change}") from error
    if reason := too_little_to_compile():
        raise ConfigError(f"memory: {reason}")
    several = jax.process_count() > 1
    if several and gpus not in (0, len(devices)):
        raise ConfigError(
            f"gpus: expected 0 or {len(devices)}, all devices of {jax.process_count()} processes, got {gpus}; use 0"
        )
    if gpus > len(devices):
        kind = devices[0].device_kind
        hint = f" (virtual ones: XLA_FLAGS=--xla_force_host_platform_device_count={gpus})" if kind == "cpu" else ""
        raise ConfigError(
            f"gpus: expected at most {len(devices)} ({kind}), got {gpus}; lower it or use 0 for all{hint}"
        )
    chosen = devices[: gpus or len(devices)]
    if len(chosen) > 1 and chosen[0].platform == "cpu":
        disable_compilation_cache()
    return chosen


def allow_host_memory() -> None:
    """Lets XLA pin all memory that the machine or its container has for GPUs, before JAX's backends are made.

    It stops at 64 GiB otherwise, in each process, less than a 7B model has there. A limit of the user's is kept.
    """
    os.environ.setdefault(HOST_LIMIT, str(max(1, total_memory() // GiB)))


def keep_to_quota() -> None:
    """Gives XLA's pools as many threads as this process may keep busy, before JAX's backends are made.

    By itself XLA starts one for each processor that it sees, also in a container whose quota is less. A number of the
    user's is kept.
    """
    if (count := cores()) < visible_cores():
        os.environ.setdefault(XLA_THREADS, str(count))


def disable_compilation_cache() -> None:
    """Disables JAX's cache of compiled programs, if there is one, for several CPU devices, and warns.

    XLA:CPU (jaxlib 0.12) forgets the order of a program's collectives when the program is written. Of one that is read
    two collectives can meet, which aborts the run or, seldom, computes something else.
    """
    if jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX asks once whether there is one
        warnings.warn("compilation cache: not used with several CPU devices, whose programs it breaks", stacklevel=2)


def own_device(devices: Sequence):
    """The first device that belongs to this process: only local devices report their memory."""
    return next(device for device in devices if device.process_index == jax.process_index())


def mesh_shape(
    n: int,
    *,
    dp_replicate_size: int = 1,
    dp_shard_size: int = -1,
    ep_size: int = 1,
    cp_size: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    kv_heads: int = 0,
) -> dict[str, int]:
    """The size of each axis of a mesh of n devices.

    dp_shard_size: -1: all that the other sizes leave. ep_size: a part of it. kv_heads: key/value heads of the model; 0:
    as many as tp_size. Raises ConfigError if the product of the sizes is not n, if ep_size does not divide
    dp_shard_size, or if neither of tp_size and kv_heads divides the other.
    """
    sizes = {"dp_replicate_size": dp_replicate_size, "dp_shard_size": dp_shard_size}
    within = {"cp_size": cp_size, "tp_size": tp_size, "pp_size": pp_size}
    sizes |= {name: size for name, size in within.items() if size > 1}
    others = dp_replicate_size * cp_size * tp_size * pp_size
    if dp_shard_size == -1 and n % others:
        fields = " x ".join(name for name in sizes if name != "dp_shard_size")
        change = f"use {math.gcd(n, others)}, or gpus={math.ceil(n / others) * others}"
        raise ConfigError(f"{fields}: expected a divisor of the {n} devices in use, got {others}; {change}")
    sizes["dp_shard_size"] = n // others if dp_shard_size == -1 else dp_shard_size
    product = math.prod(sizes.values())
    if product != n:
        change = f"set gpus={product}, or leave dp_shard_size out"
        got = f"{' x '.join(map(str, sizes.values()))} = {product}"
        raise ConfigError(f"{' x '.join(sizes)}: expected {n}, the devices in use, got {got}; {change}")
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ConfigError(
            f"tp_size: expected a multiple or a divisor of {kv_heads} key/value heads, got {tp_size}; lower it"
        )
    if sizes["dp_shard_size"] % ep_size:
        raise ConfigError(
            f"ep_size: expected a divisor of dp_shard_size={sizes['dp_shard_size']}, got {ep_size}; "
            f"use {math.gcd(ep_size, sizes['dp_shard_size'])}, or more GPUs along dp_shard_size"
        )
    along_heads = math.gcd(tp_size, kv_heads) if kv_heads else tp_size
    within_data = {EXPERT: ep_size, CONTEXT: cp_size, KV_HEADS: along_heads, SAME_KV_HEADS: tp_size // along_heads}
    data = {REPLICATE: dp_replicate_size, SHARD: sizes["dp_shard_size"] // ep_size}
    stages = {PIPELINE: pp_size} if pp_size > 1 else {}
    return stages | data | {name: size for name, size in within_data.items() if size > 1}


def data_parallel(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Number of groups of devices that each compute different sequences."""
    return math.prod(mesh.shape.get(axis, 1) for axis in BATCH)


def tensor_parallel(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Number of devices of a tensor-parallel group."""
    return math.prod(mesh.shape.get(axis, 1) for axis in TENSOR)


def devices_per_sequence(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Number of devices that each have a part of the same sequences."""
    return mesh.shape.get(CONTEXT, 1) * tensor_parallel(mesh)


def shard_axes(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> tuple[str, ...]:
    """The mesh axes of several devices over which state is sharded."""
    return tuple(axis for axis in SHARDS if mesh.shape.get(axis, 1) > 1)


def shards(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Number of devices over which each replica of the state is sharded."""
    return math.prod(mesh.shape[axis] for axis in shard_axes(mesh))


def pipeline_stages(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Number of stages of pipeline parallelism."""
    return mesh.shape.get(PIPELINE, 1)


def has_driver() -> bool:
    """True if NVIDIA's driver is installed."""
    return any(map(Path.exists, (Path("/dev/nvidiactl"), Path("/dev/dxg"))))  # Linux, and WSL


def expect_no_cuda_without_driver() -> None:
    """Hides JAX's log of a CUDA plugin that cannot start, if NVIDIA's driver is not installed.

    The plugin is installed without the driver to compile for GPUs on a machine that has none (planner/aot.py).
    """
    if not has_driver():
        logging.getLogger("jax._src.xla_bridge").addFilter(_no_plugin_error)  # once, however often it is added


def _no_plugin_error(record: logging.LogRecord) -> bool:
    return "plugin configuration error" not in str(record.msg)


expect_no_cuda_without_driver()  # before JAX's first use, wherever that is


def make_mesh(devices: Sequence, **sizes: int) -> jax.sharding.Mesh:
    """A mesh over the devices. sizes: of `mesh_shape`, which says what it raises."""
    shape = mesh_shape(len(devices), **sizes)
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.sharding.Mesh(np.array(devices).reshape(tuple(shape.values())), tuple(shape), axis_types=auto)


def abstract_mesh(devices: int, **sizes: int) -> jax.sharding.AbstractMesh:
    """The mesh of `make_mesh`, over this number of devices that need not exist."""
    shape = mesh_shape(devices, **sizes)
    return jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape))
