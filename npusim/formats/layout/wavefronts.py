"""Matrices in memory, and the cost of a warp's access: wavefronts of shared memory.

Costs are pure functions of the lanes' byte addresses; a lane without an access has None.  `BankModel` states the
differences between machines.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import field
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from npusim.errors import LayoutError
from npusim.formats.layout.algebra import Layout
from npusim.formats.layout.fragment import WARP_LANES
from npusim.late_methods import dataclass
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npusim.formats.layout.fragment import Arrangement, Fragment

    #: Byte address of each lane, or None if the lane does not take part.
    Addresses: TypeAlias = Sequence[int | None]
    #: Function from (row, column) of a tile to an element.
    Place: TypeAlias = Callable[[int, int], int]


#: Number of bytes in each chunk that a swizzle moves: the widest access of a lane (volta.md §4.1).
_CHUNK_BYTES = 16
#: Rows after which a swizzle repeats (volta.md §4.1).
_SWIZZLED_ROWS = 8


@dataclass(frozen=True)
class BankModel:
    """Banks of a shared memory, and the number of lanes that it serves at a time.

    Word w of ``bank_bytes`` bytes is in bank ``w % banks``.  ``phase_lanes`` maps bytes of a lane's access to the
    neighbouring lanes served in one phase; ``pair_masks`` are the distances (XOR) of lanes whose returns can share a
    cycle if their addresses are equal.
    """

    banks: int
    bank_bytes: int
    phase_lanes: Mapping[int, int] = field(hash=False)
    pair_masks: tuple[int, ...]


#: The V100's shared memory: 32 banks of 4 bytes; 32, 16 and 8 lanes a phase for 32-, 64- and
#: 128-bit accesses; returns pack where lanes n and n^1, or n and n^2, agree (volta.md §4.1).
VOLTA_BANKS = BankModel(banks=32, bank_bytes=4, phase_lanes=MappingProxyType({4: 32, 8: 16, 16: 8}), pair_masks=(1, 2))


def wavefronts(addresses: Addresses, width_bytes: int, model: BankModel, *, allow_misaligned: bool = False) -> int:
    """Return the cycles of a shared-memory access of ``width_bytes`` per lane in the banks.

    The cycles of a phase are the largest number of different words of one bank; lanes that read the same word share it,
    and a phase without lanes takes 0 cycles.  32 lanes that read 32, 64 or 128 bits each without conflict take 1, 2 or
    4 cycles.

    Raises `LayoutError` for a width that the model does not know, more than 32 lanes, or an address that is no
    multiple of the width; ``allow_misaligned`` accepts multiples of a word, which the hardware refuses.

    Examples
    --------
    >>> wavefronts([4 * lane for lane in range(32)], 4, VOLTA_BANKS)
    1
    >>> wavefronts([128 * lane for lane in range(32)], 4, VOLTA_BANKS)
    32
    """
    _check(addresses, width_bytes, model, model.bank_bytes if allow_misaligned else width_bytes)
    lanes, cycles = model.phase_lanes[width_bytes], 0
    for first in range(0, len(addresses), lanes):
        words: defaultdict[int, set[int]] = defaultdict(set)
        for address in addresses[first : first + lanes]:
            if address is not None:
                start = address // model.bank_bytes
                for word in range(start, start + width_bytes // model.bank_bytes):
                    words[word % model.banks].add(word)
        cycles += max(map(len, words.values()), default=0)
    return cycles


def return_cycles(addresses: Addresses, width_bytes: int, model: BankModel) -> int:
    """Return the cycles that the data of a load need to arrive: one for each register of the warp.

    Half of this number if all lanes at one of the model's distances read the same address; any other broadcast costs
    the full number (volta.md §4.1).  A load takes the longer of this time and `wavefronts`.
    """
    _check(addresses, width_bytes, model, width_bytes)
    cycles = ceil_div(width_bytes, model.bank_bytes)
    taking = [lane for lane, address in enumerate(addresses) if address is not None]
    if not taking:
        return 0
    for mask in model.pair_masks:
        pairs = ((lane, lane ^ mask) for lane in taking)
        if all(b < len(addresses) and addresses[a] == addresses[b] for a, b in pairs):
            return ceil_div(cycles, 2)
    return cycles


def _check(addresses: Addresses, width_bytes: int, model: BankModel, multiple: int) -> None:
    if width_bytes not in model.phase_lanes:
        known = ", ".join(map(str, model.phase_lanes))
        raise LayoutError(f"an access of {width_bytes} bytes per lane; allowed: {known}")
    if len(addresses) > WARP_LANES:
        raise LayoutError(f"{len(addresses)} addresses, but a warp has {WARP_LANES} lanes")
    for lane, address in enumerate(addresses):
        if address is not None and (address < 0 or address % multiple):
            raise LayoutError(
                f"lane {lane}: address {address} is not a multiple of {multiple} bytes, which its access needs"
            )


def padded(rows: int, columns: int, *, padding: int) -> Place:
    """Return the function from (row, column) to an element for a tile that is stored row by row, with ``padding``
    elements after each row.
    """
    if padding < 0:
        raise LayoutError(f"padding of {padding} elements; must be at least 0")
    return Layout((rows, columns), (columns + padding, 1))


def swizzled(rows: int, columns: int, *, element_bytes: int = 2) -> Place:
    """Return the function from (row, column) to an element for a tile that is stored row by row, with the positions of
    16-byte chunks XORed with row mod 8.

    Raises `LayoutError` if the number of chunks of a row is not a power of two, or is below 8.
    """
    chunk, left = divmod(_CHUNK_BYTES, element_bytes)
    if left or columns & (columns - 1) or columns < chunk * _SWIZZLED_ROWS:
        raise LayoutError(
            f"rows of {columns} elements cannot be swizzled: columns must be a power of two, at least "
            f"{chunk * _SWIZZLED_ROWS}"
        )
    return lambda row, column: row * columns + (column ^ row % _SWIZZLED_ROWS * chunk)


def fragment_addresses(
    fragment: Fragment, arrangement: Arrangement, memory: Place, *, access_bytes: int, element_bytes: int = 2
) -> tuple[int, ...]:
    """Return the byte address at which each lane reads its part of an operand.

    ``memory`` maps (row, column) of the operand to an element; for K as the B of Q·Kᵀ its row is d, its column the key.
    An access wider than the lane's values also reads neighbouring fragments: an access of 16 bytes serves two
    fragments of m8n8k4, whose k (or n) then run in another order, equal in both operands (volta.md §4.1).

    Raises `LayoutError` if a lane's part is not contiguous in memory, or is not a multiple of the vector length.
    """
    count, left = divmod(access_bytes, element_bytes)
    axis = fragment.vector_axis
    run = _run(fragment, axis)
    if left or count < 1 or (count % run and run % count):
        raise LayoutError(
            f"{fragment}: a lane's {run} neighbouring values of {element_bytes} bytes do not fit "
            f"accesses of {access_bytes} bytes"
        )
    widened = max(count // run, 1)
    addresses = []
    for lane in range(WARP_LANES):
        start = list(arrangement.element(fragment, lane, 0))
        start[axis] *= widened
        pairs = [(start[0] + (i, 0)[axis], start[1] + (0, i)[axis]) for i in range(count)]
        elements = [memory(row, column) for row, column in pairs]
        if elements != list(range(elements[0], elements[0] + count)):
            raise LayoutError(f"{fragment}, lane {lane}: its {count} values from {pairs[0]} are not contiguous")
        addresses.append(elements[0] * element_bytes)
    return tuple(addresses)


def _run(fragment: Fragment, axis: int) -> int:
    """Return the number of a lane's first values that are adjacent along ``axis``."""
    first = fragment.coordinate(0, 0)
    run = 1
    while run < fragment.values:
        element = fragment.coordinate(0, run)
        if element[axis] != first[axis] + run or element[1 - axis] != first[1 - axis]:
            break
        run += 1
    return run
