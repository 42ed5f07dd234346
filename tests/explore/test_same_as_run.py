"""A point of a search is what a run of its fields gives, to the cycle; a printed tile gives its run again."""

from __future__ import annotations

import random
import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from npusim import NpusimError, explore, run
from npusim.cli.app import app
from npusim.report.result_json import record_of
from npusim.report.run_inputs import tiling_text

if TYPE_CHECKING:
    from pathlib import Path

#: Schedule, device and call, and the values from which axes are drawn.
SPACES: tuple[tuple[str, dict[str, Any], dict[str, list[Any]]], ...] = (
    (
        "flash",
        {"hw": "h200", "workload": "pangu_38b", "seq": 512, "tensor_parallel": 4},
        {"block_q": [64, 128], "block_kv": [64, 96, 128], "warps": [4, 8], "stages": [2, 3], "launch": ["in_order"]},
    ),
    (
        "flash",
        {"hw": "ascend_910b3", "workload": "pangu_38b", "seq": 512, "tensor_parallel": 4},
        {"block_q": [64, 128], "block_kv": [128, 256, 512], "depth": [2, 3], "vector_rows": [8, "auto"]},
    ),
    (
        "pasa",
        {"hw": "ascend_910b2", "workload": "pangu_38b", "seq": 512, "tensor_parallel": 4},
        {"block_q": [64, 128], "block_kv": [128, 256], "depth": [1, 2, 3], "deal": ["balanced", "round_robin"]},
    ),
    (
        "volta_flash",
        {"hw": "v100", "workload": "opt_30b", "seq": 512, "tensor_parallel": 4, "dtype": "float16"},
        {"block_q": [64, 128], "block_kv": [32, 64], "warps": [4, 8]},
    ),
    (
        "flash",
        {"hw": "ascend_950", "workload": "pangu_38b", "seq": 512, "tensor_parallel": 4},
        {"block_q": [64, 128], "block_kv": [64, 128], "depth": [2, 4]},
    ),
    (
        "gemm",
        {"hw": "ascend_910b4", "problem": {"m": 698, "n": 657, "k": 706}},
        {"block_m": [128, 192], "block_n": [128, 256], "block_k": [64, 128]},
    ),
)


#: An NPU, the machine with vector registers, a V100 and a product.
QUICK = (2, 3, 4, 5)


def _of_problem(call: dict[str, Any]) -> dict[str, Any]:
    from npusim.kernel import GemmProblem

    return {**call, "problem": GemmProblem(**call["problem"])} if "problem" in call else call


@pytest.mark.parametrize(
    "number", [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in range(2 * len(SPACES))]
)
def test_a_point_of_a_search_is_what_a_run_of_its_fields_gives(number: int) -> None:
    schedule, call, values = SPACES[number % len(SPACES)]
    call, draw = _of_problem(call), random.Random(number)
    axes = {n: values[n] for n in sorted(draw.sample(sorted(values), draw.choice((1, 2, 2, 3))))}
    found = explore(schedule, axes, **call)
    for outcome in found.outcomes:
        fields = {n: v for n, v in outcome.point.items() if v is not None}
        if outcome.status == "infeasible":
            with pytest.raises(NpusimError):
                run(schedule, tiling=fields, numerics=False, **call)
            continue
        result = run(schedule, tiling=fields, numerics=False, **call)
        if outcome.status in ("ok", "merged"):
            assert outcome.cycles == result.cycles, outcome.label()
        else:
            assert outcome.bound_us is not None
            assert found.best is not None
            assert found.best.latency_us is not None
            assert found.best.latency_us < outcome.bound_us <= result.latency_us * (1 + 1e-9), outcome.label()


def test_what_a_search_calls_the_best_is_no_slower_than_a_run_that_its_space_contains() -> None:
    call: dict[str, Any] = {"hw": "h200", "workload": "llama3_8b", "seq": 2048}
    found = explore("flash", {"block_q": [64, 128], "block_kv": [64, 128], "warps": [4, 8]}, **call)
    chosen = run("flash", numerics=False, **call)
    assert (chosen.tiling.block_q, chosen.tiling.block_kv, chosen.tiling.warps) == (64, 64, 4)  # type: ignore[attr-defined]
    assert found.best is not None
    assert found.best.cycles == chosen.cycles


@pytest.mark.parametrize(
    ("schedule", "hw", "workload", "seq"),
    [
        ("flash", "h200", "llama3_8b", 1024),
        ("volta_flash", "v100", "opt_30b", 512),
        ("flash", "ascend_950", "llama3_8b", 1024),
        ("unified", "ascend_910b2", "pangu_38b", 512),
        ("pasa", "ascend_910b2", "pangu_38b", 512),
        ("split_kv", "h200", "llama3_8b", 512),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("flash", "t4", "smollm2", 512),
                ("flash", "ascend_910b3", "llama3_8b", 2048),
                ("two_level", "ascend_910b2", "pangu_38b", 1024),
                ("pasa", "h200", "pangu_38b", 512),
                ("fp8_attention", "ascend_910b2", "pangu_38b", 512),
            )
        ),
    ],
)
def test_a_tile_that_a_run_prints_gives_that_run_again(schedule: str, hw: str, workload: str, seq: int) -> None:
    call: dict[str, Any] = {"hw": hw, "workload": workload, "seq": seq, "numerics": False}
    call |= {"dtype": "float16"} if hw in ("v100", "t4") else {}
    first = run(schedule, **call)
    texts = [tiling_text(record_of(first).tiling)]
    texts += [m[1] for note in first.notes if (m := re.match(r"tile=auto: ((?:\w+=\w+ ?)+), ", note))]
    for text in texts:
        named = dict(word.split("=", 1) for word in text.split())
        assert run(schedule, tiling=named, **call).cycles == first.cycles, text


def test_naming_a_tile_does_not_change_whose_kernel_it_is() -> None:
    call: dict[str, Any] = {"workload": "pangu_38b", "seq": 512, "numerics": False}
    for named in ({}, {"block_q": 64}, {"block_kv": 256}, {"block_q": 128, "block_kv": 512, "depth": 3}):
        tiling: Any = run("flash", tiling=named, **call).tiling
        assert (tiling.kernel, tiling.pipeline) == ("cann", "core"), named
    assert run("flash", tiling={"kernel": "pto", "block_q": 128}, **call).tiling.pipeline is None  # type: ignore[attr-defined]
    of_registers: Any = run("flash", hw="ascend_950", tiling={"block_q": 64}, **call).tiling
    assert (of_registers.pipeline, of_registers.vector_rows) == ("core", 64)
    product = _of_problem({"problem": {"m": 256, "n": 250, "k": 250}, "numerics": False})
    for named in ({}, {"block_m": 128}):
        assert run("gemm", tiling=named, **product).tiling.nd2nz == "vector", named  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            "flash --hw h200 -w pangu_38b --seq 1k -f block_q=64,128 -f block_kv=64,128", marks=pytest.mark.exhaustive
        ),
        "pasa --tp 8 --seq 256 -f block_kv=128,256 -f precision=fp16_mean,fp32_mean -C group_count=10",
        "gemm --problem m=300,n=250,k=250 --hw ascend_910b4 -f block_m=64,128",
        pytest.param("flash,pasa --tp 8 --seq 256 -f block_kv=128,256 -f depth=1,2", marks=pytest.mark.exhaustive),
    ],
)
def test_a_search_prints_the_command_that_reproduces_its_best(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    search = ["explore", *shlex.split(words), "-j1", "-o", "points.csv"]  # whose points are computed once
    searched = runner.invoke(app, [*search, "--json"])
    assert searched.exit_code == 0, searched.output
    best = re.search(r'"cycles": ([0-9]+)', searched.stdout[searched.stdout.index('"best"') :])
    told = re.search(r'"command": "npusim (.*)"', searched.stdout)
    assert best is not None
    assert told is not None
    done = runner.invoke(app, [*shlex.split(told[1]), "--no-numerics", "--no-save"])
    assert done.exit_code == 0, done.output
    assert f"({int(best[1]):,} cycles at " in done.stdout
    printed = runner.invoke(app, search).stdout
    assert f"npusim {told[1]}" in " ".join(printed.split())
