"""Recorded launches of Triton kernels and their file: TTIR, arguments, integers and grids, and no code of a user."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim import cache
from npusim.errors import SpecError, TensorError, absent
from npusim.formats import get_format
from npusim.formats.archives import read_archive
from npusim.kernels.triton import SUFFIX, is_recorded, launch_parts, short_kernel_name
from npusim.kernels.triton.compiler import DEFAULTS, refused_option
from npusim.units import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Version of the file.
FORMAT = 1
#: Formats of integers by the bytes of an element; the values of such tensors are a part of a call.
INTEGERS = MappingProxyType(
    {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8}
)
#: Largest number of programs of a launch; the addresses of each program are evaluated as one block.
MOST_PROGRAMS = 1 << 20
#: Largest number of letters of a name or path; largest distance between two integers of a tensor (elements between them
#: are stored too).
MOST_LETTERS, MOST_INTEGERS = 4096, 1 << 27


@dataclass(frozen=True)
class Argument:
    """A tensor of a call: a view of a storage.

    ``strides``, ``offset``: in elements.  ``storage``: the number of the storage in the recording.  ``data``: the
    values of the view, None where floats were not recorded.  ``block``: the block of a tensor descriptor.  ``spans``:
    for an argument that contains the tensors to which addresses belong (`npusim.kernels.triton.addresses`), the first
    element of each tensor and the element after its last one; empty for an argument that is one tensor.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    fmt: str
    storage: int
    data: Any = field(default=None, compare=False, repr=False)
    block: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def is_integer(self) -> bool:
        """Whether the elements are integers."""
        return self.fmt in INTEGERS

    def elements(self) -> np.ndarray[Any, Any]:
        """Return the values in the order of memory, from the view's first element on, with 0 in the gaps."""
        places = np.zeros((1,) * len(self.shape), np.int64)
        for axis, (n, step) in enumerate(zip(self.shape, self.strides, strict=True)):
            places = places + (np.arange(n) * step).reshape(n, *(1 for _ in self.shape[axis + 1 :]))
        flat = np.zeros(int(places.max(initial=0)) + 1, self.data.dtype)
        flat[places] = self.data
        return flat


class CallConfiguration(NamedTuple):
    """One configuration of a launch: its TTIR, grid and options, and the constexprs that the tuner chose.

    ``refused``: the compiler's message for a configuration that it does not compile; the TTIR is then empty. ``notes``:
    notes that a run prints about the configuration.
    """

    ttir: str
    grid: tuple[int, ...]
    options: Mapping[str, int]
    constants: Mapping[str, Any]
    refused: str = ""
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """The constexprs and options by name, without options that have Triton's default."""
        return {**self.constants, **{n: x for n, x in self.options.items() if x != DEFAULTS.get(n, ...)}}


@dataclass(frozen=True)
class Call:
    """One launch: the kernel, the places at which it is defined and launched, its arguments, and its configurations.

    The launch has the first configuration; the others belong to its autotuner.  ``path``, ``line``: place of the
    kernel; ``where``: place of the launch.  ``triton``: the release that compiled the TTIR.  ``language``: the release
    of another language, whose kernel npusim wrote as TTIR; no compiler compiles that text.
    """

    name: str
    path: str
    line: int
    where: str
    arguments: Mapping[str, Any]
    configurations: tuple[CallConfiguration, ...]
    triton: str = ""
    language: str = ""

    @property
    def grid(self) -> tuple[int, ...]:
        """The grid of the launch."""
        return self.configurations[0].grid

    @property
    def tensors(self) -> dict[str, Argument]:
        """The tensors by parameter."""
        return {n: x for n, x in self.arguments.items() if isinstance(x, Argument)}

    def floats(self) -> dict[str, Any] | None:
        """Return the values of floating-point tensors by parameter; None where they were not recorded."""
        known = {n: x.data for n, x in self.tensors.items() if not x.is_integer and x.data is not None}
        return known or None

    @property
    def schedule(self) -> str:
        """The name by which every verb accepts the call, which is stored in a file of the cache folder."""
        return f"{_kept(self)}::0"

    def __str__(self) -> str:
        many = f", {len(self.configurations)} configurations" if len(self.configurations) > 1 else ""
        return f"{self.name} [{' x '.join(map(str, self.grid))}] at {self.where}{many}"


class Calls(list[Call]):
    """The list of `npusim.record`: launches of Triton kernels in the program's order.

    Each `Call` has ``name``, ``grid`` (programs per axis), ``tensors`` (shapes, strides in elements, formats),
    ``configurations`` and ``where`` (file and line); `npusim.run` accepts a call in place of a schedule's name,
    `npusim.run_calls` the list.

    Examples
    --------
    >>> from npusim.kernels.triton.calls import Calls
    >>> Calls()
    <Calls: no launch>
    """

    def __repr__(self) -> str:
        """Return the number of launches and their kernels, on one line."""
        kernels = ", ".join(dict.fromkeys(call.name for call in self))
        return f"<Calls: {len(self)} {plural(len(self), 'launch')} of {kernels}>" if self else "<Calls: no launch>"

    def save(self, path: str | Path) -> Path:
        """Write the calls to a file (``.npz``) and return its path.

        Raises `SpecError` for another suffix, or if nothing was recorded.
        """
        path = Path(path)
        if path.suffix != SUFFIX:
            raise SpecError(f"{path}: the name of a file of calls must end with {SUFFIX}")
        if not self:
            raise SpecError(f"{path}: the file has no recorded launch")
        path.write_bytes(_packed(self))
        return path


def call_of(schedule: str) -> Call:
    """Return the call that ``calls.npz::k`` names; without ``::k``, the only call of a file.

    Raises `SpecError` for a missing file or call, or for a file that is not a file of calls.
    """
    path, number = launch_parts(schedule)
    calls = read_calls(Path(path))
    listed = "; ".join(f"{path}::{i} {call}" for i, call in enumerate(calls))
    if not number and len(calls) == 1:
        number = "0"
    if not number:
        raise SpecError(
            f"{path} has {len(calls)} calls; name one of them (`npusim run` accepts the file and runs "
            f"all of them in sequence): {listed}"
        )
    if not number.isascii() or not number.isdigit() or int(number) >= len(calls):
        raise SpecError(f"{path}: there is no call {number!r}; its calls are {listed}")
    return calls[int(number)]


def numbered(schedule: str) -> list[str]:
    """Return the names of a file's calls, if the schedule names only the file and the file has several calls; else
    none.
    """
    if not is_recorded(schedule) or launch_parts(schedule)[1]:
        return []
    calls = read_calls(Path(schedule))
    return [f"{schedule}::{i}" for i in range(len(calls))] if len(calls) > 1 else []


def read_calls(path: Path) -> Calls:
    """Return the calls of a file; raise `SpecError` if it is missing or damaged.  No code of a user is executed."""
    if not path.is_file():
        raise SpecError(f"{path}: {absent(path)}; `npusim record script.py` writes one")
    return _read(str(path.resolve()), path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _read(path: str, _changed: int) -> Calls:
    why = f"{path}: this is not a file of recorded calls, or it is damaged"
    try:
        arrays = read_archive(Path(path))
        document = _object("calls", json.loads(bytes(arrays["calls"]).decode()))
        if document["format"] != FORMAT:
            raise SpecError(f"{path}: format {document['format']} of recorded calls; this npusim reads {FORMAT}")
        texts, release = document["ttir"], _text("triton", document["triton"])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise SpecError(f"{path}: ttir: a list of texts is needed, got {_short(texts)}")
        if not isinstance(document["calls"], list) or not document["calls"]:
            raise SpecError(f"{path}: calls: a list of calls is needed, got {_short(document['calls'])}")
        return Calls(_call(i, each, texts, arrays, release) for i, each in enumerate(document["calls"]))
    except (TensorError, SpecError) as error:
        raise SpecError(str(error)) from None
    except ValueError as error:  # message of the checks below, from a name, a value and the allowed values
        raise SpecError(f"{why}: {error}") from None
    except KeyError as error:
        raise SpecError(f"{why} (the file has no entry named {error})") from None
    except Exception as error:  # noqa: BLE001 - zip and zlib raise errors of other classes
        raise SpecError(f"{why} ({error})") from None


def _call(number: int, each: Mapping[str, Any], texts: Sequence[str], arrays: Mapping[str, Any], release: str) -> Call:
    arguments = dict[str, Any]()
    for name, x in _object("arguments", _object(f"call {number}", each)["arguments"]).items():
        is_tensor = isinstance(x, dict)
        arguments[name] = _argument(name, x, arrays.get(f"{number}.{name}")) if is_tensor else _value(name, x)
    language = _text("language", each.get("language", ""))
    named = None if language else {n for n, x in arguments.items() if not isinstance(x, Argument)}
    listed = _list("configurations", each["configurations"])
    configurations = tuple(_configuration(_object("configuration", v), texts, named) for v in listed)
    if not configurations:
        raise ValueError("a call without a configuration")
    name, path, where = (_text(n, each[n]) for n in ("name", "path", "where"))
    if not name.isidentifier():
        raise ValueError(f"a kernel called {name!r}")
    return Call(name, path, _whole("line", each["line"]), where, arguments, configurations, release, language)


def _argument(name: str, x: Mapping[str, Any], data: Any) -> Argument:
    """Return a tensor of a file; raise `ValueError` for numbers that do not describe a view."""
    fmt, lists = _text("format", x["fmt"]), {n: tuple(_list(n, x[n])) for n in ("shape", "strides", "block")}
    strides = [abs(s) if isinstance(s, int) else s for s in lists["strides"]]
    for n in (*lists["shape"], *strides, *lists["block"], x["offset"], x["storage"]):
        _whole(name, n)
    if len(strides) != len(lists["shape"]):
        raise ValueError(f"{name}: {len(strides)} strides; allowed: one for each of its {len(lists['shape'])} axes")
    reach = sum(max(n - 1, 0) * s for n, s in zip(lists["shape"], strides, strict=True))
    _whole(f"{name}: its last element", x["offset"] + reach)
    back = sum(max(n - 1, 0) * min(s, 0) for n, s in zip(lists["shape"], lists["strides"], strict=True))
    _whole(f"{name}: its first element", x["offset"] + back)
    if fmt in INTEGERS and reach >= MOST_INTEGERS:
        raise ValueError(f"{name}: the integers span {reach:,} elements; allowed: {MOST_INTEGERS:,}")
    dtype = np.dtype(fmt) if fmt in INTEGERS else get_format(fmt).dtype
    if data is not None and (data.dtype.itemsize != dtype.itemsize or data.size != prod(lists["shape"])):
        raise ValueError(
            f"{name}: the file has {data.size} elements of {data.dtype} for a tensor {lists['shape']} of {fmt}"
        )
    data = None if data is None else data.view(dtype).reshape(lists["shape"])
    spans = tuple(_span(name, each) for each in _list("spans", x.get("spans", [])))
    return Argument(**lists, offset=x["offset"], fmt=fmt, storage=x["storage"], data=data, spans=spans)


def _span(name: str, x: object) -> tuple[int, int]:
    """Return the first element of a tensor and the element after its last one; raise `ValueError` for another value."""
    first, end = (*(_whole(name, n) for n in _list("span", x)), -1, -1)[:2]
    if first > end or len(_list("span", x)) > 2:
        raise ValueError(f"{name}: span {_short(x)}; allowed: the first element and the one behind the last")
    return first, end


def _whole(name: str, x: object) -> int:
    """Return an integer of a file; raise `ValueError` for another value, or one with more than 63 bits."""
    if not isinstance(x, int) or isinstance(x, bool) or not 0 <= x < 1 << 63:
        raise ValueError(f"{name}: {_short(x)}; allowed: whole numbers from 0, below 2^63")
    return x


def _object(name: str, x: object) -> dict[str, Any]:
    """Return an object of a file; raise `ValueError` for another value."""
    if not isinstance(x, dict):
        raise ValueError(f"{name}: {_short(x)}; allowed: an object with names")
    return x


def _list(name: str, x: object) -> list[Any]:
    """Return a list of a file; raise `ValueError` for another value."""
    if not isinstance(x, list):
        raise ValueError(f"{name}: {_short(x)}; allowed: a list")
    return x


def _text(name: str, x: object) -> str:
    if not isinstance(x, str) or not x.isprintable() or len(x) > MOST_LETTERS:
        raise ValueError(f"{name}: {_short(x)}; allowed: text of at most {MOST_LETTERS:,} printable letters")
    return x


def _value(name: str, x: object) -> Any:
    """Return a number or text of a file; raise `ValueError` for another value, or a number with more than 64 bits."""
    if not isinstance(x, int | float | str | None) or (isinstance(x, int) and not -(1 << 63) <= x < 1 << 64):
        raise ValueError(f"{name}: {_short(x)}; allowed: numbers of at most 64 bits, or text")
    return x


def _short(x: object) -> str:
    text = repr(x)
    return text if len(text) < 80 else f"{text[:80]}... ({len(text):,} letters)"


def _configuration(of: Mapping[str, Any], texts: Sequence[str], named: set[str] | None) -> CallConfiguration:
    """Return a configuration of a file; ``named``: the names that its constants may have, None for any name."""
    number = of["ttir"]
    if number is not None and _whole("ttir", number) >= len(texts):
        raise ValueError(f"ttir: {number}; allowed: 0 to {len(texts) - 1}, an index into the file's list of texts")
    text = "" if number is None else texts[number]
    options = {n: _whole(n, x) for n, x in _object("options", of["options"]).items()}
    if not of["refused"] and (why := refused_option(options)):
        raise ValueError(why)
    constants = {n: _value(n, x) for n, x in _object("constants", of["constants"]).items()}
    if unknown := [n for n in constants if named is not None and n not in named]:
        raise ValueError(f"constant {_short(unknown[0])}: the kernel has no numeric parameter of this name")
    if not isinstance(refused := of["refused"], str):
        raise ValueError(f"refused: {_short(refused)}; allowed: text")
    notes = tuple(_text("note", x) for x in _list("notes", of.get("notes", [])))
    return CallConfiguration(text, _grid(_list("grid", of["grid"])), options, constants, refused, notes)


def _grid(numbers: Sequence[int]) -> tuple[int, ...]:
    grid = tuple(_whole("grid", n) for n in numbers)
    if not 1 <= len(grid) <= 3 or prod(grid) > MOST_PROGRAMS:
        raise ValueError(
            f"a grid of {_short(list(numbers))}; allowed: one to three numbers, {MOST_PROGRAMS:,} programs"
        )
    return grid


def _packed(calls: Sequence[Call]) -> bytes:
    """Return the file of some calls."""
    from io import BytesIO

    texts, arrays, listed = dict[str, int](), dict[str, Any](), list[Any]()
    for number, call in enumerate(calls):
        arguments = dict[str, Any]()
        for name, x in call.arguments.items():
            arguments[name] = x
            if isinstance(x, Argument):
                arguments[name] = {k: v for k, v in asdict(replace(x, data=None)).items() if k != "data"}
                if x.data is not None:
                    bits = x.data if x.is_integer else x.data.view(f"u{x.data.dtype.itemsize}")
                    arrays[f"{number}.{name}"] = bits
        configurations = [
            {
                "ttir": texts.setdefault(v.ttir, len(texts)) if v.ttir else None,
                "grid": v.grid,
                "options": dict(v.options),
                "constants": dict(v.constants),
                "refused": v.refused,
                **({"notes": v.notes} if v.notes else {}),
            }
            for v in call.configurations
        ]
        named = {"name": call.name, "path": call.path, "line": call.line, "where": call.where}
        named |= {"language": call.language} if call.language else {}
        listed.append({**named, "arguments": arguments, "configurations": configurations})
    release = next((call.triton for call in calls if call.triton), "")
    document = {"format": FORMAT, "triton": release, "ttir": list(texts), "calls": listed}
    arrays["calls"] = np.frombuffer(json.dumps(document).encode(), np.uint8)
    buffer = BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _kept(call: Call) -> Path:
    """Return the file of one call in the cache folder, by its content."""
    folder, packed = cache.folder(), _packed([call])
    if folder is None:
        raise SpecError(
            "a recorded call needs npusim's cache folder, which cannot be written; store the calls "
            "with calls.save(file) instead"
        )
    path = folder / f"call-{short_kernel_name(call.name)}-{sha256(packed).hexdigest()[:16]}{SUFFIX}"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(packed)
        fresh.replace(path)  # so that no reader sees an incomplete file
    return path
