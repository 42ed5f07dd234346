"""Compile numeric kernels with numba, cached on disk, and give them bit-level intrinsics.

Importing this module imports numba (half a second), so only kernel modules do, and those are
imported by the functions that call them.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import event, types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def _announce_compilation() -> None:
    """Say once a process, on stderr, why the first call takes seconds."""
    sys.stderr.write("npusim: compiling numeric kernels (first use; then cached on disk)\n")


class _CompilationListener(event.Listener):
    """Announce the first real compilation of a kernel of this package; cache hits stay silent."""

    def on_start(self, event: Any) -> None:
        function = getattr(event.data.get("dispatcher"), "py_func", None)
        if getattr(function, "__module__", "").startswith("npusim."):
            _announce_compilation()

    def on_end(self, event: Any) -> None:
        """Do nothing: only the start is of interest."""


_register: Any = event.register
_register("numba:compile", _CompilationListener())


@functools.cache
def _sources_stamp() -> tuple[tuple[str, int, int], ...]:
    """Return name, time and size of every source file of this package."""
    folder = Path(__file__).parent
    stats = [(path.name, path.stat()) for path in sorted(folder.glob("*.py"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def _cached(function: Function) -> Any:
    """Return ``function`` compiled with a disk cache, or None if there can be no safe one.

    numba looks at the function's own file only; an edit of a function it calls from another
    file would leave stale machine code, so the stamp is extended to the whole package.
    """
    try:
        compiled = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # numba: "no locator available": nowhere to write
        return None
    file: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if not hasattr(file, "_source_stamp"):
        return None
    file._source_stamp = (file._source_stamp, _sources_stamp())
    return compiled


def kernel(function: Function) -> Function:
    """Compile ``function`` on first call, without the GIL, and keep the machine code on disk.

    No ``fastmath``: every operation rounds where it is written.  When no cache folder can be
    written (read-only install, no home) the kernel is compiled in memory instead.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", numba.core.errors.NumbaWarning)
        compiled = _cached(function)
        if compiled is None:
            compiled = numba.njit(nogil=True, error_model="numpy")(function)
    result: Function = compiled
    return result


def inline(function: Function) -> Function:
    """Compile a scalar function that kernels call; LLVM inlines it."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    result: Function = compiled
    return result


def _bitcast(source: Any, target: Any) -> Any:
    """Return a numba intrinsic reinterpreting the bits of ``source`` as ``target``."""

    @intrinsic
    def cast(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), codegen

    return cast


float32_bits = _bitcast(types.float32, types.uint32)
bits_float32 = _bitcast(types.uint32, types.float32)
float64_bits = _bitcast(types.float64, types.uint64)
bits_float64 = _bitcast(types.uint64, types.float64)


def _fma(scalar: Any) -> Any:
    """Return a numba intrinsic for the fused multiply-add of ``scalar``."""

    @intrinsic
    def fused(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.fma(*args)

        return scalar(scalar, scalar, scalar), codegen

    return fused


fma32 = _fma(types.float32)
fma64 = _fma(types.float64)
