"""The features of a config that rows of the table (pairs.py) refer to."""

from collections.abc import Callable

from surojax import offloads
from surojax.offloads import IN_SLOTS, TO_DEVICE, TO_FILES, fields_of
from surojax.refusals.refusal import (
    Feature,
    Settings,
    clause_of,
    is_above,
    is_off,
    is_on,
    is_one_of,
    is_other_than,
    is_set,
)

FP8 = ("fp8_hybrid", "fp8_current")
SKIPS = ("skip_quant_first_layers", "skip_quant_last_layers")
RECOMPUTE_PARTS = ("recompute_norm", "recompute_swiglu", "recompute_ffn", "recompute_att")
SHARDED = {"zero_level": 3}
QUANTISED = SHARDED | {"zero_quantized_weights": "fp8"}
LORA = {"lora": True}
EXPERTS = {"model.num_experts": 4, "model.num_experts_per_tok": 2}


def _are_sharded(s: Settings, what: str, level: int) -> bool:
    return s["zero_level"] >= level if s[f"shard_{what}"] is None else bool(s[f"shard_{what}"])


def _has_rows(s: Settings) -> bool:
    """True if the data may have rows of instructions or conversations; data/run_data.py finds out from the files."""
    return bool(s["datasets"] or s["validation_datasets"] or s["data"] not in ("", "stdlib"))


IN_FILES = fields_of(TO_FILES)  # may be "nvme"
STATE = fields_of(IN_SLOTS)
# With one of these in files a step has programs of one layer, with all its microbatches inside.
BY_LAYER = fields_of(offloads.BY_LAYER)
KEPT_ON_DEVICE = fields_of(TO_DEVICE)


def _in_nvme(s: Settings) -> list[str]:
    return [name for name in IN_FILES if s[name] == "nvme"]


def _without(name: str, fields: tuple[str, ...], holds: Callable[[Settings], bool], example: Settings) -> Feature:
    """Makes a feature of several fields that is only ever the `other` of a refusal. name: the feature's clause."""
    return Feature(name, fields, lambda s, _: holds(s), lambda _: name, "", example)


fp8 = is_one_of("recipe", *FP8)
lora = is_on("lora")
no_lora = is_off("lora")
no_experts = is_one_of("model.num_experts", 0)
# Not with adapters of experts (config/adapters.py): the examples name the attention's.
dropout = is_other_than("lora_dropout", 0.0, 0.1, LORA | {"lora_target_modules": "q_proj,v_proj"})
dora = is_on("use_dora", lora=True, lora_target_modules="q_proj,v_proj")
in_nf4 = is_on("qlora_bnb", lora=True)
in_fp8 = is_on("qlora_fp8", lora=True)
in_nvfp4 = is_on("qlora_fp4", lora=True)
in_mxfp4 = is_on("qlora_mxfp4", lora=True, **EXPERTS)
adapter_files = [
    is_set(name, "adapter", LORA | {"model_path": "base"}) for name in ("lora_adapter", "lora_base_adapter")
]
saved_modules = is_set("modules_to_save", "lm_head", LORA)
from_scratch = is_on("from_scratch", model_path="base")
offload_quants = is_on("offload_quants", persistent_quants=True, **QUANTISED)
resident = is_above("resident_layers", 0, offload_weights=True)
optimizer_in_files = is_one_of("offload_optimizer", "nvme", instead="True or False", needs={"nvme_path": "folder"})
master_in_files = is_one_of("offload_master", "nvme", instead="True or False", needs={"nvme_path": "folder"})
grads_in_files = is_one_of(
    "offload_grads", "nvme", instead="True or False", needs={"nvme_path": "folder", "zero_level": 2}
)
residuals_in_files = is_one_of("offload_residual", "nvme", instead="True or False", needs={"nvme_path": "folder"})
weights_in_files = is_one_of("offload_weights", "nvme", instead="True or False", needs={"nvme_path": "folder"})
by_layer = (grads_in_files, residuals_in_files, weights_in_files)  # computed by programs of one layer
quantised_gathers = is_other_than("zero_quantized_weights", "none", "fp8", SHARDED)
persistent = is_on("persistent_quants", **QUANTISED)
recompute_parts = [is_on(name, recompute_block=False) for name in RECOMPUTE_PARTS]
all_recomputed = is_on("recompute_block")
overlap = is_on("overlap_update", zero_level=2, offload_grads=True, offload_optimizer=True, offload_master=True)
cudnn = is_one_of("attention", "cudnn", instead="'auto', 'mosaic' or 'xla'")
mosaic = is_one_of("attention", "mosaic")
float32 = is_one_of("model_dtype", "float32", instead="'bfloat16'")
softcap = is_set("model.attn_logit_softcapping", 50.0)
local_rotation = is_set("model.rope_local_base_freq", 10000.0, {"model.sliding_window": 64})
some_unrotated = is_above("model.no_rope_layer_interval", 0)
stages = is_above("pp_size", 1)
tokens_sent = is_above("ep_size", 1, **EXPERTS)
chunks = is_above("sequence_chunks", 1)
memcpy_sends = is_on("memcpy_send_recv", use_all_to_all_reduce=True)
no_window = _without(
    "without a window", ("model.sliding_window",), lambda s: not s["model.sliding_window"], {"model.sliding_window": 0}
)
grows_with_position = is_other_than("model.rope_llama_4_scaling_beta", 0.0, 0.1)
in_files = Feature(
    "a class of tensors in files",
    IN_FILES,
    lambda s, _: bool(_in_nvme(s)),
    lambda s: f"with {_in_nvme(s)[0]}='nvme'",
    "True or False",
    {"offload_optimizer": "nvme", "nvme_path": "folder"},
)
overlap_of_whole_step = Feature(
    "overlap_update=True with no gradients, residuals or weights in files",
    ("overlap_update", *BY_LAYER),
    lambda s, _: s["overlap_update"] and not set(_in_nvme(s)) & {*BY_LAYER},
    clause_of("overlap_update"),
    "False",
    overlap.example,
)
nothing_in_files = _without(
    "with nothing offloaded to 'nvme'",
    IN_FILES,
    lambda s: not _in_nvme(s),
    dict.fromkeys(IN_FILES, False),
)
device_memory = is_above("device_memory", 0, offload_optimizer=True)
nothing_to_keep = _without(
    "without offload_optimizer, offload_master and offload_grads",
    KEPT_ON_DEVICE,
    lambda s: not any(s[name] for name in KEPT_ON_DEVICE),
    dict.fromkeys(KEPT_ON_DEVICE, False),
)
nothing_arrives_early = _without(
    "with files of neither optimizer state nor master weights, and without offload_grads",
    IN_FILES,
    lambda s: bool(_in_nvme(s)) and not s["offload_grads"] and not set(STATE) & set(_in_nvme(s)),
    {"offload_residual": "nvme", "nvme_path": "folder"},
)
no_state_offloaded = _without(
    "without offload_optimizer and offload_master",
    STATE,
    lambda s: not any(s[name] for name in STATE),
    dict.fromkeys(STATE, False),
)
weights_unsharded = _without(
    "with shard_weights=False",
    ("shard_weights", "zero_level"),
    lambda s: not _are_sharded(s, "weights", 3),
    {"zero_level": 1},
)
gradients_unsharded = Feature(
    "shard_gradients=False on several GPUs",
    ("shard_gradients", "zero_level", "num_shards"),
    lambda s, _: s["num_shards"] > 1 and not _are_sharded(s, "gradients", 2),
    lambda s: f"with shard_gradients=False on {s['num_shards']} GPUs",
    "True",
    {"zero_level": 1, "num_shards": 2},
)
no_all_to_all = _without(
    "with use_all_to_all_reduce=False",
    ("use_all_to_all_reduce", "zero_quantized_gradients"),
    lambda s: not (s["use_all_to_all_reduce"] or s["zero_quantized_gradients"]),
    {"use_all_to_all_reduce": False},
)
nothing_quantised = _without(
    "with zero_quantized_weights='none'",
    ("zero_quantized_weights", "recipe"),
    lambda s: s["zero_quantized_weights"] == "none" and s["recipe"] not in FP8,
    {"zero_quantized_weights": "none"},
)
skips = Feature(
    "skip_quant_first_layers or skip_quant_last_layers > 0",
    SKIPS,
    lambda s, _: any(s[name] for name in SKIPS),
    lambda s: "with skip_quant_*",
    "0",
    {"recipe": "fp8_current", SKIPS[0]: 1},
)
skips_in_fp8 = Feature(
    "skip_quant_* > 0 with recipe=fp8_hybrid or fp8_current",
    (*SKIPS, "recipe"),
    lambda s, _: any(s[name] for name in SKIPS) and s["recipe"] in FP8,
    lambda s: f"with skip_quant_* and recipe={s['recipe']!r}",
    "0",
    {"recipe": "fp8_current", SKIPS[0]: 1},
)
no_16_bit_products = Feature(
    "recipe other than 'bf16' and no skip_quant_*",
    ("recipe", *SKIPS),
    lambda s, _: s["recipe"] != "bf16" and not any(s[name] for name in SKIPS),
    clause_of("recipe"),
    "",
    {"recipe": "mxfp8"},
)
cudnn_in_pieces = Feature(
    "attention=cudnn with cp_method=allgather or ring",
    ("attention", "cp_method", "cp_size"),
    lambda s, _: s["attention"] == "cudnn" and s["cp_size"] > 1 and s["cp_method"] != "ulysses",
    lambda s: f"with cp_method={s['cp_method']!r} and attention='cudnn'",
    "'auto' or 'mosaic'",
    {"attention": "cudnn", "cp_size": 2, "cp_method": "allgather"},
)
datasets = Feature(
    "datasets set",
    ("datasets",),
    lambda s, _: bool(s["datasets"]),
    lambda _: "beside datasets",
    "()",
    {"datasets": ({"path": "rows.jsonl"},)},
)
no_rows = _without(
    "without rows of instructions or conversations, to which it applies",
    ("datasets", "validation_datasets", "data"),
    lambda s: not _has_rows(s),
    {"datasets": (), "validation_datasets": (), "data": ""},
)
continued_text = _without(
    "without sample_packing and such rows: text then continues in the next row",
    ("sample_packing", "datasets", "validation_datasets", "data"),
    lambda s: not (s["sample_packing"] or _has_rows(s)),
    {"sample_packing": False, "datasets": (), "validation_datasets": (), "data": ""},
)


ROWS = {"data": "rows.jsonl"}
TRAINED_ON_ROWS = (
    is_set("on_bad_row", "skip", ROWS),
    is_set("train_on", "all", ROWS),
    is_set("chat_template", "chatml", ROWS),
    is_set("system_prompt", "Be brief.", ROWS),
)
OF_ADAPTERS = (
    is_set("lora_rank", 8, LORA),
    is_set("lora_alpha", 16.0, LORA),
    dropout,
    is_set("lora_target_modules", "q_proj", LORA),
    is_set("lora_dtype", "float32", LORA),
    is_on("use_rslora", lora=True),
    dora,
    is_set("lora_plus_ratio", 4.0, LORA),
    in_nf4,
    in_fp8,
    in_nvfp4,
    in_mxfp4,
    *adapter_files,
    saved_modules,
)
