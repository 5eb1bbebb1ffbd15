"""Checks what this machine does that no other can show: its GPU, link, memory and disk, each with a verdict.

    surojax doctor
    surojax doctor --nvme-path /mnt/nvme --only disk,offloads

It takes minutes. Each check runs in a process of its own and trains or measures something small; what fails names the
settings to leave off. The report, a file in Markdown, is made to be attached to an issue: it has versions, names of
devices and of the measured folder, and the last words of what failed. Rates that were measured on a GPU go into the
file that `surojax plan` reads.

Without a GPU, 8 virtual CPU devices stand for GPUs, and what only a GPU has is skipped.
"""

import argparse
import collections
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import surojax
from surojax.config.fields import DEFAULTS
from surojax.diagnosis.doctor_checks import CHECKS, ITS_PROCESS, in_process
from surojax.diagnosis.verdict import FAILED, OK, SKIPPED, Asked, Verdict, skipped
from surojax.errors import ConfigError, ending, ends_with_code, nearest_name, need, refusing, short_exit_codes
from surojax.plan import check_output
from surojax.run.console import CONSOLE, progress
from surojax.training.safe import DOCTORS_REPORT
from surojax.untrusted import expanded

WORDS = {OK: "ok", FAILED: "FAILED", SKIPPED: "skipped"}
PART = 28  # columns
NEEDED = ("devices", ITS_PROCESS)  # parts of installation without which no other check can run


def examine(names: Sequence[str], asked: Asked) -> Iterator[Verdict]:
    """Runs the checks with these names and yields their verdicts; without a device, skips all but the first."""
    without_devices = False
    started, limits = time.perf_counter(), [CHECKS[name].seconds for name in names]
    for number, name in enumerate(names):
        if without_devices:
            yield skipped(name, "all", "JAX finds no devices, see installation")
            continue
        done = sum(limits[:number]) / sum(limits)  # checks take about as long as their limits say of each other
        CONSOLE.status(f"{name} ... {progress(number + 1, len(names), done, time.perf_counter() - started)}")
        for verdict in in_process(name, asked):
            without_devices |= name == "installation" and verdict.status == FAILED and verdict.part in NEEDED
            yield verdict
        CONSOLE.status("")


def line(verdict: Verdict) -> str:
    """Formats a verdict as a line of the table, and a second line with the options to leave off."""
    text = f"{verdict.check:<14}{verdict.part:<{PART}}{WORDS[verdict.status]:<9}{verdict.said}"
    return f"{text}\n{'':<14}go without: {verdict.without}" if verdict.without else text


def summary(verdicts: Sequence[Verdict]) -> str:
    """Summarises the verdicts: how many of each kind, what was not checked, and which options to leave off."""
    count = collections.Counter(verdict.status for verdict in verdicts)
    lines = [f"{count[OK]} ok, {count[FAILED]} failed, {count[SKIPPED]} skipped"]
    if not_checked := dict.fromkeys(f"{v.check} ({v.said})" for v in verdicts if v.status == SKIPPED):
        lines.append(f"not checked: {'; '.join(not_checked)}")
    if flags := dict.fromkeys(" ".join(v.without for v in verdicts).split()):
        lines.append(f"until that is mended, leave off: {' '.join(flags)}")
    return "\n".join(lines)


def report_markdown(verdicts: Sequence[Verdict], seconds: float) -> str:
    """Formats the report as Markdown."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    rows = [f"| {v.check} | {cell(v.part)} | {WORDS[v.status]} | {cell(v.said)} | {v.without} |" for v in verdicts]
    head = ["# surojax doctor", "", f"surojax {surojax.__version__}, {seconds:.0f} s.", "", summary(verdicts), ""]
    return "\n".join([*head, "| check | of what | verdict | | go without |", "|---|---|---|---|---|", *rows, ""])


def as_json(verdicts: Sequence[Verdict], seconds: float) -> str:
    """Formats the report as JSON: {"version", "seconds", "verdicts": [`Verdict`'s fields]}."""
    values = {"version": surojax.__version__, "seconds": round(seconds, 1)}
    return json.dumps(values | {"verdicts": [verdict._asdict() for verdict in verdicts]}, indent=1) + "\n"


def write_report(file: Path, text: str) -> None:
    """Writes a file, and creates its folder if missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def chosen_checks(only: str | None) -> list[str]:
    """Returns the names of checks in --only, in the order of `CHECKS`; None: all. Raises ConfigError."""
    asked = list(CHECKS) if only is None else [name.strip() for name in only.split(",")]
    if unknown := [name for name in asked if name not in CHECKS]:
        change = nearest_name(unknown[0], CHECKS)
        raise ConfigError(f"--only: expected names of {', '.join(CHECKS)}, got {unknown[0]!r}; {change}")
    return [name for name in CHECKS if name in asked]


def printed(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Prints each verdict when it arrives, and returns all verdicts."""
    all_verdicts = []
    for verdict in verdicts:
        all_verdicts.append(verdict)
        CONSOLE.line(line(verdict))
    return all_verdicts


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's options."""
    options = argparse.ArgumentParser(prog="surojax doctor", description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--only", metavar="CHECK,...", help=f"of {', '.join(CHECKS)}")
    options.add_argument(
        "--nvme-path", metavar="DIR", default="", help="folder whose disk is to hold state in files: it has to be fast"
    )
    options.add_argument(
        "--sustained",
        metavar="SECONDS",
        type=float,
        default=0.0,
        help="write half of that disk's free space, over and over for so long, 60 or more: what a drive does once its "
        "cache is full. plan and fit read its rates with --disk DIR. This wears it: a fast one by some 5 GB a second",
    )
    options.add_argument("--output", metavar="FILE", default="doctor.md", help="the report (doctor.md)")
    options.add_argument("--json", metavar="FILE", help="write the report there as JSON as well")
    options.add_argument(
        "--rates-file",
        metavar="FILE",
        default=DEFAULTS["rates_file"],
        help=f'where measured rates are written for plan and fit ({DEFAULTS["rates_file"]}); "" writes none',
    )
    options.epilog = short_exit_codes("a check that failed")

    return refusing(options)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, checks, prints and writes.

    Exits with 1 if a check failed; an error ends it with a line.
    """
    try:
        args = parser().parse_args(argv)
        names = chosen_checks(args.only)
        folder = str(expanded(args.nvme_path)) if args.nvme_path else ""
        change = "create it, or choose another"
        need(not folder or Path(folder).is_dir(), "--nvme-path", "a folder", args.nvme_path, change)
        need(0 <= args.sustained < 3600, "--sustained", "seconds below 3600", args.sustained, "60 is usual")
        need(
            not args.sustained or bool(folder), "--sustained", "--nvme-path as well", args.sustained, "name the folder"
        )
        output = check_output("--output", args.output)
        as_data = check_output("--json", args.json) if args.json is not None else None
        started = time.perf_counter()
        print(f"{'check':<14}{'of what':<{PART}}verdict", flush=True)
        verdicts = printed(examine(names, Asked(folder, args.rates_file, args.sustained)))
        seconds = time.perf_counter() - started
        print(summary(verdicts))
        write_report(output, report_markdown(verdicts, seconds))
        if as_data:
            write_report(as_data, as_json(verdicts, seconds))
        with contextlib.suppress(OSError, RuntimeError):  # without a home folder; `train` goes on to mention doctor
            write_report(DOCTORS_REPORT.expanduser(), as_json(verdicts, seconds))
        print(f"written: {output}; attach it to an issue")
    except (ConfigError, OSError) as error:
        raise ending("doctor", error) from error
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(any(verdict.status == FAILED for verdict in verdicts))


if __name__ == "__main__":
    ends_with_code(main)
