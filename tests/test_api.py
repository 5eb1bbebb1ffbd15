"""The verbs in Python: their names, results and typos, and how a type checker outside the clone sees them."""

import copy
import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from test_library import config

import surojax
from surojax import ConfigError
from surojax.config import checks
from surojax.config.fields import tokens_of_step
from surojax.declared import LARGEST_FLOAT
from surojax.errors import LONGEST, shown
from surojax.option_names import unknown_option

ROOT = Path(surojax.__file__).parents[1]
VERBS = "train plan fit estimate convert generate evaluate load distill load_config".split()
QUESTION = {"question": "1 and", "choices": ["1", "2"], "answer": 0}
TEXTS = [f"{i} and {i} are {i + i}. " * 4 for i in range(64)]


def test_the_names_are_the_public_ones():
    """Of verbs functions, also after the modules of these names were imported."""
    assert sorted(dir(surojax)) == sorted([*surojax.__all__, "__version__"])
    for verb in ("plan", "fit", "convert"):
        assert importlib.import_module(f"surojax.{verb}") is not getattr(surojax, verb)
    assert not [name for name in VERBS if not callable(getattr(surojax, name)) or not getattr(surojax, name).__doc__]


def test_notebooks_import_nothing_else():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        assert "from surojax." not in "".join(cells) and "import surojax." not in "".join(cells), path


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda c: setattr(c, "learnign_rate", 1), "no field 'learnign_rate': did you mean 'learning_rate'?"),
        (lambda c: c.learnign_rate, "config has no field 'learnign_rate': did you mean 'learning_rate'?"),
        (lambda c: c.update(zzz=1), "config has no field 'zzz': --help fields lists every field"),
        (lambda c: checks.check(surojax.load_config(c, learning_rate=3.5e38)), "expected a finite number in float32"),
        (lambda c: checks.check(surojax.load_config(c, matmul_dtype="fp8")), "matmul_dtype: expected one of '', "),
        (lambda c: c.update(gpuss=1), "config has no field 'gpuss': did you mean 'gpus'?"),
        (lambda c: setattr(c.model, "hiden_size", 1), "no field 'hiden_size': did you mean 'model.hidden_size'?"),
        (lambda c: setattr(c, "lock", 1), "config has no field 'lock', which is a method of a config"),
        (lambda c: setattr(c, "learning_rate", "x"), "learning_rate: expected a number, got 'x' of type str; its"),
        (lambda c: setattr(c, "gpus", 1.5), "gpus: expected a whole number, got 1.5 of type float; its type is int"),
        (lambda c: surojax.train(c, learnign_rate=1), "did you mean 'learning_rate'?"),
        (lambda c: surojax.plan(c, gpu="rtx4090", zero_levle=3), "did you mean 'zero_level'?"),
        (lambda c: surojax.load_config(model={"hiden_size": 8}), "did you mean 'model.hidden_size'?"),
        (lambda c: surojax.load_config("llama7"), "did you mean llama7b?"),
        (lambda c: surojax.load_config(3), "config: expected default_config() with changes, a name of configs/"),
        (lambda c: surojax.convert(3, "x"), "model: expected a path, or the result of a run that wrote a checkpoint"),
        (lambda c: surojax.generate("x", "y", system="z"), "system: expected chat=True with it, got 'z'"),
        (lambda c: surojax.fit(c, gpu="h100", compiled=0), "compiled: expected 1 or more, got 0"),
        (lambda c: surojax.evaluate("x", [{"question": "a"}]), "questions[0]: expected"),
        (lambda c: surojax.evaluate("x", []), "questions: expected one or more, got []; add one"),
        (lambda c: surojax.evaluate("x", [QUESTION], limit=0), "limit: expected 1 or more, got 0; leave it out"),
        (lambda c: surojax.evaluate("x", [QUESTION], batch_size=0), "batch_size: expected 1 or more, got 0; correct"),
        (lambda c: surojax.generate("x", ["y", 3]), "prompt: expected a text or several, got ['y', 3]; pass texts"),
    ],
)  # fmt: skip
def test_a_typo_is_one_line(call, said):
    with pytest.raises(ConfigError) as error:
        call(surojax.default_config())
    assert said in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


def test_long_messages_and_values_are_cut():
    for more, is_cut in ((0, False), (1, True)):
        text = "a" * (LONGEST + more)
        assert str(ConfigError(text)) == (f"{'a' * 1497} ... {'a' * 1497}" if is_cut else text)
        assert shown("a" * (398 + more)) == (f"'{'a' * 399}... (401 characters)" if is_cut else f"'{'a' * 398}'")


@pytest.mark.parametrize(
    "word, fields, said",
    [
        ("--zzz", (), "unknown option '--zzz'; see --help"),
        ("--host_memry=3", (), "unknown option '--host_memry=3'; did you mean --host-memory?"),
        ("--zzz", ("num_epochs",), "unknown option '--zzz': fields are set with --FIELD=VALUE; see --help"),
        ("--host_memry", ("num_epochs",), "FIELD=VALUE; did you mean --host-memory?"),
        ("--num-epoch", ("num_epochs",), "FIELD=VALUE; did you mean --num_epochs?"),
        ("--qlor", ("num_epochs",), "FIELD=VALUE; did you mean --qlora?"),
        ("--qlor", (), "'--qlor'; see --help"),
        ("my.py", ("num_epochs",), "did you mean --config my.py?"),
        ("tiny", ("num_epochs",), "did you mean --config tiny?"),
        ("my.py", (), "'my.py'; see --help"),
    ],
)
def test_an_unknown_option_names_the_nearest(word, fields, said):
    assert unknown_option(word, ["--host-memory"], fields, ["tiny"]).endswith(said)


def test_configs_are_copied_compared_and_shown():
    c = surojax.default_config()
    for same in (copy.deepcopy(c), pickle.loads(pickle.dumps(c)), c.copy_and_resolve_references()):
        assert same == c and type(same) is type(c)
    changed = surojax.load_config(c, lora=True, model={"hidden_size": 64})
    assert repr(changed) == "Config(lora=True, model.hidden_size=64)" and repr(c) == "Config()"
    assert repr(changed.model) == "Config(hidden_size=64)"
    assert not hasattr(c, "learnign_rate")
    named = surojax.load_config(data=Path("a") / "b", **{"model.hidden_size": 64})
    c.learning_rate = LARGEST_FLOAT
    c.learning_rate = 1  # a whole number is a number
    assert (named.data, named.model.hidden_size) == (str(Path("a") / "b"), 64)


@pytest.mark.parametrize(
    "fields, rate",
    [({"lora": True}, 2e-4), ({}, 2e-5), ({"lora": True, "learning_rate": 1e-3}, 1e-3)],
)
def test_a_model_path_is_fine_tuned(fields, rate, tmp_path, monkeypatch):
    """Also beside a folder that is called as that config."""
    assert surojax.load_config("finetune", model_path="MODEL", **fields).learning_rate == rate
    monkeypatch.chdir(tmp_path)
    (tmp_path / "finetune").mkdir()
    assert surojax.load_config(model_path="MODEL", **fields).learning_rate == rate


def test_estimates(tmp_path):
    found = surojax.estimate("llama7b", gpu="rtx4090", gpus=4, zero_level=3, shard_outer=True)
    assert found.fits and found.classes["weights"]["device"] and found.tokens_per_s > 0
    assert repr(found).startswith("Estimate(4 x rtx4090, fits: ") and "\n" not in repr(found)
    one = surojax.estimate("llama7b", gpu="rtx4090", gpus=1)
    assert not one.fits and repr(one).startswith("Estimate(1 x rtx4090, does not fit: ")
    tokens = tokens_of_step(surojax.load_config("llama7b", gpus=4, zero_level=3))
    assert found.tokens_per_s == pytest.approx(tokens / found.step_s)


def test_what_fit_says():
    result = SimpleNamespace(gpus=2, gpu="h100")
    assert repr(surojax.Fit(None, {}, None, None, result)) == "Fit(nothing fits 2 x h100)"  # type: ignore[arg-type]
    for change, said in (({}, "as given"), ({"zero_level": 3, "gpus": 2}, "zero_level=3 gpus=2")):
        found = surojax.Fit(surojax.default_config(), change, 0.25, 4096.0, result)  # type: ignore[arg-type]
        assert repr(found) == f"Fit({said}: 0.25 s a step, 4,096 tokens/s)"


def test_the_verbs_from_a_run_to_a_file(tmp_path):
    """The config's fields as keywords; results have one line, and name what follows."""
    result = surojax.train(config(tmp_path), data=TEXTS, max_steps=4)  # the programs of test_library.py
    assert repr(result).startswith("Result(finished at step 4, loss ") and "\n" not in repr(result)
    model = surojax.load(result)
    assert repr(model).endswith("parameters, without a chat template)") and surojax.load(model) is model
    one = surojax.generate(model, "1 and", max_tokens=4, temperature=0)
    assert surojax.generate(model, ["1 and", "1 and"], max_tokens=4, temperature=0) == [one, one]
    assert surojax.generate(model, []) == []
    right = surojax.evaluate(model, [QUESTION] * 3)
    assert right.questions == 3 and right.plain in (0, 1)
    (tmp_path / "questions.jsonl").write_text(f"{json.dumps(QUESTION)}\n" * 3)
    assert surojax.evaluate(model, tmp_path / "questions.jsonl", limit=1, batch_size=1) == right._replace(questions=1)
    folder = surojax.convert(result, tmp_path / "export", say=lambda line: None)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 32
    chats = surojax.load(folder, tokenizer="bytes", chat_template="chatml")
    assert repr(chats).endswith("parameters, with a chat template)")
    assert isinstance(surojax.generate(chats, "1 and", chat=True, system="Add.", max_tokens=2), str)


SCRIPT = """
import surojax
from surojax import LossOfLogits, default_config

c = default_config()
c.learning_rate = 1e-3
reveal_type(surojax.train(c, data=["a"]).history)
reveal_type(surojax.plan("tiny", gpu="h100"))
reveal_type(surojax.generate("runs/tiny", ["a"]))
surojax.load_config(learning_rate=1.0)
c.learnign_rate = 1
surojax.train(learnign_rate=1)
surojax.load_config(zero_level="3")
"""


@pytest.mark.full
def test_a_type_checker_outside_the_clone(tmp_path):
    """Pyright in another folder, with the clone installed as editable: types, and both typos."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = {(d["severity"], d["range"]["start"]["line"] + 1): d["message"] for d in found}
    assert [line for severity, line in lines if severity == "error"] == [11, 12, 13]
    assert [text.split(" is ")[1] for (severity, _), text in lines.items() if severity == "information"] == [
        '"list[dict[str, Any]]"', '"Plan"', '"list[str]"',
    ]  # fmt: skip
