"""Rules of advice on counts made by hand: one pipe, one group, what it must say."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from npusim import run
from npusim.cli.app import app
from npusim.config.problem import Problem
from npusim.program.timing.timing_result import ConstantRecord, QueueUse, TimingRecord
from npusim.report.advice import Trial, advise, decoding
from npusim.report.result_json import DeviceRecord, RunRecord, record_of

if TYPE_CHECKING:
    from npusim.simulation.run_result import RunData

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


def _advice(record: RunRecord) -> str:
    advice = advise(record)
    assert advice is not None
    assert not advice.command, "of what was not tested"
    return advice.text


def test_idle_core_groups_come_first() -> None:
    text = _advice(_record({"aiv0.VECTOR": 900}, groups=24))
    assert text == "[few blocks] only 1 of 24 core groups have a block to run"


def test_uneven_ends_name_the_group_that_decides() -> None:
    text = _advice(_record({"aiv0.VECTOR": 500}, ends=(400, 1000, 400), groups=3))
    assert "end after 60.0 % of the cores' time; group 1 ends last:" in text


def test_vector_bound_names_the_costliest_instructions_and_their_startup() -> None:
    key = "cores.aiv.engines.VECTOR.ops"
    constants = {
        f"{key}.exp_float32.slope_cycles_per_repeat": 40.0,
        f"{key}.exp_float32.head_cycles": 20.0,
        f"{key}.binary.head_cycles": 40.0,
    }
    text = _advice(_record({"aiv0.VECTOR": 900}, constants=constants))
    assert text == (
        "[vector] the vector unit is the limit: exp_float32 60.0 %, binary 40.0 % of its time; "
        "60.0 % issue overhead (heads and tails of instructions)"
    )


def test_cube_bound_says_how_much_is_work() -> None:
    key = "cores.aic.engines.CUBE"
    constants = {f"{key}.cycles_per_fractal": 98.0, f"{key}.startup_cycles": 2.0}
    text = _advice(_record({"aic.CUBE": 900}, constants=constants))
    assert "[matrix]" in text
    assert "98.0 % of its time spent on fractals" in text


def test_a_full_link_is_told_from_a_full_port() -> None:
    # One microsecond at 1e9 bytes a second is 1000 bytes.
    constants = {"cores.aic.engines.MTE2.routes.gm_l1.bytes_per_cycle": 90.0}
    text = _advice(_record({"aic.MTE2": 900}, constants=constants, link_bytes=900))
    assert text == "[link] MTE2 is the limit, with link l2 at 90.0 % of its bandwidth"
    constants = {
        "cores.aic.engines.MTE2.routes.gm_l1.bytes_per_cycle": 90.0,
        "cores.aiv.engines.MTE2.routes.gm_ub.bytes_per_cycle": 99.0,
    }
    text = _advice(_record({"aic.MTE2": 900}, constants=constants))
    assert text == (
        "[transfers] transfers are the limit (MTE2, gm_l1.bytes_per_cycle): the core's port, not a shared link"
    )


def test_a_unit_that_moves_no_bytes_is_no_transfer() -> None:
    constants = {"cores.aic.engines.FIXP.startup_cycles": 1.0}
    busy = _record({"aic.FIXP": 900}, constants=constants, link_bytes=900, stalls={"S ready": 90})
    assert advise(busy) is None, "and no pipe that waits: it is the limit"
    assert _advice(_record({"aic.FIXP": 500}, constants=constants, stalls={"S ready": 90})).startswith("[waiting]")


def test_waiting_names_the_busiest_pipe_and_its_wait() -> None:
    text = _advice(_record({"aiv0.VECTOR": 400, "aic.CUBE": 100}, stalls={"S ready": 300}))
    assert "no pipe is the limit: the busiest, VECTOR, is busy 40.0 %" in text
    assert "waits 30.0 % for S ready" in text


# ---------------------------------------------------------------- what is suggested


def _suggested(result: RunData) -> tuple[str, str]:
    advice = advise(record_of(result), Trial(result))
    assert advice is not None
    return advice.text, advice.command


def _latency_us(command: str) -> float:
    words = [*shlex.split(command)[1:], "--no-numerics", "--no-save", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return float(json.loads(done.stdout)["timing"]["latency_us"])


#: Rules whose advice is tried with the declared tile: what their runs leave open is chosen for the other rules alone.
DECLARED = ("vector", "link", "transfers")
#: One head on four core groups, which a few blocks fill.
FEW: dict[str, Any] = {"tensor_parallel": 8, "overrides": {"group_count": "4"}}


@pytest.mark.parametrize(
    ("rule", "schedule", "options", "change"),
    [
        ("few blocks", "flash", {"seq": 256, "tiling": {"block_q": 128}}, "block_q=32"),
        ("few blocks", "volta_flash", {"seq": 1024, "tiling": {"block_q": 256}}, "block_q=64,arrangement=2x2"),
        ("imbalance", "flash", {"seq": 1024, "tiling": {"kernel": "pto", "deal": "round_robin"}}, "deal=balanced"),
        ("imbalance", "flash", {"seq": 2048, "hw": "h200", "tiling": {"launch": "in_order"}}, "launch=longest_first"),
        ("vector", "pasa", {**FEW, "seq": 1024, "tiling": {"vector_rows": 8}}, "vector_rows=32"),
        (
            "link",
            "flash",
            {
                "seq": 512,
                "tensor_parallel": 8,
                "tiling": {"block_q": 32},
                "overrides": {"group_count": "4", "links.l2.bytes_per_s": "5e10"},
            },
            "block_q=64",
        ),
        (
            "transfers",
            "flash",
            {
                "seq": 256,
                "tensor_parallel": 8,
                "tiling": {"block_q": 16},
                "overrides": {"group_count": "4", "cores.aic.engines.MTE2.routes.gm_l1.bytes_per_cycle": "8"},
            },
            "block_q=32",
        ),
        ("waiting", "flash", {**FEW, "seq": 512, "tiling": {"depth": 0, "block_q": 64}}, "depth=2"),
    ],
)
def test_each_kind_of_advice_helps(
    rule: str, schedule: str, options: dict[str, Any], change: str, request: pytest.FixtureRequest
) -> None:
    if rule in DECLARED:
        request.getfixturevalue("declared_tile")
    result = run(schedule, numerics=False, trace_groups=(), **options)
    text, command = _suggested(result)
    assert text.startswith(f"[{rule}] ")
    assert command.endswith(f" -t {change}")
    after = _latency_us(command)
    gain = (after / result.latency_us - 1) * 100
    assert gain < -1
    assert text.endswith(f"; with {change} {after:,.2f} us ({gain:+.1f} %)")


def test_a_command_has_all_else_that_the_run_was_asked_for() -> None:
    options: dict[str, Any] = {
        "workload": "qwen2_7b",
        "seq": 256,
        "tensor_parallel": 4,
        "hw": "ascend_910b1",
        "causal": False,
        "tiling": {"block_q": 128, "depth": 1},
        "overrides": {"group_count": "30"},
        "precision": "fa16",
    }
    result = run("flash", numerics=False, trace_groups=(), **options)
    text, command = _suggested(result)
    assert "only 14 of 30 core groups" in text
    assert command == (
        "npusim run flash -w qwen2_7b --seq 256 --tp 4 --no-causal --hw ascend_910b1 -C group_count=30 "
        "-t depth=1 --precision fa16 -t block_q=64"
    )
    assert _latency_us(command) < result.latency_us


def test_what_was_tried_and_does_not_help_is_no_advice() -> None:
    """One query is one block whatever block_q; no order of blocks is shorter than the longest of them."""
    for options in ({"seq_q": 1, "seq_kv": 1024}, {"seq": 200, "tiling": {"block_q": 16}}):
        text, command = _suggested(run("flash", numerics=False, trace_groups=(), **options))  # type: ignore[arg-type]
        assert "; with " not in text
        assert command == ""


def test_a_run_that_no_command_line_can_say_gets_no_command() -> None:
    problem, tiling = Problem(heads=2, seq_q=256, head_dim=128), {"block_q": 128}
    text, command = _suggested(run("flash", problem=problem, tiling=tiling, numerics=False, trace_groups=()))
    assert text.startswith("[few blocks]")
    assert "; with block_q=" in text
    assert command == ""


@pytest.mark.parametrize(
    ("workload", "kind", "said"),
    [
        (
            "llama2_70b",
            {},
            ("8 of 24 core groups work", "a larger --batch gives the others work", "K and V are loaded 8 times"),
        ),
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
