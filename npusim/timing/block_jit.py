"""Compile the engine's kernels as ``npusim.formats.jit`` does, without counting references.

The kernels pass tuples of arrays between functions and allocate nothing; counting the references
of all of them at each call would take longer than the work itself.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.errors import NumbaWarning

Function = TypeVar("Function")


def _compile(function: Function, **options: bool) -> Any:
    """Compile without the GIL and without numba's reference counts (``_nrt``)."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy", _nrt=False, **options)(function)
    return compiled


def inline(function: Function) -> Function:
    """Compile a function that every caller contains."""
    compiled: Function = _compile(function, forceinline=True)
    return compiled


def routine(function: Function) -> Function:
    """Compile a function that is called, for what is rare or large."""
    compiled: Function = _compile(function)
    return compiled


def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Return name, time and size of every source file of this folder."""
    stats = [(path.name, path.stat()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def kernel(function: Function) -> Function:
    """Compile ``function`` on first call, and keep the machine code on disk where there is room.

    numba looks at the function's own file only; the stamp of its machine code is extended to all
    files of this folder, since kernels are made of functions from several.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaWarning)
        try:
            compiled = _compile(function, cache=True)
        except RuntimeError:  # numba: "no locator available": nowhere to write
            return routine(function)
    file: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if not hasattr(file, "_source_stamp"):
        return routine(function)
    file._source_stamp = (file._source_stamp, _stamp())
    result: Function = compiled
    return result
