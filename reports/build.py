"""Builds the studies: ``python reports/build.py [STUDY ...] [--out DIR]``.

A study is a folder here with a ``page.py``, whose ``write(folder)`` returns the files it wrote: a page
from ``template.md``, its figures as JSON (floats to four digits, so that they compare), charts as SVG.
Everything is computed from the product's own schedules with fixed seeds, from this checkout alone and without a
network; the same files come out, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    # A script's own folder is on the path; studies are imported from its parent, which also has npusim.
    sys.path[0] = str(HERE.parent)
    # Read when numpy loads.  The studies' products are small: threads would cost more than they save,
    # and the last bits of float64 references would depend on how many there are.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from npusim.config.messages import choices
from npusim.errors import NpusimError, SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["SECONDS", "STUDIES", "build"]

#: Seconds of one core for each study, with compiled machine code; studies that read the figures of others are last.
SECONDS: Mapping[str, int] = MappingProxyType(
    {
        "ascend_950": 7,
        "ascend_timing": 60,
        "block_scaled": 45,
        "coverage": 1,
        "decode": 13,
        "explore": 80,
        "front": 16,
        "nodes": 52,
        "pasa_numerics": 160,
        "pcast_numerics": 160,
        "production": 26,
        "record": 1,
        "recurrences": 160,
        "served": 67,
        "stress": 120,
        "tiling_mask": 3,
        "tune": 1,
        "sm120": 35,
        "validation": 320,
        "volta": 25,
        "gallery": 18,
        "papers": 1,
        "right": 1,
    }
)
STUDIES = tuple(SECONDS)


def build(name: str, folder: Path) -> list[Path]:
    """Write the study ``name`` to a folder of that name in ``folder``; return the files written.

    Raises
    ------
    SpecError
        There is no such study: names a near one.
    OutputError
        The folder cannot be written.
    """
    _check(name)
    written: list[Path] = import_module(f"reports.{name}.page").write(folder / name)
    return written


def _check(name: str) -> None:
    if name not in STUDIES:
        raise SpecError(f"no study named {name!r}{choices(name, STUDIES)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the named studies, or all; return 0, or 2 for bad input."""
    listed = ", ".join(f"{name} ({seconds} s)" for name, seconds in SECONDS.items())
    parser = argparse.ArgumentParser(
        prog="build.py", description="Build the studies: which results are reproduced, which are not, and why."
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"one of {listed}; default: all")
    parser.add_argument("-o", "--out", type=Path, default=HERE, metavar="DIR", help="write to DIR/STUDY; default: here")
    given = parser.parse_args(arguments)
    names = given.studies or STUDIES
    try:
        for name in names:
            _check(name)
        for name in names:
            began = time.process_time()
            print(f"{name}: about {SECONDS[name]} s of one core", file=sys.stderr, flush=True)
            print(*build(name, given.out), sep="\n", flush=True)
            print(f"{name}: took {time.process_time() - began:.0f} s", file=sys.stderr, flush=True)
    except NpusimError as error:
        print(f"build.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
