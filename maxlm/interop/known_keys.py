"""Keys of a config.json that change nothing in the network: whatever they say, or for the values that are listed with them."""

from typing import Any

# Names of files and versions, special tokens, dropout, which pretraining does without, and parallel layouts and kernels of other programs.
_FACTS = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _experts_implementation
    _flash_attn_2_enabled
    _name_or_path attn_implementation experts_implementation name_or_path model_name model_type transformers_version transformers.js_config
    unsloth_fixed unsloth_version unsloth_traced_tensors use_flash_attn use_flash_attention_2 flash_attn
    architectures auto_map tokenizer_class processor_class license language tags keys_to_ignore_at_inference
    dtype torch_dtype gradient_checkpointing use_gradient_checkpointing base_model_tp_plan base_model_pp_plan base_model_ep_plan tp_plan
    ep_size
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
    bos_token eos_token pad_token unk_token
    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout classifier_dropout_prob dropout embd_pdrop hidden_dropout
    hidden_dropout_prob residual_dropout resid_pdrop
    initializer_range is_llama_config max_position_embeddings initial_context_length max_sequence_length model_max_length n_ctx seq_length
    max_window_layers num_nextn_predict_layers qk_head_dim reorder_and_upcast_attn pretraining_tp rope_parameters rope_scaling rope_theta
    seq_aux chunk_size_feed_forward neftune_noise_alpha
"""
# Outputs of a call, and heads for other tasks.
_OUTPUTS = """
    output_attentions output_hidden_states output_router_logits output_scores return_dict return_dict_in_generate use_cache
    id2label label2id num_labels problem_type finetuning_task task_specific_params prefix
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
"""
# How a text is generated, which older versions of the library wrote into config.json.
_GENERATION = """
    bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length
    min_new_tokens no_repeat_ngram_size num_beam_groups num_beams num_logits_to_keep num_return_sequences penalty_alpha
    remove_invalid_values
    repetition_penalty suppress_tokens temperature top_k top_p typical_p
"""
HARMLESS = frozenset((_FACTS + _OUTPUTS + _GENERATION).split())
# Of these: keys of the networks of some families, which count only where the library reads them.
_OF_NETWORKS = """
    initial_context_length max_position_embeddings max_window_layers num_nextn_predict_layers qk_head_dim rope_parameters rope_scaling
    rope_theta seq_aux
"""
OF_NETWORKS = frozenset(_OF_NETWORKS.split())

_OFF = """
    add_cross_attention alibi attention_bias is_decoder is_encoder_decoder mlp_bias o_bias qkv_bias rope_interleaved rope_traditional
    tie_encoder_decoder torchscript use_bfloat16 use_bias use_bidirectional_attention use_mrope use_parallel_residual use_qk_norm
    use_qkv_bias use_sliding_window
"""
# Keys that must have one of these values in families that do not read them: any other value changes the network.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF.split(), (False,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "partial_rotary_factor"), (1,)),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "pruned_heads": ({},),
    "scale_attn_weights": (True,),
    "tf_legacy_loss": (False, True),
}
