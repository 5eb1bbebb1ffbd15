"""The processes that one start of `surojax.launch` runs on this machine; they end if the supervisor ends.

A process that ends with an error ends the others. If one gives no more signs of life (supervised.py), all are asked to
end, and killed after GRACE_S. They do not outlive the supervisor: on Linux the kernel kills them then (prctl(2),
PR_SET_PDEATHSIG), elsewhere each sees that its socket closes.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import psutil

from surojax.children import python_command
from surojax.cluster.early import STOPPED
from surojax.errors import REFUSED

GRACE_S = 5.0  # between SIGTERM and SIGKILL for processes whose run has failed
STOP_S = 600.0  # for a checkpoint, after SIGTERM to the supervisor
POLL_S = 0.1
LATE_S = 3.0  # beyond the heartbeat's limit: the processes, which know each other's host, say it first
# Gloo's line for every group of devices, and the stack of JAX's client when it loses the coordinator.
NOISE = re.compile(r"\[Gloo\] Rank|\*\*\* Check failure stack|    @ +0x[0-9a-f]+ ")
# Runs a command that dies with the process argv[1], its parent. In the child, since the parent has threads.
BOUND = """
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"surojax.launch: error: {sys.argv[2]}: {error.strerror}", file=sys.stderr)
    sys.exit(2)
"""


class Ended(NamedTuple):
    """How a group of processes ended.

    code: exit code of the first that failed, else of the group. reason: a line; "" without error.
    """

    code: int
    reason: str


def start_command(command: list[str], message: dict[str, str], **options) -> tuple[subprocess.Popen, socket.socket]:
    """Starts a command that is killed if this process ends; returns the process and our end of its socket.

    message: what `Supervised` reads. options: of `subprocess.Popen`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        bound = python_command(BOUND, str(os.getpid()), bare=True)
        supervisor = ["--supervisor", str(theirs.fileno())]
        place = command.index("--coordinator")
        command = [*command[:place], *supervisor, *command[place:]]
        process = subprocess.Popen([*bound, *command], pass_fds=(theirs.fileno(),), **options)
    ours.sendall(json.dumps(message).encode() + b"\n")
    ours.setblocking(False)
    return process, ours


def new_key() -> dict[str, str]:
    """Makes a new run's id and secret, for the message of `start_command`."""
    return {"run": secrets.token_hex(4), "secret": secrets.token_hex(16)}


class ProcessGroup:
    """The processes of one start; a context manager that leaves none running.

    command: of each process, to which the flags of its place are added. environments: of each. again: the command that
    starts them all.
    """

    def __init__(self, command: list[str], environments: list[dict[str, str]], again: str):
        address = f"127.0.0.1:{free_port()}"
        message = new_key() | {"command": again}
        n = len(environments)
        self.processes: list[subprocess.Popen] = []
        self.readers: list[threading.Thread] = []
        self.sockets: list[socket.socket] = []
        self.heard = [0.0] * n  # when each gave its last sign of life
        self.limits: list[float | None] = [None] * n  # seconds without one; None: it has given none yet
        self.stopping = False
        self.killing = False
        for i, environment in enumerate(environments):
            process, ours = start_command(
                [*command, "--coordinator", address, "--num_processes", str(n), "--process_id", str(i)],
                message,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches the supervisor only, which tells the processes
            )
            self.processes.append(process)
            self.sockets.append(ours)
            self.readers.append(threading.Thread(target=_copy_lines, args=(process, i), daemon=True))
            self.readers[-1].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process, reader, ours in zip(self.processes, self.readers, self.sockets, strict=True):
            process.wait()
            reader.join(2)
            ours.close()
            if process.stdout and not reader.is_alive():
                process.stdout.close()

    def stop(self) -> None:
        """Asks all processes to save and end."""
        self.stopping = True
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Ends all processes at once."""
        self.killing = True

    def wait(self) -> Ended:
        """Waits until all processes have ended, or one fails or hangs; then ends the others."""
        saved_by = stopped_since = None
        while True:
            codes = [self._code(process) for process in self.processes]
            if bad := [i for i, code in enumerate(codes) if code not in (None, 0, STOPPED)]:
                return self._failed(bad[0], codes)
            if None not in codes:
                return Ended(STOPPED if STOPPED in codes else 0, "")
            running = [i for i, code in enumerate(codes) if code is None]
            now = time.monotonic()
            self._listen(now)
            if silent := [i for i in running if now - self.heard[i] > (self.limits[i] or float("inf")) + LATE_S]:
                return self._hang(silent)
            if self.killing:
                return Ended(1, "asked twice: the processes are killed before they have saved")
            if self.stopping:
                if saved_by is None:
                    print_as_supervisor(f"asked to stop: the processes have {STOP_S:g} s to save")
                    saved_by = now + STOP_S
                if now > saved_by:
                    return Ended(1, f"did not save within {STOP_S:g} s")
                # One that SIGSTOP has stopped does not receive SIGTERM.
                stopped = [i for i in running if _is_stopped(self.processes[i].pid)]
                stopped_since = (stopped_since or now) if stopped else None
                if stopped_since and now - stopped_since > GRACE_S:
                    return self._hang(stopped)
            time.sleep(POLL_S)

    def _send(self, number: int) -> None:
        """Sends a signal to all running processes."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def _code(self, process: subprocess.Popen) -> int | None:
        """The exit code of a process, None while it runs; STOPPED if `stop` ended it, with nothing to save."""
        code = process.poll()
        return STOPPED if self.stopping and code == -signal.SIGTERM else code

    def _listen(self, now: float) -> None:
        """Reads the heartbeats that the processes have sent."""
        for i, ours in enumerate(self.sockets):
            with contextlib.suppress(OSError, ValueError):
                if lines := ours.recv(1 << 16).split():
                    self.limits[i] = float(lines[-1])
                    self.heard[i] = now

    def _hang(self, silent: list[int]) -> Ended:
        """Ends all processes after some have sent no heartbeat."""
        state = "stopped" if all(_is_stopped(self.processes[i].pid) for i in silent) else "hanging"
        who = ", ".join(f"{i} (process {self.processes[i].pid})" for i in silent)
        self._send(signal.SIGTERM)
        self._grace()
        return Ended(1, f"no answer from process {who}: {state}, killed")

    def _grace(self) -> None:
        """Waits for running processes to end, GRACE_S at most."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(p.poll() is None for p in self.processes):
            time.sleep(POLL_S)

    def _failed(self, i: int, codes: list[int | None]) -> Ended:
        """Names the process that failed first, and ends the others."""
        stopped = [k for k, code in enumerate(codes) if code is None and _is_stopped(self.processes[k].pid)]
        reason = f"process {i} was the first to end ({exit_code_in_words(codes[i])})"
        if stopped:  # it ended because that one did not answer
            reason = f"process {stopped[0]} does not answer: it is stopped (process {self.processes[stopped[0]].pid})"
        else:
            self._grace()
        return Ended(REFUSED if codes[i] == REFUSED else 1, reason)


def print_as_supervisor(text: str) -> None:
    """Prints a line as the supervisor."""
    print(f"surojax.launch: {text}", flush=True)


def _copy_lines(process: subprocess.Popen, i: int) -> None:
    """Prints a process' lines, prefixed with its number."""
    assert process.stdout
    for line in process.stdout:
        if not NOISE.match(line):
            sys.stdout.write(f"[{i}] {line if line.endswith(chr(10)) else line + chr(10)}")
            sys.stdout.flush()


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def exit_code_in_words(code: int | None) -> str:
    """Describes an exit code in words."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port of this machine on which nothing listens."""
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
