"""The config's fields that no other room declares, by section.

Each is declared once, with its comment, its default, the values that it may have, and its facts. The architecture is
declared in models/decoder_config.py, how it is computed in models/model.py and numerics/recipes.py, adapters in
models/lora.py, where tensors are stored in placement/table.py and offloads.py, the step in step/spec.py, the options of
optimizers in optim/, those of objectives in step/. fields.py lists all.
"""

import dataclasses

from surojax.declared import AT_LEAST_0, AT_LEAST_1, FRACTION, NOT_EMPTY, POSITIVE, Facts, Range, at_most, declare
from surojax.families.registry import ARCHITECTURES
from surojax.objectives.objectives import CROSS_ENTROPY, OBJECTIVES
from surojax.optim.learning_rate import SCHEDULES
from surojax.optim.optimizers import OPTIMIZERS
from surojax.run.trackers import KNOWN as KNOWN_TRACKERS
from surojax.sizes import MOST_GPUS

GPUS = at_most(MOST_GPUS, f"{MOST_GPUS:,} GPUs")
SHARDS = Range("1 or more, or -1", "-1 is all that the other sizes leave", least=1, besides=-1)


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The length of a run, and the files that it writes."""

    # checkpoints, metrics.jsonl and trackers' files are written here
    output_dir: str = declare("runs/default", NOT_EMPTY, facts=Facts.NOTHING)
    # determines the initial weights and the order of the data
    seed: int = declare(0, AT_LEAST_0, facts=Facts.IDENTITY)
    # accelerators (or virtual CPU devices) to use; 0 = all available
    gpus: int = declare(1, AT_LEAST_0, GPUS, facts=Facts.COST)
    # optimizer steps; 0 = num_epochs passes over the data, and what fills the last step
    max_steps: int = declare(0, AT_LEAST_0, facts=Facts.NOTHING)
    # passes over the training data when max_steps is 0; a pass has as many samples as all datasets
    num_epochs: int = declare(1, AT_LEAST_1, facts=Facts.NOTHING)
    # steps between evaluations; 0 = only at the end; with model_path there is one before step 1 too
    eval_steps: int = declare(100, AT_LEAST_0, facts=Facts.NOTHING)
    # evaluations in a row without a lower loss, of the first data set that is evaluated, that end a run; 0 = none do
    early_stopping_patience: int = declare(0, AT_LEAST_0, facts=Facts.NOTHING)
    # largest number of batches in an evaluation, spread over the held-out text
    eval_batches: int = declare(20, AT_LEAST_1, facts=Facts.NOTHING)
    # steps between checkpoints; 0 = write one only at the end
    save_steps: int = declare(500, AT_LEAST_0, facts=Facts.NOTHING)
    # number of checkpoints kept, the newest ones; one that is being read is kept longer
    save_total_limit: int = declare(2, AT_LEAST_1, facts=Facts.NOTHING)
    # steps between printed lines, and one a minute at least; a terminal shows every step
    log_steps: int = declare(10, AT_LEAST_1, facts=Facts.NOTHING)
    # print no steps and evaluations; metrics.jsonl has them
    quiet: bool = declare(False, facts=Facts.NOTHING)
    # trackers, a comma list: tensorboard, wandb, trackio, mlflow; "" = none
    report_to: str = declare("tensorboard", KNOWN_TRACKERS, facts=Facts.NOTHING)
    # what steps took on GPUs, for plan and fit; "" = not written or read
    rates_file: str = declare("~/.cache/surojax/rates.json", facts=Facts.NOTHING)
    # "auto" = newest in output_dir if any, "no" = start anew; or a checkpoint: its folder, its step, or "latest"
    resume_from_checkpoint: str = declare("auto", NOT_EMPTY, facts=Facts.NOTHING)
    # text continued at the end of training; "" = a held-out question, or the beginning of the held-out text
    sample_prompt: str = declare("", facts=Facts.NOTHING)
    # tokens sampled at the end; 0 = none
    sample_tokens: int = declare(200, AT_LEAST_0, at_most(2**24, "2^24"), facts=Facts.NOTHING)
    # 0 = greedy
    sample_temperature: float = declare(0.8, AT_LEAST_0, facts=Facts.NOTHING)


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """The texts that a run reads."""

    # text, instructions or conversations: file, folder, glob, comma list; "stdlib" = Python's own source
    data: str = declare("", facts=Facts.NOTHING)
    # files for evaluation, like data; "" = documents or rows held out from data
    eval_data: str = declare("", facts=Facts.NOTHING)
    # field of a .jsonl line that contains the document
    text_field: str = declare("text", NOT_EMPTY, facts=Facts.NOTHING)
    # instead of data: a list of dict(path=..., weight=..., ...), as a flag in JSON; data/datasets.py
    datasets: tuple = declare((), facts=Facts.NOTHING)
    # each is evaluated by itself; a list like datasets, with an optional name
    validation_datasets: tuple = declare((), facts=Facts.NOTHING)
    # folder for tokenised data; what is in it may be deleted at any time
    data_cache: str = declare("~/.cache/surojax", NOT_EMPTY, facts=Facts.NOTHING)


@dataclasses.dataclass(frozen=True)
class RowSettings:
    """How texts become rows of tokens."""

    # examples longer than sequence_len: "cut" or "drop"; text without packing is never too long
    on_long: str = declare("cut", choices=("cut", "drop"), facts=Facts.NOTHING)
    # rows that cannot be used: "error" = end the run, "skip" = leave out and count
    on_bad_row: str = declare("error", choices=("error", "skip"), facts=Facts.NOTHING)
    # what the loss counts in conversations: "assistant", "last" (its last turn) or "all"
    train_on: str = declare("assistant", choices=("assistant", "last", "all"), facts=Facts.NOTHING)
    # "chatml", "llama3", "mistral", "gemma" or a Jinja file; "" = the tokenizer's own
    chat_template: str = declare("", facts=Facts.NOTHING)
    # for conversations and instructions that have none of their own
    system_prompt: str = declare("", facts=Facts.NOTHING)
    # "bytes" (with model_path: the model's own), a tokenizer.json, its folder, or a .gguf file
    tokenizer: str = declare("bytes", NOT_EMPTY, facts=Facts.NOTHING)


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """The shape of a step's batch."""

    # tokens of a training sequence
    sequence_len: int = declare(512, AT_LEAST_1, facts=Facts.COST_AND_IDENTITY)
    # sequences per GPU and microbatch; with cp_size, tp_size or pp_size, per so many GPUs
    per_device_batch_size: int = declare(1, AT_LEAST_1, facts=Facts.COST)
    # microbatches per step; effective batch = this x batch size x data-parallel GPUs
    gradient_accumulation_steps: int = declare(1, AT_LEAST_1, facts=Facts.COST)


@dataclasses.dataclass(frozen=True)
class StartSettings:
    """The model that a run begins with."""

    # model to start from: Hugging Face folder or name, .gguf file; sets the model fields; "" = none
    model_path: str = declare("", facts=Facts.NOTHING)
    # model_path: take the model's sizes only, and draw new weights
    from_scratch: bool = declare(False, facts=Facts.NOTHING)
    # model_path: train the head that its files have apart, though config.json ties it
    untied_head: bool = declare(False, facts=Facts.NOTHING)


@dataclasses.dataclass(frozen=True)
class FamilySettings:
    """The name of the architecture, whose fields follow: those of `DecoderConfig`."""

    # family: llama (with Mistral, Qwen, SmolLM3 and Gemma, by the fields below)
    model_type: str = declare("llama", choices=tuple(ARCHITECTURES))


@dataclasses.dataclass(frozen=True)
class AdapterSettings:
    """Whether a run trains adapters (LoRA), and of which matrices; their sizes are fields of `Lora`."""

    # train adapters of the blocks' matrices; all else is frozen
    lora: bool = declare(False, facts=Facts.COST_AND_IDENTITY)
    # comma list of ends of modules' names: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj
    lora_target_modules: str = declare("all-linear", facts=Facts.COST_AND_IDENTITY)


@dataclasses.dataclass(frozen=True)
class AdapterSources:
    """The adapter that training begins with, and the matrices that are trained besides adapters."""

    # folder of an adapter in PEFT's format that training begins with; "" = new ones
    lora_adapter: str = declare("", facts=Facts.IDENTITY)
    # folder of an adapter in PEFT's format that is merged into the base, frozen with it
    lora_base_adapter: str = declare("", facts=Facts.IDENTITY)
    # comma list of outer layers that are trained whole: embed_tokens, lm_head; a reward model's score always is
    modules_to_save: str = declare("", facts=Facts.COST_AND_IDENTITY)


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """The sizes of the mesh."""

    # number of replicas of the sharded state
    dp_replicate_size: int = declare(1, AT_LEAST_1, GPUS, facts=Facts.COST)
    # GPUs over which each replica is sharded, times cp_size; -1 = all that the other sizes leave
    dp_shard_size: int = declare(-1, GPUS, SHARDS, facts=Facts.COST)
    # GPUs of dp_shard_size that divide the experts and send each other tokens, instead of gathering experts' weights
    ep_size: int = declare(1, AT_LEAST_1, GPUS, facts=Facts.COST)
    # GPUs that share the products of each sequence: a part of the heads, MLP and vocabulary on each
    tp_size: int = declare(1, AT_LEAST_1, GPUS, facts=Facts.COST)
    # GPUs that each have a part of every sequence; state is sharded over dp_shard_size x cp_size
    cp_size: int = declare(1, AT_LEAST_1, GPUS, facts=Facts.COST)
    # stages of consecutive layers, each on GPUs of its own; microbatches go from stage to stage
    pp_size: int = declare(1, AT_LEAST_1, GPUS, facts=Facts.COST)


@dataclasses.dataclass(frozen=True)
class ObjectiveSettings:
    """The loss that training minimises."""

    # cross_entropy of the next token; with a teacher's labels: distill; of rows with a chosen and a rejected answer:
    # dpo, ipo, orpo, simpo, and reward, which makes a reward model; of rows with an answer and its rating: kto; of
    # rollouts: grpo
    objective: str = declare(CROSS_ENTROPY, choices=tuple(OBJECTIVES), facts=Facts.COST)


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, and the learning rate."""

    # adamw, adamw8bit (8-bit moments of matrices), normuon (blocks' matrices; others: adamw)
    optimizer: str = declare("adamw", choices=tuple(OPTIMIZERS), facts=Facts.COST)
    # the peak, after the warmup
    learning_rate: float = declare(3e-4, POSITIVE, facts=Facts.NOTHING)
    # after the warmup: cosine, linear, or wsd (constant, then a linear cooldown)
    lr_scheduler_type: str = declare("cosine", choices=SCHEDULES, facts=Facts.NOTHING)
    # steps of linear warmup; 0 = warmup_ratio decides
    warmup_steps: int = declare(0, AT_LEAST_0, facts=Facts.NOTHING)
    # warmup as a fraction of all steps
    warmup_ratio: float = declare(0.0, FRACTION, facts=Facts.NOTHING)
    # wsd: steps of linear decay at the end
    cooldown_steps: int = declare(0, AT_LEAST_0, facts=Facts.NOTHING)
    # learning rate at the end, as a fraction of the peak
    final_lr_fraction: float = declare(0.1, FRACTION, facts=Facts.NOTHING)
    # decoupled, on matrices only
    weight_decay: float = declare(0.1, AT_LEAST_0, facts=Facts.NOTHING)
    # weight of logsumexp(logits)^2 in the gradients (PaLM: 1e-4); reported losses are without it
    z_loss: float = declare(0.0, AT_LEAST_0, facts=Facts.NOTHING)
    # weight of the routers' balance loss, over all tokens of a step (OLMoE: 0.01); reported apart
    router_aux_loss_coef: float = declare(0.0, AT_LEAST_0, facts=Facts.COST)
    # weight of the routers' mean logsumexp(logits)^2 (OLMoE: 0.001); reported apart
    router_z_loss_coef: float = declare(0.0, AT_LEAST_0, facts=Facts.COST)
    # clip gradients to this global norm; 0 = never
    max_grad_norm: float = declare(1.0, AT_LEAST_0, facts=Facts.NOTHING)
