"""Keys of config.json: those that change nothing pass, and the others compute what transformers computes.

`fixtures/owned_keys.json` and `fixtures/config_keys.npz` are transformers' word, see the scripts beside them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from surojax import ConfigError
from surojax.exchange.huggingface import model_fields
from surojax.exchange.parts import text_config
from surojax.families import neutral
from surojax.families.registry import FAMILIES

FIXTURES = Path(__file__).parent / "fixtures"
OWNED = json.loads((FIXTURES / "owned_keys.json").read_text())

# Attributes of the classes that files do not have, and keys that every family declares by itself.
NO_KEYS = set(
    "_auto_class _post_init_done attribute_map base_config_key base_model_ep_plan base_model_pp_plan "
    "base_model_tp_plan has_no_defaults_at_init is_composition sub_configs _bos_token_tensor _eos_token_tensor "
    "_decoder_start_token_tensor _pad_token_tensor _mask_length _original_object_hash".split()
)
DECLARED = {"rope_theta", "tie_word_embeddings"}
MAY_COMPUTE = {"per_layer_config": {"0": {"sliding_window": 3}}, "pruned_heads": {"0": [1]}}


def test_keys_that_transformers_owns_are_known():
    """Of five versions: neutral, off with a value, or refused because they may compute."""
    owned = {key for version in OWNED.values() for keys in version.values() for key in keys}
    assert len(OWNED) == 5 and len(owned) > 120
    known = neutral.NEUTRAL | neutral.OFF.keys() | NO_KEYS | DECLARED | MAY_COMPUTE.keys()
    assert owned - known == set()


PUBLISHED: dict[str, Any] = {  # of SmolLM2-135M and others, and what tools write
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "pruned_heads": {},
    "neftune_noise_alpha": 5.0,
    "_attn_implementation": "flash_attention_2",
    "per_layer_config": None,
    "some_later_key": None,
    "another": [],
    **{key: 1 for key in ("max_length", "do_sample", "temperature", "torchscript", "num_beams", "top_p", "prefix")},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_change_nothing_pass(family):
    plain = model_fields({"model_type": family})
    assert model_fields({"model_type": family} | PUBLISHED) == plain
    assert model_fields({"model_type": family} | dict.fromkeys(neutral.UNREAD - {"model_type"})) == plain
    for key, values in neutral.OFF.items():
        for value in (*values, None):
            assert model_fields({"model_type": family, key: value}) == plain
        expected = [*values, None][0]
        with pytest.raises(ConfigError, match=rf"{key}: expected {expected!r}, got 'on'; nothing else is computed"):
            model_fields({"model_type": family, key: "on"})
    for key, value in MAY_COMPUTE.items():
        with pytest.raises(ConfigError, match=f"config.json has {key}, which may change what the model computes"):
            model_fields({"model_type": family, key: value})


def test_keys_beside_the_text_of_an_image_model():
    whole = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    assert text_config(whole | PUBLISHED) == text_config(whole)
    for key, value in {**MAY_COMPUTE, "rope_interleaved": True, "layer_types": ["full_attention"]}.items():
        with pytest.raises(ConfigError, match=f"config.json has {key}, which may change"):
            text_config(whole | {key: value})
