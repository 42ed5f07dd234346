"""The tile that a run of plain tensors chooses where nobody names one: near the best of a search, the same for all."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import npusim
from npusim.library import SCHEDULES
from npusim.program.ir.content import SameBlocks
from npusim.program.ir.sameness import ProgramContent
from npusim.program.timing import method_named
from npusim.simulation import chosen_tile
from npusim.simulation.chosen_tile import choose_tile, program_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from tests.turns import in_turn

if TYPE_CHECKING:
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.timing.timing_result import TimingResult

#: A default takes at most so much longer than the best of a search.
MOST = 1.05
SIZES: dict[str, Any] = {"heads": 2, "tokens": 128, "key": 64, "value": 64}
CHUNKS: dict[str, tuple[int, ...]] = {"chunk": (32, 64, 128), "block_value": (16, 32, 64)}
BLOCKS: dict[str, tuple[int, ...]] = {
    "block_q": (32, 64),
    "block_kv": (64, 128),
    "tile_q": (64, 128),
    "tile_kv": (16, 64),
}
SPACES: dict[str, dict[str, tuple[int, ...]]] = {
    **{name: {**CHUNKS, "block_key": (16, 64)} for name in ("retention", "gla")},
    **dict.fromkeys(("gated_delta", "ssd"), CHUNKS),
    "flash_backward": BLOCKS,
}
#: Fields that are named, so that a search is small: those of a GPU's warps, and of the order of work.
NAMED: dict[str, dict[str, object]] = {"h200": {"warps": 4, "stages": 2}, "ascend_910b2": {}}
ORDER: dict[str, object] = {"depth": 1, "deal": "round_robin", "order": "rolling", "slots": 2, "vector_rows": "full"}


def named(schedule: str, hw: str) -> dict[str, object]:
    return ORDER if (schedule, hw) == ("flash_backward", "ascend_910b2") else NAMED[hw]


def request(schedule: str, hw: str, **tiling: object) -> Request:
    return Request(schedule, hw=hw, problem=SIZES, tiling={**named(schedule, hw), **tiling}, numerics=False)


def latency_us(schedule: str, hw: str, **tiling: object) -> float:
    return npusim.run(
        schedule, hw=hw, problem=SIZES, tiling={**named(schedule, hw), **tiling}, numerics=False
    ).latency_us


def test_all_schedules_of_plain_tensors_are_searched() -> None:
    assert {s.name for s in SCHEDULES.values() if "plain" in s.problem.features} == SPACES.keys()


#: Whose spaces of chunks are searched with ``-m exhaustive`` alone: those of others have the same axes.
LIKE_OTHERS = ("gla", "gated_delta")


@pytest.mark.parametrize(
    ("schedule", "hw"),
    in_turn([pytest.param(n, id=n, marks=[pytest.mark.exhaustive] * (n in LIKE_OTHERS)) for n in SPACES], [*NAMED]),
)
def test_a_run_is_near_the_best_of_a_search(schedule: str, hw: str) -> None:
    own = latency_us(schedule, hw)
    # The named fields that the run chose beside the axes are those of the search's points, too.
    axes = SPACES[schedule]
    chosen = {n: v for n, v in choose_tile(plan_of(request(schedule, hw))).fields.items() if n not in axes}
    found = npusim.explore(schedule, axes, hw=hw, problem=SIZES, tiling={**named(schedule, hw), **chosen}, jobs=1)
    best = min(row.latency_us for row in found.outcomes if row.latency_us is not None)
    assert own <= best * MOST


@pytest.mark.parametrize("hw", NAMED)
def test_fields_that_are_named_stay_and_the_named_tile_is_the_run(hw: str) -> None:
    plan, _ = program_of(plan_of(request("retention", hw)))
    assert plan.tiling != plan_of(request("retention", hw)).tiling or hw != "h200"  # chosen, not declared
    words = {n: v for n, v in plan.tiling if n in SPACES["retention"]}
    assert latency_us("retention", hw, **words) == latency_us("retention", hw)
    assert program_of(plan_of(request("retention", hw, chunk=32)))[0].tiling.chunk == 32  # type: ignore[attr-defined]


def test_a_search_whose_points_leave_fields_open_has_the_tile_of_a_run() -> None:
    found = npusim.explore("retention", {"chunk": (32, 64)}, hw="h200", problem=SIZES, tiling=NAMED["h200"], jobs=1)
    for row in found.outcomes:
        if row.latency_us is not None:
            assert row.latency_us == pytest.approx(
                latency_us("retention", "h200", chunk=found.tiling(row)["chunk"]), rel=1e-12
            )


def test_a_tile_that_a_run_would_refuse_is_not_chosen() -> None:
    sizes = {**SIZES, "tokens": 512, "key": 128, "value": 128}
    asked = Request("flash_backward", problem=sizes, tiling={"method": "added"}, numerics=False)
    note = choose_tile(plan_of(asked)).note
    assert "refused" not in note
    npusim.run("flash_backward", problem=sizes, tiling={"method": "added"}, numerics=False)


def test_a_library_s_product_has_its_own_tile() -> None:
    asked = Request("gemm", problem={"m": 64, "n": 64, "k": 64}, numerics=False)
    assert not choose_tile(plan_of(asked)).note


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
def test_a_launch_has_the_warps_that_it_states_and_is_near_the_best() -> None:
    kernels = Path(__file__).parent / "ttir" / "plain_kernels.py"
    launch = f"{kernels}::add[cdiv(n, BLOCK)](tensor(n), tensor(n), tensor(n), n, BLOCK=256)"
    call: dict[str, Any] = {"hw": "h200", "problem": {"n": 1000}}
    own = npusim.run(launch, numerics=False, **call)
    assert own.tiling.warps == 4  # type: ignore[attr-defined]
    found = npusim.explore(launch, {"warps": (2, 4, 8)}, jobs=1, **call)
    rows = {found.tiling(row)["warps"]: row.latency_us for row in found.outcomes if row.latency_us is not None}
    assert rows[4] == own.latency_us
    assert own.latency_us <= min(rows.values()) * MOST


def test_equal_programs_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size beyond a tensor's builds a program that was timed before; it counts as tried."""
    timed: list[TileProgram] = []
    method = method_named("auto")

    def counted(program: TileProgram, *args: Any, **named: Any) -> TimingResult:
        timed.append(program)
        return method(program, *args, **named)

    monkeypatch.setattr(chosen_tile, "remembered", lambda *args: args[-1]())
    monkeypatch.setattr(chosen_tile, "method_named", lambda _name: counted)
    # Sizes of this test alone: choices are stored in the process too.
    asked = Request("retention", hw="h200", problem={**SIZES, "tokens": 144}, numerics=False)
    note = choose_tile(plan_of(asked)).note
    tried = int(note.partition(" tried")[0].rpartition(" ")[2])
    contents = list(map(ProgramContent, timed))
    assert len(set(contents)) == len(contents) < tried


def test_what_blocks_touch_is_stored_by_content() -> None:
    """Other numbers of warps or stages change no region: programs built apart share what was computed of these."""
    one, other = (_footprints(chunk=64, stages=stages) for stages in (2, 3))
    assert one == other
    assert [SameBlocks(blocks) for blocks, _ in one] == [SameBlocks(blocks) for blocks, _ in other]
    for less in _footprints(chunk=32, stages=2), _footprints(chunk=64, stages=2, block_value=16):
        assert [f for _, f in less] != [f for _, f in one]
    assert SameBlocks(one[0][0]) != SameBlocks(one[0][0][1:])


def _footprints(**tiling: int) -> list[tuple[Any, Any]]:
    plan = plan_of(request("retention", "h200", **tiling))
    program = replace(plan, is_open=False).program()  # other fields as declared
    return [(phase.alone, phase.footprint) for phase in program.phases]
