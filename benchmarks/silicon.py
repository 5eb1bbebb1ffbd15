"""Uses a few minutes of a GPU: measures, in order of value, what a machine without one can only predict.

    python benchmarks/silicon.py --seconds 570 --out DIR [--done FILE] [--only NAME,...] [--plugin DIR] [--dry] [--list]

Items run one at a time, each in a process of its own (silicon_items.py) with a limit of twice its estimate, since one
that compiles beside another that is timed spoils both. The next item is the first whose estimate times 1.3 fits into
what is left. After each of them `silicon.json` and `silicon.md` in DIR are whole: measured beside predicted, versions,
card, clock and power. `--done` takes the silicon.json of an earlier call, whose items are not repeated. `--dry` runs
every item on a CPU at toy sizes, to show that it can run.

`--plugin` is a folder with a newer CUDA plugin than the machine's, by `pip install --no-deps --target DIR
jax-cuda13-pjrt==0.12.0.1`: items whose names end with `-plugin` run with it.

A call that is ended (Ctrl-C, SIGTERM) ends its item too; what was measured before is in the files.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
MARGIN = 1.3  # of an estimate, that has to fit into what is left
DRY_S = 900.0  # limit of an item on a CPU
LOG = 1 << 16  # bytes of an item's log that are kept


class Variant(NamedTuple):
    """A step in a way that is compared with others. flags: of the config. xla: options in place of a run's.

    copies: saved activations are copied into their stacks, where products would write them (step/in_place.py).
    """

    name: str
    flags: str = ""
    xla: dict[str, Any] = {}  # noqa: RUF012
    copies: bool = False


class Item(NamedTuple):
    """Something to measure. seconds: estimate. decides: what its result is for.

    Either `flags`, of a config, and `variants` of its step; or a `command`, in which {out} is its results' file,
    {folder} the campaign's; or the name of a `function` of silicon_items.py. dry: the command on a CPU.
    steps: to warm up, and timed. trace: profile a step after all variants. log: environment in which the item's log is
    worth keeping. plugin: runs with the plugin of --plugin. toy: flags of the config on a CPU, besides TOY.
    """

    name: str
    seconds: int
    decides: str
    flags: str = ""
    variants: tuple[Variant, ...] = ()
    command: str = ""
    dry: str = ""
    function: str = ""
    steps: tuple[int, int] = (3, 5)
    trace: bool = False
    log: dict[str, str] = {}  # noqa: RUF012
    plugin: bool = False
    toy: str = ""


TRITON = {"xla_gpu_enable_triton_gemm": True}
VERIFIED = {"xla_gpu_experimental_dynamic_slice_fusion_verify_offsets": True}
LLAMA = "--config llama7b --config.gpus=1 --config.per_device_batch_size=4 --config.gradient_accumulation_steps=2"
NORMS = f"{LLAMA} --config.recompute_block=False --config.recompute_norm --config.recompute_swiglu"
FIVE = " ".join(f"--config.offload_{name}" for name in ("residual", "optimizer", "master", "grads", "weights"))
OFFLOADED = (
    f"{LLAMA} --config.per_device_batch_size=8 --config.gradient_accumulation_steps=1 --config.overlap_update {FIVE}"
)
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
            Variant("concurrent graphs", "--config.cuda_graphs=concurrent"),
            Variant("small graphs", "--config.cuda_graphs=small"),
            Variant("no graphs, offsets verified", "--config.cuda_graphs=none", VERIFIED),
            Variant("no graphs", "--config.cuda_graphs=none"),
        ),
        trace=True,
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
    Item("offloads-32", 90, "the product's claim", OFFLOADED, (Variant("no graphs", "--config.cuda_graphs=none"),)),
    Item("qwen-1.5b", 45, "tokens/s beside LLMQ's", QWEN, (Variant("cuBLASLt"),)),
    Item(
        "kernels",
        45,
        "which kernels are defaults",
        command="-m pallas_kernels.bench --all --sizes llama7b --tokens 8192 --json {out}",
        dry="-m pallas_kernels.bench rope --implementation xla --sizes gpt2 --tokens 128 --repeat 1 --json {out}",
    ),
    Item("offloads-8-plugin", 75, "the same by XLA of 0.12", plugin=True),
    Item("norms-16-plugin", 65, "the same by XLA of 0.12", plugin=True),
    Item("offloads-32-plugin", 90, "the product's claim, by XLA of 0.12", plugin=True),
    Item(
        "tests",
        200,
        "kernels and steps are right",
        command="-m pytest -q -m gpu -n 4 --maxfail=30 -p no:cacheprovider",
        dry="-m pytest -q -m gpu -n 0 --collect-only -p no:cacheprovider tests/test_on_gpu.py",
    ),
    Item(
        "fp8-triton",
        120,
        "where the time goes that fp8_hybrid takes to compile with Triton's products",
        f"{NORMS} {LAYERS}=8 --config.recipe=fp8_hybrid",
        (Variant("Triton", xla=TRITON),),
        log={"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "autotuner=1,gemm_fusion_autotuner=1,gpu_compiler=1"},
    ),
    Item(
        "microbatches-16",
        120,
        "MFU of 7B, and whether products write saved activations",
        f"{NORMS} {LAYERS}=16",
        (
            Variant("8 microbatches", "--config.gradient_accumulation_steps=8"),
            Variant("the same, saved activations copied", "--config.gradient_accumulation_steps=8", copies=True),
            Variant("nothing recomputed", "--config.recompute_norm=False --config.recompute_swiglu=False"),
            Variant("kernels=mosaic", "--config.kernels=mosaic"),
        ),
    ),
    Item(
        "attention-4",
        50,
        "price of exact, of our kernel, of long rows, documents and wide heads",
        f"{NORMS} {LAYERS}=4",
        (
            Variant("cuDNN"),
            Variant("cuDNN in a fixed order", xla={"xla_gpu_exclude_nondeterministic_ops": True}),
            Variant("mosaic", "--config.attention=mosaic"),
            Variant("packed", "--config.sample_packing"),
            Variant("packed, by our kernel", "--config.sample_packing --config.attention=mosaic"),
            Variant("8,192 tokens", "--config.sequence_len=8192 --config.per_device_batch_size=1"),
            Variant("a window of 512", "--config.model.sliding_window=512"),
            Variant("16 heads of 256", "--config.model.num_attention_heads=16 --config.model.num_key_value_heads=16"),
        ),
    ),
    Item(
        "doctor",
        60,
        "rates that plans take, and what works",
        command="-m surojax doctor --json {out} --output {folder}/doctor.md --rates-file {folder}/rates.json",
        dry="-m surojax doctor --only installation,rates --json {out} --output {folder}/doctor.md --rates-file=",
    ),
    Item(
        "kills",
        80,
        "a user's path: killed and resumed by the command line",
        command="benchmarks/kills.py --kills 2",
        dry="benchmarks/kills.py --kills 1 --steps 30",
    ),
    Item(
        "generate",
        40,
        "tokens/s of a 1B model, read and written",
        f"{LLAMA} {LAYERS}=16 --config.model.hidden_size=2048 --config.model.intermediate_size=8192 "
        "--config.model.num_attention_heads=16 --config.model.num_key_value_heads=8",
        function="generation",
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
        toy="--config.model.num_experts=4 --config.model.num_experts_per_tok=2 --config.model.moe_intermediate_size=32",
    ),
    Item(
        "files-4",
        90,
        "state in files on the machine's disk",
        f"{LLAMA} {LAYERS}=4 --config.offload_optimizer=nvme --config.offload_master=nvme --config.offload_grads "
        "--config.nvme_path={scratch}",
        (Variant("optimizer and master"),),
        steps=(1, 2),
    ),
)
OF_PLUGIN = "-plugin"
TOY = (
    "--config.model.hidden_size=64 --config.model.intermediate_size=128 --config.model.num_attention_heads=4 "
    f"{LAYERS}=2 --config.model.num_key_value_heads=4 --config.model.vocab_size=256 --config.sequence_len=32 "
    "--config.per_device_batch_size=2 --config.lmhead_chunks=2 --config.kernels=xla "
    "--config.attention=xla"
)
BY_NAME = {item.name: item for item in ITEMS}


# -- The campaign ------------------------------------------------------------------------------------------------------


def steps_of(item: Item) -> Item:
    """An item with the steps that it measures: those of the item without "-plugin", if its name has that."""
    if not item.plugin:
        return item
    like = BY_NAME[item.name.removesuffix(OF_PLUGIN)]
    return item._replace(flags=like.flags, variants=like.variants, steps=like.steps, trace=like.trace)


def next_item(left: Sequence[Item], seconds: float) -> Item | None:
    """The first item whose estimate, with a margin, fits into so many seconds; None if none does."""
    return next((item for item in left if MARGIN * item.seconds <= seconds), None)


def campaign(
    items: Sequence[Item], out: Path, seconds: float, done: dict[str, Any], dry: bool = False, plugin: str = ""
) -> dict[str, Any]:
    """Runs items until the time is used up; returns {item: {"status", "seconds", and its results}}, with those done.

    Items that `done` has with the status "ok" are not repeated. plugin: folder of a newer CUDA plugin; without one the
    items that need it are left out, except on a CPU.
    """
    end = time.monotonic() + seconds
    results = dict(done)
    left = [item for item in items if done.get(item.name, {}).get("status") != "ok"]
    if not plugin and not dry and (without := [item for item in left if item.plugin]):
        print(f"-- left out, since --plugin names no folder: {', '.join(item.name for item in without)}", flush=True)
        left = [item for item in left if not item.plugin]
    while chosen := next_item(left, end - time.monotonic()):
        left.remove(chosen)
        print(f"-- {chosen.name}: about {chosen.seconds} s of {end - time.monotonic():.0f}", flush=True)
        limit_s = min(DRY_S if dry else 2 * chosen.seconds, end - time.monotonic())
        results[chosen.name] = in_process(chosen, limit_s, out, dry, plugin)
        write(out, results)
    for item in left:
        print(f"-- {item.name}: not begun, {item.seconds} s", flush=True)
    return results


def command_of(item: Item, file: Path, out: Path, scratch: str, dry: bool) -> list[str]:
    """The arguments of Python that measure an item.

    file: of its results. out: the campaign's folder. scratch: a folder on its disk.
    """
    if item.command:
        return [word.format(out=file, folder=out) for word in (item.dry if dry else item.command).split()]
    script = str(Path(__file__).with_name("silicon_items.py"))
    return [script, item.name, "--out", str(file), "--scratch", scratch, *["--dry"] * dry]


def in_process(item: Item, limit_s: float, out: Path, dry: bool = False, plugin: str = "") -> dict[str, Any]:
    """Runs an item in a process group that is killed after limit_s; returns its status, seconds and results."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=out, prefix=".files") as scratch:
        file, errors = Path(folder) / "result.json", Path(folder) / "errors.txt"
        with errors.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, *command_of(item, file, out, scratch, dry)],
                cwd=ROOT,
                env=environment(item, dry, plugin),
                stderr=said,
                start_new_session=True,
            )
            try:
                status = "ok" if process.wait(limit_s) == 0 else f"exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                status = f"cut off after {limit_s:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result = read_result(file)
        log = errors.read_text(errors="replace")
    if item.log:
        (out / f"{item.name}.log").write_text(log[-LOG:])
    if status != "ok":
        result = {"error": log[-600:]} | result
    elif failed := [row["name"] for row in result.get("variants", []) if "error" in row]:
        status = f"failed: {', '.join(failed)}"
    return {"status": status, "seconds": round(time.monotonic() - started, 1), **result}


def read_result(file: Path) -> dict[str, Any]:
    """Returns what an item wrote, as fields; none if it was killed before that. The kernels' benchmark has a list."""
    try:
        result = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {"result": result}


def environment(item: Item, dry: bool, plugin: str) -> dict[str, str]:
    """The environment of an item's process: this tree's packages, a newer plugin before the machine's, a CPU if dry."""
    folders = [plugin] * item.plugin + [str(ROOT), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | item.log
    return os.environ | own | ({"JAX_PLATFORMS": "cpu"} if dry else {})


def write(out: Path, results: dict[str, Any]) -> None:
    """Writes silicon.json and silicon.md, each replaced at once."""
    for name, text in (("silicon.json", json.dumps(results, indent=1)), ("silicon.md", table(results))):
        (out / f".{name}").write_text(text)
        (out / f".{name}").replace(out / name)


def table(results: dict[str, Any]) -> str:
    """The steps that were measured beside their predictions, and the status of every item, in Markdown."""
    columns = "item", "variant", "measured ms", "predicted ms (range)", "ratio", "compiled in s", "GiB", "clock, power"
    lines = [row(columns), f"|{'---|' * len(columns)}"]
    for name, result in results.items():
        for x in result.get("variants", []):
            measured, predicted = x.get("measured_ms"), x.get("predicted_ms")
            ratio = f"{measured / predicted:.3f}" if measured and predicted else "-"
            time_or_error = x["error"] if "error" in x else number(measured)
            range_text = f"{number(predicted)} ({x.get('range', '-')})"
            sizes = number(x.get("compile_s")), number(x.get("peak_gib"))
            lines.append(row((name, x["name"], time_or_error, range_text, ratio, *sizes, x.get("gpu", "-"))))
    lines += ["", row(("item", "status", "seconds", "card, versions")), "|---|---|---|---|"]
    lines += [row((n, r["status"], f"{r['seconds']:.1f}", r.get("versions", "-"))) for n, r in results.items()]
    return "\n".join(lines) + "\n"


def row(cells: Sequence[str]) -> str:
    """Cells as a row of a table in Markdown."""
    return f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"


def number(value: float | None) -> str:
    """A number with a digit behind the point; "-" for none."""
    return "-" if value is None else f"{value:,.1f}"


def items_table() -> str:
    """The items with their estimates, in their order, in Markdown."""
    lines = [row(("item", "seconds", "decides", "measures")), "|---|---|---|---|"]
    for item in ITEMS:
        variants = "; ".join(variant.name for variant in steps_of(item).variants)
        what = variants or (f"`python {item.command}`" if item.command else item.function)
        lines.append(row((item.name, str(item.seconds), item.decides, what)))
    return "\n".join(lines)


def read_done(file: Path) -> dict[str, Any]:
    """Reads the silicon.json of an earlier call. Raises ValueError for another file, OSError if it cannot be read."""
    done = json.loads(file.read_text())
    if not isinstance(done, dict) or not all(isinstance(x, dict) and "status" in x for x in done.values()):
        raise ValueError("no silicon.json")
    return done


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the command line. Ends the program with exit code 2 and one line if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=570, help="to use (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of silicon.json and silicon.md")
    parser.add_argument("--done", type=Path, help="silicon.json of an earlier call")
    parser.add_argument("--only", help="names of items, separated by commas")
    parser.add_argument("--plugin", default="", metavar="DIR", help="folder of a newer CUDA plugin")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at toy sizes")
    parser.add_argument("--list", action="store_true", help="print the items and exit")
    a = parser.parse_args(argv)
    if a.list:
        return a
    if not a.out:
        parser.error("--out: expected a folder, got none")
    if a.out.exists() and not a.out.is_dir():
        parser.error(f"--out: expected a folder, got the file {str(a.out)!r}")
    if not 0 < a.seconds < 1e6:
        parser.error(f"--seconds: expected more than 0, got {a.seconds:g}")
    if a.plugin and not (Path(a.plugin) / "jax_plugins").is_dir():
        parser.error(f"--plugin: expected a folder with jax_plugins, got {a.plugin!r}")
    a.only = list(dict.fromkeys(a.only.split(","))) if a.only else list(BY_NAME)
    if unknown := [name for name in a.only if name not in BY_NAME]:
        parser.error(f"--only: expected names of {', '.join(map(repr, BY_NAME))}, got {unknown[0]!r}")
    try:
        a.done = read_done(a.done) if a.done else {}
    except (OSError, ValueError) as error:
        parser.error(f"--done: expected the silicon.json of an earlier call, got {str(a.done)!r} ({error})")
    return a


def main(argv: list[str] | None = None) -> None:
    """Runs the campaign."""
    a = parse_arguments(argv)
    if a.list:
        print(items_table())
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the item ends as well
    a.out.mkdir(parents=True, exist_ok=True)
    out = a.out.absolute()
    print(table(campaign([BY_NAME[x] for x in a.only], out, a.seconds, a.done, a.dry, a.plugin)))


if __name__ == "__main__":
    main()
