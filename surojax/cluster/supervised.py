"""The socket of a process that `surojax.launch` started to its supervisor.

The supervisor sends one line: what the processes of the run have in common, and the command that starts them all. The
process sends its heartbeat limit in seconds every second, so that the supervisor notices if processes hang, even if all
do. A socket that closes means that the supervisor has gone: the process ends. (On Linux the kernel ends it
already, see `group.BOUND`.)
"""

import contextlib
import os
import select
import socket
import sys
import threading

from surojax.cluster.rendezvous import Key
from surojax.errors import ConfigError
from surojax.own_files import check_form
from surojax.untrusted import parse_json

PERIOD_S = 1.0
MESSAGE_BYTES = 1 << 20
WAIT_S = 10.0


class Supervised:
    """This process' end of the socket. key: of the run. command: the command that starts all of the run's processes."""

    def __init__(self, descriptor: int, heartbeat_s: float):
        """Reads the supervisor's message. Raises ConfigError if there is no supervisor."""
        try:
            self.socket = socket.socket(fileno=descriptor)
            self.socket.settimeout(WAIT_S)
            with self.socket.makefile("rb") as lines:
                message = parse_json(lines.readline(MESSAGE_BYTES))
            check_form(message, {"run": str, "secret": str, "command": str})
            self.key = Key(message["run"], message["secret"].encode())
            self.command = message["command"]
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"--supervisor: expected the socket that surojax.launch makes, got {descriptor}; leave it out"
            ) from error
        self.heartbeat_s = heartbeat_s
        threading.Thread(target=self._beat, name="surojax_supervised", daemon=True).start()

    def _beat(self) -> None:
        """Sends heartbeats to the supervisor, and ends this process if the supervisor has gone."""
        self.socket.setblocking(False)
        period = min(PERIOD_S, self.heartbeat_s / 5)
        gone = False
        while not gone:
            try:
                with contextlib.suppress(BlockingIOError):  # nobody reads: the supervisor is stopped, and may go on
                    self.socket.send(f"{self.heartbeat_s!r}\n".encode())
                gone = bool(select.select([self.socket], [], [], period)[0]) and not self.socket.recv(1)
            except OSError:
                gone = True
        with contextlib.suppress(OSError):  # the output may go to the supervisor
            print("surojax: error: surojax.launch has gone", file=sys.stderr, flush=True)
        os._exit(1)
