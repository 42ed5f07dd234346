"""The places of a phase's names in a resident block, and the views of these places for the stages.

`BlockPlaces` decides

- the place of an operand: shared memory if products read it, else the loader's place (``near``); whether it
  is copied there or passes through registers (``loaded``); the number of tiles;
- the place in shared memory of values that rows compute for a product only from a tile's operands (``prepared``);
- the names that share registers (``tiles``), group by group;
- the product that reads an operand's slot first, and the product that releases it (`ends`); rows do both in one
  stage (`bindings`).
"""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from npusim.errors import TilingError
from npusim.machines.sm.core import LDG, RF, SM, SMEM
from npusim.program.ir.tile import Tile
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.kernels.form.phase import Stage, Visit, WorkTile
    from npusim.machines.frame import Frame, Span
    from npusim.machines.sm.core import SmCore, SmTiling
    from npusim.program.ir.buffers import Ring
    from npusim.program.ir.op import Attributes, Source
    from npusim.program.ir.tile import Operand, RingTile

#: Operands and results of an operation without steps.
Handshake = tuple["RingTile", ...]


def _refuse_behind(frame: Frame) -> None:
    """Raise `TilingError` for an operand along a loop's axis that is read only after the loop."""
    looped = {n for loop in frame.phase.loops for s in loop.stages for n in s.read}
    for s in frame.phase.finish:
        if behind := [n for n in frame.visited if frame.loop_axis and n in s.read and n not in looped]:
            line = next(row.line for row in s.rows if behind[0] in row.srcs)
            raise TilingError(
                f"{frame.phase.name}: line {line}: {frame.label(behind[0])} is read after the loop along its axis, "
                "but on a GPU that loop loads such blocks together with its tiles: multiply or choose in the loop"
            )


class BlockPlaces:
    """Rings and tiles of the ``number``-th resident block, with the queues that fill and read them.

    ``how``: its products, with their execution by the tensor cores; ``readers``: queues that read loaded tiles.
    """

    def __init__(
        self,
        number: int,
        frame: Frame,
        core: SmCore,
        tiling: SmTiling,
        how: Mapping[Stage, Attributes],
        warps: tuple[str, ...],
        readers: tuple[str, ...],
    ) -> None:
        self.frame, self.core, self.tiling, self.how = frame, core, tiling, how
        self.warps, self.readers, decided = warps, readers, tiling.decided
        self.decided = decided
        for n in frame.operands:
            if len({s.is_product for s in frame.stages if n in s.read}) > 1:
                raise TilingError(
                    f"{frame.phase.name}: {frame.label(n)} is read by a product and by rows, but here a load can "
                    "serve only one of them; pass the tensor to the kernel twice, under two names"
                )
        _refuse_behind(frame)
        loader, is_product = f"{SM}.B{number}{LDG}", decided.roles == "copying"
        #: Operands of the loop that are loaded.
        self.visited = tuple(n for n in frame.visited if n not in frame.views)
        #: Whether slots in shared memory are released only at the end of an iteration (without a loop, of the block).
        self.keeps_operands = decided.stages > 1 or (tiling.has_groups and not frame.phase.loop_axis)
        is_pipelined = tiling.has_groups and decided.roles == "alike" and not decided.slice_elements
        #: Whether warps wait for all copies of a tile when it begins, as in compiled loops of several stages.
        self.waits_at_once = decided.stages > 1 and is_pipelined
        #: Whether the phase is the pipelined loop of a recurrence, which stores a result for each tile.
        outs = (n for n, place in frame.places.items() if place == "out")
        self.leaves = self.waits_at_once and any(frame.is_visited(n) for n in outs)
        staged = (*frame.held, *self.visited) if decided.slice_elements else self.visited
        #: Names that products read are in shared memory.  Other names are read where the loader stores them.
        self.shared = tuple(n for n in staged if any(n in s.read for s in how))
        #: Products also read values that rows compute from a tile's operands.
        self.prepared = tuple(n for n in frame.places if frame.is_of_operands(n))
        #: Operands of the loop that are copied to shared memory only for rows, and released at the iteration's end.
        self.for_rows = tuple(n for n in self.visited if n not in self.shared and self.is_copied(n))
        self.for_rows = self.for_rows if self.leaves else ()
        #: The queue that loads each operand.  In a library's product the copies of A wait for no copy of B; in compiled
        #: rows no copy waits for another; in a recurrence the copies of later tiles wait for no load to registers.
        self.loaders = dict.fromkeys(frame.operands, loader)
        apart = frame.operands if decided.code else frame.visited if is_product else ()
        self.loaders |= {n: f"{loader}{i or ''}" for i, n in enumerate(apart)}
        if self.leaves:
            copied = {*self.shared, *self.for_rows}
            self.loaders |= {n: f"{loader}1" for n in self.visited if n not in copied}
        #: Operands that are loaded once per block.
        self.held = tuple(n for n in frame.held if n not in self.shared)
        who = f"{frame.prefix}B{number}"
        self._place_operands(who)
        #: For stores for which warps do not wait: the queue, and the number of tiles (at most two) of each group that
        #: wait in it.
        self.storer = f"{SM}.B{number}STG"
        self.left = self._left(who)
        #: Operands that a block without a loop loads when a product begins, and the flag for this.
        self.late = self._late()
        if self.late:
            self.begun = core.allocator.ring(RF, f"{who} begun", 1, 1, producers=warps, consumers=(loader,))
        self.tiles = [self._place_tiles(f"{who}W{g}") for g in range(decided.groups)]

    # ---------------------------------------------------------------- operands

    def _tiles_under_way(self) -> int:
        """Return the number of tiles of operands in registers that are loaded before warps wait for one: the number
        that the kernel decides; for many operands, the number for which there are flags.
        """
        flags, direct = self.core.device.flags, [n for n in self.visited if n not in self.shared]
        direct = [n for n in direct if not self.is_copied(n)]
        if flags is None or not direct:
            return self.decided.loaded_tiles
        left = flags.usable_event_ids_count.value - len(self.held)
        return max(1, min(self.decided.loaded_tiles, left // len(direct)))

    def _place_operands(self, who: str) -> None:
        frame, decided, label = self.frame, self.decided, self.frame.label
        is_staged = self.core.is_staged or decided.stages == 1
        home = RF if decided.holds_in_registers else SMEM
        self.loaded: dict[str, Ring] = {
            n: self._ring(f"{who} {label(n)}", n, home, decided.held_depth, (self.loaders[n],)) for n in self.held
        }
        under_way = self._tiles_under_way()
        for n in dict.fromkeys((*self.visited, *self.shared)):
            name, loader = f"{who} {label(n)}", (self.loaders[n],)
            if n not in self.shared and self.is_copied(n):
                self.loaded[n] = self._ring(name, n, SMEM, decided.depth, loader)
            elif n not in self.shared:
                # Without products, only the rows before a load can hide it.
                self.loaded[n] = self._ring(name, n, RF, 1 if self.how else under_way, loader)
            elif is_staged:
                # The load of the next operand may wait for this load.
                others = loader if decided.stages == 1 and n != self.shared[-1] and not decided.slice_elements else ()
                self.loaded[n] = self._ring(f"{name} loaded", n, RF, 1, loader, (*self.readers, *others))
        # successive products use the same registers, so that a load waits for the previous one
        if decided.slice_elements:
            rights = [s.rows[0].srcs[1] for s in self.how]
            self.loaded |= dict.fromkeys(rights, self.loaded[rights[0]])
        self.near = dict(self.loaded)
        for n in self.shared:
            depth = 2 if decided.slice_elements else decided.depth
            writers = self.warps if is_staged else (self.loaders[n],)
            self.near[n] = self._ring(f"{who} {label(n)}", n, SMEM, depth, writers)
            self.loaded.setdefault(n, self.near[n])
        called = {label(n) for n in self.near}
        for n in self.prepared:  # a result with the name of its operand has a ring next to that of the operand
            name = f"{who} {label(n)}{' made' if label(n) in called else ''}"
            self.near[n] = self._ring(name, n, SMEM, 1, self.warps)
        self.near |= {n: self.near[whole] for n, whole in frame.views.items()}

    def _left(self, who: str) -> dict[tuple[str, int], Ring]:
        """Assign places to results that a separate queue stores: all results of compiled rows, those of alternating
        groups, and, in recurrences, results of tiles, which pass through shared memory.
        """
        frame, decided = self.frame, self.decided
        left: dict[tuple[str, int], Ring] = {}
        for n, g in product((n for n, place in frame.places.items() if place == "out"), range(decided.groups)):
            if decided.code or ((decided.alternates or self.leaves) and frame.is_visited(n)):
                size = frame.size_bytes(n, frame.height(n) * frame.width(n)) // decided.groups
                name, slots = f"{who}W{g} {frame.label(n)} stored", 2 if decided.code or decided.state_loop else 1
                warps, storer = self.warps[g : g + 1], (self.storer,)
                left[n, g] = self.core.allocator.ring(
                    RF, name, size, slots, producers=warps, consumers=storer, flag="scoreboard"
                )
        return left

    def _late(self) -> dict[Stage, tuple[str, ...]]:
        """Return the operands of a block without a loop that wait for an earlier product or result.

        Triton assigns operands of products the shared memory of earlier names, so that their copies wait for the warps.
        Operands that only rows read are loaded to registers after a loop over pieces of keys, if the kernel has one (in
        the machine code of FLA's chunk_fwd_kernel_o the first load of g follows the last product of K).
        """
        frame, result, is_out, seen = self.frame, set[str](), False, set[str]()
        late: dict[Stage, tuple[str, ...]] = {}
        for s in (
            frame.stages if self.tiling.has_groups and not frame.loop_axis and not self.decided.slice_elements else ()
        ):
            copied = (n for n in s.read if n in self.shared and self.loaded.get(n) is self.near[n])
            direct = (n for n in s.read if frame.phase.pieces and n in self.visited and n not in self.shared)
            own = tuple(n for n in (copied if s.is_product else direct) if n not in seen)
            if own and (is_out or result & {*s.read}):
                late[s] = own
            seen |= {*own}
            if s.is_product or result & {*s.read}:
                result |= {*s.written}
            is_out |= any(frame.places[n] == "out" for n in s.written)
        return late

    def _ring(
        self, name: str, n: str, space: str, depth: int, producers: tuple[str, ...], consumers: tuple[str, ...] = ()
    ) -> Ring:
        """Allocate a ring for tiles of an operand, or for slices of them; ``consumers``: by default the queues that
        read operands.
        """
        frame, readers, edge = self.frame, self.readers, self.decided.slice_elements
        (axis, *across), rows, pitch = frame.axes(n), frame.height(n), self.pitch(n, space)
        sums = {frame.phase.product_axes(s.rows[0])[1] for s in self.how} if edge else ()
        if n in self.shared and sums:
            rows, pitch = (edge, pitch) if axis in sums and across[0] not in sums else (rows, edge)
        size, is_viewed = frame.size_bytes(n, rows * pitch), n in frame.views.values() and not consumers
        return self.core.allocator.ring(
            space,
            name,
            size,
            depth,
            producers=producers,
            consumers=consumers or readers,
            flag="scoreboard",
            peeks=readers if is_viewed else (),
        )

    def is_copied(self, n: str) -> bool:
        """Return whether an operand of the loop is copied to shared memory: operands of products, or their sources."""
        makes = any(n in s.read for m in self.prepared for s in self.frame.stages if m in s.written)
        return n in self.shared or (makes and not (self.core.is_staged or self.decided.stages == 1))

    def stored_for(self, s: Stage) -> list[str]:
        """Return the operand that is loaded to registers and that warps store to shared memory before a product."""
        by_warps = (n for n in s.rows[0].srcs if n in self.shared and self.loaded[n] is not self.near[n])
        return [n for n in by_warps if self.ends(n, s)[0]]

    def pitch(self, n: str, space: str) -> int:
        """Return the number of elements from one row of an operand to the next."""
        return self.frame.width(self.frame.views.get(n, n)) + (self.decided.padding if space == SMEM else 0)

    # ---------------------------------------------------------------- registers

    def _place_tiles(self, who: str) -> dict[str, Tile]:
        """Return a warp group's tiles by name.

        If registers are counted, results that rows compute for a product are in the place of a product's results for
        rows, and a result is in the place of a state of the same size that is no longer read.
        """
        frame, core = self.frame, self.core
        tiles: dict[str, Tile] = {}
        served: dict[str, list[str]] = {}
        names = [n for n in dict.fromkeys(frame.storage.values()) if frame.places[n] not in ("global", "mask")]
        late = [n for n in names if core.has_warps and frame.places[n] in ("up", "out")]
        for n in sorted(names, key=late.__contains__):
            rows, below = ceil_div(frame.height(n), self.decided.groups), self._below(n, served) if n in late else None
            if below is not None:
                served[below].append(n)
                at = tiles[below]
                tiles[n] = Tile(RF, at.offset_bytes, rows, at.cols, at.cols, frame.fmt(n))
                continue
            is_kept = n in late or frame.places[n] in ("down", "state") or len(frame.axes(n)) == 1
            is_stored = self.decided.stores and frame.places[n] == "up"
            space, served[n] = SMEM if is_stored else RF if is_kept else core.passing, [n]
            tiles[n] = core.allocator.tile(space, f"{who} {frame.label(n)}", rows, frame.width(n), frame.fmt(n))
        for s, how in self.how.items():  # a product that is stored in a format other than that of its accumulator
            n, name, fmt = s.rows[0].dst, accumulator(s), how.accumulator_format
            if fmt != frame.fmt(n):
                rows = frame.phase.sizes[frame.row_axis] // self.decided.groups
                tiles[name] = core.allocator.tile(RF, f"{who} {name}", rows, frame.width(n), fmt)
        return tiles

    def _below(self, n: str, served: dict[str, list[str]]) -> str | None:
        """Return the name whose registers another name can use: that of a product's tile or, for a result, that of a
        state.
        """
        frame, size = self.frame, self.frame.size_bytes(n, 1)
        if frame.places[n] == "up" and (self.decided.ahead or self.decided.stores):
            return None  # P's product runs while the next scores are computed, or P is in shared memory
        wanted = "down" if frame.places[n] == "up" else "state"
        return next(
            (
                m
                for m, names in served.items()
                if frame.places[m] == wanted
                and frame.axes(m) == frame.axes(n)
                and frame.size_bytes(m, 1) >= size
                and all(frame.may_share(n, other) for other in names)
            ),
            None,
        )

    # ---------------------------------------------------------------- views for stages

    def part(self, group: int, n: str, rows: int, cols: int) -> Tile:
        """Return a group's part of a name in registers."""
        return self.tiles[group][self.frame.storage[n]].part(0, rows, 0, cols)

    def slot(
        self, ring: Ring, n: str, block: WorkTile, tile: Visit, *, first: bool = True, last: bool = True
    ) -> RingTile:
        """Return a consumer's view of an operand's slot."""
        shape, pitch = self.frame.shape(n, block, tile), self.pitch(n, ring.space)
        return ring.front(*shape, first=first, last=last, stride=pitch)

    def released(self, names: tuple[str, ...], block: WorkTile, tile: Visit) -> Handshake:
        """Return the slots of operands in shared memory, as views that only release them."""
        return tuple(self.slot(self.near[n], n, block, tile, first=False) for n in names)

    def operands_of(self, stages: tuple[Stage, ...]) -> tuple[str, ...]:
        """Return the operands that products among some stages read in shared memory."""
        return tuple(dict.fromkeys(n for s in stages if s.is_product for n in s.rows[0].srcs if n in self.shared))

    def held_slots(self, rows: int, *, first: bool = False, last: bool = False) -> Handshake:
        """Return a group's view of operands that stay in place until the block ends."""
        frame = self.frame
        return tuple(self.near[n].front(rows, frame.width(n), frame.fmt(n), first=first, last=last) for n in self.held)

    @cached_property
    def leading(self) -> frozenset[Stage]:
        """The first product of each loop, if it waits for all copies of a tile."""
        firsts = [next((s for s in loop.stages if s.is_product), None) for loop in self.frame.phase.loops]
        return frozenset(s for s in firsts if s is not None and self.waits_at_once)

    def ends(self, n: str, s: Stage) -> tuple[bool, bool]:
        """Return whether a product acquires an operand's slot, and whether it releases the slot: the first and the last
        reader in its loop.
        """
        readers = [p for p in self._loop_of(s) if p.is_product and n in p.rows[0].srcs]
        if n in self.prepared:
            return s is readers[0], s is readers[-1]
        is_first = s in self.leading if self.waits_at_once else s is readers[0]
        return is_first, s is readers[-1] and not self.keeps_operands

    def awaited(self, s: Stage, block: WorkTile, tile: Visit) -> Handshake:
        """Return the other operands of the tile, if a product is the first that waits for the tile's copies."""
        if s not in self.leading:
            return ()
        others = [n for n in self.operands_of(self._loop_of(s)) if n in self.visited and n not in s.rows[0].srcs]
        return tuple(self.slot(self.near[n], n, block, tile, last=False) for n in others)

    def operand(self, n: str, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> Operand:
        """Return an operand of a product; of the left operand, return the rows of the group."""
        frame, (row, rows) = self.frame, share
        if n not in self.near:
            return self.part(group, n, rows, frame.cols(n, block, tile))
        ring, axis = self.near[n], frame.axes(n)[0]
        if n in frame.held:
            is_shared_out = axis == frame.row_axis and n == s.rows[0].srcs[0]
            height = frame.height(n) if is_shared_out else frame.size(block, axis, tile)
            pitch = self.pitch(n, ring.space)
            slot = ring.front(height, frame.width(n), frame.fmt(n), first=False, last=False, stride=pitch)
        elif n in frame.views.values():
            # Another product reads a part of the operand, and releases it.
            slot = ring.peek(*frame.shape(n, block, tile), stride=self.pitch(n, SMEM))
        else:
            first, last = self.ends(n, s)
            slot = self.slot(ring, n, block, tile, first=first, last=last)
        if s.rows[0].attributes.transpose_a and n == s.rows[0].srcs[0]:
            return slot.part(0, slot.rows, row, rows)
        return slot.part(row, rows) if n == s.rows[0].srcs[0] else slot

    def _loop_of(self, s: Stage) -> tuple[Stage, ...]:
        """Return the stages of the loop of a stage, or of the finish."""
        phase = self.frame.phase
        return next(of for of in (*(loop.stages for loop in phase.loops), phase.finish) if s in of)

    def _readers(self, root: str, s: Stage) -> list[Stage]:
        """Return the stages of rows that read an operand's slot in the loop of a stage."""
        root_of = self.frame.storage.get
        return [x for x in self._loop_of(s) if not x.is_product and any(root_of(n, n) == root for n in x.read)]

    def _read_by_rows(self, root: str, n: str, s: Stage, block: WorkTile, tile: Visit) -> RingTile:
        """Return the slot of an operand that rows read; a block acquires it at its start and releases it at its end."""
        once, readers = root not in self.held, self._readers(root, s)
        first, last = once and s is readers[0], once and s is readers[-1] and root not in self.for_rows
        return self.slot(self.near[root], n, block, tile, first=first, last=last)

    def slots_of_rows(self, s: Stage, block: WorkTile, tile: Visit) -> Handshake:
        """Return the slots that a rows stage reads and no block holds; a group without rows also waits for
        these slots.
        """
        roots = {n: self.frame.storage.get(n, n) for n in s.read}
        return tuple(
            self._read_by_rows(root, n, s, block, tile)
            for n, root in roots.items()
            if root in self.near and root not in self.held and root not in s.written
        )

    def bindings(self, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> dict[str, Source]:
        """Return the operands and results of a stage's rows, by name, for a group's share of the rows."""
        frame = self.frame
        bound: dict[str, Source] = dict(frame.phase.constants)
        for n in (*s.written, *s.read):
            root = frame.storage.get(n, n)
            if root in self.near and root not in s.written:
                bound[n] = self._read_by_rows(root, n, s, block, tile).part(*frame.rows_of(n, share))
            elif n in frame.phase.masks:
                if n in tile.only or frame.is_everywhere(n):
                    bound[n] = frame.mask_cut(n, block, tile, share)
            elif n in frame.phase.names:
                bound[n] = self.part(group, n, frame.rows_of(n, share)[1], frame.cols(n, block, tile))
        bound.update(frame.phase.per_tile(tile) if tile.cols else {})
        return bound


def accumulator(s: Stage) -> str:
    """Return the name of a product's accumulator, if its result is stored in another format."""
    return f"{s.name} accumulator"
