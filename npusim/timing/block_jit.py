"""Compile the engine's kernels as ``npusim.formats.jit`` does, with this folder's sources watched.

numba looks at a kernel's own file only; the stamp of its cached machine code is extended to every
file that kernels here are made of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from npusim.formats import jit

Function = TypeVar("Function")

inline = jit.inline


def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Return name, time and size of every source file of the engine."""
    stats = [(path.name, path.stat()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def kernel(function: Function) -> Function:
    """Compile ``function`` on first call, and keep the machine code on disk."""
    compiled: Any = jit.kernel(function)  # type: ignore[type-var]
    file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):
        file._source_stamp = (file._source_stamp, _stamp())
    result: Function = compiled
    return result
