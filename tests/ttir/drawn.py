"""Launches of recorded kernels, drawn: formats, sizes, layouts, masks, integers, ifs; and Triton's interpreter of them.

Run as a program (with TRITON_INTERPRET=1) it computes some cases and writes what they store.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))
from ttir import recorded_kernels as kernels


class Case(NamedTuple):
    """A launch: kernel, grid, arguments by parameter, options, and the tensors that are compared (``result``)."""

    kernel: str
    grid: Any
    arguments: dict[str, Any]
    options: dict[str, int]
    result: str


def view_of(rng: np.random.Generator, shape: tuple[int, ...], fmt: str, *, is_last: bool = True) -> Any:
    """Return normal numbers of a shape in a layout that is drawn: permuted and padded axes, an offset.

    ``is_last``: the last axis stays the innermost one.
    """
    count = len(shape)
    order = [*rng.permutation(count - 1), count - 1] if is_last else list(rng.permutation(count))
    padded = [shape[i] + int(rng.integers(0, 2)) * 8 for i in order]
    padded[0] = shape[order[0]] + 1
    values = rng.standard_normal(padded).astype(fmt)
    cut = values[tuple(slice(int(i == 0), None) for i in range(len(shape)))]
    cut = cut[tuple(slice(0, shape[i]) for i in order)]
    return cut.transpose(np.argsort(order))


def strides(x: Any) -> list[int]:
    return [s // x.itemsize for s in x.strides]


def drawn_rows(rng: np.random.Generator) -> Case:
    b, s, h = (int(rng.integers(1, 4)) for _ in "bsh")
    columns = int(rng.choice([16, 40, 64, 100]))
    fmt, op = str(rng.choice(["float16", "float32"])), str(rng.choice(["softmax", "rms", "leaky", "clamp", "silu"]))
    x, y = (view_of(rng, (b, s, h, columns), fmt) for _ in "xy")
    lengths = rng.integers(1, s + 1, b).astype(np.int32)
    stat, w = np.zeros((b, s, h), np.float32), rng.standard_normal(columns).astype(fmt)
    names = dict(zip(("xb", "xs", "xh", "yb", "ys", "yh"), (*strides(x)[:3], *strides(y)[:3]), strict=True))
    switches = {"OP": op, "IS_LEFT": bool(rng.integers(2)), "STORES": bool(rng.integers(2))}
    words = {"X": x, "Y": y, "S": stat, "W": w, **names, "heads": h, "length": s, "lengths": lengths}
    return Case("rows", (h, s, b), {**words, "columns": columns, "B": 128, **switches}, {}, "Y")


def drawn_product(rng: np.random.Generator) -> Case:
    m, n, k = (int(rng.choice([16, 48, 64, 96, 100])) for _ in "mnk")
    a, b, c = (view_of(rng, shape, "float16", is_last=False) for shape in ((m, k), (k, n), (m, n)))
    c = c if c.strides[1] < c.strides[0] else view_of(rng, (m, n), "float16")
    bias = rng.standard_normal(n).astype(np.float16) if rng.integers(2) else None
    steps = dict(zip(("am", "ak", "bk", "bn", "cm", "cn"), (*strides(a), *strides(b), *strides(c)), strict=True))
    blocks = {"BM": 32, "BN": int(rng.choice([16, 32])), "BK": int(rng.choice([16, 32])), "GROUP": 2}
    act = str(rng.choice(["", "leaky", "clamp"]))
    grid = triton.cdiv(m, blocks["BM"]) * triton.cdiv(n, blocks["BN"])
    words = {"A": a, "B": b, "C": c, "Bias": bias, "M": m, "N": n, "K": k, **steps, **blocks, "ACT": act}
    return Case("product", (grid,), words, {}, "C")


def drawn_varlen(rng: np.random.Generator) -> Case:
    count, groups, kv, d = int(rng.integers(1, 4)), int(rng.choice([1, 2])), int(rng.choice([1, 2])), 32
    page, bn = (int(rng.choice([32, 64])), 32) if rng.integers(2) else (0, int(rng.choice([16, 32])))
    lengths = rng.integers(1, 97, count).astype(np.int32)
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    tokens, heads = int(lengths.sum()), kv * groups
    pages = max(1, -(-int(lengths.max()) // (page or 1)))
    table = rng.permutation(count * pages + 2)[: count * pages].reshape(count, pages).astype(np.int32)
    keys = (count * pages + 2) * page if page else tokens
    q, o = (view_of(rng, (tokens, heads, d), "float16") for _ in "qo")
    k, v = (view_of(rng, (keys, kv, d), "float16") for _ in "kv")
    causal = not page and bool(rng.integers(2))
    switches = {"CAUSAL": causal, "WINDOW": int(rng.choice([0, 24])) if causal else 0, "PAGE": page}
    low = -1e6 if switches["WINDOW"] else float(rng.choice([-1e6, -np.inf]))  # a tile that -inf hides whole is NaN
    switches |= {"LOW": low, "SCALED": bool(rng.integers(2))}
    steps = [s for x in (q, k, v, o) for s in strides(x)[:2]]
    names = zip(("qs", "qh", "ks", "kh", "vs", "vh", "os", "oh"), steps, strict=True)
    words = {"Q": q, "K": k, "V": v, "O": o, "L": np.zeros((heads, tokens), np.float32), "starts": starts}
    words |= {"lengths": lengths, "table": table, **dict(names), "scale": d**-0.5, "groups": groups, "pages": pages}
    words |= {"length": tokens, "D": d, "BM": 32, "BN": bn, **switches, "STORES": bool(rng.integers(2))}
    return Case("varlen", (triton.cdiv(int(lengths.max()), 32), heads, count), words, {}, "O")


def drawn_turned(rng: np.random.Generator) -> Case:
    tokens, heads, half = int(rng.integers(1, 9)), int(rng.integers(1, 6)), int(rng.choice([16, 32]))
    batch, per = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    q = view_of(rng, (batch * tokens, heads, 2 * half), str(rng.choice(["float16", "float32"])))
    cos, sin = (rng.standard_normal((tokens, half)).astype(np.float32) for _ in "cs")
    words = {"Q": q, "Cos": cos, "Sin": sin, "qs": strides(q)[0], "qh": strides(q)[1], "heads": heads}
    grid = batch * tokens, triton.cdiv(heads, per)
    return Case("turned", grid, {**words, "length": tokens, "D": half, "PER": per}, {}, "Q")


def drawn_divergence(rng: np.random.Generator) -> Case:
    count, columns = int(rng.integers(1, 9)), int(rng.choice([40, 64, 100]))
    x, y = (rng.standard_normal((count, columns)).astype(np.float32) for _ in "xy")
    words = {"X": x, "Y": y, "L": np.zeros_like(x), "G": np.zeros_like(x), "stride": columns, "N": columns}
    return Case("divergence", (count,), {**words, "B": 128}, {}, "L G")


def drawn_looked_up(rng: np.random.Generator) -> Case:
    rows, count, columns = int(rng.integers(1, 20)), int(rng.integers(1, 30)), int(rng.choice([16, 40, 64]))
    x, y = view_of(rng, (rows, columns), "float32"), view_of(rng, (count, columns), "float32")
    table, scales = rng.integers(0, rows, count).astype(np.int32), rng.standard_normal(rows).astype(np.float32)
    words = {"X": x, "S": scales, "T": table, "Y": y, "xs": strides(x)[0], "ys": strides(y)[0], "columns": columns}
    return Case("looked_up", (count,), {**words, "B": 64}, {}, "Y")


def drawn_scaled(rng: np.random.Generator) -> Case:
    m, n, k = (int(rng.choice(some)) for some in ([32, 48, 64], [32, 64, 128], [32, 64, 80]))
    bn, bk = int(rng.choice([16, 32])), int(rng.choice([16, 32]))
    group, steps = bn * int(rng.choice([1, 2])), triton.cdiv(k, bk)
    a, b, c = (view_of(rng, shape, "float16") for shape in ((m, k), (n, k), (m, n)))
    sa, sb = (rng.standard_normal((r, steps)).astype(np.float32) for r in (m, triton.cdiv(n, group)))
    words = {"A": a, "B": b, "SA": sa, "SB": sb, "C": c, "M": m, "N": n, "K": k, "steps": steps, "GROUP": group}
    names = {"am": strides(a)[0], "bn": strides(b)[0], "cm": strides(c)[0], "BM": 16, "BN": bn, "BK": bk}
    return Case("scaled_product", (triton.cdiv(m, 16), n // bn), {**words, **names}, {}, "C")


def drawn_chunk(rng: np.random.Generator) -> Case:
    batch, heads, chunks = (int(rng.integers(1, 3)) for _ in "bhc")
    d, w, bt = int(rng.choice([16, 32, 48])), int(rng.choice([32, 64])), int(rng.choice([16, 32]))
    bk, bv, t = int(rng.choice([32, 64])), int(rng.choice([16, 32])), bt * chunks
    q, k = (rng.standard_normal((batch, t, heads, d)).astype(np.float16) for _ in "qk")
    v, o = (rng.standard_normal((batch, t, heads, w)).astype(np.float16) for _ in "vo")
    s = rng.standard_normal((batch, chunks, heads, d, w)).astype(np.float16)
    words = {"Q": q, "K": k, "V": v, "S": s, "O": o, "scale": d**-0.5, "T": t, "heads": heads, "D": d, "W": w}
    blocks = {"BT": bt, "BK": bk if d <= bk else 64, "BV": bv}
    return Case("chunk_outputs", (w // bv, chunks, batch * heads), {**words, **blocks}, {}, "O")


DRAWN = (drawn_rows, drawn_product, drawn_varlen, drawn_turned, drawn_divergence, drawn_looked_up)
DRAWN += (drawn_scaled, drawn_chunk)


def drawn(number: int) -> Case:
    """Return one of the drawn launches."""
    return DRAWN[number % len(DRAWN)](np.random.default_rng(number))


def launched(case: Case, wrapped: Any, *, is_tuned: bool = True) -> None:
    """Launch a case; ``wrapped`` makes an argument of an array; not ``is_tuned``: in a tuner's first configuration."""
    given = {n: wrapped(x) if isinstance(x, np.ndarray) else x for n, x in case.arguments.items()}
    kernel = getattr(kernels, case.kernel)
    if not is_tuned and hasattr(kernel, "configs"):
        kernel, given = kernel.fn, given | kernel.configs[0].kwargs
    kernel[case.grid](**given, **case.options)


class Memory:
    """An array as Triton's interpreter asks for a tensor."""

    def __init__(self, array: Any) -> None:
        self.array, self.dtype = array, str(array.dtype)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> Memory:
        return self

    cpu = untyped_storage

    def new_empty(self, *_sizes: int, **_options: Any) -> Memory:
        return Memory(self.array)

    def set_(self, storage: Memory, *_view: Any) -> None:
        self.array = storage.array

    def copy_(self, _other: Memory) -> None: ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    stride = size


def _mend_numpy() -> None:
    """Let the interpreter of Triton 3.6 take arrays of one element as numbers, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> Any:
        made = before(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])
        return made

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    _mend_numpy()
    from ttir.tutorials import TUTORIALS

    results = {}
    for word in sys.argv[2:]:
        case = TUTORIALS[word]() if word in TUTORIALS else drawn(int(word))
        launched(case, Memory, is_tuned=False)
        for name in case.result.split():
            results[f"{word}/{name}"] = case.arguments[name].astype(np.float32)
    np.savez(sys.argv[1], **results)
