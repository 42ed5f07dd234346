"""Kernels: functions that numba compiles once, whose machine code is stored and called by address.

A kernel's arguments are contiguous arrays, whole numbers, floats, truth values, None and tuples of these; a kernel
returns nothing or a whole number. It allocates nothing, so that its machine code needs only the processor.  Only LLVM
is needed to load stored code: numba, whose import needs a third of a second, is imported only if something is compiled.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from npusim import cache
from npusim.errors import NpusimError
from npusim.formats import shipped
from npusim.formats.kernel_parts import (
    ArgumentType,
    InlinedFunction,
    Intrinsic,
    TableKind,
    intrinsic_of,
    is_array,
    with_globals,
)

Function = TypeVar("Function", bound=Callable[..., Any])
#: If set to 1, only documented features of numba are used, which compiles more slowly and stores no machine code.
PLAIN_VARIABLE = "NPUSIM_PLAIN_NUMBA"
#: The newest numba whose internals are known to work (the oldest is the one that the package requires).
KNOWN_NUMBA = (0, 68)
HERE = Path(__file__).parent
#: Form in which machine code receives an argument, by the letter of its type.
_C_TYPES: Mapping[str, Any] = MappingProxyType(
    {"i": ctypes.c_int64, "d": ctypes.c_double, "b": ctypes.c_uint8, "n": ctypes.c_void_p}
)
_LETTERS: Mapping[type, str] = MappingProxyType({int: "i", float: "d", bool: "b", type(None): "n"})
#: An array as arguments: the owner of its memory (none), its size, the bytes of an element, its address, then shape and
#: strides.
_C_ARRAY = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)

float32_bits: Any = Intrinsic("float32", "uint32")
bits_float32: Any = Intrinsic("uint32", "float32")
float64_bits: Any = Intrinsic("float64", "uint64")
bits_float64: Any = Intrinsic("uint64", "float64")
fma32: Any = Intrinsic("fma", "float32")
fma64: Any = Intrinsic("fma", "float64")


def inline(function: Function) -> Function:
    """Return a function that is compiled into the kernels that call it; it cannot be called from Python."""
    part: Any = InlinedFunction(function)
    return part  # type: ignore[no-any-return]


def kernel(function: Function) -> Function:
    """Return ``function`` compiled: on its first call, or from the cache folder.

    No ``fastmath``: every operation rounds where the source writes it.  The call runs without the GIL.
    """
    compiled: Any = CompiledKernel(function)
    functools.update_wrapper(compiled, function)
    return compiled  # type: ignore[no-any-return]


class Table:
    """The addresses of a named tuple of arrays, which it also references: one pointer for a kernel."""

    __slots__ = ("address", "arrays", "kind", "words")

    def __init__(self, arrays: Any) -> None:
        fields = arrays._asdict()
        self.arrays = arrays
        self.kind = TableKind(type(arrays).__name__, tuple((n, a.dtype, a.ndim) for n, a in fields.items()))
        self.words = np.array([n for a in fields.values() for n in (_address(a), *a.shape)], np.int64)
        self.address = _address(self.words)


def _address(array: np.ndarray[Any, Any]) -> int:
    """Return where an array's elements begin: directly after the head of its object, by numpy's ABI."""
    if not array.flags.c_contiguous:
        raise AssertionError("kernels find entries of an array one after the other")
    address: int | None = ctypes.c_void_p.from_address(id(array) + object.__basicsize__).value
    return address or 0


def _flatten(value: Any, words: list[Any]) -> ArgumentType:
    """Append to ``words`` the arguments that machine code receives for a value; return the value's type."""
    kind = type(value)
    if kind is np.ndarray:
        shape = value.shape
        words += (None, None, value.size, value.itemsize, _address(value), *shape, *value.strides)
        return value.dtype.char, len(shape)
    if kind is tuple:
        letters = _letters(tuple(map(type, value)))
        if letters is None:
            return tuple([_flatten(entry, words) for entry in value])
        words += value
        return letters
    if letter := _LETTERS.get(kind):
        words.append(value)
        return letter
    if kind is Table or hasattr(value, "_fields"):
        table = value if kind is Table else Table(value)
        words.append(table.address)
        return table.kind
    return _flatten(value.item() if isinstance(value, np.generic) else np.asarray(value), words)


@functools.cache
def _letters(kinds: tuple[type, ...]) -> tuple[str, ...] | None:
    """Return the letters of a tuple of numbers by their types; None if it contains anything else."""
    letters = tuple(_LETTERS.get(kind, "") for kind in kinds)
    return letters if all(letters) else None


def _c_types(kind: ArgumentType) -> list[Any]:
    """Return the C types of the arguments that `_flatten` appends for a type."""
    if isinstance(kind, str):
        return [_C_TYPES[kind]]
    if isinstance(kind, TableKind):
        return [ctypes.c_void_p]
    if is_array(kind):
        return [*_C_ARRAY, *[ctypes.c_int64] * (2 * kind[1])]
    return [c for entry in kind for c in _c_types(entry)]


class CompiledKernel:
    """One kernel, and its machine code for each combination of types that it was called with."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._native: dict[ArgumentType, Callable[[list[Any]], int | None]] = {}
        self._plain: Any = None

    def __call__(self, *args: Any) -> Any:
        """Call the machine code; arrays must be contiguous, and may have any shape that the function accepts."""
        if self._plain is not None:
            return self._plain(*(value.arrays if isinstance(value, Table) else value for value in args))
        words: list[Any] = []
        kinds = tuple([_flatten(value, words) for value in args])
        native = self._native.get(kinds) or self._prepare(kinds)
        return self(*args) if native is None else native(words)

    @property
    def name(self) -> str:
        """The name of its stored machine code: its module and qualified name, and the constants that it closes over."""
        constants = [cell.cell_contents for cell in self.function.__closure__ or ()]
        module = self.function.__module__.rpartition(".")[2]
        return "-".join([f"{module}.{self.function.__name__}", *map(str, constants)])

    def is_missing(self) -> bool:
        """Return whether neither the cache folder, the package nor this process has its machine code."""
        if self._native or self._plain is not None:
            return False
        return not any(cache.is_kept(f"{self.name}.", self._stamp(on), at) for on, at in _places())

    def _stamp(self, processor: tuple[str, ...]) -> bytes:
        return cache.digest(sources_stamp(Path(self.function.__code__.co_filename)), *processor)

    def _file(self, kinds: ArgumentType, processor: tuple[str, ...]) -> str:
        return f"{self.name}.{cache.digest(kinds, processor).hex()[:16]}.code"

    def _stored(self, kinds: ArgumentType) -> bytes | None:
        """Return the code for some types that the cache folder or the package has."""
        if os.environ.get(PLAIN_VARIABLE) == "1":
            return None
        found = (cache.load(self._file(kinds, on), self._stamp(on), at) for on, at in _places())
        return next((content for content in found if content is not None), None)

    def _prepare(self, kinds: ArgumentType) -> Callable[[list[Any]], int | None] | None:
        """Return the code for some types, either stored code or code that is compiled now; None if only numba itself
        can call it.
        """
        content, machine = self._stored(kinds), _machine()
        if content is None:
            numba_internals = _compiler()
            if numba_internals is None:
                self._plain = _plain(self.function)
                return None
            cache.say_once("compiling numeric kernels for their first use; later calls load them")
            file, stamp = self._file(kinds, machine), self._stamp(machine)
            with cache.alone(file):
                content = cache.load(file, stamp)
                if content is None:
                    content = numba_internals.machine_code(self.function, kinds)
                    cache.store(file, stamp, content)
        native = self._native[kinds] = _loaded(content, kinds)
        return native


# ---------------------------------------------------------------- stored machine code


@functools.cache
def sources_stamp(path: Path) -> tuple[tuple[str, str], ...]:
    """Return the names and digests of a source file and of those files that it imports from its own folder or from this
    one.

    A kernel's code can come from any of these files: after an edit of a function that the kernel calls, stale code must
    not be used.
    """
    digests: dict[Path, str] = {}
    left = [path, HERE / "jit.py", HERE / "numba_internals.py"]
    while left:
        source = left.pop()
        text = source.read_text(encoding="utf-8")
        digests[source] = hashlib.sha256(text.encode()).hexdigest()
        for module in re.findall(r"^from npusim\.(\S+) import", text, re.MULTILINE):
            other = HERE.parent.joinpath(*module.split(".")).with_suffix(".py")
            if other.parent in (path.parent, HERE) and other.exists() and other not in digests:
                left.append(other)
    return tuple(sorted((source.name, digest) for source, digest in digests.items()))


def _places() -> Iterator[tuple[tuple[str, ...], Path | None]]:
    """Yield the places where machine code may be stored, and the processor of each, the fastest code first: the cache
    (None), then the package.
    """
    yield _machine(), None
    if shipped.is_used():
        yield shipped.processor(), shipped.FOLDER


@functools.cache
def _machine() -> tuple[str, ...]:
    """Return the processor and the compiler versions for which machine code is valid."""
    import llvmlite.binding as llvm

    if os.environ.get(shipped.VARIABLE) == shipped.BASELINE:
        return shipped.processor()

    try:
        compiler = version("numba")
    except PackageNotFoundError:
        compiler = ""
    cpu = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES") or llvm.get_host_cpu_features().flatten()
    return llvm.get_default_triple(), cpu, features, compiler


@functools.cache
def _linker() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def _loaded(content: bytes, kinds: ArgumentType) -> Callable[[list[Any]], int | None]:
    """Return a function that calls machine code: a line with its name and whether it returns a number, then the code.

    numba's convention: status = f(result, error, *arguments).
    """
    import llvmlite.binding as llvm

    head, _, code = content.partition(b"\n")
    name, returns = head.decode().split()
    linker = _linker()
    linker.add_object_file(llvm.ObjectFileRef.from_data(code))
    linker.finalize_object()
    pointers = [ctypes.c_void_p, ctypes.c_void_p]
    types = [c for kind in kinds for c in _c_types(kind)]
    call = ctypes.CFUNCTYPE(ctypes.c_int32, *pointers, *types)(linker.get_function_address(name))

    def native(words: list[Any]) -> int | None:
        result, error = ctypes.c_int64(), ctypes.c_void_p()
        if call(ctypes.byref(result), ctypes.byref(error), *words):
            raise AssertionError(f"{name}: a kernel raises nothing")
        return result.value if returns == "int" else None

    return native


# ---------------------------------------------------------------- compilation


@functools.cache
def _compiler() -> Any:
    """Return `npusim.formats.numba_internals`; None, with a note, if this numba's internals differ."""
    import numba

    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise NpusimError(
            "NUMBA_DISABLE_JIT is set, but this needs compiled code: unset it, or use --no-numerics --method des"
        )
    if os.environ.get(PLAIN_VARIABLE) == "1":
        return None
    try:
        from npusim.formats import numba_internals

        if numba.version_info.short > KNOWN_NUMBA:
            numba_internals.check()
    except (ImportError, AttributeError, TypeError, ValueError, NotImplementedError, numba.errors.NumbaError) as error:
        cache.say_once(
            f"numba {numba.__version__} has unknown internals ({error}): every process compiles its kernels again, "
            "and more slowly"
        )
        return None
    return numba_internals


def _plain(function: Any) -> Any:
    """Return a function compiled by numba's documented interface alone."""
    import numba

    njit: Any = numba.njit
    return njit(nogil=True, error_model="numpy")(with_globals(function, _plain_part))


@functools.cache
def _plain_part(part: InlinedFunction | Intrinsic) -> Any:
    import numba

    if isinstance(part, Intrinsic):
        return intrinsic_of(part)
    njit: Any = numba.njit
    return njit(error_model="numpy")(with_globals(part.function, _plain_part))
