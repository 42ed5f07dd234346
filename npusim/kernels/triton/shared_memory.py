"""Arguments of a recorded call that are parts of one memory: a load of a tensor must have its values before
the launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.errors import ProgramError, SpecError
from npusim.formats import get_format
from npusim.kernels.triton.addresses import root_of
from npusim.kernels.triton.calls import INTEGERS, Argument
from npusim.kernels.triton.integers import bits_of
from npusim.kernels.triton.kernel_draft import Stored
from npusim.kernels.triton.loads_and_stores import are_alike
from npusim.kernels.triton.results_apart import LOADS, STORES, roots_of, sources_of
from npusim.kernels.triton.tensor_axes import GatheredView, IntegerTensor, View
from npusim.kernels.triton.ttir_text import FORMATS, Function, Line, Op, makers, shape_of
from npusim.kernels.triton.values import MOST_ELEMENTS, Integers, Tensor, repeats

if TYPE_CHECKING:
    from npusim.kernels.triton.calls import Call
    from npusim.kernels.triton.kernel_draft import Load
    from npusim.kernels.triton.reader import Reader

#: Number of elements whose addresses are examined at once.
_AT_ONCE = 1 << 22


class _Access(NamedTuple):
    """A load or store: its place in the text, its outermost loop (0 outside of loops), and the names of its offsets.

    ``offsets``: all values that are added to the parameter; an empty list if they are not known.
    """

    op: Op
    place: int
    loop: int
    offsets: tuple[str, ...]
    parameters: set[str]


def check_shared(function: Function, call: Call) -> None:
    """Raise `SpecError` for two arguments with elements in common if a launch loads one after a store to the other, or
    stores to both.
    """
    tensors = {n: x for n, x in call.arguments.items() if isinstance(x, Argument)}
    shared = [(a, b) for a, b in permutations(tensors, 2) if _overlap(tensors[a], tensors[b])]
    shared = [(a, b) for a, b in shared if root_of(a) != root_of(b)]  # the readers examine their elements
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
                    raise _refused(x.op, f"{other} is loaded after a store to {stored}")
                if x.op.name in STORES:
                    raise _refused(x.op, f"the kernel stores to {other} and to {stored}")


def _refused(op: Op, why: str) -> SpecError:
    return SpecError(f"{op.line}: {why}, and both share one piece of memory; pass a copy of one to the kernel")


def _accesses(function: Function) -> Iterator[_Access]:
    """Return the loads and stores of a kernel in the order of its text."""
    listed, sources = list(_in_order(function.operations, 0)), sources_of(function.operations)
    result = makers(op for op, _ in listed)
    for place, (op, loop) in enumerate(listed):
        if op.name in (*LOADS, *STORES):
            roots = roots_of(op.operands[0], sources)
            yield _Access(op, place, loop, _offsets(op.operands[0], result, function), roots)


def _offsets(name: str, made: Mapping[str, Op], function: Function) -> tuple[str, ...]:
    """Return the names of all integers that a pointer adds to a parameter; none if the pointer has another form."""
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
    """Return whether two arguments have elements in common; for elements of different sizes, whether their ranges
    do.
    """
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
    """Return the first byte of an argument in its storage, and the byte after its last; both are equal if the argument
    has no elements.
    """
    if 0 in x.shape:
        return 0, 0
    ends = [(n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)]
    low, high = (x.offset + sum(how(0, e) for e in ends) for how in (min, max))
    return low * _bytes(x), (high + 1) * _bytes(x)


def check_programs(readers: Sequence[Reader]) -> None:
    """Raise `ProgramError` for an element that one program stores and another one accesses in free order: a load by
    another argument's name, or an access by a program of another kind.

    ``readers``: the readers of one launch.  If a load by another name has too many elements to examine, there is a
    note; an access by another kind of programs is refused.
    """
    stores = [(r, x) for r in readers for x in r.stored]
    loads = ((r, x) for r in readers for x in r.loads.values())
    for reader, x in ((r, x) for r, x in loads if not _root(r, x.of).is_workspace):  # loads of an earlier launch
        for of, stored in stores:
            is_other_part = x.of != stored.of and _is_cut(reader, x.of) and _is_cut(of, stored.of)
            if reader is not of or _root(reader, x.of).name != _root(of, stored.of).name or is_other_part:
                _check_pair(reader, x, of, stored)
    for (reader, x), (of, stored) in combinations(stores, 2):
        if reader is not of or _is_other_format(reader, x, of, stored):
            _check_pair(of, stored, reader, x)
    for reader, (name, line) in ((r, of) for r in readers for of in r.looked.items()):
        for of, stored in stores:
            if _memory(reader, name) == _memory(of, stored.of):
                _check_looked(reader, name, line, of, stored)


def _is_other_format(reader: Reader, x: Load, of: Reader, stored: Load) -> bool:
    """Return whether two accesses are of one argument's memory in two formats."""
    names = [_root(r, y.of).name for r, y in ((reader, x), (of, stored))]
    return names[0] != names[1] and root_of(names[0]) == root_of(names[1])


def _check_looked(reader: Reader, name: str, line: Line, of: Reader, stored: Load) -> None:
    """Raise `ProgramError` if a program loads integers that another one stores; such integers decide addresses or
    results.

    A program's store comes after its loads, because programs of one kind are read in their order.
    """
    looked, parts = reader.looked_at.get(name), _bits(of, stored) // (width := _bits_of(reader, name))
    are_many = any(len(np.unique(r.ids, axis=0)) < len(r.ids) for r in (reader, of))  # the iterations of programs
    why = f"{name}: some programs load these integers, and others store to them at {stored.line}"
    if looked is None or are_many or parts != 1:
        raise ProgramError(f"{line}: {why}; pass a copy to the kernel")
    written = [np.concatenate(x) for x in zip(*_addresses(of, stored, width), strict=True)]
    order = np.argsort(written[1], kind="stable")
    owner, stored_at = written[0][order], written[1][order] - _root_offset(reader, name)
    for each in looked if len(stored_at) else ():
        found = np.minimum(np.searchsorted(stored_at, each.places), len(stored_at) - 1)
        is_stored = (each.places >= 0) & (stored_at[found] == each.places)
        if np.any(is_stored & np.any(of.ids[owner[found]] != each.ids[:, None], axis=2)):
            raise ProgramError(f"{each.line}: {why}; pass a copy to the kernel")


def are_elements_own(reader: Reader, stored: Load, load: Load) -> bool:
    """Return whether no program loads an element that another program stores to, according to each element's address.

    False if there are too many addresses to examine.
    """
    if any(len(reader.ids) * x.pointer.base.shape[1] * prod(x.pointer.shape) > MOST_ELEMENTS for x in (stored, load)):
        return False
    width = _bits(reader, stored)
    written = [np.concatenate(x) for x in zip(*_addresses(reader, stored, width), strict=True)]
    order = np.argsort(written[1], kind="stable")
    owner, stored_at = written[0][order], written[1][order]
    for program, place in _addresses(reader, load, width) if len(stored_at) else ():
        found = np.minimum(np.searchsorted(stored_at, place), len(stored_at) - 1)
        if np.any((stored_at[found] == place) & (owner[found] != program)):
            return False
    return not repeats(stored_at)


def _is_cut(reader: Reader, of: str) -> bool:
    """Return whether a tensor of a reader is a part of an argument that has only some indices of an axis."""
    view = reader.arguments[of]
    return isinstance(view, View) and view.cut is not None


def _root(reader: Reader, of: str) -> Tensor:
    """Return the argument to which a tensor of a reader belongs, completely or as a part."""
    root: Tensor = reader.arguments[of.partition(".")[0]]
    return root


def _memory(reader: Reader, of: str) -> int | str:
    """Return the number of the memory that contains an argument; the parameter's name if the memory contains
    no other.
    """
    root = _root(reader, of)
    return root.storage if isinstance(root, View | IntegerTensor) and root.storage >= 0 else of.partition(".")[0]


def _is_same(reader: Reader, x: Load, of: Reader, stored: Load) -> bool:
    """Return whether each program loads the elements that it stores."""
    is_like = np.array_equal(reader.ids, of.ids) and all(
        (_offset(r, y), _bits(r, y), y.pointer.steps, y.pointer.shape)
        == (_offset(reader, x), _bits(reader, x), x.pointer.steps, x.pointer.shape)
        and not isinstance(r.arguments[y.of], GatheredView)
        for r, y in ((reader, x), (of, stored))
    )
    return is_like and all(map(are_alike, (x.pointer.base, *x.left), (stored.pointer.base, *stored.left)))


def _check_pair(reader: Reader, x: Load, of: Reader, stored: Load) -> None:
    """Raise `ProgramError` if a program accesses elements that another one stores; if two stores to one argument are
    read as separate kernels, also raise it if one program stores an element twice.
    """
    is_twice = isinstance(x, Stored) and reader is not of and _root(reader, x.of).name == _root(of, stored.of).name
    is_twice |= _is_other_format(reader, x, of, stored)
    if _memory(reader, x.of) != _memory(of, stored.of) or (not is_twice and _is_same(reader, x, of, stored)):
        return
    accesses = (reader, x), (of, stored)
    width = gcd(*(_bits(r, y) for r, y in accesses))
    if not _are_near(*(_ends(r, y, width) for r, y in accesses)):
        return
    count = sum(len(r.ids) * y.pointer.base.shape[1] * prod(y.pointer.shape) for r, y in accesses)
    names = [y.of.partition(".")[0] for _, y in accesses]
    where = f"{x.line}: " + (f"{names[0]}:" if names[0] == names[1] else f"{names[0]} and {names[1]} share memory, and")
    does, comes = "loads", "the order of the two is undefined; pass a copy to the kernel"
    if isinstance(x, Stored):
        does, comes = "stores to", "the last of the two is undefined; let only one program store an element"
    if count > MOST_ELEMENTS:
        why = (
            f"npusim does not check whether a program {does} an element that another program stores to at {stored.line}"
        )
        if reader is not of or is_twice:
            raise ProgramError(f"{where} programs take different branches, and {why}, in {count:,} elements")
        reader.notes.append(f"{where} {why}, in {count:,} elements")
        return
    written = [np.concatenate(parts) for parts in zip(*_addresses(of, stored, width), strict=True)]
    order = np.argsort(written[1], kind="stable")
    owner, at = written[0][order], written[1][order]
    for program, place in _addresses(reader, x, width):
        if not len(at):
            return
        found = np.minimum(np.searchsorted(at, place), len(at) - 1)
        is_others = at[found] == place
        is_others &= is_twice | np.any(of.ids[owner[found]] != reader.ids[program], axis=1)
        if np.any(is_others):
            i = int(np.argmax(is_others))
            own, other = reader.program(int(program[i])), of.program(int(owner[found[i]]))
            raise ProgramError(f"{where} {own} {does} an element that {other} stores to at {stored.line}: {comes}")


def _bits(reader: Reader, x: Load) -> int:
    """Return the number of bits of an element in the memory."""
    return _bits_of(reader, x.of)


def _bits_of(reader: Reader, of: str) -> int:
    """Return the bits of an element of a tensor in the memory."""
    kind = shape_of(reader.function.parameters[of.partition(".")[0]])[1]
    return get_format(FORMATS[kind]).bits if kind in FORMATS else max(8, bits_of(kind))


def _offset(reader: Reader, x: Load) -> int:
    """Return the first element of an access's argument in the memory."""
    return _root_offset(reader, x.of)


def _root_offset(reader: Reader, of: str) -> int:
    """Return the first element of a tensor's argument in the memory."""
    root = _root(reader, of)
    return root.offset if isinstance(root, View | IntegerTensor) else 0


def _are_near(a: tuple[Integers, Integers], b: tuple[Integers, Integers]) -> bool:
    """Return whether a range of one list overlaps a range of another; ranges are given by their first and
    last places.
    """
    if not a[0].size or not b[0].size:
        return False
    order = np.argsort(b[0])
    first, last = b[0][order], np.maximum.accumulate(b[1][order])
    # the last range that begins before the end of the other range
    before = np.searchsorted(first, a[1], side="right") - 1
    return bool(np.any((before >= 0) & (last[before] >= a[0])))


def _ends(reader: Reader, x: Load, width: int) -> tuple[Integers, Integers]:
    """Return the first and the last place, in units of ``width`` bits, of each block of an access."""
    if isinstance(reader.arguments[x.of], GatheredView):
        return np.zeros(1, np.int64), np.full(1, np.iinfo(np.int64).max)
    times = x.pointer.base.shape[1]
    low = high = np.broadcast_to(x.pointer.base, (len(reader.ids), times)) + _offset(reader, x)
    used = np.broadcast_to(_is_visited(reader, x, times), low.shape)
    for n, step, left in zip(x.pointer.shape, x.pointer.steps, x.left, strict=True):
        end = step * (np.minimum(n, left) - 1)
        low, high, used = low + np.minimum(end, 0), high + np.maximum(end, 0), used & (left > 0)
    parts = _bits(reader, x) // width
    return low[used] * parts, high[used] * parts + parts - 1


def _addresses(reader: Reader, x: Load, width: int) -> Iterator[tuple[Integers, Integers]]:
    """Yield program and place, in units of ``width`` bits of the memory, of the elements of an access."""
    shape, offset = x.pointer.shape, _offset(reader, x)
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
        at, parts = _in_memory(reader.arguments[x.of], places[used], offset), _bits(reader, x) // width
        of_each, at = of_each[at >= 0], at[at >= 0]
        yield np.repeat(of_each, parts), (at[:, None] * parts + np.arange(parts)).reshape(-1)


def _along(axis: int, n: int, shape: tuple[int, ...]) -> Integers:
    """Return the index along an axis, (1, 1, *axes)."""
    return np.arange(n).reshape(1, 1, *(n if i == axis else 1 for i in range(len(shape))))


def _in_memory(tensor: Tensor, places: Integers, offset: int) -> Integers:
    """Return addresses in the memory, in elements; -1 for elements that a list of rows does not have."""
    if not isinstance(tensor, GatheredView):
        return places + offset
    first = tensor.offsets(places)
    return np.where(first < 0, -1, first + offset)


def _is_visited(reader: Reader, x: Load, times: int) -> Any:
    """Return the iterations of the programs in which an access occurs; all if its loop is not known."""
    counts = [np.arange(w.most)[None] < w.counts for w in reader.walks]
    both = np.concatenate(counts, 1) if counts else np.ones((1, 1), bool)
    own = counts[x.walk - 1] if 0 < x.walk <= len(counts) else both
    return next((c for c in (own, both) if times > 1 and c.shape[1] == times), np.ones((1, times), bool))
