"""The model types and keys of a ``config.json`` that npusim understands: all others may change the computation."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

#: Types whose layers are attention and an FFN (or experts) according to their keys, by the configuration and modeling
#: files of Hugging Face transformers 4.5x.  albert, gpt_neo, modernbert and mpnet are excluded, because their layers do
#: more than their files state.
MODEL_TYPES = frozenset(
    (
        *("PanguEmbedded", "apertus", "arcee", "beit", "bert", "bloom", "clip_vision_model", "cohere", "cohere2"),
        *("deberta", "deberta-v2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deit", "dinov2", "distilbert"),
        *("dots1", "electra", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
        *("glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "helium"),
        *("internlm2", "kimi_k2", "llama", "llama4_text", "mimo", "minicpm", "minicpm3", "ministral", "mistral"),
        *(
            "mixtral",
            "mpt",
            "nemotron",
            "olmo",
            "olmo2",
            "olmo3",
            "olmoe",
            "opt",
            "pangu",
            "pangu_alpha",
            "persimmon",
            "phi",
        ),
        *("phi3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text"),
        *(
            "qwen3",
            "qwen3_moe",
            "qwen3_vl_moe_text",
            "qwen3_vl_text",
            "roberta",
            "seed_oss",
            "siglip_vision_model",
            "smollm3",
            "stablelm",
        ),
        *("starcoder2", "vit", "vit_mae", "xlm-roberta"),
    )
)
#: Keys that change neither attention nor caches, nor the counted weights (norms and biases are not counted): names and
#: versions; how a library runs, trains and generates; norms, biases, positions, factors outside attention; routing;
#: heads after a model; inputs other than text.
_NEUTRAL = re.compile(
    r"""
    _?(name_or_path|commit_hash|flash_attn_2_enabled)|_?attn_implementation\w*|architectures|auto_map|\w*version|id2label
    |label2id|num_labels|problem_type|task_specific_params|finetuning_task|tokenizer_class|prefix|verbose|torchscript
    |return_dict|(\w+_)?token_(id|index)s?|(bos|eos|pad|unk|sep|cls|mask)_token|use_(cache|bfloat16|flash_attn\w*)|legacy
    |output_(attentions|hidden_states|scores|past|logits|router_logits)|(max|min)_(new_tokens|length)|do_sample|typical_p
    |early_stopping|num_(beams|beam_groups|return_sequences)|top_[kp]|temperature|\w+_penalty|\w*no_repeat_ngram_size
    |bad_words_ids|\w*suppress_tokens|remove_invalid_values|cache_implementation|gradient_checkpointing|pretraining_tp
    |\w*drop(out|_rate|_path_rate|_prob)?|\w*dropout_\w+|\w+_pdrop|ep_size|initializer_\w+|init_(std|method|device|config)
    |\w+_std|\w+_init|(router|aux|seq)_\w*(coef|loss|alpha|noise|aux)|chunk_size_feed_forward|(use_)?fused_\w+|debug
    |\w+_in_fp32|\w*upcast\w*|classifier\w*|(\w+_)?eps(ilon)?|\w*layer_?norm\w*|norm_(type|bias|head)|\w*qk_(ln|norm)\w*
    |clip_qkv|use_post_norm|\w*final_norm\w*
    |((use|no|add|enable)_)?((qkv|attention|attn|mlp|ffn|o_proj|lm_head|linear|attention_out|dense)_)?bias(_linear)?
    |rope_(theta|ratio|interleaved?|local_base_freq|base|pct)|rotary_(pct|dim|base|emb_base|percentage)|max_seq_len
    |partial_rotary_factor|(original|initial)_(max_position_embeddings|context_length)|learned_pos_emb|num_channels
    |position_biased_input|(model_max|max_sequence|seq)_length|use_absolute_position_embeddings|type_vocab_size
    |(embedding|residual)_multiplier|logits?_(scale|scaling)|final_logit_softcapping|scale_(emb|depth)|dim_model_base
    |(use_)?parallel_(attn|residual)|apply_residual_connection_post_layernorm|num_ln_in_parallel_attn|swiglu_limit
    |norm_topk_prob|routed_scaling_factor|scoring_func|topk_(method|group)|n_group|num_nextn_predict_layers|qk_head_dim
    |(vision|image|video|audio|projector|mm)_\w+|spatial_merge_size|encoder_stride|multimodal_projector_bias|pool_scales
    |pooler_\w+|summary_\w+|layer_?scale_\w+|use_mean_pooling|auxiliary_\w+|semantic_loss_ignore_index|projection_dim
    |reshape_hidden_states|max_relative_positions|attn_temperature_tuning|floor_scale|input_jitter_noise|slow_but_exact
    |sinusoidal_pos_embds|use_mask_token|mask_ratio|norm_pix_loss
    """,
    re.VERBOSE,
)
_ROTARY = re.compile(
    r"""
    (rope_)?type|rope_theta|partial_rotary_factor|factor|(original_)?max_position_embeddings|attn_factor|attention_factor
    |beta_(fast|slow)|(low|high)_freq_factor|(short|long)_m?(factor|scale)|mscale(_all_dim)?|truncate|finetuned|alpha
    |mrope_(section|interleaved)
    """,
    re.VERBOSE,
)
#: Keys of the dictionaries in a config that are read or neutral: MPT's attention, rotary positions, and how weights are
#: stored.
_PARTS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "attn_config": re.compile(
            r"alibi|attn_(impl|pdrop|type|uses_sequence_id)|clip_qkv|kv_n_heads|prefix_lm|qk_ln|rope\w*|softmax_scale"
        ),
        "rope_scaling": _ROTARY,
        "rope_parameters": _ROTARY,
        "quantization_config": re.compile(
            r"""
            quant_method|bits|group_size|version|zero_point|desc_act|sym|damp_percent|static_groups|true_sequential|backend
            |activation_scheme|fmt|weight_block_size|modules_to_(not_convert|fuse)|ignored_layers|do_fuse|fuse_max_seq_len
            |checkpoint_format|format|is_marlin_format|model_(name_or_path|file_base_name)|quantizer|meta|lm_head|dataset
            |(use_)?exllama\w*|tokenizer|block_name_to_quantize|module_name_preceding_first_block|batch_size|use_cuda_fp16
            |pad_token_id|model_seqlen|max_input_length|cache_block_outputs|activation_scale_\w+|dequantize
            """,
            re.VERBOSE,
        ),
    }
)
#: Kinds of layers for which ``rope_parameters`` may have a dictionary each.
_KINDS = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
#: Number of letters of the longest key of this kind.
_LONGEST = 64
#: Values with which a key has no effect.
_WITHOUT_EFFECT: Mapping[str, object] = MappingProxyType(
    {"scale_attn_weights": True, "expansion_ratio": 4, "mlp_ratio": 4, "embedding_fraction": 1.0, "attn_scale": 0.1}
    | {"attn_config.sliding_window_size": -1, "attn_config.alibi_bias_max": 8}
)


def unread_keys(config: Mapping[str, Any], read: Collection[str]) -> Iterator[str]:
    """Yield the keys of a config that npusim does not read and that may change the computation, and ``model_type`` if
    it is unknown.

    ``read``: keys that npusim reads.  A key that is null, false, 0 or empty is off.
    """
    if str(config.get("model_type")) not in MODEL_TYPES:
        yield "model_type"
    # Widths that have no effect if they equal the hidden size.
    same = {**_WITHOUT_EFFECT, **dict.fromkeys(("word_embed_proj_dim", "embedding_size"), config.get("hidden_size"))}
    for key, value in config.items():
        is_neutral = len(key) <= _LONGEST and _NEUTRAL.fullmatch(key)
        is_known = key in read or is_neutral or (key.startswith("index_") and config.get("index_topk"))
        if value and not is_known and value != same.get(key):
            yield key or '""'
        elif key in _PARTS and isinstance(value, dict):
            yield from (name for name, x in _unread_parts(key, value, _PARTS[key]) if x and x != same.get(name))


def _unread_parts(name: str, part: Mapping[str, Any], known: re.Pattern[str]) -> Iterator[tuple[str, object]]:
    """Yield the keys of a dictionary in a config that are not ``known``, as ``name.key``, and their values."""
    for key, value in part.items():
        if key in _KINDS and isinstance(value, dict):
            yield from _unread_parts(f"{name}.{key}", value, known)
        elif len(key) > _LONGEST or not known.fullmatch(key):
            yield f"{name}.{key}", value


def rotary_parts(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the dictionaries of rotary positions: one for all layers, or one for each kind of layer."""
    yield part
    yield from (value for key, value in part.items() if key in _KINDS and isinstance(value, dict))


def spelled_once(
    config: Mapping[str, Any], defaults: Mapping[str, Any], spellings: Iterable[tuple[str, ...]]
) -> tuple[dict[str, Any], list[str]]:
    """Return a config with one key for each value, and the keys that state a different value for it.

    ``spellings`` lists the names of each value.  The first name with a value is used; ``defaults`` apply if the file
    has none of the names.
    """
    left, others = {**defaults, **config}, list[str]()
    for names in spellings:
        stated = [n for n in names if config.get(n) is not None]
        for name in names:
            if stated and name != stated[0]:
                left.pop(name, None)
        others += [n for n in stated[1:] if config[n] != config[stated[0]]]
    return left, others
