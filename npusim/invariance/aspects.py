"""How a call can be run otherwise: other batches, places in them, splits, tiles, ranks, orders of a sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from npusim import formats
from npusim.config.node import list_nodes, load_node
from npusim.config.problem import CopyProblem
from npusim.config.tiling import tiling_fields
from npusim.node.collective import ALGORITHMS, Algorithm, collective
from npusim.node.reduction import execute
from npusim.node.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from npusim.config.node import NodeSpec
    from npusim.config.problem import Problem
    from npusim.node.collective import Transfer
    from npusim.simulation.result import RunData

#: ``merge``: the order in which partial results of splits are merged; ``order``: that of a collective's sums.
Aspect = Literal["batch", "position", "splits", "merge", "tile", "packing", "ranks", "order"]
ASPECTS: tuple[Aspect, ...] = get_args(Aspect)
#: Other sizes of a batch, split counts and numbers of devices that are tried.
BATCHES, SPLITS, RANKS = (2, 8), (1, 2, 8), (2, 4)
#: Sizes of blocks whose halves are other tiles.
BLOCKS = ("block_kv", "block_q", "block")


@dataclass(frozen=True)
class Variant:
    """A call run otherwise: sizes and tiling fields that change, and where the sequence lies in the batch."""

    what: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    tiling: Mapping[str, Any] = field(default_factory=dict)
    position: int = 0


def splits_of(result: RunData) -> int:
    """Return into how many parts the keys of a block of queries are split, at most."""
    spans = [span for block in result.program.phases[0].blocks for span in block.spans]
    return max((start for axis, start, _ in spans if axis == "split"), default=0) + 1


def is_packed(result: RunData) -> bool:
    """Return whether rows of several query heads are rows of one block."""
    return result.program.tensors["o"].packed > 1


def variants(base: RunData, problem: Problem) -> dict[Aspect, list[Variant]]:
    """Return what is tried, by aspect; none where a call cannot be run otherwise."""
    batches = [n * problem.batch for n in BATCHES]
    last = batches[-1] - 1
    return {
        "batch": [Variant(f"batch={n}", {"batch": n}) for n in batches],
        "position": [Variant(f"sequence {at} of {last + 1}", {"batch": last + 1}, position=at) for at in (1, last)],
        **_of_fields(base, problem),
        "ranks": list(_ranks(problem)),
    }


def _of_fields(base: RunData, problem: Problem) -> dict[Aspect, list[Variant]]:
    """Return what other values of tiling fields there are."""
    known = {f.name: f for f in tiling_fields(type(base.tiling))}
    found: dict[Aspect, list[Variant]] = {"splits": [], "merge": [], "tile": [], "packing": []}
    if "splits" in known:
        own = splits_of(base)
        found["splits"] = [Variant(f"splits={n}", tiling={"splits": n}) for n in (*SPLITS, own + 1) if n != own]
    if "merge" in known:
        used = getattr(base.tiling, "merge", None)
        found["merge"] = [Variant(f"merge={m}", tiling={"merge": m}) for m in known["merge"].choices if m != used]
    for name in (n for n in BLOCKS if n in known):
        half = (getattr(base.tiling, name) or 0) // 2
        if half >= (known[name].minimum or 1) and half % (known[name].multiple_of or 1) == 0:
            found["tile"].append(Variant(f"{name}={half}", tiling={name: half}))
    if "pack" in known and problem.group_size > 1:
        other = "off" if is_packed(base) else "on"
        found["packing"] = [Variant(f"pack={other}", tiling={"pack": other})]
    return found


def _ranks(problem: Problem) -> Iterator[Variant]:
    """Yield shares of the heads: whole groups, or a KV head that several ranks have."""
    for ranks in RANKS:
        heads, kv_heads = problem.heads // ranks, max(1, problem.kv_heads // ranks)
        if problem.heads % ranks == 0 and heads % kv_heads == 0 and heads // kv_heads <= problem.group_size:
            yield Variant(f"tensor_parallel={ranks}", {"heads": heads, "kv_heads": kv_heads})


# ---------------------------------------------------------------- sums over ranks

#: Elements of a sample of partial sums: some in every shard of 64 ranks.
SAMPLE = 4096


@dataclass(frozen=True)
class SumsAspect:
    """The AllReduce that follows attention: a rank's partial sums are normal samples in the inputs' format."""

    ranks: int
    fmt: str
    node: NodeSpec | None
    own: Algorithm

    def bytes(self, problem: Problem, hidden: int) -> CopyProblem:
        """Return the message of one step."""
        size = formats.get_format(self.fmt).size_bytes
        return CopyProblem(bytes=problem.batch * problem.seq_q * hidden * size)

    def results(self, algorithm: Algorithm) -> tuple[NDArray[Any], list[Addition]]:
        """Return the sums, and every addition in order."""
        draw, added = np.random.default_rng(0), list[Addition]()
        inputs = [formats.cast(draw.standard_normal(SAMPLE), self.fmt) for _ in range(self.ranks)]

        def watch(transfer: Transfer, first: int, _: Any, result: NDArray[Any]) -> None:
            added.append((first, transfer.source, transfer.target, result.copy()))

        call = collective("allreduce", algorithm, self.ranks)
        return execute(call, inputs, self.fmt, watch=watch)[0], added


#: First element, who sent and who added, and the sums.
Addition = tuple[int, int, int, "NDArray[Any]"]


def sums(device: str, problem: Problem, ranks: int) -> SumsAspect:
    """Return the sums over ``ranks`` (1: as many as a packaged node of the device has, else eight)."""
    nodes = (load_node(name) for name in list_nodes())
    node = max((n for n in nodes if n.device == device), key=lambda n: n.device_count.value, default=None)
    count = ranks if ranks > 1 else (node.device_count.value if node else 8)
    whole = node is not None and count <= node.device_count.value and Topology(node, count).is_full_mesh
    fmt = problem.dtype if problem.dtype in ("float16", "bfloat16", "float32") else "float16"
    return SumsAspect(count, fmt, node, "mesh" if whole else "ring")


def other_orders(own: Algorithm) -> tuple[Algorithm, ...]:
    """Return the other orders of transfers."""
    return tuple(a for a in ALGORITHMS if a != own)


def of_element(added: list[Addition], element: int) -> list[tuple[str, float]]:
    """Return the additions that one element takes part in: what was added to whose, and the sum."""
    return [
        (f"rank {target} adds what rank {source} sent", float(values[element - first]))
        for first, source, target, values in added
        if first <= element < first + len(values)
    ]
