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
QUANTS: dict[str, Any] = {"persistent_quants": True, "offload_quants": True}

# A row is there for a path through the step. Each field alone; each axis of the mesh alone, with every offload, with
# classes in files, with packed documents and with adapters; each two axes together with every offload. Other pairs
# share no code, and have none. To add a setting, add a line. @n in a name: on n devices.
SETTINGS: tuple[Setting, ...] = (
    Setting("plain", {}),
    # Activations
    Setting("recompute_block=false", SAVED, expect="saved"),
    *(Setting(part, SAVED | {part: True}, expect="saved") for part in PARTS),
    Setting("recompute_parts", SAVED | PARTS, expect="saved"),
    Setting("sequence_chunks", CHUNKS, expect="order"),
    Setting("sequence_chunks_packed", CHUNKS | PACKED, like="sample_packing", expect="order"),
    Setting("lmhead_chunks", {"lmhead_chunks": 8}, expect="order"),
    Setting("gradient_accumulation_steps", {}, expect="order", split=2),
    Setting("microbatches_per_fetch", GROUPED, like="gradient_accumulation_steps", expect="grouped", split=2),
    Setting("sample_packing", PACKED, expect="documents"),
    # Host memory
    Setting("offload_grouped", ALL | GROUPED, like="gradient_accumulation_steps", expect="grouped", split=2),
    *(Setting(name, {name: True}) for name in OFFLOADS),
    Setting("offload_all", ALL),
    Setting("overlap_update", OVERLAPPED),
    Setting("sequence_chunks_offload_all", CHUNKS | ALL, like="sequence_chunks"),
    Setting("resident_layers", {"offload_weights": True, "resident_layers": 1}),
    Setting("device_memory", OVERLAPPED | {"device_memory": 0.004}),
    Setting("offload_saved", SAVED | ALL, like="recompute_block=false"),
    *(Setting(f"{name}@4", ZERO3 | {name: True}, 4, like="zero_level=3@4") for name in OFFLOADS),
    Setting("offload_all@4", ZERO3 | ALL, 4, like="zero_level=3@4"),
    Setting("offload_grouped@4", ZERO3 | ALL | GROUPED, 4, like="zero_level=3@4", expect="grouped"),
    Setting("overlap_update@4", ZERO3 | OVERLAPPED, 4, like="zero_level=3@4"),
    Setting("resident_layers@4", ZERO3 | ALL | {"resident_layers": 1}, 4, like="zero_level=3@4"),
    Setting("device_memory@4", ZERO3 | ALL | {"device_memory": 0.001}, 4, like="zero_level=3@4"),
    Setting("offload_saved@4", ZERO3 | SAVED | ALL, 4, like="zero_level=3@4", expect="saved"),
    # Disk
    Setting("offload_optimizer=nvme", {"offload_optimizer": "nvme"}),
    Setting("offload_master=nvme", {"offload_master": "nvme"}),
    Setting("nvme@4", ZERO3 | ALL | NVME | {"device_memory": 0.001}, 4, like="zero_level=3@4"),
    Setting("offload_grads=nvme", {"offload_grads": "nvme"}, expect="grouped"),
    Setting("offload_residual=nvme", {"offload_residual": "nvme"}, expect="grouped"),
    Setting("offload_weights=nvme", {"offload_weights": "nvme"}, expect="grouped"),
    Setting("nvme_all@4", ZERO3 | NVME_ALL, 4, like="zero_level=3@4", expect="grouped"),
    Setting("nvme_all_no_overlap@4", ZERO3 | NVME_ALL | {"overlap_update": False}, 4, "zero_level=3@4", "grouped"),
    Setting("nvme_slots", NVME_ALL | {"nvme_slots": 2}, expect="grouped"),
    Setting("nvme_all_in_memory", NVME_ALL | {"files_in_memory": 0.001}, expect="grouped"),
    Setting("nvme_all_hsdp_2x2", HSDP | NVME_ALL, 4, like="hsdp_2x2", expect="grouped"),
    Setting("nvme_all_cp_2x2", ZERO3 | CP["ring"] | NVME_ALL, 4, like="cp_ring_2x2", expect="grouped"),
    # Mesh
    *(Setting(f"zero_level={n}@4", {"zero_level": n}, 4, expect="order") for n in (1, 2, 3)),
    Setting("shard_gradients@4", {"shard_gradients": True}, 4, expect="order"),
    Setting("shard_weights@4", {"shard_weights": True}, 4, expect="order"),
    Setting("shard_outer@4", ZERO3 | {"shard_outer": True}, 4, expect="order"),
    Setting("shard_outer_offload_all@4", ZERO3 | ALL | {"shard_outer": True}, 4, like="shard_outer@4"),
    Setting("zero_level=3@8", ZERO3, 8, expect="order"),
    Setting("sequence_chunks@4", ZERO3 | CHUNKS, 4, expect="order"),
    Setting("hsdp_2x2", HSDP, 4, expect="order"),
    Setting("hsdp_2x2_offload_all", HSDP | ALL, 4, like="hsdp_2x2"),
    Setting("hsdp_2x2_sample_packing", HSDP | PACKED, 4, like="sample_packing", expect="order"),
    Setting("hsdp_2x4_offload_all", HSDP | ALL | {"shard_outer": True}, 8, expect="order"),
    # Tensor parallelism: dp_shard_size x tp_size, or dp_replicate_size x dp_shard_size x tp_size
    Setting("tp@2", TP, 2, expect="order"),
    Setting("tp@4", {"tp_size": 4}, 4, expect="order"),  # with 2 key/value heads, two devices share each
    Setting("tp_saved@2", TP | SAVED, 2, like="tp@2", expect="saved"),
    Setting("tp_offload_all@2", TP | ALL, 2, like="tp@2"),
    *(Setting(f"zero_level={n}_tp_2x2", {"zero_level": n} | TP, 4, expect="order") for n in (1, 2, 3)),
    Setting("offload_all_tp_2x2", ZERO3_TP | ALL, 4, like="zero_level=3_tp_2x2"),
    Setting("offload_saved_tp_2x2", ZERO3_TP | SAVED | ALL, 4, like="zero_level=3_tp_2x2", expect="saved"),
    Setting("sample_packing_tp_2x2", ZERO3_TP | PACKED, 4, like="sample_packing", expect="order"),
    Setting("shard_outer_tp_2x2", ZERO3_TP | {"shard_outer": True}, 4, expect="order"),
    Setting("lmhead_chunks_tp_2x2", ZERO3_TP | {"lmhead_chunks": 4}, 4, expect="order"),
    Setting("use_all_to_all_reduce_tp_2x2", ZERO3_TP | {"use_all_to_all_reduce": True}, 4, expect="order"),
    Setting("nvme_all_tp_2x2", ZERO3_TP | NVME_ALL, 4, like="zero_level=3_tp_2x2", expect="grouped"),
    Setting(
        "zero_quantized_gradients_tp_2x2",
        ZERO3_TP | {"zero_quantized_gradients": True},
        4,
        like="zero_level=3_tp_2x2",
        expect="sent_int8",
    ),
    Setting("zero_quantized_weights=fp8_tp_2x2", FP8 | TP, 4, like="zero_level=3_tp_2x2", expect="fp8"),
    Setting("offload_quants_tp_2x2", FP8 | QUANTS | ALL | TP, 4, like="zero_quantized_weights=fp8_tp_2x2"),
    Setting("hsdp_tp_2x2x2", HSDP | TP, 8, expect="order"),
    Setting("hsdp_tp_2x2x2_offload_all", HSDP | TP | ALL, 8, like="hsdp_tp_2x2x2"),
    # Context parallelism: dp_shard_size x cp_size, with dp_replicate_size before it or tp_size behind it
    *(Setting(f"cp_{name}_2x2", ZERO3 | method, 4, expect="order") for name, method in CP.items()),
    *(Setting(f"cp_{name}_2x4", ZERO3 | method | {"cp_size": 4}, 8, expect="order") for name, method in CP.items()),
    *(
        Setting(f"cp_{name}_{part}_2x2", ZERO3 | method | changes, 4, like=f"cp_{name}_2x2", expect=expect)
        for name, method in CP.items()
        for part, changes, expect in (
            ("offload_all", ALL, "same"),
            ("offload_saved", SAVED | ALL, "saved"),
        )
    ),
    *(
        Setting(f"cp_{name}_sample_packing_2x2", ZERO3 | method | PACKED, 4, like="sample_packing", expect="order")
        for name, method in CP.items()
    ),
    *(Setting(f"zero_level={n}_cp_2x2", {"zero_level": n} | CP["ulysses"], 4, expect="order") for n in (1, 2)),
    Setting("shard_outer_cp_2x2", ZERO3 | CP["ulysses"] | {"shard_outer": True}, 4, expect="order"),
    Setting("use_all_to_all_reduce_cp_2x2", ZERO3 | CP["ulysses"] | {"use_all_to_all_reduce": True}, 4, expect="order"),
    Setting("offload_grouped_cp_2x2", ZERO3 | CP["ring"] | ALL | GROUPED, 4, like="cp_ring_2x2", expect="grouped"),
    Setting(
        "zero_quantized_gradients_cp_2x2",
        ZERO3 | CP["ulysses"] | {"zero_quantized_gradients": True},
        4,
        like="cp_ulysses_2x2",
        expect="sent_int8",
    ),
    Setting("zero_quantized_weights=fp8_cp_2x2", FP8 | CP["ulysses"], 4, like="cp_ulysses_2x2", expect="fp8"),
    Setting("offload_quants_cp_2x2", FP8 | QUANTS | ALL | CP["ulysses"], 4, like="zero_quantized_weights=fp8_cp_2x2"),
    Setting("hsdp_cp_2x2x2", HSDP | CP["ulysses"], 8, expect="order"),
    Setting("hsdp_cp_2x2x2_offload_all", HSDP | CP["ulysses"] | ALL, 8, like="hsdp_cp_2x2x2"),
    Setting("cp_ulysses_tp_2x2", CP["ulysses"] | TP, 4, expect="order"),
    *(Setting(f"cp_{name}_tp_2x2x2", ZERO3_TP | method, 8, expect="order") for name, method in CP.items()),
    *(
        Setting(f"cp_{name}_tp_offload_all_2x2x2", ZERO3_TP | ALL | method, 8, like=f"cp_{name}_tp_2x2x2")
        for name, method in CP.items()
    ),
    Setting("cp_ring_tp_sample_packing_2x2x2", ZERO3_TP | CP["ring"] | PACKED, 8, "sample_packing", "order"),
    # Pipeline parallelism: pp_size x dp_shard_size, x tp_size or with dp_replicate_size before dp_shard_size
    Setting("pp@2", PP, 2, expect="order"),
    Setting("pp_1f1b@2", PP_1F1B, 2, like="pp@2", expect="grouped"),
    Setting("pp_saved@2", PP | SAVED, 2, like="pp@2", expect="saved"),
    *(Setting(f"zero_level={n}_pp_2x2", {"zero_level": n} | PP, 4, expect="order") for n in (1, 2, 3)),
    Setting("zero_level=3_pp_1f1b_2x2", ZERO3 | PP_1F1B, 4, like="zero_level=3_pp_2x2", expect="grouped"),
    Setting("offload_all_pp_2x2", ZERO3 | PP | ALL, 4, like="zero_level=3_pp_2x2"),
    Setting("offload_all_pp_1f1b_2x2", ZERO3 | PP_1F1B | ALL, 4, like="zero_level=3_pp_1f1b_2x2"),
    Setting("resident_layers_pp_2x2", ZERO3 | PP | ALL | {"resident_layers": 1}, 4, like="zero_level=3_pp_2x2"),
    Setting("nvme_pp_2x2", ZERO3 | PP | ALL | NVME, 4, like="zero_level=3_pp_2x2"),
    Setting("offload_saved_pp@2", PP | SAVED | ALL, 2, like="pp_saved@2"),
    Setting("sample_packing_pp_2x2", ZERO3 | PP | PACKED, 4, like="sample_packing", expect="order"),
    Setting("shard_outer_pp_2x2", ZERO3 | PP | {"shard_outer": True}, 4, expect="order"),
    Setting("lmhead_chunks_pp_2x2", ZERO3 | PP | {"lmhead_chunks": 4}, 4, expect="order"),
    Setting("use_all_to_all_reduce_pp_2x2", ZERO3 | PP | {"use_all_to_all_reduce": True}, 4, expect="order"),
    Setting(
        "zero_quantized_gradients_pp_2x2",
        ZERO3 | PP | {"zero_quantized_gradients": True},
        4,
        like="zero_level=3_pp_2x2",
        expect="sent_int8",
    ),
    Setting("zero_quantized_weights=fp8_pp_2x2", FP8 | PP, 4, like="zero_level=3_pp_2x2", expect="fp8"),
    Setting("offload_quants_pp_2x2", FP8 | QUANTS | ALL | PP, 4, like="zero_quantized_weights=fp8_pp_2x2"),
    Setting("hsdp_pp_2x2x2_offload_all", HSDP | PP | ALL, 8, expect="order"),
    *(Setting(f"pp_cp_{name}_2x2x2", ZERO3 | PP | method, 8, expect="order") for name, method in CP.items()),
    Setting("offload_all_pp_cp_ring_2x2x2", ZERO3 | PP | CP["ring"] | ALL, 8, like="pp_cp_ring_2x2x2"),
    Setting("sample_packing_pp_cp_ulysses_2x2x2", ZERO3 | PP | CP["ulysses"] | PACKED, 8, "sample_packing", "order"),
    Setting("pp_tp_2x2", PP | TP, 4, expect="order"),
    Setting("zero_level=3_pp_tp_2x2x2", ZERO3 | PP | TP, 8, expect="order"),
    Setting("offload_all_pp_tp_2x2x2", ZERO3 | PP | TP | ALL, 8, like="zero_level=3_pp_tp_2x2x2"),
    Setting("sample_packing_pp_tp_2x2x2", ZERO3 | PP | TP | PACKED, 8, like="sample_packing", expect="order"),
    # Chunks of the sequence, each divided over cp_size and tp_size
    *(
        setting
        for name, mesh in (("cp_chunks_2x2", ZERO3 | CP["ulysses"]), ("tp_chunks_2x2", ZERO3_TP))
        for setting in (
            Setting(name, mesh | CHUNKS, 4, expect="order"),
            Setting(f"offload_all_{name}", mesh | CHUNKS | ALL, 4, like=name),
        )
    ),
    *(
        Setting(
            f"{name}_cp_chunks_2x2x2", mesh | TWO_CHUNKS | CP["ulysses"] | ALL | PACKED, 8, "sample_packing", "order"
        )
        for name, mesh in (("hsdp", HSDP), ("tp", ZERO3_TP), ("pp", ZERO3 | PP))
    ),
    # Communication
    Setting("use_all_to_all_reduce@4", ZERO3 | {"use_all_to_all_reduce": True}, 4, expect="order"),
    Setting(
        "zero_quantized_gradients@4",
        ZERO3 | {"zero_quantized_gradients": True},
        4,
        like="zero_level=3@4",
        expect="sent_int8",
    ),
    Setting("zero_quantized_weights=fp8@4", FP8, 4, like="zero_level=3@4", expect="fp8"),
    Setting("zero_quantized_weights=int8@4", INT8, 4, like="zero_level=3@4", expect="int8"),
    Setting("persistent_quants=fp8@4", FP8 | {"persistent_quants": True}, 4, like="zero_quantized_weights=fp8@4"),
    Setting("persistent_quants=int8@4", INT8 | {"persistent_quants": True}, 4, like="zero_quantized_weights=int8@4"),
    Setting("offload_quants@4", FP8 | QUANTS, 4, like="zero_quantized_weights=fp8@4"),
    Setting("offload_quants_all@4", FP8 | QUANTS | ALL, 4, like="zero_quantized_weights=fp8@4"),
    Setting("memcpy_all_gather@4", ZERO3 | {"memcpy_all_gather": True}, 4, like="zero_level=3@4"),
    *(
        Setting(f"memcpy_all_gather_{name}_2x2", ZERO3 | changes | {"memcpy_all_gather": True}, 4, like=like)
        for name, changes, like in (
            ("tp", TP, "zero_level=3_tp_2x2"),
            ("cp", CP["ulysses"], "cp_ulysses_2x2"),
        )
    ),
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
    Setting("lora_saved", LORA | SAVED, like="lora", expect="saved"),
    Setting("lora_sequence_chunks", LORA | CHUNKS, like="lora", expect="order"),
    Setting("lora_offload_all", LORA_OFFLOADS, like="lora"),
    Setting("lora_resident_layers", LORA_OFFLOADS | {"resident_layers": 1}, like="lora"),
    Setting("lora_sample_packing", LORA | PACKED, like="sample_packing", expect="adapters"),
    Setting("lora_zero_level=3@4", LORA | ZERO3, 4, like="lora", expect="order"),
    Setting("lora_offload_all@4", LORA_OFFLOADS | ZERO3, 4, like="lora_zero_level=3@4"),
    Setting("lora_zero_quantized_weights=int8@4", LORA | INT8, 4, like="lora_zero_level=3@4", expect="int8"),
    Setting("lora_hsdp_2x2", LORA | ZERO3 | {"dp_replicate_size": 2}, 4, like="lora", expect="order"),
    Setting("lora_cp_tp_chunks_2x2", LORA | TP | CP["ulysses"] | TWO_CHUNKS, 4, like="lora", expect="order"),
    Setting("lora_tp_2x2", LORA_OFFLOADS | ZERO3_TP, 4, like="lora", expect="order"),
    Setting("lora_cp_ring_2x2", LORA | ZERO3 | CP["ring"], 4, like="lora", expect="order"),
    Setting("lora_pp_2x2", LORA | ZERO3 | PP, 4, like="lora", expect="order"),
    Setting("lora_pp_1f1b_tp_2x2x2", LORA_OFFLOADS | ZERO3 | PP_1F1B | TP, 8, like="lora", expect="order"),
    Setting("lora_offload_all_cp_ring_2x2", LORA_OFFLOADS | ZERO3 | CP["ring"], 4, like="lora_cp_ring_2x2"),
    Setting("lora_offload_all_pp_2x2", LORA_OFFLOADS | ZERO3 | PP, 4, like="lora_pp_2x2"),
    Setting("qlora", QLORA, like="lora", expect="nf4"),
    Setting("qlora_offload_all", QLORA_OFFLOADS, like="qlora"),
    Setting("qlora_offload_weights=nvme", QLORA | {"offload_weights": "nvme"}, like="qlora", expect="grouped"),
    Setting("qlora_zero_level=3@4", QLORA | ZERO3, 4, like="qlora", expect="order"),
    Setting("qlora_offload_all@4", QLORA_OFFLOADS | ZERO3, 4, like="qlora_zero_level=3@4"),
    Setting("qlora_hsdp_2x2", QLORA | HSDP, 4, like="qlora", expect="order"),
    Setting("qlora_offload_all_tp_2x2", QLORA_OFFLOADS | ZERO3_TP, 4, like="qlora", expect="order"),
    Setting("qlora_pp_1f1b_tp_2x2x2", QLORA_OFFLOADS | ZERO3 | PP_1F1B | TP, 8, like="qlora", expect="order"),
    Setting("qlora_cp_ring_tp_2x2", QLORA_OFFLOADS | ZERO3_TP | CP["ring"], 4, like="qlora", expect="order"),
    Setting("qlora_fp8", QLORA_FP8, like="lora", expect="fp8"),
    Setting("qlora_fp8_tp_2x2", QLORA_FP8 | LORA_OFFLOADS | ZERO3_TP, 4, like="qlora_fp8", expect="order"),
    Setting("qlora_fp4", QLORA_FP4, like="lora", expect="fp4"),
    Setting("qlora_fp4_tp_2x2", QLORA_FP4 | LORA_OFFLOADS | ZERO3_TP, 4, like="qlora_fp4", expect="order"),
)
# Each token has some of the matrices: they are compared with each other. There are none if the config has experts.
MIXTURES: tuple[Setting, ...] = (
    Setting("experts", EXPERTS, expect="another"),
    Setting("experts_saved", EXPERTS | SAVED, like="experts", expect="saved"),
    Setting("experts_recompute_parts", EXPERTS | SAVED | PARTS, like="experts", expect="saved"),
    Setting("experts_sequence_chunks", EXPERTS | CHUNKS, like="experts", expect="order"),
    Setting("experts_sample_packing", EXPERTS | PACKED, like="experts", expect="documents"),
    Setting("experts_offload_all", EXPERTS | ALL, like="experts"),
    Setting("experts_overlap_update", EXPERTS | OVERLAPPED, like="experts"),
    Setting("experts_nvme_all", EXPERTS | NVME_ALL, like="experts", expect="grouped"),
    *(Setting(f"experts_zero_level={n}@4", EXPERTS | {"zero_level": n}, 4, "experts", "order") for n in (1, 3)),
    Setting("experts_offload_all@4", EXPERTS | ZERO3 | ALL, 4, like="experts_zero_level=3@4"),
    Setting("experts_zero_quantized_weights=int8@4", EXPERTS | INT8, 4, "experts_zero_level=3@4", "int8"),
    Setting("experts_even", EVEN, like="experts", expect="another"),
    Setting("experts_even_zero_level=3@4", EVEN | ZERO3, 4, like="experts_even", expect="order"),
    Setting("experts_even_offload_all@4", EVEN | ZERO3 | ALL, 4, like="experts_even_zero_level=3@4"),
    Setting("experts_even_nvme_all@4", EVEN | ZERO3 | NVME_ALL, 4, "experts_even_zero_level=3@4", "grouped"),
    Setting("experts_even_hsdp_2x2", EVEN | HSDP, 4, like="experts_even", expect="order"),
    # Tokens are sent to experts: dp_shard_size of which ep_size is a part, and other axes before or behind them.
    *(Setting(f"experts_ep_zero_level={n}_2x2", EP | {"zero_level": n}, 4, "experts_even", "order") for n in (1, 2, 3)),
    Setting("experts_ep@4", EP4, 4, "experts_even", "order"),
    Setting("experts_ep_offload_all@4", EP4 | ALL, 4, "experts_ep@4"),
    Setting("experts_ep_offload_all_2x2", EP | ALL, 4, "experts_ep_zero_level=3_2x2"),
    Setting("experts_ep_saved_2x2", EP | SAVED, 4, "experts_ep_zero_level=3_2x2", "order"),
    Setting("experts_ep_grouped@4", EP4 | ALL | GROUPED, 4, "experts_ep@4", "grouped"),
    Setting("experts_ep_nvme_all_2x2", EP | NVME_ALL, 4, "experts_ep_zero_level=3_2x2", "grouped"),
    Setting("experts_ep_chunks_2x2", EP | CHUNKS, 4, "experts_even", "order"),
    Setting("experts_ep_sample_packing@4", EP4 | PACKED, 4, "experts_even_sample_packing", "order"),
    Setting("experts_even_sample_packing", EVEN | PACKED, 1, "experts_even", "documents"),
    Setting("experts_ep_all_to_all_reduce_2x2", EP | {"use_all_to_all_reduce": True}, 4, "experts_even", "order"),
    Setting("experts_ep_int8_2x2", EP | INT8, 4, "experts_ep_zero_level=3_2x2", "int8"),
    Setting("experts_ep_hsdp_2x2x2", EP | HSDP | ALL, 8, "experts_even", "order"),
    Setting("experts_ep_tp_2x2x2", EP | TP | ALL, 8, "experts_even", "order"),
    *(Setting(f"experts_ep_cp_{name}_2x2x2", EP | cp | ALL, 8, "experts_even", "order") for name, cp in CP.items()),
    Setting("experts_ep_pp_2x2x2", EP | PP | ALL, 8, "experts_even", "order"),
    Setting("experts_ep_pp_1f1b_2x2", EP | PP_1F1B, 4, "experts_even", "order"),
    Setting("experts_ep_lora_2x2", EP | LORA, 4, "experts_even_lora", "order"),
    Setting("experts_ep_adapted_2x2", EP | LORA | EACH, 4, "experts_even_adapted", "order"),
    Setting("experts_ep_qlora_2x2", EP | QLORA | LORA_OFFLOADS, 4, "experts_even_qlora@4", "order"),
    Setting("experts_tp_2x2", EXPERTS | ZERO3_TP | ALL, 4, like="experts", expect="order"),
    Setting("experts_tp_chunks_2x2", EXPERTS | ZERO3_TP | TWO_CHUNKS, 4, like="experts", expect="order"),
    *(Setting(f"experts_cp_{name}_2x2", EXPERTS | ZERO3 | cp | ALL, 4, "experts", "order") for name, cp in CP.items()),
    Setting("experts_pp_2x2", EXPERTS | ZERO3 | PP | ALL, 4, like="experts", expect="order"),
    Setting("experts_pp_1f1b_tp_2x2x2", EVEN | ZERO3 | PP_1F1B | TP, 8, like="experts_even", expect="order"),
    Setting("experts_lora", EXPERTS | LORA, like="experts", expect="adapters"),
    Setting("experts_lora_tp_2x2", EXPERTS | LORA_OFFLOADS | ZERO3_TP, 4, like="experts_lora", expect="order"),
    Setting("experts_qlora", EXPERTS | QLORA, like="experts_lora", expect="nf4"),
    Setting("experts_qlora_offload_all@4", EXPERTS | QLORA_OFFLOADS | ZERO3, 4, "experts_qlora", "order"),
    Setting("experts_even_qlora@4", EVEN | QLORA | ZERO3, 4, like="experts_even_lora", expect="nf4"),
    Setting("experts_even_lora", EVEN | LORA, like="experts_even", expect="adapters"),
    Setting("experts_qlora_fp4_tp_2x2", EXPERTS | QLORA_FP4 | ZERO3_TP, 4, like="experts_lora", expect="fp4"),
    # With shared experts, behind a layer without experts.
    Setting("experts_shared", SHARED, like="experts", expect="another"),
    Setting("experts_shared_offload_all@4", SHARED | ZERO3 | ALL, 4, like="experts_shared", expect="order"),
    Setting("experts_shared_tp_2x2", SHARED | ZERO3_TP | OVERLAPPED, 4, like="experts_shared", expect="order"),
    Setting("experts_shared_offload_all", SHARED | ALL, like="experts_shared"),
    Setting("experts_shared_nvme_all", SHARED | NVME_ALL, like="experts_shared", expect="grouped"),
    Setting("experts_shared_nvme_all@4", SHARED | ZERO3 | NVME_ALL, 4, "experts_shared_offload_all@4", "grouped"),
    Setting("experts_shared_lora", SHARED | LORA, like="experts_shared", expect="adapters"),
    Setting("experts_shared_lora_offload_all", SHARED | LORA_OFFLOADS, like="experts_shared_lora"),
    Setting("experts_shared_lora_tp_2x2", SHARED | LORA_OFFLOADS | ZERO3_TP, 4, "experts_shared_lora", "order"),
    Setting("experts_shared_adapted", SHARED | LORA | EACH, like="experts_shared_lora", expect="adapters"),
    Setting("experts_shared_adapted@4", SHARED | LORA | ZERO3 | EACH, 4, "experts_shared_adapted", "order"),
    Setting("experts_shared_chunks", SHARED | CHUNKS, like="experts_shared", expect="order"),
    # Adapters of the experts too.
    Setting("experts_adapted", EXPERTS | LORA | EACH, like="experts_lora", expect="adapters"),
    Setting("experts_adapted_tp_2x2", EXPERTS | LORA_OFFLOADS | ZERO3_TP | EACH, 4, "experts_adapted", "order"),
    Setting("experts_adapted_pp_2x2", EXPERTS | LORA | ZERO3 | PP | EACH, 4, "experts_adapted", "order"),
    Setting("experts_adapted_cp_ring_2x2", EXPERTS | LORA | ZERO3 | CP["ring"] | EACH, 4, "experts_adapted", "order"),
    Setting("experts_even_adapted", EVEN | LORA | EACH, like="experts_even_lora", expect="adapters"),
    Setting("experts_even_adapted_qlora@4", EVEN | QLORA | ZERO3 | EACH, 4, "experts_even_adapted", "nf4"),
    Setting("experts_qlora_mxfp4", EXPERTS | QLORA_MXFP4, like="experts_lora", expect="fp4"),
    Setting(
        "experts_qlora_mxfp4_tp_2x2",
        EXPERTS | QLORA_MXFP4 | LORA_OFFLOADS | ZERO3_TP,
        4,
        like="experts_qlora_mxfp4",
        expect="order",
    ),
)
SETTINGS += ADAPTERS + MIXTURES

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
    unfit = (*ADAPTERS * bool(c.lora), *MIXTURES * bool(c.lora or c.model.num_experts))
    rows = [s for s in SETTINGS if s not in unfit]
    if not own and n == 1:
        return rows
    quantised = "sent_int8" if c.zero_quantized_gradients else "order"
    expect = quantised if c.zero_quantized_weights == "none" else c.zero_quantized_weights
    moved = {*ROWS, *OPTIONS, "offload_quants", "microbatches_per_fetch"}
    if n == 1 and own.keys() <= moved:
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
