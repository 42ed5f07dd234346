"""The page on the 910B's timing compares predictions with published times of the same calls."""

from __future__ import annotations

from collections import defaultdict
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from npusim.config.cases import load_measurements
from npusim.config.load import load_device
from npusim.studies.validate.measured_times import validate_times
from reports.ascend_timing import causes, compare, study
from reports.ascend_timing.samples import samples
from reports.parts.chart import chart
from reports.parts.document import Section, gather, number, percent, save_page, table

if TYPE_CHECKING:
    from reports.ascend_timing.study import Row

BASES = ("vendor", "measured", "derived", "fitted", "assumed")
#: What FastAttention reports over "standard attention": table 2, and table 8's DeiT-B at batch 32 and 1024.
RANGES = {
    "unified": (2.55, 7.0),
    "two-level": (3.65, 10.7),
    "two-level, tiling-AllReduce": (4.23, 15.0),
    "DeiT": (2.52, 7.58),
}
#: Columns of a record whose true ones may be fewer, and cases that a table names no more.
SHORTEST, MANY = 16, 20
LENGTHS = (1024, 2048, 4096, 8192, 16384)
#: CANN's prefills, task durations; rows of a block on either kernel.
PREFILLS = Path(__file__).parents[1] / "production" / "measured_ascend_cann.yaml"
BLOCK_ROWS = 128
#: Classes of blocks per core: the most of each, and its name.
WAVES = ((1, "1"), (2, "2"), (11, "3 to 11"), (inf, "more than 11"))
BATCHES = (32, 256, 1024)
#: The largest DeiT call, whose bounds the page states.
LARGEST = BATCHES[-1]


def write(folder: Path) -> list[Path]:
    """Write ``ascend_timing.md``, its data and its chart to ``folder``."""
    found = study.rows()
    parts = (
        _residuals,
        _classes,
        _blocks,
        _causes,
        _constants,
        _without,
        _samples,
        _pasa,
        _short,
        _vision,
        _layers,
        _native,
        _deit,
    )
    content = gather("ascend_timing", (part(found) for part in parts))
    return save_page(folder, "ascend_timing", content, {"ascend_timing_attention.svg": _chart(found)})


def _measured(row: Row) -> str:
    low, high = row.measured
    return number(low, 4) if low == high else f"{number(low, 4)} .. {number(high, 4)}"


def _residuals(found: list[Row]) -> Section:
    """Every quantity, measured and predicted, with the error of the previous release."""
    old = study.before()
    lines, figures = [], {}
    for r in found:
        was = old.get(f"{r.case.name} {r.quantity}")
        counts = "host" if r.is_floor else ("" if r in study.counted([r]) else "apart")
        counts = "wrong sign" if r.is_wrong_sign else counts
        lines.append(
            [
                r.case.name,
                f"{r.quantity} ({r.case.kind})" if r.quantity == "latency_us" else r.quantity,
                _measured(r),
                number(r.predicted, 4),
                "" if was is None else percent(was, sign="+"),
                percent(r.error, sign="+"),
                counts,
            ]
        )
        figures[f"{r.case.name} {r.quantity}"] = {"predicted": r.predicted, "error": r.error, "before": was}
    header = ("case", "quantity", "measured", "predicted", "error before", "error", "")
    wrong = [r.case.name for r in found if r.is_wrong_sign]
    fields: dict[str, object] = {"residuals": table(header, lines), "wrong": ", ".join(wrong) or "none"}
    return fields, {"residuals": figures, "wrong_signs": wrong}


def _row_of(what: str, found: list[Row]) -> list[object]:
    count, middle, worst, near = study.summary(found)
    return [what, count, percent(middle), percent(worst), percent(near)]


def _classes(found: list[Row]) -> Section:
    """Errors by kind of case, and of those that nothing was fitted on."""
    rows = study.counted(found)
    lines = [
        _row_of(kind, [r for r in rows if study.class_of(r.case.name) == kind])
        for kind in study.CLASSES
        if kind not in ("papers", "a call's floor")
    ]
    free = study.untouched(rows)
    lines += [_row_of("all", rows), _row_of("untouched by any fit", free)]
    count, middle, worst, near = study.summary(rows)
    header = ("kind", "quantities", "median error", "worst", "within 20 %")
    fields: dict[str, object] = {
        "classes": table(header, lines),
        "count": count,
        "median": percent(middle),
        "worst": percent(worst),
        "near": percent(near),
        "free": len(free),
        "free_median": percent(study.summary(free)[1]),
        "tiles": ", ".join(f"{us:.0f} us with {keys} keys a tile" for keys, us in study.tiles_of_16k().items()),
    }
    return fields, {"classes": {str(line[0]): line[1:] for line in lines}}


def _blocks(found: list[Row]) -> Section:
    """Errors of attention by whose kernel it is, blocks of rows per core, head dim and mask."""
    own = [r for r in study.counted(found) if r.case.name.startswith(("fa_", "cann_", "tilelang_"))]
    errors = [(r.case, r.error) for r in own]
    cases = {case.name: case for case in load_measurements(PREFILLS).cases if case.schedule == "flash"}
    errors += [(cases[r.name], r.relative_error) for r in validate_times(PREFILLS).residuals if r.name in cases]
    groups = defaultdict[tuple[int, str, int, str], list[float]](list)
    for case, error in errors:
        w, cores = case.workload, int(load_device(case.device).group_count.value)
        blocks = (w.batch or 1) * (w.heads or 1) * -(-(w.seq_q or 1) // BLOCK_ROWS)
        waves = -(-blocks // cores)
        rank = next(n for n, (most, _) in enumerate(WAVES) if waves <= most)
        whose = {"fa": "PTO", "tilelang": "TileLang"}.get(case.name.split("_")[0], "CANN")
        groups[rank, whose, w.head_dim or 0, "causal" if w.causal else "none"].append(error)
    lines = [
        [WAVES[n][1], *key, len(of), percent(median(map(abs, of))), ", ".join(percent(e, sign="+") for e in sorted(of))]
        for (n, *key), of in sorted(groups.items())
    ]
    header = ("blocks per core", "kernel", "head dim", "mask", "cases", "median error", "errors")
    return {"blocks": table(header, lines)}, {"blocks": {" ".join(map(str, line[:4])): line[4:] for line in lines}}


def _causes(_found: list[Row]) -> Section:
    """Hosts as the larger of two times and as a sum; the tuning bank's records by the layout of their operands."""
    found, bank = causes.hosts(), study.bank()
    fractals = [r for r in bank if r.case.workload.operands == "nz"]
    kinds = {
        "operands row by row": [r for r in bank if r not in fractals],
        "operands in fractals": fractals,
        "a side of 16": [r for r in bank if r.case.workload.n == SHORTEST],
        "all": bank,
    }
    fields: dict[str, object] = {
        "hosts": table(
            ("calls one behind the other", "cases", "the larger of host and device", "host, then device"),
            [[who, count, percent(larger), percent(added)] for who, (count, larger, added) in found.items()],
        ),
        "bank_median": percent(study.summary(bank)[1]),
        "bank_bias": percent(median(r.error for r in bank), sign="+"),
        "bank": table(
            ("records", "number", "median error", "worst", "within 20 %", "half are above"),
            [[*_row_of(kind, rows), percent(median(r.error for r in rows), sign="+")] for kind, rows in kinds.items()],
        ),
    }
    return fields, {"hosts": found, "bank": {r.case.name: r.error for r in bank}}


def _constants(_found: list[Row]) -> Section:
    """How the file's numbers are founded, and the fitted ones with their cases."""
    facts = list(load_device(study.DEVICE).quantities())
    count = {basis: sum(f.basis == basis for _, f in facts) for basis in BASES}
    lines = [
        [f"`{key}`", number(value), ", ".join(names) if len(names) < MANY else f"the {len(names)} records of the bank"]
        for key, (value, names) in study.fitted().items()
    ]
    fields: dict[str, object] = {
        "bases": ", ".join(f"{n} {basis}" for basis, n in count.items()),
        "fitted": table(("constant", "value", "fitted on"), lines),
    }
    return fields, {"bases": count}


def _without(_found: list[Row]) -> Section:
    """Each repository's cases by constants that were chosen without them."""
    lines, figures = [], {}
    for source in study.SOURCES:
        found = study.without(source)
        changed = ", ".join(f"`{key}` {value}" for key, value in found.changes.items())
        errors = (percent(x) for x in (found.filed[1], found.alone[1]))
        lines.append([source, found.filed[0], changed or "the same: none was chosen on them", *errors])
        figures[source] = {"filed": found.filed, "without": found.alone}
    header = ("source", "quantities", "constants without it", "median error as filed", "then")
    return {"without": table(header, lines)}, {"without": figures}


def _samples(_found: list[Row]) -> Section:
    """The vendor's samples of single mechanisms."""
    found = samples()
    lines = [
        [s.name, s.quantity, number(s.measured, 4), number(s.predicted, 4), percent(s.error, sign="+")] for s in found
    ]
    header = ("sample", "quantity, us", "measured", "predicted", "error")
    return {"samples": table(header, lines)}, {"samples": {f"{s.name}, {s.quantity}": s.error for s in found}}


def _inside(value: float, ends: tuple[float, float]) -> str:
    low, high = ends
    if low <= value <= high:
        return f"{number(value)}, inside"
    away = value / low - 1 if value < low else value / high - 1
    return f"{number(value)}, {percent(away, sign='+')} of {number(low if value < low else high)}"


#: What the paper has for CANN's kernel: PASA's peak over its gains.
PEAK, GAINS = 170.0, (1.2, 1.27)


def _pasa(_found: list[Row]) -> Section:
    """Ratios of PASA's time to that of CANN's kernel and of npusim's, and of FP16 to FP32, with the recorded tiles."""
    pasa, wide, half = compare.pasa(), compare.wide(), compare.half_reductions()
    chosen, blocks = compare.by_run(), compare.in_blocks()
    lanes, trees = (pasa[name] for name in ("fp16_mean", "fp16_mean,sum_order=tree_halves"))
    fields: dict[str, object] = {
        "pasa": table(
            ("kernel, 32k tokens, 16 heads", "over CANN FP32", "over our FP32 flash", "TFLOP/s"),
            [[name, *map(number, one)] for name, one in pasa.items()],
        ),
        "over_cann": number(lanes.over_cann),
        "over_best": number(lanes.over_best),
        "over_best_tile": number(pasa["fp16_mean, tile by a run"].over_best),
        "best_over_cann": number(next(p.over_cann for n, p in pasa.items() if n.startswith("our"))),
        "below_lanes": f"{(1 - lanes.rate / PEAK) * 100:.0f}",
        "below_trees": f"{(1 - trees.rate / PEAK) * 100:.0f}",
        "wide": number(wide),
        "mixed_run": number(chosen["half"][0]),
        "wide_run": number(chosen["half"][1]),
        "in_blocks": table(
            ("tokens", "printed, %", *(f"{n} blocks" for n in compare.BLOCKS)),
            [[tokens, *(f"{gain:.1f}" for gain in gains)] for tokens, gains in blocks.items()],
        ),
        **{f"blocks_{n}": "/".join(f"{g[i]:.0f}" for g in blocks.values()) for i, n in enumerate(compare.BLOCKS, 1)},
        "levels_run": " to ".join(f"{x:.2f}" for x in chosen["levels"]),
        "half": " and ".join(f"{number(gain)} ({name})" for name, gain in half.items()),
    }
    return fields, {
        "pasa": pasa,
        "fp16_over_fp32": wide,
        "by_run": chosen,
        "in_blocks": blocks,
        "half_reductions": half,
    }


def _short(found: list[Row]) -> Section:
    """Calls whose time the host decides, and figures of the text on hosts and on single cases."""
    floors = [r for r in found if study.class_of(r.case.name) == "a call's floor"]
    lines = [
        [r.case.workload.seq_q, r.measured.low, number(r.predicted, 4), number(study.core_us(r.case))] for r in floors
    ]
    unified, two = (
        compare.asked_of_host(LENGTHS[0], name, RANGES[kind][0])
        for name, kind in (("unified", "unified"), ("two_level", "two-level"))
    )
    cann = sorted((r for r in found if r.case.name.startswith("cann_q3072")), key=lambda r: r.case.workload.seq_kv or 0)
    slopes = [cann[-1].predicted - cann[0].predicted, cann[-1].measured.low - cann[0].measured.low]
    sixteen = next(r for r in found if r.case.name == "fa_b2b_910b2_16k")
    levels = [r for r in found if r.case.name.startswith("two_level_") and "standard" not in r.case.name]
    eights = {seq: compare.int8(seq) for seq in compare.TABLE_9}
    fields: dict[str, object] = {
        "floors_worst": percent(max(abs(r.error) for r in floors)),
        "floors_long": percent(max(abs(r.error) for r in floors if (r.case.workload.seq_q or 0) >= LENGTHS[0])),
        "int8": table(
            ("tokens", "measured INT8, us", "predicted FP16", "products at INT8's rate", "softmax in float16 too"),
            [[seq, compare.TABLE_9[seq][1], *(number(us, 4) for us in found)] for seq, found in eights.items()],
        ),
        "floors": table(("tokens", "measured, us", "predicted, us", "of it on the cores, us"), lines),
        "measured_16k": number(sixteen.measured.low),
        "unified_us": f"{unified.kernel_us:.0f}",
        "two_level_us": f"{two.kernel_us:.0f}",
        "host_low": f"{min(unified.issue_us, two.issue_us):.0f}",
        "host_high": f"{max(unified.issue_us, two.issue_us):.0f}",
        "levels": percent(max(abs(r.error) for r in levels)),
        "slope": percent(abs(slopes[0] / slopes[1] - 1)),
    }
    return fields, {
        "int8": eights,
        "floors": {r.case.name: r.predicted for r in floors},
        "asked_of_host": [unified, two],
    }


def _vision(_found: list[Row]) -> Section:
    """The shares of table 7, and the shares by numbers of operations."""
    counted = compare.shares()
    lines, off = [], []
    for name, shares in counted.items():
        printed = compare.TABLE_7[name][-1]
        off += [abs(a - b) for a, b in zip(shares, printed, strict=True)]
        lines.append([name, *(f"{p} / {s:.1f}" for p, s in zip(printed, shares, strict=True))])
    header = ("model", "Q K V", "attention", "O", "MLP", "others")
    fields: dict[str, object] = {"table_7": table(header, lines), "shares": len(off), "shares_off": f"{max(off):.1f}"}
    return fields, {"table_7": counted}


def _layers(_found: list[Row]) -> Section:
    """FastAttention over unfused attention at every length, ends of the paper's ranges apart."""
    layers = {seq: compare.layer(seq) for seq in LENGTHS}
    kinds = {"unified": "unified", "two-level": "two_level", "two-level, tiling-AllReduce": "all_reduce"}
    lines = [
        [s, *(" / ".join(map(number, getattr(one, field))) for field in kinds.values())] for s, one in layers.items()
    ]
    checked = [
        [f"{kind}, {seq} tokens", "{} .. {}".format(*RANGES[kind])]
        + [_inside(gain, RANGES[kind]) for gain in getattr(layers[seq], field)]
        for kind, field in kinds.items()
        for seq in (LENGTHS[0], LENGTHS[-1])
    ] + [
        [f"DeiT, batch {batch}", "{} .. {}".format(*RANGES["DeiT"])]
        + [_inside(us / compare.deit(batch).kernel, RANGES["DeiT"]) for us in compare.deit(batch).unfused]
        for batch in (BATCHES[0], LARGEST)
    ]
    fields: dict[str, object] = {
        "lengths": table(("tokens", *kinds), lines),
        "ranges": table(("what", "paper", "over fused", "over eager", "over eager_float32"), checked),
    }
    return fields, {"lengths": {s: one._asdict() for s, one in layers.items()}}


def _native(_found: list[Row]) -> Section:
    """The one published timing of eager attention, by list of operators."""
    found = compare.native()
    lines = [
        [f"{n.batch} x {n.seq}", number(n.measured, 4)]
        + [f"{number(us, 4)}, {percent(us / n.measured - 1, sign='+')}" for us in n.predicted]
        for n in found
    ]
    slower = sorted(n.measured / n.predicted[1] for n in found)
    fields: dict[str, object] = {
        "native": table(("batch x tokens", "measured, us", *compare.UNFUSED), lines),
        "slower": f"{number(slower[0], 2)} to {number(slower[-1], 2)}",
    }
    return fields, {"native": {f"{n.batch} x {n.seq}": n.predicted for n in found}}


def _deit(_found: list[Row]) -> Section:
    """DeiT-B operator by operator, and the explained part of its speed-up."""
    runs = {batch: compare.deit(batch) for batch in BATCHES}
    small, large = (compare.deit_operators(batch) for batch in (BATCHES[0], LARGEST))
    lines = [
        [a.name, number(b.megabytes, 4), number(a.us, 4), number(b.us, 4), f"{b.busiest}, {percent(b.share, 0)}"]
        for a, b in zip(small, large, strict=True)
    ]
    one = runs[LARGEST]
    eager, slower = one.unfused[1], min(n.measured / n.predicted[1] for n in compare.native())
    why = [
        (name, us, eager * factor / us)
        for name, us, factor in (
            ("as predicted", one.kernel, 1.0),
            ("a core's next head begins while its last is worked on", one.overlapped, 1.0),
            ("and softmax in float16", one.narrow, 1.0),
            (f"and operators {number(slower, 2)} times slower, as published ones", one.narrow, slower),
            ("the fused kernel as fast as HBM gives Q, K, V and takes O", one.memory, 1.0),
        )
    ]
    fields: dict[str, object] = {
        "explained": number(why[-2][2], 2),
        "operators": table(
            ("operator", f"MB at batch {LARGEST}", f"us at {BATCHES[0]}", f"us at {LARGEST}", "busiest there"), lines
        ),
        "deit": table(
            ("batch", "two-level, us", "eager, us", "eager_float32, us", "eager over two-level", "eager_float32"),
            [
                [b, number(r.kernel, 4), *(number(us, 4) for us in r.unfused[1:])]
                + [number(us / r.kernel) for us in r.unfused[1:]]
                for b, r in runs.items()
            ],
        ),
        "why": table(
            (f"batch {LARGEST}", "two-level, us", "eager over it"), [[w, number(us, 4), number(x)] for w, us, x in why]
        ),
    }
    figures = {"deit": {b: r._asdict() for b, r in runs.items()}, "operators": {o.name: o._asdict() for o in large}}
    return fields, figures


def _chart(found: list[Row]) -> str:
    own = [r for r in found if r.case.name.startswith("fa_b2b_")]

    def line(of: dict[float, float]) -> list[tuple[float, float]]:
        return sorted(of.items())

    return chart(
        "FlashAttention on a 910B2, one head of 128, FP32 softmax, back to back",
        "tokens",
        "us",
        {
            "measured": line({float(r.case.workload.seq_q or 0): r.measured.low for r in own}),
            "predicted": line({float(r.case.workload.seq_q or 0): r.predicted for r in own}),
        },
        log_x=True,
        log_y=True,
    )
