"""Who moves a collective's bytes: the mode it chooses, and the alpha-beta form of its time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from npusim.node.collective import Collective, collective, shard_sizes
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.node import DriverMode, DriverSpec, NodeSpec
    from npusim.node.program import CollectiveCall
    from npusim.node.topology import Topology


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """``alpha_s + size / bytes_per_s``: a collective's time when nothing else runs, in closed form."""

    alpha_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: int) -> float:
        """Return the time of a message of ``size_bytes`` a rank."""
        return self.alpha_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A collective with its driver's mode and its closed form."""

    collective: Collective
    driver_name: str
    driver: DriverSpec
    mode_name: str
    mode: DriverMode
    closed_form: AlphaBeta
    servers: int = 1
    element_bytes: int = 1

    def terms(self, size_bytes: int) -> tuple[tuple[str, float], ...]:
        """Return the constants behind the closed form and their shares: starts, and bandwidth."""
        key = f"node.drivers.{self.driver_name}.modes.{self.mode_name}"
        starts = self.closed_form.alpha_s / self.closed_form.seconds(size_bytes)
        return ((f"{key}.start_s", starts), (f"{key}.engine_bytes_per_s", 1.0 - starts))

    def between_rounds(self) -> int:
        """Return the rounds of the ring over servers: each adds up, then passes on."""
        return 2 * (self.servers - 1)

    def sending_bytes_per_s(self) -> float:
        """Return what rank 0 sends on average while the collective runs, for each rank's claim on memory."""
        sent = sum(len(t.shards) for r in self.collective.rounds for t in r if t.source == 0)
        return sent / self.collective.shard_count * self.closed_form.bytes_per_s


def plan_collective(node: NodeSpec, topology: Topology, call: CollectiveCall) -> NodePlan:
    """Return how ``call`` runs: the mode with the smallest closed form, as NCCL's tuner chooses."""
    chosen = collective(call.kind, call.algorithm, topology.ranks, topology.ring())
    driver = node.driver(call.driver)
    plans = [
        NodePlan(
            chosen,
            call.driver,
            driver,
            name,
            mode,
            _closed(node, topology, call, chosen, mode),
            call.servers,
            call.element_bytes,
        )
        for name, mode in driver.modes.items()
    ]
    return min(plans, key=lambda p: p.closed_form.seconds(call.size_bytes))


def _closed(
    node: NodeSpec, topology: Topology, call: CollectiveCall, chosen: Collective, mode: DriverMode
) -> AlphaBeta:
    """Return the closed form within a server and, with several, of the ring between them."""
    form = alpha_beta(chosen, topology, node.driver(call.driver), mode)
    if call.servers == 1 or node.between is None:
        return form
    rounds = 2 * (call.servers - 1)
    start = mode.transfer_start_s.value + node.between.latency_s.value
    share = rounds / call.servers / topology.ranks / node.between.bytes_per_s.value
    return AlphaBeta(form.alpha_s + rounds * start, 1.0 / (1.0 / form.bytes_per_s + share))


def alpha_beta(chosen: Collective, topology: Topology, driver: DriverSpec, mode: DriverMode) -> AlphaBeta:
    """Return the closed form: starts and latencies of all rounds, and the busiest part of each.

    Rounds follow one another; in each the slowest of its links, engines and drivers decides.
    """
    alpha, seconds_per_byte = float(mode.start_s.value), 0.0
    engine = float(mode.engine_bytes_per_s.value)
    own = engine * driver.engines_per_transfer
    for transfers in chosen.rounds:
        loads: dict[str, float] = defaultdict(float)
        rates: dict[str, float] = {}
        sending: dict[int, float] = defaultdict(float)
        latency = slowest = 0.0
        for t in transfers:
            share = len(t.shards) / chosen.shard_count
            route = topology.route(t.source, t.target)
            latency = max(latency, sum(e.latency_s for e in route))
            sending[t.source] += share
            slowest = max(slowest, share / own)
            for edge in route:
                loads[edge.name] += share
                rates[edge.name] = edge.bytes_per_s
        alpha += latency + float(mode.transfer_start_s.value)
        of_links = [load / rates[name] for name, load in loads.items()]
        of_drivers = [share / (engine * driver.engine_count.value) for share in sending.values()]
        seconds_per_byte += max([slowest, *of_links, *of_drivers])
    return AlphaBeta(alpha, 1.0 / seconds_per_byte)


def chunk_sizes(plan: NodePlan, size_bytes: int) -> list[int]:
    """Return the bytes of the pieces in which a message moves through all rounds, about equal."""
    most = plan.mode.chunk_bytes
    pieces = 1 if most is None else ceil_div(size_bytes, most.value)
    return [s for s in _cut(size_bytes, pieces, plan.element_bytes) if s]


def transfer_bytes(plan: NodePlan, chunk_bytes: int) -> list[list[int]]:
    """Return the bytes of every transfer of every round for one chunk of a message."""
    sizes = _cut(chunk_bytes, plan.collective.shard_count, plan.element_bytes)
    return [[sum(sizes[s] for s in t.shards) for t in r] for r in plan.collective.rounds]


def shard_edges(plan: NodePlan, size_bytes: int) -> list[list[int]]:
    """Return, for each chunk of a message as it is transferred, the first element of each shard and the end."""
    start, found = 0, []
    for chunk in chunk_sizes(plan, size_bytes):
        sizes = _cut(chunk, plan.collective.shard_count, plan.element_bytes)
        found.append([edge // plan.element_bytes for edge in accumulate(sizes, initial=start)])
        start += chunk
    return found


def _cut(size_bytes: int, parts: int, element_bytes: int) -> list[int]:
    """Return the bytes of ``parts`` parts of whole elements."""
    return [n * element_bytes for n in shard_sizes(size_bytes // element_bytes, parts)]
