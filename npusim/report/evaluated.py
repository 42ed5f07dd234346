"""Kernels that were judged, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.report.text import Block, Cell, Column, Columns, Fact, Facts, Heading, Style, document, help_on
from npusim.simulation.request import short_name
from npusim.units import plural

if TYPE_CHECKING:
    from npusim.studies.evaluate import Evaluation
    from npusim.studies.evaluate.evaluation import Microseconds

_STYLES: Mapping[str, Style] = MappingProxyType({"right": "good", "wrong": "bad", "unproved": "warn"})


def _text(us: Microseconds) -> str:
    """Return a time in words: 12.3 (11.1 to 13.5)."""
    if us.mid is None:
        return "none"
    band = "" if us.low is None or us.high is None else f" ({us.low:,.2f} to {us.high:,.2f})"
    return f"{us.mid:,.2f}{band}"


def evaluated_table(evaluations: Sequence[Evaluation]) -> Iterator[Block]:
    """Yield the candidates, a row each, and the facts of those that are not right."""
    devices = list(dict.fromkeys(device for e in evaluations for device in e.us))
    yield Heading(f"{len(evaluations)} {plural(len(evaluations), 'kernel')} judged", ", ".join(devices))
    rows = [
        {
            "kernel": short_name(e.kernel),
            "verdict": e.verdict,
            "bits": e.bits,
            **{f"us {d}": _text(e.us[d]) for d in devices},
            **{f"rank {d}": e.rank.get(d) for d in devices},
            "trust": "yes" if e.trust is True else e.trust,
        }
        for e in evaluations
    ]
    columns = [Column("kernel", "kernel"), Column("verdict", "verdict"), Column("bits", "bits")]
    for device in devices:
        columns += [Column(f"us {device}", f"us {device}", align=">"), Column("rank", f"rank {device}", align=">")]
    yield Columns(*columns, Column("trust", "trust")).grid(rows)
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
        yield Heading("calls that refuse the tile of the given call, and theirs", "")
        yield Facts(tuple(tiles))


def evaluated_document(evaluations: Sequence[Evaluation]) -> dict[str, object]:
    """Return the evaluations as JSON data, in the order of the candidates."""
    return document("evaluation", kernels=[asdict(e) for e in evaluations])
