"""Families: blocks of a phase that differ in coordinates and in the lengths of their loops, distinguished once.

A phase may name these blocks (``ProgramPhase.family``).  One block represents all blocks of a family, with opaque
numbers where they differ; these numbers have bounds, so that its body may compare them as long as the result is the
same for all blocks.  Otherwise the blocks with the smallest number become a separate family.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.identity import Itself
from npusim.late_methods import dataclass
from npusim.program.ir.columns import BlockColumns
from npusim.program.ir.content import kept_by_blocks, uncollected
from npusim.program.ir.opaque import OpaqueError, OpaqueRange, Symbol, constant_of, symbols_in, terms_of, twin
from npusim.program.ir.tile_program import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import numpy.typing as npt

    from npusim.program.ir.tile_program import ProgramPhase

    Integers = Sequence[int] | npt.NDArray[np.int64]

#: Largest average number of families per key; blocks that need more are grouped by shape.
MOST_FAMILIES = 8


@dataclass(slots=True)
class Family:
    """Blocks that one block represents.

    ``numbers`` are the blocks' indices in the phase, ``block`` is their common part; ``coordinates`` contains the
    integers of each symbol, one per block.  ``sizes`` contains the number of iterations of each loop of the body,
    (blocks, loops).
    """

    numbers: npt.NDArray[np.int64]
    block: object
    coordinates: Mapping[Symbol, npt.NDArray[np.int64]]
    sizes: npt.NDArray[np.int64]


def shapes_of(phase: ProgramPhase, numbers: Sequence[int] | None = None) -> list[list[int]]:
    """Return the indices of the blocks of each shape, of all blocks by default."""
    if numbers is None and isinstance(phase.blocks, BlockColumns) and (known := phase.blocks.grouped(phase.shape)):
        return [of_shape.tolist() for of_shape in known.values()]
    chosen = range(len(phase.blocks)) if numbers is None else numbers
    return list(_grouped([phase.blocks[n] for n in chosen], phase.shape, chosen).values())


def families_of(phase: ProgramPhase) -> list[Family] | None:
    """Return the families of a phase's blocks; None if the blocks must be grouped by shape."""
    return None if phase.family is None else _families(phase).families


def take_by_shape(phase: ProgramPhase) -> None:
    """Mark a phase as without families: some of its blocks differ in more than a family allows."""
    if phase.family is not None:
        _families(phase).families = None


def values_of(value: Any, coordinates: Mapping[Symbol, Integers]) -> Any:
    """Return a sum of coordinates for each block; a number is returned unchanged."""
    terms = [factor * np.asarray(coordinates[symbol], np.int64) for symbol, factor in terms_of(value).items()]
    return sum(terms, constant_of(value))


class _Group:
    """Blocks of one key: their common part does not depend on the program, and is stored with them."""

    def __init__(self, blocks: Sequence[Any], numbers: npt.NDArray[np.int64]) -> None:
        self.blocks, self.numbers = blocks, numbers
        self._apart: dict[Symbol, list[_Group]] = {}

    @cached_property
    def common(self) -> tuple[Any, dict[Symbol, npt.NDArray[np.int64]]] | None:
        """The common part, and each symbol's integers; None if blocks differ in more than integers."""
        coordinates: dict[Symbol, Sequence[int]] = {}
        try:
            result = symbols_in(coordinates, is_bounded=True)
            if isinstance(self.blocks, BlockColumns):
                block = self.blocks.twin(self.numbers, "block", result)
            else:
                block = twin([self.blocks[n] for n in self.numbers.tolist()], "block", result)
        except TypeError:
            return None
        return block, {symbol: np.array(values, np.int64) for symbol, values in coordinates.items()}

    def apart(self, symbol: Symbol) -> list[_Group]:
        """Return the blocks with the smallest integer of a symbol, and the other blocks."""
        assert self.common and symbol.bounds
        if symbol not in self._apart:
            is_least = self.common[1][symbol] == symbol.bounds[0]
            self._apart[symbol] = [_Group(self.blocks, self.numbers[which]) for which in (is_least, ~is_least)]
        return self._apart[symbol]


@kept_by_blocks(lambda _groups, blocks, _family: len(blocks.thing))
def _groups(blocks: Itself, family: Callable[[Any], Hashable]) -> list[_Group]:
    known = blocks.thing.grouped(family) if isinstance(blocks.thing, BlockColumns) else None
    grouped = known or _grouped(blocks.thing, family, range(len(blocks.thing)))
    return [_Group(blocks.thing, np.array(numbers, np.int64)) for numbers in grouped.values()]


def _grouped(
    blocks: Sequence[Any], key_of: Callable[[Any], Hashable], numbers: Sequence[int]
) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for number, block in zip(numbers, blocks, strict=True):
        groups.setdefault(key_of(block), []).append(number)
    return groups


@dataclass(slots=True)
class Families:
    """The families of a phase's blocks; None: the blocks must be grouped by shape."""

    families: list[Family] | None


def _families(phase: ProgramPhase) -> Families:
    if not phase.grouped:
        phase.grouped.append(Families(_found_families(phase)))
    return phase.grouped[0]


@uncollected()
def _found_families(phase: ProgramPhase) -> list[Family] | None:
    """Return families; blocks with the smallest numbers are separated until the body distinguishes no blocks within a
    family.
    """
    assert phase.family is not None
    families: list[Family] = []
    waiting = list(reversed(_groups(Itself(phase.blocks), phase.family)))
    most = MOST_FAMILIES * len(waiting)
    while waiting:
        group = waiting.pop()
        if group.common is None:
            return None
        block, coordinates = group.common
        try:
            loops = [item.indices for item in phase.body(block) if isinstance(item, Loop) and item.indices]
        except OpaqueError as error:
            compared = [symbol for symbol in coordinates if symbol in error.symbols]
            if not compared or len(families) + len(waiting) > most:
                return None
            waiting += group.apart(compared[0])
            continue
        sizes = np.empty((len(group.numbers), len(loops)), np.int64)
        for at, loop in enumerate(loops):
            sizes[:, at] = values_of(loop.count, coordinates) if isinstance(loop, OpaqueRange) else len(loop)
        families.append(Family(group.numbers, block, coordinates, sizes))
    return families
