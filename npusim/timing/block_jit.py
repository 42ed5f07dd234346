"""Compile the engine's kernels as ``npusim.formats.jit`` does, without counting references.

The kernels pass tuples of arrays between functions and allocate nothing; counting the references
of all of them at each call would take longer than the work itself.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numba

from npusim.formats.jit_cache import compiled_on_disk

Function = TypeVar("Function")


def _compile(function: Function, **options: Any) -> Any:
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


def kernel(function: Function) -> Function:
    """Compile ``function`` on first call, and keep the machine code on disk where there is room."""
    result: Function = compiled_on_disk(_compile, function) or routine(function)
    return result
