"""A kernel that counts floats of one kind by functions of libdevice."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def counted(X, O, n, KIND: tl.constexpr, B: tl.constexpr):
    at = tl.arange(0, B)
    x = tl.load(X + tl.program_id(0) * n + at, mask=at < n, other=0.0)
    if KIND == 0:
        holds = libdevice.isnan(x)
    elif KIND == 1:
        holds = libdevice.isinf(x)
    else:
        holds = libdevice.finitef(x)
    tl.store(O + tl.program_id(0), tl.sum((holds != 0).to(tl.int32), 0))


@triton.jit
def absolute_integers(X, F, Y, Z, n, B: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * n + i, mask=i < n, other=0)
    f = tl.load(F + p * n + i, mask=i < n, other=0.0)
    tl.store(Y + p * n + i, tl.abs(x - 3) + tl.abs(i - 5), mask=i < n)
    tl.store(Z + p * n + i, tl.abs((f * 100.0).to(tl.int32)) * 0.5, mask=i < n)
