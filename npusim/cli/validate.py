"""``npusim validate``: predictions held against what was measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from npusim.cli import options as o
from npusim.cli.console import progress, show, show_json
from npusim.cli.help import Verbs
from npusim.errors import CheckFailedError, SpecError
from npusim.simulation.request import refuse

if TYPE_CHECKING:
    from npusim.validate import BitsReport, TimesReport

app = Verbs()


@app.verb(
    "validate",
    ("npusim validate measured.yaml --band 0.15", "times: each residual, exit code 1 outside"),
    ("npusim validate measured.yaml --only 'fa_*'", "cases by name, schedule or device"),
    ("npusim validate --template > measured.yaml", "a file of timings to begin with"),
    ("npusim validate vectors.npz", "matrix-unit vectors or whole kernels, bit for bit"),
)
def validate(
    file: Annotated[Path | None, o.argument("FILE", "Timings (.yaml), vectors or kernels (.npz).")] = None,
    *,
    only: Annotated[
        str | None, o.option("--only GLOB", "Cases by name, schedule or device; the rest is counted.")
    ] = None,
    band: Annotated[
        float | None, o.option("--band FRACTION", "Relative error allowed where the file states none.", min=0)
    ] = None,
    method: Annotated[str, o.request_option("method")] = "auto",
    template: Annotated[bool, o.option("--template", "Print a commented file of timings to begin with.")] = False,
    json: o.Json = False,
) -> None:
    """Hold predictions against measurements: times within a band, bits exactly.

    Exit code 1 if a time lies outside its band or a bit differs; 2 if else a case has no prediction.
    """
    if template:
        refuse({"FILE": file, "--only": only, "--band": band}, "--template prints a file; leave these out")
        from importlib.resources import files

        typer.echo((files("npusim.cli") / "new_measurements.yaml").read_text(encoding="utf-8"), nl=False)
        return
    if file is None:
        raise SpecError("which file? For example: npusim validate --template > measured.yaml")
    from npusim.report.validation import validation_document, validation_table
    from npusim.validate import validate as hold

    with progress("predicting") as advance:
        done: list[str] = []

        def note(name: str) -> None:
            done.append(name)
            advance(len(done) - 1, max(len(done), 1))

        report = hold(file, only=only, band=band, method=method, progress=note)
    if json:
        show_json(validation_document(report))
    else:
        show(validation_table(report))
    _judge(report)


def _judge(report: "TimesReport | BitsReport") -> None:
    """Raise what decides the exit code: 1 if anything lies outside, else 2 if a case has no prediction."""
    faults = getattr(report, "faults", ())
    if getattr(report, "is_outside", not report.is_passed):
        text = "predictions and measurements differ by more than allowed"
        also = f"; besides, {len(faults)} cases have no prediction:" if faults else ""
        raise CheckFailedError("\n".join((text + also, *faults)))
    if faults:
        raise SpecError("\n".join(faults))
