"""What is asked for is what is computed, or it is refused: masks, what is not modelled, options of no effect."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.config.kernels import GemmProblem
from npusim.config.problem import Problem
from npusim.errors import NpusimError
from npusim.explore import explore
from npusim.run import run
from npusim.schedules import SCHEDULES

if TYPE_CHECKING:
    from pathlib import Path

ATTENTION = sorted({(s.name, s.family) for s in SCHEDULES.values() if s.problem is Problem and s.family != "node"})
DEVICES = {"ascend": "ascend_910b2", "nvidia": "h200", "cpu": "xeon_avx512"}
WINDOWED = """\
schema: npusim.workload/1
name: windowed
description: a test
source: a test
heads: 2
head_dim: 64
layers: 42
sliding_window: 512
sliding_layers: 21
softcap: 50.0
seq: 1024
causal: true
"""


@pytest.fixture
def windowed(tmp_path: Path) -> Path:
    path = tmp_path / "windowed.yaml"
    path.write_text(WINDOWED)
    return path


def timed(schedule: str, family: str, **options: Any) -> Any:
    hw = "v100" if schedule == "volta_flash" else DEVICES[family]
    dtype = "float8_e4m3fn" if (schedule, family) == ("fp8_attention", "nvidia") else None
    return run(schedule, hw=hw, dtype=dtype, seq=256, numerics=False, trace_groups=(), **options)


@pytest.mark.parametrize(("schedule", "family"), ATTENTION)
def test_a_run_takes_the_workloads_mask(schedule: str, family: str) -> None:
    assert timed(schedule, family, workload="qwen2_7b").problem.causal
    assert not timed(schedule, family, workload="deit_b").problem.causal
    assert not timed(schedule, family, workload="qwen2_7b", causal=False).problem.causal


def test_options_that_would_change_nothing_are_refused() -> None:
    with pytest.raises(NpusimError, match=r"^seq, causal: the problem given says them"):
        run("gemm", problem=GemmProblem(m=64, n=64, k=64), seq=64, causal=True)
    with pytest.raises(NpusimError, match=r"^causal: gemm_allreduce computes no attention"):
        run("gemm_allreduce", hw="ascend_910b2_x8", causal=False)


def npusim(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, words)
    message = "" if result.exception is None else str(result.exception)
    return result.exit_code, result.stdout, f"{result.stderr}{message}"


def test_a_run_refuses_what_is_not_modelled_and_says_what_it_ignores(windowed: Path) -> None:
    words = ("run", "flash", "-w", str(windowed), "--no-save", "--no-numerics")
    code, _, said = npusim(*words)
    assert code
    assert "window (512 keys in 21 of 42 layers), softcap (scores capped at 50): not modelled" in said
    assert "--ignore window,softcap" in said
    _, table, _ = npusim(*words, "--ignore", "window,softcap")
    assert "ignored   window (512 keys in 21 of 42 layers), softcap (scores capped at 50)" in table
    _, text, _ = npusim(*words, "--ignore", "window,softcap", "--json")
    assert json.loads(text)["ignored"][1] == "softcap (scores capped at 50)"
    # No longer than the window: that changes nothing.
    _, table, _ = npusim(*words, "--seq", "512", "--ignore", "softcap")
    assert "ignored   softcap (scores capped at 50)" in table


def test_a_search_says_what_it_ignores(windowed: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.csv"
    words = ("explore", "flash", "-f", "block_kv=128", "-w", str(windowed), "-o", str(file), "-j1")
    code, _, said = npusim(*words)
    assert code
    assert "not modelled" in said
    _, table, _ = npusim(*words, "--ignore", "window,softcap")
    assert "ignored  window (512 keys" in table
    assert "steady" in table
    row = next(csv.DictReader(file.open()))
    assert (row["method"], row["band"]) == ("steady", "0.0")
    assert row["ignored"].startswith("window (512 keys in 21 of 42 layers), softcap")
    _, text, _ = npusim(*words, "--ignore", "window,softcap", "--json")
    point = json.loads(text)["best"]
    assert (point["method"], point["band"]) == ("steady", 0.0)


def test_import_lists_what_is_not_modelled(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    config.write_text(json.dumps({"model_type": "mistral", "sliding_window": 64, **sizes, "num_key_value_heads": 4}))
    _, _, said = npusim("workload", "import", str(config))
    assert "not modelled: window: 64 keys in 2 of 2 layers" in said
    assert "--ignore window" in said
    _, text, _ = npusim("workload", "import", str(config), "--json")
    assert json.loads(text)["not_modelled"] == {"window": "64 keys in 2 of 2 layers"}


def test_an_override_of_no_effect_is_refused() -> None:
    code, _, said = npusim("run", "flash", "--no-save", "-C", "memory.l2.line_bytes=64")
    assert code
    assert "-C memory.l2.line_bytes=64: changes nothing on ascend_910b2; read by no model yet" in said


def test_a_found_best_is_not_tied_to_an_unmodelled_workload(windowed: Path) -> None:
    found = explore("flash", {"block_kv": [128]}, workload=windowed, seq=256, ignore=["softcap"])
    assert found.outcomes[0].ignored == "softcap (scores capped at 50)"
