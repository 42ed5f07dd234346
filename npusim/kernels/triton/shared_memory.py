"""Arguments of a recorded call that are parts of one memory: each tensor is read with the values before the launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from npusim.errors import SpecError
from npusim.formats import get_format
from npusim.kernels.triton.calls import INTEGERS, Argument
from npusim.kernels.triton.results_apart import LOADS, STORES, roots_of, sources_of
from npusim.kernels.triton.ttir_text import Function, Op

if TYPE_CHECKING:
    from npusim.kernels.triton.calls import Call


class _Access(NamedTuple):
    """A load or store: its place in the text, its outermost loop (0 outside of loops), and the names of its offsets.

    ``offsets``: all that are added to the parameter; none where it is not known which these are.
    """

    op: Op
    place: int
    loop: int
    offsets: tuple[str, ...]
    parameters: set[str]


def check_shared(function: Function, call: Call) -> None:
    """Raise `SpecError` for two arguments with elements in common, of which a launch loads one behind a store to the
    other, or stores to both.
    """
    tensors = {n: x for n, x in call.arguments.items() if isinstance(x, Argument)}
    shared = [(a, b) for a, b in permutations(tensors, 2) if _overlap(tensors[a], tensors[b])]
    if not shared:
        return
    accesses = list(_accesses(function))
    for stored, other in shared:
        is_one = tensors[stored].offset == tensors[other].offset
        for store in (x for x in accesses if x.op.name in STORES and stored in x.parameters):
            for x in (x for x in accesses if other in x.parameters):
                is_in_place = is_one and bool(x.offsets) and x.offsets == store.offsets
                is_behind = x.place > store.place or (x.loop == store.loop > 0 and not is_in_place)
                if x.op.name in LOADS and is_behind:
                    raise _refused(x.op, f"{other} is loaded behind a store to {stored}")
                if x.op.name in STORES:
                    raise _refused(x.op, f"{other} is stored to as {stored} is")


def _refused(op: Op, why: str) -> SpecError:
    return SpecError(f"{op.line}: {why}, and both are parts of one memory: give the kernel a copy of one")


def _accesses(function: Function) -> Iterator[_Access]:
    """Return the loads and stores of a kernel in the order of its text."""
    listed, sources = list(_in_order(function.operations, 0)), sources_of(function.operations)
    made = {r: op for op, _ in listed for r in op.results}
    for place, (op, loop) in enumerate(listed):
        if op.name in (*LOADS, *STORES):
            roots = roots_of(op.operands[0], sources)
            yield _Access(op, place, loop, _offsets(op.operands[0], made, function), roots)


def _offsets(name: str, made: Mapping[str, Op], function: Function) -> tuple[str, ...]:
    """Return the names of all integers that a pointer adds to a parameter; none where the pointer is another one."""
    offsets = list[str]()
    while name not in function.parameters:
        op = made.get(name)
        if op is None or op.name not in ("tt.addptr", "tt.splat", "tt.broadcast"):
            return ()
        name = op.operands[0]
        offsets += op.operands[1:]
    return tuple(offsets)


def _in_order(operations: Sequence[Op], loop: int) -> Iterator[tuple[Op, int]]:
    """Return operations with those inside of them, each with the number of its outermost loop."""
    for i, op in enumerate(operations, 1):
        yield op, loop
        inner = loop or (i if op.name in ("scf.for", "scf.while") else 0)
        yield from _in_order([*op.body, *op.otherwise], inner)


def _overlap(a: Argument, b: Argument) -> bool:
    """Return whether two arguments have elements in common; of elements of unlike sizes, whether their ranges have."""
    (low, high), (first, last) = _range(a), _range(b)
    if a.storage != b.storage or min(high, last) <= max(low, first):
        return False
    if _bytes(a) != _bytes(b):
        return True
    start = min(low, first) // _bytes(a)
    is_one = np.zeros(max(high, last) // _bytes(a) - start, np.bool_)
    _part(is_one, a, start)[...] = True
    return bool(_part(is_one, b, start).any())


def _part(
    whole: np.ndarray[tuple[int], np.dtype[np.bool_]], x: Argument, start: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return np.lib.stride_tricks.as_strided(whole[x.offset - start :], x.shape, x.strides)


def _bytes(x: Argument) -> int:
    return INTEGERS[x.fmt] if x.is_integer else -(-get_format(x.fmt).bits // 8)


def _range(x: Argument) -> tuple[int, int]:
    """Return the first byte of an argument in its storage, and the one behind its last; the same without elements."""
    if 0 in x.shape:
        return 0, 0
    ends = [(n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)]
    low, high = (x.offset + sum(how(0, e) for e in ends) for how in (min, max))
    return low * _bytes(x), (high + 1) * _bytes(x)
