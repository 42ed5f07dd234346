"""Runs side by side: what differs in their inputs, what moved, and why one takes longer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from npusim.machines.tracks import track_of
from npusim.report.bottleneck import bottleneck, deciding_group, queues_of
from npusim.report.sheet import Breakdown, breakdown, chain, parts_of, sheets_of
from npusim.timing.result import method_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from npusim.numerics.result import NumericRecord
    from npusim.report.record import RunRecord
    from npusim.report.sheet import Part, PartStep, Sheet
    from npusim.simulation.result import RunData
    from npusim.timing.result import TimingRecord

SCHEMA_VERSION = 2
Value = int | float | str | None
Kind = Literal["time", "cycles", "count", "share", "bytes", "error", "text"]

#: Ratios of errors within these bounds are written in percent, others as factors.
_NEAR = (0.5, 2.0)


@dataclass(frozen=True)
class ComparedFigure:
    """One quantity of every run; ``kind`` says how it is written and how its change is."""

    name: str
    kind: Kind
    values: tuple[Value, ...]

    def relative_change(self, run: int = 1) -> float | None:
        """(new - old) / old against the first run; None for text, for missing figures and where old is 0."""
        old, new = self.values[0], self.values[run]
        if not isinstance(old, int | float) or not isinstance(new, int | float):
            return None
        return (new - old) / old if old else None

    def change(self, run: int = 1) -> str:
        """The change in the words of its kind: ``-29.2 %``, ``+18.0 pt``, ``x1.20``, ``+3``."""
        old, new = self.values[0], self.values[run]
        if old is None or new is None:
            return ""
        if isinstance(old, str) or isinstance(new, str):
            return "" if old == new else "changed"
        difference = new - old
        if not difference:
            return "="
        if self.kind == "share":
            return f"{difference * 100:+.1f} pt"
        if self.kind == "count":
            return f"{difference:+,}"
        if not old:
            return "new"
        ratio = new / old
        if self.kind == "error" and not _NEAR[0] < ratio < _NEAR[1]:
            return f"x{ratio:.3g}"
        change = f"{difference / old * 100:+.1f} %"
        return "~0 %" if change in ("+0.0 %", "-0.0 %") else change


@dataclass(frozen=True)
class Moved:
    """An operation or a wait of some unit whose cycles differ between runs; ``times`` is how often it ran."""

    unit: str
    part: Part
    times: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs compared with the first of them.

    ``differences`` are inputs by dotted key with each run's value, ``problems`` those that make it another
    problem; ``latency`` is each run's time in parts (None where one has no time), ``moved`` what moved in the
    core group that ends last, whatever the unit.
    """

    sheets: tuple[Sheet, ...]
    differences: dict[str, tuple[object, ...]]
    figures: tuple[ComparedFigure, ...]
    latency: Breakdown | None
    moved: tuple[Moved, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """What the runs are called."""
        return tuple(s.label for s in self.sheets)

    @property
    def problems(self) -> tuple[str, ...]:
        """Keys of inputs that make runs ones of different problems: their times are not of the same work."""
        return tuple(k for k in self.differences if k in ("workload", "ignored") or k.startswith("problem."))

    @cached_property
    def chains(self) -> tuple[tuple[PartStep, ...], ...]:
        """For each run the chain behind its first cause, if that is a wait; empty for the first run."""
        found: list[tuple[PartStep, ...]] = [()]
        for run in range(1, len(self.sheets)):
            causes = self.latency.causes(run) if self.latency else ()
            if not self.latency or not causes or causes[0].kind != "wait":
                found.append(())
                continue
            found.append(chain(self.sheets[0], self.sheets[run], self.latency.units[run], causes[0].name))
        return tuple(found)

    def __str__(self) -> str:
        from npusim.report.compare_tables import comparison_table
        from npusim.report.text import plain

        return plain(comparison_table(self))

    def __repr__(self) -> str:
        changed = ", ".join(self.differences) or "the same inputs"
        return f"<Comparison of {', '.join(self.labels[:-1])} and {self.labels[-1]}: {changed}>"

    def _repr_html_(self) -> str:
        from npusim.report.compare_tables import comparison_table
        from npusim.report.text import pre_html

        return pre_html(comparison_table(self))


def compare(*runs: RunData | RunRecord | str | Path) -> Comparison:
    """Compare two runs or more with the first: why one takes longer, what moved, what of the bits.

    A run is a result of `npusim.run`, its folder or ``result.json``, or the ``PipeUtilization.csv`` of a
    vendor's profiler.

    Raises `SpecError` if there are fewer than two, or a file is none of these.
    """
    from npusim.errors import SpecError

    if len(runs) < 2:
        raise SpecError(f"compare needs two runs or more, not {len(runs)}")
    sheets = sheets_of(runs)
    return Comparison(sheets, _differences(sheets), tuple(_figures(sheets)), breakdown(sheets), tuple(_moved(sheets)))


def comparison_document(comparison: Comparison) -> dict[str, object]:
    """Return the comparison as JSON data."""
    c = comparison
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "npusim.compare",
        "runs": list(c.labels),
        "problems": list(c.problems),
        "differences": {key: list(values) for key, values in c.differences.items()},
        "latency": None if c.latency is None else _latency(c, c.latency),
        "moved": [{"unit": m.unit, **_part(m.part), "times": list(m.times)} for m in c.moved],
        "figures": [
            {
                "name": f.name,
                "kind": f.kind,
                "values": list(f.values),
                "changes": [f.change(i) for i in range(1, len(f.values))],
                "relative_changes": [f.relative_change(i) for i in range(1, len(f.values))],
            }
            for f in c.figures
        ],
    }


def _latency(c: Comparison, latency: Breakdown) -> dict[str, object]:
    runs = range(len(c.sheets))
    return {
        "units": list(latency.units),
        "clock_hz": [s.clock_hz for s in c.sheets],
        "cycles": [s.cycles for s in c.sheets],
        "latency_us": [s.us(s.cycles or 0) + s.launch_us for s in c.sheets],
        "parts": [{**_part(p), "text": str(p), "us": [latency.us(p, i) for i in runs]} for p in latency.parts],
        "causes": [[str(p) for p in latency.causes(i)] if i else [] for i in runs],
        "chains": [[{"unit": s.unit, **_part(s.part)} for s in steps] for steps in c.chains],
    }


def _part(part: Part) -> dict[str, object]:
    return {"kind": part.kind, "name": part.name, "cycles": list(part.cycles), "givers": list(part.givers)}


def _differences(sheets: Sequence[Sheet]) -> dict[str, tuple[object, ...]]:
    """Return the inputs that differ, by dotted key; a profiler's file says nothing of its own."""
    known = [s for s in sheets if s.record is not None]
    keys = dict.fromkeys(key for s in known for key in s.inputs)
    values = {key: tuple(s.inputs.get(key) for s in sheets) for key in keys}
    return {key: found for key, found in values.items() if len({repr(s.inputs.get(key)) for s in known}) > 1}


def _moved(sheets: Sequence[Sheet]) -> Iterator[Moved]:
    """Yield what differs in any unit, the largest first; a second core that repeats the first is left out."""
    found: list[Moved] = []
    seen: dict[str, set[object]] = {}
    for unit in dict.fromkeys(u for s in sheets for u in s.units):
        kind, _, pipe = unit.partition(".")
        rows = tuple(tuple(sorted(s.rows(unit).items())) for s in sheets)
        twins = seen.setdefault(f"{kind.rstrip('0123456789')}.{pipe}", set())
        if rows not in twins:
            twins.add(rows)
            found += _of_unit(sheets, unit)
    yield from sorted(found, key=lambda m: -max(abs(c - m.part.cycles[0]) for c in m.part.cycles))


def _of_unit(sheets: Sequence[Sheet], unit: str) -> Iterator[Moved]:
    for part in parts_of(sheets, [unit] * len(sheets)):
        if len(set(part.cycles)) > 1 and part.kind in ("work", "links", "wait"):
            works = [s.units[unit].work or {} if unit in s.units else {} for s in sheets]
            times = tuple(w.get(part.name, (0, 0))[0] for w in works) if part.kind == "work" else ()
            yield Moved(unit, part, times)


def _figures(sheets: Sequence[Sheet]) -> Iterator[ComparedFigure]:
    """Yield every figure that any run has."""
    values = [_values(s) for s in sheets]
    for name, kind in dict.fromkeys(key for found in values for key in found):
        yield ComparedFigure(name, kind, tuple(found.get((name, kind)) for found in values))


def _values(sheet: Sheet) -> dict[tuple[str, Kind], Value]:
    found: dict[tuple[str, Kind], Value] = {}
    record = sheet.record
    if sheet.cycles is not None:
        found["latency us", "time"] = sheet.us(sheet.cycles) + sheet.launch_us
        found["kernel cycles", "cycles"] = sheet.cycles
    if record is None:
        for name, unit in sheet.units.items():
            found[f"{_core(name)} busy", "share"] = unit.busy / (sheet.cycles or 1)
        return found
    timing = record.timing
    if timing is not None:
        busiest = bottleneck(timing)
        found["latency us", "time"] = timing.latency_us
        found["method", "text"] = method_text(timing.method, timing.band)
        found["operations", "count"] = timing.operations
        found["busiest pipe", "text"] = None if busiest is None else busiest.pipe
        found.update({(name, "share"): share for name, share in _busy(timing).items()})
        found.update({(f"{n} bytes", "bytes"): size for n, size in timing.link_bytes.items()})
    if record.numerics is not None and record.numerics.against != "float64":
        found["errors against", "text"] = record.numerics.against
    for name, value in _numeric_values(record.numerics).items():
        found[name, "error" if name in ("relative RMSE", "max |error|") else "count"] = value
    return found


def _numeric_values(bits: NumericRecord | None) -> dict[str, Value]:
    if bits is None:
        return {}
    return {
        "relative RMSE": bits.rmse,
        "max |error|": bits.max_abs_error,
        "max ULP": bits.max_ulp,
        "overflow": sum(bits.overflow_counts.values()),
        "NaN": sum(bits.nan_counts.values()),
        "NaN in output": bits.nan_count,
        "Inf in output": bits.inf_count,
    }


def _busy(timing: TimingRecord) -> dict[str, float]:
    """Return the busy shares in the core group that ends last, its core called ``cubecore0``."""
    queues = queues_of(timing, deciding_group(timing))
    return {f"{_core(q.queue)} busy": q.busy_cycles / (timing.cycles or 1) for q in queues}


def _core(queue: str) -> str:
    """Return a queue's name as that of the first core group: ``cubecore0 CUBE``."""
    track = track_of(0, queue)
    return f"{track.core.rpartition('.')[2]} {track.pipe}"
