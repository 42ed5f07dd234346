from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npusim.config.load import load_workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MINE = """\
schema: npusim.workload/1
name: mine
description: a test
source: a test
heads: 28
kv_heads: 4
head_dim: 128
seq: 4096
causal: true
"""


@pytest.mark.parametrize(
    ("name", "shape"),
    # (heads, KV heads, queries, head size, causal) on one device
    [
        ("pangu_38b", (5, 5, 4096, 128, True)),
        ("pangu_71b", (4, 4, 4096, 128, True)),
        ("llama2_7b", (32, 32, 4096, 128, True)),
        ("llama2_70b", (8, 1, 4096, 128, True)),
        ("qwen2_7b", (28, 4, 4096, 128, True)),
        ("svd_img2vid", (5, 5, 9216, 64, False)),
        ("deit_b", (12, 12, 197, 64, False)),
        ("smollm2", (9, 3, 1024, 64, True)),
        ("smollm2_amplified", (3, 1, 1024, 64, True)),
        ("pasa_uniform", (16, 16, 1280, 128, False)),
        ("pasa_hybrid", (16, 16, 1280, 128, False)),
        ("pasa_resonance", (5, 5, 9216, 64, False)),
        ("pcast_sink", (8, 8, 4096, 64, False)),
    ],
)
def test_packaged_workloads_give_the_published_shapes(name: str, shape: tuple[object, ...]) -> None:
    problem = load_workload(name).problem()
    assert problem.seq_q == problem.seq_kv
    sizes = (problem.heads, problem.kv_heads, problem.seq_q, problem.head_dim, problem.causal)
    assert sizes == shape


def test_arguments_replace_what_the_workload_says() -> None:
    workload = load_workload("llama2_70b")
    problem = workload.problem(seq=8192, batch=2, tensor_parallel=16, causal=False)
    # 8 KV heads on 16 devices: each is kept by two of them.
    assert (problem.heads, problem.kv_heads, problem.batch) == (4, 1, 2)
    assert (problem.seq_q, problem.seq_kv, problem.causal) == (8192, 8192, False)
    assert workload.problem(dtype="bfloat16").dtype == "bfloat16"


def test_one_query_alone_is_a_decoding_step_over_the_workloads_keys() -> None:
    problem = load_workload("qwen2_7b").problem(seq_q=1)
    assert (problem.seq_q, problem.seq_kv, problem.visible_keys(0)) == (1, 4096, 4096)


def test_shapes_of_tensors_are_one_devices_share_already() -> None:
    workload = load_workload("pangu_38b")
    problem = workload.problem(heads=3, kv_heads=1, seq_q=1024, seq_kv=1024, head_dim=64)
    assert (problem.heads, problem.kv_heads) == (3, 1)
    assert (problem.head_dim, problem.value_head_dim, problem.scale) == (64, 64, 0.125)


def test_smollm2_names_its_packaged_tensors() -> None:
    tensors = load_workload("smollm2").tensors
    assert tensors is not None
    assert (tensors.file, tensors.prefix) == ("smollm2_layer18_group.safetensors", "layer18")


def test_heads_that_cannot_be_shared_list_the_divisors(fault: Callable[..., str]) -> None:
    workload = load_workload("qwen2_7b")
    assert fault(workload.problem, tensor_parallel=8) == (
        "tensor_parallel: 8 does not divide 28 query heads; possible: 1 2 4 7 14 28 (not with 4 KV heads: 7 14)"
    )
    assert fault(workload.problem, tensor_parallel=7) == (
        "tensor_parallel: 7 neither divides nor is a multiple of 4 KV heads; possible: 1 2 4 28"
    )
    assert fault(workload.problem, tensor_parallel=0) == "tensor_parallel: 0 must be greater than 0"
    assert fault(load_workload("pangu_38b").problem, tensor_parallel=3) == (
        "tensor_parallel: 3 does not divide 40 query heads; possible: 1 2 4 5 8 10 20 40"
    )


def test_bad_sizes_are_the_problems_errors(fault: Callable[..., str]) -> None:
    workload = load_workload("qwen2_7b")
    assert fault(workload.problem, head_dim=100).startswith("head_dim: 100 is not a multiple of 16")
    assert fault(workload.problem, dtype="float8") == (
        "dtype: 'float8' is not one of: 'float16', 'bfloat16', 'float8_e4m3fn', 'float32' or 'float64'"
    )
    assert fault(workload.problem, seq=0) == "seq_q: 0 must be greater than 0\n" + ("seq_kv: 0 must be greater than 0")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "tensor_parallel: 3",
            "10  tensor_parallel: 3 does not divide 28 query heads; "
            "possible: 1 2 4 7 14 28 (not with 4 KV heads: 7 14)",
        ),
        ("head: 3", "10  head: unknown key. Did you mean `heads`?"),
        ("causal: false", "10  causal: duplicate key; first given in line 9"),
        ("batch: 0", "10  batch: 0 must be greater than 0"),
        ("batch: '2'", "10  batch: expected a whole number, got '2'"),
        ("gated: off", "10  gated: expected true or false, got 'off'"),
        (
            "data: {kind: norml, seed: 1}",
            "10  data.kind: 'norml' is not one of: 'normal', 'uniform', 'hybrid', 'sink', 'resonance', 'amplified'",
        ),
        ("data: {seed: 1}", "10  data.kind: missing"),
        ("data: {kind: normal, sed: 1}", "10  data.sed: unknown key. Did you mean `seed`?"),
        ("data: {kind: amplified, gain: 2.0}", "10  data: amplified changes tensors; name some under tensors"),
        (
            "data: {kind: hybrid, x0: 20, amplitude: 10, probability: 1.5}",
            "10  data.probability: 1.5 must be at most 1.0",
        ),
        ("sliding_layers: 3", "1  sliding_window: missing; some layers are said to slide"),
    ],
)
def test_bad_workload_files_are_refused_with_their_place(
    lines: str, message: str, write: Callable[..., Path], fault: Callable[..., str]
) -> None:
    path = write(f"{MINE}{lines}\n")
    assert fault(load_workload, path) == f"{path}:{message}"


def test_kv_heads_must_divide_the_heads(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    path = write(MINE.replace("kv_heads: 4", "kv_heads: 5"))
    expected = f"{path}:6  kv_heads: 5 does not divide 28 query heads; possible: 1 2 4 7 14 28"
    assert fault(load_workload, path) == expected


@pytest.mark.parametrize(
    ("more", "keys", "found"),
    [
        ("sliding_window: 512\n", 512, {}),
        ("sliding_window: 512\n", 513, {"window": "512 keys"}),
        ("layers: 42\nsliding_window: 512\n", 1024, {"window": "512 keys in 42 of 42 layers"}),
        (
            "layers: 42\nsliding_window: 512\nsliding_layers: 21\nsoftcap: 50.0\n",
            1024,
            {"window": "512 keys in 21 of 42 layers", "softcap": "scores capped at 50"},
        ),
        ("layers: 42\nsliding_window: 512\nsliding_layers: 0\n", 1024, {}),
        ("unmodelled: [alibi]\n", 1, {"alibi": "a bias by the distance of query and key"}),
    ],
)
def test_what_is_not_modelled_is_listed(
    write: Callable[..., Path], more: str, keys: int, found: dict[str, str]
) -> None:
    assert load_workload(write(MINE + more)).left_out(keys) == found


def test_what_is_not_modelled_is_refused_unless_named(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    workload = load_workload(write(f"{MINE}sliding_window: 512\nsoftcap: 50.0\n"))
    assert fault(workload.ignored, 1024, ("window",)) == (
        "workload mine: softcap (scores capped at 50): not modelled; to run without: --ignore window,softcap"
    )
    both = ("window (512 keys)", "softcap (scores capped at 50)")
    assert workload.ignored(1024, ("softcap", "window")) == both
    assert workload.ignored(512, ("softcap", "window")) == both[1:]
    assert workload.ignored(1024, ("window",), models=("softcap",)) == both[:1]
    assert fault(workload.ignored, 512, ("windows",)) == (
        "ignore windows: there are window, softcap, alibi, bias, chunks, layers, rotary, sinks, sparse"
    )


def test_a_factor_of_the_scores_goes_with_the_models_own_head_size(write: Callable[..., Path]) -> None:
    workload = load_workload(write(f"{MINE}scale: 0.125\n"))
    assert workload.problem().scale == 0.125
    assert workload.problem(heads=1, head_dim=64).scale == 1 / 8.0
    assert workload.problem(heads=1, head_dim=16).scale == 0.25


def test_data_recipe_goes_with_the_problem(write: Callable[..., Path]) -> None:
    path = write(f"{MINE}data: {{kind: uniform, x0: 20, amplitude: 0.5, seed: 3}}\n")
    data = load_workload(path).problem().data
    assert data.model_dump() == {"kind": "uniform", "x0": 20, "amplitude": 0.5, "seed": 3}
