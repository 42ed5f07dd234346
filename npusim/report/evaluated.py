"""Kernels that were judged, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.report.text import Block, Cell, Column, Columns, Fact, Facts, Heading, Style, document, help_on, keyed
from npusim.simulation.request import short_name
from npusim.units import plural

if TYPE_CHECKING:
    from npusim.studies.evaluate import Evaluation
    from npusim.studies.evaluate.evaluation import Microseconds

_STYLES: Mapping[str, Style] = MappingProxyType({"right": "good", "wrong": "bad", "unproved": "warn"})
#: JSON keys of times on a device, of the first wrong element, of the worst judged call, and of constructs that npusim
#: does not read.
TIME = Columns(
    *keyed("low", "mid", "high", "limit", "limit_share", "registers", "spilled", "errors"),
    *keyed("key", "reason", "tile", "is_ranked", "warps", "is_link", "block_warps"),
)
WRONG = Columns(*keyed("at", "value", "exact", "looks_like"))
WORST = Columns(
    *keyed("case", "is_right", "text", "excess", "matched", "total"),
    Column(None, lambda worst: None if worst.first is None else WRONG.record(worst.first), key="first"),
    *keyed("is_extreme", "is_resized"),
)
NOT_READ = Columns(*keyed("case", "text", "file", "line"))


def candidate_columns(devices: Sequence[str]) -> Columns:
    """Return the columns of candidates: the table shows the times and ranks on these devices; JSON has the results of
    all devices.
    """
    return Columns(
        Column("kernel", lambda e: short_name(e.kernel), key="kernel", json=attrgetter("kernel")),
        Column("verdict", "verdict", key="verdict"),
        *keyed("reason", "looks_like"),
        Column(None, lambda e: None if e.worst is None else WORST.record(e.worst), key="worst"),
        *keyed("judged"),
        Column("bits", "bits", key="bits"),
        Column(None, lambda e: {device: TIME.record(us) for device, us in e.us.items()}, key="us"),
        *keyed("rank"),
        *(column for device in devices for column in _of_device(device)),
        Column("trust", lambda e: "yes" if e.trust is True else e.trust, key="trust", json=attrgetter("trust")),
        *keyed("doubts"),
        Column(None, lambda e: NOT_READ.records(e.not_read), key="not_read"),
        *keyed("other_tiles"),
    )


def _of_device(device: str) -> tuple[Column, Column]:
    """Return the columns of the time and the rank on a device."""
    time = Column(f"us {device}", lambda e: _text(e.us[device]), align=">")
    return time, Column("rank", lambda e: e.rank.get(device), align=">")


def _text(us: Microseconds) -> str:
    """Return a time in words: 12.3 (11.1 to 13.5)."""
    if us.mid is None:
        return "none"
    band = "" if us.low is None or us.high is None else f" ({us.low:,.2f} to {us.high:,.2f})"
    return f"{us.mid:,.2f}{band}"


def evaluated_table(evaluations: Sequence[Evaluation]) -> Iterator[Block]:
    """Yield the candidates, one row each, and the facts of those that are not right."""
    devices = list(dict.fromkeys(device for e in evaluations for device in e.us))
    yield Heading(f"{len(evaluations)} {plural(len(evaluations), 'kernel')} judged", ", ".join(devices))
    yield candidate_columns(devices).grid(evaluations)
    if doubts := [(short_name(e.kernel), (Cell("; ".join(e.doubts)),)) for e in evaluations if e.doubts]:
        yield Heading("why to measure", "")
        yield Facts(tuple(doubts))
    for e in evaluations:
        if e.verdict != "right":
            facts: list[Fact] = [("verdict", (Cell(e.verdict, _STYLES[e.verdict]), Cell(e.reason)))]
            if e.looks_like:
                facts.append(("looks like", (Cell(e.looks_like),)))
            if e.worst is not None and e.worst.first is not None:
                first = e.worst.first
                facts.append(("first", (Cell(f"{first.at}: {first.value}, exact {first.exact}"),)))
            facts.append(("more", (Cell(help_on(e.verdict), "dim"),)))
            yield Heading(short_name(e.kernel), "")
            yield Facts(tuple(facts))
    if tiles := [(short_name(e.kernel), (Cell(text),)) for e in evaluations for text in e.other_tiles]:
        yield Heading("calls that refuse the tile of the given call, with the tile that they use", "")
        yield Facts(tuple(tiles))


def evaluated_document(evaluations: Sequence[Evaluation]) -> dict[str, object]:
    """Return the evaluations as JSON data, in the order of the candidates."""
    return document("evaluation", kernels=candidate_columns(()).records(evaluations))
