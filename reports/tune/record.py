"""Predict every configuration of a sweep that was measured: ``python reports/tune/record.py SWEEP.csv FILE.py ...``.

The kernels are public and stay where they are published: each file is given by its path, and has the function that
`LAUNCHES` names.  Writes `FILE` in this script's folder, from which ``reports/build.py tune`` makes the page.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.config.bands import numbers_of
from npusim.config.load import load_device
from npusim.config.problem import KernelProblem
from npusim.simulation.request import Request
from npusim.studies.tune.configurations import configurations_of
from npusim.studies.tune.prediction import predict_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npusim.config.device import L2State
    from npusim.studies.tune.prediction import Configuration

HERE = Path(__file__).resolve().parent
DEVICE, FILE = "h100", "predictions.csv"
#: Shapes whose inputs L2 still has when a launch of the graph reads them.  source: the norm of 2.5 MiB takes 1.6 us
#: without the gap, less than a copy of 2 MiB from memory (1.8 us, reports/silicon/dirty_h100.json, less the launch).
IN_L2 = frozenset({("unsloth_rms", "256x5120")})
#: Between launches of a graph on the chip that measured the sweep.  source: the sweep's description, 1.2 to 1.5.
GAP_US = 1.3


class Launch(NamedTuple):
    """A kernel's launch.

    ``sizes``: of a shape, in the order that the sweep writes them; ``tile``: how names of the M, N and K of a product's
    tile begin, empty for a kernel without products.
    """

    text: str
    sizes: tuple[str, ...]
    tile: str = ""


#: Launches by kernel of the sweep.
LAUNCHES: Mapping[str, Launch] = MappingProxyType(
    {
        "tut03_matmul": Launch(
            "matmul_kernel[cdiv(M, BLOCK_SIZE_M) * cdiv(N, BLOCK_SIZE_N)](tensor(M, K), tensor(K, N), tensor(M, N), "
            "M, N, K, K, 1, N, 1, N, 1, BLOCK_SIZE_M=64, BLOCK_SIZE_N=64, BLOCK_SIZE_K=32, GROUP_SIZE_M=8, "
            "ACTIVATION='')",
            ("M", "N", "K"),
            "BLOCK_SIZE_",
        ),
        "kernels_flash": Launch(
            "_fwd_kernel[cdiv(N, BLOCK_M), B * H](tensor(B * H, N, D), tensor(B * H, N, D), tensor(B * H, N, D), "
            "0.125, tensor(B * H, N).to('float32'), tensor(B * H, N, D), H * N * D, N * D, D, 1, H * N * D, N * D, D, "
            "1, H * N * D, N * D, D, 1, H * N * D, N * D, D, 1, B, H, N, B * H * N, BLOCK_M=64, BLOCK_DMODEL=D, "
            "BLOCK_N=64, IS_CAUSAL=True)",
            ("B", "H", "N", "D"),
            "BLOCK_",
        ),
        "unsloth_rms": Launch(
            "_rms_layernorm_forward[R](tensor(R, C), C, tensor(R, C), C, tensor(C), 1, tensor(R).to('float32'), 1, C, "
            "1e-6, next_power_of_2(C))",
            ("R", "C"),
        ),
        "tut02_softmax": Launch(
            "softmax_kernel[P](tensor(R, C).to('float32'), tensor(R, C).to('float32'), C, C, R, C, next_power_of_2(C))",
            ("R", "C"),
        ),
    }
)
#: ``numbers``: a hash of the device file's numbers (`npusim.config.bands.numbers_of`) that the predictions use.
COLUMNS = (
    *("kernel", "shape", "config", "measured_us", "hash"),
    *("predicted_us", "class", "spilled", "warps", "limit", "numbers"),
)


def configurations(rows: list[dict[str, str]], files: Mapping[str, Path]) -> Iterator[Configuration]:
    """Yield the configuration of each row."""
    for row in rows:
        launch = LAUNCHES[row["kernel"]]
        sizes: dict[str, Any] = dict(zip(launch.sizes, map(int, row["shape"].split("x")), strict=True))
        values = {n: int(v) for n, _, v in (text.partition("=") for text in row["config"].split())}
        if "programs" in values:
            sizes["P"] = values.pop("programs")
        path = files[launch.text.partition("[")[0]]
        l2: L2State = "repeated" if (row["kernel"], row["shape"]) in IN_L2 else "steady"
        request = Request(f"{path}::{launch.text}", hw=DEVICE, problem=KernelProblem.of(sizes), l2=l2)
        yield from configurations_of(request, {_field(launch, n): (v,) for n, v in values.items()})


def _field(launch: Launch, name: str) -> str:
    """Return a kernel's name for a field of the sweep: ``BM`` of one is ``BLOCK_M`` of another."""
    return launch.tile + name[1:] if name in ("BM", "BN", "BK") else name


def recorded() -> list[dict[str, str]]:
    """Return the rows of the file, by `COLUMNS`."""
    with (HERE / FILE).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Write the predictions of the kernels whose files are given."""
    parser = argparse.ArgumentParser(description="Predict every configuration of a sweep that was measured.")
    parser.add_argument("sweep", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    files = {name: path for path in given.files for name in re.findall(r"(?m)^def (\w+)\(", path.read_text("utf-8"))}
    with given.sweep.open(encoding="utf-8", newline="") as file:
        every = list(csv.DictReader(file))
    rows = [r for r in every if r["kernel"] in LAUNCHES and LAUNCHES[r["kernel"]].text.partition("[")[0] in files]
    listed = list(configurations(rows, files))
    made = predict_all(listed, given.jobs, lambda n, of: sys.stderr.write(f"\r{n} of {of}"))
    with (HERE / FILE).open("w", encoding="utf-8", newline="") as file:
        writer, numbers = csv.writer(file, lineterminator="\n"), numbers_of(load_device(DEVICE))
        writer.writerow(COLUMNS)
        for row, p in zip(rows, made, strict=True):
            us = "" if p.us is None else f"{p.us:.2f}"
            measured = row["kernel"], row["shape"], row["config"], row["us"], row["output_hash"]
            writer.writerow((*measured, us, p.key, p.spilled, p.warps, p.limit, numbers))


if __name__ == "__main__":
    main()
