"""Predicted against measured bits: vectors of matrix units, and whole kernels of a chip."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from npusim.errors import SpecError
from npusim.formats.vectors import VectorReport, check_vectors
from npusim.validate.kernels import FAMILIES, check_kernels, is_kernel_file

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class BitsReport:
    """Matched and total outputs by name: of matrix units, and of whole kernels."""

    vectors: dict[str, VectorReport]
    kernels: dict[str, VectorReport]
    left_out: int

    @property
    def matched(self) -> int:
        """Outputs whose bits are equal."""
        return sum(r.matched for r in (*self.vectors.values(), *self.kernels.values()))

    @property
    def total(self) -> int:
        """Outputs compared."""
        return sum(r.total for r in (*self.vectors.values(), *self.kernels.values()))

    @property
    def is_passed(self) -> bool:
        """Whether every output is equal."""
        return self.matched == self.total


def validate_bits(path: Path, *, only: str | None = None) -> BitsReport:
    """Return how many outputs of a golden file are predicted bit for bit.

    Raises
    ------
    TensorError
        The file is damaged, holds a pickle, or its arrays do not fit together.
    SpecError
        ``only`` selects nothing.
    """
    if is_kernel_file(path):
        found, left_out = check_kernels(path, only)
        if not found:
            raise SpecError(f"--only {only!r} selects no kernel of {path}; families: {', '.join(FAMILIES)}")
        return BitsReport({}, found, left_out)
    vectors = dict(check_vectors(path))
    chosen = {n: r for n, r in vectors.items() if only is None or fnmatchcase(n, only)}
    if not chosen:
        raise SpecError(f"--only {only!r} selects none of: {', '.join(sorted(vectors))}")
    return BitsReport(chosen, {}, len(vectors) - len(chosen))
