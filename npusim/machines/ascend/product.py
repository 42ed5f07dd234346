"""CubeProduct stages on the AIC: L1, L0A and L0B, the CUBE, L0C, and the transfer out of L0C by FIXP.

One emitter serves every product; they differ in their :class:`ProductPlan`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from npusim.errors import TilingError
from npusim.formats import get_format, stored_format
from npusim.late_methods import dataclass
from npusim.machines.ascend.group import AIC, CUBE, FIXP, L1, MTE1, MTE2, PING_PONG, compute, move, pass_on
from npusim.machines.ascend.product_plan import default_plan
from npusim.program.ir.op import Opcode, Step, TileOp
from npusim.program.ir.tile_program import Item, repeated
from npusim.program.ir.tile_program import Loop as Repeat
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping

    from npusim.kernels.form.phase import Stage, Visit, WorkTile
    from npusim.machines.ascend.group import AscendGroup
    from npusim.machines.ascend.product_plan import AscendTiling, ProductPlan, Staging
    from npusim.machines.frame import Frame, Span
    from npusim.program.ir.buffers import Ring
    from npusim.program.ir.op import Attributes
    from npusim.program.ir.tile import Operand, RingTile


@dataclass(frozen=True, slots=True)
class Corner:
    """One accumulator's part of a product: a band of rows, a panel of columns, and their position."""

    band: Span
    panel: Span
    is_first: bool
    is_last: bool
    is_last_band: bool


@dataclass(frozen=True, slots=True)
class DepthPiece:
    """One product's part of a sum: ``size`` elements of k, beginning at ``k``, which is ``at`` elements after the start
    of a stretch of ``length`` elements.

    ``is_first`` and ``is_last``: whether it is the first, or the last, part of the complete sum.
    """

    k: int
    size: int
    at: int
    length: int
    is_first: bool
    is_last: bool

    def loaded(self, load: int) -> tuple[int, int]:
        """Return the number of elements of k that are loaded together (at most ``load``), and the position of the part
        among them.
        """
        start = self.at // load * load
        return min(load, self.length - start), self.at - start


def _planned(frame: Frame, stage: Stage, group: AscendGroup, tiling: AscendTiling) -> ProductPlan:
    plan = tiling.plans.get(stage.name) or default_plan(frame, stage, group)
    if tiling.decided.pipeline == "core":  # operands of the next block are loaded while those of this block are in use
        plan = replace(plan, left_depth=PING_PONG)
    return replace(plan, left_depth=1, right_depth=1) if tiling.decided.one_slot else plan


class CubeProduct:
    """One product stage of a phase: its plan, its rings in L1, and its operations."""

    l0: CubeRings  #: the rings of all products, which are known once they are allocated

    def __init__(
        self,
        frame: Frame,
        stage: Stage,
        group: AscendGroup,
        tiling: AscendTiling,
        direct: Mapping[str, bool],
        cross: Mapping[str, tuple[Ring, ...]],
        kept: Collection[str],
    ) -> None:
        (row,) = stage.rows
        self.frame, self.name, self.group, self.direct, self.cross = frame, stage.name, group, direct, cross
        self.left, self.right = row.srcs
        self.dst = row.dst
        #: Whether the product accumulates in L0C until the block ends, and its place there.
        self.stays, self.total = row.dst in kept, cast("Ring | None", None)
        #: The operand whose tile a later product also reads.
        self.ahead = ""
        products = [s for s in frame.stages if s.is_product]
        readers = {n: [s for s in products if n in s.rows[0].srcs] for n in row.srcs if frame.places[n] == "up"}
        #: For an operand that rows compute: whether this product reads it first, and whether it reads it last.
        self.turns = {n: (stage is of[0], stage is of[-1]) for n, of in readers.items()}
        self.plan = _planned(frame, stage, group, tiling)
        self.m_axis, self.k_axis, self.n_axis = frame.phase.product_axes(row)
        self.until_left = tiling.decided.until_left
        self.how = frame.product_attributes(stage, group.arithmetic)
        if made := [n for n in row.srcs if frame.places[n] == "down"]:
            group.refuse_route(
                f"{stage.name} multiplies {frame.label(made[0])}, the unconverted result of another product; store "
                "it in float32 and cast it in a rows stage: .to('float32').to(format)",
                "L0C",
                "L1",
            )
        is_cut = frame.phase.sizes[self.m_axis] > self.plan.m or frame.phase.sizes[self.n_axis] > self.plan.n
        if is_cut and any(self._sums) and frame.places[self.dst] != "state":
            raise TilingError(
                f"{frame.phase.name}: {stage.name} is a term of a sum of products in one accumulator, but a tile "
                f"of more than {self.plan.m} x {self.plan.n} has several accumulators; store each product "
                "separately"
            )
        if frame.places[self.dst] == "state":
            group.refuse_route(
                f"accumulate=chained: {stage.name} adds to {frame.label(self.dst)}, which is in UB, but without "
                ".to(format) the matrix unit accumulates in L0C",
                "UB",
                "L0C",
            )
        #: Rows store an operand completely in L1.
        self.lifted = tuple(n for n in row.srcs if direct.get(n))
        planned = zip(row.srcs, (self.plan.left, self.plan.right), strict=True)
        self.modes: dict[str, Staging] = {n: "whole" if n in self.lifted else mode for n, mode in planned}
        #: Operands in global memory are loaded before the operands that rows compute, or after them if the cores take
        #: turns.
        self.by_arrival = sorted(row.srcs, key=lambda n: (frame.places[n] == "up") is not tiling.decided.takes_turns)
        self.takes_turns = tiling.decided.takes_turns
        self.held = tuple(n for n in row.srcs if self.modes[n] == "held")
        #: Number of elements along k that are loaded at once.
        self.loads = {n: load or self.plan.k for n, load in zip(row.srcs, self.plan.loads, strict=True)}
        self.rings: dict[str, Ring] = {}
        self.opened = list(self.held)

    def place(self, l1: dict[tuple[str, Staging, int, int, int], Ring], later: Collection[str] = ()) -> None:
        """Allocate the rings of operands in L1, except for operands that are allocated ``later``; ``l1``: rings of
        earlier products.

        An operand that several products load in equal tiles uses one ring; so do pieces of the results of rows.  A
        lasting operand is loaded once.
        """
        for n in self.by_arrival:
            if n in self.lifted or n in self.rings or n in later:
                continue
            rows, cols = self._staged(n)
            depth = self.plan.left_depth if n == self.left else self.plan.right_depth
            is_made = self.frame.places[n] == "up" and self.modes[n] == "piece"
            alike = "" if is_made else n, self.modes[n], rows, cols, depth
            if alike not in l1:
                # then the unit adds the product in another way
                other = f" of {self.name}" if any(n == m for m, *_ in l1) else ""
                called = self.frame.prefix + self.frame.label(n) + other
                size = self.frame.size_bytes(n, rows * cols)
                l1[alike] = self.group.ring(L1, called, size, depth, MTE2, MTE1)
            elif n in self.opened:
                self.opened.remove(n)
            self.rings[n] = l1[alike]

    def share(self, other: CubeProduct, ring: Ring) -> None:
        """Load B completely into a ring, from which a later product reads the same B, or its first columns."""
        self.rings[self.right] = other.rings[other.right] = ring
        self.ahead = self.right
        self.modes[self.right], other.modes[other.right] = "whole", "view"
        self.plan, other.plan = replace(self.plan, right="whole"), replace(other.plan, right="view")

    def _staged(self, n: str) -> Span:
        """Return rows and columns of the part of an operand that is in L1 at once."""
        plan, sizes = self.plan, self.frame.phase.sizes
        match self.modes[n]:
            case "held" | "whole" | "view":
                rows, cols = (sizes[a] for a in self.frame.axes(n))
                return rows, cols
            case "panel":
                return self._as_stored(n, sizes[self.k_axis], plan.n)
            case "piece":
                return self._as_stored(n, self.loads[n], plan.m if n == self.left else plan.n)

    def _as_stored(self, n: str, along: Any, across: Any) -> tuple[Any, Any]:
        """Return the values for an operand's extent along k and across it, in the order of its rows and columns."""
        return (along, across) if self.frame.axes(n)[0] == self.k_axis else (across, along)

    # ---------------------------------------------------------------- operations

    def open(self, block: WorkTile, tile: Visit) -> Iterator[TileOp]:
        """Yield loads of operands that stay until the block ends."""
        for n in self.opened:
            source = self.frame.cut(n, block, tile)
            slot = self.rings[n].fill(source.rows, source.cols, source.fmt)
            yield move(f"{self.frame.label(n)}.load", MTE2, slot, source)
            yield pass_on(f"{self.frame.label(n)}.take", MTE1, self._whole(n, block, tile, first=True))
        if self.stays:
            start = Step(Opcode.FILL, self._sum(block, tile, first=True), (0.0,))
            yield compute(f"{self.name}.start", CUBE, (start,))

    def close(self, block: WorkTile, tile: Visit) -> Iterator[TileOp]:
        """Yield the releases of what :meth:`open` loaded, and the store of a sum that stayed in L0C."""
        for n in self.opened:
            yield pass_on(f"{self.frame.label(n)}.release", MTE1, self._whole(n, block, tile, last=True))
        if self.stays:
            yield pass_on(f"{self.name}.end", CUBE, self._sum(block, tile, last=True))
            _, corners = self._parts(block, tile)
            for corner in corners:
                yield from self._drains(block, tile, corner, corners)

    def _sum(self, block: WorkTile, tile: Visit, *, first: bool = False, last: bool = False) -> RingTile:
        """Return the place of a complete stored sum, in the form in which its products write it."""
        rows, cols = (self.frame.size(block, a, tile) for a in (self.m_axis, self.n_axis))
        assert self.total is not None
        return self.total.fill(rows, cols, self.how.accumulator_format, first=first, last=last)

    def items(self, block: WorkTile, tile: Visit) -> Iterator[Item]:
        """Yield loads, products and drains for one tile."""
        depth, corners = self._parts(block, tile)
        for corner in corners:
            yield from self._corner(block, tile, depth, corners, corner)

    def work(self, block: WorkTile, tile: Visit) -> Iterator[Item]:
        """Yield the work of one tile; neighbouring corners of equal size are one loop."""
        depth, corners = self._parts(block, tile)
        is_dealt = self.direct.get(self.dst)  # the core that receives a corner depends on the corner's position

        def alike(c: Corner) -> Hashable:
            return c if is_dealt else (c.band[1], c.panel[1], c.band[0] == 0, c.is_first)

        for _, same in groupby(corners, alike):
            first, *others = same
            yield repeated(1 + len(others), partial(self._corner, block, tile, depth, corners, first))

    def _corner(
        self, block: WorkTile, tile: Visit, depth: int, corners: list[Corner], corner: Corner
    ) -> Iterator[Item]:
        plan, pieces = self.plan, list(chunks(depth, self.plan.load_k))
        for n in (self.left, self.right) if corner.is_first else ():
            if self.modes[n] == "whole" and n not in self.lifted:
                yield self._load(n, block, tile)
        if self.modes[self.right] == "panel" and corner.band[0] == 0:
            held = corner.is_first, sum(corner.panel) == max(sum(c.panel) for c in corners)
            yield self._load(self.right, block, tile, *self._as_stored(self.right, (0, depth), corner.panel), held=held)
        body = partial(self._piece, block, tile, corner)
        yield from body(*pieces[0], starts=True, ends=len(pieces) == 1)
        if plan.loops_over_k and len(pieces) > 2:
            yield Repeat("k", range(1, len(pieces) - 1), partial(_middle, body, plan.load_k))
        else:
            for k, size in pieces[1:-1]:
                yield from body(k, size, starts=False, ends=False)
        if len(pieces) > 1:
            yield from body(*pieces[-1], starts=False, ends=True)
        if not self.stays:
            yield from self._drains(block, tile, corner, corners)
        if self.until_left and corner.is_last:
            result = [n for n in (self.left, self.right) if self.frame.places[n] == "up"]
            fronts = (self.cross[n][0].front(*self._handed(n, block, tile)) for n in result)
            yield pass_on(f"{self.name}.give", FIXP, *fronts)

    def _handed(self, n: str, block: WorkTile, tile: Visit) -> tuple[int, int, str]:
        """Return the request for a slot that rows fill: the rows of the tile, its width and its format."""
        return self.frame.shape(n, block, tile)[0], self.frame.width(n), self.frame.fmt(n)

    def _parts(self, block: WorkTile, tile: Visit) -> tuple[int, list[Corner]]:
        """Return the depth of the product's sum, and its corners in order."""
        height, depth, across = (self.frame.size(block, a, tile) for a in (self.m_axis, self.k_axis, self.n_axis))
        plan = self.plan
        bands, panels = list(chunks(height, plan.m)), list(chunks(across, plan.n))
        order = (
            [(b, p) for p in panels for b in bands] if plan.panels_outside else [(b, p) for b in bands for p in panels]
        )
        last = len(order) - 1
        return depth, [Corner(b, p, i == 0, i == last, b == bands[-1]) for i, (b, p) in enumerate(order)]

    def _piece(
        self, block: WorkTile, tile: Visit, corner: Corner, k: int, size: int, *, starts: bool, ends: bool
    ) -> Iterator[TileOp]:
        """Yield the loads of one part of the sum and its products; ``k`` may be a product of a loop's index."""
        for at, part in chunks(size, self.plan.k):
            piece = DepthPiece(k + at, part, at, size, starts and at == 0, ends and at + part == size)
            for n in self.by_arrival:
                cut, behind = piece.loaded(self.loads[n])
                if self.modes[n] == "piece" and not behind:
                    held = corner.is_first and piece.is_first, corner.is_last and ends and at + cut == size
                    across = corner.band if n == self.left else corner.panel
                    yield self._load(n, block, tile, *self._as_stored(n, (k + at, cut), across), held=held)
            yield from self._multiply(block, tile, corner, piece)

    def _multiply(self, block: WorkTile, tile: Visit, corner: Corner, piece: DepthPiece) -> Iterator[TileOp]:
        a, b = (self._operand(n, block, tile, corner, piece) for n in (self.left, self.right))
        yield move(f"{self.name}.load_left", MTE1, self.l0.left.fill(a.rows, a.cols, a.fmt), a)
        yield move(f"{self.name}.load_right", MTE1, self.l0.right.fill(b.rows, b.cols, b.fmt), b)
        goes_on, is_added = self._sums
        how = self._ways[is_added or not piece.is_first]
        ends = {"first": piece.is_first and not is_added, "last": piece.is_last and not goes_on}
        parts = self._halves(corner)
        for part, (ring, (c, cols)) in enumerate(parts):
            target = ring.fill(corner.band[1], cols, self.how.accumulator_format, **ends)
            if self.total is not None:
                target = self._sum(block, tile).part(*corner.band, corner.panel[0] + c, cols)
            ends_of = {"first": part == 0, "last": part == len(parts) - 1}
            left = self.l0.left.front(a.rows, a.cols, a.fmt, **ends_of)
            right = self.l0.right.front(b.rows, b.cols, b.fmt, **ends_of)
            across = right.part(c, cols, 0, b.cols) if self.how.transpose_b else right.part(0, b.rows, c, cols)
            yield compute(f"{self.name}.mmad", CUBE, (Step(Opcode.MATMUL, target, (left, across), how),))

    @cached_property
    def _ways(self) -> tuple[Attributes, Attributes]:
        """The attributes of a product that starts a sum, and of one that adds to it."""
        return replace(self.how, accumulate=False), replace(self.how, accumulate=True)

    @cached_property
    def _sums(self) -> tuple[bool, bool]:
        """Whether a later product adds to the accumulator of this product, and whether this product adds to that of an
        earlier one.
        """
        at = [s for s in self.frame.stages if s.is_product and s.rows[0].dst == self.dst]
        if self.frame.places[self.dst] not in ("down", "out") or len(at) == 1:
            return False, self.how.accumulate
        return at[-1].name != self.name, at[0].name != self.name

    def _halves(self, corner: Corner) -> list[tuple[Ring, Span]]:
        width, rings = corner.panel[1], self.l0.accumulators
        if self.total is not None:
            return [(self.total, (0, width))]
        return list(zip(rings, chunks(width, ceil_div(self.plan.n, len(rings))), strict=False))

    def _drains(self, block: WorkTile, tile: Visit, corner: Corner, corners: list[Corner]) -> Iterator[TileOp]:
        """Yield the transfer out of L0C by FIXP: to a tensor, or to the slots that rows read."""
        if self._sums[0]:
            return
        frame, n, (m, rows) = self.frame, self.dst, corner.band
        height, label = frame.size(block, self.m_axis, tile), f"{frame.label(n)}.drain"
        for ring, (at, cols) in self._halves(corner):
            done, panel = ring.front(rows, cols, self.how.accumulator_format), (corner.panel[0] + at, cols)
            if self.total is not None:
                size = height, frame.size(block, self.n_axis, tile), self.how.accumulator_format
                whole = self.total.front(*size, first=corner.is_first, last=corner.is_last)
                done = whole.part(m, rows, *panel)
            if frame.places[n] == "out":
                target = frame.cut(n, block, tile, corner.band, panel)
                yield move(f"{frame.label(n)}.store", FIXP, target, done, name=n)
            elif self.direct[n]:
                shape = height, frame.cols(n, block, tile)
                part = corner if cols == corner.panel[1] else replace(corner, panel=panel)
                yield from self._dropped(label, *shape, done, part, corners)
            else:
                (slots,) = self.cross[n]
                slot = slots.fill(height, frame.width(n), frame.fmt(n), first=corner.is_first, last=corner.is_last)
                yield move(label, FIXP, slot.part(m, rows, *panel), done, name=n)

    def _dropped(
        self, label: str, height: int, width: int, done: RingTile, corner: Corner, corners: list[Corner]
    ) -> Iterator[TileOp]:
        """Yield the moves of a corner into the UBs that hold rows of it; one move serves both UBs if the parts are
        halves.
        """
        (m, rows), (c, cols), fmt = corner.band, corner.panel, self.frame.fmt(self.dst)
        parts: list[tuple[RingTile, Span]] = []
        for core, ring in zip(self.group.vector_cores, self.cross[self.dst], strict=True):
            start, count = self.group.share(core, height, self.frame.phase.row_grain)
            sharing = [k for k in corners if k.band[0] < start + count and start < sum(k.band)]
            if corner not in sharing:
                continue
            top, end = max(m, start), min(m + rows, start + count)
            slot = ring.fill(count, width, fmt, first=corner is sharing[0], last=corner is sharing[-1])
            parts.append((slot.part(top - start, end - top, c, cols), (top - m, end - top)))
        halves = [
            move(label, FIXP, slot, done.part(*span).held(first=i == 0, last=i == len(parts) - 1), name=self.dst)
            for i, (slot, span) in enumerate(parts)
        ]
        if len({n for _, (_, n) in parts}) == 1:
            yield TileOp(label, FIXP, FIXP, tuple(step for half in halves for step in half.steps))
        else:
            yield from halves

    def _load(
        self,
        n: str,
        block: WorkTile,
        tile: Visit,
        row: Span | None = None,
        col: Span | None = None,
        held: tuple[bool, bool] = (True, True),
    ) -> TileOp:
        """Return the load of a part of an operand into L1; ``held``: the first or last of a transfer between cores."""
        frame = self.frame
        if frame.places[n] == "up":
            height, width, (takes, gives) = frame.shape(n, block, tile)[0], frame.width(n), self.turns[n]
            ends = {"first": held[0] and takes, "last": held[1] and gives}
            slot = self.cross[n][0].front(height, width, frame.fmt(n), **ends)
            source: Operand = slot.part(*(row or (0, height)), *(col or (0, frame.cols(n, block, tile))))
        else:
            source = frame.cut(n, block, tile, row, col)
        slot = self.rings[n].fill(source.rows, source.cols, source.fmt)
        op = move(f"{frame.label(n)}.load", MTE2, slot, source, name=n)
        if not (self.takes_turns and self.lifted and held[0]):
            return op
        waited = self.lifted[0]
        return replace(op, handshake=(self.cross[waited][0].front(*self._handed(waited, block, tile)),))

    def _operand(self, n: str, block: WorkTile, tile: Visit, corner: Corner, piece: DepthPiece) -> RingTile:
        """Return the part of an operand in L1 that one product reads."""
        is_left, mode = n == self.left, self.modes[n]
        start, width = corner.band if is_left else corner.panel
        first, last = corner.is_first and piece.is_first, corner.is_last and piece.is_last
        # The size of the piece in L1, along k and across k, and the position at which the part begins in the piece.
        along = self.frame.size(block, self.k_axis, tile), piece.k
        across = width, 0
        match mode:
            case "held" | "whole" | "view":
                across = self.frame.size(block, self.m_axis if is_left else self.n_axis, tile), start
                first, last = (False, False) if mode == "held" else (first, last)
            case "panel":
                first, last = corner.band[0] == 0 and piece.is_first, corner.is_last_band and piece.is_last
            case "piece":
                along = length, at = piece.loaded(self.loads[n])
                first, last = at == 0, at + piece.size == length
        (rows, top), (cols, left) = self._as_stored(n, along, across)
        height, length = self._as_stored(n, piece.size, width)
        pitch = self._pitch(n, block, tile, cols)
        return self._slot(n, rows, cols, pitch, first=first, last=last).part(top, height, left, length)

    def _whole(self, n: str, block: WorkTile, tile: Visit, *, first: bool = False, last: bool = False) -> RingTile:
        rows, cols, _ = self.frame.shape(n, block, tile)
        return self._slot(n, rows, cols, self._pitch(n, block, tile, cols), first=first, last=last)

    def _pitch(self, n: str, block: WorkTile, tile: Visit, cols: int) -> int:
        """Return the columns of the slot that contains an operand; for a view, those of the operand that it views."""
        return self.frame.cols(self.frame.views.get(n, n), block, tile) if self.modes[n] == "view" else cols

    def _slot(self, n: str, rows: int, cols: int, pitch: int, *, first: bool, last: bool) -> RingTile:
        """Return the part of an operand that is in L1."""
        if n in self.lifted:
            ends = {"first": first and self.turns[n][0], "last": last and self.turns[n][1]}
            slot = self.cross[n][0].front(rows, self.frame.width(n), self.frame.fmt(n), **ends)
            return slot.part(0, rows, 0, cols)
        ring = self.rings[n]
        look = ring.peek if n == self.ahead else ring.front
        return look(rows, cols, self.frame.fmt(n), first=first, last=last, stride=pitch)

    @property
    def rereads(self) -> bool:
        """Whether every band of A reads B completely again."""
        return self.plan.right == "piece" and not self.plan.panels_outside


def _middle(body: partial[Iterator[TileOp]], size: int, index: int) -> Iterator[TileOp]:
    """Return a piece between the first and the last one.  Its ``index`` is never compared, and may be opaque."""
    return body(index * size, size, starts=False, ends=False)


@dataclass(frozen=True)
class CubeRings:
    """The rings through which every matrix product passes."""

    left: Ring
    right: Ring
    accumulators: tuple[Ring, ...]


def cube_rings(products: list[CubeProduct], group: AscendGroup, prefix: str, most: int = PING_PONG) -> CubeRings:
    """Allocate rings in L0A, L0B and L0C that fit every product of a phase.

    Each ring has as many slots as fit, at most ``most``: two if the vendor's kernels use L0 in ping-pong.
    """
    plans = [p.plan for p in products]
    single, sums = get_format(products[0].how.accumulator_format).size_bytes, 0
    for p in (p for p in products if p.stays):
        size = single * p.frame.phase.sizes[p.m_axis] * p.frame.phase.sizes[p.n_axis]
        p.total, sums = group.ring(f"{AIC}.L0C", f"{prefix}{p.name} sum", size, 1, CUBE, FIXP), sums + size
    m, n, k, halves = (max(sizes) for sizes in zip(*((p.m, p.n, p.k, p.halves) for p in plans), strict=True))
    limits = {n: max(p.slots[i] for p in plans) or most for i, n in enumerate(("L0A", "L0B", "L0C"))}
    operands = [stored_format(p.frame.fmt(p.left)) for p in products]
    beside = {"L0C": sums}

    def ring(buffer: str, size: int, producer: str, consumer: str, part: str = "") -> Ring:
        room = group.capacity_bytes(buffer) - beside.get(buffer, 0)
        slots = max(1, min(limits[buffer], room // size // (halves if part else 1)))
        return group.ring(f"{AIC}.{buffer}", f"{prefix}{buffer}{part}", size, slots, producer, consumer)

    parts = [f" part {i}" for i in range(halves)] if halves > 1 else [""]
    return CubeRings(
        ring("L0A", max(fmt.row_bytes(m * k) for fmt in operands), MTE1, CUBE),
        ring("L0B", max(fmt.row_bytes(k * n) for fmt in operands), MTE1, CUBE),
        tuple(ring("L0C", m * ceil_div(n, halves) * single, CUBE, FIXP, part) for part in parts),
    )
