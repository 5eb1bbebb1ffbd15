"""Checks that memory and parallelism settings do not change the result of training.

    surojax verify --config configs/verify.py [--steps N] [--only NAME,...] [--list]

Each row of verification/settings.py is one setting. It trains the config's model for a few steps with the config's
dtypes, recipe and optimizer; all rows start from the weights that the first one draws, and use equal batches. The
losses and gradient norms of a row are compared with those of a reference row. They must be bit-exact if the setting
changes no arithmetic, and otherwise within a bound whose reason is stated. A machine without GPUs uses 8 virtual CPU
devices.

An 8-bit or 4-bit recipe is compared with itself, not with bf16. Rows that the recipe does not allow are skipped, with
the reason. Rows that change the order of sums have wider bounds, since two almost equal numbers may be rounded to
different neighbours.

A row does not take everything from the config. It uses:

* its own memory and mesh settings; the row "as_configured" has those of the config,
* random tokens, frequent and rare ones, with 5 % of the labels ignored; with sample_packing documents of 16 on average,
* at least 2 microbatches, so that accumulators are read,
* a learning rate that starts at its peak, so that every update is large enough to show.

Each row compiles its own program and then trains, which takes seconds for configs/verify.py, a small model whose sizes
every row can use; on CPUs, the next rows compile meanwhile. With another config, rows that its sizes do not allow are
named at the start, and skipped. For a large model, set fewer layers and keep the width, since the settings work layer
by layer.

tests/test_verify_mutants.py takes each collective out of a row's program, one at a time: the row must then fail.

`verification.rows.verify(config)` is the function behind this command; the tests call it.
"""

import argparse
import collections
import contextlib
import gc
import os
import sys

import jax

from surojax.config import Config, checks
from surojax.config.flags import parse_flags
from surojax.errors import ConfigError, ending, ends_with_code, short_exit_codes
from surojax.exchange.sources import resolved
from surojax.placement.mesh import find_devices
from surojax.verification.row_batches import make_batches
from surojax.verification.rows import VerifiedSetting, refused_sizes, verify
from surojax.verification.settings import SETTINGS, Setting, chosen_rows, rows_of_config

STEPS = 5
LIST = "--list"  # needs no config
ALL_ROWS = "configs/verify.py"  # a config with sizes that every row can use
WIDTH = max(len(s.name) for s in SETTINGS) + 2


def heading() -> str:
    """Returns the first line of the table."""
    return f"{'setting':<{WIDTH}}{'compared with':<{WIDTH}}{'loss':>9}{'grad norm':>11}  {'expected':<20}{'s':>6}"


def line(row: VerifiedSetting) -> str:
    """Returns one line of the table, and a second line with the reason if the row did not pass."""
    s = row.setting
    b = row.bound

    def cell(difference: float | None) -> str:
        return "-" if difference is None else f"{difference:.1e}" if difference else "0"

    limits = f"{b.loss:.0e} {b.grad_norm:.0e} ({s.expect})" if b.loss else "0"
    text = f"{s.name:<{WIDTH}}{s.like:<{WIDTH}}{cell(row.loss):>9}{cell(row.grad_norm):>11}  {limits:<20}"
    return f"{text}{row.seconds:>6.1f}  {row.status}" + (f"\n  {row.why}" if row.why else "")


def summary(rows: list[VerifiedSetting]) -> str:
    """Returns the reason of each bound, once, and the numbers of rows that passed, failed and were skipped."""
    reasons = dict.fromkeys(f"{row.setting.expect}: {row.bound.reason}" for row in rows if row.bound.loss)
    count = collections.Counter(row.status for row in rows)
    skipped = f", {count['skipped']} skipped, which shows nothing about them" if count["skipped"] else ""
    return "\n".join([*reasons, f"{count['pass']} passed, {count['FAIL']} failed{skipped}"])


def listed(s: Setting) -> str:
    """Returns a line about a row: what it is compared with and how, its devices, and the fields that it changes."""
    changes = [f"{name}={value}" for name, value in s.changes.items()]
    more = [f"{s.split} x the microbatches"] if s.split > 1 else []
    return f"{s.name:<{WIDTH}}{s.like:<{WIDTH}}{s.expect:<11}{s.devices}  {', '.join(changes + more)}".rstrip()


def parser() -> argparse.ArgumentParser:
    """Makes the parser of this command's own flags."""
    codes = short_exit_codes("a row that failed", "none that passed")
    description = f"{(__doc__ or '').partition(chr(10))[0]}\n\n{codes}"
    made = argparse.ArgumentParser(prog="surojax verify", description=description)
    made.add_argument("--steps", metavar="N", type=int, default=STEPS, help="optimizer steps of each row (%(default)s)")
    made.add_argument("--only", metavar="NAME,...", help="only these rows; names or patterns such as offload_*")
    made.add_argument(LIST, action="store_true", help="print the rows, and exit")
    return made


def refusals(refused: dict[str, str]) -> str:
    """Makes the note about rows that the model's sizes do not allow. refused: reasons by the rows' names."""
    name, why = next(iter(refused.items()))
    which = f"{name} is skipped" if len(refused) == 1 else f"{len(refused)} rows are skipped, such as {name}"
    return f"{which}, because of the model's sizes: {why}; --config {ALL_ROWS} has sizes that every row can use"


def print_rows(c: Config, steps: int, only: list[str] | None) -> bool:
    """Prints the table of rows; returns whether rows passed and none failed."""
    if refused := refused_sizes(c, steps=steps, only=only):
        print(refusals(refused), flush=True)
    print(heading(), flush=True)
    rows = verify(c, steps=steps, only=only, report=lambda row: print(line(row), flush=True))
    print(summary(rows))
    return any(row.status == "pass" for row in rows) and not any(row.status == "FAIL" for row in rows)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, verifies, and prints the table. Exits with 1 if a row fails; an error is a line."""
    try:
        words = sys.argv[1:] if argv is None else argv
        c, args = parse_flags(words, parser(), "verify" if LIST in words else "")
        only = None if args.only is None else [name.strip() for name in args.only.split(",")]
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            with contextlib.suppress(RuntimeError):  # JAX has started: its number of devices is fixed
                jax.config.update("jax_num_cpu_devices", 8)
        c = resolved(c)
        devices = find_devices(0)
        if args.list:
            rows = {s.name: s for s in rows_of_config(c, len(devices))}
            print("\n".join(map(listed, chosen_rows(rows, only))))
            sys.exit()
        checks.check(c)
        batches, microbatches = make_batches(c, len(devices), 1)
        kind = devices[0].device_kind
        size = f"{len(batches[0]['inputs'])} sequences of {c.sequence_len} random tokens in {microbatches} microbatches"
        numbers = f"{c.model_dtype}, recipe {c.recipe}"
        print(f"verify: {args.steps} steps of {size}, {numbers}, on up to {len(devices)} x {kind}")
        passed = print_rows(c, args.steps, only)
    except (ConfigError, OSError) as error:
        raise ending("verify", error) from error
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(not passed)


if __name__ == "__main__":
    gc.set_threshold(100_000, 10, 10)  # by default, collections take a fifth of the time of tracing
    ends_with_code(main)
