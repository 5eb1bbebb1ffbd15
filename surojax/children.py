"""The commands of child processes that run Python code.

`python -c` looks for modules in the current folder first, where a json.py of the user's would be run in place of
Python's own. A child imports from where this process does; the current folder counts last, unless it has
surojax itself.
"""

import os
import sys
from pathlib import Path


def python_command(code: str, *arguments: str, python: str | None = None, bare: bool = False) -> list[str]:
    """Returns the command that runs code, whose `sys.argv[1:]` are the arguments.

    python: another interpreter, which has an import path of its own. bare: the standard library is enough, without
    `site` and the environment's variables.
    """
    if bare:
        return [sys.executable, "-I", "-S", "-c", code, *arguments]
    path = "[x for x in sys.path if x]" if python else repr(_path())
    return [python or sys.executable, "-c", f"import sys; sys.path[:] = {path}\n{code}", *arguments]


def _path() -> list[str]:
    """Returns this process's import path, with the current folder at its end.

    The folder that holds surojax comes before it: after an editable installation only a finder may know that folder,
    and Python asks finders after all folders.
    """
    here, ours = os.getcwd(), str(Path(__file__).parents[1])
    if ours == here:
        return sys.path
    others = [x for x in sys.path if os.path.abspath(x) != here]  # "" is here, too
    if len(others) == len(sys.path):
        return others
    return [*others, *([] if ours in others else [ours]), here]
