"""The kernels of gathered.py, and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

MIB = 1 << 20


@triton.jit
def read(x, places, out, count: int, pitch: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
         stages: tl.constexpr, is_listed: tl.constexpr):  # fmt: skip
    """Add up pieces of rows, whose numbers are listed or follow one another."""
    pid, head = tl.program_id(0), tl.program_id(1)
    columns, total = tl.arange(0, width)[None, :], tl.zeros([rows, width], tl.float32)
    x += head * width
    for i in tl.range(0, count, rows, num_stages=stages):
        at = pid * count + i + tl.arange(0, rows)
        if is_listed:
            at = tl.load(places + at)
        total += tl.load(x + at[:, None].to(tl.int64) * pitch + columns).to(tl.float32)
    tl.store(out + (head * tl.num_programs(0) + pid) * width + tl.arange(0, width), tl.sum(total, 0))


@triton.jit
def write(x, places, out, count: int, pitch: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
          stages: tl.constexpr, is_copy: tl.constexpr):  # fmt: skip
    """Write pieces of rows whose numbers are listed, or copy them one after another."""
    pid, head = tl.program_id(0), tl.program_id(1)
    columns, value = tl.arange(0, width)[None, :], tl.zeros([rows, width], tl.bfloat16) + pid.to(tl.bfloat16)
    x += head * width
    out += head * width + pid.to(tl.int64) * count * pitch
    for i in tl.range(0, count, rows, num_stages=stages):
        at = tl.load(places + pid * count + i + tl.arange(0, rows))
        pointers = x + at[:, None].to(tl.int64) * pitch + columns
        if is_copy:
            own = i + tl.arange(0, rows)
            tl.store(out + own[:, None].to(tl.int64) * pitch + columns, tl.load(pointers))
        else:
            tl.store(pointers, value)


@triton.jit
def hop(x, out, width: tl.constexpr):
    """Copy a tile."""
    at = tl.program_id(0) * width + tl.arange(0, width)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def nothing(x):
    """Do nothing."""


@triton.jit
def product(a, b, out, count: int, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr,
            stages: tl.constexpr, is_wide: tl.constexpr):  # fmt: skip
    """Add up products of tiles of rows that are ``count`` tiles long."""
    pid = tl.program_id(0).to(tl.int64)
    a += pid * m * count * k
    b += pid * n * count * k
    rows, columns, depth = tl.arange(0, m)[:, None], tl.arange(0, n)[:, None], tl.arange(0, k)[None, :]
    total = tl.zeros([m, n], tl.float32)
    for i in tl.range(0, count, num_stages=stages):
        left = tl.load(a + rows * (count * k) + i * k + depth)
        right = tl.load(b + columns * (count * k) + i * k + depth)
        total = tl.dot(left, right.T, total)
    pointers = out + pid * m * n + rows * n + tl.arange(0, n)[None, :]
    tl.store(pointers, total if is_wide else total.to(tl.bfloat16))


def launch_of(case: dict[str, Any]) -> Any:
    """Return a function that launches a case once, on tensors of zeros."""
    import torch

    how, blocks, kernel = {"num_warps": case["warps"]}, case["blocks"], case["kernel"]

    def zeros(size: int, fmt: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(size, dtype=fmt or torch.bfloat16, device="cuda")

    if kernel == "nothing":
        own = zeros(1)
        return lambda: nothing[(blocks,)](own, **how)
    if kernel == "hop":
        x, y = (zeros(blocks * case["width"], torch.int32) for _ in range(2))
        return lambda: hop[(blocks,)](x, y, case["width"], **how)
    if kernel == "product":
        m, n, k, count = (case[name] for name in ("m", "n", "k", "count"))
        a, b = (zeros(blocks * size * count * k) for size in (m, n))
        c = zeros(blocks * m * n, torch.float32 if case["wide"] else torch.bfloat16)
        return lambda: product[(blocks,)](a, b, c, count, m, n, k, case["stages"], bool(case["wide"]), **how)
    width = case["piece"] // 2
    pitch = case["heads"] * width
    rows = case["mib"] * MIB // 2 // pitch
    x, places = zeros(rows * pitch), torch.cat([_order(rows, case["order"]) for _ in range(case["passes"])])
    listed = places.int()
    grid, fixed = (blocks, case["heads"]), (case["count"], pitch, case["rows"], width, case["stages"])
    if kernel in ("read", "direct"):
        out = zeros(blocks * case["heads"] * width, torch.float32)
        return lambda: read[grid](x, listed, out, *fixed, kernel == "read", **how)
    out = zeros(rows * pitch if kernel == "both" else 1)
    return lambda: write[grid](x, listed, out, *fixed, kernel == "both", **how)


def _order(rows: int, group: int) -> torch.Tensor:
    """Return the rows in order (0), or groups of so many of them in random order."""
    import torch

    if not group:
        return torch.arange(rows, device="cuda")
    first = torch.randperm(rows // group, device="cuda")[:, None] * group
    return (first + torch.arange(group, device="cuda")[None]).reshape(-1)
