"""The config's fields that no other room declares, by section.

Each is declared once, with its comment, its default, and the values that it may have. Where tensors are stored is
declared in placement/table.py, the options of optimizers in optim/, those of objectives in step/. fields.py lists all.
"""

import dataclasses

from surojax.declared import (
    AT_LEAST_0,
    AT_LEAST_1,
    BELOW_1,
    FLOATS,
    FRACTION,
    NOT_EMPTY,
    POSITIVE,
    Range,
    at_most,
    declare,
)
from surojax.families.registry import ARCHITECTURES
from surojax.models.attention import IMPLEMENTATIONS
from surojax.models.experts import SCORING
from surojax.models.operations import ACTIVATIONS
from surojax.models.rotary import ROPE_USES
from surojax.numerics.recipes import BLOCK_SCALED_PRODUCTS, KERNELS
from surojax.optim.learning_rate import SCHEDULES
from surojax.optim.optimizers import OPTIMIZERS
from surojax.parallel.context import METHODS
from surojax.parallel.schedule import SCHEDULES as STAGE_SCHEDULES
from surojax.run.trackers import KNOWN as KNOWN_TRACKERS
from surojax.sizes import MOST_GPUS
from surojax.step.objectives import CROSS_ENTROPY, OBJECTIVES

GPUS = at_most(MOST_GPUS, f"{MOST_GPUS:,} GPUs")
MARGINS = Range(lambda v: 0 <= v <= 8, "0 to 8 binades", "each one more makes small numbers coarser; 0 is usual")
SHARDS = Range(lambda v: v == -1 or v >= 1, "1 or more, or -1", "-1 is all that the other sizes leave")


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The length of a run, and the files that it writes."""

    # checkpoints, metrics.jsonl and trackers' files are written here
    output_dir: str = declare("runs/default", NOT_EMPTY)
    # determines the initial weights and the order of the data
    seed: int = declare(0, AT_LEAST_0)
    # accelerators (or virtual CPU devices) to use; 0 = all available
    gpus: int = declare(1, AT_LEAST_0, GPUS)
    # optimizer steps; 0 = num_epochs passes over the data, and what fills the last step
    max_steps: int = declare(0, AT_LEAST_0)
    # passes over the training data when max_steps is 0; a pass has as many samples as all datasets
    num_epochs: int = declare(1, AT_LEAST_1)
    # steps between evaluations; 0 = only at the end; with model_path there is one before step 1 too
    eval_steps: int = declare(100, AT_LEAST_0)
    # evaluations in a row without a lower loss, of the first data set that is evaluated, that end a run; 0 = none do
    early_stopping_patience: int = declare(0, AT_LEAST_0)
    # largest number of batches in an evaluation, spread over the held-out text
    eval_batches: int = declare(20, AT_LEAST_1)
    # steps between checkpoints; 0 = write one only at the end
    save_steps: int = declare(500, AT_LEAST_0)
    # number of checkpoints kept, the newest ones; one that is being read is kept longer
    save_total_limit: int = declare(2, AT_LEAST_1)
    # steps between printed lines, and one a minute at least; a terminal shows every step
    log_steps: int = declare(10, AT_LEAST_1)
    # print no steps and evaluations; metrics.jsonl has them
    quiet: bool = False
    # trackers, a comma list: tensorboard, wandb, trackio, mlflow; "" = none
    report_to: str = declare("tensorboard", KNOWN_TRACKERS)
    # what steps took on GPUs, for plan and fit; "" = not written or read
    rates_file: str = "~/.cache/surojax/rates.json"
    # "auto" = newest in output_dir if any, "no" = start anew, or a checkpoint folder
    resume_from_checkpoint: str = declare("auto", NOT_EMPTY)
    # text continued at the end of training; "" = the beginning of the held-out text
    sample_prompt: str = ""
    # tokens sampled at the end; 0 = none
    sample_tokens: int = declare(200, AT_LEAST_0, at_most(2**24, "2^24"))
    # 0 = greedy
    sample_temperature: float = declare(0.8, AT_LEAST_0)


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """The texts that a run reads, and how they become rows of tokens."""

    # text, instructions or conversations: file, folder, glob, comma list; "stdlib" = Python's own source
    data: str = ""
    # files for evaluation, like data; "" = documents or rows held out from data
    eval_data: str = ""
    # field of a .jsonl line that contains the document
    text_field: str = declare("text", NOT_EMPTY)
    # instead of data: a list of dict(path=..., weight=..., ...), as a flag in JSON; data/datasets.py
    datasets: tuple = ()
    # each is evaluated by itself; a list like datasets, with an optional name
    validation_datasets: tuple = ()
    # folder for tokenised data; what is in it may be deleted at any time
    data_cache: str = declare("~/.cache/surojax", NOT_EMPTY)
    # several documents in a row, separated by attention masks and positions
    sample_packing: bool = False
    # examples longer than sequence_len: "cut" or "drop"; text without packing is never too long
    on_long: str = declare("cut", choices=("cut", "drop"))
    # rows that cannot be used: "error" = end the run, "skip" = leave out and count
    on_bad_row: str = declare("error", choices=("error", "skip"))
    # what the loss counts in conversations: "assistant", "last" (its last turn) or "all"
    train_on: str = declare("assistant", choices=("assistant", "last", "all"))
    # "chatml", "llama3", "mistral", "gemma" or a Jinja file; "" = the tokenizer's own
    chat_template: str = ""
    # for conversations and instructions that have none of their own
    system_prompt: str = ""
    # "bytes" (with model_path: the model's own), a tokenizer.json, its folder, or a .gguf file
    tokenizer: str = declare("bytes", NOT_EMPTY)
    # tokens of a training sequence
    sequence_len: int = declare(512, AT_LEAST_1)
    # sequences per GPU and microbatch; with cp_size, tp_size or pp_size, per so many GPUs
    per_device_batch_size: int = declare(1, AT_LEAST_1)
    # microbatches per step; effective batch = this x batch size x data-parallel GPUs
    gradient_accumulation_steps: int = declare(1, AT_LEAST_1)


@dataclasses.dataclass(frozen=True)
class StartSettings:
    """The model that a run begins with."""

    # model to start from: Hugging Face folder or name, .gguf file; sets the model fields; "" = none
    model_path: str = ""
    # model_path: take the model's sizes only, and draw new weights
    from_scratch: bool = False
    # model_path: train the head that its files have apart, though config.json ties it
    untied_head: bool = False


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The architecture."""

    # family: llama (with Mistral, Qwen, SmolLM3 and Gemma, by the fields below)
    model_type: str = declare("llama", choices=tuple(ARCHITECTURES))
    # rows of the embedding; at least the tokenizer's vocabulary
    vocab_size: int = declare(32000, AT_LEAST_1)
    # width of the residual stream
    hidden_size: int = declare(768, AT_LEAST_1)
    # width inside the MLP
    intermediate_size: int = declare(2048, AT_LEAST_1)
    # experts of each MLP, of which every token chooses some; 0 = one MLP for all tokens
    num_experts: int = declare(0, AT_LEAST_0)
    # experts that a token chooses
    num_experts_per_tok: int = declare(0, AT_LEAST_0)
    # width inside an expert; 0 = intermediate_size
    moe_intermediate_size: int = declare(0, AT_LEAST_0)
    # weights of the chosen experts are divided by their sum
    norm_topk_prob: bool = False
    # what a router makes of its logits: "softmax", or "sigmoid" with a bias for the choice that is not trained
    scoring_func: str = declare("softmax", choices=SCORING)
    # weights of the chosen experts are multiplied by this
    routed_scaling_factor: float = declare(1.0, POSITIVE)
    # experts that every token uses, as one MLP of so many times moe_intermediate_size
    n_shared_experts: int = declare(0, AT_LEAST_0)
    # first layers with one MLP of intermediate_size instead of experts
    first_k_dense_replace: int = declare(0, AT_LEAST_0)
    # biases on the router's logits and on the experts' products (gpt-oss)
    expert_bias: bool = False
    # decoder blocks
    num_hidden_layers: int = declare(12, AT_LEAST_1)
    # query heads
    num_attention_heads: int = declare(12, AT_LEAST_1)
    # key/value heads; fewer than query heads = grouped-query attention
    num_key_value_heads: int = declare(12, AT_LEAST_1)
    # channels of a head; 0 = hidden_size / num_attention_heads
    head_dim: int = declare(0, AT_LEAST_0)
    # added to the mean square in RMSNorm
    rms_norm_eps: float = declare(1e-5, POSITIVE)
    # base of the rotary frequencies
    rope_theta: float = declare(10000.0, POSITIVE)
    # "none", "linear" (position interpolation), "llama3" or "yarn"
    rope_scaling: str = declare("none", choices=tuple(ROPE_USES))
    # how much longer the context becomes, for linear, llama3 and yarn
    rope_factor: float = 1.0
    # llama3: wavelengths above original length / this are stretched
    rope_low_freq_factor: float = 1.0
    # llama3: wavelengths below original length / this are kept
    rope_high_freq_factor: float = 4.0
    # llama3, yarn: context length before stretching
    rope_original_max_position_embeddings: int = declare(8192, AT_LEAST_1)
    # yarn: multiplies queries and keys; 0 = 0.1 ln(rope_factor) + 1
    rope_attention_factor: float = declare(0.0, AT_LEAST_0)
    # yarn: frequencies that turn more often in the original context are kept
    rope_beta_fast: float = 32.0
    # yarn: frequencies that turn less often in it are stretched
    rope_beta_slow: float = declare(1.0, POSITIVE)
    # yarn: the bounds between these are rounded to whole pairs of channels
    rope_truncate: bool = True
    # fraction of a head's channels that rotate
    rope_partial_rotary_factor: float = declare(1.0, POSITIVE)
    # queries grow by beta ln(1 + floor(position / original length)); 0 = not
    rope_llama_4_scaling_beta: float = declare(0.0, AT_LEAST_0)
    # base of the layers with a window, unscaled (Gemma 3); 0 = as the other layers
    rope_local_base_freq: float = declare(0.0, AT_LEAST_0)
    # every n-th layer has no rotary embedding (SmolLM3: 4); 0 = all have it
    no_rope_layer_interval: int = declare(0, AT_LEAST_0)
    # the head shares the embedding's weights
    tie_word_embeddings: bool = False
    # bias on queries, keys and values (Qwen2)
    attention_bias: bool = False
    # bias on the output of attention (gpt-oss)
    attention_out_bias: bool = False
    # each head's softmax has one more logit, which is learned and belongs to no position (gpt-oss)
    attention_sinks: bool = False
    # RMSNorm on each head's queries and keys (Qwen3, Gemma 3)
    qk_norm: bool = False
    # RMSNorm on queries and keys, of the channels of all heads together (OLMoE)
    qk_norm_whole: bool = False
    # RMSNorm multiplies by 1 + its weights, which start at 0 (Gemma)
    norm_plus_one: bool = False
    # RMSNorm also on what attention and MLP add to the residual stream (Gemma 2, 3)
    sandwich_norms: bool = False
    # of the MLP's gate: "silu", "gelu_pytorch_tanh" (Gemma) or "clamped_swiglu" (gpt-oss)
    hidden_act: str = declare("silu", choices=tuple(ACTIVATIONS))
    # the embedding is multiplied by sqrt(hidden_size) (Gemma)
    scale_embedding: bool = False
    # the embedding is multiplied by this (Granite: 12)
    embedding_multiplier: float = declare(1.0, POSITIVE)
    # what attention and MLP add to the residual stream is multiplied by this (Granite: 0.22)
    residual_multiplier: float = declare(1.0, POSITIVE)
    # the logits are divided by this (Granite: 6)
    logits_scaling: float = declare(1.0, POSITIVE)
    # attention scores are divided by its square root; 0 = head_dim
    query_pre_attn_scalar: float = declare(0.0, AT_LEAST_0)
    # attention scores become cap x tanh(score / cap) (Gemma 2: 50); 0 = not
    attn_logit_softcapping: float = declare(0.0, AT_LEAST_0)
    # likewise the logits (Gemma 2: 30); 0 = not
    final_logit_softcapping: float = declare(0.0, AT_LEAST_0)
    # latest positions that a token attends to (Mistral: 4096); 0 = all of them
    sliding_window: int = declare(0, AT_LEAST_0)
    # every n-th layer attends to all positions (Gemma 3: 6, gpt-oss: 2); 0 = none
    sliding_window_pattern: int = declare(0, AT_LEAST_0)
    # 1: a reward model, whose head computes one number; 0: a language model. With model_path the objective decides
    num_labels: int = declare(0, choices=(0, 1))
    # standard deviation of the initial weights
    initializer_range: float = declare(0.02, POSITIVE)


@dataclasses.dataclass(frozen=True)
class NumberSettings:
    """The implementations of attention and of the operations between products."""

    # "auto", "xla", or flash attention (NVIDIA, 16-bit): "cudnn", or "mosaic" for sample_packing
    attention: str = declare("auto", choices=IMPLEMENTATIONS)
    # between products: "xla" = XLA's fusions, "mosaic" = our kernels (NVIDIA), "auto" = ours on GPUs
    kernels: str = declare("xla", choices=KERNELS)


@dataclasses.dataclass(frozen=True)
class RecipeSettings:
    """Options of the recipes of matrix products."""

    # recipe bf16: operands of products, bfloat16 or float32; "" = model_dtype
    matmul_dtype: str = declare("", choices=("", *FLOATS))
    # recipe bf16: gradients in the backward pass's products; "" = matmul_dtype
    gradient_dtype: str = declare("", choices=("", *FLOATS))
    # fp8_hybrid: a scale follows from the largest magnitude in this many steps
    fp8_amax_history: int = declare(16, AT_LEAST_1, at_most(2**16))
    # fp8_hybrid: binades left free above the largest magnitude seen, 0 to 8
    fp8_margin: int = declare(0, MARGINS)
    # mxfp8, nvfp4: "native" (sm_100, sm_120), "emulated", "auto" = native on GPUs
    block_scaled_products: str = declare("auto", choices=BLOCK_SCALED_PRODUCTS)
    # number of first blocks that use recipe bf16
    skip_quant_first_layers: int = declare(0, AT_LEAST_0)
    # number of last blocks that use recipe bf16
    skip_quant_last_layers: int = declare(0, AT_LEAST_0)


@dataclasses.dataclass(frozen=True)
class AdapterSettings:
    """The sizes and places of adapters (LoRA)."""

    # train adapters of the blocks' matrices; all else is frozen
    lora: bool = False
    # columns and rows of an adapter's factors
    lora_rank: int = declare(16, AT_LEAST_1, at_most(2**16))
    # an adapter's product is multiplied by this / lora_rank
    lora_alpha: float = declare(32.0, POSITIVE)
    # probability that training leaves a number out of an adapter's input
    lora_dropout: float = declare(0.0, BELOW_1)
    # comma list of ends of modules' names: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj
    lora_target_modules: str = "all-linear"
    # adapters' work weights and products: bfloat16 or float32; "" = model_dtype
    lora_dtype: str = declare("", choices=("", *FLOATS))
    # an adapter's product is multiplied by lora_alpha / sqrt(lora_rank)
    use_rslora: bool = False
    # train also the length of each row of an adapted matrix
    use_dora: bool = False
    # learning rate of the factors b, which begin as zeros, over that of the others
    lora_plus_ratio: float = declare(1.0, POSITIVE)


@dataclasses.dataclass(frozen=True)
class AdapterSources:
    """The adapter that training begins with, and the matrices that are trained besides adapters."""

    # folder of an adapter in PEFT's format that training begins with; "" = new ones
    lora_adapter: str = ""
    # folder of an adapter in PEFT's format that is merged into the base, frozen with it
    lora_base_adapter: str = ""
    # comma list of outer layers that are trained whole: embed_tokens, lm_head; a reward model's score always is
    modules_to_save: str = ""


@dataclasses.dataclass(frozen=True)
class ExecutionSettings:
    """The values that a step computes again, the pieces in which it computes, and how XLA schedules it."""

    # save only each block's input and recompute the block in the backward pass
    recompute_block: bool = True
    # recompute_block=False: recompute the norms' outputs instead of saving them
    recompute_norm: bool = False
    # recompute_block=False: recompute silu(gate) * up
    recompute_swiglu: bool = False
    # recompute_block=False: recompute silu(gate) * up, gate and up
    recompute_ffn: bool = False
    # recompute_block=False: recompute queries, keys, values and attention
    recompute_att: bool = False
    # microbatches that each fetch of a layer serves; divides gradient_accumulation_steps
    microbatches_per_fetch: int = declare(1, AT_LEAST_1)
    # update a layer under the next step's first forward pass; for state in host memory or files; unset = if gradients,
    # residuals or weights are in files
    overlap_update: bool | None = None
    # chunks of the sequence that a block computes one after another, exactly; for long sequences
    sequence_chunks: int = declare(1, AT_LEAST_1)
    # chunks of the tokens in head and loss; more chunks = less memory for logits
    lmhead_chunks: int = declare(1, AT_LEAST_1)
    # of the step on GPUs: "overlap" = copies overlap with products, "default" = XLA's own, "exact" = as
    # "overlap", with one kernel for a product in every program, so that offloads should change no bit; untried on GPUs
    xla_options: str = declare("overlap", choices=("overlap", "exact", "default"))
    # CUDA graphs of a step on GPUs: "auto" = "none" if something is copied or sent beside products, else XLA's own;
    # "small" = of kernels, without loops and copies; "concurrent" = of all, in the order that data asks for; untimed
    cuda_graphs: str = declare("auto", choices=("auto", "none", "small", "concurrent"))


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """The sizes of the mesh."""

    # number of replicas of the sharded state
    dp_replicate_size: int = declare(1, AT_LEAST_1, GPUS)
    # GPUs over which each replica is sharded, times cp_size; -1 = all that the other sizes leave
    dp_shard_size: int = declare(-1, GPUS, SHARDS)
    # GPUs of dp_shard_size that divide the experts and send each other tokens, instead of gathering experts' weights
    ep_size: int = declare(1, AT_LEAST_1, GPUS)
    # GPUs that share the products of each sequence: a part of the heads, MLP and vocabulary on each
    tp_size: int = declare(1, AT_LEAST_1, GPUS)
    # GPUs that each have a part of every sequence; state is sharded over dp_shard_size x cp_size
    cp_size: int = declare(1, AT_LEAST_1, GPUS)
    # attention with cp_size: "ulysses" (divides the heads), "allgather" or "ring"
    cp_method: str = declare("ulysses", choices=METHODS)
    # stages of consecutive layers, each on GPUs of its own; microbatches go from stage to stage
    pp_size: int = declare(1, AT_LEAST_1, GPUS)
    # gpipe (all microbatches forward, then backward) or 1f1b (fewer in flight)
    pp_schedule: str = declare("gpipe", choices=tuple(STAGE_SCHEDULES))


@dataclasses.dataclass(frozen=True)
class ObjectiveSettings:
    """The loss that training minimises."""

    # cross_entropy of the next token; with a teacher's labels: distill; of rows with a chosen and a rejected answer:
    # dpo, ipo, orpo, simpo, and reward, which makes a reward model; of rows with an answer and its rating: kto; of
    # rollouts: grpo
    objective: str = declare(CROSS_ENTROPY, choices=tuple(OBJECTIVES))


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, and the learning rate."""

    # adamw, adamw8bit (8-bit moments of matrices), normuon (blocks' matrices; others: adamw)
    optimizer: str = declare("adamw", choices=tuple(OPTIMIZERS))
    # the peak, after the warmup
    learning_rate: float = declare(3e-4, POSITIVE)
    # after the warmup: cosine, linear, or wsd (constant, then a linear cooldown)
    lr_scheduler_type: str = declare("cosine", choices=SCHEDULES)
    # steps of linear warmup; 0 = warmup_ratio decides
    warmup_steps: int = declare(0, AT_LEAST_0)
    # warmup as a fraction of all steps
    warmup_ratio: float = declare(0.0, FRACTION)
    # wsd: steps of linear decay at the end
    cooldown_steps: int = declare(0, AT_LEAST_0)
    # learning rate at the end, as a fraction of the peak
    final_lr_fraction: float = declare(0.1, FRACTION)
    # decoupled, on matrices only
    weight_decay: float = declare(0.1, AT_LEAST_0)
    # weight of logsumexp(logits)^2 in the gradients (PaLM: 1e-4); reported losses are without it
    z_loss: float = declare(0.0, AT_LEAST_0)
    # weight of the routers' balance loss, over all tokens of a step (OLMoE: 0.01); reported apart
    router_aux_loss_coef: float = declare(0.0, AT_LEAST_0)
    # weight of the routers' mean logsumexp(logits)^2 (OLMoE: 0.001); reported apart
    router_z_loss_coef: float = declare(0.0, AT_LEAST_0)
    # clip gradients to this global norm; 0 = never
    max_grad_norm: float = declare(1.0, AT_LEAST_0)
