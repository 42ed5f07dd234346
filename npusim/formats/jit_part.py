"""Functions that are compiled only into the kernels that call them.

numba optimises every function by itself, emits machine code and wrappers for it, and does so again at
each level of calls: a function five calls deep is optimised five times.  A part is only translated; the
kernel that calls it, directly or through other parts, links all of them once and optimises the whole once.
"""

from __future__ import annotations

from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from npusim.errors import NpusimError

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise NpusimError(
        "NUMBA_DISABLE_JIT is set, and this needs compiled code: unset it, or take --no-numerics --method des"
    )


class _PartLibrary(JITCodeLibrary):
    """The translation of one part, as it is linked into kernels."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Close the module; neither optimise it nor emit machine code."""
        self._raise_if_finalized()
        self._finalize_dynamic_globals()
        self._finalized = True

    def everything(self) -> list[Any]:
        """Return this library and all that it calls."""
        found = {self: None}
        for library in self._linking_libraries:
            inner = library.everything() if isinstance(library, _PartLibrary) else [library]
            found |= dict.fromkeys(inner)
        return list(found)


class _NoEntry(dict[str, str]):
    """What Python finds where machine code would be: looking anything up says that there is none."""

    def __missing__(self, arguments: object) -> None:
        raise TypeError(f"{self['name']} is compiled into the kernels that call it and cannot be called from Python")


class _PartCompiler(Compiler):
    """Translates a function, and registers it for its callers."""

    def compile_extra(self, func: Any) -> Any:
        state = self.state
        state.library = _PartLibrary(state.targetctx.codegen(), func.__qualname__)
        state.flags.no_compile = state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        # Callers look a function up by its entry point: any builtin function that is no other's.
        compiled = super().compile_extra(func)._replace(entry_point=_NoEntry(name=func.__qualname__).__getitem__)
        library = compiled.library
        state.targetctx.insert_user_function(compiled.entry_point, compiled.fndesc, library.everything())
        return compiled


def part(function: Any, **options: Any) -> Any:
    """Return ``function`` for kernels to call; it cannot be called from Python."""
    return numba.njit(error_model="numpy", pipeline_class=_PartCompiler, **options)(function)
