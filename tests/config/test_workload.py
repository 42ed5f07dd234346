from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npusim.config.load import load_workload
from tests.config.visible import visible_keys

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
    assert (problem.seq_q, problem.seq_kv, visible_keys(problem, 0)) == (1, 4096, 4096)


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
    assert fault(workload.problem, head_dim=0).startswith("head_dim: 0 must be greater than 0")
    assert fault(workload.problem, dtype="float8") == (
        "dtype: 'float8' is not one of: 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'float32' or 'float64'"
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
        ("local_layers: 3", "10  local_layers: 3 layers have a window or chunk, but neither is set"),
        ("sinks: 4", "10  sinks: the 4 first keys need a window, but there is none"),
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
    ("more", "kinds", "local", "whole"),
    [
        ("window: 512\n", {"local": 1}, {"window": 512}, {}),
        ("layers: 42\nwindow: 512\nsinks: 4\n", {"local": 42}, {"window": 512, "sinks": 4}, {}),
        ("layers: 42\nwindow: 512\nlocal_layers: 21\n", {"global": 21, "local": 21}, {"window": 512}, {}),
        ("layers: 48\nchunk: 512\nlocal_layers: 36\n", {"global": 12, "local": 36}, {"chunk": 512}, {}),
        ("layers: 42\nwindow: 512\nlocal_layers: 0\n", {"global": 42}, {}, {}),
        ("softcap: 50.0\nalibi: true\n", {"global": 1}, {}, {"softcap": 50.0, "alibi": True}),
        ("prefix: 16\ndocuments: [100, 28]\n", {"global": 1}, {}, {"prefix": 16, "documents": (100, 28)}),
    ],
)
def test_layers_have_what_their_kind_sees(
    write: Callable[..., Path], more: str, kinds: dict[str, int], local: dict[str, object], whole: dict[str, object]
) -> None:
    workload = load_workload(write(MINE + more))
    assert workload.kinds == kinds
    fields = ("window", "sinks", "prefix", "chunk", "documents", "softcap", "alibi", "sink_logits")
    for kind in kinds:
        stated = workload.problem(kind=kind).model_dump(include=set(fields))  # what is left out is at its default
        assert stated == (whole | local if kind == "local" else whole)
    assert not workload.problem(ignore=("window", "chunk")).model_dump(include={"window", "sinks", "chunk"})


def test_what_is_not_modelled_is_refused_unless_named(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    workload = load_workload(write(f"{MINE}window: 512\nsoftcap: 50.0\nunmodelled: [rotary]\n"))
    assert fault(workload.ignored, ("window",)) == (
        "workload mine: rotary (keys rotated in each call): not modelled; to run without them: --ignore rotary"
    )
    assert workload.ignored(("rotary",)) == ("rotary (keys rotated in each call)",)
    assert workload.ignored(("rotary", "softcap", "window"))[:2] == ("window (512)", "softcap (50.0)")
    assert fault(workload.ignored, ("windows",)) == (
        "ignore windows; allowed: window, chunk, softcap, alibi, sink_logits, bias, layers, rotary, sparse"
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
