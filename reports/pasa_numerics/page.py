"""Page: the PASA paper's numerics, reproduced on the product's schedules."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.config.problem import Problem
from npusim.formats import get_format
from npusim.library.pasa import optimal_beta
from reports.parts.chart import chart
from reports.parts.document import Section, gather, save_page, table
from reports.pasa_numerics import study
from reports.pasa_numerics.sections import limits, models, orders, ranges, real
from reports.pasa_numerics.study import DRAWS, MAIN, SAMPLE_HEADS, SAMPLE_QUERIES, label, sampled, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


__all__ = ["POINTS", "TABLE_3", "TABLE_4", "write"]


#: PASA table 3: beta -> Inva_1, relative error in percent, optimised beta.
TABLE_3: Mapping[float, tuple[float, float, float]] = MappingProxyType(
    {
        0.9: (8.971, 0.32, 0.9),
        0.9375: (15.00, 0.0, 0.9375),
        0.96875: (31.25, 0.81, 0.96899),
        0.984375: (63.50, 0.79, 0.984497),
        0.99: (102.2, 3.23, 0.990311),
        0.999: (1031.0, 3.20, 0.999031),
    }
)
#: PASA table 4: (distribution, x0, amplitude) -> percentage of NaN rows of FA16-32.
TABLE_4: Mapping[tuple[str, float, float], float] = MappingProxyType(
    {
        ("U", 30.0, 0.5): 100.0,
        ("U", 20.0, 15.0): 0.12,
        ("U", 20.0, 20.0): 8.14,
        ("H", 30.0, 10.0): 100.0,
        ("H", 20.0, 50.0): 0.04,
        ("H", 20.0, 100.0): 1.11,
    }
)
#: Points of the paper's figures 11 and 12; the first five are the chart's.
POINTS = (
    ("U", 0.0, 0.5),
    ("U", 5.0, 0.5),
    ("U", 10.0, 0.5),
    ("U", 20.0, 0.5),
    ("U", 30.0, 0.5),
    ("U", 20.0, 5.0),
    ("U", 20.0, 10.0),
    ("U", 20.0, 20.0),
    ("H", 0.0, 10.0),
    ("H", 10.0, 10.0),
    ("H", 20.0, 10.0),
    ("H", 30.0, 10.0),
    ("H", 20.0, 20.0),
    ("H", 20.0, 100.0),
)
CHART_POINTS = 5
#: Mean at which PASA in float16 is at the floor of its own formats.
FLOOR_MEAN = 5.0
#: Relative error that two printed digits allow.
PRINTED_DIGITS = 5e-3
#: Seeds of the statistics of table 4.
SEEDS = 8
#: Bounds with which the page states errors in float64; the last bound is the requirement on the algorithm.
FLOAT64_BOUNDS = (1e-14, 1e-11)


def write(folder: Path) -> list[Path]:
    """Write ``pasa_numerics.md``, its data and its chart to ``folder``."""
    parts = (_exactness, _table_2, _table_3, _drift, _table_4, _errors, orders, limits, ranges, models, real)
    content = gather("pasa_numerics", (part() for part in parts), draws=DRAWS)
    return save_page(folder, "pasa_numerics", content, {"pasa_rmse.svg": _chart(content[1]["rmse"])})


def _chart(errors: Any) -> str:
    lines = {
        name: [
            (case[1], found.value)
            for case in POINTS[:CHART_POINTS]
            if isinstance(found := errors[label(case)][name], study.Drawn)
        ]
        for name in MAIN
    }
    title = "RMSE by mean, U(x0, 0.5); a line ends where outputs are NaN"
    return chart(title, "x0", "RMSE", lines, log_y=True)


def _exactness() -> Section:
    """PASA in float64 is softmax attention."""
    cases = ((0.0, 0.5), (1.0, 1.0), (20.0, 10.0), (30.0, 0.5))
    names = {"running mean (Algorithm 1)": "float64", "fixed reference": "float64,is_fixed_reference=true"}
    found = {
        f"U {x0:g}, {am:g}, d = {d}": [_bound(study.float64_error(x0, am, d, p)) for p in names.values()]
        for x0, am in cases
        for d in (64, 128)
    }
    worst = max(max(errors) for errors in found.values())
    rows = [[k, *(f"< {b:g}" for b in v)] for k, v in found.items()]
    fields: dict[str, object] = {
        "float64": table(["inputs", *names], rows),
        "float64_worst": f"{worst:g}",
        **{f"vanishes_{bits}": f"{study.vanishing_exponent(f'float{bits}'):.1f}" for bits in (16, 64)},
    }
    return fields, {"float64_below": found}


def _bound(error: float) -> float:
    """Return the first of a few bounds that holds: the last bits change with a machine's BLAS."""
    return next((b for b in FLOAT64_BOUNDS if error < b), math.inf)


#: PASA table 2: precision and overflow boundary as printed.
TABLE_2: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "float8_e4m3fn": (6.25e-2, 448),
        "float16": (4.88e-4, 65504),
        "bfloat16": (3.906e-3, 3.4e38),
        "float32": (5.96e-8, 3.4e38),
    }
)


def _table_2() -> Section:
    """Table 2: half a step at 1, and the largest finite number, of each format."""
    rows, data, agreed = [], {}, 0
    for name, (precision, largest) in TABLE_2.items():
        fmt = get_format(name)
        own = 2.0 ** -(fmt.mantissa_bits + 1), float(fmt.max_finite)
        agreed += sum(abs(a / b - 1) < PRINTED_DIGITS for a, b in zip(own, (precision, largest), strict=True))
        rows.append([name, f"{precision:g} / {own[0]:.4g}", f"{largest:g} / {own[1]:.6g}"])
        data[name] = own
    fields: dict[str, object] = {
        "table_2": table(["format", "precision", "overflow boundary"], rows),
        "table_2_agreed": agreed,
        "table_2_all": 2 * len(TABLE_2),
    }
    return fields, {"table_2": data}


def _table_3() -> Section:
    """Table 3: values of beta in float16."""
    rows: list[list[str]] = []
    data: dict[float, study.BetaRow] = {}
    wide: dict[float, study.BetaRow | None] = {}
    differing = []
    for beta, (paper, error, optimal) in TABLE_3.items():
        r = study.beta_row(beta)
        assert r is not None
        data[beta], b16 = r, study.beta_row(beta, fmt="bfloat16")
        wide[beta] = b16
        if f"{r.error_percent:.2f}" != f"{error:.2f}":
            differing.append(f"{beta:g}")
        rows.append(
            [
                f"{beta:g}",
                f"{r.ideal:.4g}",
                f"{paper:g} / {r.realised:.4f}",
                f"{error:.2f} / {r.error_percent:.2f}",
                f"{r.rounded_percent:.2f}",
                f"{optimal:g} / {r.optimal:.6f}",
                f"{r.exact:.4f}",
                "none" if b16 is None else f"{b16.realised:.4f}",
                "none" if b16 is None else f"{b16.optimal:.6f}",
            ]
        )
    header = [
        "beta",
        "Inva = beta/(1-beta)",
        "Inva_1",
        "error %",
        "error %, Inva_1 rounded first",
        "optimal beta",
        "exact Inva",
        "Inva_1, BF16",
        "optimal beta, BF16",
    ]
    fields: dict[str, object] = {
        "table_3": table(header, rows),
        "first_optimum": f"{optimal_beta(0.9, study.BLOCK):.6f}",
        "error_count": len(differing),
        "error_betas": ", ".join(differing),
    }
    return fields, {"table_3": data, "table_3_bfloat16": wide}


#: Settings of the drift test: the varied fields of PASA's tiling.
DRIFT: Mapping[str, dict[str, object]] = MappingProxyType(
    {
        "0.984375, ideal Inva, scale on S'": {"beta": 0.984375, "correction": "ideal", "scale_in": "scores"},
        "optimal 0.984497, ideal, scale on S'": {
            "beta": 0.984375,
            "optimise": True,
            "correction": "ideal",
            "scale_in": "scores",
        },
        "0.984375, exact, scale on S'": {"beta": 0.984375, "scale_in": "scores"},
        "0.984375, exact, scale on Q": {"beta": 0.984375, "scale_in": "queries"},
        "optimal 0.984497, ideal, scale in M": {"beta": 0.984375, "optimise": True, "correction": "ideal"},
        "optimal 0.984497, exact, scale in M": {"beta": 0.984375, "optimise": True},
        "0.99, ideal, scale on S'": {"beta": 0.99, "correction": "ideal", "scale_in": "scores"},
        "0.9375, exact, scale in M": {"beta": 0.9375},
    }
)


def _drift() -> Section:
    """Keys whose block means drift: where the choice of beta and correction shows."""
    found = {
        name: [study.drawn(study.drift_errors(head_dim, fields, seeds=DRAWS)) for head_dim in (128, 64)]
        for name, fields in DRIFT.items()
    }
    header = ["beta, correction, place of 1/sqrt(d)", "d = 128", "d = 64"]
    return {"drift": table(header, [[k, *map(shown, v)] for k, v in found.items()])}, {"drift": found}


def _table_4() -> Section:
    """Table 4: rows lost by FA16-32."""
    heads, tokens, head_dim = study.PAPER_SHAPE
    rows: list[list[str]] = []
    data: dict[str, object] = {}
    largest = 0.0
    for case, paper in TABLE_4.items():
        # The outputs that become NaN do not depend on V, so that the smallest head size of V suffices.
        problem = Problem(
            heads=heads if paper < 100 else 1,
            seq_q=tokens,
            head_dim=head_dim,
            value_head_dim=16,
            data=study.recipe(*case, seed=0),
        )
        run = study.allocate(study.ALLOCATIONS["FA16-32"], problem)
        percent = 100 * run.error.nan_row_fraction
        count = SEEDS if paper < 100 else 1
        tops = [study.largest_scores(study.recipe(*case, seed=s)) for s in range(count)]
        seeds = [study.nan_percent(top) for top in tops]
        largest = max(largest, *(float(top.max()) for top in tops))
        sd = float(np.std(seeds, ddof=1)) if count > 1 else 0.0
        figures = (percent, seeds[0], float(np.mean(seeds)), sd)
        rows.append([label(case), f"{paper:g}", *(f"{x:.3f}" for x in figures)])
        data[label(case)] = {"paper": paper, "schedule": percent, "by_rule": seeds}
    data["largest score"] = largest
    is_finite = data["others finite"] = _others_are_finite(tokens, head_dim)
    not_ = "" if is_finite else "NOT "
    header = ["case (x0, Am)", "paper", "schedule", "rule, seed 0", "rule, mean", "standard deviation"]
    fields: dict[str, object] = {
        "table_4": table(header, rows),
        "shape": (1, *study.PAPER_SHAPE),
        "seeds": SEEDS,
        "half_overflow": f"{study.HALF_OVERFLOW:g}",
        "largest": largest,
        "largest_scaled": largest / float(np.sqrt(head_dim)),
        "others": f"FA32 and PASA (all float16) are {not_}finite in all six cases (one head each).",
    }
    return fields, {"table_4": data}


def _others_are_finite(tokens: int, head_dim: int) -> bool:
    """Whether one head of FA32 and of PASA is free of NaN in every case of table 4."""
    small = Problem(heads=1, seq_q=tokens, head_dim=head_dim)
    return all(
        study.allocate(study.ALLOCATIONS[name], small.model_copy(update={"data": study.recipe(*case)})).error.nan_count
        == 0
        for case in TABLE_4
        for name in ("FA32", "PASA, mean FP16")
    )


#: RMSE by allocation, over draws.
Errors = dict[str, study.Drawn | str]


def _errors() -> Section:
    """RMSE over x0 and Am."""
    found: dict[str, Errors] = {}
    for case in POINTS:
        by_draw = [sampled(case, draw, study.ALLOCATIONS) for draw in range(DRAWS)]
        found[label(case)] = {name: study.drawn(errors[name] for errors in by_draw) for name in study.ALLOCATIONS}
    rows = [[case, *map(shown, by_name.values())] for case, by_name in found.items()]
    sample = f"{SAMPLE_HEADS} heads of {SAMPLE_QUERIES} queries over {study.PAPER_SHAPE[1]}"
    chains = [by_name["PASA, fixed reference"] / by_name["PASA, mean FP32"] for by_name in _numbers(found)]
    drawn = [e for row in found.values() for e in row.values() if isinstance(e, study.Drawn)]
    scatter = [100 * e.deviation / e.value for e in drawn]
    floor = [found[label(case)]["PASA, mean FP32"] for case in POINTS if case[1] == FLOOR_MEAN]
    fields: dict[str, object] = {
        "rmse": table(["case (x0, Am)", *study.ALLOCATIONS], rows),
        "sample": sample,
        "gain_10": _gain(found, 10.0),
        "gain_20": _gain(found, 20.0),
        "fixed_worst": f"{max(chains):.1f}",
        "scatter_most": f"{max(scatter):.0f}",
        "floor": shown(floor[0]),
    }
    return fields, {"rmse": found}


def _numbers(found: Mapping[str, Errors]) -> list[dict[str, float]]:
    """Return the errors of each case that are numbers."""
    return [{n: e.value for n, e in row.items() if isinstance(e, study.Drawn)} for row in found.values()]


def _gain(found: Mapping[str, Errors], mean: float) -> str:
    """Return by which factors PASA with its mean in float32 beats FA16-32 at a mean x0."""
    at = {label(case): found[label(case)] for case in POINTS if case[1] == mean}
    factors = [row["FA16-32"] / row["PASA, mean FP32"] for row in _numbers(at) if "FA16-32" in row]
    return f"{min(factors):.1f} to {max(factors):.1f}"
