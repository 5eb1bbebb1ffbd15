"""The signals that ask a run to stop, and their handler while a command's imports run: it ends with the code STOPPED.

Schedulers send SIGTERM, or what a job asked for (`#SBATCH --signal=USR1@300`); a terminal that closes sends SIGHUP,
which `nohup` ignores. Imported before JAX by the commands that end so later as well; it changes nothing in other
programs that import them.
"""

import contextlib
import os
import signal
import sys

STOPPED = 75  # exit code of a run that was asked to stop: EX_TEMPFAIL of sysexits.h, "try again"
COMMANDS = ("surojax.train", "surojax.launch")
OTHERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)  # beside SIGTERM


def stopping_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask this process to stop: SIGTERM, and those of `OTHERS` that are not ignored.

    A program that calls `train` may have handlers of its own for `OTHERS`, which it keeps.
    """
    return (signal.SIGTERM, *filter(_is_ours, OTHERS))


def _is_ours(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    return handler is signal.SIG_DFL or str(getattr(handler, "__module__", "")).startswith("surojax.")


def stop_text(number: int) -> str:
    """Makes the last line of a run that a signal has ended before it began."""
    return f"stopped by {signal.Signals(number).name}: start again to continue"


def leave_closed_terminal() -> bool:
    """Discards what this process prints from now on if its terminal has closed, where printing raises OSError.

    Returns True if it has.
    """
    closed = False
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            closed = True
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return closed


def _stop(number: int, _frame) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, f"{stop_text(number)}\n".encode())
    os._exit(STOPPED)


if getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "") in COMMANDS:
    for _number in stopping_signals():
        signal.signal(_number, _stop)
