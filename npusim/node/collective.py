"""Collectives as programs: rounds of transfers between ranks, whole or cut into chunks.

A message is cut into shards.  In a round every rank sends shards and receives shards; a received
shard is added to the rank's own (``adds``) or replaces it.  Who adds what in which order is all
that decides the bits (``node.reduction``); who sends how much over which link decides the time
(``node.simulate``): both read this one program.

Sources: HCCL documentation, "Mesh", "Ring", "RHD"; Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from npusim.errors import TilingError

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["allreduce", "reduce_scatter", "all_gather"]
Algorithm = Literal["mesh", "ring", "halving_doubling"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
#: Ranks of a node or of a group of nodes that collectives are meant for (issue 6).
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Transfer:
    """``source`` sends its ``shards`` to ``target``, which adds them to its own or takes them over."""

    source: int
    target: int
    shards: tuple[int, ...]
    adds: bool


Round = tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective among ``ranks``: rounds in order, each a set of transfers at once.

    Within a round all sources are read before any target is written; additions into one target
    happen in the order in which they are listed, the target's own value first; ``is_ordered`` says
    that a round's additions go by rank instead, whoever adds them.  ``owners[s]`` is the rank that
    holds shard ``s`` after a reduce-scatter, and before an all-gather.
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

    ``is_ordered`` makes a mesh add in the order of ranks, as HCCL's deterministic mode does: every
    shard is then summed alike.

    Raises
    ------
    TilingError
        Fewer than 2 or more than 64 ranks, or an unknown name.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise TilingError(f"ranks: {ranks}; a collective joins 2 to {MOST_RANKS}")
    if kind not in KINDS:
        raise TilingError(f"collective {kind!r}: there are {', '.join(KINDS)}")
    match algorithm:
        case "mesh":
            scatter, gather, owners = _mesh(ranks)
        case "ring":
            scatter, gather, owners = _ring(tuple(order or range(ranks)))
        case "halving_doubling":
            scatter, gather, owners = _halving_doubling(ranks)
        case _:
            raise TilingError(f"algorithm {algorithm!r}: there are {', '.join(ALGORITHMS)}")
    rounds = {"reduce_scatter": scatter, "all_gather": gather}.get(kind, scatter + gather)
    return Collective(kind, algorithm, ranks, len(owners), tuple(rounds), owners, is_ordered)


Parts = tuple[list[Round], list[Round], tuple[int, ...]]


def _mesh(ranks: int) -> Parts:
    """Return one round in which every rank sends every other its shard, and one back."""
    # Model: peers are added in ascending order; without HCCL's deterministic mode it is that of arrival.
    pairs = [(target, source) for target in range(ranks) for source in range(ranks)]
    pairs = [(target, source) for target, source in pairs if target != source]
    scatter = tuple(Transfer(source, target, (target,), True) for target, source in pairs)
    gather = tuple(Transfer(source, target, (source,), False) for target, source in pairs)
    return [scatter], [gather], tuple(range(ranks))


def _ring(order: tuple[int, ...]) -> Parts:
    """Return p - 1 rounds around the ring that add up, and p - 1 that pass on."""
    count = len(order)

    def around(step: int, shift: int, adds: bool) -> Round:
        return tuple(
            Transfer(rank, order[(place + 1) % count], ((place + shift - step) % count,), adds)
            for place, rank in enumerate(order)
        )

    scatter = [around(step, 0, True) for step in range(count - 1)]
    gather = [around(step, 1, False) for step in range(count - 1)]
    owners = [0] * count
    for place, rank in enumerate(order):
        owners[(place + 1) % count] = rank
    return scatter, gather, tuple(owners)


def _halving_doubling(ranks: int) -> Parts:
    """Return log2(p) rounds of halves of what is left, and back.

    Beyond a power of two the last ranks first add their message to a partner's and get the result
    at the end, as MPICH does.
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
            # What a rank still holds: the shards that agree with it in the bits halved so far.
            kept = tuple(s for s in every if s // distance == partner // distance)
            own = tuple(s for s in every if s // distance == rank // distance)
            halves.append(Transfer(rank, partner, kept, True))
            doubles.append(Transfer(rank, partner, own, False))
        scatter.append(tuple(halves))
        gather.insert(0, tuple(doubles))
        distance //= 2
    return scatter, gather, every


def shard_sizes(elements: int, shards: int) -> list[int]:
    """Return the elements of each shard of a message; the first ones are longer where ragged."""
    base, longer = divmod(elements, shards)
    return [base + (index < longer) for index in range(shards)]
