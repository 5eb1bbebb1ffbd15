"""Every option of a run, in one commented list, and the checks that refuse a bad one before anything is built.

`default_config()` is locked: a typo in a config file, a notebook or a flag is an error. `check` raises ConfigError, one
line that says what was expected, what was given and what to change; `flags` reads config files and command lines.
Only the commands see the ConfigDict: `model_config` and keywords carry it below.
"""

import dataclasses
import difflib
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_collections
from ml_collections import config_dict

from surojax.attention import IMPLEMENTATIONS
from surojax.blockscaled import WIDTHS
from surojax.errors import ConfigError
from surojax.models.layers import Recompute, RopeScaling
from surojax.models.llama import LlamaConfig
from surojax.precision import BLOCK_SCALED, RECIPES, Precision

type Config = Any  # an ml_collections.ConfigDict with the fields of `default_config`; its values have no static types


def either(default: bool) -> config_dict.FieldReference:
    """A field that is true, false or one of the words in WORDS_OF, which a ConfigDict alone would refuse."""
    return config_dict.FieldReference(default, field_type=object)


def default_config() -> Config:
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
    c.opt_m_dtype = "float32"  # first moments; with adamw8bit those of vectors, with normuon the momentum too
    c.opt_v_dtype = "float32"  # second moments; with adamw8bit those of vectors, with normuon of what adamw updates
    c.attention = "auto"  # "auto", "xla", or "cudnn" (flash attention, NVIDIA, 16-bit)
    c.kernels = "xla"  # between products: "xla" fuses, "mosaic" = our fused kernels (NVIDIA), "auto" = those on a GPU

    # Recipe: the blocks' matrix products
    c.recipe = "bf16"  # bf16, fp8_hybrid (delayed scaling), fp8_current (just in time), mxfp8 or nvfp4
    c.matmul_dtype = ""  # recipe bf16: operands of products, bfloat16 or float32; "" = model_dtype
    c.gradient_dtype = ""  # recipe bf16: gradients in the backward pass's products, likewise; "" = matmul_dtype
    c.fp8_amax_history = 16  # fp8_hybrid: steps whose largest magnitudes a scale looks back on
    c.fp8_margin = 0  # fp8_hybrid: binades left free above the largest magnitude seen
    c.block_scaled_products = "auto"  # mxfp8, nvfp4: "native" (sm_100, sm_120), "emulated", "auto" = native on GPUs
    c.skip_quant_first_layers = 0  # blocks at the start that compute as recipe bf16 does
    c.skip_quant_last_layers = 0  # blocks at the end that do

    # Memory
    c.zero_level = 1  # shards over dp_shard: 1 = optimizer state, 2 = + gradients, 3 = + block weights
    c.shard_gradients = config_dict.placeholder(bool)  # shard the gradient accumulators; unset = zero_level >= 2
    c.shard_weights = config_dict.placeholder(bool)  # shard the block weights; unset = zero_level >= 3
    c.shard_outer = False  # split embedding and head over dp_shard by words; for vocabularies that cost too much memory
    c.offload_residual = False  # what the forward pass saves for the backward pass rests in pinned host memory
    c.offload_optimizer = either(False)  # optimizer state rests in pinned host memory; "nvme" = in a file in nvme_path
    c.offload_master = either(False)  # master weights rest in pinned host memory; "nvme" = in a file in nvme_path
    c.offload_grads = False  # gradient accumulators of the blocks rest in host memory; several GPUs: shard_gradients
    c.offload_weights = False  # block weights rest in host memory and stream through the device, two layers at a time
    c.zero_quantized_weights = "none"  # gather block matrices in 8 bits: none, fp8 or int8; needs zero_level=3
    c.persistent_quants = False  # the 8-bit matrices rest in the state in place of 16-bit ones; made once a step
    c.offload_quants = False  # they rest in pinned host memory; needs persistent_quants
    c.use_all_to_all_reduce = False  # gradients are sent to their shard's GPU and added up there in float32
    c.zero_quantized_gradients = False  # so, with the blocks' matrices sent in int8 (one GPU has nothing to send)
    c.memcpy_all_gather = False  # gathers by the GPUs' copy engines within a machine (NCCL 2.29 or later)
    c.memcpy_send_recv = False  # all-to-all reductions by the GPUs' copy engines within a machine
    c.resident_layers = 0  # offload_weights: the weights of the first layers, so many, stay on the device
    c.nvme_path = ""  # folder on an NVMe disk for what is offloaded to "nvme"; one run at a time
    c.recompute_block = True  # save only each block's input and compute the block again in the backward pass
    c.recompute_norm = False  # recompute_block=False: compute the norms' outputs again instead of saving them
    c.recompute_swiglu = False  # recompute_block=False: compute silu(gate) * up again
    c.recompute_ffn = False  # recompute_block=False: compute silu(gate) * up, gate and up again
    c.recompute_att = False  # recompute_block=False: compute queries, keys, values and attention again
    c.lmhead_chunks = 1  # slices of the tokens in head and loss; more = less memory for logits

    # Mesh: data-parallel GPUs = dp_replicate_size x dp_shard_size
    c.dp_replicate_size = 1  # groups that each hold a whole copy of the sharded state
    c.dp_shard_size = -1  # GPUs a copy is sharded over; -1 = the rest

    # Optimizer
    c.optimizer = "adamw"  # adamw, adamw8bit (8-bit moments of matrices), normuon (blocks' matrices; adamw for others)
    c.learning_rate = 3e-4  # the peak, after the warmup
    c.lr_scheduler_type = "cosine"  # after the warmup: cosine, linear, or wsd (constant, then a linear cooldown)
    c.warmup_steps = 0  # steps of linear warmup; 0 = warmup_ratio decides
    c.warmup_ratio = 0.0  # warmup as a fraction of all steps
    c.cooldown_steps = 0  # wsd: steps of linear decay at the end
    c.final_lr_fraction = 0.1  # learning rate at the end, as a fraction of the peak
    c.weight_decay = 0.1  # decoupled, on matrices only
    c.z_loss = 0.0  # weight of logsumexp(logits)^2 in the gradients (PaLM: 1e-4); reported losses are without it
    c.max_grad_norm = 1.0  # gradients are scaled down to this global norm; 0 = never
    c.adamw_beta1 = 0.9  # decay of the first moment
    c.adamw_beta2 = 0.95  # decay of the second moment
    c.adamw_epsilon = 1e-8  # added to the root of the second moment
    c.muon_learning_rate = 0.0  # normuon: the peak for the blocks' matrices; 0 = learning_rate
    c.muon_momentum = 0.95  # normuon: decay of the momentum of the blocks' matrices
    c.muon_beta2 = 0.95  # normuon: decay of the mean squares of their rows
    c.muon_ns_steps = 5  # normuon: steps of the orthogonalisation, 1 to 10
    return c.lock()


# What a value of each type is called, and what a field's value must be beyond its type: condition, its words, the fix.
WORDS_OF: dict[str, tuple[str, ...]] = {"offload_optimizer": ("nvme",), "offload_master": ("nvme",)}  # see `either`
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
RULES: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "num_epochs eval_batches save_total_limit sequence_len per_device_batch_size gradient_accumulation_steps "
        "lmhead_chunks dp_replicate_size model.vocab_size model.hidden_size model.intermediate_size "
        "model.num_hidden_layers model.num_attention_heads model.num_key_value_heads "
        "model.rope_original_max_position_embeddings fp8_amax_history",
        lambda v: v >= 1,
        "1 or more",
        "raise it",
    ),
    (
        "seed gpus max_steps eval_steps save_steps sample_tokens sample_temperature warmup_steps cooldown_steps "
        "resident_layers weight_decay z_loss max_grad_norm muon_learning_rate model.head_dim fp8_margin "
        "skip_quant_first_layers skip_quant_last_layers",
        lambda v: v >= 0,
        "0 or more",
        "--help says what 0 means",
    ),
    (
        "learning_rate adamw_epsilon model.rms_norm_eps model.rope_theta model.initializer_range",
        lambda v: v > 0,
        "more than 0",
        "--help shows the default",
    ),
    ("warmup_ratio final_lr_fraction", lambda v: 0 <= v <= 1, "a fraction from 0 to 1", "divide a percentage by 100"),
    (
        "adamw_beta1 adamw_beta2 muon_momentum muon_beta2",
        lambda v: 0 <= v < 1,
        "0 or more and below 1",
        "--help shows the default",
    ),
    ("muon_ns_steps", lambda v: 1 <= v <= 10, "1 to 10", "5 is usual; the result is exact to bfloat16 from 6 on"),
    ("dp_shard_size", lambda v: v == -1 or v >= 1, "1 or more, or -1", "-1 is all that dp_replicate_size leaves"),
    (
        "output_dir data text_field tokenizer resume_from_checkpoint",
        lambda v: v.strip() != "",
        "text that is not empty",
        "leave it out for the default of --help",
    ),
)
FLOATS = ("bfloat16", "float32")
CHOICES: dict[str, tuple] = {
    **dict.fromkeys(("model_dtype", "master_dtype", "accum_dtype", "opt_m_dtype", "opt_v_dtype"), FLOATS),
    "lr_scheduler_type": ("cosine", "linear", "wsd"),
    "optimizer": ("adamw", "adamw8bit", "normuon"),
    **dict.fromkeys(("matmul_dtype", "gradient_dtype"), ("", *FLOATS)),
    "attention": IMPLEMENTATIONS,
    "kernels": ("auto", "xla", "mosaic"),
    "recipe": RECIPES,
    "block_scaled_products": ("auto", "native", "emulated"),
    "zero_level": (1, 2, 3),
    "zero_quantized_weights": ("none", "fp8", "int8"),
    "model.rope_scaling": ("none", "linear", "llama3"),
}
RECOMPUTE_PARTS = tuple(f"recompute_{field.name}" for field in dataclasses.fields(Recompute))
ROPE_FIELDS = "factor low_freq_factor high_freq_factor original_max_position_embeddings".split()
ROPE_USES = {"none": [], "linear": ROPE_FIELDS[:1], "llama3": ROPE_FIELDS}


def flat(c: Config) -> dict[str, Any]:
    """Field names, those of the architecture as `model.NAME`, and their values."""
    values = dict(c.items())
    model = values.pop("model", None)
    if not isinstance(model, ml_collections.ConfigDict):
        return values
    return values | {f"model.{name}": value for name, value in model.items()}


def no_field(name: str) -> str:
    """That there is no such field, and the one that was probably meant."""
    names = list(flat(default_config()))
    near = difflib.get_close_matches(name, [*names, *(n.removeprefix("model.") for n in names)], n=1, cutoff=0.6)
    full = near and (near[0] if near[0] in names else f"model.{near[0]}")
    return f"config has no field {name!r}: " + (f"did you mean {full!r}?" if full else "--help lists every field")


def check(c: Config) -> None:
    """Everything that can be judged from the config alone. Raises ConfigError for the first field that is wrong."""
    _check_types(c)
    values = flat(c)
    for names, ok, expected, change in RULES:
        for name in names.split():
            _need(ok(values[name]), name, expected, values[name], change)
    for name, choices in CHOICES.items():
        near = difflib.get_close_matches(str(values[name]), map(str, choices), n=1, cutoff=0.4)
        change = f"did you mean {near[0]!r}?" if near else "choose one of them"
        _need(values[name] in choices, name, f"one of {', '.join(map(str, choices))}", values[name], change)
    _check_model(c)
    _check_recipe(c)
    _check_schedule(c)
    _check_optimizer(c)
    _check_sizes(c)


def _need(ok: bool, field: str, expected: str, got, change: str) -> None:
    if not ok:
        raise ConfigError(f"{field}: expected {expected}, got {got!r}; {change}")


def _check_types(c: Config) -> None:
    """Every field is there, no other, each of its type: a ConfigDict by itself lets True pass as a number."""
    values, defaults = flat(c), flat(default_config())
    if unknown := sorted(values.keys() - defaults.keys()):
        raise ConfigError(no_field(unknown[0]))
    if missing := sorted(defaults.keys() - values.keys()):
        raise ConfigError(f"config lacks the field {missing[0]!r}: start from default_config(), which has all of them")
    for name, default in defaults.items():
        value, kind = values[name], bool if default is None else type(default)
        if (default is None and value is None) or (type(value) is str and value in WORDS_OF.get(name, ())):
            continue
        whole = kind is float and type(value) is int
        words = "".join(f" or {word!r}" for word in WORDS_OF.get(name, ()))
        _need(type(value) is kind or whole, name, KINDS[kind] + words, value, f"its type is {kind.__name__}{words}")
        if isinstance(value, str):
            bad = any((ord(char) < 32 and name != "sample_prompt") or 0xD800 <= ord(char) < 0xE000 for char in value)
            _need(not bad, name, "text without control characters, in UTF-8", value, "remove those that show as codes")
        elif kind is float:
            _need(math.isfinite(value), name, "a finite number", value, "--help shows the default")
        else:
            _need(value < 2**31, name, "less than 2^31", value, "lower it")


def _check_model(c: Config) -> None:
    m, heads, kv = c.model, c.model.num_attention_heads, c.model.num_key_value_heads
    near = math.gcd(heads, kv)
    _need(heads % kv == 0, "model.num_key_value_heads", f"a divisor of num_attention_heads={heads}", kv, f"use {near}")
    if not m.head_dim:
        expected = f"a multiple of num_attention_heads={heads}"
        _need(m.hidden_size % heads == 0, "model.hidden_size", expected, m.hidden_size, "or set model.head_dim")
    h = head_dim(c)
    _need(h % 2 == 0, "model.head_dim", "an even number, since channels rotate in pairs", h, f"use {h + 1}")
    if c.attention == "cudnn":
        change = "set attention='xla', or change it"
        _need(c.model_dtype == "bfloat16", "model_dtype", "bfloat16 with attention='cudnn'", c.model_dtype, change)
        _need(h % 8 == 0 and h <= 256, "model.head_dim", "a multiple of 8 up to 256 with cudnn", h, change)
    kind, default = m.rope_scaling, default_config().model
    for name in (f"rope_{field}" for field in ROPE_FIELDS if field not in ROPE_USES[kind]):
        expected = f"{default[name]} with rope_scaling={kind!r}, which does not use it"
        _need(m[name] == default[name], f"model.{name}", expected, m[name], "leave it out, or set model.rope_scaling")
    if kind != "none":
        change = "it is the new context length divided by the old one"
        _need(m.rope_factor > 1, "model.rope_factor", f"more than 1 with rope_scaling={kind!r}", m.rope_factor, change)
    low, high = m.rope_low_freq_factor, m.rope_high_freq_factor
    _need(low > 0, "model.rope_low_freq_factor", "more than 0", low, "Llama 3 uses 1")
    _need(high > low, "model.rope_high_freq_factor", f"more than rope_low_freq_factor={low}", high, "Llama 3 uses 4")


def _check_recipe(c: Config) -> None:
    recipe, defaults = c.recipe, default_config()
    unused = {
        "fp8_amax_history fp8_margin": recipe == "fp8_hybrid",
        "block_scaled_products": recipe in BLOCK_SCALED,
        "skip_quant_first_layers skip_quant_last_layers": recipe != "bf16",
        "matmul_dtype gradient_dtype": recipe == "bf16" or c.skip_quant_first_layers + c.skip_quant_last_layers > 0,
    }
    for names, used in unused.items():
        for name in names.split() if not used else ():
            expected = f"{defaults[name]!r} with recipe={recipe!r}, which does not use it"
            _need(c[name] == defaults[name], name, expected, c[name], "leave it out, or choose another recipe")
    if recipe == "bf16":
        return
    skipped, layers = c.skip_quant_first_layers + c.skip_quant_last_layers, c.model.num_hidden_layers
    expected = f"fewer than the {layers} layers, both together"
    _need(skipped < layers, "skip_quant_first_layers + skip_quant_last_layers", expected, skipped, "lower them")
    for name in RECOMPUTE_PARTS if recipe.startswith("fp8_") else ():
        expected = f"False with recipe={recipe!r}, whose blocks are saved or computed again as a whole"
        _need(not c[name], name, expected, c[name], "leave it out, or set recompute_block=True")
    change = "set recompute_block=True, or leave the blocks' recipe alike"
    expected = "True with skip_quant_*, since blocks of two kinds save different things"
    _need(c.recompute_block or not skipped, "recompute_block", expected, c.recompute_block, change)
    if recipe.startswith("fp8_"):
        _check_fp8(c, skipped)
    else:
        for name, width in _widths(c).items():
            expected = f"a multiple of {WIDTHS} with recipe={recipe!r}"
            _need(width % WIDTHS == 0, name, expected, width, f"use {-(-width // WIDTHS) * WIDTHS}")


def _check_fp8(c: Config, skipped: int) -> None:
    for name, width in _widths(c).items():
        expected = f"a multiple of 16 with recipe={c.recipe!r}, which float8 products need"
        _need(width % 16 == 0, name, expected, width, f"use {-(-width // 16) * 16}")
    tokens = c.per_device_batch_size * c.sequence_len
    expected = f"a multiple of 16 tokens with recipe={c.recipe!r}, which float8 products need"
    _need(tokens % 16 == 0, "per_device_batch_size x sequence_len", expected, tokens, "change one of them")
    expected, got = f"'none' with recipe={c.recipe!r}, whose weights travel in fp8 anyway", c.zero_quantized_weights
    _need(got == "none", "zero_quantized_weights", expected, got, "leave it out")
    expected = "False with skip_quant_*: those layers need their 16-bit weights"
    _need(not (skipped and c.persistent_quants), "persistent_quants", expected, True, "leave one of them out")


def _widths(c: Config) -> dict[str, int]:
    """Widths of the blocks' matrices by the field that they follow from."""
    m, h = c.model, head_dim(c)
    heads = {"model.num_attention_heads x head_dim": m.num_attention_heads * h}
    kv = {"model.num_key_value_heads x head_dim": m.num_key_value_heads * h}
    return {"model.hidden_size": m.hidden_size, "model.intermediate_size": m.intermediate_size, **heads, **kv}


def _check_schedule(c: Config) -> None:
    alone = not (c.warmup_steps and c.warmup_ratio)
    _need(alone, "warmup_ratio", f"0 beside warmup_steps={c.warmup_steps}", c.warmup_ratio, "set only one of them")
    if c.lr_scheduler_type == "wsd":
        expected, change = "1 or more with lr_scheduler_type='wsd'", "a fifth of all steps is usual"
        _need(c.cooldown_steps > 0, "cooldown_steps", expected, c.cooldown_steps, change)
    else:
        expected = f"0 with lr_scheduler_type={c.lr_scheduler_type!r}, which does not use it"
        _need(c.cooldown_steps == 0, "cooldown_steps", expected, c.cooldown_steps, "leave it out, or use 'wsd'")
    if c.max_steps:
        expected = f"1 beside max_steps={c.max_steps}, which decides"
        _need(c.num_epochs == 1, "num_epochs", expected, c.num_epochs, "set one of them: max_steps=0 counts epochs")
        planned, expected = warmup_steps(c, c.max_steps) + c.cooldown_steps, f"at most max_steps={c.max_steps}"
        _need(planned <= c.max_steps, "warmup_steps + cooldown_steps", expected, planned, "shorten them")


def _check_optimizer(c: Config) -> None:
    if c.optimizer == "normuon":
        return
    for name, default in default_config().items():
        if name.startswith("muon_"):
            expected = f"{default!r} with optimizer={c.optimizer!r}, which does not use it"
            _need(c[name] == default, name, expected, c[name], "leave it out, or set optimizer='normuon'")


def _check_sizes(c: Config) -> None:
    tokens, chunks = c.per_device_batch_size * c.sequence_len, c.lmhead_chunks
    _need(tokens < 2**31, "per_device_batch_size x sequence_len", "less than 2^31 tokens", tokens, "lower one of them")
    expected = f"a divisor of per_device_batch_size x sequence_len = {tokens}"
    change = f"use {divisor(tokens, min(chunks, tokens))}"
    _need(tokens % chunks == 0, "lmhead_chunks", expected, chunks, change)
    for name in RECOMPUTE_PARTS if c.recompute_block else ():
        expected = "False with recompute_block=True, which computes all of it again"
        _need(not c[name], name, expected, c[name], "leave it out, or set recompute_block=False")
    shards = c.gpus // c.dp_replicate_size if c.gpus and c.dp_shard_size == -1 else c.dp_shard_size
    if c.dp_replicate_size > 1 and (c.zero_level > 1 or c.shard_weights or c.shard_gradients or c.shard_outer):
        expected = "2 or more, to shard over, with zero_level above 1, shard_weights or shard_gradients"
        _need(shards != 1, "dp_shard_size", expected, 1, "lower dp_replicate_size or zero_level, or raise gpus")


def divisor(n: int, at_least: int) -> int:
    """The smallest divisor of n that is so large at least."""
    pairs = ((i, n // i) for i in range(1, math.isqrt(n) + 1) if n % i == 0)
    return min(d for pair in pairs for d in pair if d >= at_least)


def head_dim(c: Config) -> int:
    """Channels of an attention head."""
    return c.model.head_dim or c.model.hidden_size // c.model.num_attention_heads


def warmup_steps(c: Config, total_steps: int) -> int:
    """Steps of warmup in a run of `total_steps`."""
    return c.warmup_steps or round(c.warmup_ratio * total_steps)


def model_config(c: Config) -> LlamaConfig:
    """The frozen architecture of a checked config."""
    sizes = c.model.to_dict() | {"head_dim": head_dim(c)}
    scaling = RopeScaling(sizes.pop("rope_scaling"), **{name: sizes.pop(f"rope_{name}") for name in ROPE_FIELDS})
    recompute = Recompute(**{name.removeprefix("recompute_"): c[name] for name in RECOMPUTE_PARTS})
    precision = Precision(
        recipe=c.recipe,
        matmul_dtype=c.matmul_dtype,
        gradient_dtype=c.gradient_dtype,
        amax_history=c.fp8_amax_history,
        margin=c.fp8_margin,
        skip_first=c.skip_quant_first_layers,
        skip_last=c.skip_quant_last_layers,
        kernels=c.kernels,
        block_scaled_products=c.block_scaled_products,
    )
    return LlamaConfig(**sizes, rope_scaling=scaling, attention=c.attention, recompute=recompute, precision=precision)


def check_output_dir(path: str) -> Path:
    """The output folder as an absolute path; ConfigError if it cannot be made or written. Leaves nothing behind."""
    change = "choose another path"
    _need("://" not in path, "output_dir", "a folder of this machine", path, "mount the storage and give its path")
    try:
        folder = Path(path).expanduser().absolute()
        for place in (folder, folder / "checkpoints"):
            nearest = next(p for p in (place, *place.parents) if p.exists(follow_symlinks=False))
            _need(nearest.is_dir(), "output_dir", "a folder", str(place), f"{nearest} is a file; {change}")
            tempfile.TemporaryFile(dir=nearest).close()  # has no name, or loses it at once; asks the file system itself
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder for "~"
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"output_dir: expected a folder that can be written, got {path!r} ({reason}); {change}"
        ) from error
    return folder


def restored_config(values: dict) -> Config:
    """The config that a checkpoint stores, as `to_dict` gave it; fields that are newer than it get their defaults.

    Raises ConfigError for a field that this version does not know, or of another type.
    """
    c = default_config()
    try:
        c.update(values)
        _check_types(c)
    except (AttributeError, KeyError, TypeError, ConfigError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"checkpoint: expected the fields of this version, got a config that has others ({reason}); "
            "use the version of surojax that wrote it"
        ) from error
    return c
