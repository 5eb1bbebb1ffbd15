"""Training in 8 and 4 bits against 16: the same model, data and seeds under each recipe and optimizer, 300 steps.

    python benchmarks/recipes.py [--only NAME ...] [--seeds SEED ...] [--config.FIELD=VALUE ...]

A Llama of 10M parameters learns the built-in corpus, byte by byte; `get_config` is what all runs share, and flags
change it. Each setting and seed (initial weights and order of the data) is a `surojax.train` in a folder of its own
under output_dir. A finished run leaves `NAME-SEED.json` there, which later calls take instead of training again, so
that runs can be made one at a time; an interrupted one goes on from its last checkpoint. Printed, as Markdown, for the
runs that there are: final evaluation loss (nats per token on held-out files), its difference from the baseline's of the
same seed, as the mean over seeds with the standard error, beside the limit; and the curves. With matplotlib,
`curves.svg` as well. Exit code 1: a limit is exceeded by the magnitude of a mean.

On a CPU the 8- and 4-bit products are emulated: their numbers are those of a GPU, their speed is not.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from surojax.config.checks import check_output_dir
from surojax.config.fields import Config, default_config, flat, no_field
from surojax.config.flags import parse
from surojax.errors import CheckpointError, ConfigError
from surojax.run.metrics import METRICS_FILE, NonFiniteLoss, read_metrics
from surojax.train import train

BASELINE = "bf16"
type Result = dict[str, Any]  # what `summary` makes of a run, and its config
EVERY = 25  # steps between the points of a curve; a point is the mean training loss since the one before


class Setting(NamedTuple):
    """Fields that differ from the baseline's, and how far from it the final loss may be, in percent."""

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
    c.learning_rate = 5e-4  # at 1e-3 and 2e-3 chance moves the ends of runs several times further
    c.warmup_steps = 60
    return c


def config_of(name: str, seed: int, shared: Config) -> Config:
    """The shared config with the setting's fields. Raises ConfigError where this version has no such field."""
    c = shared.copy_and_resolve_references()
    for field, value in SETTINGS[name].fields.items():
        if field not in c:
            raise ConfigError(no_field(field))
        c[field] = value
    c.seed = seed
    c.output_dir = str(Path(shared.output_dir) / f"{name}-{seed}")
    return c


def file_of(name: str, seed: int, shared: Config) -> Path:
    return Path(shared.output_dir) / f"{name}-{seed}.json"


def result_of(name: str, seed: int, shared: Config) -> Result:
    """The result of a setting, from its file or from a run that is made now.

    Raises ConfigError when the file is of a run with other settings; exits when the run is stopped.
    """
    c = config_of(name, seed, shared)
    fields = {k: v for k, v in flat(c).items() if k != "output_dir"}
    file = file_of(name, seed, shared)
    if not file.exists():
        print(f"\n=== {name}, seed {seed}: {SETTINGS[name].fields or 'the baseline'}", flush=True)
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


def summary(records: list[dict[str, Any]]) -> Result:
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


def difference(results: dict[int, Result], base: dict[int, Result]) -> tuple[float, float | None]:
    """(mean over the seeds both have, its standard error if there are several) of the final loss against base, in %."""
    each = [100 * (r["eval_loss"] / base[seed]["eval_loss"] - 1) for seed, r in results.items() if seed in base]
    error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
    return statistics.fmean(each) if each else math.nan, error


def table(results: dict[str, dict[int, Result]]) -> tuple[str, bool]:
    """The comparison in Markdown, and whether every limit holds."""
    lines = ["| run | seeds | evaluation loss | against bf16 | limit | | s per step |", "|---|---|---|---|---|---|---|"]
    base, good = results.get(BASELINE, {}), True
    for name, of_seeds in results.items():
        mean = lambda key, of_seeds=of_seeds: statistics.fmean(r[key] for r in of_seeds.values())
        limit, row = SETTINGS[name].limit, [name, str(len(of_seeds)), f"{mean('eval_loss'):.4f}", "", "", ""]
        if name != BASELINE and base.keys() & of_seeds.keys():
            apart, error = difference(of_seeds, base)
            row[3] = f"{apart:+.2f} %" + ("" if error is None else f" ± {error:.2f}")
            if limit is not None:
                row[4:] = f"{limit:g} %", "pass" if abs(apart) <= limit else "FAIL"
                good = good and abs(apart) <= limit
        lines.append(f"| {' | '.join([*row, f'{mean("step_s"):.2f}'])} |")
    return "\n".join(lines), good


def mean_curves(results: dict[str, dict[int, Result]]) -> dict[str, dict[int, float]]:
    """Training loss by step, the mean of `EVERY` steps up to each and of all seeds."""
    return {
        name: {
            int(step): statistics.fmean(r["curve"][step] for r in of_seeds.values())
            for step in next(iter(of_seeds.values()))["curve"]
        }
        for name, of_seeds in results.items()
    }


def curves(results: dict[str, dict[int, Result]]) -> str:
    """`mean_curves` in Markdown."""
    found = mean_curves(results)
    lines = [f"| step | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for step in sorted({step for curve in found.values() for step in curve}):
        values = (curve.get(step) for curve in found.values())
        lines.append(f"| {step} | {' | '.join('' if v is None else f'{v:.4f}' for v in values)} |")
    return "\n".join(lines)


def plot(results: dict[str, dict[int, Result]], file: Path) -> None:
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
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="the settings to run")
    parser.add_argument("--seeds", nargs="+", type=int, help="the seeds to run each with (default: that of the config)")
    if not any(arg.partition("=")[0] == "--config" for arg in argv):
        argv = ["--config", __file__, *argv]
    try:
        shared, args = parse(argv, parser)
        folder = check_output_dir(shared.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        seeds = args.seeds or [shared.seed]
        for seed, name in itertools.product(seeds, args.only):
            result_of(name, seed, shared)
        there = lambda name: [seed for seed in seeds if file_of(name, seed, shared).exists()]
        results = {name: {seed: result_of(name, seed, shared) for seed in there(name)} for name in SETTINGS}
        results = {name: of_seeds for name, of_seeds in results.items() if of_seeds}
    except (ConfigError, CheckpointError, NonFiniteLoss) as error:
        sys.exit(f"recipes: error: {error}")
    text, good = table(results)
    print(f"\n{text}\n\nTraining loss, mean of {EVERY} steps:\n\n{curves(results)}")
    if find_spec("matplotlib"):
        plot(results, folder / "curves.svg")
    sys.exit(not good)


if __name__ == "__main__":
    main()
