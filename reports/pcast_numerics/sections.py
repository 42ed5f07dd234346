"""Sections of the P-Cast page on what the paper states without a table or leaves open."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.formats import get_format
from reports.parts.document import Section, number, table
from reports.pcast_numerics import beyond, study, theory

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SECTIONS"]

KEYS, SINKS, HEADS = 4096, 4, 32
GAP = 7.0
GAPS = (5, 6, 7, 8, 9, 10, 12)
UNIT = 1e-5
#: Scales of section 5.3: powers of two, and FlashInfer's 448.
SCALES = (1.0, 16.0, 64.0, 128.0, 256.0, 448.0, 512.0)
#: Gaps of the coverage table.
COVERED = (5.0, 7.0, 9.0)


def _of_unit(found: study.Mean) -> str:
    return f"{found.value / UNIT:.3f} ± {found.error / UNIT:.3f}"


def _percent(found: study.Mean) -> str:
    return f"{100 * found.value:.2f} ± {100 * found.error:.2f}"


def _ratio(found: study.Mean) -> str:
    return f"{found.value:.2f} ± {found.error:.2f}"


def proposition() -> Section:
    """Proposition 3, the error of forward order at S = 1, and the remaining error without collapse."""
    rows, data = [], {}
    shares: dict[int, study.Mean] = {}
    for gap in GAPS:
        problem = study.sink_problem(float(gap), KEYS, HEADS, seed=300 + gap)
        plain = beyond.collapse(problem, study.PRECISIONS["forward, S=1"])
        scaled = study.error_by_head(problem, study.PRECISIONS["forward, S=256"])
        proposed, measured = study.mean_of(plain.proposition), study.mean_of(plain.error)
        rest = study.mean_of(scaled)
        share = shares[gap] = study.ratio_of(plain.proposition, plain.error)
        expected = theory.collapse_error(float(gap), 1.0, SINKS, KEYS)
        rows.append(
            [gap, _of_unit(proposed), f"{expected / UNIT:.3f}", _of_unit(measured), _of_unit(rest), _percent(share)]
        )
        data[gap] = {
            "proposition": proposed,
            "expected": expected,
            "measured": measured,
            "scale 256": rest,
            "share": share,
        }
    header = [
        "gap",
        "proposition 3, keys zeroed as measured",
        "expected",
        "measured, S=1",
        "measured, S=256",
        "proposition / measured, %",
    ]
    best = max(shares, key=lambda gap: shares[gap].value)
    real = beyond.real_collapse(study.PRECISIONS["forward, S=1"])
    fields: dict[str, object] = {
        "proposition": table(header, rows),
        "proposition_rows": HEADS * study.QUERIES,
        "proposition_best": best,
        "proposition_share": f"{100 * shares[best].value:.0f}",
        "proposition_real": f"{real:.0f}",
    }
    return fields, {"proposition_3": data, "proposition_3_real": real}


def coverage() -> Section:
    """Section 5.3: the start of P's normal range, and the number of normal keys in it."""
    found = {gap: beyond.casts(study.sink_problem(gap, KEYS, HEADS, seed=320), SCALES) for gap in COVERED}
    rows = []
    for index, scale in enumerate(SCALES):
        start = theory.E4M3.min_normal / scale
        row = [f"{scale:g}", start, theory.normal_exponent(scale)]
        for gap in COVERED:
            cast, expected = found[gap][index], theory.coverage(gap, scale, SINKS)
            row.append(f"{100 * cast.normal:.1f} ({100 * expected:.1f}) / {100 * cast.zero:.1f}")
        rows.append([*row, "saturates" if scale > theory.E4M3.max_finite else ""])
    header = [
        "S",
        "P is normal from",
        "m - s up to",
        *(f"gap {gap:g}: normal (expected) / zero, %" for gap in COVERED),
        "note",
    ]
    at = dict(zip(SCALES, found[GAP], strict=True))
    fields: dict[str, object] = {
        "coverage": table(header, rows),
        "coverage_1": f"{100 * at[1.0].normal:.2f}",
        "coverage_256": f"{100 * at[256.0].normal:.0f}",
        "coverage_448": f"{100 * at[448.0].normal:.0f}",
    }
    shown = {f"{gap:g}": dict(zip(map(str, SCALES), casts, strict=True)) for gap, casts in found.items()}
    return fields, {"coverage": shown}


def dynamic() -> Section:
    """Section 7.4: a power of two that each block or row chooses."""
    rows, data = [], {}
    largest = 0.0
    for gap in GAPS:
        problem = study.sink_problem(float(gap), KEYS, HEADS // 4, seed=340 + gap)
        for order in ("forward", "reverse"):
            found = beyond.dynamic_errors(problem, is_reverse=order == "reverse")
            static = found["static 256"]
            gains = {n: float(1 - e.mean() / static.mean()) for n, e in found.items() if e is not static}
            rows.append([gap, order, _of_unit(study.mean_of(static)), *(f"{1e6 * g:.1f}" for g in gains.values())])
            data[f"{gap} {order}"] = {"static 256": study.mean_of(static), "gain": gains}
            largest = max(largest, *gains.values())
    gained = (f"gain with a scale for {n}, parts in a million" for n in beyond.DYNAMIC)
    header = ["gap", "order", "S = 256, 1e-5", *gained]
    return {"dynamic": table(header, rows), "dynamic_most": f"{1e6 * largest:.0f}"}, {"dynamic": data}


#: Places of four sinks, by how the page calls them.
PLACES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "first keys": (0, 1, 2, 3),
        "a quarter apart from 0": (0, 1024, 2048, 3072),
        "a third apart, first to last": (0, 1365, 2730, 4095),
        "together at 3/4": (3072, 3073, 3074, 3075),
    }
)
ORDERS = ("forward, S=1", "reverse, S=1", "forward, S=256", "reverse, S=256")
BLOCK = 64


def _expected(places: tuple[int, ...], name: str) -> float:
    """Return the fraction zeroed if a block's keys see the maximum of the sinks visited so far, its own included."""
    scale = 256.0 if name.endswith("256") else 1.0
    by_count = [theory.zeroed_fraction(GAP, scale, seen) for seen in range(len(places) + 1)]
    zeroed = 0.0
    for start in range(0, KEYS, BLOCK):
        seen = [p >= start if name.startswith("reverse") else p < start + BLOCK for p in places]
        own = sum(start <= p < start + BLOCK for p in places)
        zeroed += (BLOCK - own) * by_count[sum(seen)]
    return zeroed / (KEYS - len(places))


def several_places() -> Section:
    """Section 7.4: sinks spread over the sequence."""
    rows, data = [], {}
    zeroed_at: dict[tuple[str, str], float] = {}
    error_at: dict[tuple[str, str], float] = {}
    for where, places in PLACES.items():
        for name in ORDERS:
            problem = study.sink_problem(GAP, KEYS, HEADS, seed=360)
            found = beyond.placed(problem, places, study.PRECISIONS[name])
            zeroed, error = study.mean_of(found.zeroed), study.mean_of(found.error)
            expected = _expected(places, name)
            rows.append([where, name, _percent(zeroed), f"{100 * expected:.2f}", _of_unit(error)])
            data[f"{where}, {name}"] = {"zeroed": zeroed, "expected": expected, "error": error}
            zeroed_at[where, name], error_at[where, name] = zeroed.value, error.value
    header = ["sinks", "configuration", "zeroed, %", "expected", "MSE, 1e-5"]
    together, *_, apart, _ = PLACES
    spread, first = (zeroed_at[where, "reverse, S=1"] for where in (apart, together))
    larger, smaller = (error_at[where, "forward, S=256"] for where in (together, apart))
    fields: dict[str, object] = {
        "together_over_apart": f"{larger / smaller:.1f}",
        "places": table(header, rows),
        "reverse_spread": f"{100 * spread:.0f}",
        "reverse_first": f"{100 * first:.1f}",
    }
    return fields, {"places": data}


#: Numbers of sinks at the sequence's start.
COUNTS = (1, 2, 4, 8, 16)


def several_counts() -> Section:
    """More or fewer sinks: delta_k, and the fraction zeroed."""
    rows, data = [], {}
    for sinks in COUNTS:
        problem = study.sink_problem(GAP, KEYS, HEADS, seed=380 + sinks, sinks=sinks)
        found = beyond.placed(problem, tuple(range(sinks)), study.PRECISIONS["forward, S=1"])
        zeroed, error = study.mean_of(found.zeroed), study.mean_of(found.error)
        expected, formula = theory.zeroed_fraction(GAP, 1.0, sinks), theory.closed_form(GAP, 1.0, sinks)
        shift = theory.sink_shift(sinks)
        rows.append(
            [
                sinks,
                f"{round(shift, 4) + 0.0:.4f}",
                _percent(zeroed),
                f"{100 * expected:.2f}",
                f"{100 * formula:.2f}",
                _of_unit(error),
            ]
        )
        data[sinks] = {"shift": shift, "zeroed": zeroed, "expected": expected, "formula": formula, "error": error}
    header = ["sinks k", "delta_k", "zeroed, %", "expected", "by equation 7", "MSE, 1e-5"]
    return {"counts": table(header, rows)}, {"sinks": data}


#: Configurations of the section on E4M3 inputs.
EIGHT_BIT = ("forward, S=1", "forward, S=256", "reverse, S=256")


def eight_bit() -> Section:
    """Section 7.4: Q, K and V in E4M3 too."""
    rows, data = [], {}
    ratios: dict[int, tuple[study.Mean, study.Mean, study.Mean]] = {}
    chosen = {name: study.PRECISIONS[name] for name in EIGHT_BIT}
    for gap in GAPS:
        found = beyond.eight_bit(float(gap), KEYS, HEADS, chosen, seed=400 + gap)
        plain, best = found["forward, S=1"], found["reverse, S=256"]
        signal, whole = study.ratio_of(plain.cast, best.cast), study.ratio_of(plain.total, best.total)
        floor = study.ratio_of(best.inputs, best.cast)
        ratios[gap] = signal, whole, floor
        rows.append(
            [
                gap,
                *(_of_unit(study.mean_of(f.cast)) for f in found.values()),
                _of_unit(study.mean_of(best.inputs)),
                _of_unit(study.mean_of(plain.total)),
                _of_unit(study.mean_of(best.total)),
                _ratio(signal),
                _ratio(whole),
            ]
        )
        data[gap] = {name: {k: study.mean_of(v) for k, v in f._asdict().items()} for name, f in found.items()} | {
            "ratio of casts": signal,
            "ratio of totals": whole,
            "inputs over cast": floor,
        }
    header = [
        "gap",
        *(f"cast, {name}" for name in EIGHT_BIT),
        "inputs",
        f"total, {EIGHT_BIT[0]}",
        f"total, {EIGHT_BIT[-1]}",
        "S=1 / best, cast",
        "S=1 / best, total",
    ]
    signals, totals, floors = ({g: r[i].value for g, r in ratios.items()} for i in range(3))
    fields: dict[str, object] = {
        "eight_bit": table(header, rows),
        "eight_bit_rows": HEADS * study.QUERIES,
        "floor_low": number(min(floors.values()), 2),
        "floor_high": number(max(floors.values()), 2),
        "ratio_cast": f"{signals[int(GAP)]:.1f}",
        "ratio_total": f"{totals[int(GAP)]:.2f}",
        "ratio_most": f"{max(totals.values()):.2f}",
    }
    return fields, {"eight_bit": data}


#: Scales of proposition 5: the paper's two, and others in use or between.
SCALED = (256.0, 448.0, 384.0, 240.0)


def scaling() -> Section:
    """Proposition 5 with numbers: what multiplying by S, and by 1/S, rounds."""
    found = {scale: theory.scaling(scale) for scale in SCALED}
    rows = [
        [f"{scale:g}", *(f"{100 * share:.1f}" for share in (s.rounded, s.lost)), number(s.error), number(s.recast)]
        for scale, s in found.items()
    ]
    header = [
        "S",
        "S x rounded, %",
        "(S x) / S differs from x, %",
        "largest relative error",
        "share of other E4M3 codes",
    ]
    at = found[448.0]
    fields: dict[str, object] = {
        "scaling": table(header, rows),
        "max_rounded": f"{100 * at.rounded:.0f}",
        "max_error": number(at.error),
        "max_recast": number(at.recast),
    }
    return fields, {"proposition_5": {f"{scale:g}": s for scale, s in found.items()}}


def correction() -> Section:
    """Equation 15: by what the accumulator is multiplied when the sinks come last."""
    found = {gap: theory.correction(float(gap), SINKS, KEYS) for gap in GAPS}
    rows = [[gap, math.exp(-gap), mean, mean / math.exp(-gap)] for gap, mean in found.items()]
    fields: dict[str, object] = {
        "correction": table(["gap", "e^-gap", "mean of exp(m_pre - m_sink)", "mean / e^-gap"], rows),
        "correction_ratio": number(found[7] / math.exp(-7), 2),
        "one_rounding": number(2.0 ** -(get_format("float32").mantissa_bits + 1), 2),
    }
    return fields, {"correction": found}


SECTIONS = (scaling, correction, proposition, coverage, dynamic, several_places, several_counts, eight_bit)
