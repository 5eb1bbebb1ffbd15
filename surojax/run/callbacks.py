"""Callbacks of `train`: the events that they receive while a run goes on, and one that ends a run early."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from surojax.errors import ConfigError, shown
from surojax.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Event:
    """An event of a run that callbacks receive: a finished step, an evaluation, or a checkpoint.

    step, total_steps: steps done, and those of the whole run. metrics: the numbers of its record in metrics.jsonl, none
    of a checkpoint. name: of the validation dataset; "": held-out data. checkpoint: its folder, which is complete when
    the next checkpoint begins or the run has ended; None of the others.

    state: returns the training state, a pytree. Its `step` may be one more than a finished step's, whose metrics are
    read while the next one runs. The next step replaces its arrays: copy what is to be kept (`jax.device_get`).
    stop: called with a reason, ends the run after its next checkpoint, which is written at once.
    """

    kind: Literal["step", "eval", "checkpoint"]
    step: int
    total_steps: int
    metrics: Mapping[str, float]
    name: str
    checkpoint: Path | None
    state: Callable[[], TrainState]
    stop: Callable[[str], None]


class Callback(Protocol):
    """A function that `train` calls with an `Event`, or an object that can be called so.

    With several processes each calls its own, and all have to stop at the same step: metrics but timings are equal.
    """

    def __call__(self, event: Event, /) -> None: ...


def check_callbacks(callbacks: Any) -> None:
    """Raises ConfigError unless these are functions of one argument, in a list."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        got = getattr(callbacks, "__name__", type(callbacks).__name__)
        raise ConfigError(f"callbacks: expected a list of functions, got {got}; put it in a list")
    for callback in callbacks:
        name = getattr(callback, "__name__", shown(callback, 60))
        try:
            inspect.signature(callback).bind(None)
        except TypeError as error:
            expected = "functions of an Event"
            raise ConfigError(f"callbacks: expected {expected}, got {name} ({error}); correct it") from error
        except ValueError:  # a callable whose arguments Python does not know
            pass


class Callbacks:
    """Calls callbacks with a run's events. stopped_by: the reason of the first callback that asked to stop, or ""."""

    def __init__(self, callbacks: Sequence[Callback], total_steps: int):
        self.callbacks = tuple(callbacks)
        self.total_steps = total_steps
        self.stopped_by = ""

    def tell(self, record: Mapping[str, Any], state: Callable[[], TrainState], checkpoint: Path | None = None) -> None:
        """Calls all callbacks with an event. record: of metrics.jsonl, or only the "log" and "step" of a record."""
        if not self.callbacks:
            return
        numbers = {k: float(v) for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        kind_and_steps = (record["log"], record["step"], self.total_steps)
        event = Event(*kind_and_steps, numbers, record.get("name", ""), checkpoint, state, self._stop)
        for callback in self.callbacks:
            callback(event)

    def _stop(self, reason: str) -> None:
        self.stopped_by = self.stopped_by or reason


class EarlyStopping:
    """Stops a run whose evaluations no longer improve.

    patience: evaluations in a row without a loss below the best by min_change nats; math.inf: any number. name: of the
    validation dataset; "": held-out data.
    """

    def __init__(self, patience: float, *, min_change: float = 0.0, name: str = ""):
        self.patience = patience
        self.min_change = min_change
        self.name = name
        self.best = math.inf
        self.waited = 0

    def __call__(self, event: Event) -> None:
        if event.kind == "eval" and event.name == self.name:
            self.see(event.metrics["loss"])
            if self.is_over:
                event.stop(self.reason)

    def see(self, loss: float) -> None:
        """Counts the loss of an evaluation."""
        improved = loss < self.best - self.min_change
        self.waited = 0 if improved else self.waited + 1
        self.best = loss if improved else self.best

    @property
    def is_over(self) -> bool:
        """True if the run should end."""
        return self.waited >= self.patience

    @property
    def reason(self) -> str:
        """The reason why the run should end, for the log."""
        return f"early stopping (no evaluation below {self.best:.4f} in the last {self.waited})"
