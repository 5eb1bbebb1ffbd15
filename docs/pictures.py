"""Writes docs/where.svg: what rests where, of Llama 7B under several settings, by the planner's estimates.

    python docs/pictures.py

tests/test_pages.py compares it with what this would write.
"""

import html
from pathlib import Path

from surojax.config import flags
from surojax.planner.footprint import Rows, assembly, by_class
from surojax.planner.gpus import GPUS
from surojax.planner.traffic import batch_of

FILE = Path(__file__).parent / "where.svg"
GiB = 2**30
OFFLOADS = ("optimizer", "master", "grads", "weights", "residual")
COLOURS = {
    "weights": "#9cc4ff",
    "outer": "#cfe3ff",
    "grads": "#ffb3b3",
    "master": "#a9d9a0",
    "moments": "#d5efd0",
    "residuals": "#ffd28a",
    "working space": "#c9c9c9",
    "layers from files": "#e0c8f0",
}
LEFT, ROW, TOP, WIDTH, GAP = 200, 26, 66, 300, 40  # pixels


def settings() -> dict[str, dict]:
    """{what it is called: settings}, from one GPU with everything on it to state in files."""
    offloads: dict[str, bool | str] = {}
    rows = {"1 GPU": {}} | {f"4 GPUs, ZeRO-{level}": {"gpus": 4, "zero_level": level} for level in (1, 2, 3)}
    rows["4 GPUs, ZeRO-3, shard_outer"] = {"gpus": 4, "zero_level": 3, "shard_outer": True}
    for name in OFFLOADS:
        offloads[f"offload_{name}"] = True
        rows[f"1 GPU, + offload_{name}"] = dict(offloads)
    return rows | {'1 GPU, all five "nvme"': dict.fromkeys(offloads, "nvme") | {"nvme_path": "folder"}}


def rests(changes: dict) -> Rows:
    """Bytes of each GPU by tensor class and memory, with these settings of configs/llama7b.py."""
    c = flags.load_config("llama7b")
    c.update({"gpus": 1, "recompute_block": True, **changes})
    return by_class(assembly(c), batch_of(c), "gpu")


def picture(rows: dict[str, Rows]) -> str:
    """The picture: for each setting a bar of GPU memory and one of host memory, one colour for a tensor class."""
    homes = ("device", "host")
    sums = {name: [sum(of[home] for of in classes.values()) / GiB for home in homes] for name, classes in rows.items()}
    scale = WIDTH / max(size for pair in sums.values() for size in pair)
    starts = [LEFT, LEFT + WIDTH + GAP]
    height = TOP + ROW * len(rows) + 40
    card = GPUS["rtx4090"].memory_bytes / GiB * scale + LEFT
    label = "GiB of GPU memory and of host memory by tensor class: Llama 7B under several settings"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" width="900" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="#111" role="img" aria-label="{label}">',
        f'<rect width="900" height="{height}" fill="#ffffff"/>',
    ]
    for i, (name, colour) in enumerate(COLOURS.items()):
        x = 16 + 108 * i
        lines.append(
            f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/><text x="{x + 16}" y="20">{name}</text>'
        )
    titles = ("GiB on each GPU", "GiB of host memory for each")
    lines += [f'<text x="{x}" y="48" font-weight="bold">{t}</text>' for x, t in zip(starts, titles, strict=True)]
    for i, (name, classes) in enumerate(rows.items()):
        y = TOP + ROW * i
        lines.append(f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{html.escape(name)}</text>')
        for home, left, size in zip(homes, starts, sums[name], strict=True):
            x = float(left)
            for part, colour in COLOURS.items():
                width = classes.get(part, {}).get(home, 0) / GiB * scale
                if width >= 0.05:
                    lines.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{colour}"/>')
                x += width
            lines.append(f'<text x="{x + 4:.1f}" y="{y + 13}">{size:.1f}</text>')
    end = TOP + ROW * len(rows)
    lines += [
        f'<line x1="{card:.1f}" y1="{TOP - 8}" x2="{card:.1f}" y2="{end}" stroke="#111" stroke-dasharray="4 3"/>',
        f'<text x="{card:.1f}" y="{end + 16}" text-anchor="middle">an RTX 4090</text>',
        "</svg>",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Writes the file."""
    FILE.write_text(picture({name: rests(changes) for name, changes in settings().items()}))


if __name__ == "__main__":
    main()
