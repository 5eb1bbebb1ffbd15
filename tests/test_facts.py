"""What fields may change: the queries over their declarations, and that what a field claims is so."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from surojax import offloads
from surojax.config.changes import changed
from surojax.config.fields import FIELDS, default_config, names_with, set_fields
from surojax.declared import DeclaredField, Facts, built, computed, declare, declared, same_as, section_of
from surojax.models.decoder_config import DecoderConfig
from surojax.models.rotary import RopeScaling
from surojax.objectives.objectives import OBJECTIVES
from surojax.placement.table import Storage
from surojax.planner import candidate, check_fit, choices, footprint, search, seen
from surojax.planner.gpus import GPUS
from surojax.planner.roofline import StorageTiers
from surojax.refusals import features
from surojax.training import resume
from surojax.verification.settings import OFFLOADS

MODEL = {name for name in FIELDS if name.startswith("model.")}
# Fields that claim to change neither time nor memory.
FREE = set(
    """
    output_dir max_steps num_epochs eval_steps early_stopping_patience eval_batches save_steps save_total_limit
    log_steps quiet report_to rates_file resume_from_checkpoint sample_prompt sample_tokens sample_temperature
    data eval_data text_field datasets validation_datasets data_cache on_long on_bad_row train_on chat_template
    system_prompt tokenizer model_path from_scratch untied_head seed model.initializer_range
    lora_alpha use_rslora lora_plus_ratio lora_adapter lora_base_adapter
    learning_rate lr_scheduler_type warmup_steps warmup_ratio cooldown_steps final_lr_fraction weight_decay z_loss
    max_grad_norm adamw_beta1 adamw_beta2 adamw_epsilon muon_learning_rate muon_momentum muon_beta2 lion_beta1
    lion_beta2 beta loss_type label_smoothing simpo_gamma desirable_weight undesirable_weight epsilon epsilon_high
    grpo_loss_type importance_sampling_level max_completion_length center_rewards_coefficient distill_path
    distill_weight distill_temperature
    """.split()
)
# Fields besides the architecture's with which the same model computes other numbers of the same tokens.
NUMBERS = set(
    """
    model_dtype master_dtype recipe matmul_dtype fp8_amax_history fp8_margin skip_quant_first_layers
    skip_quant_last_layers zero_quantized_weights lora_dtype qlora_bnb qlora_fp8 qlora_fp4 qlora_mxfp4
    """.split()
)
# Fields besides the architecture's that a run continues with, unchanged.
IDENTITY = set(
    """
    seed sequence_len sample_packing lora lora_rank lora_alpha lora_target_modules use_rslora use_dora qlora_bnb
    qlora_fp8 qlora_fp4 qlora_mxfp4 lora_adapter lora_base_adapter modules_to_save
    """.split()
)


@dataclasses.dataclass(frozen=True)
class Some:
    # the first
    plain: int = 1
    # the second
    declared: int = declare(2)


@dataclasses.dataclass(frozen=True)
class Inner:
    # how much
    amount: int = declare(3, name="how_much")
    theta: float = same_as(DecoderConfig, "rope_theta")


@dataclasses.dataclass(frozen=True)
class Outer:
    # the name
    name: str = "a"
    inner: Inner = section_of(Inner, "of_")
    made: int = computed(0)


def test_a_field_that_says_nothing_may_change_everything():
    assert [field.facts for field in declared(Some)] == [Facts.ALL] * 2
    assert DeclaredField("a", 1, "").facts == Facts.ALL
    assert all(fact in Facts.ALL for fact in Facts)


def test_every_claim_is_in_these_lists():
    """Whoever claims that a field changes less than all of a step writes it here too, where it is read once more.

    A field that is declared without facts is in none of them but the architecture's.
    """
    assert FIELDS.keys() - names_with(Facts.COST) == FREE
    assert names_with(Facts.TIME) == names_with(Facts.MEMORY) == FIELDS.keys() - FREE
    assert names_with(Facts.NUMBERS) == NUMBERS | MODEL - {"model.initializer_range"}
    assert names_with(Facts.IDENTITY) == IDENTITY | MODEL


def test_queries():
    """The tables of fields' names, and the rows of the placement table, which follow from the declarations."""
    assert names_with(Facts.IDENTITY) == resume.IDENTITY
    of_batch = {"per_device_batch_size", "gradient_accumulation_steps", "sequence_len"}
    assert (FIELDS.keys() - FREE, of_batch) == (search.RELEVANT, search.OF_BATCH)
    assert of_batch | {"gpus", "cp_size", "tp_size", "pp_size"} == resume.SAMPLES
    assert offloads.TO_FILES == ("moments", "master", "grads", "weights", "residuals")
    assert offloads.TO_DEVICE == ("master", "moments", "grads")
    assert offloads.IN_SLOTS == ("moments", "master")
    assert set(offloads.BY_LAYER) == {"weights", "grads", "residuals"}
    residual, *of_state, grads, weights = OFFLOADS
    assert (residual, grads, weights) == ("offload_residual", "offload_grads", "offload_weights")
    assert tuple(of_state) == features.STATE == ("offload_optimizer", "offload_master")
    assert set(features.IN_FILES) == set(OFFLOADS) == {*features.STATE, *features.BY_LAYER}
    assert set(features.KEPT_ON_DEVICE) == {*features.STATE, grads}
    assert list(choices.OFFLOADS) == ["residuals", "moments", "master", "grads", "weights"]
    assert tuple(choices.OFFLOADS.values()) == OFFLOADS
    assert [field.name for field in declared(Storage) if field.row] == [*OFFLOADS, "offload_quants"]


@pytest.mark.parametrize("objective", ["cross_entropy", "dpo", "kto", "orpo", "grpo", "distill"])
def test_what_claims_to_be_free_costs_nothing(objective):
    """By the estimates of time and memory, with another value of each such field at once."""
    c = default_config()
    c.update(objective=objective, per_device_batch_size=2, lora=True, gpus=1)
    plain = candidate.estimated(c, GPUS["h100"])
    for name in FREE - {"lr_scheduler_type", "model_path"}:
        (c.model if name in MODEL else c)[name.removeprefix("model.")] = FIELDS[name].other_value
    other = candidate.estimated(c, GPUS["h100"])
    assert (other.phases, other.need) == (plain.phases, plain.need)
    assert OBJECTIVES[objective].make is not None and c.learning_rate == 0.25


@pytest.mark.parametrize(
    "changes, numbers, time",
    [
        ({"qlora_mxfp4": True}, True, True),
        ({"zero_quantized_weights": "int8"}, True, True),
        ({"master_dtype": "bfloat16"}, True, True),
        ({"fp8_margin": 1}, True, True),
        ({"model.rope_theta": 5e5}, True, True),
        ({"model.rope_factor": 2.0}, True, True),
        ({"grpo_beta": 0.1}, False, True),
        ({"offload_weights": True, "tp_size": 2}, False, True),
        ({"lora": True, "lora_rank": 4}, False, True),
        ({"lora_alpha": 1.0, "learning_rate": 1.0, "quiet": True, "max_completion_length": 8}, False, False),
    ],
)
def test_keys_of_caches_have_what_changes_their_content(changes, numbers, time):
    """The reference's and a teacher's numbers, and measured steps; the defaults have no part in a key."""
    c = default_config()
    assert set_fields(c, Facts.ALL) == {}
    key = seen.settings_key(c, 1)
    for name, value in changes.items():
        (c.model if name in MODEL else c)[name.removeprefix("model.")] = value
    assert set_fields(c, Facts.NUMBERS) == (changes if numbers else {})
    assert (seen.settings_key(c, 1) != key) == time


def test_sections_are_built_of_a_configs_values():
    """Those inside a section too, with their prefixes; fields with another name in the config, and computed ones."""

    fields = declared(Outer, "x.")
    assert [field.name for field in fields] == ["x.name", "x.of_how_much", "x.of_rope_theta"]
    assert fields[-1].comment == "base of the rotary frequencies" and fields[-1].default == 10000.0
    values = {"x.name": "b", "x.of_how_much": 4, "x.of_rope_theta": 2.0, "y": 1}
    assert built(Outer, values, "x.", made=5) == Outer("b", Inner(4, 2.0), 5)
    with pytest.raises(KeyError):
        built(Outer, {"x.name": "b"}, "x.")


def test_the_architecture_of_the_defaults():
    """The config's defaults are those of the dataclass, which computes the size of a head."""
    c = default_config()
    assert built(DecoderConfig, c.model) == DecoderConfig() != DecoderConfig(rope_scaling=RopeScaling("linear", 2.0))
    assert DecoderConfig().head_dim == 64


IN_FILES: dict[str, Any] = {"offload_optimizer": "nvme", "offload_master": "nvme", "nvme_path": "folder"}


@pytest.mark.full(after=2)
@pytest.mark.parametrize(
    "changes",
    [
        {"nvme_slots": 2},
        {"files_in_memory": 1.0, "device_memory": 1.0},
        {"offload_weights": "nvme"},
        {"offload_grads": "nvme", "overlap_update": True},
    ],
)
def test_files_can_be_taken_away(changes):
    """`fit` begins with nothing offloaded, and the check of kernels traces a step without files.

    Fields that are read only if a class is offloaded go with the offloads: nothing refuses what is left.
    """
    c = default_config()
    c.update(IN_FILES | changes | {"gpus": 1, "kernels": "mosaic"})
    c.model.num_hidden_layers = 2
    run = footprint.assembly(c)
    assert run.engine.table.in_files
    device = SimpleNamespace(device_kind="NVIDIA GeForce RTX 4090", compute_capability="8.9", platform="gpu")
    check_fit.check_kernels(c, run, device)
    assert not footprint.assembly(changed(c, choices.nothing_offloaded(c))).engine.table.leaves_device
    in_files = StorageTiers(("moments", "master"), ("moments", "master"))
    assert choices.placement(c, in_files)["nvme_slots"] == c.nvme_slots
