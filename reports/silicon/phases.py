"""Time flash tiles without parts of the softmax, and short calls, to show which parts overlap.

    python reports/silicon/phases.py OUT.json

``causal`` 0: no mask; 1: causal; 2: masked, over all keys.  ``part`` 0: all of softmax; 1: differences instead of
exponentials; 2: exponentials without maxima.  Needs torch, triton and one GPU; a minute, most of it compiling in 14
processes.  Data in this folder (phases.json): one H100, 2026-11-28.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.testing import do_bench

NAMES = ("head_dim", "block_q", "block_kv", "stages", "warps", "causal", "part")
MADE = ("registers", "spilled", "shared_bytes", "seq", "heads", "us")
Tile = tuple[int, ...]
#: Tiles of the first part: without spills, and copies that fit shared memory.
TILES = tuple(
    (d, rows, keys, stages, warps)
    for d, (rows, warps), keys, stages in itertools.product(
        (64, 128), ((64, 4), (64, 8), (128, 4), (128, 8), (256, 8)), (32, 64, 128, 256), (1, 2, 3)
    )
    if rows * keys // warps <= 2048 and (stages * 2 * keys + rows) * d * 2 <= 227_000
    if stages > 1 or keys in (64, 128)
)
VARIANTS = ((0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2), (2, 2))
#: Tiles, tokens and blocks of short calls.
SHORT = (
    (64, 64, 64, 2, 4),
    (64, 128, 64, 3, 4),
    (64, 128, 128, 3, 8),
    (128, 64, 64, 2, 4),
    (128, 128, 64, 3, 8),
    (128, 128, 128, 3, 8),
    (128, 128, 64, 2, 4),
)
TOKENS, BLOCKS = (128, 256, 512, 1024, 2048), (1, 33, 66, 132, 264, 396)


@triton.jit
def flash(
    q_at, k_at, v_at, out_at, scale, seq, d: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    causal: tl.constexpr, stages: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64) * seq * d
    row, col, key = block * rows + tl.arange(0, rows), tl.arange(0, d), tl.arange(0, keys)
    q = tl.load(q_at + head + row[:, None] * d + col[None])
    most, total = tl.full([rows], float("-inf"), tl.float32), tl.zeros([rows], tl.float32)
    out = tl.zeros([rows, d], tl.float32)
    end = tl.minimum((block + 1) * rows, seq) if causal == 1 else seq
    for j in tl.range(0, end, keys, num_stages=stages):
        k = tl.load(k_at + head + (j + key)[:, None] * d + col[None])
        s = tl.dot(q, tl.trans(k)) * scale
        if causal > 0:
            s = tl.where(row[:, None] >= (j + key)[None], s, float("-inf"))
        if part == 2:
            p = tl.math.exp2(s)
            total += tl.sum(p, 1)
        else:
            new = tl.maximum(most, tl.max(s, 1))
            p = s - new[:, None] if part == 1 else tl.math.exp2(s - new[:, None])
            factor = most - new if part == 1 else tl.math.exp2(most - new)
            total, out, most = total * factor + tl.sum(p, 1), out * factor[:, None], new
        v = tl.load(v_at + head + (j + key)[:, None] * d + col[None])
        out = tl.dot(p.to(q.dtype), v, out)
    tl.store(out_at + head + row[:, None] * d + col[None], (out / total[:, None]).to(q.dtype))


def call(tile: Tile, causal: int, part: int, seq: int, heads: int, data: list[torch.Tensor]) -> object:
    """Run a tile and return the compiled kernel."""
    d, rows, keys, stages, warps = tile
    last = (math.log2(math.e) / math.sqrt(d), seq, d, rows, keys, causal, stages, part)
    return flash[seq // rows, heads](*data, *last, num_warps=warps)


def data_of(tile: Tile, seq: int, heads: int) -> list[torch.Tensor]:
    """Return Q, K, V and the output of a call."""
    return [torch.randn(seq * heads * tile[0], device="cuda").half() for _ in range(4)]


def compile_one(job: tuple[Tile, int, int]) -> None:
    """Compile a tile, so that the next process loads it from the cache."""
    call(*job, 512, 2, data_of(job[0], 512, 2))


def timed(tile: Tile, causal: int, part: int, seq: int, heads: int) -> list[object]:
    """Return a row: the tile, its variant, what the compiler made of it, and the median time of calls."""
    data = data_of(tile, seq, heads)
    handle = call(tile, causal, part, seq, heads, data)
    us = do_bench(lambda: call(tile, causal, part, seq, heads, data), warmup=3, rep=12, return_mode="median") * 1e3
    return [*tile, causal, part, handle.n_regs, handle.n_spills, handle.metadata.shared, seq, heads, round(us, 2)]


def main() -> None:
    jobs = [(tile, *variant) for tile in TILES for variant in VARIANTS]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs, chunksize=8))
    rows = [timed(*job, 2048, 33) for job in jobs]
    for tile, seq, blocks in itertools.product(SHORT, TOKENS, BLOCKS):
        heads = blocks * tile[1] // seq
        if heads and (heads * seq == blocks * tile[1] or blocks == 1):
            rows += [timed(tile, causal, 0, seq, heads) for causal in (0, 1)]
    about = json.dumps({"device": torch.cuda.get_device_name(), "names": [*NAMES, *MADE]})
    text = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    Path(sys.argv[1]).write_text(f'{{\n  "about": {about},\n  "rows": [\n{text}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
