"""Compile the engine's kernels as ``npusim.formats.jit`` does, without counting references.

The kernels pass tuples of arrays between functions and allocate nothing; counting the references
of all of them at each call would take longer than the work itself.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from npusim.formats import jit
from npusim.timing.block_rows import Table

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

inline = functools.partial(jit.inline, _nrt=False)


def kernel(function: Callable[..., Result]) -> Callable[..., Result]:
    """Compile ``function`` on first call, and keep the machine code on disk where there is room.

    Tuples of arrays reach it as tables of addresses.
    """
    compiled = jit.kernel(function, _nrt=False)

    @functools.wraps(function)
    def called(*args: Any) -> Result:
        result: Result = compiled(*(Table(a) if jit.internals and isinstance(a, tuple) else a for a in args))
        return result

    called.is_missing = functools.partial(jit.is_missing, compiled)  # type: ignore[attr-defined]
    return called
