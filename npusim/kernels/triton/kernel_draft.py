"""The draft of a kernel of tiles: the choices that TTIR leaves open, loads, loops, names, axes and statements."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from inspect import signature
from itertools import chain, count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.errors import ProgramError
from npusim.formats.whole import whole_limits
from npusim.kernels.form.lowering import Kernel
from npusim.kernels.triton.integers import bits_of
from npusim.kernels.triton.ttir_text import EXACT, FORMATS, WHOLE, Function, Line, Op, makers, reached, shape_of
from npusim.kernels.triton.values import (
    Affine,
    Booleans,
    Condition,
    Descriptor,
    Elements,
    Floats,
    Integers,
    Known,
    Listed,
    ListedMask,
    Masking,
    Number,
    ValueComparison,
    constant,
)

if TYPE_CHECKING:
    from npusim.kernels.triton.tensor_axes import Access

#: Words of the language in which a kernel of tiles is written.
LANGUAGE = (
    *("exp", "log", "rsqrt", "sqrt", "tanh", "erf", "fma", "divided", "folded", "scanned"),
    *("integers", "bits"),
    *("maximum", "minimum", "compare", "where", "tiles", "full", "initial", "filled"),
)
#: Numbers that have a name in that language.
NUMBERS = MappingProxyType({"inf": math.inf, "nan": math.nan})
#: Names that a kernel of tiles has already.
_WORDS = frozenset({*LANGUAGE, *NUMBERS, "mask", "lambda", "out"})
#: Names in the call of a kernel of tiles that are not its operands, and that no operand may have.
_OF_CALLS = frozenset({"p", *signature(Kernel.phase).parameters})
#: Axes in a statement: they have names when all loads and stores are known (`npusim.kernels.triton.launch_phases`).
AXES_IN_TEXT = re.compile("'@([^']*)'")


class UnlikeProgramsError(ProgramError):
    """Programs do different things, so that no single kernel of tiles describes them all; ``some``: the programs that
    do one of these things.

    ``some`` has the numbers of these programs in the grid; all others do the other thing.
    """

    def __init__(self, message: str, some: Integers) -> None:
        super().__init__(message)
        self.some = frozenset(map(tuple, some.tolist()))


class UnsupportedError(ProgramError):
    """An operation that no way to read a launch supports."""


class NoStoreError(ProgramError):
    """The programs that are read store nothing."""


#: The choices in which ways to read a launch differ (`npusim.kernels.triton.launch_ways`).
WAYS = frozenset(
    {"lists_elements", "parts_by_loops", "lists_remainders", "chooses_lanes", "cuts", "listed_rows", "lists_in_order"}
    | {"fills_rows", "hides_elements", "adds_tiles", "knows_tiles", "unrolls", "loads_again", "ragged", "lanes"}
)

#: Choices that compiled code decides.
OF_CODE = frozenset({"fuses", "orders", "addends", "sums", "further"})


class LaneReading(NamedTuple):
    """Blocks that are read lane by lane: those of at most this number of ``axes``; with two, also numbers.

    ``is_along``: whether the lanes of a loop's iterations follow one another along its axis; if not, the lanes of each
    iteration have a separate place.  ``writes_out``: loops of few iterations, with the same number in every program,
    are written as their iterations one after another.
    """

    axes: int
    is_along: bool
    writes_out: bool = False


@dataclass(frozen=True)
class Choices:
    """Choices that TTIR leaves open: fresh products instead of chained ones, contraction, and the forms of functions.

    ``forms``: the text of functions and divisions of float32 that a unit or a library computes in its own way, by the
    operation of TTIR or the library's symbol. ``clamps_by_magnitude``: clamps of float32 between a number and its
    opposite take the smaller magnitude. ``order``: the order of every reduction that is not in ``orders``; empty if the
    precision states it. ``addends``: for the place of an addition that contracted one product, the place of the other
    product; `ROUNDED` for an addition that contracted none; otherwise empty. ``sums``: for the place of a product, the
    place of the additions of a sum that contracts such products. ``further``: lines whose additions the assembler
    contracts with divisions, as FILE:LINE. ``is_exact``: all values are float64, as in a reference. ``is_apart``: each
    loop has separate statements, on the same tiles. ``lists_elements``: elements by loaded integers, one element for
    each program, are a list of all programs. ``listed_rows``: tensors for which the rows of each block are a list of
    all programs, whatever its addresses are; with a period after the name, the rows of the block's part of a longer
    row. ``fills_rows``: rows that the mask of a load hides consist of the number that replaces them, and may be stored.
    ``adds_tiles``: fresh products of tiles are added one by one even if one product could represent them all, as when a
    program has only a part of them (split-K). ``hides_elements``: a list of a block's elements contains numbers for the
    elements that a mask of indices hides. ``lists_in_order``: lists of rows contain the rows of one program after
    another, in the order of the programs. ``lists_remainders``: a block's remainders that restart within it are a list
    of all programs. ``chooses_lanes``: all lanes are loaded, and a later choice replaces those that a mask hides in the
    same way in all programs: the ``first`` lanes, before those that the mask leaves, or ``all`` hidden lanes.
    ``parts_by_loops``: the part of a tensor that a loop visits is separate. ``cuts``: a block that has some columns of
    a tensor, the same in all programs, belongs to a part with only these columns; blocks of a tensor's flat indices
    belong to the part between the first and the last index. ``programs``: the programs that are read, by their numbers
    in the grid; empty: all programs. ``multiplied``: formats of factors that the matrix unit multiplies; empty: any.
    FP8 that it does not multiply becomes float16, which can represent all numbers of FP8. ``turns``: which blocks are
    turned (`npusim.kernels.triton.turned_blocks`). ``knows_tiles``: integers and masks of a loop's tiles that are known
    at launch are tiles of a tensor. ``ragged``: an axis of a tensor may consist of groups, the last of which is
    shorter.
    ``loads_again``: a block that is combined with itself along its other axis is loaded twice, and vectors along rows
    and along columns of one tensor are separate loads. ``lanes``: blocks that are read lane by lane
    (`npusim.kernels.triton.whole_lanes`); None: no block. ``unrolls``: a loop of few iterations, with the same number
    in every program, is written as its iterations one after another, if a mask of its loads has a lower bound; so is a
    loop of one iteration.
    ``converts_wide``: floats become integers of 16 bits instead of 8, and a store writes their low 8 bits (PTX).
    ``asked``: the choices in `WAYS` that a reading used; ``asked_of_code``: the choices in `OF_CODE` that any reading
    of the launch used.
    """

    is_fresh: bool
    fuses: bool
    forms: Mapping[str, str] = field(default_factory=dict)
    clamps_by_magnitude: bool = False
    order: str = ""
    orders: Mapping[str, str] = field(default_factory=dict)
    addends: Mapping[str, str] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)
    further: Sequence[str] = ()
    is_exact: bool = False
    is_apart: bool = False
    lists_elements: bool = False
    parts_by_loops: bool = False
    listed_rows: frozenset[str] = frozenset()
    lists_in_order: bool = False
    adds_tiles: bool = False
    fills_rows: bool = False
    hides_elements: bool = False
    cuts: bool = False
    lists_remainders: bool = False
    chooses_lanes: str = ""
    programs: tuple[tuple[int, ...], ...] = ()
    multiplied: frozenset[str] = frozenset()
    converts_wide: bool = False
    turns: str = ""
    knows_tiles: bool = False
    lanes: LaneReading | None = None
    unrolls: bool = False
    loads_again: bool = False
    ragged: bool = False
    asked: set[str] = field(default_factory=set, compare=False)
    asked_of_code: set[str] = field(default_factory=set, compare=False)

    def of_code(self, name: str) -> Any:
        """Return one of the choices that compiled code decides (`OF_CODE`), and note that a reading used it."""
        assert name in OF_CODE, name
        self.asked_of_code.add(name)
        return getattr(self, name)

    def way(self, name: str) -> Any:
        """Return one of the choices in which ways of reading differ (`WAYS`), and note that a reading used it."""
        assert name in WAYS, name
        self.asked.add(name)
        return getattr(self, name)

    def are_read_as(self, others: Choices) -> bool:
        """Return whether a kernel is read with these choices as with ``others``, judged by the choices that the reading
        with ``others`` used.
        """
        differing = {f.name for f in fields(self) if f.compare and getattr(self, f.name) != getattr(others, f.name)}
        return differing <= WAYS - others.asked

    def form(self, name: str, fmt: str, usual: str) -> str:
        """Return the text of a function of a format; ``usual``: its text if nothing computes it in a special way."""
        return self.forms.get(name, usual) if fmt == "f32" else usual

    def is_widened(self, fmt: str) -> bool:
        """Return whether factors of a format become float16: FP8 that the matrix unit does not multiply."""
        return fmt.startswith("f8") and "float16" in self.multiplied and self.fmt(fmt) not in self.multiplied

    def fmt(self, name: str) -> str:
        """Return the format that has this name in TTIR."""
        if self.is_exact:
            return "float64"
        return FORMATS.get(name) or EXACT.get(name) or WHOLE[name]


class LookedAt(NamedTuple):
    """Elements of a tensor of integers that programs load: the programs' numbers in the grid, and (programs, elements).

    -1 where a mask hides an element.
    """

    ids: Integers
    places: Integers
    line: Line


@dataclass
class Load:
    """One tensor as the kernel reads it; ``left``: number of visible elements along each axis of its mask.

    ``dims``: for each axis of the block the axis of the tensor, rows or columns; an axis of size 1 has the other one.
    ``after``: the number of stores before it; ``walk``: the number of its loop, from 1.
    """

    name: str
    of: str
    pointer: Affine
    axes: tuple[str | None, ...]
    left: list[Integers]
    is_walked: bool
    line: Line
    dims: tuple[int, ...]
    after: int
    walk: int

    @property
    def is_one_row(self) -> bool:
        """Whether each of its blocks is one row, which has an axis of rows."""
        return len(self.axes) == 2 and self.axes[0] is None

    def drop_rows(self) -> None:
        """Remove the axis of rows, which has one row; a mask that hides this row hides its columns."""
        (hidden, *left), pointer = self.left, self.pointer
        self.pointer = replace(pointer, steps=pointer.steps[1:], shape=pointer.shape[1:], left=pointer.left[1:])
        self.axes, self.dims = self.axes[1:], self.dims[1:]
        self.left = [np.where(hidden > 0, x, 0) for x in left]


#: A mask that leaves a first part of an axis: the axis, how many elements are left, and the kernel's line.
Bound = tuple[str | None, Integers, Line]


@dataclass
class Walk:
    """A loop over tiles: the iterations of each program, the statements, and the comparisons that mask scores.

    ``at``: number of statements of the kernel before it; ``loads``, ``states``: tensors that it visits, and states that
    begin with it; ``masked``: values that ``mask`` masks. ``is_sum``: the loop only adds products that a matrix unit
    starts from 0 for each block, so that one product of all tiles represents it.
    """

    counts: Integers
    at: int
    loads: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    lines: list[tuple[str, Line]] = field(default_factory=list)
    mask: Condition | Elements | None = None
    masked: list[str] = field(default_factory=list)
    is_sum: bool = False
    #: Iterations whose tiles are visited, (programs, iterations); None for all. In the other iterations an if leaves
    #: all states unchanged.
    done: Booleans | None = None
    #: Axes along which masks hide lanes only in some iterations, and whether they hide none in the first iteration of
    #: any program; and the value of each state where the loop begins.
    partial: dict[str | None, bool] = field(default_factory=dict)
    entered: dict[str, Floats] = field(default_factory=dict)
    #: Masks that leave the first part of an axis of a block without a load.
    bounds: list[Bound] = field(default_factory=list)
    #: For states, the name of the value that an iteration leaves in them, if the value has a name.
    last_values: dict[str, str] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Number of iterations of the program that has most; 2 if no program has more than one, for the place of a
        second iteration.
        """
        return max(2, int(self.counts.max()))

    @property
    def most_once(self) -> bool:
        """Whether every program has at most one iteration, and some have one."""
        return int(self.counts.max()) == 1

    def keep(self, programs: Integers) -> None:
        """Keep only some of the programs, in that order."""
        self.counts, self.mask = self.counts[programs], self.mask and self.mask.at(programs)
        self.done = self.done[programs] if self.done is not None and len(self.done) > 1 else self.done
        self.bounds = _of_programs(self.bounds, programs)


def _of_programs(bounds: list[Bound], programs: Integers) -> list[Bound]:
    """Return bounds of some programs, in that order."""
    return [(axis, x[programs] if len(x) > 1 else x, line) for axis, x, line in bounds]


@dataclass
class KnownBlock:
    """A mask, or indices, that are known at launch and read as data: the elements, or those of each program.

    ``elements``: along the axes of ``value``; if programs differ, after an axis of programs (``is_by_program``).
    """

    value: Floats
    elements: np.ndarray[Any, Any]
    line: Line
    is_by_program: bool = False

    def keep(self, programs: Integers) -> None:
        """Keep only some of the programs, in that order."""
        self.elements = self.elements[programs] if self.is_by_program else self.elements


@dataclass
class Stored(Load):
    """A stored value and its address; ``is_walked``: it is stored tile by tile, in a loop."""

    value: Floats


@dataclass
class HiddenLanes:
    """Facts of lanes that masks hide.

    ``unsteady``: states whose masked lanes change during the loop, as an earlier reading showed, each with whether no
    mask hides lanes in the first iteration. ``changed``: the same of this reading; ``lanes``: axes of each state.
    ``relied``: axes along which hidden lanes had to be known. ``unlike_rows``: axes whose hidden rows differ from
    hidden columns. ``uncut``: sums, maxima and products along axes that no mask cut there. ``unlike``: axes
    along which the tiles of two loops have different sizes, and a line of the second loop. ``windowed``: tensors with
    blocks in which a mask hides any elements. ``numbers``: the number of each load, if it has one. ``chosen``: choices
    by known masks: the mask's block, and the hidden values of the two blocks that it chooses from.
    """

    unsteady: Mapping[str, bool]
    changed: dict[str, bool] = field(default_factory=dict)
    lanes: dict[str, tuple[str | None, ...]] = field(default_factory=dict)
    relied: set[str | None] = field(default_factory=set)
    windowed: set[str] = field(default_factory=set)
    numbers: dict[str, float] = field(default_factory=dict)
    unlike_rows: set[str | None] = field(default_factory=set)
    uncut: list[tuple[Op, Floats, str, float]] = field(default_factory=list)
    unlike: list[tuple[str | None, Line]] = field(default_factory=list)
    chosen: dict[str, tuple[str, tuple[float | None, float | None] | None]] = field(default_factory=dict)


class Draft:
    """The known facts of one kernel at one launch, and the statements written so far."""

    def __init__(
        self,
        function: Function,
        arguments: Mapping[str, Any],
        grid: tuple[int, ...],
        choices: Choices,
        unsteady: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        self.function, self.arguments, self.grid, self.choices = function, dict(arguments), grid, choices
        ids = np.stack([x.ravel() for x in np.meshgrid(*map(np.arange, grid), indexing="ij")], 1)
        self.ids = ids[np.lexsort(ids.T)].astype(np.int64)  # the first runs fastest
        self.ids = np.array(choices.programs, np.int64) if choices.programs else self.ids
        self.programs = len(self.ids)  #: that are read
        self.values: dict[str, Known] = {}
        self.lines: list[tuple[str, Line]] = []
        self.loads: dict[str, Load] = {}
        self.stored: list[Stored] = []
        self.numbers: dict[str, float] = {}
        #: Masks and indices outside of loops that are read as data.
        self.seen = dict[str, KnownBlock]()
        self.states: dict[str, tuple[Number | Floats, tuple[str | None, ...], str]] = {}
        self.walks: list[Walk] = []
        #: Axes that a mask cuts; rows that remain after a sum or maximum along the other axis of a block; products:
        #: formats of their first factors and sums, and their places; ``precision``: ``input_precision`` of products of
        #: float32.
        self.cuts, self.left, self.products = set[str | None](), set[str](), set[tuple[str, str, str]]()
        self.precision, self.hidden = "", HiddenLanes(unsteady)
        #: Axes of blocks with elements that are loaded, but not known here.
        self.anew: set[str | None] = set()
        #: Masks outside of walked axes that leave the first part of an axis; sums and maxima along an axis, down rows.
        self.bounds: list[Bound] = []
        self.reduced, self.goes_down, self.reduced_vectors = (list[tuple[str | None, Line]]() for _ in range(3))
        #: Axes along which vectors have a value for each row of a tile.
        self.down: set[str | None] = set()
        self.notes: list[str] = []
        self.line = Line("", 0)  #: of the operation at hand
        #: Tensors of integers whose loads decide addresses and masks, and the elements that each program loads in this
        #: way; None for a tensor whose elements are not known.
        self.looked, self.looked_at = dict[str, Line](), dict[str, list[LookedAt] | None]()
        self.returned = 0  #: programs that have returned early
        #: Blocks by which recorded views are accessed, by argument.
        self.accesses: dict[str, list[Access]] = {}
        #: Whether numbers that are not -inf hide scores.
        self.hides_by_numbers = False
        self._roots, self._taken = dict[str, str](), set[str]()
        self._at_loop: frozenset[str] = frozenset()  # names in use where the first loop begins
        self._walk: Walk | None = None
        self._only: Any = None  # iterations of the loop in which its body has an effect
        self._uses: dict[str, list[Op]] = {}
        #: The values from which each value is computed, and the operations that load integers.
        self._sources: dict[str, tuple[str, ...]] = {}
        self._looks: dict[str, Op] = {}
        self._literals = set[str]()  # values that a compiler knows, computed only from constants of the kernel
        self._stores, self._store_masks = list[str](), list[str]()  # pointers and masks
        #: Comparisons with 0 that masks of stores contain, for lanes that are the same in all programs.
        self.stored_lanes = set[tuple[str, int, tuple[int, ...]]]()
        self.hides_first_lanes = False  #: whether a mask hides lanes before those that it leaves
        self._products, self._made = 0, list[Op]()  # all operations, including those of branches and loops
        self._count(function.operations)
        self._read_parameters(list(function.parameters.items()))

    def _read_parameters(self, parameters: list[tuple[str, str]]) -> None:
        """Give each parameter, and each part of a descriptor, its value."""
        while parameters:
            name, kind = parameters.pop(0)
            if not kind.startswith("!tt.tensordesc"):
                self.values[name] = self._argument(name, kind)
                continue
            block, tensor = shape_of(kind)[0], self.arguments[name]  # sizes and strides are the parameters after it
            given = *tensor.described, *tensor.described_by
            kinds = parameters[: len(given)]
            numbers = [self._whole(n, x, bits_of(kind)) for (n, kind), x in zip(kinds, given, strict=True)]
            self.values |= zip([n for n, _ in kinds], numbers, strict=True)
            del parameters[: len(numbers)]
            sizes, strides = tuple(numbers[: len(block)]), tuple(numbers[len(block) :])
            self.values[name] = Descriptor(replace(constant(0), of=name), sizes, strides, block)

    def _count(self, operations: Sequence[Op]) -> None:
        for op in operations:
            ends = [body[-1].operands for body in (op.body, op.otherwise) if body]
            of = *op.operands, *chain(*ends)
            self._sources |= dict.fromkeys(op.results, of)
            if op.name == "scf.for":
                self._sources |= {n: (start, *chain(*ends)) for n, start in zip(*_carried(op), strict=True)}
            if op.name == "arith.constant" or (of and self._literals.issuperset(of)):
                self._literals.update(op.results)
            if op.name == "tt.load" and shape_of(op.type)[1] not in FORMATS:
                self._looks[op.results[0]] = op
            if op.name in ("tt.store", "tt.descriptor_store"):
                self._stores.append(op.operands[0])
                self._store_masks += op.operands[2:] if op.name == "tt.store" else []
            for name in op.operands:
                self._uses.setdefault(name, []).append(op)
            self._products += op.name == "tt.dot"
            self._made.append(op)
            self._count(op.body)
            self._count(op.otherwise)

    def looked_up(self, name: str) -> dict[str, Op]:
        """Return the loads of integers from which a value is computed, by their results."""
        return {n: self._looks[n] for n in self._made_of(name) if n in self._looks}

    @cached_property
    def _makers(self) -> dict[str, Op]:
        """The operation of each result, also in branches and loops."""
        return makers(self._made)

    def _made_of(self, name: str) -> list[str]:
        """Return a value and all values from which it is computed."""
        return reached(name, self._sources)

    def _is_read_alone(self, of: str) -> bool:
        """Return whether no store of the kernel can be to a tensor."""
        return all(of not in self._made_of(pointer) for pointer in self._stores)

    def _name_of_operand(self, name: str) -> str:
        """Return a name for a tensor or a number as an operand of the kernel of tiles."""
        return self._unique(name, _OF_CALLS)

    def _argument(self, name: str, kind: str) -> Known:
        value = self.arguments[name]
        if "ptr" in kind:
            return replace(constant(0), of=name)
        if kind.startswith(("f", "bf")):
            called = self._name_of_operand(name.lower())
            self.numbers[called] = number = float(np.float32(value))
            return Number(number, called)
        return self._whole(name, value, bits_of(kind))

    def _whole(self, name: str, value: Any, bits: int) -> Affine:
        """Return an integer argument; an unsigned one may have the highest bit of its type."""
        low, high = whole_limits(bits)
        if not isinstance(value, int) or not low <= value <= (high if bits == 1 else 2 * high + 1):
            raise ProgramError(f"{self.function.name}: {name}: {value!r}; allowed: an integer of {bits} bits")
        return constant(value if value <= high else value - (1 << bits), bits=bits)

    def hides_loaded(self, walk: Walk, axis: str | None, most: Integers) -> bool | None:
        """Return whether a loop's tiles have more elements along an axis than a mask leaves; None if none has it."""
        known = [self.loads[n] for n in walk.loads if self.root(axis) in map(self.root, self.loads[n].axes)]
        is_visited = np.arange(walk.most)[None] < walk.counts
        for load in known:
            at = [self.root(a) for a in load.axes].index(self.root(axis))
            left = np.minimum(load.left[at], load.pointer.shape[at])[:, -walk.most :]  # the second of two loops
            if np.any((left > most) & is_visited):
                return True
        return False if known else None

    def is_read(self, iterations: int) -> Any:
        """Return the programs and iterations of the loop in which the current operations are executed, for this number
        of iterations.

        For one iteration: whether they are executed in any iteration of the loop.
        """
        known = np.ones((1, 1), bool) if self._only is None else self._only
        if self._walk is not None:
            known = known & (np.arange(self._walk.most)[None] < self._walk.counts)
        return known if known.shape[1] in (1, iterations) else known.any(1, keepdims=True)

    def program(self, number: int) -> str:
        """Return the name of a program: its numbers in the grid."""
        return f"program ({', '.join(map(str, self.ids[number]))})"

    def _axes(self, shape: Sequence[int]) -> tuple[str | None, ...]:
        fresh = (f"a{number}" for number in count(len(self._roots)))
        axes = tuple(next(fresh) if n > 1 else None for n in shape)
        self._roots |= {a: a for a in axes if a is not None}
        return axes

    def root(self, axis: str | None) -> str | None:
        """Return the axis that represents all axes that are the same."""
        while axis is not None and self._roots[axis] != axis:
            axis = self._roots[axis]
        return axis

    def _is_cut(self, axis: str | None) -> bool:
        """Return whether a mask hides elements along an axis, or along one that is the same."""
        return self.root(axis) in map(self.root, self.cuts)

    def _refuse_anew(self, op: Op, axis: str | None) -> None:
        """Raise `ProgramError` for a sum, maximum or product along an axis whose indices restart within a block."""
        if axis is not None and self.root(axis) in map(self.root, self.anew):
            raise op.fail(
                "a sum, maximum or tl.dot along an axis whose indices repeat within a block (%, tl.where) is not "
                "supported"
            )

    def _join(self, one: str | None, other: str | None) -> str | None:
        one, other = self.root(one), self.root(other)
        if one is not None and other is not None and one != other:
            self._roots[other] = one
        return one if one is not None else other

    def _joined(self, *values: Floats) -> tuple[str | None, ...]:
        axes = values[0].axes
        for other in values[1:]:
            axes = tuple(map(self._join, axes, other.axes))
        self._refuse_diagonal(axes, self.line)
        return axes

    def _refuse_diagonal(self, axes: Sequence[str | None], line: Line) -> None:
        """Raise `ProgramError` for a block whose rows and columns are one axis."""
        roots = [self.root(a) for a in axes if a is not None]
        if len(set(roots)) < len(roots):
            why = "a block has the same axis as its rows and as its columns, as in x[:, None] * x[None, :]"
            raise ProgramError(f"{line}: {why}; load x again through a pointer of its own")

    def _unique(self, name: str, but: frozenset[str] = frozenset()) -> str:
        """Return a name that the kernel of tiles does not have yet, and that is not in ``but``."""
        base = plain_name(name)
        base = f"{base}_" if base in _WORDS | but else base
        unique = next(n for n in chain([base], (f"{base}{i}" for i in count(2))) if n not in self._taken)
        self._taken.add(unique)
        return unique

    def _emit(self, text: str, line: Line) -> None:
        (self._walk.lines if self._walk else self.lines).append((text, line))

    def _set(self, op: Op, x: Known) -> None:
        self.values[op.results[0]] = x

    def _named(self, op: Op, x: Known, called: str = "") -> Any:
        """Return a value under a new name, because several expressions may read it."""
        if not isinstance(x, Floats) or (self.text(x).isidentifier() and not called):
            return x
        name = self._unique(called or op.results[0])
        self._emit(f"{name} = {self.text(x)}", op.line)
        return replace(x, text=name, is_product=False)

    def _spread(self, x: Floats, shape: Sequence[int]) -> Floats:
        """Return a block with new axes in place of axes of size 1 along which ``shape`` has more elements."""
        axes = tuple(a or b for a, b in zip(x.axes, self._axes(shape), strict=True))
        if axes == x.axes:
            return x
        named = " ".join(a for a in axes if a is not None)
        text = f"filled('@{named}', {self.text(x)}, {self.choices.fmt(x.fmt)!r})"
        return Floats(text, axes, x.fmt, x.pad if axes[-1] == x.axes[-1] else None)

    def text(self, x: Known) -> str:
        """Return the text of a float in the kernel of tiles."""
        assert isinstance(x, Floats | Number), x
        if isinstance(x, Floats) and x.is_transposed and all(x.axes):
            why = "a block that is loaded or computed transposed can only be a factor of tl.dot"
            raise ProgramError(f"{self.line}: {why}; for any other use, load it along its tensor's rows")
        is_product = isinstance(x, Floats) and x.is_product
        return f"{x.text}.to({self.choices.fmt(x.fmt)!r})" if is_product and isinstance(x, Floats) else x.text

    def unlike(self, op: Op, why: str, every: Booleans) -> ProgramError:
        """Return the error for programs that do different things; ``every``: which programs do one of them, (programs,
        1).
        """
        error = op.fail(why)
        if every.shape[1] > 1:
            return error
        does = np.broadcast_to(every, (len(self.ids), 1))[:, 0]
        return UnlikeProgramsError(str(error), self.ids[does])

    def _keep(self, programs: Integers) -> None:
        """Keep only some of the programs, in that order."""
        self.ids = self.ids[programs]
        for name, x in self.values.items():
            if isinstance(x, Affine | Condition | Elements):
                self.values[name] = x.at(programs)
            elif isinstance(x, Listed | ListedMask):
                self.values[name] = x.of_programs(programs)
            elif isinstance(x, Masking):
                self.values[name] = replace(x, of=x.of.at(programs))
            elif isinstance(x, ValueComparison) and x.within is not None:
                self.values[name] = replace(x, within=x.within.at(programs))
        for walk in self.walks:
            walk.keep(programs)
        for known in self.seen.values():
            known.keep(programs)
        for load in self.loads.values():
            load.pointer, load.left = load.pointer.at(programs), [x[programs] if len(x) > 1 else x for x in load.left]
        self.bounds = _of_programs(self.bounds, programs)


def _carried(loop: Op) -> tuple[list[str], list[str]]:
    """Return the names of a loop's carried values inside the loop, and their values at its start."""
    return loop.operands[4::2], loop.operands[5::2]


def plain_name(name: str) -> str:
    """Return the user's name of a value, without the number that TTIR adds."""
    base = re.sub(r"\W", "", re.sub(r"_\d+$", "", re.split("[#@]", name)[0])) or "t"
    return f"t{base}" if base[0].isdigit() else base
