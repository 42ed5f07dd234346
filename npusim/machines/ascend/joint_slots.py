"""Slots that several inputs, or several results, of a stage share, if a stage has more of them than a pair of queues
has event flags.

The load queue executes its loads in order: the first load of a shared slot waits until the slot is free, and the last
one sets the flag for which the vector unit waits. The store queue executes its stores in order: the first one waits for
the slot of all results, and the last one frees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from npusim.late_methods import dataclass
from npusim.program.ir.tile import RingTile
from npusim.units import round_up

if TYPE_CHECKING:
    from npusim.program.ir.buffers import Ring


@dataclass(frozen=True, slots=True)
class JointSlot:
    """Inputs, or results, that share a slot, and the byte at which each begins, in the order of their transfers."""

    offsets: Mapping[str, int]
    size_bytes: int = 0

    def transfer(self, ring: Ring, name: str, shape: tuple[int, int, str], *, is_load: bool) -> RingTile:
        """Return the load queue's view of an input, or the store queue's view of a result."""
        *before, last = self.offsets
        first = (before or [last])[0]
        return self._view(ring, name, shape, is_producer=is_load, first=name == first, last=name == last)

    def work(self, ring: Ring, name: str, shape: tuple[int, int, str], *, is_load: bool) -> RingTile:
        """Return the vector unit's view of an input, or of a result; one operation accesses all of the slot."""
        return self._view(ring, name, shape, is_producer=not is_load, first=True, last=True)

    def _view(
        self, ring: Ring, name: str, shape: tuple[int, int, str], *, is_producer: bool, first: bool, last: bool
    ) -> RingTile:
        rows, cols, fmt = shape
        return RingTile(ring, is_producer, rows, cols, cols, fmt, self.offsets[name], first, last)


def joint_slots(sizes: Mapping[str, int], groups: Sequence[Sequence[str]], most: int, block: int) -> list[JointSlot]:
    """Return the shared slots, as few as possible, with which the names need at most ``most`` slots; if that is
    impossible, the shared slots with which they need the fewest.

    ``sizes``: bytes of each input or result, rounded up to a multiple of ``block`` in a slot; ``groups``: names that
    are always transferred together, in the order of their transfers.
    """
    result, excess = list[JointSlot](), len(sizes) - max(1, most)
    for group in sorted(groups, key=len, reverse=True):
        shared = group[-(excess + 1) :] if excess > 0 else ()
        if len(shared) > 1:
            offsets, at = dict[str, int](), 0
            for n in shared:
                offsets[n], at = at, at + round_up(sizes[n], block)
            result.append(JointSlot(offsets, at))
            excess -= len(shared) - 1
    return result
