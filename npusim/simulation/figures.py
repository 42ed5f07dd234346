"""The loop of all studies of changes: a change either has a figure, computed from its plan, or is omitted, or has a
reason why it has no figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from npusim.errors import NpusimError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Change = TypeVar("Change")
Figure = TypeVar("Figure")


def figures(
    changes: Iterable[Change],
    figure: Callable[[Change], Figure],
    unfit: tuple[type[NpusimError], ...] = (NpusimError,),
    *,
    refused: Callable[[Change, NpusimError], Figure] | None = None,
) -> Iterator[tuple[Change, Figure]]:
    """Yield each change with its figure, in order.

    ``figure`` plans, builds and measures a change.  If it raises one of ``unfit``, the change does not exist for this
    schedule, device or call: the change is omitted, or ``refused`` returns a figure for it from the error. Other errors
    are raised.
    """
    for change in changes:
        try:
            value = figure(change)
        except unfit as error:
            if refused is None:
                continue
            value = refused(change, error)
        yield change, value
