"""Facts per GPU model: memory, peak rates and links. gpus.csv has a row for each, with units and sources.

Rates are peaks at the boost clock that the document uses, dense (no structured sparsity) and with float32 accumulation,
as in training. NVIDIA's data sheets often print the sparse rate; the dense rate is exactly half of it. GeForce tensor
cores accumulate in float32 at half the rate of float16: the rate here is the one with float32, half of what reviews
quote (RTX 4090: 165 and not 330 TFLOP/s for bf16).

The memory that a CUDA program sees is less than the nominal size, because ECC and the driver reserve a part, which
differs by a few MiB between drivers. The CUDA context and cuDNN workspaces must fit into it as well.

Clock and L2 are for XLA's cost model only (`aot` compiles without the GPU). They come from XLA's own target
descriptions of the a100, h100, h200 and b200. The limits of a streaming multiprocessor are those of its compute
capability (CUDA C++ Programming Guide, "Compute Capabilities").

Link rates are per direction, after line coding; copies of pinned memory reach 80 to 90 % of them. So every rate is an
upper bound, and times derived from rates are lower bounds.

Between machines (`links`): DGX A100, H100, H200 and B200 have one InfiniBand adapter for each of 8 GPUs, of 200, 400,
400 and 400 Gbit/s (NVIDIA's data sheets and user guides of these systems). Other cards have no system of their own:
assumed is one adapter of 100 Gbit/s for a machine of 8, and of 400 for L40S. `--gpus-per-node` sets how many are in a
machine.

What programs reach of these bounds is in rates.py, with the ends of each figure and its source. A card whose row has no
TFLOP/s has those of its multiprocessors and clock. Checked against what the documents print: RTX 3090 71, RTX 3080
59.5, RTX A6000 154.8, A10 125, A10G 70, L4 121, L40 181, RTX 6000 Ada 364, RTX 4080 97.5, RTX 5070 61.7, RTX 5080
112.6, RTX PRO 6000 504 TFLOP/s.

Users call GPUs by any writing of the names in gpus.csv (`gpu_key`). A name that is not known is refused with a list of
those that are. Another card is never proposed for it: a card that is near in name is not near in speed.

This file imports no jax.
"""

import csv
import difflib
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from surojax.errors import ConfigError
from surojax.planner.amounts import MiB
from surojax.planner.rates import (
    ASSUMED,
    CALIBRATED,
    MEASURED,
    NOTHING_SEEN,
    PRODUCTS,
    SHEET,
    STAGED,
    UNCERTAIN,
    UNKNOWN_DRAM,
    Rates,
    Seen,
    Span,
)
from surojax.sizes import MOST_GPUS

POOL = 0.95  # largest fraction of a GPU's memory that JAX can use: the driver needs the remainder
GB, TFLOPS = 1e9, 1e12
# PCI Express base specification: transfers/s x lanes x 128b/130b coding / 8 bits, B/s per direction.
PCIE = {
    "4.0 x16": 16e9 * 16 * 128 / 130 / 8,  # 31.5 GB/s
    "5.0 x16": 32e9 * 16 * 128 / 130 / 8,  # 63.0 GB/s
    "4.0 x8": 16e9 * 8 * 128 / 130 / 8,
    "5.0 x8": 32e9 * 8 * 128 / 130 / 8,
}
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
    link_bandwidth: float  # B/s per direction between GPUs of one host: NVLink, or PCIe if there is no NVLink
    network_bandwidth: float  # B/s per direction of each GPU between machines
    pcie_bandwidth: float  # B/s per direction between GPU and host: PCIe, or NVLink-C2C
    clock: float  # Hz, the highest of an SM
    l2_bytes: int  # second-level cache
    rates: Rates  # what programs reach of these peaks
    gpus_per_node: int = 8  # GPUs in a machine, which share `link_bandwidth`
    aliases: tuple[str, ...] = ()  # other device kinds of exactly the same card
    also_called: tuple[str, ...] = ()  # other words for it, see `gpu_key`
    products_from: str = MEASURED  # where `rates.products` comes from: a key of rates.PRODUCTS
    ends: Mapping[str, Span] = field(default_factory=dict, hash=False)  # that differ from those of rates.UNCERTAIN
    host_memory_bandwidth: float | None = None  # B/s of a machine's host memory, both ways; None: see `host_memory`
    seen: Seen = NOTHING_SEEN  # what of `rates` was measured here

    @property
    def label(self) -> str:
        """The name, with the memory if there are cards of several sizes by this name."""
        same = sum(gpu.name == self.name for gpu in GPUS.values())
        return f"{self.name} ({math.ceil(self.memory_bytes / 2**30)} GB)" if same > 1 else self.name

    def in_a_machine(self, gpus: int) -> int:
        """The number of GPUs in one machine, of so many in all."""
        return min(gpus, self.gpus_per_node)

    def peak(self, dtype: str) -> float:
        """FLOP/s of products of a dtype, by its name ("float8") or HLO's; float32 has the tensor cores' TF32 rate."""
        if dtype in ("float32", "f32"):
            return self.tf32_flops
        eight = self.fp8_flops if dtype.startswith(("float8", "f8")) else None
        four = self.fp4_flops if dtype.startswith(("float4", "f4")) else None
        return eight or four or self.bf16_flops

    @property
    def pool_bytes(self) -> int:
        """Bytes of its memory that JAX can use at most."""
        return int(POOL * self.memory_bytes)

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
        spans_by_rate = {name: rate.span for name, rate in UNCERTAIN.items()}
        spans_by_rate["products"] = PRODUCTS[self.products_from]
        if self.staged:
            spans_by_rate["link"] = STAGED
        if self.host_memory_bandwidth is None:
            spans_by_rate["dram"] = UNKNOWN_DRAM
        return spans_by_rate | dict(self.ends)


# FLOP per multiprocessor and clock in bf16, fp8 and fp4, by chip; 0: none. Float32 accumulation at the full rate.
SM_FLOP = {"8.0": (2048, 0, 0), "8.6": (1024, 0, 0), "8.9": (1024, 2048, 0), "12.0a": (1024, 2048, 4096)}
SOURCES = {"calibrated": CALIBRATED, "measured": MEASURED, "sheet": SHEET, "assumed": ASSUMED}
TABLE = Path(__file__).with_name("gpus.csv")


def read_gpus(file: Path) -> dict[str, Gpu]:
    """Returns the GPUs of a table like gpus.csv by their keys. Raises ValueError for a cell that makes no sense."""
    with file.open(newline="", encoding="utf-8") as lines:
        return {row["key"]: _from_row(row) for row in csv.DictReader(line for line in lines if line[0] != "#")}


def _from_row(row: dict[str, str]) -> Gpu:
    """The facts of a row of the table."""

    def number(column: str, unit: float, default: float = 0.0) -> float:
        return float(row[column]) * unit if row[column] else default

    capability = row["capability"]
    sms = int(row["sms"])
    clock = number("ghz", 1e9)
    bf16, fp8, fp4 = (sms * clock * flop for flop in SM_FLOP.get(capability, (0, 0, 0)))
    if row["half_rate"]:
        bf16, fp8 = bf16 / 2, fp8 / 2  # fp4 is not halved: RTX 5090 1,676 TFLOP/s
    if row["bf16"]:
        bf16, fp8, fp4 = (number(column, TFLOPS) for column in ("bf16", "fp8", "fp4"))
    pcie = PCIE[row["pcie"]] if row["pcie"] in PCIE else number("pcie", GB)
    name, *aliases = row["device_kind"].split("; ")
    reached = "products attention attention_backward host link collective_sms boost beside duplex".split()
    ends = {}
    if row["attention_ends"]:
        slow, fast, source = row["attention_ends"].split()
        ends["attention"] = Span(float(slow), float(fast), SOURCES[source])
    if row["duplex"]:
        ends["duplex"] = Span(0.9, 1 / float(row["duplex"]), MEASURED)
    return Gpu(
        name=name,
        compute_capability=capability,
        sm_count=sms,
        memory_bytes=int(row["memory_bytes"]),
        memory_bandwidth=number("memory_gb_s", GB),
        bf16_flops=bf16,
        fp8_flops=fp8 or None,
        fp4_flops=fp4 or None,
        tf32_flops=number("tf32", TFLOPS, bf16 / 2),
        link_bandwidth=number("link_gb_s", GB, pcie),
        network_bandwidth=number("network_gbit_s", GBIT, 100 * GBIT / 8),
        pcie_bandwidth=pcie,
        clock=clock,
        l2_bytes=int(number("l2_mib", MiB)),
        gpus_per_node=int(number("gpus_per_node", 1, 8)),
        aliases=tuple(aliases),
        also_called=tuple(row["also_called"].split()),
        rates=Rates(**{field: float(row[field]) for field in reached if row[field]}),
        products_from=SOURCES[row["products_from"]],
        ends=ends,
        host_memory_bandwidth=number("host_gb_s", GB) or None,
    )


GPUS = read_gpus(TABLE)


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


# Cards that are known and not planned for, and why. Measured: PyTorch's products in bf16 beside fp16, see rates.py.
_NO_BF16 = "its tensor cores have no bfloat16 ({} beside {} TFLOP/s in float16), and flash attention needs sm_80"
REFUSED = {
    "t4": f"sm_75: {_NO_BF16.format(2, 42)}",
    "v100": f"sm_70: {_NO_BF16.format(10, 95)}, and CUDA 13 no longer compiles for it",
    "rtx2080ti": f"sm_75: {_NO_BF16.format(7, 59)}",
    "p100": "sm_60: it has no tensor cores",
}
_REFUSED_WORDS = {"t4": "t416gb", "v100": "v10016gb v10032gb v100sxm2 v100s v100pcie"}


WHICH = f"known are {', '.join(GPUS)}; AMD's were not tried"
AMD = r"amd|radeon|instinct|\bmi ?\d{2,3}|\brx ?\d{4}|xtx|\bgfx\d"  # in names of AMD's GPUs


def gpu_key(text: str | None) -> str:
    """Returns the key of `GPUS` for what a user calls a GPU, whatever its case, spaces, dashes and vendor's words.

    Raises ConfigError for none, for one that is not known, that this project does not compute on, or of which there are
    several.
    """
    if text is None:
        raise ConfigError(f"no GPU given: pass --gpu NAME; {WHICH}")
    word = _word(text)
    gpu = _BY_WORD.get(word)
    if gpu in REFUSED:
        raise ConfigError(f"--gpu: expected a GPU that computes in bfloat16, got {text!r} ({REFUSED[gpu]})")
    if gpu is not None:
        return gpu
    sizes = [key for key in GPUS if _word(key.partition("_")[0]) == word]
    if sizes:
        raise ConfigError(f"--gpu: expected {' or '.join(sizes)}, got {text!r}, of which there are several; choose one")
    if re.search(AMD, text.lower()):
        raise ConfigError(f"--gpu: expected an NVIDIA GPU, got {text!r}; AMD's were not tried")
    near = difflib.get_close_matches(word, [name for name, key in _BY_WORD.items() if key in GPUS], n=1, cutoff=0.6)
    hint = f"did you mean {_BY_WORD[near[0]]}?" if near else WHICH
    raise ConfigError(f"--gpu: expected a GPU whose facts are known, got {text!r}; {hint}")


def _word(text: str) -> str:
    """A name of a GPU in one word: "NVIDIA GeForce RTX 4090" and "4090" are "4090", "A100-40G" is "a10040gb"."""
    word = re.sub(r"[^a-z0-9]", "", re.sub(r"nvidia|geforce|quadro|tesla|graphics", "", text.lower()))
    word = re.sub(r"(?<=\d)g$", "gb", word.removesuffix("gpu"))
    return word.removeprefix("rtx")


def _by_word() -> dict[str, str]:
    """Returns the keys of `GPUS` and `REFUSED` by what users call them, without words that several cards have."""
    called = defaultdict[str, set[str]](set)
    for key, gpu in GPUS.items():
        for word in (*map(_word, (key, gpu.name, *gpu.aliases)), *gpu.also_called):
            called[word].add(key)
    for key in REFUSED:
        for word in (_word(key), *_REFUSED_WORDS.get(key, "").split()):
            called[word].add(key)
    return {word: key for word, keys in called.items() if len(keys) == 1 for key in keys}


_BY_WORD = _by_word()
