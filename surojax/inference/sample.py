"""Samples from a model: continues prompts token by token, with a key/value cache.

Shape suffixes: B batch, S new positions, V vocabulary.
"""

import base64
import functools
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from surojax.errors import ConfigError, shown
from surojax.inference.forward import check_cache_room, empty_cache, routed_logits
from surojax.models.model import Model
from surojax.placement.param import OUTER

MOST_TOKENS = 2**24  # new ones; no model goes on for so long


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
    """Compiles the function that adds tokens to the cache and picks each row's next token.

    It returns these, their log-probabilities, the cache, and the experts of the tokens that were added, see
    `routed_logits`. Temperature and top_p do not change log-probabilities.
    """

    @functools.partial(jax.jit, donate_argnums=2)
    def advance(weights, tokens_BS, cache, start, first_B, key):
        logits_BV, cache, routes_LBSk = routed_logits(model, weights, tokens_BS, cache, start, first_B)
        # Ids of rows that only pad the vocabulary are never sampled.
        ids = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
        picked_B = pick(jnp.where(ids < vocab_size, logits_BV, -jnp.inf), key, temperature, top_p)
        logits_B = jnp.take_along_axis(logits_BV, picked_B[:, None], axis=-1)[:, 0]
        return picked_B, logits_B - jax.nn.logsumexp(logits_BV, axis=-1), cache, routes_LBSk

    return advance


def stream(model: Model, weights: dict, prompts: Sequence[np.ndarray], **options) -> Iterator[np.ndarray]:
    """Yields the next token of every prompt, int32 `[B]`. Options: see `sampled`."""
    for next_B, _, _ in sampled(model, weights, prompts, **options):
        yield np.asarray(next_B)


def sampled(
    model: Model,
    weights: dict,
    prompts: Sequence[np.ndarray],
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    vocab_size: int | None = None,
    multiple_of: int = 1,
) -> Iterator[tuple[jax.Array, jax.Array, jax.Array]]:
    """Yields the next token of every prompt, its log-probability, and experts of those before it, `max_tokens` times.

    Tokens are int32 `[B]`, log-probabilities float32 `[B]`. Experts are those of the S tokens that were added to the
    cache, int32 `[layers, B, S, k]`: first of the padded prompts, then of the token that was yielded before.

    Shorter prompts are padded on the left. Log-probabilities are those that training has: at temperature 1, of all rows
    of the embedding.

    weights: work weights by section, in any sharding, quantised or not. prompts: token ids, 1-D and not empty.
    vocab_size: ids of `vocab_size` and above are never sampled; None: all rows of the embedding can be sampled.
    multiple_of: the padded length is one of this; programs are compiled per length.

    Raises ValueError for an empty prompt, an option out of range, or texts that do not fit memory.
    """
    prompts = [np.asarray(prompt, np.int32) for prompt in prompts]
    for prompt in prompts:
        if prompt.ndim != 1 or not prompt.size:
            raise ValueError(
                f"prompt: expected token ids in one dimension, got shape {prompt.shape}; pass eos to start anew"
            )
    check_options(max_tokens, temperature, top_p, seed)
    length = -(-max(prompt.size for prompt in prompts) // multiple_of) * multiple_of
    check_cache_room(model, len(prompts), length, length + max_tokens, weights[OUTER]["embed"].dtype)
    first_B = np.array([length - prompt.size for prompt in prompts], np.int32)
    tokens_BS = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(tokens_BS, prompts, strict=True):
        row[length - prompt.size :] = prompt
    padded = jnp.asarray(first_B) if first_B.any() else None
    advance = _compiled(model, vocab_size or model.vocab_size, float(temperature), float(top_p))
    cache = empty_cache(model, len(prompts), length + max_tokens, weights[OUTER]["embed"].dtype)
    key = jax.random.key(seed)
    start = 0
    tokens: jax.Array | np.ndarray = tokens_BS
    for i in range(max_tokens):
        next_B, logprob_B, cache, routes_LBSk = advance(
            weights, tokens, cache, start, padded, jax.random.fold_in(key, i)
        )
        start += tokens.shape[1]
        tokens = next_B[:, None]
        yield next_B, logprob_B, routes_LBSk


def rollout(
    model: Model,
    weights: dict,
    prompt: np.ndarray,
    samples: int,
    *,
    stop_ids: Collection[int] = (),
    routed_experts: bool = False,
    **options,
) -> dict[str, list]:
    """Samples a row of rollouts, see `data.rollouts`, without rewards: completions of a prompt, with their end tokens.

    routed_experts: add the experts of all tokens. options: of `sampled`.
    """
    completions: list[list[int]] = [[] for _ in range(samples)]
    logprobs: list[list[float]] = [[] for _ in range(samples)]
    running = set(range(samples))
    routes = []
    for picked in sampled(model, weights, [prompt] * samples, **options):
        next_B, logprob_B, routes_LBSk = jax.device_get(picked if routed_experts else (*picked[:2], None))
        routes.append(routes_LBSk)
        for row in sorted(running):
            completions[row].append(int(next_B[row]))
            logprobs[row].append(float(logprob_B[row]))
            if completions[row][-1] in stop_ids:
                running.remove(row)
        if not running:
            break
    row = {"prompt_ids": np.asarray(prompt).tolist(), "completion_ids": completions, "logprobs": logprobs}
    if routed_experts:
        padding = routes[0].shape[2] - len(prompt)
        routes_BSLk = np.concatenate(routes, axis=2)[:, :, padding:].transpose(1, 2, 0, 3).astype("<i4")
        each = zip(routes_BSLk, completions, strict=True)
        row["routed_experts"] = [
            base64.b64encode(x[: len(prompt) + len(completion) - 1].tobytes()).decode() for x, completion in each
        ]
    return row


def generate(
    model: Model, weights: dict, prompt: np.ndarray, *, stop_ids: Collection[int] = (), **options
) -> Iterator[int]:
    """Yields the token ids that continue one prompt, until one of `stop_ids` or `max_tokens`. options: of `stream`."""
    for (token,) in stream(model, weights, [prompt], **options):
        if int(token) in stop_ids:
            return
        yield int(token)


def never_ends(ids: Sequence[int]) -> bool:
    return False


def generate_batch(
    model: Model,
    weights: dict,
    prompts: Sequence[np.ndarray],
    *,
    stop_ids: Collection[int] = (),
    ended: Callable[[Sequence[int]], bool] = never_ends,
    **options,
) -> list[list[int]]:
    """Returns each prompt's continuation, as `generate` yields it, for all prompts in one batch.

    ended: whether a continuation, which then is not extended, has all that is wanted, such as a stop string.
    """
    tokens_of_rows: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    for next_B in stream(model, weights, prompts, **options):
        for row in sorted(running):
            token = int(next_B[row])
            if token not in stop_ids:
                tokens_of_rows[row].append(token)
            if token in stop_ids or ended(tokens_of_rows[row]):
                running.remove(row)
        if not running:
            break
    return tokens_of_rows


def check_options(max_tokens: int, temperature: float, top_p: float, seed: int = 0) -> None:
    """Raises ConfigError if an option is out of range."""
    for name, is_in_range, expected, got in (
        ("max_tokens", 0 <= max_tokens <= MOST_TOKENS, f"a whole number from 0 to {MOST_TOKENS:,}", max_tokens),
        ("temperature", 0 <= temperature < float("inf"), "a number, 0 or more", temperature),
        ("top_p", 0 < top_p <= 1, "a number above 0, 1 at most", top_p),
        ("seed", 0 <= seed < 2**31, "a whole number from 0 to 2^31 - 1", seed),
    ):
        if not is_in_range:
            raise ConfigError(f"{name}: expected {expected}, got {shown(got, 40)}; correct it")
