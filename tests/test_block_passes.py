"""What a 7B block launches on a GPU under each recipe, compiled without one: benchmarks/block_passes.py."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from surojax.planner import aot

ROOT = Path(__file__).parents[1]
N, D, F = 2048, 4096, 11008
FORWARD = 2 * N * (4 * D * D + 3 * D * F)  # FLOPs of the seven linear layers
pytestmark = pytest.mark.skipif(not aot.available(), reason="needs the CUDA plugin, cuDNN and ptxas")


@functools.cache
def passes(gpu: str, recipe: str, kernels: str = "mosaic") -> dict:
    """What the benchmark reports, from a process of its own: one compiles for one kind of GPU."""
    command = [sys.executable, "benchmarks/block_passes.py", "--json", "--gpu", gpu, "--recipe", recipe]
    done = subprocess.run([*command, "--kernels", kernels], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("gpu, recipe", [("h200", "fp8_current"), ("rtx4090", "fp8_hybrid")])
@pytest.mark.full
def test_all_products_are_in_float8_and_only_fused_kernels_lie_between(gpu, recipe):
    found = passes(gpu, recipe)
    forward, backward = found["launches"]["forward"], found["launches"]["backward"]
    assert forward["float8 product"]["launches"] == 7
    # Computed again but for the last product, of which only the residual stream would come; two gradients of each.
    assert backward["float8 product"]["launches"] == 6 + 14
    assert found["added_up_in_float32"]
    last = 2 * N * D * F
    assert found["float8_flops"] == {"forward": FORWARD, "backward": 3 * FORWARD - last}
    for launches in (forward, backward):
        assert launches["other product"]["launches"] == launches["block-scaled product"]["launches"] == 0
        # What XLA adds itself: angles of rope, 1 MiB, and the partial sums of the two norms' scales, 4 MiB each.
        assert launches["pass by XLA"]["bytes"] <= 12 * 2**20
        assert launches["fused kernel"]["launches"] > 0


@pytest.mark.full
def test_without_the_kernels_xla_makes_more_passes():
    """The figures are able to differ: the same block with XLA's own fusions moves more between its products."""
    fused, plain = (passes("h200", "fp8_current", kernels) for kernels in ("mosaic", "xla"))
    between = lambda found: sum(
        found["launches"][way][kind]["bytes"]
        for way in ("forward", "backward")
        for kind in ("fused kernel", "pass by XLA")
    )
    assert plain["launches"]["forward"]["fused kernel"]["launches"] == 0
    assert between(plain) > between(fused)


def all_products_are_block_scaled(launches: dict) -> None:
    assert launches["forward"]["block-scaled product"]["launches"] == 7
    assert launches["backward"]["block-scaled product"]["launches"] == 6 + 14
    assert launches["forward"]["float8 product"]["launches"] == 0


@pytest.mark.full
def test_operands_of_mxfp8_are_made_by_fused_kernels():
    """Each in one pass, where XLA makes three; what it still adds is said in docs/kernels.md, as is what it moves
    alone: 1630 MiB forward, 6210 backward."""
    fused = passes("b200", "mxfp8")["launches"]
    all_products_are_block_scaled(fused)
    # By rows: 4 different inputs (queries, keys and values share one, gate and up another) and 7 weights. The others:
    # 2 norms, rope. Backward: those but for the last product's two operands; of 7 products every gradient,
    # either way, and weight, and the 4 different inputs; each of the others again.
    operands, others = 4 + 7, 3
    assert fused["forward"]["fused kernel"]["launches"] == operands + others
    assert fused["backward"]["fused kernel"]["launches"] == operands - 2 + 7 + 7 + 4 + 2 * others
    swiglu = {"forward": 3, "backward": 6}  # arrays [N, F] of 16 bits, in one pass by XLA
    for way, most in (("forward", 64), ("backward", 200)):
        assert fused[way]["pass by XLA"]["bytes"] < most * 2**20 + swiglu[way] * 2 * N * F


@pytest.mark.full
def test_operands_of_nvfp4_are_made_by_fused_kernels():
    """Each in two passes, the first for the tensor's largest magnitude; what XLA adds is said in docs/kernels.md, as is
    what it moves alone: 75 passes and 2263 MiB forward, 225 and 10707 backward."""
    fused = passes("b200", "nvfp4")["launches"]
    all_products_are_block_scaled(fused)
    # As for mxfp8, in twos. Backward every matrix has signs of its own, which its input is rotated with: 7 of those.
    inputs, weights, others = 4, 7, 3
    again = inputs + weights - 2
    assert fused["forward"]["fused kernel"]["launches"] == 2 * (inputs + weights) + others
    assert fused["backward"]["fused kernel"]["launches"] == 2 * (again + weights + 7 + 7) + 2 * others
    between = lambda launches, what: launches["fused kernel"][what] + launches["pass by XLA"][what]
    for way, launches, mebibytes in (("forward", 0.9 * 75, 0.9 * 2263), ("backward", 0.6 * 225, 0.6 * 10707)):
        assert between(fused[way], "launches") < launches
        assert between(fused[way], "bytes") < mebibytes * 2**20
