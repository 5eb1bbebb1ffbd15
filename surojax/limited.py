"""Runs functions on untrusted input (chat templates, regular expressions) in a child process with limits.

A program of others may never end, or take all memory; within this process nothing could stop it: a limit in Jinja's
sandbox does not see what one filter or one product allocates, and a regular expression holds the interpreter. The
operating system can. The child is started at the first call and serves all further ones, many items at a time, so an
item costs what it takes to send it. It ends with this process.

Limits are enforced by Linux; macOS has that of time, Windows none.
"""

import atexit
import contextlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, BinaryIO

from surojax.children import python_command

SECONDS = 10  # of processor time for an item
MEMORY = 1 << 30  # bytes of the child
LONGEST = 1 << 28  # bytes of an answer
_SIZE = 8  # bytes of a request's length


class OverLimit(Exception):
    """Raised if an item exceeds the limits of time or memory; the message says which. index: of the item."""

    def __init__(self, what: str, index: int):
        super().__init__(what)
        self.index = index


def map_in_child(module: str, function: str, common: tuple, items: Sequence[Any]) -> list[Any]:
    """Returns [function(*common, item) for each item], computed in the child.

    module: of the function; it should import little. Results are JSON. Raises OverLimit.
    """
    global _child
    with _lock:
        for attempt in range(2):
            if _child is None or _child.owner != os.getpid():
                _child = _Child()
            try:
                return _child.each(module, function, common, items)
            except _Gone:  # ended while it was idle, by another's hand
                _stop()
                if attempt:
                    raise
            except BaseException:
                _stop()
                raise
    raise AssertionError


class _Gone(RuntimeError):
    """Raised if the child process has ended."""


class _Child:
    def __init__(self):
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            python_command("from surojax import limited; limited.serve_requests()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not meant for it
        )

    def each(self, module: str, function: str, common: tuple, items: Sequence[Any]) -> list[Any]:
        to, back = self.process.stdin, self.process.stdout
        assert to is not None and back is not None
        request = pickle.dumps((SECONDS, MEMORY, module, function, common, list(items)))
        try:
            to.write(len(request).to_bytes(_SIZE, "little") + request)
            to.flush()
        except OSError as error:
            raise _Gone("the child process of surojax.limited cannot be started, or ended") from error
        results: list[Any] = []
        while len(results) < len(items):
            line = back.readline()
            if not line.endswith(b"\n"):
                raise OverLimit(_in_words(self.process.wait()), len(results))
            answer = json.loads(line)
            if "over" in answer:
                raise OverLimit(answer["over"], len(results))
            assert "found" in answer, f"{module}.{function}: {answer}"
            results.append(answer["found"])
        return results

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # what was not written yet
                stream.close()


def _in_words(code: int) -> str:
    if -code == getattr(signal, "SIGPROF", 0):
        return f"more than {SECONDS} seconds of processor time"
    return f"a crash of its process ({code})"


_child: _Child | None = None
_lock = threading.Lock()


@atexit.register
def _stop() -> None:
    global _child
    child, _child = _child, None
    if child is not None and child.owner == os.getpid():
        child.stop()


# -- In the child -----------------------------------------------------------------------------------------------------


def serve_requests() -> None:
    """Answers the parent's requests, in the child process, until there are no more."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(size := requests.read(_SIZE)) == _SIZE:
        seconds, memory, module, function, common, items = pickle.loads(requests.read(int.from_bytes(size, "little")))
        call = getattr(importlib.import_module(module), function)
        _limit_memory(memory)
        for item in items:
            _answer(answers, call, common, item, seconds)


def _limit_memory(memory: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):  # not on this system
        pass


def _limit_time(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # which ends the process, whatever it is in


def _answer(answers: BinaryIO, call: Any, common: tuple, item: Any, seconds: float) -> None:
    _limit_time(seconds)
    try:
        line = json.dumps({"found": call(*common, item)}).encode("ascii")
        over = len(line) > LONGEST
    except MemoryError:
        line, over = b"", True
    except Exception as error:  # of ours
        line, over = json.dumps({"bug": f"{type(error).__name__}: {error}"}).encode("ascii"), False
    _limit_time(0)
    if over:
        line = json.dumps({"over": "more memory than that"}).encode("ascii")
    answers.write(line + b"\n")
    answers.flush()
