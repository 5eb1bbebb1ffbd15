"""Tests run on 8 virtual CPU devices, which execute collectives and memory kinds for real.

`pytest` runs the quick suite: every part of the product, in a few minutes. `pytest --all` adds the tests marked `full`,
which repeat a claim for more placements, recipes, optimizers, GPUs and command-line processes. A test that is named
(`pytest tests/test_x.py::test_y`) runs either way. Of a function or module marked `full(after=n)` the first n cases of
each function are quick.

`pytest -m gpu -n 0` leaves JAX the GPUs of the machine, for the tests marked so: the kernels', compiled then, and
tests/test_on_gpu.py.
"""

import collections
import contextlib
import gc
import math
import os
import random
import site
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
import touched

STARTED = pytest.StashKey[float]()  # of the run, in seconds since the epoch


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run the tests marked `full`")
    text = "start no test later than this; first come the tests that import what changed lately, the nearest first"
    parser.addoption("--minutes", type=float, help=text)
    text = "draw the rows of tests/test_drawn.py, and pairs of settings that may be refused, by another seed than 0"
    parser.addoption("--drawn-by", type=int, default=0, metavar="SEED", help=text)


def pytest_configure(config):
    """Before any test module, and with it JAX, is imported."""
    config.stash[STARTED] = getattr(config, "workerinput", {}).get("started", time.time())
    if config.option.markexpr != "gpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Programs here run once, for milliseconds. Compiling them takes less than half the time without LLVM's
        # expensive passes, and in one piece.
        os.environ["XLA_FLAGS"] = (
            "--xla_force_host_platform_device_count=8"
            " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
            " --xla_cpu_parallel_codegen_split_count=1"
        )
        share_compiled_programs()
        keep_out_of_home()
        list_folders_backwards()
        gc.set_threshold(100_000)  # tracing makes many objects, of which hardly any is garbage
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        if worker and hasattr(os, "sched_setaffinity"):
            # A tenth less CPU time where XLA's threads do not run into those of the other workers.
            number, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, cores[number % count % len(cores) :: count])
    import jax

    jax.config.update("jax_numpy_rank_promotion", "raise")
    if config.option.markexpr != "gpu":
        keep_programs_of_several_devices_in_memory()


def share_compiled_programs():
    """Let the test processes, and the commands they start, share what XLA compiles, in a folder of this run.

    Many tests train the same small model under the same placement. JAX finds a program by its HLO, compile options and
    version, so a test that changes the source or patches a function compiles anew.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # xdist's workers inherit the environment
        folder = tempfile.TemporaryDirectory(prefix="surojax-tests-")
        _RUN.enter_context(folder)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
        # The smallest program takes 25 ms to compile, 5 ms to read and 1 ms to write.
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"


def keep_programs_of_several_devices_in_memory():
    """Let no test read a program of several devices from the shared folder, but share it within a process.

    surojax.placement.mesh.disable_compilation_cache, for which this stands in, says what is wrong with those.
    """
    from jax._src import compilation_cache

    from surojax.placement import mesh

    mesh.disable_compilation_cache = lambda: None
    read, write = compilation_cache.get_executable_and_time, compilation_cache.put_executable_and_time

    def get(key, options, backend, devices, *callbacks):
        if len(devices) == 1:
            return read(key, options, backend, devices, *callbacks)
        return _COMPILED.get(key, (None, None))

    def put(key, name, executable, backend, seconds):
        if len(executable.local_devices()) == 1:
            write(key, name, executable, backend, seconds)
        else:
            _COMPILED[key] = executable, seconds
            if len(_COMPILED) > PROGRAMS_KEPT:
                del _COMPILED[next(iter(_COMPILED))]

    compilation_cache.get_executable_and_time, compilation_cache.put_executable_and_time = get, put


_COMPILED = {}
PROGRAMS_KEPT = 20  # of several devices, by a process
MAPS = 30_000  # a program has some 200 memory maps, and a process that reaches Linux's 65,530 aborts


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """After the tests of a module: lets go of all programs if this process has too many memory maps."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPS:
        import jax

        _COMPILED.clear()
        jax.clear_caches()
        gc.collect()


def keep_out_of_home():
    """Let the test processes, and the commands they start, have a home folder of this run: data is cached there."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the environment
        folder = tempfile.TemporaryDirectory(prefix="surojax-tests-home-")
        _RUN.enter_context(folder)
        os.environ.setdefault("PYTHONUSERBASE", site.getuserbase())  # packages may be installed in the real one
        os.environ["HOME"] = folder.name


def list_folders_backwards():
    """Let folders be listed from the last name to the first: no file system says an order, and none may count."""
    listdir, scandir = os.listdir, os.scandir

    class Backwards:
        def __init__(self, path="."):
            with scandir(path) as entries:
                self.entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=True))

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.entries)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.close()

        def close(self):
            self.entries = iter(())

    os.listdir = lambda path=".": sorted(listdir(path), reverse=True)
    os.scandir = Backwards


_RUN = contextlib.ExitStack()


def pytest_unconfigure(config):
    _RUN.close()


# -- The quick suite and the full one --------------------------------------------------------------------------------

LEFT_OUT = pytest.StashKey[int]()
LATE = "later than --minutes"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tell a worker when the run began."""
    node.workerinput["started"] = node.config.stash[STARTED]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip the tests for which --minutes leaves no time."""
    minutes = item.config.option.minutes
    if minutes is not None and time.time() > item.config.stash[STARTED] + 60 * minutes:
        pytest.skip(LATE)


def pytest_collection_modifyitems(config, items):
    """Leave out the tests marked `full`, unless --all, a marker expression or a test's own name asks for them."""
    if config.option.minutes is not None:
        files = sorted({item.path for item in items})
        random.Random(config.stash[STARTED]).shuffle(files)
        near = touched.distances(config.rootpath, changed_lately(config.rootpath))
        files.sort(key=lambda file: near.get(file, math.inf))
        items.sort(key=lambda item: files.index(item.path))
    if config.option.all or config.option.markexpr or any("::" in argument for argument in config.args):
        return
    cases: collections.Counter[str] = collections.Counter()  # of each function, that the quick suite runs
    left_out = [item for item in items if is_full(item, cases)]
    out = set(left_out)
    items[:] = [item for item in items if item not in out]
    config.stash[LEFT_OUT] = len(left_out)
    config.hook.pytest_deselected(items=left_out)


def changed_lately(root):
    """The files that commits of the last four hours before HEAD changed; none where git or its history is missing."""

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout

    newest = git("log", "-1", "--format=%ct").strip()
    names = git("log", f"--since={int(newest) - 4 * 3600}", "--format=", "--name-only") if newest else ""
    return {root / name for name in names.splitlines() if name}


def is_full(item, cases):
    """Whether a test is marked `full`, or is a later case of one that is marked `full(after=n)` than the first n."""
    marks = list(item.iter_markers("full"))
    if not marks or any("after" not in mark.kwargs for mark in marks):
        return bool(marks)
    function = item.nodeid.partition("[")[0]
    cases[function] += 1
    return cases[function] > marks[0].kwargs["after"]


def pytest_collection_finish():
    """Keep what was imported out of the garbage collector's passes, which took a twentieth of the CPU time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Tell the process that prints how many tests this worker left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    output = getattr(node, "workeroutput", {})
    node.config.stash[LEFT_OUT] = output.get("left_out", 0)


def pytest_terminal_summary(terminalreporter, config):
    if late := [x for x in terminalreporter.stats.get("skipped", ()) if LATE in str(x.longrepr)]:
        terminalreporter.write_line(f"{len(late)} tests were not run, for which --minutes left no time")
    if left_out := config.stash.get(LEFT_OUT, 0):
        what = "more placements, recipes, optimizers, GPUs, and bit-for-bit claims at users' compile settings"
        terminalreporter.write_line(f"{left_out} more tests with `pytest --all`: {what}; {FULL_MINUTES} on two cores")


FULL_MINUTES = "two hours or more"


@pytest.fixture
def orbax_fails():
    """For tests in which a read or write fails: what orbax was doing beside it ends, and is collected, within the test.

    Else its event loop's remains are found in whichever test collects garbage next, and fail that one. The test needs
    `filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")` as well, which counts for its end too.
    """
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        with contextlib.suppress(Exception):  # orbax's threads raise what ended them
            thread.join(10)
    gc.collect()


@pytest.fixture
def no_nohup():
    """Takes back that signals of `OTHERS` are ignored, as SIGHUP is if these tests run under `nohup`."""
    import signal

    from surojax.cluster.early import OTHERS

    old = {number: signal.signal(number, signal.SIG_DFL) for number in OTHERS}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)
