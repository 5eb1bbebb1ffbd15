"""Metrics: what the console, metrics.jsonl and trackers receive, resuming, and reading one step late."""

import fcntl
import io
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.run import console
from surojax.run.console import Console
from surojax.run.metrics import ACCURACY, DeferredMetrics, MetricsLog, perplexity, read_metrics
from surojax.run.nonfinite import NonFiniteLoss, check_finite
from surojax.run.routing import Usage


def open_log(folder, *, console=None, **overrides):
    options = {"total_steps": 10, "tokens_per_step": 1000, "flops_per_token": 2e9, "peak_flops": 8e12} | overrides
    return MetricsLog(folder, console=Console(console or io.StringIO()), **options)


def log_steps(log, first, last, losses=lambda step: 1.0 / step):
    for step in range(first, last + 1):
        log.step(step, loss=losses(step), grad_norm=0.5, lr=3e-4, duration_s=0.5)


# ----------------------------------------------------------------- console


def test_a_log_gets_plain_lines(tmp_path):
    console = io.StringIO()
    with open_log(tmp_path, console=console) as log:
        log.step(1, loss=2.25, grad_norm=1.5, lr=3e-4, duration_s=100.0)
        log.step(2, loss=2.125, grad_norm=1.25, lr=3e-4, duration_s=0.5)
        log.eval(2, loss=2.0, bits_per_byte=2.885, duration_s=0.25)
        log.eval(2, name="pairs", over="6 pairs", loss=1.0, duration_s=0.25, others={ACCURACY: 0.5})
        log.message("checkpoint saved")
    assert console.getvalue().splitlines() == [
        "step  1/10  loss 2.2500  norm 1.500  lr 3.00e-04  10 tok/s  100,000.0 ms  mfu  0.2%  eta --:--",
        # The compiling step is not in the average: 8 steps of 0.5 s are left.
        "step  2/10  loss 2.1250  norm 1.250  lr 3.00e-04  2,000 tok/s  500.0 ms  mfu 50.0%  eta 00:04",
        "eval 2  loss 2.0000  2.8850 bits per byte  perplexity 7.389  250.0 ms",
        "eval 2 of pairs over 6 pairs  loss 1.0000  accuracies 0.5000  250.0 ms",
        "checkpoint saved",
    ]
    assert all(c == "\n" or c.isprintable() for c in console.getvalue())


def test_a_step_of_pairs_says_their_accuracy(tmp_path):
    """And one that took no time, as some clocks have it, has a rate."""
    console = io.StringIO()
    with open_log(tmp_path, console=console) as log:
        record = log.step(1, loss=0.5, grad_norm=1.5, lr=3e-4, duration_s=0.0, **{ACCURACY: 0.75})
    assert "loss 0.5000  accuracy 0.750  norm 1.500" in console.getvalue()
    assert record["tokens_per_second"] == 1000 / 1e-9


def test_a_perplexity_that_no_float_holds_is_infinite():
    values = [perplexity(loss) for loss in (0.0, 708.0, 709.0, 1e4, math.nan)]
    np.testing.assert_equal(values, [1.0, math.exp(708), math.inf, math.inf, math.nan])


def test_mfu_is_left_out_where_the_peak_is_unknown(tmp_path):
    console = io.StringIO()
    with open_log(tmp_path, console=console, peak_flops=None) as log:
        record = log.step(1, loss=2.25, grad_norm=1.5, lr=3e-4, duration_s=0.5)
    assert "mfu" not in record
    assert "mfu" not in console.getvalue()


def test_the_eta_follows_the_recent_steps(tmp_path):
    console = io.StringIO()
    with open_log(tmp_path, console=console, total_steps=930) as log:
        for step in range(1, 31):
            log.step(step, loss=1.0, grad_norm=1.0, lr=1e-4, duration_s=100.0 if step <= 10 else 4.0)
    assert console.getvalue().splitlines()[-1].endswith("eta 1:00:00")  # 900 steps of 4 s


def steps_said(console: io.StringIO) -> list[int]:
    return [int(x) for x in re.findall(r"^step +(\d+)/", console.getvalue(), re.MULTILINE)]


def test_a_line_every_log_steps_and_a_record_every_step(tmp_path):
    console = io.StringIO()
    with open_log(tmp_path, console=console, total_steps=133, log_steps=10, first_step=0) as log:
        log_steps(log, 1, 133)
    assert steps_said(console) == [1, *range(10, 131, 10), 133]  # a cell of a notebook: 15 outputs
    assert len(read_metrics(str(tmp_path / "metrics.jsonl"))) == 133
    lines = default_config().max_steps, default_config().log_steps
    assert lines == (0, 10)  # 100,000 steps print 10,001 lines of 100 characters: 1 MB


def test_slow_steps_print_a_line_a_minute(tmp_path, monkeypatch):
    console = io.StringIO()
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with open_log(tmp_path, console=console, total_steps=9, log_steps=1000) as log:
        for step in range(1, 9):
            log_steps(log, step, step)
            now[0] += 20.0
    assert steps_said(console) == [1, 4, 7]


def test_quiet_prints_nothing_of_steps_and_evaluations(tmp_path):
    console = io.StringIO()
    with open_log(tmp_path, console=console, quiet=True) as log:
        log_steps(log, 1, 10)
        log.eval(10, loss=2.0, duration_s=0.25)
    assert console.getvalue() == ""
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 11


class Pty:
    """A pseudo-terminal: `stream` writes to it, `text` is what it got, `screen` what a user sees of that."""

    def __init__(self, columns: int):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(theirs, "w")
        self.text = ""

    def screen(self) -> list[str]:
        """The rows, with what was overwritten overwritten; each is as long as what was written, blanks included."""
        while select.select([self.ours], [], [], 0)[0]:
            self.text += os.read(self.ours, 1 << 16).decode()
        rows = []
        for line in self.text.split("\n"):
            row: list[str] = []
            for part in line.rstrip("\r").split("\r"):
                row[: len(part)] = part
            rows.append("".join(row))
        return rows


@pytest.fixture(params=[100, 40])
def terminal(request):
    found = Pty(request.param)
    found.columns = request.param
    yield found
    found.stream.close()
    os.close(found.ours)


def test_a_terminal_gets_one_line_that_is_rewritten(tmp_path, terminal, monkeypatch):
    """Evaluations and messages stay above it, and the last step stays at the end."""
    monkeypatch.setattr("surojax.run.metrics.STATUS_S", 0.0)
    with open_log(tmp_path, console=terminal.stream, first_step=4, peak_memory=lambda: 3 << 30) as log:
        log_steps(log, 5, 6)
        status = "step  6/10  loss 0.1667  2,000 tok/s  3.0 GiB  00:02 left"
        assert [row.rstrip() for row in terminal.screen()] == [status[: terminal.columns - 3].rstrip()]
        log.eval(6, loss=2.0, duration_s=0.25)
        log_steps(log, 7, 10)
        log.keep_status()
        log.message("checkpoint saved")
    last = "step 10/10  loss 0.1000  2,000 tok/s  3.0 GiB  00:00 left"[: terminal.columns - 3].rstrip()
    above = "eval 6  loss 2.0000  perplexity 7.389  250.0 ms"
    assert [row.rstrip() for row in terminal.screen()] == [above, last, "checkpoint saved", ""]
    assert all(f"step  {step}/10" in terminal.text for step in range(5, 10))
    parts = terminal.text.replace("\n", "\r").split("\r")
    assert max(len(part) for part in parts if part.startswith("step")) < terminal.columns  # else it would wrap


def test_a_log_that_is_closed_leaves_its_last_line_on_the_terminal(tmp_path, terminal):
    """As a run that an error ends: what follows begins a line of its own."""
    with open_log(tmp_path, console=terminal.stream) as log:
        log_steps(log, 1, 10)
    print("an error", file=terminal.stream, flush=True)
    rows = [row.rstrip() for row in terminal.screen()]
    assert rows[0].startswith("step 10/10") and rows[1:] == ["an error", ""]


def test_a_terminal_is_not_rewritten_more_often_than_one_can_read(tmp_path, terminal):
    with open_log(tmp_path, console=terminal.stream, total_steps=1000) as log:
        log_steps(log, 1, 1000)
    terminal.screen()
    assert "step    1/1000" in terminal.text and "step 1000/1000" in terminal.text
    assert terminal.text.count("/1000") < 200


def test_what_takes_long_is_said_before_it_begins(terminal, monkeypatch, capsys):
    with console.working("compiling", "compiled"):
        assert capsys.readouterr().out == "compiling ...\n"
    assert re.fullmatch(r"compiled in 0\.\d s\n", capsys.readouterr().out)
    with pytest.raises(ValueError), console.working("compiling", "compiled"):
        raise ValueError
    assert capsys.readouterr().out == "compiling ...\n"

    monkeypatch.setattr(console, "CONSOLE", Console(terminal.stream))
    with console.working("compiling", "compiled"):
        assert terminal.screen() == ["compiling ..."]
        time.sleep(1.1)
        assert terminal.screen()[-1].rstrip() == "compiling ... 1 s"
    assert re.fullmatch(r"compiled in 1\.\d s", terminal.screen()[0].rstrip())


# ----------------------------------------------------------------- metrics.jsonl


def test_records(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.75e9)
    with open_log(tmp_path, first_tokens=500, peak_memory=lambda: 3 << 30) as log:
        step = log.step(1, loss=2.25, grad_norm=1.5, lr=3e-4, duration_s=0.5, data_wait_s=0.25)
        evaluation = log.eval(1, loss=2.0, bits_per_byte=2.885, duration_s=0.25)
        assert read_metrics(tmp_path / "metrics.jsonl") == [step, evaluation]  # readable while the run goes on
        named = log.eval(1, loss=1000.0, duration_s=0.25, name="chats")
    assert named["name"] == "chats" and named["perplexity"] == np.inf and "bits_per_byte" not in named
    assert read_metrics(tmp_path / "metrics.jsonl")[2]["perplexity"] is None
    first, second, _ = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert first == (
        '{"log":"step","step":1,"loss":2.25,"norm":1.5,"lr":0.0003,"tokens_per_second":2000.0,"duration_ms":500.0,'
        '"data_wait_ms":250.0,"mfu":0.5,"time":1750000000.0,"tokens":1500,"peak_memory_bytes":3221225472}'
    )
    scores = '"loss":2.0,"bits_per_byte":2.885,"perplexity":7.38905609893065'
    assert second == f'{{"log":"eval","step":1,{scores},"duration_ms":250.0,"time":1750000000.0,"tokens":1500}}'


def test_how_long_the_disks_of_a_step_were_busy(tmp_path):
    """Of each step by itself, on the console beside its duration."""
    console = io.StringIO()
    seconds = iter([0.5, 0.75, 3.0])
    with open_log(tmp_path, console=console, disk_busy_s=lambda: next(seconds)) as log:
        log_steps(log, 1, 3)
    assert [x["disk_busy_ms"] for x in read_metrics(tmp_path / "metrics.jsonl")] == [500.0, 250.0, 2250.0]
    for line, share in zip(console.getvalue().splitlines(), ("100%", "50%", "100%"), strict=True):
        assert f"disk busy {share}  " in line  # of a step of half a second


def test_the_use_of_experts_is_recorded(tmp_path):
    """The largest share of each layer's choices to four digits; the choices themselves every log_steps."""
    usage = Usage(np.array([[2.0, 1.0, 3.0], [4.0, 1.0, 1.0]]), 1)
    with open_log(tmp_path, log_steps=2) as log:
        for step in (1, 2):
            log.step(step, loss=1.0, grad_norm=0.5, lr=3e-4, duration_s=0.5, usage=usage)
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first["largest_expert_share"] == [0.5, 0.6667] and "expert_tokens" not in first
    assert second["expert_tokens"] == [[2, 1, 3], [4, 1, 1]]


def test_float32_losses_come_back_bit_for_bit(tmp_path):
    losses = np.random.default_rng(0).lognormal(size=100).astype(np.float32)
    with open_log(tmp_path, total_steps=100) as log:
        log_steps(log, 1, 100, losses=lambda step: float(losses[step - 1]))
    read = [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert [struct.pack("f", loss) for loss in read] == [struct.pack("f", loss) for loss in losses]


def test_a_loss_that_is_not_finite_is_null(tmp_path):
    console = io.StringIO()
    with open_log(tmp_path, console=console) as log:
        log.step(1, loss=float("nan"), grad_norm=float("inf"), lr=3e-4, duration_s=0.5)
    assert '"loss":null,"norm":null' in (tmp_path / "metrics.jsonl").read_text()  # JSON has no NaN
    assert "loss nan  norm inf" in console.getvalue()


def test_a_resumed_run_ends_with_the_file_of_one_that_never_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.75e9)
    with open_log(tmp_path / "whole") as log:
        log_steps(log, 1, 4)
        log.eval(4, loss=1.0, bits_per_byte=2.0, duration_s=0.5)
        log_steps(log, 5, 8)

    path = tmp_path / "resumed" / "metrics.jsonl"
    with open_log(tmp_path / "resumed") as log:
        log_steps(log, 1, 4)
        log.eval(4, loss=1.0, bits_per_byte=2.0, duration_s=0.5)
        log_steps(log, 5, 6)
    with path.open("ab") as f:
        f.write(b'{"log":"step","step":7,"loss":0.1')  # the kill came in the middle of a line
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 4, 5, 6]
    with open_log(tmp_path / "resumed", first_step=4, first_tokens=4000) as log:
        log_steps(log, 5, 8)

    assert path.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert sorted(p.name for p in path.parent.iterdir()) == ["metrics.jsonl"]


def test_a_line_that_only_lacks_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"log":"step","step":1,"loss":1.0}')
    with open_log(tmp_path, first_step=1) as log:
        log_steps(log, 2, 2)
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_a_fresh_run_replaces_the_file_whatever_it_holds(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("something else\nentirely\n")
    with open_log(tmp_path) as log:
        log_steps(log, 1, 2)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("damage", ["half a li\n", "[1]\n", '{"log":"step"}\n', '\xff{"step":1}\n'])
def test_a_damaged_file_is_named_and_left_alone(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    content = ('{"log":"step","step":1}\n' + damage + '{"log":"step","step":3}\n').encode("latin-1")
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl line 2: expected a record"):
        open_log(tmp_path, first_step=3)
    assert path.read_bytes() == content


def test_a_file_of_an_older_version_is_continued(tmp_path):
    """Without time and tokens, which its records did not have."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"log":"step","step":1,"loss":1.0,"duration_ms":5.0}\n')
    with open_log(tmp_path, first_step=1, first_tokens=1000) as log:
        log_steps(log, 2, 2)
    first, second = read_metrics(path)
    assert "tokens" not in first and second["tokens"] == 2000


def test_a_kill_loses_no_finished_line(tmp_path):
    code = (
        "import os, signal, sys, pathlib\n"
        "from surojax.run.metrics import MetricsLog\n"
        "assert not {'torch', 'tensorboard', 'tensorboardX'} & sys.modules.keys()\n"
        f"log = MetricsLog(pathlib.Path({str(tmp_path)!r}), total_steps=9, tokens_per_step=1, flops_per_token=1.0)\n"
        "for step in range(1, 6):\n"
        "    log.step(step, loss=1.0, grad_norm=1.0, lr=1.0, duration_s=1.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert done.stdout.count("\n") == 5 and done.stderr == ""
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_trackers_get_the_finite_numbers(tmp_path):
    told = []
    with open_log(
        tmp_path, peak_memory=lambda: 3 << 30, report=lambda step, values: told.append((step, values))
    ) as log:
        log_steps(log, 2, 2)
        log.step(3, loss=math.nan, grad_norm=0.5, lr=3e-4, duration_s=0.5)
        log.eval(3, loss=2.0, bits_per_byte=2.885, duration_s=0.25)
        log.eval(3, loss=3.0, duration_s=0.25, name="other")
    train = {"loss": 0.5, "grad_norm": 0.5, "learning_rate": 3e-4, "tokens_per_second": 2000.0, "mfu": 0.5}
    train = {f"train/{name}": value for name, value in (train | {"peak_memory_bytes": 3 << 30}).items()}
    rest = {name: value for name, value in train.items() if name != "train/loss"}
    scores = {"eval/loss": 2.0, "eval/bits_per_byte": 2.885, "eval/perplexity": math.exp(2.0)}
    others = {"eval/other/loss": 3.0, "eval/other/perplexity": math.exp(3.0)}
    assert told == [(2, train), (3, rest), (3, scores), (3, others)]


# ----------------------------------------------------------------- one step late


def device_metrics(step):
    return {"loss": jnp.float32(1.0 / step), "grad_norm": jnp.float32(step)}


def test_metrics_come_one_step_late():
    late, (first, second, third) = DeferredMetrics(), (device_metrics(step) for step in (1, 2, 3))
    with jax.transfer_guard("disallow"):  # as the run does: reading is an explicit transfer
        assert late.push(1, first) is None
        done = [late.push(2, second), late.push(3, third), late.flush()]
        assert late.flush() is None
    assert [(d.step, d.values["loss"], d.values["grad_norm"]) for d in done if d is not None] == [
        (1, 1.0, 1.0),
        (2, 0.5, 2.0),
        (3, float(np.float32(1 / 3)), 3.0),
    ]
    assert all(type(value) is float for d in done if d is not None for value in d.values.values())


def test_push_does_not_wait_for_the_step_it_is_given():
    class Unfinished:
        copying = False

        def copy_to_host_async(self):
            self.copying = True

        def __array__(self, *_args, **_kwargs):
            pytest.fail("waited for a running step")

    late, running = DeferredMetrics(), Unfinished()
    late.push(1, device_metrics(1))
    assert late.push(2, {"loss": running}) is not None  # type: ignore[dict-item]
    assert running.copying


def test_a_duration_runs_from_the_end_of_the_step_before(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    late, durations = DeferredMetrics(), []
    for step, arrival in enumerate([5.0, 5.0, 6.0, 8.0], start=1):  # the 1st arrival is while step 2 is pushed
        now[0] = arrival
        durations.append(late.push(step, device_metrics(step), step / 10))
    now[0] = 9.0
    durations.append(late.flush())
    assert [d.duration_s for d in durations[1:]] == [5.0, 1.0, 2.0, 1.0]  # step 1 includes compilation
    assert [d.data_wait_s for d in durations[1:]] == [0.1, 0.2, 0.3, 0.4]

    now[0] = 100.0  # an evaluation
    late.restart_clock()
    late.push(5, device_metrics(5))
    with pytest.raises(AssertionError, match="flush"):
        late.restart_clock()  # the pending step's time would be lost
    now[0] = 101.5
    done = late.flush()
    assert done is not None and done.duration_s == 1.5


@pytest.mark.parametrize(("loss", "grad_norm"), [(np.nan, 1.0), (np.inf, 1.0), (2.0, np.nan)])
def test_a_number_that_is_not_finite_stops_the_run(tmp_path, loss, grad_norm):
    with pytest.raises(NonFiniteLoss) as error:
        check_finite(7, loss, grad_norm, tmp_path / "checkpoints" / "5")
    message = str(error.value)
    assert "\n" not in message
    assert f"step 7: loss {loss}, gradient norm {grad_norm}" in message
    assert f"the last checkpoint is {tmp_path}/checkpoints/5" in message
    for setting in ("learning_rate", "warmup_steps", "max_grad_norm", "model_dtype"):
        assert setting in message


def test_only_numbers_that_are_not_finite_stop_it_also_without_a_checkpoint():
    check_finite(1, 2.0, 1e30, None)
    with pytest.raises(NonFiniteLoss, match="there is no checkpoint yet"):
        check_finite(1, float("nan"), 1.0, None)
