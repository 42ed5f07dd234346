"""The links between a node's devices, as a networkx graph, and the path of each transfer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from npusim.errors import SpecError

if TYPE_CHECKING:
    import networkx as nx

    from npusim.config.node_file import NodeLink, NodeSpec

#: A device by its number, or a switch by its name.
Vertex = int | str
#: Number of steps of the search for a ring, which take a fraction of a second: whether a graph has a ring of all
#: devices is an NP-complete question.
RING_STEPS = 20_000


@dataclass(frozen=True, slots=True)
class Edge:
    """One direction of one link: ``name`` as in ``hccs 0>1``."""

    name: str
    bytes_per_s: float
    latency_s: float


class Topology:
    """The graph of a node and the routes on it.

    Raises `SpecError` if a link has no bandwidth, or if devices cannot reach each other (the message names them).
    """

    def __init__(self, node: NodeSpec, ranks: int | None = None) -> None:
        import networkx as nx

        self.name = node.name
        self.ranks = ranks or node.device_count.value
        self.graph: nx.DiGraph[Vertex] = nx.DiGraph()
        self.graph.add_nodes_from(range(self.ranks))
        for name, link in node.links.items():
            self._add(name, link)
        self._check()
        self._routes: dict[tuple[int, int], tuple[Edge, ...]] = {}

    def _add(self, name: str, link: NodeLink) -> None:
        if link.bytes_per_s.value <= 0:
            raise SpecError(f"{self.name}: links.{name}.bytes_per_s: a link needs a bandwidth above 0")
        match link.model:
            case "full_mesh":
                pairs: list[tuple[Vertex, Vertex]] = [(a, b) for a in range(self.ranks) for b in range(a)]
            case "switch":
                self.graph.add_node(name)
                pairs = [(a, name) for a in range(self.ranks)]
            case "edges":
                pairs = [(a, b) for a, b in link.edges if max(a, b) < self.ranks]
        for a, b in pairs:
            for source, target in ((a, b), (b, a)):
                self._join(name, link, source, target)

    def _join(self, name: str, link: NodeLink, source: Vertex, target: Vertex) -> None:
        rate, latency = float(link.bytes_per_s.value), float(link.latency_s.value)
        if self.graph.has_edge(source, target):
            before: Edge = self.graph.edges[source, target]["edge"]
            rate, latency = rate + before.bytes_per_s, max(latency, before.latency_s)
        edge = Edge(f"{name} {source}>{target}", rate, latency)
        self.graph.add_edge(source, target, edge=edge, weight=1 / rate)

    def _check(self) -> None:
        import networkx as nx

        parts = sorted(
            (sorted(v for v in part if isinstance(v, int)) for part in nx.weakly_connected_components(self.graph)),
            key=lambda part: (-len(part), part),
        )
        cut_off = [str(v) for part in parts[1:] for v in part]
        if cut_off:
            raise SpecError(
                f"{self.name}: no link joins device {', '.join(cut_off)} to device {', '.join(map(str, parts[0]))}"
            )

    def edges(self) -> tuple[Edge, ...]:
        """Return every directed link."""
        return tuple(data["edge"] for _, _, data in self.graph.edges(data=True))

    def route(self, source: int, target: int) -> tuple[Edge, ...]:
        """Return the links that a transfer crosses: the path with the fewest links among the fastest ones."""
        key = (source, target)
        if key not in self._routes:
            import networkx as nx

            path = nx.shortest_path(self.graph, source, target, weight="weight")
            self._routes[key] = tuple(self.graph.edges[a, b]["edge"] for a, b in pairwise(path))
        return self._routes[key]

    @property
    def is_full_mesh(self) -> bool:
        """Whether every pair of devices has a separate link."""
        return all(self.graph.has_edge(a, b) for a in range(self.ranks) for b in range(self.ranks) if a != b)

    def ring(self) -> tuple[int, ...]:
        """Return the devices in an order in which neighbours share a link, fast links first.

        If there is no such order, or if the search ends after `RING_STEPS` steps, it is the order of their numbers: a
        transfer between devices without a link then crosses several.
        """
        if any(isinstance(v, str) for v in self.graph) or self.is_full_mesh:
            return tuple(range(self.ranks))
        return self._cycle() or tuple(range(self.ranks))

    def _cycle(self) -> tuple[int, ...] | None:
        """Return a cycle through all devices, or None: depth first, and no longer than `RING_STEPS`."""
        path, used = [0], {0}
        untried = [self._neighbours(0, used)]
        for _ in range(RING_STEPS):
            if len(path) == self.ranks and self.graph.has_edge(path[-1], 0):
                return tuple(path)
            following = next((v for v in untried[-1] if v not in used), None)
            if following is not None:
                path.append(following)
                used.add(following)
                untried.append(self._neighbours(following, used))
                continue
            untried.pop()
            used.remove(path.pop())
            if not path:
                return None
        return None

    def _neighbours(self, device: int, used: Collection[int]) -> Iterator[int]:
        """Yield the neighbours of a device: those over fast links first, then those with the fewest
        further neighbours.
        """

        def rank(v: Vertex) -> tuple[float, int, int]:
            onward = sum(n not in used for n in self.graph.successors(v))
            return self.graph.edges[device, v]["weight"], onward, int(v)

        return iter([int(v) for v in sorted(self.graph.successors(device), key=rank)])
