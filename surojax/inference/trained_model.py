"""Opens a trained model: a run's, a checkpoint's, a Hugging Face folder's, or a GGUF file's."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from surojax.assembly import from_config
from surojax.config.checks import check, check_vocabulary, restored_config
from surojax.config.fields import Config, default_config
from surojax.data.chat_files import stopping_at_turn_ends
from surojax.data.templates import Template, load_template
from surojax.data.tokenizer import Tokenizer, load_tokenizer
from surojax.errors import CheckpointError, ConfigError
from surojax.exchange import missing, sources
from surojax.exchange.base import check_base, fingerprint
from surojax.exchange.merge import InBaseFormat
from surojax.exchange.model_tensors import stacks
from surojax.models.model import Model
from surojax.numerics import base_formats
from surojax.numerics.quantized import work_copy
from surojax.placement.mesh import find_devices
from surojax.placement.param import Param, part_of, with_part
from surojax.placement.table import has_format
from surojax.run import on_disk
from surojax.run.restore import restore_weights
from surojax.untrusted import TRAINED, check_there, expanded


class Trained(NamedTuple):
    """A model with weights, tokenizer and chat template, ready for inference.

    weights: work weights by section. template: of conversations; None: there is none. length: tokens of the longest
    text that it was made for; None: unknown.
    """

    model: Model
    weights: dict
    tokenizer: Tokenizer
    template: Template | None
    length: int | None = None


def load_trained(path: str | Path, tokenizer: str = "", chat_template: str = "") -> Trained:
    """Opens a checkpoint, or another model, with its work weights on the first device.

    path: a checkpoint, the output_dir of a run, which means its newest checkpoint, a Hugging Face folder or name, or a
    GGUF file. A checkpoint is computed in the run's `model_dtype`, another model in bfloat16 if it was stored in 16
    bits, else in float32.
    tokenizer, chat_template: as in the config; "": those in the checkpoint's config, or the model's own.

    Raises CheckpointError if the checkpoint is missing or unreadable, ConfigError if the tokenizer is not the one that
    the model was trained with or has more ids than the model has embedding rows, or if another model cannot be read.
    """
    if not sources.is_model(path):
        check_there("--checkpoint", path, TRAINED)
    sharding = jax.sharding.SingleDeviceSharding(find_devices(1)[0])
    if sources.is_model(path):
        c = sources.for_inference(default_config(), path, tokenizer)
        check(c)
        model = from_config.model(c)
        weights = sources.open_weights(c, model)
        assert weights is not None
        found_tokenizer = load_tokenizer(c.tokenizer)
        check_vocabulary(c, found_tokenizer.vocab_size, found_tokenizer.name)
        template = load_template(chat_template, found_tokenizer)
        found_tokenizer = stopping_at_turn_ends(found_tokenizer, template)
        work = stacks(weights, model, c.model_dtype, sharding)
        return Trained(model, work, found_tokenizer, template, sources.length_of(sources.locate(path, weights=False)))
    loaded = on_disk.read_newest(path, lambda folder: _of_checkpoint(folder, tokenizer, chat_template, sharding))
    if loaded is None:
        raise CheckpointError(
            f"--checkpoint: expected {TRAINED}, got {str(path)!r}, which holds "
            f"{missing.held_instead(expanded(path)) or 'none'}"
        )
    return loaded


def has_template(c: Config) -> bool:
    """Returns True if a run's config or its tokenizer has a chat template, False if they can no longer be read."""
    output_dir = expanded(c.output_dir)
    try:
        tokenizer = load_tokenizer(sources.tokenizer_of(sources.resolved(c), output_dir))
        return load_template(sources.template_of(c, output_dir), tokenizer) is not None
    except (ConfigError, OSError):
        return False


def _of_checkpoint(checkpoint: Path, tokenizer: str, chat_template: str, sharding: jax.sharding.Sharding) -> Trained:
    meta = on_disk.read_meta_of_run(checkpoint)
    c = restored_config(meta["config"], on_disk.written_by(meta))
    output_dir = checkpoint.parent.parent
    found_tokenizer = load_tokenizer(tokenizer or sources.tokenizer_of(c, output_dir))
    check_trained_with(meta, found_tokenizer)
    check_vocabulary(c, found_tokenizer.vocab_size, found_tokenizer.name)
    model = from_config.model(c)
    if not model.has_logits:
        raise ConfigError(
            f"--checkpoint: expected a language model, got a reward model in {checkpoint}; surojax convert writes it "
            "as a folder for transformers, which scores with it"
        )
    shapes = part_of(model.abstract_params(c.model_dtype), model.trained_params)
    plan = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding), shapes)
    base = base_of(c, meta, model, sharding) if c.lora else {}
    template = load_template(chat_template or sources.template_of(c, output_dir), found_tokenizer)
    found_tokenizer = stopping_at_turn_ends(found_tokenizer, template)
    weights = with_part(base, restore_weights(checkpoint, plan))
    return Trained(model, weights, found_tokenizer, template, sources.length_of_run(c, output_dir))


def base_of(c: Config, meta: dict[str, Any], model: Model, sharding: jax.sharding.Sharding) -> dict:
    """Reads the work weights of the base under a checkpoint's adapters, from the source that its config names.

    Raises CheckpointError if that source now holds another base.
    """
    base = sources.open_weights(c, model)
    if base is None:
        return jax.device_put(drawn_base(c, model), sharding)
    check_base(fingerprint(base, model), meta.get("base", ""), str(base.path))
    if name := base_formats.chosen_format(c):
        base = InBaseFormat(base, model, name, c.model_dtype)
    return stacks(base, model, c.model_dtype, sharding)


def drawn_base(c: Config, model: Model) -> dict:
    """Draws the work weights of a random base again from the seed, dequantised if the run quantises its base."""
    name = base_formats.chosen_format(c)

    def plain(x: jax.Array, planned, param: Param) -> jax.Array:
        if not name or param.trainable or not has_format(param, name):
            return x.astype(planned.dtype)
        like = base_formats.FORMATS[name].planned(param.shape)

        def there_and_back(layer: jax.Array) -> jax.Array:
            return base_formats.dequantise(work_copy(layer, like, planned.dtype), planned.dtype)

        return jax.vmap(there_and_back)(x)

    new = jax.jit(lambda: jax.tree.map(plain, model.init(c.seed), model.abstract_params(c.model_dtype), model.params))
    return new()


def check_trained_with(meta: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Raises ConfigError if a checkpoint was trained with another tokenizer or with a caller's block."""
    if block := meta.get(on_disk.BLOCK):
        raise ConfigError(
            f"block: expected the standard one, got a checkpoint of {block}, which only train(block=...) and "
            "OwnLoop(block=...) compute; OwnLoop(config, block=...).tensors(state) has its weights"
        )
    if tokenizer.name != meta["tokenizer"]:
        raise ConfigError(
            f"tokenizer: expected {meta['tokenizer']}, which the checkpoint was trained with, got {tokenizer.name}; "
            "give that one"
        )
