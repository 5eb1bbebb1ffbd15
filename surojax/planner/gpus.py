"""Facts per GPU model: memory, peak rates and links, each with the public document that it comes from.

Rates are peaks at the boost clock that the document uses, dense (no structured sparsity) and with float32 accumulation,
as in training. NVIDIA's data sheets often print the sparse rate; the dense rate is exactly half of it. GeForce tensor
cores accumulate in float32 at half the rate of float16: the rate here is the one with float32, half of what reviews
quote (RTX 4090: 165 and not 330 TFLOP/s for bf16).

`memory_bytes` is the size that a CUDA program sees (`cuDeviceTotalMem`). It is less than the nominal size, because ECC
and the driver reserve a part, which differs by a few MiB between drivers. If reports differ, the smallest size is used.
The CUDA context and cuDNN workspaces must fit into it as well.

`clock` and `l2_bytes` are for XLA's cost model only (`aot` compiles without the GPU). They come from XLA's own target
descriptions of the a100, h100, h200 and b200, and for other models from the document named in the comment. The limits
of a streaming multiprocessor are those of its compute capability (CUDA C++ Programming Guide, "Compute Capabilities").

Link rates are per direction, after line coding; copies of pinned memory reach 80 to 90 % of them. So every rate is an
upper bound, and times derived from rates are lower bounds.

Between machines (`links`): DGX A100, H100, H200 and B200 have one InfiniBand adapter for each of 8 GPUs, of 200, 400,
400 and 400 Gbit/s (NVIDIA's data sheets and user guides of these systems). Other cards have no system of their own:
assumed is one adapter of 100 Gbit/s for a machine of 8, and of 400 for L40S. `--gpus-per-node` sets how many are in a
machine.

`Rates` say what programs reach of these bounds. None has been measured by us. Where a figure comes from:

* products: fitted, one constant for each GPU, to rows that LLMQ publishes (benchmarks/calibrate.py prints them): RTX
  4090, RTX 5060 Ti, RTX 5090, L40S, H100. More than 1 on cards that boost above the clock of their data sheet. H200 and
  B200: assumed to be the H100's. A100: "80 to 90 %" in FlashAttention-2 (Dao 2023, arXiv:2307.08691).
* attention: H100: cuDNN's causal forward pass at 1k and 2k tokens in FlashAttention-3 (Shah et al. 2024,
  arXiv:2407.08608), 391 and 450 of 989 TFLOP/s; backward passes reach 0.8 to 0.9 of that. H200 and B200: assumed to be
  the H100's. A100: FlashAttention-2's figures for 2k tokens. Others: assumed; 3 to 8 % of the time of LLMQ's rows.
* link: H100: 360 of 450 GB/s, which NVIDIA calls expected (github.com/NVIDIA/nccl-tests/issues/326); also assumed for
  A100, H200 and B200. GeForce and L40S: 12 and 20 GB/s through host memory, assumed (no peer-to-peer).
* network: 0.9, assumed from NVIDIA's nccl-tests on machines with an adapter of 400 Gbit/s for each GPU.
* memory: 0.9, what copies within device memory commonly reach. host: 25.8 of 31.5 GB/s on PCIe 4.0 x16 and 53.5 of 63
  on PCIe 5.0 x16, commonly printed by NVIDIA's bandwidthTest. duplex and all latencies: assumed.

This file imports no jax.
"""

from dataclasses import dataclass, replace

from surojax.errors import ConfigError
from surojax.sizes import MOST_GPUS

GB, TB, TFLOPS = 1e9, 1e12, 1e12
MIB = 2**20
# PCI Express base specification: transfers/s x lanes x 128b/130b coding / 8 bits, B/s per direction.
PCIE_4_X16 = 16e9 * 16 * 128 / 130 / 8  # 31.5 GB/s
PCIE_5_X16 = 32e9 * 16 * 128 / 130 / 8  # 63.0 GB/s
PCIE_4_X8 = PCIE_4_X16 / 2  # 15.8 GB/s
PCIE_5_X8 = PCIE_5_X16 / 2  # 31.5 GB/s
GBIT = 1e9 / 8  # B/s


@dataclass(frozen=True)
class Architecture:
    """Limits of one streaming multiprocessor (SM)."""

    threads: int  # resident threads
    shared_memory: int  # bytes
    shared_memory_per_block: int  # bytes that one block may ask for
    fp32_lanes: int  # CUDA cores


ARCHITECTURES = {  # by compute capability without the suffix "a"
    "8.0": Architecture(2048, 164 * 1024, 163 * 1024, 64),
    "8.9": Architecture(1536, 100 * 1024, 99 * 1024, 128),
    "9.0": Architecture(2048, 228 * 1024, 227 * 1024, 128),
    "10.0": Architecture(2048, 228 * 1024, 227 * 1024, 128),
    "12.0": Architecture(1536, 100 * 1024, 99 * 1024, 128),
}


@dataclass(frozen=True)
class Rates:
    """What programs reach of a GPU's peaks, for planner/timeline.py. Fractions, or seconds.

    products: of the peak of a dtype, by whole waves of the largest tiles. attention: of the bf16 peak, causal FLOPs.
    memory: of the device memory's bandwidth. host: of `pcie_bandwidth`, in one direction; duplex: of that, in each
    direction while both are busy. link: of `link_bandwidth`. network: of `network_bandwidth`. hop: latency of a
    collective for each of `links.hops`. launch: of a kernel. copy: latency of a copy engine. ramp: first loads and
    last stores of a product. iteration: of a loop. collective_sms: of the multiprocessors, while a collective runs.
    """

    products: float
    attention: float = 0.60
    attention_backward: float = 0.50
    memory: float = 0.90
    host: float = 0.82
    duplex: float = 0.85
    link: float = 0.80
    network: float = 0.90
    hop: float = 12e-6
    launch: float = 2.0e-6
    copy: float = 8e-6
    ramp: float = 2.5e-6
    iteration: float = 5e-6
    collective_sms: float = 0.10


@dataclass(frozen=True)
class Gpu:
    """One GPU model. FLOP/s count a multiply-add as two; None means that the hardware has no such tensor core mode."""

    name: str  # as jax reports it in `device.device_kind`
    compute_capability: str  # as XLA and CUDA write it; ends with "a" if there are architecture-specific instructions
    sm_count: int  # streaming multiprocessors
    memory_bytes: int  # bytes that a CUDA program sees
    memory_bandwidth: float  # B/s, device memory
    bf16_flops: float  # FLOP/s, tensor cores, dense, float32 accumulate
    fp8_flops: float | None  # FLOP/s, as bf16_flops
    fp4_flops: float | None  # FLOP/s, as bf16_flops
    tf32_flops: float  # FLOP/s, as bf16_flops
    fp32_flops: float  # FLOP/s, CUDA cores, no tensor cores
    link_bandwidth: float  # B/s per direction between GPUs of one host: NVLink, or PCIe if there is no NVLink
    network_bandwidth: float  # B/s per direction of each GPU between machines
    pcie_bandwidth: float  # B/s per direction between GPU and host
    clock: float  # Hz, the highest of an SM
    l2_bytes: int  # second-level cache
    gpus_per_node: int = 8  # GPUs in a machine, which share `link_bandwidth`
    aliases: tuple[str, ...] = ()  # other device kinds of exactly the same card
    rates: Rates | None = None  # None: no time is predicted

    def in_a_machine(self, gpus: int) -> int:
        """The number of GPUs in one machine, of so many in all."""
        return min(gpus, self.gpus_per_node)

    @property
    def shares_pcie(self) -> bool:
        """True if GPUs communicate over PCI Express, so that collectives and host copies share it."""
        return self.link_bandwidth <= self.pcie_bandwidth


GPUS: dict[str, Gpu] = {
    # "NVIDIA A100 Tensor Core GPU" data sheet, column A100 80GB SXM: 2,039 GB/s, 312 bf16 (624 sparse), 156 TF32,
    # 19.5 FP32, NVLink 600 GB/s both directions together, PCIe Gen4. SMs: A100 whitepaper. Memory: XLA's a100_sxm_80
    # target.
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability="8.0",
        sm_count=108,
        memory_bytes=85_100_068_864,
        memory_bandwidth=2039 * GB,
        bf16_flops=312 * TFLOPS,
        fp8_flops=None,
        fp4_flops=None,
        tf32_flops=156 * TFLOPS,
        fp32_flops=19.5 * TFLOPS,
        link_bandwidth=300 * GB,
        network_bandwidth=200 * GBIT,
        pcie_bandwidth=PCIE_4_X16,
        clock=1.41e9,
        l2_bytes=40 * MIB,
        aliases=("A100-SXM-80GB",),  # drivers of 2020
        rates=Rates(products=0.85, attention=0.55, attention_backward=0.45),
    ),
    # "NVIDIA L40S" data sheet: 864 GB/s, 362.05 bf16 (733 sparse), 733 FP8 (1,466 sparse), 183 TF32 (366 sparse),
    # 91.6 FP32, PCIe Gen4 x16, no NVLink. SMs: 18,176 CUDA cores / 128. Not a GeForce: float32 accumulation at the
    # full rate. Memory: deviceQuery, 45,373 MiB with ECC enabled. Clock: 91.6 TFLOP/s / (18,176 x 2). L2: that of the
    # full AD102, "NVIDIA Ada GPU Architecture" whitepaper.
    "l40s": Gpu(
        name="NVIDIA L40S",
        compute_capability="8.9",
        sm_count=142,
        memory_bytes=47_576_711_168,
        memory_bandwidth=864 * GB,
        bf16_flops=362.05 * TFLOPS,
        fp8_flops=733 * TFLOPS,
        fp4_flops=None,
        tf32_flops=183 * TFLOPS,
        fp32_flops=91.6 * TFLOPS,
        link_bandwidth=PCIE_4_X16,
        network_bandwidth=400 * GBIT / 8,
        pcie_bandwidth=PCIE_4_X16,
        clock=2.52e9,
        l2_bytes=96 * MIB,
        rates=Rates(products=0.55, link=0.60, collective_sms=0.03),
    ),
    # "NVIDIA Ada GPU Architecture" whitepaper, appendix A, RTX 4090: 1,008 GB/s; dense with FP32 accumulate: 165.2
    # bf16, 330.3 FP8, 82.6 TF32; 82.6 FP32; 128 SMs; PCIe Gen4. No NVLink, and NVIDIA's driver has no peer-to-peer for
    # it: GPU-to-GPU copies are staged through host memory and cross PCIe twice. Memory: deviceQuery, 24,210 MiB. Boost
    # clock and L2: the whitepaper.
    "rtx4090": Gpu(
        name="NVIDIA GeForce RTX 4090",
        compute_capability="8.9",
        sm_count=128,
        memory_bytes=25_386_352_640,
        memory_bandwidth=1008 * GB,
        bf16_flops=165.2 * TFLOPS,
        fp8_flops=330.3 * TFLOPS,
        fp4_flops=None,
        tf32_flops=82.6 * TFLOPS,
        fp32_flops=82.6 * TFLOPS,
        link_bandwidth=PCIE_4_X16,
        network_bandwidth=100 * GBIT / 8,
        pcie_bandwidth=PCIE_4_X16,
        clock=2.52e9,
        l2_bytes=72 * MIB,
        rates=Rates(products=0.97, link=12 * GB / PCIE_4_X16, collective_sms=0.03),
    ),
    # NVIDIA's GeForce RTX 4060 family specifications: 3,072 CUDA cores (24 SMs), boost 2.46 GHz, 128 bit at 17 Gbit/s =
    # 272 GB/s, 242 AI TOPS (sparse FP8), PCIe Gen4 x8, 24 MB L2. Rates are derived: the RTX 4090's FLOP per SM and
    # clock (512 bf16, 1024 FP8, 256 TF32 and FP32) x 24 SMs x 2.46 GHz. Check: FP8 gives 60.5, a quarter of 242.
    # Memory: 7.63 GiB as PyTorch reports it under Linux (AIRI-Institute/HairFastGAN, issue 8). Products: torch reaches
    # 31.2 of bfloat16 with 4096^3 (zzc0721/torch-performance-test-data, issue 66).
    "rtx4060": Gpu(
        name="NVIDIA GeForce RTX 4060",
        compute_capability="8.9",
        sm_count=24,
        memory_bytes=7_813 * 2**20,
        memory_bandwidth=272 * GB,
        bf16_flops=30.2 * TFLOPS,
        fp8_flops=60.5 * TFLOPS,
        fp4_flops=None,
        tf32_flops=15.1 * TFLOPS,
        fp32_flops=15.1 * TFLOPS,
        link_bandwidth=PCIE_4_X8,
        network_bandwidth=100 * GBIT / 8,
        pcie_bandwidth=PCIE_4_X8,
        clock=2.46e9,
        l2_bytes=24 * MIB,
        rates=Rates(products=1.0),
    ),
    # "NVIDIA RTX Blackwell GPU Architecture" whitepaper, appendix, RTX 5090: 1,792 GB/s; dense with FP32 accumulate:
    # 209.5 bf16, 419 FP8, 1,676 FP4, 104.8 TF32; 104.8 FP32; 170 SMs; PCIe Gen5. No NVLink and no peer-to-peer, as the
    # RTX 4090. Memory: deviceQuery, 32,101 MiB. Boost clock and L2: the whitepaper.
    "rtx5090": Gpu(
        name="NVIDIA GeForce RTX 5090",
        compute_capability="12.0a",
        sm_count=170,
        memory_bytes=33_660_534_784,
        memory_bandwidth=1792 * GB,
        bf16_flops=209.5 * TFLOPS,
        fp8_flops=419 * TFLOPS,
        fp4_flops=1676 * TFLOPS,
        tf32_flops=104.8 * TFLOPS,
        fp32_flops=104.8 * TFLOPS,
        link_bandwidth=PCIE_5_X16,
        network_bandwidth=100 * GBIT / 8,
        pcie_bandwidth=PCIE_5_X16,
        clock=2.407e9,
        l2_bytes=96 * MIB,
        rates=Rates(products=1.13, link=20 * GB / PCIE_5_X16, collective_sms=0.03),
    ),
    # NVIDIA's GeForce RTX 5060 family specifications: 4,608 CUDA cores (36 SMs), boost 2.57 GHz, 128 bit at 28 Gbit/s
    # = 448 GB/s, 759 AI TOPS (sparse FP4), PCIe Gen5 x8. Rates are derived: the RTX 5090's FLOP per SM and clock (512
    # bf16, 1024 FP8, 4096 FP4, 256 TF32 and FP32; 209.5 TFLOP/s at 170 SMs and 2.407 GHz) x 36 SMs x 2.572 GHz. Check:
    # FP4 gives 379, half of 759. Memory: 15,825 MiB, the smallest of several reports by llama.cpp under Linux. L2:
    # deviceQuery of an RTX 5060 Laptop GPU, which is the same chip (GB206).
    # The 8 GB version calls itself by the same name: its rates are these, its memory is half.
    "rtx5060ti_16gb": Gpu(
        name="NVIDIA GeForce RTX 5060 Ti",
        compute_capability="12.0a",
        sm_count=36,
        memory_bytes=15_825 * 2**20,
        memory_bandwidth=448 * GB,
        bf16_flops=47.4 * TFLOPS,
        fp8_flops=94.8 * TFLOPS,
        fp4_flops=379 * TFLOPS,
        tf32_flops=23.7 * TFLOPS,
        fp32_flops=23.7 * TFLOPS,
        link_bandwidth=PCIE_5_X8,
        network_bandwidth=100 * GBIT / 8,
        pcie_bandwidth=PCIE_5_X8,
        clock=2.572e9,
        l2_bytes=32 * MIB,
        rates=Rates(products=1.06),
    ),
    # "NVIDIA H100 Tensor Core GPU" data sheet, column H100 SXM: 3.35 TB/s; half of the sparse 1,979 bf16, 3,958 FP8 and
    # 989 TF32; 67 FP32; NVLink 900 GB/s both directions together; PCIe Gen5. SMs: H100 whitepaper. Memory: XLA's
    # h100_sxm target.
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        compute_capability="9.0a",
        sm_count=132,
        memory_bytes=84_942_979_072,
        memory_bandwidth=3.35 * TB,
        bf16_flops=989.5 * TFLOPS,
        fp8_flops=1979 * TFLOPS,
        fp4_flops=None,
        tf32_flops=494.5 * TFLOPS,
        fp32_flops=67 * TFLOPS,
        link_bandwidth=450 * GB,
        network_bandwidth=400 * GBIT,
        pcie_bandwidth=PCIE_5_X16,
        clock=1.98e9,
        l2_bytes=50 * MIB,
        rates=Rates(products=0.69, attention=0.42, attention_backward=0.36, host=0.85),
    ),
    # "NVIDIA H200 Tensor Core GPU" data sheet, column H200 SXM: the H100's rates with 4.8 TB/s. Memory: 143,156 MiB as
    # PyTorch reports it (139.8 GiB; XLA's h200 target says 141 GiB, which no card has).
    "h200": Gpu(
        name="NVIDIA H200",
        compute_capability="9.0a",
        sm_count=132,
        memory_bytes=143_156 * 2**20,
        memory_bandwidth=4.8 * TB,
        bf16_flops=989.5 * TFLOPS,
        fp8_flops=1979 * TFLOPS,
        fp4_flops=None,
        tf32_flops=494.5 * TFLOPS,
        fp32_flops=67 * TFLOPS,
        link_bandwidth=450 * GB,
        network_bandwidth=400 * GBIT,
        pcie_bandwidth=PCIE_5_X16,
        clock=1.98e9,
        l2_bytes=50 * MIB,
        aliases=("NVIDIA H200 141GB HBM3e",),  # the name in XLA's target description
        rates=Rates(products=0.69, attention=0.42, attention_backward=0.36, host=0.85),
    ),
    # "NVIDIA Blackwell" data sheet, column HGX B200: half of the sparse 4.5 PFLOP/s bf16, 9 FP8 and 18 FP4; TF32 half
    # of bf16 (printed rounded, 2.2 sparse); 75 TFLOP/s FP32; 7.7 TB/s; NVLink 5 1.8 TB/s and PCIe Gen5 128 GB/s, both
    # directions together. SMs, memory and the exact bandwidth: XLA's b200 target.
    "b200": Gpu(
        name="NVIDIA B200",
        compute_capability="10.0a",
        sm_count=148,
        memory_bytes=191_514_411_008,
        memory_bandwidth=7.672 * TB,
        bf16_flops=2250 * TFLOPS,
        fp8_flops=4500 * TFLOPS,
        fp4_flops=9000 * TFLOPS,
        tf32_flops=1125 * TFLOPS,
        fp32_flops=75 * TFLOPS,
        link_bandwidth=900 * GB,
        network_bandwidth=400 * GBIT,
        pcie_bandwidth=PCIE_5_X16,
        clock=1.965e9,
        l2_bytes=132_644_864,
        rates=Rates(products=0.69, attention=0.42, attention_backward=0.36, host=0.85),
    ),
}


def with_nodes(gpu: str, gpus_per_node: int | None) -> Gpu:
    """Returns the facts of a GPU in machines of so many; None: of 8. Raises ConfigError for fewer than one."""
    if gpus_per_node is None:
        return GPUS[gpu]
    if not 1 <= gpus_per_node <= MOST_GPUS:
        raise ConfigError(
            f"--gpus-per-node: expected 1 to {MOST_GPUS:,} GPUs in a machine, got {gpus_per_node}; leave it out"
        )
    return replace(GPUS[gpu], gpus_per_node=gpus_per_node)


def known_rates(gpu: Gpu) -> Rates:
    """Returns what programs reach of a GPU's peaks. Raises ValueError if it is not known."""
    if gpu.rates is None:
        raise ValueError(f"rates: expected a GPU with rates in planner/gpus.py, got {gpu.name}; add them there")
    return gpu.rates


def find_gpu(device_kind: str) -> Gpu | None:
    """The facts for jax's `device.device_kind`, or None for a model that is not in `GPUS`.

    The full name must match, except for case, spacing and a leading "NVIDIA": "H100 NVL", "RTX 4090 Laptop GPU", a MIG
    slice or "A100-PCIE-40GB" are other cards with other rates, and no fact is better than a wrong one. One name is
    ambiguous: the RTX 5060 Ti with 8 GB reports the same name and differs in `memory_bytes` only.
    """
    return _BY_KIND.get(_normalized(device_kind))


def _normalized(device_kind: str) -> str:
    """A device kind without differences in case, spacing and a leading "NVIDIA"."""
    return " ".join(device_kind.lower().split()).removeprefix("nvidia ")


_BY_KIND = {_normalized(kind): gpu for gpu in GPUS.values() for kind in (gpu.name, *gpu.aliases)}
