"""Operations on values of a kernel: integers and masks are evaluated, and floats are written as statements."""

from __future__ import annotations

import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import numpy as np

from npusim.errors import ProgramError
from npusim.formats import add, cast, combine_text, compare, div, div_full, folded, maximum, minimum, mul, sub
from npusim.formats.reductions import rows_order
from npusim.formats.scans import WARP
from npusim.kernels.triton import ROUNDED
from npusim.kernels.triton.blocks_as_rows import OF_SUMS
from npusim.kernels.triton.compiled_choices import UNKNOWN
from npusim.kernels.triton.element_wise import (
    chosen_elements,
    compared_elements,
    computed_elements,
    elements_in,
    or_elements,
    resized_elements,
)
from npusim.kernels.triton.first_tile import FirstTile, OtherFirstError
from npusim.kernels.triton.integers import (
    DIVISIONS,
    SHIFTS,
    NonlinearError,
    bits_of,
    compared,
    integers,
    positive,
    resized,
)
from npusim.kernels.triton.kernel_draft import Draft, KnownBlock, plain_name
from npusim.kernels.triton.listed import (
    as_condition,
    by_elements,
    chosen_by_table,
    compared_as_stairs,
    compared_by_table,
    inverted,
    joined_masks,
    listed_in_bits,
    lowest_bit,
    operated,
)
from npusim.kernels.triton.number_classes import OF_CLASSES
from npusim.kernels.triton.own_combines import MOST_ROWS, Functions, combined_text, is_exact
from npusim.kernels.triton.rolled_rows import REDUCTIONS
from npusim.kernels.triton.ttir_text import FORMATS, Op, shape_of
from npusim.kernels.triton.values import (
    RELATIONS,
    Affine,
    Booleans,
    Condition,
    Elements,
    Floats,
    HeldState,
    Identity,
    Integers,
    Known,
    Listed,
    ListedMask,
    Masking,
    Number,
    ValueComparison,
    affine,
    answers,
    bound_of,
    constant,
    elements,
    folded_inverse,
    lesser,
    literal,
    number_of,
    reshaped,
    truth,
)

#: Operations of two floats by TTIR's names; `tl.div_rn` is rounded once on every device.
BINARY = MappingProxyType(
    {"arith.addf": "+", "arith.subf": "-", "arith.mulf": "*", "arith.divf": "/", "tt.precise_divf": "/"}
    | {"arith.maxnumf": "maximum", "arith.maximumf": "maximum propagate"}
    | {"arith.minnumf": "minimum", "arith.minimumf": "minimum propagate"}
)
NUMBERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"+": add, "-": sub, "*": mul, "/": div, "maximum": maximum, "minimum": minimum}
    | {f"{f.__name__} propagate": partial(f, nan="propagate") for f in (maximum, minimum)}
)
#: How products of float32 are multiplied on GPUs by their ``input_precision``.
PRECISIONS: Mapping[str, str] = MappingProxyType(
    {
        "tf32": "factors of float32 are multiplied as TF32, without their low 13 bits",
        "ieee": (
            "products of float32 run in the lanes (fma, in order of k), not on a tensor core; the time leaves "
            "out loading their factors"
        ),
    }
)
#: Operations that combine masks.
_JOINED = MappingProxyType({"andi": "&", "ori": "|", "xori": "^"})
#: Format of masks of compared values, by TTIR's name.
MASK = "i1"
#: An exponent for which powers of 2 and of e are beyond float32, but not beyond float64.
_MOST_EXPONENT = 700.0


def _root(x: float) -> float:
    return math.sqrt(x) if x >= 0 else math.nan


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf if x == 0 else math.nan


def _inverse_root(x: float) -> float:
    return 1 / math.sqrt(x) if x > 0 else math.copysign(math.inf, x) if x == 0 else math.nan


def rounded_away(x: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the whole numbers nearest to values; halves are rounded away from zero."""
    return np.asarray(np.copysign(np.floor(np.abs(x) + 0.5), x))


def _power(x: float, base: float) -> float:
    """Return a power; infinity beyond the largest float64."""
    return float(np.power(base, x)) if x < _MOST_EXPONENT else math.inf


#: The text of each function for which `Choices` has no form, and the same function of a number.
UNARY: Mapping[str, tuple[str, Callable[[float], float]]] = MappingProxyType(
    {
        "math.exp2": ("exp({}, 'exp2.correct')", partial(_power, base=2.0)),
        "math.exp": ("exp({}, 'exp.correct')", partial(_power, base=math.e)),
        "math.log2": ("log({}, 'log2.correct')", lambda x: _log(x) / math.log(2)),
        "math.log": ("log({})", _log),
        "math.log1p": ("log({}, 'log1p.correct')", lambda x: math.log1p(x) if x > -1 else _log(1 + x)),
        "math.rsqrt": ("rsqrt({})", _inverse_root),
        "tt.precise_sqrt": ("sqrt({})", _root),
        "math.sqrt": ("sqrt({})", _root),
        "math.erf": ("erf({})", math.erf),
        "math.tanh": ("tanh({})", math.tanh),
        "math.absf": ("maximum({0}, -{0})", abs),
        "arith.negf": ("(-{})", lambda x: -x),
    }
)
#: Functions that round to whole numbers, in two forms: the text of the result for ``x``, where ``r`` is the whole
#: number nearest to ``x``; and a function of a number.  For ``x`` below 2^23, the sum with 2^23 is rounded to a whole
#: number, with ties to even.
TO_WHOLE: Mapping[str, tuple[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "math.ceil": ("where(compare({r}, {x}, 'olt'), {r} + 1.0, {r})", np.ceil),
        "math.floor": ("where(compare({r}, {x}, 'ogt'), {r} - 1.0, {r})", np.floor),
        "math.roundeven": ("{r}", np.rint),
        "math.round": (
            "where(compare(maximum({x} - {r}, {r} - {x}), 0.5, 'oeq'), "
            "where(compare({x}, 0.0, 'olt'), {x} - 0.5, {x} + 0.5), {r})",
            rounded_away,
        ),
        "npusim.trunc": (
            "where(compare({x}, 0.0, 'olt'), where(compare({r}, {x}, 'olt'), {r} + 1.0, {r}), "
            "where(compare({r}, {x}, 'ogt'), {r} - 1.0, {r}))",
            np.trunc,
        ),
    }
)
_WHOLE_FROM = 2.0**23
#: Minima, each with the maximum of the opposite values that replaces it.
_MINIMA: Mapping[str, str] = MappingProxyType({"arith.minnumf": "arith.maxnumf", "arith.minimumf": "arith.maximumf"})
#: Functions of the sign of a number. They do not round.
_OF_SIGN = ("math.absf", "arith.negf")
#: The same for functions of libdevice, by symbol; none of them has two operands.
LIBDEVICE: Mapping[str, str] = MappingProxyType(
    {"__nv_expf": "math.exp", "__nv_exp2f": "math.exp2", "__nv_logf": "math.log", "__nv_log2f": "math.log2"}
    | {
        "__nv_log1pf": "math.log1p",
        "__nv_rsqrtf": "math.rsqrt",
        "__nv_fabsf": "math.absf",
        "__nv_erff": "math.erf",
        "__nv_fsqrt_rn": "tt.precise_sqrt",
        "__nv_tanhf": "math.tanh",
        "__nv_fast_expf": "math.exp",
        "__nv_fast_logf": "math.log",
        "__nv_fast_log2f": "math.log2",
        "__nv_ceilf": "math.ceil",
        "__nv_floorf": "math.floor",
        "__nv_roundf": "math.round",
        "__nv_rintf": "math.roundeven",
        "__nv_nearbyintf": "math.roundeven",
    }
)
#: Functions that are an instruction of a GPU's special function unit whose bits have not been measured.
_LOG2_UNIT = ("__nv_fast_logf", "__nv_fast_log2f")
#: Largest number of brackets of one expression: Python reads about 200 nested brackets.
MOST_STEPS = 100
#: Beginning of the message that refuses a reduction down the rows of a block.
DOWN_ROWS = "a reduction along axis 0 is not supported here"
#: A number that hides a score to which it is added: it is so low that the weight becomes 0.
LOW = -1e4
#: Stand-ins for unknown numbers of a row: a result is known if two numbers for the first operand and two for the second
#: one all give it.  Both pairs are beyond any other number in a maximum or minimum, on either side.
_STAND_INS = ((0.7e30, -3.1e30), (1.9e30, -0.4e30))
#: Operands with which the result of an operation is the other operand.
_UNITS: Mapping[str, float] = MappingProxyType(
    {"+": 0.0, "-": 0.0, "*": 1.0, "/": 1.0, "maximum": -math.inf, "minimum": math.inf}
)


class Arithmetic(Draft, ABC):
    """Operations that access no memory: operations on integers, masks and axes, elementwise operations on floats,
    reductions and products.
    """

    @abstractmethod
    def _of_table(self, op: Op, x: ListedMask) -> ValueComparison:
        """Return a mask by a table as a mask that is loaded."""

    def _arith_constant(self, op: Op) -> None:
        value, shape, fmt = number_of(op)
        is_float = fmt in FORMATS
        self._set(op, Number(value, literal(value), shape) if is_float else constant(int(value), shape, bits_of(fmt)))

    def _tt_get_program_id(self, op: Op) -> None:
        self._set(op, Affine(self.ids[:, "xyz".index(op.text.split()[1])][:, None], bits=bits_of(op.type)))

    def _tt_get_num_programs(self, op: Op) -> None:
        self._set(op, constant(self.grid["xyz".index(op.text.split()[1])], bits=bits_of(op.type)))

    def _tt_make_range(self, op: Op) -> None:
        self._set(op, replace(constant(op.number("start"), shape_of(op.type)[0], bits_of(op.type)), steps=(1,)))

    def _tt_splat(self, op: Op, x: Known) -> None:
        shape = shape_of(op.type)[0]
        self._set(op, reshaped(x, shape, lambda _, none: (none,) * len(shape)))

    def _tt_expand_dims(self, op: Op, x: Known) -> None:
        at = op.number("axis")
        if isinstance(x, Floats) and len(x.axes) == 1 == at:
            self.down.add(x.axes[0])
        self._set(op, reshaped(x, shape_of(op.type)[0], lambda s, none: (*s[:at], none, *s[at:])))

    def _tt_broadcast(self, op: Op, x: Known) -> None:
        self._set(op, reshaped(x, shape_of(op.type)[0], lambda s, _: s))

    def _tt_trans(self, op: Op, x: Known) -> None:
        if not isinstance(x, Floats):
            raise op.fail("tl.trans of a block of integers is not supported; load the integers in the other order")
        self._set(op, replace(x, axes=x.axes[::-1], is_transposed=not x.is_transposed))

    def _tt_ptr_to_int(self, op: Op, pointer: Known) -> None:
        """Read an address that is only compared with 0: the address of an existing tensor is never 0."""
        readers = self._uses.get(op.results[0], [])
        others = [n for o in readers for n in o.operands if n != op.results[0]]
        is_asked = all(o.name == "arith.cmpi" and o.text.split()[1].rstrip(",") in ("eq", "ne") for o in readers)
        zeros = [x for x in map(self.values.get, others) if isinstance(x, Affine) and x.is_uniform and not x.base.any()]
        if not is_asked or len(zeros) < len(readers) or not isinstance(pointer, Affine):
            raise op.fail("an address as an integer may only be compared with 0, by == or !=")
        self._set(op, constant(1, pointer.shape))

    def _tt_addptr(self, op: Op, pointer: Affine, offset: Known) -> None:
        self._integer(op, pointer, offset)
        if isinstance(offset, Affine) and offset.overflow:
            self.notes.append(f"{offset.overflow}: an address of {pointer.of} is computed from it")

    def _tt_reshape(self, op: Op, x: Known) -> None:
        shape, before = shape_of(op.type)[0], shape_of(op.text.partition(" : ")[2].partition(" -> ")[0])[0]
        if [n for n in shape if n > 1] != [n for n in before if n > 1]:
            raise op.fail(
                f"a block of {_times(before)} cannot be reshaped to {_times(shape)}: except in blocks that npusim "
                "reads lane by lane, a reshape may only add or remove axes of size 1"
            )

        def how(axes: Any, none: Any) -> Any:
            left = [a for a, n in zip(axes, before, strict=True) if n > 1]
            return tuple(left.pop(0) if n > 1 else none for n in shape)

        self._set(op, reshaped(x, shape, how))

    def _condition(self, op: Op, x: Known) -> Condition:
        if isinstance(x, Affine):
            return compared(op, "ne", x, constant(0, x.shape))
        if isinstance(x, Elements):
            raise op.fail(f"{x.why}; such an integer can neither bound a loop nor decide a branch")
        if not isinstance(x, Condition):
            raise op.fail(
                "a mask, bound or branch depends on computed values; only comparisons of sizes and indices are read"
            )
        return x

    def _as_integers(self, x: Known) -> Known:
        """Return a condition that has one value for each block as 0 and 1; return any other value as it is."""
        if not isinstance(x, Condition):
            return x
        every, none = answers(x)
        if np.any(~every & ~none):
            return x
        shape = x.shape
        return Affine(every.astype(np.int64), (0,) * len(shape), shape, bits=1)

    def _integer(self, op: Op, a: Known, b: Known) -> None:
        name = op.name.partition(".")[2]
        # for single bits these operations are the same
        name = "andi" if name == "muli" and shape_of(op.type)[1] == MASK else name
        if any(isinstance(x, Elements) for x in (a, b)):
            self._set(op, computed_elements(op, a, b))
            return
        if any(isinstance(x, ValueComparison | ListedMask) for x in (a, b)):
            self._set(op, self._of_masks(op, name, a, b))
            return
        conditions = [x for x in (a, b) if isinstance(x, Condition)]
        are_two = (
            len(conditions) == 2 and name in ("andi", "ori") and (name == "andi" or any(map(_is_constant, conditions)))
        )
        if name in _JOINED and (are_two or not all(map(_is_decided, conditions))):
            self._set(op, _joined_conditions(name, self._condition(op, a), self._condition(op, b)))
            return
        a, b = self._as_integers(a), self._as_integers(b)
        if isinstance(a, Affine) and isinstance(b, Affine):
            self._refuse_undefined(op, a, b)
            self._set(op, self._linear_or_listed(op, a, b))
        elif isinstance(a, Affine | Listed) and isinstance(b, Affine | Listed):
            how, one, other = partial(operated, op, a, b, self._linear), a, b
            is_address = op.name == "tt.addptr"
            self._set(op, how() if is_address else or_elements(how, lambda: computed_elements(op, one, other)))
        elif op.name != "tt.addptr" and bits_of(op.type) > 1 and all(isinstance(x, Affine | Condition) for x in (a, b)):
            wide = [replace(elements_in(op, x), bits=bits_of(op.type)) for x in (a, b)]  # a mask as 0 and 1
            self._set(op, computed_elements(op, *wide))
        else:
            raise op.fail(f"{op.name} on a mask or on computed values is not supported; join masks with & | ^ ~")

    def _linear(self, op: Op, a: Affine, b: Affine) -> Affine:
        begins = op.name not in ("arith.remsi", "arith.remui") or not self.choices.way("lists_remainders")
        result, wraps = integers(op, a, b, begins=begins)
        return result if wraps is None else self._said_to_wrap(op, result, wraps)

    def _linear_or_listed(self, op: Op, a: Affine, b: Affine) -> Known:
        """Return the result of an operation of two integers: linear along a block's axes, a list along one axis, or all
        elements.
        """

        def linear() -> Affine | Listed:
            try:
                return self._linear(op, a, b)
            except NonlinearError as error:
                try:
                    return by_elements(op, a, b)
                except NonlinearError:
                    raise error from None
                except ProgramError as reason:  # a list is possible, but for example too long
                    raise NonlinearError(str(reason)) from None

        return linear() if a.of or b.of else or_elements(linear, lambda: computed_elements(op, a, b))

    def _of_tables(self, op: Op, name: str, a: Known, b: Known) -> ListedMask | Condition | None:
        """Return two masks joined by their table; None if their tables differ, or one is a mask of values.

        A mask that leaves a block's first rows becomes a comparison if it is joined with a mask of rows and columns.
        """
        if isinstance(a, ValueComparison) or isinstance(b, ValueComparison):
            return None
        one, other = (a, b) if isinstance(a, ListedMask) else (b, a)
        assert isinstance(one, ListedMask)
        is_opposite = name == "xori" and one.within is None and isinstance(other, Affine | Condition)
        if is_opposite and np.all(answers(self._condition(op, other))[0]):
            return inverted(one)
        if (
            name == "andi"
            and isinstance(other, Condition)
            and any(len(d.shape) - d.steps.count(0) > 1 for _, d in other.every)
        ):
            rows = as_condition(op, one, self.is_read(one.at.base.shape[1]))
            if rows is not None:
                return rows & other
        return joined_masks(op, name, one, other if isinstance(other, ListedMask) else self._condition(op, other))

    def _of_masks(self, op: Op, name: str, a: Known, b: Known) -> Known:
        """Return two masks joined; at least one of them is a mask of compared values, or a mask by a table."""
        if (result := self._of_tables(op, name, a, b)) is not None:
            return result
        a, b = (self._of_table(op, x) if isinstance(x, ListedMask) else x for x in (a, b))
        a, b = (a, b) if isinstance(a, ValueComparison) else (b, a)
        assert isinstance(a, ValueComparison)
        if name not in _JOINED:
            raise op.fail(f"{op.name} on a mask that compares values is not supported; join masks with & | ^ ~")
        is_plain = a.within is None or name == "andi"
        if isinstance(b, ValueComparison) and is_plain and (b.within is None or name == "andi"):
            text = f"({a.of.text} {_JOINED[name]} {b.of.text})"
            within = [w for w in (a.within, b.within) if w is not None]
            both = reduce(operator.and_, within) if within else None
            return ValueComparison(Floats(text, self._joined(a.of, b.of), MASK), both)
        other = None if isinstance(b, ValueComparison) else self._condition(op, b)
        every, none = answers(other) if other is not None else (np.zeros(1, bool),) * 2
        if other is not None and (np.all(every) or np.all(none)):
            if name == "xori" and np.all(every):
                return self._inverted(op, a)
            return other if name != "xori" and np.all(every) == (name == "ori") else a
        if other is not None and name == "andi":
            return replace(a, within=other & a.within if a.within else other)
        if other is not None and self._walk is None and a.within is None:
            seen = self._known_block(op, self._unique("seen"), elements_in(op, other).values, "f32", like=a.of.axes)
            text = f"({a.of.text} {_JOINED[name]} compare({seen.text}, 0.0, 'une'))"
            return ValueComparison(Floats(text, self._joined(a.of, seen), MASK))
        raise op.fail(
            f"{op.name} joins a mask that compares values with one that compares indices; only & is supported "
            "between these"
        )

    def _inverted(self, op: Op, x: ValueComparison) -> ValueComparison:
        if x.within is not None:
            raise op.fail(
                "~ of a mask that compares both values and indices is not supported; invert each part before you "
                "join them"
            )
        pad = None if x.of.pad is None else 1 - x.of.pad
        return ValueComparison(Floats(f"(~{x.of.text})", x.of.axes, MASK, pad))

    def _arith_cmpi(self, op: Op, a: Known, b: Known) -> None:
        relation = op.text.split()[1].rstrip(",")
        if any(isinstance(x, Elements) for x in (a, b)):
            self._set(op, compared_elements(op, relation, a, b))
            return
        if any(isinstance(x, ValueComparison | ListedMask) for x in (a, b)) and relation in ("eq", "ne"):
            differs = self._of_masks(op, "xori", a, b)
            if relation == "eq":
                differs = self._of_table(op, differs) if isinstance(differs, ListedMask) else differs
                differs = self._inverted(op, differs) if isinstance(differs, ValueComparison) else differs
            self._set(op, differs)
            return
        a, b = self._as_integers(a), self._as_integers(b)
        if isinstance(a, Affine | Listed) and isinstance(b, Affine | Listed) and Listed in (type(a), type(b)):
            if (stairs := compared_as_stairs(op, relation, a, b)) is not None:
                self._set(op, stairs)
                return
            how, pair = partial(compared_by_table, op, relation, a, b), (a, b)
            self._set(op, or_elements(how, lambda: compared_elements(op, relation, *self._as_loaded(op, *pair))))
            return
        if not isinstance(a, Affine) or not isinstance(b, Affine):
            raise op.fail("a comparison of masks, or of computed values, is not supported here")
        self._set(op, result := compared(op, relation, a, b))
        if self.choices.chooses_lanes and any(op.results[0] in self._made_of(n) for n in self._store_masks):
            self.stored_lanes |= {_lanes_of(r, d) for r, d in result.of if not np.ptp(d.base)}

    def _as_loaded(self, op: Op, *values: Affine | Listed) -> list[Affine | Listed]:
        """Return integers with 0 in place of those that the mask of their load hides without giving another number."""
        result = list[Affine | Listed]()
        for x in values:
            is_open = isinstance(x, Listed) and x.beyond is None and any(n is not None for n in x.at.limits())
            result.append(replace(x, beyond=0) if is_open and isinstance(x, Listed) else x)
            why = "integers that a mask without other=... hides are 0 here, as in compiled code for GPUs"
            self.notes += [f"{op.line}: {why}"] if is_open else []
        return result

    def _refuse_undefined(self, op: Op, a: Affine, b: Affine) -> None:
        """Raise `ProgramError` if a program divides by 0, or shifts by at least the number of bits of the type."""
        _, _, name = op.name.partition(".")
        if name not in (*DIVISIONS, *SHIFTS):
            return
        values = elements(op, b)
        is_wrong = values == 0 if name in DIVISIONS else (values < 0) | (values >= a.bits)
        is_wrong = is_wrong.any(tuple(range(2, is_wrong.ndim))) & self.is_read(is_wrong.shape[1])
        if np.any(is_wrong):
            number = int(np.flatnonzero(np.broadcast_to(is_wrong, (len(self.ids), is_wrong.shape[1])).any(1))[0])
            does = (
                "a division by 0"
                if name in DIVISIONS
                else f"a shift of an integer of {a.bits} bits by {a.bits} bits or more"
            )
            raise op.fail(f"{op.name}: {self.program(number)}: {does}, and the result is undefined")

    def _said_to_wrap(self, op: Op, x: Affine, wraps: Any) -> Affine:
        """Return integers; if one that a program reads exceeds its type, note the place at which it does."""
        wraps = np.broadcast_to(wraps & self.is_read(wraps.shape[1]), (len(self.ids), x.base.shape[1]))
        if not np.any(wraps):
            return x
        number = int(np.flatnonzero(wraps.any(1))[0])
        why = f"{op.line}: {op.name}: a signed integer of {x.bits} bits overflows in {self.program(number)}"
        return replace(x, overflow=f"{why} and wraps")

    def _resized(self, op: Op, x: Known) -> None:
        """Read an integer in a type with another number of bits; a condition is 0 or 1, in a type with a sign 0
        or -1.
        """
        bits, is_signed, x = bits_of(op.type), op.name == "arith.extsi", self._as_integers(x)
        if isinstance(x, Affine) and not x.of:
            self._set(op, resized(op, x, bits, is_signed=is_signed))
        elif isinstance(x, Listed) and bits == 1:
            self._set(op, lowest_bit(op, x))
        elif isinstance(x, Listed):
            self._set(op, listed_in_bits(op, x, bits, is_signed=is_signed))
        elif isinstance(x, ListedMask) and op.name == "arith.extui" and x.within is None:
            beyond = None if x.beyond is None else int(x.beyond)
            rest = constant(0, x.shape, bits)
            self._set(op, Listed(rest, x.holds.astype(np.int64), x.at, beyond))
        elif isinstance(x, Elements):
            self._set(op, resized_elements(op, x, bits, is_signed=is_signed))
        elif isinstance(x, Condition) and op.name == "arith.extui":
            self._set(op, x)
        else:
            raise op.fail(
                f"{op.name} of a mask that differs between elements of a block, or of computed values, is not "
                "supported; use tl.where"
            )

    _arith_extsi = _arith_extui = _arith_trunci = _arith_index_cast = _resized

    def _tt_bitcast(self, op: Op, x: Known) -> None:
        """Read the bits of a value as another type: bool is read as integers of 8 bits, as Triton stores it, and FP8 as
        the bytes that are stored.
        """
        of, to = (shape_of(t)[1] for t in op.text.partition(" : ")[2].split(" -> "))
        is_stored = all(o.name == "tt.store" for o in self._uses.get(op.results[0], []))
        if of != to and {of, to} != {"i1", "i8"} and not (of.startswith("f8") and to == "i8" and is_stored):
            raise op.fail(
                f"reading the bits of {of} as {to} (bitcast) is not supported; convert the value with .to(...)"
            )
        self._set(op, x)

    # ---------------------------------------------------------------- floats

    def _bind(self, op: Op, x: Floats, called: str = "") -> None:
        """Bind a value to a name: ``called`` or the user's. A single step of one of the user's expressions remains part
        of that expression.
        """
        readers, fused = self._uses.get(op.results[0], []), self._fused(op) if x.factors else []
        is_step = len(readers) == 1 and bool(readers[0].results) and readers[0].name not in ("scf.for", "tt.dot")
        is_step = is_step and plain_name(readers[0].results[0]) == plain_name(op.results[0]) and op.name != "tt.reduce"
        is_step = is_step and x.text.count("(") < MOST_STEPS
        self._set(op, x if is_step or (fused and all(fused)) else self._named(op, x, called or op.results[0]))

    def _binary(self, op: Op, how: str) -> None:
        a, b = (self.values[n] for n in op.operands[:2])
        if isinstance(a, Number) and isinstance(b, Number):
            self._set(op, _number(op, how, a, b))
            return
        if how == "+" and any(isinstance(x, Masking) for x in (a, b)):
            self._added(op, *((a, b) if isinstance(b, Masking) else (b, a)))
            return
        is_inverted = how == "/" and self._is_inverted(op, b)
        if (how == "*" and self._fused(op)) or is_inverted:
            a, b = self._named(op, a), self._named(op, b)
        blocks = [x for x in (a, b) if isinstance(x, Floats)]
        if not blocks or not all(isinstance(x, Floats | Number) for x in (a, b)):
            raise op.fail(f"{op.name} of a float that was computed from integers is not supported")
        pad, held = _combined_hidden(how, a, b)
        factors = (self.text(a), self.text(b)) if how == "*" else None
        factors = (self._inverse(op, b), self.text(a)) if is_inverted else factors
        is_maximum = how.startswith("maximum")
        is_low = is_maximum and any(_pad(x, 0.0) == -math.inf and _is_alike(y) for x, y in ((a, b), (b, a)))
        axes, place = self._joined(*blocks), op.place if factors else ""
        if len(axes) == 2 and axes[0] and pad != _combined_hidden(how, *map(_as_column, (a, b)))[0]:
            self.hidden.unlike_rows.add(axes[0])
        text = self._combined(op, how, a, b)
        is_seen = all(x.is_seen or _is_alike(x) for x in blocks)
        is_even = pad is None and how != "/" and all(map(_is_one_number, (a, b)))
        result = Floats(text, axes, blocks[0].fmt, pad, factors=factors, place=place, is_low=is_low)
        self._bind(op, replace(result, held=held, is_seen=is_seen, is_even=is_even))

    def _is_inverted(self, op: Op, divisor: Known) -> bool:
        """Return whether compiled code multiplies by an inverse in place of a division, and only additions contract the
        product.

        ptxas makes a product of such a division. It contracts this product like others, but not if another operation
        also reads it.
        """
        form, fused = self.choices.form(op.name, shape_of(op.type)[1], ""), self._fused(op)
        lines = {f"{PurePath(x.line.file).name}:{x.line.number}" for x in self._readers(op)}
        is_known = not isinstance(divisor, Number) or divisor.is_known
        return bool(form and fused and all(fused) and is_known and lines.issubset(self.choices.of_code("further")))

    def _constant_inverse(self, op: Op, divisor: Known) -> float:
        """Return the inverse, rounded once, by which ptxas multiplies in place of a division by a constant; 0 if it
        divides.

        It divides if the divisor is known only at the launch, or if the inverse needs a scale.
        """
        if not isinstance(divisor, Number) or not divisor.is_known or op.operands[1] not in self._literals:
            return 0.0
        return folded_inverse(divisor.value)

    def _inverse(self, op: Op, divisor: Known) -> str:
        """Return the inverse of a divisor; the divisor has a name or is a number."""
        if isinstance(divisor, Number):
            return literal(self._constant_inverse(op, divisor) or float(div_full(1.0, divisor.value)))
        return self.choices.form(op.name, shape_of(op.type)[1], "").format("1.0", self.text(divisor))

    def _math_fma(self, op: Op, a: Known, b: Known, c: Known) -> None:
        """Write a product and a sum that are rounded once together."""
        blocks = [x for x in (a, b, c) if isinstance(x, Floats)]
        if not blocks or not all(isinstance(x, Floats | Number) for x in (a, b, c)):
            raise op.fail("tl.fma supports blocks of floats and numbers only")
        text = f"fma({', '.join(map(self.text, (a, b, c)))})"
        self._bind(op, Floats(text, self._joined(*blocks), blocks[0].fmt))

    def _tt_clampf(self, op: Op, x: Known, low: Known, high: Known) -> None:
        nan = " propagate" if "propagateNan = all" in op.text else ""
        if isinstance(x, Number) and isinstance(low, Number) and isinstance(high, Number):
            self._set(op, _number(op, f"minimum{nan}", _number(op, f"maximum{nan}", x, low), high))
            return
        if not isinstance(x, Floats) or not all(isinstance(y, Floats | Number) for y in (low, high)):
            raise op.fail("tl.clamp supports a block of floats only")
        ends = (f"maximum{nan}", low), (f"minimum{nan}", high)
        is_even = isinstance(low, Number) and isinstance(high, Number) and low.value == -high.value
        if is_even and self.choices.clamps_by_magnitude and x.fmt == "f32":
            ends = ends[::-1]  # min.xorsign.abs, the smaller magnitude: for NaN it is the upper end
        text = self.text(x)
        for how, end in ends:
            text = _written(how, text, self.text(end))
        axes = self._joined(x, *(y for y in (low, high) if isinstance(y, Floats)))
        self._bind(op, Floats(text, axes, x.fmt))

    def _arith_cmpf(self, op: Op, a: Known, b: Known) -> None:
        """Write a comparison, which gives a mask; a comparison of two numbers is known."""
        relation = op.text.split()[1].rstrip(",")
        if relation in ("true", "false"):
            self._set(op, constant(relation == "true", shape_of(op.type)[0]))
            return
        if isinstance(a, Number) and isinstance(b, Number) and a.is_known and b.is_known:
            self._set(op, constant(int(compare(a.value, b.value, relation, "float64")), a.shape))
            return
        blocks = [x for x in (a, b) if isinstance(x, Floats)]
        if not blocks or not all(isinstance(x, Floats | Number) for x in (a, b)):
            raise op.fail("a comparison needs a block of floats on one side, and a block or a number on the other")
        one, other = hidden_value(a), hidden_value(b)
        pad = None if one is None or other is None else float(compare(one, other, relation, "float64"))
        text = f"compare({self.text(a)}, {self.text(b)}, {relation!r})"
        self._bind(op, Floats(text, self._joined(*blocks), MASK, pad))
        self._set(op, ValueComparison(self.values[op.results[0]]))  # type: ignore[arg-type]

    def _by_value(self, op: Op, mask: ValueComparison, a: Known, b: Known) -> None:
        """Write a choice between two values by a mask of values."""
        blocks = [x for x in (a, b) if isinstance(x, Floats)]
        if not all(isinstance(x, Floats | Number) for x in (a, b)):
            raise op.fail("a tl.where whose mask compares values may choose only between floats")
        fmt = shape_of(op.type.rpartition(", ")[2])[1]
        text = f"where({mask.of.text}, {self.text(a)}, {self.text(b)}"
        text += ")" if blocks else f", {self.choices.fmt(fmt)!r})"
        kept, other, chosen = hidden_value(a), hidden_value(b), hidden_value(mask.of)
        pad = (kept if kept == other else None) if chosen is None else kept if chosen else other
        states = {x.held for x in (a, b) if isinstance(x, Floats)}
        held = states.pop() if len(states) == 1 and len(blocks) > 1 else None  # both choices are the same state
        result = Floats(text, self._joined(mask.of, *blocks), fmt, pad, held=held)
        if mask.within is None:
            self._bind(op, result)
        elif isinstance(b, Number):
            self._selected(op, mask.within, result, b)
        else:
            raise op.fail(
                "tl.where has a mask that compares both values and indices; its third argument must then be a number"
            )

    def _fused(self, op: Op) -> list[bool]:
        """Return, for each reader of a product, whether it is an addition that contracts the product; empty without
        fusion.
        """
        fuses = [
            (reader.name in ("arith.addf", "arith.subf") and not self._is_rounded(reader))
            or (reader.name == "tt.reduce" and self._sums_products(reader, op.place))
            for reader in (self._readers(op) if self.choices.of_code("fuses") else ())
        ]
        return fuses if any(fuses) else []

    def _is_rounded(self, addition: Op) -> bool:
        """Return whether compiled code contracts none of the products of an addition."""
        return bool(self.choices.of_code("addends").get(addition.place) == ROUNDED)

    def _readers(self, op: Op) -> list[Op]:
        """Return the operations that read a result, also as a part of a larger block."""
        found, waiting = list[Op](), list(self._uses.get(op.results[0], []))
        while waiting:
            reader = waiting.pop()
            # nothing is added, so that nothing is rounded
            is_same = reader.name == "tt.reduce" and _reduced_length(reader) == 1
            if is_same or reader.name in ("tt.expand_dims", "tt.broadcast", "tt.splat"):
                waiting += self._uses.get(reader.results[0], [])
            else:
                found.append(reader)
        return found

    def _combined(self, op: Op, how: str, a: Known, b: Known) -> str:
        """Return the text of an operation; an addition contracts the product that the addition of the compiled code
        contracts, by default the first.
        """
        ways, stays = [(a, b, ", 'minus'"), (b, a, ", 'from'")], self.choices.of_code("addends").get(op.place)
        # Two equal products may be one in compiled code. In this case the first product is contracted; its place may be
        # that of either product.
        are_equal = isinstance(a, Floats) and isinstance(b, Floats) and _have_same_factors(a, b)
        if stays and isinstance(a, Floats) and a.place == stays and not are_equal:
            ways.reverse()
        is_contracted = how in "+-" and bool(self.choices.of_code("fuses")) and stays != ROUNDED
        for one, other, form in ways if is_contracted else ():
            if isinstance(one, Floats) and one.factors and (one.fmt in ("f32", "f16") or stays is not None):
                return f"fma({', '.join(one.factors)}, {self.text(other)}{form if how == '-' else ''})"
        if how == "/" and (form := self.choices.form(op.name, shape_of(op.type)[1], "")):
            if inverse := self._constant_inverse(op, b):
                return _written("*", self.text(a), literal(inverse))
            return form.format(self.text(a), self.text(b))
        return _written(how, self.text(a), self.text(b))

    def _cast(self, op: Op, x: Known) -> None:
        fmt = shape_of(op.type)[1]
        if "rounding = rtz" in op.text:
            raise op.fail('fp_downcast_rounding="rtz" is not supported; npusim rounds to nearest even ("rtne")')
        if isinstance(x, Number):
            value = _rounded(x.value, fmt)
            self._set(op, replace(x, value=value, text=literal(value) if x.is_known and value != x.value else x.text))
            return
        if isinstance(x, Identity):
            self._set(op, x)
            return
        if not isinstance(x, Floats):
            raise op.fail(f"{op.name} supports floats only")
        if x.narrow is not None and x.narrow.fmt == fmt:
            self._set(op, x.narrow)
            return
        how = ", overflow='saturate'" if fmt.startswith("f8") and not self.choices.is_exact else ""
        is_factor = any(o.name == "tt.dot" for o in self._uses.get(op.results[0], []))  # a factor of a product: P for p
        called = x.text.upper() if is_factor and x.text.isidentifier() else ""
        pad = x.pad if x.pad is None or math.isnan(x.pad) or fmt not in FORMATS else _rounded(x.pad, fmt)
        text = f"{self.text(x)}.to({self.choices.fmt(fmt)!r}{how})"
        self._bind(op, Floats(text, x.axes, fmt, pad, is_seen=x.is_seen, is_even=x.is_even), called)

    _arith_truncf = _arith_extf = _tt_fp_to_fp = _cast

    def _function(self, op: Op, x: Known, name: str, symbol: str = "") -> None:
        """Read a function of `UNARY`; ``symbol``: the function's name in a library, which may have another form."""
        text, of_pad = UNARY[name]
        if isinstance(x, Number) and x.is_known and op.name in _OF_SIGN:
            self._set(op, replace(x, value=(value := of_pad(x.value)), text=literal(value)))
            return
        if isinstance(x, Number) and x.is_known:  # a single element that the device computes
            fmt = shape_of(op.type)[1]
            x = Floats(f"filled('@', {x.text}, {self.choices.fmt(fmt)!r})", (None,) * len(x.shape), fmt)
        if not isinstance(x, Floats):
            raise op.fail(f"{op.name} of a single number is not supported; compute it before the launch")
        text = self.choices.form(symbol or name, x.fmt, self.choices.form(name, x.fmt, text))
        pad = None if x.pad is None or (math.isinf(x.pad) and not text.startswith("exp")) else x.pad
        pad = pad if pad is None or math.isnan(pad) else of_pad(pad)
        if pad not in (None, 0.0, 1.0) and math.isfinite(pad) and op.name not in _OF_SIGN:
            pad = None  # a device's function may have another last bit
        is_low = op.name == "math.absf" and pad == 0
        self._bind(op, Floats(text.format(self.text(x)), x.axes, x.fmt, pad, is_low=is_low, is_seen=x.is_seen))

    def _tt_extern_elementwise(self, op: Op, *x: Known) -> None:
        symbol = re.findall(r'symbol = "(\w*)"', op.text)[0]
        if symbol in _LOG2_UNIT and self.choices.forms.get(symbol):
            why = "only the error of lg2.approx is documented; npusim computes a correctly rounded logarithm"
            self.notes.append(f"{op.line}: {why}")
        if LIBDEVICE.get(symbol) == "math.log1p":
            self.notes.append(f"{op.line}: log1p: the time is that of a logarithm, which has fewer instructions")
        if symbol not in LIBDEVICE:
            allowed = ", ".join(sorted((*LIBDEVICE, *OF_CLASSES)))
            raise op.fail(f"the libdevice function {symbol} is not supported; allowed: {allowed}")
        if (name := LIBDEVICE[symbol]) in TO_WHOLE:
            self._to_whole(op, x[0], name)
            return
        self._function(op, x[0], name, symbol)

    def _math_ceil(self, op: Op, x: Known) -> None:
        self._to_whole(op, x, op.name)

    _math_floor = _math_roundeven = _math_round = _math_ceil

    def _to_whole(self, op: Op, x: Known, name: str) -> None:
        """Write a function that rounds a value to a whole number, by sums and comparisons."""
        text, function = TO_WHOLE[name]
        if isinstance(x, Number) and x.is_known:
            self._set(op, replace(x, value=(value := float(function(x.value))), text=literal(value)))
            return
        if not isinstance(x, Floats) or x.fmt not in ("f32", "f64"):
            raise op.fail(f"{name} supports a block of float32 only")
        pad = None if x.pad is None else float(function(x.pad)) if math.isfinite(x.pad) else x.pad
        self.notes.append(
            f"{op.line}: {name.partition('.')[2]}: the time is that of the additions and comparisons "
            "that npusim uses for its bits"
        )
        x = self._named(op, x)
        assert isinstance(x, Floats)
        plain = replace(x, pad=None, factors=None, narrow=None, is_low=False)

        def named(text: str, called: str) -> str:
            return str(self._named(op, replace(plain, text=text), called).text)

        size = named(f"maximum({x.text}, -{x.text})", "size")
        if flushed := self.choices.form(name, x.fmt, ""):
            x = replace(x, text=named(flushed.format(x=x.text, size=size), "flushed"))
        whole = f"(({size} + {_WHOLE_FROM!r}) - {_WHOLE_FROM!r})"
        near = named(f"where(compare({x.text}, 0.0, 'olt'), {whole} * -1.0, {whole})", "near")
        made = named(text.format(x=x.text, r=near), "whole")
        zero = f"where(compare({made}, 0.0, 'oeq'), {x.text} * 0.0, {made})"  # with the sign of x
        text = f"where(compare({size}, {_WHOLE_FROM!r}, 'olt'), {zero}, {x.text})"
        self._bind(op, replace(plain, text=text, pad=pad))

    def _arith_uitofp(self, op: Op, x: Known) -> None:
        x = self._of_table(op, x) if isinstance(x, ListedMask) else x
        if isinstance(x, ValueComparison):
            self._by_value(op, x, Number(1.0, "1.0"), Number(0.0, "0.0"))
            return
        x = self._as_integers(x)
        if isinstance(x, Elements | Condition) and self._walk is None:  # a mask of a block as 0 and 1
            of = elements_in(op, x)
            if of.bits == 1:
                self._set(op, self._known_block(op, self._unique("holds"), of.values, shape_of(op.type)[1]))
                return
        if isinstance(x, Condition):  # in a loop: ones, of which the mask hides some
            shape, fmt = shape_of(op.type)
            ones = self._spread(Floats("1.0", (None,) * len(shape), fmt), shape)
            self._arith_select(op, x, replace(ones, pad=1.0), Number(0.0, "0.0", shape))
            return
        if not isinstance(x, Affine) or (result := positive(x)) is None:
            raise op.fail("converting a mask or computed values to floats as unsigned integers is not supported")
        self._arith_sitofp(op, result)

    def _arith_sitofp(self, op: Op, x: Known) -> None:
        if not isinstance(x, Affine) or any(x.steps):
            raise op.fail("converting the indices of a block (tl.arange) to floats is not supported here")
        times = np.arange(x.base.shape[1])[None]
        if self._walk and x.base.shape[1] > 1 and np.array_equal(np.broadcast_to(times, x.base.shape), x.base):
            walked = next(n.name for n in self.loads.values() if n.is_walked)
            self._set(op, Number(math.nan, f"{walked}.index", is_known=False))
            return
        if np.ptp(x.base):
            in_loop = (
                " or that comes from a loop that does not count from 0 in steps of 1" if x.base.shape[1] > 1 else ""
            )
            raise op.fail(f"converting to float an index that differs between programs{in_loop} is not supported")
        value = _rounded(float(x.base.flat[0]), shape_of(op.type)[1])
        self._set(op, Number(value, literal(value)))

    def _tt_reduce(self, op: Op, x: Known, *others: Known) -> None:
        inner = [o.name for o in op.body]
        known = inner[0] in (*REDUCTIONS, *_MINIMA) and len(inner) == 2
        if others or (not known and isinstance(x, Floats)):
            self._by_function(op, (x, *others), "folded")
            return
        if inner[:1] and inner[0] in _MINIMA and len(inner) == 2 and isinstance(x, Floats):
            self._least(op, x)
            return
        kind, neutral, nan = REDUCTIONS.get(inner[0] if inner else "", ("", 0.0, ""))
        if len(inner) == 2 and isinstance(x, Number) and x.shape:
            self._of_one_number(op, x, is_sum=kind == "sum", is_extremum=kind == "max" or inner[0] in _MINIMA)
            return
        if not kind or len(inner) != 2 or not isinstance(x, Floats):
            raise op.fail("only tl.sum, tl.max and tl.min of floats are supported as reductions")
        axis = x.axes[at := op.number("axis")]
        is_down = axis is not None and (at != len(x.axes) - 1 or (bool(self.choices.turns) and self._is_of_rows(x)))
        if is_down and not self.choices.turns:
            raise op.fail(f"{DOWN_ROWS}, only along the last axis; transpose the loaded block")
        beside = x.pad if is_down and (kind == "max" or x.pad == 0.0) else None  # of columns that a mask hides
        if is_down and self._has_unlike_rows(axis):
            x = replace(x, pad=None)
        self._refuse_anew(op, axis)
        self._check_hidden(op, x, kind, neutral)
        floor = self._hidden_maximum(x, axis) if kind == "max" else None
        if axis is None:
            length = _reduced_length(op)
            if length > 1 and kind == "sum":
                raise op.fail(
                    "tl.sum runs along an axis whose elements are all equal; multiply the value by the length instead"
                )
            factors = x.factors if length == 1 else None
            self._set(op, replace(x, axes=(*x.axes[:at], *x.axes[at + 1 :]), factors=factors))
            return
        if is_down:
            self.goes_down.append((axis, op.line))
        else:
            self._leave_rows(op, axis, x.axes[:-1])
            self._note_reduced(op, x.axes)
        how, down = self._order(op) if kind == "sum" else nan, "down=True" if is_down else ""
        text = f"{self.text(x)}.{kind}({', '.join(filter(None, (how and repr(how), down)))})"
        if x.factors and self._sums_products(op, x.place):
            one, other = x.factors if x.factors[0].isidentifier() else reversed(x.factors)
            text = f"{one}.sum({', '.join(filter(None, (repr(how), f'times={other}', down)))})"
            self._note_halves(op, how)
        elif self._sums_products(op, x.place):
            why = "compiled code fuses the products of this sum with its additions (fma), so its bits differ"
            self.notes.append(f"{op.line}: {why}: here each product is rounded before it is added")
        text = text if floor is None else _written(f"maximum {nan}".strip(), text, literal(floor))  # of hidden lanes
        self._bind(op, Floats(text, (*x.axes[:at], *x.axes[at + 1 :]), x.fmt, beside))

    def _is_of_rows(self, x: Floats) -> bool:
        """Return whether a vector has an element for each row of a block, as the result of a reduction along the block
        has.
        """
        return len(x.axes) == 1 and self.root(x.axes[0]) in map(self.root, self.left)

    def _note_halves(self, op: Op, order: str) -> None:
        """Note a sum of products in one warp, with one element per lane, that a block reads: the two halves of the warp
        have different sums.
        """
        lanes, seen, waiting = re.fullmatch(r"(?:lanes|trees)_1x(\d+)x1", order), set[str](), [op.results[0]]
        while waiting and lanes:
            readers = [o for o in self._uses.get(waiting.pop(), []) if o.results and o.results[0] not in seen]
            seen |= {o.results[0] for o in readers}
            waiting += [o.results[0] for o in readers]
            if any(o.name in ("tt.splat", "tt.broadcast") for o in readers):
                half = int(lanes[1]) // 2
                why = f"in compiled code, columns {half} and up use another sum, whose last bits may differ: each lane"
                why += (
                    " rounds only the products of the other half (fma); here, all columns use the sum of the "
                    "first columns"
                )
                self.notes.append(f"{op.line}: {why}")
                return

    def _of_one_number(self, op: Op, x: Number, *, is_sum: bool, is_extremum: bool) -> None:
        """Read an extremum of lanes that all have one number as this number, and a sum of zeros as zero."""
        at = op.number("axis")
        if not (is_extremum or (is_sum and x.is_known and x.value == 0)):
            raise op.fail(
                "a sum or product over a block whose elements are all the same number is not supported; multiply "
                "the number instead"
            )
        self._set(op, replace(x, shape=(*x.shape[:at], *x.shape[at + 1 :])))

    def _least(self, op: Op, x: Floats) -> None:
        """Write a minimum as the opposite of the maximum of the opposite values."""
        pad = None if x.pad is None else -x.pad
        opposite = self._named(op, replace(x, text=f"({self.text(x)} * -1.0)", pad=pad, factors=None, is_low=False))
        self._check_hidden(op, opposite, "min", -math.inf)
        body = [replace(op.body[0], name=_MINIMA[op.body[0].name]), *op.body[1:]]
        self._tt_reduce(replace(op, body=body), opposite)
        made = self.values[op.results[0]]
        assert isinstance(made, Floats)
        self._bind(op, replace(made, text=f"({self.text(made)} * -1.0)"))

    def _check_hidden(self, op: Op, x: Floats, kind: str, neutral: float) -> None:
        """Refuse a sum or maximum over elements that a mask hides, if their values are not known or change the result.

        ``neutral``: the value that changes nothing; for a ``min``, which is a maximum of opposite values, both values
        are opposites too.
        """
        axis, sign = x.axes[op.number("axis")], -1 if kind == "min" else 1
        if x.is_seen:
            return
        if not self._is_cut(axis):
            self.hidden.uncut.append((op, x, kind, neutral))
            return
        self._note_zeros(op.operands)
        self.hidden.relied.add(axis)
        if x.pad != neutral and (kind == "sum" or (not x.is_low and self._hidden_maximum(x, axis) is None)):
            hidden = "unknown" if x.pad is None else sign * x.pad
            why = f"a {kind} runs along an axis that a mask cuts, and the masked values are {hidden}"
            other = sign * neutral
            raise op.fail(f"{why}; write tl.where(mask, x, {other}) before it, or other={other} in the tl.load")

    def _check_uncut(self) -> None:
        """Refuse sums, maxima and products along axes that a later mask was found to cut."""
        for op, x, kind, neutral in self.hidden.uncut:
            axis = x.axes[1 if op.name == "tt.dot" else op.number("axis")]
            if self._is_cut(axis) and x.pad != neutral and not (x.is_low and kind != "sum"):
                why = (
                    f"a {kind} runs along an axis that a mask cuts in another block, and the kernel combines the "
                    "two blocks later"
                )
                raise op.fail(f"{why}; mask this block too, with other={-neutral if kind == 'min' else neutral}")

    def _note_zeros(self, names: Sequence[str]) -> None:
        """Note loads under a mask without ``other`` from which values along a cut axis are computed."""
        sources = {n for name in names for n in self._made_of(name)}
        for load in self._made:
            if load.name == "tt.load" and len(load.operands) == 2 and sources.intersection(load.results):
                why = "a masked load without other=...: hidden elements are 0 here, as in compiled code for GPUs"
                if (note := f"{load.line}: {why}") not in self.notes:
                    self.notes.append(note)

    def _hidden_maximum(self, x: Floats, axis: str | None) -> float | None:
        """Return the value of elements that a mask hides in every program, if a maximum may be this value; otherwise
        None.
        """
        is_below = x.is_low or x.pad == -math.inf or (x.pad is not None and math.isnan(x.pad))
        return None if is_below or not self._is_always_cut(axis) else x.pad

    def _is_always_cut(self, axis: str | None) -> bool:
        """Return whether a load's mask hides elements along an axis in every program, outside of loops."""
        loads = [x for x in self.loads.values() if self.root(axis) in map(self.root, x.axes)]
        return self._walk is None and any(
            bool(np.all(left < n))
            for x in loads
            for own, n, left in zip(x.axes, x.pointer.shape, x.left, strict=True)
            if not x.is_walked and self.root(own) == self.root(axis)
        )

    def _note_reduced(self, op: Op, axes: Sequence[str | None]) -> None:
        """Note a reduction or scan along the last axis of a block, or of a vector."""
        self.reduced.append((axes[-1], op.line))
        if len(axes) == 1:
            self.reduced_vectors.append((axes[-1], op.line))

    def _leave_rows(self, op: Op, axis: str | None, rows: Sequence[str | None]) -> None:
        """Note the rows that a sum or maximum leaves; refuse a sum or maximum along rows that another one leaves."""
        self.left |= {a for a in rows if a is not None}
        if {*map(self.root, self.left)} & {*map(self.root, (axis, *(a for a, _ in self.reduced)))}:
            raise op.fail(
                "a sum or maximum of a block along both of its axes is not supported here; load the block as one row"
            )

    def _sums_products(self, reduction: Op, place: str) -> bool:
        """Return whether compiled code contracts the products of a ``place`` with the additions of their sum."""
        added = self.choices.of_code("sums").get(place) if self.choices.of_code("fuses") and place else None
        body = reduction.body[0] if reduction.body else None
        return bool(added and body and body.place.split(" at ")[0] == added.split(" at ")[0])

    def _tt_scan(self, op: Op, x: Known, *others: Known) -> None:
        """Read cumulative sums along the last axis; elements that a mask hides come after those that it leaves."""
        inner = [o.name for o in op.body]
        is_sum = inner[:1] == ["arith.addf"] and len(inner) == 2
        if is_sum and not others and isinstance(x, Floats) and shape_of(op.type)[0][op.number("axis")] == 1:
            self._set(op, x)  # the sum of one element is the element
            return
        is_reversed = "reverse = true" in op.text
        order = self._order_of(op)
        lanes = re.match(r"(?:lanes|trees)_1x(\d+)", order)
        has_one = bool(lanes and int(lanes[1]) >= min(WARP, shape_of(op.type)[0][-1]))  # element a lane
        is_wide = isinstance(x, Floats) and x.fmt == "f32" and order not in ("", UNKNOWN) and not has_one
        if others or not is_sum or is_wide or (is_reversed and isinstance(x, Floats) and x.fmt == "f32"):
            self._by_function(op, (x, *others), "scanned")
            return
        if not isinstance(x, Floats):
            raise op.fail("only tl.cumsum of floats is supported as a scan")
        if op.number("axis") != len(x.axes) - 1:
            why = "tl.cumsum down the rows of this block is not supported beside the kernel's other operations on it"
            raise op.fail(f"{why}; store the block, and add up its rows in a second kernel")
        if x.axes[-1] is None:
            raise op.fail("tl.cumsum of equal elements is not supported; multiply by the indices instead")
        self._refuse_anew(op, x.axes[-1])
        self._note_reduced(op, x.axes)
        direction = "reverse=True" if is_reversed else ""
        if is_reversed:
            self._check_hidden(op, x, "sum", 0)  # hidden elements are added first
        if order and not has_one:
            how = f"compiled code uses {order}; npusim assumes one element in each of {WARP} lanes"
            self.notes.append(f"{op.line}: the order of these cumulative sums is assumed: {how}")
        self._bind(op, Floats(f"{self.text(x)}.cumsum({direction})", x.axes, x.fmt))

    def _by_function(self, op: Op, blocks: Sequence[Known], word: str) -> None:
        """Read a reduction or scan along the last axis by a function that the kernel defines (`own_combines`)."""
        shape, floats = shape_of(op.text.rpartition("}) : (")[2])[0], [x for x in blocks if isinstance(x, Floats)]
        rank, is_scan = len(shape), word == "scanned"
        what = "a tl.associative_scan" if is_scan else "a tl.reduce"
        if not floats or not all(isinstance(x, Floats | Number) for x in blocks) or len(blocks) > MOST_ROWS:
            why = f"with a custom combine function supports one to {MOST_ROWS} blocks of floats"
            raise op.fail(f"{what} {why}; use tl.sum or tl.max")
        fmt = floats[0].fmt
        if any(x.fmt != fmt for x in floats) or (fmt != "f32" and (is_scan or not is_exact(op))):
            is_sum = is_scan and [o.name for o in op.body if o.name != "block"][:-1] == ["arith.addi"]
            does = f"a tl.cumsum of computed {fmt}" if is_sum else f"{what} of {fmt} with a custom combine function"
            raise op.fail(f"{does} is not supported; convert it to tl.float32")
        if op.number("axis") != rank - 1 or floats[0].axes[-1:] == (None,):
            why = "with a custom combine function is supported only along the last axis, and only if it has several"
            raise op.fail(f"{what} {why} elements")
        axes = self._joined(*floats)
        hidden = [self._known_beyond(x) if isinstance(x, Floats) else None for x in blocks]
        hidden = [hidden_value(x) if known is None else known for x, known in zip(blocks, hidden, strict=True)]
        self._refuse_anew(op, axes[-1])
        is_cut = self._is_cut(axes[-1])
        if not is_cut and None in hidden:
            for x in floats:
                self.hidden.uncut.append((op, replace(x, pad=None), word, 0.0))
        if is_cut and None in hidden and not (is_scan and "reverse = true" not in op.text):
            why = "runs along an axis that a mask cuts, and the masked values are not known"
            raise op.fail(f"{what} with a custom combine function {why}; write tl.where(mask, x, NUMBER) before it")
        self.hidden.relied |= {axes[-1]} if is_cut else set()
        self._note_zeros(op.operands)
        if not is_scan:
            self._leave_rows(op, axes[-1], axes[:-1])
        self._note_reduced(op, axes)
        forms = Functions(BINARY, _written, {n: text for n, (text, _) in UNARY.items()}, LIBDEVICE)
        numbers = {n: x.text for n, x in self.values.items() if isinstance(x, Number) and x.is_known and not x.shape}
        literals = {n: x.value for n, x in self.values.items() if isinstance(x, Number) and n in self._literals}
        body, pads = combined_text(op, self.choices, forms, numbers, literals), [x or 0.0 for x in hidden]
        order = self._order_of_function(op, shape[-1], is_scan=is_scan)
        if not is_scan and self.choices.of_code("orders"):
            self._note_other_lanes(op, body, len(blocks), order)
        named = [self._named(op, x) for x in blocks]
        wide, back = ("", "") if fmt == "f32" else (f".to({self.choices.fmt(x)!r})" for x in ("f32", fmt))
        values = ", ".join(self.text(x) + wide * isinstance(x, Floats) for x in named)
        for i, result in enumerate(op.results):
            if not self._uses.get(result):
                continue
            how = combine_text(body, take=i, size=shape[-1], pads=pads, is_reversed="reverse = true" in op.text)
            made = Floats(f"{word}(({values},), {how!r}, {order!r}){back}", axes if is_scan else axes[:-1], fmt)
            self._bind(replace(op, results=[result]), made)

    def _known_beyond(self, x: Floats) -> float | None:
        """Return the one number that a known block has in all columns that no load reads; None for others."""
        seen, ends = self.hidden.chosen.get(x.text, (x.text, None))
        if seen not in self.seen:
            return None
        known = self.seen[seen]
        elements = known.elements if known.is_by_program else known.elements[None]
        found = set[float]()
        for load in self.loads.values():
            for own, left in zip(load.axes, load.left, strict=True):
                if own is None or self.root(own) != self.root(x.axes[-1]) or load.is_walked or left.shape[1] > 1:
                    continue
                for i, most in enumerate(left[:, 0]):
                    of_program = elements if len(left) == 1 else elements[min(i, len(elements) - 1)]
                    found |= set(np.unique(of_program[..., int(most) :]).astype(float).tolist())
        number = found.pop() if len(found) == 1 else None
        return number if ends is None or number is None else ends[not number]

    def _order_of(self, op: Op) -> str:
        """Return the order of a reduction or scan in compiled code; empty where none is known."""
        orders = self.choices.of_code("orders")
        order: str = orders.get(op.place, UNKNOWN) if orders else ""
        return order

    def _order_of_function(self, op: Op, size: int, *, is_scan: bool) -> str:
        """Return the order of a reduction or scan with a custom combine function, and note if the order is assumed."""
        order = self._order_of(op)
        if order in ("", UNKNOWN) or (is_scan and "_" in order.partition("_")[2]):
            assumed = "sequential" if not self.choices.order else f"lanes_1x{min(WARP, size)}x1"
            self.notes.append(
                f"{op.line}: the order of this reduction or scan with a custom combine function is assumed: {assumed}"
            )
            return assumed
        return order

    def _note_other_lanes(self, op: Op, body: str, count: int, order: str) -> None:
        """Note a reduction in one warp whose bits differ between the first lane and other lanes, because its function
        has its operands in the other order there; refuse it if the function does not accept its two elements in any
        order.

        If only the first lane stores the result of a single row, there is nothing to note.
        """
        lanes = re.fullmatch(r"(?:lanes|trees)_\d+x(\d+)x1|mma_lanes", order)
        spread = any(o.name in ("tt.splat", "tt.broadcast") for r in op.results for o in self._later(r))
        if not lanes or lanes[1] == "1" or not (op.number("axis") or spread):
            return
        drawn = np.random.default_rng(0).random((count, 256, 2)).astype(np.float32) + np.float32(0.5)
        texts = [combine_text(body, take=i, size=2, pads=(0.0,) * count) for i in range(count)]
        ways = [[folded(list(x), "float32", text, "sequential") for text in texts] for x in (drawn, drawn[..., ::-1])]
        one, other = (np.stack(x) for x in ways)
        if np.array_equal(one, other):
            return
        what = "in lanes other than the first, this reduction's function receives its operands in the opposite order"
        if not np.allclose(one, other, rtol=1e-4):
            raise op.fail(f"{what}, and the order changes it; npusim does not know which lane stores a row")
        self.notes.append(
            f"{op.line}: {what}: the last bits may differ; npusim gives every element the bits of the first lane"
        )

    def _later(self, name: str) -> list[Op]:
        """Return all operations that depend on a value."""
        found, waiting = list[Op](), [name]
        while waiting:
            new = [o for o in self._uses.get(waiting.pop(), []) if o not in found]
            found += new
            waiting += [r for o in new for r in o.results]
        return found

    def _order(self, op: Op) -> str:
        """Return the order of a sum: the usual order if that of the compiled code is not known."""
        orders = self.choices.of_code("orders")
        known = [orders.get(at, UNKNOWN if orders else "") for at in op.place.split(OF_SUMS)]
        if UNKNOWN in known:
            self.notes.append(f"{op.line}: the compiled code's order of this sum is unknown: {self.choices.order}")
            return self.choices.order
        if not all(known):
            return self.choices.order
        return rows_order(known[0], op.number("columns"), known[1]) if len(known) > 1 else known[0]

    def _added(self, op: Op, x: Known, masking: Masking) -> None:
        """Add a block that is 0 where a mask holds: hidden elements become -inf."""
        if not isinstance(x, Floats):
            raise op.fail("a mask is added to a value that is not a block of floats, which is not supported")
        number = Number(masking.value, literal(masking.value))
        if isinstance(masking.of, Elements):
            self._hidden_by(op, number)
            self._mask(op, x, number, masking.of)
        else:
            self._selected(op, masking.of, x, number)

    def _tt_dot(self, op: Op, a: Known, b: Known, c: Known) -> None:
        if isinstance(a, Floats) and isinstance(b, Identity) and isinstance(c, Number) and not c.value:
            self.notes.append(
                f"{op.line}: a product with an identity matrix equals the other factor; its time is not counted"
            )
            fmt = shape_of(op.type)[1]
            self._set(op, Floats(f"{self.text(a)}.to({self.choices.fmt(fmt)!r})", a.axes, fmt, a.pad, narrow=a))
            return
        if isinstance(c, Masking):
            self._tt_dot(op, a, b, Number(0.0, "0.0", c.of.shape))
            self._added(op, self.values[op.results[0]], c)
            return
        if not isinstance(a, Floats) or not isinstance(b, Floats):
            raise op.fail("tl.dot supports blocks of floats only")
        a, b = (self._widened(op, x) for x in (a, b))
        self._check_precision(op, a.fmt)
        self._join(a.axes[1], b.axes[0])
        self._check_factors(op, a, b)
        self._refuse_anew(op, a.axes[1])
        if self.root(a.axes[0]) == self.root(b.axes[1]) is not None:
            raise op.fail(
                "the rows and the columns of a tl.dot's result are the same axis; load its second factor through "
                "a pointer of its own"
            )
        fmt, text = shape_of(op.type)[1], " @ ".join(x.text + ".T" * x.is_transposed for x in (a, b))
        self.products.add((a.fmt, fmt, op.place))
        pad = 0.0 if b.pad == 0.0 and not (b.is_transposed and self._has_unlike_rows(b.axes[1])) else None
        result = Floats(f"({text})", (a.axes[0], b.axes[1]), fmt, pad, is_product=True)
        if isinstance(c, Number) and not c.value:
            is_alone = self._walk is not None or self._products == 1
            self._bind(op, result) if is_alone else self._set(op, self._named(op, result, op.results[0]))
            return
        if not isinstance(c, Floats):
            raise op.fail("adding a tl.dot to a number is not supported; start the accumulator with tl.zeros")
        is_sum = self._walk and self._walk.is_sum
        if self.choices.is_fresh and not is_sum:  # for a matrix unit that cannot accumulate onto a result of rows
            text = self._named(op, result, f"{a.text}{b.text.removesuffix('j')}".upper()).text
        pad = c.pad if result.pad == 0.0 else None
        held = c.held if result.pad == a.pad == 0.0 else None
        self._bind(op, Floats(f"({c.text} + {text})", self._joined(result, c), fmt, pad, held=held))

    def _has_unlike_rows(self, axis: str | None) -> bool:
        """Return whether hidden rows of a block along an axis are unlike its hidden columns."""
        return self.root(axis) in map(self.root, self.hidden.unlike_rows)

    def _check_factors(self, op: Op, a: Floats, b: Floats) -> None:
        """Refuse a product along an axis that a mask cuts, if no factor is 0 there, or one factor is 0 and the other
        infinite.

        Along its rows (before a transposition) a factor counts as 0 only if this is known of rows.
        """
        along, pads = a.axes[1], list[float | None]()
        for x, is_rows in ((a, a.is_transposed), (b, not b.is_transposed)):
            pads.append(None if is_rows and self._has_unlike_rows(along) else x.pad)
        is_right = any(x == 0.0 and (y is None or math.isfinite(y)) for x, y in (pads, pads[::-1]))
        if not self._is_cut(along):
            self.hidden.uncut.append((op, replace(a, pad=0.0 if is_right else None), "product", 0.0))
            return
        self._note_zeros(op.operands)
        self.hidden.relied.add(along)
        if not is_right:
            why = "a tl.dot sums along an axis that a mask cuts"
            why += ", and there it multiplies 0 by Inf or NaN" if 0.0 in pads else ""
            raise op.fail(f"{why}; write other=0.0 in the tl.load of one of its factors")

    def _check_precision(self, op: Op, fmt: str) -> None:
        """Note how compiled code multiplies float32; refuse products in other instructions, and two products that
        differ in this.
        """
        if fmt != "f32" or self.choices.is_exact:
            return
        stated = re.search(r"inputPrecision = (\w+)", op.text)
        how = stated[1] if stated else "ieee"
        if how not in PRECISIONS:
            why = "which needs several products on the matrix unit and is not supported; use 'tf32' or 'ieee'"
            raise op.fail(f"a tl.dot of float32 has input_precision={how!r}, {why}")
        self.precision = self.precision or how
        if how != self.precision:
            why = "in one kernel; use one for all of its products of float32"
            raise op.fail(f"tl.dot has input_precision={self.precision!r} and {how!r} {why}")
        self.notes.append(f"{op.line}: {PRECISIONS[how]}")

    def _widened(self, op: Op, x: Floats) -> Floats:
        """Return a factor of FP8 as a factor of float16, if the matrix unit does not multiply FP8."""
        if not self.choices.is_widened(x.fmt):
            return x
        why = "the matrix unit does not multiply FP8: the factors are converted to float16 without rounding"
        if not any(n.endswith(why) for n in self.notes):
            self.notes.append(f"{op.line}: {why}")
        name = self._unique(f"{x.text}_wide")
        self._emit(f"{name} = {x.text}.to({self.choices.fmt('f16')!r})", op.line)
        return replace(x, text=name, fmt="f16", narrow=None)

    def _arith_select(self, op: Op, mask: Known, a: Known, b: Known) -> None:
        # Compiled code contracts no product whose reader is a choice, even if the choice is the same everywhere.
        a, b = (replace(x, factors=None, place="") if isinstance(x, Floats) else x for x in (a, b))
        is_computed = isinstance(mask, ListedMask) and not mask.at.of and isinstance(a, Floats | Number)
        if isinstance(mask, Elements) or Elements in (type(a), type(b)) or is_computed:
            self._by_elements(op, mask, a, b)
            return
        is_listed = any(isinstance(x, Listed | ListedMask) for x in (mask, a, b))
        if is_listed and isinstance(a, Affine | Listed) and isinstance(b, Affine | Listed):
            rule = mask if isinstance(mask, ListedMask) else self._condition(op, mask)
            how, one, other = partial(chosen_by_table, op, rule, a, b), a, b
            self._set(op, or_elements(how, lambda: chosen_elements(op, rule, one, other)))
            return
        mask = self._of_table(op, mask) if isinstance(mask, ListedMask) else mask
        if isinstance(mask, ValueComparison):
            self._by_value(op, mask, a, b)
            return
        mask = self._condition(op, mask)
        every, none = answers(mask)
        if np.all(every) or np.all(none):
            self._set(op, a if np.all(every) else b)
            return
        a, b = self._as_integers(a), self._as_integers(b)
        block = shape_of(op.type.rpartition(", ")[2])[0]
        if block and not mask.shape and all(isinstance(x, Floats | Number) for x in (a, b)):
            self._chosen_by_block(op, op.results[0], every, a, b, block)
            return
        if isinstance(a, Number) and isinstance(b, Number) and not b.value and a.value <= LOW:
            mask, a, b = ~mask, b, a  # the number is used where the mask is false
        if isinstance(a, Affine) and isinstance(b, Affine) and a.of != b.of and not np.any(~every & ~none):
            why = "tl.where chooses pointers to different tensors in different iterations, which is not supported"
            raise self.unlike(op, f"{why}; use a loop for each tensor", every)
        if isinstance(a, Affine) and isinstance(b, Affine):
            linear, rules, pair = partial(self._chosen_or_listed, op, mask, a, b), mask, (a, b)
            self._set(op, or_elements(linear, lambda: chosen_elements(op, rules, *pair)))
        elif isinstance(a, Number) and isinstance(b, Number) and not a.value and b.value <= LOW:
            self._set(op, Masking(mask, b.value))
        elif _is_diagonal(mask) and isinstance(a, Number) and isinstance(b, Number) and (a.value, b.value) == (1, 0):
            self._set(op, Identity(a.shape or b.shape))
        elif isinstance(b, Floats | Number):
            self._selected(op, mask, a, b)
        else:
            raise op.fail(
                "tl.where is supported here only with a mask of indices that chooses between blocks of floats, "
                "or numbers"
            )

    def _by_elements(self, op: Op, mask: Known, a: Known, b: Known) -> None:
        """Read a choice by a mask that is not linear along two axes, or between such integers."""
        if not isinstance(a, Floats | Number) and not isinstance(b, Floats | Number):
            if isinstance(mask, Condition) and all(isinstance(x, Affine | Elements) for x in (a, b)):
                every, none = answers(mask)
                if np.all(every) or np.all(none):
                    self._set(op, a if np.all(every) else b)
                    return
            self._set(op, chosen_elements(op, mask, a, b))
            return
        of = elements_in(op, mask)
        if of.values.all() or not of.values.any():
            self._set(op, a if of.values.all() else b)
            return
        if isinstance(a, Number) and (isinstance(b, Floats) or a.value <= LOW):
            of, a, b = replace(of, values=1 - of.values), b, a
        if isinstance(a, Number) and isinstance(b, Number) and not a.value and b.value <= LOW:
            self._set(op, Masking(of, b.value))
            return
        if not isinstance(a, Floats) or not isinstance(b, Number):
            self._fixed_choice(op, of, a, b)
            return
        pad = -math.inf if self._hidden_by(op, b) else b.value
        a = replace(a, pad=pad) if self._elements_hide_unread(a, of) else a
        self._mask(op, a, b, of)

    def _hidden_by(self, op: Op, b: Number) -> bool:
        """Return whether a number hides scores; note such a number if it is not -inf."""
        is_low = -math.inf < b.value <= LOW
        if is_low:
            self.notes.append(f"{op.line}: masked scores are {b.value:g}, so low that their weights are 0")
            self.hides_by_numbers = True
        return is_low

    def _chosen_or_listed(self, op: Op, mask: Condition, a: Affine, b: Affine) -> Affine | Listed:
        """Return integers by a mask as `_chosen` does, or other integers along one axis as a list of all programs."""
        try:
            return self._chosen(op, mask, a, b)
        except NonlinearError:
            if a.of != b.of or not self.choices.way("lists_elements"):
                raise
            return chosen_by_table(op, mask, a, b)

    def _chosen(self, op: Op, mask: Condition, a: Affine, b: Affine) -> Affine:
        """Return integers by a mask: one integer for each program, the integers of a block up to the end of the mask,
        or linear integers.
        """
        every, none = answers(mask)
        if a.steps == b.steps and a.of == b.of and not np.any(~every & ~none):
            left = tuple(lesser(x, y) for x, y in zip(a.limits(), b.limits(), strict=True))
            return replace(a, base=np.where(every, a.base, b.base), left=left)
        bounds = [bound_of(d, r) for r, d in mask.of]
        if (
            all(bounds) and not mask.either and not any(b.steps)
        ):  # beyond it, there are elements that are computed and then not stored
            limits = list(a.limits())
            for axis, most in filter(None, bounds):
                limits[axis] = lesser(limits[axis], most)
            return replace(a, left=tuple(limits))
        result = affine(np.where(truth(op, mask), elements(op, a), elements(op, b)))
        if result is None or a.of != b.of:
            why = "tl.where chooses integers that are not linear along the axes of the block, which is not supported"
            raise NonlinearError(f"{op.line}: {why}")
        return replace(result, of=a.of)

    def _selected(self, op: Op, mask: Condition, a: Known, b: Floats | Number) -> None:
        relation, d = mask.every[0]
        is_first = len(mask.every) == 1 and relation == "eq" and not any(d.steps) and d.base.shape[1] > 1
        if is_first and isinstance(b, Floats) and not d.base[:, 0].any() and d.base[:, 1:].all():
            self._refuse_other_first(op)
            self.notes.append(
                f"{op.line}: the tl.where that treats the first tile differently has the same result "
                "as the loop's start values"
            )
            self._bind(op, b)
            return
        for rule in mask.of if isinstance(a, Floats) and isinstance(b, Floats) else ():
            self._hides_lanes_alike(*rule)  # a comparison that leaves a single lane hides those before it
        if isinstance(a, Number) and isinstance(b, Floats):
            mask, a, b = ~mask, b, a
        if isinstance(a, Floats) and _differs_beyond(mask, a):
            self._fixed_choice(op, mask, a, b)
            return
        if isinstance(a, Floats) and isinstance(b, Floats) and b.held is not None and self._is_of_tiles(a, mask):
            a = replace(a, held=b.held, pad=b.pad, is_seen=False, is_even=False)
            self._bind(op, a)  # the tile has no other lanes
            return
        if not isinstance(b, Number) or not isinstance(a, Floats):
            self._fixed_choice(op, mask, a, b)
            return
        pad = -math.inf if self._hidden_by(op, b) else b.value
        bounds = [None if self._hides_lanes_alike(r, d) else bound_of(d, r) for r, d in mask.of]
        a = replace(a, held=None, is_even=False)
        for bound in filter(None, bounds):
            self.cuts.add(self.root(a.axes[bound[0]]))
            if bound[0] != len(a.axes) - 1:
                continue
            if len(a.axes) == 2 and a.pad != pad:
                self.hidden.unlike_rows.add(a.axes[0])
            a = replace(a, pad=pad if a.pad == pad or not self._leaves_unread(a.axes[-1], bound[1]) else None)
        rest = [
            rule
            for rule, bound in zip(mask.of, bounds, strict=True)
            if bound is None or not self._is_loaded_so(op, a.axes[bound[0]], bound[1])
        ]
        rest = [rule for rule in rest if not np.all(answers(Condition((rule,)))[0])]
        if rest and not mask.either and self._hides_unread(a, rest):
            self.hidden.unlike_rows.add(a.axes[0])
            a = replace(a, pad=pad)
        self._mask(op, a, b, Condition(tuple(rest), mask.either)) if rest or mask.either else self._bind(op, a)

    def _first_tile(self, op: Op, mask: str) -> FirstTile:
        """Return what is known of the first iteration of an operation's loop, in which ``mask`` holds."""
        loop = next((o for o in self.function.operations if op in o.body and o.name == "scf.for"), None)
        carried = zip(loop.operands[4::2], loop.operands[5::2], strict=True) if loop else ()
        begun = {inner: self.values.get(start) for inner, start in carried}
        starts = {n: x.value for n, x in begun.items() if isinstance(x, Number) and x.is_known}
        operations = [*self.function.operations, *(loop.body if loop else ()), *op.body, *op.otherwise]
        return FirstTile(operations, starts, mask)

    def _refuse_other_first(self, op: Op) -> None:
        """Raise `ProgramError` for a choice of the first tile whose result is not known to equal that of the start
        values.
        """
        mask, one, other = op.operands
        if not self._first_tile(op, mask).are_equal(one, other):
            why = "and its two values differ for the state before the loop; start the state with the first value"
            raise OtherFirstError(f"{op.line}: tl.where tests for the first iteration, {why}")

    def _is_of_tiles(self, a: Floats, mask: Condition) -> bool:
        """Return whether a mask leaves exactly those elements of a loop's tiles that the loads of the loop leave."""
        rules = [rule for rule in mask.of if not np.all(answers(Condition((rule,)))[0])]
        walk, bounds = self._walk, [bound_of(d, relation) for relation, d in rules]
        if walk is None or mask.either or not bounds or None in bounds:
            return False
        visited = np.arange(walk.most)[None] < walk.counts
        for axis, most in filter(None, bounds):
            lefts = [
                np.minimum(left, n)[:, -walk.most :]
                for load in (self.loads[name] for name in walk.loads)
                for own, n, left in zip(load.axes, load.pointer.shape, load.left, strict=True)
                if own is not None and self.root(own) == self.root(a.axes[axis])
            ]
            if not lefts or any(np.any((left != most) & visited) for left in lefts):
                return False
        return True

    def _hides_lanes_alike(self, relation: str, d: Affine) -> bool:
        """Return whether a comparison that hides the same lanes along one axis in all programs is a choice."""
        along = [i for i, s in enumerate(d.steps) if s]
        is_lane = len(along) == 1 and d.shape[along[0]] > 1 and self._walk is None and not np.ptp(d.base)
        if not is_lane or np.all(answers(Condition(((relation, d),)))[0]) or not self.choices.way("chooses_lanes"):
            return False
        is_stored = _lanes_of(relation, d) in self.stored_lanes
        is_first = bool(RELATIONS[relation](d.steps[along[0]], 0)) or (relation == "eq" and bool(d.base.flat[0]))
        self.hides_first_lanes |= is_first and not is_stored
        return not is_stored and (is_first or self.choices.way("chooses_lanes") == "all")

    def _hides_unread(self, a: Floats, rules: Sequence[tuple[str, Affine]]) -> bool:
        """Return whether comparisons of rows and columns hide each column of a walked tile that no load reads.

        This holds for every row that a load reads: further rows are not stored.
        """
        walk, shape = self._walk, rules[0][1].shape
        if walk is None or not self._is_tile(a) or any(len(d.steps) != 2 for _, d in rules):
            return False
        (rows, first), last = self._read_of_tile(a, shape), shape[1] - 1
        is_visited = (np.arange(walk.most)[None] < walk.counts) & (first <= last) & (rows > 0)
        hides = np.zeros((1, 1), bool)
        for relation, d in rules:
            if relation == "eq":  # the corners do not suffice to decide this
                continue
            down, along = d.steps
            corners = [d.base + i * down + j * along for i in (0 * rows, rows - 1) for j in (first, 0 * first + last)]
            hides = hides | np.logical_and.reduce(np.broadcast_arrays(*(~RELATIONS[relation](c, 0) for c in corners)))
        return bool(np.all(hides | ~is_visited))

    def _is_tile(self, a: Floats) -> bool:
        """Return whether a value is a tile of rows and columns."""
        return len(a.axes) == 2 and None not in a.axes

    def _read_of_tile(self, a: Floats, shape: Sequence[int]) -> tuple[Integers, Integers]:
        """Return the number of rows, and of columns, of a walked tile that loads read, for each program
        and iteration.
        """
        assert self._walk is not None
        read = list[Integers]()
        for axis, n in zip(map(self.root, a.axes), shape, strict=True):
            known = [
                np.minimum(left, n)[:, -self._walk.most :]
                for x in self.loads.values()
                for own, left in zip(x.axes, x.left, strict=True)
                if self.root(own) == axis and (x.is_walked or left.shape[1] == 1)
            ]
            read.append(reduce(np.minimum, known) if known else np.full((1, 1), n))
        rows, columns = read
        return rows, columns

    def _elements_hide_unread(self, a: Floats, mask: Elements) -> bool:
        """Return whether a mask by its elements hides each column of a walked tile that no load reads, as in the method
        above.
        """
        walk = self._walk
        if walk is None or not self._is_tile(a) or len(mask.shape) != 2:
            return False
        rows, first = (x[..., None, None] for x in self._read_of_tile(a, mask.shape))
        down, along = np.arange(mask.shape[0])[:, None], np.arange(mask.shape[1])
        is_visited = self.is_read(walk.most)[..., None, None]
        return not np.any((mask.values != 0) & (down < rows) & (along >= first) & is_visited)

    def _is_loaded_so(self, op: Op, axis: str | None, most: Integers) -> bool:
        """Return whether the walked tiles along an axis have no more elements than a mask leaves.

        The extent of other axes is known when all stores are known: `npusim.kernels.triton.launch_phases` examines
        these masks then.
        """
        walk = self._walk
        hides = None if walk is None else self.hides_loaded(walk, axis, most)
        if hides is None:
            (self.bounds if walk is None else walk.bounds).append((axis, most, op.line))
        return not hides

    def _leaves_unread(self, axis: str | None, most: Integers) -> bool:
        """Return whether a mask leaves more elements along an axis than some load of a block along this axis reads."""
        walk = self._walk
        is_visited = self.is_read(walk.most) if walk else np.ones((1, 1), bool)
        for load in self.loads.values():
            for own, n, left in zip(load.axes, load.pointer.shape, load.left, strict=True):
                is_of_it = own is not None and self.root(own) == self.root(axis)
                if not is_of_it or (walk and left.shape[1] > 1 and not load.is_walked):
                    continue
                count = np.minimum(left, n)[:, -walk.most :] if walk else np.minimum(left, n)
                if np.any((np.minimum(most, n) > count) & is_visited):
                    return True
        return False

    def _mask(self, op: Op, a: Floats, b: Number, mask: Condition | Elements) -> None:
        if len(mask.shape) != 2 and self._walk is not None:
            raise op.fail("a mask in a loop must compare the rows and columns of a tile")
        if _differs_beyond(mask, a):
            self._fixed_choice(op, mask, a, b)
            return
        a = replace(a, held=None, is_even=False)
        if a.pad != b.value and not (a.pad == -math.inf and b.value <= LOW):
            # some columns beyond the tensor have one of the two values, and others have the number
            a = replace(a, pad=None)
        if self._walk is None:
            self._fixed_mask(op, a, b, mask)
            return
        scores = [n for n in op.operands if isinstance(x := self.values.get(n), Floats) and x.text == a.text]
        if a.text.isidentifier() and any(len(self._uses[n]) > 1 for n in scores):
            raise op.fail("the unmasked scores are used after the mask; use the result of tl.where")
        a, walk, known = self._named(op, a), self._walk, self._walk.mask
        masking = f"{a.text} = where(mask, {a.text}, {b.text})"
        if known is None or (walk.masked == [a.text] and walk.lines[-1][0] == masking):
            walk.mask = mask if known is None else self._both_hold(op, known, mask)
        elif not _are_same(known, mask):
            raise op.fail("two masks of one loop have different values; use one mask of rows and columns for all")
        walk.masked += [a.text] if a.text not in walk.masked else []
        self._emit(masking, op.line)
        self._set(op, replace(a, factors=None))

    @staticmethod
    def _both_hold(op: Op, a: Condition | Elements, b: Condition | Elements) -> Condition | Elements:
        if isinstance(a, Condition) and isinstance(b, Condition):
            return a & b
        one, other = elements_in(op, a), elements_in(op, b)
        return Elements(one.values & other.values, 1, one.work + other.work, one.why or other.why)

    def _fixed_mask(self, op: Op, a: Floats, b: Number, mask: Condition | Elements) -> None:
        """Write a mask outside of loops that is the same in all programs as a matrix of 0 and 1, which the kernel
        reads.
        """
        a, name = self._named(op, a), self._unique("seen")
        seen = self._known_block(op, name, elements_in(op, mask).values, a.fmt, a.axes, a.axes)
        self._bind(op, Floats(f"where(compare({seen.text}, 0.0, 'une'), {a.text}, {b.text})", a.axes, a.fmt, a.pad))

    def _known_block(
        self,
        op: Op,
        name: str,
        values: Integers,
        fmt: str,
        axes: tuple[str | None, ...] | None = None,
        like: tuple[str | None, ...] = (),
    ) -> Floats:
        """Read integers or a mask outside of loops, (program, iteration, *axes), as data; return the block.

        ``axes``: axes of the block that it masks; by default its own axes without those along which all elements are
        equal. ``like``: axes of the blocks with which it is read; if an earlier block has the same elements along
        these, it is returned.
        """
        if values.shape[1] > 1:
            raise op.fail(
                "masks or indices that change from one iteration of a loop to the next cannot be used as data"
            )
        is_by_program = bool(np.any(values != values[:1]))
        matrix = np.broadcast_to(values, (len(self.ids), *values.shape[1:]))[:, 0] if is_by_program else values[0, 0]
        for axis in range(is_by_program, matrix.ndim) if axes is None else ():
            if np.all(matrix == (first := np.take(matrix, [0], axis))):
                matrix = first  # if all elements along an axis are equal, one represents them
        own = self._axes(matrix.shape[is_by_program:]) if axes is None else axes
        for known in (x for x in self.seen.values() if len(x.value.axes) == len(like) == len(own)):
            one, along = known.value, [b for a, b in zip(known.value.axes, like, strict=True) if a is not None]
            is_like = (one.fmt, known.is_by_program) == (fmt, is_by_program) and np.array_equal(known.elements, matrix)
            if is_like and [*map(self.root, filter(None, one.axes))] == [*map(self.root, along)]:
                return one  # one block represents all blocks of the same elements
        result = Floats(name, own, fmt)
        self.seen[name] = KnownBlock(result, np.asarray(matrix), op.line, is_by_program)
        what = (
            "a tensor that each program reads its own block of"
            if is_by_program
            else ("a tensor that the program reads")
        )
        self.notes.append(f"{op.line}: the kernel uses indices as data outside of a loop; npusim treats them as {what}")
        return result

    def _chosen_by_block(
        self, op: Op, result: str, every: Booleans, a: Known, b: Known, shape: tuple[int, ...]
    ) -> None:
        """Choose between two values that are computed, by a condition known for each program or iteration."""
        value = a if isinstance(a, Floats) else b
        kind = value.fmt if isinstance(value, Floats) else "f32"
        shape = shape if self._walk is not None else tuple(1 for _ in shape)
        given = every.reshape(*every.shape, *(1 for _ in shape))
        holds = np.broadcast_to(given, (len(self.ids), every.shape[1], *shape)).astype(np.int64)
        one = replace(op, results=[result], name="arith.select", type=f"i1, {kind}")
        named = [self._named(one, x) if isinstance(x, Floats) else x for x in (a, b)]
        self._fixed_choice(one, Elements(holds, 1, 1), *named)

    def _fixed_choice(self, op: Op, mask: Condition | Elements, a: Known, b: Known) -> None:
        """Write a choice between two blocks, or numbers, by a mask of indices that is the same in all programs."""
        values = [x for x in (a, b) if isinstance(x, Floats)]
        if self._walk is not None or not all(isinstance(x, Floats | Number) for x in (a, b)):
            raise op.fail(
                "a tl.where with a mask of indices cannot choose between two blocks in a loop, and outside of "
                "loops it may choose only floats"
            )
        fmt, name = shape_of(op.type.rpartition(", ")[2])[1], self._unique("seen")
        like = self._joined(*values) if values else ()
        seen = self._known_block(op, name, elements_in(op, mask).values, fmt, like=like)
        one, other = hidden_value(a), hidden_value(b)
        text = f"where(compare({seen.text}, 0.0, 'une'), {self.text(a)}, {self.text(b)}"
        text += ")" if values else f", {self.choices.fmt(fmt)!r})"
        self._bind(op, Floats(text, self._joined(seen, *values), fmt, one if one == other else None))
        result = self.values[op.results[0]]
        if isinstance(result, Floats):
            self.hidden.chosen[result.text] = seen.text, (one, other)


def _lanes_of(relation: str, d: Affine) -> tuple[str, int, tuple[int, ...]]:
    """Return a comparison of lanes that are the same in all programs, whatever axes of one index its block has."""
    return relation, int(d.base.flat[0]), tuple(s for s in d.steps if s)


def _differs_beyond(mask: Condition | Elements, a: Floats) -> bool:
    """Return whether a mask differs along an axis along which a value has one element for all."""
    if isinstance(mask, Elements):
        along = [bool(np.any(mask.values != np.take(mask.values, [0], i + 2))) for i in range(len(mask.shape))]
    else:
        along = [any(d.steps[i] and d.shape[i] > 1 for _, d in mask.every) for i in range(len(mask.shape))]
    return any(axis is None and is_other for axis, is_other in zip(a.axes, along, strict=False))


def _reduced_length(op: Op) -> int:
    """Return the number of elements that a reduction combines to one."""
    return shape_of("tensor" + op.text.rpartition("(tensor")[2])[0][op.number("axis")]


def _have_same_factors(a: Floats, b: Floats) -> bool:
    """Return whether two blocks are products of the same two factors."""
    return bool(a.factors and b.factors) and sorted(a.factors or ()) == sorted(b.factors or ())


def _is_decided(x: Condition) -> bool:
    """Return whether a condition is equal for all elements of each block."""
    every, none = answers(x)
    return bool(np.all(every | none))


def _is_constant(x: Condition) -> bool:
    """Return whether a condition always or never holds."""
    return any(bool(np.all(each)) for each in answers(x))


def _joined_conditions(name: str, a: Condition, b: Condition) -> Condition:
    """Return two conditions joined by ``andi``, ``ori`` or ``xori``."""
    for one, other in ((a, b), (b, a)):
        if name != "andi" and _is_constant(one):
            every = bool(np.all(answers(one)[0]))
            return (one if every else other) if name == "ori" else ~other if every else other
    return a & b if name == "andi" else a | b if name == "ori" else (a & ~b) | (~a & b)


def _written(how: str, a: str, b: str) -> str:
    """Return the text of an operation of two values in the kernel of tiles."""
    if how[0].isalpha():
        word, _, nan = how.partition(" ")
        return f"{word}({a}, {b}, nan={nan!r})" if nan else f"{word}({a}, {b})"
    return f"({a} {how} {b})"


def _number(op: Op, how: str, a: Number, b: Number) -> Number:
    """Return the result of an operation of two numbers, rounded to its format."""
    value, is_known = _rounded(_computed(how, a.value, b.value), shape_of(op.type)[1]), a.is_known and b.is_known
    return Number(value, literal(value) if is_known else _written(how, a.text, b.text), a.shape, is_known)


def _computed(how: str, a: float, b: float) -> float:
    """Return the result of an operation of two numbers in float64."""
    return float(NUMBERS[how](a, b, "float64"))


def _are_same(one: Condition | Elements, other: Condition | Elements) -> bool:
    """Return whether masks are the same, either comparison by comparison or element by element."""
    if isinstance(one, Elements) and isinstance(other, Elements):
        return np.array_equal(one.values, other.values)
    if isinstance(one, Elements) or isinstance(other, Elements):
        return False

    def form(x: Condition) -> Any:
        """Return how comparisons are joined."""
        return tuple(r for r, _ in x.of), tuple(tuple(map(form, group)) for group in x.either)

    return form(one) == form(other) and all(
        (x.steps, x.base.shape) == (y.steps, y.base.shape) and np.array_equal(x.base, y.base)
        for (_, x), (_, y) in zip(one.every, other.every, strict=True)
    )


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "1"


def _is_diagonal(mask: Condition) -> bool:
    """Return whether a mask of a square block is true only on the diagonal."""
    (relation, d), *more = mask.every
    is_square = len(d.shape) == 2 and d.shape[0] == d.shape[1] and d.steps in ((1, -1), (-1, 1))
    return relation == "eq" and not more and is_square and not np.any(d.base)


def _rounded(value: float, fmt: str) -> float:
    return float(np.asarray(cast(np.array([value]), FORMATS[fmt])).astype(np.float64)[0])


def _is_alike(x: Known) -> bool:
    """Return whether a value is the same in all columns of a row."""
    return isinstance(x, Number) or (isinstance(x, Floats) and (not x.axes or x.axes[-1] is None))


def hidden_value(x: Known) -> float | None:
    """Return the value of hidden columns if it is known, including the case that all columns have one value."""
    if isinstance(x, Number):
        return x.value if x.is_known else None
    assert isinstance(x, Floats)
    return None if _is_alike(x) else x.pad


def _pad(x: Known, other: float) -> float | None:
    """Return the value of hidden columns; for values of rows, and for numbers that are not known, a stand-in; otherwise
    None.

    The stand-in represents any finite number.
    """
    if isinstance(x, Number):
        return x.value if x.is_known else other
    assert isinstance(x, Floats)
    return other if _is_alike(x) or (x.is_even and x.pad is None) else x.pad


def _is_one_number(x: Known) -> bool:
    """Return whether the columns of a row that a mask hides have one finite value, known or not."""
    number = _pad(x, 0.0)
    return number is not None and math.isfinite(number) and not (isinstance(x, Floats) and x.held)


def _as_lanes(x: Known) -> Known:
    """Return a block of one column as a block of lanes; return any other value as it is."""
    is_column = isinstance(x, Floats) and len(x.axes) == 2 and x.axes[0] is not None
    return replace(x, axes=x.axes[:1]) if is_column and isinstance(x, Floats) else x


def _as_column(x: Known) -> Known:
    """Return a block that has only columns as a block of one unknown number; return any other value as it is."""
    is_columns = isinstance(x, Floats) and len(x.axes) == 2 and x.axes[0] is None
    return replace(x, axes=(None, None)) if is_columns and isinstance(x, Floats) else x


def _combined_hidden(how: str, a: Known, b: Known) -> tuple[float | None, HeldState | None]:
    """Return an operation's value in the columns that a mask hides (NaN included) if it is known, and the state that
    has this value.

    In these columns a state of a loop may have its value at the start, or the value of a lane that a mask hides only in
    the last tile. For blocks of one column it is the value of rows that a mask hides.
    """
    a, b = (a, b) if any(not _is_alike(x) for x in (a, b)) else (_as_lanes(a), _as_lanes(b))
    fmt = next(x.fmt for x in (a, b) if isinstance(x, Floats))
    held = [x.held if isinstance(x, Floats) else None for x in (a, b)]
    one, other = ([_pad(x, stand_in) for stand_in in pair] for x, pair in zip((a, b), _STAND_INS, strict=True))
    for i, (state, values) in enumerate(zip(held, (one, other), strict=True)):
        if state is not None and None in values:
            values[:] = _STAND_INS[i] if state.is_seen else [state.start, *_STAND_INS[i]]
    if how == "-" and held[0] is not None and held[0] == held[1]:
        start = 0.0 if held[0].is_seen else held[0].start
        return 0.0 if start is not None and math.isfinite(start) else None, None
    count = max(len(one), len(other))
    one, other = ([*x, x[-1]][:count] for x in (one, other))
    kept = [h for h, x, i in zip(held, (other, one), (0, 1), strict=True) if h and set(x) == {_unit(how, i)}]
    values = [None if x is None or y is None else _computed(how, x, y) for x, y in zip(one, other, strict=True)]
    known = [x for x in values if x is not None]
    if len(known) < count or (len(set(known)) > 1 and not all(map(math.isnan, known))):
        return None, kept[0] if kept else None
    pad = known[0] if math.isnan(known[0]) or fmt not in FORMATS else _rounded(known[0], fmt)
    return pad, kept[0] if kept else None


def _unit(how: str, is_second: int) -> float:
    """Return the other operand that leaves the first one, or the second one, as it is; NaN if there is none."""
    if is_second and how in "-/":
        return math.nan
    return _UNITS.get(how.partition(" ")[0], math.nan)
