"""What each schedule says its blocks touch in global tensors is what their operations do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ir.toy import flatten

from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.library import SCHEDULES
from npusim.program.ir.tile import GlobalTile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import ProgramPhase, TileProgram

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


class Elements(dict[tuple[str, int, int], np.ndarray[Any, Any]]):
    """How often each element of a tensor was marked, a matrix a head."""

    def mark(self, region: GlobalTile) -> None:
        tensor = region.tensor
        shape = tensor.rows_of(region.batch), tensor.cols
        assert region.row + region.rows <= shape[0]
        assert region.col + region.cols <= shape[1]
        counts = self.setdefault((tensor.name, region.batch, region.head), np.zeros(shape, np.int64))
        counts[region.row : region.row + region.rows, region.col : region.col + region.cols] += 1

    def same_as(self, other: Elements) -> bool:
        """Return whether the same elements were marked, however often."""
        return self.keys() == other.keys() and all(
            ((counts > 0) == (other[at] > 0)).all() for at, counts in self.items()
        )


def actual(phase: ProgramPhase, blocks: Sequence[Any]) -> tuple[Counter[str], Elements, Elements]:
    """Return bytes read by tensor, and the elements read and written."""
    size: Counter[str] = Counter()
    read, written = Elements(), Elements()
    for op in (op for block in blocks for op in flatten(phase.body(block))):
        for step in op.steps:
            for source in step.srcs:
                if isinstance(source, GlobalTile) and source.tensor.name != "mask":
                    size[source.tensor.name] += source.payload_bytes
                    read.mark(source)
            if isinstance(step.dst, GlobalTile):
                written.mark(step.dst)
    return size, read, written


@pytest.mark.parametrize("case", CASES)
def test_blocks_read_and_write_the_regions_they_say_as_often_as_they_say(case: str, device: DeviceSpec) -> None:
    for phase in build(case, device).phases:
        for blocks in (phase.blocks[:1], phase.blocks[-1:], phase.blocks):
            said: Counter[str] = Counter()
            read, written = Elements(), Elements()
            for touch in phase.footprint(blocks):
                if touch.region.tensor.name != "mask":
                    (written if touch.is_write else read).mark(touch.region)
                    if not touch.is_write:
                        size = touch.region.payload_bytes * touch.times
                        said[touch.region.tensor.name] += size if touch.read_bytes is None else touch.read_bytes
            really_said, really_read, really_written = actual(phase, blocks)
            assert written.same_as(really_written), phase.name
            assert read.same_as(really_read), phase.name
            assert said == really_said, phase.name


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_of_one_head_lies_in_one_region(case: str, device: DeviceSpec) -> None:
    """Blocks of various splits and windows share regions: else one fetch would count as two."""
    for phase in build(case, device).phases:
        regions = {t.region for blocks in phase.blocks for t in phase.footprint([blocks]) if not t.is_write}
        grown: dict[Any, GlobalTile] = {}
        for r in regions:
            at = r.tensor.name, r.batch, r.head, r.row, r.col
            grown[at] = max(r, grown.get(at, r), key=lambda region: region.rows)
        elements = Elements()
        for r in grown.values():
            elements.mark(r)
        assert all(counts.max() <= 1 for counts in elements.values())
