"""Measure what a kernel that does nothing takes between two events, by blocks, shared memory, registers and code.

    python reports/silicon/overhead.py OUT.json

Needs cupy and a GPU.  Each launch follows a fill or a read of 256 MiB, so that the host is ahead and L2 holds other
data: the kernel of the flush asks for no shared memory.  One line a case: what the kernel is, blocks, threads of each,
bytes of shared memory, instructions that it goes through (16 bytes each), and microseconds after a fill and after a
read, medians of 60.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cupy
import numpy as np

REPEATS, WARM_UPS = 60, 3
FLUSH_BYTES = 2**28


def source(instructions: int, registers: int) -> str:
    """Return a kernel that executes a number of multiply-adds once, with at least a number of registers."""
    add = 'asm volatile("fma.rn.f32 %0,%0,%1,%1;" : "+f"(a{}) : "f"(c));'
    lines = "\n".join(add.format(i % registers) for i in range(instructions))
    values = " ".join(f"float a{i} = c + {i};" for i in range(registers))
    total = " + ".join(f"a{i}" for i in range(registers))
    return f"""
extern "C" __global__ void walk(float* out, float c) {{
    {values}
    {lines}
    if (c == 12345.0f) out[threadIdx.x] = {total};
}}
extern "C" __global__ void copy(float* out, const float* in) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i];
}}"""


def main() -> None:
    """Write the times of each case."""
    cores = cupy.cuda.Device().attributes["MultiProcessorCount"]
    flush, other = cupy.empty(FLUSH_BYTES // 4, cupy.int32), cupy.ones(FLUSH_BYTES // 4, cupy.int32)
    out, data = cupy.zeros(2**22, cupy.float32), cupy.ones(2**22, cupy.float32)
    rows: list[list[Any]] = []

    def timed(launch: Any, *, fills: bool) -> float:
        pairs = []
        for n in range(REPEATS + WARM_UPS):
            flush.fill(0) if fills else other.sum()
            pair = cupy.cuda.Event(), cupy.cuda.Event()
            pair[0].record()
            launch()
            pair[1].record()
            if n >= WARM_UPS:
                pairs.append(pair)
        cupy.cuda.Device().synchronize()
        return round(float(np.median([cupy.cuda.get_elapsed_time(*p) * 1e3 for p in pairs])), 2)

    def measure(
        name: str, blocks: int, threads: int, shared: int = 0, instructions: int = 0, registers: int = 1
    ) -> None:
        module = cupy.RawModule(code=source(instructions, registers))
        kernel = module.get_function("copy" if name == "copy" else "walk")
        if shared:
            kernel.max_dynamic_shared_size_bytes = shared
        arguments = (out, data) if name == "copy" else (out, np.float32(0.5))

        def launch() -> None:
            kernel((blocks,), (threads,), arguments, shared_mem=shared)

        row = [name, blocks, threads, shared, instructions, kernel.num_regs]
        rows.append([*row, timed(launch, fills=True), timed(launch, fills=False)])

    rows.append(["none", 0, 0, 0, 0, 0, timed(lambda: None, fills=True), timed(lambda: None, fills=False)])
    for blocks in (1, cores, 8 * cores):
        for threads in (32, 128, 256):
            measure("walk", blocks, threads)
            measure("copy", blocks, threads)
    for shared in (8, 16, 32, 48, 64, 96, 128, 160, 200, 227):
        measure("walk", cores, 128, shared * 1024)
        measure("copy", cores, 128, shared * 1024)
    for registers in (32, 64, 128, 200, 240):
        measure("walk", cores, 128, 0, registers, registers)
    for instructions in (256, 512, 1024, 2048, 4096, 8192):
        measure("walk", cores, 128, 0, instructions, 8)
        measure("walk", cores, 128, 96 * 1024, instructions, 8)
    names = ["kernel", "blocks", "threads", "shared", "instructions", "registers", "after_fill", "after_read"]
    text = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    Path(sys.argv[1]).write_text(f'{{\n  "names": {json.dumps(names)},\n  "rows": [\n{text}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
