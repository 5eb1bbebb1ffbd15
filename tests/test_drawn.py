"""Settings drawn together: gradients stay those of the plain model, and memory costs no bit.

Each test is one row of choices, drawn by a seed (drawn.py) from all models, meshes and placements, recipes, optimizers
and objectives below; a failure prints its row. New paths through the step get a choice here.
"""

import functools
from typing import Any

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import AS_USERS_DO, drawn_params, made_once, tokens, vectors_drawn, worst_relative

from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import architecture, from_config
from surojax.assembly.xla_options import compiler_options
from surojax.config.fields import flat, mesh_sizes
from surojax.models.decoder import Decoder
from surojax.objectives.distillation import Distillation
from surojax.objectives.objective import OfLogProbabilities
from surojax.objectives.objectives import build_objective
from surojax.objectives.rewards import Reward
from surojax.placement.layout import batch_sharding, specs
from surojax.placement.mesh import make_mesh
from surojax.placement.param import OUTER
from surojax.refusals.features import BY_LAYER
from surojax.step.train_step import passes
from surojax.verification.bounds import Curve
from surojax.verification.row_batches import drawn_targets, make_batches
from surojax.verification.settings import RESET, Setting
from surojax.verification.training import build_row, lowered, training_curve

# The same sums in another order: float32 rounds each by 6e-8. Measured: at most 3e-6 of a tensor's largest gradient.
ORDER_OF_SUMS = 1e-5
OFFLOADS = ("offload_residual", "offload_optimizer", "offload_master", "offload_grads", "offload_weights")
ALL: dict[str, Any] = dict.fromkeys(OFFLOADS, True)
A, B, S = 2, 16, 24  # two sequences on each of 8 devices

SIZES: dict[str, Any] = {
    "model.vocab_size": 64,
    "model.hidden_size": 32,
    "model.intermediate_size": 80,
    "model.num_hidden_layers": 3,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "model.head_dim": 8,
    "model_dtype": "float32",
    "attention": "xla",
    "sequence_len": S,
    "per_device_batch_size": 2,
    "gradient_accumulation_steps": A,
    "gpus": 1,
}
WINDOWS: dict[str, Any] = {"model.sliding_window": 5, "model.sliding_window_pattern": 2}
EXPERTS: dict[str, Any] = {
    "model.num_experts": 8,
    "model.num_experts_per_tok": 3,
    "model.moe_intermediate_size": 24,
    "model.norm_topk_prob": True,
}
GEMMA4: dict[str, Any] = {
    "model.num_hidden_layers": 4,
    "model.layer_types": "sliding_attention,global_attention",
    "model.sliding_window": 5,
    "model.global_head_dim": 12,
    "model.num_global_key_value_heads": 4,
    "model.rope_scaling": "proportional",
    "model.rope_partial_rotary_factor": 0.5,
    "model.rope_local_base_freq": 100.0,
    "model.qk_norm": True,
    "model.v_norm_weightless": True,
    "model.sandwich_norms": True,
    "model.layer_scalar": True,
    "model.scale_embedding": True,
    "model.query_pre_attn_scalar": 1.0,
    "model.final_logit_softcapping": 0.5,
    "model.hidden_act": "gelu_pytorch_tanh",
    "model.tie_word_embeddings": True,
    "model.rms_norm_eps": 1e-2,
}
# What families differ in; caps as small as the scores and logits, so that they matter.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen": {
        "model.attention_bias": True,
        "model.qk_norm": True,
        "model.tie_word_embeddings": True,
        "model.head_dim": 16,
        "model.num_key_value_heads": 1,
    },
    "gemma": WINDOWS
    | {
        "model.num_hidden_layers": 5,
        "model.tie_word_embeddings": True,
        "model.qk_norm": True,
        "model.norm_plus_one": True,
        "model.sandwich_norms": True,
        "model.hidden_act": "gelu_pytorch_tanh",
        "model.scale_embedding": True,
        "model.query_pre_attn_scalar": 5.0,
        "model.attn_logit_softcapping": 0.5,
        "model.final_logit_softcapping": 0.5,
        "model.rope_local_base_freq": 100.0,
        "model.initializer_range": 0.3,
    },
    "smollm": {"model.num_hidden_layers": 5, "model.no_rope_layer_interval": 2, "model.rope_theta": 100.0},
    "ministral": {
        "model.rope_scaling": "yarn",
        "model.rope_factor": 4.0,
        "model.rope_original_max_position_embeddings": 10,
        "model.rope_partial_rotary_factor": 0.5,
        "model.rope_llama_4_scaling_beta": 0.4,
    },
    "gpt_oss": WINDOWS
    | EXPERTS
    | {
        "model.expert_bias": True,
        "model.attention_bias": True,
        "model.attention_out_bias": True,
        "model.attention_sinks": True,
        "model.hidden_act": "clamped_swiglu",
    },
    "olmoe": EXPERTS | {"model.qk_norm_whole": True},
    "olmo3": WINDOWS
    | {
        "model.input_norms": False,
        "model.sandwich_norms": True,
        "model.qk_norm_whole": True,
        "model.rope_local_base_freq": 100.0,
        "model.rope_scaling": "yarn",
        "model.rope_factor": 4.0,
        "model.rope_original_max_position_embeddings": 10,
    },
    "muse": WINDOWS
    | {
        "model.no_rope_layer_interval": 2,
        "model.layers_from_last": True,
        "model.sandwich_norms": True,
        "model.post_norm_eps": 0.1,
        "model.norm_plus_one": True,
        "model.plain_final_norm": True,
        "model.qk_norm_weightless": True,
        "model.attn_gate_proj": True,
        "model.embedding_norm": True,
        "model.logits_scaling": 2.0,
        "model.final_logit_softcapping": 0.5,
    },
    "delta": {
        "model.num_hidden_layers": 4,
        "model.layer_types": "linear_attention,full_attention",
        "model.linear_num_key_heads": 4,
        "model.linear_num_value_heads": 8,
        "model.linear_key_head_dim": 4,
        "model.linear_value_head_dim": 6,
        "model.qk_norm": True,
        "model.attn_output_gate": True,
    },
    "lfm2": {"model.num_hidden_layers": 4, "model.qk_norm": True, "model.layer_types": "conv,full_attention"},
    "nemotron": EXPERTS
    | {
        "model.num_hidden_layers": 4,
        "model.layer_types": "mamba2,experts,full_attention,mlp",
        "model.one_purpose": True,
        "model.hidden_act": "relu2",
        "model.scoring_func": "sigmoid",
        "model.routed_scaling_factor": 2.0,
        "model.moe_shared_intermediate_size": 16,
        "model.mamba_n_heads": 8,
        "model.mamba_d_head": 6,
        "model.mamba_d_state": 5,
        "model.mamba_n_groups": 2,
        "model.mamba_dt_min": 0.05,
        "model.mamba_dt_max": 0.09,
        "model.no_rope_layer_interval": 1,
    },
    "deepseek": EXPERTS
    | {
        "model.layer_types": "latent_attention",
        "model.head_dim": 0,
        "model.num_key_value_heads": 4,
        "model.q_lora_rank": 24,
        "model.kv_lora_rank": 16,
        "model.qk_nope_head_dim": 6,
        "model.qk_rope_head_dim": 4,
        "model.v_head_dim": 5,
        "model.scoring_func": "sigmoid",
        "model.n_group": 4,
        "model.topk_group": 2,
        "model.n_shared_experts": 1,
        "model.rope_scaling": "yarn",
        "model.rope_factor": 4.0,
        "model.rope_original_max_position_embeddings": 10,
        "model.rope_mscale_all_dim": 1.0,
    },
    "gemma4": GEMMA4 | EXPERTS | {"model.experts_beside_mlp": True, "model.attention_k_eq_v": True},
    "gemma4_e": GEMMA4
    | {
        "model.num_kv_shared_layers": 2,
        "model.use_double_wide_mlp": True,
        "model.hidden_size_per_layer_input": 16,
        "model.vocab_size_per_layer_input": 80,
    },
}
MESHES: dict[str, dict[str, Any]] = {
    "1": {"gpus": 1},
    "dp4": {"gpus": 4},
    "dp2x4": {"gpus": 8, "dp_replicate_size": 2},
    "tp4": {"gpus": 4, "tp_size": 4},
    "dp2-tp2": {"gpus": 4, "tp_size": 2},
    "ulysses2-dp2": {"gpus": 4, "cp_size": 2, "cp_method": "ulysses"},
    "allgather4-dp2": {"gpus": 8, "cp_size": 4, "cp_method": "allgather"},
    "ring2-tp2-dp2": {"gpus": 8, "cp_size": 2, "cp_method": "ring", "tp_size": 2},
    "ring4-tp2": {"gpus": 8, "cp_size": 4, "cp_method": "ring", "tp_size": 2},
    "pp2-dp2": {"gpus": 4, "pp_size": 2},
    "pp4-dp2": {"gpus": 8, "pp_size": 4},
    "1f1b2-dp2x2": {"gpus": 8, "pp_size": 2, "pp_schedule": "1f1b", "dp_replicate_size": 2},
    "1f1b2-tp2-dp2": {"gpus": 8, "pp_size": 2, "pp_schedule": "1f1b", "tp_size": 2},
    "1f1b2-allgather2": {"gpus": 4, "pp_size": 2, "pp_schedule": "1f1b", "cp_size": 2, "cp_method": "allgather"},
    "ep2-dp2": {"gpus": 4, "ep_size": 2},
}
SHARDED: dict[str, dict[str, Any]] = {
    "zero1": {"zero_level": 1},
    "zero2": {"zero_level": 2},
    "zero3": {"zero_level": 3},
    "weights": {"shard_weights": True},
    "zero3-outer": {"zero_level": 3, "shard_outer": True},
    "zero3-all_to_all": {"zero_level": 3, "use_all_to_all_reduce": True},
}
HOMES: dict[str, dict[str, Any]] = {
    "device": {},
    "residuals": {"offload_residual": True},
    "weights": {"offload_weights": True, "offload_grads": True},
    "all": ALL,
    "resident": ALL | {"resident_layers": 1},
}
PARTS = dict.fromkeys(("recompute_norm", "recompute_swiglu", "recompute_ffn", "recompute_att"), True)
RECOMPUTED: dict[str, dict[str, Any]] = {
    "blocks": {},
    "nothing": {"recompute_block": False},
    "parts": PARTS | {"recompute_block": False},
}
# Of each kind of arrays and sums one: of tokens, pairs, means of tokens, other devices' sequences, tokens with numbers.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "cross_entropy": {},
    "dpo": {"objective": "dpo"},
    "orpo": {"objective": "orpo"},
    "kto": {"objective": "kto", "undesirable_weight": 0.5},
    "grpo": {"objective": "grpo", "grpo_beta": 0.2, "grpo_loss_type": "grpo"},
    "reward": {"objective": "reward", "model.num_labels": 1, "center_rewards_coefficient": 0.1},
    "distill": {"objective": "distill", "distill_top_k": 4, "distill_temperature": 2.0},
}
OF_REFERENCE = ("dpo", "kto", "grpo")
PLAIN: drawn.Choices = {
    "model": MODELS,
    "documents": {"whole": {}, "packed": {"sample_packing": True}},
    "mesh": MESHES,
    "sharded": SHARDED,
    "homes": HOMES,
    "recomputed": RECOMPUTED,
    "chunks": {"1": {}, "2": {"sequence_chunks": 2}, "4": {"sequence_chunks": 4}},
    "fetch": {"1": {}, "2": {"microbatches_per_fetch": 2}},
    "head": {"1": {}, "4": {"lmhead_chunks": 4}},
    "objective": OBJECTIVES,
}
QUICK, FULL = 0, 44  # rows of `pytest`, and of `pytest --all`


@functools.cache
def rows_of_plain(seed: int) -> list[drawn.Row]:
    return drawn.drawn(PLAIN, QUICK + FULL, seed, SIZES)


@functools.cache
def batch(row_objective: str, packed: bool) -> dict[str, np.ndarray]:
    """The arrays of a step by name, `[A, B, S]`: inputs, what the objective reads, and with documents their starts.

    Documents end at, before and after the edges of the parts that devices and chunks have of a sequence. The second
    half of a packed row has no label, so that devices with that part count none.
    """
    inputs, labels = tokens(A, B, S)
    starts = np.zeros_like(inputs)
    if packed:  # both sequences of a pair have the same starts
        firsts = [(0, 6, 12, 18), (0, 5, 11, 17), (0, 7, 13, 19), (0, 1, 23), (0,), (0, 10), (0, 22), (0, 3, 9, 21)]
        of_rows = [[max(x for x in row if x <= s) for s in range(S)] for row in firsts for _ in range(B // len(firsts))]
        labels = np.where(np.arange(S) < 12, labels, np.int32(-1))
        starts = np.broadcast_to(np.array(of_rows, np.int32), inputs.shape)
    rng = np.random.default_rng(1)
    targets = drawn_targets(objective_of(row_objective), labels, starts, SIZES["model.vocab_size"], rng)
    return {"inputs": inputs, **targets} | ({"starts": starts} if packed else {})


def objective_of(row_objective: str):
    """The objective of this choice."""
    return build_objective(flat(drawn.config_of(OBJECTIVES[row_objective])))


@functools.cache
def reference(model: str, row_objective: str, packed: bool):
    """(loss, gradients) of the plain model."""
    config = architecture(drawn.config_of(SIZES | MODELS[model] | OBJECTIVES[row_objective]))
    arrays = {name: jnp.asarray(x) for name, x in batch(row_objective, packed).items()}
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    objective = objective_of(row_objective)

    def loss(params):
        rows = (A * B, S)
        starts = arrays["starts"].reshape(rows) if packed else None
        logits = nnx.merge(graph, params)(arrays["inputs"].reshape(rows), starts).reshape(A, B, S, -1)
        return of_logits(objective, logits, arrays)

    return jax.device_get(jax.jit(jax.value_and_grad(loss))(drawn_params(config, 0)))


def of_logits(objective, logits: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
    """The loss of a step from the logits of all its tokens; of answers microbatch by microbatch."""
    if isinstance(objective, Distillation):
        each = functools.partial(distilled, objective)
        of_tokens = jnp.vectorize(each, signature="(v),(),(k),(c)->()")(
            logits, arrays["labels"], arrays["teacher_ids"], arrays["teacher"]
        )
        return jnp.sum(jnp.where(arrays["labels"] >= 0, of_tokens, 0.0)) / objective.count(arrays)
    nats = jax.nn.log_softmax(logits)
    of_labels = jnp.take_along_axis(nats, jnp.maximum(arrays["labels"], 0)[..., None], axis=-1)[..., 0]
    logprob = jnp.where(arrays["labels"] >= 0, of_labels, 0.0)
    if not isinstance(objective, OfLogProbabilities):
        return -jnp.sum(logprob) / objective.count(arrays)
    of_tokens = logits[..., 0] if isinstance(objective, Reward) else logprob
    sums = [objective.sums(of_tokens[a], {name: x[a] for name, x in arrays.items()})["loss"] for a in range(A)]
    return sum(sums, start=jnp.float32(0)) / objective.count(arrays)


def distilled(objective: Distillation, logits, label, ids, of_teacher) -> jax.Array:
    """The loss of one token: the teacher's tokens, and all others added up to one more."""
    s = jax.nn.softmax(logits / objective.temperature)
    s = jnp.append(s[ids], 1.0 - jnp.sum(s[ids]))
    kl = jnp.sum(jnp.exp(of_teacher) * (of_teacher - jnp.log(s)))
    nats = -jax.nn.log_softmax(logits)[label]
    return (1 - objective.weight) * nats + objective.weight * objective.temperature**2 * kl


def without_padding(sections: dict, expected: dict) -> dict:
    """The arrays by section with the layers of the model only; zeros are behind them in uneven stages."""

    def cut(x, like):
        assert not np.any(np.asarray(x)[len(like) :])
        return np.asarray(x)[: len(like)]

    layers = {name: jax.tree.map(cut, x, expected[name]) for name, x in sections.items() if name != OUTER}
    return sections | layers


def drawn_state(run: Assembly):
    with vectors_drawn():
        return run.init_state(0)


def numbered(quick: int, full: int) -> list:
    """Parameters of a test: the numbers of its rows."""
    return [pytest.param(i, marks=[pytest.mark.full] * (i >= quick)) for i in range(quick + full)]


@pytest.mark.parametrize("number", numbered(QUICK, FULL))
def test_gradients_are_those_of_the_plain_model(number, pytestconfig):
    """Loss, every gradient, and their norm; whatever is sharded, offloaded, recomputed and fetched."""
    row = rows_of_plain(pytestconfig.option.drawn_by)[number]
    print(row)
    c = drawn.config_of(SIZES | drawn.fields_of(PLAIN, row))
    mesh = make_mesh(jax.devices()[: c.gpus], **mesh_sizes(c))
    run = from_config(c, mesh, total_steps=20)
    arrays = batch(row["objective"], c.sample_packing)
    weights = made_once(run.plan, functools.partial(drawn_state, run), row["model"], c.model.num_labels).weights
    gradients = jax.shard_map(
        lambda w, *arrays: passes(mesh).loss_and_gradients(run.engine, w, *arrays)[:3],
        mesh=mesh,
        in_specs=(
            jax.tree.map(lambda x: x.sharding.spec, run.plan.weights),
            *(batch_sharding(mesh).spec,) * len(run.engine.batch_arrays),
        ),
        out_specs=(jax.P(), specs(run.engine.layouts.master), jax.P()),
    )
    on_devices = jax.device_put([arrays[name] for name in run.engine.batch_arrays], batch_sharding(mesh))
    compiled = jax.jit(gradients, compiler_options=compiler_options(run, "cpu"))
    means, grads, norm = jax.device_get(compiled(weights, *on_devices))
    expected_loss, expected = reference(row["model"], row["objective"], c.sample_packing)
    # GRPO's terms are about 1 and have both signs: their sum, 0.008 in a row, has their rounding.
    of_terms = 1e-6 if row["objective"] == "grpo" else 0.0
    assert float(means["loss"]) == pytest.approx(float(expected_loss), rel=ORDER_OF_SUMS, abs=of_terms)
    assert worst_relative(without_padding(grads, expected), expected) < ORDER_OF_SUMS
    squares = sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(expected))
    assert float(norm) == pytest.approx(squares**0.5, rel=ORDER_OF_SUMS)


# --- memory costs no bit ----------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = SIZES | {  # blocks of all recipes and of NF4 divide it, halves of it too
    "model.hidden_size": 64,
    "model.intermediate_size": 256,
    "model.head_dim": 32,
    "model_dtype": "bfloat16",
    "sequence_len": 32,
    "learning_rate": 1e-2,
}
OF_EXPERTS: dict[str, Any] = {"model.moe_intermediate_size": 128}
SOME_GIB = 0.0005  # a part of what these small models have
NVME: dict[str, Any] = {"nvme_path": "folder"}  # for the checks
STATE_IN_FILES: dict[str, Any] = NVME | {"offload_optimizer": "nvme", "offload_master": "nvme"}
FILES: dict[str, Any] = NVME | dict.fromkeys(OFFLOADS, "nvme")
LORA: dict[str, Any] = {"lora": True, "lora_rank": 4}
NUMBERS: dict[str, dict[str, dict[str, Any]]] = {
    "model": {name: MODELS[name] for name in ("llama", "qwen", "smollm", "ministral")}
    | {"windows": WINDOWS, "olmoe": MODELS["olmoe"] | OF_EXPERTS, "gpt_oss": MODELS["gpt_oss"] | OF_EXPERTS},
    "documents": PLAIN["documents"],
    "objective": OBJECTIVES,
    "mesh": MESHES,
    "sharded": SHARDED,
    "recomputed": RECOMPUTED,
    "dtype": {
        "float32": {"model_dtype": "float32"},
        "bfloat16": {},
        "bfloat16 masters": {"master_dtype": "bfloat16", "accum_dtype": "bfloat16", "opt_m_dtype": "bfloat16"},
    },
    "recipe": {name: {"recipe": name} for name in ("bf16", "fp8_hybrid", "fp8_current", "mxfp8", "nvfp4")},
    "trained": {name: {"optimizer": name} for name in ("adamw", "adamw8bit", "normuon", "lion")}
    | {
        "lora": LORA,
        "nf4": LORA | {"qlora_bnb": True},
        "nvfp4": LORA | {"qlora_fp4": True},
        "fp8": LORA | {"qlora_fp8": True},
    },
}
MEMORY: dict[str, dict[str, dict[str, Any]]] = {
    "homes": {name: HOMES[name] for name in HOMES if name != "device"}
    | {
        "state": {"offload_optimizer": True, "offload_master": True},
        "all but weights": ALL | {"offload_weights": False},
        "device_memory": ALL | {"device_memory": SOME_GIB},
        "state in files": ALL | STATE_IN_FILES,
        "weights in files": NVME | {"offload_weights": "nvme", "offload_grads": True},
        "files": FILES,
        "files, some in memory": FILES | {"files_in_memory": SOME_GIB},
        "residuals in files": NVME | {"offload_residual": "nvme"},
    },
    "fetch": PLAIN["fetch"],
    "update": {"now": {"overlap_update": False}, "late": {"overlap_update": True}},
}
BITS: drawn.Choices = NUMBERS | MEMORY
BITS_ROWS = 7


@functools.cache
def rows_of_bits(seed: int) -> list[drawn.Row]:
    return drawn.drawn(BITS, BITS_ROWS, seed, WIDE)


def trained(fields: dict[str, Any], levels: dict[str, Any]) -> Curve:
    """(loss, gradient norm) of three steps, with these levels of the compiler; files are in a folder made for them."""
    c = drawn.config_of(fields | {"nvme_path": ""})
    batches, microbatches = make_batches(c, 8, steps=3)
    setting = Setting("drawn", {name: c[name] for name in (*RESET, "precompute_ref_log_probs")}, c.gpus)
    with build_row(c, setting, batches, microbatches, jax.devices()) as row:
        step = lowered(row).compile(compiler_options(row.run, "cpu") | levels)
        return list(training_curve(row, step, row.run.init_state(0), batches))


@pytest.mark.parametrize("number", numbered(0, BITS_ROWS))
def test_memory_costs_no_bit(number, pytestconfig):
    """Losses and norms of three steps with what this row offloads, groups and defers, and without."""
    row = rows_of_bits(pytestconfig.option.drawn_by)[number]
    print(row)
    fields = WIDE | drawn.fields_of(BITS, row)
    plain = WIDE | drawn.fields_of(BITS, {part: choice for part, choice in row.items() if part in NUMBERS})
    if fields.get("model.tie_word_embeddings"):  # gets the gradients of a group's heads, then those of its embeddings
        by_layer = any(fields.get(name) == "nvme" for name in BY_LAYER)
        plain["microbatches_per_fetch"] = A if by_layer else fields.get("microbatches_per_fetch", 1)
    if "nvme" in fields.values() and row["objective"] in OF_REFERENCE:  # programs of one layer compute none
        fields["precompute_ref_log_probs"] = plain["precompute_ref_log_probs"] = True
    # At the tests' levels XLA may contract a product and a sum in one of two programs; those of users then decide.
    if trained(fields, {}) != trained(plain, {}):
        assert trained(fields, AS_USERS_DO) == trained(plain, AS_USERS_DO)
