"""Many processes: what is taken from each launcher's environment, and how processes that do not fit are refused."""

import contextlib
import json
import os
import socket
import threading
import time

import jax
import pytest

from surojax import ConfigError
from surojax.cluster import hosts as hosts_module, rendezvous
from surojax.cluster.hosts import Hosts, detect, key_of, local_gpus
from surojax.cluster.rendezvous import Key, meet

SLURM = {
    "SLURM_JOB_ID": "81237",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[003-004,7],gpu1",
    "SLURM_STEP_NUM_TASKS": "14",
    "SLURM_NTASKS": "14",
    "SLURM_STEP_TASKS_PER_NODE": "4(x3),2",
    "SLURM_PROCID": "13",
    "SLURM_NODEID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "16",
    "RANK": "9",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
}
KUBEFLOW = {"JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:6666", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
JOBSET = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "JAX_COORDINATOR_ADDRESS": "train-workers-0-0.train",
    "JAX_NUM_PROCESSES": "2",
}
JAXJOB = {"COORDINATOR_ADDRESS": "job-0", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "2", "PROCESS_ID": "0"}
MAXTEXT = {"JAX_COORDINATOR_IP": "10.0.0.1", "JAX_COORDINATOR_PORT": "1234", "NNODES": "2", "NODE_RANK": "1"}
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}


@pytest.mark.parametrize(
    "environment, taken",
    [
        ({}, None),
        ({"PATH": "/bin", "MASTER_ADDR": "set by hand"}, None),
        # 61440 + 81237 % 4096: the port that JAX's own detection takes
        (SLURM, Hosts("Slurm", f"node003:{61440 + 81237 % 4096}", 14, 13, 1, 2)),
        (SLURM | {"SLURM_STEP_NODELIST": "a1,b[2-3]"}, Hosts("Slurm", f"a1:{61440 + 81237 % 4096}", 14, 13, 1, 2)),
        # No number of the tasks on this node can be told.
        *((SLURM | changes, Hosts("Slurm", f"node003:{61440 + 81237 % 4096}", 14, 13, 1, None))
          for changes in ({"SLURM_STEP_TASKS_PER_NODE": "4(x3"}, {"SLURM_NODEID": "4"})),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_NTASKS": "8"}, None),  # what srun shall take, outside of any job
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),  # a batch script's own shell
        (OPEN_MPI, Hosts("Open MPI", f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}", 4, 3, 1, 2)),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "0.0;tcp6://[fe80::1,fe80::2]:4"},
         Hosts("Open MPI", "[fe80::1]:61440", 4, 3, 1, 2)),
        (KUBEFLOW, Hosts("Kubeflow", "job-node-0-0.job:6666", 3, 2)),
        (KUBEFLOW | JOBSET | {"JAX_PROCESS_ID": "0"}, Hosts("Kubeflow", "train-workers-0-0.train:8476", 2, 0)),
        (JOBSET, Hosts("Kubeflow", "train-workers-0-0.train:8476", 2, 1)),
        (JAXJOB, Hosts("Kubeflow JAXJob", "job-0:6666", 2, 0)),
        (MAXTEXT, Hosts("MaxText", "10.0.0.1:1234", 2, 1)),
        (SKYPILOT, Hosts("SkyPilot", "10.0.0.4:8476", 2, 1)),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}, None),
        (TORCHRUN, Hosts("torchrun", "10.0.0.1:29501", 16, 9, 1, 8)),  # torchrun's store is at 29500
        (TORCHRUN | SLURM, Hosts("torchrun", "10.0.0.1:29501", 16, 9, 1, 8)),
        ({k: v for k, v in TORCHRUN.items() if "STORE" not in k}, Hosts("torchrun", "10.0.0.1:29500", 16, 9, 1, 8)),
        ({k: v for k, v in TORCHRUN.items() if "PORT" not in k}, Hosts("torchrun", "10.0.0.1:8476", 16, 9, 1, 8)),
        (TORCHRUN | {"MASTER_ADDR": "fd00::1"}, Hosts("torchrun", "[fd00::1]:29501", 16, 9, 1, 8)),
        *((KUBEFLOW | {"JAX_COORDINATOR_ADDRESS": address}, Hosts("Kubeflow", taken, 3, 2))
          for address, taken in {"fd00::1": "[fd00::1]:8476", "[fd00::1]": "[fd00::1]:8476",
                                 "[fd00::1]:7": "[fd00::1]:7", "a:65535": "a:65535"}.items()),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # every pod has it
    ],
)  # fmt: skip
def test_what_is_taken_from_each_environment(environment, taken):
    assert detect(environment) == taken


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
         r"^processes \(Slurm\): expected a task started by srun, .* 8 tasks .*; write srun before the command"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"},
         r"^processes \(Slurm\): expected SLURM_PROCID beside SLURM_STEP_ID, got nothing; .*--process_id$"),
        ({k: v for k, v in OPEN_MPI.items() if "uri" not in k},
         r"^processes \(Open MPI\): expected OMPI_MCA_orte_hnp_uri .*, or pass --coordinator HOST:PORT$"),
        (KUBEFLOW | {"JAX_NUM_PROCESSES": "two"}, r"^JAX_NUM_PROCESSES: expected a whole number, got 'two'"),
        (KUBEFLOW | {"JAX_PROCESS_ID": "3"}, r"^processes \(Kubeflow\): expected a process id from 0 to 2, got 3"),
        (KUBEFLOW | {"JAX_NUM_PROCESSES": "0"}, r"^processes \(Kubeflow\): expected at least 1 process, got 0"),
        *((KUBEFLOW | {"JAX_COORDINATOR_ADDRESS": address}, r"^coordinator \(Kubeflow\): expected HOST:PORT, got")
          for address in ("host:port", "host:65536", ":6666")),
        ({"JOB_COMPLETION_INDEX": "0"}, r"^processes \(Kubernetes\): expected JAX_COORDINATOR_ADDRESS and "),
        ({"WORLD_SIZE": "2", "RANK": "0"}, r"^processes \(torchrun\): expected MASTER_ADDR beside WORLD_SIZE"),
    ],
)  # fmt: skip
def test_an_environment_that_is_partly_set_is_refused(environment, message):
    with pytest.raises(ConfigError, match=message) as raised:
        detect(environment)
    assert "\n" not in str(raised.value)


def test_flags_come_first_and_fill_what_is_missing():
    flags = {"coordinator": "here:1", "num_processes": 2, "process_id": 1}
    assert detect(SLURM, **flags) == Hosts("flags", "here:1", 2, 1)
    without = {k: v for k, v in OPEN_MPI.items() if "uri" not in k}
    assert detect(without, coordinator="here:1") == Hosts("Open MPI", "here:1", 4, 3, 1, 2)
    assert detect(SLURM, num_processes=1) == Hosts("flags", "127.0.0.1:0", 1, 0)
    assert detect(KUBEFLOW, num_processes=4) == Hosts("Kubeflow", "job-node-0-0.job:6666", 4, 2)
    assert detect(KUBEFLOW, process_id=1) == Hosts("Kubeflow", "job-node-0-0.job:6666", 3, 1)
    with pytest.raises(ConfigError, match=r"^processes \(flags\): expected a process id from 0 to 0, got 1; "):
        detect({}, num_processes=1, process_id=1)
    with pytest.raises(ConfigError, match=r"^--coordinator: expected all of .*, got only --coordinator; "):
        detect({}, coordinator="here:1")
    with pytest.raises(ConfigError, match=r"^--coordinator: expected HOST:PORT of process 0, got None"):
        detect({}, num_processes=2, process_id=0)


@pytest.mark.parametrize(
    "local_id, local_processes, visible, taken",
    [
        (None, None, None, None),  # one process for a host: all of its GPUs
        (0, 1, None, None),  # so also with Slurm's --ntasks-per-node=1, for which JAX would take one
        (0, None, None, None),
        (None, 2, None, None),
        (3, 8, None, [3]),
        (1, 2, None, [4, 5, 6, 7]),
        (3, 8, "5", None),  # --gpus-per-task=1: the launcher has chosen
        (1, 2, "2,3,4,5", [2, 3]),  # numbers among those that are visible
    ],
)
def test_processes_of_a_host_divide_its_gpus(local_id, local_processes, visible, taken):
    hosts = Hosts("Slurm", "a:1", 16, 3, local_id, local_processes)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert local_gpus(hosts, environment, 8) == taken


def test_gpus_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"^processes: expected a divisor of the 8 GPUs of a host, got 3"):
        local_gpus(Hosts("Slurm", "a:1", 3, 0, 0, 3), {}, 8)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def meeting(*processes: tuple[int, int], timeout_s: float = 10.0, asked: dict[int, threading.Event] | None = None):
    """What each process, as (id, number of processes), gets from `meet`: the names, or the text of the error.

    asked: by id, what says that a process shall stop.
    """
    address = f"127.0.0.1:{free_port()}"
    found = [None] * len(processes)

    def one(i: int, process_id: int, of: int) -> None:
        try:
            stops = asked[process_id].is_set if asked and process_id in asked else rendezvous.never
            found[i] = rendezvous.meet(address, of, process_id, timeout_s, stops).names
        except ConfigError as error:
            found[i] = str(error)

    threads = [threading.Thread(target=one, args=(i, *process)) for i, process in enumerate(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_processes_meet_in_any_order():
    name = socket.gethostname()
    assert meeting((2, 3), (0, 3), (1, 3)) == [[name] * 3] * 3
    assert rendezvous.meet("127.0.0.1:0", 1, 0, 1)[0] == [name]


def test_process_0_that_is_asked_to_stop_while_it_waits_tells_those_that_came():
    """And another one that is asked does not come."""
    asked = {0: threading.Event(), 2: threading.Event()}
    asked[2].set()
    timer = threading.Timer(0.5, asked[0].set)
    timer.start()
    started = time.monotonic()
    before = "processes: expected 3 to connect, got a request to stop in process {} before; start again"
    found = meeting((0, 3), (1, 3), (2, 3), asked=asked)
    assert found == [before.format(0), before.format(0), before.format(2)]
    assert time.monotonic() - started < 5


def test_processes_that_do_not_fit_are_refused_everywhere_in_one_line():
    """Within a second, or when the time is up."""
    started = time.monotonic()
    name = socket.gethostname()
    twice = f"processes: expected an id of its own for each, got 1 twice, on {name} and {name}; correct --process_id, "
    found = meeting((0, 3), (1, 3), (1, 3))
    assert [text.startswith(twice) for text in found] == [True] * 3
    found = meeting((0, 3), (1, 2))
    assert [text.startswith("processes: expected 3, as process 0 says, got 2 from process 1") for text in found] == [
        True
    ] * 2
    assert time.monotonic() - started < 5
    found = meeting((0, 3), (2, 3), timeout_s=0.5)
    assert found == ["processes: expected 3, got 2; process 1 did not come: see its own output, or correct the number "
                     "of processes"] * 2  # fmt: skip
    (found,) = meeting((1, 2), timeout_s=0.5)
    assert found.startswith("coordinator: expected process 0 to listen at 127.0.0.1:")
    with socket.create_server(("", 0)) as server, pytest.raises(ConfigError, match="two processes may both have id 0"):
        rendezvous.meet(f"127.0.0.1:{server.getsockname()[1]}", 2, 0, 1)


# -- Strangers ---------------------------------------------------------------------------------------------------------


class Waiting:
    """Process 0 while it waits for the others. Context manager; in it, `connect` is a stranger's connection."""

    def __init__(self, key: Key, of: int = 2):
        self.key = key
        self.of = of
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.result: list = []
        self.strangers: list[socket.socket] = []

    def __enter__(self):
        self.thread = threading.Thread(target=self._meet, args=(0,))
        self.thread.start()
        while True:
            try:
                self.connect().close()
                return self
            except ConnectionRefusedError:
                time.sleep(0.01)

    def _meet(self, process_id: int) -> None:
        try:
            self.result.append(meet(self.address, self.of, process_id, 10, key=self.key))
        except Exception as error:  # a traceback is a failure that the test should see
            self.result.append(error)

    def connect(self) -> socket.socket:
        self.strangers.append(socket.create_connection(("127.0.0.1", self.port), 5))
        return self.strangers[-1]

    def say(self, message: bytes) -> bytes:
        """Sends a message after process 0's greeting; returns what it answers."""
        stranger = self.connect()
        assert json.loads(stranger.recv(4096))["hello"] == "surojax"
        stranger.sendall(message)
        return answer_of(stranger)

    def hello(self, key: Key, **fields) -> socket.socket:
        """Says a hello of these fields, with the proof of `key`."""
        stranger = self.connect()
        nonce = json.loads(stranger.recv(4096))["nonce"]
        message = {"id": 1, "of": self.of, "host": "stranger", "nonce": "0"} | fields
        message = {k: v for k, v in message.items() if v is not None}
        rendezvous._send(stranger, rendezvous._sealed(message, "hello", nonce, key))
        return stranger

    def error(self, key: Key, **fields) -> str:
        """The error that process 0 answers to a hello; "" if it closes."""
        answer = answer_of(self.hello(key, **fields))
        return json.loads(json.loads(answer)["body"])["error"] if answer else ""

    def __exit__(self, *_):
        """The other processes come, and all meet, whoever else came."""
        others = [threading.Thread(target=self._meet, args=(i,)) for i in range(1, self.of)]
        for other in others:
            other.start()
        for thread in (self.thread, *others):
            thread.join()
        for stranger in self.strangers:
            stranger.close()
        assert [getattr(x, "names", x) for x in self.result] == [[socket.gethostname()] * self.of] * self.of


def answer_of(stranger: socket.socket) -> bytes:
    """A short message, b"" if the other side closes."""
    try:
        return stranger.recv(4096)
    except ConnectionResetError:
        return b""


KEY = Key("run-1", b"a secret of 16 bytes or more")


def test_strangers_do_not_end_a_rendezvous_nor_hold_it(monkeypatch):
    """They say nothing, a byte now and then, garbage, too much, or JSON that is nested too deep; and do not go away."""
    monkeypatch.setattr(rendezvous, "HELLO_S", 0.4)
    with Waiting(KEY) as waiting:
        silent = [waiting.connect() for _ in range(3)]
        slow = waiting.connect()
        slow.recv(4096)
        dropped = False
        started = time.monotonic()
        while time.monotonic() - started < 3 and not dropped:
            try:
                slow.sendall(b"x")
            except OSError:
                dropped = True
            time.sleep(0.05)
        assert dropped
        nested = rendezvous._line({"run": KEY.run, "body": "[" * 1000, "proof": "[" * 1000})
        for garbage in (
            b"GET / HTTP/1.0\r\n\r\n",
            nested,
            b'{"run": 1, "body": "", "proof": []}\n',
            b"\xff\x00" * 40 + b"\n",
            b"[]\n",
            b"null\n",
            b"1e999\n",
            b"x" * 100_000,
            b"[" * 4000 + b"\n",
            b'{"body": ' + b"9" * 4000 + b"}\n",
        ):
            assert waiting.say(garbage) == b""
        for stranger in silent:
            stranger.recv(4096)
            assert answer_of(stranger) == b""


def test_more_strangers_than_there_is_room_for(monkeypatch):
    """The oldest are closed, and the other process still gets in."""
    monkeypatch.setattr(rendezvous, "STRANGERS", 4)
    with Waiting(KEY) as waiting:
        for _ in range(20):
            waiting.connect()


def test_who_is_no_process_of_the_run_is_sent_away():
    """A missing, a foreign and a mistyped id; another run; no secret, or another one; a hello that was said before."""
    other = rendezvous.OTHER_SECRET
    with Waiting(KEY) as waiting:
        for fields in ({"id": None}, {"id": "1"}, {"id": True}, {"id": 1.0}, {"of": None}, {"host": 7}, {"of": -1}):
            assert waiting.error(KEY, **fields) == ""
        for foreign in (0, 2, -1, 10**30):
            expected = f"processes: expected an id from 1 to 1, got {foreign}; correct --process_id"
            assert waiting.error(KEY, id=foreign) == expected
        assert waiting.error(KEY._replace(run="run-2")) == rendezvous.OTHER_RUN
        assert waiting.error(KEY._replace(secret=b"")) == other
        assert waiting.error(KEY._replace(secret=b"guessed"), of=3) == other  # which would end the run
        started = time.monotonic()
        assert waiting.say(b"x" * 5000) == b"" and time.monotonic() - started < rendezvous.HELLO_S / 2  # too long
        seen = rendezvous._line(rendezvous._sealed({"id": 1, "of": 2, "host": "", "nonce": ""}, "hello", "seen", KEY))
        assert json.loads(json.loads(waiting.say(seen))["body"]) == {"error": other}


GREETING = {"hello": "surojax", "nonce": "1"}
FALSE_GREETINGS = (
    [],
    {},
    7,
    "[" * 1000,
    {"hello": "surojax"},
    {"hello": ["surojax"], "nonce": "1"},
    {"hello": "surojax", "nonce": 1},
)
FALSE_ANSWERS = (
    [],
    {},
    {"hosts": "ab"},
    {"hosts": ["a"]},
    {"hosts": ["a"] * 3},
    {"hosts": ["a", 1]},
    {"hosts": ["a", "\x1b[2J"]},
    {"hosts": ["a", "b" * 300]},
    {"error": []},
    {"error": None},
)


@pytest.mark.parametrize(
    "greeting, answer", [*((x, None) for x in FALSE_GREETINGS), *((GREETING, x) for x in FALSE_ANSWERS)]
)
def test_a_process_0_that_is_none_is_not_believed(greeting, answer):
    """Whatever it greets with, or answers although it knows the secret: nobody listens there, with one line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(json.dumps(greeting).encode() + b"\n")
                        if answer is not None and (hello := connection.recv(4096)):
                            nonce = json.loads(json.loads(hello)["body"])["nonce"]
                            rendezvous._send(connection, rendezvous._sealed(answer, "answer", nonce, KEY))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(
            ConfigError, match=rf"^coordinator: expected process 0 to listen at 127.0.0.1:{port}, got: "
        ):
            meet(f"127.0.0.1:{port}", 2, 1, 0.1, key=KEY)
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def test_a_process_of_another_run_says_so():
    refused = pytest.raises(ConfigError, match=r"got: a process of another run; start")
    with Waiting(KEY) as waiting, refused:
        meet(waiting.address, 2, 1, 0.3, key=Key("run-2", KEY.secret))


@pytest.mark.full(after=1)
@pytest.mark.parametrize("secret", [b"another secret of 16 bytes", b""], ids=["another", "none"])
def test_a_process_with_another_secret_says_so_at_once_and_process_0_names_it(secret, monkeypatch):
    """Process 0 waits for the right one: who does not know the secret ends nothing."""
    monkeypatch.setattr(rendezvous, "SECRET_S", 0.3)
    address = f"127.0.0.1:{free_port()}"
    errors: dict[int, str] = {}
    ends: dict[int, float] = {}

    def meet_as(process_id: int, key: Key) -> None:
        try:
            meet(address, 3, process_id, 2, key=key)
        except ConfigError as error:
            errors[process_id] = str(error)
            ends[process_id] = time.monotonic()

    started = time.monotonic()
    threads = [
        threading.Thread(target=meet_as, args=(i, KEY._replace(secret=secret) if i == 2 else KEY)) for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends[2] - started < 1.5
    assert errors[2].startswith(f"--secret_file: expected the secret of process 0, which listens at {address}, got ")
    named = f"got another one in process 2 on {socket.gethostname()}; give all the same file"
    assert errors[0] == errors[1] and named in errors[0]
    with Waiting(KEY) as waiting, pytest.raises(ConfigError, match=r"^--secret_file: expected the secret of process 0"):
        meet(waiting.address, 2, 1, 5, key=KEY._replace(secret=secret))


def test_a_process_believes_the_process_0_that_knows_its_secret_alone():
    """Another one, which greets as one would, is not believed."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            connection = server.accept()[0]
            with connection:
                rendezvous._send(connection, {"hello": rendezvous.HELLO, "nonce": "0"})
                nonce = json.loads(json.loads(connection.recv(4096))["body"])["nonce"]
                rendezvous._send(connection, rendezvous._sealed({"hosts": ["a", "b"]}, "answer", nonce, Key("run-1")))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(ConfigError, match=r"^--secret_file: expected the secret of process 0"):
            meet(f"127.0.0.1:{server.getsockname()[1]}", 2, 1, 0.1, key=KEY)
        thread.join()


def test_a_process_that_left_may_come_again():
    """It was killed while it waited, and is started again: it is not there twice."""
    with Waiting(KEY, of=3) as waiting:
        waiting.hello(KEY).close()
        time.sleep(0.1)


def test_process_0_listens_on_the_coordinators_address_only(monkeypatch):
    """Not where its own name leads to 127.0.0.1, nor on a gateway's: then on all addresses, and it says so."""
    assert rendezvous._addresses("127.0.0.1") == ["127.0.0.1"] and rendezvous._addresses("::1") == ["::1"]
    assert set(rendezvous._addresses("localhost")) <= {"127.0.0.1", "::1"}
    listens = meet("127.0.0.1:0", 1, 0, 1).listens
    assert listens.startswith("127.0.0.1:") and not rendezvous.is_open(listens)

    def resolved(*addresses: str):
        return lambda *_, **__: [(None, None, None, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", resolved("127.0.1.1", "10.0.0.5", "10.0.0.5"))
    assert rendezvous._addresses("node1") == ["10.0.0.5", ""]
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", resolved("127.0.1.1"))
    assert rendezvous._addresses("node1") == [""]
    monkeypatch.undo()
    with rendezvous._listen(["192.0.2.1", ""], 0) as server:  # no machine's (RFC 5737)
        assert rendezvous.is_open(f"[{server.getsockname()[0]}]:1".replace("[0.0.0.0]", "0.0.0.0"))


@pytest.mark.parametrize(
    "variable, expected", [({}, "127.0.0.1"), ({"JAX_COORDINATOR_BIND_ADDRESS": "[::1]:1"}, "[::1]")]
)
def test_jax_listens_where_the_rendezvous_did(monkeypatch, variable, expected):
    found = {}

    def initialize(*_, **options):
        found.update(options)
        raise RuntimeError("as far as this test goes")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    place = Hosts("flags", f"127.0.0.1:{free_port()}", 1, 0)
    with pytest.raises(ConfigError, match="as far as this test goes"):
        hosts_module.connect(place, variable)
    assert found["coordinator_bind_address"] == place.coordinator.replace("127.0.0.1", expected)


def test_what_the_processes_of_a_run_have_in_common(tmp_path):
    """The scheduler's own id of the run, and a secret from a file."""
    place = detect(SLURM)
    assert place and key_of(place, SLURM | {"SLURM_RESTART_COUNT": "2"}, None) == Key("81237/0/2")
    file = tmp_path / "secret"
    file.write_text(" 0123456789abcdef\n")
    flags = Hosts("flags", "a:1", 2, 1)
    assert key_of(flags, SLURM, str(file)) == Key("", b"0123456789abcdef")
    assert key_of(None, SLURM, str(file)) == Key("", b"0123456789abcdef") and key_of(None, SLURM, None) == Key()
    assert key_of(flags, {}, None) == Key() and len("0123456789abcdef") == 16
    file.write_text("short")
    for place in (flags, None):  # of one process too, which has nobody to show it to
        with pytest.raises(ConfigError, match=r"^--secret_file: expected at least 16 bytes, got 5; make one: openssl"):
            key_of(place, {}, str(file))
    sky = {"SKYPILOT_TASK_ID": "sky-1", "TORCHELASTIC_RUN_ID": "t", "OMPI_MCA_orte_hnp_uri": "u"}
    runs = {"SkyPilot": "sky-1", "torchrun": "t", "Open MPI": "u", "Kubeflow": "", "MaxText": "", "Kubeflow JAXJob": ""}
    for launcher, run in runs.items():
        assert key_of(Hosts(launcher, "a:1", 2, 1), sky, None) == Key(run), launcher
    with pytest.raises(ConfigError, match=r"^--secret_file: expected a file to read, got: .*No such file"):
        key_of(flags, {}, str(tmp_path / "none"))
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "a pipe or a device"), ("", "directory"), ("\0", "null")):
        with pytest.raises(ConfigError, match=f"^--secret_file: expected a file to read, got: .*{reason}"):
            key_of(flags, {}, str(tmp_path / name))


@pytest.mark.parametrize(
    "missing, others, said",
    [
        ([3], {}, "processes: expected 20, got 19; process 3 did not come: see"),
        ([*range(1, 9)], {}, "got 12; process 1, 2, 3, 4, 5, 6, 7, 8 did not come: see"),
        ([*range(1, 10)], {}, "got 11; process 1, 2, 3, 4, 5, 6, 7, 8 ... did not come: see"),
        (
            [3, 4],
            {4: "b", 5: "c"},
            "--secret_file: expected the same secret in all 20 processes, got another one in pr",
        ),
        ([3, 4], {4: "b", 5: "c"}, "in process 4 on b; give all the same file"),
    ],
)
def test_who_did_not_come(missing, others, said):
    assert said in rendezvous._missing(missing, 20, others)


def test_a_line_is_received_whole_in_time_and_within_its_limit():
    soon = time.monotonic() + 5
    for sent, limit, until, error in [
        (b"1234\n", 5, soon, None),
        (b"1234\n", 4, soon, ValueError),
        (b"", 9, soon, ValueError),
        (None, 9, time.monotonic() - 1, TimeoutError),
    ]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            if sent is not None:
                theirs.sendall(sent)
                theirs.shutdown(socket.SHUT_WR)
            if error is None:
                assert rendezvous._receive(ours, limit, until) == sent
            else:
                with pytest.raises(error):
                    rendezvous._receive(ours, limit, until)


def test_names_of_hosts():
    rendezvous._check_host("a" * 255)
    for name in ("a" * 256, "a\nb"):
        with pytest.raises(ValueError, match=rendezvous.FOREIGN):
            rendezvous._check_host(name)
