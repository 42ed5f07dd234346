"""What changes the bits of a call, as one table and as JSON data."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.report.text import Block, Cell, Facts, Grid, Heading, Style, cells

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from npusim.invariance import Finding, Invariance

SCHEMA_VERSION = 1
_SAID: Mapping[str, tuple[str, Style]] = MappingProxyType(
    {
        "cannot": ("no: same structure", "good"),
        "not seen": ("not on these inputs", "warn"),
        "changes": ("yes", "bad"),
        "none": ("-", "dim"),
    }
)


def invariance_table(found: Invariance) -> tuple[Block, ...]:
    """Return the table that ``npusim invariant`` prints, and under it what each difference is."""
    base = found.base
    time = "" if base.timing is None else f", {base.latency_us:,.2f} us"
    rows = tuple(_row(f) for f in found.findings)
    header = ("vary", "changes bits", "tried", "ruled out by", "costs us", "")
    details = [(f.aspect, tuple(_details(f))) for f in found.findings if f.first or any(t.reason for t in f.tried)]
    heads = "head 0" if found.heads == 1 else f"heads 0 to {found.heads - 1}"
    what = f"the first sequence, {heads}, rows from {found.row} on"
    blocks: list[Block] = [
        Heading(f"{base.name} on {base.device.name}", f"precision {base.precision}{time}"),
        Facts((("bits of", (Cell(what),)),)),
        Grid(header, "<<<<><", rows),
    ]
    return (*blocks, Facts(tuple(details))) if details else tuple(blocks)


def _row(f: Finding) -> tuple[Cell, ...]:
    said, style = _SAID[f.verdict]
    tried = ", ".join(t.what for t in f.tried if not t.reason) or "nothing: no such choice here"
    cost = "" if f.cost_us is None else f"{f.cost_us:+,.2f}"
    return (Cell(f.aspect, "label"), Cell(said, style), *cells(tried, f.guarantee, cost, f.cost_at))


def _details(f: Finding) -> list[Cell]:
    found = []
    if f.first:
        bits = f"{f.first.difference}, parted at"
        if not f.first.difference:
            bits = "the same bits in the end, but values part at"
        found.append(Cell(f"{f.first.what}: {bits} {f.first.parted or 'no step that both have'}"))
    return found + [Cell(f"{t.what}: {t.reason}", "dim") for t in f.tried if t.reason]


def invariance_document(found: Invariance, required: Collection[str] = ()) -> dict[str, object]:
    """Return the findings as JSON data."""
    base = found.base
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "npusim.invariant",
        "name": base.name,
        "schedule": base.schedule,
        "device": base.device.name,
        "precision": base.precision,
        "latency_us": None if base.timing is None else base.latency_us,
        "row": found.row,
        "heads": found.heads,
        "aspects": {
            f.aspect: {
                "verdict": f.verdict,
                "guarantee": f.guarantee or None,
                "cost_us": f.cost_us,
                "cost_at": f.cost_at or None,
                "tried": [
                    {
                        "what": t.what,
                        "same_structure": t.is_same_structure,
                        "latency_us": t.latency_us,
                        "reason": t.reason or None,
                        "difference": t.difference
                        and {"element": t.difference.element, "value": t.difference.value, "other": t.difference.other},
                        "parted": t.parted or None,
                    }
                    for t in f.tried
                ],
            }
            for f in found.findings
        },
        "required": {name: found.holds(name) for name in required},
    }
