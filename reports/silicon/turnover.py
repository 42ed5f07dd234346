"""Measure the time from the end of a block to the beginning of the next one in its place, and rows of one wave.

    python reports/silicon/turnover.py OUT.json

Needs cupy and a GPU.  ``spin``: blocks wait for 3,000 cycles; a line a case: warps of a block, blocks of a
multiprocessor, and the 10th, 50th and 90th percentile of cycles between the last instruction of the n-th block to end
and the first of the block that has its place.  ``rows``: blocks of 256 threads copy 64 KiB each, 128 of them, in a
graph of 20 launches on other data: microseconds of a launch, and percentiles of cycles until a block has its data.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cupy
import numpy as np

SOURCE = r"""
typedef long long u;
extern "C" __global__ void spin(u cycles, u* out) {
    u at = clock64();
    while (clock64() - at < cycles) {}
    unsigned sm;
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    u* own = out + 3 * ((u)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
    if (threadIdx.x % 32 == 0) { own[0] = sm; own[1] = at; own[2] = clock64(); }
}
extern "C" __global__ void copy(const uint4* x, uint4* y, u* out) {
    u at = clock64(), from = (u)blockIdx.x * blockDim.x * 16;
    uint4 v[16];
    #pragma unroll
    for (int i = 0; i < 16; i++) v[i] = x[from + i * blockDim.x + threadIdx.x];
    unsigned sum = 0;
    #pragma unroll
    for (int i = 0; i < 16; i++) sum += v[i].x;
    if (sum == 12345) v[0].y = 7;
    u come = clock64();
    #pragma unroll
    for (int i = 0; i < 16; i++) y[from + i * blockDim.x + threadIdx.x] = v[i];
    if (threadIdx.x % 32 == 0) out[blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32] = come - at;
}"""
SPIN_CYCLES, SHARED_BYTES, WAVES, LAUNCHES = 3000, 220_000, 6, 20
PERCENTILES = 10, 50, 90


def gaps(got: Any, residents: int) -> list[int]:
    """Return the cycles between the n-th end on a multiprocessor and the beginning of the block in its place."""
    found: list[int] = []
    for sm in np.unique(got[:, 0, 0]):
        own = got[got[:, 0, 0] == sm]
        begun, ended = np.sort(own[:, :, 1].min(1)), np.sort(own[:, :, 2].max(1))
        found += list(begun[residents:] - ended[: len(begun) - residents])
    return found


def spins(module: Any, cores: int) -> list[list[Any]]:
    """Return the rows of blocks that wait."""
    kernel, rows = module.get_function("spin"), []
    for warps in (4, 8, 16, 32):
        for residents in sorted({1, 2, 64 // warps}):
            shared = SHARED_BYTES // residents // 1024 * 1024 if residents < 64 // warps else 0
            kernel.max_dynamic_shared_size_bytes = max(shared, 1024)
            count = cores * residents * WAVES
            out = cupy.zeros((count, warps, 3), cupy.int64)
            for _ in range(2):
                kernel((count,), (warps * 32,), (np.int64(SPIN_CYCLES), out), shared_mem=shared)
            between = np.percentile(gaps(out.get(), residents), PERCENTILES)
            rows.append([warps, residents, [round(float(x)) for x in between]])
    return rows


def copies(module: Any) -> list[Any]:
    """Return microseconds of a launch that copies one wave of rows, and cycles until its blocks have their data."""
    kernel, size, sets = module.get_function("copy"), 128 << 16, 64
    x, y = (cupy.zeros(sets * size, cupy.uint8) for _ in range(2))
    out, stream = cupy.zeros((128, 8), cupy.int64), cupy.cuda.Stream(non_blocking=True)

    def launch(number: int) -> None:
        at = number % sets * size
        kernel((128,), (256,), (np.uint64(x.data.ptr + at), np.uint64(y.data.ptr + at), out))

    with stream:
        launch(0)
        stream.synchronize()
        stream.begin_capture()
        for number in range(LAUNCHES):
            launch(number)
        graph, times = stream.end_capture(), []
        for _ in range(5):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / LAUNCHES)
    come = np.percentile(out.get().max(1), PERCENTILES)
    return [round(sorted(times)[2], 2), [round(float(c)) for c in come]]


def main() -> None:
    """Write the cases."""
    module = cupy.RawModule(code=SOURCE)
    cores = cupy.cuda.Device().attributes["MultiProcessorCount"]
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    names = {"spin": ["warps", "residents", "cycles"], "rows": ["us", "cycles"], "percentiles": PERCENTILES}
    found = {"spin": spins(module, cores), "rows": copies(module)}
    lines = ",\n".join(f"    {json.dumps(row)}" for row in found["spin"])
    about = json.dumps({"device": device, "names": names})
    text = f'{{\n  "about": {about},\n  "rows": {json.dumps(found["rows"])},\n  "spin": [\n{lines}\n  ]\n}}\n'
    Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
