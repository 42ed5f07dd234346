"""Values that are 0 in rows that the masks of loads hide: programs that add them to a tensor add nothing there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.kernels.triton.ttir_text import Op

#: Operations whose result is 0 where any operand is 0, where all operands are 0, and where the first operand is 0.
_ANY, _ALL = ("arith.mulf",), ("arith.addf", "arith.subf", "arith.maxnumf", "arith.minnumf")
_FIRST = ("arith.divf", "arith.extf", "arith.truncf", "tt.fp_to_fp", "ttg.convert_layout", "arith.negf")
_SAME = ("tt.expand_dims", "tt.broadcast", "tt.splat")
_ZEROS = ("dense<0.000000e+00>", "constant 0.000000e+00")


@dataclass
class ZeroRows:
    """The values of a kernel that are 0 in hidden rows if all others are finite.

    ``made``: the operation that computes each value, also in loops; ``hides``: whether a load hides these rows by its
    mask.
    """

    made: Mapping[str, Op]
    hides: Callable[[Op], bool]
    #: The results so far; values of loops are assumed to be 0 until the end of their loop disproves it.
    known: dict[str, bool] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Return whether a value is 0 in hidden rows, or NaN where another one is infinite or NaN."""
        if name not in self.known:
            self.known[name] = self._is_zero(name)
        return self.known[name]

    def _is_zero(self, name: str) -> bool:
        if (op := self.made.get(name)) is None:
            return False
        if op.name == "arith.constant":
            return any(text in op.text for text in _ZEROS)
        if op.name == "tt.load":
            return len(op.operands) == 3 and self.hides(op) and self.has(op.operands[2])
        if op.name in _ANY:
            return any(map(self.has, op.operands))
        if op.name == "tt.dot":
            return self.has(op.operands[0]) and self.has(op.operands[2])
        if op.name == "tt.reduce" and [o.name for o in op.body if o.results] != ["arith.addf"]:
            return False
        if op.name in (*_FIRST, *_SAME, "tt.reduce"):
            return self.has(op.operands[0])
        return op.name in _ALL and all(map(self.has, op.operands))
