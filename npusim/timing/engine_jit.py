"""Compiles the engine as ``npusim.formats.jit`` does, but that it counts no references and sees arrays by address.

Its functions pass tuples of arrays to one another and allocate nothing; counting the references of all of them
at each call would take longer than the work itself.

A tuple of arrays that is handed from function to function costs numba hundreds of values a call, to
translate and to optimise.  Here a tuple becomes a table of addresses and lengths, so that a call passes one pointer
for all of them, and reading a field of it is a load that never changes; indices are not negative, and nothing checks
them.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global, signature
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_builtin,
    lower_getattr,
    lower_getattr_generic,
    models,
    register_model,
    unbox,
)

from npusim.formats import jit

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

#: Bits of an address and of a length.
WORD_BITS = 64
WORD = ir.IntType(WORD_BITS)


def _short(text: object) -> str:
    """Return a digest for the name of a type: code of one name may come from several processes."""
    return hashlib.blake2s(str(text).encode(), digest_size=WORD_BITS // 8).hexdigest()


class RowsType(types.Type):
    """An array of records or of whole numbers."""

    def __init__(self, item: Any, dims: int) -> None:
        self.item, self.dims = item, dims
        super().__init__(f"Rows{dims}_{_short(item)}")


class TableType(types.Type):
    """Arrays by name, and the word of the table at which each is described."""

    def __init__(self, name: str, fields: tuple[tuple[str, RowsType], ...]) -> None:
        self.fields, self.first_word, at = dict(fields), dict[str, int](), 0
        for field, rows in fields:
            self.first_word[field] = at
            at += 1 + rows.dims
        shapes = "".join(f"{field}{rows}" for field, rows in fields)
        super().__init__(f"{name}_{_short(shapes)}")


class Table:
    """The addresses of a tuple of arrays, which it keeps alive."""

    __slots__ = ("_numba_type_", "address", "arrays", "words")

    def __init__(self, arrays: NamedTuple) -> None:
        self.arrays = arrays
        fields = arrays._asdict()
        self._numba_type_ = _kind(type(arrays), tuple((a.dtype, a.ndim) for a in fields.values()))
        self.words = np.array([n for a in fields.values() for n in (_address(a), *a.shape)], np.int64)
        self.address = _address(self.words)


@functools.cache
def _kind(arrays: Any, shapes: tuple[tuple[Any, int], ...]) -> TableType:
    """Return the type of a tuple of arrays of these dtypes and dimensions."""
    rows = (RowsType(numba.from_dtype(dtype), dims) for dtype, dims in shapes)
    return TableType(arrays.__name__, tuple(zip(arrays._fields, rows, strict=True)))


def _address(array: np.ndarray[Any, Any]) -> int:
    if not array.flags.c_contiguous:
        raise AssertionError("kernels find entries of an array one after the other")
    address, _ = array.__array_interface__["data"]
    return address


@register_model(RowsType)
class _RowsModel(models.StructModel):
    def __init__(self, manager: Any, rows: RowsType) -> None:
        sizes = [(f"size{n}", types.intp) for n in range(rows.dims)]
        super().__init__(manager, rows, [("data", types.voidptr), *sizes])


register_model(TableType)(models.OpaqueModel)


@unbox(TableType)
def _unbox(_kind: Any, value: Any, c: Any) -> NativeValue:
    number = c.pyapi.object_getattr_string(value, "address")
    address = c.pyapi.long_as_longlong(number)
    c.pyapi.decref(number)
    pointer = c.builder.inttoptr(address, cgutils.voidptr_t)
    return NativeValue(pointer, is_error=cgutils.is_not_null(c.builder, c.pyapi.err_occurred()))


# ---------------------------------------------------------------- types


@infer_getattr
class _TableAttributes(AttributeTemplate):
    key = TableType

    def generic_resolve(self, table: Any, name: str) -> Any:
        return table.fields.get(name)


@infer_getattr
class _RowsAttributes(AttributeTemplate):
    key = RowsType

    def resolve_shape(self, rows: Any) -> Any:
        return types.UniTuple(types.intp, rows.dims)


@infer_global(operator.getitem)
class _Get(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        rows, index = args
        if not isinstance(rows, RowsType):
            return None
        if isinstance(index, types.Integer):
            return signature(rows.item if rows.dims == 1 else RowsType(rows.item, 1), rows, types.intp)
        return signature(rows.item, rows, types.UniTuple(types.intp, 2))


@infer_global(operator.setitem)
class _Set(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        rows, index, _ = args
        if not isinstance(rows, RowsType):
            return None
        position = types.intp if isinstance(index, types.Integer) else types.UniTuple(types.intp, 2)
        return signature(types.none, rows, position, rows.item)


@infer_global(len)
class _Len(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        return signature(types.intp, args[0]) if isinstance(args[0], RowsType) else None


# ---------------------------------------------------------------- code


@lower_getattr_generic(TableType)
def _field(context: Any, builder: Any, table: Any, value: Any, name: str) -> Any:
    """Read where a field's array is and how long: the same for as long as the kernel runs."""
    words, at = builder.bitcast(value, WORD.as_pointer()), table.first_word[name]
    rows = cgutils.create_struct_proxy(table.fields[name])(context, builder)

    def word(n: int) -> Any:
        loaded = builder.load(builder.gep(words, [ir.Constant(WORD, at + n)]))
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    rows.data = builder.inttoptr(word(0), cgutils.voidptr_t)
    for n in range(table.fields[name].dims):
        setattr(rows, f"size{n}", word(1 + n))
    return rows._getvalue()


def _pointer(context: Any, builder: Any, kind: Any, rows: Any, index: Any) -> Any:
    """Return the address of an entry, or of the first of a row."""
    if kind.dims == 2:
        is_pair = isinstance(index.type, ir.ArrayType)
        row = builder.extract_value(index, 0) if is_pair else index
        index_in = builder.mul(row, rows.size1)
        index = builder.add(index_in, builder.extract_value(index, 1)) if is_pair else index_in
    base = builder.bitcast(rows.data, context.get_data_type(kind.item).as_pointer())
    return builder.gep(base, [index])


@lower_builtin(operator.getitem, RowsType, types.Integer)
@lower_builtin(operator.getitem, RowsType, types.BaseTuple)
def _get(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    kind, result = sig.args[0], sig.return_type
    rows = cgutils.create_struct_proxy(kind)(context, builder, value=args[0])
    pointer = _pointer(context, builder, kind, rows, args[1])
    if isinstance(result, RowsType):
        row = cgutils.create_struct_proxy(result)(context, builder)
        row.data, row.size0 = builder.bitcast(pointer, cgutils.voidptr_t), rows.size1
        return row._getvalue()
    return pointer if isinstance(result, types.Record) else builder.load(pointer)


@lower_builtin(operator.setitem, RowsType, types.Integer, types.Integer)
@lower_builtin(operator.setitem, RowsType, types.BaseTuple, types.Integer)
def _set(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    rows = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=args[0])
    builder.store(args[2], _pointer(context, builder, sig.args[0], rows, args[1]))
    return context.get_dummy_value()


def _lengths(context: Any, builder: Any, kind: Any, value: Any) -> list[Any]:
    rows = cgutils.create_struct_proxy(kind)(context, builder, value=value)
    return [getattr(rows, f"size{n}") for n in range(kind.dims)]


@lower_getattr(RowsType, "shape")
def _shape(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return cgutils.pack_array(builder, _lengths(context, builder, kind, value))


@lower_builtin(len, RowsType)
def _len(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return _lengths(context, builder, sig.args[0], args[0])[0]


# ---------------------------------------------------------------- compilation


inline = functools.partial(jit.inline, _nrt=False)


def kernel(function: Callable[..., Result]) -> Callable[..., Result]:
    """Compile ``function`` on first call, and keep the machine code on disk where there is room.

    Tuples of arrays reach it as tables of addresses.
    """
    compiled = jit.kernel(function, _nrt=False)

    @functools.wraps(function)
    def called(*args: Any) -> Result:
        result: Result = compiled(*map(argument, args))
        return result

    called.is_missing = functools.partial(jit.is_missing, compiled)  # type: ignore[attr-defined]
    return called


def argument(value: Any) -> Any:
    """Return what a kernel takes for a tuple of arrays: its table; anything else as it is."""
    return Table(value) if jit.internals and isinstance(value, tuple) else value
