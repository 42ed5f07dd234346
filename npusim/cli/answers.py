"""Answers to questions of programs, as JSON data, computed in processes with limits.

A process that has run foreign code ends with its answer; one process remains for all questions about packaged kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from npusim.errors import NpusimError, SpecError
from npusim.kernels.triton import is_launch
from npusim.simulation.request import absolute, short_name

if TYPE_CHECKING:
    from npusim.studies.evaluate.child import Question
    from npusim.studies.evaluate.limits import Limits


def answered(question: Question, limits: Limits) -> dict[str, Any]:
    """Return the answer to a question; raise `SpecError` if there is no answer."""
    from npusim.studies.evaluate.child import WARMED
    from npusim.studies.evaluate.lasting import lasting
    from npusim.studies.evaluate.process import CandidateProcess, nursery

    more = {name: absolute(x) if name == "other" else x for name, x in question.more.items()}
    request = question.request.placed()
    placed = replace(question, request=request, more=more)
    work = placed.work.__name__
    nursery().warm([str(request.named_device())], [work] if work in WARMED else WARMED)
    if placed.is_foreign():
        with CandidateProcess(limits, may_start=any(map(is_launch, placed.kernels()))) as process:
            answer = process.ask(placed)
    else:
        answer = lasting(limits).ask(placed)
    if "error" in answer:
        raise SpecError(str(answer["error"]))
    return answer


def tuned(question: Question) -> dict[str, Any]:
    """Return a kernel's configurations, ranked; ``fields``: values to try, ``bits`` as for ``npusim tune``."""
    from npusim.report.tuning import Tuning, tuning_document
    from npusim.simulation.ranking import steady
    from npusim.studies.tune.configurations import configurations_of
    from npusim.studies.tune.prediction import predict_all

    request, device = question.request, question.request.machine()
    request = replace(request, l2=steady(request.l2, device))
    configurations = configurations_of(request, question.more["fields"])
    predictions = predict_all(configurations, 1)
    if all(p.us is None for p in predictions):
        raise SpecError(f"{short_name(request.schedule)}: no configuration has a time: {predictions[0].reason}")
    name = short_name(request.schedule)
    return tuning_document([Tuning(name, "", device.name, configurations, predictions, str(question.more["bits"]))])


def explained(question: Question) -> dict[str, Any]:
    """Return the difference between two kernels' latencies, split into causes; ``other``: the second."""
    from npusim.report.comparison import compare, comparison_document
    from npusim.simulation.simulate import run_request

    request = replace(question.request, numerics=False)
    both = [run_request(replace(request, schedule=name)) for name in (request.schedule, question.more["other"])]
    return comparison_document(compare(*both))


def stressed(question: Question) -> dict[str, Any]:
    """Return the inputs on which a kernel is furthest from float64; ``budget``: seconds of the search."""
    from npusim.report.worst_inputs import stress_document
    from npusim.studies.stress import examine

    return stress_document(examine(question.request, budget_s=float(question.more["budget"])), "", {})


def programmed(question: Question) -> dict[str, Any]:
    """Return the tile program: its rings, phases and waits."""
    from npusim.report.program_table import Printed, program_document
    from npusim.simulation.chosen_tile import program_of
    from npusim.simulation.plan import plan_of

    plan, program = program_of(plan_of(question.request, is_bare=True))
    return program_document(Printed.of(short_name(question.request.schedule), program, plan.device.name))


def in_words(error: NpusimError) -> str:
    """Return an error in the form for a program."""
    return f"{type(error).__name__}: {error}"
