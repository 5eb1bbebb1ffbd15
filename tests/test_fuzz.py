"""Every reader of files and every field and flag, with what nobody would write: no traceback, no hang, nothing written.

Valid files are spoiled at random, by structure (JSON) and by bytes, and read as the commands read them; fields and
flags get values from a list. A case may be accepted, or refused with one line. It may take some seconds of processor
time and some memory, and leave nothing behind. Cases follow from their number, so a failure can be run again:

    python tests/test_fuzz.py --seconds 600 [--first N] [--only NAME]

runs as many more of them as there is time for.
"""

import argparse
import base64
import contextlib
import csv
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from commands import convert, evaluate, fit, generate, plan, train

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import exports
import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import test_adapters
import test_gguf
import test_huggingface
import test_slots
from small import Small
from spoiled import FLAGS, NUMBERS, VALUES, spoil

from surojax import launch, limited, verify
from surojax.assembly import from_config
from surojax.config import checks, flags
from surojax.config.fields import FIELDS, default_config, flat
from surojax.data import __main__ as data_command, corpus, datasets
from surojax.data.conversations import Conversation
from surojax.data.data_rows import NotARow
from surojax.data.datasets import parse_dataset
from surojax.data.examples import Encoder, items
from surojax.data.files import NotText
from surojax.data.rollouts import RolloutEncoder, TokenRoutes
from surojax.data.teacher_labels import Teacher, claim_folder, read_head, read_teacher, write_head
from surojax.data.templates import load_template
from surojax.data.texts import TextFile, text_parts
from surojax.data.tokenizer import ByteTokenizer, load_tokenizer
from surojax.errors import LONGEST, CheckpointError, ConfigError
from surojax.exchange import peft
from surojax.exchange.huggingface import model_fields, read_config
from surojax.exchange.naming import naming_of
from surojax.exchange.sources import KEPT, keeps, open_weights, resolved
from surojax.families import neutral, registry
from surojax.families.family import REQUIRED
from surojax.families.neutral import OFF
from surojax.memory import nvme
from surojax.memory.layer_file import NvmeError
from surojax.pages import runs
from surojax.planner import seen
from surojax.planner.gpus import GPUS
from surojax.planner.prediction import read_trace
from surojax.run import on_disk, trackers
from surojax.run.checkpoint import Checkpoints
from surojax.run.metrics import METRICS_FILE, read_metrics
from surojax.run.restore import check_restorable, restore
from surojax.run.stored import StoredMaster
from surojax.training.evaluation import evaluation_summary
from surojax.training.resume import check_unfinished, goes_on_in_files
from surojax.training.setup import set_up
from surojax.untrusted import read_json

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny.py")
CASES = 60  # of each target and of each verb in the suite
SECONDS = 20.0  # of processor time for a case; that of the child process of `limited` is its own
MEMORY = 3 << 30  # bytes beyond what the process has when a case begins

# -- Files and who reads them -----------------------------------------------------------------------------------------


class Target(NamedTuple):
    """make: writes valid files into a new folder. use: reads them as a command does. known: see `spoil`."""

    make: Callable[[Path], Any]
    use: Callable[[Path], Any]
    known: dict[str, dict[str, Any]] = {}  # noqa: RUF012


TALK = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(case: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        test_huggingface.write(folder / "model", case, shards=2)
        test_huggingface.save_tokenizer(folder / "model" / "tokenizer.json", 30)
        said = {
            "eos_token": "</s>",
            "bos_token": {"content": "<unk>"},
            "chat_template": TEMPLATE,
            "add_bos_token": True,
        }
        (folder / "model" / "tokenizer_config.json").write_text(json.dumps(said))
        (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1], "top_p": 0.9}))
        (folder / "model" / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": None}))

    return make


def use_model(folder: Path) -> None:
    opened = convert.open_model(folder / "model")
    for name in sorted(opened.tensors.names)[:40]:
        opened.tensors.read(name)
    talk(load_tokenizer(str(folder / "model")))


def talk(tokenizer) -> None:
    if template := load_template("", tokenizer):
        with contextlib.suppress(NotARow):
            tokenizer.encode(template.render(TALK, add_generation_prompt=True))
        template.pieces([Conversation(TALK, None)], "assistant")


def use_gguf(folder: Path) -> None:
    opened = convert.open_model(folder / "x.gguf")
    for name in sorted(opened.tensors.names)[:40]:
        opened.tensors.read(name)
    talk(load_tokenizer(str(folder / "x.gguf")))


def make_adapter(folder: Path) -> None:
    test_adapters.save(folder / "adapter", "lora")


_models: dict[str, Any] = {}


def use_adapter(folder: Path) -> None:
    if "lora" not in _models:
        with tempfile.TemporaryDirectory() as base:
            _models["lora"] = test_adapters.base_of(Path(base), "lora").model
    peft.read_adapter(folder / "adapter", _models["lora"])


def make_questions(folder: Path) -> None:
    rows = [{"question": "a?", "choices": ["b", "c"], "answer": 1}] * 3
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))


ROWS = [
    {"messages": TALK, "tools": [{"name": "look"}], "text": "some text", "prompt": "p", "completion": "c"},
    {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "text": "other", "system": "s"},
    {"messages": TALK * 2, "tools": '[{"name": "look"}]', "text": "more", "prompt": "p", "completion": "c"},
]  # fmt: skip


def make_rows(suffix: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        file = folder / f"rows.{suffix}"
        if suffix == "jsonl":
            file.write_text("\n".join(map(json.dumps, ROWS)))
        elif suffix == "json":
            file.write_text(json.dumps(ROWS, indent=1))
        elif suffix == "parquet":
            rows = [{"messages": TALK, "text": "some text", "prompt": "p", "completion": str(i)} for i in range(40)]
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        elif suffix == "csv":
            with file.open("w", newline="") as lines:
                csv.writer(lines).writerows(
                    [["text", "prompt", "completion"], ["a, b", "p\nq", 'c"d'], ["e", "f", "g"]]
                )
        else:
            file.write_text("some text\n" * 50)

    return make


def use_rows(folder: Path) -> None:
    tokenizer = ByteTokenizer()
    template = load_template("chatml", tokenizer)
    for kind in ("auto", "text", "instruction", "conversation"):
        with contextlib.suppress(ConfigError):
            dataset = datasets.resolve(parse_dataset({"path": str(folder), "type": kind}))
            rows = list(datasets.read_dataset(dataset))
            if dataset.type == "text":
                for file in (row.record.get("text") for row in rows if isinstance(row, datasets.DataRow)):
                    if isinstance(file, TextFile):
                        with contextlib.suppress(NotText):
                            list(text_parts(file))
                for _ in corpus.source(str(folder), "text").items(True):
                    pass
            else:
                for item in items(rows):
                    Encoder(dataset, tokenizer, template).encode([item.content])
    datasets.resolve(parse_dataset({"path": str(folder)}))


def make_template(folder: Path) -> None:
    (folder / "t.jinja").write_text(TEMPLATE)


def use_template(folder: Path) -> None:
    template = load_template(str(folder / "t.jinja"), ByteTokenizer())
    assert template
    with contextlib.suppress(NotARow):
        template.render(TALK)
    template.pieces([Conversation(TALK * 2, [{"name": "look"}])], "assistant")


def make_config(folder: Path) -> None:
    (folder / "written.json").write_text(json.dumps(default_config().to_dict()))


def use_config(folder: Path) -> None:
    """A checkpoint's config."""
    found = None
    with contextlib.suppress(OSError, ValueError):  # of a file that does not have its checksum, see run/on_disk.py
        found = read_json(folder / "written.json")
    if isinstance(found, dict):
        checks.check(checks.restored_config(found))


def make_disk(folder: Path) -> None:
    """Files of a state in two slots, and the record of the run that they are of."""
    (folder / "disk").mkdir(exist_ok=True)
    (folder / "own").mkdir(exist_ok=True)
    store = test_slots.opened(folder / "disk")
    test_slots.update(store, 5)
    store.reported({"step": 5, "samples": 20, "samples_per_step": 4, "layers": {"blocks": 2}, "tokenizer": "bytes",
                    "data": "x", "config": {"output_dir": "own", "resume_from_checkpoint": "auto"},
                    "output_dir": "/nowhere/own"})  # fmt: skip
    store.close()
    make_metrics(folder / "own")


def use_disk(folder: Path) -> None:
    store = test_slots.opened(folder / "disk")
    nvme.check_folders(store)
    store.interrupted()
    check_unfinished(store, folder / "other")
    progress = store.kept_progress()
    goes_on_in_files(default_config(), folder / "own", progress, 0)
    store._made = True  # it is not to be made larger or shorter
    if progress and store.path.is_file():
        store.load()
    store.close()


def make_metrics(folder: Path) -> None:
    steps = [{"log": "step", "step": i, "loss": 3.0 / i, "norm": 1.0, "tokens_per_second": 9.0} for i in range(1, 6)]
    evals = [{"log": "eval", "step": i, "loss": 3.0, "perplexity": 20.1, "bits_per_byte": 4.3} for i in (1, 5)]
    (folder / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in (*steps, *evals)))


def use_metrics(folder: Path) -> None:
    with contextlib.suppress(OSError):  # of a file that is none, which commands say with its name
        evaluation_summary(folder)
        read_metrics(folder / METRICS_FILE)
    runs.page([runs.read_run(str(folder))], None, "report")


def make_rates(folder: Path) -> None:
    seen.record(str(folder / "rates.json"), "NVIDIA GeForce RTX 4090", 1.0, 1.2, "key", 1)
    seen.record_rate(str(folder / "rates.json"), "NVIDIA GeForce RTX 4090", "host", 0.5)
    seen.record_disk(str(folder / "rates.json"), "/mnt", seen.DiskRates(1e9, 2e9))


def use_rates(folder: Path) -> None:
    file = str(folder / "rates.json")
    seen.rates_of_disk(file, "/mnt")
    for settings in ("key", "other"):
        seen.corrected(GPUS["rtx4090"], file, settings)


def make_small_files(folder: Path) -> None:
    (folder / KEPT).mkdir(exist_ok=True)
    (folder / KEPT / "source.json").write_text(json.dumps({"model_path": "a/b"}))
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [{"ph": "X", "pid": 0, "ts": 0.5}]}))
    (folder / "trackers.json").write_text(json.dumps({"mlflow": "an-id"}))


def use_small_files(folder: Path) -> None:
    keeps(folder, "a/b")
    with contextlib.suppress(OSError, ValueError):  # which `write_page` says
        read_trace(folder / "trace.json")
    with mock.patch.object(trackers, "write_whole", lambda *_: None), mock.patch.object(Path, "unlink"):
        trackers.start_trackers("", folder, first_step=1, settings={})


def small() -> Small:
    if "small" not in _models:
        _models["small"] = Small()
    return _models["small"]


def make_checkpoint(folder: Path) -> None:
    meta = {"step": 3, "samples": 12, "samples_per_step": 4, "layers": {"blocks": 3}, "tokenizer": "bytes", "data": "x"}
    with Checkpoints(folder / "run", save_total_limit=1) as checkpoints:
        checkpoints.save(small().state, {**meta, "config": default_config().to_dict()})


def use_checkpoint(folder: Path) -> None:
    checkpoint = on_disk.find(folder / "run")
    if checkpoint is None:
        raise Accepted
    meta = on_disk.read_meta_of_run(checkpoint)
    checks.restored_config(meta["config"], on_disk.written_by(meta))
    check_restorable(checkpoint, small().plan, small().run.layers)
    restore(checkpoint, small().plan, small().run.layers)
    master = StoredMaster(checkpoint)
    for l in range(3):
        master.read("blocks.attention.wq", l)


def make_teacher(folder: Path) -> None:
    teacher = Teacher("digest", "a model", "bytes", 8, 0, 0.0, 4, "float32")
    write_head(claim_folder(str(folder / "labels"), teacher), np.ones((8, 4), np.float32))


def use_teacher(folder: Path) -> None:
    read_teacher(str(folder / "labels"))
    read_head(str(folder / "labels"))


def make_rollouts(folder: Path) -> None:
    row = {"prompt_ids": [5, 6], "completion_ids": [[7, 2], [8, 9, 2]], "rewards": [1.0, 0.0]}
    row |= {"logprobs": [[-0.1, -0.3], [-1.2, -0.4, -0.1]]}
    experts = [[[[0, 1], [2, 1]]] * 3, [[[1, 0], [0, 2]]] * 4]  # [tokens - 1][layers][choices] of each completion
    encoded = [base64.b64encode(np.array(x, "<i4").tobytes()).decode() for x in experts]
    rows = [row, row | {"routed_experts": experts}, row | {"routed_experts": encoded}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def use_rollouts(folder: Path) -> None:
    dataset = parse_dataset({"path": str(folder / "rows.jsonl"), "type": "text"})
    for row in datasets.read_dataset(dataset):
        for routes in (None, TokenRoutes(layers=2, choices=2, experts=3, with_experts=(1,))):
            RolloutEncoder(320, routes).item(row)


def without_sums(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Makes a checkpoint whose files are not compared: as one who means harm leaves them."""

    def made(folder: Path) -> None:
        make(folder)
        (on_disk_files,) = folder.rglob(on_disk.FILES)
        on_disk_files.write_text("{}")

    return made


# -- Exports of every family ------------------------------------------------------------------------------------------


def make_export(case: exports.Case) -> Callable[[Path], Any]:
    return lambda folder: exports.make(case, folder)


def keys_of(family: str) -> dict[str, Any]:
    """Keys that a family's config.json may have, and a value of each."""
    of_family = registry.FAMILIES[family]
    required = {key: next(iter(values), None) for key, values in (REQUIRED | of_family.required | OFF).items()}
    text = {key: "full_attention" for key in neutral.READ} | {"text_config": {"model_type": family}}
    return text | required | of_family.defaults | {"architectures": [of_family.classifier]}


# PEFT 0.21's keys that change what an adapter computes.
OF_PEFT: dict[str, Any] = {
    "exclude_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "x", "layer_replication": [[0, 1]],
    "bias": "all", "lora_bias": True, "use_qalora": True, "use_bdlora": {}, "trainable_token_indices": [1],
    "megatron_config": {"a": 1}, "alora_invocation_tokens": [1], "arrow_config": {"a": 1}, "velora_config": {"a": 1},
    "kasa_config": {"a": 1}, "monteclora_config": {"a": 1},
    "ensure_weight_tying": True, "modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 1},
    "alpha_pattern": {"q_proj": 1}, "target_parameters": ["mlp.experts.down_proj"], "use_dora": True,
    "use_rslora": True, "init_lora_weights": "pissa", "fan_in_fan_out": True, "task_type": "SEQ_CLS",
    "auto_mapping": {"base_model_class": "LlamaForSequenceClassification"}, "r": 2, "lora_alpha": 4.0,
    "target_modules": ["q_proj"], "peft_type": "LORA",
}  # fmt: skip


def use_export(path: Path) -> None:
    """As `open_model`, without a tokenizer."""
    c = default_config()
    c.model_path = str(path)
    c = resolved(c)
    c.tokenizer = "bytes"
    checks.check(c)
    weights = open_weights(c, from_config.model(c))
    assert weights is not None
    for name in sorted(weights.names):
        weights.read(name)


def make_adapter_of(case: exports.Case) -> Callable[[Path], Any]:
    """The adapter's folder alone; its base is read once."""

    def make(folder: Path) -> None:
        exports.make(case, folder)
        _models[case.family] = convert.open_model(folder / "base")
        shutil.rmtree(folder / "base")

    return make


def use_adapter_of(folder: Path, case: exports.Case) -> None:
    base = _models[case.family]
    peft.digest(peft.read_adapter(folder / "out", base.model, naming_of(base.config)))


def use_text_config(folder: Path) -> None:
    model_fields(read_config(folder))


def make_text_config(family: registry.ImageTextFamily) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        text = exports.config_of(exports.Case(family.text_types[0], "together", "float32"))
        (folder / "config.json").write_text(json.dumps({"model_type": family.model_type, "text_config": text}))

    return make


def of_families() -> Iterator[tuple[str, str, Target]]:
    """(kind, name, target) of what is exported of each family, and of models with images their config.json."""
    for case in exports.cases():
        family = case.family.split()[0]
        known = {"config.json": keys_of(family), "adapter_config.json": OF_PEFT}
        if case.kind == "adapter":
            use = lambda folder, case=case: use_adapter_of(folder, case)
            yield "adapters of families", f"adapter of {case.family}", Target(make_adapter_of(case), use, known)
        elif case.kind == "gguf":
            use = lambda folder: use_export(folder / "out.gguf")
            yield "GGUF files of families", f"GGUF of {case.family}", Target(make_export(case), use)
        elif case.kind == "float32":
            target = Target(make_export(case), lambda folder: use_export(folder / "out"), known)
            yield "models of families", f"{case.family}, experts {case.layout}", target
    for family in registry.IMAGE_TEXT_FAMILIES.values():
        known = {"config.json": keys_of(family.text_types[0])}
        target = Target(make_text_config(family), use_text_config, known)
        yield "settings of families with images", f"settings of {family.model_type}", target


SUFFIXES = ("jsonl", "json", "parquet", "csv", "txt")
FAMILIES = ("llama", "qwen2", "gemma3", "ministral3", "smollm3")
TARGETS = {
    **{f"model of {case}": Target(make_model(case), use_model) for case in FAMILIES if case in test_huggingface.CASES},
    "gguf": Target(lambda folder: test_gguf.write_file(folder / "x.gguf", "llama"), use_gguf),
    "adapter": Target(make_adapter, use_adapter),
    "questions": Target(make_questions, lambda folder: evaluate.read_questions(folder / "questions.jsonl")),
    **{f"rows in {suffix}": Target(make_rows(suffix), use_rows) for suffix in SUFFIXES},
    "template": Target(make_template, use_template),
    "config of a checkpoint": Target(make_config, use_config),
    "checkpoint": Target(make_checkpoint, use_checkpoint),
    "checkpoint without sums": Target(without_sums(make_checkpoint), use_checkpoint),
    "teacher": Target(make_teacher, use_teacher),
    "rollouts": Target(make_rollouts, use_rollouts),
    "files of a state": Target(make_disk, use_disk),
    "metrics": Target(make_metrics, use_metrics),
    "measured rates": Target(make_rates, use_rates),
    "small files of a run": Target(make_small_files, use_small_files),
}
OF_FAMILIES: dict[str, list[str]] = {}  # the targets of a kind, of which each case has one
for _kind, _name, _target in of_families():
    TARGETS[_name] = _target
    OF_FAMILIES.setdefault(_kind, []).append(_name)


# -- A case and its limits --------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """A case took more processor time than it may."""


class Accepted(BaseException):
    """Nothing was refused before the work would begin."""


@contextlib.contextmanager
def limits():
    def stop(*_):
        raise TooLong

    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)  # a read of a pipe takes no processor time
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def contents(folder: Path) -> dict[str, tuple]:
    """What is in a folder: names, kinds, sizes and times."""
    found = {}
    for place in sorted(folder.rglob("*")):
        stat = place.lstat()
        found[str(place.relative_to(folder))] = stat.st_mode, stat.st_size if place.is_file() else 0, stat.st_mtime_ns
    return found


def run(case: Callable[[], Any], folder: Path, longest: int = LONGEST, may_write: bool = False) -> str:
    """ "" if a case ended as it should, else what happened. folder: nothing may be written there,
    unless `may_write` and nothing was refused.
    """
    before = contents(folder)
    line: Any = None
    done = False
    try:
        with limits(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            case()
        done = True
    except (ConfigError, CheckpointError, NvmeError) as error:
        line = str(error)
    except SystemExit as error:
        line = error.code
    except Accepted:
        pass
    except (Exception, TooLong) as error:
        return "".join(traceback.format_exception(error, limit=-8))[-3000:]
    if isinstance(line, str) and (len(line) > longest or "\n" in line or "Traceback" in line or not line.strip()):
        return f"an error of {len(line)} characters: {line[:500]!r}"
    if contents(folder) != before and not (done and may_write):
        return f"written: {contents(folder).keys() ^ before.keys() or 'a file changed'} ({line})"
    return ""


_made: dict[str, dict[Path, bytes]] = {}


def make(name: str, folder: Path) -> None:
    """Writes the valid files of a target."""
    if name not in _made:
        TARGETS[name].make(folder)
        _made[name] = {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    for path, content in _made[name].items():
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).write_bytes(content)


def run_file(name: str, number: int, folder: Path) -> str:
    """A case of a target; see `run`."""
    r = random.Random(f"{name} {number}")
    target = TARGETS[name]
    make(name, folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    spoil(r.choice(files), r, target.known)
    return run(lambda: target.use(folder), folder)


# -- Fields and flags -------------------------------------------------------------------------------------------------


def use_fields(r: random.Random) -> None:
    """A config with some fields set to what they would not be."""
    c = default_config()
    c.update({"per_device_batch_size": 2, "sequence_len": 64})
    c.model.update({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2})
    c.model.update({"intermediate_size": 128, "vocab_size": 320})
    names = list(flat(c))
    overrides = []
    for _ in range(r.choice((1, 1, 2, 3))):
        name = r.choice(names)
        choices = [str(choice) for choice in FIELDS[name].choices]
        values = NUMBERS if isinstance(flat(c)[name], int | float) and r.random() < 0.8 else FLAGS
        overrides.append((name, r.choice([*values, *choices * 5])))
    for name, text in overrides:
        flags.override(c, name, text)
    if r.random() < 0.2:
        entry = {"path": "x.jsonl"}
        names = [*datasets.Dataset.__dataclass_fields__, "name", "field", "message_property_mappings"]
        for _ in range(2):
            entry[r.choice(names)] = r.choice(VALUES)
        c.datasets = (entry,)
    set_up(c)


MODULES = {
    "train": train, "plan": plan, "fit": fit, "verify": verify, "generate": generate, "evaluate": evaluate,
    "convert": convert, "launch": launch, "data": data_command,
}  # fmt: skip
BEFORE = {
    **{name: ["--config", TINY] for name in ("train", "plan", "fit", "verify", "data")},
    "generate": ["--checkpoint", "model"],
    "evaluate": ["--checkpoint", "model", "--questions", "questions.jsonl"],
    "convert": ["--checkpoint", "model", "--out", "out"],
    "launch": ["-n", "2"],
}
for _name in ("plan", "fit"):
    BEFORE[_name] += ["--gpu", "rtx4090", "--config.gpus=2"]


def options_of(verb: str) -> list[str]:
    """The flags that a verb's --help names."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main_of(verb)(["--help"])
    found = re.findall(r"^  (--?[a-z][\w-]*)", printed.getvalue().split("fields (")[0], re.MULTILINE)
    found += re.findall(r"^  -\w, (--[\w-]+)", printed.getvalue(), re.MULTILINE)
    return sorted({*found} - {"-h", "--help", "--list"})


def main_of(verb: str) -> Callable:
    module = sys.modules[f"surojax.{verb}"] if verb != "data" else data_command
    return module.main


def accept(*_, **__):
    raise Accepted


def run_verb(verb: str, number: int, folder: Path) -> str:
    """A case of a command line: some flags with values, and a field sometimes; it ends where work would begin."""
    r = random.Random(f"{verb} {number}")
    options = options_of(verb)
    (folder / "text.txt").write_text("The quick brown fox.\n" * 400)
    if verb in ("generate", "evaluate", "convert"):
        make("model of llama", folder)
        make("questions", folder)
    arguments = list(BEFORE[verb])
    for _ in range(r.choice((1, 1, 2))):
        option = r.choice(options)
        value = r.choice(NUMBERS if r.random() < 0.7 else FLAGS)
        arguments += [f"{option}={value}"] if r.random() < 0.5 else [option, value]
    if "--config" in BEFORE[verb]:
        arguments += ["--config.output_dir=out", "--config.data=text.txt"]
    if verb == "launch":
        arguments += ["--", "true"]
    work = [
        mock.patch.object(jax.stages.Lowered, "compile", accept),
        mock.patch.object(launch, "supervise", accept),
        mock.patch.object(convert, "export", accept),
        mock.patch.object(convert.parity, "compare_with_transformers", accept),
        mock.patch.object(sys.modules["surojax.fit"], "fastest", accept),
        mock.patch("surojax.planner.run_plan._compiled", accept),
        mock.patch("surojax.planner.run_plan._estimated", accept),
        mock.patch("surojax.data.prepare.cached", accept),
        mock.patch.object(sys, "stdin", io.StringIO("Hello\n")),  # what `generate` without a prompt reads
    ]
    with contextlib.ExitStack() as stack:
        for patch in work:
            stack.enter_context(patch)
        stack.enter_context(contextlib.chdir(folder))
        found = run(lambda: main_of(verb)(arguments), folder, LONGEST + len("".join(arguments)), may_write=True)
    return found and f"{arguments}\n{found}"


def run_fields(number: int, folder: Path) -> str:
    """A case of a config."""
    with contextlib.chdir(folder):
        return run(lambda: use_fields(random.Random(f"fields {number}")), folder)


KINDS: dict[str, Callable[[int, Path], str]] = {
    **{
        name: lambda number, folder, name=name: run_file(name, number, folder)
        for name in TARGETS
        if not any(name in names for names in OF_FAMILIES.values())
    },
    **{
        kind: lambda number, folder, names=names: run_file(names[number % len(names)], number, folder)
        for kind, names in OF_FAMILIES.items()
    },
    "fields": run_fields,
    **{f"flags of {verb}": lambda number, folder, verb=verb: run_verb(verb, number, folder) for verb in MODULES},
}


def failures(kind: str, numbers: range, until: float = float("inf")) -> Iterator[str]:
    """Runs cases of a kind, and yields what went wrong."""
    for number in numbers:
        if time.monotonic() > until:
            return
        with tempfile.TemporaryDirectory(prefix="surojax-fuzz-") as folder:
            if found := KINDS[kind](number, Path(folder)):
                yield f"{kind}, case {number}: {found}"


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    monkeypatch.setattr(limited, "SECONDS", 2)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_no_traceback_no_hang_nothing_written(kind):
    found = next(failures(kind, range(CASES)), "")
    assert not found, found


def main() -> None:
    """Runs cases for some time, and prints what went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="time to run")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=20, help="cases of a kind in turn")
    parser.add_argument("--only", default="", help="kinds whose name has this in it")
    args = parser.parse_args()
    limited.SECONDS = 2
    until = time.monotonic() + args.seconds
    first = args.first
    done: dict[str, float] = {}
    while time.monotonic() < until:
        for kind in (kind for kind in KINDS if args.only in kind):
            start = time.process_time()
            print(f"{kind} from {first}", file=sys.stderr, flush=True)
            for line in failures(kind, range(first, first + args.count), until):
                print(line, flush=True)
            done[kind] = done.get(kind, 0) + time.process_time() - start
        first += args.count
    print(f"cases {args.first} to {first}; " + ", ".join(f"{kind} {seconds:.0f} s" for kind, seconds in done.items()))


if __name__ == "__main__":
    main()
