"""Numeric events while a program executes: overflow to Inf, NaN from numbers; counted and located."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.numerics.result import NumericEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from npusim.ir.op import Step
    from npusim.ir.walk import ResolvedOp


#: Events kept beside their counts: more would fill a trace with one message.
EVENTS_KEPT = 10_000


@dataclass
class EventLog:
    """Counts elements by operation, and keeps events: the first of each kind, and one an operation.

    ``phase``, ``lanes`` and ``position`` say what is executed: the blocks' names, one a lane, and how
    many of their operations were done.
    """

    phase: str = ""
    lanes: Sequence[str] = ()
    position: int = 0
    overflow: Counter[str] = field(default_factory=Counter)
    nan: Counter[str] = field(default_factory=Counter)
    first: dict[str, NumericEvent] = field(default_factory=dict)
    events: list[NumericEvent] = field(default_factory=list)

    def look(self, resolved: ResolvedOp, step: Step, result: NDArray[Any], sources: Sequence[NDArray[Any]]) -> None:
        """Record where ``result`` is Inf or NaN although the step's sources were not.

        An Inf that was put there (a mask, the start of a maximum) and what follows from it is no
        event: only elements whose sources are all finite count as overflow, and only NaN from
        sources without NaN as a new NaN.
        """
        with np.errstate(invalid="ignore"):
            finite = np.isfinite(result)
            if finite.all():
                return
            matmul = step.opcode.name == "MATMUL"
            clean, known = _finite_and_number(sources, result.shape, matmul)
            nan = np.isnan(result) & known
            overflow = ~finite & ~np.isnan(result) & clean
        label = f"{resolved.op.label}.{step.opcode.value}"
        for kind, where, counter in (("overflow", overflow, self.overflow), ("nan", nan, self.nan)):
            count = int(where.sum())
            if not count:
                continue
            counter[label] += count
            self._locate(kind, label, resolved, where)

    def _locate(self, kind: str, label: str, resolved: ResolvedOp, where: NDArray[np.bool_]) -> None:
        """Keep one event for each lane with an element in ``where``."""
        for lane in (int(n) for n in np.nonzero(where.any(axis=(1, 2)))[0]):
            if kind in self.first and len(self.events) >= EVENTS_KEPT:
                return
            row, col = (int(x[0]) for x in np.nonzero(where[lane]))
            event = NumericEvent(
                kind,
                label,
                resolved.op.queue,
                self.phase,
                self.lanes[lane],
                dict(resolved.path),
                row,
                col,
                int(where[lane].sum()),
                self.position,
            )
            self._keep(event)

    def _keep(self, event: NumericEvent) -> None:
        self.first.setdefault(event.kind, event)
        if len(self.events) < EVENTS_KEPT:
            self.events.append(event)

    def add(self, event: NumericEvent) -> None:
        """Count the elements of an event, and keep it."""
        (self.overflow if event.kind == "overflow" else self.nan)[event.operation] += event.count
        self._keep(event)

    def take(self, other: EventLog, where: str) -> None:
        """Take over what another log has; ``where`` leads the names of its blocks."""
        self.overflow.update(other.overflow)
        self.nan.update(other.nan)
        for event in other.events:
            self._keep(replace(event, block=f"{where}, {event.block}"))


def _finite_and_number(sources: Sequence[NDArray[Any]], shape: tuple[int, ...], is_matmul: bool) -> tuple[Any, Any]:
    """Return where all sources of an element are finite, and where none is NaN."""
    clean: Any = np.ones(shape, bool)
    known: Any = np.ones(shape, bool)
    for source in sources:
        if source.dtype == np.int8:
            continue
        ok, number = np.isfinite(source), ~np.isnan(source)
        if is_matmul or source.shape[-1] != shape[-1] != 1 != source.shape[-1]:
            # Each element depends on whole rows and columns: judge the lane as one.
            ok = ok.all(axis=(-2, -1), keepdims=True)
            number = number.all(axis=(-2, -1), keepdims=True)
        elif shape[-1] == 1 != source.shape[-1]:
            ok, number = ok.all(axis=-1, keepdims=True), number.all(axis=-1, keepdims=True)
        clean, known = clean & ok, known & number
    return clean, known
