"""Page: predicted times of a 910B against published ones, what they rest on and where they differ."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from npusim.config.load import load_device
from npusim.report.bottleneck import basis_shares
from npusim.sensitivity import sensitivity
from reports.ascend_timing import study
from reports.parts.chart import chart
from reports.parts.document import Section, gather, number, save_page, table

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.report.record import TimingRecord
    from reports.ascend_timing.study import Needed, Row

__all__ = ["write"]


#: Cases whose sensitivity is shown, and the least effect of a fifth that is.
SENSITIVE = ("fa_910b2_4k", "fa_910b2_16k", "pasa_mha_32k", "two_level_71b_4k")
LEAST_EFFECT = 0.001
#: Tiles of the baseline that are tried for MQA: keys, rows of a vector slice.
BASELINE_TILES = ((128, 16), (256, 16), (512, 16), (512, 8), (512, 4), (512, 2))
#: Rows of a tile that is reduced: an AIV's half of a block of 128.
SLICE_ROWS = 64
#: The case whose rounds of blocks are the unit for those of the others.
REFERENCE = "fa_910b2_16k"
WEAK = ("assumed", "fitted")


def write(folder: Path) -> list[Path]:
    """Write ``ascend_timing.md``, its data and its chart to ``folder``."""
    found = study.rows()
    parts = (
        _residuals, _constants, _places, _sensitivity, _needed, _shared_keys, _heads, _reductions,
    )  # fmt: skip
    words = {"large": _percent(study.LARGE, 0), "factor": f"{study.FACTOR:g}"}
    content = gather("ascend_timing", (part(found) for part in parts), **words)
    charts = {"ascend_timing_attention.svg": _chart(_attention(found))}
    return save_page(folder, "ascend_timing", content, charts)


def _attention(found: list[Row]) -> list[Row]:
    return [r for r in found if r.case.name.startswith("fa_")]


def _percent(value: float, digits: int = 1) -> str:
    return f"{value * 100:.{digits}f} %"


def _signed(value: float) -> str:
    return f"{value * 100:+.1f} %"


def _within(error: float) -> str:
    return f"within {_percent(abs(error))}" if error else "inside the measured range"


def _measured(row: Row) -> str:
    low, high = row.measured
    return number(low, 4) if low == high else f"{number(low, 4)} .. {number(high, 4)}"


# ---------------------------------------------------------------- residuals


def _residuals(found: list[Row]) -> Section:
    """Every quantity measured, predicted; and the errors the issue asks for."""
    lines = [
        [r.case.name, r.quantity, _measured(r), number(r.predicted, 4), _signed(r.error)]
        for r in found
    ]
    goal = [r for r in _attention(found) if r.case.workload.seq_q != 1024]
    product = {r.quantity: r for r in found if r.case.schedule == "gemm"}
    papers = [r for r in found if r.quantity in ("speedup", "tflops")]
    inside = [r for r in papers if not r.error]
    near = [r for r in papers if r.error and abs(r.error) <= study.LARGE]
    (middle, worst), (all_median, all_worst) = study.band_of(goal), study.band_of(found)
    pipes = max(abs(product[q].error) for q in ("mac_us", "mte1_us", "mte2_us"))
    fields: dict[str, object] = {
        "residuals": table(("case", "quantity", "measured", "predicted", "error"), lines),
        "attention_median": _percent(middle), "attention_worst": _percent(worst),
        "core_error": _within(product["core_us"].error), "pipe_error": _percent(pipes),
        "papers": len(papers), "papers_inside": len(inside), "papers_near": len(near),
        "papers_beyond": len(papers) - len(inside) - len(near),
        "all_median": _percent(all_median), "all_worst": _percent(all_worst), "quantities": len(found),
    }  # fmt: skip
    figures = {
        r.name + ("" if r.name.endswith(r.quantity) else f" {r.quantity}"): {
            "measured": list(r.measured), "predicted": r.predicted, "error": r.error,
        }
        for r in found
    }  # fmt: skip
    return fields, {"residuals": figures, "attention": {"median": middle, "worst": worst}}


def _chart(found: list[Row]) -> str:
    def line(of: dict[int, float]) -> list[tuple[float, float]]:
        return sorted((float(s), us) for s, us in of.items())

    lengths = {r.case.name: r.case.workload.seq_q or 0 for r in found}
    clock = load_device(found[0].case.device).clock_hz.value
    bounds = {
        lengths[r.case.name]: max(study.record(r.case).bound_cycles.values()) / clock * 1e6
        for r in found
    }
    return chart(
        "FlashAttention on a 910B2, one head of 128, FP32 softmax", "tokens", "us",
        {
            "measured": line({lengths[r.case.name]: r.measured.low for r in found}),
            "predicted": line({lengths[r.case.name]: r.predicted for r in found}),
            "bound (no launch)": line(bounds),
        },
        log_x=True, log_y=True,
    )  # fmt: skip


# ---------------------------------------------------------------- what it rests on


def _constants(found: list[Row]) -> Section:
    """How the file's numbers are founded, and the errors without those taken from kernels."""
    facts = list(load_device("ascend_910b2").quantities())
    count = {
        b: sum(f.basis == b for _, f in facts)
        for b in ("vendor", "measured", "derived", *WEAK[::-1])
    }
    attention = _attention(found)
    left = study.left_out(attention)
    own = {r.case.name: r.error for r in attention}
    lines = [
        [name, number(launch), _signed(own[name]), _signed(error)]
        for name, (launch, error) in left.items()
    ]
    errors = [abs(e) for _, e in left.values()]
    burst, asked = study.rate_of_burst(next(r for r in found if r.quantity == "mte2_us"))
    fields: dict[str, object] = {
        "bases": ", ".join(f"{n} {b}" for b, n in count.items()), "fitted": count["fitted"],
        "left_out": table(("left out", "launch fitted on the others, us", "error as filed", "error then"), lines),
        "left_median": _percent(median(errors)), "left_worst": _percent(max(errors)), "rounds": _rounds(attention),
        "burst": number(float(burst)), "burst_asked": number(asked),
    }  # fmt: skip
    figures = {
        "bases": count,
        "left_out": {n: {"launch_us": u, "error": e} for n, (u, e) in left.items()},
    }
    return fields, {**figures, "burst_cycles": {"filed": burst, "asked": asked}}


def _rounds(attention: list[Row]) -> str:
    lines = [
        [name, count, needed, number(seen)]
        for name, (count, needed, seen) in study.rounds(attention, REFERENCE).items()
    ]
    return table(
        ("case", "blocks", "rounds of 24 core groups", f"rounds measured, {REFERENCE} as the unit"),
        lines,
    )


def _weak_share(timing: TimingRecord) -> float:
    return sum(share for basis, share in basis_shares(timing).items() if basis in WEAK)


def _places(found: list[Row]) -> Section:
    """Bound, roofline, bytes, and the share of busy time on weak numbers, a case."""
    lines, figures = [], {}
    for case in {r.case.name: r.case for r in found}.values():
        timing = study.record(case)
        at = timing.roofline
        assert at is not None
        unit, least = max(timing.bound_cycles.items(), key=lambda item: item[1])
        moved = timing.link_bytes["hbm"] / timing.compulsory_bytes
        lines.append([
            case.name, unit, _percent(least / timing.cycles, 0), number(at.intensity), number(at.ridge),
            number(at.attained_flops_per_s / 1e12), _percent(at.reached, 0), f"{moved:.2f}x",
            _percent(_weak_share(timing)), timing.method,
        ])  # fmt: skip
        figures[case.name] = {
            "bound_unit": unit, "bound_share": least / timing.cycles, "intensity": at.intensity,
            "reached": at.reached, "weak_share": _weak_share(timing), "bytes_over_compulsory": moved,
        }  # fmt: skip
    header = (
        "case", "least time set by", "bound over simulated", "operations a byte", "ridge", "TFLOP/s", "of the roof",
        "bytes over compulsory", "on assumed or fitted", "method",
    )  # fmt: skip
    return {"places": table(header, lines)}, {"places": figures}


def _sensitivity(found: list[Row]) -> Section:
    """Change of latency with a fifth more or less of each doubtful constant."""
    by_name = {r.case.name: r.case for r in found}
    moved = {
        name: {s.key: s for s in sensitivity(study.result_of(by_name[name]))} for name in SENSITIVE
    }
    keys = [k for k in moved[SENSITIVE[0]] if any(
        max(abs(m[k].lower), abs(m[k].higher)) >= LEAST_EFFECT for m in moved.values() if k in m
    )]  # fmt: skip
    lines = [
        [
            f"`{key}`",
            *(f"{_signed(m[key].lower)}, {_signed(m[key].higher)}" if key in m else "" for m in moved.values()),
        ]
        for key in keys
    ]  # fmt: skip
    considered = len({k for m in moved.values() for k in m})
    fields = {
        "sensitivity": table(("constant", *SENSITIVE), lines), "considered": considered, "shown": len(keys),
        "least_effect": _percent(LEAST_EFFECT),
    }  # fmt: skip
    figures = {
        name: {k: [m[k].lower, m[k].higher] for k in keys if k in m} for name, m in moved.items()
    }
    return fields, {"sensitivity": figures}


# ---------------------------------------------------------------- what would have to be true


def _needed(found: list[Row]) -> Section:
    """The factor on each group of constants that would bring each doubtful case to what was measured."""
    doubtful = [r for r in found if r.asks_for_an_explanation]
    chosen = study.twins(doubtful)
    changes = {r.name: [study.needed(r, group) for group in study.GROUPS] for r in chosen}
    header = ("constants", *(r.name for r in chosen))
    lines = [
        [group, *(_factor(changes[r.name][i], r) for r in chosen)]
        for i, group in enumerate(study.GROUPS)
    ]
    measured = ["measured", *(_measured(r) for r in chosen)]
    predicted = ["predicted", *(number(r.predicted, 4) for r in chosen)]
    attention = _attention(found)
    before = study.band_of(attention)
    costs = []
    for r in chosen:
        able = [c for c in changes[r.name] if c.factor is not None]
        nearest = min(able, key=lambda c: max(c.factor or 1, 1 / (c.factor or 1)), default=None)
        if nearest is None:
            costs.append([r.name, "none of them", "", "", ""])
            continue
        middle, worst = study.elsewhere(attention, nearest)
        costs.append(
            [r.name, nearest.group, f"x {nearest.factor:.2f}", _percent(middle), _percent(worst)]
        )
    fields: dict[str, object] = {
        "doubtful": ", ".join(r.name for r in doubtful), "longest": f"{study.LONGEST:,}",
        "needed": table(header, [measured, predicted, *lines]),
        "elsewhere": table(("case", "nearest change", "factor", "attention, median error then", "worst then"), costs),
        "before_median": _percent(before[0]), "before_worst": _percent(before[1]),
    }  # fmt: skip
    figures = {n: {c.group: [c.factor, c.low, c.high] for c in cs} for n, cs in changes.items()}
    return fields, {"needed": figures}


def _factor(change: Needed, row: Row) -> str:
    if change.factor is not None:
        return f"x {change.factor:.2f}"
    ends = sorted((change.low, change.high))
    if ends[1] / ends[0] < 1 + LEAST_EFFECT:
        return "no effect"
    return f"no: {number(ends[0])} .. {number(ends[1])}"


# ---------------------------------------------------------------- MQA, and the number of heads


def _shared_keys(found: list[Row]) -> Section:
    """MQA beside MHA: traffic, blocks, and the speed-up over other tiles of the baseline."""
    by_name = {r.case.name: r for r in found}
    lines, figures, busiest = [], {}, 0.0
    for name in ("pasa_mha_32k", "pasa_mqa_32k"):
        case = by_name[name].case
        baseline = case.baseline_case()
        assert baseline is not None
        for which, one in (("PASA", case), ("baseline", baseline)):
            timing = study.record(one)
            seconds = timing.core_us * 1e-6
            share = {
                link: timing.link_bytes[link] / seconds / float(spec.bytes_per_s.value)
                for link, spec in load_device(one.device).links.items()
            }  # fmt: skip
            hbm = timing.link_bytes["hbm"]
            bound = max(timing.bound_cycles.values()) / timing.cycles
            lines.append([
                f"{name}, {which}", f"{timing.cycles / 1e6:.2f} M", f"{hbm / 2**20:,.0f} MiB",
                _percent(share["hbm"]), _percent(share["l2"]), _percent(bound),
            ])  # fmt: skip
            busiest = max(busiest, share["hbm"])
            figures[f"{name} {which}"] = {"cycles": timing.cycles, "hbm_bytes": hbm, **share}
    row, mha = by_name["pasa_mqa_32k"], by_name["pasa_mha_32k"]
    halves = study.predicted(mha, precision="fp16_mean,sum_order=tree_halves")
    tiles, tried = [], {}
    for keys, rows in BASELINE_TILES:
        base = row.case.baseline_case()
        assert base is not None
        other = study.result_of(base, tiling={"block_kv": keys, "vector_rows": rows})
        speedup = other.latency_us / study.result_of(row.case).latency_us
        tiles.append([f"128 x {keys}", rows, number(speedup)])
        tried[f"{keys}/{rows}"] = speedup
    header = ("run", "cycles", "beyond L2", "of HBM", "of L2", "bound over simulated")
    fields: dict[str, object] = {
        "mqa": table(header, lines), "tiles": table(("baseline's tile", "rows a vector slice", "speed-up"), tiles),
        "mqa_predicted": number(row.predicted), "mqa_measured": _measured(row),
        "mqa_hbm": _percent(busiest), "mha_measured": _measured(mha), "mha_predicted": number(mha.predicted),
        "mqa_slower": _percent(row.measured.low / mha.measured.high - 1),
        "mqa_slowest": _percent(row.measured.high / mha.measured.low - 1), "mha_halves": number(halves),
    }  # fmt: skip
    return fields, {"mqa": figures, "baseline_tiles": tried, "mha_tree_of_halves": halves}


def _heads(found: list[Row]) -> Section:
    """Two-level tiling with four heads and five, as measured and by several deals of the blocks."""
    lines, figures = [], {}
    for row in (
        r for r in found if r.case.name.startswith("two_level_") and r.quantity == "speedup"
    ):
        base = row.case.baseline_case()
        if base is None or base.schedule != "unified":
            continue
        longest_first = study.result_of(row.case, tiling={"deal": "balanced"}).latency_us
        unified = study.result_of(base).latency_us
        balanced = unified / longest_first
        lines.append([
            row.name, row.case.workload.heads, _measured(row), number(row.predicted), number(balanced),
        ])  # fmt: skip
        figures[row.name] = {"predicted": row.predicted, "balanced": balanced}
    precise = next(r for r in found if r.case.name == "fa16_vs_fa32")
    base = precise.case.baseline_case()
    assert base is not None
    whole = (
        study.result_of(base).latency_us
        / study.result_of(precise.case, precision="fa16").latency_us
    )
    header = ("case", "heads", "measured", "predicted", "predicted, longest blocks dealt first")
    fields: dict[str, object] = {
        "heads": table(header, lines),
        "fa16": number(whole),
        "fa16_32": number(precise.predicted),
    }
    return fields, {"deals": figures, "fa16_over_fa32": whole}


def _reductions(_found: list[Row]) -> Section:
    """Row maxima by block reductions, as they are simulated, beside the vendor's whole-row instruction."""
    found = study.reductions(SLICE_ROWS)
    lines = [[r.fmt, r.columns, r.used_cycles, number(r.fitted_cycles)] for r in found]
    header = ("format", "columns", "block reductions, cycles", "whole-row instruction, cycles")
    fields: dict[str, object] = {"reductions": table(header, lines), "slice_rows": SLICE_ROWS}
    return fields, {"reductions": found}
