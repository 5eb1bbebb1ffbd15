"""Training in 8 and 4 bits against 16: the same model, data and seeds under each recipe and optimizer, 300 steps.

    python benchmarks/recipes.py [--only NAME ...] [--config.FIELD=VALUE ...]

A Llama of 10M parameters learns the built-in corpus, byte by byte; `get_config` is what all runs share, and flags
change it. Each run is `surojax.train` in a folder of its own under output_dir. A finished run leaves `NAME.json` there,
which later calls take instead of training again, so that runs can be made one at a time; an interrupted one goes on
from its last checkpoint. Printed, as Markdown, for the runs that there are: final evaluation loss (nats per token on
held-out files) beside that of the baseline and the limit, and the curves. With matplotlib, `curves.svg` as well. Exit
code 1: a limit is exceeded.

On a CPU the 8- and 4-bit products are emulated: their numbers are those of a GPU, their speed is not.
"""

import argparse
import json
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from surojax.checks import check_output_dir
from surojax.config import Config, default_config, flat, no_field
from surojax.errors import CheckpointError, ConfigError
from surojax.flags import parse
from surojax.metrics import METRICS_FILE, NonFiniteLoss, read_metrics
from surojax.train import train

BASELINE = "bf16"
EVERY = 25  # steps between the points of a curve; a point is the mean training loss since the one before


class Setting(NamedTuple):
    """A run: fields that differ from the baseline's, and how far above it the final loss may be, in percent."""

    fields: dict[str, Any]
    limit: float | None = None


SETTINGS: dict[str, Setting] = {
    BASELINE: Setting({}),  # bfloat16 products, AdamW with float32 moments
    "float32": Setting({"model_dtype": "float32"}),  # without limit: how far rounding alone moves a run's end
    "fp8_hybrid": Setting({"recipe": "fp8_hybrid"}, 1.0),
    "fp8_current": Setting({"recipe": "fp8_current"}, 1.0),
    "mxfp8": Setting({"recipe": "mxfp8"}, 1.0),
    "nvfp4": Setting({"recipe": "nvfp4"}, 4.0),
    "adamw8bit": Setting({"optimizer": "adamw8bit"}, 0.5),
}


def get_config() -> Config:
    c = default_config()
    c.output_dir = "runs/recipes"
    c.model.vocab_size = 320  # 256 bytes, the end of a document, and room to a multiple of 64
    c.model.hidden_size = 320
    c.model.intermediate_size = 864
    c.model.num_hidden_layers = 8
    c.model.num_attention_heads = 5
    c.model.num_key_value_heads = 5
    c.sequence_len = 128
    c.per_device_batch_size = 4
    c.recompute_block = False  # memory is no matter here
    c.max_steps = 300
    c.eval_steps = 0  # at the end only
    c.eval_batches = 80  # 40,960 tokens
    c.save_steps = 100
    c.save_total_limit = 1
    c.sample_tokens = 0
    c.learning_rate = 2e-3
    c.warmup_steps = 30
    return c


def config_of(name: str, shared: Config) -> Config:
    """The shared config with the setting's fields. Raises ConfigError where this version has no such field."""
    c = shared.copy_and_resolve_references()
    for field, value in SETTINGS[name].fields.items():
        if field not in c:
            raise ConfigError(no_field(field))
        c[field] = value
    c.output_dir = str(Path(shared.output_dir) / name)
    return c


def result_of(name: str, shared: Config) -> dict[str, Any]:
    """The result of a setting, from its file or from a run that is made now.

    Raises ConfigError when the file is of a run with other settings; exits when the run is stopped.
    """
    c = config_of(name, shared)
    fields = {k: v for k, v in flat(c).items() if k != "output_dir"}
    file = Path(shared.output_dir) / f"{name}.json"
    if not file.exists():
        print(f"\n=== {name}: {SETTINGS[name].fields or 'the baseline'}", flush=True)
        if not train(c).finished:
            sys.exit(130)
        found = summary(read_metrics(Path(c.output_dir) / METRICS_FILE))
        file.write_text(json.dumps(found | {"config": fields}, indent=1) + "\n")
    found = json.loads(file.read_text())
    changed = [k for k in fields.keys() | found["config"].keys() if fields.get(k) != found["config"].get(k)]
    if changed:
        raise ConfigError(
            f"output_dir: expected runs with the same settings, got {file} with other {', '.join(sorted(changed))}; "
            f"delete it and {file.with_suffix('')}, or choose another output_dir"
        )
    return found


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Final evaluation loss, seconds of a step (median), and the curves, from the records of a whole run."""
    steps = [r for r in records if r["log"] == "step"]
    evals = [r for r in records if r["log"] == "eval"]
    windows = [steps[i : i + EVERY] for i in range(0, len(steps), EVERY)]
    return {
        "eval_loss": evals[-1]["loss"],
        "evals": {r["step"]: r["loss"] for r in evals},
        "step_s": statistics.median(r["duration_ms"] for r in steps) / 1e3,
        "curve": {w[-1]["step"]: statistics.fmean(r["loss"] for r in w) for w in windows},
    }


def table(results: dict[str, dict[str, Any]]) -> tuple[str, bool]:
    """The comparison in Markdown, and whether every limit holds."""
    lines = ["| run | evaluation loss | against bf16 | limit | | s per step |", "|---|---|---|---|---|---|"]
    base, good = results.get(BASELINE), True
    for name, result in results.items():
        limit, row = SETTINGS[name].limit, [name, f"{result['eval_loss']:.4f}", "", "", ""]
        if base and name != BASELINE:
            difference = 100 * (result["eval_loss"] / base["eval_loss"] - 1)
            row[2] = f"{difference:+.2f} %"
            if limit is not None:
                row[3:] = f"{limit:g} %", "pass" if difference <= limit else "FAIL"
                good = good and difference <= limit
        lines.append(f"| {' | '.join([*row, f'{result["step_s"]:.2f}'])} |")
    return "\n".join(lines), good


def curves(results: dict[str, dict[str, Any]]) -> str:
    """Training loss, the mean of `EVERY` steps up to each, in Markdown."""
    steps = sorted({step for result in results.values() for step in result["curve"]}, key=int)
    lines = [f"| step | {' | '.join(results)} |", "|---" * (len(results) + 1) + "|"]
    for step in steps:
        values = (r["curve"].get(step) for r in results.values())
        lines.append(f"| {step} | {' | '.join('' if v is None else f'{v:.4f}' for v in values)} |")
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, result in results.items():
        axes.plot([int(step) for step in result["curve"]], list(result["curve"].values()), label=name)
    axes.set(xlabel="step", ylabel="training loss (nats per byte)", yscale="log")
    axes.legend()
    figure.savefig(file)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="the runs to make")
    if not any(arg.partition("=")[0] == "--config" for arg in argv):
        argv = ["--config", __file__, *argv]
    try:
        shared, args = parse(argv, parser)
        folder = check_output_dir(shared.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.only:
            result_of(name, shared)
        results = {name: result_of(name, shared) for name in SETTINGS if (folder / f"{name}.json").exists()}
    except (ConfigError, CheckpointError, NonFiniteLoss) as error:
        sys.exit(f"recipes: error: {error}")
    text, good = table(results)
    print(f"\n{text}\n\nTraining loss, mean of {EVERY} steps:\n\n{curves(results)}")
    if find_spec("matplotlib"):
        plot(results, folder / "curves.svg")
    sys.exit(not good)


if __name__ == "__main__":
    main()
