"""Tables of a search: what is best and what proves it, fronts, gains of another device."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from npusim.explore.exploration import best_of, front
from npusim.report.text import Cell, Facts, Grid, Heading, cells, percent, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from npusim.explore.exploration import Exploration
    from npusim.explore.store import PointOutcome
    from npusim.report.text import Block

#: Reasons of infeasible points that are shown, the commonest first.
_SHOWN_REASONS = 3
#: How points without a time are counted, in the order of the heading.
_COUNTED = (
    ("ok", "simulated"),
    ("pruned", "pruned with proof"),
    ("infeasible", "do not fit"),
    ("merged", "merged"),
    ("rejected", "rejected"),
    ("failed", "failed"),
)


def exploration_blocks(
    name: str,
    outcomes: Sequence[PointOutcome],
    scene_names: Sequence[str],
    *,
    total: int,
    top: int,
    is_pareto: bool,
    swayed_by: Mapping[int, str] | None = None,
) -> list[Block]:
    """Return the ranking of each problem and device, the fastest first, and what became of the other points."""
    counts: Counter[str] = Counter(o.status for o in outcomes)
    count = f"{len(outcomes)} of {total} points" if len(outcomes) < total else f"{total} points"
    said = ", ".join(f"{counts[status]} {words}" for status, words in _COUNTED if counts[status])
    blocks: list[Block] = [Heading(f"{name}: {count}", said)]
    apart = [n for n in scene_names if n != "schedule"]
    scenes: dict[tuple[object, ...], list[PointOutcome]] = defaultdict(list)
    for o in outcomes:
        scenes[tuple(o.point.get(n) for n in apart)].append(o)
    for scene, own in scenes.items():
        if len(scenes) > 1:
            blocks.append(Heading(" ".join(f"{n}={v}" for n, v in zip(apart, scene, strict=True)), ""))
        blocks += _ranking(own, apart, front(own) if is_pareto else None, top, swayed_by or {})
    ignored = next((o.ignored for o in outcomes if o.ignored), "")
    if ignored:
        blocks.append(Facts((("ignored", (Cell(ignored, "warn"),)),)))
    for status, words in (("infeasible", "do not fit"), ("rejected", "rejected"), ("failed", "failed")):
        if counts[status]:
            blocks.append(Facts(((words, tuple(_reasons([o for o in outcomes if o.status == status]))),)))
    return blocks


def _ranking(
    outcomes: Sequence[PointOutcome],
    apart: Sequence[str],
    chosen: Sequence[PointOutcome] | None,
    top: int,
    swayed_by: Mapping[int, str],
) -> Iterator[Block]:
    ranked = sorted((o for o in outcomes if o.status == "ok"), key=lambda o: (o.latency_us or 0.0, o.index))
    best = best_of(outcomes)
    if best is None:
        return
    fields = [n for n in dict.fromkeys(n for o in ranked for n in o.point) if n not in apart]
    has_bits = any(o.is_finite is not None for o in outcomes)
    listed = list(chosen) if chosen is not None else ranked[:top]
    rows = []
    for o in listed:
        more = ((o.latency_us or 0.0) / (best.latency_us or 1.0) - 1) * 100
        bits = (_error(o),) if has_bits else ()
        mark = "best" if o is best else f"{more:+.1f} %"
        rows.append(
            (
                *cells(*(str(o.point.get(n, "")) for n in fields), f"{o.latency_us:,.2f}", whole(o.cycles or 0)),
                *cells(mark, *bits, o.busiest, percent(o.busy_share or 0.0)),
                Cell(f"{o.tightest} {percent(o.head_room or 0.0)} free" if o.tightest else ""),
                Cell(o.method + (f" ±{percent(o.band)}" if o.band else "")),
            )
        )
    error = ("rel. RMSE",) if has_bits else ()
    header = (*fields, "latency us", "cycles", "", *error, "busiest", "busy", "room", "method")
    yield Grid(header, ">" * len(fields) + ">>>" + ">" * has_bits + "<><<", tuple(rows))
    yield Facts((("margin", tuple(_margin(best, ranked, outcomes, swayed_by))),))


def _error(o: PointOutcome) -> str:
    return "not finite" if o.relative_rmse is None else f"{o.relative_rmse:.2e}"


def _margin(
    best: PointOutcome, ranked: Sequence[PointOutcome], outcomes: Sequence[PointOutcome], swayed_by: Mapping[int, str]
) -> Iterator[Cell]:
    """Yield how far the best is ahead of the next, against how far methods may be off, and what might dethrone it."""
    own = best.latency_us or 1.0
    bounds = [o.bound_us for o in outcomes if o.status == "pruned" and o.bound_us is not None]
    others = [o.latency_us for o in ranked if o.latency_us is not None and o is not best]
    following = min([*bounds, *others], default=None)
    if following is None:
        yield Cell("the only one")
    else:
        ahead, band = following / own - 1, best.band or 0.0
        proof = " by bound" if bounds and following == min(bounds) else ""
        within = f", within the method's band of {percent(band)}: may be another's" if band > ahead else ""
        yield Cell(f"{percent(ahead)} to the next{proof}{within}", "warn" if within else "")
    if best.index in swayed_by:
        why = swayed_by[best.index]
        yield Cell(why, "warn") if why else Cell("stays the best with any assumed or fitted constant a fifth off")


def _reasons(outcomes: Sequence[PointOutcome]) -> Iterator[Cell]:
    """Yield what stops points (text before the first colon), how often, and an example of each."""
    counts: Counter[str] = Counter()
    example: dict[str, PointOutcome] = {}
    for outcome in outcomes:
        what = outcome.reason.partition(":")[0]
        counts[what] += 1
        example.setdefault(what, outcome)
    for what, count in counts.most_common(_SHOWN_REASONS):
        first = example[what]
        at = " ".join(f"{field}={value}" for field, value in first.point.items())
        yield Cell(f"{count} x, first at {at}:", "warn")
        yield Cell(first.reason, "dim")
    if len(counts) > _SHOWN_REASONS:
        yield Cell(f"and {len(counts) - _SHOWN_REASONS} other causes, in the store", "dim")


def assurances(found: Exploration) -> list[Block]:
    """Return what is to be said of the schedules searched, and how far pruned points were checked for races."""
    facts = [("note", (Cell(note, "warn"),)) for note in found.setting.notes]
    counts = found.counts()
    if pruned := counts.get("pruned", 0):
        beside = f" and {found.checked} pruned" if found.checked else ""
        some = f"in the {counts.get('ok', 0)} simulated{beside}, which have every value of every axis"
        said = f"none {some}; --check-all looks at all" if found.checked < pruned else "none in any point that fits"
        facts.append(("races", (Cell(said),)))
    return [Facts(tuple(facts))] if facts else []


def what_if_blocks(
    outcomes: Sequence[PointOutcome], device_keys: Sequence[str], schedules: Sequence[str]
) -> list[Block]:
    """Return, for each change of the device, what the best of each schedule gains over its first value."""
    if not device_keys:
        return []
    found: dict[tuple[object, ...], dict[str, PointOutcome]] = defaultdict(dict)
    for o in outcomes:
        if o.status != "ok":
            continue
        key, name = tuple(o.point.get(k) for k in device_keys), str(o.point.get("schedule", schedules[0]))
        rival = found[key].get(name)
        if rival is None or (o.latency_us or 0.0) < (rival.latency_us or 0.0):
            found[key][name] = o
    rows, first = [], next(iter(found.values()), {})
    for key, best in found.items():
        texts = [" ".join(f"{k}={v}" for k, v in zip(device_keys, key, strict=True))]
        for name in schedules:
            own, base = best.get(name), first.get(name)
            gain = f" ({((base.latency_us or 0.0) / (own.latency_us or 1.0) - 1) * 100:+.1f} %)" if own and base else ""
            texts.append(f"{own.latency_us:,.2f} us{gain}" if own else "-")
        rows.append(cells(*texts))
    table = Grid(("device", *schedules), "<" + ">" * len(schedules), tuple(rows))
    return [Heading("what if", "best latency, and speed gained"), table]
