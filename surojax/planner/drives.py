"""The disks that `--disk` names: rates, drives by name, or folders whose disks were measured here.

A run writes its files all the time, step after step. So what counts is what a drive writes once its cache is full,
which no data sheet says: consumer drives fall to a fifth or less. `DRIVES` has drives of which somebody measured it, or
which have no such cache. Rates that were measured here are in `rates_file` (seen.py).
"""

import re
from pathlib import Path
from typing import NamedTuple

from surojax.errors import ConfigError, nearest_name
from surojax.planner import seen
from surojax.planner.disks import ASSUMED_DISKS, CONSUMER_TBW, SAID, SUSTAINED_HERE, Disks
from surojax.planner.gpus import GB
from surojax.untrusted import expanded


class Drive(NamedTuple):
    """A drive: GB/s read, GB/s written for hours, TB that its maker warrants, and where these are from."""

    read: float
    write: float
    tbw: float
    source: str


DRIVES = {
    "980pro": Drive(7.0, 1.5, 600, "1 TB, maker; techpowerup.com: 1.5 GB/s after 113 GB"),
    "nm790": Drive(7.4, 1.45, 1500, "Lexar, 2 TB, maker; techpowerup.com: 1.45 GB/s for its whole capacity"),
    "t500": Drive(7.4, 0.64, 1200, "Crucial, 2 TB, maker; techpowerup.com: 0.64 GB/s for its whole capacity"),
    "sn850x": Drive(7.3, 3.4, 1200, "WD, 2 TB, maker; AIDA64's writing of a whole drive: 3.4 GB/s (median)"),
    "9400pro": Drive(7.0, 7.0, 14016, "Micron, 7.68 TB, maker: one write of the drive a day for five years"),
    "pm9d3a": Drive(12.0, 6.8, 14016, "Samsung, 7.68 TB, maker: one write of the drive a day for five years"),
}
RATES = re.compile(r"(?:(\d{1,4})x)?(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", re.ASCII)
NAMED = re.compile(r"([a-z]*\d+[a-z0-9]*)(?::(\d{1,4}))?", re.ASCII)


def disks(text: str | None, rates_file: str = "") -> Disks:
    """The disks that `--disk` names; the assumed ones for None.

    text: GB/s read and written, "7.4/6.9", or "2x7.4/6.9" of two; a drive, "sn850x", or "sn850x:2"; or a folder that
    `surojax doctor` has measured, or several with commas. rates_file: where its rates are.
    Raises ConfigError for anything else.
    """
    if text is None:
        return ASSUMED_DISKS
    if match := RATES.fullmatch(text):
        number, read, write = (float(x or 1) for x in match.groups())
        if 0 < min(number, read, write) <= max(read, write) < 1e4:
            of_all = number * read * GB, number * write * GB
            return Disks(*of_all, SAID, number * CONSUMER_TBW, "as given")
    if (match := NAMED.fullmatch(text)) and match[1] in DRIVES and int(match[2] or 1):
        drive, number = DRIVES[match[1]], int(match[2] or 1)
        rates = number * drive.read * GB, number * drive.write * GB
        return Disks(*rates, SAID, number * drive.tbw, f"{number} x {match[1]}: {drive.source}")
    if text.startswith(("/", "~", ".")):
        return _measured(text, rates_file)
    raise ConfigError(
        f"--disk: expected GB/s read and written, as 7.4/6.9 or 2x7.4/6.9, a drive of {', '.join(DRIVES)}, or two with "
        f":2 behind it, or a folder that doctor has measured, got {text!r}; {nearest_name(text, DRIVES)}"
    )


def _measured(text: str, rates_file: str) -> Disks:
    """The disks of folders that were measured here, together. Raises ConfigError for one that was not."""
    read = write = 0.0
    for folder in text.split(","):
        path = str(Path(expanded(folder.strip())).absolute())
        rates = seen.rates_of_disk(rates_file, path)
        if rates is None:
            raise ConfigError(
                f"--disk: expected a folder that was measured, got {folder!r}, of which {rates_file or 'no file'} says "
                f"nothing; run surojax doctor --only disk --nvme-path {folder} --sustained 60"
            )
        read, write = read + rates.read, write + rates.write
    number = len(text.split(","))
    return Disks(read, write, SUSTAINED_HERE, number * CONSUMER_TBW, f"measured here, {rates_file}")
