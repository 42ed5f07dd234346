"""Predicted against measured bits: vectors of matrix units."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from npusim.errors import SpecError
from npusim.formats.vectors import VectorReport, check_vectors

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class BitsReport:
    """Matched and total outputs of matrix units, by name."""

    vectors: dict[str, VectorReport]
    left_out: int

    @property
    def matched(self) -> int:
        """Outputs whose bits are equal."""
        return sum(r.matched for r in self.vectors.values())

    @property
    def total(self) -> int:
        """Outputs compared."""
        return sum(r.total for r in self.vectors.values())

    @property
    def is_passed(self) -> bool:
        """Whether every output is equal."""
        return self.matched == self.total


def validate_bits(path: Path, *, only: str | None = None) -> BitsReport:
    """Return how many outputs of a file of vectors (`npusim.formats.vectors`) are predicted bit for bit.

    Raises `TensorError` if the file is damaged, holds a pickle, or its arrays do not fit together; `SpecError` if
    ``only`` selects nothing.
    """
    vectors = check_vectors(path)
    chosen = {n: r for n, r in vectors.items() if only is None or fnmatchcase(n, only)}
    if not chosen:
        raise SpecError(f"--only {only!r} selects none of: {', '.join(sorted(vectors))}")
    return BitsReport(chosen, len(vectors) - len(chosen))
