"""Commands that commands print: each is taken as it is printed, and those that take seconds are run."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import convert, distill, fit, generate, plan, train
from test_huggingface import save_tokenizer, write
from test_pages import test_commands_are_taken as check_command

from surojax import launch, new
from surojax.__main__ import VERBS
from surojax.config import flags
from surojax.data.teacher_labels import Teacher
from surojax.planner import aot

STUDENT = """
from surojax.config.flags import load_config

def get_config():
    c = load_config("tiny")
    c.data, c.data_cache, c.tokenizer, c.output_dir = "text.txt", "cache", "tokenizer.json", "student"
    c.max_steps, c.eval_steps, c.sample_tokens, c.gpus, c.sequence_len, c.model.num_hidden_layers = 2, 0, 0, 1, 32, 1
    c.model.vocab_size = 96  # the teacher's
    return c
"""
SMALL = "--config tiny --gpus 1 --output_dir run --data_cache cache --max_steps 2 --eval_steps 0 --sample_tokens 0"
SMALL += " --model.num_hidden_layers 1 --per_device_batch_size 2 --config.sequence_len=32 --save_steps 0"
PRINTED = re.compile(rf"(?:^|[:;] |`)(surojax (?:{'|'.join(VERBS)}) [^\n`;]*)", re.MULTILINE)


def printed_by(capsys, main, line: str) -> list[str]:
    """The commands in what a command prints and writes as a docstring."""
    main(shlex.split(line))
    out = capsys.readouterr().out
    commands = PRINTED.findall(out)
    for command in commands:
        check_command("", command)
    return commands


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(aot, "available", lambda: False)  # estimates, in place of minutes
    return tmp_path


def test_of_new_and_fit(folder, capsys):
    """The config that each writes is planned and trained by what it prints."""
    (made,) = printed_by(capsys, new.main, "mine --model tiny --gpu rtx4090")
    assert made == "surojax train --config mine.py"
    (found,) = printed_by(capsys, fit.main, "--config mine.py --gpu rtx4090")
    assert found == "surojax train --config mine_1xrtx4090.py"
    text = Path("mine.py").read_text()
    inside = re.findall(r"surojax \w+ --config mine\.py[^\n`]*", text)
    assert len(inside) == 3
    for command in inside:
        check_command("", command)
    plan.main(shlex.split(inside[0])[2:])


@pytest.mark.full
def test_of_train_convert_and_launch(folder, capsys):
    """Sample, export and resume, which names one length, as printed."""
    sample, export, resume = printed_by(capsys, train.main, SMALL)
    assert sample == "surojax generate --checkpoint run --prompt TEXT"
    assert export == "surojax convert --checkpoint run --out run/export"
    assert resume.count("max_steps") == 1 and "num_epochs" not in resume and resume.endswith("--config.max_steps=4")
    assert resume.startswith("surojax train --config tiny --gpus 1 ")
    generate.main(shlex.split(sample)[2:])
    convert.main(shlex.split(export)[2:])
    capsys.readouterr()
    (again,) = [line for line in printed_by(capsys, train.main, " ".join(shlex.split(resume)[2:])) if "train" in line]
    assert again.endswith("--config.max_steps=8")
    assert launch.accumulation(shlex.split(again)) >= 1


@pytest.mark.full
def test_of_distill(folder, capsys):
    """What trains on the labels is run with the student's config that it names."""
    save_tokenizer(write(folder / "MODEL", "qwen2") / "tokenizer.json")
    save_tokenizer(folder / "tokenizer.json")
    (folder / "text.txt").write_text("\n\n".join(f"w{i} w{i + 1} " * 40 for i in range(50)))
    line = "--model_path MODEL --data text.txt --config.distill_path=labels --data_cache cache --sequence_len 32"
    line += " --distill_top_k 8"
    (folder / "STUDENT.py").write_text(STUDENT)
    (command,) = printed_by(capsys, distill.main, f"{line} --sample_packing no --model_dtype float32")
    expected = "surojax train --config STUDENT.py --config.objective=distill --config.distill_path=labels"
    assert command == f"{expected} --config.distill_top_k=8"
    train.main(shlex.split(command)[2:])


@pytest.mark.full
def test_of_launch(folder, capfd):
    """Two processes print what one would, behind its number, and resume as two again."""
    processes = "launch -n 2 --devices-per-process 1 -- surojax train"
    line = f"{processes} {SMALL.replace('--gpus 1', '--gpus 2')}"

    def started(words: list[str]) -> list[str]:
        with pytest.raises(SystemExit) as ended:
            launch.main(words[1:])
        assert not ended.value.code
        return PRINTED.findall(capfd.readouterr().out)

    sample, export, resume = started(shlex.split(line))
    assert sample == "surojax generate --checkpoint run --prompt TEXT" and resume.startswith(f"surojax {processes} ")
    check_command("", resume)
    *_, again = started(shlex.split(resume)[1:])
    assert again.endswith("--config.max_steps=8") and len(again) == len(resume)
    convert.main(shlex.split(export)[2:])


def test_a_student_has_the_settings_of_its_labels():
    about = Teacher("a digest", "a teacher", "a tokenizer", 320, 4, 2.0)
    command = distill.student_command(Path("labels"), about)
    assert command[-2:] == ["--config.distill_top_k=4", "--config.distill_temperature=2.0"]
    assert distill.student_command(Path("labels"), about._replace(top_k=64, temperature=1.0)) == command[:-2]
    of_states = about._replace(top_k=0, temperature=0.0, hidden_size=8)
    assert distill.student_command(Path("labels"), of_states)[-1] == "--config.distill_hidden_size=8"


def test_commands_after_nothing_was_left_are_of_the_run_that_has_it(folder):
    """Whose checkpoint `resume_from_checkpoint` named."""
    checkpoint = folder / "a/checkpoints/3"
    checkpoint.mkdir(parents=True)
    c = flags.load_config("tiny")
    result = train.Result(SimpleNamespace(step=3), [], checkpoint, True)
    for c.output_dir, run in (("b", checkpoint), ("a", "a")):
        sample, export, _ = train.further_commands(c, result, ["surojax", "train"], None)
        assert sample == f"sample: surojax generate --checkpoint {run} --prompt TEXT"
        assert export == f"export: surojax convert --checkpoint {run} --out {c.output_dir}/export"


def test_an_export_that_is_there_is_followed_by_another(tmp_path):
    (tmp_path / "out.gguf").touch()
    (tmp_path / "out-2.gguf").touch()
    assert train.free_path(tmp_path / "out.gguf") == tmp_path / "out-3.gguf"
    assert train.without_field(["surojax", "train", "--export", "a", "--lora"], "export") == [
        "surojax",
        "train",
        "--lora",
    ]
