"""How attention runs on a decoupled CUBE/Vector core group (ascend.md section 2).

Four stages a tile of keys: C1 (S = Q K^T on the AIC), V1 (softmax steps on the AIVs), C2 (P V on
the AIC), V2 (rescale and add on the AIVs).  C1 and V1 run ``lead`` tiles ahead of C2 and V2
(pre-launch), so that matrix and vector units work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.ir.op import Attributes, Opcode, Step, TileOp
from npusim.ir.program import Item, Loop
from npusim.ir.tile import RingTile, Tile
from npusim.schedules.attention_blocks import AttentionBlock, KvRun, KvTile, tile_at
from npusim.schedules.attention_tensors import AttentionTensors
from npusim.schedules.on_ascend import (
    FIXP, L0_EDGE, MTE1, MTE2, AscendGroup, RowSlice, VectorCore, compute, move, pass_on, product,
)  # fmt: skip
from npusim.schedules.steps.attention import AttentionSteps
from npusim.schedules.steps.table import bind
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from npusim.ir.buffers import Ring
    from npusim.ir.op import Source
    from npusim.schedules.tiling_mask import TilingMask


@dataclass(frozen=True, slots=True)
class AscendAttentionTiling:
    """What the mapping needs of a schedule's tiling fields."""

    block_q: int
    block_kv: int
    vector_rows: int
    lead: int  #: tiles that C1 and V1 run ahead; slots between the cores number one more
    ack_period: int = 1


#: Elements of a softmax slice in the vendor's kernels: 16 x 512 (CATLASS), 32 x 256 (PTO); ascend.md 2.1.
SLICE_ELEMENTS = 8192


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

    def _place(self, group: AscendGroup, tiling: AscendAttentionTiling, mask: TilingMask | None) -> None:
        core, f, ub = self.core, self.steps.formats, self.core.ub
        tile, ring = group.allocator.tile, group.allocator.ring
        scores, update = self.slice_rows * self.block_kv, self.update_rows * self.value_dim

        def size(name: str, elements: int) -> int:
            return elements * get_format(f[name]).size_bytes

        into = {"producers": [core.load], "consumers": [core.vector]}
        out_of = {"producers": [core.vector], "consumers": [core.store]}
        self.scores_in = ring(ub, "S", size("S_in", scores), 2, **into)
        self.p_out = ring(ub, "P", size("P_out", scores), 2, **out_of)
        self.t_in = ring(ub, "O_tmp", size("T_in", update), 1, **into)
        self.out = ring(ub, "out", size("out", update), 1, **out_of)
        # One slot: only the tiles on the diagonal need a mask.
        self.mask = ring(ub, "mask", scores, 1, **into) if mask else None
        self.o = tile(ub, "O", self.rows, self.value_dim, f["O"])
        self.kept: dict[str, Tile] = {}
        for name in dict.fromkeys(self._storage.values()):
            if name in ("S_in", "P_out", "T_in", "O", "out") or name in self.steps.carried:
                continue
            rows, cols = self._work_shape(name)
            self.kept[name] = tile(ub, name, rows, cols, f[name])
        vector = {"producers": [core.vector], "consumers": [core.vector]}
        self.carried: dict[str, Ring] = {
            name: ring(ub, name, size(name, self.rows), tiling.lead + 1, **vector)
            for name in self.steps.carried
        }
        # Block reduction leaves one value a 32-byte block before the next pass.
        tile(ub, "reduction", self.slice_rows, ceil_div(self.block_kv, 8), f["P"])

    def _work_shape(self, name: str) -> tuple[int, int]:
        if name in self.steps.row_vectors():
            return (self.rows if name in self.steps.state else max(self.slice_rows, self.update_rows)), 1
        if name in self.steps.output_tiles:
            return self.update_rows, self.value_dim
        return self.slice_rows, self.block_kv

    def slices(self, rows: list[RowSlice], size: int) -> list[RowSlice]:
        """Return this core's rows cut anew into slices of ``size``."""
        if not rows:
            return []
        start, total = rows[0].row, sum(r.rows for r in rows)
        return [
            RowSlice(start + r, n, r == 0, r + size >= total) for r, n in chunks(total, size)
        ]

    def bindings(self, part: RowSlice, own_row: int, views: dict[str, Source], carried_write: bool) -> dict[str, Source]:
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


class AscendAttention:
    """Emits the items of attention blocks; schedules supply steps, tiling, mask and tensors."""

    def __init__(
        self, group: AscendGroup, tensors: AttentionTensors, steps: AttentionSteps,
        tiling: AscendAttentionTiling, mask: TilingMask | None = None,
    ) -> None:  # fmt: skip
        if steps.accumulate == "chained":
            raise TilingError(
                f"accumulate=chained: P V cannot go on adding to O on {group.device.name}: O lives in UB, the "
                "matrix unit adds in L0C, and no path leads from UB to L0C; use accumulate=fresh"
            )
        self.group, self.tensors, self.steps = group, tensors, steps
        self.tiling, self.mask = tiling, mask
        f = steps.formats
        chosen = steps.arithmetic
        self.qk = Attributes(transpose_b=True, arithmetic=chosen or group.arithmetic(tensors.q.fmt))
        self.pv = Attributes(arithmetic=chosen or group.arithmetic(f["P_out"]))
        self._place_rings()
        self.vectors = [
            VectorShare(group, core, steps, tiling, tensors.v.cols, mask) for core in group.vector_cores
        ]
        group.allocator.check()

    def _place_rings(self) -> None:
        g, t, f = self.group, self.tensors, self.steps.formats
        q, kv, slots = self.tiling.block_q, self.tiling.block_kv, self.tiling.lead + 1
        edge, period = min(L0_EDGE, kv), self.tiling.ack_period
        self.cube = g.cube
        self.q_l1 = g.l1_ring("Q", q, t.q.cols, t.q.fmt, depth=1)
        self.k_l1 = g.l1_ring("K", edge, t.k.cols, t.k.fmt)
        self.v_l1 = g.l1_ring("V", edge, t.v.cols, t.v.fmt)
        self.p_l1 = g.l1_ring("P", min(q, L0_EDGE), edge, f["P_out"])
        loads = [v.load for v in g.vector_cores]
        stores = [v.store for v in g.vector_cores]
        cross = g.cross_ring
        self.s_gm = cross("S slots", q, kv, f["S_in"], slots, producers=[FIXP], consumers=loads, period=period)
        self.p_gm = cross("P slots", q, kv, f["P_out"], slots, producers=stores, consumers=[MTE2], period=period)
        self.t_gm = cross("O_tmp slots", q, t.v.cols, f["T_in"], slots, producers=[FIXP], consumers=loads, period=period)

    # ---------------------------------------------------------------- blocks

    def block(self, block: AttentionBlock) -> Iterator[Item]:
        """Yield one Q block of one head, from its load to its output, in program order."""
        shares = self.group.row_slices(block.rows, self.vectors[0].slice_rows)
        q = self.q_l1.fill(block.rows, self.tensors.q.cols, self.tensors.q.fmt)
        yield move("Q.load", MTE2, q, self.tensors.q.tile(block.batch, block.head, block.row, block.rows))
        yield pass_on("Q.take", MTE1, self._q(block, first=True, last=False))
        for vector, rows in zip(self.vectors, shares, strict=True):
            yield from self._start(vector, rows)
        yield from prelaunched(
            block.runs, self.tiling.lead,
            lambda tile: self._scores(block, tile, shares),
            lambda tile: self._values(block, tile, shares),
        )  # fmt: skip
        yield pass_on("Q.release", MTE1, self._q(block, first=False, last=True))
        for vector, rows in zip(self.vectors, shares, strict=True):
            yield from self._finish(vector, block, rows)

    def _q(self, block: AttentionBlock, *, first: bool, last: bool) -> RingTile:
        return self.q_l1.front(block.rows, self.tensors.q.cols, self.tensors.q.fmt, first=first, last=last)

    def _start(self, vector: VectorShare, rows: list[RowSlice]) -> Iterator[TileOp]:
        count = sum(r.rows for r in rows)
        if not count:
            return
        fills = [Step(Opcode.FILL, vector.o.part(0, count), (0.0,))]
        for name, value in self.steps.state.items():
            fills.append(Step(Opcode.FILL, vector.kept[name].part(0, count), (value,)))
        yield compute("state.start", vector.core.vector, fills)

    def _finish(self, vector: VectorShare, block: AttentionBlock, rows: list[RowSlice]) -> Iterator[TileOp]:
        out, fmt = self.tensors.o, self.steps.formats["out"]
        for part in vector.slices(rows, vector.update_rows):
            shape = (part.rows, out.cols, fmt)
            bound = vector.bindings(part, part.row - rows[0].row, {"out": vector.out.fill(*shape)}, False)
            yield compute("finish", vector.core.vector, bind(self.steps.finish, bound))
            target = out.tile(block.batch, block.head, block.row + part.row, part.rows)
            yield move("O.store", vector.core.store, target, vector.out.front(*shape))

    # ---------------------------------------------------------------- C1, V1

    def _scores(self, block: AttentionBlock, tile: KvTile, shares: list[list[RowSlice]]) -> Iterator[TileOp]:
        yield from self._c1(block, tile)
        for vector, rows in zip(self.vectors, shares, strict=True):
            yield from self._v1(vector, block, tile, rows)

    def _c1(self, block: AttentionBlock, tile: KvTile) -> Iterator[TileOp]:
        k, fmt = self.tensors.k, self.steps.formats["S_in"]
        pieces = list(chunks(tile.cols, L0_EDGE))
        bands = list(chunks(block.rows, L0_EDGE))
        for piece, (col, width) in enumerate(pieces):
            source = k.tile(block.batch, block.kv_head, tile.col + col, width)
            yield move("K.load", MTE2, self.k_l1.fill(width, k.cols, k.fmt), source)
            for band, (row, rows) in enumerate(bands):
                yield from product(
                    "S", self.cube, rows, width, k.cols,
                    left=self._q_part(block, row, rows), right=self._k_part(width, band, len(bands)),
                    attributes=self.qk,
                )  # fmt: skip
                first, last = piece + band == 0, (piece, band) == (len(pieces) - 1, len(bands) - 1)
                slot = self.s_gm.fill(block.rows, self.tiling.block_kv, fmt, first=first, last=last)
                done = self.cube.accumulator.front(rows, width, "float32")
                yield move("S.drain", FIXP, slot.part(row, rows, col, width), done)

    def _q_part(self, block: AttentionBlock, row: int, rows: int) -> Callable[[int, int], RingTile]:
        return lambda k, size: self._q(block, first=False, last=False).part(row, rows, k, size)

    def _k_part(self, width: int, band: int, bands: int) -> Callable[[int, int], RingTile]:
        k = self.tensors.k

        def part(at: int, size: int) -> RingTile:
            first, last = band + at == 0, band == bands - 1 and at + size == k.cols
            return self.k_l1.front(width, k.cols, k.fmt, first=first, last=last).part(0, width, at, size)

        return part

    def _v1(
        self, vector: VectorShare, block: AttentionBlock, tile: KvTile, rows: list[RowSlice]
    ) -> Iterator[TileOp]:
        core, f, kv = vector.core, self.steps.formats, self.tiling.block_kv
        s_slot = self.s_gm.front(block.rows, kv, f["S_in"])
        p_slot = self.p_gm.fill(block.rows, kv, f["P_out"])
        if not rows:
            yield pass_on("S.skip", core.load, s_slot)
            carried = [r.fill(vector.rows, 1, f[n]) for n, r in vector.carried.items()]
            yield pass_on("rescale.skip", core.vector, *carried)
            yield pass_on("P.skip", core.store, p_slot)
        for part in rows:
            shape = (part.rows, tile.cols)
            source = s_slot.held(first=part.first, last=part.last).part(part.row, part.rows, 0, tile.cols)
            yield move("S.load", core.load, vector.scores_in.fill(*shape, f["S_in"]), source)
            views: dict[str, Source] = {
                "S_in": vector.scores_in.front(*shape, f["S_in"]),
                "P_out": vector.p_out.fill(*shape, f["P_out"]),
            }
            if tile.is_masked and self.mask and vector.mask:
                cut = self.mask.cut(block.row + part.row, part.rows, tile.col, tile.cols, block.causal_offset)
                yield move("mask.load", core.load, vector.mask.fill(*shape, "int8"), cut)
                views["mask"] = vector.mask.front(*shape, "int8")
            bound = vector.bindings(part, part.row - rows[0].row, views, True)
            bound.update(self.steps.per_tile(tile.index, tile.cols))
            yield compute("softmax", core.vector, bind(self.steps.softmax, bound))
            target = p_slot.held(first=part.first, last=part.last).part(part.row, part.rows, 0, tile.cols)
            yield move("P.store", core.store, target, vector.p_out.front(*shape, f["P_out"]))

    # ---------------------------------------------------------------- C2, V2

    def _values(self, block: AttentionBlock, tile: KvTile, shares: list[list[RowSlice]]) -> Iterator[TileOp]:
        yield from self._c2(block, tile)
        for vector, rows in zip(self.vectors, shares, strict=True):
            yield from self._v2(vector, block, rows)

    def _c2(self, block: AttentionBlock, tile: KvTile) -> Iterator[TileOp]:
        f, v = self.steps.formats, self.tensors.v
        pieces = list(chunks(tile.cols, L0_EDGE))
        corners = [(b, c) for b in chunks(block.rows, L0_EDGE) for c in chunks(v.cols, L0_EDGE)]
        p_slot = self.p_gm.front(block.rows, self.tiling.block_kv, f["P_out"])
        t_slot = self.t_gm.fill(block.rows, v.cols, f["T_in"])
        for corner, ((row, rows), (col, cols)) in enumerate(corners):
            for piece, (at, width) in enumerate(pieces):
                head = corner + piece == 0
                tail = (corner, piece) == (len(corners) - 1, len(pieces) - 1)
                source = v.tile(block.batch, block.kv_head, tile.col + at, width, col, cols)
                yield move("V.load", MTE2, self.v_l1.fill(width, cols, v.fmt), source)
                part = p_slot.held(first=head, last=tail).part(row, rows, at, width)
                yield move("P.load", MTE2, self.p_l1.fill(rows, width, f["P_out"]), part)
                p_tile = self.p_l1.front(rows, width, f["P_out"])
                v_tile = self.v_l1.front(width, cols, v.fmt)
                yield from product(
                    "PV", self.cube, rows, cols, width,
                    left=lambda k, n, p=p_tile: p, right=lambda k, n, v=v_tile: v,
                    attributes=self.pv, start=piece == 0, end=piece == len(pieces) - 1,
                )  # fmt: skip
            slot = t_slot.held(first=corner == 0, last=corner == len(corners) - 1)
            done = self.cube.accumulator.front(rows, cols, "float32")
            yield move("O_tmp.drain", FIXP, slot.part(row, rows, col, cols), done)

    def _v2(self, vector: VectorShare, block: AttentionBlock, rows: list[RowSlice]) -> Iterator[TileOp]:
        core, f, cols = vector.core, self.steps.formats, self.tensors.v.cols
        slot = self.t_gm.front(block.rows, cols, f["T_in"])
        if not rows:
            yield pass_on("O_tmp.skip", core.load, slot)
            carried = [r.front(vector.rows, 1, f[n]) for n, r in vector.carried.items()]
            yield pass_on("rescale.release", core.vector, *carried)
        for part in vector.slices(rows, vector.update_rows):
            shape = (part.rows, cols, f["T_in"])
            source = slot.held(first=part.first, last=part.last).part(part.row, part.rows)
            yield move("O_tmp.load", core.load, vector.t_in.fill(*shape), source)
            bound = vector.bindings(part, part.row - rows[0].row, {"T_in": vector.t_in.front(*shape)}, False)
            yield compute("update", core.vector, bind(self.steps.update, bound))


Stage = Callable[[KvTile], Iterable[TileOp]]


def prelaunched(runs: tuple[KvRun, ...], lead: int, first: Stage, second: Stage) -> Iterator[Item]:
    """Yield two stages over the tiles of ``runs``, ``first`` running ``lead`` tiles ahead.

    Step n does ``first`` of tile n, then ``second`` of tile n - lead.  Consecutive steps whose two
    tiles have the same shapes are one :class:`Loop`.
    """
    total = sum(r.count for r in runs)
    edges = {0, total, total + lead}
    at = 0
    for run in runs:
        edges |= {at, at + lead}
        at += run.count
    cuts = sorted(e for e in edges if e <= total + lead)

    def step(n: int) -> Iterator[TileOp]:
        if n < total:
            yield from first(tile_at(runs, n))
        if n >= lead:
            yield from second(tile_at(runs, n - lead))

    for start, end in zip(cuts, cuts[1:], strict=False):
        if end - start == 1:
            yield from step(start)
        else:
            yield Loop("kv", range(start, end), step)
