"""TTIR in float64, program by program and operation by operation: the results of a launch without rounding.

The errors of a launch are relative to this walk.  It shares only the parser of `npusim.kernels.triton.reader`:
integers, addresses, masks and values are evaluated as the operations state, so that a fault of the reader shows as an
error. Sums run from left to right, and add each product by a fused multiply-add.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.errors import ProgramError
from npusim.formats.whole import bits_of_floats, floats_of_bits, whole_operation
from npusim.kernels.triton.added_parts import has_atomics
from npusim.kernels.triton.arithmetic import BINARY, LIBDEVICE, NUMBERS, TO_WHOLE
from npusim.kernels.triton.own_maxima import with_maxima
from npusim.kernels.triton.reloaded import with_values_kept
from npusim.kernels.triton.rolled_rows import with_scratch_kept
from npusim.kernels.triton.tensor_axes import IntegerTensor
from npusim.kernels.triton.ttir_text import FORMATS, Function, Op, refusing, shape_of
from npusim.kernels.triton.values import COLUMNS, ROWS, Tensor, number_of
from npusim.program.numerics.reference import multiplied, summed

if TYPE_CHECKING:
    from npusim.kernels.triton.launch_phases import LaunchGrid
    from npusim.program.ir.tile import GlobalTensor
    from npusim.program.numerics.executor import HeadSource

Array = NDArray[Any]
F64 = "float64"
#: Name of the first result in a program.
RESULT = "o"
#: Number of converted matrices that are stored: Q, K and V of a head, and those that belong to them.
MATRICES = 16
_DTYPES: Mapping[str, Any] = MappingProxyType(
    {"i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "index": np.int64}
    | dict.fromkeys(FORMATS, np.float64)
)


def _unsigned(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return a function of unsigned integers, applied to signed integers."""

    def of(a: Array, b: Array) -> Array:
        kind = np.dtype(f"u{a.dtype.itemsize}")
        return np.asarray(function(a.view(kind), b.view(kind))).view(a.dtype)

    return of


def _high_bits(a: Array, b: Array) -> Array:
    """Return the upper halves of the bits of products of unsigned integers."""
    bits = a.dtype.itemsize * 8
    return np.asarray(whole_operation("mulhiui", a.astype(np.int64), b.astype(np.int64), bits), a.dtype)


def _quotient(a: Array, b: Array) -> Array:
    return np.asarray((a - np.fmod(a, b)) // b, a.dtype)


#: Operations on two integers of one type, whose results wrap in that type.
_INTEGERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    dict[str, Callable[..., Any]](divsi=_quotient, ceildivsi=lambda a, b: -_quotient(-a, b))
    | {"addi": np.add, "subi": np.subtract, "muli": np.multiply, "remsi": np.fmod}
    | {"andi": np.bitwise_and, "ori": np.bitwise_or, "xori": np.bitwise_xor}
    | {"shli": np.left_shift, "shrsi": np.right_shift, "shrui": _unsigned(np.right_shift)}
    | {"minsi": np.minimum, "maxsi": np.maximum, "divui": _unsigned(np.floor_divide), "remui": _unsigned(np.remainder)}
    | {"minui": _unsigned(np.minimum), "maxui": _unsigned(np.maximum), "mulhiui": _high_bits}
)
_RELATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
)
_NAMED = (
    *(formats.exp, formats.exp2, formats.log, formats.log1p, formats.log2),
    *(formats.rsqrt, formats.sqrt, formats.erf, formats.tanh),
)
_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    dict[str, Callable[..., Any]]({f"math.{f.__name__}": partial(f, fmt=F64) for f in _NAMED})
    | {"tt.precise_sqrt": partial(formats.sqrt, fmt=F64), "math.absf": np.abs, "arith.negf": np.negative}
    | {name: function for name, (_, function) in TO_WHOLE.items()}
)
_REDUCTIONS: Mapping[str, Callable[[Array], Any]] = MappingProxyType(
    {
        "arith.addf": summed,
        "arith.maxnumf": partial(formats.reduce_max, fmt=F64),
        "arith.maximumf": partial(formats.reduce_max, fmt=F64, nan="propagate"),
        "arith.minnumf": lambda x: -formats.reduce_max(-x, fmt=F64),
        "arith.minimumf": lambda x: -formats.reduce_max(-x, fmt=F64, nan="propagate"),
    }
)
#: Operations without rounding, and operations that change a block's shape.
_SHAPED = ("arith.truncf", "arith.extf", "tt.fp_to_fp", "ttg.convert_layout", "tt.broadcast", "tt.splat")
_NOTHING = ("llvm.intr.assume", "tt.assert", "gpu.barrier", "block")


class Pointer(NamedTuple):
    """Addresses of elements, relative to the first one of an argument."""

    of: str
    at: Array


#: The values of a block, or its addresses; or a mask that hides nothing.
Elements = Array | Pointer
ALL = np.asarray(True)


def _on(function: Callable[[Array], Array], x: Elements) -> Elements:
    """Return the result of a function of arrays for values or for addresses."""
    return x._replace(at=function(x.at)) if isinstance(x, Pointer) else function(x)


class DescribedBlock(NamedTuple):
    """A tensor's descriptor: its first element, sizes, strides, and the block that it loads or stores."""

    pointer: Pointer
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


#: First row and number of rows of a head.
Span = tuple[int, int]


class KeptResult(NamedTuple):
    """A result whose elements are stored: tensor of the program, parameter, arrangement, and rows by batch and head.

    ``spans``: one span for every head, or the requested heads.
    """

    name: str
    parameter: str
    arranged: Tensor
    spans: Span | Mapping[tuple[int, int], Span]

    def span(self, batch: int, head: int) -> Span:
        """Return the rows of a head that are stored; none if the head is not requested."""
        return self.spans if isinstance(self.spans, tuple) else self.spans.get((batch, head), (0, 0))


@dataclass
class LaunchMemory:
    """The elements that a launch reads, and those that it stores: float64, NaN where there is nothing.

    ``matrix(name, batch, head)``: the matrix of a tensor of the program; ``placed``: the tensors of the program that
    are read, each with its arrangement, by argument.
    """

    arguments: Mapping[str, Any]
    matrix: Callable[[str, int, int], Array]
    placed: Mapping[str, list[tuple[GlobalTensor, Tensor]]]
    results: Sequence[KeptResult]
    #: Parameters of a program at its beginning.
    values: Mapping[str, Any]
    #: Tensors to which each program stores, and from which it loads again.
    scratch: Collection[str]
    #: Requested rows of each result, by name, batch and head.
    stored: dict[tuple[str, int, int], Array] = field(default_factory=dict)
    #: Elements that the current program has stored, by argument and address.
    own: dict[str, dict[int, float]] = field(default_factory=dict)

    def load(self, pointer: Pointer) -> Array:
        """Return elements by their addresses."""
        argument = self.arguments[pointer.of]
        if isinstance(argument, IntegerTensor):
            at = pointer.at
            if np.any((at < 0) | (at >= len(argument.data))):
                raise ProgramError(
                    f"{pointer.of}: the kernel reads an element beyond its {len(argument.data)} elements"
                )
            return np.asarray(argument.data[at])
        values = np.full(pointer.at.shape, np.nan)
        for tensor, arranged in self.placed.get(pointer.of, ()):
            self._read(values, tensor, arranged, pointer.at)
        if own := self.own.get(pointer.of):
            flat = values.reshape(-1)
            for i, at in enumerate(pointer.at.reshape(-1).tolist()):
                flat[i] = own.get(at, flat[i])
        return values

    def _read(self, values: Array, tensor: GlobalTensor, arranged: Tensor, offsets: Array) -> None:
        """Fill in the elements that a tensor of the program has."""
        heads, _, rows, cols, here = _places(arranged, offsets)
        for batch, head, some in _matrices(*heads, here):
            matrix = self.matrix(tensor.name, batch, head)
            matrix = matrix.T if tensor.is_transposed else matrix
            values[some] = matrix[rows[some], cols[some]]

    def store(self, pointer: Pointer, values: Array, mask: Array, *, adds: bool = False) -> None:
        """Store elements, or add to them; only the program itself sees elements of tensors that are not requested
        results.
        """
        values = np.asarray(values)
        if values.dtype == np.int8 and getattr(self.arguments[pointer.of], "fmt", "") == "uint8":
            # the bits are the same, because operations do not know whether a tensor is signed
            values = values.astype(np.uint8)
        at, values = pointer.at[mask], values.astype(np.float64)[mask]
        kept = [x for x in self.results if x.parameter == pointer.of]
        if adds and kept:
            self._add(kept[0], at, values)
            return
        if pointer.of in self.placed or pointer.of in self.scratch:
            self.own.setdefault(pointer.of, {}).update(zip(at.tolist(), values.tolist(), strict=True))
        for result in kept:
            (batch, head), (_, width), rows, cols, here = _places(result.arranged, at)
            for b, h, which in _matrices(batch, head, here):
                first, count = result.span(b, h)
                some = which & (rows >= first) & (rows < first + count)
                if np.any(some):
                    self._matrix_of(result, b, h, width)[rows[some] - first, cols[some]] = values[some]

    def _matrix_of(self, result: KeptResult, batch: int, head: int, width: int) -> Array:
        """Return the stored rows of a head, NaN before the first store to them."""
        if (key := (result.name, batch, head)) not in self.stored:
            self.stored[key] = np.full((result.span(batch, head)[1], width), np.nan)
        return self.stored[key]

    def _add(self, result: KeptResult, at: Array, values: Array) -> None:
        """Add to elements of the result, which begin with the values of the tensor."""
        (batch, head), (_, width), rows, cols, here = _places(result.arranged, at)
        begun = self.load(Pointer(result.parameter, at))
        for i in np.flatnonzero(here).tolist():
            first, count = result.span(b := int(batch[i]), h := int(head[i]))
            if not first <= rows[i] < first + count:
                continue
            matrix, place = self._matrix_of(result, b, h, width), (rows[i] - first, cols[i])
            matrix[place] = (begun[i] if np.isnan(matrix[place]) else matrix[place]) + values[i]


def _places(tensor: Tensor, offsets: Array) -> tuple[tuple[Array, Array], tuple[int, int], Array, Array, Array]:
    """Return batch (with splits) and head of elements, the shape of a matrix, row, column, and whether each element is
    in its matrix.
    """
    offsets = tensor.own(offsets)
    batch, head, split, row, col = (np.broadcast_to(x, offsets.shape) for x in tensor.places(offsets))
    _, heads, splits, rows, cols = tensor.shape
    here = (offsets >= 0) & (batch < tensor.shape[0]) & (head < heads) & (row < rows) & (col < cols)
    return (batch * splits + split, head), (rows, cols), row, col, here & tensor.has(offsets)


def _matrices(batch: Array, head: Array, here: Array) -> Iterator[tuple[int, int, Array]]:
    """Yield batch and head of each matrix that contains elements, in ascending order, and which elements those are."""
    if not np.any(here):
        return
    batches, heads = batch[here], head[here]
    first, last = int(batches.min()), int(batches.max())
    low, high = int(heads.min()), int(heads.max())
    if first == last and low == high:  # this is the case for most blocks, and needs no sorting
        yield first, low, here
        return
    for number in np.unique(batches * (high + 1) + heads).tolist():
        of_batch, of_head = divmod(number, high + 1)
        yield of_batch, of_head, here & (batch == of_batch) & (head == of_head)


class ExactProgram:
    """One program of a launch: every operation is evaluated at its place."""

    #: What the program is evaluated for, as refusals say it.
    purpose: ClassVar[str] = "in float64"

    def __init__(self, operations: Sequence[Op], memory: LaunchMemory, ids: Sequence[int], grid: Sequence[int]) -> None:
        self.memory, self.ids, self.grid = memory, ids, grid
        self.memory.own.clear()
        self.env = dict(memory.values)
        with np.errstate(all="ignore"):
            self._run(list(operations))

    def _run(self, operations: Sequence[Op]) -> list[Any] | None:
        """Return the values that the operations yield; None if the program returns."""
        at = 0
        while at < len(operations):
            op = operations[at]
            at += 1
            if op.name in ("scf.yield", "scf.condition"):
                return [self.env[n] for n in op.operands]
            if op.name == "tt.return":
                return None
            if op.name == "cf.cond_br":
                names = re.findall(r"\^bb\d+", op.text)
                label = names[not self.env[op.operands[0]]]
                at = next(i for i, o in enumerate(operations) if o.name == "block" and o.text == label)
            elif op.name not in _NOTHING:
                with refusing(op.line, op.name):
                    result = self._made(op)
                if op.results:
                    several = result if isinstance(result, list) else [result]
                    self.env.update(zip(op.results, several, strict=True))
        return []

    def _made(self, op: Op) -> Any:
        family, _, name = op.name.partition(".")
        if op.name in ("scf.for", "scf.while"):
            return self._scf_for(op) if op.name == "scf.for" else self._scf_while(op)
        x = [self.env[n] for n in op.operands]
        if (method := getattr(self, f"_{family}_{name}", None)) is not None:
            return method(op, *x)
        if family in ("arith", "tt") and name in _INTEGERS:
            return np.asarray(_INTEGERS[name](*x))
        if op.name in BINARY:
            return np.asarray(NUMBERS[BINARY[op.name]](*x, F64))
        if op.name in _FUNCTIONS:
            return self._float(_FUNCTIONS[op.name], x[0])
        if op.name in _SHAPED:
            return self._shaped(op, x[0])
        raise op.fail(f"npusim cannot evaluate {op.name} {self.purpose}")

    @staticmethod
    def _float(function: Callable[..., Any], x: Array) -> Array:
        return np.asarray(function(np.asarray(x, np.float64).reshape(-1))).reshape(np.shape(x))

    @staticmethod
    def _shaped(op: Op, x: Elements) -> Elements:
        return _on(partial(np.broadcast_to, shape=shape_of(op.type)[0]), x)

    # ---------------------------------------------------------------- integers and shapes

    def _arith_constant(self, op: Op) -> Array:
        value, shape, fmt = number_of(op)
        return np.full(shape, value, _DTYPES[fmt])

    def _tt_get_program_id(self, op: Op) -> Array:
        return np.asarray(self.ids["xyz".index(op.text.split()[1])], np.int32)

    def _tt_get_num_programs(self, op: Op) -> Array:
        return np.asarray(self.grid["xyz".index(op.text.split()[1])], np.int32)

    def _tt_make_range(self, op: Op) -> Array:
        return np.arange(op.number("start"), op.number("end"), dtype=np.int32)

    def _tt_expand_dims(self, op: Op, x: Elements) -> Elements:
        return _on(partial(np.expand_dims, axis=op.number("axis")), x)

    def _tt_reshape(self, op: Op, x: Elements) -> Elements:
        return _on(partial(np.reshape, shape=shape_of(op.type)[0]), x)

    def _tt_trans(self, op: Op, x: Elements) -> Elements:
        return _on(partial(np.transpose, axes=op.numbers("order")), x)

    def _tt_split(self, _op: Op, x: Array) -> list[Array]:
        return [np.asarray(x[..., i]) for i in range(x.shape[-1])]

    def _tt_join(self, _op: Op, a: Array, b: Array) -> Array:
        return np.stack([a, b], -1)

    def _tt_ptr_to_int(self, _op: Op, pointer: Pointer) -> Array:
        return np.ones_like(pointer.at)  # the reader allows only comparisons of it with 0

    def _npusim_of_elements(self, _op: Op, offset: Elements) -> Elements:
        return offset

    def _npusim_reinterpreted(self, op: Op, argument: Pointer, pointer: Pointer) -> Pointer:
        return argument._replace(at=np.asarray(pointer.at * op.number("of") // op.number("to")))

    def _tt_addptr(self, _op: Op, pointer: Pointer, offset: Array) -> Pointer:
        return pointer._replace(at=np.asarray(pointer.at + np.asarray(offset, np.int64)))

    def _converted(self, op: Op, x: Array) -> Array:
        return np.asarray(x).astype(_DTYPES[shape_of(op.type)[1]])

    _arith_extsi = _arith_trunci = _arith_index_cast = _arith_sitofp = _converted

    def _tt_bitcast(self, op: Op, x: Array) -> Elements:
        """Read bits as those of another type; floats are first rounded to their format."""
        of, to = (shape_of(t)[1] for t in op.text.partition(" : ")[2].split(" -> "))
        # bytes of FP8 are stored as the numbers that they represent
        if of in FORMATS and to not in FORMATS and not of.startswith("f8"):
            return np.asarray(bits_of_floats(np.asarray(x), FORMATS[of], F64)).astype(_DTYPES[to])
        if to in FORMATS and of not in FORMATS:
            return floats_of_bits(np.asarray(x), FORMATS[to], F64)
        return self._shaped(op, x)

    def _arith_extui(self, op: Op, x: Array) -> Array:
        x = np.asarray(x)
        return self._converted(op, x if x.dtype == np.bool_ else x.view(f"u{x.dtype.itemsize}"))

    _arith_uitofp = _arith_extui

    def _arith_cmpi(self, op: Op, a: Array, b: Array) -> Array:
        relation = op.text.split()[1].rstrip(",")
        a, b = np.asarray(a), np.asarray(b)
        if relation.startswith("u"):
            a, b = (x.view(f"u{x.dtype.itemsize}") for x in (a, b))
        return np.asarray(_RELATIONS[relation[-2:]](a, b))

    def _arith_cmpf(self, op: Op, a: Array, b: Array) -> Array:
        relation = op.text.split()[1].rstrip(",")
        if relation in ("true", "false"):
            return np.full(np.shape(a), relation == "true")
        return np.asarray(formats.compare(np.asarray(a), np.asarray(b), relation, F64) != 0)

    def _arith_select(self, op: Op, mask: Array, a: Elements, b: Elements) -> Elements:
        if isinstance(a, Pointer) and isinstance(b, Pointer):
            if a.of != b.of:
                if np.any(mask) and not np.all(mask):
                    raise op.fail("a tl.where chooses pointers to different tensors within a block")
                return a if np.all(mask) else b
            return a._replace(at=np.where(mask, a.at, b.at))
        return np.where(mask, a, b)  # type: ignore[arg-type]

    # ---------------------------------------------------------------- floats

    def _math_fma(self, _op: Op, a: Array, b: Array, c: Array) -> Array:
        return np.asarray(formats.fma(a, b, c, F64))

    def _tt_clampf(self, op: Op, x: Array, low: Array, high: Array) -> Array:
        nan = " propagate" if "propagateNan = all" in op.text else ""
        return np.asarray(NUMBERS[f"minimum{nan}"](NUMBERS[f"maximum{nan}"](x, low, F64), high, F64))

    def _tt_extern_elementwise(self, op: Op, x: Array) -> Array:
        symbol = re.findall(r'symbol = "(\w*)"', op.text)[0]
        return self._float(_FUNCTIONS[LIBDEVICE[symbol]], x)

    def _arith_fptosi(self, op: Op, x: Array) -> Array:
        ends = np.iinfo(_DTYPES[shape_of(op.type)[1]])
        return self._converted(op, np.clip(np.trunc(x), ends.min, ends.max))

    def _arith_fptoui(self, op: Op, x: Array) -> Array:
        """Floats beyond the range of an unsigned integer become its limits; the bits of such an integer are treated
        here as those of a signed one.
        """
        kind = np.iinfo(_DTYPES[shape_of(op.type)[1]])
        whole = np.clip(np.trunc(x), 0, (1 << kind.bits) - 1)
        return self._converted(op, np.where(whole > kind.max, whole - (1 << kind.bits), whole))

    def _tt_reduce(self, op: Op, x: Array, *others: Array) -> Any:
        function = _REDUCTIONS.get(op.body[0].name) if len(op.body) == 2 and not others else None
        if len(others) == 1 and np.asarray(others[0]).dtype.kind == "i":
            return self._with_index(op, x, *others)
        if function is None:
            if any(o.body or o.name.startswith("cf.") or o.name in _SHAPED for o in op.body):  # of one element
                return [each[..., -1] for each in self._combined(op, [x, *others])]
            return self._halved(op, [x, *others])
        return np.asarray(function(np.ascontiguousarray(np.moveaxis(x, op.number("axis"), -1))))

    @staticmethod
    def _with_index(op: Op, x: Array, *others: Array) -> list[Array]:
        """Return maxima, or minima, with the index of the first of equal ones."""
        relations = {o.text.split()[1].rstrip(",") for o in op.body if o.name == "arith.cmpf"}
        if len(others) != 1 or not relations & {"ogt", "olt"}:
            raise op.fail(
                "the only supported reduction over several blocks is a maximum or minimum with its index "
                "(tl.argmax, tl.argmin)"
            )
        axis = op.number("axis")
        at = np.expand_dims((np.argmax if "ogt" in relations else np.argmin)(x, axis), axis)
        return [np.take_along_axis(np.asarray(of), at, axis).squeeze(axis) for of in (x, *others)]

    def _tt_scan(self, op: Op, x: Array, *others: Array) -> list[Array]:
        axis = op.number("axis")
        if op.body[0].name == "arith.addf" and len(op.body) == 2 and "reverse = true" not in op.text:
            return [np.cumsum(x, axis=axis)]
        return [np.moveaxis(each, -1, axis) for each in self._combined(op, [x, *others])]

    def _combined(self, op: Op, values: Sequence[Array]) -> list[Array]:
        """Return, for each element along the last axis, the result of a function of two elements applied to all
        elements up to it.
        """
        axis, is_reversed = op.number("axis"), "reverse = true" in op.text
        rows = [np.moveaxis(np.asarray(x), axis, -1) for x in np.broadcast_arrays(*values)]
        rows = [x[..., ::-1] for x in rows] if is_reversed else rows
        result = [[np.asarray(x[..., 0]) for x in rows]]
        for i in range(1, rows[0].shape[-1]):
            result.append(self._function_of(op, result[-1], [x[..., i] for x in rows]))
        whole = [np.stack(x, -1) for x in zip(*result, strict=True)]
        return [x[..., ::-1] for x in whole] if is_reversed else whole

    def _halved(self, op: Op, values: Sequence[Array]) -> list[Array]:
        """Return the result of a function of two elements applied to all elements along an axis: of neighbours, then of
        neighbouring results, as a reduction may be computed.
        """
        rows = [np.moveaxis(np.asarray(x), op.number("axis"), -1) for x in np.broadcast_arrays(*values)]
        while (n := rows[0].shape[-1]) > 1:
            pairs = self._function_of(op, *([x[..., i : n - n % 2 : 2] for x in rows] for i in range(2)))
            pairs = [np.broadcast_to(x, (*rows[0].shape[:-1], n // 2)) for x in pairs]
            rows = [np.concatenate((x, y[..., n - n % 2 :]), -1) for x, y in zip(pairs, rows, strict=True)]
        return [x[..., 0] for x in rows]

    def _function_of(self, op: Op, first: Sequence[Array], second: Sequence[Array]) -> list[Array]:
        """Return the result of a reduction's or scan's function of the ``first`` and the ``second`` elements."""
        self.env |= dict(zip(op.arguments, [*first, *second], strict=True))
        *inner, end = op.body
        self._run(inner)
        return [np.asarray(self.env[n]) for n in end.operands]

    def _tt_dot(self, _op: Op, a: Array, b: Array, c: Array) -> Array:
        kind = np.asarray(c).dtype
        result = multiplied(np.asarray(a, np.float64), np.asarray(b, np.float64)) + c
        return np.asarray(result, kind if kind.kind == "i" else np.float64)

    # ---------------------------------------------------------------- memory

    def _tt_atomic_rmw(self, op: Op, pointer: Pointer, value: Array, mask: Array = ALL) -> Array:
        """Add to elements; no operation reads their previous values."""
        if not op.text.startswith("tt.atomic_rmw fadd"):
            raise op.fail("only tl.atomic_add of floats is supported as an atomic operation")
        whole = np.broadcast_to(value, pointer.at.shape)
        self.memory.store(pointer, whole, np.broadcast_to(mask, pointer.at.shape), adds=True)
        return np.zeros(pointer.at.shape)

    def _tt_load(self, op: Op, pointer: Pointer, mask: Array = ALL, other: Array | None = None) -> Array:
        fmt = shape_of(op.type)[1]
        values = np.zeros(pointer.at.shape, _DTYPES[fmt])
        values = values if other is None else np.array(np.broadcast_to(other, values.shape))
        mask = np.broadcast_to(mask, pointer.at.shape)
        values[mask] = self.memory.load(pointer._replace(at=pointer.at[mask]))
        return values

    def _tt_store(self, _op: Op, pointer: Pointer, values: Array, mask: Array = ALL) -> None:
        shape = pointer.at.shape
        self.memory.store(pointer, np.broadcast_to(values, shape), np.broadcast_to(mask, shape))

    def _tt_make_tensor_descriptor(self, op: Op, pointer: Pointer, *numbers: Array) -> DescribedBlock:
        half, block = len(numbers) // 2, shape_of("tensor<" + op.text.rpartition("<tensor<")[2])[0]
        sizes, strides = (tuple(map(int, some)) for some in (numbers[:half], numbers[half:]))
        return DescribedBlock(pointer, sizes, strides, block)

    def _described(self, x: DescribedBlock, indices: Sequence[Array]) -> tuple[Pointer, Array]:
        at, inside = np.asarray(x.pointer.at, np.int64), np.ones(x.block, bool)
        for axis, (first, size, step, n) in enumerate(zip(indices, x.sizes, x.strides, x.block, strict=True)):
            i = (int(first) + np.arange(n)).reshape(n, *(1 for _ in x.block[axis + 1 :]))
            at, inside = at + i * step, inside & (i >= 0) & (i < size)
        return x.pointer._replace(at=np.broadcast_to(at, x.block)), inside

    def _tt_descriptor_load(self, op: Op, x: DescribedBlock, *indices: Array) -> Array:
        pointer, inside = self._described(x, indices)
        return self._tt_load(op, pointer, inside, np.asarray(0.0))

    def _tt_descriptor_store(self, op: Op, x: DescribedBlock, *rest: Array) -> None:
        is_first = np.ndim(rest[0]) > 0  # the value precedes or follows the indices
        value, indices = (rest[0], rest[1:]) if is_first else (rest[-1], rest[:-1])
        pointer, inside = self._described(x, indices)
        self._tt_store(op, pointer, value, inside)

    # ---------------------------------------------------------------- control

    def _scf_for(self, op: Op) -> list[Any]:
        number, low, high, step, *carried = op.operands
        first, end, each = (int(self.env[n]) for n in (low, high, step))
        kind = np.asarray(self.env[low]).dtype
        state = [self.env[n] for n in carried[1::2]]
        for i in range(first, end, each):
            self.env.update(zip((number, *carried[::2]), (np.asarray(i, kind), *state), strict=True))
            state = self._run(op.body) or []
        return state

    def _scf_while(self, op: Op) -> list[Any]:
        state, arguments = [self.env[n] for n in op.operands[1::2]], op.otherwise[0]
        while True:
            self.env.update(zip(op.operands[0::2], state, strict=True))
            does, *state = self._run(op.body) or []
            if not does:
                return state
            self.env.update(zip(arguments.results, state, strict=True))
            state = self._run(op.otherwise) or []

    def _scf_if(self, op: Op, condition: Array) -> list[Any]:
        return self._run(op.body if condition else op.otherwise) or []


def values_of(function: Function, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a kernel's parameters at the start of a program."""
    values, parameters = dict[str, Any](), list(function.parameters.items())
    while parameters:
        name, kind = parameters.pop(0)
        x = arguments[name]
        if kind.startswith("!tt.tensordesc"):
            count = 2 * len(shape_of(kind)[0])  # the next parameters are its sizes and strides
            values[name] = DescribedBlock(Pointer(name, np.asarray(0)), x.described, x.described_by, shape_of(kind)[0])
            numbers = (np.asarray(n, np.int64) for n in (*x.described, *x.described_by))
            values |= zip([n for n, _ in parameters[:count]], numbers, strict=True)
            del parameters[:count]
        elif "ptr" in kind:
            values[name] = Pointer(name, np.asarray(0, np.int64))
        else:
            number = np.float32(x) if kind in FORMATS else x  # in the form in which a launch passes it
            values[name] = np.asarray(number).astype(_DTYPES[kind])
    return values


class ExactLaunch:
    """The results of a launch in float64, computed by the programs that store them."""

    def __init__(
        self,
        function: Function,
        arguments: Mapping[str, Any],
        size: Sequence[int],
        grids: Sequence[LaunchGrid],
        others: Callable[[], Sequence[LaunchGrid]],
    ) -> None:
        """``function``: the unchanged TTIR; ``size``: number of programs along each axis; ``grids``: the grids of a
        launch, of which the first states the rows that each program stores; ``others``: the same grids, with the axes
        that tensors have if a matrix unit adds up all tiles of a product.
        """
        self.function, self.arguments, self.size = with_maxima(function)[0], arguments, size
        self._others, self._inputs = others, dict[str, Any]()
        self._scratch = with_scratch_kept(function)[1].keys() | with_values_kept(function, arguments)[2].keys()
        self._place(grids)
        #: The latest inputs, and their matrices in float64.
        self._inputs_of: HeadSource | None = None
        self._matrix: Callable[[str, int, int], Array]
        #: The latest rows and programs, and the values that the programs store; the next request may need other ones of
        #: these values.
        self._latest: tuple[Any, dict[tuple[str, int, int], Array]] | None = None
        #: The latest results that were requested together: their rows, and all results.
        self._together: tuple[list[KeptResult], dict[tuple[str, int, int], Array]] | None = None
        self.values = values_of(function, arguments)

    def rows(self, inputs: HeadSource, batch: int, head: int, row: int, rows: int) -> NDArray[np.float64]:
        """Return rows (rows, columns) of the first result's head, NaN where no program of the launch stores."""
        self._use(inputs)
        if self._together is not None:
            first, count = self._together[0][0].span(batch, head)
            if first <= row and row + rows <= first + count:
                stored = self._together[1].get((RESULT, batch, head))
                if stored is not None and not np.isnan(wanted := stored[row - first : row - first + rows]).any():
                    return wanted
        programs, (first, count) = self.grid.programs_of(batch, head, row, rows)
        if has_atomics(self.function):  # any program may add to any row
            programs = [list(at[::-1]) for at in product(*(range(n) for n in self.size[::-1]))]
            first, count = 0, self.grid.placed_result[1].shape[ROWS]
        key = first, count, tuple(map(tuple, programs))
        if self._latest is None or self._latest[0] != key:
            result = KeptResult(RESULT, *self.grid.placed_result, (first, count))
            self._latest = key, self._stored([result], programs)
        made: NDArray[np.float64] = np.full((rows, self.grid.placed_result[1].shape[-1]), np.nan)
        low, high = max(row, first), min(row + rows, first + count)
        if (stored := self._latest[1].get((RESULT, batch, head))) is not None:
            made[low - row : high - row] = stored[low - first : high - first]
        return made

    def results(
        self, inputs: HeadSource, computed: Mapping[str, Mapping[tuple[int, int], Span]]
    ) -> Mapping[tuple[str, int, int], Array]:
        """Return the computed rows of all results by name, batch and head; NaN where no program of the launch stores.

        ``computed``: first row and number of rows by the name of the program's tensor, and by batch, which counts
        splits too, and head.  For a launch with atomic additions, these are only the rows that programs store.
        """
        self._use(inputs)
        kept, programs = list[KeptResult](), set[tuple[int, ...]]()
        has_sums = has_atomics(self.function)
        for grid in self.grids:
            of_grid = grid.placed_results.items()
            placed = {
                name: KeptResult(name, *of, computed.get(name, {}))
                for name, of in of_grid
                if not has_sums or (name != RESULT and of[0] in self.function.parameters)
            }
            if has_sums:  # any program may add to any row
                programs |= set(product(*map(range, self.size))) if placed else set()
                kept += placed.values()
                continue
            # A program that stores nothing to the first result may store to another one with the same rows.
            shape = next(iter(placed.values())).arranged.shape[:COLUMNS]
            alike = [n for n, x in placed.items() if x.arranged.shape[:COLUMNS] == shape]
            for (batch, head), span in ((at, x) for n in alike for at, x in computed.get(n, {}).items()):
                programs |= {tuple(at) for at in grid.programs_of(batch, head, *span)[0]}
            kept += placed.values()
        if kept and (self._together is None or self._together[0] != kept):
            self._together = kept, self._stored(kept, sorted(programs))
        return self._together[1] if self._together else {}

    def _place(self, grids: Sequence[LaunchGrid]) -> None:
        """Read the axes of tensors from the blocks of a launch."""
        self.grids, self.grid = grids, grids[0]
        self._inputs.clear()
        for grid in grids:
            for name, placed in grid.placed_inputs.items():
                self._inputs.setdefault(name, []).extend(placed)

    def _is_of_axes(self, inputs: HeadSource) -> bool:
        """Return whether inputs have the axes that tensors have here."""
        known = self.function.parameters
        tensors = [x for placed in self._inputs.values() for x, _ in placed if x.role == "input" and x.name in known]
        for x in (x for x in tensors if not x.is_transposed):
            with suppress(KeyError):  # the program does not need this tensor
                if np.shape(inputs(x.name, 0, 0)) != (x.rows, x.cols):
                    return False
        return True

    def _use(self, inputs: HeadSource) -> None:
        """Forget the results for other inputs."""
        if self._inputs_of is not inputs:
            if not self._is_of_axes(inputs):
                self._place(self._others())
            self._inputs_of, self._latest, self._together = inputs, None, None
            self._matrix = lru_cache(maxsize=MATRICES)(lambda *of: formats.cast(inputs(*of), F64))

    def _stored(
        self, results: Sequence[KeptResult], programs: Sequence[Sequence[int]]
    ) -> dict[tuple[str, int, int], Array]:
        """Return the rows of results that programs store, (rows, columns), by name, batch, which counts splits, and
        head.
        """
        memory = LaunchMemory(self.arguments, self._matrix, self._inputs, results, self.values, self._scratch)
        for ids in programs:
            ExactProgram(self.function.operations, memory, ids, self.size)
        return memory.stored


class KnownLaunches(ExactLaunch):
    """The results of several launches, each of which stores one tensor."""

    def __init__(self, each: Sequence[ExactLaunch]) -> None:
        self.each = each

    def rows(self, inputs: HeadSource, batch: int, head: int, row: int, rows: int) -> NDArray[np.float64]:
        """Return rows of the first launch's result, in the form of a single launch's."""
        return self.each[0].rows(inputs, batch, head, row, rows)

    def results(
        self, inputs: HeadSource, computed: Mapping[str, Mapping[tuple[int, int], Span]]
    ) -> Mapping[tuple[str, int, int], Array]:
        """Return the computed rows of all results, in the form of a single launch's."""
        result = dict[tuple[str, int, int], Array]()
        for one in self.each:
            result |= one.results(inputs, {n: x for n, x in computed.items() if n in one.grid.placed_results})
        return result
