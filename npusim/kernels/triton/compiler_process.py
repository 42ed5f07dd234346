"""Compiles TTIR of kernels in a separate process, because the compiler may end the process in which it runs.

Run as a program: it reads one line of JSON per kernel from standard input (``text``: its file, ``architecture``: a
number, ``folder``, ``options``), writes the code to the folder, or the compiler's message to its file ``error``, and
answers with an empty line; it ends when its input ends.  It imports nothing of npusim, so that it starts quickly.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Compile the requested kernels; the compiler's output goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            _write(**json.loads(line))
            answers.write("\n")
            answers.flush()


def _write(text: str, architecture: int, folder: str, options: dict[str, Any]) -> None:
    """Write ``cubin``, ``ttgir``, ``ptx`` and the bytes of shared memory of a kernel, or ``error``."""
    import triton
    from triton.backends.compiler import GPUTarget

    out = Path(folder)
    try:
        result = triton.compile(text, GPUTarget("cuda", architecture, 32), options)
    except Exception as error:  # noqa: BLE001 - whatever the compiler says
        (out / "error").write_text(str(error))
        return
    (out / "cubin").write_bytes(result.asm["cubin"])
    for name in ("ttgir", "ptx"):
        (out / name).write_text(result.asm[name])
    (out / "shared").write_text(str(result.metadata.shared))


if __name__ == "__main__":
    main()
