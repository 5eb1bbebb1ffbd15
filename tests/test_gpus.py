"""GPU facts: names are matched exactly or not at all, and the figures agree with each other."""

import subprocess
import sys

import pytest

from surojax.planner import gpus
from surojax.planner.gpus import GPUS, find_gpu


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
        "NVIDIA A100 80GB PCIe",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA GeForce RTX 5060",
        "NVIDIA H100 NVL",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA H800",
        "NVIDIA GH200 480GB",
        "NVIDIA H200 NVL",
        "NVIDIA GB200",
        "NVIDIA B300 SXM6 AC",
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
    has_fp8 = gpu.compute_capability not in ("8.0",)
    has_fp4 = gpu.compute_capability in ("10.0a", "12.0a")
    assert (gpu.fp8_flops is not None, gpu.fp4_flops is not None) == (has_fp8, has_fp4)
    assert gpu.link_bandwidth >= gpu.pcie_bandwidth
    # Clock = rate / (SMs x 128 lanes x 2), 64 lanes on the A100: a misplaced digit gives an impossible one.
    lanes = 64 if key == "a100" else 128
    assert 1.3e9 < gpu.fp32_flops / (gpu.sm_count * lanes * 2) < 2.7e9


@pytest.mark.parametrize(
    ("key", "box_gb"),
    [("a100", 80), ("l40s", 48), ("rtx4090", 24), ("rtx5090", 32), ("rtx5060ti_16gb", 16), ("h100", 80)],
)
def test_memory_is_a_little_less_than_the_box_says(key, box_gb):
    assert 0.92 < GPUS[key].memory_bytes / (box_gb * 2**30) < 1.0


def test_gpus_needs_no_jax():
    code = f"import runpy, sys; runpy.run_path({gpus.__file__!r}); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
