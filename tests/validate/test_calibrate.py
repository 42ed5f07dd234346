"""Constants fitted to times: planted ones come back, intervals hold, and what does not help is not written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from npusim.config.cases import MeasurementCase, measurements_text
from npusim.config.load import load_device
from npusim.errors import CheckFailedError, SpecError
from npusim.validate.calibrate import calibrate
from npusim.validate.times import Predictor

pytest.importorskip("scipy", reason="npusim[calibrate]")
from npusim.validate import least_squares as ls

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.validate.least_squares import Array

FIT = ("flags.*", "cores.aic.engines.MTE2.*")
SIZES = tuple({"m": 64 * a, "n": 64 * b, "k": 128 * c} for a in (1, 9) for b in (2, 16) for c in (1, 12))


def cases(device: str, noise: float = 0.0, changes: dict[str, float] | None = None) -> list[dict[str, object]]:
    """Return products and copies of many sizes, as a device with other constants takes them."""
    who, rng = Predictor(changes=changes), np.random.default_rng(0)
    sizes = [("gemm", size) for size in SIZES] + [("copy", {"bytes": 4**n * 1024}) for n in range(3, 7)]
    rows = []
    for number, (schedule, workload) in enumerate(sizes):
        row = {"name": f"c{number}", "group": f"g{number % 4}", "device": device, "schedule": schedule}
        row |= {"workload": workload, "measured": {"latency_us": 1.0}}
        predicted = who.latency_us(MeasurementCase.model_validate(row))
        rows.append({**row, "measured": {"latency_us": predicted * float(np.exp(noise * rng.normal()))}})
    return rows


def written(tmp_path: Path, rows: list[dict[str, object]]) -> Path:
    file = tmp_path / "measured.yaml"
    file.write_text(measurements_text(str(file), "synthetic", rows))
    return file


def roofline(x: Array) -> Array:
    """Return logarithms of times of sixty shapes: the larger of two rates, a start, and two costs that add up."""
    a, b = np.meshgrid(np.linspace(0.2, 4, 10), np.linspace(0.1, 3, 6))
    rates = np.maximum(a * np.exp(x[0]), b * np.exp(x[1]))
    return np.log(rates + 0.4 * np.exp(x[2]) + 0.3 * a * b * np.exp(x[3]) + 0.2 * a**2 * np.exp(x[4])).ravel()


def test_intervals_hold_the_planted_constants_in_nine_of_ten_fits() -> None:
    rng, true, inside = np.random.default_rng(3), np.array([0.2, -0.15, 0.3, -0.25, 0.1]), np.zeros(5)
    for _ in range(200):
        fitted = ls.fit(roofline, roofline(true) + 0.03 * rng.normal(size=60), width=5)
        inside += (fitted.ends[:, 0] <= true) & (true <= fitted.ends[:, 1])
    assert (inside / 200 > 0.85).all()
    assert (inside / 200 < 0.95).all()


def test_constants_that_no_data_tells_apart_move_as_one() -> None:
    rng = np.random.default_rng(4)
    strong, other = rng.uniform(0.2, 1, 40), rng.uniform(0.2, 1, 40)
    jac = np.array([strong, other, 0.7 * strong, -0.3 * other, 0.001 * strong]).T
    assert ls.bundles(jac) in ([(0, 2), (1, 3)], [(1, 3), (0, 2)])
    truth = np.array([0.3, -0.2, 0.3, 0.2, 0.0])
    residuals = -jac @ truth + 0.001 * rng.normal(size=40)
    chosen = ls.choose(jac, residuals, [n % 5 for n in range(40)])
    x = ls.spread(jac, chosen, ls.solve(ls.bundled(jac, chosen), residuals))
    assert x == pytest.approx(truth, abs=0.01)
    assert not ls.choose(jac, 0.03 * rng.normal(size=40), [n % 5 for n in range(40)])


def test_planted_constants_come_back_and_are_written_with_basis_cases_and_interval(tmp_path: Path) -> None:
    key = "cores.aic.engines.MTE2.routes.gm_l1.bytes_per_cycle"
    before = dict(load_device("ascend_910b2").quantities())[key].value
    file = written(tmp_path, cases("ascend_910b2", 0.001, {key: before / 1.5}))
    done = calibrate(file, constants=(key,))
    (constant,) = done.constants
    assert constant.after == pytest.approx(before / 1.5, rel=0.02)
    assert constant.low < before / 1.5 < constant.high
    assert done.total.kept_out < done.total.before
    (tmp_path / "mine.yaml").write_text(done.device_text("ascend_910b2", "mine"))
    fact = dict(load_device(tmp_path / "mine.yaml").quantities())[key]
    assert (fact.value, fact.basis, len(fact.fitted_on or ())) == (constant.after, "fitted", len(SIZES) + 4)
    assert "90 % interval" in fact.source


def test_what_helps_no_kept_out_case_is_not_written(tmp_path: Path) -> None:
    done = calibrate(written(tmp_path, cases("ascend_910b2", 0.03)), constants=FIT)
    if not done.helps:
        with pytest.raises(CheckFailedError, match="nothing is written"):
            done.check()
    assert done.total.kept_out <= done.total.before * 1.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 3}, "3 measured times; at least 4"),
        ({"device": "h200"}, "cases of ascend_910b2, h200: which is to be fitted"),
        ({"twice": 1.5}, "cases c1 and twice ask for the same, and took"),
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
