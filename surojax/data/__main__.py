"""Prepares the data of a config without training, and shows rows as the model will see them.

    python -m surojax.data --config configs/tiny.py --debug 2

Tokenises what a run would tokenise, into the same cache, so that the run begins with its first step.
"""

import argparse
import contextlib
import sys

from surojax.config import checks
from surojax.config.fields import Config
from surojax.config.flags import parse
from surojax.data import load as data
from surojax.data.batches import batches
from surojax.data.show import table
from surojax.data.tokenizer import load_tokenizer
from surojax.errors import ConfigError
from surojax.exchange.sources import resolved


def prepare(c: Config, *, rows: int = 0, color: bool = False) -> None:
    """Prepares the data of a config and prints what there is, then its first training samples in the run's order.

    Raises ConfigError for whatever a run would refuse of its settings and data.
    """
    c = resolved(c)
    checks.check(c)
    tokenizer = load_tokenizer(c.tokenizer)
    checks.check_vocabulary(c, tokenizer.vocab_size, tokenizer.name)
    entries = data.parse_entries(c.datasets, c.validation_datasets)
    settings = data.Settings(**{name: c[name] for name in data.SETTINGS})
    found = data.load(entries, settings, tokenizer, eval_batch_size=c.per_device_batch_size)
    print(found.describe())
    if not rows:
        return
    with contextlib.closing(batches(found.train, batch_size=rows, accumulation=1, seed=c.seed)) as stream:
        batch = {name: array[0] for name, array in next(stream).items()}
    for line in table(batch["inputs"], batch["labels"], batch.get("starts"), tokenizer, color=color):
        print(line)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and prepare. An error exits with one line."""
    parser = argparse.ArgumentParser(prog="python -m surojax.data", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--debug", type=int, default=0, metavar="N", help="print the first N samples: token, text, label, document"
    )
    try:
        c, args = parse(argv, parser)
        if args.debug < 0:
            raise ConfigError(f"--debug: expected a number of samples, got {args.debug}")
        prepare(c, rows=args.debug, color=sys.stdout.isatty())
    except (ConfigError, OSError) as error:
        sys.exit(f"surojax.data: error: {error}")


if __name__ == "__main__":
    main()
