"""A search: the ranking and its proof, fronts, gains of another device; as text, and as a page.

The page uses the rows of a search's table, so that a table written by another version, or by hand, is shown too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.config.document import read_csv
from npusim.errors import SpecError
from npusim.report import charts
from npusim.report.bits_table import scientific
from npusim.report.charts import Figure, FigureTile, PagePart, Row, Spec
from npusim.report.run_inputs import problem_text
from npusim.report.text import Block, Cell, Column, Columns, Facts, Heading, cells, document, keyed, percent, whole
from npusim.simulation.request import short_name
from npusim.studies.explore.exploration import Exploration, best_of, front, undominated
from npusim.studies.explore.store import FIGURES, PointOutcome, read_store, text_of
from npusim.units import plural

if TYPE_CHECKING:
    from npusim.studies.explore.search import Progress

STORE = ".sqlite"
#: Number of reasons for infeasible points that are shown, the most frequent first.
_SHOWN_REASONS = 3
#: Numbers of points that a chart names and that a table lists, and number of pairs of axes that are drawn.
NAMED, LISTED, MAPS = 15, 200, 3
#: Words that count the points without a time, in the order of the heading.
_COUNTED = MappingProxyType(
    {
        "ok": "simulated",
        "pruned": "pruned with proof",
        "infeasible": "do not fit",
        "merged": "equal to another",
        "rejected": "rejected",
        "failed": "failed",
    }
)


def _error(row: Row) -> str:
    return "not finite" if row["relative_rmse"] is None else scientific(row["relative_rmse"])


def _method(row: Row) -> str:
    return (row["method"] or "") + (f" ±{percent(row['band'])}" if row["band"] else "")


#: A point of a search, as a row of `_row`: each figure has a form for tables and a form for JSON.
POINT = Columns(
    *keyed("tiling"),
    Column("status", "status", key="status"),
    Column("cycles", "cycles", whole, ">", key="cycles"),
    Column("latency us", "latency_us", ",.2f", ">", key="latency_us"),
    Column("method", _method, key="method", json=itemgetter("method")),
    *keyed("band"),
    Column("busiest", "busiest", key="busiest"),
    Column("busy", "busy_share", percent, ">", key="busy_share"),
    *keyed("ignored"),
    Column("reason", "reason", key="reason"),
    *keyed("bound_us"),
    Column("rel. RMSE", _error, align=">", key="relative_rmse", json=itemgetter("relative_rmse")),
    *keyed("is_finite", "hbm_bytes"),
    Column("free", "head_room", percent, ">", key="head_room"),
    Column("least room", "tightest", key="tightest"),
    *keyed("same_as", "sampling_error"),
)
FRONT = Columns(
    Column("point", "name"), Column("latency us", "latency_us", ",.2f"), Column("relative RMSE", "error", ".2e")
)


# ---------------------------------------------------------------- as text


def exploration_table(
    name: str,
    outcomes: Sequence[PointOutcome],
    exploration: Exploration | None,
    last: Progress,
    about: Mapping[str, Any] = MappingProxyType({}),
    *,
    top: int,
    is_pareto: bool,
) -> tuple[Block, ...]:
    """Return the ranking of each problem and device, the fastest first, and the outcomes of the other points.

    ``exploration`` is None if the search was interrupted: ``outcomes`` then has only the finished points, while
    ``last``, the search's last report, counts all points.  ``about`` is the subject in the search's store.
    """
    counts: Counter[str] = Counter(o.status for o in outcomes)
    total = max(last.points, len(outcomes))
    count = f"{whole(total)} {plural(total, 'point')}"
    count = f"{whole(len(outcomes))} of {count}" if len(outcomes) < total else count
    where = f" on {about['device']}, {_subject(about)}" if "device" in about else ""
    blocks: list[Block] = [Heading(f"{name}{where}: {count}", _counted(counts))]
    apart = [] if exploration is None else [n for n in exploration.setting.scene_names if n != "schedule"]
    scenes: dict[tuple[object, ...], list[PointOutcome]] = defaultdict(list)
    for o in outcomes:
        scenes[tuple(o.point.get(n) for n in apart)].append(o)
    for scene, of_scene in scenes.items():
        if len(scenes) > 1:
            blocks.append(Heading(" ".join(f"{n}={text_of(v)}" for n, v in zip(apart, scene, strict=True)), ""))
        chosen = front(of_scene) if is_pareto and exploration is not None else None
        blocks += _ranking_blocks(of_scene, apart, chosen, top)
        if exploration is not None and (best := best_of(of_scene)) and (words := exploration.command(best)):
            blocks.append(Facts((("run", (Cell(words, whole=True),)),)))
    if total > len(outcomes):
        blocks.append(Facts((("left", tuple(_left(outcomes, last, exploration))),)))
    ignored = next((o.ignored for o in outcomes if o.ignored), "")
    if ignored:
        blocks.append(Facts((("ignored", cells(ignored, style="warn")),)))
    for status in ("infeasible", "rejected", "failed"):
        if counts[status]:
            reasons = tuple(_reasons([o for o in outcomes if o.status == status]))
            blocks.append(Facts(((_COUNTED[status], reasons),)))
    if exploration is not None:
        blocks += _assurances(exploration)
        blocks += _what_if(outcomes, exploration.setting.device_keys, exploration.setting.schedules)
    return tuple(blocks)


def _counted(counts: Counter[str]) -> str:
    one = {"infeasible": "does not fit"}
    return ", ".join(
        f"{whole(counts[status])} {one.get(status, words) if counts[status] == 1 else words}"
        for status, words in _COUNTED.items()
        if counts[status]
    )


def _left(outcomes: Sequence[PointOutcome], last: Progress, exploration: Exploration | None) -> Iterator[Cell]:
    """Yield the number of points without a verdict, and how much faster than the best point one of them may be."""
    left = last.points - len(outcomes)
    yield Cell(f"{whole(left)} {plural(left, 'point')} not evaluated; --resume continues", "warn")
    best, least = best_of(outcomes), _remaining_us(last, exploration)
    if least is None:
        yield Cell("some of them have no bound yet", "warn")
    elif best is not None and best.latency_us is not None:
        gap = max(0.0, 1 - least / best.latency_us)
        yield Cell(
            f"each of them takes at least {least:,.2f} us; the best point, with {best.latency_us:,.2f} us, can be "
            f"improved by {percent(gap)} at most"
        )


def _remaining_us(last: Progress, exploration: Exploration | None) -> float | None:
    return last.remaining_us if exploration is None else exploration.remaining_us


def exploration_document(
    schedule: str, outcomes: Sequence[PointOutcome], exploration: Exploration | None, last: Progress
) -> dict[str, object]:
    """Return the points of a search as JSON data, with the best, and the front of a finished search."""
    best = best_of(outcomes)

    def records(of: Sequence[PointOutcome]) -> list[dict[str, Any]]:
        return POINT.records(map(_row, of))

    return document(
        "explore",
        schedule=schedule,
        complete=exploration is not None and not exploration.undecided,
        undecided=max(0, last.points - len(outcomes)),
        remaining_us=_remaining_us(last, exploration),
        best=best and {**records([best])[0], **({"command": exploration.command(best)} if exploration else {})},
        front=[] if exploration is None else records(exploration.front),
        points=records(outcomes),
    )


def _row(outcome: PointOutcome) -> Row:
    """Return a point in the form that the columns of `POINT` read: its axes by name and together, and its figures."""
    return {"tiling": outcome.point, **outcome.row()}


def _axis(name: str) -> Column:
    """Return the column of an axis; a cell is empty if the point's schedule does not have this axis."""
    return Column(name, lambda row: text_of(row[name]) if name in row else "", align=">")


def _ranking_blocks(
    outcomes: Sequence[PointOutcome], apart: Sequence[str], chosen: Sequence[PointOutcome] | None, top: int
) -> Iterator[Block]:
    ranked = sorted((o for o in outcomes if o.status == "ok"), key=lambda o: (o.latency_us or 0.0, o.index))
    best = best_of(outcomes)
    if best is None:
        return
    fastest = best.latency_us or 1.0

    def more(row: Row) -> str:
        return "best" if row is rows[best.index] else f"{(row['latency_us'] / fastest - 1) * 100:+.1f} %"

    shown = ranked[:top] if chosen is None else chosen
    rows = {o.index: _row(o) for o in (best, *shown)}
    names = [n for n in dict.fromkeys(n for o in ranked for n in o.point) if n not in apart]
    alike = {n: text_of(shown[0].point.get(n, "")) for n in names if len({o.point.get(n, "") for o in shown}) == 1}
    alike = {} if len(alike) == len(names) else alike  # the name of a single point has all of its fields
    methods = dict.fromkeys(_method(rows[o.index]) for o in shown)
    table = Columns(
        *(_axis(n) for n in names if n not in alike),
        *POINT.named("latency us", "cycles"),
        Column("", more, align=">"),
        *POINT.named(*["rel. RMSE"] * any(o.is_finite is not None for o in outcomes)),
        *POINT.named("busiest", "busy", "least room", "free", *["method"] * (len(methods) > 1)),
        spare=("free", "least room", "cycles", "busy"),
    )
    yield table.grid(rows[o.index] for o in shown)
    every = [("all have", cells(" ".join(f"{n}={value}" for n, value in alike.items())))] if alike else []
    of_all = [("method", cells(*methods))] if len(methods) == 1 else []
    yield Facts((*every, *of_all, ("margin", tuple(_margin(best, ranked, outcomes)))))


def _margin(best: PointOutcome, ranked: Sequence[PointOutcome], outcomes: Sequence[PointOutcome]) -> Iterator[Cell]:
    """Yield the distance of the best point from the next one, compared with the method's error band."""
    bounds = [o.bound_us for o in outcomes if o.status == "pruned" and o.bound_us is not None]
    others = [o.latency_us for o in ranked if o.latency_us is not None and o is not best]
    following = min([*bounds, *others], default=None)
    if following is None:
        yield Cell("the only one")
    else:
        ahead, band = following / (best.latency_us or 1.0) - 1, best.band or 0.0
        proof = ", a lower bound of the points that were not simulated" if bounds and following == min(bounds) else ""
        within = f", within the method's error of {percent(band)}: another point may be faster" if band > ahead else ""
        yield Cell(f"{percent(ahead)} to the next{proof}{within}", "warn" if within else "")


def _reasons(outcomes: Sequence[PointOutcome]) -> Iterator[Cell]:
    """Yield the reasons that stop points (text before the first colon), their numbers, and an example of each."""
    alike: dict[str, list[PointOutcome]] = defaultdict(list)
    for outcome in outcomes:
        alike[outcome.reason.partition(":")[0]].append(outcome)
    ranked = sorted(alike.values(), key=len, reverse=True)
    for stopped in ranked[:_SHOWN_REASONS]:
        at = stopped[0].label()
        yield Cell(f"{len(stopped)} x, first at {at}:", "warn")
        yield Cell(stopped[0].reason, "dim")
    if len(ranked) > _SHOWN_REASONS:
        yield Cell(f"and {len(ranked) - _SHOWN_REASONS} other causes, in the store", "dim")


def _assurances(exploration: Exploration) -> list[Block]:
    """Return notes on the schedules searched, and the extent to which pruned points were checked for races."""
    facts = [("note", cells(note, style="warn")) for note in exploration.setting.notes]
    chosen = {} if exploration.best is None else exploration.chosen(exploration.best)
    if chosen:
        words = " ".join(f"{name}={text_of(value)}" for name, value in chosen.items())
        facts.append(("others", cells(f"{words}: chosen for the best point, as in a run of it")))
    counts = exploration.counts()
    if counts.get("pruned", 0) and not exploration.undecided:
        also = f" and {exploration.checked} pruned" if exploration.checked else ""
        but = f" but {', '.join(exploration.unseen)}" if exploration.unseen else ""
        some = f"in the {counts.get('ok', 0)} simulated points{also}, which include every value of every axis{but}"
        is_part = not exploration.options.check_all
        facts.append(
            (
                "races",
                cells(f"none {some}; --check-all checks all of them" if is_part else "none in any point that fits"),
            )
        )
    return [Facts(tuple(facts))] if facts else []


def _what_if(outcomes: Sequence[PointOutcome], device_keys: Sequence[str], schedules: Sequence[str]) -> list[Block]:
    """Return, for each change of the device, the gain of each schedule's best point over that at the first value."""
    if not device_keys:
        return []
    fastest: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    for o in outcomes:
        if o.status == "ok":
            key, name = tuple(o.point.get(k) for k in device_keys), str(o.point.get("schedule", schedules[0]))
            fastest[key][name] = min(fastest[key].get(name, math.inf), o.latency_us or 0.0)
    first = next(iter(fastest.values()), {})

    def best(name: str) -> Column:
        def text(key: tuple[object, ...]) -> str | None:
            us, base = fastest[key].get(name), first.get(name)
            gain = "" if base is None or us is None else f" ({(base / (us or 1.0) - 1) * 100:+.1f} %)"
            return None if us is None else f"{us:,.2f} us{gain}"

        return Column(name, text, align=">")

    table = Columns(
        Column("device", lambda key: " ".join(f"{k}={text_of(v)}" for k, v in zip(device_keys, key, strict=True))),
        *map(best, schedules),
    )
    return [Heading("what if", "best latency, and gain in speed"), table.grid(fastest)]


# ---------------------------------------------------------------- as a page


def rows_of(file: Path) -> list[Row]:
    """Return the rows of a search's store (``.sqlite``) or table, with numbers as numbers; raise `SpecError` if there
    are no rows.
    """
    if file.suffix == STORE:
        return [o.row() for o in read_store(file)[1]]
    read: list[Row] = [{k: _number(v) for k, v in row.items() if k} for row in read_csv(file)[1]]
    missing = {"status", "latency_us"} - set(read[0] if read else ())
    if missing:
        raise SpecError(
            f"{file}: not a table of npusim explore: it has no column {', '.join(sorted(missing))}, or no row"
        )
    # A point has only the axes of its schedule, and a table that another version wrote may have fewer figures.
    none = dict.fromkeys(FIGURES)
    return [none | {k: v for k, v in row.items() if v is not None or k in none} for row in read]


def _number(text: Any) -> Any:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return text or None
    return (int(value) if value.is_integer() else value) if math.isfinite(value) else None


def about_of(file: Path) -> dict[str, Any]:
    """Return the subject that a search's store states; for a table, that of the store next to it; empty if there is no
    store.
    """
    store = file.with_suffix(STORE)
    try:
        return read_store(store)[0] if store.is_file() else {}
    except SpecError:
        return {}


def _subject(about: Mapping[str, Any]) -> str:
    sizes = problem_text(about["problem"]) if "problem" in about else ""
    return " ".join(filter(None, (about.get("workload"), sizes)))


def exploration_part(name: str, rows: Sequence[Row], about: Mapping[str, Any] = MappingProxyType({})) -> PagePart:
    """Return the part of a page on a search; ``about`` is the subject in its store, ``name`` its file's name."""
    axes, ranked = varied(rows), _ranked(rows)
    names = ", ".join(map(short_name, about.get("schedules", ())))
    title = f"{names} on {about['device']}" if "device" in about else name
    searched = f"searched over {', '.join(axes)}" if axes else ""
    statuses = _counted(Counter(str(r["status"]) for r in rows))
    figures = tuple(_figures(rows, ranked, axes))
    parts = (_subject(about), searched, f"{whole(len(rows))} {plural(len(rows), 'point')}: {statuses}")
    return PagePart(title, "; ".join(filter(None, parts)), _tiles(ranked, axes), (), figures)


def varied(rows: Sequence[Row]) -> list[str]:
    """Return the axes of a search with more than one value."""
    axes = [n for n in dict.fromkeys(k for r in rows for k in r) if n not in FIGURES]
    return [a for a in axes if len({str(r.get(a)) for r in rows}) > 1]


def _ranked(rows: Sequence[Row]) -> list[Row]:
    return sorted((r for r in rows if r["status"] == "ok"), key=lambda r: r["latency_us"])


def _name(row: Mapping[str, Any], axes: Sequence[str]) -> str:
    return " ".join(f"{a}={text_of(row[a])}" for a in axes if row.get(a) is not None)


def _tiles(ranked: Sequence[Row], axes: Sequence[str]) -> tuple[FigureTile, ...]:
    if not ranked:
        return (FigureTile("Best", "none fits", "see the reasons below", True),)
    best, worst = ranked[0], ranked[-1]
    gain = f"{worst['latency_us'] / best['latency_us']:.2f} times the best point's"
    busy = f"busy {percent(best.get('busy_share') or 0.0)}"
    return (
        FigureTile("Best", f"{best['latency_us']:,.2f} us", _name(best, axes)),
        FigureTile("Slowest that fits", f"{worst['latency_us']:,.2f} us", gain),
        FigureTile("Busiest pipe of the best", str(best.get("busiest") or "-"), busy),
    )


def _figures(rows: Sequence[Row], ranked: Sequence[Row], axes: Sequence[str]) -> Iterator[Figure]:
    if ranked:
        if sum(bool(r.get("relative_rmse")) for r in ranked) > 1:
            spec, points = front_of(rows, axes)
            text = (
                "The line joins the points that no other point beats in both. Points further left are faster, "
                "and lower points have smaller errors."
            )
            table = FRONT.grid(p for p in points if p["is_front"])
            yield Figure("front", "Front of latency and error", text, spec, table)
        yield _ranking(ranked, axes)
        yield from _maps(rows, ranked, axes)
    left = [r for r in rows if r["status"] not in ("ok", "pruned", "merged")]
    if left:
        text = f"{whole(len(left))} {plural(len(left), 'point')}, each with its reason."
        reasons = Columns(Column("point", lambda r: _name(r, axes)), *POINT.named("status", "reason"))
        yield Figure("left", "Points that do not fit", text, None, reasons.grid(left[:LISTED]))


def front_of(rows: Sequence[Row], axes: Sequence[str]) -> tuple[Spec, list[Row]]:
    """Return latency over error of the points that have both, with a line through the front, and a list of those
    points.

    The names of the front's points have the axes in which these points differ.
    """
    known = sorted(
        (r for r in _ranked(rows) if r.get("relative_rmse")), key=lambda r: (r["latency_us"], r["relative_rmse"])
    )
    best = undominated(known, lambda r: (r["relative_rmse"], r.get("sampling_error") or 0.0))
    apart = varied([{a: r.get(a) for a in axes} for r in best]) or axes

    def points(names: Sequence[str]) -> Iterator[Row]:
        for r in known:
            is_front = any(r is other for other in best)
            figures = {"latency_us": r["latency_us"], "error": r["relative_rmse"]}
            yield {**figures, "is_front": is_front, "name": _name(r, names) if is_front else ""}

    return charts.front([*points(apart)]), [*points(axes)]


def ranking_of(ranked: Sequence[Row], axes: Sequence[str]) -> Spec:
    """Return the latencies of the first points as bars, each with its name."""
    marks = [
        {"name": _name(r, axes) or "the one point", "value": r["latency_us"], "text": str(r.get("method") or "")}
        for r in ranked[:NAMED]
    ]
    return charts.bars(marks)


def _ranking(ranked: Sequence[Row], axes: Sequence[str]) -> Figure:
    table = Columns(*map(_axis, axes), *POINT.named("latency us", "cycles", "busiest", "busy"))
    text = f"The fastest {min(NAMED, len(ranked))} of {whole(len(ranked))} simulated points."
    return Figure("ranking", "Ranking", text, ranking_of(ranked, axes), table.grid(ranked[:LISTED]))


def _maps(rows: Sequence[Row], ranked: Sequence[Row], axes: Sequence[str]) -> Iterator[Figure]:
    """Yield the best times over pairs of numeric axes, from the points that agree with the best point on all other
    axes.
    """
    best = ranked[0]
    alike = [r for r in rows if all(r.get(a) == best.get(a) for a in axes if isinstance(best.get(a), str))]
    numeric = [a for a in axes if not isinstance(best.get(a), str) and len({r.get(a) for r in alike}) > 1]
    text = (
        "Each square has the smallest latency in us over all other axes. ≥: proved not to be faster; a cross: "
        "does not fit."
    )
    for number, (x, y) in enumerate(list(combinations(numeric, 2))[:MAPS]):
        spec, squares = map_of(alike, x, y)
        table = Columns(Column(x, "x"), Column(y, "y"), Column("latency us", "value", ",.2f"), Column("status", "what"))
        yield Figure(f"map{number}", f"{x} and {y}", text, spec, table.grid(squares))


def map_of(rows: Sequence[Row], x: str, y: str) -> tuple[Spec, list[Row]]:
    """Return the smallest time at each pair of values of two axes, or the bound that proves the time too long, as
    squares.
    """
    squares: dict[tuple[Any, Any], Row] = {}
    for r in rows:
        at, status = (r.get(x), r.get(y)), str(r["status"])
        time = r["latency_us"] if status == "ok" else None
        bound = r.get("bound_us") if status == "pruned" else None
        blank: Row = {"x": text_of(at[0]), "y": text_of(at[1]), "value": None, "bound": None, "what": status}
        square = squares.setdefault(at, blank)
        if time is not None and (square["value"] is None or time < square["value"]):
            square.update(value=time, what="ok")
        elif bound is not None and square["value"] is None and (square["bound"] is None or bound < square["bound"]):
            square.update(bound=bound, what=f"pruned: {bound:,.2f} us at least")
    ordered = [squares[at] for at in sorted(squares, key=lambda at: tuple((v is None, str(type(v)), v) for v in at))]
    return charts.heatmap(ordered, x, y), ordered
