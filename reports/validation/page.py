"""The page on how right predictions are: every measured case, by class, by group of tiles, worst first."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.bands import FILE
from npusim.config.packaged import packaged_folder
from npusim.config.problem import Problem
from npusim.report.output import write_whole
from npusim.run import run
from reports.parts.chart import scatters
from reports.parts.document import Section, gather, number, percent, save_page, table
from reports.parts.kernel import declared_tiling
from reports.validation import bands, refit, study

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from npusim.report.charts import Row as Point
    from reports.validation.study import Errors, Row

#: Kernels of 16 heads x 2,048 x 128, each with its group of tiles.
BEST = {
    "flash": "tiles_b1h16s2048d128",
    "PASA": "pasa_b1h16s2048d128",
    "FP8, P V chained": "fp8_b1h16s2048d128_chained",
    "FP8, P V fresh": "fp8_b1h16s2048d128_fresh",
}


#: Kinds of compiled flash tiles on the H200, by rows, warps and stages.
KINDS: dict[str, Callable[[dict[str, object]], bool]] = {
    "under 64 rows: products of single warps": lambda t: int(str(t["block_q"])) < 64,
    "64 rows, 8 warps: S computed twice": lambda t: (t["block_q"], t["warps"]) == (64, 8),
    "1 stage: through registers": lambda t: t["stages"] == 1,
    "2 stages": lambda t: t["stages"] == 2,
    "3 stages": lambda t: t["stages"] == 3,
    "256 rows, or 256 keys": lambda t: 256 in (t["block_q"], t["block_kv"]),
}
#: Largest speed-up of FastAttention over Transformers' attention on a V100, causal and not (its section 5.2.3).
PAPER = {True: 8.2, False: 2.2}
V100_TOKENS, V100_PEAK = 2048, 125.0


class Best(NamedTuple):
    """A kernel's fastest tile as measured, and which one is predicted to be it."""

    measured: Row
    predicted: Row


def write(folder: Path) -> list[Path]:
    """Write ``validation.md``, its data and charts, and the table of errors that ships with the device files."""
    parts = (_short, _classes, _bands, _groups, _kinds, _refits, _best, _v100, _bits, _worst)
    content = gather("validation", (part() for part in parts))
    charts = {
        "validation_h200.svg": _chart_h200(),
        "validation_others.svg": _chart_others(),
        "validation_tiles.svg": _chart_tiles(),
    }
    where = packaged_folder("hwconfigs") if folder.resolve() == study.HERE else folder
    path = where / FILE
    written = save_page(folder, "validation", content, charts)
    write_whole(path, bands.table().encode())
    return [*written, path]


def _figures(found: Errors) -> list[str]:
    return [percent(found.median), percent(found.most), percent(found.worst)]


def _short() -> Section:
    """All measured cases, source by source, and the cases that do not count."""
    every, rows = study.rows(), study.counted()
    free = [r for r in rows if r.is_untouched]
    faults = study.not_predicted()
    kinds = list(dict.fromkeys(kind for kind, _ in study.FILES))
    groups = {kind: study.counted(kind) for kind in kinds}
    groups |= {"all": rows, "all but whole models": [r for r in rows if r.kind != study.MODELS]}
    lines = [
        [kind, found.cases, *_figures(found), percent(median(r.error for r in own), sign="+"), wrong or ""]
        for kind, own in groups.items()
        for found, wrong in [(study.errors(own), len(study.wrong_signs(r.residual for r in own)))]
    ]
    header = ("source", "counted", "median", "nine in ten", "worst", "signed median", "wrong sign")
    models = [r for r in study.counted(study.MODELS) if r.residual.quantity == "latency_us"]
    below = groups["all but whole models"]
    fields: dict[str, object] = {
        "count": len(every),
        "counted": len(rows),
        "hosts": sum(r.residual.is_floor for r in every),
        "easy": sum(r.is_easy for r in every),
        "summary": table(header, lines),
        "median": percent(study.errors(below).median),
        "most": percent(study.errors(below).most),
        "all_median": percent(study.errors(rows).median),
        "all_most": percent(study.errors(rows).most),
        "free": len(free),
        "free_median": percent(study.errors(free).median),
        "free_most": percent(study.errors(free).most),
        "models": len(models),
        "models_low": percent(max(r.error for r in models), sign="+"),
        "models_high": percent(min(r.error for r in models), sign="+"),
        "wrong": ", ".join(f"`{name}`" for name in study.wrong_signs(r.residual for r in rows)) or "none",
        "faults": f"Without a prediction: {faults[0]}." if faults else "Every case has a prediction.",
    }
    # As the table has them: another page that shows them must not round once more.
    summary = {
        kind: {"cases": found.cases, "median": percent(found.median), "most": percent(found.most)}
        for kind, own in groups.items()
        for found in [study.errors(own)]
    }
    return fields, {"rows": len(rows), "untouched": len(free), "not_predicted": list(faults), "summary": summary}


def _classes() -> Section:
    """Errors of times by device and schedule."""
    lines, figures = [], {}
    for (device, schedule), rows in study.classes().items():
        every, free = study.errors(rows), study.errors(r for r in rows if r.is_untouched)
        untouched = [free.cases, percent(free.median) if free.cases else ""]
        lines.append([device, schedule, every.cases, *_figures(every), *untouched])
        figures[f"{device} {schedule}"] = {"all": every, "untouched": free}
    header = ("device", "schedule", "times", "median", "nine in ten", "worst", "untouched", "median of untouched")
    others = [r for r in study.counted() if r.residual.quantity not in study.TIMES]
    kinds = sorted({(r.kind, r.residual.quantity) for r in others})
    more = [
        [kind, quantity, found.cases, *_figures(found)]
        for kind, quantity in kinds
        for found in [study.errors(r for r in others if (r.kind, r.residual.quantity) == (kind, quantity))]
    ]
    fields: dict[str, object] = {
        "classes": table(header, lines),
        "others": table(("source", "quantity", "count", *header[3:6]), more),
    }
    return fields, {"classes": figures}


def _bands() -> Section:
    """The share of the cases of left-out shapes inside the band that the others give, by class, and its width."""
    kept = bands.judged()
    every_kept = [case for cases in kept.values() for case in cases]
    inside = bands.shares(every_kept)
    outside = [case for case in every_kept if case.doublings]
    widths = {key: bands.Width.of(cases) for key, cases in kept.items()}
    lines = [
        [device, schedule, kind, tile, len(kept[key]), percent(bands.shares(kept[key])[0]), *map(percent, width)]
        for key, width in widths.items()
        for device, schedule, kind, tile in [key]
    ]
    header = ("device", "schedule", "kernel", "tile", "untouched", "inside the inner band")
    most = ("inside the outer band, shape included", "inside the outer band, shape left out")
    fields: dict[str, object] = {
        "bands": table((*header, *most, "nine in ten of the class", "widest band"), lines),
        **{
            f"{k}_share": f"{100 * a:.0f} to {percent(b, 0)}"
            for k, (a, b) in zip(("half", "most"), bands.SHARES, strict=True)
        },
        "kept": len(every_kept),
        "kept_half": percent(inside[0]),
        "kept_most": percent(inside[1]),
        "by_chance": sum(map(bands.is_by_chance, kept.values())),
        "judged": len(kept),
        "chance": percent(bands.CHANCE),
        "beyond": len(outside),
        "beyond_most": percent(bands.shares(outside)[1]),
        "narrow_most": percent(bands.shares(outside, 0.0)[1]),
        "factors": table(
            ("widening per doubling", "shares in their range", "shares in all"),
            [[percent(factor), bands.holding(factor), 2 * len(kept)] for factor in bands.FACTORS],
        ),
    }
    figures = {" ".join(filter(None, key)): width for key, width in widths.items()}
    kept_out = {"cases": len(every_kept), "half": inside[0], "most": inside[1]}
    return fields, {"bands": figures, "kept_out": kept_out}


def _groups() -> Section:
    """Groups of tiles: errors, rank and regret."""
    lines, figures = [], {}
    for name, rank in sorted(study.groups().items()):
        rows = study.of_group(name)
        found = study.errors(rows)
        near = sum(abs(r.error) <= 0.2 for r in rows) / len(rows) if rows else 0.0
        used = "yes" if any(not r.is_untouched for r in rows) else ""
        lines.append(
            [name, found.cases, *_figures(found), percent(near), f"{rank.kendall_tau:.2f}", percent(rank.regret), used]
        )
        figures[name] = {"errors": found, "within_20": near, "tau": rank.kendall_tau, "regret": rank.regret}
    header = ("group", "tiles", "median", "nine in ten", "worst", "within 20 %", "Kendall tau", "regret", "fitted on")
    return {"groups": table(header, lines)}, {"groups": figures}


def _kinds() -> Section:
    """Compiled flash tiles by the properties of their compiled code, with the sign of their errors."""
    tiles = [r for name in (refit.FITTED, *refit.PREDICTED[:2]) for r in study.of_group(name)]
    lines, figures = [], {}
    for kind, belongs in KINDS.items():
        rows = [r for r in tiles if belongs(dict(r.case.tiling or {}))]
        found, bias = study.errors(rows), median(r.error for r in rows)
        lines.append([kind, found.cases, *_figures(found), percent(bias, sign="+")])
        figures[kind] = {"errors": found, "bias": bias}
    header = ("tiles", "count", "median", "nine in ten", "worst", "signed median")
    return {"kinds": table(header, lines)}, {"kinds": figures}


def _v100() -> Section:
    """FastAttention on a V100 over unfused attention, as the paper compares them."""
    lines, figures = [], {}
    for causal, paper in PAPER.items():
        problem = Problem(batch=8, heads=32, seq_q=V100_TOKENS, seq_kv=V100_TOKENS, head_dim=64, causal=causal)
        flash = _us("volta_flash", "v100", problem)
        rate = (problem.flops() / flash) / 1e6
        for operators in ("eager", "eager_float32"):
            ratio = _us("standard", "v100", problem, operators=operators) / flash
            lines.append(
                [
                    "yes" if causal else "no",
                    operators,
                    number(paper, 2),
                    number(ratio),
                    percent(ratio / paper - 1, sign="+"),
                    f"{rate:.0f} TFLOP/s",
                ]
            )
            kind = "causal" if causal else "full"
            figures[f"{kind} {operators}"] = {"paper": paper, "predicted": ratio, "rate": rate}
    header = ("causal", "unfused operators", "paper, at most", "predicted", "error", "predicted rate of FastAttention")
    published = {r.case.name: r for r in study.counted("V100")}
    kernel, unfused = (published[f"v100_{name}_b160s4096d128"] for name in ("xformers", "pytorch"))
    fused = [r for r in published.values() if r.case.schedule == "volta_flash"]
    own = _us("volta_flash", "v100", kernel.case.workload.problem(), "acc_fp32")
    fields: dict[str, object] = {
        "v100": table(header, lines),
        "v100_gains": " and ".join(number(figures[f"{kind} eager"]["predicted"]) for kind in ("causal", "full")),
        "v100_peak": number(V100_PEAK),
        **{f"v100_{name}": _ms(r.residual.measured.low) for name, r in (("kernel", kernel), ("unfused", unfused))},
        **{f"v100_{name}_us": _ms(r.residual.predicted) for name, r in (("kernel", kernel), ("unfused", unfused))},
        "v100_own": _ms(own),
        "v100_own_error": percent(own / kernel.residual.measured.low - 1, sign="+"),
        "v100_cases": len(fused),
        "v100_worst": percent(max(abs(r.error) for r in fused), 0),
    }
    return fields, {"v100": figures}


def _ms(us: float) -> str:
    return number(us / 1e3)


def _us(schedule: str, hw: str, problem: Problem, precision: str | None = None, **tiling: object) -> float:
    named = declared_tiling(schedule, hw, **tiling)
    return run(
        schedule, hw=hw, problem=problem, precision=precision, tiling=named, numerics=False, trace_groups=()
    ).latency_us


def _refits() -> Section:
    """Fit on one group, predict the others."""
    fit, filed, before = refit.fit(), refit.constants(), refit.before()
    constants = [
        [f"`{key.rpartition('WARPS.')[2]}`", *(number(float(values[key])) for values in (before, fit.values, filed))]
        for key in filed
    ]
    ways = {which: refit.outcomes(which) for which in ("before", "refitted", "filed")}
    lines = []
    for group in (refit.FITTED, *refit.PREDICTED):
        of = {which: found[group] for which, found in ways.items()}
        seen = "fitted on" if group == refit.FITTED else "predicted"
        cells = [f"{percent(o.errors.median)}, {percent(o.errors.most)}, {o.tau:.2f}" for o in of.values()]
        lines.append([group, seen, *cells, percent(of["refitted"].regret)])
    header = (
        "group",
        "role in the refit",
        "before any group",
        "refitted on the first",
        "device file",
        "regret, refitted",
    )
    fields: dict[str, object] = {
        "refits": table(header, lines),
        "fitted_group": refit.FITTED,
        "tried": fit.tried,
        "constants": table(("constant", "before any group", "refitted on the first group", "device file"), constants),
    }
    return fields, {"refits": ways, "constants": {"before": before, "refitted": fit.values, "filed": filed}}


def best() -> dict[str, Best]:
    """Return each kernel's best tile of 16 heads x 2,048, measured and predicted."""
    found = {}
    for name, group in BEST.items():
        rows = study.of_group(group)
        found[name] = Best(
            min(rows, key=lambda r: r.residual.measured.low), min(rows, key=lambda r: r.residual.predicted)
        )
    return found


def _tile(row: Row) -> str:
    t = row.case.tiling or {}
    return f"{t.get('block_q')}x{t.get('block_kv')}, {t.get('stages')} stages, {t.get('warps')} warps"


def _best() -> Section:
    """PASA, flash and FP8 at each one's best tile."""
    found = best()
    base = found["flash"].measured.residual
    lines, figures = [], {}
    for name, (own, other) in found.items():
        r = own.residual
        ratios = r.measured.low / base.measured.low, r.predicted / base.predicted
        pick = (
            "the same"
            if other.case.name == own.case.name
            else (f"{_tile(other)}: {number(other.residual.measured.low, 4)} us measured")
        )
        lines.append(
            [
                name,
                _tile(own),
                number(r.measured.low, 4),
                number(r.predicted, 4),
                percent(own.error, sign="+"),
                f"{ratios[0]:.2f}",
                f"{ratios[1]:.2f}",
                pick,
            ]
        )
        figures[name] = {"measured": r.measured.low, "predicted": r.predicted, "ratios": ratios}
    orders = [
        " < ".join(sorted(found, key=lambda n: found[n].measured.residual.measured.low)),
        " < ".join(sorted(found, key=lambda n: found[n].measured.residual.predicted)),
    ]
    same = "the same" if orders[0] == orders[1] else orders[1]
    header = (
        "kernel",
        "best tile",
        "measured, us",
        "predicted, us",
        "error",
        "time / flash, measured",
        "time / flash, predicted",
        "best tile as predicted",
    )
    return {"best": table(header, lines), "order": orders[0], "predicted_order": same}, {"best": figures}


def _bits() -> Section:
    """Vectors and kernels recorded on hardware."""
    found = study.bits()
    lines = [[f"`{name}`", *(f"{n:,}" for n in counts)] for name, counts in found.items()]
    return {"bits": table(("recorded", "instructions or kernels", "outputs", "equal"), lines)}, {"bits": found}


def _worst() -> Section:
    """Every quantity, worst first."""
    rows = sorted(study.rows(), key=lambda r: (not r.is_counted, -abs(r.error)))
    lines = []
    for r in rows:
        low, high = r.residual.measured
        measured = number(low, 4) if low == high else f"{number(low, 4)} .. {number(high, 4)}"
        apart = "" if r.is_counted else ("host" if r.residual.is_floor else "range" if r.is_easy else "apart")
        lines.append(
            [
                r.case.name,
                r.kind,
                r.residual.quantity,
                measured,
                number(r.residual.predicted, 4),
                percent(r.error, sign="+"),
                "" if r.is_untouched else "fitted",
                apart,
            ]
        )
    header = ("case", "source", "quantity", "measured", "predicted", "error", "fitted", "not counted")
    figures = {f"{r.case.name} {r.residual.quantity}": r.error for r in rows}
    return {"worst": table(header, lines)}, {"errors": figures}


def _points(rows: list[Row], kind: str = "") -> list[Point]:
    return [
        {"name": r.case.name, "x": r.residual.measured.low, "y": r.residual.predicted, "kind": kind or r.case.schedule}
        for r in rows
        if r.residual.quantity == "latency_us"
    ]


MEASURED, PREDICTED = "measured, us", "predicted, us"


def _chart_h200() -> str:
    rows = study.counted("H200")
    tiles = [r for r in rows if "stages" in (r.case.tiling or {}) or r.case.schedule == "split_kv"]
    others = [r for r in rows if r not in tiles]
    panels = {"compiled tiles": _points(tiles), "libraries' kernels": _points(others)}
    return scatters("H200, whole calls", panels, MEASURED, PREDICTED, 2)


def _chart_others() -> str:
    panels = {
        "one 910B": _points(study.counted("910B"), "times"),
        "two H200, eight 910B": _points([*study.counted("two H200"), *study.counted("eight 910B")], "times"),
        "eight V100, their host": _points([r for r in study.counted("papers") if r.case.device == "v100_x8"], "times"),
    }
    panels = {name: points for name, points in panels.items() if points}
    return scatters("Other devices and nodes", panels, MEASURED, PREDICTED, 3)


def _chart_tiles() -> str:
    panels: dict[str, list[Point]] = {}
    for name in sorted(study.groups()):
        points = _points(study.of_group(name))
        for point, row in zip(points, study.of_group(name), strict=True):
            stages = (row.case.tiling or {}).get("stages")
            point["kind"] = f"{stages} stage{'s' if stages != 1 else ''}" if stages else "no stages stated"
        if len(points) > 2:
            panels[name] = points
    return scatters("Groups of tiles on the H200", panels, MEASURED, PREDICTED, 3)
