"""Integers of a kernel have their type's width and sign, and indices that it loads are held against their tensors."""

from __future__ import annotations

import importlib.util
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError
from ttir.integer_kernels import BLOCK, COLUMNS, ROWS, drawn, drawn_block, walked, walked_blocks
from ttir.stored import stored

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
#: Drawn kernels of the suite; 150 were held against the walk once.
DRAWN = 24


def _module(path: Path, text: str, name: str) -> Any:
    file = path / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _recorded(path: Path, text: str, grid: int, arrays: Any, **words: Any) -> Any:
    """Return the recorded launch of a kernel ``k`` that a text has."""
    module = _module(path, text, f"{path.name}_kernel")
    with npusim.record(floats=True) as calls:
        module.k[(grid,)](**arrays, **words)
    (call,) = calls
    return call


def _ran(call: Any) -> Any:
    return npusim.run(call, hw="xeon_avx512", rows="all")


#: Arguments of every drawn kernel.
SIZES = {"xs": COLUMNS, "ys": COLUMNS, "C": COLUMNS, "B": BLOCK}


@pytest.mark.parametrize("number", range(DRAWN))
def test_drawn_kernels_read_the_rows_that_a_walk_of_their_text_reads(number: int, tmp_path: Path) -> None:
    kernel = drawn(number)
    arrays, tall = kernel.arrays, kernel.numbers["tall"]
    call = _recorded(tmp_path, kernel.text, kernel.programs, arrays, n=kernel.numbers["n"], **SIZES)
    rows = walked(kernel)
    outside = [p for p, row in enumerate(rows) if row is not None and not 0 <= row < ROWS // tall]
    if outside or all(row is None for row in rows):
        why = rf"program \({outside[0]}, 0, 0\) reads" if outside else "every program returns early"
        with pytest.raises(ProgramError, match=why):
            _ran(call)
        return
    wanted = np.full_like(arrays["Y"], np.nan)
    for p, row in enumerate(rows):
        if row is not None:
            wanted[p * tall : (p + 1) * tall] = arrays["X"][row * tall : (row + 1) * tall]
    result = _ran(call)
    assert np.array_equal(stored(result, arrays)["Y"], wanted, equal_nan=True), kernel.text


def test_drawn_blocks_of_integers_are_read_as_a_walk_of_their_text_or_refused(tmp_path: Path) -> None:
    read = 0
    for number in range(DRAWN):
        kernel = drawn_block(number)
        wanted, folder = walked_blocks(kernel), tmp_path / f"block_{number}"
        folder.mkdir()
        call = _recorded(folder, kernel.text, kernel.programs, kernel.arrays, n=7, **SIZES)
        try:
            values = stored(_ran(call), kernel.arrays)["Y"]
        except ProgramError as error:
            assert "not read (" not in str(error), kernel.text
            continue
        assert wanted is not None and np.array_equal(values, wanted), kernel.text
        read += 1
    assert read > DRAWN // 6


HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef k({}, B: tl.constexpr):\n"
GATHER = """    p, c = tl.program_id(0), tl.arange(0, B)
{}
    x = tl.load(X + i * xs + c, mask=c < C, other=0.0)
    tl.store(Y + p * ys + c, x, mask=c < C)
"""


def _gathered(path: Path, index: str, programs: int, table: Any = None) -> tuple[Any, Any]:
    """Return the rows that programs read by an index, by their first elements, and the result."""
    arrays = {"X": np.arange(8 * COLUMNS, dtype=np.float32).reshape(8, COLUMNS)}
    arrays["Y"] = np.zeros((programs, COLUMNS), np.float32)
    arrays |= {} if table is None else {"T": np.asarray(table, np.int32)}
    names = [*arrays, "xs", "ys", "C"]
    text = HEAD.format(", ".join(names)) + GATHER.format(index)
    result = _ran(_recorded(path, text, programs, arrays, **SIZES))
    return stored(result, arrays)["Y"][:, 0] / COLUMNS, result


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        ("    i = tl.maximum((p * 1103515245) // 1000 % 8, 0)", [0, 3, 0, 0, 5, 0, 0, 0]),
        ("    i = ((p - 4).to(tl.uint32) >> 30).to(tl.int32)", [3, 3, 3, 3, 0, 0, 0, 0]),
        ("    i = tl.minimum((p - 4).to(tl.uint32), 5).to(tl.int32)", [5, 5, 5, 5, 0, 1, 2, 3]),
        ("    i = ((p - 4).to(tl.uint32) % 7).to(tl.int32)", [(2**32 - 4 + p) % 7 for p in range(4)] + [0, 1, 2, 3]),
        ("    i = 3 - (p - 4) % 4", [3, 6, 5, 4, 3, 2, 1, 0]),
        ("    i = 4 - (p - 4) // 3", [5, 5, 4, 4, 4, 4, 4, 3]),
        ("    i = tl.where((p - 4).to(tl.uint8) < 252, 1, 2)", [2, 2, 2, 2, 1, 1, 1, 1]),
        ("    i = (p * 100).to(tl.int8).to(tl.int32) & 7", [(p * 100 + 128) % 256 - 128 & 7 for p in range(8)]),
        ("    i = (p.to(tl.int64) * 3000000000 >> 32).to(tl.int32)", [p * 3000000000 >> 32 for p in range(8)]),
    ],
)
def test_an_index_has_its_types_width_and_sign(index: str, rows: list[int], tmp_path: Path) -> None:
    read, _ = _gathered(tmp_path, index, 8)
    assert read.tolist() == rows


def test_a_signed_overflow_of_an_address_is_said(tmp_path: Path) -> None:
    rows, result = _gathered(tmp_path, "    i = (p * 1103515245 >> 29) & 7", 8)
    assert rows.tolist() == [((p * 1103515245 + 2**31) % 2**32 - 2**31 >> 29) & 7 for p in range(8)]
    (note,) = (n for n in result.notes if "overflows" in n)
    assert "_kernel.py:8: arith.muli: a signed integer of 32 bits overflows in program (2, 0, 0)" in note
    assert note.endswith("an address of X is computed from it")
    for index in ("    i = p * 1", "    i = ((p * 1103515245).to(tl.uint32) >> 29).to(tl.int32)"):
        folder = tmp_path / str(len(index))
        folder.mkdir()
        assert not [n for n in _gathered(folder, index, 8)[1].notes if "overflows" in n]


@pytest.mark.parametrize("bad", [-1, 8, 100])
def test_a_loaded_index_beyond_its_tensor_is_refused(bad: int, tmp_path: Path) -> None:
    why = rf"_kernel\.py:9: X: program \(2, 0, 0\) reads index {bad} of an axis of 8 with stride {COLUMNS} "
    why += rf"\(allowed: 0 to 7\), .*; the index comes from T, loaded at .*_kernel\.py:8, which has {bad}"
    with pytest.raises(ProgramError, match=why):
        _gathered(tmp_path, "    i = tl.load(T + p)", 4, [0, 3, bad, 7])


def test_a_table_is_held_against_its_own_end(tmp_path: Path) -> None:
    why = r"_kernel\.py:8: T: program \(3, 0, 0\) reads element 3 of 3, and no mask prevents it"
    with pytest.raises(ProgramError, match=why):
        _gathered(tmp_path, "    i = tl.load(T + p)", 4, [0, 3, 7])


def test_an_index_that_no_program_reads_is_not_refused(tmp_path: Path) -> None:
    rows, _ = _gathered(tmp_path, "    i = tl.load(T + p)\n    if i < 0:\n        return", 4, [0, 3, -1, 7])
    assert rows[[0, 1, 3]].tolist() == [0, 3, 7]
    assert np.isnan(rows[2])


@pytest.mark.parametrize("last", [4, -1, 6])
def test_a_mask_hides_a_page_that_is_not_there(last: int) -> None:
    from ttir import recorded_kernels as kernels

    rng, size = np.random.default_rng(0), 16
    draw = {
        n: rng.integers(-1, 2, (rows * size, size)).astype(np.float16) for n, rows in (("Q", 2), ("K", 6), ("V", 6))
    }
    table = np.array([[0, 2, 1], [3, last, 5]], np.int32)
    given = {**draw, "T": table, "O": np.zeros((2 * size, size), np.float32)}
    with npusim.record(floats=True) as calls:
        kernels.some_pages[(2,)](**given, n=3, D=size, BN=size)
    if last == 6:
        with pytest.raises(
            ProgramError, match=r"K: program \(1, 0, 0\) reads index 111 of an axis of 96 .* T, .* has 6"
        ):
            _ran(calls[0])
        return
    wanted = np.zeros((2, size, size))
    q, k, v = (draw[n].reshape(-1, size, size).astype(np.float64) for n in "QKV")
    for p, pages in enumerate(table):
        for page in pages[pages >= 0]:
            wanted[p] += q[p] @ k[page].T @ v[page]
    assert np.array_equal(stored(_ran(calls[0]), given)["O"], wanted.reshape(-1, size))


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ("    i = 8 // p", r"arith\.divsi: program \(0, 0, 0\): a division by 0"),
        (
            "    i = p >> (30 + p)",
            r"arith\.shrsi: program \(2, 0, 0\): a shift of an integer of 32 bits by 32 bits or more",
        ),
        ("    i = (p * 2.0).to(tl.int32, bitcast=True)", "to float an index|an address that the kernel computes"),
    ],
)
def test_integers_without_a_defined_value_are_refused(index: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=why):
        _gathered(tmp_path, index, 4)


def test_indices_that_begin_anew_within_a_block_are_not_read_as_if_they_went_on(tmp_path: Path) -> None:
    x = np.arange(8 * BLOCK, dtype=np.float32).reshape(8, BLOCK)
    text = HEAD.format("X, Y, xs") + "    p, c = tl.program_id(0), tl.arange(0, B)\n"
    text += "    tl.store(Y + p * xs + c % 10, tl.load(X + p * xs + c))\n"
    with pytest.raises(ProgramError, match="a store has indices that repeat"):
        _ran(_recorded(tmp_path, text, 8, {"X": x, "Y": np.zeros_like(x)}, xs=BLOCK, B=BLOCK))


@pytest.mark.parametrize(("mask", "most"), [("", BLOCK), (", mask=c % 10 < 4, other=0.0", 4)])
def test_a_sum_of_elements_by_remainders_reads_each_of_them(mask: str, most: int, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((8, BLOCK)).astype(np.float32)
    text = HEAD.format("X, Y, xs") + "    p, c = tl.program_id(0), tl.arange(0, B)\n"
    text += f"    tl.store(Y + p, tl.sum(tl.load(X + p * xs + c % 10{mask})))\n"
    done = _ran(_recorded(tmp_path, text, 8, {"X": x, "Y": np.zeros(8, np.float32)}, xs=BLOCK, B=BLOCK))
    read = np.arange(BLOCK) % 10
    expected = x[:, read[read < most]].astype(np.float64).sum(1)
    assert np.abs(np.reshape(done.output, 8) - expected).max() < 1e-4
