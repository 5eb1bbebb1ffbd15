"""Labels a data set with a teacher's most likely next tokens, or its last hidden states, for objective="distill".

    surojax distill --config.model_path=TEACHER --config.data=FILES --config.sequence_len=512 \
        --config.distill_path=FOLDER

Data, tokenizer, template, packing and sequence_len are those that the student's run will have. The teacher rests where
offload_weights says, and its layers are read one after the other: from files, once for several batches. Labelling that
was ended goes on with the first batch that is not in the folder.
"""

import argparse
import copy
import dataclasses
import functools
import itertools
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import from_config
from surojax.config import checks, fields as configs
from surojax.config.fields import Config
from surojax.config.flags import parse_flags
from surojax.data import run_data as data
from surojax.data.batches import padded_batch
from surojax.data.samples import Samples
from surojax.data.teacher_labels import Labels, Teacher, claim_folder, write_head
from surojax.data.tokenizer import load_tokenizer
from surojax.declared import Facts
from surojax.errors import CheckpointError, ConfigError, ending, ends_with_code, need, short_exit_codes
from surojax.exchange.base import fingerprint
from surojax.exchange.sources import open_weights, resolved
from surojax.memory import nvme
from surojax.memory.lock import locked
from surojax.models.kinds.sublayer import LayerKinds
from surojax.objectives.distillation import DISTILL, Labelling, likely_tokens
from surojax.objectives.objective import TEACHER, TEACHER_IDS, TEACHER_STATES
from surojax.objectives.objectives import LABELLING
from surojax.objectives.teacher_states import last_states
from surojax.parallel.feed import from_host
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import data_parallel, find_devices, make_mesh
from surojax.placement.param import OUTER
from surojax.plan import add_disk
from surojax.planner.gpus import GPUS
from surojax.planner.labelling import plan_labelling
from surojax.refusals.refusal import about, refuse
from surojax.run.console import say
from surojax.step import train_step
from surojax.training.initial_state import fresh_state
from surojax.training.program_options import program_options

EVERY = 60.0  # seconds between lines


def distill(config: Config) -> Path:
    """Labels the training data of a config with the model at its model_path; returns the labels' folder.

    Raises ConfigError for whatever a run would refuse of settings and data, CheckpointError for a model that cannot be
    read, OSError if a disk is full.
    """
    c, states = teacher(config)
    devices = find_devices(c.gpus)
    mesh = make_mesh(devices, **configs.mesh_sizes(c))
    run = from_config(c, mesh, total_steps=1)
    entries = data.parse_entries(c.datasets, c.validation_datasets)
    initial = open_weights(c, run.model)
    if initial is None:
        raise ConfigError("model_path: expected a teacher, got none; name a model, without from_scratch")
    tokenizer = load_tokenizer(c.tokenizer)
    checks.check_tokenizer(c, tokenizer.vocab_size, tokenizer.name)
    batch_size = c.per_device_batch_size * data_parallel(mesh)
    settings = data.Settings(**{name: c[name] for name in data.SETTINGS})
    train = data.load_data(entries, settings, tokenizer, eval_batch_size=batch_size, say=say).train
    numbers = json.dumps([fingerprint(initial, run.model), configs.set_fields(c, Facts.NUMBERS)])
    about = (numbers, str(c.model_path), tokenizer.name, c.model.vocab_size)
    if states:
        source, names = Teacher(*about, 0, 0.0, c.model.hidden_size, c.model_dtype), (TEACHER_STATES,)
    else:
        source, names = Teacher(*about, c.distill_top_k, float(c.distill_temperature)), (TEACHER_IDS, TEACHER)
    folder = claim_folder(c.distill_path, source)
    with locked(folder / "lock", "distill_path"), nvme.claim(run.store):
        labels = [Labels.of(folder, samples, c.sequence_len, source) for samples in train.sources]
        if not any(one.missing for one in labels):
            say(f"labels: all {len(train):,} samples are labelled in {folder}")
            return folder
        engine = dataclasses.replace(run.engine, objective=labelling(c, states))
        labeller = _Labeller(c, dataclasses.replace(run, engine=engine), mesh, batch_size, names)
        weights = fresh_state(c, run, initial).weights
        if states:
            write_head(folder, np.asarray(jax.device_get(weights[OUTER][run.model.head])))
        for samples, one in zip(train.sources, labels, strict=True):
            labeller(weights, samples, one)
    say(f"labels: {len(train):,} samples in {folder}")
    say(f"train: {shlex.join(student_command(folder, source))}")
    return folder


def student_command(folder: Path, source: Teacher) -> list[str]:
    """Makes the command that trains a student on the labels of a folder, with the settings that labels fix."""
    fixed = {"distill_hidden_size": source.hidden_size}
    if not source.hidden_size:
        fixed = {"distill_top_k": source.top_k, "distill_temperature": source.temperature}
    fields = {"objective": DISTILL, "distill_path": folder}
    fields |= {name: value for name, value in fixed.items() if value != configs.DEFAULTS[name]}
    options = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["surojax", "train", "--config", "STUDENT.py", *options]


def teacher(config: Config) -> tuple[Config, bool]:
    """Returns (the checked config of the teacher, whether labels are its last hidden states). Raises ConfigError."""
    c = _frozen(resolved(config))
    checks.check(c)
    states = c.distill_hidden_size > 0
    if states:
        _check_states(c)
        c.distill_hidden_size = 0  # the teacher itself learns from nobody
    return c, states


def labelling(c: Config, states: bool) -> Labelling:
    """Makes the `Labelling` that a teacher's forward pass computes. c, states: see `teacher`."""
    if states:
        return Labelling(last_states)
    return Labelling(functools.partial(likely_tokens, c.distill_top_k, c.distill_temperature))


def _frozen(c: Config) -> Config:
    """Returns a config that freezes the teacher: a base with new adapters, whose initial product is 0."""
    need(bool(c.distill_path), "distill_path", "a folder for labels", c.distill_path, "name one")
    refuse(configs.flat(c) | {LABELLING: True}, configs.DEFAULTS, about(LABELLING, checks.REFUSALS))
    c = copy.deepcopy(c)
    c.objective = DISTILL
    c.lora, c.lora_rank = True, 1
    c.lora_target_modules = ",".join(dict.fromkeys(map(_a_matrix, configs.kinds(c).values())))
    return c


def _a_matrix(layer: LayerKinds) -> str:
    """Names a matrix of these layers that may have an adapter by itself; gate and up of an expert have one of both."""
    if targets := layer.mixer.targets():
        return targets[0].module.rpartition(".")[2]
    return layer.mlp.targets()[-1].module


def _check_states(c: Config) -> None:
    """Raises ConfigError if this teacher's last hidden states cannot be labels."""
    size = c.model.hidden_size
    change = f"set it to {size}, or leave it out"
    need(c.distill_hidden_size == size, "distill_hidden_size", f"the teacher's {size}", c.distill_hidden_size, change)
    softcap = c.model.final_logit_softcapping
    change = "leave distill_hidden_size out, so that labels are likely tokens"
    need(not softcap, "model.final_logit_softcapping", "0 with distill_hidden_size", softcap, change)


class _Labeller:
    """Labels samples with a teacher's compiled forward pass. names: of the labels' arrays."""

    def __init__(self, c: Config, run: Assembly, mesh: jax.sharding.Mesh, batch_size: int, names: Sequence[str]):
        self.names = names
        self.batch_size = batch_size
        self.tokens = c.sequence_len
        self.arrays = run.engine.batch_arrays
        self.sharding = batch_sharding(mesh, accumulated=False)
        batch = run.engine.planned_batch((batch_size, c.sequence_len), self.sharding)
        options = program_options(c, run, mesh.devices.flat[0].platform)
        self.step = run.eval_step().lower(run.plan.weights, *batch).compile(options)

    def __call__(self, weights, samples: Samples, labels: Labels) -> None:
        """Writes the missing files of labels."""
        missing = labels.missing
        if len(missing) < len(labels.files):
            say(f"labels: {len(labels.files) - len(missing):,} of {len(labels.files):,} files are there; going on")
        rows = self._rows(weights, samples, [i for number in missing for i in labels.files[number]])
        begun = said = time.perf_counter()
        done, all_missing = 0, sum(len(labels.files[number]) for number in missing)
        for number in missing:
            file_rows = list(itertools.islice(rows, len(labels.files[number])))
            labels.write(number, *(np.stack(arrays) for arrays in zip(*file_rows, strict=True)))
            done += len(file_rows)
            if time.perf_counter() > said + EVERY or number == missing[-1]:
                said = time.perf_counter()
                rate = done * self.tokens / (said - begun)
                say(f"labels: {samples.name}: {done:,} of {all_missing:,} samples, {rate:,.0f} tokens/s")

    def _rows(self, weights, samples: Samples, indices: list[int]) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields the label of each sample."""
        each = [indices[i : i + self.batch_size] for i in range(0, len(indices), self.batch_size)]
        batches = (padded_batch(samples, numbers, self.batch_size) for numbers in each)
        on_devices = (tuple(from_host(batch[name], self.sharding) for name in self.arrays) for batch in batches)
        for numbers, (sums, _) in zip(each, train_step.evaluated(self.step, weights, on_devices), strict=True):
            arrays = (np.asarray(jax.device_get(sums[name]))[: len(numbers)] for name in self.names)
            yield from zip(*arrays, strict=True)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's own options."""
    description = f"{(__doc__ or '').partition(chr(10))[0]}\n\n{short_exit_codes()}"
    made = argparse.ArgumentParser(prog="surojax distill", description=description)
    group = made.add_argument_group("a plan instead")
    text = f"label nothing: say what that takes on this GPU, from the compiled pass: {', '.join(GPUS)}"
    group.add_argument("--plan", metavar="GPU", help=text)
    add_disk(group)
    return made


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, and labels or plans. An error ends it with one line (`errors.ending`)."""
    try:
        c, args = parse_flags(argv, parser())
        if args.plan is None:
            need(args.disk is None, "--disk", "--plan as well, which reads it", args.disk, "leave it out")
            distill(c)
        else:
            jax.config.update("jax_platforms", "cpu")  # a plan needs no GPU, and should not occupy one
            c, states = teacher(c)
            in_files = args.disk is None or c.offload_weights == "nvme"
            need(in_files, "--disk", "offload_weights=nvme as well, whose files it holds", args.disk, "leave it out")
            print(plan_labelling(c, labelling(c, states), args.plan, args.disk))
    except (ValueError, CheckpointError, OSError) as error:
        raise ending("distill", error) from error


if __name__ == "__main__":
    ends_with_code(main)
