"""benchmarks/silicon.py: what a GPU's minutes are used for, with items that take milliseconds, and all of it dry."""

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import silicon

from surojax.assembly import xla_options
from surojax.config import checks
from surojax.planner import footprint
from surojax.planner.gpus import GPUS
from surojax.planner.run_plan import checked

FIRST = "rates offloads-8 norms-16 bits fp8-8 offloads-32 qwen-1.5b kernels".split()  # of a call of ten minutes
STEPS = [
    (item, variant)
    for item in map(silicon.steps_of, silicon.ITEMS)
    for variant in item.variants or ([silicon.Variant("")] if item.flags else [])
]


def fake(name: str, seconds: float, code: str = "pass", tmp_path: Path | None = None, **fields) -> silicon.Item:
    """An item whose process runs this code; `file` is where its results go."""
    if tmp_path is None:
        return silicon.Item(name, seconds, "nothing", command="-c pass", **fields)  # pyright: ignore[reportArgumentType]
    script = tmp_path / f"{name}.py"
    script.write_text(f"import json, pathlib, sys, time\nfile = pathlib.Path(sys.argv[1])\n{code}\n")
    return silicon.Item(name, seconds, "nothing", command=f"{script} {{out}}", **fields)  # pyright: ignore[reportArgumentType]


# -- The table ---------------------------------------------------------------------------------------------------------


def test_items_are_in_order_of_value_and_complete():
    """Issue 41's list: the first eight fit into a call of ten minutes, and each item says how it is measured."""
    names = [item.name for item in silicon.ITEMS]
    assert names[:8] == FIRST and len(set(names)) == len(names)
    assert sum(item.seconds for item in silicon.ITEMS[:8]) == 465
    newer = [f"{name}{silicon.OF_PLUGIN}" for name in ("offloads-8", "norms-16", "offloads-32")]
    rest = "tests fp8-triton microbatches-16 attention-4 doctor kills generate adapters-8b experts files-4".split()
    assert names[8:] == [*newer, *rest]
    for item in map(silicon.steps_of, silicon.ITEMS):
        assert item.seconds > 0 and item.decides
        assert bool(item.flags and item.variants) + bool(item.command) + bool(item.function) == 1, item.name
        assert bool(item.command) == bool(item.dry), item.name
        assert len({variant.name for variant in item.variants}) == len(item.variants), item.name
    assert {item.plugin for item in silicon.ITEMS if item.name.endswith(silicon.OF_PLUGIN)} == {True}


def test_the_list_has_every_item(capsys):
    silicon.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {item.name}" for item in silicon.ITEMS]
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.full(after=10)
@pytest.mark.parametrize("item, variant", STEPS, ids=[f"{item.name} {variant.name}" for item, variant in STEPS])
def test_every_step_is_a_config_that_fits(item, variant):
    """On an H200, and those of the first call on an H100, by the estimate that `train` goes by; dry flags as well."""
    import silicon_items

    c = checked(silicon_items.config(item, variant.flags, "/nowhere", False), "h200")
    assert c.gpus == 1 and c.sequence_len >= 1024 and c.model.hidden_size >= 1536
    gpu = "h100" if item.name in FIRST else "h200"
    assert footprint.needs(c, 1, "gpu").device < 0.95 * GPUS[gpu].memory_bytes
    checks.check(silicon_items.config(item, variant.flags, "/nowhere", True))


def test_options_of_xla_are_those_of_the_program():
    assert silicon.VERIFIED == xla_options.VERIFY_OFFSETS
    assert silicon.TRITON.keys() <= xla_options.PRODUCTS.keys()


# -- The campaign ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds, chosen", [(1000, "a"), (130, "a"), (129, "b"), (13, "b"), (12, None)])
def test_the_next_item_is_the_first_that_fits_with_a_margin(seconds, chosen):
    left = [fake("a", 100), fake("b", 10), fake("c", 11)]
    found = silicon.next_item(left, seconds)
    assert (found and found.name) == chosen


def test_items_run_in_order_and_those_that_are_done_do_not(tmp_path, capsys):
    """Results of an earlier call stay; what failed in it is repeated; what does not fit any more is named."""
    code = "file.write_text(json.dumps({'variants': [{'name': 'x', 'measured_ms': 3.0, 'predicted_ms': 2.0}]}))"
    items = [fake(name, 10, code, tmp_path) for name in ("a", "b", "c")] + [fake("long", 1000)]
    done = {"a": {"status": "ok", "seconds": 7.0}, "b": {"status": "exit code 1", "seconds": 7.0}}
    found = silicon.campaign(items, tmp_path, 60, done)
    assert list(found) == ["a", "b", "c"] and found["a"] == done["a"]
    assert found["b"]["status"] == found["c"]["status"] == "ok" and found["b"]["seconds"] < 7
    assert json.loads((tmp_path / "silicon.json").read_text()) == found
    text = (tmp_path / "silicon.md").read_text()
    assert "| b | x | 3.0 | 2.0 (-) | 1.500 |" in text and "| a | ok | 7.0 |" in text
    assert "-- long: not begun" in capsys.readouterr().out


def test_results_are_whole_after_an_item_is_cut_off(tmp_path):
    """Its first variant is kept, its children end with it, and the next item runs."""
    code = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "file.write_text(json.dumps({'variants': [{'name': 'x', 'measured_ms': 3.0}], 'child': child.pid}))\n"
        "print('a|b', file=sys.stderr, flush=True)\ntime.sleep(60)"
    )
    hangs = fake("hangs", 1, code, tmp_path)
    found = silicon.campaign([hangs, fake("next", 10)], tmp_path, 60, {})
    assert found["hangs"]["status"] == "cut off after 2 s" and found["hangs"]["variants"][0]["measured_ms"] == 3.0
    assert found["hangs"]["error"] == "a|b\n"
    state = Path(f"/proc/{found['hangs']['child']}/stat")
    end = time.monotonic() + 5
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < end:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z"
    assert found["next"]["status"] == "ok"
    assert json.loads((tmp_path / "silicon.json").read_text()) == found
    assert not list(tmp_path.glob(".silicon*"))


def test_a_result_that_was_cut_in_the_middle_is_none(tmp_path):
    found = silicon.campaign([fake("a", 10, "file.write_text('{\"variants\": [')", tmp_path)], tmp_path, 30, {})
    assert found["a"].keys() == {"status", "seconds"}


def test_a_variant_that_failed_is_in_the_status_and_the_table(tmp_path):
    rows = [{"name": "x", "measured_ms": 3.0}, {"name": "y", "error": "XlaRuntimeError: a | b\nc"}]
    code = f"file.write_text(json.dumps({{'variants': {rows!r}, 'versions': 'H200'}}))"
    found = silicon.campaign([fake("a", 10, code, tmp_path)], tmp_path, 30, {})
    assert found["a"]["status"] == "failed: y"
    lines = (tmp_path / "silicon.md").read_text().splitlines()
    assert "| a | y | XlaRuntimeError: a / b c |" in lines[3]
    assert len({line.count("|") for line in lines[:4]}) == 1


def test_logs_and_plugins_are_the_environment_of_their_items_only(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "theirs")
    code = "import os; file.write_text(json.dumps({x: os.environ.get(x) for x in ('PYTHONPATH', 'LOUD')}))\n"
    code += "print('said', file=sys.stderr)"
    items = [fake("plain", 10, code, tmp_path), fake("loud", 10, code, tmp_path, log={"LOUD": "1"})]
    newer = fake("x-plugin", 10, code, tmp_path, plugin=True)
    monkeypatch.setitem(silicon.BY_NAME, "x", items[0])
    found = silicon.campaign([*items, newer], tmp_path, 30, {}, plugin="newer")
    assert found["plain"]["PYTHONPATH"] == f"{silicon.ROOT}:theirs" and found["plain"]["LOUD"] is None
    assert found["x-plugin"]["PYTHONPATH"] == f"newer:{silicon.ROOT}:theirs" and found["loud"]["LOUD"] == "1"
    assert [file.name for file in tmp_path.glob("*.log")] == ["loud.log"]
    assert (tmp_path / "loud.log").read_text() == "said\n"
    assert list(silicon.campaign([newer], tmp_path, 30, {})) == []  # without --plugin


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "--out: expected a folder, got none"),
        (["--out", "{file}"], "--out: expected a folder, got the file"),
        (["--out", "{folder}", "--only", "rates,rate"], "got 'rate'"),
        (["--out", "{folder}", "--seconds", "0"], "--seconds: expected more than 0"),
        (["--out", "{folder}", "--seconds", "nan"], "--seconds: expected more than 0"),
        (["--out", "{folder}", "--plugin", "{folder}"], "--plugin: expected a folder with jax_plugins"),
        (["--out", "{folder}", "--done", "{folder}/none"], "--done: expected the silicon.json of an earlier call"),
        (["--out", "{folder}", "--done", "{file}"], "--done: expected the silicon.json of an earlier call"),
    ],
)
def test_bad_input_is_a_line(argv, words, tmp_path, capsys):
    (tmp_path / "file").write_text('{"rates": 1}')
    with pytest.raises(SystemExit) as stop:
        silicon.main([x.format(file=tmp_path / "file", folder=tmp_path) for x in argv])
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and words in printed and "Traceback" not in printed


def test_only_and_done_choose_items(tmp_path, monkeypatch):
    ran = []
    ok = {"status": "ok", "seconds": 0.0}
    monkeypatch.setattr(silicon, "in_process", lambda item, *_: ran.append(item.name) or ok)
    (tmp_path / "done.json").write_text(json.dumps({"bits": ok}))
    silicon.main(["--out", str(tmp_path), "--only", "bits,rates,rates", "--done", str(tmp_path / "done.json")])
    assert ran == ["rates"] and json.loads((tmp_path / "silicon.json").read_text()).keys() == {"bits", "rates"}


# -- All of it, dry ----------------------------------------------------------------------------------------------------


# Items of steps run the same code with other flags, which `test_every_step_is_a_config_that_fits` checks. The others
# are of a command or function, or profile, keep a log, have toy sizes, or another number of steps.
DRY = [
    item
    for item in silicon.ITEMS
    if not item.plugin
    and (not item.variants or item.trace or item.log or item.toy or item.steps != silicon.Item._field_defaults["steps"])
]
DRY.sort(key=lambda item: not item.log)  # the first, which is quick, compiles one step


@pytest.mark.full(after=1)
@pytest.mark.parametrize("item", DRY, ids=lambda item: item.name)
def test_every_kind_of_item_runs_dry(item, tmp_path):
    """On a CPU, at toy sizes."""
    found = silicon.campaign([item], tmp_path, 3600, {}, dry=True)[item.name]
    assert found["status"] == "ok", found
    for x in found.get("variants", []):
        assert x.get("measured_ms", 0) > 0 or x.get("lines_ms"), x
