"""Time flash tiles whose registers spill, with what the compiler gave each: rows, keys, stages, warps, head sizes.

    python reports/silicon/tail.py OUT.json [--kernels FILE]

``FILE`` holds the kernel: ../shared/measurements/h200_kernels.py.  Each tile runs at two lengths, L2 dirty before each
call.  Needs torch, triton and one GPU; a minute, most of it compiling in 14 processes.
Data in this folder (tail_h100.json): one H100, 2026-11-27.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from measure_h200 import KERNELS, LOG2_E, load
from triton.testing import do_bench

TILES = tuple(itertools.product((64, 128, 256), (32, 64, 128, 256), (1, 2, 3), (4, 8)))
#: Heads of calls of 4,096 and of 2,048 tokens, by head size.
HEADS = {64: (32, 22), 128: (16, 22), 256: (8, 11)}
SHARED_BYTES = 250_000
NAMES = ("head_dim", "causal", "block_q", "block_kv", "stages", "warps", "registers", "spilled", "shared_bytes")
Case = tuple[int, bool, int, int, int, int]


def cases() -> list[Case]:
    """Return the tiles whose copies may fit shared memory, by head size and mask."""
    every = ((d, causal, *tile) for d in HEADS for causal in (False, True) for tile in TILES)
    return [
        (d, causal, rows, keys, stages, warps)
        for d, causal, rows, keys, stages, warps in every
        if rows * keys <= 256 * 128 and (stages * 2 * keys * d + rows * d) * 2 <= SHARED_BYTES
    ]


def call(given: object, data: list[torch.Tensor], case: Case, seq: int, heads: int) -> object:
    """Run a tile and return the compiled kernel."""
    d, causal, rows, keys, stages, warps = case
    last = (LOG2_E / math.sqrt(d), seq, 1, d, rows, keys, causal, stages)
    return given.fa[seq // rows, heads](*data, *last, num_warps=warps)


def compile_one(kernels: Path, case: Case) -> None:
    """Have a tile compiled, so that the next process finds it."""
    q = torch.zeros(2 * 512 * case[0], device="cuda", dtype=torch.float16)
    call(load(kernels), [q, q, q, torch.empty_like(q)], case, 512, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kernels", type=Path, default=KERNELS)
    chosen = parser.parse_args()
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(compile_one, chosen.kernels), cases(), chunksize=4))
    given, rows = load(chosen.kernels), []
    data = [torch.randn(8192 * 32 * 64, device="cuda").half() for _ in range(4)]
    for case in cases():
        for seq, heads in zip((4096, 2048), HEADS[case[0]], strict=True):
            handle = call(given, data, case, seq, heads)
            timed = partial(call, given, data, case, seq, heads)
            us = do_bench(timed, warmup=4, rep=15, return_mode="median") * 1e3
            counts = handle.n_regs, handle.n_spills, handle.metadata.shared
            rows.append([*case, *counts, seq, heads, round(us, 2)])
    text = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    head = json.dumps({"device": torch.cuda.get_device_name(), "names": [*NAMES, "seq", "heads", "us"]})
    chosen.out.write_text(f'{{\n  "about": {head},\n  "rows": [\n{text}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
