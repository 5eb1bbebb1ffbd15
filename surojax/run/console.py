"""Prints a run's lines, and on a terminal a status below them that is rewritten.

A file, a pipe or a notebook gets plain lines only. Any thread may print.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from tqdm import tqdm

from surojax.cluster.early import leave_closed_terminal
from surojax.run.shared import is_first

ECHO = 2  # columns that a terminal adds to the status when Ctrl-C is pressed: ^C


class Console:
    """Prints lines to a stream, on a terminal above a status. stream: standard output by default."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream
        self._status = ""  # what is on the screen below the lines
        self._lock = threading.RLock()

    @property
    def stream(self) -> TextIO:
        """The stream that lines are printed to."""
        return self._stream or sys.stdout

    @property
    def is_terminal(self) -> bool:
        """True if the stream is a terminal, which shows a status."""
        return getattr(self.stream, "isatty", lambda: False)()  # what a program puts there may lack it

    def line(self, text: str) -> None:
        """Prints a line that stays. Characters that the stream cannot show are escaped."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        with self._lock, _unless_closed():
            status = self._status
            self.status("")
            tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding), file=self.stream)  # above its bars
            self.status(status)
            self.stream.flush()

    def status(self, text: str) -> None:
        """Rewrites the status, cut to the terminal's width; "" removes the status. Does nothing without a terminal."""
        if not self.is_terminal:
            return
        with self._lock, _unless_closed():
            text = text[: _columns(self.stream) - 1 - ECHO]
            if text or self._status:
                blanks = " " * (len(self._status) + ECHO - len(text)) if self._status else ""
                self.stream.write(f"\r{text}{blanks}\r{text}")
                self.stream.flush()
            self._status = text

    def keep_status(self) -> None:
        """Makes the status a line that stays."""
        with self._lock, _unless_closed():
            if self._status:
                self._status = ""
                self.stream.write("\n")
                self.stream.flush()


@contextlib.contextmanager
def _unless_closed() -> Iterator[None]:
    """Ignores that the terminal has closed, which a write may notice before SIGHUP is handled."""
    try:
        yield
    except OSError:
        if not leave_closed_terminal():
            raise


def _columns(stream: TextIO) -> int:
    """The terminal's width in characters; 80 if unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


CONSOLE = Console()


def say(text: str) -> None:
    """Prints a line, above the status if there is one, in the first process only."""
    if is_first():
        CONSOLE.line(text)


def progress(number: int, total: int, done: float, seconds: float) -> str:
    """Formats "3 of 10, 01:20 left". number: of the part at work, from 1. done: fraction that took so many seconds."""
    left = f", {tqdm.format_interval(round(seconds * (1 - done) / done))} left" if done else ""
    return f"{number} of {total}{left}"


@contextlib.contextmanager
def working(doing: str, done: str) -> Iterator[None]:
    """Prints what a `with` statement does, and at its end how long that took; a terminal shows seconds passing.

    doing, done: "compiling", "compiled". After an error nothing is said at the end.
    """
    started = time.perf_counter()
    ended = threading.Event()

    def count() -> None:
        while not ended.wait(1.0):
            CONSOLE.status(f"{doing} ... {time.perf_counter() - started:.0f} s")

    counting = threading.Thread(target=count, name="surojax-working", daemon=True)
    if not CONSOLE.is_terminal:
        say(f"{doing} ...")
    elif is_first():
        CONSOLE.status(f"{doing} ...")
        counting.start()
    try:
        yield
    finally:
        ended.set()
        if counting.ident is not None:
            counting.join()
            CONSOLE.status("")
    say(f"{done} in {time.perf_counter() - started:.1f} s")
