"""Page: the best tiles of two models on the 910B2, the proof, and the gain of other hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import npusim
from npusim.config.load import load_device
from npusim.report.search_tables import front_of, map_of
from reports.parts.chart import svg
from reports.parts.document import Section, gather, percent, save_page, table
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from npusim.studies.explore import Exploration

__all__ = ["write"]

HW = "ascend_910b2"
#: Kernels that are searched, each at one pace: schedule, whose barriers between vector instructions, and its name here.
KERNELS: tuple[tuple[str, dict[str, str], str], ...] = (
    ("flash", {"kernel": "pto", "barriers": "needed"}, "flash, PTO's"),
    ("flash", {"kernel": "cann", "barriers": "every"}, "flash, CANN's"),
    ("pasa", {}, "pasa"),
)
MODELS, LENGTHS = ("pangu_38b", "qwen2_7b"), (2048, 8192, 32768)
TILES = {"block_q": (64, 96, 128), "block_kv": (128, 256, 512), "depth": (2, 4), "vector_rows": (16, 32)}
#: Lengths at which fronts and other hardware are looked at.
SHORT = 2048
EXP = "cores.aiv.engines.VECTOR.ops.exp_float16.slope_cycles_per_repeat"
CHANGES = (
    ("L0C doubled", "cores.aic.buffers.L0C.capacity_bytes", 2.0),
    ("FP16 exp at half the cost", EXP, 0.5),
    ("HBM x 1.5", "links.hbm.bytes_per_s", 1.5),
)


def write(folder: Path) -> list[Path]:
    """Write ``explore.md``, its figures and charts to ``folder``."""
    charts: dict[str, str] = {}
    sections = (_best(charts), _fronts(charts), _changes())
    return save_page(folder, "explore", gather("explore", sections), charts)


def _search(schedule: str, fields: Mapping[str, object], model: str, seq: int, **more: Any) -> Exploration:
    """Search the tiles of one kernel; fields that are not axes have the values that its schedule declares."""
    declared = declared_tiling(schedule, HW, **fields)
    return npusim.explore(schedule, TILES, hw=HW, workload=model, seq=seq, tiling=declared, **more)


def _us(schedule: str, model: str, seq: int, **fields: Any) -> float:
    tiling = declared_tiling(schedule, HW, **fields)
    return npusim.run(schedule, hw=HW, workload=model, seq=seq, tiling=tiling, numerics=False).latency_us


def _best(charts: dict[str, str]) -> Section:
    """The best tile of each kernel, and the gain of each field while the others have their declared values."""
    rows, gains, figures, simulated, total, alike = [], [], {}, 0, 0, 0
    lost: list[float] = []
    for model in MODELS:
        for seq in LENGTHS:
            for schedule, fields, name in KERNELS:
                found = _search(schedule, fields, model, seq)
                counts, best = found.counts(), found.feasible[0]
                simulated, total = simulated + counts["ok"], total + len(found.outcomes)
                if (model, seq, name) == (MODELS[0], SHORT, KERNELS[0][2]):
                    drawn = map_of([o.row() for o in found.outcomes], "block_kv", "block_q")[0]
                    title = f"{name}: smallest latency by keys and rows of a block, {model}, {seq} tokens"
                    charts["heatmap.svg"] = svg({**drawn, "title": title})
                point = {k: v for k, v in best.point.items() if k in TILES}
                usual = _us(schedule, model, seq, **fields)
                tile = " ".join(f"{k}={v}" for k, v in point.items())
                assert best.latency_us is not None
                lost.append(usual / best.latency_us)
                rows.append([model, seq, name, tile, best.latency_us, usual, _percent(lost[-1])])
                own = {k: usual / _us(schedule, model, seq, **fields, **{k: v}) for k, v in point.items()}
                gains.append([model, seq, name, *("" if g == 1 else _percent(g) for g in own.values())])
                figures[f"{model} {seq} {name}"] = {
                    "tile": tile,
                    "us": best.latency_us,
                    "default_us": usual,
                    "gain of a field alone": own,
                }
                if fields.get("kernel") == "cann":  # the one kernel of two_level
                    alike += _us("two_level", model, seq, **fields, **point) == best.latency_us
    header = ["model", "tokens", "kernel", "best tile", "us", "us, declared tile", "loss of the declared tile"]
    fields_: dict[str, object] = {
        "best": table(header, rows),
        "gains": table(["model", "tokens", "kernel", *TILES], gains),
        "simulated": simulated,
        "total": total,
        "lost_low": _percent(min(lost)),
        "lost_high": _percent(max(lost)),
        "searches": len(lost),
        "alike": alike,
        "compared": len(MODELS) * len(LENGTHS) * sum(fields.get("kernel") == "cann" for _, fields, _ in KERNELS),
    }
    return fields_, {"best": figures}


def _percent(ratio: float) -> str:
    return percent(ratio - 1)


def _fronts(charts: dict[str, str]) -> Section:
    precisions = ("fa2_fp32", "fa16_32", "fa16", "fp16_mean", "fp32_mean")
    rows = []
    for (schedule, fields, name), own in ((KERNELS[0], precisions[:3]), (KERNELS[2], precisions[3:])):
        for load in ("pangu_38b", "pasa_uniform", "pasa_resonance"):
            found = npusim.explore(
                schedule,
                {"precision": own, "block_kv": (128, 256)},
                hw=HW,
                workload=load,
                seq=SHORT,
                tiling=declared_tiling(schedule, HW, **fields),
                pareto=True,
            )
            listed = [o.row() for o in found.outcomes]
            spec = front_of(listed, ("precision", "block_kv"))[0]
            charts[f"front_{schedule}_{load}.svg"] = svg({**spec, "title": f"{name}, inputs of {load}, {SHORT} tokens"})
            for o in found.feasible:
                error = "not finite" if o.relative_rmse is None else o.relative_rmse
                is_on = "yes" if o in found.front else ""
                rows.append([load, name, o.point["precision"], o.point["block_kv"], o.latency_us, error, is_on])
    header = ["inputs", "kernel", "precision", "block_kv", "us", "relative RMSE", "on the front"]
    figures = [[c if isinstance(c, float) else str(c) for c in row] for row in rows]
    return {"fronts": table(header, rows)}, {"fronts": figures}


def _changes() -> Section:
    values = {key: fact.value for key, fact in load_device(HW).quantities()}
    rows, figures = [], {}
    for label, key, factor in CHANGES:
        value = values[key] * factor
        changed = {key: round(value) if isinstance(values[key], int) else value}
        for schedule, fields, name in KERNELS:
            before, after = (
                _search(schedule, fields, MODELS[0], SHORT, overrides=o).feasible[0].latency_us for o in (None, changed)
            )
            assert before
            assert after
            rows.append([label, name, before, after, percent(before / after - 1, sign="+")])
            figures[f"{label} {name}"] = [before, after]
    return {"changes": table(["change", "kernel", "us", "us with the change", "gain"], rows)}, {"changes": figures}
