"""Costs of warps' operations on a multiprocessor; each runs on one of its shared pipes."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from math import ceil, sqrt
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.core_units import DmaEngine, SharedMemoryPipe
from npusim.machines.sm.core import LDG, LSU, SM, engine_of, warp_issue
from npusim.machines.sm.group_cost import GroupModel
from npusim.machines.sm.group_work import GroupWork
from npusim.machines.sm.lane_cost import LaneModel
from npusim.machines.transfers import Transfers
from npusim.program.ir.op import TileOp
from npusim.program.ir.tile import GlobalTile, RingTile
from npusim.program.ir.tile_program import Cost, Loop
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from npusim.config.core_units import RouteSpec
    from npusim.config.device import DeviceSpec
    from npusim.machines.decisions import GpuDecisions
    from npusim.program.ir.op import Step
    from npusim.program.ir.tile_program import Block, Item, ProgramPhase, TileProgram, Touch


class LoopTime(NamedTuple):
    """An iteration of a loop, in cycles.

    moved, written
        Time that memory takes for what one iteration of all blocks on the device at a time moves, and for the part that
        L2 writes back.
    work
        Time of the warps of a block, if they wait for nothing.
    """

    moved: float
    written: float
    work: float

    def wait(self, longest: int, depth: int, latency: int) -> float:
        """Return the cycles that a load which misses L2 waits because memory writes lines back, in a loop that stores a
        result for each tile.

        A wait w is in proportion to the geometric mean of the shares of an iteration's time that memory takes for these
        lines, and for all lines; it is ``longest`` if they take all of it.  A slot of ``depth`` is free again when the
        warps have computed its tile, so that ``depth`` iterations take ``latency`` + w + the cycles of the warps, if
        they hide less.
        """
        alone, wait = latency + self.work, longest * sqrt(self.moved * self.written)  # times cycles of an iteration
        iteration = max(self.moved, self.work, (alone + sqrt(alone**2 + 4 * depth * wait)) / (2 * depth))
        return wait / iteration


class RoundTrip(NamedTuple):
    """An iteration of a loop that waits for each of its loads, in cycles.

    An iteration takes a norm of two times: ``alone`` / ``depth``, and ``moved``.  This is Little's law for memory that
    serves no load before its latency, and all loads at its rate, without the sharp bend between both.

    latency
        Time from a load to its arrival if no other core uses memory.
    alone
        The same with the pipe of loads and the warps' work on a tile.
    moved
        Time that memory takes for what one iteration of all blocks on the device at a time moves.
    depth
        Tiles of a block that are loaded at a time.
    exponent
        Exponent of the norm.
    """

    latency: float
    alone: float
    moved: float
    depth: int
    exponent: float

    @property
    def queued(self) -> float:
        """Time for which a load waits behind others, if memory takes less time than the loads."""
        return self.depth * self._added if self.alone > self.depth * self.moved else 0.0

    @property
    def lost(self) -> float:
        """Time that memory loses relative to its time, if it takes longer than the loads."""
        return self._added / self.moved if self.moved and self.alone <= self.depth * self.moved else 0.0

    @property
    def _added(self) -> float:
        shorter, longer = sorted((self.alone / self.depth, self.moved))
        return longer * _norm_excess(shorter / longer, self.exponent) if longer else 0.0


def _norm_excess(ratio: float, exponent: float) -> float:
    """Return by how much the norm of 1 and ``ratio`` exceeds 1."""
    return float((1 + ratio**exponent) ** (1 / exponent) - 1)


class SmPricing(Transfers):
    """Costs of a program's operations on one GPU."""

    def __init__(self, program: TileProgram, device: DeviceSpec) -> None:
        super().__init__(program, device)
        self.sharing = warp_issue(device).sharing
        self._cold = cold_reads(program, self.sharing.in_step_count.value) if not program.has_own_rows else None

    @cached_property
    def _groups(self) -> GroupModel:
        return GroupModel(self.device)

    @cached_property
    def _lanes(self) -> LaneModel:
        return LaneModel(self.device)

    def of_op(self, op: TileOp) -> Cost:
        """Return the cost of an operation: of its single move, or of a warp's instructions."""
        if isinstance(op.work, GroupWork):
            return self._groups.cost(op, op.work)
        spec = self.device.engine(SM, op.engine)
        if not isinstance(spec, DmaEngine):
            return self._lanes.cost(op)
        (step,) = op.steps
        moved = self.move(step, spec, f"cores.{SM}.engines.{op.engine}")
        if step.attributes.lookups and isinstance(source := step.srcs[0], GlobalTile):
            # A table gives the number of each row. The table is read before the rows and misses L2 as often as they
            # do.
            shared = self.sharing.lookup_miss_cycles if source.tensor.heads > 1 else None
            missed = shared or self.device.memory.l2.miss_extra_latency_cycles
            beyond = self._miss_share(source.tensor.name) * missed.value
            wait = step.attributes.lookups * (self.sharing.lookup_cycles.value + beyond)
            moved = moved._replace(latency_cycles=moved.latency_cycles + ceil(wait))
        if isinstance(source := step.srcs[0], GlobalTile):
            moved = moved._replace(occupancy_cycles=max(moved.occupancy_cycles, self._cycles_of_sectors(source)))
            moved = moved._replace(latency_cycles=moved.latency_cycles - self._earlier(source))
        if step.attributes.memory_waits:
            return self._in_step(step, moved)
        if step.attributes.awaited:
            moved = self._awaited(step, moved)
        if step.attributes.accesses > 1:
            moved = moved._replace(latency_cycles=moved.latency_cycles + self._further_accesses(step))
        moved = moved._replace(latency_cycles=moved.latency_cycles + self._behind_writes(step, moved.latency_cycles))
        share = self.device.clock_share  # L2's clock does not change when the clock of products falls
        port, latency = ceil(moved.occupancy_cycles * share), ceil(moved.latency_cycles * share)
        return moved._replace(occupancy_cycles=port, latency_cycles=latency, pipe_cycles=((f"{SM}.{op.engine}", port),))

    def _earlier(self, source: GlobalTile) -> int:
        """Return the cycles by which a row arrives earlier than after its route's latency, if a program that goes on
        with further rows reads few bytes per warp.
        """
        rounds, near = self.device.memory.gm.rounds, self.sharing.lookup_cycles.value
        if rounds is None or rounds.warp_bytes_per_cycle is None or not self._program.goes_on:
            return 0
        route = engine_of(self.device, LDG, DmaEngine).route("GM", "RF")
        warps = self._decided.warps * self._decided.groups if self._decided is not None else 1
        near += ceil(source.payload_bytes / warps / rounds.warp_bytes_per_cycle.value)
        return max(0, route.latency_cycles.value - near)

    @cached_property
    def _decided(self) -> GpuDecisions | None:
        """The decisions of the warps of the program's first phase; None without such warps."""
        (phase,) = self._program.phases[:1]
        works = (op.work for op in _operations(phase.body(phase.blocks[0])))
        return next((work.decided for work in works if isinstance(work, GroupWork)), None)

    def _further_accesses(self, step: Step) -> int:
        """Return the cycles of the accesses of a load after the first one, each of which waits for the one before."""
        (source,), rounds, near = step.srcs, self.device.memory.gm.rounds, self.sharing.lookup_cycles.value
        assert isinstance(source, GlobalTile)
        far = near + self.device.memory.l2.miss_extra_latency_cycles.value
        far = far if rounds is None else rounds.round_trip_cycles.value
        missed = self.residency.read_waits[source.tensor.name]
        return ceil((step.attributes.accesses - 1) * (near + missed * (far - near)))

    def _round_trip(self, step: Step, port: float) -> RoundTrip | None:
        """Return the iteration of a loop that waits for a copy which uses the pipe for ``port`` cycles; None if the
        device file states no round trip.

        A load from L2 takes the time of one access, and from memory that of a round trip. A copy to shared memory is
        also read from there, and its round trip includes the warps' work on a tile.
        """
        source, rounds = step.srcs[0], self.device.memory.gm.rounds
        if rounds is None or not isinstance(source, GlobalTile) or not isinstance(step.dst, RingTile):
            return None
        loop = self._awaited_loops[source.tensor.name]
        near, far = self.sharing.lookup_cycles.value, float(rounds.round_trip_cycles.value)
        if step.attributes.awaited == "copies":
            near += engine_of(self.device, LSU, SharedMemoryPipe).latency_cycles.value
            far = max(near, far - loop.work)
        latency = near + self._miss_share(source.tensor.name) * (far - near)
        alone, exponent = latency + port + loop.work, float(rounds.exponent_factor.value)
        return RoundTrip(latency, alone, loop.moved, step.dst.ring.depth, exponent)

    def _awaited(self, step: Step, moved: Cost) -> Cost:
        """Return the cost of a load for which each iteration of a loop waits: its latency is that of a round trip."""
        trip = self._round_trip(step, moved.occupancy_cycles)
        return moved if trip is None else moved._replace(latency_cycles=ceil(trip.latency + trip.queued))

    def _behind_writes(self, step: Step, latency: int) -> int:
        """Return the cycles that a load of a loop which stores a result for each tile waits because memory writes lines
        back.
        """
        source, target, longest = step.srcs[0], step.dst, self.device.memory.l2.written_wait_cycles
        if longest is None or not isinstance(source, GlobalTile) or not isinstance(target, RingTile):
            return 0
        loop = self._stored_loops.get(source.tensor.name)
        missed = self._miss_share(source.tensor.name)
        if loop is None or not loop.written or not missed:
            return 0
        return ceil(missed * loop.wait(longest.value, target.ring.depth, latency))

    @cached_property
    def _stored_loops(self) -> dict[str, LoopTime]:
        """The loops that store a result for each tile, by tensor that they read."""
        return self._loops_with(lambda step: isinstance(step.dst, GlobalTile)) if self.is_placed else {}

    @cached_property
    def _awaited_loops(self) -> dict[str, LoopTime]:
        """The loops that wait for each of their loads, by tensor that they read."""
        return self._loops_with(lambda step: bool(step.attributes.awaited))

    def _loops_with(self, is_wanted: Callable[[Step], bool]) -> dict[str, LoopTime]:
        """Return the loops with a wanted step, by tensor that they read; without places, memory takes no time."""
        result: dict[str, LoopTime] = {}
        for phase in self._program.phases:
            counts = phase.tile_counts
            block = phase.blocks[counts.index(max(counts))]
            iteration = _iteration(phase, block)
            if not any(is_wanted(step) for op in iteration for step in op.steps):
                continue
            touches = list(phase.footprint([block]))
            moved, written = self._cycles_of_iteration(phase, touches, block.tile_count)
            loop = LoopTime(moved, written, self._work_of_warps(iteration))
            result |= {t.region.tensor.name: loop for t in touches if not t.is_write}
        return result

    def _cycles_of_iteration(self, phase: ProgramPhase, touches: Iterable[Touch], tiles: int) -> tuple[float, float]:
        """Return the cycles that memory takes for what one iteration of all blocks on the device at a time moves, and
        for the part that L2 writes back, from what a block with this number of tiles touches.
        """
        if not self.is_placed or "hbm" not in self.device.links:
            return 0.0, 0.0
        held, groups, read, written = self.residency, self.device.group_count.value, 0.0, 0.0
        for touch in touches:
            name, size = touch.region.tensor.name, touch.region.payload_bytes
            if touch.is_write:
                written += size * (held.write_misses.get(name, 0.0) + held.write_pushes.get(name, 0.0))
            else:
                read += size * touch.times * held.read_misses.get(name, 0.0)
                written += size * touch.times * held.read_pushes.get(name, 0.0)
        together = len(phase.blocks) / ceil_div(len(phase.blocks), phase.place_count * groups)
        each = together / tiles / self.device.link("hbm").rate * self.device.clock_hz.value
        return (read + written) * each, written * each

    def _work_of_warps(self, ops: Sequence[TileOp]) -> float:
        """Return the cycles of an iteration of a loop for the warps of one queue, without waits."""
        by_warps = [op for op in ops if isinstance(op.work, GroupWork)]
        costs = [self.of_op(op) for op in by_warps if op.queue == by_warps[0].queue]
        return float(sum(c.occupancy_cycles + c.latency_cycles + (c.share.cycles if c.share else 0) for c in costs))

    def _cycles_of_sectors(self, source: GlobalTile) -> int:
        """Return the cycles for which a multiprocessor reads the sectors of a tile that has only parts of them.

        It gets one after the other, at its share of L2's rate: 20 loads of columns (reports/silicon/strided.json) are
        10.1 % off, and 26 % without.
        """
        if "l2" not in self.device.links:
            return 0
        rate = self.device.link("l2").rate / self.device.clock_hz.value / self.device.group_count.value
        return ceil(source.sector_bytes(self.device.memory.gm.request_min_bytes.value) / rate)

    def _in_step(self, step: Step, moved: Cost) -> Cost:
        """Return the cost of a load for which all blocks of the device wait together.

        The blocks queue for memory until it has served all of them, which takes as long as the first load, or longer.
        Only the transfer from L2 comes after that, once for each wait.  Meanwhile loads of other blocks use the pipe.
        """
        (source,), memory = step.srcs, self.device.memory
        count, hits = step.attributes.memory_waits, step.attributes.near_waits
        assert isinstance(source, GlobalTile)
        lines = max(1.0, source.payload_bytes / memory.gm.alignment_bytes.value)
        missed = min(1.0, lines * self.residency.read_misses[source.tensor.name])  # lanes wait for a tile's last line
        near, far = self.sharing.lookup_cycles.value, moved.latency_cycles
        far -= ceil(self._miss_share(source.tensor.name) * memory.l2.miss_extra_latency_cycles.value)
        first, read, written = memory.l2.miss_extra_latency_cycles.value, *self._cycles_of_all
        queued = max(first, written + read / count) + (count - 1) * max(first, read / count)
        share = self.device.clock_share
        port = ceil(moved.occupancy_cycles * share)
        return moved._replace(
            occupancy_cycles=max(port, ceil(missed * queued * share)),
            latency_cycles=ceil((count * (near + missed * max(0.0, far - near)) + hits * near) * share),
            pipe_cycles=((f"{SM}.LDG", port),),
        )

    @cached_property
    def _cycles_of_all(self) -> tuple[float, float]:
        """Average numbers of cycles that memory takes for what one iteration of all blocks that are on the device at a
        time reads, and for what it stores.
        """
        if not self.is_placed or "hbm" not in self.device.links:
            return 0.0, 0.0
        held, read, written = self.residency, 0.0, 0.0
        for name, tensor in self._program.tensors.items():
            read += tensor.size_bytes * (held.read_misses.get(name, 0.0) + held.read_pushes.get(name, 0.0))
            written += tensor.size_bytes * (held.write_misses.get(name, 0.0) + held.write_pushes.get(name, 0.0))
        (phase,) = self._program.phases[:1]
        together = len(phase.blocks) / ceil_div(len(phase.blocks), phase.place_count * self.device.group_count.value)
        share = together / sum(max(1, count) for count in phase.tile_counts)
        each = share / self.device.link("hbm").rate * self.device.clock_hz.value
        return read * each, written * each

    @cached_property
    def _lost_share(self) -> float:
        """Time that memory loses because few bytes are in flight, relative to its time for the bytes; see `RoundsSpec`.

        In the first round nothing is lost, because nothing is late.  If memory is used for less time than a round takes
        by itself, the simulated times of loads and warps decide; the same holds for programs that go on with further
        rows, which remain in step.
        """
        program, spec = self._program, self.device.memory.gm.rounds
        if spec is None or not program.has_own_rows or program.is_in_step or not self.is_placed:
            return 0.0
        (phase,), decided = program.phases[:1], self._decided
        used, ends = sum(self._cycles_of_all), decided.due("begin", "end") if decided else ()
        if decided is None or decided.code is None or not ends or not used:
            return 0.0
        # a block ends when its last store has arrived
        alone = spec.round_trip_cycles.value + decided.code.alone_cycles + self._store_cycles
        alone += sum(c.times * self._groups.constant(c.key).value for c in ends)
        rounds: float = len(phase.blocks) / (phase.place_count * self.device.group_count.value)
        exponent, ratio = float(spec.exponent_factor.value), min(1.0, alone / used)
        return _norm_excess(ratio, exponent) * max(0.0, 1 - 1 / max(1.0, rounds))

    @cached_property
    def _store_cycles(self) -> int:
        copies = engine_of(self.device, LDG, DmaEngine)
        return copies.route("RF", "GM").latency_cycles.value

    def _idle(self, step: Step, route: RouteSpec) -> tuple[tuple[str, int], ...]:
        """Return the bytes that memory could transfer in the time that it loses to parts of lines and to few bytes in
        flight.
        """
        idle, lost = dict(super()._idle(step, route)), self._lost_share
        if lost and "hbm" in route.links:
            idle["hbm"] = idle.get("hbm", 0) + ceil(self._beyond(step) * lost)
        if step.attributes.awaited and "hbm" in route.links:
            trip = self._round_trip(step, step.dst.payload_bytes / route.bytes_per_cycle.value)
            if trip is not None and trip.lost:
                idle["hbm"] = idle.get("hbm", 0) + ceil(self._beyond(step) * trip.lost)
        return tuple(idle.items())

    def _miss_share(self, tensor: str) -> float:
        misses = self.residency.read_misses[tensor]
        # the first reader misses only data that are not in L2
        if self._cold is None or not self.is_placed or not misses:
            return misses
        return self._cold.get(tensor, 0.0)

    def _links(self, step: Step, route: RouteSpec) -> tuple[tuple[str, int], ...]:
        """Return the bytes on each link. L2 sends whole sectors for reads of parts of sectors, and its bytes count for
        less where many cores read them together.
        """
        sizes, source, l2 = super()._links(step, route), step.srcs[0], self.device.memory.l2
        if isinstance(source, GlobalTile):
            sectors = source.sector_bytes(self.device.memory.gm.request_min_bytes.value)
            sizes = tuple((link, max(n, sectors) if link == "l2" else n) for link, n in sizes)
        if l2.same_data_factor is None or l2.same_data_cores_count is None or not isinstance(source, GlobalTile):
            return sizes
        readers = self.residency.shared_reads[source.tensor.name] * (self.device.group_count.value - 1)
        share = min(1.0, readers / l2.same_data_cores_count.value)
        factor = 1 - share + share / l2.same_data_factor.value
        return tuple((link, ceil(n * factor) if link == "l2" else n) for link, n in sizes)


def cold_reads(program: TileProgram, in_step: int) -> dict[str, float]:
    """Return the share of each tensor's loads that wait for memory beyond L2, as the average over blocks.

    Blocks that share a head's keys run in step until the blocks of a place have read ``in_step`` tiles: when the head
    is read for the first time, all of them wait for the first block's misses. Later blocks hit data that another block
    has loaded. Blocks of a recurrence, which store a result for each tile, remain in step, because a block that is
    ahead waits for memory (`chunk_fwd_kernel_h` on an H100, two stages: a chunk takes as long in sequences of 128
    chunks as in sequences of 32).
    """
    shares: dict[str, float] = {}
    written: set[str] = set()
    for phase in program.phases:
        touches = list(phase.footprint(phase.blocks[:1]))
        touched = {t.region.tensor.name: t.region.tensor for t in touches if not t.is_write}
        heads = max((t.heads for t in touched.values()), default=1)
        cold = {name: heads // t.heads for name, t in touched.items() if name not in shares and name not in written}
        tiles = phase.blocks[0].tile_count if phase.blocks else 0
        # A block of few tiles may have as many results for another reason; it reads all its tiles in step anyway.
        together = tiles if in_step < tiles <= sum(t.is_write for t in touches) else in_step
        waits = {sharing: _waiting(phase, sharing, together) for sharing in set(cold.values())}
        shares |= {name: waits[sharing] for name, sharing in cold.items()}
        written |= {t.region.tensor.name for t in touches if t.is_write}
    return shares


def _waiting(phase: ProgramPhase, sharing: int, in_step: int) -> float:
    """Return the share of loads that wait for memory; one head of the tensor serves ``sharing`` heads of the blocks."""
    places = max((b.place for b in phase.blocks), default=0) + 1
    wave, count = places * max(1, len(phase.dealt)), len(phase.blocks)
    tiles = max(1, sum([b.tile_count for b in phase.blocks]) // count)
    parts = {id(b.runs): _part(b) for b in {id(b.runs): b for b in phase.blocks}.values()}
    read = [(b.batch, b.head // sharing, parts[id(b.runs)]) for b in phase.blocks]
    readers, first = Counter(read), set(read[:wave])
    waits = float(sum(n == 1 for n in readers.values()))
    for start in range(0, count, wave):
        if (left := in_step - start // wave * tiles) <= 0:
            break
        shared = (h for h in read[start : start + wave] if readers[h] > 1 and (not start or h not in first))
        waits += min(1.0, left / tiles) * sum(1 for _ in shared)
    return waits / count


def _part(block: Block) -> int:
    """Return the number of a block's part of the keys, if all parts are as long as this one."""
    return block.first // max(1, block.last - block.first) if block.tile_count else 0


def _iteration(phase: ProgramPhase, block: Block) -> Sequence[TileOp]:
    """Return the operations of an iteration of a block's longest loop; none if the block has no loop."""
    loops = (item for item in phase.body(block) if isinstance(item, Loop))
    longest = max(loops, key=lambda loop: len(loop.indices), default=None)
    return list(_operations(longest.body(longest.indices[0]))) if longest else []


def _operations(items: Iterable[Item]) -> Iterator[TileOp]:
    """Yield the operations of items, with one iteration of each loop."""
    for item in items:
        if isinstance(item, Loop):
            yield from _operations(item.body(item.indices[0]))
        else:
            yield item
