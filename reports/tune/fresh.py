"""Predict the launches of `recorded.FRESH` from their recorded calls: ``python -m reports.tune.fresh CALLS.npz``.

``CALLS.npz`` has one call of `npusim.record` for each measured launch, and ``CALLS.csv`` beside it names the launch of
each: ``call`` (its number), and ``kernel``, ``shape`` and ``config`` as in `recorded.FRESH`.  Writes `FILE` in this
script's folder, a line after each prediction, from which ``reports/validation/bands.py`` computes the bands of an
H200's launches; lines of the device's present numbers stay.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from npusim.config.bands import numbers_of
from npusim.config.load import load_device
from npusim.simulation.request import Request
from npusim.studies.tune.prediction import Configuration, predict
from reports.tune.recorded import DEVICE, L2, fresh_shapes

HERE, FILE = Path(__file__).resolve().parent, "fresh_predictions.csv"
#: What names a launch, and what is predicted of it: the time of one of many equal launches, and its kind
#: (`npusim.config.bands.launch_kind`); both are empty if the launch is refused.
NAMES = ("kernel", "shape", "config")
COLUMNS = (*NAMES, "predicted_us", "kind", "numbers")


def predictions() -> dict[tuple[str, ...], dict[str, str]]:
    """Return the rows of the file by launch."""
    with (HERE / FILE).open(encoding="utf-8", newline="") as file:
        return {tuple(row[n] for n in NAMES): row for row in csv.DictReader(file)}


def main() -> None:
    """Write the predictions of all launches that were measured."""
    parser = argparse.ArgumentParser(description="Predict recorded launches that were measured at fresh shapes.")
    parser.add_argument("calls", type=Path)
    path = parser.parse_args().calls
    with path.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        calls = {tuple(row[n] for n in NAMES): row["call"] for row in csv.DictReader(file)}
    numbers, target = numbers_of(load_device(DEVICE)), HERE / FILE
    known = {k: r for k, r in predictions().items() if r["numbers"] == numbers} if target.is_file() else {}
    measured = [tuple(row[n] for n in NAMES) for row in fresh_shapes()]
    with target.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for done, launch in enumerate(measured, 1):
            row = known.get(launch)
            if row is None:
                p = predict(Configuration({}, Request(f"{path}::{calls[launch]}", hw=DEVICE, l2=L2)))
                time = "" if p.us is None else f"{p.us + p.launch_us:.3f}"
                kind = p.errors.kind if p.errors is not None else ""
                row = dict(zip(COLUMNS, (*launch, time, kind, numbers), strict=True))
            writer.writerow(row)
            out.flush()
            sys.stderr.write(f"\r{done} of {len(measured)}")
    sys.stderr.write("\n")


if __name__ == "__main__":
    main()
