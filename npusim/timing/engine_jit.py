"""Compiles the engine as `npusim.formats.jit` does, but that it counts no references and sees arrays by address.

Its functions pass tuples of arrays to one another and allocate nothing; counting the references of all of them
at each call would take longer than the work itself.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from npusim.formats import jit

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
        result: Result = compiled(*map(argument, args))
        return result

    called.is_missing = functools.partial(jit.is_missing, compiled)  # type: ignore[attr-defined]
    return called


def argument(value: Any) -> Any:
    """Return what a kernel takes for a tuple of arrays: its table; anything else as it is."""
    return jit.internals.Table(value) if jit.internals and isinstance(value, tuple) else value
