"""Row kernels and products with decorators of Triton's autotuner, for tests."""

import triton
import triton.language as tl


def row_configs():
    return [triton.Config({}, num_warps=w) for w in (1, 2, 4, 8, 16)]


@triton.autotune(configs=row_configs(), key=["n_cols"])
@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n_cols"])})
@triton.jit
def softmax(Out, In, n_rows, n_cols, BLOCK: tl.constexpr):
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        cols = tl.arange(0, BLOCK)
        x = tl.load(In + row * n_cols + cols, mask=cols < n_cols, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(Out + row * n_cols + cols, e / tl.sum(e, axis=0), mask=cols < n_cols)


@triton.jit
def rms_norm(Y, X, W, Rstd, n_cols: tl.constexpr, eps: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    w = tl.load(W + cols, mask=cols < n_cols, other=0.0)
    r = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    tl.store(Rstd + row, r)
    tl.store(Y + row * n_cols + cols, (x * r).to(w.dtype) * w, mask=cols < n_cols)


@triton.jit
def gathered(Out, In, At, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    at = tl.load(At + cols)
    tl.store(Out + cols, tl.load(In + at))


@triton.autotune(
    configs=[
        triton.Config({"BM": 64, "BN": 64}, num_warps=4, num_stages=2),
        triton.Config({"BM": 128, "BN": 256}, num_warps=8, num_stages=3),
    ],
    key=["K"],
)
@triton.jit
def whole_product(A, B, C, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        at = k + tl.arange(0, BK)
        acc = tl.dot(tl.load(A + m[:, None] * K + at[None, :]), tl.load(B + at[:, None] * N + n[None, :]), acc)
    tl.store(C + m[:, None] * N + n[None, :], acc.to(C.dtype.element_ty))
