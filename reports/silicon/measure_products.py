"""Times of cuBLAS's wide and thin products, and of their transposes, on one GPU (two minutes).

    python -m reports.silicon.measure_products OUT_DIR

x (m, k) and w (n, k) are row-major and bfloat16, y = x w^T (``operands: nt``).  Operands rotate, so that L2 has nothing
of use; ``us``: a call's kernels, a median over calls, by the profiler; ``graph_us``: a call of a CUDA graph of calls.
Needs torch.  Writes OUT_DIR/wide.json.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from reports.silicon.graph_time import graph_us

#: Bytes that calls rotate over, and microseconds that all calls of a shape take at least.
ROTATED_BYTES, LEAST_US = 200e6, 20e3
#: m, n, k of products of models' layers (gate and up, down, qkv, vocabulary), and squares that no cache holds.
SHAPES = (
    *[(m, 28672, 4096) for m in (256, 512, 1024, 2048, 8192)],
    (4096, 14336, 4096),
    (4096, 22016, 4096),
    (4096, 32000, 4096),
    (2048, 128256, 4096),
    (2048, 8192, 28672),
    (8192, 10240, 8192),
    (3072, 24576, 3072),
    (4096, 16384, 1024),
    (6144, 18432, 512),
    (1536, 49152, 768),
    (5120, 27648, 5120),
    (8192, 57344, 8192),
    (16384, 16384, 2048),
    (24576, 24576, 1024),
    (1280, 4864, 896),
    (704, 13504, 14336),
    *[(m, 14336, 4096) for m in (1, 8, 32, 128)],
    *[(m, 4096, 14336) for m in (1, 32, 128)],
    (4, 57344, 8192),
    (16, 8192, 28672),
)


def calls_of(m: int, n: int, k: int) -> list:
    """Return calls of a product, each on operands of its own."""
    size = 2 * (m * k + n * k + m * n)
    sets = max(2, min(64, int(ROTATED_BYTES / size) + 1))
    calls = []
    for _ in range(sets):
        x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        calls.append(lambda x=x, w=w, y=y: torch.mm(x, w.T, out=y))
    return calls


def kernels(calls: list, rounds: int) -> tuple[float, list[str]]:
    """Return microseconds of a call's kernels, and each kernel with its median."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        for _ in range(rounds):
            for call in calls:
                call()
        torch.cuda.synchronize()
    times = defaultdict(list)
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "Memset" not in event.name:
            times[event.name[:90]].append(event.device_time)
    count = rounds * len(calls)
    each = {name: median(listed) * round(len(listed) / count) for name, listed in times.items()}
    return round(sum(each.values()), 3), [f"{name} {us:.2f} us" for name, us in each.items() if us]


def main(folder: Path) -> None:
    """Measure every shape both ways round."""
    rows = []
    for m, n, k in SHAPES:
        for rows_of, cols in ((m, n), (n, m)) if m != n else ((m, n),):
            calls = calls_of(rows_of, cols, k)
            for call in calls:
                call()
            expected = max(5.0, 2 * m * n * k / 7e8, 2 * (m * k + n * k + m * n) / 4e6)
            rounds = max(3, int(LEAST_US / expected / len(calls)) + 1)
            wall = round(graph_us(calls, rounds), 3)
            us, names = kernels(calls, min(rounds, 20))
            rows.append({"m": rows_of, "n": cols, "k": k, "us": us, "graph_us": wall, "kernels": names})
            print(rows[-1], flush=True)
            del calls
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name()
    text = json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=0)
    (folder / "wide.json").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
