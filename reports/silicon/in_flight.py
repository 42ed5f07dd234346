"""Measure reads and stores of memory with different numbers of bytes in flight on a multiprocessor.

    python -m reports.silicon.in_flight OUT.json

Needs one GPU, torch and triton.  Each time is that of one launch in a graph of equal launches, in microseconds: the
median of three replays.  All elements are float32.  ``programs``, ``warps``; ``lane``: bytes of a lane in each tile.

adds: a program that has no loop adds ``loads`` tiles and stores the sum; without a load it stores ones.
copies: a program copies ``count`` tiles one after the other: it loads a tile when it has stored the previous one.
reads: a program adds up ``count`` tiles, of which ``stages`` less one are in flight (`triton.language.range`).
fills: a program stores ``count`` tiles of ones.
"""

from __future__ import annotations

from typing import Any

import torch

from reports.silicon.graph_time import graph_us, write_rows
from reports.silicon.in_flight_kernels import adds, copies, fills, reads

CORES, LANES, MIB = 132, 32, 1 << 20
#: Bytes that one launch reads, or stores; beyond L2, and in L2.
BEYOND, WITHIN = 192 * MIB, 12 * MIB
#: Programs on a multiprocessor, warps of a program, bytes of a lane.
SIZES = tuple((r, w, lane) for r in (1, 2, 4, 8, 16) for w in (1, 2, 4, 8) for lane in (4, 16, 64) if r * w <= 64)


def timed(kernel: Any, programs: int, *given: Any, warps: int) -> float:
    """Return the time of one of many launches in a graph."""
    return round(graph_us([lambda: kernel[(programs,)](*given, num_warps=warps)] * 10, 3), 3)


def without_loop() -> list[dict[str, Any]]:
    """Measure programs that have no loop, of one wave and of many."""
    found = list[dict[str, Any]]()
    x, y = (torch.zeros(BEYOND // 4 * n, device="cuda") for n in (2, 1))
    for loads in (0, 1, 2):
        for warps in (1, 2, 4, 8, 16, 32):
            for lane in (4, 8, 16, 32, 64, 128):
                block = LANES * warps * lane // 4
                for programs in (CORES, 8 * CORES, 64 * CORES, BEYOND // max(loads, 1) // 4 // block):
                    size = programs * block
                    if size * 4 * max(loads, 1) <= BEYOND and programs <= 1 << 18:
                        case = {"kernel": "adds", "programs": programs, "warps": warps, "lane": lane, "loads": loads}
                        found.append({**case, "us": timed(adds, programs, x, y, size, loads, block, warps=warps)})
    return found


def loops() -> list[dict[str, Any]]:
    """Measure loops of resident programs, beyond L2 and in L2."""
    found = list[dict[str, Any]]()
    x, y = (torch.zeros(BEYOND // 4, device="cuda") for _ in range(2))
    for residents, warps, lane in SIZES:
        programs, block = CORES * residents, LANES * warps * lane // 4
        size = programs * block
        for whole in (BEYOND, WITHIN):
            if not 8 <= (count := whole // 4 // size) <= 6000:
                continue
            case = {"programs": programs, "warps": warps, "lane": lane, "count": count}
            us = timed(copies, programs, x, y, count, size, block, warps=warps)
            found.append({"kernel": "copies", **case, "us": us})
            us = timed(fills, programs, y, count, size, block, warps=warps)
            found.append({"kernel": "fills", **case, "us": us})
            for stages in (2, 3, 4) if lane >= 16 and block * 4 * 3 * residents <= 200 << 10 else ():
                us = timed(reads, programs, x, y, count, size, block, stages, warps=warps)
                found.append({"kernel": "reads", **case, "stages": stages, "us": us})
    return found


def main() -> None:
    """Measure all programs."""
    write_rows([*without_loop(), *loops()])


if __name__ == "__main__":
    main()
