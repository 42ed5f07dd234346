"""The relation of two values of a loop in its first iteration, equal or not, derived from the numbers with which its
states begin.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from npusim.errors import ProgramError
from npusim.kernels.triton.ttir_text import FORMATS, Op, shape_of
from npusim.kernels.triton.values import number_of

#: A number, or an operation on such values: its name, its attributes and type, and its operands.
_Value = float | tuple[object, ...]
#: Operations that change only a block's shape: for a block of one number they return that number.
_SHAPES = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "ttg.convert_layout", "arith.extf")
_MAXIMA = ("arith.maxnumf", "arith.maximumf")

_OF_NUMBERS: Mapping[str, Callable[[float, float], float]] = MappingProxyType(
    {"arith.addf": operator.add, "arith.subf": operator.sub, "arith.mulf": operator.mul} | dict.fromkeys(_MAXIMA, max)
)
#: Operations with a neutral number: with this number as one operand, the result is the other operand.
_LEFT_AS_IT_IS = MappingProxyType({"arith.addf": 0.0, "arith.mulf": 1.0} | dict.fromkeys(_MAXIMA, -math.inf))


class OtherFirstError(ProgramError):
    """Raised for a choice in a loop's first tile that the start values do not decide."""


class FirstTile:
    """The first iteration of a loop.

    ``starts``: the numbers with which its states begin, by their names in the loop; ``mask``: the condition that is
    true only in the first iteration.  Scores are assumed to be finite: -inf plus or minus one of them is -inf; a score
    minus itself, and a score times 0, is 0.
    """

    def __init__(self, operations: list[Op], starts: Mapping[str, float], mask: str) -> None:
        self._made = {r: o for o in operations for r in o.results}
        self._mask = mask
        self._known: dict[str, _Value] = dict(starts)

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two values are known to be equal in the first iteration."""
        return self._value(one) == self._value(other)

    def _value(self, name: str) -> _Value:
        if name not in self._known:
            op = self._made.get(name)
            self._known[name] = (name,) if op is None or len(op.results) > 1 or op.body else self._computed(op)
        return self._known[name]

    def _computed(self, op: Op) -> _Value:
        if op.name == "arith.constant":
            value, _, fmt = number_of(op)
            return float(value) if fmt in FORMATS else (op.name, value, op.type)
        if op.name == "arith.select" and op.operands[0] == self._mask:
            return self._value(op.operands[1])
        values = tuple(map(self._value, op.operands))
        numbers = [x for x in values if isinstance(x, float)]
        if op.name in _SHAPES and numbers:
            return numbers[0]
        if op.name == "arith.truncf" and numbers and numbers[0] in (0.0, -math.inf):
            return numbers[0]
        if op.name in ("math.exp", "math.exp2") and numbers == [-math.inf]:
            return 0.0
        if op.name in _OF_NUMBERS and len(numbers) == len(values):
            return _OF_NUMBERS[op.name](numbers[0], numbers[1])
        if -math.inf in (values if op.name == "arith.addf" else values[:1] if op.name == "arith.subf" else ()):
            return -math.inf
        if op.name == "arith.subf" and values[0] == values[1]:
            return 0.0
        if op.name == "arith.mulf" and 0.0 in numbers:
            return 0.0
        if values and (op.name, values[-1]) in (("arith.subf", 0.0), ("arith.divf", 1.0)):
            return values[0]
        if len(numbers) == 1 and numbers[0] == _LEFT_AS_IT_IS.get(op.name):
            return next(x for x in values if not isinstance(x, float))
        return (op.name, re.sub(r"%[\w#-]+", "", op.text), shape_of(op.type), *values)
