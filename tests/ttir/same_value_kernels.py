"""Kernels of which several programs store to one element."""

import triton
import triton.language as tl


@triton.jit
def of_groups(X, Y, Z, G, n, HOW: tl.constexpr, B: tl.constexpr):
    """Each head stores its own row of Z, and its group's row of Y, which the heads of the group share."""
    row, head, cols = tl.program_id(0), tl.program_id(1), tl.arange(0, B)
    inside, group = cols < n, head // 2
    x = tl.load(X + (row * 2 + group) * n + cols, mask=inside, other=0.0)
    tl.store(Z + (row * 4 + head) * n + cols, x * head, mask=inside)
    y = x - tl.sum(x, 0)
    if HOW == "heads":
        y = y * head
    elif HOW == "numbers":
        y = y * tl.load(G + row * 4 + head)
    elif HOW == "masks":
        y = tl.where(cols < head, y, 0.0)
    elif HOW == "branches":
        if head == 1:
            y = y + 1.0
    elif HOW == "lanes":
        cols = cols // 2
    tl.store(Y + (row * 2 + group) * n + cols, y, mask=inside)


@triton.jit
def of_loops(X, P, Y, Z, n, B: tl.constexpr):
    """Rows by tiles, of which the first has P, too; Y is the same for both heads, and Z is not."""
    row, head = tl.program_id(0), tl.program_id(1)
    for k in range(0, n, B):
        cols = k + tl.arange(0, B)
        x = tl.load(X + row * n + cols, mask=cols < n, other=0.0)
        z = x * 2.0
        if k == 0:
            x += tl.load(P + row * B + cols, mask=cols < B, other=0.0)
            z += tl.load(P + head * B + cols, mask=cols < B, other=0.0)
        tl.store(Y + row * n + cols, x, mask=cols < n)
        tl.store(Z + (row * 2 + head) * n + cols, z, mask=cols < n)


@triton.jit
def attention_with_caches(Q, K, V, O, Keys, Values, Pages, Starts, H: tl.constexpr, B: tl.constexpr, D: tl.constexpr):
    """Causal attention of sequences of pages; a group's first head stores the keys and values of a page in caches."""
    sequence, head, page = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(Starts + sequence)
    length = tl.load(Starts + sequence + 1) - first
    if page * B >= length:
        return
    rows, cols = tl.arange(0, B), tl.arange(0, D)
    of_keys = (first * (H // 2) + head // 2) * D
    q_at = page * B + rows
    of_queries = (first * H + head) * D + q_at[:, None] * H * D + cols[None, :]
    q = tl.load(Q + of_queries, mask=q_at[:, None] < length, other=0.0)
    m, total, acc = tl.full([B], float("-inf"), tl.float32), tl.zeros([B], tl.float32), tl.zeros([B, D], tl.float32)
    for start in range(0, (page + 1) * B, B):
        at = start + rows
        k = tl.load(K + of_keys + at[None, :] * (H // 2) * D + cols[:, None], mask=at[None, :] < length, other=0.0)
        s = tl.where(q_at[:, None] >= at[None, :], tl.dot(q, k), float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        acc = acc * tl.exp(m - new)[:, None]
        total = total * tl.exp(m - new) + tl.sum(p, 1)
        v = tl.load(V + of_keys + at[:, None] * (H // 2) * D + cols[None, :], mask=at[:, None] < length, other=0.0)
        acc += tl.dot(p.to(v.dtype), v)
        m = new
    tl.store(O + of_queries, (acc / total[:, None]).to(tl.float16), mask=q_at[:, None] < length)
    if head % 2 == 0:
        kept = (tl.load(Pages + sequence * 3 + page) * (H // 2) + head // 2) * B * D
        left = length - page * B
        k = tl.load(K + of_keys + cols[None, :] + q_at[:, None] * (H // 2) * D, mask=q_at[:, None] < length, other=0.0)
        tl.store(Keys + kept + cols[None, :] + rows[:, None] * D, k, mask=rows[:, None] < left)
        v = tl.load(V + of_keys + cols[:, None] + q_at[None, :] * (H // 2) * D, mask=q_at[None, :] < length, other=0.0)
        tl.store(Values + kept + cols[:, None] + rows[None, :] * D, v, mask=rows[None, :] < left)
