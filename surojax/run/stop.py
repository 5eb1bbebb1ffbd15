"""Stops a run after a signal, or when its time is up. It then saves, and can be continued.

Python runs a signal handler when the main thread is back from C++: after a step or a compilation, which may take
minutes. A thread therefore hears of signals as well, at once, and answers.

With several processes, a signal to any of them counts for all: JAX's preemption service, which receives SIGTERM, agrees
on a step that none of them has passed yet, and every process stops after that one.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from surojax.cluster.early import leave_closed_terminal, stop_text, stopping_signals
from surojax.run.console import say
from surojax.run.on_disk import find

GRACE_S = 5.0  # for the main thread to end the process after a signal, if it is not within a step or a compilation
DOUBLE_S = 1.0  # a second Ctrl-C that follows the first sooner is the same one: its answer could not be read
ABORTED = 130  # exit code of a run that Ctrl-C has aborted, as shells have it


class Listener:
    """Context manager that calls `hear` with each signal's number, immediately, in a separate thread.

    Of signals that have a handler in Python. Does nothing outside the main thread.
    """

    def __init__(self, hear: Callable[[int], None]):
        self.hear = hear
        self.thread: threading.Thread | None = None
        self.outer = -1  # where signals were written before

    def __enter__(self):
        self.reads, self.writes = os.pipe()
        os.set_blocking(self.writes, False)
        try:
            self.outer = signal.set_wakeup_fd(self.writes, warn_on_full_buffer=False)
        except ValueError:  # outside the main thread
            os.close(self.reads)
            os.close(self.writes)
            return self
        self.thread = threading.Thread(target=self._listen, name="surojax-signals", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        if self.thread is None:
            return
        signal.set_wakeup_fd(self.outer)
        os.write(self.writes, b"\0")  # the end
        self.thread.join()
        os.close(self.reads)
        os.close(self.writes)

    def _listen(self) -> None:
        while number := os.read(self.reads, 1)[0]:
            self.hear(number)

    def pass_on(self, number: int) -> None:
        """Passes a signal's number on to the listener that was active before."""
        if self.outer != -1:
            with contextlib.suppress(OSError):
                os.write(self.outer, bytes([number]))


def ended_at_once(main: Callable[[], None]) -> None:
    """Runs a command's main function; if it exits with ABORTED, ends the process without Python's clean-up.

    The clean-up would wait for the devices' computations.
    """
    try:
        main()
    except SystemExit as error:
        if error.code == ABORTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ABORTED)
        raise


def _pass_to_all(number: int) -> bool:
    """Passes a request to stop on to all processes, if JAX has connected several: as SIGTERM, which JAX receives."""
    if number == signal.SIGINT or not jax.distributed.is_initialized():
        return False
    os.kill(os.getpid(), signal.SIGTERM)
    return True


class EarlyStop:
    """Context manager in which SIGTERM ends the process with this code: before and after the loop over steps.

    There is nothing to save then. With several processes, JAX's preemption service receives the signal as soon as they
    are connected, and the run stops after its first step. If the main thread does not come to that within GRACE_S,
    since it compiles, the process ends then; likewise after Ctrl-C, with the line `aborted`. Does nothing outside the
    main thread.
    """

    def __init__(self, code: int, aborted: str = "aborted"):
        self.code = code
        self.aborted = aborted
        self._asked = 0  # the first signal that was received
        self._deferring = False
        self._left = threading.Event()
        self._listener = Listener(self._hear)

    def __enter__(self):
        self.old = {}
        with contextlib.suppress(ValueError):  # raised outside the main thread, which cannot set signal handlers
            for number in stopping_signals():
                self.old[number] = signal.signal(number, self._receive)
        self._listener.__enter__()
        return self

    def __exit__(self, *_):
        self._left.set()
        self._listener.__exit__()
        for number, handler in self.old.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: the old handler was not set from Python

    def _receive(self, number: int, _frame):
        self._asked = self._asked or number
        if self._deferring or _pass_to_all(number):
            return
        print(stop_text(number), file=sys.stderr, flush=True)
        sys.exit(self.code)

    def _hear(self, number: int) -> None:
        """Ends the process if the main thread has not done so GRACE_S after the signal."""
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if number not in (*self.old, signal.SIGINT) or self._deferring or _pass_to_all(number):
            return
        if self._left.wait(GRACE_S):
            return
        text, code = (self.aborted, ABORTED) if number == signal.SIGINT else (stop_text(number), self.code)
        print(text, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[Callable[[], bool]]:
        """Defers signals to the end of a `with` statement; yields a function that says if one was received.

        For the time in which processes connect. Those that JAX connects to one that has left wait for it in C++, and
        are then ended with a stack trace. At the end, whoever receives signals by then gets it: JAX, if all connected.
        """
        self._deferring = True
        try:
            yield lambda: bool(self._asked)
        finally:
            self._deferring = False
            if self._asked:
                signal.raise_signal(self._asked)


class StopSignal:
    """Context manager that records requests to stop and the first Ctrl-C, and says so at once; the process goes on.

    A second Ctrl-C raises KeyboardInterrupt in the main thread, and tells an `EarlyStop` around it; the first one's
    answer says what that loses. until: `time.monotonic()` at which it counts as stopped; None: never. output_dir: of
    the run. received: name of the last recorded signal, or "--max-minutes"; "" if there was none.
    """

    received: str = ""

    def __init__(self, until: float | None = None, output_dir: Path | None = None):
        self.until = until
        self.output_dir = output_dir
        self.connected = jax.distributed.is_initialized()  # also one process of a launcher: JAX receives its SIGTERM
        self._pressed: float | None = None  # when Ctrl-C was pressed first
        self._aborts = False
        self._said = False
        self._raised = False
        self._listener = Listener(self._hear)

    def __enter__(self):
        self.old = {}
        with contextlib.suppress(ValueError):  # raised outside the main thread, which cannot set signal handlers
            for number in (*stopping_signals(), signal.SIGINT):
                # SIGTERM of connected processes is left to JAX's preemption service, which tells the others.
                if not (self.connected and number == signal.SIGTERM):
                    self.old[number] = signal.signal(number, self._receive)
        self._listener.__enter__()
        return self

    def __exit__(self, *_):
        self._listener.__exit__()
        for number, handler in self.old.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: the old handler was not set from Python

    def _receive(self, number, _frame):
        if self._aborts and not self._raised:
            self._raised = True
            raise KeyboardInterrupt
        if self._aborts:
            return
        self.received = self.received or signal.Signals(number).name
        if self.connected:
            os.kill(os.getpid(), signal.SIGTERM)

    def _hear(self, number: int) -> None:
        """Prints the answer to a signal; a second Ctrl-C counts even if the main thread has not handled the first."""
        now = time.monotonic()
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if number != signal.SIGINT and number in self.old and self._pressed is None and not self._said:
            self._said = True
            say(f"{signal.Signals(number).name}: stopping after this step")
        elif number == signal.SIGINT and self._pressed is None:
            self._pressed = now
            last = self.output_dir and find(self.output_dir)
            lost = f"what is after checkpoint {last.name}" if last else "everything: there is no checkpoint yet"
            say(f"Ctrl-C: stopping after this step; press again to stop now, which loses {lost}")
        elif number == signal.SIGINT and now - (self._pressed or now) >= DOUBLE_S and not self._aborts:
            self._aborts = True
            say("Ctrl-C: stopping now")
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self._listener.pass_on(number)

    def after(self, step: int) -> str:
        """Returns the reason why the run stops after this step, "" if it goes on. Call it once for every step.

        All processes get the same answer, but only the one that received a signal knows which.
        """
        if self.until is not None and time.monotonic() >= self.until and not self.received:
            self.received = "--max-minutes"
            if self.connected:
                os.kill(os.getpid(), signal.SIGTERM)
        if not self.connected:
            return self.received
        return self.received or "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else ""
