"""Integers of a block that float32 cannot represent: random integers by philox, and integers that wrap at the limits of
their type.

If all their operands are known at launch, they are computed in advance, element by element.
"""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from npusim.errors import ProgramError
from npusim.formats import cast as in_format
from npusim.formats import compare
from npusim.formats.whole import (
    WHOLE_OPERATIONS,
    bits_of_floats,
    floats_of_bits,
    whole_limits,
    whole_operation,
    without_sign,
    wrapped,
)
from npusim.kernels.triton.arithmetic import MASK, hidden_value
from npusim.kernels.triton.element_wise import computed_elements, elements_in
from npusim.kernels.triton.first_tile import OtherFirstError
from npusim.kernels.triton.integers import WrapsError, bits_of, values_of
from npusim.kernels.triton.known_tiles import known_tiles
from npusim.kernels.triton.loop_forms import is_mask_state
from npusim.kernels.triton.tensor_axes import IntegerTensor, MaskView
from npusim.kernels.triton.ttir_text import EXACT_BITS, EXACT_WIDE, FORMATS, WHOLE, Op, shape_of
from npusim.kernels.triton.values import (
    AXES,
    Affine,
    Condition,
    Elements,
    Floats,
    HeldState,
    Known,
    Listed,
    ListedMask,
    Number,
    ValueComparison,
    constant,
    literal,
    refuse_many,
)
from npusim.kernels.triton.whole_numbers import MOST_EXACT, WholeNumbers, of_integers, unread_integers

if TYPE_CHECKING:
    from npusim.kernels.triton.values import Integers

#: Number of bits of the widest integers of a tile.
EXACT = 32
#: Integers up to this one are exact in float64, from which they are rounded once.
_MOST_IN_FLOAT64 = 1 << 53


#: Operations whose result is one operand if the other operand is 0; for the first operation this has to be the second
#: operand.
_LEAVING_BY_0 = ("subi", "addi", "ori", "xori")
#: Operations that give integers or masks for floats.
_FROM_FLOATS = ("arith.cmpf", "arith.fptosi", "arith.fptoui", "tt.bitcast")


def _is_of_floats(op: Op) -> bool:
    """Return whether an operation gives integers, or a mask, for floats; for a bitcast this follows from its type."""
    is_bits = op.name != "tt.bitcast" or shape_of(op.text.partition(" : ")[2].split(" -> ")[0])[1] in FORMATS
    return op.name in _FROM_FLOATS and is_bits


class ExactIntegers(WholeNumbers, ABC):
    """Operations on integers of 32 bits that are values of tiles, exact at any magnitude."""

    def _tt_mulhiui(self, op: Op, a: Known, b: Known) -> None:
        """Read the upper halves of products of unsigned integers."""
        if isinstance(a, Affine) and isinstance(b, Affine) and not any(a.steps) and not any(b.steps):
            result = whole_operation("mulhiui", a.base, b.base, a.bits)
            self._set(op, Affine(result, a.steps, a.shape, bits=a.bits))
            return
        self._set(op, computed_elements(op, a, b))

    def _integer(self, op: Op, a: Known, b: Known) -> None:
        if any(isinstance(x, Floats) for x in (a, b)) and op.name != "tt.addptr" and not self._is_place(op, a, b):
            self._set_operation(op, a, b)
            return
        if op.name == "tt.addptr" and isinstance(b, Floats):
            raise op.fail("an address that the kernel computes from values is not supported; load it as an integer")
        try:
            super()._integer(op, a, b)
        except WrapsError:
            if op.name == "tt.addptr":
                raise
            self._set(op, computed_elements(op, a, b))

    def _is_place(self, op: Op, a: Known, b: Known) -> bool:
        """Return whether an operation adds a known integer to the index of a maximum."""
        one, other = (a, b) if isinstance(a, Floats) else (b, a)
        assert isinstance(one, Floats)
        return op.name == "arith.addi" and one.text in self._places and isinstance(other, Affine)

    def _set_operation(self, op: Op, a: Known, b: Known) -> None:
        """Write an operation of integers that the kernel computes, with the number of bits of their type."""
        name, bits = op.name.partition(".")[2], bits_of(op.type)
        if name not in WHOLE_OPERATIONS or bits > EXACT or bits == 1:
            why = f"{op.name} of integers of {bits} bits that are values of a tile is not supported"
            raise op.fail(
                f"{why}; allowed: sums, products, quotients, shifts, minima and maxima of at most {EXACT} bits"
            )
        one, other = (self._exact(op, x) for x in (a, b))
        text = f"integers({self.text(one)}, {self.text(other)}, '{name}.{bits}')"
        hidden = [hidden_value(x) for x in (one, other)]
        pad = None
        if all(x is not None and math.isfinite(x) for x in hidden):
            first, second = (np.array([int(x or 0)], np.int64) for x in hidden)
            pad = float(whole_operation(name, first, second, bits)[0])
        blocks = [x for x in (one, other) if isinstance(x, Floats)]
        held = self._held_of(name, one, other)
        result = Floats(text, self._joined(*blocks), EXACT_BITS, pad, held=held)
        self._bind(op, result)
        why = "an operation of integers that the kernel computes is timed as an addition (a comparison on GPUs)"
        if not any(n.endswith(why) for n in self.notes):
            self.notes.append(f"{op.line}: {why}")

    @staticmethod
    def _held_of(name: str, one: Floats | Number, other: Floats | Number) -> HeldState | None:
        """Return the state of a loop that an operation leaves as it is in elements that a mask hides, if there
        is one.
        """
        if name in _LEAVING_BY_0 and isinstance(one, Floats) and hidden_value(other) == 0:
            return one.held
        is_second = name in _LEAVING_BY_0[1:] and isinstance(other, Floats) and hidden_value(one) == 0
        return other.held if is_second and isinstance(other, Floats) else None

    def _exact(self, op: Op, x: Known) -> Floats | Number:
        """Return an integer as a value of a tile that is exact at any magnitude of 32 bits."""
        if isinstance(x, Floats) and x.fmt == EXACT_BITS:
            return x
        if isinstance(x, Floats) and x.fmt in WHOLE:
            x = x.wide or x
            text = f"{self.text(x)}.to({self.choices.fmt(EXACT_BITS)!r})"
            return Floats(text, x.axes, EXACT_BITS, x.pad)
        if isinstance(x, ValueComparison):
            raise op.fail(f"{op.name} on a mask that compares values is not supported; convert it with .to(tl.int32)")
        if isinstance(x, Affine) and x.is_uniform and not x.of:
            integer = int(x.base.flat[0])
            low, high = whole_limits(EXACT)
            if not low <= integer <= high:
                raise op.fail(f"{integer} is used together with integers of a tile; allowed: {low} to {high}")
            return Number(float(integer), literal(float(integer)), x.shape)
        if isinstance(x, Affine) and (number := self._of_loop(x)) is not None:
            return number
        if not isinstance(x, Affine | Listed | Elements | Condition | ListedMask) or self._is_pointer(x):
            raise op.fail(f"{op.name} of integers of a tile and of addresses is not supported")
        given = elements_in(op, self._as_loaded(op, x)[0] if isinstance(x, Affine | Listed) else x)
        return self._known_exactly(op, given)

    @staticmethod
    def _is_pointer(x: Known) -> bool:
        return (isinstance(x, Affine) and bool(x.of)) or (isinstance(x, Listed) and bool(x.rest.of))

    def _stored_integers(self, op: Op, x: Affine | Listed | ListedMask | Elements | Condition, of: str) -> Known:
        """Return integers that are known at launch, for a store; those of 64 bits are exact up to 2^53."""
        is_block = isinstance(x, Listed | Elements) or (isinstance(x, Affine) and not x.is_uniform)
        given = self._large(op, x) if is_block and isinstance(x, Affine | Listed | Elements) else None
        if given is None or given.bits <= EXACT or np.abs(given.values).max(initial=0) <= MOST_EXACT:
            return super()._stored_integers(op, x, of)
        is_signed = not self.arguments[of].fmt.startswith("uint")
        values = given.values if is_signed else without_sign(given.values, given.bits)
        if np.abs(values.astype(np.float64)).max() > _MOST_IN_FLOAT64:
            raise op.fail(f"{of}: storing integers of 64 bits beyond 2^53 is not supported")
        whole = Elements(values.astype(np.int64), given.bits, given.work, given.why)
        return self._in_tiles(op, whole, EXACT_WIDE)

    def _known_exactly(self, op: Op, given: Elements) -> Floats:
        """Return integers that are known at launch as a block that is read, exact at any magnitude."""
        low, high = whole_limits(EXACT)
        values = given.values
        refuse_many(op, values.size)
        if values.size and not low <= values.min() <= values.max() <= high:
            why = f"{values.min()} to {values.max()}, used together with integers of a tile"
            raise op.fail(f"{why}; allowed: {low} to {high}")
        return self._in_tiles(op, given, EXACT_BITS)

    def _in_tiles(self, op: Op, given: Elements, fmt: str) -> Floats:
        """Return known integers as a block that is read, in a loop as its tiles."""
        values, is_one = given.values, not given.shape
        if self._walk is not None:
            values = np.broadcast_to(values, (len(values), self._walk.most, *given.shape))
        result = self._known_block(op, self._unique("integers"), values[..., None] if is_one else values, fmt)
        return replace(result, axes=()) if is_one else result

    def _is_computed(self, loop: Op, name: str) -> bool:
        """Return whether a loop computes an integer from floats, or from a mask that compares floats."""
        result = set(self._made_of(name))
        return any(_is_of_floats(o) and result.intersection(o.results) for o in loop.body)

    def _is_exact_state(self, loop: Op, end: str) -> bool:
        """Return whether a loop carries an integer that operations of integers compute from floats."""
        states = zip(loop.operands[4::2], loop.body[-1].operands, strict=False)
        of_floats = {n for n, last in states if is_mask_state(n) and self._is_computed(loop, last)}
        result = set(self._made_of(end))
        for o in loop.body:
            if not result.intersection(o.results):
                continue
            is_further = bool(of_floats.intersection(o.operands))
            is_sum = o.name.partition(".")[2] in WHOLE_OPERATIONS or (o.name == "tt.reduce" and bool(of_integers(o)))
            if is_sum and is_further and bits_of(o.type) > 1:
                return True
            of_floats.update(o.results if is_further or _is_of_floats(o) else ())
        return False

    def _tt_bitcast(self, op: Op, x: Known) -> None:
        """Read the bits of floats as integers, and integers as the bits of floats; read other bits as the base class
        does.
        """
        of, to = (shape_of(t)[1] for t in op.text.partition(" : ")[2].split(" -> "))
        if of in FORMATS and to not in FORMATS and not of.startswith("f8") and of != "f64":
            self._set_bits(op, x, of)
        elif to in FORMATS and of not in FORMATS and to != "f64":
            self._set_floats(op, x, to)
        else:
            super()._tt_bitcast(op, x)

    def _set_bits(self, op: Op, x: Known, of: str) -> None:
        if isinstance(x, Number) and x.is_known:
            bits = int(bits_of_floats(np.array([x.value]), FORMATS[of], "float64")[0])
            self._set(op, constant(bits, x.shape, bits_of(op.type)))
            return
        if not isinstance(x, Floats):
            raise op.fail(f"reading the bits of a number of {of} that a loop computes is not supported")
        pad = None if x.pad is None else float(bits_of_floats(np.array([x.pad]), FORMATS[of], "float64")[0])
        text = f"bits({self.text(x)}, 'bits.{FORMATS[of]}', {self.choices.fmt(EXACT_BITS)!r})"
        self._bind(op, Floats(text, x.axes, EXACT_BITS, pad))

    def _set_floats(self, op: Op, x: Known, to: str) -> None:
        if isinstance(x, Affine) and x.is_uniform and not x.of:
            value = float(floats_of_bits(np.array([float(x.base.flat[0])]), FORMATS[to], "float64")[0])
            self._set(op, Number(value, literal(value), x.shape))
            return
        made = self._exact(op, x)
        if not isinstance(made, Floats):
            raise op.fail(f"reading a number that a loop computes as the bits of {to} is not supported")
        pad = None if made.pad is None else float(floats_of_bits(np.array([made.pad]), FORMATS[to], "float64")[0])
        text = f"bits({self.text(made)}, 'floats.{FORMATS[to]}', {self.choices.fmt(to)!r})"
        self._bind(op, Floats(text, made.axes, to, pad))

    def _arith_cmpi(self, op: Op, a: Known, b: Known) -> None:
        relation = op.text.split()[1].rstrip(",")
        integers = [x for x in (a, b) if isinstance(x, Floats)]
        is_exact = any(x.fmt == EXACT_BITS for x in integers) or (integers and relation.startswith("u"))
        if not is_exact:
            super()._arith_cmpi(op, a, b)
            return
        one, other = (self._exact(op, x) for x in (a, b))
        if relation.startswith("u"):
            bits = bits_of(op.text.rpartition(" : ")[2])
            one, other = (self._flipped(op, x, bits) for x in (one, other))
        known = [hidden_value(x) for x in (one, other)]
        word = f"o{relation[-2:]}" if relation != "ne" else "une"
        pad = None if None in known else float(compare(known[0] or 0.0, known[1] or 0.0, word, "float64"))
        blocks = [x for x in (one, other) if isinstance(x, Floats)]
        text = f"compare({self.text(one)}, {self.text(other)}, {word!r})"
        self._bind(op, Floats(text, self._joined(*blocks), MASK, pad))
        self._set(op, ValueComparison(cast("Floats", self.values[op.results[0]])))

    def _flipped(self, op: Op, x: Floats | Number, bits: int) -> Floats | Number:
        """Return integers with the other sign, so that the order of unsigned integers becomes that of the results."""
        low = whole_limits(bits)[0]
        if isinstance(x, Number):
            value = float(wrapped(np.array([int(x.value)], np.int64) ^ low, bits)[0])
            return replace(x, value=value, text=literal(value))
        pad = None if x.pad is None else float(wrapped(np.array([int(x.pad)], np.int64) ^ low, bits)[0])
        text = f"integers({self.text(x)}, {float(low)!r}, 'xori.{bits}')"
        return cast("Floats", self._named(op, replace(x, text=text, pad=pad)))

    def _resized(self, op: Op, x: Known) -> None:
        """Read an integer of a tile in a type with another number of bits: the last bits of a wider type, or the same
        number.
        """
        if not isinstance(x, Floats) or shape_of(op.type)[1] in FORMATS:
            super()._resized(op, x)
            return
        if x.fmt != EXACT_BITS:
            try:
                super()._resized(op, x)
            except ProgramError:
                if op.name == "arith.extsi":
                    raise
            else:
                return
        bits, before = bits_of(op.type), bits_of(op.text.partition(" : ")[2].partition(" to ")[0])
        result = self._exact(op, x)
        assert isinstance(result, Floats)
        if op.name == "arith.extui" and before >= EXACT:
            raise op.fail(f"extending unsigned integers of a tile from {before} to {bits} bits is not supported")
        if op.name == "arith.extui":
            self._set_operation(replace(op, name="arith.andi", type=f"i{EXACT}"), result, constant((1 << before) - 1))
        elif op.name == "arith.trunci" and bits == 1:
            self._set_operation(replace(op, name="arith.andi", type=f"i{EXACT}"), result, constant(1))
            low = cast("Floats", self.values[op.results[0]])
            self._set(op, ValueComparison(Floats(f"compare({self.text(low)}, 0.0, 'une')", low.axes, MASK, low.pad)))
        elif op.name == "arith.trunci" and bits < EXACT:
            self._set_operation(replace(op, name="arith.addi", type=f"i{bits}"), result, constant(0))
        else:
            self._set(op, result)

    _arith_extsi = _arith_extui = _arith_trunci = _arith_index_cast = _resized

    def _arith_select(self, op: Op, mask: Known, a: Known, b: Known) -> None:
        """Read a choice between integers of which the kernel computes at least one."""
        kind = shape_of(op.type.rpartition(", ")[2])[1]
        exact = [x for x in (a, b) if isinstance(x, Floats) and x.fmt in (EXACT_BITS, *WHOLE)]
        if kind in FORMATS or kind == MASK or not exact:
            super()._arith_select(op, mask, a, b)
            return
        if all(isinstance(x, Floats | Number) and x.fmt != EXACT_BITS for x in (a, b) if isinstance(x, Floats)) and (
            isinstance(mask, ValueComparison)
        ):
            super()._arith_select(op, mask, a, b)
            return
        a, b = (self._exact(op, x) for x in (a, b))
        super()._arith_select(replace(op, type=f"i1, {EXACT_BITS}"), mask, a, b)
        result = self.values[op.results[0]]
        self._set(op, replace(result, fmt=EXACT_BITS) if isinstance(result, Floats) else result)

    def _selected(self, op: Op, mask: Condition, a: Known, b: Floats | Number) -> None:
        """Write a choice by a mask of indices; if the first tile of a loop has other values, by a tile of data."""
        try:
            super()._selected(op, mask, a, b)
        except OtherFirstError:
            if not self.choices.way("knows_tiles"):
                raise
            if self.choices.of_code("fuses"):
                why = "compiled code may split off the first iteration and fuse other operations there"
                self.notes.append(f"{op.line}: {why}; last bits may differ")
            self._fixed_choice(op, mask, a, b)

    def _mask(self, op: Op, a: Floats, b: Number, mask: Condition | Elements) -> None:
        if self._walk is not None and len(mask.shape) == 1 and self.choices.way("knows_tiles"):
            self._fixed_choice(op, mask, a, b)
            return
        super()._mask(op, a, b, mask)

    def _other_choice(self, op: Op, mask: Condition | Elements, a: Known, b: Known) -> None:
        """Write a choice by a mask of indices; in a loop, tiles of data state which of the two values each
        element has.
        """
        is_known = isinstance(a, Floats | Number) and isinstance(b, Floats | Number)
        if self._walk is None or not is_known or not self.choices.way("knows_tiles"):
            super()._other_choice(op, mask, a, b)
            return
        values, kind = [x for x in (a, b) if isinstance(x, Floats)], shape_of(op.type.rpartition(", ")[2])[1]
        given = elements_in(op, mask).values
        whole = np.broadcast_to(given, (len(given), self._walk.most, *mask.shape))
        seen = self._known_block(op, self._unique("seen"), whole if mask.shape else whole[..., None], kind)
        seen = seen if mask.shape else replace(seen, axes=())  # one for each iteration
        one, other = hidden_value(a), hidden_value(b)
        text = f"where(compare({seen.text}, 0.0, 'une'), {self.text(a)}, {self.text(b)}"
        text += ")" if values else f", {self.choices.fmt(kind)!r})"
        states = {x.held for x in values}
        held = states.pop() if len(states) == 1 and len(values) > 1 else None  # both choices are the same state
        self._bind(op, Floats(text, self._joined(seen, *values), kind, one if one == other else None, held=held))

    def _by_value(self, op: Op, mask: ValueComparison, a: Known, b: Known) -> None:
        """Write a choice by a mask of values; in a loop the choice may be between known integers, which are tiles of
        data there.
        """
        kind = shape_of(op.type.rpartition(", ")[2])[1]
        if op.name == "arith.select" and kind in WHOLE and self._walk is not None:
            a, b = (self._as_value(op, x) if isinstance(x, Affine | Listed | Elements) else x for x in (a, b))
        super()._by_value(op, mask, a, b)

    def _without_sign(self, op: Op, of: str, x: Floats) -> Floats:
        """Return exact integers in the format of their tensor."""
        tensor = self.arguments[of]
        if x.fmt != EXACT_BITS or not isinstance(tensor, IntegerTensor):
            return super()._without_sign(op, of, x)
        bits = bits_of(self.function.parameters[of])
        if tensor.fmt.startswith("uint") and bits == EXACT:
            why = f"{of}: npusim shows integers of 2^31 and more as negative integers with the same bits"
            self.notes.extend([f"{op.line}: {why}"] if not any(n.endswith(why) for n in self.notes) else [])
            return x
        if tensor.fmt.startswith("uint"):
            if bits > EXACT // 2:
                allowed = "uint8, uint16, uint32"
                raise op.fail(f"{of}: storing computed values as {tensor.fmt} is not supported; allowed: {allowed}")
            text = (
                f"integers({self.text(x)}, {float((1 << bits) - 1)!r}, 'andi.{EXACT}').to({self.choices.fmt('i16')!r})"
            )
            pad = None if x.pad is None else float(int(x.pad) & ((1 << bits) - 1))
            return cast("Floats", self._named(op, replace(x, text=text, fmt="i16", pad=pad), "unsigned"))
        if bits == EXACT:
            return x
        kind = EXACT_WIDE if bits > EXACT else f"i{bits}"
        text = f"{self.text(x)}.to({self.choices.fmt(kind)!r})"
        return cast("Floats", self._named(op, replace(x, text=text, fmt=kind), "stored"))

    def _tt_reduce(self, op: Op, x: Known, *others: Known) -> None:
        """Read a sum or maximum of exact integers, which is the same in any order."""
        name = of_integers(op)
        if others or not isinstance(x, Floats) or not name or (x.fmt != EXACT_BITS and x.most):
            super()._tt_reduce(op, x, *others)
            return
        words = {"addi": "addf", "maxsi": "maxnumf", "minsi": "maxnumf"}
        if name not in words or bits_of(op.type) != EXACT:
            raise op.fail(f"a reduction by {op.body[0].name} of integers that are values of a tile is not supported")
        body = [replace(op.body[0], name=f"arith.{words[name]}"), *op.body[1:]]
        wide = self._named(op, self._exact(op, x))
        if name == "minsi":  # the maximum of the inverted bits, which have the opposite order
            wide = self._opposite(op, wide)
        super()._tt_reduce(replace(op, body=body), wide)
        result = self.values[op.results[0]]
        assert isinstance(result, Floats)
        result = replace(result, fmt=EXACT_BITS)
        self._set(op, self._opposite(op, result) if name == "minsi" else result)

    def _opposite(self, op: Op, x: Floats) -> Floats:
        """Return integers with all bits inverted."""
        pad = None if x.pad is None else float(~int(x.pad))
        text = f"integers({self.text(x)}, -1.0, 'xori.{EXACT}')"
        return cast("Floats", self._named(op, replace(x, text=text, pad=pad), "opposite"))

    def _arith_sitofp(self, op: Op, x: Known) -> None:
        if not self._set_rounded(op, x, is_signed=True):
            super()._arith_sitofp(op, x)

    def _arith_uitofp(self, op: Op, x: Known) -> None:
        if isinstance(x, Floats) and x.wide is None:
            self._set_without_sign(op, x)
            return
        if not self._set_rounded(op, x, is_signed=False):
            super()._arith_uitofp(op, x)

    def _set_without_sign(self, op: Op, x: Floats) -> None:
        """Convert integers of a tile to floats without their sign: the upper half times 2^16 and the lower, rounded
        once.
        """
        bits = bits_of(op.text.partition(" : ")[2].partition(" to ")[0])
        made = self._named(op, self._exact(op, x))
        high = f"integers({made.text}, 16.0, 'shrui.{bits}').to({self.choices.fmt('f32')!r})" if bits > 16 else ""
        low = f"integers({made.text}, {float((1 << min(16, bits)) - 1)!r}, 'andi.32').to({self.choices.fmt('f32')!r})"
        text = f"fma({high}, 65536.0, {low})" if high else low
        pad = None if made.pad is None else float(np.float32(without_sign(np.array([int(made.pad)]), bits)[0]))
        fmt = shape_of(op.type)[1]
        if fmt != "f32":
            raise op.fail(f"unsigned integers of a tile can be converted only to float32, not to {fmt}")
        self._bind(op, Floats(text, made.axes, fmt, pad))

    def _set_rounded(self, op: Op, x: Known, *, is_signed: bool) -> bool:
        """Replace integers of a block beyond 2^24 by the floats to which they are rounded; return whether there are
        any.
        """
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
        """Read known integers, or a mask, as data; for a loop's iterations, as tiles of a separate tensor."""
        if values.shape[1] == 1 or self._walk is None or axes is not None or like:
            return super()._known_block(op, name, values, fmt, axes, like)
        return self._known_tiles(op, name, values, fmt)

    def _known_tiles(self, op: Op, name: str, values: Integers, fmt: str) -> Floats:
        """Read a block's elements, (program, iteration, *axes), as tiles of a separate tensor."""
        assert self._walk is not None
        if not self.choices.way("knows_tiles"):
            raise unread_integers(op, is_in_loop=True)
        block = values.shape[2:]
        refuse_many(op, len(self.ids) * self._walk.most * int(np.prod(block)))
        whole = np.broadcast_to(values, (len(self.ids), self._walk.most, *block))
        is_along, called = self._goes_along(), f"known_{name}"
        walked = tuple(is_along and i == len(block) - 1 for i in range(len(block)))
        left = tuple(self._left_like(n, is_walked=each) for n, each in zip(block, walked, strict=True))
        visited = max(1, int(self._walk.counts.max()))
        tiles = known_tiles(called, self.ids, whole, left, is_along=is_along, visited=visited)
        if tiles is None:
            why = "indices as values of a tile in a loop are not supported if only some programs have them"
            raise op.fail(f"{why}, or along three axes")
        ones = (1,) * len(AXES)
        fmt_of = self.choices.fmt(fmt)
        self.arguments[called] = MaskView(called, ones, fmt_of, ones, sizes=tiles.sizes, by=tiles.by, holds=tiles.holds)
        before = self.values.pop(op.results[0], None)
        self._load(op, tiles.pointer, tiles.mask, None, fmt)
        result = self.values.pop(op.results[0])
        self.values |= {} if before is None else {op.results[0]: before}
        assert isinstance(result, Floats)
        why = "integers of a loop's tiles that are known at launch are treated as a tensor in memory"
        self.notes.append(f"{op.line}: {why}; the time includes loading it")
        return replace(result, pad=None, is_even=True)  # the number there is finite

    def _goes_along(self) -> bool:
        """Return whether the tiles that the loop loads follow one another along one of their axes."""
        assert self._walk is not None
        for load in (self.loads[n] for n in self._walk.loads):
            base, sides = load.pointer.base, zip(load.pointer.steps, load.pointer.shape, strict=True)
            if base.shape[1] > 1 and any(n > 1 and abs(base[0, 1] - base[0, 0]) == abs(s) * n for s, n in sides):
                return True
        return False

    def _left_like(self, size: int, *, is_walked: bool) -> Integers | None:
        """Return the number of elements that loads leave along an axis of a size, whether or not the loop goes along
        this axis.
        """
        for load in self.loads.values():
            for n, left in zip(load.pointer.shape, load.left, strict=True):
                is_moved = left.shape[1] > 1 and bool(np.any(left != left[:, :1]))
                if n == size and is_moved is is_walked and np.any(left < n):
                    return left
        return None

    def _as_block(self, op: Op, x: Affine, like: tuple[str | None, ...] = ()) -> Floats:
        """Return indices as a block of numbers that is read, or in a loop as tiles of a tensor; integers beyond 2^24
        are exact.
        """
        values = values_of(op, x)
        is_large = np.abs(values).max() > MOST_EXACT
        if not is_large and self._walk is None:
            return super()._as_block(op, x, like)
        if is_large and x.bits != 32:
            raise op.fail(f"integers beyond 2^24 as values of a tile must have 32 bits; these have {x.bits}")
        times = values if self._walk is None else np.broadcast_to(values, (len(values), self._walk.most, *x.shape))
        fmt = EXACT_BITS if is_large else f"i{x.bits}"
        return self._known_block(op, self._unique("indices"), times, fmt, like=like if self._walk is None else ())

    def _large(self, op: Op, x: Elements | Listed | Affine) -> Elements | None:
        """Return integers of a block that are known at launch if some of them are beyond 2^24; otherwise None.

        In a loop, also return integers of any size that are not linear.
        """
        if isinstance(x, Affine) and x.of:
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
        """Return integers, or a mask, that are known at launch as a block that is read; integers beyond 2^24 have 32
        bits.
        """
        given = self._large(op, x) if isinstance(x, Affine | Listed | Elements) else None
        is_bits = given is not None and given.bits == EXACT and not is_signed and np.any(given.values < 0)
        is_small = given is not None and np.abs(given.values).max(initial=0) <= MOST_EXACT and not is_bits
        if self._walk is not None and given is not None and is_small:
            values = given.values if is_signed else without_sign(given.values, given.bits).astype(np.int64)
            steady = np.broadcast_to(values, (len(values), self._walk.most, *given.shape))
            return self._known_block(
                op, self._unique("integers"), steady, f"i{max(given.bits, 8 if is_signed else 16)}"
            )
        if given is None or given.bits != EXACT:
            return super()._known_integers(op, x, is_signed=is_signed)
        return self._known_exactly(op, given)
