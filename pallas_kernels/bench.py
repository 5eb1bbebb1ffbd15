"""Times the kernels on the GPU of this machine and compares them with XLA's version of each and with a plain copy.

    python -m pallas_kernels.bench rms_norm --sizes llama7b --tokens 8192
    python -m pallas_kernels.bench --all --json kernels.json

For every call that a model of these sizes makes (`cases` of the op) it reports the time of one call, the bandwidth
(bytes that the call must read and write, over that time), that bandwidth as a percentage of the bandwidth of a large
copy, the time of the reference as XLA compiles it, and the largest difference between the two results.

Copy, kernel and reference take turns within one run, so that clocks and temperatures are alike. A time is the median of
the turns. In a turn, calls are issued one after the other and awaited together. Calls cycle through copies of the
inputs that together are larger than the second-level cache. A call that updates its inputs in place instead takes the
results of the call before it.

The exit code is 2 if there is no GPU that the kernels support and the option is not `--implementation xla`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels.dispatch import automatic
from pallas_kernels.shapes import MODELS, Case

COLD_BYTES = 512 * 2**20  # least size of all copies of the inputs; the largest second-level cache has 126 MiB
COPY_BYTES = 2**30
TURN_SECONDS = 0.02  # least duration of a turn
MOST_CALLS = 1000  # in a turn


def ops() -> dict[str, ModuleType]:
    """The modules of this package that have `cases`, by name."""
    names = (info.name for info in pkgutil.iter_modules(pallas_kernels.__path__) if info.name != "bench")
    modules = {name: importlib.import_module(f"pallas_kernels.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "cases")}


OPS = ops()


class Measurement(NamedTuple):
    """Measurements of a case; None if that implementation did not run."""

    case: str
    bytes: int  # that a call must read and write
    kernel_s: float | None
    xla_s: float | None
    gb_per_s: float | None  # bandwidth of the kernel, 10^9 bytes per second
    of_copy: float | None  # that bandwidth as a fraction of the copy's
    difference: float | None  # largest difference between kernel and reference
    largest: float | None  # largest magnitude in the reference


# ---- Inputs -----------------------------------------------------------------------------------------------------


def random_arguments(case: Case, seed: int) -> list[jax.Array]:
    """Random arguments: small integers, normal matrices, and scales or hyperparameters between 0.1 and 0.9."""

    def draw(key, s):
        if jnp.issubdtype(s.dtype, jnp.integer):
            return jax.random.randint(key, s.shape, 0, 97, jnp.int32).astype(s.dtype)
        if len(s.shape) < 2:
            return jax.random.uniform(key, s.shape, minval=0.1, maxval=0.9).astype(s.dtype)
        return jax.random.normal(key, s.shape, jnp.bfloat16).astype(s.dtype)

    keys = jax.random.split(jax.random.key(seed), len(case.args))
    return [jax.jit(draw, static_argnums=1)(key, s) for key, s in zip(keys, case.args, strict=True)]


def compiled_case(case: Case, implementation: str) -> Callable:
    """The case as a jitted function of its arrays."""
    return jax.jit(lambda *args: case.run(*args, implementation=implementation), donate_argnums=case.donated)


def passed_on(case: Case, args: list[jax.Array], results: Any) -> list[jax.Array]:
    """The arguments of the next call: donated ones are replaced by the results that were written over them.

    Those are the first results of the same shape and dtype, in the order of the arguments.
    """
    args = list(args)
    remaining = jax.tree.leaves(results)
    for i in case.donated:
        like = case.args[i]
        position = next(j for j, x in enumerate(remaining) if (x.shape, x.dtype) == (like.shape, like.dtype))
        args[i] = remaining.pop(position)
    return args


def difference(actual: Any, expected: Any) -> tuple[float, float]:
    """(largest difference over all results, largest magnitude of the expected results)."""

    def compared(a, b):
        a, b = (x.astype(jnp.float32) for x in (a, b))
        return jnp.max(jnp.abs(a - b), initial=0.0), jnp.max(jnp.abs(b), initial=0.0)

    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    figures = [[float(x) for x in jax.jit(compared)(a, b)] for a, b in pairs]
    return max(d for d, _ in figures), max(m for _, m in figures)


def disagreement(actual: Any, expected: Any) -> str:
    """How a kernel's results differ from the reference's by more than rounding; "" if they agree.

    Values may be rounded to the other neighbour: 2^-7 (bfloat16) or 2^-2 (e5m2) of the largest number, one step of an
    8-bit moment's code. A float32 number by itself is a largest magnitude: the kernel's is that of numbers that are
    stored, while XLA may take it before it rounds them (`xla_allow_excess_precision`), so 2^-8 apart.
    """
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if a.dtype != b.dtype:
            return f"{a.dtype} in place of {b.dtype}"
        whole = jnp.issubdtype(a.dtype, jnp.integer)
        apart, largest = difference(a, b)
        allowed = (
            1 if whole else largest * (2**-8 if not a.ndim else {8: 2**-2, 16: 2**-7, 32: 1e-4}[a.dtype.itemsize * 8])
        )
        if not apart <= allowed:  # NaN is not
            return f"{apart:.2e} apart, where {allowed:.2e} is rounding ({a.dtype})"
    return ""


# ---- Times ------------------------------------------------------------------------------------------------------


def caller(case: Case, implementation: str) -> Callable[[int], None]:
    """A function of n that makes n calls and awaits them."""
    f = compiled_case(case, implementation)
    inputs = [random_arguments(case, 0)]
    if not case.donated:
        copies = -(-COLD_BYTES // max(1, sum(x.nbytes for x in inputs[0])))
        inputs += [[jnp.copy(x) for x in inputs[0]] for _ in range(copies - 1)]

    def calls(n: int) -> None:
        results = None
        for i in range(n):
            args = inputs[i % len(inputs)]
            results = f(*args)
            if case.donated:
                inputs[0] = passed_on(case, args, results)
        jax.block_until_ready(results)

    return calls


def copier() -> Callable[[int], None]:
    """A function of n that makes n copies of COPY_BYTES and awaits them."""
    f = jax.jit(jnp.copy)
    x = jnp.zeros(COPY_BYTES // 4, jnp.float32)

    def calls(n: int) -> None:
        y = None
        for _ in range(n):
            y = f(x)
        jax.block_until_ready(y)

    return calls


def call_seconds(callers: dict[str, Callable[[int], None]], repeat: int) -> dict[str, float]:
    """Seconds of one call of each caller: the median of `repeat` turns, in which the callers alternate."""

    def seconds(calls: Callable[[int], None], n: int) -> float:
        start = time.perf_counter()
        calls(n)
        return (time.perf_counter() - start) / n

    n = {}
    for name, calls in callers.items():
        calls(1)  # compiles
        n[name] = min(MOST_CALLS, 1 + int(TURN_SECONDS / max(1e-9, seconds(calls, 2))))
    turns_of: dict[str, list[float]] = {name: [] for name in callers}
    for _ in range(repeat):
        for name, calls in callers.items():
            turns_of[name].append(seconds(calls, n[name]))
    return {name: statistics.median(turns) for name, turns in turns_of.items()}


def measure(op: str, case: Case, implementations: tuple[str, ...], repeat: int) -> tuple[Measurement, float]:
    """(measurements of a case, bytes per second of the copy in the same turns)."""
    differences = None, None
    if len(implementations) == 2:
        actual, expected = (compiled_case(case, name)(*random_arguments(case, 1)) for name in implementations)
        differences = difference(actual, expected)
        del actual, expected
    callers = {"copy": copier()} | {name: caller(case, name) for name in implementations}
    seconds = call_seconds(callers, repeat)
    copy = 2 * COPY_BYTES / seconds["copy"]
    kernel = seconds.get("mosaic")
    rate = case.bytes / kernel if kernel else None
    copy_fraction = rate / copy if rate else None
    name = case.name if case.name.startswith(op) else f"{op}.{case.name}"
    return Measurement(
        name, case.bytes, kernel, seconds.get("xla"), rate and rate / 1e9, copy_fraction, *differences
    ), copy


# ---- Report -----------------------------------------------------------------------------------------------------


def markdown_table(rows: list[Measurement]) -> str:
    """The rows as a table in Markdown."""

    def cell(x: float | None, spec: str) -> str:
        return "-" if x is None else format(x, spec)

    text = "| case | MB | kernel us | GB/s | % of copy | XLA us | XLA / kernel | largest difference | of |\n"
    text += "|---|---|---|---|---|---|---|---|---|\n"
    for r in rows:
        ratio = r.xla_s / r.kernel_s if r.xla_s and r.kernel_s else None
        cells = (
            r.case,
            cell(r.bytes / 1e6, ".1f"),
            cell(r.kernel_s and r.kernel_s * 1e6, ".1f"),
            cell(r.gb_per_s, ".0f"),
            cell(r.of_copy and 100 * r.of_copy, ".1f"),
            cell(r.xla_s and r.xla_s * 1e6, ".1f"),
            cell(ratio, ".2f"),
            cell(r.difference, ".2e"),
            cell(r.largest, ".2e"),
        )
        text += f"| {' | '.join(cells)} |\n"
    return text


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the command line. Ends the program with exit code 2 and one line if it is wrong."""
    head, _, details = (__doc__ or "").partition("\n")
    p = argparse.ArgumentParser(
        "python -m pallas_kernels.bench",
        description=head,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("op", nargs="?", metavar="OP", help=f"one of {', '.join(OPS)}")
    p.add_argument("--all", action="store_true", help="all ops")
    p.add_argument("--sizes", default="llama7b", choices=MODELS, help="model whose shapes are used (default: llama7b)")
    p.add_argument("--tokens", type=int, default=8192, help="tokens of a microbatch (default: 8192)")
    p.add_argument("--repeat", type=int, default=20, help="turns, of which the median counts (default: 20)")
    p.add_argument("--json", metavar="FILE", type=Path, help="write the figures there as well")
    p.add_argument(
        "--implementation",
        choices=("both", "mosaic", "xla"),
        default="both",
        help="both (default), mosaic = the kernels alone, xla = the references alone, on any device",
    )
    a = p.parse_args(argv)
    if a.all == bool(a.op):
        p.error(f"OP: expected one of {', '.join(OPS)}, or --all, got {'both' if a.op else 'neither'}")
    if a.op and a.op not in OPS:
        p.error(f"OP: expected one of {', '.join(OPS)}, got {a.op!r}")
    for name in ("tokens", "repeat"):
        if getattr(a, name) < 1:
            p.error(f"--{name}: expected 1 or more, got {getattr(a, name)}")
    if a.json and not a.json.absolute().parent.is_dir():
        p.error(f"--json: expected a file in a folder that exists, got {str(a.json)!r}")
    if a.json and a.json.is_dir():
        p.error(f"--json: expected a file, got the folder {str(a.json)!r}")
    return a


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    a = parse_arguments(argv)
    device = jax.devices()[0]
    if a.implementation != "xla" and automatic() != "mosaic":
        print(
            f"bench: expected an NVIDIA GPU that the kernels serve, got {device.device_kind}; "
            "--implementation xla times the references alone",
            file=sys.stderr,
        )
        return 2
    implementations = ("mosaic", "xla") if a.implementation == "both" else (a.implementation,)
    rows = []
    copies = []
    for op in OPS if a.all else [a.op]:
        for case in OPS[op].cases(MODELS[a.sizes], a.tokens):
            row, copy = measure(op, case, implementations, a.repeat)
            rows.append(row)
            copies.append(copy)
    copy = statistics.median(copies) / 1e9
    print(f"{device.device_kind}, jax {jax.__version__}, {a.sizes}, {a.tokens} tokens; copy {copy:.0f} GB/s\n")
    print(markdown_table(rows), end="")
    if a.json:
        about = {"device": device.device_kind, "jax": jax.__version__, "sizes": a.sizes, "tokens": a.tokens}
        values = about | {"repeat": a.repeat, "copy_gb_per_s": copy, "rows": [row._asdict() for row in rows]}
        a.json.write_text(json.dumps(values, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
