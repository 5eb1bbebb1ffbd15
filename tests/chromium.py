"""Chromium for the tests of pages, which are skipped where there is none."""

import importlib.util
import shutil

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic", "--no-first-run"]
VIEWS = [  # width and scheme
    pytest.param(view, marks=pytest.mark.full if i else ())
    for i, view in enumerate([(400, "dark"), (1280, "light")])  # a page's layout does not depend on its colours
]


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    if CHROMIUM is None or importlib.util.find_spec("playwright") is None:
        pytest.skip("no Chromium here, or no playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()
