"""The pages of `surojax plan --html` and `surojax report --html`: what they say is what was planned or written."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from commands import plan as plan_command

from surojax import report
from surojax.errors import Refused
from surojax.pages import plan_page, runs
from surojax.placement.home import HOMES
from surojax.planner import aot
from surojax.planner.prediction import trace
from surojax.planner.run_plan import Plan
from surojax.planner.timeline import Timeline, TimelineEvent

TINY = ["--config", "tiny", "--gpu", "rtx4090", "--config.gpus=2", "--config.offload_master=True"]
VOID = {"meta", "link", "br", "hr", "img", "input"}
CHROMIUM = shutil.which("chromium")


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
        plan_command.main([*TINY, "--html", str(html), "--json", str(target), *options])
        assert f"written: {html}" in capsys.readouterr().out
        return parsed(html.read_text(encoding="utf-8")), json.loads(target.read_text())

    return get


def test_a_plan_without_a_predicted_step(estimated):
    page, found = estimated()
    check_memory(page, found)
    assert found["fits"] and "It fits" in page.text and "no time is predicted: an estimate" in page.text
    assert "surojax plan --config tiny --gpu rtx4090" in page.text and not page.scripts


@pytest.mark.full
def test_a_plan_that_does_not_fit(estimated):
    page, found = estimated("--host-memory", "0.001", "--tokens=9")
    check_memory(page, found)
    assert not found["fits"] and "It does not fit" in page.text and found["changes"]
    assert all(" ".join(change.split()) in page.text for change in found["changes"])


def test_the_time_line_has_the_events_of_the_trace(estimated):
    _, found = estimated()
    events = [TimelineEvent("dot </script>", "product", "compute", "forward", 0.0, 2e-3, 0.0)]
    events += [TimelineEvent("all-gather.1", "gather", "collectives", "forward", 1e-3, 3e-3, 5e6)]
    events += [TimelineEvent("wait for all-gather.1", "gather", "waits", "forward", 2e-3, 3e-3, 0.0)]
    p = dataclasses.replace(
        Plan(**found),
        not_predicted="",
        predicted_step_s=3e-3,
        predicted_range_s=[2e-3, 4e-3],
        mfu=0.5,
        tokens_per_s_per_gpu=1e5,
        exposed_s={"gather": 1e-3},
        exposed_by_loop_s={"forward": {"gather": 1e-3}},
        step_at_ends_s={"link": [2e-3, 4e-3]},
    )
    page = parsed(plan_page.page(p, "surojax plan '<x>'", trace(Timeline(3e-3, {}, {}, events), "a step")))
    line = json.loads(page.scripts["events"])
    read = [
        (line["rows"][e[0]], line["kinds"][e[1]], line["names"][e[2]], line["loops"][e[3]], *e[4:])
        for e in line["events"]
    ]
    assert read == [
        ("compute", "matrix products", "dot </script>", "forward", 0, 2000, 0),
        ("collectives", "gathers", "all-gather.1", "forward", 1000, 2000, 5),
        ("exposed: compute waits", "gathers", "wait for all-gather.1", "forward", 2000, 1000, 0),
    ]
    assert "forward 1.0 total 1.0" in page.text and "link between GPUs 2.0 4.0" in page.text
    assert "surojax plan '<x>'" in page.text and "It fits" in page.text


@pytest.mark.full
@pytest.mark.skipif(not aot.available(), reason=f"no compiler for GPUs here: {aot.EXTRA}")
def test_a_compiled_step_is_drawn_without_an_error(tmp_path):
    """By Chromium if it is there."""
    html, target = tmp_path / "plan.html", tmp_path / "plan.json"
    plan_command.main([*TINY, "--html", str(html), "--json", str(target)])
    page, found = parsed(html.read_text(encoding="utf-8")), json.loads(target.read_text())
    check_memory(page, found)
    ends = [e[4] + e[5] for e in json.loads(page.scripts["events"])["events"]]
    assert max(ends) == pytest.approx(1e6 * found["predicted_step_s"], rel=1e-4)
    if CHROMIUM:
        words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
        done = subprocess.run([*words, html.as_uri()], capture_output=True, text=True, timeout=300)
        assert "CONSOLE" not in done.stderr and re.search(r'<canvas[^>]* height="\d+"', done.stdout)


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
    assert rows["second/metrics.jsonl"][-2:] == ["100", "-"]
    assert out.splitlines()[3].split()[-2:] == ["340", "2.50"] and "written: report.html" in out
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = parsed(text)
    assert "a<b>& 4 256 5.0000 2.5000 1.2500 1.500 300 3.00" in page.text and "plan, 2 x h100" in page.text
    assert "surojax report 'a<b>&' second/metrics.jsonl --plan plan.json" in page.text
    assert re.search(r' d="M0\.0 [\d.]+h\.1M666\.7 [\d.]+h\.1L1000\.0 ', text)  # a gap where the loss was not finite


def test_runs_are_drawn_as_a_picture(tmp_path, capsys, monkeypatch):
    """With a loss that is not finite, and without records of memory."""
    run, picture = write_run(tmp_path / "run", [5.0, None, 3.0]), tmp_path / "report.png"
    report.main([run, "--png", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG") and f"written: {picture}" in capsys.readouterr().out
    charts = {chart.title: chart for chart in runs.charts_of([runs.read_run(run)], runs.Planned("plan", 3 << 30, 8.0))}
    assert charts["Loss, in nats per token"].curves == {run: [(1, 5.0), (2, None), (3, 3.0)]}
    assert charts["Tokens/s"].plan == 8.0 and charts["Peak memory of a device, GiB"].plan == 3.0
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"pip install 'surojax\[png\]'"):
        report.main([run, "--png", str(picture)])


def test_a_long_run_keeps_its_extremes():
    points = [(n, 100.0 if n == 4321 else -9.0 if n == 77 else 1.0) for n in range(1, 50_001)]
    found = runs.thinned(points)
    assert len(found) <= 2 * runs.POINTS and {(4321, 100.0), (77, -9.0)} <= set(found)
    assert found == sorted(found)


@pytest.mark.parametrize("values", [[2.0], [0.0, 0.0], [-1e-9, 1e9], [None, None]])
def test_any_values_are_drawn(values):
    """One step, equal ones, large and small ones, and none that is finite."""
    found = runs.chart("x", {"a": list(enumerate(values))}, plan=1.0)
    assert not any("nan" in curve["path"] for curve in found["curves"])
    assert bool(found["curves"]) == any(y is not None for y in values)


@pytest.mark.parametrize(
    "files, words, said",
    [
        ({}, ["nowhere"], r"RUN: expected the folder of a run, with metrics.jsonl, got 'nowhere' \(No such file"),
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
        "-1e400",
        "1e308",
        "-1.7e308",
        "5e-324",
        "NaN",
        "-Infinity",
        "null",
        "true",
        '"x"',
        '"h100"',
        '"\\ud800"',
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


@pytest.mark.full(after=8)
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
