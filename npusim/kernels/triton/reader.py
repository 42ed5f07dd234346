"""From TTIR to a kernel of tiles: integers and pointers are evaluated; operations on floats are written in the language
of kernels.

The result is source text in that language with the user's names. Each statement has the line of the user's kernel, so
that faults are reported at this line.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from npusim.errors import ProgramError
from npusim.kernels.triton.added_parts import ONLY, part_of
from npusim.kernels.triton.arithmetic import BINARY, DOWN_ROWS, UNARY, hidden_value
from npusim.kernels.triton.blocks_as_rows import flattened, trimmed, with_blocks_as_rows
from npusim.kernels.triton.element_behind import with_elements_chosen
from npusim.kernels.triton.element_wise import elements_in
from npusim.kernels.triton.flat_indices import FlatBlock, flat_blocks, on_rows_and_columns
from npusim.kernels.triton.grouped_blocks import with_groups
from npusim.kernels.triton.integers import bits_of, within
from npusim.kernels.triton.kernel_draft import (
    Choices,
    KnownBlock,
    LaneReading,
    Load,
    NoStoreError,
    Stored,
    UnsupportedError,
    Walk,
    plain_name,
)
from npusim.kernels.triton.loaded_again import with_loads_again
from npusim.kernels.triton.loads_and_stores import are_alike
from npusim.kernels.triton.masked_sums import with_masked_terms
from npusim.kernels.triton.neighbours_apart import half_of, with_neighbours_apart
from npusim.kernels.triton.passed_states import with_states_passed
from npusim.kernels.triton.peeled_loops import with_loops_joined, with_loops_turned
from npusim.kernels.triton.pulled_lanes import is_of_lanes
from npusim.kernels.triton.rolled_rows import rolled, with_scale_before_maximum, with_scratch_kept
from npusim.kernels.triton.shared_memory import are_elements_own
from npusim.kernels.triton.tensor_axes import Access, GatheredView, View
from npusim.kernels.triton.third_axis import without_axis_of_one, without_third_axis
from npusim.kernels.triton.ttir_text import EXACT_BITS, FORMATS, TYPES, WHOLE, Function, Line, Op, refusing, shape_of
from npusim.kernels.triton.turned_blocks import WAYS, reduces_down, with_axes_exchanged, with_turned_blocks
from npusim.kernels.triton.values import (
    RELATIONS,
    ROWS,
    Affine,
    Booleans,
    Condition,
    Elements,
    Floats,
    HeldState,
    Integers,
    Known,
    Listed,
    Number,
    answers,
    lesser,
    reshaped,
)
from npusim.kernels.triton.whole_lanes import WholeLanes

#: Operations that are refused, and the advice for each.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "tt.atomic": ONLY,
        "tt.cat": (
            "tl.cat is not supported, because the order of its elements is undefined; store both blocks, or "
            "use tl.join and tl.reshape"
        ),
        "tt.elementwise_inline_asm": "inline assembly is not supported; write it in Triton's language",
        "tt.int_to_ptr": (
            "a pointer from integers is supported in recorded calls, if they are addresses of 64 bits of one table, or "
            "one argument, which are used for pointers only, and its pointers are to one type of elements"
        ),
        "tt.gather": "tl.gather by loaded indices is not supported; give tables of pages as data of the problem "
        "(--page)",
    }
)
#: Loops, whose operands also name values of their regions.
_LOOPS = ("scf.for", "scf.while")
#: Elementwise operations: their operands may be blocks that are loaded transposed.
_TURNING = (*BINARY, *UNARY, "arith.truncf", "arith.extf", "tt.fp_to_fp", "arith.select")
#: Pointers to integers whose loads decide addresses.
_INTEGERS = re.compile(r"ptr<i(?:32|64)>")
_IGNORED = ("llvm.intr.assume", "tt.assert", "gpu.barrier", "tt.return", "scf.yield", "scf.condition", "block")
#: Largest numbers of iterations of one program, and of all programs together: each iteration has evaluated addresses of
#: 8 bytes.
MOST_EACH, MOST_TIMES = 1 << 18, 1 << 24
#: Largest number of iterations of a loop that only computes integers: a search among the sequences of a batch has a
#: few.
MOST_SEARCHED = 4096
#: Largest number of iterations of a loop that is read as one block, with products after it.
MOST_UNROLLED = 4
#: Largest number of iterations of a loop that a way of reading writes one after another.
MOST_WRITTEN_OUT = 8
#: The note on blocks that are read as rows.
_AS_ROWS = "npusim treats a block that is summed along both axes as one row of elements"
#: The note on blocks that an operation combines with themselves.
_AGAIN = "a block is combined with itself along its other axis: npusim loads it twice and times both loads"
#: How often a kernel is read again if a later access of a view has other rows and columns than an earlier one.
MOST_READINGS = 3


class UnlikeLoopsError(ProgramError):
    """Raised if a loop differs from the loop before it, for example because one contracts where the other has a mask in
    between.
    """


def read_launch(function: Function, arguments: Mapping[str, Any], grid: tuple[int, ...], choices: Choices) -> Reader:
    """Return a kernel at a launch; loops that differ only in a mask do not contract, and other loops are separate.

    A block of flat indices with quotients and remainders becomes rows and columns, or otherwise several smaller blocks.
    """
    if is_of_lanes(function):
        return _read_in_ways(function, arguments, grid, choices)
    fault: ProgramError | None = None
    function = without_axis_of_one(with_neighbours_apart(function) or function)
    if (grouped := with_groups(function)) is not None and not choices.way("lists_remainders"):
        function = grouped
    for block in flat_blocks(function, arguments):
        if choices.way("lists_remainders"):
            break
        try:
            reader = _read(on_rows_and_columns(function, block), arguments, grid, choices, block)
        except ProgramError as error:
            fault = fault or error
            continue
        if block.parts > 1:
            why = (
                f"npusim treats a block of {block.size} flat indices as {block.parts} blocks; the time is that "
                "of these blocks"
            )
            reader.notes.append(f"{function.name}: {why}")
        return reader
    for thinner, parts in without_third_axis(function):
        try:
            reader = _read(thinner, arguments, grid, choices)
        except ProgramError as error:
            fault = fault or error
            continue
        why = (
            f"npusim treats a block of three axes as {parts} programs with blocks of two axes; the time is that "
            "of these programs"
        )
        reader.notes.append(f"{function.name}: {why}")
        return reader
    if fault is not None:
        raise fault
    return _read_in_ways(function, arguments, grid, choices)


def _read_in_ways(function: Function, arguments: Mapping[str, Any], grid: tuple[int, ...], choices: Choices) -> Reader:
    """Return a kernel as it is, or else with second loads, with blocks or loops that do the same, or turned."""
    again = with_loads_again(function, arguments)
    if again is not None and choices.way("loads_again"):
        return _read_again(again, grid, choices)
    try:
        return _read(function, arguments, grid, choices)
    except ProgramError as error:
        fault = error
        if again is not None:
            try:
                return _read_again(again, grid, choices)
            except ProgramError as other:
                fault = other
        for changed, why in _with_loops_changed(function, arguments):
            try:
                reader = _read(changed, arguments, grid, choices)
            except ProgramError as other:
                fault = other if why == _AS_ROWS else fault
                continue
            reader.notes.append(f"{function.name}: {why}")
            return reader
        for way in WAYS[1:] if reduces_down(function) else ():
            try:
                return _read(function, arguments, grid, replace(choices, turns=way))
            except ProgramError as other:
                fault = other if DOWN_ROWS in str(fault) else fault
        raise fault from None


def _read_again(again: tuple[Function, dict[str, Any]], grid: tuple[int, ...], choices: Choices) -> Reader:
    """Return a kernel with second loads of blocks that are combined with themselves along the other axis."""
    function, arguments = again
    reader = _read(function, arguments, grid, choices)
    reader.notes.append(f"{function.name}: {_AGAIN}")
    return reader


def _with_loops_changed(function: Function, arguments: Mapping[str, Any]) -> Iterator[tuple[Function, str]]:
    """Yield a kernel with blocks or loops that do the same in another way, and the note on them."""
    if (rows := with_blocks_as_rows(function)) is not None:
        yield rows, _AS_ROWS
    joined = with_loops_joined(function, arguments)
    why = (
        "npusim merges loops over the tiles of one row, one of them masked, into one loop with the mask, and "
        "rounds all tiles as its code does; last bits differ where compiled code fuses other operations in the "
        "other loop"
    )
    if joined is not None:
        yield joined, why
    if (turned := with_loops_turned(joined or function, arguments)) is not None:
        how = "npusim runs a loop that stores independent tiles in the opposite order, as the loop before it"
        yield turned, f"{why}; {how}" if joined is not None else how


def _read(
    function: Function,
    arguments: Mapping[str, Any],
    grid: tuple[int, ...],
    choices: Choices,
    block: FlatBlock | None = None,
) -> Reader:
    function = with_elements_chosen(function)
    operations, scratch = with_scratch_kept(with_states_passed(function, arguments))
    function = function._replace(operations=with_masked_terms(rolled(operations)))
    function = with_turned_blocks(function, choices.turns) or function
    alike = function._replace(operations=with_scale_before_maximum(function.operations))
    ways: tuple[tuple[Function, dict[str, Any]], ...] = (
        (function, {}),
        (function, {"fuses": False}),
        (alike, {"fuses": False}),
        (function, {"is_apart": True}),
    )
    for given, how in ways:
        with suppress(UnlikeLoopsError):
            reader = Reader(given, arguments, grid, replace(choices, **how), block=block)
            for _ in range(MOST_READINGS + len(reader.states)):
                if not reader.is_misread and not reader.is_unsteady:
                    break
                unsteady = {**reader.hidden.unsteady, **reader.hidden.changed}
                reader = Reader(given, arguments, grid, replace(choices, **how), reader.accesses, block, unsteady)
            if reader.is_misread:
                raise ProgramError(f"{operations[0].line}: {function.name}: npusim swaps a tensor's rows and columns")
            break
    if "fuses" in how and choices.of_code("fuses"):
        why = "compiled code fuses multiplications and additions in the loop without a mask; here no loop does"
        reader.notes.append(f"{function.name}: {why}")
    if scratch:
        why = (
            "a tensor that a program stores and immediately loads again is scratch: it is not a result, and its "
            "accesses have no time"
        )
        reader.notes.append(f"{next(iter(scratch.values())).line}: {why}")
    if any(o.operands[:1] == ["row@"] for o in function.operations):
        reader.notes.append(
            f"{function.name}: sums over rows run from the first row to the last; compiled code may use another order"
        )
    return reader


class Reader(WholeLanes):
    """One kernel at one launch, read from its operations: control flow, and the choice of the method that reads an
    operation.
    """

    def __init__(
        self,
        function: Function,
        arguments: Mapping[str, Any],
        grid: tuple[int, ...],
        choices: Choices,
        accesses: Mapping[str, list[Access]] | None = None,
        block: FlatBlock | None = None,
        unsteady: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        super().__init__(function, arguments, grid, choices, unsteady)
        self.accesses |= {n: list(known) for n, known in (accesses or {}).items()}
        self._loops = [o for o in function.operations if o.name == "scf.for"]
        self._flat, self._part = block, cast("Affine | None", None)
        self._block_loop: Op | None = None  # loops whose iterations are programs
        self._all(function.operations)
        if choices.chooses_lanes and not self.hides_first_lanes:
            raise ProgramError(f"{function.name}: a mask may not hide lanes before the lanes that it keeps")
        self._check_uncut()
        self._check_unlike()
        self._check_accessed()
        if not self.stored:
            raise NoStoreError(f"{function.operations[-1].line}: {function.name} stores nothing")
        self._drop_states()
        self._drop_statements()
        self._drop_unread()
        if not self.loads and not self.seen:
            self._read_ones()
        self.stored.sort(key=lambda x: (not x.is_walked, -len(x.pointer.shape)))  # tiles come before vectors of rows
        if (walked := [x.after for x in self.stored if x.is_walked]) != sorted(walked):
            raise ProgramError(f"{self.stored[0].line}: a loop stores a vector before a tile; store the tile first")
        if all(x.is_one_row or len(x.axes) < 2 for x in self.stored):
            self._drop_rows()
        if self.goes_down and self.is_of_one_row:
            why = "a reduction along axis 0 is not supported in a kernel that stores one row"
            raise ProgramError(f"{self.goes_down[0][1]}: {why}; transpose the loaded block")
        if not self.is_of_one_row:
            self._with_numbers_as_rows()
        self._join_free()
        accessed = [x.pointer.of for x in self.stored] + [x.of for x in self.loads.values()]
        for x in self.stored:
            self._refuse_diagonal(x.value.axes, x.line)
            if accessed.count(x.pointer.of) > 1 and not self._is_in_place(x):
                others = {str(y.line) for y in (*self.stored, *self.loads.values()) if y.pointer.of == x.pointer.of}
                why = f"{x.pointer.of} is stored to and also accessed elsewhere; pass another tensor"
                raise ProgramError(f"{x.line}: {why}; it is accessed at {', '.join(sorted(others))}")
            for y in self.loads.values():
                is_one = y.of.partition(".")[0] == x.of.partition(".")[0]
                is_listed = is_one and isinstance(self.arguments[y.of], GatheredView)
                if is_listed and not (self._are_own(x, y) or are_elements_own(self, x, y)):
                    why = f"{x.pointer.of}: a program loads an element that another program may store to"
                    raise ProgramError(
                        f"{y.line}: {why}, at {x.line}: their order is undefined; pass a copy to the kernel"
                    )

    @property
    def is_of_one_row(self) -> bool:
        """Whether a program's blocks are one row, which has no axis of rows."""
        if len(stored := self.stored[0].value.axes) >= 2:
            return False
        blocks = [x.axes[x.dims.index(ROWS)] for x in self.loads.values() if len(x.axes) == 2]
        # A state of one row has no axis of rows; neither has a number that is stored.
        blocks += [axes[0] for _, axes, _ in self.states.values() if len(axes) == 2 and axes[0] is not None]
        return not any(self.root(axis) == self.root(stored[0]) for axis in blocks if stored)

    @property
    def placed_by_loads(self) -> frozenset[Line]:
        """Lines of loads in loops whose addresses are computed from integers that the loop loads."""
        lines = set[Line]()
        for loop in (o for op in self.function.operations for o in (op, *op.within()) if o.name == "scf.for"):
            places = set[str]()
            for op in loop.body:
                is_placed = bool(places & set(op.operands))
                if op.name != "tt.load":
                    places |= set(op.results if is_placed else ())
                elif _INTEGERS.search(op.text):
                    places |= set(op.results)
                elif is_placed:
                    lines.add(op.line)
        return frozenset(lines)

    def _drop_rows(self) -> None:
        """Read blocks of one row as the row: the index of the program is that of the row, and there is no axis
        of rows.
        """
        for x in (*self.stored, *self.loads.values()):
            if x.is_one_row:
                x.drop_rows()
        for stored in self.stored:
            stored.value = replace(stored.value, axes=stored.axes)

    def _read_ones(self) -> None:
        """Choose the first result's numbers by a mask that is always true, because a kernel of tiles needs at least one
        operand.
        """
        stored = self.stored[0]
        if stored.is_walked:
            why = "loads no block of a tensor; npusim needs at least one"
            raise ProgramError(f"{stored.line}: {self.function.name} {why}")
        name, value = self._unique("ones"), stored.value
        shape = (1,) * (len(stored.axes) - 1) + (stored.pointer.shape[-1:] or (1,))
        axes = (None,) * (len(stored.axes) - 1) + stored.axes[-1:]
        fmt = value.fmt if value.fmt in FORMATS else "f32"
        self.seen[name] = KnownBlock(Floats(name, axes, fmt), np.ones(shape, bool), stored.line)
        self.notes.append(
            f"{stored.line}: the kernel stores only constants; here it also loads a mask that is always true"
        )
        text = f"where(compare({name}, 0.0, 'une'), {self.text(value)}, {self.text(value)})"
        stored.value = replace(value, text=text)

    def _drop_unread(self) -> None:
        """Leave out loads and known blocks that no statement reads, as compiled code does.

        If no statement reads a load of a loop, one stays: it says which tiles the loop visits.
        """
        texts = [text for text, _ in (*self.lines, *(line for walk in self.walks for line in walk.lines))]
        texts += [self.text(x.value) for x in self.stored]
        texts += [start.text for start, _, _ in self.states.values()]
        words = {word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)}
        words |= {n for walk in self.walks for n in walk.masked}
        for walk in self.walks:
            walk.loads = [n for n in walk.loads if n in words] or walk.loads[:1]
        words |= {n for walk in self.walks for n in walk.loads}
        self.loads = {n: x for n, x in self.loads.items() if n in words}
        self.seen = {n: x for n, x in self.seen.items() if n in words}

    def _drop_states(self) -> None:
        """Leave out states of loops that only their own next value reads, as compiled code does."""
        result, live = dict[str, set[str]](), set[str]()
        for text, _ in (*self.lines, *(line for walk in self.walks for line in walk.lines)):
            if " = " not in text or text.startswith("yield "):
                live |= _words(text)
                continue
            for target, value in _assignments(text):
                result.setdefault(target, set()).update(_words(value))
        waiting = {word for x in self.stored for word in _words(self.text(x.value))}
        waiting |= live | {n for walk in self.walks for n in walk.masked}
        while waiting:
            live |= waiting
            waiting = {word for n in waiting for word in result.get(n, ())} - live
        if not (unread := self.states.keys() - live):
            return
        self.states = {n: x for n, x in self.states.items() if n not in unread}
        for walk in self.walks:
            walk.states = [n for n in walk.states if n not in unread]
            every = [(_kept(text, live), line) for text, line in walk.lines]
            walk.lines = [(text, line) for text, line in every if text]
        if len(self.walks) == 1 and not self.walks[0].states and not any(x.is_walked for x in self.stored):
            self.loads = {n: x for n, x in self.loads.items() if n not in self.walks[0].loads}
            self.walks = []

    def _drop_statements(self) -> None:
        """Leave out statements outside of loops whose value no other statement reads, such as a product that a sum
        contracts.
        """
        while True:
            lines = [*self.lines, *(line for walk in self.walks for line in walk.lines)]
            texts = [text for text, _ in lines] + [self.text(x.value) for x in self.stored]
            texts += [start.text for start, _, _ in self.states.values()]
            counts = Counter(word for text in texts for word in set(re.findall(r"[A-Za-z_]\w*", text)))
            unread = [i for i, (text, _) in enumerate(self.lines) if counts[text.partition(" = ")[0]] == 1]
            if not unread:
                return
            for walk in self.walks:
                walk.at -= sum(i < walk.at for i in unread)
            self.lines = [line for i, line in enumerate(self.lines) if i not in unread]

    def _join_free(self) -> None:
        """Join axes of stored blocks along which all elements are equal with axes of the first result; and axes of a
        block that has the sizes of this result but none of its axes.
        """
        first, *others = self.stored
        known = {self.root(a) for x in (first, *self.loads.values()) for a in x.axes if a is not None}
        known |= {self.root(a) for _, axes, _ in self.states.values() for a in axes if a is not None}
        sizes = {a: n for a, n in zip(first.axes, first.pointer.shape, strict=True) if a is not None}
        for x in others:
            for a, n in zip(x.axes, x.pointer.shape, strict=True):
                if a is not None and self.root(a) not in known:
                    self._join(next((b for b, size in sizes.items() if size == n), a), a)
            roots = [{self.root(a) for a in each.axes if a is not None} for each in (first, x)]
            is_like = x.pointer.shape == first.pointer.shape and x.walk == first.walk
            # of other tensors, element by element; lanes of a row, hidden ones too, are those of another row
            is_alone = len(first.axes) > 1 or bool(self.choices.way("lanes"))
            if is_like and is_alone and not roots[0] & roots[1]:
                for a, b in zip(first.axes, x.axes, strict=True):
                    self._join(a, b)

    @property
    def is_misread(self) -> bool:
        """Whether a later access identified other rows and columns of a recorded view than an earlier one."""
        views = [x for x in self.loads.values() if isinstance(self.arguments[x.of], View)]
        return any(self._dims_of(x.pointer, self.arguments[x.of]) != x.dims for x in views)

    @property
    def is_unsteady(self) -> bool:
        """Whether the reading relied on hidden lanes along an axis along which a state's hidden lanes change in its
        loop.
        """
        relied = set(map(self.root, self.hidden.relied))
        return any(relied.intersection(map(self.root, self.hidden.lanes[n])) for n in self.hidden.changed)

    def _all(self, operations: Sequence[Op]) -> None:
        """Read operations one after another; programs that return early are left out after their return."""
        rest = list(operations)
        while rest:
            op = rest.pop(0)
            if op.name == "block":
                continue
            if op.name != "cf.cond_br":
                self._do(op)
                continue
            names, blocks = re.findall(r"\^bb\d+", op.text), list[list[Op]]()
            for o in rest:
                blocks += [[]] if o.name == "block" else []
                blocks[-1].append(o)
            named = {b[0].text: b for b in blocks}
            returns = [n for n in names if [o.name for o in named[n][1:]] == ["tt.return"]]
            every, none = answers(self._condition(op, self.values[op.operands[0]]))
            if len(returns) != 1 and (np.all(every) or np.all(none)):
                rest = _continued(named, names[0] if np.all(every) else names[1])
                continue
            if np.any(~every & ~none) or every.shape[1] > 1:
                raise op.fail("the condition of a branch differs between elements of a block; use tl.where")
            if len(returns) != 1:
                raise self.unlike(
                    op, "a branch whose condition differs between programs may only be an early return", every
                )
            is_left = np.broadcast_to(every if returns[0] == names[0] else none, (len(self.ids), 1))[:, 0]
            self._return(op, is_left)
            rest = _continued(named, names[returns[0] == names[0]])

    def _return(self, op: Op, is_left: Booleans) -> None:
        """Continue without the programs that have ended."""
        if is_left.all():
            raise op.fail("every program returns early, so that the kernel stores nothing")
        if is_left.any() and self.stored:
            why = "some programs return, or skip a store, after an earlier store; use a mask for the store"
            raise self.unlike(op, why, is_left[:, None])
        if is_left.any():
            self.notes.append(f"{op.line}: {int(is_left.sum()):,} of {len(is_left):,} programs return early")
            self.returned += int(is_left.sum())
            self._keep(np.flatnonzero(~is_left))

    def _is_in_place(self, x: Stored) -> bool:
        """Return whether a program stores once, and after its loads, which are of the same elements.

        In a loop: each tile is stored where it was loaded, and no later loop loads such a tile; loads before that loop
        are of elements between the first and the last element that the program itself stores.
        """
        loads = [y for y in self.loads.values() if y.of == x.pointer.of]
        later = {n for walk in self.walks[x.walk :] for n in walk.loads} if x.is_walked else set[str]()

        def is_at(y: Load) -> bool:
            """Return whether a load has the addresses of the store, tile by tile."""
            is_like = (y.is_walked, y.pointer.steps) == (x.is_walked, x.pointer.steps)
            return is_like and all(map(are_alike, (y.pointer.base, *y.left), (x.pointer.base, *x.left)))

        is_once = [y.pointer.of for y in self.stored].count(x.pointer.of) == 1
        return is_once and all(
            y.after <= x.after and y.name not in later and (is_at(y) or (y.walk < x.walk and self._are_own(x, y)))
            for y in loads
        )

    def _are_own(self, stored: Stored, load: Load) -> bool:
        """Return whether each program loads only between elements that it stores, where no other program stores."""
        low, high = self._reach(stored)
        first, last = self._reach(load)
        order = np.argsort(low, kind="stable")
        is_apart = np.all(low[order][1:] > high[order][:-1])
        return bool(is_apart and np.all((first > last) | ((first >= low) & (last <= high))))

    def _reach(self, x: Load) -> tuple[Integers, Integers]:
        """Return the first and the last element that each program accesses, swapped if it accesses none."""
        times, of_walk = x.pointer.base.shape[1], self.walks[x.walk - 1] if x.walk else None
        visited = np.ones((len(self.ids), times), bool)
        if of_walk is not None and times > 1:
            visited = np.broadcast_to(np.arange(times)[None] < of_walk.counts, visited.shape)
        view, low = self.arguments[x.of], x.pointer.base
        ends, sides = np.iinfo(np.int64), list(zip(x.pointer.steps, x.pointer.shape, x.left, strict=True))
        high = low
        if isinstance(view, GatheredView):
            by_list = next((side for side in sides if abs(side[0]) >= view.by_row), (0, 1, np.ones((1, 1), np.int64)))
            sides = [side for side in sides if side is not by_list]
            lanes = np.arange(by_list[1])
            at = view.offsets(low[..., None] + by_list[0] * lanes)
            has = (at >= 0) & (lanes < by_list[2][..., None])
            visited = visited & has.any(2)
            low, high = np.where(has, at, ends.max).min(2), np.where(has, at, ends.min).max(2)
            low, high = np.where(visited, low, 0), np.where(visited, high, 0)
        for step, n, left in sides:
            most = np.minimum(left, n)
            visited, end = visited & (most > 0), step * (most - 1)
            low, high = low + np.minimum(0, end), high + np.maximum(0, end)
        return np.where(visited, low, ends.max).min(1), np.where(visited, high, ends.min).max(1)

    def _do(self, op: Op) -> None:
        self.line = op.line
        with refusing(op.line, op.name):
            self._operation(op)

    def _operation(self, op: Op) -> None:
        family, _, name = op.name.partition(".")
        if op.name in _IGNORED:
            return
        self._executed.add(id(op))
        for refused, why in _REFUSED.items():
            if op.name.startswith(refused):
                raise UnsupportedError(str(op.fail(why)))
        operands = [] if op.name in _LOOPS else [self.values[n] for n in op.operands]
        method = getattr(self, f"_{family}_{name}", None)
        if op.name in _TURNING and any(map(_is_turned, operands)) and all(map(_can_turn, operands)):
            self._on_turned(op, operands)
        elif op.name in BINARY:
            self._binary(op, BINARY[op.name])
        elif op.name in UNARY:
            self._function(op, operands[0], op.name)
        elif op.name == "ttg.convert_layout":
            self._set(op, operands[0])
        elif method is not None:
            method(op, *operands)
        elif family == "arith" and len(operands) == 2:
            self._integer(op, *operands)
        else:
            raise op.fail(f"{op.name} is not supported: {op.text[:80]}")

    def _on_turned(self, op: Op, operands: Sequence[Known]) -> None:
        """Read an elementwise operation of blocks that are loaded transposed, on the blocks as they are loaded."""
        names = [f"{n}@turned" for n in op.operands]
        self.values |= {n: _transposed(x) for n, x in zip(names, operands, strict=True)}
        self._operation(replace(with_axes_exchanged(op), operands=names))
        for n in names:
            self.values.pop(n, None)
        self._set(op, _transposed(self.values[op.results[0]]))

    def _scf_if(self, op: Op, condition: Known) -> None:
        every, none = answers(self._condition(op, condition))
        if np.all(every) or np.all(none):
            self._branch(op, op.body if np.all(every) else op.otherwise)
            return
        if np.any(~every & ~none):
            raise op.fail("the condition of an if differs between elements of a block; use tl.where")
        has_effects = any(o.name in ("tt.store", "tt.descriptor_store", "scf.for") for o in op.within())
        if self._walk is not None and op.results and not has_effects and self._is_skipped_else(op):
            before, self._only = self._only, every if self._only is None else self._only & every
            self.cuts.add(None)
            self._walk.done = np.asarray(self._only)
            self._refuse_one_left(op, self._walk)
            self._branch(op, op.body)
            self._only = before
        elif not op.results and not op.otherwise and self._is_last(op) and every.shape[1] == 1 and self._walk is None:
            self._return(op, ~np.broadcast_to(every, (len(self.ids), 1))[:, 0])
            self._branch(op, op.body)
        elif op.results and op.otherwise and not has_effects and self._is_as_later(op, every):
            self.notes.append(
                f"{op.line}: the branch of the first tile equals the other one of the loop's start values"
            )
            self._branch(op, op.otherwise)
        elif op.results and op.otherwise and not has_effects:
            self._chosen_by_program(op, every)
        elif not op.results and not op.otherwise and self._stores_lanes_alone([*op.within()]):
            with self._taken_where(op, every):
                self._branch(op, op.body)
        else:
            why = "an if whose condition differs between programs may only be an early return, a skipped tile, or a"
            raise self.unlike(op, f"{why} choice of integers; use the grid or tl.where instead", every)

    def _is_as_later(self, op: Op, every: Booleans) -> bool:
        """Return whether an if is true only in the first iteration of its loop, where its branches are equal."""
        if self._walk is None or every.shape[1] == 1 or not every[:, 0].all() or every[:, 1:].any():
            return False
        first = self._first_tile(op, op.operands[0])
        pairs = zip(op.body[-1].operands, op.otherwise[-1].operands, strict=True)
        return all(first.are_equal(one, other) for one, other in pairs)

    def _npusim_flat_range(self, op: Op) -> None:
        """Read flat indices as rows and columns: each part of a program's block becomes the block of a program."""
        assert self._flat is not None
        _, rows, columns, parts = self._flat
        count, steps = len(self.ids), (columns, 1) if columns else (1,)
        self._keep(np.repeat(np.arange(count), parts))
        base = np.tile(np.arange(parts), count)[:, None] * (rows * max(columns, 1)) + op.number("start")
        self._set(op, Affine(base, steps, self._flat.shape, bits=bits_of(op.type)))

    def _npusim_program_part(self, op: Op) -> None:
        """Read the index along an axis of a block that is left out: each part of a program becomes a program."""
        parts, count = op.number("parts"), len(self.ids)
        if self._part is None:
            self._keep(np.repeat(np.arange(count), parts))
            self._part = Affine(np.tile(np.arange(parts), count)[:, None], bits=bits_of(op.type))
        self._set(op, self._part)

    def _npusim_half(self, op: Op, x: Known) -> None:
        """Read every second element of integers or of a mask."""
        self._set(op, half_of(op, x))

    def _npusim_flattened(self, op: Op, x: Known) -> None:
        """Read integers or a mask of a block that is summed along both axes as those of a row of all its elements."""
        self._set(op, flattened(op, x))

    def _npusim_trimmed(self, op: Op, x: Known, mask: Known) -> None:
        """Read pointers of such a row without those that a mask hides in every program."""
        self._set(op, trimmed(x, mask))

    def _npusim_part(self, op: Op, base: Known, pointer: Known) -> None:
        """Read the place at which a program's part of an atomic addition begins."""
        if not isinstance(base, Affine) or not isinstance(pointer, Affine):
            raise op.fail(
                "tl.atomic_add at addresses from loaded integers is not supported; sort the integers, and add the "
                "values of each one"
            )
        every = replace(pointer, base=np.broadcast_to(pointer.base, (len(self.ids), pointer.base.shape[1])))
        self._set(op, part_of(op, base, every, self.arguments[base.of]))

    def _npusim_into_part(self, op: Op, base: Known, pointer: Known) -> None:
        """Read the addresses in a program's part of an atomic addition."""
        self._npusim_part(op, base, pointer)
        part = self.values[op.results[0]]
        assert isinstance(part, Affine) and isinstance(pointer, Affine)
        self._set(op, replace(pointer, of=part.of, base=pointer.base + part.base))

    def _npusim_scale(self, op: Op, x: Known) -> None:
        if not isinstance(x, Number) or not x.value > 0:
            raise UnlikeLoopsError(f"{op.line}: a scale must be above 0")

    def _npusim_holds(self, op: Op, mask: Known, number: Known) -> None:
        """Refuse a mask that hides elements in an iteration that the kernel of tiles does not have."""
        assert isinstance(number, Affine)
        every, _ = answers(self._condition(op, mask))
        is_plain = (number.base >= op.number("first")) & (number.base < op.number("end"))
        if np.any(is_plain & ~every & self.is_read(number.base.shape[1])):
            raise op.fail(
                "a kernel with one loop without a mask and another whose mask hides elements of its tiles is not "
                "supported"
            )

    def _npusim_meets(self, op: Op, equal: Known, mask: Known) -> None:
        """Refuse an element that is stored after a loop if it is in none of the tiles that the loop stores."""
        ((_, d),), rules = self._condition(op, equal).of, self._condition(op, mask)
        lane = -d.base * d.steps[0]  # neighbours along one axis, in either direction
        met = (lane >= 0) & (lane < d.shape[0]) & self.is_read(d.base.shape[1])
        for relation, bound in rules.of:
            met = met & RELATIONS[relation](bound.base + bound.steps[0] * lane, 0)
        if rules.either or abs(d.steps[0]) != 1 or not np.all(met.any(1)):
            program = self.program(int(np.argmin(met.any(1))) if len(met) > 1 else 0)
            raise op.fail(f"after a loop, {program} stores an element that is in none of the loop's tiles")

    def _branch(self, op: Op, body: Sequence[Op]) -> None:
        for inner in body:
            self._do(inner)
        if op.results:
            self.values |= {r: self.values[e] for r, e in zip(op.results, body[-1].operands, strict=True)}

    def _chosen_by_program(self, op: Op, every: Any) -> None:
        """Read both branches of an if whose integers differ between programs."""
        result, before = list[list[Known]](), self._only
        types = op.text.partition("-> (")[2].partition(")")[0]
        kinds = [shape_of(t)[1] for t in TYPES.findall(types)]
        is_shared = self._walk is None and len(np.unique(self.ids, axis=0)) < len(self.ids)
        is_tile = self._walk is not None and every.shape[1] > 1
        is_tile = is_tile and all(shape_of(t)[0] for t in TYPES.findall(types)) and self.choices.way("knows_tiles")
        is_whole = (is_shared or is_tile) and bool(
            FORMATS.keys() & {*kinds}
        )  # blocks of one program that a loop stores
        if is_whole:
            why = "the condition of an if differs between blocks, or tiles, of a loop: npusim computes both branches"
            self.notes.append(f"{op.line}: {why}, and the time includes them")
        for body, here in ((op.body, every), (op.otherwise, ~every)):
            self._only = before if is_whole else here if before is None else before & here
            self._branch(op, body)
            result.append([self.values[r] for r in op.results])
        self._only = before
        for r, a, b in zip(op.results, *result, strict=True):
            if is_whole and all(isinstance(x, Floats | Number) for x in (a, b)):
                self._chosen_by_block(op, r, every, a, b, shape_of(TYPES.findall(types)[op.results.index(r)])[0])
                continue
            if not isinstance(a, Affine) or not isinstance(b, Affine) or a.steps != b.steps or a.of != b.of:
                why = (
                    "an if that chooses between computed values, differently in different programs, is not "
                    "supported; use tl.where with a mask"
                )
                raise self.unlike(op, why, np.asarray(every))
            left = tuple(lesser(x, y) for x, y in zip(a.limits(), b.limits(), strict=True))
            said = a.overflow or b.overflow
            self.values[r] = replace(a, base=np.where(every, a.base, b.base), left=left, overflow=said)

    def _refuse_one_left(self, op: Op, walk: Walk) -> None:
        """Refuse an if that leaves at most one iteration of a loop in every program: one iteration does not show along
        which axis a load moves, unless the load is a factor of a product.
        """
        loop = next((o for o in self._loops if op in o.body), None)
        has_products = loop is not None and any(o.name == "tt.dot" for o in loop.within())
        is_visited = np.asarray(walk.done) & (np.arange(walk.most) < walk.counts)
        if not has_products and np.all(is_visited.sum(1) <= 1):
            why = "an if that leaves at most one iteration of a loop is not supported"
            raise op.fail(f"{why}; write the iteration without a loop")

    def _is_skipped_else(self, op: Op) -> bool:
        """Return whether an if that is false leaves every state of its loop unchanged, and the loop stores nothing."""
        loop = next((o for o in self._loops if op in o.body), None)
        if loop is None or any(o.name in ("tt.store", "tt.descriptor_store") for o in loop.within()):
            return False
        carried = dict(zip(loop.operands[4::2], loop.body[-1].operands, strict=True))
        unchanged = dict(zip(op.results, op.otherwise[-1].operands if op.otherwise else (), strict=False))
        states = [n for n in carried if isinstance(self.values[n], Floats)]
        return bool(states) and all(unchanged.get(carried[n]) == n for n in states)

    def _is_last(self, op: Op) -> bool:
        """Return whether no operation with an effect follows an operation of the kernel."""
        operations = self.function.operations
        if op not in operations:  # each iteration of a loop of blocks is a separate program
            loop = next((o for o in operations if o is self._block_loop and op in o.body), None)
            if loop is None or not self._is_last(loop):
                return False
            operations = loop.body
        later = operations[operations.index(op) + 1 :]
        return all(o.name in (*_IGNORED, "block") or (o.results and not o.body) for o in later)

    def _scf_while(self, op: Op) -> None:
        """Evaluate a loop over integers for all programs at once, until no program continues."""
        if not _is_of_integers(op):
            raise op.fail(
                "the end of a loop depends on computed values, which is not supported; use sizes as its bounds"
            )
        names, starts = op.operands[0::2], op.operands[1::2]
        (arguments, *_), state, on = op.otherwise, [self.values[n] for n in starts], np.ones((1, 1), bool)
        for _ in range(MOST_SEARCHED):
            self.values |= zip(names, state, strict=True)
            decision, *passed = self._where_on(op.body, on)
            every, none = answers(self._condition(op, decision))
            if np.any(~every & ~none & on):
                raise op.fail("the end of a loop depends on the elements of a block, which is not supported")
            self.values |= zip(op.results, self._updated(op, on, passed, op.results), strict=True)
            if not np.any(on := on & every & self.is_read(every.shape[1])):
                return
            self.values |= zip(arguments.results, passed, strict=True)
            state = self._updated(op, on, self._where_on(op.otherwise[1:], on), names)
        raise op.fail(f"a loop over integers did not end within {MOST_SEARCHED:,} iterations")

    def _count_on(self, op: Op, first: Integers, each: Integers, counts: Integers) -> None:
        """Evaluate a loop over integers, iteration by iteration, for all programs at once."""
        number, _, _, _, *carried = op.operands
        names, state = carried[::2], [self.values[n] for n in carried[1::2]]
        for time in range(int(counts.max())):
            on = time < counts
            self.values |= zip(names, state, strict=True)
            self.values[number] = replace(cast("Affine", self.values[op.operands[1]]), base=first + time * each)
            state = self._updated(op, on, self._where_on(op.body, on), names)
        self.values |= zip(op.results, state, strict=True)

    def _where_on(self, body: Sequence[Op], on: Any) -> list[Known]:
        """Read the operations of a loop for the programs that continue; return the values at its end."""
        before, self._only = self._only, on if self._only is None else self._only & on
        for o in body:
            self._do(o)
        self._only = before
        return [self.values[n] for n in body[-1].operands]

    def _updated(self, op: Op, on: Any, new: Sequence[Known], names: Sequence[str]) -> list[Known]:
        """Return integers by program: the new ones for programs that continue, the values of ``names`` for other
        programs.
        """
        result = list[Known]()
        for value, name in zip(map(self._as_integers, new), names, strict=True):
            before = self._as_integers(self.values.get(name, value))
            if not isinstance(value, Affine) or not isinstance(before, Affine) or value.of != before.of:
                raise op.fail("a loop over integers carries a value that is not an integer, which is not supported")
            result.append(replace(value, base=np.where(on, value.base, before.base)))
        return result

    def _scf_for(self, op: Op) -> None:
        if _is_of_integers(op) and self._counted(op):
            return
        if self._walk is not None:
            self._within_loop(op)
            return
        number, low, high, step, *carried = op.operands
        bounds = [self.values[n] for n in (low, high, step)]
        first, end, each = (x.base if isinstance(x, Affine) else np.ones((1, 1), np.int64) for x in bounds)
        if not all(isinstance(x, Affine) for x in bounds):
            raise op.fail("the end of a loop depends on data, which is not supported; use sizes as its bounds")
        if np.any(each <= 0) or " unsigned " in op.text:
            raise op.fail("a loop has a step of 0 or less, or unsigned bounds; use a signed, positive step")
        inner, starts, ends = carried[::2], carried[1::2], op.body[-1].operands if carried else []
        walk = Walk(np.broadcast_to(np.maximum(0, -(-(end - first) // each)), (len(self.ids), 1)), len(self.lines))
        if self._is_stored_by(op, walk, first, each):
            return
        walk.is_sum = self._is_product_sum(op, starts)
        is_still = not self._is_walked(op)
        if is_still and walk.counts.any() and (np.ptp(walk.counts) or walk.most > MOST_UNROLLED):
            why = f"and its count differs between programs, or is more than {MOST_UNROLLED}"
            raise op.fail(f"a loop reads the same elements in each iteration, {why}; this is not supported")
        if not walk.counts.any() or is_still or self._is_once(op, walk) or self._is_unrolled(op, walk):
            self._unroll(op, walk.counts[0, 0], first, each)
            return
        self._refuse_many(op, walk.most, len(self.ids) * walk.most)
        times = np.arange(walk.most)[None]
        self.values[number] = replace(cast("Affine", bounds[0]), base=first + times * each)
        self.walks.append(walk)
        earlier = dict(self.states)
        counters = {n: o for i, n in zip(inner, ends, strict=True) if (o := self._counter(op, i, n)) is not None}
        names = ["" if n in counters else self._state(op, i, times) for i, n in enumerate(ends)]
        taken, self._at_loop = self._taken, self._at_loop or frozenset(self._taken)
        if not self.choices.is_apart:
            self._taken = set(self._at_loop)  # the names are the same as for the same loop with or without a mask
        self._walk = walk
        for o in casts_last([o for o in op.body if o not in counters.values()]):
            self._do(o)
        for counted, o in counters.items():
            self._count_up(o, counted, walk)
        new = self._new_states(op, names, ends)
        if not new and all(names) and not walk.lines and not walk.loads and not earlier.keys() & {*names}:
            self._walk, self._taken, self.states = None, self._taken | taken, earlier
            self.walks.pop()  # no program changes a value in this loop
            self.values |= zip(op.results, map(self.values.__getitem__, starts), strict=True)
            return
        if new:
            self._emit(f"{', '.join(new)} = {', '.join(new.values())}", op.line)
        walk.last_values = {n: text for n, text in new.items() if text.isidentifier() and text not in self.states}
        done = [
            self._end_of_state(op, at, name) if name else self.values[e]
            for at, (name, e) in enumerate(zip(names, ends, strict=True))
        ]
        self._walk, self._taken = None, self._taken | taken
        self.values |= zip(op.results, done, strict=True)
        if len(self.walks) > 1:
            self._compare(op)

    def _new_states(self, op: Op, names: Sequence[str], ends: Sequence[str]) -> dict[str, str]:
        """Return the texts of the states that an iteration changes, by their names."""
        for name, e in zip(names, ends, strict=True):
            if name in self.states and self.states[name][2] == EXACT_BITS:
                self.values[e] = self._exact(op, self.values[e])
        new = {n: self.text(self.values[e]) for n, e in zip(names, ends, strict=True) if n}
        return {n: text for n, text in new.items() if n != text}

    def _is_product_sum(self, op: Op, starts: Sequence[str]) -> bool:
        """Return whether a matrix unit adds up the products of a loop's tiles; note it if they are added one by one."""
        zeros = (isinstance(x, Number) and not x.value for x in map(self.values.__getitem__, starts))
        is_sum = self.choices.is_fresh and not self.walks and _is_sum(op, list(zeros))
        if is_sum and self.choices.way("adds_tiles"):
            why = "npusim adds the products of these tiles one by one, not in the matrix unit"
            self.notes.append(f"{op.line}: each program adds up a part of a product: {why}")
            return False
        return is_sum and not any(map(self.choices.is_widened, _factors(op)))

    def _within_loop(self, op: Op) -> None:
        """Read a loop within a loop, iteration by iteration; it has few iterations, and the same number each time."""
        bounds = [self.values[n] for n in op.operands[1:4]]
        known = [x.base for x in bounds if isinstance(x, Affine) and not any(x.steps)]
        if len(known) < len(bounds) or " unsigned " in op.text or np.any(known[2] <= 0):
            raise op.fail("a loop within a loop is not supported here; move the outer loop into the grid")
        first, end, each = known
        every = np.maximum(0, -(-(end - first) // each))
        every, is_read = np.broadcast_arrays(every, self.is_read(every.shape[1]))
        counts = every[is_read] if np.any(is_read) else every[:1, 0]
        if np.ptp(counts) or counts[0] > MOST_UNROLLED:
            why = f"unless it has the same number of iterations each time, at most {MOST_UNROLLED}"
            raise op.fail(f"a loop within a loop is not supported here, {why}; move the outer loop into the grid")
        self._unroll(op, int(counts[0]), first, each)

    def _counter(self, op: Op, inner: str, end: str) -> Op | None:
        """Return the addition of a counter of a block's lanes that nothing else in its loop reads; None for other
        states.
        """
        result = next((o for o in op.body if end in o.results), None)
        is_sum = result is not None and result.name == "arith.addi" and result.operands[0] == inner
        readers = [o for n in (inner, end) for o in self._uses.get(n, []) if o not in (op, result, op.body[-1])]
        if result is None or not is_sum or readers or not shape_of(result.type)[0]:
            return None
        by = next((o for o in op.body if result.operands[1] in o.results), None)
        is_known = by is not None and by.name == "arith.extui" and not self._is_computed(op, by.operands[0])
        return result if is_known else None

    def _count_up(self, op: Op, end: str, walk: Walk) -> None:
        """Set a counter after its loop: its initial value plus the number of iterations in which a mask is true, for
        each lane.
        """
        by = elements_in(op, self.values[op.operands[1]])
        loop = next(o for o in self._loops if op in o.body)
        start = elements_in(op, self.values[loop.operands[5::2][loop.body[-1].operands.index(end)]])
        is_visited = np.arange(walk.most)[None] < walk.counts
        steps = by.values * is_visited.reshape(*is_visited.shape, *(1 for _ in by.shape))
        self.values[end] = Elements(start.values + steps.sum(1, keepdims=True), start.bits, 1, "a counter of lanes")

    def _counted(self, op: Op) -> bool:
        """Evaluate a loop over integers if it has few iterations; return whether it does."""
        bounds = [self.values[n] for n in op.operands[1:4]]
        if not all(isinstance(x, Affine) for x in bounds):
            return False
        first, end, each = (cast("Affine", x).base for x in bounds)
        if np.any(each <= 0) or " unsigned " in op.text:
            return False
        counts = np.maximum(0, -(-(end - first) // each))
        if counts.max() <= MOST_SEARCHED:
            self._count_on(op, first, each, counts)
        return bool(counts.max() <= MOST_SEARCHED)

    @staticmethod
    def _refuse_many(op: Op, each: int, times: int) -> None:
        if each > MOST_EACH or times > MOST_TIMES:
            allowed = f"allowed: at most {MOST_EACH:,} and {MOST_TIMES:,}"
            raise op.fail(f"a loop has {each:,} iterations in one program and {times:,} in all programs; {allowed}")

    def _is_stored_by(self, op: Op, walk: Walk, first: Integers, each: Integers) -> bool:
        """Return whether a loop that stores has been read: as an if, block by block, or without the programs that skip
        it.
        """
        loads = any(o.name in ("tt.load", "tt.descriptor_load") for o in op.within())
        if not any(o.name in ("tt.store", "tt.descriptor_store") for o in op.within()):
            return False
        if not loads and self.walks and walk.most_once and (np.all(walk.counts) or self._is_last(op)):
            self._once(op, walk.counts[:, 0] == 0)
        elif self.walks:
            if not self.choices.is_apart:
                raise UnlikeLoopsError
            return False
        elif not self.choices.way("lanes") and all(isinstance(self.values[n], Affine) for n in op.operands[4:][1::2]):
            self._go_through(op, walk.counts[:, 0], first, each)
        elif not self.stored and self._is_last(op) and not np.all(walk.counts):
            self._return(op, walk.counts[:, 0] == 0)  # an empty sequence: its program stores nothing
            self._scf_for(op)
        else:
            return False
        return True

    def _go_through(self, op: Op, counts: Integers, first: Integers, each: Integers) -> None:
        """Read a loop whose iterations each store their results: every iteration is a block, like a program."""
        self._refuse_many(op, int(counts.max()), int(counts.sum()))
        carried, ends = op.operands[4:], op.body[-1].operands if len(op.operands) > 4 else []
        program = np.repeat(np.arange(len(counts)), counts)
        time = np.concatenate([np.arange(n) for n in counts]) if len(program) else program
        order = np.argsort(time, kind="stable")
        program, time = program[order], time[order][:, None]
        if not len(program):  # it does nothing, and programs continue after it
            self.values |= dict(zip(op.results, (self.values[s] for s in carried[1::2]), strict=True))
            return
        if not np.all(counts) and not self._is_last(op):
            why = (
                "a loop that stores a block in each iteration, and that some programs skip, must not come before "
                "other stores"
            )
            raise self.unlike(op, why, (counts == 0)[:, None])
        if self.stored and not np.array_equal(program, np.arange(len(counts))):
            why = f"a loop stores a block in each iteration, after the store of line {self.stored[0].line.number}"
            raise op.fail(f"{why}; store only in the loop")
        for inner, start in zip(carried[::2], carried[1::2], strict=True):
            if not isinstance(self.values[start], Affine):
                why = (
                    "passes from one block that a loop stores to the next; store the blocks in a second loop "
                    "after this one"
                )
                raise op.fail(f"{plain_name(inner)} {why}, or make the blocks independent")
        moved = [self._moved(op, inner, end) for inner, end in zip(carried[::2], ends, strict=True)]
        self._keep(program)
        self._block_loop = op
        one = Affine(first).at(program).base + time * Affine(each).at(program).base
        self.values[op.operands[0]] = replace(cast("Affine", self.values[op.operands[1]]), base=one)
        for inner, start, by in zip(carried[::2], carried[1::2], moved, strict=True):
            x = cast("Affine", self.values[start])
            self.values[inner] = within(op, replace(x, base=x.base + time * Affine(by).at(program).base))
        for o in op.body:
            self._do(o)
        self.values |= {r: self.values[s] for r, s in zip(op.results, carried[1::2], strict=True)}

    def _is_once(self, op: Op, walk: Walk) -> bool:
        """Return whether every program executes a loop once, and the loop is read as its one iteration: if lanes are
        read, which would have no axis of iterations, or if a way of reading asks for it.
        """
        is_by_lanes = bool(self.choices.way("lanes"))
        if not walk.most_once or not (is_by_lanes or self.choices.way("unrolls")):
            return False
        if is_by_lanes and np.ptp(walk.counts):
            raise op.fail("some programs execute this loop once, the others not at all; use an if in place of it")
        return not np.ptp(walk.counts)

    def _is_unrolled(self, op: Op, walk: Walk) -> bool:
        """Return whether a loop has few iterations in every program, with products after it, or whether a way of
        reading asks for it.
        """
        operations, count = self.function.operations, int(walk.counts[0, 0])
        if np.ptp(walk.counts) or count > MOST_WRITTEN_OUT:
            return False
        later = operations[operations.index(op) + 1 :] if op in operations else []
        if count <= MOST_UNROLLED and any(o.name == "tt.dot" for o in later):
            return True
        if self._writes_out:
            self.notes.append(f"{op.line}: npusim reads the loop as its {count} iterations, one after another")
            return True
        return self._has_window(op) and bool(self.choices.way("unrolls"))

    @property
    def _writes_out(self) -> bool:
        """Whether loops of few iterations are written as their iterations."""
        lanes: LaneReading | None = self.choices.way("lanes")
        return lanes is not None and lanes.writes_out

    def _has_window(self, op: Op) -> bool:
        """Return whether the mask of a load in a loop has a lower bound."""
        masks = [o.operands[1] for o in op.within() if o.name == "tt.load" and len(o.operands) > 1]
        result = {n for mask in masks for n in self._made_of(mask)}
        compared = (o for o in self._made if o.name == "arith.cmpi" and o.results[0] in result)
        return any(re.search(r"\b[su]g[et]\b", o.text) for o in compared)

    def _once(self, op: Op, is_left: Booleans) -> None:
        """Read a loop of one iteration that only stores, as an if: programs without this iteration have ended."""
        self._return(op, is_left)
        self._unroll(op, 1, cast("Affine", self.values[op.operands[1]]).base, np.ones((1, 1), np.int64))

    def _is_walked(self, op: Op) -> bool:
        """Return whether a loop reads blocks of floats by its index, or by integers and pointers that it moves."""
        moved = {op.operands[0], *op.operands[4::2]}
        pointers = [o.operands[:1] for o in op.within() if o.name == "tt.load"]
        pointers += [o.operands for o in op.within() if o.name == "tt.descriptor_load"]
        return any(moved.intersection(self._made_of(n)) for names in pointers for n in names)

    def _unroll(self, op: Op, count: int, first: Integers, each: Integers) -> None:
        """Read a loop's iterations one after another."""
        number, _, _, _, *carried = op.operands
        ends, values = op.body[-1].operands if carried else [], [self.values[s] for s in carried[1::2]]
        types = TYPES.findall(op.text.partition("-> (")[2])[: len(values)]
        kinds = [shape_of(t)[1] for t in types]
        if count > 1:
            self._check_passed(op, carried[::2], ends)
        for time in range(count):
            values = [self._passed(op, kind, x) for kind, x in zip(kinds, values, strict=True)]
            one = replace(cast("Affine", self.values[op.operands[1]]), base=first + time * each)
            self.values |= {number: one, **dict(zip(carried[::2], values, strict=True))}
            for o in op.body:
                self._do(o)
            values = [self.values[end] for end in ends]
        self.values |= dict(zip(op.results, values, strict=True))

    def _check_passed(self, op: Op, names: Sequence[str], ends: Sequence[str]) -> None:
        """Refuse a loop whose next iteration may contract a product of the one before with an addition: compiled code
        does so only if it writes the iterations out, too.
        """
        made = {r: o for o in op.body for r in o.results}
        for name, end in zip(names, ends, strict=True):
            readers = [o.name for o in self._uses.get(name, [])]
            if end in made and made[end].name == "arith.mulf" and {"arith.addf", "arith.subf"}.intersection(readers):
                why = "begins an iteration as a product, to which the iteration adds"
                raise op.fail(f"{plain_name(name)} {why}: npusim does not know whether code rounds the product")

    def _passed(self, op: Op, kind: str, x: Known) -> Known:
        """Return the value with which a written-out iteration begins. No compiler computes it in advance (as it would a
        product of two numbers), and no addition contracts it.
        """
        if isinstance(x, Floats):
            return replace(self._named(op, x), factors=None, place="") if x.factors else x
        is_plain = not isinstance(x, Number) or not math.isfinite(x.value) or abs(math.frexp(x.value)[0]) in (0.0, 0.5)
        if is_plain or not isinstance(x, Number) or not x.is_known or kind not in FORMATS:
            return x
        return Floats(f"filled('@', {x.text}, {self.choices.fmt(kind)!r})", (None,) * len(x.shape), kind)

    def _state(self, op: Op, at: int, times: Integers) -> str:
        """Bind a loop-carried value; return its name, or an empty name for a value that is not a block of floats."""
        inner, start = op.operands[4::2][at], op.operands[5::2][at]
        x, end = self.values[start], op.body[-1].operands[at]
        types = TYPES.findall(op.text.partition("-> (")[2])
        kind = shape_of(types[at])[1]
        if isinstance(x, Affine) and (not self._is_moved(op, inner, end) or self._is_computed(op, end)):
            x = self._as_number(x, kind) or x
        is_exact = isinstance(x, Number) and kind in WHOLE and self._is_exact_state(op, end)
        if isinstance(x, Affine | Listed):  # a pointer or number that moves by the same step in every iteration
            moved = x.rest if isinstance(x, Listed) else x
            by = self._moved(op, inner, op.body[-1].operands[at], times.shape[1])
            by = times * by if by.shape[1] == 1 else np.cumsum(by, 1) - by
            moved = within(op, replace(moved, base=moved.base + by))
            self.values[inner] = replace(x, rest=moved) if isinstance(x, Listed) else moved
            return ""
        if isinstance(x, Floats) and x.text in self.states:  # the state continues the state of the previous loop
            if x.text in {known.text for known in self.walks[-1].entered.values()}:
                why = f"and another value of the loop both begin with what the loop before leaves in {x.text}"
                raise op.fail(f"{plain_name(inner)} {why}, which is not supported; carry both through both loops")
            for name in [walk.last_values[x.text] for walk in self.walks if x.text in walk.last_values]:
                self._emit(f"{name} = None", op.line)  # a second name of the state, which this loop changes
                self.walks[-1].at = len(self.lines)
            self._enter(inner, x)
            return x.text
        if self.walks[-1].is_sum:  # one product of all tiles, which starts at 0
            self.values[inner] = x
            return ""
        if not isinstance(x, Number) and not (isinstance(x, Floats) and x.text in self.loads and not x.is_transposed):
            why = "starts from a computed value; start it from a number or from a loaded block"
            raise op.fail(f"{plain_name(inner)} {why}")
        axes = self._axes(x.shape) if isinstance(x, Number) else x.axes
        name, fmt = self._unique(inner), EXACT_BITS if is_exact else kind
        self.walks[-1 if self.choices.is_apart else 0].states.append(name)
        self.states[name] = x, axes, fmt
        self._enter(inner, Floats(name, axes, fmt, hidden_value(x)))
        return name

    @staticmethod
    def _is_moved(op: Op, inner: str, end: str) -> bool:
        """Return whether a loop only adds to an integer or pointer, or leaves it unchanged."""
        result = next((o for o in op.body if end in o.results), None)
        is_added = result is not None and result.name in ("tt.addptr", "arith.addi") and inner in result.operands
        return inner == end or is_added

    def _enter(self, inner: str, x: Floats) -> None:
        """Bind a state where its loop begins: masked lanes have its initial value, or later any value."""
        is_seen = self.hidden.unsteady.get(inner, False)
        pad = None if inner in self.hidden.unsteady else x.pad
        entered = replace(x, held=HeldState(inner, x.pad, is_seen), pad=pad, is_seen=False)
        self.walks[-1].entered[inner] = self.values[inner] = entered

    def _end_of_state(self, op: Op, at: int, name: str) -> Known:
        """Return a state after its loop; note a state whose masked lanes change in the loop.

        Lanes that a mask hides only in some iterations must not change there, because a tile leaves them out.
        """
        inner, end, walk = op.operands[4::2][at], op.body[-1].operands[at], self.walks[-1]
        value, entered = self.values[end], walk.entered[inner]
        if not isinstance(value, Floats) or entered.held is None:
            return value
        _, axes, fmt = self.states[name]
        axes, start, is_held = (
            self._joined(Floats("", axes, fmt), value),
            entered.held.start,
            value.held == entered.held,
        )
        partial = {self.root(a): is_seen for a, is_seen in walk.partial.items()}
        seen = [partial[self.root(a)] for a in axes if a is not None and self.root(a) in partial]
        if seen:
            self._note_zeros([end])
        alone = is_held and [r for o in self._uses.get(inner, []) for r in o.results] == [end]
        self.hidden.lanes[inner] = axes
        if seen and not alone and inner not in self.hidden.unsteady:
            self.hidden.relied |= set(axes)
            self.hidden.changed[inner] = all(seen)
        elif seen:
            self._check_partial(op, inner, axes, is_held=is_held)
        elif inner not in self.hidden.unsteady and not is_held and (start is None or value.pad != start):
            self.hidden.changed[inner] = False
        is_known = is_held or inner not in {*self.hidden.unsteady, *self.hidden.changed}
        return Floats(name, axes, fmt, start if is_known else None, is_seen=bool(seen) and all(seen))

    def _check_partial(self, op: Op, inner: str, axes: Sequence[str | None], *, is_held: bool) -> None:
        """Refuse a state whose lanes masks hide only in some iterations, if these iterations change or reduce it."""
        of = f"{plain_name(inner)} is carried by a loop, and a mask hides some of its elements in some iterations only"
        if not is_held:
            why = "other=0.0 for a term of a sum, other=-inf for a maximum; or use tl.where(mask, x, 0.0)"
            raise op.fail(f"{of}; the hidden elements may change it: write {why}")
        roots = {self.root(a) for a in axes if a is not None}
        for o in op.within():
            blocks = [self.values.get(n) for n in o.operands[:2] if inner in self._made_of(n)]
            along = {self.root(a) for x in blocks if isinstance(x, Floats) for a in x.axes}
            if o.name in ("tt.reduce", "tt.scan", "tt.dot") and roots & along:
                raise o.fail(f"{of}; the loop reduces it: reduce it after the loop instead")

    def _moved(self, op: Op, inner: str, end: str, times: int = 1) -> Integers:
        """Return the step of an integer or pointer in an iteration, or its steps in each of a number of iterations."""
        if inner == end:
            return np.zeros((1, 1), np.int64)
        for o in op.body:
            if end in o.results and o.name in ("tt.addptr", "arith.addi") and inner in o.operands:
                by = self._early(op, next((n for n in o.operands if n != inner), inner))
                if isinstance(by, Affine) and not any(by.steps) and by.base.shape[1] in (1, times):
                    return by.base
        raise op.fail(f"{plain_name(inner)} moves by a step that the loop computes; use one constant step")

    def _early(self, op: Op, name: str) -> Known | None:
        """Return a value that the loop computes from values known before it."""
        result = next((o for o in op.body if name in o.results), None)
        if result is not None and all(self._early(op, n) is not None for n in result.operands):
            self._do(result)
        return self.values.get(name)

    def _compare(self, op: Op) -> None:
        """Join two loops that differ only in their masks; other loops are separate, if they only visit rows."""
        first, second, *more = self.walks
        if self.choices.is_apart:
            if any(w.done is not None for w in self.walks):
                raise op.fail(
                    "a kernel with a loop that skips tiles cannot have a second loop over tiles; put it into a "
                    "separate kernel"
                )
            if any(" @ " in text for w in self.walks for text, _ in w.lines):
                raise op.fail(
                    "a second loop over tiles that differs from the first is not supported; put it into a "
                    "separate kernel"
                )
            if not np.array_equal(self.walks[-1].counts, first.counts):
                raise op.fail(
                    "a second loop over tiles visits other tiles than the first; visit the same tiles in both"
                )
            return
        one, other = ([text for text, _ in w.lines if " = where(mask, " not in text] for w in (first, second))
        if one != other or more:
            raise UnlikeLoopsError
        first.lines = first.lines if first.mask else second.lines


def _is_turned(x: Known) -> bool:
    """Return whether a value is a block along two axes that is loaded transposed."""
    return isinstance(x, Floats) and x.is_transposed and all(x.axes)


def _can_turn(x: Known) -> bool:
    """Return whether a value can be an operand together with blocks that are loaded transposed."""
    if isinstance(x, Floats):
        return _is_turned(x) or not (len(x.axes) == 2 and all(x.axes))
    return isinstance(x, Number | Condition)


def _transposed(x: Known) -> Known:
    """Return a value with its two axes exchanged; a block that is loaded transposed is returned as it is loaded."""
    if isinstance(x, Floats):
        is_transposed = x.is_transposed != (len(x.axes) == 2 and all(x.axes))
        return replace(x, axes=x.axes[::-1], is_transposed=is_transposed)
    return reshaped(x, x.shape[::-1], lambda s, _: s[::-1]) if isinstance(x, Number | Condition) else x


def _continued(blocks: Mapping[str, list[Op]], one: str) -> list[Op]:
    """Return the operations after a branch after which all programs continue with the ``one`` block: those of the
    blocks that may follow, with blocks that only return, which several branches may share, at the end.
    """
    reached, left = set[str](), [one]
    while left:
        n = left.pop()
        reached.add(n)
        left += [x for x in re.findall(r"\^bb\d+", blocks[n][-1].text) if x not in reached]
    later = [n for n in blocks if n in reached and n != one]
    later.sort(key=lambda n: [o.name for o in blocks[n][1:]] == ["tt.return"])
    return [o for n in (one, *later) for o in blocks[n]]


def _words(text: str) -> set[str]:
    """Return the names in a statement."""
    return set(re.findall(r"[A-Za-z_]\w*", text))


def _assignments(text: str) -> list[tuple[str, str]]:
    """Return the names that a statement binds, each with its expression."""
    targets, _, values = text.partition(" = ")
    depths = list(accumulate((c in "([") - (c in ")]") for c in values))
    commas = [i for i, c in enumerate(values) if c == "," and not depths[i]]
    ends = zip([-1, *commas], [*commas, len(values)], strict=True)
    each = [values[a + 1 : b].strip() for a, b in ends]
    names = targets.split(", ")
    return list(zip(names, each, strict=True)) if len(names) > 1 else [(targets, values)]


def _kept(text: str, live: set[str]) -> str:
    """Return a statement without the names that nothing reads; empty if nothing of it is left."""
    if " = " not in text or text.startswith("yield "):
        return text
    kept = [(n, value) for n, value in _assignments(text) if n in live]
    return f"{', '.join(n for n, _ in kept)} = {', '.join(value for _, value in kept)}" if kept else ""


def _is_of_integers(op: Op) -> bool:
    """Return whether a loop computes only single integers, and carries some."""
    kinds = [shape_of(o.type) for o in op.within() if o.results and o.type and "tt.ptr" not in o.type]
    stores = any(o.name.startswith(("tt.store", "tt.descriptor", "tt.atomic")) for o in op.within())
    return bool(op.results) and not stores and all(not shape and fmt not in FORMATS for shape, fmt in kinds)


def _factors(op: Op) -> list[str]:
    """Return the formats of the factors of products in a loop."""
    types = [TYPES.findall(o.text.rpartition(" : ")[2].partition("->")[0]) for o in op.body if o.name == "tt.dot"]
    return [shape_of(t)[1] for listed in types for t in listed if t.startswith("tensor")]


def _is_sum(op: Op, zeros: Sequence[bool]) -> bool:
    """Return whether a loop's only work with floats is to load them and add their products to a sum that begins with 0;
    it stores none of them.
    """
    if any(o.name in ("tt.store", "tt.descriptor_store") for o in op.within()):
        return False
    known = ("tt.load", "tt.trans", "arith.constant")
    floats = [o for o in op.body if o.results and "tt.ptr" not in o.type and shape_of(o.type)[1] in FORMATS]
    sums = {i: end for i, end, zero in zip(op.operands[4::2], op.body[-1].operands, zeros, strict=True) if zero}
    products = [o for o in floats if o.name not in known]
    return bool(products) and all(o.name == "tt.dot" and sums.get(o.operands[2]) == o.results[0] for o in products)


def casts_last(body: Sequence[Op]) -> list[Op]:
    """Return operations with casts of tiles moved after the last other reader of their source.

    A compiler is free to choose the order; here an earlier cast would overwrite its source, while a GPU stores both.
    """
    moved = list(body)
    for op in [x for x in body if x.name in ("arith.truncf", "tt.fp_to_fp") and len(shape_of(x.type)[0]) > 1]:
        readers = [i for i, x in enumerate(moved) if op.operands[0] in (*x.results, *x.operands) and x is not op]
        if readers and moved[readers[0]].name not in ("tt.dot", "tt.load") and readers[-1] < moved.index(op):
            moved.remove(op)
            moved.insert(readers[-1] + 1, op)
    return moved
