"""A training run, from top to bottom.

    surojax train --config configs/tiny.py [--config.FIELD=VALUE ...]

`train(config)` is the run: check, data, plan, compile, state, loop, finish. It checks everything that can be checked
before it writes anything. To continue a run that ended for any reason, start the same command again: it resumes from
the last checkpoint. Each part is a file in `surojax/training/`.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from surojax.cluster.early import STOPPED  # isort: skip  # before what takes seconds

import jax

from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import Brought, from_config
from surojax.cluster import hosts
from surojax.cluster.supervised import Supervised
from surojax.cluster.watch import Watch, failing_together, leave
from surojax.config.fields import Config, flat, not_default
from surojax.config.flags import parse_flags
from surojax.convert import check_exportable, convert, keep, keep_template
from surojax.data.batches import training_batches as training_batches
from surojax.errors import CheckpointError, ConfigError, Refused, StepError, ends_with_code, exit_codes, need
from surojax.exchange.sources import keeps, naming, replaced_fields, resolved
from surojax.inference.trained_model import has_template
from surojax.memory import nvme
from surojax.memory.aligned import share_arenas
from surojax.memory.lock import Lock, locked
from surojax.models.decoder import Block
from surojax.objectives.objective import Objective
from surojax.objectives.objectives import OBJECTIVES
from surojax.optim.from_optax import MakeTransformation
from surojax.parallel.feed import Feed
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import expect_no_cuda_without_driver, own_device
from surojax.planner import products, seen
from surojax.planner.footprint import by_class
from surojax.planner.traffic import batch_of
from surojax.run import on_disk, trackers
from surojax.run.callbacks import Callback, Callbacks, EarlyStopping, check_callbacks
from surojax.run.checkpoint import Checkpoints
from surojax.run.console import say
from surojax.run.guard import Guard
from surojax.run.metrics import MetricsLog
from surojax.run.nonfinite import NonFiniteLoss
from surojax.run.restore import check_restorable
from surojax.run.shared import check_shared, is_first
from surojax.run.starts import write_sample, write_start
from surojax.run.stop import ABORTED, EarlyStop, StopSignal, ended_at_once
from surojax.step.state import TrainState
from surojax.training.evaluation import early_stopping, evaluation_summary
from surojax.training.initial_state import ADAPTER, first_state, restored, write_adapter
from surojax.training.kernel_choices import store_choices, take_choices
from surojax.training.loop import Outputs, loop
from surojax.training.reference import with_reference
from surojax.training.resume import check_unfinished
from surojax.training.run_programs import compile_programs
from surojax.training.run_summary import (
    TRACE,
    budget,
    compare,
    comparison,
    describe_run,
    peak_bytes,
    peak_flops,
    print_prediction,
    rate_text,
    sample_text,
    write_page,
)
from surojax.training.safe import advised, mention_of_doctor, safe
from surojax.training.setup import Setup, naming_rows, set_up
from surojax.training.start import Start, find_start

NAMES_OF_LOSSES = {"step": "loss", "eval": "evaluation loss"}  # by kind of record
GOES_ON = "early_stopping_patience=0 goes on"


class Result(NamedTuple):
    """The result of `train`; its `repr` leaves out state and history."""

    state: TrainState
    history: list[dict[str, Any]]  # the records of metrics.jsonl that this call wrote
    checkpoint: Path | None  # the newest checkpoint
    finished: bool  # False if a signal, Ctrl-C, the time limit or a callback stopped the run
    stopped_by: str = ""  # why the run ended before its last step; early_stopping_patience finishes it

    def __repr__(self) -> str:
        ended = "finished" if self.finished else f"stopped by {self.stopped_by}"
        last = {record["log"]: record for record in self.history}
        losses = [f"{name} {last[log]['loss']:.4f}" for log, name in NAMES_OF_LOSSES.items() if log in last]
        return (
            f"Result({', '.join([f'{ended} at step {int(self.state.step)}', *losses])}, checkpoint={self.checkpoint})"
        )


def train(
    config: Config,
    *,
    max_minutes: float | None = None,
    callbacks: Sequence[Callback] = (),
    data: Iterable[Any] | None = None,
    optimizer: MakeTransformation | None = None,
    objective: Objective | None = None,
    block: type[Block] | None = None,
) -> Result:
    """Trains a model as the config says, and returns its state, its metrics and its newest checkpoint.

    config: see `default_config` for the fields.

    max_minutes: the run saves and stops after the step in which so many minutes have passed. With several processes,
    all call this function, after `hosts.connect`; the first one prints and writes metrics.

    callbacks: each is called with an `Event` after each step, evaluation and checkpoint.
    data: rows in place of the config's `data`: texts, mappings of fields as in a file, lists of messages, or token ids
    (a list of int, an integer array); an integer array `[rows, tokens]` or `[tokens]`. They are read several times and
    by a resumed run again, so iterating over them has to give the same rows each time.
    optimizer: a function of the learning rate that returns an elementwise transformation of optax, such as optax.lion;
    the schedule of the learning rate and the clipping of gradients are the config's.
    objective: what is minimised in place of cross-entropy, such as `LossOfLogits`.
    block: a subclass of `Block` that the layers compute. A checkpoint is continued with the block that it was written
    with.

    Raises ConfigError (bad settings or data, or too little memory; nothing was written), CheckpointError (a checkpoint
    cannot be written, read or continued), NonFiniteLoss (the loss is NaN or infinite), StepError (XLA fails on a GPU),
    OSError (the disk has no room for metrics, or the disk of nvme_path fails).
    """
    check_callbacks(callbacks)
    if max_minutes is not None:
        need(0 <= max_minutes < math.inf, "max_minutes", "minutes, 0 or more", max_minutes, "correct it")
    c = naming_rows(resolved(config), data)
    if replaced := replaced_fields(config, c):
        say(f"model: as {c.model_path} says, in place of the config's {', '.join(replaced)}")
    started = time.perf_counter()
    until = None if max_minutes is None else time.monotonic() + 60 * max_minutes

    # -- Check: everything that can be checked without data -----------------------------------------------------------
    if c.nvme_path:
        share_arenas()
    brought = Brought(optimizer, objective, block)
    setup = set_up(c, brought, data)
    devices = setup.devices
    if mention := mention_of_doctor(devices[0].platform):
        say(mention)

    # -- Data, and the checkpoint to continue from --------------------------------------------------------------------
    start = find_start(c, setup)
    c = start.config
    tokens_per_step = start.samples_per_step * c.sequence_len

    # -- Plan: shapes, shardings, memory ------------------------------------------------------------------------------
    run = from_config(c, setup.mesh, start.total_steps, locates_nonfinite=jax.process_count() > 1, brought=brought)
    if start.resume:
        check_restorable(start.resume, run.plan, run.layers)
    describe_run(c, run, devices, setup.need)
    say(start.found.describe())
    rate = rate_text(c, start.first_step, start.total_steps)
    say(f"run: {start.total_steps} steps of {tokens_per_step:,} tokens, {rate}, into {setup.output_dir}")
    is_new = (c.from_scratch or not c.model_path) and not c.lora
    say(budget(run.model, start.total_steps * tokens_per_step, is_new=is_new))

    with contextlib.ExitStack() as until_end:
        check = functools.partial(check_unfinished, run.store, setup.output_dir)
        disk = until_end.enter_context(
            nvme.claim(run.store, goes_on=start.meta if start.in_files else None, check=check)
        )
        if disk.line:
            say(disk.line)
        settings = c.to_dict() | start.meta | start.identity
        check_shared(setup.output_dir, json.dumps(settings, sort_keys=True, default=str))
        patience = early_stopping(c, setup.output_dir, start)
        if start.resume and not start.in_files and (start.first_step >= start.total_steps or patience.is_over):
            return nothing_left(c, run, setup, start, patience)
        lock = claim_output_dir(c, setup, start, until_end)
        tracked = trackers.Trackers()
        if is_first():
            tracked = trackers.start_trackers(
                c.report_to, setup.output_dir, first_step=start.first_step, settings=flat(c)
            )
        until_end.enter_context(tracked)

        take_choices(c, start.resume, setup.output_dir, devices[0].platform)
        start = with_reference(c, run, setup, start)

        # -- Compile; a thread prepares the first batches meanwhile ---------------------------------------------------
        feed = Feed(batch_sharding(setup.mesh), start.batch_size)
        batches = training_batches(
            start.found.train,
            batch_size=start.batch_size,
            accumulation=c.gradient_accumulation_steps,
            seed=c.seed,
            start_sample=start.position,
            rows=feed.rows,
        )
        until_end.enter_context(contextlib.closing(batches))
        until_end.enter_context(advised(c, devices[0].platform))
        with advised(c, devices[0].platform, compiles=True):
            programs = compile_programs(c, run, setup.mesh, start.found.evaluated, feed)
        store_choices(c, setup.output_dir, devices[0].platform)
        trace = setup.output_dir / TRACE if is_first() else None
        predicted = print_prediction(c, run, programs.train_step, devices, disk, trace)

        # -- State: from a checkpoint, from another model's weights, or new -------------------------------------------
        states = [first_state(c, run, start, setup.initial)]

        # -- Loop -----------------------------------------------------------------------------------------------------
        checkpoints = until_end.enter_context(
            Checkpoints(setup.output_dir, save_total_limit=c.save_total_limit, store=run.store)
        )
        if checkpoints.shares_blocks:
            say("checkpoints share the blocks of nvme_path, and take room as training replaces them there")
        log = MetricsLog(
            setup.output_dir,
            total_steps=start.total_steps,
            tokens_per_step=tokens_per_step,
            first_step=start.first_step,
            first_tokens=start.position * c.sequence_len,
            log_steps=c.log_steps,
            quiet=c.quiet,
            peak_memory=functools.partial(peak_bytes, own_device(devices)),
            disk_busy_s=None if programs.store.is_empty else lambda: programs.store.busy_s,
            flops_per_token=sum(products.token_flops(run, c.sequence_len).values()),
            peak_flops=peak_flops(devices, run, c.sequence_len),
            layers_with_experts=run.model.layers_with_experts,
            report=tracked.log,
            writes=is_first(),
        )
        until_end.enter_context(log)
        if is_first():
            write_start(setup.output_dir, start.first_step, not_default(c))
        for line in tracked.where:
            say(line)
        fine_tunes = setup.initial is not None and not start.first_step  # evaluated first: what it starts from
        with StopSignal(until, setup.output_dir) as stop:
            told = (patience, *guarded(callbacks))
            outputs = Outputs(checkpoints, log, Callbacks(told, start.total_steps), stop, lock)
            # The state is moved into the loop: what a step replaces is not kept here.
            done = loop(
                c, start, programs, outputs, batches, states.pop(), evaluates_first=fine_tunes, layers=run.layers
            )
            checkpoints.wait()

        # -- Finish ---------------------------------------------------------------------------------------------------
        finished = not done.stopped_by or patience.is_over
        if done.stopped_by:
            further = GOES_ON if patience.is_over else "start again to continue"
            say(f"stopped by {done.stopped_by} after step {done.step} of {start.total_steps}; {further}")
        if finished and c.sample_tokens and jax.process_count() > 1:
            say("no text is sampled with several processes: `surojax generate` does it from the checkpoint")
        elif finished and c.sample_tokens and run.engine.table.weights.home.in_file:
            say("no text is sampled with weights in files: `surojax generate` does it from the checkpoint")
        elif finished and c.sample_tokens and not run.model.has_logits:
            say("no text is sampled of a reward model: `surojax convert` writes it as a folder for transformers")
        elif finished and c.sample_tokens:
            sample = sample_text(c, run, done.state.weights, start.tokenizer, start.found.held_out)
            say(sample)
            write_sample(setup.output_dir, done.step, sample)
        say(f"{done.step - start.first_step} steps in {time.perf_counter() - started:.0f} s")
        durations = [record["duration_ms"] / 1e3 for record in done.history if record["log"] == "step"]
        if speed := comparison(predicted, durations, tokens_per_step):
            say(speed)
        if is_first() and (written := seen.of_run(c, devices, predicted, durations)):
            say(written)
        if memory := compare(setup.need, programs.train_step, own_device(devices)):
            say(memory)
        if is_first():
            say(evaluation_summary(setup.output_dir))
            classes = by_class(run, batch_of(c), own_device(devices).platform)
            measured = list(filter(None, (speed, memory)))
            say(write_page(setup.output_dir, setup.need, classes, predicted, len(devices), measured))
        say(f"checkpoint: {checkpoints.last}")
        if c.lora:
            say(adapter_line(c, run, start, done.state.master))
        return Result(done.state, done.history, checkpoints.last, finished, done.stopped_by)


def adapter_line(c: Config, run: Assembly, start: Start, master: dict) -> str:
    """Writes a state's adapters; says where, and of which class of transformers' they name the modules, if of two."""
    folder = write_adapter(c, run, master, start.identity.get("base", ""))
    whole = ", for the model that transformers' AutoModelForImageTextToText makes" if naming(c).in_whole else ""
    return f"adapter: {folder}{whole}"


def guarded(callbacks: Sequence[Callback]) -> Sequence[Callback]:
    """Returns the callbacks, with a `Guard` added if they have none."""
    return callbacks if any(isinstance(callback, Guard) for callback in callbacks) else (*callbacks, Guard())


def nothing_left(c: Config, run: Assembly, setup: Setup, start: Start, patience: EarlyStopping) -> Result:
    """Makes the result of a run that has no steps left, or whose evaluations had stopped improving."""
    assert start.resume
    reached = f"{start.resume} is at step {start.first_step} of {start.total_steps}"
    is_at_end = start.first_step >= start.total_steps
    why = "raise max_steps to go on" if is_at_end else f"{patience.reason}; {GOES_ON}"
    say(f"nothing left to train: {reached}; {why}")
    state = restored(c, run, start.resume, setup.initial)
    if c.lora:
        say(adapter_line(c, run, start, state.master))
    return Result(state, [], start.resume, True, "" if is_at_end else patience.reason)


def claim_output_dir(c: Config, setup: Setup, start: Start, until_end: contextlib.ExitStack) -> Lock | None:
    """Creates the output_dir, locks it until the end, and copies there the files that an export needs.

    Returns the lock, None in other processes than the first. Raises ConfigError if another run uses it,
    CheckpointError if one has used it since `set_up`.
    """
    setup.output_dir.mkdir(parents=True, exist_ok=True)
    lock = until_end.enter_context(locked(setup.output_dir / "lock", "output_dir")) if is_first() else None
    if on_disk.find(setup.output_dir / on_disk.FOLDER) != setup.newest:
        raise CheckpointError(
            f"another run wrote checkpoints into {setup.output_dir} while this one started; start again"
        )
    if is_first() and c.model_path and not (start.resume and keeps(setup.output_dir, c.model_path)):
        keep(c)
    elif is_first() and c.chat_template:
        keep_template(c)
    return lock


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's own options."""
    description = f"{(__doc__ or '').partition(chr(10))[0]}\n\n{exit_codes()}"
    arguments = argparse.ArgumentParser(prog="surojax train", description=description)
    arguments.add_argument(
        "--export",
        metavar="PATH",
        help="write the trained model there in bfloat16: a Hugging Face folder, or a file that ends in .gguf",
    )
    arguments.add_argument(
        "--safe",
        action="store_true",
        help="leave off what may fail on a GPU: attention=xla, kernels=xla, xla_options=default, no copy engines",
    )
    arguments.add_argument("--max-minutes", type=float, metavar="M", help="save and stop after so many minutes")
    arguments.add_argument(
        "--quiet", action="store_true", help="print no steps and evaluations, as --config.quiet does"
    )
    hosts.add_flags(arguments)
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, connects to the other processes if there are any, and runs.

    An error exits with one line: settings that are refused with REFUSED, others with 1. A run that was asked to stop
    exits with STOPPED.
    """
    argv = sys.argv[1:] if argv is None else argv
    with EarlyStop(STOPPED, aborted(["surojax", "train", *argv])) as early:
        connect_and_run(parser(), argv, early)


def aborted(again: list[str]) -> str:
    """Makes the last line of a run that Ctrl-C has aborted. again: the command that started the run."""
    return f"surojax.train: aborted; continue with: {shlex.join(again)}"


def connect_and_run(parser: argparse.ArgumentParser, argv: list[str], early: EarlyStop) -> None:
    """Connects to the other processes if there are any, and runs; exits after errors as `main` describes."""
    watch = None
    try:
        c, args = parse_flags(argv, parser)
        c.quiet = c.quiet or args.quiet
        if args.max_minutes is not None:
            need(
                0 < args.max_minutes < math.inf, "--max-minutes", "minutes, more than 0", args.max_minutes, "correct it"
            )
        if args.export is not None:
            check_exportable(resolved(c), args.export)
        place = hosts.detect_flags(args, os.environ)
        key = hosts.key_of(place, os.environ, args.secret_file)
        supervised = Supervised(args.supervisor, args.heartbeat) if args.supervisor is not None else None
    except ConfigError as error:
        raise Refused(f"surojax.train: error: {error}") from error
    try:
        if place:
            key = supervised.key if supervised else key
            with early.deferred() as asked:
                names = hosts.connect(place, os.environ, key=key, heartbeat_s=args.heartbeat, say=say, asked=asked)
            watch = Watch(names, place.process_id, args.heartbeat)
    except ConfigError as error:  # of the processes or the network: another start may connect
        leave(f"surojax.train: error: {error}")
    with failing_together(watch):
        run_command(c, args, shlex.split(supervised.command) if supervised else ["surojax", "train", *argv])


def run_command(c: Config, args: argparse.Namespace, again: list[str]) -> None:
    """Trains, exports, and prints how to continue; exits after errors as `main` describes.

    again: this run's command.
    """
    if args.safe:
        c, changes = safe(c)
        expect_no_cuda_without_driver()  # the line below is JAX's first use
        say(f"--safe: {changes or 'nothing to leave off'}")
    try:
        result = train(c, max_minutes=args.max_minutes)
        if args.export is not None and result.checkpoint and is_first():
            say(f"exported: {convert(result.checkpoint, args.export)}" if result.finished else "not exported yet")
    except (ConfigError, CheckpointError, NonFiniteLoss, StepError) as error:
        exits = Refused if isinstance(error, ConfigError) else SystemExit
        raise exits(f"surojax.train: error: {'; '.join([str(error), *getattr(error, '__notes__', ())])}") from error
    except OSError as error:
        sys.exit(f"surojax.train: error: {error}; when that is repaired, continue with: {shlex.join(again)}")
    except KeyboardInterrupt:
        print(aborted(again), file=sys.stderr)
        sys.exit(ABORTED)
    for line in further_commands(c, result, again, args.export):
        say(line)
    if not result.finished:
        sys.exit(STOPPED)


def further_commands(c: Config, result: Result, again: list[str], export: str | None) -> list[str]:
    """Makes the last lines of a run: the commands that sample, export and resume, each as it can be started.

    again: the run's command. export: its option of that name.
    """
    has_own = result.checkpoint is None or on_disk.find(c.output_dir) is not None  # else it is of another run
    run, folder = str(c.output_dir if has_own else result.checkpoint), str(Path(c.output_dir) / "export")
    convert_run = ["surojax", "convert", "--checkpoint", run, "--out", folder]
    lines = []
    if OBJECTIVES[c.objective].num_labels:
        merge = ["surojax", "convert", "merge", str(c.model_path), str(Path(c.output_dir) / ADAPTER), folder]
        lines.append(f"export: {shlex.join(merge if c.lora else convert_run)}")
    else:
        asks = ["--chat"] if has_template(c) else ["--prompt", "TEXT"]
        lines.append(f"sample: {shlex.join(['surojax', 'generate', '--checkpoint', run, *asks])}")
        if export is None and (not c.lora or (c.model_path and not c.from_scratch)):
            lines.append(f"export: {shlex.join(convert_run)}")
    longer = again
    if result.finished and result.stopped_by:
        longer = [*without_field(again, "early_stopping_patience"), "--config.early_stopping_patience=0"]
    elif result.finished:
        longer = going_on(again, c, int(result.state.step))
    if export is not None and result.finished:
        longer = [*without_field(longer, "export"), "--export", str(free_path(Path(export)))]
    return [*lines, f"resume: {shlex.join(longer)}"]


def free_path(path: Path) -> Path:
    """Returns the first of NAME-2, NAME-3 ... beside a path that does not exist."""
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(name for name in names if not name.exists())


def going_on(command: list[str], c: Config, step: int) -> list[str]:
    """Changes the command of a run that finished at this step so that it trains for as many steps again."""
    name = "max_steps" if c.max_steps else "num_epochs"
    short = without_field(without_field(command, "max_steps"), "num_epochs")
    return [*short, f"--config.{name}={2 * (step if c.max_steps else c.num_epochs)}"]


def without_field(command: list[str], name: str) -> list[str]:
    """Removes the words that set a field or an option, --config.NAME=VALUE or --NAME VALUE, from a command line."""

    def sets(word: str) -> bool:
        return word.startswith("--") and word[2:].removeprefix("config.").replace("-", "_") == name

    values = [i + 1 for i, word in enumerate(command) if sets(word)]
    return [word for i, word in enumerate(command) if i not in values and not sets(word.partition("=")[0])]


if __name__ == "__main__":
    ended_at_once(functools.partial(ends_with_code, main))
