"""The bench command as far as a machine without a GPU goes: the references timed, tables, JSON, errors."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import pytest
from small import quick_at

from pallas_kernels import adamw8bit_update, bench, flash_attention, shapes
from pallas_kernels.shapes import MODELS, Case, Sizes

SMALL = Sizes(hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, vocab=320)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"COPY_BYTES": 2**16, "COLD_BYTES": 2**16, "TURN_SECONDS": 1e-4}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setitem(MODELS, "llama7b", SMALL)


def test_every_op_is_found():
    assert "cross_entropy" in bench.OPS and "dispatch" not in bench.OPS and "shapes" not in bench.OPS


@pytest.mark.full
@pytest.mark.parametrize("op", quick_at([(op,) for op in bench.OPS], 0))
def test_references_are_timed(op, tmp_path, capsys):
    """One row per case, in the table and in the file; without the kernel there is nothing to compare with."""
    file = tmp_path / "found.json"
    argv = [op, "--tokens", "256", "--repeat", "2", "--implementation", "xla", "--json", str(file)]
    assert bench.main(argv) == 0
    found, cases = json.loads(file.read_text()), bench.OPS[op].cases(SMALL, 256)
    assert [row["bytes"] for row in found["rows"]] == [case.bytes for case in cases]
    assert all(
        row["xla_s"] > 0 and row["kernel_s"] is row["of_copy"] is row["difference"] is None for row in found["rows"]
    )
    assert found["copy_gb_per_s"] > 0 and found["tokens"] == 256 and found["sizes"] == "llama7b"
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(cases) and len({line.count("|") for line in lines}) == 1
    assert all(case.name in line for case, line in zip(cases, lines[2:], strict=True))


def test_without_a_gpu_it_says_so(capsys):
    assert bench.main(["cross_entropy"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1
    assert "expected an NVIDIA GPU that the kernels serve, got cpu" in printed.err


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "OP: expected one of"),
        (["rmsnorm"], "got 'rmsnorm'"),
        (["cross_entropy", "--all"], "or --all, got both"),
        (["cross_entropy", "--tokens", "0"], "--tokens: expected 1 or more, got 0"),
        (["cross_entropy", "--repeat", "-1"], "--repeat: expected 1 or more, got -1"),
        (["cross_entropy", "--sizes", "llama8b"], "invalid choice: 'llama8b'"),
        (["cross_entropy", "--json", "/nowhere/at/all.json"], "a folder that exists, got '/nowhere/at/all.json'"),
        (["cross_entropy", "--json", "/tmp"], "expected a file, got the folder '/tmp'"),
    ],
)
def test_bad_input(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(argv)
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    text = capsys.readouterr().out
    assert all(
        word in text for word in ("--sizes", "--tokens", "--repeat", "--json", "--all", "--implementation", "OP")
    )


def test_table():
    rows = [
        bench.Measurement("op.case", 10**9, 1e-3, 2e-3, 1000.0, 0.5, 1e-6, 3.0),
        bench.Measurement("op.other", 10**6, None, 2e-6, None, None, None, None),
    ]
    head, _, first, second = bench.markdown_table(rows).splitlines()
    assert head.startswith("| case | MB | kernel us | GB/s | % of copy | XLA us | XLA / kernel |")
    assert first == "| op.case | 1000.0 | 1000.0 | 1000 | 50.0 | 2000.0 | 2.00 | 1.00e-06 | 3.00e+00 |"
    assert second == "| op.other | 1.0 | - | - | - | 2.0 | - | - | - |"


def test_differences_are_seen():
    a = (jnp.zeros((2, 3), jnp.bfloat16), jnp.array([1, 2], jnp.int8), jnp.zeros(0))
    b = (jnp.full((2, 3), -0.5, jnp.bfloat16), jnp.array([1, 4], jnp.int8), jnp.zeros(0))
    assert bench.difference(a, b) == (2.0, 4.0)
    assert bench.difference(a, a)[0] == 0


def test_what_is_updated_in_place_is_passed_on():
    """Donated arguments become the results written over them, and the call can be made again and again."""
    s = jax.ShapeDtypeStruct((4, 4), jnp.float32)

    def run(p, g, m, *, implementation=None):
        return {"loss": jnp.sum(g), "m": m + g, "p": p - g}

    case = Case("step", run, (s, s, s), 3 * 64, donated=(2, 0))
    args = bench.random_arguments(case, 0)
    p, g, m = map(jnp.copy, args)
    results = run(*args)
    after = bench.passed_on(case, args, results)
    assert (after[0] == p - g).all() and (after[1] == g).all() and (after[2] == m + g).all()
    bench.caller(case, "xla")(3)


def test_turns_are_taken_and_the_median_counts():
    order = []
    callers = {name: (lambda n, name=name: order.append((name, n))) for name in "ab"}
    found = bench.call_seconds(callers, repeat=3)
    turns = [name for name, _ in order[4:]]
    assert turns == list("ababab") and set(found) == {"a", "b"} and all(t >= 0 for t in found.values())


def bytes_of(arrays) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))


@pytest.mark.parametrize("op", [*bench.OPS, "flash_attention"])
def test_bytes_of_a_call_are_those_of_its_arguments_and_results(op):
    """But for vectors beside them, 2 %. Two ops read their arguments twice, in two passes over them."""
    module = bench.OPS.get(op, flash_attention)
    for case in getattr(module, "cases", flash_attention.reference_cases)(SMALL, 512):
        results = bytes_of(jax.eval_shape(functools.partial(case.run, implementation="xla"), *case.args))
        if op == "nvfp4_quantize":  # the reference has a byte for each number of 4 bits
            results -= sum(math.prod(case.args[0].shape) // 2 for _ in range(1 + (case.name == "quantize_both")))
        if case.name == "attention.backward":  # of which the forward pass' result is an argument too
            results += bytes_of(case.args[0])
        passes = 2 if op == "nvfp4_quantize" or case.name == "forward_and_backward" else 1
        expected = passes * bytes_of(case.args) + results
        assert case.bytes == pytest.approx(expected, rel=0.02), case.name


def test_bytes_of_an_update_are_those_of_its_arrays():
    """Master weights read and written, gradients read, moments in 8 bits and their scales both ways, work weights."""
    sizes = shapes.Sizes(256, 512, 4, 4, 64, 1000)
    for case in adamw8bit_update.cases(sizes, 1):
        p, g, m, m_scales, v, v_scales, *_ = (x.size * x.dtype.itemsize for x in case.args)
        work = 2 * case.args[0].size if case.name.endswith("stack") else 0
        assert case.bytes == 2 * p + g + 2 * (m + m_scales + v + v_scales) + work


@pytest.mark.parametrize(
    "dtype, shape, allowed",
    [("float32", (2,), 1e-4), ("bfloat16", (2,), 2**-7), ("float8_e5m2", (2,), 2**-2), ("float32", (), 2**-8)],
)
def test_what_is_more_than_rounding(dtype, shape, allowed):
    """Of the largest number, 2; a largest magnitude by itself is rounded to bfloat16. Codes may be the next ones."""
    expected = jnp.full(shape, 2.0, dtype)
    for apart, is_rounding in ((0.0, True), (1.99 * allowed, True), (4 * allowed, False), (math.nan, False)):
        actual = jnp.full(shape, 2.0 + apart, jnp.float32).astype(dtype)
        assert bool(bench.disagreement([actual], [expected])) != is_rounding, apart
    code = jnp.int8([3, -2])
    assert not bench.disagreement([code + jnp.int8([1, 0])], [code])
    assert bench.disagreement([code + jnp.int8([2, 0])], [code]).startswith("2.00e+00 apart, where 1.00e+00")
    assert bench.disagreement([code], [jnp.uint8([3, 2])]) == "int8 in place of uint8"


def test_random_arguments_are_small():
    """Integers from 0 to 96, scales between 0.1 and 0.9, matrices of normal numbers; each its own."""
    shapes_of = [((1000,), jnp.int8), ((1000,), jnp.float32), ((40, 50), jnp.float32), ((40, 50), jnp.float32)]
    case = Case("step", lambda *_, **__: None, tuple(jax.ShapeDtypeStruct(*s) for s in shapes_of), 0)
    whole, scales, a, b = bench.random_arguments(case, 0)
    assert [(x.shape, x.dtype) for x in (whole, scales, a, b)] == [(shape, jnp.dtype(d)) for shape, d in shapes_of]
    assert (whole.min(), whole.max()) == (0, 96) and 0.1 <= scales.min() < 0.11 and 0.89 < scales.max() <= 0.9
    assert a.std() == pytest.approx(1, abs=0.1) and abs(a.mean()) < 0.1 and (a != b).any()


@pytest.mark.parametrize("kernel", [True, False])
def test_a_measurement_by_hand(monkeypatch, kernel):
    """A megabyte in 2 ms, where a copy reads and writes one in 1 ms. Results are of the second seed."""
    case = Case(
        "step",
        lambda x, *, implementation=None: x * (1 if implementation == "xla" else 3),
        (jax.ShapeDtypeStruct((4, 4), jnp.float32),),
        10**6,
    )
    seconds = {"copy": 1e-3, "xla": 4e-3} | ({"mosaic": 2e-3} if kernel else {})
    monkeypatch.setattr(bench, "COPY_BYTES", 10**6)
    monkeypatch.setattr(bench, "call_seconds", lambda callers, repeat: seconds)
    row, copy = bench.measure("op", case, ("mosaic", "xla") if kernel else ("xla",), 1)
    largest = float(jnp.abs(bench.random_arguments(case, 1)[0]).max()) if kernel else None
    of_kernel = (2e-3, 4e-3, 0.5, 0.25, 2 * largest, largest) if largest else (None, 4e-3, *[None] * 4)
    assert copy == 2e9 and row == bench.Measurement("op.step", 10**6, *of_kernel)
    assert bench.measure("step", case, ("xla",), 1)[0].case == "step"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("gpt2", (768, 4 * 768, 12, 12, 64, 50257)),
        ("llama1b", (2048, 8192, 32, 8, 64, 128256)),  # Llama 3.2
        ("llama7b", (4096, 11008, 32, 32, 128, 32000)),
        ("qwen7b", (3584, 18944, 28, 4, 128, 152064)),  # Qwen 2.5
        ("qwen32b", (5120, 27648, 40, 8, 128, 152064 - 128)),  # Qwen 3
        ("llama70b", (8192, 28672, 64, 8, 128, 128256)),  # Llama 3
    ],
)
def test_sizes_of_published_models(monkeypatch, name, expected):
    """As in their config.json."""
    monkeypatch.undo()
    assert MODELS[name] == expected
