"""Kernels of serving engines, written anew, beside the bits of the public ones on an H200."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import npusim

GOLDEN = Path(__file__).parents[3] / "shared/golden/triton_h200.npz"
pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.skipif(not GOLDEN.exists(), reason="measurements are not part of a checkout"),
]


@lru_cache(maxsize=1)
def launches() -> Any:
    stored = np.load(GOLDEN)
    return stored, json.loads(str(stored["launches"]))


def tensors(launch: str, side: str) -> dict[str, Any]:
    stored, every = launches()
    made = {}
    for name, how in every[launch]["tensors"].items():
        if (key := f"{launch}/{side}/{name}") in stored.files:
            dtype = how["dtype"].removeprefix("torch.")
            made[name] = stored[key].view(getattr(ml_dtypes, dtype, None) or dtype).reshape(how["shape"])
    return made


def bits(kernel: Any, grid: tuple[int, ...], words: dict[str, Any], **options: int) -> dict[str, Any]:
    """Return what a launch stores on an H200, by parameter."""
    from ttir.stored import stored

    with npusim.record(floats=True) as calls:
        kernel[grid](**words, **options)
    return stored(npusim.run(calls[0], hw="h200", rows=1), words)


def test_products_by_sorted_tokens_have_the_bits_of_a_fused_moe() -> None:
    from ttir.loaded_kernels import experts

    x, wanted = tensors("vllm_fused_moe", "in"), tensors("vllm_fused_moe", "out")["c_ptr"]
    blocks = int(x["num_tokens_post_padded_ptr"][0]) // 16
    words = {"A": x["a_ptr"], "B": x["b_ptr"], "C": x["c_ptr"].reshape(48, 128), "Scale": x["topk_weights_ptr"]}
    words |= {"Tokens": x["sorted_token_ids_ptr"], "Experts": x["expert_ids_ptr"], "count": 48, "N": 128, "K": 256}
    words |= {"top": 2, "BM": 16, "BN": 64, "BK": 64, "WEIGHTED": False}
    made = bits(experts, (blocks, 2), words, num_warps=4, num_stages=3)["C"]
    assert np.array_equal(made, wanted.reshape(48, 128).astype(np.float64))


def test_products_of_fp8_with_scales_have_the_bits_of_a_fused_moe() -> None:
    from ttir.loaded_kernels import experts_of_eights

    x, wanted = tensors("vllm_fused_moe_fp8", "in"), tensors("vllm_fused_moe_fp8", "out")["c_ptr"]
    blocks = int(x["num_tokens_post_padded_ptr"][0]) // 16
    words = {"A": x["a_ptr"], "B": x["b_ptr"], "C": x["c_ptr"].reshape(48, 256), "ScaleA": x["a_scale_ptr"]}
    words |= {"ScaleB": x["b_scale_ptr"], "Tokens": x["sorted_token_ids_ptr"], "Experts": x["expert_ids_ptr"]}
    words |= {"count": 48, "N": 256, "K": 256, "top": 2, "BM": 16, "BN": 128, "BK": 128}
    made = bits(experts_of_eights, (blocks, 2), words, num_warps=4, num_stages=3)["C"]
    assert np.array_equal(made, wanted.reshape(48, 256).astype(np.float64))


def test_a_rotary_embedding_of_queries_and_keys_has_the_bits_of_liger() -> None:
    from ttir.engine_kernels import rope_both

    x, wanted = tensors("liger_rope", "in"), tensors("liger_rope", "out")
    words = {"Q": x["q_ptr"][0], "K": x["k_ptr"][0], "Cos": x["cos"][0], "Sin": x["sin"][0]}
    made = bits(rope_both, (32,), {**words, "HQ": 8, "HK": 2, "HD": 64, "BQ": 8, "BK": 2}, num_warps=1)
    assert np.array_equal(made["Q"], wanted["q_ptr"][0].astype(np.float64))
    assert np.array_equal(made["K"], wanted["k_ptr"][0].astype(np.float64))


def test_states_of_chunks_have_the_bits_of_mamba() -> None:
    from ttir.engine_kernels import chunk_states

    x, wanted = tensors("mamba_chunk_state", "in"), tensors("mamba_chunk_state", "out")["states_ptr"]
    words = {"X": x["x_ptr"][0], "B": x["b_ptr"][0, :, 0], "Out": x["states_ptr"][0], "Dt": x["dt_ptr"][0]}
    words |= {"Decay": x["dA_cumsum_ptr"][0], "S": 128, "H": 2, "CHUNK": 64, "D": 64, "N": 64, "BK": 32}
    made = bits(chunk_states, (2, 2), words, num_warps=2, num_stages=4)["Out"]
    assert np.array_equal(made, wanted[0].astype(np.float64))
