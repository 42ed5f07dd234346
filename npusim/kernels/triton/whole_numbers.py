"""Integers that are values of tiles: data of int8 products, results of quantisation, indices of maxima.

A format that represents them exactly stores these integers: int8 itself, or, for wider ones up to 2^24, float32.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np

from npusim.errors import ProgramError
from npusim.formats.whole import whole_limits, without_sign, wrapped
from npusim.kernels.triton.arithmetic import MASK, TO_WHOLE, Arithmetic
from npusim.kernels.triton.compared_indices import are_only_compared, as_integers, is_exact
from npusim.kernels.triton.element_wise import elements_in
from npusim.kernels.triton.integers import bits_of, computed_of, known_throughout, values_of
from npusim.kernels.triton.kernel_draft import Choices
from npusim.kernels.triton.tensor_axes import IntegerTensor, MaskView, View
from npusim.kernels.triton.ttir_text import EXACT, WHOLE, Function, Op, makers, shape_of
from npusim.kernels.triton.values import (
    AXES,
    Affine,
    Condition,
    Elements,
    Floats,
    Known,
    Listed,
    ListedMask,
    Number,
    ValueComparison,
    affine,
    constant,
    literal,
)

#: Indices that are compared, and the numbers with which they are compared.
_KEPT = (Affine, Elements, Number)
_SELECTS = ("arith.select", "arith.select")
#: Half of the number of values of a byte.
HALF_BYTE = 1 << 7
#: Whole numbers up to this one are exact in float32.
MOST_EXACT = 1 << 24
#: Operations that pass integers of a block on unchanged, and operations that turn them into values.
_PASSING = ("tt.broadcast", "tt.expand_dims", "tt.splat", "tt.trans", "ttg.convert_layout", "tt.reshape", "arith.extsi")
_OF_VALUES = ("arith.sitofp", "arith.uitofp", "tt.dot")
#: Operations that may read the 16-bit integers to which floats are first converted, if a kernel converts them to 8
#: bits.
_OF_WIDE = ("arith.sitofp", "arith.extsi", "arith.cmpi")
#: Operations of integers that reduce a block.
_REDUCED = ("addi", "muli", "maxsi", "minsi", "maxui", "minui", "andi", "ori", "xori")
#: Comparisons of integers, by the comparison of floats that replaces each.
_RELATIONS: Mapping[str, str] = MappingProxyType(
    {"eq": "oeq", "ne": "une", "slt": "olt", "sle": "ole", "sgt": "ogt", "sge": "oge"}
)


class WholeNumbers(Arithmetic, ABC):
    """Operations on integers that are values of tiles."""

    def __init__(
        self,
        function: Function,
        arguments: Mapping[str, Any],
        grid: tuple[int, ...],
        choices: Choices,
        unsteady: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        super().__init__(function, arguments, grid, choices, unsteady)
        #: The indices among which the index of a maximum is chosen, and whether a mask may hide the chosen element.
        self._places = dict[str, tuple[Affine, bool]]()
        #: For each tensor of integers that is stored to, the format of FP8 whose bytes it has; otherwise empty.
        self.bytes_of = dict[str, str]()

    @abstractmethod
    def _load(self, op: Op, pointer: Affine, mask: Known | None, other: Known | None, fmt: str) -> None:
        """Load a block of floats, or of a mask."""

    def _is_of_values(self, op: Op, makers: tuple[str, ...] = _OF_VALUES) -> bool:
        """Return whether floats, or a product, are computed from the result of an operation."""
        readers = self._uses.get(op.results[0], [])
        return any(o.name in makers or (o.name in _PASSING and self._is_of_values(o, makers)) for o in readers)

    def _load_numbers(
        self, op: Op, tensor: IntegerTensor, pointer: Affine | Listed, mask: Known | None, other: Known | None
    ) -> None:
        """Load integers as values of a tile."""
        if not isinstance(pointer, Affine):
            raise op.fail(
                f"{pointer.rest.of}: converting integers at loaded indices to floats, or multiplying them, is not "
                "supported"
            )
        kind = shape_of(op.type)[1]
        if tensor.data is None:
            raise op.fail(
                f"the integers of {pointer.of} are not recorded, because they are reinterpreted or loaded through "
                "a descriptor"
            )
        is_byte = tensor.fmt == "uint8" and kind == "i8" and not self._is_of_values(op, ("tt.dot", "arith.sitofp"))
        if is_byte:
            self._load_bytes(op, tensor, pointer, mask, other)
            return
        if kind not in WHOLE or (tensor.fmt == "uint8") or np.abs(tensor.data).max(initial=0) > MOST_EXACT:
            raise op.fail(
                f"{pointer.of}: the kernel converts integers of {kind} to floats; allowed: signed integers of at "
                "most 2^24"
            )
        ones, name = (1,) * len(AXES), f"{pointer.of}.numbers"
        if self._is_of_values(op, ("tt.dot",)):  # this device has no matrix unit with products of integers
            self.notes.append(f"{op.line}: {pointer.of}: products of integers are timed as products of float16")
            kind = "f16"
        view = MaskView(name, ones, self.choices.fmt(kind), ones, sizes=tensor.sizes, by=tensor.by, holds=tensor.data)
        self.arguments.setdefault(name, view)
        self._said_as(op, pointer.of, kind)
        if isinstance(other, Affine) and other.is_uniform:
            other = _number(op, other, pointer.shape)
        self._load(op, replace(pointer, of=name), mask, other, kind)

    def _load_bytes(
        self, op: Op, tensor: IntegerTensor, pointer: Affine, mask: Known | None, other: Known | None
    ) -> None:
        """Load unsigned integers of 8 bits as signed ones, less 128, and add 128 in float32."""
        ones, name = (1,) * len(AXES), f"{pointer.of}.numbers"
        holds = np.asarray(tensor.data).astype(np.int64) - HALF_BYTE
        view = MaskView(name, ones, self.choices.fmt("i8"), ones, sizes=tensor.sizes, by=tensor.by, holds=holds)
        self.arguments.setdefault(name, view)
        if mask is not None and (other is None or (isinstance(other, Affine) and not any(other.steps))):
            given = 0 if other is None else int(other.base.flat[0]) % (2 * HALF_BYTE)
            if other is not None and np.ptp(other.base):
                raise op.fail(f"{pointer.of}: other= of a load of bytes must be one number")
            low = float(given - HALF_BYTE)
            other = Number(low, literal(low), pointer.shape)
        self.notes.append(
            f"{op.line}: {pointer.of}: npusim stores unsigned bytes as signed ones that are 128 less; the "
            "time includes adding 128"
        )
        self._load(op, replace(pointer, of=name), mask, other, "i8")
        loaded = self.values[op.results[0]]
        assert isinstance(loaded, Floats)
        text = f"({self.text(loaded)}.to({self.choices.fmt('i16')!r}) + {float(HALF_BYTE)!r})"
        pad = None if loaded.pad is None else loaded.pad + HALF_BYTE
        whole = Floats(text, loaded.axes, "i16", pad, is_seen=loaded.is_seen, most=2 * HALF_BYTE - 1)
        named = self._named(op, whole, "byte")
        self._set(op, replace(named, wide=named))

    def _said_as(self, op: Op, of: str, kind: str) -> None:
        """Record integers that are stored here as floats."""
        if WHOLE.get(kind, "int8") != "int8":
            self.notes.append(f"{op.line}: {of}: npusim stores integers of {kind} as {WHOLE[kind]}, exact up to 2^24")

    def _result_of(self, op: Op, of: str, kind: str) -> None:
        """Convert a tensor of integers to a tensor to which values of tiles are stored."""
        tensor = self.arguments[of]
        is_bytes = kind.startswith("f8") and shape_of(self.function.parameters[of])[1] == "i8"
        if not isinstance(tensor, IntegerTensor):
            if of in self.bytes_of and self.bytes_of[of] != (kind if is_bytes else ""):
                raise op.fail(f"{of}: the kernel stores both FP8 numbers and other bytes to one tensor; store one kind")
            return
        self.bytes_of[of] = kind if is_bytes else ""
        is_unknown = of in self.looked and (self._walk is not None or self.looked_at.get(of) is None)
        if is_unknown or any(x.of.partition(".")[0] == of for x in self.loads.values()):
            raise op.fail(
                f"{of}: the kernel both loads and stores these integers, which is not supported; pass a copy to "
                "the kernel"
            )
        if is_bytes:
            self.notes.append(f"{op.line}: {of}: the stored bytes are FP8 numbers, and so are the results of npusim")
        elif kind not in WHOLE and kind not in EXACT:
            raise op.fail(f"tl.store of integers of {kind} is not supported; allowed: {', '.join(WHOLE)}")
        self._said_as(op, of, kind)
        ones, memory = (1,) * len(AXES), (tensor.storage, tensor.offset)
        view = View(of, ones, self.choices.fmt(kind), ones, sizes=tensor.sizes, by=tensor.by, spans=tensor.spans)
        view = replace(view, described=tensor.sizes, described_by=tensor.by)
        self.arguments[of] = replace(view, storage=memory[0], offset=memory[1])

    def _as_block(self, op: Op, x: Affine, like: tuple[str | None, ...] = ()) -> Floats:
        """Return indices as a block of numbers that is read; ``like``: axes of the block with which they are read."""
        values = values_of(op, x)
        if self._walk is not None or np.abs(values).max() > MOST_EXACT:
            raise unread_integers(op, is_in_loop=self._walk is not None)
        return self._known_block(op, self._unique("indices"), values, f"i{x.bits}", like=like)

    def _indices_of_tiles(self, op: Op, x: Affine, axis: str | None) -> Floats:
        """Return indices along an axis of a loop's tiles, which are the same in each tile, as a tensor that is read
        with the tiles.
        """
        of_axis = [
            (load, i)
            for load in self.loads.values()
            for i, own in enumerate(load.axes)
            if load.is_walked and load.name in self.walks[-1].loads and own and self.root(own) == self.root(axis)
        ]
        along = [i for i, s in enumerate(x.steps) if s]
        if not of_axis or len(along) != 1 or self._walk is None:
            raise op.fail(
                "a loop uses indices as values of a tile; they must run along an axis of a tile that the loop loads"
            )
        known_throughout(op, x)
        (like, i), n, most, shape = of_axis[0], x.shape[along[0]], self._walk.most, x.shape
        values, ones = np.tile(int(x.base.flat[0]) + x.steps[along[0]] * np.arange(n), most), (1,) * len(AXES)
        name = f"indices_{self._unique('of')}"
        fmt = self.choices.fmt(f"i{x.bits}")
        self.arguments[name] = MaskView(name, ones, fmt, ones, sizes=(most * n,), by=(1,), holds=values)
        steps = tuple(int(k == along[0]) for k in range(len(shape)))
        start = np.arange(most)[None] * n
        rule = "slt", Affine(-like.left[i], steps, shape)
        before = self.values.pop(op.results[0], None)
        self._load(op, Affine(start, steps, shape, name), Condition((rule,)), None, f"i{x.bits}")
        result = self.values.pop(op.results[0])
        if before is not None:
            self.values[op.results[0]] = before
        assert isinstance(result, Floats)
        self.notes.append(
            f"{op.line}: the indices of a loop's tiles are treated as a tensor in memory; the time includes loading it"
        )
        return result

    def _fixed_choice(self, op: Op, mask: Condition | Elements, a: Known, b: Known) -> None:
        """Write a choice by a mask of indices; in a loop, the mask has one index in each program (that of a label)."""
        if self._walk is None or (result := self._is_at_index(op, mask)) is None:
            self._other_choice(op, mask, a, b)
            return
        is_at, relation = result
        self._by_value(op, is_at, *((a, b) if relation == "eq" else (b, a)))

    def _other_choice(self, op: Op, mask: Condition | Elements, a: Known, b: Known) -> None:
        """Write a choice by another mask of indices."""
        super()._fixed_choice(op, mask, a, b)

    def _by_value(self, op: Op, mask: ValueComparison, a: Known, b: Known) -> None:
        """Write a choice by a mask of values; also between integers, if both are values of a tile or known at
        launch.
        """
        fmt = shape_of(op.type.rpartition(", ")[2])[1]
        if op.name != "arith.select" or fmt not in WHOLE or self._walk is not None:
            super()._by_value(op, mask, a, b)
            return
        pair = [self._as_value(op, x) if isinstance(x, Affine | Listed | Elements) else x for x in (a, b)]
        super()._by_value(op, mask, *pair)
        result, known = self.values[op.results[0]], [_most_of(x) for x in pair]
        if isinstance(result, Floats) and all(x is not None for x in known):
            self._set(op, replace(result, most=max(1, *(x or 0 for x in known))))

    def _arith_select(self, op: Op, mask: Known, a: Known, b: Known) -> None:
        """Read a choice of integers outside loops, some of which are values of a tile, as a choice of such values."""
        is_of_values = (
            isinstance(a, Floats) != isinstance(b, Floats) and shape_of(op.type.rpartition(", ")[2])[1] in WHOLE
        )
        if is_of_values and self._walk is None:
            a, b = (self._as_value(op, x) if isinstance(x, Affine | Listed | Elements) else x for x in (a, b))
        super()._arith_select(op, mask, a, b)

    def _is_at_index(self, op: Op, mask: Condition | Elements) -> tuple[ValueComparison, str] | None:
        """Return the place in a loop's tile of the one index of its program, and the comparison of the mask with it.

        None for other masks: the indices must be neighbours along one axis, in tiles at equal distances.
        """
        if self._walk is None or isinstance(mask, Elements) or mask.either or len(mask.of) != 1 or not self._walk.loads:
            return None
        (relation, d), times = mask.of[0], np.arange(self._walk.most)[None]
        along = [i for i, s in enumerate(d.steps) if s]
        if relation not in ("eq", "ne") or len(along) != 1 or abs(d.steps[along[0]]) != 1 or d.base.shape[1] < 2:
            return None
        base = d.base * d.steps[along[0]]  # the first index of a tile, without the program's part
        step = int(base[0, 1] - base[0, 0])
        is_even = step > 0 and self._only is None and not np.any(base != base[:, :1] + step * times)
        if not is_even or np.abs(base).max() + d.shape[along[0]] > MOST_EXACT:
            return None
        lanes = np.arange(d.shape[along[0]]).reshape([-1 if i == along[0] else 1 for i in range(len(d.shape))])
        own = (-base[:, 0]).reshape(-1, 1, *(1 for _ in d.shape))
        block = self._known_block(op, self._unique("lanes"), lanes[None, None], "i32")
        index = self._known_block(op, self._unique("index"), own, "i32")
        number = f"{index.text} - {self._walk.loads[0]}.index * {float(step)!r}"
        text = f"compare({block.text}, {number}, 'oeq')"
        self.notes.append(
            f"{op.line}: one index of a loop's tiles is compared with the indices of the lanes, "
            "which are treated as a tensor in memory"
        )
        return ValueComparison(Floats(text, self._joined(block, index), MASK)), relation

    def _stored_integers(self, op: Op, x: Affine | Listed | ListedMask | Elements | Condition, of: str) -> Known:
        """Return integers that are known at launch, for a store: as a block, or as one number; addresses
        are unchanged.
        """
        if (isinstance(x, Affine) and x.of) or (isinstance(x, Listed) and x.rest.of):
            return x
        is_signed = not self.arguments[of].fmt.startswith("uint")
        if isinstance(x, Affine) and x.is_uniform and (is_signed or x.base.flat[0] >= 0):
            return _number(op, x, x.shape)
        return self._known_integers(op, x, is_signed=is_signed)

    def _known_integers(
        self, op: Op, x: Affine | Listed | ListedMask | Elements | Condition, *, is_signed: bool
    ) -> Floats:
        """Return integers, or a mask, that are known at launch, as a block of numbers that the kernel reads."""
        x = self._as_loaded(op, x)[0] if isinstance(x, Affine | Listed) else x
        given = elements_in(op, x)
        values = given.values if is_signed else without_sign(given.values, given.bits).astype(np.int64)
        if self._walk is not None or np.abs(values).max(initial=0) > MOST_EXACT:
            raise unread_integers(op, is_in_loop=self._walk is not None)
        bits = max(given.bits, 8 if is_signed else 16)
        is_one = values.ndim == len(("program", "iteration"))
        block = values[..., None] if is_one else values
        result = self._known_block(op, self._unique("integers"), block, f"i{bits}")
        most = int(np.abs(values).max(initial=0))
        return replace(result, axes=() if is_one else result.axes, most=most, is_seen=True)

    def _without_sign(self, op: Op, of: str, x: Floats) -> Floats:
        """Return integers as unsigned numbers if the tensor to which they are stored has unsigned elements."""
        tensor = self.arguments[of]
        if not isinstance(tensor, IntegerTensor) or not tensor.fmt.startswith("uint") or x.is_seen:
            return x
        if x.fmt.startswith("f8"):  # its bytes
            return x
        if (bits := int(tensor.fmt.removeprefix("uint"))) > min(16, int(x.fmt[1:]) if x.fmt in WHOLE else 0):
            raise op.fail(f"{of}: storing computed values as {tensor.fmt} is not supported; allowed: uint8")
        wide = replace(x, text=f"{self.text(x)}.to('float32')", fmt="i16") if x.fmt == "i8" else x
        wide = self._named(op, wide, "signed")
        text = f"where(compare({wide.text}, 0.0, 'olt'), {wide.text} + {float(1 << bits)!r}, {wide.text})"
        result = Floats(text, x.axes, "i16", x.pad if (x.pad or 0) >= 0 else None)
        self._emit(f"{(name := self._unique('unsigned'))} = {text}", op.line)
        return replace(result, text=name)

    def _arith_cmpf(self, op: Op, a: Known, b: Known) -> None:
        if not (isinstance(a, _KEPT) and isinstance(b, _KEPT)) or (isinstance(a, Number) and isinstance(b, Number)):
            if any(isinstance(x, Affine | Elements) for x in (a, b)):
                raise op.fail("a comparison of indices as floats, some of which the floats round, is not supported")
            super()._arith_cmpf(op, a, b)
            return
        if isinstance(compared := as_integers(op, a, b), bool):
            self._set(op, constant(compared, shape_of(op.type)[0], bits=1))
            return
        relation, one, other = compared
        self._arith_cmpi(replace(op, text=f"arith.cmpi {relation}, {op.text.partition(', ')[2]}"), one, other)

    def _arith_sitofp(self, op: Op, x: Known) -> None:
        fmt = shape_of(op.type)[1]
        is_index = isinstance(x, Affine | Elements) and is_exact(op, x)
        if is_index and are_only_compared(op, self._readers, self._makers, self._made_of):
            self._set(op, x)
            return
        x = x.wide if isinstance(x, Floats) and x.wide else x
        if isinstance(x, Affine) and any(x.steps):
            x = self._as_block(op, x)
        if isinstance(x, Elements | ListedMask | Condition) or (isinstance(x, Listed) and not x.rest.of):
            x = self._known_integers(op, x, is_signed=True)
        number = self._of_loop(x) if isinstance(x, Affine) else None
        if isinstance(x, Affine) and number and not np.array_equal(x.base[0], np.arange(x.base.shape[1])):
            self._set(op, number)
            return
        if isinstance(x, Affine) and self._walk is None and np.ptp(x.base):  # the number differs between programs
            x = self._known_integers(op, x, is_signed=True)
        if not isinstance(x, Floats):
            super()._arith_sitofp(op, x)
        elif self.choices.fmt(fmt) == self.choices.fmt(x.fmt):
            self._set(op, replace(x, fmt=fmt))
        else:
            self._cast(op, x)

    def _arith_uitofp(self, op: Op, x: Known) -> None:
        if isinstance(x, Floats):
            if x.fmt not in WHOLE or x.wide is None:
                raise op.fail("converting computed values to floats as unsigned integers is not supported")
            self._cast(op, x.wide)
        elif isinstance(x, Listed) and not x.rest.of:
            self._cast(op, self._known_integers(op, x, is_signed=False))
        else:
            super()._arith_uitofp(op, x)

    def _arith_fptosi(self, op: Op, x: Known) -> None:
        """Read floats as integers: truncated toward 0; values beyond the type saturate here."""
        kind = shape_of(op.type)[1]
        if kind not in WHOLE or not isinstance(x, Floats):
            raise op.fail(
                f"converting this value to {kind} is not supported; blocks of floats can become {', '.join(WHOLE)}"
            )
        result = next((o for o in self._made if op.operands[0] in o.results), None)
        is_whole = result is not None and (
            result.name in TO_WHOLE or "__nv_round" in result.text or "__nv_rint" in result.text
        )
        x = x if is_whole else self._cut(op, x)
        if self.choices.converts_wide and kind == "i8":
            self._set_low_bits(op, x)
        else:
            self._set_within(op, x, kind)

    def _cut(self, op: Op, x: Floats) -> Floats:
        """Return floats cut toward 0."""
        self._to_whole(op, x, "npusim.trunc")
        result = self.values[op.results[0]]
        assert isinstance(result, Floats)
        return result

    def _arith_fptoui(self, op: Op, x: Known) -> None:
        """Read floats as unsigned integers of 8 bits: of 16 bits, 0 to 65535, of which a store writes the low 8."""
        # a reference reads the numbers that a device converts
        is_read = self.choices.converts_wide or self.choices.is_exact
        if shape_of(op.type)[1] != "i8" or not isinstance(x, Floats) or not is_read:
            raise op.fail("converting floats to unsigned integers is supported only for blocks, to uint8, on GPUs")
        why = (
            "floats are converted to unsigned integers of 16 bits (NaN and negative values to 0, larger values to "
            "65535), and a store"
        )
        self.notes.append(f"{op.line}: {why} writes their low 8 bits, as compiled code for GPUs does")
        cut = self._named(op, self._cut(op, x))
        text = f"where(compare({cut.text}, 0.0, 'ogt'), minimum({cut.text}, 65535.0), 0.0)"
        pad = None if x.pad is None or math.isnan(x.pad) else float(int(min(max(x.pad, 0.0), 65535.0)))
        wide = self._named(op, Floats(text, x.axes, "i16", pad, most=65535))
        high = self._named(op, self._cut(op, Floats(f"({wide.text} * {2.0**-8!r})", x.axes, "f32")))
        low = Floats(
            f"({wide.text} - {high.text} * 256.0)", x.axes, "i16", None if pad is None else pad % 256, most=255
        )
        self._set(op, replace(self._named(op, low), wide=wide, is_seen=True))

    def _set_low_bits(self, op: Op, x: Floats) -> None:
        """Set whole numbers as 8-bit integers that are converted via 16-bit ones, with which the kernel continues."""
        why = (
            "floats are converted to integers of 16 bits (values beyond the range to its limits, NaN to 0), and a "
            "store writes their low 8 bits"
        )
        self.notes.append(f"{op.line}: {why}, as compiled code for GPUs does")
        given = self._named(op, x)
        is_stored = any(o.name not in _OF_WIDE for o in self._uses.get(op.results[0], []))
        is_read = any(o.name in _OF_WIDE for o in self._readers(op))
        wide = self._within(op, given, "i16") if is_read else None
        pad = None if x.pad is None or not abs(x.pad) <= whole_limits(8)[1] else x.pad + 0.0
        low = Floats(f"{given.text}.to({WHOLE['i8']!r}, overflow='low_bits')", x.axes, "i8", pad)
        wide = self._named(op, wide) if wide is not None else None
        self._set(op, replace(self._named(op, low) if is_stored else low, wide=wide))

    def _set_within(self, op: Op, x: Floats, kind: str) -> None:
        """Set whole numbers as integers: those beyond the limits become the limits, NaN is 0, and -0 is +0."""
        (low, most), fmt = whole_limits(int(kind[1:])), self.choices.fmt(kind)
        high = float(most) if self.choices.is_exact else float(np.float32(most))
        how = "as GPUs convert them" if self.choices.converts_wide else "compiled code may give other numbers"
        how += "" if most == high else f"; {most} is {high:.0f} in float32"
        self.notes.append(
            f"{op.line}: floats beyond {low:.0f} and {most} are converted to these limits, and NaN to 0: {how}"
        )
        if fmt == "int8":
            pad = None if x.pad is None or math.isnan(x.pad) else min(max(x.pad, low), high) + 0.0
            self._bind(op, Floats(f"{self.text(x)}.to({fmt!r}, overflow='saturate')", x.axes, kind, pad))
        else:
            self._bind(op, self._within(op, x, kind))

    def _within(self, op: Op, x: Floats, kind: str) -> Floats:
        """Return whole numbers of floats within the limits of integers."""
        low, most = map(float, whole_limits(int(kind[1:])))
        high = most if self.choices.is_exact else float(np.float32(most))
        pad = None if x.pad is None or math.isnan(x.pad) else min(max(x.pad, low), high) + 0.0
        made = self._named(op, x)
        text = f"where(compare({made.text}, 0.0, 'one'), maximum(minimum({made.text}, {high!r}), {low!r}), 0.0)"
        return Floats(text, x.axes, kind, pad)

    def _resized(self, op: Op, x: Known) -> None:
        if isinstance(x, ValueComparison) and op.name == "arith.extui" and shape_of(op.type)[1] in WHOLE:
            self._by_value(op, x, Number(1.0, "1.0"), Number(0.0, "0.0"))
            result = self.values[op.results[0]]
            if isinstance(result, Floats):
                self._set(op, replace(result, most=1))
            return
        if not isinstance(x, Floats):
            self._known_resized(op, x)
            return
        kind = shape_of(op.type)[1]
        x = x.wide if x.wide and op.name == "arith.extsi" else x
        has_room = kind in WHOLE and 0 < x.most <= whole_limits(int(kind[1:]))[1]
        has_no_sign = x.wide is not None and 0 < x.most < 2 * HALF_BYTE and x.wide.text == x.text
        if has_no_sign and op.name == "arith.extsi":
            raise op.fail("bytes that are loaded as unsigned are used as signed; convert them with .to(tl.int8)")
        is_extended = op.name == "arith.extui" and not has_no_sign
        if kind not in WHOLE or (int(kind[1:]) < int(x.fmt[1:]) and not has_room) or is_extended:
            raise op.fail(
                f"values of a tile of {x.fmt} cannot be converted to {kind}; allowed: signed integers of as many "
                "bits or more"
            )
        if self.choices.fmt(kind) == self.choices.fmt(x.fmt):
            self._set(op, replace(x, fmt=kind))
        else:
            self._cast(op, x)

    _arith_extsi = _arith_extui = _arith_trunci = _arith_index_cast = _resized

    def _known_resized(self, op: Op, x: Known) -> None:
        """Read known integers in a type with another number of bits; entries of a table that wrap or become unsigned
        are read by elements.
        """
        try:
            super()._resized(op, x)
        except ProgramError:
            if not isinstance(x, Listed) or x.rest.of or self._walk is not None:
                raise
            given = elements_in(op, self._as_loaded(op, x)[0])
            bits, is_signed = bits_of(op.type), op.name != "arith.extui"
            values = given.values if is_signed else without_sign(given.values, given.bits).astype(np.int64)
            self._set(op, Elements(wrapped(values, bits), bits, given.work, given.why))

    def _arith_cmpi(self, op: Op, a: Known, b: Known) -> None:
        if not isinstance(a, Floats) and not isinstance(b, Floats):
            super()._arith_cmpi(op, a, b)
            return
        relation = op.text.split()[1].rstrip(",")
        if relation not in _RELATIONS:
            raise op.fail("an unsigned comparison of the values of a tile is not supported")
        like = next(x.axes for x in (a, b) if isinstance(x, Floats))
        one, other = (self._as_value(op, x.wide if isinstance(x, Floats) and x.wide else x, like) for x in (a, b))
        text = f"compare({self.text(one)}, {self.text(other)}, {_RELATIONS[relation]!r})"
        axes = self._joined(*(x for x in (one, other) if isinstance(x, Floats)))
        chosen = [is_hidden for x, y in ((a, b), (b, a)) if (is_hidden := self._is_hidden_place(x, y)) is not None]
        if any(chosen):
            why = "the index of a masked element counts as the index of the first masked element"
            self.notes.append(f"{op.line}: {why}, also if masked elements are the maximum again")
        pad = float(relation == "ne") if chosen and relation in ("eq", "ne") else None
        self._bind(op, Floats(text, axes, MASK, pad))
        self._set(op, ValueComparison(self.values[op.results[0]]))  # type: ignore[arg-type]

    def _is_hidden_place(self, place: Known, index: Known) -> bool | None:
        """Return whether a mask may hide the element of a maximum's index; None if the integers do not belong to its
        block.

        ``place``: the index of a maximum, one of the integers ``index`` of the same block.
        """
        if not isinstance(place, Floats) or place.text not in self._places or not isinstance(index, Affine):
            return None
        known, is_hidden = self._places[place.text]
        (at, *more), steps = [i for i, s in enumerate(index.steps) if s] or [0], [s for s in known.steps if s]
        is_along = not more and place.axes[at] is None and [index.steps[at]] == steps
        return is_hidden if is_along and not np.any(index.base != known.base) else None

    def _as_number(self, x: Affine, kind: str) -> Number | None:
        """Return, as whole numbers, a state of integers that begins with one number; None for another state."""
        is_one = x.is_uniform and not x.of and kind in WHOLE
        value = float(x.base.flat[0])
        return Number(value, literal(value), x.shape) if is_one and abs(value) <= MOST_EXACT else None

    def _integer(self, op: Op, a: Known, b: Known) -> None:
        one, other = (a, b) if isinstance(a, Floats) else (b, a)
        if not isinstance(one, Floats):
            super()._integer(op, a, b)
            return
        if op.name != "arith.addi" or one.text not in self._places or not isinstance(other, Affine):
            why = "values of a tile; only the index of a tl.argmax or tl.argmin can be added to numbers of the loop"
            raise op.fail(f"{op.name} of integers that are {why}")
        index, _ = self._places[one.text]
        most = np.abs(index.base).max() + sum(abs(s) * n for s, n in zip(index.steps, index.shape, strict=True))
        if most + np.abs(other.base).max() > MOST_EXACT:
            raise op.fail("an index of tl.argmax or tl.argmin is above 2^24, which float32 cannot represent")
        number = self._as_value(op, other)
        self._bind(op, Floats(f"({self.text(one)} + {self.text(number)})", one.axes, one.fmt))

    def _of_loop(self, x: Affine) -> Number | None:
        """Return integers that are linear in a loop's number, as a number of its tiles; None for others."""
        times = x.base.shape[1]
        walked = next((y.name for y in self.loads.values() if y.is_walked), "")
        if self._walk is None or times < 2 or not walked or any(x.steps) or np.any(x.base != x.base[:1]):
            return None
        first, step = int(x.base[0, 0]), int(x.base[0, 1] - x.base[0, 0])
        if np.any(x.base[0] != first + step * np.arange(times)) or np.abs(x.base).max() > MOST_EXACT:
            return None
        return Number(math.nan, f"({walked}.index * {float(step)!r} + {float(first)!r})", x.shape, is_known=False)

    def _as_value(self, op: Op, x: Known, like: tuple[str | None, ...] = ()) -> Floats | Number:
        """Return an integer as a value of a tile: an existing one, one number, or indices; ``like`` as above."""
        if isinstance(x, Affine) and x.is_uniform:
            return _number(op, x, x.shape)
        if isinstance(x, Affine) and (number := self._of_loop(x)) is not None:
            return number
        if isinstance(x, Listed | Elements) and self._walk is None and not (isinstance(x, Listed) and x.rest.of):
            x = self._known_integers(op, x, is_signed=True)
        result = self._as_block(op, x, like) if isinstance(x, Affine) else x
        if not isinstance(result, Floats):
            raise op.fail(f"{op.name} of a value of a tile and of loaded integers is not supported")
        return result

    def _tt_dot(self, op: Op, a: Known, b: Known, c: Known) -> None:
        shape, kind = shape_of(op.type)
        if kind in WHOLE:
            is_zero = isinstance(c, Affine) and not any(c.steps) and not np.any(c.base)
            inner = shape_of("tensor" + re.findall(r"tensor(<[^>]*>)", op.text)[0])[0][1]
            carried = {n: x.held for walk in self.walks for n, x in walk.entered.items()}
            held = carried.get(op.operands[2]) if isinstance(c, Floats) else None
            is_carried = held is not None and held.start == 0.0
            count = inner * (sum(int(walk.counts.max()) for walk in self.walks) if is_carried else 1)
            most = MOST_EXACT // max(1, self._largest(op.operands[0]) * self._largest(op.operands[1]))
            if not (is_zero or is_carried) or count > most:
                why = f"tl.dot of integers adds {count:,} products" if is_zero or is_carried else "a tl.dot of integers"
                why += f"; float32 adds only {most:,} exactly" if is_zero or is_carried else " is added to others"
                raise op.fail(f"{why}; this is not supported: convert shorter products to float32 and add them")
            c = Number(0.0, "0.0", shape) if is_zero else c
        super()._tt_dot(op, a, b, c)

    def _largest(self, name: str) -> int:
        """Return the largest magnitude of a factor of a product of integers: that of the data, if it is loaded."""
        loads = [self.values[o.operands[0]] for o in self.looked_up(name).values()]
        tensors = [self.arguments[x.of.partition(".")[0]] for x in loads if isinstance(x, Affine)]
        known = [x.data for x in tensors if isinstance(x, IntegerTensor) and x.data is not None]
        makers = [o.name for n in self._made_of(name) for o in self._made if n in o.results]
        is_loaded = len(known) == len(loads) > 0 and "arith.fptosi" not in makers
        return max(int(np.abs(x).max(initial=0)) for x in known) if is_loaded else 1 << 7

    def _tt_reduce(self, op: Op, x: Known, *others: Known) -> None:
        """Read a maximum with its index (of equal maxima, the first), possibly together with other reductions."""
        inner = {o.name for o in op.body}
        is_indexed = len(others) == 1 and isinstance(x, Floats) and isinstance(others[0], Affine)
        if not others and isinstance(x, Affine | Listed | Elements) and self._walk is None and of_integers(op):
            self._known_reduced(op, x)
            return
        if not others and isinstance(x, Floats) and x.most and of_integers(op):
            self._joined_integers(op, x)
            return
        if not is_indexed or "arith.cmpf" not in inner:
            super()._tt_reduce(op, x, *others)
            return
        relations = [o.text.split()[1].rstrip(",") for o in op.body if o.name == "arith.cmpf"]
        is_maximum = "ogt" in relations
        assert isinstance(x, Floats) and isinstance(others[0], Affine)
        at, index = op.number("axis"), others[0]
        is_along = all((step != 0) == (i == at) for i, step in enumerate(index.steps)) and index.steps[at] > 0
        if not is_along or len(op.results) != 2 or not ({"ogt", "olt"} & set(relations)):
            raise op.fail(
                "the only supported reduction over several blocks is a maximum or minimum with its index "
                "(tl.argmax, tl.argmin)"
            )
        if self._uses.get(op.results[1]) and not _is_of_first(op.body):
            why = "tl.argmax and tl.argmin must choose the first of equal elements; "
            raise op.fail(f"{why}remove tie_break_left=False, and choose the smaller index")
        if not is_maximum:
            pad = None if x.pad is None else -x.pad
            x = replace(x, text=f"({self.text(x)} * -1.0)", pad=pad, factors=None, is_low=False)
            self._check_hidden(op, x, "min", -math.inf)
        x = self._named(op, x, "compared")
        assert isinstance(x, Floats)
        largest = replace(op, results=op.results[:1], body=_maximum(op))
        super()._tt_reduce(largest, x)
        best = self.values[op.results[0]]
        assert isinstance(best, Floats)
        if self._uses.get(op.results[1]):
            why = (
                "the index of a maximum or minimum among elements with NaN depends on the device's order of comparisons"
            )
            self.notes.append(f"{op.line}: {why}; npusim's is that of the first extreme number")
            self._place(op, largest, x, best, index)
        if not is_maximum:
            self.values[op.results[0]] = replace(best, text=f"({best.text} * -1.0)")

    def _known_reduced(self, op: Op, x: Affine | Listed | Elements) -> None:
        """Read a reduction of integers that are known at launch, by their elements."""
        given, at, name = elements_in(op, x), op.number("axis"), of_integers(op)
        values = np.moveaxis(given.values, at + 2, 0)
        result = reduce(partial(computed_of, op, name, bits=given.bits), values)
        self._set(op, affine(result) or Elements(result, given.bits, given.work + len(values), given.why))
        if isinstance(known := self.values[op.results[0]], Affine):
            self._set(op, replace(known, bits=given.bits))

    def _tt_scan(self, op: Op, x: Known, *others: Known) -> None:
        """Read cumulative sums, and other scans, of integers that are known at launch by their elements."""
        name = of_integers(op)
        if others or not name or not isinstance(x, Affine | Listed | Elements) or self._walk is not None:
            super()._tt_scan(op, x, *others)
            return
        given, at, is_reversed = elements_in(op, x), op.number("axis"), "reverse = true" in op.text
        values = np.moveaxis(given.values, at + 2, 0)[:: -1 if is_reversed else 1]
        result = [*accumulate(values, partial(computed_of, op, name, bits=given.bits))][:: -1 if is_reversed else 1]
        scanned = np.moveaxis(np.array(result), 0, at + 2)
        self._set(op, affine(scanned) or Elements(scanned, given.bits, given.work + len(values), given.why))
        if isinstance(known := self.values[op.results[0]], Affine):
            self._set(op, replace(known, bits=given.bits))

    def _joined_integers(self, op: Op, x: Floats) -> None:
        """Write a reduction of integers of known magnitude: their sums are exact, and ``or`` of 0 and 1 is a
        maximum.
        """
        name, (shape, _) = of_integers(op), shape_of("tensor" + op.text.rpartition("(tensor")[2])
        most = x.most * (shape[op.number("axis")] if name == "addi" else 1)
        word = {"addi": "addf", "maxsi": "maxnumf", "minsi": "minnumf"} | (
            {"ori": "maxnumf", "andi": "minnumf"} if x.most == 1 else {}
        )
        if most > MOST_EXACT or name not in word:
            raise op.fail(f"a reduction by {op.body[0].name} of integers that are values of a tile")
        body = [replace(op.body[0], name=f"arith.{word[name]}"), *op.body[1:]]
        wide = replace(x, text=f"{self.text(x)}.to('float32')") if x.fmt == "i8" else x
        super()._tt_reduce(replace(op, body=body), wide)
        result = self.values[op.results[0]]
        assert isinstance(result, Floats)
        self._set(op, replace(result, fmt="i32", most=most))

    def _place(self, op: Op, largest: Op, x: Floats, best: Floats, index: Affine) -> None:
        """Set the index of a maximum (of equal maxima, the first) as a second maximum, that of the negated indices."""
        at, axis = op.number("axis"), x.axes[op.number("axis")]
        is_of_tiles = self._walk is not None and index.base.size == 1
        block = self._indices_of_tiles(op, index, axis) if is_of_tiles else self._as_block(op, index, x.axes)
        wide = replace(best, axes=(*best.axes[:at], None, *best.axes[at:]))
        axes, beyond = self._joined(x, wide, block), float(MOST_EXACT)
        is_hidden = axis is not None and self._hidden_maximum(x, axis) is not None
        if is_hidden:  # the first hidden element comes after all visible ones
            beyond = float(index.base.flat[0] + index.steps[at] * self._first_hidden(op, axis))
        text = f"where(compare({self.text(x)}, {self.text(wide)}, 'oeq'), -{block.text}, {-beyond!r})"
        first = self._named(op, Floats(text, axes, "f32", -beyond, is_low=True), "places")
        super()._tt_reduce(replace(largest, results=op.results[1:]), first)
        found = self.values[op.results[1]]
        assert isinstance(found, Floats)
        place = self._named(op, replace(found, text=f"({found.text} * -1.0)", fmt="i32"), "place")
        self.values[op.results[1]] = place
        if not is_hidden or (x.pad is not None and math.isfinite(x.pad)):
            self._places[place.text] = index, is_hidden
        self.notes.append(f"{op.line}: npusim computes a maximum with its index as two maxima; NaN has no index")

    def _first_hidden(self, op: Op, axis: str | None) -> int:
        """Return the first element along an axis that a mask hides, if it is the same in all programs and loads."""
        found = set[int]()
        for load in self.loads.values():
            for own, left in zip(load.axes, load.left, strict=True):
                if self.root(own) == self.root(axis):
                    found |= set(np.unique(left).tolist())
        if len(found) != 1:
            why = "tl.argmax or tl.argmin may choose a masked element, and not the same one in all"
            raise op.fail(f"{why} programs; load with other=-inf for a maximum, other=inf for a minimum")
        return found.pop()


def _most_of(x: Known) -> int | None:
    """Return the largest magnitude of integers, None if it is not known."""
    if isinstance(x, Number):
        return abs(int(x.value)) if x.is_known else None
    return (x.most or None) if isinstance(x, Floats) else None


def unread_integers(op: Op, *, is_in_loop: bool) -> ProgramError:
    """Return the error of known integers that a kernel uses as values and that npusim does not read as such."""
    if is_in_loop:
        return op.fail(
            "integers of a block in a loop, such as indices, are used as values, which is not supported here"
        )
    return op.fail("integers of a block beyond 2^24 are used as values, which is not supported here")


def of_integers(op: Op) -> str:
    """Return the only operation of integers with which a reduction joins elements (``addi``, ...); empty for other
    reductions.
    """
    inner = [o.name.partition(".")[2] for o in op.body]
    return inner[0] if len(inner) == 2 and inner[0] in _REDUCED else ""


def _is_of_first(body: Sequence[Op]) -> bool:
    """Return whether a reduction of pairs returns the greater, or lesser, element, and of equal ones the lesser index,
    in the form in which Triton writes tl.max, tl.min, tl.argmax and tl.argmin.
    """
    result = makers(body)

    def of(name: str) -> Op:
        return result.get(name, body[-1])

    if len(body[-1].operands) != 2:
        return False
    value, index = map(of, body[-1].operands)
    is_better = of(value.operands[0])
    parts = {o.name: o for o in map(of, is_better.operands)}
    first, equal = parts.get("arith.cmpf"), parts.get("arith.andi")
    if first is None or equal is None or is_better.name != "arith.ori" or (value.name, index.name) != _SELECTS:
        return False
    ties = {o.name: o for o in map(of, equal.operands)}
    same, less = ties.get("arith.cmpf"), ties.get("arith.cmpi")
    if same is None or less is None or " oeq," not in same.text or " slt," not in less.text:
        return False
    is_one = value.operands[0] == index.operands[0] and value.operands[1:] == first.operands == same.operands
    return is_one and index.operands[1:] == less.operands


def _number(op: Op, x: Affine, shape: tuple[int, ...]) -> Number:
    """Return an integer that is the same in all programs as a number; refuse one that float32 cannot represent."""
    integer = int(x.base.flat[0])
    if int(np.float32(integer)) != integer:
        raise op.fail(f"{integer} is an integer of a tile; npusim uses float32 for it, which cannot represent it")
    return Number(value := float(integer), literal(value), shape)


def _maximum(op: Op) -> list[Op]:
    """Return the body of a maximum."""
    end = op.body[-1]
    return [Op("arith.maxnumf", [], [], "arith.maxnumf", "f32", op.line), replace(end, operands=end.operands[:1])]
