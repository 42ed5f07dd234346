"""The time of an expert program as written: the instructions that its core groups issue, on the machine of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from npusim.config.family import registered, resolved
from npusim.errors import SpecError
from npusim.kernels.tilelang.expert import Decisions, GroupWalk, walk_program
from npusim.kernels.tilelang.program import Language, PrimFunc, load_program
from npusim.units import ceil_div

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.config.device import DeviceSpec

#: Largest number of iterations of an outermost loop that are walked first; then twice that number are walked.  It is
#: smaller if iterations are long.
MOST_WALKED, LONG = 4, 12_000
#: Largest number of instructions of a walk.
MOST_INSTRUCTIONS = 400_000
_NO_LAUNCH = "the time includes neither the launch nor the waits of reads for memory beyond L2"


@dataclass(frozen=True, slots=True)
class WrittenTime:
    """The time of a program: ``cycles`` of the longest core group, from its first instruction to the end of its last.

    ``seconds``: the time at the device's clock.  ``busy``: the share of the cycles in which each pipe executes, by core
    and pipe, in the walked part.  ``notes``: the assumptions, and the results that were extrapolated from a part.
    """

    program: str
    device: str
    cycles: float
    seconds: float
    busy: Mapping[tuple[str, str], float]
    notes: tuple[str, ...]


def time_program(
    path: Path,
    name: str,
    arguments: Mapping[str, object] | None = None,
    *,
    device: DeviceSpec,
    vector_in_order: bool = True,
) -> WrittenTime:
    """Return the time of ``path::name``, called with ``arguments``, on an Ascend device whose cores share L2 equally.

    ``vector_in_order``: whether the vector pipe has barriers only where an instruction needs another's results; False:
    it has barriers between all its instructions.  Raises `SpecError` if the program cannot be read, the compiler adds
    its flags, an instruction has no cost on the device, or the program never ends because of its flags.
    """
    language, arguments = Language(), dict(arguments or {})
    kernel = load_program(path, name, arguments, language)
    scalars = arguments if kernel.name == name else {}
    named = registered(device.family).issued
    if not named:
        raise SpecError(f"{device.name}: an expert program of TileLang-Ascend needs an Ascend device")
    timed = _Timed(kernel, language, scalars, resolved(named)(kernel.path, device, vector_in_order=vector_in_order))
    count = timed.groups
    places = device.group_count.value
    groups = sorted({0, count // 2, count - 1}) if count > places else [0]
    each = [timed.cycles(g) for g in groups]
    rounds = ceil_div(count, places)
    cycles = sum(each) / len(each) * rounds
    notes = [*timed.notes, _NO_LAUNCH]
    if rounds > 1:
        listed = ", ".join(map(str, groups))
        notes.append(
            f"the program has {count:,} core groups and the device {places}, each of which runs {rounds} in turn; all "
            f"are assumed to have the mean time of those that were simulated ({listed})"
        )
    return WrittenTime(
        f"{path}::{name}", device.name, cycles, cycles / device.clock_hz.value, timed.busy, tuple(dict.fromkeys(notes))
    )


class TimedProgram(Protocol):
    """A program on the machine of a device."""

    def time(self, walk: GroupWalk) -> tuple[float, Mapping[tuple[str, str], float]]:
        """Return the cycles of a core group, and the cycles in which each pipe executes."""


class _Timed:
    """Walks and times core groups of one program."""

    def __init__(
        self, kernel: PrimFunc, language: Language, scalars: Mapping[str, object], program: TimedProgram
    ) -> None:
        self.kernel, self.language, self.scalars, self.program = kernel, language, scalars, program
        self.notes, self.busy = list[str](), dict[tuple[str, str], float]()
        first = self.walk(0, 1)
        self.groups, size = first.groups, sum(map(len, first.cores.values()))
        self.walked = max(1, min(MOST_WALKED, LONG // max(1, size)))

    def walk(self, group: int, most: int) -> GroupWalk:
        """Return the instructions of a core group; of an outermost loop, only the first iterations."""
        decisions = Decisions()
        walk = walk_program(self.kernel, self.language, group, decisions, self.scalars, most)
        if decisions.path:
            raise SpecError(
                f"{self.kernel.path}: the time depends on values that are known only at run time: {decisions}"
            )
        if sum(map(len, walk.cores.values())) > MOST_INSTRUCTIONS:
            raise SpecError(
                f"{self.kernel.path}: the program has more than {MOST_INSTRUCTIONS:,} instructions, even if each "
                f"outermost loop ends after {most} of its iterations"
            )
        self.notes += walk.notes
        return walk

    def cycles(self, group: int) -> float:
        """Return the cycles of a core group."""
        long = self.walk(group, 2 * self.walked)
        end, busy = self.program.time(long)
        self.busy = {key: n / end for key, n in busy.items()} if end else {}
        if not long.cut:
            return end
        if len(long.cut) > 1:
            listed = ", ".join(map(str, long.cut))
            raise SpecError(
                f"{self.kernel.path}: outermost loops have {listed} iterations, more than npusim can simulate"
            )
        n, count = self.walked, long.cut[0]
        self.notes.append(
            f"{2 * n} of {count} iterations of the outermost loops are simulated; the others are "
            "assumed to have the time of the last"
        )
        before, _ = self.program.time(self.walk(group, n))
        return end + (count - 2 * n) * (end - before) / n
