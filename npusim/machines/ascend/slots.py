"""Slots between products and rows, and slots that products share.

`Slots` decides, for each name that one unit passes to another, the memory and number of its slots, and the queues that
fill and read the slots.  For operands it also decides which products read the same ring of tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.machines.ascend.group import FIXP, GM, L1, MTE1, MTE2, PING_PONG
from npusim.machines.ascend.product import cube_rings
from npusim.units import round_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npusim.kernels.form.phase import Stage
    from npusim.machines.ascend.group import AscendGroup, VectorCore
    from npusim.machines.ascend.loop_parts import Parts
    from npusim.machines.ascend.product import CubeProduct
    from npusim.machines.ascend.product_plan import AscendTiling, Staging
    from npusim.machines.ascend.vector_rows import RowsStage
    from npusim.machines.frame import Frame
    from npusim.program.ir.buffers import FlagKind, Ring


class Slots:
    """The slots of one phase; `cross` has the slots between products and rows, which belong to each vector core or to
    all cores.
    """

    def __init__(self, frame: Frame, group: AscendGroup, tiling: AscendTiling, parts: Parts) -> None:
        self.frame, self.group, self.tiling, self.parts = frame, group, tiling, parts
        self.decided = tiling.decided
        self._first_ring = len(group.allocator.rings)
        #: Whether results of a unit reach the next one without passing through global memory.
        self.direct = {
            n: group.is_direct(frame.label(n), place, self.decided.route if place == "up" else None)
            for n, place in frame.places.items()
            if place in ("down", "up")
        }
        self.cross: dict[str, tuple[Ring, ...]] = {}

    def turn(self) -> Ring | None:
        """Allocate the slot that a core acquires before its loads, and releases when the other cores have finished."""
        ends = [FIXP] if self.decided.slots == 1 else None
        if self.decided.order == "serial":
            ends = [v.vector for v in self.group.vector_cores]
        if ends is None or not (self.parts.cuts or self.parts.is_loopless):
            return None
        kind: FlagKind = "binary" if ends == [FIXP] else "counter"
        return self.group.allocator.ring(L1, "turn", 1, 1, producers=[MTE2], consumers=ends, flag=kind)

    # ---------------------------------------------------------------- products

    def place(self, products: Mapping[Stage, CubeProduct], rows: Iterable[RowsStage]) -> None:
        """Assign slots to the results and operands of products.  Views are assigned last: they are loaded only once if
        L1 holds their tiles until they are read.
        """
        listed = list(products.values())
        pairs = [*self.frame.views.items(), *((n, n) for n in self._read_twice(listed))]
        operands: dict[tuple[str, Staging, int, int, int], Ring] = {}
        rings = cube_rings(listed, self.group, self.frame.prefix, self.decided.slots)
        for p in listed:
            p.l0 = rings
            p.place(operands, {n for pair in pairs for n in pair})
        self._place_cross(list(rows))
        shared: list[tuple[CubeProduct, CubeProduct, int]] = []
        for part, whole in pairs:
            first = next(s for s, p in products.items() if p.right == whole)
            second = next(s for s, p in products.items() if p.right == part and s is not first)
            lag = (self.parts.part_of(second) - self.parts.part_of(first)) * self.parts.ahead
            shared.append((products[first], products[second], lag))
        for at, of in enumerate(shared, 1):
            self._share(*of, sum(lag + 1 for *_, lag in shared[at:]))
        for p in listed:
            p.place(operands)

    def _read_twice(self, products: Sequence[CubeProduct]) -> list[str]:
        """Return operands of the loop that exactly two products read, as their right factors, and that nothing else
        reads.
        """
        frame, rights = self.frame, [p.right for p in products]
        if frame.phase.is_recurrent:
            return []
        read = {n: [s for s in frame.stages if n in s.read] for n in dict.fromkeys(rights)}
        twice = (n for n, stages in read.items() if rights.count(n) == len(stages) == len(("first", "second")))
        return [n for n in twice if frame.is_visited(n)]

    def _share(self, first: CubeProduct, second: CubeProduct, lag: int, later: int) -> None:
        """Let two products read one ring, ``lag`` tiles apart, if there is space for its tiles and a flag for each
        tile.

        ``later``: number of flags that rings need that are allocated later.
        """
        allocator, flags, n = self.group.allocator, self.group.device.flags, first.right
        size = round_up(self.frame.row_bytes(n, self.frame.height(n)), allocator.spaces[L1].alignment_bytes)
        placed = allocator.rings[self._first_ring :]
        used = sum(r.depth for r in placed if r.producers == (MTE2,) and r.consumers == (MTE1,))
        room = (self.group.capacity_bytes("L1") - allocator.used_bytes[L1]) // size
        depth = min(lag + PING_PONG, room, flags.usable_event_ids_count.value - used - later if flags else room)
        if depth > lag:
            name = self.frame.prefix + self.frame.label(n)
            ring = allocator.ring(L1, name, size, depth, producers=[MTE2], consumers=[MTE1], peeks=[MTE1])
            first.share(second, ring)

    # ---------------------------------------------------------------- between products and rows

    def _place_cross(self, rows: Sequence[RowsStage]) -> None:
        """Allocate the slots through which products and rows exchange tiles: in UB and L1, if the device has routes to
        these.

        Every slot is as wide as the largest tile.
        """
        frame, cores, generations = self.frame, self.group.vector_cores, self.parts.generations
        stores = [v.store for v in cores]
        for n in dict.fromkeys(n for s in frame.stages for n in s.written):
            height = frame.height(n)
            match frame.places[n], self.direct.get(n):
                case "down", True:
                    self.cross[n] = tuple(self._in_ub(n, core, [s for s in rows if n in s.inputs]) for core in cores)
                case "down", False:
                    depth = max(generations(n), self.decided.handed)
                    self.cross[n] = (self._ring(n, GM, height, depth, [FIXP], [v.load for v in cores]),)
                case "up", is_direct:
                    space, reader = (L1, MTE1) if is_direct else (GM, MTE2)
                    readers = [reader, MTE2] if is_direct and self.decided.takes_turns else [reader]
                    readers += [FIXP] if self.decided.until_left else []
                    depth = max(generations(n), self.decided.handed)
                    self.cross[n] = (self._ring(n, space, height, depth, stores, readers),)

    def _in_ub(self, n: str, core: VectorCore, readers: Sequence[RowsStage]) -> Ring:
        """Allocate slots for a vector core's share of a product's result: two (ping-pong) if the readers of the result
        continue.
        """
        reader = core.store if any(n in s.moved.values() for s in readers) else core.vector
        depth = self.parts.between(n) * self.tiling.ahead + (PING_PONG if any(s.outputs for s in readers) else 1)
        depth = max(depth, self.tiling.ahead + 1) if self.decided.order == "groups" else depth
        rows = self.group.largest_share(self.frame.height(n), self.frame.phase.row_grain)
        return self._ring(n, core.ub, rows, depth, [FIXP], [reader], f"{core.name} ")

    def _ring(
        self, n: str, space: str, rows: int, depth: int, producers: list[str], consumers: list[str], prefix: str = ""
    ) -> Ring:
        """Allocate a ring of slots between AIC and AIVs, with counter flags."""
        return self.group.allocator.ring(
            space,
            f"{self.frame.prefix}{prefix}{self.frame.label(n)} slots",
            self.frame.row_bytes(n, rows),
            depth,
            producers=producers,
            consumers=consumers,
            flag="counter",
            period=min(self.decided.period, depth),
        )
