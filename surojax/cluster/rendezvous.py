"""All processes of a run meet at the coordinator's port, before JAX uses it.

`jax.distributed.initialize` ends a process with a stack trace if another one is missing or has the same id, and does
not say which. So process 0 first listens on that port itself: each other process sends its id, how many processes it
expects, and its host's name, and gets the names of all, or what is wrong. It takes milliseconds once all are there.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from surojax.errors import ConfigError

RETRY_S = 0.2
HELLO = "surojax"


def never() -> bool:
    """False: nobody asks this process to stop."""
    return False


def meet(
    coordinator: str, num_processes: int, process_id: int, timeout_s: float, asked: Callable[[], bool] = never
) -> tuple[list[str], str]:
    """Waits for all processes. Returns (the host name of each, the coordinator's address with its port).

    coordinator: "host:port"; port 0 is a free one, for a single process. Raises ConfigError, in all processes that are
    there, if one is missing after timeout_s, two have one id, they expect different numbers of processes, or process 0
    is `asked` to stop before all are there. Another one leaves only if it is asked before it says hello.
    """
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + timeout_s
    if process_id == 0:
        return _gather(host, int(port), num_processes, deadline, asked)
    return _join(host.strip("[]"), int(port), num_processes, process_id, deadline, asked), coordinator


def _gather(
    host: str, port: int, num_processes: int, deadline: float, asked: Callable[[], bool]
) -> tuple[list[str], str]:
    """Process 0: collects the others and answers them all."""
    try:
        if socket.has_dualstack_ipv6():
            server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            server = socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(
            f"coordinator: expected port {port} of process 0's host to be free, got: {error.strerror}; end the run "
            "that uses it or choose another port; two processes may both have id 0"
        ) from error
    names = {0: socket.gethostname()}
    with server, contextlib.ExitStack() as connections:
        port = server.getsockname()[1]
        joined = []
        problem = ""
        while len(names) < num_processes and not problem:
            if asked():
                problem = _stopped(0, num_processes)
                break
            server.settimeout(min(max(deadline - time.monotonic(), 0.01), RETRY_S))
            try:
                connection = connections.enter_context(server.accept()[0])
                connection.settimeout(5)
                hello = _receive(connection)
            except TimeoutError:
                missing = [i for i in range(num_processes) if i not in names]
                if time.monotonic() < deadline:
                    continue  # nobody came yet, or something connected and said nothing
                problem = _missing(missing, num_processes)
                break
            except (OSError, ValueError):
                continue  # something else that looks for open ports
            if hello.get("hello") != HELLO:
                continue
            joined.append(connection)
            problem = _problem(hello, num_processes, names)
            names[hello["id"]] = hello["host"]
        hosts = [names.get(i, "") for i in range(num_processes)]
        answer = {"error": problem} if problem else {"hosts": hosts}
        for connection in joined:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(answer).encode() + b"\n")
                connection.recv(1)  # the other side closes first, so that the port is free at once
    if problem:
        raise ConfigError(problem)
    return hosts, f"{host}:{port}"


def _problem(hello: dict[str, Any], num_processes: int, names: dict[int, str]) -> str:
    """The fault of a process that says hello; "" if there is none."""
    who = f"process {hello['id']} on {hello['host']}"
    if hello["of"] != num_processes:
        return (
            f"processes: expected {num_processes}, as process 0 says, got {hello['of']} from {who}; start all with the "
            "same number"
        )
    if hello["id"] in names:
        return (
            f"processes: expected an id of its own for each, got {hello['id']} twice, on {names[hello['id']]} and "
            f"{hello['host']}; correct --process_id, or what sets it"
        )
    return ""


def _missing(missing: list[int], num_processes: int) -> str:
    """The error for processes that did not come."""
    shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
    return (
        f"processes: expected {num_processes}, got {num_processes - len(missing)}; process {shown} did not come: see "
        "its own output, or correct the number of processes"
    )


def _stopped(process_id: int, num_processes: int) -> str:
    """The error of a process that leaves because it is asked to."""
    return f"processes: expected {num_processes} to connect, got SIGTERM in process {process_id} before; start again"


def _join(
    host: str, port: int, num_processes: int, process_id: int, deadline: float, asked: Callable[[], bool]
) -> list[str]:
    """Another process: says hello to process 0 and returns what it answers."""
    hello = {"hello": HELLO, "id": process_id, "of": num_processes, "host": socket.gethostname()}
    reason = "no answer"
    while time.monotonic() < deadline:
        if asked():
            raise ConfigError(_stopped(process_id, num_processes))
        try:
            with socket.create_connection((host, port), timeout=2) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                connection.settimeout(max(deadline - time.monotonic(), 0) + 5)  # process 0 says who is missing
                answer = _receive(connection)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            time.sleep(RETRY_S)
            continue
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer["hosts"]
    raise ConfigError(
        f"coordinator: expected process 0 to listen at {host}:{port}, got: {reason}; start process 0 there, correct "
        "the address, or open the port"
    )


def _receive(connection: socket.socket) -> dict[str, Any]:
    """One line of JSON. Raises OSError or ValueError if the other side sends something else."""
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(65536)
        if not part or len(data) > 1 << 24:
            raise ValueError("the connection ended")
        data += part
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("not a message")
    return found
