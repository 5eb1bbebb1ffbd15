"""Questions and answers from the standard library's docstrings."""

import inspect
import textwrap
import weakref

import pytest

from surojax.data.docstrings import read_docstrings


def test_answers_are_the_first_paragraphs():
    rows = {row.record["prompt"]: (row.record["completion"], row.where) for row in read_docstrings()}
    assert len(rows) > 1000
    answer, where = rows["What does `textwrap.dedent(text)` do?"]
    paragraph = (inspect.getdoc(textwrap.dedent) or "").split("\n\n")[0]
    assert answer == " ".join(paragraph.split())
    line = inspect.getsourcelines(textwrap.dedent)[1]
    assert where == f"{textwrap.__file__}:{line}"
    method = rows["What does `weakref.WeakValueDictionary.valuerefs(self)` do?"][0]
    assert inspect.getdoc(weakref.WeakValueDictionary.valuerefs).startswith(method)


@pytest.mark.full
def test_private_names_and_short_answers_are_left_out():
    rows = [row.record for row in read_docstrings()]
    names = [row["prompt"].removeprefix("What does `").split("(")[0] for row in rows]
    assert not [name for name in names if any(part.startswith("_") for part in name.split("."))]
    assert all(40 <= len(row["completion"]) <= 600 for row in rows)
    assert len({row["completion"] for row in rows}) == len(rows)
