"""Products in paper form, on the tensors of an attention's problem, and the functions that they should compute."""

import numpy as np

from npusim.kernel import FlashPrecision, GlobalTensor, grid, kernel, rsqrt, schedule


def normed(q, w, fmt, d, fault):
    x = q.to("float32")
    mean = (x * x).sum() / (d if fault != "mean of twice as many" else 2 * d)
    y = x * rsqrt(mean + (1e-6 if fault != "epsilon" else 1.0))
    return (y.to(fmt) @ w).to("float32").to(fmt)


def product(q, w, fmt, d, fault):
    y = (q @ w).to("float32")
    return (y * (0.5 if fault == "halved" else 0.0 if fault == "zeros" else 1.0)).to(fmt)


def made(name, function, fault=""):
    traced = kernel(results="o", q="row head", w="head value")(function)

    def phases(problem, tiling, p, machine):
        heads, rows, d, v, fmt = problem.heads, problem.seq_q, problem.head_dim, problem.value_head_dim, problem.dtype
        q, w = (GlobalTensor(n, 1, heads, r, c, fmt, "input") for n, r, c in (("q", rows, d), ("v", d, v)))
        o, sizes = GlobalTensor("o", 1, heads, rows, v, fmt, "output"), {"row": 64, "value": v, "head": d}
        given = {"q": q, "w": w, "fmt": fmt, "d": d, "fault": fault}
        return [traced.phase(name, grid(o, ("row", 64), ("value", v)), sizes, [o], **given)]

    return schedule(name, phases, precisions=[FlashPrecision("stored")])


def norm_reference(q, v):
    return q / np.sqrt((q * q).mean(-1, keepdims=True) + 1e-6) @ v


def product_reference(q, v):
    return q @ v


RIGHT = {"norm": "norm_reference", "plain": "product_reference"}
WRONG = {
    "norm_of_twice": "norm_reference",
    "norm_with_epsilon": "norm_reference",
    "half_product": "product_reference",
    "no_product": "product_reference",
    "plain_for_norm": "norm_reference",
}

norm = made("norm", normed)
norm_of_twice = made("norm_of_twice", normed, "mean of twice as many")
norm_with_epsilon = made("norm_with_epsilon", normed, "epsilon")
plain = made("plain", product)
plain_for_norm = made("plain_for_norm", product)
half_product = made("half_product", product, "halved")
no_product = made("no_product", product, "zeros")
