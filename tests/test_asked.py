"""What is asked for is what is computed, or it is refused: masks, what is not modelled, options of no effect."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.config.problem import CopyProblem, GemmProblem, Problem
from npusim.errors import NpusimError
from npusim.library import SCHEDULES
from npusim.run import run
from npusim.simulation.plan import target_of
from npusim.simulation.request import NEEDS, OPTIONS, Request
from npusim.studies.explore import explore
from reports.parts.kernel import declared_tiling as declared

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("declared_tiles")

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
window: 512
local_layers: 21
softcap: 50.0
unmodelled: [rotary]
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
    tiling = declared(schedule, hw)
    return run(schedule, hw=hw, dtype=dtype, seq=256, tiling=tiling, numerics=False, trace_groups=(), **options)


@pytest.mark.parametrize(("schedule", "family"), ATTENTION)
def test_a_run_takes_the_workloads_mask(schedule: str, family: str) -> None:
    assert timed(schedule, family, workload="qwen2_7b").problem.causal
    assert not timed(schedule, family, workload="deit_b").problem.causal
    assert not timed(schedule, family, workload="qwen2_7b", causal=False).problem.causal


def test_options_that_would_change_nothing_are_refused() -> None:
    with pytest.raises(NpusimError, match=r"seq, causal: --problem already states the sizes;"):
        run("gemm", problem=GemmProblem(m=64, n=64, k=64), seq=64, causal=True)
    with pytest.raises(
        NpusimError, match=r"^causal: these options are for schedules of attention, and this schedule computes no"
    ):
        run("gemm_allreduce", hw="ascend_910b2_x8", causal=False)


GEMM = {"schedule": "gemm", "problem": GemmProblem(m=64, n=64, k=64)}
NODE = {"schedule": "tiling_allreduce", "hw": "ascend_910b2_x8"}
HOST = {"schedule": "flash", "hw": "xeon_avx512"}
#: A run, options that nothing of it reads, and what the refusal says of them.
UNREAD: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    (GEMM, {"seq": 64, "ignore": ["window"]}, "seq, ignore: --problem already states the sizes"),
    (GEMM, {"workload": "qwen2_7b"}, "workload: --problem already states the sizes"),
    (
        GEMM,
        {"tensors": {}, "rows": "all", "diagnose": True},
        "tensors, rows, diagnose: these options are for schedules of attention",
    ),
    (
        GEMM,
        {"layout": "bsh", "seed": 3, "presets": True},
        "layout, seed, presets: these options are for schedules of attention",
    ),
    (
        {**GEMM, "schedule": "copy", "problem": CopyProblem(bytes=64)},
        {"tensors": {}},
        "tensors: these options are for schedules of",
    ),
    (
        {"schedule": "flash"},
        {"tensor_prefix": "layer"},
        "tensor_prefix: these options have an effect only with --tensors;",
    ),
    (
        {"schedule": "flash", "numerics": False},
        {"rows": [0], "diagnose": True},
        "rows, diagnose: these options have an",
    ),
    (
        {"schedule": "flash", "numerics": False},
        {"heads": "0", "seed": 1},
        r"heads, seed: these options have an effect.*--q-heads, --kv-heads\) state the heads",
    ),
    ({"schedule": "flash", "tensors": {}}, {"seed": 1}, "seed: these options have an effect only on drawn inputs"),
    (HOST, {"method": "des", "l2": "warm"}, "l2, method: these options are for devices with a timing model"),
    (
        HOST,
        {"trace_groups": [1], "timeline": (0, 5)},
        "trace_groups, timeline: these options are for devices with a timing model",
    ),
    (NODE, {"l2": "warm", "arithmetic": "x"}, "arithmetic, l2: these options are for kernels on one device"),
    (NODE, {"diagnose": True, "eager": True}, "eager, diagnose: these options are for kernels on one device"),
    (NODE, {"heads": "0"}, "heads: a node's ranks run all heads"),
    (
        {"schedule": "allreduce", "hw": "ascend_910b2_x8"},
        {"rows": "3"},
        "rows: these options are for schedules of attention",
    ),
    ({"schedule": "layer", "workload": "llama2_7b"}, {"rows": "3"}, "rows: these options have an effect"),
)


@pytest.mark.parametrize(("what", "options", "said"), UNREAD, ids=[said for *_, said in UNREAD])
def test_options_that_nothing_reads_are_refused(what: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(NpusimError, match=f"^{said}"):
        run(**{**what, **options})


def test_every_need_of_an_option_is_one_that_a_run_has_or_has_not() -> None:
    assert {need for option in OPTIONS.values() for need in option.needs} == set(NEEDS)
    everything = target_of(Request("flash"), has_bits=True)[2] | {"tensors"}
    assert everything == set(NEEDS)


def test_rows_heads_and_groups_are_given_in_the_words_of_the_command_line() -> None:
    def told(**given: Any) -> tuple[str, Any]:
        result = run("flash", seq=256, tiling={"block_q": 64, "block_kv": 64}, **given)
        return result.numerics.sample, {span.group for span in result.timing.spans}

    assert told(rows="0,130-135", heads="0,2", trace_groups="0-1") == told(
        rows=np.array([0, *range(130, 136)]), heads=[0, 2], trace_groups=[0, 1]
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rows": "smaple"}, "rows smaple: write sample, all, or numbers such as 0,128"),
        ({"rows": "0-300000000"}, "rows: there is no 300000000; choose from 0 to 255"),
        ({"rows": "9" * 5000}, f"rows {'9' * 80}: write"),
        ({"rows": [0.5]}, r"rows: \[0.5\]: write"),
        ({"heads": []}, "heads: the selection is empty;"),
        ({"trace_groups": "99"}, "trace_groups: there is no 99; choose from 0 to 23"),
        ({"precision": ""}, "precision: '' is empty"),
        ({"arithmetic": " "}, "arithmetic: ' ' is empty"),
    ],
)
def test_what_is_no_index_and_what_is_empty_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(NpusimError, match=f"^{said}"):
        run("flash", seq=256, **given)


def test_a_single_number_is_an_index() -> None:
    computed = run("flash", seq=256, rows=255, heads=3).numerics
    assert computed is not None
    assert {head for _, head, _ in computed.rows} == {3}
    assert all(row <= 255 < row + len(block) for (_, _, row), block in computed.rows.items())


def npusim(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, words)
    message = "" if result.exception is None else str(result.exception)
    return result.exit_code, result.stdout, f"{result.stderr}{message}"


def test_a_run_refuses_what_is_not_modelled_and_says_what_it_ignores(windowed: Path) -> None:
    words = ("run", "flash", "-w", str(windowed), "--no-save", "--no-numerics")
    code, _, message = npusim(*words)
    assert code
    assert "rotary (keys rotated in each call): not modelled; to run without them: --ignore rotary" in message
    _, table, _ = npusim(*words, "--ignore", "rotary,softcap")
    assert "softcap (50.0), rotary (keys rotated in each call)" in table
    _, text, _ = npusim(*words, "--ignore", "rotary", "--kind", "local", "--json")
    document = json.loads(text)
    assert document["ignored"] == ["rotary (keys rotated in each call)"]
    assert (document["problem"]["window"], document["problem"]["softcap"]) == (512, 50.0)


def test_a_search_says_what_it_ignores(windowed: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.csv"
    words = ("explore", "flash", "-f", "block_kv=128", "-w", str(windowed), "-o", str(file), "-j1")
    code, _, message = npusim(*words)
    assert code
    assert "not modelled" in message
    _, table, _ = npusim(*words, "--ignore", "rotary,softcap")
    assert "softcap (50.0), rotary" in table
    assert "steady" in table
    row = next(csv.DictReader(file.open()))
    assert (row["method"], row["band"]) == ("steady", "0.0")
    assert row["ignored"].startswith("softcap (50.0), rotary")
    _, text, _ = npusim(*words, "--ignore", "rotary,softcap", "--json")
    point = json.loads(text)["best"]
    assert (point["method"], point["band"]) == ("steady", 0.0)


def test_import_lists_what_is_not_modelled(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    config.write_text(json.dumps({"model_type": "llama", "index_topk": 64, **sizes, "num_key_value_heads": 4}))
    _, _, message = npusim("workload", "import", str(config))
    assert "not modelled: sparse: a selection of keys at run time" in message
    assert "--ignore sparse" in message
    _, text, _ = npusim("workload", "import", str(config), "--json")
    assert json.loads(text)["not_modelled"] == {"sparse": "a selection of keys at run time"}


def test_an_override_of_no_effect_is_refused() -> None:
    code, _, said = npusim("run", "flash", "--no-save", "-C", "memory.l2.line_bytes=64")
    assert code
    assert "-C memory.l2.line_bytes=64: changes nothing on ascend_910b2; read by no model yet" in said


def test_a_found_best_is_not_tied_to_an_unmodelled_workload(windowed: Path) -> None:
    found = explore("flash", {"block_kv": [128]}, workload=windowed, seq=256, ignore=["rotary"])
    assert found.outcomes[0].ignored == "rotary (keys rotated in each call)"
