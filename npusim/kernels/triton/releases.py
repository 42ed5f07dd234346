"""Triton's releases: those that were tested, and their differences.

3.7: the assembler gets ``--regAllocOptLevel=2``.  3.8: a descriptor's type has no ``tensor``; a thread adds its own
elements of a sum as a tree (other bits); an autotuner uses a single remaining configuration without a measurement. 3.9:
sm_90's assembler is the newer of two; no block pointers; a launch that does not state contraction gets a warning; the
bindings report objects that are alive when Python ends (`npusim.cli`).  3.10 is announced not to contract by default.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from npusim.errors import SpecError

#: Releases whose TTIR was tested: from the first to the newest.
FIRST, NEWEST = (3, 6), (3, 9)
#: From this release on an autotuner uses the only remaining configuration without a measurement.
TAKES_ONE = (3, 8)
#: From this release on a descriptor's type names its block without ``tensor``.
SHORT_DESCRIPTORS = (3, 8)
#: From this release on a thread adds its own elements of a sum as a tree of neighbours; in earlier releases, from the
#: first to the last.
ADDS_IN_TREES = (3, 8)
#: From this release on the assembler gets an option for its allocation of registers.
ALLOCATES = (3, 7)


def release() -> str:
    """Return Triton's release; raise `SpecError` if it is missing, or older than those whose TTIR was tested."""
    try:
        release = version("triton")
    except PackageNotFoundError:
        raise SpecError(
            'Triton is not installed, and the kernels need its compiler: pip install "npusim[triton]"'
        ) from None
    if _number(release) < FIRST:
        raise SpecError(f"Triton {release}: npusim cannot read its TTIR; install release {_dotted(FIRST)} or later")
    return release


def untried() -> str:
    """Return the note on a release beyond the newest tested one; empty for other releases, and if Triton is missing."""
    try:
        if _number(version("triton")) <= NEWEST:
            return ""
    except PackageNotFoundError:
        return ""
    contracts = "contracts" if fused({})["enable_fp_fusion"] else "does not fuse"
    why = f"npusim was not tested with it (tested: {_dotted(FIRST)} to {_dotted(NEWEST)})"
    return f"Triton {release()}: {why}; by default it {contracts} multiplications and additions"


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", release)[:2])


def _dotted(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))


def measures_the_only() -> bool:
    """Return whether an autotuner measures a configuration if it is the only remaining one."""
    return _number(release()) < TAKES_ONE


def adds_in_trees() -> bool:
    """Return whether a thread adds its own elements of a sum as a tree."""
    return _number(release()) >= ADDS_IN_TREES


def compiled_by() -> tuple[str, ...]:
    """Return the facts on which compiled code depends in addition to the kernel and its options: the release, and the
    user's default.
    """
    return release(), os.environ.get("TRITON_DEFAULT_FP_FUSION", "")


def fused(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that state whether multiplications and additions are contracted.

    If they do not, ``TRITON_DEFAULT_FP_FUSION`` or the release's default decides, as in a launch.
    """
    language = import_module("triton").knobs.language
    return {"enable_fp_fusion": bool(language.default_fp_fusion), **options}


def tool(name: str) -> Path:
    """Return one of NVIDIA's tools that are part of Triton."""
    return Path(str(import_module("triton").__file__)).parent / "backends" / "nvidia" / "bin" / name


def assembler(number: int) -> tuple[str, ...]:
    """Return the assembler of an architecture, by its number, with the options that Triton always gives it."""
    words = () if _number(release()) < ALLOCATES else ("--regAllocOptLevel=2",)
    return str(import_module("triton.backends.nvidia.compiler").get_ptxas(number).path), *words


def assembler_of(architecture: str) -> str:
    """Return the release of Triton and of the assembler for an architecture's code (``sm_90``)."""
    path, *_ = assembler(int(architecture.rpartition("_")[2]))
    return f"Triton {release()}, ptxas {_release_of(path)}"


@lru_cache(maxsize=8)
def _release_of(path: str) -> str:
    said = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else "of an unknown release"


def as_first(ttir: str) -> str:
    """Return TTIR in the form of the first tested release.

    From 3.8 on a descriptor's type is ``tensordesc<64x64xf16>``, and its sizes and strides are ``%a.shape.0``.
    """
    ttir = re.sub(r"tensordesc<(\d[^<>]*)>", r"tensordesc<tensor<\1>>", ttir)
    ttir = re.sub(r"(tt\.make_tensor_descriptor .*, )<(\d[^<>]*)>", r"\1<tensor<\2>>", ttir)
    return re.sub(r"%\w+(?:\.\w+)+", lambda name: name[0].replace(".", "_"), ttir)


def as_installed(ttir: str) -> str:
    """Return TTIR of any tested release in the form that the installed release reads."""
    ttir = as_first(ttir)
    if _number(release()) < SHORT_DESCRIPTORS:
        return ttir
    ttir = re.sub(r"tensordesc<tensor<([^<>]*)>>", r"tensordesc<\1>", ttir)
    return re.sub(r"(tt\.make_tensor_descriptor .*, )<tensor<([^<>]*)>>", r"\1<\2>", ttir)


@lru_cache(maxsize=1)
def load_compiler() -> None:
    """Import Triton, if it is installed, before processes that compile are forked."""
    with suppress(ImportError):
        import_module("triton.compiler")
