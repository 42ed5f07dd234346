"""``pipes.csv``: pipe use of every core under the column names of the vendor's profiler.

One row per core that has work, as ``PipeUtilization.csv`` of ``msprof op`` has it, so that a
measured and a predicted file can be joined on ``block_id`` and ``sub_block_id``.  Times are of the
core's own run (its ratios have its own cycles below the line), without the launch.  What npusim has
no queue for (scalar time, instruction-cache misses) is left out rather than written as 0; the last two
columns are npusim's own: how the cycles were found, and how far the exact ones can be from them.

Source: CANN documentation, msprof op, "PipeUtilization".
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from npusim.errors import NpusimError
from npusim.foreign import csv_cell
from npusim.machines.tracks import PROFILED_CORES, PROFILED_PIPES

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from npusim.report.record import RunRecord
    from npusim.timing.result import QueueUse

__all__ = ["NOT_APPLICABLE", "PipeColumns", "pipe_columns", "pipes_csv", "pipes_frame"]

PipeValue = str | int | float | None
PipeColumns = dict[str, list[PipeValue]]

#: How the profiler's files mark a column that does not apply to a row.
NOT_APPLICABLE = "NA"


def pipe_columns(record: RunRecord) -> PipeColumns:
    """Return the columns by name, one value per core; None where a column is another core's.

    There are no rows for a run without a time.
    """
    rows = [_row(record, group, core, queues) for (group, core), queues in _cores(record).items()]
    names: dict[str, None] = {}
    for kind in sorted({_kind(core) for _, core in _cores(record)}):
        for row in rows:
            names |= dict.fromkeys(n for n in row if n.startswith(f"{kind}_"))
    columns = ["block_id", "sub_block_id", *names, "method", "band"]
    return {name: [row.get(name) for row in rows] for name in columns}


def pipes_csv(record: RunRecord) -> str:
    """Return the columns as CSV text, ``NA`` where a column is another core's."""
    columns = pipe_columns(record)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([csv_cell(name) for name in columns])
    for values in zip(*columns.values(), strict=True):
        writer.writerow([NOT_APPLICABLE if v is None else csv_cell(v) for v in values])
    return text.getvalue()


def pipes_frame(record: RunRecord) -> pd.DataFrame:
    """Return the columns as a pandas frame; raise `NpusimError` if pandas is not installed."""
    try:
        import pandas as pd
    except ImportError:
        raise NpusimError("pandas is not installed: python -m pip install pandas") from None
    columns: dict[str, Any] = dict(pipe_columns(record))
    return pd.DataFrame(columns)


def _cores(record: RunRecord) -> dict[tuple[int, str], list[QueueUse]]:
    cores: dict[tuple[int, str], list[QueueUse]] = {}
    queues = () if record.timing is None else record.timing.queues
    working = {queue.group for queue in queues if queue.operations}
    for queue in queues:
        if queue.group in working:
            cores.setdefault((queue.group, queue.queue.rpartition(".")[0]), []).append(queue)
    return cores


def _row(
    record: RunRecord, group: int, core: str, queues: Iterable[QueueUse]
) -> dict[str, PipeValue]:
    own = list(queues)
    kind = _kind(own[0].queue)
    number = core[len(kind) :] or "0"
    total = max(q.end_cycles for q in own)
    row: dict[str, PipeValue] = {
        "block_id": group,
        "sub_block_id": f"{PROFILED_CORES.get(kind, kind)}{number}",
        f"{kind}_time(us)": _microseconds(record, total),
        f"{kind}_total_cycles": total,
    }
    for queue in own:
        pipe = queue.queue.rpartition(".")[2]
        name = PROFILED_PIPES.get(pipe, pipe.lower())
        row[f"{kind}_{name}_time(us)"] = _microseconds(record, queue.busy_cycles)
        row[f"{kind}_{name}_ratio"] = round(queue.busy_cycles / total, 6) if total else 0.0
    if record.timing is not None:
        row |= {"method": record.timing.method, "band": record.timing.band}
    return row


def _microseconds(record: RunRecord, cycles: int) -> float:
    return round(cycles / record.device.clock_hz * 1e6, 6)


def _kind(queue: str) -> str:
    return queue.partition(".")[0].rstrip("0123456789")
