"""Page: the P-Cast paper's figures, reproduced on the product's FP8 schedule."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from reports.parts.chart import chart
from reports.parts.document import Section, gather, save_page, table
from reports.pcast_numerics import study, theory
from reports.pcast_numerics.sections import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from npusim.program.numerics.bits_result import Diagnosis

__all__ = ["TABLE_1", "TABLE_2", "write"]


SINKS = 4
KEYS = 4096
GAP = 7.0
#: Up to this gap not nearly all normal keys are zeroed at S = 1.
GAP_PARTLY = 8
#: P-Cast table 1: gap -> percent zeroed at S = 1, at S = 256, non-sink mass, "effective loss".
TABLE_1: Mapping[int, tuple[float, float, float, float]] = MappingProxyType(
    {
        5: (22.3, 0.0, 88.0, 19.6),
        6: (51.6, 0.0, 74.0, 38.2),
        7: (82.0, 0.0, 51.7, 42.4),
        8: (94.8, 0.3, 32.2, 30.5),
        9: (99.5, 2.3, 13.9, 13.9),
        10: (100.0, 11.7, 5.8, 5.8),
        12: (100.0, 67.9, 0.8, 0.8),
    }
)
#: P-Cast table 2: mean squared error in 1e-5 for 4096, 8192, 16384 keys, at a gap of 7.
TABLE_2: Mapping[str, tuple[float, float, float]] = MappingProxyType(
    {
        "forward, S=1": (5.65, 4.40, 2.94),
        "reverse, S=1": (1.70, 0.83, 0.32),
        "forward, S=448": (1.81, 0.90, 0.32),
        "forward, S=256": (1.64, 0.80, 0.28),
        "reverse, S=256": (1.64, 0.81, 0.28),
    }
)
UNIT = 1e-5
#: Samples of 64 rows for each length of table 2, and for the other sections.
HEADS_2: Mapping[int, int] = MappingProxyType({4096: 64, 8192: 64, 16384: 32})
HEADS, HEADS_GAP = 32, 16
#: Number of independent draws into which samples are cut if the error of each head is not known.
DRAWS = 4
#: Scales of the sawtooth's table: powers of two, those of P-Cast's figure 1, FlashInfer's 448.
SCALES = (1, 2, 16, 64, 128, 256, 300, 384, 400, 448, 512)
SAWTOOTH_START, SAWTOOTH_END = 8, 512


def write(folder: Path) -> list[Path]:
    """Write ``pcast_numerics.md``, its data and its charts to ``folder``."""
    parts = (_thresholds, _collapse, _errors, _sweep, _hole, _floor, _real, *SECTIONS)
    sizes = {"keys_1": KEYS - SINKS, "rows_1": HEADS * study.QUERIES, "rows_gap": HEADS_GAP * study.QUERIES}
    content = gather("pcast_numerics", (part() for part in parts), **sizes)
    scales = [float(s) for s in range(SAWTOOTH_START, SAWTOOTH_END + 1)]
    sawtooth = {"d_p(S)": [(s, theory.worst_step(s)) for s in scales]}
    sweep: Any = content[1]["gap_sweep"]
    curves = {n: list(zip(sweep["gaps"], v, strict=True)) for n, v in sweep["mse"].items()}
    title = "Mean squared error by gap of the sinks, 4096 keys"
    step = "Worst quantisation step d_p(S) of E4M3"
    charts = {
        "pcast_sawtooth.svg": chart(step, "scale S", "d_p", sawtooth),
        "pcast_gap.svg": chart(title, "gap", "MSE", curves, log_y=True),
    }
    return save_page(folder, "pcast_numerics", content, charts)


def _thresholds() -> Section:
    """Thresholds and the sawtooth, by enumeration of E4M3's codes."""
    steps = {s: theory.worst_step(s) for s in SCALES}
    exponents = {s: theory.underflow_exponent(s) for s in (1, 256, 448)}
    gaps = {s: theory.critical_gap(s, SINKS) for s in exponents}
    step_rows = [[s, f"{d:.7f}".rstrip("0"), f"{d / steps[256]:.3f}", _remark(s)] for s, d in steps.items()]
    gap_rows = [[s, f"{exponents[s]:.4f}", f"{gaps[s]:.3f}"] for s in exponents]
    values = theory.e4m3_values()
    fields: dict[str, object] = {
        "count": len(values),
        "largest": f"{values[-1]:g}",
        "smallest": f"{values[0]:.9f}",
        "zero": f"{theory.largest_zero():.10f}",
        "shift": f"{theory.sink_shift(SINKS):.4f}",
        "limits": table(
            ["S", "P becomes 0 when m - s reaches", "gap at which half of the normal keys are zeroed"], gap_rows
        ),
        "steps": table(["S", "d_p(S)", "relative to S = 256", "note"], step_rows),
        "critical_256": f"{gaps[256]:.1f}",
    }
    data = {"worst_step": steps, "underflow_exponent": exponents, "critical_gap": gaps}
    return fields, {**data, "sink_shift": theory.sink_shift(SINKS)}


def _remark(scale: int) -> str:
    if scale > theory.e4m3_values()[-1]:
        return "saturates"
    return "power of two: 2^-4" if scale & (scale - 1) == 0 else ""


def _collapse() -> Section:
    """Table 1: fractions and masses in forward order."""
    rows: list[list[str]] = []
    data: dict[int, object] = {}
    found_by_gap: dict[int, list[study.Mean]] = {}
    for gap, paper in TABLE_1.items():
        found = found_by_gap[gap] = study.mean_of_rows([_fractions(gap, draw) for draw in range(DRAWS)])
        measured, errors = [m.value for m in found], [m.error for m in found]
        exact = theory.expectation(float(gap), 1.0, SINKS, KEYS)
        formula = 100 * theory.closed_form(float(gap), 1.0, SINKS)
        sides = [f"{a:.1f} / {_tenths(m)}" for a, m in zip(paper, found, strict=False)]
        others = (100 * exact.zeroed_mass, 100 * exact.zeroed, formula)
        rows.append([str(gap), *sides, _tenths(found[-1]), *(f"{x:.1f}" for x in others)])
        data[gap] = {
            "paper": paper,
            "measured": measured,
            "standard error": errors,
            "expected": exact,
            "formula": formula,
        }
    header = [
        "gap",
        "zeroed, S=1",
        "zeroed, S=256",
        "normal keys' mass",
        '"effective loss"',
        "mass actually zeroed",
        "expected",
        "zeroed, S=1, expected",
        "by equation 7",
    ]
    return {"table_1": table(header, rows), **_told(found_by_gap)}, {"table_1": data}


def _told(found: Mapping[int, list[study.Mean]]) -> dict[str, object]:
    """Return what the text says of table 1: mass truly zeroed over the product, and equation 7's errors."""
    lost, product = ({gap: f[i].value for gap, f in found.items()} for i in (-1, 3))
    shares = [lost[gap] / product[gap] for gap in found if gap <= GAP_PARTLY]
    top = max(lost, key=lambda gap: lost[gap])
    errors = [
        100 * (theory.closed_form(float(gap), 1.0, SINKS) - theory.expectation(float(gap), 1.0, SINKS, KEYS).zeroed)
        for gap in found
    ]
    return {
        "share_low": f"{100 * min(shares):.0f}",
        "share_high": f"{100 * max(shares):.0f}",
        "peak": f"{lost[top]:.0f}",
        "peak_gap": top,
        "row_deviation": f"{100 * max(theory.zeroed_deviation(float(gap), 1.0, SINKS) for gap in found):.0f}",
        "peak_paper": f"{max(p[-1] for p in TABLE_1.values()):.0f}",
        "formula_low": f"{-min(errors):.1f}",
        "formula_high": f"{max(errors):.1f}",
    }


def _fractions(gap: int, draw: int) -> tuple[float, ...]:
    """Return table 1's measured columns for one draw of keys and queries, in percent."""
    problem = study.sink_problem(float(gap), KEYS, HEADS // DRAWS, seed=DRAWS * gap + draw)
    plain, scaled = (study.diagnose(problem, p) for p in ("hpc_ops_s1", "hpc_ops"))
    return (
        _of_others(plain),
        _of_others(scaled),
        100 - plain.sink_mass_percent,
        plain.product_mass_percent or 0.0,
        plain.zeroed_mass_percent or 0.0,
    )


def _tenths(found: study.Mean) -> str:
    return f"{found.value:.1f} ± {found.error:.1f}"


def _of_others(found: Diagnosis) -> float:
    """Return the percentage of normal keys that are zeroed; sinks never are."""
    return (found.underflow_percent or 0.0) * KEYS / (KEYS - SINKS)


def _errors() -> Section:
    """Table 2: mean squared errors in five configurations and three lengths."""
    found: dict[str, list[study.Mean]] = {name: [] for name in study.PRECISIONS}
    compared = ("reverse, S=1", "forward, S=448", "forward, S=1")
    ratios: dict[str, list[study.Mean]] = {f"{name} / reverse, S=256": [] for name in compared}
    for keys, heads in HEADS_2.items():
        problem = study.sink_problem(GAP, keys, heads, seed=keys)
        errors = {n: e / UNIT for n, e in study.errors_by_head(problem, study.PRECISIONS).items()}
        for name, by_head in errors.items():
            found[name].append(study.mean_of(by_head))
        for name, line in zip(compared, ratios.values(), strict=True):
            line.append(study.ratio_of(errors[name], errors["reverse, S=256"]))
    rows = [
        [name, *(f"{p:.2f} / {m.value:.3f} ± {m.error:.3f}" for p, m in zip(TABLE_2[name], line, strict=True))]
        for name, line in found.items()
    ]
    above = [p / m.value - 1 for name, line in found.items() for p, m in zip(TABLE_2[name], line, strict=True)]
    ratio_rows = [[name, *(f"{m.value:.4f} ± {m.error:.4f}" for m in line)] for name, line in ratios.items()]
    lengths = [f"{keys} keys" for keys in HEADS_2]
    fields: dict[str, object] = {
        "table_2": table(["configuration", *lengths], rows),
        "ratios": table(["ratio", *lengths], ratio_rows),
        "rows_2": ", ".join(str(heads * study.QUERIES) for heads in HEADS_2.values()),
        "table_2_above": f"{100 * max(above):.0f}",
        **dict(zip(("plain_low", "plain_high"), _ends(ratios["forward, S=1 / reverse, S=256"]), strict=True)),
        **_scatter(ratios["forward, S=448 / reverse, S=256"]),
    }
    return fields, {"table_2": found, "table_2_paper": dict(TABLE_2), "ratios": ratios}


def _ends(found: list[study.Mean]) -> list[str]:
    """Return the smallest and the largest of some ratios."""
    return [f"{end:.1f}" for end in (min(m.value for m in found), max(m.value for m in found))]


#: Rows of a small sample, whose scatter the page states, and heads for the ratio at blocks of 128 keys.
FEW_ROWS, HEADS_128 = 512, 12


def _scatter(of_448: list[study.Mean]) -> dict[str, object]:
    """Return the range of 448 over 256, the scatter of a small sample at 4096 keys, and blocks of 128."""
    found = [100 * (m.value - 1) for m in of_448]
    rows = next(iter(HEADS_2.values())) * study.QUERIES
    band = 2 * 100 * of_448[0].error * (rows / FEW_ROWS) ** 0.5
    problem = study.sink_problem(GAP, KEYS, HEADS_128, seed=5)
    plain, scaled = (
        study.error_by_head(problem, study.PRECISIONS[n], block=128) for n in ("reverse, S=1", "reverse, S=256")
    )
    wide = study.ratio_of(plain, scaled)
    return {
        "max_low": f"{min(found):.0f}",
        "max_high": f"{max(found):.0f}",
        "max_scatter": f"{found[0] - band:.0f} and {found[0] + band:.0f} %",
        "ratio_128": f"{wide.value:.3f} ± {wide.error:.3f}",
    }


def _sweep() -> Section:
    """Figure 2: errors over the gap; the ratio is largest at small gaps, the difference at 7."""
    lines: dict[str, list[float]] = {name: [] for name in study.PRECISIONS}
    rows, data = [], {}
    for gap in TABLE_1:
        problem = study.sink_problem(float(gap), KEYS, HEADS_GAP, seed=100 + gap)
        found = study.errors_by_head(problem, study.PRECISIONS)
        for name, by_head in found.items():
            lines[name].append(float(by_head.mean()))
        values = {name: study.mean_of(by_head / UNIT) for name, by_head in found.items()}
        worst, best = found["forward, S=1"], found["reverse, S=256"]
        ratio, difference = study.ratio_of(worst, best), study.mean_of((worst - best) / UNIT)
        data[gap] = {"mse": values, "ratio": ratio, "difference": difference}
        shown = [f"{m.value:.3f} ± {m.error:.3f}" for m in (*values.values(), difference)]
        rows.append([gap, *shown[:-1], f"{ratio.value:.2f} ± {ratio.error:.2f}", shown[-1]])
    header = ["gap", *lines, "forward, S=1 / reverse, S=256", "their difference"]
    sweep = {"gaps": list(TABLE_1), "mse": lines, "unit 1e-5": data}
    return {"sweep": table(header, rows)}, {"gap_sweep": sweep}


#: Gap, scale and block of the cases of the hole.
HOLES = ((7.0, 1.0, 64), (7.0, 1.0, 128), (7.0, 256.0, 128), (12.0, 256.0, 128))


def _hole() -> Section:
    """Reverse order: pairs zeroed inside the sinks' own block."""
    rows, data = [], []
    for gap, scale, block in HOLES:
        heads = HEADS // 2 // DRAWS
        draws = [
            (100 * study.reverse_hole(gap, scale, block, keys=KEYS, heads=heads, seed=draw),) for draw in range(DRAWS)
        ]
        (measured,) = study.mean_of_rows(draws)
        fraction = theory.expectation(gap, scale, SINKS, KEYS).zeroed
        expected = 100 * (block - SINKS) / KEYS * fraction
        shown = f"{measured.value:.4f} ± {measured.error:.4f}"
        rows.append([f"{gap:g}", f"{scale:g}", block, shown, f"{expected:.4f}"])
        data.append([gap, scale, block, measured, expected])
    header = ["gap", "S", "block", "measured", "(B - k) / N times forward's fraction"]
    last = data[-1][3]
    assert isinstance(last, study.Mean)
    return {"hole": table(header, rows), "hole_12": f"{last.value:.1f}"}, {"reverse_hole": data}


#: Gap, keys and samples of appendix B's cases.
FLOORS = ((7.0, 4096, 32), (7.0, 16384, 8), (10.0, 16384, 8), (12.0, 16384, 8))


def _floor() -> Section:
    """Appendix B: forward against reverse order at S = 256."""
    rows, data = [], []
    for gap, keys, heads in FLOORS:
        problem = study.sink_problem(gap, keys, heads, seed=200)
        orders = {o: study.PRECISIONS[f"{o}, S=256"] for o in ("forward", "reverse")}
        forward, reverse = study.errors_by_head(problem, orders).values()
        gain, error = study.mean_of(forward - reverse), float(reverse.mean())
        rows.append([f"{gap:g}", keys, gain.value, gain.error, error, gain.value / error])
        data.append({"gap": gap, "keys": keys, "difference": gain, "error": error})
    header = ["gap", "keys", "mean difference", "±", "error, reverse", "relative difference"]
    return {"floor": table(header, rows)}, {"appendix_b": data}


def _real() -> Section:
    """SmolLM2's packaged tensors: what remains of the claims."""
    precisions = {**study.PRECISIONS, "reverse, S=448": "hpc_ops,scale=448,is_reverse=true"}
    found = {name: study.real_figures(p) for name, p in precisions.items()}
    best, plain, forward = (found[n] for n in ("reverse, S=256", "forward, S=1", "forward, S=256"))

    def squared(f: study.RealFigures) -> float:
        return (f.rmse / best.rmse) ** 2

    rows = [
        [
            name,
            f.error / UNIT,
            f.error / best.error,
            f.rmse,
            squared(f),
            100 * f.exact_mass,
            f.underflow_percent,
            f.zeroed_mass_percent,
            f.product_mass_percent,
        ]
        for name, f in found.items()
    ]
    header = [
        "configuration",
        "MSE, 1e-5",
        "relative to best",
        "RMSE",
        "squared, relative to best",
        "exact %",
        "zeroed %",
        "mass zeroed %",
        '"effective loss" %',
    ]
    last = found["reverse, S=448"].error / best.error
    fields: dict[str, object] = {
        "real": table(header, rows),
        "sink_mass": f"{best.sink_mass_percent:.1f}",
        "plain_zeroed": f"{plain.underflow_percent:.0f}",
        "plain_mass": f"{plain.zeroed_mass_percent:.1f}",
        "plain_product": f"{plain.product_mass_percent:.0f}",
        "plain_squared": f"{squared(plain):.1f}",
        "plain_ratio": f"{plain.error / best.error:.1f}",
        "forward_ratio": f"{forward.error / best.error:.2f}",
        "forward_squared": f"{squared(forward):.2f}",
        "max_reverse": f"{last:.2f}",
        "order_gain": f"{100 * (1 - best.error / forward.error):.0f}",
        "order_gain_real": f"{100 * (1 - 1 / squared(forward)):.0f}",
        "max_forward": f"{found['forward, S=448'].error / forward.error:.2f}",
    }
    return fields, {"real": found}
