"""Samples text with a key/value cache, as a function and as a command.

    python -m surojax.generate --checkpoint runs/tiny --prompt "def main("

Shape suffixes: B batch, S new positions, T cached positions, L layers, K key/value heads, h head dimension,
V vocabulary.
"""

import argparse
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from surojax import assembly
from surojax.config.checks import check, restored_config
from surojax.config.fields import default_config
from surojax.data.tokenizer import Tokenizer, load_tokenizer
from surojax.errors import CheckpointError, ConfigError
from surojax.exchange import sources
from surojax.exchange.weights import stacks
from surojax.memory.host import Part, parts, read, write
from surojax.models.model import Cache, Model, Segment, Variant, loop_over, runs
from surojax.numerics.quantize import dequantise_all
from surojax.placement.mesh import find_devices
from surojax.placement.param import OUTER
from surojax.run import checkpoint
from surojax.step.outer import embed


def empty_cache(model: Model, batch: int, length: int, dtype) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns zeros for the keys and values of `length` positions: by segment, two arrays `[L, B, T, K, h]`."""

    def zeros(segment: Segment) -> jax.Array:
        heads = segment.heads
        return jnp.zeros((segment.num_layers, batch, length, heads.key_value, heads.channels), dtype)

    return {segment.name: (zeros(segment), zeros(segment)) for segment in model.segments}


def cached_logits(model: Model, weights, tokens_BS: jax.Array, cache, start: jax.Array):
    """Returns (float32 logits `[B, V]` of the last of the S new positions, the cache with all S new positions).

    start: number of positions that are already in the cache.
    """

    def layer(segment: Segment, part: Part, start_of_run: int, k, variant: Variant, carry):
        """The k-th layer of a run."""
        x_BSD, stacks = carry
        l = start_of_run + k
        w = dequantise_all(read(part.stack, l - part.start), x_BSD.dtype)
        keys, values = read(stacks, l)
        x_BSD, extended = segment.cached_block(w, x_BSD, Cache(keys, values, start), variant)
        return x_BSD, write(stacks, (extended.keys, extended.values), l)

    x_BSD = embed(weights[OUTER], tokens_BS, sharded=False, scale=model.embedding_scale)
    extended = {}
    for segment in model.segments:
        carry = x_BSD, cache[segment.name]
        for part in parts(weights[segment.name]):
            variants = segment.variants[part.start : part.stop]
            for run in runs(variants):
                one = functools.partial(layer, segment, part, part.start + run.start)
                carry = loop_over(variants[run.start : run.stop], run.period, one, carry)
        x_BSD, extended[segment.name] = carry
    return model.logits(weights[OUTER], x_BSD[:, -1]), extended


def pick(logits_BV: jax.Array, key: jax.Array, temperature: float, top_p: float) -> jax.Array:
    """Picks one token per row, int32 `[B]`.

    If the temperature is 0, it is the most likely token. Otherwise it is sampled at that temperature from the smallest
    set of most likely tokens whose probabilities sum to at least `top_p` (nucleus sampling, Holtzman et al. 2020).
    """
    if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / temperature
    if top_p < 1:
        order_BV = jnp.argsort(-logits_BV, axis=-1)
        probs_BV = jnp.take_along_axis(jax.nn.softmax(logits_BV, axis=-1), order_BV, axis=-1)
        before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV  # total probability of the more likely tokens
        kept_BV = jnp.take_along_axis(before_BV < top_p, jnp.argsort(order_BV, axis=-1), axis=-1)
        logits_BV = jnp.where(kept_BV, logits_BV, -jnp.inf)
    return jax.random.categorical(key, logits_BV, axis=-1).astype(jnp.int32)


@functools.cache
def _compiled(model: Model, vocab_size: int, temperature: float, top_p: float):
    """Returns the jitted function that adds tokens to the cache and picks the next one."""

    @functools.partial(jax.jit, donate_argnums=2)
    def advance(weights, tokens_BS, cache, start, key):
        logits_BV, cache = cached_logits(model, weights, tokens_BS, cache, start)
        # Ids of rows that only pad the vocabulary are never sampled.
        ids = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
        logits_BV = jnp.where(ids < vocab_size, logits_BV, -jnp.inf)
        return pick(logits_BV, key, temperature, top_p), cache

    return advance


def generate(
    model: Model,
    weights: dict,
    prompt: np.ndarray,
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yields the token ids that continue `prompt`, until `eos_id` or `max_tokens`.

    weights: work weights by section, in any sharding, quantised or not.
    prompt: token ids, 1-D and not empty.
    vocab_size: ids of `vocab_size` and above are never sampled; None: all rows of the embedding can be sampled.

    Raises ValueError for an empty prompt, a negative temperature, or top_p outside (0, 1].
    """
    prompt = np.asarray(prompt, np.int32)
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(
            f"prompt: expected token ids in one dimension, got shape {prompt.shape}; pass eos to start anew"
        )
    check_options(max_tokens, temperature, top_p)
    advance = _compiled(model, vocab_size or model.vocab_size, float(temperature), float(top_p))
    cache = empty_cache(model, 1, prompt.size + max_tokens, weights[OUTER]["embed"].dtype)
    key = jax.random.key(seed)
    tokens = jnp.asarray(prompt)[None]
    start = 0
    for i in range(max_tokens):
        token, cache = advance(weights, tokens, cache, start, jax.random.fold_in(key, i))
        start += tokens.shape[1]
        tokens = token[:, None]
        if (value := int(token[0])) == eos_id:
            return
        yield value


def complete(model: Model, weights: dict, tokenizer: Tokenizer, prompt: str, **options) -> str:
    """Returns a text that continues `prompt`. `options` are those of `generate`. An empty prompt starts a document."""
    ids = tokenizer.encode(prompt) if prompt else np.array([tokenizer.eos_id])
    new = generate(model, weights, ids, eos_id=tokenizer.eos_id, vocab_size=tokenizer.vocab_size, **options)
    return tokenizer.decode(list(new))


def check_options(max_tokens: int, temperature: float, top_p: float) -> None:
    """Raises ValueError if an option is out of range."""
    if not (max_tokens >= 0 and 0 <= temperature < float("inf") and 0 < top_p <= 1):
        raise ValueError(
            "expected max_tokens >= 0, temperature >= 0 and 0 < top_p <= 1, "
            f"got {max_tokens}, {temperature} and {top_p}"
        )


def load(path: str | Path, tokenizer: str = "") -> tuple[Model, dict, Tokenizer]:
    """Returns (model, work weights on the first device, tokenizer) of a checkpoint or of another model.

    path: a checkpoint, the output_dir of a run, which means its newest checkpoint, a Hugging Face folder or name, or a
    GGUF file. A checkpoint is computed in the run's `model_dtype`, another model in bfloat16 if it was stored in 16
    bits, else in float32.
    tokenizer: as in the config; "": the one in the checkpoint's config, or the model's own.

    Raises CheckpointError if the checkpoint is missing or unreadable, ConfigError if the tokenizer is not the one that
    the model was trained with, or if another model cannot be read.
    """
    sharding = jax.sharding.SingleDeviceSharding(find_devices(1)[0])
    if sources.is_model(path):
        c = sources.for_inference(default_config(), path, tokenizer)
        check(c)
        model = assembly.model(c)
        weights = sources.open_weights(c, model)
        assert weights is not None
        return model, stacks(weights, model, c.model_dtype, sharding), load_tokenizer(c.tokenizer)
    if (found := checkpoint.find(path)) is None:
        raise CheckpointError(
            f"--checkpoint: expected a checkpoint, a run's output_dir, a Hugging Face folder or a GGUF file, got "
            f"{str(path)!r}, which holds none"
        )
    meta = checkpoint.read_meta(found)
    c = restored_config(meta["config"], checkpoint.written_by(meta))
    loaded_tokenizer = load_tokenizer(tokenizer or sources.tokenizer_of(c, found.parent.parent))
    if loaded_tokenizer.name != meta["tokenizer"]:
        raise ConfigError(
            f"tokenizer: expected {meta['tokenizer']}, which the checkpoint was trained with, "
            f"got {loaded_tokenizer.name}"
        )
    model = assembly.model(c)
    shapes = model.abstract_params(c.model_dtype)
    plan = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding), shapes)
    return model, checkpoint.restore_weights(found, plan), loaded_tokenizer


def _exit_with(message: str) -> NoReturn:
    sys.exit(f"surojax.generate: error: {message}; see -h")


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and print the prompt and its continuation."""
    parser = argparse.ArgumentParser(
        prog="python -m surojax.generate", description="Continue a text with a trained model."
    )
    parser.add_argument(
        "--checkpoint", required=True, help="a checkpoint folder, or the output_dir of a run for its newest one"
    )
    parser.add_argument("--prompt", default="", help="text to continue; empty = start a new document")
    parser.add_argument("--max-tokens", type=int, default=200, help="largest number of new tokens (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = greedy (default 0.8)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample only from the most likely tokens of this total probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.add_argument(
        "--tokenizer", default="", help="tokenizer.json, if it is no longer where the run's config says"
    )
    parser.error = _exit_with
    args = parser.parse_args(argv)
    try:
        check_options(args.max_tokens, args.temperature, args.top_p)
        model, weights, tokenizer = load(args.checkpoint, args.tokenizer)
        ids = tokenizer.encode(args.prompt) if args.prompt else np.array([tokenizer.eos_id])
        new = generate(
            model, weights, ids, max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p,
            seed=args.seed, eos_id=tokenizer.eos_id, vocab_size=tokenizer.vocab_size,
        )  # fmt: skip
        print(args.prompt + tokenizer.decode(list(new)))
    except (ValueError, CheckpointError) as error:
        sys.exit(f"surojax.generate: error: {error}")


if __name__ == "__main__":
    main()
