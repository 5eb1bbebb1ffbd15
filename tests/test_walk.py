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

# Patterns of commands in the order of the walk, and what they get in addition; after "!", what a reader does between.
WALK = [
    (r"new my_run --model llama7b", ""),
    (r"!", "rm my_run.py"),
    (r"new my_run --model MODEL", "--gpus 1"),
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
    (r"distill --config.model_path=MODEL .*distill_path=labels$", ROWS),
    (r"train --config finetune .*datasets", ROWS + " --config.output_dir=runs/mixed"),
    (r"train --model_path MODEL --data chats\.jsonl --lora", ROWS + " --num_epochs 1 --config.output_dir=runs/a"),
    (r"train --(config\.)?model_path[= ]MODEL --(config\.)?data[= ]chats\.jsonl$", ROWS),
    (r"train --config preferences --config.objective=grpo", ROWS + " --config.output_dir=runs/rollouts"),
    (r"train --config preferences ", ROWS),
    (r"!", "rm -r FOLDER"),
    (r"convert --checkpoint runs/rewards", ""),
    (r"train --config llama1b ", ROWS + " " + SIZES),
    (r"!", "ln -s finetune runs/chat"),
    (r"generate --checkpoint runs/(finetune|chat)", "--max-tokens 2"),
    (r"plan --config llama7b .*--json plan\.json", ""),
    (r"!", "ln -s tiny runs/first; ln -s tiny runs/second; ln -s tiny runs/llama7b"),
    (r"report runs/(first|llama7b)", ""),
    (r"doctor( --output doctor.md)?$", "--only installation"),
    (r"verify .*--list", ""),
    (r"completion ", ""),
]  # fmt: skip
ELSEWHERE = [
    (r"fit ", "minutes of compiling; tests/test_fit.py searches smaller models"),
    (r"plan (?!.*plan\.json)", "minutes of compiling; one of the plans is made"),
    (r"studio", "serves until it is stopped; tests/test_studio.py opens it in a browser"),
    (r"train --config (qwen3_30b_a3b|gpt_oss_20b|olmoe|llama7b_lora)", "needs that model and a GPU; plans compile it"),
    (r"(train|distill) --config smollm2_", "minutes; a model from a package"),
    (r"distill .*offload_weights", "the walk's other labels; tests/test_distillation.py streams the teacher"),
    (r"doctor --nvme-path", "needs that folder; tests/test_doctor.py measures one"),
    (r"verify .*offload_", "minutes; tests/test_verify.py takes rows of it"),
    (r"(convert --checkpoint|report) runs/smollm2_", "needs that run; the walk converts and reports others"),
    (r"evaluate .*--tasks", "needs lm_eval and its data from the hub"),
    (r"convert merge ", "needs a base and an adapter of PEFT; tests/test_adapters.py"),
    (r"convert --checkpoint runs/\w+ --out chats?\.gguf", "needs byte-level BPE; tests/test_gguf_export.py"),
    (r"convert --check ", "needs transformers and torch"),
    (r"convert .*--dtype (fp8|nvfp4)", "needs layers of a multiple of 128 channels; tests/test_export.py"),
    (r"train --config tiny --config\.report_to=", "needs an account; tests/test_trackers.py"),
    (r"train .*(--qlora|--config\.lora --config\.qlora_bnb)", "needs rows of 64 numbers; tests/test_bitsandbytes.py"),
    (r"launch -n 2 --restarts 10", "the walk's other launch"),
]


def test_every_command_of_a_page_is_run_or_says_why_not():
    for page, line in command_lines():
        command = re.sub(r"^(surojax |python -m surojax\.)", "", line.partition(" #")[0].strip())
        fits = [pattern for pattern, _ in (*ELSEWHERE, *WALK) if re.match(pattern, command)]
        assert fits, (page, line)
    commands = [re.sub(r"^(surojax |python -m surojax\.)", "", line) for _, line in command_lines()]
    patterns = [pattern for pattern, _ in (*ELSEWHERE, *WALK) if pattern != "!"]
    assert not [pattern for pattern in patterns if not any(re.match(pattern, c) for c in commands)]


def prepared(folder: Path) -> None:
    """A reader's files: a model, text, conversations, pairs, rollouts, questions."""
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
    ids = lambda: rng.integers(0, 60, 5).tolist()
    rewarded = {"logprobs": [[-1.0] * 5] * 4, "rewards": [1.0, 0.0, 0.0, 1.0]}
    rollout = lambda: {"prompt_ids": ids(), "completion_ids": [ids() for _ in range(4)]} | rewarded
    (folder / "rollouts.jsonl").write_text(rows(rollout))
    question = {"question": "1 + 1 =", "choices": [" 2", " 3"], "answer": 0}
    (folder / "questions.jsonl").write_text(json.dumps(question))


# Runs commands in one process, as `surojax VERB ...` does, so that Python and JAX are imported once.
RUN = """
import contextlib, io, json, subprocess, sys
from surojax.__main__ import main

for words in json.load(sys.stdin):
    if words[0] == "!":
        subprocess.run(words[1], shell=True, check=True)
        continue
    sys.argv, sys.stdin, said, code = ["surojax", *words], io.StringIO("w1\\n"), io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    if code:
        sys.exit(f"{words} ended with {code}: {said.getvalue()[-3000:]}")
"""


@pytest.mark.full
def test_commands_of_pages_run(tmp_path):
    """One after the other; each ends with code 0."""
    prepared(tmp_path)
    lines = [line.partition(" #")[0].partition(" > ")[0] for _, line in command_lines()]
    commands = [re.sub(r"^(surojax |python -m surojax\.)", "", " ".join(line.split())) for line in lines]
    commands = list(dict.fromkeys(commands))
    left = [c for c in commands if not any(re.match(pattern, c) for pattern, _ in ELSEWHERE)]
    walk = []
    for pattern, more in WALK:
        if pattern == "!":
            walk.append(["!", more])
        walk += [shlex.split(f"{c} {more}") for c in left if re.match(pattern, c)]
        left = [c for c in left if not re.match(pattern, c)]
    assert not left
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]  # one, as a reader has it
    env = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "XLA_FLAGS": " ".join(flags)}
    ran = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env=env, capture_output=True, text=True, input=json.dumps(walk)
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
