"""Loops that only seem to be a pipeline or iterations with slots, against their text run as Python in float64."""

from __future__ import annotations

from textwrap import dedent, indent
from typing import TYPE_CHECKING, Any

import pytest

from npusim.errors import NpusimError
from npusim.kernels.tilelang.ascend_text import kernel_of
from npusim.kernels.tilelang.program import Language, load_program
from npusim.kernels.tilelang.statements import Literal, SerialLoop, TileBuffer
from tests.tile_language.eager import executed
from tests.tile_language.flag_programs import written
from tests.tile_language.test_developer import computed, distance, drawn

if TYPE_CHECKING:
    from pathlib import Path

KERNEL = """
import tilelang
from tilelang import language as T


@tilelang.jit(out_idx=[2])
def kernel():
    @T.prim_func
    def main(A: T.Tensor((128, 16), "float16"), B: T.Tensor((16, 16), "float16"), C: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=2, is_npu=True) as (cid):
            a = T.alloc_L1((16, 16), "float16")
            b = T.alloc_L1((16, 16), "float16")
            c = T.alloc_L0C((16, 16), "float")
            s = T.alloc_ub((3, 16, 16), "float32")
            r = T.alloc_ub((2, 16, 1), "float32")
            w = T.alloc_ub((16, 16), "float32")
            acc = T.alloc_ub((16, 16), "float32")
            T.copy(B[0, 0], b)
            T.tile.fill(acc, 0.0)
{body}
            T.copy(acc, C[0, 0])

    return main
"""
FIRST = """
    T.copy(A[(key + {n}) * 16, 0], a)
    T.gemm_v0(a, b, c, init=True)
    T.copy(c, s[(key + {n}) % 3, :, :])
"""
SECOND = """
    T.copy(s[(key + {n}) % 3, :, :], w)
    T.tile.mul(acc, acc, 0.5)
    T.tile.add(acc, acc, w)
"""
BASE = "\n".join(
    (
        "for key in T.serial(2):" + FIRST.format(n=0),
        "# between",
        "for key in T.serial(4):" + FIRST.format(n=2) + SECOND.format(n=0),
        "for key in T.serial(2):" + SECOND.format(n=4),
    )
)
#: An accumulating sum in one of two slots, of which an iteration has written only the other one before.
ADDED = """T.tile.fill(r[0, :, :], 1.0)
    T.tile.row_expand_mul(w, w, r[0, :, :])
    T.reduce_sum(w, r[1, :, :], dim=-1, clear=False)
    T.tile.row_expand_mul(acc, acc, r[1, :, :])
    T.tile.mul(acc, acc, 0.03)"""
REMAINDER = """for i, j in T.Parallel(16, 16):
        w[i, j] = w[i, j] * T.cast((i + j * 3 - 7) % 5, "float32")
    T.tile.mul(acc, acc, 0.5)"""
HALVED = "T.tile.mul(acc, acc, 0.5)"


def both(folder: Path, body: str) -> tuple[Any, Any, list[Any]]:
    """Return what a body stores as npusim reads it, and as its text runs; the numbers of iterations of its loops."""
    path = written(folder, KERNEL.format(body=indent(dedent(body), " " * 12)), "kernel.py")
    language = Language()
    kernel = load_program(path, "kernel", {}, language)
    read = kernel_of(kernel, language)
    tensors = [p for p in read.parameters if isinstance(p, TileBuffer) and p.name != "C"]
    given = {p.name: drawn(*p.shape, seed=i, fmt=p.fmt) for i, p in enumerate(tensors)}
    loops = [s.high for s in read.body if isinstance(s, SerialLoop)]
    return computed(read, **given)["C"], executed(kernel, language, given)["C"], loops


@pytest.mark.parametrize(
    "body",
    [
        BASE,
        BASE.replace("# between", "T.tile.fill(acc, 1.0)"),
        "T.tile.fill(r[1, :, :], 0.0)\n" + BASE.replace(HALVED, ADDED),
        BASE.replace(HALVED, REMAINDER),
        BASE.replace(HALVED, "T.reduce_sum(w, r[0, :, :], dim=-1)\n    T.tile.row_expand_mul(acc, acc, r[0, :, :])"),
    ],
)
def test_a_pipeline_has_the_values_of_its_text(body: str, tmp_path: Path) -> None:
    made, wanted, loops = both(tmp_path, body)
    assert distance(made, wanted) < 1e-5
    assert loops == [Literal(6)]


#: Copies one iteration ahead, with a copy before the loop.
AHEAD = """
T.copy(A[0, 0], s[0, :, :])
for k in T.serial(4):
    if k < 3:
        T.copy(A[(k + 1) * 16, 0], s[(k + 1) % 3, :, :])
    T.tile.add(acc, acc, s[k % 3, :, :])
    T.tile.mul(acc, acc, 0.5)
"""
#: Slots of an iteration and of a loop in it.
NESTED = """
for k in T.serial(4):
    T.copy(A[k * 16, 0], s[k % 2, :, :])
    for j in T.serial(1):
        T.copy(A[96, 0], s[j + 2, :, :])
        T.tile.add(acc, acc, s[j + 2, :, :])
    T.tile.add(acc, acc, s[k % 2, :, :])
"""
#: The first rows of a tile are written, and then all of them are read.
HALF = """
T.tile.fill(w, 3.0)
for k in T.serial(4):
    T.copy(A[k * 16, 0], s[0, :, :])
    T.copy(s[0, 0:8, :], w[0:8, :])
    T.tile.add(acc, acc, w)
"""

PART = r"w \(8 of the 16 elements of axis 0\), and line \d+ reads more of it"


#: A sum of products whose first one, before the loop, clears; in a loop.
SUMS = """
for j in T.serial(2):
    T.copy(A[j * 48, 0], a)
    T.gemm_v0(a, b, c, init=True)
    for k in T.serial(2):
        T.copy(A[(k + 1 + j * 3) * 16, 0], a)
        T.gemm_v0(a, b, c, init=False)
    T.copy(c, w)
    T.tile.add(acc, acc, w)
"""


@pytest.mark.parametrize("body", [AHEAD, SUMS])
def test_copies_ahead_and_sums_have_the_values_of_their_text(body: str, tmp_path: Path) -> None:
    made, wanted, _ = both(tmp_path, body)
    assert distance(made, wanted) < 1e-5


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (BASE.replace("serial(2)", "serial(1)", 1), "only a part of the tile s "),
        (BASE.replace("serial(2)", "serial(3)", 1), "only a part of the tile s "),
        (BASE.replace("serial(4)", "serial(0)"), "only a part of the tile s "),
        (BASE.replace("% 3", "% 2"), "only a part of the tile s "),
        (BASE.replace("key + 4", "key + 5"), "only a part of the tile s "),
        (BASE.replace("# between", "T.tile.mul(s[0, :, :], s[0, :, :], 2.0)"), "only a part of the tile s "),
        (BASE.replace("# between", "T.copy(A[16, 0], b)"), "only a part of the tile s "),
        (BASE.replace("0.5", "0.25", 1), "only a part of the tile s "),
        (AHEAD.replace("for k", "T.copy(A[96, 0], s[0, :, :])\nfor k", 1), "only a part of the tile s "),
        (AHEAD.replace("for k", "T.tile.add(acc, acc, s[0, :, :])\nfor k", 1), "only a part of the tile s "),
        (NESTED, "only a part of the tile s "),
        (HALF, PART),
        (HALF.replace("T.copy(s[0, 0:8, :], w[0:8, :])", "T.tile.mul(w[0:8, :], w[0:8, :], 0.5)"), PART),
    ],
)
def test_what_only_seems_so_is_refused_with_its_line(body: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(NpusimError, match=rf"kernel\.py:\d+: .*{why}"):
        both(tmp_path, body)
