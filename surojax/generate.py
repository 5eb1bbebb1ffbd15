"""Continues texts, or answers messages, with a trained model.

python -m surojax.generate --checkpoint runs/tiny --prompt "def main("
python -m surojax.generate --checkpoint runs/chat --chat --prompt "What does os.walk do?"
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np

from surojax import assembly
from surojax.config.checks import restored_config
from surojax.data.tokenizer import Tokenizer, load_tokenizer
from surojax.errors import CheckpointError, ConfigError
from surojax.inference.sample import check_options, generate_batch
from surojax.models.model import Model
from surojax.placement.mesh import find_devices
from surojax.run import checkpoint


def load(path: str | Path, tokenizer: str = "") -> tuple[Model, dict, Tokenizer]:
    """Returns (model, work weights on the first device, tokenizer) of a checkpoint.

    path: a checkpoint, or the output_dir of a run, which means its newest checkpoint.
    tokenizer: as in the config; "": the one in the checkpoint's config.

    Raises CheckpointError if the checkpoint is missing or unreadable, ConfigError if the tokenizer is not the one that
    the model was trained with.
    """
    if (found := checkpoint.find(path)) is None:
        raise CheckpointError(
            f"--checkpoint: expected a checkpoint or a run's output_dir, got {str(path)!r}, which holds none"
        )
    meta = checkpoint.read_meta(found)
    c = restored_config(meta["config"], checkpoint.written_by(meta))
    loaded_tokenizer = load_tokenizer(tokenizer or c.tokenizer)
    if loaded_tokenizer.name != meta["tokenizer"]:
        raise ConfigError(
            f"tokenizer: expected {meta['tokenizer']}, which the checkpoint was trained with, "
            f"got {loaded_tokenizer.name}"
        )
    sharding = jax.sharding.SingleDeviceSharding(find_devices(1)[0])
    model = assembly.model(c)
    shapes = model.abstract_params(c.model_dtype)
    plan = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding), shapes)
    return model, checkpoint.restore_weights(found, plan), loaded_tokenizer


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, chat: bool = False, system: str = "") -> np.ndarray:
    """The ids that a prompt is continued from: of the text, or of a conversation up to where the answer begins.

    An empty text starts a document. Raises ConfigError if the tokenizer has no chat template.
    """
    if chat:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        return tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True))
    ids = tokenizer.encode(prompt)
    if tokenizer.bos_id is not None and ids[:1].tolist() != [tokenizer.bos_id]:
        return np.concatenate([[tokenizer.bos_id], ids])
    return ids if ids.size else np.array([tokenizer.eos_id])


def _exit_with(message: str) -> NoReturn:
    sys.exit(f"surojax.generate: error: {message}; see -h")


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and print each prompt with its continuation, or each answer."""
    parser = argparse.ArgumentParser(
        prog="python -m surojax.generate", description="Continue texts, or answer messages, with a trained model."
    )
    parser.add_argument(
        "--checkpoint", required=True, help="a checkpoint folder, or the output_dir of a run for its newest one"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        help="text to continue, or message to answer; may be given several times; empty = start a new document",
    )
    parser.add_argument("--chat", action="store_true", help="answer: put the prompt into the model's chat template")
    parser.add_argument("--system", default="", help="--chat: the system message before the prompt")
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
        if args.system and not args.chat:
            raise ConfigError("--system: expected --chat with it; add --chat, or put the text into the prompt")
        model, weights, tokenizer = load(args.checkpoint, args.tokenizer)
        prompts = args.prompt or [""]
        ids = [prompt_ids(tokenizer, prompt, chat=args.chat, system=args.system) for prompt in prompts]
        found = generate_batch(
            model, weights, ids, max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p,
            seed=args.seed, stop_ids=tokenizer.stop_ids, vocab_size=tokenizer.vocab_size,
        )  # fmt: skip
        for number, (prompt, new) in enumerate(zip(prompts, found, strict=True)):
            if number:
                print("---")
            print(tokenizer.decode(new) if args.chat else prompt + tokenizer.decode(new))
    except (ValueError, CheckpointError) as error:
        sys.exit(f"surojax.generate: error: {error}")


if __name__ == "__main__":
    main()
