"""Checks that the tests notice mistakes: makes one at a time in a copy of the source and runs the tests that must fail.

    python benchmarks/mutants.py [--only PATTERN] [--jobs N] [--limit SECONDS] [--list] [--check]

The mistakes (mutants) are one-line changes of the kind that happens in a refactoring: a missing term, two exchanged
arguments, a wrong axis, off by one, a setting that is not passed on. `mutant_list.py` lists them with the tests that
must notice them. A mutant that no test notices shows that something is not tested. It needs a test, or an explanation
in the list.

The working tree is not changed: its files (tracked, or not ignored by git) are copied to a temporary folder for each
process. First, the named tests run without a mutant, and must pass. They run twice, because all later runs read
compiled programs from a cache that the first run fills: a failure caused by the cache would look like a killed mutant.

A mutant is killed if a test fails, if the tests cannot be collected, if the process crashes, or if it runs longer than
the limit; the table says which. Exit code 1: a mutant without an explanation survived, or a test failed without a
mutant.

`--check` compares the list with the source and the tests, in seconds: every text to change must occur exactly once in
its file, and all tests must exist. tests/test_mutants.py checks the texts, so that the list follows the source.
"""

import argparse
import compileall
import contextlib
import fnmatch
import os
import py_compile
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-o", "addopts=", "-n", "0", "-q", "-p", "no:cacheprovider", "--tb=no")
PASSED, FAILED = 0, 1  # exit codes of pytest
LIMIT_S = 300


class Outcome(NamedTuple):
    """The result of a mutant. killed_by: the failed test, or the hang or crash; "" if the mutant survived."""

    mutant: Mutant
    killed_by: str
    seconds: float


# -- The list against the source and the tests ------------------------------------------------------------------------


def text_problems(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """Returns the problems of the list that the source and test files show without running a test."""
    found = []
    names = [m.name for m in mutants]
    found += [f"{name}: two mutants have this name" for name in sorted({n for n in names if names.count(n) > 1})]
    for m in mutants:
        file = root / m.file
        count = file.read_text().count(m.old) if file.is_file() else None
        if count is None:
            found.append(f"{m.name}: expected a file, got {m.file}, which is not there")
        elif count != 1:
            found.append(f"{m.name}: expected {m.old!r} once in {m.file}, got {count} times; take a longer text")
        elif m.old == m.new:
            found.append(f"{m.name}: the new text is the old one")
        for node in nodes(m):
            path, _, function = node.partition("::")
            if not (root / path).is_file():
                found.append(f"{m.name}: expected a file of tests, got {path}, which is not there")
            elif function and not re.search(rf"^def {re.escape(function)}\(", (root / path).read_text(), re.MULTILINE):
                found.append(f"{m.name}: expected a test of {path}, got {function}; it may have another name now")
    return found


def nodes(mutant: Mutant) -> list[str]:
    """Returns the files or `file::function` that contain a mutant's tests."""
    return split_tests(mutant)[0]


def split_tests(mutant: Mutant) -> tuple[list[str], list[str]]:
    """Splits `Mutant.tests` into (files or `file::function`, words that the ids of the tests must contain)."""
    before, _, after = mutant.tests.partition(" -k ")
    words = shlex.split(after.replace(" and ", " "))
    return shlex.split(before), words


def chosen_tests(mutant: Mutant, ids: Iterable[str]) -> list[str]:
    """Returns the ids of a mutant's tests among the `ids` that pytest has collected."""
    wanted, words = split_tests(mutant)

    def belongs(test: str) -> bool:
        named = any(test == node or test.startswith((f"{node}[", f"{node}::")) for node in wanted)
        return named and all(word in test for word in words)

    return [test for test in ids if belongs(test)]


def collected(folder: Path, mutants: Sequence[Mutant]) -> list[str]:
    """Returns the ids of all tests in the files that the mutants name. Raises RuntimeError if collecting them fails."""
    named = sorted({node for m in mutants for node in nodes(m)})  # named, so that no marker deselects one
    done = subprocess.run(
        [*PYTEST, "--collect-only", *named], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    if done.returncode != PASSED:
        raise RuntimeError(f"pytest could not collect the tests: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return list(dict.fromkeys(line for line in done.stdout.splitlines() if "::" in line))


# -- Runs -------------------------------------------------------------------------------------------------------------


def copy_tree(target: Path) -> None:
    """Copies the files of the working tree: the tracked files, and others that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    # Invalidated by content, since time and size may be equal for a mutant and the original.
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    for package in ("surojax", "pallas_kernels"):
        compileall.compile_dir(target / package, quiet=1, invalidation_mode=checked)


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of a test run: imports come from the copy; all copies share a cache of programs."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return os.environ | cache | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def run_tests(folder: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Runs tests until the first one fails. Returns (exit code, or None if the limit was exceeded; output)."""
    process = subprocess.Popen(
        [*PYTEST, "-x", *tests],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:  # ends the process and its children
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def verdict(code: int | None, output: str, limit_s: float) -> str:
    """Returns what killed a mutant; "" if it survived."""
    if code == PASSED:
        return ""
    if code is None:
        return f"hang: more than {limit_s:.0f} s"
    if code < 0:
        return f"crash: {signal.Signals(-code).name}"
    if failed := re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE):
        return failed[1].removeprefix("tests/")
    return f"pytest ended with {code}: {' '.join(output.split())[-80:]}"


def try_mutant(mutant: Mutant, folder: Path, tests: Sequence[str], limit_s: float) -> Outcome:
    """Makes the mistake in a copy of the source, runs the tests, and restores the copy."""
    started = time.perf_counter()
    file = folder / mutant.file
    original = file.read_text()
    file.write_text(original.replace(mutant.old, mutant.new))
    try:
        code, output = run_tests(folder, tests, limit_s)
    finally:
        file.write_text(original)
    return Outcome(mutant, verdict(code, output, limit_s), time.perf_counter() - started)


def failures_without_mutants(folder: Path, tests: Sequence[str], limit_s: float) -> list[str]:
    """Returns what fails without a mutant, in a first run that fills the cache or a second one that reads it."""
    for _ in range(2):
        code, output = run_tests(folder, tests, limit_s)
        if code != PASSED:
            return [verdict(code, output, limit_s)]
    return []


def outcomes(mutants: Sequence[Mutant], tests: dict[str, list[str]], copies: list[Path], limit_s: float) -> Iterator:
    """Yields the `Outcome` of each mutant as soon as it is known; one process runs in each copy."""
    free: queue.Queue[Path] = queue.Queue()
    for copy in copies:
        free.put(copy)

    def run(mutant: Mutant) -> Outcome:
        copy = free.get()
        try:
            return try_mutant(mutant, copy, tests[mutant.name], limit_s)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        for done in as_completed([pool.submit(run, m) for m in mutants]):
            yield done.result()


# -- The command ------------------------------------------------------------------------------------------------------


def line(outcome: Outcome) -> str:
    """Returns a row of the table."""
    m = outcome.mutant
    explained = f" ({m.explained})" if m.explained else ""
    fate = f"killed by {outcome.killed_by}" if outcome.killed_by else f"SURVIVED{explained}"
    return f"{room(m):<28}{m.name:<58}{outcome.seconds:>6.1f} s  {fate}"


def room(mutant: Mutant) -> str:
    """Returns the file of a mutant, without the common prefix and the extension."""
    return mutant.file.removeprefix("surojax/").removesuffix(".py").replace("pallas_kernels/", "kernels/")


def summary(found: Sequence[Outcome]) -> str:
    """Returns a line with the counts of the table."""
    survived = [o for o in found if not o.killed_by]
    explained = [o for o in survived if o.mutant.explained]
    other = sum(o.killed_by.startswith(("hang", "crash", "pytest ended")) for o in found)
    return (
        f"{len(found)} mutants of {len({o.mutant.file for o in found})} files: {len(found) - len(survived)} killed "
        f"({other} by a hang or a crash), {len(survived)} survived, {len(explained)} of them explained"
    )


def select(pattern: str | None) -> list[Mutant]:
    """Returns the mutants whose name or file contains or matches `pattern`."""
    if pattern is None:
        return list(MUTANTS)

    def matches(text: str) -> bool:
        return pattern in text or fnmatch.fnmatch(text, pattern)

    return [m for m in MUTANTS if matches(m.name) or matches(m.file)]


def main() -> None:
    """Parse the command line and run the mutants."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", help="mutants whose name or file contains or matches it")
    parser.add_argument("--jobs", type=int, default=2, help="parallel processes (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a mutant (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests, and exit")
    parser.add_argument("--check", action="store_true", help="compare the list with source and tests, and exit")
    parser.add_argument("--skip-baseline", action="store_true", help="do not run the tests without a mutant first")
    a = parser.parse_args()
    mutants = select(a.only)
    if not mutants:
        sys.exit(f"--only: expected a part of a name or file, got {a.only!r}, which no mutant has; --list shows all")
    if a.list:
        print("\n".join(f"{room(m):<28}{m.name:<58}{m.tests}" for m in mutants))
        return
    if problems := text_problems(mutants):
        sys.exit("\n".join(problems))
    with tempfile.TemporaryDirectory(prefix="mutants") as temporary:
        copies = [Path(temporary) / f"copy{i}" for i in range(1 if a.check else min(a.jobs, len(mutants)))]
        for copy in copies:
            copy_tree(copy)
        ids = collected(copies[0], mutants)
        tests = {m.name: chosen_tests(m, ids) for m in mutants}
        if without := [f"{m.name}: no such test: {m.tests}" for m in mutants if not tests[m.name]]:
            sys.exit("\n".join(without))
        used = set().union(*tests.values())
        print(f"{len(mutants)} mutants, {len(used)} tests", flush=True)
        if a.check:
            return
        if not a.skip_baseline:
            in_order = [test for test in ids if test in used]
            if failed := failures_without_mutants(copies[0], in_order, 60 * LIMIT_S):
                sys.exit(f"without a mutant these tests have to pass: {', '.join(failed)}")
        found = []
        for outcome in outcomes(mutants, tests, copies, a.limit):
            found.append(outcome)
            print(line(outcome), flush=True)
    print(summary(found))
    sys.exit(any(not o.killed_by and not o.mutant.explained for o in found))


if __name__ == "__main__":
    main()
