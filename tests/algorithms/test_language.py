"""Mistakes in kernels: each error says file, line, kernel, name, and what to write instead."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pytest

import npusim
from npusim import kernel as words
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import NpusimError, ProgramError, SpecError, TilingError
from npusim.kernel import FlashPrecision, GlobalTensor, TilingMask, attention, kernel
from npusim.kernels.form.phase import Instruction
from npusim.library import find_schedule
from npusim.program.ir.op import SOURCES, Opcode

if TYPE_CHECKING:
    from pathlib import Path

AXES = {"q": "row head", "k": "key head", "v": "key value", "mask": "row key"}
SOURCE = """\
def attend(q, k, v, mask, p):
    o = full("row value", 0.0, F)
    for kj, vj in tiles(k, v):
        s = (q @ kj.T).to(F)
        w = s.to("float16")
        pv = (w @ vj).to(F)
        o = o + pv
    return o
"""
LAST, LOOP = "        o = o + pv\n", "    for kj"
P = FlashPrecision("p", *["float32"] * 3, "float16", *["float32"] * 3)


def function(source: str, path: Path, results: str = "out") -> Any:
    path.write_text(source, encoding="utf-8")
    found = {**vars(words), "F": "float32", "inf": math.inf, "math": math}
    exec(compile(source, str(path), "exec"), found)
    return kernel(results=results, **AXES)(found["attend"])


def traced(source: str, path: Path, results: str = "out") -> Any:
    bound = {n: GlobalTensor(n, 1, 1, 64, 64, "float16", "input") for n in "qkv"}
    outs = [GlobalTensor(n, 1, 1, 64, 64, "float32", "output") for n in results.split()]
    made = function(source, path, results)
    return made.phase("attention", (), {"row": 64}, outs, mask=TilingMask(), p=P, **bound)


def changed(*changes: tuple[str, str]) -> str:
    source = SOURCE
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return source


TRACED = "a kernel is traced before its values exist; use maximum(a, b) for the larger one, or where(mask, a, b)"
OF_TILE = "differs between tiles, and the loop is traced once; per_tile(function, kj.index) gives each"
STATE = ("    for kj", '    l = full("row", 0.0, F)\n    for kj')
MISTAKES: dict[str, tuple[list[tuple[str, str]], int, str]] = {
    "formats that differ": (
        [("o + pv", "o + w @ vj * 1")], 7,
        "w @ vj is a product that is not stored yet: write (w @ vj).",
    ),
    "a sum of products of two formats": (
        [("o + pv", 'o.sum(times=pv.to("bfloat16"))')], 7,
        ".sum(times=pv.to('bfloat16') (row x value, bfloat16)): bfloat16 differs from float32; convert one of them",
    ),
    "a sum of two formats": (
        [("o + pv", 'o + pv.to("bfloat16")')], 7,
        "ADD of o (row x value, float32) and pv.to('bfloat16') (row x value, bfloat16): their formats differ",
    ),
    "no format": ([('s.to("float16")', 's.to("fp16")')], 5, "unknown number format 'fp16'; near names: float16"),
    "blocks across a product": (
        [('s.to("float16")', 's.to("mxfp8", axis="row")')], 6,
        "blocks of w (row x key, mxfp8) run along row, but the product sums along key",
    ),
    "blocks along a third axis": (
        [('s.to("float16")', 's.to("mxfp8", axis="head")')], 5, "axis must be one of the two axes of a tile"
    ),
    "a rule of another format": (
        [('s.to("float16")', 's.to("mxfp8", rule="te")')], 5, "mxfp8 has float8_e8m0fnu scales of float8_e4m3fn: floor"
    ),
    "a rule without blocks": ([('s.to("float16")', 's.to("float16", rule="floor")')], 5, "this format has no blocks"),
    "rows of blocks": (
        [('s.to("float16")', '(s.to("mxfp8") * 2).to("float16")')], 5, "a block-scaled format can only be a factor"
    ),
    "a state of no format": ([("0.0, F", '0.0, "single"')], 2, "unknown number format 'single'"),
    "if on a value": (
        [(LAST, "        if s.max() > 0: o = o + pv\n")], 7,
        f"s.max() (row, float32) is used in an `if` or in a comparison: {TRACED}",
    ),
    "if on an equality": (
        [(LAST, "        if s.max() == 0: o = o + pv\n")], 7,
        f"s.max() (row, float32) is used in an `if` or in a comparison: {TRACED}",
    ),
    "the builtin max": ([("o + pv", "max(o, pv)")], 7, ("pv (row x value, float32) is used in an `if` "
"or in a comparison")),
    "if on index": (
        [(LAST, "        if kj.index > 0: o = o + pv\n")], 7,
        f"a tile's index is used in a condition or as a plain number: it {OF_TILE}",
    ),
    "if on equal index": (
        [(LAST, "        if kj.index == 0: o = o + pv\n")], 7,
        f"a tile's index is used in a condition or as a plain number: it {OF_TILE}",
    ),
    "per_tile of a value": (
        [("s.to(", "(s * per_tile(abs, s.max())).to(")], 5,
        "per_tile of s.max() (row, float32): its arguments are a function and numbers",
    ),
    "index outside": ([("return o", "return o * kj.index")], 8, "index is used outside of a loop over tiles"),
    "a value of a tile": (
        [("return o", "return o * s.max()")], 8,
        "s (row x key, float32), computed in line 4, is read after its loop, where it has no value;",
    ),
    "a tile behind its loop": (
        [("return o", "return o + vj.to(F)")], 8,
        "vj (key x value, float16) is read after its loop, where it has no value; start a state",
    ),
    "a state never written": (
        [STATE], 1,
        "the state l (row, float32) is never written: assign to its variable in a loop",
    ),
    "a state never read": (
        [STATE, (LAST, LAST + "        l = l + s.sum()\n")], 1,
        "the state l (row, float32) is read only for its own next",
    ),
    "a state made in a loop": (
        [(LAST, f'        l = full("row", 0.0, F)\n{LAST}')], 7,
        "full('row', ...) in a loop over tiles: a state starts before the loop",
    ),
    "two names for a state": (
        [(LOOP, "    a = o\n    for kj")], 4,
        "o and a share one state: start each with its own full(...)",
    ),
    "arguments of full": (
        [('"row value", 0.0', '0.0, "row value"')], 2,
        "full(0.0, 'row value', 'float32'): its arguments are axes as text",
    ),
    "a value never read": (
        [(LAST, LAST + "        m = s.max()\n")], 8,
        "m (row, float32) is never read: remove it or return it",
    ),
    "nothing returned": (
        [("    return o\n", "")], 1,
        "it returns nothing, but must return out: a tile or vector for each name in kernel(results=...)",
    ),
    "a number returned": ([("return o", "return 1.0")], 1, "it returns 1.0, but must return out"),
    "too many results": (
        [("return o", "return o, s")], 1,
        "it returns o (row x value, float32), s (row x key, float32), but must return out",
    ),
    "another format returned": (
        [("return o", 'return o.to("float16")')], 8,
        "o.to('float16') (row x value, float16) is returned as out, whose tensor out has the format "
        "float32; write .to('float32')",
    ),
    "a walked operand": (
        [("kj.T", "k.T")], 4,
        "k (key x head, float16) tile by tile: use the loop's variable",
    ),
    "a loop in a loop": (
        [(LAST, LAST + "        for kk in tiles(k): pass\n")], 8,
        "a loop over tiles cannot contain another one",
    ),
    "no shared axis": (
        [("tiles(k, v)", "tiles(q, v)")], 3,
        "tiles of q (row x head, float16) and v (key x value, float16): they share no axis",
    ),
    "tiles of a state": ([("tiles(k, v)", "tiles(k, o)")], 3, "the arguments must be operands of the kernel"),
    "two products": (
        [("w @ vj", "q @ kj.T @ vj")], 6,
        "q @ kj.T is a product that is not stored yet: write (q @ kj.T).to(format), or add it to a "
        "state: o + q @ kj.T",
    ),
    "a product of a product": ([("w @ vj", "w @ (q @ kj.T)")], 6, "q @ kj.T is a product that is not stored yet"),
    "a method of a product": (
        [("(q @ kj.T).to(F)", "(q @ kj.T).max()")], 4,
        "q @ kj.T is a product that is not stored yet",
    ),
    "exp of a product": ([("(q @ kj.T).to(F)", "exp(q @ kj.T)")], 4, "q @ kj.T is a product that is not stored yet"),
    "exp of a number": (
        [("o + pv", "o + pv * exp(1.0)")], 7,
        "exp of 1.0: this is neither a tile nor a vector of rows; for numbers use math.exp",
    ),
    "maximum of numbers": (
        [("o + pv", "o + pv * maximum(1.0, 2.0)")], 7,
        "MAX of 1.0 and 2.0: one of them must be a tile or a vector of rows",
    ),
    "a vector times a tile": (
        [("w @ vj", "w.max() @ vj")], 6,
        "w.max() (row, float16) @ vj (key x value, float16): a product needs two tiles; vectors of "
        "rows and numbers are multiplied by *",
    ),
    "keys as they lie": (
        [("q @ kj.T", "q @ kj")], 4,
        ("q (row x head, float16) @ kj (key x head, float16): the axis head of the left "
"factor does not match key; write q @ kj.T"),
    ),
    "a transposed addend": (
        [("o + pv", "o + pv.T")], 7,
        ".T is supported only for a factor of a product, a @ b.T or a.T @ b",
    ),
    "a product with itself": (
        [("w @ vj", "q @ q.T")], 6,
        ("q (row x head, float16) @ q.T (head x row, float16): both axes of the product "
"are named row; bind the operand twice,"),
    ),
    "a product nobody stores": (
        [(LAST, LAST + "        z = q @ kj.T\n")], 8,
        "q @ kj.T is a product that the kernel does not store: write (q @ kj.T).to(format), add it to a "
        "state, or remove it",
    ),
    "break": (
        [(LAST, LAST + "        break\n")], 8,
        "a loop over tiles has a break or a return, but its body describes every tile",
    ),
    "return in a loop": ([(LAST, LAST + "        return o\n")], 8, "a loop over tiles has a break or a return"),
    "another format": (
        [("o + pv", '(o + pv).to("float16")')], 7,
        "o is (row x value, float32) at the start of a tile and (row x value, float16) at its "
        "end: the axes and format of a state cannot change; convert it with .to('float32')",
    ),
    "another shape": (
        [("o + pv", "pv.sum()")], 7,
        "o is (row x value, float32) at the start of a tile and (row, float32) at its end",
    ),
    "a right factor that rows make of all tiles": (
        [(LOOP, "    z = (q @ maximum(k, 0.0).T).to(F)\n" + LOOP), ("(q @ kj.T).to(F)", "(q @ kj.T).to(F) + z")], 3,
        "is the right factor of a product: the right factor must be an operand, or computed from operands",
    ),
    "a product of what a loop leaves": (
        [(LAST, LAST + '    w = (o.to("float16") @ v.T).to("float16")\n    o = (w @ v).to(F)\n')], 8,
        "o.to('float16') is a factor of a product after a loop: multiply in the loop, tile by tile, or return the",
    ),
    "a left factor made of an operand in a loop": (
        [("(q @ kj.T)", "(maximum(q, 0.0) @ kj.T)")], 4,
        "is the left factor of a product in a loop and computed from operands only: compute it in an earlier kernel",
    ),
    "a number that a loop changes": (
        [(LOOP, "    first = True\n    for kj"), (LAST, LAST + "        first = False\n")], 4,
        "first is True at the start of a tile and False at its end, but the body is traced once;",
    ),
    "a mask on a vector": (
        [(LAST, "        o = o + pv * where(mask, s.max(), 0.0)\n")], 7, "this mask is for tiles with axes row x key",
    ),
    "a masked tile": (
        [
            ("(q @ kj.T).to(F)", "(q @ kj.T).to(F) * 2"), ('s.to("float16")', 'where(mask, s, -inf).to("float16")'),
            ("o + pv", "o + pv * s.max()"),
        ], 7,
        "s (row x key, float32) is read after line 5 has masked it in place: read the result of where(...)",
    ),
    "a comparison as a mask": (
        [("s.to(", "where(s > 0, s, 0.0).to(")], 5,
        "s (row x key, float32) is used in an `if` or in a comparison",
    ),
    "a value as a mask": (
        [("s.to(", "where(s.max(), s, 0.0).to(")], 5,
        "where(s.max() (row, float32), ...): the mask must be",
    ),
    "a relation of no name": (
        [("s.to(", "where(compare(s, 0.0, '>'), s, 0.0).to(")], 5,
        "compare(s (row x key, float32), 0.0, '>'): unknown relation; allowed: oeq, ogt, oge, olt, ole, one, ueq,",
    ),
    "two numbers by a mask": (
        [("s.to(", "where(compare(s, 0.0, 'ogt'), 1.0, 0.0).to(")], 5,
        "both must have one format; for two numbers set it with fmt=...",
    ),
    "a mask by position in an expression": (
        [("s.to(", "where(mask & compare(s, 0.0, 'ogt'), s, 0.0).to(")], 5,
        "and of mask, a mask by position: only masks of compare(a, b, relation)",
    ),
    "the opposite of a value": ([("s.to(", "where(~s, s, 0.0).to(")], 5, "xor of s (row x key, float32): only masks"),
    "a rule of NaN": ([("s.to(", "maximum(s, 0.0, nan='any').to(")], 5, "nan='any'; allowed: number, propagate"),
    "where of two tiles": ([("s.to(", "where(mask, s, s).to(")], 5, ("one of the two must be a tile and "
"the other a number")),
    "a plain number": (
        [("o + pv", "o + math.exp(pv)")], 7,
        "pv (row x value, float32) is used as a plain number: a kernel is traced before its values exist",
    ),
    "a power": (
        [("o + pv", "o + pv ** 2")], 7,
        "the operations of kernels are + - * /, divided, exp, log, rsqrt, sqrt, tanh, erf, fma, maximum, minimum, "
        "compare, where, inverse, folded, scanned, .to(format), .max(), .sum(), .cumsum() and @; of masks & | ^ ~",
    ),
    "other axes": (
        [("o + pv", "o + s")], 7,
        "ADD of o (row x value, float32) and s (row x key, float32): their axes differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_told_with_file_line_and_name(mistake: str, tmp_path: Path) -> None:
    changes, line, message = MISTAKES[mistake]
    path = tmp_path / "mine.py"
    with pytest.raises(ProgramError, match=re.escape(f"{path}:{line}: attend: ") + ".*" + re.escape(message)):
        traced(changed(*changes), path)


def test_without_a_mistake_there_is_no_error(tmp_path: Path) -> None:
    assert [s.name for s in traced(SOURCE, tmp_path / "mine.py").stages] == ["S", "rows of W", "pv", "update", "finish"]
    traced(changed(("o = o + pv", "o += pv")), tmp_path / "mine.py")


def test_an_operand_to_which_nothing_is_bound_is_named_with_where_it_is_bound(tmp_path: Path) -> None:
    (tmp_path / "biased.py").write_text(
        "from npusim.kernel import attention, FlashPrecision, exp, full, kernel, maximum, tiles\n"
        '@kernel(q="row head", k="key head", v="key value", bias="row key", mask="row key")\n'
        "def biased(q, k, v, bias, mask, scale):\n"
        "    o = full('row value', 0.0, 'float32')\n"
        "    for kj, vj in tiles(k, v):\n"
        "        s = (q @ kj.T).to('float32') * scale - BIAS\n"
        "        o = o + (s.to('float16') @ vj).to('float32')\n"
        "    return o.to('float16')\n"
        "F32 = FlashPrecision('f', scores='float32', softmax='float32', exponential='float32', operand='input',\n"
        "    running='float32', product='float32', output='input')\n"
        "BIASED = attention('biased', biased, precisions=[F32])\n"
    )
    text = (tmp_path / "biased.py").read_text()
    for use in ("bias", "bias.to('float32')"):
        (tmp_path / "biased.py").write_text(text.replace("BIAS\n", f"{use}\n"))
        with pytest.raises(NpusimError, match=r"biased\.py:6: .*None.* bound to it: .*operands=\{'bias': function\}"):
            npusim.run(f"{tmp_path}/biased.py:BIASED", hw="h200", seq=64, numerics=False)


def test_results_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"1: attend: it returns o \(.*\), but must return out, lse: a tile"):
        traced(SOURCE, tmp_path / "mine.py", "out lse")


def test_what_a_function_that_a_kernel_calls_never_reads_is_told_with_its_own_file(tmp_path: Path) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text("\n\ndef step(o, pv):\n    lost = pv * 2.0\n    return o + pv\n", encoding="utf-8")
    found: dict[str, Any] = {}
    exec(compile(helper.read_text(), str(helper), "exec"), found)
    made = function(changed(("o + pv", "step(o, pv)")), tmp_path / "mine.py")
    made.function.__globals__["step"] = found["step"]
    bound = {n: GlobalTensor(n, 1, 1, 64, 64, "float16", "input") for n in "qkv"}
    with pytest.raises(ProgramError, match=re.escape(f"{helper}:4: attend: lost (row x value, float32) is never read")):
        made.phase("a", (), {}, [GlobalTensor("o", 1, 1, 64, 64, "float32", "output")], mask=None, p=P, **bound)


def test_a_state_on_both_sides_of_a_product_is_refused_with_both_lines(tmp_path: Path) -> None:
    source = changed((LOOP, '    m = full("row", -inf, F)\n    for kj'), ("s.to(", "(s - m).to("), (
        LAST, "        m_new = maximum(m, s.max())\n        o = o + pv * m\n        m = m_new\n"))  # fmt: skip
    program(source, tmp_path / "mine.py", depth=0)
    with pytest.raises(TilingError, match=r"m is used by SUB \w+ \(line 6\) and by COPY m \(line 10\), but the stages"):
        program(source, tmp_path / "mine.py", depth=1)


def program(source: str, path: Path, **fields: Any) -> Any:
    (schedule,) = attention("mine", function(source, path), precisions=[P], families=["ascend"])
    problem, tiling = Problem(heads=1, seq_q=32, seq_kv=64, head_dim=16), {"block_q": 32, "block_kv": 16, **fields}
    return schedule.program(problem, build_tiling(schedule.tiling, tiling), load_device("ascend_910b2"), P)


def test_a_name_of_npusims_own_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from npusim.kernel import FlashPrecision, attention, flash, kernel\n\n\n"
        "@kernel(q='row head', k='key head', v='key value', mask='row key')\ndef mine(q, k, v, mask, p): ...\n\n\n"
        "P = FlashPrecision('p', *['float32'] * 7)\nMINE = attention('flash', mine, precisions=[P])\n",
        encoding="utf-8",
    )  # fmt: skip
    with pytest.raises(SpecError, match=re.escape(f"{path}:4: schedule 'flash' is a packaged one; rename your")):
        find_schedule(f"{path}:MINE", "ascend")


def test_a_row_has_as_many_sources_as_its_operation_takes() -> None:
    with pytest.raises(ProgramError, match=r"x = SELECT\(mask, s\): the operation needs 3 sources, not 2"):
        Instruction(Opcode.SELECT, "x", ("mask", "s"))
    with pytest.raises(ProgramError, match="operation needs 1 or 2 sources, not 3"):
        Instruction(Opcode.ROW_SUM, "l", ("e", "l", "l"))
    assert set(SOURCES) == set(Opcode)
