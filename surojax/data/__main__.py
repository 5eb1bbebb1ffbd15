"""Prepares the data of a config without training, and shows rows as the model will see them.

    surojax data --config configs/tiny.py --debug 2

Tokenises what a run would tokenise, into the same cache, so that the run begins with its first step.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator

from surojax.assembly import from_config
from surojax.config import checks
from surojax.config.fields import Config, gpus_per_sequence
from surojax.config.flags import parse_flags
from surojax.data import run_data as data
from surojax.data.batches import training_batches
from surojax.data.rollouts import TokenRoutes
from surojax.data.samples import check_length
from surojax.data.show import sample_table
from surojax.data.tokenizer import Tokenizer, load_tokenizer
from surojax.errors import ConfigError, ending, ends_with_code, short_exit_codes
from surojax.exchange.sources import resolved
from surojax.objectives.objectives import OBJECTIVES


def print_line(text: str) -> None:
    """Prints a line at once, into a pipe or file too."""
    print(text, flush=True)


def prepare(c: Config) -> tuple[data.Data, Tokenizer]:
    """Prepares the data of a config; returns it with its tokenizer.

    Raises ConfigError for whatever a run would refuse of its settings and data, but for too few samples.
    """
    c = resolved(c)
    checks.check(c)
    tokenizer = load_tokenizer(c.tokenizer)
    checks.check_tokenizer(c, tokenizer.vocab_size, tokenizer.name)
    entries = data.parse_entries(c.datasets, c.validation_datasets)
    settings = data.Settings(**{name: c[name] for name in data.SETTINGS})
    choice = OBJECTIVES[c.objective]
    loaded = data.load_data(
        entries,
        settings,
        tokenizer,
        eval_batch_size=c.per_device_batch_size,
        rows=choice.rows,
        together=choice.together,
        routes=TokenRoutes.of(c, from_config.model(c).layers_with_experts if c.router_replay else ()),
        say=print_line,
    )
    samples = loaded.train.all
    check_length(samples, 1)
    batch = max(1, (c.gpus or 1) // gpus_per_sequence(c)) * c.per_device_batch_size
    if len(samples) < batch:
        print_line(f"{len(samples):,} samples are fewer than the {batch:,} of a batch, which `train` refuses")
    return loaded, tokenizer


def first_samples(loaded: data.Data, tokenizer: Tokenizer, *, rows: int, seed: int, color: bool) -> Iterator[str]:
    """Yields lines that show the first `rows` training samples of a run, in order, or an epoch if it has fewer."""
    rows = min(rows, len(loaded.train))
    with contextlib.closing(training_batches(loaded.train, batch_size=rows, accumulation=1, seed=seed)) as stream:
        batch = {name: array[0] for name, array in next(stream).items()}
    yield from sample_table(batch["inputs"], batch["labels"], batch.get("starts"), tokenizer, color=color)


def parser() -> argparse.ArgumentParser:
    """The command's own options."""
    description = f"{(__doc__ or '').partition(chr(10))[0]}\n\n{short_exit_codes()}"
    options = argparse.ArgumentParser(prog="surojax data", description=description)
    options.add_argument(
        "--debug", type=int, default=0, metavar="N", help="print the first N samples: token, text, label, document"
    )
    return options


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, prepare, and print. An error or Ctrl-C exits with one line, a closed pipe with none."""
    try:
        c, args = parse_flags(argv, parser())
        if args.debug < 0:
            raise ConfigError(f"--debug: expected a number of samples, got {args.debug}")
        loaded, tokenizer = prepare(c)
        print_line(loaded.describe())
        if args.debug:
            for line in first_samples(loaded, tokenizer, rows=args.debug, seed=c.seed, color=sys.stdout.isatty()):
                print(line)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("surojax.data: stopped; data that was not finished is tokenised anew", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again at its end
    except (ConfigError, OSError) as error:
        raise ending("data", error) from error


if __name__ == "__main__":
    ends_with_code(main)
