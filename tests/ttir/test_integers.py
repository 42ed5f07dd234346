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
