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
from npusim.errors import NpusimError, SpecError, TensorError
from npusim.formats import get_format
from npusim.formats.archives import read_archive
from npusim.ttir import SUFFIX, is_recorded
from npusim.ttir.compiler import DEFAULTS, OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Version of the file.
FORMAT = 1
#: Formats of integers by the bytes of an element: their values are data of a call.
INTEGERS = MappingProxyType(
    {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8}
)
#: Programs of a launch: the addresses of every one are evaluated, a block each.
MOST_PROGRAMS = 1 << 20


@dataclass(frozen=True)
class Argument:
    """A tensor of a call: a view of a storage.

    ``strides``, ``offset``: in elements.  ``storage``: the number of the storage among the recording's.  ``data``: the
    values of the view, None where floats were not recorded.  ``block``: the block of a tensor descriptor.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    fmt: str
    storage: int
    data: Any = field(default=None, compare=False, repr=False)
    block: tuple[int, ...] = ()

    @property
    def is_integer(self) -> bool:
        """Whether the elements are integers."""
        return self.fmt in INTEGERS

    def elements(self) -> np.ndarray[Any, Any]:
        """Return the values in the order of memory, from the view's first element on; 0 between them."""
        places = np.zeros((1,) * len(self.shape), np.int64)
        for axis, (n, step) in enumerate(zip(self.shape, self.strides, strict=True)):
            places = places + (np.arange(n) * step).reshape(n, *(1 for _ in self.shape[axis + 1 :]))
        flat = np.zeros(int(places.max(initial=0)) + 1, self.data.dtype)
        flat[places] = self.data
        return flat


class CallConfiguration(NamedTuple):
    """One configuration of a launch: its TTIR, grid and options, and the constexprs that the tuner chose.

    ``refused``: Triton's message for a configuration that it does not compile; the TTIR is then empty.
    """

    ttir: str
    grid: tuple[int, ...]
    options: Mapping[str, int]
    constants: Mapping[str, Any]
    refused: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """The constexprs and options by name, without options that have Triton's default."""
        return {**self.constants, **{n: x for n, x in self.options.items() if x != DEFAULTS.get(n, ...)}}


@dataclass(frozen=True)
class Call:
    """One launch: the kernel, the places of its definition and launch, its arguments, and its configurations.

    The launch has the first configuration; the others belong to its autotuner.  ``path``, ``line``: of the kernel;
    ``where``: of the launch.  ``triton``: the release that compiled the TTIR.
    """

    name: str
    path: str
    line: int
    where: str
    arguments: Mapping[str, Any]
    configurations: tuple[CallConfiguration, ...]
    triton: str = ""

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
    """Launches in the program's order."""

    def save(self, path: str | Path) -> Path:
        """Write the calls to a file (``.npz``) and return its path.

        Raises `SpecError` for another suffix, or where nothing was recorded.
        """
        path = Path(path)
        if path.suffix != SUFFIX:
            raise SpecError(f"{path}: a file of calls ends with {SUFFIX}")
        if not self:
            raise SpecError(f"{path}: no launch of a Triton kernel was recorded")
        path.write_bytes(_packed(self))
        return path


def call_of(schedule: str) -> Call:
    """Return the call that ``calls.npz::k`` names; without ``::k`` a file's only one.

    Raises `SpecError`: no such file or call, or a file that is no file of calls.
    """
    path, _, number = schedule.partition("::")
    calls = read_calls(Path(path))
    listed = "; ".join(f"{path}::{i} {call}" for i, call in enumerate(calls))
    if not number and len(calls) == 1:
        number = "0"
    if not number:
        raise SpecError(f"{path} has {len(calls)} calls; name one of them (run takes them all, in sequence): {listed}")
    if not number.isascii() or not number.isdigit() or int(number) >= len(calls):
        raise SpecError(f"{path}: no call {number!r}; there are {listed}")
    return calls[int(number)]


def numbered(schedule: str) -> list[str]:
    """Return the names of the calls of a file that has several, if the schedule is the file alone; else none."""
    if not is_recorded(schedule) or "::" in schedule:
        return []
    calls = read_calls(Path(schedule))
    return [f"{schedule}::{i}" for i in range(len(calls))] if len(calls) > 1 else []


def read_calls(path: Path) -> Calls:
    """Return the calls of a file; raise `SpecError` where it is missing or damaged.  No code of a user is executed."""
    if not path.is_file():
        raise SpecError(f"{path}: no such file; `npusim record script.py` writes one")
    return _read(str(path.resolve()), path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _read(path: str, _changed: int) -> Calls:
    why = f"{path}: no file of recorded calls, or a damaged one"
    try:
        arrays = read_archive(Path(path))
        document = json.loads(bytes(arrays["calls"]).decode())
        if document["format"] != FORMAT:
            raise SpecError(f"{path}: format {document['format']} of recorded calls; this npusim reads {FORMAT}")
        texts, release = document["ttir"], str(document["triton"])
        return Calls(_call(i, each, texts, arrays, release) for i, each in enumerate(document["calls"]))
    except (TensorError, SpecError) as error:
        raise SpecError(str(error)) from None
    except (NpusimError, KeyError, TypeError, ValueError, IndexError, AttributeError, OSError, EOFError) as error:
        raise SpecError(f"{why} ({type(error).__name__}: {error})") from None
    except Exception as error:  # noqa: BLE001 - zip and zlib have errors of their own
        raise SpecError(f"{why} ({error})") from None


def _call(number: int, each: Mapping[str, Any], texts: Sequence[str], arrays: Mapping[str, Any], release: str) -> Call:
    arguments = dict[str, Any]()
    for name, x in each["arguments"].items():
        arguments[name] = x
        if isinstance(x, dict):
            data, fmt = arrays.get(f"{number}.{name}"), str(x["fmt"])
            lists = {n: tuple(map(int, x[n])) for n in ("shape", "strides", "block")}
            if len(lists["shape"]) != len(lists["strides"]) or min(lists["shape"], default=1) < 0:
                raise ValueError(f"{name}: shape {lists['shape']} with strides {lists['strides']}")
            data = data if data is None or fmt in INTEGERS else data.view(get_format(fmt).dtype)
            if data is not None and data.size != prod(lists["shape"]):
                raise ValueError(f"{name}: {data.size} elements of {lists['shape']}")
            data = None if data is None else data.reshape(lists["shape"])
            arguments[name] = Argument(**lists, offset=int(x["offset"]), fmt=fmt, storage=int(x["storage"]), data=data)
        elif not isinstance(x, int | float | str | None):
            raise ValueError(f"{name}: {x!r}")
    configurations = tuple(_configuration(v, texts) for v in each["configurations"])
    if not configurations:
        raise ValueError("a call without a configuration")
    return Call(
        str(each["name"]), str(each["path"]), int(each["line"]), str(each["where"]), arguments, configurations, release
    )


def _configuration(of: Mapping[str, Any], texts: Sequence[str]) -> CallConfiguration:
    text = texts[of["ttir"]] if of["ttir"] is not None else ""
    options = {n: int(x) for n, x in of["options"].items()}
    if unknown := options.keys() - set(OPTIONS):
        raise ValueError(f"option {min(unknown)}")
    return CallConfiguration(text, _grid(of["grid"]), options, dict(of["constants"]), str(of["refused"]))


def _grid(numbers: Sequence[int]) -> tuple[int, ...]:
    grid = tuple(map(int, numbers))
    if not 1 <= len(grid) <= 3 or min(grid) < 0:
        raise ValueError(f"a grid of {list(numbers)}")
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
            }
            for v in call.configurations
        ]
        named = {"name": call.name, "path": call.path, "line": call.line, "where": call.where}
        listed.append({**named, "arguments": arguments, "configurations": configurations})
    document = {"format": FORMAT, "triton": calls[0].triton, "ttir": list(texts), "calls": listed}
    arrays["calls"] = np.frombuffer(json.dumps(document).encode(), np.uint8)
    buffer = BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _kept(call: Call) -> Path:
    """Return the file of one call in the cache folder, by its content."""
    folder, packed = cache.folder(), _packed([call])
    if folder is None:
        raise SpecError("recorded calls need npusim's cache folder, which cannot be written: calls.save(file)")
    path = folder / f"call-{call.name}-{sha256(packed).hexdigest()[:16]}{SUFFIX}"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(packed)
        fresh.replace(path)  # nobody reads half of it
    return path
