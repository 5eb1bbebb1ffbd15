"""Detects a run's launcher and each process' place, and connects the processes to one run.

`detect` is a pure function from flags and environment variables to a `Hosts`. The order is: the flags `--coordinator`,
`--num_processes` and `--process_id`; the variables of Kubeflow, MaxText, SkyPilot and torchrun; those of Open MPI and
Slurm. JAX detects the last two by itself, but not if they are partly set, and it gives a Slurm task one GPU even if the
task has a whole node. So they are read here too.

`connect` brings the processes together: they meet (rendezvous.py), `jax.distributed` starts, the devices are counted,
and a first collective runs over all of them. Each failure is a ConfigError of one line, within a minute.
"""

import argparse
import re
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from surojax.cluster import rendezvous
from surojax.cluster.rendezvous import ANY_RUN, Key
from surojax.errors import ConfigError, need
from surojax.placement.mesh import disable_compilation_cache
from surojax.untrusted import read_bytes

PORT = 8476  # of the coordinator, if nothing names another one
HEARTBEAT_S = 30.0
MEET_S = 40.0  # time for all processes to start
START_S = 15  # time for JAX's own connection after that
SHUTDOWN_S = 15


class Hosts(NamedTuple):
    """One process's place among all processes of a run."""

    source: str  # what said so, for messages
    coordinator: str  # "host:port" of process 0
    num_processes: int
    process_id: int
    local_id: int | None = None  # number of this process among those of its machine
    local_processes: int | None = None  # number of processes on this machine


class Variables(NamedTuple):
    """The environment variables of a launcher. Each entry lists alternatives, of which the first that is set counts."""

    launcher: str
    sign: tuple[str, ...]  # if one of them is set, this launcher started the process
    address: tuple[str, ...]
    num_processes: tuple[str, ...]
    process_id: tuple[str, ...]
    port: tuple[str, ...] = ()
    local_id: tuple[str, ...] = ()
    local_processes: tuple[str, ...] = ()
    run: tuple[str, ...] = ()  # those that are set tell its runs apart, and are the same in all processes of one


LAUNCHERS = (
    Variables(
        "Kubeflow",
        sign=("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
        address=("JAX_COORDINATOR_ADDRESS",),
        port=("JAX_COORDINATOR_PORT",),
        num_processes=("JAX_NUM_PROCESSES",),
        process_id=("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX"),  # the second is Kubernetes' own, of an indexed job
    ),
    Variables(
        "Kubeflow JAXJob",
        sign=("COORDINATOR_ADDRESS",),
        address=("COORDINATOR_ADDRESS",),
        port=("COORDINATOR_PORT",),
        num_processes=("NUM_PROCESSES",),
        process_id=("PROCESS_ID",),
    ),
    Variables(
        "MaxText",
        sign=("JAX_COORDINATOR_IP",),
        address=("JAX_COORDINATOR_IP",),
        port=("JAX_COORDINATOR_PORT",),
        num_processes=("NNODES",),
        process_id=("NODE_RANK",),
    ),
    Variables(
        "SkyPilot",
        sign=("SKYPILOT_NODE_RANK",),
        address=("SKYPILOT_NODE_IPS",),
        num_processes=("SKYPILOT_NUM_NODES",),
        process_id=("SKYPILOT_NODE_RANK",),
        run=("SKYPILOT_TASK_ID",),
    ),
    Variables(
        "torchrun",
        sign=("TORCHELASTIC_RUN_ID", "WORLD_SIZE"),
        address=("MASTER_ADDR",),
        port=("MASTER_PORT",),
        num_processes=("WORLD_SIZE",),
        process_id=("RANK",),
        local_id=("LOCAL_RANK",),
        local_processes=("LOCAL_WORLD_SIZE",),
        run=("TORCHELASTIC_RUN_ID",),  # each agent counts restarts of its own
    ),
    Variables(
        "Open MPI",
        sign=("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        address=("OMPI_MCA_orte_hnp_uri",),
        num_processes=("OMPI_COMM_WORLD_SIZE",),
        process_id=("OMPI_COMM_WORLD_RANK",),
        local_id=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_processes=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        run=("OMPI_MCA_orte_hnp_uri",),
    ),
    Variables(
        "Slurm",
        sign=("SLURM_STEP_ID", "SLURM_STEP_NODELIST"),
        address=("SLURM_STEP_NODELIST",),
        num_processes=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        process_id=("SLURM_PROCID",),
        local_id=("SLURM_LOCALID",),
        run=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
)
MAX_PROCESSES = 100_000
MAX_HEARTBEAT_S = 86_400.0
SECRET_BYTES = 16  # at least
SECRET_FILE_BYTES = 4096  # at most
FLAGS = "--coordinator HOST:PORT --num_processes N --process_id I"


def detect(
    environment: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Hosts | None:
    """Returns this process's place, or None if it is alone.

    A flag replaces what a variable says, and with num_processes and process_id no variable is read. Raises ConfigError
    if something is missing or contradicts itself.
    """
    if num_processes == 1 and process_id is None:
        process_id = 0
    if num_processes is not None and process_id is not None:
        launcher = None
        if coordinator is None:
            need(num_processes == 1, "--coordinator", "HOST:PORT of process 0", None, "give it, to every process")
            coordinator = "127.0.0.1:0"
        place = Hosts("flags", coordinator, num_processes, process_id)
    else:
        launcher = next((x for x in LAUNCHERS if any(name in environment for name in x.sign)), None)
        if launcher is None:
            _check_alone(environment, coordinator, num_processes, process_id)
            return None
        place = _read(launcher, environment, coordinator, num_processes, process_id)
    need(place.num_processes >= 1, _where(place), "at least 1 process", place.num_processes, "correct it")
    need(place.num_processes <= MAX_PROCESSES, _where(place), f"at most {MAX_PROCESSES:,}", place.num_processes,
         "correct it")  # fmt: skip
    need(
        0 <= place.process_id < place.num_processes,
        _where(place),
        f"a process id from 0 to {place.num_processes - 1}",
        place.process_id,
        "correct it, or the number of processes",
    )
    if launcher and place.num_processes == 1:
        return None
    return place._replace(coordinator=_with_port(place.coordinator, place.source))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a command that several processes can run."""
    group = parser.add_argument_group("several processes, if no scheduler says")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="the address of process 0")
    group.add_argument("--num_processes", type=int, metavar="N", help="how many")
    group.add_argument("--process_id", type=int, metavar="I", help="the number of this one, from 0")
    group.add_argument(
        "--heartbeat",
        type=float,
        default=HEARTBEAT_S,
        metavar="S",
        help="seconds without a sign of life after which a process counts as hanging (default: %(default)s)",
    )
    group.add_argument("--secret_file", metavar="FILE", help="strangers cannot join without it")
    parser.add_argument("--supervisor", type=int, metavar="FD", help=argparse.SUPPRESS)  # supervised.py


def detect_flags(args: argparse.Namespace, environment: Mapping[str, str]) -> Hosts | None:
    """Calls `detect` with the parsed options of `add_flags`. Raises ConfigError."""
    expected = f"1 to {MAX_HEARTBEAT_S:g} seconds"
    fits = 1 <= args.heartbeat <= MAX_HEARTBEAT_S
    need(fits, "--heartbeat", expected, args.heartbeat, f"{HEARTBEAT_S:g} is usual")
    return detect(
        environment,
        coordinator=args.coordinator,
        num_processes=args.num_processes,
        process_id=args.process_id,
    )


def key_of(hosts: Hosts | None, environment: Mapping[str, str], secret_file: str | None) -> Key:
    """Returns the run's id, from its launcher's variables, and its secret, from a file. Raises ConfigError.

    hosts: None: there is one process, which needs no secret; a file that is named is checked all the same.
    """
    launcher = next((x for x in LAUNCHERS if hosts and x.launcher == hosts.source), None)
    run = "/".join(environment[name] for name in (launcher.run if launcher else ()) if name in environment)[:256]
    if secret_file is None:
        return Key(run)
    try:
        secret = read_bytes(Path(secret_file), SECRET_FILE_BYTES).strip()
    except (OSError, ValueError) as error:  # ValueError: a name that no file has
        raise ConfigError(f"--secret_file: expected a file to read, got: {error}; correct the path") from error
    change = "make one: openssl rand -hex 32"
    need(len(secret) >= SECRET_BYTES, "--secret_file", f"at least {SECRET_BYTES} bytes", len(secret), change)
    return Key(run, secret)


def _where(hosts: Hosts) -> str:
    return f"processes ({hosts.source})"


def _check_alone(environment: Mapping[str, str], coordinator, num_processes, process_id) -> None:
    """Raises ConfigError if flags or variables name several processes, but not this process' number."""
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    if some := [name for name, value in given.items() if value is not None]:
        raise ConfigError(f"{some[0]}: expected all of {FLAGS}, got only {', '.join(some)}; give the others too")
    if "SLURM_JOB_ID" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        tasks = environment["SLURM_NTASKS"]
        raise ConfigError(
            f"processes (Slurm): expected a task started by srun, got a job of {tasks} tasks and no task's variables; "
            "write srun before the command, or --num_processes 1 to use this process only"
        )
    if "JOB_COMPLETION_INDEX" in environment:
        raise ConfigError(
            "processes (Kubernetes): expected JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES in an indexed job, got "
            "neither; set both in its template (docs/clusters.md), or --num_processes 1 if it has one pod"
        )


def _read(launcher: Variables, environment: Mapping[str, str], coordinator, num_processes, process_id) -> Hosts:
    """Reads this process' place from a launcher's variables; flags take precedence. Raises ConfigError."""

    def text(names: tuple[str, ...]) -> str | None:
        return next((environment[name] for name in names if environment.get(name)), None)

    def required(names: tuple[str, ...], flag: str) -> str:
        value = text(names)
        if value is None:
            started = next(name for name in launcher.sign if name in environment)
            raise ConfigError(
                f"processes ({launcher.launcher}): expected {' or '.join(names)} beside {started}, got nothing; start "
                f"all processes with {launcher.launcher}, or pass {flag}"
            )
        return value

    def number(names: tuple[str, ...], flag: str) -> int:
        value = required(names, flag)
        name = next(name for name in names if environment.get(name))
        need(value.strip().isdecimal(), name, "a whole number", value, f"correct it, or pass {flag}")
        return int(value)

    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") if launcher.launcher == "Slurm" else None
    local_processes = text(launcher.local_processes) or (tasks and _slurm_tasks_here(tasks, environment))
    local_id = text(launcher.local_id)
    return Hosts(
        launcher.launcher,
        coordinator or _address(launcher, required(launcher.address, "--coordinator HOST:PORT"), environment),
        num_processes if num_processes is not None else number(launcher.num_processes, "--num_processes"),
        process_id if process_id is not None else number(launcher.process_id, "--process_id"),
        int(local_id) if local_id else None,
        int(local_processes) if local_processes else None,
    )


def _address(launcher: Variables, text: str, environment: Mapping[str, str]) -> str:
    """Reads the coordinator's "host:port" from a launcher's variable."""
    port = next((environment[name] for name in launcher.port if environment.get(name)), None)
    match launcher.launcher:
        case "SkyPilot":
            host = text.split()[0]  # one address a line, in the order of the ranks
        case "Open MPI":
            match = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", text)
            need(match is not None, "OMPI_MCA_orte_hnp_uri", "a tcp address", text, "pass --coordinator HOST:PORT")
            assert match
            host = match[1] or match[2]
            port = _port_of_job(text.partition(".")[0], 2**12)
        case "Slurm":
            host = _first_node(text)
            port = _port_of_job(environment.get("SLURM_JOB_ID", "0"), 1)
        case "torchrun":
            host = text
            # torchrun's own store listens there.
            port = str(int(port) + 1) if port and "TORCHELASTIC_USE_AGENT_STORE" in environment else port
        case _:
            host = text
    return f"{_in_brackets(host)}:{port}" if port else host


def _in_brackets(host: str) -> str:
    """Returns a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def _port_of_job(job: str, divisor: int) -> str:
    """Chooses a port among the upper 4096 from the job's id, so that two jobs on a machine have different ports."""
    return str(2**16 - 2**12 + (int(job) // divisor if job.isdecimal() else 0) % 2**12)


def _first_node(nodes: str) -> str:
    """Returns the first host of Slurm's list: "node[003-005,9],gpu1" -> "node003"."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?([^,\[\]]*)", nodes)
    assert match, nodes
    return match[1] + (match[2] or "")


def _slurm_tasks_here(tasks: str, environment: Mapping[str, str]) -> int | None:
    """Returns the number of tasks on this node, from "8(x2),4": two nodes with 8 and one with 4."""
    tasks_of_nodes = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            return None
        tasks_of_nodes += [int(match[1])] * int(match[2] or 1)
    node = int(environment.get("SLURM_NODEID", "0"))
    return tasks_of_nodes[node] if node < len(tasks_of_nodes) else None


def _with_port(address: str, source: str) -> str:
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]") or (":" in host and not host.startswith("[")):
        return f"{_in_brackets(address)}:{PORT}"
    correct = port.isdecimal() and int(port) < 2**16 and host != ""
    need(correct, f"coordinator ({source})", "HOST:PORT", address, "correct it")
    return address


def local_gpus(hosts: Hosts, environment: Mapping[str, str], machine_gpus: int) -> list[int] | None:
    """The indices of the GPUs that this process uses; None: all visible GPUs.

    Processes that share a machine divide its `machine_gpus`, unless their launcher gave each its own
    (CUDA_VISIBLE_DEVICES of one, as with Slurm's --gpus-per-task=1). Raises ConfigError if they do not divide evenly.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    count = machine_gpus if visible is None else len([x for x in visible.split(",") if x.strip()])
    sharing = hosts.local_processes or 1
    if sharing == 1 or hosts.local_id is None or count <= 1:
        return None
    need(count % sharing == 0, "processes", f"a divisor of the {count} GPUs of a host", sharing, "start fewer a host")
    gpus = count // sharing
    return list(range(hosts.local_id * gpus, (hosts.local_id + 1) * gpus))


def gpus_of_machine() -> int:
    """The number of NVIDIA GPUs that the driver reports."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def connect(
    hosts: Hosts,
    environment: Mapping[str, str],
    *,
    key: Key = ANY_RUN,
    heartbeat_s: float = HEARTBEAT_S,
    say: Callable[[str], None] = print,
    asked: Callable[[], bool] = rendezvous.never,
) -> list[str]:
    """Starts `jax.distributed`, checks the devices of all processes, and waits for all. Returns their host names.

    key: what the processes have in common, which strangers do not know. Process 0 listens on the coordinator's address,
    or on that of JAX's variable JAX_COORDINATOR_BIND_ADDRESS, if it is set.

    Call it before anything uses a device. Raises ConfigError within a minute if a process is missing, two have one id,
    their numbers differ, the coordinator cannot be reached, or the processes have different numbers of devices; and at
    once if this process is `asked` to stop before all are there. From then on it must not leave until this returns.
    """
    gpus = local_gpus(hosts, environment, gpus_of_machine())
    bind = environment.get("JAX_COORDINATOR_BIND_ADDRESS")
    names, coordinator, listens = rendezvous.meet(
        hosts.coordinator,
        hosts.num_processes,
        hosts.process_id,
        MEET_S,
        asked,
        key=key,
        bind=bind.rpartition(":")[0].strip("[]") if bind else None,
    )
    try:
        jax.distributed.initialize(
            coordinator,
            hosts.num_processes,
            hosts.process_id,
            local_device_ids=gpus,
            cluster_detection_method="deactivate",
            coordinator_bind_address=listens or None,
            initialization_timeout=START_S,
            heartbeat_timeout_seconds=round(heartbeat_s) + START_S,  # watch.py is earlier, and names who is missing
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
        devices = jax.devices()
        if devices[0].platform == "cpu" and hosts.num_processes > 1:
            disable_compilation_cache()  # before the program that waits for all
        counts = Counter(device.process_index for device in devices)
        if len(set(counts.values())) == 1:
            multihost_utils.sync_global_devices("surojax: all processes are here")
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{_where(hosts)}: expected JAX to connect them, got: {reason}; start again") from error
    per_process = [counts[i] for i in range(hosts.num_processes)]
    same = len(set(per_process)) == 1 and per_process[0] > 0
    change = "give each process as many GPUs"
    need(same, _where(hosts), "the same number of devices in each process", per_process, change)
    machines = len(set(names))
    say(
        f"processes: {hosts.num_processes} on {machines} host{'s' * (machines > 1)} by {hosts.source}, "
        f"{per_process[0]} devices each, coordinator {coordinator}"
        f"{', which listens on all addresses' if rendezvous.is_open(listens) else ''}"
    )
    return names


def processes_here() -> int:
    """Counts this run's processes on this machine; every process has to call this."""
    if jax.process_count() == 1:
        return 1
    name = np.uint32(zlib.crc32(socket.gethostname().encode()))
    return int(np.sum(multihost_utils.process_allgather(name) == name))
