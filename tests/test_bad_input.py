"""Bad input ends in seconds: one line that says what was expected, what was given and what to change; nothing written.

Most cases run the command in this process, with compilation forbidden; a few run it as a user does.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import psutil
import pytest
from test_config import MODELS

from surojax.errors import REFUSED, ConfigError
from surojax.placement import mesh
from surojax.placement.mesh import HOST_LIMIT, find_devices, make_mesh, mesh_shape
from surojax.planner.amounts import GiB
from surojax.train import main

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny.py")


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """A function (arguments) -> the one line that the command ends with; the working directory is a new folder."""
    monkeypatch.chdir(tmp_path)

    def compile(*_, **__):
        raise AssertionError("bad input was compiled")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 400)
    (tmp_path / "other.txt").write_text("Pack my box with five dozen liquor jugs.\n" * 400)

    def run(*arguments: str, config: str = TINY) -> str:
        before = sorted(tmp_path.rglob("*"))
        small = [] if any(a.startswith("--config.data") for a in arguments) else ["--config.data=text.txt,other.txt"]
        with pytest.raises(SystemExit) as exited:
            main(["--config", config, *small, "--config.output_dir=out", *arguments])
        line, (_, err) = exited.value.code, capfd.readouterr()
        assert isinstance(line, str) and line.startswith("surojax.train: error: "), line  # Python prints it and exits 1
        assert "\n" not in line and "Traceback" not in line and err == "", (line, err)
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        return line.removeprefix("surojax.train: error: ")

    return run


def field_cases() -> list[tuple[str, str]]:
    """(flags, what the line has to say), for what can be judged from the config alone."""
    text = """
    max_step=3                  | no field 'max_step': did you mean 'max_steps'?
    hidden_size=64              | no field 'hidden_size': did you mean 'model.hidden_size'?
    model.hidden_siz=64         | no field 'model.hidden_siz': did you mean 'model.hidden_size'?
    lr=1e-3                     | no field 'lr': --help fields lists
    model=3                     | --config.model holds several fields: set one of model.model_type
    max_steps=ten               | --config.max_steps: expected a whole number, got 'ten'
    max_steps=10.5              | --config.max_steps: expected a whole number, got '10.5'
    max_steps=                  | --config.max_steps: expected a whole number, got ''
    max_steps                   | --config.max_steps: expected a whole number, got no value
    max_steps=1e999             | --config.max_steps: expected a whole number, got '1e999'
    output_dir                  | --config.output_dir: expected text, got no value
    learning_rate=fast          | --config.learning_rate: expected a number, got 'fast'
    recompute_block=maybe       | --config.recompute_block: expected true or false, got 'maybe'
    shard_weights=2             | --config.shard_weights: expected true or false or unset, got '2'
    recompute_block=unset       | --config.recompute_block: expected true or false, got 'unset'
    learning_rate=nan           | learning_rate: expected a finite number in float32, got nan
    learning_rate=inf           | learning_rate: expected a finite number in float32, got inf
    learning_rate=0             | learning_rate: expected more than 0 in float32, got 0.0
    learning_rate=-1e-4         | learning_rate: expected more than 0 in float32, got -0.0001
    weight_decay=-0.1           | weight_decay: expected 0 or more, got -0.1; --help says what 0 means
    max_grad_norm=-1            | max_grad_norm: expected 0 or more
    sample_temperature=-1       | sample_temperature: expected 0 or more
    sample_tokens=-1            | sample_tokens: expected 0 or more
    seed=-1                     | seed: expected 0 or more
    seed=4294967296             | seed: expected less than 2^31
    seed=2147483648             | seed: expected less than 2^31
    max_steps=-5                | max_steps: expected 0 or more, got -5
    eval_steps=-1               | eval_steps: expected 0 or more
    eval_batches=0              | eval_batches: expected 1 or more
    save_total_limit=0          | save_total_limit: expected 1 or more, got 0; raise it
    per_device_batch_size=0     | per_device_batch_size: expected 1 or more
    gradient_accumulation_steps=0 | gradient_accumulation_steps: expected 1 or more
    sequence_chunks=0           | sequence_chunks: expected 1 or more, got 0; raise it
    sequence_chunks=6           | sequence_chunks: expected a divisor of sequence_len = 128, got 6; use 8
    sequence_len=30 sequence_chunks=2 | attention: expected sequence_len / sequence_chunks = 15 to be even, or 'xla' or
    sequence_chunks=4 recompute_block=false | recompute_block: expected True with sequence_chunks=4, which saves memory
    sequence_chunks=4 recipe=fp8_current | recipe: expected 'bf16' with sequence_chunks=4, whose scales are of tokens
    gpus=4 cp_size=4 sequence_len=1022 sequence_chunks=2 | sequence_len: expected a multiple of
    gpus=2 cp_size=2 sequence_chunks=128 | sequence_chunks: expected a divisor of sequence_len / cp_size = 64, got 128
    gpus=2 cp_size=2 cp_method=ring sequence_chunks=4 | cp_method: expected 'ulysses' with sequence_chunks=4, since each
    microbatches_per_fetch=0    | microbatches_per_fetch: expected 1 or more, got 0; raise it
    sequence_len=0              | sequence_len: expected 1 or more
    sequence_len=-128           | sequence_len: expected 1 or more
    sequence_len=2147483647     | per_device_batch_size x sequence_len: expected less than 2^31 tokens
    max_steps=0 num_epochs=0    | num_epochs: expected 1 or more
    num_epochs=3                | num_epochs: expected 1 with max_steps=600, which decides, got 3
    warmup_ratio=3              | warmup_ratio: expected a fraction from 0 to 1, got 3.0; divide a percentage by 100
    warmup_steps=30             | warmup_ratio: expected 0.0 with warmup_steps=30, got 0.05; set one of them to 0
    warmup_ratio=0 warmup_steps=601 | warmup_steps + cooldown_steps: expected at most max_steps=600, got 601
    warmup_ratio=0 warmup_steps=30 max_steps=20 | warmup_steps + cooldown_steps: expected at most max_steps=20, got 30
    adamw_beta2=1               | adamw_beta2: expected 0 or more and below 1 in float32, got 1.0
    adamw_epsilon=0             | adamw_epsilon: expected more than 0
    adamw_beta2=0.99999999      | adamw_beta2: expected 0 or more and below 1 in float32, got 0.99999999
    adamw_epsilon=1e-39         | adamw_epsilon: expected more than 0 in float32, got 1e-39
    learning_rate=1e39          | learning_rate: expected a finite number in float32, got 1e+39
    final_lr_fraction=10        | final_lr_fraction: expected a fraction from 0 to 1
    cooldown_steps=10           | cooldown_steps: expected 0 with lr_scheduler_type='cosine', which does not use it
    lr_scheduler_type=wsd       | cooldown_steps: expected 1 or more with lr_scheduler_type='wsd'
    lr_scheduler_type=wsd cooldown_steps=590 | cooldown_steps: expected at most max_steps=600, got 620; shorten
    lr_scheduler_type=cosin     | lr_scheduler_type: expected one of cosine, linear, wsd, got 'cosin'; did you
    optimizer=sgd               | optimizer: expected one of adamw, adamw8bit, normuon, lion, got 'sgd'
    model_dtype=float16         | model_dtype: expected one of bfloat16, float32, got 'float16'
    opt_m_dtype=fp8             | opt_m_dtype: expected one of bfloat16, float32, got 'fp8'
    optimizer=adam8bit          | one of adamw, adamw8bit, normuon, lion, got 'adam8bit'; did you mean 'adamw8bit'?
    muon_momentum=0.9           | muon_momentum: expected 0.95 with optimizer='adamw', which does not use it, got 0.9
    optimizer=normuon muon_ns_steps=0 | muon_ns_steps: expected 1 to 10, got 0; 5 is usual
    optimizer=normuon muon_beta2=1.0 | muon_beta2: expected 0 or more and below 1 in float32, got 1.0
    recipe=fp8                  | recipe: expected one of bf16, fp8_hybrid, fp8_current, mxfp8, nvfp4, got 'fp8'
    fp8_margin=1                | fp8_margin: expected 0 with recipe='bf16', which does not use it, got 1
    recipe=fp8_current fp8_amax_history=4 | fp8_amax_history: expected 16 with recipe='fp8_current', which does not use
    recipe=fp8_hybrid fp8_margin=9 | fp8_margin: expected 0 to 8 binades, got 9; each one more
    recipe=fp8_hybrid fp8_margin=2000 | fp8_margin: expected 0 to 8 binades, got 2000
    recipe=fp8_hybrid fp8_margin=-1 | fp8_margin: expected 0 to 8 binades, got -1
    recipe=fp8_hybrid fp8_amax_history=0 | fp8_amax_history: expected 1 or more
    recipe=mxfp8 gradient_dtype=float32 | gradient_dtype: expected '' with recipe='mxfp8', which does not use it
    matmul_dtype=float8         | matmul_dtype: expected one of '', bfloat16, float32, got 'float8'
    skip_quant_first_layers=1   | skip_quant_first_layers: expected 0 with recipe='bf16', which does not use it
    recipe=nvfp4 skip_quant_last_layers=4 | expected fewer than the 4 layers, both together, got 4; lower them
    recipe=fp8_current model.intermediate_size=344 | model.intermediate_size: expected a multiple of 16 with recipe
    recipe=mxfp8 model.intermediate_size=336 | a multiple of 32 with recipe='mxfp8', which its products need, got 336
    recipe=fp8_hybrid sequence_len=250 per_device_batch_size=1 | expected a multiple of 16 tokens with recipe
    recipe=fp8_hybrid zero_level=3 zero_quantized_weights=int8 | zero_quantized_weights: expected 'none' with recipe
    recipe=fp8_hybrid skip_quant_first_layers=1 recompute_block=false | recompute_block: expected True with skip_quant_*
    recipe=mxfp8 block_scaled_products=native | block_scaled_products: expected 'auto' or 'emulated' on cpu, got 'nat
    block_scaled_products=native | expected 'auto' with recipe='bf16', which does not use it, got 'native'
    kernels=mosaic              | kernels: expected 'xla' or 'auto' on cpu, got 'mosaic'; they are for NVIDIA GPUs
    kernels=triton              | kernels: expected one of auto, xla, mosaic, got 'triton'
    z_loss=-1                   | z_loss: expected 0 or more
    attention=flash             | attention: expected one of auto, xla, cudnn, mosaic, got 'flash'
    sample_packing=true attention=cudnn | attention: expected 'auto', 'mosaic' or 'xla' with sample_packing=True
    attention=mosaic model_dtype=float32 | model_dtype: expected 'bfloat16' with attention='mosaic', which computes
    attention=cudnn             | model_dtype: expected 'bfloat16' with attention='cudnn', which computes in 16 bits
    attention=cudnn model_dtype=bfloat16 | attention: expected 'auto' or 'xla' on cpu, got 'cudnn'
    qlora_fp4=true              | qlora_fp4: expected False with lora=False, which does not use it, got True
    lora=true qlora_bnb=true qlora_fp8=true | qlora_fp8: expected False with qlora_bnb=True, since a matrix
    zero_level=0                | zero_level: expected one of 1, 2, 3, got 0
    zero_level=4                | zero_level: expected one of 1, 2, 3, got 4
    lmhead_chunks=7             | a divisor of per_device_batch_size x sequence_len = 2048, got 7; use 8
    lmhead_chunks=4096          | a divisor of per_device_batch_size x sequence_len = 2048, got 4096; use 2048
    recompute_swiglu            | recompute_swiglu: expected False with recompute_block=True, which computes all
    gpus=9                      | gpus: expected at most 8 (cpu), got 9; lower it or use 0 for all
    gpus=-1                     | gpus: expected 0 or more
    gpus=1e9                    | gpus: expected at most 131,072 GPUs, got 1000000000; lower it
    dp_shard_size=1e9           | dp_shard_size: expected at most 131,072 GPUs, got 1000000000; lower it
    sample_tokens=2e9           | sample_tokens: expected at most 2^24, got 2000000000; lower it
    lora=true lora_rank=1e9     | lora_rank: expected at most 65,536, got 1000000000; lower it
    model.num_hidden_layers=1e6 | model.num_hidden_layers: expected at most 2,048, as models have, got 1000000; correct
    gpus=8 dp_replicate_size=3  | dp_replicate_size: expected a divisor of the 8 devices in use, got 3; use 1, or gpus=9
    gpus=2 dp_replicate_size=2 dp_shard_size=4 | expected 2, the devices in use, got 2 x 4 = 8; set gpus=8
    dp_shard_size=4             | x dp_shard_size: expected 1, the devices in use, got 1 x 4 = 4; set gpus=4
    dp_shard_size=0             | dp_shard_size: expected 1 or more, or -1, got 0
    dp_replicate_size=0         | dp_replicate_size: expected 1 or more
    gpus=4 dp_replicate_size=4 zero_level=3 | dp_shard_size: expected 2 or more, to shard over, with zero_level
    gpus=4 dp_replicate_size=4 shard_weights=true | dp_shard_size: expected 2 or more, to shard over, with zero_level
    gpus=4 dp_replicate_size=4 shard_gradients=true | dp_shard_size: expected 2 or more, to shard over, with zero_level
    gpus=4 dp_replicate_size=4 shard_outer=true | dp_shard_size: expected 2 or more, to shard over, with zero_level
    output_dir=                 | output_dir: expected text that is not empty
    output_dir=s3://bucket/run  | output_dir: expected a folder of this machine, got 's3://bucket/run'
    output_dir=text.txt         | text.txt is a file; choose another path
    output_dir=text.txt/below   | text.txt is a file; choose another path
    output_dir=/proc/surojax    | output_dir: expected a folder that can be written, got '/proc/surojax'
    output_dir=~nobody-here/run | output_dir: expected a folder that can be written, got '~nobody-here/run' (Could
    resume_from_checkpoint=     | resume_from_checkpoint: expected text that is not empty
    resume_from_checkpoint=true | resume_from_checkpoint: expected 'auto', 'no' or a checkpoint, got 'true'
    resume_from_checkpoint=runs/none | resume_from_checkpoint: expected 'auto', 'no' or a checkpoint, got 'runs/none'
    model.vocab_size=256        | model.vocab_size: expected at least 257 (of bytes), got 256; raise it
    model.vocab_size=0          | model.vocab_size: expected 1 or more
    model.num_hidden_layers=0   | model.num_hidden_layers: expected 1 or more
    model.num_attention_heads=3 | model.num_key_value_heads: expected a divisor of num_attention_heads=3, got 2; use 1
    model.hidden_size=129       | model.hidden_size: expected a multiple of num_attention_heads=2, got 129
    model.head_dim=15           | expected an even number, since channels rotate in pairs, got 15; use 16
    model.head_dim=-1           | model.head_dim: expected 0 or more
    model.rms_norm_eps=0        | model.rms_norm_eps: expected more than 0
    model.rope_scaling=ntk      | model.rope_scaling: expected one of none, linear, llama3, yarn, proportional
    model.rope_beta_fast=8      | expected 32.0 with rope_scaling='none', which does not use it, got 8.0
    model.rope_scaling=yarn model.rope_factor=4 model.rope_beta_slow=64 | rope_beta_fast: expected rope_beta_slow=64.0
    model.rope_partial_rotary_factor=0.3 | rope_partial_rotary_factor: expected a fraction up to 1 that leaves an even
    model.rope_partial_rotary_factor=1.5 | rope_partial_rotary_factor: expected a fraction up to 1
    model.rope_local_base_freq=10000 | rope_local_base_freq: expected 0.0 without a window, got 10000.0
    model.no_rope_layer_interval=9 model.num_hidden_layers=8 | no_rope_layer_interval: expected at most num_hidden
    model.rope_llama_4_scaling_beta=0.1 model.no_rope_layer_interval=2 | llama_4_scaling_beta: expected 0.0 with
    model.hidden_act=gelu       | hidden_act: expected one of silu, gelu_pytorch_tanh, clamped_swiglu, relu2, got 'gelu'
    attention=cudnn model_dtype=bfloat16 model.attn_logit_softcapping=50 | attn_logit_softcapping: expected 0.0
    model.rope_factor=8         | expected 1.0 with rope_scaling='none', which does not use it, got 8.0
    model.rope_scaling=linear   | model.rope_factor: expected more than 1 with rope_scaling='linear', got 1.0
    model.rope_scaling=linear model.rope_factor=2 model.rope_low_freq_factor=2 | rope_low_freq_factor: expected 1.0
    model.rope_scaling=llama3 model.rope_factor=8 model.rope_high_freq_factor=1 | more than rope_low_freq_factor=1.0
    """
    rows = (line.split(" | ") for line in text.strip().splitlines())
    return [(flags.strip(), said.strip()) for flags, said in rows]


@pytest.mark.parametrize("flags, said", field_cases(), ids=lambda x: x.split(" |")[0][:40])
def test_fields(refused, flags, said):
    assert said in refused(*(f"--config.{flag}" for flag in flags.split()))


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--max_step=5"], "fields are set with --FIELD=VALUE; did you mean --max_steps?"),
        (["--max-stps", "5"], "did you mean --max_steps?"),
        (["max_steps=5"], "did you mean --max_steps?"),
        (["--gpu"], "unknown option '--gpu'"),
        (["--max-minutes=nan"], "--max-minutes: expected minutes, more than 0, got nan; correct it"),
        (["--max-minutes=-1"], "--max-minutes: expected minutes, more than 0, got -1.0; correct it"),
        (["--max-minutes=inf"], "--max-minutes: expected minutes, more than 0, got inf; correct it"),
        (["configs/tiny.py"], "did you mean --config configs/tiny.py?"),
        (["--config.sample_prompt=\ud800"], "sample_prompt: expected text without control characters, in UTF-8"),
        (["--config.output_dir=a\nb"], "output_dir: expected text without control characters"),
        (["--config.output_dir=" + "x" * 300], "output_dir: expected a folder that can be written"),
    ],
)  # fmt: skip
def test_flags(refused, arguments, said):
    assert said in refused(*arguments)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "no config given: pass --config NAME or FILE, for example --config tiny"),
        (["--config"], "expected one argument"),
        (["--config", "nowhere/tiny.py"], "got 'nowhere/tiny.py' (nothing there); see configs/"),
        (["--config", TINY.replace("tiny", "tinny")], f"did you mean {TINY}?"),
        (["--config", "."], "got '.' (a folder)"),
        (["--config", str(ROOT / "pyproject.toml")], "(another kind of file)"),
    ],
)
def test_no_config_file(arguments, said, capsys):
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    line = exited.value.code
    assert isinstance(line, str) and said in line and "\n" not in line
    assert capsys.readouterr().err == ""


START = "from surojax.config.fields import default_config\ndef get_config():\n    c = default_config()\n    "


@pytest.mark.parametrize(
    "source, said",
    [
        ("c.max_step = 5", ":4: config has no field 'max_step': did you mean 'max_steps'?"),
        ("c['max_step'] = 5", ":4: config has no field 'max_step': did you mean 'max_steps'?"),
        ("c.update(max_step=5)", ":4: config has no field 'max_step': did you mean 'max_steps'?"),
        ("c.model.hidden_siz = 5", ":4: config has no field 'hidden_siz': did you mean 'model.hidden_size'?"),
        ("c.seed = c.max_step", ":4: config has no field 'max_step': did you mean 'max_steps'?"),
        ("c.max_steps = '10'", ":4: max_steps: expected a whole number, got '10' of type str; its type is int"),
        ("c.max_steps = 1e3", ":4: max_steps: expected a whole number, got 1000.0 of type float; its type is int"),
        ("c.model.hidden_size = 1.5", ":4: hidden_size: expected a whole number, got 1.5 of type float"),
        ("c.recompute_block = 'yes'", ":4: recompute_block: expected true or false, got 'yes' of type str"),
        ("c.shard_weights = 1", ":4: shard_weights: expected true or false, got 1 of type int"),
        ("c.data = ['a.txt']", ":4: data: expected text, got ['a.txt'] of type list"),
        ("c.learning_rate = '1e-3'", ":4: learning_rate: expected a number, got '1e-3' of type str"),
        ("c.max_steps = True", "max_steps: expected a whole number, got True; its type is int"),
        ("c.max_steps = None", "max_steps: expected a whole number, got None; its type is int"),
        ("c.model = {'hidden_size': 8}", "config lacks the field 'model.attention_bias': start from default_config()"),
        ("c.seed = 1 / 0", ":4: ZeroDivisionError: division by zero"),
        ("def of():\n        return 1 / 0\n    c.seed = of()", ":5: ZeroDivisionError: division by zero"),
        ("import nothing_like_it", ":4: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("raise SystemExit('stop')", ":4: SystemExit: stop"),
        ("c.seed = (1", ":4: SyntaxError: '(' was never closed"),
        ("c.unlock(); c.max_step = 1", "config has no field 'max_step': did you mean 'max_steps'?"),
        ("return", "expected get_config() to return default_config() with changes, got NoneType"),
        ("return c.to_dict()", "expected get_config() to return default_config() with changes, got dict"),
        ("c = None\nget_config = None", "expected a function get_config(), got none"),
    ],
)
def test_config_files(refused, tmp_path, source, said):
    path = tmp_path / "mine.py"
    path.write_text(f"{START}{source}\n" + ("" if "get_config =" in source else "    return c\n"))
    assert said in refused(config=str(path))


@pytest.mark.parametrize(
    "name, content, said",
    [
        (
            "missing.txt",
            None,
            "missing.txt: expected a file, a folder or a glob that matches, got nothing of that name",
        ),
        ("empty.txt", b"", "empty.txt: expected documents that can be used, got none, 0 skipped, 1 without text"),
        ("latin.txt", b"ok\ncaf\xe9\n", "latin.txt:2: expected UTF-8 text, got the byte 0xe9 at byte offset 6"),
        ("table.csv", b"a,b\n", "table.csv: expected rows, got none"),
        (
            "table.xls",
            b"a,b\n",
            "table.xls: expected a file ending in .csv or .json or .jsonl or .parquet or .arrow or .feather or .txt",
        ),
        ("bad.jsonl", b'{"text": "a"}\n{"text"\n', "bad.jsonl:2: expected a JSON object"),
        ("field.jsonl", b'{"content": "a"}\n', "got 'content'; set text_field to the field that holds the text"),
        ("short.txt", b"one line\n" * 3, "for one step of 16 samples with sequence_len 128, got"),
    ],
)
def test_data(refused, tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert said in refused(f"--config.data={name}")


def test_warmup_longer_than_the_epochs(refused):
    flags = "max_steps=0", "warmup_ratio=0", "warmup_steps=1000", "per_device_batch_size=1"
    line = refused(*(f"--config.{flag}" for flag in flags))
    assert "warmup_steps + cooldown_steps: expected at most the" in line


def test_tokenizer(refused, tmp_path):
    assert "tokenizer: expected 'bytes', the path" in refused("--config.tokenizer=gpt2")
    vocabulary = {"</s>": 0} | {f"w{i}": i for i in range(1, 400)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w1"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    line = refused("--config.tokenizer=tokenizer.json")
    assert "model.vocab_size: expected at least 400 (of tokenizer.json:" in line and "got 320; raise it" in line


def test_a_file_where_checkpoints_belong(refused, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").touch()
    assert f"{tmp_path}/out/checkpoints is a file; choose another path" in refused()


def test_more_memory_than_there_is(refused, monkeypatch):
    """The 7B config ends with what it needs, what there is and what to change, also where the memory would do."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GiB, total=8 * GiB))
    line = refused(config=str(ROOT / "configs" / "llama7b.py"))
    assert "does not fit: needs 82.1 GiB" in line and "where 8.0 GiB are free" in line
    assert "--config.gpus=4 --config.zero_level=3 needs 22.0 GiB on each" in line


@pytest.mark.full
def test_a_model_of_14b_is_told_of_adapters_before_its_weights_are_opened(refused, monkeypatch, tmp_path):
    (tmp_path / "14b").mkdir()
    (tmp_path / "14b/config.json").write_text(json.dumps(MODELS["Qwen2.5-14B"]))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=20 * GiB, total=20 * GiB))
    line = refused("--config.model_path=14b", config=str(ROOT / "configs" / "finetune.py"))
    assert "does not fit: needs " in line and "(weights 24.6, outer 2.9, " in line
    qlora = "--config.qlora_bnb=True --config.overlap_update=False -> adapters of a base in 4 bits (--qlora): 15.5 GiB"
    assert f": --config.lora=True {qlora} on each device (fits)" in line
    line = refused("--config.model_path=14b", "--config.lora", config=str(ROOT / "configs" / "finetune.py"))
    assert "(weights 24.7, outer 2.9, " in line and f": {qlora} on each device (fits)" in line
    less = ("--config.lora", "--config.qlora_bnb", "--config.sequence_len=65536")
    line = refused("--config.model_path=14b", *less, config=str(ROOT / "configs" / "finetune.py"))
    assert ": a smaller model or a machine with more memory; " in line


def test_no_device_at_all(monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda':\n no GPU")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(
        ConfigError, match=r"^gpus: expected devices that JAX can use, got none \(Unable.*JAX_PLATFORMS"
    ):
        find_devices(1)


def test_gpus_may_pin_all_memory_of_the_machine(monkeypatch):
    """XLA reads the variable when it makes its backends, and stops at 64 GiB without."""
    monkeypatch.delenv(HOST_LIMIT, raising=False)
    find_devices(1)
    assert os.environ[HOST_LIMIT] == str(psutil.virtual_memory().total // GiB)
    monkeypatch.setenv(HOST_LIMIT, "7")
    find_devices(1)
    assert os.environ[HOST_LIMIT] == "7"


def test_mesh_sizes_are_filled_in():
    devices = find_devices(8)
    assert dict(make_mesh(devices, dp_replicate_size=2).shape) == {"dp_replicate": 2, "dp_shard": 4}
    assert dict(make_mesh(devices, dp_replicate_size=4, dp_shard_size=2).shape) == {"dp_replicate": 4, "dp_shard": 2}
    assert len(find_devices(0)) == 8
    with pytest.raises(ConfigError, match=r"^ep_size: expected a divisor of dp_shard_size=8, got 12; use 4, or more"):
        make_mesh(devices, ep_size=12)


def test_sizes_of_a_mesh_that_are_given_are_multiplied():
    """Those that are not are divided."""
    with pytest.raises(
        ConfigError, match=r"^dp_replicate_size: expected a divisor of the 8 devices in use, got 3; use"
    ):
        mesh_shape(8, dp_replicate_size=3)
    with pytest.raises(
        ConfigError, match=r"^dp_replicate_size x dp_shard_size: expected 8, .* got 3 x 2 = 6; set gpus"
    ):
        mesh_shape(8, dp_replicate_size=3, dp_shard_size=2)


@pytest.mark.parametrize("platform, hint", [("cpu", " (virtual ones: XLA_FLAGS="), ("gpu", "use 0 for all")])
def test_devices_of_each_platform(monkeypatch, platform, hint):
    """Several processors share no compiled programs."""
    disabled = []
    kind = "cpu" if platform == "cpu" else "NVIDIA H100"
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform=platform, device_kind=kind)] * 2)
    monkeypatch.setattr(mesh, "disable_compilation_cache", lambda: disabled.append(1))
    with pytest.raises(ConfigError, match=rf"^gpus: expected at most 2 \({kind}\), got 3; .*") as refused:
        find_devices(3)
    assert hint in str(refused.value) and ("XLA_FLAGS" in str(refused.value)) == (platform == "cpu")
    assert len(find_devices(1)) == 1 and not disabled
    assert len(find_devices(0)) == 2 and len(disabled) == (platform == "cpu")
    monkeypatch.setattr(mesh, "too_little_to_compile", lambda: "1 GiB is left")
    with pytest.raises(ConfigError, match=r"^memory: 1 GiB is left$"):
        find_devices(1)


def test_processes_have_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert len(find_devices(8)) == len(find_devices(0)) == 8
    with pytest.raises(ConfigError, match=r"^gpus: expected 0 or 8, all devices of 2 processes, got 4; use 0"):
        find_devices(4)


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--config.max_step=3"], "did you mean 'max_steps'?"),
        (["--config.data=latin.txt", "--config.output_dir=out"], "latin.txt:2: expected UTF-8 text"),
    ],
)
def test_as_a_user_runs_it(tmp_path, arguments, said):
    (tmp_path / "latin.txt").write_bytes(b"ok\ncaf\xe9\n")
    command = [sys.executable, "-m", "surojax.train", "--config", TINY, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == REFUSED
    assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    assert [p.name for p in tmp_path.iterdir()] == ["latin.txt"]
    assert time.monotonic() - start < 60
