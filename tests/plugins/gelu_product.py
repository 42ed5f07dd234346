"""O = gelu(Q V): an exact GELU in the kernel of the product; V holds the weights."""

import math

import numpy as np

from npusim.kernel import FlashPrecision, GlobalTensor, erf, grid, kernel, schedule


@kernel(results="o", q="row head", w="head value")
def gelu_product(q, w, fmt):
    x = (q @ w).to("float32")
    return (x * 0.5 * (erf(x * math.sqrt(0.5)) + 1.0)).to(fmt)


def phases(problem, tiling, p, machine):
    heads, rows, d, v, fmt = problem.heads, problem.seq_q, problem.head_dim, problem.value_head_dim, problem.dtype
    q, w = (GlobalTensor(n, 1, heads, r, c, fmt, "input") for n, r, c in (("q", rows, d), ("v", d, v)))
    o = GlobalTensor("o", 1, heads, rows, v, fmt, "output")
    sizes = {"row": 64, "value": v, "head": d}
    return [gelu_product.phase("gelu", grid(o, ("row", 64), ("value", v)), sizes, [o], q=q, w=w, fmt=fmt)]


def reference(q, k, v, problem, row, tiling):
    x = q @ v
    return x * 0.5 * (np.vectorize(math.erf)(x * math.sqrt(0.5)) + 1.0)


GELU_PRODUCT = schedule(
    "gelu_product", phases, precisions=[FlashPrecision("stored")], reference=reference, summary="a product and GELU"
)
