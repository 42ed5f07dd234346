"""Functions of numba beyond its documented interface; no other module of the package imports its internals.

**Parts.**  numba optimises every function separately, emits machine code and wrappers for it, and repeats this at each
level of calls: a function five calls deep is optimised five times.  A part is only translated; the kernel that calls
it, directly or through other parts, links all of them once and optimises the whole once.  Passes over constructs that
no kernel has (`_NEEDLESS`) are omitted in both.

**Machine code.**  numba stores machine code in a form that only numba reads, and importing numba takes a third of a
second. A kernel's object code is called by address instead (`npusim.formats.jit`), without the wrappers for Python.
Without numba's runtime (``_nrt``) nothing is counted or allocated, and the code needs nothing but the processor.

**Arrays by address.**  A tuple of arrays that is passed from function to function costs numba hundreds of values per
call, to translate and to optimise: the first compilation takes 4 s longer, and runs 1.65 times as long.  A `Table` of
addresses and lengths passes one pointer in a call, and reading one of its fields loads a value that never changes.
Indices must not be negative; this is not checked.

`npusim.formats.jit` works without this module where numba's compiler has changed.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import operator
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, errors
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global, signature
from numba.extending import infer_getattr, lower_builtin, lower_getattr, lower_getattr_generic, models, register_model

from npusim.formats import kernel_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FunctionType

    from llvmlite.binding import ModuleRef
    from numba.core.base import BaseContext
    from numba.core.datamodel import DataModelManager
    from numba.core.typing.templates import Signature

    from npusim.formats.kernel_parts import ArgumentType

#: Functions that compilers call implicitly and that every process has.
_OF_THE_PROCESSOR = frozenset({"memcpy", "memset", "memmove", "ldexp", "floor", "rint"})


def machine_code(function: FunctionType, kinds: tuple[ArgumentType, ...]) -> bytes:
    """Return a kernel's machine code for arguments of some types, after a line with its name and return type.

    Raises `TypeError` for a kernel whose code would need more than the processor, or whose result has another type.
    """
    dispatcher = numba.njit(
        nogil=True,
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        pipeline_class=_LeanCompiler,
        _nrt=False,
    )(kernel_parts.with_globals(function, _part_of))
    is_collected, colours = gc.isenabled(), errors._termcolor_inst
    gc.disable()  # saves a tenth of the time: objects of a compiler live until it has finished
    errors._termcolor_inst = _NoColours()
    try:
        dispatcher.compile(tuple(map(_type_of, kinds)))
    finally:
        errors._termcolor_inst = colours
        if is_collected:
            gc.enable()
    (compiled,) = dispatcher.overloads.values()
    library, returned = compiled.library, compiled.fndesc.restype
    undefined = {f.name for f in library._final_module.functions if f.is_declaration} - _OF_THE_PROCESSOR
    foreign = sorted(name for name in undefined if not name.startswith("llvm."))
    if foreign or returned not in (types.none, types.intp):
        raise TypeError(f"{function.__qualname__}: needs {', '.join(foreign) or 'nothing'}, returns {returned}")
    result = "none" if returned is types.none else "int"
    code: bytes = library._get_compiled_object()
    return f"{compiled.fndesc.llvm_func_name} {result}\n".encode() + code


def _type_of(kind: ArgumentType) -> Any:
    if isinstance(kind, str):
        return {"i": types.int64, "d": types.float64, "b": types.boolean, "n": types.none}[kind]
    if isinstance(kind, kernel_parts.TableKind):
        return _table_type(kind)
    if kernel_parts.is_array(kind):
        return types.Array(numba.from_dtype(np.dtype(kind[0])), kind[1], "C")
    return types.BaseTuple.from_types(tuple(_type_of(entry) for entry in kind))


@functools.cache
def _table_type(kind: kernel_parts.TableKind) -> TableType:
    rows = ((name, RowsType(numba.from_dtype(dtype), dims)) for name, dtype, dims in kind.arrays)
    return TableType(kind.name, tuple(rows))


@functools.cache
def _part_of(part: kernel_parts.InlinedFunction | kernel_parts.Intrinsic) -> Any:
    if isinstance(part, kernel_parts.Intrinsic):
        return kernel_parts.intrinsic_of(part)
    return _translated(kernel_parts.with_globals(part.function, _part_of))


class _PartLibrary(JITCodeLibrary):
    """The translation of one part, as it is linked into kernels."""

    def _optimize_functions(self, ll_module: ModuleRef) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Close the module without optimising it or emitting machine code."""
        self._raise_if_finalized()
        self._finalize_dynamic_globals()
        self._finalized = True

    def everything(self) -> list[Any]:
        found = {self: None}
        for library in self._linking_libraries:
            inner = library.everything() if isinstance(library, _PartLibrary) else [library]
            found |= dict.fromkeys(inner)
        return list(found)


class _NoEntry(dict[str, str]):
    """An entry that Python finds instead of machine code: every lookup fails."""

    def __missing__(self, arguments: object) -> None:
        raise TypeError(f"{self['name']} is compiled into the kernels that call it and cannot be called from Python")


class _NoColours:
    """Returns messages unchanged: numba composes one for each overload that does not fit, although it is never
    shown.
    """

    def __getattr__(self, _colour: str) -> Any:
        return str


#: Passes over closures, ``with``, expressions of arrays, and functions to be inlined before they are typed.
_NEEDLESS = frozenset(
    {
        "WithLifting",
        "InlineClosureLikes",
        "MakeFunctionToJitFunction",
        "InlineInlinables",
        "InlineOverloads",
        "LiteralUnroll",
        "LiteralPropagationSubPipelinePass",
        "NopythonRewrites",
        "AnnotateTypes",
    }
)


class _LeanCompiler(Compiler):
    """Compiles without the passes that have no effect here."""

    def define_pipelines(self) -> Any:
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [step for step in pipeline.passes if step[0].__name__ not in _NEEDLESS]
        return pipelines


class _PartCompiler(_LeanCompiler):
    """Translates a function, and registers it for its callers."""

    def compile_extra(self, func: FunctionType) -> Any:
        state = self.state
        state.library = _PartLibrary(state.targetctx.codegen(), func.__qualname__)
        state.flags.no_compile = state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        # Callers look up a function by its entry point, for which any unused builtin function serves.
        compiled = super().compile_extra(func)._replace(entry_point=_NoEntry(name=func.__qualname__).__getitem__)
        library = compiled.library
        state.targetctx.insert_user_function(compiled.entry_point, compiled.fndesc, library.everything())
        return compiled


def _translated(function: FunctionType) -> Any:
    return numba.njit(error_model="numpy", pipeline_class=_PartCompiler, _nrt=False)(function)


def check() -> None:
    """Raise numba's error if parts cannot be built with its compiler."""

    @_translated
    def twice(x: int) -> int:
        return x + x

    def four_times(x: int) -> int:
        return twice(twice(x))

    machine_code(four_times, ("i",))


# ---------------------------------------------------------------- arrays by address

#: Bits of an address and of a length.
WORD_BITS = 64
WORD = ir.IntType(WORD_BITS)


def _short(text: object) -> str:
    """Return a digest for the name of a type, because several processes may generate code with the same name."""
    return hashlib.blake2s(str(text).encode(), digest_size=WORD_BITS // 8).hexdigest()


class RowsType(types.Type):
    """An array of records or of whole numbers."""

    def __init__(self, item: types.Type, dims: int) -> None:
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


@register_model(RowsType)
class _RowsModel(models.StructModel):
    def __init__(self, manager: DataModelManager, rows: RowsType) -> None:
        sizes = [(f"size{n}", types.intp) for n in range(rows.dims)]
        super().__init__(manager, rows, [("data", types.voidptr), *sizes])


register_model(TableType)(models.OpaqueModel)


@infer_getattr
class _TableAttributes(AttributeTemplate):
    key = TableType

    def generic_resolve(self, table: TableType, name: str) -> Any:
        return table.fields.get(name)


@infer_getattr
class _RowsAttributes(AttributeTemplate):
    key = RowsType

    def resolve_shape(self, rows: RowsType) -> Any:
        return types.UniTuple(types.intp, rows.dims)


@infer_global(operator.getitem)
class _Get(AbstractTemplate):
    def generic(self, args: Sequence[types.Type], kws: Mapping[str, types.Type]) -> Any:
        rows, index = args
        if not isinstance(rows, RowsType):
            return None
        if isinstance(index, types.Integer):
            return signature(rows.item if rows.dims == 1 else RowsType(rows.item, 1), rows, types.intp)
        return signature(rows.item, rows, types.UniTuple(types.intp, 2))


@infer_global(operator.setitem)
class _Set(AbstractTemplate):
    def generic(self, args: Sequence[types.Type], kws: Mapping[str, types.Type]) -> Any:
        rows, index, _ = args
        if not isinstance(rows, RowsType):
            return None
        position = types.intp if isinstance(index, types.Integer) else types.UniTuple(types.intp, 2)
        return signature(types.none, rows, position, rows.item)


@infer_global(len)
class _Len(AbstractTemplate):
    def generic(self, args: Sequence[types.Type], kws: Mapping[str, types.Type]) -> Any:
        return signature(types.intp, args[0]) if isinstance(args[0], RowsType) else None


@lower_getattr_generic(TableType)
def _field(context: BaseContext, builder: ir.IRBuilder, table: TableType, value: ir.Value, name: str) -> Any:
    """Read the address and the length of a field's array: they are constant as long as the kernel runs."""
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


def _pointer(context: BaseContext, builder: ir.IRBuilder, kind: RowsType, rows: object, index: ir.Value) -> Any:
    if kind.dims == 2:
        is_pair = isinstance(index.type, ir.ArrayType)
        row = builder.extract_value(index, 0) if is_pair else index
        index_in = builder.mul(row, rows.size1)
        index = builder.add(index_in, builder.extract_value(index, 1)) if is_pair else index_in
    base = builder.bitcast(rows.data, context.get_data_type(kind.item).as_pointer())
    return builder.gep(base, [index])


@lower_builtin(operator.getitem, RowsType, types.Integer)
@lower_builtin(operator.getitem, RowsType, types.BaseTuple)
def _get(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> Any:
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
def _set(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> Any:
    rows = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=args[0])
    builder.store(args[2], _pointer(context, builder, sig.args[0], rows, args[1]))
    return context.get_dummy_value()


def _lengths(context: BaseContext, builder: ir.IRBuilder, kind: RowsType, value: ir.Value) -> list[Any]:
    rows = cgutils.create_struct_proxy(kind)(context, builder, value=value)
    return [getattr(rows, f"size{n}") for n in range(kind.dims)]


@lower_getattr(RowsType, "shape")
def _shape(context: BaseContext, builder: ir.IRBuilder, kind: RowsType, value: ir.Value) -> Any:
    return cgutils.pack_array(builder, _lengths(context, builder, kind, value))


@lower_builtin(len, RowsType)
def _len(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Sequence[ir.Value]) -> Any:
    return _lengths(context, builder, sig.args[0], args[0])[0]
