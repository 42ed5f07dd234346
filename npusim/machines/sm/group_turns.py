"""Order among specialised warp groups (Hopper): their turns, and the operations that overlap.

One group copies; the others alternate.  cuDNN's groups alternate around their exponentials, so that one group
multiplies while the other computes.  FlashAttention-3's groups alternate in issuing products, and Q K^T of a tile is
issued before P V of the previous tile: its softmax overlaps with that P V.  Tensor cores process products in the order
in which groups issue them (reports/silicon/groups.json).  `WarpTurns` decides

- the stages that one group executes before the next group's stages (`runs`), and the lags of some stages in tiles
  (`cuts`);
- the waits of a group besides its operands: its turn, the others at a block's start, products in progress.

The class only adds waits to the operations of the block's loop; it changes no step.  Turns, barriers, and products that
overlap with warps are rings without bytes, so that time and the check of races see the same order. Sources: as in
`specialised`.  Not modelled: lanes store their parts of row sums until the block ends; a sum here is one number per
row.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from npusim.errors import TilingError
from npusim.machines.sm.core import RF, WARPS
from npusim.machines.sm.group_work import GroupWork, work_of
from npusim.program.ir.op import REDUCTIONS, Opcode, TileOp
from npusim.program.ir.tile import Tile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from npusim.kernels.form.phase import Stage
    from npusim.machines.decisions import GpuDecisions
    from npusim.machines.frame import Frame
    from npusim.machines.sm.core import SmCore
    from npusim.machines.sm.name_places import Handshake
    from npusim.program.ir.buffers import Ring
    from npusim.program.ir.op import Step
    from npusim.program.ir.tile import RingTile

#: A view of a ring without bytes.
SIGNAL = 1, 1, "int8"


class WarpTurns:
    """Signals among the warp groups of one block of a kernel whose groups alternate."""

    def __init__(self, number: int, frame: Frame, core: SmCore, decided: GpuDecisions, warps: tuple[str, ...]) -> None:
        self.frame, self.decided, self.warps = frame, decided, warps
        #: The work of an operation that only waits.
        self.usual = GroupWork(decided)
        loop, who, groups = frame.phase.loops[0].stages, f"{frame.prefix}B{number}", range(decided.groups)
        products = tuple(s for s in loop if s.is_product)
        if decided.ahead and (len(products), loop[0], loop[-1]) != (2, products[0], products[-1]):
            raise TilingError(
                f"{frame.phase.name}: softmax runs concurrently with P V of the previous tile, which accumulates onto "
                "O: the loop must have two products with rows between them; use kernel=cudnn, or accumulate=chained"
            )
        #: Queues of products: separate queues if a group continues during its products.
        self.mma = tuple(f"{w}MMA" for w in warps) if decided.ahead else warps

        def signal(name: str, producer: str, *consumers: str) -> Ring:
            return core.allocator.ring(RF, f"{who} {name}", 1, 1, producers=[producer], consumers=consumers)

        pairs = {*pairwise(groups), *([(0, decided.groups - 1)] if decided.groups > 1 else [])}
        #: Units that take turns: the products of one group after those of the other; or, in the same way, rows.
        takers = self.mma if decided.turns == "products" else warps
        #: A turn goes from each group to the next, and from the last to the first.
        self.turn = {
            (a, b): signal(f"turn {a} {b}", takers[a], takers[b]) for a, b in sorted(pairs) if decided.turns is not None
        }
        self.met = [
            signal(f"group {g} is there", warps[g], *(w for w in warps if w != warps[g]))
            for g in groups
            if decided.meets and decided.groups > 1
        ]
        sides = list(zip(warps, self.mma, strict=True)) if decided.ahead else []
        self.issued = {s: [signal(f"{s.name} issued", w, m) for w, m in sides] for s in products}
        self.done = {s: [signal(f"{s.name} done", m, w) for w, m in sides] for s in products}
        self.first, self.last = products[0], products[-1]
        begin = next((s for s in loop if any(r.opcode in REDUCTIONS for r in s.rows)), loop[0])
        rest = loop[loop.index(begin) :]
        #: Stages of rows in which exponentials begin and end, before the next product.
        self.section = begin, rest[next((i for i, s in enumerate(rest) if s.is_product), len(rest)) - 1]
        #: Per stage, its lag in tiles and its groups: each group in turn runs Q K^T of a tile and P V of the previous
        #: tile; then the rows of all groups follow.
        self.cuts = (
            *((stages, lag, range(g, g + 1)) for g in groups for stages, lag in ((loop[:1], 0), (loop[-1:], 1))),
            (loop[1:-1], 0, groups),
        )

    def runs(self, stages: tuple[Stage, ...]) -> list[tuple[Stage, ...]]:
        """Return the stages that a group executes before the next group's: consecutive rows."""
        return [tuple(run) for _, run in groupby(stages, lambda s: s.rows if s.is_product else ())]

    def started(self, ops: Iterable[TileOp]) -> Iterator[TileOp]:
        """Yield a block's start, one operation per group: no product of the previous block still runs, and all groups
        have arrived.
        """
        for group, op in enumerate(ops):
            handshake = op.handshake
            if self.decided.ahead:
                slots = *handshake, self.done[self.last][group].fill(*SIGNAL)
                yield TileOp(op.label, self.mma[group], WARPS, (), slots, self.usual)
                handshake = ()
            yield replace(op, handshake=(*handshake, *(ring.fill(*SIGNAL) for ring in self.met[group : group + 1])))
        for group in range(len(self.met)):
            others = tuple(ring.front(*SIGNAL) for g, ring in enumerate(self.met) if g != group)
            yield self._wait("meet", group, others, self.usual.meeting())

    def freed(self, held: Iterable[Handshake]) -> Iterator[TileOp]:
        """Yield the release of the block's operands by each group's queue of products, after the products that read
        them.
        """
        for group, slots in enumerate(held):
            if slots:
                yield TileOp("free", self.mma[group], WARPS, (), slots, self.usual)

    def finished(self, ops: Iterable[TileOp]) -> Iterator[TileOp]:
        """Yield a block's end, which waits for its last product."""
        begun: set[int] = set()
        for op in ops:
            group, slots, work = self.warps.index(op.queue), op.handshake, op.work
            if self.decided.ahead and group not in begun:
                slots = *slots, self.done[self.last][group].front(*SIGNAL)
            if isinstance(work, GroupWork) and group not in begun:
                work = work.paying("end")
            begun.add(group)
            yield replace(op, handshake=slots, work=work)

    def product(self, s: Stage, group: int, ops: Iterable[TileOp], *, alone: bool = False) -> Iterator[TileOp]:
        """Yield a product, for which the group waits immediately or which overlaps with later stages; one turn covers Q
        K^T and the P V that follows it.

        ``alone``: the first Q K^T, or the last P V. Tensor cores process products in the order of their issue.
        """
        if not self.decided.ahead:
            yield from ops
            if s is self.last:
                yield self._wait("next", group, (), self.usual.paying("tile"))
            return
        op, *more = ops
        if more:
            raise TilingError(
                f"{s.name}: a product that continues is not converted: its accumulators have the precision's format"
            )
        is_first = s is self.first
        turn: tuple[RingTile, ...] = ()
        if self.decided.turns == "products":
            turn = self._take_turn(group, takes=is_first or alone, gives=not is_first or alone)
        issued = (self.issued[s][group].fill(*SIGNAL),)
        yield self._wait(f"{s.name}.issue", group, issued, self.usual.meeting(bool(turn and is_first)))
        slots = *op.handshake, self.issued[s][group].front(*SIGNAL), self.done[s][group].fill(*SIGNAL), *turn
        yield replace(op, queue=self.mma[group], handshake=slots)

    def rows(self, s: Stage, group: int, operations: Iterable[TileOp], tiles: Mapping[str, Tile]) -> Iterator[TileOp]:
        """Yield rows of a tile: exponentials in the group's turn, or, after its end, work on a running product's
        operands.
        """
        ops, (begin, end) = list(operations) or [self._wait(s.name, group, (), self.usual)], self.section
        is_ahead, has_turn = bool(self.decided.ahead), self.decided.turns == "exponentials"
        if s is begin:
            scores = (self.done[self.first][group].front(*SIGNAL),) if is_ahead else ()
            later = (self.done[self.last][group].front(*SIGNAL),) if is_ahead else ()
            turn = self._take_turn(group, takes=True, gives=False) if has_turn else ()
            # Masks that are a separate operation come before maxima, and have the charge of a score.
            first = next((i for i, op in enumerate(ops) if any(x.opcode in REDUCTIONS for x in op.steps)), 0)
            op, at, work = ops[first], self._cut(ops[first].steps, tiles), work_of(ops[first])
            head, tail = (work if first else work.paying("score"))._replace(is_fenced=False), work.meeting(has_turn)
            ops[first : first + 1] = [
                replace(op, steps=op.steps[:at], handshake=(), work=head),
                replace(op, steps=op.steps[at:], handshake=(*later, *turn), work=tail),
            ]
            ops[0] = replace(ops[0], handshake=scores)
        if s is end and has_turn:
            ops[-1] = replace(ops[-1], handshake=ops[-1].handshake + self._take_turn(group, takes=False, gives=True))
        yield from ops
        if s is end and is_ahead:
            yield self._wait("next", group, (), self.usual.paying("tile"))

    def _take_turn(self, group: int, *, takes: bool, gives: bool) -> tuple[RingTile, ...]:
        return tuple(
            (ring.fill if group == a else ring.front)(*SIGNAL, first=takes, last=gives)
            for (a, b), ring in self.turn.items()
            if group in (a, b)
        )

    def _wait(self, label: str, group: int, slots: tuple[RingTile, ...], work: GroupWork) -> TileOp:
        return TileOp(label, self.warps[group], WARPS, (), slots, work)

    def _cut(self, steps: tuple[Step, ...], tiles: Mapping[str, Tile]) -> int:
        """Return the step with which exponentials begin, or the first step that works on operands of a
        running product.
        """
        if self.decided.ahead:
            (row,) = self.last.rows
            places = {tiles[self.frame.storage[n]].offset_bytes for n in (row.srcs[0], row.dst)}
            touching = (any(isinstance(o, Tile) and o.offset_bytes in places for o in s.operands()) for s in steps)
            return next((i for i, touches in enumerate(touching) if touches), len(steps))
        begin = next((i for i, s in enumerate(steps) if s.opcode is Opcode.ROW_MAX), 0)
        return next((i for i, s in enumerate(steps) if i > begin and s.dst.cols > 1), len(steps))
