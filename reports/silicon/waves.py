"""Time attention's tiles over waves of blocks, lengths of rows and blocks that share a head, L2 flushed or not.

    python reports/silicon/waves.py OUT.json [--kernels FILE]

How far blocks go on in step: the first waves take longer than later ones where a tile waits for its copies.  ``FILE``
holds the kernels measured: ../shared/measurements/h200_kernels.py.  Needs torch, triton and one GPU; a minute.
Data in this folder (waves.json): one H100, 2026-11-26, with what a profiler said of three loops and of the clocks.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from measure_h200 import KERNELS, LOG2_E, load, residents_of, us

DIM, KEYS = 128, 4096
TILES = (
    *((64, 128, 2, 4), (64, 128, 1, 4), (64, 64, 1, 4), (64, 64, 2, 4), (128, 64, 2, 4)),
    *((128, 128, 1, 4), (128, 128, 2, 4), (128, 128, 3, 8), (64, 128, 3, 8), (128, 64, 1, 4)),
)
#: Blocks of a head and heads: 132 blocks and fewer, for each that a multiprocessor holds.
SHARED = ((1, 132), (4, 33), (12, 11), (22, 6), (33, 4))
CALLS = 8


def back_to_back(function: object) -> float:
    """Return the median time of a call after others, in microseconds: L2 holds what the one before left."""
    times = []
    function()
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / CALLS * 1e3)
    return round(sorted(times)[2], 2)


def grids(block_q: int, residents: int) -> list[tuple[str, int, int, int]]:
    """Return the name of the variation, keys, blocks of a head, and heads."""
    each = KEYS // block_q
    found = [("length", keys, 12, 11 * residents) for keys in (1024, 2048, 4096, 8192)]
    found += [("share", KEYS, x, y * residents) for x, y in SHARED if x <= each and y * residents <= 128]
    found += [("waves", KEYS, each, heads) for heads in (2, 4, 8, 16, 32)]
    return found + [("waves", KEYS // 2, each // 2, heads) for heads in (4, 8, 16, 32, 64)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kernels", type=Path, default=KERNELS)
    chosen = parser.parse_args()
    given, rows = load(chosen.kernels), []
    q, k, v = (torch.randn(64 * 8192 * DIM, device="cuda").half() for _ in range(3))
    o = torch.empty_like(q)
    for kind, tile in ((kind, tile) for kind in ("flash", "pasa") for tile in TILES):
        block_q, warps = tile[0], tile[-1]

        def call(keys: int, across: int, heads: int, kind: str = kind, tile: tuple[int, ...] = tile) -> object:
            block_q, block_kv, stages, warps = tile
            if kind == "pasa":
                last = (DIM, block_q, block_kv, stages)
                return given.pasa[across, heads](q, k, v, o, keys, 1, 1.0, *last, num_warps=warps)
            last = (DIM, block_q, block_kv, False, stages)
            return given.fa[across, heads](q, k, v, o, LOG2_E / math.sqrt(DIM), keys, 1, *last, num_warps=warps)

        residents = residents_of(call(2048, 1, 1), warps)
        for what, *size in grids(block_q, residents):
            times = us(lambda s=size: call(*s)), back_to_back(lambda s=size: call(*s))
            rows.append([kind, *tile, residents, what, *size, *times])
    names = ["kernel", "block_q", "block_kv", "stages", "warps", "residents", "varied", "keys", "blocks", "heads"]
    text = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    head = json.dumps({"device": torch.cuda.get_device_name(), "names": [*names, "us", "behind_others_us"]})
    chosen.out.write_text(f'{{\n  "about": {head},\n  "rows": [\n{text}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
