"""Values of a tiling field that a run could try: they fit, and they change what is run."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from npusim.errors import NpusimError
from npusim.schedules.registry import effective
from npusim.simulation.request import Request, command
from npusim.simulation.variants import Variant, Variants, work_key

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from npusim.simulation.result import RunData


class Trial:
    """Tries other values of one tiling field on the schedule, problem and device of a run."""

    def __init__(self, result: RunData) -> None:
        self._result = r = result
        # The fields one by one, not a tiling as it was made: a field's own limits count too.
        fields = r.tiling.model_dump()
        self._variants = Variants(
            Request(r.schedule, problem=r.problem, hw=r.device, tiling=fields, precision=r.precision)
        )

    @cached_property
    def _work(self) -> Hashable:
        return work_key(self._result.program)

    def value(self, field: str) -> int | None:
        """Return the number that a field has, or that its default stands for; None if it is none."""
        return effective(self._result.tiling, field)

    def useful(self, field: str, values: Iterable[int]) -> list[int]:
        """Return those of ``values`` that fit and whose program differs from the run's own."""
        return [value for value in values if self._work_of(field, value) not in (None, self._work)]

    def _work_of(self, field: str, value: int) -> Hashable:
        try:
            return work_key(self._variants.build(Variant(tiling={field: value}), is_hinted=False).program)
        except (NpusimError, ValueError):
            return None

    def explore(self, field: str, values: Sequence[int]) -> str:
        """Return the command that tries ``values`` on this very run; empty where none can say it."""
        r = self._result
        if r.asked is None:
            return ""
        options = [(o, v) for o, v in r.asked if (o, v.partition("=")[0]) != ("-t", field)]
        listed = f"{field}={','.join(str(value) for value in values)}"
        return command("explore", r.schedule, options, ["--field", listed])
