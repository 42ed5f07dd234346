"""A window of a program as a networkx graph: for critical paths, drawings, and as a test oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import networkx as nx

from npusim.program.ir.walk import ResolvedOp, Walker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from npusim.program.ir.tile_program import TileProgram


def window_graph(program: TileProgram, operations: Iterable[ResolvedOp]) -> nx.DiGraph[int]:
    """Return operations as nodes 0, 1, ... in program order, with an edge for every order kept.

    Node attribute ``op`` is the resolved operation.  Edge attribute ``kind`` is ``queue`` (same
    queue, in order) or the ring's flag waited for (``"P ready"``).
    """
    endpoints = Walker(program).endpoints
    graph: nx.DiGraph[int] = nx.DiGraph()
    last_of_queue: dict[int, int] = {}
    setters: list[list[int]] = [[] for _ in endpoints]
    for node, resolved in enumerate(operations):
        graph.add_node(node, op=resolved)
        if resolved.queue in last_of_queue:
            graph.add_edge(last_of_queue[resolved.queue], node, kind="queue")
        last_of_queue[resolved.queue] = node
        for wait in resolved.waits:
            done = setters[wait.peer]
            if wait.count <= len(done):
                graph.add_edge(done[wait.count - 1], node, kind=str(endpoints[wait.endpoint]))
        for endpoint in resolved.sets:
            setters[endpoint].append(node)
    return graph


def critical_path(graph: nx.DiGraph[int], duration: Callable[[ResolvedOp], int]) -> tuple[int, list[ResolvedOp]]:
    """Return the longest chain of operations and its length.

    ``duration`` gives each operation's cycles, latency included.
    """
    weighted: nx.DiGraph[int] = nx.DiGraph()
    for a, b in graph.edges:
        weighted.add_edge(a, b, weight=duration(graph.nodes[a]["op"]))
    # Every operation leads to the end, so that the last one's own duration counts.
    end = -1
    for node in graph.nodes:
        weighted.add_edge(node, end, weight=duration(graph.nodes[node]["op"]))
    path = nx.dag_longest_path(weighted)[:-1]
    chain = [graph.nodes[n]["op"] for n in path]
    return sum(duration(op) for op in chain), chain
