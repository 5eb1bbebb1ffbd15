"""The disks of a machine that hold a run's files: their rates and their endurance.

A disk does one direction at a time: reading and writing at once takes as long as one after the other (docs/log,
2026-11-24).
"""

import dataclasses

from surojax.planner.gpus import GB
from surojax.planner.rates import ASSUMED, HERE, SHEET, Span

TB = 1e12
CONSUMER_TBW = 1200  # TB that the makers of 2 TB consumer drives warrant (Samsung 990 PRO, WD SN850X, Crucial T700)
# Disks that nobody said: at the fast end of a PCIe 4.0 drive, at the slow end what consumer drives write once their
# cache is full (techpowerup.com's reviews of write intensive usage: 0.5 to 2 GB/s).
UNKNOWN = Span(0.25, 1.1, ASSUMED)
SAID = Span(0.8, 1.05, SHEET)
MEASURED_HERE = Span(0.25, 1.05, HERE)  # at the start of a run; the slow end is that of a full cache, as above
SUSTAINED_HERE = Span(0.8, 1.1, HERE)  # by `surojax doctor --sustained`


@dataclasses.dataclass(frozen=True)
class Disks:
    """The disks of a machine that hold the files of a run, together.

    read, write: B/s, one direction at a time. span: how far they are known. tbw: TB that their makers warrant, of all
    of them. source: of the rates, in words.
    """

    read: float = 7e9
    write: float = 6e9
    span: Span = UNKNOWN
    tbw: float = CONSUMER_TBW
    source: str = "assumed; --disk says what there is"

    def seconds(self, read: float, written: float) -> float:
        """Seconds that so many bytes take."""
        return read / self.read + written / self.write

    def times(self, factor: float) -> "Disks":
        """Disks with a multiple of these rates."""
        return dataclasses.replace(self, read=self.read * factor, write=self.write * factor)

    def __str__(self) -> str:
        return f"{self.read / GB:g} GB/s read, {self.write / GB:g} written ({self.source})"


ASSUMED_DISKS = Disks()


def wear(written: float, tbw: float) -> str:
    """A line about what so many bytes written a step and machine do to drives that are made for `tbw` TB together."""
    if not written:
        return "nothing is written to files"
    return (
        f"{written / GB:,.1f} GB written to files a step: the {tbw:,.0f} TB that the drives are made for after "
        f"{tbw * TB / written:,.0f} steps"
    )
