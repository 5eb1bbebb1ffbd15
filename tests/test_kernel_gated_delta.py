"""The kernels of the gated delta rule: in the interpreter against the recurrence in float64, and compiled for GPUs.

The cases and the recurrence are those of test_delta_rule.py; calls go through models/delta_rule.py, as a model's do.
"""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, KERNEL, REFERENCE
from test_delta_rule import (
    SMALL,
    assert_close,
    cases,
    check_cases,
    check_one_key,
    check_slopes,
    check_spike,
    drawn,
    expected,
    recurrence,
    starts_of,
    with_gradients,
)

from pallas_kernels import bench, dispatch, gated_delta_chunks as op, gated_delta_kernels as kernels, shapes
from surojax.models.delta_rule import ChunkSizes, chosen_sizes, gated_delta_rule
from surojax.models.kinds.gated_delta import GatedDelta
from surojax.models.kinds.sublayer import OnGpu
from surojax.models.model import Compute
from surojax.numerics.recipes import Precision
from surojax.planner import aot, costs, hlo

f32, bf16 = jnp.float32, jnp.bfloat16
T = 8192
HEADS = dataclasses.replace(CONFIG, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128)


@pytest.fixture
def in_float64():
    with jax.enable_x64():
        yield


def by_kernels(tokens, starts, state, sizes=None):
    """The rule with its groups by the kernels, in the interpreter."""
    sizes = sizes or ChunkSizes(16, 2)
    return gated_delta_rule(tokens, starts, state, sizes._replace(kernel=True, interpret=True))


def alone(tokens, starts, state, sizes):
    """The kernels of all tokens at once, in the interpreter."""
    how = {"implementation": "mosaic", "interpret": True, "chunk": sizes.chunk}
    return op.gated_delta(tokens, starts, state, **how)


def test_equals_the_recurrence(in_float64):
    """Outputs, state and all gradients: odd lengths, borders everywhere, strong decays, beta of 0 and 1."""
    check_cases(alone)


def test_groups_hand_on_the_state(in_float64, monkeypatch):
    """Each group as the kernels get it, by the reference in their place."""
    by_reference = lambda tokens, starts, state, **how: op.reference(tokens, starts, state)
    monkeypatch.setattr(op, "gated_delta", by_reference)
    found = jax.jit(lambda *arguments: by_kernels(*arguments, sizes=SMALL))(*cases())
    assert_close(found, expected()[0])


def check_floor(module=kernels) -> None:
    """In float32, a sum with a decay of e^-5000 in it would lose the digits of the weak decays after it."""
    tokens, _ = jax.tree.map(lambda x: jnp.asarray(x, f32), drawn(1, length=8))
    g = 0.02 * np.asarray(tokens.g)
    g[:, 1] = -5000.0
    x = module.vectors(op.Tokens(*tokens)._replace(g=jnp.asarray(g)), jnp.zeros((1, 8), jnp.int32), 8, f32)
    after = np.asarray(x.sum - x.sum[..., 1:2])[..., 2:]
    np.testing.assert_allclose(after, np.cumsum(g[0, 2:].reshape(6, -1).T, axis=-1)[None], atol=1e-5)


def test_strong_decays_take_no_digits_from_weak_ones():
    check_floor()


@pytest.mark.full
@pytest.mark.parametrize("check", [check_cases, check_one_key, check_spike, check_slopes])
def test_of_the_rule(in_float64, check):
    """Blocks of several sizes in the inverse; float32; finite differences."""
    check(by_kernels)


@pytest.mark.gpu
@pytest.mark.full
def test_in_bfloat16(in_float64):
    """As the recurrence of the same numbers in float64, with columns of values in two programs."""
    normal = np.random.default_rng(0).standard_normal
    B, T, K, r, k, v = 2, 150, 2, 2, 32, 128
    q, key = (jnp.asarray(normal((B, T, K, k)), bf16) for _ in range(2))
    values = jnp.asarray(normal((B, T, K, r, v)), bf16)
    g, beta = -np.logaddexp(0, normal((B, T, K, r))), 1 / (1 + np.exp(-normal((B, T, K, r))))
    tokens = op.Tokens(q, key, values, jnp.asarray(g, f32), jnp.asarray(beta, f32))
    state = jnp.asarray(normal((B, K, r, k, v)), f32)
    starts = np.stack([starts_of([], T), starts_of([3, 64, 100], T)])
    found = with_gradients(lambda *x: op.gated_delta(*x, **KERNEL))(tokens, starts, state)
    exact = jax.tree.map(lambda x: x.astype(jnp.float64), (tokens, state))
    wanted = with_gradients(op.reference)(exact[0], starts, exact[1])
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # Operands of products are rounded to bfloat16, 2^-9 of each number, of which errors add up over a chunk.
        got, want = np.asarray(got, np.float64), np.asarray(want)
        assert np.abs(got - want).max() <= 2**-6 * np.abs(want).max()


def test_heads_that_the_kernels_do_not_take_are_refused():
    tokens, state = jax.tree.map(lambda x: jnp.asarray(x, f32), drawn(1))
    words = "gated_delta: expected 16-bit heads of 16, 32, 64, 128 channels, got float32 of 4, values of 3"
    with pytest.raises(dispatch.Unserved, match=words):
        op.gated_delta(tokens, jnp.zeros((1, 23), jnp.int32), state, implementation="mosaic")
    with pytest.raises(dispatch.Unserved, match="gated_delta: expected 16-bit heads"):
        more = jax.tree.map(lambda x: jnp.concatenate([x] * 3, axis=1), tokens)  # more tokens than a chunk
        gated_delta_rule(more, None, state, implementation="mosaic")
    with pytest.raises(ValueError, match=r"gated_delta: starts: expected \(1, 23\), got \(1, 22\)"):
        op.gated_delta(tokens, jnp.zeros((1, 22), jnp.int32), state)
    for values in (tokens.v[..., 0], tokens.v[:0]):
        with pytest.raises(ValueError, match=r"gated_delta: v: expected \[B, T, K, r, v\], not empty"):
            op.gated_delta(tokens._replace(v=values), jnp.zeros((1, 23), jnp.int32), state)
    with pytest.raises(ValueError, match=r"gated_delta: beta: expected \(1, 23, 2, 2\), got \(1, 23, 2, 1\)"):
        op.gated_delta(tokens._replace(beta=tokens.beta[..., :1]), jnp.zeros((1, 23), jnp.int32), state)


def test_groups_of_a_row_are_equal(monkeypatch):
    """The tokens that are added to the last one are fewer than a chunk for each group; XLA computes short rows."""
    monkeypatch.setattr(dispatch, "automatic", lambda device=None: "mosaic")
    for length, chunks in ((63, None), (64, 1), (65, 2), (8192, 128), (8193, 65), (9000, 71)):
        keys, values, numbers = (1, length, 1, 16), (1, length, 1, 1, 16), (1, length, 1, 1)
        arrays: Any = (jax.ShapeDtypeStruct(shape, bf16) for shape in (keys, keys, values, numbers, numbers))
        tokens = op.Tokens(*arrays)
        sizes = chosen_sizes(tokens, None)
        assert sizes == (ChunkSizes(op.CHUNK, chunks, kernel=True) if chunks else ChunkSizes(64, 16, tf32=True))
        assert not chosen_sizes(tokens, "xla").kernel


def test_estimates_have_the_memory_of_what_computes():
    mixer = GatedDelta(HEADS)

    def working(kernels: str, gpu=True, dtype=bf16) -> int:
        x = OnGpu(rows=2, tokens=2 * T, dtype=jnp.dtype(dtype), tensor=1, per_sequence=1, chunks=1)
        compute = Compute(precision=Precision(kernels=kernels))
        return mixer.space(compute, x, gpu=gpu, packed=True, window=False).working

    assert working("auto") == working("mosaic") == 2 * mixer._kernel_bytes(T, 32)
    assert working("xla") == working("auto", gpu=False) == working("auto", dtype=f32) == 2 * mixer._group_bytes(T, 32)


@pytest.mark.full
def test_the_reference_is_the_recurrence(in_float64):
    tokens, state = drawn(2, length=op.CHUNK + 5)
    starts = np.stack([starts_of([], op.CHUNK + 5), starts_of([3, 60, 66], op.CHUNK + 5)])
    found, wanted = (with_gradients(rule)(tokens, starts, state) for rule in (op.gated_delta, recurrence))
    assert_close(found, wanted)


@pytest.mark.gpu
@pytest.mark.full
def test_the_cases_that_doctor_compares():
    """Four documents in a row, forward and backward, as the reference."""
    for case in op.cases(shapes.Sizes(256, 64, 2, 1, 16, 64), 128):
        arguments = bench.random_arguments(case, 1)
        found, wanted = (jax.jit(functools.partial(case.run, **how))(*arguments) for how in (KERNEL, REFERENCE))
        assert not bench.disagreement(found, wanted), case.name


# --- compiled for GPUs ------------------------------------------------------------------------------------------------

BY_XLA = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}  # instructions that launch nothing
# Bytes of each thread at most: found were 1,348 of gradients (h200), 296 of matrices (a100), 136 of forward (rtx5090).
SPILLED = {"matrices": 320, "forward": 160, "states": 0, "reverse": 0, "gradients": 1408}
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_gpu_disable_gpuasm_optimizations": False}


def compile_rule(kind: str) -> dict:
    """The rule of 16 key heads and 32 value heads of 128 forward and backward for a GPU: bytes, FLOPs and launches."""
    mesh = jax.sharding.Mesh(np.array(aot.devices(kind, 1)), ("one",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.NamedSharding(mesh.abstract_mesh, jax.P())
    array: Any = lambda *shape, dtype=bf16: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    keys, values, numbers = (1, T, 16, 128), (1, T, 16, 2, 128), (1, T, 16, 2)
    tokens = op.Tokens(array(*keys), array(*keys), array(*values), *[array(*numbers, dtype=f32)] * 2)
    state = array(1, 16, 2, 128, 128, dtype=f32)

    def passes(tokens, starts, state, d_out):
        rule = lambda tokens, state: op.gated_delta(tokens, starts, state, implementation="mosaic")
        results, pullback = jax.vjp(rule, tokens, state)
        return results, pullback((d_out, results[1]))

    arguments = tokens, array(1, T, dtype=jnp.int32), state, array(*values)
    compiled = aot.compile_for(jax.jit(passes), arguments, mesh, OPTIMISED)
    launched = [(i, of) for i, _, of in hlo.executed(hlo.parse_module(compiled.text)) if i.opcode not in BY_XLA]
    moved = sum(
        a.bytes for i, of in launched for x in (i.shape, *(of[n].shape for n in i.operands)) for a in hlo.arrays(x)
    )
    flops = sum(costs.said_flops(i) for i, _ in launched)
    return {"bytes": moved, "flops": flops, "launches": len(launched), "temporary": compiled.temp_bytes}


def compiled_elsewhere(kind: str) -> tuple[dict, dict[str, tuple[int, int]]]:
    """(what `compile_rule` returns in a process of its own, {kernel: (bytes of spills, registers)} of ptxas)."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "0"}
    env |= {"TF_CPP_VMODULE": "subprocess_compilation=3"}  # XLA passes on what ptxas says
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    ran = subprocess.run([sys.executable, __file__, kind], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = r"entry function 'gated_delta_([a-z]+)\w*'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    found = re.findall(said, ran.stderr, re.DOTALL)
    return json.loads(ran.stdout.splitlines()[-1]), {name: (int(a), int(b)) for name, a, b in found}


@pytest.mark.skipif(not aot.available(), reason=f"no compiler for GPUs here: {aot.EXTRA}")
@pytest.mark.full
@pytest.mark.parametrize("kind", ["a100", "rtx4090", "h200", "b200", "rtx5090"])
def test_compiled_for_a_gpu(kind):
    """One source for all of them; that they compile says that shared memory suffices."""
    found, kernels = compiled_elsewhere(kind)
    assert kernels.keys() == SPILLED.keys() and all(registers <= 255 for _, registers in kernels.values())
    assert all(spilled <= SPILLED[name] for name, (spilled, _) in kernels.items()), kernels
    assert found["bytes"] <= 245e3 * T and found["launches"] <= 20
    assert found["flops"] == pytest.approx(20e6 * T, rel=0.2)
    assert found["temporary"] <= GatedDelta(HEADS)._kernel_bytes(T, 32)


# --- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES = {
    "pairs of other documents": ("(row >= column) & (column >= starts[:, None])", "row >= column", check_cases),
    "a state enters other documents": ("jnp.where(own < 0,", "jnp.where(own < 9**9,", check_cases),
    "other documents leave": ("jnp.where(token >= last,", "jnp.where(token >= last - 1,", check_cases),
    "a state goes through a border": ("jnp.where(last < 0,", "jnp.where(last < 9**9,", check_cases),
    "a decay too many": ("jnp.exp(G[..., -1:] - G)", "jnp.exp(G[..., -1:] - G + g_BKrNC)", check_cases),
    "no state after a chunk": ("return through_ref[n] * h", "return 0 * h", check_cases),
    "no gradient of a state": ("D = through_ref[n] * D", "D = 0 * D", check_cases),
    "the end of a chunk has no decay": ("jnp.where(is_last, last, 0)", "0 * last", check_cases),
    "an inverse without one size of blocks": ("in range(1, s.C", "in range(2, s.C", check_cases),
    "no floor": ("jnp.maximum(g_BKrNC, FLOOR)", "g_BKrNC", check_floor),
}


def mistaken(old: str, new: str) -> types.ModuleType:
    """The module of the kernels from its source with another text."""
    source = Path(kernels.__file__).read_text()
    assert old in source
    module = types.ModuleType(kernels.__name__)
    exec(compile(source.replace(old, new), kernels.__file__, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_can_be_made(mistake):
    mistaken(*MISTAKES[mistake][:2])


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(in_float64, monkeypatch, mistake):
    *texts, check = MISTAKES[mistake]
    module = mistaken(*texts)
    monkeypatch.setattr(op, "kernels", module)
    with pytest.raises(AssertionError):
        check(module) if check is check_floor else check(alone)


if __name__ == "__main__":
    print(json.dumps(compile_rule(sys.argv[1])))
