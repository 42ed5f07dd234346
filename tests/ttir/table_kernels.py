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


@triton.jit
def one_column(X, Y, C, D, BC: tl.constexpr, BD: tl.constexpr):
    """X less the mean of its column plus 1, tile by tile, with a mask as weights, as a loss writes it."""
    column, number = tl.program_id(0) * BD + tl.arange(0, BD), tl.program_id(1)
    total = tl.zeros([BC, BD], tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        seen = (c[:, None] < C) & (column[None, :] < D)
        x = tl.load(X + number * C * D + c[:, None] * D + column[None, :], seen, other=0.0)
        total += (x + 1.0) * (c < C)[:, None]
    mean = tl.sum(total, axis=0)[None, :] / C
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        seen = (c[:, None] < C) & (column[None, :] < D)
        at = number * C * D + c[:, None] * D + column[None, :]
        x = tl.load(X + at, seen, other=0.0)
        tl.store(Y + at, x - mean * (c < C)[:, None], seen)


@triton.jit
def states_as_rows(
    Q, H, O, A, X, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):
    """Rows of a chunk times the transpose of the chunk's state, (chunk, head, V, K), and what follows within it."""
    v, chunk, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(2)
    t, c, a = chunk * BT + tl.arange(0, BT), v * BV + tl.arange(0, BV), tl.arange(0, BT)
    o = tl.zeros([BT, BV], tl.float32)
    for i in range(K // BK):
        k = i * BK + tl.arange(0, BK)
        q = tl.load(Q + (t[:, None] * heads + head) * K + k[None, :])
        h = tl.load(H + (chunk * heads + head) * V * K + c[:, None] * K + k[None, :])
        o += tl.dot(q, tl.trans(h))
    within = tl.load(A + (t[:, None] * heads + head) * BT + a[None, :])
    within = tl.where(a[:, None] >= a[None, :], within, 0.0).to(tl.float16)
    x = tl.load(X + (t[:, None] * heads + head) * V + c[None, :])
    o += tl.dot(within, x)
    tl.store(O + (t[:, None] * heads + head) * V + c[None, :], o.to(tl.float16))
