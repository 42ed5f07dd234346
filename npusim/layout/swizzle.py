"""Swizzles: index bits exclusive-ored into lower ones, so that columns spread over banks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.errors import LayoutError

if TYPE_CHECKING:
    from npusim.layout.algebra import Layout
    from npusim.layout.shape import IntTuple


@dataclass(frozen=True, slots=True)
class Swizzle:
    """XOR ``bits`` bits at ``base + shift`` into those at ``base`` (CuTe's ``Swizzle<B,M,S>``).

    A negative ``shift`` XORs the lower bits into the upper ones.  Its own inverse.

    Raises
    ------
    LayoutError
        Negative ``bits`` or ``base``, or fields that overlap (``|shift| < bits``).

    Examples
    --------
    >>> Swizzle(3, 3, 3)(64 + 8)
    64
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0 or abs(self.shift) < self.bits:
            raise LayoutError(f"{self}: needs bits >= 0, base >= 0 and |shift| >= bits")

    def __call__(self, index: int) -> int:
        """Return the swizzled index."""
        field = (1 << self.bits) - 1 << self.base
        if self.shift >= 0:
            return index ^ (index >> self.shift & field)
        return index ^ ((index & field) << -self.shift)


@dataclass(frozen=True, slots=True)
class SwizzledLayout:
    """A layout whose indices are swizzled: ``swizzle(layout(coordinate))``."""

    swizzle: Swizzle
    layout: Layout

    def __call__(self, *coordinate: IntTuple) -> int:
        """Return the swizzled index at a coordinate."""
        return self.swizzle(self.layout(*coordinate))

    @property
    def size(self) -> int:
        """How many coordinates it has."""
        return self.layout.size
