"""Refuses a bad config before anything is built.

`check` raises ConfigError with one line that says what was expected, what was found and what to change. Checks that
depend on the devices are elsewhere: `placement.place`, `check_fit.check_fit`.
"""

import os
import tempfile
from pathlib import Path

from surojax.config.adapters import check_adapters
from surojax.config.fields import (
    DEFAULTS,
    FIELDS,
    Config,
    default_config,
    flat,
    gpus_per_sequence,
    no_field,
    warmup_steps,
    widths,
)
from surojax.config.mesh_checks import check_mesh
from surojax.errors import ConfigError, need as _need
from surojax.exchange.missing import SAVE_FAST, SLOW_TOKENIZERS
from surojax.families.registry import ARCHITECTURES
from surojax.numerics.blockscaled import WIDTHS
from surojax.numerics.recipes import BLOCK_SCALED
from surojax.objectives.distillation import DISTILL
from surojax.objectives.objectives import OBJECTIVES, REFUSALS as OF_OBJECTIVES
from surojax.optim.optimizers import REFUSALS as OF_OPTIMIZERS
from surojax.refusals.pairs import TABLE
from surojax.refusals.refusal import refusals_page, refuse
from surojax.sizes import check_largest, divisor

# What does not go together: the rows of docs/refusals.md.
REFUSALS = (
    *TABLE,
    *(row for entry in ARCHITECTURES.values() for row in entry.refusals),
    *OF_OPTIMIZERS,
    *OF_OBJECTIVES,
)
MOST_FOR_BYTES = 1024  # rows of an embedding that is trained on bytes, whose 257 ids may be padded to divide over GPUs


def check(c: Config) -> None:
    """Checks everything that follows from the config alone. Raises ConfigError for the first field that is wrong."""
    _check_types(c)
    values = flat(c)
    check_largest(c.model.to_dict(), "model.")
    for name, field in FIELDS.items():
        field.check(values[name])
    refuse(values, DEFAULTS, REFUSALS)
    ARCHITECTURES[c.model.model_type].check(c)
    check_adapters(c)
    _check_recipe(c)
    _check_schedule(c)
    _check_sizes(c)
    check_mesh(c)
    _check_chunks(c)


def _check_types(c: Config) -> None:
    """Checks that the config has every field, no other, and the right types. A ConfigDict accepts True as a number."""
    values = flat(c)
    if unknown := sorted(values.keys() - DEFAULTS.keys()):
        raise ConfigError(no_field(unknown[0], DEFAULTS))
    if missing := sorted(DEFAULTS.keys() - values.keys()):
        raise ConfigError(f"config lacks the field {missing[0]!r}: start from default_config(), which has all of them")
    for name, field in FIELDS.items():
        field.check_type(values[name])


def check_vocabulary(c: Config, size: int, name: str) -> None:
    """Raises ConfigError if a tokenizer has more ids than the model has embedding rows.

    size, name: of the tokenizer.
    """
    if c.model_path:  # the model's files fix model.vocab_size
        rows = c.model.vocab_size
        change = (
            f"give the model's own tokenizer, or add the rows with transformers: resize_token_embeddings({size}), "
            "then save_pretrained, and that folder as model_path"
        )
        _need(size <= rows, "tokenizer", f"at most {rows} tokens, as many as {c.model_path} has rows", size, change)
    expected = f"at least {size} (of {name})"
    _need(
        size <= c.model.vocab_size,
        "model.vocab_size",
        expected,
        c.model.vocab_size,
        "raise it, or give the model's tokenizer",
    )


def check_tokenizer(c: Config, size: int, name: str) -> None:
    """Raises ConfigError if a model should not be trained with this tokenizer. size, name: of the tokenizer."""
    check_vocabulary(c, size, name)
    if c.tokenizer == "bytes" and c.model_path:
        folder = Path(os.path.expanduser(c.model_path))
        others = [name for name in SLOW_TOKENIZERS if (folder / name).is_file()]
        expected = f"tokenizer.json in {c.model_path}"
        ok = not others and c.model.vocab_size <= MOST_FOR_BYTES
        _need(ok, "tokenizer", expected, ", ".join(others) or "no such file", SAVE_FAST)
    expected = f"the tokenizer of a vocabulary of {c.model.vocab_size}"
    change = "give its tokenizer.json or its model's folder, or set model.vocab_size=320 for bytes"
    _need(c.tokenizer != "bytes" or c.model.vocab_size <= MOST_FOR_BYTES, "tokenizer", expected, "bytes", change)


def _check_recipe(c: Config) -> None:
    recipe = c.recipe
    if recipe == "bf16":
        return
    skipped = c.skip_quant_first_layers + c.skip_quant_last_layers
    layers = c.model.num_hidden_layers
    expected = f"fewer than the {layers} layers, both together"
    _need(skipped < layers, "skip_quant_first_layers + skip_quant_last_layers", expected, skipped, "lower them")
    multiple = WIDTHS if recipe in BLOCK_SCALED else 16  # 16: of float8 products
    sizes = {"model.hidden_size": c.model.hidden_size} | {width.name: width.size for width in widths(c)}
    for name, width in sizes.items():
        expected = f"a multiple of {multiple} with recipe={recipe!r}, which its products need"
        change = "set recipe='bf16'" if c.model_path else f"use {-(-width // multiple) * multiple}"
        _need(width % multiple == 0, name, expected, width, change)
    if recipe in BLOCK_SCALED:
        return
    tokens = c.per_device_batch_size * c.sequence_len // c.cp_size  # a tensor-parallel group gathers whole sequences
    expected = f"a multiple of 16 tokens with recipe={recipe!r}, which float8 products need"
    size = "per_device_batch_size x sequence_len" + (" / cp_size" if c.cp_size > 1 else "")
    _need(tokens % 16 == 0, size, expected, tokens, "change one of them")


def _check_schedule(c: Config) -> None:
    if c.max_steps:
        planned = warmup_steps(c, c.max_steps) + c.cooldown_steps
        expected = f"at most max_steps={c.max_steps}"
        _need(planned <= c.max_steps, "warmup_steps + cooldown_steps", expected, planned, "shorten them")


def _check_sizes(c: Config) -> None:
    tokens = c.per_device_batch_size * c.sequence_len
    chunks = c.lmhead_chunks
    _need(tokens < 2**31, "per_device_batch_size x sequence_len", "less than 2^31 tokens", tokens, "lower one of them")
    expected = f"a divisor of per_device_batch_size x sequence_len = {tokens}"
    change = f"use {divisor(tokens, min(chunks, tokens))}"
    _need(tokens % chunks == 0, "lmhead_chunks", expected, chunks, change)
    rows = c.per_device_batch_size
    expected = f"an even number with objective={c.objective!r}, whose pairs are two sequences each"
    _need(rows % OBJECTIVES[c.objective].together == 0, "per_device_batch_size", expected, rows, "use 2")
    words = c.model.vocab_size
    fits = c.objective != DISTILL or c.distill_top_k <= words
    _need(fits, "distill_top_k", f"at most model.vocab_size={words}", c.distill_top_k, f"use {words}")
    microbatches = c.gradient_accumulation_steps
    grouped = c.microbatches_per_fetch
    expected = f"a divisor of gradient_accumulation_steps = {microbatches}"
    change = f"use {divisor(microbatches, min(grouped, microbatches))}"
    _need(microbatches % grouped == 0, "microbatches_per_fetch", expected, grouped, change)
    others = c.dp_replicate_size * gpus_per_sequence(c)
    shards = c.gpus // others if c.gpus and c.dp_shard_size == -1 else c.dp_shard_size
    if c.dp_replicate_size > 1 and (c.zero_level > 1 or c.shard_weights or c.shard_gradients or c.shard_outer):
        expected = "2 or more, to shard over, with zero_level above 1, shard_weights or shard_gradients"
        change = "lower dp_replicate_size or zero_level, or raise gpus"
        _need(shards * c.cp_size != 1, "dp_shard_size", expected, 1, change)


def _check_chunks(c: Config) -> None:
    """Checks the settings that sequence_chunks depends on."""
    n = c.sequence_chunks
    if n == 1:
        return
    sizes = [f" / {name}" for name in ("cp_size", "tp_size") if c[name] > 1]
    length = c.sequence_len // (c.cp_size * c.tp_size)  # without a remainder, see check_mesh
    expected = f"a divisor of sequence_len{''.join(sizes)} = {length}"
    _need(length % n == 0, "sequence_chunks", expected, n, f"use {divisor(length, min(n, length))}")
    tokens = c.sequence_len // n
    expected = f"sequence_len / sequence_chunks = {tokens} to be even, or 'xla' or 'mosaic': cuDNN takes no odd length"
    _need(tokens % 2 == 0 or c.attention in ("xla", "mosaic"), "attention", expected, c.attention, "change one of them")


def check_output_dir(path: str) -> Path:
    """Checks the output folder and returns its absolute path, without creating it.

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
    """Makes a config from the settings in a checkpoint. Fields that are newer than the checkpoint get their defaults.

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


if __name__ == "__main__":
    print(refusals_page(REFUSALS, DEFAULTS), end="")
