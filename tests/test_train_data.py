"""A run on datasets: packed, mixed by weight, evaluated on several sets, stopped and continued."""

import argparse
import importlib
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from surojax import CheckpointError, ConfigError, default_config, read_metrics, train
from surojax.config import checks, flags
from surojax.data.entries import Corpus
from surojax.data.tokenizer import ByteTokenizer
from surojax.run import on_disk
from surojax.run.metrics import TIMINGS
from surojax.training import run_summary, start as training_start
from surojax.training.evaluation import evaluation_summary

module = importlib.import_module("surojax.train")  # `surojax.train` is the function


def rows(path: Path, count: int, sign: str) -> str:
    """Questions about sums or products, with answers."""
    value = {"+": lambda i: i + i, "*": lambda i: i * i}[sign]
    text = (json.dumps({"prompt": f"{i} {sign} {i} = ", "completion": f"{value(i)}"}) + "\n" for i in range(count))
    path.write_text("".join(text))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows(folder / "sums.jsonl", 60, "+")
    rows(folder / "products.jsonl", 90, "*")
    rows(folder / "more.jsonl", 10, "+")
    return folder


def config_of(files: Path, output_dir: Path):
    c = default_config()
    c.output_dir = str(output_dir)
    c.datasets = [
        dict(path=str(files / "sums.jsonl"), weight=2),
        dict(path=str(files / "products.jsonl"), weight=1),
    ]
    c.validation_datasets = [dict(path=str(files / "more.jsonl"), name="new"), dict(path=str(files / "sums.jsonl"))]
    c.sample_packing = True
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 320, 32, 64
    c.model.num_hidden_layers, c.model.num_attention_heads, c.model.num_key_value_heads = 2, 2, 1
    c.model_dtype, c.sequence_len, c.per_device_batch_size = "float32", 32, 4
    c.max_steps, c.learning_rate, c.eval_steps, c.eval_batches, c.save_steps = 6, 1e-2, 3, 2, 2
    c.save_total_limit, c.sample_tokens = 9, 5
    return c


@pytest.fixture(scope="module")
def whole(tmp_path_factory, files) -> Path:
    """The output folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(config_of(files, folder)).finished
    return folder


def records(folder: Path) -> list[dict]:
    return [{k: v for k, v in r.items() if k not in TIMINGS} for r in read_metrics(folder / "metrics.jsonl")]


def killed_after(whole: Path, step: int, folder: Path) -> None:
    shutil.copytree(whole, folder)
    for path in on_disk.steps_in(folder / "checkpoints"):
        if int(path.name) > step:
            shutil.rmtree(path)


@pytest.mark.full
def test_each_set_is_evaluated_under_its_name(whole):
    evals = [r for r in records(whole) if r["log"] == "eval"]
    assert [(r["step"], r["name"]) for r in evals] == [(3, "new"), (3, "sums"), (6, "new"), (6, "sums")]
    assert all("bits_per_byte" not in r and r["perplexity"] == math.exp(r["loss"]) for r in evals)
    assert evals[3]["loss"] < evals[1]["loss"] < math.log(320) and evals[0]["loss"] != evals[1]["loss"]
    summary = evaluation_summary(whole).splitlines()
    assert summary[0].startswith(
        f"evaluation of new over 25 tokens: loss {evals[0]['loss']:.4f} -> {evals[2]['loss']:.4f}, perplexity"
    )
    assert re.match(r"evaluation of sums over \d+ tokens: ", summary[1]) and summary[1].endswith("(steps 3 -> 6)")


@pytest.mark.full
@pytest.mark.parametrize("step", [2, 4])
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(whole, files, tmp_path, step, capsys):
    """To the bit, and from the cache. The entries come back from the checkpoint's JSON as they were."""
    killed_after(whole, step, tmp_path / "run")
    assert train(config_of(files, tmp_path / "run")).finished
    assert records(tmp_path / "run") == records(whole)
    printed = capsys.readouterr().out
    assert "changed settings" not in printed and "into the cache" not in printed
    assert printed.count(" tokens from the cache ") == 4
    # Rows hold several questions; of 3 rows, 2 are sums, whatever there is of each.
    assert "; evaluated on new, sums; an epoch has " in printed and "held out" not in printed and "padding" in printed


@pytest.mark.full
def test_with_another_split_of_the_batch_the_samples_are_the_same(whole, files, tmp_path):
    """Two microbatches of two samples; 1e-5: order of float32 sums."""
    killed_after(whole, 2, tmp_path / "run")
    c = config_of(files, tmp_path / "run")
    c.per_device_batch_size, c.gradient_accumulation_steps = 2, 2
    train(c)
    steps = [[r["loss"] for r in records(folder) if r["log"] == "step"] for folder in (whole, tmp_path / "run")]
    assert steps[1] == pytest.approx(steps[0], rel=1e-5)


@pytest.mark.full
def test_a_checkpoint_of_other_data_is_refused(whole, files, tmp_path):
    killed_after(whole, 2, tmp_path / "run")
    changes = {
        "sample_packing": (False, "sample_packing is True there and False here"),
        "train_on": ("all", "data is '[0-9a-f]{16}' there and '[0-9a-f]{16}' here"),
        "datasets": ([dict(path=str(files / "sums.jsonl"))], "data is '[0-9a-f]{16}' there"),
    }
    for name, (value, message) in changes.items():
        c = config_of(files, tmp_path / "run")
        c[name] = value
        with pytest.raises(CheckpointError, match=message):
            train(c)


def test_a_tokenizer_larger_than_the_embedding(files, tmp_path):
    c = config_of(files, tmp_path / "run")
    c.model.vocab_size = 256
    with pytest.raises(ConfigError, match=r"model\.vocab_size: expected at least 257 \(of bytes\), got 256; raise it"):
        train(c)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "done, steps",
    [
        ({"step": 0, "samples": 0}, 2 * 150 // 4),
        ({"step": 20, "samples": 40}, 20 + (2 * 150 - 40) // 4),
        ({"step": 20, "samples": 41}, 20 + 65),  # 259 remain: 64 steps, and one for three of them
        ({"step": 75, "samples": 300}, 75),
        ({"step": 60, "samples": 303}, 60),
    ],
)
def test_an_epoch_of_datasets_is_all_their_samples(files, tmp_path, monkeypatch, done, steps):
    """2 epochs of 60 + 90 questions, one in a row, 4 rows a step; also after steps of another batch size."""
    monkeypatch.setattr(training_start, "find_resume", lambda *arguments: tmp_path if done["step"] else None)
    monkeypatch.setattr(on_disk, "read_meta_of_run", lambda path: done)
    c = config_of(files, tmp_path / "run")
    c.max_steps, c.num_epochs, c.sample_packing, c.chat_template = 0, 2, False, ""
    c.datasets = [dict(path=str(files / "sums.jsonl")), dict(path=str(files / "products.jsonl"))]
    planned = []

    def stop(config, total_steps):
        planned.append(total_steps)
        raise ConfigError("enough")

    monkeypatch.setattr(training_start, "check_schedule", stop)
    with pytest.raises(ConfigError, match="enough"):
        train(c)
    assert planned == [steps]


@pytest.mark.parametrize(
    ("last", "num_epochs", "max_steps", "said"),
    [
        (12, 1, 0, "the last step is filled with 1 of the next epoch's samples"),
        (24, 2, 0, "the last step is filled with 2 of the next epoch's samples"),
        (11, 1, 0, ""),
        (8, 1, 2, "8 of 11 samples are trained on in max_steps=2; max_steps=0 trains on all"),
        (12, 1, 3, ""),
        (11, 1, 3, ""),
    ],
)
def test_samples_of_an_incomplete_epoch_are_said(last, num_epochs, max_steps, said):
    assert training_start.samples_line(last, 11, num_epochs, max_steps) == said


@pytest.mark.parametrize(
    ("samples", "changes", "fits"),
    [
        (64, {}, 16),  # a full step
        (63, {}, 1),
        (239, {"gradient_accumulation_steps": 64}, 5),  # 59 batches: 11 steps an epoch
        (4, {}, 1),
        (3, {}, 16),  # no batch: refused
        (63, {"microbatches_per_fetch": 2}, 16),
        (63, {"pp_size": 2}, 16),
    ],
)
def test_few_samples_make_smaller_steps(capsys, samples, changes, fits):
    c = default_config()
    c.gradient_accumulation_steps = 16
    c.update(changes)
    before = c.to_dict()
    found = training_start.with_smaller_steps(c, samples, batch_size=4)
    assert found.gradient_accumulation_steps == fits and c.to_dict() == before
    said = capsys.readouterr().out
    assert (f"{samples} samples are fewer than" in said) == (found is not c)
    assert found is c or f"gradient_accumulation_steps is {fits} in this run" in said


@pytest.mark.parametrize(
    ("total_steps", "samples", "changes", "line"),
    [
        (
            28,
            11,
            {},
            "epochs of 2 steps are short: --gradient_accumulation_steps 1 makes 11 steps of each, with as much",
        ),
        (
            28,
            39,
            {"gradient_accumulation_steps": 8},
            "epochs of 4 steps are short: --gradient_accumulation_steps 3 makes 13 steps",
        ),
        (9, 7, {}, "epochs of 1 step are short: --gradient_accumulation_steps 1 makes 7 steps"),
        (99, 11, {}, "epochs of 2 steps"),
        (100, 11, {}, None),
        (40, 40, {}, None),
        (19, 40, {"num_epochs": 2}, "19 steps are few to learn from: --num_epochs 4 takes 20 or more"),
        (20, 40, {}, None),
        (19, 11, {"gradient_accumulation_steps": 1}, "19 steps are few"),
        (19, 11, {"microbatches_per_fetch": 2}, "19 steps are few"),
    ],
)
def test_a_run_of_few_steps_is_told_how_to_take_more(total_steps, samples, changes, line):
    c = default_config()
    c.gradient_accumulation_steps = 4
    c.update(changes)
    found = training_start.few_steps_line(c, total_steps, samples, batch_size=1)
    assert re.match(line, found) if line else found == ""


@pytest.mark.parametrize(
    ("trained", "offsets", "expected"),
    [
        (None, None, [9, *range(64)]),  # text: its beginning, as a document
        ([0, 0, 0, 1, 1, 0, 0, 1, 1, 0], [0, 5, 10], [0, 1, 2]),  # a question and its template, without the answer
        ([1, 1, 0, 0, 0, 0, 0, 1, 1, 0], [0, 2, 10], [2, 3, 4, 5, 6]),  # an example without a question is passed over
        ([1, 1, 0, 0, 0, 0, 0, 0, 0, 0], [0, 2, 10], [9, *range(10)]),  # no question has an answer
        ([0] * 513 + [1, 0, 1], [0, 514, 516], [514]),  # a question longer than LONGEST_PROMPT is passed over
    ],
)
def test_what_is_sampled_from_at_the_end(trained, offsets, expected):
    class Numbers(ByteTokenizer):
        bos_id, adds_bos = 9, True

        def decode(self, ids):
            return "".join(map(chr, ids))

        def encode(self, text):
            return np.array([ord(x) for x in text])

    tokens = np.arange(100 if trained is None else len(trained))
    held_out = Corpus(tokens, 0, "", "", offsets and np.array(offsets), trained and np.array(trained, bool))
    assert run_summary.held_out_prompt(held_out, Numbers()).tolist() == expected


# --- settings that contradict each other -----------------------------------------------------------------------------

ENTRY = [{"path": "a.jsonl"}]
REFUSED = [
    ({"datasets": ENTRY, "data": "b.txt"}, "data: expected '' beside datasets, got 'b.txt'; leave one of them"),
    ({"datasets": ENTRY, "eval_data": "b.txt"}, "eval_data: expected '' beside datasets, got 'b.txt'"),
    ({"datasets": ENTRY, "text_field": "body"}, "text_field: expected 'text' beside datasets, got 'body'"),
    ({"datasets": ["a.jsonl"]}, r"datasets\[0\]: expected a dict, got 'a.jsonl'; write dict\(path=...\)"),
    ({"on_bad_row": "skip"}, "on_bad_row: expected 'error' without rows of instructions or"),
    ({"train_on": "all"}, "train_on: expected 'assistant' without rows of"),
    ({"chat_template": "chatml"}, "chat_template: expected '' without rows of"),
    ({"system_prompt": "x"}, "system_prompt: expected '' without rows of"),
    ({"on_long": "drop"}, "on_long: expected 'cut' without sample_packing and such rows"),
    ({"on_long": "split"}, "on_long: expected one of cut, drop, got 'split'"),
    ({"data_cache": " "}, "data_cache: expected text that is not empty"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_settings_that_are_not_used_or_contradict_each_other(changes, message):
    c = default_config()
    for name, value in changes.items():
        c[name] = value
    with pytest.raises(ConfigError, match=f"^{message}"):
        checks.check(c)


def test_entries_survive_the_json_of_a_checkpoint(files, tmp_path):
    c = config_of(files, tmp_path)
    again = checks.restored_config(json.loads(json.dumps(c.to_dict())))
    assert again.to_dict() == c.to_dict() and isinstance(again.datasets[0], dict)
    old = c.to_dict()
    for name in ("datasets", "validation_datasets", "data_cache", "sample_packing", "on_long", "on_bad_row"):
        del old[name]  # of a version that did not have them
    assert checks.restored_config(old).datasets == ()


def test_a_list_is_set_as_json_or_in_a_file(tmp_path):
    config = tmp_path / "config.py"
    config.write_text("from surojax import default_config as get_config\n")
    list_of = lambda text: flags.parse_flags(["--config", str(config), *text], argparse.ArgumentParser())[0].datasets
    entries = [{"path": ["a.jsonl", "b"], "weight": 2}, {"path": "c", "type": "text", "weight": 1}]
    assert list_of([f"--config.datasets={json.dumps(entries)}"]) == tuple(entries) and list_of([]) == ()
    for text in ("=a.jsonl", "", "={}", '=["a"]', "=" + "[" * 99999):
        with pytest.raises(ConfigError, match=r"^--config\.datasets: expected a JSON list of objects, got ") as error:
            list_of([f"--config.datasets{text}"])
        assert len(str(error.value)) < 300
    config.write_text(
        "from surojax import default_config\n\ndef get_config():\n    c = default_config()\n"
        "    c.datasets = dict(path='a.jsonl')\n    return c\n"
    )
    with pytest.raises(ConfigError, match=r"config\.py:5: .*datasets.*list"):
        flags.load_config(str(config))
