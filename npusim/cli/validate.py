"""``npusim validate``: predictions held against what was measured."""

from pathlib import Path
from typing import Annotated

import typer

from npusim.cli import options as o
from npusim.cli.console import progress, show, show_json
from npusim.cli.help import Command, examples
from npusim.errors import CheckFailedError, SpecError

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(
        "validate",
        cls=Command,
        epilog=examples(
            (
                "npusim validate measured.yaml --band 0.15",
                "times: each residual, exit code 1 outside",
            ),
            ("npusim validate measured.yaml --only 'fa_*'", "cases by name, schedule or device"),
            ("npusim validate vectors.npz", "matrix-unit vectors or whole kernels, bit for bit"),
        ),
    )(validate)


def validate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Timings (.yaml), vectors or kernels (.npz).")
    ],
    only: Annotated[
        str | None,
        typer.Option(
            "--only", metavar="GLOB", help="Cases by name, schedule or device; the rest is counted."
        ),
    ] = None,
    band: Annotated[
        float | None,
        typer.Option(
            "--band",
            metavar="FRACTION",
            min=0,
            help="Relative error allowed where the file states none.",
        ),
    ] = None,
    method: o.Method = "auto",
    json: o.Json = False,
) -> None:
    """Hold predictions against measurements: times within a band, bits exactly.

    Exit code 1 if a time lies outside its band or a bit differs.
    """
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
    faults = getattr(report, "faults", ())
    if faults:
        raise SpecError(faults[0] + (f" ({len(faults) - 1} more such cases)" if len(faults) > 1 else ""))
    if not report.is_passed:
        raise CheckFailedError("predictions and measurements differ by more than allowed")
