"""The operations of a kernel on blocks of another form, region by region."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from npusim.kernels.triton.ttir_text import TYPES, Op, shape_of


class OtherBlocksError(Exception):
    """Raised if a kernel has blocks without this form."""


class RegionRewriter(ABC):
    """Operations in their new order; ``made``: the operation that computes each value before the change.

    ``known``: results that operations of this region and of enclosing regions share, by their content.
    """

    def __init__(self, operations: Sequence[Op], made: Mapping[str, Op]) -> None:
        self.operations, self.made = operations, made
        self.ordered = list[Op]()
        self.known: dict[tuple[str, *tuple[int, ...]], str] = {}

    @abstractmethod
    def rewrite(self, op: Op) -> None:
        """Add the operations that replace an operation; raise `OtherBlocksError` if there are none."""

    def changed(self, operations: Sequence[Op]) -> list[Op]:
        """Return the operations of a region; raise `OtherBlocksError` if a block has no such form."""
        before, known, self.ordered = self.ordered, dict(self.known), []
        for op in operations:
            self.rewrite(op)
        result, self.ordered, self.known = self.ordered, before, known
        return result

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value before the change; empty for one number, and for a value of no operation."""
        op = self.made.get(name)
        types = TYPES.findall(op.type) if op is not None else []
        return shape_of(types[-1])[0] if types else ()
