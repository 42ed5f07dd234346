"""Configs as models are published: their keys that matter here, and those that matter by their absence."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

import pytest

from npusim.config.huggingface import import_config, workload_yaml
from npusim.config.huggingface_keys import unread_keys
from npusim.config.load import load_workload
from npusim.errors import SpecError
from npusim.report.run_inputs import read_as

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from npusim.config.workload import Workload

GEMMA_2_9B_IT = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA_2_27B = {
    **GEMMA_2_9B_IT,
    "head_dim": 128,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
    "torch_dtype": "float32",
}
VISION = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
# Heads, KV heads and head size are the library's defaults; the dtype stands above.
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": VISION,
}
GEMMA_3_27B = {
    **GEMMA_3_4B,
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
LLAMA_3_8B = {
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
QWEN_3_8B = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
DEEPSEEK_V3 = {
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8"},
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
# LLaVA 1.5 states nothing of its language model but what differs from the defaults.
LLAVA = {
    "model_type": "llava",
    "torch_dtype": "float16",
    "vision_config": VISION,
    "text_config": {"max_position_embeddings": 4096, "model_type": "llama", "vocab_size": 32064},
}


# Qwen3-VL-30B-A3B-Instruct.
QWEN_3_VL_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 151656,
    "vision_config": {"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "model_type": "qwen3_vl_moe"},
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
# MiMo-7B-RL.
MIMO_7B = {
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "mimo",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 640000,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151680,
}


@pytest.fixture
def imported(write: Callable[..., Path]) -> Callable[..., Workload]:
    def read(content: dict[str, object], **changes: object) -> Workload:
        kept = {**content, **changes}
        named = {key: value for key, value in kept.items() if value != "absent"}
        return import_config(write(json.dumps(named, indent=1), "config.json"))

    return read


@pytest.mark.parametrize(
    ("config", "heads", "kv_heads", "head_dim", "layers", "dtype"),
    [
        (GEMMA_2_9B_IT, 16, 8, 256, 42, "bfloat16"),
        (GEMMA_2_27B, 32, 16, 128, 46, "float32"),
        (GEMMA_3_4B, 8, 4, 256, 34, "bfloat16"),
        (GEMMA_3_27B, 32, 16, 128, 62, "bfloat16"),
        (LLAMA_3_8B, 32, 8, 128, 32, "bfloat16"),
        (MISTRAL_7B, 32, 8, 128, 32, "bfloat16"),
        (QWEN_3_8B, 32, 8, 128, 36, "bfloat16"),
        (DEEPSEEK_V3, 128, 128, 192, 61, "bfloat16"),
        (LLAVA, 32, 32, 128, 32, "float16"),
        ({"model_type": "deepseek_v3"}, 128, 128, 192, 61, "float16"),
        ({"model_type": "mistral"}, 32, 8, 128, 32, "float16"),
        ({"model_type": "gemma3", "text_config": {}}, 8, 4, 256, 26, "float16"),
    ],
)
def test_sizes_and_formats_are_those_of_the_model(
    imported: Callable[..., Workload],
    config: dict[str, object],
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    dtype: str,
) -> None:
    found = imported(config)
    assert (found.heads, found.kv_heads, found.head_dim) == (heads, kv_heads, head_dim)
    assert (found.layers, found.dtype, found.gated, found.causal) == (layers, dtype, True, True)


@pytest.mark.parametrize(
    ("config", "expected", "left_out"),
    [
        (GEMMA_2_9B_IT, {"window": 4096, "local_layers": 21, "softcap": 50.0}, ""),
        (GEMMA_3_4B, {"window": 1024, "local_layers": 29}, ""),
        (GEMMA_3_27B, {"window": 1024, "local_layers": 52}, ""),
        (LLAMA_3_8B, {"window": None, "chunk": None, "alibi": False, "sink_logits": False}, ""),
        (MISTRAL_7B, {"window": 4096, "local_layers": 32}, ""),
        ({**MISTRAL_7B, "sliding_window": None}, {"window": None, "local_layers": 0}, ""),
        ({**MISTRAL_7B, "sliding_window": "absent"}, {"window": 4096, "local_layers": 32}, ""),
        (QWEN_3_8B, {"window": None}, ""),
        (DEEPSEEK_V3, {"head_dim": 192, "value_head_dim": 128}, ""),
        ({**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_topk": 2048}, {}, "sparse"),
        ({**LLAMA_3_8B, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "rotary"),
        ({**LLAMA_3_8B, "model_type": "bloom"}, {"alibi": True}, ""),
        ({**LLAMA_3_8B, "model_type": "falcon", "alibi": True}, {"alibi": True}, ""),
        ({**LLAMA_3_8B, "model_type": "bert", "position_embedding_type": "relative_key"}, {}, "bias"),
        ({**LLAMA_3_8B, "model_type": "gpt_oss", "sliding_window": 128}, {"sink_logits": True, "local_layers": 16}, ""),
        # Llama-4: every fourth layer has no rotary embedding and sees everything.
        ({**LLAMA_3_8B, "attention_chunk_size": 8192}, {"chunk": 8192, "local_layers": 24, "window": None}, ""),
        ({**LLAMA_3_8B, "attention_chunk_size": 64, "no_rope_layers": [1, 0] * 16}, {"local_layers": 16}, ""),
        ({**LLAMA_3_8B, "layer_types": ["linear_attention"] * 32}, {}, "layers"),
    ],
)
def test_what_a_model_does_beyond_plain_attention_is_taken_or_listed(
    imported: Callable[..., Workload], config: dict[str, object], expected: dict[str, object], left_out: str
) -> None:
    workload = imported(config)
    assert {name: getattr(workload, name) for name in expected} == expected
    assert list(workload.left_out()) == ([left_out] if left_out else [])


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (GEMMA_2_9B_IT, 1 / 16),
        (GEMMA_2_27B, 1 / 12),
        (GEMMA_3_27B, 168**-0.5),
        (LLAMA_3_8B, 128**-0.5),
        # YaRN's factor, squared: (0.1 ln 40 + 1)^2 = 1.8738
        (DEEPSEEK_V3, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2),
        ({**LLAMA_3_8B, "model_type": "granite", "attention_multiplier": 0.015625}, 1 / 64),
    ],
)
def test_scores_have_the_models_factor(
    imported: Callable[..., Workload], config: dict[str, object], scale: float
) -> None:
    assert imported(config).problem().scale == pytest.approx(scale, rel=1e-12)


MIXTRAL = {
    **MISTRAL_7B,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "sliding_window": None,
    "vocab_size": 32000,
}
QWEN_3_30B_A3B = {
    **QWEN_3_8B,
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
QWEN_2_7B = {
    **QWEN_3_8B,
    "head_dim": "absent",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
GPT_OSS_20B = {
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "vocab_size": 201088,
}
DEEPSEEK_V2_LITE = {
    **DEEPSEEK_V3,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "vocab_size": 102400,
}
LLAMA_4_SCOUT = {
    "model_type": "llama4",
    "text_config": {
        "hidden_act": "silu",
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "model_type": "llama4_text",
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "head_dim": 128,
        "vocab_size": 202048,
    },
}


@pytest.mark.parametrize(
    ("config", "total", "active"),
    # Billions as the model cards have them.
    [
        (QWEN_3_30B_A3B, 30.5, 3.3),
        (MIXTRAL, 46.7, 12.9),
        (DEEPSEEK_V3, 671, 37),
        (GPT_OSS_20B, 20.9, 4.2),  # the card says 3.6, without the matrix at the input
        (DEEPSEEK_V2_LITE, 15.7, 2.7),  # the card says 2.4 active, without the vocabulary's matrices
        (LLAMA_4_SCOUT, 108, 17),
        ({"model_type": "llama"}, 6.74, 6.74),
        (QWEN_2_7B, 7.62, 7.62),
        (LLAMA_3_8B, 8.03, 8.03),
        ({**GEMMA_2_9B_IT, "vocab_size": "absent"}, 9.24, 9.24),  # one matrix of the vocabulary
    ],
)
def test_parameters_are_those_published(
    imported: Callable[..., Workload], config: dict[str, object], total: float, active: float
) -> None:
    load = imported(config)
    weights = load.model(load.problem(), 1).weights()
    assert weights.total / 1e9 == pytest.approx(total, rel=0.005)
    assert weights.active / 1e9 == pytest.approx(active, rel=0.05)
    # Shared among devices they are the same, but for what only some divide.
    shared = load.model(load.problem(tensor_parallel=4), 4).weights()
    assert shared == weights
    spread = load.model(load.problem(tensor_parallel=load.heads), load.heads)  # some hold KV heads that others hold
    assert load.latent or spread.weights().total - spread.copied == weights.total


def test_layers_with_experts_are_those_of_the_model(imported: Callable[..., Workload]) -> None:
    def dense(config: dict[str, object], **changes: object) -> int:
        experts = imported(config, **changes).experts
        assert experts is not None
        return experts.dense_layers

    assert dense(QWEN_3_30B_A3B, mlp_only_layers=[0, 5], decoder_sparse_step=2) == 25  # 0, 2, ... 46, and 5
    assert dense(DEEPSEEK_V3) == 3
    assert dense(DEEPSEEK_V3, moe_layer_freq=2) == 2 + 30  # 0, 1 (2 is dense as well), 3, 5, ... 59
    assert imported(MIXTRAL, num_local_experts=1).experts is None


def test_experts_that_cannot_be_are_refused(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    def refused(config: dict[str, object], **changes: object) -> str:
        return fault(import_config, write(json.dumps({**config, **changes}), "config.json")).partition("  ")[2]

    assert (
        refused(MIXTRAL, layer_types=["full_attention"] * 3)
        == "layer_types: has 3 entries, but the model has 32 layers"
    )
    assert refused(MIXTRAL, moe_layer_freq=[0, 1]) == "moe_layer_freq: has 2 entries, but the model has 32 layers"
    assert refused(MIXTRAL, num_experts_per_tok=None) == "num_experts_per_tok: missing, but the model has 8 experts"
    assert refused(MIXTRAL, num_experts_per_tok=9).endswith("9 experts per token, but the model has only 8")


def test_what_a_file_does_not_say_of_formats_is_said(imported: Callable[..., Workload]) -> None:
    assert imported({"model_type": "llama"}).source == "config.json (llama); it states no dtype; npusim uses float16"
    assert imported(LLAMA_3_8B).source == "config.json (llama)"
    source = imported(LLAMA_3_8B, quantization_config={"quant_method": "hqq"}).source
    assert source.endswith("; its weights are stored as hqq, but npusim counts 16 bits for each")
    # A file of a type whose activation says whether the FFN has a gating matrix.
    for stated, words in (("absent", "no activation"), ("frob", "the unknown activation frob")):
        load = imported(QWEN_3_30B_A3B, hidden_act=stated)
        assert (load.gated, load.source) == (
            False,
            f"config.json (qwen3_moe); it states {words}; npusim assumes an FFN of two matrices",
        )
    assert imported(LLAMA_3_8B, hidden_act="absent").gated  # the library's default
    assert imported(LLAMA_3_8B, model_type="gpt_neox", hidden_act="absent").source == "config.json (gpt_neox)"


#: A key each of public models' files, of which nothing knows what it does to attention, caches or parameters.
NOT_READ: dict[str, object] = {
    "attention_type": "block_sparse",
    "attention_window": [512] * 32,
    "attn_layer_period": 8,
    "block_configs": [{"attention": {"n_heads_in_group": 8}}],
    "blocksparse_block_size": 64,
    "expert_layer_period": 2,
    "ffn_config": {"moe_num_experts": 16},
    "global_attn_every_n_layers": 3,
    "global_head_dim": 512,
    "hybrid_override_pattern": "M-M*",
    "index_n_heads": 64,
    "linear_attn_config": {"kda_layers": [1, 2, 3]},
    "model_type": "mamba",
    "num_kv_shared_layers": 4,
    "pruned_heads": {"0": [1]},
    "quantization_config": {"quant_method": "compressed-tensors"},
    "relative_attention": True,
    "state_size": 16,
    "use_relative_position_bias": True,
    "use_something_new": 1,
}


@pytest.mark.parametrize("key", NOT_READ)
def test_a_key_that_nothing_reads_is_listed_and_refused_by_a_run(
    imported: Callable[..., Workload], write: Callable[..., Path], key: str
) -> None:
    load = imported(LLAMA_3_8B, **{key: NOT_READ[key]})
    assert list(load.left_out()) == [key]
    saved = load_workload(write(workload_yaml(load)))
    assert saved == load
    with pytest.raises(SpecError, match=rf"{key} \(.*\): not modelled; to run without them: --ignore {key}$"):
        saved.ignored(())
    with pytest.raises(SpecError, match=rf"ignore other; allowed: .*, {key}$"):
        saved.ignored(("other",))
    assert len(saved.ignored((key,))) == 1
    off: object = {} if isinstance(NOT_READ[key], dict) else None
    assert imported(LLAMA_3_8B, **({} if key == "model_type" else {key: off})).left_out() == {}


def test_a_file_without_a_model_type_is_not_taken_for_a_known_one(imported: Callable[..., Workload]) -> None:
    assert list(imported(LLAMA_3_8B, model_type="absent").left_out()) == ["model_type"]
    inner = {key: value for key, value in LLAMA_3_8B.items() if key != "model_type"}
    assert list(imported({"model_type": "new", "text_config": inner}).left_out()) == ["model_type"]
    assert imported({"model_type": "llava", "text_config": inner}).left_out() == {}


def test_keys_that_nobody_would_write_are_listed_at_once() -> None:
    """Alternatives of an expression that try each of a long key's places would take hours."""
    begun = time.process_time()
    keys = ["dropout_" * 100_000 + "!", "", "a\nb"]
    assert list(unread_keys({"model_type": "llama", **dict.fromkeys(keys, 1)}, ("model_type",))) == [
        keys[0],
        '""',
        keys[2],
    ]
    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    "key",
    [
        *("attention_bias", "bos_token_id", "hidden_dropout_prob", "initializer_range", "rms_norm_eps", "rope_theta"),
        *("attn_pdrop", "vision_config", "router_aux_loss_coef", "mlp_bias", "_attn_implementation_autoset"),
    ],
)
def test_keys_that_change_nothing_are_not_listed(key: str) -> None:
    assert not list(unread_keys({"model_type": "llama", key: 1}, ("model_type",)))


@pytest.mark.parametrize(
    "key", ["attention_sink_bias", "relative_attention_bias", "token_drop_ratio", "rope_head_dim", "output_size"]
)
def test_keys_that_are_called_almost_so_are_listed(key: str) -> None:
    assert list(unread_keys({"model_type": "llama", key: 1}, ("model_type",))) == [key]


def test_what_mpt_says_of_its_attention_is_read(imported: Callable[..., Workload]) -> None:
    """MPT-7B's file, with keys of llm-foundry's that npusim reads, and one that it does not."""
    mpt = {
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "clip_qkv": None,
            "attn_type": "multihead_attention",
            "prefix_lm": False,
            "qk_ln": False,
            "softmax_scale": None,
        },
        "d_model": 4096,
        "expansion_ratio": 4,
        "learned_pos_emb": True,
        "logit_scale": None,
        "max_seq_len": 2048,
        "model_type": "mpt",
        "n_heads": 32,
        "n_layers": 32,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "init_device": "cpu",
        "resid_pdrop": 0,
        "torch_dtype": "bfloat16",
        "vocab_size": 50432,
        "verbose": 0,
    }
    load = imported(mpt)
    assert (load.alibi, load.kv_heads, load.scale, load.left_out()) == (True, 32, None, {})

    def changed(**more: object) -> Workload:
        return imported({**mpt, "attn_config": more})

    assert changed(kv_n_heads=8, softmax_scale=0.5).kv_heads == 8
    assert changed(kv_n_heads=8, softmax_scale=0.5).scale == 0.5
    assert changed(attn_type="multiquery_attention").kv_heads == 1
    assert list(changed(sliding_window_size=128).left_out()) == ["attn_config.sliding_window_size"]


def test_layers_and_experts_are_read_in_their_other_spellings(imported: Callable[..., Workload]) -> None:
    experts = imported(
        QWEN_3_30B_A3B, num_experts_per_tok="absent", num_experts_per_token=4, moe_layer_freq=[0, 0, *[1] * 46]
    ).experts
    assert experts is not None
    assert (experts.per_token, experts.dense_layers) == (4, 2)
    experts = imported(QWEN_3_30B_A3B, num_experts_per_tok="absent", top_k_experts=6).experts
    assert experts is not None
    assert experts.per_token == 6
    layered = imported(LLAMA_3_8B, num_hidden_layers="absent", layers_block_type=["attention"] * 20)
    assert (layered.layers, layered.left_out()) == (20, {})
    mixed = imported(LLAMA_3_8B, num_hidden_layers="absent", layers_block_type=["mamba", "attention"] * 8)
    assert (mixed.layers, list(mixed.left_out())) == (16, ["layers"])
    exaone = {**LLAMA_3_8B, "model_type": "exaone4", "sliding_window": 4096, "sliding_window_pattern": "LLLG"}
    assert (imported(exaone).window, imported(exaone).local_layers) == (4096, 24)
    assert imported(exaone, num_hidden_layers=30).local_layers == 22  # the last sees everything
    assert imported(exaone, layer_types=["local", "global"] * 16).local_layers == 16
    assert imported(LLAMA_3_8B, position_embedding_type="alibi").alibi


@pytest.mark.parametrize(
    ("config", "gigabytes"),
    [
        (DEEPSEEK_V3, 671 + 129280 * 7168 * 2 / 1e9),  # FP8, the vocabulary's matrices in 16 bits
        (GPT_OSS_20B, 13.8),  # its checkpoint: experts in MXFP4
        ({**LLAMA_3_8B, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, 5.7),
        (LLAMA_3_8B, 16.06),
    ],
)
def test_weights_have_the_bytes_in_which_they_are_stored(
    imported: Callable[..., Workload], config: dict[str, object], gigabytes: float
) -> None:
    load = imported(config)
    assert load.left_out() == {}
    model = load.model(load.problem(), 1)
    stored = model.stored_bytes() + 2 * model.weights().vocabulary
    assert stored / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert f"{load.stored.of} in {load.stored.bits:g} bits" in read_as(load) if load.stored else True


def test_read_as_has_what_decides_attention_weights_and_caches(imported: Callable[..., Workload]) -> None:
    assert read_as(imported(GEMMA_2_9B_IT)) == (
        "42 layers, 16 heads of 256, 8 KV heads, causal, window=4096 in 21 layers, softcap=50; "
        "a gated FFN of 14336; 9.24 billion parameters; 336 KiB of K and V a token"
    )
    assert read_as(imported(DEEPSEEK_V3)) == (
        "61 layers, 128 heads of 192/128, 128 KV heads, causal; 8 of 256 experts of 2048 in 58 layers; "
        "671 billion parameters, layers in 8 bits; 68.6 KiB of latents a token"
    )


@pytest.mark.parametrize(
    ("config", "heads", "kv_heads", "layers", "billions"),
    [(QWEN_3_VL_30B_A3B, 32, 4, 48, 30.5), (MIMO_7B, 32, 8, 36, 7.6)],
)
def test_models_of_which_all_keys_are_read_are_accepted(
    imported: Callable[..., Workload],
    config: dict[str, object],
    heads: int,
    kv_heads: int,
    layers: int,
    billions: float,
) -> None:
    load = imported(config)
    assert load.left_out() == {}
    assert (load.heads, load.kv_heads, load.layers, load.head_dim, load.window) == (heads, kv_heads, layers, 128, None)
    assert (load.gated, load.causal, load.dtype) == (True, True, "bfloat16")
    assert load.model(load.problem(), 1).weights().total / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_mimo_without_the_switch_has_no_window(imported: Callable[..., Workload]) -> None:
    """MiMo is a Qwen2, whose window is off by default."""
    assert imported(MIMO_7B, use_sliding_window="absent").window is None


@pytest.mark.parametrize(
    ("config", "changes", "causal"),
    [
        (LLAMA_3_8B, {"is_causal": False}, False),
        (LLAMA_3_8B, {"causal": False}, False),
        (LLAMA_3_8B, {"is_causal": True}, True),
        (LLAMA_3_8B, {"is_causal": None}, True),
        (LLAMA_3_8B, {"model_type": "bert", "is_causal": True}, True),
        (LLAMA_3_8B, {"model_type": "bert"}, False),
        (QWEN_3_VL_30B_A3B, {"is_causal": False}, False),  # stated beside the text part
    ],
)
def test_a_stated_mask_counts(
    imported: Callable[..., Workload], config: dict[str, object], changes: dict[str, object], causal: bool
) -> None:
    load = imported(config, **changes)
    assert (load.causal, load.left_out()) == (causal, {})


def test_a_second_name_of_a_value_with_another_value_is_listed(imported: Callable[..., Workload]) -> None:
    load = imported(LLAMA_3_8B, multi_query_group_num=2)
    assert (load.kv_heads, list(load.left_out())) == (8, ["multi_query_group_num"])
    assert imported(LLAMA_3_8B, multi_query_group_num=8).left_out() == {}
    only = imported(LLAMA_3_8B, num_key_value_heads=None, multi_query_group_num=2)
    assert (only.kv_heads, only.left_out()) == (2, {})
    # A default of the type does not come before another name in the file.
    assert imported({"model_type": "mistral", "num_kv_heads": 4}).kv_heads == 4
    # Gemma's files have an activation of before beside their own.
    assert imported(GEMMA_2_9B_IT, hidden_act="gelu").left_out() == {}
    assert imported(GEMMA_2_9B_IT, sliding_window_size=512).left_out().keys() == {"sliding_window_size"}


def test_sizes_of_latents_without_their_rank_are_refused_or_listed(
    imported: Callable[..., Workload], write: Callable[..., Path], fault: Callable[..., str]
) -> None:
    path = write(json.dumps({**LLAMA_3_8B, "qk_nope_head_dim": 128}), "config.json")
    assert fault(import_config, path) == (f"{path}:1  qk_nope_head_dim: latent attention also needs kv_lora_rank")
    found = imported(LLAMA_3_8B, q_lora_rank=512, qk_rope_head_dim=64)
    assert set(found.left_out()) == {"q_lora_rank", "qk_rope_head_dim"}
    assert imported(DEEPSEEK_V3).left_out() == {}


@pytest.mark.parametrize(
    ("changes", "listed"),
    [
        ({"rope_scaling": {"llama_4_scaling_beta": 0.1, "rope_type": "yarn", "factor": 16.0}}, "llama_4_scaling_beta"),
        ({"rope_parameters": {"llama_4_scaling_beta": 0.1, "rope_theta": 1e6}}, "llama_4_scaling_beta"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6, "new": 1}}}, "full_attention.new"),
        ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}}, "kv_cache_scheme"),
        ({"attn_config": {"kv_n_heads": 8, "new": 1}}, "new"),
    ],
)
def test_a_dictionary_in_a_config_has_its_own_closed_list(
    imported: Callable[..., Workload], changes: dict[str, object], listed: str
) -> None:
    """A factor of queries that grows with their position was dropped without a word."""
    config = {key: value for key, value in LLAMA_3_8B.items() if key != "rope_scaling"}
    (name,) = changes
    load = imported(config, **changes)
    assert list(load.left_out()) == [f"{name}.{listed}"]
    with pytest.raises(SpecError, match=f"--ignore {name}.{listed}$"):
        load.ignored(())


@pytest.mark.parametrize(
    "rotary",
    [
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        {"type": "linear", "factor": 4.0},
        {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "rope_type": "yarn",
            "truncate": False,
            "finetuned": True,
        },
        {"attention_factor": 1.0, "original_max_position_embeddings": 4096, "type": "yarn", "factor": 2.0},
        {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3", "factor": 8.0},
        {"long_factor": [1.0], "short_factor": [1.0], "long_mscale": 1.2, "short_mscale": 1.1, "type": "longrope"},
        {"mrope_section": [16, 24, 24], "type": "mrope"},
        {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}},
    ],
)
def test_published_forms_of_rotary_positions_are_read(
    imported: Callable[..., Workload], rotary: dict[str, object]
) -> None:
    assert imported(LLAMA_3_8B, rope_scaling=rotary).left_out() == {}
    assert imported(LLAMA_3_8B, rope_scaling="absent", rope_parameters=rotary).left_out() == {}


def test_rotary_positions_that_change_with_the_length_are_noticed_in_each_kind_of_layer(
    imported: Callable[..., Workload],
) -> None:
    parts = {"full_attention": {"rope_type": "dynamic", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}}
    assert list(imported(LLAMA_3_8B, rope_scaling="absent", rope_parameters=parts).left_out()) == ["rotary"]


def test_what_is_stated_beside_a_text_part_counts_or_is_listed(imported: Callable[..., Workload]) -> None:
    assert imported(QWEN_3_VL_30B_A3B, tie_word_embeddings=True).tied
    text = {key: value for key, value in QWEN_3_VL_30B_A3B["text_config"].items() if key != "model_type"}
    assert imported(QWEN_3_VL_30B_A3B, text_config=text).left_out() == {}
    assert list(imported(QWEN_3_VL_30B_A3B, sliding_window=4096).left_out()) == ["sliding_window"]


WHISPER = {
    "activation_function": "gelu",
    "d_model": 1280,
    "decoder_attention_heads": 20,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_layers": 32,
    "is_encoder_decoder": True,
    "model_type": "whisper",
    "num_hidden_layers": 32,
    "vocab_size": 51866,
}


@pytest.mark.parametrize(
    ("config", "key", "text"),
    [
        (WHISPER, "is_encoder_decoder", "its encoder and its decoder attend differently"),
        ({**WHISPER, "is_encoder_decoder": None}, "decoder_layers", "its encoder and its decoder attend differently"),
        (
            {"model_type": "segformer", "hidden_sizes": [32, 64], "num_attention_heads": [1, 2]},
            "num_attention_heads",
            "[",
        ),
        ({"model_type": "swin", "embed_dim": 96, "num_heads": [3, 6, 12]}, "num_heads", "["),
    ],
)
def test_a_model_that_no_workload_describes_is_refused_for_what_it_is(
    write: Callable[..., Path], fault: Callable[..., str], config: dict[str, object], key: str, text: str
) -> None:
    """The sizes that such a file has under other names were called missing."""
    path = write(json.dumps(config, indent=1), "config.json")
    (line,) = fault(import_config, path).splitlines()
    place, _, said = line.partition("  ")
    assert place.rpartition(":")[2] != "1"
    if text == "[":
        text = f"expected a whole number, got {config[key]}: its layers differ; write a workload file for each kind"
    assert said.startswith(f"{key}: {text}")


def test_what_cannot_be_right_is_refused(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    def refused(**changes: object) -> str:
        path = write(json.dumps({**LLAMA_3_8B, **changes}), "config.json")
        return fault(import_config, path).partition("  ")[2]

    assert refused(torch_dtype="float8_e4m3fn") == (
        "torch_dtype: 'float8_e4m3fn' is not one of float16, bfloat16, float32; use --dtype"
    )
    assert refused(is_encoder_decoder=True).startswith("is_encoder_decoder: its encoder and its")
    assert refused(num_key_value_heads=5).startswith("kv_heads: 5 does not divide 32 query heads")
    assert refused(num_key_value_heads=[1, 2]).startswith("num_key_value_heads: expected a whole")
