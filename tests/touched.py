"""Which tests a change touches: how many imports lie between a file and the files that changed."""

import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from pathlib import Path

FOLDERS = ("surojax", "pallas_kernels", "tests", "benchmarks")
BASES = (".", "tests", "benchmarks")  # folders whose modules are imported by their names alone
IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\([^)]*\)|.*)|import (.*))$", re.MULTILINE)


def distances(root: Path, changed: Collection[Path]) -> dict[Path, int]:
    """The number of imports over which a Python file of the repository reaches a changed one, 0 for that itself.

    Files that reach none are left out.
    """
    files = {file for folder in FOLDERS for file in (root / folder).rglob("*.py")}
    importers: defaultdict[Path, set[Path]] = defaultdict(set)
    for file in files:
        for imported in files.intersection(named(file, root)):
            importers[imported].add(file)
    found = dict.fromkeys(changed, 0)
    queue = deque(changed)
    while queue:
        file = queue.popleft()
        for importer in importers[file] - found.keys():
            found[importer] = found[file] + 1
            queue.append(importer)
    return found


def named(file: Path, root: Path) -> Iterator[Path]:
    """Yields where the modules would be that a file imports, anywhere in it, if they are the repository's."""
    for module, listed, several in IMPORT.findall(file.read_text(encoding="utf-8")):
        imported = re.findall(r"\w+", re.sub(r" as \w+", "", listed))
        names = [module, *(f"{module}.{name}" for name in imported)] if module else re.findall(r"[\w.]+", several)
        for name in names:
            place = name.replace(".", "/")
            for base in BASES:
                yield from (root / base / f"{place}.py", root / base / place / "__init__.py")
