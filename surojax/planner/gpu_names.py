"""What users call GPUs: any writing of the names in gpus.csv, without guessing.

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
_REFUSED_WORDS = {"t4": "t416gb", "v100": "v10016gb v10032gb v100sxm2 v100s v100pcie"}


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
    raise ConfigError(f"--gpu: expected a GPU of surojax/planner/gpus.csv, got {text!r}; {known}")


def _word(text: str) -> str:
    """A name of a GPU in one word: "NVIDIA GeForce RTX 4090" and "4090" are "4090", "A100-40G" is "a10040gb"."""
    word = re.sub(r"[^a-z0-9]", "", re.sub(r"nvidia|geforce|quadro|tesla|graphics", "", text.lower()))
    word = re.sub(r"(?<=\d)g$", "gb", word.removesuffix("gpu"))
    return word.removeprefix("rtx")


_BY_WORD = {_word(key): key for key in (*GPUS, *REFUSED)}
_BY_WORD |= {
    _word(kind): key for key, gpu in GPUS.items() if not key.endswith("ti_8gb") for kind in (gpu.name, *gpu.aliases)
}
_BY_WORD |= {word: key for key, gpu in GPUS.items() for word in gpu.also_called}
_BY_WORD |= {word: key for key, words in _REFUSED_WORDS.items() for word in words.split()}
for _key in [key for key in GPUS if key.endswith("ti_8gb")]:
    del _BY_WORD[_word(GPUS[_key].name)]  # two cards have it
