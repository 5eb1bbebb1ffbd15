"""The command `surojax VERB`, configs by name, shell completion, and what a wheel holds."""

import ast
import errno
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import surojax
from surojax import __main__ as command, command_line, completion, launch, new, option_names
from surojax.config import flags
from surojax.convert import merge_parser
from surojax.errors import REFUSED, ConfigError, Refused

ROOT = Path(__file__).parents[1]
EXAMPLES = [(name, line) for name, verb in command.VERBS.items() for line in verb.examples]


def said(monkeypatch, capsys, *words: str) -> tuple[int | str | None, str, str]:
    """What the command line ends with, and prints to standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["surojax", *words])
    code = None
    try:
        command.main()
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    return code, out, err


def test_every_verb_is_a_module_and_every_module_of_a_command_a_verb():
    modules = {file.stem for file in (ROOT / "surojax").glob("*.py") if "ends_with_code(main)" in file.read_text()}
    modules |= {"train"}  # ended_at_once(functools.partial(ends_with_code, main))
    assert modules - {"errors"} | {"data"} == set(command.VERBS)


def test_the_overview_has_every_verb(monkeypatch, capsys):
    for words in ([], ["--help"]):
        code, out, err = said(monkeypatch, capsys, *words)
        assert not code and not err and all(f"  {name} " in out for name in command.VERBS)


def test_help_with_a_verb_is_the_help_of_the_verb(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(command, "run_verb", lambda *what: ran.append(what))
    for words in (["help", "train"], ["train", "--help"]):
        said(monkeypatch, capsys, *words)
    assert ran == 2 * [("train", ["--help"])]


def test_a_reader_that_has_ended_is_no_error():
    """As in `surojax --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-m", "surojax", "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("words", [["--version"], ["train", "--help"]])
def test_a_full_disk_under_the_output_is_one_line(words):
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-m", "surojax", *words], stdout=full, stderr=subprocess.PIPE)
    wanted = f"surojax: error: could not write the output ({os.strerror(errno.ENOSPC)})\n"
    assert (ended.returncode, ended.stderr.decode()) == (1, wanted)


def test_closed_streams_are_opened():
    """As services may have them; the next file that is opened would get what libraries print."""
    code = "from surojax import __main__ as m; m.open_closed_streams(); m.sys.argv[1:] = ['--version']; m.main(); "
    code += "import os; assert os.open('/', os.O_RDONLY) > 2"
    script = f"exec {shlex.join([sys.executable, '-c', code])} <&- >&-"
    ended = subprocess.run(["sh", "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("word, meant", [("trian", "train"), ("evalute", "evaluate"), ("x", ""), ("--trian", "train")])
def test_an_unknown_verb_is_one_line(monkeypatch, capsys, word, meant):
    code, out, err = said(monkeypatch, capsys, word)
    hint = f"did you mean surojax {meant}?" if meant else "see surojax --help"
    assert code == REFUSED and not out and err.endswith(f"got {word!r}; {hint}\n") and err.count("\n") == 1


LIGHT = """
import contextlib, io, sys
from surojax.__main__ import main
for line in sys.stdin:
    sys.argv[1:] = line.split()
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    heavy = [name for name in sys.modules if name in ("jax", "flax", "shtab", "ml_collections")]
    print(repr((code or 0, out.getvalue(), err.getvalue(), heavy)))
"""


def test_what_needs_no_jax_loads_none():
    """The version, every verb's help, and what is refused in one line whatever the files hold that it names."""
    refused = {
        "train --confg tiny": "unknown option '--confg': fields are set with --FIELD=VALUE; did you mean --config?",
        "train --config tiny --learnig-rate 1": "'--learnig-rate': fields are set .*; did you mean --learning_rate?",
        "plan --config tiny --gpuu h100": "unknown option '--gpuu': .*; did you mean --gpu?",
        "fit --config.zero_levl=3": "config has no field 'zero_levl': did you mean 'zero_level'?",
        "new mine --modl x": "unknown option '--modl': .*; did you mean --model?",
        "generate --prompts x": "unknown option '--prompts'; did you mean --prompt?",
        "convert --checkpoint x --outt y": "unknown option '--outt'; did you mean --out?",
        "launch -n 2 --restart-s 3 -- surojax": "unknown option '--restart-s'; did you mean --restarts?",
        "launch -n 2": "expected -- and a command behind the options",
        "launch -n two -- surojax train": "argument -n: invalid int value: 'two'",
        "train": "no config given: pass --config NAME or FILE",
        "train tiny": "unknown option 'tiny': fields are set with --FIELD=VALUE; did you mean --config tiny?",
        "train --config tiny --config=llama1b": "--config: expected one config, got 2",
        "generate --checkpoint a/b c": "unrecognized arguments: c",
        "train --config tniy": "got 'tniy'; did you mean tiny?",
        "train --config nothing.py": "expected a Python file with get_config(), got 'nothing.py' (nothing there)",
        "train --config tiny --lr abc": "--config.learning_rate: expected a number, got 'abc'",
        "train --config tiny --config.learning_rate=-1": "learning_rate: expected more than 0 in float32, got -1.0",
        "train --config tiny --config.adamw_beta2=1": "adamw_beta2: expected 0 or more and below 1 in float32, got 1.0",
        "train --config tiny --optimizer adam": "expected one of .*, got 'adam'; did you mean 'adamw'?",
        "train --config tiny --dp_shard_size 0": "dp_shard_size: expected 1 or more, or -1, got 0",
        "train --config tiny --report_to wandb,wandb": "report_to: expected a comma list of",
        "train --config tiny --data no/*.jsonl": "no/*.jsonl: expected a file, a folder or a glob that matches",
        "train --model_path ./nothing": "model_path: expected a folder with config.json, got './nothing' (No such file",
        "train --model_path a/b --lora": "data: expected files to train on, got none",
        "data --config tiny --debug x": "argument --debug: invalid int value: 'x'",
        "plan --config tiny": "no GPU given: pass --gpu NAME; known are",
        "fit --config tiny --gpu rtx4091": "got 'rtx4091'; did you mean rtx4090?",
        "new mine --gpu h100": "the following arguments are required: --model",
        "generate": "the following arguments are required: --checkpoint",
        "generate --checkpoint nothing": "--checkpoint: expected a checkpoint, .*, got 'nothing' (No such file",
        "evaluate --checkpoint x/y": "one of the arguments --questions --tasks is required",
        "convert --dtype": "argument --dtype: expected one argument",
        "convert merge base": "the following arguments are required: ADAPTER, PATH",
        "report nothing": "RUN: expected the folder of a run, with metrics.jsonl, got 'nothing' (No such file",
        "completion tcsh": "invalid choice: 'tcsh'",
    }
    helps = [*(f"{verb} --help" for verb in command.VERBS), "train --config tiny --help fields", "help plan"]
    lines = ["--version", "--help", *helps, *refused]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    said = dict(zip(lines, map(ast.literal_eval, done.stdout.splitlines()), strict=True))
    assert [line for line, (*_, heavy) in said.items() if heavy] == []
    assert said["--version"][1].startswith(f"surojax {surojax.__version__} (jax ")
    for line in helps:
        assert said[line][0] == 0 and len(said[line][1]) > 200 and not said[line][2], line
    assert "--config.opt_v_dtype=" in said["train --config tiny --help fields"][1]
    for line, error in refused.items():
        code, out, err, _ = said[line]
        expected = re.escape(error).replace(r"\.\*", ".*")
        assert code == REFUSED and not out and err.count("\n") == 1 and re.search(expected, err), (line, err)


def test_a_python_that_is_too_old_is_one_line():
    code = "import sys; sys.argv = ['/a/bin/surojax', 'train']; sys.version_info = (3, 11, 4); import surojax"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.startswith("surojax: error: expected Python 3.12 or newer, got 3.11")
    assert done.stderr.count("\n") == 1


def test_a_verb_runs_as_its_module_does(monkeypatch):
    """With the same help, to which examples are added, and the same end of a refused command line."""
    monkeypatch.setenv("COLUMNS", "80")
    helped, refused = (
        subprocess.run([sys.executable, "-m", "surojax", "generate", *words], capture_output=True, text=True, cwd=ROOT)
        for words in (["--help"], ["--checkpoint", "x", "--seed", "y"])
    )
    assert helped.returncode == 0
    assert helped.stdout == f"{option_names.read_stored()['verbs']['generate']['help']}{command.examples('generate')}\n"
    assert refused.returncode == REFUSED and refused.stderr.startswith("surojax.generate: error: ")


@pytest.mark.parametrize("name, line", EXAMPLES, ids=lambda x: x[:40])
def test_examples_are_command_lines_that_the_verb_takes(name, line):
    words = shlex.split(line.partition(" > ")[0])
    if name == "launch":
        assert launch.accumulation(words[words.index("--") + 1 :]) == 1
        words = words[: words.index("--")]
    if name in completion.OF_CONFIG:
        words = [word.replace("MODEL", "") for word in words]
        flags.parse_flags(words, completion.own_parser(name))
    elif words[0] == "merge":
        merge_parser().parse_args(words[1:])
    else:
        completion.own_parser(name).parse_args(words)


# -- Configs by name --------------------------------------------------------------------------------------------------


def test_a_config_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert flags.load_config("llama7b") == flags.load_config(str(ROOT / "configs/llama7b.py"))
    assert set(command_line.configs()) == {file.stem for file in (ROOT / "configs").glob("*.py")}
    with pytest.raises(ConfigError, match=r"expected a name of finetune, .*, verify, got 'llama7'; did you mean llama"):
        flags.load_config("llama7")
    with pytest.raises(ConfigError, match=r"got 'qqq'; choose one, or a Python file$"):
        flags.load_config("qqq")
    (tmp_path / "tiny").mkdir()
    with pytest.raises(ConfigError, match=r"got 'tiny' .a folder.; see configs/ for examples, or take one by its name"):
        flags.load_config("tiny")  # a path is never taken for a name
    with pytest.raises(ConfigError, match=r"^expected a path, got 'xxx"):
        flags.load_config("x" * 300)


# -- A new config ------------------------------------------------------------------------------------------------------


def test_the_data_of_a_new_config():
    data = {model: new.given(model, 1, "", "runs/x").data for model in ("tiny", "llama7b", "a/b")}
    assert data == {"tiny": new.EXAMPLE, "llama7b": new.DATA, "a/b": new.DATA}


@pytest.mark.full
def test_a_new_config(tmp_path, monkeypatch, capsys):
    """It loads, fits by estimate, has what its model's config has but for placement, and a comment above each field."""
    monkeypatch.chdir(tmp_path)
    new.main(["mine", "--model", "llama125m", "--gpu", "4060", "--data", "a.txt"])
    assert capsys.readouterr().out.startswith("written: mine.py; surojax train --config mine.py\n  add c.tokenizer")
    c = flags.load_config("mine.py")
    base = flags.load_config("llama125m")
    assert (c.data, c.output_dir, c.gpus) == ("a.txt", "runs/mine", 1) and c.model == base.model
    assert c.learning_rate == base.learning_rate
    lines = Path("mine.py").read_text().splitlines()
    fields = [i for i, line in enumerate(lines) if re.match(r"    c\.[\w.]+ = ", line)]
    assert len(fields) > 8 and all(lines[i - 1].startswith("    # ") for i in fields)


@pytest.mark.parametrize(
    "words, left",
    [
        (["--model", "tiny"], ["tokenizer"]),  # which reads Python's own source
        (["--model", "llama125m"], ["data", "tokenizer"]),
        (["--model", "llama125m", "--data", "a.txt"], ["tokenizer"]),
        (["--model", "a/b"], ["data"]),  # which has a tokenizer
    ],
)
def test_what_is_left_to_do_with_a_new_config(words, left, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    need = SimpleNamespace(device=3 << 30, host=1 << 30)
    found = SimpleNamespace(change={"zero_level": 2}, need=need, seconds=0.5)
    monkeypatch.setattr(new, "fastest_estimated", lambda c, gpu, host_memory: found)
    new.main(["mine", "--gpu", "4060", *words])
    written, *lines = capsys.readouterr().out.splitlines()
    assert written == "written: mine.py; surojax train --config mine.py"
    said = {"data": f"  set data in it: {new.DATA!r} stands for it"}
    said["tokenizer"] = "  add c.tokenizer to it, unless the model is to read bytes"
    assert lines == [said[name] for name in left]
    text = Path("mine.py").read_text()
    assert "3.0 GiB on each GPU and 1.0 GiB of host memory, 0.5 s a step." in text and "c.zero_level = 2" in text


@pytest.mark.parametrize(
    "words, said",
    [
        (["mine", "--model", "llama125", "--gpu", "4060"], "did you mean llama125m?"),
        (["mine", "--model", "nosuch", "--gpu", "4060"], "--model: expected a name of finetune, "),
        (["my-run", "--model", "tiny", "--gpu", "4060"], "NAME: expected letters, digits and _, got 'my-run'"),
        (["there", "--model", "tiny", "--gpu", "4060"], "NAME: expected a new file, got 'there.py', which exists"),
        (["mine", "--model", "tiny", "--gpu", "none"], "--gpu: expected a GPU whose facts are known, got 'none'"),
        (["mine", "--model", "tiny", "--gpu", "4060", "--gpus", "0"], "--gpus: expected 1 to 131,072, got 0"),
        (
            ["mine", "--model", "tiny", "--gpu", "4060", "--host-memory", "0"],
            "--host-memory: expected GiB, more than 0",
        ),
        (["mine", "--model", "tiny"], "the following arguments are required: --gpu; see --help"),
        (["mine", "--model", "no/such", "--gpu", "4060"], "model_path: expected a"),
    ],
)
def test_a_new_config_that_is_refused(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "there.py").touch()
    with pytest.raises(Refused, match=re.escape(said)):
        new.main(words)
    assert not (tmp_path / "mine.py").exists()


# -- Completion -------------------------------------------------------------------------------------------------------


def completed(script: Path, *words: str) -> list[str]:
    """What bash completes the last word to."""
    line = " ".join(map(shlex.quote, words))
    code = f". {shlex.quote(str(script))}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_surojax"
    code += "; printf '%s\\n' \"${COMPREPLY[@]}\""
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(importlib.util.find_spec("shtab") is None, reason="pip install 'surojax[completion]'")
def test_completion_of_verbs_options_and_fields(tmp_path):
    script = tmp_path / "surojax"
    script.write_text(completion.script("bash"))
    assert set(completed(script, "surojax", "")) >= set(command.VERBS)
    assert completed(script, "surojax", "ge") == ["generate"]
    assert completed(script, "surojax", "convert", "--ch") == ["--checkpoint", "--check"]
    assert completed(script, "surojax", "train", "--config.offload_op") == ["--config.offload_optimizer"]
    assert "nvfp4" in completed(script, "surojax", "plan", "--config.recipe", "")
    assert completed(script, "surojax", "fit", "--gpu", "rtx409") == ["rtx4090"]
    assert completed(script, "surojax", "train", "--config", "smollm2_do") == ["smollm2_docstrings"]
    (tmp_path / "mine.py").touch()
    assert completed(script, "surojax", "plan", "--config", f"{tmp_path}/m") == [f"{tmp_path}/mine.py"]
    for shell in set(completion.SHELLS) - {"bash"}:
        assert all(word in completion.script(shell) for word in ("config.offload_optimizer", "smollm2_docstrings"))


def test_completion_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit, match=r"pip install 'surojax\[completion\]'"):
        completion.main(["bash"])
    with pytest.raises(SystemExit, match=r"^surojax.completion: error: argument shell: invalid choice: 'bahs'"):
        completion.main(["bahs"])


# -- The wheel --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_wheel_has_the_command_the_configs_and_its_metadata(tmp_path):
    """Built from a copy, so that nothing is left in the tree."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("surojax", "pallas_kernels", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "build", "-q", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, capture_output=True)  # a source distribution, and a wheel from it
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    installed = {str(file.relative_to(tmp_path / "installed")) for file in (tmp_path / "installed").rglob("*")}
    assert {f"surojax/configs/{file.name}" for file in (ROOT / "configs").glob("*.py")} <= installed
    assert {
        "surojax/py.typed",
        "surojax/config/typed.pyi",
        "pallas_kernels/py.typed",
        "surojax/data/templates/chatml.jinja",
    } <= installed
    folder = tmp_path / "installed" / f"surojax-{surojax.__version__}.dist-info"
    assert (folder / "licenses/LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert "surojax = surojax.__main__:main" in (folder / "entry_points.txt").read_text()
    metadata = (folder / "METADATA").read_text()
    for line in (
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.12",
        "Description-Content-Type: text/markdown",
    ):
        assert line in metadata
    code = "from surojax import command_line; from surojax.config import flags; "
    code += "print(command_line.configs()['llama7b']); print(flags.load_config('llama7b').optimizer)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path / "installed",
        env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}/installed/surojax/configs/llama7b.py\nadamw\n", ran.stdout)
