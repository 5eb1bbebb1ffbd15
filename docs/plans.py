"""Makes docs/plans.html: the studio without a server, for a table of models, GPUs and placements, estimated beforehand.

    python docs/plans.py            the estimates again (minutes), and the page
    python docs/plans.py --page     the page again, of the estimates that it holds
    python docs/plans.py --compile  the page again, and COMPILED: how far estimates are from compiled steps

Every estimate is the answer of `surojax.pages.studio_page.answer_estimate` to a question of the studio.
tests/test_plans.py asks a few of them again, and compares the page with what this would write.
"""

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import surojax
from surojax.config.fields import Config
from surojax.errors import ConfigError
from surojax.pages import studio_page
from surojax.pages.template import fill
from surojax.planner import aot
from surojax.planner.candidate import device_limit
from surojax.planner.footprint import HOST_POOL
from surojax.planner.gpus import GPUS, with_nodes
from surojax.planner.run_plan import plan

PAGE = Path(__file__).with_name("plans.html")
MiB = 2**20
# Of each model: its name, and settings. A step has eight microbatches.
EIGHT = "gradient_accumulation_steps=8"
MODELS = {
    "llama7b": ("Llama 7B", EIGHT),
    "llama1b": ("Llama 1B", EIGHT),
    "qwen32b": ("Qwen 32B", EIGHT),
    "llama70b": ("Llama 70B", EIGHT),
    "llama405b": ("Llama 405B", EIGHT),
    "qwen3_30b_a3b": ("Qwen3 30B-A3B", f"{EIGHT} per_device_batch_size=2 lora=false qlora_bnb=false"),
}
CARDS = "rtx3060 rtx4060 rtx5060ti_16gb rtx3090 rtx4090 rtx5090 rtxa6000 l40s a100 h100 h200 b200".split()
COUNTS = (1, 2, 4, 8, 16, 64)
SHARING = {  # between several GPUs
    "ZeRO-1": "zero_level=1",
    "ZeRO-2": "zero_level=2",
    "ZeRO-3": "zero_level=3 shard_outer=true",
}
STATE = "offload_optimizer=true offload_master=true"
ALL = "offload_residual offload_optimizer offload_master offload_grads offload_weights".split()
PLACEMENTS = {
    "all on the GPU": "recompute_block=true",
    "master weights and optimizer state in host memory": f"recompute_block=true {STATE}",
    "these and residuals in host memory": f"recompute_block=true {STATE} offload_residual=true",
    "everything in host memory": " ".join(
        ["recompute_block=true microbatches_per_fetch=8", *(f"{name}=true" for name in ALL)]
    ),
    "everything in files": " ".join(["recompute_block=true nvme_path=FOLDER", *(f"{name}=nvme" for name in ALL)]),
}
COMPILED = [  # (model, GPU, number, sharing, placement) of what is compiled to see how far estimates are
    ("llama7b", "rtx4090", 4, "ZeRO-3", "all on the GPU"),
    ("llama7b", "rtx4090", 1, "", "everything in host memory"),
    ("qwen32b", "rtx4090", 4, "ZeRO-3", "everything in host memory"),
    ("llama1b", "rtx4060", 1, "", "master weights and optimizer state in host memory"),
    ("llama70b", "h100", 8, "ZeRO-3", "these and residuals in host memory"),
]


def query(model: str, gpu: str, number: int, sharing: str, placement: str) -> dict[str, str]:
    """The studio's question about a case."""
    settings = " ".join([MODELS[model][1], SHARING[sharing] if number > 1 else "", PLACEMENTS[placement]])
    pairs = (word.split("=") for word in settings.split())
    return {"model": model, "gpu": gpu, "gpus": str(number)} | {name: value for name, value in pairs}


def cases() -> Iterator[tuple[int, str, str]]:
    """(number of GPUs, sharing, placement) in the order of the estimates of a model and GPU."""
    for number in COUNTS:
        yield from itertools.product([number], list(SHARING)[: None if number > 1 else 1], PLACEMENTS)


def asked(of: dict[str, str]) -> studio_page.StudioQuery:
    """A question, by rates that were not measured on this machine."""
    question = studio_page.question(of)
    question.config.rates_file = ""
    return question


def estimate(of: dict[str, str]) -> list[float] | None:
    """[MiB of each GPU, of a machine's host memory, of files, milliseconds of a step]; None if it is refused."""
    try:
        answer = studio_page.answer_estimate(asked(of))
    except ConfigError:
        return None
    exact = {fact["name"]: fact["exact"] for fact in answer["facts"]}
    sizes = [exact["memory of each GPU"], exact["host memory of a machine"], exact.get("files", 0)]
    return [*(math.ceil(size / MiB) for size in sizes), float(f"{1e3 * exact['a step']:.4g}")]


def compared(of: dict[str, str]) -> dict[str, Any]:
    """A case by estimate and compiled: MiB of each GPU, and milliseconds of a step."""
    question = asked(of)
    p = plan(question.config, question.gpu, advise=False)
    device, _, _, milliseconds = estimate(of) or [math.nan] * 4
    assert p.predicted_step_s is not None
    step = float(f"{1e3 * p.predicted_step_s:.4g}")
    return of | {"estimated": [device, milliseconds], "compiled": [math.ceil(p.device_bytes / MiB), step]}


def tokens(c: Config) -> int:
    """Tokens of a step on each GPU."""
    return studio_page.tokens(c) // c.gpus


def computed() -> dict[str, Any]:
    """All that the page shows, but for COMPILED."""
    models = {}
    for model, (name, settings) in MODELS.items():
        estimates = {gpu: [estimate(query(model, gpu, *case)) for case in cases()] for gpu in CARDS}
        per_gpu = tokens(asked(query(model, CARDS[0], *next(cases()))).config)
        models[model] = {"name": name, "settings": settings, "tokens": per_gpu, "estimates": estimates}
    limits = {gpu: device_limit(with_nodes(gpu, None, None)) // MiB for gpu in CARDS}
    return {
        "version": surojax.__version__,
        "host_pool": HOST_POOL,
        "counts": COUNTS,
        "gpus": {gpu: {"name": GPUS[gpu].name, "limit": limit} for gpu, limit in limits.items()},
        "sharing": [{"name": name, "settings": settings} for name, settings in SHARING.items()],
        "placements": [{"name": name, "settings": settings} for name, settings in PLACEMENTS.items()],
        "models": models,
    }


def accuracy(rows: list[dict[str, Any]]) -> str:
    """How far the estimates are from the cases that were compiled."""
    if not rows:
        return ""
    off = [[abs(e / c - 1) for e, c in zip(x["estimated"], x["compiled"], strict=True)] for x in rows]
    memory, time = (f"{sum(x) / len(x):.0%} on average and {max(x):.0%} at most" for x in zip(*off, strict=True))
    return f"Of {len(rows)} cases that were compiled, memory of a GPU is {memory} off, and predicted time {time}."


def written(data: dict[str, Any]) -> str:
    """The data as JSON, a line for each model and GPU."""
    lines = ['"models":{']
    for m, (model, of) in enumerate(data["models"].items()):
        start = json.dumps({key: value for key, value in of.items() if key != "estimates"})[:-1]
        rows = ",\n".join(
            f"{json.dumps(gpu)}:{json.dumps(row, separators=(',', ':'))}" for gpu, row in of["estimates"].items()
        )
        lines += [f'{json.dumps(model)}:{start},"estimates":{{', rows, "}}" + "," * (m + 1 < len(data["models"]))]
    rest = (f"{json.dumps(key)}:{json.dumps(value)}," for key, value in data.items() if key != "models")
    return "\n".join(["{", *rest, *lines, "}}"]).replace("<", "\\u003c")


def page(data: dict[str, Any]) -> str:
    """The page."""
    return fill(
        "plans.html.jinja",
        title="What fits where, by estimate",
        command="python docs/plans.py",
        version=data["version"],
        accuracy=accuracy(data["compiled"]),
        models={model: of["name"] for model, of in data["models"].items()},
        gpus={gpu: of["name"] for gpu, of in data["gpus"].items()},
        counts=data["counts"],
        data=written(data),
    )


def stored() -> dict[str, Any]:
    """The data of the page as it is."""
    text = PAGE.read_text().partition('id="data">')[2].partition("</script>")[0]
    return json.loads(text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="only the page, of the estimates that it holds")
    parser.add_argument("--compile", action="store_true", help="only the page, and what it says of compiled steps")
    args = parser.parse_args(argv)
    aot.silence()
    old = stored() if PAGE.exists() else {}
    data = old if args.page or args.compile else computed() | {"compiled": old.get("compiled", [])}
    if args.compile:
        data["compiled"] = [compared(query(*case)) for case in COMPILED]
    PAGE.write_text(page(data))


if __name__ == "__main__":
    import jax

    jax.config.update("jax_platforms", "cpu")
    main()
