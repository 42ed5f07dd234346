"""Lanes that masks hide, of tails: what they hold reaches no result, or the kernel is refused at its line."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
INF = float("inf")


def normal(*shape: int, seed: int = 0, fmt: str = "float32") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(fmt)


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


X, TALL, STEPS, SHORT = normal(4, 77) - 1, normal(50, 40) - 3, normal(4, 3, 20), normal(4, 20)
LONG = normal(2, 77, seed=3)
ROWS, LEFT, RIGHT = normal(2, 7, 20), normal(64, 77, fmt="float16"), normal(77, 24, seed=1, fmt="float16") + 4
WORDS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "lanes": ((4,), {"X": X, "Y": zeros(4), "N": 77, "B": 32}),
    "online": ((4,), {"X": X, "Y": zeros(4), "N": 77, "B": 32}),
    "variance": ((4,), {"X": X, "Y": zeros(4), "N": 77}),
    "left_out": ((2,), {"X": X[:2], "W": LONG, "Y": zeros(2), "N": 77, "S": 32, "B": 32}),
    "second_state": ((4,), {"X": X, "Y": zeros(4), "N": 77, "B": 32}),
    "times": ((4,), {"X": STEPS, "U": zeros(32), "Y": zeros(4, 3), "N": 20, "T": 3, "B": 32}),
    "by_tiles": ((1,), {"X": X, "W": normal(96, seed=1), "Y": zeros(4), "R": 4, "N": 77, "BR": 4, "B": 32}),
    "down": ((2,), {"X": TALL, "W": normal(40, seed=1), "Y": zeros(40), "R": 50, "N": 40, "BR": 16, "B": 32}),
    "of_rows": (
        (2,),
        {"X": ROWS, "M": normal(7, seed=1), "Y": zeros(2, 7), "R": 7, "N": 20, "STEPS": 2, "BR": 4, "B": 32},
    ),
    "of_numbers": ((4,), {"X": SHORT, "A": normal(4, seed=1), "C": normal(4, seed=2), "Y": zeros(4), "N": 20, "B": 32}),
    "stored_before": ((2,), {"X": normal(2, 64), "B": 16}),
    "product": (
        (2,),
        {"A": LEFT, "W": RIGHT, "V": normal(24, fmt="float16"), "C": zeros(64, 24), "K": 77, "N": 24}
        | {"BM": 32, "BN": 32, "BK": 32},
    ),
}


def _recorded(kernel: str, how: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from ttir import hidden_kernels

    grid, words = WORDS[kernel]
    words = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in words.items()}
    with npusim.record(floats=True) as calls:
        getattr(hidden_kernels, kernel)[grid](**words, **how)
    return calls[0], words


def _exchanged(x: Any) -> Any:
    """Return sums of a state and its row, of two states that change places."""
    s, t, made = np.zeros(x.shape[-1]), np.zeros(x.shape[-1]), []
    for row in x:
        made.append((s + row).sum())
        s, t = t, s + row
    return made


def _counted(x: Any) -> Any:
    """Return sums of rows weighted by a state, which each row and 1 are added to."""
    s, made = np.zeros(x.shape[-1]), []
    for row in x:
        made.append((s * row).sum())
        s = s + row + 1
    return made


EXACT = {n: x.astype(np.float64) for n, x in {"x": X, "tall": TALL, "rows": ROWS, "short": SHORT}.items()}
LATER = np.arange(77)[None] // 32 > np.arange(2)[:, None]
RIGHT_ONES: list[tuple[str, dict[str, Any], Any]] = [
    ("lanes", {"OTHER": 0.0, "HOW": "sum"}, EXACT["x"].sum(1)),
    ("lanes", {"OTHER": -INF, "HOW": "max"}, EXACT["x"].max(1)),
    ("lanes", {"OTHER": None, "HOW": "sum"}, EXACT["x"].sum(1)),  # without other hidden lanes are 0
    ("lanes", {"OTHER": None, "HOW": "masked squares from 2"}, ((EXACT["x"] - 2) ** 2).sum(1)),
    ("variance", {"IN_TILES": True, "FILL": 0.0, "B": 32}, EXACT["x"].var(1) * 77),
    ("variance", {"IN_TILES": False, "FILL": 0.0, "B": 128}, EXACT["x"].var(1) * 77),
    ("left_out", {"HOW": "later tiles"}, EXACT["x"][:2, 32:].sum(1)),
    ("left_out", {"HOW": "later tiles by program"}, (EXACT["x"][:2] * LATER).sum(1)),
    ("left_out", {"HOW": "with a load"}, ((EXACT["x"][:2] + LONG) * LATER).sum(1)),
    ("online", {"OTHER": -INF, "BY_LANES": False}, np.log(np.exp(EXACT["x"]).sum(1))),
    ("online", {"OTHER": -INF, "BY_LANES": True}, np.log(np.exp(EXACT["x"]).sum(1))),
    ("times", {"HOW": "turns", "TURNS": True}, [_exchanged(x) for x in STEPS.astype(np.float64)]),
    ("times", {"HOW": "weighted by a count", "TURNS": False}, [_counted(x) for x in STEPS.astype(np.float64)]),
    ("by_tiles", {"HOW": "as it is", "BY_LANES": True}, EXACT["x"].sum(1)),
    ("by_tiles", {"HOW": "weighted", "BY_LANES": False}, EXACT["x"] @ normal(96, seed=1)[:77].astype(np.float64)),
    ("down", {"HOW": "sum"}, EXACT["tall"].sum(0)),
    ("of_rows", {"HOW": "multiplied"}, EXACT["rows"].sum(2) * normal(7, seed=1)),
    (
        "of_numbers",
        {"OTHER": 0.0, "HOW": "times a difference"},
        EXACT["short"].sum(1) * (normal(4, seed=1) - normal(4, seed=2)),
    ),
    (
        "product",
        {"OTHER": 0.0, "FILL": 0.0, "HOW": "one more"},
        LEFT.astype(np.float64) @ (RIGHT + np.float16(1)).astype(np.float64),
    ),
]
#: Kernels in which masked lanes reach the result, so that each lane is computed as it is.
REACHED: list[tuple[str, dict[str, Any]]] = [
    ("lanes", {"OTHER": 1.0, "HOW": "sum"}),
    ("lanes", {"OTHER": 0.0, "HOW": "max"}),
    ("lanes", {"OTHER": 0.0, "HOW": "squares from 2"}),
    ("variance", {"IN_TILES": True, "FILL": 1.0, "B": 32}),
    ("variance", {"IN_TILES": False, "FILL": 1.0, "B": 128}),
    ("left_out", {"HOW": "by a mask"}),
    ("online", {"OTHER": 0.0, "BY_LANES": False}),
    ("online", {"OTHER": 0.0, "BY_LANES": True}),
    ("second_state", {"HOW": "sums of the new one"}),
    ("second_state", {"HOW": "sums of the old one"}),
    ("second_state", {"HOW": "a second one"}),
    ("times", {"HOW": "turns to 3", "TURNS": True}),
    ("times", {"HOW": "count", "TURNS": False}),
    ("of_numbers", {"OTHER": 0.0, "HOW": "less a difference"}),
    ("of_numbers", {"OTHER": 1.0, "HOW": "times a difference"}),
    ("of_numbers", {"OTHER": 1.0, "HOW": "less a quotient"}),
    ("by_tiles", {"HOW": "one more", "BY_LANES": True}),
    ("by_tiles", {"HOW": "with padded weights", "BY_LANES": False}),
    ("by_tiles", {"HOW": "padded weights first", "BY_LANES": False}),
    ("down", {"HOW": "max"}),
    ("down", {"HOW": "with columns"}),
    ("of_rows", {"HOW": "added"}),
    ("product", {"OTHER": 0.0, "FILL": 0.0, "HOW": "both one more"}),
]
WRONG_ONES: list[tuple[str, dict[str, Any], str]] = [
    ("product", {"OTHER": 1.0, "FILL": 0.0, "HOW": "sum of columns"}, "their axes differ")
]


def _named(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*case, id=f"{case[0]}-{'-'.join(map(str, case[1].values()))}") for case in cases]


@pytest.mark.parametrize(("kernel", "how", "exact"), _named(RIGHT_ONES))
def test_what_masked_lanes_hold_changes_no_result(kernel: str, how: dict[str, Any], exact: Any) -> None:
    from ttir.stored import stored

    call, words = _recorded(kernel, how)
    done = npusim.run(call, hw="h200", rows="all")
    made = stored(done, words)
    (result,) = made.values()
    is_noted = any("a masked load without other" in n for n in done.notes)
    assert is_noted == (how.get("OTHER", 0.0) is None)
    assert np.abs(result - np.asarray(exact)).max() < (0.1 if kernel == "product" else 1e-4)


@pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])
@pytest.mark.parametrize(("kernel", "how"), _named(REACHED))
def test_masked_lanes_that_reach_a_result_are_computed(kernel: str, how: dict[str, Any], hw: str) -> None:
    call, _ = _recorded(kernel, how)
    done = npusim.run(call, hw=hw, rows="all")
    assert done.numerics is not None and done.numerics.rmse is not None
    assert done.numerics.rmse < (1e-4 if kernel == "product" else 1e-6)
    assert any("also those that a mask hides" in note for note in done.notes)


@pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])
def test_masked_factors_that_are_infinite_make_each_sum_nan(hw: str) -> None:
    from ttir.stored import stored

    call, words = _recorded("product", {"OTHER": 0.0, "FILL": 0.0, "HOW": "inverse"})
    assert np.all(np.isnan(stored(npusim.run(call, hw=hw, rows="all"), words)["C"]))


@pytest.mark.parametrize(("kernel", "how", "why"), _named(WRONG_ONES))
def test_masked_lanes_that_would_reach_a_result_are_refused_at_their_line(
    kernel: str, how: dict[str, Any], why: str
) -> None:
    call, _ = _recorded(kernel, how)
    with pytest.raises(ProgramError, match=rf"hidden_kernels\.py:\d+: .*{why}"):
        npusim.run(call, hw="h200", rows="all")


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
@pytest.mark.parametrize(("kind", "rows"), [(0, 5), (0, 8), (1, 5), (1, 8)])
def test_a_maximum_down_rows_has_those_that_no_program_stores_or_is_refused(kind: int, rows: int, hw: str) -> None:
    from ttir import hidden_kernels
    from ttir.stored import stored

    x = normal(rows, 16) - 1
    whole = np.concatenate([x, zeros(8 - rows, 16)]).reshape(2, 4, 16)
    most = (whole.sum(1) if kind else whole.max(1)).repeat(4, 0)[:rows]
    words = {"X": x, "Y": zeros(rows, 16), "R": rows, "KIND": kind, "BR": 4, "B": 16}
    with npusim.record(floats=True) as calls:
        hidden_kernels.chosen_down[(2,)](**words)
    try:
        done = npusim.run(calls[0], hw=hw, rows="all")
    except ProgramError as error:
        assert (kind, rows) == (0, 5) and "a max runs along an axis that a mask cuts" in str(error)
        return
    assert np.abs(stored(done, words)["Y"] - np.where(x > 0.3, x, most)).max() < 1e-5


@pytest.mark.parametrize("count", [1, 2])
def test_a_mask_of_any_lanes_hides_elements_of_a_tensor_of_one_element(count: int) -> None:
    from ttir import hidden_kernels
    from ttir.stored import stored

    words = {"X": normal(count) + 4, "Y": zeros(1), "N": count, "B": 4}
    with npusim.record(floats=True) as calls:
        hidden_kernels.one_of_few[(1,)](**words)
    done = npusim.run(calls[0], hw="h200", rows="all")
    assert stored(done, words)["Y"][0] == words["X"][0]
