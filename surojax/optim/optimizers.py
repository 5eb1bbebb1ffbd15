"""The optimizers by the name that a config calls them.

| optimizer | matrices of the blocks | embedding, head | vectors | state of a matrix, bytes per parameter          |
|-----------|------------------------|-----------------|---------|-------------------------------------------------|
| adamw     | AdamW                  | AdamW           | AdamW   | 8, or 4 with opt_m_dtype=opt_v_dtype=bfloat16   |
| adamw8bit | AdamW in 8 bits        | AdamW in 8 bits | AdamW   | 2 + 8 / block, block up to 256 (pallas_kernels) |
| normuon   | NorMuon                | AdamW           | AdamW   | 4, or 2, and 4 a row                            |
| lion      | Lion                   | Lion            | Lion    | 4, or 2 with opt_m_dtype=bfloat16               |
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from surojax.declared import DeclaredField, declared
from surojax.optim.adamw import ADAMW
from surojax.optim.adamw8bit import ADAMW8BIT
from surojax.optim.learning_rate import Schedule
from surojax.optim.lion import LION
from surojax.optim.normuon import NORMUON
from surojax.optim.optimizer import MomentSettings, Optimizer, OptimizerChoice
from surojax.refusals.features import overlap
from surojax.refusals.refusal import Refusal, is_one_of, is_set

OPTIMIZERS: dict[str, OptimizerChoice] = {"adamw": ADAMW, "adamw8bit": ADAMW8BIT, "normuon": NORMUON, "lion": LION}
# The fields that some of them read: the dtypes of moments, and the options of each.
SETTINGS: tuple[DeclaredField, ...] = (
    *declared(MomentSettings),
    *(field for choice in OPTIMIZERS.values() if choice.options for field in declared(choice.options)),
)


def build_optimizer(name: str, settings: Mapping[str, Any], schedule: Callable[[float], Schedule]) -> Optimizer:
    """The optimizer of a config. settings: its fields, and "implementation"; schedule: of a peak learning rate."""
    choice = OPTIMIZERS[name]
    peak = settings["learning_rate"]
    arguments = {argument: settings[field] for argument, field in choice.arguments.items()}
    peaks = {argument: schedule(settings[field] or peak) for argument, field in choice.peaks.items()}
    return _made(choice.make, schedule(peak), **arguments, **peaks)


@functools.cache
def _made(make: Callable, schedule: Schedule, **arguments) -> Optimizer:
    """make(schedule, **arguments), the same object for equal arguments, so that its traced functions can be cached."""
    return make(schedule, **arguments)


def _unused() -> Iterator[Refusal]:
    """Rows for options with the optimizers that do not read them."""
    for field in SETTINGS:
        readers = [name for name, choice in OPTIMIZERS.items() if field.name in choice.reads]
        others = [name for name in OPTIMIZERS if name not in readers]
        if others:
            feature = is_set(field.name, field.other_value, {"optimizer": readers[0]})
            change = f"leave it out, or set optimizer={' or '.join(map(repr, readers))}"
            yield Refusal(feature, is_one_of("optimizer", *others), "which does not use it", change)


WHOLE = tuple(name for name, choice in OPTIMIZERS.items() if choice.whole_matrices)
REFUSALS: tuple[Refusal, ...] = (
    *_unused(),
    Refusal(
        is_one_of("optimizer", *WHOLE, instead="one that updates shards of matrices"),
        overlap,
        "with which every GPU would compute the update of every whole matrix",
    ),
)
