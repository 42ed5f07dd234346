"""``figures.json``: numbers that the page of a run draws and that its result does not contain.

These are a few hundred slices of the timeline, the contents of memories, and the errors of rows, which only a live run
has.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npusim.errors import SpecError
from npusim.report.program_table import program_tables
from npusim.report.result_json import read_json

if TYPE_CHECKING:
    from npusim.program.numerics.bits_result import NumericResult
    from npusim.report.timeline import Slice, Timeline
    from npusim.simulation.run_result import RunData

FIGURES_FILE = "figures.json"
SCHEMA_VERSION = 1
KIND = "npusim.figures"
#: Number of operations in a window: as many as a reader can distinguish on a page.
WINDOW_OPERATIONS = 90
#: Number of parts into which the rows are divided; errors are stored for each.
PARTS = 60


def figures_document(result: RunData, timeline: Timeline) -> dict[str, object]:
    """Return the figures of a run as JSON data; parts that it lacks are empty."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "end_us": _us(timeline, timeline.end),
        "is_whole": timeline.is_whole,
        "windows": [_window(timeline, name, *edges) for name, edges in _edges(timeline).items()],
        "memories": list(_memories(result)),
        "program": program_tables(result.program),
        "rows": [] if result.numerics is None else list(_rows(result, result.numerics)),
    }


def load_figures(folder: Path) -> dict[str, Any] | None:
    """Return the figures of a result's folder; None if it has no figures.

    Raises `SpecError` if npusim did not write the file, or is of another version.
    """
    file = folder / FIGURES_FILE
    if not file.exists():
        return None
    _, data = read_json(file)
    if not isinstance(data, dict) or (data.get("kind"), data.get("schema_version")) != (KIND, SCHEMA_VERSION):
        raise SpecError(f"{file}: the figures are not of this version of npusim; run it again")
    return data


def _us(timeline: Timeline, cycle: int) -> float:
    return round(cycle / timeline.clock_hz * 1e6, 4)


# ---------------------------------------------------------------- the timeline


def _edges(timeline: Timeline) -> dict[str, tuple[int, int]]:
    """Return the windows to draw, in cycles: beginning, middle and end, or all of a short run."""
    operations = sorted(
        (s for slices in timeline.tracks.values() for s in slices if s.kind == "operation"), key=lambda s: s.start
    )
    count, shown = len(operations), WINDOW_OPERATIONS
    if not count:
        return {}
    if count <= 2 * shown:
        return {"Whole run" if timeline.is_whole else "Beginning": _span(operations)}
    middle = (count - shown) // 2
    windows = {
        "Prologue": (0, max(s.end for s in operations[:shown])),
        "Steady state": _span(operations[middle : middle + shown]),
    }
    return {**windows, "Epilogue": _span(operations[-shown:])} if timeline.is_whole else windows


def _span(slices: list[Slice]) -> tuple[int, int]:
    return slices[0].start, max(s.end for s in slices)


def _window(timeline: Timeline, name: str, start: int, end: int) -> dict[str, object]:
    """Return the slices of a window, cut at its ends, with tracks in the same order."""
    shown = timeline.within(start, end)
    return {
        "name": name,
        "start_us": _us(timeline, start),
        "end_us": _us(timeline, end),
        "slices": [
            {
                "track": str(track),
                "name": s.name,
                "kind": s.kind,
                "start_us": _us(timeline, max(s.start, start)),
                "end_us": _us(timeline, min(s.end, end)),
                "block": s.block,
                "at": " ".join(f"{loop} {index}" for loop, index in s.path),
                "tile": s.path[-1][1] if s.path else None,
                "events": list(s.events),
            }
            for track, slices in shown.tracks.items()
            for s in slices
        ],
    }


def _memories(result: RunData) -> Iterator[dict[str, object]]:
    """Yield each memory's name, allocated bytes and capacity."""
    listed = set()
    for name, (used, capacity) in result.program.occupancy_bytes().items():
        short = name.rpartition(".")[2]
        if used and (short, used) not in listed:  # two cores of a kind are equal
            listed.add((short, used))
            yield {"name": short, "used_bytes": used, "capacity_bytes": capacity}


# ---------------------------------------------------------------- bits


def _rows(result: RunData, bits: NumericResult) -> Iterator[dict[str, object]]:
    """Yield the errors of the computed rows, a few rows of one head at a time, with the number of their values that
    overflowed.
    """
    if not bits.row_errors:
        return
    first = min(row for _, _, row in bits.row_errors)
    last = max(row + len(errors) for (_, _, row), errors in bits.row_errors.items())
    step = max(1, math.ceil((last - first) / PARTS))
    parts: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for (batch, head, row), errors in bits.row_errors.items():
        for offset, error in enumerate(errors.tolist()):
            parts[batch, head, (row + offset - first) // step].append(error)
    overflows: Counter[tuple[int, int, int]] = Counter()
    for batch, head, row, count in _overflows(result, bits):
        overflows[batch, head, (row - first) // step] += count
    for (batch, head, part), values in sorted(parts.items()):
        start = first + part * step
        nonfinite = sum(not math.isfinite(e) for e in values)
        yield {
            "head": f"{head}" if bits.shape[0] == 1 else f"{batch}.{head}",
            "first_row": start,
            "last_row": min(start + step, last) - 1,
            "error": None if nonfinite else math.sqrt(sum(e * e for e in values) / len(values)),
            "nonfinite_rows": nonfinite,
            "overflows": overflows[batch, head, part],
        }


def _overflows(result: RunData, bits: NumericResult) -> Iterator[tuple[int, int, int, int]]:
    """Yield the batch, head and row of each operation's first overflow, and the number of elements that overflow
    in it.
    """
    overflowed = {e.block for e in bits.events if e.kind == "overflow"}
    blocks = {str(b): b for p in result.program.phases if p.serves == "rows" for b in p.blocks if str(b) in overflowed}
    for event in bits.events:
        block = blocks.get(event.block) if event.kind == "overflow" else None
        if block is not None and hasattr(block, "row"):
            yield block.batch, block.head, block.row + event.row, event.count
