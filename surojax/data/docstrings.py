"""Makes questions and answers from docstrings of this Python's standard library, without a download.

The answer is the first paragraph of a function's docstring. Private names, and docstrings too short to say anything,
are left out. As preferences, the answer is preferred to that of another function.
"""

import ast
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from surojax.data.data_rows import DataRow
from surojax.data.files import stdlib_files
from surojax.errors import ConfigError

NAME = "stdlib_docstrings"
PREFERENCES = "stdlib_preferences"
SHORTEST, LONGEST = 40, 600  # characters of an answer


def read_docstrings() -> Iterator[DataRow]:
    """Yields a row {"prompt", "completion"} for every documented public function, in order of the files.

    Raises ConfigError if this Python was installed without its source.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    has_rows = False
    seen: set[str] = set()
    for path in stdlib_files():
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if _private(module):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for name, function in _functions(tree.body):
            answer = _first_paragraph(ast.get_docstring(function))
            if SHORTEST <= len(answer) <= LONGEST and answer not in seen:
                seen.add(answer)
                has_rows = True
                question = f"What does `{module}.{name}({ast.unparse(function.args)})` do?"
                yield DataRow({"prompt": question, "completion": answer}, f"{path}:{function.lineno}")
    if not has_rows:
        raise ConfigError(
            f"{NAME}: expected Python source files below {root}, got none (an interpreter shipped without them); "
            "use rows of your own"
        )


def read_preferences() -> Iterator[DataRow]:
    """Yields a row {"prompt", "chosen", "rejected"} for every function, whose rejected answer is the next one's.

    Raises ConfigError if this Python was installed without its source.
    """
    rows = list(read_docstrings())
    for (record, where), (other, _) in zip(rows, [*rows[1:], rows[0]], strict=True):
        pair = {"chosen": record["completion"], "rejected": other["completion"]}
        yield DataRow({"prompt": record["prompt"], **pair}, where)


SETS = {NAME: read_docstrings, PREFERENCES: read_preferences}


def _functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yields the public functions and methods of a module or class with their dotted names."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not _private(node.name):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _private(node.name):
            yield f"{prefix}{node.name}", node


def _private(name: str) -> bool:
    return any(part.startswith("_") for part in name.split("."))


def _first_paragraph(docstring: str | None) -> str:
    """Returns a docstring's first paragraph in one line; "" without a docstring."""
    return " ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split())
