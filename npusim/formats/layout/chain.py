"""One product's accumulator as the next product's operand: values that are in the lane that needs them, and values that
must move.

In attention the scores S = Q·Kᵀ become the A operand of P·V.  If an accumulator's lane map differs from the operand's,
values must cross lanes.  A warp uses SHFL for this: every lane publishes one 32-bit register, and reads that of lane
``self ^ mask``.

Source: volta.md §1.1 (counts of all cases on Volta) and §2 (m16n8k16, where nothing moves).
"""

from __future__ import annotations

from functools import cached_property
from itertools import product
from math import lcm
from typing import TYPE_CHECKING, Literal

from npusim.errors import LayoutError
from npusim.formats.layout.fragment import REGISTER_BITS, WARP_LANES, Arrangement
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from npusim.formats.layout.fragment import Fragment

#: (lane, value): where a value is before the exchange.
Source = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ChainCost:
    """Warp instructions that convert the accumulators of one chained tile to operands.

    Counts of a straightforward lowering; cycles depend on the device's pipes.
    """

    shuffles: int  #: SHFL.BFLY of one 32-bit register
    selects: int  #: one for each source of a register after the first, if lanes have different sources
    permutes: int  #: permutations of bytes: one for each register that is mixed from halves of two registers
    conversions: int  #: values that a lane converts to the operand's format; 0 if accumulators already have it


@dataclass(frozen=True, slots=True)
class Shuffle:
    """One SHFL.BFLY: lane l reads from lane ``l ^ mask``.

    ``slots[l]`` are the places of lane l's operand that the exchange fills, at most one full register; ``sources[l]``
    are the values of lane ``l ^ mask`` for these places.
    """

    mask: int
    slots: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Chain:
    """How the accumulators of one product become operand ``A`` (or ``B``) of the next.

    The chained tile is the smallest one that fills whole fragments of both products.  ``tiles`` accumulator fragments
    give ``steps`` operand fragments; value v of fragment t is number ``t * accumulator.values + v``, and slots are
    numbered in the same way; ``sources[lane][slot]`` is the (lane, value) for that slot, in the same lane if possible.
    Both products have one ``arrangement`` of groups.
    """

    accumulator: Fragment
    operand: Fragment
    arrangement: Arrangement
    tiles: int
    steps: int
    sources: tuple[tuple[Source, ...], ...]

    @property
    def values(self) -> int:
        """Number of operand values that one group (quad pair) needs."""
        return len(self.sources[0]) * self.operand.threads

    @property
    def in_place(self) -> int:
        """The number of `values` that are in the lane that needs them."""
        lanes = [self.operand.lane(t) for t in range(self.operand.threads)]
        return sum(source == lane for lane in lanes for source, _ in self.sources[lane])

    @property
    def share(self) -> float:
        """The share of a warp's values that are in the lane that needs them."""
        stay = sum(s == lane for lane in range(WARP_LANES) for s, _ in self.sources[lane])
        return stay / sum(map(len, self.sources))

    @property
    def moved(self) -> int:
        """Largest number of values that a lane gets from other lanes."""
        return max(sum(s != lane for s, _ in self.sources[lane]) for lane in range(WARP_LANES))

    @cached_property
    def shuffles(self) -> tuple[Shuffle, ...]:
        """The butterflies that fetch all values from other lanes, by ascending mask."""
        masks = {source ^ lane for lane in range(WARP_LANES) for source, _ in self.sources[lane]}
        return tuple(s for mask in sorted(masks - {0}) for s in self._butterflies(mask))

    @cached_property
    def cost(self) -> ChainCost:
        """The instructions for one chained tile of a warp."""
        selects = permutes = 0
        sent = [{values for values in shuffle.sources if values} for shuffle in self.shuffles]
        for recipes in (*sent, *self._formed()):
            selects += max(len(recipes) - 1, 0)
            permutes += sum(not self._is_whole(recipe) for recipe in recipes)
        count = self.tiles * self.accumulator.values
        is_narrowed = self.accumulator.bits != self.operand.bits
        return ChainCost(len(self.shuffles), selects, permutes, count if is_narrowed else 0)

    def _butterflies(self, mask: int) -> list[Shuffle]:
        """Return the shuffles of one mask: the values that each lane needs, one register at a time."""
        needed = [
            [(slot, v) for slot, (s, v) in enumerate(self.sources[lane]) if s == lane ^ mask]
            for lane in range(WARP_LANES)
        ]
        packed = REGISTER_BITS // self.operand.bits
        shuffles = []
        for start in range(0, max(map(len, needed)), packed):
            part = [row[start : start + packed] for row in needed]
            slots = tuple(tuple(slot for slot, _ in row) for row in part)
            shuffles.append(Shuffle(mask, slots, tuple(tuple(v for _, v in row) for row in part)))
        return shuffles

    def _formed(self) -> list[set[tuple[int, ...]]]:
        """Return, for each operand register, the different registers that it is composed of.

        Received values are numbered after those of the accumulator, one register for each shuffle.
        """
        packed = REGISTER_BITS // self.operand.bits
        accumulated = self.tiles * self.accumulator.values
        arrived: dict[tuple[int, int], int] = {}
        for number, shuffle in enumerate(self.shuffles):
            for lane, slots in enumerate(shuffle.slots):
                arrived.update(((lane, slot), accumulated + number * packed + half) for half, slot in enumerate(slots))
        registers = []
        for start in range(0, len(self.sources[0]), packed):
            slots_of = range(start, start + packed)
            registers.append(
                {
                    tuple(arrived.get((lane, slot), self.sources[lane][slot][1]) for slot in slots_of)
                    for lane in range(WARP_LANES)
                }
            )
        return registers

    def _is_whole(self, recipe: tuple[int, ...]) -> bool:
        packed = REGISTER_BITS // self.operand.bits
        return recipe[0] % packed == 0 and all(v == recipe[0] + i for i, v in enumerate(recipe))


def chain(
    accumulator: Fragment, operand: Fragment, *, arrangement: Arrangement | None = None, allow_exchange: bool = True
) -> Chain:
    """Return the values of an accumulator that are in the lane that needs them for the next product's operand.

    ``operand`` is fragment A of the next product, whose rows are C's rows, or B, whose columns are C's columns (the
    transposed form, Sᵀ = K·Qᵀ).  ``arrangement`` is the arrangement of the groups in both products; by default all
    groups are stacked along the operand's axis (4x1 for A, 1x4 for B), so that no group needs the values of another
    one.

    Raises `LayoutError` for operands that cannot be chained, and for values that would have to cross lanes unless
    ``allow_exchange``.

    Examples
    --------
    >>> from npusim.formats.layout.instruction import instruction
    >>> wide = chain(instruction("m8n8k4", acc="f32").c, instruction("m8n8k4").a)
    >>> wide.in_place, wide.values, wide.cost.shuffles, wide.shuffles[0].mask
    (32, 64, 2, 2)
    """
    axis = _kept_axis(accumulator, operand)
    groups = accumulator.groups
    default = Arrangement(groups, 1) if axis == 0 else Arrangement(1, groups)
    where = arrangement or default
    height, width = where.tile(accumulator)
    stacked, deep = (width, operand.columns) if axis == 0 else (height, operand.rows)
    depth = lcm(stacked, deep)
    sources = _sources(accumulator, operand, where, depth, axis)
    chained = Chain(accumulator, operand, where, depth // stacked, depth // deep, sources)
    if chained.moved and not allow_exchange:
        raise LayoutError(
            f"{accumulator} -> {operand} in {where}: {chained.in_place} of {chained.values} values are in the "
            f"right lane, {chained.moved} per lane would have to move, but exchange is not allowed; "
            f"{_way_out(chained, default)}"
        )
    return chained


def _way_out(chained: Chain, default: Arrangement) -> str:
    if chained.arrangement == default or chain(chained.accumulator, chained.operand).moved:
        return "f16 accumulators in 4x1 chain into a row-major A in place"
    return f"arranged {default} nothing moves"


def _kept_axis(accumulator: Fragment, operand: Fragment) -> Literal[0, 1]:
    """Return the axis of the accumulator that the operand keeps; the other is summed over."""
    if accumulator.operand != "C":
        raise LayoutError(f"{accumulator} is not an accumulator: only C can be chained into a next product")
    if operand.operand == "C":
        raise LayoutError(f"{accumulator} -> {operand}: chain into A or B: C is added, not multiplied")
    axis: Literal[0, 1] = 0 if operand.operand == "A" else 1
    kept, wanted = (accumulator.rows, operand.rows) if axis == 0 else (accumulator.columns, operand.columns)
    if kept != wanted or accumulator.groups != operand.groups:
        raise LayoutError(
            f"{accumulator} -> {operand}: {kept} {'rows' if axis == 0 else 'columns'} in "
            f"{accumulator.groups} groups cannot feed {wanted} in {operand.groups}"
        )
    return axis


def held(fragment: Fragment, where: Arrangement, tiles: int = 1, axis: int = 0) -> dict[tuple[int, int], Source]:
    """Return the lane and the value that hold each (row, column) of a warp's tiles, adjacent along an axis.

    If several lanes have an element, it is the first of these lanes. Value v of tile t is number ``t * fragment.values
    + v``.
    """
    extent = where.tile(fragment)[axis]
    places: dict[tuple[int, int], Source] = {}
    for tile, lane, value in product(range(tiles), range(WARP_LANES), range(fragment.values)):
        element = list(where.element(fragment, lane, value))
        element[axis] += tile * extent
        places.setdefault((element[0], element[1]), (lane, tile * fragment.values + value))
    return places


def _sources(
    accumulator: Fragment, operand: Fragment, where: Arrangement, depth: int, axis: Literal[0, 1]
) -> tuple[tuple[Source, ...], ...]:
    places = held(accumulator, where, depth // where.tile(accumulator)[1 - axis], 1 - axis)
    deep = operand.columns if axis == 0 else operand.rows
    sources: list[tuple[Source, ...]] = []
    for lane in range(WARP_LANES):
        row: list[Source] = []
        for step, value in product(range(depth // deep), range(operand.values)):
            needed = list(where.element(operand, lane, value))
            needed[1 - axis] += step * deep
            row.append(places[needed[0], needed[1]])
        sources.append(tuple(row))
    return tuple(sources)
