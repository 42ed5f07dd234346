"""Precisions as algorithms know them: a dataclass that names the format of each intermediate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar, cast

#: Where P V adds up: anew for each tile, or on the running output itself.
Accumulate = Literal["fresh", "chained"]


class HasFormats(Protocol):
    """A precision: a dataclass that names the format of each intermediate."""

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}``."""


PrecisionType = TypeVar("PrecisionType", bound=HasFormats)


def for_inputs(precision: PrecisionType, fmt: str) -> PrecisionType:
    """Return the same allocation with ``input`` replaced by the inputs' format."""
    chosen: Any = {n: fmt for n, f in precision.formats().items() if f == "input"}
    return cast("PrecisionType", replace(cast("Any", precision), **chosen))
