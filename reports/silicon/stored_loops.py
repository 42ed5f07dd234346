"""Measure loops of copies whose blocks also store: how long a copy from memory takes while L2 writes lines back.

    python reports/silicon/stored_loops.py OUT.json

Needs cupy and a GPU.  A block has ``depth`` tiles under way in pieces of 16 bytes.  An iteration waits for the oldest
tile, works for ``work`` cycles (it reads the clock), copies the next tile to the same place, and stores ``stored``
bytes.  Before the launch a kernel reads 256 MiB, so that L2 writes nothing back before it is full of what the loop
stores.  One line a case: the number of blocks, of blocks that read the same tiles (``readers``), and of different tiles
that a block reads (``kept``: all 128, or a few, again and again, which are in L2); then means over blocks: cycles of an
iteration and of its wait, for iterations 8 to 32 (``early``) and 64 to 128 (``late``), and microseconds of the launch.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import cupy
import numpy as np

SOURCE = r"""
#define STR2(x) #x
#define STR(x) STR2(x)
extern "C" __global__ void walk(const char* from, char* to, long long* out, int pieces, int stores, int rounds,
                                int work, int readers, int kept) {
    extern __shared__ char room[];
    unsigned base = (unsigned)__cvta_generic_to_shared(room) + threadIdx.x * 16;
    long long tile = (long long)pieces * blockDim.x * 16;
    const char* mine = from + (blockIdx.x / readers) * tile * kept + threadIdx.x * 16;
    char* own = to + (long long)blockIdx.x * rounds * stores * blockDim.x * 16 + threadIdx.x * 16;
    long long waited = 0, t[6]; int n = 0;
    #define COPY(r, slot) { const char* at = mine + (long long)((r) % kept) * tile; \
        for (int i = 0; i < pieces; i++) \
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" \
                :: "r"(base + (slot) * (int)tile + i * blockDim.x * 16), "l"(at + i * blockDim.x * 16)); }
    for (int d = 0; d < DEPTH; d++) { COPY(d, d); asm volatile("cp.async.commit_group;"); }
    for (int r = 0; r < rounds; r++) {
        if (r == 8 || r == 32 || r == 64) { t[n++] = clock64(); t[n++] = waited; }
        long long t0 = clock64();
        asm volatile("cp.async.wait_group " STR(LEFT) ";" ::: "memory");
        __syncthreads();
        long long t1 = clock64();
        waited += t1 - t0;
        while (clock64() - t1 < work) {}
        __syncthreads();
        if (r + DEPTH < rounds) COPY(r + DEPTH, r % DEPTH);
        asm volatile("cp.async.commit_group;");
        for (int i = 0; i < stores; i++)
            asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};"
                :: "l"(own + ((long long)r * stores + i) * blockDim.x * 16), "r"(r));
    }
    long long end = clock64();
    if (threadIdx.x == 0) {
        long long* o = out + blockIdx.x * 4;
        o[0] = t[2] - t[0]; o[1] = t[3] - t[1]; o[2] = end - t[4]; o[3] = waited - t[5];
    }
}"""
THREADS, ROUNDS, REPEATS = 128, 128, 3
DEPTHS, PIECES, BLOCKS, READERS, WORK = (1, 2, 3), (2, 4, 8), (1, 132, 264, 528), (1, 4), (0, 800)
NAMES = "early", "early_wait", "late", "late_wait", "us"


def cases() -> list[dict[str, int]]:
    """Return all cases; few tiles are read again and again only by loops that store nothing."""
    found = list[dict[str, int]]()
    for depth, pieces, blocks, readers in product(DEPTHS, PIECES, BLOCKS, READERS):
        if readers > blocks:
            continue
        for stores, work in product(sorted({0, pieces // 4, pieces // 2, pieces}), WORK):
            case = {"depth": depth, "tile": pieces * THREADS * 16, "stored": stores * THREADS * 16, "blocks": blocks}
            case |= {"readers": readers, "work": work}
            found.extend({**case, "kept": kept} for kept in ((ROUNDS,) if stores else (ROUNDS, depth + 1)))
    return found


def main() -> None:
    """Write the cycles of each case."""
    walks = dict[int, Any]()
    for depth in DEPTHS:
        code = cupy.RawModule(code=SOURCE, options=(f"-DDEPTH={depth}", f"-DLEFT={depth - 1}"))
        walks[depth] = code.get_function("walk")
        walks[depth].max_dynamic_shared_size_bytes = 100 * 1024
    room, results = (cupy.zeros(max(BLOCKS) * ROUNDS * max(PIECES) * THREADS * 16, cupy.uint8) for _ in range(2))
    other, rows = cupy.zeros(2**28, cupy.uint8), []
    for case in cases():
        sizes = case["tile"] // 16 // THREADS, case["stored"] // 16 // THREADS, ROUNDS, case["work"]
        out, found = cupy.zeros((case["blocks"], 4), cupy.int64), []
        given = (room, results, out, *map(np.int32, (*sizes, case["readers"], case["kept"])))
        for _ in range(REPEATS):
            other.sum()
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            walks[case["depth"]]((case["blocks"],), (THREADS,), given, shared_mem=case["depth"] * case["tile"])
            end.record()
            end.synchronize()
            early, early_wait, late, late_wait = cupy.asnumpy(out).astype(float).mean(0)
            us = 1e3 * cupy.cuda.get_elapsed_time(begin, end)
            found.append((early / 24, early_wait / 24, late / 64, late_wait / 64, us))
        values = np.median(np.array(found), 0)
        rows.append({**case, **{n: round(float(x), 2) for n, x in zip(NAMES, values, strict=True)}})
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    lines = ",\n".join(map(json.dumps, rows))
    Path(sys.argv[1]).write_text(f'{{"device": "{device}", "rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
