"""The form of an algorithm: phases of blocks, loops over tiles, named stages, names declared once.

The computation on one tile is written once, as a straight sequence of :class:`Instruction` (matrix products included)
that is divided into named stages (:class:`Stage`).  Names represent tiles; a machine binds each to storage whose format
the precision chose. The same bound instructions give the values and the costs.
"""

from __future__ import annotations

import math
from dataclasses import field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol

from npusim.errors import ProgramError
from npusim.formats import get_format, stored_format
from npusim.late_methods import dataclass
from npusim.program.ir.content import record
from npusim.program.ir.op import PLAIN, SOURCES, Attributes, Opcode, Step, goes_down
from npusim.program.ir.opaque import varying

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from npusim.program.ir.op import Source
    from npusim.program.ir.tile import GlobalTensor, GlobalTile

#: The meaning of a name, for diagnosis, pages and messages.  The storage of a name follows from its writers and readers
#: (`npusim.kernels.form.flow`).
Role = Literal[
    "operand", "mask", "score", "weight", "partial", "max", "sum", "mean", "decay", "gain", "output", "result", "work"
]


@dataclass(frozen=True, slots=True)
class Name:
    """One name of a phase's tables; memory holds the names in the order of declaration.

    axes
        Two axes for a tile, one for a row vector; the phase has the sizes.
    start
        Initial value of a state, which exists as long as its block.
    first
        Operand with whose values a state starts, in the operand's format; empty if the state starts at a number.
    label
        Label in traces and messages; the default is the name.
    """

    role: Role
    axes: tuple[str, ...]
    fmt: str
    start: float | None = None
    label: str = ""
    first: str = ""


@dataclass(frozen=True, slots=True)
class Instruction:
    """``dst = opcode(srcs)`` on names; ``only`` is the condition under which the instruction is executed; empty:
    always.

    A condition is either a constant of the phase (true if the constant is bound) or a condition of a run of tiles
    (``mask``: the tile needs a mask). ``line``: line number in the kernel, for messages.
    """

    opcode: Opcode
    dst: str
    srcs: tuple[str, ...]
    attributes: Attributes = PLAIN
    only: str = ""
    line: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        wanted = SOURCES[self.opcode]
        if len(self.srcs) not in wanted:
            raise ProgramError(
                f"{self.dst} = {self.opcode.name}({', '.join(self.srcs)}): the operation needs "
                f"{' or '.join(map(str, wanted))} sources, not {len(self.srcs)}"
            )

    @property
    def is_down(self) -> bool:
        """Whether the instruction reduces each column of a tile, and so needs all rows of the tile."""
        return goes_down(self.opcode, self.attributes)


Table = tuple[Instruction, ...]


@dataclass(frozen=True, eq=False)
class Stage:
    """A named sequence of rows: with one product (a *product stage*) or none (a *rows stage*); equal only to itself."""

    name: str
    rows: Table

    def __post_init__(self) -> None:
        products = sum(r.opcode is Opcode.MATMUL for r in self.rows)
        if products and len(self.rows) > 1:
            raise ProgramError(
                f"stage {self.name}: a product must be a separate stage; remove it from these {len(self.rows)} rows"
            )

    @cached_property
    def is_product(self) -> bool:
        """Whether it is a product stage."""
        return bool(self.rows) and self.rows[0].opcode is Opcode.MATMUL

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Names that the stage writes, each once, in order."""
        return tuple(dict.fromkeys(r.dst for r in self.rows))

    @cached_property
    def read(self) -> tuple[str, ...]:
        """Names and constants that the stage reads, each once, in order."""
        return tuple(dict.fromkeys(s for r in self.rows for s in r.srcs))


@record
class Visit:
    """The ``index``-th tile of a block's loop: ``cols`` along the loop's axis from ``col``.

    ``index`` and ``col`` may be opaque (`npusim.program.ir.opaque`): sums and products of a loop's index. ``only`` is
    the set of conditions of the run. A visit without ``cols`` is the whole block.
    """

    index: int
    col: int
    cols: int
    only: frozenset[str] = frozenset()

    @property
    def shape(self) -> Hashable:
        """Key that tiles with the same operations share."""
        return self.cols, self.only


#: Outside every loop.
WHOLE = Visit(0, 0, 0)


@record
class TileRun:
    """``count`` tiles of one shape. The first tile begins at ``col``, and each next tile begins ``step`` columns
    further.
    """

    col: int
    cols: int
    count: int
    step: int
    only: frozenset[str] = frozenset()

    @property
    def first(self) -> int:
        """Lowest coordinate of the run's tiles."""
        return min(self.col, self.col + (self.count - 1) * self.step)

    @property
    def last(self) -> int:
        """One past the highest coordinate of the run's tiles."""
        return max(self.col, self.col + (self.count - 1) * self.step) + self.cols

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """First coordinate of each stretch of tiles without a gap, and the first coordinate after it."""
        if self.count == 1 or abs(self.step) == self.cols:
            return [(self.first, self.last)]
        places = (self.col + i * self.step for i in range(self.count))
        return [(col, col + self.cols) for col in places]

    def reversed(self) -> TileRun:
        """Return the same tiles, from the last to the first."""
        end = self.col + (self.count - 1) * self.step
        return TileRun(end, self.cols, self.count, -self.step, self.only)

    def visit(self, index: int, place: int) -> Visit:
        """Return tile ``place`` of the run, the ``index``-th of its block."""
        return Visit(index, self.col + place * self.step, self.cols, self.only)


@record
class WorkTile:
    """One block: a head, a span of each axis of the grid, and the runs of tiles that its loop visits.

    ``spans`` are (axis, start, size); the axis of rows is the first. Query x sees keys up to ``x + causal_offset``.
    ``place`` is the slot of the block on a core with several resident blocks. ``before``: number of earlier blocks
    whose last tiles the core group still computes when this block begins. ``leaves_open``: the next block begins before
    the end of this block.
    """

    batch: int
    head: int
    spans: tuple[tuple[str, int, int], ...]
    runs: tuple[TileRun, ...] = ()
    causal_offset: int | None = None
    place: int = 0
    before: tuple[WorkTile, ...] = ()
    leaves_open: bool = False

    def __str__(self) -> str:
        axis, start, size = self.spans[0]
        return f"batch {self.batch} head {self.head} {axis}s {start}..{start + size - 1}"

    def span(self, axis: str) -> tuple[int, int] | None:
        """Return start and size along an axis of the grid."""
        for name, start, size in self.spans:  # not a generator, because it is requested for every block and operand
            if name == axis:
                return start, size
        return None

    @property
    def row(self) -> int:
        """First row."""
        return self.spans[0][1]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.spans[0][2]

    def part(self, row: int, rows: int) -> WorkTile:
        """Return a block of some rows of this block; it visits the same tiles."""
        return replace(self, spans=((self.spans[0][0], row, rows), *self.spans[1:]))

    def at(self, place: int) -> WorkTile:
        """Return the same block in another slot of its core."""
        around = self.before, self.leaves_open
        return WorkTile(self.batch, self.head, self.spans, self.runs, self.causal_offset, place, *around)

    @property
    def first(self) -> int:
        """Lowest coordinate that the loop visits."""
        return self.runs[0].first if len(self.runs) == 1 else min([r.first for r in self.runs])

    @property
    def last(self) -> int:
        """One past the highest coordinate that the loop visits."""
        return self.runs[0].last if len(self.runs) == 1 else max([r.last for r in self.runs])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes along the axes of the grid."""
        return tuple([size for _, _, size in self.spans])

    @property
    def shape(self) -> Hashable:
        """Key that blocks with the same operations have in common."""
        one = self.place, self.sizes, tuple([(r.cols, r.count, r.only) for r in self.runs]), self.causal_offset
        return (*one, tuple(b.shape for b in self.before), self.leaves_open) if self.before or self.leaves_open else one

    @property
    def tile_count(self) -> int:
        """Number of tiles that the loop visits."""
        return self.runs[0].count if len(self.runs) == 1 else sum([run.count for run in self.runs])

    @property
    def family(self) -> Hashable:
        """Key that blocks have in common whose operations differ only in the number of tiles."""
        return self.place, self.sizes, tuple([(r.cols, r.only) for r in self.runs])


#: Blocks of one shape run the same operations; blocks of one family run different numbers of the same operations.
SHAPE, FAMILY = attrgetter("shape"), attrgetter("family")


@dataclass(frozen=True, slots=True)
class TileLoop:
    """Stages that run for each tile along ``axis``; without an axis, once per block."""

    stages: tuple[Stage, ...]
    axis: str = ""


class Mask(Protocol):
    """A mask; the mask of each tile is cut from a constant tensor."""

    def tensor(self) -> GlobalTensor:
        """Return the constant tensor, int8."""

    def values(self) -> NDArray[Any]:
        """Return the tensor's values, 1 where a query sees a key."""

    def cut(self, row: int, rows: int, col: int, cols: int, offset: int | None) -> GlobalTile:
        """Return the part that is the mask of a tile of scores."""


@dataclass(frozen=True, slots=True)
class BySize:
    """A tensor for each size of a block along ``axis``; for example, the matrix M of PASA for each number of keys."""

    axis: str
    tensors: Mapping[int, GlobalTensor]

    def of(self, block: WorkTile) -> GlobalTensor:
        """Return the tensor for the size of a block."""
        span = block.span(self.axis)
        assert span is not None, self.axis
        return self.tensors[span[1]]


@dataclass(frozen=True, slots=True)
class Stacked:
    """A tensor of ``count`` matrices per head, one for each place along ``axis``: for example the partial results of
    splits.

    The matrices are along the batch axis: matrix (b, place) is batch ``b * count + place`` of the tensor.
    ``is_by_tile``: a loop reads the next matrix for each tile, or for every ``tiles`` tiles; the first matrix is that
    at the block's place along ``axis``. A loop also reads matrix after matrix if blocks do not have this axis.
    """

    axis: str
    count: int
    tensor: GlobalTensor
    is_by_tile: bool = False
    tiles: int = 1

    def after(self, index: int) -> int:
        """Return the distance, in matrices, from the block's place to the matrix of a tile, by the tile's number."""
        return index if self.tiles == 1 else varying(lambda i: i // self.tiles, index)


@dataclass(frozen=True, slots=True)
class Ends:
    """A one-row tensor; a tile or block reads the last value of its part along ``axis``, such as a chunk's last sum."""

    axis: str
    tensor: GlobalTensor


def tensor_of(bound: GlobalTensor | Stacked | Ends) -> GlobalTensor:
    """Return the tensor to which a name is bound."""
    return bound.tensor if isinstance(bound, Stacked | Ends) else bound


def nothing_per_tile(_tile: Visit) -> Mapping[str, float]:
    """Return no constants: they are the same for every tile."""
    return {}


@dataclass(frozen=True)
class Phase:
    """A grid of blocks, loops of stages over tiles, and final stages; a phase ends with its launch or a barrier.

    names
        Every name of the phase's tables, in the order of storage.
    sizes
        Largest span of each axis, in a block or a tile.
    tensors
        Tensors to which operands and results are bound.
    constants
        Values bound by name; ``per_tile(tile)`` returns the values that differ between tiles.
    masks
        Masks from which names with the role mask are cut, for a run of tiles that needs one and for blocks without
        runs.
    values
        Functions that compute constant tensors, by the tensor's name.
    arithmetic
        Registry name of the products' arithmetic; empty: the device's.
    arithmetic_by_format
        Registry name of the arithmetic of products, by the format of the left factor; empty for the device's own.
    compiled
        Digest of the choices of compiled code that decide bits, ``?`` if one is unknown; empty if there is no compiled
        code.
    is_compiled
        Whether a compiler, not the kernel's author, places the values of rows in memory: it may assign the bytes of a
        dead value again.
    slice_elements
        Elements of the widest tile that a vector unit processes at a time; 0: the machine's default.
    pieces
        On a GPU, number of elements along an axis that the kernel copies at a time from operands of products with this
        axis; the whole axis, if it is not named. Operands that only rows read are loaded after these pieces.
    is_named
        Whether the names of the phase's rings begin with its name, because another phase has the program's main loop.
    operator
        Name of the framework's operator that the phase runs, and its share of masked elements; None for other phases.
    finite_starts
        Whether states that the kernel starts at -Inf start at the lowest finite number if a tile may hide all its keys
        from a row: a choice of the kernel's author.
    is_joined
        Whether the phase belongs to the launch of the previous phase, after a barrier of all cores.
    flops, notes
        Operations that count for the phase's rate (None: the problem's); notes of every result.
    precision_fields
        Attributes of the precision that the kernel reads; None: unknown.
    walks
        Axes along which the loop advances together; empty: along the loop's axis.
    still
        Operands with such an axis, of which every tile, or block, uses the part at the first row or column.
    looked_up
        Operands whose places in memory are integers that the loop of a compiled kernel loads, tile by tile.
    sums
        Form of a phase without products in a library for GPUs. ``accesses``: each lane waits for 16 bytes before it
        loads more (FlashAttention-2's conversion of dQ). ``outputs``: the time of each element of the result is stated
        (PyTorch's sums along an axis that is not the last). Empty: all loads of a tile are in flight together.
    """

    name: str
    names: Mapping[str, Name]
    cells: Sequence[WorkTile]
    sizes: Mapping[str, int]
    loops: tuple[TileLoop, ...]
    tensors: Mapping[str, GlobalTensor | BySize | Stacked | Ends]
    finish: tuple[Stage, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    per_tile: Callable[[Visit], Mapping[str, float]] = nothing_per_tile
    masks: Mapping[str, Mask] = field(default_factory=dict)
    values: Mapping[str, Callable[[], NDArray[Any]]] = field(default_factory=dict)
    arithmetic: str = ""
    arithmetic_by_format: Mapping[str, str] = field(default_factory=dict)
    compiled: str = ""
    is_compiled: bool = False
    slice_elements: int = 0
    pieces: Mapping[str, int] = field(default_factory=dict)
    is_named: bool = False
    operator: tuple[str, float] | None = None
    finite_starts: bool = False
    is_joined: bool = False
    flops: int | None = None
    notes: tuple[str, ...] = ()
    precision_fields: tuple[str, ...] | None = None
    walks: tuple[str, ...] = ()
    still: frozenset[str] = frozenset()
    looked_up: frozenset[str] = frozenset()
    sums: Literal["", "accesses", "outputs"] = ""

    @property
    def walked(self) -> tuple[str, ...]:
        """Axes along which the loop advances together."""
        return self.walks if self.loop_axis in self.walks else (self.loop_axis,)

    @cached_property
    def by_tile(self) -> frozenset[str]:
        """Names that are bound to a stack with one matrix for each tile of the loop: either declared so, or without an
        axis of the phase.
        """
        stacks = {n: bound for n, bound in self.tensors.items() if isinstance(bound, Stacked) and self.loop_axis}
        axes = {*self.walked, *(a for a, *_ in self.cells[0].spans)}
        return frozenset(n for n, bound in stacks.items() if bound.is_by_tile or bound.axis not in axes)

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether a tile's products read results of the previous tile, so that no operation runs ahead."""
        states = {n for n, what in self.names.items() if what.start is not None and len(what.axes) > 1}
        rows = [r for loop in self.loops if loop.axis for s in loop.stages for r in s.rows]
        while more := {r.dst for r in rows if states.intersection(r.srcs)} - states:
            states |= more
        return any(states.intersection(r.srcs) for r in rows if r.opcode is Opcode.MATMUL)

    @cached_property
    def factors(self) -> frozenset[str]:
        """Names that a product reads completely for each part of its rows: right factors and transposed left
        factors.
        """
        rows = [s.rows[0] for s in self.stages if s.is_product]
        return frozenset((*(r.srcs[1] for r in rows), *(r.srcs[0] for r in rows if r.attributes.transpose_a)))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages in order."""
        return (*(s for loop in self.loops for s in loop.stages), *self.finish)

    @property
    def row_axis(self) -> str:
        """Axis of the rows that the stages write."""
        return self.cells[0].spans[0][0]

    @cached_property
    def row_grain(self) -> int:
        """Number of rows that must not be divided: rows of a block with one scale, of a square that is inverted, and of
        a tile whose columns are reduced.
        """
        if whole := [self.names[r.dst].axes[1] for s in self.stages for r in s.rows if r.opcode is Opcode.INVERSE]:
            return max(self.sizes[a] for a in whole)
        down = [r.srcs[0] for s in self.stages for r in s.rows if r.is_down]
        if down := [self.names[str(n)].axes[0] for n in down]:
            return max(self.sizes[a] for a in down)
        casts = (r for s in self.stages for r in s.rows if r.opcode is Opcode.CAST and r.attributes.axis != PLAIN.axis)
        return max((stored_format(self.names[r.dst].fmt).scale_block for r in casts), default=1)

    @property
    def loop_axis(self) -> str:
        """Axis along which the phase loops over tiles; empty if it has no such loop."""
        return next((loop.axis for loop in self.loops if loop.axis), "")

    def product_axes(self, row: Instruction) -> tuple[str, str, str]:
        """Return the axes of a product's rows, of its sum and of its columns, independent of how its operands are
        stored.
        """
        a, b = (self.names[n].axes for n in row.srcs)
        (m, k), n = a[:: -1 if row.attributes.transpose_a else 1], b[0 if row.attributes.transpose_b else 1]
        return m, k, n

    def label(self, name: str) -> str:
        """Return the label of a name in traces and messages."""
        return self.names[name].label or name

    def all_tensors(self) -> Iterator[GlobalTensor]:
        """Yield every tensor that the phase reads or writes, constants included."""
        for bound in self.tensors.values():
            yield from bound.tensors.values() if isinstance(bound, BySize) else (tensor_of(bound),)
        for mask in self.masks.values():
            yield mask.tensor()

    def all_values(self) -> dict[str, Callable[[], NDArray[Any]]]:
        """Return the functions that compute the phase's constant tensors, by name."""
        return {**{m.tensor().name: m.values for m in self.masks.values()}, **self.values}


def with_finite_starts(phase: Phase) -> Phase:
    """Return the phase with states that start at the lowest number instead of -Inf, if a mask may hide a whole tile
    from a row.

    This applies only if its kernel has ``finite_starts``.  A tile may hide all keys from a row before the row has a
    maximum: relative to a finite maximum, a score of -Inf has no weight; relative to -Inf, the result is NaN.  All
    queries under a causal mask see key 0: if tiles begin with it, nothing changes.
    """
    shows_key_0 = all(getattr(mask, "shows_key_0", True) for mask in phase.masks.values())
    firsts = {runs[0] for block in phase.cells if (runs := block.runs)} if phase.finite_starts else ()
    if all(not run.only or (run.col == 0 and shows_key_0) for run in firsts):
        return phase
    changed = {n: what for n, what in phase.names.items() if what.start == -math.inf}
    names = {n: replace(what, start=-float(get_format(what.fmt).max_finite)) for n, what in changed.items()}
    start = "starts at the lowest finite number, not at -Inf (finite_starts)"
    why = "a tile of which a row sees no key then has weight 0"
    notes = [f"{', '.join(map(phase.label, names))}: {start}; {why}"] if names else []
    return replace(phase, names={**phase.names, **names}, notes=(*phase.notes, *notes))


def from_last(phase: Phase) -> Phase:
    """Return the phase whose blocks visit their tiles from the last to the first."""
    cells = tuple(replace(b, runs=tuple(r.reversed() for r in b.runs[::-1])) for b in phase.cells)
    return with_finite_starts(replace(phase, cells=cells))


def choose(table: Table, choices: Mapping[Opcode, Attributes]) -> Table:
    """Return the table with a precision's attributes for each opcode; a row's own attributes are unchanged."""
    return tuple(replace(r, attributes=choices.get(r.opcode, PLAIN)) if r.attributes == PLAIN else r for r in table)


def bind(table: Table, tiles: Mapping[str, Source], stage: str = "", first: int = 1) -> tuple[Step, ...]:
    """Return the table's rows as steps on the bound tiles.

    If a row is omitted, its destination becomes another name of its first source.  A cast between a tile and itself is
    omitted: the precision assigned one format to both names, and the machine one storage.  An unbound name raises
    :class:`ProgramError`, which names the ``stage`` and the row, counted from ``first``.
    """
    steps = []
    for at, r in enumerate(table, first):
        if r.only and r.only not in tiles:
            if r.dst not in r.srcs and r.srcs[0] in tiles:
                tiles = {**tiles, r.dst: tiles[r.srcs[0]]}
            continue
        try:
            dst, srcs = tiles[r.dst], tuple(tiles[s] for s in r.srcs)
        except KeyError as missing:
            raise ProgramError(
                f"stage {stage}, row {at}, {r.opcode.name} {r.dst} = {', '.join(r.srcs)}: {missing} is neither a "
                "constant nor written before"
            ) from None
        if isinstance(dst, float | int):
            raise ProgramError(f"stage {stage}, row {at}: {r.opcode.name} writes {r.dst}, which is a constant")
        if r.opcode is Opcode.CAST and dst == srcs[0]:
            continue
        steps.append(Step(r.opcode, dst, srcs, r.attributes, r.dst))
    return tuple(steps)
