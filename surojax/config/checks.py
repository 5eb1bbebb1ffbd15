"""Checks that refuse a bad config before anything is built.

`check` raises ConfigError with one line that says what was expected, what was found and what to change. Checks that
depend on the devices are elsewhere: `placement.place`, `check_fit.check_fit`.
"""

import difflib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from surojax.config.adapters import check_adapters
from surojax.config.fields import (
    KINDS,
    RECOMPUTE_PARTS,
    WORDS_OF,
    Config,
    default_config,
    flat,
    gpus_per_sequence,
    head_dim,
    no_field,
    warmup_steps,
)
from surojax.config.mesh import check_mesh
from surojax.errors import ConfigError, need as _need
from surojax.families.registry import ARCHITECTURES
from surojax.models.attention import IMPLEMENTATIONS
from surojax.models.operations import ACTIVATIONS
from surojax.models.rotary import ROPE_USES
from surojax.numerics.blockscaled import WIDTHS
from surojax.numerics.recipes import BLOCK_SCALED, BLOCK_SCALED_PRODUCTS, KERNELS, RECIPES
from surojax.optim.optimizer import SCHEDULES
from surojax.optim.optimizers import OPTIMIZERS
from surojax.parallel.context import METHODS
from surojax.placement.table import WEIGHT_FORMATS, ZERO_LEVELS
from surojax.sizes import MOST_GPUS, check_largest, divisor


class Rule(NamedTuple):
    """A condition on the values of some fields, in addition to their types."""

    fields: str  # names, separated by spaces
    holds: Callable[[Any], bool]
    expected: str  # the condition in words, for the error
    change: str  # what to change, for the error


RULES = (
    Rule(
        "num_epochs eval_batches save_total_limit sequence_len per_device_batch_size gradient_accumulation_steps "
        "log_steps microbatches_per_fetch sequence_chunks lmhead_chunks dp_replicate_size tp_size cp_size pp_size "
        "model.vocab_size model.hidden_size model.intermediate_size "
        "model.num_hidden_layers model.num_attention_heads model.num_key_value_heads "
        "model.rope_original_max_position_embeddings fp8_amax_history lora_rank",
        lambda v: v >= 1,
        "1 or more",
        "raise it",
    ),
    Rule(
        "seed gpus max_steps eval_steps save_steps sample_tokens sample_temperature warmup_steps cooldown_steps "
        "resident_layers weight_decay z_loss max_grad_norm muon_learning_rate model.head_dim "
        "model.sliding_window model.sliding_window_pattern model.no_rope_layer_interval model.rope_attention_factor "
        "model.rope_llama_4_scaling_beta model.rope_local_base_freq model.query_pre_attn_scalar "
        "model.attn_logit_softcapping model.final_logit_softcapping "
        "skip_quant_first_layers skip_quant_last_layers",
        lambda v: v >= 0,
        "0 or more",
        "--help says what 0 means",
    ),
    Rule(
        "learning_rate adamw_epsilon model.rms_norm_eps model.rope_theta model.initializer_range "
        "model.rope_beta_slow model.rope_partial_rotary_factor lora_alpha lora_plus_ratio",
        lambda v: bool(np.float32(v) >= np.finfo(np.float32).tiny),  # devices take smaller ones for 0
        "more than 0 in float32",
        "--help shows the default",
    ),
    Rule(
        "warmup_ratio final_lr_fraction",
        lambda v: 0 <= v <= 1,
        "a fraction from 0 to 1",
        "divide a percentage by 100",
    ),
    Rule(
        "adamw_beta1 adamw_beta2 muon_momentum muon_beta2 lora_dropout",
        lambda v: bool(0 <= np.float32(v) < 1),
        "0 or more and below 1 in float32",
        "--help shows the default",
    ),
    # e4m3 has 17 binades, so with a large margin most numbers would be rounded to zero.
    Rule(
        "fp8_margin",
        lambda v: 0 <= v <= 8,
        "0 to 8 binades",
        "each one more makes small numbers coarser; 0 is usual",
    ),
    Rule(
        "gpus dp_replicate_size dp_shard_size cp_size tp_size pp_size",
        lambda v: v <= MOST_GPUS,
        f"at most {MOST_GPUS:,} GPUs",
        "lower it",
    ),
    Rule(
        "lora_rank fp8_amax_history",
        lambda v: v <= 2**16,
        "at most 65,536",
        "lower it",
    ),
    Rule(
        "sample_tokens",
        lambda v: v <= 2**24,
        "at most 2^24",
        "lower it",
    ),
    Rule(
        "muon_ns_steps",
        lambda v: 1 <= v <= 10,
        "1 to 10",
        "5 is usual; the result is exact to bfloat16 from 6 on",
    ),
    Rule(
        "dp_shard_size",
        lambda v: v == -1 or v >= 1,
        "1 or more, or -1",
        "-1 is all that the other sizes leave",
    ),
    Rule(
        "output_dir text_field data_cache tokenizer resume_from_checkpoint",
        lambda v: v.strip() != "",
        "text that is not empty",
        "leave it out for the default of --help",
    ),
)
MOST_FOR_BYTES = 1024  # rows of an embedding that is trained on bytes, whose 257 ids may be padded to divide over GPUs
FLOATS = ("bfloat16", "float32")
# The allowed values of fields that have a list of them.
CHOICES: dict[str, tuple] = {
    **dict.fromkeys(("model_dtype", "master_dtype", "accum_dtype", "opt_m_dtype", "opt_v_dtype"), FLOATS),
    "lr_scheduler_type": SCHEDULES,
    "optimizer": tuple(OPTIMIZERS),
    "on_long": ("cut", "drop"),
    "on_bad_row": ("error", "skip"),
    "train_on": ("assistant", "last", "all"),
    "model.model_type": tuple(ARCHITECTURES),
    **dict.fromkeys(("matmul_dtype", "gradient_dtype", "lora_dtype"), ("", *FLOATS)),
    "attention": IMPLEMENTATIONS,
    "cp_method": METHODS,
    "kernels": KERNELS,
    "recipe": RECIPES,
    "block_scaled_products": BLOCK_SCALED_PRODUCTS,
    "zero_level": ZERO_LEVELS,
    "zero_quantized_weights": WEIGHT_FORMATS,
    "model.rope_scaling": tuple(ROPE_USES),
    "model.hidden_act": tuple(ACTIVATIONS),
}


def check(c: Config) -> None:
    """Checks everything that follows from the config alone. Raises ConfigError for the first field that is wrong."""
    _check_types(c)
    values = flat(c)
    check_largest(c.model, "model.")
    for rule in RULES:
        for name in rule.fields.split():
            _need(rule.holds(values[name]), name, rule.expected, values[name], rule.change)
    for name, choices in CHOICES.items():
        near = difflib.get_close_matches(str(values[name]), map(str, choices), n=1, cutoff=0.4)
        change = f"did you mean {near[0]!r}?" if near else "choose one of them"
        _need(
            values[name] in choices,
            name,
            f"one of {', '.join(str(choice) or repr(choice) for choice in choices)}",
            values[name],
            change,
        )
    _check_data(c)
    ARCHITECTURES[c.model.model_type].check(c)
    check_adapters(c)
    _check_recipe(c)
    _check_schedule(c)
    _check_optimizer(c)
    _check_sizes(c)
    check_mesh(c)
    _check_chunks(c)


def _check_types(c: Config) -> None:
    """Checks that the config has every field, no other, and the right types. A ConfigDict accepts True as a number."""
    values = flat(c)
    defaults = flat(default_config())
    if unknown := sorted(values.keys() - defaults.keys()):
        raise ConfigError(no_field(unknown[0]))
    if missing := sorted(defaults.keys() - values.keys()):
        raise ConfigError(f"config lacks the field {missing[0]!r}: start from default_config(), which has all of them")
    for name, default in defaults.items():
        value = values[name]
        kind = bool if default is None else type(default)
        if (default is None and value is None) or (type(value) is str and value in WORDS_OF.get(name, ())):
            continue
        is_integer_for_float = kind is float and type(value) is int
        words = "".join(f" or {word!r}" for word in WORDS_OF.get(name, ()))
        has_type = type(value) is kind or is_integer_for_float
        _need(has_type, name, KINDS[kind] + words, value, f"its type is {kind.__name__}{words}")
        if isinstance(value, str):
            bad = any((ord(char) < 32 and name != "sample_prompt") or 0xD800 <= ord(char) < 0xE000 for char in value)
            _need(not bad, name, "text without control characters, in UTF-8", value, "remove those that show as codes")
        elif isinstance(value, tuple):
            for i, entry in enumerate(value):
                _need(isinstance(entry, dict), f"{name}[{i}]", "a dict", entry, "write dict(path=...)")
        elif kind is float:
            is_finite = abs(value) <= float(np.finfo(np.float32).max)  # what devices compute with
            _need(is_finite, name, "a finite number in float32", value, "--help shows the default")
        else:
            _need(value < 2**31, name, "less than 2^31", value, "lower it")


def check_vocabulary(c: Config, size: int, name: str) -> None:
    """Raises ConfigError if a tokenizer has more ids than the model has embedding rows. size, name: the tokenizer's."""
    expected = f"at least {size} (of {name})"
    _need(
        size <= c.model.vocab_size,
        "model.vocab_size",
        expected,
        c.model.vocab_size,
        "raise it, or give the model's tokenizer",
    )


def check_tokenizer(c: Config, size: int, name: str) -> None:
    """Raises ConfigError if a model should not be trained with this tokenizer. size, name: the tokenizer's."""
    check_vocabulary(c, size, name)
    expected = f"the tokenizer of a vocabulary of {c.model.vocab_size}"
    change = "give its tokenizer.json or its model's folder, or set model.vocab_size=320 for bytes"
    _need(c.tokenizer != "bytes" or c.model.vocab_size <= MOST_FOR_BYTES, "tokenizer", expected, "bytes", change)


def _check_data(c: Config) -> None:
    defaults = default_config()
    for name in ("data", "eval_data", "text_field") if c.datasets else ():
        change = f"leave one of them out (of a config file's: --config.{name}={defaults[name]} or --config.datasets=[])"
        _need(c[name] == defaults[name], name, f"{defaults[name]!r} beside datasets", c[name], change)
    has_rows = c.datasets or c.validation_datasets or c.data not in ("", "stdlib")  # or may have, see data/run_data.py
    for name in ("on_bad_row", "train_on", "chat_template", "system_prompt"):
        expected = f"{defaults[name]!r} without rows of instructions or conversations, to which it applies"
        _need(has_rows or c[name] == defaults[name], name, expected, c[name], "leave it out, or set data or datasets")
    expected = "'cut' without sample_packing and such rows: text then continues in the next row"
    is_used = c.sample_packing or has_rows
    _need(is_used or c.on_long == "cut", "on_long", expected, c.on_long, "leave it out, or set sample_packing")


def _check_recipe(c: Config) -> None:
    recipe = c.recipe
    defaults = default_config()
    is_used = {
        "fp8_amax_history fp8_margin": recipe == "fp8_hybrid",
        "block_scaled_products": recipe in BLOCK_SCALED,
        "skip_quant_first_layers skip_quant_last_layers": recipe != "bf16",
        "matmul_dtype gradient_dtype": recipe == "bf16" or c.skip_quant_first_layers + c.skip_quant_last_layers > 0,
    }
    for names, used in is_used.items():
        for name in names.split() if not used else ():
            expected = f"{defaults[name]!r} with recipe={recipe!r}, which does not use it"
            _need(c[name] == defaults[name], name, expected, c[name], "leave it out, or choose another recipe")
    if recipe == "bf16":
        return
    skipped = c.skip_quant_first_layers + c.skip_quant_last_layers
    layers = c.model.num_hidden_layers
    expected = f"fewer than the {layers} layers, both together"
    _need(skipped < layers, "skip_quant_first_layers + skip_quant_last_layers", expected, skipped, "lower them")
    for name in RECOMPUTE_PARTS if recipe.startswith("fp8_") else ():
        expected = f"False with recipe={recipe!r}, whose blocks are saved or computed again as a whole"
        _need(not c[name], name, expected, c[name], "leave it out, or set recompute_block=True")
    change = "set recompute_block=True, or leave the blocks' recipe alike"
    expected = "True with skip_quant_*, since blocks of two kinds save different things"
    _need(c.recompute_block or not skipped, "recompute_block", expected, c.recompute_block, change)
    if recipe.startswith("fp8_"):
        _check_fp8(c, skipped)
    else:
        for name, width in _widths(c).items():
            expected = f"a multiple of {WIDTHS} with recipe={recipe!r}"
            _need(width % WIDTHS == 0, name, expected, width, f"use {-(-width // WIDTHS) * WIDTHS}")


def _check_fp8(c: Config, skipped: int) -> None:
    ARCHITECTURES[c.model.model_type].check_fp8(c)
    for name, width in _widths(c).items():
        expected = f"a multiple of 16 with recipe={c.recipe!r}, which float8 products need"
        _need(width % 16 == 0, name, expected, width, f"use {-(-width // 16) * 16}")
    tokens = c.per_device_batch_size * c.sequence_len // c.cp_size  # a tensor-parallel group gathers whole sequences
    expected = f"a multiple of 16 tokens with recipe={c.recipe!r}, which float8 products need"
    size = "per_device_batch_size x sequence_len" + (" / cp_size" if c.cp_size > 1 else "")
    _need(tokens % 16 == 0, size, expected, tokens, "change one of them")
    expected = f"'none' with recipe={c.recipe!r}, whose weights travel in fp8 anyway"
    weights = c.zero_quantized_weights
    _need(weights == "none", "zero_quantized_weights", expected, weights, "leave it out")
    expected = "False with skip_quant_*: those layers need their 16-bit weights"
    _need(not (skipped and c.persistent_quants), "persistent_quants", expected, True, "leave one of them out")


def _widths(c: Config) -> dict[str, int]:
    """Returns the widths of the blocks' matrices, as {field or product of fields: width}."""
    m = c.model
    h = head_dim(c)
    return {
        "model.hidden_size": m.hidden_size,
        "model.intermediate_size": m.intermediate_size,
        "model.num_attention_heads x head_dim": m.num_attention_heads * h,
        "model.num_key_value_heads x head_dim": m.num_key_value_heads * h,
    }


def _check_schedule(c: Config) -> None:
    not_both = not (c.warmup_steps and c.warmup_ratio)
    _need(not_both, "warmup_ratio", f"0 beside warmup_steps={c.warmup_steps}", c.warmup_ratio, "set only one of them")
    if c.lr_scheduler_type == "wsd":
        expected = "1 or more with lr_scheduler_type='wsd'"
        _need(c.cooldown_steps > 0, "cooldown_steps", expected, c.cooldown_steps, "a fifth of all steps is usual")
    else:
        expected = f"0 with lr_scheduler_type={c.lr_scheduler_type!r}, which does not use it"
        _need(c.cooldown_steps == 0, "cooldown_steps", expected, c.cooldown_steps, "leave it out, or use 'wsd'")
    if c.max_steps:
        expected = f"1 beside max_steps={c.max_steps}, which decides"
        _need(c.num_epochs == 1, "num_epochs", expected, c.num_epochs, "set one of them: max_steps=0 counts epochs")
        planned = warmup_steps(c, c.max_steps) + c.cooldown_steps
        expected = f"at most max_steps={c.max_steps}"
        _need(planned <= c.max_steps, "warmup_steps + cooldown_steps", expected, planned, "shorten them")


def _check_optimizer(c: Config) -> None:
    if c.optimizer == "normuon":
        return
    for name, default in default_config().items():
        if name.startswith("muon_"):
            expected = f"{default!r} with optimizer={c.optimizer!r}, which does not use it"
            _need(c[name] == default, name, expected, c[name], "leave it out, or set optimizer='normuon'")


def _check_sizes(c: Config) -> None:
    tokens = c.per_device_batch_size * c.sequence_len
    chunks = c.lmhead_chunks
    _need(tokens < 2**31, "per_device_batch_size x sequence_len", "less than 2^31 tokens", tokens, "lower one of them")
    expected = f"a divisor of per_device_batch_size x sequence_len = {tokens}"
    change = f"use {divisor(tokens, min(chunks, tokens))}"
    _need(tokens % chunks == 0, "lmhead_chunks", expected, chunks, change)
    microbatches = c.gradient_accumulation_steps
    grouped = c.microbatches_per_fetch
    expected = f"a divisor of gradient_accumulation_steps = {microbatches}"
    change = f"use {divisor(microbatches, min(grouped, microbatches))}"
    _need(microbatches % grouped == 0, "microbatches_per_fetch", expected, grouped, change)
    for name in RECOMPUTE_PARTS if c.recompute_block else ():
        expected = "False with recompute_block=True, which computes all of it again"
        _need(not c[name], name, expected, c[name], "leave it out, or set recompute_block=False")
    _check_overlap(c)
    others = c.dp_replicate_size * gpus_per_sequence(c)
    shards = c.gpus // others if c.gpus and c.dp_shard_size == -1 else c.dp_shard_size
    if c.dp_replicate_size > 1 and (c.zero_level > 1 or c.shard_weights or c.shard_gradients or c.shard_outer):
        expected = "2 or more, to shard over, with zero_level above 1, shard_weights or shard_gradients"
        change = "lower dp_replicate_size or zero_level, or raise gpus"
        _need(shards * c.cp_size != 1, "dp_shard_size", expected, 1, change)


def _check_overlap(c: Config) -> None:
    """Checks the settings that an update under the next forward pass depends on."""
    if not c.overlap_update:
        return
    expected = "True with overlap_update, whose gradients rest in host memory until the next step"
    _need(c.offload_grads, "offload_grads", expected, c.offload_grads, "set it, or leave overlap_update out")
    for name in WORDS_OF:
        expected = "True or False with overlap_update, which is not built for state in files"
        _need(c[name] != "nvme", name, expected, c[name], "leave one of them out")
    expected = "False without offload_optimizer and offload_master: it hides their transfers"
    change = "leave it out, or offload one of them"
    _need(c.offload_optimizer or c.offload_master, "overlap_update", expected, True, change)
    expected = "1 with overlap_update, which updates in the first forward pass: that of a stage is one tick of a loop"
    _need(c.pp_size == 1, "pp_size", expected, c.pp_size, "leave one of them out")
    expected = "another one than normuon with overlap_update, with which every GPU would orthogonalise every matrix"
    _need(c.optimizer != "normuon", "optimizer", expected, c.optimizer, "leave one of them out")


# What chunks of the sequence are not built for, and why: each has its default if sequence_chunks is above 1.
NOT_WITH_CHUNKS = {
    "recipe": "whose scales are of tokens that chunks would part",
    "recompute_block": "which saves memory because the values of one chunk at a time are computed again",
    "cp_method": "since each chunk would send the keys of all chunks before it again, and ulysses sends them once",
}


def _check_chunks(c: Config) -> None:
    """Checks the settings that chunks of the sequence depend on."""
    n = c.sequence_chunks
    if n == 1:
        return
    sizes = [f" / {name}" for name in ("cp_size", "tp_size") if c[name] > 1]
    of_device = c.sequence_len // (c.cp_size * c.tp_size)  # without a remainder, see check_mesh
    expected = f"a divisor of sequence_len{''.join(sizes)} = {of_device}"
    _need(of_device % n == 0, "sequence_chunks", expected, n, f"use {divisor(of_device, min(n, of_device))}")
    tokens = c.sequence_len // n
    expected = f"sequence_len / sequence_chunks = {tokens} to be even, or 'xla' or 'mosaic': cuDNN takes no odd length"
    _need(tokens % 2 == 0 or c.attention in ("xla", "mosaic"), "attention", expected, c.attention, "change one of them")
    defaults = default_config()
    for name, reason in NOT_WITH_CHUNKS.items():
        expected = f"{defaults[name]!r} with sequence_chunks={n}, {reason}"
        _need(c[name] == defaults[name], name, expected, c[name], "leave it out, or set sequence_chunks=1")


def check_output_dir(path: str) -> Path:
    """Returns the output folder as an absolute path, without creating it.

    Raises ConfigError if the folder cannot be created or written.
    """
    change = "choose another path"
    _need("://" not in path, "output_dir", "a folder of this machine", path, "mount the storage and give its path")
    try:
        folder = Path(path).expanduser().absolute()
        for place in (folder, folder / "checkpoints"):
            nearest = next(p for p in (place, *place.parents) if p.exists(follow_symlinks=False))
            _need(nearest.is_dir(), "output_dir", "a folder", str(place), f"{nearest} is a file; {change}")
            tempfile.TemporaryFile(dir=nearest).close()  # an unnamed file: tests write access, leaves nothing
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder for "~"
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"output_dir: expected a folder that can be written, got {path!r} ({reason}); {change}"
        ) from error
    return folder


def restored_config(values: dict, written_by: str = "the version of surojax that wrote it") -> Config:
    """Returns the config that a checkpoint stores. Fields that are newer than the checkpoint get their defaults.

    values: what the config's `to_dict` returned. written_by: the version that wrote it, for the error message.
    Raises ConfigError for a field that this version does not know or that has another type.
    """
    c = default_config()
    try:
        c.update(values)
        _check_types(c)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"checkpoint: expected the fields of this version, got a config that has others ({reason}); "
            f"use {written_by}"
        ) from error
    return c
