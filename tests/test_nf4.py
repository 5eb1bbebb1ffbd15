"""NF4 against what bitsandbytes quantised (fixtures/make_nf4_reference.py), and shards of it against the whole."""

import functools
import hashlib
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from surojax.numerics import nf4

REFERENCE = safetensors.numpy.load_file(Path(__file__).parent / "fixtures" / "nf4_reference.safetensors")
CASES = {"crossing": (64, 576), "aligned": (32, 1024), "wide": (3, 16448)}


def matrix(case: str) -> np.ndarray:
    """The numbers that the script quantised; numpy's legacy generator is frozen."""
    random = np.random.RandomState(len(case))
    found = (0.02 * random.standard_normal(CASES[case])).astype(np.float32)
    found[1, 5] = 1.5
    found[2, 70] = -0.7
    found[0, 64:128] = 0
    return found


def reference(case: str, parts: int = 1) -> nf4.Nf4:
    """What bitsandbytes stored of a case."""
    of = {name.removeprefix(f"{case}.weight"): x for name, x in REFERENCE.items() if name.startswith(f"{case}.weight")}
    state = json.loads(of[".quant_state.bitsandbytes__nf4"].tobytes())
    offset = np.float32(state["nested_offset"])
    return nf4.from_flat(of[""].reshape(-1), of[".absmax"], of[".nested_absmax"], offset, CASES[case], parts)


def quantised(w: np.ndarray) -> nf4.Nf4:
    return jax.jit(functools.partial(nf4.quantise, like=nf4.planned(w.shape)))(w)


def dequantised(q: nf4.Nf4, dtype="float32") -> np.ndarray:
    return np.asarray(jax.jit(nf4.dequantise, static_argnums=1)(jax.tree.map(jnp.asarray, q), dtype))


def test_the_tables_are_those_of_bitsandbytes():
    np.testing.assert_array_equal(nf4.NUMBERS, REFERENCE["wide.weight.quant_map"])
    np.testing.assert_array_equal(nf4.DYNAMIC, REFERENCE["wide.weight.nested_quant_map"])


@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_those_of_bitsandbytes(case):
    """To the bit, but for the mean of the absmax: sums of float32 in another order, so 2 units in the last place."""
    found = quantised(matrix(case))
    expected = reference(case)
    for name in ("codes", "absmax", "shift"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_array_max_ulp(np.asarray(found.offset), expected.offset, 2)
    ulp = np.spacing(np.float32(matrix(case).max()))  # group_absmax is a difference from the mean
    np.testing.assert_allclose(found.group_absmax, expected.group_absmax, rtol=0, atol=2 * ulp)


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_bitsandbytes_to_the_bit(case):
    found = [
        hashlib.sha256(dequantised(reference(case), dtype).tobytes()).digest() for dtype in ("float32", "bfloat16")
    ]
    assert b"".join(found) == REFERENCE[f"{case}.sha256"].tobytes()


@pytest.mark.parametrize("case, parts", [("crossing", 3), ("aligned", 4), ("aligned", 16)])
def test_shards_are_complete(case, parts):
    """Rows and parts of rows, cut out of every array as a PartitionSpec cuts them, are the same numbers."""
    whole = dequantised(reference(case))
    q = reference(case, parts)
    chex.assert_trees_all_equal(dequantised(q), whole)
    rows = slice(5, 17)  # groups begin and end within
    chex.assert_trees_all_equal(
        dequantised(nf4.Nf4(*(x[rows] for x in q[:4]), q.offset)),  # pyright: ignore[reportArgumentType]
        whole[rows],
    )
    columns = [np.split(x, parts, axis=1) for x in q[:4]]
    cut = [dequantised(nf4.Nf4(*arrays, q.offset)) for arrays in zip(*columns, strict=True)]
    chex.assert_trees_all_equal(np.concatenate(cut, axis=1), whole)


@pytest.mark.parametrize("shape, parts", [((64, 576), 3), ((32, 1024), 1), ((2, 3, 16448), 1)])
def test_the_plan_is_what_is_made(shape, parts):
    planned = nf4.planned(shape, (1, parts))
    quantise = functools.partial(nf4.quantise, like=planned)
    quantise = jax.vmap(quantise) if len(shape) == 3 else quantise
    made = jax.eval_shape(quantise, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    chex.assert_trees_all_equal_shapes_and_dtypes(planned, made)


def test_bytes_of_a_matrix():
    """0.5 a number and 1/64, as in bitsandbytes; the scales of groups are 5 bytes a row in place of 4 in 16384."""
    q = nf4.planned((4096, 4096))
    size = sum(x.size * x.dtype.itemsize for x in q)
    assert size == 4096 * 4096 // 2 + 4096 * 4096 // 64 + 5 * 4096 + 4


def test_what_is_not_finite_is_not_lost():
    w = matrix("crossing")
    for bad in (np.nan, np.inf):
        w[7, 9] = bad
        assert not np.isfinite(dequantised(quantised(w))).any()
