"""The lines that a run prints."""

import sys

from tqdm import tqdm

from surojax.run.shared import is_first


def say(text: str) -> None:
    """Print a line, above the progress bar if there is one; of several processes, the first one does.

    Characters that the terminal cannot show are escaped.
    """
    if not is_first():
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
