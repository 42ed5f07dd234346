"""Completion of ``-t``, ``-f``, ``--precision`` and ``-C`` in a shell: the suggestions belong to the schedule and the
device that are named.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import typer

from npusim.errors import NpusimError
from npusim.simulation.request import Request

if TYPE_CHECKING:
    from npusim.config.tiling import TilingField


def _request(ctx: typer.Context) -> Request:
    """Return the part of the request that is typed so far: a schedule (the first of several) and a device."""
    # Parsing ends at an option without a value: the remaining arguments have no names.
    schedule = str(ctx.params.get("schedule") or next(iter(ctx.args), "flash"))
    return Request(schedule.partition(",")[0], hw=ctx.params.get("hw"))


def _fields(ctx: typer.Context) -> "tuple[TilingField, ...]":
    from npusim.config.tiling import tiling_fields

    try:
        return tiling_fields(_request(ctx).find_schedule().tiling)
    except NpusimError:  # a name that is not typed completely
        return ()


def tiling(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the fields of the schedule's tile, or the values of one field, each after the text that precedes the last
    comma.
    """
    return _within(incomplete, _values(_fields(ctx)))


def axes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the axes of a search: fields of the tile, fields of the problem, and numbers of the device."""
    others = (f"{name}=" for name in ("precision", "seq", "batch", "workload"))
    return _within(incomplete, (*_values(_fields(ctx)), *others, *(f"{key}=" for key in _keys(ctx))), cut="")


def precisions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return presets of the schedule."""
    try:
        return _within(incomplete, _request(ctx).find_schedule().precisions)
    except NpusimError:
        return []


def device_keys(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return numbers of the device's file by dotted key."""
    return _within(incomplete, (f"{key}=" for key in _keys(ctx)), cut="")


def _values(fields: "Iterable[TilingField]") -> Iterator[str]:
    for field in fields:
        yield from (f"{field.name}={choice}" for choice in field.choices or ("",))


def _keys(ctx: typer.Context) -> Iterator[str]:
    try:
        yield from (key for key, _ in _request(ctx).machine().facts() if not key.startswith("facts."))
    except NpusimError:
        return


def _within(incomplete: str, words: Iterable[str], cut: str = ",") -> list[str]:
    before = incomplete[: incomplete.rfind(cut) + 1] if cut else ""
    return [f"{before}{word}" for word in words if f"{before}{word}".startswith(incomplete)]
