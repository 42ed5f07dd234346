"""Proves that a program without faults at one length has no faults at any longer one.

The program runs for one length after another.  Its conditions determine which iterations of a loop have the same
instructions (`lengths`).  If the states after two such iterations are equal (`stepped_cores`), the iterations between
the first and the last ones can be repeated any number of times, so that the longer program has no fault either.
Nothing is assumed about lengths that did not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.errors import SpecError, one_line
from npusim.kernels.tilelang.lengths import Growing, Growth
from npusim.kernels.tilelang.loop_state import of_function
from npusim.kernels.tilelang.program import Language, load_program
from npusim.studies.flags.stepped_cores import SteppedCores
from npusim.studies.flags.walked_paths import MOST_PATHS, walks_of
from npusim.units import plural

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.studies.flags.order import Cores

#: Numbers of periods that run between the first and the last iterations, tried in this order: states need some periods
#: until they repeat.
SETTLING = (6, 12, 24)
#: Largest number of instructions of a core group.
MOST_INSTRUCTIONS = 200_000


@dataclass(frozen=True, slots=True)
class Proof:
    """The facts that are known about a program's lengths ``first + step * k``.

    ``groups``: the core groups that ran.  ``last``: the longest length that ran.  ``period``: the number of iterations
    after which states repeat.  ``fault``: a length that has a fault, and the fault in words; None if no fault was seen.
    ``reasons``: why longer lengths are not proved, each with a line; empty for a proof.
    """

    name: str
    first: int
    step: int
    last: int
    period: int
    fault: tuple[int, str] | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    groups: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        lengths = f"{self.name} = {self.first:,}, {self.first + self.step:,}, ..."
        if self.reasons:
            return f"not proved for {lengths}: {'; '.join(self.reasons)}"
        again = "each iteration leaves" if self.period == 1 else f"every {self.period} iterations leave"
        groups = f"core {plural(len(self.groups), 'group')} {', '.join(map(str, self.groups))}"
        ran = f"lengths up to {self.last:,} ran, after which {again} the same state"
        return f"no faults within {groups} for {lengths}: {ran}"


@dataclass(frozen=True, slots=True)
class _Run:
    growth: Growth
    cores: tuple[Cores, ...]
    groups: tuple[int, ...]

    @property
    def size(self) -> int:
        return max(sum(map(len, cores.values())) for cores in self.cores)


def prove(path: Path, name: str, arguments: Mapping[str, object], length: str, step: int) -> Proof:
    """Return the facts about a program for each value of an argument: its present value, and larger ones in steps.

    Raises `SpecError` if the argument has no integer value.
    """
    first = arguments.get(length)
    if not isinstance(first, int) or isinstance(first, bool):
        raise SpecError(f"--every {length}: state the first length with -a {length}=INTEGER")
    if step < 1:
        raise SpecError(f"--every {length}={step}: the step must be at least 1")
    ran, faults, groups = set[int](), list[tuple[int, str]](), set[tuple[int, ...]]()

    def run(k: int) -> _Run:
        growth = Growth(str(path), length, step, k)
        try:
            made = _run(path, name, {**arguments, length: Growing(growth, first + step * k, 0, step)}, growth)
        except SpecError as error:  # the program contains an operation that is not defined for an integer that grows
            growth.reasons[one_line(error)] = None
            made = _Run(growth, ({},), (0,))
        groups.add(made.groups)
        return made

    def executed(made: _Run) -> list[SteppedCores]:
        k = made.growth.k
        ran.add(k)
        every = [SteppedCores(cores) for cores in made.cores]
        faults.extend((first + step * k, x.fault) for x in every if x.fault)
        return every

    reasons: tuple[str, ...] = ()
    for settling in SETTLING:
        made = _settled(run, settling)
        if reasons := tuple(made.growth.reasons):
            break
        longer = [made, *(run(made.growth.k + more) for more in range(1, made.growth.period))]
        repeated = [_repeats(x, one.growth) for one in longer for x in executed(one)]
        if faults or (all(repeated) and {_conditions(one.growth) for one in longer} == {_conditions(made.growth)}):
            break
        reasons = (f"the states of {2 * settling} iterations do not repeat",)
    if not reasons:  # the lengths that are too short for the proof; the first one with a fault, if any
        for k in range(made.growth.k):
            executed(run(k))
            if min(faults, default=(first + step * k + 1,))[0] <= first + step * k:
                break
    common = tuple(sorted(set.intersection(*map(set, groups))))
    notes = ("core groups are compared with one another at the first length only",) if max(groups) > (0,) else ()
    last = first + step * max(ran, default=0)
    return Proof(length, first, step, last, made.growth.period, min(faults, default=None), reasons, notes, common)


def _settled(run: Callable[[int], _Run], settling: int) -> _Run:
    """Return a run that is long enough for ``settling`` periods between the first and the last iterations."""
    k, before = settling, (-1, -1, -1, -1)
    for _ in range(8):
        result = run(k)
        own = result.growth
        form = _conditions(own)
        needed = max(own.least, own.before + own.after + (settling + 2) * own.period)
        if own.reasons or (form == before and k >= needed):
            return result
        if result.size * max(1, needed) > MOST_INSTRUCTIONS * max(1, k):
            own.refuse(f"more than {MOST_INSTRUCTIONS:,} instructions would run before states can repeat")
            return result
        before, k = form, max(k, needed)
    result.growth.refuse("the conditions of a longer program differ from those of a shorter one")
    return result


def _conditions(growth: Growth) -> tuple[int, int, int, int]:
    return growth.before, growth.after, growth.period, growth.least


def _run(path: Path, name: str, arguments: Mapping[str, object], growth: Growth) -> _Run:
    """Run a program for core groups 0, 1 and the last one along all paths through its conditions."""
    language = Language()
    kernel = load_program(path, name, arguments, language)
    growth.path = kernel.path
    scalars = arguments if kernel.name == name else {}
    groups, result = dict[int, None](), dict[object, "Cores"]()
    for one in walks_of(kernel, language, scalars, growth):
        groups[one.walk.group] = None
        result.setdefault(one.form, one.walk.cores)
        if one.is_cut:
            growth.refuse(f"core group {one.walk.group} has more than {MOST_PATHS} paths through its conditions")
    growth.reasons |= dict.fromkeys(of_function(kernel.path, kernel.line))
    boxes = [
        box for cores in result.values() for issued in cores.values() for x in issued for box in (*x.reads, *x.writes)
    ]
    for box in boxes:
        if box.space != "GM" and box.moves:
            growth.refuse(f"the part of {box.buffer} in {box.space} moves with an iteration")
    return _Run(growth, tuple(result.values()), tuple(groups))


def _repeats(executed: SteppedCores, growth: Growth) -> bool:
    """Return whether each loop has two equal states that are a period apart and not near its ends.

    A core group may have fewer tasks than others, and may not execute any of their loops.
    """
    period, states = growth.period, executed.states
    own = {part for part, _ in states}
    for part, (low, high) in ((part, ends) for part, ends in growth.loops.items() if part in own):
        first, last = max(low, growth.before + period), high - growth.after - 2 * period
        if not any(
            (part, t) in states
            and executed.begun[part, t] >= growth.before + period
            and states[part, t] == states.get((part, t + period))
            for t in range(first, last)
        ):
            return False
    return True
