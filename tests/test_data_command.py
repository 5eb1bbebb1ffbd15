"""`surojax data`: what it prepares and shows is what a run begins with."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from surojax import default_config
from surojax.data import __main__ as command
from surojax.data.__main__ import first_samples, main, prepare
from surojax.data.batches import training_batches
from surojax.data.run_data import SETTINGS, Settings, load_data, parse_entries
from surojax.data.show import sample_table
from surojax.data.tokenizer import ByteTokenizer
from surojax.errors import ends_with_code


@pytest.fixture
def config(tmp_path):
    c = default_config()
    c.model.vocab_size = 320
    c.sequence_len = 64
    rows = [{"prompt": f"What is {i}?", "completion": f"It is {i}."} for i in range(300)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    c.datasets = (dict(path=str(tmp_path / "rows.jsonl")),)
    c.data_cache = str(tmp_path / "cache")
    c.sample_packing = True
    return c


def test_the_samples_shown_are_the_runs_first(config):
    prepared, tokenizer = prepare(config)
    shown = list(first_samples(prepared, tokenizer, rows=2, seed=config.seed, color=False))
    settings = Settings(**{name: config[name] for name in SETTINGS})
    found = load_data(
        parse_entries(config.datasets, ()), settings, ByteTokenizer(), eval_batch_size=1, say=lambda line: None
    )
    stream = training_batches(found.train, batch_size=2, accumulation=1, seed=config.seed)
    with contextlib.closing(stream):
        batch = next(stream)
    samples = [batch[name][0] for name in ("inputs", "labels", "starts")]
    assert shown == list(sample_table(*samples, ByteTokenizer(), color=False))
    assert not np.array_equal(*batch["inputs"][0, :2])
    every = list(first_samples(prepared, tokenizer, rows=10**6, seed=config.seed, color=False))
    assert sum(line.startswith("row ") for line in every) == len(found.train) < 10**6


def test_samples_that_are_no_batch_are_said(config, capsys):
    """Of the sequences that all GPUs take together; two of them share one with cp_size=2."""
    config.update({"gpus": 8, "per_device_batch_size": 50})
    prepared, _ = prepare(config)
    few = len(prepared.train.all)
    assert f"{few:,} samples are fewer than the 400 of a batch, which `train` refuses" in capsys.readouterr().out
    config.update({"cp_size": 2, "per_device_batch_size": few // 4})
    prepare(config)
    assert "fewer" not in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_that_lacks_letters_shows_their_codes(monkeypatch, encoding):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    ends_with_code(lambda: print("data: \u65e5.jsonl"))
    terminal.seek(0)
    assert terminal.read() == f"data: {'\u65e5' if encoding == 'utf-8' else '\\u65e5'}.jsonl\n"


def test_the_command_prepares(tmp_path, capsys):
    file = tmp_path / "config.py"
    body = "    c = default_config()\n    c.model.vocab_size = 320\n    return c\n"
    file.write_text(f"from surojax import default_config\n\n\ndef get_config():\n{body}")
    (tmp_path / "text.txt").write_text("a line of text\n" * 400)
    data = [f"--config.data={tmp_path}/text.txt", f"--config.data_cache={tmp_path}/cache", "--config.sequence_len=16"]
    main(["--config", str(file), *data])
    first = capsys.readouterr().out
    assert "into the cache" in first and "tokens for training" in first and "position" not in first
    main(["--config", str(file), *data, "--debug", "1"])
    assert "from the cache" in (again := capsys.readouterr().out) and "row 0: " in again
    for wrong, message in (
        (["--debug", "-1"], "--debug: expected a number of samples, got -1"),
        (["--config.model.vocab_size=100"], "model.vocab_size: expected at least 257"),
        (["--config.model.vocab_size=1025"], "tokenizer: expected the tokenizer of a vocabulary of 1025, got 'bytes'"),
        (["--config.data="], "data: expected files to train on, got none"),
        ([f"--config.data={tmp_path}/nowhere"], "nowhere: expected a file"),
        (["--config.sequence_len=8192", "--debug", "2"], "expected at least 8,193 tokens for one step"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["--config", str(file), *data, *wrong])
        assert message in str(end.value) and "\n" not in str(end.value)


def test_lines_reach_a_pipe_before_the_command_ends(config, monkeypatch):
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe))
    prepare(config)
    assert b"into the cache" in pipe.getvalue()


def interrupted(c):
    raise KeyboardInterrupt


def test_ctrl_c_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "prepare", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["--config", str(Path(__file__).parents[1] / "configs/tiny.py")])
    assert end.value.code == 130
    assert capsys.readouterr().err == "surojax.data: stopped; data that was not finished is tokenised anew\n"


@pytest.mark.full
def test_a_reader_that_has_enough_is_no_error(tmp_path):
    (tmp_path / "text.txt").write_text("a line of text\n" * 4000)
    root = Path(__file__).parents[1]
    options = [f"--config.data={tmp_path}/text.txt", f"--config.data_cache={tmp_path}/cache", "--debug=99"]
    arguments = ["--config", str(root / "configs/tiny.py"), *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "surojax.data", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0
