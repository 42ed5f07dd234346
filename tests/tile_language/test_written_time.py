"""The time of an expert program as its text has it: costs of the device file, flags, slots, barriers, long loops."""

from __future__ import annotations

from json import loads
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.config.load import load_device
from npusim.errors import SpecError
from npusim.studies.flags import written_time as times
from tests.tile_language.flag_programs import FLASH, PUBLISHED, program, written

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = load_device("ascend_910b2")
#: Tiles that the matrix core loads to L1, L0A and L0B, and multiplies; ``slots`` of each.
PRODUCTS = """
        with T.Kernel(1, is_npu=True) as (cid, vid):
            a = T.alloc_L1([{slots}, 128, 128], "float16")
            left = T.alloc_L0A([{slots}, 128, 128], "float16")
            right = T.alloc_L0B([{slots}, 128, 128], "float16")
            c = T.alloc_L0C([128, 128], "float")
            with T.Scope("C"):
                for s in T.serial({slots}):
                    T.set_flag("MTE1", "MTE2", s)
                    T.set_flag("M", "MTE1", s)
                for t in T.serial(tiles):
                    s = t % {slots}
                    T.wait_flag("MTE1", "MTE2", s)
                    T.copy(A[t * 128 : (t + 1) * 128, 0:128], a[s, :, :])
                    T.set_flag("MTE2", "MTE1", s)
                    T.wait_flag("M", "MTE1", s)
                    T.wait_flag("MTE2", "MTE1", s)
                    T.copy(a[s, :, :], left[s, :, :])
                    T.copy(a[s, :, :], right[s, :, :])
                    T.set_flag("MTE1", "MTE2", s)
                    T.set_flag("MTE1", "M", s)
                    T.wait_flag("MTE1", "M", s)
                    T.mma(left[s, :, :], right[s, :, :], c, init=True)
                    T.set_flag("M", "MTE1", s)
                    {barrier}
                for s in T.serial({slots}):
                    T.wait_flag("MTE1", "MTE2", s)
                    T.wait_flag("M", "MTE1", s)
"""
TALL = 'A: T.Tensor([65536, 128], "float16"), C: T.Tensor([128, 128], "float16")'
#: Instructions of one vector core: a load, and some of V.
ROWS = """
        with T.Kernel({blocks}, is_npu=True) as (cid, vid):
            a = T.alloc_ub([32, 64], "float")
            b = T.alloc_ub([32, 64], "float")
            with T.Scope("V"):
                T.copy(X[vid * 32 : (vid + 1) * 32, :], a)
                T.barrier_all()
                T.tile.exp(b, a)
                {more}
"""
WIDE = 'X: T.Tensor([64, 64], "float")'
#: Rows at loaded places, one after another, or as many rows one by one.
GATHERED = """
        with T.Kernel(1, is_npu=True) as (cid, vid):
            places = T.alloc_ub([16], "int32")
            a = T.alloc_ub([16, 64], "float")
            with T.Scope("V"):
                T.copy(I[0:16], places)
                T.barrier_all()
                for i in T.serial(16):
                    T.copy(X[{place}, :], a[i, :])
"""


def time_of(folder: Path, text: str, parameters: str, parts: dict[str, str], **arguments: int) -> float:
    path = written(folder, program(text, parameters, parts))
    return times.time_program(path, "kernel", arguments, device=DEVICE).cycles


def test_instructions_have_the_costs_of_the_device_file(tmp_path: Path) -> None:
    load = DEVICE.engine("aiv", "MTE2").routes["gm_ub"]  # type: ignore[union-attr]
    ops = DEVICE.engine("aiv", "VECTOR").ops  # type: ignore[union-attr]
    size = 32 * 64 * 4
    first = size / load.bytes_per_cycle.value + load.latency_cycles.value

    def of(op: object) -> float:
        return float(op.head_cycles.value + op.slope_cycles_per_repeat.value * size / 256 + op.tail_cycles.value)  # type: ignore[attr-defined]

    made = time_of(tmp_path, ROWS, WIDE, {"blocks": "1"})
    assert made == pytest.approx(first + of(ops["exp_float32"]), abs=3)
    own = time_of(tmp_path, ROWS, WIDE, {"blocks": "1", "more": "T.barrier_all(); T.tile.add(a, b, b)"})
    assert own - made == pytest.approx(of(ops["binary"]), abs=3)


def test_a_row_at_a_loaded_place_costs_a_row(tmp_path: Path) -> None:
    made = [
        time_of(tmp_path, GATHERED, f'I: T.Tensor([16], "int32"), X: T.Tensor([{n}, 64], "float")', {"place": place})
        for n, place in ((64, "i"), (64, "places[i]"), (8192, "places[i]"))
    ]
    assert made[1] == pytest.approx(made[0], rel=0.02)
    assert made[2] == made[1]


def test_blocks_share_the_core_groups(tmp_path: Path) -> None:
    one = time_of(tmp_path, ROWS, WIDE, {"blocks": "1"})
    assert time_of(tmp_path, ROWS, WIDE, {"blocks": str(DEVICE.group_count.value + 1)}) == pytest.approx(2 * one)


def test_slots_and_barriers_are_those_of_the_text(tmp_path: Path) -> None:
    one = time_of(tmp_path, PRODUCTS, TALL, {"slots": "1"}, tiles=8)
    two = time_of(tmp_path, PRODUCTS, TALL, {"slots": "2"}, tiles=8)
    stopped = time_of(tmp_path, PRODUCTS, TALL, {"slots": "2", "barrier": "T.barrier_all()"}, tiles=8)
    assert two < 0.8 * one
    assert stopped > 1.2 * two


def test_a_long_loop_takes_what_all_its_iterations_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, program(PRODUCTS, TALL, {"slots": "2"}))
    extended = times.time_program(path, "kernel", {"tiles": 200}, device=DEVICE)
    assert any("8 of 200 iterations" in n for n in extended.notes)
    monkeypatch.setattr(times, "MOST_WALKED", 100)
    assert times.time_program(path, "kernel", {"tiles": 200}, device=DEVICE).cycles == pytest.approx(
        extended.cycles, rel=1e-3
    )


def test_both_kinds_of_cores_wait_for_each_other(tmp_path: Path) -> None:
    path = written(tmp_path, FLASH)
    few, many = (times.time_program(path, "flash", {"tiles": n}, device=DEVICE).cycles for n in (3, 6))
    cross = DEVICE.timed_flags().cross_core_latency_cycles.value
    assert (many - few) / 3 > 3 * cross  # S down, P up and O down, one after the other in each tile


def test_a_program_that_never_ends_is_refused_with_its_line(tmp_path: Path) -> None:
    text = FLASH.replace('T.set_cross_flag("FIX", 0)', "pass")
    line = next(i for i, x in enumerate(text.splitlines(), 1) if "T.wait_cross_flag" in x)
    with pytest.raises(SpecError, match=rf"program\.py:{line}: .* waits forever"):
        times.time_program(written(tmp_path, text), "flash", device=DEVICE)


def test_what_has_no_time_is_refused(tmp_path: Path) -> None:
    text, parameters, _, mended, _ = PUBLISHED["barrier in a branch"]
    with pytest.raises(SpecError, match="depends on values that are known only at run time: size > 0"):
        time_of(tmp_path, text, parameters, mended)
    with pytest.raises(SpecError, match=r"T\.tile\.sin has no cost here"):
        time_of(tmp_path, ROWS, WIDE, {"blocks": "1", "more": "T.tile.sin(b, b)"})
    path = written(tmp_path, program(ROWS, WIDE, {"blocks": "1"}))
    with pytest.raises(SpecError, match="h200: an expert program of TileLang-Ascend needs an Ascend device"):
        times.time_program(path, "kernel", device=load_device("h200"))


def test_the_command_shows_the_time(tmp_path: Path) -> None:
    text, parameters, _, mended, _ = PUBLISHED["two readers, one flag"]
    path = written(tmp_path, program(text, parameters, mended))
    shown = CliRunner().invoke(app, ["check", f"{path}::kernel", "--hw", "ascend_910b2"])
    assert shown.exit_code == 0, shown.output
    assert "cycles of ascend_910b2" in shown.output
    made = CliRunner().invoke(app, ["check", f"{path}::kernel", "--hw", "ascend_910b2", "--json"])
    document = loads(made.output)
    assert document["cycles"] > 0
    assert "V0 MTE2" in document["busy"]


def test_the_time_of_baselines_is_refused(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["check", str(tmp_path), "--hw", "ascend_910b2"])
    assert shown.exit_code == 2
