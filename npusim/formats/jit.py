"""Compile numeric kernels with numba, cached on disk, and give them bit-level intrinsics.

Importing this module imports numba (half a second), so only kernel modules do, and those are
imported by the functions that call them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core import event, types
from numba.extending import intrinsic

from npusim.formats.jit_cache import compiled_on_disk
from npusim.formats.jit_part import part

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def _announce_compilation() -> None:
    """Say once a process, on stderr, why the first call takes seconds."""
    sys.stderr.write("npusim: compiling numeric kernels (first use; then kept)\n")


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


def kernel(function: Function) -> Function:
    """Compile ``function`` on first call, without the GIL, and keep the machine code on disk.

    No ``fastmath``: every operation rounds where it is written.  When no cache folder can be
    written (`jit_cache`) the kernel is compiled in memory instead.
    """
    result: Function = compiled_on_disk(_compile, function)
    return result


def _compile(function: Function) -> Any:
    njit: Any = numba.njit  # its stubs lack an option
    return njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)


def inline(function: Function) -> Function:
    """Compile a scalar function that kernels call; LLVM inlines it."""
    result: Function = part(function)
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
