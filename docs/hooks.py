"""What mkdocs needs to read the pages as GitHub does: a blank line before a list; and the repository's address."""

import re
import tomllib
from pathlib import Path
from typing import Any

PLACEHOLDER = "YOUR_ACCOUNT"  # in the address of pyproject.toml while there is no repository


def on_config(config: Any) -> Any:
    """Links to the repository, if the project has an address."""
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text())["project"]
    address = project["urls"]["Repository"]
    if PLACEHOLDER not in address:
        config.repo_url = address
        config.repo_name = project["name"]
    return config


def on_page_markdown(markdown: str, **_) -> str:
    """Returns the text of a page with a blank line before each list that follows a line of text."""
    return re.sub(r"(?m)^(?!\* |  )(.+)\n(?=\* )", r"\1\n\n", markdown)
