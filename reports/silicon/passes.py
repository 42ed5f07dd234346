"""Loops over rows that are read again, and loops of loads that wait for one another.

    python -m reports.silicon.passes OUT.json

Needs one GPU, torch and triton.  Each time is that of one launch in a graph of equal launches, in microseconds: the
median of three replays.  ``rows``: blocks of the launch, one a row; ``row_bytes``: bytes of a row.

reread: all blocks are resident, and each passes over its row ``passes`` times.
twopass: a block reads its row, then reads it again and stores it, in place or to another tensor.
chain: a block loads a tile of float32 in each of 32 iterations, adds it to a state and stores this state.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from reports.silicon.graph_time import graph_us, write_rows

MIB = 1 << 20


@triton.jit
def reread(x, out, size, passes, block: tl.constexpr):
    """Pass over a row several times."""
    pid = tl.program_id(0)
    x += pid.to(tl.int64) * size
    total = tl.zeros([block], tl.float32)
    for _ in range(passes):
        for i in range(0, size, block):
            total += tl.load(x + i + tl.arange(0, block)).to(tl.float32)
    tl.store(out + pid, tl.sum(total))


@triton.jit
def twopass(x, out, size, block: tl.constexpr):
    """Read a row, then read it again and store it."""
    pid = tl.program_id(0)
    x += pid.to(tl.int64) * size
    out += pid.to(tl.int64) * size
    total = tl.zeros([block], tl.float32)
    for i in range(0, size, block):
        at = i + tl.arange(0, block)
        total += tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    factor = tl.sum(total)
    for i in range(0, size, block):
        at = i + tl.arange(0, block)
        tl.store(out + at, tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * factor, mask=at < size)


@triton.jit
def chain(x, out, count, stride, block: tl.constexpr):
    """Load a tile, add it to a state, and store this state."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    state = tl.zeros([block], tl.float32)
    for _ in range(count):
        state = state * 0.5 + tl.load(x + at)
        tl.store(out + at, state)
        x += stride
        out += stride


def timed(kernel: Any, rows: int, *given: Any, warps: int) -> float:
    """Return the time of one of many launches in a graph."""
    return graph_us([lambda: kernel[(rows,)](*given, num_warps=warps)] * 20, 3)


def main() -> None:
    """Measure all loops."""
    found, new = list[dict[str, Any]](), {"device": "cuda"}
    for residents, warps in ((1, 32), (2, 16), (4, 8), (8, 8)):
        block, rows = 8192 if warps == 32 else 4096, 132 * residents
        for total in (8, 16, 24, 32, 36, 40, 44, 48, 52, 60, 72, 96, 128):
            if size := total * MIB // 2 // rows // 8192 * 8192:
                x, out = torch.zeros(rows * size, dtype=torch.bfloat16, **new), torch.zeros(rows, **new)
                for passes in (1, 2, 4):
                    us = timed(reread, rows, x, out, size, passes, block, warps=warps)
                    case = {"warps": warps, "block": block, "rows": rows, "row_bytes": 2 * size, "passes": passes}
                    found.append({"kernel": "reread", **case, "us": us})
    for rows, size in ((16384, 8192), (4096, 32768), (4096, 65536), (2048, 131072)):
        x = torch.zeros(rows * size, dtype=torch.bfloat16, **new)
        for block, warps in ((8192, 32), (8192, 16), (8192, 8), (4096, 8), (4096, 4), (2048, 4)):
            for in_place in (False, True):
                out = x if in_place else torch.zeros_like(x)
                us = timed(twopass, rows, x, out, size, block, warps=warps)
                case = {"warps": warps, "block": block, "rows": rows, "row_bytes": 2 * size, "in_place": in_place}
                found.append({"kernel": "twopass", **case, "us": us})
    for block, warps in ((32, 1), (64, 1), (64, 2), (64, 4), (128, 1), (128, 4), (256, 4), (512, 4), (1024, 4)):
        for rows in (132, 528, 2112, 10240):
            x = torch.zeros(rows * block * 32, **new)
            out = torch.zeros_like(x)
            us = timed(chain, rows, x, out, 32, rows * block, block, warps=warps)
            case = {"warps": warps, "block": block, "rows": rows, "row_bytes": 4 * 32 * block}
            found.append({"kernel": "chain", **case, "us": us})
    write_rows(found)


if __name__ == "__main__":
    main()
