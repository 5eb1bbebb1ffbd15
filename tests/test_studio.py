"""The page of `surojax studio`: what it says is what the planner says, to whom knows its address; and in a browser."""

import argparse
import contextlib
import http.client
import itertools
import json
import re
import select
import shlex
import socket
import struct
import threading
import time
import urllib.parse
from pathlib import Path

import pytest
from chromium import VIEWS, browser as browser
from test_html import Page, write_run
from test_huggingface import write

from surojax import studio as command
from surojax.config import flags
from surojax.config.fields import FIELDS, default_config, flat
from surojax.errors import ConfigError, Refused
from surojax.pages import studio_page
from surojax.pages.template import fill
from surojax.planner import aot, candidate
from surojax.planner.drives import disks
from surojax.planner.gpus import with_nodes
from surojax.planner.run_plan import checked, plan
from surojax.sizes import MOST_GPUS

TINY = {"model": "tiny", "gpu": "rtx4090", "gpus": "2", "offload_master": "true", "zero_level": "2"}
needs_compiler = pytest.mark.skipif(not aot.available(), reason=f"no compiler for GPUs here: {aot.EXTRA}")


@pytest.fixture
def serve():
    """serve(*runs) starts a server, which ends with the test."""
    with contextlib.ExitStack() as until_end:

        def start(*runs: str) -> command.Server:
            server = until_end.enter_context(command.Server(runs))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            until_end.callback(server.compiling.acquire)  # no plan is still compiled while the next test asks for one
            until_end.callback(server.shutdown)
            return server

        yield start


def get(server: command.Server, path: str, query: dict[str, str] | None = None, named: str = ""):
    """(status, headers, text) of an address behind the token."""
    connection = http.client.HTTPConnection(command.HERE, server.server_port, timeout=120)
    headers = {"Host": named} if named else {}
    connection.request("GET", f"/{server.token}/{path}?{urllib.parse.urlencode(query or {})}", headers=headers)
    response = connection.getresponse()
    return response.status, response.headers, response.read().decode()


def test_who_does_not_know_the_address_gets_nothing(serve):
    server = serve()
    status, headers, text = get(server, "")
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert "connect-src 'self'" in headers["Content-Security-Policy"] and headers["Cache-Control"] == "no-store"
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert not [x for x in Page(text).addresses if not x.startswith("data:")] and server.token not in text
    assert get(server, "", named="evil.example")[0] == get(server, "other")[0] == get(server, "../estimate")[0] == 404
    assert get(server, "", named=f"localhost:{server.server_port}")[0] == 200
    server.token = "another"  # what the client of the next line sends was right before
    connection = http.client.HTTPConnection(command.HERE, server.server_port)
    connection.request("GET", f"/{'x' * 22}/estimate?model=tiny")
    assert connection.getresponse().status == 404


def test_an_estimate_is_that_of_the_planner(serve):
    """Also of a model in files, with disks; commands lead to the same config."""
    settings = {"offload_weights": "nvme", "offload_grads": "nvme", "nvme_path": "x y", "recompute_block": "true"}
    asked = {"model": "tiny", "gpu": "rtx4090", "gpus": "1", "files": "1000", "disk": "2x7/6", "host": "64"}
    asked |= {"sequences": "16", "sequence_len": "128"} | settings
    _, headers, text = get(serve(), "estimate", asked)
    found = json.loads(text)
    words = [f"--config.{name}={value}" for name, value in ({"gpus": "1", "sequence_len": "128"} | settings).items()]
    parsers = (argparse.ArgumentParser() for _ in range(2))
    c, _ = flags.parse_flags(["--config", "tiny", *words], next(parsers))
    c.per_device_batch_size, c.gradient_accumulation_steps = 16, 1
    _, verb, *words = shlex.split(found["train"])
    assert verb == "train" and flat(flags.parse_flags(words, next(parsers))[0]) == flat(c)
    assert found["plan"].endswith(" --gpu rtx4090 --host-memory 64 --disk 2x7/6")
    assert found["fit"].endswith(" --gpu rtx4090 --host-memory 64 --disk 2x7/6 --nvme 1000")
    expected = candidate.estimated(checked(c, "rtx4090"), with_nodes("rtx4090", None, None), disks=disks("2x7/6"))
    exact = {fact["name"]: fact["exact"] for fact in found["facts"]}
    assert exact["memory of each GPU"] == expected.need.device and exact["files"] == expected.need.files > 0
    assert exact["a step"] == pytest.approx(expected.seconds)
    assert exact["tokens/s"] == pytest.approx(16 * 128 / expected.seconds)
    assert found["fits"] and "application/json" in headers["Content-Type"]
    assert sum(phase["seconds"] for phase in found["phases"]) == pytest.approx(expected.seconds)


def test_the_sequences_of_a_step_stay_with_settings_of_microbatches(serve):
    """A smaller microbatch means more of them; settings that name both have the last word."""
    server, asked = serve(), {"model": "tiny", "gpu": "rtx4090", "gpus": "2", "sequences": "16"}

    def batch(**settings: str) -> str:
        return json.loads(get(server, "estimate", asked | settings)[2])["train"]

    one = batch(per_device_batch_size="2")
    assert "--config.gradient_accumulation_steps=4 --config.per_device_batch_size=2" in one
    both = batch(per_device_batch_size="2", gradient_accumulation_steps="3")
    assert "--config.gradient_accumulation_steps=3" in both


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "lama7b"}, "expected a name of .* got 'lama7b'; did you mean llama7b?"),
        ({"model": "/not/there"}, "model_path"),
        ({"model": " "}, "model: expected a name of configs/"),
        ({"gpu": "rtx9999"}, "rtx9999"),
        ({"gpus": "999999"}, "gpus: expected at most 131,072, got 999999"),
        ({"gpus": "1.5"}, "gpus: expected a whole number, got '1.5'"),
        ({"gpus": "0"}, "gpus: expected a number, more than 0, got '0'"),
        ({"gpus": "many"}, "gpus: expected a number, more than 0, got 'many'; correct it, or leave it empty"),
        ({"host": "-1"}, "host: expected a number"),
        ({"files": "nan"}, "files: expected a number"),
        ({"disk": "fast"}, "--disk: expected GB/s read and written"),
        ({"sequences": "3"}, "--effective-batch: expected a multiple of the 2 GPUs, got 3"),
        ({"zero_levl": "3"}, "zero_levl.*did you mean 'zero_level'"),
        ({"zero_level": "9"}, "zero_level: expected one of 1, 2, 3, got 9"),
        ({"method": "dora"}, "method: expected one of full, lora, qlora, got 'dora'"),
        ({"model": "", "model_path": "/not/there"}, "model_path"),
    ],
    ids=lambda x: " ".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_what_cannot_be_answered_is_a_line(serve, change, message):
    status, headers, text = get(serve(), "estimate", TINY | change)
    assert status == 200 and headers["Content-Type"].startswith("text/plain")
    assert re.search(message, text) and "\n" not in text


@pytest.mark.full
def test_settings_that_fit_are_taken_back(serve):
    """What is said of settings is what an estimate of them says; if nothing fits, what would help."""
    server = serve()
    large = {"model": "llama1b", "gpu": "rtx4060", "gpus": "1", "optimizer": "adamw8bit"}
    _, _, text = get(server, "fit", large)
    rows = json.loads(text)["rows"]
    settings = [dict(row["settings"]) for row in rows]
    assert rows and all(x["optimizer"] == "adamw8bit" and "attention" not in x for x in settings)
    seconds = [fact["exact"] for row in rows for fact in row["facts"] if fact["name"] == "a step"]
    assert all(
        after > before * 1.001 for before, after in itertools.pairwise(seconds)
    )  # none that is as good as another
    again = json.loads(get(server, "estimate", large | settings[0])[2])
    assert again["fits"] and again["facts"] == rows[0]["facts"]
    nothing = json.loads(get(server, "fit", large | {"host": "0.5", "model.num_hidden_layers": "20"})[2])
    assert not nothing["rows"] and any("more host memory" in line for line in nothing["helps"])


def test_settings_that_contradict_a_model_are_refused(serve, tmp_path):
    """As on a command line; a model by its folder is in the commands."""
    folder = str(write(tmp_path / "model", "gemma2"))
    asked = {"model": "", "model_path": folder, "gpu": "rtx4090", "gpus": "2"}
    server = serve()
    refused = get(server, "estimate", asked | {"model.num_hidden_layers": "9"})[2]
    assert re.match(r"model.num_hidden_layers: expected 4, as the model at .*, got 9", refused)
    for method, fields in (("full", []), ("lora", ["--config.lora=True"])):
        found = json.loads(get(server, "estimate", asked | {"weight_decay": "0.5", "method": method})[2])
        verb, *words = shlex.split(found["train"])[1:]
        assert verb == "train" and words[0] == f"--config.model_path={folder}"
        assert words[1:] == ["--config.gpus=2", *fields, "--config.weight_decay=0.5"] and found["fits"]
        c, _ = flags.parse_flags(words, argparse.ArgumentParser())
        question = studio_page.question(asked | {"weight_decay": "0.5", "method": method})
        assert flat(question.config) == flat(c)  # with the learning rate of adapters


def test_what_a_query_leaves_out():
    asked = {"model": "tiny", "gpu": "rtx4090"}
    found = studio_page.question(asked | {"gpus": "", "sequence_len": " ", "disk": " ", "method": ""})
    assert (found.given.gpus, found.given.sequence_len) == (1, flags.load_config("tiny").sequence_len)
    assert (found.disk, found.host, found.files, found.space().limits.files) == (None, None, None, 0)
    assert found.machine_command("fit").endswith(" --gpu rtx4090")
    assert studio_page.question(asked | {"gpus": str(MOST_GPUS)}).given.gpus == MOST_GPUS
    with pytest.raises(ConfigError, match=r"^gpus: expected at most 131,072, got 131073; correct it"):
        studio_page.question(asked | {"gpus": str(MOST_GPUS + 1)})
    rates = [
        studio_page.question(asked | {"model": "a/b", "lora": lora}).given.learning_rate for lora in ("true", "false")
    ]
    assert rates == [2e-4, 2e-5]  # those of configs/finetune.py
    large = studio_page.answer_estimate(studio_page.question(asked | {"model": "llama7b"}))
    assert re.fullmatch(r"It does not fit, by estimate: .* too much", large["said"]) and not large["fits"]


@pytest.mark.parametrize(
    "method, before, on",
    [
        ("full", {"lora": True, "qlora_bnb": True}, set()),
        ("lora", {"qlora_fp8": True}, {"lora"}),
        ("qlora", {}, {"lora", "qlora_bnb"}),
        ("qlora", {"qlora_fp8": True}, {"lora", "qlora_fp8"}),
    ],
)
def test_methods(method, before, on):
    """A base that is quantised stays as it is, and only adapters have one."""
    c = default_config()
    c.update(before)
    studio_page.set_method(c, method)
    assert {name for name in ("lora", "qlora_bnb", "qlora_fp8", "qlora_fp4", "qlora_mxfp4") if c[name]} == on
    assert [*studio_page.METHODS] == ["full", "lora", "qlora"]
    with pytest.raises(ConfigError, match=r"^method: expected one of full, lora, qlora, got 'dora'; choose one"):
        studio_page.set_method(c, "dora")


def test_a_mistake_of_ours_is_said_and_the_page_stays(serve, monkeypatch, capsys):
    def broken(asked: studio_page.StudioQuery) -> dict:
        raise ValueError("a shape\nof two lines")

    monkeypatch.setattr(studio_page, "answer_estimate", broken)
    server = serve()
    assert get(server, "estimate", TINY)[2] == "ValueError: a shape of two lines"
    assert "Traceback" in capsys.readouterr().err and get(server, "")[0] == 200


@pytest.mark.full
@needs_compiler
def test_a_plan_is_that_of_the_compiled_step(serve):
    server = serve()
    _, headers, text = get(server, "plan", TINY)
    config, _ = flags.parse_flags(
        ["--config", "tiny", "--config.gpus=2", "--config.offload_master", "--config.zero_level=2"],
        argparse.ArgumentParser(),
    )
    expected = plan(config, "rtx4090")
    found = json.loads(text)
    assert headers["Content-Type"].startswith("application/json") and found["fits"]
    assert Page(found["page"]).bytes[-3:] == [expected.device_bytes, expected.host_bytes, 0]
    exact = {fact["name"]: fact["exact"] for fact in found["facts"]}
    assert (exact["memory of each GPU"], exact["a step"]) == (expected.device_bytes, expected.predicted_step_s)
    estimated = json.loads(get(server, "estimate", TINY)[2])
    assert [fact["name"] for fact in estimated["facts"]] == [fact["name"] for fact in found["facts"]][:5]
    limits = [x["note"] for of in (estimated, found) for x in of["facts"] if x["name"] == "memory of each GPU"]
    assert limits == ["of 22.0 GiB"] * 2


def test_only_the_last_plan_that_was_asked_for_is_compiled(serve, monkeypatch):
    """While one compiles, two more are asked for."""
    server = serve()
    begun, go_on, compiled = threading.Event(), threading.Event(), []

    def slow(asked: studio_page.StudioQuery) -> dict:
        compiled.append(asked.config.gpus)
        begun.set()
        assert go_on.wait(60)
        return {}

    monkeypatch.setattr(studio_page, "compiled", slow)
    texts: dict[str, str] = {}

    def ask(gpus: str) -> threading.Thread:
        before = server.newest
        thread = threading.Thread(target=lambda: texts.update({gpus: get(server, "plan", TINY | {"gpus": gpus})[2]}))
        thread.start()
        while server.newest is before:
            pass
        return thread

    threads = [ask("1")]
    assert begun.wait(60)
    threads += [ask("2"), ask("4")]
    go_on.set()
    for thread in threads:
        thread.join()
    assert compiled == [1, 4] and texts == {"1": "{}", "2": "another plan was asked for meanwhile", "4": "{}"}


def connected(server: command.Server) -> socket.socket:
    return socket.create_connection((command.HERE, server.server_port), 20)


def test_a_request_that_does_not_arrive_is_given_up(serve, monkeypatch, capfd):
    """Whoever sends nothing, a byte now and then, or half a request holds no thread, and others are answered."""
    monkeypatch.setattr(command, "REQUEST_S", 0.5)
    monkeypatch.setattr(command, "MOST_CONNECTIONS", 4)
    server = serve()
    slow = [connected(server) for _ in range(3)]
    started = time.monotonic()
    slow[1].sendall(b"GET /")
    ended: set[socket.socket] = set()
    while len(ended) < 3 and time.monotonic() - started < 10:
        with contextlib.suppress(OSError):
            slow[2].sendall(b"x")
        for connection in select.select([x for x in slow if x not in ended], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):
                if connection.recv(4096):
                    continue  # 400, and then the end
            ended.add(connection)
    assert len(ended) == 3 and get(server, "")[0] == 200
    held = [connected(server) for _ in range(4)]
    time.sleep(0.2)
    waiting = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert len(waiting) >= 4 and all(thread.daemon for thread in waiting)  # none keeps the process from its end
    with connected(server) as refused, contextlib.suppress(ConnectionResetError):
        assert refused.recv(1) == b""
    for connection in (*slow, *held):
        connection.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "request_line",
    [
        *(
            "GET {} HTTP/1.0",
            "GET {}run?number=0 HTTP/1.1",
            "HEAD {} HTTP/1.0",
            "POST {} HTTP/1.0",
            "GET {}x HTTP/9",
            "{}",
        ),
        *("GET {}estimate?" + 60_000 * "a" + " HTTP/1.0", "GET {}estimate?" + 9000 * "&=" + " HTTP/1.0"),
        *("GET {}estimate?model=%00&gpu=%ff HTTP/1.0", "GET " + 70_000 * "/" + " HTTP/1.0", "\0\xff"),
    ],
    ids=lambda text: text[:40],
)
def test_a_client_that_leaves_prints_nothing(serve, monkeypatch, capfd, request_line):
    """Before its answer comes, whatever it asked."""
    server = serve()
    answered = threading.Event()
    page = server.page

    def late(query: dict[str, str]) -> tuple[str, str]:
        time.sleep(0.1)
        return page(query)[0], "x" * 10_000_000

    server.answers[""] = late
    shut_down = server.shutdown_request
    monkeypatch.setattr(server, "shutdown_request", lambda request: (shut_down(request), answered.set()))
    connection = connected(server)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves with a reset
    line = request_line.replace("{}", f"/{server.token}/")
    connection.sendall(f"{line}\r\nHost: {command.HERE}:{server.server_port}\r\n\r\n".encode("latin1"))
    time.sleep(0.02)
    connection.close()
    assert answered.wait(20)
    time.sleep(0.1)
    assert capfd.readouterr() == ("", "")


def test_pages_within_the_page_reach_nothing(serve, tmp_path):
    """They have scripts, but neither the page's address nor its elements."""
    text = get(serve(write_run(tmp_path / "first", [3.0, 2.0])), "")[2]
    frames = re.findall(r"<iframe[^>]*>", text)
    assert len(frames) == 2 and all('sandbox="allow-scripts"' in frame for frame in frames)


def test_runs_are_watched(serve, tmp_path):
    server = serve(write_run(tmp_path / "first", [3.0, 2.0]))
    _, headers, text = get(server, "run", {"number": "0"})
    assert headers["Content-Type"].startswith("text/html") and "2.0000" in text
    for number in ("1", "-1", "x", ""):
        assert get(server, "run", {"number": number})[2].startswith("run: expected the number of one of 1 runs")


def test_the_command(tmp_path, capsys, monkeypatch):
    opened, pages = [], []

    def open_browser(url: str) -> None:
        file = Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))
        assert file.parent.stat().st_mode & 0o077 == 0  # nobody else reads it
        opened.append(url)
        pages.append(file.read_text())

    monkeypatch.setattr(command.webbrowser, "open", open_browser)

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.Server, "serve_forever", interrupted)
    command.main([])
    said = capsys.readouterr().out
    (address,) = re.findall(r"^surojax studio: (http://127.0.0.1:\d+/[\w-]{22}/)$", said, re.MULTILINE)
    assert opened[0].startswith("file:///") and address not in opened[0] and f"url={address}" in pages[0]
    assert not Path(urllib.parse.urlsplit(opened[0]).path).exists()
    command.main(["--no-browser"])
    assert len(opened) == 1
    with command.Server() as other:
        for argv, message in [
            (["--port", "70000"], "--port: expected 0 to 65535, got 70000"),
            (["--port", str(other.server_port)], f"--port: cannot use {other.server_port}"),
            ([str(tmp_path / "missing")], "RUN: expected the folder of a run"),
        ]:
            with pytest.raises(Refused, match=f"surojax.studio: error: {message}"):
                command.main(argv)


# -- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=VIEWS, ids=str)
def page(request, browser):
    """A page of this width and scheme, on which nothing is logged and nothing is wider than the window."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(30_000)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    yield page
    assert not said
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 128")
    assert dark == (scheme == "dark")


def test_the_first_view_fits(serve):
    """By the planner, of the choices that the page has before anybody has made some."""
    asked = {name: value for name, value in studio_page.START.items()}
    found = json.loads(get(serve(), "estimate", asked)[2])
    assert found["fits"] and all(name in studio_page.FORM for name in asked)


def canned(query: dict[str, str]) -> dict:
    """An answer whose every text names the question, in place of the planner's."""
    mark = f"[{query.get('model') or query['model_path']} {len(query)} {query['gpu']} {query['gpus']}]"
    facts = [{"name": f"memory {mark}", "value": f"GiB {mark}", "note": mark, "exact": 1}]
    commands = {verb: f"surojax {verb} {mark}" for verb in ("train", "plan", "fit")}
    answer = {"fits": True, "said": f"It fits {mark}", "facts": facts, "compiles": True, "phases": []} | commands
    text = fill("page.html.jinja", title="", framed=True, command="", version="").replace(
        "<main>", f"<main>{mark * 90}"
    )
    return answer | {"page": text, "rows": [{"settings": [("zero_level", "3")], "facts": facts}]}


def test_another_choice_leaves_nothing_of_the_last_one(serve, page):
    """Of no control, and neither does an answer that comes late; a plan's figures take the estimate's place."""
    server = serve()
    may_answer = threading.Event()
    may_answer.set()

    def answer(query: dict[str, str]) -> tuple[str, str]:
        assert may_answer.wait(60)
        return "application/json", json.dumps(canned(query))

    server.answers |= dict.fromkeys(("estimate", "plan", "fit"), answer)
    page.goto(server.address)
    page.wait_for_selector("#plan:not([hidden])")
    assert page.locator("button.primary").count() == 1
    assert page.get_attribute("#plan iframe", "srcdoc").count("[llama7b 5 rtx4090 1]") == 90
    page.wait_for_function("document.querySelector('#plan iframe').clientHeight > 40")  # as high as what it holds
    frame = page.frame_locator("#plan iframe").locator("html")
    assert frame.evaluate("x => x.scrollHeight <= x.clientHeight + 1 && x.scrollWidth <= x.clientWidth")
    assert page.locator("#facts.estimated").count() == 0
    choices = [
        lambda: page.select_option("[name=model]", "llama70b"),
        lambda: page.select_option("[name=gpu]", "rtx4060"),
        lambda: page.select_option("[name=method]", "full"),
        lambda: page.fill("[name=gpus]", "3"),
        lambda: page.fill("[name=host]", "7"),
        lambda: (page.fill("#add", "recompute_block"), page.press("#add", "Enter")),
        lambda: page.click("#settings button"),
        lambda: (page.select_option("[name=model]", ""), page.fill("[name=model_path]", "/mine")),
        lambda: page.press("[name=model_path]", "Tab"),
        lambda: page.click("#fit"),
        lambda: page.select_option("[name=model]", "llama7b"),
    ]
    for number, choose in enumerate(choices):
        may_answer.clear()
        choose()
        assert not re.search(r"\[|fits|GiB|surojax", page.inner_text("#result")) and not page.is_visible("#plan")
        assert page.get_attribute("#plan iframe", "srcdoc") is None and not page.is_visible("#found")
        may_answer.set()
        if number != 7:  # a name that is being typed is not asked for
            page.wait_for_selector("#facts.estimated")
            query = dict(urllib.parse.parse_qsl(page.evaluate("location.hash.slice(1)"), keep_blank_values=True))
            mark = f"[{query.get('model') or query['model_path']} {len(query)} {query['gpu']} {query['gpus']}]"
            assert set(re.findall(r"\[.*?\]", page.inner_text("#result"))) == {mark}


def test_an_error_stands_at_its_field(serve, page):
    """A field's help is beside its control; the same words are nowhere else, and go when it is corrected."""
    page.goto(f"{serve().address}#{urllib.parse.urlencode(TINY | {'method': 'full', 'zero_level': '9'})}")
    page.wait_for_selector("[name=zero_level][aria-invalid=true]")
    label = page.locator("label:has([name=zero_level])")
    assert "expected one of 1, 2, 3, got 9" in label.inner_text() and FIELDS["zero_level"].comment in label.inner_text()
    assert "1, 2, 3" not in page.inner_text("#result")
    page.select_option("[name=zero_level]", "3")
    page.wait_for_selector("#said:has-text('It fits')")
    assert page.locator("[aria-invalid]").count() == 0 == page.locator(".error").count()
    for name, value, line in (
        ("gpus", "0", "more than 0"),
        ("disk", "fast", "GB/s"),
        ("sequences", "3", "multiple of"),
    ):
        before = page.input_value(f"[name={name}]")
        page.fill(f"[name={name}]", value)
        page.wait_for_selector(f"label:has([name={name}]) .error:has-text('{line}')")
        page.fill(f"[name={name}]", before)
    page.wait_for_selector("#said:has-text('It fits')")


def test_a_run_is_read_by_pointer_and_keyboard(serve, browser, tmp_path):
    """Within the page, whose frames are as high as what they hold; it grows while nobody points at it."""
    run = tmp_path / "run"
    server = serve(write_run(run, [3.0, 2.5, 2.0]))
    page = browser.new_page(viewport={"width": 1280, "height": 1400})
    page.goto(server.address)
    frame = page.frame_locator(".run iframe")
    chart = frame.locator(".chart").first
    chart.scroll_into_view_if_needed()
    box = chart.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    values = chart.locator(".u-legend")
    assert [words.strip() for words in values.locator("td").all_inner_texts()] == ["2", "2.5", "-"]
    page.mouse.move(2, 2)
    chart.focus()
    chart.press("Home")
    chart.press("ArrowRight")
    assert [words.strip() for words in values.locator("td").all_inner_texts()] == ["2", "2.5", "-"]
    html = frame.locator("html")
    assert html.evaluate("x => x.scrollHeight <= x.clientHeight + 1 && x.scrollWidth <= x.clientWidth")
    page.focus("#fit")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"log": "step", "step": 4, "loss": 1.25, "tokens": 192}) + "\n")
    frame.locator("td:has-text('1.2500')").first.wait_for()


@pytest.mark.full
@needs_compiler
def test_in_a_browser(serve, page):
    """Load, read numbers that are the plan's, zoom the time line, search settings and take some, copy a command."""
    server = serve()
    page.set_default_timeout(120_000)  # it compiles
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{server.address}#{urllib.parse.urlencode(TINY | {'method': 'full'})}")
    page.wait_for_selector("#said:has-text('It fits, by estimate')")
    assert page.input_value("[name=gpus]") == "2" and "update" in page.inner_text("#note")
    page.wait_for_selector("#plan:not([hidden])")
    config, _ = flags.parse_flags(
        ["--config", "tiny", "--config.gpus=2", "--config.offload_master", "--config.zero_level=2"],
        argparse.ArgumentParser(),
    )
    expected = plan(config, "rtx4090")
    frame = page.frame_locator("#plan iframe")
    cells = frame.locator("#memory-table tr.total td")
    assert [int(cells.nth(i).get_attribute("data-bytes")) for i in range(2)] == [
        expected.device_bytes,
        expected.host_bytes,
    ]
    canvas = frame.locator("#timeline")
    before = canvas.evaluate("x => x.toDataURL()")
    canvas.press("+")
    page.wait_for_timeout(200)
    assert canvas.evaluate("x => x.toDataURL()") != before
    page.click("#commands .copy >> nth=0")  # whose "copied" is gone after 1.5 s
    command = "surojax train --config tiny --config.gpus=2"
    page.wait_for_function(f"async () => (await navigator.clipboard.readText()).startsWith('{command}')")
    page.fill("[name=gpus]", "4")
    page.wait_for_selector("#commands:has-text('--config.gpus=4')")
    page.focus("#fit")
    page.keyboard.press("Enter")
    page.wait_for_selector("#found tbody tr")
    page.wait_for_selector("#said:has-text('It fits')")
    assert page.get_attribute("#found button >> nth=0", "aria-pressed") == "true"
