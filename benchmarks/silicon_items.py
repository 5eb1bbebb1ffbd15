"""Measures one item of silicon.py in this process, and writes its results as they come.

    python benchmarks/silicon_items.py NAME --out FILE --scratch DIR [--dry]

A step has random weights and tokens, a few steps to warm up and a few that count; its prediction is of its own compiled
text and printed before the step runs. Its variants differ in XLA options or settings. State is made once for variants
that place it alike: pinning makes it at 2 GB/s.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from silicon import BY_NAME, FIVE, TOY, Item, steps_of

import surojax
from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import from_config
from surojax.config.fields import Config
from surojax.config.flags import parse_flags
from surojax.inference.sample import sampled
from surojax.memory.nvme import Claimed, claim
from surojax.parallel.feed import Feed
from surojax.placement import cuda_plugin
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import find_devices, make_mesh
from surojax.planner.gpus import gpu_key
from surojax.planner.prediction import Prediction
from surojax.planner.run_plan import checked
from surojax.step import blocks
from surojax.training.run_programs import compile_step
from surojax.training.run_summary import print_prediction

# Of `rates`: products of a 7B block with 8,192 tokens, of 1.5B with 32,768, and a cube.
SHAPES = ((8192, 11008, 4096), (8192, 4096, 11008), (4096, 11008, 8192), (32768, 8960, 1536), (8192, 8192, 8192))
PRODUCT_S = 2.0  # of each product
PROMPT, NEW = 512, 64  # tokens of `generation`
BATCHES = 1, 8


class Measured(NamedTuple):
    """A compiled step, the state that it left behind, to begin the next variant with, and its batch."""

    plan: Any
    state: Any
    step: Any
    batch: tuple[Any, ...]


# -- Steps -------------------------------------------------------------------------------------------------------------


def config(item: Item, flags: str, scratch: str, dry: bool) -> Config:
    """The config of an item's step with these flags besides. scratch: folder of files."""
    words = f"{item.flags} {flags} {f'{TOY} {item.toy}' if dry else ''}".split()
    return parse_flags([word.format(scratch=scratch) for word in words], argparse.ArgumentParser())[0]


def built(c: Config) -> tuple[Config, Assembly, tuple[Any, ...]]:
    """Returns (config for this device, assembly, batch of random tokens)."""
    devices = find_devices(1)
    mesh = make_mesh(devices)
    if devices[0].platform == "gpu":
        c = checked(c, gpu_key(devices[0].device_kind))
    run = from_config(c, mesh, total_steps=100)
    shape = (c.gradient_accumulation_steps, c.per_device_batch_size, c.sequence_len)
    rng = np.random.default_rng(0)
    feed = Feed(batch_sharding(mesh), c.per_device_batch_size)
    arrays = [np.asarray(rng.integers(0, c.model.vocab_size, shape), np.int32) for _ in range(2)]
    if "starts" in run.engine.batch_arrays:  # documents of a quarter of a row
        places = np.arange(c.sequence_len, dtype=np.int32)
        arrays.append(np.broadcast_to(places - places % max(c.sequence_len // 4, 1), shape).copy())
    return c, run, jax.block_until_ready(tuple(feed.put(arrays)))


def devices_of(run: Assembly) -> list[Any]:
    """Returns the devices of a run's mesh, which has some."""
    assert run.mesh.devices is not None
    return list(run.mesh.devices.flat)


def compiled(c: Config, run: Assembly, batch: Any, xla: dict[str, Any], disk: Claimed) -> tuple[Any, Prediction]:
    """Returns (the compiled step, its prediction), with these options of XLA in place of the run's."""
    devices = devices_of(run)
    lowered = run.train_step().lower(run.plan, *batch)
    step = compile_step(c, run, devices, lowered, xla if devices[0].platform == "gpu" else {})
    return step, print_prediction(c, run, step, devices, disk)


def variants(item: Item, scratch: str, dry: bool) -> Iterator[dict[str, Any]]:
    """Yields measurements of an item's variants, each complete or with an error; then those of a profiled step."""
    kept = None
    for variant in item.variants:
        row: dict[str, Any] = {"name": variant.name}
        try:
            c = config(item, variant.flags, scratch, dry)
            with copying() if variant.copies else contextlib.nullcontext():
                kept = measure(row, c, variant.xla, kept, item.steps)
        except Exception as error:  # XLA's, of one variant
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            kept = None
        yield row
    if item.trace and kept is not None:
        yield {"name": f"{item.variants[-1].name}, profiled", "lines_ms": profiled(kept)}


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Within it, steps are made that copy saved activations into their stacks."""
    in_place = blocks.saves_in_place
    blocks.saves_in_place = lambda engine: False
    try:
        yield
    finally:
        blocks.saves_in_place = in_place


def measure(
    row: dict[str, Any], c: Config, xla: dict[str, Any], kept: Measured | None, steps: tuple[int, int]
) -> Measured:
    """Compiles and times a step, and writes its figures into `row` as they come.

    kept: what the variant before left behind. steps: to warm up, and timed.
    """
    c, run, batch = built(c)
    with claim(run.store) as disk:
        started = time.perf_counter()
        step, predicted = compiled(c, run, batch, xla, disk)
        row["compile_s"] = time.perf_counter() - started
        if predicted.predicted_step_s and predicted.predicted_range_s:
            row["predicted_ms"] = 1e3 * predicted.predicted_step_s
            row["range"] = " to ".join(f"{1e3 * x:,.0f}" for x in predicted.predicted_range_s)
        started = time.perf_counter()
        is_alike = kept is not None and jax.tree.leaves(kept.plan) == jax.tree.leaves(run.plan)
        state = kept.state if kept is not None and is_alike else run.init_state(0)
        jax.block_until_ready(state)
        row["state_s"] = time.perf_counter() - started
        times = []
        warm, timed = steps
        with power() as samples:
            for _ in range(warm + timed):
                started = time.perf_counter()
                state, metrics = step(state, *batch)
                row["loss"] = float(metrics["loss"])
                jax.block_until_ready(state)
                times.append(time.perf_counter() - started)
    row["measured_ms"] = 1e3 * statistics.median(times[warm:])
    row["tokens_per_s"] = batch[0].size / statistics.median(times[warm:])
    row["gpu"] = samples[-1] if samples else "-"
    memory = devices_of(run)[0].memory_stats() or {}
    row["peak_gib"] = memory.get("peak_bytes_in_use", 0) / 2**30
    print(json.dumps(row), flush=True)
    return Measured(run.plan, state, step, batch)


def profiled(measured: Measured) -> dict[str, float]:
    """Profiles one step; returns milliseconds in which each line of the profile, such as a stream, is busy."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(measured.step(measured.state, *measured.batch))
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        busy = {f"{plane.name} {line.name}": busy_ms(line.events) for plane in planes for line in plane.lines}
    return dict(sorted(((name, ms) for name, ms in busy.items() if ms), key=lambda x: -x[1])[:24])


def busy_ms(events: Any) -> float:
    """Milliseconds that events, which may overlap, take together."""
    total, until = 0.0, 0.0
    for start, end in sorted((event.start_ns, event.start_ns + event.duration_ns) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return round(total / 1e6, 3)


@contextlib.contextmanager
def power() -> Iterator[list[str]]:
    """Samples clock and power twice a second while the block runs."""
    samples: list[str] = []
    stop = threading.Event()
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]

    def sample() -> None:
        while not stop.wait(0.5):
            try:
                samples.append(subprocess.run(query, capture_output=True, text=True, timeout=5).stdout.strip())
            except (OSError, subprocess.SubprocessError):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


# -- Others ------------------------------------------------------------------------------------------------------------


def bits(item: Item, scratch: str, dry: bool) -> dict[str, Any]:
    """Compares five steps to the bit: a program with itself, and a resident step with an offloaded one."""

    def losses(flags: str) -> list[list[bytes]]:
        """Bits of loss and norm of five steps, in two runs of one program from one state."""
        c, run, batch = built(config(item, flags, scratch, dry))
        step, _ = compiled(c, run, batch, {}, Claimed())
        curves = []
        for _ in range(2):
            state, curve = run.init_state(0), []
            for _ in range(item.steps[1]):
                state, metrics = step(state, *batch)
                curve.append(np.asarray([metrics["loss"], metrics["grad_norm"]], np.float32).tobytes())
            curves.append(curve)
            jax.block_until_ready(state)
        return curves

    found: dict[str, Any] = {}
    for how in ("overlap", "exact"):
        option = f"--config.xla_options={how}"
        resident, offloaded = losses(option), losses(f"{option} {FIVE}")
        found[how] = {
            "resident equals itself": resident[0] == resident[1],
            "offloaded equals itself": offloaded[0] == offloaded[1],
            "offloaded equals resident": resident[0] == offloaded[0],
        }
        print(how, found[how], flush=True)
    return found


def rates(item: Item, scratch: str, dry: bool) -> dict[str, Any]:
    """TFLOP/s of a 7B block's products and of two others, each for two seconds, by cuBLASLt and by Triton."""
    found: dict[str, Any] = {}
    for m, n, k in [(64, 64, 64)] if dry else SHAPES:
        keys = jax.random.split(jax.random.key(0))
        a, b = jax.random.normal(keys[0], (m, k), jnp.bfloat16), jax.random.normal(keys[1], (k, n), jnp.bfloat16)
        for name, triton in (("cuBLASLt", False), ("Triton", True)):
            options = {} if dry else {"xla_gpu_enable_triton_gemm": triton}
            product = jax.jit(jnp.matmul).lower(a, b).compile(options)
            product(a, b).block_until_ready()
            with power() as samples:
                started, calls = time.perf_counter(), 0
                while time.perf_counter() - started < (0.05 if dry else PRODUCT_S):
                    result = [product(a, b) for _ in range(20)][-1]
                    result.block_until_ready()
                    calls += 20
                rate = 2e-12 * m * n * k * calls / (time.perf_counter() - started)
            found[f"{m} x {n} x {k}, {name}"] = {"tflops": round(rate, 2), "gpu": samples[-1] if samples else "-"}
            print(m, n, k, name, f"{rate:.1f} TFLOP/s", flush=True)
    return found


def generation(item: Item, scratch: str, dry: bool) -> dict[str, Any]:
    """Tokens/s of a model with random weights: of prompts that are read, and of tokens that are written."""
    _, run, _ = built(config(item, "", scratch, dry))
    weights = run.init_state(0).weights
    prompt_tokens, new = (8, 3) if dry else (PROMPT, NEW)
    found: dict[str, Any] = {}
    for batch in BATCHES:
        prompts = [np.arange(prompt_tokens, dtype=np.int32) % run.model.vocab_size] * batch
        for _ in range(2):  # the first one compiles
            times = [time.perf_counter()]
            for tokens, _, _ in sampled(run.model, weights, prompts, max_tokens=new, temperature=0):
                jax.block_until_ready(tokens)
                times.append(time.perf_counter())
        read, written = batch * prompt_tokens / (times[1] - times[0]), batch * (new - 1) / (times[-1] - times[1])
        found[f"{batch} x {prompt_tokens}"] = {"read_tokens_per_s": round(read), "written_tokens_per_s": round(written)}
        print(batch, found[f"{batch} x {prompt_tokens}"], flush=True)
    return found


FUNCTIONS = {"bits": bits, "rates": rates, "generation": generation}


def versions() -> str:
    """The card, and the versions of surojax, jax and the CUDA plugin."""
    kind = jax.devices()[0].device_kind
    return f"{kind}, surojax {surojax.__version__}, jax {jax.__version__}, plugin {cuda_plugin.plugin_version_text()}"


def run_item(item: Item, out: Path, scratch: str, dry: bool) -> None:
    """Measures an item, and writes its results after each variant."""
    item = steps_of(item)
    result: dict[str, Any] = {"versions": versions(), "decides": item.decides}
    if item.function:
        result["result"] = FUNCTIONS[item.function](item, scratch, dry)
        out.write_text(json.dumps(result))
        return
    result["variants"] = []
    for row in variants(item, scratch, dry):
        result["variants"].append(row)
        out.write_text(json.dumps(result))
    if all("error" in row for row in result["variants"]):
        sys.exit("; ".join(row["error"] for row in result["variants"]))


def main() -> None:
    """Measures the item that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("item", choices=BY_NAME)
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--scratch", required=True, help="empty folder on the disk that holds files")
    parser.add_argument("--dry", action="store_true", help="at toy sizes")
    a = parser.parse_args()
    run_item(BY_NAME[a.item], a.out, a.scratch, a.dry)


if __name__ == "__main__":
    main()
