"""Ends several processes together after one fails, and names the one that failed.

A process that dies leaves the others in a collective. Over TCP they notice at once; NCCL waits. A stopped process is
noticed by nobody. So a thread of each process tells the coordinator every second that it lives, and reads what the
others told:

* a process that failed has left its message: the others say it and end;
* a process that has said nothing for `heartbeat_s` is named, and the others end;
* the coordinator, process 0, is named if it does not answer for so long.

JAX has a heartbeat of its own, which ends a process with a stack trace. It is set longer, and only counts if this
thread cannot run.
"""

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from jax._src import distributed  # the client is not public; jax.experimental.multihost_utils takes it from there

from surojax.cluster.early import STOPPED
from surojax.errors import REFUSED, Refused

FOLDER = "surojax/"
PERIOD_S = 1.0
END_MS = 24 * 3600 * 1000  # others may write an export for hours
# In the error of a collective, or of JAX's client, if another process is gone.
OF_A_PEER = re.compile(r"\bgloo\b|\bnccl|connection (closed|reset)|CoordinationService", re.IGNORECASE)


class Watch:
    """Threads with which a process watches the others. names: host of each process."""

    def __init__(self, names: list[str], process_id: int, heartbeat_s: float):
        self.names = names
        self.process_id = process_id
        self.heartbeat_s = heartbeat_s
        self.client: Any = distributed.global_state.client
        self._ended = threading.Event()
        self._answered = time.monotonic()
        for target in (self._exchange, self._await_coordinator):
            threading.Thread(target=target, name=f"surojax{target.__name__}", daemon=True).start()

    def _exchange(self) -> None:
        """Writes this process's heartbeat, and reads the heartbeats and messages of the others."""
        count = 0
        seen: dict[int, tuple[str, float]] = {}  # what each said last, and since when
        while not self._ended.wait(min(PERIOD_S, self.heartbeat_s / 5)):
            count += 1
            try:
                self.client.key_value_set(f"{FOLDER}alive/{self.process_id}", str(count), allow_overwrite=True)
                messages = dict(self.client.key_value_dir_get(FOLDER))
            except jax.errors.JaxRuntimeError:
                continue  # `_await_coordinator` counts the time
            now = self._answered = time.monotonic()
            if self._ended.is_set():
                return
            for key, text in messages.items():
                if key.startswith(f"{FOLDER}failed/") and int(key.rpartition("/")[2]) != self.process_id:
                    code, _, message = text.partition(" ")
                    self._leave(f"{self.name(int(key.rpartition('/')[2]))} ended the run: {message}", int(code))
            for i in range(len(self.names)):
                text = messages.get(f"{FOLDER}alive/{i}", "")
                if seen.get(i, ("", 0.0))[0] != text or i not in seen:
                    seen[i] = (text, now)
                elif now - seen[i][1] > self.heartbeat_s and f"{FOLDER}done/{i}" not in messages:
                    self._leave(self._silent(i))

    def _await_coordinator(self) -> None:
        """Ends this process if the coordinator has not answered for too long."""
        while not self._ended.wait(PERIOD_S / 2):
            if time.monotonic() - self._answered > self.heartbeat_s + PERIOD_S:
                self._leave(self._silent(0))

    def _silent(self, i: int) -> str:
        return f"{self.name(i)} has not answered for {self.heartbeat_s:g} s: it hangs, or its host or link is down"

    def name(self, i: int) -> str:
        """Formats a process' number and host for messages."""
        return f"process {i} ({self.names[i]})"

    def _leave(self, text: str, code: int = 1) -> None:
        """Ends this process immediately, whatever its main thread does."""
        if not self._ended.is_set():
            self._ended.set()
            _exit(f"surojax: error: {text}", code)

    def fail(self, message: str, code: int) -> None:
        """Tells the other processes the reason and exit code with which this process ends."""
        self._ended.set()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.client.key_value_set(f"{FOLDER}failed/{self.process_id}", f"{code} {message}")
            if self.process_id == 0:
                time.sleep(2 * PERIOD_S)  # the message is gone with the coordinator

    def finish(self) -> None:
        """Waits for all processes and disconnects them."""
        self.client.key_value_set(f"{FOLDER}done/{self.process_id}", "")
        self.client.wait_at_barrier(f"{FOLDER}end", END_MS)
        self._ended.set()
        jax.distributed.shutdown()


@contextlib.contextmanager
def failing_together(watch: Watch | None) -> Iterator[None]:
    """Context manager that, after an error, tells the other processes the reason and ends this process at once.

    Does nothing without a watch.

    An exit with code 0 or STOPPED is none of one process alone. Python's own end would wait for the other processes,
    which wait for this one.
    """
    if watch is None:
        yield
        return
    try:
        yield
        watch.finish()
    except SystemExit as error:
        if error.code in (None, 0, STOPPED):
            watch.finish()
            raise
        message = error.code if isinstance(error.code, str) else f"exit code {error.code}"
        code = error.code if isinstance(error.code, int) else 1
        _leave_with(watch, message, REFUSED if isinstance(error, Refused) else code)
    except BaseException as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        if not OF_A_PEER.search(message):
            traceback.print_exc()
        _leave_with(watch, message, 1)


def _leave_with(watch: Watch, message: str, code: int) -> None:
    """Ends this process after an error: its own, or that a collective failed since another process has left."""
    if OF_A_PEER.search(message):
        time.sleep(3 * PERIOD_S)  # if the other process said why it ended, the watch says that and ends this one
        _exit(f"surojax: error: the connection to another process is lost ({message})", code)
    watch.fail(message, code)
    _exit(message, code)


def leave(text: str) -> NoReturn:
    """Prints a line and exits; at once if JAX has connected processes, for which Python's clean-up would wait."""
    if jax.distributed.is_initialized():
        _exit(text)
    sys.exit(text)


def _exit(text: str, code: int = 1) -> None:
    """Prints a line and ends the process without Python's clean-up."""
    with contextlib.suppress(OSError):  # nobody may read it any more
        print(text, file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(code)
