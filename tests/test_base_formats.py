"""FP8 in blocks and NVFP4 against numpy with ml_dtypes, and shards of them against the whole (NF4: test_nf4.py)."""

import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from surojax import ConfigError
from surojax.numerics import base_formats, block_fp8, nvfp4, quantized
from surojax.numerics.base_formats import FORMATS

SHAPE = (200, 320)  # blocks of 128 x 128 are cut off at both ends


def matrix() -> np.ndarray:
    random = np.random.RandomState(7)
    w = (0.02 * random.standard_normal(SHAPE)).astype(np.float32)
    w[130:, :64] *= 50
    w[3, 5] = -1.25
    w[:, 256:272] = 0
    return w


def quantised(name: str, divided=(1, 1), w: np.ndarray | None = None):
    """`matrix()` in a format, planned for so many parts."""
    found = FORMATS[name]
    w = matrix() if w is None else w
    return jax.device_get(jax.jit(functools.partial(found.quantise, like=found.planned(w.shape, divided)))(w))


def dequantised(q, dtype="float32") -> np.ndarray:
    return np.asarray(jax.jit(base_formats.dequantise, static_argnums=1)(q, dtype))


def test_block_fp8_is_what_the_blocks_say():
    """Codes and scales of each block by itself, and the numbers of both, to the bit."""
    w = matrix()
    q = quantised("fp8")
    assert q.codes.dtype == ml_dtypes.float8_e4m3fn and q.scales.shape == (25, 5)  # tiles of 8 x 64
    expected = np.zeros(SHAPE, np.float32)
    for i in range(0, 200, 128):
        for j in range(0, 320, 128):
            block = w[i : i + 128, j : j + 128]
            scale = np.abs(block).max() * np.float32(1 / 448)
            codes = (block * (1 / scale)).astype(ml_dtypes.float8_e4m3fn)
            np.testing.assert_array_equal(q.codes[i : i + 128, j : j + 128], codes)
            expected[i : i + 128, j : j + 128] = codes.astype(np.float32) * scale
    np.testing.assert_array_equal(dequantised(q), expected)
    np.testing.assert_array_equal(dequantised(q, "bfloat16"), expected.astype(ml_dtypes.bfloat16))


def test_scales_of_a_checkpoint_reach_every_tile():
    """Every number has the scale of its own block, and no code changes."""
    random = np.random.RandomState(1)
    codes = random.standard_normal(SHAPE).astype(ml_dtypes.float8_e4m3fn)
    scales = random.random_sample((2, 3)).astype(np.float32)
    q = block_fp8.from_blocks(codes, scales, block_fp8.planned(SHAPE, (5, 2)))
    assert q.scales.shape == (25, 10)  # tiles of 8 x 32
    of_numbers = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[:200, :320]
    np.testing.assert_array_equal(dequantised(q), codes.astype(np.float32) * of_numbers)


def test_nvfp4_is_nearest_and_its_numbers_are_exact():
    w = matrix().astype(np.float64)
    q = quantised("nvfp4")
    of_matrix = np.abs(matrix()).max() * np.float32(1 / (448 * 6))
    assert q.tensor_scale == of_matrix
    largest = np.abs(w).reshape(200, 20, 16).max(-1)
    np.testing.assert_array_equal(q.scales, (largest / (6 * of_matrix)).astype(ml_dtypes.float8_e4m3fn))
    codes = np.stack([q.codes & 15, q.codes >> 4], axis=-1).reshape(SHAPE)  # the first in the low half
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = np.repeat(q.scales.astype(np.float64), 16, axis=1)
    ideal = np.divide(w, scales * of_matrix, out=np.zeros(SHAPE), where=scales > 0)
    distances = np.abs(np.clip(ideal, -6, 6)[..., None] - nvfp4.NUMBERS)
    assert (np.abs(np.clip(ideal, -6, 6) - numbers) <= distances.min(-1) + 1e-6).all()
    expected = (numbers * scales).astype(np.float32) * of_matrix
    np.testing.assert_array_equal(dequantised(q), expected)
    np.testing.assert_array_equal(dequantised(q, "bfloat16"), expected.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("name, divided", [("fp8", (4, 5)), ("fp8", (1, 2)), ("nvfp4", (4, 5))])
def test_shards_are_complete(name, divided):
    """Every array cut as a PartitionSpec cuts it, in whatever parts it was planned, has the same numbers."""
    q = quantised(name, divided)
    whole = dequantised(quantised(name))
    np.testing.assert_array_equal(dequantised(q), whole)

    def part(x, i, j):
        rows, columns = (n // parts for n, parts in zip(x.shape, divided, strict=True))
        return x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]

    i, j = divided[0] - 1, divided[1] - 1
    cut = base_formats.map_arrays(q, lambda x: part(x, i, j))
    np.testing.assert_array_equal(dequantised(cut), part(whole, i, j))


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_the_plan_is_what_is_made(name):
    found = FORMATS[name]
    for shape, divided in (((64, 576), (4, 3)), ((2, 256, 1024), (1, 1))):
        planned = found.planned(shape, divided)
        quantise = functools.partial(found.quantise, like=planned)
        made = jax.eval_shape(
            jax.vmap(quantise) if len(shape) == 3 else quantise, jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(planned, made)


def test_bytes_of_a_matrix():
    """1 byte and 4 in 16384; 1/2 and 1/16. A matrix' own scale is not counted."""
    shape = (4096, 11008)
    found = {name: base_formats.bytes_per_number(FORMATS[name].planned(shape), shape) for name in FORMATS}
    assert found["fp8"] == 1 + 4 / 128**2 and found["nvfp4"] == 1 / 2 + 1 / 16
    assert 0.5 + 1 / 64 < found["nf4"] < 0.5 + 1 / 64 + 0.002


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_lost(name, bad):
    w = matrix()
    w[7, 9] = bad
    assert not np.isfinite(dequantised(quantised(name, w=w))[7, 9])


def test_one_format_is_chosen():
    settings = dict.fromkeys((known.setting for known in base_formats.FORMATS.values()), False)
    assert base_formats.chosen_format(settings) == ""
    assert base_formats.chosen_format(settings | {"qlora_fp4": True}) == "nvfp4"
    with pytest.raises(
        ConfigError, match=r"^qlora_fp8: expected False with qlora_bnb=True, got True; leave one of them out$"
    ):
        base_formats.chosen_format(settings | {"qlora_fp8": True, "qlora_bnb": True})


def test_rows_are_whole_blocks():
    assert base_formats.has_whole_blocks("nf4", (8, 128)) and base_formats.has_whole_blocks("nf4", (8, 128), (1, 2))
    assert not base_formats.has_whole_blocks("nf4", (8, 96)) and not base_formats.has_whole_blocks(
        "nf4", (8, 192), (1, 2)
    )
    assert base_formats.has_whole_blocks("nvfp4", (8, 96), (1, 2)) and not base_formats.has_whole_blocks(
        "nvfp4", (8, 96), (1, 4)
    )
    assert base_formats.has_whole_blocks("fp8", (7, 9), (1, 3))


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_in_16_bits_are_quantised_in_32(name):
    """Scales and quotients are not rounded to bfloat16."""
    w = jnp.asarray(matrix()[:128, :256]).astype(jnp.bfloat16)
    in_16, in_32 = (quantised(name, w=x) for x in (w, w.astype(jnp.float32)))
    chex.assert_trees_all_equal(in_16, in_32)
    assert all(base_formats.is_in(in_16, other) == (other == name) for other in (*FORMATS, ""))


def test_eight_bit_copies_have_blocks_or_one_scale():
    x = jnp.asarray(matrix())[:8, :320]
    assert quantized.quantise(x, jnp.int8).scales.shape == (8, 4) and quantized.block_size(320) == 80
    assert quantized.quantise(x, jnp.int8, 64).scales.shape == (8, 5)
    whole = quantized.quantise_whole(x, jnp.float8_e4m3fn)
    assert whole.scales.shape == () and quantized.has_one_scale(whole)
    assert not quantized.has_one_scale(quantized.quantise(x, jnp.int8)) and not quantized.has_one_scale(x)
    half = quantized.work_copy({"x": x}, {"x": jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)}, jnp.bfloat16)
    assert half["x"].dtype == jnp.bfloat16
    tops = jnp.bfloat16([1.0, 448.0, 450.0])
    chex.assert_trees_all_equal(
        quantized.scale_for(tops, jnp.float8_e4m3fn, 1), quantized.scale_for(jnp.float32(tops), jnp.float8_e4m3fn, 1)
    )
