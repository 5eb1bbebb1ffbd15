"""Every option of a run, in one commented list, and the checks that refuse a bad one before anything is built.

`default_config()` is locked: a typo in a config file, a notebook or a flag is an error. `parse` reads
`--config FILE --config.field=value ...`; `check` raises ConfigError, one line that says what was expected, what was
given and what to change. Only the commands see the ConfigDict: `model_config` and keywords carry it below.
"""

import argparse
import difflib
import inspect
import math
import os
import re
import runpy
import sys
import traceback
from pathlib import Path

import ml_collections
from ml_collections import config_dict

from surojax.attention import IMPLEMENTATIONS
from surojax.errors import ConfigError
from surojax.models.layers import RopeScaling
from surojax.models.llama import LlamaConfig

FLOATS = ("float32", "bfloat16")
SCHEDULES = ("cosine", "linear", "wsd")
ROPE_KINDS = ("none", "linear", "llama3")


def default_config() -> ml_collections.ConfigDict:
    """All fields with their defaults; locked. Every line's comment is its help text."""
    c = ml_collections.ConfigDict()

    # Run
    c.output_dir = "runs/default"  # checkpoints, metrics.jsonl and TensorBoard events are written here
    c.seed = 0  # initial weights and the order of the data follow from it
    c.gpus = 1  # accelerators (or virtual CPU devices) to use; 0 = all there are
    c.max_steps = 0  # optimizer steps; 0 = num_epochs passes over the data
    c.num_epochs = 1  # passes over the training data when max_steps is 0
    c.eval_steps = 100  # evaluate every so many steps and at the end; 0 = only at the end
    c.eval_batches = 20  # batches of an evaluation at most, spread over the held-out text
    c.save_steps = 500  # write a checkpoint every so many steps and at the end; 0 = only at the end
    c.save_total_limit = 2  # newest checkpoints kept
    c.resume_from_checkpoint = "auto"  # "auto" = newest in output_dir if any, "no" = start anew, or a checkpoint folder
    c.sample_prompt = ""  # text continued at the end of training; "" = the beginning of the held-out text
    c.sample_tokens = 200  # tokens sampled at the end; 0 = none
    c.sample_temperature = 0.8  # 0 = greedy

    # Data
    c.data = "stdlib"  # "stdlib" = this Python's own source, or .txt/.jsonl files: a path, folder, glob, comma list
    c.eval_data = ""  # files for evaluation, like data; "" = hold documents of data out
    c.text_field = "text"  # field of a .jsonl line that holds the document
    c.tokenizer = "bytes"  # "bytes", or a Hugging Face tokenizer.json
    c.sequence_len = 512  # tokens of a training sequence
    c.per_device_batch_size = 1  # sequences per GPU and microbatch
    c.gradient_accumulation_steps = 1  # microbatches per step; effective batch = this x batch size x data-parallel GPUs

    # Model
    c.model = ml_collections.ConfigDict()
    c.model.vocab_size = 32000  # rows of the embedding; at least the tokenizer's vocabulary
    c.model.hidden_size = 768  # width of the residual stream
    c.model.intermediate_size = 2048  # width inside the MLP
    c.model.num_hidden_layers = 12  # decoder blocks
    c.model.num_attention_heads = 12  # query heads
    c.model.num_key_value_heads = 12  # key/value heads; fewer than query heads = grouped-query attention
    c.model.head_dim = 0  # channels of a head; 0 = hidden_size / num_attention_heads
    c.model.rms_norm_eps = 1e-5  # added to the mean square in RMSNorm
    c.model.rope_theta = 10000.0  # base of the rotary frequencies
    c.model.rope_scaling = "none"  # "none", "linear" (position interpolation) or "llama3"
    c.model.rope_factor = 1.0  # how much longer the context becomes, for linear and llama3
    c.model.rope_low_freq_factor = 1.0  # llama3: wavelengths above original length / this are stretched
    c.model.rope_high_freq_factor = 4.0  # llama3: wavelengths below original length / this are kept
    c.model.rope_original_max_position_embeddings = 8192  # llama3: context length before stretching
    c.model.tie_word_embeddings = False  # the head shares the embedding's weights
    c.model.attention_bias = False  # bias on queries, keys and values (Qwen2)
    c.model.qk_norm = False  # RMSNorm on each head's queries and keys (Qwen3)
    c.model.initializer_range = 0.02  # standard deviation of the initial weights

    # Numbers
    c.model_dtype = "bfloat16"  # work weights, activations and matrix products: bfloat16 or float32
    c.master_dtype = "float32"  # the weights the optimizer updates
    c.accum_dtype = "float32"  # gradient accumulators
    c.opt_m_dtype = "float32"  # first moments
    c.opt_v_dtype = "float32"  # second moments
    c.attention = "auto"  # "auto", "xla", or "cudnn" (flash attention, NVIDIA, 16-bit)

    # Memory
    c.zero_level = 1  # shards over dp_shard: 1 = optimizer state, 2 = + gradients, 3 = + block weights
    c.shard_gradients = config_dict.placeholder(bool)  # shard the gradient accumulators; unset = zero_level >= 2
    c.shard_weights = config_dict.placeholder(bool)  # shard the block weights; unset = zero_level >= 3
    c.recompute_block = True  # save only each block's input and compute the block again in the backward pass
    c.lmhead_chunks = 1  # slices of the tokens in head and loss; more = less memory for logits

    # Mesh: data-parallel GPUs = dp_replicate_size x dp_shard_size
    c.dp_replicate_size = 1  # groups that each hold a whole copy of the sharded state
    c.dp_shard_size = -1  # GPUs a copy is sharded over; -1 = the rest

    # Optimizer
    c.optimizer = "adamw"  # adamw
    c.learning_rate = 3e-4  # peak
    c.lr_scheduler_type = "cosine"  # after the warmup: cosine, linear, or wsd (constant, then a linear cooldown)
    c.warmup_steps = 0  # steps of linear warmup; 0 = warmup_ratio decides
    c.warmup_ratio = 0.0  # warmup as a fraction of all steps
    c.cooldown_steps = 0  # wsd: steps of linear decay at the end
    c.final_lr_fraction = 0.1  # learning rate at the end, as a fraction of the peak
    c.weight_decay = 0.1  # decoupled, on matrices only
    c.max_grad_norm = 1.0  # gradients are scaled down to this global norm; 0 = never
    c.adamw_beta1 = 0.9  # decay of the first moment
    c.adamw_beta2 = 0.95  # decay of the second moment
    c.adamw_epsilon = 1e-8  # added to the root of the second moment
    return c.lock()


def describe() -> str:
    """Help for every field, read from the one list above: `--config.field=default  comment`."""
    lines, source = [], inspect.getsource(default_config)
    for line in source.splitlines():
        if section := re.fullmatch(r"    # (.+)", line):
            lines.append(f"\n{section[1]}")
        elif field := re.fullmatch(r"    c\.([\w.]+) = (.+?)  # (.+)", line):
            value = "unset" if "placeholder" in field[2] else field[2]
            lines.append(f"  --config.{field[1]}={value}\n        {field[3]}")
    return "\n".join(lines)


def parse(
    argv: list[str] | None, parser: argparse.ArgumentParser
) -> tuple[ml_collections.ConfigDict, argparse.Namespace]:
    """The config of a command line, and the command's own options, which the caller has added to `parser`.

    `--config FILE` names a Python file with `get_config()`; `--config.FIELD=VALUE` overrides its fields.
    Raises ConfigError for a bad option; `--help` prints the options and every field, and exits.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"fields (--config.FIELD=VALUE overrides the config file's value):\n{describe()}"
    parser.add_argument("--config", metavar="FILE", help="Python file whose get_config() returns the config")
    parser.exit_on_error = False  # type: ignore[misc]
    argv = list(sys.argv[1:] if argv is None else argv)
    overrides = []
    while at := [i for i, a in enumerate(argv) if a.startswith("--config.")]:
        name, equals, value = argv.pop(at[0]).partition("=")
        if not equals and at[0] < len(argv) and not argv[at[0]].startswith("--"):
            value = argv.pop(at[0])
        elif not equals:
            value = "true"  # --config.recompute_block alone switches it on
        overrides.append((name.removeprefix("--config."), value))
    try:
        args, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}: fields are set with --config.FIELD=VALUE; see --help")
    if not args.config:
        raise ConfigError("no config given: pass --config FILE, for example --config configs/tiny.py; see --help")
    config = load(args.config)
    for name, value in overrides:
        _override(config, name, value)
    return config, args


def load(path: str) -> ml_collections.ConfigDict:
    """`get_config()` of a Python file. Raises ConfigError when there is no such file or it does not return a config."""
    if not Path(path).is_file():
        raise ConfigError(f"--config: expected a Python file, got {path!r}, which does not exist; see configs/")
    try:
        config = runpy.run_path(path)["get_config"]()
    except Exception as error:
        frames = reversed(traceback.extract_tb(error.__traceback__))
        line = next((f.lineno for f in frames if f.filename == path), None)
        locked = re.search(r'[Kk]ey "(\w+)" does not exist', str(error)) if isinstance(error, AttributeError) else None
        message = _no_field(locked[1]) if locked else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"{path}{f':{line}' if line else ''}: {message}") from error
    if not isinstance(config, ml_collections.ConfigDict):
        got = type(config).__name__
        raise ConfigError(f"{path}: expected get_config() to return default_config() with changes, got {got}")
    return config


def _no_field(name: str) -> str:
    default = default_config()
    names = [*default, *(f"model.{k}" for k in default.model)]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"config has no field {name!r}: " + (f"did you mean {near[0]!r}?" if near else "--help lists every field")


def _override(config: ml_collections.ConfigDict, name: str, text: str) -> None:
    """Set one field from the command line, in the type that it has."""
    *parents, field = name.split(".")
    owner = config
    for parent in parents:
        owner = owner.get(parent) if isinstance(owner, ml_collections.ConfigDict) else None
    if not isinstance(owner, ml_collections.ConfigDict) or field not in owner:
        raise ConfigError(_no_field(name))
    if isinstance(owner.get(field), ml_collections.ConfigDict):
        inside = ", ".join(f"{name}.{k}" for k in owner[field])
        raise ConfigError(f"--config.{name} holds several fields: set one of {inside}")
    kind = owner.get_type(field)
    try:
        words = {"true": True, "1": True, "false": False, "0": False}
        owner[field] = words[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        expected = "true or false" if kind is bool else {int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"--config.{name}: expected {expected}, got {text!r}") from None


def _need(ok: bool, field: str, expected: str, got, change: str) -> None:
    if not ok:
        raise ConfigError(f"{field}: expected {expected}, got {got!r}; {change}")


def check(c: ml_collections.ConfigDict) -> None:
    """Everything that can be judged from the config alone. Raises ConfigError for the first field that is wrong."""
    positive = (
        "num_epochs per_device_batch_size gradient_accumulation_steps sequence_len lmhead_chunks "
        "dp_replicate_size save_total_limit eval_batches learning_rate adamw_epsilon"
    )
    for name in positive.split():
        _need(c[name] > 0, name, "a positive number", c[name], "raise it")
    for name in "gpus max_steps eval_steps save_steps sample_tokens warmup_steps cooldown_steps".split():
        _need(c[name] >= 0, name, "0 or more", c[name], "0 has the meaning that --help gives")
    for name in "sample_temperature weight_decay max_grad_norm".split():
        _need(c[name] >= 0, name, "0 or more", c[name], "0 turns it off")
    for name in "warmup_ratio adamw_beta1 adamw_beta2 final_lr_fraction".split():
        below = c[name] < 1 if name.startswith("adamw") else c[name] <= 1
        _need(c[name] >= 0 and below, name, "a fraction from 0 to 1", c[name], "use for example the default of --help")
    for name in "model_dtype master_dtype accum_dtype opt_m_dtype opt_v_dtype".split():
        _need(c[name] in FLOATS, name, f"one of {', '.join(FLOATS)}", c[name], "choose one of them")
    for name, choices in (("lr_scheduler_type", SCHEDULES), ("optimizer", ("adamw",)), ("attention", IMPLEMENTATIONS)):
        _need(c[name] in choices, name, f"one of {', '.join(choices)}", c[name], "choose one of them")
    _need(c.zero_level in (1, 2, 3), "zero_level", "1, 2 or 3", c.zero_level, "choose one of them")
    _need(
        c.dp_shard_size == -1 or c.dp_shard_size > 0,
        "dp_shard_size",
        "-1 or a positive number",
        c.dp_shard_size,
        "use -1",
    )
    _need(
        not (c.warmup_steps and c.warmup_ratio), "warmup_ratio", "0 beside warmup_steps", c.warmup_ratio, "set only one"
    )
    if c.lr_scheduler_type == "wsd":
        _need(
            c.cooldown_steps > 0,
            "cooldown_steps",
            "a positive number with wsd",
            c.cooldown_steps,
            "set it to ~20% of the steps",
        )
    else:
        _need(
            c.cooldown_steps == 0,
            "cooldown_steps",
            "0 unless lr_scheduler_type is wsd",
            c.cooldown_steps,
            "use wsd or 0",
        )
    if c.max_steps:
        warmup = warmup_steps(c, c.max_steps)
        _need(warmup + c.cooldown_steps <= c.max_steps, "warmup_steps + cooldown_steps", f"at most max_steps={c.max_steps}",
              warmup + c.cooldown_steps, "shorten them")  # fmt: skip
    tokens = c.per_device_batch_size * c.sequence_len
    _need(tokens % c.lmhead_chunks == 0, "lmhead_chunks", f"a divisor of per_device_batch_size x sequence_len = {tokens}",
          c.lmhead_chunks, f"use {math.gcd(tokens, c.lmhead_chunks)}")  # fmt: skip
    _check_model(c.model)


def _check_model(m: ml_collections.ConfigDict) -> None:
    sizes = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    for name in sizes.split() + ["rms_norm_eps", "rope_theta", "rope_factor", "initializer_range"]:
        _need(m[name] > 0, f"model.{name}", "a positive number", m[name], "see the model's config.json")
    heads, kv = m.num_attention_heads, m.num_key_value_heads
    _need(
        heads % kv == 0,
        "model.num_key_value_heads",
        f"a divisor of num_attention_heads={heads}",
        kv,
        f"use {math.gcd(heads, kv)}",
    )
    _need(m.head_dim >= 0, "model.head_dim", "0 or more", m.head_dim, "0 = hidden_size / num_attention_heads")
    if not m.head_dim:
        _need(m.hidden_size % heads == 0, "model.hidden_size", f"a multiple of num_attention_heads={heads}", m.hidden_size,
              "change one of them or set model.head_dim")  # fmt: skip
    head_dim = m.head_dim or m.hidden_size // heads
    _need(head_dim % 2 == 0, "model.head_dim", "an even number (channels rotate in pairs)", head_dim, "use an even one")
    _need(
        m.rope_scaling in ROPE_KINDS,
        "model.rope_scaling",
        f"one of {', '.join(ROPE_KINDS)}",
        m.rope_scaling,
        "choose one of them",
    )
    if m.rope_scaling == "llama3":
        low, high = m.rope_low_freq_factor, m.rope_high_freq_factor
        _need(
            0 < low < high,
            "model.rope_high_freq_factor",
            f"more than rope_low_freq_factor={low} > 0",
            high,
            "Llama 3 uses 1 and 4",
        )


def warmup_steps(c: ml_collections.ConfigDict, total_steps: int) -> int:
    """Steps of warmup in a run of `total_steps`."""
    return c.warmup_steps or round(c.warmup_ratio * total_steps)


def model_config(c: ml_collections.ConfigDict) -> LlamaConfig:
    """The frozen architecture of a checked config."""
    m = c.model.to_dict()
    scaling = RopeScaling(
        kind=m.pop("rope_scaling"),
        factor=m.pop("rope_factor"),
        low_freq_factor=m.pop("rope_low_freq_factor"),
        high_freq_factor=m.pop("rope_high_freq_factor"),
        original_max_position_embeddings=m.pop("rope_original_max_position_embeddings"),
    )
    m["head_dim"] = m["head_dim"] or m["hidden_size"] // m["num_attention_heads"]
    return LlamaConfig(**m, rope_scaling=scaling, attention=c.attention)


def check_output_dir(path: str) -> Path:
    """The output folder as an absolute path; ConfigError if it cannot be made or written. Creates nothing."""
    folder = Path(path).expanduser().absolute()
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    _need(nearest.is_dir(), "output_dir", "a folder", str(folder), f"{nearest} is a file; choose another path")
    writable = os.access(nearest, os.W_OK | os.X_OK)
    _need(
        writable,
        "output_dir",
        "a folder that can be written",
        str(folder),
        f"{nearest} is not writable; choose another path",
    )
    return folder


def restored_config(values: dict) -> ml_collections.ConfigDict:
    """The config that a checkpoint stores, as `to_dict` gave it; fields that are newer than it get their defaults."""
    c = default_config()
    with c.unlocked():
        c.update(values)
    return c
