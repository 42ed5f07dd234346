"""Indices that restart within a block, as values: NumPy's numbers, none that a reading continues beyond the restart."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tests.turns import in_turn
from ttir.stored import stored_by

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]

_AT, _X = np.arange(16), np.random.default_rng(4).integers(-8, 9, 16).astype(np.float32)
_TABLE = np.array([-1, 0, 5, 9, -7, 3, 4, 8, -2, 6, 1, 2, 30, -11, 12, 13, 7, -5, 14, 15], np.int32)
_ROWS, _PROGRAMS = np.arange(64).reshape(4, 16), _TABLE[np.arange(64) % 20]
CASES = [
    ("converted", _X * (_AT % 5)),
    ("largest", _X + np.maximum(_AT % 5, 2)),
    ("in_loop", _X * (_AT % 5) * 3),
    ("summed", np.array([np.sum(_AT % 5)], np.float32)),
    ("loaded", _TABLE[_AT % 5]),
    ("loaded_or_other", np.where(_AT < 12, _TABLE[_AT % 5], 7) * 3),
    ("rows", _TABLE[_AT % 5] * 3 + _ROWS),
    ("programs", np.where(_PROGRAMS > 3, _PROGRAMS, -_PROGRAMS)),
]


@pytest.mark.parametrize(("case", "hw"), in_turn(CASES, ("ascend_910b2", "h200")))
def test_indices_that_restart_within_a_block_are_numpy_s(case: tuple[str, Any], hw: str) -> None:
    from ttir import restarting_kernels as kernels

    name, wanted = case
    result = np.zeros(wanted.shape, np.float32 if wanted.dtype.kind == "f" else np.int32)
    given = {"X": _X, "T": _TABLE, "Y": result}
    grid = (4,) if name == "programs" else (1,)
    assert np.array_equal(stored_by(getattr(kernels, name), grid, hw, given)["Y"], wanted)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("case", "hw"), in_turn([("while_once", _AT % 4 != 1), ("loaded_count", _AT < 13)], ("h200", "ascend_910b2"))
)
def test_a_loop_of_one_iteration_over_lanes_is_executed(case: tuple[str, Any], hw: str, count: int) -> None:
    from ttir import restarting_kernels as kernels

    name, stores = case
    x = np.random.default_rng(5).integers(1, 9, 32).astype(np.float32)
    given = {"X": x, "T": np.array([count], np.int32), "Y": np.zeros(16, np.float32)}
    made = stored_by(getattr(kernels, name), (1,), hw, given, n=count)["Y"]
    assert np.array_equal(made[stores], x.reshape(2, 16)[:count].sum(0)[stores])
    assert np.isnan(made[~stores]).all()


def test_floor_and_ceil_of_subnormal_numbers_are_zeros_with_their_sign_on_a_gpu() -> None:
    """An H200 stores -0.0 and 0.0 for floor and ceil of -1e-40 and 1e-41 (drawn kernels, Triton 3.6)."""
    from ttir import restarting_kernels as kernels

    x = np.array([-1e-40, 1e-41, -0.0, 1.5, -1.5, 2e-38, -2e-38, np.inf] * 2, np.float32)
    given = {"X": x, "T": _TABLE, "Y": np.zeros(32, np.float32)}
    made = stored_by(kernels.whole_of_subnormal, (1,), "h200", given)["Y"].reshape(2, 16)
    flushed = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(0, x), x)
    for row, wanted in zip(made, (np.floor(flushed), np.ceil(flushed)), strict=True):
        assert np.array_equal(row, wanted) and np.array_equal(np.signbit(row), np.signbit(wanted))


def test_integers_that_no_program_stores_are_said_to_be_minus_one() -> None:
    """Exact integers of 32 bits have no NaN."""
    import npusim
    from ttir import restarting_kernels as kernels

    x = np.arange(1, 33, dtype=np.float32)
    with npusim.record(floats=True) as calls:
        kernels.exclusive[(2,)](x, _TABLE, np.zeros(32, np.int32))
    call: Any = calls[0]
    done = npusim.run(call, hw="h200", rows="all")
    made = np.asarray(done.output).reshape(-1)
    assert np.array_equal(made[:27], x[:27].view(np.int32)) and np.all(made[27:] == -1)
    assert any(
        "5 of them never" in n and n.endswith("npusim returns -1, as integers have no NaN, there") for n in done.notes
    )


def test_the_index_of_a_maximum_among_nan_is_said_to_depend_on_the_device() -> None:
    """An H200 returns other indices for rows with NaN, by the order in which its lanes are compared."""
    import npusim
    from ttir import restarting_kernels as kernels

    x = np.where(_AT % 3 == 0, np.nan, _X).astype(np.float32)
    with npusim.record(floats=True) as calls:
        kernels.largest_place[(1,)](x, _TABLE, np.zeros(1, np.int32))
    call: Any = calls[0]
    done = npusim.run(call, hw="h200", rows="all")
    assert np.asarray(done.output).item() == np.nanargmax(x)
    assert any("among elements with NaN depends on the device's order" in n for n in done.notes)


@pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])
def test_known_tiles_whose_last_group_is_shorter(hw: str) -> None:
    """The numbers of columns, as a tensor along the tiles of a loop, end within the last tile."""
    from ttir import restarting_kernels as kernels

    x = np.random.default_rng(3).standard_normal((2, 2, 4, 13)).astype(np.float32)
    given = {"X": x, "Y": np.zeros((2, 4, 13), np.float32), "c": 13, "T": 2, "R": 4, "C": 16}
    made = stored_by(kernels.weighted_by_column, (2,), hw, given)["Y"]
    wanted = (x + (x * np.arange(1, 14)).max(2, keepdims=True)).sum(1)
    assert np.allclose(made, wanted, atol=1e-5)
