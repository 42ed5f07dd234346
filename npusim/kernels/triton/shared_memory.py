"""Arguments of a recorded call that are parts of one memory: each tensor is read with the values before the launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.errors import ProgramError, SpecError
from npusim.formats import get_format
from npusim.kernels.triton.calls import INTEGERS, Argument
from npusim.kernels.triton.loads_and_stores import are_alike
from npusim.kernels.triton.results_apart import LOADS, STORES, roots_of, sources_of
from npusim.kernels.triton.tensor_axes import GatheredView, View
from npusim.kernels.triton.ttir_text import Function, Op
from npusim.kernels.triton.values import MOST_ELEMENTS, Integers

if TYPE_CHECKING:
    from npusim.kernels.triton.calls import Call
    from npusim.kernels.triton.kernel_draft import Load
    from npusim.kernels.triton.reader import Reader

#: Elements whose addresses are looked at in one go.
_AT_ONCE = 1 << 22


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


def check_programs(readers: Sequence[Reader]) -> None:
    """Raise `ProgramError` for an element that one program loads and another stores to by another argument's name.

    Which of them comes first is free.  ``readers``: those of one launch.  A launch with too many such elements to look
    at has a note.
    """
    stores = [(r, x) for r in readers for x in r.stored]
    for reader, x in ((r, x) for r in readers for x in r.loads.values()):
        view = reader.arguments[x.of]
        for of, stored in stores:
            other = of.arguments[stored.of]
            if not isinstance(view, View) or not isinstance(other, View) or view.parameter == other.parameter:
                continue
            if _memory(view).storage != _memory(other).storage or _memory(view).storage < 0:
                continue
            if reader is not of or not _is_same(x, stored, view, other):
                _check_pair(reader, x, of, stored)


def _memory(view: View) -> View:
    """Return the view whose offset its addresses count from."""
    return view.source if isinstance(view, GatheredView) and view.source is not None else view


def _is_same(x: Load, stored: Load, view: View, other: View) -> bool:
    """Return whether each program loads the elements that it stores to."""
    is_like = (view.offset, view.fmt, x.pointer.steps, x.pointer.shape) == (
        *(other.offset, other.fmt, stored.pointer.steps, stored.pointer.shape),
    )
    return is_like and all(map(are_alike, (x.pointer.base, *x.left), (stored.pointer.base, *stored.left)))


def _check_pair(reader: Reader, x: Load, of: Reader, stored: Load) -> None:
    """Raise `ProgramError` where a program loads what another one stores to."""
    accesses = (reader, x), (of, stored)
    count = sum(len(r.ids) * y.pointer.base.shape[1] * prod(y.pointer.shape) for r, y in accesses)
    names = f"{x.of.partition('.')[0]} and {stored.of.partition('.')[0]}"
    if count > MOST_ELEMENTS:
        why = "one memory: whether a program loads what another one stores to is not looked at"
        reader.notes.append(f"{x.line}: {names} are {why}, in {count:,} elements")
        return
    width = gcd(*(_bits(r.arguments[y.of].fmt) for r, y in accesses))
    written = [np.concatenate(parts) for parts in zip(*_addresses(of, stored, width), strict=True)]
    order = np.argsort(written[1], kind="stable")
    owner, at = written[0][order], written[1][order]
    for program, place in _addresses(reader, x, width):
        if not len(at):
            return
        found = np.minimum(np.searchsorted(at, place), len(at) - 1)
        is_others = (at[found] == place) & np.any(of.ids[owner[found]] != reader.ids[program], axis=1)
        if np.any(is_others):
            i = int(np.argmax(is_others))
            own, other = reader.program(int(program[i])), of.program(int(owner[found[i]]))
            does = f"{own} loads an element that {other} stores to at {stored.line}"
            raise ProgramError(
                f"{x.line}: {names} are one memory, and {does}: which comes first is free; give the kernel a copy"
            )


def _bits(fmt: str) -> int:
    return get_format(fmt).bits


def _addresses(reader: Reader, x: Load, width: int) -> Iterator[tuple[Integers, Integers]]:
    """Yield program and place, in units of ``width`` bits of the memory, of the elements of an access."""
    view, shape = reader.arguments[x.of], x.pointer.shape
    times = x.pointer.base.shape[1]
    steps = np.zeros((1, 1, *shape), np.int64)
    for i, (n, step) in enumerate(zip(shape, x.pointer.steps, strict=True)):
        steps = steps + step * _along(i, n, shape)
    each = max(1, _AT_ONCE // (times * prod(shape)))
    for first in range(0, len(reader.ids), each):
        programs = np.arange(first, min(first + each, len(reader.ids)))
        base = np.broadcast_to(x.pointer.base, (len(reader.ids), times))[programs]
        places = base.reshape(*base.shape, *(1 for _ in shape)) + steps
        is_used = np.broadcast_to(_is_visited(reader, x, times), (len(reader.ids), times))[programs]
        used = is_used.reshape(*is_used.shape, *(1 for _ in shape))
        for i, (n, left) in enumerate(zip(shape, x.left, strict=True)):
            most = np.broadcast_to(left, (len(reader.ids), left.shape[1]))[programs]
            used = used & (_along(i, n, shape) < most.reshape(*most.shape, *(1 for _ in shape)))
        used = np.broadcast_to(used, places.shape)
        of_each = np.broadcast_to(programs.reshape(-1, *(1 for _ in places.shape[1:])), places.shape)[used]
        at, parts = _in_memory(view, places[used]), _bits(view.fmt) // width
        of_each, at = of_each[at >= 0], at[at >= 0]
        yield np.repeat(of_each, parts), (at[:, None] * parts + np.arange(parts)).reshape(-1)


def _along(axis: int, n: int, shape: tuple[int, ...]) -> Integers:
    """Return the index along an axis, (1, 1, *axes)."""
    return np.arange(n).reshape(1, 1, *(n if i == axis else 1 for i in range(len(shape))))


def _in_memory(view: View, places: Integers) -> Integers:
    """Return addresses in the memory, in elements; -1 of what a list of rows does not have."""
    if not isinstance(view, GatheredView):
        return places + view.offset
    row, rest = places // view.by_row, places % view.by_row
    known = np.array(view.listed, np.int64)
    row = np.where((row >= 0) & (row < len(known)), row, -1)
    first = np.where(row < 0, -1, known[row])
    return np.where(first < 0, -1, first + rest + _memory(view).offset)


def _is_visited(reader: Reader, x: Load, times: int) -> Any:
    """Return which iterations of the programs an access is in; all where its loop is not known."""
    counts = [np.arange(w.most)[None] < w.counts for w in reader.walks]
    both = np.concatenate(counts, 1) if counts else np.ones((1, 1), bool)
    own = counts[x.walk - 1] if 0 < x.walk <= len(counts) else both
    return next((c for c in (own, both) if times > 1 and c.shape[1] == times), np.ones((1, times), bool))
