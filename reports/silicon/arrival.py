"""Measure when a tile's copies have arrived, by what else is under way: blocks as in a loop with two stages.

    python reports/silicon/arrival.py OUT.json

Needs cupy and a GPU.  Each block copies two tiles in pieces of 16 bytes, waits for the first and for both, works for a
number of cycles (it reads the clock), and continues.  One line a case: where the tiles lie (device memory or L2, each
block's
own or one of 16 blocks'), blocks, bytes of a tile, cycles of work; then means over blocks and iterations but the first
few: cycles from the first copy until all are issued, the first tile is there, and both are, and of a whole iteration.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cupy
import numpy as np

SOURCE = r"""
extern "C" __global__ void walk(const char* from, long long* out, int pieces, int rounds, int work, long long own,
                                int readers, int kept) {
    extern __shared__ char room[];
    unsigned base = (unsigned)__cvta_generic_to_shared(room) + threadIdx.x * 16;
    const char* mine = from + (blockIdx.x / readers) * own + threadIdx.x * 16;
    int tile = pieces * blockDim.x * 16;
    long long issued = 0, first = 0, both = 0, begun = 0;
    for (int r = 0; r < rounds; r++) {
        if (r == 4) begun = clock64();
        __syncthreads();
        const char* at = mine + (long long)(r % kept) * 2 * tile;
        long long t0 = clock64();
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < pieces; i++)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                             :: "r"(base + half * tile + i * blockDim.x * 16),
                                "l"(at + half * tile + i * blockDim.x * 16));
            asm volatile("cp.async.commit_group;");
        }
        long long t1 = clock64();
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        long long t2 = clock64();
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        long long t3 = clock64();
        while (clock64() - t3 < work) {}
        if (r >= 4) { issued += t1 - t0; first += t2 - t0; both += t3 - t0; }
    }
    if (threadIdx.x == 0) {
        long long* o = out + blockIdx.x * 4;
        o[0] = issued; o[1] = first; o[2] = both; o[3] = clock64() - begun;
    }
}"""
THREADS, ROUNDS, SKIPPED, REPEATS = 128, 132, 4, 3
BLOCKS, TILES, WORK = (1, 8, 16, 32, 64, 96, 132, 264), (8192, 16384, 32768), (0, 700, 1300, 2600)
WAYS = {"memory": (1, ROUNDS), "l2": (1, 4), "shared memory": (16, ROUNDS), "shared l2": (16, 8)}


def main() -> None:
    """Write the cycles of each case."""
    walk = cupy.RawModule(code=SOURCE).get_function("walk")
    walk.max_dynamic_shared_size_bytes = 110 * 1024
    room = cupy.zeros(max(BLOCKS) * ROUNDS * 2 * max(TILES), cupy.uint8)
    other = cupy.zeros(2**28, cupy.uint8)
    rows = []
    for way, (readers, kept) in WAYS.items():
        for tile in TILES:
            for blocks in BLOCKS:
                for work in WORK:
                    out = cupy.zeros((blocks, 4), cupy.int64)
                    own = np.int64(kept * 2 * tile)
                    arguments = (room, out, tile // 16 // THREADS, ROUNDS, work, own, readers, kept)
                    scalars = [np.int32(a) if isinstance(a, int) else a for a in arguments]
                    found = []
                    for _ in range(REPEATS):
                        if "memory" in way:
                            other.fill(1)
                            other.sum()
                        walk((blocks,), (THREADS,), tuple(scalars), shared_mem=110 * 1024)
                        found.append(out.get().mean(axis=0) / (ROUNDS - SKIPPED))
                    rows.append([way, blocks, tile, work, *(round(float(x)) for x in np.median(found, axis=0))])
    names = ["way", "blocks", "tile_bytes", "work", "issued", "first", "both", "iteration"]
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    about = json.dumps({"device": device, "names": names})
    text = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    Path(sys.argv[1]).write_text(f'{{\n  "about": {about},\n  "rows": [\n{text}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
