"""The settings that do not go together: one table of pairs of features, each with its reason and what to change.

A `Feature` is a choice that a config makes, such as "pp_size > 1" or "lora=False". A `Refusal` says that one feature is
not possible with another. `config.checks.check` refuses a config by the table, `placement.table.place` its own
settings, and the planner's searches leave out what it refuses. docs/refusals.md is `markdown()`.

Conditions on numbers (sizes that must divide each other) and on devices are functions: config/checks.py,
config/mesh.py, models/decoder_checks.py, config/adapters.py, planner/check_fit.py.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from surojax.errors import ConfigError, shown

Settings = Mapping[str, Any]  # {name of a field of the config: its value}, some of them or all


@dataclasses.dataclass(frozen=True)
class Feature:
    """A choice that a config makes.

    name: for readers of the table. fields: that decide it; a message names the first.
    holds: (settings, defaults of the fields) -> whether the config makes this choice.
    clause: settings -> the choice as it follows "expected VALUE" in a message.
    instead: what the field is without this choice, in words; "": its default.
    example: settings that make the choice, and what they need; all others have their defaults.
    """

    name: str
    fields: tuple[str, ...]
    holds: Callable[[Settings, Settings], bool]
    clause: Callable[[Settings], str]
    instead: str
    example: Mapping[str, Any]

    @property
    def field(self) -> str:
        """The field that a message names."""
        return self.fields[0]


def _clause(field: str) -> Callable[[Settings], str]:
    return lambda s: f"with {field.removeprefix('model.')}={s[field]!r}"


def is_on(field: str, **needs) -> Feature:
    """A field that is true, or not empty."""
    return Feature(
        f"{field}=True", (field,), lambda s, _: bool(s[field]), _clause(field), "False", {**needs, field: True}
    )


def is_off(field: str) -> Feature:
    """A field that is false."""
    return Feature(f"{field}=False", (field,), lambda s, _: not s[field], _clause(field), "True", {field: False})


def is_above(field: str, least: int, **needs) -> Feature:
    """A number that is larger than its least."""
    example = {**needs, field: least + 1}
    return Feature(f"{field} > {least}", (field,), lambda s, _: s[field] > least, _clause(field), str(least), example)


def is_one_of(field: str, *values, instead: str = "", needs: Settings | None = None) -> Feature:
    """A field that has one of these values."""
    name = f"{field}={' or '.join(map(str, values))}" if values != ("",) else f"{field}=''"
    example = {**(needs or {}), field: values[0]}
    return Feature(name, (field,), lambda s, _: s[field] in values, _clause(field), instead, example)


def is_other_than(field: str, value, example, needs: Settings | None = None) -> Feature:
    """A field that has not this value."""
    name = f"{field} other than {value!r}"
    example = {**(needs or {}), field: example}
    return Feature(name, (field,), lambda s, _: s[field] != value, _clause(field), repr(value), example)


def is_set(field: str, example, needs: Settings | None = None) -> Feature:
    """A field that has not its default."""
    example = {**(needs or {}), field: example}
    return Feature(f"{field} set", (field,), lambda s, d: s[field] != d[field], _clause(field), "", example)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One feature that is not possible with another.

    reason: a clause that follows the other feature's, or "". change: what to do, in the imperative.
    when_placed: refused when state is placed, not before: `verify` and `fit` read the setting for what they try.
    """

    feature: Feature
    other: Feature
    reason: str
    change: str | Callable[[Settings], str] = "leave one of them out"
    when_placed: bool = False

    @functools.cached_property
    def fields(self) -> frozenset[str]:
        """The fields that decide it."""
        return frozenset((*self.feature.fields, *self.other.fields))

    def holds(self, settings: Settings, defaults: Settings) -> bool:
        """Whether the settings make both choices."""
        return self.feature.holds(settings, defaults) and self.other.holds(settings, defaults)

    def message(self, settings: Settings, defaults: Settings) -> str:
        """One line: what was expected, why, what was found, and what to change."""
        field = self.feature.field
        expected = f"{self.feature.instead or repr(defaults[field])} {self.other.clause(settings)}"
        reason = f", {self.reason}" if self.reason else ""
        change = self.change if isinstance(self.change, str) else self.change(settings)
        return f"{field}: expected {expected}{reason}, got {shown(settings[field])}; {change}"


# -- Features of several fields, and of values with a name -----------------------------------------------------------

FP8 = ("fp8_hybrid", "fp8_current")
SKIPS = ("skip_quant_first_layers", "skip_quant_last_layers")
RECOMPUTE_PARTS = ("recompute_norm", "recompute_swiglu", "recompute_ffn", "recompute_att")
SHARDED = {"zero_level": 3}
QUANTISED = SHARDED | {"zero_quantized_weights": "fp8"}
LORA = {"lora": True}
EXPERTS = {"model.num_experts": 4, "model.num_experts_per_tok": 2}


def _are_sharded(s: Settings, what: str, level: int) -> bool:
    return s["zero_level"] >= level if s[f"shard_{what}"] is None else bool(s[f"shard_{what}"])


def _to_shard(what: str, level: int) -> Callable[[Settings], str]:
    """The change that shards a tensor class; zero_level does not, if the field itself is False."""

    def change(s: Settings) -> str:
        return f"set shard_{what}=True" + (f" or zero_level={level}" if s[f"shard_{what}"] is None else "")

    return change


def _to_persist(s: Settings) -> str:
    also = "" if s["recipe"] in FP8 else ", and zero_quantized_weights or a recipe in fp8"
    return _to_shard("weights", 3)(s) + also


def _has_rows(s: Settings) -> bool:
    """Whether there are rows of instructions or conversations, or may be: data/load.py reads the files to know."""
    return bool(s["datasets"] or s["validation_datasets"] or s["data"] not in ("", "stdlib"))


IN_FILES = (  # may be "nvme"
    "offload_optimizer",
    "offload_master",
    "offload_grads",
    "offload_residual",
    "offload_weights",
)
STATE = ("offload_optimizer", "offload_master")
# With one of these in files a step has programs of one layer, with all its microbatches inside.
BY_LAYER = ("offload_grads", "offload_residual", "offload_weights")


def _in_nvme(s: Settings) -> list[str]:
    return [name for name in IN_FILES if s[name] == "nvme"]


def _without(name: str, fields: tuple[str, ...], holds: Callable[[Settings], bool], example: Settings) -> Feature:
    """A feature of several fields that are never the ones to be named; name: its clause."""
    return Feature(name, fields, lambda s, _: holds(s), lambda _: name, "", example)


fp8 = is_one_of("recipe", *FP8)
lora = is_on("lora")
no_lora = is_off("lora")
no_experts = is_one_of("model.num_experts", 0)
dropout = is_other_than("lora_dropout", 0.0, 0.1, LORA)
dora = is_on("use_dora", lora=True)
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
    ("overlap_update", "offload_grads", "offload_residual", "offload_weights"),
    lambda s, _: s["overlap_update"] and set(_in_nvme(s)) <= {"offload_optimizer", "offload_master"},
    _clause("overlap_update"),
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
KEPT_ON_DEVICE = ("offload_optimizer", "offload_master", "offload_grads")
nothing_to_keep = _without(
    "without offload_optimizer, offload_master and offload_grads",
    KEPT_ON_DEVICE,
    lambda s: not any(s[name] for name in KEPT_ON_DEVICE),
    dict.fromkeys(KEPT_ON_DEVICE, False),
)
no_state_offloaded = _without(
    "without offload_optimizer and offload_master",
    ("offload_optimizer", "offload_master"),
    lambda s: not (s["offload_optimizer"] or s["offload_master"]),
    {"offload_optimizer": False, "offload_master": False},
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
    _clause("recipe"),
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


NOT_USED = "which does not use it"
NOT_BUILT = "for which it is not built yet"
OTHER_RECIPE = "leave it out, or use recipe='mxfp8' or 'bf16'"
OUT = "leave it out"
ONE_CHUNK = "leave it out, or set sequence_chunks=1"
COPIES = "since XLA decides while a step runs which transfers are copies, and no GPU has shown what it does with those "


def each(features: Iterable[Feature], other: Feature, reason: str, change: str) -> list[Refusal]:
    """A row for each of these features."""
    return [Refusal(feature, other, reason, change) for feature in features]


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
TABLE: tuple[Refusal, ...] = (
    # Data
    *(
        Refusal(
            is_set(name, example),
            datasets,
            "",
            f"leave one of them out (of a config file's: --config.{name}={default} or --config.datasets=[])",
        )
        for name, example, default in (
            ("data", "b.txt", ""),
            ("eval_data", "b.txt", ""),
            ("text_field", "body", "text"),
        )
    ),
    *each(TRAINED_ON_ROWS, no_rows, "", "leave it out, or set data or datasets"),
    Refusal(
        is_set("on_long", "drop", {"sample_packing": True}), continued_text, "", "leave it out, or set sample_packing"
    ),
    # Model
    Refusal(
        cudnn,
        is_on("sample_packing"),
        "since cuDNN does not separate documents",
        "use attention='auto', or leave sample_packing out",
    ),
    Refusal(float32, cudnn, "which computes in 16 bits", "set attention='xla', or change it"),
    Refusal(float32, mosaic, "which computes in 16 bits", "set attention='xla', or change it"),
    Refusal(softcap, cudnn, "which has no softcap", "set attention='auto'"),
    *each(
        (is_set("model.sliding_window_pattern", 2, {"model.sliding_window": 64}), local_rotation),
        no_window,
        "",
        "set model.sliding_window, or leave it out",
    ),
    Refusal(grows_with_position, local_rotation, "since it is of layers that all rotate alike"),
    Refusal(grows_with_position, some_unrotated, "since it is of layers that all rotate alike"),
    # Adapters
    *each(OF_ADAPTERS, no_lora, NOT_USED, "leave it out, or set lora=True"),
    Refusal(weights_in_files, persistent, "which leaves only vectors to offload_weights", "set it to true or false"),
    Refusal(persistent, lora, "whose base is not updated, so that nothing is quantised again", OUT),
    Refusal(offload_quants, lora, "whose base is not quantised again", OUT),
    Refusal(is_set("optimizer", "normuon"), lora, "since adapters' state is small, and is updated by AdamW alone", OUT),
    Refusal(is_on("zero_quantized_gradients"), lora, "whose adapters' gradients are small", OUT),
    Refusal(overlap, lora, "whose adapters' update takes no time worth hiding", OUT),
    Refusal(optimizer_in_files, lora, "whose state is small", "set it to true or false"),
    Refusal(master_in_files, lora, "whose state is small", "set it to true or false"),
    Refusal(grads_in_files, lora, "whose gradients are small", "set it to true or false"),
    *each((dora, stages, chunks), dropout, NOT_BUILT, "leave it out, or set lora_dropout=0.0"),
    Refusal(dora, fp8, "whose matrices have rows of other lengths than its magnitudes begin as", OTHER_RECIPE),
    Refusal(dropout, is_one_of("recipe", "fp8_hybrid"), NOT_BUILT, OTHER_RECIPE),
    Refusal(
        saved_modules,
        is_on("model.tie_word_embeddings"),
        "since of a file with one of embedding and head, other programs would leave the other as it was",
        OUT,
    ),
    *each(adapter_files, is_one_of("model_path", ""), "", "set model_path to its base"),
    *each(adapter_files, from_scratch, "which takes no weights", "leave one of them out"),
    Refusal(in_fp8, in_nf4, "since a matrix is stored in one format"),
    Refusal(in_nvfp4, in_nf4, "since a matrix is stored in one format"),
    Refusal(in_nvfp4, in_fp8, "since a matrix is stored in one format"),
    *(Refusal(in_mxfp4, x, "since a matrix is stored in one format") for x in (in_nf4, in_fp8, in_nvfp4)),
    Refusal(in_mxfp4, no_experts, "since it is a format of experts", "use qlora_fp4 or qlora_bnb"),
    Refusal(quantised_gathers, in_nf4, "in whose format weights are gathered", OUT),
    Refusal(quantised_gathers, in_fp8, "in whose format weights are gathered", OUT),
    Refusal(quantised_gathers, in_nvfp4, "in whose format weights are gathered", OUT),
    Refusal(quantised_gathers, in_mxfp4, "in whose format weights are gathered", OUT),
    Refusal(
        quantised_gathers, dora, "whose magnitudes would begin as the lengths of other rows than those in 8 bits", OUT
    ),
    # Recipes
    *each(
        (is_set("fp8_amax_history", 4, {"recipe": "fp8_hybrid"}), is_set("fp8_margin", 1, {"recipe": "fp8_hybrid"})),
        is_other_than("recipe", "fp8_hybrid", "bf16"),
        NOT_USED,
        "leave it out, or choose another recipe",
    ),
    *each(
        (is_set("block_scaled_products", "emulated", {"recipe": "mxfp8"}),),
        is_one_of("recipe", "bf16", *FP8),
        NOT_USED,
        "leave it out, or choose another recipe",
    ),
    *each(
        (is_above(name, 0, recipe="fp8_current") for name in SKIPS),
        is_one_of("recipe", "bf16"),
        NOT_USED,
        "leave it out, or choose another recipe",
    ),
    *each(
        (is_set("matmul_dtype", "float32"), is_set("gradient_dtype", "float32")),
        no_16_bit_products,
        NOT_USED,
        "leave it out, or choose another recipe",
    ),
    Refusal(
        is_off("recompute_block"),
        skips,
        "since blocks of two kinds save different things",
        "set recompute_block=True, or leave the blocks' recipe alike",
    ),
    Refusal(quantised_gathers, fp8, "whose weights travel in fp8 anyway", OUT),
    Refusal(persistent, skips_in_fp8, "since those layers need their 16-bit weights"),
    Refusal(
        is_above("early_stopping_patience", 0),
        is_one_of("eval_steps", 0, instead="the steps between evaluations"),
        "which evaluates at the end only",
        "set eval_steps, or leave it out",
    ),
    # Schedule of the learning rate
    Refusal(is_set("warmup_ratio", 0.1), is_set("warmup_steps", 10), "", "set only one of them"),
    Refusal(
        is_one_of("cooldown_steps", 0, instead="1 or more"),
        is_one_of("lr_scheduler_type", "wsd", needs={"cooldown_steps": 10}),
        "",
        "a fifth of all steps is usual",
    ),
    *each(
        (is_set("cooldown_steps", 10, {"lr_scheduler_type": "wsd"}),),
        is_other_than("lr_scheduler_type", "wsd", "cosine"),
        NOT_USED,
        "leave it out, or use 'wsd'",
    ),
    Refusal(
        is_above("num_epochs", 1),
        is_set("max_steps", 100),
        "which decides",
        "set one of them: max_steps=0 counts epochs",
    ),
    # Recomputation
    *each(
        recompute_parts, all_recomputed, "which computes all of it again", "leave it out, or set recompute_block=False"
    ),
    # Update under the next forward pass
    Refusal(
        is_off("offload_grads"),
        overlap,
        "whose gradients rest in host memory until the next step",
        "set it, or leave overlap_update out",
    ),
    *each(
        (optimizer_in_files, master_in_files),
        overlap_of_whole_step,
        "which is built for state in files if gradients, residuals or weights are there too",
        "set offload_grads='nvme', or leave overlap_update out",
    ),
    *each(by_layer, stages, "whose stages are not built for what is in files", "set it to true or false"),
    *(
        Refusal(
            is_above("microbatches_per_fetch", 1), feature, "which fetches a layer for all microbatches", "leave it out"
        )
        for feature in by_layer
    ),
    Refusal(overlap, no_state_offloaded, "whose transfers it hides", "leave it out, or offload one of them"),
    Refusal(stages, overlap, "which updates in the first forward pass: that of a stage is one tick of a loop"),
    # Mesh
    *(
        Refusal(memcpy_sends, axis, COPIES + "of such groups", f"leave it out, or set {axis.field}=1")
        for axis in (is_above("tp_size", 1), is_above("cp_size", 1), stages, tokens_sent)
    ),
    *each(
        (is_set("cp_method", "ring", {"cp_size": 2}),),
        is_one_of("cp_size", 1),
        NOT_USED,
        "leave it out, or raise cp_size",
    ),
    *each(
        (is_set("pp_schedule", "1f1b", {"pp_size": 2}),),
        is_one_of("pp_size", 1),
        NOT_USED,
        "leave it out, or raise pp_size",
    ),
    Refusal(
        is_above("microbatches_per_fetch", 1, gradient_accumulation_steps=2),
        stages,
        "whose stages compute one microbatch in a tick and fetch each layer for it",
        "leave it out",
    ),
    Refusal(
        is_above("model.sliding_window", 0),
        cudnn_in_pieces,
        "whose pairs of pieces have no window",
        "use attention='auto' or 'mosaic'",
    ),
    # Chunks of the sequence
    Refusal(is_set("recipe", "mxfp8"), chunks, "whose scales are of tokens that chunks would part", ONE_CHUNK),
    Refusal(
        is_off("recompute_block"),
        chunks,
        "which saves memory because the values of one chunk at a time are computed again",
        ONE_CHUNK,
    ),
    Refusal(
        is_set("cp_method", "allgather", {"cp_size": 2}),
        chunks,
        "since each chunk would send the keys of all chunks before it again, and ulysses sends them once",
        ONE_CHUNK,
    ),
    # Placement
    Refusal(
        is_on("offload_grads", zero_level=2),
        gradients_unsharded,
        "with which every GPU would move whole gradients over its host link",
        _to_shard("gradients", 2),
    ),
    Refusal(quantised_gathers, weights_unsharded, "since it is for sharded weights", _to_shard("weights", 3)),
    Refusal(persistent, weights_unsharded, "since it is for sharded weights", _to_persist),
    Refusal(
        persistent,
        nothing_quantised,
        "with which there are none",
        "set zero_quantized_weights='fp8' or 'int8', or recipe='fp8_current' or 'fp8_hybrid'",
    ),
    Refusal(
        offload_quants,
        is_off("persistent_quants"),
        "with which nothing quantised is stored",
        "set persistent_quants=True",
    ),
    Refusal(
        memcpy_sends,
        no_all_to_all,
        "since only an all-to-all is sent and received",
        "set use_all_to_all_reduce=True or zero_quantized_gradients=True",
    ),
    Refusal(
        resident,
        is_off("offload_weights"),
        "which keeps all layers on the device",
        "leave it out, or set offload_weights=True",
    ),
    Refusal(
        resident,
        persistent,
        "which leaves only vectors to offload_weights",
        "leave it out, and offload_quants too if the quants are to stay on the device",
    ),
    Refusal(is_one_of("nvme_path", "", instead="a folder"), in_files, "", "set it to one on an NVMe disk"),
    Refusal(
        is_other_than("nvme_path", "", "folder", {"offload_optimizer": "nvme"}),
        nothing_in_files,
        "",
        "set offload_optimizer='nvme' or offload_master='nvme', or leave it out",
        when_placed=True,
    ),
    Refusal(
        is_above("files_in_memory", 0, offload_optimizer="nvme", nvme_path="folder"),
        nothing_in_files,
        "which leaves nothing to keep in memory",
        "leave it out, or set offload_optimizer='nvme' or another class",
        when_placed=True,
    ),
    Refusal(device_memory, nothing_to_keep, "which leaves nothing to keep there", "leave it out", when_placed=True),
    Refusal(device_memory, in_files, "from which every layer passes through host memory", "leave it out"),
    *(
        Refusal(
            is_one_of("nvme_slots", 2, needs=dict.fromkeys(STATE, "nvme") | {"nvme_path": "folder"}),
            is_other_than(name, "nvme", False),
            "which a step would have to write besides",
            f"set {name}='nvme', or leave it out",
            when_placed=True,
        )
        for name in STATE
    ),
)


def markdown(table: Iterable[Refusal], defaults: Settings) -> str:
    """docs/refusals.md: what does not go together, as a table."""
    lines = [
        "# What does not go together",
        "",
        "Settings are refused before anything is built, by this table. It is generated: after a change run",
        "`python -m surojax.config.checks > docs/refusals.md`. Sizes that must divide each other, and what a device",
        "cannot do, are refused by their numbers.",
        "",
        "| refused | with | why | what to change |",
        "|---|---|---|---|",
    ]
    for row in table:
        change = row.change if isinstance(row.change, str) else row.change(defaults)
        cells = f"`{row.feature.name}`", row.other.name.removeprefix("with "), row.reason, change
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def about(field: str, table: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """The rows that depend on a field."""
    return tuple(row for row in table if field in row.fields)


def refused(
    settings: Settings, defaults: Settings, table: Iterable[Refusal] = TABLE, *, placed: bool = False
) -> Refusal | None:
    """The first row that refuses these settings, or None. Rows of fields that are not among them are passed over.

    placed: whether state is placed by these settings.
    """
    known = settings.keys()
    rows = (row for row in table if row.fields <= known and (placed or not row.when_placed))
    return next((row for row in rows if row.holds(settings, defaults)), None)


def refuse(settings: Settings, defaults: Settings, table: Iterable[Refusal] = TABLE, *, placed: bool = False) -> None:
    """Raises ConfigError if two of the settings do not go together. The arguments are those of `refused`."""
    if row := refused(settings, defaults, table, placed=placed):
        raise ConfigError(row.message(settings, defaults))
