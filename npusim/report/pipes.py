"""``pipes.csv``: pipe use of every core under the column names of the vendor's profiler.

One row per core that has work, as in ``PipeUtilization.csv`` of ``msprof op``, so that a measured and a predicted file
can be joined on ``block_id`` and ``sub_block_id``.  Times are those of the core's run, without the launch; ratios are
shares of the core's cycles.  Columns for which npusim has no queue (scalar time, instruction-cache misses) are omitted,
and not written as 0; the last two columns, the method of simulation and the largest distance from exact cycles, are
npusim's additions.

Source: CANN documentation, msprof op, "PipeUtilization".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.document import cell_number, read_csv
from npusim.errors import SpecError
from npusim.machines.tracks import PROFILED_CORES, PROFILED_PIPES, profiled_core
from npusim.sanitize import csv_text

if TYPE_CHECKING:
    from npusim.program.timing.timing_result import QueueUse, TimingRecord
    from npusim.report.result_json import RunRecord

PipeValue = str | int | float | None
PipeColumns = dict[str, list[PipeValue]]

_VENDOR = MappingProxyType({vendor: pipe for pipe, vendor in PROFILED_PIPES.items()})
_TOTAL = "_total_cycles"
_FIRST, _LAST = ("block_id", "sub_block_id"), ("method", "band")
#: The mark of a column that does not apply to a row, in the profiler's files.
_NOT_APPLICABLE = "NA"


class MeasuredPipes(NamedTuple):
    """The block of a profiler's file that takes longest: its clock, cycles, and each pipe's busy cycles."""

    clock_hz: float
    cycles: int
    busy: dict[str, int]


def pipe_columns(record: RunRecord) -> PipeColumns:
    """Return the columns by name, one value per core; None if a column belongs to another core.

    A run without a time has no rows.
    """
    if record.timing is None:
        return {name: [] for name in (*_FIRST, *_LAST)}
    cores: dict[tuple[int, str], list[QueueUse]] = {}
    working = {use.group for use in record.timing.uses if use.operations}
    for use in record.timing.uses:
        if use.group in working:
            cores.setdefault((use.group, use.queue.rpartition(".")[0]), []).append(use)
    rows = [_row(record, record.timing, *core, uses) for core, uses in cores.items()]
    kinds = sorted({_kind(core) for _, core in cores})
    names = dict.fromkeys(name for kind in kinds for row in rows for name in row if name.startswith(f"{kind}_"))
    return {name: [row.get(name) for row in rows] for name in (*_FIRST, *names, *_LAST)}


def pipes_csv(record: RunRecord) -> str:
    """Return the columns as CSV text, ``NA`` if a column belongs to another core."""
    columns = pipe_columns(record)
    rows = zip(*columns.values(), strict=True)
    return csv_text(columns, ([_NOT_APPLICABLE if v is None else v for v in row] for row in rows))


def _row(record: RunRecord, timing: TimingRecord, group: int, core: str, uses: list[QueueUse]) -> dict[str, PipeValue]:
    def us(cycles: int) -> float:
        return round(cycles / timing.clock(record.device.clock_hz) * 1e6, 6)

    kind = _kind(core)
    total = max(use.end_cycles for use in uses)
    row: dict[str, PipeValue] = {
        "block_id": group,
        "sub_block_id": f"{PROFILED_CORES.get(kind, kind)}{core[len(kind) :] or '0'}",
        f"{kind}_time(us)": us(total),
        f"{kind}_total_cycles": total,
    }
    for use in uses:
        name = PROFILED_PIPES.get(use.pipe, use.pipe.lower())
        row[f"{kind}_{name}_time(us)"] = us(use.busy_cycles)
        row[f"{kind}_{name}_ratio"] = round(use.busy_cycles / total, 6) if total else 0.0
    return {**row, "method": timing.method, "band": timing.band}


def _kind(queue: str) -> str:
    return queue.partition(".")[0].rstrip("0123456789")


def read_pipes(file: Path) -> MeasuredPipes:
    """Return the longest block of a profiler's ``PipeUtilization.csv``, or of a ``pipes.csv``.

    Raises `SpecError` if the file cannot be read, or lacks a column or a number that is needed.
    """
    columns, rows = read_csv(file)
    kinds = [c.removesuffix(_TOTAL) for c in columns if c.endswith(_TOTAL)]
    missing = [] if "block_id" in columns else ["block_id"]
    missing += [] if kinds else [" or ".join(f"{kind}{_TOTAL}" for kind in PROFILED_CORES)]
    if missing:
        of_core = ", ".join(f"{kind}{_TOTAL}, {kind}_time(us), {kind}_..._ratio" for kind in PROFILED_CORES)
        raise SpecError(
            f"{file}: there is no column {', '.join(missing)}; a profiler's PipeUtilization.csv has block_id, "
            f"sub_block_id, {of_core}; a table of kernels (op_summary, kernel_details) is for npusim import"
        )
    blocks: dict[str, dict[str, int]] = {}
    totals: dict[str, int] = {}
    clock = 0.0
    for number, row in enumerate(rows):
        where, block = f"{file}: line {number + 2}", str(row["block_id"]).strip()
        for kind in kinds:
            total = cell_number(row, f"{kind}{_TOTAL}", where)
            if total is None:
                continue
            totals[block] = max(totals.get(block, 0), round(total))
            duration_us = cell_number(row, f"{kind}_time(us)", where)
            clock = total / duration_us * 1e6 if duration_us else clock
            core = profiled_core(kind, row.get("sub_block_id") or "")
            blocks.setdefault(block, {}).update(_busy(row, columns, kind, core, total, where))
    if not totals:
        raise SpecError(f"{file}: no row has cycles of a core")
    if not clock:
        raise SpecError(
            f"{file}: there is no column {kinds[0]}_time(us), without which the length of a cycle is unknown"
        )
    last = max(totals, key=lambda b: totals[b])
    # Times in the file are rounded; real clocks are multiples of 10 kHz.
    return MeasuredPipes(round(clock, -4), totals[last], blocks[last])


def _busy(
    row: Mapping[str, str], columns: Iterable[str], kind: str, core: str, total: float, where: str
) -> Iterator[tuple[str, int]]:
    """Yield the pipes of one core of a row, with their busy cycles: from their times, or else from their ratios."""
    duration_us = cell_number(row, f"{kind}_time(us)", where)
    for column in columns:
        ratio = re.fullmatch(rf"{kind}_(\w+)_ratio", column)
        share = cell_number(row, column, where) if ratio else None
        if ratio is None or share is None:
            continue
        busy_us = cell_number(row, f"{kind}_{ratio[1]}_time(us)", where)
        cycles = share * total if busy_us is None or not duration_us else busy_us / duration_us * total
        yield f"{core}.{_VENDOR.get(ratio[1], ratio[1].upper())}", round(cycles)
