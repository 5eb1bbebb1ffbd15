"""Handles SIGTERM while a command's imports run: the process ends with the exit code of a run asked to stop.

Imported before JAX by the commands that end so later as well; it changes nothing in other programs that import them.
"""

import os
import signal
import sys

STOPPED = 75  # exit code of a run that was asked to stop: EX_TEMPFAIL of sysexits.h, "try again"
COMMANDS = ("surojax.train", "surojax.launch")


def _stop(*_) -> None:
    os.write(2, b"stopped by SIGTERM: start again to continue\n")
    os._exit(STOPPED)


if getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "") in COMMANDS:
    signal.signal(signal.SIGTERM, _stop)
