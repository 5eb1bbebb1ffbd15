"""Uses a few minutes of a GPU: measures, in order of value, what a machine without one can only predict.

    python benchmarks/silicon.py --seconds 570 --out DIR [--done FILE] [--only NAME,...] [--dry] [--list]

Items run one at a time, each in a process of its own with a limit of twice its estimate, since one that compiles beside
another that is timed spoils both. The next item is the first whose estimate times 1.3 fits into what is left. After
each of them `silicon.json` and `silicon.md` in DIR are whole: measured beside predicted, versions, card, clock and
power. `--done` takes the silicon.json of an earlier call, whose items are not repeated. `--dry` runs every item on a
CPU at toy sizes, to show that it can run.

A step has random weights and tokens, three steps to warm up and five that count; its prediction is of its own compiled
text and printed before the step runs. Its variants differ in XLA options or settings. State is made once for variants
that place it alike: pinning makes it at 2 GB/s.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
MARGIN = 1.3  # of an estimate, that has to fit into what is left
WARM, TIMED = 3, 5  # steps
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
CONCURRENT = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE,DYNAMIC_SLICE_FUSION",
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
SMALL_GRAPHS = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL"}
TRITON = {"xla_gpu_enable_triton_gemm": True}


class Variant(NamedTuple):
    """A step in a way that is compared with others. flags: of the config. xla: options in place of a run's."""

    name: str
    flags: str = ""
    xla: dict[str, Any] = {}  # noqa: RUF012


class Item(NamedTuple):
    """Something to measure. seconds: estimate. decides: what its result is for.

    Either `flags`, of a config, and `variants` of its step; or a `command`, whose placeholder {out} is a file; or the
    name of a function of this module. dry: flags that a command takes on a CPU; None: it is left out there.
    """

    name: str
    seconds: int
    decides: str
    flags: str = ""
    variants: tuple[Variant, ...] = ()
    command: str = ""
    dry: str | None = ""
    function: str = ""


LLAMA = "--config llama7b --config.gpus=1 --config.per_device_batch_size=4 --config.gradient_accumulation_steps=2"
NORMS = f"{LLAMA} --config.recompute_block=False --config.recompute_norm --config.recompute_swiglu"
FIVE = " ".join(f"--config.offload_{name}" for name in ("residual", "optimizer", "master", "grads", "weights"))
OFFLOADED = f"{LLAMA} --config.per_device_batch_size=8 --config.overlap_update {FIVE}"
LAYERS = "--config.model.num_hidden_layers"
QWEN = (
    "--config llama7b --config.gpus=1 --config.model.hidden_size=1536 --config.model.intermediate_size=8960 "
    f"{LAYERS}=28 --config.model.num_attention_heads=12 --config.model.num_key_value_heads=2 "
    "--config.model.vocab_size=151936 --config.model.tie_word_embeddings=True --config.model.attention_bias=True "
    "--config.sequence_len=1024 --config.master_dtype=bfloat16 --config.recompute_block=False "
    "--config.recompute_norm --config.recompute_swiglu --config.lmhead_chunks=4 --config.per_device_batch_size=32 "
    "--config.gradient_accumulation_steps=4"
)
EXPERTS = (
    f"{LLAMA} {LAYERS}=4 --config.model.num_experts=64 --config.model.num_experts_per_tok=8 "
    "--config.model.moe_intermediate_size=1024 --config.model.hidden_size=2048 --config.model.num_attention_heads=16 "
    "--config.model.num_key_value_heads=16"
)
ITEMS = (
    Item("rates", 50, "the planner's rates, by cuBLASLt and by Triton", function="rates"),
    Item(
        "offloads-8",
        75,
        "whether copies overlap, and with which CUDA graphs",
        f"{OFFLOADED} {LAYERS}=8",
        (
            Variant("no graphs", xla=NO_GRAPHS),
            Variant("small graphs", xla=SMALL_GRAPHS),
            Variant("concurrent graphs", xla=CONCURRENT),
        ),
    ),
    Item(
        "norms-16",
        65,
        "xla_options.PRODUCTS",
        f"{NORMS} {LAYERS}=16",
        (Variant("cuBLASLt"), Variant("Triton", xla=TRITON)),
    ),
    Item("bits", 50, "what xla_options=exact promises", f"{LLAMA} {LAYERS}=2", function="bits"),
    Item(
        "fp8-8",
        45,
        "whether fp8 compiles within 20 s",
        f"{NORMS} {LAYERS}=8 --config.recipe=fp8_hybrid",
        (Variant("cuBLASLt"),),
    ),
    Item("offloads-32", 90, "the product's claim", OFFLOADED, (Variant("no graphs"),)),
    Item("qwen-1.5b", 45, "tokens/s beside LLMQ's", QWEN, (Variant("cuBLASLt"),)),
    Item(
        "kernels",
        45,
        "which kernels are defaults",
        command="-m pallas_kernels.bench --all --sizes llama7b --tokens 8192 --json {out}",
        dry=None,
    ),
    Item("doctor", 60, "rates that plans take", command="-m surojax doctor --rates-file {out}", dry="--only rates"),
    Item("tests", 200, "kernels and steps are right", command="-m pytest -q -m gpu -n 4 --maxfail=30", dry=None),
    Item(
        "attention-4",
        50,
        "price of exact, of our kernel and of packed documents",
        f"{NORMS} {LAYERS}=4",
        (
            Variant("cuDNN"),
            Variant("cuDNN in a fixed order", xla={"xla_gpu_exclude_nondeterministic_ops": True}),
            Variant("mosaic", "--config.attention=mosaic"),
            Variant("packed", "--config.sample_packing"),
        ),
    ),
    Item(
        "microbatches-16",
        100,
        "MFU of 7B",
        f"{NORMS} {LAYERS}=16",
        (
            Variant("8 microbatches", "--config.gradient_accumulation_steps=8"),
            Variant("nothing recomputed", "--config.recompute_norm=False --config.recompute_swiglu=False"),
            Variant("kernels=mosaic", "--config.kernels=mosaic"),
        ),
    ),
    Item(
        "adapters-8b",
        90,
        "LoRA's time",
        f"{LLAMA} --config.lora --config.model.num_key_value_heads=8 --config.model.intermediate_size=14336",
        (Variant("LoRA"), Variant("QLoRA", "--config.qlora_bnb")),
    ),
    Item(
        "experts",
        90,
        "the grouped kernel's time",
        EXPERTS,
        (Variant("grouped"), Variant("loop", "--config.kernels=xla")),
    ),
    Item("kills", 80, "a user's path", command="benchmarks/kills.py --kills 2", dry=None),
)
TOY = (
    "--config.model.hidden_size=64 --config.model.intermediate_size=128 --config.model.num_attention_heads=4 "
    f"{LAYERS}=2 --config.model.num_key_value_heads=4 --config.model.vocab_size=256 --config.sequence_len=32 "
    "--config.per_device_batch_size=2 --config.lmhead_chunks=2 --config.recipe=bf16 --config.kernels=xla "
    "--config.attention=xla"
)


# -- The campaign ------------------------------------------------------------------------------------------------------


def campaign(items: list[Item], out: Path, seconds: float, done: dict[str, Any], dry: bool) -> dict[str, Any]:
    """Runs items until the time is used up; returns {item: {"status", "seconds", and its results}}, with those done."""
    end = time.monotonic() + seconds
    results = dict(done)
    left = [item for item in items if item.name not in done and not (dry and item.command and item.dry is None)]
    while chosen := next((x for x in left if MARGIN * x.seconds <= end - time.monotonic()), None):
        left.remove(chosen)
        print(f"-- {chosen.name}: about {chosen.seconds} s of {end - time.monotonic():.0f}", flush=True)
        results[chosen.name] = in_process(chosen, min(2 * chosen.seconds, end - time.monotonic()), dry)
        write(out, results)
    for item in left:
        print(f"-- {item.name}: not begun, {item.seconds} s", flush=True)
    return results


def in_process(item: Item, limit_s: float, dry: bool) -> dict[str, Any]:
    """Runs an item in a process group that is killed after limit_s; returns its status, seconds and results."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file, errors = Path(folder) / "result.json", Path(folder) / "errors.txt"
        command = [str(Path(__file__)), "--item", item.name, "--out", str(file), *(["--dry"] if dry else [])]
        if item.command:
            command = [*item.command.format(out=file).split(), *(item.dry or "").split() * dry]
        with errors.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment(dry), stderr=said, start_new_session=True
            )
            try:
                status = "ok" if process.wait(limit_s) == 0 else f"exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                status = f"cut off after {limit_s:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result = json.loads(file.read_text()) if file.exists() else {}
        if status != "ok":
            result = {"error": errors.read_text(errors="replace")[-600:]} | as_dict(result)
    return {"status": status, "seconds": round(time.monotonic() - started, 1), **as_dict(result)}


def as_dict(result: Any) -> dict[str, Any]:
    """Returns a result as fields: that of the kernels' benchmark is a list."""
    return result if isinstance(result, dict) else {"result": result}


def environment(dry: bool) -> dict[str, str]:
    """The environment of an item's process: this tree's packages, and a CPU if dry."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | ({"JAX_PLATFORMS": "cpu"} if dry else {})


def write(out: Path, results: dict[str, Any]) -> None:
    """Writes silicon.json and silicon.md, each replaced at once."""
    for name, text in (("silicon.json", json.dumps(results, indent=1)), ("silicon.md", table(results))):
        (out / f".{name}").write_text(text)
        (out / f".{name}").replace(out / name)


def table(results: dict[str, Any]) -> str:
    """The steps that were measured beside their predictions, and the status of every item, in Markdown."""
    columns = "item", "variant", "measured ms", "predicted ms (range)", "ratio", "compiled in s", "GiB", "clock, power"
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for name, result in results.items():
        for row in result.get("variants", []):
            ratio = (
                row["measured_ms"] / row["predicted_ms"] if row.get("predicted_ms") and "measured_ms" in row else None
            )
            cells = [
                name,
                row["name"],
                number(row.get("measured_ms")) or row.get("error", "-"),
                f"{number(row.get('predicted_ms'))} ({row.get('range', '-')})",
                f"{ratio:.3f}" if ratio else "-",
                number(row.get("compile_s")),
                number(row.get("peak_gib")),
                row.get("gpu", "-"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| item | status | seconds | card, versions |", "|---|---|---|---|"]
    lines += [f"| {n} | {r['status']} | {r['seconds']} | {r.get('versions', '-')} |" for n, r in results.items()]
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    """A number with a digit behind the point; "-" for none."""
    return "-" if value is None else f"{value:,.1f}"


# -- Items, each in its process ----------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """The state that a step left behind, to begin the next variant with."""

    plan: Any
    state: Any


def variants(item: Item, dry: bool) -> Iterator[dict[str, Any]]:
    """Yields measurements of an item's variants."""
    kept = None
    for variant in item.variants:
        row: dict[str, Any] = {"name": variant.name}
        try:
            kept = measure(row, f"{item.flags} {variant.flags}", variant.xla, kept, dry)
        except Exception as error:  # XLA's, of one variant
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            kept = None
        yield row


def built(flags: str, dry: bool) -> tuple[Any, Any, tuple[Any, ...]]:
    """Returns (config, assembly, batch of random tokens) of a config's flags."""
    import jax
    import numpy as np

    from surojax.assembly.from_config import from_config
    from surojax.config.flags import parse_flags
    from surojax.parallel.feed import Feed
    from surojax.placement.layout import batch_sharding
    from surojax.placement.mesh import find_devices, make_mesh
    from surojax.planner.run_plan import checked

    c, _ = parse_flags([*flags.split(), *(TOY.split() if dry else [])], argparse.ArgumentParser())
    devices = find_devices(1)
    mesh = make_mesh(devices)
    if not dry:
        from surojax.planner.gpus import gpu_key

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


def compiled(c: Any, run: Any, batch: Any, xla: dict[str, Any]) -> tuple[Any, Any]:
    """Returns (the compiled step, its `Prediction`), with these options of XLA in place of the run's."""
    import jax

    from surojax.memory.nvme import Claimed
    from surojax.training.programs import step_options
    from surojax.training.run_summary import print_prediction

    devices = list(run.mesh.devices.flat)
    options = step_options(c, run, devices) | (xla if devices[0].platform == "gpu" else {})
    step = run.train_step().lower(run.plan, *batch).compile(options)
    assert jax.process_count() == 1
    return step, print_prediction(c, run, step, devices, Claimed())


def measure(row: dict[str, Any], flags: str, xla: dict[str, Any], kept: Measured | None, dry: bool) -> Measured:
    """Compiles and times a step, and writes its figures into `row` as they come. kept: state of a variant before."""
    import jax

    c, run, batch = built(flags, dry)
    started = time.perf_counter()
    step, predicted = compiled(c, run, batch, xla)
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
    with power() as samples:
        for _ in range(WARM + TIMED):
            started = time.perf_counter()
            state, metrics = step(state, *batch)
            row["loss"] = float(metrics["loss"])
            jax.block_until_ready(state)
            times.append(time.perf_counter() - started)
    row["measured_ms"] = 1e3 * statistics.median(times[WARM:])
    row["tokens_per_s"] = batch[0].size / statistics.median(times[WARM:])
    row["gpu"] = samples[-1] if samples else "-"
    statistics_of_memory = run.mesh.devices.flat[0].memory_stats() or {}
    row["peak_gib"] = statistics_of_memory.get("peak_bytes_in_use", 0) / 2**30
    print(json.dumps(row), flush=True)
    return Measured(run.plan, state)


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


def bits(item: Item, dry: bool) -> dict[str, Any]:
    """Compares five steps to the bit: a program with itself, and a resident step with an offloaded one."""
    import jax
    import numpy as np

    def losses(flags: str) -> list[list[bytes]]:
        """Bits of loss and norm of five steps, in two runs of one program from one state."""
        c, run, batch = built(f"{item.flags} {flags}", dry)
        step, _ = compiled(c, run, batch, {})
        curves = []
        for _ in range(2):
            state, curve = run.init_state(0), []
            for _ in range(TIMED):
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


def rates(item: Item, dry: bool) -> dict[str, Any]:
    """TFLOP/s of a 7B block's products and of two others, each for two seconds, by cuBLASLt and by Triton."""
    import jax
    import jax.numpy as jnp

    shapes = [(8192, 11008, 4096), (8192, 4096, 11008), (4096, 11008, 8192), (32768, 8960, 1536), (8192, 8192, 8192)]
    seconds = 0.05 if dry else 2.0
    found: dict[str, Any] = {}
    for m, n, k in [(64, 64, 64)] if dry else shapes:
        keys = jax.random.split(jax.random.key(0))
        a, b = jax.random.normal(keys[0], (m, k), jnp.bfloat16), jax.random.normal(keys[1], (k, n), jnp.bfloat16)
        for name, triton in (("cuBLASLt", False), ("Triton", True)):
            options = {} if dry else {"xla_gpu_enable_triton_gemm": triton}
            product = jax.jit(jnp.matmul).lower(a, b).compile(options)
            product(a, b).block_until_ready()
            with power() as samples:
                started, calls = time.perf_counter(), 0
                while time.perf_counter() - started < seconds:
                    for _ in range(20):
                        result = product(a, b)
                    result.block_until_ready()
                    calls += 20
                rate = 2e-12 * m * n * k * calls / (time.perf_counter() - started)
            found[f"{m} x {n} x {k}, {name}"] = {"tflops": round(rate, 2), "gpu": samples[-1] if samples else "-"}
            print(m, n, k, name, f"{rate:.1f} TFLOP/s", flush=True)
    return found


def versions() -> str:
    """The card, and the versions of jax and of the CUDA plugin."""
    import jax

    from surojax.placement import cuda_plugin

    return f"{jax.devices()[0].device_kind}, jax {jax.__version__}, plugin {cuda_plugin.plugin_version_text()}"


def run_item(item: Item, out: Path, dry: bool) -> None:
    """Measures an item in this process, and writes its results after each variant."""
    result: dict[str, Any] = {"versions": versions(), "decides": item.decides}
    if item.function:
        result["result"] = {"bits": bits, "rates": rates}[item.function](item, dry)
        out.write_text(json.dumps(result))
        return
    result["variants"] = []
    for row in variants(item, dry):
        result["variants"].append(row)
        out.write_text(json.dumps(result))
    if all("error" in row for row in result["variants"]):
        sys.exit("; ".join(row["error"] for row in result["variants"]))


def main() -> None:
    """Runs the campaign, or one of its items."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=570, help="to use (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of silicon.json and silicon.md")
    parser.add_argument("--done", type=Path, help="silicon.json of an earlier call")
    parser.add_argument("--only", help="names of items, separated by commas")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at toy sizes")
    parser.add_argument("--list", action="store_true", help="print the items and exit")
    parser.add_argument("--item", help=argparse.SUPPRESS)
    a = parser.parse_args()
    by_name = {item.name: item for item in ITEMS}
    if a.list:
        print("| item | seconds | decides |", "|---|---|---|", sep="\n")
        print("\n".join(f"| {x.name} | {x.seconds} | {x.decides} |" for x in ITEMS))
        return
    if not a.out:
        parser.error("--out: expected a folder, got none")
    if a.item:
        run_item(by_name[a.item], a.out, a.dry)
        return
    names = a.only.split(",") if a.only else []
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"--only: expected names of {', '.join(map(repr, by_name))}, got {unknown[0]!r}")
    a.out.mkdir(parents=True, exist_ok=True)
    done = json.loads(a.done.read_text()) if a.done else {}
    finished = {name: result for name, result in done.items() if result["status"] == "ok"}
    results = campaign([by_name[x] for x in names] or list(ITEMS), a.out, a.seconds, finished, a.dry)
    print(table(results))


if __name__ == "__main__":
    main()
