"""Kernels in forms that public libraries have, for `test_public`."""

import triton
import triton.language as tl


@triton.jit
def smoothed_loss(Loss, Logits, Labels, smoothing, ignored, n, B: tl.constexpr):
    """A sum that the loop carries and that programs of ignored rows do not read."""
    row = tl.program_id(0)
    Logits += row * n
    total, m, s = 0.0, -float("inf"), 0.0
    for at in range(0, n, B):
        c = at + tl.arange(0, B)
        x = tl.load(Logits + c, mask=c < n, other=-float("inf"))
        total += tl.sum(tl.where(c < n, x, 0.0))
        larger = tl.maximum(m, tl.max(x))
        s = tl.exp(m - larger) * s + tl.sum(tl.exp(x - larger))
        m = larger
    label = tl.load(Labels + row)
    if label == ignored:
        loss = 0.0
    else:
        loss = tl.log(s) + m - smoothing * total / n - (1 - smoothing) * tl.load(Logits + label)
    tl.store(Loss + row, loss)
