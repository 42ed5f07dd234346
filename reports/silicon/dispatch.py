"""Measure when the blocks that a multiprocessor holds begin: cycles after its first, by how many there are room for.

    python reports/silicon/dispatch.py OUT.json

Needs cupy and a GPU.  One line a case: warps of a block, blocks of a multiprocessor (its shared memory allows no more),
blocks in all, and for the second, third, ... block of a multiprocessor the median of cycles after its first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cupy
import numpy as np

SOURCE = r"""
extern "C" __global__ void begin(long long* out, int spin) {
    long long at = clock64();
    unsigned sm;
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    if (threadIdx.x == 0) { out[2 * blockIdx.x] = sm; out[2 * blockIdx.x + 1] = at; }
    while (clock64() - at < spin) {}
}"""
SPIN_CYCLES, SHARED_BYTES, LEFT_BYTES, REPEATS = 60_000, 220 * 1024, 2048, 9


def main() -> None:
    """Write the delays of each case."""
    begin = cupy.RawModule(code=SOURCE).get_function("begin")
    cores = cupy.cuda.Device().attributes["MultiProcessorCount"]
    rows = []
    for warps in (4, 8):
        for residents in (2, 3, 4):
            shared = SHARED_BYTES // residents - LEFT_BYTES
            begin.max_dynamic_shared_size_bytes = shared
            for count in (cores * residents, 3 * cores * residents):
                found = []
                for _ in range(REPEATS):
                    out = cupy.zeros((count, 2), cupy.int64)
                    begin((count,), (warps * 32,), (out, np.int32(SPIN_CYCLES)), shared_mem=shared)
                    got = out.get()
                    by_core = [np.sort(got[got[:, 0] == sm, 1])[:residents] for sm in np.unique(got[:, 0])]
                    found += [list(c - c[0]) for c in by_core if len(c) == residents]
                rows.append([warps, residents, count, [round(float(x)) for x in np.median(found, axis=0)[1:]]])
    names = ["warps", "residents", "blocks", "cycles_after_first"]
    text = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    about = json.dumps({"device": device, "names": names})
    Path(sys.argv[1]).write_text(f'{{\n  "about": {about},\n  "rows": [\n{text}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
