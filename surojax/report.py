"""Shows what runs wrote into their metrics, side by side and beside a plan: loss, norm, tokens/s, memory.

surojax report runs/tiny
surojax report runs/first runs/second --plan plan.json --html report.html --png report.png
"""

import argparse
import shlex
import sys

from surojax.errors import ConfigError, ending, ends_with_code, refusing, short_exit_codes
from surojax.pages import runs
from surojax.pages.run_figure import write_figure
from surojax.plan import check_output


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's options."""
    arguments = argparse.ArgumentParser(prog="surojax report", description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("runs", metavar="RUN", nargs="+", help="the folder of a run, or its metrics.jsonl")
    arguments.add_argument("--plan", metavar="FILE", help="a plan to compare with, which surojax plan --json wrote")
    arguments.add_argument("--html", metavar="FILE", help="write curves there, as a page to open in a browser")
    arguments.add_argument("--png", metavar="FILE", help="draw curves there, as a picture (needs matplotlib)")
    arguments.epilog = short_exit_codes()

    return refusing(arguments)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, reads and prints. An error ends it with one line (`errors.ending`)."""
    try:
        args = parser().parse_args(argv)
        file = check_output("--html", args.html) if args.html is not None else None
        picture = check_output("--png", args.png) if args.png is not None else None
        run_records = runs.read_runs(args.runs)
        plan = runs.read_plan(args.plan) if args.plan is not None else None
        print(runs.table_text(run_records, plan))
        if file:
            command = shlex.join(["surojax", "report", *(sys.argv[1:] if argv is None else argv)])
            file.write_text(runs.page(run_records, plan, command), encoding="utf-8")
            print(f"written: {file}")
        if picture:
            write_figure(picture, run_records, plan)
            print(f"written: {picture}")
    except (ConfigError, OSError) as error:
        raise ending("report", error) from error


if __name__ == "__main__":
    ends_with_code(main)
