from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from npusim.config.huggingface import import_config, workload_yaml
from npusim.config.load import list_workloads, load_workload
from npusim.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

QWEN2 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
PLAIN = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24}


@pytest.fixture
def config(write: Callable[..., Path]) -> Callable[..., Path]:
    def write_config(content: dict[str, object], **changes: object) -> Path:
        return write(json.dumps({**content, **changes}, indent=2), "config.json")

    return write_config


def test_qwen2_is_imported_as_it_is_packaged(config: Callable[..., Path]) -> None:
    workload = import_config(config(QWEN2))
    packaged = load_workload("qwen2_7b")
    for field in ("heads", "kv_heads", "head_dim", "hidden", "layers", "intermediate", "gated"):
        assert getattr(workload, field) == getattr(packaged, field), field
    assert (workload.name, workload.seq, workload.causal) == ("qwen2", 4096, True)
    assert workload.dtype == "bfloat16"


def test_a_stated_head_dim_comes_before_the_quotient(config: Callable[..., Path]) -> None:
    # Qwen3-32B: 64 heads of 128 are 8192, not the hidden size of 5120.
    path = config(QWEN2, hidden_size=5120, num_attention_heads=64, num_key_value_heads=8)
    assert import_config(path).head_dim == 80
    path = config(QWEN2, hidden_size=5120, num_attention_heads=64, num_key_value_heads=8, head_dim=128)
    workload = import_config(path)
    assert (workload.head_dim, workload.hidden) == (128, 5120)


@pytest.mark.parametrize("value", [None, "absent"])
def test_without_kv_heads_there_are_as_many_as_heads(config: Callable[..., Path], value: object) -> None:
    changes = {} if value == "absent" else {"num_key_value_heads": None}
    assert import_config(config(PLAIN, **changes)).kv_heads == 16


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        # Falcon-7B states its query heads as KV heads and uses one
        ({"model_type": "falcon", "multi_query": True, "num_kv_heads": 16}, 1),
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}, 8),
        ({"model_type": "gpt_bigcode", "multi_query": True}, 1),
        ({"model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 2}, 2),
    ],
)
def test_multi_query_models_say_it_in_their_own_ways(
    config: Callable[..., Path], changes: dict[str, object], kv_heads: int
) -> None:
    assert import_config(config(PLAIN, **changes)).kv_heads == kv_heads


def test_opt_calls_its_ffn_width_ffn_dim(config: Callable[..., Path]) -> None:
    # OPT-30B
    path = config(
        {"model_type": "opt", "activation_function": "relu", "ffn_dim": 28672},
        hidden_size=7168,
        num_attention_heads=56,
        num_hidden_layers=48,
        max_position_embeddings=2048,
    )
    workload = import_config(path)
    assert (workload.intermediate, workload.gated, workload.seq) == (28672, False, 2048)
    assert (workload.heads, workload.head_dim) == (56, 128)


def test_pangu_spells_heads_and_layers_its_own_way(config: Callable[..., Path]) -> None:
    path = config({"hidden_size": 5120, "num_heads": 40, "num_layers": 40, "intermediate_size": None})
    workload = import_config(path, tensor_parallel=8)
    assert (workload.heads, workload.layers, workload.intermediate) == (40, 40, 20480)
    assert workload.problem().heads == 5


def test_gpt2_spells_everything_its_own_way(config: Callable[..., Path]) -> None:
    path = config({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": None}, n_positions=1024)
    workload = import_config(path)
    assert (workload.hidden, workload.heads, workload.intermediate) == (768, 12, 3072)
    assert workload.seq == 1024


def test_latent_attention_is_plain_attention_with_two_head_sizes(config: Callable[..., Path]) -> None:
    # DeepSeek-V3
    path = config(
        {"model_type": "deepseek_v3", "hidden_act": "silu", "intermediate_size": 18432},
        hidden_size=7168,
        num_attention_heads=128,
        num_key_value_heads=128,
        num_hidden_layers=61,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    workload = import_config(path)
    assert (workload.head_dim, workload.value_head_dim, workload.kv_heads) == (192, 128, 128)
    assert workload.latent is not None
    assert workload.latent.kv_lora_rank == 512
    assert workload.problem().value_head_dim == 128


def test_latent_attention_without_its_sizes_is_refused(config: Callable[..., Path], fault: Callable[..., str]) -> None:
    path = config(PLAIN, kv_lora_rank=512)
    assert fault(import_config, path) == (
        f"{path}:5  kv_lora_rank: latent attention also needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim"
    )


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": None}, (None, 0)),
        # Mistral 7B v0.1: every layer, with nothing else said
        ({"sliding_window": 4096}, (4096, 24)),
        # Qwen2: a window is stated but not used
        ({"sliding_window": 4096, "use_sliding_window": False}, (None, 0)),
        # Qwen2 with windows on: the first `max_window_layers` layers see everything
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20}, (4096, 4)),
        # Qwen3, openPangu: layer by layer
        ({"sliding_window": 128, "layer_types": ["sliding_attention"] * 18 + ["full_attention"] * 6}, (128, 18)),
        ({"sliding_window": 128, "layer_types": ["full_attention"] * 24}, (None, 0)),
        # Qwen2 without the switch: off
        ({"sliding_window": 4096, "model_type": "qwen2", "num_key_value_heads": 16}, (None, 0)),
        # Gemma 2: every other layer, though its file does not say so
        ({"sliding_window": 4096, "model_type": "gemma2"}, (4096, 12)),
        # Gemma 3: every sixth layer sees everything
        ({"sliding_window": 512, "sliding_window_pattern": 6}, (512, 20)),
    ],
)
def test_windows_count_only_where_they_are_on(
    config: Callable[..., Path], changes: dict[str, object], window: tuple[object, object]
) -> None:
    workload = import_config(config(PLAIN, **changes))
    assert (workload.window, workload.local_layers) == window


def test_encoders_are_not_causal_and_images_have_a_class_token(config: Callable[..., Path]) -> None:
    path = config(PLAIN, model_type="vit", image_size=224, patch_size=16, hidden_act="gelu")
    workload = import_config(path)
    assert (workload.causal, workload.seq, workload.gated) == (False, 197, False)


def test_the_text_model_of_a_multimodal_config_is_taken(config: Callable[..., Path]) -> None:
    path = config({"model_type": "qwen2_vl", "text_config": QWEN2, "vision_config": PLAIN})
    assert import_config(path).heads == 28


def test_heads_that_cannot_be_shared_list_the_divisors(config: Callable[..., Path], fault: Callable[..., str]) -> None:
    assert fault(import_config, config(QWEN2), tensor_parallel=8) == (
        "tensor_parallel: 8 does not divide 28 query heads; possible: 1 2 4 7 14 28 (not with 4 KV heads: 7 14)"
    )


def test_faulty_files_are_refused_with_place_and_key(
    config: Callable[..., Path], write: Callable[..., Path], fault: Callable[..., str]
) -> None:
    path = config(PLAIN, num_attention_heads=None)
    assert fault(import_config, path).startswith(f"{path}:3  num_attention_heads: expected a whole")
    path = config({"hidden_size": 8})
    assert fault(import_config, path).splitlines() == [
        f"{path}:1  num_attention_heads: missing",
        f"{path}:1  num_hidden_layers: missing",
    ]
    path = config(PLAIN, hidden_size=1000)
    assert fault(import_config, path) == (f"{path}:2  hidden_size: 1000 is not divisible by 16 heads; set head_dim")
    path = write("{\n  'a': 1\n}", "config.json")
    assert fault(import_config, path).startswith(f"{path}:2  not valid JSON: ")
    path = write("[1]", "config.json")
    assert fault(import_config, path).startswith(f"{path}:1  expected a JSON object")
    gone = path.parent / "gone.json"
    assert fault(import_config, gone) == f"{gone}: cannot be read: No such file or directory"


def test_imported_workloads_survive_their_own_file(config: Callable[..., Path], write: Callable[..., Path]) -> None:
    workload = import_config(config(QWEN2), tensor_parallel=4, seq=8192, batch=2, name="mine")
    assert load_workload(write(workload_yaml(workload))) == workload


@pytest.mark.parametrize("name", list_workloads())
def test_packaged_workloads_survive_their_own_file(name: str, write: Callable[..., Path]) -> None:
    workload = load_workload(name)
    assert load_workload(write(workload_yaml(workload))) == workload


@pytest.mark.parametrize(
    ("model", "keys", "why"),
    [
        ("mistral", {"sliding_window": True}, "sliding_window: expected a whole number, got True"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window: expected a whole number, got '4096'"),
        ("mistral", {"sliding_window": -7}, "sliding_window: -7 must be at least -1"),
        ("mistral", {"sliding_window": 2**60}, r"window: 1\d+ must be at most 9007199254740992"),
        ("mixtral", {"moe_layer_freq": [1, "x"]}, r"moe_layer_freq\.1: expected true or false, got 'x'"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping: expected a number, got '50'"),
        (
            "gemma3_text",
            {"sliding_window": 9, "sliding_window_pattern": 0},
            "sliding_window_pattern: 0 must be at least 1",
        ),
        ("llama", {"is_causal": "false"}, "is_causal: expected true or false, got 'false'"),
        ("llama", {"max_position_embeddings": 0}, "max_position_embeddings: 0 must be greater than 0"),
        ("deepseek_v3", {"factor": "40"}, r"rope_scaling\.factor: expected a finite number, got '40'"),
        ("deepseek_v3", {"factor": -3}, r"rope_scaling\.factor: -3 must be greater than 0"),
        ("deepseek_v3", {"mscale_all_dim": True}, r"rope_scaling\.mscale_all_dim: expected a finite number, got True"),
    ],
)
def test_a_value_of_another_kind_is_refused_where_it_would_change_attention(
    model: str, keys: dict[str, Any], why: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "intermediate_size": 9728}
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    scaling = {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}
    more = {**latent, "rope_scaling": {**scaling, **keys}} if model == "deepseek_v3" else keys
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model, **sizes, **more}), "utf-8")
    with pytest.raises(SpecError, match=why):
        import_config(tmp_path / "config.json")
