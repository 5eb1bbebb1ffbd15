"""Advice for files that lack a tensor, and for folders that lack a file: what they have instead."""

import difflib
from collections.abc import Collection
from pathlib import Path

from surojax.errors import shown
from surojax.run import on_disk
from surojax.run.starts import STARTS_FILE

MOST = 2000  # names that are compared
ADAPTER = "adapter_config.json"
SOURCE = "source.json"  # in the folder where a run keeps the small files of its model: whose they are
# Beginnings that wrappers give to names, and how a model is saved without them.
WRAPPERS = {
    "_orig_mod.": "save the model that torch.compile wraps",
    "module.": "save the model that DistributedDataParallel wraps",
    "base_model.model.": "merge the adapter before saving (merge_and_unload)",
    "_fsdp_wrapped_module.": "save the full state dict of the model that FSDP wraps",
}
# Files of tokenizers that are not read, and how to make the one that is.
SLOW_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "tekken.json", "tokenizer_config.json")
SAVE_FAST = "save a fast tokenizer there (transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
PICKLED = ("pytorch_model.bin.index.json", "pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.pth")


def named_instead(missing: str, names: Collection[str], otherwise: str) -> str:
    """Says for a message's end which names files have in place of a missing one, and what to change.

    otherwise: the advice if the names do not tell it.
    """
    for name in names:
        if name.endswith(f".{missing}"):
            before = name.removesuffix(missing)
            of_wrappers = (advice for start, advice in WRAPPERS.items() if f".{start}" in f".{before}")
            wrapper = next(of_wrappers, "save the model by itself")
            return f"got {shown(name, 120)}; {wrapper}, or remove {before!r} from the names"
    if not names:
        return f"got no tensors at all; {otherwise}"
    candidates = sorted(names)[:MOST]
    nearest = difflib.get_close_matches(missing, candidates, n=1, cutoff=0.0)[0]
    return f"got no such tensor among {len(names):,}, the most similar being {shown(nearest, 120)}; {otherwise}"


def adapter_instead(folder: Path) -> str:
    """Says for a message's end what a folder has in place of an adapter in safetensors; "": nothing that is known."""
    inner = [path.parent.name for path in sorted(folder.glob(f"*/{ADAPTER}"))]
    if inner and not (folder / ADAPTER).is_file():
        return f", such as the one in its folder {inner[0]}"
    if (folder / "adapter_model.bin").is_file():
        return "; it has adapter_model.bin, which may run code and is not read: load and save it with PEFT"
    return "; it has a whole model, for model_path" if (folder / "config.json").is_file() else ""


def misnamed(folder: Path, index: str) -> str:
    """Says for a message's end which safetensors files a folder has under other names, and what to change; ""."""
    files = [path.name for path in sorted(folder.glob("*.safetensors"))]
    return f"{files[0]}; fetch {index} too, or rename the file if the whole model is in it" if files else ""


def held_instead(folder: Path) -> str:
    """Says for a message's end what a folder without weights in safetensors has, and what to change; "": nothing."""
    if (folder / ADAPTER).is_file():
        return (
            f"an adapter in PEFT's format; surojax convert merge BASE {folder} FOLDER makes one model of it and the "
            "model that it belongs to; to train it further give that one, and the adapter as lora_adapter"
        )
    run = folder.parent if (folder / SOURCE).is_file() else folder
    if on_disk.find(run):
        return (
            f"checkpoints of a run; surojax convert --checkpoint {run} --out FOLDER writes their model as such a folder"
        )
    if (run / STARTS_FILE).is_file():
        return "a run that has no checkpoint yet; start it again (save_steps says how often it writes one)"
    for name in PICKLED:
        if (folder / name).is_file():
            return f"{name}, which may run code and is not read; save the model with save_pretrained of transformers"
    if ggufs := sorted(folder.glob("*.gguf")):
        return f"{ggufs[0].name}; give this file"
    inner = [path.parent.name for path in folder.glob("*/config.json")]
    return f"one in the folder {inner[0]} in it; give that folder" if len(inner) == 1 else ""
