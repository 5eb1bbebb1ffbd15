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

What programs reach of these bounds is in rates.py, with the ends of each figure and its source.

The rows are of two kinds. Those with every figure written out have a document of their own. Those of `_CARDS` follow
from multiprocessors and boost clock, which NVIDIA's product page or whitepaper of the card says ("GA102", "Ada", "RTX
Blackwell GPU Architecture", data sheets of the RTX A and data center cards): `_FLOPS` are FLOP per multiprocessor and
clock. Checked against what the documents print: RTX 3090 71, RTX 3080 59.5, RTX A6000 154.8, A10 125, A10G 70, L4 121,
L40 181, RTX 6000 Ada 364, RTX 4080 97.5, RTX 5070 61.7, RTX 5080 112.6, RTX PRO 6000 504 TFLOP/s. Memory: the report
that the comment names, else `_UNREPORTED` of the size on the box.

This file imports no jax.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from surojax.errors import ConfigError
from surojax.planner.rates import (
    ASSUMED,
    CALIBRATED,
    ENDS,
    MEASURED,
    NOTHING_SEEN,
    PRODUCTS,
    SHEET,
    STAGED,
    UNKNOWN_DRAM,
    Rates,
    Seen,
    Span,
)
from surojax.sizes import MOST_GPUS

GB, TB, TFLOPS = 1e9, 1e12, 1e12
MIB, GIB = 2**20, 2**30
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
    "8.6": Architecture(1536, 100 * 1024, 99 * 1024, 128),
    "8.9": Architecture(1536, 100 * 1024, 99 * 1024, 128),
    "9.0": Architecture(2048, 228 * 1024, 227 * 1024, 128),
    "10.0": Architecture(2048, 228 * 1024, 227 * 1024, 128),
    "10.3": Architecture(2048, 228 * 1024, 227 * 1024, 128),
    "12.0": Architecture(1536, 100 * 1024, 99 * 1024, 128),
}


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
    pcie_bandwidth: float  # B/s per direction between GPU and host: PCIe, or NVLink-C2C
    clock: float  # Hz, the highest of an SM
    l2_bytes: int  # second-level cache
    gpus_per_node: int = 8  # GPUs in a machine, which share `link_bandwidth`
    aliases: tuple[str, ...] = ()  # other device kinds of exactly the same card
    rates: Rates | None = None  # None: no time is predicted
    products_from: str = MEASURED  # where `rates.products` comes from: a key of rates.PRODUCTS
    ends: Mapping[str, Span] = field(default_factory=dict, hash=False)  # of rates, where they differ from rates.ENDS
    host_memory_bandwidth: float | None = None  # B/s of a machine's host memory, both ways; None: see `host_memory`
    seen: Seen = NOTHING_SEEN  # what of `rates` was measured here

    def in_a_machine(self, gpus: int) -> int:
        """The number of GPUs in one machine, of so many in all."""
        return min(gpus, self.gpus_per_node)

    @property
    def shares_pcie(self) -> bool:
        """True if GPUs communicate over PCI Express, so that collectives and host copies share it."""
        return self.link_bandwidth <= self.pcie_bandwidth and self.gpus_per_node > 1

    @property
    def staged(self) -> bool:
        """True if NVIDIA's driver has no peer-to-peer for it, so that collectives go through host memory."""
        return "GeForce" in self.name

    def host_memory(self, gpus: int) -> float:
        """B/s that the host memory of a machine moves for each of its GPUs, of so many in all, reads and writes.

        What the machine has, or if nobody said: 89.6 GB/s, two channels of DDR5-5600, for up to two cards without a
        link of their own; 204.8, eight of DDR4-3200, for up to four, which need that processor's lanes, and two
        sockets of them for more; 614, two sockets with eight of DDR5-4800 (DGX H100), for cards with one. What programs
        reach of it is `Rates.dram`.
        """
        here = self.in_a_machine(gpus)
        sockets = 89.6 if here <= 2 else 204.8 if here <= 4 else 409.6
        typical = 614.4 if self.link_bandwidth > self.pcie_bandwidth else sockets
        return (self.host_memory_bandwidth or typical * GB) / here

    def spans(self) -> dict[str, Span]:
        """The ends of each rate, and where they come from."""
        found = dict(ENDS) | {"products": PRODUCTS[self.products_from]}
        if self.staged:
            found["link"] = STAGED
        if self.host_memory_bandwidth is None:
            found["dram"] = UNKNOWN_DRAM
        return found | dict(self.ends)


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
        rates=Rates(products=0.72, attention=0.55, attention_backward=0.45),
        ends={"attention": Span(0.80, 1.15, MEASURED)},
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
        products_from=CALIBRATED,
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
        products_from=CALIBRATED,
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
        products_from=CALIBRATED,
    ),
    # NVIDIA's GeForce RTX 5060 family specifications: 4,608 CUDA cores (36 SMs), boost 2.57 GHz, 128 bit at 28 Gbit/s
    # = 448 GB/s, 759 AI TOPS (sparse FP4), PCIe Gen5 x8. Rates are derived: the RTX 5090's FLOP per SM and clock (512
    # bf16, 1024 FP8, 4096 FP4, 256 TF32 and FP32; 209.5 TFLOP/s at 170 SMs and 2.407 GHz) x 36 SMs x 2.572 GHz. Check:
    # FP4 gives 379, half of 759. Memory: 15,825 MiB, the smallest of several reports by llama.cpp under Linux. L2:
    # deviceQuery of an RTX 5060 Laptop GPU, which is the same chip (GB206).
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
        products_from=CALIBRATED,
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
        products_from=CALIBRATED,
        ends={"attention": Span(0.85, 1.15, MEASURED)},
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
        ends={"attention": Span(0.85, 1.15, MEASURED)},
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
        rates=Rates(products=0.64, attention=0.42, attention_backward=0.36, host=0.85),
        ends={"attention": Span(0.60, 1.20, ASSUMED)},
    ),
}


# FLOP per multiprocessor and clock in bf16, fp8 and fp4, by chip; 0: none. Float32 accumulation at the full rate.
_FLOPS = {"8.0": (2048, 0, 0), "8.6": (1024, 0, 0), "8.9": (1024, 2048, 0), "12.0a": (1024, 2048, 4096)}
_UNREPORTED = 0.966  # of the size on the box, the least of what is reported
_BOX10, _BOX12, _BOX16, _BOX24 = (_UNREPORTED * gigabytes for gigabytes in (10, 12, 16, 24))
# Device kind, capability, SMs, GHz, GiB that a program sees, GB/s of memory, MiB of L2, PCIe, whether float32 is
# accumulated at the full rate, and the fraction of the bf16 peak that PyTorch reaches (rates.py; None: not published).
# Memory: 3060: smy20011/dreambooth-gui, issue 78. 3070: sshan-zhao/GASDA, issue 19; as the 3060 Ti. A4000: VGGT-Long,
# issue 6. A6000: XLA's a6000 target. A10: 23,028 and L4: 23,034 MiB by nvidia-smi (modal-labs/modal-client, pull 2797)
# less 2 %; A10G as A10. A40, L40: as the L40S. A30: google/RB-Modulation, issue 5. RTX 6000 Ada, with ECC:
# DINGYANB/MTVCrafter, issue 21. Cards of 8 GB: as the 4060. RTX PRO 6000: antirez/ds4, issue 431.
# The 4060 Ti and 5060 Ti of 8 and 16 GB call themselves the same.
_CARDS = {
    "rtx3060": ("NVIDIA GeForce RTX 3060", "8.6", 28, 1.777, 11.75, 360, 3, PCIE_4_X16, False, None),
    "rtx3060ti": ("NVIDIA GeForce RTX 3060 Ti", "8.6", 38, 1.665, 7.76, 448, 4, PCIE_4_X16, False, 1.13),
    "rtx3070": ("NVIDIA GeForce RTX 3070", "8.6", 46, 1.725, 7.76, 448, 4, PCIE_4_X16, False, 1.02),
    "rtx3080": ("NVIDIA GeForce RTX 3080", "8.6", 68, 1.71, _BOX10, 760, 5, PCIE_4_X16, False, 1.09),
    "rtx3080ti": ("NVIDIA GeForce RTX 3080 Ti", "8.6", 80, 1.665, _BOX12, 912, 6, PCIE_4_X16, False, 1.12),
    "rtx3090": ("NVIDIA GeForce RTX 3090", "8.6", 82, 1.695, _BOX24, 936, 6, PCIE_4_X16, False, 1.07),
    "rtx3090ti": ("NVIDIA GeForce RTX 3090 Ti", "8.6", 84, 1.86, _BOX24, 1008, 6, PCIE_4_X16, False, None),
    "rtxa4000": ("NVIDIA RTX A4000", "8.6", 48, 1.56, 15.61, 448, 4, PCIE_4_X16, True, 0.82),
    "rtxa5000": ("NVIDIA RTX A5000", "8.6", 64, 1.695, _BOX24, 768, 6, PCIE_4_X16, True, None),
    "rtxa6000": ("NVIDIA RTX A6000", "8.6", 84, 1.8, 47.53, 768, 6, PCIE_4_X16, True, 0.80),
    "a10": ("NVIDIA A10", "8.6", 72, 1.695, 22.03, 600, 6, PCIE_4_X16, True, None),
    "a10g": ("NVIDIA A10G", "8.6", 80, 1.71, 22.03, 600, 6, PCIE_4_X16, False, None),
    "a30": ("NVIDIA A30", "8.0", 56, 1.44, 23.53, 933, 24, PCIE_4_X16, True, None),
    "a40": ("NVIDIA A40", "8.6", 84, 1.74, 44.30, 696, 6, PCIE_4_X16, True, None),
    "rtx4060ti_8gb": ("NVIDIA GeForce RTX 4060 Ti", "8.9", 34, 2.535, 7.63, 288, 32, PCIE_4_X8, False, 0.97),
    "rtx4060ti_16gb": ("NVIDIA GeForce RTX 4060 Ti", "8.9", 34, 2.535, _BOX16, 288, 32, PCIE_4_X8, False, 0.97),
    "rtx4070": ("NVIDIA GeForce RTX 4070", "8.9", 46, 2.475, _BOX12, 504, 36, PCIE_4_X16, False, None),
    "rtx4070super": ("NVIDIA GeForce RTX 4070 SUPER", "8.9", 56, 2.475, _BOX12, 504, 48, PCIE_4_X16, False, 1.05),
    "rtx4070ti": ("NVIDIA GeForce RTX 4070 Ti", "8.9", 60, 2.61, _BOX12, 504, 48, PCIE_4_X16, False, None),
    "rtx4070tisuper": ("NVIDIA GeForce RTX 4070 Ti SUPER", "8.9", 66, 2.61, _BOX16, 672, 48, PCIE_4_X16, False, 1.03),
    "rtx4080": ("NVIDIA GeForce RTX 4080", "8.9", 76, 2.505, _BOX16, 716.8, 64, PCIE_4_X16, False, None),
    "rtx4080super": ("NVIDIA GeForce RTX 4080 SUPER", "8.9", 80, 2.55, _BOX16, 736, 64, PCIE_4_X16, False, None),
    "rtx6000ada": ("NVIDIA RTX 6000 Ada Generation", "8.9", 142, 2.505, 44.43, 960, 96, PCIE_4_X16, True, None),
    "l4": ("NVIDIA L4", "8.9", 58, 2.04, 22.03, 300, 48, PCIE_4_X16, True, None),
    "l40": ("NVIDIA L40", "8.9", 142, 2.49, 44.30, 864, 96, PCIE_4_X16, False, None),
    "rtx5060": ("NVIDIA GeForce RTX 5060", "12.0a", 30, 2.497, 7.63, 448, 32, PCIE_5_X8, False, 1.04),
    "rtx5070": ("NVIDIA GeForce RTX 5070", "12.0a", 48, 2.512, _BOX12, 672, 48, PCIE_5_X16, False, 1.09),
    "rtx5070ti": ("NVIDIA GeForce RTX 5070 Ti", "12.0a", 70, 2.452, _BOX16, 896, 48, PCIE_5_X16, False, 1.13),
    "rtx5080": ("NVIDIA GeForce RTX 5080", "12.0a", 84, 2.617, _BOX16, 960, 64, PCIE_5_X16, False, 0.91),
    "rtxpro6000": (
        *("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "12.0a"),
        *(188, 2.617, 94.97, 1792, 128, PCIE_5_X16, True, 0.82),
    ),
}


def _card(
    name: str,
    capability: str,
    sms: int,
    clock: float,
    gib: float,
    bandwidth: float,
    l2: int,
    pcie: float,
    full: bool,
    of_torch: float | None,
) -> Gpu:
    """The facts of a row of `_CARDS`: a card without NVLink, whose FLOP/s follow from its multiprocessors and clock."""
    bf16, fp8, fp4 = (sms * clock * 1e9 * flop for flop in _FLOPS[capability])
    if not full:
        bf16, fp8 = bf16 / 2, fp8 / 2  # fp4 is not halved: RTX 5090 1,676 TFLOP/s
    geforce = "GeForce" in name
    typical = 0.75 if full else 1.05  # of cards alike: power limits cores that run at the full rate
    products = (of_torch or typical) * (1.0 if geforce else 0.85)
    return Gpu(
        name=name,
        compute_capability=capability,
        sm_count=sms,
        memory_bytes=int(gib * GIB),
        memory_bandwidth=bandwidth * GB,
        bf16_flops=bf16,
        fp8_flops=fp8 or None,
        fp4_flops=fp4 or None,
        tf32_flops=bf16 / 2,
        fp32_flops=sms * clock * 1e9 * 2 * ARCHITECTURES[capability.rstrip("a")].fp32_lanes,
        link_bandwidth=pcie,
        network_bandwidth=100 * GBIT / 8,
        pcie_bandwidth=pcie,
        clock=clock * 1e9,
        l2_bytes=l2 * MIB,
        rates=Rates(products=round(products, 2), link=0.38 if geforce else 0.60, collective_sms=0.03),
        products_from=MEASURED if of_torch else SHEET,
    )


GPUS |= {key: _card(*row) for key, row in _CARDS.items()}
GPUS |= {
    "rtx5060ti_8gb": replace(GPUS["rtx5060ti_16gb"], memory_bytes=GPUS["rtx4060"].memory_bytes),
    # Products: fitted to LLMQ's rows of one card.
    "rtxpro6000": replace(
        GPUS["rtxpro6000"],
        aliases=("NVIDIA RTX PRO 6000 Blackwell Server Edition",),
        rates=Rates(products=0.78, link=0.60, collective_sms=0.03),
        products_from=CALIBRATED,
    ),
    # "NVIDIA A100 Tensor Core GPU" data sheet, columns 40GB SXM (1,555 GB/s) and 80GB PCIe (1,935; NVLink bridges join
    # two only). Memory: XLA's a100_sxm_40 target; 79.14 GiB (lianqi1008/Control-GIC, issue 6).
    "a100_40gb": replace(
        GPUS["a100"],
        name="NVIDIA A100-SXM4-40GB",
        memory_bytes=42_298_834_944,
        memory_bandwidth=1555 * GB,
        aliases=(),
        rates=Rates(products=0.67, attention=0.55, attention_backward=0.45),
    ),
    "a100_pcie": replace(
        GPUS["a100"],
        name="NVIDIA A100 80GB PCIe",
        memory_bytes=int(79.14 * GIB),
        memory_bandwidth=1935 * GB,
        link_bandwidth=PCIE_4_X16,
        network_bandwidth=100 * GBIT / 8,
        aliases=(),
        rates=Rates(products=0.64, attention=0.55, attention_backward=0.45, link=0.60),
    ),
    # "NVIDIA H100 Tensor Core GPU" data sheet and product brief of the H100 PCIe: half of the sparse 1,513 bf16 and
    # 3,026 FP8, 51 FP32, 2.0 TB/s. SMs, clock, bandwidth and memory: XLA's h100_pcie target.
    "h100_pcie": replace(
        GPUS["h100"],
        name="NVIDIA H100 PCIe",
        sm_count=114,
        memory_bandwidth=2.039 * TB,
        bf16_flops=756.5 * TFLOPS,
        fp8_flops=1513 * TFLOPS,
        tf32_flops=378 * TFLOPS,
        fp32_flops=51 * TFLOPS,
        link_bandwidth=PCIE_5_X16,
        network_bandwidth=100 * GBIT / 8,
        clock=1.755e9,
        rates=Rates(products=0.56, attention=0.42, attention_backward=0.36, host=0.85, link=0.60),
        products_from=MEASURED,
    ),
    # The same data sheet, column H100 NVL: half of the sparse 1,671 bf16, 3,341 FP8 and 835 TF32; 60 FP32; 94 GB at 3.9
    # TB/s; NVLink bridges join two only. Memory: `_UNREPORTED` of 94 GB.
    "h100_nvl": replace(
        GPUS["h100"],
        name="NVIDIA H100 NVL",
        memory_bytes=int(_UNREPORTED * 94 * GIB),
        memory_bandwidth=3.9 * TB,
        bf16_flops=835.5 * TFLOPS,
        fp8_flops=1670.5 * TFLOPS,
        tf32_flops=417.5 * TFLOPS,
        fp32_flops=60 * TFLOPS,
        link_bandwidth=PCIE_5_X16,
        network_bandwidth=100 * GBIT / 8,
        clock=1.785e9,
        rates=Rates(products=0.62, attention=0.42, attention_backward=0.36, host=0.85, link=0.60),
        products_from=SHEET,
    ),
    # "NVIDIA GH200 Grace Hopper Superchip" data sheet: an H100 with 96 GB at 4.0 TB/s; NVLink-C2C 900 GB/s both
    # directions together; LPDDR5X, 512 GB/s. Memory: `_UNREPORTED` of 96 GB. One to a machine.
    "gh200": replace(
        GPUS["h100"],
        name="NVIDIA GH200 480GB",
        memory_bytes=int(_UNREPORTED * 96 * GIB),
        memory_bandwidth=4.0 * TB,
        pcie_bandwidth=450 * GB,
        gpus_per_node=1,
        products_from=MEASURED,
        host_memory_bandwidth=512 * GB,
    ),
    # "NVIDIA Blackwell Ultra" data sheet, column HGX B300: as the B200 in bf16 and FP8, 13.5 PFLOP/s FP4. Memory,
    # bandwidth, SMs: XLA's b300 target.
    "b300": replace(
        GPUS["b200"],
        name="NVIDIA B300 SXM6 AC",
        compute_capability="10.3a",
        sm_count=158,
        memory_bytes=297_021_865_984,
        memory_bandwidth=7.936 * TB,
        fp4_flops=13_500 * TFLOPS,
        network_bandwidth=800 * GBIT,
        l2_bytes=135_528_448,
        aliases=("NVIDIA B300",),
        products_from=SHEET,
    ),
    # "NVIDIA GB200 NVL72" data sheet, of each GPU: half of the sparse 5 PFLOP/s bf16, 10 FP8 and 20 FP4; 80
    # TFLOP/s FP32; NVLink-C2C 900 GB/s for two GPUs, both directions together; LPDDR5X, 512 GB/s for two. Memory,
    # bandwidth, SMs, clock: XLA's gb200 target. Four to a machine, here without the NVLink between the machines of a
    # rack (--gpus-per-node 72 counts it).
    "gb200": replace(
        GPUS["b200"],
        name="NVIDIA GB200",
        sm_count=152,
        memory_bytes=197_897_748_480,
        memory_bandwidth=7.928 * TB,
        bf16_flops=2500 * TFLOPS,
        fp8_flops=5000 * TFLOPS,
        fp4_flops=10_000 * TFLOPS,
        tf32_flops=1250 * TFLOPS,
        fp32_flops=80 * TFLOPS,
        pcie_bandwidth=225 * GB,
        clock=2.062e9,
        l2_bytes=135_528_448,
        gpus_per_node=4,
        products_from=SHEET,
        host_memory_bandwidth=1024 * GB,
    ),
}


GPUS = dict(sorted(GPUS.items()))  # as they are listed


def with_nodes(gpu: str, gpus_per_node: int | None, host_bandwidth: float | None = None) -> Gpu:
    """Returns the facts of a GPU in machines of so many; None: as many as usual, 8 of most.

    host_bandwidth: GB/s that the host memory of a machine moves, reads and writes; None: see `Gpu.host_memory`.
    Raises ConfigError for fewer than one GPU and for no bandwidth.
    """
    facts = GPUS[gpu]
    if gpus_per_node is not None:
        if not 1 <= gpus_per_node <= MOST_GPUS:
            raise ConfigError(
                f"--gpus-per-node: expected 1 to {MOST_GPUS:,} GPUs in a machine, got {gpus_per_node}; leave it out"
            )
        facts = replace(facts, gpus_per_node=gpus_per_node)
    if host_bandwidth is not None:
        if not 0 < host_bandwidth < math.inf:
            raise ConfigError(f"--host-bandwidth: expected GB/s, more than 0, got {host_bandwidth}; leave it out")
        facts = replace(facts, host_memory_bandwidth=host_bandwidth * GB)
    return facts


def known_rates(gpu: Gpu) -> Rates:
    """Returns what programs reach of a GPU's peaks. Raises ValueError if it is not known."""
    if gpu.rates is None:
        raise ValueError(f"rates: expected a GPU with rates in planner/gpus.py, got {gpu.name}; add them there")
    return gpu.rates


def find_gpu(device_kind: str) -> Gpu | None:
    """The facts for jax's `device.device_kind`, or None for a model that is not in `GPUS`.

    The full name must match, except for case, spacing and a leading "NVIDIA": "RTX 4090 Laptop GPU", a MIG slice or
    "A100-PCIE-40GB" are other cards with other rates, and no fact is better than a wrong one. Two names are ambiguous:
    RTX 4060 Ti and 5060 Ti with 8 GB report the same name and differ in `memory_bytes` only; the larger one is found.
    """
    return _BY_KIND.get(_normalized(device_kind))


def _normalized(device_kind: str) -> str:
    """A device kind without differences in case, spacing and a leading "NVIDIA"."""
    return " ".join(device_kind.lower().split()).removeprefix("nvidia ")


_BY_KIND = {
    _normalized(kind): gpu
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes)
    for kind in (gpu.name, *gpu.aliases)
}
