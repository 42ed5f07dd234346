"""Times, registers and classes of bits of configurations, each a request of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npusim.errors import BufferOverflowError, NpusimError, SpecError, one_line
from npusim.explore.executors import executor
from npusim.explore.tasks import Lost
from npusim.simulation.classes import class_key
from npusim.simulation.plan import plan_of
from npusim.simulation.simulate import BuiltPlan
from npusim.simulation.tile import program_of
from npusim.timing.result import Limit

if TYPE_CHECKING:
    from npusim.simulation.request import Request

Fields = Mapping[str, object]
#: Share of the least time within which configurations are taken to be as fast: times of memory-bound kernels on a chip
#: lie as near to one another (issue 57), so that a rule decides between them.
TIE = 0.02
NO_LIMIT = Limit("", 0.0)


@dataclass(frozen=True)
class Configuration:
    """Values of fields, and the request whose run has them."""

    fields: Fields
    request: Request

    def label(self) -> str:
        """Return the values in words: ``BM=64 warps=4``."""
        return " ".join(f"{n}={v}" for n, v in self.fields.items())


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a configuration, or the reason why it has none.

    ``us``: of the cores, without a launch; ``key``: of its class of bits (empty: not known); ``registers`` of a thread,
    ``spilled`` ones of these, from a compiler or the estimate; ``warps``: resident on a core; ``limit``: the limit of
    the time, as in a run.  ``reason``: why there is no time; ``fits``: whether a larger device would do.
    """

    us: float | None = None
    key: str = ""
    registers: int | None = None
    spilled: int = 0
    warps: int = 0
    limit: Limit = NO_LIMIT
    reason: str = ""
    fits: bool = True


def predict(configuration: Configuration) -> Prediction:
    """Return the prediction of one configuration; one that cannot be read, compiled or placed has a reason, no time."""
    try:
        plan, program = program_of(
            plan_of(replace(configuration.request, numerics=False), is_bare=True), is_hinted=False
        )
        timing = BuiltPlan(plan, program).timing()
        if timing is None:
            raise SpecError(f"{plan.device.name} has no timing model: nothing to compare")
    except NpusimError as error:
        return Prediction(reason=one_line(error), fits=not isinstance(error, BufferOverflowError))
    us, key, room = timing.core_us, class_key(program, plan.device), program.occupancy
    rates = {name: float(link.bytes_per_s.value) for name, link in plan.device.links.items()}
    limit = replace(timing, uses=timing.uses_of_groups()).limit(rates)
    if room is None:
        return Prediction(us, key, limit=limit)
    return Prediction(us, key, room.thread_registers, room.spilled_registers, room.blocks * room.warps, limit)


def predict_all(
    configurations: Sequence[Configuration], jobs: int = 1, advance: Callable[[int, int], object] | None = None
) -> list[Prediction]:
    """Return the predictions, in ``jobs`` processes, which also compile concurrently."""
    made: dict[int, Prediction] = {}
    with executor(max(1, min(jobs, len(configurations)))) as workers:
        tasks = [replace(c, request=replace(c.request, progress=None)) for c in configurations]
        for number, done in workers.run(predict, tasks):
            made[number] = Prediction(reason=done.reason) if isinstance(done, Lost) else done
            if advance:
                advance(len(made), len(tasks))
    return [made[i] for i in range(len(configurations))]


def ranked(predictions: Sequence[Prediction]) -> list[int]:
    """Return the numbers of predictions with a time, the best first.

    Where memory limits the best, predictions within `TIE` of it count as equally fast: ordered by no spills, then more
    resident warps, then time.
    """
    known = [i for i, p in enumerate(predictions) if p.us is not None]
    times = {i: predictions[i].us or 0.0 for i in known}
    best = min(known, key=lambda i: times[i], default=0)
    within = times[best] * (1 + TIE * (predictions[best].limit.is_link)) if known else 0.0

    def order(i: int) -> tuple[bool, bool, int, float, int]:
        p, is_tied = predictions[i], times[i] <= within
        return not is_tied, is_tied and p.spilled > 0, -p.warps if is_tied else 0, times[i], i

    return sorted(known, key=order)


def lettered(predictions: Sequence[Prediction], order: Iterable[int]) -> dict[int, str]:
    """Return a letter for each class of bits in the order of ``order``; ``?`` where it is not known."""
    letters: dict[str, str] = {}
    named = {}
    for i in order:
        key = predictions[i].key
        named[i] = letters.setdefault(key, _letter(len(letters))) if key else "?"
    return named


def _letter(number: int) -> str:
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def kept(predictions: Sequence[Prediction], bits: str, reference: int | None = None) -> list[int]:
    """Return the numbers that ``bits`` leaves, best first: ``any``; ``same``: the class of ``reference``, else best's;
    else a letter of `lettered`.

    Raises `SpecError` for a letter that no class has.
    """
    order = ranked(predictions)
    if bits == "any" or not order:
        return order
    letters = lettered(predictions, order)
    if bits == "same":
        first = order[0] if reference is None else reference
        wanted = predictions[first].key
        return [i for i in order if (predictions[i].key == wanted if wanted else i == first)]
    if bits not in letters.values():
        raise SpecError(f"--bits {bits}: allowed: any, same, or a class: {', '.join(dict.fromkeys(letters.values()))}")
    return [i for i in order if letters[i] == bits]
