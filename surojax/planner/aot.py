"""Compiles a program for NVIDIA GPUs on a machine without one, and reads the memory and text of the result.

It needs jax's CUDA plugin, NVIDIA's assembler (ptxas) and cuDNN, without which cuDNN attention does not lower: `pip
install 'surojax[plan]'`. It needs no driver and no other NVIDIA library. Tested with jax 0.11.2 and 0.12.0.1. It
depends on these facts, each found by experiment:

1. A sharding on compile-only GPU devices silently drops its `memory_kind` (those devices have no memories); one on
   `mesh.abstract_mesh` keeps it. So the shardings of arguments and results are on the abstract mesh. shard_map and the
   code inside it use the concrete mesh, because cuDNN attention refuses to lower without devices.
2. `Lowered.compile` crashes on such devices. So the topology's own compile-only client compiles the StableHLO.
3. Pallas chooses the architecture from `jax.default_device`, and lowering caches keep the first one. So a process
   compiles for one kind of GPU, and `devices` refuses a second one.
4. Without a GPU, XLA cannot time its own Triton matrix products, and the tile that it guesses may need large buffers
   that a tuned tile does not. So programs are compiled with `xla_options.PRODUCTS` (cuBLASLt), and otherwise with the
   options that `train` uses on a GPU, `xla_options.compiler_options`.
5. Kernels that are never run need not be fast: if neither XLA nor ptxas optimises them, and XLA does not test which of
   cuBLASLt's algorithms compile, compiling is 25 to 60 % shorter. Memory and schedule are decided before that: seven
   plans (A100 to B200, 1 to 8 GPUs, FP8, NVFP4, all offloads) were the same to the byte.
6. On a machine without a GPU, JAX loads its CUDA plugin only if `JAX_PLATFORMS=cpu` or the setting that skips the check
   of its libraries is set before the first use of JAX. `usable` tests that, and if not `plan` starts another process.

7. Without a GPU, XLA schedules for 80 % of `device_memory_size` (GetSchedulerMemoryLimit in XLA's gpu_hlo_schedule.cc),
   on a GPU for all that JAX may use. So a GPU is described with a quarter more memory than JAX can use of it. Else a
   state of more than 80 % leaves nothing to schedule with: 7B on one RTX 4090 with 19 of 24 GiB of state took 7.2 s in
   a plan, of which half were copies that nothing overlapped. Described with all of the card, 30B with experts was
   scheduled into 22.3 of 22.0 GiB that there are.

It cannot show workspaces that cuDNN allocates at run time (some hundred MiB), fragmentation, and the CUDA context.
XLA's scheduler uses free memory for overlap: the same program needs less memory if `device_memory_size` is smaller.
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler
from jax.experimental import topologies
from jaxlib import xla_client

from surojax.assembly.xla_options import PRODUCTS
from surojax.placement.mesh import expect_no_cuda_without_driver, has_driver
from surojax.planner.gpus import ARCHITECTURES, GPUS, Gpu

EXTRA = "pip install 'surojax[plan]'"
CUDNN_WHEELS = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
PTXAS = "*/bin/ptxas"
XLA_OPTIONS: dict[str, Any] = {
    **PRODUCTS,  # fact 4
    "xla_backend_optimization_level": 0,  # this option and the next two: fact 5
    "xla_gpu_disable_gpuasm_optimizations": True,
    "xla_gpu_autotune_level": 0,
}
SCHEDULED = 0.8  # fraction of a GPU's memory that XLA schedules for if it cannot ask an allocator
_kinds: set[str] = set()  # kinds of GPU that this process has compiled for: at most one


def available() -> bool:
    """Whether the CUDA plugin, cuDNN and NVIDIA's assembler are installed. XLA (0.12) crashes without the assembler."""
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    return any(map(_installed, plugins)) and _installed("nvidia.cudnn") and _assembler()


def _assembler() -> bool:
    """Whether ptxas is in a place that XLA searches: NVIDIA's wheels, PATH, or CUDA's own folder."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [file for root in (spec and spec.submodule_search_locations) or () for file in Path(root).glob(PTXAS)]
    return bool(wheels or shutil.which("ptxas") or list(Path("/usr/local").glob("cuda*/bin/ptxas")))


def _installed(module: str) -> bool:
    """Whether a module can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False


def kind() -> str | None:
    """The kind of GPU that this process compiles for; None before the first compilation."""
    return next(iter(_kinds), None)


def usable(gpu: str) -> bool:
    """Whether this process can compile for this kind of GPU: see facts 3 and 6."""
    if kind() not in (None, gpu):
        return False
    try:
        _topology(gpu, 1)
    except NotImplementedError:
        return False
    return True


def _topology(gpu: str, n: int):
    """A topology of n compile-only GPUs. Raises NotImplementedError if JAX has not loaded its CUDA plugin."""
    expect_no_cuda_without_driver()
    if not has_driver():
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # fact 6
    silence()
    return topologies.get_topology_desc(platform="cuda", target_config=target_config(GPUS[gpu]), topology=f"1x1x{n}")


def silence() -> None:
    """Silences XLA's messages about memory, which a plan has the figures of; to be called before its first use."""
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # jax's default
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def cudnn_version() -> str:
    """The version of cuDNN that is installed, such as "9.28.0": XLA gates by it what it leaves to cuDNN."""
    for wheel in CUDNN_WHEELS:
        try:
            return ".".join(importlib.metadata.version(wheel).split(".")[:3])
        except importlib.metadata.PackageNotFoundError:
            continue
    return "9.10.0"  # not installed: nothing that needs it is compiled, see `available`


def target_config(gpu: Gpu) -> str:
    """The description of a GPU for XLA's compiler (GpuTargetConfigProto, text format)."""
    capability = gpu.compute_capability.rstrip("a")
    accelerated = gpu.compute_capability.endswith("a")
    major, minor = capability.split(".")
    sm = ARCHITECTURES[capability]
    dnn = cudnn_version()
    dnn_major, dnn_minor, dnn_patch, *_ = dnn.split(".")
    features = "ACCELERATED_FEATURES" if accelerated else "NONE"
    return f"""
gpu_device_info {{
  name: "{gpu.name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {gpu.compute_capability}"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_memory_size: {math.ceil(gpu.pool_bytes / SCHEDULED)}
  memory_bandwidth: {int(gpu.memory_bandwidth)}
  pcie_bandwidth: {int(gpu.pcie_bandwidth)}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock / 1e9}
  core_count: {gpu.sm_count}
  fpus_per_core: {sm.fp32_lanes}
  threads_per_core_limit: {sm.threads}
  shared_memory_per_core: {sm.shared_memory}
  shared_memory_per_block_optin: {sm.shared_memory_per_block}
  shared_memory_per_block: 49152
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_block_limit: 1024
  threads_per_warp: 32
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "{dnn}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {dnn_major} minor: {dnn_minor} patch: {dnn_patch} }}
device_description_str: "{gpu.name}"
"""


def devices(gpu: str, n: int) -> Sequence[Any]:
    """n compile-only devices on one host; gpu: their kind, a key of `GPUS`.

    Raises RuntimeError if this process has compiled for another kind: see fact 3.
    """
    if _kinds - {gpu}:
        raise RuntimeError(f"a process compiles for one kind of GPU: expected {kind()!r}, got {gpu!r}")
    _kinds.add(gpu)
    return _topology(gpu, n).devices


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program: its memory in bytes per device, and its text."""

    argument_bytes: int  # device memory of the arguments
    output_bytes: int  # device memory of results that are not written over arguments
    temp_bytes: int  # device memory of temporary values
    host_argument_bytes: int  # the same for pinned host memory
    host_output_bytes: int
    host_temp_bytes: int
    text: str  # the optimised and scheduled HLO

    @property
    def device_bytes(self) -> int:
        """Device memory that the program needs."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that the program needs."""
        return self.host_argument_bytes + self.host_output_bytes + self.host_temp_bytes


def compile_for(jitted, args, mesh: jax.sharding.Mesh, compiler_options=None) -> Compiled:
    """Compiles `jitted(*args)` with XLA_OPTIONS and these options.

    Shardings in `args` and of the results are on `mesh.abstract_mesh`: one on a mesh of devices that are not there has
    no memory kind, so that host memory would count as device memory. Raises ValueError for arguments on both meshes.
    """
    meshes = {type(x.sharding.mesh) for x in jax.tree.leaves(args) if x.sharding is not None}
    if len(meshes) > 1:
        raise ValueError("arguments: expected all on the abstract mesh, got some on the mesh to compile for")
    targets = mesh.devices.flatten()
    with jax.default_device(targets[0]):
        lowered = jitted.trace(*args).lower(lowering_platforms=("cuda",))
    client = targets[0].client
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=targets.size,
        device_assignment=targets.reshape(1, -1),
        env_options_overrides=XLA_OPTIONS | (compiler_options or {}),
        backend=client,
    )
    options.executable_build_options.use_shardy_partitioner = True
    options.executable_build_options.use_spmd_partitioning = True
    executable = client.compile(
        lowered.compiler_ir("stablehlo"),
        executable_devices=xla_client.DeviceList(tuple(targets)),
        compile_options=options,
    )
    m = executable.get_compiled_memory_stats()
    return Compiled(
        argument_bytes=m.argument_size_in_bytes,
        output_bytes=m.output_size_in_bytes - m.alias_size_in_bytes,
        temp_bytes=m.temp_size_in_bytes,
        host_argument_bytes=m.host_argument_size_in_bytes,
        host_output_bytes=m.host_output_size_in_bytes - m.host_alias_size_in_bytes,
        host_temp_bytes=m.host_temp_size_in_bytes,
        text=executable.hlo_modules()[0].to_string(),
    )
