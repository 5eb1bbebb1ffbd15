"""Finds where a run starts: loads its data, and finds the checkpoint to continue from and the steps that remain."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

from surojax.assembly.from_config import lora
from surojax.config import checks, fields as configs
from surojax.config.fields import Config
from surojax.data import run_data as data
from surojax.data.batches import Mixture
from surojax.data.rollouts import TokenRoutes
from surojax.data.samples import check_length
from surojax.data.teacher_labels import with_teacher_labels
from surojax.data.tokenizer import Tokenizer, load_tokenizer
from surojax.errors import ConfigError
from surojax.exchange import peft, sources
from surojax.exchange.base import fingerprint
from surojax.objectives.distillation import DISTILL
from surojax.objectives.objective import TEACHER, TEACHER_IDS, TEACHER_STATES
from surojax.objectives.objectives import OBJECTIVES
from surojax.placement.mesh import data_parallel
from surojax.run import on_disk
from surojax.run.console import say
from surojax.run.on_disk import BLOCK
from surojax.training.resume import block_identity, check_same, find_resume, goes_on_in_files
from surojax.training.setup import Setup

FEW_STEPS = 20  # of a run from a model: with fewer, a line says how to take more
FEW_EPOCHS = 10  # of a small data set: a run of as many steps as they should have is long enough
SMALL_EPOCH = 10  # steps of an epoch whose samples fill fewer batches than gradient_accumulation_steps


class Start(NamedTuple):
    """The result of `find_start`: the data, the checkpoint, and the first step and sample.

    config: with as many microbatches in a step as the data fills.
    identity: what a checkpoint must have been trained with. adapter: to start from, if any. resume: checkpoint to
    continue from, None for a new run. in_files: whether the run continues from the state that its files have complete,
    which is newer. first_step: number of steps done. position: number of samples done.
    """

    config: Config
    tokenizer: Tokenizer
    found: data.Data
    batch_size: int
    samples_per_step: int
    identity: dict[str, str]
    adapter: peft.AdapterArrays | None
    resume: Path | None
    in_files: bool
    meta: dict[str, Any]
    first_step: int
    position: int
    total_steps: int


def find_start(c: Config, setup: Setup) -> Start:
    """Loads the data and finds the checkpoint. Raises ConfigError and CheckpointError."""
    tokenizer = load_tokenizer(c.tokenizer)
    checks.check_tokenizer(c, tokenizer.vocab_size, tokenizer.name)
    batch_size = c.per_device_batch_size * data_parallel(setup.mesh)
    settings = data.Settings(**{name: c[name] for name in data.SETTINGS})
    choice = OBJECTIVES[c.objective]
    found = data.load_data(
        setup.entries,
        settings,
        tokenizer,
        eval_batch_size=batch_size,
        rows=choice.rows,
        together=choice.together,
        routes=TokenRoutes.of(c, setup.model.layers_with_experts),
        is_scored=choice.num_labels > 0,
        say=say,
    )
    if c.objective == DISTILL:
        found = found._replace(train=_with_labels(c, found.train, tokenizer))
    samples = found.train
    c = with_smaller_steps(c, len(samples.all), batch_size)
    samples_per_step = batch_size * c.gradient_accumulation_steps
    check_length(samples.all, samples_per_step)
    identity = {"tokenizer": tokenizer.name, "data": samples.fingerprint}
    if setup.brought.block:
        identity[BLOCK] = block_identity(setup.brought.block)
    if c.lora and setup.initial:
        identity["base"] = fingerprint(setup.initial, setup.model)
    adapter = None
    if c.lora_adapter and not setup.continues:
        adapter = peft.read_adapter(c.lora_adapter, setup.model, sources.naming(c))
        peft.check_continues(adapter, lora(c), identity["base"], c.lora_adapter)
    resume = find_resume(c, setup.output_dir, identity, samples_per_step)
    meta = on_disk.read_meta_of_run(resume) if resume else {"step": 0, "samples": 0}
    in_files = goes_on_in_files(c, setup.output_dir, setup.in_files, meta["step"])
    if in_files and setup.in_files:
        meta = setup.in_files
        check_same(c, f"step {meta['step']} in nvme_path", meta, identity, samples_per_step)
    first_step = meta["step"]
    position = meta["samples"]
    total_steps = c.max_steps or first_step + steps_of(c.num_epochs * len(samples) - position, samples_per_step)
    last = position + max(total_steps - first_step, 0) * samples_per_step
    if line := samples_line(last, len(samples), c.num_epochs, c.max_steps):
        say(f"data: {line}")
    if (
        c.model_path
        and not (c.max_steps or resume)
        and (line := few_steps_line(c, total_steps, len(samples), batch_size))
    ):
        say(f"data: {line}")
    check_schedule(c, total_steps)
    of_data = (c, tokenizer, found, batch_size, samples_per_step)
    return Start(*of_data, identity, adapter, resume, in_files, meta, first_step, position, total_steps)


def with_smaller_steps(c: Config, num_samples: int, batch_size: int) -> Config:
    """Returns the config with a smaller gradient_accumulation_steps if an epoch has no full step, and says so.

    num_samples: of an epoch. batch_size: samples in a microbatch of all devices. The epoch then has `SMALL_EPOCH` steps
    or a step for each batch. Unchanged with fewer samples than one batch, or where microbatches come in groups.
    """
    fits = smaller_accumulation(c, num_samples // batch_size)
    if fits is None or num_samples // batch_size >= c.gradient_accumulation_steps:
        return c
    step = f"the {batch_size * c.gradient_accumulation_steps:,} of a step"
    say(f"data: {num_samples:,} samples are fewer than {step}: gradient_accumulation_steps is {fits} in this run")
    c = copy.deepcopy(c)
    c.gradient_accumulation_steps = fits
    return c


def smaller_accumulation(c: Config, batches: int) -> int | None:
    """Returns a smaller gradient_accumulation_steps for an epoch of so many batches to have `SMALL_EPOCH` steps.

    It is 1 if there are fewer batches than that. None: the epoch has these steps, less than a batch, or microbatches
    come in groups.
    """
    fits = max(1, batches // SMALL_EPOCH)
    grouped = c.pp_size > 1 or c.microbatches_per_fetch > 1
    return None if not batches or grouped or fits >= c.gradient_accumulation_steps else fits


def few_steps_line(c: Config, total_steps: int, num_samples: int, batch_size: int) -> str:
    """Says how to take more steps if a run has few; "" if not. num_samples, batch_size: see `with_smaller_steps`."""
    epoch = num_samples // (batch_size * c.gradient_accumulation_steps)
    fits = smaller_accumulation(c, num_samples // batch_size)
    if fits and total_steps < FEW_EPOCHS * SMALL_EPOCH:
        more = num_samples // (batch_size * fits)
        return (
            f"epochs of {epoch} step{'s' * (epoch > 1)} are short: --gradient_accumulation_steps {fits} makes {more} "
            "steps of each, with as much computation"
        )
    if total_steps < FEW_STEPS:
        epochs = c.num_epochs * -(-FEW_STEPS // total_steps)
        return f"{total_steps} steps are few to learn from: --num_epochs {epochs} takes {FEW_STEPS} or more"
    return ""


def steps_of(num_samples: int, samples_per_step: int) -> int:
    """Returns the number of steps that train on so many samples, of which the last step may have more."""
    return -(-max(num_samples, 0) // samples_per_step)


def samples_line(last: int, num_samples: int, num_epochs: int, max_steps: int) -> str:
    """Says which samples a run does not train on, or more often than the others; "" if there are none.

    last: number of samples of all steps. num_samples: of an epoch. max_steps: 0 if `num_epochs` decides.
    """
    if max_steps:
        seen = f"{last:,} of {num_samples:,} samples are trained on in max_steps={max_steps:,}"
        return f"{seen}; max_steps=0 trains on all" if last < num_samples else ""
    more = last - num_epochs * num_samples
    if more <= 0:
        return ""
    return f"the last step is filled with {more:,} of the next epoch's samples"


def _with_labels(c: Config, train: Mixture, tokenizer: Tokenizer) -> Mixture:
    """Adds a teacher's cached labels to the samples. Raises ConfigError if there are none."""
    return with_teacher_labels(
        train,
        c.distill_path,
        sequence_len=c.sequence_len,
        tokenizer=tokenizer.name,
        vocab_size=c.model.vocab_size,
        top_k=c.distill_top_k,
        temperature=float(c.distill_temperature),
        hidden_size=c.distill_hidden_size,
        names=(TEACHER_STATES,) if c.distill_hidden_size else (TEACHER_IDS, TEACHER),
    )


def check_schedule(c: Config, total_steps: int) -> None:
    """Raises ConfigError if warmup and cooldown are longer than the run, whose length may depend on the data."""
    planned = configs.warmup_steps(c, total_steps) + c.cooldown_steps
    if planned > total_steps:
        raise ConfigError(
            f"warmup_steps + cooldown_steps: expected at most the {total_steps} steps of num_epochs={c.num_epochs}, "
            f"got {planned}; shorten them, or raise num_epochs"
        )
