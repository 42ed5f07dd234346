"""Heaps of the run-to-block engine: records of a key and an engine, the least key first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.timing.block_jit import inline

if TYPE_CHECKING:
    from npusim.timing.block_machine import Records


@inline
def push(heap: Records, size: int, key: int, engine: int) -> None:
    """Add to a heap of ``size`` that has its least key first."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if heap[above].key <= key:
            break
        heap[at].key, heap[at].engine = heap[above].key, heap[above].engine
        at = above
    heap[at].key, heap[at].engine = key, engine


@inline
def pop(heap: Records, size: int) -> None:
    """Take the first off a heap that has ``size`` left after that."""
    key, engine, at = heap[size].key, heap[size].engine, 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and heap[below + 1].key < heap[below].key:
            below += 1
        if heap[below].key >= key:
            break
        heap[at].key, heap[at].engine = heap[below].key, heap[below].engine
        at = below
    heap[at].key, heap[at].engine = key, engine
