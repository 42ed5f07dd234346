"""``npusim check``: cycles and decisions against accepted ones."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from npusim.cli import options as o
from npusim.cli.console import progress, show, show_document
from npusim.cli.help import Verbs
from npusim.errors import CheckFailedError, SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npusim.baseline import CheckOutcome
    from npusim.report.text import Cell

app = Verbs()

#: Parts of units that moved and are shown; JSON has them all.
_SHOWN = 6

_FILES = """

A new baseline is a file such as this one, and then --update:
  schema: npusim.baseline/1
  schedule: flash
  hw: ascend_910b2
  workload: pangu_38b
  seq: 1024
  tiling: {block_kv: 256}

And one of a decision: which schedule and tile wins a space:
  schema: npusim.decision/1
  hw: ascend_910b2
  workload: pangu_38b
  seq: 1024
  candidates:
  - {schedule: flash, fields: {block_kv: [128, 256, 512]}}
  - {schedule: pasa, fields: {block_kv: [128, 256]}}"""

Folder = Annotated[Path, o.argument("DIR", "Folder of baselines (*.yaml), or one.")]
Tolerance = Annotated[str, o.option("--tolerance SHARE", "What cycles may differ, and a winner lose by: 1%, or 0.01.")]
Update = Annotated[bool, o.option("--update", "Write what the cases give today into their files.")]
Reason = Annotated[
    str,
    o.option(
        "--reason TEXT", "Why: kept in the files. Without one, nothing that was accepted is replaced.", shown=False
    ),
]


@app.verb(
    "check",
    ("npusim check baselines/", "exit code 1 if any cycle or decision moved"),
    ("npusim check baselines/ --tolerance 1%", "cycles within 1 % are as accepted"),
    ('npusim check baselines/ --update --reason "faster exp"', "accept what is new today"),
    after=_FILES,
)
def check(
    folder: Folder, tolerance: Tolerance = "0", update: Update = False, reason: Reason = "", json: o.Json = False
) -> None:
    """Hold cycles, and which schedule and tile wins, against what was accepted.

    Cycles are held to the last one. Exit code 1 if any differ. --update is refused where the environment
    variable CI is set.
    """
    from npusim.baseline import check_baselines

    if reason and not update:
        raise SpecError(f"--reason {reason}: goes with --update")
    done: list[CheckOutcome] = []
    with progress("checking") as advance:

        def on_case(outcome: "CheckOutcome", total: int) -> None:
            done.append(outcome)
            advance(len(done), total)

        share = _share(tolerance)
        outcomes = check_baselines(folder, tolerance=share, update=update, reason=reason, on_case=on_case)
    if json:
        _show_document(outcomes)
    else:
        _show(outcomes)
    failed = sum(not outcome.passed for outcome in outcomes)
    if failed:
        can_accept = any(outcome.status in ("changed", "new") for outcome in outcomes)
        how = f'; accept with: npusim check {folder} --update --reason "..."' if can_accept else ""
        raise CheckFailedError(f"{failed} of {len(outcomes)} baselines not met{how}")


def _share(text: str) -> float:
    """Return ``1%`` or ``0.01`` as a share."""
    try:
        value = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise SpecError(f"--tolerance {text}: write a share from 0 to below 1 (or 100 %): 0.01, or 1%")
    return value


def _show(outcomes: "Sequence[CheckOutcome]") -> None:
    from npusim.report.text import Block, Cell, Facts, Grid

    blocks: list[Block] = []
    for kind in ("cycles", "decision"):
        rows = [_row(outcome) for outcome in outcomes if outcome.kind == kind]
        if rows:
            header = (kind, "accepted", "today", "change" if kind == "cycles" else "margin", "", "method")
            blocks.append(Grid(header, "<>>><<" if kind == "cycles" else "<<<><<", tuple(rows)))
    facts = [(outcome.name, tuple(map(Cell, _why(outcome)))) for outcome in outcomes]
    told = tuple((name, cells) for name, cells in facts if cells)
    show([*blocks, *([Facts(told)] if told else [])])


def _row(outcome: "CheckOutcome") -> "tuple[Cell, ...]":
    from npusim.report.text import Cell, percent

    first = outcome.rows[0] if outcome.rows else None
    old, new = (None, None) if first is None else (first.old, first.new)
    change = "" if first is None else first.why if first.change is None else f"{first.change * 100:+.2f} %"
    return (
        Cell(outcome.name),
        Cell(_text(old)),
        Cell(_text(new)),
        Cell(change),
        Cell(outcome.status, "good" if outcome.passed else "bad"),
        Cell(outcome.method + (f" ±{percent(outcome.band)}" if outcome.band else "")),
    )


def _text(value: int | str | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else value


def _why(outcome: "CheckOutcome") -> "Iterator[str]":
    """Yield what is to be said of a case beside its row."""
    if outcome.reason:
        yield " ".join(outcome.reason.split())
    for row in outcome.rows[1:]:
        yield f"{row.name}: was {_text(row.old)}, is {_text(row.new)}: {row.why}"
    moved = [f"{unit} {name} {new - old:+,} ({old:,} -> {new:,})" for unit, name, old, new in outcome.moved[:_SHOWN]]
    if moved:
        more = len(outcome.moved) - len(moved)
        yield "moved, in cycles: " + "; ".join(moved) + (f"; and {more} more" if more else "")
    if outcome.ignored:
        yield f"without {', '.join(outcome.ignored)}"
    if outcome.device_changed:
        yield "the device file changed"


def _show_document(outcomes: "Sequence[CheckOutcome]") -> None:
    cases = [
        {
            "kind": case.kind,
            "name": case.name,
            "file": str(case.path),
            "status": case.status,
            "passed": case.passed,
            "rows": [asdict(row) for row in case.rows],
            "reason": case.reason,
            "moved": [{"unit": u, "name": n, "old": a, "new": b} for u, n, a, b in case.moved],
            "device_changed": case.device_changed,
            "method": case.method,
            "band": case.band,
            "ignored": case.ignored,
        }
        for case in outcomes
    ]
    show_document("check", version=2, cases=cases, passed=all(outcome.passed for outcome in outcomes))
