"""A tiny model of every family, exported in every way: what `fixtures/check_exports.py` shows transformers.

Tensors are drawn by numpy from their names. A case is (family, layout of the experts, kind of export).
"""

import hashlib
import itertools
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from commands import convert

from surojax.assembly.from_config import from_config
from surojax.config.fields import default_config, kinds
from surojax.exchange import config_json, expert_tensors, peft
from surojax.exchange.adapter_config import CONFIG as ADAPTER_CONFIG, modules
from surojax.exchange.export import export
from surojax.exchange.gguf_export import export_gguf
from surojax.exchange.gguf_file import is_gguf, open_file
from surojax.exchange.huggingface import model_fields
from surojax.exchange.merge import Merged
from surojax.exchange.model_tensors import INDEX, shapes
from surojax.exchange.naming import naming_of
from surojax.exchange.shards import Shard
from surojax.families.registry import FAMILIES
from surojax.models.kinds.targets import target_names
from surojax.models.lora import Lora
from surojax.models.model import Model
from surojax.placement.mesh import make_mesh

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
WINDOW = {"sliding_window": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
FULL, SLIDING = "full_attention", "sliding_attention"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
DELTA = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
GATED_SHARED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GATED_SHARED |= {"shared_expert_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT_SIZES = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
LATENT |= LATENT_SIZES
GRANITE_4: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]}
GRANITE_4 |= {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 2, "shared_intermediate_size": 64}
GRANITE_4 |= {"position_embedding_type": "rope", "attention_multiplier": 0.2, "embedding_multiplier": 2.0}
# What a family's config.json says besides `SIZES`: every option that is written.
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "ministral3": {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1}},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "smollm3": {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "gemma2": WINDOW | {"num_hidden_layers": 2, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3_text": WINDOW | {"num_hidden_layers": 6, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "olmoe": EXPERTS,
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 32, "norm_topk_prob": True},
    "mixtral": LOCAL_EXPERTS,
    "gpt_oss": LOCAL_EXPERTS
    | WINDOW
    | {"rope_parameters": YARN | {"truncate": False, "original_max_position_embeddings": 64}},
    "granitemoe": LOCAL_EXPERTS
    | {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0, "attention_multiplier": 0.2},
    "granitemoehybrid": LOCAL_EXPERTS | GRANITE_4,
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "use_qk_norm": True}
    | {"num_nextn_predict_layers": 0, "routed_scaling_factor": 1.5, "num_hidden_layers": 3},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | GATED_SHARED | {"rms_norm_eps": 1e-4},
    "qwen3_next": DELTA | GATED_SHARED | {"norm_topk_prob": False, "mlp_only_layers": [0]},
    "lfm2": {"num_hidden_layers": 5, "full_attn_idxs": [1, 4], "block_multiple_of": 32},
    "lfm2_moe": EXPERTS
    | {"num_hidden_layers": 5, "layer_types": ["conv", FULL, "conv", "conv", FULL], "num_dense_layers": 2}
    | {"moe_intermediate_size": 32, "norm_topk_prob": True},
    "glm4_moe_lite": LATENT | {"num_hidden_layers": 3, "routed_scaling_factor": 1.5, "attention_bias": True},
    "deepseek_v2": LATENT
    | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    "deepseek_v3": LATENT
    | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    "olmo2": {"rope_parameters": YARN},
    "olmo3": WINDOW
    | {"num_hidden_layers": 5}
    | {"rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}},
    "muse_glimmer_text": WINDOW | {"num_hidden_layers": 5},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"], "n_groups": 2}
    | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_routed_experts": 4}
    | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 1.5},
    "gemma4_text": WINDOW
    | {"num_hidden_layers": 6, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True},
    "gemma4_unified_text": WINDOW
    | {"num_hidden_layers": 6, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "mistral4": LATENT
    | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
}
# Further models of a family, which are exported as they are and with a config.json that is made.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama llama3": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "llama yarn": {"rope_parameters": YARN},
    "mistral open": {"sliding_window": None},
    "qwen2 windows": WINDOW | {"use_sliding_window": True, "max_window_layers": 1, "layer_types": [SLIDING, FULL]},
    "qwen3 windows": WINDOW | {"use_sliding_window": True, "max_window_layers": 1, "layer_types": [SLIDING, FULL]},
    "gemma2 untied": {"tie_word_embeddings": False},
    "gemma3_text linear": {"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}},
    "qwen3_moe tied": {"tie_word_embeddings": True},
    "olmoe normed": {"norm_topk_prob": True},
    "mixtral windows": WINDOW,
    "glm4_moe_lite plain": {"q_lora_rank": None, "rope_interleave": False, "n_group": 4, "tie_word_embeddings": True}
    | {"mlp_layer_types": ["dense", "dense", "sparse"]},
    "deepseek_v2 plain": {"q_lora_rank": None, "topk_method": "greedy", "rope_parameters": None},
    "olmo2 tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "olmo3 full": {"num_hidden_layers": 2, "layer_types": [FULL, FULL]},
    "muse_glimmer_text turned": {"layer_rope_theta": [1e4] * 5, "qk_scale_factor": 1.5, "tie_word_embeddings": True},
    "gemma4_text plain": {"attention_k_eq_v": False, "layer_types": [SLIDING, FULL] * 3, "tie_word_embeddings": False},
    "gemma4_text experts": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gemma4_text inputs": {"layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 64, "attention_k_eq_v": False},
    "gemma4_text full": {"num_hidden_layers": 2, "layer_types": [FULL, FULL], "final_logit_softcapping": None},
    "deepseek_v3 plain": {"q_lora_rank": None, "rope_interleave": False, "rope_parameters": None, "n_group": 1}
    | {"topk_group": 1, "attention_bias": True},
    "mistral4 plain": {
        "q_lora_rank": None,
        "rope_interleave": False,
        "first_k_dense_replace": 1,
        "attention_bias": True,
    }
    | {"rope_parameters": LINEAR | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}}
    | {"norm_topk_prob": False, "tie_word_embeddings": True},
    "granitemoehybrid dense": {"num_local_experts": 0, "position_embedding_type": None, "tie_word_embeddings": True}
    | {"mamba_conv_bias": False},
    "nemotron_h dense": {"layers_block_type": ["mlp", "linear_attention", "full_attention"], "use_conv_bias": False},
    "glm4_moe plain": {
        "use_qk_norm": False,
        "attention_bias": True,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
}
# Those with matrices or layers of their own, which are also exported with adapters.
ADAPTED = ("gemma4_text inputs", "gemma4_text experts", "nemotron_h dense")
FOLDERS = ("float32", "bfloat16", "float16", "fp8", "nvfp4", "mxfp4")
KINDS = (*FOLDERS, "made", "merged", "adapter", "gguf")
LAYOUTS = ("apart", "together")
# Their classes have none, or another key.
WITHOUT_HEAD_DIM = ("granitemoe", "granitemoehybrid", "olmoe", "qwen2", "glm4_moe_lite", "deepseek_v2", "deepseek_v3")
WITHOUT_HEAD_DIM += ("mistral4",)


# What GGUF files have in place of options that no file says.
SAID_IN_GGUF: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "muse_glimmer_text": {"rms_norm_eps": 1e-5, "post_norm_eps": 1e-8},
    "qwen3_5_moe_text": {"rms_norm_eps": 1e-5},
    "qwen3_next": {"mlp_only_layers": [], "norm_topk_prob": True},
    "glm4_moe_lite": {"num_key_value_heads": 2, "attention_bias": False},
    "deepseek_v2": {"num_key_value_heads": 2, "topk_method": "greedy", "n_group": None, "topk_group": None},
    "deepseek_v3": {"num_key_value_heads": 2, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]},
    "mistral4": {"num_key_value_heads": 2},
}


class Case(NamedTuple):
    """An export. layout: "apart": each expert has tensors of its own, as in a family without experts; "together"."""

    family: str
    layout: str
    kind: str


def cases() -> list[Case]:
    """All cases that a family has; others are refused (`refused`)."""
    every = itertools.product((*FAMILIES, *VARIANTS), LAYOUTS, KINDS)
    return [case for case in map(Case._make, every) if not refused(case)]


def refused(case: Case) -> str:
    """The reason why there is no such export; "": there is."""
    family = FAMILIES[case.family.split()[0]]
    in_one_layout = case.layout == "together" and not family.expert_files.only
    kinds_of_variants = ("float32", "made", "adapter", "merged") if case.family in ADAPTED else ("float32", "made")
    if case.family in VARIANTS and (case.kind not in kinds_of_variants or in_one_layout):
        return "of one model of a family"
    has_experts = bool({"mlp.router", "mlp.experts.router"} & family.tensors.keys())
    if case.layout == "together" and not has_experts:
        return "a model without experts"
    if case.layout == "together" and family.options.get("hidden_act") == "relu2":
        return "experts without a gate are in no file together"
    if case.layout == "apart" and family.expert_files.only:
        return "its files have experts in one tensor"
    if case.kind in ("fp8", "nvfp4") and "conv.taps" in family.tensors:
        return "matrices that are parts of one are not quantised"
    if case.kind == "made" and not family.transformers_class:
        return "transformers has no class for it alone"
    if case.kind == "mxfp4" and case.family != "gpt_oss":
        return "MXFP4 is of gpt-oss"
    if case.kind in ("fp8", "nvfp4") and case.layout == "together":
        return "vLLM reads each expert by itself"
    if case.kind in ("adapter", "gguf") and case.layout == "together" and not family.expert_files.only:
        return "these files have one layout"
    if case.kind == "gguf" and (family.gguf is None or case.family == "mistral"):
        return "no such file"
    return ""


def config_of(case: Case) -> dict[str, Any]:
    """The config.json of a case's tiny model: as a source model has it, or made of the fields alone."""
    family = case.family.split()[0]
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim" or family not in WITHOUT_HEAD_DIM}
    given = {"model_type": family} | sizes | OF_FAMILY[family] | VARIANTS.get(case.family, {})
    if case.kind in ("fp8", "nvfp4"):
        given |= {"hidden_size": 128, "intermediate_size": 256}  # blocks of compressed-tensors are whole ones
        widths = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
        widths += ("moe_shared_expert_intermediate_size", "hidden_size_per_layer_input")
        given |= {name: 128 for name in widths if given.get(name)}
        given |= dict.fromkeys(LATENT_SIZES, 128) if "kv_lora_rank" in given else {}
    if case.kind == "gguf":  # transformers reads neither head_dim nor the experts' width, and takes those of the family
        given |= {"moe_intermediate_size": 768} if family == "qwen3_moe" else {}
        given |= {"head_dim": 128} if family.startswith("qwen3") else {"num_attention_heads": 2}
        given |= SAID_IN_GGUF.get(family, {})
    if case.kind != "made":
        return given
    fields = default_config().model.to_dict() | model_fields(given)
    return config_json.made(fields, 64, {"eos_token_id": 1, "pad_token_id": None}, {family: FAMILIES[family]})


class Drawn:
    """Tensors of a model that numpy draws, by their names. Weights of norms are near 1; routers choose clearly."""

    def __init__(self, model: Model):
        self.path = Path("drawn")
        self._shapes = shapes(model)

    @property
    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> np.ndarray:
        return drawn(name, self._shapes[name]) * (5 if "gate.weight" in name else 1) + self._mean(name)

    @staticmethod
    def _mean(name: str) -> bool:
        """1 for a factor of channels, of experts or of a layer, else 0."""
        return "norm" in name or name.endswith(("layer_scalar", "router.scale", "per_expert_scale"))


def of_each(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Splits each tensor of all experts into one tensor for each expert; returns other tensors unchanged."""
    separate = {}
    for name, tensor in tensors.items():
        apart = {expert_tensors.of_expert(name, e): x for e, x in enumerate(tensor)}
        separate |= apart if expert_tensors.has_all_experts(name) else {name: tensor}
    return separate


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return 0.1 * rng.standard_normal(shape).astype(np.float32)


def model_of(config: dict[str, Any]) -> tuple[Any, Model]:
    """(a run's config, the model) of a config.json."""
    c = default_config()
    c.model.update(model_fields(config))
    return c, from_config(c, make_mesh(jax.devices()[:1]), 1).model


def adapter_of(config: dict[str, Any]) -> peft.AdapterArrays:
    """An adapter of all matrices, of rank 2, with drawn numbers."""
    c, model = model_of(config)
    lora = Lora(2, 4.0, target_names(c.lora_target_modules, kinds(c).values()))
    every = {name.removeprefix(peft.PREFIX): shape for name, shape in peft.tensor_shapes(lora, model).items()}
    stack = lambda target, end: peft.of_layers(
        [drawn(name + end, every[name + end]) for name in modules(model)[target]]
    )
    factors = lambda target: {"a": stack(target, peft.FACTOR_A), "b": stack(target, peft.FACTOR_B)}
    return peft.AdapterArrays(lora, {target: factors(target) for target in lora.targets}, {})


def make(case: Case, folder: Path) -> Path:
    """Exports a case into a new folder, and returns the path of the export; an adapter's has its base beside it."""
    config = config_of(case)
    family = FAMILIES[case.family.split()[0]]
    _, model = model_of(config)
    tensors: Any = Drawn(model)
    together = case.layout == "together" and not family.expert_files.only
    how: Any = {"dtype": case.kind if case.kind in FOLDERS else "float32", "experts_together": together}
    source = config_json.completed(config, "float32")
    if case.kind == "gguf":
        metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(64)]}
        metadata |= {"tokenizer.ggml.token_type": [1] * 64, "tokenizer.ggml.merges": ["t 0"]}
        return export_gguf(tensors, model, source, metadata, folder / "out.gguf", modelfile="", dtype="float32")
    if case.kind in ("adapter", "merged"):
        adapter = adapter_of(config)
        if case.kind == "adapter":
            export(tensors, model, source, {}, folder / "base", dtype="float32")
            return peft.save_adapter(adapter, model, folder / "out", base_name="base", naming=naming_of(config))
        tensors = Merged(tensors, adapter, model)
    if case.kind == "made":
        return export(tensors, model, source, {}, folder / "out", **how)
    export(tensors, model, source, {}, folder / "in", dtype="float32")
    if case.kind == "merged":
        return export(tensors, model, source, {}, folder / "out", **how)
    return convert.convert(folder / "in", folder / "out", **how, say=lambda line: None)


def digest(path: Path) -> str:
    """A digest of an export: names, types and shapes of tensors, and the settings beside them, but no numbers."""
    if is_gguf(path):
        contents = open_file(path)
        of_tensors = {name: [entry.kind.name, [*entry.shape]] for name, entry in contents.tensors.items()}
        said = contents.metadata
    else:
        shards = [Shard(file) for file in sorted(path.glob("*.safetensors"))]
        entries = [item for shard in shards for item in shard.entries.items()]
        of_tensors = {name: [str(entry.dtype), [*entry.shape]] for name, entry in entries}
        names = ("config.json", ADAPTER_CONFIG, INDEX)
        said = {name: json.loads((path / name).read_text()) for name in names if (path / name).is_file()}
    return hashlib.sha256(json.dumps([of_tensors, said], sort_keys=True).encode()).hexdigest()[:16]


def key(case: Case) -> str:
    return " ".join(case)
