"""Machine code in a wheel, so that a first run compiles nothing: for the minimal processor of a kind.

A wheel that is built with code has the files that `npusim warm` stores, compiled for a baseline instead of the
builder's processor.  A file begins with the digest of its sources: code of other sources is not used.  Code for the
baseline is slower than code for the processor on which it runs (products at 0.7 to 0.8 of the speed); `npusim warm`
compiles the faster code, which has precedence.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

#: The processor for which code is compiled: ``baseline``, as for a wheel; ``native``: this processor, even if the
#: package has code; unset: this processor, if the package has no code.
VARIABLE = "NPUSIM_PROCESSOR"
BASELINE, NATIVE = "baseline", "native"


class LeastProcessor(NamedTuple):
    """The minimal processor for the code of a wheel: LLVM's name, and the features that it needs."""

    name: str
    features: tuple[str, ...]


#: By the kind of processor that `platform.machine` names (x86-64 psABI, level v3; Arm architecture, v8.0 with SIMD).
BASELINES: Mapping[str, LeastProcessor] = MappingProxyType(
    {
        "x86_64": LeastProcessor(
            "x86-64-v3", ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4.2")
        ),
        "aarch64": LeastProcessor("generic", ("fp-armv8", "neon")),
    }
)
FOLDER = Path(__file__).parent / "shipped" / platform.machine()


def baseline() -> LeastProcessor | None:
    """Return the baseline of this kind of processor; None if no wheel has code for it."""
    return BASELINES.get(platform.machine()) if sys.platform == "linux" else None


def environment() -> dict[str, str]:
    """Return the variables with which a process compiles for the baseline; none if there is no baseline."""
    known = baseline()
    if known is None:
        return {}
    features = ",".join(f"+{feature}" for feature in known.features)
    return {VARIABLE: BASELINE, "NUMBA_CPU_NAME": known.name, "NUMBA_CPU_FEATURES": features}


def processor() -> tuple[str, ...]:
    """Return the name under which code for the baseline is stored, whichever compiler compiled it."""
    known = baseline()
    return (BASELINE, *(known.name, *known.features)) if known else ()


@contextmanager
def compiling_natively() -> Iterator[None]:
    """Compile for this processor even though the package has code, unless the variable names another processor."""
    given = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = given or NATIVE
    try:
        yield
    finally:
        if given is None:
            del os.environ[VARIABLE]


def is_used() -> bool:
    """Return whether this processor runs the package's code, and no variable requests another processor's."""
    known = baseline()
    if known is None or os.environ.get(VARIABLE) or os.environ.get("NUMBA_CPU_NAME") or not FOLDER.is_dir():
        return False
    return _runs(known)


@functools.cache
def _runs(known: LeastProcessor) -> bool:
    """Return whether this processor has the features."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return all(features.get(name) for name in known.features)
