"""Checks a machine's installation, memory and disk, and compares its rates with the planner's."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench
from surojax.assembly.xla_options import NO_GRAPHS, SCHEDULE
from surojax.diagnosis.verdict import Asked, Verdict, attempt, failed, ok, skipped
from surojax.errors import ConfigError
from surojax.memory import host, nvme
from surojax.memory.layer_file import Store
from surojax.placement import cuda_plugin
from surojax.placement.home import DEVICE, HOST, Home
from surojax.placement.mesh import find_devices, has_driver
from surojax.planner import costs, seen
from surojax.planner.amounts import gib
from surojax.planner.check_fit import memory_limit
from surojax.planner.footprint import DEFAULT_POOL, POOL_SETTING
from surojax.planner.gpus import GB, Gpu, find_gpu
from surojax.resources import cores, free_memory, group_limits, own_limits, total_memory
from surojax.verification.settings import OFFLOADS

MiB = 2**20
PACKAGES = ("surojax", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13")
FRACTION = POOL_SETTING.partition("=")[0]
PINNED_BYTES = 256 * MiB
DISK_BYTES = 256 * MiB
COPIED_BYTES = 512 * MiB  # over the host link
PRODUCT = 8192  # rows and columns of the matrices
TURNS = 10  # of which the median counts
WARM_S = 2.0  # of products before they are measured
UNLIMITED = 2**63 - 1


# -- Installation -----------------------------------------------------------------------------------------------------


def installation(asked: Asked) -> Iterator[Verdict]:
    """Reports versions, devices and their memory, and whether the planner knows the GPU."""
    check = "installation"
    yield from attempt(check, "versions", lambda: ok(check, "versions", versions()))
    devices: list = []

    def judge_devices() -> Verdict:
        try:
            devices.extend(find_devices(0))
        except ConfigError as error:  # without devices nothing runs at all
            return failed(check, "devices", str(error))
        first = devices[0]
        if first.platform == "cpu" and has_driver():
            change = "pip install 'surojax[cuda]', and leave JAX_PLATFORMS out of the environment"
            return failed(check, "GPU", f"NVIDIA's driver is installed, but JAX uses the CPU: {change}")
        if first.platform == "cpu":
            return ok(check, "devices", f"no GPU; {len(devices)} virtual CPU devices stand for GPUs")
        limit = memory_limit(first)
        memory_text = f", of whose memory JAX has {gib(limit)}" if limit else ""
        fraction = os.environ.get(FRACTION)
        memory_text += f" ({FRACTION}={fraction})" if fraction else f" ({FRACTION} is not set, so {DEFAULT_POOL})"
        return ok(check, "devices", f"{len(devices)} x {first.device_kind}{memory_text}")

    yield from attempt(check, "devices", judge_devices)
    if devices:
        yield from attempt(check, "planner", known_to_planner, devices[0])
        yield from attempt(check, "CUDA plugin", judge_plugin, devices[0])


def judge_plugin(device) -> Verdict:
    """Checks that XLA of the installed CUDA plugin copies to and from host memory at the same time."""
    check, part = "installation", "CUDA plugin"
    if device.platform != "gpu":
        return skipped(check, part, "no GPU")
    slow = cuda_plugin.copies_slowly()
    return failed(check, part, slow) if slow else ok(check, part, cuda_plugin.plugin_version_text())


def versions() -> str:
    """Lists the versions of Python, the packages that matter, the system and NVIDIA's driver."""
    installed = []
    for name in PACKAGES:
        try:
            installed.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([f"Python {platform.python_version()}", *installed, platform.platform(), driver()])


def driver() -> str:
    """Returns NVIDIA's driver version, GPUs and memory in a line; a note in words without a driver."""
    if not (command := shutil.which("nvidia-smi")):
        return "no nvidia-smi"
    query = [command, "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    lines = " | ".join(done.stdout.split("\n")).strip(" |")
    return f"driver: {lines}" if done.returncode == 0 and lines else f"nvidia-smi: {' '.join(done.stderr.split())}"


def known_to_planner(device) -> Verdict:
    """Checks that gpus.csv has this kind of GPU."""
    check, part = "installation", "planner"
    if device.platform == "cpu":
        return skipped(check, part, "no GPU to look up")
    gpu = find_gpu(device.device_kind)
    if gpu is None:
        return failed(check, part, f"{device.device_kind!r} is no GPU whose facts are known: no time is predicted")
    rates = "" if gpu.rates else ", without rates"
    return ok(check, part, f"{gpu.name} is known, with {gib(gpu.memory_bytes)}{rates}")


# -- Host memory and disk ---------------------------------------------------------------------------------------------


def host_memory(asked: Asked) -> Iterator[Verdict]:
    """Reports free host memory and its limits, and checks that pinned memory can be allocated."""
    check = "host_memory"

    def limits() -> Verdict:
        free = free_memory()
        total = total_memory()
        return ok(check, "free", f"{gib(free.size)} of {gib(total)} are free; {', '.join(process_limits())}")

    def pinned() -> Verdict:
        numbers = np.arange(PINNED_BYTES // 4, dtype=np.int32)
        device = find_devices(0)[0]
        there = jax.device_put(numbers, jax.sharding.SingleDeviceSharding(device, memory_kind=HOST.memory_kind))
        if there.sharding.memory_kind != HOST.memory_kind or not np.array_equal(there, numbers):
            return failed(check, "pinned", "numbers that were put there came back otherwise", OFFLOADS)
        return ok(check, "pinned", f"{gib(PINNED_BYTES)} were put there and came back")

    yield from attempt(check, "free", limits)
    yield from attempt(check, "pinned", pinned, options=OFFLOADS)


def process_limits() -> list[str]:
    """Describes the limits on this process' memory in words."""
    limits = []
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        unlimited = soft in (resource.RLIM_INFINITY, UNLIMITED)
        limits.append(f"locked memory {'unlimited' if unlimited else f'at most {gib(soft)}'}")
    except (ImportError, ValueError, OSError):
        limits.append("locked memory: the system does not say")
    limits += [limit.text for limit in (*group_limits(), *own_limits())] or ["no limit of a container or a shell"]
    return [*limits, f"{cores()} of {os.cpu_count()} processors"]


def disk(asked: Asked) -> Iterator[Verdict]:
    """Measures a folder's disk; fails if the rates are below an NVMe disk's and the folder was named by the user."""
    check = "disk"
    folder = asked.nvme_path or "."

    def rates() -> Verdict:
        written, read = disk_rates(Path(folder), DISK_BYTES, asked.sustained_s)
        for_long = f" for {asked.sustained_s:g} s" * bool(asked.sustained_s)
        said = f"written at {written / MiB:,.0f} MiB/s{for_long}, read at {read / MiB:,.0f} MiB/s"
        slow = min(written, read) < nvme.SLOW_MIB_S * MiB
        said += f"; state in files wants {nvme.SLOW_MIB_S} and more"
        if asked.sustained_s:
            rates = seen.DiskRates(read, written)
            said += f" ({seen.record_disk(asked.rates_file, str(Path(folder).absolute()), rates)})"
        if slow and asked.nvme_path:
            return failed(check, folder, said, OFFLOADS)
        return ok(check, folder, said + (" (--nvme-path FOLDER measures another disk)" if not asked.nvme_path else ""))

    yield from attempt(check, folder, rates, options=OFFLOADS)


def disk_rates(folder: Path, size: int, sustained_s: float = 0.0) -> tuple[float, float]:
    """Measures (bytes/s written, bytes/s read) with a new file of this size, which is removed.

    sustained_s: seconds for which a larger one, of half the free space, is written over and over; the rate is that of
    the second half of them, when a drive's cache is full. 0: not at all.
    Where the system cannot go past its page cache (macOS), what is read comes from there.
    """
    if sustained_s:
        size = max(size, shutil.disk_usage(folder).free // 2)
    with tempfile.TemporaryDirectory(prefix="doctor", dir=folder) as inside:
        store = Store(inside, 1)
        store.places.reserve(size, "master")
        try:
            written = sustained_rate(store, sustained_s) if sustained_s else nvme.write_rate(store)
            return written, nvme.read_rate(store)
        finally:
            store.close()


def sustained_rate(store: Store, seconds: float) -> float:
    """Writes a store's file over and over for so long; returns bytes/s of the second half of the time."""
    data = np.frombuffer(np.random.default_rng(0).bytes(nvme.CHUNK), np.uint8)
    last = max(1, store.places.bytes // len(data)) - 1  # the number of the last chunk of the file
    data = data[: store.places.bytes]
    start = half = time.perf_counter()
    counted = number = 0
    while (now := time.perf_counter()) < start + seconds or not counted:
        if half == start and now >= start + seconds / 2:
            half, counted = now, 0
        store.write_file(data, number * len(data))
        number = number + 1 if number < last else 0
        counted += len(data)
    store.file.sync()
    return counted / (time.perf_counter() - half)


# -- Rates ------------------------------------------------------------------------------------------------------------


def rates(asked: Asked) -> Iterator[Verdict]:
    """Compares rates of host link, device memory and matrix products with the planner's, and records them."""
    check = "rates"
    device = find_devices(0)[0]
    gpu = find_gpu(device.device_kind)
    if device.platform != "gpu" or gpu is None:
        why = "no GPU" if device.platform != "gpu" else f"the planner has no rates of {device.device_kind!r}"
        yield skipped(check, "link, memory, products", f"{why} to compare with")
        return
    measured: dict[str, float] = {}
    yield from attempt(check, "host link", host_link, device, gpu, measured, options=OFFLOADS)
    yield from attempt(check, "both ways", both_ways, device, gpu, measured, options=OFFLOADS)
    yield from attempt(check, "device memory", device_memory, gpu, measured)
    yield from attempt(check, "products", matrix_products, gpu, measured)
    for name, value in measured.items():
        said = seen.record_rate(asked.rates_file, device.device_kind, name, value)
        verdict = ok if said.startswith("written") else skipped
        yield verdict(check, f"{name} for the planner", said or "not written: no --rates-file")


def host_link(device, gpu: Gpu, measured: dict[str, float]) -> Verdict:
    """Measures the host link in both directions; the planner assumes their mean, since as many bytes go each way."""
    to_host, to_device = (size_per_s(device, home, COPIED_BYTES) for home in (HOST, DEVICE))
    mean = 2 / (1 / to_host + 1 / to_device)
    said = f"to the GPU {to_device / GB:.1f}, from it {to_host / GB:.1f} GB/s"
    return beside("host link", gpu, "host", mean, gpu.pcie_bandwidth, said, measured, OFFLOADS)


def both_ways(device, gpu: Gpu, measured: dict[str, float]) -> Verdict:
    """Measures the host link in both directions at once, as a fraction of its rate in one, which a step has too."""
    rate = both_ways_per_s(device, COPIED_BYTES)
    one_way = measured.get("host", gpu.rates.host) * gpu.pcie_bandwidth
    said = f"{rate / GB:.1f} GB/s in each direction at once"
    return beside("both ways", gpu, "duplex", rate, one_way, said, measured, OFFLOADS, of="one way")


def device_memory(gpu: Gpu, measured: dict[str, float]) -> Verdict:
    """Measures the rate at which a large copy reads and writes device memory."""
    seconds = bench.call_seconds({"copy": bench.copier()}, TURNS)["copy"]
    rate = 2 * bench.COPY_BYTES / seconds
    return beside("device memory", gpu, "memory", rate, gpu.memory_bandwidth, f"{rate / GB:,.0f} GB/s", measured)


def matrix_products(gpu: Gpu, measured: dict[str, float]) -> Verdict:
    """Measures the FLOP/s of a product of large bfloat16 matrices."""
    seconds = product_seconds(PRODUCT)
    known = gpu.rates
    planned = costs.product_time(gpu, PRODUCT, PRODUCT, PRODUCT)
    reached = known.products * (planned - known.ramp) / (seconds - known.ramp)
    said = f"{2 * PRODUCT**3 / seconds / 1e12:,.0f} TFLOP/s"
    return beside("products", gpu, "products", reached * gpu.bf16_flops, gpu.bf16_flops, said, measured)


def beside(
    part: str,
    gpu: Gpu,
    name: str,
    rate: float,
    peak: float,
    said: str,
    measured: dict[str, float],
    options: tuple[str, ...] = (),
    of: str = "the peak",
) -> Verdict:
    """Compares a measured rate with the planner's; fails below its slow bound. measured: receives the fraction.

    name: a field of `Rates`, a fraction of the peak, which `of` says in words. said: what was measured, in words.
    options: see `failed`.
    """
    fraction = measured[name] = rate / peak
    assumed = getattr(gpu.rates, name)
    span = gpu.spans()[name]
    slow, fast = assumed * span.slow, assumed * span.fast
    said += f": {fraction:.2f} of {of}; the planner assumes {assumed:.2f} ({slow:.2f} to {fast:.2f}, {span.source})"
    if fraction < slow:
        return failed("rates", part, f"{said}: slower than that", options)
    return ok("rates", part, said)


def size_per_s(device, to: Home, size: int) -> float:
    """Measures copies of `size` bytes to device memory from pinned host memory, or the other way, in bytes/s."""
    kinds = {home: jax.sharding.SingleDeviceSharding(device, memory_kind=home.memory_kind) for home in (DEVICE, HOST)}
    source = kinds[HOST if to == DEVICE else DEVICE]
    x = jax.device_put(np.zeros(size // 4, np.float32), source)
    copy = jax.jit(lambda x: host.move(x, to.space), in_shardings=source, out_shardings=kinds[to])
    return size / bench.call_seconds({"copy": repeated(copy, x)}, TURNS)["copy"]


def both_ways_per_s(device, size: int) -> float:
    """Measures a copy of `size` bytes to device memory beside one to pinned host memory, in bytes/s of each."""
    from_to = [(HOST, DEVICE), (DEVICE, HOST)]
    memories = {
        home: jax.sharding.SingleDeviceSharding(device, memory_kind=home.memory_kind) for home in (DEVICE, HOST)
    }
    sources, targets = ([memories[ends[i]] for ends in from_to] for i in (0, 1))
    arrays = [jax.device_put(np.zeros(size // 4, np.float32), source) for source in sources]
    copy = jax.jit(
        lambda *xs: [host.move(x, home.space) for x, (_, home) in zip(xs, from_to, strict=True)],
        in_shardings=sources,
        out_shardings=targets,
    )
    options = {**SCHEDULE, **NO_GRAPHS} if device.platform == "gpu" else {}
    at_once = copy.lower(*arrays).compile(options)
    return size / bench.call_seconds({"copies": repeated(at_once, *arrays)}, TURNS)["copies"]


def product_seconds(n: int, warm_s: float = WARM_S) -> float:
    """Measures the seconds of a product of two bfloat16 matrices `[n, n]` of random numbers, after warm_s of them.

    An H200 at its power limit lowers its clock from 1,980 to 1,450 MHz within a second: 680 TFLOP/s on random numbers
    for as long as anybody looked, 820 on constants (2026-11-27).
    """
    a, b = (jax.random.normal(jax.random.key(seed), (n, n), jnp.bfloat16) for seed in (0, 1))
    calls = repeated(jax.jit(jnp.matmul), a, b)
    end = time.monotonic() + warm_s
    while time.monotonic() < end:
        calls(TURNS)
    return bench.call_seconds({"product": calls}, TURNS)["product"]


def repeated(f: Callable, *arguments: jax.Array) -> Callable[[int], None]:
    """Makes a function that calls f n times and awaits the results, as `bench.call_seconds` requires."""

    def calls(n: int) -> None:
        results = None
        for _ in range(n):
            results = f(*arguments)
        jax.block_until_ready(results)

    return calls
