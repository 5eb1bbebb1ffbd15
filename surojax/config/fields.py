"""Every option of a run, in one commented list.

`default_config()` is locked, so a typo in a config file, a notebook or a flag is an error. `checks.check` refuses bad
values, and `flags` reads config files and command lines. Only the commands use the ConfigDict: the code below them
takes a `Model` (`assembly.model`), a `Placement` and keywords.
"""

import difflib
from typing import Any

import ml_collections
from ml_collections import config_dict

from surojax import refusals

type Config = Any  # an ml_collections.ConfigDict with the fields of `default_config`; its values have no static types


def either(default: bool) -> config_dict.FieldReference:
    """Returns a field that takes True, False or one of its words in WORDS_OF, so not values of one type only."""
    return config_dict.FieldReference(default, field_type=object)


def default_config() -> Config:
    """Returns all fields with their defaults; locked. The comment of each line is the help text of its field."""
    c = ml_collections.ConfigDict()

    # Run
    c.output_dir = "runs/default"  # checkpoints, metrics.jsonl and TensorBoard events are written here
    c.seed = 0  # determines the initial weights and the order of the data
    c.gpus = 1  # accelerators (or virtual CPU devices) to use; 0 = all available
    c.max_steps = 0  # optimizer steps; 0 = num_epochs passes over the data
    c.num_epochs = 1  # passes over the training data when max_steps is 0; a pass has as many samples as all datasets
    c.eval_steps = 100  # steps between evaluations; 0 = only at the end; with model_path there is one before step 1 too
    c.eval_batches = 20  # largest number of batches in an evaluation, spread over the held-out text
    c.save_steps = 500  # steps between checkpoints; 0 = write one only at the end
    c.save_total_limit = 2  # number of checkpoints kept, the newest ones; one that is being read is kept longer
    c.log_steps = 10  # steps between printed lines, and one a minute at least; a terminal shows every step
    c.quiet = False  # print no steps and evaluations; metrics.jsonl has them
    c.rates_file = "~/.cache/surojax/rates.json"  # what steps took on GPUs, for plan and fit; "" = not written or read
    c.resume_from_checkpoint = "auto"  # "auto" = newest in output_dir if any, "no" = start anew, or a checkpoint folder
    c.sample_prompt = ""  # text continued at the end of training; "" = the beginning of the held-out text
    c.sample_tokens = 200  # tokens sampled at the end; 0 = none
    c.sample_temperature = 0.8  # 0 = greedy

    # Data
    c.data = ""  # text, instructions or conversations: file, folder, glob, comma list; "stdlib" = Python's own source
    c.eval_data = ""  # files for evaluation, like data; "" = documents or rows held out from data
    c.text_field = "text"  # field of a .jsonl line that contains the document
    c.datasets = ()  # instead of data: a list of dict(path=..., weight=..., ...), as a flag in JSON; data/datasets.py
    c.validation_datasets = ()  # each is evaluated by itself; a list like datasets, with an optional name
    c.data_cache = "~/.cache/surojax"  # folder for tokenised data; what is in it may be deleted at any time
    c.sample_packing = False  # several documents in a row, separated by attention masks and positions
    c.on_long = "cut"  # examples longer than sequence_len: "cut" or "drop"; text without packing is never too long
    c.on_bad_row = "error"  # rows that cannot be used: "error" = end the run, "skip" = leave out and count
    c.train_on = "assistant"  # what the loss counts in conversations: "assistant", "last" (its last turn) or "all"
    c.chat_template = ""  # "chatml", "llama3", "mistral", "gemma" or a Jinja file; "" = the tokenizer's own
    c.system_prompt = ""  # for conversations and instructions that have none of their own
    c.tokenizer = "bytes"  # "bytes" (with model_path: the model's own), a tokenizer.json, its folder, or a .gguf file
    c.sequence_len = 512  # tokens of a training sequence
    c.per_device_batch_size = 1  # sequences per GPU and microbatch; with cp_size, tp_size or pp_size, per so many GPUs
    c.gradient_accumulation_steps = 1  # microbatches per step; effective batch = this x batch size x data-parallel GPUs

    # Model
    c.model_path = ""  # model to start from: Hugging Face folder or name, .gguf file; sets the model fields; "" = none
    c.from_scratch = False  # model_path: take the model's sizes only, and draw new weights
    c.untied_head = False  # model_path: train the head that its files have apart, though config.json ties it
    c.model = ml_collections.ConfigDict()
    c.model.model_type = "llama"  # family: llama (with Mistral, Qwen, SmolLM3 and Gemma, by the fields below)
    c.model.vocab_size = 32000  # rows of the embedding; at least the tokenizer's vocabulary
    c.model.hidden_size = 768  # width of the residual stream
    c.model.intermediate_size = 2048  # width inside the MLP
    c.model.num_hidden_layers = 12  # decoder blocks
    c.model.num_attention_heads = 12  # query heads
    c.model.num_key_value_heads = 12  # key/value heads; fewer than query heads = grouped-query attention
    c.model.head_dim = 0  # channels of a head; 0 = hidden_size / num_attention_heads
    c.model.rms_norm_eps = 1e-5  # added to the mean square in RMSNorm
    c.model.rope_theta = 10000.0  # base of the rotary frequencies
    c.model.rope_scaling = "none"  # "none", "linear" (position interpolation), "llama3" or "yarn"
    c.model.rope_factor = 1.0  # how much longer the context becomes, for linear, llama3 and yarn
    c.model.rope_low_freq_factor = 1.0  # llama3: wavelengths above original length / this are stretched
    c.model.rope_high_freq_factor = 4.0  # llama3: wavelengths below original length / this are kept
    c.model.rope_original_max_position_embeddings = 8192  # llama3, yarn: context length before stretching
    c.model.rope_attention_factor = 0.0  # yarn: multiplies queries and keys; 0 = 0.1 ln(rope_factor) + 1
    c.model.rope_beta_fast = 32.0  # yarn: frequencies that turn more often in the original context are kept
    c.model.rope_beta_slow = 1.0  # yarn: frequencies that turn less often in it are stretched
    c.model.rope_truncate = True  # yarn: the bounds between these are rounded to whole pairs of channels
    c.model.rope_partial_rotary_factor = 1.0  # fraction of a head's channels that rotate
    c.model.rope_llama_4_scaling_beta = 0.0  # queries grow by beta ln(1 + floor(position / original length)); 0 = not
    c.model.rope_local_base_freq = 0.0  # base of the layers with a window, unscaled (Gemma 3); 0 = as the other layers
    c.model.no_rope_layer_interval = 0  # every n-th layer has no rotary embedding (SmolLM3: 4); 0 = all have it
    c.model.tie_word_embeddings = False  # the head shares the embedding's weights
    c.model.attention_bias = False  # bias on queries, keys and values (Qwen2)
    c.model.qk_norm = False  # RMSNorm on each head's queries and keys (Qwen3, Gemma 3)
    c.model.norm_plus_one = False  # RMSNorm multiplies by 1 + its weights, which start at 0 (Gemma)
    c.model.sandwich_norms = False  # RMSNorm also on what attention and MLP add to the residual stream (Gemma 2, 3)
    c.model.hidden_act = "silu"  # of the MLP's gate: "silu" or "gelu_pytorch_tanh" (Gemma)
    c.model.scale_embedding = False  # the embedding is multiplied by sqrt(hidden_size) (Gemma)
    c.model.query_pre_attn_scalar = 0.0  # attention scores are divided by its square root; 0 = head_dim
    c.model.attn_logit_softcapping = 0.0  # attention scores become cap x tanh(score / cap) (Gemma 2: 50); 0 = not
    c.model.final_logit_softcapping = 0.0  # likewise the logits (Gemma 2: 30); 0 = not
    c.model.sliding_window = 0  # latest positions that a token attends to (Mistral: 4096); 0 = all of them
    c.model.sliding_window_pattern = 0  # every n-th layer attends to all positions (Gemma 3: 6, gpt-oss: 2); 0 = none
    c.model.initializer_range = 0.02  # standard deviation of the initial weights

    # Numbers
    c.model_dtype = "bfloat16"  # work weights, activations, products: bfloat16 or float32 (products: TF32 on GPUs)
    c.master_dtype = "float32"  # the weights the optimizer updates; bfloat16 is rounded stochastically
    c.accum_dtype = "float32"  # gradient accumulators
    c.opt_m_dtype = "float32"  # first moments (adamw8bit: only those of vectors) and the momentum of normuon
    c.opt_v_dtype = "float32"  # second moments (adamw8bit: only those of vectors; normuon: only those of adamw)
    c.attention = "auto"  # "auto", "xla", or flash attention (NVIDIA, 16-bit): "cudnn", or "mosaic" for sample_packing
    c.kernels = "xla"  # between products: "xla" = XLA's fusions, "mosaic" = our kernels (NVIDIA), "auto" = ours on GPUs

    # Recipe: the blocks' matrix products
    c.recipe = "bf16"  # bf16, fp8_hybrid (delayed scaling), fp8_current (just in time), mxfp8 or nvfp4
    c.matmul_dtype = ""  # recipe bf16: operands of products, bfloat16 or float32; "" = model_dtype
    c.gradient_dtype = ""  # recipe bf16: gradients in the backward pass's products; "" = matmul_dtype
    c.fp8_amax_history = 16  # fp8_hybrid: a scale follows from the largest magnitude in this many steps
    c.fp8_margin = 0  # fp8_hybrid: binades left free above the largest magnitude seen, 0 to 8
    c.block_scaled_products = "auto"  # mxfp8, nvfp4: "native" (sm_100, sm_120), "emulated", "auto" = native on GPUs
    c.skip_quant_first_layers = 0  # number of first blocks that use recipe bf16
    c.skip_quant_last_layers = 0  # number of last blocks that use recipe bf16

    # Adapters: low-rank updates of a frozen base
    c.lora = False  # train adapters of the blocks' matrices; all else is frozen
    c.lora_rank = 16  # columns and rows of an adapter's factors
    c.lora_alpha = 32.0  # an adapter's product is multiplied by this / lora_rank
    c.lora_dropout = 0.0  # probability that training leaves a number out of an adapter's input
    c.lora_target_modules = "all-linear"  # comma list: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj
    c.lora_dtype = ""  # adapters' work weights and products: bfloat16 or float32; "" = model_dtype
    c.use_rslora = False  # an adapter's product is multiplied by lora_alpha / sqrt(lora_rank)
    c.use_dora = False  # train also the length of each row of an adapted matrix
    c.lora_plus_ratio = 1.0  # learning rate of the factors b, which begin as zeros, over that of the others
    c.qlora_bnb = False  # frozen matrices in NF4: 4 bits with double quantisation, as bitsandbytes stores them
    c.qlora_fp8 = False  # frozen matrices in FP8 (e4m3) with a scale for each block of 128 x 128
    c.qlora_fp4 = False  # frozen matrices in NVFP4: 4 bits with a scale for each 16 neighbours
    c.lora_adapter = ""  # folder of an adapter in PEFT's format that training begins with; "" = new ones
    c.lora_base_adapter = ""  # folder of an adapter in PEFT's format that is merged into the base, frozen with it
    c.modules_to_save = ""  # comma list of outer layers that are trained whole: embed_tokens, lm_head

    # Memory
    c.zero_level = 1  # shards over dp_shard x cp: 1 = optimizer state, 2 = + gradients, 3 = + block weights
    c.shard_gradients = config_dict.placeholder(bool)  # shard the gradient accumulators; unset = zero_level >= 2
    c.shard_weights = config_dict.placeholder(bool)  # shard the block weights; unset = zero_level >= 3
    c.shard_outer = False  # shard embedding and head by token id, for large vocabularies; XLA then computes the loss
    c.offload_residual = False  # residuals (saved for the backward pass) in pinned host memory
    c.offload_optimizer = either(False)  # optimizer state in pinned host memory; "nvme" = in a file in nvme_path
    c.offload_master = either(False)  # master weights in pinned host memory; "nvme" = in a file in nvme_path
    c.offload_grads = False  # gradient accumulators of the blocks in host memory; several GPUs: needs shard_gradients
    c.offload_weights = False  # block weights in host memory; two layers at a time are in device memory
    c.zero_quantized_weights = "none"  # all-gather block matrices in 8 bits: none, fp8 or int8; needs zero_level=3
    c.persistent_quants = False  # store the 8-bit matrices in place of 16-bit ones; quantised once a step
    c.offload_quants = False  # store the 8-bit matrices in pinned host memory; needs persistent_quants
    c.use_all_to_all_reduce = False  # reduce gradients by an all-to-all, then a float32 sum on the shard's GPU
    c.zero_quantized_gradients = False  # all-to-all reduce, with the blocks' matrices in int8 (one GPU: no effect)
    c.memcpy_all_gather = False  # all-gather with the GPUs' copy engines within a machine (NCCL 2.29 or later)
    c.memcpy_send_recv = False  # all-to-all with the GPUs' copy engines within a machine
    c.resident_layers = 0  # offload_weights: first layers (of each stage) whose weights stay in device memory
    c.nvme_path = ""  # folder on an NVMe disk for state offloaded to "nvme"; one run at a time
    c.recompute_block = True  # save only each block's input and recompute the block in the backward pass
    c.recompute_norm = False  # recompute_block=False: recompute the norms' outputs instead of saving them
    c.recompute_swiglu = False  # recompute_block=False: recompute silu(gate) * up
    c.recompute_ffn = False  # recompute_block=False: recompute silu(gate) * up, gate and up
    c.recompute_att = False  # recompute_block=False: recompute queries, keys, values and attention
    c.microbatches_per_fetch = 1  # microbatches that each fetch of a layer serves; divides gradient_accumulation_steps
    c.overlap_update = False  # update a layer under the next step's first forward pass; for state in host memory
    c.sequence_chunks = 1  # chunks of the sequence that a block computes one after another, exactly; for long sequences
    c.lmhead_chunks = 1  # chunks of the tokens in head and loss; more chunks = less memory for logits

    # Mesh: GPUs = dp_replicate_size x dp_shard_size x cp_size x tp_size x pp_size
    c.dp_replicate_size = 1  # number of replicas of the sharded state
    c.dp_shard_size = -1  # GPUs over which each replica is sharded, times cp_size; -1 = all that the other sizes leave
    c.tp_size = 1  # GPUs that share the products of each sequence: a part of the heads, MLP and vocabulary on each
    c.cp_size = 1  # GPUs that each have a part of every sequence; state is sharded over dp_shard_size x cp_size
    c.cp_method = "ulysses"  # attention with cp_size: "ulysses" (divides the heads), "allgather" or "ring"
    c.pp_size = 1  # stages of consecutive layers, each on GPUs of its own; microbatches go from stage to stage
    c.pp_schedule = "gpipe"  # gpipe (all microbatches forward, then backward) or 1f1b (fewer in flight)

    # Optimizer
    c.optimizer = "adamw"  # adamw, adamw8bit (8-bit moments of matrices), normuon (blocks' matrices; others: adamw)
    c.learning_rate = 3e-4  # the peak, after the warmup
    c.lr_scheduler_type = "cosine"  # after the warmup: cosine, linear, or wsd (constant, then a linear cooldown)
    c.warmup_steps = 0  # steps of linear warmup; 0 = warmup_ratio decides
    c.warmup_ratio = 0.0  # warmup as a fraction of all steps
    c.cooldown_steps = 0  # wsd: steps of linear decay at the end
    c.final_lr_fraction = 0.1  # learning rate at the end, as a fraction of the peak
    c.weight_decay = 0.1  # decoupled, on matrices only
    c.z_loss = 0.0  # weight of logsumexp(logits)^2 in the gradients (PaLM: 1e-4); reported losses are without it
    c.max_grad_norm = 1.0  # clip gradients to this global norm; 0 = never
    c.adamw_beta1 = 0.9  # decay of the first moment
    c.adamw_beta2 = 0.95  # decay of the second moment
    c.adamw_epsilon = 1e-8  # added to the square root of the second moment
    c.muon_learning_rate = 0.0  # normuon: the peak for the blocks' matrices; 0 = learning_rate
    c.muon_momentum = 0.95  # normuon: decay of the momentum of the blocks' matrices
    c.muon_beta2 = 0.95  # normuon: decay of the mean squares of their rows
    c.muon_ns_steps = 5  # normuon: steps of the orthogonalisation, 1 to 10
    return c.lock()


# KINDS: each type in words, for errors. WORDS_OF: words that a field takes in addition to True and False, see `either`.
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list of dicts"}
WORDS_OF: dict[str, tuple[str, ...]] = {"offload_optimizer": ("nvme",), "offload_master": ("nvme",)}
RECOMPUTE_PARTS = refusals.RECOMPUTE_PARTS


def flat(c: Config) -> dict[str, Any]:
    """Returns {field name: value}; the names of the architecture's fields are `model.NAME`."""
    values = dict(c.items())
    model = values.pop("model", None)
    if not isinstance(model, ml_collections.ConfigDict):
        return values
    return values | {f"model.{name}": value for name, value in model.items()}


DEFAULTS = flat(default_config())


def no_field(name: str) -> str:
    """Returns the error message for an unknown field, with the field that was probably meant."""
    names = list(flat(default_config()))
    near = difflib.get_close_matches(name, [*names, *(n.removeprefix("model.") for n in names)], n=1, cutoff=0.67)
    full = near and (near[0] if near[0] in names else f"model.{near[0]}")
    return f"config has no field {name!r}: " + (f"did you mean {full!r}?" if full else "--help lists every field")


def head_dim(c: Config) -> int:
    """Number of channels of an attention head."""
    return c.model.head_dim or c.model.hidden_size // c.model.num_attention_heads


def tokens_of_piece(c: Config) -> int:
    """Returns the tokens of each of the pieces whose pairs cp_method allgather and ring compute; 0: whole sequences."""
    return c.sequence_len // (2 * c.cp_size) if c.cp_size > 1 and c.cp_method != "ulysses" else 0


def gpus_per_sequence(c: Config) -> int:
    """Number of GPUs that share the same sequences: a batch is divided over groups of so many."""
    return c.cp_size * c.tp_size * c.pp_size


def mesh_sizes(c: Config) -> dict[str, int]:
    """The keywords of `placement.mesh.mesh_shape`."""
    sizes = {name: c[name] for name in ("dp_replicate_size", "dp_shard_size", "cp_size", "tp_size", "pp_size")}
    return sizes | {"kv_heads": c.model.num_key_value_heads}


def warmup_steps(c: Config, total_steps: int) -> int:
    """Number of warmup steps in a run of `total_steps`."""
    return c.warmup_steps or round(c.warmup_ratio * total_steps)
