"""Checks that several processes have the same settings and write into one folder."""

import contextlib
import os
import time
import zlib
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from surojax.errors import ConfigError

SECONDS = 10.0  # a network file system may show another host's file late


def is_first() -> bool:
    """True in the process that writes metrics, prints, and holds the lock of the output folder."""
    return jax.process_index() == 0


def check_shared(output_dir: Path, settings: str) -> None:
    """Raises ConfigError if the processes have different settings, or do not all write into one folder.

    Every process writes a random token there and reads those of all others; nothing remains. With one process there is
    nothing to check.
    """
    if jax.process_count() == 1:
        return
    token = int.from_bytes(os.urandom(4), "little")
    tokens = multihost_utils.process_allgather(np.array([token, zlib.crc32(settings.encode())], np.uint32))
    if len(set(tokens[:, 1])) > 1:
        raise ConfigError("processes: expected the same settings in all, got different ones; give all the same command")
    mine = _file(output_dir, jax.process_index())
    output_dir.mkdir(parents=True, exist_ok=True)
    mine.write_text(str(token))
    try:
        deadline = time.monotonic() + SECONDS
        missing = [i for i, (expected, _) in enumerate(tokens) if not _reads(_file(output_dir, i), expected, deadline)]
        multihost_utils.sync_global_devices("surojax: tokens are read")
    finally:
        with contextlib.suppress(OSError):
            mine.unlink()
    if missing:
        raise ConfigError(
            f"output_dir: expected a folder that all processes share, got {output_dir}, where process "
            f"{jax.process_index()} does not see what process {missing[0]} writes; use one on a shared file system"
        )


def _file(output_dir: Path, i: int) -> Path:
    return output_dir / f".token-of-process-{i}"


def _reads(file: Path, expected: int, deadline: float) -> bool:
    """True if the file has this token before the deadline."""
    while True:
        with contextlib.suppress(OSError):
            if file.read_text() == str(expected):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
