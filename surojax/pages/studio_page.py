"""Makes the page of `surojax studio` and answers its queries: estimates, settings that fit, compiled plans.

A question is the query of an address: a model, a machine, and settings. The planner answers it as it answers `plan` and
`fit`. An answer is a dict that becomes JSON, or a page.
"""

import copy
import dataclasses
import json
import math
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import surojax
from surojax.config import flags
from surojax.config.fields import Config, flat, gpus_per_sequence
from surojax.errors import ConfigError, need
from surojax.pages import plan_page
from surojax.pages.template import fill
from surojax.planner import aot, seen
from surojax.planner.amounts import GiB, Memory, gib
from surojax.planner.candidate import Candidate, device_limit, host_limit
from surojax.planner.changes import changed, differing, flags as as_flags
from surojax.planner.choices import with_batch
from surojax.planner.disks import Disks
from surojax.planner.drives import disks
from surojax.planner.gpus import GB, GPUS, gpu_key, with_nodes
from surojax.planner.prediction import duration
from surojax.planner.remedies import NOTHING, with_limits_lifted
from surojax.planner.run_plan import checked, plan
from surojax.planner.search import Space, search
from surojax.sizes import MOST_GPUS

SHOWN = 5  # settings that fit


@dataclasses.dataclass(frozen=True)
class StudioQuery:
    """A query for a model, a machine and settings. config: with machine and settings. given: without the settings.

    model: what `--config` takes, or `--config.model_path`. host: GiB of a machine's memory, and files: GB on its
    drives; None: as much as needed, and none. disk: see `drives.disks`.
    """

    model: str
    gpu: str
    given: Config
    config: Config
    host: float | None
    files: float | None
    disk: str | None

    @property
    def disks(self) -> Disks:
        """The machine's disks."""
        return disks(self.disk, self.config.rates_file)

    def space(self) -> Space:
        """Makes the search space: the checked config with the machine's GPUs, memory and disks. Raises ConfigError."""
        c = checked(self.config, self.gpu)
        facts = seen.corrected(with_nodes(self.gpu, None, None), c.rates_file)
        host = math.inf if self.host is None else host_limit(self.host * GiB)
        return Space(c, facts, Memory(device_limit(facts), host, (self.files or 0.0) * GB), disks=self.disks)

    def command(self, verb: str) -> str:
        """Formats the command line of a verb with this config."""
        model = ["--config", self.model] if flags.is_config_name(self.model) else [f"--config.model_path={self.model}"]
        start = flags.load_config(self.model if flags.is_config_name(self.model) else str(flags.FINETUNE))
        change = {name: value for name, value in differing(start, flat(self.config)).items() if name != "model_path"}
        return " ".join(["surojax", verb, shlex.join(model), as_flags(change)]).strip()

    @property
    def plan_command(self) -> str:
        """The command line of `plan`."""
        options = {"--gpu": self.gpu, "--host-memory": self.host and f"{self.host:g}", "--disk": self.disk}
        words = [word for name, value in options.items() if value for word in (name, value)]
        return f"{self.command('plan')} {shlex.join(words)}"


def question(query: Mapping[str, str]) -> StudioQuery:
    """Parses the query of a URL. Raises ConfigError for invalid values, and for unknown fields."""
    model = query.get("model", "").strip()
    need(bool(model), "model", "a name of configs/, or a Hugging Face folder or name", model, "choose one")
    gpu = gpu_key(query.get("gpu", ""))
    is_name = flags.is_config_name(model)
    given = flags.load_config(model if is_name else str(flags.FINETUNE))
    if not is_name:
        given.model_path = model
    given.gpus = whole(query, "gpus") or 1
    need(given.gpus <= MOST_GPUS, "gpus", f"at most {MOST_GPUS:,}", given.gpus, "correct it")
    given.sequence_len = whole(query, "sequence_len") or given.sequence_len
    sequences = whole(query, "sequences")
    settings = parsed_settings(query.get("settings", ""))
    config = copy.deepcopy(given)
    flags.override_all(config, settings)
    if "gradient_accumulation_steps" not in dict(settings):  # else the settings say how many sequences a step has
        config = with_batch(config, sequences)
    given = with_batch(given, sequences)
    disk = query.get("disk", "").strip() or None
    disks(disk, config.rates_file)
    return StudioQuery(model, gpu, given, config, number(query, "host"), number(query, "files"), disk)


def number(query: Mapping[str, str], name: str) -> float | None:
    """Parses a query's number, above 0; None if left empty. Raises ConfigError."""
    text = query.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise ConfigError(f"{name}: expected a number, more than 0, got {text!r}; correct it, or leave it empty")
    return value


def whole(query: Mapping[str, str], name: str) -> int | None:
    """Parses a query's whole number, above 0; None if left empty. Raises ConfigError."""
    value = number(query, name)
    if value is None:
        return None
    need(value.is_integer(), name, "a whole number", f"{value:g}", "correct it, or leave it empty")
    return int(value)


def parsed_settings(text: str) -> list[tuple[str, str]]:
    """Parses settings separated by spaces, as `zero_level=3` or as flags: [(field, value)]. Raises ConfigError."""
    try:
        words = [word.removeprefix("--config.") for word in shlex.split(text)]
    except ValueError as error:
        raise ConfigError(f"settings: {error}; correct them") from error
    pairs = [word.partition("=") for word in words]
    return [(name, value if is_set else "true") for name, is_set, value in pairs]


def answer_estimate(asked: StudioQuery) -> dict[str, Any]:
    """Answers a query with the step's estimated memory and time, and the commands. Raises ConfigError."""
    space = asked.space()
    x = space.estimated(space.config)
    limits = space.limits
    fits = x.need.fits(limits)
    said = "it fits, by estimate" if fits else f"it does not fit, by estimate: {x.need.beyond(limits).text()} too much"
    return {
        "fits": fits,
        "said": said,
        "facts": facts(x, limits),
        "phases": [{"name": name, "seconds": s} for name, s in x.phases.items() if s],
        "train": asked.command("train"),
        "plan": asked.plan_command,
        "compiles": aot.available(),
    }


def facts(x: Candidate, limits: Memory) -> list[dict[str, Any]]:
    """Makes a candidate's key figures; "value" as text, "exact" in bytes or seconds."""

    def memory(name: str, size: float, limit: float) -> dict[str, Any]:
        return {"name": name, "value": gib(size), "exact": size, "note": f"of {gib(limit)}" if limit < math.inf else ""}

    figures = [
        memory("memory of each GPU", x.need.device, limits.device),
        memory("host memory of a machine", x.need.host, limits.host),
    ]
    if x.need.files or limits.files:
        figures.append(memory("files", x.need.files, limits.files))
    figures.append({"name": "a step", "value": duration(x.seconds), "exact": x.seconds, "note": "estimated"})
    rate = tokens(x.config) / x.seconds
    note = f"{rate / x.config.gpus:,.0f} per GPU"
    return [*figures, {"name": "tokens/s", "value": f"{rate:,.0f}", "exact": rate, "note": note}]


def tokens(c: Config) -> int:
    """Returns the tokens of a step on all GPUs."""
    groups = c.gpus // gpus_per_sequence(c)
    return groups * c.per_device_batch_size * c.gradient_accumulation_steps * c.sequence_len


def fitting(asked: StudioQuery) -> dict[str, Any]:
    """Finds the fastest settings that fit by estimate, as texts for the form; if none fit, changes that would help.

    Raises ConfigError.
    """
    space = asked.space()
    rows = []
    for x in search(space, SHOWN).candidates:
        own = changed(asked.config, differing(space.config, x.change))  # "auto" and what it stands for are no change
        change = differing(asked.given, flat(own))
        rows.append({"settings": as_flags(change).replace("--config.", ""), "facts": facts(x, space.limits)})
    helps = [] if rows else [proposal.text() for proposal in with_limits_lifted(space)] or [NOTHING]
    return {"rows": rows, "helps": helps}


def compiled_page(asked: StudioQuery) -> str:
    """Makes the page of a query's plan, compiled if there is a compiler. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        p = plan(asked.config, asked.gpu, host_memory=asked.host, disk=asked.disk, trace=str(trace), advise=False)
        events = json.loads(trace.read_text()) if trace.exists() else None
    return plan_page.page(p, asked.plan_command, events)


def page(runs: Sequence[str]) -> str:
    """Makes the HTML page of the studio. runs: folders of runs to watch."""
    return fill(
        "studio.html.jinja",
        title="surojax studio",
        command=shlex.join(["surojax", "studio", *runs]),
        version=surojax.__version__,
        models=list(flags.configs()),
        gpus={name: gpu.name for name, gpu in GPUS.items()},
        runs=list(runs),
    )
