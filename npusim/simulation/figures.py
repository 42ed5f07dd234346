"""One loop for studies of changes: each change has one figure of its plan, or is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from npusim.errors import NpusimError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Change = TypeVar("Change")
Figure = TypeVar("Figure")


def figures(
    changes: Iterable[Change], figure: Callable[[Change], Figure], unfit: tuple[type[NpusimError], ...] = (NpusimError,)
) -> Iterator[tuple[Change, Figure]]:
    """Yield each change with its figure, in order.

    ``figure`` plans, builds and measures a change.  A change is left out where that raises one of ``unfit``: the
    schedule, the device or the call does not have it.  Other errors are raised.
    """
    for change in changes:
        try:
            found = figure(change)
        except unfit:
            continue
        yield change, found
