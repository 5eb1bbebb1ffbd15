"""What users call GPUs: any writing of the names in gpus.py, without guessing.

A name that is not known is refused with a list of those that are. Another card is never proposed for it: a card that is
near in name is not near in speed. This file imports no jax.
"""

import re

from surojax.errors import ConfigError
from surojax.planner.gpus import GPUS

# Cards that are known and not planned for, and why. Measured: PyTorch's products in bf16 beside fp16, see rates.py.
_NO_BF16 = "its tensor cores have no bfloat16 ({} beside {} TFLOP/s in float16), and flash attention needs sm_80"
REFUSED = {
    "t4": f"sm_75: {_NO_BF16.format(2, 42)}",
    "v100": f"sm_70: {_NO_BF16.format(10, 95)}, and CUDA 13 no longer compiles for it",
    "rtx2080ti": f"sm_75: {_NO_BF16.format(7, 59)}",
    "p100": "sm_60: it has no tensor cores",
}
_OTHERS = {  # what people call them, beside keys and device kinds; see `_word`
    "a100": "a10080gb a100sxm a100sxm80gb a100sxm480gb",
    "a100_40gb": "a100sxm40gb",
    "a100_pcie": "a100pcie80gb a10080gbpcie",
    "rtxpro6000": "pro6000blackwell pro6000ws pro6000workstation pro6000server",
    "h100": "h100sxm h100sxm5 h10080gb h100sxm80gb h100sxm580gb hgxh100",
    "h100_pcie": "h100pcie80gb h10080gbpcie",
    "h100_nvl": "h100nvl94gb",
    "h200": "h200sxm h200141gb hgxh200",
    "gh200": "gh20096gb gh200480gb",
    "b200": "b200sxm b200180gb b200192gb hgxb200",
    "b300": "b300sxm hgxb300 b300288gb",
    "rtx6000ada": "6000adageneration ada6000",
    "rtx3060": "306012gb",
    "rtx3080": "308010gb",
    "t4": "t416gb",
    "v100": "v10016gb v10032gb v100sxm2 v100s v100pcie",
}


def named(text: str) -> str:
    """Returns the key of `GPUS` for what a user calls a GPU, whatever its case, spaces, dashes and vendor's words.

    Raises ConfigError for one that is not known, that this project does not compute on, or of which there are several.
    """
    word = _word(text)
    found = _BY_WORD.get(word)
    if found in REFUSED:
        raise ConfigError(f"--gpu: expected a GPU that computes in bfloat16, got {text!r} ({REFUSED[found]})")
    if found is not None:
        return found
    sizes = [key for key in GPUS if "_" in key and _word(key.partition("_")[0]) == word]
    known = f"there are {' and '.join(sizes)}" if sizes else f"known are {', '.join(GPUS)}"
    raise ConfigError(f"--gpu: expected a GPU of surojax/planner/gpus.py, got {text!r}; {known}")


def _word(text: str) -> str:
    """A name of a GPU in one word: "NVIDIA GeForce RTX 4090" and "4090" are "4090", "A100-40G" is "a10040gb"."""
    word = re.sub(r"[^a-z0-9]", "", re.sub(r"nvidia|geforce|quadro|tesla|graphics", "", text.lower()))
    word = re.sub(r"(?<=\d)g$", "gb", word.removesuffix("gpu"))
    return word.removeprefix("rtx")


_BY_WORD = {_word(key): key for key in (*GPUS, *REFUSED)}
_BY_WORD |= {
    _word(kind): key for key, gpu in GPUS.items() if not key.endswith("ti_8gb") for kind in (gpu.name, *gpu.aliases)
}
_BY_WORD |= {word: key for key, words in _OTHERS.items() for word in words.split()}
for _key in [key for key in GPUS if key.endswith("ti_8gb")]:
    del _BY_WORD[_word(GPUS[_key].name)]  # two cards have it
