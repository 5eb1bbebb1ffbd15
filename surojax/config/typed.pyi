"""The config as editors see it, by `python docs/pages.py`. When it runs it is a ConfigDict."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

class Section:
    def __contains__(self, key: str) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, key: str) -> Any: ...
    def __setitem__(self, key: str, value: Any) -> None: ...
    def get(self, key: str, default: Any = None) -> Any: ...
    def keys(self) -> Iterable[str]: ...
    def items(self, preserve_field_references: bool = False) -> Iterable[tuple[str, Any]]: ...
    def to_dict(self, visit_map: Any = None, preserve_field_references: bool = False) -> dict[str, Any]: ...
    def copy_and_resolve_references(self) -> Config: ...
    def lock(self) -> Config: ...
    def update_from_flattened_dict(self, flattened_dict: Mapping[str, Any]) -> None: ...

class ModelFields(Section):
    model_type: Literal["llama"]
    r"""family: llama (with Mistral, Qwen, SmolLM3 and Gemma, by the fields below)."""
    vocab_size: int
    r"""rows of the embedding; at least the tokenizer's vocabulary."""
    hidden_size: int
    r"""width of the residual stream."""
    intermediate_size: int
    r"""width inside the MLP."""
    num_experts: int
    r"""experts of each MLP, of which every token chooses some; 0 = one MLP for all tokens."""
    num_experts_per_tok: int
    r"""experts that a token chooses."""
    moe_intermediate_size: int
    r"""width inside an expert; 0 = intermediate_size."""
    norm_topk_prob: bool
    r"""weights of the chosen experts are divided by their sum."""
    scoring_func: Literal["softmax", "sigmoid"]
    r"""what a router makes of its logits: "softmax", or "sigmoid" with a bias for the choice that is not
    trained."""
    routed_scaling_factor: float
    r"""weights of the chosen experts are multiplied by this."""
    mlp_joined: bool
    r"""the first two matrices of MLPs for all tokens are one, gate's rows before up's (Granite-4)."""
    n_shared_experts: int
    r"""experts that every token uses, as one MLP of so many times moe_intermediate_size."""
    moe_shared_intermediate_size: int
    r"""likewise, as one MLP of this width (Granite-4); 0 = there is none."""
    shared_expert_intermediate_size: int
    r"""width of one more expert that every token uses, times the sigmoid of a gate (Qwen3.5); 0 = there is none."""
    first_k_dense_replace: int
    r"""first layers with one MLP of intermediate_size instead of experts."""
    n_group: int
    r"""groups of the experts, of which a token chooses in the best topk_group."""
    topk_group: int
    r"""see n_group."""
    experts_beside_mlp: bool
    r"""layers with experts have an MLP of intermediate_size beside them, and norms of both (Gemma 4 26B-A4B)."""
    expert_bias: bool
    r"""biases on the router's logits and on the experts' products (gpt-oss)."""
    num_hidden_layers: int
    r"""decoder blocks."""
    layer_types: str
    r"""their mixers in turn, repeated: "conv,conv,full_attention"; "" = all have attention."""
    one_purpose: bool
    r"""each layer is a mixer or an MLP, which layer_types then has too: "mlp", or "experts" (Nemotron-H)."""
    linear_num_key_heads: int
    r"""key heads of mixers "linear_attention" (gated delta nets)."""
    linear_num_value_heads: int
    r"""their value heads, a multiple of the key heads; each has a state."""
    linear_key_head_dim: int
    r"""channels of their keys."""
    linear_value_head_dim: int
    r"""channels of their values."""
    linear_conv_kernel_dim: int
    r"""latest tokens that their convolutions see."""
    linear_fused_projections: bool
    r"""their projections are two matrices with the rows of one key head after those of another (Qwen3-Next)."""
    mamba_n_heads: int
    r"""heads of mixers "mamba2", a multiple of the groups; each has a state."""
    mamba_d_head: int
    r"""channels of such a head."""
    mamba_d_state: int
    r"""channels of their states."""
    mamba_n_groups: int
    r"""groups of their heads, which share the inputs and outputs of states, and whose channels are normed
    together."""
    mamba_d_conv: int
    r"""latest tokens that their convolutions see."""
    mamba_conv_bias: bool
    r"""bias of their convolutions."""
    mamba_dt_min: float
    r"""their time steps are at least this."""
    mamba_dt_max: float
    r"""and at most this; 0 = without a limit."""
    num_attention_heads: int
    r"""query heads."""
    num_key_value_heads: int
    r"""key/value heads; fewer than query heads = grouped-query attention."""
    head_dim: int
    r"""channels of a head; 0 = hidden_size / num_attention_heads."""
    global_head_dim: int
    r"""mixers "global_attention": channels of a head; 0 = head_dim."""
    num_global_key_value_heads: int
    r"""their key/value heads; 0 = num_key_value_heads."""
    attention_k_eq_v: bool
    r"""their values are the products that their keys are made of, before norm and rotary embedding."""
    num_kv_shared_layers: int
    r"""last layers whose attention reads keys and values of the last earlier layer of the same mixer (Gemma 4 E2B,
    E4B)."""
    use_double_wide_mlp: bool
    r"""the MLPs of those layers have twice the intermediate_size."""
    hidden_size_per_layer_input: int
    r"""channels of an input that each layer has of each token, by tables of its own (Gemma 4 E2B, E4B); 0 =
    none."""
    vocab_size_per_layer_input: int
    r"""rows of those tables; 0 = vocab_size."""
    q_lora_rank: int
    r"""mixers "latent_attention": rank of the queries; 0 = their matrix is one."""
    kv_lora_rank: int
    r"""numbers of a token that its keys and values follow from."""
    qk_nope_head_dim: int
    r"""channels of a head's queries and keys without rotary embedding."""
    qk_rope_head_dim: int
    r"""channels of a head's queries and keys with rotary embedding; the keys of all heads share them."""
    v_head_dim: int
    r"""channels of a head's values."""
    rope_interleave: bool
    r"""neighbouring channels rotate together; False: the first half with the second."""
    rms_norm_eps: float
    r"""added to the mean square in RMSNorm."""
    rope_theta: float
    r"""base of the rotary frequencies."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn", "proportional"]
    r""""none", "linear" (position interpolation), "llama3", "yarn" or "proportional" (the slowest pairs do not
    rotate)."""
    rope_factor: float
    r"""how much longer the context becomes, for linear, llama3, yarn and proportional."""
    rope_low_freq_factor: float
    r"""llama3: wavelengths above original length / this are stretched."""
    rope_high_freq_factor: float
    r"""llama3: wavelengths below original length / this are kept."""
    rope_original_max_position_embeddings: int
    r"""llama3, yarn: context length before stretching."""
    rope_attention_factor: float
    r"""yarn: multiplies queries and keys; 0 = 0.1 ln(rope_factor) + 1."""
    rope_beta_fast: float
    r"""yarn: frequencies that turn more often in the original context are kept."""
    rope_beta_slow: float
    r"""yarn: frequencies that turn less often in it are stretched."""
    rope_truncate: bool
    r"""yarn: the bounds between these are rounded to whole pairs of channels."""
    rope_partial_rotary_factor: float
    r"""fraction of a head's channels that rotate."""
    rope_llama_4_scaling_beta: float
    r"""queries grow by beta ln(1 + floor(position / original length)); 0 = not."""
    rope_mscale_all_dim: float
    r"""yarn with latent attention: scores grow by (0.1 x this x ln(rope_factor) + 1)^2; 0 = not."""
    rope_local_base_freq: float
    r"""base of the layers with a window, unscaled (Gemma 3); 0 = as the other layers."""
    no_rope_layer_interval: int
    r"""every n-th layer has no rotary embedding (SmolLM3: 4); 0 = all have it."""
    tie_word_embeddings: bool
    r"""the head shares the embedding's weights."""
    attention_bias: bool
    r"""bias on queries, keys and values (Qwen2)."""
    attention_out_bias: bool
    r"""bias on the output of attention (gpt-oss)."""
    attn_output_gate: bool
    r"""attention's output is multiplied by sigmoid(gate); the rows of each head's gate follow its query's
    (Qwen3.5)."""
    attention_sinks: bool
    r"""each head's softmax has one more logit, which is learned and belongs to no position (gpt-oss)."""
    attn_gate_proj: bool
    r"""likewise, by a gate with a matrix of its own (Muse-Glimmer)."""
    qk_norm: bool
    r"""RMSNorm on each head's queries and keys (Qwen3, Gemma 3)."""
    qk_norm_whole: bool
    r"""RMSNorm on queries and keys, of the channels of all heads together (OLMoE)."""
    qk_norm_weightless: bool
    r"""RMSNorm without weights on each head's queries and keys (Muse-Glimmer)."""
    v_norm_weightless: bool
    r"""RMSNorm without weights on each head's values (Gemma 4)."""
    input_norms: bool
    r"""RMSNorm on the inputs of attention and MLP; False: on their outputs alone (OLMo 2, 3)."""
    norm_plus_one: bool
    r"""RMSNorm multiplies by 1 + its weights, which start at 0 (Gemma)."""
    plain_final_norm: bool
    r"""the last norm multiplies by its weights even with norm_plus_one (Muse-Glimmer)."""
    sandwich_norms: bool
    r"""RMSNorm also on what attention and MLP add to the residual stream (Gemma 2, 3)."""
    post_norm_eps: float
    r"""added to the mean square in those norms; 0 = rms_norm_eps."""
    hidden_act: Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu", "relu2"]
    r"""of the MLP's gate: "silu", "gelu_pytorch_tanh" (Gemma) or "clamped_swiglu" (gpt-oss); "relu2": there is no
    gate."""
    embedding_norm: bool
    r"""RMSNorm without weights on the embedding (Muse-Glimmer)."""
    layer_scalar: bool
    r"""each layer's output is multiplied by a number of its own, which is not trained (Gemma 4)."""
    scale_embedding: bool
    r"""the embedding is multiplied by sqrt(hidden_size) (Gemma)."""
    embedding_multiplier: float
    r"""the embedding is multiplied by this (Granite: 12)."""
    residual_multiplier: float
    r"""what attention and MLP add to the residual stream is multiplied by this (Granite: 0.22)."""
    logits_scaling: float
    r"""the logits are divided by this (Granite: 6)."""
    query_pre_attn_scalar: float
    r"""attention scores are divided by its square root; 0 = head_dim."""
    attn_logit_softcapping: float
    r"""attention scores become cap x tanh(score / cap) (Gemma 2: 50); 0 = not."""
    final_logit_softcapping: float
    r"""likewise the logits (Gemma 2: 30); 0 = not."""
    sliding_window: int
    r"""latest positions that a token attends to (Mistral: 4096); 0 = all of them."""
    sliding_window_pattern: int
    r"""every n-th layer attends to all positions (Gemma 3: 6, gpt-oss: 2); 0 = none."""
    layers_from_last: bool
    r"""every n-th layer of sliding_window_pattern and no_rope_layer_interval is counted from the last one, which is
    one."""
    num_labels: Literal[0, 1]
    r"""1: a reward model, whose head computes one number; 0: a language model. With model_path the objective
    decides."""
    initializer_range: float
    r"""standard deviation of the initial weights."""
    def update(self, *other: Mapping[str, Any] | Section, **fields: Unpack[Sizes]) -> None: ...

class Config(Section):
    output_dir: str
    r"""checkpoints, metrics.jsonl and trackers' files are written here."""
    seed: int
    r"""determines the initial weights and the order of the data."""
    gpus: int
    r"""accelerators (or virtual CPU devices) to use; 0 = all available."""
    max_steps: int
    r"""optimizer steps; 0 = num_epochs passes over the data, and what fills the last step."""
    num_epochs: int
    r"""passes over the training data when max_steps is 0; a pass has as many samples as all datasets."""
    eval_steps: int
    r"""steps between evaluations; 0 = only at the end; with model_path there is one before step 1 too."""
    early_stopping_patience: int
    r"""evaluations in a row without a lower loss, of the first data set that is evaluated, that end a run; 0 = none
    do."""
    eval_batches: int
    r"""largest number of batches in an evaluation, spread over the held-out text."""
    save_steps: int
    r"""steps between checkpoints; 0 = write one only at the end."""
    save_total_limit: int
    r"""number of checkpoints kept, the newest ones; one that is being read is kept longer."""
    log_steps: int
    r"""steps between printed lines, and one a minute at least; a terminal shows every step."""
    quiet: bool
    r"""print no steps and evaluations; metrics.jsonl has them."""
    report_to: str
    r"""trackers, a comma list: tensorboard, wandb, trackio, mlflow; "" = none."""
    rates_file: str
    r"""what steps took on GPUs, for plan and fit; "" = not written or read."""
    resume_from_checkpoint: str
    r""""auto" = newest in output_dir if any, "no" = start anew; or a checkpoint: its folder, its step, or
    "latest"."""
    sample_prompt: str
    r"""text continued at the end of training; "" = a held-out question, or the beginning of the held-out text."""
    sample_tokens: int
    r"""tokens sampled at the end; 0 = none."""
    sample_temperature: float
    r"""0 = greedy."""
    data: str
    r"""text, instructions or conversations: file, folder, glob, comma list; "stdlib" = Python's own source."""
    eval_data: str
    r"""files for evaluation, like data; "" = documents or rows held out from data."""
    text_field: str
    r"""field of a .jsonl line that contains the document."""
    datasets: Sequence[dict[str, Any]]
    r"""instead of data: a list of dict(path=..., weight=..., ...), as a flag in JSON; data/datasets.py."""
    validation_datasets: Sequence[dict[str, Any]]
    r"""each is evaluated by itself; a list like datasets, with an optional name."""
    data_cache: str
    r"""folder for tokenised data; what is in it may be deleted at any time."""
    sample_packing: bool
    r"""several documents in a row, separated by attention masks and positions."""
    on_long: Literal["cut", "drop"]
    r"""examples longer than sequence_len: "cut" or "drop"; text without packing is never too long."""
    on_bad_row: Literal["error", "skip"]
    r"""rows that cannot be used: "error" = end the run, "skip" = leave out and count."""
    train_on: Literal["assistant", "last", "all"]
    r"""what the loss counts in conversations: "assistant", "last" (its last turn) or "all"."""
    chat_template: str
    r""""chatml", "llama3", "mistral", "gemma" or a Jinja file; "" = the tokenizer's own."""
    system_prompt: str
    r"""for conversations and instructions that have none of their own."""
    tokenizer: str
    r""""bytes" (with model_path: the model's own), a tokenizer.json, its folder, or a .gguf file."""
    sequence_len: int
    r"""tokens of a training sequence."""
    per_device_batch_size: int
    r"""sequences per GPU and microbatch; with cp_size, tp_size or pp_size, per so many GPUs."""
    gradient_accumulation_steps: int
    r"""microbatches per step; effective batch = this x batch size x data-parallel GPUs."""
    model_path: str
    r"""model to start from: Hugging Face folder or name, .gguf file; sets the model fields; "" = none."""
    from_scratch: bool
    r"""model_path: take the model's sizes only, and draw new weights."""
    untied_head: bool
    r"""model_path: train the head that its files have apart, though config.json ties it."""
    model_dtype: Literal["bfloat16", "float32"]
    r"""work weights, activations, products: bfloat16 or float32 (products: TF32 on GPUs)."""
    master_dtype: Literal["bfloat16", "float32"]
    r"""the weights the optimizer updates; bfloat16 is rounded stochastically."""
    accum_dtype: Literal["bfloat16", "float32"]
    r"""gradient accumulators."""
    opt_m_dtype: Literal["bfloat16", "float32"]
    r"""first moments (adamw8bit: only those of vectors) and the momentum of normuon."""
    opt_v_dtype: Literal["bfloat16", "float32"]
    r"""second moments (adamw8bit: only those of vectors; normuon: only those of adamw)."""
    attention: Literal["auto", "xla", "cudnn", "mosaic"]
    r""""auto", "xla", or flash attention (NVIDIA, 16-bit): "cudnn", or "mosaic" for sample_packing."""
    kernels: Literal["auto", "xla", "mosaic"]
    r"""between products, and delta nets: "xla" = XLA's, "mosaic" = our kernels (NVIDIA), "auto" = ours on GPUs."""
    recipe: Literal["bf16", "fp8_hybrid", "fp8_current", "mxfp8", "nvfp4"]
    r"""bf16, fp8_hybrid (delayed scaling), fp8_current (just in time), mxfp8 or nvfp4."""
    matmul_dtype: Literal["", "bfloat16", "float32"]
    r"""recipe bf16: operands of products, bfloat16 or float32; "" = model_dtype."""
    gradient_dtype: Literal["", "bfloat16", "float32"]
    r"""recipe bf16: gradients in the backward pass's products; "" = matmul_dtype."""
    fp8_amax_history: int
    r"""fp8_hybrid: a scale follows from the largest magnitude in this many steps."""
    fp8_margin: int
    r"""fp8_hybrid: binades left free above the largest magnitude seen, 0 to 8."""
    block_scaled_products: Literal["auto", "native", "emulated"]
    r"""mxfp8, nvfp4: "native" (sm_100, sm_120), "emulated", "auto" = native on GPUs."""
    skip_quant_first_layers: int
    r"""number of first blocks that use recipe bf16."""
    skip_quant_last_layers: int
    r"""number of last blocks that use recipe bf16."""
    lora: bool
    r"""train adapters of the blocks' matrices; all else is frozen."""
    lora_rank: int
    r"""columns and rows of an adapter's factors."""
    lora_alpha: float
    r"""an adapter's product is multiplied by this / lora_rank."""
    lora_dropout: float
    r"""probability that training leaves a number out of an adapter's input."""
    lora_target_modules: str
    r"""comma list of ends of modules' names: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj."""
    lora_dtype: Literal["", "bfloat16", "float32"]
    r"""adapters' work weights and products: bfloat16 or float32; "" = model_dtype."""
    use_rslora: bool
    r"""an adapter's product is multiplied by lora_alpha / sqrt(lora_rank)."""
    use_dora: bool
    r"""train also the length of each row of an adapted matrix."""
    lora_plus_ratio: float
    r"""learning rate of the factors b, which begin as zeros, over that of the others."""
    qlora_bnb: bool
    r"""frozen matrices in NF4: 4 bits with double quantisation, as bitsandbytes stores them."""
    qlora_fp8: bool
    r"""frozen matrices in FP8 (e4m3) with a scale for each block of 128 x 128."""
    qlora_fp4: bool
    r"""frozen matrices in NVFP4: 4 bits with a scale for each 16 neighbours."""
    qlora_mxfp4: bool
    r"""frozen experts in MXFP4, as gpt-oss is published: 4 bits with a power of two for each 32 neighbours."""
    lora_adapter: str
    r"""folder of an adapter in PEFT's format that training begins with; "" = new ones."""
    lora_base_adapter: str
    r"""folder of an adapter in PEFT's format that is merged into the base, frozen with it."""
    modules_to_save: str
    r"""comma list of outer layers that are trained whole: embed_tokens, lm_head; a reward model's score always
    is."""
    zero_level: Literal[1, 2, 3]
    r"""shards over dp_shard x cp: 1 = optimizer state, 2 = + gradients, 3 = + block weights."""
    shard_gradients: bool | None
    r"""shard the gradient accumulators; unset = zero_level >= 2."""
    shard_weights: bool | None
    r"""shard the block weights; unset = zero_level >= 3."""
    shard_outer: bool
    r"""shard embedding and head by token id, for large vocabularies; XLA then computes the loss."""
    offload_residual: bool | Literal["nvme"]
    r"""residuals (saved for the backward pass) in pinned host memory; "nvme" = in a file in nvme_path."""
    offload_optimizer: bool | Literal["nvme"]
    r"""optimizer state in pinned host memory; "nvme" = in a file in nvme_path."""
    offload_master: bool | Literal["nvme"]
    r"""master weights in pinned host memory; "nvme" = in a file in nvme_path."""
    offload_grads: bool | Literal["nvme"]
    r"""gradient accumulators of the blocks in host memory; several GPUs: needs shard_gradients; "nvme" = in a
    file."""
    offload_weights: bool | Literal["nvme"]
    r"""block weights in host memory, "nvme" = in a file in nvme_path; two layers at a time are in device memory."""
    zero_quantized_weights: Literal["none", "fp8", "int8"]
    r"""all-gather block matrices in 8 bits: none, fp8 or int8; needs zero_level=3."""
    persistent_quants: bool
    r"""store the 8-bit matrices in place of 16-bit ones; quantised once a step."""
    offload_quants: bool
    r"""store the 8-bit matrices in pinned host memory; needs persistent_quants."""
    use_all_to_all_reduce: bool
    r"""reduce gradients by an all-to-all, then a float32 sum on the shard's GPU."""
    zero_quantized_gradients: bool
    r"""all-to-all reduce, with the blocks' matrices in int8 (one GPU: no effect)."""
    memcpy_all_gather: bool
    r"""all-gather with the GPUs' copy engines within a machine (NCCL 2.29 or later)."""
    memcpy_send_recv: bool
    r"""all-to-all with the GPUs' copy engines within a machine."""
    resident_layers: int
    r"""offload_weights: first layers (of each stage) whose weights stay in device memory."""
    nvme_path: str
    r"""folder on an NVMe disk for what is offloaded to "nvme"; one run at a time. Several on several disks, with
    commas between them: files are striped over them."""
    files_in_memory: float
    r"""GiB of what is offloaded to "nvme" that each process keeps in host memory all the same."""
    device_memory: float
    r"""GiB of optimizer state, master weights and gradients that each GPU keeps, though they are offloaded to host
    memory (with any class in "nvme": GiB of one layer's that come to the GPU a layer early)."""
    nvme_slots: Literal[1, 2]
    r"""2: master weights and optimizer state in files twice, so that a kill costs one step; 1: goes on from a
    checkpoint."""
    recompute_block: bool
    r"""save only each block's input and recompute the block in the backward pass."""
    recompute_norm: bool
    r"""recompute_block=False: recompute the norms' outputs instead of saving them."""
    recompute_swiglu: bool
    r"""recompute_block=False: recompute silu(gate) * up."""
    recompute_ffn: bool
    r"""recompute_block=False: recompute silu(gate) * up, gate and up."""
    recompute_att: bool
    r"""recompute_block=False: recompute queries, keys, values and attention."""
    microbatches_per_fetch: int
    r"""microbatches that each fetch of a layer serves; divides gradient_accumulation_steps."""
    overlap_update: bool | None
    r"""update a layer under the next step's first forward pass; for state in host memory or files; unset = if
    gradients, residuals or weights are in files."""
    sequence_chunks: int
    r"""chunks of the sequence that a block computes one after another, exactly; for long sequences."""
    lmhead_chunks: int
    r"""chunks of the tokens in head and loss; more chunks = less memory for logits."""
    xla_options: Literal["overlap", "exact", "default"]
    r"""of the step on GPUs: "overlap" = copies overlap with products, "default" = XLA's own, "exact" = as
    "overlap", with one kernel for a product in every program, so that offloads should change no bit; untried on
    GPUs."""
    cuda_graphs: Literal["auto", "none", "small", "concurrent"]
    r"""CUDA graphs of a step on GPUs: "auto" = "none" if something is copied or sent beside products, else XLA's
    own; "small" = of kernels, without loops and copies; "concurrent" = of all, in the order that data asks for;
    untimed."""
    dp_replicate_size: int
    r"""number of replicas of the sharded state."""
    dp_shard_size: int
    r"""GPUs over which each replica is sharded, times cp_size; -1 = all that the other sizes leave."""
    ep_size: int
    r"""GPUs of dp_shard_size that divide the experts and send each other tokens, instead of gathering experts'
    weights."""
    tp_size: int
    r"""GPUs that share the products of each sequence: a part of the heads, MLP and vocabulary on each."""
    cp_size: int
    r"""GPUs that each have a part of every sequence; state is sharded over dp_shard_size x cp_size."""
    cp_method: Literal["ulysses", "allgather", "ring"]
    r"""attention with cp_size: "ulysses" (divides the heads), "allgather" or "ring"."""
    pp_size: int
    r"""stages of consecutive layers, each on GPUs of its own; microbatches go from stage to stage."""
    pp_schedule: Literal["gpipe", "1f1b"]
    r"""gpipe (all microbatches forward, then backward) or 1f1b (fewer in flight)."""
    objective: Literal["cross_entropy", "dpo", "ipo", "orpo", "simpo", "kto", "grpo", "reward", "distill"]
    r"""cross_entropy of the next token; with a teacher's labels: distill; of rows with a chosen and a rejected
    answer: dpo, ipo, orpo, simpo, and reward, which makes a reward model; of rows with an answer and its rating:
    kto; of rollouts: grpo."""
    beta: float
    r"""dpo, ipo, kto, orpo, simpo: how far the model may leave its reference; less = further; the weight of orpo's
    odds."""
    loss_type: Literal["sigmoid", "hinge", "ipo"]
    r"""dpo: "sigmoid" (Rafailov et al. 2023), "hinge" (SLiC) or "ipo"."""
    label_smoothing: float
    r"""dpo, loss_type sigmoid: probability that a pair's answers are the wrong way round (conservative DPO)."""
    reference_free: bool
    r"""dpo, ipo: the reference takes all answers for equally likely, and is not computed."""
    precompute_ref_log_probs: bool
    r"""dpo, ipo, kto, grpo with lora: reference computed once before training, not in each step; without lora
    always."""
    simpo_gamma: float
    r"""simpo: by how much the mean log-probability of the chosen answer is to be larger, times beta."""
    desirable_weight: float
    r"""kto: factor of the losses of desirable answers; it and undesirable_weight balance how many of each there
    are."""
    undesirable_weight: float
    r"""kto: factor of the losses of other answers."""
    epsilon: float
    r"""grpo: by how much the probability of a token may fall below that when it was sampled, as a fraction of
    it."""
    epsilon_high: float
    r"""grpo: likewise, by how much it may rise (DAPO: 0.28); 0 = epsilon."""
    grpo_beta: float
    r"""grpo: weight of the divergence from the model before training; 0 = no reference is computed."""
    grpo_loss_type: Literal["dapo", "grpo", "dr_grpo"]
    r"""grpo: mean over "dapo" = all tokens; "grpo" = completions' means; "dr_grpo" = sums /
    max_completion_length."""
    importance_sampling_level: Literal["token", "sequence"]
    r"""grpo: ratios of probabilities are of each "token", or of a whole "sequence" (GSPO)."""
    max_completion_length: int
    r"""grpo, grpo_loss_type dr_grpo: tokens that a completion has at most."""
    router_replay: bool
    r"""grpo, models with experts: send tokens to the experts that routed_experts of the rows name."""
    center_rewards_coefficient: float
    r"""reward: weight of the square of the sum of both rewards, which keeps them near 0 (0.01 is usual)."""
    distill_path: str
    r"""distill: folder of a teacher's labels, see docs/distillation.md."""
    distill_weight: float
    r"""distill: the loss is this x KL x temperature^2 + (1 - this) x cross-entropy."""
    distill_temperature: float
    r"""distill: teacher's and student's logits are divided by this; labels are made for one."""
    distill_kl: Literal["forward", "reverse"]
    r"""distill: "forward" = KL(teacher, student); "reverse" = KL(student, teacher)."""
    distill_top_k: int
    r"""distill: most likely tokens in a label of a token, beside one class for all others."""
    distill_hidden_size: int
    r"""distill: the teacher's hidden_size: labels are its last hidden states, not likely tokens; 0: likely
    tokens."""
    optimizer: Literal["adamw", "adamw8bit", "normuon", "lion"]
    r"""adamw, adamw8bit (8-bit moments of matrices), normuon (blocks' matrices; others: adamw), lion (the sign of a
    momentum)."""
    learning_rate: float
    r"""the peak, after the warmup."""
    lr_scheduler_type: Literal["cosine", "linear", "wsd"]
    r"""after the warmup: cosine, linear, or wsd (constant, then a linear cooldown)."""
    warmup_steps: int
    r"""steps of linear warmup; 0 = warmup_ratio decides."""
    warmup_ratio: float
    r"""warmup as a fraction of all steps."""
    cooldown_steps: int
    r"""wsd: steps of linear decay at the end."""
    final_lr_fraction: float
    r"""learning rate at the end, as a fraction of the peak."""
    weight_decay: float
    r"""decoupled, on matrices only."""
    z_loss: float
    r"""weight of logsumexp(logits)^2 in the gradients (PaLM: 1e-4); reported losses are without it."""
    router_aux_loss_coef: float
    r"""weight of the routers' balance loss, over all tokens of a step (OLMoE: 0.01); reported apart."""
    router_z_loss_coef: float
    r"""weight of the routers' mean logsumexp(logits)^2 (OLMoE: 0.001); reported apart."""
    max_grad_norm: float
    r"""clip gradients to this global norm; 0 = never."""
    adamw_beta1: float
    r"""decay of the first moment."""
    adamw_beta2: float
    r"""decay of the second moment."""
    adamw_epsilon: float
    r"""added to the square root of the second moment."""
    muon_learning_rate: float
    r"""normuon: the peak for the blocks' matrices; 0 = learning_rate."""
    muon_momentum: float
    r"""normuon: decay of the momentum of the blocks' matrices."""
    muon_beta2: float
    r"""normuon: decay of the mean squares of their rows."""
    muon_ns_steps: int
    r"""normuon: steps of the orthogonalisation, 1 to 10."""
    lion_beta1: float
    r"""lion: weight of the momentum in an update's sign."""
    lion_beta2: float
    r"""lion: decay of the momentum."""
    model: ModelFields
    def update(self, *other: Mapping[str, Any] | Section, **fields: Unpack[Fields]) -> None: ...

class Sizes(TypedDict, total=False):
    model_type: Literal["llama"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    scoring_func: Literal["softmax", "sigmoid"]
    routed_scaling_factor: float
    mlp_joined: bool
    n_shared_experts: int
    moe_shared_intermediate_size: int
    shared_expert_intermediate_size: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    experts_beside_mlp: bool
    expert_bias: bool
    num_hidden_layers: int
    layer_types: str
    one_purpose: bool
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    linear_fused_projections: bool
    mamba_n_heads: int
    mamba_d_head: int
    mamba_d_state: int
    mamba_n_groups: int
    mamba_d_conv: int
    mamba_conv_bias: bool
    mamba_dt_min: float
    mamba_dt_max: float
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    global_head_dim: int
    num_global_key_value_heads: int
    attention_k_eq_v: bool
    num_kv_shared_layers: int
    use_double_wide_mlp: bool
    hidden_size_per_layer_input: int
    vocab_size_per_layer_input: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Literal["none", "linear", "llama3", "yarn", "proportional"]
    rope_factor: float
    rope_low_freq_factor: float
    rope_high_freq_factor: float
    rope_original_max_position_embeddings: int
    rope_attention_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_truncate: bool
    rope_partial_rotary_factor: float
    rope_llama_4_scaling_beta: float
    rope_mscale_all_dim: float
    rope_local_base_freq: float
    no_rope_layer_interval: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    attn_output_gate: bool
    attention_sinks: bool
    attn_gate_proj: bool
    qk_norm: bool
    qk_norm_whole: bool
    qk_norm_weightless: bool
    v_norm_weightless: bool
    input_norms: bool
    norm_plus_one: bool
    plain_final_norm: bool
    sandwich_norms: bool
    post_norm_eps: float
    hidden_act: Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu", "relu2"]
    embedding_norm: bool
    layer_scalar: bool
    scale_embedding: bool
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    query_pre_attn_scalar: float
    attn_logit_softcapping: float
    final_logit_softcapping: float
    sliding_window: int
    sliding_window_pattern: int
    layers_from_last: bool
    num_labels: Literal[0, 1]
    initializer_range: float

class FieldsOfTrain(TypedDict, total=False):
    output_dir: str
    seed: int
    gpus: int
    max_steps: int
    num_epochs: int
    eval_steps: int
    early_stopping_patience: int
    eval_batches: int
    save_steps: int
    save_total_limit: int
    log_steps: int
    quiet: bool
    report_to: str
    rates_file: str
    resume_from_checkpoint: str
    sample_prompt: str
    sample_tokens: int
    sample_temperature: float
    eval_data: str
    text_field: str
    datasets: Sequence[dict[str, Any]]
    validation_datasets: Sequence[dict[str, Any]]
    data_cache: str
    sample_packing: bool
    on_long: Literal["cut", "drop"]
    on_bad_row: Literal["error", "skip"]
    train_on: Literal["assistant", "last", "all"]
    chat_template: str
    system_prompt: str
    tokenizer: str
    sequence_len: int
    per_device_batch_size: int
    gradient_accumulation_steps: int
    model_path: str
    from_scratch: bool
    untied_head: bool
    model_dtype: Literal["bfloat16", "float32"]
    master_dtype: Literal["bfloat16", "float32"]
    accum_dtype: Literal["bfloat16", "float32"]
    opt_m_dtype: Literal["bfloat16", "float32"]
    opt_v_dtype: Literal["bfloat16", "float32"]
    attention: Literal["auto", "xla", "cudnn", "mosaic"]
    kernels: Literal["auto", "xla", "mosaic"]
    recipe: Literal["bf16", "fp8_hybrid", "fp8_current", "mxfp8", "nvfp4"]
    matmul_dtype: Literal["", "bfloat16", "float32"]
    gradient_dtype: Literal["", "bfloat16", "float32"]
    fp8_amax_history: int
    fp8_margin: int
    block_scaled_products: Literal["auto", "native", "emulated"]
    skip_quant_first_layers: int
    skip_quant_last_layers: int
    lora: bool
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: str
    lora_dtype: Literal["", "bfloat16", "float32"]
    use_rslora: bool
    use_dora: bool
    lora_plus_ratio: float
    qlora_bnb: bool
    qlora_fp8: bool
    qlora_fp4: bool
    qlora_mxfp4: bool
    lora_adapter: str
    lora_base_adapter: str
    modules_to_save: str
    zero_level: Literal[1, 2, 3]
    shard_gradients: bool | None
    shard_weights: bool | None
    shard_outer: bool
    offload_residual: bool | Literal["nvme"]
    offload_optimizer: bool | Literal["nvme"]
    offload_master: bool | Literal["nvme"]
    offload_grads: bool | Literal["nvme"]
    offload_weights: bool | Literal["nvme"]
    zero_quantized_weights: Literal["none", "fp8", "int8"]
    persistent_quants: bool
    offload_quants: bool
    use_all_to_all_reduce: bool
    zero_quantized_gradients: bool
    memcpy_all_gather: bool
    memcpy_send_recv: bool
    resident_layers: int
    nvme_path: str
    files_in_memory: float
    device_memory: float
    nvme_slots: Literal[1, 2]
    recompute_block: bool
    recompute_norm: bool
    recompute_swiglu: bool
    recompute_ffn: bool
    recompute_att: bool
    microbatches_per_fetch: int
    overlap_update: bool | None
    sequence_chunks: int
    lmhead_chunks: int
    xla_options: Literal["overlap", "exact", "default"]
    cuda_graphs: Literal["auto", "none", "small", "concurrent"]
    dp_replicate_size: int
    dp_shard_size: int
    ep_size: int
    tp_size: int
    cp_size: int
    cp_method: Literal["ulysses", "allgather", "ring"]
    pp_size: int
    pp_schedule: Literal["gpipe", "1f1b"]
    beta: float
    loss_type: Literal["sigmoid", "hinge", "ipo"]
    label_smoothing: float
    reference_free: bool
    precompute_ref_log_probs: bool
    simpo_gamma: float
    desirable_weight: float
    undesirable_weight: float
    epsilon: float
    epsilon_high: float
    grpo_beta: float
    grpo_loss_type: Literal["dapo", "grpo", "dr_grpo"]
    importance_sampling_level: Literal["token", "sequence"]
    max_completion_length: int
    router_replay: bool
    center_rewards_coefficient: float
    distill_path: str
    distill_weight: float
    distill_temperature: float
    distill_kl: Literal["forward", "reverse"]
    distill_top_k: int
    distill_hidden_size: int
    learning_rate: float
    lr_scheduler_type: Literal["cosine", "linear", "wsd"]
    warmup_steps: int
    warmup_ratio: float
    cooldown_steps: int
    final_lr_fraction: float
    weight_decay: float
    z_loss: float
    router_aux_loss_coef: float
    router_z_loss_coef: float
    max_grad_norm: float
    adamw_beta1: float
    adamw_beta2: float
    adamw_epsilon: float
    muon_learning_rate: float
    muon_momentum: float
    muon_beta2: float
    muon_ns_steps: int
    lion_beta1: float
    lion_beta2: float
    model: Sizes

class Fields(FieldsOfTrain, total=False):
    data: str
    optimizer: Literal["adamw", "adamw8bit", "normuon", "lion"]
    objective: Literal["cross_entropy", "dpo", "ipo", "orpo", "simpo", "kto", "grpo", "reward", "distill"]
