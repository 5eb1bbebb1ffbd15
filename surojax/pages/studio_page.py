"""Makes the page of `surojax studio` and answers its queries: estimates, settings that fit, compiled plans.

A question is the query of an address: a model, a machine, and settings. The planner answers it as it answers `plan` and
`fit`. An answer is a dict that becomes JSON, or a page.
"""

import ast
import copy
import dataclasses
import json
import math
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import surojax
from surojax import command_line
from surojax.config import flags
from surojax.config.changes import Change, changed, differing, flags as as_flags
from surojax.config.fields import FIELDS, Config, default_config, flat, tokens_of_step
from surojax.errors import ConfigError, need
from surojax.pages import plan_page
from surojax.pages.plan_page import PlanRequest, fact
from surojax.pages.template import fill, script_data
from surojax.planner import aot, seen
from surojax.planner.amounts import Memory
from surojax.planner.candidate import Candidate, memory_limits
from surojax.planner.choices import with_batch
from surojax.planner.disks import Disks
from surojax.planner.drives import disks
from surojax.planner.gpus import GB, GPUS, gpu_key, with_nodes
from surojax.planner.prediction import duration
from surojax.planner.remedies import NOTHING, unlike, with_limits_lifted
from surojax.planner.run_plan import checked, plan
from surojax.planner.search import Space, search
from surojax.sizes import MOST_GPUS

SHOWN = 5  # settings that fit
START = {
    "model": "llama7b",
    "method": "qlora",
    "gpu": "rtx4090",
    "gpus": "1",
    "host": "64",
}  # of the first view; it fits
FORM = ("model", "model_path", "method", "gpu", "gpus", "host", "files", "disk", "sequence_len", "sequences")
METHODS = {"full": "full: all weights", "lora": "LoRA: adapters", "qlora": "QLoRA: quantised base"}
BASES = ("qlora_bnb", "qlora_fp8", "qlora_fp4", "qlora_mxfp4")  # fields that quantise the base


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
        return Space(c, facts, memory_limits(facts, self.host, (self.files or 0.0) * GB), disks=self.disks)

    def command(self, verb: str) -> str:
        """Formats the command line of a verb with this config."""
        model = (
            ["--config", self.model]
            if command_line.is_config_name(self.model)
            else [f"--config.model_path={self.model}"]
        )
        start = flags.config_of_model(self.model, "model", lora=self.config.lora)
        if not command_line.is_config_name(self.model):
            start.lora = False  # the command says it
        change = {name: value for name, value in differing(start, flat(self.config)).items() if name != "model_path"}
        return " ".join(["surojax", verb, shlex.join(model), as_flags(change)]).strip()

    def machine_command(self, verb: str) -> str:
        """Formats the command line of `plan` or `fit`, which take the machine."""
        options = {"--gpu": self.gpu, "--host-memory": self.host and f"{self.host:g}", "--disk": self.disk}
        if verb == "fit":
            options["--nvme"] = self.files and f"{self.files:g}"
        words = [word for name, value in options.items() if value for word in (name, value)]
        return f"{self.command(verb)} {shlex.join(words)}"


def set_method(c: Config, method: str) -> None:
    """Changes a config to a method; a base that is quantised already stays as it is. Raises ConfigError."""
    need(method in METHODS, "method", f"one of {', '.join(METHODS)}", method, "choose one")
    c.lora = method != "full"
    if method != "qlora":
        c.update(dict.fromkeys(BASES, False))
    elif not any(c[name] for name in BASES):
        c.qlora_bnb = True


def question(query: Mapping[str, str]) -> StudioQuery:
    """Parses the query of a URL: `FORM`, and fields by their names.

    Raises ConfigError for invalid values, and for unknown fields.
    """
    model = query.get("model", "").strip() or query.get("model_path", "").strip()
    need(bool(model), "model", "a name of configs/, or a Hugging Face folder or name", model, "choose one")
    gpu = gpu_key(query.get("gpu", ""))
    settings = [(name, value) for name, value in query.items() if name not in FORM]
    method = query.get("method", "")
    lora = method in ("lora", "qlora") or dict(settings).get("lora", "").lower() == "true"
    given = flags.config_of_model(model, "model", lora=lora)
    if method:
        set_method(given, method)
    given.gpus = whole(query, "gpus") or 1
    need(given.gpus <= MOST_GPUS, "gpus", f"at most {MOST_GPUS:,}", given.gpus, "correct it")
    given.sequence_len = whole(query, "sequence_len") or given.sequence_len
    sequences = whole(query, "sequences")
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


def answer_estimate(asked: StudioQuery) -> dict[str, Any]:
    """Answers a query with the step's estimated memory and time, and the commands. Raises ConfigError."""
    space = asked.space()
    x = space.estimated(space.config)
    limits = space.limits
    fits = x.need.fits(limits)
    said = "It fits, by estimate" if fits else f"It does not fit, by estimate: {x.need.beyond(limits).text()} too much"
    return {
        "fits": fits,
        "said": said,
        "facts": facts(x, limits),
        "phases": [{"name": name, "seconds": s} for name, s in x.phases.items() if s],
        "train": asked.command("train"),
        "plan": asked.machine_command("plan"),
        "fit": asked.machine_command("fit"),
        "compiles": aot.available(),
    }


def facts(x: Candidate, limits: Memory) -> list[dict[str, Any]]:
    """Makes a candidate's key figures, under the names of `plan_page.facts`."""
    rate = tokens_of_step(x.config) / x.seconds
    return [
        *plan_page.given_facts(x.config, x.need, limits),
        fact("a step", duration(x.seconds), "estimated", x.seconds),
        fact("tokens/s", f"{rate:,.0f}", f"{rate / x.config.gpus:,.0f} per GPU", rate),
    ]


def fitting(asked: StudioQuery) -> dict[str, Any]:
    """Finds the fastest settings that fit by estimate, as fields of the form; if none fit, changes that would help.

    Raises ConfigError.
    """
    space = asked.space()
    rows = []
    for x in unlike(search(space, SHOWN).candidates):
        own = changed(asked.config, differing(space.config, x.change))  # "auto" and what it stands for are no change
        change = differing(asked.given, flat(own))
        rows.append({"settings": as_words(change), "facts": facts(x, space.limits)})
    helps = [] if rows else [proposal.text() for proposal in with_limits_lifted(space)] or [NOTHING]
    return {"rows": rows, "helps": helps}


def as_words(change: Change) -> list[tuple[str, str]]:
    """Returns fields and their values as the form has them."""
    words = {None: "unset", True: "true", False: "false"}
    return [
        (name, words[value] if value is None or isinstance(value, bool) else str(value))
        for name, value in change.items()
    ]


def compiled(asked: StudioQuery) -> dict[str, Any]:
    """Answers a query with its plan, compiled if there is a compiler: key figures, and a page of the others.

    Raises ConfigError.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        p = plan(asked.config, asked.gpu, host_memory=asked.host, disk=asked.disk, trace=str(trace), advise=False)
        events = json.loads(trace.read_text()) if trace.exists() else None
    request = PlanRequest(plan_page.model_name(asked.config, asked.model), asked.config)
    return {
        "fits": p.fits,
        "said": "It fits" if p.fits else "It does not fit: the compiled step needs more than the estimate",
        "facts": plan_page.facts(p, request),
        "page": plan_page.page(p, asked.machine_command("plan"), events, request=request, framed=True),
    }


def models() -> dict[str, str]:
    """Returns the configs of configs/ that have sizes of their own, and what they say of themselves."""
    found = {}
    for name, file in command_line.configs().items():
        try:
            config = flags.load_config(name)
        except ConfigError:  # it needs a package
            continue
        if config.model_path or config.model == default_config().model:
            continue
        about = (ast.get_docstring(ast.parse(file.read_text())) or name).partition("\n")[0]
        text = re.split(r"[:,;]| on one GPU", re.sub(r"\(.*?\)", "", about))[0].strip()
        found[name] = f"{name}: {text}"
    return found


def page(runs: Sequence[str]) -> str:
    """Makes the HTML page of the studio. runs: folders of runs to watch."""
    fields = {
        name: {
            "kind": field.kind.__name__,
            "choices": [str(choice) for choice in field.choices],
            "default": field.default_text,
            "help": field.comment,
        }
        for name, field in FIELDS.items()
        if name not in FORM
    }
    return fill(
        "studio.html.jinja",
        title="surojax studio",
        command=shlex.join(["surojax", "studio", *runs]),
        version=surojax.__version__,
        start=START,
        models=models(),
        methods=METHODS,
        gpus={name: gpu.name for name, gpu in GPUS.items()},
        fields=fields,
        fields_data=script_data(fields),
        runs=list(runs),
    )
