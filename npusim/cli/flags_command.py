"""``npusim check FILE.py::program``: the flags and barriers of an expert program."""

from pathlib import Path
from typing import TYPE_CHECKING

from npusim.cli.console import show_either
from npusim.errors import CheckFailedError
from npusim.kernels.triton import SIGN
from npusim.report.text import Block, Facts, cells, document
from npusim.units import plural

if TYPE_CHECKING:
    from npusim.studies.flags import FlagReport
    from npusim.studies.flags.bounded_check import FoundFault


def check_flags(program: str, arguments: list[str], *, vector_barriers: bool, json: bool) -> None:
    """Check a program and show the result; raise `CheckFailedError` where it has faults."""
    from npusim.kernels.tilelang.program import argument_values
    from npusim.studies.flags import check_program

    path, _, name = program.partition(SIGN)
    report = check_program(Path(path), name, argument_values(arguments), vector_in_order=not vector_barriers)
    show_either(json, lambda: _document(report), lambda: _blocks(report))
    if report.faults:
        count = len(report.faults)
        raise CheckFailedError(f"{program}: {count} {plural(count, 'fault')} of flags and barriers")


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
        notes=list(report.notes),
    )


def _blocks(report: "FlagReport") -> list[Block]:
    rows: list[tuple[str, tuple[str, ...]]] = [("program", (report.program,))]
    rows += [(x.fault.kind, _fault(x)) for x in report.faults]
    if not report.faults:
        rows.append(("faults", ("none: every execution within the bounds has the same values",)))
        rows.append(("redundant barriers", (_lines(report.redundant, f"of {report.barriers}, each by itself"),)))
        rows.append(("removable together", (_lines(report.removable, "in one change"),)))
    rows.append(("checked", (f"{report.instructions:,} instructions: {', '.join(report.bounds)}",)))
    rows += [("note", (note,)) for note in report.notes]
    return [Facts(tuple((label, cells(*texts)) for label, texts in rows))]


def _fault(x: "FoundFault") -> tuple[str, ...]:
    where = f"core group {x.group}" + (f", where {x.answers}" if x.answers else "")
    return x.fault.text, where, f"mend: {x.mend}"


def _lines(lines: tuple[int, ...], how: str) -> str:
    return f"{plural(len(lines), 'line')} {', '.join(map(str, lines))} ({len(lines)} {how})" if lines else "none"
