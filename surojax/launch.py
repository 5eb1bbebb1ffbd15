"""Several processes of a run on this machine or on a Ray cluster, and their supervisor.

    surojax launch -n 2 [--restarts 3] [--elastic] -- surojax train --config configs/tiny.py ...
    surojax launch -n 2 --ray [--gpus-per-process 8] -- surojax train ...

Each process's lines come with its number. When one ends with an error, it is named, the others are ended within
seconds, and all start again from the last checkpoint, up to `--restarts` times; also if they hang, one or all. With
`--elastic`, they start again with fewer processes; gradient_accumulation_steps is raised so that a step has the same
samples.

Exit codes: 0, all finished. 75: asked to stop (a signal, Ctrl-C, --max-minutes), not finished; start again to continue.
1: ended with an error more often than `--restarts`. 2: the command or its settings are refused; not repeated. A second
Ctrl-C kills the processes before they have saved. One GPU machine needs no launcher: one process drives all GPUs.
Clusters have launchers of their own (docs/clusters.md); this one also makes a cluster of virtual CPU devices
(`--devices-per-process`), as the tests do.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

from surojax.command_line import COMMAND, NO_COMMAND

from surojax.cluster.early import STOPPED, leave_closed_terminal, stopping_signals  # isort: skip  # before what takes seconds

from surojax.cluster.group import (
    ProcessGroup,
    exit_code_in_words,
    free_port,
    new_key,
    print_as_supervisor,
    start_command,
)
from surojax.cluster.hosts import gpus_of_machine
from surojax.config import flags
from surojax.errors import REFUSED, ConfigError, Refused, ends_with_code, exit_codes, need

DEVICE_COUNT = "--xla_force_host_platform_device_count"
MAX_PROCESSES = 1024
OF_LAUNCHER = ("--coordinator", "--num_processes", "--process_id", "--secret_file", "--supervisor")
AT_END = {0: "all processes have finished", STOPPED: "stopped: start again to continue"}


def _environments(n: int, devices: int | None) -> list[dict[str, str]]:
    """Makes the environment variables of each process. Raises ConfigError."""
    environment = dict(os.environ)
    if devices is not None:
        others = [x for x in environment.get("XLA_FLAGS", "").split() if not x.startswith(DEVICE_COUNT)]
        flag = f"{DEVICE_COUNT}={devices}"
        return [environment | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*others, flag])}] * n
    gpus = _visible_gpus(environment, n)
    return [environment | ({"CUDA_VISIBLE_DEVICES": gpus[i]} if gpus else {}) for i in range(n)]


def _visible_gpus(environment: dict[str, str], n: int) -> list[str] | None:
    """Divides the visible GPUs evenly: CUDA_VISIBLE_DEVICES of each process. None without GPUs. Raises ConfigError."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(i) for i in range(gpus_of_machine())] if visible is None else [x for x in visible.split(",") if x]
    if not gpus:
        return None
    need(len(gpus) % n == 0, "-n", f"a divisor of the {len(gpus)} GPUs", n, "choose one, or --devices-per-process")
    each = len(gpus) // n
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(n)]


def fewer(n: int) -> int:
    """Returns the next smaller number of processes that divides n, so that a step can keep its number of samples."""
    return max((m for m in range(1, n) if n % m == 0), default=1)


def accumulation(command: list[str]) -> int:
    """Reads gradient_accumulation_steps from a command `python -m surojax.train ...` or `surojax train ...`.

    Raises ConfigError.
    """
    after = [i + 1 for i, word in enumerate(command) if word == "surojax.train"]
    after += [
        i + 2 for i, word in enumerate(command[:-1]) if Path(word).name == "surojax" and command[i + 1] == "train"
    ]
    if not after:
        raise ConfigError(f"--elastic: expected the command {COMMAND}, got {' '.join(command)[:100]}; leave it out")
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--export")
    for name in ("--max-minutes", "--heartbeat"):
        parser.add_argument(name)
    return flags.parse_flags(command[after[0] :], parser)[0].gradient_accumulation_steps


def supervise(
    command: list[str],
    n: int,
    *,
    devices: int | None = None,
    restarts: int = 0,
    elastic: bool = False,
    again: str = "",
) -> int:
    """Starts n processes, restarts them after errors, and returns the exit code.

    devices: virtual ones of each; None: GPUs. again: the command that starts all, which the processes say at their end.
    A start whose settings are refused is not repeated, unless one before it was not: then it is an error like others.
    Raises ConfigError if the GPUs do not divide.
    """
    steps = accumulation(command) if elastic else 0
    started = n
    stop_asked = False
    accepted = False
    group: ProcessGroup | None = None

    def stop(number: int, _frame) -> None:
        nonlocal stop_asked
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if group is not None:
            group.stop()
            if stop_asked and number == signal.SIGINT:
                group.kill()
        stop_asked = True

    old = {number: signal.signal(number, stop) for number in (*stopping_signals(), signal.SIGINT)}
    try:
        for attempt in range(restarts + 1):
            more = [f"--config.gradient_accumulation_steps={steps * started // n}"] if n < started else []
            with ProcessGroup([*command, *more], _environments(n, devices), again) as group:
                if stop_asked:
                    group.stop()
                ended = group.wait()
            if not ended.reason:
                print_as_supervisor(AT_END[ended.code])
                return ended.code
            print_as_supervisor(ended.reason)
            if ended.code == REFUSED and not accepted:
                print_as_supervisor("ended: it is refused again until that is corrected")
                return REFUSED
            accepted = True
            if stop_asked or attempt == restarts:
                break
            n = fewer(n) if elastic else n
            print_as_supervisor(f"start {attempt + 2} of {restarts + 1}, with {n} process{'es' * (n > 1)}")
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    print_as_supervisor("ended: start again to continue from the last checkpoint")
    return 1


def on_ray(command: list[str], n: int, *, restarts: int, gpus: int, again: str = "") -> int:
    """Runs n processes as workers of Ray Train's JaxTrainer, with this many GPUs each; returns the exit code.

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
        host = get_node_ip_address()
        shared = {"address": f"{host}:{free_port(host)}"} | new_key()
        shared = broadcast_from_rank_zero(shared)  # at most 1 kB
        address = shared.pop("address")
        context = train.get_context()
        size = context.get_world_size()
        rank = context.get_world_rank()
        place = ["--coordinator", address, "--num_processes", str(size), "--process_id", str(rank)]
        process, ours = start_command([*command, *place], shared | {"command": again})
        with ours:
            code = process.wait()
        if code not in (0, STOPPED):
            raise RuntimeError(f"process {rank} ended with {exit_code_in_words(code)}")
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
        print_as_supervisor(f"ended: {' '.join(str(error).split())[-300:]}")
        return 1
    print_as_supervisor(AT_END[code])
    return code


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's options, which stand before --."""
    arguments = argparse.ArgumentParser(prog="surojax launch", description=(__doc__ or "").partition("\n")[0])
    arguments.epilog = exit_codes()
    arguments.formatter_class = argparse.RawDescriptionHelpFormatter
    arguments.usage = f"%(prog)s -n N [options] -- {COMMAND}"
    arguments.add_argument("-n", type=int, default=1, help="number of processes (default: %(default)s)")
    arguments.add_argument("--devices-per-process", type=int, metavar="D", help="virtual CPU devices instead of GPUs")
    arguments.add_argument("--restarts", type=int, default=0, metavar="R", help="starts after an error (default: 0)")
    arguments.add_argument("--elastic", action="store_true", help="start again with fewer processes")
    arguments.add_argument("--ray", action="store_true", help="start the processes on a Ray cluster")
    arguments.add_argument(
        "--gpus-per-process", type=int, default=0, metavar="G", help="with --ray: GPUs of each worker"
    )
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, supervises, and exits with one of the codes above."""
    argv = sys.argv[1:] if argv is None else argv
    dashes = argv.index("--") if "--" in argv else len(argv)
    command = argv[dashes + 1 :]
    a = parser().parse_args(argv[:dashes])
    try:
        if not command:
            raise ConfigError(NO_COMMAND)
        need(1 <= a.n <= MAX_PROCESSES, "-n", f"1 to {MAX_PROCESSES:,}", a.n, "correct it")
        need(a.restarts >= 0, "--restarts", "0 or more", a.restarts, "correct it")
        need(not a.elastic or a.restarts > 0, "--restarts", "1 or more with --elastic", a.restarts, "set it")
        need(a.devices_per_process is None or a.devices_per_process >= 1, "--devices-per-process", "at least 1",
             a.devices_per_process, "correct it")  # fmt: skip
        if re.fullmatch(r"python3?", command[0]):
            command[0] = sys.executable
        is_installed = shutil.which(command[0]) is not None
        need(is_installed, "command", "a program that is installed", command[0], f"correct it: {COMMAND}")
        for name in OF_LAUNCHER:
            said = next((word for word in command if word.partition("=")[0] == name), None)
            need(said is None, name, "none in the command, since the launcher sets it", said, "leave it out")
        again = shlex.join(["surojax", "launch", *argv])
        for name in ("elastic", "devices_per_process") if a.ray else ("gpus_per_process",):
            expected = f"nothing {'with' if a.ray else 'without'} --ray"
            need(not getattr(a, name), f"--{name.replace('_', '-')}", expected, getattr(a, name), "leave it out")
        if a.ray:
            code = on_ray(command, a.n, restarts=a.restarts, gpus=a.gpus_per_process, again=again)
        else:
            code = supervise(
                command,
                a.n,
                devices=a.devices_per_process,
                restarts=a.restarts,
                elastic=a.elastic,
                again=again,
            )
    except ConfigError as error:
        raise Refused(f"surojax.launch: error: {error}") from error
    sys.exit(code)


if __name__ == "__main__":
    ends_with_code(main)
