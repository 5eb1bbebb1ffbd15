"""Keeps, beside `metrics.jsonl`, the settings of each start of a run and the text that it sampled, for reports."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surojax.errors import ConfigError
from surojax.own_files import write_bytes
from surojax.run.metrics import kept_lines, read_metrics

STARTS_FILE = "starts.jsonl"


def write_start(output_dir: Path, first_step: int, settings: Mapping[str, Any]) -> None:
    """Adds {"log":"start","step","time","settings"} of a run that has done `first_step` steps, and drops later records.

    settings: the fields that differ from their defaults.
    """
    start = {"log": "start", "step": first_step, "time": time.time(), "settings": dict(settings)}
    _add(output_dir, first_step, start)


def write_sample(output_dir: Path, step: int, text: str) -> None:
    """Adds {"log":"sample","step","text"}."""
    _add(output_dir, step, {"log": "sample", "step": step, "text": text})


def _add(output_dir: Path, last_step: int, record: dict[str, Any]) -> None:
    """Adds a record after those up to `last_step`. A file that is damaged begins anew, since it decides nothing."""
    path = output_dir / STARTS_FILE
    try:
        kept = kept_lines(path, last_step)
    except ConfigError:
        kept = []
    line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
    write_bytes(path, b"".join([*kept, line]))


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Reads a run's records of starts and samples; none if it has no such file, or a damaged one."""
    try:
        return read_metrics(folder / STARTS_FILE)
    except (OSError, ConfigError):
        return []
