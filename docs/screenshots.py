"""Takes the picture of the studio in docs/planning.md: Llama 70B on one RTX 4090, compiled.

    python docs/screenshots.py

It needs Chromium, playwright, and XLA's compiler for GPUs.
"""

import shutil
import threading
import urllib.parse
from pathlib import Path

from playwright.sync_api import sync_playwright

from surojax.studio import Server

CLASSES = ("grads", "master", "optimizer", "residual", "weights")
CHOICES = {
    "model": "llama70b",
    "gpu": "rtx4090",
    "gpus": "1",
    "host": "64",
    "files": "2000",
    "disk": "2x7/6",
    "sequence_len": "2048",
    "sequences": "32",
    "settings": " ".join(
        [*(f"offload_{name}=nvme" for name in CLASSES), "nvme_path=FOLDER overlap_update=true per_device_batch_size=1"]
    ),
}


def main() -> None:
    """Serves the studio, chooses, waits for the compiled step, and writes the picture."""
    with Server(()) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 1500})
        page.goto(f"{server.address}#{urllib.parse.urlencode(CHOICES)}")
        page.wait_for_selector("#said:has-text('compiled')", timeout=600_000)
        page.wait_for_timeout(2000)
        page.screenshot(path=Path(__file__).with_name("studio.png"))
        server.shutdown()


if __name__ == "__main__":
    main()
