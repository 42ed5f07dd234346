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
