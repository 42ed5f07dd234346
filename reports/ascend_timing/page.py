"""The page on the 910B's timing: predictions beside published times, like with like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.config.load import load_device
from reports.ascend_timing import causes, study
from reports.ascend_timing.samples import samples
from reports.parts.chart import chart
from reports.parts.document import Section, gather, number, save_page, table

if TYPE_CHECKING:
    from pathlib import Path

    from reports.ascend_timing.study import Row

BASES = ("vendor", "measured", "derived", "fitted", "assumed")
#: What the papers report: PASA over CANN's kernel, and FastAttention over eager attention at 1k and 16k tokens.
RANGES = {"unified": (2.55, 7.0), "two-level": (3.65, 10.7), "DeiT": (2.52, 7.58)}


def write(folder: Path) -> list[Path]:
    """Write ``ascend_timing.md``, its data and its chart to ``folder``."""
    found = study.rows()
    parts = (_residuals, _classes, _causes, _constants, _without, _samples, _papers)
    content = gather("ascend_timing", (part(found) for part in parts))
    return save_page(folder, "ascend_timing", content, {"ascend_timing_attention.svg": _chart(found)})


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %"


def _signed(value: float) -> str:
    return f"{value * 100:+.1f} %"


def _measured(row: Row) -> str:
    low, high = row.measured
    return number(low, 4) if low == high else f"{number(low, 4)} .. {number(high, 4)}"


def _residuals(found: list[Row]) -> Section:
    """Every quantity, measured and predicted, beside the error of the release before."""
    old = study.before()
    lines, figures = [], {}
    for r in found:
        was = old.get(f"{r.case.name} {r.quantity}")
        counts = "host" if r.is_floor else ("" if r in study.counted([r]) else "apart")
        lines.append([
            r.case.name, f"{r.quantity} ({r.case.kind})" if r.quantity == "latency_us" else r.quantity, _measured(r),
            number(r.predicted, 4), "" if was is None else _signed(was), _signed(r.error), counts,
        ])  # fmt: skip
        figures[f"{r.case.name} {r.quantity}"] = {"predicted": r.predicted, "error": r.error, "before": was}
    header = ("case", "quantity", "measured", "predicted", "error before", "error", "")
    return {"residuals": table(header, lines)}, {"residuals": figures}


def _row_of(what: str, found: list[Row]) -> list[object]:
    count, middle, worst, near = study.summary(found)
    return [what, count, _percent(middle), _percent(worst), _percent(near)]


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
        "classes": table(header, lines), "count": count, "median": _percent(middle), "worst": _percent(worst),
        "near": _percent(near), "free": len(free), "free_median": _percent(study.summary(free)[1]),
        "tiles": ", ".join(f"{us:.0f} us with {keys} keys a tile" for keys, us in study.tiles_of_16k().items()),
    }  # fmt: skip
    return fields, {"classes": {str(line[0]): line[1:] for line in lines}}


def _causes(_found: list[Row]) -> Section:
    """Hosts as the larger of two times and as a sum; the tiles that the tuning bank recorded."""
    found, tiles = causes.hosts(), causes.tiled()
    fields: dict[str, object] = {
        "hosts": table(
            ("calls one behind the other", "cases", "the larger of host and device", "host, then device"),
            [[who, count, _percent(larger), _percent(added)] for who, (count, larger, added) in found.items()],
        ),
        "tiles_of_bank": table(
            ("case", "cores", "tile there", "error with it", "with the tile here"),
            [[t.name, t.cores, t.tile, _signed(t.recorded), _signed(t.error)] for t in tiles],
        ),
    }
    return fields, {"hosts": found, "bank": {t.name: t.recorded for t in tiles}}


def _constants(_found: list[Row]) -> Section:
    """How the file's numbers are founded, and the fitted ones with their cases."""
    facts = list(load_device(study.DEVICE).quantities())
    count = {basis: sum(f.basis == basis for _, f in facts) for basis in BASES}
    lines = [[f"`{key}`", number(value), ", ".join(names)] for key, (value, names) in study.fitted().items()]
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
        lines.append([source, found.filed[0], changed, *(_percent(x) for x in (found.filed[1], found.alone[1]))])
        figures[source] = {"filed": found.filed, "without": found.alone}
    header = ("source", "quantities", "constants without it", "median error as filed", "then")
    return {"without": table(header, lines)}, {"without": figures}


def _samples(_found: list[Row]) -> Section:
    """The vendor's samples of single mechanisms."""
    found = samples()
    lines = [[s.name, s.quantity, number(s.measured, 4), number(s.predicted, 4), _signed(s.error)] for s in found]
    header = ("sample", "quantity, us", "measured", "predicted", "error")
    return {"samples": table(header, lines)}, {"samples": {f"{s.name}, {s.quantity}": s.error for s in found}}


def _inside(value: float, ends: tuple[float, float]) -> str:
    if ends[0] <= value <= ends[1]:
        return "inside"
    return f"{_signed(value / ends[0] - 1)} of {ends[0]}" if value < ends[0] else f"{_signed(value / ends[1] - 1)}"


def _papers(_found: list[Row]) -> Section:
    """Speed-ups of the papers, kernels and baselines with the tiles that are recorded of them."""
    pasa, lengths, deit, wide = study.pasa(), study.speedups(), study.deit(), study.wide()
    ends = (min(lengths), max(lengths))
    both = {
        "unified": [(lengths[s][0], lengths[s][2]) for s in ends],
        "two-level": [(lengths[s][1], lengths[s][3]) for s in ends],
        "DeiT": [deit[b] for b in (min(deit), max(deit))],
    }
    checked = [
        [what, end, "{} .. {}".format(*RANGES[what]), *(f"{number(v)}, {_inside(v, RANGES[what])}" for v in pair)]
        for what, pairs in both.items()
        for end, pair in zip(("shortest or smallest", "longest or largest"), pairs, strict=True)
    ]
    fields: dict[str, object] = {
        "pasa": table(
            ("kernel, 32k tokens, 16 heads", "over CANN FP32", "TFLOP/s"),
            [[name, number(gain), number(rate)] for name, (gain, rate) in pasa.items()],
        ),
        "lengths": table(
            ("tokens", "unified over fused", "two-level over fused", "unified over eager", "two-level over eager"),
            [[s, *map(number, four)] for s, four in lengths.items()],
        ),
        "deit": table(
            ("batch", "two-level over fused", "two-level over eager"),
            [[b, *map(number, two)] for b, two in deit.items()],
        ),
        "ranges": table(("what", "end", "paper", "over fused passes", "over eager operators"), checked),
        "wide": number(wide),
    }  # fmt: skip
    return fields, {"pasa": pasa, "lengths": lengths, "deit": deit, "fp16_over_fp32": wide}


def _chart(found: list[Row]) -> str:
    own = [r for r in found if r.case.name.startswith("fa_b2b_")]

    def line(of: dict[float, float]) -> list[tuple[float, float]]:
        return sorted(of.items())

    return chart(
        "FlashAttention on a 910B2, one head of 128, FP32 softmax, back to back", "tokens", "us",
        {
            "measured": line({float(r.case.workload.seq_q or 0): r.measured.low for r in own}),
            "predicted": line({float(r.case.workload.seq_q or 0): r.predicted for r in own}),
        },
        log_x=True, log_y=True,
    )  # fmt: skip
