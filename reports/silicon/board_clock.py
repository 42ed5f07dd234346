"""Fit an RTX PRO 6000's clock under products, and what it falls to, on `reports/sm120/predictions.csv`.

    python reports/silicon/board_clock.py [PREDICTIONS.csv]

prints ``products_clock_hz``, ``power.load_w`` and ``power.settle_s`` of all cases that decide them and without each
kernel, and writes ``left_out_us``: each case as all cases of other shapes predict it.  Cycles do not depend on these
constants, so that a case is timed once.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from functools import cache, lru_cache
from math import log, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from npusim.config.load import load_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from npusim.config.device import DeviceSpec, PowerSpec

PREDICTIONS = Path(__file__).parents[1] / "sm120" / "predictions.csv"
DEVICE = "rtx_pro_6000"
#: In groups of another board than the file's.
BOARD = "at the vendor's clock"
#: GHz, hundreds of watts and seconds: where a fit starts, its least and most values.
STARTS = ((2.3, 10, 0.1), (2.3, 13, 0.1))
LEAST, MOST = (2, 6, 0.005), (2.7, 30, 1)


@cache
def _device() -> DeviceSpec:
    return load_device(DEVICE)


@lru_cache(maxsize=64)
def _law(load_w: float, settle_s: float, calls: int) -> PowerSpec:
    """Return the device's law of power with other constants."""
    power = _device().power
    assert power is not None
    values = {"load_w": load_w, "settle_s": settle_s, "calls_count": calls}
    return power.model_copy(update={k: getattr(power, k).model_copy(update={"value": v}) for k, v in values.items()})


class Case(NamedTuple):
    """A published time, its prediction, and what the clock depends on."""

    kernel: str
    shape: str
    us: float
    predicted_us: float
    core_us: float
    clock_hz: float
    load: float
    calls: int

    def at(self, constants: Sequence[float]) -> float:
        """Return the predicted microseconds with a clock in GHz, watts in hundreds, and a time constant in seconds."""
        return self.predicted_us + self.core_us * (self.clock_hz / self.clock(constants) - 1)

    def clock(self, constants: Sequence[float]) -> float:
        """Return the mean clock of a board with these constants."""
        free = constants[0] * 1e9
        power = _law(constants[1] * 100, constants[2], self.calls)
        assert power.load_clock_hz is not None
        seconds = self.core_us * 1e-6 * self.clock_hz / free
        limit = power.clock(self.load, seconds) * power.load_clock_hz.value
        return free * power.mean_clock(min(1.0, limit / free), seconds)


def fitted(cases: Sequence[Case]) -> tuple[float, ...]:
    """Return the constants with the least squares of the logarithm, each kernel with the same weight."""
    counts = Counter(case.kernel for case in cases)

    def errors(constants: npt.NDArray[np.float64]) -> list[float]:
        return [log(case.at(constants.tolist()) / case.us) / sqrt(counts[case.kernel]) for case in cases]

    found = [least_squares(errors, start, bounds=(LEAST, MOST)) for start in STARTS]
    return tuple(float(x) for x in min(found, key=lambda one: one.cost).x)


def main() -> None:
    """Print the constants, and write the column."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=PREDICTIONS)
    chosen = parser.parse_args()
    with chosen.file.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    cases = {
        n: _case(row)
        for n, row in enumerate(rows)
        if row["is_fitted"] and row["group"].startswith(DEVICE) and BOARD not in row["group"]
    }
    print("all", _said(fitted([*cases.values()])))
    for kernel in sorted({case.kernel for case in cases.values()}):
        print("without", kernel, _said(fitted([case for case in cases.values() if case.kernel != kernel])))
    for n, row in enumerate(rows):
        row["left_out_us"] = ""
        if n in cases:
            others = [case for case in cases.values() if case.shape != cases[n].shape]
            row["left_out_us"] = f"{cases[n].at(fitted(others)):.1f}"
    with chosen.file.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for kernel in sorted({case.kernel for case in cases.values()}):
        signed = [float(rows[n]["left_out_us"]) / case.us - 1 for n, case in cases.items() if case.kernel == kernel]
        sizes = np.abs(signed)
        print(
            kernel,
            len(signed),
            f"median {np.median(sizes):.3f}, p90 {np.percentile(sizes, 90):.3f}, mean {np.mean(signed):.3f}",
        )


def _case(row: dict[str, str]) -> Case:
    kernel = row["kernel"] + (" D256" if row["kernel"] == "flashinfer" and " D256" in row["shape"] else "")
    us, predicted, core, clock, load = (float(row[k]) for k in ("us", "predicted_us", "core_us", "clock_hz", "load"))
    return Case(kernel, row["shape"], us, predicted, core, clock, load, int(row["calls"]))


def _said(constants: Sequence[float]) -> str:
    clock, watts, settle = constants
    return f"products_clock_hz {clock:.3f}e9, load_w {watts * 100:.0f}, settle_s {settle:.3f}"


if __name__ == "__main__":
    main()
