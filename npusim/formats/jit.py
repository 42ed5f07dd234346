"""Compile numeric kernels with numba, cached on disk, and give them bit-level intrinsics.

Importing this module imports numba (half a second), so only kernel modules do, and those are
imported by the functions that call them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import types
from numba.extending import intrinsic

from npusim.errors import NpusimError

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise NpusimError(
        "NUMBA_DISABLE_JIT is set, and this needs compiled code: unset it, or take --no-numerics --method des"
    )

Function = TypeVar("Function", bound=Callable[..., Any])
#: Set to 1: only what numba documents, which compiles more slowly and keeps no machine code.
PLAIN_VARIABLE = "NPUSIM_PLAIN_NUMBA"
#: The newest numba whose internals are known to serve (the oldest is what the package asks for).
KNOWN_NUMBA = (0, 68)


def _internals() -> Any:
    """Return `npusim.formats.numba_internals`; None where this numba is another from within, which is said."""
    if os.environ.get(PLAIN_VARIABLE) == "1":
        return None
    try:
        module = importlib.import_module("npusim.formats.numba_internals")
        if numba.version_info.short > KNOWN_NUMBA:
            module.check()
    except (ImportError, AttributeError, TypeError, ValueError, NotImplementedError, numba.errors.NumbaError) as error:
        sys.stderr.write(
            f"npusim: numba {numba.__version__} is not known from within ({error}): kernels are compiled anew "
            "in every process, and more slowly\n"
        )
        return None
    module.announce_compilation()
    return module


internals = _internals()


def kernel(function: Function, **options: Any) -> Function:
    """Compile ``function`` on first call, without the GIL, and keep the machine code on disk.

    No ``fastmath``: every operation rounds where it is written.  When no cache folder can be
    written (`numba_internals`) the kernel is compiled in memory instead.
    """
    njit: Any = numba.njit  # its stubs lack an option
    if internals is None:
        return njit(nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]
    compiled = njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, **options)(function)
    result: Function = internals.kept(compiled, function)
    return result


def inline(function: Function, **options: Any) -> Function:
    """Compile a function into the kernels that call it; it cannot be called from Python."""
    njit: Any = numba.njit
    result: Function = internals.part(function, **options) if internals else njit(error_model="numpy")(function)
    return result


def is_missing(compiled: Any) -> bool:
    """Return whether machine code of a kernel could be kept on disk, but there is none yet, nor in this process."""
    return internals is not None and internals.is_missing(compiled)


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
