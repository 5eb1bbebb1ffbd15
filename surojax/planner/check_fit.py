"""Checks that a run fits the devices of this machine before anything is built, and says what to change if not."""

import dataclasses
import math
import os
from typing import Any, NamedTuple

import jax

from pallas_kernels import dispatch
from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import from_config
from surojax.cluster.hosts import processes_here
from surojax.config.changes import changed, differing, flags
from surojax.config.fields import Config, flat, gpus_per_sequence
from surojax.errors import ConfigError
from surojax.numerics.recipes import check_recipe
from surojax.offloads import OPTIONS, ROWS
from surojax.parallel.collectives import check_copy_engine
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import data_parallel, own_device
from surojax.planner import choices, remedies
from surojax.planner.amounts import Memory, gib, summed
from surojax.planner.footprint import DEFAULT_POOL, POOL_SETTING, estimate, estimate_host, needs
from surojax.planner.gpus import GPUS, POOL, find_gpu
from surojax.planner.search import Space
from surojax.planner.traffic import batch_of
from surojax.resources import FreeMemory, free_memory

UNKNOWN = "rtx4090"  # whose rates rank the settings for a device that gpus.csv does not have


class Room(NamedTuple):
    """Free bytes of each device, free host memory for this process, and how many of the devices it has.

    Other processes of this machine have equal parts of its memory; those of other machines have memory of their own.
    `FreeMemory.limit` names the limit that host memory is left of, if one is lower than what the machine has.
    """

    device: int
    host: FreeMemory
    devices: int


def check_fit(c: Config, run: Assembly, devices, available: int | None = None) -> dict[str, int]:
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
        check_kernels(c, run, devices[0])
    need = estimate(run, batch_of(c), platform=platform)
    in_host = {} if platform == "cpu" else estimate_host(run, batch_of(c))
    available = available_bytes(devices) if available is None else available
    own = sum(device.process_index == jax.process_index() for device in devices)
    room = Room(available, free_memory(processes_here(), compiles=True), own)
    of = f" of {room.host.limit}" if room.host.limit else ""
    if sum(need.values()) > available:
        each_device = f"the {kind} device" if n == 1 else f"each of the {n} {kind} devices"
        of = of if platform == "cpu" else ""
        lacks = f"needs {summed(need, digits=1)} on {each_device}, where {gib(available)} are free{of}"
    elif own * sum(in_host.values()) > room.host.size:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in in_host.items())
        of_all = f"{gib(own * sum(in_host.values()))} of host memory for {own} GPUs"
        lacks = f"needs {of_all} (each {parts}), where {gib(room.host.size)} are free{of}"
    else:
        return need
    changes = [*["raise that limit"] * bool(of), *_advice(c, devices, room)]
    raise ConfigError(f"does not fit: {lacks}; what would change it: {'; '.join(changes)}")


def check_kernels(c: Config, run: Assembly, device) -> None:
    """Raises ConfigError for kernels="mosaic" if a kernel does not support the device or the model.

    Traces the step, because only the traced step has the shapes that the kernels get. Nothing is compiled.
    """
    capability = dispatch.capability(device)
    major, minor = dispatch.OLDEST
    if capability is None or capability < dispatch.OLDEST:
        raise ConfigError(
            f"kernels: expected 'xla' or 'auto' on {device.device_kind}, got 'mosaic'; they are for NVIDIA GPUs of "
            f"compute capability {major}.{minor} or newer"
        )
    changes: dict[str, Any] = {"attention": "xla"}
    if run.engine.table.in_files:  # host memory instead: the same shapes in one program
        changes |= OPTIONS | {name: bool(c[name]) for name in ROWS} | {"overlap_update": False}
    run = from_config(changed(c, changes), run.mesh, total_steps=1)
    shape = (c.gradient_accumulation_steps, c.per_device_batch_size * data_parallel(run.mesh), c.sequence_len)
    try:
        jax.eval_shape(run.train_step(), run.plan, *run.engine.planned_batch(shape, batch_sharding(run.mesh)))
    except dispatch.Unserved as error:
        raise unserved(error) from error


def unserved(error: dispatch.Unserved) -> ConfigError:
    """The ConfigError for a model that kernels="mosaic" does not support."""
    reason = str(error).partition("\n")[0].partition("; use implementation")[0]
    return ConfigError(f"kernels: expected 'xla' or 'auto', got 'mosaic', but {reason}; use kernels='auto'")


def _advice(c: Config, devices, room: Room) -> list[str]:
    """Lines of text with changes that would make it fit."""
    n = len(devices)
    available = room.device
    platform = devices[0].platform
    lines = []
    more = int(available * POOL / DEFAULT_POOL)  # bytes available with POOL_SETTING
    chosen = POOL_SETTING.partition("=")[0] in os.environ
    if platform == "gpu" and not chosen and available < needs(c, n, platform).device <= more:
        lines.append(
            f"{POOL_SETTING} in the environment: JAX takes {DEFAULT_POOL} of a GPU's memory by itself, so {gib(more)} "
            "(fits)"
        )
    facts = find_gpu(devices[0].device_kind)
    gpu = dataclasses.replace(facts or GPUS[UNKNOWN], gpus_per_node=room.devices)
    limits = Memory(available, math.inf if platform == "cpu" else room.host.size, math.inf if c.nvme_path else 0)
    own = changed(c, {"gpus": n})
    if proposals := remedies.proposals(Space(own, gpu, limits, few=True, platform=platform)):
        device = "GPU" if platform == "gpu" else "device"
        return lines + [proposal.line(timed=facts is not None, device=device) for proposal in proposals]
    lines.append("a smaller model or a machine with more memory")
    if platform == "cpu":
        on_gpus = [choices.with_gpus(own, gpus) for gpus in (1, 4, 8) if gpus % gpus_per_sequence(c) == 0]
        named = [flags({"gpus": x.gpus} | differing(own, flat(x))) for x in on_gpus]
        sizes = [gib(needs(x, x.gpus, "gpu").device) for x in on_gpus]
        each = ", ".join(f"{name} needs {size} on each" for name, size in zip(named, sizes, strict=True))
        lines += [f"NVIDIA GPUs: {each}"] if each else []
    return lines


def available_bytes(devices) -> int:
    """Free bytes of each device: of the GPU's memory, or for CPU devices an equal part of the free host memory."""
    device = own_device(devices)
    if (limit := memory_limit(device)) is not None:
        return limit - device.memory_stats().get("bytes_in_use", 0)
    processes = len({device.process_index for device in devices})
    return free_memory(processes, compiles=True).size // (len(devices) // processes)


def memory_limit(device) -> int | None:
    """Bytes of a device's memory that JAX may use and XLA plans with; None on CPUs and if the device reports none."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return (stats or {}).get("bytes_limit")
