"""A corpus of row-wise kernels, right in several ways and wrong as kernels are, in paper form and in Triton.

Bodies are written once, in words that both languages have: `MAX` and `SUM` of a row, `STEP` for the larger of two
values, `exp`, `log`, `rsqrt`, `tanh`, `SQRT`, `ALL(a, ok)` for a value that is 0 beyond the row, ``n`` for the length
of a row, and ``x``, ``y``, ``z`` in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAPER = """
from npusim.kernel import FlashPrecision, GlobalTensor, KernelProblem, exp, grid, kernel, log, maximum
from npusim.kernel import rsqrt, schedule, sqrt, tanh

def MAX(a): return a.max()
def SUM(a): return a.sum()
def ALL(a, ok): return a
def STEP(a, b): return maximum(a, b)
def SQRT(a): return sqrt(a)

ok = None

@kernel(results="o", {axes})
def function({inputs}, n, rows, fmt):
    {inputs} = {wide}
    {body}
    return o.to(fmt)

def phases(problem, tiling, p, machine):
    rows, n, fmt = problem.sizes["R"], problem.sizes["N"], problem.dtype
    {tensors} = (GlobalTensor(t, 1, 1, rows, n, fmt, "input") for t in {names})
    o = GlobalTensor("o", 1, 1, rows, n, fmt, "output")
    where_ = {{"row": 16, "col": n}}
    return [function.phase("k", grid(o, ("row", 16)), where_, [o], {given}, n=n, rows=rows, fmt=fmt)]

K = schedule("candidate", phases, precisions=[FlashPrecision("stored")], problem=KernelProblem,
             sizes={{"R": 64, "N": 96}})
"""
TRITON = """
import triton
import triton.language as tl

@triton.jit
def MAX(a): return tl.max(a, 0)
@triton.jit
def SUM(a): return tl.sum(a, 0)
@triton.jit
def ALL(a, ok): return tl.where(ok, a, 0.0)
@triton.jit
def STEP(a, b): return tl.maximum(a, b)
@triton.jit
def SQRT(a): return tl.sqrt(a)
@triton.jit
def exp(a): return tl.exp(a)
@triton.jit
def log(a): return tl.log(a)
@triton.jit
def rsqrt(a): return tl.rsqrt(a)
@triton.jit
def tanh(a): return 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0)

@triton.jit
def K({pointers}, O, rows, n, B: tl.constexpr):
    r, c = tl.program_id(0), tl.arange(0, B)
    ok = c < n
    {loads}
    {body}
    tl.store(O + r * n + c, o.to(tl.float16), mask=ok)
"""


@dataclass(frozen=True)
class Kind:
    """A function of rows: its inputs, its float64 result, right bodies and wrong ones; ``beyond``: beyond a row."""

    inputs: str
    exact: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    beyond: str = "0.0"

    @property
    def names(self) -> list[str]:
        """Inputs by name."""
        return self.inputs.split()

    def reference(self) -> str:
        """Return the file of the function in float64, whatever case a candidate's names have."""
        names = ", ".join(self.names)
        upper = ", ".join(map(str.upper, self.names))
        head = "import numpy as np\n\nR = dict(axis=-1, keepdims=True)\n\n"
        return (
            f"{head}def paper({names}):\n    return {self.exact}\n\ndef triton({upper}):\n    return paper({upper})\n"
        )

    def paper(self, body: str) -> str:
        """Return a candidate in paper form."""
        names = self.names
        return PAPER.format(
            axes=", ".join(f'{n}="row col"' for n in names),
            inputs=", ".join(names),
            wide=", ".join(f'{n}.to("float32")' for n in names),
            body=body.replace("; ", "\n    "),
            tensors=", ".join(names) + ("," if len(names) == 1 else ""),
            names=tuple(names),
            given=", ".join(f"{n}={n}" for n in names),
        )

    def triton(self, body: str) -> str:
        """Return a candidate in Triton."""
        beyond = self.beyond
        return TRITON.format(
            pointers=", ".join(map(str.upper, self.names)),
            loads="\n    ".join(
                f"{n} = tl.load({n.upper()} + r * n + c, mask=ok, other={beyond}).to(tl.float32)" for n in self.names
            ),
            body=body.replace("; ", "\n    "),
        )

    def launch(self, file: Path) -> str:
        """Return the name of a candidate in Triton."""
        tensors = ", ".join(["tensor(R, N)"] * (len(self.names) + 1))
        return f"{file}::K[R]({tensors}, R, N, B=next_power_of_2(N), num_warps=1)"


PRODUCT = """
from npusim.kernel import FlashPrecision, GemmProblem, GlobalTensor, grid, kernel, schedule

@kernel(results="c", a="m k", b="k n")
def product(a, b, fmt):
    {body}
    return o.to(fmt)

def phases(problem, tiling, p, machine):
    m, n, k, fmt = problem.m, problem.n, problem.k, problem.dtype
    a, b = GlobalTensor("a", 1, 1, m, k, fmt, "input"), GlobalTensor("b", 1, 1, k, n, fmt, "input")
    c = GlobalTensor("c", 1, 1, m, n, fmt, "output")
    return [product.phase("p", grid(c, ("m", 64), ("n", 128)), {{"m": 64, "n": 128, "k": k}}, [c], a=a, b=b, fmt=fmt)]

K = schedule("candidate", phases, precisions=[FlashPrecision("stored")], problem=GemmProblem)
"""
#: Products of `GemmProblem`, which have a reference of their own.
PRODUCTS_RIGHT = ('o = (a @ b).to("float32")', 'o = (a @ b).to("float32") * 4.0 * 0.25')
PRODUCTS_WRONG = (
    'o = (a @ b).to("float32") * 1.01',
    'o = (a @ b).to("float32") + 1.0',
    'o = (a @ b).to("float32") * 0.0',
)
NORM_OF = "({}) / np.sqrt((({}) ** 2).mean(**R) + 1e-5)"
KINDS = {
    "softmax": Kind(
        "x",
        "np.exp(x - x.max(**R)) / np.exp(x - x.max(**R)).sum(**R)",
        (
            "e = exp(x - MAX(x)); o = e / SUM(e)",
            "e = exp(x - MAX(x)); o = e * (1.0 / SUM(e))",
            "m = MAX(x); o = exp(x - m - log(SUM(exp(x - m))))",
            "m = MAX(x); e = exp((x - m) * 0.5); e = e * e; o = e / SUM(e)",
            "m = STEP(MAX(x), -1000.0); e = exp(x - m); o = e / SUM(e)",
        ),
        (
            "e = exp(x); o = e / SUM(e)",
            "e = exp(x - MAX(x)); o = e / (SUM(e) + 1.0)",
            "e = exp((x - MAX(x)) * 0.6931472); o = e / SUM(e)",
            "e = exp(x - MAX(x)); o = e / SUM(e * 0.9)",
            "e = exp(x - MAX(x)); o = e / SUM(e) * 1.01",
        ),
        beyond='float("-inf")',
    ),
    "log_softmax": Kind(
        "x",
        "x - x.max(**R) - np.log(np.exp(x - x.max(**R)).sum(**R))",
        (
            "m = MAX(x); o = x - m - log(SUM(exp(x - m)))",
            "m = MAX(x); o = x - (m + log(SUM(exp(x - m))))",
            "y = x - MAX(x); o = y - log(SUM(exp(y)))",
            "m = MAX(x); o = (x - m) + log(1.0 / SUM(exp(x - m)))",
            "m = MAX(x); e = exp((x - m) * 0.5); o = x - m - log(SUM(e * e))",
        ),
        (
            "o = x - log(SUM(exp(x)))",
            "m = MAX(x); o = x - log(SUM(exp(x - m)))",
            "m = MAX(x); o = x - m - log(SUM(exp(x - m)) / n)",
            "m = MAX(x); o = x - m + log(SUM(exp(x - m)))",
            "m = MAX(x); o = x - m - log(SUM(exp(x - m)) + 1.0)",
        ),
        beyond='float("-inf")',
    ),
    "rms_norm": Kind(
        "x y",
        NORM_OF.format("x", "x") + " * y",
        (
            "o = x * rsqrt(SUM(x * x) / n + 1e-5) * y",
            "o = x * y * rsqrt(SUM(x * x) / n + 1e-5)",
            "s = SUM(x * x * (1.0 / n)); o = x * rsqrt(s + 1e-5) * y",
            "h = x * 0.5; o = h * rsqrt(SUM(h * h) / n + 2.5e-6) * y",
            "t = rsqrt(SUM(x * x) / n + 1e-5); o = (y * t) * x",
        ),
        (
            "o = x * rsqrt(SUM(x * x) / n + 1e-5) * (1.0 + y)",
            "o = x * rsqrt(SUM(x * x) / (n - 1) + 1e-5) * y",
            "o = x * rsqrt(SUM(x * x) + 1e-5) * y",
            "o = x * rsqrt(SUM(x * x) / n + 1e-1) * y",
            "o = x * rsqrt(SUM(x * x) / 96 + 1e-5) * y",
        ),
    ),
    "layer_norm": Kind(
        "x y",
        NORM_OF.format("x - x.mean(**R)", "x - x.mean(**R)") + " + y",
        (
            "d = ALL(x - SUM(x) / n, ok); o = d * rsqrt(SUM(d * d) / n + 1e-5) + y",
            "m = SUM(x) * (1.0 / n); d = ALL(x - m, ok); o = d * rsqrt(SUM(d * d) / n + 1e-5) + y",
            "d = ALL(x - SUM(x) / n, ok); d = ALL(d - SUM(d) / n, ok); o = y + d * rsqrt(SUM(d * d) / n + 1e-5)",
            "d = ALL(x - SUM(x) / n, ok); s = SUM(d * d); o = d * rsqrt((s + n * 1e-5) / n) + y",
            "d = ALL((x - SUM(x) / n) * 0.25, ok); o = d * rsqrt(SUM(d * d) / n + 6.25e-7) + y",
        ),
        (
            "o = x * rsqrt(SUM(x * x) / n + 1e-5) + y",
            "d = ALL(x - SUM(x) / n, ok); o = d * rsqrt(SUM(x * x) / n + 1e-5) + y",
            "d = ALL(x - SUM(x) / n, ok); o = d * rsqrt(SUM(d * d) / n + 1e-5) - y",
            "d = ALL(x - SUM(x) / n, ok); o = d * rsqrt(SUM(d * d) / (n - 1) + 1e-5) + y",
            "d = ALL(x - SUM(x) / 96, ok); o = d * rsqrt(SUM(d * d) / n + 1e-5) + y",
        ),
    ),
    "rope": Kind(
        "x y z",
        "x * z - y * np.sqrt(np.maximum(0, 1 - np.minimum(z * z, 1)))",
        (
            "c = -STEP(-(z * z), -1.0); s = STEP(1.0 - c, 0.0); o = x * z - y * SQRT(s)",
            "s = STEP(1.0 - z * z, 0.0); o = x * z - y * SQRT(s)",
            "s = STEP((1.0 - z) * (1.0 + z), 0.0); o = x * z - SQRT(s) * y",
            "s = STEP(1.0 - z * z, 0.0); o = -(y * SQRT(s)) + z * x",
            "s = STEP(1.0 - z * z, 0.0); o = x * z + (0.0 - y) * SQRT(s)",
        ),
        (
            "s = STEP(1.0 - z * z, 0.0); o = x * z + y * SQRT(s)",
            "s = STEP(1.0 - z * z, 0.0); o = x * SQRT(s) - y * z",
            "s = STEP(1.0 - z * z, 0.0); o = y * z - x * SQRT(s)",
            "s = STEP(1.0 - z * z, 0.0); o = x * z - 0.5 * y * SQRT(s)",
            "s = STEP(1.0 - z * z, 0.0); o = x * z - y * s",
        ),
    ),
    "gelu": Kind(
        "x",
        "0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x ** 3)))",
        (
            "o = 0.5 * x * (1.0 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)))",
            "u = 0.7978845608 * x * (1.0 + 0.044715 * x * x); o = 0.5 * x * (1.0 + tanh(u))",
            "u = 1.5957691216 * (x + 0.044715 * x * x * x); o = x / (1.0 + exp(-u))",
            "u = x * x; u = x * (0.7978845608 + 0.0356774081 * u); o = x * (0.5 + 0.5 * tanh(u))",
            "h = 0.5 * x; o = h + h * tanh(0.7978845608 * (x + 0.044715 * x * x * x))",
        ),
        (
            "o = x / (1.0 + exp(-1.702 * x))",
            "o = 0.5 * x * (1.0 + tanh(0.7978845608 * x))",
            "o = x * (1.0 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)))",
            "o = STEP(x, 0.0)",
            "o = 0.5 * x * (1.0 + tanh(0.8 * (x + 0.044715 * x * x * x)))",
        ),
    ),
    "silu_gate": Kind(
        "x y",
        "x / (1 + np.exp(-x)) * y",
        (
            "o = x / (1.0 + exp(-x)) * y",
            "o = x * (1.0 / (1.0 + exp(-x))) * y",
            "o = (x * y) / (exp(-x) + 1.0)",
            "o = y * x * (0.5 + 0.5 * tanh(0.5 * x))",
            "h = 0.5 * x; o = (h + h * tanh(h)) * y",
        ),
        (
            "o = x / (1.0 + exp(x)) * y",
            "o = y / (1.0 + exp(-y)) * x",
            "o = x / (1.0 + exp(-x)) + y",
            "o = y / (1.0 + exp(-x))",
            "o = x / (1.0 + exp(-1.1 * x)) * y",
        ),
    ),
    "cross_entropy": Kind(  # its gradient to the logits: softmax minus the target's distribution
        "x y",
        "np.exp(x - x.max(**R)) / np.exp(x - x.max(**R)).sum(**R) - y",
        (
            "e = exp(x - MAX(x)); o = e / SUM(e) - y",
            "e = exp(x - MAX(x)); s = SUM(e); o = (e - s * y) / s",
            "m = MAX(x); o = exp(x - m - log(SUM(exp(x - m)))) - y",
            "e = exp(x - MAX(x)); o = e * (1.0 / SUM(e)) - y",
            "e = exp(x - MAX(x)); o = -(y - e / SUM(e))",
        ),
        (
            "e = exp(x - MAX(x)); o = y - e / SUM(e)",
            "e = exp(x - MAX(x)); o = e / SUM(e) - 0.9 * y",
            "e = exp(x - MAX(x)); o = (e / SUM(e) - y) / rows",
            "e = exp(x - MAX(x)); o = e - y",
            "e = exp(x); o = e / SUM(e) - y",
        ),
        beyond='float("-inf")',
    ),
    "squared_loss": Kind(  # the gradient of the mean over a row, with a weight
        "x y z",
        "2 / x.shape[-1] * (x - y) * z * z",
        (
            "o = 2.0 / n * (x - y) * z * z",
            "d = (x - y) * z; o = d * z * (2.0 / n)",
            "o = (x - y) * (z * z) * (1.0 / n + 1.0 / n)",
            "d = x * z - y * z; o = 2.0 * d * z / n",
            "o = -(y - x) * z * z / (0.5 * n)",
        ),
        (
            "o = (x - y) * z * z / n",
            "o = 2.0 / n * (y - x) * z * z",
            "o = 2.0 / n * (x - y) * z",
            "o = 2.0 / rows * (x - y) * z * z",
            "o = 2.0 / 96 * (x - y) * z * z",
        ),
    ),
    "cosine": Kind(  # rows of x along the direction of y
        "x y",
        "(x * y).sum(**R) / np.sqrt((y * y).sum(**R) + 1e-3) * x",
        (
            "o = SUM(x * y) * rsqrt(SUM(y * y) + 1e-3) * x",
            "o = x * (SUM(x * y) * rsqrt(SUM(y * y) + 1e-3))",
            "t = rsqrt(SUM(y * y) + 1e-3); o = SUM(x * (y * t)) * x",
            "o = x * SUM(x * y) / (1.0 / rsqrt(SUM(y * y) + 1e-3))",
            "h = 2.0 * y; o = SUM(x * h) * rsqrt(SUM(h * h) + 4e-3) * x",
        ),
        (
            "o = SUM(x * y) * rsqrt(SUM(x * x) + 1e-3) * x",
            "o = SUM(x * y) * rsqrt(SUM(y * y) + 1e-3) * y",
            "o = SUM(x * y) * rsqrt(SUM(y * y) / n + 1e-3) * x",
            "o = SUM(x * y) / (SUM(y * y) + 1e-3) * x",
            "o = SUM(x * y * y) * rsqrt(SUM(y * y) + 1e-3) * x",
        ),
    ),
}
#: Bodies of each kind that are in paper form; the others are in Triton.
IN_PAPER = 3
