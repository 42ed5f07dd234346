"""``npusim check FILE.py::program``: the flags and barriers of an expert program, and with ``--hw`` its time."""

from pathlib import Path
from typing import TYPE_CHECKING

from npusim.cli.console import show_either
from npusim.errors import CheckFailedError, SpecError
from npusim.kernels.triton import SIGN
from npusim.report.text import Block, Facts, cells, document, percent
from npusim.simulation.request import refuse
from npusim.units import format_duration, plural

if TYPE_CHECKING:
    from npusim.studies.flags import FlagReport, Proof
    from npusim.studies.flags.bounded_check import FoundFault
    from npusim.studies.flags.written_time import WrittenTime


def check_flags(program: str, arguments: list[str], *, every: str, vector_barriers: bool, json: bool) -> None:
    """Check a program and show the result; raise `CheckFailedError` if it has faults, or if a requested proof is not
    possible.
    """
    from npusim.kernels.tilelang.program import argument_values
    from npusim.studies.flags import check_every_length, check_program

    path, _, name = program.partition(SIGN)
    given = Path(path), name, argument_values(arguments)
    if every:
        refuse(
            {"--vector-barriers": vector_barriers or None}, "--every supports only a vector pipe that executes in order"
        )
        length, _, step = every.partition("=")
        if step and not step.isdecimal():
            raise SpecError(f"--every {every}: write NAME or NAME=STEP, for example seq=128")
        report = check_every_length(*given, length, int(step or 1))
    else:
        report = check_program(*given, vector_in_order=not vector_barriers)
    show_either(json, lambda: _document(report), lambda: _blocks(report))
    if report.faults:
        count = len(report.faults)
        raise CheckFailedError(f"{program}: {count} {plural(count, 'fault')} of flags and barriers")
    if report.proof is not None and report.proof.reasons:
        raise CheckFailedError(f"{program}: {report.proof}")


def show_time(program: str, arguments: list[str], *, hw: str, vector_barriers: bool, json: bool) -> None:
    """Show the time of a program as written."""
    from npusim.config.load import load_device
    from npusim.kernels.tilelang.program import argument_values
    from npusim.studies.flags.written_time import time_program

    path, _, name = program.partition(SIGN)
    device, given = load_device(hw), argument_values(arguments)
    result = time_program(Path(path), name, given, device=device, vector_in_order=not vector_barriers)
    show_either(
        json,
        lambda: document(
            "written_time",
            program=result.program,
            hw=result.device,
            cycles=result.cycles,
            seconds=result.seconds,
            busy={f"{core} {pipe}": share for (core, pipe), share in result.busy.items()},
            notes=list(result.notes),
        ),
        lambda: [Facts(tuple((label, cells(*texts)) for label, texts in _time_rows(result)))],
    )


def _time_rows(made: "WrittenTime") -> list[tuple[str, tuple[str, ...]]]:
    busy = sorted(made.busy.items(), key=lambda x: -x[1])
    rows: list[tuple[str, tuple[str, ...]]] = [
        ("program", (made.program,)),
        ("time", (format_duration(made.seconds), f"{made.cycles:,.0f} cycles of {made.device}")),
        ("busy", (", ".join(f"{core} {pipe} {percent(share)}" for (core, pipe), share in busy if share > 0),)),
    ]
    return rows + [("note", (note,)) for note in made.notes]


def _document(report: "FlagReport") -> dict[str, object]:
    faults = [
        {
            "kind": x.fault.kind,
            "text": x.fault.text,
            "lines": [i.line for i in (x.fault.first, x.fault.second) if i is not None],
            "core_group": x.group,
            "conditions": x.answers,
            "mend": x.mend,
        }
        for x in report.faults
    ]
    return document(
        "flags",
        program=report.program,
        passed=not faults,
        faults=faults,
        redundant_barriers=list(report.redundant),
        removable_together=list(report.removable),
        barriers=report.barriers,
        instructions=report.instructions,
        bounds=list(report.bounds),
        proof=None if report.proof is None else _proof(report.proof),
        notes=list(report.notes),
    )


def _proof(proof: "Proof") -> dict[str, object]:
    return {
        "argument": proof.name,
        "first": proof.first,
        "step": proof.step,
        "proved": not proof.reasons,
        "reasons": list(proof.reasons),
        "longest_run": proof.last,
        "period": proof.period,
    }


def _blocks(report: "FlagReport") -> list[Block]:
    rows: list[tuple[str, tuple[str, ...]]] = [("program", (report.program,))]
    rows += [(x.fault.kind, _fault(x)) for x in report.faults]
    if not report.faults:
        rows.append(("faults", ("none: every execution within the bounds gives the same values",)))
        if report.proof is not None:
            rows.append(
                ("not proved", report.proof.reasons) if report.proof.reasons else ("proved", (str(report.proof),))
            )
        rows.append(("redundant barriers", (_lines(report.redundant, f"of {report.barriers}, each by itself"),)))
        rows.append(("removable together", (_lines(report.removable, "in one change"),)))
    rows.append(("checked", (f"{report.instructions:,} instructions: {', '.join(report.bounds)}",)))
    rows += [("note", (note,)) for note in (*report.notes, *(report.proof.notes if report.proof else ()))]
    return [Facts(tuple((label, cells(*texts)) for label, texts in rows))]


def _fault(x: "FoundFault") -> tuple[str, ...]:
    where = f"core group {x.group}" + (f", where {x.answers}" if x.answers else "")
    return x.fault.text, where, f"mend: {x.mend}"


def _lines(lines: tuple[int, ...], how: str) -> str:
    return f"{plural(len(lines), 'line')} {', '.join(map(str, lines))} ({len(lines)} {how})" if lines else "none"
