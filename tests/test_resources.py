"""What a process may use of its machine: trees of control groups as containers show them, and real limits."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import psutil
import pytest

import surojax
from surojax.assembly.from_config import from_config
from surojax.config import default_config
from surojax.errors import ConfigError, ends_with_code
from surojax.placement import mesh
from surojax.planner import check_fit
from surojax.resources import GiB, MiB, cores, free_memory, group_limits, total_memory

V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "{number} 31 0:32 {top} /sys/fs/cgroup/{names} rw shared:9 - cgroup cgroup rw,{names}\n"
OTHERS = "22 27 0:21 / /proc rw - proc proc rw\n25 1 8:1 / / rw - ext4 /dev/sda1 rw\n\ngarbage\n"
HUGE = str(2**63 - 4096)  # version 1 without a limit
MEMORY, CPU = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu,cpuacct"


def v1_mounts(top: str = "/") -> str:
    return V1.format(number=32, top=top, names="cpu,cpuacct") + V1.format(number=35, top=top, names="memory")


# (files, [(limit in MiB, what is left, file)], processors of 64), of processes that see these files.
TREES = {
    "no files": ({}, [], 64),
    "files without text": ({"proc/self/cgroup": "", "proc/self/mountinfo": ""}, [], 64),
    "garbage": (
        {
            "proc/self/cgroup": "0:\n::\n0::/x\n\x00\nmemory",
            "proc/self/mountinfo": OTHERS + " - cgroup\n - cgroup2\n" + V2.format(top="/"),
            "sys/fs/cgroup/x/memory.max": "lots",
            "sys/fs/cgroup/x/cpu.max": "many 0",
            "sys/fs/cgroup/memory.max": "9" * 5000,
            "sys/fs/cgroup/cpu.max": "1 0",
        },
        [],
        64,
    ),
    "version 2 without limits": (
        {
            "proc/self/cgroup": "0::/user.slice/session.scope\n",
            "proc/self/mountinfo": OTHERS + V2.format(top="/"),
            "sys/fs/cgroup/user.slice/session.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/session.scope/memory.high": "max\n",
            "sys/fs/cgroup/user.slice/session.scope/cpu.max": "max 100000\n",
        },
        [],
        64,
    ),
    "version 2, nested: a limit of an outer group, and a lower one within it": (
        {
            "proc/self/cgroup": "0::/slice/job/step\n",
            "proc/self/mountinfo": V2.format(top="/"),
            "sys/fs/cgroup/slice/job/step/memory.max": "max\n",
            "sys/fs/cgroup/slice/job/memory.max": f"{1024 * MiB}\n",
            "sys/fs/cgroup/slice/job/memory.current": f"{700 * MiB}\n",
            "sys/fs/cgroup/slice/job/memory.stat": f"anon 5\ninactive_file {200 * MiB}\nactive_file {9 * MiB}\n"
            f"file_mapped {4 * MiB}\nbroken\n",
            "sys/fs/cgroup/slice/memory.high": f"{8192 * MiB}\n",
            "sys/fs/cgroup/slice/memory.current": f"{8000 * MiB}\n",
            "sys/fs/cgroup/slice/job/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/slice/cpu.max": "800000 100000\n",
        },
        [
            (1024, 529, "/sys/fs/cgroup/slice/job/memory.max"),  # 200 of cache that nobody maps, and 9 - 4
            (8192, 192, "/sys/fs/cgroup/slice/memory.high"),
        ],
        3,
    ),
    "version 2 in a namespace, as Docker has it": (
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2.format(top="/"),
            "sys/fs/cgroup/memory.max": f"{1024 * MiB}",
            "sys/fs/cgroup/memory.current": f"{2000 * MiB}",
            "sys/fs/cgroup/cpu.max": "50000 100000",
        },
        [(1024, 0, "/sys/fs/cgroup/memory.max")],
        1,
    ),
    "version 2, the container's part mounted": (
        {
            "proc/self/cgroup": "0::/docker/0123/inner\n",
            "proc/self/mountinfo": V2.format(top="/docker/0123"),
            "sys/fs/cgroup/inner/memory.max": f"{512 * MiB}",
            "sys/fs/cgroup/memory.max": f"{600 * MiB}",
        },
        [(512, 512, "/sys/fs/cgroup/inner/memory.max"), (600, 600, "/sys/fs/cgroup/memory.max")],
        64,
    ),
    "version 2, a process from outside of its namespace": (
        {
            "proc/self/cgroup": "0::/../../other\n",
            "proc/self/mountinfo": V2.format(top="/"),
            "sys/fs/cgroup/memory.max": f"{512 * MiB}",
            "other/memory.max": "1",
        },
        [(512, 512, "/sys/fs/cgroup/memory.max")],
        64,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "4:memory:/lxc/box\n3:cpu,cpuacct:/lxc\n1:name=systemd:/x\n0::/\n",
            "proc/self/mountinfo": OTHERS + v1_mounts(),
            f"{MEMORY}/lxc/box/memory.limit_in_bytes": f"{1000 * MiB}",
            f"{MEMORY}/lxc/box/memory.usage_in_bytes": f"{900 * MiB}",
            f"{MEMORY}/lxc/box/memory.memsw.limit_in_bytes": HUGE,
            f"{MEMORY}/lxc/box/memory.stat": f"inactive_file 7\ntotal_inactive_file {100 * MiB}\n",
            f"{MEMORY}/lxc/memory.limit_in_bytes": HUGE,
            f"{MEMORY}/lxc/memory.memsw.limit_in_bytes": f"{2000 * MiB}",
            f"{MEMORY}/lxc/memory.memsw.usage_in_bytes": f"{1950 * MiB}",
            f"{MEMORY}/memory.limit_in_bytes": HUGE,
            f"{CPU}/lxc/cpu.cfs_quota_us": "400000",
            f"{CPU}/lxc/cpu.cfs_period_us": "100000",
            f"{CPU}/cpu.cfs_quota_us": "-1",
            f"{CPU}/cpu.cfs_period_us": "100000",
        },
        [
            (1000, 200, f"/{MEMORY}/lxc/box/memory.limit_in_bytes"),
            (2000, 50, f"/{MEMORY}/lxc/memory.memsw.limit_in_bytes"),
        ],
        4,
    ),
    "version 1, as Docker has it: the host's path, and the group as the root of its mount": (
        {
            "proc/self/cgroup": "4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n",
            "proc/self/mountinfo": v1_mounts(top="/docker/0123"),
            f"{MEMORY}/memory.limit_in_bytes": f"{1024 * MiB}",
            f"{MEMORY}/memory.usage_in_bytes": f"{24 * MiB}",
            f"{CPU}/cpu.cfs_quota_us": "150000",
            f"{CPU}/cpu.cfs_period_us": "100000",
        },
        [(1024, 1000, f"/{MEMORY}/memory.limit_in_bytes")],
        2,
    ),
    "version 1, the host's path where only the group is mounted": (
        {
            "proc/self/cgroup": "4:memory:/kubepods/pod/box\n",
            "proc/self/mountinfo": v1_mounts(),
            f"{MEMORY}/memory.limit_in_bytes": f"{1024 * MiB}",
        },
        [(1024, 1024, f"/{MEMORY}/memory.limit_in_bytes")],
        64,
    ),
    "hybrid: memory in version 1 beside a version 2 that has processors": (
        {
            "proc/self/cgroup": "4:memory:/a\n0::/b\n",
            "proc/self/mountinfo": V1.format(number=35, top="/", names="memory")
            + "41 31 0:38 / /sys/fs/cgroup/uni\\040fied rw - cgroup2 cgroup2 rw\n",
            f"{MEMORY}/a/memory.limit_in_bytes": f"{64 * MiB}",
            "sys/fs/cgroup/uni fied/b/cpu.max": "700000 100000",
        },
        [(64, 64, f"/{MEMORY}/a/memory.limit_in_bytes")],
        7,
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_limits_of_control_groups(name, tmp_path, monkeypatch):
    files, limits, processors = TREES[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert list(group_limits(tmp_path)) == [(size * MiB, left * MiB, file) for size, left, file in limits]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert cores(tmp_path) == processors
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert cores(tmp_path) == 1


@pytest.fixture
def limited_to(monkeypatch):
    """Sets the memory of a machine, and what its container has left of a limit, in GiB."""

    def limit(machine: float, size: float, left: float) -> None:
        memory = SimpleNamespace(available=int(machine * GiB), total=int(machine * GiB))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        limits = [surojax.resources.Limit(int(size * GiB), int(left * GiB), "/sys/fs/cgroup/memory.max")]
        monkeypatch.setattr(surojax.resources, "group_limits", lambda: iter(limits))

    return limit


def test_the_least_memory_counts(limited_to):
    """Processes share what a machine and a group have."""
    limited_to(64, 8, 6)
    assert free_memory() == (6 * GiB, "the 8.00 GiB that /sys/fs/cgroup/memory.max allows")
    assert free_memory(3).size == 2 * GiB and total_memory() == 8 * GiB
    limited_to(4, 8, 6)
    assert free_memory(2) == (2 * GiB, "") and total_memory() == 4 * GiB


def test_a_run_that_does_not_fit_its_container_is_refused(limited_to):
    """The line names the limit and says to raise it; devices share what is left of it."""
    c = default_config()
    run = from_config(c, mesh.make_mesh(jax.devices()[:1]), total_steps=1)
    need = sum(check_fit.check_fit(c, run, jax.devices()[:1], available=2**40).values())
    limited_to(64, 2, 0.9 * need / GiB)
    where = (
        r"are free of the 2\.00 GiB that /sys/fs/cgroup/memory\.max allows; what would change it: raise that limit; "
    )
    with pytest.raises(ConfigError, match=f"^does not fit: needs .* on the cpu device, where .* {where}"):
        check_fit.check_fit(c, run, jax.devices()[:1])
    limited_to(64, 2, 1.2 * need / GiB)
    assert check_fit.check_fit(c, run, jax.devices()[:1])
    assert check_fit.available_bytes(jax.devices()[:4]) == int(1.2 * need) // 4


def test_xla_pins_and_computes_within_the_container(limited_to, monkeypatch):
    for name in (mesh.HOST_LIMIT, mesh.XLA_THREADS):
        monkeypatch.delenv(name, raising=False)
    limited_to(64, 8, 6)
    monkeypatch.setattr(mesh, "cores", lambda: 3)
    monkeypatch.setattr(mesh, "visible_cores", lambda: 64)
    mesh.find_devices(1)
    assert os.environ[mesh.HOST_LIMIT] == "8" and os.environ[mesh.XLA_THREADS] == "3"
    limited_to(64, 0.5, 0.4)
    monkeypatch.setenv(mesh.XLA_THREADS, "5")
    monkeypatch.delenv(mesh.HOST_LIMIT)
    mesh.find_devices(1)
    assert os.environ[mesh.HOST_LIMIT] == "1" and os.environ[mesh.XLA_THREADS] == "5"


# -- Real limits ------------------------------------------------------------------------------------------------------

ASK = "from surojax.resources import free_memory; print(*free_memory(), sep=chr(10))"


def real_group(controller: str) -> Path | None:
    """Makes a control group for a test; None where this process may not."""
    for top in (Path("/sys/fs/cgroup") / controller, Path("/sys/fs/cgroup")):
        group = top / f"surojax-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / "memory.limit_in_bytes").exists() or (group / "memory.max").exists():
            return group
        group.rmdir()
    return None


def test_free_memory_in_a_real_control_group():
    group = real_group("memory")
    if group is None:
        pytest.skip("no control groups may be made here")
    try:
        file = next(x for x in (group / "memory.max", group / "memory.limit_in_bytes") if x.exists())
        file.write_text(str(256 * MiB))
        code = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0'); used = b'x' * (100 << 20); {ASK}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    finally:
        group.rmdir()
    size, limit = done.stdout.splitlines()
    assert 80 * MiB < int(size) < 156 * MiB and limit == f"the 0.25 GiB that {file} allows"


LIMITED = """
import resource, runpy, sys
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]) << 20,) * 2)
sys.argv = ["surojax", *sys.argv[3:]]
runpy.run_module("surojax", run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")
@pytest.mark.parametrize(
    "limit, mebibytes, said",
    [
        ("RLIMIT_AS", 200, r"surojax: error: expected ulimit -v of more than .* GiB, got 0\.20 GiB; raise that limit"),
        (
            "RLIMIT_DATA",
            100,
            r"surojax: error: expected ulimit -d of more than .* GiB, got 0\.10 GiB; raise that limit",
        ),
        pytest.param(
            "RLIMIT_AS",
            2600,
            r"surojax\.train: error: memory: expected ulimit -v of more than .* GiB, got 2\.54 GiB; .*",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_limit_of_the_shell_is_a_line(limit, mebibytes, said, tmp_path):
    command = [sys.executable, "-c", LIMITED, limit, str(mebibytes), "train", "--config", "tiny"]
    environment = os.environ | {"NPROC": "2", "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    place = f"--config.output_dir={tmp_path / 'run'}"
    done = subprocess.run([*command, place], capture_output=True, text=True, env=environment)
    assert done.returncode and re.fullmatch(said, done.stderr.strip()), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_memory_that_ends_in_the_middle_is_a_line(error, limited_to):
    limited_to(64, 2, 0.25)

    def main():
        raise error

    with pytest.raises(SystemExit, match=r"^surojax: error: out of memory .* where 256 MiB are free of the 2\.00 GiB "):
        ends_with_code(main)
    with pytest.raises(RuntimeError, match="another"):
        error = RuntimeError("another")
        ends_with_code(main)


def test_nobody_else_asks_the_machine():
    """A container's limits are known in one module, so no other asks for memory or processors itself."""
    asks = re.compile(r"virtual_memory|cpu_count\(\) or|sched_getaffinity|MemAvailable|SC_PHYS_PAGES|memory\.max\b")
    package = Path(surojax.__file__).parent
    found = [str(p.relative_to(package)) for p in sorted(package.rglob("*.py")) if asks.search(p.read_text())]
    assert found == ["resources.py"]
