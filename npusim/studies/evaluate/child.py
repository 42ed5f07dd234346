"""The process in which a candidate is read, compiled and executed; it answers the questions of its parent.

Run as a program, ``python -m npusim.studies.evaluate.child FOLDER ANSWERS``: questions are pickled on standard input,
each answer is a line of JSON on the file descriptor ``ANSWERS``, and outputs are arrays in the folder.  What a
candidate prints goes nowhere, and its parent unpickles nothing.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from npusim.errors import NpusimError, RaceError, one_line
from npusim.studies.evaluate.limits import confine, guard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.simulation.request import Request


@dataclass(frozen=True)
class Question:
    """What a parent asks: a function of a module that answers it, the request, and more of it by name."""

    work: Callable[[Question], dict[str, Any]]
    request: Request
    more: Mapping[str, Any] = field(default_factory=dict)


def main(folder: str, answers: str) -> None:
    """Answer questions until there are no more."""
    questions = sys.stdin.buffer
    limits, may_start = pickle.load(questions)
    _import_all()
    with os.fdopen(int(answers), "wb", buffering=0) as sink:
        confine(limits, may_start=may_start)
        guard((Path(folder),))
        _answer_all(questions, sink)


def _import_all() -> None:
    """Import what answers need, before the limits hold."""
    import npusim.program.numerics.evaluate
    import npusim.studies.tune.prediction  # noqa: F401


def _answer_all(questions: BinaryIO, sink: Any) -> None:
    while True:
        try:
            question = pickle.load(questions)
        except EOFError:
            return
        sink.write(f"{json.dumps(answer(question))}\n".encode())


def answer(question: Question) -> dict[str, Any]:
    """Return the answer to a question: its facts, or under ``error`` why there are none, and the ``kind`` of it."""
    try:
        return question.work(question)
    except RaceError as error:
        return {"error": one_line(error), "kind": "race"}
    except NpusimError as error:
        return {"error": one_line(error), "kind": "refused"}
    except MemoryError:
        return {"error": "it needs more memory than a candidate has", "kind": "crash"}
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        return {"error": f"{type(error).__name__}: {one_line(error)}"[:500], "kind": "crash"}


def described(question: Question) -> dict[str, Any]:
    """Return the sizes and formats of a candidate's inputs and output, and the fields of its tile that are chosen."""
    from npusim.config.tiling import word_of
    from npusim.simulation.chosen_tile import choose_tile, program_of
    from npusim.simulation.evaluation import result_of, subject_of
    from npusim.simulation.plan import plan_of

    asked = plan_of(question.request, is_bare=True)
    plan, program = program_of(asked)
    subject = subject_of(plan, program)
    o = subject.output
    return {
        "inputs": {n: [t.batch, t.heads, t.rows, t.cols, t.fmt] for n, t in subject.plain.items()},
        "output": [o.batch, o.heads, o.seq_q, o.output_cols, result_of(program).fmt],
        "tile": {n: word_of(type(asked.tiling), n, value) for n, value in choose_tile(asked).fields.items()},
    }


def computed(question: Question) -> dict[str, Any]:
    """Store the output of a request after the proof of its order and races; return the file and the arithmetic."""
    import numpy as np

    from npusim.program.numerics.evaluate import chosen, chosen_heads, execute_rows, named_choices
    from npusim.program.numerics.paths import bits_of as patterns
    from npusim.simulation.chosen_tile import program_of
    from npusim.simulation.evaluation import result_of, source_of, subject_of
    from npusim.simulation.plan import plan_of
    from npusim.simulation.run_result import arithmetic_evidence
    from npusim.simulation.simulate import BuiltPlan

    request, file = question.request, str(question.more["file"])
    plan, program = program_of(plan_of(request, is_bare=True))
    BuiltPlan(plan, program).check()
    subject = subject_of(plan, program)
    output = subject.output
    rows = chosen("rows", request.rows, output.seq_q)
    source, heads = source_of(plan, subject), chosen_heads(output, request.heads)
    written = execute_rows(program, source, rows, heads, output=result_of(program).name)[1]
    shape = output.batch, output.heads, output.seq_q, output.output_cols
    first = patterns(next(iter(written.values())))
    values, has = np.zeros(shape, first.dtype), np.zeros(shape[:3], np.bool_)
    for (n, h, row), block in written.items():
        values[n, h, row : row + len(block)] = patterns(block)
        has[n, h, row : row + len(block)] = True
    np.savez(file, o=values, computed=has)
    evidence = arithmetic_evidence(named_choices(program)[0], plan.device)
    return {"file": file, "arithmetic": evidence, "notes": list(program.notes)}


def timed(question: Question) -> dict[str, Any]:
    """Return the prediction of a request's time."""
    from npusim.simulation.ranking import steady
    from npusim.studies.tune.prediction import Configuration, predict

    request = question.request
    machine = request.machine()
    prediction = predict(
        Configuration({}, replace(request, hw=machine, overrides=None, l2=steady(request.l2, machine)))
    )
    if prediction.us is None:
        return {"error": prediction.reason, "kind": "refused"}
    errors = prediction.errors
    limit = {"name": str(prediction.limit) if prediction.limit.name else "", "share": prediction.limit.share}
    band = None if errors is None else errors.band
    return {
        "us": prediction.us,
        "key": prediction.key,
        "registers": prediction.registers,
        "spilled": prediction.spilled,
        "limit": limit,
        "band": band,
        "errors": "not measured" if errors is None else errors.verdict,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
