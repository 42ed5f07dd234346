"""Measured rows that lie beside a page, held against the shared file that they are from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.config.cases import load_measurements

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from npusim.config.cases import MeasurementCase


def copied_cases(beside: Path, shared: Path) -> tuple[Sequence[MeasurementCase], Mapping[str, MeasurementCase]]:
    """Return the cases beside a page and all of the shared file by name, each of the former equal to its original."""
    kept = load_measurements(beside).cases
    every = {case.name: case for case in load_measurements(shared).cases}
    assert kept
    assert all(every[case.name] == case for case in kept)
    return kept, every
