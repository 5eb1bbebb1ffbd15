"""Nemotron-H in GGUF files: `nemotron_h`, or `nemotron_h_moe` if its MLPs are experts.

What a layer is follows from two numbers of each layer: one with key/value heads has attention, one with a width has an
MLP or experts, and one with neither has Mamba2. llama.cpp asks for the number in norms under two keys, and uses one.
It has no least time step, so that files do not say it: it is 0.001 in published models.
"""

from collections.abc import Callable
from typing import Any

from surojax.errors import ConfigError
from surojax.families import mamba_gguf, mixer_keys
from surojax.families.family import SHARED_EXPERT_GGUF_NAMES, Gguf
from surojax.models.decoder_config import ATTENTION

BLOCKS, WIDTH, EXPERT_WIDTH = "layers_block_type", "intermediate_size", "moe_intermediate_size"
MAMBA, MLP, EXPERTS = "linear_attention", "mlp", "moe"  # in BLOCKS
OF_MAMBA = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
}
UNUSED_EPSILON = "attention.layer_norm_epsilon"  # no key of config.json
GROUPS = ("expert_group_count", "expert_group_used_count")
HEADS_KEY, WIDTH_KEY = "attention.head_count_kv", "feed_forward_length"


def _before_writing(config: dict[str, Any]) -> dict[str, Any]:
    """Adds what files say in place of keys of config.json."""
    types = config[BLOCKS]
    width = config[EXPERT_WIDTH] if EXPERTS in types else config[WIDTH]
    of_layers = {
        mixer_keys.HEADS: [config[mixer_keys.HEADS] if name == ATTENTION else 0 for name in types],
        WIDTH: [width if name in (MLP, EXPERTS) else 0 for name in types],
    }
    unused = {"rope_theta": None, UNUSED_EPSILON: config["layer_norm_epsilon"]}
    return mamba_gguf.before_writing(config, OF_MAMBA) | of_layers | unused


def _after_reading(of_mlp: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """of_mlp: what layers with a width are, in BLOCKS."""

    def after_reading(config: dict[str, Any]) -> dict[str, Any]:
        heads, widths = config[mixer_keys.HEADS], config[WIDTH]
        if both := [l for l, numbers in enumerate(zip(heads, widths, strict=True)) if all(numbers)]:
            raise ConfigError(
                f"model_path: {HEADS_KEY}, {WIDTH_KEY}: expected more than 0 of one of them alone in each layer, got "
                f"{heads[both[0]]} and {widths[both[0]]} in layer {both[0]}; such a model is not computed"
            )
        types = [ATTENTION if n else of_mlp if width else MAMBA for n, width in zip(heads, widths, strict=True)]
        number = mixer_keys.one_of(heads, HEADS_KEY) or config["num_attention_heads"]
        width = mixer_keys.one_of(widths, WIDTH_KEY) or config["hidden_size"]
        config = {key: x for key, x in config.items() if key != UNUSED_EPSILON}
        return mamba_gguf.after_reading(config, OF_MAMBA) | {BLOCKS: types, mixer_keys.HEADS: number, WIDTH: width}

    return after_reading


SIZES = mamba_gguf.sizes(OF_MAMBA) | {
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    UNUSED_EPSILON: UNUSED_EPSILON,
}
HOW: dict[str, Any] = {
    "names": SHARED_EXPERT_GGUF_NAMES | mamba_gguf.NAMES,
    "implied": {"time_step_min": 0.001, "use_conv_bias": True},
    "defaults": {UNUSED_EPSILON: 0, **dict.fromkeys(GROUPS, 1)},
    "by_layer": (HEADS_KEY, WIDTH_KEY),
    "transforms": mamba_gguf.TRANSFORMS,
    "parts": mamba_gguf.reshaped(OF_MAMBA),
    "before_writing": _before_writing,
}
DENSE = Gguf(
    architecture="nemotron_h",
    describes=lambda config: EXPERTS not in config[BLOCKS],
    sizes=SIZES,
    after_reading=_after_reading(MLP),
    **HOW,
)
WITH_EXPERTS = Gguf(
    architecture="nemotron_h_moe",
    describes=lambda config: MLP not in config[BLOCKS],
    sizes=SIZES
    | {
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": EXPERT_WIDTH,
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
        **dict(zip(GROUPS, ("n_group", "topk_group"), strict=True)),
    },
    fixed={"expert_gating_func": 2},  # sigmoids
    unread={"expert_shared_count": 1},
    after_reading=_after_reading(EXPERTS),
    **HOW,
)
