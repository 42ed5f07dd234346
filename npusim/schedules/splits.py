"""How many splits of the keys an attention takes: reckoned from a device's file, not simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.algorithms.split import FEWEST_ROWS, tiles_of
from npusim.formats import get_format
from npusim.ir.tile import GlobalTensor
from npusim.machines.sm.core import has_concurrent_warp_groups
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.algorithms.phase import Phase
    from npusim.config.device import DeviceSpec


@dataclass(frozen=True, slots=True)
class AttentionPace:
    """What attention takes on one core group, in its cycles.

    cell, tile
        The start and end of a cell, and of a tile.
    bytes_per_cycle
        Rate at which the keys and values of a tile are worked on.
    residents
        Blocks that a core group works on beside one another.
    """

    cell: float
    tile: float
    bytes_per_cycle: float
    residents: int = 1


# All fitted to npusim's own cycles, none to a device: one query of qwen2_7b, llama2_70b and
# pangu_38b on 512 to 32k keys, tiles of 32 to 1024 keys, heads of 64 and 128.  Calls come out within
# 3 to 7 % (root mean square; a call of the V100 42 % off), good enough to order splits by.
#: On the 910B2 and the 950.
ASCEND = AttentionPace(cell=4000, tile=700, bytes_per_cycle=100)
#: On the V100.  A second resident block takes half as long again, with 128 rows as long again:
#: none counts.
STAGED = AttentionPace(cell=2300, tile=900, bytes_per_cycle=11.7)
#: On the H200, whose warp groups work beside one another.
BESIDE = AttentionPace(cell=3300, tile=730, bytes_per_cycle=18.1, residents=2)
#: Time of two resident blocks over that of one (H200, 160 and 256 blocks on 132 multiprocessors).
PAIR = 1.5
#: Rows of a block that take no longer than one; beyond, time grows with them (1 to 128, all four).
ROWS = 64
#: A core group's own time t and its share of memory's, s, together: (t^6 + s^6)^(1/6), so that
#: the longer one counts, and more where they are alike.
POWER = 6
#: Cycles of a block of a merge, and of each split that it takes in (within 20 % on all four).
MERGE, MERGED_SPLIT = 1100, 390
#: Splits, at most, as in FlashAttention's num_splits_heuristic (flash_api.cpp).
MOST = 128


class _Reckoned:
    """What an attention takes by its number of splits."""

    def __init__(self, device: DeviceSpec, phase: Phase, fan: int | None) -> None:
        self.device, self.fan, self.groups = device, fan, device.group_count.value
        beside = BESIDE if has_concurrent_warp_groups(device) else STAGED
        pace = ASCEND if device.family == "ascend" else beside
        self.places = self.groups * pace.residents
        counts = [tiles_of(cell) for cell in phase.cells]
        self.cells, self.tiles, self.mean = len(counts), max(counts), sum(counts) / len(counts)
        self.merged = sum(ceil_div(cell.rows, FEWEST_ROWS) for cell in phase.cells)

        inputs = [t for n in "kv" if isinstance(t := phase.tensors[n], GlobalTensor)]
        elements = sum(t.cols * get_format(t.fmt).size_bytes for t in inputs)
        tile_bytes = phase.sizes[phase.loop_axis] * elements
        slower = max(1.0, max(cell.rows for cell in phase.cells) / ROWS)
        self.cell = slower * pace.cell
        self.tile = slower * (pace.tile + tile_bytes / pace.bytes_per_cycle)
        # Blocks of the same keys read them from memory once.
        new = min(1.0, sum(t.size_bytes for t in inputs) / (sum(counts) * tile_bytes))
        rates = [float(device.link(n).bytes_per_s.value) for n in ("hbm", "l2")]
        seconds = tile_bytes * max(new / rates[0], 1 / rates[1])
        self.memory = seconds * float(device.clock_hz.value)

    def _together(self, blocks: int, splits: int) -> float:
        """Return the cycles of so many blocks that run at a time."""
        own = ceil_div(self.tiles, splits) * self.tile * (PAIR if blocks > self.groups else 1)
        shared = blocks * self.mean / splits * self.memory
        return self.cell + float((own**POWER + shared**POWER) ** (1 / POWER))

    def times_s(self, splits: int) -> tuple[float, float]:
        """Return the times of a call and of its cores; of an untimed device both are its cores'."""
        blocks = [self.cells * splits]
        rounds, rest = divmod(blocks[0], self.places)
        cycles = rounds * self._together(self.places, splits) if rounds else 0.0
        cycles += self._together(rest, splits) if rest else 0.0
        while splits > 1:
            each = min(self.fan or splits, splits)
            splits = ceil_div(splits, each)
            blocks.append(self.merged * splits)
            cycles += ceil_div(blocks[-1], self.groups) * (MERGE + MERGED_SPLIT * each)
        core = self.device.seconds(cycles)
        call = self.device.launched(core, blocks)[0]["call"] if self.device.is_timed else core
        return call, core


def best_splits(device: DeviceSpec, phase: Phase, fan: int | None) -> int:
    """Return the splits with which a call takes least time, or its cores where calls are alike.

    ``phase`` is the attention before it is split; ``fan``: how many partial outputs a step of the
    merge takes in, None for all.  A call's time is what a run states as its latency.
    """
    reckoned = _Reckoned(device, phase, fan)
    return min(range(1, min(MOST, reckoned.tiles) + 1), key=reckoned.times_s)
