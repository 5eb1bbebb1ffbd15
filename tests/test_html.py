"""The pages of `surojax plan --html` and `surojax report --html`: what they say is what was planned or written."""

import argparse
import base64
import dataclasses
import itertools
import json
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from chromium import CHROMIUM, VIEWS, browser as browser
from commands import plan as plan_command

from surojax import report
from surojax.config import flags
from surojax.errors import ConfigError, Refused
from surojax.pages import plan_page, runs, step_view
from surojax.placement.home import HOMES
from surojax.planner import aot
from surojax.planner.prediction import Prediction, trace
from surojax.planner.run_plan import Plan
from surojax.planner.timeline import Timeline, TimelineEvent
from surojax.run import starts

TINY = ["--config", "tiny", "--gpu", "rtx4090", "--config.gpus=2", "--config.offload_master=True"]
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A page whose elements all end: its tables as texts, bytes of cells, scripts, and addresses."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.bytes: list[int] = []
        self.scripts: dict[str, str] = {}
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.script = ""
        self.feed(text)
        self.close()
        assert text.startswith("<!DOCTYPE html>") and not self.open, self.open

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag not in VOID and not (self.open and "svg" in self.open and tag == "path"):
            self.open.append(tag)
        self.bytes += [int(found["data-bytes"])] if "data-bytes" in found else []
        self.addresses += [found[name] for name in ("src", "href", "action") if name in found]
        self.script = found.get("id", "") if tag == "script" else ""

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[self.script] = self.scripts.get(self.script, "") + data
        elif self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def parsed(text: str) -> Page:
    """A page that asks no network for anything."""
    page = Page(text)
    text = re.sub(r"/\*! https://\S+/uPlot \(v[\d.]+\) \*/", "", text)  # in a comment
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text) and page.addresses == ["data:,"]
    return page


def check_memory(page: Page, found: dict) -> None:
    """The cells of the table are the plan's bytes."""
    classes = [[sizes[home.name] for home in HOMES] for sizes in found["classes"].values()]
    totals = [found["device_bytes"], found["host_bytes"], found["nvme_bytes"]]
    rest = [max(0, total - sum(column)) for total, column in zip(totals, zip(*classes, strict=True), strict=True)]
    assert page.bytes == [size for row in [*classes, rest, totals] for size in row]


@pytest.fixture
def estimated(tmp_path, monkeypatch, capsys):
    """Options -> (page, plan as JSON) of the command, where nothing is compiled."""
    monkeypatch.setattr(aot, "available", lambda: False)

    def get(*options: str) -> tuple[Page, dict]:
        html, target = tmp_path / "plan.html", tmp_path / "plan.json"
        ended = 0
        try:
            plan_command.main([*TINY, "--html", str(html), "--json", str(target), *options])
        except SystemExit as end:
            ended = end.code
        assert ended == (0 if json.loads(target.read_text())["fits"] else 1)
        assert f"written: {html}" in capsys.readouterr().out
        return parsed(html.read_text(encoding="utf-8")), json.loads(target.read_text())

    return get


def test_a_plan_without_a_predicted_step(estimated):
    page, found = estimated()
    check_memory(page, found)
    assert found["fits"] and "It fits" in page.text and "no time is predicted: an estimate" in page.text
    assert "surojax plan --config tiny --gpu rtx4090" in page.text and "events" not in page.scripts
    for word in ("tiny, 0.9M parameters", "tokens of a step 4,096 32 x 128", "offload_master=True", "of 22.0 GiB"):
        assert word in page.text


@pytest.mark.full
def test_a_plan_that_does_not_fit(estimated):
    page, found = estimated("--host-memory", "0.001", "--tokens=9")
    check_memory(page, found)
    assert not found["fits"] and "It does not fit" in page.text and found["changes"]
    assert all(" ".join(change.split()) in page.text for change in found["changes"])


def page_of(p: Plan, of: dict | None) -> str:
    config, _ = flags.parse_flags(["--config", "tiny", "--config.gpus=2"], argparse.ArgumentParser())
    return plan_page.page(p, "surojax plan '<x>'", of, request=plan_page.PlanRequest("tiny", config, price=0.5))


def predicted(found: dict, exposed: dict[str, float], seconds: float = 3e-3) -> Plan:
    """A plan with a predicted step of 3 ms, which exposes these seconds by kind."""
    return dataclasses.replace(
        Plan(**found),
        not_predicted="",
        predicted_step_s=seconds,
        predicted_range_s=[seconds - 1e-3, seconds + 1e-3],
        mfu=0.5,
        tokens_per_s_per_gpu=1e5,
        exposed_s=exposed,
        exposed_by_loop_s={"forward": exposed},
        step_at_ends_s={"link": [2e-3, 4e-3]},
    )


def test_the_time_line_has_the_events_of_the_trace(estimated):
    _, found = estimated()
    events = [TimelineEvent("dot </script>", "product", "compute", "forward", 0.0, 2e-3, 0.0)]
    events += [TimelineEvent("all-gather.1", "gather", "collectives", "forward", 1e-3, 3e-3, 5e6)]
    events += [TimelineEvent("wait for all-gather.1", "gather", "waits", "forward", 2e-3, 3e-3, 0.0)]
    p = predicted(found, {"gather": 1e-3, "reduce": 0.0})
    assert "exposed ms gather forward 1.0" in parsed(page_of(p, None)).text  # no column of zeros
    page = parsed(page_of(p, trace(Timeline(3e-3, {}, {}, events), "a step")))
    line = json.loads(zlib.decompress(base64.b64decode(page.scripts["events"])))
    now = itertools.accumulate(line["columns"][4])
    read = [
        (
            line["rows"][row],
            line["kinds"][kind],
            line["names"][name],
            line["loops"][loop],
            begin / 100,
            time / 100,
            size,
        )
        for (row, kind, name, loop, _, time, size), begin in zip(zip(*line["columns"], strict=True), now, strict=True)
    ]
    assert read == [
        ("compute", "matrix products", "dot </script>", "forward", 0, 2000, 0),
        ("collectives", "gathers", "all-gather.1", "forward", 1000, 2000, 5),
        ("exposed: compute waits", "gathers", "wait for all-gather.1", "forward", 2000, 1000, 0),
    ]
    assert "forward 1.0 total 1.0" in page.text and "link between GPUs 2.0 4.0" in page.text
    billion = [1e9 / 2e5 / 3600 * seconds / 3e-3 for seconds in (3e-3, 2e-3, 4e-3)]
    assert "1 billion tokens {:.1f} h {:.1f} to {:.1f} h".format(*billion) in page.text
    assert f"they cost {2 * 0.5 * billion[0]:.2f} " in page.text
    assert "surojax plan '<x>'" in page.text and "It fits" in page.text


@pytest.mark.full
@pytest.mark.skipif(not aot.available(), reason=f"no compiler for GPUs here: {aot.EXTRA}")
def test_a_compiled_step_is_drawn_without_an_error(tmp_path):
    """By Chromium if it is there."""
    html, target = tmp_path / "plan.html", tmp_path / "plan.json"
    plan_command.main([*TINY, "--html", str(html), "--json", str(target)])
    page, found = parsed(html.read_text(encoding="utf-8")), json.loads(target.read_text())
    check_memory(page, found)
    columns = json.loads(zlib.decompress(base64.b64decode(page.scripts["events"])))["columns"]
    ends = [begin + time for begin, time in zip(itertools.accumulate(columns[4]), columns[5], strict=True)]
    # A model this small is computed sooner than launched: the time line has the kernels.
    assert max(ends) < 1e8 * found["launches_s"] == 1e8 * found["predicted_step_s"] and "launch-bound: " in page.text
    assert len(html.read_text(encoding="utf-8")) < 1_000_000
    if CHROMIUM:
        words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
        words.append("--virtual-time-budget=20000")  # until the events are inflated
        done = subprocess.run([*words, html.as_uri()], capture_output=True, text=True, timeout=300)
        assert "CONSOLE" not in done.stderr and re.search(r'<canvas[^>]* height="\d+"', done.stdout)


PAINTED = """canvas => {
  const scale = devicePixelRatio, height = Math.round(30 * scale);
  const top = row => Math.round((24 + 48 * row + 14) * scale);
  const pen = document.createElement("canvas").getContext("2d");
  const count = (row, colour) => {
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(colour).trim();
    pen.fillRect(0, 0, 1, 1);
    const rgb = pen.getImageData(0, 0, 1, 1).data;
    const all = canvas.getContext("2d").getImageData(0, top(row), canvas.width, height).data;
    let painted = 0;
    for (let i = 0; i < all.length; i += 4) painted += [0, 1, 2].every(k => all[i + k] === rgb[k]);
    return painted / height;
  };
  return { width: canvas.width, rows: [0, 1].map(row => [0, 1, 2].map(kind => count(row, `--c${kind}`))) };
}"""


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_the_time_line_paints_the_shares_of_the_table(estimated, browser, tmp_path, view):
    """To a pixel, of thousands of events that are far narrower than one, and beside a long one; in any part of it."""
    _, found = estimated()
    unit = 1e-5
    events = [TimelineEvent("all", "product", "compute", "forward", 0.0, 2.0, 0.0)]
    for n in range(4000):  # 0.1 % of the first half, and 7 % and 40 % of the second half
        first, second = n * 25 * unit, 1.0 + n * 25 * unit
        events.append(TimelineEvent("wait", "host in", "waits", "forward", first, first + unit / 40, 0.0))
        events.append(TimelineEvent("wait", "host in", "waits", "forward", second, second + 1.75 * unit, 0.0))
        events.append(TimelineEvent("wait", "gather", "waits", "forward", second + 5 * unit, second + 15 * unit, 0.0))
    p = predicted(found, {"host in": 4000 * 1.775 * unit, "gather": 4000 * 10 * unit}, seconds=2.0)
    file = tmp_path / "plan.html"
    file.write_text(page_of(p, trace(Timeline(2.0, {}, {}, events), "a step")))
    page = browser.new_page(viewport={"width": view[0], "height": 900}, color_scheme=view[1])
    page.goto(file.as_uri())
    canvas = page.locator("#timeline[style*=height]")
    kinds = page.locator("#kinds li").all_inner_texts()
    assert kinds == ["matrix products", "host to device", "gathers"]
    table = page.locator("#exposed tr.total td").all_inner_texts()
    expected = [float(cell.replace(",", "")) / 2000 for cell in table]
    painted = canvas.evaluate(PAINTED)
    for kind, share in enumerate(expected, 1):
        assert painted["rows"][1][kind] == pytest.approx(share * painted["width"], abs=1.0)
    page.keyboard.press("Tab")
    canvas.focus()
    canvas.press("+")  # about the middle: 60 % of the step
    half = canvas.evaluate(PAINTED)
    for kind, share in enumerate((0.5 * (0.001 + 0.07), 0.5 * 0.4), 1):
        assert half["rows"][1][kind] == pytest.approx(share * half["width"], abs=1.0)
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 24 + 48 + 14 + 10)
    assert re.search(r"exposed: .*: host to device [5-9]\.\d %, gathers (3\d|4\d)\.\d %", page.inner_text("#event"))
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 24 + 14 + 10)
    assert page.inner_text("#event").startswith("compute: all (matrix products, forward), 2.000 s from 0.00 us")
    assert page.evaluate("document.documentElement.scrollWidth") <= view[0]


# -- report -----------------------------------------------------------------------------------------------------------


def write_run(folder, losses, **others) -> str:
    folder.mkdir(parents=True)
    records = [
        {"log": "step", "step": n, "loss": loss, "norm": 1.5, "tokens_per_second": 100.0 * n, "tokens": 64 * n} | others
        for n, loss in enumerate(losses, 1)
    ]
    records.append({"log": "eval", "step": len(losses), "loss": 1.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


def test_runs_beside_each_other_and_a_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a<b>&", [5.0, None, 3.0, 2.5], peak_memory_bytes=3 << 30)
    write_run(tmp_path / "second", [4.0])
    (tmp_path / "plan.json").write_text(
        json.dumps({"gpu": "h100", "gpus": 2, "device_bytes": 5 << 29, "tokens_per_s_per_gpu": 170.0})
    )
    report.main(["a<b>&", "second/metrics.jsonl", "--plan", "plan.json", "--html", "report.html"])
    out = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["a<b>&"] == ["4", "256", "5.0000", "2.5000", "1.2500", "1.500", "300", "3.00"]
    assert rows["second"][-2:] == ["100", "-"]
    assert out.splitlines()[3].split()[-2:] == ["340", "2.50"] and "written: report.html" in out
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = parsed(text)
    assert "a<b>& 4 256 5.0000 2.5000 1.2500 1.500 300 3.00" in page.text and "plan, 2 x h100" in page.text
    assert "surojax report 'a<b>&' second/metrics.jsonl --plan plan.json" in page.text
    charts = {chart["title"]: chart for chart in json.loads(page.scripts["curves"])["charts"]}
    assert charts.keys() == {"Loss", "Norm of the gradient", "Speed", "Peak memory of a device"}  # no learning rate
    loss = {curve["name"]: (curve["points"], curve["marks"]) for curve in charts["Loss"]["curves"]}
    assert loss["a<b>&"] == ([[1, 2, 3, 4], [5, None, 3, 2.5]], False)  # a gap where the loss was not finite
    assert loss["a<b>&, evaluated"] == ([[4], [1.25]], True) and charts["Speed"]["plan"] == 340


def test_evaluations_of_several_sets(tmp_path):
    """Each has marks of its own; the table has the last loss of the first one, also if that has a name."""
    run = Path(write_run(tmp_path / "run", [4.0, 3.0]))
    sets = {"chats": 0.5, "code": 1.5}
    others = [{"log": "eval", "name": name, "step": n, "loss": n + x} for n in (0, 2) for name, x in sets.items()]
    records = (run / "metrics.jsonl").read_text().splitlines()[:-1] + list(map(json.dumps, others))
    (run / "metrics.jsonl").write_text("\n".join(records) + "\n")
    found = runs.read_run(str(run))
    assert found.row()[runs.HEAD.index("evaluated")] == "2.5000"
    (loss, *_) = runs.charts_of([found], None)
    expected = [("run", f"run, evaluated on {name}", [(0, x), (2, 2 + x)]) for name, x in sets.items()]
    assert loss.labelled_marks() == expected
    assert [x["name"] for x in runs.chart_data(loss, {"run": 0})["curves"]][1:] == [label for _, label, _ in expected]


def test_runs_are_drawn_as_a_picture(tmp_path, capsys, monkeypatch):
    """With a loss that is not finite, and without records of memory."""
    run, picture = write_run(tmp_path / "run", [5.0, None, 3.0]), tmp_path / "report.png"
    report.main([run, "--png", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG") and f"written: {picture}" in capsys.readouterr().out
    charts = {chart.title: chart for chart in runs.charts_of([runs.read_run(run)], runs.Planned("plan", 3 << 30, 8.0))}
    assert charts["Loss"].curves == {"run": [(1, 5.0), (2, None), (3, 3.0)]} and charts["Speed"].plan == 8.0
    assert "Peak memory of a device" not in charts
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"pip install 'surojax\[png\]'"):
        report.main([run, "--png", str(picture)])


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_values_of_a_report_are_read(browser, tmp_path, view):
    """By pointer and by keyboard, of all runs at that step, also of steps that only one has; axes have names."""
    names = [write_run(tmp_path / "first", [5.0, None, 3.0, 2.5]), write_run(tmp_path / "second", [4.0, 3.5])]
    file = tmp_path / "report.html"
    file.write_text(runs.page(runs.read_runs(names), runs.Planned("plan", 1, 123.0), "surojax report"))
    page = browser.new_page(viewport={"width": view[0], "height": 1400}, color_scheme=view[1])
    page.goto(file.as_uri())
    charts = page.locator(".chart")
    assert [charts.nth(i).get_attribute("aria-label") for i in range(3)] == [
        "Loss by step, in nats per token",
        "Norm of the gradient by step",
        "Speed by step, in tokens/s",
    ]

    def values(number: int) -> list[str]:
        return [cell.strip() for cell in charts.nth(number).locator(".u-legend td").all_inner_texts()]

    box = charts.nth(0).locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 9)
    assert values(0) == ["2", "-", "3.5", "-", "1.25"] and values(1)[:2] == ["2", "1.5"]  # charts are read together
    charts.nth(0).focus()
    for key, read in (("End", ["4", "2.5", "-", "1.25", "-"]), ("ArrowLeft", ["3", "3", "-", "-", "-"])):
        charts.nth(0).press(key)
        assert values(0) == read
    assert values(2) == ["3", "300", "-", "123"]
    assert page.evaluate("document.documentElement.scrollWidth") <= view[0]


@pytest.mark.parametrize(
    "value, number",
    [(2, 2.0), (-0.5, -0.5), (None, None), (True, None), ("1", None), (1e300, None), (-1e300, None), (9e299, 9e299)],
)
def test_numbers_of_a_record(value, number):
    assert runs.number(value) == number


def test_what_a_report_says_of_some_runs():
    """Of one without a start, the default of a field; of one step, its speed; of three runs, their number."""
    record = {"log": "step", "step": 1, "loss": 2.0, "tokens_per_second": 8.0}
    bare, other = (runs.RunRecords(name, [record], []) for name in ("a", "b"))
    set_once = dataclasses.replace(bare, name="c", starts=[{"step": 0, "settings": {"seed": 7, "gone": 1}}])
    assert bare.setting("seed") == "-" and set_once.setting("seed") == "7"
    assert set_once.setting("num_epochs") == "1" and set_once.setting("nothing") == "-"
    assert bare.speeds() == [(1, 8.0)]
    rows = runs.settings_rows([set_once, bare, dataclasses.replace(set_once, name="d")])
    assert [(row["name"], row["differs"]) for row in rows] == [("seed", True), ("gone", True)]
    for found, title in (([bare, other], "a and b"), ([bare, other, set_once], "3 runs")):
        assert f"<title>{title}</title>" in runs.page(found, None, "surojax report")


@pytest.mark.parametrize(
    "changes, plan",
    [
        ({}, ("plan, 2 x h100", 3 << 30, 20.0)),
        ({"tokens_per_s_per_gpu": None}, ("plan, 2 x h100", 3 << 30, None)),
        ({"gpu": "none"}, "numbers that no plan has"),
        ({"device_bytes": -1}, "numbers that no plan has"),
        ({"gpus": True}, "numbers that no plan has"),
        ({"gpus": "2"}, "numbers that no plan has"),
        ({"device_bytes": 2**62}, "numbers that no plan has"),
    ],
)
def test_a_plan_to_compare_with(tmp_path, changes, plan):
    file = tmp_path / "plan.json"
    given = {"gpu": "h100", "gpus": 2, "device_bytes": 3 << 30, "tokens_per_s_per_gpu": 10.0}
    file.write_text(json.dumps(given | changes))
    if isinstance(plan, str):
        with pytest.raises(ConfigError, match=rf"^--plan: expected a file of surojax plan --json, .*{plan}.*; correct"):
            runs.read_plan(str(file))
    else:
        found = runs.read_plan(str(file))
        assert (found.name, found.device_bytes, found.tokens_per_s) == plan


@pytest.mark.parametrize(
    "limit, text, percents, at",
    [
        (None, "3.0 GiB", [33.333, 66.667], None),
        (4 << 30, "3.0 GiB of 4.0 GiB", [25, 50], None),
        (3 << 30, "3.0 GiB of 3.0 GiB", [33.333, 66.667], None),
        (2 << 30, "3.0 GiB of 2.0 GiB", [33.333, 66.667], 66.667),
    ],
)
def test_the_bar_of_a_memory(limit, text, percents, at):
    """In percent of the larger of both; the limit is a mark in it only if the bar is longer."""
    sizes = {"weights": [1 << 30, 0, 0], "grads": [2 << 30, 0, 0], "files": [0, 0, 5], "total": [3 << 30, 0, 5]}
    bar = step_view.memory_bar("device", sizes, limit)
    assert (bar["text"], [part["percent"] for part in bar["parts"]], bar["limit_percent"]) == (text, percents, at)
    assert [part["name"] for part in bar["parts"]] == ["weights", "grads"]
    shown = step_view.memory_values(sizes, {"device": limit})
    assert [bar["name"] for bar in shown["bars"]] == ["device", "nvme"] and shown["bars"][0] == bar
    assert shown["unit"] == "GiB" and [row["cells"][0]["text"] for row in shown["rows"]] == [
        "1.00",
        "2.00",
        "-",
        "3.00",
    ]


def test_what_a_step_exposes():
    """Kinds and loops of which something is exposed; without any, that compute waits for nothing."""
    values = lambda **fields: step_view.step_values(Prediction(**fields), ["a line"], None)
    assert values()["times"] == ["a line"] and not values()["exposed"] and values()["timeline"] is None
    quiet = values(predicted_step_s=1.0, exposed_s={"gather": 0.0})
    assert quiet["times"] == ["a line", "Compute waits for no transfer."] and quiet["transfers"] == []
    by_loop = {"forward": {"gather": 0.5, "reduce": 0.0}, "update": {"gather": 0.0, "reduce": 0.0}}
    exposed = {"predicted_step_s": 1.0, "exposed_s": {"gather": 0.5, "reduce": 0.0}, "exposed_by_loop_s": by_loop}
    found = values(**exposed)
    assert found["times"] == ["a line"] and found["transfers"] == ["gather"] and found["files"] == ""
    assert found["exposed"].keys() == {"forward", "total"} and all(
        len(cells) == 1 for cells in found["exposed"].values()
    )
    assert not values(**exposed | {"predicted_step_s": None})["exposed"]
    in_files = values(**exposed, exposed_in_files_s={"moments": 0.25})
    assert "moments" in in_files["files"]


@pytest.mark.parametrize(
    "tokens, price, expected",
    [
        (None, None, [("1 billion tokens", "277.8 h", "222.2 to 333.3 h")]),
        (2e9, None, [("2 billion tokens", "555.6 h", "444.4 to 666.7 h")]),
        (
            3.6e6,
            0.5,
            [("3,600,000 tokens", "1.0 h", "0.8 to 1.2 h"), ("they cost", "2.00", "1.60 to 2.40, 0.5 a GPU hour")],
        ),
    ],
)
def test_what_a_plan_costs(tokens, price, expected):
    """At 1,000 tokens/s of 4 GPUs, and within the range of a step."""
    p = SimpleNamespace(predicted_step_s=1.0, predicted_range_s=[0.8, 1.2], gpus=4)
    request = plan_page.PlanRequest("x", flags.load_config("tiny"), tokens, price)
    found = plan_page.costs(p, request, 1000.0)  # type: ignore[arg-type]
    assert [(x["name"], x["value"], x["note"]) for x in found] == expected


def test_a_long_run_keeps_its_extremes():
    at_most = [(n, 1.0 * (n % 7)) for n in range(runs.POINTS)]
    assert runs.thinned(at_most) is at_most and runs.thinned([*at_most, (9999, 1.0)]) != [*at_most, (9999, 1.0)]
    points = [(n, 100.0 if n == 4321 else -9.0 if n == 77 else 1.0) for n in range(1, 50_001)]
    found = runs.thinned(points)
    assert len(found) <= 2 * runs.POINTS and {(4321, 100.0), (77, -9.0)} <= set(found)
    assert found == sorted(found)


def test_settings_resumes_and_samples_of_runs(tmp_path, monkeypatch):
    """As the run left them; of two runs the fields that differ come first, and folders' names tell them apart."""
    monkeypatch.chdir(tmp_path)
    for name, rate in (("a/run", 0.1), ("b/run", 0.3)):
        folder = Path(write_run(tmp_path / name, [3.0, 2.0, 1.5]))
        starts.write_start(folder, 0, {"learning_rate": rate, "seed": 5})
        starts.write_start(folder, 2, {"learning_rate": rate + 0.1, "seed": 5})  # killed, so started again:
        starts.write_start(folder, 1, {"learning_rate": rate + 0.5, "seed": 5})
        starts.write_sample(folder, 3, "--- prompt\n<i>x</i>")
    found = runs.read_runs(["a/run", "b/run/metrics.jsonl", "./a/run/metrics.jsonl"])
    assert [run.name for run in found] == ["a/run", "b/run"]
    rows = [(row["name"], row["cells"], row["differs"]) for row in runs.settings_rows(found)]
    changes = ["0.1 \u2192 0.6 after step 1", "0.3 \u2192 0.8 after step 1"]
    assert rows == [("learning_rate", changes, True), ("seed", ["5", "5"], False)]
    page = parsed(runs.page(found, None, "surojax report"))
    assert json.loads(page.scripts["curves"])["resumed"] == [{"step": 1, "name": x} for x in ("a/run", "b/run")]
    assert "Sampled by a/run after step 3 --- prompt <i>x</i>" in page.text and "Learning rate" not in page.text
    (tmp_path / "a/run" / starts.STARTS_FILE).write_text("{}\n{}\n")
    starts.write_start(tmp_path / "a/run", 3, {"seed": 6})  # what is damaged begins anew
    assert [x["settings"] for x in runs.read_run("a/run").starts] == [{"seed": 6}]


@pytest.mark.parametrize(
    "files, words, said",
    [
        ({}, ["nowhere"], r"RUN: expected the folder of a run, with metrics.jsonl, got 'nowhere' \(No such file"),
        ({"b/metrics.jsonl": "", "a/metrics.jsonl": ""}, ["."], r"got '\.' \(/.* has none\); did you mean /.*/a\?$"),
        ({"empty/x": "", "run/metrics.jsonl": ""}, ["empty"], r"'empty' \(/.*/empty has none\); correct it$"),
        ({"metrics.jsonl": "", "checkpoints/x": ""}, ["checkpoints"], r"/checkpoints has none\); did you mean /.*\?$"),
        ({"metrics.jsonl": ""}, ["."], "RUN: expected metrics.jsonl with at least one step, got '.'; wait"),
        ({"metrics.jsonl": '{"log":"eval","step":1,"loss":2}\n'}, ["."], "with at least one step"),
        ({"metrics.jsonl": "{}\n{}\n{}\n"}, ["."], "metrics.jsonl line 1: expected a record"),
        (None, ["run", "--html", "no/folder.html"], "--html: expected a file that can be written"),
        (None, ["run", "--html", "."], "--html: expected a file that can be written, got '.'"),
        (None, ["run", "--plan", "nothing.json"], "--plan: expected a file of surojax plan --json"),
        (None, ["run", "--plan", "run/metrics.jsonl"], "--plan: expected a file of surojax plan --json"),
        (None, [], "the following arguments are required: RUN; see --help"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_a_line(tmp_path, monkeypatch, files, words, said):
    """And nothing is written."""
    monkeypatch.chdir(tmp_path)
    if files is None:
        write_run(tmp_path / "run", [2.0])
    for name, text in (files or {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    html = [] if "--html" in words else ["--html", "report.html"]
    with pytest.raises(Refused, match=said) as error:
        report.main([*words, *html])
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


STRANGE = (
    *(
        "1e400",
        "NaN",
        '"\\ud800"',
        "-1e400",
        "1e308",
        "-1.7e308",
        "5e-324",
        "-Infinity",
        "null",
        "true",
        '"x"',
        '"h100"',
    ),
    *(
        "[]",
        "{}",
        "[1]",
        "9" * 400,
        "9" * 5000,
        "9007199254740993",
        "0",
        "-1",
        "3.5",
        "1e-300",
        "9.9e299",
        '"<script>"',
    ),
)
RECORD = {"log": '"step"', "step": "2", "loss": "2.5", "norm": "1", "tokens": "64", "tokens_per_second": "50"}
RECORD |= {"peak_memory_bytes": "1e6", "name": '""'}
PLAN = {"gpus": "2", "gpu": '"rtx4090"', "device_bytes": "1000000", "tokens_per_s_per_gpu": "5"}


def json_text(values: dict[str, str]) -> str:
    return "{" + ",".join(f'"{name}":{value}' for name, value in values.items()) + "}"


@pytest.mark.full(after=3)
@pytest.mark.parametrize("value", STRANGE, ids=lambda text: text[:12])
def test_strange_values_of_metrics_and_plans_are_lines(tmp_path, monkeypatch, capsys, value):
    """In every field, before and after a plain record, and twice in one; a page is written, or a line says why not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    plain = json_text(RECORD | {"step": "1"})
    metrics = []
    for name in RECORD:
        changed = json_text(RECORD | {name: value})
        metrics += [
            f"{plain}\n{changed}\n{json_text(RECORD | {'step': '3'})}",
            f'{plain}\n{changed[:-1]},"loss":2}}\n{plain}',
        ]
        metrics += [changed, f"{plain}\n{changed.replace('step', 'eval', 1)}\n{plain}"]
    texts = [(text, json_text(PLAN)) for text in metrics] + [(plain, json_text(PLAN | {name: value})) for name in PLAN]
    written = 0
    for text, plan in texts:
        (tmp_path / "run/metrics.jsonl").write_text(text)
        (tmp_path / "plan.json").write_text(plan)
        try:
            report.main(["run", "--plan", "plan.json", "--html", "report.html"])
            written += 1
        except Refused as error:
            assert re.match(r"surojax\.report: error: (.*line \d: expected a record|RUN: |--plan: )", str(error))
    assert written >= 12 or len(value) == 5000  # which Python reads in no file of JSON
    assert not written or "<script>" not in (tmp_path / "report.html").read_text().partition("</style>")[2][:500]
    capsys.readouterr().out.encode()


def test_a_page_of_a_plan_that_cannot_be_written_is_refused_first(tmp_path):
    with pytest.raises(Refused, match="--html: expected a file that can be written"):
        plan_command.main([*TINY, "--html", str(tmp_path)])
    assert not list(tmp_path.iterdir())
