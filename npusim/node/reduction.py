"""The bits of a collective: its transfers executed on arrays, every addition rounded as it happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim import formats
from npusim.errors import TensorError
from npusim.node.collective import shard_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from npusim.node.collective import Collective, Transfer

#: Is told the transfer, the first element, both addends and their sum, before the sum is stored.
Watch = Callable[["Transfer", int, tuple["NDArray[Any]", "NDArray[Any]"], "NDArray[Any]"], None]


def execute(
    collective: Collective,
    inputs: Sequence[NDArray[Any]],
    fmt: str,
    edges: Sequence[Sequence[int]] | None = None,
    watch: Watch | None = None,
) -> list[NDArray[Any]]:
    """Return what every rank holds afterwards, given what each held: equal shapes, format ``fmt``.

    ``edges`` are, for each chunk of the message, the first element of each shard and the end
    (`npusim.node.driver.shard_edges`); by default the message is one chunk.  Where the arrays are a
    part of a message, they are counted from its beginning and may lie outside of it: bits do not
    depend on what else a shard holds.  ``watch`` is told of every addition.

    Additions round to ``fmt`` one by one in the collective's order: a rank's own value first, then
    what arrives, in the order of its rounds (or all by rank, if ``is_ordered``).  After a
    reduce-scatter only a rank's own shard is a sum; an all-gather takes each shard from its owner.
    Rows of tiled calls fall into other shards than those of an untiled one, so that bits are equal
    where all shards are summed in one order.

    Raises
    ------
    TensorError
        The inputs are not one array of one shape for each rank.
    """
    shapes = {a.shape for a in inputs}
    if len(inputs) != collective.ranks or len(shapes) != 1:
        raise TensorError(f"{len(inputs)} arrays of shapes {sorted(shapes)}; needed: {collective.ranks} of one shape")
    held = [np.array(a).reshape(-1) for a in inputs]
    size = held[0].size
    if edges is None:
        edges = [np.cumsum([0, *shard_sizes(size, collective.shard_count)]).tolist()]
    for chunk in edges:
        cuts = [min(max(edge, 0), size) for edge in chunk]
        if cuts[0] < cuts[-1]:
            _chunk(collective, held, cuts, fmt, watch)
    return [a.reshape(inputs[0].shape) for a in held]


def _chunk(
    collective: Collective, held: list[NDArray[Any]], cuts: Sequence[int], fmt: str, watch: Watch | None
) -> None:
    """Take one chunk through all rounds."""
    for transfers in collective.rounds:
        sent = [[held[t.source][cuts[s] : cuts[s + 1]].copy() for s in t.shards] for t in transfers]
        if collective.is_ordered and all(t.adds for t in transfers):
            _add_by_rank(held, cuts, transfers, sent, fmt)
            continue
        for transfer, parts in zip(transfers, sent, strict=True):
            for shard, part in zip(transfer.shards, parts, strict=True):
                place = held[transfer.target][cuts[shard] : cuts[shard + 1]]
                result = formats.add(place, part, fmt) if transfer.adds else part
                if watch is not None and transfer.adds:
                    watch(transfer, cuts[shard], (place, part), result)
                place[...] = result


def _add_by_rank(
    held: list[NDArray[Any]],
    cuts: Sequence[int],
    transfers: Sequence[Transfer],
    sent: Sequence[Sequence[NDArray[Any]]],
    fmt: str,
) -> None:
    """Add what arrives at each target in one round in the order of ranks, its own among them."""
    terms: dict[tuple[int, int], dict[int, NDArray[Any]]] = {}
    for transfer, parts in zip(transfers, sent, strict=True):
        for shard, part in zip(transfer.shards, parts, strict=True):
            terms.setdefault((transfer.target, shard), {})[transfer.source] = part
    for (target, shard), arrived in terms.items():
        place = held[target][cuts[shard] : cuts[shard + 1]]
        by_rank = [part for _, part in sorted({**arrived, target: place.copy()}.items())]
        total = by_rank[0]
        for part in by_rank[1:]:
            total = formats.add(total, part, fmt)
        place[...] = total
