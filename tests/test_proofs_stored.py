"""Proofs that a program has no race are stored: the same program is checked once, every other one is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npusim import cache
from npusim.errors import RaceError
from npusim.program.ir.check import check
from npusim.simulation import simulate
from npusim.simulation.chosen_tile import program_of, remembered
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from npusim.simulation.simulate import BuiltPlan

if TYPE_CHECKING:
    from npusim.config.device import FlagsSpec
    from npusim.program.ir.tile_program import TileProgram

#: Counts the programs that are checked.
Count = Callable[[], int]
TILE = {"block_q": 64, "block_kv": 128}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Count:
    """Store proofs in an empty folder, and count what is checked; other tests store none (``tests/conftest.py``)."""
    names: list[str] = []

    def counting(program: TileProgram, flags: FlagsSpec | None) -> bool:
        names.append(program.name)
        return check(program, flags)

    monkeypatch.setenv("NPUSIM_CACHE", str(tmp_path))
    monkeypatch.setattr(simulate, "remembered", remembered)
    monkeypatch.setattr(simulate, "check", counting)
    return lambda: len(names)


def built(schedule: str = "flash", **request: object) -> BuiltPlan:
    """Return a small program, which is built again each time."""
    tiling = {**TILE, **request.pop("tiling", {})}  # type: ignore[dict-item]
    return BuiltPlan(*program_of(plan_of(Request(schedule, seq=512, tensor_parallel=8, tiling=tiling, **request))))  # type: ignore[arg-type]


def test_a_program_is_proved_once_until_a_file_of_the_package_changes(
    checked: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        built().check()
    assert checked() == 1
    monkeypatch.setattr(cache, "package_digest", lambda: b"another")
    built().check()
    assert checked() == 2


def test_a_process_whose_code_is_older_than_the_files_stores_no_proof(
    checked: Count, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "_BEGUN_NS", 0)  # as if a file had changed since
    for _ in range(2):
        built().check()
    assert checked() == 2
    assert not list(tmp_path.glob("*.proof"))


def test_a_time_is_stored_by_method_and_content_of_l2(checked: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    latency_us = built().latency_us()
    assert latency_us is not None
    assert built(l2="warm").latency_us() != latency_us
    assert built(method="des").latency_us() == latency_us
    timed: list[str] = []
    monkeypatch.setattr(BuiltPlan, "timing", lambda of: timed.append(of.plan.request.method))
    assert [built(method=m).latency_us() for m in ("auto", "des", "block")] == [latency_us, latency_us, None]
    assert timed == ["block"]
    assert checked() == 1


@pytest.mark.parametrize(
    "other",
    [
        {"tiling": {"block_kv": 64}},
        {"tiling": {"depth": 2}},
        {"overrides": {"flags.cross_core_ids_count": 15}},
        {"causal": False},
        {"precision": "running=float16"},
        {"schedule": "pasa"},
    ],
    ids=str,
)
def test_any_other_program_is_checked(checked: Count, other: dict[str, object]) -> None:
    built().check()
    built(**other).check()  # type: ignore[arg-type]
    assert checked() == 2


def test_a_program_with_other_rings_than_its_plan_is_checked(checked: Count) -> None:
    plan = built()
    plan.check()
    deepest = max(plan.program.rings, key=lambda ring: ring.depth)
    rings = tuple(replace(r, depth=r.depth + 1) if r is deepest else r for r in plan.program.rings)
    changed = replace(plan, program=replace(plan.program, rings=rings))
    with pytest.raises(Exception, match=deepest.name):
        changed.check()
    assert checked() == 2


def test_a_fault_is_not_stored(checked: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise RaceError("two operations on the same bytes")

    with monkeypatch.context() as patched:
        patched.setattr(simulate, "check", refuse)
        for _ in range(2):
            with pytest.raises(RaceError, match="same bytes"):
                built().check()
    built().check()
    assert checked() == 1


def test_phases_without_families_are_marked_by_a_stored_proof_too(
    checked: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[object] = []
    monkeypatch.setattr(simulate, "take_all_by_shape", marked.append)
    programs = [built(), built()]
    with monkeypatch.context() as patched:
        patched.setattr(simulate, "check", lambda *_: False)
        programs[0].check()
    programs[1].check()
    assert checked() == 0
    assert marked == [one.program for one in programs]
