"""Warns if a run goes wrong: the loss spikes or stands still, or all gradients are zero.

The rules, with the reasons for their numbers, are below; all of them look at the losses of this start of a run only.
Spread is the median absolute deviation x 1.4826, the standard deviation of normal noise, which odd batches hardly move.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

from surojax.run.callbacks import Event
from surojax.run.console import say

# A spike: the loss exceeds the median of the last RECENT losses by SPREADS of their spread and by LEAST_RISE.
RECENT = 100  # short enough for the median to follow a falling loss; it lags behind, on the safe side
ENOUGH = 20  # losses that a spread can be read from; while the loss falls fast, its fall is part of the spread
SPREADS = 6.0  # normal noise exceeds it in 1 of 10^9 steps, batches of other data more often, which is why:
LASTS = 5  # so many steps in a row. What harms a model lasts for tens of them; of 5 % odd batches, 5 follow in 10^-6
LEAST_RISE = 0.1  # nats: of losses that hardly vary, as those of a first step or a text learned by heart

# Standing still: between the first and the last quarter of a window the median falls by less than LEAST_FALL of it, for
# certain: the fall and CERTAIN standard errors of it are less. Where noise hides as much, nothing is said.
# The window is as long as all steps before it. If what is left to learn falls with the steps to the power of -0.3, as
# is usual for language models, a seventh of it goes meanwhile, at the end of a run a twentieth.
SHORTEST = 500  # steps of a window: small models stand still for some hundred steps before they learn to copy
LONGEST = 0.2  # of the run: else nothing is seen in its second half
LEAST_FALL = 0.005  # a twentieth, as long as a tenth of the loss is left to learn
CERTAIN = 3.0


class Guard:
    """Warns if the loss spikes or stands still, or if all gradients are zero; does not intervene.

    A callback, which `train` has unless the caller brings another one. tell: prints a line.
    """

    def __init__(self, tell: Callable[[str], None] = say):
        self.tell = tell
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.high = 0  # steps in a row above the bound of spikes
        self.zero = 0  # steps in a row without gradients
        self.steps_before = 0  # the window
        self.window: list[tuple[int, float]] = []  # (step, loss)

    def __call__(self, event: Event) -> None:
        if event.kind != "step":
            return
        self._watch_spikes(event.step, event.metrics["loss"])
        self._watch_gradients(event.step, event.metrics["norm"])
        self._watch_window(event)

    def _watch_spikes(self, step: int, loss: float) -> None:
        bound = math.inf
        middle = statistics.median(self.recent) if self.recent else math.inf
        if len(self.recent) >= ENOUGH:
            bound = middle + max(SPREADS * noise_deviation(self.recent), LEAST_RISE)
        self.high = self.high + 1 if loss > bound else 0
        if self.high == LASTS:
            self.tell(
                f"note: the loss spikes: {loss:.4f} at step {step}, in {LASTS} steps above {bound:.4f}; the median of "
                f"the last {len(self.recent)} is {middle:.4f}"
            )
        self.recent.append(loss)

    def _watch_gradients(self, step: int, norm: float) -> None:
        self.zero = self.zero + 1 if norm == 0 else 0
        if self.zero == LASTS:
            self.tell(f"note: nothing is learned: all gradients of {LASTS} steps up to step {step} are zero")

    def _watch_window(self, event: Event) -> None:
        if event.metrics["lr"] == 0:
            self.window.clear()
            return
        self.window.append((event.step, event.metrics["loss"]))
        length = max(SHORTEST, min(self.steps_before, int(LONGEST * event.total_steps)))
        if len(self.window) < length:
            return
        quarter = length // 4
        first, last = self.window[:quarter], self.window[-quarter:]
        if stands_still([loss for _, loss in first], [loss for _, loss in last]):
            before, now = (
                f"{statistics.median(loss for _, loss in part):.4f} in steps {part[0][0]} to {part[-1][0]}"
                for part in (first, last)
            )
            self.tell(f"note: the loss stands still: {before}, {now}, at learning rates above 0")
        self.steps_before += length
        self.window.clear()


def noise_deviation(losses: Sequence[float]) -> float:
    """Estimates the standard deviation of noise from its median absolute deviation, as if normal."""
    middle = statistics.median(losses)
    return 1.4826 * statistics.median(abs(loss - middle) for loss in losses)


def stands_still(first: Sequence[float], last: Sequence[float]) -> bool:
    """True if the last losses' median is, with certainty, less than LEAST_FALL (a fraction) below the first losses'."""
    before = statistics.median(first)
    fall = before - statistics.median(last)
    # The standard error of a median of normal noise is sqrt(pi / 2) of that of the mean.
    error = math.sqrt(math.pi / 2 * (noise_deviation(first) ** 2 / len(first) + noise_deviation(last) ** 2 / len(last)))
    return fall + CERTAIN * error < LEAST_FALL * before
