"""Section: FlashAttention's backward pass on an H100, beside FlashAttention-2's kernels and Triton's."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import npusim
from reports.parts.document import percent, table

if TYPE_CHECKING:
    from reports.parts.document import Section

__all__ = ["on_h100"]

HERE = Path(__file__).resolve().parent
#: Phases of a run by the kernels that were measured.
FA2 = {"dot_do_o": "delta", "dq_dk_dv": "dkdvdq", "convert_dq": "scaled"}
#: Spilled registers from which what ptxas does is no account of registers any more.
MANY_SPILLS = 100


def on_h100() -> Section:
    """Return tables and figures of both."""
    with (HERE / "backward.csv").open(encoding="utf-8", newline="") as read:
        rows = list(csv.DictReader(read))
    library, figures = _library([r for r in rows if r["kernel"].startswith("fa2")])
    compiled, more = _compiled([r for r in rows if r["kernel"].startswith("triton") and r["causal"] == "0"])
    return {**library, **compiled}, {"fa2_backward": figures, "triton_backward": more}


def _times(shape: str, causal: str, fields: dict[str, Any]) -> dict[str, float]:
    """Return microseconds of each kernel of a call, batch x heads x tokens x width."""
    batch, heads, tokens, width = map(int, shape.split("x"))
    sizes = {"batch": batch, "heads": heads, "tokens": tokens, "key": width, "value": width, "causal": int(causal)}
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
