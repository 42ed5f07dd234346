"""``npusim diff``: a kernel's output against predicted bits."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from npusim.cli import options as o
from npusim.cli.console import progress, show, show_document
from npusim.cli.help import Verbs
from npusim.errors import CheckFailedError
from npusim.simulation.request import BitsOptions, Request

if TYPE_CHECKING:
    from npusim.report.text import Cell
    from npusim.validate.diff import Difference, Explanation

app = Verbs()

#: Explanations that are shown; JSON has them all.
_SHOWN = 5

Output = Annotated[
    Path,
    o.argument(
        "OUT", "The kernel's output, .npz or .safetensors: key o, (batch, heads, rows, head size), values or bits."
    ),
]
Schedule = Annotated[str | None, o.argument("SCHEDULE", "What the kernel should have computed.")]


@app.verb(
    "diff",
    ("npusim diff out.npz flash --hw h200 --tensors qkv.npz", "the last rows of some heads"),
    ("npusim diff out.npz flash --hw h200 --tensors qkv.npz --rows all --heads 0", "every row of a head"),
    ("npusim diff out.npz pasa --tensors qkv.npz -t block_kv=128 --json", "for a script"),
)
@o.takes(BitsOptions, "numerics", own_first=True, schedule=False)
def diff(request: Request, *, out: Output, schedule: Schedule = None, json: o.Json = False) -> None:
    """Hold a kernel's output against predicted bits, and name the choice that explains a difference.

    Every choice that the schedule states is made otherwise, one at a time and then in pairs: arithmetic, order of
    sums, exponential, formats of intermediates, split, tile. Exit code 1 if none explains the output.
    """
    from npusim.validate.diff import diff as search

    request = replace(request, schedule=o.required_schedule(schedule, "diff OUT"))
    with progress("trying other choices") as advance:
        found = search(out, request, advance)
    if json:
        _show_document(out, found)
    else:
        _show(out, found)
    if not found.passed:
        raise CheckFailedError(
            f"{out}: {found.total - found.matched:,} of {found.total:,} outputs differ, and none of {found.tried} "
            "changes to what the schedule states explains it"
        )


def _show(out: Path, found: "Difference") -> None:
    from npusim.report.text import Cell, Facts, Heading, percent

    share = percent(found.matched / found.total)
    style = "good" if found.matched == found.total else "warn" if found.explained else "bad"
    equal = Cell(f"{found.matched:,} of {found.total:,} outputs, {share}", style)  # type: ignore[arg-type]
    rows: list[tuple[str, tuple[Cell, ...]]] = [("equal", (equal,))]
    if found.first is not None:
        batch, head, row, column = found.first
        where = f"batch {batch} head {head} row {row} column {column}"
        rows.append(("first", (Cell(f"{where}: {found.given:.9g} given, {found.predicted:.9g} predicted"),)))
    if found.explained:
        rows.append(("explained by", tuple(_lines(found.explained))))
    elif found.nearest is not None:
        near = found.nearest
        rows.append(("nearest", (Cell(f"{near}: {near.matched:,} of {near.of:,} equal"), *_step(near))))
    elif found.first is not None:
        rows.append(("nearest", (Cell("nothing explains it: no change makes half of what differs equal", "bad"),)))
    if found.first is not None:
        rows.append(("tried", (Cell(f"{found.tried} changes to what {found.run.schedule} states"),)))
    run = found.run
    show([Heading(f"{out} against {run.name} on {run.device.name}", run.precision), Facts(tuple(rows))])


def _lines(explained: "tuple[Explanation, ...]") -> "list[Cell]":
    from npusim.report.text import Cell

    lines = []
    for one in explained[:_SHOWN]:
        lines += [Cell(str(one), "good"), *_step(one)]
    if len(explained) > _SHOWN:
        lines.append(Cell(f"and {len(explained) - _SHOWN} more, equal on these inputs", "dim"))
    return lines


def _step(one: "Explanation") -> "tuple[Cell, ...]":
    from npusim.report.text import Cell

    return () if one.parted is None else (Cell(f"first at {one.parted}", "dim"),)


def _show_document(out: Path, found: "Difference") -> None:
    def told(one: "Explanation") -> dict[str, object]:
        return {
            "changes": [asdict(c) for c in one.changes],
            "matched": one.matched,
            "of": one.of,
            "step": None if one.parted is None else str(one.parted),
        }

    show_document(
        "diff",
        output=str(out),
        run=found.run.name,
        precision=found.run.precision,
        matched=found.matched,
        total=found.total,
        first=found.first,
        given=found.given if found.first else None,
        predicted=found.predicted if found.first else None,
        explained=[told(one) for one in found.explained],
        nearest=None if found.nearest is None else told(found.nearest),
        tried=found.tried,
        passed=found.passed,
    )
