"""Machine code where none is kept yet: another process compiles some of it while this one does something else."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from npusim import formats
from npusim.timing.engine_arrays import PROGRAM_TYPES, build_program, build_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Rows and columns of a product that takes the path of large ones, a multiple of what an instruction adds up.
_LARGE = 64


@contextmanager
def compiled_meanwhile(arithmetics: Iterable[str] = ()) -> Iterator[bool]:
    """Let another process compile the engine, then matrix arithmetics, unless that is done or there is no core for it.

    Give whether one does: what it is at when this process comes to it, this process waits for (`npusim.cache.alone`).
    It ends with the context at the latest; should it fail, this process compiles all.
    """
    from npusim.timing.periodic import run_engine

    if not run_engine.is_missing() or (os.cpu_count() or 1) == 1:  # type: ignore[attr-defined]
        yield False
        return
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    # -P: no file of the current folder is imported in place of a module; so too by what that process starts.
    command, null = [sys.executable, "-P", "-m", __name__, *arithmetics], subprocess.DEVNULL
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    try:
        process = subprocess.Popen(command, env=env, stdin=null, stdout=null, stderr=null)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        process.kill()
        process.wait()


def compile_engine() -> None:
    """Run a program of nothing: the kernel is compiled, and kept on disk."""
    from npusim.timing.periodic import UNUSED, run_engine

    program = build_program(np.zeros((0, 1), np.int64), op=[(0,) * len(PROGRAM_TYPES["op"])])
    run_engine(program, build_state(program, 1, 1), UNUSED, 0)


def compile_product(arithmetic: str) -> None:
    """Multiply ones, so that what multiplies large tiles in an arithmetic is compiled and kept."""
    unit = formats.get_arithmetic(arithmetic)
    ones = (np.ones((_LARGE, _LARGE), fmt.dtype) for fmt in (unit.a, unit.b))
    formats.matmul(*ones, arithmetic=unit)


if __name__ == "__main__":
    compile_engine()
    for name in sys.argv[1:]:
        compile_product(name)
