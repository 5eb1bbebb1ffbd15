"""Takes the pictures of docs/planning.md, light and dark: the studio, the page of a plan, and the page of two runs.

    python docs/screenshots.py RUN RUN

RUN: folders of two runs of --config tiny. It needs Chromium, playwright, Pillow, and XLA's compiler for GPUs.
"""

import argparse
import importlib
import io
import shutil
import tempfile
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from surojax import report
from surojax.studio import Server

plan = importlib.import_module("surojax.plan")  # `surojax.plan` is a function

FOLDER = Path(__file__).parent
OFFLOADS = [f"--offload_{name}" for name in ("weights", "grads", "master", "optimizer", "residual")]
PLAN = ["--config", "llama7b", "--gpu", "rtx4090", *OFFLOADS, "--gradient_accumulation_steps=8"]
COLOURS = 200


def take(page: Page, name: str, height: int) -> None:
    """Writes a picture of the page's upper part, in few colours, for each scheme."""
    page.set_viewport_size({"width": 1280, "height": height})
    for scheme, suffix in (("light", ""), ("dark", "-dark")):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(1000)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
        picture.save(FOLDER / f"{name}{suffix}.png", optimize=True)


def main() -> None:
    """Serves the studio, waits for the compiled step, writes the other pages, and takes all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs=2, metavar="RUN")
    args = parser.parse_args()
    with Server(()) as server, sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        plan.main([*PLAN, "--html", f"{folder}/plan.html"])
        report.main([*args.runs, "--html", f"{folder}/report.html"])
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(server.address)
        page.wait_for_selector("#plan:not([hidden])", timeout=600_000)
        take(page, "studio", 1100)
        page.goto(f"file://{folder}/plan.html")
        take(page, "plan", 1560)
        page.goto(f"file://{folder}/report.html")
        page.locator(".chart").first.focus()
        for _ in range(60):
            page.keyboard.press("ArrowRight")
        take(page, "report", 1150)
        server.shutdown()


if __name__ == "__main__":
    main()
