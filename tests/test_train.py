"""A run: killed, stopped, continued and refused in every way, it ends with the numbers of one that never stopped.

Exact comparison throughout where the program is the same: the same compiled step on the same numbers.
"""

import base64
import contextlib
import errno
import fcntl
import importlib
import json
import math
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
import small
from commands import generate
from flax import nnx

from surojax import CheckpointError, ConfigError, read_metrics, train
from surojax.assembly.from_config import architecture, from_config
from surojax.cluster.early import OTHERS, STOPPED
from surojax.config import flags
from surojax.config.checks import restored_config
from surojax.config.fields import default_config
from surojax.data.tokenizer import ByteTokenizer
from surojax.inference import prompts
from surojax.inference.trained_model import load_trained
from surojax.memory import nvme
from surojax.memory.lock import locked
from surojax.models.decoder import Decoder
from surojax.placement import cuda_plugin
from surojax.placement.mesh import make_mesh
from surojax.planner import file_time, gpus, prediction, seen, traffic
from surojax.planner.gpus import GPUS
from surojax.planner.prediction import Prediction
from surojax.planner.run_plan import programs as step_programs
from surojax.run import checkpoint, on_disk, stop
from surojax.run.metrics import ACCURACY, TIMINGS, MetricsLog
from surojax.run.restore import restore_weights
from surojax.run.stop import EarlyStop, StopSignal
from surojax.training import evaluation, own_loop, resume, run_summary as training_report
from surojax.training.start import check_schedule

module = importlib.import_module("surojax.train")  # `surojax.train` is the function

CONFIG = """
from surojax import default_config

def get_config():
    c = default_config()
    c.data, c.output_dir = {data!r}, {output_dir!r}
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 320, 32, 64
    c.model.num_hidden_layers, c.model.num_attention_heads, c.model.num_key_value_heads = 2, 2, 1
    c.model_dtype, c.sequence_len, c.per_device_batch_size = "float32", 32, 8
    c.max_steps, c.learning_rate, c.warmup_steps = 12, 1e-2, 2
    c.eval_steps, c.eval_batches, c.save_steps, c.save_total_limit = 4, 2, 3, 9
    c.sample_tokens = 5
    return c
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), rng.integers(2, 8))) for _ in range(60)]
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n".join(" ".join(rng.choice(words, 8)) for _ in range(900)))
    return path


@pytest.fixture
def config(tmp_path, text):
    """The run that all others are compared with, into a folder of its own."""
    (tmp_path / "config.py").write_text(CONFIG.format(data=str(text), output_dir=str(tmp_path / "run")))
    return flags.load_config(str(tmp_path / "config.py"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """The output folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "config.py").write_text(CONFIG.format(data=str(text), output_dir=str(folder / "run")))
    result = train(flags.load_config(str(folder / "config.py")))
    assert result.finished and result.checkpoint == folder / "run/checkpoints/12"
    assert result.history == read_metrics(folder / "run/metrics.jsonl")
    return folder / "run"


def test_a_second_run_in_the_same_folder_is_refused(config, tmp_path, monkeypatch):
    """Before anything is compiled, and the first one's files are left alone; a disk without locks is used without."""
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(module, "training_batches", lambda *_, **__: pytest.fail("went on"))
    with locked(tmp_path / "run/lock", "output_dir"):
        with pytest.raises(ConfigError, match=rf"^output_dir: .*/run is used by another run \(process {os.getpid()}\)"):
            train(config)
        assert [p.name for p in (tmp_path / "run").iterdir()] == ["lock"]
    with locked(tmp_path / "run/lock", "output_dir"):
        pass

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with locked(tmp_path / "run/lock", "output_dir"), locked(tmp_path / "run/lock", "output_dir"):
        pass


def records(folder: Path) -> list[dict]:
    """What metrics.jsonl says, but for timings."""
    return [{k: v for k, v in r.items() if k not in TIMINGS} for r in read_metrics(folder / "metrics.jsonl")]


def steps_saved(folder: Path) -> list[int]:
    return [int(p.name) for p in on_disk.steps_in(folder / "checkpoints")]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def killed_after(whole: Path, step: int, folder: Path) -> None:
    """What a run leaves that is killed when the checkpoint of `step` is whole: the log may be further."""
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    for path in on_disk.steps_in(folder / "checkpoints"):
        if int(path.name) > step:
            shutil.rmtree(path)


def test_the_undisturbed_run(whole):
    """Each step once, evaluations and checkpoints when they are due, the last ones at the end."""
    found = records(whole)
    assert [r["step"] for r in found if r["log"] == "step"] == list(range(1, 13))
    assert [r["step"] for r in found if r["log"] == "eval"] == [4, 8, 12]
    assert steps_saved(whole) == [3, 6, 9, 12]
    assert found[-1]["loss"] < found[4]["loss"] < np.log(320)
    rates = [r["lr"] for r in found if r["log"] == "step"]
    assert rates[0] == rates[1] / 2 and rates[1] == np.float32(1e-2) and rates[-1] == pytest.approx(1e-3)


def error_of(argv: list[str]) -> str:
    """The line that the command ends with; a text as exit code means 1."""
    with pytest.raises(SystemExit) as caught:
        module.main(argv)
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code
    return caught.value.code


# ----------------------------------------------------------------- killed

KILL = """
import os, signal, sys, time
from surojax.run import checkpoint
from surojax.run import metrics
from surojax.training import evaluation
import surojax.train

train = sys.modules["surojax.train"]

def kill_at(owner, name, when):
    plain = getattr(owner, name)
    def kill(*args, **keywords):
        if when(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args, **keywords)
    setattr(owner, name, kill)

{moment}
train.main(sys.argv[1:])
"""

MOMENTS = {  # in this order, each with what the run leaves behind
    "before the first checkpoint": ("kill_at(metrics.MetricsLog, 'step', lambda log, step: step == 2)", []),
    "while one is written": (
        "kill_at(checkpoint, 'list_files', lambda folder: folder.name == '6.orbax-checkpoint-tmp')",
        [3],
    ),
    "during evaluation": ("kill_at(evaluation.Evaluation, '__call__', lambda evaluate, weights: True)", [3]),
    "between two": ("kill_at(metrics.MetricsLog, 'step', lambda log, step: step == 8 and not time.sleep(1))", [3, 6]),
}


@pytest.mark.full
def test_killed_at_any_moment_and_started_again_it_ends_as_if_nothing_had_been(
    whole, config, tmp_path, capsys, monkeypatch
):
    """SIGKILL in four processes, one after the other, in the same folder: loss, norm, rate, evaluations to the bit."""
    run = tmp_path / "run"
    for name, (moment, saved) in MOMENTS.items():
        command = [sys.executable, "-c", KILL.format(moment=moment), "--config", str(tmp_path / "config.py")]
        assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL, name
        assert steps_saved(run) == saved, name
    with pytest.raises(ZeroDivisionError), monkeypatch.context() as patch:
        patch.setattr(module, "sample_text", lambda *_: 1 // 0)  # after the last checkpoint
        train(config)
    assert records(run) == records(whole)
    before = contents(run)
    result = train(config)
    assert result.finished and int(result.state.step) == 12 and result.history == []
    assert "nothing left to train" in capsys.readouterr().out
    assert contents(run) == before


# ----------------------------------------------------------------- stopped


def signal_at(monkeypatch, step: int, *numbers: int) -> None:
    """These signals arrive when this step is reported."""
    assert threading.current_thread() is threading.main_thread(), "else the signal would end the tests"
    plain = MetricsLog.step

    def report(log, n, **keywords):
        if n == step:
            for i, number in enumerate(numbers):
                time.sleep(1.1 * stop.DOUBLE_S if i else 0)
                os.kill(os.getpid(), number)
        return plain(log, n, **keywords)

    monkeypatch.setattr(MetricsLog, "step", report)


@pytest.mark.full(after=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_saves_and_ends_cleanly_and_the_run_continues(whole, config, tmp_path, capsys, monkeypatch, number):
    """Exit code 75, "try again", which schedulers can tell from the end of a run."""
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        signal_at(patch, 4, number)
        with pytest.raises(SystemExit) as ended:
            module.main(["--config", str(tmp_path / "config.py")])
    assert ended.value.code == 75
    printed = capsys.readouterr()
    assert signal.getsignal(number) is handler
    assert steps_saved(tmp_path / "run") == [3, 5]  # step 4 is reported when step 5 is on its way
    assert f"stopped by {number.name} after step 5 of 12; start again to continue" in printed.out
    assert f"{ {'SIGINT': 'Ctrl-C'}.get(number.name, number.name) }: stopping after this step" in printed.out
    command = f"surojax train --config {tmp_path / 'config.py'}"
    assert printed.out.splitlines()[-1] == f"resume: {command}" and printed.err == ""
    if number == signal.SIGTERM:
        module.main(["--config", str(tmp_path / "config.py"), "--quiet"])
        printed = capsys.readouterr().out
        assert "step  " not in printed and "eval " not in printed
        assert records(tmp_path / "run") == records(whole)
        assert steps_saved(tmp_path / "run") == [3, 5, 6, 9, 12]
        first, last = records(whole)[4], records(whole)[-1]
        for expected in (
            f"continuing from {tmp_path}/run/checkpoints/5",
            "budget: 3,072 tokens, ",
            f"evaluation over 512 tokens: loss {first['loss']:.4f} -> {last['loss']:.4f}",
            "--- continuation",
            "7 steps in",
            f"checkpoint: {tmp_path}/run/checkpoints/12",
            f"sample: surojax generate --checkpoint {tmp_path}/run --prompt TEXT",
            f"export: surojax convert --checkpoint {tmp_path}/run --out {tmp_path}/run/export",
            f"resume: {command} --quiet --config.max_steps=24",
            "compiling the step and the evaluation ...\ncompiled in ",
            f"TensorBoard events: {tmp_path}/run/tensorboard; to see them: ",
            f"tensorboard --logdir {tmp_path}/run/tensorboard\n",
        ):
            assert expected in printed


@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize("number", [signal.SIGTERM, *OTHERS], ids=lambda n: n.name)
def test_a_signal_before_the_loop_ends_with_the_code_that_asks_for_another_start(monkeypatch, capsys, number):
    old = signal.getsignal(number)
    monkeypatch.setattr(module, "parse_flags", lambda *_: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as ended:
        module.main([])
    assert ended.value.code == STOPPED and signal.getsignal(number) is old
    assert capsys.readouterr().err == f"stopped by {number.name}: start again to continue\n"


@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize("number", [signal.SIGTERM, *OTHERS], ids=lambda n: n.name)
def test_a_request_to_stop_is_recorded_once_and_said_once(number, capsys):
    """Also if the scheduler repeats it, or asks with another signal later."""
    with EarlyStop(STOPPED), StopSignal() as stopping:
        assert stopping.after(1) == ""
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stopping.after(2) == number.name
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.after(3) == number.name
        time.sleep(0.2)  # for the thread that hears them
    assert capsys.readouterr().out == f"{number.name}: stopping after this step\n"


@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize("number", OTHERS, ids=lambda n: n.name)
def test_a_signal_that_is_ignored_or_handled_by_the_caller_stops_nothing(number):
    """`nohup` ignores SIGHUP; a program that calls `train` may use SIGUSR1 itself."""
    received = []
    old = signal.getsignal(number)
    try:
        for handler in (signal.SIG_IGN, lambda *_: received.append(number)):
            signal.signal(number, handler)
            with EarlyStop(STOPPED), StopSignal() as stopping:
                os.kill(os.getpid(), number)
                assert stopping.after(1) == "" and signal.getsignal(number) is handler
        assert received == [number]
    finally:
        signal.signal(number, old)


CLOSED = """
import fcntl, signal, sys, termios, time
from pathlib import Path
from surojax.run.console import CONSOLE, say
from surojax.run.stop import EarlyStop, StopSignal
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
with EarlyStop(75):
    with StopSignal() as stopping:
        for step in range(1, 400):
            say(f"step {step}")
            CONSOLE.status(f"{step} steps")
            time.sleep(0.05)
            if why := stopping.after(step):
                Path(sys.argv[1]).write_text(why)
                say("saved")
                sys.exit(75)
"""


@pytest.mark.usefixtures("no_nohup")
def test_a_terminal_that_closes_ends_a_run_after_it_has_saved(tmp_path):
    """SIGHUP, and then every line that is printed would be an error."""
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-c", CLOSED, str(tmp_path / "saved")]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    said = b""
    while b"step 2" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait(60) == STOPPED
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_lines_after_the_terminal_has_closed_are_no_error(tmp_path):
    """Also before SIGHUP comes, which here does not: what a full file says is still raised."""
    code = """
import os, signal, sys
from pathlib import Path
from surojax.run.console import Console
os.read(int(sys.argv[2]), 1)
Console().line("nobody reads this")
Console().status("nor this")
print("this is discarded, too")
try:
    Console(open("/dev/full", "w")).line("x")
except OSError as error:
    Path(sys.argv[1]).write_text(str(error.errno))
"""
    terminal, theirs = pty.openpty()
    closed, close = os.pipe()
    command = [sys.executable, "-c", code, str(tmp_path / "error"), str(closed)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, pass_fds=[closed])
    os.close(theirs)
    os.close(terminal)
    os.write(close, b"x")
    assert process.wait(60) == 0
    assert (tmp_path / "error").read_text() == str(errno.ENOSPC)


@pytest.mark.usefixtures("no_nohup")
def test_a_signal_while_processes_connect_counts_afterwards(monkeypatch):
    """For whoever receives signals then: JAX, if they are connected; this handler, if that failed."""
    received = []
    with EarlyStop(STOPPED) as early:
        with early.deferred() as asked:
            assert not asked()
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked() and not received
            signal.signal(signal.SIGTERM, lambda number, _: received.append(number))  # as JAX does
        assert received == [signal.SIGTERM]
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        for number in OTHERS:
            os.kill(os.getpid(), number)
        time.sleep(0.2)  # for the thread that hears them, which passes them on at once
        assert set(received) == {signal.SIGTERM}
        monkeypatch.undo()
    with pytest.raises(SystemExit) as ended, EarlyStop(STOPPED) as early, early.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        raise ConfigError("process 0 left")
    assert ended.value.code == STOPPED


def test_a_run_whose_time_is_up_saves_and_stops(config, tmp_path, capsys):
    result = train(config, max_minutes=0)
    assert not result.finished and steps_saved(tmp_path / "run") == [1]
    assert "stopped by --max-minutes after step 1 of 12" in capsys.readouterr().out


@pytest.mark.parametrize("connected", [False, True])
def test_a_process_whose_time_is_up_tells_the_others(connected, monkeypatch):
    """With JAX's signal. All stop when they agree on a step; those that do not know why name the signal."""
    sent = []
    agreed = iter([False, True, True])
    monkeypatch.setattr(stop.jax.distributed, "is_initialized", lambda: connected)
    monkeypatch.setattr(stop.os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(stop.multihost_utils, "reached_preemption_sync_point", lambda step: next(agreed))
    stopping = StopSignal(until=time.monotonic() - 1)
    assert stopping.after(1) == ("" if connected else "--max-minutes")
    assert stopping.after(2) == "--max-minutes" == stopping.received
    assert sent == [(os.getpid(), signal.SIGTERM)] * connected
    assert StopSignal(until=time.monotonic() + 900).after(3) == ("SIGTERM" if connected else "")
    assert len(sent) == connected
    stopping._receive(signal.SIGUSR1, None)
    stopping._receive(signal.SIGUSR2, None)
    assert stopping.received == "--max-minutes" and len(sent) == 3 * connected
    told = StopSignal()
    told._receive(signal.SIGUSR1, None)
    told._receive(signal.SIGUSR2, None)
    assert told.received == "SIGUSR1"


@pytest.mark.full
def test_evaluations_that_no_longer_improve_finish_a_run(config, tmp_path, capsys):
    """Without learning all are alike. A start that was killed counts, a further one has nothing left; 0 goes on."""
    changed(config, learning_rate=1e-12, weight_decay=0.0, eval_steps=1, early_stopping_patience=4, sample_tokens=0)
    assert not train(changed(config, max_steps=12), max_minutes=0).finished
    result = train(config)
    of_eval = [(record["step"], record["loss"]) for record in records(tmp_path / "run") if record["log"] == "eval"]
    assert result.finished and int(result.state.step) == 5 and [step for step, _ in of_eval] == [1, 2, 3, 4, 5]
    assert result.stopped_by == f"early stopping (no evaluation below {of_eval[0][1]:.4f} in the last 4)"
    assert f"stopped by {result.stopped_by} after step 5 of 12; early_stopping_patience=0" in capsys.readouterr().out
    again = train(config)
    assert again.finished and (again.history, again.stopped_by) == ([], result.stopped_by)
    assert f"nothing left to train: {result.checkpoint} is at step 5 of 12; early stopping" in capsys.readouterr().out
    assert int(train(changed(config, early_stopping_patience=0)).state.step) == 12


@pytest.mark.full
def test_updates_under_the_next_step_leave_the_same_run(whole, config, tmp_path, monkeypatch):
    """Evaluated in the middle, stopped, continued and ended: losses, evaluations, checkpoints and weights of a run in
    which every step ends with its update."""
    names = ("offload_optimizer", "offload_master", "offload_grads", "offload_weights", "overlap_update")
    config.update(dict.fromkeys(names, True))
    with monkeypatch.context() as patch:
        signal_at(patch, 4, signal.SIGTERM)
        stopped = train(config)
    assert not stopped.finished and int(stopped.state.step) == 5
    result = train(config)
    assert result.finished and records(tmp_path / "run") == records(whole)
    expected = load_trained(whole / "checkpoints/12").weights
    chex.assert_trees_all_equal(load_trained(result.checkpoint).weights, expected)
    moved = lambda tree: jax.tree.leaves(jax.device_get(tree))
    chex.assert_trees_all_equal(moved(result.state.weights), moved(expected))


def test_ctrl_c_twice_aborts(config, tmp_path, capsys, monkeypatch):
    signal_at(monkeypatch, 4, signal.SIGINT, signal.SIGINT)
    then_signals = MetricsLog.step

    def report(log, n, **keywords):
        while n == 4 and steps_saved(tmp_path / "run") != [3]:  # it is written in the background
            time.sleep(0.01)
        return then_signals(log, n, **keywords)

    monkeypatch.setattr(MetricsLog, "step", report)
    with pytest.raises(SystemExit, match="130"):
        module.main(["--config", str(tmp_path / "config.py")])
    assert steps_saved(tmp_path / "run") == [3]
    printed = capsys.readouterr()
    assert printed.err.startswith("surojax.train: aborted; continue with: surojax train --config")
    explained = "Ctrl-C: stopping after this step; press again to stop now, which loses what is after checkpoint 3\n"
    assert explained in printed.out and printed.out.index(explained) < printed.out.index("Ctrl-C: stopping now")


def test_ctrl_c_twice_at_once_is_one(capsys, monkeypatch):
    """A press that comes before the first one's answer can be read loses nothing."""
    monkeypatch.setattr(stop, "DOUBLE_S", 30.0)
    with StopSignal() as stopping:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stopping.after(3) == "SIGINT"
        time.sleep(0.2)  # for the thread that hears them
    said = capsys.readouterr().out
    assert said.count("Ctrl-C: ") == 1 and "which loses everything: there is no checkpoint yet" in said


SLOW = """
import signal
import sys
import jax, jax.numpy as jnp
from surojax.run import stop

signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in the background of a shell do not have
jax.config.update("jax_cpu_enable_async_dispatch", sys.argv[2] == "waits")
stop.GRACE_S = 0.3
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 10**9, lambda _, x: jnp.cos(x) @ x, x))
x = jnp.ones((64, 64))
step = slow.lower(x).compile()

def main():
    try:
        with stop.EarlyStop(75, "aborted"):
            if sys.argv[1] == "loop":
                with stop.StopSignal():
                    print("step", flush=True)
                    jax.block_until_ready(step(x))
            print("outside", flush=True)
            jax.block_until_ready(step(x))
    except KeyboardInterrupt:
        print("aborted in the main thread")
        sys.exit(stop.ABORTED)

stop.ended_at_once(main)
"""


@pytest.mark.parametrize(
    ("place", "how", "number", "code", "last"),
    small.quick_at(
        [
            ("loop", "computes", signal.SIGINT, 130, "Ctrl-C: stopping now\r\naborted\r\n"),
            ("loop", "waits", signal.SIGINT, 130, "Ctrl-C: stopping now\r\naborted in the main thread\r\n"),
            ("outside", "computes", signal.SIGINT, 130, "outside\r\naborted\r\n"),
            ("outside", "computes", signal.SIGTERM, 75, "outside\r\nstopped by SIGTERM: start again to continue\r\n"),
        ],
        0,
    ),
)
def test_a_signal_is_answered_while_a_step_takes_minutes(place, how, number, code, last):
    """On a pseudo-terminal, at once; the second Ctrl-C ends the process, wherever its main thread is: within a program,
    or waiting for one that goes on as Python ends."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", SLOW, place, how], stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = ""

    def until(text: str) -> None:
        nonlocal said
        while text not in said:
            assert select.select([ours], [], [], 60)[0], said
            said += os.read(ours, 4096).decode()

    try:
        until("step" if place == "loop" else "outside")
        time.sleep(0.3)
        process.send_signal(number)
        if place == "loop":
            until("Ctrl-C: stopping after this step; press again to stop now, which loses everything: there is no")
            process.send_signal(number)  # too early to have read that
            time.sleep(1.1 * stop.DOUBLE_S)
            assert process.poll() is None
            process.send_signal(number)
        until(last)
        assert process.wait(20) == code
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_it_runs_in_a_thread(whole, config, tmp_path):
    """As a web server or a notebook extension would: no signals there, and no argv."""
    killed_after(whole, 9, tmp_path / "run")
    results = []
    thread = threading.Thread(target=lambda: results.append(train(config)))
    thread.start()
    thread.join()
    assert results[0].finished and records(tmp_path / "run") == records(whole)


# ----------------------------------------------------------------- continued


@pytest.mark.full
def test_on_other_numbers_of_devices(whole, config, tmp_path, request):
    """One device, then eight, then one; the effective batch stays. Losses differ by the order of float32 sums: at most
    1e-5 after nine steps, which amplify the rounding of the first."""
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in half the time
    request.addfinalizer(lambda: jax.config.update("jax_disable_most_optimizations", False))
    legs = [(3, 8, 3, True), (9, 1, 1, False)]  # continue from this step, devices, ZeRO level, offloaded
    folder = whole
    for step, devices, zero_level, offloaded in legs:
        killed_after(folder, step, tmp_path / f"from-{step}")
        folder = tmp_path / f"from-{step}"
        config.output_dir, config.gpus, config.per_device_batch_size = str(folder), devices, 8 // devices
        config.zero_level = zero_level
        config.offload_master = config.offload_optimizer = config.offload_weights = offloaded
        result = train(config)
        found, expected = records(folder), records(whole)
        assert [(r["log"], r["step"]) for r in found] == [(r["log"], r["step"]) for r in expected]
        for a, b in zip(found, expected, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert len(result.state.master["blocks"]["mlp"]["w_up"].sharding.device_set) == devices


def test_a_disk_without_room_for_a_checkpoint_is_seen_before_anything_else(config, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(CheckpointError, match=r"no room for a checkpoint in .*run: it needs .* MiB, 0.0 MiB are free"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_fields_that_differ_are_named_with_what_they_are_in():
    old = {"lora": {"rank": 8, "alpha": 16}, "seed": 1, "teacher": None}
    assert resume.differences(old, old) == {}
    new = {"lora": {"rank": 4, "alpha": 16}, "teacher": {"path": "a"}, "gpus": 2}
    found = {"lora.rank": (8, 4), "seed": (1, None), "teacher": (None, {"path": "a"}), "gpus": (None, 2)}
    assert resume.differences(old, new) == found
    assert resume.differences(new, old) == {name: (b, a) for name, (a, b) in found.items()}
    assert [*resume.differences(old, new)] == ["gpus", "lora.rank", "seed", "teacher"]  # as they are said


def test_as_many_samples_a_step_unless_a_setting_says_otherwise(whole, config, tmp_path, capsys):
    """gpus=0 on another machine: the config is the same, the batch would not be."""
    killed_after(whole, 6, tmp_path / "run")
    saved = tmp_path / "run/checkpoints/6"
    found = f"checkpoint {saved}"
    assert on_disk.read_meta(saved)["samples_per_step"] == 8 and config.per_device_batch_size == 8
    config.gpus = 0
    with pytest.raises(
        CheckpointError, match=r"8 samples a step.* 64 on the 8 devices here; per_device_batch_size=1 kee"
    ):
        resume.check_batch(config, found, 8, 64, {})
    with pytest.raises(CheckpointError, match=r"devices here; gpus=8 goes on with 64"):
        resume.check_batch(config, found, 4, 64, {})
    assert not capsys.readouterr().out
    resume.check_batch(config, found, 8, 8, {})
    resume.check_batch(config, found, 8, 64, {"gpus": (0, 8)})
    assert capsys.readouterr().out == "note: a step has 64 samples from here on, it had 8\n"


def test_a_run_that_goes_on_says_its_next_rate(config):
    """A cosine from 2e-4 to 2e-5 over 20 steps, ten of them done."""
    c = config
    c.learning_rate, c.warmup_steps = 2e-4, 0
    assert training_report.rate_text(c, 0, 20) == training_report.rate_text(c, 20, 20) == "learning rate 0.0002"
    assert (
        training_report.rate_text(c, 10, 20) == "learning rate 1.03e-04 in step 11, 2.00e-05 in the last (peak 0.0002)"
    )


@pytest.mark.full
def test_more_steps_than_before(whole, config, tmp_path, capsys):
    killed_after(whole, 12, tmp_path / "run")
    config.max_steps = 14
    result = train(config)
    assert [r["step"] for r in result.history] == [13, 14, 14] and steps_saved(tmp_path / "run")[-1] == 14
    assert records(tmp_path / "run")[:15] == records(whole)
    said = capsys.readouterr().out
    assert "continuing with changed settings: max_steps 12 -> 14" in said and " in step 13, " in said
    config.max_steps = 13
    assert train(config).finished
    assert "is at step 14 of 13; raise max_steps to go on" in capsys.readouterr().out


@pytest.mark.full
def test_from_a_checkpoint_of_another_folder(whole, config, tmp_path, capsys):
    """It is only read; and when the same command is started again, the run goes on from its own checkpoints."""
    before = contents(whole)
    config.resume_from_checkpoint = str(whole / "checkpoints/6")
    train(config)
    expected = [r for r in records(whole) if r["step"] > 6]
    assert records(tmp_path / "run") == expected and contents(whole) == before
    shutil.rmtree(tmp_path / "run/checkpoints/12")
    train(config)
    assert f"continuing from {tmp_path}/run/checkpoints/9" in capsys.readouterr().out
    assert records(tmp_path / "run") == expected


# ----------------------------------------------------------------- sampled from


def planned_weights(model):
    """Float32 weights on the first device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=here), model.abstract_params())


def test_the_command_continues_a_text_from_a_checkpoint(whole, capsys):
    """Greedily: each token is the likeliest that the plain model finds with the checkpoint's weights."""
    model, weights, tokenizer, _, length = load_trained(whole)
    c = restored_config(on_disk.read_meta(whole / "checkpoints/12")["config"])
    assert length == c.sequence_len
    assert not np.allclose(weights["outer"]["norm"], 1, atol=1e-3)  # training has moved what was 1 at the beginning
    generate.main(["--checkpoint", str(whole), "--prompt", "abc", "--max-tokens", "8", "--temperature", "0"])
    text = capsys.readouterr().out
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(architecture(c), rngs=nnx.Rngs(0))))
    logits = jax.jit(lambda ids: nnx.merge(graph, weights)(ids[None])[0])
    ids = np.zeros(11, np.int32)
    ids[:3] = tokenizer.encode("abc")
    for i in range(3, 11):
        ids[i] = np.argmax(logits(ids)[i - 1, : tokenizer.vocab_size])
    assert text == tokenizer.decode(ids) + "\n"
    newest = restore_weights(whole / "checkpoints/12", planned_weights(model))
    chex.assert_trees_all_equal(weights, newest)


def test_a_runs_template_and_another(whole):
    assert load_trained(whole).template is None
    template = load_trained(whole, chat_template="chatml").template
    assert template is not None and template.source == "chat_template chatml"


def test_what_is_sampled_is_what_the_command_line_and_the_config_say(whole, config, capsys, monkeypatch):
    """Every option has a value that is not its default."""
    asked = []

    def spy(model, weights, prompts, **options):
        asked.append(([prompt.tolist() for prompt in prompts], options))
        return [[104, 105] for _ in prompts]

    monkeypatch.setattr(generate, "generate_batch", spy)
    options = {"max_tokens": 7, "temperature": 1.25, "top_p": 0.75, "seed": 3}
    flags_of = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", str(value))]
    generate.main(["--checkpoint", str(whole), "--prompt", "abc", *flags_of])
    assert capsys.readouterr().out == "abchi\n"
    generate.main(["--checkpoint", str(whole), "--prompt", ""])
    generate.main(["--checkpoint", str(whole), "--prompt", "a", "--prompt", "bc"])
    assert capsys.readouterr().out.endswith("ahi\n---\nbchi\n")
    words = ByteTokenizer()
    ends = {"stop_ids": words.stop_ids, "vocab_size": words.vocab_size}
    defaults = {"max_tokens": 200, "temperature": 0.8, "top_p": 1.0, "seed": 0} | ends
    expected = [([list(b"abc")], options | ends), ([[words.eos_id]], defaults), ([list(b"a"), list(b"bc")], defaults)]
    assert asked == expected
    asked.clear()

    def spy_on_one(model, weights, prompt, **options):
        asked.append((prompt.tolist(), options))
        return iter([104, 105])

    monkeypatch.setattr(prompts, "generate", spy_on_one)

    config.sample_prompt, config.sample_tokens, config.sample_temperature, config.seed = "abcd", 9, 0.5, 4
    run = SimpleNamespace(model=None)
    assert training_report.sample_text(config, run, {}, words, None) == "--- prompt\nabcd\n--- continuation\nhi\n---"
    monkeypatch.setattr(training_report, "continue_ids", lambda *_, **__: "a\x1b[2J\tb\nc")
    monkeypatch.setattr(training_report, "held_out_prompt", lambda *_: words.encode("from the text"))
    config.sample_prompt = ""
    text = training_report.sample_text(config, run, {}, words, None)
    assert text == "--- prompt\nfrom the text\n--- continuation\na\\x1b[2J\tb\nc\n---"
    assert asked[0] == (list(b"abcd"), {"max_tokens": 9, "temperature": 0.5, "seed": 4} | ends)


# ----------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.hidden_size": 64}, "is of another run: model.hidden_size is 32 there and 64 here; use the same, or"),
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"sequence_len": 16}, "sequence_len is 32 there and 16 here"),
        ({"data": ""}, "is of another run: data is '[0-9a-f]{16}' there and '[0-9a-f]{16}' here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(whole, config, tmp_path, capsys, changes, message):
    other = tmp_path / "other.txt"
    other.write_text("other words\n" * 900)
    killed_after(whole, 9, tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(CheckpointError, match=message):
        train(changed(config, **{name: value or str(other) for name, value in changes.items()}))
    assert contents(tmp_path / "run") == before
    assert "compiled" not in capsys.readouterr().out


def changed(config, **changes):
    config.update_from_flattened_dict(changes)
    return config


def test_where_to_resume_from_is_checked(whole, config, tmp_path):
    killed_after(whole, 9, tmp_path / "run")
    before = contents(tmp_path / "run")
    for wanted, message in [
        ("no", r"'no', but .*/run/checkpoints/9 exists; choose another output_dir"),
        (str(tmp_path / "nowhere"), r"expected 'auto', 'no' or a checkpoint, got '.*nowhere', which holds none"),
        (str(tmp_path / "run/checkpoints/6"), r"expected .*/9, the newest in output_dir, got .*/6; move the newer"),
    ]:
        with pytest.raises(ConfigError, match=f"resume_from_checkpoint: {message}"):
            train(changed(config, resume_from_checkpoint=wanted))
    assert contents(tmp_path / "run") == before


def test_a_run_that_began_elsewhere_goes_on_from_its_own_checkpoint(tmp_path, monkeypatch):
    """The same command goes on from the newest one; another start than its own is refused."""
    own, other = tmp_path / "run/checkpoints/9", tmp_path / "other/checkpoints/6"
    for path in (own, other):
        (path / "meta").mkdir(parents=True)
    said = {"resume_from_checkpoint": str(other)}
    monkeypatch.setattr(on_disk, "read_meta_of_run", lambda path: {"config": said})
    monkeypatch.setattr(resume, "check_same", lambda *_: None)

    def found(wanted) -> Path | None:
        c = default_config()
        c.resume_from_checkpoint = str(wanted)
        return resume.find_resume(c, tmp_path / "run", {}, 1)

    assert found(other) == found("auto") == found(own) == found(own.parents[1]) == own
    said["resume_from_checkpoint"] = "auto"
    assert found(own) == own
    with pytest.raises(ConfigError, match=r"expected .*/run/checkpoints/9, the newest in output_dir, got .*/6; move"):
        found(other)
    shutil.rmtree(own)
    assert found(other) == found(other.parent) == other and found("auto") is None and found("no") is None


def test_a_run_on_a_gpu_with_slow_copies_says_so(config, capsys, monkeypatch):
    """With the line that installs the plugin of 0.12: if something leaves the GPU, and the plugin is older."""

    def said(version, offloads=True, platform="gpu") -> list[str]:
        monkeypatch.setattr(cuda_plugin, "plugin_version", lambda: version)
        c = changed(config, offload_grads=offloads)
        run = from_config(c, make_mesh(jax.devices()[:1]), total_steps=1)
        device = SimpleNamespace(platform=platform, device_kind="NVIDIA H200")
        training_report.describe_run(c, run, [device], {"weights": 1})
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("offloads: ")]

    (line,) = said((0, 11, 2))
    assert "CUDA plugin 0.11.2" in line and "pip install -U 'surojax[cuda]'" in line
    assert said((0, 12)) == said((0, 11, 2), offloads=False) == said((0, 11, 2), platform="cpu") == []


def test_kernels_are_taken_before_anything_is_compiled_and_stored_after(config, monkeypatch):
    order: list[tuple] = []
    folder = Path(config.output_dir)

    def recorded(of, name, result):
        monkeypatch.setattr(of, name, lambda *arguments: order.append((name, *arguments)) or result(*arguments))

    for of in (module, own_loop):
        recorded(of, "take_choices", lambda *arguments: None)
    recorded(module, "with_reference", lambda c, run, setup, start: start)
    recorded(module, "compile_programs", lambda *arguments: SimpleNamespace(train_step=None))
    recorded(module, "store_choices", lambda *arguments: None)
    recorded(module, "print_prediction", lambda *arguments: pytest.fail("enough"))
    recorded(own_loop, "with_reference", lambda *arguments: pytest.fail("enough"))
    for run in (train, own_loop.OwnLoop):
        with pytest.raises(pytest.fail.Exception, match="enough"):
            run(config)
    names = ["take_choices", "with_reference", "compile_programs", "store_choices", "print_prediction"]
    assert [name for name, *_ in order] == [*names, *names[:2]]
    assert order[0][2:] == order[5][2:] == (None, folder, "cpu") and order[3][2:] == (folder, "cpu")


def test_what_a_run_on_a_gpu_says_of_itself(config, capsys):
    """In place of one: memory of the host apart, which a CPU's has in it, and how documents are kept apart."""
    c = changed(config, sample_packing=True, offload_optimizer=True)
    run = from_config(c, make_mesh(jax.devices()[:1]), total_steps=1)
    for platform, kind in (("gpu", "NVIDIA H100 80GB HBM3"), ("cpu", "cpu")):
        training_report.describe_run(
            c, run, [SimpleNamespace(platform=platform, device_kind=kind)], {"weights": 3 << 30}
        )
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith(f" on 1 x {kind}") and any(
            line.startswith("memory per device: 3.00 GiB") for line in lines
        )
        of_gpu = [line for line in lines if line.startswith("host memory per device: ") or "documents" in line]
        assert len(of_gpu) == (2 if platform == "gpu" else 0), lines


@pytest.mark.parametrize(
    "platform, stats, peak",
    [("gpu", {"peak_bytes_in_use": 5}, 5), ("gpu", None, None), ("gpu", {}, None), ("cpu", {}, None)],
)
def test_the_peak_of_a_device(platform, stats, peak):
    device = SimpleNamespace(
        platform=platform, memory_stats=lambda: stats if platform == "gpu" else pytest.fail("asked")
    )
    assert training_report.peak_bytes(device) == peak


def test_a_damaged_checkpoint_stops_the_run_and_the_older_one_continues_it(whole, config, tmp_path, capsys):
    killed_after(whole, 9, tmp_path / "run")
    newest = tmp_path / "run/checkpoints/9"
    file = max((newest / "moments").rglob("*"), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    before = contents(tmp_path / "run")
    error = error_of(["--config", str(tmp_path / "config.py")])
    for expected in (str(newest), file.name, f"to continue from {newest.with_name('6')}, move it away"):
        assert expected in error
    assert "compiled" not in capsys.readouterr().out and contents(tmp_path / "run") == before
    newest.rename(tmp_path / "damaged")
    assert train(config, max_minutes=0).history[0]["step"] == 7


def rewritten(found: Path, **changes) -> None:
    """Changes the meta data of a checkpoint, and the checksum of that file, as nothing of ours would."""
    file = found / "meta/metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    files = json.loads((found / on_disk.FILES).read_text())
    files["meta/metadata"] = on_disk._measure(file)
    (found / on_disk.FILES).write_text(json.dumps(files))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -3}, "step: expected a whole number from 0 to 2147483647, got -3"),
        ({"step": 8}, "step: expected 9, the name of its folder, got 8"),
        ({"step": True}, "step: expected a whole number from 0 to 2147483647, got True"),
        ({"samples": 1.5}, "samples: expected a whole number from 0 to 9223372036854775807, got 1.5"),
        ({"samples_per_step": 0}, "samples_per_step: expected a whole number from 1 to 2147483647, got 0"),
    ],
)
def test_progress_that_no_run_has_is_refused(whole, config, tmp_path, changes, message):
    killed_after(whole, 9, tmp_path / "run")
    rewritten(tmp_path / "run/checkpoints/9", **changes)
    with pytest.raises(
        CheckpointError, match=f"checkpoints/9 cannot be read \\({message}\\); to continue from .*/6, move"
    ):
        train(config)


def test_folders_that_are_no_checkpoints_are_passed_over(whole, tmp_path):
    """Python calls each of these names a digit."""
    killed_after(whole, 9, tmp_path / "run")
    for name in ("³", "٣", "0012"):
        (tmp_path / "run/checkpoints" / name).mkdir()
    assert steps_saved(tmp_path / "run") == [3, 6, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adamw8bit"}, "expected the state of the same optimizer, got that of another one"),
        ({"optimizer": "normuon"}, "expected the state of the same optimizer, got that of another one"),
    ],
)
def test_a_checkpoint_that_the_plan_contradicts_is_refused_before_compiling(
    whole, config, tmp_path, monkeypatch, changes, message
):
    killed_after(whole, 9, tmp_path / "run")
    before = contents(tmp_path / "run")
    monkeypatch.setattr(module, "compile_programs", lambda *_: pytest.fail("compiled"))
    with pytest.raises(CheckpointError, match=message):
        train(changed(config, **changes))
    assert contents(tmp_path / "run") == before


def test_a_resume_line_sets_no_flag_twice(config):
    argv = [
        "--config",
        "x.py",
        "--config.max_steps=3",
        "--config.seed",
        "1",
        "--config.max_steps",
        "5",
        "--heartbeat",
        "9",
    ]
    rest = ["--config", "x.py", "--config.seed", "1", "--heartbeat", "9"]
    assert module.going_on(argv, config, 12) == [*rest, "--config.max_steps=24"]
    config.max_steps, config.num_epochs = 0, 3
    for short in (["--num_epochs", "3"], ["--num-epochs=3"]):
        assert module.going_on([*rest, *short], config, 12) == [*rest, "--config.num_epochs=6"]
    assert module.going_on([*rest, "--config.num_epochs=3"], config, 12) == [*rest, "--config.num_epochs=6"]


@pytest.mark.parametrize(
    "fields, result, export, lines",
    [
        ({}, {}, None, ["sample: P --prompt TEXT", "export: C", "resume: A --config.max_steps=24"]),
        ({"chat_template": "chatml"}, {}, None, ["sample: P --chat", "export: C", "resume: A --config.max_steps=24"]),
        ({}, {"finished": False}, None, ["sample: P --prompt TEXT", "export: C", "resume: A"]),
        ({"lora": True}, {"finished": False}, None, ["sample: P --prompt TEXT", "resume: A"]),  # without its base
        (
            {"lora": True, "model_path": "m"},
            {"finished": False},
            None,
            ["sample: P --prompt TEXT", "export: C", "resume: A"],
        ),
        (
            {"lora": True, "model_path": "m", "from_scratch": True},
            {"finished": False},
            None,
            ["sample: P --prompt TEXT", "resume: A"],
        ),
        (
            {},
            {"stopped_by": "early"},
            None,
            ["sample: P --prompt TEXT", "export: C", "resume: A --config.early_stopping_patience=0"],
        ),
        ({}, {"finished": False, "stopped_by": "SIGTERM"}, "x.gguf", ["sample: P --prompt TEXT", "resume: A"]),
        ({}, {}, "x.gguf", ["sample: P --prompt TEXT", "resume: A --config.max_steps=24 --export x-2.gguf"]),
        ({"objective": "reward"}, {"finished": False}, None, ["export: C", "resume: A"]),
        (
            {"objective": "reward", "lora": True, "model_path": "m"},
            {"finished": False},
            None,
            ["export: M", "resume: A"],
        ),
    ],
)
def test_what_can_follow_a_run(config, tmp_path, monkeypatch, fields, result, export, lines):
    monkeypatch.chdir(tmp_path)
    c = default_config()
    c.update({"max_steps": 12, "output_dir": "run"} | fields)
    again = ["surojax", "train", "--config", "x.py", *(["--export", export] if export else [])]
    given = {"finished": True, "stopped_by": "", "checkpoint": None, "state": SimpleNamespace(step=12)} | result
    words = {
        "P": "surojax generate --checkpoint run",
        "C": "surojax convert --checkpoint run --out run/export",
        "M": "surojax convert merge m run/adapter run/export",
        "A": " ".join(again[:4] if result == {} and export else again),
    }
    expected = [" ".join(words.get(word, word) for word in line.split()) for line in lines]
    assert module.further_commands(c, SimpleNamespace(**given), again, export) == expected
    given["checkpoint"] = Path("other/checkpoints/3")  # the run wrote none
    assert "other/checkpoints/3" in module.further_commands(c, SimpleNamespace(**given), again, export)[
        0
    ] or "M" in str(lines)
    Path("x-2.gguf").touch()
    assert module.free_path(Path("x.gguf")) == Path("x-3.gguf")


def test_one_evaluation_is_one_number(tmp_path):
    with MetricsLog(tmp_path, total_steps=9, tokens_per_step=1, flops_per_token=1.0) as log:
        log.eval(0, loss=3.4043, bits_per_byte=2.5, duration_s=1.0)
        expected = "evaluation: loss 3.4043, 2.5000 bits per byte, perplexity 30.09 (step 0)"
        assert evaluation.evaluation_summary(tmp_path) == expected
        log.eval(9, loss=float("inf"), duration_s=1.0)
        expected = "evaluation: loss 3.4043 -> nan, perplexity 30.09 -> nan (steps 0 -> 9)"
        assert evaluation.evaluation_summary(tmp_path) == expected
        for step, accuracy in ((0, 0.25), (9, 0.5)):
            log.eval(step, name="pairs", loss=1.0, duration_s=1.0, over="6 pairs", others={ACCURACY: accuracy})
    pairs = "evaluation of pairs over 6 pairs: loss 1.0000 -> 1.0000, accuracy 0.250 -> 0.500 (steps 0 -> 9)"
    assert evaluation.evaluation_summary(tmp_path) == f"{expected}\n{pairs}"
    (tmp_path / "metrics.jsonl").write_text('{"log": "step", "step": 1}\n')
    assert evaluation.evaluation_summary(tmp_path) == "evaluation: none yet"


@pytest.mark.parametrize(
    "value, number",
    [(2, 2.0), (-0.5, -0.5), (2**63 - 1, 2.0**63), (2**63, math.nan), (-(2**63), math.nan)]
    + [(value, math.nan) for value in (None, True, "1", [1])],
)
def test_numbers_of_records(value, number):
    """NaN for what is none: a file may have been changed by others."""
    np.testing.assert_equal(evaluation._number({"loss": value}, "loss"), number)


def test_adapters_say_how_many_parameters_train(config, capsys):
    c = changed(config, lora=True, lora_rank=2, lora_target_modules="q_proj,v_proj")
    devices = jax.devices()[:1]
    training_report.describe_run(c, from_config(c, make_mesh(devices), total_steps=1), devices, {"weights": 1})
    trained = 2 * 2 * ((32 + 32) + (32 + 16))  # layers, rank, widths of wq and wv
    out = capsys.readouterr().out
    assert f"surojax: 0.0M parameters, of which {trained} train (1.13%), on 1 x" in out and "not sharded" not in out


@small.needs(3)
def test_matrices_that_the_devices_do_not_divide_are_named(config, capsys):
    for count, size, named in ((3, 32, True), (3, 33, False), (1, 32, False)):
        c = changed(config, zero_level=3)
        c.model.update({"hidden_size": size, "head_dim": 16})
        devices = jax.devices()[:count]
        training_report.describe_run(c, from_config(c, make_mesh(devices), total_steps=1), devices, {"weights": 1})
        out = capsys.readouterr().out
        note = "note: not sharded over 3 devices, which divide none of their dimensions: "
        assert note in out if named else "not sharded" not in out


def test_a_run_ends_with_its_page(whole, tmp_path):
    """As `surojax report` writes it, beside what was planned."""
    text = (whole / "report.html").read_text()
    last = [x for x in read_metrics(whole / "metrics.jsonl") if x["log"] == "step"][-1]
    assert f"surojax report {whole}" in text and f"{last['loss']:.4f}" in text and ">plan<" in text
    assert (
        "and files, estimated" in text
        and "no time is predicted: cpu is no GPU whose facts are known" in text
        and ">moments<" in text
        and ">total<" in text
    )
    need = {"weights": 3 << 30}
    classes = {"weights": {"device": 3 << 30, "host": 1 << 29, "nvme": 0}}
    line = training_report.write_page(tmp_path, need, classes, Prediction(), 1)
    assert line.startswith(
        "note: no report.html of the run: RUN: expected the folder of a run, with metrics.jsonl, got"
    )
    shutil.copy(whole / "metrics.jsonl", tmp_path)
    assert training_report.write_page(tmp_path, need, classes, Prediction(tokens_per_s_per_gpu=400.0), 8) == (
        f"curves: {tmp_path}/report.html"
    )
    text = (tmp_path / "report.html").read_text()
    assert ">3,200<" in text and ">3.00<" in text and all(f'data-bytes="{n}">' in text for n in (3 << 30, 1 << 29, 0))


def test_the_budget_of_a_run():
    """Of a new model beside 20 tokens for each parameter; frozen parameters have no gradient."""
    model = SimpleNamespace(num_parameters=100, num_trained_parameters=100)
    assert training_report.budget(model, 5000, is_new=True) == (  # type: ignore[arg-type]
        "budget: 5,000 tokens, 50.00 for each parameter (20 for each would be 2,000); 3.00e+06 FLOPs (6 x parameters x "
        "tokens)"
    )
    model.num_parameters = model.num_trained_parameters = 1000
    for tokens, is_compared in ((5, True), (4, False)):
        assert ("for each parameter" in training_report.budget(model, tokens, is_new=True)) == is_compared  # type: ignore[arg-type]
    model.num_parameters, model.num_trained_parameters = 100, 10
    assert training_report.budget(model, 5000, is_new=False) == (  # type: ignore[arg-type]
        "budget: 5,000 tokens; 2.10e+06 FLOPs (6 x trained + 4 x frozen parameters x tokens)"
    )


def test_warmup_longer_than_the_data_lasts(config, tmp_path):
    with pytest.raises(ConfigError, match=r"expected at most the \d+ steps of num_epochs=1, got 1000; shorten"):
        train(changed(config, max_steps=0, warmup_steps=1000))
    assert not (tmp_path / "run").exists()
    c = changed(config, warmup_steps=6, cooldown_steps=4)
    check_schedule(c, 10)
    with pytest.raises(ConfigError, match=r"expected at most the 9 steps of num_epochs=1, got 10; shorten them"):
        check_schedule(c, 9)


@pytest.mark.full
def test_a_known_gpu_is_predicted_and_a_failure_ends_nothing(config, tmp_path, capsys, monkeypatch):
    """Predicted beside measured tokens/s, and one line where the compiled step cannot be read."""
    short = changed(config, max_steps=2, save_steps=0, eval_steps=0, sample_tokens=0)
    predicted = Prediction(0.5, [0.4, 0.6], uncorrected_s=0.5, tokens_per_s_per_gpu=512.0)
    monkeypatch.setattr(seen, "LEAST_STEPS", 1)
    monkeypatch.setattr(prediction, "step_prediction", lambda step, run, batch, gpu: predicted)
    monkeypatch.setattr(gpus, "find_gpu", lambda kind: GPUS["rtx4090"])
    short.rates_file = str(tmp_path / "rates.json")
    assert train(short).finished
    assert not (tmp_path / "rates.json").exists()  # on a CPU
    monkeypatch.setattr(seen, "of_run", lambda c, _, found, steps: f"seen: {found.not_predicted}, {len(steps)} steps")
    said = capsys.readouterr().out
    assert "predicted: 500.0 ms a step (400 to 600), 512 tok/s" in said
    assert re.search(r"tok/s: measured [\d,]+, predicted 512 \(427 to 640\), measured / predicted [\d.]+", said)
    page = (tmp_path / "run" / "report.html").read_text()
    events = re.search(r'id="events">(.*?)</script>', page)
    assert events and json.loads(zlib.decompress(base64.b64decode(events[1]))) and "measured / predicted" in page
    assert "dot" in (trace := tmp_path / "run" / "trace.json").read_text()
    assert train(changed(short, max_steps=3)).finished
    monkeypatch.setattr(prediction, "step_prediction", lambda *_: {}["a text of XLA"])
    capsys.readouterr()
    assert train(changed(short, max_steps=4)).finished and not trace.exists()  # that of the run before
    assert 'id="events"' not in (tmp_path / "run" / "report.html").read_text()
    said = capsys.readouterr().out
    assert "note: no time is predicted: KeyError: 'a text of XLA'" in said and "tok/s: measured" not in said
    assert "seen: the compiled step cannot be read, 1 steps" in said


@pytest.mark.parametrize("classes", small.quick_at([(("optimizer", "master"),), (("weights", "grads", "residual"),)]))
def test_a_step_with_files_is_predicted_by_what_its_disks_did(config, tmp_path, capsys, monkeypatch, classes):
    """From the programs that were compiled, at the measured rates: twice as long with disks of a hundredth."""
    (tmp_path / "files").mkdir()
    in_files = {f"offload_{name}": "nvme" for name in classes} | {"nvme_path": str(tmp_path / "files")}
    short = changed(config, max_steps=2, save_steps=0, eval_steps=0, sample_tokens=0, recompute_block=True, **in_files)
    monkeypatch.setattr(gpus, "find_gpu", lambda kind: GPUS["rtx4090"])
    seconds = {}
    for rate in (1e9, 1e7):
        measured = nvme.Claimed(f"disks of {rate:.0e}", rate, rate)
        monkeypatch.setattr(nvme, "claim", lambda store, measured=measured, **_: contextlib.nullcontext(measured))
        assert train(changed(short, output_dir=str(tmp_path / measured.line))).finished
        said = capsys.readouterr().out
        found = re.search(r"predicted: ([\d,.]+) ms a step", said)
        assert found, said
        seconds[rate] = float(found[1].replace(",", "")) / 1e3
    run = from_config(short, make_mesh(jax.devices()[:1]), 1)
    parts = step_programs(run, make_mesh(jax.devices()[:1]), traffic.batch_of(short))
    moved = sum(file_time.moved(parts))
    assert moved / 1e7 < seconds[1e7] < 2 * moved / 1e7 and seconds[1e9] < seconds[1e7]


# ----------------------------------------------------------------- ended by what goes wrong


def test_a_loss_that_is_not_finite_ends_the_run(config, tmp_path):
    """The first steps still fit into float32; what follows is infinite, and no checkpoint holds it."""
    argv = ["--config", str(tmp_path / "config.py"), "--config.learning_rate=1e30", "--config.save_steps=1"]
    error = error_of(argv)
    found = records(tmp_path / "run")
    last = tmp_path / f"run/checkpoints/{steps_saved(tmp_path / 'run')[-1]}"
    assert found[-1]["loss"] is None or found[-1]["norm"] is None
    assert error.startswith(f"surojax.train: error: step {found[-1]['step']}: loss ")
    assert f"the last checkpoint is {last}" in error
    for path in on_disk.steps_in(tmp_path / "run/checkpoints"):
        assert int(path.name) < found[-1]["step"]


def test_a_full_disk_ends_the_run_and_room_continues_it(config, tmp_path, capsys, monkeypatch):
    """The write of step 6 fails at its end, in the background, and the run stops soon after."""
    plain = checkpoint.list_files

    def fail(folder):
        if folder.name == "6.orbax-checkpoint-tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(folder)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "list_files", fail)
        error = error_of(["--config", str(tmp_path / "config.py")])
    run = tmp_path / "run"
    assert error.startswith(f"surojax.train: error: could not write checkpoint {run}/checkpoints/6 (")
    assert "No space left on device" in error and error.endswith(f"{run}/checkpoints/3")
    assert capsys.readouterr().err == "" and steps_saved(run) == [3] and records(run)[-1]["step"] < 12
    assert train(config, max_minutes=0).history[0]["step"] == 4 and steps_saved(run) == [3, 4]


def test_metrics_that_cannot_be_written_end_the_run_in_one_line(config, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MetricsLog, "step", fail)
    error = error_of(["--config", str(tmp_path / "config.py")])
    assert error.startswith("surojax.train: error: [Errno 28] No space left on device; when that is repaired")


@pytest.mark.full
def test_histories_of_magnitudes_are_part_of_checkpoints(config, tmp_path):
    """A run with delayed scaling continues with the scales that it would have had."""
    config.recipe, config.max_steps, config.eval_steps = "fp8_hybrid", 6, 0
    done = train(config)
    config.output_dir, config.resume_from_checkpoint = str(tmp_path / "again"), str(tmp_path / "run/checkpoints/3")
    continued = train(config)
    steps = lambda result: [(r["step"], r["loss"], r["norm"]) for r in result.history if r["log"] == "step"]
    assert steps(continued) == steps(done)[3:]
    assert np.array_equal(continued.state.history, done.state.history) and (done.state.history[..., :6] > 0).all()
    config.output_dir, config.fp8_amax_history = str(tmp_path / "shorter"), 2
    assert train(config).state.history.shape[-1] == 2
