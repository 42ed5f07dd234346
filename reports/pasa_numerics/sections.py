"""Sections of the PASA page beyond the paper's tables: orders of sums, limits, ranges, models, real tensors."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.load import load_device, load_workload
from npusim.formats import get_format
from npusim.program.numerics.input_tensors import recipe_source
from reports.parts.document import Section, number, percent, table
from reports.parts.values import ASCEND, values
from reports.pasa_numerics import study
from reports.pasa_numerics.study import DRAWS, MAIN, label, sampled, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.config.problem import Problem
    from npusim.program.numerics.bits_result import NumericResult
    from npusim.program.numerics.executor import HeadSource

__all__ = ["GAIN", "limits", "models", "orders", "ranges", "real"]

#: Beyond the 724 at which the packaged tensors reach 65504 (shared/qkv/README.md).
GAIN = 800.0


#: Cases and allocations of the table of row sums' orders, and the orders a vector unit can have.
ORDER_POINTS = (("U", 0.0, 0.5), ("U", 20.0, 0.5), ("U", 20.0, 10.0), ("H", 20.0, 10.0))
ORDERED = ("FA16", "PASA, mean FP16", "PASA, mean FP32")
ORDERS = ("vector_lanes", "tree_halves")


def _ordered(allocation: study.Allocation, order: str) -> study.Allocation:
    """Return an allocation with its row sums in an order."""
    return allocation._replace(precision=f"{allocation.precision},sum_order={order}")


def orders() -> Section:
    """Results for the same inputs with row sums in another order."""
    stated = load_device(ASCEND).row_sum
    assert stated is not None
    own, other = sorted(ORDERS, key=lambda order: order != stated.value)
    rows, moved, moved_real = [], [], []
    data: dict[str, dict[str, object]] = {}
    for case in ORDER_POINTS:
        for name in ORDERED:
            chosen = study.ALLOCATIONS[name]
            both = {order: _ordered(chosen, order) for order in ORDERS}
            draws = [sampled(case, draw, both) for draw in range(DRAWS)]
            found = {order: study.drawn(d[order] for d in draws) for order in ORDERS}
            ratios = [b / a for d in draws if isinstance(a := d[own], float) and isinstance(b := d[other], float)]
            ratio = study.drawn(ratios)
            assert isinstance(ratio, study.Drawn)
            moved += [abs(r - 1) for r in ratios]
            told = f"{ratio.value:.2f} ± {ratio.deviation:.2f}"
            rows.append([label(case), name, shown(found[own]), shown(found[other]), told])
            data[f"{label(case)}: {name}"] = {**found, "ratio": ratio}
    posed, source = study.real()
    for name in (*ORDERED, "PASA, fixed reference"):
        chosen = study.ALLOCATIONS[name]
        errors = [study.finite_rmse(study.allocate(_ordered(chosen, order), posed, source)) for order in (own, other)]
        first, second = (e for e in errors if isinstance(e, float))
        moved_real.append(max(first, second) / min(first, second))
        rows.append(["SmolLM2's tensors", name, number(first), number(second), f"{second / first:.2f}"])
        data[f"real: {name}"] = {own: first, other: second}
    header = ["case (x0, Am)", "allocation", f"`{own}`", f"`{other}`", f"`{other}` / `{own}`, draw by draw"]
    fields: dict[str, object] = {
        "orders": table(header, rows),
        "row_sum": stated.value,
        "row_sum_basis": stated.basis,
        "row_sum_source": stated.source,
        "moved": f"{100 * max(moved):.0f}",
        "moved_real": f"{max(moved_real):.1f}",
    }
    return fields, {"orders": data}


def limits() -> Section:
    """Faults that PASA does not prevent, and faults that it prevents."""

    def error(name: str, draws: list[study.Arrays]) -> study.Drawn | str:
        chosen = study.ALLOCATIONS[name]
        return study.drawn(study.finite_rmse(study.allocate(chosen, *study.given(arrays))) for arrays in draws)

    seeds = range(DRAWS)
    opposed = {name: error(name, [study.opposed(30.0, 640, seed=s) for s in seeds]) for name in MAIN}
    some = ("FA16-32", "FA16", "PASA, mean FP32")
    flat = {
        keys: {name: error(name, [study.flat_scores(keys, seed=s) for s in seeds]) for name in some}
        for keys in (1280, 2048, 4096, 8192)
    }
    fields: dict[str, object] = {
        "opposed": table(list(opposed), [list(map(shown, opposed.values()))]),
        "flat": table(["keys", *some], [[k, *map(shown, v.values())] for k, v in flat.items()]),
    }
    return fields, {"opposed": opposed, "flat": flat}


def ranges() -> Section:
    """Ranges before and after the shift, and resonance."""
    rows, data = [], {}
    for name in ("pasa_uniform", "pasa_hybrid", "pasa_resonance"):
        problem = load_workload(name).problem().model_copy(update={"heads": 1, "kv_heads": 1})
        last = [problem.seq_q - 1]
        tiling: dict[str, object] = {"block_q": study.BLOCK, "block_kv": study.BLOCK}
        draws = [
            values(
                "pasa",
                problem,
                "fp32_mean",
                tiling=tiling,
                rows=last,
                diagnose=True,
                source=recipe_source(problem, seed=draw),
            )
            for draw in range(DRAWS)
        ]
        plain = values("flash", problem, "fa16_32", tiling=tiling, rows=last, diagnose=True)
        d, before = draws[0].diagnosis, plain.diagnosis
        assert d is not None
        assert before is not None
        rows.append(
            [
                f"`{name}`",
                _span(d.key_min, d.key_max),
                _span(d.shifted_key_min, d.shifted_key_max),
                _span(d.raw_score_min, d.raw_score_max),
                _span(d.score_min, d.score_max),
                f"{d.resonance_frequency:g}",
                f"{d.resonance_phase_degrees:.0f}",
                f"{d.resonance_cosine:.3f}",
                f"{before.nan_row_percent:.1f} / {d.nan_row_percent:.1f}",
                shown(study.drawn(study.finite_rmse(run) for run in draws)),
            ]
        )
        data[name] = d.figures()
    header = [
        "workload",
        "K",
        "K'",
        "Q K^T",
        "S'",
        "wave",
        "phase, degrees",
        "cosine",
        "NaN rows %, FA16-32 / PASA",
        "RMSE of PASA",
    ]
    return {"ranges": table(header, rows)}, {"ranges": data}


def _span(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "-"
    return f"[{number(low)}, {number(high)}]"


class Ranges(NamedTuple):
    """Ranges that the paper prints (section 3.3.2), and where the product's stand in for them."""

    shape: str
    key: tuple[float, float]
    score: tuple[float, float]
    shifted_key: tuple[float, float]
    shifted_score: tuple[float, float]


PRINTED: Mapping[str, Ranges] = MappingProxyType(
    {
        "SVD-IMG2VID": Ranges(
            "[50, 5, 9216, 64]", (-34.44, 33.88), (-86569.0, -67503.0), (-4.283, 5.843), (-3402.0, 1752.0)
        ),
        "Qwen2-7B": Ranges(
            "[1, 28, 5676, 128]", (-412.0, 234.0), (-226360.0, 27757.0), (-12.54, 9.976), (-58134.0, 1124.0)
        ),
    }
)
#: Allocations that the stand-ins are run with; the last with 1/sqrt(d) on S', as the paper's ranges are.
UNSCALED = "PASA, mean FP32, scale on S'"
MODELLED: Mapping[str, study.Allocation] = MappingProxyType(
    {
        name: study.ALLOCATIONS[name]
        for name in ("FA32", "FA16-32", "PASA, mean FP16", "PASA, mean FP32", "PASA, mean FP32, beta 0.9375")
    }
    | {UNSCALED: study.ALLOCATIONS["PASA, mean FP32"]}
)
#: Steps between the computed blocks of queries of the stand-ins: for the ranges, and for the errors.
RANGE_STEP: Mapping[str, int] = MappingProxyType({"SVD-IMG2VID": 4, "Qwen2-7B": 1})
ERROR_STEP = 16


def _stand_in(model: str, draw: int) -> tuple[Problem, HeadSource]:
    """Return one head of a model's stand-in."""
    if model == "Qwen2-7B":
        return study.given(study.qwen_like(seed=draw))
    problem = load_workload("pasa_resonance").problem().model_copy(update={"heads": 1, "kv_heads": 1})
    return problem, recipe_source(problem, seed=draw)


def models() -> Section:
    """The four ranges of two models and of their stand-ins, with S' without a scale, as in the paper."""
    rows, outcomes, data = [], [], {}
    for model, paper in PRINTED.items():
        found = _ranges_of(model, paper.shape)
        rows += [
            [f"{model}, {title}", *(_span(*r) for r in ranges[1:])]
            for title, ranges in (("printed", paper), ("stand-in", found))
        ]
        runs = [_errors_of(model, draw) for draw in range(DRAWS)]
        errors = {name: study.drawn(study.finite_rmse(run[name]) for run in runs) for name in MODELLED}
        lost = {name: study.drawn(100 * run[name].error.nan_row_fraction for run in runs) for name in MODELLED}
        outcomes.append([model, *(_outcome(errors[name], lost[name]) for name in MODELLED)])
        data[model] = {"printed": paper, "stand-in": found, "rmse": errors, "NaN rows": lost}
    header = ["ranges", "K", "Q K^T", "K'", "S'"]
    margins = (_margin(r) for r in (PRINTED["Qwen2-7B"], found))
    fields: dict[str, object] = {
        **dict(zip(("margin_printed", "margin"), margins, strict=True)),
        "models": table(header, rows),
        "model_errors": table(["stand-in of", *MODELLED], outcomes),
    }
    return fields, {"models": data}


def _margin(ranges: Ranges) -> str:
    """Return how far S' stays within float16's range, in percent of that."""
    limit = get_format("float16").max_finite
    return f"{100 * (1 - max(map(abs, ranges.shifted_score)) / limit):.0f}"


def _some(problem: Problem, step: int) -> list[int]:
    """Return a row of every ``step``-th block of queries, the last one too: its whole block is computed."""
    return [*range(0, problem.seq_q, step * study.BLOCK), problem.seq_q - 1]


def _ranges_of(model: str, shape: str) -> Ranges:
    """Return a stand-in's ranges, of draw 0."""
    problem, source = _stand_in(model, 0)
    chosen = MODELLED[UNSCALED]
    d = values(
        chosen.schedule,
        problem,
        chosen.precision,
        tiling={**chosen.tiling, "scale_in": "scores"},
        source=source,
        rows=_some(problem, RANGE_STEP[model]),
        diagnose=True,
    ).diagnosis
    assert d is not None
    assert d.shifted_key_min is not None
    assert d.shifted_key_max is not None
    assert d.score_min is not None
    assert d.score_max is not None
    return Ranges(
        shape,
        (d.key_min, d.key_max),
        (d.raw_score_min, d.raw_score_max),
        (d.shifted_key_min, d.shifted_key_max),
        (d.score_min, d.score_max),
    )


def _errors_of(model: str, draw: int) -> dict[str, NumericResult]:
    """Return the runs of a stand-in under every allocation."""
    problem, source = _stand_in(model, draw)
    found = {}
    for name, chosen in MODELLED.items():
        tiling = {**chosen.tiling, "scale_in": "scores"} if name == UNSCALED else chosen.tiling
        found[name] = values(
            chosen.schedule, problem, chosen.precision, tiling=tiling, source=source, rows=_some(problem, ERROR_STEP)
        )
    return found


def _outcome(error: study.Drawn | str, lost: study.Drawn | str) -> str:
    """Return an RMSE, or the rows lost."""
    assert isinstance(lost, study.Drawn)
    return f"NaN rows {lost.value:.1f} ± {lost.deviation:.1f} %" if isinstance(error, str) else shown(error)


def real() -> Section:
    """SmolLM2's tensors, as they are and amplified."""
    found = {
        title: {
            name: _of_run(study.allocate(allocation, *study.real(gain)))
            for name, allocation in study.ALLOCATIONS.items()
        }
        for title, gain in (("real", None), (f"amplified {GAIN:g} times", GAIN))
    }
    betas = {
        f"{beta:g}": study.finite_rmse(study.allocate(study.Allocation("pasa", "fp32_mean", beta), *study.real()))
        for beta in (study.BETA, study.SMALL_BETA, 0.75, 0.5, 0.0)
    }
    rows = [[name, *(by_name[name] for by_name in found.values())] for name in study.ALLOCATIONS]
    posed, source = study.real()
    diagnosis = study.allocate(study.ALLOCATIONS["FA32"], posed, source, diagnose=True).diagnosis
    assert diagnosis is not None
    plain, shifted = (
        study.finite_rmse(study.allocate(study.ALLOCATIONS[name], posed, source))
        for name in ("FA16-32", "PASA, mean FP32")
    )
    assert isinstance(plain, float)
    assert isinstance(shifted, float)
    fields: dict[str, object] = {
        "real_largest": f"{max(-diagnosis.raw_score_min, diagnosis.raw_score_max):.0f}",
        "real_cost": f"{shifted / plain:.0f}",
        "real": table(["allocation", *found], rows),
        "real_beta": table(list(betas), [list(betas.values())]),
        "gain": f"{GAIN:g}",
    }
    return fields, {"real": found, "real_beta": betas}


def _of_run(run: NumericResult) -> str:
    found = study.finite_rmse(run)
    return f"NaN rows {percent(run.error.nan_row_fraction, 2)}" if isinstance(found, str) else number(found)
