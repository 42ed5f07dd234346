"""The tensors of a running program whose addresses it passes to a kernel as integers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise, repeat
from math import prod
from types import FrameType, MappingProxyType
from typing import Any, Protocol, TypeGuard

import numpy as np

from npusim.errors import SpecError
from npusim.formats import get_format
from npusim.formats.float_format import format_of_dtype
from npusim.kernels.triton.addresses import FIRST, as_addressed, root_of
from npusim.kernels.triton.calls import INTEGERS, Argument
from npusim.kernels.triton.ttir_text import FORMATS, shape_of

Array = np.ndarray[Any, Any]
#: Formats of integers by their types in TTIR, for memory whose type in the program is another one.
_WHOLE = MappingProxyType({"i8": "uint8", "i16": "int16", "i32": "int32", "i64": "int64", "i1": "bool"})
#: Number of objects whose parts are examined at once.
_AT_ONCE = 1 << 14


class UnreadAddressError(SpecError):
    """An address whose tensor is not known, or whose tensor cannot be an argument."""


class _TorchTensor(Protocol):
    """The attributes and methods of a PyTorch tensor that are used here."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...
    @property
    def is_meta(self) -> bool: ...
    def is_contiguous(self) -> bool: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...
    def detach(self) -> _TorchTensor: ...
    def cpu(self) -> _TorchTensor: ...
    def reshape(self, *shape: int) -> _TorchTensor: ...
    def view(self, dtype: object) -> _TorchTensor: ...
    def numpy(self) -> Array: ...


@dataclass(frozen=True)
class _Piece:
    """Contiguous memory of a tensor: its first address, size in bytes, shape and format; ``bits`` returns its bytes."""

    address: int
    size: int
    shape: tuple[int, ...]
    fmt: str
    bits: Callable[[], Array]

    def overlaps(self, first: int, size: int) -> bool:
        """Return whether some byte belongs to both pieces of memory."""
        return first < self.address + self.size and self.address < first + size


def with_tensors(
    recorded: dict[str, Any],
    parameters: dict[str, str],
    *,
    floats: bool,
    number: Callable[[], int],
    given: Mapping[str, object],
) -> dict[str, Any]:
    """Return the arguments of a launch and further ones: the tensors to which addresses in them belong
    (`as_addressed`).

    ``parameters``: types of the kernel's parameters; ``floats``: whether the values of floats are recorded; ``number``
    returns the number of a new storage; ``given``: the arguments that the program passes. Raises `UnreadAddressError`
    if an address belongs to no tensor, to a tensor that is also an argument, or to a tensor that does not consist of
    whole elements of the type that the kernel reads.
    """
    missing = {
        n: kind
        for n, kind in parameters.items()
        if n not in recorded and n.endswith(as_addressed("")) and n == root_of(n)
    }
    if not missing:
        return recorded
    pieces, result = _pieces(), dict(recorded)
    taken = [(n, x) for n, y in given.items() if (x := _piece_of(y)) is not None]
    for name, kind in missing.items():
        table = name.removesuffix(as_addressed(""))
        values = _integers(recorded[table])
        owners = _owners(values, pieces)
        if not owners:
            why = "no address in it belongs to a tensor that the program has at the launch"
            raise UnreadAddressError(f"record: {table}: {why}; keep the tensors in a variable, list or module")
        for other, x in taken:
            if any(o.overlaps(x.address, x.size) for o in owners):
                why = f"a tensor to which its addresses belong is also given by {other.removesuffix(as_addressed(''))}"
                raise UnreadAddressError(f"record: {table}: {why}; pass a copy to the kernel")
        taken += [(name, o) for o in owners]
        result[name], starts = _argument(table, owners, shape_of(kind)[1], floats=floats, number=number())
        result[table] = _with_offsets(recorded[table], owners, starts)
    return result


def with_other_formats(recorded: dict[str, Any], parameters: Mapping[str, str], *, floats: bool) -> dict[str, Any]:
    """Return the arguments of a launch and further ones: the memory of an argument in another format (`as_read`).

    Raises `UnreadAddressError` if a row of that memory does not consist of whole elements of the other format.
    """
    result = dict(recorded)
    for name, kind in parameters.items():
        if name in result or root_of(name) == name:
            continue
        x, element = result[root_of(name)], shape_of(kind)[1]
        fmt = FORMATS.get(element) or _WHOLE[element]
        own, size = (_bytes_of(f) for f in (x.fmt, fmt))
        sides = [x.offset, *x.strides[:-1], x.shape[-1] if x.shape else 1]
        if x.strides[-1:] != (1,) or any(n * own % size for n in sides):
            why = f"a tensor {list(x.shape)} of {x.fmt} with strides {list(x.strides)} is also read as {fmt}"
            raise UnreadAddressError(f"record: {root_of(name)}: {why}, which is not supported")
        offset, *strides, columns = (n * own // size for n in sides)
        data = None
        if x.data is not None and (floats or fmt in INTEGERS):
            dtype = np.dtype(fmt) if fmt in INTEGERS else get_format(fmt).dtype
            data = np.ascontiguousarray(x.data).view(dtype)
        spans = tuple((first * own // size, end * own // size) for first, end in x.spans)
        shape = (*x.shape[:-1], columns)
        result[name] = Argument(shape, (*strides, 1), offset, fmt, x.storage, data, spans=spans)
    return result


def _bytes_of(fmt: str) -> int:
    return INTEGERS[fmt] if fmt in INTEGERS else get_format(fmt).bits // 8


def _integers(x: object) -> Array:
    values = x.data if isinstance(x, Argument) else x
    return np.asarray([] if values is None else values).astype(np.uint64).reshape(-1)


def _with_offsets(x: object, owners: Sequence[_Piece], starts: Sequence[int]) -> Argument | int:
    """Return a table, or an address, with each address of a tensor replaced by its address in the further argument."""
    values = _integers(x)
    result = values.astype(np.int64)
    for one, start in zip(owners, starts, strict=True):
        is_here = (values >= one.address) & (values < one.address + one.size)
        result[is_here] = (values[is_here] - np.uint64(one.address)).astype(np.int64) + FIRST + start
    if not isinstance(x, Argument):
        return int(result[0])
    return replace(x, data=result.reshape(x.data.shape).astype(x.data.dtype))


def _argument(
    table: str, owners: Sequence[_Piece], element: str, *, floats: bool, number: int
) -> tuple[Argument, list[int]]:
    """Return the tensors of some addresses as one argument, and the first byte of each."""
    fmt = FORMATS.get(element) or _WHOLE[element]
    size = _bytes_of(fmt)
    if wrong := next((o for o in owners if o.size % size), None):
        why = f"an address belongs to a tensor {list(wrong.shape)} of {wrong.fmt}, and the kernel reads {fmt} there"
        raise UnreadAddressError(f"record: {table}: {why}, which is not supported")
    counts, own = [o.size // size for o in owners], {o.shape for o in owners}
    is_like = len(own) == 1 and prod(owners[0].shape) == counts[0]
    shape = owners[0].shape if is_like else (max(counts),)
    apart = 2 * max(counts)  # an index beyond a tensor's end is in no other tensor
    if fmt in INTEGERS:  # stores of integers are to tensors without gaps
        shape = (apart,)
    steps = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    if is_like and fmt in INTEGERS and INTEGERS.get(owners[0].fmt) == size:
        fmt = owners[0].fmt
    dtype = np.dtype(fmt) if fmt in INTEGERS else get_format(fmt).dtype
    data = None
    if floats or fmt in INTEGERS:
        data = np.zeros((len(owners), prod(shape)), dtype)
        for row, one, n in zip(data, owners, counts, strict=True):
            row[:n] = one.bits().view(dtype)  # the rest of the row belongs to no tensor
        data = data.reshape(len(owners), *shape)
    spans = tuple((i * apart, i * apart + n) for i, n in enumerate(counts))
    argument = Argument((len(owners), *shape), (apart, *steps), 0, fmt, number, data, spans=spans)
    return argument, [first * size for first, _ in spans]


def _owners(values: Array, pieces: Sequence[_Piece]) -> list[_Piece]:
    """Return the largest pieces of memory to which some addresses belong, in the order of the addresses."""
    found = dict[tuple[int, int], _Piece]()
    for value in dict.fromkeys(int(v) for v in values):
        around = [x for x in pieces if x.address <= value < x.address + x.size]
        if around:
            one = max(around, key=lambda x: (x.size, len(x.shape)))
            found.setdefault((one.address, one.size), one)
    result = list(found.values())
    for a, b in pairwise(sorted(result, key=lambda x: x.address)):
        if a.overlaps(b.address, b.size):
            raise UnreadAddressError("record: addresses belong to tensors that overlap in memory")
    return result


def _pieces() -> list[_Piece]:
    """Return the memory of all tensors of the program."""
    known = dict[tuple[int, int, tuple[int, ...]], _Piece]()
    every = {id(x): x for x in _tensors()}  # several objects may refer to one tensor
    for x in every.values():
        if (one := _piece_of(x)) is not None:
            known.setdefault((one.address, one.size, one.shape), one)
    return list(known.values())


def _tensors() -> Iterator[object]:
    """Yield the tensors to which objects and running functions of the program refer."""
    frames = [frame for top in sys._current_frames().values() for frame in _callers(top)]
    for frame in frames:
        yield from frame.f_locals.values()
    objects = gc.get_objects()
    for first in range(0, len(objects), _AT_ONCE):
        some = objects[first : first + _AT_ONCE]
        yield from _instances(some, _torch())
        yield from _instances(gc.get_referents(*some), np.ndarray)


def _instances(objects: Sequence[object], kind: type | tuple[()]) -> Iterator[object]:
    """Return the objects of a class, of millions: no Python code runs for one that is of another class."""
    return compress(objects, map(issubclass, map(type, objects), repeat(kind)))


def _torch() -> type | tuple[()]:
    """Return the class of PyTorch's tensors; no class if the program has not imported it."""
    torch = sys.modules.get("torch")
    return () if torch is None else torch.Tensor


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_torch(x: object) -> TypeGuard[_TorchTensor]:
    return issubclass(type(x), _torch())  # not isinstance: a proxy's object may be gone


def _piece_of(x: object) -> _Piece | None:
    """Return the memory of a tensor without gaps; None for a tensor with gaps, and for other objects."""
    if isinstance(x, np.ndarray):
        if not x.flags.c_contiguous or not x.size or x.dtype.hasobject:
            return None if not isinstance(x.base, np.ndarray) else _piece_of(x.base)
        fmt = format_of_dtype(x.dtype)
        name = str(x.dtype) if fmt is None else fmt.name
        return _Piece(x.ctypes.data, x.nbytes, x.shape, name, lambda: x.reshape(-1).view(np.uint8).copy())
    if not _is_torch(x) or x.is_meta or not x.is_contiguous() or not x.numel():
        return None
    torch, size = sys.modules["torch"], x.numel() * x.element_size()
    name = str(x.dtype).rpartition(".")[2]
    return _Piece(
        x.data_ptr(), size, tuple(x.shape), name, lambda: x.detach().cpu().reshape(-1).view(torch.uint8).numpy().copy()
    )
