"""Kernels of plain tensors have what attention has: presets beside the run's, robustness, finite choices, advice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import npusim
from npusim.errors import SpecError
from npusim.report.advice import Trial, advise
from npusim.report.result_json import record_of
from npusim.simulation.request import Request
from npusim.simulation.simulate import run_request

#: O = X W, the product stored in a format of the preset before it is widened.
PRODUCT = """
from dataclasses import dataclass

from npusim.kernel import GlobalTensor, KernelProblem, grid, kernel, schedule, sizes_of

SIZES = {"rows": 256, "depth": 64, "cols": 64}


@dataclass(frozen=True)
class Stored:
    name: str
    product: str
    arithmetic: str = ""

    def formats(self):
        return {"product": self.product}


@kernel(results="o", x="row depth", w="depth col")
def product(x, w, p):
    return ((x @ w).to(p.product).to("float32") * 0.5).to("float32")


def phases(problem, tiling, p, machine):
    rows, depth, cols = sizes_of(problem, SIZES)
    x = GlobalTensor("x", 1, 1, rows, depth, problem.dtype, "input")
    w = GlobalTensor("w", 1, 1, depth, cols, problem.dtype, "input")
    o = GlobalTensor("o", 1, 1, rows, cols, "float32", "output")
    blocks, sizes = grid(o, ("row", 64), ("col", cols)), {"row": 64, "col": cols, "depth": depth}
    return [product.phase("product", blocks, sizes, [o], x=x, w=w, p=p, arithmetic=p.arithmetic)]


def exact(problem, output, inputs, tiling):
    return (inputs("x", 0, 0) @ inputs("w", 0, 0) * 0.5)[None, None]


PRODUCT = schedule(
    "product",
    phases,
    problem=KernelProblem,
    sizes=SIZES,
    precisions=[Stored("half", "float16"), Stored("full", "float32")],
    beside=("half", "full"),
    families=["ascend"],
    reference=exact,
)
"""


SIZES = {"rows": 256}


@pytest.fixture
def product(tmp_path: Path) -> str:
    """Return the name of a schedule of plain tensors with two presets."""
    file = tmp_path / "product.py"
    file.write_text(PRODUCT, encoding="utf-8")
    return f"{file}:PRODUCT"


def test_presets_of_a_plain_kernel_are_shown_beside_the_runs(product: str) -> None:
    found = npusim.run(product, problem=SIZES, presets=True, rows="all", trace_groups=())
    assert [p.precision for p in found.presets] == ["half", "full"]
    for preset in found.presets:
        alone = npusim.run(product, problem=SIZES, precision=preset.precision, rows="all", trace_groups=())
        assert preset.latency_us == alone.latency_us
    half, full = (p.relative_rmse for p in found.presets)
    assert half is not None
    assert full is not None
    assert full < half / 10  # one rounding to 11 bits of mantissa, and none
    assert found.compared == "rows 192..255 of head 0"
    assert npusim.run(product, problem=SIZES, trace_groups=()).presets == ()


def test_a_plain_kernel_without_other_presets_has_none_to_show() -> None:
    sizes = {"heads": 1, "tokens": 64, "key": 64, "value": 64}
    assert npusim.run("retention", problem=sizes, presets=True, trace_groups=()).presets == ()
    with pytest.raises(SpecError, match="diagnose: these options are for schedules of attention"):
        npusim.run("retention", problem=sizes, diagnose=True)


def test_a_preset_in_which_a_plain_kernel_is_finite_is_named_with_its_error(product: str) -> None:
    tensors = {"x": np.full((1, 1, 256, 64), 200.0, np.float16), "w": np.full((1, 1, 64, 64), 200.0, np.float16)}
    found = npusim.run(product, problem=SIZES, tensors=tensors, rows="all", trace_groups=())
    assert found.numerics is not None
    assert not found.numerics.error.is_finite  # 64 x 200 x 200 is above 65504
    assert found.spread == ()
    assert [(f.schedule, f.precision) for f in found.finite] == [("product", "full")]
    again = npusim.run(product, problem=SIZES, tensors=tensors, precision="full", rows="all", trace_groups=())
    assert again.numerics is not None
    assert found.finite[0].rmse == again.numerics.error.rmse == 0.0
    assert again.finite == ()


def test_assumed_arithmetic_of_a_plain_kernel_is_replaced_and_the_distance_is_that_of_a_run(product: str) -> None:
    found = npusim.run(product, problem=SIZES, rows="all", precision="full", trace_groups=())
    own, others = "ascend.cube.k16.f16.f32", ["ascend.cube_fma.k16.f16.f32", "ascend.cube_rz24.k16.f16.f32"]
    assert [spread.arithmetic for spread in found.spread] == others
    assert any(note.startswith(f"matrix arithmetic {own} is assumed") for note in found.notes)
    before = found.output[0, 0, 192:].astype(np.float64)
    for spread in found.spread:
        preset = f"full,arithmetic={spread.arithmetic}"
        after = npusim.run(product, problem=SIZES, rows="all", precision=preset, trace_groups=()).output[0, 0, 192:]
        assert spread.differing == float((after != before).mean())
        assert spread.rmse == pytest.approx(np.linalg.norm(after - before) / np.linalg.norm(before), rel=1e-6)
    measured = npusim.run("retention", hw="a10", problem={"heads": 1, "tokens": 64, "key": 64, "value": 64})
    assert measured.spread == ()  # measured bit by bit: nothing is assumed


@pytest.mark.parametrize(("heads", "blocks"), [(2, 8), (4, 16)])
def test_advice_on_a_plain_kernel_counts_its_own_blocks(heads: int, blocks: int) -> None:
    sizes = {"heads": heads, "tokens": 256, "key": 64, "value": 64}
    found = run_request(Request("retention", hw="ascend_910b2", problem=sizes, numerics=False))  # type: ignore[arg-type]
    advice = advise(record_of(found), Trial(found))
    assert advice is not None
    assert advice.text == f"[few blocks] only {blocks} of 24 core groups have a block to run"
    assert advice.command == ""  # no field of its tile makes more blocks


def test_no_advice_where_a_plain_kernel_has_no_time(product: str) -> None:
    found = run_request(Request(product, problem=SIZES, numerics=False))
    assert advise(record_of(found), Trial(found)) is not None
    timeless = record_of(found.__class__(**{**vars(found), "timing": None}))
    assert advise(timeless) is None
