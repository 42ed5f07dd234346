"""What each schedule says its blocks touch in global tensors is what their operations do."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from ir.toy import flatten

from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.ir.tile import GlobalTile
from npusim.schedules import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.config.device import DeviceSpec
    from npusim.ir.program import ProgramPhase, TileProgram

#: Schedule, tiling and problem.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "flash": ("flash", {"block_kv": 64}, {"heads": 2, "seq_q": 197, "seq_kv": 197, "head_dim": 64}),
    "flash, causal": (
        "flash",
        {"block_q": 64, "block_kv": 64},
        {"heads": 2, "kv_heads": 1, "seq_q": 197, "seq_kv": 300, "head_dim": 64, "causal": True},
    ),
    "flash, two bands": (
        "flash",
        {"block_q": 256, "block_kv": 64},
        {"heads": 1, "seq_q": 256, "seq_kv": 200, "head_dim": 64},
    ),
    "flash, wide values": (
        "flash",
        {"block_kv": 64},
        {"heads": 1, "seq_q": 64, "seq_kv": 200, "head_dim": 64, "value_head_dim": 192},
    ),
    "pasa": ("pasa", {}, {"heads": 2, "kv_heads": 1, "seq_q": 197, "seq_kv": 300, "head_dim": 64}),
    "standard": ("standard", {}, {"heads": 2, "seq_q": 197, "seq_kv": 300, "head_dim": 64}),
    "pasa, two bands": (
        "pasa",
        {"block_q": 256, "block_kv": 64},
        {"heads": 1, "seq_q": 256, "seq_kv": 128, "head_dim": 64},
    ),
    "standard, causal": ("standard", {}, {"heads": 1, "seq_q": 300, "seq_kv": 300, "head_dim": 64, "causal": True}),
    "split_kv": (
        "split_kv",
        {"splits": 3, "block_kv": 64},
        {"batch": 2, "heads": 2, "kv_heads": 1, "seq_q": 197, "seq_kv": 300, "head_dim": 64},
    ),
    "split_kv, tree": (
        "split_kv",
        {"splits": 5, "block_kv": 64, "merge": "tree"},
        {"heads": 1, "seq_q": 197, "seq_kv": 300, "head_dim": 64, "causal": True},
    ),
    "flash, sinks and window": (
        "flash",
        {"block_q": 64, "block_kv": 32},
        {"heads": 2, "seq_q": 400, "head_dim": 64, "causal": True, "window": 70, "sinks": 3},
    ),
    "split_kv, sinks and window": (
        "split_kv",
        {"splits": 2, "block_q": 64, "block_kv": 32},
        {"heads": 2, "seq_q": 300, "seq_kv": 400, "head_dim": 64, "causal": True, "window": 70, "sinks": 3},
    ),
    "flash, documents": (
        "flash",
        {"block_q": 64, "block_kv": 32},
        {"heads": 1, "seq_q": 300, "head_dim": 64, "causal": True, "documents": (170, 7, 123)},
    ),
    "two_level": ("two_level", {}, {"heads": 2, "seq_q": 197, "seq_kv": 300, "head_dim": 64}),
}


def build(case: str, device: DeviceSpec) -> TileProgram:
    name, tiling, fields = CASES[case]
    schedule = SCHEDULES[name, device.family]
    return schedule.program(Problem(**fields), build_tiling(schedule.tiling, tiling), device, schedule.precision(None))


def cells(region: GlobalTile) -> set[tuple[int, int, int, int]]:
    return {
        (region.batch, region.head, row, col)
        for row in range(region.row, region.row + region.rows)
        for col in range(region.col, region.col + region.cols)
    }


def actual(phase: ProgramPhase, blocks: Sequence[Any]) -> tuple[Counter[str], dict[str, set[Any]], dict[str, set[Any]]]:
    """Return bytes read by tensor, and the elements read and written."""
    size: Counter[str] = Counter()
    read: dict[str, set[Any]] = defaultdict(set)
    written: dict[str, set[Any]] = defaultdict(set)
    for op in (op for block in blocks for op in flatten(phase.body(block))):
        for step in op.steps:
            for source in step.srcs:
                if isinstance(source, GlobalTile) and source.tensor.name != "mask":
                    size[source.tensor.name] += source.payload_bytes
                    read[source.tensor.name] |= cells(source)
            if isinstance(step.dst, GlobalTile):
                written[step.dst.tensor.name] |= cells(step.dst)
    return size, read, written


@pytest.mark.parametrize("case", CASES)
def test_blocks_read_and_write_the_regions_they_say(case: str, device: DeviceSpec) -> None:
    for phase in build(case, device).phases:
        for blocks in (phase.blocks[:1], phase.blocks[-1:], phase.blocks):
            read: dict[str, set[Any]] = defaultdict(set)
            written: dict[str, set[Any]] = defaultdict(set)
            for touch in phase.footprint(blocks):
                if touch.region.tensor.name != "mask":
                    (written if touch.is_write else read)[touch.region.tensor.name] |= cells(touch.region)
            _, really_read, really_written = actual(phase, blocks)
            assert written == really_written, phase.name
            assert read == really_read, phase.name


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_of_one_head_lies_in_one_region(case: str, device: DeviceSpec) -> None:
    """Blocks of various splits and windows share regions: else one fetch would count as two."""
    for phase in build(case, device).phases:
        regions = {t.region for blocks in phase.blocks for t in phase.footprint([blocks]) if not t.is_write}
        grown: dict[Any, GlobalTile] = {}
        for r in regions:
            at = r.tensor.name, r.batch, r.head, r.row, r.col
            grown[at] = max(r, grown.get(at, r), key=lambda region: region.rows)
        size = Counter(r.tensor.name for r in grown.values() for _ in cells(r))
        one_by_one = {(r.tensor.name, cell) for r in grown.values() for cell in cells(r)}
        assert size == Counter(name for name, _ in one_by_one)


@pytest.mark.parametrize("case", CASES)
def test_blocks_read_their_regions_as_often_as_they_say(case: str, device: DeviceSpec) -> None:
    for phase in build(case, device).phases:
        for blocks in (phase.blocks[:1], phase.blocks[-1:], phase.blocks):
            said: Counter[str] = Counter()
            for touch in phase.footprint(blocks):
                if not touch.is_write and touch.region.tensor.name != "mask":
                    size = touch.region.payload_bytes * touch.times
                    said[touch.region.tensor.name] += size if touch.read_bytes is None else touch.read_bytes
            assert said == actual(phase, blocks)[0], phase.name
