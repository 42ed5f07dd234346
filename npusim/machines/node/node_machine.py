"""The resources of a node in SimPy: a device's cores, a collective among all devices, and the host.

Times are integer femtoseconds, since devices and links have no common clock.  Bytes on links and
work of kernels are integrated by the same code, ``timing.link``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from math import ceil, log2
from typing import TYPE_CHECKING

from simpy.events import AllOf, AnyOf, Event

from npusim.errors import SpecError
from npusim.machines.node.node_program import CopyCall, HostCall, KernelWork, Waves
from npusim.program.timing.link import SharedLink
from npusim.units import ceil_div

if TYPE_CHECKING:
    from simpy import Environment

    from npusim.config.device import DeviceSpec
    from npusim.config.node_file import CpuSpec, NodeLink, NodeSpec, PcieSpec
    from npusim.machines.node.collective import PlannedCollective, Transfer
    from npusim.machines.node.topology import Topology

    Steps = Generator[Event, object, None]

FEMTOSECONDS = 10**15
#: Sub-units of a byte on a link: about 2**-15 byte crosses in a femtosecond, so that 2**-40 rounds by 1e-7.
LINK_BITS = 40
#: A device that has been idle for no longer than this time wakes immediately (`PcieSpec.wake_s`).
AWAKE_S = 1e-3


def femtoseconds(seconds: float) -> int:
    """Return femtoseconds, rounded once to an integer."""
    return round(seconds * FEMTOSECONDS)


def shared_link(env: Environment, name: str, bytes_per_s: float) -> SharedLink:
    """Return a link whose transfers share its bandwidth, in femtoseconds."""
    return SharedLink(env, name, bytes_per_s / FEMTOSECONDS, LINK_BITS)


class Fabric:
    """All links of a node, each shared by the transfers on it."""

    def __init__(self, env: Environment, topology: Topology) -> None:
        self.env, self.topology = env, topology
        self.links = {e.name: shared_link(env, e.name, e.bytes_per_s) for e in topology.edges()}


class Device:
    """One device: its cores, the claims of others on them, and the engines that drive collectives."""

    def __init__(self, env: Environment, index: int, spec: DeviceSpec) -> None:
        self.env, self.index, self.spec = env, index, spec
        self.claims: dict[str, float] = defaultdict(float)
        self._work = SharedLink(env, "work", 1.0, LINK_BITS)
        self._demand: tuple[tuple[str, float], ...] = ()
        #: Numbers of cores with blocks of a kernel, of cores that drive collectives, and of blocks that are not
        #: dispatched yet.
        self._busy_cores = self._held_cores = self._pending_blocks = 0
        self._claimed_count = 0  # collectives that were ready so far
        self._cores_left = env.event()
        self._beside_factor, self._pace_changed = 1.0, env.event()
        self._drivers: dict[tuple[str, str], SharedLink] = {}
        self._between: SharedLink | None = None

    def run_kernel(self, work: KernelWork) -> Steps:
        """Run one kernel to its end."""
        if work.launch_fs:
            yield self.env.timeout(work.launch_fs)
        if not work.waves:
            yield from self._progress(work.alone_fs, work.demand)
        for waves in work.waves:
            yield from self._run_blocks(waves)

    def _run_blocks(self, waves: Waves) -> Steps:
        """Run the blocks of one launch on the cores that collectives do not use."""
        self._pending_blocks = waves.block_count
        # Collectives that already wait for cores get them before the first blocks start.
        yield self.env.timeout(0)
        while self._pending_blocks or self._busy_cores:
            cores = min(self._pending_blocks, self._free_cores(waves.core_count))
            if cores > 0:
                started = min(self._pending_blocks, cores * waves.resident)
                self._pending_blocks -= started
                self._busy_cores += cores
                self.env.process(self._batch(cores, started, waves))
            yield self._cores_left
        yield from self._spend(waves.merge_fs)

    def _batch(self, cores: int, blocks: int, waves: Waves) -> Steps:
        """Run blocks that start together, distributed over the cores as evenly as possible."""
        each, more = divmod(blocks, cores)
        yield from self._spend(waves.core_fs(each))
        if more:
            self._leave(cores - more)
            yield from self._spend(waves.core_fs(each + 1) - waves.core_fs(each))
        self._leave(more or cores)

    def _spend(self, work_fs: int) -> Steps:
        """Wait for the time of a core's blocks, which is longer while a collective runs concurrently."""
        while work_fs > 0:
            began, factor = int(self.env.now), self._beside_factor
            yield AnyOf(self.env, [self.env.timeout(ceil(work_fs * factor)), self._pace_changed])
            work_fs -= ceil((int(self.env.now) - began) / factor)

    def _free_cores(self, core_count: int) -> int:
        return core_count - self._busy_cores - self._held_cores

    def _leave(self, busy: int = 0, held: int = 0) -> None:
        self._busy_cores -= busy
        self._held_cores -= held
        left, self._cores_left = self._cores_left, self.env.event()
        left.succeed()

    def _progress(self, work_fs: int, demand: tuple[tuple[str, float], ...]) -> Steps:
        if not work_fs:
            return
        self._demand = demand
        self._update()
        yield flow(self.env, self._work, work_fs)
        self._demand = ()

    def _update(self) -> None:
        self._work.change_rate(progress_rate(self._demand, self.claims))

    def claim(self, plan: PlannedCollective) -> Steps:
        """Claim the resources of a collective; cores one by one, when blocks on them end.

        Model: blocks are dispatched kernel by kernel, in order of launch, and a block that drives a collective needs a
        whole core.  The next kernel and a collective that waits for an event start within 4 us of one another, in an
        order that differs from device to device (two H100, one of them traced, 4 to 32 ki tokens in 2 to 8 blocks: the
        collective is first in 14 of 22 at the default priority of its stream, in 4 of 22 at the high priority;
        otherwise it begins with the last blocks of the next kernel).  A collective that starts first on only one device
        occupies cores of that device until the other devices begin it.  In this model every second collective starts
        first on even devices, and no other collective does.
        """
        if plan.driver.core is not None:
            is_first = not (self.index % 2 or self._claimed_count % 2)
            self._claimed_count += 1
            if not is_first:
                yield self.env.timeout(1)
            wanted, core_count = plan.driver.engine_count.value, self.spec.core_count(plan.driver.core)
            while True:
                is_behind = self._pending_blocks and (self._busy_cores or not is_first)
                granted = 0 if is_behind else min(wanted, self._free_cores(core_count))
                self._held_cores += granted
                wanted -= granted
                if not wanted:
                    break
                yield self._cores_left
        self._claim(plan, 1)

    def release(self, plan: PlannedCollective) -> None:
        """Release the claims of `claim`."""
        self._claim(plan, -1)
        self.slow(plan, -1)
        if plan.driver.core is not None:
            self._leave(held=plan.driver.engine_count.value)

    def between(self, plan: PlannedCollective, link: NodeLink, size_bytes: int) -> Steps:
        """Transfer around the ring of this device's counterparts in the other servers.

        Model: the servers are equal and in step, so that data from the previous server arrive while this server sends
        to the next: one server represents all servers.
        """
        if self._between is None:
            # One port for each device, which chunks and collectives in flight share.
            self._between = shared_link(self.env, "between", link.bytes_per_s.value)
        piece = ceil_div(size_bytes, plan.call.servers)
        for _ in range(plan.call.rounds_between):
            yield self.env.timeout(femtoseconds(plan.mode.transfer_start_s.value))
            yield flow(self.env, self._between, piece)
            yield self.env.timeout(femtoseconds(link.latency_s.value))

    def slow(self, plan: PlannedCollective, sign: int) -> None:
        """Begin (1) or end (-1) the slowdown of blocks that run concurrently with a collective; it begins when all
        devices have joined.
        """
        beside = plan.driver.beside_factor
        if beside is not None:
            self._beside_factor *= float(beside.value) ** sign
            changed, self._pace_changed = self._pace_changed, self.env.event()
            changed.succeed()

    def _claim(self, plan: PlannedCollective, sign: int) -> None:
        touched = plan.sending_bytes_per_s() * plan.driver.memory_touches_factor.value
        self.claims["hbm"] += sign * touched / self.spec.link("hbm").rate
        core = plan.driver.core
        if core is not None:
            share = plan.driver.engine_count.value / self.spec.core_count(core)
            self.claims[core] += sign * share
        self._update()

    def driver(self, plan: PlannedCollective) -> SharedLink:
        """Return the engines of a collective's driver, shared by the transfers this device sends."""
        key = (plan.driver.core or "", plan.mode_name)
        if key not in self._drivers:
            engines = plan.driver.engine_count.value * plan.mode.engine_bytes_per_s.value
            self._drivers[key] = shared_link(self.env, "driver", engines)
        return self._drivers[key]


class RunningCollective:
    """One collective in progress among all devices: every chunk passes through every round."""

    def __init__(
        self, fabric: Fabric, devices: Sequence[Device], plan: PlannedCollective, between: NodeLink | None = None
    ) -> None:
        self.between = between if plan.call.servers > 1 else None
        self.env, self.fabric, self.devices, self.plan = fabric.env, fabric, devices, plan
        env, count = self.env, len(devices)
        self._is_begun = False
        self.arrived = [env.event() for _ in devices]
        self.left = [env.event() for _ in devices]
        self.chunks = plan.chunk_sizes()
        self._done = [[env.event() for _ in devices] for _ in self.chunks]
        self._parts = _by_rank(plan.collective.rounds, count)

    def join(self, rank: int) -> Steps:
        """Take part as ``rank``, from the start to this rank's end."""
        yield self.env.timeout(femtoseconds(self.plan.mode.start_s.value))
        if not self._is_begun:
            self._begin()
        self.arrived[rank].succeed()
        yield AllOf(self.env, self.arrived)
        self.devices[rank].slow(self.plan, 1)
        yield self.left[rank]

    def _begin(self) -> None:
        self._is_begun = True
        env, plan, count = self.env, self.plan, len(self.devices)
        for chunk, size in enumerate(self.chunks):
            ready = [[env.event() for _ in self.devices] for _ in plan.collective.rounds]
            sent = [[env.event() for _ in r] for r in plan.collective.rounds]
            sizes = plan.transfer_bytes(size)
            for rank in range(count):
                env.process(self._rank(chunk, rank, ready, sent, sizes))

    def _rank(
        self, chunk: int, rank: int, ready: list[list[Event]], sent: list[list[Event]], sizes: list[list[int]]
    ) -> Steps:
        yield self.arrived[rank]
        flying = self.plan.mode.chunks_in_flight_count
        before = chunk - (flying.value if flying else 1)
        if before >= 0:
            yield self._done[before][rank]
        for number, transfers in enumerate(self.plan.collective.rounds):
            if self.between is not None and 2 * number == len(ready):
                share = ceil_div(self.chunks[chunk], len(self.devices))
                yield from self.devices[rank].between(self.plan, self.between, share)
            ready[number][rank].succeed()
            indices = self._parts[number][rank]
            for index in indices:
                if transfers[index].source == rank:
                    self.env.process(
                        self._transfer(transfers[index], ready[number], sent[number][index], sizes[number][index])
                    )
            if indices:
                yield AllOf(self.env, [sent[number][index] for index in indices])
        if local := self.plan.mode.local_s_per_byte:
            yield self.env.timeout(femtoseconds(self.chunks[chunk] / self.plan.collective.shard_count * local))
        self._done[chunk][rank].succeed()
        if chunk == len(self.chunks) - 1:
            self.left[rank].succeed()

    def _transfer(self, transfer: Transfer, ready: list[Event], done: Event, size: int) -> Steps:
        plan, env = self.plan, self.env
        yield ready[transfer.target]
        yield env.timeout(femtoseconds(plan.mode.transfer_start_s.value))
        route = self.fabric.topology.route(transfer.source, transfer.target)
        if size:
            shared = [self.fabric.links[e.name] for e in route]
            shared.append(self.devices[transfer.source].driver(plan))
            port = env.timeout(femtoseconds(size / plan.transfer_bytes_per_s))
            yield AllOf(env, [port, *(flow(env, link, size) for link in shared)])
        yield env.timeout(femtoseconds(sum(e.latency_s for e in route)))
        done.succeed()


def progress_rate(demand: tuple[tuple[str, float], ...], claims: dict[str, float]) -> float:
    """Return the rate, 0 to 1, of work that uses ``demand`` while other work has ``claims``.

    The free part of a resource serves the work at ``left / demand`` of its speed; the scarcest resource decides.  Some
    part is always free: 1 % of a resource that is claimed completely.
    """
    # Model: linear in the cores that remain; a pipeline that hides latency would lose more if cores are missing.
    least = 0.01  # source: ours, so that work still ends if all resources are claimed
    rates = [max(least, 1.0 - claims.get(name, 0.0)) / used for name, used in demand if used > 0.0]
    return min([1.0, *rates])


class Host:
    """Links and memory of the host, for ``ranks`` devices."""

    def __init__(self, env: Environment, node: NodeSpec, ranks: int) -> None:
        self.env, self.node, self.ranks = env, node, ranks
        self._links: dict[tuple[int, str], SharedLink] = {}
        #: The memory of a host whose file has cores; copies and heads of all devices share it.
        self._memory = [] if node.cpu is None else [shared_link(env, "dram", node.cpu.dram_bytes_per_s.value)]
        self._worked_fs = [0] * ranks

    @property
    def pcie(self) -> PcieSpec:
        """Return the link's numbers; raise `SpecError` if the file has none."""
        if self.node.pcie is None:
            raise SpecError(f"{self.node.name}: pcie: missing; its host needs a link to the devices for copies")
        return self.node.pcie

    @property
    def cpu(self) -> CpuSpec:
        """Return the host's cores and memory; raise `SpecError` if the file has none."""
        if self.node.cpu is None:
            raise SpecError(f"{self.node.name}: cpu: missing; its host computes no attention")
        return self.node.cpu

    def copy(self, rank: int, call: CopyCall) -> Steps:
        """Copy over a device's link; both ends are pinned, so that kernels run concurrently."""
        pcie = self.pcie
        start = float(pcie.kv_start_s.value if call.is_bulk else pcie.start_s.value)
        # Model: the longer a device has waited for the host's attention, the later it wakes.
        idle, self._worked_fs[rank] = self._worked_fs[rank] / FEMTOSECONDS, 0
        if idle > AWAKE_S:
            start += float(pcie.wake_s.value) * log2(idle / AWAKE_S)
        yield self.env.timeout(femtoseconds(start))
        link = self._link((rank, call.way), pcie.bytes_per_s.value)
        yield AllOf(self.env, [flow(self.env, one, call.size_bytes) for one in (link, *self._memory)])

    def attention(self, rank: int, call: HostCall) -> Steps:
        """Compute one device's heads on its share of the cores; all devices' heads share the memory."""
        began = int(self.env.now)
        share = self.cpu.elements_per_s / self.ranks
        computed = self.env.timeout(femtoseconds(call.elements / share))
        yield AllOf(self.env, [computed, *(flow(self.env, one, call.size_bytes) for one in self._memory)])
        self._worked_fs[rank] = int(self.env.now) - began

    def _link(self, key: tuple[int, str], bytes_per_s: float) -> SharedLink:
        if key not in self._links:
            self._links[key] = shared_link(self.env, f"pcie {key}", bytes_per_s)
        return self._links[key]

    def link_bytes(self) -> dict[str, int]:
        """Return the bytes over the busiest device's link, and over the host's memory."""
        moved = {"pcie": max((link.total_bytes for link in self._links.values()), default=0)}
        moved |= {link.name: link.total_bytes for link in self._memory}
        return {name: size for name, size in moved.items() if size}

    def terms(self, call: CopyCall | HostCall) -> tuple[tuple[str, float], ...]:
        """Return the constants on which an operation's time depends, each with its share of the time."""
        if isinstance(call, HostCall):
            memory = call.size_bytes * self.ranks / self.cpu.dram_bytes_per_s.value
            is_memory = memory >= call.elements * self.ranks / self.cpu.elements_per_s
            return ((f"node.cpu.{'dram_bytes_per_s' if is_memory else 'clock_hz'}", 1.0),)
        key = "kv_start_s" if call.is_bulk else "start_s"
        start, moved = float(getattr(self.pcie, key).value), call.size_bytes / self.pcie.bytes_per_s.value
        whole = (start + moved) or 1.0
        return ((f"node.pcie.{key}", start / whole), ("node.pcie.bytes_per_s", moved / whole))


def flow(env: Environment, link: SharedLink, size: int) -> Event:
    """Return an event for the time at which ``size`` bytes have crossed a link."""
    through = env.event()

    def end() -> None:
        through.succeed()

    link.join(size, end)
    return through


def _by_rank(rounds: Sequence[Sequence[Transfer]], ranks: int) -> list[list[list[int]]]:
    """Return, for each round and rank, the transfers that the rank sends or receives."""
    of_rounds: list[list[list[int]]] = []
    for transfers in rounds:
        parts: list[list[int]] = [[] for _ in range(ranks)]
        for index, transfer in enumerate(transfers):
            parts[transfer.source].append(index)
            parts[transfer.target].append(index)
        of_rounds.append(parts)
    return of_rounds
