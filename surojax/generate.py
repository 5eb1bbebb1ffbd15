"""Continues texts, or answers messages, with a trained model.

surojax generate --checkpoint runs/tiny --prompt "def main("
surojax generate --checkpoint runs/chat --chat --prompt "What does os.walk do?"
surojax generate --checkpoint runs/chat --chat
surojax generate --checkpoint runs/chat --chat --rollouts new.jsonl --samples 8 --temperature 1 < questions.txt

Without --prompt it reads lines, from a terminal or a pipe, and loads the model once: with --chat a conversation, in
which /reset begins anew and /quit ends; without, a text to continue in each line. With --rollouts, each prompt or line
is continued several times, into a file of rows to train on with objective="grpo".
"""

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from surojax.data.templates import NAMES as TEMPLATES
from surojax.data.tokenizer import Tokenizer
from surojax.errors import CheckpointError, ConfigError, Refused, ending, ends_with_code, in_words_of, short_exit_codes
from surojax.inference.chat_history import ChatHistory
from surojax.inference.prompts import message_ids, text_ids
from surojax.inference.sample import check_options, generate, generate_batch, rollout
from surojax.inference.trained_model import Trained, load_trained

RESET = "/reset"
QUIT = "/quit"
SAMPLES = 8  # of a prompt
MOST_SAMPLES = 4096
LENGTHS = 64  # prompts of a conversation are padded to a multiple: a program is compiled for each length


def _exit_with(message: str) -> NoReturn:
    raise Refused(f"surojax.generate: error: {message}; see --help")


def typed_lines(hint: str) -> Iterator[str]:
    """Yields the lines of the standard input that are not blank; asks for each on a terminal. Raises ConfigError.

    hint: printed before the first one on a terminal, where Ctrl-D ends the lines and Ctrl-C discards one.
    """
    asks = sys.stdin.isatty()
    if asks:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  arrow keys and history
        print(hint, file=sys.stderr)
    has_lines = False
    while True:
        try:
            line = input("> " if asks else "")
        except EOFError:
            break
        except KeyboardInterrupt:
            if not asks:
                raise
            print()
            continue
        if line.strip():
            has_lines = True
            yield line
    if not (asks or has_lines):
        raise ConfigError("--prompt: expected one, or lines on the standard input, got neither; give it")


def print_stream(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Prints tokens as they arrive, up to Ctrl-C on a terminal, and returns their text."""
    new: list[int] = []
    shown = ""
    try:
        for token in tokens:
            new.append(token)
            text = tokenizer.decode(new)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may take several tokens
                print(text[len(shown) :], end="", flush=True)
                shown = text
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    text = tokenizer.decode(new)
    print(text[len(shown) :])
    return text


def continue_lines(trained: Trained, *, seed: int, **options) -> None:
    """Prints each line with its continuation.

    options: of `sample.generate`, with the seed increased by 1 for each line.
    """
    for number, line in enumerate(typed_lines("Ctrl-C ends a text, Ctrl-D the program")):
        if number and not sys.stdin.isatty():
            print("---")
        print(line, end="")
        ids = text_ids(trained.tokenizer, line)
        print_stream(trained.tokenizer, generate(trained.model, trained.weights, ids, seed=seed + number, **options))


def converse(trained: Trained, *, system: str, seed: int, **options) -> None:
    """Answers each line as the next message of a conversation. options: see `continue_lines`."""
    conversation = ChatHistory(trained, system, options["max_tokens"])
    number = 0
    for line in typed_lines(f"{RESET} begins anew, {QUIT} or Ctrl-D ends, Ctrl-C stops an answer"):
        if line.strip() == QUIT:
            break
        if line.strip() == RESET:
            conversation.reset()
            continue
        left_out = conversation.left_out
        try:
            ids = conversation.ask(line)
        except ConfigError as error:
            if trained.template is None or not sys.stdin.isatty():
                raise
            print(f"note: {error}", file=sys.stderr)
            continue
        if conversation.left_out > left_out:
            print(
                f"note: the model's length is {conversation.length:,} tokens: the first {conversation.left_out} "
                f"messages are left out",
                file=sys.stderr,
            )
        if number and not sys.stdin.isatty():
            print("---")
        tokens = generate(trained.model, trained.weights, ids, seed=seed + number, **options)
        room = None if conversation.length is None else conversation.length - ids.size
        conversation.answer(print_stream(trained.tokenizer, itertools.islice(tokens, room)))
        number += 1


def write_rollouts(
    trained: Trained, prompts: Iterable[str], file: Path, *, chat: bool, system: str, samples: int, seed: int, **options
) -> None:
    """Writes a new file with one row for each prompt, as soon as sampled: `samples` completions, and all texts.

    options: of `sample.rollout`, whose seed is one more for each prompt. Raises ConfigError if the file exists.
    """
    tokenizer = trained.tokenizer
    try:
        opened = file.open("x", encoding="utf-8")
    except OSError as error:
        reason = "one that exists" if isinstance(error, FileExistsError) else repr(error.strerror)
        raise ConfigError(f"--rollouts: expected a new file, got {reason}, {file}; choose another name") from None
    with opened:
        for number, prompt in enumerate(prompts):
            ids = message_ids(trained, prompt, system) if chat else text_ids(tokenizer, prompt)
            row = rollout(trained.model, trained.weights, ids, samples, seed=seed + number, **options)
            texts = [
                tokenizer.decode([id for id in completion if id not in tokenizer.stop_ids])
                for completion in row["completion_ids"]
            ]
            opened.write(json.dumps({"prompt": prompt, "completions": texts} | row, ensure_ascii=False) + "\n")
            opened.flush()


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's options."""
    arguments = argparse.ArgumentParser(
        prog="surojax generate", description="Continue texts, or answer messages, with a trained model."
    )
    arguments.add_argument(
        "--checkpoint",
        required=True,
        help="a checkpoint, the output_dir of a run for its newest one, a Hugging Face folder or name, or a GGUF file",
    )
    arguments.add_argument(
        "--prompt",
        action="append",
        help="text to continue, or message to answer; may be given several times; empty = start a new document; left "
        "out = lines of the standard input, with --chat a conversation (/reset, /quit)",
    )
    chat = arguments.add_argument_group("conversations")
    chat.add_argument("--chat", action="store_true", help="answer: put the prompt into the model's chat template")
    chat.add_argument("--system", default="", help="--chat: the system message before the prompt")
    chat.add_argument(
        "--chat-template", default="", help=f"--chat: {', '.join(TEMPLATES)} or a file; default: the model's own"
    )
    sampling = arguments.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=200, help="largest number of new tokens (default 200)")
    sampling.add_argument("--temperature", type=float, default=0.8, help="0 = greedy (default 0.8)")
    sampling.add_argument(
        "--top-p", type=float, default=1.0, help="sample only from the most likely tokens of this total probability"
    )
    sampling.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    into_file = arguments.add_argument_group("rollouts")
    into_file.add_argument(
        "--rollouts",
        default="",
        metavar="FILE",
        help="continue each prompt several times, with log-probabilities, into a new .jsonl file of rows to train on "
        "with objective=grpo, once rewards are added",
    )
    into_file.add_argument(
        "--routed-experts", action="store_true", help="--rollouts: with the experts of each token, for router_replay"
    )
    into_file.add_argument("--samples", type=int, help=f"--rollouts: completions of a prompt (default {SAMPLES})")
    arguments.add_argument(
        "--tokenizer", default="", help="tokenizer.json, if it is no longer where the run's config says"
    )
    arguments.epilog = short_exit_codes()
    arguments.error = _exit_with
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, and prints each prompt with its continuation, or each answer."""
    args = parser().parse_args(argv)
    try:
        check_options(args.max_tokens, args.temperature, args.top_p, args.seed)
        if (args.system or args.chat_template) and not args.chat:
            raise ConfigError("--system, --chat-template: expected --chat with them, got none; add it")
        if args.samples is not None and not args.rollouts:
            raise ConfigError(f"--samples: expected --rollouts with it, got none beside {args.samples}; add it")
        if args.routed_experts and not args.rollouts:
            raise ConfigError("--routed-experts: expected --rollouts with it, got none; add it")
        samples = SAMPLES if args.samples is None else args.samples
        if not 1 <= samples <= MOST_SAMPLES or (args.rollouts and not args.max_tokens):
            got = f"{samples} of {args.max_tokens} tokens"
            raise ConfigError(f"--samples: expected 1 to {MOST_SAMPLES:,} of 1 token or more, got {got}; correct it")
        with in_words_of("--checkpoint"):
            trained = load_trained(args.checkpoint, args.tokenizer, args.chat_template)
        model, weights, tokenizer = trained[:3]
        if args.routed_experts and not any(segment.choices for segment in model.segments):
            raise ConfigError("--routed-experts: expected a model with experts, got one without any; leave it out")
        options = {
            "max_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p, "seed": args.seed,
            "stop_ids": tokenizer.stop_ids, "vocab_size": tokenizer.vocab_size,
        }  # fmt: skip
        if args.rollouts:
            kind = {
                "chat": args.chat, "system": args.system, "samples": samples, "multiple_of": LENGTHS,
                "routed_experts": args.routed_experts,
            }  # fmt: skip
            prompts = typed_lines("Ctrl-D ends the program") if args.prompt is None else args.prompt
            write_rollouts(trained, prompts, Path(args.rollouts), **kind, **options)
            return
        if args.prompt is None:
            if args.chat:
                converse(trained, system=args.system, multiple_of=LENGTHS, **options)
            else:
                continue_lines(trained, multiple_of=LENGTHS, **options)
            return
        prompts = args.prompt
        if args.chat:
            ids = [message_ids(trained, prompt, args.system) for prompt in prompts]
        else:
            ids = [text_ids(tokenizer, prompt) for prompt in prompts]
        continuations = generate_batch(model, weights, ids, **options)
        for number, (prompt, new) in enumerate(zip(prompts, continuations, strict=True)):
            if number:
                print("---")
            print(tokenizer.decode(new) if args.chat else prompt + tokenizer.decode(new))
    except (ValueError, CheckpointError) as error:
        raise ending("generate", error) from error
    except KeyboardInterrupt:
        sys.exit(130)  # what shells expect after Ctrl-C


if __name__ == "__main__":
    ends_with_code(main)
