"""What mkdocs needs to read the pages as GitHub does: a blank line before a list."""

import re


def on_page_markdown(markdown: str, **_) -> str:
    """Returns the text of a page with a blank line before each list that follows a line of text."""
    return re.sub(r"(?m)^(?!\* |  )(.+)\n(?=\* )", r"\1\n\n", markdown)
