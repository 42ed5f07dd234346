"""Measure what a kernel pays for lines that others left to be written back, by what it reads and writes.

    python reports/silicon/dirty.py OUT.json

Needs torch, triton and a GPU.  Each launch follows a fill of 256 MiB, whose last lines L2 still holds, or a read of as
much, which leaves none.  One line a size: MiB that are read or written (a copy: each), and microseconds between two
events after the fill and after the read, medians of 40: reading, writing, copying, and PASA's K' = M K in blocks of 64
and 128 keys of a head size of 128.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PIECE, WIDTH, REPEATS, WARM_UPS = 4096, 128, 40, 5
FLUSH_BYTES = 2**28


@triton.jit
def read(A, B, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    total = tl.sum(tl.load(A + at).to(tl.float32), 0)
    if total == 1.2345678e30:
        tl.store(B, total)


@triton.jit
def write(A, B, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    tl.store(B + at, tl.full([N], 1.0, tl.float16))


@triton.jit
def copy(A, B, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    tl.store(B + at, tl.load(A + at))


@triton.jit
def prologue(M, K, KP, D: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, BN), tl.arange(0, D)
    at = tl.program_id(0).to(tl.int64) * BN * D + rows[:, None] * D + columns[None]
    m = tl.load(M + rows[:, None] * BN + rows[None])
    tl.store(KP + at, tl.dot(m, tl.load(K + at)).to(tl.float16))


def main() -> None:
    """Write the times of each size."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    other = torch.ones_like(flush)

    def timed(launch: Any, *, fills: bool) -> float:
        pairs = []
        for n in range(REPEATS + WARM_UPS):
            flush.zero_() if fills else other.sum()
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            launch()
            pair[1].record()
            if n >= WARM_UPS:
                pairs.append(pair)
        torch.cuda.synchronize()
        times = sorted(first.elapsed_time(last) * 1e3 for first, last in pairs)
        return round(times[len(times) // 2], 2)

    def times(mib: int) -> dict[str, float]:
        count = mib * 2**19
        source = torch.randn(count, device="cuda").half()
        target = torch.empty_like(source)
        launches: dict[str, Any] = {
            kernel.fn.__name__: lambda k=kernel: k[(count // PIECE,)](source, target, PIECE, num_warps=8)
            for kernel in (read, write, copy)
        }
        for keys in (64, 128):
            m = torch.randn(keys, keys, device="cuda").half()
            grid = (count // WIDTH // keys,)
            launches[f"prologue_{keys}"] = lambda g=grid, m=m, n=keys: prologue[g](m, source, target, WIDTH, n)
        return {
            f"{name}_{state}": timed(launch, fills=state == "dirty")
            for name, launch in launches.items()
            for state in ("dirty", "clean")
        }

    found = {mib: times(mib) for mib in SIZES}
    names, rows = ["mib", *found[SIZES[0]]], [[mib, *row.values()] for mib, row in found.items()]
    text = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    Path(sys.argv[1]).write_text(f'{{\n  "names": {json.dumps(names)},\n  "rows": [\n{text}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
