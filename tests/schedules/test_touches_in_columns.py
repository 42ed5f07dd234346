"""What blocks touch, computed for all of a phase at once, is what a footprint yields step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from npusim.config.load import load_device
from npusim.config.problem import GemmProblem
from npusim.identity import Itself
from npusim.program.ir import residency as residencies
from npusim.program.ir.columns import ColumnScan
from npusim.program.ir.residency import residency
from npusim.simulation.chosen_tile import program_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request

if TYPE_CHECKING:
    from npusim.program.ir.tile_program import TileProgram

#: Calls whose phases have rows alone, loops of products, stacks, views of one tensor, and causal or ragged blocks.
CALLS: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("flash", {"seq": 700, "q_heads": 6, "kv_heads": 2}, {}),
    ("flash", {"seq": 512, "causal": False}, {"block_q": 128}),
    ("pasa", {"seq": 640, "heads": 3}, {}),
    ("split_kv", {"seq_q": 1, "seq_kv": 3000, "q_heads": 8, "kv_heads": 2, "batch": 3}, {}),
    ("flash_backward", {}, {}),
    ("gemm", {"problem": GemmProblem(m=1000, n=520, k=304)}, {}),
    ("ssd", {}, {}),
    ("gated_delta", {}, {}),
    ("standard", {"seq": 512, "heads": 4}, {}),
]


def program(name: str, hw: str, sizes: dict[str, object], tiling: dict[str, object]) -> TileProgram:
    request = Request(name, hw=hw, tiling=tiling, numerics=False, **sizes)  # type: ignore[arg-type]
    return program_of(replace(plan_of(request, is_bare=True), is_open=False))[1]


@pytest.mark.parametrize("hw", ["h200", "ascend_910b2", "v100"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: " ".join(map(str, call)))
def test_columns_have_what_blocks_touch(call: Any, hw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, sizes, tiling = call
    built = program(name, hw, sizes, tiling)
    groups, l2 = load_device(hw).group_count.value, load_device(hw).memory.l2.capacity_bytes.value
    is_in_columns = 0
    for phase in built.phases:
        blocks, footprint = phase.alone, phase.footprint
        assert isinstance(footprint, ColumnScan)
        for count in (groups, 5):
            touches = footprint.of_columns(blocks, count)
            if touches is None:
                continue
            is_in_columns += 1
            columns = residencies._ColumnScan(tuple(touches), len(blocks))
            assert [*columns.steps(count, [None])] == [
                *residencies._BlockScan(Itself(blocks), footprint).steps(count, False)
            ]
    assert is_in_columns or hw == "ascend_910b2"
    ways = [
        (groups, capacity, *how) for capacity in (l2, 150_000) for how in ((False,), (True, 0.0), (True, 7e4, True))
    ]
    monkeypatch.setattr(residencies, "LEAST_BLOCKS", 0)
    found = [residency(built, *way) for way in ways]
    monkeypatch.setattr(residencies, "ColumnScan", int)  # no footprint is one
    residencies_of_blocks = [residency(built, *way) for way in ways]
    assert found == residencies_of_blocks
