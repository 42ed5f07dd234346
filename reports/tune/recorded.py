"""Predict recorded launches of public kernels that an H200 has measured: ``recorded.py SWEEP.csv FOLDER``.

The kernels are public and stay where they are published; their launches are recorded by `npusim.record`, which also
stores what an autotuner would try.  ``FOLDER`` has a file of calls for each kernel and shape of the sweep, named by the
number of that pair in the sweep and the kernel: ``06_sglang_decode_stage1.npz``.  Of each kernel, the first shape that
has a file, at most twelve configurations are drawn; those that are not read are named and left out.  Writes `FILE` in
this script's folder, for ``tests/evaluate/test_trust.py``, and prints errors and regrets by kernel.

A measured time is that of one of many equal launches in a graph (the sweep's first lines), so that a prediction is of
such a launch too: ``repeated``, with the lines that launches on the same inputs leave in L2, and with the time of a
launch besides that on the cores.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from npusim.config.bands import numbers_of
from npusim.config.load import load_device
from npusim.kernels.triton.calls import read_calls
from npusim.simulation.request import Request
from npusim.studies.tune.prediction import Configuration, predict
from reports.tune.record import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
DEVICE, FILE, OTHERS, FRESH = "h200", "recorded.csv", "other_shapes.csv", "fresh_shapes.csv"
#: Launches of the sweep follow one another on the same inputs (measurements/README.md).
L2: Final = "repeated"
#: Configurations of a kernel: the largest number, and the smallest number of measured ones whose order is meaningful.
MOST, FEWEST = 12, 6


def drawn(rows: list[dict[str, str]], folder: Path) -> Iterator[tuple[dict[str, str], Configuration]]:
    """Yield the rows that are predicted, each with its configuration."""
    shapes: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        shapes.setdefault((row["kernel"], row["shape"]), []).append(row)
    done, rng = set[str](), np.random.default_rng(0)
    for number, ((kernel, _), own) in enumerate(shapes.items()):
        file, measured = folder / f"{number:02d}_{kernel}.npz", [i for i, r in enumerate(own) if r["us"]]
        if kernel in done or not file.is_file() or len(measured) < FEWEST:
            continue
        done.add(kernel)
        is_each = len(read_calls(file)) == len(own)
        for i in sorted(rng.choice(measured, min(MOST, len(measured)), replace=False)):
            name, tile = (f"{file}::{i}", {}) if is_each else (f"{file}::0", {"config": int(i)})
            yield own[i], Configuration({}, Request(name, hw=DEVICE, tiling=tile, l2=L2))


def other_shapes() -> list[dict[str, str]]:
    """Return the times of ten of these kernels at 17 other shapes, measured in the same way: the rows of `OTHERS`.

    ``half``: ``given`` to find mechanisms with, or ``kept`` to check them with; shapes were shared out by a hash of the
    kernel's name before any of them was predicted.
    """
    return list(csv.DictReader((HERE / OTHERS).open(encoding="utf-8")))


def fresh_shapes() -> list[dict[str, str]]:
    """Return the times of launches of 44 public kernels at shapes and with warps that no constant was fitted on,
    measured in the same way: the rows of `FRESH`.

    ``kernel``: the library's function and the kernel that it launches, named after the library; ``shape``: its sizes
    and its format; ``half``: as in `other_shapes`, by a hash of the library's function and the shape.
    """
    return list(csv.DictReader((HERE / FRESH).open(encoding="utf-8")))


def main() -> None:
    """Write the predictions of the kernels whose calls are given, each as it ends; those of the file stay."""
    parser = argparse.ArgumentParser(description="Predict recorded launches of kernels that were measured.")
    parser.add_argument("sweep", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    lines = [line for line in given.sweep.read_text("utf-8").splitlines() if not line.startswith("#")]
    numbers, target = numbers_of(load_device(DEVICE)), HERE / FILE
    stored = list(csv.DictReader(target.open(encoding="utf-8"))) if target.is_file() else []
    known = {(r["kernel"], r["shape"], r["config"]): r for r in stored if r["numbers"] == numbers}
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row, configuration in drawn(list(csv.DictReader(lines)), given.folder):
            shape, config = (_words(row[name]) for name in ("shape", "config"))
            if not (found := known.get((row["kernel"], shape, config))):
                p = predict(configuration)
                if p.us is None:
                    sys.stderr.write(f"refused: {row['kernel']} {config}: {p.reason}\n")
                    continue
                measured = row["kernel"], shape, config, row["us"], row["hash"]
                values = (*measured, f"{p.us + p.launch_us:.2f}", p.key, p.spilled, p.warps, p.limit, numbers)
                found = dict(zip(COLUMNS, map(str, values), strict=True))
            writer.writerow(found)
            file.flush()
    sys.stdout.write("\n".join(summary(list(csv.DictReader(target.open(encoding="utf-8"))))) + "\n")


def summary(rows: list[dict[str, str]]) -> Iterator[str]:
    """Yield a line for each kernel: signed errors in percent, and the loss of the best predictions."""
    kernels: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        kernels.setdefault(row["kernel"], []).append((float(row["predicted_us"]), float(row["measured_us"])))
    yield "kernel                     count   mean  least   most  mean size  regret of 1  of 2"
    for kernel, times in kernels.items():
        errors = 100 * np.array([predicted / measured - 1 for predicted, measured in times])
        in_order, best = [m for _, m in sorted(times)], min(m for _, m in times)
        lost = [100 * (min(in_order[:n]) / best - 1) for n in (1, 2)]
        parts = errors.mean(), errors.min(), errors.max(), abs(errors).mean()
        yield f"{kernel:<25} {len(times):>6} " + " ".join(f"{x:>6.1f}" for x in (*parts, *lost))


def _words(text: str) -> str:
    """Return the fields of an object of JSON as they are written in the other sweep: ``BM=64 warps=4``."""
    return " ".join(f"{name}={value}" for name, value in json.loads(text).items())


if __name__ == "__main__":
    main()
