"""What kernels need of numba beyond its documented functions; no other module of the package imports its internals.

**Parts.**  numba optimises every function by itself, emits machine code and wrappers for it, and does so again at
each level of calls: a function five calls deep is optimised five times.  A part is only translated; the kernel
that calls it, directly or through other parts, links all of them once and optimises the whole once.

**Kept machine code.**  numba keeps it beside the source, in the user's cache folder, or in ``NUMBA_CACHE_DIR``.  In
a read-only installation without a home none of them can be written; without another place every process (and every
worker of a search) would compile for half a minute.  Cached code is unpickled and run, so a folder is used only if
it is this user's alone, and a file only if its content is what was written.

**Arrays by address.**  A tuple of arrays that is handed from function to function costs numba hundreds of values a
call, to translate and to optimise: 4 s more of the first compilation, and runs that take 1.65 times as long.  A
`Table` of addresses and lengths is one pointer a call, and reading a field of it a load that never changes; indices
are not negative, and nothing checks them.

`npusim.formats.jit` does without this module where numba's compiler is not what it builds on.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import pickle
import re
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, event
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
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

HERE = Path(__file__).parent
_DIGEST = hashlib.sha256
_DIGEST_BYTES = _DIGEST().digest_size


def kept(compiled: Any, function: Any) -> Any:
    """Return ``compiled``, of ``function``, its machine code kept on disk where there is a safe place for it."""
    # Not numba's setting: that may come from a file in the current folder.
    for place in (lambda: os.environ.get("NUMBA_CACHE_DIR", ""), private_folder):
        if (folder := place()) is not None and (cache := _cache_in(str(folder), function)):
            compiled._cache = cache
            break
    return compiled


class _CheckedFiles(IndexDataCacheFile):
    """numba's index and its entries, each led by a digest, without which nothing in it is unpickled.

    A file begins with the digest of the rest, and then with that of what it was compiled from.
    """

    def load(self, key: object) -> Any:
        # Two processes that add to one index at once can give two kernels one file: it names its own.
        found = super().load(key)
        return found[1] if found is not None and found[0] == key else None

    def save(self, key: object, data: object) -> None:
        super().save(key, (key, data))

    def _load_index(self) -> Any:
        return self._read(Path(self._index_path)) or {}

    def _save_index(self, overloads: object) -> None:
        self._write(self._index_path, overloads)

    def _load_data(self, name: str) -> Any:
        return self._read(Path(self._data_path(name)))

    def _save_data(self, name: str, data: object) -> None:
        self._write(self._data_path(name), data)

    def _stamp(self) -> bytes:
        return _DIGEST(repr((self._version, self._source_stamp)).encode()).digest()

    def _read(self, path: Path) -> Any:
        """Return the content of a file; None where there is none, it is of other sources, or it is damaged."""
        try:
            content = path.read_bytes()
        except OSError:
            return None
        rest = content[_DIGEST_BYTES:]
        if _DIGEST(rest).digest() != content[:_DIGEST_BYTES]:
            _say(f"{path} is damaged: what it held is compiled anew")
            with suppress(OSError):
                path.unlink()
            return None
        return pickle.loads(rest[_DIGEST_BYTES:]) if rest.startswith(self._stamp()) else None

    def _write(self, path: str, data: object) -> None:
        rest = self._stamp() + self._dump(data)
        with self._open_for_write(path) as file:  # beside it, then moved there
            file.write(_DIGEST(rest).digest() + rest)


class _Cache(FunctionCache):
    """The machine code of one function on disk; where it cannot be kept, that is said, and the work goes on.

    numba looks at the time of the function's own file only; an edit of a function it calls from another
    file would leave stale machine code.  So the stamp is what all files say whose code a kernel can contain.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        # Files of numba's own form, which an earlier npusim left, have other names.
        base = f"{self._impl.filename_base}.checked"
        self._cache_file = _CheckedFiles(self._cache_path, base, sources_stamp(Path(function.__code__.co_filename)))

    def save_overload(self, sig: object, data: object) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _say_once(f"compiled kernels cannot be kept in {self._cache_path}: {error.strerror or error}")


def _cache_in(folder: str, function: Any) -> _Cache | None:
    """Return a cache in a folder, or in one of numba's own places where that is empty; None where there is none."""
    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, folder
    try:
        return _Cache(function)
    except RuntimeError:  # numba: "no locator available": nowhere to write
        return None
    finally:
        config.CACHE_DIR = before


def is_missing(compiled: Any) -> bool:
    """Return whether machine code of a function could be kept on disk, but there is none yet, nor in this process."""
    file: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    return file is not None and not compiled.signatures and not file._load_index()


@functools.cache
def sources_stamp(path: Path) -> tuple[tuple[str, str], ...]:
    """Return the name and digest of a source file, and of those that it imports from its folder or this one."""
    found: dict[Path, str] = {}
    left = [path, Path(__file__)]
    while left:
        source = left.pop()
        text = source.read_text(encoding="utf-8")
        found[source] = hashlib.sha256(text.encode()).hexdigest()
        for module in re.findall(r"^from npusim\.(\S+) import", text, re.MULTILINE):
            other = HERE.parent.joinpath(*module.split(".")).with_suffix(".py")
            if other.parent in (path.parent, HERE) and other.exists() and other not in found:
                left.append(other)
    return tuple(sorted((source.name, digest) for source, digest in found.items()))


@functools.cache
def private_folder() -> Path | None:
    """Return this user's temporary cache folder, made (and said) if it is not there; None if unsafe.

    It is a folder, no link, owned by this user, and nobody else may enter it (mode 0700).
    """
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"npusim-cache-{user}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        is_own = user in (found.st_uid, "user") and not stat.S_IMODE(found.st_mode) & 0o077
        if not stat.S_ISDIR(found.st_mode) or not is_own:
            _say(
                f"{folder} is not this user's alone and is not used: kernels are compiled anew in every process; "
                "set NUMBA_CACHE_DIR to a folder of your own"
            )
            return None
    except OSError as error:
        _say(
            f"no folder for compiled kernels can be written ({folder}: {error.strerror}): they are compiled anew "
            "in every process; set NUMBA_CACHE_DIR"
        )
        return None
    else:
        _say(f"no cache folder can be written; compiled kernels are kept in {folder}")
    return folder


def _say(text: str) -> None:
    sys.stderr.write(f"npusim: {text}\n")


_say_once = functools.cache(_say)


class _PartLibrary(JITCodeLibrary):
    """The translation of one part, as it is linked into kernels."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Close the module; neither optimise it nor emit machine code."""
        self._raise_if_finalized()
        self._finalize_dynamic_globals()
        self._finalized = True

    def everything(self) -> list[Any]:
        """Return this library and all that it calls."""
        found = {self: None}
        for library in self._linking_libraries:
            inner = library.everything() if isinstance(library, _PartLibrary) else [library]
            found |= dict.fromkeys(inner)
        return list(found)


class _NoEntry(dict[str, str]):
    """What Python finds where machine code would be: looking anything up says that there is none."""

    def __missing__(self, arguments: object) -> None:
        raise TypeError(f"{self['name']} is compiled into the kernels that call it and cannot be called from Python")


class _PartCompiler(Compiler):
    """Translates a function, and registers it for its callers."""

    def compile_extra(self, func: Any) -> Any:
        state = self.state
        state.library = _PartLibrary(state.targetctx.codegen(), func.__qualname__)
        state.flags.no_compile = state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        # Callers look a function up by its entry point: any builtin function that is no other's.
        compiled = super().compile_extra(func)._replace(entry_point=_NoEntry(name=func.__qualname__).__getitem__)
        library = compiled.library
        state.targetctx.insert_user_function(compiled.entry_point, compiled.fndesc, library.everything())
        return compiled


def part(function: Any, **options: Any) -> Any:
    """Return ``function`` for kernels to call; it cannot be called from Python."""
    return numba.njit(error_model="numpy", pipeline_class=_PartCompiler, **options)(function)


class _CompilationListener(event.Listener):
    """Announce the first real compilation of a kernel of this package; cache hits stay silent."""

    def on_start(self, event: Any) -> None:
        function = getattr(event.data.get("dispatcher"), "py_func", None)
        if getattr(function, "__module__", "").startswith("npusim."):
            _say_once("compiling numeric kernels (first use; then kept)")

    def on_end(self, event: Any) -> None:
        """Do nothing: only the start is of interest."""


def announce_compilation() -> None:
    """Say once a process, on stderr, why the first call takes seconds."""
    register: Any = event.register
    register("numba:compile", _CompilationListener())


def check() -> None:
    """Raise whatever numba raises where its compiler is not one that parts can be built with."""

    @functools.partial(part)
    def twice(x: Any) -> Any:
        return x + x

    @numba.njit
    def four_times(x: Any) -> Any:
        return twice(twice(x))

    if four_times(3) != 12:
        raise TypeError("a part computes something else")


# ---------------------------------------------------------------- arrays by address

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
