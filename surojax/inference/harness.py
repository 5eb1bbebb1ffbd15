"""Implements the model interface of the LM Evaluation Harness (EleutherAI, package lm_eval) for our models.

Import this module only where lm_eval is installed. The harness encodes pairs of context and continuation as it does for
every causal model; scores and samples are those of `score` and `sample`.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval import utils  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from tqdm import tqdm

from surojax.data.templates import Template
from surojax.errors import ConfigError
from surojax.inference.sample import generate_batch
from surojax.inference.score import Request, score
from surojax.inference.trained_model import Trained


class Harness(TemplateLM):
    """A model with the interface that the harness calls.

    batch_size: texts computed together. max_length: tokens of a text; of a longer one the end is used.
    """

    def __init__(self, trained: Trained, *, batch_size: int, max_length: int):
        super().__init__()
        self.trained = trained
        self.tokens = trained.tokenizer
        self.batch_size = batch_size
        self.max_length = max_length

    @property
    def eot_token_id(self) -> int:
        return self.tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context."""
        return self.tokens.eos_id if self.tokens.bos_id is None else self.tokens.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokens.name.replace(":", "-")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Encodes a text, with one beginning-of-sequence token first if the tokenizer adds it."""
        ids = self.tokens.encode(string).tolist()
        bos = self.tokens.bos_id
        if bos is None or not self.tokens.adds_bos or add_special_tokens is False or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self._template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._template.text if chat_template else ""

    @property
    def _template(self) -> Template:
        if self.trained.template is None:
            raise ConfigError("--chat: expected a chat template, which the model does not have; give --chat-template")
        return self.trained.template

    def _loglikelihood_tokens(self, requests: Sequence, **kwargs) -> list[tuple[float, bool]]:
        pairs = []
        for _, context, continuation in requests:
            context = context[-max(1, self.max_length + 1 - len(continuation)) :]  # the last token is no input
            pairs.append(Request(np.asarray(context, np.int32), np.asarray(continuation, np.int32)))
        scores = score(self.trained.model, self.trained.weights, pairs, batch_size=self.batch_size)
        return [(result.logprob, result.is_greedy) for result in scores]

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        """Computes the log probability of whole texts, each token after as much context as fits."""
        logprobs = []
        for request in tqdm(requests, disable=disable_tqdm):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
            logprobs.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs)))
        return logprobs

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        """Samples continuations of texts up to their first stop string; greedy unless a task sets a temperature."""
        prepared = [(number, *self._prepared(request.args)) for number, request in enumerate(requests)]

        # Texts of similar lengths together, and only those with the same options and stop strings.
        def alike(entry: tuple) -> str:
            return repr(entry[2:])

        prepared.sort(key=lambda entry: (alike(entry), len(entry[1])))
        texts: dict[int, str] = {}
        with tqdm(total=len(prepared), disable=disable_tqdm) as progress:
            for _, group in itertools.groupby(prepared, key=alike):
                for batch in itertools.batched(group, self.batch_size):
                    for (number, *_), text in zip(batch, self._sampled(batch, batch[0][2]), strict=True):
                        texts[number] = text
                    progress.update(len(batch))
        return [texts[number] for number in range(len(texts))]

    def _prepared(self, args: tuple) -> tuple[np.ndarray, dict[str, Any], tuple[str, ...]]:
        """Splits a request into (prompt, options of sampling, stop strings).

        Raises ConfigError if no token of it is left.
        """
        text, arguments = args
        until = arguments.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        max_tokens = int(arguments.get("max_gen_toks", arguments.get("max_tokens", 256)))
        if max_tokens >= self.max_length:
            raise ConfigError(
                f"--max-length: expected more than the {max_tokens} tokens that a task wants generated, got "
                f"{self.max_length}; raise it"
            )
        temperature = float(arguments.get("temperature", 0.0)) if arguments.get("do_sample", True) else 0.0
        options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": float(arguments.get("top_p", 1.0))}
        ids = np.asarray(self.tok_encode(text), np.int32)[-(self.max_length - max_tokens) :]
        return ids, options, tuple(stop for stop in until if stop)

    def _sampled(self, batch: Sequence[tuple], options: dict[str, Any]) -> list[str]:
        """Samples continuations for prepared requests with equal options and stop strings."""
        prompts = [prompt for _, prompt, _, _ in batch]
        until = batch[0][3]

        def ended(ids: Sequence[int]) -> bool:
            return any(stop in self.tokens.decode(ids) for stop in until)

        limits = {"stop_ids": self.tokens.stop_ids, "vocab_size": self.tokens.vocab_size, "ended": ended}
        new = generate_batch(self.trained.model, self.trained.weights, prompts, multiple_of=64, **limits, **options)
        texts = [self.tokens.decode(ids) for ids in new]
        return [min((text.split(stop)[0] for stop in until), key=len, default=text) for text in texts]
