"""The commands of README and of all pages, run in the order in which a reader meets them, in a folder of their own.

A command runs as it is written, but that a reader's model is a tiny one, and that runs are of two steps. What cannot
run here is in `ELSEWHERE` with the reason; a command that is in neither list fails the test.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_huggingface import save_tokenizer, write
from test_pages import command_lines

ROOT = Path(__file__).parents[1]
STEPS = (
    "--config.max_steps=2 --config.eval_steps=2 --config.save_steps=2 --config.eval_batches=1 --config.sample_tokens=0"
)
# Of the reader's model and rows: 2 layers of 30 channels, 62 words.
ROWS = f"{STEPS} --config.sequence_len=32 --config.per_device_batch_size=2 --config.model_dtype=float32"
SIZES = " ".join(
    f"--config.model.{name}={size}"
    for name, size in {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    }.items()
)  # fmt: skip

# Patterns of commands in the order of the walk, and what they get in addition.
WALK = [
    (r"new my_run --model llama7b", ""),
    (r"new my_run --model MODEL", ""),
    (r"data --config tiny", ""),
    (r"train --config tiny_moe", STEPS),
    (r"train --config tiny --safe", STEPS),
    (r"train --config tiny$", STEPS),
    (r"launch -n 2 --restarts 3 -- surojax train --config tiny", STEPS + " --config.output_dir=runs/processes"),
    (r"report runs/tiny", ""),
    (r"generate --checkpoint runs/tiny", "--max-tokens 2"),
    (r"evaluate --checkpoint runs/tiny --questions", ""),
    (r"convert --checkpoint runs/tiny", ""),
    (r"data .*model_path=MODEL", "--config.sequence_len=32"),
    (r"train --config finetune .*datasets", ROWS + " --config.output_dir=runs/mixed"),
    (
        r"train --config\.model_path=MODEL --config\.data=chats\.jsonl --config\.lora",
        ROWS + " --config.output_dir=runs/a",
    ),
    (r"train --config\.model_path=MODEL --config\.data=chats\.jsonl$", ROWS),
    (r"train --config preferences ", ROWS),
    (r"train --config llama1b ", ROWS + " " + SIZES),
    (r"generate --checkpoint runs/(finetune|chat)", "--max-tokens 2"),
    (r"convert --checkpoint runs/chat --out chat\.gguf", ""),
    (r"plan ", ""),
    (r"report runs/(first|llama7b)", ""),
    (r"doctor", "--only installation"),
    (r"verify .*--list", ""),
    (r"verify .*offload_", "--steps 1 --only offload_grads"),
    (r"completion ", ""),
]
ELSEWHERE = [
    (r"distill ", "tests/test_distillation.py"),
    (r"fit ", "minutes of compiling; tests/test_fit.py searches smaller models"),
    (r"studio", "serves until it is stopped; tests/test_studio.py opens it in a browser"),
    (r"train --config (qwen3_30b_a3b|gpt_oss_20b|olmoe|llama7b_lora)", "needs that model and a GPU; plans compile it"),
    (r"(train|distill) --config smollm2_", "minutes; a model from a package"),
    (r"evaluate .*--tasks", "needs lm_eval and its data from the hub"),
    (r"convert merge ", "needs a base and an adapter of PEFT; tests/test_adapters.py"),
    (r"convert --check", "needs transformers and torch"),
    (r"convert .*--dtype (fp8|nvfp4)", "needs layers of a multiple of 128 channels; tests/test_export.py"),
    (r"train --config tiny --config\.report_to=", "needs an account; tests/test_trackers.py"),
    (r"train .*--config\.lora --config\.qlora_bnb", "needs rows of 64 numbers; tests/test_bitsandbytes.py"),
    (r"launch -n 2 --restarts 10", "the walk's other launch"),
]


def test_every_command_of_a_page_is_run_or_says_why_not():
    for page, line in command_lines():
        command = re.sub(r"^(surojax |python -m surojax\.)", "", line.partition(" #")[0].strip())
        fits = [pattern for pattern, _ in (*ELSEWHERE, *WALK) if re.match(pattern, command)]
        assert fits, (page, line)
    commands = [re.sub(r"^(surojax |python -m surojax\.)", "", line) for _, line in command_lines()]
    unused = [pattern for pattern, _ in (*ELSEWHERE, *WALK) if not any(re.match(pattern, c) for c in commands)]
    assert not unused


def prepared(folder: Path) -> None:
    """A reader's files: a model, text, conversations, pairs, questions."""
    save_tokenizer(write(folder / "MODEL", "qwen2") / "tokenizer.json")
    template = "{% for m in messages %}{{ m['content'] }} </s> {% endfor %}"
    said = {"chat_template": template, "eos_token": "</s>"}
    (folder / "MODEL/tokenizer_config.json").write_text(json.dumps(said))
    save_tokenizer(folder / "tokenizer.json")
    rng = np.random.default_rng(0)
    words = lambda number=20: " ".join(f"w{i}" for i in rng.integers(0, 60, number))
    rows = lambda row: "\n".join(json.dumps(row()) for _ in range(200))
    (folder / "text").mkdir()
    for name in "abcdef":
        (folder / f"text/{name}.txt").write_text("\n\n".join(words() for _ in range(60)))
        (folder / f"text/{name}.jsonl").write_text(rows(lambda: {"text": words()}))
    turns = lambda: [{"role": "user", "content": words(3)}, {"role": "assistant", "content": words(5)}]
    (folder / "chats.jsonl").write_text(rows(lambda: {"messages": turns()}))
    pair = lambda: {"prompt": words(3), "chosen": words(4), "rejected": words(4)}
    (folder / "pairs.jsonl").write_text(rows(pair))
    question = {"question": "1 + 1 =", "choices": [" 2", " 3"], "answer": 0}
    (folder / "questions.jsonl").write_text(json.dumps(question))


@pytest.mark.full
def test_commands_of_pages_run(tmp_path):
    """One after the other; each ends with code 0."""
    prepared(tmp_path)
    env = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    env.pop("XLA_FLAGS")  # of the tests: one device, as a reader has it
    lines = list(dict.fromkeys(line.partition(" #")[0].partition(" > ")[0].strip() for _, line in command_lines()))
    commands = [re.sub(r"^(surojax |python -m surojax\.)", "", line) for line in lines]
    left = [c for c in commands if not any(re.match(pattern, c) for pattern, _ in ELSEWHERE)]
    for pattern, more in WALK:
        for command in [c for c in left if re.match(pattern, c)]:
            left.remove(command)
            (tmp_path / "my_run.py").unlink(missing_ok=True)
            if pattern.startswith("report runs/(first"):
                for name in ("first", "second", "llama7b"):
                    (tmp_path / "runs" / name).symlink_to(tmp_path / "runs/tiny")
            if "runs/chat" in command and not (tmp_path / "runs/chat").exists():
                (tmp_path / "runs/chat").symlink_to(tmp_path / "runs/finetune")
            words = [sys.executable, "-m", "surojax", *shlex.split(f"{command} {more}")]
            ran = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, input="w1\n")
            assert ran.returncode == 0, (command, ran.stdout[-1000:], ran.stderr[-2000:])
    assert not left
