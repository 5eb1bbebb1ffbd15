"""Evaluates a run on held-out and validation data with one compiled program, and summarises its evaluations."""

import dataclasses
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from surojax.assembly.assemble import Assembly
from surojax.config.fields import Config
from surojax.data import run_data as data
from surojax.objectives.distillation import Distillation
from surojax.objectives.objective import OfSequences
from surojax.parallel.feed import from_host
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import data_parallel
from surojax.run.callbacks import EarlyStopping
from surojax.run.metrics import ACCURACY, METRICS_FILE, perplexity, read_metrics
from surojax.step import train_step
from surojax.training.program_options import program_options
from surojax.training.start import Start


class Evaluation:
    """Computes the loss on held-out text and on validation datasets, all with one compiled step."""

    def __init__(self, c: Config, run: Assembly, mesh: jax.sharding.Mesh, evaluated: list[data.Evaluated]):
        self.evaluated = evaluated
        if isinstance(run.engine.objective, Distillation):
            engine = dataclasses.replace(run.engine, objective=run.engine.objective.evaluated)
            run = dataclasses.replace(run, engine=engine)
        self.terms = terms_of(run.engine.objective)
        self.arrays = run.engine.batch_arrays
        self.sharding = batch_sharding(mesh, accumulated=False)
        shape = (c.per_device_batch_size * data_parallel(mesh), c.sequence_len)
        options = program_options(c, run, mesh.devices.flat[0].platform)
        batch = run.engine.planned_batch(shape, self.sharding)
        self.step = run.eval_step().lower(run.plan.weights, *batch).compile(options)

    def __call__(self, weights) -> list[dict[str, Any]]:
        """Returns the arguments of `MetricsLog.eval` for each dataset."""
        return [self.scores(weights, one) for one in self.evaluated]

    def scores(self, weights, one: data.Evaluated) -> dict[str, Any]:
        """Returns {"name", "loss" (nats per token), "bits_per_byte" (comparable across tokenizers), "duration_s",
        "over" (the number of terms of these means, such as "6 pairs")}.

        With an objective that has other means than the loss, these are "others".
        """
        start = time.perf_counter()
        on_devices = (tuple(from_host(batch[name], self.sharding) for name in self.arrays) for batch in one.batches)
        # One batch at a time: programs with collectives in flight can block each other on virtual CPU devices.
        sums = list(map(jax.device_get, train_step.evaluated(self.step, weights, on_devices)))
        terms = sum(int(n) for _, n in sums)
        means = {name: float(sum(np.float64(s[name]) for s, _ in sums) / terms) for name in sums[0][0]}
        loss = means.pop("loss")
        per_label = one.bytes_per_label
        bits = None if per_label is None else loss / math.log(2) / per_label
        duration_s = time.perf_counter() - start
        over = f"{terms:,} {self.terms[: -1 if terms == 1 else None]}"
        times = {"duration_s": duration_s, "over": over}
        return {"name": one.name, "loss": loss, "bits_per_byte": bits, **times, "others": means}


def terms_of(objective: Any) -> str:
    """Returns the word for the terms of an objective's mean: tokens, answers, or pairs of answers."""
    if not isinstance(objective, OfSequences):
        return "tokens"
    return "pairs" if objective.loss.per_term > 1 else "answers"


def early_stopping(c: Config, output_dir: Path, start: Start) -> EarlyStopping:
    """Makes the `EarlyStopping` on a run's first dataset, having seen the evaluations before a restart."""
    name = next((one.name for one in start.found.evaluated), "")
    stopping = EarlyStopping(c.early_stopping_patience or math.inf, name=name)
    file = output_dir / METRICS_FILE
    for record in read_metrics(file) if start.first_step and file.exists() else ():
        if record["log"] == "eval" and record.get("name", "") == name and record["step"] <= start.first_step:
            stopping.see(_number(record, "loss"))
    return stopping


def evaluation_summary(output_dir: Path) -> str:
    """Summarises `metrics.jsonl`: one line for each dataset with its first and last evaluation, over all starts."""
    evals: dict[str, list[dict[str, Any]]] = {}
    for record in read_metrics(output_dir / METRICS_FILE):
        if record["log"] == "eval":
            evals.setdefault(record.get("name", ""), []).append(record)
    lines = []
    for name, records in evals.items():
        ends = [records[0], records[-1]][: len(records)]
        losses = [_number(record, "loss") for record in ends]
        over = f" over {records[-1]['over']}" if records[-1].get("over") else ""
        text = f"evaluation{name and f' of {name}'}{over}: loss {_from_to(losses, '.4f')}"
        if all(record.get("bits_per_byte") is not None for record in ends):
            text += f", {_from_to([_number(record, 'bits_per_byte') for record in ends], '.4f')} bits per byte"
        if all("perplexity" in record for record in ends):
            text += f", perplexity {_from_to(map(perplexity, losses), '.4g')}"
        if all(ACCURACY in record for record in ends):
            text += f", accuracy {_from_to([_number(record, ACCURACY) for record in ends], '.3f')}"
        lines.append(f"{text} (step{'s'[: len(ends) - 1]} {_from_to([record['step'] for record in ends], 'd')})")
    return "\n".join(lines) or "evaluation: none yet"


def _number(record: dict[str, Any], key: str) -> float:
    """Returns a record's number; NaN for a null, which stands for one that is not finite, or anything else."""
    value = record.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:
        return float(value)
    return math.nan


def _from_to(numbers: Iterable[float], form: str) -> str:
    """Formats one number, or the first and the last: "3.4043 -> 2.1250"."""
    return " -> ".join(format(number, form) for number in numbers)
