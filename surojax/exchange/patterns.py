"""Matches untrusted regular expressions, in the child process of `surojax.limited`."""

import re
from typing import Any


def matching(expression: str, names: list[str]) -> dict[str, Any]:
    """Returns {"names": names that the expression matches entirely}, or {"refused": reason} if it is invalid."""
    try:
        compiled = re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        return {"refused": " ".join(str(error).split())[:200]}
    return {"names": [name for name in names if compiled.fullmatch(name)]}
