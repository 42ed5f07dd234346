"""Measure how fast a multiprocessor fetches code: loops over straight lines of multiply-adds, by their length.

    python reports/silicon/code.py OUT.json

Needs cupy and a GPU.  One line a case: instructions in a line, those of a loop behind it and how often that runs,
blocks of a multiprocessor and warps of each, cycles by which the second block starts later, and cycles of a round.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cupy
import numpy as np

#: Rounds of a launch; registers that take turns, so that no multiply-add waits for the one before it.
ROUNDS, REGISTERS = 40, 8
LENGTHS = (512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 9216, 10240, 12288, 16384)
#: Shared memory of a multiprocessor that blocks divide, so that no more of them are resident.
SHARED_BYTES, LEFT_BYTES = 220 * 1024, 2048


def source(line: int, loop: int, cores: int) -> str:
    """Return a kernel that executes a line of instructions and a loop for a number of rounds."""

    def body(count: int) -> str:
        add = 'asm volatile("fma.rn.f32 %0,%0,%1,%1;" : "+f"(a{}) : "f"(c));'
        return "\n".join(add.format(i % REGISTERS) for i in range(count))

    registers = " ".join(f"float a{i} = c + {i};" for i in range(REGISTERS))
    return f"""
extern "C" __global__ void walk(float* out, long long* cycles, int rounds, int inner, float c, int later) {{
    {registers}
    long long before = clock64();
    while (clock64() - before < (long long)(blockIdx.x / {cores}) * later) {{}}
    __syncthreads();
    long long start = clock64();
    #pragma unroll 1
    for (int r = 0; r < rounds; r++) {{
        {body(line)}
        #pragma unroll 1
        for (int t = 0; t < inner; t++) {{
            {body(loop)}
        }}
    }}
    if (threadIdx.x % 32 == 0) cycles[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = clock64() - start;
    out[blockIdx.x * blockDim.x + threadIdx.x] = {" + ".join(f"a{i}" for i in range(REGISTERS))};
}}"""


def main() -> None:
    """Write the cycles of each case."""
    cores = cupy.cuda.Device().attributes["MultiProcessorCount"]
    walks: dict[tuple[int, int], object] = {}
    rows = []

    def measure(line: int, loop: int, inner: int, blocks: int, warps: int, later: int = 0) -> None:
        if (line, loop) not in walks:
            walks[line, loop] = cupy.RawModule(code=source(line, loop, cores)).get_function("walk")
        walk, count = walks[line, loop], cores * blocks
        shared = SHARED_BYTES // blocks - LEFT_BYTES
        walk.max_dynamic_shared_size_bytes = shared
        out, cycles = cupy.zeros(count * warps * 32, cupy.float32), cupy.zeros(count * warps, cupy.int64)
        arguments = (out, cycles, np.int32(ROUNDS), np.int32(inner), np.float32(0.5), np.int32(later))
        for _ in range(2):
            walk((count,), (warps * 32,), arguments, shared_mem=shared)
        rows.append([line, loop, inner, blocks, warps, later, round(float(np.median(cycles.get())) / ROUNDS)])

    for line in LENGTHS:
        for blocks, warps in ((1, 1), (1, 4), (2, 4), (1, 8)):
            measure(line, 1, 0, blocks, warps)
        measure(line, 1, 0, 2, 4, int(0.7 * line))
    for line in (1024, 2048, 4096, 6144):
        for inner in (1, 4, 16):
            for blocks in (1, 2):
                measure(line, 1024, inner, blocks, 4, 900)
    names = ["line", "loop", "inner", "blocks", "warps", "later", "cycles"]
    text = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    Path(sys.argv[1]).write_text(f'{{\n  "names": {json.dumps(names)},\n  "rows": [\n{text}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
