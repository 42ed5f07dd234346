"""What stands behind residuals: how hosts add to kernels in a row, and the tiles that a tuning bank recorded."""

from __future__ import annotations

from fnmatch import fnmatchcase
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.load import load_device
from npusim.config.problem import GemmProblem
from npusim.run import run
from npusim.validate.times import Predictor
from reports.ascend_timing import study

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Times of calls in a row, by who took them.
ROWS: Mapping[str, str] = MappingProxyType(
    {
        "PTO's kernels, one and eight cores": "fa_x86_*",
        "PTO's kernels, all cores": "fa_b2b_*",
        "torch.matmul": "torchmm_*",
        "PTO-DSL's products": "ptodsl_*",
        "CANN's attention through torch": "cann_*",
    }
)
#: Cores, rows, columns and k of a tile, and k loaded at once, as the bank records them for its times.
TILES: Mapping[str, tuple[int, int, int, int, int]] = MappingProxyType(
    {
        "bank_51200x32x64": (20, 320, 32, 32, 64),
        "bank_5120x256x512": (24, 320, 32, 32, 64),
        "bank_25600x128x448": (20, 128, 128, 32, 448),
        "bank_4096x208x208": (24, 512, 32, 16, 208),
        "bank_64x96x128": (24, 16, 16, 128, 128),
        "bank_64x256x512": (16, 16, 64, 128, 128),
        "bank_64x1024x784": (16, 16, 256, 112, 112),
        "bank_32x512x256": (16, 16, 64, 128, 128),
        "bank_512x768x16": (8, 64, 64, 16, 16),
        "bank_1216x1024x1024": (19, 64, 512, 32, 128),
    }
)


class Tiled(NamedTuple):
    """A product of the bank: its tile, the error with npusim's own tile and with that, and what is missing then."""

    name: str
    cores: int
    tile: str
    error: float
    recorded: float
    behind_cycles: float


def hosts() -> dict[str, tuple[int, float, float]]:
    """Return cases and median errors of calls in a row: host and device in parallel, or one after the other."""
    predictor, found = Predictor(), {}
    for who, pattern in ROWS.items():
        errors = []
        for case in (c for c in study.cases() if fnmatchcase(c.name, pattern)):
            timing, measured = predictor.result(case).timing, case.measured.latency_us
            issue = load_device(case.device).timed_launch().host_issue_s
            assert timing is not None
            assert measured is not None
            assert issue is not None
            device = (timing.cycles / timing.clock_hz + timing.stream_s) * 1e6
            host = case.host_floor_us or issue.value * 1e6
            errors.append([abs(measured.relative_error(us)) for us in (max(host, device), host + device)])
        larger, added = (median(e[i] for e in errors) for i in range(2))
        found[who] = len(errors), larger, added
    return found


def tiled() -> list[Tiled]:
    """Return the bank's products with the tiles of its records, on as many cores."""
    found, predictor = [], Predictor()
    for case in (c for c in study.cases() if c.name in TILES):
        cores, m, n, k, load = TILES[case.name]
        assert case.measured.core_us is not None
        w, measured = case.workload, case.measured.core_us
        result = run(
            "gemm",
            hw=case.device,
            problem=GemmProblem(m=w.m or 0, n=w.n or 0, k=w.k or 0),
            l2="warm",
            numerics=False,
            trace_groups=(),
            overrides={"group_count": str(cores)},
            tiling={"block_m": m, "block_n": n, "block_k": k, "load_k": load},
        )
        own = measured.relative_error(predictor.quantity(case, "core_us"))
        us = result.device.seconds(result.cycles) * 1e6
        behind = (measured.low - us) / 1e6 * float(result.device.clock_hz.value)
        error, tile = measured.relative_error(us), f"{m} x {n} x {k}, loads of {load}"
        found.append(Tiled(case.name, cores, tile, own, error, behind))
    return found
