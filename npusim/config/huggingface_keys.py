"""The model types and keys of a ``config.json`` that are understood: all others may change the computation."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

#: Types whose layers are attention and an FFN (or experts) as their keys say: configuration and modeling files of
#: Hugging Face transformers 4.5x.  Not albert, gpt_neo, modernbert, mpnet: they do more than their files say.
MODEL_TYPES = frozenset(
    (
        *("PanguEmbedded", "apertus", "arcee", "beit", "bert", "bloom", "clip_vision_model", "cohere", "cohere2"),
        *("deberta", "deberta-v2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deit", "dinov2", "distilbert"),
        *("dots1", "electra", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
        *("glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "helium"),
        *("internlm2", "kimi_k2", "llama", "llama4_text", "minicpm", "minicpm3", "ministral", "mistral", "mixtral"),
        *("mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "pangu", "pangu_alpha", "persimmon", "phi"),
        *("phi3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text"),
        *("qwen3", "qwen3_moe", "qwen3_vl_text", "roberta", "seed_oss", "siglip_vision_model", "smollm3", "stablelm"),
        *("starcoder2", "vit", "vit_mae", "xlm-roberta"),
    )
)
#: Keys that change neither attention nor caches, nor the weights that are counted (norms and biases are not): names and
#: versions; how a library runs, trains and generates; norms, biases, positions, factors outside attention; routing;
#: heads behind a model; other inputs than text.
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
    |attn_config\.(alibi|attn_(impl|pdrop|type|uses_sequence_id)|clip_qkv|kv_n_heads|prefix_lm|qk_ln|rope\w*|softmax_scale)
    """,
    re.VERBOSE,
)
#: Letters of a key beyond which it is none of these.
_LONGEST = 64
#: Values at which a key changes nothing.
_WITHOUT_EFFECT: Mapping[str, object] = MappingProxyType(
    {"scale_attn_weights": True, "expansion_ratio": 4, "mlp_ratio": 4, "embedding_fraction": 1.0, "attn_scale": 0.1}
    | {"attn_config.sliding_window_size": -1, "attn_config.alibi_bias_max": 8}
)


def unread_keys(config: Mapping[str, Any], read: Collection[str]) -> Iterator[str]:
    """Yield the keys of a config that nothing reads and that may change the computation; an unknown ``model_type``.

    ``read``: keys that are read.  A key that is null, false, 0 or empty is off.
    """
    if str(config.get("model_type")) not in MODEL_TYPES:
        yield "model_type"
    inner = config.get("attn_config")
    parts = {f"attn_config.{key}": value for key, value in inner.items()} if isinstance(inner, dict) else {}
    # Widths that change nothing where they are the hidden size.
    same = {**_WITHOUT_EFFECT, **dict.fromkeys(("word_embed_proj_dim", "embedding_size"), config.get("hidden_size"))}
    for key, value in {**config, **parts}.items():
        is_neutral = len(key) <= _LONGEST and _NEUTRAL.fullmatch(key)
        is_known = key in read or is_neutral or (key.startswith("index_") and config.get("index_topk"))
        if value and not is_known and value != same.get(key):
            yield key or '""'
