"""Workloads from a Hugging Face ``config.json``; one model class reads its many spellings.

Values that a file omits are filled in by model type.  The defaults are those of the configuration classes of Hugging
Face transformers (4.5x), which write into a file only the values that differ: Gemma 3's text part states neither heads
nor head size.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from npusim.config.document import read_text
from npusim.config.huggingface_keys import rotary_parts, spelled_once, unread_keys
from npusim.config.layers import Experts, LatentAttention, StoredWeights
from npusim.config.messages import explain
from npusim.config.model import HeadCount, NonNegativeInt, PositiveInt, StrictBool, fault_at
from npusim.config.workload import OF_PROBLEM, WORKLOAD_SCHEMA, Unmodelled, Workload, shared_heads
from npusim.errors import SpecError

# Tokens of an imported decoder if the caller states none: the default of the other workloads.
_DEFAULT_SEQ = 4096

_GATED_ACTIVATIONS = frozenset(("silu", "swish", "swiglu", "geglu"))
_PLAIN_ACTIVATIONS = _GATED_ACTIVATIONS | {
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "quick_gelu"),
    *("mish", "relu", "relu2", "relu6", "tanh", "xielu"),
}
#: Bits of a weight by ``quant_method``: MXFP4 has a scale of 8 bits for each 32 values; FP8's scales, one for each 128
#: x 128 values, are neglected.
_STORED_BITS = MappingProxyType({"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25})
_DTYPES = ("float16", "bfloat16", "float32")

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
#: Activations that imply a gate whatever the model type; with silu every FFN is gated, except those of the models
#: above.
GATED = frozenset(("gemma", "gemma2", "gemma3_text", "gemma3n_text", "modernbert", "nomic_bert"))
#: Every n-th layer of these models sees all keys, even if the file does not say so.
WINDOW_PATTERNS = MappingProxyType({"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4})
#: These models add a bias that grows with the distance of query and key, and have no option for it.
ALIBI = frozenset(("bloom",))
#: These models have a learned score in every softmax that belongs to no key.
SINKS = frozenset(("gpt_oss",))
#: The embedding and the output projection of these models share one matrix, even if the file does not say so.
TIED = frozenset(("bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "mpt", "opt"))
#: In these models every token also passes through one additional expert, which is as wide as the others; no key of the
#: file states it.
SHARED_EXPERT = frozenset(("llama4_text",))
#: Entries of ``layer_types`` for attention that npusim computes, without or with a window.
LAYER_KINDS = frozenset(("full_attention", "sliding_attention", "global", "local", "attention"))


def _family(*sizes: int, **more: object) -> Mapping[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {**dict(zip(names, sizes, strict=True)), **more}


_GELU = "gelu_pytorch_tanh"
_MISTRAL: Mapping[str, Any] = MappingProxyType({"hidden_act": "silu", "num_key_value_heads": 8, "vocab_size": 32000})
_QWEN: Mapping[str, Any] = MappingProxyType(
    {"hidden_act": "silu", "num_key_value_heads": 32, "max_window_layers": 28, "vocab_size": 151936}
)
_GEMMA: Mapping[str, Any] = MappingProxyType(
    {"hidden_act": _GELU, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "vocab_size": 256000}
)
_MLA: Mapping[str, Any] = MappingProxyType(
    {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)
_DEEPSEEK: Mapping[str, Any] = MappingProxyType(
    {"hidden_act": "silu", "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3}
)
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _family(4096, 11008, 32, 32, hidden_act="silu", vocab_size=32000),
        "mistral": _family(4096, 14336, 32, 32, **_MISTRAL, sliding_window=4096),
        "mixtral": _family(4096, 14336, 32, 32, **_MISTRAL, num_local_experts=8, num_experts_per_tok=2),
        "qwen2": _family(4096, 22016, 32, 32, **_QWEN),
        "qwen3": _family(4096, 22016, 32, 32, head_dim=128, **_QWEN),
        "gemma": _family(3072, 24576, 28, 16, **{**_GEMMA, "num_key_value_heads": 16}),
        "gemma2": _family(2304, 9216, 26, 8, **_GEMMA, sliding_window=4096, attn_logit_softcapping=50.0),
        "gemma3_text": _family(2304, 9216, 26, 8, **{**_GEMMA, "vocab_size": 262208}, sliding_window=4096),
        "deepseek_v32": _family(7168, 18432, 61, 128, **_DEEPSEEK, **_MLA, index_topk=2048),
        "deepseek_v3": _family(7168, 18432, 61, 128, **_DEEPSEEK, **_MLA),
    }
)
#: Multimodal configs whose text part may omit its type.
_TEXT_TYPES = MappingProxyType(
    {"gemma3": "gemma3_text", "llava": "llama", "mistral3": "mistral", "qwen2_vl": "qwen2_vl_text"}
    | {"qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text"}
)
_DTYPE_KEYS = ("torch_dtype", "dtype")

PositiveNumber = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
WholeNumber = Annotated[int, Field(strict=True)]
#: MPT states these keys in a separate dictionary; other models state them at the top level.
_OF_MPT = MappingProxyType(
    {"kv_n_heads": "num_key_value_heads", "softmax_scale": "attention_multiplier", "alibi": "alibi"}
)
FFN_WIDTH = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "hidden_dim")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "top_k_experts")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def _named(default: object, *names: str) -> Any:
    return Field(default, validation_alias=AliasChoices(*names))


class HuggingFaceConfig(BaseModel):
    """The keys of a ``config.json`` that are read; `unread_keys` lists other keys that may have an effect."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    model_type: str = ""
    hidden_size: PositiveInt = Field(validation_alias=AliasChoices("hidden_size", "n_embd", "d_model", "dim"))
    heads: HeadCount = Field(validation_alias=AliasChoices("num_attention_heads", "num_heads", "n_head", "n_heads"))
    kv_heads: HeadCount | None = _named(None, "num_key_value_heads", "num_kv_heads", "multi_query_group_num")
    multi_query: StrictBool = _named(False, "multi_query", "multi_query_attention")
    new_decoder_architecture: StrictBool = False
    layers: PositiveInt = Field(validation_alias=AliasChoices(*_LAYERS))
    head_dim: PositiveInt | None = _named(None, "head_dim", "kv_channels")
    intermediate_size: PositiveInt | None = _named(None, *FFN_WIDTH)
    dense_size: PositiveInt | None = _named(None, "intermediate_size_mlp")
    vocab_size: PositiveInt | None = None
    tied: StrictBool | None = _named(None, "tie_word_embeddings")
    activation: str | None = _named(None, "hidden_act", "activation_function", "hidden_activation", "activation")
    max_positions: PositiveInt | None = _named(None, "max_position_embeddings", "n_positions", "n_ctx")
    dtype: str | None = _named(None, "dtype", "torch_dtype")
    is_decoder: StrictBool | None = None
    is_causal: StrictBool | None = _named(None, "is_causal", "causal")
    image_size: object = None
    patch_size: object = None
    sliding_window: WholeNumber | None = _named(None, "sliding_window", "sliding_window_size")
    use_sliding_window: StrictBool | None = None
    max_window_layers: NonNegativeInt | None = None
    sliding_window_pattern: WholeNumber | str | None = None
    layer_types: tuple[str, ...] | None = _named(None, "layer_types", "layers_block_type")
    query_pre_attn_scalar: PositiveNumber | None = None
    attention_multiplier: PositiveNumber | None = None
    rope_scaling: dict[str, object] | None = _named(None, "rope_scaling", "rope_parameters")
    softcap: PositiveNumber | None = _named(None, "attn_logit_softcapping")
    alibi: StrictBool = _named(False, "alibi", "use_alibi")
    position_embedding_type: str | None = None
    relative_attention_num_buckets: WholeNumber | None = None
    attention_chunk_size: PositiveInt | None = None
    no_rope_layers: tuple[WholeNumber, ...] | None = None
    no_rope_layer_interval: PositiveInt | None = None
    index_topk: PositiveInt | None = None
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt | None = None
    qk_nope_head_dim: PositiveInt | None = None
    qk_rope_head_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None
    experts: NonNegativeInt | None = _named(None, "n_routed_experts", "num_local_experts", "num_experts")
    experts_per_token: NonNegativeInt | None = _named(None, *EXPERTS_PER_TOKEN)
    expert_size: PositiveInt | None = _named(None, "moe_intermediate_size")
    shared_experts: NonNegativeInt | None = _named(None, "n_shared_experts", "num_shared_experts")
    shared_expert_size: NonNegativeInt | None = _named(None, "shared_expert_intermediate_size")
    first_dense: NonNegativeInt = _named(0, "first_k_dense_replace")
    sparse_step: PositiveInt = _named(1, "decoder_sparse_step", "interleave_moe_layer_step")
    layer_freq: PositiveInt | tuple[StrictBool | NonNegativeInt, ...] = _named(1, "moe_layer_freq")
    dense_layers: tuple[NonNegativeInt, ...] = _named((), "mlp_only_layers")
    quantization: dict[str, object] | None = _named(None, "quantization_config")
    #: Keys that npusim does not read and that may change the result.
    unread: tuple[str, ...] = ()


#: Keys that a workload file omits if they have their default values.  A data recipe must state its kind, so that it is
#: omitted only as a whole.
_LEFT_OUT = ("batch", "data", "unmodelled", "unread")


#: Fields with several spellings: whether an FFN is gated, and the number of tokens of a run that states none.
_MAY_DIFFER = ("activation", "max_positions")
#: Sizes of latent attention that have no effect if a file has no rank of K and V.
_OF_LATENTS = frozenset(("q_lora_rank", "qk_rope_head_dim"))
#: Keys outside a text part that also apply to it, and keys of images.
_INHERITED = ("quantization_config", "tie_word_embeddings", "is_causal", "causal")
_OF_IMAGES = ("image_size", "patch_size")


def _spellings() -> dict[str, tuple[str, ...]]:
    """Return the names that files use for each field."""
    aliases = {n: f.validation_alias or n for n, f in HuggingFaceConfig.model_fields.items() if n != "unread"}
    return {n: tuple(map(str, a.choices)) if isinstance(a, AliasChoices) else (str(a),) for n, a in aliases.items()}


def with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text model of a config with the defaults of its model type, and those of its keys that npusim does not
    read.
    """
    spellings = _spellings()
    read = {name for names in spellings.values() for name in names}
    config, outside = _text_part(data, read)
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list) and kinds and not any(config.get(key) for key in _LAYERS):
        config["num_hidden_layers"] = len(kinds)
    defaults = dict(_DEFAULTS.get(str(config.get("model_type", "")), {}))
    part, stored = config.get("attn_config"), config.get("quantization_config")
    if isinstance(part, dict):
        read.add("attn_config")
        defaults |= {key: part[name] for name, key in _OF_MPT.items() if part.get(name)}
        defaults |= {"multi_query": True} if part.get("attn_type") == "multiquery_attention" else {}
    if isinstance(stored, dict) and not _stored_bits(stored):
        read.remove("quantization_config")
    known, others = spelled_once(config, defaults, spellings.values())
    may_differ = {name for field in _MAY_DIFFER for name in spellings[field]}
    if known.get("kv_lora_rank") is None:
        read -= _OF_LATENTS
    unread = dict.fromkeys((*unread_keys(config, read), *(n for n in others if n not in may_differ), *outside))
    return {**known, "unread": tuple(unread)}


def _text_part(data: Mapping[str, Any], read: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the text model of a config, and the outer keys that are ``read`` in other configs but not in this one."""
    inner = data.get("text_config")
    if not isinstance(inner, dict) or "num_attention_heads" in data:
        return dict(data), []
    is_stated = any(inner.get(key) is not None for key in _DTYPE_KEYS)
    above = (*_INHERITED, *(() if is_stated else _DTYPE_KEYS))
    beside = {key: data[key] for key in data if data[key] is not None and inner.get(key) is None}
    inherited = {key: beside[key] for key in above if key in beside}
    outer = str(data.get("model_type", ""))
    named = set(read) - {"model_type", *inherited, *_DTYPE_KEYS, *_OF_IMAGES}
    outside = [key for key, value in beside.items() if value and key in named]
    return {"model_type": _TEXT_TYPES.get(outer, outer), **inner, **inherited}, outside


def _check_form(data: Mapping[str, Any]) -> None:
    """Raise an error for a model that no workload describes: an encoder with a decoder, layers of several sizes."""
    inner = data.get("text_config")
    parts = [data, *([inner] if isinstance(inner, dict) else [])]
    marks = ("is_encoder_decoder", "decoder_layers")
    for part in parts:
        two = [m for m in marks if part.get(m) and (m == marks[0] or part.get("encoder_layers"))]
        if two:
            raise fault_at(two[0], "its encoder and its decoder attend differently; write a workload file for each")
        for key in _spellings()["heads"]:
            if isinstance(part.get(key), list):
                differ = "its layers differ; write a workload file for each kind"
                raise fault_at(key, f"expected a whole number, got {part[key]}: {differ}")


def import_config(
    path: str | Path,
    *,
    tensor_parallel: int = 1,
    seq: int | None = None,
    batch: int = 1,
    name: str | None = None,
    dtype: Literal["float16", "bfloat16", "float32"] | None = None,
) -> Workload:
    """Return the workload of the model that a ``config.json`` describes.

    Models differ in their keys: ``head_dim`` has precedence over ``hidden_size / heads``; without
    ``num_key_value_heads`` the number of KV heads is that of query heads; an FFN width of null means four times the
    hidden size; windows count only if ``use_sliding_window``, ``layer_types`` or ``max_window_layers`` enable them;
    latent attention (MLA) becomes the plain attention of its prefill, with heads of ``nope + rope`` and ``v`` columns;
    the factor of the scores follows from ``query_pre_attn_scalar``, ``attention_multiplier`` or YaRN if one of these is
    stated.  A multimodal config contributes its text model, with the library's defaults.  ``is_causal`` has precedence
    over the model type.  Features that npusim does not compute are listed in ``unmodelled``.  Listed in ``unread`` are
    an unknown model type, and keys that npusim does not read and that may change attention, caches or parameters.
    These include keys of ``rope_scaling`` and of other dictionaries (``rope_scaling.key``), and a second name of a
    value if the two names state different values.  Without a stated dtype: float16; without a known activation the FFN
    has two matrices, and ``source`` states this.

    Raises
    ------
    SpecError
        The file is not JSON, lacks sizes, states a dtype that Q, K and V cannot have, or describes an encoder with a
        decoder or layers with different numbers of heads (``file:line  key: ``); or the heads cannot be shared among
        ``tensor_parallel`` devices (lists the divisors).
    """
    path = Path(path)
    text = read_text(path)
    data = _json_object(path, text)
    try:
        _check_form(data)
        config = HuggingFaceConfig.model_validate(with_defaults(data))
        options = {"tensor_parallel": tensor_parallel, "seq": seq, "batch": batch, "name": name, "dtype": dtype}
        return _workload_of(config, path, text, options)
    except ValidationError as error:
        faults = list(explain(error))
    except PydanticCustomError as error:
        context = error.context or {}
        faults = [(context["key"], context["text"])]
    raise SpecError("\n".join(f"{path}:{_line(text, key)}  {key}: {fault}" for key, fault in faults))


def _workload_of(config: HuggingFaceConfig, path: Path, text: str, options: Mapping[str, Any]) -> Workload:
    """Return the workload of a config; ``options``: as for `import_config`, None where the file decides."""
    head_dim, value_head_dim, latent = _head_sizes(config)
    heads = config.heads
    kv_heads = heads if latent else _kv_heads(config)
    # Checked before the workload checks it: the command line has this fault, not the file.
    shared_heads(heads, kv_heads, options["tensor_parallel"])
    window, chunk, local_layers = _windows(config)
    positions = config.position_embedding_type
    model = f"{config.model_type or 'model'}: {config.layers} layers"
    return Workload(
        schema=WORKLOAD_SCHEMA,
        name=options["name"] or _name(path, config),
        description=f"{model}, {heads} heads of {head_dim}, {kv_heads} KV heads",
        source="; ".join(
            (f"{path.name} ({config.model_type or 'no model type'})", *_assumed(config, options["dtype"]))
        ),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        hidden=config.hidden_size,
        layers=config.layers,
        intermediate=config.dense_size or config.intermediate_size or 4 * config.hidden_size,
        gated=_is_gated(config),
        experts=_experts(config),
        vocab=config.vocab_size,
        tied=config.model_type in TIED if config.tied is None else config.tied,
        window=window,
        chunk=chunk,
        local_layers=local_layers,
        softcap=config.softcap,
        alibi=config.model_type in ALIBI or config.alibi or positions == "alibi",
        sink_logits=config.model_type in SINKS,
        scale=_scale(config, head_dim),
        unmodelled=_unmodelled(config),
        unread=config.unread,
        stored=_stored(config),
        latent=latent,
        tensor_parallel=options["tensor_parallel"],
        batch=options["batch"],
        seq=options["seq"] or _default_seq(config),
        causal=_is_causal(config),
        dtype=options["dtype"] or _dtype(config, "dtype" if _line(text, "dtype") > 1 else "torch_dtype"),
    )


def workload_yaml(workload: Workload) -> str:
    """Return the text of a workload file that `npusim.config.load.load_workload` reads back."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 10_000  # one line per value, however long its text
    stream = StringIO()
    data = workload.model_dump(mode="json", by_alias=True, exclude_none=True)
    # Not by `exclude_defaults`: a data recipe needs its kind.
    for key in _LEFT_OUT:
        if getattr(workload, key) == Workload.model_fields[key].default:
            del data[key]
    if not workload.local_layers:
        del data["local_layers"]
    # The name of the model comes first.
    yaml.dump({key: data[key] for key in sorted(data, key=OF_PROBLEM.__contains__)}, stream)
    return stream.getvalue()


def _json_object(path: Path, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"{path}:{error.lineno}  not valid JSON: {error.msg}") from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of 5,000 digits
        raise SpecError(f"{path}:1  not readable: {error}") from None
    if not isinstance(data, dict):
        raise SpecError(f"{path}:1  expected a JSON object, as in a model's config.json")
    return data


def _line(text: str, key: str) -> int:
    """Return the line of a key in JSON text, 1 if the text does not have it."""
    match = re.search(rf'"{re.escape(key)}"\s*:', text)
    return text.count("\n", 0, match.start()) + 1 if match else 1


def _head_sizes(config: HuggingFaceConfig) -> tuple[int, int, LatentAttention | None]:
    """Return the head sizes of Q and K and of V, and the ranks of MLA if it is MLA."""
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    if config.kv_lora_rank is not None:
        if nope is None or rope is None or value is None:
            text = "latent attention also needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim"
            raise fault_at("kv_lora_rank", text)
        latent = LatentAttention(
            q_lora_rank=config.q_lora_rank, kv_lora_rank=config.kv_lora_rank, nope_head_dim=nope, rope_head_dim=rope
        )
        return nope + rope, value, latent
    if nope is not None:
        raise fault_at("qk_nope_head_dim", "latent attention also needs kv_lora_rank")
    if config.head_dim is not None:
        return config.head_dim, value or config.head_dim, None
    if config.hidden_size % config.heads:
        raise fault_at("hidden_size", f"{config.hidden_size} is not divisible by {config.heads} heads; set head_dim")
    size = config.hidden_size // config.heads
    return size, value or size, None


def _kv_heads(config: HuggingFaceConfig) -> int:
    # Falcon states as many KV heads as query heads together with `multi_query`, but uses one KV head.
    is_one = config.model_type == "falcon" or not config.kv_heads
    if config.multi_query and not config.new_decoder_architecture and is_one:
        return 1
    return config.kv_heads or config.heads


def _windows(config: HuggingFaceConfig) -> tuple[int | None, int | None, int]:
    """Return the window, the chunk, and the number of layers that have them; None and 0 if all layers see all keys."""
    kinds = config.layer_types
    if kinds is not None and len(kinds) != config.layers:
        raise fault_at("layer_types", f"has {len(kinds)} entries, but the model has {config.layers} layers")
    if config.attention_chunk_size is not None:
        # Llama-4: an entry of 0 is a layer without rotary embedding, which sees all keys; by default every fourth
        # layer.
        interval = config.no_rope_layer_interval or 4
        flags = config.no_rope_layers or [(layer + 1) % interval != 0 for layer in range(config.layers)]
        chunked = sum(map(bool, flags)) if kinds is None else sum(kind.startswith("chunked") for kind in kinds)
        return (None, config.attention_chunk_size, chunked) if chunked else (None, None, 0)
    window, pattern = config.sliding_window, config.sliding_window_pattern
    for key, number, least in ("sliding_window", window, -1), ("sliding_window_pattern", pattern, 1):
        if isinstance(number, int) and number < least:
            raise fault_at(key, f"{number} must be at least {least}")
    used = config.use_sliding_window
    if used is None:
        # Qwen2, Qwen3 and MiMo (a Qwen2) state a window that is off unless another key enables it.
        used = not config.model_type.startswith("qwen") and config.model_type != "mimo"
    if window is None or window <= 0 or not used:
        return None, None, 0
    pattern = pattern or WINDOW_PATTERNS.get(config.model_type)
    if kinds is not None:
        sliding = sum(kind.startswith(("sliding", "local")) for kind in kinds)
    elif isinstance(pattern, str):  # EXAONE 4: the last layer sees everything
        if not set(pattern) <= {"L", "G"}:
            raise fault_at("sliding_window_pattern", f"{pattern!r}: allowed: a number, or L (local) and G (global)")
        sliding = sum(pattern[layer % len(pattern)] == "L" for layer in range(config.layers - 1))
    elif pattern:
        sliding = config.layers - config.layers // pattern
    elif config.use_sliding_window and config.max_window_layers is not None:
        # Qwen2: the first `max_window_layers` layers see everything.
        sliding = max(0, config.layers - config.max_window_layers)
    else:
        sliding = config.layers
    return (window, None, sliding) if sliding else (None, None, 0)


def _is_causal(config: HuggingFaceConfig) -> bool:
    if config.is_causal is not None:
        return config.is_causal
    return config.model_type not in ENCODERS or bool(config.is_decoder)


def _is_gated(config: HuggingFaceConfig) -> bool:
    return config.model_type in GATED or (not _says_gated(config) and config.activation in _GATED_ACTIVATIONS)


def _says_gated(config: HuggingFaceConfig) -> bool:
    """Return whether the model type decides that an FFN has a gating matrix, whatever its activation is."""
    return config.model_type in GATED | ENCODERS | TWO_MATRIX_DECODERS


def _experts(config: HuggingFaceConfig) -> Experts | None:
    if (config.experts or 0) < 2:
        return None
    if not config.experts_per_token:
        raise fault_at("num_experts_per_tok", f"missing, but the model has {config.experts} experts")
    if config.experts_per_token > (config.experts or 0):
        raise fault_at(
            "num_experts_per_tok",
            f"{config.experts_per_token} experts per token, but the model has only {config.experts}",
        )
    width = config.expert_size or config.intermediate_size
    if width is None:
        raise fault_at("moe_intermediate_size", f"missing, but the model has {config.experts} experts")
    shared = config.shared_experts or (1 if config.model_type in SHARED_EXPERT else 0)
    freq = config.layer_freq
    sparse = freq if isinstance(freq, tuple) else [i % freq == 0 for i in range(config.layers)]
    if len(sparse) != config.layers:
        raise fault_at("moe_layer_freq", f"has {len(sparse)} entries, but the model has {config.layers} layers")
    # Qwen and Llama 4 count layers from 1, DeepSeek from 0; other models list a value per layer.
    dense = [
        i < config.first_dense or i in config.dense_layers or (i + 1) % config.sparse_step or not sparse[i]
        for i in range(config.layers)
    ]
    return Experts(
        count=config.experts,
        per_token=config.experts_per_token,
        width=width,
        shared_width=config.shared_expert_size or shared * width,
        dense_layers=sum(map(bool, dense)),
    )


def _assumed(config: HuggingFaceConfig, chosen: str | None) -> Iterator[str]:
    """Yield the assumptions about values that the file does not state, and the storage format of weights."""
    if not (chosen or config.dtype):
        yield "it states no dtype; npusim uses float16"
    if not _says_gated(config) and config.activation not in _PLAIN_ACTIVATIONS:
        what = "no activation" if config.activation is None else f"the unknown activation {config.activation}"
        yield f"it states {what}; npusim assumes an FFN of two matrices"
    if config.quantization and not _stored_bits(config.quantization):
        yield (
            f"its weights are stored as {config.quantization.get('quant_method')}, but npusim counts 16 bits for each"
        )


def _stored_bits(spec: Mapping[str, Any]) -> float | None:
    """Return the bits of a quantised weight, including its share of scales and zero points; None if they are
    not known.
    """
    method, bits, group = (spec.get(key) for key in ("quant_method", "bits", "group_size"))
    if method not in ("awq", "gptq") or type(bits) is not int or bits < 1:
        return _STORED_BITS.get(str(method))
    # one scale and one zero point per group
    return bits + ((16 + bits) / group if isinstance(group, int) and group > 0 else 0.0)


def _stored(config: HuggingFaceConfig) -> StoredWeights | None:
    """Return how weights are stored, None if they have the format of Q, K and V; MXFP4 is used only for experts
    (gpt_oss).
    """
    spec = config.quantization or {}
    bits = _stored_bits(spec)
    return StoredWeights(bits=bits, of="experts" if spec["quant_method"] == "mxfp4" else "layers") if bits else None


def _dtype(config: HuggingFaceConfig, key: str) -> Literal["float16", "bfloat16", "float32"]:
    for known in _DTYPES:
        if config.dtype in (known, f"torch.{known}"):
            return known  # type: ignore[return-value]
    if config.dtype is None:
        return "float16"
    raise fault_at(key, f"{config.dtype!r} is not one of {', '.join(_DTYPES)}; use --dtype")


def _scale(config: HuggingFaceConfig, head_dim: int) -> float | None:
    """Return the factor of the scores if it differs from one over the root of the head size."""
    if config.attention_multiplier is not None:
        return config.attention_multiplier
    scalar = config.query_pre_attn_scalar
    if scalar is not None and scalar != head_dim:
        return 1.0 / math.sqrt(scalar)
    # DeepSeek-V2 and V3 multiply by the square of YaRN's 0.1 m ln(factor) + 1 (their modeling code).
    scaling = config.rope_scaling or {}
    if config.kv_lora_rank is not None and "mscale_all_dim" in scaling:
        every, factor = (_number_of(scaling, key) for key in ("mscale_all_dim", "factor"))
        if factor <= 0:
            raise fault_at("rope_scaling.factor", f"{factor:g} must be greater than 0")
        m = 0.1 * every * math.log(max(factor, 1.0)) + 1.0
        return m * m / math.sqrt(head_dim) if m != 1 else None
    return None


def _number_of(scaling: Mapping[str, object], key: str) -> float:
    """Return a number of YaRN's parameters; raise an error for another value."""
    value = scaling.get(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise fault_at(f"rope_scaling.{key}", f"expected a finite number, got {value!r}")
    return float(value)


def _unmodelled(config: HuggingFaceConfig) -> tuple[Unmodelled, ...]:
    """Return the features of this model's attention that npusim does not compute."""
    scaling, positions = config.rope_scaling or {}, config.position_embedding_type or ""
    present: dict[Unmodelled, object] = {
        "bias": positions.startswith("relative") or config.relative_attention_num_buckets is not None,
        # The frequencies depend on the current length: each call rotates the stored keys again.
        "rotary": any("dynamic" in (part.get("rope_type"), part.get("type")) for part in rotary_parts(scaling)),
        "sparse": config.index_topk is not None,
        "layers": not set(config.layer_types or ()) <= LAYER_KINDS | {"chunked_attention"},
    }
    return tuple(name for name, is_present in present.items() if is_present)


def _default_seq(config: HuggingFaceConfig) -> int:
    image, patch = config.image_size, config.patch_size
    if isinstance(image, int) and isinstance(patch, int) and 0 < patch <= image:
        return (image // patch) ** 2 + 1
    return min(config.max_positions or _DEFAULT_SEQ, _DEFAULT_SEQ)


def _name(path: Path, config: HuggingFaceConfig) -> str:
    folder = path.resolve().parent.name
    name = config.model_type if path.stem == "config" else path.stem
    return re.sub(r"\W+", "_", name or folder or "imported").strip("_").lower()
