"""Several processes of a run on this machine or on a Ray cluster, and their supervisor.

    python -m surojax.launch -n 2 [--restarts 3] [--elastic] -- python -m surojax.train --config configs/tiny.py ...
    python -m surojax.launch -n 2 --ray [--gpus-per-process 8] -- python -m surojax.train ...

Each process's lines come with its number. When one ends with an error, it is named, the others are ended within
seconds, and all start again from the last checkpoint, up to `--restarts` times. With `--elastic`, they start again with
fewer processes; gradient_accumulation_steps is raised so that a step has the same samples.

Exit codes: 0, all finished. 75: asked to stop (SIGTERM, Ctrl-C, --max-minutes), not finished; start again to continue.
1: ended with an error more often than `--restarts`. One GPU machine needs no launcher: one process drives all
GPUs. Clusters have launchers of their own (docs/clusters.md); this one also makes a cluster of virtual CPU devices
(`--devices-per-process`), as the tests do.
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import psutil

from surojax.config import flags
from surojax.errors import ConfigError, exit_codes, need
from surojax.parallel.hosts import gpus_of_machine
from surojax.parallel.watch import STOPPED

GRACE_S = 5.0  # between SIGTERM and SIGKILL for processes whose run has failed
STOP_S = 600.0  # for a checkpoint, after SIGTERM to the supervisor
POLL_S = 0.1
DEVICE_COUNT = "--xla_force_host_platform_device_count"
# Gloo's line for every group of devices, and the stack of JAX's client when it loses the coordinator.
NOISE = re.compile(r"\[Gloo\] Rank|\*\*\* Check failure stack|    @ +0x[0-9a-f]+ ")
COMMAND = "python -m surojax.train ..."
AT_END = {0: "all processes have finished", STOPPED: "stopped: start again to continue"}


class Ended(NamedTuple):
    """The first process of a group that ended with an error, or the whole group. reason: a line; "" without error."""

    code: int
    reason: str


class Group:
    """The processes of one start. Context manager that leaves none behind."""

    def __init__(self, command: list[str], n: int, devices: int | None):
        address = f"127.0.0.1:{_free_port()}"
        environment = dict(os.environ)
        if devices is not None:
            others = [x for x in environment.get("XLA_FLAGS", "").split() if not x.startswith(DEVICE_COUNT)]
            environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*others, f"{DEVICE_COUNT}={devices}"])}
        gpus = None if devices is not None else _visible_gpus(environment, n)
        self.processes: list[subprocess.Popen] = []
        self.readers: list[threading.Thread] = []
        self.stopping = False
        for i in range(n):
            place = ["--coordinator", address, "--num_processes", str(n), "--process_id", str(i)]
            own = environment | ({"CUDA_VISIBLE_DEVICES": gpus[i]} if gpus else {})
            process = subprocess.Popen(
                [*command, *place],
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches the supervisor only, which tells the processes
            )
            self.processes.append(process)
            self.readers.append(threading.Thread(target=_copy_lines, args=(process, i), daemon=True))
            self.readers[-1].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process, reader in zip(self.processes, self.readers, strict=True):
            process.wait()
            reader.join(2)
            if process.stdout and not reader.is_alive():
                process.stdout.close()

    def stop(self) -> None:
        """Asks all processes to save and end."""
        self.stopping = True
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)

    def wait(self) -> Ended:
        """Waits until all have ended, or one has with an error; then ends the others."""
        deadline = None
        while True:
            codes = [self._code(process) for process in self.processes]
            if bad := [i for i, code in enumerate(codes) if code not in (None, 0, STOPPED)]:
                return self._failed(bad[0], codes)
            if None not in codes:
                return Ended(STOPPED if STOPPED in codes else 0, "")
            if self.stopping:
                deadline = deadline or time.monotonic() + STOP_S
                if time.monotonic() > deadline:
                    return Ended(1, f"did not save within {STOP_S:g} s")
            time.sleep(POLL_S)

    def _code(self, process: subprocess.Popen) -> int | None:
        """The exit code of a process. One that `stop` reached before it could receive signals had nothing to save."""
        code = process.poll()
        return STOPPED if self.stopping and code == -signal.SIGTERM else code

    def _failed(self, i: int, codes: list[int | None]) -> Ended:
        """Names the process that is the reason, and ends the others."""
        stopped = [k for k, code in enumerate(codes) if code is None and _is_stopped(self.processes[k].pid)]
        reason = f"process {i} was the first to end ({_in_words(codes[i])})"
        if stopped:  # it ended because that one did not answer
            reason = f"process {stopped[0]} does not answer: it is stopped (process {self.processes[stopped[0]].pid})"
        deadline = time.monotonic() + GRACE_S  # for their own last words
        while time.monotonic() < deadline and any(p.poll() is None for p in self.processes) and not stopped:
            time.sleep(POLL_S)
        return Ended(1, reason)


def _copy_lines(process: subprocess.Popen, i: int) -> None:
    """Prints the lines of a process with its number in front."""
    assert process.stdout
    for line in process.stdout:
        if not NOISE.match(line):
            sys.stdout.write(f"[{i}] {line if line.endswith(chr(10)) else line + chr(10)}")
            sys.stdout.flush()


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _in_words(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


def _visible_gpus(environment: dict[str, str], n: int) -> list[str] | None:
    """CUDA_VISIBLE_DEVICES of each process: an equal part. None without GPUs. Raises ConfigError."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(i) for i in range(gpus_of_machine())] if visible is None else [x for x in visible.split(",") if x]
    if not gpus:
        return None
    need(len(gpus) % n == 0, "-n", f"a divisor of the {len(gpus)} GPUs", n, "choose one, or --devices-per-process")
    each = len(gpus) // n
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(n)]


def fewer(n: int) -> int:
    """The next smaller number of processes that divides n, so that a step can have the same samples."""
    return max((m for m in range(1, n) if n % m == 0), default=1)


def accumulation(command: list[str]) -> int:
    """The gradient_accumulation_steps of a command `python -m surojax.train ...`. Raises ConfigError."""
    if "surojax.train" not in command:
        raise ConfigError(f"--elastic: expected the command {COMMAND}, got {' '.join(command)[:100]}; leave it out")
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--export")
    for name in ("--max-minutes", "--heartbeat"):
        parser.add_argument(name)
    return flags.parse(command[command.index("surojax.train") + 1 :], parser)[0].gradient_accumulation_steps


def supervise(
    command: list[str], n: int, *, devices: int | None = None, restarts: int = 0, elastic: bool = False
) -> int:
    """Starts n processes, again after errors, and returns the exit code. devices: virtual ones of each; None: GPUs."""
    steps = accumulation(command) if elastic else 0
    started = n
    stop_asked = False
    group: Group | None = None

    def stop(*_) -> None:
        nonlocal stop_asked
        stop_asked = True
        if group is not None:
            group.stop()

    old = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for attempt in range(restarts + 1):
            more = [f"--config.gradient_accumulation_steps={steps * started // n}"] if n < started else []
            with Group([*command, *more], n, devices) as group:
                if stop_asked:
                    group.stop()
                ended = group.wait()
            if not ended.reason:
                say(AT_END[ended.code])
                return ended.code
            say(ended.reason)
            if stop_asked or attempt == restarts:
                break
            n = fewer(n) if elastic else n
            say(f"start {attempt + 2} of {restarts + 1}, with {n} process{'es' * (n > 1)}")
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    say("ended: start again to continue from the last checkpoint")
    return 1


def on_ray(command: list[str], n: int, *, restarts: int, gpus: int) -> int:
    """Runs n processes as workers of Ray Train's JaxTrainer, with so many GPUs each; returns the exit code.

    Ray chooses the hosts, and starts all workers again if one fails. Raises ConfigError if Ray is not installed.
    """
    try:
        from ray import train  # pyright: ignore[reportMissingImports]
        from ray.train.collective import broadcast_from_rank_zero  # pyright: ignore[reportMissingImports]
        from ray.train.v2.jax import JaxConfig, JaxTrainer  # pyright: ignore[reportMissingImports]
        from ray.util import get_node_ip_address  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"--ray: expected Ray, got: {error}; pip install 'surojax[ray]'") from error

    def work() -> int:
        address = broadcast_from_rank_zero(f"{get_node_ip_address()}:{_free_port('')}")
        context = train.get_context()
        size = context.get_world_size()
        rank = context.get_world_rank()
        place = ["--coordinator", address, "--num_processes", str(size), "--process_id", str(rank)]
        code = subprocess.run([*command, *place]).returncode
        if code not in (0, STOPPED):
            raise RuntimeError(f"process {rank} ended with {_in_words(code)}")
        return code

    trainer = JaxTrainer(
        work,
        jax_config=JaxConfig(),  # neither GPU nor TPU: the processes connect themselves
        scaling_config=train.ScalingConfig(num_workers=n, resources_per_worker={"CPU": 1, "GPU": gpus}),
        run_config=train.RunConfig(failure_config=train.FailureConfig(max_failures=restarts)),
    )
    try:
        code = trainer.fit().return_value or 0  # metrics are kept with a checkpoint of Ray's only, and there is none
    except train.TrainingFailedError as error:
        say(f"ended: {' '.join(str(error).split())[-300:]}")
        return 1
    say(AT_END[code])
    return code


def say(text: str) -> None:
    """Prints a line of the supervisor."""
    print(f"surojax.launch: {text}", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, supervise, and exit with the code above."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m surojax.launch", description=(__doc__ or "").partition("\n")[0])
    parser.epilog = exit_codes()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"%(prog)s -n N [options] -- {COMMAND}"
    parser.add_argument("-n", type=int, default=1, help="number of processes (default: %(default)s)")
    parser.add_argument("--devices-per-process", type=int, metavar="D", help="virtual CPU devices instead of GPUs")
    parser.add_argument("--restarts", type=int, default=0, metavar="R", help="starts after an error (default: 0)")
    parser.add_argument("--elastic", action="store_true", help="start again with fewer processes")
    parser.add_argument("--ray", action="store_true", help="start the processes on a Ray cluster")
    parser.add_argument("--gpus-per-process", type=int, default=0, metavar="G", help="with --ray: GPUs of each worker")
    dashes = argv.index("--") if "--" in argv else len(argv)
    command = argv[dashes + 1 :]
    a = parser.parse_args(argv[:dashes])
    try:
        need(bool(command), "command", f"one after --, like {COMMAND}", None, "write it after --")
        need(a.n >= 1, "-n", "at least 1", a.n, "correct it")
        need(a.restarts >= 0, "--restarts", "0 or more", a.restarts, "correct it")
        need(not a.elastic or a.restarts > 0, "--restarts", "1 or more with --elastic", a.restarts, "set it")
        need(a.devices_per_process is None or a.devices_per_process >= 1, "--devices-per-process", "at least 1",
             a.devices_per_process, "correct it")  # fmt: skip
        if re.fullmatch(r"python3?", command[0]):
            command[0] = sys.executable
        for name in ("elastic", "devices_per_process") if a.ray else ("gpus_per_process",):
            expected = f"nothing {'with' if a.ray else 'without'} --ray"
            need(not getattr(a, name), f"--{name.replace('_', '-')}", expected, getattr(a, name), "leave it out")
        if a.ray:
            code = on_ray(command, a.n, restarts=a.restarts, gpus=a.gpus_per_process)
        else:
            code = supervise(command, a.n, devices=a.devices_per_process, restarts=a.restarts, elastic=a.elastic)
    except ConfigError as error:
        sys.exit(f"surojax.launch: error: {error}")
    sys.exit(code)


if __name__ == "__main__":
    main()
