"""The ways to read a launch as kernels of tiles, in order: the first way that reads the launch is used.

A reading notes those choices that it used and in which ways differ (`Choices.way`). A way that differs from a failed
way only in other choices would fail in the same way, and is not tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

from npusim.errors import ProgramError
from npusim.kernels.triton.added_parts import PartsApart, PartsError, atomics_apart, has_atomics, parts_apart
from npusim.kernels.triton.addresses import is_further
from npusim.kernels.triton.kernel_draft import Choices, LaneReading, NoStoreError, UnlikeProgramsError, UnsupportedError
from npusim.kernels.triton.known_kernels import KnownKernelError, known_kernels
from npusim.kernels.triton.launch_axes import UnplacedError
from npusim.kernels.triton.launch_phases import Check, LaunchGrid, placed
from npusim.kernels.triton.neighbours_apart import with_neighbours_apart
from npusim.kernels.triton.own_maxima import with_maxima
from npusim.kernels.triton.pulled_lanes import with_lanes_pulled
from npusim.kernels.triton.reader import read_launch
from npusim.kernels.triton.reloaded import with_values_kept
from npusim.kernels.triton.results_apart import STORES, results_apart
from npusim.kernels.triton.shared_memory import check_programs
from npusim.kernels.triton.start_values import starts_apart
from npusim.kernels.triton.tensor_axes import View
from npusim.kernels.triton.ttir_text import Function, Op, every_of, shape_of
from npusim.kernels.triton.turned_blocks import ALL, reduces_down

#: Largest number of kinds of programs of one launch, and the note on the times of several kernels.
MOST_KINDS, _LAUNCHES = 4, "the time is that of {} launches, not of the one kernel"
#: The same for kernels of one launch that share its code.
_IN_TURN = "the time is that of one launch, which runs them in turn"
#: Errors that precede those of other ways: operations that no way supports, programs that do different things, then
#: accesses of integers.
_FIRST = (UnsupportedError, UnlikeProgramsError, KnownKernelError)


class _Prepared(NamedTuple):
    """A kernel in which reductions with custom combine functions are maxima, and in which no program loads what it
    stored.
    """

    function: Function
    arguments: Mapping[str, Any]
    maxima: Sequence[Op]
    kept: Sequence[Op]


class _Refused(NamedTuple):
    """A reading that failed."""

    function: Function
    arguments: Mapping[str, Any]
    grid: tuple[int, ...]
    choices: Choices
    fault: ProgramError


@dataclass
class _Tries:
    """One kernel at one launch, and the data that its ways share.

    ``kinds``: largest number of kinds of programs; ``refused``: failed readings of all kernels of the launch;
    ``first``, ``fault``: the fault of the first way, and the fault of all ways; ``check``: of the blocks of a way.
    """

    function: Function
    arguments: Mapping[str, Any]
    grid: tuple[int, ...]
    choices: Choices
    kinds: int = MOST_KINDS
    refused: list[_Refused] = field(default_factory=list)
    first: ProgramError | None = None
    fault: ProgramError | None = None
    check: Check | None = None

    @cached_property
    def prepared(self) -> _Prepared:
        """The kernel as it is read operation by operation."""
        function, maxima = with_maxima(self.function)
        function, arguments, kept = with_values_kept(function, self.arguments)
        return _Prepared(function, arguments, maxima, list(kept.values()))

    @cached_property
    def of_tensors(self) -> list[Function]:
        """A kernel for each tensor that the kernel stores; none if it stores one tensor."""
        return results_apart(self.function)

    @cached_property
    def of_stores(self) -> list[Function]:
        """A kernel for each store; none if no tensor has several stores."""
        return results_apart(with_neighbours_apart(self.function) or self.function, by_store=True)

    @cached_property
    def has_loops(self) -> bool:
        """Whether the kernel has a loop."""
        return any(o.name == "scf.for" for o in self._every)

    @cached_property
    def has_remainders(self) -> bool:
        """Whether the kernel has remainders, or quotients, of the indices of a block."""
        names = ("arith.remsi", "arith.remui", "arith.divsi", "arith.divui")
        return any(o.name in names and "tensor" in o.type for o in self._every)

    @property
    def _every(self) -> list[Any]:
        return every_of(self.function.operations)

    def read(self, function: Function, choices: Choices) -> LaunchGrid:
        """Return the blocks of a kernel on the launch's arguments; raise the fault of a reading that failed."""
        for each in self.refused:
            is_like = each.arguments is self.arguments and each.grid == self.grid
            if is_like and choices.are_read_as(each.choices) and each.function == function:
                raise each.fault
        how = replace(choices, asked=set())
        try:
            return placed(read_launch(function, self.arguments, self.grid, how))
        except ProgramError as error:
            self.refused.append(_Refused(function, self.arguments, self.grid, how, error))
            raise

    def of(
        self, function: Function, arguments: Mapping[str, Any], choices: Choices | None = None, *, fewer: int = 0
    ) -> _Tries:
        """Return the attempts at another kernel of the same launch, with fewer kinds of programs."""
        return _Tries(function, arguments, self.grid, choices or self.choices, self.kinds - fewer, refused=self.refused)

    def note(self, error: ProgramError) -> None:
        """Record the fault of a way. The fault at the latest line is reported, unless a fault of `_FIRST` occurred."""
        self.first = self.first or error
        self.fault = error if self.fault is None or _rank(error) > _rank(self.fault) else self.fault


def _rank(error: ProgramError) -> tuple[int, int]:
    """Return the priority of a fault, by its kind and by its line."""
    kind = next((len(_FIRST) - i for i, one in enumerate(_FIRST) if isinstance(error, one)), 0)
    line = re.match(r"[^:]*:(\d+): ", str(error))
    return kind, 0 if kind or line is None else int(line[1])


def _always(_: _Tries) -> bool:
    return True


class Way(NamedTuple):
    """A way to read a launch, and the condition for trying it; a way that fails returns no blocks or raises
    `ProgramError`.

    ``is_reported``: whether its fault may be reported as the fault of the launch; that of an operation that no way
    supports always is.
    """

    name: str
    read: Callable[[_Tries], list[LaunchGrid]]
    when: Callable[[_Tries], bool] = _always
    is_reported: bool = True


def _first_read(ways: Sequence[Way], tries: _Tries) -> list[LaunchGrid]:
    """Return the blocks of the first way that reads a launch; if no way does, raise the fault of all ways."""
    for way in ways:
        if way.when(tries):
            try:
                if result := way.read(tries):
                    if tries.check is not None:
                        tries.check(result)
                    return result
            except NoStoreError:
                raise
            except ProgramError as error:
                if way.is_reported or isinstance(error, UnsupportedError):
                    tries.note(error)
    assert tries.fault is not None
    raise tries.fault from None


def _whole(tries: _Tries, changes: Mapping[str, Any]) -> list[LaunchGrid]:
    """Read the kernel as one kernel of tiles."""
    return [tries.read(tries.function, replace(tries.choices, **changes))]


def _apart(tries: _Tries, changes: Mapping[str, Any], each_of: str) -> list[LaunchGrid]:
    """Read a kernel for each tensor, or each store."""
    parts = tries.of_stores if each_of == "store" else tries.of_tensors
    made, read, idle = list[LaunchGrid](), list[Function](), list[NoStoreError]()
    for part in parts:
        try:
            made.append(tries.read(part, replace(tries.choices, **changes)))
            read.append(part)
        except NoStoreError as error:  # the programs do not reach the stores of this part
            idle.append(error)
    if idle and not made:
        raise idle[0]
    if len(made) > 1:
        called = "tensor that it stores" if each_of == "tensor" else each_of
        why = (
            f"the results have different shapes: npusim treats the kernel as {len(made)} kernels, one for each "
            f"{called}; `output` is the first one's result"
        )
        made[0].reader.notes.append(f"{tries.function.name}: {why}; {_IN_TURN}")
        _share_code(read, [[one] for one in made])
    return made


def _share_code(parts: Sequence[Function], made: Sequence[list[LaunchGrid]]) -> None:
    """Distribute the code of a kernel that is read as ``parts`` by their elements.

    Of a part that is read as several kernels, each has the part's share: most have programs of their own.
    """
    elements = [_elements_of(part) for part in parts]
    for own, every in zip(elements, made, strict=True):
        for one in every:
            one.code_share = own / sum(elements)


def _elements_of(function: Function) -> int:
    """Return the number of elements of all results of a kernel's operations."""
    return sum(prod(shape_of(o.type)[0]) for o in every_of(function.operations) if o.results or o.name in STORES)


def _with_rows_listed(tries: _Tries) -> list[LaunchGrid]:
    """Read a kernel with rows as lists of rows, for tensors whose rows do not follow from a place that is stored to."""
    fault, choices = tries.first, tries.choices
    while isinstance(fault, UnplacedError):
        of = fault.of.partition(".")[0]
        way = next((n for n in (of, f"{of}.") if n not in choices.listed_rows), "")
        if not way:
            break
        choices = replace(choices, listed_rows=choices.listed_rows | {way})
        try:
            return [tries.read(tries.function, choices)]
        except ProgramError as error:
            fault = error
    return []


def _with_starts_apart(tries: _Tries) -> list[LaunchGrid]:
    """Read a kernel whose loops start from computed values as two kernels: one computes these values and one loads
    them.
    """
    if (apart := starts_apart(tries.function, tries.arguments)) is None:
        return []
    with suppress(ProgramError):
        first, *others = _kernels(tries.of(apart.after, apart.arguments))
        why = (
            "a loop starts from a computed value: npusim computes the value in a separate kernel, which is "
            "one launch more"
        )
        first.reader.notes.append(f"{tries.function.name}: {why}")
        return [first, *_kernels(tries.of(apart.before, apart.arguments)), *others]
    return []


def _by_programs(tries: _Tries) -> list[LaunchGrid]:
    """Read a launch whose programs do different things, one kind of program after another."""
    fault, choices, grid = tries.fault, tries.choices, tries.grid
    assert isinstance(fault, UnlikeProgramsError)
    every = choices.programs or tuple(tuple(at[::-1]) for at in product(*(range(n) for n in grid[::-1])))
    some, others = (tuple(at for at in every if (at in fault.some) is is_one) for is_one in (True, False))
    if not some or not others:
        return []
    tries.fault = None  # the kinds that are left to read
    made, idle, nothing = list[LaunchGrid](), 0, None
    for programs in sorted((some, others), key=len, reverse=True):
        own = replace(choices, programs=programs)
        try:
            made += _kernels(tries.of(tries.function, tries.arguments, own, fewer=1))
        except NoStoreError as error:
            idle, nothing = idle + len(programs), error
    if not made:
        assert nothing is not None
        raise nothing
    at = f"{fault}".partition(": ")[0]
    if idle:
        why = f"{idle:,} of {len(every):,} programs store nothing; the time is without them"
        made[0].reader.notes.append(f"{at}: {tries.function.name}: {why}")
    if choices.programs or len(made) < 2:
        return made
    counts = ", ".join(str(each.reader.programs) for each in made)
    why = (
        f"programs take different branches: npusim treats the kernel as {len(made)} kernels, of {counts} "
        "programs; `output` has the rows of the first"
    )
    made[0].reader.notes.append(f"{at}: {tries.function.name}: {why}; {_LAUNCHES.format(len(made))}")
    return made


def _has_kinds(tries: _Tries) -> bool:
    return isinstance(tries.fault, UnlikeProgramsError) and tries.kinds > 1


def _is_fresh(tries: _Tries) -> bool:
    return tries.choices.is_fresh


def _has_loops(tries: _Tries) -> bool:
    return tries.has_loops


def _has_remainders(tries: _Tries) -> bool:
    return tries.has_remainders


def _stores_one_column(tries: _Tries) -> bool:
    """Return whether a loop stores blocks of one column, and a block is reduced down its rows."""
    stored = [shape_of(o.type)[0] for op in tries.function.operations for o in op.within() if o.name == "tt.store"]
    return reduces_down(tries.function) and any(len(shape) == 2 and shape[0] > shape[1] == 1 for shape in stored)


def _added(tries: _Tries) -> list[LaunchGrid]:
    """Read a kernel with atomic additions as one kernel that adds the parts, and kernels that compute them."""
    function, arguments = tries.function, tries.arguments
    if every := atomics_apart(function):
        made = _kernels(tries.of(every[0], arguments))
        for one in every[1:]:
            last, *before = _kernels(tries.of(one, arguments))
            made += [*before, last]  # the first kernel runs after all others
        why = f"atomic additions to several tensors: read as {len(every)} kernels, one for each; `output` has the first"
        made[0].reader.notes.append(f"{function.name}: {why}; {_LAUNCHES.format(len(made))}")
        return made
    try:
        apart, makers = _with_makers(tries)
    except ProgramError as fault:
        try:
            apart, makers = _with_makers(tries, adds_zeros=True)
        except ProgramError:
            raise fault from None
    apart, makers, adder = _with_adder(tries, apart, makers)
    makers += _kernels(tries.of(apart.others, arguments)) if apart.others else []
    why = (
        "atomic additions: here the programs add their parts to zeros, in program order, and a second kernel "
        "adds the sum to the tensor; on hardware the order varies, and bits may differ from run to run"
    )
    adder.reader.notes.append(f"{apart.after.operations[0].line}: {why}; {_LAUNCHES.format(1 + len(makers))}")
    return [adder, *makers]


def _with_makers(tries: _Tries, *, adds_zeros: bool = False) -> tuple[PartsApart, list[LaunchGrid]]:
    """Return the kernels of atomic additions, and the blocks of the kernel that computes the parts."""
    apart = parts_apart(tries.function, tries.arguments, 1, adds_zeros=adds_zeros)
    try:
        return apart, _kernels(tries.of(apart.before, apart.arguments))
    except PartsError as error:
        apart = parts_apart(tries.function, tries.arguments, error.count, adds_zeros=adds_zeros)
        return apart, _kernels(tries.of(apart.before, apart.arguments))


def _with_adder(
    tries: _Tries, apart: PartsApart, makers: list[LaunchGrid]
) -> tuple[PartsApart, list[LaunchGrid], LaunchGrid]:
    """Return the kernels of atomic additions, the blocks of the kernel that computes the parts, and those of the other
    kernel.

    Rows of numbers, one below the other, are added one by one, along the axes along which they are stored, or as flat
    rows.
    """
    function, arguments, adders = tries.function, tries.arguments, replace(tries.choices, orders={}, sums={})
    stored = [x for x in (each.out for each in makers) if x.name in apart.arguments and isinstance(x, View)]
    if not stored or not all(x.shape[-1] == 1 < x.shape[-2] for x in stored):
        return apart, makers, _checked_adder(apart, makers, adders)
    zeros = apart.adds_zeros
    apart = parts_apart(function, arguments, apart.parts, by_element=True, adds_zeros=zeros)
    with suppress(ProgramError):
        return apart, makers, _checked_adder(apart, makers, adders, like=stored[0])
    apart = parts_apart(function, arguments, apart.parts, by_element=True, is_flat=True, adds_zeros=zeros)
    makers = _kernels(tries.of(apart.before, apart.arguments))
    return apart, makers, _checked_adder(apart, makers, adders)


def _checked_adder(
    apart: PartsApart, makers: Sequence[LaunchGrid], adders: Choices, like: View | None = None
) -> LaunchGrid:
    """Return the blocks of the kernel that adds parts; raise `ProgramError` if its rows or columns are not theirs."""
    adder = placed(read_launch(apart.after, apart.arguments, apart.grid, adders), like=like)
    sums = [x for of in adder.placed_inputs.values() for _, x in of if isinstance(x, View) and x.sums]
    parts = [each.out for each in makers if isinstance(each.out, View) and each.out.parts]
    if not all(x.has_places_of(y) for x in parts for y in sums):
        why = "a tl.atomic_add of a block whose rows npusim reads as columns is not supported"
        raise apart.after.operations[0].fail(f"{why}; add the transposed block to a tensor with its axes exchanged")
    return adder


def _with(name: str, *each_of: str, when: Callable[[_Tries], bool] = _always, **ways: bool | str) -> list[Way]:
    """Return the ways for some choices: of the kernel as one (an empty word), or of a kernel for each tensor
    or store.
    """
    return [
        Way(f"{name}, a kernel for each {x}", partial(_apart, changes=ways, each_of=x), when)
        if x
        else Way(name, partial(_whole, changes=ways), when)
        for x in each_of
    ]


#: The ways to read a kernel without atomic additions, in the order in which they are tried.
WAYS = (
    *_with("as written", ""),
    *_with("elements by loaded integers as lists", "", lists_elements=True),
    *_with("the part of a tensor that a loop visits apart", "", parts_by_loops=True),
    *_with("as written", "tensor"),
    *_with("elements by loaded integers as lists", "tensor", lists_elements=True),
    *_with("loops of one iteration as that iteration", "", "tensor", when=_has_loops, unrolls=True),
    *_with("remainders as lists", "", "tensor", when=_has_remainders, lists_remainders=True),
    *_with("vectors of rows and of columns of one tensor as separate loads", "", "tensor", loads_again=True),
    *_with("first masked lanes chosen after a load", "", "tensor", chooses_lanes="first"),
    *_with("masked lanes chosen after a load", "", "tensor", chooses_lanes="all"),
    *_with("as written", "store"),
    *_with("elements by loaded integers as lists", "store", lists_elements=True),
    *_with("tensors cut to the columns of a block", "", "tensor", "store", cuts=True),
    Way("rows that follow from no place as lists", _with_rows_listed),
    Way("values that loops start from in a kernel of their own", _with_starts_apart),
    Way("a kernel for each kind of programs", _by_programs, _has_kinds),
    *_with("lists in the programs' order", "", lists_elements=True, lists_in_order=True),
    *_with("hidden rows of a number", "", lists_elements=True, fills_rows=True),
    *_with("hidden elements of a list", "", hides_elements=True),
    *_with("hidden elements of a list", "", lists_elements=True, hides_elements=True),
    *_with("hidden elements of a list", "", when=_has_remainders, lists_remainders=True, hides_elements=True),
    *_with("hidden elements of a list, and iterations one after another", "", hides_elements=True, unrolls=True),
    *_with("blocks of one column as rows", "", when=_stores_one_column, turns=ALL),
    *_with("groups with a shorter last group", "", "tensor", "store", ragged=True),
    *_with("groups with a shorter last group, and vectors as separate loads", "", ragged=True, loads_again=True),
    *_with("groups with a shorter last group, and hidden elements", "", ragged=True, hides_elements=True, unrolls=True),
    *_with("products of tiles added one by one", "", when=_is_fresh, adds_tiles=True),
    *_with("products added one by one, with a shorter last group", "", when=_is_fresh, adds_tiles=True, ragged=True),
)


def _kernels(tries: _Tries) -> list[LaunchGrid]:
    """Return the blocks of one kernel of a launch, or of the kernels as which it is read."""
    return _added(tries) if has_atomics(tries.function) else _first_read(WAYS, tries)


def _of_floats(tries: _Tries, *, knows_tiles: bool = False, lanes: LaneReading | None = None) -> list[LaunchGrid]:
    """Read a launch operation by operation."""
    function, arguments, choices = tries.prepared.function, tries.prepared.arguments, tries.choices
    how = replace(choices, knows_tiles=knows_tiles, lanes=lanes, lists_remainders=bool(lanes))
    return _checked(tries, _kernels(tries.of(function, arguments, how)))


def _checked(tries: _Tries, made: list[LaunchGrid]) -> list[LaunchGrid]:
    """Return the blocks of a launch, numbered; refuse accesses of its programs, or kernels, whose order is free."""
    check_programs([each.reader for each in made])
    for blocks in made:
        blocks.check_written()
        blocks.check_known()
    for each in tries.prepared.maxima:
        why = (
            "a reduction that chooses the greater of two numbers, or NaN, is computed as a maximum: the maximum "
            "of +0 and -0 is +0 (the minimum is -0)"
        )
        made[0].reader.notes.append(f"{each.line}: {why}")
    for load in tries.prepared.kept:
        why = "a value that the program stored is not loaded again: a later loop computes it again, and the time "
        made[0].reader.notes.append(f"{load.line}: {why}includes this")
    for i, one in enumerate(made[1:], 2):
        one.number = i
    return made


def _of_integers(tries: _Tries) -> list[LaunchGrid]:
    """Read a kernel that only computes integers as a kernel that stores them."""
    result = list[LaunchGrid]()
    for i, (own, given, size) in enumerate(known_kernels(tries.function, tries.arguments, tries.grid)):
        one = placed(read_launch(own, given, size, tries.choices))
        one.number, one.known = i + 1 if i else 0, (own, given, size)
        result.append(one)
    if result:
        why = "the kernel computes only integers, which are known at launch; the time covers the stores of the results"
        result[0].reader.notes.append(f"{tries.function.name}: {why}, not the kernel's other instructions")
    return result


def _each_in_its_way(tries: _Tries) -> list[LaunchGrid]:
    """Read a kernel for each tensor, each of them in the first way that reads it."""
    parts = results_apart(tries.prepared.function)
    of_each = [_first_read(OF_PARTS, tries.of(part, tries.prepared.arguments)) for part in parts]
    made = [one for of in of_each for one in of]
    if made:
        why = f"npusim reads the kernel as {len(made)} kernels, each in its own way; `output` is the first one's result"
        made[0].reader.notes.append(f"{tries.function.name}: {why}; {_IN_TURN}")
        _share_code(parts, of_each)
    return _checked(tries, made) if made else []


def _by_lanes(axes: int) -> list[Way]:
    """Return the ways to read blocks of at most ``axes`` axes lane by lane: along a loop's axis, and apart."""
    return [
        Way(
            f"lane by lane, {axes} axes, {'along' if is_along else 'apart'}",
            partial(_of_floats, knows_tiles=True, lanes=LaneReading(axes, is_along)),
            _always if is_along else _has_loops,
            is_reported=False,
        )
        for is_along in (True, False)
    ]


def _on_lanes(tries: _Tries) -> list[LaunchGrid]:
    """Read a kernel on blocks of one or two axes whose lanes are those of other blocks."""
    fault: ProgramError | None = None
    for function in with_lanes_pulled(tries.function):
        try:
            made = _first_read(OF_PARTS, tries.of(function, tries.arguments))
        except ProgramError as error:
            fault = error
            continue
        why = (
            "npusim reads blocks of three axes, or blocks that are reshaped, joined, split or transposed, lane by "
            "lane as blocks of one or two axes; the time is that of these, with a load for each order of lanes"
        )
        made[0].reader.notes.append(f"{function.name}: {why}")
        return made
    if fault is not None:
        raise fault
    return []


#: The ways to read a kernel, for a launch that is read as several kernels.
OF_PARTS = (
    Way("operation by operation", _of_floats),
    Way("with known tiles of integers and masks", partial(_of_floats, knows_tiles=True), _has_loops, is_reported=False),
    *_by_lanes(1),
    *_by_lanes(2),
    Way(
        "lane by lane, 2 axes, iterations one after another",
        partial(_of_floats, knows_tiles=True, lanes=LaneReading(2, is_along=True, writes_out=True)),
        _has_loops,
        is_reported=False,
    ),
)
OF_LAUNCHES = (
    *OF_PARTS,
    Way("only integers", _of_integers),
    Way("each tensor in a way of its own", _each_in_its_way, is_reported=False),
    Way("on lanes of its blocks", _on_lanes, is_reported=False),
)


def launched(
    function: Function,
    arguments: Mapping[str, Any],
    grid: tuple[int, ...],
    choices: Choices,
    check: Check | None = None,
) -> list[LaunchGrid]:
    """Return the blocks of a launch.

    A kernel whose results have different shapes is read as one kernel for each result, and a kernel whose programs
    compute different things as one for each kind of program.  ``check``: a way whose blocks it refuses has failed.
    Raises `ProgramError` if no way can read the kernel.
    """
    if any(n not in arguments and is_further(n) for n in function.parameters):
        why = "pointers from addresses, and pointers to a second type of elements, are read in recorded calls only"
        raise ProgramError(f"{function.operations[0].line}: {function.name}: {why}; record the call")
    return _first_read(OF_LAUNCHES, _Tries(function, arguments, grid, choices, check=check))
