"""Integers that grow with a length of a program, or with the iteration of a loop whose number of iterations grows.

A program runs with one number for the length.  `Growing` has the amount by which a value grows with each step of the
length and with each iteration.  `Growth` records the iterations for which the program's conditions have the same
answers as in the iterations that ran: all except some first and some last iterations, with a period.  If a growing
integer is not sufficient (because Python needs an integer, or two growing integers are multiplied), this is recorded as
a reason why nothing is known.
"""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass, field
from fractions import Fraction

Slope = int | Fraction


@dataclass(slots=True)
class Turn:
    """A loop whose number of iterations grows: ``iteration`` of ``end`` runs; ``is_open`` until the loop has ended."""

    iteration: int
    end: int
    is_open: bool = True


@dataclass(slots=True)
class Growth:
    """How a program depends on a length of ``first + step * k``; the program runs for one ``k``; ``name``: the name of
    the length.

    The answers of conditions are the same for all iterations of a loop except the first ``before`` and the last
    ``after`` ones, with ``period``, and for every k from ``least`` on.  ``reasons``: why this is not so, each with a
    line. ``has_grid``: whether the number of core groups also grows.  ``loops``: for each loop whose number of
    iterations grows, by its part of the program, its iterations and those that all cores have.
    """

    path: str
    name: str
    step: int
    k: int
    before: int = 0
    after: int = 0
    period: int = 1
    least: int = 0
    reasons: dict[str, None] = field(default_factory=dict)
    has_grid: bool = False
    loops: dict[int, tuple[int, int]] = field(default_factory=dict)

    def ran(self, part: int, low: int, high: int) -> None:
        """Record a loop."""
        others = self.loops.get(part, (low, high))
        self.loops[part] = max(low, others[0]), min(high, others[1])

    def refuse(self, why: str) -> None:
        """Record a reason, with the line of the program that runs."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.path:
            frame = frame.f_back  # type: ignore[assignment]
        place = f"line {frame.f_lineno}: " if frame is not None else ""
        self.reasons[place + why] = None

    def refuse_loop(self, more: Slope) -> None:
        """Record a loop whose number of iterations does not grow by exactly one with each step, and the step with which
        it would grow by one.
        """
        step = Fraction(self.step) / more if more > 0 else Fraction(1, 2)
        use = f"; use --every {self.name}={step}" if step.denominator == 1 else ""
        self.refuse(f"each step of {self.step} adds {more} iterations to the loop, but a proof needs exactly one{use}")

    def repeats(self, period: int) -> None:
        """Record that the program's instructions repeat every ``period`` iterations, or steps of the length."""
        self.period = math.lcm(self.period, period)

    def answers(self, value: int, of_iteration: Slope, of_length: Slope, turn: Turn | None) -> None:
        """Record the iteration and the length from which on the sign of a value that a condition tests no longer
        changes.
        """
        slack = 1 + self.period
        if of_iteration == 0:
            self.least = max(self.least, self.k + math.ceil(-value / of_length) + slack)
        elif turn is not None and of_length == 0:
            self.before = max(self.before, turn.iteration + math.ceil(-value / of_iteration) + slack)
        elif turn is not None and of_length == -of_iteration:
            self.after = max(self.after, turn.end - turn.iteration + math.ceil(value / of_iteration) + slack)
        else:
            self.refuse("a condition changes at an iteration whose distance from both ends of the loop is not fixed")


class Growing:
    """An integer ``value`` that grows by ``of_iteration`` with each iteration and by ``of_length`` with each step.

    A fraction is the mean growth, over a recorded period, of a quotient that is rounded down.
    """

    __slots__ = ("_of_iteration", "_of_length", "growth", "turn", "value")

    def __init__(
        self, growth: Growth, value: int, of_iteration: Slope = 0, of_length: Slope = 0, turn: Turn | None = None
    ) -> None:
        self.growth, self.value, self.turn = growth, value, turn
        self._of_iteration, self._of_length = of_iteration, of_length

    @property
    def slopes(self) -> tuple[Slope, Slope]:
        """The growth with an iteration and with the length; after the end of a loop it is that of the last
        iteration.
        """
        if self.turn is not None and not self.turn.is_open:
            return 0, self._of_iteration + self._of_length
        return self._of_iteration, self._of_length

    def _made(self, value: int, a: Slope, b: Slope, turn: Turn | None) -> Growing | int:
        return Growing(self.growth, value, a, b, turn if a else None) if a or b else value

    def _sum(self, other: Growing | int, sign: int, own: int = 1) -> Growing | int:
        """Return ``own * self + sign * other``."""
        a, b = self.slopes
        if isinstance(other, Growing):
            c, d = other.slopes
            turn = self.turn if a else other.turn
            if a and c and self.turn is not other.turn:
                self.growth.refuse("an expression has the iterations of two loops")
            return self._made(own * self.value + sign * other.value, own * a + sign * c, own * b + sign * d, turn)
        return self._made(own * self.value + sign * other, own * a, own * b, self.turn)

    def __add__(self, other: object) -> Growing | int:
        return self._sum(other, 1) if isinstance(other, Growing | int) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: object) -> Growing | int:
        return self._sum(other, -1) if isinstance(other, Growing | int) else NotImplemented

    def __rsub__(self, other: object) -> Growing | int:
        return self._sum(other, 1, -1) if isinstance(other, Growing | int) else NotImplemented

    def __neg__(self) -> Growing | int:
        return self._sum(0, 1, -1)

    def __pos__(self) -> Growing:
        return self

    def __mul__(self, other: object) -> Growing | int:
        if isinstance(other, Growing):
            self.growth.refuse("a product of two integers that grow")
            return self.value * other.value
        if not isinstance(other, int):
            return NotImplemented
        a, b = self.slopes
        return self._made(self.value * other, a * other, b * other, self.turn)

    __rmul__ = __mul__

    def __floordiv__(self, other: object) -> Growing | int:
        if not isinstance(other, Growing | int):
            return NotImplemented
        if isinstance(other, Growing) or other <= 0:
            self.growth.refuse("a quotient by an integer that grows or is not positive")
            return self.value // plain(other)
        a, b = (Fraction(x) / other for x in self.slopes)
        for slope in (a, b):
            self.growth.repeats(slope.denominator)
        whole = [x.numerator if x.denominator == 1 else x for x in (a, b)]
        return self._made(self.value // other, whole[0], whole[1], self.turn)

    def __mod__(self, other: object) -> Growing | int:
        if not isinstance(other, Growing | int):
            return NotImplemented
        if isinstance(other, Growing) or other <= 0:
            self.growth.refuse("a remainder by an integer that grows or is not positive")
            return self.value % plain(other)
        for slope in map(Fraction, self.slopes):
            self.growth.repeats((slope / other).denominator)
        return self.value % other

    def __divmod__(self, other: object) -> tuple[Growing | int, Growing | int]:
        return self // other, self % other

    def __and__(self, other: object) -> Growing | int:
        if isinstance(other, int) and other >= 0 and not other & (other + 1):
            return self % (other + 1)
        return operator.index(self) & plain(other)

    def __rshift__(self, other: object) -> Growing | int:
        return self // (1 << plain(other))

    def __lshift__(self, other: object) -> Growing | int:
        return self * (1 << plain(other))

    # ------------------------------------------------------------ conditions

    def _difference(self, other: object) -> int | None:
        """Return the number whose sign decides a comparison; None: the other operand must compare."""
        if isinstance(other, float):
            self.growth.refuse("a comparison of an integer that grows with a float")
            return -1 if self.value < other else int(self.value > other)
        if not isinstance(other, Growing | int):
            return None
        left = self._sum(other, -1)
        if isinstance(left, Growing):
            self.growth.answers(left.value, *left.slopes, left.turn)
            return left.value
        return left

    def __lt__(self, other: object) -> bool:
        return NotImplemented if (d := self._difference(other)) is None else d < 0

    def __le__(self, other: object) -> bool:
        return NotImplemented if (d := self._difference(other)) is None else d <= 0

    def __gt__(self, other: object) -> bool:
        return NotImplemented if (d := self._difference(other)) is None else d > 0

    def __ge__(self, other: object) -> bool:
        return NotImplemented if (d := self._difference(other)) is None else d >= 0

    def __eq__(self, other: object) -> bool:
        return NotImplemented if (d := self._difference(other)) is None else d == 0

    def __ne__(self, other: object) -> bool:
        return NotImplemented if (d := self._difference(other)) is None else d != 0

    def __bool__(self) -> bool:
        return self != 0

    # ------------------------------------------------------------ values that Python needs as numbers

    def __index__(self) -> int:
        self.growth.refuse("a growing integer is used where npusim needs a number")
        return self.value

    __int__ = __index__

    def __float__(self) -> float:
        return float(operator.index(self))

    def __truediv__(self, other: object) -> float:
        return operator.index(self) / plain(other)

    def __rtruediv__(self, other: object) -> float:
        return plain(other) / operator.index(self)

    def __rfloordiv__(self, other: object) -> int:
        return 0 if self._exceeds(other) else plain(other) // self.value

    def __rmod__(self, other: object) -> int:
        return plain(other) if self._exceeds(other) else plain(other) % self.value

    def _exceeds(self, other: object) -> bool:
        """Return whether this divisor is above a number that is not negative; this is then so from some length on."""
        is_above = self > other
        if plain(other) < 0 or (not is_above and min(self.slopes) < 0):
            self.growth.refuse("a quotient by an integer that grows")
        return is_above and plain(other) >= 0

    def __hash__(self) -> int:
        return hash(operator.index(self))

    def __repr__(self) -> str:
        return str(operator.index(self))

    def __format__(self, form: str) -> str:
        return format(operator.index(self), form)

    @property  # type: ignore[misc]  # a program that asks whether it is an integer is told so
    def __class__(self) -> type:
        return int


#: How a range of an axis moves with an iteration; None: its place or its extent depends on the length in another way.
Move = Slope | None


def plain(x: object) -> int:
    """Return the number of an integer, which may grow."""
    return x.value if isinstance(x, Growing) else operator.index(x)  # type: ignore[arg-type]


def move_of(low: object, high: object) -> Move:
    """Return how the range from ``low`` to ``high`` moves."""
    (a, b), (c, d) = (x.slopes if isinstance(x, Growing) else (0, 0) for x in (low, high))
    return a if a == c and not b and not d else None
