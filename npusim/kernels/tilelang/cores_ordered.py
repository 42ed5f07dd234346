"""Statements of both cores in the order that their workspaces imply, if no flag of the text orders them.

A compiler that sets the flags between cores lets each read of a workspace wait for the write of the same iteration. In
a program's text, statements of the matrix core may come before the statements of the vector cores whose results they
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from npusim.kernels.tilelang.cores_joined import changed, stored_tensors
from npusim.kernels.tilelang.statements import (
    BufferElement,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    TileReduction,
    Variable,
    expressions_in,
    parts_of,
    refused,
    substituted,
    tiles_read,
    walked,
    written_tiles,
)

Body = tuple[Statement, ...]


def ordered_by_workspaces(body: Sequence[Statement], names: Iterable[str]) -> Body:
    """Return statements with each read of a workspace after its write; unchanged if all are in this order.

    Raises `ProgramError` with a line if two cores wait for each other.
    """
    known = set(names)
    writers = [b for s in walked(body) if isinstance(s, ParallelNest) for b in stored_tensors(s) if b.name in known]
    spaces = {b for b in writers if writers.count(b) == 1}
    if not any(_is_read_early(body, b) for b in spaces):
        return tuple(body)
    return _Order(body, spaces).level(body)


def _reads(s: Statement) -> set[TileBuffer]:
    """Return the tensors that a statement, or one in it, reads."""
    every = (e for x in expressions_in([s]) for e in parts_of(x) if isinstance(e, BufferElement))
    return {e.buffer for e in every if e.buffer.is_global}


def _writes(s: Statement) -> set[TileBuffer]:
    """Return the tensors that a statement, or one in it, writes."""
    return {b for x in walked([s]) if isinstance(x, ParallelNest) for b in stored_tensors(x)}


def _is_read_early(body: Sequence[Statement], tensor: TileBuffer) -> bool:
    """Return whether a statement reads a tensor that a later statement of the text writes."""
    leaves = [s for s in walked(body) if not isinstance(s, SerialLoop)]
    reads = [i for i, s in enumerate(leaves) if tensor in _reads(s)]
    return bool(reads) and min(reads) < max(i for i, s in enumerate(leaves) if tensor in _writes(s))


class _Order:
    """Orders the statements of a level: the statements of each core keep their order, and reads of workspaces follow
    the writes.
    """

    def __init__(self, body: Sequence[Statement], spaces: set[TileBuffer]) -> None:
        self.spaces = spaces
        products = [s for s in walked(body) if isinstance(s, MatrixProduct)]
        self.of_matrix = {x.buffer for s in products for x in (s.a, s.b, s.c)}

    def cores(self, s: Statement) -> frozenset[str]:
        """Return the cores to which a statement, or its inner statements, belong."""
        found = set[str]()
        for x in walked([s]):
            if isinstance(x, MatrixProduct):
                found.add("C")
            elif isinstance(x, TileReduction):
                found.add("V")
            elif isinstance(x, ParallelNest):
                tiles = {*written_tiles([x]), *tiles_read(expressions_in([x]))}
                found |= {"C"} if tiles & self.of_matrix else set()
                found |= {"V"} if tiles - self.of_matrix or not tiles else set()
            elif not isinstance(x, SerialLoop):
                found |= {"C", "V"}
        return frozenset(found)

    def level(self, body: Sequence[Statement]) -> Body:
        """Return the statements of a level in order."""
        rest, result = list(body), list[Statement]()
        while rest:
            at = next((i for i in range(len(rest)) if self.is_ready(rest, i)), None)
            if at is None:
                self.join_loops(rest)
                continue
            s = rest.pop(at)
            result.append(replace(s, body=self.level(s.body)) if isinstance(s, SerialLoop) else s)
        return tuple(result)

    def is_ready(self, rest: Sequence[Statement], at: int) -> bool:
        """Return whether no remaining statement must come before a statement."""
        cores = self.cores(rest[at])
        if any(cores & self.cores(s) for s in rest[:at]):
            return False
        needed = _reads(rest[at]) & self.spaces
        return not any(needed & _writes(s) for i, s in enumerate(rest) if i != at)

    def join_loops(self, rest: list[Statement]) -> None:
        """Combine the first loops of both cores, which wait for each other."""
        firsts = [next((s for s in rest if core in self.cores(s)), None) for core in ("C", "V")]
        a, b = firsts
        if (
            not isinstance(a, SerialLoop)
            or not isinstance(b, SerialLoop)
            or a is b
            or (a.low, a.high) != (b.low, b.high)
        ):
            line = next(s.line for s in firsts if s is not None)
            raise refused(
                line, "the two cores wait for each other's workspaces here: write loops with equal bounds for both"
            )
        renamed = changed(b.body, lambda e: substituted(e, {b.variable: Variable(a.variable)}))
        at = rest.index(a)
        rest[at] = replace(a, body=(*a.body, *renamed))
        rest.remove(b)
