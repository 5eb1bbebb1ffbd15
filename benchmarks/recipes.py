"""Compares training in 8 and 4 bits with training in 16: one model, trained for 300 steps with each recipe.

    python benchmarks/recipes.py [--only NAME ...] [--seeds SEED ...] [--config.FIELD=VALUE ...]

A Llama of 10M parameters learns the built-in corpus, byte by byte. `get_config` has the fields that all runs share;
flags change them. Each setting (recipe, optimizer or dtype) and seed (initial weights and order of the data) is one
`surojax.train` in its own folder under output_dir. A finished run writes `NAME-SEED.json` there, and later calls read
that file instead of training again, so the runs can be made one at a time. An interrupted run continues from its last
checkpoint.

Printed as Markdown, for all finished runs: the final evaluation loss (nats per token on held-out files); its difference
from the baseline with the same seed, as the mean over the seeds with the standard error; the limit of that difference;
and the training curves. If matplotlib is installed, `curves.svg` is written too. Exit code 1: the magnitude of a mean
difference exceeds its limit.

On a CPU the 8-bit and 4-bit products are emulated: results are those of a GPU, speed is not.
"""

import argparse
import json
import math
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from surojax.config.checks import check_output_dir
from surojax.config.fields import Config, default_config, flat, no_field
from surojax.config.flags import parse_flags
from surojax.errors import CheckpointError, ConfigError
from surojax.run.metrics import METRICS_FILE, read_metrics
from surojax.run.nonfinite import NonFiniteLoss
from surojax.train import train

BASELINE = "bf16"
type Result = dict[str, Any]  # the `summary` of a run, and its config
EVERY = 25  # steps per point of a curve; a point is the mean training loss of these steps


class Setting(NamedTuple):
    """A setting to compare with the baseline."""

    fields: dict[str, Any]  # fields that differ from the baseline's
    limit: float | None = None  # largest difference of the final loss, in percent; None: no limit


SETTINGS: dict[str, Setting] = {
    BASELINE: Setting({}),  # bfloat16 products, AdamW with float32 moments
    "float32": Setting({"model_dtype": "float32"}),  # no limit: shows the effect of rounding alone
    "fp8_hybrid": Setting({"recipe": "fp8_hybrid"}, 1.0),
    "fp8_current": Setting({"recipe": "fp8_current"}, 1.0),
    "mxfp8": Setting({"recipe": "mxfp8"}, 1.0),
    "nvfp4": Setting({"recipe": "nvfp4"}, 4.0),
    "adamw8bit": Setting({"optimizer": "adamw8bit"}, 0.5),
}


def get_config() -> Config:
    """Returns the config that all runs share."""
    c = default_config()
    c.output_dir = "runs/recipes"
    c.data = "stdlib"
    c.model.vocab_size = 320  # 256 bytes and the end of a document, padded to a multiple of 64
    c.model.hidden_size = 320
    c.model.intermediate_size = 864
    c.model.num_hidden_layers = 8
    c.model.num_attention_heads = 5
    c.model.num_key_value_heads = 5
    c.sequence_len = 128
    c.per_device_batch_size = 4
    c.recompute_block = False  # the model is small, so memory is not scarce
    c.max_steps = 300
    c.eval_steps = 0  # only at the end
    c.eval_batches = 80  # 40,960 tokens
    c.save_steps = 100
    c.save_total_limit = 1
    c.sample_tokens = 0
    c.learning_rate = 5e-4  # at 1e-3 and 2e-3, the final loss varies several times more by chance
    c.warmup_steps = 60
    return c


def config_of(name: str, seed: int, shared: Config) -> Config:
    """Returns the shared config with the fields of a setting. Raises ConfigError if a field does not exist."""
    c = shared.copy_and_resolve_references()
    for field, value in SETTINGS[name].fields.items():
        if field not in c:
            raise ConfigError(no_field(field, c.to_dict()))
        c[field] = value
    c.seed = seed
    c.output_dir = str(Path(shared.output_dir) / f"{name}-{seed}")
    return c


def file_of(name: str, seed: int, shared: Config) -> Path:
    """Returns the path of a run's result."""
    return Path(shared.output_dir) / f"{name}-{seed}.json"


def result_of(name: str, seed: int, shared: Config) -> Result:
    """Returns the result of a run. If its file does not exist, trains first.

    Raises ConfigError if the file was written by a run with other settings. Exits if the run is stopped.
    """
    c = config_of(name, seed, shared)
    fields = {k: v for k, v in flat(c).items() if k != "output_dir"}
    file = file_of(name, seed, shared)
    if not file.exists():
        print(f"\n=== {name}, seed {seed}: {SETTINGS[name].fields or 'the baseline'}", flush=True)
        if not train(c).finished:
            sys.exit(130)
        result = summary(read_metrics(Path(c.output_dir) / METRICS_FILE))
        file.write_text(json.dumps(result | {"config": fields}, indent=1) + "\n")
    result = json.loads(file.read_text())
    changed = [k for k in fields.keys() | result["config"].keys() if fields.get(k) != result["config"].get(k)]
    if changed:
        raise ConfigError(
            f"output_dir: expected runs with the same settings, got {file} with other {', '.join(sorted(changed))}; "
            f"delete it and {file.with_suffix('')}, or choose another output_dir"
        )
    return result


def summary(records: list[dict[str, Any]]) -> Result:
    """Returns the final evaluation loss, the median seconds per step, and the curves of a finished run."""
    steps = [r for r in records if r["log"] == "step"]
    evals = [r for r in records if r["log"] == "eval"]
    windows = [steps[i : i + EVERY] for i in range(0, len(steps), EVERY)]
    return {
        "eval_loss": evals[-1]["loss"],
        "evals": {r["step"]: r["loss"] for r in evals},
        "step_s": statistics.median(r["duration_ms"] for r in steps) / 1e3,
        "curve": {w[-1]["step"]: statistics.fmean(r["loss"] for r in w) for w in windows},
    }


def difference(results: dict[int, Result], base: dict[int, Result]) -> tuple[float, float | None]:
    """Returns (mean, standard error) of the difference of the final loss from `base`, in percent.

    Both are over the seeds that `results` and `base` have in common; the standard error is None if there is only one.
    """
    percents = [100 * (r["eval_loss"] / base[seed]["eval_loss"] - 1) for seed, r in results.items() if seed in base]
    error = statistics.stdev(percents) / len(percents) ** 0.5 if len(percents) > 1 else None
    return statistics.fmean(percents) if percents else math.nan, error


def table(results: dict[str, dict[int, Result]]) -> tuple[str, bool]:
    """Returns the comparison in Markdown, and whether every limit holds."""
    lines = ["| run | seeds | evaluation loss | against bf16 | limit | | s per step |", "|---|---|---|---|---|---|---|"]
    base = results.get(BASELINE, {})
    all_hold = True
    for name, by_seed in results.items():
        eval_loss = statistics.fmean(r["eval_loss"] for r in by_seed.values())
        step_s = statistics.fmean(r["step_s"] for r in by_seed.values())
        against = limit_cell = verdict = ""
        limit = SETTINGS[name].limit
        if name != BASELINE and base.keys() & by_seed.keys():
            mean, error = difference(by_seed, base)
            against = f"{mean:+.2f} %" + ("" if error is None else f" ± {error:.2f}")
            if limit is not None:
                holds = abs(mean) <= limit
                limit_cell = f"{limit:g} %"
                verdict = "pass" if holds else "FAIL"
                all_hold = all_hold and holds
        cells = [name, str(len(by_seed)), f"{eval_loss:.4f}", against, limit_cell, verdict, f"{step_s:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines), all_hold


def mean_curves(results: dict[str, dict[int, Result]]) -> dict[str, dict[int, float]]:
    """Returns {name: {step: training loss}}, each the mean of the last `EVERY` steps and over all seeds."""
    return {
        name: {
            int(step): statistics.fmean(r["curve"][step] for r in by_seed.values())
            for step in next(iter(by_seed.values()))["curve"]
        }
        for name, by_seed in results.items()
    }


def curves(results: dict[str, dict[int, Result]]) -> str:
    """Returns `mean_curves` as a Markdown table."""
    mean = mean_curves(results)
    lines = [f"| step | {' | '.join(mean)} |", "|---" * (len(mean) + 1) + "|"]
    for step in sorted({step for curve in mean.values() for step in curve}):
        values = (curve.get(step) for curve in mean.values())
        lines.append(f"| {step} | {' | '.join('' if v is None else f'{v:.4f}' for v in values)} |")
    return "\n".join(lines)


def plot(results: dict[str, dict[int, Result]], file: Path) -> None:
    """Draws `mean_curves` with matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, curve in mean_curves(results).items():
        axes.plot(list(curve), list(curve.values()), label=name)
    axes.set(xlabel="step", ylabel="training loss (nats per byte)", yscale="log")
    axes.legend()
    figure.savefig(file)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, train the runs that are missing, and print the comparison."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="the settings to run")
    parser.add_argument("--seeds", nargs="+", type=int, help="the seeds to run each with (default: that of the config)")
    if not any(arg.partition("=")[0] == "--config" for arg in argv):
        argv = ["--config", __file__, *argv]
    try:
        shared, args = parse_flags(argv, parser)
        folder = check_output_dir(shared.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        seeds = args.seeds or [shared.seed]
        for seed in seeds:
            for name in args.only:
                result_of(name, seed, shared)
        results: dict[str, dict[int, Result]] = {}
        for name in SETTINGS:
            finished = [seed for seed in seeds if file_of(name, seed, shared).exists()]
            if finished:
                results[name] = {seed: result_of(name, seed, shared) for seed in finished}
    except (ConfigError, CheckpointError, NonFiniteLoss) as error:
        sys.exit(f"recipes: error: {error}")
    text, all_hold = table(results)
    print(f"\n{text}\n\nTraining loss, mean of {EVERY} steps:\n\n{curves(results)}")
    if find_spec("matplotlib"):
        plot(results, folder / "curves.svg")
    sys.exit(not all_hold)


if __name__ == "__main__":
    main()
