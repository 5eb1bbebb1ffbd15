"""Grouped products: in Pallas' interpreter against a loop over experts, and in a model against the scan over blocks."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import CONFIG, KERNEL, normal, quick_at

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import fits, grouped_matmul, scaled_product, scaled_sums
from pallas_kernels.mma import ROWS
from surojax.models.kinds import experts
from surojax.models.linear_fp8 import InFloat8, products_with_experts
from surojax.models.model import Compute
from surojax.models.operations import Operations
from surojax.numerics.recipes import Precision

pytestmark = pytest.mark.full(after=1)

f32, bf16 = jnp.float32, jnp.bfloat16
e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2

CASES = [
    ((1, 0, 2, 1), 64, 96),  # tiles of rows of each expert; an expert without any; a tile of columns that overlaps
    ((0, 1, 0), 80, 64),  # a first and a last expert without rows; 80 inputs are 5 x 16
    ((2,), 208, 144),
    ((0, 3, 1), 128, 256),
]


def by_loop(x, w, dy, tiles):
    """(y, dx, dw), float32, expert by expert."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    ends = ROWS * np.cumsum(tiles)
    parts = [slice(end - ROWS * n, end) for n, end in zip(tiles, ends, strict=True)]
    y = np.concatenate([x[rows] @ w[e].T for e, rows in enumerate(parts)])
    dx = np.concatenate([dy[rows] @ w[e] for e, rows in enumerate(parts)])
    return y, dx, np.stack([dy[rows].T @ x[rows] for rows in parts])


@pytest.mark.gpu
@pytest.mark.parametrize("tiles, outputs, inputs", quick_at(CASES, 0, 1))
def test_kernel(tiles, outputs, inputs):
    x, w, dy = (
        normal(i, shape, bf16)
        for i, shape in enumerate(
            [(ROWS * sum(tiles), inputs), (len(tiles), outputs, inputs), (ROWS * sum(tiles), outputs)]
        )
    )
    of_tiles = jnp.asarray(np.repeat(np.arange(len(tiles)), tiles), jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(how):
        y, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, of_tiles, **dict(how)), x, w)
        return y, *vjp(dy)

    expected = by_loop(x, w, dy, tiles)
    for how in (KERNEL, {"implementation": "xla"}):
        for got, want in zip(run(tuple(how.items())), expected, strict=True):
            # Sums in float32, rounded to bfloat16 once.
            assert got.dtype == bf16 and got.shape == want.shape
            np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-5 * np.abs(want).max())
        _, _, dw = run(tuple(how.items()))
        assert all(not np.any(np.asarray(dw[e])) for e, n in enumerate(tiles) if not n)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("left", [e4m3, e5m2])
def test_kernel_in_float8(left):
    """Operands of one format and of two, with a scale for each tile or expert: sums of exact products."""
    if not KERNEL["interpret"] and (dispatch.capability(jax.devices()[0]) or (0, 0)) < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    tiles, outputs, inputs = (1, 0, 2, 1), 96, 160
    rows = ROWS * sum(tiles)
    x, dy = (normal(i, (rows, n), f32).astype(left) for i, n in ((0, inputs), (1, outputs)))
    w = normal(2, (len(tiles), outputs, inputs), f32).astype(e4m3)
    of_tiles = jnp.asarray(np.repeat(np.arange(len(tiles)), tiles), jnp.int32)
    scale_T, scale_E = 2.0 ** jnp.arange(sum(tiles)), 2.0 ** -jnp.arange(len(tiles), dtype=f32)
    x_KR = normal(3, (rows, inputs), f32).astype(e4m3).T
    y, _, _ = by_loop(*(np.asarray(a, f32) for a in (x, w, dy)), tiles)
    _, _, dw = by_loop(*(np.asarray(a, f32) for a in (x_KR.T, w, dy)), tiles)
    y, dw = y * np.repeat(scale_T, ROWS)[:, None], dw * np.asarray(scale_E)[:, None, None]
    for how in (KERNEL, {"implementation": "xla"}):
        found = scaled_product(x, w, of_tiles, scale_T, dtype=f32, **how)
        sums = scaled_sums(dy.T, x_KR, of_tiles, scale_E, dtype=f32, **how)
        for got, want in ((found, y), (sums, dw)):
            assert got.dtype == f32
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())
        assert not np.any(sums[1])


def test_sizes_that_the_kernels_take():
    assert fits(e4m3, 64, 96) and not fits(e5m2, 64, 80)
    assert fits(bf16, 64, 80) and not fits(f32, 64, 64) and not fits(bf16, 48, 64) and not fits(bf16, 64, 72)
    x, w, of_tiles = jnp.zeros((ROWS, 48), bf16), jnp.zeros((2, 64, 48), bf16), jnp.zeros(1, jnp.int32)
    with pytest.raises(dispatch.Unserved, match=r"grouped_matmul: expected 16-bit matrices .*got bfloat16 \(64, 48\)"):
        grouped_matmul(x, w, of_tiles, implementation="mosaic")
    with pytest.raises(ValueError, match=r"grouped_matmul: x: expected \[R, K\], R a multiple of 64"):
        grouped_matmul(x[:10], w, of_tiles)
    for left, right in ((x[None], w), (x[:0], w), (x, w[0]), (x, w[:, :, :32])):
        with pytest.raises(ValueError, match=r"grouped_matmul: [xw]: expected"):
            grouped_matmul(left, right, of_tiles)
    dy8, x8 = x.T.astype(e5m2), x.T.astype(e4m3)
    for left, right in ((dy8[None], x8), (dy8[:, :0], x8), (dy8[:, :32], x8), (dy8, x8[0]), (dy8, x8[:, :32])):
        with pytest.raises(ValueError, match=r"scaled_sums: (dy|x): expected"):
            scaled_sums(left, right, of_tiles, jnp.ones(1), dtype=bf16)
    with pytest.raises(ValueError, match=r"grouped_matmul: experts: expected int32 .* got uint8"):
        grouped_matmul(x, w, jnp.zeros(1, jnp.uint8))
    with pytest.raises(
        ValueError, match="scaled_product: dtype of the left operand: expected float8_e4m3fn or float8_"
    ):
        scaled_product(x, w, of_tiles, jnp.ones(1), dtype=bf16)
    with pytest.raises(ValueError, match=r"scaled_product: scales: expected \(1,\), got \(2,\)"):
        scaled_product(x.astype(e4m3), w.astype(e4m3), of_tiles, jnp.ones(2), dtype=bf16)
    with pytest.raises(ValueError, match="scaled_sums: experts: expected int32"):
        scaled_sums(x.T.astype(e5m2), x.T.astype(e4m3), jnp.zeros(2, jnp.int32), jnp.ones(2), dtype=bf16)
    with pytest.raises(ValueError, match="grouped_matmul: experts: expected int32"):
        grouped_matmul(x, w, jnp.zeros(2, jnp.int32))


@pytest.mark.parametrize("biases, recipe", quick_at([(False, "bf16"), (True, "bf16"), (False, "fp8_current")]))
def test_experts_by_the_kernel(monkeypatch, biases, recipe):
    """The layer's result and all gradients are as near to float32's as the scan's; an unused expert has zeros."""
    in_float8 = InFloat8({}) if recipe == "fp8_current" else None
    interpreted = functools.partial(products_with_experts, interpret=KERNEL["interpret"])
    monkeypatch.setattr(experts, "products_with_experts", interpreted)
    monkeypatch.setattr(experts, "recomputed", lambda f: f)  # which cannot compute again what Pallas interprets
    monkeypatch.setattr(experts, "grouped_matmul", functools.partial(grouped_matmul, interpret=KERNEL["interpret"]))
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "moe_intermediate_size": 96 if in_float8 else 80,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    }
    if biases:
        sizes |= {"expert_bias": True, "hidden_act": "clamped_swiglu"}
    layer = experts.Experts(dataclasses.replace(CONFIG, **sizes), rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    params = jax.tree.map(lambda w: normal(w.size, w.shape, bf16) / 8, params)
    x = normal(1, (2, 50, 64), bf16)
    weights = jax.nn.softmax(normal(2, (2, 50, 2), f32))
    chosen = jnp.asarray(np.random.default_rng(0).permuted(np.tile([0, 1, 2, 4], (100, 1)), axis=1))[:, :2]
    chosen = chosen.reshape(2, 50, 2).astype(jnp.int32)

    def run(kernels: str, dtype):
        of_width = dtype == bf16
        precision = Precision(recipe if of_width else "bf16", kernels=kernels)
        ops = Operations(Compute(precision=precision), in_float8=in_float8 if of_width else None)

        def mixed(params, x, weights):
            return nnx.merge(graph, params).mix(x, chosen, weights, ops)

        with jax.default_matmul_precision("float32"):
            y, vjp = jax.vjp(mixed, *jax.tree.map(lambda a: a.astype(dtype), (params, x)), weights)
            return jax.tree.map(
                lambda a: np.asarray(a, np.float32),
                (y, vjp(jnp.sin(jnp.arange(y.size)).reshape(y.shape).astype(dtype))),
            )

    expected, scanned, found = run("xla", f32), run("xla", bf16), run("mosaic", bf16)
    for want, scan, got in zip(*map(jax.tree.leaves, (expected, scanned, found)), strict=True):
        far = np.abs(want).max()
        assert np.abs(got - want).max() <= max(1.5 * np.abs(scan - want).max(), 1e-6 * far)
        if want.ndim == 3 and len(want) == 5:
            assert not got[3].any() and got[2].any()
