"""O = rms_norm(Q) V: a root mean square norm in the kernel of the product that follows; V holds the weights.

K's first row holds the gains of the norm, which every row of Q takes.
"""

import numpy as np

from npusim.kernel import FlashPrecision, GlobalTensor, grid, kernel, rsqrt, schedule, sqrt

EPSILON = 1e-6


@kernel(results="o", q="row head", gain="1 head", w="head value")
def normed_product(q, gain, w, fmt, d):
    x = q.to("float32")
    y = x * rsqrt((x * x).sum() / d + EPSILON) * gain.to("float32")
    return (y.to(fmt) @ w).to("float32").to(fmt)


@kernel(results="o", q="row head", gain="1 head", w="head value")
def divided_product(q, gain, w, fmt, d):
    x = q.to("float32")
    y = x / sqrt((x * x).sum() / d + EPSILON) * gain.to("float32")
    return (y.to(fmt) @ w).to("float32").to(fmt)


def phases(problem, tiling, p, machine, norm=normed_product):
    heads, rows, d, v, fmt = problem.heads, problem.seq_q, problem.head_dim, problem.value_head_dim, problem.dtype
    named = ("q", rows, d), ("k", problem.seq_kv, d), ("v", d, v)
    q, k, w = (GlobalTensor(n, 1, heads, r, c, fmt, "input") for n, r, c in named)
    o, sizes = GlobalTensor("o", 1, heads, rows, v, fmt, "output"), {"row": 64, "value": v, "head": d}
    blocks = grid(o, ("row", 64), ("value", v))
    return [norm.phase("norm", blocks, sizes, [o], q=q, gain=k, w=w, fmt=fmt, d=d)]


def reference(q, k, v, problem, row, tiling):
    return q / np.sqrt((q * q).mean(1, keepdims=True) + EPSILON) * k[0] @ v


def root_phases(problem, tiling, p, machine):
    return phases(problem, tiling, p, machine, divided_product)


ROOT_PRODUCT = schedule("root_product", root_phases, precisions=[FlashPrecision("stored")], reference=reference)
NORM_PRODUCT = schedule(
    "norm_product", phases, precisions=[FlashPrecision("stored")], reference=reference, summary="a norm and a product"
)
