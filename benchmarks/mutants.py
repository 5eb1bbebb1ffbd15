"""Checks that the tests notice mistakes: makes one at a time in a copy of the source and runs the tests of its line.

    python benchmarks/mutants.py [PLACE ...] [--since REVISION] [--sample N] [--seed S] [--all] [--jobs N] [--list]
                                 [--again SECONDS] [--full SECONDS]

Mistakes (mutants) are generated from the syntax tree (mutation.py). PLACE is a file or folder, such as `surojax/step`;
`--since` keeps the lines that changed after a revision. A sample has as many mutants of each kind as there are, in an
order that the seed decides.

The first run maps tests to the lines that they run (lines_by_test.py), by running the quick suite, or with `--all`
everything, and keeps that in a folder (`--map`). A map of files that have changed since is refused.

A mutant is killed if one of the tests of its line fails, cannot be collected, crashes, or takes ten times as long as
without it. As many tests run as fit into `--limit` seconds, fast ones that spend most of their lines in its file before
others; a survivor's row says how many were left out. With `--again` a survivor is tried with as many of those as fit
into more seconds, and with `--full` with the cases of the tests of its line that are marked `full`: the quick suite has
one of many. A survivor shows a test that is missing, or changes nothing: look at it. A function that is traced once a
process has its lines in the first test that needs it, so a map misses tests. Exit code 1: more than a tenth survived.
The working tree is not changed. Programs are compiled into JAX_COMPILATION_CACHE_DIR, or else into a folder of the run.
"""

import argparse
import ast
import compileall
import contextlib
import hashlib
import json
import multiprocessing
import os
import py_compile
import queue
import random
import re
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

import pytest
from mutation import Mutant, assigned_names, mutants_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("surojax", "pallas_kernels")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no")
PASSED, NOTHING_RAN = 0, 5  # exit codes of pytest
STARTS_S = 60  # to import JAX and collect tests
SURVIVORS = 0.1  # the fraction that may survive
WARM = ["pytest", "jax", "numpy", "flax.nnx", "optax", "orbax.checkpoint", "ml_collections"]  # none of this repository
FORKS = multiprocessing.get_context("forkserver")


class Test(NamedTuple):
    """A test of a line. cost: seconds / the fraction of all lines it runs that are in the line's file."""

    name: str
    seconds: float
    cost: float


class Outcome(NamedTuple):
    """The result of a mutant. killed_by: the failed test, or the hang or crash; "" if it survived.

    left_out: tests of its line that were not run.
    """

    mutant: Mutant
    killed_by: str
    seconds: float
    left_out: int


# -- Which tests run a line -------------------------------------------------------------------------------------------


def write_map(folder: Path, *, everything: bool) -> None:
    """Runs the suite and writes, into `folder`, what each test runs."""
    command = [*PYTEST, "-p", "lines_by_test", "--lines", str(folder.absolute()), *(["--all"] if everything else [])]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"})
    (folder / "sources").mkdir(parents=True, exist_ok=True)
    for path in sources():
        (folder / "sources" / path.replace("/", "--")).write_text(digest(ROOT / path))


def read_map(folder: Path) -> dict[tuple[str, int], list[Test]]:
    """The tests of each line (file, line), the lowest cost first. ("", 0) has them all: some only look at tables."""
    tests_of_line: dict[tuple[str, int], list[Test]] = {}
    for part in folder.glob("*.json"):
        for name, (seconds, files) in json.loads(part.read_text()).items():
            everything = sum(map(len, files.values()))
            tests_of_line.setdefault(("", 0), []).append(Test(name, seconds, seconds))
            for file, lines in files.items():
                test = Test(name, seconds, seconds * everything / len(lines))
                for line in lines:
                    tests_of_line.setdefault((file, line), []).append(test)
    for tests in tests_of_line.values():
        tests.sort(key=by_cost)
    return tests_of_line


def by_cost(test: Test) -> tuple[float, str]:
    return test.cost, test.name


def with_tables(tests_of_line: dict[tuple[str, int], list[Test]]) -> dict[tuple[str, int], list[Test]]:
    """Adds the lines of modules' assignments, with the tests of all lines that read one of the assigned names.

    Names are compared as texts: a line that reads another module's table of the same name counts as well. So do tests
    that read one of the names themselves, and those of a table that is made of this one.
    """
    readers: dict[str, set[tuple[str, int]]] = {}
    trees = {file: ast.parse((ROOT / file).read_text()) for file in sources()}
    for file, tree in trees.items():
        for name, node in read_names(tree):
            readers.setdefault(name, set()).add((file, node.lineno))
    named_in = tests_by_name({test.name: test for tests in tests_of_line.values() for test in tests}.values())
    found = dict(tests_of_line)
    for file, tree in [*trees.items()] * 2:  # twice: of a table in a later file
        for statement in reversed(tree.body):
            names = assigned_names(statement)
            lines = set().union(*(readers[name] for name in names))
            tests = {test.name: test for line in lines for test in found.get(line, ())}
            tests |= {test.name: test for name in names for test in named_in.get(name, ())}
            for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1) if tests else ():
                of_line = {test.name: test for test in tests_of_line.get((file, line), ())} | tests
                found[file, line] = sorted(of_line.values(), key=by_cost)
    return found


def read_names(tree: ast.AST) -> Iterator[tuple[str, ast.Name | ast.Attribute]]:
    """Yields the names and attributes in a syntax tree, with their nodes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node.id if isinstance(node, ast.Name) else node.attr, node


def tests_by_name(tests: Iterable[Test]) -> dict[str, list[Test]]:
    """The tests by the names that their functions read, or what these read of their own and other test modules.

    Their cost is that of tests of the table alone.
    """
    cases: dict[str, list[Test]] = {}
    for test in tests:
        cases.setdefault(test.name.partition("[")[0], []).append(test._replace(cost=test.seconds))
    read: dict[tuple[str, str], set[str]] = {}  # by module and name: names that a definition reads
    imported: dict[tuple[str, str], tuple[str, str]] = {}
    for path in sorted((ROOT / "tests").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {(path.stem, x.asname or x.name): (node.module, x.name) for x in node.names}
            else:
                names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else assigned_names(node)
                for name in names:
                    read.setdefault((path.stem, name), set()).update(name for name, _ in read_names(node))
    found: dict[str, list[Test]] = {}
    for function, of_function in cases.items():
        path, _, name = function.partition("::")
        every: set[str] = set()
        seen = set()
        left = [(Path(path).stem, name)]
        while left:
            place = left.pop()
            if place not in seen:
                seen.add(place)
                names = read.get(imported.get(place, place), set())
                every |= names
                left += [(imported.get(place, place)[0], name) for name in names]
        for name in every:
            found.setdefault(name, []).extend(of_function)
    return found


def unchanged(folder: Path, file: str) -> bool:
    """Whether a file is as it was when its lines were mapped."""
    known = folder / "sources" / file.replace("/", "--")
    return known.is_file() and known.read_text() == digest(ROOT / file)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sources(places: Sequence[str] = PACKAGES) -> list[str]:
    """The source files of files and folders, by their names from the root. Raises SystemExit for one that has none."""
    files_below = []
    for place in places:
        path = ROOT / place
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        if not files:
            sys.exit(f"expected a file or a folder of the source, got {place!r}; for example surojax/step")
        files_below += [str(file.relative_to(ROOT)) for file in files]
    return files_below


def changed_lines(revision: str) -> set[tuple[str, int]]:
    """The lines (file, line) that were added or changed since a revision. Raises SystemExit if git does not know it."""
    command = ["git", "diff", "-U0", "--no-color", revision, "--", *PACKAGES]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"--since: {process.stderr.strip().splitlines()[0]}")
    return lines_of_diff(process.stdout)


def lines_of_diff(diff: str) -> set[tuple[str, int]]:
    """The lines (file, line) that a diff without context adds."""
    lines = set()
    file = ""
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(hunk[1]), int(hunk[2] or 1)
            lines |= {(file, number) for number in range(start, start + count)}
    return lines


def sampled(mutants: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """A sample of `size` mutants, one of each kind in turn: some kinds are many more, which most tests notice."""
    chance = random.Random(seed)
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_kind.setdefault(mutant.kind, []).append(mutant)
    for group in by_kind.values():
        chance.shuffle(group)
    sample: list[Mutant] = []
    while len(sample) < size and any(by_kind.values()):
        sample += [group.pop() for group in by_kind.values() if group]
    return sample[:size]


def within(tests: Sequence[Test], limit_s: float) -> list[Test]:
    """The first tests that fit into `limit_s`, at least one: one of each function before a second case of any.

    Returns them with the fastest first.
    """
    first: dict[str, Test] = {}
    for test in tests:
        first.setdefault(test.name.partition("[")[0], test)
    chosen = []
    left = limit_s
    for test in [*first.values(), *(test for test in tests if first[test.name.partition("[")[0]] is not test)]:
        if not chosen or test.seconds <= left:
            chosen.append(test)
            left -= test.seconds
    return sorted(chosen, key=lambda test: test.seconds)


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
    for package in PACKAGES:
        compileall.compile_dir(target / package, quiet=1, invalidation_mode=checked)


def environment(folder: str) -> dict[str, str]:
    """The environment of all test runs; their copies share a cache of programs in this folder."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run_tests(folder: Path, names: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Runs tests until the first one fails, in a process that begins as a copy of one with JAX imported (`WARM`).

    names: or options of pytest. Returns (exit code, or None if the limit was exceeded; output).
    """
    output = folder / "output.txt"
    process = FORKS.Process(target=run_pytest, args=(folder, names, output))
    process.start()
    try:
        process.join(limit_s)
        return process.exitcode, output.read_text(errors="replace") if output.is_file() else ""
    finally:  # ends the process and its children
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        output.unlink(missing_ok=True)


def run_pytest(folder: Path, names: Sequence[str], output: Path) -> None:
    """Becomes a run of pytest in a folder, whose modules are imported. Ends the process with pytest's exit code."""
    os.setsid()
    os.chdir(folder)
    text = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (0, 1, 2):
        os.dup2(text if stream else os.open(os.devnull, os.O_RDONLY), stream)
    os.environ["PYTHONPATH"] = str(folder)  # of the tests' child processes
    sys.path.insert(0, str(folder))
    code = pytest.main([*PYTEST[3:], "-n", "0", "-x", *names])
    sys.stdout.flush()
    os._exit(code)


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


class Limits(NamedTuple):
    """Seconds of tests for a mutant.

    first_s: for every mutant. again_s: for a survivor, with other tests. full_s: likewise, with full cases of them all.
    """

    first_s: float
    again_s: float = 0
    full_s: float = 0


def try_mutant(mutant: Mutant, folder: Path, tests: Sequence[Test], limits: Limits) -> Outcome:
    """Makes the mistake in a copy of the source, runs its tests, and restores the copy."""
    started = time.perf_counter()
    file = folder / mutant.file
    original = file.read_text()
    file.write_text(mutant.applied(original))
    left = list(tests)
    killed_by = ""
    try:
        for limit_s in filter(None, (limits.first_s, limits.again_s)):
            if left and not killed_by:
                chosen = within(left, limit_s)
                left = [test for test in left if test not in chosen]
                longest_s = STARTS_S + 10 * sum(test.seconds for test in chosen)
                killed_by = verdict(*run_tests(folder, [test.name for test in chosen], longest_s), longest_s)
        if limits.full_s and not killed_by:
            functions = dict.fromkeys(test.name.partition("[")[0] for test in tests)
            code, output = run_tests(folder, ["--all", "-m", "full", *functions], limits.full_s)
            killed_by = verdict(code, output, limits.full_s) if code not in (None, NOTHING_RAN) else ""
    finally:
        file.write_text(original)
    return Outcome(mutant, killed_by, time.perf_counter() - started, len(left))


def outcomes(mutants: Sequence[Mutant], tests: dict, copies: list[Path], limits: Limits) -> Iterator[Outcome]:
    """Yields the `Outcome` of each mutant as soon as it is known; one process runs in each copy."""
    free: queue.Queue[Path] = queue.Queue()
    for copy in copies:
        free.put(copy)

    def run(mutant: Mutant) -> Outcome:
        copy = free.get()
        try:
            return try_mutant(mutant, copy, tests[mutant.file, mutant.line], limits)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        for future in as_completed([pool.submit(run, mutant) for mutant in mutants]):
            yield future.result()


# -- The command ------------------------------------------------------------------------------------------------------


def row(mutant: Mutant, fate: str) -> str:
    """A row of the table: where, what was changed into what, and what became of it."""
    text = (ROOT / mutant.file).read_text()
    old = " ".join(text[mutant.start : mutant.stop].split())
    new = " ".join(mutant.new.split())
    return f"{mutant.file}:{mutant.line}  {mutant.kind}: {old[:70]!r} -> {new[:70]!r}  {fate}"


def main() -> None:
    """Parse the command line and run the mutants."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("places", nargs="*", metavar="PLACE", help="files and folders (default: both packages)")
    parser.add_argument("--since", metavar="REVISION", help="only lines that changed after it")
    parser.add_argument("--sample", type=int, default=200, help="number of mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides the sample (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="map the tests marked `full` as well")
    parser.add_argument("--map", type=Path, default=ROOT / "build" / "mutants", help="folder (default: build/mutants)")
    parser.add_argument("--jobs", type=int, default=2, help="parallel processes (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=40, help="seconds of tests per mutant (default: %(default)s)")
    parser.add_argument("--again", type=float, default=0, help="seconds of other tests per survivor (default: none)")
    parser.add_argument("--full", type=float, default=0, help="seconds of full tests per survivor (default: none)")
    parser.add_argument("--list", action="store_true", help="print the sample and how many tests it has, and exit")
    a = parser.parse_args()
    if not a.map.is_dir():
        print(f"mapping tests to lines, into {a.map}", flush=True)
        write_map(a.map, everything=a.all)
    tests = with_tables(read_map(a.map))
    files = sources(a.places or PACKAGES)
    if stale := [file for file in files if not unchanged(a.map, file)]:
        sys.exit(
            f"--map: {a.map} is of another {stale[0]} ({len(stale)} files in all); remove it, or name another folder"
        )
    mutants = [mutant for file in files for mutant in mutants_of(ROOT / file, file)]
    if a.since:
        changed = changed_lines(a.since)
        mutants = [mutant for mutant in mutants if (mutant.file, mutant.line) in changed]
    reached = [mutant for mutant in mutants if (mutant.file, mutant.line) in tests]
    print(
        f"{len(mutants)} mutants, {len(mutants) - len(reached)} of them on lines that no test runs in its own process"
    )
    chosen = sampled(reached, a.sample, a.seed)
    if a.list:
        print("\n".join(row(m, f"{len(tests[m.file, m.line])} tests") for m in chosen))
        return
    results = []
    FORKS.set_forkserver_preload(WARM)
    with tempfile.TemporaryDirectory(prefix="mutants") as temporary:
        os.environ.update(environment(os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{temporary}/compiled")))
        copies = [Path(temporary) / f"copy{i}" for i in range(min(a.jobs, len(chosen)))]
        for copy in copies:
            copy_tree(copy)
        for outcome in outcomes(chosen, tests, copies, Limits(a.limit, a.again, a.full)):
            results.append(outcome)
            left = f", {outcome.left_out} tests left out" if outcome.left_out else ""
            fate = f"killed by {outcome.killed_by}" if outcome.killed_by else f"SURVIVED{left}"
            print(row(outcome.mutant, f"{fate}  {outcome.seconds:.0f} s"), flush=True)
    survived = [outcome for outcome in results if not outcome.killed_by]
    print(f"{len(results)} mutants, {len(results) - len(survived)} killed, {len(survived)} survived:")
    print("\n".join(row(outcome.mutant, "") for outcome in survived))
    sys.exit(len(survived) > SURVIVORS * len(results))


if __name__ == "__main__":
    main()
