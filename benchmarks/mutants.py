"""Do the tests notice mistakes? Makes one mistake at a time in a copy of the source and runs the tests that must fail.

    python benchmarks/mutants.py [--only PATTERN] [--jobs N] [--limit SECONDS] [--list] [--check]

The mistakes (mutants) are one-line changes of the kind that a refactoring makes: a term left out, two arguments
exchanged, a wrong axis, one off, a setting not handed on. `mutant_list.py` has them with the tests that must notice.
A mutant that no test notices shows what is not tested; it needs a test, or an explanation in the list.

Nothing is changed in the working tree: its files (tracked, or not ignored) are copied to a temporary folder for every
process. Before any mutant the named tests run as they are, and must pass. They run twice, because the second run reads
compiled programs from the cache that all later runs share: what fails there would be taken for a mutant's work.

A mutant is killed if a test fails, if the tests cannot be collected, if the process crashes, and if it runs longer than
the limit; the table says which. Exit code 1: a mutant without an explanation survived, or a test failed without one.

`--check` compares the list with the source and the tests, in seconds: every text to change occurs exactly once in its
file, and all tests exist. tests/test_mutants.py does the first part, so that a change of the source keeps the list.
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
    """What became of a mutant. killed_by: the test that failed, or what else happened; "" if it survived."""

    mutant: Mutant
    killed_by: str
    seconds: float


# -- The list against the source and the tests ------------------------------------------------------------------------


def text_problems(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """What is wrong with the list, seen from the source alone; empty if nothing is."""
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
    """The files, or `file::function`, that a mutant's tests are in."""
    return split_tests(mutant)[0]


def split_tests(mutant: Mutant) -> tuple[list[str], list[str]]:
    """(files or `file::function`, words that the ids of the tests must contain) of `Mutant.tests`."""
    before, _, after = mutant.tests.partition(" -k ")
    words = shlex.split(after.replace(" and ", " "))
    return shlex.split(before), words


def chosen_tests(mutant: Mutant, ids: Iterable[str]) -> list[str]:
    """The ids of a mutant's tests among those that pytest has collected."""
    wanted, words = split_tests(mutant)

    def belongs(test: str) -> bool:
        named = any(test == node or test.startswith((f"{node}[", f"{node}::")) for node in wanted)
        return named and all(word in test for word in words)

    return [test for test in ids if belongs(test)]


def collected(folder: Path, mutants: Sequence[Mutant]) -> list[str]:
    """The ids of the mutants' tests, and of more. Raises RuntimeError if pytest cannot collect them."""
    named = sorted({node for m in mutants for node in nodes(m)})  # by name, so that no marker leaves one out
    done = subprocess.run(
        [*PYTEST, "--collect-only", *named], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    if done.returncode != PASSED:
        raise RuntimeError(f"pytest could not collect the tests: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return list(dict.fromkeys(line for line in done.stdout.splitlines() if "::" in line))


# -- Runs -------------------------------------------------------------------------------------------------------------


def copy_tree(target: Path) -> None:
    """Copy the files of the working tree: tracked ones, and others that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    # By their content: a mutant is as old as the original, and may be as long.
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    for package in ("surojax", "pallas_kernels"):
        compileall.compile_dir(target / package, quiet=1, invalidation_mode=checked)


def environment(folder: Path) -> dict[str, str]:
    """That of a test run: the copy's source, and a cache of compiled programs beside the copies."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return os.environ | cache | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def run_tests(folder: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """(exit code, None if it ran longer than the limit; output) of the tests, until the first one that fails."""
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
    finally:  # its children too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def verdict(code: int | None, output: str, limit_s: float) -> str:
    """What killed a mutant; "" if nothing did."""
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
    """Run the tests with the mistake made in this copy, which is then as it was."""
    started, file = time.perf_counter(), folder / mutant.file
    original = file.read_text()
    file.write_text(original.replace(mutant.old, mutant.new))
    try:
        code, output = run_tests(folder, tests, limit_s)
    finally:
        file.write_text(original)
    return Outcome(mutant, verdict(code, output, limit_s), time.perf_counter() - started)


def failures_without_mutants(folder: Path, tests: Sequence[str], limit_s: float) -> list[str]:
    """Tests that do not pass as they are: before programs are in the cache, and after."""
    for _ in range(2):
        code, output = run_tests(folder, tests, limit_s)
        if code != PASSED:
            return [verdict(code, output, limit_s)]
    return []


def outcomes(mutants: Sequence[Mutant], tests: dict[str, list[str]], copies: list[Path], limit_s: float) -> Iterator:
    """The `Outcome` of each mutant as it is known, one process for each copy."""
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
    """A row of the table."""
    m = outcome.mutant
    explained = f" ({m.explained})" if m.explained else ""
    fate = f"killed by {outcome.killed_by}" if outcome.killed_by else f"SURVIVED{explained}"
    return f"{room(m):<28}{m.name:<58}{outcome.seconds:>6.1f} s  {fate}"


def room(mutant: Mutant) -> str:
    """The file of a mutant, without what all have in common."""
    return mutant.file.removeprefix("surojax/").removesuffix(".py").replace("pallas_kernels/", "kernels/")


def summary(found: Sequence[Outcome]) -> str:
    """Counts of the table."""
    survived = [o for o in found if not o.killed_by]
    explained = [o for o in survived if o.mutant.explained]
    other = sum(o.killed_by.startswith(("hang", "crash", "pytest ended")) for o in found)
    return (
        f"{len(found)} mutants of {len({o.mutant.file for o in found})} files: {len(found) - len(survived)} killed "
        f"({other} by a hang or a crash), {len(survived)} survived, {len(explained)} of them explained"
    )


def select(pattern: str | None) -> list[Mutant]:
    """The mutants whose name or file has this in it, or matches it."""
    if pattern is None:
        return list(MUTANTS)
    matches = lambda text: pattern in text or fnmatch.fnmatch(text, pattern)
    return [m for m in MUTANTS if matches(m.name) or matches(m.file)]


def main() -> None:
    """Parse the command line and run the mutants."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", help="mutants whose name or file has this in it, or matches it")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a mutant (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests, and exit")
    parser.add_argument("--check", action="store_true", help="compare the list with source and tests, and exit")
    parser.add_argument("--skip-baseline", action="store_true", help="do not run the tests without mutants before")
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
