"""Simulates a compiled, scheduled step on a GPU: the predicted time, and what of the transfers is exposed.

The program is walked in the order of its schedule, loops as often as they run. Time passes on five streams: compute
(the main one), host to device, device to host, collectives, and asynchronous compute. Each of them does its work in
order. If the installed CUDA plugin is older than 0.12, copies of both directions are queued on four streams in turn
(`costs.streams_in_turn`); those of one direction that are under way together share its rate. The main stream takes its
kernels one after another; a "-start" hands a work to its stream; a "-done" makes the main stream wait until that work
is done. While the main stream waits, time is exposed, and is booked to the kind of what it waits for. What each work
costs alone is in costs.py.

Works slow each other as follows.

* The multiprocessors serve one kernel at a time, in the order in which kernels are submitted. A host transfer that is a
  kernel (costs.py) has tens of thousands of blocks, so a product behind it starts when it ends.
* A host transfer has the link's rate, or `Rates.duplex` of it while the other direction is busy too. If GPUs have no
  link of their own, collectives and host transfers share PCI Express in proportion to their rates.
* All GPUs of a machine do the same at the same time, so each has its part of what host memory moves (`Rates.dram`).
  Host transfers, and collectives that go through host memory, which read what was written, are slowed to that.
* A collective has the rate of the slowest link that it crosses (links.py).
* While a collective runs, kernels lose the multiprocessors that it occupies.
* While a copy within the device runs on another stream, kernels lose `Rates.beside` of that time.

Loops reach a steady state: after `MOST` iterations the others are taken to be like the last one.

Not modelled: the time between steps (input, logging), other jobs, clocks that fall with temperature, tiles that cuBLAS
chooses better or worse than `costs.product_time`, GPUs that wait for slower ones, files.
"""

import dataclasses
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from surojax.planner.costs import (
    COLLECTIVES,
    DEVICE_COPY,
    HOST_IN,
    HOST_OUT,
    MAIN,
    Loop,
    ProgramOnGpu,
    Step,
    Wait,
    Work,
)
from surojax.planner.gpus import Gpu

MOST = 6
ENTRY = "outside loops"
WAITS = "waits"  # a row of events: when the main stream waits
OPPOSITE = {HOST_IN: HOST_OUT, HOST_OUT: HOST_IN}


class TimelineEvent(NamedTuple):
    """A work, or a wait of the main stream, in seconds after the step's beginning. bytes: 0 for a kernel."""

    name: str
    kind: str
    stream: str
    loop: str
    begin: float
    end: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated program, in seconds."""

    seconds: float
    busy: dict[str, float]  # by kind of work
    exposed: dict[tuple[str, str], float]  # by (label of the loop, kind of transfer)
    events: list[TimelineEvent]  # empty if not asked for
    exposed_rows: dict[str, float] = dataclasses.field(default_factory=dict)  # of files, by row of the placement table

    def since(self, begin: float) -> list[TimelineEvent]:
        """The events of the program if it begins at this second."""
        return [event._replace(begin=begin + event.begin, end=begin + event.end) for event in self.events]


def simulate(p: ProgramOnGpu, *, most: int = MOST, events: bool = False) -> Timeline:
    """Simulates a program.

    most: iterations of each loop that are simulated. events: whether to record them; of loops without a loop inside,
    all iterations are simulated then.
    """
    machine = Machine(p.gpu, math.prod(p.mesh_shape.values()), most, events)
    machine.run(p.steps())
    machine.finish()
    return machine.timeline()


class Task:
    """A work under way: what is left of its latency, and of its seconds or bytes."""

    __slots__ = ("begin", "latency", "left", "queued", "work")

    def __init__(self, work: Work):
        self.work = work
        self.latency = work.latency
        self.left = work.bytes or work.seconds
        self.begin: float | None = None
        self.queued = False

    @property
    def done(self) -> bool:
        return not self.latency and not self.left


class Iteration(NamedTuple):
    """A machine before an iteration of a loop. left: of works that were started before the loop."""

    time: float
    totals: dict[tuple[str, ...], float]
    left: dict[Task, float]


class Machine:
    """A GPU in simulated time."""

    def __init__(self, gpu: Gpu, gpus: int, most: int, record: bool):
        self.rates = rates = gpu.rates
        self.most = most
        self.host_rate = gpu.pcie_bandwidth * rates.host
        self.link_rate = gpu.link_bandwidth * rates.link
        self.host_memory = gpu.host_memory(gpus) * rates.dram
        self.passes_host = 2 * gpu.staged  # bytes in host memory for each byte of a collective
        self.shares_link = gpu.shares_pcie
        self.time = 0.0
        self.streams: defaultdict[str, deque[Task]] = defaultdict(deque)
        self.sms: deque[Task] = deque()  # the kernel that runs, and those that wait for it
        self.open: dict[str, Task] = {}  # works that were started, by name
        self.labels = [ENTRY]
        self.totals: defaultdict[tuple[str, ...], float] = defaultdict(float)  # see `timeline`
        self.events: list[TimelineEvent] | None = [] if record else None
        self.waits: list[TimelineEvent] = []  # of the main stream; together as long as what is exposed

    def run(self, steps: Sequence[Step]) -> None:
        """Runs steps of the main stream."""
        for step in steps:
            if isinstance(step, Loop):
                self.run_loop(step)
            elif isinstance(step, Wait):
                self.wait(step)
            elif step.stream == MAIN:
                task = Task(step)
                self.until(task, running=task)
            else:
                self.open[step.name] = Task(step)
                self.streams[step.queue].append(self.open[step.name])

    def run_loop(self, loop: Loop) -> None:
        """Runs a loop. Iterations after `most` are like the last of those; a part of one takes a part of its time.

        A work that was started before the loop goes on in all of them, and they are alike until it ends.
        """
        self.labels.append(loop.label)
        whole = self.events is not None and not loop.has_loops
        simulated = math.ceil(loop.trips) if whole else min(math.ceil(loop.trips), self.most)
        earlier = [task for stream in self.streams.values() for task in stream]
        last = Iteration(self.time, {}, {})
        for _ in range(simulated):
            last = self.iterate(loop, earlier)
        others = loop.trips - simulated
        while others > 0 and (alike := self.iterations_alike(last)) < others:
            self.skip(last, alike)
            others -= alike
            for _ in range(min(2, math.floor(others))):  # in one a work ends, and the next one is without it
                last = self.iterate(loop, earlier)
                others -= 1
        if others:
            self.skip(last, float(others))
        self.labels.pop()

    def iterate(self, loop: Loop, earlier: Sequence[Task]) -> "Iteration":
        """Runs an iteration of a loop. Returns what was before it. earlier: works started before the loop."""
        before = Iteration(self.time, dict(self.totals), {task: task.left for task in earlier if not task.done})
        self.time += self.rates.iteration
        self.run(loop.body)
        return before

    def iterations_alike(self, last: "Iteration") -> float:
        """The number of further iterations like the last one until a work that was started before the loop ends.

        0 if one ended in the last one: the work behind it went on in a part of that iteration only.
        """
        if any(task.done for task in last.left):
            return 0.0
        advanced = [(task.left, left - task.left) for task, left in last.left.items()]
        return min((math.floor(left / step) for left, step in advanced if step > 0), default=math.inf)

    def skip(self, last: "Iteration", number: float) -> None:
        """Lets so many iterations like the last one pass."""
        waits = self.time
        for key, total in list(self.totals.items()):
            gained = number * (total - last.totals.get(key, 0.0))
            self.totals[key] += gained
            if key[0] == "exposed" and gained and self.events is not None:
                _, label, kind = key
                name = f"waits of {number:g} more iterations"
                self.waits.append(TimelineEvent(name, kind, WAITS, label, waits, waits + gained, 0.0))
                waits += gained
        for task, left in last.left.items():
            if not task.done:
                task.left -= number * (left - task.left)
        skipped = number * (self.time - last.time)
        self.record(f"{number:g} more iterations", "not simulated", MAIN, self.time, self.time + skipped)
        self.time += skipped

    def wait(self, step: Wait) -> None:
        """Waits for a work that was started."""
        task = self.open.pop(step.name, None)
        if task is None or task.done:
            return
        self.until(task)

    def finish(self) -> None:
        """Waits for all works that are still under way."""
        for stream in self.streams.values():
            while stream:
                self.until(stream[-1])

    def until(self, task: Task, running: Task | None = None) -> None:
        """Lets time pass until a task is done. running: the main stream's kernel; None if it only waits."""
        while not task.done:
            heads = [stream[0] for stream in self.streams.values() if stream]
            if running is not None:
                heads.append(running)
            for x in heads:
                if x.work.needs_sms and not x.queued:
                    x.queued = True
                    self.sms.append(x)
            speeds = self.speeds(heads)
            step = min((x.latency or x.left) / v for x, v in zip(heads, speeds, strict=True) if v)
            self.book_exposed(task, running, step)
            self.time += step
            for x, v in zip(heads, speeds, strict=True):
                if v:
                    self.advance(x, v, step)

    def is_blocked(self, task: Task) -> bool:
        """Whether a task is a kernel that waits for another one."""
        return task.work.needs_sms and self.sms[0] is not task

    def speeds(self, heads: Sequence[Task]) -> list[float]:
        """Returns the speeds of each stream's first task: bytes/s of transfers, seconds of work per second."""
        busy = {x.work.stream for x in heads if not x.latency}
        copies_within = any(x.work.kind == DEVICE_COPY and x.work.stream != MAIN for x in heads)
        copying = Counter(x.work.stream for x in heads if not (x.latency or self.is_blocked(x)))
        share = self.host_rate / (self.host_rate + self.link_rate) if self.shares_link else 1.0

        def of(x: Task) -> float:
            stream = x.work.stream
            if self.is_blocked(x):
                return 0.0
            if x.latency:
                return 1.0
            if stream in OPPOSITE:
                rate = self.host_rate * (self.rates.duplex if OPPOSITE[stream] in busy else 1.0)
                return rate * (share if COLLECTIVES in busy else 1.0) / copying[stream]
            if stream == COLLECTIVES:
                return x.work.rate * (share if busy & OPPOSITE.keys() else 1.0)
            beside = self.rates.beside if stream == MAIN and copies_within else 0.0
            return (1.0 - beside) * (1.0 - self.rates.collective_sms if COLLECTIVES in busy else 1.0)

        found = [of(x) for x in heads]
        passes = [0 if x.latency else self.passes_host if x.work.stream == COLLECTIVES else 1 for x in heads]
        moves = [n if x.work.stream in (*OPPOSITE, COLLECTIVES) else 0 for x, n in zip(heads, passes, strict=True)]
        moved = sum(n * v for n, v in zip(moves, found, strict=True))
        slowed = min(1.0, self.host_memory / moved) if moved else 1.0
        return [v * slowed if n else v for n, v in zip(moves, found, strict=True)]

    def book_exposed(self, task: Task, running: Task | None, step: float) -> None:
        """Books a step of time in which the main stream computes nothing to what it waits for."""
        first = task
        if running is not None:
            if not self.is_blocked(running):
                return
            first = self.sms[0]
        self.totals["exposed", self.labels[-1], first.work.kind] += step
        if self.events is not None:
            self.record_wait(first.work, step)

    def record_wait(self, work: Work, step: float) -> None:
        """Records that the main stream waits for a work, in one event for as long as nothing else happens to it."""
        now = self.time
        wait = TimelineEvent(f"wait for {work.name}", work.kind, WAITS, self.labels[-1], now, now + step, 0.0)
        if self.waits and self.waits[-1][:4] == wait[:4] and self.waits[-1].end == now:
            wait = wait._replace(begin=self.waits.pop().begin)
        self.waits.append(wait)

    def advance(self, task: Task, speed: float, step: float) -> None:
        """Advances a task by a step of time, and ends it if nothing is left."""
        work = task.work
        if task.begin is None:
            task.begin = self.time - step
        self.totals["busy", work.kind] += step
        if task.latency:
            task.latency -= step
            if task.latency < 1e-12:
                task.latency = 0.0
        else:
            task.left -= step * speed
            if task.left <= max(1e-9 * (work.bytes or work.seconds), 1e-13):
                task.left = 0.0
        if task.done:
            if work.needs_sms:
                self.sms.remove(task)
            if work.stream != MAIN:
                self.streams[work.queue].popleft()
            self.record(work.name, work.kind, work.stream, task.begin, self.time, work.bytes)

    def record(self, name: str, kind: str, stream: str, begin: float, end: float, size: float = 0.0) -> None:
        """Records an event, if events are asked for."""
        if self.events is not None:
            self.events.append(TimelineEvent(name, kind, stream, self.labels[-1], begin, end, size))

    def timeline(self) -> Timeline:
        """Returns the simulated time line."""
        busy = {key[1]: total for key, total in self.totals.items() if key[0] == "busy"}
        exposed = {(key[1], key[2]): total for key, total in self.totals.items() if key[0] == "exposed"}
        return Timeline(self.time, busy, exposed, [*(self.events or []), *self.waits])
