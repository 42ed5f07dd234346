"""The page on block-scaled formats: which error the format, the scale's rule and a shift of K make in attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.formats import BLOCK_FORMATS, get_block_format
from reports.block_scaled.kernels import KERNELS, Kernel, absolute_error, kernel_error, latency_us
from reports.block_scaled.study import BETA, INPUTS, KEYS, QUERIES, error, sink_error
from reports.parts.chart import chart
from reports.parts.document import number, percent, save_page, table
from reports.parts.front import unbeaten

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BETAS", "FORMATS", "SHIFTS", "errors", "write"]

#: Formats of numbers with one scale a tensor, then formats of blocks.
FORMATS = ("float8_e4m3fn", "hifloat8", *(name for name in BLOCK_FORMATS if not name.endswith("_128")))
#: The device whose times are compared.
TIMED = "ascend_950"
#: Formats whose rules are compared.
RULED = ("mxfp8", "mxfp4", "nvfp4")
SHIFTS = ("none", "mean", "pasa")
BETAS = (0.0, 0.5, 0.75, 0.9, 0.9375, 0.96875, BETA)
#: P-Cast (arXiv 2606.06521), table 2, 4,096 keys and a gap of 7: mean squared errors of 1e-5, by the factor of P.
PUBLISHED_SINKS = {1: 5.65, 256: 1.64, 448: 1.81}
#: How P is stored beside that: (format, rule, factor).
SINKS = (
    *(("float8_e4m3fn", None, float(factor)) for factor in PUBLISHED_SINKS),
    ("mxfp8", "floor", 1.0),
    ("mxfp8", "rceil", 1.0),
    ("mxfp4", "floor", 1.0),
    ("nvfp4", "sage3", 1.0),
    ("nvfp4", "sage3_p", 2688.0),
)
#: FlashAttention-3 (arXiv 2407.08608), table 3: RMSE of N(0, 1) with N(0, 100) on a thousandth of the elements.
PUBLISHED_OUTLIERS = {"float16": 1.9e-4, "FP8, one scale a tensor": 2.4e-2, "FP8, FlashAttention-3": 9.1e-3}
#: (operands that are quantised, name of the column).
PARTS = (("qk", "Q, K"), ("p", "P"), ("v", "V"), ("qkpv", "all"))


def write(folder: Path) -> list[Path]:
    """Write the page, its figures and the chart."""
    by_part = {n: {f: {where: error(n, f, where=where) for where, _ in PARTS} for f in FORMATS} for n in INPUTS}
    by_shift = {n: {f: errors(n, f) for f in FORMATS} for n in INPUTS}
    by_rule = {
        f: {r: {n: error(n, f, r, where="qk") for n in INPUTS} for r in get_block_format(f).rules if r != "sage3_p"}
        for f in RULED
    }
    two_level = {n: [error(n, "nvfp4", r, where="p") for r in ("sage3", "sage3_p")] for n in INPUTS}
    by_beta = {n: [error(n, "mxfp8", where="qk", shift="pasa", beta=b) for b in BETAS] for n in INPUTS}
    sinks = {f"{fmt} {rule or ''} {factor:g}": sink_error(fmt, rule, factor) for fmt, rule, factor in SINKS}
    found = {f"{k} on {k.hw}": {n: kernel_error(k, n) for n in INPUTS} for k in KERNELS}
    times = {str(k): latency_us(k) for k in KERNELS if k.hw == TIMED}
    fields: dict[str, object] = _of_kernels(sinks, found, times) | {
        "parts": table(
            ["format", *(f"{n}: {word}" for n in ("normal", "SmolLM2") for _, word in PARTS)],
            [[f, *(by_part[n][f][w] for n in ("normal", "SmolLM2") for w, _ in PARTS)] for f in FORMATS],
        ),
        "shifts": table(
            ["format", *(f"{n}: {shift}" for n in ("channels", "SmolLM2", "resonance") for shift in SHIFTS)],
            [[f, *(by_shift[n][f][s] for n in ("channels", "SmolLM2", "resonance") for s in SHIFTS)] for f in FORMATS],
        ),
        "rules": "\n\n".join(
            table([f, *INPUTS], [[rule, *found.values()] for rule, found in rules.items()])
            for f, rules in by_rule.items()
        ),
        "levels": table(["P in NVFP4", *INPUTS], _levels(two_level)),
        "betas": table(["beta", *INPUTS], [[f"{b:g}", *(by_beta[n][i] for n in INPUTS)] for i, b in enumerate(BETAS)]),
        "beta": f"{BETA:g}",
        "keys": KEYS,
        "queries": QUERIES,
        "mx_gain": _percent(by_part),
        "floor_normal": number(by_rule["mxfp8"]["floor"]["normal"] / by_rule["mxfp8"]["rceil"]["normal"], 3),
        "amplified": number(BETA / (1 - BETA)),
        "pasa_normal": _ratio(by_shift, "normal", "mxfp8", "pasa", "none"),
        "pasa_smollm2": _ratio(by_shift, "SmolLM2", "mxfp8", "pasa", "none"),
        "resonant": number(by_shift["resonance"]["mxfp8"]["none"]),
        "resonant_pasa": number(by_shift["resonance"]["mxfp8"]["pasa"]),
        "channels_mean": _ratio(by_shift, "channels", "mxfp8", "none", "mean"),
        "channels_fp4": _ratio(by_shift, "channels", "mxfp4", "none", "mean"),
        "levels_outliers": number(two_level["outliers"][0] / two_level["outliers"][1], 2),
        "levels_smollm2": number(two_level["SmolLM2"][0] / two_level["SmolLM2"][1], 2),
        "smollm2_kernel": _more(found, "SmolLM2"),
        "smollm2_mean": _ratio(by_shift, "SmolLM2", "mxfp8", "mean", "none"),
    }
    lines = {n: list(zip(BETAS, found, strict=True)) for n, found in by_beta.items()}
    title = "Error by beta: MXFP8 Q and K, keys shifted by PASA"
    picture = chart(
        title, "beta: share of a block's mean that is subtracted", "relative RMSE of the output", lines, log_y=True
    )
    data: dict[str, object] = {"parts": by_part, "shifts": by_shift, "rules": by_rule, "levels": two_level}
    data |= {"betas": by_beta, "sinks": sinks, "kernels": found, "latency_us": times, "outliers": outliers()}
    return save_page(folder, "block_scaled", (fields, data), {"block_scaled_beta.svg": picture})


def outliers() -> dict[str, float]:
    """Return RMSEs of kernels on the inputs of FlashAttention-3's table 3, by the words of its rows."""
    half, eight = (Kernel(TIMED, "flash", p) for p in ("fa2_fp32", "sage_fp8,smooth="))
    size = absolute_error(half, "outliers") / kernel_error(half, "outliers")
    return {
        "float16": absolute_error(half, "outliers"),
        "E4M3, one scale a tensor": error("outliers", "float8_e4m3fn") * size,
        "E4M3, no scales": absolute_error(eight, "outliers"),
    }


def _of_kernels(
    sinks: dict[str, float], found: dict[str, dict[str, float]], times: dict[str, float]
) -> dict[str, object]:
    """Return the figures of the page on whole kernels and on published errors."""
    best = {
        n: unbeaten({k: (us, found[f"{k} on {TIMED}"][n]) for k, us in times.items()}) for n in ("normal", "SmolLM2")
    }
    published, ours = list(PUBLISHED_OUTLIERS.items()), list(outliers().items())
    rows: list[list[object]] = []
    for k, us in times.items():
        errors_of = found[f"{k} on {TIMED}"]
        rows.append([k, number(us, 3), *(f"{number(errors_of[n], 3)}{' *' * (k in best[n])}" for n in best)])
    return {
        "kernels": table(["kernel", *INPUTS], [[k, *by_input.values()] for k, by_input in found.items()]),
        "front": table([f"on {TIMED}", "µs", *(f"error, {n}" for n in best)], rows),
        "four_bits": f"{number(sinks['nvfp4 sage3_p 2688'] / sinks['mxfp8 rceil 1'], 2)} to "
        f"{number(sinks['nvfp4 sage3 1'] / sinks['mxfp8 rceil 1'], 2)}",
        "slower": number(times["flash mxfp8"] / times["flash fa2_fp32"], 3),
        "smoothing": number(times["flash mxfp8,scale_rule=rceil,smooth=k"] - times["flash mxfp8,scale_rule=rceil"], 2),
        "sinks": table(
            ["P stored as", "rule", "factor on P", "MSE, 1e-5", "published"],
            [
                [fmt, rule or "", f"{x:g}", 1e5 * mse, PUBLISHED_SINKS[int(x)] if fmt == SINKS[0][0] else ""]
                for (fmt, rule, x), mse in zip(SINKS, sinks.values(), strict=True)
            ],
        ),
        "outliers": table(
            ["published", "RMSE", "/ float16", "npusim", "RMSE", "/ float16"],
            [[*_over(a, published[0][1]), *_over(b, ours[0][1])] for a, b in zip(published, ours, strict=True)],
        ),
    }


def _more(found: dict[str, dict[str, float]], name: str) -> str:
    """Return by how much the mean of K raises the error of MXFP8 kernels."""
    plain, smooth = (found[f"flash mxfp8,scale_rule=rceil{more} on {TIMED}"][name] for more in ("", ",smooth=k"))
    return f"{100 * (smooth / plain - 1):.0f} %"


def _over(row: tuple[str, float], first: float) -> list[object]:
    return [row[0], row[1], number(row[1] / first, 3)]


def errors(name: str, fmt: str) -> dict[str, float]:
    """Return the error of quantised Q and K, by the transformation of K before it is quantised."""
    return {shift: error(name, fmt, where="qk", shift=shift) for shift in SHIFTS}


def _ratio(found: dict[str, dict[str, dict[str, float]]], name: str, fmt: str, over: str, under: str) -> str:
    return number(found[name][fmt][over] / found[name][fmt][under], 2)


def _percent(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return how far MXFP8's error of all operands is from that of FP8 at most, inputs with one winner set aside."""
    ratios = [f["mxfp8"]["qkpv"] / f["float8_e4m3fn"]["qkpv"] for name, f in found.items() if name != "resonance"]
    return percent(max(max(r, 1 / r) - 1 for r in ratios), 0)


def _levels(found: dict[str, list[float]]) -> list[list[object]]:
    words = ("one level: P / 6 as scale", "two levels: P times 2688 first")
    return [[word, *(found[n][i] for n in INPUTS)] for i, word in enumerate(words)]
