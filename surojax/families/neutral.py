"""The keys of config.json that do not change what a language model computes, whatever its family.

transformers' base classes own most of them, in one version or another (tests/fixtures/owned_keys.json lists them);
tools that train or convert models add theirs. A key that is in none of these tables, and in none of its family's, may
change the arithmetic.
"""

from typing import Any

# What a file says about itself, how a run of transformers computes it, and the labels of a model (`labels_of`).
OF_FILES = frozenset(
    "architectures auto_map model_type torch_dtype dtype transformers_version name_or_path _name_or_path _commit_hash "
    "id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix "
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id quantization_config "
    "output_attentions _output_attentions output_hidden_states return_dict chunk_size_feed_forward pretraining_tp "
    "torchscript use_bfloat16 xla_device tf_legacy_loss gradient_checkpointing is_decoder tie_last_hidden_states "
    "allow_global_per_layer_attribute_access "
    "attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset "
    "_flash_attn_2_enabled experts_implementation _experts_implementation _experts_implementation_internal".split()
)
# How answers are sampled: transformers 4 wrote it here too; generation_config.json is what both read.
OF_GENERATION = frozenset(
    "max_length max_new_tokens min_length min_new_tokens max_time early_stopping stop_strings do_sample num_beams "
    "num_beam_groups num_return_sequences temperature top_k top_p top_h min_p typical_p epsilon_cutoff eta_cutoff "
    "penalty_alpha dola_layers diversity_penalty repetition_penalty encoder_repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids force_words_ids constraints renormalize_logits "
    "forced_bos_token_id forced_eos_token_id forced_decoder_ids force_bos_token_to_be_generated "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias "
    "token_healing guidance_scale watermarking_config low_memory use_cache cache_implementation cache_config "
    "return_legacy_cache max_cache_len prefill_chunk_size compile_config disable_compile continuous_batching_config "
    "output_scores output_logits return_dict_in_generate generation_kwargs prompt_lookup_num_tokens "
    "max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "assistant_early_exit assistant_lookbehind assistant_ensemble_weight target_lookbehind is_assistant use_mtp "
    "speculation_type _from_model_config".split()
)
# Written by tools: noise of a training run, where a model came from, settings of other runtimes.
OF_TOOLS = frozenset(
    "neftune_noise_alpha is_llama_config transformers.js_config unsloth_version unsloth_fixed model_name "
    "tokenizer_padding_side tokenizer_model_max_length model_max_length".split()
)
# Read for another key, or by families whose classes have no default of them.
READ = frozenset(
    "max_position_embeddings rope_parameters rope_scaling partial_rotary_factor use_sliding_window max_window_layers "
    "layer_types _sliding_window_pattern tie_embedding".split()
)
UNREAD = OF_FILES | OF_GENERATION | OF_TOOLS
NEUTRAL = UNREAD | READ

# Keys that change nothing with one of these values: any other value may.
OFF: dict[str, tuple] = {
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (),
}


def is_empty(value: Any) -> bool:
    """True for null, "", {} and []: a key with such a value says nothing."""
    return value is None or (isinstance(value, str | list | dict) and not value)
