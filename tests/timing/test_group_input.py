"""What tiles of warp groups are refused for, and where spilled registers go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import npusim
from npusim.config.core_units import LocalMemoryPipe
from npusim.config.device_tables import compiled_registers
from npusim.config.load import apply_overrides, load_device
from npusim.config.problem import Problem
from npusim.errors import NpusimError
from npusim.program.ir.tile_program import Loop

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npusim.program.ir.op import TileOp
    from npusim.program.ir.tile_program import Item

SILICON = Path(__file__).resolve().parents[2] / "reports" / "silicon"
PROBLEM = Problem(heads=132, seq_q=256, seq_kv=1024, head_dim=128)


def run(schedule: str = "flash", hw: str = "h200", method: str = "auto", **tiling: int) -> npusim.RunResult:
    return npusim.run(schedule, hw=hw, problem=PROBLEM, tiling=tiling, numerics=False, trace_groups=(), method=method)


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        (
            {"block_q": 256, "block_kv": 256, "stages": 3, "warps": 4},
            r"shared memory: .* 448 KiB > 227 KiB of a block .*; largest values that fit, .* block_kv=",
        ),
        (
            {"block_q": 256, "block_kv": 256, "stages": 1, "registers": 255, "spilled_registers": 5000},
            (
                "registers: 5255 for each thread with 256x256 and 4 warps, but the device "
                "has 255, or 2040 with spilled ones"
            ),
        ),
        ({"block_q": 128, "block_kv": 64, "stages": 2, "residents": 7}, "residents: 7 blocks, but 2 resident blocks"),
        ({"stages": 9}, "stages: '?9'? must be at most 4"),
    ],
)
def test_a_tile_that_does_not_fit_says_how_much_does(tiling: dict[str, int], message: str) -> None:
    with pytest.raises(NpusimError, match=message):
        run(**tiling)


def test_stages_without_asynchronous_copies_and_fp8_without_its_products_are_refused() -> None:
    with pytest.raises(NpusimError, match="stages: 3 tiles in flight need asynchronous copies, which t4 does not have"):
        run(hw="t4", stages=3)
    with pytest.raises(NpusimError, match="a10 has neither an FP8 matrix unit"):
        run("fp8_attention", hw="a10")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wgmma.m_elements": "48"}, "unknown instruction shape m48nN; wgmma has m64nN"),
        ({"mma.m_elements": "8"}, "unknown instruction shape m8n8; mma.sync has m16n8"),
    ],
)
def test_unknown_instruction_shapes_are_refused(change: dict[str, str], message: str) -> None:
    changes = {f"cores.sm.engines.TENSOR.{key}": value for key, value in change.items()}
    with pytest.raises(NpusimError, match=message):
        apply_overrides(load_device("h200"), changes)


def test_spills_of_all_resident_blocks_share_the_room_of_l2() -> None:
    local = load_device("h200").engine("sm", "SPILL")
    assert isinstance(local, LocalMemoryPipe)
    near, far = local.near_factor.value, local.far_factor.value
    assert [local.missing(n, 1.0) for n in (near, (near + far) / 2, far, 2 * far)] == pytest.approx([0, 0.5, 1, 1])
    # 132 blocks of 256 rows have some 42 MB under way in 256 x 128, half of that on half of the rows.
    tile = {"block_q": 256, "block_kv": 128, "stages": 1, "warps": 4, "registers": 255, "spilled_registers": 698}
    plain, moved = (run(**tile, spilled_accesses=n).timing.link_bytes["hbm"] for n in (0, 1236))
    assert moved > 1.5 * plain
    few = npusim.run("flash", hw="h200", problem=PROBLEM.model_copy(update={"heads": 66, "kv_heads": 66}), tiling=tile)
    assert few.timing.link_bytes["hbm"] < plain


def test_a_compilers_table_says_what_an_iteration_accesses() -> None:
    # measurements/h200_loop_counts.csv: 284 LDL and 222 STL in the loop of 64 x 256, one stage, some of two registers.
    assert compiled_registers("sm_90", "flash", "float16", 128, False, 64, 256, 1, 4) == (255, 284, 81920, 597)
    half = compiled_registers("sm_90", "flash", "float16", 128, True, 64, 64, 2, 4)
    assert half is not None
    assert compiled_registers("sm_90", "flash", "bfloat16", 128, True, 64, 64, 2, 4) == half
    assert compiled_registers("sm_90", "flash", "float16", 96, False, 64, 64, 2, 4) is None


def test_spills_cost_what_they_access_and_an_iteration_its_control_too() -> None:
    tile = {"block_q": 64, "block_kv": 128, "stages": 2, "warps": 4, "registers": 255}
    cycles = [run(**tile, spilled_registers=n).cycles for n in (0, 8, 64, 512)]
    assert cycles == sorted(cycles)
    assert len(set(cycles)) == len(cycles)


def test_what_is_spilled_outside_the_loop_costs_an_iteration_nothing() -> None:
    tile = {"block_q": 64, "block_kv": 128, "stages": 2, "warps": 4, "registers": 255}
    outside = [run(**tile, spilled_registers=100, spilled_accesses=n).cycles for n in (0, 40, 184, 200)]
    assert outside == sorted(outside)
    assert outside[0] == run(**tile, spilled_registers=0).cycles
    assert outside[2] == run(**tile, spilled_registers=100).cycles  # 1.84 each, where nobody counted


@pytest.mark.parametrize("rows", [128, 256])  # of 256, L2 has no room for all
def test_all_methods_agree_with_des_on_tiles_that_spill(rows: int) -> None:
    tile = {"block_q": rows, "block_kv": 128, "stages": 1, "warps": 4}
    assert len({run(**tile, method=m).cycles for m in ("des", "block", "fold", "steady")}) == 1


#: Causal tiles whose masks 8 warps of a core's one block go through at once, and two that other work is beside: rows,
#: keys, stages, warps, head size.
ALONE = ((128, 128, 2, 8, 64), (128, 128, 3, 8, 64), (64, 128, 2, 8, 64), (64, 256, 3, 8, 64), (256, 64, 3, 8, 128))
BESIDE = ((64, 64, 2, 4, 64), (128, 64, 3, 8, 64))


@pytest.mark.parametrize(("tile", "is_apart"), [*((t, True) for t in ALONE), *((t, False) for t in BESIDE)])
def test_masks_of_a_block_alone_are_beside_no_exponentials(tile: tuple[int, ...], is_apart: bool) -> None:
    listed = json.loads((SILICON / "tail_h100.json").read_text())
    rows = [dict(zip(listed["about"]["names"], row, strict=True)) for row in listed["rows"]]
    keys = ("block_q", "block_kv", "stages", "warps", "head_dim")
    (row,) = [r for r in rows if tuple(r[k] for k in keys) == tile and r["causal"] and r["seq"] == 2048]
    problem = Problem(heads=row["heads"], seq_q=2048, head_dim=row["head_dim"], causal=True)
    fields = {name: row[name] for name in keys[:-1]} | {"launch": "in_order"}
    how: dict[str, Any] = {"numerics": False, "trace_groups": (), "l2": "dirty"}
    done = npusim.run("flash", hw="h100", problem=problem, tiling=fields, **how)
    # Beside exponentials those of a block alone were 12 to 27 % too fast.
    assert done.latency_us == pytest.approx(row["us"], rel=0.13)
    phase = done.program.phases[0]
    rows_of_p = [op for op in _ops(phase.body(phase.blocks[0])) if op.label == "rows of P" and op.queue == "sm.B0W0"]
    assert len(rows_of_p) == 1 + is_apart


def _ops(items: Iterable[Item]) -> Iterator[TileOp]:
    """Yield the operations of a block, each loop once."""
    for item in items:
        yield from _ops(item.body(item.indices[0])) if isinstance(item, Loop) else (item,)
