"""Scores given texts: the log probability of a continuation after its context.

Shape suffixes: B batch, S sequence, D hidden size, V vocabulary, T tokens of all rows with padding,
C slices, N tokens of a slice.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from surojax.data.tokenizer import Tokenizer
from surojax.inference.forward import check_cache_room, hidden
from surojax.models.model import Compute, Model
from surojax.placement.param import OUTER

_IGNORED = -1  # target of a position that does not count
_SLICE = 256  # tokens whose logits are in memory at a time


class Request(NamedTuple):
    """Token ids, 1-D int32: a continuation to score after its context; neither is empty."""

    context: np.ndarray
    continuation: np.ndarray


class Score(NamedTuple):
    """Log probability of a continuation in nats, and whether greedy sampling would give it."""

    logprob: float
    is_greedy: bool


def request_of(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """Makes the `Request` to score one text after another. Spaces at the end of the context are the continuation's.

    The ids are those of the whole text if these begin with the context's ids, else those of each part: no token is
    merged across the seam. An empty context is the token that a text begins with.
    """
    kept = context.rstrip(" ")
    continuation = context[len(kept) :] + continuation
    begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    before = [] if kept and not tokenizer.adds_bos else [begin]
    ids = tokenizer.encode(kept) if kept else np.empty(0, np.int32)
    whole = tokenizer.encode(kept + continuation)
    merged = not np.array_equal(whole[: ids.size], ids)
    added = tokenizer.encode(continuation) if merged else whole[ids.size :]
    return Request(np.concatenate([np.array(before, np.int32), ids]), added)


def score(
    model: Model, weights: dict, requests: Sequence[Request], *, batch_size: int = 8, multiple_of: int = 64
) -> list[Score]:
    """Computes the `Score` of each request, in order.

    Requests of similar lengths are computed together, `batch_size` at a time, padded to a multiple of `multiple_of`
    tokens. weights: work weights by section. Blocks are computed in the dtype of the weights, without a recipe, with
    attention "auto", whichever the model was trained with.
    Raises ValueError for an empty context or continuation, and for texts that do not fit memory.
    """
    for request in requests:
        if not (request.context.size and request.continuation.size):
            raise ValueError(
                f"expected a context and a continuation of at least one token, got {request.context.size} and "
                f"{request.continuation.size}; begin a text with the tokenizer's first or end-of-sequence token"
            )
    by_length = sorted(range(len(requests)), key=lambda i: requests[i].context.size + requests[i].continuation.size)
    scores: dict[int, Score] = {}
    for first in range(0, len(by_length), batch_size):
        numbers = by_length[first : first + batch_size]
        if jax.default_backend() == "cpu":  # flash attention of GPUs has no scores in memory
            longest = requests[numbers[-1]]
            check_cache_room(model, batch_size, longest.context.size + longest.continuation.size)
        inputs_BS, targets_BS = _padded([requests[i] for i in numbers], batch_size, multiple_of)
        logprob_B, is_greedy_B = jax.device_get(_scorer(model)(weights, inputs_BS, targets_BS))
        for row, i in enumerate(numbers):
            scores[i] = Score(float(logprob_B[row]), bool(is_greedy_B[row]))
    return [scores[i] for i in range(len(requests))]


def _padded(requests: Sequence[Request], rows: int, multiple_of: int) -> tuple[np.ndarray, np.ndarray]:
    """Pads requests to (inputs, targets), int32 `[rows, S]`; targets outside of continuations are `_IGNORED`."""
    longest = max(request.context.size + request.continuation.size - 1 for request in requests)
    S = -(-longest // multiple_of) * multiple_of
    inputs_BS = np.zeros((rows, S), np.int32)
    targets_BS = np.full((rows, S), _IGNORED, np.int32)
    for inputs_S, targets_S, (context, continuation) in zip(inputs_BS, targets_BS, requests, strict=False):
        whole = np.concatenate([context, continuation])
        inputs_S[: whole.size - 1] = whole[:-1]
        targets_S[context.size - 1 : whole.size - 1] = continuation
    return inputs_BS, targets_BS


@functools.cache
def _scorer(model: Model):
    """Compiles (weights, inputs, targets) -> (summed log probabilities, whether all targets have the largest logit).

    Both have a value per row `[B]`.
    """
    plain = model.rebuild(Compute())

    @jax.jit
    def scores(weights, inputs_BS, targets_BS):
        x_BSD = hidden(plain, weights, inputs_BS)

        def score_slice(args):
            x_ND, targets_N = args
            logits_NV = plain.logits(weights[OUTER], x_ND)
            chosen_N = jnp.take_along_axis(logits_NV, jnp.maximum(targets_N, 0)[:, None], axis=-1)[:, 0]
            logprob_N = chosen_N - jax.nn.logsumexp(logits_NV, axis=-1)
            counts_N = targets_N >= 0
            is_greedy_N = jnp.argmax(logits_NV, axis=-1) == targets_N
            return jnp.where(counts_N, logprob_N, 0.0), is_greedy_N | ~counts_N

        tokens = targets_BS.size
        padding = -tokens % _SLICE
        x_TD = jnp.pad(x_BSD.reshape(tokens, -1), ((0, padding), (0, 0)))
        targets_T = jnp.pad(targets_BS.reshape(-1), (0, padding), constant_values=_IGNORED)
        x_CND = x_TD.reshape(-1, _SLICE, x_TD.shape[-1])
        logprob_CN, is_greedy_CN = jax.lax.map(score_slice, (x_CND, targets_T.reshape(-1, _SLICE)))
        logprob_BS = logprob_CN.reshape(-1)[:tokens].reshape(targets_BS.shape)
        is_greedy_BS = is_greedy_CN.reshape(-1)[:tokens].reshape(targets_BS.shape)
        return jnp.sum(logprob_BS, axis=1), jnp.all(is_greedy_BS, axis=1)

    return scores
