"""Questions about a candidate that another process answers: its inputs, its output, its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.config import outside
from npusim.errors import NpusimError, RaceError, TensorError, one_line
from npusim.kernels.declare import plugins
from npusim.kernels.triton import is_launch, launch_parts

if TYPE_CHECKING:
    from npusim.simulation.plan import Plan
    from npusim.simulation.request import Request

#: The device on which rankings of Triton kernels were compared with measured ones, 458 configurations
#: (``reports/tune``): rankings are valid for devices with cores of this kind.
RANKED_ON = "h100"


def is_wrapper(schedule: str) -> bool:
    """Return whether the name of a schedule is that of a wrapper: a function in a file, called without a grid."""
    path, call = launch_parts(schedule)
    name, bracket, _ = call.partition("(")
    return path.endswith(".py") and bool(bracket) and name.strip().isidentifier()


@dataclass(frozen=True)
class Question:
    """A question of the parent: the function of a module that answers it, the request, and further values by name."""

    work: Callable[[Question], dict[str, Any]]
    request: Request
    more: Mapping[str, Any] = field(default_factory=dict)

    def kernels(self) -> list[str]:
        """Return the names of the kernels that the answer runs, the published kernel of a tile among them."""
        request = self.request
        named = (request.schedule, self.more.get("other"), dict(request.tiling or {}).get("kernel"))
        return [str(name) for name in named if name]

    def is_foreign(self) -> bool:
        """Return whether the answer runs code from outside the package: of a file, or of an installed package."""
        return any(is_launch(n) or outside.is_outside(n) or n in plugins.offered() for n in self.kernels())


def answer(question: Question) -> dict[str, Any]:
    """Return the answer to a question: facts, or the reason why there are none under ``error``, with its ``kind``.

    ``kind``: a ``race``, a ``crash``, ``inputs`` of the question that do not fit the kernel, or ``refused``.
    """
    try:
        return question.work(question)
    except RaceError as error:
        return {"error": one_line(error), "kind": "race"}
    except TensorError as error:
        return {"error": one_line(error), "kind": "inputs"}
    except NpusimError as error:
        return {"error": one_line(error), "kind": "refused"}
    except MemoryError:
        return {"error": "it needs more memory than a candidate may use", "kind": "crash"}
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        return {"error": f"{type(error).__name__}: {one_line(error)}"[:500], "kind": "crash"}


def described(question: Question) -> dict[str, Any]:
    """Return the sizes and formats of a candidate's inputs and output, and the chosen fields of its tile.

    ``tile``: chosen fields of another call, which are used for this call too. If they are refused, the tile is chosen
    again, and ``refused`` states why. ``by_parameter``: tensors are the arguments of a call, in their shapes.
    """
    from npusim.simulation.chosen_tile import program_of
    from npusim.simulation.evaluation import subject_of
    from npusim.simulation.plan import plan_of
    from npusim.studies.evaluate.arguments import inputs_of, outputs_of

    if is_wrapper(question.request.schedule):
        from npusim.studies.evaluate.wrapper import describe

        return describe(question)
    refused = ""
    try:
        asked = plan_of(_with_tile(question), is_bare=True)
        plan, program = program_of(asked)
    except NpusimError as error:
        if not question.more.get("tile"):
            raise
        refused = one_line(error)
        asked = plan_of(question.request, is_bare=True)
        plan, program = program_of(asked)
    by_parameter = bool(question.more.get("by_parameter"))
    subject = subject_of(plan, program)
    result, *others = outputs_of(program, subject, by_parameter=by_parameter)
    return {
        "inputs": {n: [*shape, fmt] for n, (shape, fmt) in inputs_of(subject, by_parameter=by_parameter).items()},
        "output": [*result.shape, result.fmt],
        "result": result.name,
        "others": {each.name: [*each.shape, each.fmt] for each in others},
        "tile": {**(question.more.get("tile") or {} if not refused else {}), **_chosen(asked)},
        "refused": refused,
    }


def _with_tile(question: Question) -> Request:
    """Return the request with the chosen fields of another call's tile, unless it names others."""
    from npusim.simulation.variants import named_fields

    request, tile = question.request, question.more.get("tile")
    return replace(request, tiling={**tile, **named_fields(request.tiling)}) if tile else request


def _chosen(plan: Plan) -> dict[str, Any]:
    """Return the chosen fields of a plan's tile as text."""
    from npusim.config.tiling import word_of
    from npusim.simulation.chosen_tile import choose_tile

    return {n: word_of(type(plan.tiling), n, value) for n, value in choose_tile(plan).fields.items()}


def other_file(file: str, number: int) -> str:
    """Return the file of another output, by its number in a description's ``others``; the result is in ``file``."""
    return f"{file.removesuffix('.npz')}.{number}.npz"


def computed(question: Question) -> dict[str, Any]:
    """Store the output of a request after the check of its order and races; return the file and the arithmetic.

    ``by_parameter``: as in `described`; outputs other than the result are stored too, each in `other_file`.
    """
    from npusim.program.numerics.evaluate import named_choices
    from npusim.simulation.chosen_tile import program_of
    from npusim.simulation.evaluation import source_of, subject_of
    from npusim.simulation.plan import plan_of
    from npusim.simulation.run_result import arithmetic_evidence
    from npusim.simulation.simulate import BuiltPlan
    from npusim.studies.evaluate.arguments import outputs_of, store

    file = str(question.more["file"])
    if is_wrapper(question.request.schedule):
        from npusim.studies.evaluate.wrapper import compute

        return compute(question, lambda number: other_file(file, number - 1) if number else file)
    plan, program = program_of(plan_of(_with_tile(question), is_bare=True))
    BuiltPlan(plan, program).check()
    subject = subject_of(plan, program)
    source, by_parameter = source_of(plan, subject), bool(question.more.get("by_parameter"))
    for number, each in enumerate(outputs_of(program, subject, by_parameter=by_parameter)):
        if not number or by_parameter:
            store(plan, program, source, each, other_file(file, number - 1) if number else file)
    evidence = arithmetic_evidence(named_choices(program)[0], plan.device)
    return {"file": file, "arithmetic": evidence, "notes": list(program.notes)}


def timed(question: Question) -> dict[str, Any]:
    """Return the prediction of a request's time, with the chosen fields of its tile; ``tile`` as in `described`."""
    if is_wrapper(question.request.schedule):
        from npusim.studies.evaluate.wrapper import launches

        return _in_sequence([_timed(Question(timed, each)) for each in launches(question)])
    return _timed(question)


def _in_sequence(times: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the time of launches one after another: their sum, with the limit of the longest."""
    if len(times) == 1 or any("error" in each for each in times):
        return next((each for each in times if "error" in each), times[0])
    longest = max(times, key=lambda each: float(each["us"]))
    registers = [each["registers"] for each in times if each["registers"] is not None]
    return {
        **longest,
        "us": sum(each["us"] for each in times),
        "is_ranked": False,  # no measured order has been compared with the order of such sums
        "key": "+".join(each["key"] for each in times) if all(each["key"] for each in times) else "",
        "registers": max(registers, default=None),
        "spilled": max(each["spilled"] for each in times),
        "warps": min(each["warps"] for each in times),
        "band": None,
        "errors": f"not measured: {len(times)} launches one after another",
    }


def _timed(question: Question) -> dict[str, Any]:
    from npusim.config.load import load_device
    from npusim.simulation.plan import plan_of
    from npusim.simulation.ranking import steady
    from npusim.studies.tune.prediction import Configuration, predict

    request = _with_tile(question)
    machine = request.machine()
    request = replace(request, hw=machine, overrides=None, l2=steady(request.l2, machine))
    prediction = predict(Configuration({}, request))
    is_ranked = is_launch(request.schedule) and machine.architecture == load_device(RANKED_ON).architecture
    if prediction.us is None:
        return {"error": prediction.reason, "kind": "refused"}
    errors = prediction.errors
    of = prediction.limit
    limit = {"name": str(of) if of.name else "", "share": of.share, "is_link": of.is_link}
    band = None if errors is None else errors.band
    return {
        "us": prediction.us,
        "tile": {**(question.more.get("tile") or {}), **_chosen(plan_of(request, is_bare=True))},
        "is_ranked": is_ranked,
        "key": prediction.key,
        "registers": prediction.registers,
        "spilled": prediction.spilled,
        "warps": prediction.warps,
        "block_warps": prediction.block_warps,
        "limit": limit,
        "band": band,
        "errors": "not measured" if errors is None else errors.verdict,
    }


#: Sizes of a tensor, batch to columns, and its format.
_TENSOR = (int, int, int, int, str)
#: Forms of the answers that a candidate's process writes: types by name (the empty name applies to all values), or by
#: position.
FORMS: Mapping[Callable[[Question], dict[str, Any]], Any] = MappingProxyType(
    {
        described: {
            "inputs": {"": _TENSOR},
            "output": _TENSOR,
            "result": str,
            "others": {"": _TENSOR},
            "tile": dict,
            "refused": str,
        },
        computed: {"file": str, "arithmetic": {"": str}, "notes": list},
        timed: {
            "us": float,
            "tile": dict,
            "is_ranked": bool,
            "key": str,
            "registers": int | None,
            "spilled": int,
            "warps": int,
            "block_warps": int,
            "limit": {"name": str, "share": float, "is_link": bool},
            "band": float | None,
            "errors": str,
        },
    }
)
#: Questions that are answered once for a packaged kernel, so that processes forked later have loaded their code.
WARMED = MappingProxyType({work.__name__: work for work in FORMS})


def has_form(value: Any, form: Any) -> bool:
    """Return whether data from JSON have a form of `FORMS`; an integer is accepted where a float is expected."""
    if isinstance(form, dict):
        names = value if "" in form else form
        return isinstance(value, dict) and all(
            n in value and has_form(value[n], form.get(n, form.get(""))) for n in names
        )
    if isinstance(form, tuple):
        pairs = zip(value, form, strict=True) if isinstance(value, list) and len(value) == len(form) else [(None, int)]
        return all(has_form(one, of) for one, of in pairs)
    return isinstance(value, form | int if form in (float, float | None) else form)
