"""What a ``config.json`` leaves to the library that reads it: defaults and habits by model type.

Defaults are those of the configuration classes of Hugging Face transformers (4.5x), which write only
what differs from them into a file: Gemma 3's text part states neither heads nor head size.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ENCODERS = frozenset(
    (
        *("albert", "beit", "bert", "clip_vision_model", "deberta", "deberta-v2", "deit"),
        *("dinov2", "distilbert", "electra", "modernbert", "mpnet", "nomic_bert", "roberta"),
        *("siglip_vision_model", "vit", "vit_mae", "xlm-roberta"),
    )
)
TWO_MATRIX_DECODERS = frozenset(
    (
        *("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj"),
        *("mpt", "opt", "pangu", "pangu_alpha", "phi", "starcoder2"),
    )
)
#: Gated whatever their activation; with silu every FFN is, unless it is one of those above.
GATED = frozenset(("gemma", "gemma2", "gemma3_text", "gemma3n_text", "modernbert", "nomic_bert"))
#: Every n-th layer of these sees everything, even where the file does not say so.
WINDOW_PATTERNS = MappingProxyType({"gemma2": 2, "gemma3_text": 6, "cohere2": 4})
#: These add a bias that grows with the distance of query and key, and have no switch for it.
ALIBI = frozenset(("bloom",))
#: These have a learned score in every softmax that belongs to no key.
SINKS = frozenset(("gpt_oss",))
#: Entries of ``layer_types`` that are attention as npusim computes it, or that with a window.
LAYER_KINDS = frozenset(("full_attention", "sliding_attention", "global", "local", "attention"))


def _family(*sizes: int | None, **more: Any) -> Mapping[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return MappingProxyType({**dict(zip(names, sizes, strict=True)), **more})


_GELU = "gelu_pytorch_tanh"
_QWEN: Mapping[str, Any] = MappingProxyType({"hidden_act": "silu", "num_key_value_heads": 32, "max_window_layers": 28})
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _family(4096, 11008, 32, 32, hidden_act="silu"),
        "mistral": _family(4096, 14336, 32, 32, hidden_act="silu", num_key_value_heads=8, sliding_window=4096),
        "mixtral": _family(4096, 14336, 32, 32, hidden_act="silu", num_key_value_heads=8),
        "qwen2": _family(4096, 22016, 32, 32, **_QWEN),
        "qwen3": _family(4096, 22016, 32, 32, head_dim=128, **_QWEN),
        "gemma": _family(3072, 24576, 28, 16, hidden_act=_GELU, num_key_value_heads=16, head_dim=256),
        "gemma2": _family(
            2304,
            9216,
            26,
            8,
            hidden_act=_GELU,
            num_key_value_heads=4,
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=4096,
            attn_logit_softcapping=50.0,
        ),
        "gemma3_text": _family(
            2304,
            9216,
            26,
            8,
            hidden_act=_GELU,
            num_key_value_heads=4,
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=4096,
        ),
        "deepseek_v3": _family(
            7168,
            18432,
            61,
            128,
            hidden_act="silu",
            num_key_value_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
    }
)
#: Multimodal configs whose text part may leave out its own type.
_TEXT_TYPES = MappingProxyType({"gemma3": "gemma3_text", "llava": "llama", "mistral3": "mistral"})
_INHERITED = ("torch_dtype", "dtype")


def with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text model of a config with what its file leaves out; unknown types as they are."""
    inner = data.get("text_config")
    found = dict(data)
    if isinstance(inner, dict) and "num_attention_heads" not in data:
        above = {key: data[key] for key in _INHERITED if data.get(key) is not None}
        if inner.get("torch_dtype") is not None or inner.get("dtype") is not None:
            above = {}
        own_type = _TEXT_TYPES.get(str(data.get("model_type", "")))
        found = {**({"model_type": own_type} if own_type else {}), **inner, **above}
    stated = _DEFAULTS.get(str(found.get("model_type", "")), {})
    known = {"hidden_act"} if "hidden_activation" in found else set()
    return {**{key: value for key, value in stated.items() if key not in known}, **found}
