"""Times, registers and classes of bits of configurations; each configuration is a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npusim.errors import BufferOverflowError, NpusimError, SpecError, one_line
from npusim.simulation.chosen_tile import program_of
from npusim.simulation.plan import plan_of
from npusim.simulation.ranking import Prediction, predicted, ranked
from npusim.simulation.run_result import expected_errors
from npusim.simulation.simulate import BuiltPlan
from npusim.studies.workers.executors import results

if TYPE_CHECKING:
    from npusim.simulation.request import Request

Fields = Mapping[str, object]


@dataclass(frozen=True)
class Configuration:
    """Values of fields, and the request whose run has them; ``decorator``: the same as a ``triton.Config``, or for a
    TileLang kernel as its autotuner's mapping.
    """

    fields: Fields
    request: Request
    decorator: str = ""

    def label(self, but: Collection[str] = ()) -> str:
        """Return the values in words, without the fields ``but``: ``BM=64 num_warps=4``."""
        return " ".join(f"{n}={v}" for n, v in self.fields.items() if n not in but)


def predict(configuration: Configuration) -> Prediction:
    """Return the prediction of one configuration; if it cannot be read, compiled or placed, the prediction has a reason
    instead of a time.
    """
    try:
        plan, program = program_of(
            plan_of(replace(configuration.request, numerics=False), is_bare=True), is_hinted=False
        )
        timing = BuiltPlan(plan, program).timing()
        if timing is None:
            raise SpecError(f"{plan.device.name} has no timing model: nothing to compare")
    except NpusimError as error:
        return Prediction(reason=one_line(error), fits=not isinstance(error, BufferOverflowError))
    errors = expected_errors(plan.device, plan.request.schedule, plan.problem, plan.tiling, program)
    return replace(predicted(program, plan.device, timing), errors=errors)


def predict_all(
    configurations: Sequence[Configuration], jobs: int = 1, advance: Callable[[int, int], object] | None = None
) -> list[Prediction]:
    """Return the predictions, in ``jobs`` processes, which also compile concurrently."""
    tasks = [replace(c, request=replace(c.request, progress=None)) for c in configurations]
    return results(predict, tasks, lambda reason: Prediction(reason=reason), jobs=jobs, advance=advance)


def lettered(predictions: Sequence[Prediction], order: Iterable[int]) -> dict[int, str]:
    """Return a letter for each class of bits in the order of ``order``; ``?`` if the class is not known."""
    letters: dict[str, str] = {}
    named = {}
    for i in order:
        key = predictions[i].key
        named[i] = letters.setdefault(key, _letter(len(letters))) if key else "?"
    return named


def _letter(number: int) -> str:
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def kept(predictions: Sequence[Prediction], bits: str, reference: int | None = None) -> list[int]:
    """Return the indices of the configurations that ``bits`` selects, best first: ``any``; ``same``: the class of
    ``reference``, or of the best one; or a letter of `lettered`.

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
