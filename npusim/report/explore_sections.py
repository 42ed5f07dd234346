"""The page of a search: what is fastest, what lies on the front, how the time falls over two axes, what does not fit.

It is made of the rows of a search's table, so that one written by another version, or by hand, is shown too.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Any

from npusim.errors import SpecError
from npusim.explore.store import FIGURES, read_store
from npusim.report import charts
from npusim.report.page import PagePart
from npusim.report.pipes import read_csv
from npusim.report.sections import Figure, FigureTile
from npusim.report.text import percent, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from npusim.report.charts import Row, Spec

STORE = ".sqlite"
#: Points that a chart names, and that a table lists; pairs of axes that are drawn.
NAMED, LISTED, MAPS = 15, 200, 3


def rows_of(file: Path) -> list[Row]:
    """Return the rows of a search's store (``.sqlite``) or table, numbers as numbers; raise `SpecError` for none."""
    if file.suffix == STORE:
        return [o.row() for o in read_store(file)[1]]
    rows: list[Row] = [{k: _number(v) for k, v in row.items() if k} for row in read_csv(file)[1]]
    missing = {"status", "latency_us"} - set(rows[0] if rows else ())
    if missing:
        raise SpecError(f"{file}: no table of npusim explore: it has no column {', '.join(sorted(missing))}, or no row")
    return rows


def _number(text: Any) -> Any:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return text or None
    return (int(value) if value.is_integer() else value) if math.isfinite(value) else None


def exploration_part(title: str, rows: Sequence[Row]) -> PagePart:
    """Return what a page says of a search."""
    axes, ranked = varied(rows), _ranked(rows)
    counts = {s: sum(r["status"] == s for r in rows) for s in dict.fromkeys(str(r["status"]) for r in rows)}
    said = ", ".join(f"{whole(n)} {status}" for status, n in counts.items())
    return PagePart(
        title, f"{whole(len(rows))} points: {said}", _tiles(ranked, axes), (), tuple(_figures(rows, ranked, axes))
    )


def varied(rows: Sequence[Row]) -> list[str]:
    """Return the axes of a search that have more than one value."""
    axes = [n for n in dict.fromkeys(k for r in rows for k in r) if n not in FIGURES]
    return [a for a in axes if len({str(r.get(a)) for r in rows}) > 1]


def _ranked(rows: Sequence[Row]) -> list[Row]:
    return sorted((r for r in rows if r["status"] == "ok"), key=lambda r: r["latency_us"])


def _name(row: Mapping[str, Any], axes: Sequence[str]) -> str:
    return " ".join(f"{a}={row[a]}" for a in axes if row.get(a) is not None)


def _tiles(ranked: Sequence[Row], axes: Sequence[str]) -> tuple[FigureTile, ...]:
    if not ranked:
        return (FigureTile("Best", "none fits", "the reasons stand below", True),)
    best, worst = ranked[0], ranked[-1]
    gain = f"{worst['latency_us'] / best['latency_us']:.2f} times as fast as the slowest that fits"
    return (
        FigureTile("Best", f"{best['latency_us']:,.2f} us", _name(best, axes)),
        FigureTile("Range", f"{worst['latency_us']:,.2f} us", gain),
        FigureTile(
            "Busiest pipe of the best",
            str(best.get("busiest") or "-"),
            f"busy {percent(best.get('busy_share') or 0.0)}",
        ),
    )


def _figures(rows: Sequence[Row], ranked: Sequence[Row], axes: Sequence[str]) -> Iterator[Figure]:
    if ranked:
        yield from _front(rows, axes)
        yield _ranking(ranked, axes)
        yield from _maps(rows, ranked, axes)
    left = [r for r in rows if r["status"] not in ("ok", "pruned", "merged")]
    if left:
        table = tuple((_name(r, axes), str(r["status"]), str(r.get("reason") or "")) for r in left[:LISTED])
        yield Figure(
            "left",
            "What does not fit",
            f"{whole(len(left))} points, each with its reason.",
            None,
            ("point", "status", "reason"),
            table,
        )


def front_of(rows: Sequence[Row], axes: Sequence[str]) -> tuple[Spec, list[Row]]:
    """Return latency against error of the points that have both, the front joined and named, and those points."""
    points: list[Row] = []
    for row in sorted(_ranked(rows), key=lambda r: (r["latency_us"], r.get("relative_rmse") or 0.0)):
        if row.get("relative_rmse"):
            is_front = row["relative_rmse"] < min((p["error"] for p in points), default=math.inf)
            name = _name(row, axes) if is_front else ""
            points.append(
                {"name": name, "latency_us": row["latency_us"], "error": row["relative_rmse"], "is_front": is_front}
            )
    return charts.front(points), points


def _front(rows: Sequence[Row], axes: Sequence[str]) -> Iterator[Figure]:
    """Yield latency against error, where bits were computed."""
    if sum(bool(r.get("relative_rmse")) for r in _ranked(rows)) > 1:
        spec, points = front_of(rows, axes)
        table = tuple((p["name"], f"{p['latency_us']:,.2f}", f"{p['error']:.2e}") for p in points if p["is_front"])
        text = "Joined: what no other point beats in both. Left is faster, down is nearer to float64."
        head = ("point", "latency us", "relative RMSE")
        yield Figure("front", "Front of latency and error", text, spec, head, table)


def ranking_of(ranked: Sequence[Row], axes: Sequence[str]) -> Spec:
    """Return the latencies of the first points as bars, each with its name."""
    marks = [
        {"name": _name(r, axes) or "the one point", "value": r["latency_us"], "text": str(r.get("method") or "")}
        for r in ranked[:NAMED]
    ]
    return charts.bars(marks, x_title="latency, us", form=",.2f")


def _ranking(ranked: Sequence[Row], axes: Sequence[str]) -> Figure:
    head = (*axes, "latency us", "cycles", "busiest", "busy")
    table = tuple(
        (
            *(str(r.get(a)) for a in axes),
            f"{r['latency_us']:,.2f}",
            whole(int(r.get("cycles") or 0)),
            str(r.get("busiest") or "-"),
            percent(r.get("busy_share") or 0.0),
        )
        for r in ranked[:LISTED]
    )
    text = f"The fastest {min(NAMED, len(ranked))} of {whole(len(ranked))} that were simulated."
    return Figure("ranking", "Ranking", text, ranking_of(ranked, axes), head, table, is_wide=True)


def _maps(rows: Sequence[Row], ranked: Sequence[Row], axes: Sequence[str]) -> Iterator[Figure]:
    """Yield the best time over pairs of axes; of points that are like the best in what is said in words."""
    best = ranked[0]
    alike = [r for r in rows if all(r.get(a) == best.get(a) for a in axes if isinstance(best.get(a), str))]
    numeric = [a for a in axes if not isinstance(best.get(a), str) and len({r.get(a) for r in alike}) > 1]
    for number, (x, y) in enumerate(list(combinations(numeric, 2))[:MAPS]):
        spec, cells = map_of(alike, x, y)
        table = tuple((c["x"], c["y"], "-" if c["value"] is None else f"{c['value']:,.2f}", c["what"]) for c in cells)
        text = "The least latency in us over all other axes; ≥: proved to be no faster; a cross: it does not fit."
        yield Figure(f"map{number}", f"{x} and {y}", text, spec, (x, y, "latency us", "status"), table)


def map_of(rows: Sequence[Row], x: str, y: str) -> tuple[Spec, list[Row]]:
    """Return the least time at each pair of values of two axes, or the bound that proves it too long; its cells."""
    cells: dict[tuple[Any, Any], Row] = {}
    for r in rows:
        at, status = (r.get(x), r.get(y)), str(r["status"])
        time = r["latency_us"] if status == "ok" else None
        bound = r.get("bound_us") if status == "pruned" else None
        cell = cells.setdefault(at, {"x": str(at[0]), "y": str(at[1]), "value": None, "bound": None, "what": status})
        if time is not None and (cell["value"] is None or time < cell["value"]):
            cell.update(value=time, what="ok")
        elif bound is not None and cell["value"] is None and (cell["bound"] is None or bound < cell["bound"]):
            cell.update(bound=bound, what=f"pruned: {bound:,.2f} us at least")
    ordered = [cells[at] for at in sorted(cells, key=lambda at: tuple((v is None, str(type(v)), v) for v in at))]
    return charts.heatmap(ordered, x, y), ordered
