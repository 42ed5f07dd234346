"""Machine code that is not stored yet: another process compiles the code for bits while this process compiles the
engine.

It also compiles the engine before a call that needs much memory: otherwise the compiler's 150 MB would stay allocated
in this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from npusim import cache
from npusim.formats.jit import PLAIN_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def compiled_meanwhile(module: str, *words: str) -> Iterator[bool]:
    """Let another process run a module with some arguments, unless the engine is compiled or there is no free core.

    Yield whether a process runs: if it is compiling code when this process needs that code, this process waits
    (`npusim.cache.alone`). It ends with the context at the latest; if it fails, this process compiles everything.
    """
    null, is_alone = subprocess.DEVNULL, (os.cpu_count() or 1) == 1
    process = None if is_alone else _started(null, module, *words)
    try:
        yield process is not None
    finally:
        if process is not None:
            process.kill()
            process.wait()


@contextmanager
def compiled_before(module: str) -> Iterator[None]:
    """Let another process run a module, and wait for it, unless the engine is compiled; the process may fail."""
    process = _started(None, module)  # the process states the reason for the long time
    try:
        if process is not None:
            process.wait()
        yield
    finally:
        if process is not None:
            process.kill()


def _started(errors: int | None, module: str, *words: str) -> subprocess.Popen[bytes] | None:
    """Return a process that runs a module; None if the engine is compiled already or cannot be stored, or if no process
    starts.
    """
    from npusim.program.timing.periodic import run_engine

    is_kept = not run_engine.is_missing()  # type: ignore[attr-defined]
    if is_kept or cache.folder() is None or os.environ.get(PLAIN_VARIABLE) == "1":
        return None
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    # -P and PYTHONSAFEPATH: neither this process nor one that it starts imports a file of the current folder as a
    # module.
    command, null = [sys.executable, "-P", "-m", module, *words], subprocess.DEVNULL
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    try:
        return subprocess.Popen(command, env=env, stdin=null, stdout=null, stderr=errors)
    except OSError:
        return None
