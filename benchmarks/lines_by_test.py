"""A pytest plugin that writes which lines of the packages each test runs, and how long the test takes.

    pytest -p lines_by_test --lines FOLDER        (with benchmarks/ on PYTHONPATH)

Each process leaves FOLDER/<process id>.json: {"test": [seconds, {"surojax/x.py": [lines]}]}. A line costs one event a
test (`sys.monitoring` turns it off once it is seen), so that tests take hardly longer. Lines that a test's child
processes run are not seen. A fixture counts for the test that makes it, and a program for the test that traces it. A
test that fails is left out.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("surojax", "pallas_kernels")


def pytest_addoption(parser):
    parser.addoption("--lines", metavar="FOLDER", help="where to write the lines that each test runs")


def pytest_configure(config):
    if folder := config.getoption("--lines"):
        config.pluginmanager.register(Recorder(Path(folder)))


class Recorder:
    """Records the lines of the test that is running."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.roots = tuple(f"{ROOT / package}{os.sep}" for package in PACKAGES)
        self.seen: set[tuple[str, int]] = set()
        self.tests: dict[str, tuple[float, dict[str, list[int]]]] = {}
        self.failed: set[str] = set()
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "lines_by_test")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self.line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)

    def line(self, code, number: int):
        """Notes a line the first time that a test runs it."""
        if code.co_filename.startswith(self.roots):
            self.seen.add((code.co_filename, number))
        return sys.monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.seen.clear()
        sys.monitoring.restart_events()
        started = time.perf_counter()
        try:
            return (yield)
        finally:
            files: dict[str, list[int]] = {}
            for name, number in self.seen.copy():  # a thread may still run lines
                files.setdefault(os.path.relpath(name, ROOT), []).append(number)
            seconds = round(time.perf_counter() - started, 3)
            self.tests[item.nodeid] = (seconds, {name: sorted(lines) for name, lines in files.items()})

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self):
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)  # Python's end runs lines as well
        sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)
        tests = {name: row for name, row in self.tests.items() if name not in self.failed}
        if tests:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{os.getpid()}.json").write_text(json.dumps(tests))
