"""Compile the engine's kernels as ``npusim.formats.jit`` does, without counting references.

The kernels pass tuples of some fifty arrays between functions and allocate nothing; counting the
references of all of them at each call would take longer than the work itself.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.errors import NumbaWarning

Function = TypeVar("Function")

#: ``_nrt``: numba's switch for code without its reference counts.
OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}


def inline(function: Function) -> Function:
    compiled: Any = numba.njit(forceinline=True, **OPTIONS)(function)
    result: Function = compiled
    return result


def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Return name, time and size of every source file of the engine."""
    stats = [(path.name, path.stat()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def kernel(function: Function) -> Function:
    """Compile ``function`` on first call, and keep the machine code on disk."""
    compiled: Any = numba.njit(cache=True, **OPTIONS)(function)
    file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):
        file._source_stamp = (file._source_stamp, _stamp())
    result: Function = compiled
    return result
