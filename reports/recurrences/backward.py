"""Section: FlashAttention's backward pass on an H100, compared with FlashAttention-2's kernels and Triton's."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import npusim
from npusim.config.load import load_device
from npusim.config.tiling import build_tiling
from npusim.library import find_schedule
from reports.parts.document import percent, table

if TYPE_CHECKING:
    from reports.parts.document import Section

__all__ = ["on_h100"]

HERE = Path(__file__).resolve().parent
#: Phases of a run by measured kernel; torch clears and sums with its own kernels.
FA2 = {"dot_do_o": "delta", "dq_dk_dv": "dkdvdq", "convert_dq": "scaled"}
TORCH = {"fill": "clear", "sum_dk": "sum_dk", "sum_dv": "sum_dv"}
#: Queries and keys of a tile by head size.  source: flash_bwd_launch_template.h
TILES = {64: (128, 128), 96: (64, 128), 128: (64, 128), 256: (64, 64)}
#: Number of spilled registers from which ptxas' decisions no longer follow from the number of registers.
MANY_SPILLS = 100


def on_h100() -> Section:
    """Return tables and figures of both."""
    rows = _rows("backward.csv")
    library, figures = _library([r for r in rows if r["kernel"].startswith("fa2")])
    compiled, more = _compiled([r for r in rows if r["kernel"].startswith("triton") and r["causal"] == "0"])
    return {**library, **compiled}, {"fa2_backward": figures, "triton_backward": more}


def _rows(file: str) -> list[dict[str, str]]:
    with (HERE / file).open(encoding="utf-8", newline="") as read:
        return list(csv.DictReader(read))


def of_both_methods() -> Section:
    """Return FlashAttention-2's backward pass as torch calls it, with atomic additions and deterministic."""
    figures: list[dict[str, Any]] = []
    # A window with both sides is none of `flash_backward`'s, whose windows end with a query's own key.
    for row in (r for r in _rows("deterministic.csv") if not r["window"] or r["window"].endswith("/0")):
        measured = {phase: float(row[n]) for n, phase in {**FA2, **TORCH}.items() if row[n]}
        sizes = {n: int(row[n]) for n in ("batch", "heads", "kv_heads", "tokens", "causal")}
        sizes |= {"window": int(row["window"].partition("/")[0]) + 1} if row["window"] else {}
        method = "deterministic" if row["deterministic"] == "1" else "added"
        found = _called(sizes, int(row["width"]), method)
        total = sum(found.values()), sum(measured.values())
        known: dict[str, Any] = {"off": found["dkdvdq"] / measured["dkdvdq"] - 1, "us": total[0], "measured": total[1]}
        figures.append({**sizes, "width": int(row["width"]), "method": method, **known})
    lines = [_of_group(name, [f for f in figures if _group(f) == name]) for name in dict.fromkeys(map(_group, figures))]
    heads = ["calls", "count", "kernel, added", "kernel, deterministic", "price measured", "price predicted"]
    calls = [abs(f["us"] / f["measured"] - 1) for f in figures]
    known = {"both_count": len(figures), "both_median": percent(median(abs(f["off"]) for f in figures))}
    return {**known, "both": table(heads, lines), "both_calls": percent(median(calls))}, {"fa2_both": figures}


def _group(f: dict[str, Any]) -> str:
    if "window" in f:
        return "windows"
    if f["kv_heads"] < f["heads"]:
        return "grouped heads"
    return "other lengths" if f["tokens"] % max(TILES[64]) else "whole tiles"


def _of_group(name: str, listed: list[dict[str, Any]]) -> list[str]:
    """Return a line: errors of the kernels, and the ratio of a deterministic call to one with atomic additions."""
    of = {method: [f for f in listed if f["method"] == method] for method in ("added", "deterministic")}
    ranges = [f"{percent(min(x))} to {percent(max(x))}" for x in ([f["off"] for f in of[m]] for m in of)]
    pairs = list(zip(of["added"], of["deterministic"], strict=True))
    prices = [sorted(b[n] / a[n] for a, b in pairs) for n in ("measured", "us")]
    return [name, str(len(listed)), *ranges, *(f"{x[0]:.2f} to {x[-1]:.2f}" for x in prices)]


def _times(shape: str, causal: str, fields: dict[str, Any]) -> dict[str, float]:
    """Return microseconds of each kernel of a call, batch x heads x tokens x width."""
    batch, heads, tokens, width = map(int, shape.split("x"))
    return _simulated({"batch": batch, "heads": heads, "tokens": tokens, "causal": int(causal)}, width, fields)


def _called(sizes: dict[str, int], width: int, method: str) -> dict[str, float]:
    tile_q, tile_kv = TILES[width]
    fields = {"method": method, "tile_q": tile_q, "tile_kv": tile_kv, "warps": 8, "stages": None}
    return _simulated(sizes, width, fields)


def _simulated(of: dict[str, int], width: int, fields: dict[str, Any]) -> dict[str, float]:
    sizes = {**of, "key": width, "value": width}
    # Tiles of the other kernels, which no row is of, are the declared ones: no run searches them.
    declared = build_tiling(find_schedule("flash_backward", load_device("h100").family).tiling, {})
    fields = {**{n: getattr(declared, n) for n in ("block_q", "block_kv", "tile_q", "tile_kv")}, **fields}
    run = npusim.run("flash_backward", hw="h100", problem=sizes, tiling=fields, numerics=False)  # type: ignore[arg-type]
    assert run.timing is not None
    assert run.timing.account is not None
    return {p.name: run.timing.core_us * p.cycles / run.timing.cycles for p in run.timing.account.phases}


def _library(rows: list[dict[str, str]]) -> tuple[dict[str, object], list[dict[str, object]]]:
    calls: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        calls.setdefault((row["shape"], row["causal"]), []).append(row)
    lines, figures = [], []
    for (shape, causal), listed in calls.items():
        measured = {FA2[r["kernel"].partition(" ")[2]]: float(r["us"]) for r in listed}
        tile = {"tile_q": listed[0]["rows"], "tile_kv": listed[0]["keys"]}
        found = _times(shape, causal, {"method": "added", **tile, "warps": 8, "stages": None})
        off = {name: found[name] / us - 1 for name, us in measured.items()}
        total = sum(found.values()) / sum(measured.values()) - 1
        one, seen = f"{found['dkdvdq']:,.0f}", "causal" if causal == "1" else "all"
        named = shape.replace("x", " x ")
        lines.append([named, seen, one, f"{measured['dkdvdq']:,.0f}", percent(off["dkdvdq"]), percent(total)])
        figures.append({"shape": shape, "causal": causal, "off": off["dkdvdq"], "total": total})
    heads = ["batch x heads x tokens x width", "keys", "us", "measured", "off", "all three kernels"]
    worst = {n: percent(max(abs(float(str(f[n]))) for f in figures)) for n in ("off", "total")}
    fields = {"fa2": table(heads, lines), "fa2_calls": len(figures), "fa2_worst": worst["off"]}
    return {**fields, "fa2_total": worst["total"]}, figures


def _compiled(rows: list[dict[str, str]]) -> tuple[dict[str, object], list[dict[str, object]]]:
    lines, figures = [], []
    for row in rows:
        kernel, tile = row["kernel"].partition(" ")[2], (row["rows"], row["keys"])
        names = ("block_q", "block_kv") if kernel == "dq" else ("tile_q", "tile_kv")
        fields = {**dict(zip(names, tile, strict=True)), "warps": row["warps"], "stages": row["stages"]}
        us, measured = _times(row["shape"], row["causal"], fields)[kernel], float(row["us"])
        off, width = us / measured - 1, row["shape"].rpartition("x")[2]
        figures.append({"kernel": kernel, "spilled": int(row["spilled"]), "off": off, **fields, "width": width})
        shown = " x ".join(tile), row["warps"], row["stages"], row["registers"], row["spilled"]
        lines.append([kernel, width, *shown, f"{us:,.0f}", f"{measured:,.0f}", percent(off)])
    few = [abs(float(str(f["off"]))) for f in figures if int(str(f["spilled"])) < MANY_SPILLS]
    heads = ["kernel", "width", "queries x keys", "warps", "stages", "registers", "spilled", "us", "measured", "off"]
    return {
        "tiles": table(heads, lines),
        "tiles_count": len(figures),
        "tiles_median": percent(median(few)),
        "tiles_worst": percent(max(few)),
        "tiles_few": len(few),
    }, figures
