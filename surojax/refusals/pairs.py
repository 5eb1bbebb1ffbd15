"""The table of refusals: one row for each pair of features that do not go together, by subject.

A new row goes here, and a new feature of it to features.py if several rows name it. Rows of one optimizer, objective or
architecture stand where that is declared (optim/optimizers.py, objectives/objectives.py, models/decoder_refusals.py).

Conditions on numbers (sizes that must divide each other) and on devices are functions: config/checks.py,
config/mesh_checks.py, models/decoder_checks.py, config/adapters.py, planner/check_fit.py.
"""

from collections.abc import Callable

from surojax.refusals.features import (
    FP8,
    OF_ADAPTERS,
    SKIPS,
    STATE,
    TRAINED_ON_ROWS,
    adapter_files,
    all_recomputed,
    by_layer,
    chunks,
    continued_text,
    cudnn,
    cudnn_in_pieces,
    datasets,
    device_memory,
    dora,
    dropout,
    float32,
    fp8,
    from_scratch,
    gradients_unsharded,
    grads_in_files,
    grows_with_position,
    in_files,
    in_fp8,
    in_mxfp4,
    in_nf4,
    in_nvfp4,
    local_rotation,
    lora,
    master_in_files,
    memcpy_sends,
    mosaic,
    no_16_bit_products,
    no_all_to_all,
    no_experts,
    no_lora,
    no_rows,
    no_state_offloaded,
    no_window,
    nothing_arrives_early,
    nothing_in_files,
    nothing_quantised,
    nothing_to_keep,
    offload_quants,
    optimizer_in_files,
    overlap,
    overlap_of_whole_step,
    persistent,
    quantised_gathers,
    recompute_parts,
    resident,
    saved_modules,
    skips,
    skips_in_fp8,
    softcap,
    some_unrotated,
    stages,
    tokens_sent,
    weights_in_files,
    weights_unsharded,
)
from surojax.refusals.refusal import (
    Refusal,
    Settings,
    is_above,
    is_off,
    is_on,
    is_one_of,
    is_other_than,
    is_set,
    refuse_each,
)


def _to_shard(what: str, level: int) -> Callable[[Settings], str]:
    """Words the change that shards a tensor class; zero_level does not shard it if the field itself is False."""

    def change(s: Settings) -> str:
        return f"set shard_{what}=True" + (f" or zero_level={level}" if s[f"shard_{what}"] is None else "")

    return change


def _to_persist(s: Settings) -> str:
    also = "" if s["recipe"] in FP8 else ", and zero_quantized_weights or a recipe in fp8"
    return _to_shard("weights", 3)(s) + also


NOT_USED = "which does not use it"
NOT_BUILT = "for which it is not built yet"
OTHER_RECIPE = "leave it out, or use recipe='mxfp8' or 'bf16'"
OUT = "leave it out"
ONE_CHUNK = "leave it out, or set sequence_chunks=1"
COPIES = "since XLA decides while a step runs which transfers are copies, and no GPU has shown what it does with those "
TABLE: tuple[Refusal, ...] = (
    # Data
    *(
        Refusal(
            is_set(name, example),
            datasets,
            "",
            f"leave one of them out (of a config file's: --config.{name}={default} or --config.datasets=[])",
        )
        for name, example, default in (
            ("data", "b.txt", ""),
            ("eval_data", "b.txt", ""),
            ("text_field", "body", "text"),
        )
    ),
    *refuse_each(TRAINED_ON_ROWS, no_rows, "", "leave it out, or set data or datasets"),
    Refusal(
        is_set("on_long", "drop", {"sample_packing": True}), continued_text, "", "leave it out, or set sample_packing"
    ),
    # Model
    Refusal(
        cudnn,
        is_on("sample_packing"),
        "since cuDNN does not separate documents",
        "use attention='auto', or leave sample_packing out",
    ),
    Refusal(float32, cudnn, "which computes in 16 bits", "set attention='xla', or change it"),
    Refusal(float32, mosaic, "which computes in 16 bits", "set attention='xla', or change it"),
    Refusal(softcap, cudnn, "which has no softcap", "set attention='auto'"),
    *refuse_each(
        (is_set("model.sliding_window_pattern", 2, {"model.sliding_window": 64}), local_rotation),
        no_window,
        "",
        "set model.sliding_window, or leave it out",
    ),
    Refusal(grows_with_position, local_rotation, "since it is of layers that all rotate alike"),
    Refusal(grows_with_position, some_unrotated, "since it is of layers that all rotate alike"),
    # Adapters
    *refuse_each(OF_ADAPTERS, no_lora, NOT_USED, "leave it out, or set lora=True"),
    Refusal(weights_in_files, persistent, "which leaves only vectors to offload_weights", "set it to true or false"),
    Refusal(persistent, lora, "whose base is not updated, so that nothing is quantised again", OUT),
    Refusal(offload_quants, lora, "whose base is not quantised again", OUT),
    Refusal(is_set("optimizer", "normuon"), lora, "since adapters' state is small, and is updated by AdamW alone", OUT),
    Refusal(is_on("zero_quantized_gradients"), lora, "whose adapters' gradients are small", OUT),
    Refusal(overlap, lora, "whose adapters' update takes no time worth hiding", OUT),
    Refusal(optimizer_in_files, lora, "whose state is small", "set it to true or false"),
    Refusal(master_in_files, lora, "whose state is small", "set it to true or false"),
    Refusal(grads_in_files, lora, "whose gradients are small", "set it to true or false"),
    *refuse_each((dora, stages, chunks), dropout, NOT_BUILT, "leave it out, or set lora_dropout=0.0"),
    Refusal(dora, fp8, "whose matrices have rows of other lengths than its magnitudes begin as", OTHER_RECIPE),
    Refusal(dropout, is_one_of("recipe", "fp8_hybrid"), NOT_BUILT, OTHER_RECIPE),
    Refusal(
        saved_modules,
        is_on("model.tie_word_embeddings"),
        "since of a file with one of embedding and head, other programs would leave the other as it was",
        OUT,
    ),
    *refuse_each(adapter_files, is_one_of("model_path", ""), "", "set model_path to its base"),
    *refuse_each(adapter_files, from_scratch, "which takes no weights", "leave one of them out"),
    Refusal(in_fp8, in_nf4, "since a matrix is stored in one format"),
    Refusal(in_nvfp4, in_nf4, "since a matrix is stored in one format"),
    Refusal(in_nvfp4, in_fp8, "since a matrix is stored in one format"),
    *(Refusal(in_mxfp4, x, "since a matrix is stored in one format") for x in (in_nf4, in_fp8, in_nvfp4)),
    Refusal(in_mxfp4, no_experts, "since it is a format of experts", "use qlora_fp4 or qlora_bnb"),
    Refusal(quantised_gathers, in_nf4, "in whose format weights are gathered", OUT),
    Refusal(quantised_gathers, in_fp8, "in whose format weights are gathered", OUT),
    Refusal(quantised_gathers, in_nvfp4, "in whose format weights are gathered", OUT),
    Refusal(quantised_gathers, in_mxfp4, "in whose format weights are gathered", OUT),
    Refusal(
        quantised_gathers, dora, "whose magnitudes would begin as the lengths of other rows than those in 8 bits", OUT
    ),
    # Recipes
    *refuse_each(
        (is_set("fp8_amax_history", 4, {"recipe": "fp8_hybrid"}), is_set("fp8_margin", 1, {"recipe": "fp8_hybrid"})),
        is_other_than("recipe", "fp8_hybrid", "bf16"),
        NOT_USED,
        "leave it out, or choose another recipe",
    ),
    *refuse_each(
        (is_set("block_scaled_products", "emulated", {"recipe": "mxfp8"}),),
        is_one_of("recipe", "bf16", *FP8),
        NOT_USED,
        "leave it out, or choose another recipe",
    ),
    *refuse_each(
        (is_above(name, 0, recipe="fp8_current") for name in SKIPS),
        is_one_of("recipe", "bf16"),
        NOT_USED,
        "leave it out, or choose another recipe",
    ),
    *refuse_each(
        (is_set("matmul_dtype", "float32"), is_set("gradient_dtype", "float32")),
        no_16_bit_products,
        NOT_USED,
        "leave it out, or choose another recipe",
    ),
    Refusal(
        is_off("recompute_block"),
        skips,
        "since blocks of two kinds save different things",
        "set recompute_block=True, or leave the blocks' recipe alike",
    ),
    Refusal(quantised_gathers, fp8, "whose weights travel in fp8 anyway", OUT),
    Refusal(persistent, skips_in_fp8, "since those layers need their 16-bit weights"),
    Refusal(
        is_above("early_stopping_patience", 0),
        is_one_of("eval_steps", 0, instead="the steps between evaluations"),
        "which evaluates at the end only",
        "set eval_steps, or leave it out",
    ),
    # Schedule of the learning rate
    Refusal(is_set("warmup_ratio", 0.1), is_set("warmup_steps", 10), "", "set one of them to 0"),
    Refusal(
        is_one_of("cooldown_steps", 0, instead="1 or more"),
        is_one_of("lr_scheduler_type", "wsd", needs={"cooldown_steps": 10}),
        "",
        "a fifth of all steps is usual",
    ),
    *refuse_each(
        (is_set("cooldown_steps", 10, {"lr_scheduler_type": "wsd"}),),
        is_other_than("lr_scheduler_type", "wsd", "cosine"),
        NOT_USED,
        "leave it out, or use 'wsd'",
    ),
    Refusal(
        is_above("num_epochs", 1),
        is_set("max_steps", 100),
        "which decides",
        "set one of them: max_steps=0 counts epochs",
    ),
    # Recomputation
    *refuse_each(
        recompute_parts, all_recomputed, "which computes all of it again", "leave it out, or set recompute_block=False"
    ),
    # Update under the next forward pass
    Refusal(
        is_off("offload_grads"),
        overlap,
        "whose gradients rest in host memory until the next step",
        "set it, or leave overlap_update out",
    ),
    *refuse_each(
        (optimizer_in_files, master_in_files),
        overlap_of_whole_step,
        "which is built for state in files if gradients, residuals or weights are there too",
        "set offload_grads='nvme', or leave overlap_update out",
    ),
    *refuse_each(by_layer, stages, "whose stages are not built for what is in files", "set it to true or false"),
    *(
        Refusal(
            is_above("microbatches_per_fetch", 1), feature, "which fetches a layer for all microbatches", "leave it out"
        )
        for feature in by_layer
    ),
    Refusal(overlap, no_state_offloaded, "whose transfers it hides", "leave it out, or offload one of them"),
    Refusal(stages, overlap, "which updates in the first forward pass: that of a stage is one tick of a loop"),
    # Mesh
    *(
        Refusal(memcpy_sends, axis, COPIES + "of such groups", f"leave it out, or set {axis.field}=1")
        for axis in (is_above("tp_size", 1), is_above("cp_size", 1), stages, tokens_sent)
    ),
    *refuse_each(
        (is_set("cp_method", "ring", {"cp_size": 2}),),
        is_one_of("cp_size", 1),
        NOT_USED,
        "leave it out, or raise cp_size",
    ),
    Refusal(
        is_one_of("cp_method", "ring", instead="'ulysses' or 'allgather'", needs={"cp_size": 2}),
        stages,
        "since the GPUs of all stages would have to take each hop together",
        "set cp_method='allgather'",
    ),
    *refuse_each(
        (is_set("pp_schedule", "1f1b", {"pp_size": 2}),),
        is_one_of("pp_size", 1),
        NOT_USED,
        "leave it out, or raise pp_size",
    ),
    Refusal(
        is_above("microbatches_per_fetch", 1, gradient_accumulation_steps=2),
        stages,
        "whose stages compute one microbatch in a tick and fetch each layer for it",
        "leave it out",
    ),
    Refusal(
        is_above("model.sliding_window", 0),
        cudnn_in_pieces,
        "whose pairs of pieces have no window",
        "use attention='auto' or 'mosaic'",
    ),
    # Chunks of the sequence
    Refusal(is_set("recipe", "mxfp8"), chunks, "whose scales are of tokens that chunks would part", ONE_CHUNK),
    Refusal(
        is_off("recompute_block"),
        chunks,
        "which saves memory because the values of one chunk at a time are computed again",
        ONE_CHUNK,
    ),
    Refusal(
        is_set("cp_method", "allgather", {"cp_size": 2}),
        chunks,
        "since each chunk would send the keys of all chunks before it again, and ulysses sends them once",
        ONE_CHUNK,
    ),
    # Placement
    Refusal(
        is_on("offload_grads", zero_level=2),
        gradients_unsharded,
        "with which every GPU would move whole gradients over its host link",
        _to_shard("gradients", 2),
    ),
    Refusal(quantised_gathers, weights_unsharded, "since it is for sharded weights", _to_shard("weights", 3)),
    Refusal(persistent, weights_unsharded, "since it is for sharded weights", _to_persist),
    Refusal(
        persistent,
        nothing_quantised,
        "with which there are none",
        "set zero_quantized_weights='fp8' or 'int8', or recipe='fp8_current' or 'fp8_hybrid'",
    ),
    Refusal(
        offload_quants,
        is_off("persistent_quants"),
        "with which nothing quantised is stored",
        "set persistent_quants=True",
    ),
    Refusal(
        memcpy_sends,
        no_all_to_all,
        "since only an all-to-all is sent and received",
        "set use_all_to_all_reduce=True or zero_quantized_gradients=True",
    ),
    Refusal(
        resident,
        is_off("offload_weights"),
        "which keeps all layers on the device",
        "leave it out, or set offload_weights=True",
    ),
    Refusal(
        resident,
        persistent,
        "which leaves only vectors to offload_weights",
        "leave it out, and offload_quants too if the quants are to stay on the device",
    ),
    Refusal(is_one_of("nvme_path", "", instead="a folder"), in_files, "", "set it to one on an NVMe disk"),
    Refusal(
        is_other_than("nvme_path", "", "folder", {"offload_optimizer": "nvme"}),
        nothing_in_files,
        "",
        "set offload_optimizer='nvme' or offload_master='nvme', or leave it out",
        when_placed=True,
    ),
    Refusal(
        is_above("files_in_memory", 0, offload_optimizer="nvme", nvme_path="folder"),
        nothing_in_files,
        "which leaves nothing to keep in memory",
        "leave it out, or set offload_optimizer='nvme' or another class",
        when_placed=True,
    ),
    Refusal(device_memory, nothing_to_keep, "which leaves nothing to keep there", "leave it out", when_placed=True),
    Refusal(
        device_memory,
        nothing_arrives_early,
        "so that nothing of the next layer could come early",
        "set offload_optimizer='nvme', or leave it out",
    ),
    *(
        Refusal(
            is_one_of("nvme_slots", 2, needs=dict.fromkeys(STATE, "nvme") | {"nvme_path": "folder"}),
            is_other_than(name, "nvme", False),
            "which a step would have to write besides",
            f"set {name}='nvme', or leave it out",
            when_placed=True,
        )
        for name in STATE
    ),
)
