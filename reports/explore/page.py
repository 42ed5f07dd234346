"""Page: which tiles are best for two models on the 910B2, what proves it, and what other hardware would buy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import npusim
from npusim.config.load import load_device
from npusim.report.page import svg
from npusim.report.search import front_of, map_of
from reports.parts.document import Section, gather, save_page, table
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.explore import Exploration

__all__ = ["write"]

HW, SCHEDULES = "ascend_910b2", ("flash", "pasa", "two_level")
MODELS, LENGTHS = ("pangu_38b", "qwen2_7b"), (2048, 8192, 32768)
TILES = {"block_q": (64, 96, 128), "block_kv": (128, 256, 512), "depth": (2, 4), "vector_rows": (16, 32)}
#: What is no axis here is as every schedule declares it.
DECLARED = declared_tiling("flash", HW)
#: Lengths at which fronts and other hardware are looked at.
SHORT = 2048
EXP = "cores.aiv.engines.VECTOR.ops.exp_float16.slope_cycles_per_repeat"
CHANGES = (
    ("L0C doubled", "cores.aic.buffers.L0C.capacity_bytes", 2.0),
    ("FP16 exp at half its cost", EXP, 0.5),
    ("HBM x 1.5", "links.hbm.bytes_per_s", 1.5),
)


def write(folder: Path) -> list[Path]:
    """Write ``explore.md``, its figures and charts to ``folder``."""
    charts: dict[str, str] = {}
    sections = (_best(charts), _fronts(charts), _changes())
    return save_page(folder, "explore", gather("explore", sections), charts)


def _search(model: str, seq: int, **more: object) -> Exploration:
    return npusim.explore(SCHEDULES, TILES, hw=HW, workload=model, seq=seq, tiling=DECLARED, **more)  # type: ignore[arg-type]


def _best(charts: dict[str, str]) -> Section:
    rows, figures, simulated, total = [], {}, 0, 0
    for model in MODELS:
        for seq in LENGTHS:
            found = _search(model, seq)
            counts = found.counts()
            simulated, total = simulated + counts["ok"], total + len(found.outcomes)
            if (model, seq) == (MODELS[0], SHORT):
                flash = [o.row() for o in found.outcomes if o.point["schedule"] == "flash"]
                charts["heatmap.svg"] = svg(map_of(flash, "block_kv", "block_q")[0])
            for name in SCHEDULES:
                best = next(o for o in found.feasible if o.point["schedule"] == name)
                tiling = declared_tiling(name, HW)
                usual = npusim.run(name, hw=HW, workload=model, seq=seq, tiling=tiling, numerics=False)
                tile = " ".join(f"{k}={v}" for k, v in best.point.items() if k != "schedule")
                assert best.latency_us is not None
                lost = f"{(usual.latency_us / best.latency_us - 1) * 100:.1f} %"
                rows.append([model, seq, name, tile, best.latency_us, usual.latency_us, lost])
                figures[f"{model} {seq} {name}"] = {"tile": tile, "us": best.latency_us, "default_us": usual.latency_us}
    header = ["model", "tokens", "schedule", "best tile", "us", "declared us", "lost by the declared tile"]
    return {"best": table(header, rows), "simulated": simulated, "total": total}, {"best": figures}


def _fronts(charts: dict[str, str]) -> Section:
    precisions = ("fa2_fp32", "fa16_32", "fa16", "fp16_mean", "fp32_mean")
    rows = []
    for schedule, own in (("flash", precisions[:3]), ("pasa", precisions[3:])):
        for load in ("pangu_38b", "pasa_uniform", "pasa_resonance"):
            found = npusim.explore(
                schedule,
                {"precision": own, "block_kv": (128, 256)},
                hw=HW,
                workload=load,
                seq=SHORT,
                tiling=DECLARED,
                pareto=True,
            )
            listed = [o.row() for o in found.outcomes]
            charts[f"front_{schedule}_{load}.svg"] = svg(front_of(listed, ("precision", "block_kv"))[0])
            for o in found.feasible:
                error = "not finite" if o.relative_rmse is None else o.relative_rmse
                is_on = "yes" if o in found.front else ""
                rows.append([load, schedule, o.point["precision"], o.point["block_kv"], o.latency_us, error, is_on])
    header = ["inputs", "schedule", "precision", "block_kv", "us", "relative RMSE", "on the front"]
    figures = [[c if isinstance(c, float) else str(c) for c in row] for row in rows]
    return {"fronts": table(header, rows)}, {"fronts": figures}


def _changes() -> Section:
    values = {key: fact.value for key, fact in load_device(HW).quantities()}
    rows, figures = [], {}
    usual = _search(MODELS[0], SHORT)
    for label, key, factor in CHANGES:
        value = values[key] * factor
        other = _search(MODELS[0], SHORT, overrides={key: round(value) if isinstance(values[key], int) else value})
        for name in SCHEDULES:
            before, after = (
                next(o for o in f.feasible if o.point["schedule"] == name).latency_us for f in (usual, other)
            )
            assert before
            assert after
            rows.append([label, name, before, after, f"{(before / after - 1) * 100:+.1f} %"])
            figures[f"{label} {name}"] = [before, after]
    return {"changes": table(["change", "schedule", "us", "us then", "gain"], rows)}, {"changes": figures}
