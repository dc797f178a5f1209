"""The keys of ``config.json`` that some reader knows: transformers' Qwen 3 class, the servers, this project."""

from __future__ import annotations

# What transformers itself reads or writes of any model, and of this class.
_TRANSFORMERS = frozenset(
    """
    _name_or_path architectures attention_bias attention_dropout auto_map bos_token_id chunk_size_feed_forward dtype
    eos_token_id head_dim hidden_act hidden_size id2label initializer_range intermediate_size is_decoder
    is_encoder_decoder label2id layer_types max_position_embeddings max_window_layers model_type num_attention_heads
    num_hidden_layers num_key_value_heads output_attentions output_hidden_states pad_token_id problem_type
    quantization_config return_dict rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window
    tie_word_embeddings torch_dtype transformers_version use_cache use_sliding_window vocab_size
    """.split()
)
_SERVERS = frozenset(
    """
    block_size dflash_config draft_vocab_size eagle_aux_hidden_state_layer_ids has_embed_tokens has_own_lm_head
    is_causal is_neox_style mask_token_id num_target_layers rope_is_neox_style target_hidden_size target_layer_ids
    """.split()
)
# Read from dflash_config alone by vLLM and SGLang.
NESTED_ONLY = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "output_multiplier",
    "final_logit_softcapping",
    "input_embedding_scale",
)
# Known at the top level. Those that belong elsewhere have a check of their own.
_ELSEWHERE = frozenset(
    """
    attention_sink_bias attention_value_scale causal layer_ids sample_from_anchor selector_scale speculators_model_type
    swa_window_size use_aux_hidden_state use_swa
    """.split()
)
TOP = _TRANSFORMERS | _SERVERS | _ELSEWHERE | frozenset(NESTED_ONLY)
NESTED = frozenset(NESTED_ONLY) | frozenset(
    """
    attention_sink_bias attention_value_scale block_size causal layer_ids mask_token mask_token_id num_target_layers
    sample_from_anchor selector_scale swa_window_size target_layer_ids use_aux_hidden_state use_swa
    eagle_aux_hidden_state_layer_ids has_embed_tokens has_own_lm_head input_embedding_scale is_neox_style
    rope_is_neox_style hidden_act attention_bias quantization_config
    """.split()
)
