"""docs/plans.html, the studio without a server: it says what the planner says, and works in a browser."""

import argparse
import importlib.util
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from chromium import browser as browser
from test_html import parsed

from surojax.config import flags
from surojax.config.fields import flat

DOCS = Path(__file__).parents[1] / "docs"
SAMPLE = [  # (model, GPU, number, sharing, placement)
    ("llama7b", "rtx4090", 1, "ZeRO-1", "everything in host memory"),
    ("llama70b", "h100", 8, "ZeRO-3", "these and residuals in host memory"),
    ("llama1b", "rtx3060", 2, "ZeRO-2", "everything in files"),
    ("llama1b", "rtx3060", 2, "ZeRO-1", "everything in files"),  # refused
]


def plans() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plans", DOCS / "plans.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_its_script_makes_of_its_data():
    """If this fails: python docs/plans.py --page"""
    module = plans()
    text = module.PAGE.read_text()
    assert text == module.page(module.stored())
    assert len(text) < 300_000
    page = parsed(text)
    assert "an estimate" in page.text.lower() and "none of it was measured on a GPU" in page.text
    assert f"Of {len(module.COMPILED)} cases that were compiled" in page.text


def test_its_estimates_are_those_of_the_planner():
    """Of a sample, to 5 %: as far as estimates are from compiled steps, and making them again takes minutes.

    If this fails: python docs/plans.py
    """
    module = plans()
    data = module.stored()
    numbers = {case: number for number, case in enumerate(module.cases())}
    for model, gpu, *case in SAMPLE:
        estimates = data["models"][model]["estimates"][gpu]
        assert len(estimates) == len(numbers)
        today = module.estimate(module.query(model, gpu, *case))
        assert estimates[numbers[tuple(case)]] == (None if today is None else pytest.approx(today, rel=0.05))
    assert data["models"]["llama1b"]["estimates"]["rtx3060"][numbers[(2, "ZeRO-1", "everything in files")]] is None
    assert data["models"].keys() == module.MODELS.keys()
    assert all(list(of["estimates"]) == module.CARDS for of in data["models"].values())


@pytest.mark.full
def test_in_a_browser(browser):
    """Load, choose by keyboard, read what the data say, commands of the studio's config; 400 px, dark, no request."""
    module = plans()
    data = module.stored()
    page = browser.new_page()
    page.set_default_timeout(60_000)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"{module.PAGE.as_uri()}#model=llama70b&gpu=h100&gpus=8")
    assert page.input_value("[name=gpus]") == "8" and "It fits, by estimate" in page.inner_text("#said")
    case = (8, "ZeRO-3", "these and residuals in host memory")
    settings = [module.MODELS["llama70b"][1], module.SHARING[case[1]], module.PLACEMENTS[case[2]]]
    page.focus(f'#placements tr[data-settings="{" ".join(settings)}"] button')
    page.keyboard.press("Enter")
    expected = data["models"]["llama70b"]["estimates"]["h100"][list(module.cases()).index(case)]
    exact = [float(x) for x in page.eval_on_selector_all("#facts b", "all => all.map(x => x.dataset.exact)")]
    assert exact[:4] == expected
    tokens = data["models"]["llama70b"]["tokens"]
    assert exact[4] == pytest.approx(8 * tokens / expected[3] * 1e3)
    question = module.studio_page.question(module.query("llama70b", "h100", *case))
    for line, verb in zip(page.locator("#commands pre").all_inner_texts(), ("plan", "train"), strict=True):
        words = shlex.split(line)
        parser = argparse.ArgumentParser()
        parser.add_argument("--gpu")
        assert words[:2] == ["surojax", verb]
        assert flat(flags.parse_flags(words[2:], parser)[0]) == flat(question.config)
    again = browser.new_page()
    again.goto(page.url)  # an address shows what it showed
    assert again.inner_text("#commands") == page.inner_text("#commands")
    page.fill("[name=host]", "1")
    assert page.locator("#placements .scroll, .scroll").evaluate_all(
        "all => all.every(x => x.scrollWidth <= x.clientWidth)"
    )
    assert page.locator("#placements td:has-text('of host memory')").count() > 0
    page.locator("#machines button").first.press("Enter")
    assert page.evaluate("document.activeElement.name") == "gpus"
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert not said and all(address.startswith(("file:", "data:")) for address in requests)
