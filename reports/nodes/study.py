"""Computations of the page on nodes: outcomes of tiling, forms of collectives, sums in their order."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import npusim
from npusim import formats
from npusim.config.load import load_workload
from npusim.config.node_file import load_node, load_node_device
from npusim.config.problem import CopyProblem, LayerProblem
from npusim.machines.node.collective import CollectiveCall, alpha_beta, collective, plan_collective
from npusim.machines.node.node_program import cut_rows
from npusim.machines.node.node_result import NodeTiming
from npusim.machines.node.reduction import execute
from npusim.machines.node.topology import Topology
from npusim.studies.explore import explore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from npusim.config.node_file import NodeDevice
    from npusim.machines.node.collective import Algorithm, AlphaBeta, Collective
    from npusim.simulation.run_result import RunData

__all__ = [
    "CAUSAL",
    "METHOD",
    "Change",
    "Form",
    "Search",
    "Sum",
    "change",
    "cluster",
    "forms",
    "layer",
    "reduction_error",
    "search",
    "step",
    "sums",
    "tiled",
]

#: Exact, and the same however `auto` chooses.
METHOD = "steady"
WORKLOAD = "pangu_38b"
SEED = 6
#: Elements that are summed: rows of PanGu-38B's 5120 columns, cut into ragged tiles below.
ROWS, COLUMNS = 26, 640


@cache
def _machine(name: str) -> NodeDevice:
    return load_node_device(name)


#: The paper's rows are causal, those measured on the H200 are not.
CAUSAL = frozenset({"ascend_910b2_x8"})


@cache
def layer(node: str, tokens: int) -> LayerProblem:
    """Return a PanGu-38B layer of ``tokens``, its heads shared by all devices of a node."""
    ranks = load_node(node).device_count.value
    load = load_workload(WORKLOAD)
    problem = load.problem(seq=tokens, tensor_parallel=ranks, causal=node in CAUSAL)
    return LayerProblem.around(problem, hidden=load.hidden or 1, ranks=ranks)


@cache
def tiled(node: str, tokens: int, driver: str, blocks: int) -> RunData:
    """Return the run of a layer in ``blocks`` row blocks, its collectives moved by ``driver``."""
    return npusim.run(
        "tiling_allreduce",
        hw=_machine(node),
        workload=load_workload(WORKLOAD),
        problem=layer(node, tokens),
        tiling={"blocks": blocks, "collective": driver},
        method=METHOD,
        numerics=False,
    )


def _timing(result: RunData) -> NodeTiming:
    assert isinstance(result.timing, NodeTiming)
    return result.timing


class Change(NamedTuple):
    """What tiling changes, in microseconds: the untiled time, three causes, the tiled time.

    ``cut``: kernels of fewer rows are less efficient, or save launches.  ``shared``: kernels that run during a
    collective have fewer cores and less memory bandwidth.  ``exposed``: the part of the whole in
    which no kernel runs, the host's issue included.
    """

    untiled: float
    cut: float
    shared: float
    exposed: float
    tiled: float
    efficiency: float

    @property
    def speedup(self) -> float:
        """Return the untiled over the tiled time."""
        return self.untiled / self.tiled


def change(node: str, tokens: int, driver: str, blocks: int) -> Change:
    """Return what ``blocks`` row blocks change, cause by cause; the causes add up."""
    us = 1e6
    before, after = (_timing(tiled(node, tokens, driver, count)) for count in (1, blocks))
    return Change(
        before.latency_s * us,
        (after.alone_s - before.alone_s) * us,
        (after.running_s[0] - after.alone_s - before.running_s[0] + before.alone_s) * us,
        (after.latency_s - after.running_s[0] - before.latency_s + before.running_s[0]) * us,
        after.latency_s * us,
        after.overlap_efficiency,
    )


class Search(NamedTuple):
    """Latencies in us with their number of blocks and first share: the best, and with equal blocks."""

    untiled_us: float
    best: tuple[float, int, float]
    best_equal: tuple[float, int, float]


def search(node: str, tokens: int, counts: Sequence[int], few: Sequence[int], shares: Sequence[float]) -> Search:
    """Return the fastest choice of block count and first block's share (one block: all rows).

    Equal blocks are tried in all ``counts``, unequal ones in ``few``.
    """
    driver = load_node(node).default_driver
    equal = [(tiled(node, tokens, driver, n).latency_us, n, 1 / n) for n in counts]
    found = explore(
        "tiling_allreduce",
        {"blocks": few, "first_share": shares},
        hw=_machine(node),
        method=METHOD,
        workload=load_workload(WORKLOAD),
        problem=layer(node, tokens),
        tiling={"collective": driver},
    )
    uneven = [
        (float(o.latency_us or 0), int(str(o.point["blocks"])), float(str(o.point["first_share"])))
        for o in found.feasible
    ]
    return Search(equal[0][0], min([*uneven, *equal]), min(equal))


class Form(NamedTuple):
    """A way of one node's AllReduce: its closed form, and what is simulated for one size."""

    node: str
    driver: str
    mode: str
    algorithm: str
    rounds: int
    form: AlphaBeta


def forms(node: str) -> Iterator[Form]:
    """Yield every way in which a node's file lets an AllReduce be moved."""
    spec = load_node(node)
    topology = Topology(spec)
    algorithms: tuple[Algorithm, ...] = ("mesh", "ring", "halving_doubling")
    if not topology.is_full_mesh:
        algorithms = ("ring",)
    for name, driver in spec.drivers.items():
        for mode_name, mode in driver.modes.items():
            for algorithm in algorithms:
                chosen = collective("allreduce", algorithm, topology.ranks, topology.ring())
                form = alpha_beta(chosen, topology, driver, mode)
                yield Form(node, name, mode_name, algorithm, len(chosen.rounds), form)


def step(node: str, driver: str, sizes: Sequence[int]) -> list[tuple[int, str]]:
    """Return the smallest of ``sizes`` for which each protocol is used."""
    spec = load_node(node)
    topology = Topology(spec)
    algorithm: Algorithm = "mesh" if topology.is_full_mesh else "ring"
    modes = [
        plan_collective(spec, topology, CollectiveCall("allreduce", algorithm, driver, s)).mode_name for s in sizes
    ]
    first = [(sizes[0], modes[0])]
    return first + [(s, b) for (a, b), s in zip(pairwise(modes), sizes[1:], strict=True) if a != b]


class Sum(NamedTuple):
    """A sum of eight ranks in one order: error, and the share of bits other than the first's."""

    name: str
    rmse: float
    max_abs: float
    differs_from_ring: float
    differs_tiled: float
    same_everywhere: bool


def sums(fmt: str, ranks: int) -> list[Sum]:
    """Return how AllReduces of normal samples in format ``fmt`` differ, by order and by tiling."""
    draw = np.random.default_rng(SEED)
    inputs = [formats.cast(draw.standard_normal((ROWS, COLUMNS)), fmt) for _ in range(ranks)]
    ways = {
        "ring": collective("allreduce", "ring", ranks),
        "mesh, own value first": collective("allreduce", "mesh", ranks),
        "mesh, in order of ranks": collective("allreduce", "mesh", ranks, is_ordered=True),
        "halving-doubling": collective("allreduce", "halving_doubling", ranks),
    }
    ring = execute(ways["ring"], inputs, fmt)[0]
    found = []
    for name, way in ways.items():
        error = reduction_error(way, inputs, fmt)
        whole = execute(way, inputs, fmt)[0]
        found.append(
            Sum(
                name,
                error.rmse,
                error.max_abs_error,
                _share(whole, ring),
                _share(_by_blocks(way, inputs, fmt), whole),
                error.is_same_on_all_ranks,
            )
        )
    return found


class ReductionError(NamedTuple):
    """Distance of a reduced result from the float64 sum of the same inputs."""

    rmse: float  #: relative Frobenius error
    max_abs_error: float
    is_same_on_all_ranks: bool


def reduction_error(way: Collective, inputs: Sequence[NDArray[Any]], fmt: str) -> ReductionError:
    """Return the difference between an AllReduce's result and the float64 sum.

    A NaN or an infinity in the result makes the figures infinite or NaN, as it should.
    """
    results = execute(way, inputs, fmt)
    exact = np.zeros(results[0].shape, np.float64)
    for part in inputs:
        exact = exact + np.asarray(part, np.float64)
    difference = np.asarray(results[0], np.float64) - exact
    scale = float(np.linalg.norm(exact)) or 1.0
    return ReductionError(
        float(np.linalg.norm(difference)) / scale,
        float(np.max(np.abs(difference), initial=0.0)),
        all(r.tobytes() == results[0].tobytes() for r in results[1:]),
    )


def _by_blocks(way: Collective, inputs: list[NDArray[Any]], fmt: str) -> NDArray[Any]:
    """Return the sum by unequal row blocks, the last one ragged."""
    cuts = cut_rows(ROWS, 3, 0.2)
    parts = [execute(way, [x[row : row + rows] for x in inputs], fmt)[0] for row, rows in cuts]
    return np.concatenate(parts)


def _share(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.mean(a != b))


def cluster(size_bytes: int, servers: int) -> RunData:
    """Return an AllReduce over ``servers`` folded servers of eight 910B."""
    return npusim.run(
        "allreduce",
        hw=_machine("ascend_910b2_x8"),
        problem=CopyProblem(bytes=size_bytes),
        tiling={"servers": servers},
        method=METHOD,
        numerics=False,
    )
