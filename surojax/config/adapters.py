"""Checks of the adapters' settings (models/lora.py): their names, their sizes, and what is not built with them."""

from collections.abc import Collection

from surojax.config.fields import Config, default_config, head_dim
from surojax.errors import need
from surojax.models.lora import ALL_LINEAR, SAVED, TARGETS
from surojax.numerics.base_formats import FORMATS, chosen

# What means nothing with a frozen base, or is not built: each has its default with lora. And why.
REFUSED = {
    "offload_master": "the base has no master weights, and the adapters' are small",
    "persistent_quants": "the base is not updated, so that nothing is quantised again",
    "offload_quants": "the base is not updated, so that nothing is quantised again",
    "optimizer": "other optimizers are for matrices, and adapters' state is small",
    "zero_quantized_gradients": "the adapters' gradients are small",
    "overlap_update": "the adapters' update takes no time worth hiding",
}
NOT_WITH_DROPOUT = ("use_dora", "pp_size", "sequence_chunks")  # for which dropout is not built
# What blocks that are written out in float8 do not compute, or do not read.
NOT_IN_FP8 = ("use_dora", "lora_dropout", *(found.setting for found in FORMATS.values()))
FIELDS = (
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_dtype",
    "use_rslora",
    "use_dora",
    "lora_plus_ratio",
    "qlora_bnb",
    "qlora_fp8",
    "qlora_fp4",
    "lora_adapter",
    "lora_base_adapter",
    "modules_to_save",
)


def check_adapters(c: Config) -> None:
    """Raises ConfigError for the first setting of adapters that is wrong, or has no meaning with or without them."""
    defaults = default_config()
    if not c.lora:
        for name in FIELDS:
            expected = f"{defaults[name]!r} with lora=False, which does not use it"
            need(c[name] == defaults[name], name, expected, c[name], "leave it out, or set lora=True")
        return
    for name, why in REFUSED.items():
        need(c[name] == defaults[name], name, f"{defaults[name]!r} with lora=True: {why}", c[name], "leave it out")
    need(
        c.offload_optimizer != "nvme", "offload_optimizer", "true or false with lora=True", "nvme", "the state is small"
    )
    for name in NOT_WITH_DROPOUT if c.lora_dropout else ():
        expected = f"{defaults[name]!r} with lora_dropout={c.lora_dropout}, for which it is not built yet"
        need(c[name] == defaults[name], name, expected, c[name], "leave it out, or set lora_dropout=0.0")
    for name in NOT_IN_FP8 if c.recipe.startswith("fp8_") else ():
        expected = f"{defaults[name]!r} with lora=True and recipe={c.recipe!r}, for which it is not built yet"
        need(c[name] == defaults[name], name, expected, c[name], "leave it out, or use recipe='mxfp8' or 'bf16'")
    _check_names(c.lora_target_modules, "lora_target_modules", TARGETS, ALL_LINEAR)
    _check_names(c.modules_to_save, "modules_to_save", SAVED, "")
    alone = not c.model.tie_word_embeddings or not c.modules_to_save
    expected = "none with a model whose head is its embedding: of a file with one of them, others would leave the other"
    need(alone, "modules_to_save", expected, c.modules_to_save, "leave it out")
    _check_rank(c)
    for name in ("lora_adapter", "lora_base_adapter"):
        need(not c[name] or bool(c.model_path), name, "'' without a model_path", c[name], "set model_path to its base")
        expected = "'' with from_scratch=True, which takes no weights"
        need(not (c[name] and c.from_scratch), name, expected, c[name], "leave one of them out")
    if base := chosen(c):
        setting = FORMATS[base].setting
        gathered = c.zero_quantized_weights
        expected = f"'none' with {setting}=True: weights are gathered in {base}"
        need(gathered == "none", "zero_quantized_weights", expected, gathered, "leave it out")
    expected = "'none' with use_dora=True: magnitudes would begin as the lengths of other rows than those in 8 bits"
    need(
        not c.use_dora or c.zero_quantized_weights == "none",
        "zero_quantized_weights",
        expected,
        c.zero_quantized_weights,
        "leave it out",
    )


def _check_names(value: str, field: str, known: Collection[str], alone: str) -> None:
    """Raises ConfigError unless the value is `alone`, or a list of known names."""
    if value == alone:
        return
    for name in value.split(","):
        also = f", or {alone!r}" if alone else ""
        need(name.strip() in known, field, f"names among {', '.join(known)}{also}", name.strip(), "correct it")


def _check_rank(c: Config) -> None:
    m = c.model
    heads = m.num_attention_heads * head_dim(c)
    of_keys = m.num_key_value_heads * head_dim(c)
    smallest = {
        "q_proj": min(m.hidden_size, heads),
        "k_proj": min(m.hidden_size, of_keys),
        "v_proj": min(m.hidden_size, of_keys),
        "o_proj": min(m.hidden_size, heads),
        "gate_proj": min(m.hidden_size, m.intermediate_size),
        "up_proj": min(m.hidden_size, m.intermediate_size),
        "down_proj": min(m.hidden_size, m.intermediate_size),
    }
    names = TARGETS if c.lora_target_modules == ALL_LINEAR else map(str.strip, c.lora_target_modules.split(","))
    for name in names:
        expected = f"at most {smallest[name]}, the smaller side of {name}"
        need(c.lora_rank <= smallest[name], "lora_rank", expected, c.lora_rank, "lower it")
