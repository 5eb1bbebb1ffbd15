"""The loop over a run's steps: train, report, evaluate, save, stop."""

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from surojax.config.fields import Config
from surojax.errors import CheckpointError
from surojax.memory.lock import Lock
from surojax.run.callbacks import Callbacks
from surojax.run.checkpoint import Checkpoints
from surojax.run.metrics import DeferredMetrics, FinishedStep, MetricsLog
from surojax.run.nonfinite import check_finite
from surojax.run.stop import StopSignal
from surojax.step.state import TrainState
from surojax.step.train_step import up_to_date
from surojax.training.run_programs import RunPrograms
from surojax.training.start import Start

SETTLES_S = 1.0  # seconds after which a folder that is being removed is gone


class Outputs(NamedTuple):
    """The loop's checkpoints, log and callbacks, and the signal that may stop it.

    lock: of the output_dir; None in processes that do not have it.
    """

    checkpoints: Checkpoints
    log: MetricsLog
    callbacks: Callbacks
    stop: StopSignal
    lock: Lock | None = None


class Done(NamedTuple):
    """The result of the loop.

    step: the last step done. history: the loop's records in metrics.jsonl. stopped_by: why steps remain; "" if none do.
    """

    state: TrainState
    step: int
    history: list[dict[str, Any]]
    stopped_by: str


def loop(
    c: Config,
    start: Start,
    programs: RunPrograms,
    outputs: Outputs,
    batches: Iterator[dict[str, np.ndarray]],
    state: TrainState,
    *,
    evaluates_first: bool,
    layers: dict[str, int],
) -> Done:
    """Trains from `start` to the last step, or until something stops it.

    evaluates_first: before the first step. layers: of each segment, for checkpoints. Raises NonFiniteLoss,
    CheckpointError and OSError.
    """
    checkpoints, log, callbacks, stop, lock = outputs
    history: list[dict[str, Any]] = []
    deferred = DeferredMetrics()

    def current() -> TrainState:
        nonlocal state
        state = up_to_date(programs.train_step, state)
        return state

    def progress_at(step: int) -> dict[str, Any]:
        progress = {"step": step, "samples": position, "samples_per_step": start.samples_per_step}
        return {**progress, "layers": layers, "config": c.to_dict(), **start.identity}

    def check_lock() -> None:
        if lock and (lost := lock.lost()):
            rescue(checkpoints, lost, current(), progress_at(step))

    def written(record: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return record()
        except FileNotFoundError:
            time.sleep(SETTLES_S)  # the whole folder may be on its way out
            check_lock()
            raise

    def report(done: FinishedStep | None) -> None:
        if done is not None:
            times = {"duration_s": done.duration_s, "data_wait_s": done.data_wait_s}
            record = written(functools.partial(log.step, done.step, **done.values, **times, usage=done.usage))
            history.append(record)
            check_finite(done.step, done.values["loss"], done.values["grad_norm"], checkpoints.last, done.finite)
            callbacks.tell(record, current)

    def evaluate(step: int) -> None:
        for scores in programs.evaluate(current().weights):
            history.append(written(functools.partial(log.eval, step, **scores)))
            callbacks.tell(history[-1], current)

    if evaluates_first:
        evaluate(start.first_step)
        deferred.restart_clock()
    step = start.first_step
    position = start.position
    stopping = ""
    for step in range(start.first_step + 1, start.total_steps + 1):
        asked = time.perf_counter()
        batch = next(batches)
        data_wait_s = time.perf_counter() - asked
        on_devices = programs.feed.put([batch[name] for name in programs.arrays])
        with jax.transfer_guard("disallow"):
            state, metrics = programs.train_step(state, *on_devices)
        position += start.samples_per_step
        check_lock()
        report(deferred.push(step, metrics, data_wait_s))
        if programs.one_at_a_time:
            report(deferred.flush())
        checkpoints.check()

        stopping = stop.after(step) or callbacks.stopped_by
        final = step == start.total_steps
        evaluate_now = final or (c.eval_steps and step % c.eval_steps == 0)
        save_now = final or (c.save_steps and step % c.save_steps == 0)
        if evaluate_now or save_now or stopping:
            report(deferred.flush())  # logs step n and checks that it is finite, before its checkpoint is written
            if evaluate_now:
                evaluate(step)
            stopping = stopping or callbacks.stopped_by
            if save_now or stopping:
                checkpoints.save(current(), progress_at(step))
                callbacks.tell({"log": "checkpoint", "step": step}, current, checkpoints.last)
            deferred.restart_clock()
        if programs.store.slots and not (final or stopping):  # all records up to here are written
            programs.store.reported(progress_at(step) | {"output_dir": str(checkpoints.folder.parent)})
        if stopping:
            break
    log.keep_status()
    return Done(state, step, history, stopping if step < start.total_steps else "")


def rescue(checkpoints: Checkpoints, lost: str, state: TrainState, progress: dict[str, Any]) -> NoReturn:
    """Saves the state of a run whose output_dir is gone, and raises CheckpointError.

    lost: see `Lock.lost`. Nothing is saved where another run may write by now, nor by one process of several.
    """
    folder, step = checkpoints.folder.parent, progress["step"]
    found = f"expected {folder} as this run locked it, got one that something {lost} by step {step}"
    if lost == "replaced" or jax.process_count() > 1:
        raise CheckpointError(f"output_dir: {found}; nothing was written there since: start again in another folder")
    with contextlib.suppress(CheckpointError):  # of a write that was under way
        checkpoints.wait()
    for unfinished in checkpoints.folder.glob("*.orbax-checkpoint-tmp"):  # what is left of it
        shutil.rmtree(unfinished, ignore_errors=True)
    checkpoints.save(state, progress)
    checkpoints.wait()
    raise CheckpointError(f"output_dir: {found}; that step is saved in {checkpoints.last}: start again to continue")
