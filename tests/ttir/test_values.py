"""Comparisons, selects, maxima and blocks of one element: bits beside NumPy's, on an NPU and a GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError
from npusim.formats import RELATIONS
from tests.turns import in_turn
from ttir.drawn_values import FORMATS, HEAD, Drawn, Lanes, _extreme, bits, specials

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")
#: Drawn kernels of the usual run, and of all.
FEW, ALL = 8, 150


def recorded(kernel: Any, grid: int, words: dict[str, Any]) -> Any:
    with npusim.record(floats=True) as calls:
        kernel[(grid,)](**words)
    (call,) = calls
    return call


def computed(call: Any, hw: str, like: Any) -> Any:
    """Return the result of a call without lanes that its masks hide; each multiplication and addition by itself."""
    done = npusim.run(call, hw=hw, rows="all", precision="unfused" if hw == "h200" else None)
    assert done.latency_us > 0
    return np.reshape(done.output, (*like.shape[:-1], -1))[..., : like.shape[-1]]


def pairs(fmt: str, rows: int = 12, columns: int = 50) -> tuple[Any, Any]:
    """Return numbers, about every second one at an end of its format; in a half of all places both alike."""
    rng, dtype = np.random.default_rng(5), FORMATS[fmt]
    x, y = (rng.choice(specials(fmt), (rows, columns)) for _ in "xy")
    y = np.where(rng.random(y.shape) < 0.3, x, y)
    return np.where(rng.random(x.shape) < 0.3, rng.standard_normal(x.shape).astype(dtype), x), y


def held(relation: str, x: Any, y: Any) -> Any:
    """Return where a relation holds, by its definition (LLVM language reference, fcmp)."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    unordered = np.isnan(x) | np.isnan(y)
    if relation in ("ord", "uno"):
        return unordered == (relation == "uno")
    holds = {"eq": x == y, "ne": x != y, "gt": x > y, "lt": x < y, "ge": (x > y) | (x == y), "le": (x < y) | (x == y)}
    return (holds[relation[1:]] & ~unordered) | (unordered & (relation[0] == "u"))


CHOSEN: dict[str, Any] = {
    "larger": lambda x, y: np.where(held("ogt", x, y), 1.0, x),
    "bounded": lambda x, _y: np.where(held("ogt", x, 1.0), 1.0, x),
    "cleaned": lambda x, _y: np.where(np.isnan(x), 7.0, x),
    "equal": lambda x, y: np.where(held("oeq", x, y), 1.0, 2.0),
    "infinite": lambda x, y: np.where(x == np.inf, 0.0, y),
    "at least": lambda x, y: np.where(held("oge", x, y), x, y),
    "both": lambda x, y: np.where(held("ogt", x, 0) & ~held("oge", y, 1.0) | held("oeq", x, y), x, y),
    "counted": lambda x, y: held("ogt", x, y) * 1.0,
}


@pytest.mark.parametrize(("how", "hw"), in_turn([*CHOSEN], DEVICES))
def test_a_select_has_the_bits_of_its_branches(how: str, hw: str) -> None:
    from ttir import value_kernels as kernels

    for fmt in FORMATS:
        x, y = pairs(fmt)
        words = {"X": x, "Y": y, "Z": np.zeros_like(x), "N": 50, "B": 64, "HOW": how}
        wanted = CHOSEN[how](*(v.astype(np.float64) for v in (x, y))).astype(x.dtype)
        assert np.array_equal(bits(computed(recorded(kernels.chosen, 12, words), hw, x)), bits(wanted)), fmt


def test_large_differences_infinities_and_nan_as_the_issue_has_them() -> None:
    from ttir import value_kernels as kernels

    x = np.array([[60000, np.inf, np.nan, np.inf, np.nan, -0.0]], np.float16)
    y = np.array([[-60000, 1.0, 1.0, np.inf, 0.0, 0.0]], np.float16)
    for how, wanted in {
        "larger": [1, 1, np.nan, np.inf, np.nan, -0.0],
        "bounded": [1, 1, np.nan, 1, np.nan, -0.0],
        "cleaned": [60000, np.inf, 7, np.inf, 7, -0.0],
        "equal": [2, 2, 2, 1, 2, 1],
        "at least": [60000, np.inf, 1, np.inf, 0, -0.0],
    }.items():
        words = {"X": x, "Y": y, "Z": np.zeros_like(x), "N": 6, "B": 64, "HOW": how}
        done = npusim.run(recorded(kernels.chosen, 1, words), hw="h200", rows="all")
        assert np.array_equal(bits(np.reshape(done.output, x.shape)), bits(np.array([wanted], np.float16))), how
        assert done.numerics.error.nan_count == 0, "the reference has NaN at the same places alone"


def test_the_reference_does_not_follow_a_fault_of_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    from npusim.kernels.triton.arithmetic import Arithmetic
    from ttir import value_kernels as kernels

    x, y = (np.random.default_rng(seed).standard_normal((12, 50)).astype(np.float32) for seed in range(2))
    words = {"X": x, "Y": y, "Z": np.zeros_like(x), "N": 50, "B": 64, "HOW": "at least"}
    right = Arithmetic._by_value
    assert npusim.run(recorded(kernels.chosen, 12, words), rows="all").numerics.error.rmse == 0
    monkeypatch.setattr(Arithmetic, "_by_value", lambda self, op, mask, a, b: right(self, op, mask, b, a))
    assert npusim.run(recorded(kernels.chosen, 12, words), rows="all").numerics.error.rmse > 0.5


@pytest.mark.parametrize(("hw", "ends"), [("h200", (1.0, -3.0)), ("ascend_910b2", (-1.0, -3.0))])
def test_nan_between_two_ends_is_one_of_them(hw: str, ends: tuple[float, float]) -> None:
    """The upper one between a number and its opposite on a GPU (an H200 gives it), else the lower one."""
    from ttir import value_kernels as kernels

    x = np.array([np.nan, -np.inf, np.inf, -0.5, 0.25, -2.5, 1.5, 7.0] * 4, np.float32)
    for is_alike, end in zip((True, False), ends, strict=True):
        call = recorded(kernels.clamped, 1, {"X": x, "Y": np.zeros_like(x), "B": 32, "IS_ALIKE": is_alike})
        wanted = np.where(np.isnan(x), end, np.clip(x, *((-1, 1) if is_alike else (-3, 2))))
        assert np.array_equal(computed(call, hw, x), wanted)


@pytest.mark.parametrize(("relation", "hw"), in_turn([*RELATIONS], DEVICES))
def test_every_relation_of_ttir_holds_where_its_definition_says(relation: str, hw: str) -> None:
    from ttir import value_kernels as kernels

    x, y = pairs("float16")
    words = {"X": x, "Y": y, "Z": np.zeros_like(x), "N": 50, "B": 64, "HOW": "counted"}
    call = recorded(kernels.chosen, 12, words)
    (first,) = call.configurations
    assert first.ttir.count("arith.cmpf ogt") == 1
    text = first.ttir.replace("arith.cmpf ogt", f"arith.cmpf {relation}")
    changed = replace(call, configurations=(first._replace(ttir=text),))
    assert np.array_equal(computed(changed, hw, x), held(relation, x, y).astype(np.float16))


@pytest.mark.parametrize("hw", DEVICES)
def test_a_mask_of_values_and_indices_hides_what_either_hides(hw: str) -> None:
    from ttir import value_kernels as kernels

    x = np.random.default_rng(0).standard_normal((12, 50)).astype(np.float32) * 2
    made = computed(recorded(kernels.within, 12, {"X": x, "Z": np.zeros_like(x), "N": 50, "B": 64}), hw, x)
    most = np.where(x < 2, x, -np.inf).max(1, keepdims=True)
    assert np.array_equal(bits(made), bits(np.where(x == most, np.float32(1), x)))


@pytest.mark.parametrize(
    ("how", "is_nan", "hw"), in_turn(["maximum", "minimum", "clamp", "row", "rolled"], [False, True], DEVICES)
)
def test_maxima_and_minima_take_a_number_or_nan(how: str, is_nan: bool, hw: str) -> None:
    from ttir import value_kernels as kernels

    x, y = pairs("float32")
    x[:6] = np.where(np.isnan(x[:6]), np.float32(3), x[:6])  # rows without NaN
    if how == "rolled":
        words = {"X": x, "Z": np.zeros((3, 50), np.float32), "M": 12, "N": 50, "BM": 4, "BN": 64, "IS_NAN": is_nan}
        made = computed(recorded(kernels.rolled, 3, words), hw, words["Z"])
        blocks = x.reshape(3, 4, 50)
        wanted = blocks[:, 0]
        for row in range(1, 4):
            wanted = _extreme(wanted, blocks[:, row], is_largest=True, is_nan=is_nan)
    else:
        words = {"X": x, "Y": y, "Z": np.zeros_like(x), "N": 50, "B": 64, "HOW": how, "IS_NAN": is_nan}
        made = computed(recorded(kernels.extremes, 12, words), hw, x)
        rule: dict[str, Any] = {"is_nan": is_nan}
        if how == "clamp":
            low = _extreme(x, np.full_like(x, -1), is_largest=True, **rule)
            wanted = _extreme(low, np.full_like(x, 2), is_largest=False, **rule)
        elif how == "row":
            with np.errstate(invalid="ignore", over="ignore"):
                most = x[:, 0]
                for column in x.T[1:]:
                    most = _extreme(most, column, is_largest=True, **rule)
                wanted = x - most[:, None]
        else:
            wanted = _extreme(x, y, is_largest=how == "maximum", **rule)
    assert np.array_equal(bits(made), bits(wanted))
    assert np.isnan(wanted).any() or not is_nan


SPREAD: dict[str, Any] = {
    "lanes": lambda x: np.repeat(x[:, :1], 50, 1),
    "number": lambda x: np.repeat(x[:, :1], 50, 1),
    "maximum": lambda x: np.repeat(x.max(1, keepdims=True), 50, 1),
    "loop": lambda x: x[:, np.arange(50) // 16 * 16],
    "rows": lambda x: np.repeat(x[:, :1], 50, 1),
    "some lanes": lambda x: np.where(np.arange(50) < 40, x[:, :1], np.float32(5)),
    "hidden": lambda x: np.repeat(np.maximum(x[:, :1], 0), 50, 1),
}


@pytest.mark.parametrize(("how", "hw"), in_turn([*SPREAD], DEVICES))
def test_one_element_is_there_for_all_lanes_of_a_block(how: str, hw: str) -> None:
    from ttir import value_kernels as kernels

    x = np.random.default_rng(0).standard_normal((12, 50)).astype(np.float32)
    width = 16 if how == "loop" else 64
    words = {"X": x, "Y": np.zeros_like(x), "M": 12, "N": 50, "BM": 4, "B": width, "HOW": how}
    made = computed(recorded(kernels.spread, 3 if how == "rows" else 12, words), hw, x)
    assert np.array_equal(made, SPREAD[how](x))


def hold(numbers: Sequence[int], folder: Path) -> None:
    """Hold drawn kernels against a walk of their text, on both devices."""
    kernels = [Drawn(n) for n in numbers]
    path = folder / "drawn_kernels.py"
    path.write_text(HEAD + "\n\n".join(k.source for k in kernels))
    spec = spec_from_file_location("drawn_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    for k in kernels:
        call, wanted = recorded(getattr(module, k.name), k.grid, {**k.tensors(), **k.words()}), k.walked()
        for hw in DEVICES:
            assert np.array_equal(bits(computed(call, hw, wanted)), bits(wanted)), (hw, k.source)


def test_drawn_kernels_have_the_bits_of_a_walk_of_their_text(tmp_path: Path) -> None:
    hold(range(FEW), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(FEW, ALL, 24))
def test_all_drawn_kernels_have_the_bits_of_a_walk_of_their_text(start: int, tmp_path: Path) -> None:
    hold(range(start, min(ALL, start + 24)), tmp_path)


def test_the_walk_itself_rounds_and_compares_as_ieee_has_it() -> None:
    x = Lanes(np.array([1.0, np.nan, -0.0, 65504.0], np.float16))
    assert ((x > 0.5).of == [True, False, False, True]).all()
    with np.errstate(over="ignore"):
        total = x + 65504.0
    assert bits(total.of).tolist() == bits(np.array([65504, np.nan, 65504, np.inf], np.float16)).tolist()
    assert (x.to(ml_dtypes.bfloat16) * 3.0).of.dtype == ml_dtypes.bfloat16
    zeros = np.array([0.0, -0.0], np.float32)
    assert np.signbit(_extreme(zeros, zeros[::-1], is_largest=False, is_nan=False)).all()
    assert not np.signbit(_extreme(zeros, zeros[::-1], is_largest=True, is_nan=False)).any()


@pytest.mark.parametrize("hw", DEVICES)
def test_a_sum_over_a_loop_that_no_program_enters_is_0(hw: str) -> None:
    from ttir.value_kernels import sums_of_some

    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    words = {"X": x, "Y": np.zeros((3, 16), np.float32), "n": 64, "end": 0, "B": 16}
    assert np.array_equal(computed(recorded(sums_of_some, 3, words), hw, words["Y"]), x[:, :16])


@pytest.mark.parametrize("hw", DEVICES)
def test_indices_of_tiles_that_begin_behind_the_first_element(hw: str) -> None:
    from ttir.value_kernels import running_place

    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    words = {"X": x, "Y": np.zeros(4, np.int32), "n": 64, "first": 16, "R": 4, "B": 16}
    assert np.array_equal(computed(recorded(running_place, 1, words), hw, words["Y"]), 16 + x[:, 16:].argmax(1))


@pytest.mark.parametrize(
    ("name", "fmt", "why"),
    [
        (
            "concatenated",
            "float32",
            "tl.cat is not supported, because the order of its elements is undefined; store both blocks",
        ),
        ("counted", "int32", "the only supported atomics are tl.atomic_add of floats .*; store each program.s part"),
    ],
)
def test_what_is_not_read_says_what_to_write(name: str, fmt: str, why: str) -> None:
    from ttir import value_kernels

    words = {"X": np.ones(16, np.float32), "Y": np.zeros(32, fmt), "B": 16}
    with pytest.raises(ProgramError, match=rf"value_kernels\.py:\d+: {why}"):
        computed(recorded(getattr(value_kernels, name), 1, words), "h200", words["Y"])
