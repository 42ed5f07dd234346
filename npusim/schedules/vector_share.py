"""One AIV's part in an attention tile: its memory, and step tables bound to slices of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.formats import get_format
from npusim.ir.tile import RingTile, Tile
from npusim.schedules.on_ascend import (
    PING_PONG,
    SLICE_ELEMENTS,
    UB_BLOCK_BYTES,
    AscendGroup,
    RowSlice,
    VectorCore,
)
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from npusim.ir.buffers import Ring
    from npusim.ir.op import Source
    from npusim.schedules.attention_blocks import Deal
    from npusim.schedules.steps.attention import AttentionSteps
    from npusim.schedules.tiling_mask import TilingMask


@dataclass(frozen=True, slots=True)
class AscendAttentionTiling:
    """What the mapping needs of a schedule's tiling fields."""

    block_q: int
    block_kv: int
    vector_rows: int
    lead: int  #: tiles that C1 and V1 run ahead; slots between the cores number one more
    deal: Deal = "round_robin"
    ack_period: int = 1


def slice_rows(chosen: int | None, block_kv: int) -> int:
    """Return the rows of a softmax slice: as chosen, or as many as make a slice of 8192 elements."""
    return chosen or max(1, SLICE_ELEMENTS // block_kv)


class VectorShare:
    """One AIV's memory: rings to and from GM, running state, scratch; binds step tables to slices."""

    def __init__(
        self, group: AscendGroup, core: VectorCore, steps: AttentionSteps, tiling: AscendAttentionTiling,
        value_dim: int, mask: TilingMask | None,
    ) -> None:  # fmt: skip
        self.core, self.steps, self.value_dim = core, steps, value_dim
        self.block_kv = tiling.block_kv
        self.rows = group.largest_share(tiling.block_q)
        self.slice_rows = min(tiling.vector_rows, self.rows)
        # O_tmp is updated in slices of as many elements as the scores' (CATLASS: 16 x 512 = 64 x 128).
        self.update_rows = max(1, min(self.rows, self.slice_rows * tiling.block_kv // value_dim))
        self._storage = steps.storage()
        self._place(group, tiling, mask)

    def _place(
        self, group: AscendGroup, tiling: AscendAttentionTiling, mask: TilingMask | None
    ) -> None:
        core, f, ub = self.core, self.steps.formats, self.core.ub
        tile = group.allocator.tile
        scores, update = self.slice_rows * self.block_kv, self.update_rows * self.value_dim

        def size(name: str, elements: int) -> int:
            return elements * get_format(f[name]).size_bytes

        self.scores_in = group.ub_in(core, "S", size("S_in", scores), PING_PONG)
        self.p_out = group.ub_out(core, "P", size("P_out", scores), PING_PONG)
        self.t_in = group.ub_in(core, "O_tmp", size("T_in", update), 1)
        self.out = group.ub_out(core, "out", size("out", update), 1)
        # One slot: only the tiles on the diagonal need a mask.
        self.mask = group.ub_in(core, "mask", scores, 1) if mask else None
        self.o = tile(ub, "O", self.rows, self.value_dim, f["O"])
        self.kept: dict[str, Tile] = {}
        for name in dict.fromkeys(self._storage.values()):
            if name in ("S_in", "P_out", "T_in", "O", "out") or name in self.steps.carried:
                continue
            rows, cols = self._work_shape(name)
            self.kept[name] = tile(ub, name, rows, cols, f[name])
        self.carried: dict[str, Ring] = {
            name: group.ub_kept(core, name, size(name, self.rows), tiling.lead + 1)
            for name in self.steps.carried
        }
        # Block reduction leaves one value a 32-byte block before the next pass.
        blocks = ceil_div(self.block_kv * get_format(f["P"]).size_bytes, UB_BLOCK_BYTES)
        tile(ub, "reduction", self.slice_rows, blocks, f["P"])

    def _work_shape(self, name: str) -> tuple[int, int]:
        if name in self.steps.row_vectors():
            return (
                self.rows if name in self.steps.state else max(self.slice_rows, self.update_rows)
            ), 1
        if name in self.steps.output_tiles:
            return self.update_rows, self.value_dim
        return self.slice_rows, self.block_kv

    def slices(self, rows: list[RowSlice], size: int) -> list[RowSlice]:
        """Return this core's rows cut anew into slices of ``size``."""
        if not rows:
            return []
        start, total = rows[0].row, sum(r.rows for r in rows)
        return [RowSlice(start + r, n, r == 0, r + size >= total) for r, n in chunks(total, size)]

    def bindings(
        self, part: RowSlice, own_row: int, views: dict[str, Source], carried_write: bool
    ) -> dict[str, Source]:
        """Return ``{name: operand}`` for one slice; ``views`` gives the slots of this slice.

        ``own_row`` is the slice's first row within this core's share.
        """
        found: dict[str, Source] = dict(self.steps.constants)
        for name, place in self._storage.items():
            if place in views:
                found[name] = views[place]
            elif place == "O":
                found[name] = self.o.part(own_row, part.rows)
            elif place in self.carried:
                found[name] = self._carried(place, part, own_row, carried_write)
            elif place in self.kept:
                found[name] = self._kept(place, part, own_row, views)
        found.update(views)
        return found

    def _carried(self, name: str, part: RowSlice, own_row: int, write: bool) -> RingTile:
        ring, fmt = self.carried[name], self.steps.formats[name]
        get = ring.fill if write else ring.front
        return get(self.rows, 1, fmt, first=part.first, last=part.last).part(own_row, part.rows)

    def _kept(self, name: str, part: RowSlice, own_row: int, views: dict[str, Source]) -> Tile:
        tile = self.kept[name]
        if name in self.steps.state:
            return tile.part(own_row, part.rows)
        if tile.cols == 1:
            return tile.part(0, part.rows)
        slot = next(iter(views.values()))
        return tile.part(0, part.rows, 0, slot.cols if isinstance(slot, RingTile) else tile.cols)
