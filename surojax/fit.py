"""Finds the fastest settings of a run on given GPUs, without the GPUs, and writes them as a config file.

    surojax fit --config configs/llama7b.py --gpu rtx4090 --config.gpus=4 [--host-memory GIB] [--nvme GB] \
        [--disk READ/WRITE] [--allow adamw8bit,bf16_master,fp8] [--effective-batch N] [--keep FIELD,FIELD] \
        [--out FILE] [--top N] [--json FILE] [--tokens N [--price PER_GPU_HOUR]] [--host-bandwidth GB]

It searches tensor, context and pipeline parallelism, placement, mesh, recomputation and microbatches by estimate, and
compiles and simulates the best few. Model, data and the sequences of a step stay as they are. Settings that change
numbers are left out unless allowed.
`surojax.planner.fastest.fastest(config, gpu)` is the function behind this command.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import jax

from surojax.config.changes import differing, flags, wrapped
from surojax.config.fields import Config, default_config, flat
from surojax.config.flags import parse_flags
from surojax.config.write import check_new, config_file
from surojax.errors import ConfigError, ending, ends_with_code, nearest_name, short_exit_codes
from surojax.plan import add_cost, add_disk, check_cost, check_output
from surojax.planner import aot, footprint
from surojax.planner.amounts import GiB, gib
from surojax.planner.choices import AXES, FOLDER, NUMBERS, with_batch
from surojax.planner.disks import wear
from surojax.planner.drives import disks
from surojax.planner.fastest import MOST_COMPILED, FitResult, Trial, fastest
from surojax.planner.gpus import GPUS, gpu_key
from surojax.planner.plan_text import cost, range_lines
from surojax.planner.prediction import milliseconds
from surojax.planner.remedies import NOTHING
from surojax.planner.run_plan import checked
from surojax.run.console import CONSOLE
from surojax.untrusted import expanded

SHOWN = 5  # rows by default


def result_table(result: FitResult, top: int = SHOWN, given: Config | None = None) -> str:
    """Formats a search's result as a table.

    given: the config that the rows' flags change; None: the searched config.
    """
    name = GPUS[result.gpu].label
    if not result.rows:
        return "\n".join(nothing_fits(result))
    head = f"  {'':>2} {'tokens/s':>9} {'in all':>9} {'ms':>8} {'estimated':>10} {'device':>8} {'estimated':>10}"
    head += f" {'host':>7} {'NVMe':>7}  waits for"
    lines = [f"the fastest settings on {result.gpus} x {name}; tokens/s per GPU, GiB of each GPU's memory and in all:"]
    if result.rows[0].plan is None:
        lines.append(f"ESTIMATE from shapes: no compiler for GPUs is installed here; to compile the best: {aot.EXTRA}")
    shown = result.rows[:top]
    lines += ["", head, *(_cells(row, result.gpus, str(number)) for number, row in enumerate(shown, 1))]
    if result.refused:
        lines += ["", f"the settings as given cannot run: {result.refused}"]
    elif result.as_given is None:
        lines += ["", "the settings as given do not fit"]
    elif not result.as_given.fits:
        lines += ["", "the settings as given fit by estimate only, not as compiled"]
    elif all(row.change for row in shown):
        lines += [f"{_cells(result.as_given, result.gpus, '')}, as given"]
    if result.refuted:
        lines.append(f"{len(result.refuted)} more fit by estimate only, not as compiled")
    for number, row in enumerate(shown, 1):
        change = row.change if given is None else differing(given, flat(row.config))
        lines += ["", f"{number}:" if change else f"{number}: as given", *wrapped(flags(change), "    ")]
    lines += ["", *layouts_tried(result), *larger_steps(result)]
    if result.rows[0].plan and result.rows[0].plan.experts:
        lines += ["", f"of the first row: {result.rows[0].plan.experts}"]
    if result.left_out:
        now = result.rows[0].estimate.seconds
        gains = ", ".join(f"{word} ({1 - s / now:.0%} faster by estimate)" for word, s in result.left_out.items())
        lines += ["", f"left out since they change numbers: {gains};", f"  --allow {','.join(result.left_out)}"]
        lines.append("  (with the best settings as they are; the memory that they free may allow faster ones)")
    best = result.rows[0]
    if best.estimate.need.files:
        lines += ["", f"nothing fits without files; disks: {result.disks}"]
        lines += [wear(best.plan.gpus_per_node * best.plan.nvme_write_bytes, best.plan.drive_tbw)] if best.plan else []
    return "\n".join(lines)


def larger_steps(result: FitResult) -> list[str]:
    """Makes lines about larger steps that would be faster, and by how much; none if they are not."""
    if not result.larger:
        return []
    best = result.rows[0]
    now = best.tokens / best.estimate.seconds
    gains = ", ".join(f"{n:,} sequences {rate:,.0f} ({rate / now:.1f} x)" for n, rate in result.larger.items())
    return [
        f"a larger step would pay, since the update takes as long for any number of tokens: estimated tokens/s per GPU "
        f"{now:,.0f} now,",
        f"  with steps of {gains}; --effective-batch {next(iter(result.larger))}",
    ]


def layouts_tried(result: FitResult) -> list[str]:
    """Makes lines that compare the best estimate of each other layout, and say why an axis was not tried."""
    sampled = result.found.sampled
    lines = []
    if sampled:
        best = sampled[0][1]
        named = [f"{axes(of)} {seconds / best:.2f}" for of, seconds in sampled[:SHOWN]]
        lines.append(f"estimated time by layout, of the fastest of a few settings of each: {', '.join(named)}")
    return lines + [f"{axis} was not tried: {reason}" for axis, reason in result.found.not_tried.items()]


def axes(layout: dict) -> str:
    """Formats the axes of a layout: "tp_size=2 pp_size=4", or "none"."""
    return " ".join(f"{axis}={layout[axis]}" for axis in AXES if layout[axis] > 1) or "none"


def _cells(row: Trial, gpus: int, number: str) -> str:
    """Makes the cells of a row of the table."""
    rate = row.tokens / row.seconds
    predicted, estimated = map(milliseconds, (row.seconds, row.estimate.seconds))
    cells = f"  {number:>2} {rate:>9,.0f} {gpus * rate:>9,.0f} {predicted:>8} {estimated:>10}"
    cells += f" {row.need.device / GiB:>8.1f} {row.estimate.need.device / GiB:>10.1f} {row.need.host / GiB:>7.1f}"
    return cells + f" {row.estimate.need.files / GiB:>7.1f}  {waits_for(row)}"


def waits_for(row: Trial) -> str:
    """Names the transfers that compute waits for most, with their share of a step; "compute" below 5 %."""
    if row.plan is None or row.plan.predicted_step_s is None or not row.plan.exposed_s:
        return "-"
    kind, seconds = max(row.plan.exposed_s.items(), key=lambda item: item[1])
    part = seconds / row.plan.predicted_step_s
    return f"{kind} {part:.0%}" if part >= 0.05 else "compute"


def nothing_fits(result: FitResult) -> list[str]:
    """Makes lines that say how much memory is missing if nothing fits, and which changes would fit."""
    limit = gib(result.limits.device)
    lines = [f"nothing fits {result.gpus} x {GPUS[result.gpu].label} with {limit} of each for the program"]
    nearest = result.nearest
    if result.as_given is not None and result.as_given.estimate.need.files and result.as_given.fits:
        lines.append("without files, that is; the settings as given use files and fit: pass --nvme")
    if result.refuted:
        least = min(row.plan.device_bytes for row in result.refuted if row.plan)
        lines.append(f"{len(result.refuted)} settings fit by estimate; as compiled they need {gib(least)} or more")
    elif nearest is not None:
        over = nearest.need.beyond(result.limits)
        lines.append(f"the nearest needs {nearest.need.text()}; too much by {over.text()}")
    else:
        lines.append("nothing that was tried can be placed with the fields that are kept")
    if result.limits.host < float("inf"):
        part = f"{footprint.HOST_POOL:.0%} of a machine's"
        lines.append(f"host memory: up to {gib(result.limits.host)}, {part}, the rest for the system and for data")
    lines.append("what would change it:")
    lines += [f"  {line}" for proposal in result.proposals for line in proposal.lines()]
    return lines if result.proposals else [*lines, f"  {NOTHING}"]


def row_docstring(row: Trial, result: FitResult, base: str, file: Path) -> str:
    """Makes the docstring of a row's config file."""
    name = GPUS[result.gpu].label
    what = "predicted" if row.plan and row.plan.predicted_step_s else "estimated"
    device = row.need.device
    host = row.need.host
    needs = f"Needs {gib(device)} on each GPU" + (f" and {gib(host)} of host memory" if host else "")
    lines = [
        f"{base} on {result.gpus} x {name}, as surojax.fit found it on {time.strftime('%Y-%m-%d')}.",
        "",
        f"    surojax train --config {file}",
        "",
        f"{needs}; {what} {milliseconds(row.seconds)} ms a step, {row.tokens / row.seconds:,.0f} tokens/s per GPU.",
    ]
    if device > footprint.DEFAULT_POOL * GPUS[result.gpu].memory_bytes:
        lines.append(f"Set {footprint.POOL_SETTING} in the environment: JAX takes {footprint.DEFAULT_POOL} by itself.")
    return "\n".join([*lines, ""])


def words(option: str, text: str, known) -> tuple[str, ...]:
    """Splits a comma list into words. Raises ConfigError for one that is not known."""
    unique = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if unknown := [word for word in unique if word not in known]:
        shown = ", ".join(known) if len(known) < 10 else "fields of the config, see --help"
        change = nearest_name(unknown[0], known, "separate several by commas")
        raise ConfigError(f"{option}: expected {shown}, got {unknown[0]!r}; {change}")
    return unique


def as_json(result: FitResult) -> dict:
    """Converts the result for `--json`: {"rows", "given", "left_out", "remedies"}, each row with its plan."""

    def of(row: Trial) -> dict:
        return {
            "change": row.change,
            "seconds": row.seconds,
            "estimated_s": row.estimate.seconds,
            "estimated_bytes": row.estimate.need._asdict(),
            "plan": dataclasses.asdict(row.plan) if row.plan else None,
        }

    return {
        "gpu": result.gpu,
        "gpus": result.gpus,
        "rows": [of(row) for row in result.rows],
        "given": of(result.as_given) if result.as_given else None,
        "left_out": result.left_out,
        "remedies": [(proposal.text(), flags(proposal.change)) for proposal in result.proposals],
    }


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's own options."""
    description = f"{(__doc__ or '').partition(chr(10))[0]} Model, data and the sequences of a step stay as they are."
    description += f"\n\n{short_exit_codes('nothing that fits')}"
    arguments = argparse.ArgumentParser(prog="surojax fit", description=description)
    machine = arguments.add_argument_group("the machine")
    machine.add_argument("--gpu", metavar="NAME", help=f"the GPU to search for: {', '.join(GPUS)}")
    machine.add_argument(
        "--host-memory",
        metavar="GIB",
        type=float,
        help="host memory of a machine, in GiB (2^30); unlimited if left out",
    )
    machine.add_argument("--gpus-per-node", metavar="N", type=int, help="GPUs in a machine (8 of most)")
    add_cost(arguments)
    machine.add_argument(
        "--nvme",
        metavar="GB",
        type=float,
        help="room for files on the drives of all machines together, in GB (10^9); none are used if left out",
    )
    add_disk(machine)
    free = arguments.add_argument_group("what may change")
    free.add_argument(
        "--allow",
        metavar="WORDS",
        default="",
        help=f"settings that change numbers: a comma list of {', '.join(NUMBERS)}",
    )
    free.add_argument("--keep", metavar="FIELDS", default="", help="comma list of fields that stay as in the config")
    free.add_argument(
        "--effective-batch", metavar="N", type=int, help="sequences of a step on all GPUs; the config's if left out"
    )
    output = arguments.add_argument_group("what is printed and written")
    output.add_argument("--out", metavar="FILE", help="the new config file to write; CONFIG_GPUSxGPU.py if left out")
    output.add_argument(
        "--top",
        metavar="N",
        type=int,
        default=SHOWN,
        help=f"settings to print, {SHOWN} if left out; above {MOST_COMPILED} more are compiled",
    )
    output.add_argument("--json", metavar="FILE", help="write what was found there, as JSON")
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, searches, prints and writes. An error ends it with one line, "nothing fits" with 1."""
    jax.config.update("jax_platforms", "cpu")  # the search needs no GPU, and should not occupy one
    try:
        c, args = parse_flags(argv, parser())
        args.gpu = gpu_key(args.gpu)
        check_cost(args)
        disks(args.disk, c.rates_file)
        for option, value in (("--host-memory", args.host_memory), ("--nvme", args.nvme), ("--top", args.top)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{option}: expected more than 0, got {value}; leave it out")
        out = expanded(args.out or f"{Path(args.config).stem}_{c.gpus}x{args.gpu}.py")
        check_new("--out", out)
        file = check_output("--json", args.json) if args.json is not None else None
        checked(c, args.gpu)  # before its sizes divide the batch
        result = fastest(
            with_batch(c, args.effective_batch),
            args.gpu,
            host_memory=args.host_memory,
            gpus_per_node=args.gpus_per_node,
            host_bandwidth=args.host_bandwidth,
            nvme=args.nvme,
            disk=args.disk,
            allow=words("--allow", args.allow, tuple(NUMBERS)),
            keep=words("--keep", args.keep, tuple(flat(default_config()))),
            most=max(args.top, MOST_COMPILED),
            say=CONSOLE.line,
            status=CONSOLE.status,
        )
        print(result_table(result, args.top, c))
        if file:
            file.write_text(json.dumps(as_json(result), indent=2) + "\n")
            print(f"written: {file}")
        if not result.rows:
            sys.exit(1)
        best = result.rows[0]
        if best.plan and best.plan.predicted_range_s:
            low, high = map(milliseconds, best.plan.predicted_range_s)
            print("\n".join([f"the first row takes {low} to {high} ms:", *range_lines(best.plan)]))
        if args.tokens is not None:
            ends = (best.plan and best.plan.predicted_range_s) or []
            seconds = [s / (result.gpus * best.tokens) for s in (best.seconds, *ends)]
            print(cost(args.tokens, args.price, result.gpus, seconds))
        out.write_text(
            config_file(best.config, row_docstring(best, result, Path(args.config).name, out)), encoding="utf-8"
        )
        print(f"written: {out}; surojax train --config {out}")
        if best.config.nvme_path == FOLDER:
            print(f"  set nvme_path in it to a folder on the NVMe disk: {FOLDER!r} stands for it")
    except (ConfigError, OSError) as error:
        raise ending("fit", error) from error
    finally:
        CONSOLE.status("")


if __name__ == "__main__":
    ends_with_code(main)
