"""How attention runs on a decoupled CUBE/Vector core group (ascend.md section 2).

Four stages a tile of keys: C1 (S = Q K^T on the AIC), V1 (softmax steps on the AIVs), C2 (P V on
the AIC), V2 (rescale and add on the AIVs).  C1 and V1 run ``lead`` tiles ahead of C2 and V2
(pre-launch), so that matrix and vector units work at the same time.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.ir.op import Attributes, Opcode, Step, TileOp
from npusim.ir.program import Body, Item, Loop, Touch
from npusim.schedules.attention_blocks import (
    AttentionBlock,
    Corner,
    KvRun,
    KvTile,
    StageCorner,
    StageShape,
    Static,
    run_at,
    stage_at,
    stage_of,
)
from npusim.schedules.on_ascend import (
    FIXP,
    L0_EDGE,
    MTE1,
    MTE2,
    AscendGroup,
    RowSlice,
    compute,
    move,
    pass_on,
    product,
    whole,
)  # fmt: skip
from npusim.schedules.steps.table import bind
from npusim.schedules.vector_share import AscendAttentionTiling, VectorShare
from npusim.units import chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from npusim.ir.op import Source
    from npusim.ir.tile import RingTile
    from npusim.schedules.attention_tensors import AttentionTensors
    from npusim.schedules.steps.attention import AttentionSteps
    from npusim.schedules.tiling_mask import TilingMask


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
            VectorShare(group, core, steps, tiling, tensors.v.cols, mask)
            for core in group.vector_cores
        ]
        group.allocator.check()

    def _place_rings(self) -> None:
        g, t, f = self.group, self.tensors, self.steps.formats
        q, kv, slots = self.tiling.block_q, self.tiling.block_kv, self.tiling.lead + 1
        edge, period = min(L0_EDGE, kv), self.tiling.ack_period
        wider = max(t.q.fmt, f["P_out"], key=lambda fmt: get_format(fmt).size_bytes)
        self.cube = g.cube_rings(
            "", min(L0_EDGE, q), min(L0_EDGE, max(kv, t.v.cols)), min(L0_EDGE, max(kv, t.q.cols)),
            operand=wider, accumulator=self.qk.accumulator_format,
        )  # fmt: skip
        self.q_l1 = g.l1_ring("Q", q, t.q.cols, t.q.fmt, depth=1)
        self.k_l1 = g.l1_ring("K", edge, t.k.cols, t.k.fmt)
        self.v_l1 = g.l1_ring("V", edge, t.v.cols, t.v.fmt)
        self.p_l1 = g.l1_ring("P", min(q, L0_EDGE), edge, f["P_out"])
        loads = [v.load for v in g.vector_cores]
        stores = [v.store for v in g.vector_cores]
        cross = g.cross_ring
        self.s_gm = cross(
            "S slots", q, kv, f["S_in"], slots, producers=[FIXP], consumers=loads, period=period
        )
        self.p_gm = cross(
            "P slots", q, kv, f["P_out"], slots, producers=stores, consumers=[MTE2], period=period
        )
        self.t_gm = cross(
            "O_tmp slots",
            q,
            t.v.cols,
            f["T_in"],
            slots,
            producers=[FIXP],
            consumers=loads,
            period=period,
        )

    def touches(self, blocks: Sequence[AttentionBlock]) -> Iterator[Touch]:
        """Yield what blocks in step read and write."""
        return self.tensors.touches(blocks, L0_EDGE)

    # ---------------------------------------------------------------- blocks

    def block(self, block: AttentionBlock) -> Iterator[Item]:
        """Yield one Q block of one head, from its load to its output, in program order."""
        static = block.rows, block.causal_offset
        at = block.batch, block.head, block.kv_head, block.row

        def stage(number: int, tile: KvTile) -> Body:
            return Body((self._scores, self._values)[number], *stage_of(block, tile))

        yield Loop("start", (0,), Body(self._open, static, at))
        yield from prelaunched(block.runs, self.tiling.lead, stage)
        yield Loop("finish", (0,), Body(self._close, static, at))

    def _shares(self, block: AttentionBlock) -> list[list[RowSlice]]:
        return self.group.row_slices(block.rows, self.vectors[0].slice_rows)

    def _open(self, static: Static, at: Corner, _index: int) -> Iterator[TileOp]:
        block = AttentionBlock(*at, *static, ())
        tensor, shares = self.tensors.q, self._shares(block)
        source = tensor.tile(block.batch, block.head, block.row, block.rows)
        yield move("Q.load", MTE2, self.q_l1.fill(block.rows, tensor.cols, tensor.fmt), source)
        yield pass_on("Q.take", MTE1, self._q(block, first=True, last=False))
        for vector, rows in zip(self.vectors, shares, strict=True):
            yield from self._start(vector, rows)

    def _close(self, static: Static, at: Corner, _index: int) -> Iterator[TileOp]:
        block = AttentionBlock(*at, *static, ())
        yield pass_on("Q.release", MTE1, self._q(block, first=False, last=True))
        for vector, rows in zip(self.vectors, self._shares(block), strict=True):
            yield from self._finish(vector, block, rows)

    def _q(self, block: AttentionBlock, *, first: bool, last: bool) -> RingTile:
        return self.q_l1.front(
            block.rows, self.tensors.q.cols, self.tensors.q.fmt, first=first, last=last
        )

    def _start(self, vector: VectorShare, rows: list[RowSlice]) -> Iterator[TileOp]:
        count = sum(r.rows for r in rows)
        if not count:
            return
        fills = [Step(Opcode.FILL, vector.o.part(0, count), (0.0,))]
        for name, value in self.steps.state.items():
            fills.append(Step(Opcode.FILL, vector.kept[name].part(0, count), (value,)))
        yield compute("state.start", vector.core.vector, fills)

    def _finish(
        self, vector: VectorShare, block: AttentionBlock, rows: list[RowSlice]
    ) -> Iterator[TileOp]:
        out, fmt = self.tensors.o, self.steps.formats["out"]
        for part in vector.slices(rows, vector.update_rows):
            shape = (part.rows, out.cols, fmt)
            bound = vector.bindings(
                part, part.row - rows[0].row, {"out": vector.out.fill(*shape)}, False
            )
            yield compute("finish", vector.core.vector, bind(self.steps.finish, bound))
            target = out.tile(block.batch, block.head, block.row + part.row, part.rows)
            yield move("O.store", vector.core.store, target, vector.out.front(*shape))

    # ---------------------------------------------------------------- C1, V1

    def _scores(self, static: StageShape, at: StageCorner, _index: int) -> Iterator[TileOp]:
        block, tile = stage_at(static, at)
        yield from self._c1(block, tile)
        for vector, rows in zip(self.vectors, self._shares(block), strict=True):
            yield from self._v1(vector, block, tile, rows)

    def _c1(self, block: AttentionBlock, tile: KvTile) -> Iterator[TileOp]:
        k, fmt = self.tensors.k, self.steps.formats["S_in"]
        pieces = list(chunks(tile.cols, L0_EDGE))
        bands = list(chunks(block.rows, L0_EDGE))
        for piece, (col, width) in enumerate(pieces):
            source = k.tile(block.batch, block.kv_head, tile.col + col, width)
            yield move("K.load", MTE2, self.k_l1.fill(width, k.cols, k.fmt), source, name="k")
            for band, (row, rows) in enumerate(bands):
                yield from product(
                    "S", self.cube, rows, width, k.cols,
                    left=self._q_part(block, row, rows), right=self._k_part(width, band, len(bands)),
                    attributes=self.qk,
                )  # fmt: skip
                first, last = piece + band == 0, (piece, band) == (len(pieces) - 1, len(bands) - 1)
                slot = self.s_gm.fill(block.rows, self.tiling.block_kv, fmt, first=first, last=last)
                done = self.cube.accumulator.front(rows, width, self.qk.accumulator_format)
                stored = slot.part(row, rows, col, width)
                yield move("S.drain", FIXP, stored, done, name="S_in")

    def _q_part(self, block: AttentionBlock, row: int, rows: int) -> Callable[[int, int], RingTile]:
        return lambda k, size: self._q(block, first=False, last=False).part(row, rows, k, size)

    def _k_part(self, width: int, band: int, bands: int) -> Callable[[int, int], RingTile]:
        k = self.tensors.k

        def part(at: int, size: int) -> RingTile:
            first, last = band + at == 0, band == bands - 1 and at + size == k.cols
            return self.k_l1.front(width, k.cols, k.fmt, first=first, last=last).part(
                0, width, at, size
            )

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
            source = s_slot.held(first=part.first, last=part.last).part(
                part.row, part.rows, 0, tile.cols
            )
            yield move("S.load", core.load, vector.scores_in.fill(*shape, f["S_in"]), source)
            views: dict[str, Source] = {
                "S_in": vector.scores_in.front(*shape, f["S_in"]),
                "P_out": vector.p_out.fill(*shape, f["P_out"]),
            }
            if tile.is_masked and self.mask and vector.mask:
                cut = self.mask.cut(
                    block.row + part.row, part.rows, tile.col, tile.cols, block.causal_offset
                )
                yield move("mask.load", core.load, vector.mask.fill(*shape, "int8"), cut)
                views["mask"] = vector.mask.front(*shape, "int8")
            bound = vector.bindings(part, part.row - rows[0].row, views, True)
            bound.update(self.steps.per_tile(tile.index, tile.cols))
            yield compute("softmax", core.vector, bind(self.steps.softmax, bound))
            target = p_slot.held(first=part.first, last=part.last).part(
                part.row, part.rows, 0, tile.cols
            )
            yield move("P.store", core.store, target, vector.p_out.front(*shape, f["P_out"]))

    # ---------------------------------------------------------------- C2, V2

    def _values(self, static: StageShape, at: StageCorner, _index: int) -> Iterator[TileOp]:
        block, tile = stage_at(static, at)
        yield from self._c2(block, tile)
        for vector, rows in zip(self.vectors, self._shares(block), strict=True):
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
                    left=whole(p_tile), right=whole(v_tile),
                    attributes=self.pv, start=piece == 0, end=piece == len(pieces) - 1,
                )  # fmt: skip
            slot = t_slot.held(first=corner == 0, last=corner == len(corners) - 1)
            done = self.cube.accumulator.front(rows, cols, self.pv.accumulator_format)
            yield move("O_tmp.drain", FIXP, slot.part(row, rows, col, cols), done)

    def _v2(
        self, vector: VectorShare, block: AttentionBlock, rows: list[RowSlice]
    ) -> Iterator[TileOp]:
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
            bound = vector.bindings(
                part, part.row - rows[0].row, {"T_in": vector.t_in.front(*shape)}, False
            )
            yield compute("update", core.vector, bind(self.steps.update, bound))


def prelaunched(
    runs: tuple[KvRun, ...], lead: int, stage: Callable[[int, KvTile], Body]
) -> Iterator[Loop]:
    """Yield two stages over the tiles of ``runs``, the first running ``lead`` tiles ahead.

    Step n does stage 0 of tile n, then stage 1 of tile n - lead; ``stage(number, tile)`` is a body
    that depends on one tile.  Consecutive steps whose two tiles lie in the same runs are one
    :class:`Loop`.
    """
    total = sum(r.count for r in runs)
    edges = {0, total, total + lead}
    at = 0
    for run in runs:
        edges |= {at, at + lead}
        at += run.count
    for start, end in pairwise(sorted(edges)):
        ahead = run_at(runs, start) if start < total else None
        behind = run_at(runs, start - lead) if start >= lead else None
        parts = [(n, r, n * lead) for n, r in enumerate((ahead, behind)) if r]
        yield Loop("kv", range(start, end), partial(_step, stage, parts))


def _step(
    stage: Callable[[int, KvTile], Body], parts: list[tuple[int, tuple[KvRun, int], int]], index: int
) -> Iterator[Loop]:
    """Yield each stage's body at its tile of one step."""
    for number, (run, first), behind in parts:
        yield Loop("", (0,), stage(number, run.tile(first, index - behind)))
