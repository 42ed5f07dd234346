"""Compiles a kernel's TTIR in a process of its own: the compiler may end the process that it runs in.

Run as a program: ``compiler_process.py KERNEL.ttir ARCHITECTURE FOLDER`` with options in JSON on standard input; writes
the code to the folder, or the compiler's message to its file ``error``.  It imports nothing of npusim, to start soon.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(text: str, architecture: str, folder: str) -> None:
    """Write ``cubin``, ``ttgir``, ``ptx`` and the bytes of shared memory of a kernel, or ``error``."""
    import triton
    from triton.backends.compiler import GPUTarget

    out = Path(folder)
    try:
        made = triton.compile(text, GPUTarget("cuda", int(architecture), 32), json.load(sys.stdin))
    except Exception as error:  # noqa: BLE001 - whatever the compiler says
        (out / "error").write_text(str(error))
        return
    (out / "cubin").write_bytes(made.asm["cubin"])
    for name in ("ttgir", "ptx"):
        (out / name).write_text(made.asm[name])
    (out / "shared").write_text(str(made.metadata.shared))


if __name__ == "__main__":
    main(*sys.argv[1:])
