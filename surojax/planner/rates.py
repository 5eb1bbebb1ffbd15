"""The fractions of a GPU's peaks that programs reach: each rate, its ends, and where they come from.

Products, memory and the host link of one H200 were measured (benchmarks/results/h200.md), and its products, `boost`,
`beside` and `duplex` are from there; copies beside products are on their account since three steps took as long. A
rate is a point and two ends (`Span`): `timeline.py` and `roofline.py` take the point, `prediction.py` simulates a step
with each rate at its ends as well and prints the range that follows. A run on a GPU corrects them (`seen.py`).
Sources, by how much they say:

* CALIBRATED: fitted, one constant for each GPU, to rows that LLMQ publishes (benchmarks/calibrate.py prints them). The
  ends are the worst row, left out of the fit. Such a row also carries what else the model of time gets wrong.
* MEASURED: somebody published the rate itself, of another program or machine.
* SHEET: derived from data sheets, with the ends that calibrated cards of all kinds span.
* ASSUMED: nobody said; the ends are what the published rows do not exclude.

Where the figures come from:

* products: LLMQ's rows for RTX 4090, RTX 5060 Ti, RTX 5090, L40S, H100, RTX PRO 6000. More than 1 on cards that boost
  above the clock of their data sheet. Others with a figure: the best bfloat16 product by PyTorch
  (github.com/zzc0721/torch-performance-test-data, database.md) times what the fitted rates are of that figure: 1.0 on
  GeForce (0.97 to 1.04), 0.85 on cards with float32 accumulation at the full rate (L40S 0.74, H100 0.86, RTX PRO 6000
  0.95). LLMQ's rows are met to -10 to +21 % so, and to -26 to +57 % from the other cards' mean. Cards without such a
  figure have that of cards alike: 1.05, or 0.75 at the full rate.
  The H100 keeps its loss by tiles: without it, as on the H200, the rows that it is calibrated on are met to 3.3 % in
  place of 3.1.
* eight_bit: float8 products, of the rate of 16-bit ones; LLMQ's FP8 rows (calibrate.py) lie between the ends.
* attention: H100: cuDNN's causal forward pass at 1k and 2k tokens in FlashAttention-3 (Shah et al. 2024,
  arXiv:2407.08608), 391 and 450 of 989 TFLOP/s; backward passes reach 0.8 to 0.9 of that. A100: FlashAttention-2's
  figures for 2k tokens (Dao 2023, arXiv:2307.08691). Others: assumed; 3 to 8 % of the time of LLMQ's rows, which 0.4 to
  0.7 fit as well.
* link: H100: 360 of 450 GB/s, which NVIDIA calls expected (github.com/NVIDIA/nccl-tests/issues/326); also assumed for
  other cards with NVLink. Without peer-to-peer, through host memory: 12 and 20 GB/s assumed for GeForce, half of their
  PCIe 5.0 cards' 35 GB/s with 4 and 28 with 8 RTX 5090 (github.com/NVIDIA/nccl/issues/1639, a server of 16 DIMMs).
* network: 0.9, assumed from NVIDIA's nccl-tests on machines with an adapter of 400 Gbit/s for each GPU.
* memory: 0.9, what copies within device memory commonly reach.
* host: 23.9 to 27.1 of 31.5 GB/s on eight RTX 4090, 52.8 of 63 on H100 (github.com/NVIDIA/nvbandwidth/issues/15, 24);
  copies of a layer are smaller than those of a benchmark. LLMQ's rows fit as well with 0.6 to 0.9.
* duplex: with both directions busy an A100 reads 11 to 13 and writes 24 to 25 of 25.5 GB/s, an RTX 4090 reads 11 to 16
  (nvbandwidth issues 11, 15, 53); desktops come near 1. LLMQ's rows fit as well with 0.5 to 1.0.
* dram: of what host memory can move for all GPUs of a machine together, see `gpus.host_memory`.
* latencies: assumed, half to twice as long.

This file imports no jax.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

CALIBRATED = "calibrated on published rows"
MEASURED = "measured by others"
SHEET = "from data sheets"
ASSUMED = "assumed"
DISKS = "disks"  # the rate of the disks that hold files, which is no GPU's
HERE = "measured here"


@dataclass(frozen=True)
class Rates:
    """Fractions of a GPU's peak rates that programs reach, and latencies in seconds, for planner/timeline.py.

    products: of the peak of a dtype, by whole waves of the largest tiles. boost: of that, below the power limit, to
    which products of many tiles are held at any clock: 1 for cards that do not come to it. beside: part of the time of
    copies within the device that products beside them lose. eight_bit: of that, with operands in float8
    or float4. attention: of the bf16 peak, causal FLOPs. memory: of the device memory's bandwidth. host: of
    `pcie_bandwidth`, in one direction; duplex: of that, in each direction while both are busy. dram: of
    `Gpu.host_memory`. link: of `link_bandwidth`. network: of `network_bandwidth`. hop: latency of a collective for each
    of `links.hops`. launch: of a kernel. copy: latency of a copy engine. ramp: first loads and last stores of a
    product. iteration: of a loop. collective_sms: of the multiprocessors, while a collective runs.
    """

    products: float
    boost: float = 1.0
    eight_bit: float = 1.0
    attention: float = 0.60
    attention_backward: float = 0.50
    memory: float = 0.90
    beside: float = 0.0
    host: float = 0.82
    duplex: float = 0.85
    dram: float = 0.80
    link: float = 0.80
    network: float = 0.90
    hop: float = 12e-6
    launch: float = 2.0e-6
    copy: float = 8e-6
    ramp: float = 2.5e-6
    iteration: float = 5e-6
    collective_sms: float = 0.10

    def slower(self, factor: float) -> "Rates":
        """Rates with which everything takes `factor` times as long."""
        scaled = {name: getattr(self, name) / factor for name in BANDWIDTHS}
        return replace(self, **scaled | {name: getattr(self, name) * factor for name in LATENCIES})

    def with_end(self, name: str, end: float) -> "Rates":
        """Rates with one of `UNCERTAIN` at an end: a multiple of the value."""
        return replace(self, **{field: getattr(self, field) * end for field in UNCERTAIN[name].fields})


LATENCIES = ("hop", "launch", "copy", "ramp", "iteration")
BANDWIDTHS = ("products", "attention", "attention_backward", "memory", "host", "dram", "link", "network")
RATES = tuple(field.name for field in fields(Rates))


class Seen(NamedTuple):
    """A measurement on a GPU here, see seen.py. factor: measured / predicted seconds of a step, which `Rates` have
    in them. same: with just these settings. replaced: names of single rates that were measured. note: for output.
    """

    factor: float = 1.0
    same: bool = False
    replaced: tuple[str, ...] = ()
    note: str = ""


NOTHING_SEEN = Seen()


class Span(NamedTuple):
    """The ends of a rate, as multiples of its value, and where they come from. slow, fast: of the step at that end."""

    slow: float
    fast: float
    source: str


# By where a card's products come from, each as far as calibrated rows err if predicted so: see above, and calibrate.py.
PRODUCTS = {
    CALIBRATED: Span(0.90, 1.12, CALIBRATED),
    MEASURED: Span(0.82, 1.12, MEASURED),
    SHEET: Span(0.65, 1.35, SHEET),
}


class Uncertain(NamedTuple):
    """A rate, or rates that err together.

    word: for output. span: on all GPUs; a `Gpu` may have another one. fields: of `Rates`.
    """

    word: str
    span: Span
    fields: tuple[str, ...]


UNCERTAIN = {  # the others of `Rates` are taken as they are
    "eight_bit": Uncertain("products in 8 bits beside 16", Span(0.80, 1.12, MEASURED), ("eight_bit",)),
    "attention": Uncertain("attention", Span(0.70, 1.17, ASSUMED), ("attention", "attention_backward")),
    "memory": Uncertain("device memory", Span(0.90, 1.05, ASSUMED), ("memory",)),
    "host": Uncertain("host link", Span(0.73, 1.10, MEASURED), ("host",)),
    "duplex": Uncertain("host link, both ways at once", Span(0.59, 1.18, MEASURED), ("duplex",)),
    "dram": Uncertain("host memory that the GPUs share", Span(0.75, 1.12, ASSUMED), ("dram",)),
    "link": Uncertain("link between GPUs", Span(0.75, 1.12, MEASURED), ("link",)),
    "network": Uncertain("network between machines", Span(0.60, 1.05, ASSUMED), ("network",)),
    "collective_sms": Uncertain("multiprocessors that collectives take", Span(2.0, 0.3, ASSUMED), ("collective_sms",)),
    "latencies": Uncertain("latencies", Span(2.0, 0.5, ASSUMED), LATENCIES),
    "products": Uncertain("products", PRODUCTS[MEASURED], ("products",)),  # see `Gpu.spans`
}
# Link of cards whose collectives go through host memory. LLMQ's 7B on 4 x RTX 4090 excludes less than 0.4 of 12 GB/s.
STAGED = Span(0.50, 1.80, ASSUMED)
# Host memory if nobody says what a machine has: two channels of DDR4-3200 where two of DDR5-5600 are taken, and so on.
UNKNOWN_DRAM = Span(0.55, 2.0, ASSUMED)
