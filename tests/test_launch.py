"""The supervisor of several processes, with processes that need no JAX."""

import contextlib
import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest

import surojax
from surojax import ConfigError, launch
from surojax.cluster import group, watch
from surojax.cluster.early import OTHERS, STOPPED, stop_text, stopping_signals
from surojax.cluster.group import Ended
from surojax.cluster.supervised import Supervised
from surojax.errors import REFUSED, Refused, ending, ends_with_code

# What each test's processes do, by their number `i` of `n`; the launcher appends its options to the command.
PROGRAM = """
import os, pathlib, signal, sys, time
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
i, n = int(options["--process_id"]), int(options["--num_processes"])
folder = pathlib.Path(sys.argv[1])
print(f"process {i} of {n} with {os.environ.get('XLA_FLAGS', '')}", flush=True)
"""


def command(folder, program: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM + program, str(folder)]


def test_lines_have_the_number_of_their_process(tmp_path, capfd):
    assert launch.supervise(command(tmp_path, ""), 3, devices=2) == 0
    lines = capfd.readouterr().out.splitlines()
    flags = "--xla_force_host_platform_device_count=2"
    assert [line.partition(" with ")[0] for line in sorted(lines[:3])] == [f"[{i}] process {i} of 3" for i in range(3)]
    assert all(line.endswith(flags) and line.count("device_count") == 1 for line in lines[:3])
    assert lines[3:] == ["surojax.launch: all processes have finished"]


@pytest.mark.parametrize(
    "death, words",
    [("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"), ("sys.exit('no disk')", "exit code 1")],
)
def test_the_first_that_dies_is_named_and_the_others_end(tmp_path, capfd, monkeypatch, death, words):
    monkeypatch.setattr(group, "GRACE_S", 0.2)
    started = time.monotonic()
    program = f"if i == 1: {death}\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    assert launch.supervise(command(tmp_path, program), 3, devices=1) == 1
    assert time.monotonic() - started < 10
    assert f"surojax.launch: process 1 was the first to end ({words})" in capfd.readouterr().out


def test_the_others_have_time_to_end_by_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(group, "GRACE_S", 60)
    started = time.monotonic()
    program = "if i == 1: sys.exit('no disk')\ntime.sleep(0.7)\n(folder / 'saved').touch()"
    assert launch.supervise(command(tmp_path, program), 2, devices=1) == 1
    assert (tmp_path / "saved").exists() and time.monotonic() - started < 30


def test_a_stopped_process_is_the_reason_if_another_one_ends(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(group, "GRACE_S", 0.2)
    program = "if i == 0: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(0.5)\nsys.exit(1)"
    assert launch.supervise(command(tmp_path, program), 2, devices=1) == 1
    assert "surojax.launch: process 0 does not answer: it is stopped" in capfd.readouterr().out


def test_they_start_again(tmp_path, capfd):
    """As often as --restarts says; with the same number, and an end that is asked for is no error."""
    program = """
count = len(list(folder.glob(f"{i}-*")))
(folder / f"{i}-{count}").touch()
sys.exit([1, 1, %d][count] if i == n - 1 else %d)
"""
    assert launch.supervise(command(tmp_path, program % (STOPPED, STOPPED)), 2, devices=1, restarts=3) == STOPPED
    out = capfd.readouterr().out
    assert out.count("surojax.launch: start ") == 2 and "start 3 of 4, with 2 processes" in out
    for file in tmp_path.iterdir():
        file.unlink()
    assert launch.supervise(command(tmp_path, program % (0, 0)), 2, devices=1, restarts=1) == 1
    assert len(list(tmp_path.glob("0-*"))) == 2


def test_sigterm_to_the_supervisor_reaches_all(tmp_path):
    """One saves and ends with STOPPED, the other one cannot receive it yet; the supervisor ends with STOPPED."""
    program = """
if i == 0: signal.signal(signal.SIGTERM, lambda *_: ((folder / f"saved-{i}").touch(), os._exit(%d)))
(folder / f"ready-{i}").touch()
time.sleep(60)
"""
    options = [sys.executable, "-m", "surojax.launch", "-n", "2", "--devices-per-process", "1", "--restarts", "3", "--"]
    process = subprocess.Popen([*options, *command(tmp_path, program % STOPPED)], stdout=subprocess.PIPE, text=True)

    def stop() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    out = process.communicate(timeout=60)[0]
    thread.join()
    assert process.returncode == STOPPED
    assert {p.name for p in tmp_path.glob("saved-*")} == {"saved-0"}
    assert out.endswith("surojax.launch: stopped: start again to continue\n")


@pytest.mark.usefixtures("no_nohup")
def test_signals_that_stop_a_run():
    """But for those that are ignored, or that the caller has a handler for."""
    kept = {signal.SIGHUP: signal.SIG_IGN, signal.SIGUSR2: lambda *_: None, signal.SIGUSR1: stop_text}
    assert stopping_signals() == (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    old = {number: signal.signal(number, handler) for number, handler in kept.items()}
    assert stopping_signals() == (signal.SIGTERM, signal.SIGUSR1)  # which has a handler of ours
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.full(after=1)
@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize("number", [signal.SIGTERM, *OTHERS], ids=lambda n: n.name)
def test_a_process_that_stops_on_request_has_not_failed(tmp_path, capfd, monkeypatch, number):
    """Whatever the supervisor received. One ends with STOPPED at once, another takes longer than failed processes may;
    none is named, all have saved."""
    monkeypatch.setattr(group, "GRACE_S", 0.1)
    program = f"""
def save(*_):
    time.sleep(i)
    (folder / f"saved-{{i}}").touch()
    os._exit({STOPPED})
signal.signal(signal.SIGTERM, save)
(folder / f"ready-{{i}}").touch()
time.sleep(60)
"""

    def stop() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    code = launch.supervise(command(tmp_path, program), 2, devices=1, restarts=3)
    thread.join()
    out = capfd.readouterr().out
    assert code == STOPPED and "first to end" not in out and "start 2 of" not in out, out
    assert {p.name for p in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


@pytest.mark.parametrize("code, told", [(None, "done"), (0, "done"), (STOPPED, "done"), (1, "failed"), (2, "failed")])
def test_the_other_processes_are_told_which_end_is_a_failure(monkeypatch, code, told):
    """What `together` tells them: one that stops on request waits for the others at the end, as one that finished."""
    events = []
    of_processes = types.SimpleNamespace(finish=lambda: events.append("done"), fail=lambda *_: events.append("failed"))
    monkeypatch.setattr(watch, "_exit", lambda text, code: events.append(code))
    with contextlib.suppress(SystemExit), watch.failing_together(of_processes):  # pyright: ignore[reportArgumentType]
        if code is not None:
            sys.exit(code)
    assert events == ([told] if told == "done" else [told, code])


HANGS = """
import ctypes
from surojax.cluster.supervised import Supervised
signal.signal(signal.SIGTERM, lambda *_: None)
supervised = Supervised(int(options["--supervisor"]), 0.5)
print("again:", supervised.command, flush=True)
"""


@pytest.fixture
def short_times(monkeypatch):
    monkeypatch.setattr(group, "GRACE_S", 0.2)
    monkeypatch.setattr(group, "LATE_S", 0.2)


def test_the_supervisor_notices_that_all_hang(tmp_path, capfd, short_times):
    """One is stopped, the other one holds the interpreter's lock; neither receives SIGTERM."""
    hangs = """
(folder / str(i)).touch()
while len(list(folder.iterdir())) < 2: time.sleep(0.02)
os.kill(os.getpid(), signal.SIGSTOP) if i == 0 else ctypes.PyDLL(None).sleep(60)
"""
    started = time.monotonic()
    assert launch.supervise(command(tmp_path, HANGS + hangs), 2, devices=1, again="the command") == 1
    assert time.monotonic() - started < 10
    out = capfd.readouterr().out
    # One of them, if the other one gave a sign a little later.
    assert re.search(r"no answer from process \d \(process \d+\).*: (hanging|stopped), killed", out), out
    assert out.count("again: the command\n") == 2  # what they say under `resume:`


def test_processes_that_give_signs_of_life_are_left_alone(tmp_path, capfd, short_times):
    """Also if they run for longer than the limit."""
    assert launch.supervise(command(tmp_path, HANGS + "time.sleep(1.2)"), 1, devices=1) == 0


@pytest.mark.parametrize("number, said", [(signal.SIGTERM, "stopped, killed"), (signal.SIGINT, "asked twice: ")])
def test_a_signal_to_the_supervisor_is_answered_if_all_hang(tmp_path, capfd, short_times, number, said):
    """SIGTERM: within the grace. Ctrl-C: at once, if it is asked a second time."""
    program = f"(folder / str(i)).touch()\nos.kill(os.getpid(), {int(signal.SIGSTOP)})"

    def ask() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)
        if number == signal.SIGINT:
            time.sleep(0.02)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=ask)
    thread.start()
    started = time.monotonic()
    assert launch.supervise(command(tmp_path, program), 2, devices=1, restarts=3) == 1
    thread.join()
    assert time.monotonic() - started < 10
    out = capfd.readouterr().out
    assert "asked to stop: " in out or number == signal.SIGINT
    assert said in out and "start 2 of" not in out, out


SUPERVISOR = """
import os, sys
from surojax.cluster import group, watch
group.BOUND = group.BOUND.replace('"linux"', repr(sys.argv[1]))
with group.ProcessGroup(sys.argv[2:], [dict(os.environ)] * 2, "") as started:
    started.wait()
"""


@pytest.mark.full(after=1)
@pytest.mark.parametrize("platform", ["linux", "none"])
def test_processes_end_with_a_supervisor_that_is_killed(tmp_path, platform):
    """By the kernel, also those that are stopped; without its help, those that can see that the socket closes."""
    if platform == "linux" and sys.platform != "linux":
        pytest.skip("prctl is Linux's")
    stops = f"if i: os.kill(os.getpid(), {int(signal.SIGSTOP)})\n" if platform == "linux" else ""
    program = HANGS + f"(folder / str(os.getpid())).touch()\n{stops}time.sleep(60)"
    arguments = [sys.executable, "-c", SUPERVISOR, platform, *command(tmp_path, program)]
    supervisor = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.02)
    processes = [psutil.Process(int(p.name)) for p in tmp_path.iterdir()]
    supervisor.kill()
    supervisor.wait()
    gone, alive = psutil.wait_procs(processes, timeout=10)
    for process in alive:
        process.kill()
    assert len(gone) == 2


def test_what_is_refused_is_not_repeated(tmp_path, capfd):
    """Unless a start before it was accepted: then it may be of the moment, like a lock that is still held."""
    program = """
count = len(list(folder.iterdir()))
(folder / str(count)).touch()
sys.exit(%s[count])
"""
    assert launch.supervise(command(tmp_path, program % [REFUSED]), 1, devices=1, restarts=3) == REFUSED
    assert len(list(tmp_path.iterdir())) == 1
    out = capfd.readouterr().out
    assert "exit code 2" in out and "start 2 of" not in out
    (tmp_path / "0").unlink()
    assert launch.supervise(command(tmp_path, program % [1, REFUSED, 0]), 1, devices=1, restarts=3) == 0


REFUSED_COMMANDS = {
    "launch": ["--", "no-such-program"],
    "train": ["--config", "none.py"],
    "plan": ["--config", "none.py"],
    "fit": ["--config", "none.py"],
    "verify": ["--config", "none.py"],
    "data.__main__": ["--config", "none.py"],
    "evaluate": ["--checkpoint", "none", "--questions", "none.jsonl"],
    "convert": ["--checkpoint", "none"],
    "generate": ["--checkpoint", "none", "--max-tokens", "x"],
}


@pytest.mark.parametrize("name", REFUSED_COMMANDS)
def test_a_command_that_is_refused_says_a_line_and_its_exit_code_says_so(capfd, name):
    command = importlib.import_module(f"surojax.{name}")
    with pytest.raises(SystemExit) as ended:
        ends_with_code(lambda: command.main(REFUSED_COMMANDS[name]))
    assert ended.value.code == REFUSED
    assert re.fullmatch(rf"surojax\.{name.partition('.')[0]}: error: [^\n]+\n", capfd.readouterr().err)
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capfd.readouterr().out
    assert re.search(rf"\b{REFUSED}[, ]\s*settings or a command line that\s+are\s+refused", text), text
    last = inspect.getsource(command).splitlines()[-1]
    assert "ends_with_code" in last and "main" in last  # as `python -m` runs it


def test_errors_that_are_not_of_settings_end_with_1():
    assert isinstance(ending("plan", ConfigError("a field")), Refused)
    of_a_disk = ending("plan", OSError("no space"))
    assert type(of_a_disk) is SystemExit and of_a_disk.code == "surojax.plan: error: no space"  # Python exits with 1


def test_a_program_that_cannot_be_started_says_a_line(tmp_path, capfd):
    """And is not tried again."""
    (tmp_path / "text").write_bytes(b"\x7fELF")
    (tmp_path / "text").chmod(0o755)
    assert launch.supervise([str(tmp_path / "text")], 1, devices=1, restarts=3) == REFUSED
    assert capfd.readouterr().out.startswith(f"[0] surojax.launch: error: {tmp_path / 'text'}: Exec format error\n")
    with pytest.raises(ConfigError, match=r"^--supervisor: expected the socket that surojax.launch makes, got 99"):
        Supervised(99, 1)


IMPORTING = "import os, signal, sys, time\nos.kill(os.getpid(), signal.{})\ntime.sleep({})\nsys.exit('went on')\n"


@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize(
    "words, number, code",
    [(["-m", "surojax.train"], "SIGTERM", STOPPED), (["-m", "surojax.launch"], "SIGTERM", STOPPED),
     (["-m", "surojax", "train", "--config", "tiny"], "SIGTERM", STOPPED),
     (["-c", "import surojax.launch"], "SIGTERM", -signal.SIGTERM), (["-m", "surojax.train"], "SIGUSR1", STOPPED),
     (["-m", "surojax", "launch", "--", "true"], "SIGUSR2", STOPPED),
     (["-m", "surojax.train"], "SIGHUP", STOPPED), (["-m", "surojax.train"], "SIGHUP ignored", 1)],
)  # fmt: skip
def test_a_signal_while_python_imports_asks_to_start_again(tmp_path, words, number, code):
    """The commands' end only: a program that imports them is left as it is. `nohup` ignores SIGHUP."""
    name, _, ignored = number.partition(" ")
    (tmp_path / "jax.py").write_text(IMPORTING.format(name, 0 if ignored else 60))
    path = os.pathsep.join([str(tmp_path), str(Path(surojax.__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [*["nohup"] * bool(ignored), sys.executable, *words],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == code
    assert (done.stderr.decode() == f"stopped by {name}: start again to continue\n") == (code == STOPPED)


def test_fewer_processes_divide_what_there_was():
    assert [launch.fewer(n) for n in (1, 2, 3, 4, 6, 8, 12)] == [1, 1, 1, 2, 3, 4, 6]


def test_with_fewer_processes_a_step_has_the_same_samples(tmp_path, capfd):
    config = tmp_path / "config.py"
    text = "from surojax import default_config\n\ndef get_config():\n    c = default_config()\n"
    config.write_text(text + "    c.gradient_accumulation_steps = 3\n    return c\n")
    train = ["python", "-m", "surojax.train", "--config", str(config)]
    assert launch.accumulation(train) == 3
    assert launch.accumulation([*train, "--export", "x", "--config.gradient_accumulation_steps=5"]) == 5
    assert launch.accumulation(["/a/bin/surojax", "train", "--config", str(config)]) == 3
    for other in (["python", "my.py"], ["surojax", "plan", "--config", str(config)], ["other", "train"]):
        with pytest.raises(ConfigError, match=r"^--elastic: expected the command surojax train"):
            launch.accumulation(other)


class Left(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize(
    "error, message, code",
    [
        (SystemExit("no room"), "no room", 1),
        (SystemExit(3), "exit code 3", 3),
        (Refused("a field"), "a field", REFUSED),
        (KeyError("x"), "KeyError: 'x'", 1),
        (RuntimeError("a\n  b" + "c" * 400), "RuntimeError: a b" + "c" * 383, 1),
        (SystemExit(STOPPED), None, STOPPED),
        (SystemExit(0), None, 0),
        (SystemExit(), None, None),
    ],
    ids=str,
)
def test_one_process_that_ends_tells_the_others(monkeypatch, capfd, error, message, code):
    """The message and the exit code; the codes of a run that has not failed alone are waited with."""
    told, finished = [], []

    def leave_with(*said):
        told.append(said)
        raise Left

    monkeypatch.setattr(watch, "_leave_with", leave_with)
    of_processes = types.SimpleNamespace(finish=lambda: finished.append(1))
    with pytest.raises((SystemExit, Left)) as end, watch.failing_together(of_processes):  # pyright: ignore[reportArgumentType]
        raise error
    assert told == ([] if message is None else [(of_processes, message, code)])
    assert len(finished) == (message is None) and (message is not None or end.value.code == code)
    assert ("Traceback" in capfd.readouterr().err) == (not isinstance(error, SystemExit))


class Groups:
    """In place of `ProcessGroup`: groups that fail, but for the last one."""

    def __init__(self, last: int):
        self.last = last
        self.started: list[tuple[list[str], int]] = []

    def __call__(self, command, environments, again):
        self.started.append((command[2:], len(environments)))
        return contextlib.nullcontext(self)

    def wait(self):
        return Ended(0, "") if len(self.started) == self.last else Ended(1, "failed")


@pytest.mark.parametrize(
    "last, elastic, code, started",
    [
        (
            3,
            True,
            0,
            [
                ([], 4),
                (["--config.gradient_accumulation_steps=6"], 2),
                (["--config.gradient_accumulation_steps=12"], 1),
            ],
        ),
        (2, False, 0, [([], 4), ([], 4)]),
        (9, False, 1, [([], 4)] * 3),
    ],
)
def test_what_is_started_again(monkeypatch, capsys, last, elastic, code, started):
    groups = Groups(last)
    monkeypatch.setattr(launch, "ProcessGroup", groups)
    monkeypatch.setattr(launch, "accumulation", lambda command: 3)
    assert launch.supervise(["surojax", "train"], 4, devices=1, restarts=2, elastic=elastic) == code
    assert groups.started == started
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("ended: start again to continue from the last checkpoint") == (code == 1)
    numbers = [n for _, n in started[1:]]
    assert [line.partition("start ")[2] for line in lines if " of 3, with " in line] == [
        f"{i} of 3, with {n} process{'es' if n > 1 else ''}" for i, n in enumerate(numbers, 2)
    ]


def test_what_launch_hands_on(monkeypatch):
    """Python is the one that runs, and the command that starts all is said at the end."""
    given = []
    monkeypatch.setattr(launch, "supervise", lambda *command, **how: given.append((*command, how)) or 3)
    words = ["-n", "2", "--restarts", "1", "--elastic", "--devices-per-process", "1", "--", "python", "-c", "a b"]
    for line in (words, ["--", sys.executable]):
        with pytest.raises(SystemExit) as end:
            launch.main(line)
        assert end.value.code == 3
    again = "surojax launch -n 2 --restarts 1 --elastic --devices-per-process 1 -- python -c 'a b'"
    all_said = {"devices": 1, "restarts": 1, "elastic": True, "again": again}
    assert given[0] == ([sys.executable, "-c", "a b"], 2, all_said)
    none = {"devices": None, "restarts": 0, "elastic": False, "again": f"surojax launch -- {sys.executable}"}
    assert given[1] == ([sys.executable], 1, none)


def test_how_processes_end():
    words = {
        0: "exit code 0",
        3: "exit code 3",
        -9: "killed by SIGKILL",
        -200: "exit code -200",
        None: "exit code None",
    }
    assert {code: group.exit_code_in_words(code) for code in words} == words
    one = group.ProcessGroup.__new__(group.ProcessGroup)
    for one.stopping in (False, True):
        codes = [one._code(types.SimpleNamespace(poll=lambda code=code: code)) for code in (None, 0, -15, -9)]
        assert codes == [None, 0, STOPPED if one.stopping else -15, -9]


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "expected -- and a command behind the options, like -- surojax train .*, got none; write it"),
        (["-n", "0", "--", "x"], "-n: expected 1 to 1,024, got 0"),
        (["--elastic", "--", "x"], "--restarts: expected 1 or more with --elastic, got 0"),
        (["--devices-per-process", "0", "--", "x"], "--devices-per-process: expected at least 1, got 0"),
        (["-n", str(10**9), "--", "x"], "-n: expected 1 to 1,024, got 1000000000"),
        *(
            (
                ["--", "surojax", "train", *words],
                f"{words[0].partition('=')[0]}: expected none in the command, since the",
            )
            for words in (["--secret_file", "s"], ["--secret_file=s"], ["--coordinator", "a:1"], ["--process_id=0"])
        ),
        (["--", "no-such-program"], "command: expected a program that is installed, got 'no-such-program'; correct it"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(SystemExit, match=message):
        launch.main(options)


@pytest.mark.parametrize(
    "visible, n, parts",
    [("", 2, None), ("0,1,2,3", 2, ["0,1", "2,3"]), ("4,7", 2, ["4", "7"]), ("1", 1, ["1"])],
)
def test_gpus_are_divided(visible, n, parts):
    assert launch._visible_gpus({"CUDA_VISIBLE_DEVICES": visible}, n) == parts


def test_gpus_of_the_machine_are_divided(monkeypatch):
    monkeypatch.setattr(launch, "gpus_of_machine", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [x["CUDA_VISIBLE_DEVICES"] for x in launch._environments(2, None)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=7 --xla_other")
    assert launch._environments(2, None)[1] == dict(os.environ)
    one, other = launch._environments(2, 3)
    assert one == other and one["JAX_PLATFORMS"] == "cpu"
    assert one["XLA_FLAGS"] == "--xla_other --xla_force_host_platform_device_count=3"


def test_gpus_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"^-n: expected a divisor of the 3 GPUs, got 2"):
        launch._visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2)
