"""Measures a trained model: multiple-choice questions of a file, or tasks of the LM Evaluation Harness.

    surojax evaluate --checkpoint runs/chat --questions questions.jsonl
    surojax evaluate --checkpoint runs/chat --tasks arc_easy,hellaswag --limit 200

A question is a line {"question": TEXT, "choices": [TEXT, ...], "answer": INDEX OF THE RIGHT ONE}. The model's choice is
the most likely continuation of the question, after a space; `normalised` divides log probabilities by the bytes of the
choices.
"""

import argparse
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from surojax.data.templates import NAMES as TEMPLATES
from surojax.errors import (
    CheckpointError,
    ConfigError,
    ending,
    ends_with_code,
    in_words_of,
    need,
    refusing,
    short_exit_codes,
)
from surojax.inference.sample import MOST_TOKENS
from surojax.inference.score import Request, request_of, score
from surojax.inference.trained_model import Trained, load_trained
from surojax.untrusted import expanded, parse_json, read_bytes

LARGEST = 1 << 30  # bytes of a file of questions
MAX_LENGTH = 2048  # tokens of a text of --tasks


class Question(NamedTuple):
    """A multiple-choice question; answer: index of the right choice."""

    question: str
    choices: tuple[str, ...]
    answer: int


class Accuracy(NamedTuple):
    """Shares of questions answered right: by log probability, and by log probability per byte of the choice."""

    plain: float
    normalised: float
    questions: int  # answered


def read_questions(path: str | Path) -> list[Question]:
    """Reads the questions of a .jsonl file.

    Raises ConfigError, which names file and line, if one is not as it should be.
    """
    try:
        lines = read_bytes(expanded(path), LARGEST).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--questions: cannot read {path} ({error}); give a .jsonl file") from None
    questions = [question_of(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ConfigError(f"--questions: expected at least one question in {path}, got none; add a line")
    return questions


def question_of(line: str, where: str) -> Question:
    """Parses a question from JSON. where: of the file, for the ConfigError if it is not as it should be."""
    expected = f'{where}: expected {{"question": text, "choices": [text, text, ...], "answer": index}}'
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{expected}, got a line that is no JSON ({error}); correct it") from None
    if not isinstance(row, dict) or not {"question", "choices", "answer"} <= row.keys():
        raise ConfigError(f"{expected}, got {line[:80]!r}; correct it")
    choices = row["choices"]
    texts = isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)
    if not (isinstance(row["question"], str) and texts and len(choices) > 1):
        raise ConfigError(f"{expected}, with two choices or more, got {line[:80]!r}; correct it")
    if any(0xD800 <= ord(char) < 0xE000 for text in (row["question"], *choices) for char in text):
        raise ConfigError(f"{expected} in UTF-8, got one half of a surrogate pair in {line[:80]!r}; correct it")
    answer = row["answer"]
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ConfigError(f"{expected}, with an index below {len(choices)}, got {answer!r}; correct it")
    return Question(row["question"], tuple(choices), answer)


def answer(trained: Trained, questions: Sequence[Question], *, batch_size: int = 8) -> Accuracy:
    """Computes the shares of questions that a model answers right."""
    requests: list[Request] = []
    for question in questions:
        requests += [request_of(trained.tokenizer, question.question, f" {choice}") for choice in question.choices]
    scores = iter(score(trained.model, trained.weights, requests, batch_size=batch_size))
    right = np.zeros(2)
    for question in questions:
        logprobs = np.array([next(scores).logprob for _ in question.choices])
        lengths = np.array([len(choice.encode()) for choice in question.choices])
        right += [np.argmax(logprobs) == question.answer, np.argmax(logprobs / lengths) == question.answer]
    plain, normalised = (right / len(questions)).tolist()
    return Accuracy(plain, normalised, len(questions))


def run_harness(
    trained: Trained,
    tasks: str,
    *,
    batch_size: int,
    max_length: int,
    include_path: str | None = None,
    **options,
) -> dict[str, Any]:
    """Runs the LM Evaluation Harness; returns its results by task. options: of its `simple_evaluate`.

    tasks: names separated by commas. include_path: a folder with more task files.

    Raises ConfigError if lm_eval is not installed, or knows no such task.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("--tasks: expected the package lm_eval, which is not installed; pip install lm_eval")
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    from surojax.inference.harness import Harness

    simple_evaluate: Any = lm_eval.simple_evaluate
    adapted = Harness(trained, batch_size=batch_size, max_length=max_length)
    try:
        manager = TaskManager(include_path=include_path)
        evaluated = simple_evaluate(model=adapted, tasks=tasks.split(","), task_manager=manager, **options)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"--tasks: lm_eval could not run {tasks} ({error}); its command `lm_eval ls tasks` lists what it knows"
        ) from error
    return evaluated["results"]


def _by_tasks(args: argparse.Namespace, trained: Trained) -> dict[str, Any]:
    """Runs the harness' tasks of a command line and prints the results."""
    options = {"limit": args.limit, "num_fewshot": args.num_fewshot, "apply_chat_template": args.chat}
    max_length = args.max_length or MAX_LENGTH
    limits = {"batch_size": args.batch_size, "max_length": max_length, "include_path": args.include_path}
    by_task = run_harness(trained, args.tasks, **limits, **options)
    for task, results in by_task.items():
        values = {name.removesuffix(",none"): value for name, value in results.items() if isinstance(value, float)}
        print(f"{task}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
    return by_task


def _check_options(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that do not apply to the measurement, and for an unwritable results file."""
    for name in ("max_length", "num_fewshot", "chat", "chat_template", "include_path") if args.questions else ():
        value = getattr(args, name)
        if value not in (None, "") and value is not False:  # --num-fewshot 0 is given
            option = name.replace("_", "-")
            raise ConfigError(f"--questions: expected no --{option}, which is for --tasks, got one; leave it out")
    if args.chat_template and not args.chat:
        raise ConfigError("--chat-template: expected --chat with it, got none; add it")
    file = Path(args.json) if args.json else None
    if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise ConfigError(f"--json: expected a file that can be written, got {args.json!r}; choose another")


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's options."""
    arguments = argparse.ArgumentParser(
        prog="surojax evaluate", description="Measure a model by multiple choice or by tasks of lm_eval."
    )
    arguments.add_argument(
        "--checkpoint", required=True, help="a checkpoint, a run's output_dir, a Hugging Face folder or a GGUF file"
    )
    what = arguments.add_mutually_exclusive_group(required=True)
    what.add_argument("--questions", help='.jsonl with "question", "choices" and "answer" (index of the right choice)')
    what.add_argument("--tasks", help="tasks of the LM Evaluation Harness, separated by commas (pip install lm_eval)")
    arguments.add_argument("--limit", type=int, help="first questions only, of the file or of each task")
    arguments.add_argument("--batch-size", type=int, default=8, help="texts computed together (default 8)")
    harness = arguments.add_argument_group("with --tasks")
    harness.add_argument("--include-path", help="--tasks: a folder with task files of your own")
    harness.add_argument("--num-fewshot", type=int, help="--tasks: examples before each question; default: its own")
    harness.add_argument("--chat", action="store_true", help="--tasks: put questions into the model's chat template")
    harness.add_argument(
        "--chat-template", default="", help=f"--chat: {', '.join(TEMPLATES)} or a file; default: the model's own"
    )
    harness.add_argument("--max-length", type=int, help=f"--tasks: longest text, in tokens (default {MAX_LENGTH})")
    arguments.add_argument(
        "--tokenizer", default="", help="tokenizer.json, if it is no longer where the run's config says"
    )
    arguments.add_argument("--json", help="file for the results")

    arguments.epilog = short_exit_codes()
    return refusing(arguments)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and prints the results. An error ends it with one line (`errors.ending`)."""
    try:
        args = parser().parse_args(argv)
        for option, value, least, most in (
            ("--batch-size", args.batch_size, 1, 2**16),
            ("--max-length", args.max_length, 2, MOST_TOKENS),
            ("--limit", args.limit, 1, 2**48),
        ):
            if value is not None:
                need(least <= value <= most, option, f"{least} to {most:,}", value, "correct it")
        _check_options(args)
        questions = read_questions(args.questions)[: args.limit] if args.questions else []
        with in_words_of("--checkpoint"):
            trained = load_trained(args.checkpoint, args.tokenizer, args.chat_template)
        if args.questions:
            results = answer(trained, questions, batch_size=args.batch_size)._asdict()
            print(
                f"{args.questions}: {len(questions)} questions, right by log probability {results['plain']:.4f}, "
                f"per byte {results['normalised']:.4f}"
            )
        else:
            results = _by_tasks(args, trained)
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1, default=str) + "\n")
    except (ValueError, CheckpointError, OSError) as error:
        raise ending("evaluate", error) from error


if __name__ == "__main__":
    ends_with_code(main)
