"""The table of settings that are verified: the fields that each row changes, and its reference row."""

import difflib
import fnmatch
from collections.abc import Sequence
from typing import Any, NamedTuple

from surojax.config import Config, default_config
from surojax.config.sections import MeshSettings
from surojax.declared import names_of
from surojax.errors import ConfigError
from surojax.models.model import Compute
from surojax.numerics.recipes import Precision
from surojax.offloads import OPTIONS, ROWS
from surojax.placement.table import Storage
from surojax.refusals.features import BY_LAYER, RECOMPUTE_PARTS
from surojax.step.spec import StepSettings


class Setting(NamedTuple):
    """A row of the table: a setting, and its reference row."""

    name: str
    changes: dict[str, Any]  # {field of the config: value}
    devices: int = 1
    like: str = "plain"  # name of the reference row
    expect: str = "same"  # name of the bound, see `bounds`
    split: int = 1  # factor on the number of microbatches


OFFLOADS = tuple(ROWS)
ALL: dict[str, Any] = dict.fromkeys(OFFLOADS, True)
NVME: dict[str, Any] = {"offload_optimizer": "nvme", "offload_master": "nvme"}
NVME_ALL: dict[str, Any] = dict.fromkeys(OFFLOADS, "nvme")
SAVED: dict[str, Any] = {"recompute_block": False}
PACKED: dict[str, Any] = {"sample_packing": True}
PARTS: dict[str, Any] = dict.fromkeys(RECOMPUTE_PARTS, True)
GROUPED: dict[str, Any] = {"microbatches_per_fetch": 2}
OVERLAPPED: dict[str, Any] = ALL | {"overlap_update": True}
CHUNKS: dict[str, Any] = {"sequence_chunks": 4}
TWO_CHUNKS: dict[str, Any] = {"sequence_chunks": 2}
ZERO3: dict[str, Any] = {"zero_level": 3}
HSDP: dict[str, Any] = ZERO3 | {"dp_replicate_size": 2}
TP: dict[str, Any] = {"tp_size": 2}
ZERO3_TP: dict[str, Any] = ZERO3 | TP
CP: dict[str, dict[str, Any]] = {
    "ulysses": {"cp_size": 2},
    "allgather": {"cp_size": 2, "cp_method": "allgather", "attention": "xla"},
    "ring": {"cp_size": 2, "cp_method": "ring", "attention": "xla"},
}
PP: dict[str, Any] = {"pp_size": 2}
PP_1F1B: dict[str, Any] = PP | {"pp_schedule": "1f1b"}
FP8: dict[str, Any] = {"zero_level": 3, "zero_quantized_weights": "fp8"}
INT8: dict[str, Any] = {"zero_level": 3, "zero_quantized_weights": "int8"}
LORA: dict[str, Any] = {"lora": True, "lora_rank": 4, "lora_alpha": 16.0, "modules_to_save": "embed_tokens"}
LORA_OFFLOADS: dict[str, Any] = LORA | ALL | {"offload_master": False}
NF4: dict[str, Any] = {"qlora_bnb": True}  # needs model sizes that are multiples of 64, on each of tp_size GPUs
QLORA: dict[str, Any] = LORA | NF4
QLORA_FP8: dict[str, Any] = LORA | {"qlora_fp8": True}
QLORA_FP4: dict[str, Any] = LORA | {"qlora_fp4": True}
QLORA_MXFP4: dict[str, Any] = LORA | {"qlora_mxfp4": True}  # of experts
QLORA_OFFLOADS: dict[str, Any] = LORA_OFFLOADS | NF4
EXPERTS: dict[str, Any] = {  # 5 on 4 GPUs: sharded over their width, see EVEN
    "model.num_experts": 5,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 128,
    "model.norm_topk_prob": True,
}
EVEN: dict[str, Any] = EXPERTS | {"model.num_experts": 8}  # sharded over experts
SHARED: dict[str, Any] = EXPERTS | {  # two segments of layers
    "model.scoring_func": "sigmoid",
    "model.routed_scaling_factor": 1.5,
    "model.n_shared_experts": 1,
    "model.first_k_dense_replace": 1,
}
EACH: dict[str, Any] = {"lora_target_modules": "q_proj,gate_proj,up_proj,down_proj"}  # of each expert
EP: dict[str, Any] = EVEN | ZERO3 | {"ep_size": 2}
EP4: dict[str, Any] = EP | {"ep_size": 4}
HYBRID: dict[str, Any] = {"model.layer_types": "conv,full_attention"}
DELTA: dict[str, Any] = {
    "model.layer_types": "linear_attention,full_attention",
    "model.linear_num_key_heads": 2,
    "model.linear_num_value_heads": 4,
    "model.linear_key_head_dim": 32,
    "model.linear_value_head_dim": 16,
}
MAMBA: dict[str, Any] = {
    "model.layer_types": "mamba2,full_attention",
    "model.mamba_n_heads": 4,
    "model.mamba_d_head": 32,
    "model.mamba_d_state": 16,
}
ONE_PURPOSE: dict[str, Any] = EVEN | {  # as Nemotron-H
    "model.layer_types": "full_attention,experts,mlp,experts",
    "model.one_purpose": True,
    "model.hidden_act": "relu2",
}
LATENT: dict[str, Any] = {
    "model.layer_types": "latent_attention",
    "model.head_dim": 0,
    "model.q_lora_rank": 48,
    "model.kv_lora_rank": 32,
    "model.qk_nope_head_dim": 24,
    "model.qk_rope_head_dim": 8,
    "model.v_head_dim": 16,
}
GLOBAL: dict[str, Any] = {  # as Gemma 4 E: the last two layers have the keys of the first two
    "model.layer_types": "sliding_attention,global_attention",
    "model.sliding_window": 16,
    "model.global_head_dim": 64,
    "model.num_global_key_value_heads": 1,
    "model.attention_k_eq_v": True,
    "model.num_kv_shared_layers": 2,
    "model.hidden_size_per_layer_input": 32,
    "model.layer_scalar": True,
}
QUANTS: dict[str, Any] = {"persistent_quants": True, "offload_quants": True}

# A row is there for a path through the step. Each field alone; each axis of the mesh alone, with every offload, with
# classes in files, with packed documents and with adapters; each two axes together with every offload. Everything else
# is drawn (tests/test_drawn.py). To add a setting, add a line. @n in a name: on n devices.
SETTINGS: tuple[Setting, ...] = (
    Setting("plain", {}),
    # Activations
    Setting("recompute_block=false", SAVED, expect="saved"),
    Setting("recompute_parts", SAVED | PARTS, expect="saved"),
    Setting("sequence_chunks", CHUNKS, expect="order"),
    Setting("lmhead_chunks", {"lmhead_chunks": 8}, expect="order"),
    Setting("gradient_accumulation_steps", {}, expect="order", split=2),
    Setting("microbatches_per_fetch", GROUPED, like="gradient_accumulation_steps", expect="grouped", split=2),
    Setting("sample_packing", PACKED, expect="documents"),
    # Host memory
    *(Setting(name, {name: True}) for name in OFFLOADS),
    Setting("offload_all", ALL),
    Setting("overlap_update", OVERLAPPED),
    Setting("resident_layers", {"offload_weights": True, "resident_layers": 1}),
    Setting("offload_all@4", ZERO3 | ALL, 4, like="zero_level=3@4"),
    Setting("overlap_update@4", ZERO3 | OVERLAPPED, 4, like="zero_level=3@4"),
    Setting("resident_layers@4", ZERO3 | ALL | {"resident_layers": 1}, 4, like="zero_level=3@4"),
    Setting("device_memory@4", ZERO3 | ALL | {"device_memory": 0.001}, 4, like="zero_level=3@4"),
    Setting("offload_saved@4", ZERO3 | SAVED | ALL, 4, like="zero_level=3@4", expect="saved"),
    # Disk
    *(Setting(f"{name}=nvme", {name: "nvme"}) for name in NVME),
    *(Setting(f"{name}=nvme", {name: "nvme"}, expect="grouped") for name in OFFLOADS if name not in NVME),
    Setting("nvme@4", ZERO3 | ALL | NVME | {"device_memory": 0.001}, 4, like="zero_level=3@4"),
    Setting("nvme_all@4", ZERO3 | NVME_ALL, 4, like="zero_level=3@4", expect="grouped"),
    Setting("nvme_slots", NVME_ALL | {"nvme_slots": 2}, expect="grouped"),
    Setting("nvme_all_in_memory", NVME_ALL | {"files_in_memory": 0.001}, expect="grouped"),
    # Mesh
    *(Setting(f"zero_level={n}@4", {"zero_level": n}, 4, expect="order") for n in (1, 2, 3)),
    Setting("zero_level=3@8", ZERO3, 8, expect="order"),
    Setting("shard_gradients@4", {"shard_gradients": True}, 4, expect="order"),
    Setting("shard_weights@4", {"shard_weights": True}, 4, expect="order"),
    Setting("shard_outer@4", ZERO3 | {"shard_outer": True}, 4, expect="order"),
    Setting("hsdp_2x2", HSDP, 4, expect="order"),
    Setting("hsdp_2x2_offload_all", HSDP | ALL, 4, like="hsdp_2x2"),
    Setting("hsdp_2x2_nvme_all", HSDP | NVME_ALL, 4, like="hsdp_2x2", expect="grouped"),
    Setting("hsdp_2x2_sample_packing", HSDP | PACKED, 4, like="sample_packing", expect="order"),
    # Tensor parallelism: dp_shard_size x tp_size
    Setting("tp@2", TP, 2, expect="order"),
    Setting("tp_saved@2", TP | SAVED, 2, like="tp@2", expect="saved"),
    Setting("tp@4", {"tp_size": 4}, 4, expect="order"),  # with 2 key/value heads, two devices share each
    Setting("tp_2x2", ZERO3_TP, 4, expect="order"),
    Setting("tp_2x2_offload_all", ZERO3_TP | ALL, 4, like="tp_2x2"),
    Setting("tp_2x2_nvme_all", ZERO3_TP | NVME_ALL, 4, like="tp_2x2", expect="grouped"),
    Setting("tp_2x2_sample_packing", ZERO3_TP | PACKED, 4, like="sample_packing", expect="order"),
    # Context parallelism: dp_shard_size x cp_size
    Setting("cp_ring_2x2", ZERO3 | CP["ring"], 4, expect="order"),
    *(
        Setting(f"cp_{name}_2x2_sample_packing", ZERO3 | method | PACKED, 4, like="sample_packing", expect="order")
        for name, method in CP.items()
    ),
    Setting("cp_ring_2x2_offload_all", ZERO3 | CP["ring"] | ALL, 4, like="cp_ring_2x2"),
    Setting("cp_ring_2x2_nvme_all", ZERO3 | CP["ring"] | NVME_ALL, 4, like="cp_ring_2x2", expect="grouped"),
    # Pipeline parallelism: pp_size x dp_shard_size
    Setting("pp_2x2", ZERO3 | PP, 4, expect="order"),
    Setting("pp_2x2_offload_all", ZERO3 | PP | ALL, 4, like="pp_2x2"),
    Setting("pp_2x2_nvme", ZERO3 | PP | ALL | NVME, 4, like="pp_2x2"),
    Setting("pp_2x2_sample_packing", ZERO3 | PP | PACKED, 4, like="sample_packing", expect="order"),
    # Two axes, and chunks of the sequence divided over both
    Setting("hsdp_tp_2x2x2_offload_all", HSDP | TP | ALL, 8, expect="order"),
    Setting("hsdp_cp_2x2x2_offload_all", HSDP | CP["ulysses"] | ALL, 8, expect="order"),
    Setting("hsdp_pp_2x2x2_offload_all", HSDP | PP | ALL, 8, expect="order"),
    *(
        Setting(f"cp_{name}_tp_2x2x2_offload_all", ZERO3_TP | ALL | method, 8, expect="order")
        for name, method in CP.items()
        if name != "allgather"
    ),
    Setting("pp_cp_allgather_2x2x2_offload_all", ZERO3 | PP | CP["allgather"] | ALL, 8, expect="order"),
    Setting("pp_tp_2x2x2_offload_all", ZERO3 | PP_1F1B | TP | ALL, 8, expect="order"),
    Setting("cp_tp_chunks_2x2x2", ZERO3_TP | TWO_CHUNKS | CP["ulysses"] | ALL | PACKED, 8, "sample_packing", "order"),
    # Communication
    Setting("use_all_to_all_reduce@4", ZERO3 | {"use_all_to_all_reduce": True}, 4, expect="order"),
    Setting("zero_quantized_gradients@4", ZERO3 | {"zero_quantized_gradients": True}, 4, "zero_level=3@4", "sent_int8"),
    Setting("zero_quantized_weights=fp8@4", FP8, 4, like="zero_level=3@4", expect="fp8"),
    Setting("zero_quantized_weights=int8@4", INT8, 4, like="zero_level=3@4", expect="int8"),
    Setting("offload_quants_all@4", FP8 | QUANTS | ALL, 4, like="zero_quantized_weights=fp8@4"),
    Setting("memcpy_all_gather@4", ZERO3 | {"memcpy_all_gather": True}, 4, like="zero_level=3@4"),
    Setting(
        "memcpy_send_recv@4",
        ZERO3 | {"use_all_to_all_reduce": True, "memcpy_send_recv": True},
        4,
        like="use_all_to_all_reduce@4",
    ),
)

# With the plain row they share the base; then each other. There are none if the config itself trains adapters.
ADAPTERS: tuple[Setting, ...] = (
    Setting("lora", LORA, expect="adapters"),
    Setting("lora_offload_all", LORA_OFFLOADS, like="lora"),
    Setting("lora_hsdp_2x2", LORA | HSDP, 4, like="lora", expect="order"),
    Setting("lora_tp_2x2", LORA_OFFLOADS | ZERO3_TP, 4, like="lora", expect="order"),
    Setting("lora_cp_ring_2x2", LORA | ZERO3 | CP["ring"], 4, like="lora", expect="order"),
    Setting("lora_pp_2x2", LORA | ZERO3 | PP_1F1B, 4, like="lora", expect="order"),
    Setting("qlora", QLORA, like="lora", expect="nf4"),
    Setting("qlora_offload_all", QLORA_OFFLOADS, like="qlora"),
    Setting("qlora_tp_2x2_offload_all", QLORA_OFFLOADS | ZERO3_TP, 4, like="qlora", expect="order"),
    Setting("qlora_fp8", QLORA_FP8, like="lora", expect="fp8"),
    Setting("qlora_fp4", QLORA_FP4, like="lora", expect="fp4"),
)
# Each token has some of the matrices: they are compared with each other. There are none if the config has experts.
MIXTURES: tuple[Setting, ...] = (
    Setting("experts", EXPERTS, expect="another"),
    Setting("experts_nvme_all", EXPERTS | NVME_ALL, like="experts", expect="grouped"),
    Setting("experts_even", EVEN, like="experts", expect="another"),
    # Tokens are sent to experts: dp_shard_size of which ep_size is a part, and other axes before or behind them.
    Setting("experts_ep@4", EP4, 4, "experts_even", "order"),
    Setting("experts_ep_tp_2x2x2", EP | TP | ALL, 8, "experts_even", "order"),
    Setting("experts_ep_pp_2x2x2", EP | PP | ALL, 8, "experts_even", "order"),
    # With shared experts, behind a layer without experts.
    Setting("experts_shared", SHARED, like="experts", expect="another"),
    Setting("experts_shared_offload_all@4", SHARED | ZERO3 | ALL, 4, like="experts_shared", expect="order"),
    # Adapters of the experts too.
    Setting("experts_lora", EXPERTS | LORA, like="experts", expect="adapters"),
    Setting("experts_adapted", EXPERTS | LORA | EACH, like="experts_lora", expect="adapters"),
    Setting("experts_qlora_mxfp4", EXPERTS | QLORA_MXFP4, like="experts_lora", expect="fp4"),
)
# Models with other mixers: they are compared with each other.
HYBRIDS: tuple[Setting, ...] = (
    Setting("hybrid", HYBRID, expect="another"),
    Setting("hybrid_nvme_all", HYBRID | NVME_ALL, like="hybrid", expect="grouped"),
    Setting("hybrid_zero_level=3@4", HYBRID | ZERO3 | ALL, 4, like="hybrid", expect="order"),
    Setting("hybrid_tp_2x2", HYBRID | ZERO3_TP | ALL, 4, like="hybrid", expect="order"),
    Setting("hybrid_chunks", HYBRID | CHUNKS, like="hybrid", expect="order"),
    Setting("hybrid_sample_packing", HYBRID | PACKED, like="hybrid", expect="documents"),
    Setting("hybrid_cp_ring_2x2", HYBRID | ZERO3 | CP["ring"] | ALL | PACKED, 4, "hybrid_sample_packing", "order"),
    Setting("hybrid_pp_2x2", HYBRID | ZERO3 | PP, 4, like="hybrid", expect="order"),
    Setting("delta", DELTA, like="hybrid", expect="another"),
    Setting("delta_offload_all", DELTA | ALL, like="delta"),
    Setting("delta_chunks", DELTA | CHUNKS, like="delta", expect="order"),
    Setting("delta_sample_packing", DELTA | PACKED, like="delta", expect="documents"),
    Setting("delta_cp_ulysses_2x2", DELTA | ZERO3 | CP["ulysses"] | ALL | PACKED, 4, "delta_sample_packing", "order"),
    Setting("delta_cp_ring_tp_2x2x2", DELTA | ZERO3_TP | CP["ring"], 8, like="delta", expect="order"),
    Setting("delta_pp_cp_allgather_2x2x2", DELTA | ZERO3 | PP | CP["allgather"], 8, like="delta", expect="order"),
    Setting("mamba", MAMBA, like="hybrid", expect="another"),
    Setting("mamba_offload_all@4", MAMBA | ZERO3 | ALL, 4, like="mamba", expect="order"),
    # Devices of tp share its one group of heads.
    Setting("mamba_cp_ulysses_tp_2x2x2", MAMBA | ZERO3_TP | CP["ulysses"] | ALL, 8, like="mamba", expect="order"),
    Setting("one_purpose", ONE_PURPOSE, like="hybrid", expect="another"),
    Setting("one_purpose_ep_tp_2x2x2", ONE_PURPOSE | EP | TP | ALL, 8, like="one_purpose", expect="order"),
    Setting("latent", LATENT, like="hybrid", expect="another"),
    Setting("latent_nvme_all", LATENT | NVME_ALL, like="latent", expect="grouped"),
    Setting("latent_tp_2x2", LATENT | ZERO3_TP | ALL, 4, like="latent", expect="order"),
    Setting("latent_cp_ulysses_2x2", LATENT | ZERO3 | CP["ulysses"] | ALL, 4, like="latent", expect="order"),
    Setting("global", GLOBAL, like="hybrid", expect="another"),
    Setting("global_cp_ring_2x2_offload_all", GLOBAL | ZERO3 | CP["ring"] | ALL, 4, like="global", expect="order"),
)
SETTINGS += ADAPTERS + MIXTURES + HYBRIDS

# Sizes of a model that every row can use: heads that 4 GPUs divide, which share the 2 key/value heads in pairs; rows of
# matrices that are blocks of 64 numbers on each of 2 GPUs; layers for 2 stages, each with one that is resident.
SIZES: dict[str, int] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SEQUENCE_LEN = 64

OWN = "as_configured"
NUMBERS = ("recipe", "model_dtype", "accum_dtype", "master_dtype")  # settings of `place` that rows take from the config
RESET = tuple(  # fields that have their defaults in every row that does not change them
    name
    for section in (Storage, StepSettings, MeshSettings, Compute)
    for name in names_of(section)
    if name not in (*NUMBERS, *names_of(Precision), "attention", "xla_options")
)


def rows_of_config(c: Config, devices: int) -> list[Setting]:
    """Returns the rows for a config: SETTINGS, and a row with the config's own settings unless they equal "plain"."""
    defaults = default_config()
    own = {name: c[name] for name in RESET if c[name] != defaults[name]}
    n = c.gpus or devices
    unfit = (
        *ADAPTERS * bool(c.lora),
        *MIXTURES * bool(c.lora or c.model.num_experts),
        *HYBRIDS * bool(c.lora or c.model.layer_types),
    )
    rows = [s for s in SETTINGS if s not in unfit]
    if not own and n == 1:
        return rows
    quantised = "sent_int8" if c.zero_quantized_gradients else "order"
    expect = quantised if c.zero_quantized_weights == "none" else c.zero_quantized_weights
    moved = {*ROWS, *OPTIONS, "offload_quants", "microbatches_per_fetch"}
    if n == 1 and not own.keys() - moved:
        grouped = "microbatches_per_fetch" in own or any(own.get(name) == "nvme" for name in BY_LAYER)
        expect = "grouped" if grouped else "same"
    return [*rows, Setting(OWN, own, n, expect=expect)]


def chosen_rows(table: dict[str, Setting], only: Sequence[str] | None) -> list[Setting]:
    """Returns the rows that `only` names or matches; None: all. Raises ConfigError for a name that matches no row."""
    selected = set(table if only is None else ())
    for name in only or ():
        names = fnmatch.filter(table, name)
        if not names:
            near = difflib.get_close_matches(name, table, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"--only: expected names of settings, got {name!r}; {hint}--list shows them all")
        selected.update(names)
    return [s for name, s in table.items() if name in selected]
