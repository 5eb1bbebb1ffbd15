"""The objectives by the name that a config calls them, and which options go with which.

| objective     | minimises                                                     | reference |
|---------------|---------------------------------------------------------------|-----------|
| cross_entropy | nats per token                                                |           |
| dpo, ipo      | losses of pairs of a chosen and a rejected answer             | yes       |
| orpo, simpo   | likewise                                                      |           |
| kto           | losses of single answers that are desirable or not            | yes       |
| grpo          | losses of completions that were sampled, by their advantages  | by choice |
| reward        | losses of pairs, of a model whose head is one number          |           |
| distill       | nats per token, and the divergence from a teacher's labels    |           |
"""

from collections.abc import Iterator, Mapping
from typing import Any

from surojax.declared import DeclaredField, declared
from surojax.objectives.distillation import DISTILL, DistillSettings
from surojax.objectives.grpo import GRPO, GrpoSettings
from surojax.objectives.kto import KTO, KtoSettings
from surojax.objectives.objective import CrossEntropy, Objective, ObjectiveChoice, OfLogProbabilities
from surojax.objectives.preferences import PREFERENCES, PreferenceSettings
from surojax.objectives.rewards import CHOICE as OF_REWARDS, REWARD, RewardSettings
from surojax.objectives.teacher_states import CHOICE as OF_DISTILLATION
from surojax.refusals.refusal import Feature, Refusal, clause_of, is_above, is_on, is_one_of, is_set, refuse_each

CROSS_ENTROPY = "cross_entropy"
OBJECTIVES: dict[str, ObjectiveChoice] = {
    CROSS_ENTROPY: ObjectiveChoice(lambda values: CrossEntropy(**values), ("z_loss",)),
    **PREFERENCES,
    "kto": KTO,
    "grpo": GRPO,
    REWARD: OF_REWARDS,
    DISTILL: OF_DISTILLATION,
}
OF_PAIRS = tuple(name for name, choice in OBJECTIVES.items() if choice.rows)
SETTINGS: tuple[DeclaredField, ...] = (
    *declared(PreferenceSettings),
    *declared(KtoSettings),
    *declared(GrpoSettings),
    *declared(RewardSettings),
    *declared(DistillSettings),
)
EXPERTS = {"model.num_experts": 4, "model.num_experts_per_tok": 2}
PAIRS = {"data": "rows.jsonl", "per_device_batch_size": 2}  # what a config of an objective of pairs needs besides
ROLLOUTS = PAIRS | {"objective": "grpo", "grpo_loss_type": "dr_grpo", "grpo_beta": 0.25}  # which read all options
REWARDS = PAIRS | {"objective": REWARD, "model.num_labels": 1}
# Of an objective; `PAIRS` for all others.
NEEDS: dict[str, dict[str, Any]] = {DISTILL: {}, "grpo": ROLLOUTS, REWARD: REWARDS}


def build_objective(settings: Mapping[str, Any]) -> Objective | OfLogProbabilities:
    """The objective of a config. settings: its fields."""
    choice = OBJECTIVES[settings["objective"]]
    return choice.make({name: settings[name] for name in choice.reads})


def objective_of(num_labels: int) -> str:
    """The name of the first objective of models with a head of so many numbers; cross_entropy if there is none."""
    return next((name for name, choice in OBJECTIVES.items() if choice.num_labels == num_labels), CROSS_ENTROPY)


def _unused() -> Iterator[Refusal]:
    """Rows for options with the objectives that do not read them."""
    examples = {field.name: field.other_value for field in SETTINGS} | {"z_loss": 1e-4}
    for name, example in examples.items():
        readers = [objective for objective, choice in OBJECTIVES.items() if name in choice.reads]
        others = [objective for objective in OBJECTIVES if objective not in readers]
        needs = {} if CROSS_ENTROPY in readers else NEEDS.get(readers[0], PAIRS) | {"objective": readers[0]}
        needs |= EXPERTS if name == "router_replay" else {}
        change = f"leave it out, or set objective={' or '.join(map(repr, readers))}"
        other = is_one_of("objective", *others, needs=PAIRS if others != [CROSS_ENTROPY] else None)
        yield Refusal(is_set(name, example, needs), other, "which does not use it", change)


def of_labels() -> Feature:
    """A model whose head computes numbers and no logits."""
    return is_above("model.num_labels", 0, **REWARDS)


def saves(module: str, needs: Mapping[str, Any]) -> Feature:
    """A layer of this name that is trained whole beside adapters."""
    return Feature(
        f"modules_to_save with {module}",
        ("modules_to_save",),
        lambda s, _: module in map(str.strip, s["modules_to_save"].split(",")),
        clause_of("modules_to_save"),
        "others",
        {**needs, "lora": True, "modules_to_save": module},
    )


LABELLING = "labelling"  # among settings: whether these are of a teacher that labels, which no field of a config says
labelling = Feature(
    "labelling, surojax distill",
    (LABELLING,),
    lambda s, _: s[LABELLING],
    lambda _: "for labelling",
    "",
    {LABELLING: True},
)


def of_pairs() -> Feature:
    """An objective of pairs, or of other answers."""
    return is_one_of("objective", *OF_PAIRS, instead=repr(CROSS_ENTROPY), needs=PAIRS)


REFUSALS: tuple[Refusal, ...] = (
    *_unused(),
    Refusal(
        is_set("label_smoothing", 0.25, PAIRS | {"objective": "dpo"}),
        is_one_of("loss_type", "hinge", "ipo", needs=PAIRS | {"objective": "dpo"}),
        "which does not use it",
        "leave it out, or set loss_type='sigmoid'",
    ),
    Refusal(
        is_on("precompute_ref_log_probs", **PAIRS | {"objective": "dpo"}),
        is_on("reference_free", **PAIRS | {"objective": "dpo"}),
        "which needs none",
        "leave it out",
    ),
    Refusal(
        is_set("max_completion_length", 8, ROLLOUTS),
        is_one_of("grpo_loss_type", "dapo", "grpo", needs=ROLLOUTS),
        "which does not use it",
        "leave it out, or set grpo_loss_type='dr_grpo'",
    ),
    Refusal(
        is_on("router_replay", **ROLLOUTS | EXPERTS),
        is_one_of("model.num_experts", 0, needs=ROLLOUTS),
        "which has no router",
        "leave it out",
    ),
    Refusal(
        is_on("precompute_ref_log_probs", **ROLLOUTS),
        Feature(
            "grpo_beta=0",
            ("objective", "grpo_beta"),
            lambda s, _: s["objective"] == "grpo" and not s["grpo_beta"],
            lambda s: f"with grpo_beta={s['grpo_beta']}",
            "",
            ROLLOUTS | {"grpo_beta": 0.0},
        ),
        "which needs no reference",
        "leave it out",
    ),
    *(
        Refusal(
            is_set(name, 0.01, {**EXPERTS, "gradient_accumulation_steps": 1}),
            of_pairs(),
            "whose terms are of answers, and not of the tokens that a router sees",
            "leave it out",
        )
        for name in ("router_aux_loss_coef", "router_z_loss_coef")
    ),
    *refuse_each(
        [*(is_above(name, 1) for name in ("cp_size", "tp_size", "pp_size")), is_on("shard_outer"), is_on("lora")],
        labelling,
        "",
        "leave it out",
    ),
    Refusal(
        is_set("distill_top_k", 8, {"objective": DISTILL}),
        is_above("distill_hidden_size", 0, objective=DISTILL),
        "whose labels are of the whole vocabulary",
        "leave it out",
    ),
    Refusal(of_labels(), labelling, "since labels are of a vocabulary", "give a language model"),
    Refusal(
        is_one_of("model.num_labels", 0, instead="1"),
        is_one_of("objective", REWARD, needs=REWARDS),
        "which is of a head of one number",
        "set model.num_labels=1",
    ),
    Refusal(
        of_labels(),
        is_one_of("objective", *(name for name, choice in OBJECTIVES.items() if not choice.num_labels), needs=PAIRS),
        "which is of a head of the vocabulary",
        f"set objective={REWARD!r}, or give a language model",
    ),
    Refusal(saves("score", REWARDS), is_one_of("model.num_labels", 0), "which has no such head", "leave it out"),
    *refuse_each(
        (is_on("model.tie_word_embeddings"), is_on("untied_head", model_path="base"), saves("lm_head", {})),
        of_labels(),
        "which has no head of the vocabulary",
        "leave it out",
    ),
    Refusal(is_set("train_on", "all", PAIRS), of_pairs(), "which is of answers alone", "leave it out"),
)
