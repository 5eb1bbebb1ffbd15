"""The verbs of surojax in Python: `surojax.train`, `plan`, `fit`, `convert`, `generate`, `evaluate`, `load`, `distill`.

    import surojax

    result = surojax.train(model_path="MODEL", data="chats.jsonl", lora=True)
    print(surojax.generate(result, "What does os.walk do?", chat=True))

Each takes a config, a name of configs/ or a config file, and fields as keywords, which override it. Without a config
the fields of a `model_path` are those of configs/finetune.py, of anything else the defaults. Nothing is read from the
command line. docs/api.md has examples.
"""

import copy
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack, overload

from surojax.config import flags
from surojax.config.fields import Config, default_config, tokens_of_step
from surojax.errors import ConfigError, need, shown

if TYPE_CHECKING:  # imported by the function that needs it, so that the others stay quick
    from surojax.config.typed import Fields, FieldsOfTrain  # pyright: ignore[reportMissingModuleSource]
    from surojax.evaluate import Accuracy
    from surojax.inference.trained_model import Trained
    from surojax.models.decoder import Block
    from surojax.objectives.objective import Objective
    from surojax.optim.from_optax import MakeTransformation
    from surojax.planner.fastest import FitResult
    from surojax.planner.run_plan import Plan
    from surojax.run.callbacks import Callback
    from surojax.train import Result

GiB = 2**30
MODEL = "model."  # of fields' names

type Source = str | Path | Config  # of a config: a name of configs/, a file, or the config itself
type Model = str | Path | Result | LoadedModel  # a run, a checkpoint, a folder, a name, a GGUF file, or one in memory


@dataclass(frozen=True)
class LoadedModel:
    """A model with weights, tokenizer and chat template in memory, which `generate` and `evaluate` take.

    source: where it was read.
    """

    source: str
    trained: "Trained" = field(repr=False)

    def __repr__(self) -> str:
        model, template = self.trained.model, self.trained.template
        parameters = f"{sum(math.prod(p.shape) for p in _leaves(model.params)) / 1e6:,.1f}M parameters"
        chats = "with a chat template" if template else "without a chat template"
        return f"LoadedModel({self.source!r}: {parameters}, {chats})"


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a step by estimate, in bytes and seconds; nothing was compiled.

    device_bytes, classes: of each GPU, in all and {class of tensors: {"device", "host", "nvme"}}. host_bytes: of a
    machine. step_s: seconds of a step. tokens_per_s: of all GPUs.
    """

    gpu: str
    gpus: int
    fits: bool
    device_bytes: int
    device_limit_bytes: int
    host_bytes: int
    classes: dict[str, dict[str, int]] = field(repr=False)
    step_s: float
    tokens_per_s: float

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        device = f"{self.device_bytes / GiB:.1f} of {self.device_limit_bytes / GiB:.1f} GiB on each GPU"
        host = f"{self.host_bytes / GiB:.1f} GiB of host memory"
        speed = f"{self.step_s:.3g} s a step, {self.tokens_per_s:,.0f} tokens/s"
        return f"Estimate({self.gpus} x {self.gpu}, {fits}: {device}, {host}, {speed})"


@dataclass(frozen=True)
class Fit:
    """The fastest settings that fit. config: with them; None if nothing fits. step_s, tokens_per_s: of all GPUs.

    change: {field: value} that differ from the config that was given. result: every row, see `FitResult`.
    `print(fit)` shows the table of `surojax fit`.
    """

    config: Config | None
    change: dict[str, Any]
    step_s: float | None
    tokens_per_s: float | None
    result: "FitResult" = field(repr=False)

    def __repr__(self) -> str:
        if self.config is None:
            return f"Fit(nothing fits {self.result.gpus} x {self.result.gpu})"
        settings = " ".join(f"{name}={value}" for name, value in self.change.items()) or "as given"
        return f"Fit({settings}: {self.step_s:.3g} s a step, {self.tokens_per_s:,.0f} tokens/s)"

    def __str__(self) -> str:
        from surojax.fit import result_table

        return result_table(self.result)


def load_config(config: Source | None = None, **fields: "Unpack[Fields]") -> Config:
    """Returns a copy of a config with these fields; `model` is a mapping of sizes.

    config: a name of configs/, a file, or a config; None: configs/finetune.py if `model_path` is given, else the
    defaults. Raises ConfigError for an unknown field, with the nearest name, and for a value of another type.
    """
    return _config(config, dict(fields))


def train(
    config: Source | None = None,
    *,
    max_minutes: float | None = None,
    callbacks: "Sequence[Callback]" = (),
    data: str | Path | Iterable[Any] | None = None,
    optimizer: "str | MakeTransformation | None" = None,
    objective: "str | Objective | None" = None,
    block: "type[Block] | None" = None,
    **fields: "Unpack[FieldsOfTrain]",
) -> "Result":
    """Trains, and returns the final state, the metrics and the newest checkpoint.

    config, fields: see `load_config`.

    max_minutes: the run saves and stops after the step in which so many minutes have passed. With several processes,
    all call this function, after `hosts.connect`; the first one prints and writes metrics.
    callbacks: each is called with an `Event` after each step, evaluation and checkpoint.
    data: files, as the field `data` names them; or rows: texts, mappings of fields as in a file, lists of messages, or
    token ids (a list of int, an integer array); an integer array `[rows, tokens]` or `[tokens]`. Rows are read several
    times and by a resumed run again, so iterating over them has to give the same rows each time.
    optimizer: a name, as the field; or a function of the learning rate that returns an elementwise transformation of
    optax, such as optax.lion; the schedule of the learning rate and the clipping of gradients are the config's.
    objective: a name, as the field; or what is minimised in place of cross-entropy, such as `LossOfLogits`.
    block: a subclass of `Block` that the layers compute. A checkpoint is continued with the block that it was written
    with.

    Raises ConfigError (bad settings or data, or too little memory; nothing was written), CheckpointError (a checkpoint
    cannot be written, read or continued), NonFiniteLoss (the loss is NaN or infinite), StepError (XLA fails on a GPU),
    OSError (the disk has no room for metrics, or the disk of nvme_path fails).
    """
    from surojax.train import train as run

    own = {"data": data, "optimizer": optimizer, "objective": objective}
    named = {name: str(value) for name, value in own.items() if isinstance(value, str | Path)}
    brought: dict[str, Any] = {name: value for name, value in own.items() if name not in named}
    c = _config(config, dict(fields) | named)
    return run(c, max_minutes=max_minutes, callbacks=callbacks, block=block, **brought)


def plan(
    config: Source | None = None,
    *,
    gpu: str,
    host_memory: float | None = None,
    gpus_per_node: int | None = None,
    host_bandwidth: float | None = None,
    disk: str | None = None,
    trace: str | None = None,
    **fields: "Unpack[Fields]",
) -> "Plan":
    """Compiles the step for `gpus` GPUs of this kind, without one, and returns its memory, traffic and predicted time.

    config, fields: see `load_config`. gpu, host_memory (GiB of a machine), gpus_per_node, host_bandwidth (GB/s), disk,
    trace (a file): as the options of `surojax plan`. `print(plan)` shows whether it fits and its rate.

    Raises ConfigError for settings that `train` refuses, and for an unknown GPU; a plan that does not fit is returned.
    """
    from surojax.planner import run_plan

    c = _config(config, dict(fields))
    machine: Any = {"gpus_per_node": gpus_per_node, "host_bandwidth": host_bandwidth, "disk": disk, "trace": trace}
    return run_plan.plan(c, gpu, host_memory=host_memory, **machine)


def estimate(
    config: Source | None = None,
    *,
    gpu: str,
    host_memory: float | None = None,
    disk: str | None = None,
    **fields: "Unpack[Fields]",
) -> Estimate:
    """Estimates a step's memory and time from its shapes, in seconds; `plan` compiles it. Arguments as those of `plan`.

    Raises ConfigError for settings that `train` refuses, and for an unknown GPU.
    """
    from surojax.planner import candidate, footprint, seen
    from surojax.planner.drives import disks
    from surojax.planner.gpus import gpu_key, with_nodes
    from surojax.planner.run_plan import checked
    from surojax.planner.traffic import batch_of

    gpu = gpu_key(gpu)
    c = checked(_config(config, dict(fields)), gpu)
    facts = seen.corrected(with_nodes(gpu, None, None), c.rates_file)
    limits = candidate.memory_limits(facts, host_memory, math.inf)
    found = candidate.estimated(c, facts, disks=disks(disk, c.rates_file))
    return Estimate(
        gpu=gpu,
        gpus=c.gpus,
        fits=found.need.fits(limits),
        device_bytes=int(found.need.device),
        device_limit_bytes=int(limits.device),
        host_bytes=int(found.need.host),
        classes=footprint.by_class(footprint.assembly(c), batch_of(c), "gpu"),
        step_s=found.seconds,
        tokens_per_s=tokens_of_step(c) / found.seconds,
    )


def fit(
    config: Source | None = None,
    *,
    gpu: str,
    host_memory: float | None = None,
    gpus_per_node: int | None = None,
    host_bandwidth: float | None = None,
    nvme: float | None = None,
    disk: str | None = None,
    allow: Collection[str] = (),
    keep: Collection[str] = (),
    compiled: int = 3,
    say: Callable[[str], None] = print,
    **fields: "Unpack[Fields]",
) -> Fit:
    """Searches for the fastest settings that fit `gpus` GPUs of this kind; model, data and sequences of a step stay.

    config, fields: see `load_config`. The others are the options of `surojax fit`. compiled: how many of the best
    settings are compiled. say: is given each line about what goes on.

    Raises ConfigError for settings that `train` refuses, and for an unknown GPU.
    """
    from surojax.planner.fastest import fastest

    need(compiled > 0, "compiled", "1 or more", compiled, "correct it; estimate() compiles nothing")
    c = _config(config, dict(fields))
    machine: Any = {"gpus_per_node": gpus_per_node, "host_bandwidth": host_bandwidth, "nvme": nvme, "disk": disk}
    result = fastest(c, gpu, host_memory=host_memory, allow=allow, keep=keep, most=compiled, say=say, **machine)
    if not result.rows:
        return Fit(None, {}, None, None, result)
    best = result.rows[0]
    return Fit(best.config, best.change, best.seconds, result.gpus * best.tokens / best.seconds, result)


def load(model: Model, *, tokenizer: str = "", chat_template: str = "") -> LoadedModel:
    """Reads a model into memory: a `Result`, a run's folder, a checkpoint, a Hugging Face folder or name, a GGUF file.

    tokenizer, chat_template: as the fields; "": the model's own. Raises CheckpointError or ConfigError if it cannot be
    read.
    """
    if isinstance(model, LoadedModel):
        return model
    from surojax.inference.trained_model import load_trained

    source = _path(model)
    return LoadedModel(str(source), load_trained(source, tokenizer, chat_template))


class Quantised(NamedTuple):
    """An array after rounding to a format, and the bits of a number in that format, with its scales."""

    array: Any
    bits: float


class Sampling(TypedDict, total=False):
    """The options of `generate`."""

    chat: bool
    system: str
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


@overload
def generate(model: Model, prompt: str, **options: Unpack[Sampling]) -> str: ...
@overload
def generate(model: Model, prompt: Sequence[str], **options: Unpack[Sampling]) -> list[str]: ...
def generate(
    model: Model,
    prompt: str | Sequence[str],
    *,
    chat: bool = False,
    system: str = "",
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
) -> str | list[str]:
    """Returns the continuation of a text, or of each of several, or the answer to a message with `chat`.

    model: see `load`, which spares reading it at each call. system: the system message before the prompt.
    temperature 0: the most likely tokens. top_p: only the most likely tokens of this total probability.

    Raises ConfigError for options out of range and for `chat` of a model without a chat template.
    """
    from surojax.inference.prompts import message_ids, text_ids
    from surojax.inference.sample import check_options, generate_batch

    check_options(max_tokens, temperature, top_p, seed)
    need(chat or not system, "system", "chat=True with it", system, "add it")
    texts = [prompt] if isinstance(prompt, str) else list(prompt)
    need(all(isinstance(text, str) for text in texts), "prompt", "a text or several", prompt, "pass texts")
    trained = load(model).trained
    ids = [message_ids(trained, text, system) if chat else text_ids(trained.tokenizer, text) for text in texts]
    stops: Any = {"stop_ids": trained.tokenizer.stop_ids, "vocab_size": trained.tokenizer.vocab_size}
    sampling: Any = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    rows = generate_batch(trained.model, trained.weights, ids, **stops, **sampling) if ids else []
    answers = [trained.tokenizer.decode(row) for row in rows]
    return answers[0] if isinstance(prompt, str) else answers


def evaluate(
    model: Model,
    questions: str | Path | Iterable[Mapping[str, Any]],
    *,
    limit: int | None = None,
    batch_size: int = 8,
) -> "Accuracy":
    """Returns the shares of multiple-choice questions that a model answers right.

    model: see `load`. questions: a .jsonl file, or mappings with "question", "choices" and "answer", the index of the
    right choice. limit: the first questions only. Raises ConfigError for a question that is not as it should be.
    """
    from surojax.evaluate import answer, question_of, read_questions

    if isinstance(questions, str | Path):
        rows = read_questions(questions)
    else:
        rows = [question_of(json.dumps(row), f"questions[{i}]") for i, row in enumerate(questions)]
    need(bool(rows), "questions", "one or more", [], "add one")
    need(limit is None or limit > 0, "limit", "1 or more", limit, "leave it out")
    need(batch_size > 0, "batch_size", "1 or more", batch_size, "correct it")
    return answer(load(model).trained, rows[:limit], batch_size=batch_size)


def convert(
    model: "str | Path | Result",
    out: str | Path,
    *,
    adapters: Sequence[str | Path] = (),
    dtype: str = "bfloat16",
    tokenizer: str = "",
    experts_together: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Writes a model as a Hugging Face folder, or as a GGUF file if the path ends in .gguf; returns the path.

    model: see `load`; adapters of a run are merged into their base. adapters: folders in PEFT's format to merge, one
    after another. The others are the options of `surojax convert`.

    Raises ConfigError or CheckpointError; then nothing is written.
    """
    from surojax.convert import merge

    how: Any = {"dtype": dtype, "tokenizer": tokenizer, "experts_together": experts_together}
    return merge(_path(model), adapters, out, **how, say=say)


def distill(config: Source | None = None, **fields: "Unpack[Fields]") -> Path:
    """Labels the training data with the model at `model_path` and returns the folder of the labels, `distill_path`.

    config, fields: see `load_config`. Raises ConfigError for what a run would refuse, CheckpointError for a model that
    cannot be read, OSError if a disk is full.
    """
    from surojax.distill import distill as label

    return label(_config(config, dict(fields)))


def quantised(array: Any, base_format: str) -> Quantised:
    """Rounds a float32 matrix `[..., out, in]` to a format of frozen bases and back: nf4, fp8, nvfp4 or mxfp4.

    Raises ConfigError for another format.
    """
    import jax.numpy as jnp

    from surojax.numerics.base_formats import FORMATS, bytes_per_number, dequantise, quantise

    need(base_format in FORMATS, "base_format", f"one of {', '.join(FORMATS)}", base_format, "choose one")
    w = jnp.asarray(array, jnp.float32)
    planned = FORMATS[base_format].planned(w.shape)
    return Quantised(dequantise(quantise(w, planned), jnp.float32), 8 * bytes_per_number(planned, w.shape))


def _config(config: Source | None, values: dict[str, Any]) -> Config:
    """Returns a copy of a config with these values of fields, see `load_config`."""
    lora = bool(values.get("lora", False))
    if isinstance(config, str | Path):
        c = flags.load_config(str(config), lora=lora)
    elif config is not None:
        if not hasattr(config, "copy_and_resolve_references"):
            expected = "default_config() with changes, a name of configs/ or a config file"
            raise ConfigError(f"config: expected {expected}, got {shown(config, 60)}; correct it")
        c = copy.deepcopy(config)
    elif values.get("model_path"):
        c = flags.load_config(str(flags.FINETUNE), lora=lora)
    else:
        c = default_config()
    sizes = values.pop("model", {})
    need(isinstance(sizes, Mapping), "model", "a mapping of sizes", sizes, "or set model_path to a model")
    for name, value in sizes.items():
        c.model[name] = value
    for name, value in values.items():
        section = c.model if name.startswith(MODEL) else c
        section[name.removeprefix(MODEL)] = str(value) if isinstance(value, Path) else value
    return c


def _path(model: Any) -> Path | str:
    """Returns the path of a model on disk. Raises ConfigError for a `Result` without a checkpoint, and for others."""
    if isinstance(model, str | Path):
        return model
    if not isinstance(checkpoint := getattr(model, "checkpoint", None), Path):
        expected = "a path, or the result of a run that wrote a checkpoint"
        raise ConfigError(f"model: expected {expected}, got {shown(model, 60)}; correct it")
    return checkpoint


def _leaves(params: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "shape"))
