"""Page: attention kernels in production and npusim's own: predicted and measured times, errors, and FA3's tile."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import npusim
from npusim.config.bands import validated
from npusim.config.cases import load_measurements
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.errors import NpusimError
from npusim.studies.validate.measured_times import validate_times
from reports.parts.document import Section, gather, percent, save_page, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.config.cases import MeasurementCase
    from npusim.studies.validate.measured_times import Residual

__all__ = ["KERNELS", "load_rows", "write"]

HERE = Path(__file__).resolve().parent
#: Where rows come from: copies of the shared files, and calls measured after the kernels were written.
FILES = (
    ("seen", HERE / "measured_h200_production.yaml"),
    ("held out", HERE.parent / "silicon" / "h200_production.yaml"),
    ("seen", HERE / "measured_h200_served.yaml"),
    ("seen", HERE / "measured_ascend_cann.yaml"),
)
#: Name of a kernel in the tiling of a case -> its usual name.
KERNELS = {"cudnn": "cuDNN", "fa2": "FlashAttention-2", "triton": "FlexAttention", "cann": "CANN"}
#: Cases of kernels that have no program here, measured at another clock than the device's: not alike.
LEFT_OUT = "tileops_"
DEVICE, HEADS, KEYS = "h200", 16, (1024, 4096)
#: Tiles of rows and keys that FA3's kernel could use: two or three groups of 64 rows, whole groups of 16 keys.
ROWS, COLUMNS = (128, 192), (64, 96, 128, 176)
DIMS = (64, 128, 256)


class Row(NamedTuple):
    """One measured call."""

    kernel: str
    source: str
    case: MeasurementCase
    residual: Residual


def write(folder: Path) -> list[Path]:
    """Write ``production.md`` and its data to ``folder``."""
    content = gather("production", (part() for part in (_measured, _beside, _tiles)))
    return save_page(folder, "production", content, {})


def load_rows() -> list[Row]:
    """Return the whole calls of all files, predicted."""
    rows = []
    for source, path in FILES:
        cases = {case.name: case for case in load_measurements(path).cases}
        for residual in validate_times(path).residuals:
            case = cases[residual.name]
            if residual.quantity.endswith("_us") and not case.name.startswith(LEFT_OUT):
                rows.append(Row(_kernel(case), source, case, residual))
    return rows


def _kernel(case: MeasurementCase) -> str:
    """Return whose kernel a case is: CANN's on Ascend, else the one that its tiling names, FlexAttention's none."""
    return "cann" if case.device.startswith("ascend") else str((case.tiling or {}).get("kernel", "triton"))


def _measured() -> Section:
    rows, data = [], {}
    every = load_rows()
    for kernel, source in product(KERNELS, ("seen", "held out")):
        some = [r for r in every if (r.kernel, r.source) == (kernel, source)]
        if not some:
            continue
        errors = [r.residual.relative_error for r in some]
        sizes = sorted(map(abs, errors))
        worst = max(some, key=lambda r: abs(r.residual.relative_error))
        figures = {
            "calls": len(some),
            "median": median(sizes),
            "most": sizes[int(0.9 * (len(sizes) - 1))],
            "bias": median(errors),
            "worst": worst.residual.relative_error,
            "worst_case": worst.case.name,
        }
        data[f"{kernel} {source}"] = figures
        shown = [percent(float(figures[k]), sign="+") for k in ("bias", "worst")]  # type: ignore[arg-type]
        shares = [percent(float(figures[k])) for k in ("median", "most")]  # type: ignore[arg-type]
        rows.append([KERNELS[kernel], source, len(some), *shares, *shown, worst.case.name])
    header = ["kernel", "cases", "calls", "half within", "nine of ten within", "signed median", "worst", "worst call"]
    calls = [
        [KERNELS[r.kernel], r.source, r.case.name, r.residual.measured.low, r.residual.predicted, _percent(r)]
        for r in every
    ]
    listed = table(["kernel", "cases", "call", "measured, us", "predicted, us", "error"], calls)
    band = validated(load_device(DEVICE), "flash").most_error
    assert band is not None
    sizes = sorted(abs(r.residual.relative_error) for r in every)
    fields = {
        "summary": table(header, rows),
        "calls": listed,
        "call_count": len(every),
        "all_half": percent(median(sizes)),
        "all_most": percent(sizes[int(0.9 * (len(sizes) - 1))]),
        "band": percent(band, 0),
    }
    return fields, {"summary": data}


def _percent(row: Row) -> str:
    return percent(row.residual.relative_error, sign="+")


def _beside() -> Section:
    """Time the same call by each kernel."""
    rows, data = [], {}
    kernels = ("triton", "fa2", "fa3", "cudnn")
    for dim, keys, causal in product((64, 128), KEYS, (False, True)):
        times = {k: _time_us(dim, keys, causal, kernel=k) for k in kernels}
        name = f"d {dim}, {keys} keys{', causal' if causal else ''}"
        data[name] = times
        rows.append([name, *(times[k] for k in kernels)])
    header = ["call", "npusim's own (Triton)", "FlashAttention-2", "FlashAttention-3", "cuDNN"]
    gains = [t["triton"] / min(t["fa3"], t["cudnn"]) for t in data.values() if t["triton"]]  # type: ignore[operator,type-var]
    fields = {"beside": table(header, rows), "heads": HEADS, "gain": median(gains), "gain_most": max(gains)}
    return fields, {"beside": data, "gain": {"median": median(gains), "most": max(gains)}}


def _tiles() -> Section:
    """Time every tile of FA3's that its kernel has a layout for; a change of under 2 % is none."""
    rows, data = [], {}
    for dim, causal in product(DIMS, (False, True)):
        own = _time_us(dim, 4096, causal, kernel="fa3")
        times = dict(_tile_times(dim, causal))
        best = min(times, key=lambda t: times[t])
        gain = (own or 0.0) / times[best] - 1.0
        name = f"d {dim}{', causal' if causal else ''}"
        data[name] = {"own_us": own, "best": best, "best_us": times[best], "gain": gain, "tiles": times}
        rows.append([name, own, best if gain > 0.02 else "its own", times[best], percent(gain)])
    header = ["call", "own tile, us", "best tile tried", "us", "faster by"]
    changed = [name for name, figures in data.items() if figures["gain"] > 0.02]  # type: ignore[operator]
    fields = {"tiles": table(header, rows), "tiles_changed": len(changed), "tiles_all": len(data)}
    return fields, {"tiles": data}


def _tile_times(dim: int, causal: bool) -> Iterator[tuple[str, float]]:
    for rows, columns in product(ROWS, COLUMNS):
        time = _time_us(dim, 4096, causal, kernel="fa3", block_q=rows, block_kv=columns)
        if time is not None:
            yield f"{rows} x {columns}", time


def _time_us(dim: int, keys: int, causal: bool, **tiling: Any) -> float | None:
    """Return the time of a call; None where the kernel has no layout for the tile."""
    problem = Problem(heads=HEADS, kv_heads=HEADS, seq_q=keys, seq_kv=keys, head_dim=dim, causal=causal)
    try:
        return npusim.run("flash", hw=DEVICE, problem=problem, tiling=tiling, numerics=False).latency_us
    except NpusimError:
        return None
