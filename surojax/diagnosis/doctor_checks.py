"""Runs each check in a process of its own, since XLA and drivers may end a process or never return.

The process writes a line of JSON for each verdict as soon as it is known. What it did not come to, because it ended or
its time did, is a verdict too.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from surojax.children import python_command
from surojax.diagnosis import machine, steps
from surojax.diagnosis.verdict import Asked, Verdict, failed, in_a_line
from surojax.placement.mesh import expect_no_cuda_without_driver
from surojax.training.safe import BY_NAME
from surojax.verification.settings import OFFLOADS

VIRTUAL_DEVICES = 8  # of the CPU
ITS_PROCESS = "its process"  # the part of a check that fails if its process does not come to its end
LAST = 300  # characters of what a process said before it ended


class Check(NamedTuple):
    """A check. run: yields verdicts. seconds: limit of its time. options: see `verdict.failed`."""

    run: Callable[[Asked], Iterator[Verdict]]
    seconds: float
    options: tuple[str, ...] = ()


CHECKS: dict[str, Check] = {
    "installation": Check(machine.installation, 120),
    "host_memory": Check(machine.host_memory, 120, OFFLOADS),
    "disk": Check(machine.disk, 120, OFFLOADS),
    "rates": Check(machine.rates, 300, OFFLOADS),
    "kernels": Check(steps.kernels, 600, ("kernels",)),
    "step": Check(steps.step, 600, ("attention", "kernels", "xla_options")),
    "offloads": Check(steps.offloads, 1200, OFFLOADS),
    "several": Check(steps.several, 900, ("copy_engines",)),
    "copies": Check(steps.copies, 300, (*OFFLOADS, "xla_options")),
    "times": Check(steps.step_times, 300, ("xla_options",)),
}
assert {name for check in CHECKS.values() for name in check.options} <= BY_NAME.keys()


def in_process(name: str, asked: Asked) -> Iterator[Verdict]:
    """Runs a check in a process of its own with a limit of time, and yields its verdicts."""
    check = CHECKS[name]
    seconds = check.seconds + asked.sustained_s
    code = f"from {__name__} import run_check; run_check(*sys.argv[1:])"
    environment = dict(os.environ)
    if (platforms := environment.get("JAX_PLATFORMS")) and "cpu" not in platforms.split(","):
        environment["JAX_PLATFORMS"] = f"{platforms},cpu"  # what a step on a GPU is compared with
    with tempfile.TemporaryDirectory(prefix="surojax-doctor-") as folder:
        verdicts, log = Path(folder) / "verdicts", Path(folder) / "log"
        verdicts.touch()
        with log.open("wb") as said:
            command = python_command(code, name, str(verdicts), json.dumps(asked))
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
            try:
                ended = how_it_ended(process.wait(seconds))
            except subprocess.TimeoutExpired:
                ended = f"no end within {seconds:g} s"
            finally:
                process.kill()
                process.wait()
        for line in verdicts.read_text().splitlines():
            yield Verdict(*json.loads(line))
        if ended:
            last = " ".join(log.read_text(errors="replace").split())[-LAST:]
            yield failed(name, ITS_PROCESS, f"{ended}; last: {last}" if last else ended, check.options)


def how_it_ended(code: int) -> str:
    """Describes how a process ended from its exit code; "" for 0."""
    if code >= 0:
        return f"exit code {code}" if code else ""
    names = {number.value: number.name for number in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}"


# -- In the process ---------------------------------------------------------------------------------------------------


def run_check(name: str, verdicts: str, asked: str) -> None:
    """Runs a check and appends its verdicts to a file. asked: an `Asked`, in JSON."""
    expect_no_cuda_without_driver()
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", VIRTUAL_DEVICES)
    with open(verdicts, "a") as file:
        for verdict in check_verdicts(name, Asked(*json.loads(asked))):
            file.write(json.dumps(verdict) + "\n")
            file.flush()


def check_verdicts(name: str, asked: Asked) -> Iterator[Verdict]:
    """Yields the verdicts of a check; turns an unexpected error into a failed verdict."""
    try:
        yield from CHECKS[name].run(asked)
    except Exception as error:
        yield failed(name, "all", in_a_line(error), CHECKS[name].options)
