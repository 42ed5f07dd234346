"""Kernels whose addresses and masks follow tables of integers."""

import triton
import triton.language as tl


@triton.jit
def paged_prefill(
    Q, K, V, O, Pages, n, scale, D: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAGE: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Rows of G heads that share a key, and keys by pages, as serving engines write prefill."""
    block, kv_head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    m, d = tl.arange(0, BM), tl.arange(0, D)
    pos = block * (BM // G) + m // G
    row = pos * heads * G + kv_head * G + m % G
    q = tl.load(Q + row[:, None] * D + d[None, :], mask=(pos < n)[:, None], other=0.0)
    top, total = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    last = tl.minimum((block + 1) * (BM // G), n)
    for j in range(tl.cdiv(last, BN)):
        key = j * BN + tl.arange(0, BN)
        page = tl.load(Pages + key // PAGE)
        at = page * PAGE * heads * D + (key % PAGE) * heads * D + kv_head * D
        k = tl.load(K + at[None, :] + d[:, None], mask=(key < last)[None, :], other=0.0)
        v = tl.load(V + at[:, None] + d[None, :], mask=(key < last)[:, None], other=0.0)
        s = tl.dot(q, k) * scale
        seen = key[None, :] <= pos[:, None]
        if HOW == "less":
            seen = key[None, :] < pos[:, None] + 1
        elif HOW == "rows first":
            seen = pos[:, None] >= key[None, :]
        elif HOW == "window":
            seen = (pos[:, None] > key[None, :] - 1) & (pos[:, None] < key[None, :] + 24)
        s = tl.where((pos < n)[:, None] & seen, s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        new = tl.where(new > -float("inf"), new, 0.0)
        p, alpha = tl.exp(s - new[:, None]), tl.exp(top - new)
        acc = tl.dot(p.to(tl.float16), v, acc * alpha[:, None])
        total = total * alpha + tl.sum(p, 1)
        top = new
    y = (acc / total[:, None]).to(tl.float16)
    tl.store(O + row[:, None] * D + d[None, :], y, mask=(pos < n)[:, None])
