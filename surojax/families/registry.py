"""The families that are known: a row for each. Their order is that in which `config_json.made` tries them."""

from collections.abc import Mapping, Set

from surojax.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from surojax.families.family import LAYER, ImageTextFamily, ModelFamily
from surojax.families.gemma import GEMMA2, GEMMA3, GEMMA3_IMAGES
from surojax.families.gemma4 import GEMMA4, GEMMA4_IMAGES, GEMMA4_UNIFIED, GEMMA4_UNIFIED_IMAGES
from surojax.families.glm import GLM4_MOE
from surojax.families.gpt_oss import GPT_OSS
from surojax.families.granite import GRANITE_MOE
from surojax.families.granite_hybrid import GRANITE_HYBRID
from surojax.families.lfm2 import LFM2, LFM2_MOE
from surojax.families.llama import LLAMA
from surojax.families.mistral import MINISTRAL3, MISTRAL, MISTRAL3
from surojax.families.mistral4 import MISTRAL4
from surojax.families.mixtral import MIXTRAL
from surojax.families.muse import MUSE_GLIMMER, MUSE_GLIMMER_IMAGES
from surojax.families.nemotron_h import NEMOTRON_H
from surojax.families.olmo import OLMO2, OLMO3
from surojax.families.olmoe import OLMOE
from surojax.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from surojax.families.qwen3_5 import QWEN3_5, QWEN3_5_IMAGES, QWEN3_5_MOE, QWEN3_5_MOE_IMAGES, QWEN3_NEXT
from surojax.families.smollm import SMOLLM3
from surojax.models.model import ModelArchitecture

FAMILIES: dict[str, ModelFamily] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        MINISTRAL3,
        QWEN2,
        QWEN3,
        SMOLLM3,
        GEMMA2,
        GEMMA3,
        OLMOE,
        QWEN3_MOE,
        MIXTRAL,
        GPT_OSS,
        GRANITE_MOE,
        GLM4_MOE,
        LFM2,
        LFM2_MOE,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_NEXT,
        GLM4_MOE_LITE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        OLMO2,
        OLMO3,
        MUSE_GLIMMER,
        GRANITE_HYBRID,
        NEMOTRON_H,
        GEMMA4,
        GEMMA4_UNIFIED,
        MISTRAL4,
    )
}
IMAGE_TEXT_FAMILIES: dict[str, ImageTextFamily] = {
    family.model_type: family
    for family in (
        GEMMA3_IMAGES,
        MISTRAL3,
        QWEN3_5_IMAGES,
        QWEN3_5_MOE_IMAGES,
        MUSE_GLIMMER_IMAGES,
        GEMMA4_IMAGES,
        GEMMA4_UNIFIED_IMAGES,
    )
}
# Values of model_type that are another family's, whose class in transformers computes the model.
ALIASES = {"kimi_k2": DEEPSEEK_V3.model_type}
# What computes them, by the value of `model.model_type` in a config.
ARCHITECTURES: dict[str, ModelArchitecture] = {
    family.architecture.name: family.architecture for family in FAMILIES.values()
}


def tensor_names(ours: Set[str]) -> Mapping[str, str]:
    """Returns the table (our name -> name in files) of the first family that has all these tensors.

    If no family has all, because a caller's block has more: the table with most of them, and our names for the rest.
    """
    tables = [family.canonical or family.tensors for family in FAMILIES.values()]
    nearest = max(tables, key=lambda table: len(ours & table.keys()))  # the first of those with equally many
    return nearest if ours <= nearest.keys() else {name: LAYER + name for name in ours} | dict(nearest)
