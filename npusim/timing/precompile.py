"""Machine code where none is kept yet: another process compiles that of bits while this one compiles the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def compiled_meanwhile(module: str, *words: str) -> Iterator[bool]:
    """Let another process run a module with some words, unless the engine is compiled or there is no core for it.

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
    command, null = [sys.executable, "-P", "-m", module, *words], subprocess.DEVNULL
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
