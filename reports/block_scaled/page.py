"""The page on block-scaled formats: which error the format, the scale's rule and a shift of K make in attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.formats import BLOCK_FORMATS, get_block_format
from reports.block_scaled.study import BETA, INPUTS, KEYS, QUERIES, error
from reports.parts.chart import chart
from reports.parts.document import number, percent, save_page, table

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BETAS", "FORMATS", "SHIFTS", "errors", "write"]

#: Formats of numbers with one scale a tensor, then formats of blocks.
FORMATS = ("float8_e4m3fn", "hifloat8", *(name for name in BLOCK_FORMATS if not name.endswith("_128")))
#: Formats whose rules are compared.
RULED = ("mxfp8", "mxfp4", "nvfp4")
SHIFTS = ("none", "mean", "pasa")
BETAS = (0.0, 0.5, 0.75, 0.9, 0.9375, 0.96875, BETA)
#: (operands that are quantised, what the column is called).
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
    fields: dict[str, object] = {
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
        "smollm2_mean": _ratio(by_shift, "SmolLM2", "mxfp8", "mean", "none"),
    }
    lines = {n: list(zip(BETAS, found, strict=True)) for n, found in by_beta.items()}
    title = "MXFP8 Q and K, keys shifted as PASA shifts them"
    picture = chart(title, "beta, share of a block's mean taken", "relative RMSE of the output", lines, log_y=True)
    data = {"parts": by_part, "shifts": by_shift, "rules": by_rule, "levels": two_level, "betas": by_beta}
    return save_page(folder, "block_scaled", (fields, data), {"block_scaled_beta.svg": picture})


def errors(name: str, fmt: str) -> dict[str, float]:
    """Return the error of quantised Q and K by what is done to K before."""
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
