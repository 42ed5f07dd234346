"""The engine's machine code where none is kept yet: another process compiles it while this one does something else."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from npusim.timing.engine_arrays import PROGRAM_TYPES, build_program, build_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def compiled_meanwhile() -> Iterator[Callable[[], object] | None]:
    """Give what waits for another process that compiles, or None where there is nothing to compile or no core for it.

    The process ends with the context at the latest; should it fail, this one compiles as if there had been none.
    """
    from npusim.timing.periodic import run_engine

    if not run_engine.is_missing() or (os.cpu_count() or 1) == 1:  # type: ignore[attr-defined]
        yield None
        return
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    # -P: no file of the current folder is imported in place of a module; so too by what that process starts.
    command, null = [sys.executable, "-P", "-m", __name__], subprocess.DEVNULL
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    try:
        process = subprocess.Popen(command, env=env, stdin=null, stdout=null, stderr=null)
    except OSError:
        yield None
        return
    try:
        yield process.wait
    finally:
        process.kill()
        process.wait()


def compile_engine() -> None:
    """Run a program of nothing: the kernel is compiled, and kept on disk."""
    from npusim.timing.periodic import UNUSED, run_engine

    program = build_program(np.zeros((0, 1), np.int64), op=[(0,) * len(PROGRAM_TYPES["op"])])
    run_engine(program, build_state(program, 1, 1), UNUSED, 0)


if __name__ == "__main__":
    compile_engine()
