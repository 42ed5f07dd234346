"""Orders in which the next product may be fed: how many values each leaves in the right lane.

Feeding the columns of P in another order, and the rows of V alike, does not change P·V.  These
functions try every order without listing them (volta.md §1.1: no order saves FP32 accumulators).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from npusim.errors import LayoutError
from npusim.layout.chain import chain

if TYPE_CHECKING:
    from npusim.layout.fragment import Arrangement, Fragment

__all__ = ["best_order", "in_place_table", "tally_orders"]

#: Longest order whose subsets are walked: 65,536 of them.
_LONGEST = 16


def in_place_table(
    accumulator: Fragment, operand: Fragment, arrangement: Arrangement | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return ``table[p][c]``: values of one group in the right lane if place p is fed from c.

    An order leaves ``sum(table[p][order[p]])`` values in place.  Raises `LayoutError` as `chain`.
    """
    plain = chain(accumulator, operand, arrangement=arrangement)
    depth = len(plain.order)
    table = [[0] * depth for _ in range(depth)]
    axis = 1 if operand.operand == "A" else 0
    deep = operand.columns if axis == 1 else operand.rows
    for turn in range(depth):
        order = [(place + turn) % depth for place in range(depth)]
        turned = chain(accumulator, operand, arrangement=plain.arrangement, order=order)
        for thread in range(operand.threads):
            lane = operand.lane(thread)
            for slot, (source, _) in enumerate(turned.sources[lane]):
                step, value = divmod(slot, operand.values)
                place = step * deep + operand.coordinate(lane, value)[axis]
                table[place][order[place]] += source == lane
    return tuple(map(tuple, table))


def tally_orders(accumulator: Fragment, operand: Fragment, arrangement: Arrangement | None = None) -> dict[int, int]:
    """Return how many orders leave how many values of one group in place; the most first.

    Examples
    --------
    >>> from npusim.layout.instruction import instruction
    >>> tally_orders(instruction("m8n8k4", acc="f32").c, instruction("m8n8k4").a)
    {32: 40320}
    """
    table = _short(in_place_table(accumulator, operand, arrangement))
    tallies = {0: Counter({0: 1})}  # set of sources already fed -> values in place -> orders
    for row in table:
        further: dict[int, Counter[int]] = {}
        for used, tally in tallies.items():
            for source, gain in enumerate(row):
                if not used >> source & 1:
                    target = further.setdefault(used | 1 << source, Counter())
                    target.update({total + gain: count for total, count in tally.items()})
        tallies = further
    (whole,) = tallies.values()
    return dict(sorted(whole.items(), reverse=True))


def best_order(
    accumulator: Fragment, operand: Fragment, arrangement: Arrangement | None = None
) -> tuple[tuple[int, ...], int]:
    """Return the first order that leaves most values of one group in place, and how many."""
    table = _short(in_place_table(accumulator, operand, arrangement))
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for row in table:
        further: dict[int, tuple[int, tuple[int, ...]]] = {}
        for used, (total, order) in best.items():
            for source, gain in enumerate(row):
                after = used | 1 << source
                if used != after and further.get(after, (-1,))[0] < total + gain:
                    further[after] = (total + gain, (*order, source))
        best = further
    ((total, order),) = best.values()
    return order, total


def _short(table: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    if len(table) > _LONGEST:
        raise LayoutError(f"orders of {len(table)} places are too many to try: at most {_LONGEST}")
    return table
