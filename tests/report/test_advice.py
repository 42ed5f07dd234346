"""Rules of advice on counts made by hand: one pipe, one group, what it must say."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from typer.testing import CliRunner

from npusim import run
from npusim.cli.app import app
from npusim.config.problem import Problem
from npusim.report.advice import Trial, advise, decoding
from npusim.report.record import DeviceRecord, RunRecord, record_of
from npusim.timing.result import ConstantRecord, QueueUse, TimingRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from npusim.simulation.result import RunData

CYCLES = 1000


def _record(
    busy: dict[str, int],
    *,
    constants: dict[str, float] | None = None,
    ends: tuple[int, ...] = (CYCLES,),
    groups: int = 1,
    link_bytes: int = 0,
    stalls: dict[str, int] | None = None,
) -> RunRecord:
    queues = tuple(
        QueueUse(name, g, cycles, 1, stalls or {}, end) for g, end in enumerate(ends) for name, cycles in busy.items()
    )
    timing = TimingRecord(
        method="des",
        cycles=CYCLES,
        latency_s=1e-6,
        launch_s=0.0,
        operations=1,
        flops=1,
        bound_cycles={},
        link_bytes={"l2": link_bytes},
        uses=queues,
        constants=tuple(ConstantRecord(k, "vendor", c) for k, c in (constants or {}).items()),
    )
    device = DeviceRecord("d", "0", 1e9, groups, {"l2": 1e9})
    tiling: dict[str, object] = {"block_q": 128, "vector_rows": 16, "depth": 2}
    return RunRecord("0", "n", "flash", "p", {}, "w", {}, tiling, device, timing, None, (), ())


class _Any:
    """A trial to which every value is useful."""

    def value(self, field: str) -> int:
        return {"block_q": 128, "vector_rows": 16, "depth": 2}[field]

    def useful(self, field: str, values: Iterable[int]) -> list[int]:
        return list(values)

    def explore(self, field: str, values: Sequence[int]) -> str:
        return f"{field}={','.join(map(str, values))}"


def _advice(record: RunRecord) -> tuple[str, str]:
    advice = advise(record, cast("Any", _Any()))
    assert advice is not None
    return advice.text, advice.command


def test_idle_core_groups_come_first() -> None:
    text, command = _advice(_record({"aiv0.VECTOR": 900}, groups=24))
    assert text == "[few blocks] only 1 of 24 core groups have a block to work on"
    assert command == "block_q=32,64,128"


def test_uneven_ends_name_the_group_that_decides() -> None:
    text, _ = _advice(_record({"aiv0.VECTOR": 500}, ends=(400, 1000, 400), groups=3))
    assert "end after 60.0 % of the cores' time on average, group 1 last" in text


def test_vector_bound_names_the_costliest_instructions_and_their_startup() -> None:
    key = "cores.aiv.engines.VECTOR.ops"
    constants = {
        f"{key}.exp_float32.slope_cycles_per_repeat": 40.0,
        f"{key}.exp_float32.head_cycles": 20.0,
        f"{key}.binary.head_cycles": 40.0,
    }
    text, command = _advice(_record({"aiv0.VECTOR": 900}, constants=constants))
    assert text == (
        "[vector] the vector unit is the limit: exp_float32 60.0 %, binary 40.0 % of its time; "
        "60.0 % starts and ends instructions"
    )
    assert command == "vector_rows=16,32,64"


def test_cube_bound_says_how_much_is_work() -> None:
    key = "cores.aic.engines.CUBE"
    constants = {f"{key}.cycles_per_fractal": 98.0, f"{key}.startup_cycles": 2.0}
    text, command = _advice(_record({"aic.CUBE": 900}, constants=constants))
    assert "[matrix]" in text
    assert "98.0 % of its time spent on fractals" in text
    assert command == ""


def test_a_full_link_is_told_from_a_full_port() -> None:
    # One microsecond at 1e9 bytes a second is 1000 bytes.
    constants = {"cores.aic.engines.MTE2.routes.gm_l1.bytes_per_cycle": 90.0}
    text, _ = _advice(_record({"aic.MTE2": 900}, constants=constants, link_bytes=900))
    assert text == "[link] MTE2 is the limit, with link l2 at 90.0 % of its bandwidth"
    constants = {
        "cores.aic.engines.MTE2.routes.gm_l1.bytes_per_cycle": 90.0,
        "cores.aiv.engines.MTE2.routes.gm_ub.bytes_per_cycle": 99.0,
    }
    text, _ = _advice(_record({"aic.MTE2": 900}, constants=constants))
    assert text == (
        "[transfers] moving bytes is the limit (MTE2, gm_l1.bytes_per_cycle): the core's own port, no shared link"
    )


def test_a_unit_that_moves_no_bytes_is_no_transfer() -> None:
    constants = {"cores.aic.engines.FIXP.startup_cycles": 1.0}
    text, _ = _advice(_record({"aic.FIXP": 900}, constants=constants, link_bytes=900, stalls={"S ready": 90}))
    assert text.startswith("[waiting]")


def test_waiting_names_the_busiest_pipe_and_its_wait() -> None:
    text, command = _advice(_record({"aiv0.VECTOR": 400, "aic.CUBE": 100}, stalls={"S ready": 300}))
    assert "no pipe is the limit: the busiest, VECTOR, works 40.0 %" in text
    assert "waits 30.0 % for S ready" in text
    assert command == "depth=2,3,4"


# ---------------------------------------------------------------- what is suggested


def _suggested(result: RunData) -> tuple[str, str]:
    advice = advise(record_of(result), Trial(result))
    assert advice is not None
    return advice.text, advice.command


def test_a_command_is_of_the_run_itself_and_runs_and_changes_the_result(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "workload": "qwen2_7b",
        "seq": 256,
        "tensor_parallel": 4,
        "hw": "ascend_910b1",
        "causal": False,
        "tiling": {"block_q": 64, "depth": 1},
        "overrides": {"group_count": "30"},
        "precision": "fa16",
    }
    result = run("flash", numerics=False, trace_groups=(), **options)
    text, command = _suggested(result)
    assert "only 28 of 30 core groups" in text
    assert command == (
        "npusim explore flash -w qwen2_7b --seq 256 --tp 4 --no-causal --hw ascend_910b1 -C group_count=30 "
        "-t depth=1 --precision fa16 --field block_q=16,32,64"
    )
    words = [*shlex.split(command)[1:], "-j1", "--json", "--out", str(tmp_path / "a.csv")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    points = json.loads(done.stdout)["points"]
    assert [p["status"] for p in points] == ["ok"] * 3
    assert len({p["cycles"] for p in points}) == 3
    assert points[-1]["cycles"] == result.cycles


def test_values_that_do_not_fit_or_change_nothing_are_not_suggested() -> None:
    short = run("flash", seq=32, numerics=False, trace_groups=())
    trial = Trial(short)
    assert trial.useful("block_q", [64, 256, 512]) == [], "32 queries are one block"
    assert trial.useful("block_q", [16]) == [16]
    assert trial.useful("block_q", [17]) == [], "no multiple of 16"
    full = run("flash", seq=1024, tiling={"kernel": "pto"}, numerics=False, trace_groups=())
    assert Trial(full).useful("block_q", [64, 256, 2048]) == [64], "more rows overflow UB"
    two_tiles = run("flash", seq_q=1, seq_kv=1024, numerics=False, trace_groups=())
    assert Trial(two_tiles).useful("depth", [1, 3, 4]) == [1], "two tiles are never more than two ahead"
    cycles = [
        run("flash", seq_q=1, seq_kv=1024, numerics=False, trace_groups=(), tiling={"depth": depth}).cycles
        for depth in (2, 3)
    ]
    assert cycles[0] == cycles[1]
    assert Trial(full).value("vector_rows") == 16, "what the default stands for"
    assert Trial(full).useful("vector_rows", [32, 8]) == [8]


def test_volta_gets_no_tiles_that_do_not_fit() -> None:
    result = run("volta_flash", seq=512, numerics=False, trace_groups=())
    text, command = _suggested(result)
    assert "only 20 of 80" in text
    assert command == "", "m8n8k4 in four warps covers 128 rows"


def test_a_run_that_no_command_line_can_say_gets_no_command() -> None:
    problem = Problem(heads=2, seq_q=256, head_dim=128)
    text, command = _suggested(run("flash", problem=problem, numerics=False, trace_groups=()))
    assert "[few blocks]" in text
    assert command == ""


@pytest.mark.parametrize(
    ("workload", "kind", "said"),
    [
        ("llama2_70b", {}, ("8 of 24 core groups work", "a larger --batch fills them", "K and V are loaded 8 times")),
        ("pangu_38b", {"batch": 8}, ()),
        ("pangu_38b", {}, ("5 of 24 core groups work",)),
        ("llama2_70b", {"batch": 3}, ("K and V are loaded 8 times",)),
    ],
)
def test_decoding_says_in_one_line_what_it_leaves(workload: str, kind: dict[str, int], said: tuple[str, ...]) -> None:
    result = run("flash", workload=workload, seq_q=1, seq_kv=1024, numerics=False, trace_groups=(), **kind)  # type: ignore[arg-type]
    line = decoding(record_of(result)) or ""
    assert [part in line for part in said] == [True] * len(said)
    assert bool(line) == bool(said)
    assert line.count("\n") == 0
    assert ("decode " in str(result)) == bool(said)
    assert "block_q" not in _suggested(result)[1], "one query is one block whatever block_q"


def test_prefill_is_no_decoding() -> None:
    assert decoding(record_of(run("flash", seq=64, numerics=False, trace_groups=()))) is None


def test_no_time_no_advice() -> None:
    assert advise(replace(_record({}), timing=None)) is None
    assert advise(_record({})) is None
