"""GPU facts: names are matched exactly or not at all, and the figures agree with each other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from surojax.errors import ConfigError
from surojax.planner import gpus, rates
from surojax.planner.gpus import GPUS, find_gpu, gpu_key, with_nodes

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from calibrate import ROWS


@pytest.mark.parametrize(
    ("device_kind", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA GeForce RTX 5060 Ti", "rtx5060ti_16gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 141GB HBM3e", "h200"),
        ("NVIDIA B200", "b200"),
        ("nvidia  b200 ", "b200"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA GeForce RTX 5060", "rtx5060"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti_16gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
    ],
)
def test_a_device_kind_of_a_known_card_is_found(device_kind, key):
    assert find_gpu(device_kind) is GPUS[key]


@pytest.mark.parametrize(
    "device_kind",
    [
        "",
        "cpu",
        "NVIDIA",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA H800",
        "NVIDIA H200 NVL",
        "TPU v5 lite",
    ],
)
def test_a_near_miss_is_not_claimed(device_kind):
    assert find_gpu(device_kind) is None


@pytest.mark.parametrize("key", GPUS)
def test_figures_agree_with_each_other(key):
    gpu = GPUS[key]
    assert gpu.tf32_flops == pytest.approx(gpu.bf16_flops / 2, rel=0.02)  # true of every architecture listed
    if gpu.fp8_flops is not None:
        assert gpu.fp8_flops == pytest.approx(gpu.bf16_flops * 2, rel=0.02)  # L40S: printed 733 against 2 x 362.05
    has_fp8 = gpu.compute_capability not in ("8.0", "8.6")
    has_fp4 = gpu.compute_capability in ("10.0a", "10.3a", "12.0a")
    assert (gpu.fp8_flops is not None, gpu.fp4_flops is not None) == (has_fp8, has_fp4)
    assert gpu.link_bandwidth >= gpu.pcie_bandwidth
    # A misplaced digit in a product's rate, or in the number of multiprocessors, gives an impossible one.
    assert 500 < gpu.bf16_flops / (gpu.sm_count * gpu.clock) <= 8192  # FLOP


@pytest.mark.parametrize(
    ("key", "box_gb"),
    [
        *(("a100", 80), ("l40s", 48), ("rtx4090", 24), ("rtx5090", 32), ("rtx5060ti_16gb", 16), ("h100", 80)),
        *(("a100_40gb", 40), ("rtx3060", 12), ("rtx3080", 10), ("rtx5060ti_8gb", 8), ("rtxpro6000", 96), ("l4", 24)),
    ],
)
def test_memory_is_a_little_less_than_the_box_says(key, box_gb):
    assert 0.91 < GPUS[key].memory_bytes / (box_gb * 2**30) < 1.0


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("RTX4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("rtx-3090", "rtx3090"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx5070ti"),
        ("4070 ti super", "rtx4070tisuper"),
        ("L4", "l4"),
        ("a6000", "rtxa6000"),
        ("RTX 6000 Ada", "rtx6000ada"),
        ("RTX PRO 6000", "rtxpro6000"),
        ("a10g", "a10g"),
        ("A100-40G", "a100_40gb"),
        ("a100 80gb pcie", "a100_pcie"),
        ("H100-SXM", "h100"),
        ("h100 nvl", "h100_nvl"),
        ("5060ti 16GB", "rtx5060ti_16gb"),
        ("GB200", "gb200"),
    ],
)
def test_a_gpu_is_found_however_it_is_written(written, key):
    assert gpu_key(written) == key


@pytest.mark.parametrize(
    "written, said",
    [
        ("rtx409", "got 'rtx409'; did you mean rtx4090?"),
        ("h10", "did you mean h100?"),
        ("", "known are a10, a100, .*; AMD's were not tried"),
        ("banana", "known are a10, a100, .*; AMD's were not tried"),
        ("4060ti", "expected rtx4060ti_16gb or rtx4060ti_8gb, got '4060ti', of which there are several"),
        ("MI300X", "expected an NVIDIA GPU, got 'MI300X'; AMD's were not tried"),
        ("rx7900", "expected an NVIDIA GPU"),
        ("7900 XTX", "expected an NVIDIA GPU"),
    ],
)
def test_an_unknown_name_gets_the_nearest_or_the_list(written, said):
    with pytest.raises(ConfigError) as error:
        gpu_key(written)
    assert re.search(said.replace("?", "[?]"), str(error.value)) and ".csv" not in str(error.value)


def test_cards_of_two_sizes_differ_by_name():
    labels = [gpu.label for gpu in GPUS.values()]
    assert len(set(labels)) == len(labels) and GPUS["rtx4060ti_8gb"].label.endswith("4060 Ti (8 GB)")


def test_names_of_several_cards_and_of_cards_without_bfloat16_are_refused_by_reason():
    for written in ("4060ti", "RTX 5060 Ti", "NVIDIA GeForce RTX 4060 Ti"):
        with pytest.raises(ConfigError, match=r"expected rtx\d060ti_\d+gb or rtx\d060ti_\d+gb, got"):
            gpu_key(written)
    for written in ("t4", "Tesla T4", "V100-SXM2", "RTX 2080 Ti"):
        with pytest.raises(
            ConfigError, match=r"sm_7\d: its tensor cores have no bfloat16 .* flash attention needs sm_80"
        ):
            gpu_key(written)


def test_every_gpu_has_its_ends_and_says_where_they_come_from():
    """Wider ones for what is known less; a value lies between its ends."""
    widths = {}
    for gpu in GPUS.values():
        for name, span in gpu.spans().items():
            assert min(span.slow, span.fast) < 1 < max(span.slow, span.fast), (gpu.name, name)
        products = gpu.spans()["products"]
        widths[gpu.products_from] = products.fast / products.slow
    assert widths[rates.CALIBRATED] < widths[rates.MEASURED] < widths[rates.SHEET]
    assert {key for key, gpu in GPUS.items() if gpu.products_from == rates.CALIBRATED} >= {row.gpu for row in ROWS}


def test_host_memory_is_shared_by_the_gpus_of_a_machine():
    """Each of four has a quarter; what a user says replaces what is assumed, and narrows it."""
    gpu = with_nodes("rtx4090", 4)
    assert gpu.host_memory(4) == pytest.approx(204.8e9 / 4) == gpu.host_memory(8)
    assert gpu.host_memory(1) == pytest.approx(89.6e9)
    told = with_nodes("rtx4090", 4, 100.0)
    assert told.host_memory(4) == pytest.approx(25e9) and told.spans()["dram"].slow > gpu.spans()["dram"].slow
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--host-bandwidth"):
            with_nodes("rtx4090", None, wrong)


def test_gpus_needs_no_jax():
    code = f"import runpy, sys; runpy.run_path({gpus.__file__!r}); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Technical specifications per compute capability of NVIDIA's CUDA programming guide: resident threads of an SM, KB of
# shared memory of an SM and of one block, and its cores for float32.
GUIDE = {
    "8.0": (2048, 164, 163, 64),
    **dict.fromkeys(("8.6", "8.9", "12.0"), (1536, 100, 99, 128)),
    **dict.fromkeys(("9.0", "10.0", "10.3"), (2048, 228, 227, 128)),
}


@pytest.mark.parametrize("capability", GUIDE)
def test_an_architecture_has_the_limits_that_nvidia_publishes(capability):
    threads, shared, of_block, lanes = GUIDE[capability]
    found = gpus.ARCHITECTURES[capability]
    assert (found.threads, found.fp32_lanes) == (threads, lanes)
    assert (found.shared_memory, found.shared_memory_per_block) == (1024 * shared, 1024 * of_block)
    assert gpus.ARCHITECTURES.keys() == GUIDE.keys()


@pytest.mark.parametrize("name", [*rates.UNCERTAIN, *rates.PRODUCTS])
def test_the_ends_of_a_rate_are_on_both_sides_of_its_value(name):
    """The slow one first: below the value of what is a rate, above that of what is time, or SMs that are taken."""
    span = rates.PRODUCTS[name] if name in rates.PRODUCTS else rates.UNCERTAIN[name].span
    if name in ("latencies", "collective_sms"):
        assert span.fast < 1 < span.slow
    else:
        assert span.slow < 1 < span.fast


@pytest.mark.parametrize("key", gpus.REFUSED)
def test_a_card_that_is_not_planned_for_is_refused_with_its_reason(key):
    with pytest.raises(ConfigError, match=re.escape(gpus.REFUSED[key])):
        gpu_key(key)
