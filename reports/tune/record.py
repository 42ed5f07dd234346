"""Predict every configuration of a sweep that was measured: ``python reports/tune/record.py SWEEP.csv FILE.py ...``.

The kernels are public and stay where they are published: each file is given by its path, and has the function that
`LAUNCHES` names.  Writes ``predictions.csv`` beside this script, from which ``reports/build.py tune`` makes the page.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.config.problem import KernelProblem
from npusim.simulation.request import Request
from npusim.tune.configurations import configurations_of
from npusim.tune.prediction import predict_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npusim.tune.prediction import Configuration

HERE = Path(__file__).resolve().parent
DEVICE = "h100"
#: Launches by kernel of the sweep; sizes of a shape by name, in the order that the sweep writes them.
LAUNCHES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "tut03_matmul": (
            "matmul_kernel[cdiv(M, BLOCK_SIZE_M) * cdiv(N, BLOCK_SIZE_N)](tensor(M, K), tensor(K, N), tensor(M, N), "
            "M, N, K, K, 1, N, 1, N, 1, BLOCK_SIZE_M=64, BLOCK_SIZE_N=64, BLOCK_SIZE_K=32, GROUP_SIZE_M=8, "
            "ACTIVATION='')",
            "MNK",
        ),
        "unsloth_rms": (
            "_rms_layernorm_forward[R](tensor(R, C), C, tensor(R, C), C, tensor(C), 1, tensor(R).to('float32'), 1, C, "
            "1e-6, next_power_of_2(C))",
            "RC",
        ),
        "tut02_softmax": (
            "softmax_kernel[P](tensor(R, C).to('float32'), tensor(R, C).to('float32'), C, C, R, C, next_power_of_2(C))",
            "RC",
        ),
    }
)
#: Fields by the name that the sweep has.
FIELDS: Mapping[str, str] = MappingProxyType({"BM": "BLOCK_SIZE_M", "BN": "BLOCK_SIZE_N", "BK": "BLOCK_SIZE_K"})
COLUMNS = ("kernel", "shape", "config", "measured_us", "hash", "predicted_us", "class", "spilled", "warps", "limit")


def configurations(rows: list[dict[str, str]], files: Mapping[str, Path]) -> Iterator[Configuration]:
    """Yield the configuration of each row."""
    for row in rows:
        launch, names = LAUNCHES[row["kernel"]]
        sizes: dict[str, Any] = dict(zip(names, map(int, row["shape"].split("x")), strict=True))
        values = {n: int(v) for n, _, v in (text.partition("=") for text in row["config"].split())}
        if "programs" in values:
            sizes["P"] = values.pop("programs")
        named = files[launch.partition("[")[0]]
        request = Request(f"{named}::{launch}", hw=DEVICE, problem=KernelProblem.of(sizes), l2="steady")
        yield from configurations_of(request, {FIELDS.get(n, n): (v,) for n, v in values.items()})


def main() -> None:
    """Write the predictions of the kernels whose files are given."""
    parser = argparse.ArgumentParser(description="Predict every configuration of a sweep that was measured.")
    parser.add_argument("sweep", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    files = {name: path for path in given.files for name in re.findall(r"(?m)^def (\w+)\(", path.read_text("utf-8"))}
    with given.sweep.open(encoding="utf-8", newline="") as file:
        every = list(csv.DictReader(file))
    rows = [r for r in every if r["kernel"] in LAUNCHES and LAUNCHES[r["kernel"]][0].partition("[")[0] in files]
    made = predict_all(list(configurations(rows, files)))
    with (HERE / "predictions.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row, p in zip(rows, made, strict=True):
            us = "" if p.us is None else f"{p.us:.2f}"
            measured = row["kernel"], row["shape"], row["config"], row["us"], row["output_hash"]
            writer.writerow((*measured, us, p.key, p.spilled, p.warps, p.limit))


if __name__ == "__main__":
    main()
