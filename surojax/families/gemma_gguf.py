"""Gemma 2 and 3 in GGUF files: norms with their 1 + w, and little of what differs between layers.

llama.cpp has the period of layers without a window, the base of the rotary embedding of those with one, and the factor
of scores in its code. Of the largest model of each family, by its number of layers, scores are divided by the root of
hidden_size / num_attention_heads; of others by that of a head's channels.
"""

from collections.abc import Callable
from typing import Any

from surojax.families import window_keys
from surojax.families.family import GGUF_NAMES, NORMS_AFTER, PLUS_ONE, Gguf

NORMS = ("norm", "attention_norm", "mlp_norm", *NORMS_AFTER, "attention.q_norm", "attention.k_norm")
SCALAR, FINAL_CAP, SCORE_CAP = "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"
LARGEST = {"gemma2": 46, "gemma3": 62}  # layers


def _after_reading(period: int, largest: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def after_reading(config: dict[str, Any]) -> dict[str, Any]:
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        return config | {
            "layer_types": window_keys.every_nth_full(layers, period),
            SCALAR: config["hidden_size"] // heads if layers == largest else config["head_dim"],
            FINAL_CAP: config[FINAL_CAP] or None,
        }

    return after_reading


HOW: dict[str, Any] = {
    "names": GGUF_NAMES | NORMS_AFTER,
    "transforms": dict.fromkeys(NORMS, PLUS_ONE),
}
OF_GEMMA2 = Gguf(
    architecture="gemma2",
    sizes={"attention.sliding_window": "sliding_window", SCORE_CAP: SCORE_CAP, FINAL_CAP: FINAL_CAP},
    defaults={SCORE_CAP: 50.0, FINAL_CAP: 30.0},
    after_reading=_after_reading(2, LARGEST["gemma2"]),
    **HOW,
)
OF_GEMMA3 = Gguf(
    architecture="gemma3",
    sizes={"attention.sliding_window": "sliding_window", FINAL_CAP: FINAL_CAP},
    defaults={FINAL_CAP: 0.0},
    implied={"rope_local_base_freq": 10000.0, SCORE_CAP: None},
    after_reading=_after_reading(6, LARGEST["gemma3"]),
    **HOW,
)
