"""Reports a run: on the console, in `metrics.jsonl` and to trackers; copies metrics from device to host.

Reading a step's loss waits for that step. The loop therefore reads metrics one step late: `DeferredMetrics.push` starts
the copy of step n's metrics and returns the numbers of step n - 1. Step n is already in flight, so the device never
idles.

    with MetricsLog(output_dir, total_steps=..., tokens_per_step=..., flops_per_token=...) as log:
        deferred = DeferredMetrics()
        for step in ...:
            state, device_metrics = train_step(state, batch)         # dispatched; does not wait for the device
            if (done := deferred.push(step, device_metrics)) is not None:
                log.step(done.step, **done.values, duration_s=done.duration_s)

Before an evaluation or a checkpoint of step n, log what `deferred.flush()` returns, so that the file contains every
step up to n before the checkpoint exists. After it, call `deferred.restart_clock()`.

Steps count completed updates: the first step is 1, and a checkpoint of step n contains n updates. A run resumed from it
keeps the records of `metrics.jsonl` up to step n, drops the later ones of the killed run, and logs step n + 1 next. The
file therefore ends with the records of a run that was never stopped.
"""

import contextlib
import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from surojax.errors import ConfigError
from surojax.own_files import check_form, write_bytes
from surojax.run.console import CONSOLE, Console
from surojax.run.routing import Usage
from surojax.untrusted import check_file, parse_json

METRICS_FILE = "metrics.jsonl"
RECORD = {"log": str, "step": range(2**31)}  # the form of a record, see own_files.py
ETA_WINDOW = 20  # steps in the moving average behind the eta
SILENT_S = 60.0  # where steps are slow, a line is printed after so long
EMPTY: Mapping[str, float] = MappingProxyType({})
STATUS_S = 0.1  # the status of a terminal is rewritten no more often
ACCURACY = "rewards/accuracies"  # of pairs, the share whose chosen answer has the larger reward
# The keys of a record that differ between two runs of the same numbers.
TIMINGS = ("tokens_per_second", "duration_ms", "data_wait_ms", "disk_busy_ms", "mfu", "time", "peak_memory_bytes")


class MetricsLog:
    """Writes everything that a run reports under `output_dir`. Use it as a context manager, or call `close()`.

    Args:
      output_dir: an existing or new folder for `metrics.jsonl`.
      total_steps: the step at which the run ends.
      tokens_per_step: tokens of one optimizer step over all devices and microbatches.
      flops_per_token: see `products.token_flops`.
      peak_flops: FLOP/s of all devices together at the run's precision; None leaves out `mfu` (model FLOP utilisation,
        the fraction of that peak: PaLM, arXiv:2204.02311, appendix B).
      first_step: number of steps already done: n for a run resumed from the checkpoint of step n. If it is 0, an
        existing `metrics.jsonl` is replaced.
      first_tokens: number of tokens already seen.
      log_steps: steps between two lines, where there is no terminal; a terminal shows the last step in its status. A
        line is also printed for the first step, the last one, and after SILENT_S without one.
      quiet: nothing of steps and evaluations is printed.
      peak_memory: returns the most bytes of a device's memory that were in use so far, or None if unknown.
      disk_busy_s: returns the seconds so far in which files of the state were read or written; None: there are none.
      console: for the lines and the status.
      layers_with_experts: their numbers in the model, in the order of `Usage`; None: all layers have some.
      report: called with a step and its finite numbers by name, such as "train/loss"; see `trackers.Trackers.log`.
      writes: False: only return the records, in a process that is not the first.

    Raises:
      ConfigError: a line of a resumed run's `metrics.jsonl`, other than the last one, is damaged.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        total_steps: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None = None,
        first_step: int = 0,
        first_tokens: int = 0,
        log_steps: int = 1,
        quiet: bool = False,
        peak_memory: Callable[[], int | None] = lambda: None,
        disk_busy_s: Callable[[], float] | None = None,
        console: Console = CONSOLE,
        layers_with_experts: Sequence[int] | None = None,
        report: Callable[[int, dict[str, float]], None] = lambda step, values: None,
        writes: bool = True,
    ):
        self._total_steps = total_steps
        self._tokens_per_step = tokens_per_step
        self._flops_per_step = flops_per_token * tokens_per_step
        self._peak_flops = peak_flops
        self._first_step = first_step
        self._first_tokens = first_tokens
        self._log_steps = log_steps
        self._quiet = quiet
        self._peak_memory = peak_memory
        self._disk_busy_s = disk_busy_s
        self._disk_was_busy_s = 0.0  # until the last record
        self._console = console
        self._layers_with_experts = layers_with_experts
        self._report = report
        self._recent_s: deque[float] | None = None  # None until the first step, whose duration is mostly compilation
        self._collapsed: set[int] = set()  # layers with experts that a line was printed of
        self._said = -math.inf  # when the last line of a step, or status, was printed

        self._file = None
        if not writes:
            return
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir / METRICS_FILE
        write_bytes(path, b"".join(kept_lines(path, first_step)), lasts=True)
        self._file = path.open("ab")

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.close()
        except OSError as failed:
            if error is None:
                raise
            error.add_note(f"metrics: {failed}")  # the error that ended the run is the one to raise

    def close(self) -> None:
        """Flushes and closes every output, even if one fails. A second call does nothing."""
        with contextlib.ExitStack() as outputs:
            if self._file is not None:
                outputs.callback(self._file.close)
                outputs.callback(self._console.keep_status)

    def step(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        duration_s: float,
        data_wait_s: float = 0.0,
        auxiliary_loss: float | None = None,
        usage: Usage | None = None,
        **others: float,
    ) -> dict[str, Any]:
        """Reports a training step (loss in nats per token) and returns its record in `metrics.jsonl`.

        others: further means of the objective by name, such as "rewards/margins", which the record has after "lr".

        {"log":"step","step","loss","norm","lr","tokens_per_second","duration_ms","data_wait_ms","mfu" (a fraction),
        "time" (seconds since 1970),"tokens" (seen so far, with padding),"peak_memory_bytes" (of a device)}, of which
        "mfu" and the last are there if known. With state in files also "disk_busy_ms", since the last record: as much
        as the step took if it waits for its disks. With experts also "largest_expert_share" (of each layer with
        experts, see `Usage`), every `log_steps` steps "expert_tokens" (of each such layer and expert), and
        "auxiliary_loss".

        data_wait_s: the host waited so long for the batch, while the device may have been busy. Floats are written with
        all digits, so a float32 is read back bit-exactly. A value that is not finite is written as null, since JSON has
        no NaN.
        """
        duration_s = max(duration_s, 1e-9)
        tokens_per_second = self._tokens_per_step / duration_s
        record = {"log": "step", "step": step, "loss": loss, "norm": grad_norm, "lr": lr, **others}
        record |= {"tokens_per_second": tokens_per_second, "duration_ms": duration_s * 1e3}
        record["data_wait_ms"] = data_wait_s * 1e3
        if self._disk_busy_s is not None:
            busy_s = self._disk_busy_s()
            record["disk_busy_ms"] = (busy_s - self._disk_was_busy_s) * 1e3
            self._disk_was_busy_s = busy_s
        if auxiliary_loss is not None:
            record["auxiliary_loss"] = auxiliary_loss
        if usage is not None:
            record |= self._usage(step, usage)
        if self._peak_flops is not None:
            record["mfu"] = self._flops_per_step / duration_s / self._peak_flops
        record |= self._progress(step)
        if (peak := self._peak_memory()) is not None:
            record["peak_memory_bytes"] = peak
        self._append(record)
        train = {"loss": loss, "grad_norm": grad_norm, "learning_rate": lr, "tokens_per_second": tokens_per_second}
        train |= {name: record[name] for name in ("mfu", "peak_memory_bytes", "auxiliary_loss") if name in record}
        train |= others
        if usage is not None:
            train["largest_expert_share"] = max(record["largest_expert_share"])
        self._scalars("train", step, train)
        self._say_step(record, self._eta(step, duration_s))
        return record

    def _usage(self, step: int, usage: Usage) -> dict[str, Any]:
        """Makes a record's fields about experts. Prints one line for each layer that uses too few experts."""
        new = [l for l in usage.collapsed if l not in self._collapsed]
        self._collapsed.update(new)
        if new and self._file is not None:
            used = min(usage.used_L[l] for l in new)
            numbers = new if self._layers_with_experts is None else [self._layers_with_experts[l] for l in new]
            self._console.line(
                f"step {step}: layer {', '.join(map(str, numbers))}: nearly all tokens choose the same {used:.1f} of "
                f"{usage.tokens_LE.shape[1]} experts; router_aux_loss_coef spreads them"
            )
        fields: dict[str, Any] = {"largest_expert_share": [round(float(x), 4) for x in usage.largest_share_L]}
        if step % self._log_steps == 0:
            fields["expert_tokens"] = usage.tokens_LE.astype(int).tolist()
        return fields

    def _progress(self, step: int) -> dict[str, Any]:
        """Makes a record's fields for the time, and the tokens seen up to a step."""
        tokens = self._first_tokens + (step - self._first_step) * self._tokens_per_step
        return {"time": time.time(), "tokens": tokens}

    def _say_step(self, record: dict[str, Any], eta: str) -> None:
        """Prints the line of a step if one is due, or shows the step in the status of a terminal."""
        if self._file is None or self._quiet:
            return
        step = record["step"]
        now = time.monotonic()
        last = step == self._total_steps
        step_of = f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}  loss {record['loss']:.4f}"
        step_of += f"  accuracy {record[ACCURACY]:.3f}" if ACCURACY in record else ""
        rate = f"{record['tokens_per_second']:,.0f} tok/s"
        use = f"  {record['peak_memory_bytes'] / 2**30:.1f} GiB" if "peak_memory_bytes" in record else ""
        if "disk_busy_ms" in record:
            use += f"  disk busy {min(1.0, record['disk_busy_ms'] / record['duration_ms']):.0%}"
        if self._console.is_terminal:
            if last or now - self._said >= STATUS_S:
                self._said = now
                self._console.status(f"{step_of}  {rate}{use}  {eta} left")
            return
        first = step == self._first_step + 1
        if first or last or step % self._log_steps == 0 or now - self._said >= SILENT_S:
            self._said = now
            mfu = f"  mfu {record['mfu']:5.1%}" if "mfu" in record else ""
            self._console.line(
                f"{step_of}  norm {record['norm']:.3f}  lr {record['lr']:.2e}  {rate}  "
                f"{record['duration_ms']:,.1f} ms{mfu}{use}  eta {eta}"
            )

    def eval(
        self,
        step: int,
        *,
        loss: float,
        duration_s: float,
        bits_per_byte: float | None = None,
        name: str = "",
        over: str = "",
        others: Mapping[str, float] = EMPTY,
    ) -> dict[str, Any]:
        """Reports an evaluation after `step` steps (loss in nats per token) and returns its record in `metrics.jsonl`.

        {"log":"eval","step","loss","perplexity","duration_ms","time","tokens"}, "bits_per_byte" if it is of text, and
        "name" if it is of a validation dataset. over: what its means are of, such as "6 pairs". others: further means
        of the objective by name, whose loss is then no number of nats per token, so that there is no perplexity.
        """
        scores = {"loss": loss, **others}
        if bits_per_byte is not None:
            scores["bits_per_byte"] = bits_per_byte
        if not others:
            scores["perplexity"] = perplexity(loss)
        record = {"log": "eval", "step": step, **({"name": name} if name else {}), **scores}
        record |= {"over": over} if over else {}
        record |= {"duration_ms": duration_s * 1e3, **self._progress(step)}
        self._append(record)
        self._scalars(f"eval/{name}" if name else "eval", step, scores)
        bits = "" if bits_per_byte is None else f"  {bits_per_byte:.4f} bits per byte"
        last = f"perplexity {scores['perplexity']:.4g}" if not others else means_in_line(others)
        what = f"{name and f' of {name}'}{over and f' over {over}'}"
        self.message(f"eval {step}{what}  loss {loss:.4f}{bits}  {last}  {duration_s * 1e3:,.1f} ms")
        return record

    def message(self, text: str) -> None:
        """Prints a line, above the status if there is one."""
        if self._file is not None and not self._quiet:
            self._console.line(text)

    def keep_status(self) -> None:
        """Keeps the last step on the terminal, since no further step follows."""
        self._console.keep_status()

    def _append(self, record: dict[str, Any]) -> None:
        """Writes and flushes one line, so that a SIGKILL loses at most the line being written."""
        if self._file is None:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "something removed it while the run writes it")
            self._file.write(json.dumps(finite, separators=(",", ":"), allow_nan=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            error.filename = self._file.name
            raise

    def _scalars(self, group: str, step: int, scalars: dict[str, float]) -> None:
        if self._file is None:
            return
        self._report(step, {f"{group}/{name}": v for name, v in scalars.items() if math.isfinite(v)})

    def _eta(self, step: int, duration_s: float) -> str:
        """Estimates the remaining time as [H:]MM:SS, from the mean of the last steps. The first step is not counted."""
        if self._recent_s is None:
            self._recent_s = deque(maxlen=ETA_WINDOW)
        else:
            self._recent_s.append(duration_s)
        if not self._recent_s:
            return "--:--"
        return tqdm.format_interval((self._total_steps - step) * sum(self._recent_s) / len(self._recent_s))


class FinishedStep(NamedTuple):
    """A finished step's metrics, on the host, except `finite`, which is still on the devices, or None.

    usage: of the experts, if there are any.
    """

    step: int
    values: dict[str, float]
    duration_s: float
    data_wait_s: float
    finite: jax.Array | None = None
    usage: Usage | None = None


class DeferredMetrics:
    """Returns each step's metrics one step late, so that the device never waits for the host to read them.

    A step's duration is the wall time between the arrival of the previous step's metrics (or the start of the clock)
    and the arrival of its own. The next step is dispatched before the host waits for this one, so the duration is the
    device's time for a step, or the host's if the host is slower. To exclude an evaluation or a checkpoint, call
    `flush()` before it and `restart_clock()` after it.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, dict[str, Any], float, jax.Array | None] | None = None
        self._clock = time.perf_counter()

    def push(self, step: int, device_metrics: dict[str, Any], data_wait_s: float = 0.0) -> FinishedStep | None:
        """Starts to copy the metrics of `step` to the host. Returns the previous step, or None if there is none.

        data_wait_s: the host waited so long for the step's batch.
        """
        scalars = dict(device_metrics)
        finite = scalars.pop("finite", None)  # each process has a part of it; it is read only if a number is not finite
        # JAX counts this deliberate, asynchronous copy as an implicit transfer, which a guard would refuse.
        with jax.transfer_guard_device_to_host("allow"):
            for value in jax.tree.leaves(scalars):
                value.copy_to_host_async()
        previous = self.flush()
        self._pending = (step, scalars, data_wait_s, finite)
        return previous

    def flush(self) -> FinishedStep | None:
        """Waits for the last pushed step and returns its metrics; None if they were returned before."""
        if self._pending is None:
            return None
        step, scalars, data_wait_s, finite = self._pending
        self._pending = None
        on_host = jax.device_get(scalars)
        statistics = on_host.pop("statistics", None)
        values = {name: float(value) for name, value in on_host.items()}
        started = self._clock
        self._clock = time.perf_counter()
        usage = None if statistics is None else Usage.of(statistics)
        return FinishedStep(step, values, self._clock - started, data_wait_s, finite, usage)

    def restart_clock(self) -> None:
        """Excludes the time since the last finished step from the next step's duration."""
        assert self._pending is None, "flush() before restart_clock(): the pending step's time would be lost"
        self._clock = time.perf_counter()


def means_in_line(means: Mapping[str, float]) -> str:
    """Formats means in a line: the last word of each name, and the number."""
    return "  ".join(f"{name.rpartition('/')[2]} {value:.4f}" for name, value in means.items())


def perplexity(loss: float) -> float:
    """Returns exp(loss) of a loss in nats per token; infinite if too large for a float."""
    return math.exp(loss) if loss < 709 else math.inf if not math.isnan(loss) else loss


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns the records of a `metrics.jsonl`, oldest first. An incomplete last line, left by a kill, is skipped.

    Raises:
      ConfigError: another line is not a record.
      OSError: it cannot be read, or is a pipe or a device.
    """
    return [record for record, _ in _parse(Path(path))]


def _parse(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Yields (record, line) for each line of `metrics.jsonl`. An incomplete last line is skipped."""
    records = []
    check_file(path)
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
            check_form(record, RECORD)
        except ValueError as e:
            if number == len(lines):
                break
            raise ConfigError(
                f'{path} line {number}: expected a record like {{"log":"step","step":1,...}}, got {line[:60]!r}; '
                "remove that line, or move the file away"
            ) from e
        records.append((record, line))
    return records


def kept_lines(path: Path, last_step: int) -> list[bytes]:
    """Returns the lines of records up to `last_step`, unchanged; none if it is 0 or there is no file."""
    old = _parse(path) if last_step and path.exists() else []
    return [line + b"\n" for record, line in old if record["step"] <= last_step]
