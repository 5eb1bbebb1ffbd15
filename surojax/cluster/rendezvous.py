"""Lets all processes of a run meet at the coordinator's port, before JAX uses the port.

`jax.distributed.initialize` ends a process with a stack trace if another one is missing or has the same id, and does
not say which. So process 0 first listens on that port itself: each other process sends its id, how many processes it
expects, and its host's name, and gets the names of all, or what is wrong. It takes milliseconds once all are there.

Process 0 listens on the coordinator's address only, if that is one of its machine's. Whoever connects has HELLO_S for
HELLO_BYTES. Strangers, and processes of another run, are sent away and do not end this one. With a secret, both sides
prove that they know it, by an HMAC (RFC 2104) over a random number of the other side; it is not sent itself. Without
one, who speaks this protocol is believed. A process with another secret is named: by itself, within seconds, and by
process 0, which still waits for the right one.
"""

import contextlib
import errno
import hmac
import ipaddress
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from surojax.errors import ConfigError
from surojax.own_files import Optional, check_form
from surojax.untrusted import parse_json

RETRY_S = 0.2
HELLO = "surojax"
HELLO_S = 5.0  # for the first message, whatever arrives meanwhile
HELLO_BYTES = 4096
ANSWER_BYTES = 1 << 22  # the names of 16,384 hosts
STRANGERS = 64  # connections at a time that have not said hello; the oldest one is closed
CLOSE_S = 2.0  # for the others to close their connections
NO_MESSAGE = (OSError, ValueError)  # what reading a stranger's message may raise
# The forms of messages, see own_files.py: process 0's first, and what is sealed, which is a body with its proof.
GREETING = {"hello": str, "nonce": str}
SEALED = {"run": str, "body": str, "proof": str}
HELLO_BODY = {"id": int, "of": range(1, 2**31), "host": str, "nonce": str}
ANSWER_BODY = {"error": Optional(str), "hosts": Optional([str])}
FOREIGN = "another program's answer"
OTHER_RUN = "a process of another run"
OTHER_SECRET = "a process with another secret"
SECRET_S = 5.0  # another run may end meanwhile, whose port this run then has


class Key(NamedTuple):
    """The id and the secret by which the processes of one run recognise each other."""

    run: str = ""  # tells runs apart; no secret
    secret: bytes = b""


ANY_RUN = Key()


class Met(NamedTuple):
    """The result of `meet`: names of all hosts, and process 0's address."""

    names: list[str]  # the host name of each process
    coordinator: str  # "host:port" of process 0
    listens: str  # "address:port" on which process 0 listened; "" in others. An address [::] is all addresses


def never() -> bool:
    """Returns False, as the default that nobody asks this process to stop."""
    return False


def meet(
    coordinator: str,
    num_processes: int,
    process_id: int,
    timeout_s: float,
    asked: Callable[[], bool] = never,
    *,
    key: Key = ANY_RUN,
    bind: str | None = None,
) -> Met:
    """Waits for all processes of the run `key`.

    coordinator: "host:port"; port 0 is a free one, for a single process. bind: the address on which process 0 listens;
    None: the coordinator's. Raises ConfigError, in all processes that are there, if one is missing after timeout_s, two
    have one id, they expect different numbers of processes, or process 0 is `asked` to stop before all are there.
    Another one leaves only if it is asked before it says hello.
    """
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + timeout_s
    if process_id == 0:
        server = _listen([bind] if bind is not None else _addresses(host.strip("[]")), int(port))
        with server:
            address, port = server.getsockname()[:2]
            names = _Gathering(server, num_processes, key, asked).names_of_all(deadline)
            return Met(names, f"{host}:{port}", f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
    hello = {"id": process_id, "of": num_processes, "host": socket.gethostname()}
    return Met(_join(host.strip("[]"), int(port), hello, key, deadline, asked), coordinator, "")


def is_open(listens: str) -> bool:
    """True if `Met.listens` stands for all addresses of the machine."""
    return listens.startswith(("[::]:", "0.0.0.0:"))


# -- Process 0 --------------------------------------------------------------------------------------------------------


def _addresses(host: str) -> list[str]:
    """Lists the addresses to listen on, best first; "" means all of the machine.

    A machine's own name may lead to 127.0.0.1 on itself alone, which the others could not reach; and an address may be
    that of a gateway. Then it is all addresses.
    """
    try:
        addresses = list(dict.fromkeys(str(x[4][0]) for x in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    except OSError:
        return [""]
    local = [x for x in addresses if ipaddress.ip_address(x.partition("%")[0]).is_loopback]
    if host == "localhost" or host in local:
        return local
    return [*(x for x in addresses if x not in local), ""]


def _listen(addresses: list[str], port: int) -> socket.socket:
    """Opens a listening socket on the first address that belongs to this machine. Raises ConfigError."""
    reason = ""
    for address in addresses:
        every = address in ("", "::", "0.0.0.0")
        six = socket.has_dualstack_ipv6() if every else ":" in address
        try:
            return socket.create_server(
                ("" if every else address, port),
                family=socket.AF_INET6 if six else socket.AF_INET,
                dualstack_ipv6=six and every,
                backlog=1024,
            )
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno != errno.EADDRNOTAVAIL:
                break
    raise ConfigError(
        f"coordinator: expected port {port} of process 0's host to be free, got: {reason}; end the run that uses it or "
        "choose another port; two processes may both have id 0"
    )


class _Guest:
    """A process' connection to process 0. id: of the process, known after its hello."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.until = time.monotonic() + HELLO_S
        self.nonce = secrets.token_hex(16)
        self.data = b""
        self.id: int | None = None
        self.their_nonce = ""


class _Gathering:
    """Process 0's side of the meeting: collects the other processes' messages and answers them."""

    def __init__(self, server: socket.socket, num_processes: int, key: Key, asked: Callable[[], bool]):
        self.server = server
        self.num_processes = num_processes
        self.key = key
        self.asked = asked
        self.names = {0: socket.gethostname()}
        self.others: dict[int, str] = {}  # hosts of processes with another secret, as they say
        self.guests: dict[socket.socket, _Guest] = {}  # in the order in which they came
        self.selector = selectors.DefaultSelector()
        server.setblocking(False)
        self.selector.register(server, selectors.EVENT_READ)

    def names_of_all(self, deadline: float) -> list[str]:
        """Waits for all processes, answers them, and returns the names of their hosts. Raises ConfigError."""
        try:
            problem = self._collect(deadline)
            hosts = [self.names.get(i, "") for i in range(self.num_processes)] if not problem else []
            self._answer({"error": problem} if problem else {"hosts": hosts})
        finally:
            for connection in list(self.guests):
                self._drop(connection)
            self.selector.close()
        if problem:
            raise ConfigError(problem)
        return hosts

    def _collect(self, deadline: float) -> str:
        """Reads the other processes' messages until all have arrived; returns an error, or ""."""
        while len(self.names) < self.num_processes:
            if self.asked():
                return _stopped(0, self.num_processes)
            now = time.monotonic()
            if now > deadline:
                missing = [i for i in range(self.num_processes) if i not in self.names]
                return _missing(missing, self.num_processes, self.others)
            for guest in [x for x in self.guests.values() if x.id is None and now > x.until]:
                self._drop(guest.connection)
            for ready, _ in self.selector.select(min(deadline - now, RETRY_S)):
                if ready.fileobj is self.server:
                    self._accept()
                elif (guest := ready.data) and guest.connection in self.guests and (problem := self._read(guest)):
                    return problem
        return ""

    def _accept(self) -> None:
        strangers = [guest for guest in self.guests.values() if guest.id is None]
        if len(strangers) >= STRANGERS:
            self._drop(strangers[0].connection)
        with contextlib.suppress(OSError):
            connection = self.server.accept()[0]
            connection.setblocking(False)
            guest = self.guests[connection] = _Guest(connection)
            self.selector.register(connection, selectors.EVENT_READ, guest)
            if not _send(connection, {"hello": HELLO, "nonce": guest.nonce}):
                self._drop(connection)

    def _read(self, guest: _Guest) -> str:
        """Reads from a guest's connection. Returns the error that ends the run, "" without one."""
        try:
            part = guest.connection.recv(HELLO_BYTES)
        except BlockingIOError:
            return ""
        except OSError:
            part = b""
        guest.data += part
        if not part or len(guest.data) > HELLO_BYTES or guest.id is not None:  # gone, or no process of ours
            self._drop(guest.connection)
            return ""
        if not guest.data.endswith(b"\n"):
            return ""
        try:
            body, run, known = _opened(guest.data, "hello", guest.nonce, self.key)
            hello = _parsed(body, HELLO_BODY)
            process_id, of, host, nonce = (hello[name] for name in HELLO_BODY)
            _check_host(host)
        except NO_MESSAGE:
            self._drop(guest.connection)
            return ""
        foreign = of == self.num_processes and not 0 < process_id < of
        if run != self.key.run or not known or foreign:
            error = f"processes: expected an id from 1 to {of - 1}, got {process_id}; correct --process_id"
            if run != self.key.run:
                error = OTHER_RUN
            elif not known:
                error = OTHER_SECRET
                if 0 < process_id < self.num_processes:
                    self.others[process_id] = host
            _send(guest.connection, _sealed({"error": error}, "answer", nonce, self.key))
            self._drop(guest.connection, at_once=False)
            return ""
        problem = self._problem(process_id, of, host)
        guest.id = process_id
        guest.their_nonce = nonce
        self.names.setdefault(process_id, host)
        return problem

    def _problem(self, process_id: int, of: int, host: str) -> str:
        """Checks a process' hello; returns what is wrong with it, or ""."""
        if of != self.num_processes:
            return (
                f"processes: expected {self.num_processes}, as process 0 says, got {of} from process {process_id} on "
                f"{host}; start all with the same number"
            )
        if process_id in self.names:
            return (
                f"processes: expected an id of its own for each, got {process_id} twice, on {self.names[process_id]} "
                f"and {host}; correct --process_id, or what sets it"
            )
        return ""

    def _drop(self, connection: socket.socket, *, at_once: bool = True) -> None:
        """Closes a connection. A process that leaves before all are there may come again.

        at_once: what was sent may be lost, and the port has no connection in TIME_WAIT when JAX listens on it.
        """
        guest = self.guests.pop(connection)
        if guest.id is not None and not any(other.id == guest.id for other in self.guests.values()):
            self.names.pop(guest.id, None)
        self.selector.unregister(connection)
        with contextlib.suppress(OSError):
            if at_once and guest.id is None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def _answer(self, answer: dict[str, Any]) -> None:
        """Sends the answer to all connected processes, and waits until they have closed, so that the port is free."""
        until = time.monotonic() + CLOSE_S
        for guest in [guest for guest in self.guests.values() if guest.id is not None]:
            with contextlib.suppress(OSError):
                guest.connection.settimeout(max(until - time.monotonic(), 0.01))
                guest.connection.sendall(_line(_sealed(answer, "answer", guest.their_nonce, self.key)))
                guest.connection.recv(1)


def _missing(missing: list[int], num_processes: int, others: dict[int, str]) -> str:
    """Makes the error about processes that did not arrive. others: hosts of those that came with another secret."""
    shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
    if named := [f"{i} on {others[i]}" for i in missing if i in others]:
        return (
            f"--secret_file: expected the same secret in all {num_processes} processes, got another one in process "
            f"{', '.join(named[:8])}; give all the same file"
        )
    return (
        f"processes: expected {num_processes}, got {num_processes - len(missing)}; process {shown} did not come: see "
        "its own output, or correct the number of processes"
    )


def _stopped(process_id: int, num_processes: int) -> str:
    """Makes the error of a process that leaves since it was asked to stop."""
    got = f"a request to stop in process {process_id} before"
    return f"processes: expected {num_processes} to connect, got {got}; start again"


# -- Another process --------------------------------------------------------------------------------------------------


def _join(
    host: str, port: int, hello: dict[str, Any], key: Key, deadline: float, asked: Callable[[], bool]
) -> list[str]:
    """Sends hello to process 0 and returns the answer."""
    reason = "no answer"
    has_other_secret = False
    while time.monotonic() < deadline:
        if asked():
            raise ConfigError(_stopped(hello["id"], hello["of"]))
        try:
            with socket.create_connection((host, port), timeout=2) as connection:
                until = min(time.monotonic() + HELLO_S, deadline)
                greeting = _parsed(_receive(connection, HELLO_BYTES, until), GREETING)
                if greeting["hello"] != HELLO:
                    raise ValueError(FOREIGN)
                nonce = secrets.token_hex(16)
                _send(connection, _sealed(hello | {"nonce": nonce}, "hello", greeting["nonce"], key))
                # Process 0 says who is missing.
                body, run, known = _opened(_receive(connection, ANSWER_BYTES, deadline + 5), "answer", nonce, key)
                if not known:
                    raise ValueError(OTHER_SECRET if run == key.run else OTHER_RUN)
                answer = _parsed(body, ANSWER_BODY)
                if "error" not in answer:
                    hosts = answer.get("hosts", [])
                    if len(hosts) != hello["of"]:
                        raise ValueError(FOREIGN)
                    for host_name in hosts:
                        _check_host(host_name)
                    return hosts
                if answer["error"] in (OTHER_RUN, OTHER_SECRET):
                    raise ValueError(answer["error"])
        except NO_MESSAGE as error:
            reason = getattr(error, "strerror", None) or (str(error) if type(error) is ValueError else "no answer")
            if reason == OTHER_SECRET and not has_other_secret:
                has_other_secret = True
                deadline = min(deadline, time.monotonic() + SECRET_S)
            time.sleep(RETRY_S)
            continue
        raise ConfigError("".join(x if x.isprintable() else " " for x in answer["error"]))
    if has_other_secret:
        raise ConfigError(
            f"--secret_file: expected the secret of process 0, which listens at {host}:{port}, got another one; give "
            "all processes the same file, or choose another port if that is another run"
        )
    raise ConfigError(
        f"coordinator: expected process 0 to listen at {host}:{port}, got: {reason}; start process 0 there, correct "
        "the address, or open the port"
    )


# -- Messages: lines of JSON ------------------------------------------------------------------------------------------


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parsed(text: str | bytes, form: dict[str, Any]) -> dict[str, Any]:
    """Parses a message. Raises ValueError if it does not have this form."""
    message = parse_json(text)
    try:
        check_form(message, form)
    except ValueError:
        raise ValueError(FOREIGN) from None
    return message


def _check_host(name: str) -> None:
    """Raises ValueError if a text is no name of a host."""
    if not name.isprintable() or len(name) > 255:
        raise ValueError(FOREIGN)


def _send(connection: socket.socket, message: dict[str, Any]) -> bool:
    """Sends a short message; returns False if the receiver does not read it."""
    with contextlib.suppress(OSError):
        connection.sendall(_line(message))
        return True
    return False


def _proof(role: str, nonce: str, body: str, key: Key) -> str:
    return hmac.new(key.secret, "\n".join((role, nonce, body)).encode(), "sha256").hexdigest()


def _sealed(message: dict[str, Any], role: str, nonce: str, key: Key) -> dict[str, Any]:
    """Signs a message: adds the run's id and an authentication code made with the secret. nonce: of the receiver."""
    body = json.dumps(message)
    return {"run": key.run, "body": body, "proof": _proof(role, nonce, body, key)}


def _opened(data: bytes, role: str, nonce: str, key: Key) -> tuple[str, str, bool]:
    """Reads a line of `_sealed`: (body, run's id, whether the authentication code is right).

    Raises what NO_MESSAGE names if it is another thing.
    """
    message = _parsed(data, SEALED)
    body = message["body"]
    known = hmac.compare_digest(message["proof"].encode(), _proof(role, nonce, body, key).encode())
    return body, message["run"], known


def _receive(connection: socket.socket, limit: int, until: float) -> bytes:
    """Receives a line of at most `limit` bytes, before the time `until`. Raises OSError or ValueError."""
    data = b""
    while not data.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(65536)
        if not part or len(data) + len(part) > limit:
            raise ValueError("no answer")
        data += part
    return data
