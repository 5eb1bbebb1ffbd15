"""One table of a GPU step's optional features, and the flags that turn each off if it fails.

`surojax doctor` checks each, an error of a step on a GPU names those that are likely at fault, and `train --safe`
leaves off all that need no other memory. On a GPU flash attention, XLA's options
and five offloads have run (benchmarks/results/h200.md).
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from surojax.cluster.watch import OF_A_PEER
from surojax.config.changes import changed, differing, flags
from surojax.config.fields import Config
from surojax.declared import declared
from surojax.errors import CheckpointError, ConfigError, StepError
from surojax.numerics.recipes import BLOCK_SCALED
from surojax.placement.table import Storage
from surojax.refusals.features import BY_LAYER

DOCTORS_REPORT = Path("~/.cache/surojax/doctor.json")  # of the newest `surojax doctor` of this user
OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory", re.IGNORECASE)


class Option(NamedTuple):
    """An optional feature of a step, and how to turn it off.

    name: as the checks of doctor call it. does: what it is, in words. without: {field of the config: value}. pattern:
    what an error of it has in its message. in_safe: whether `train --safe` leaves it off. used: whether a config uses
    it, besides having other values than `without`.
    """

    name: str
    does: str
    without: dict[str, Any]
    pattern: str
    in_safe: bool = True
    used: Callable[[Config], bool] = lambda c: True

    @property
    def flags(self) -> str:
        """The fields of `without` as flags."""
        return flags(self.without)

    def in_use(self, c: Config) -> bool:
        """True if a step of this config on a GPU uses the option."""
        return bool(differing(c, self.without)) and self.used(c)


def _offload(name: str, does: str, used: Callable[[Config], bool] = lambda c: True) -> Option:
    pattern = r"host.?memory|host.?offload|pinned|memory.?space|MoveTo"
    return Option(name, does, {name: False}, pattern, in_safe=False, used=used)


def _updates_late(c: Config) -> bool:
    """Returns True if updates run under the next forward pass: by overlap_update, or since state is in files."""
    return bool(c.overlap_update) or any(c[name] == "nvme" for name in BY_LAYER)


# In the order of suspicion, if a message names none of them.
OPTIONS: tuple[Option, ...] = (
    Option("attention", "flash attention", {"attention": "xla"}, r"cudnn|flash|fmha|attention"),
    Option("kernels", "our Pallas kernels", {"kernels": "xla"}, r"mosaic|pallas"),
    Option(
        "block_scaled_products",
        "products of block-scaled numbers",
        {"block_scaled_products": "emulated"},
        r"block.?scaled|scaled.?dot",
        used=lambda c: c.recipe in BLOCK_SCALED,
    ),
    Option(
        "copy_engines",
        "collectives by copy engines",
        {"memcpy_all_gather": False, "memcpy_send_recv": False},
        r"symmetric|put.?signal|memcpy.?local|p2p",
    ),
    Option(
        "xla_options",
        "XLA's options that overlap copies with products",
        {"xla_options": "default"},
        r"xla_gpu_|compile.?option|latency.?hiding|pgle|profile|scheduler",
    ),
    Option("cuda_graphs", "another choice of CUDA graphs", {"cuda_graphs": "auto"}, r"command.?buffer|cuda.?graph"),
    *(
        _offload(field.name, f"{field.row.what} in host memory{' or files' * bool(field.words)}")
        for field in declared(Storage)
        if field.row
    ),
    _offload("overlap_update", "updates under the next forward pass", _updates_late),
)
BY_NAME = {option.name: option for option in OPTIONS}


def leave_off(names: Sequence[str]) -> str:
    """Returns the flags that turn off the options with these names; "" for none."""
    return " ".join(dict.fromkeys(" ".join(BY_NAME[name].flags for name in names).split()))


def safe(c: Config) -> tuple[Config, str]:
    """Returns (the config as `train --safe` changes it, the changes as flags)."""
    options = [option for option in OPTIONS if option.in_safe and option.in_use(c)]
    changes = {field: value for option in options for field, value in differing(c, option.without).items()}
    return changed(c, changes), flags(changes)


def advice(c: Config, message: str) -> str:
    """Advises on an error of a step on a GPU: names the option likely at fault, and the flags that turn it off.

    message: of the error. An option that the message names is more likely at fault than one that is only in use.
    """
    if OUT_OF_MEMORY.search(message):
        return (
            "out of memory: XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment gives JAX more of a GPU, "
            "`surojax fit` finds settings that fit"
        )
    in_use = [option for option in OPTIONS if option.in_use(c)]
    named = [option for option in in_use if re.search(option.pattern, message, re.IGNORECASE)]
    if not in_use:
        return "none of the options that can be left off is in use: please report it with what `surojax doctor` writes"
    likely, *others = named or [option for option in in_use if option.in_safe] or in_use
    why = "which the message names" if named else "which may be at fault"
    line = f"most likely {likely.does}, {why}: go on without it by {likely.flags}"
    if others:
        line += f"; then without {', '.join(option.flags for option in others)}"
    return f"{line}; --safe leaves off all such options but offloads, `surojax doctor` checks each"


@contextlib.contextmanager
def advised(c: Config, platform: str, *, compiles: bool = False) -> Iterator[None]:
    """Adds `advice` to errors within a `with` statement; raises XLA's errors on a GPU as StepError.

    compiles: other errors are the compiler's too, and get the advice as a note. Errors that another process caused are
    left as they are.
    """
    try:
        yield
    except (ConfigError, CheckpointError, StepError, OSError):
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if platform != "gpu" or (jax.process_count() > 1 and OF_A_PEER.search(message)):
            raise
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise StepError(f"{message}; {advice(c, message)}") from error
        if compiles:
            error.add_note(advice(c, message))
        raise


def mention_of_doctor(platform: str) -> str:
    """Returns a line that recommends `surojax doctor`, on a GPU on which it has not been run; else ""."""
    try:
        known = DOCTORS_REPORT.expanduser().exists()
    except RuntimeError:  # no home folder
        known = True
    if platform != "gpu" or known:
        return ""
    return "note: `surojax doctor` checks in minutes what this GPU does: kernels, offloads, link, predicted time"
