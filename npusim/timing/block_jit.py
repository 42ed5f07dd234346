"""Compile the engine's kernels as ``npusim.formats.jit`` does, without counting references.

The kernels pass tuples of arrays between functions and allocate nothing; counting the references
of all of them at each call would take longer than the work itself.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import numba

from npusim.formats.jit_cache import compiled_on_disk, is_missing
from npusim.formats.jit_part import part
from npusim.timing.block_rows import Table

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function")
Result = TypeVar("Result")


def _compile(function: Function) -> Any:
    """Compile without the GIL and without numba's reference counts (``_nrt``)."""
    njit: Any = numba.njit
    return njit(nogil=True, error_model="numpy", _nrt=False, no_cfunc_wrapper=True)(function)


def inline(function: Function) -> Function:
    """Compile a function into the kernels that call it."""
    compiled: Function = part(function, _nrt=False)
    return compiled


def kernel(function: Callable[..., Result]) -> Callable[..., Result]:
    """Compile ``function`` on first call, and keep the machine code on disk where there is room.

    Tuples of arrays reach it as tables of addresses.
    """
    compiled = compiled_on_disk(_compile, function)

    @functools.wraps(function)
    def called(*args: Any) -> Result:
        result: Result = compiled(*(Table(a) if isinstance(a, tuple) else a for a in args))
        return result

    called.is_missing = functools.partial(is_missing, compiled)  # type: ignore[attr-defined]
    return called
