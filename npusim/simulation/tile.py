"""The program of a plan: tiling fields that nobody named are chosen, by the time of a few tiles that a machine offers.

The rule.  A schedule's declared tile comes first: it is that of the kernel it is known from.  The machine then offers
settings of its fields, group after group (`Machine.settings`); each is simulated, without bits, and taken where the
call is at least `WORTH` faster.  Fields that were named keep their values.  Long calls are judged by a shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - a field of a NamedTuple
from dataclasses import replace
from functools import lru_cache
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import NpusimError, SpecError
from npusim.ir.content import Itself
from npusim.schedules.define import machine_class
from npusim.timing import METHODS
from npusim.timing.stream import Streams
from npusim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npusim.config.device import DeviceSpec
    from npusim.config.tiling import Tiling
    from npusim.ir.program import TileProgram
    from npusim.schedules import Schedule
    from npusim.schedules.registry import Precision
    from npusim.simulation.plan import Plan

__all__ = ["PAIRS", "WORTH", "TileChoice", "choose_tile", "judged_problem", "program_of", "warmed"]

#: Share of a call's time: what gains less does not leave the declared tile, nor change bits.
WORTH = 0.01
#: Pairs of a query and a key up to which a call is judged as it is (8 causal heads of 4,096 tokens), and the tokens
#: below which none is cut.
PAIRS, SHORTEST = 8 * 4096 * 4097 // 2, 2048


class TileChoice(NamedTuple):
    """Fields chosen for a call that did not name them, and the note of that: empty where none is left to choose."""

    fields: Mapping[str, object] = MappingProxyType({})
    note: str = ""


def program_of(plan: Plan, *, is_hinted: bool = True) -> tuple[Plan, TileProgram]:
    """Return a plan whose tiling is chosen and fits, and its program, warm where that is asked for.

    Raises `TilingError` where none fits, with what would if ``is_hinted``.
    """
    choice = choose_tile(plan) if plan.is_open else TileChoice()
    tiling = plan.tiling.model_copy(update=choice.fields)
    tiling, program = plan.schedule.fitted(plan.problem, tiling, plan.device, plan.precision, is_hinted=is_hinted)
    if choice.note:
        program = replace(program, notes=(*program.notes, choice.note))
    program = warmed(program, plan.device) if plan.request.warm else program
    return replace(plan, tiling=tiling), program


def warmed(program: TileProgram, device: DeviceSpec) -> TileProgram:
    """Return the program with its inputs in L2 at its start; raise `SpecError` where they do not fit it."""
    size = sum(t.size_bytes for t in program.tensors.values() if t.role == "input")
    capacity = device.memory.l2.capacity_bytes.value
    if size > capacity:
        raise SpecError(
            f"warm: inputs of {format_bytes(size)} do not stay in the L2 of {device.name}, {format_bytes(capacity)}"
        )
    return replace(program, is_warm=True)


# ---------------------------------------------------------------- which tile


def choose_tile(plan: Plan) -> TileChoice:
    """Return the fields that the rule chooses; none on a device without times, or for what is no attention."""
    if not isinstance(plan.problem, Problem) or not plan.device.is_timed:
        return TileChoice()
    precision: Any = plan.precision
    named = frozenset(plan.tiling.model_fields_set)
    return _choice(Itself(plan.schedule), Itself(plan.device), plan.problem, precision, plan.tiling, named)


@lru_cache(maxsize=256)
def _choice(
    schedule: Itself, device: Itself, problem: Problem, precision: Any, tiling: Tiling, named: frozenset[str]
) -> TileChoice:
    """Return the choice for a call, made once: ``named`` tells apart tilings that are equal, but for who chose."""
    settings = machine_class(device.thing.family)(device.thing).settings(tiling)
    groups = [list(_open(group, tiling, named)) for group in settings]
    if not any(groups):
        return TileChoice()
    trial = _Trial(schedule.thing, device.thing, judged_problem(problem), precision, tiling)
    declared_s = trial.seconds({})
    best: dict[str, object] = {}
    best_s = inf if declared_s is None else declared_s
    for group in groups:
        for fields in [{**best, **setting} for setting in group]:
            seconds = trial.seconds(fields)
            if seconds is not None and seconds < best_s * (1 - WORTH):
                best, best_s = fields, seconds
    changed = {n: v for n, v in best.items() if v != getattr(tiling, n)}
    if not changed:
        return TileChoice(note="" if declared_s is None else f"tile=auto: the declared one, of {trial.count} tried")
    words = " ".join(f"{n}={v}" for n, v in changed.items())
    length = "" if trial.problem == problem else f" on {trial.problem.heads} heads of {trial.problem.seq_kv} tokens"
    gain = f"{(1 - best_s / declared_s) * 100:.1f} % faster than the declared tile" if declared_s else "which fits"
    return TileChoice(changed, f"tile=auto: {words}, {gain}, of {trial.count} tried{length}")


def _open(group: Iterable[Mapping[str, object]], tiling: Tiling, named: frozenset[str]) -> Iterator[dict[str, object]]:
    """Yield the settings that change no field that was named, without the fields that the schedule has not."""
    for setting in group:
        fields = {n: v for n, v in setting.items() if n in type(tiling).model_fields}
        if fields.keys() - named and all(getattr(tiling, n) == fields[n] for n in fields.keys() & named):
            yield {n: v for n, v in fields.items() if n not in named}


class _Trial:
    """Times of one call by fields of its tiling."""

    def __init__(
        self, schedule: Schedule, device: DeviceSpec, problem: Problem, precision: Precision, tiling: Tiling
    ) -> None:
        self.schedule, self.device, self.problem = schedule, device, problem
        self.precision, self.tiling = precision, tiling
        self._known: dict[Tiling, float | None] = {}

    @property
    def count(self) -> int:
        """How many tiles were simulated."""
        return sum(seconds is not None for seconds in self._known.values())

    def seconds(self, fields: Mapping[str, object]) -> float | None:
        """Return the time of a call, launches included; None where the tile does not fit."""
        try:
            tiling = build_tiling(type(self.tiling), {**self.tiling.model_dump(exclude_unset=True), **fields})
        except NpusimError:
            return None
        if tiling not in self._known:
            self._known[tiling] = self._simulated(tiling)
        return self._known[tiling]

    def _simulated(self, tiling: Tiling) -> float | None:
        try:
            _, program = self.schedule.fitted(self.problem, tiling, self.device, self.precision, is_hinted=False)
            streams = Streams(program, self.device)
            return METHODS["auto"](program, self.device, trace_groups=(), streams=streams).latency_s
        except NpusimError:
            return None


def judged_problem(problem: Problem) -> Problem:
    """Return the problem by which the tiles of ``problem`` are judged: shorter, then with fewer heads, until cheap."""
    p = problem
    while p.heads * p.pairs() > PAIRS:
        less: dict[str, object]
        if not p.lengths and p.seq_q == p.seq_kv >= 2 * SHORTEST:
            less = {"seq_q": p.seq_q // 2, "seq_kv": p.seq_kv // 2}
        elif not p.lengths and p.batch > 1:
            less = {"batch": p.batch // 2}
        elif p.kv_heads > 1:
            less = {"heads": p.kv_heads // 2 * p.group_size, "kv_heads": p.kv_heads // 2}
        else:
            break
        p = p.model_copy(update=less)
    return p
