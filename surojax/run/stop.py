"""A run that is asked to stop: by a signal, or because its time is up. It then saves, and can be continued.

With several processes, a signal to any of them counts for all: JAX's preemption service agrees on a step that none of
them has passed yet, and every process stops after that one.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils


class EarlyStop:
    """Context manager within which SIGTERM exits with this code where nobody else receives it: nothing is to be saved.

    Before the loop over steps, and after it, that is. Of several processes, JAX's preemption service receives it as
    soon as they are connected, and the run stops after its first step. Does nothing outside the main thread.
    """

    def __init__(self, code: int):
        self.code = code
        self._asked = False
        self._deferring = False

    def __enter__(self):
        self.old = {}
        with contextlib.suppress(ValueError):  # raised outside the main thread, which cannot set signal handlers
            self.old[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self.old.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: the old handler was not set from Python

    def _receive(self, *_):
        self._asked = True
        if not self._deferring:
            print("stopped by SIGTERM: start again to continue", file=sys.stderr, flush=True)
            sys.exit(self.code)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[Callable[[], bool]]:
        """Within it, SIGTERM is only recorded; yields a function that says whether it was. It counts at the end.

        For the time in which processes connect. Those that JAX connects to one that has left wait for it in C++, and
        are then ended with a stack trace. At the end, whoever receives signals by then gets it: JAX, if all connected.
        """
        self._deferring = True
        try:
            yield lambda: self._asked
        finally:
            self._deferring = False
            if self._asked:
                signal.raise_signal(signal.SIGTERM)


class StopSignal:
    """Context manager that records SIGTERM and the first Ctrl-C instead of ending the process.

    A second Ctrl-C raises KeyboardInterrupt. until: `time.monotonic()` at which it counts as stopped; None: never.
    received: name of the last recorded signal, or "--max-minutes"; "" if there was none.
    """

    received: str = ""

    def __init__(self, until: float | None = None):
        self.until = until
        self.several = jax.process_count() > 1

    def __enter__(self):
        self.old = {}
        # SIGTERM of several processes is left to JAX's preemption service, which tells the others.
        numbers = (signal.SIGINT,) if self.several else (signal.SIGTERM, signal.SIGINT)
        with contextlib.suppress(ValueError):  # raised outside the main thread, which cannot set signal handlers
            for number in numbers:
                self.old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self.old.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: the old handler was not set from Python

    def _receive(self, number, _frame):
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        if self.several:
            os.kill(os.getpid(), signal.SIGTERM)

    def after(self, step: int) -> str:
        """Returns why the run stops after this step, "" if it goes on. Call it once for every step.

        All processes get the same answer, but only the one that received a signal knows which.
        """
        if self.until is not None and time.monotonic() >= self.until and not self.received:
            self.received = "--max-minutes"
            if self.several:
                os.kill(os.getpid(), signal.SIGTERM)
        if not self.several:
            return self.received
        return self.received or "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else ""
