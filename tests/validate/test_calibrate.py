"""Constants fitted to times: planted ones come back, intervals hold, and what does not help is not written."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from npusim.config.cases import MeasurementCase, load_measurements
from npusim.config.load import load_device
from npusim.errors import CheckFailedError, SpecError
from npusim.report.findings import calibration_part
from npusim.report.page import page_html
from npusim.studies.validate.calibrate import calibrate
from npusim.studies.validate.measured_times import Predictor
from reports.validation import study

pytest.importorskip("scipy", reason="npusim[calibrate]")
from npusim.studies.validate import least_squares as ls
from tests.turns import every

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.studies.validate.least_squares import Array

FIT = ("flags.*", "cores.aic.engines.MTE2.*")
SIZES = tuple({"m": 64 * a, "n": 64 * b, "k": 128 * c} for a in (1, 9) for b in (2, 16) for c in (1, 12))
Sizes = dict[str, int]
Shape = tuple[str, Sizes, Sizes]


def attention(heads: int, seq_q: int = 2048, seq_kv: int = 2048, **tiling: int) -> Shape:
    return "flash", {"heads": heads, "seq_q": seq_q, "seq_kv": seq_kv, "head_dim": 128}, tiling


def product(m: int, n: int, k: int) -> Shape:
    return "gemm", {"m": m, "n": n, "k": k}, {}


def copy(size: int) -> Shape:
    return "copy", {"bytes": size}, {}


#: Shapes at which five constants decide times, how often each is measured of all (an A-optimal design: the sum of their
#: variances is least), and the factors that are planted.
PLANTED: dict[str, tuple[list[tuple[int, Shape]], dict[str, float]]] = {
    "ascend_910b2": (
        [
            (3, attention(24, block_kv=64)),
            (3, product(16, 128, 64)),
            (2, product(2048, 2048, 64)),
            (3, product(256, 128, 4096)),
            *((1, copy(1 << size)) for size in (16, 18)),
        ],
        {
            "cores.aic.engines.MTE2.routes.gm_l1.bytes_per_cycle": 1.28,
            "cores.aic.engines.FIXP.routes.l0c_gm.bytes_per_cycle": 0.82,
            "cores.aiv.engines.MTE3.routes.ub_gm.miss_bytes_per_cycle": 1.35,
            "launch.block_dispatch_cycles": 0.78,
            "flags.tile_cycles": 1.22,
        },
    ),
    "ascend_950": (
        [
            (3, attention(24, block_kv=64)),
            (2, attention(24, block_kv=512)),
            (2, product(2048, 2048, 64)),
            *((1, copy(1 << size)) for size in (16, 18, 26)),
        ],
        {
            "links.hbm.bytes_per_s": 1.28,
            "cores.aiv.engines.MTE3.routes.ub_gm.miss_bytes_per_cycle": 0.82,
            "cores.aic.engines.FIXP.routes.l0c_gm.bytes_per_cycle": 1.35,
            "cores.aic.engines.MTE2.routes.gm_l1.bytes_per_cycle": 0.78,
            "flags.cross_core_latency_cycles": 1.22,
        },
    ),
    # Its mma.pipe_cycles moves these times as product_issue_factor does: no two of such a pair are asked for.
    "h200": (
        [
            (2, copy(1 << 28)),
            (3, copy(1 << 20)),
            (3, product(64, 64, 64)),
            (2, product(2048, 2048, 2048)),
            (3, attention(132, seq_q=128, seq_kv=4096)),
        ],
        {
            "links.hbm.bytes_per_s": 1.28,
            "cores.sm.engines.WARPS.sharing.product_issue_factor": 0.82,
            "cores.sm.engines.WARPS.sharing.block_start_cycles": 1.35,
            "memory.l2.miss_extra_latency_cycles": 0.75,
            "cores.sm.engines.TENSOR.wgmma.elements_per_cycle": 1.22,
        },
    ),
}


def cases(
    device: str, noise: float = 0.0, changes: dict[str, object] | None = None, number: int = 0
) -> list[dict[str, object]]:
    """Return many sizes of products and copies, or ``number`` of a device's planted shapes, with other constants."""
    who, rng = Predictor(changes=changes), np.random.default_rng(0)
    shapes = [("gemm", size, {}) for size in SIZES] + [copy(4**n * 1024) for n in range(3, 7)]
    shapes = [shape for times, shape in PLANTED[device][0] for _ in range(times)] if number else shapes
    rows, predicted = [], dict[int, float]()
    for count in range(number or len(shapes)):
        schedule, workload, tiling = shapes[at := count % len(shapes)]
        group = rng.integers(8) if number else count % 4
        row = {"name": f"c{count}", "group": f"g{group}", "device": device, "schedule": schedule, "workload": workload}
        row |= {"tiling": tiling, "unnamed": "declared", "timing": "core" if number else "call"}
        if at not in predicted:
            case = MeasurementCase.model_validate({**row, "measured": {"latency_us": 1.0}})
            predicted[at] = who.latency_us(case)
        rows.append({**row, "measured": {"latency_us": predicted[at] * float(np.exp(noise * rng.normal()))}})
    return rows


def written(tmp_path: Path, rows: list[dict[str, object]]) -> Path:
    file = tmp_path / "measured.yaml"
    lines = "".join(f"  - {json.dumps(row)}\n" for row in rows)
    file.write_text(f"schema: npusim.measurements/1\nsource: synthetic\ncases:\n{lines}")
    return file


#: Two counts of sixty shapes.
A, B = (grid.ravel() for grid in np.meshgrid(np.linspace(0.2, 4, 10), np.linspace(0.1, 3, 6)))
SUMS = np.array([np.full(60, 0.4), 0.3 * A * B, 0.2 * A**2])


def roofline(x: Array) -> Array:
    """Return logarithms of times of sixty shapes: the larger of two rates, a start, and two costs that add up."""
    factors = np.exp(x)
    return np.log(np.maximum(A * factors[0], B * factors[1]) + factors[2:] @ SUMS)


def test_intervals_hold_the_planted_constants_in_nine_of_ten_fits() -> None:
    rng, true, inside = np.random.default_rng(3), np.array([0.2, -0.15, 0.3, -0.25, 0.1]), np.zeros(5)
    for _ in range(fits := 250):
        measured = roofline(true) + 0.03 * rng.normal(size=60)
        rough = ls.fit(roofline, measured, np.zeros(5), ls.COARSE)
        ends = ls.intervals(ls.fit(roofline, measured, rough.x))
        inside += (ends[:, 0] <= true) & (true <= ends[:, 1])
    assert (inside / fits > 0.85).all()
    assert (inside / fits < 0.95).all()


def test_constants_that_no_data_tells_apart_move_as_one() -> None:
    rng = np.random.default_rng(4)
    strong, other = rng.uniform(0.2, 1, 40), rng.uniform(0.2, 1, 40)
    jac = np.array([strong, other, 0.7 * strong, -0.3 * other, 0.001 * strong]).T
    assert {tuple(bundle) for bundle in ls.bundles(jac).T} == {(1, 0, 1, 0, 0), (0, 1, 0, -1, 0)}
    truth = np.array([0.3, -0.2, 0.3, 0.2, 0.0])
    residuals = -jac @ truth + 0.001 * rng.normal(size=40)
    none, groups = np.zeros((5, 0)), [n % 5 for n in range(40)]
    chosen = ls.choose(jac, residuals, groups, none)
    assert chosen @ ls.solve(jac @ chosen, residuals) == pytest.approx(truth, abs=0.01)
    assert ls.choose(jac, 0.03 * rng.normal(size=40), groups, none).shape == (5, 0)


@pytest.mark.parametrize("device", every(2, PLANTED))
def test_planted_constants_come_back_as_near_as_the_noise_allows(tmp_path: Path, device: str) -> None:
    facts = dict(load_device(device).quantities())
    truth = {key: float(f"{facts[key].value * factor:.3g}") for key, factor in PLANTED[device][1].items()}
    truth = {key: int(value) if value.is_integer() else value for key, value in truth.items()}
    # Little noise does what many cases would: reading them takes longer than the fit.
    done = calibrate(written(tmp_path, cases(device, 0.01, truth, 240)), constants=tuple(truth))
    assert {c.key: c.after for c in done.constants} == pytest.approx(truth, rel=0.02)
    assert done.total.kept_out < 0.01 < done.total.before


def test_what_was_measured_on_one_chip_is_assumed_of_another_and_written(tmp_path: Path) -> None:
    key, truth = "links.hbm.bytes_per_s", 9e11
    file = written(tmp_path, cases("ascend_910b2", 0.01, {key: truth}))
    with pytest.raises(SpecError, match="no constant may be fitted"):
        calibrate(file, constants=("links.h*",))
    file.write_text(file.read_text().replace("ascend_910b2", "ascend_910b1"))
    done = calibrate(file, "ascend_910b2", constants=("links.h*",))
    (constant,) = done.constants
    assert constant.after == pytest.approx(truth, rel=0.02)
    assert constant.low < truth < constant.high
    assert done.total.kept_out < done.total.before
    page = page_html("constants", [calibration_part(done)])
    assert all(text in page for text in (key, "Errors before and after", '"errors": "left out"'))
    (tmp_path / "mine.yaml").write_text(done.device_text("ascend_910b2", "mine"))
    fact = dict(load_device(tmp_path / "mine.yaml").quantities())[key]
    assert (fact.value, fact.basis, len(fact.fitted_on or ())) == (constant.after, "fitted", len(SIZES) + 4)
    assert "90 % interval" in fact.source


def test_an_interrupted_fit_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = ls.choose

    def once(jac: Array, residuals: Array, groups: list[str], chosen: Array) -> Array:
        if chosen.size:
            raise KeyboardInterrupt
        return choose(jac, residuals, groups, chosen)

    key = "launch.block_dispatch_cycles"
    rows = cases("ascend_910b2", 0.01, {key: 300}, 60)
    monkeypatch.setattr(ls, "choose", once)
    done = calibrate(written(tmp_path, rows), constants=(key,))
    assert [c.key for c in done.constants] == [key]
    assert (done.is_whole, done.helps) == (False, True)
    with pytest.raises(KeyboardInterrupt):
        calibrate(written(tmp_path, rows), constants=(key,), progress=interrupted)


def interrupted(done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_scipy_is_missed_before_anything_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    file, told = written(tmp_path, cases("ascend_910b2")), list[int]()
    with pytest.raises(SpecError, match=r"calibrate needs scipy: pip install npusim\[calibrate\]"):
        calibrate(file, progress=lambda done, _total: told.append(done))
    assert not told


@pytest.mark.exhaustive
def test_half_of_an_h100s_times_bring_an_h200s_file_nearer_to_the_others(tmp_path: Path) -> None:
    every = load_measurements(study.HERE / "measured_h100.yaml").cases
    groups = list(dict.fromkeys(case.group or case.schedule for case in every))
    half = [case for case in every if (case.group or case.schedule) in groups[1::2]]
    file = written(tmp_path, [case.model_dump(mode="json", exclude_none=True, warnings=False) for case in half])
    done = calibrate(file, "h200")
    assert done.total.kept_out < done.total.before
    (tmp_path / "mine.yaml").write_text(done.device_text("h200", "mine"))
    errors = {"h200": [], "mine": []}
    for name, listed in errors.items():
        who = Predictor(folder=tmp_path)
        others = [c for c in every if c not in half]
        for case in (other.model_copy(update={"device": name}) for other in others):
            assert case.measured.latency_us is not None
            listed.append(abs(case.measured.latency_us.relative_error(who.latency_us(case))))
    assert float(np.mean(errors["mine"])) < 0.6 * float(np.mean(errors["h200"]))


def test_what_helps_no_kept_out_case_is_not_written(tmp_path: Path) -> None:
    done = calibrate(written(tmp_path, cases("ascend_910b2", 0.03)), constants=FIT)
    if not done.helps:
        with pytest.raises(CheckFailedError, match="writes no file"):
            done.check()
    assert done.total.kept_out <= done.total.before * 1.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 3}, "3 measured times; at least 4"),
        ({"device": "h200"}, "cases are of ascend_910b2, h200: name the device to fit with"),
        ({"twice": 1.5}, "cases c1 and twice are the same call but have"),
        ({"constants": ("clock_hz",)}, "no constant may be fitted"),
    ],
)
def test_what_cannot_be_fitted_says_so(tmp_path: Path, change: dict[str, object], message: str) -> None:
    rows = cases("ascend_910b2")[: change.get("rows", 9)]  # type: ignore[misc]
    if "twice" in change:
        rows.append({**rows[1], "name": "twice", "measured": {"latency_us": rows[1]["measured"]["latency_us"] * 1.5}})  # type: ignore[index]
    rows[0] |= {"device": change.get("device", "ascend_910b2")}
    with pytest.raises(SpecError, match=message):
        calibrate(written(tmp_path, rows), constants=change.get("constants", ("*",)))  # type: ignore[arg-type]
