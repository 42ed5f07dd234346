"""Integers of a block that float32 does not have: random ones by philox, and those that wrap as their type has it.

Where all that they are computed from is known at launch they are computed outright, element by element.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from npusim.errors import ProgramError
from npusim.formats import cast as in_format
from npusim.kernels.triton.element_wise import computed_elements, elements_in
from npusim.kernels.triton.integers import WrapsError, high_bits_of, without_sign
from npusim.kernels.triton.tensor_axes import MaskView
from npusim.kernels.triton.ttir_text import EXACT_BITS, FORMATS, Op, shape_of
from npusim.kernels.triton.values import (
    AXES,
    Affine,
    Condition,
    Elements,
    Floats,
    Known,
    Listed,
    ListedMask,
    elements,
    one_hot,
    refuse_many,
)
from npusim.kernels.triton.whole_numbers import MOST_EXACT, WholeNumbers

if TYPE_CHECKING:
    from npusim.kernels.triton.values import Integers

#: Integers up to this one are exact in float64, from which they are rounded once.
_MOST_IN_FLOAT64 = 1 << 53


class ExactIntegers(WholeNumbers, ABC):
    """Operations on integers of 32 bits that are values of tiles, exact at any magnitude."""

    def _tt_mulhiui(self, op: Op, a: Known, b: Known) -> None:
        """Read the upper halves of products of integers without a sign."""
        if isinstance(a, Affine) and isinstance(b, Affine) and not any(a.steps) and not any(b.steps):
            made = high_bits_of(a.base, b.base, a.bits)
            self._set(op, Affine(made, a.steps, a.shape, bits=a.bits))
            return
        self._set(op, computed_elements(op, a, b))

    def _integer(self, op: Op, a: Known, b: Known) -> None:
        try:
            super()._integer(op, a, b)
        except WrapsError:
            if op.name == "tt.addptr":
                raise
            self._set(op, computed_elements(op, a, b))

    def _arith_sitofp(self, op: Op, x: Known) -> None:
        if not self._set_rounded(op, x, is_signed=True):
            super()._arith_sitofp(op, x)

    def _arith_uitofp(self, op: Op, x: Known) -> None:
        if not self._set_rounded(op, x, is_signed=False):
            super()._arith_uitofp(op, x)

    def _set_rounded(self, op: Op, x: Known, *, is_signed: bool) -> bool:
        """Set integers of a block beyond 2^24 as the floats that they are rounded to; return whether they are such."""
        if not isinstance(x, Elements | Listed | Affine) or (given := self._large(op, x)) is None:
            return False
        if self._walk is not None:
            steady = np.broadcast_to(given.values, (len(given.values), self._walk.most, *given.shape))
            given = Elements(steady, given.bits, given.work, given.why)
        values = given.values if is_signed else without_sign(given.values, given.bits)
        if np.abs(values.astype(np.float64)).max() > _MOST_IN_FLOAT64:
            raise op.fail("converting integers above 2^53 to floats is not supported")
        fmt = shape_of(op.type)[1]
        floats = values.astype(np.float64)
        rounded = floats if self.choices.is_exact else np.asarray(in_format(floats, FORMATS[fmt])).astype(np.float64)
        self._set(op, self._known_block(op, self._unique("converted"), cast("Integers", rounded), fmt))
        return True

    def _known_block(
        self,
        op: Op,
        name: str,
        values: Integers,
        fmt: str,
        axes: tuple[str | None, ...] | None = None,
        like: tuple[str | None, ...] = (),
    ) -> Floats:
        """Read known integers, or a mask, as data; those of a loop's iterations as tiles of a tensor of their own."""
        if values.shape[1] == 1 or self._walk is None or axes is not None or like:
            return super()._known_block(op, name, values, fmt, axes, like)
        return self._known_tiles(op, name, values, fmt)

    def _known_tiles(self, op: Op, name: str, values: Integers, fmt: str) -> Floats:
        """Read a block's elements, (program, iteration, *axes), as tiles of a tensor: one of rows by programs, and of
        columns by iterations.
        """
        assert self._walk is not None
        most, block = self._walk.most, values.shape[2:]
        grid = self.ids.max(0) + 1
        if len(self.ids) != np.prod(grid) or len(np.unique(self.ids, axis=0)) != len(self.ids) or len(block) > 2:
            why = "indices as values of a tile in a loop, of some programs alone or along three axes, are not supported"
            raise op.fail(why)
        refuse_many(op, len(self.ids) * most * int(np.prod(block)))
        whole = np.broadcast_to(values, (len(self.ids), most, *block))
        rows, columns = (1, *block)[-2:]
        in_grid = np.zeros((*grid[::-1], rows, most, columns), values.dtype)
        in_grid[tuple(self.ids[:, i] for i in (2, 1, 0))] = np.moveaxis(
            whole.reshape(len(self.ids), most, rows, columns), 1, 2
        )
        x, y, z = map(int, grid)
        width = most * columns
        sides = [(z, y * x * rows * width), (y, x * rows * width), (x * rows, width), (width, 1)]
        sides = [side for side in sides if side[0] > 1]
        ones, called = (1,) * len(AXES), f"known_{name}"
        own = MaskView(
            called,
            ones,
            self.choices.fmt(fmt),
            ones,
            sizes=tuple(n for n, _ in sides),
            by=tuple(step for _, step in sides),
            holds=in_grid.reshape(-1),
        )
        self.arguments[called] = own
        first = ((self.ids[:, 2] * y + self.ids[:, 1]) * x + self.ids[:, 0]) * rows * width
        base = first[:, None] + np.arange(most)[None] * columns
        steps = (width, 1)[-len(block) :]
        rules = tuple(
            ("slt", Affine(-left, one_hot(i, block), block))
            for i in range(len(block))
            if (left := self._left_like(block[i], is_walked=i == len(block) - 1)) is not None
        )
        before = self.values.pop(op.results[0], None)
        self._load(op, Affine(base, steps, block, called), Condition(rules) if rules else None, None, fmt)
        made = self.values.pop(op.results[0])
        self.values |= {} if before is None else {op.results[0]: before}
        assert isinstance(made, Floats)
        why = "integers of a loop's tiles that are known at launch are treated as a tensor in memory"
        self.notes.append(f"{op.line}: {why}; the time includes loading it")
        return replace(made, pad=None, is_even=True)  # whichever number it is there, it is finite

    def _left_like(self, size: int, *, is_walked: bool) -> Integers | None:
        """Return how many elements loads leave along an axis of a size, one that the loop goes along or not."""
        for load in self.loads.values():
            for n, left in zip(load.pointer.shape, load.left, strict=True):
                if n == size and (left.shape[1] > 1) is is_walked and np.any(left < n):
                    return left
        return None

    def _as_block(self, op: Op, x: Affine) -> Floats:
        """Return indices as a block of numbers that is read; in a loop as tiles of a tensor, beyond 2^24 exactly."""
        values = elements(op, x)
        is_large = np.abs(values).max() > MOST_EXACT
        if not is_large and self._walk is None:
            return super()._as_block(op, x)
        if is_large and x.bits != 32:
            raise op.fail("integers of a tile beyond 2^24 are supported with 32 bits alone")
        times = values if self._walk is None else np.broadcast_to(values, (len(values), self._walk.most, *x.shape))
        return self._known_block(op, self._unique("indices"), times, EXACT_BITS if is_large else f"i{x.bits}")

    def _large(self, op: Op, x: Elements | Listed | Affine) -> Elements | None:
        """Return integers of a block, known at launch, of which some are beyond 2^24; else None.

        In a loop those of any size that are not linear.
        """
        if isinstance(x, Affine) and (x.of or not x.shape):
            return None
        if isinstance(x, Listed) and x.rest.of:
            return None
        try:
            given = elements_in(op, self._as_loaded(op, x)[0] if isinstance(x, Affine | Listed) else x)
        except ProgramError:
            return None
        is_large = given.values.size and np.abs(given.values).max() > MOST_EXACT
        return given if is_large or (self._walk is not None and not isinstance(x, Affine)) else None

    def _known_integers(
        self, op: Op, x: Affine | Listed | ListedMask | Elements | Condition, *, is_signed: bool
    ) -> Floats:
        """Return integers, or a mask, that are known at launch as a block that is read; beyond 2^24 of 32 bits."""
        given = self._large(op, x) if isinstance(x, Affine | Listed | Elements) else None
        if self._walk is not None and given is not None and np.abs(given.values).max(initial=0) <= MOST_EXACT:
            values = given.values if is_signed else without_sign(given.values, given.bits).astype(np.int64)
            steady = np.broadcast_to(values, (len(values), self._walk.most, *given.shape))
            return self._known_block(
                op, self._unique("integers"), steady, f"i{max(given.bits, 8 if is_signed else 16)}"
            )
        if given is None or given.bits != 32 or not given.shape:
            return super()._known_integers(op, x, is_signed=is_signed)
        if not is_signed and np.any(given.values < 0):
            raise op.fail("storing integers of 2^31 and more, without a sign, is not supported; allowed: int32")
        refuse_many(op, given.values.size)
        return self._known_block(op, self._unique("integers"), given.values, EXACT_BITS)
