"""``npusim run SCHEDULE --fields``: what can be chosen about a schedule."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from npusim.cli.console import show, show_document

if TYPE_CHECKING:
    from npusim.config.tiling import TilingField
    from npusim.simulation.request import Request


def show_fields(request: Request, *, as_json: bool) -> None:
    """Print tiling fields and precision presets of a schedule on a device's cores."""
    from npusim.config.tiling import tiling_fields
    from npusim.report.text import Cell, Facts, Grid, Heading, cells
    from npusim.schedules import find_schedule

    name = request.schedule
    schedule = find_schedule(name, replace(request, overrides=None).machine().family)
    fields = tiling_fields(schedule.tiling)
    default = schedule.default_precision
    if as_json:
        show_document(
            "fields",
            schedule=name,
            family=schedule.family,
            tiling=[{**asdict(f), "choices": list(f.choices)} for f in fields],
            precisions={n: p.formats() for n, p in schedule.precisions.items()},
            default_precision=default,
        )
        return
    rows = [cells(f.name, "auto" if f.default is None else str(f.default), _allowed(f), f.description) for f in fields]
    presets = [
        (preset, (Cell(" ".join(f"{k}={v}" for k, v in precision.formats().items())),))
        for preset, precision in schedule.precisions.items()
    ]
    show(
        [
            Heading(f"{name} on {schedule.family} cores", schedule.summary),
            Grid(("-t field", "default", "allowed", ""), "<><<", tuple(rows)),
            Heading("--precision", f"default {default}"),
            Facts(tuple(presets)),
        ]
    )


def _allowed(field: TilingField) -> str:
    if field.choices:
        return " | ".join(map(str, field.choices))
    parts = []
    if field.multiple_of is not None:
        parts.append(f"multiple of {field.multiple_of}")
    if field.minimum is not None:
        parts.append(f">= {field.minimum}")
    if field.maximum is not None:
        parts.append(f"<= {field.maximum}")
    return ", ".join(parts)
