"""Collectives as programs: rounds of transfers between ranks, complete or cut into chunks.

A message is cut into shards.  In a round every rank sends shards and receives shards; a received shard is added to the
rank's (``adds``) or replaces it.  Only the ranks and the order of the additions decide the bits (``node.reduction``);
the bytes on each link decide the time (``node.simulate``): both use this one program. A driver transfers the bytes in
the mode that its library estimates to be the fastest; without such estimates, in the fastest mode by the alpha-beta
form.

Sources: HCCL documentation, "Mesh", "Ring", "RHD"; Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, get_args

from npusim.errors import TilingError
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.node_file import DriverMode, DriverSpec, NodeSpec
    from npusim.machines.node.topology import Topology

Kind = Literal["allreduce", "reduce_scatter", "all_gather"]
Algorithm = Literal["mesh", "ring", "halving_doubling"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
#: Largest number of ranks, in a node or a group of nodes, for which collectives are designed.
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Transfer:
    """``source`` sends its ``shards`` to ``target``, which adds them to its shards or replaces its shards with them."""

    source: int
    target: int
    shards: tuple[int, ...]
    adds: bool


Round = tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective among ``ranks``: rounds in order, each a set of concurrent transfers.

    Within a round all sources are read before any target is written.  Additions into one target happen in the order in
    which they are listed, beginning with the target's value; with ``is_ordered`` all ranks add in the order of ranks
    instead.  ``owners[s]`` is the rank that has shard ``s`` after a reduce-scatter, and before an all-gather.
    """

    kind: Kind
    algorithm: Algorithm
    ranks: int
    shard_count: int
    rounds: tuple[Round, ...]
    owners: tuple[int, ...]
    is_ordered: bool = False


def collective(
    kind: Kind, algorithm: Algorithm, ranks: int, order: Sequence[int] | None = None, *, is_ordered: bool = False
) -> Collective:
    """Return a collective among ``ranks``; ``order`` lists them around the ring.

    ``is_ordered`` makes a mesh add in the order of ranks, as HCCL's deterministic mode does: every shard is then summed
    in the same order.

    Raises `TilingError` for fewer than 2 or more than 64 ranks, or an unknown name.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise TilingError(f"ranks: {ranks}; allowed: 2 to {MOST_RANKS}")
    if kind not in KINDS:
        raise TilingError(f"collective {kind!r}; allowed: {', '.join(KINDS)}")
    match algorithm:
        case "mesh":
            scatter, gather, owners = _mesh(ranks)
        case "ring":
            scatter, gather, owners = _ring(tuple(order or range(ranks)))
        case "halving_doubling":
            scatter, gather, owners = _halving_doubling(ranks)
        case _:
            raise TilingError(f"algorithm {algorithm!r}; allowed: {', '.join(ALGORITHMS)}")
    rounds = {"reduce_scatter": scatter, "all_gather": gather}.get(kind, scatter + gather)
    return Collective(kind, algorithm, ranks, len(owners), tuple(rounds), owners, is_ordered)


Parts = tuple[list[Round], list[Round], tuple[int, ...]]


def _mesh(ranks: int) -> Parts:
    """Return one round in which every rank sends each other rank its shard, and one round in the opposite direction."""
    # Model: peers are added in ascending order; without HCCL's deterministic mode it would be the order of arrival.
    pairs = [(target, source) for target in range(ranks) for source in range(ranks)]
    pairs = [(target, source) for target, source in pairs if target != source]
    scatter = tuple(Transfer(source, target, (target,), True) for target, source in pairs)
    gather = tuple(Transfer(source, target, (source,), False) for target, source in pairs)
    return [scatter], [gather], tuple(range(ranks))


def _ring(order: tuple[int, ...]) -> Parts:
    """Return p - 1 rounds around the ring in which ranks add, and p - 1 rounds in which they pass sums on."""
    count = len(order)

    def around(step: int, shift: int, adds: bool) -> Round:
        return tuple(
            Transfer(rank, order[(position + 1) % count], ((position + shift - step) % count,), adds)
            for position, rank in enumerate(order)
        )

    scatter = [around(step, 0, True) for step in range(count - 1)]
    gather = [around(step, 1, False) for step in range(count - 1)]
    owners = [0] * count
    for position, rank in enumerate(order):
        owners[(position + 1) % count] = rank
    return scatter, gather, tuple(owners)


def _halving_doubling(ranks: int) -> Parts:
    """Return log2(p) rounds, each with half of the remaining message, and the same rounds in reverse.

    If the number of ranks is not a power of two, the remaining ranks first add their messages to those of partners, and
    receive the result at the end, as in MPICH.
    """
    power = 1 << (ranks.bit_length() - 1)
    every = tuple(range(power))
    extra = range(power, ranks)
    scatter: list[Round] = []
    gather: list[Round] = []
    if extra:
        scatter.append(tuple(Transfer(r, r - power, every, True) for r in extra))
        gather.append(tuple(Transfer(r - power, r, every, False) for r in extra))
    distance = power // 2
    while distance:
        halves, doubles = [], []
        for rank in range(power):
            partner = rank ^ distance
            # The shards that a rank still has: those whose numbers have the bits of the rank's number in the positions
            # that were halved.
            halved = tuple(s for s in every if s // distance == partner // distance)
            doubled = tuple(s for s in every if s // distance == rank // distance)
            halves.append(Transfer(rank, partner, halved, True))
            doubles.append(Transfer(rank, partner, doubled, False))
        scatter.append(tuple(halves))
        gather.insert(0, tuple(doubles))
        distance //= 2
    return scatter, gather, every


def shard_sizes(elements: int, shards: int) -> list[int]:
    """Return the number of elements of each shard of a message; the first ones are longer if the shards are ragged."""
    base, longer = divmod(elements, shards)
    return [base + (index < longer) for index in range(shards)]


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective over all ranks: its kind, algorithm and driver, and the bytes of each rank.

    With several ``servers`` each rank also exchanges data with its counterparts in the others, between the
    reduce-scatter and the all-gather within a server.
    """

    kind: Kind
    algorithm: Algorithm
    driver: str
    size_bytes: int
    #: Before the collective, the host joins two streams by events.
    is_overlapped: bool = False
    servers: int = 1
    #: Size of pieces that no transfer divides.
    element_bytes: int = 1

    @property
    def rounds_between(self) -> int:
        """Rounds of the ring over servers: each adds, then passes on."""
        return 2 * (self.servers - 1)


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """``alpha_s + size / bytes_per_s``: a collective's time without other work, in closed form."""

    alpha_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: int) -> float:
        """Return the time of a message of ``size_bytes`` a rank."""
        return self.alpha_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A call with its rounds, its driver's mode and its closed form."""

    call: CollectiveCall
    collective: Collective
    driver: DriverSpec
    mode_name: str
    closed_form: AlphaBeta

    @property
    def mode(self) -> DriverMode:
        """The driver's mode."""
        return self.driver.modes[self.mode_name]

    @property
    def seconds(self) -> float:
        """Time of the call by the closed form."""
        return self.closed_form.seconds(self.call.size_bytes)

    @property
    def transfer_bytes_per_s(self) -> float:
        """Rate of the engines that serve one transfer."""
        most, ranks = self.driver.engines_per_transfer, self.collective.ranks
        return self.mode.transfer_bytes_per_s(most, ranks, self.call.size_bytes)

    def terms(self) -> tuple[tuple[str, float], ...]:
        """Return the constants of the closed form and their shares: starts, copies without addition, and bandwidth."""
        key = f"node.drivers.{self.call.driver}.modes.{self.mode_name}"
        starts = self.closed_form.alpha_s / self.seconds
        local = self.call.size_bytes / self.collective.shard_count * self.mode.local_s_per_byte / self.seconds
        shares = {"start_s": starts, "local_bytes_per_s": local, "engine_bytes_per_s": 1.0 - starts - local}
        return tuple((f"{key}.{name}", share) for name, share in shares.items() if share)

    @property
    def sent_share(self) -> float:
        """Share of the message that rank 0 sends in all rounds."""
        sent = sum(len(t.shards) for r in self.collective.rounds for t in r if t.source == 0)
        return sent / self.collective.shard_count

    @property
    def expected_s(self) -> float:
        """Time by which the driver chooses its mode: the library's estimate if it is known."""
        if (tuner := self.mode.tuner) is None:
            return self.seconds
        start = tuner.base_s.value + len(self.collective.rounds) * tuner.step_s.value
        return float(start + self.sent_share * self.call.size_bytes / tuner.bytes_per_s.value)

    def sending_bytes_per_s(self) -> float:
        """Return the average rate at which rank 0 sends while the collective runs; it determines how much of the
        memory's bandwidth each rank uses.
        """
        return self.sent_share * self.closed_form.bytes_per_s

    def chunk_sizes(self) -> list[int]:
        """Return the sizes in bytes, about equal, of the pieces in which the message passes through all rounds."""
        most = self.mode.chunk_bytes
        pieces = 1 if most is None else ceil_div(self.call.size_bytes, most.value)
        return [size for size in self._cut(self.call.size_bytes, pieces) if size]

    def transfer_bytes(self, chunk_bytes: int) -> list[list[int]]:
        """Return the bytes of every transfer of every round for one chunk of the message."""
        sizes = self._cut(chunk_bytes, self.collective.shard_count)
        return [[sum(sizes[s] for s in t.shards) for t in r] for r in self.collective.rounds]

    def shard_edges(self) -> list[list[int]]:
        """Return, for each chunk of the message as it is transferred, the first element of each shard and the end."""
        start, edges = 0, []
        for chunk in self.chunk_sizes():
            sizes = self._cut(chunk, self.collective.shard_count)
            edges.append([edge // self.call.element_bytes for edge in accumulate(sizes, initial=start)])
            start += chunk
        return edges

    def _cut(self, size_bytes: int, parts: int) -> list[int]:
        element_bytes = self.call.element_bytes
        return [n * element_bytes for n in shard_sizes(size_bytes // element_bytes, parts)]


def plan_collective(node: NodeSpec, topology: Topology, call: CollectiveCall) -> PlannedCollective:
    """Return how ``call`` runs: in the mode that its library expects to be the fastest."""
    rounds = collective(call.kind, call.algorithm, topology.ranks, topology.ring())
    driver = node.driver(call.driver)
    candidates = [
        PlannedCollective(call, rounds, driver, name, _closed(node, topology, call, rounds, mode))
        for name, mode in driver.modes.items()
    ]
    return min(candidates, key=lambda candidate: candidate.expected_s)


def _closed(
    node: NodeSpec, topology: Topology, call: CollectiveCall, chosen: Collective, mode: DriverMode
) -> AlphaBeta:
    """Return the closed form within a server and, if there are several servers, that of the ring between them."""
    form = alpha_beta(chosen, topology, node.driver(call.driver), mode, call.size_bytes)
    if call.servers == 1 or node.between is None:
        return form
    start = mode.transfer_start_s.value + node.between.latency_s.value
    share = call.rounds_between / call.servers / topology.ranks / node.between.bytes_per_s.value
    return AlphaBeta(form.alpha_s + call.rounds_between * start, 1.0 / (1.0 / form.bytes_per_s + share))


def alpha_beta(
    chosen: Collective, topology: Topology, driver: DriverSpec, mode: DriverMode, size_bytes: int | None = None
) -> AlphaBeta:
    """Return the closed form: the starts and latencies of all rounds, and the busiest part of each round.

    Rounds follow one another; the slowest link, engine or driver of a round decides its time.  A message of
    ``size_bytes`` per rank uses the engines that take part in it; all engines, if their number is not stated.
    """
    alpha, seconds_per_byte = float(mode.start_s.value), mode.local_s_per_byte / chosen.shard_count
    engine = float(mode.engine_bytes_per_s.value)
    transfer_rate = mode.transfer_bytes_per_s(driver.engines_per_transfer, chosen.ranks, size_bytes)
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
            slowest = max(slowest, share / transfer_rate)
            for edge in route:
                loads[edge.name] += share
                rates[edge.name] = edge.bytes_per_s
        alpha += latency + float(mode.transfer_start_s.value)
        of_links = [load / rates[name] for name, load in loads.items()]
        of_drivers = [share / (engine * driver.engine_count.value) for share in sending.values()]
        seconds_per_byte += max([slowest, *of_links, *of_drivers])
    return AlphaBeta(alpha, 1.0 / seconds_per_byte)
