"""Times of launches in which many programs return early: ``OUT=folder python reports/silicon/early.py`` on a GPU.

Written for an H100 with PyTorch 2.11 and Triton 3.6, whose medians `early.json` holds (us).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl


@triton.jit
def some(X, Y, n, B: tl.constexpr):
    p = tl.program_id(0)
    if p >= n:
        return
    c = p * B + tl.arange(0, B)
    tl.store(Y + c, tl.load(X + c) * 2)


@triton.jit
def some_loaded(X, Y, N, B: tl.constexpr):
    p = tl.program_id(0)
    if p >= tl.load(N):
        return
    c = p * B + tl.arange(0, B)
    tl.store(Y + c, tl.load(X + c) * 2)


@triton.jit
def product(A, B, C, n, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    p = tl.program_id(0)
    if p >= n:
        return
    rm, rn, rk = p * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(A + rm[:, None] * K + (k + rk)[None])
        b = tl.load(B + (k + rk)[:, None] * BN + rn[None])
        acc = tl.dot(a, b, acc)
    tl.store(C + rm[:, None] * BN + rn[None], acc.to(tl.float16))


def time_us(launch: Callable[[], object]) -> float:
    """Return the median time of a launch."""
    return 1000 * float(triton.testing.do_bench(launch, warmup=20, rep=100, return_mode="median"))


def main() -> None:
    """Write the times."""
    out, x = dict[str, object](), torch.zeros(1 << 18, device="cuda")
    y, n = torch.zeros_like(x), torch.tensor([256], device="cuda", dtype=torch.int32)
    a, b = (torch.randn(s, device="cuda", dtype=torch.float16) for s in ((264 * 64, 1024), (1024, 64)))
    c = torch.zeros(264 * 64, 64, device="cuda", dtype=torch.float16)
    for grid in (256, 512, 1024, 4096, 16384, 65536):
        out[f"some {grid}"] = time_us(lambda grid=grid: some[(grid,)](x, y, 256, 256))
        out[f"some_loaded {grid}"] = time_us(lambda grid=grid: some_loaded[(grid,)](x, y, n, 256))
    for live in (64, 264):
        for grid in (264, 528, 1056, 4224, 16896):
            launch = product[(grid,)]
            of = (a, b, c, live, 1024, 64, 64, 64)
            out[f"product {live} of {grid}"] = time_us(lambda launch=launch, of=of: launch(*of, num_warps=4))
    out["device"] = torch.cuda.get_device_name()
    (Path(os.environ["OUT"]) / "early.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
