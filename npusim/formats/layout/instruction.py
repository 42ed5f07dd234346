"""Matrix instructions of NVIDIA GPUs and the fragments of their operands.

The maps are derived from the behaviour of the hardware, not entered by hand:

* **Volta, m8n8k4** (HMMA.884).  A quad pair is two threadgroups of four lanes.  Threadgroup g reads
  rows 4g to 4g+3 of A and columns 4g to 4g+3 of B, each lane has one 64-bit piece of memory.  The product runs in
  steps; each step multiplies rows of both A halves by one threadgroup's B and lets every lane write one aligned pair of
  32-bit registers (volta.md §1, §5).
* **Ampere, m16n8k8 and m16n8k16**.  Operands are 8 x 8 blocks in which lane l holds two neighbours
  of row l/4 (volta.md §2).
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from npusim.errors import LayoutError
from npusim.formats.layout.algebra import Layout, fitted
from npusim.formats.layout.fragment import WARP_LANES, Fragment, Operand, Order
from npusim.late_methods import dataclass

Accumulator = Literal["f16", "f32"]

#: The known instructions (PTX ISA, "Matrix Fragments for mma.m8n8k4 ...", "... mma.m16n8k16 ...").
INSTRUCTIONS = ("m8n8k4", "m16n8k8", "m16n8k16")

#: Volta: lanes of a threadgroup, and rows of A and columns of B that it reads (volta.md §1, §5).
_THREADGROUP = 4
#: Volta: bits of A or B that a lane reads, and bits of D that it writes in a step (volta.md §1).
_PIECE_BITS = 64
#: Ampere: rows and columns of the blocks that form operands (PTX ISA; volta.md §2).
_BLOCK = 8
_HALF_BITS = 16


@dataclass(frozen=True)
class MmaInstruction:
    """A matrix instruction of one warp, D = A·B + C, with the maps of its operands.

    ``steps`` are the machine's instructions (HMMA.884) in order, empty if they are not modelled: in step (row, column),
    threadgroup g of a quad pair computes the part of D that begins at row ``4g + row`` and at ``column``.
    """

    name: str
    m: int
    n: int
    k: int
    accumulator: Accumulator
    a: Fragment
    b: Fragment
    c: Fragment
    steps: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}.{self.a.order}.{self.b.order}.{self.accumulator}"

    def operand(self, name: str) -> Fragment:
        """Return the fragment of ``A``, ``B``, or ``C`` (D has the same fragment); raise `LayoutError` for another
        name.
        """
        match name.upper():
            case "A":
                return self.a
            case "B":
                return self.b
            case "C" | "D":
                return self.c
        raise LayoutError(f"{self.name} has no operand {name!r}: choose a, b or c")


def instruction(name: str, *, acc: str = "f32", a: str = "row", b: str = "col") -> MmaInstruction:
    """Return one of `INSTRUCTIONS` by its shape; ``acc`` is the format of C and D, ``f16`` or ``f32``.

    ``a`` and ``b`` are the orders of A and B in memory, ``row`` or ``col``; only m8n8k4 offers a choice. Raises
    `LayoutError` if there is no such instruction, accumulator or order.

    Examples
    --------
    >>> volta = instruction("m8n8k4", acc="f32")
    >>> str(volta.c.layout), len(volta.steps)
    ('((2,2,2),(2,2,2)):((1,16,4),(8,2,32))', 4)
    >>> str(instruction("m16n8k16").c.layout)
    '((4,8),(2,2)):((32,1),(16,8))'
    """
    if name not in INSTRUCTIONS:
        raise LayoutError(f"unknown instruction {name!r}: choose one of {', '.join(INSTRUCTIONS)}")
    if acc not in ("f16", "f32"):
        raise LayoutError(f"{name}: accumulator {acc!r}: choose f16 or f32")
    for operand, order in (("A", a), ("B", b)):
        if order not in ("row", "col"):
            raise LayoutError(f"{name}: {operand} {order!r}: choose row or col")
    if name != "m8n8k4" and (a, b) != ("row", "col"):
        raise LayoutError(f"{name}: A is always row and B col, not {a} and {b} (PTX ISA)")
    accumulator: Accumulator = "f16" if acc == "f16" else "f32"
    first: Order = "row" if a == "row" else "col"
    second: Order = "row" if b == "row" else "col"
    return _volta(accumulator, first, second) if name == "m8n8k4" else _ampere(name, accumulator)


# ---------------------------------------------------------------- Volta


@cache
def _volta(acc: Accumulator, a: Order, b: Order) -> MmaInstruction:
    side, depth = 2 * _THREADGROUP, 4  # m8n8k4: m = n = 8, k = 4
    bits = 16 if acc == "f16" else 32
    # Four lanes write 64 bits each, down the rows, for one half of B at a time.
    rows_of_step = _PIECE_BITS // bits
    steps = tuple((row, _THREADGROUP * half) for half in (0, 1) for row in range(0, _THREADGROUP, rows_of_step))
    # Quad pair q: lanes 4q to 4q+3, and the same 16 lanes further on (PTX ISA; volta.md §1).
    lanes = Layout(((4, 2), 4), ((1, 16), 4))

    def fragment(operand: Operand, order: Order, rows: int, columns: int) -> Fragment:
        layout = _accumulator(steps, bits) if operand == "C" else _piecewise(operand, order, rows, columns)
        width = bits if operand == "C" else _HALF_BITS
        return Fragment("m8n8k4", operand, order, rows, columns, width, layout, lanes)

    return MmaInstruction(
        "m8n8k4",
        side,
        side,
        depth,
        acc,
        a=fragment("A", a, side, depth),
        b=fragment("B", b, depth, side),
        c=fragment("C", "row", side, side),
        steps=steps,
    )


def _accumulator(steps: tuple[tuple[int, int], ...], bits: int) -> Layout:
    """Return (thread, value) -> row + 8 column of C, by walking the steps.

    Each step divides a threadgroup's block into 64-bit pieces of a row and distributes them to the lanes down the
    columns; a lane's register pair of step s holds the piece of step s.
    """
    size, piece = 2 * _THREADGROUP, _PIECE_BITS // bits
    places: dict[int, int] = {}
    for index, (first_row, first_column) in enumerate(steps):
        for thread in range(size):
            threadgroup, lane = divmod(thread, _THREADGROUP)
            row = threadgroup * _THREADGROUP + first_row + lane % piece
            column = first_column + lane // piece * piece
            for j in range(piece):
                places[thread + size * (piece * index + j)] = row + size * (column + j)
    return fitted(places.__getitem__, ((2, 2, 2), (2, 2, 2)))


def _piecewise(operand: Operand, order: Order, rows: int, columns: int) -> Layout:
    """Return (thread, value) -> row + rows · column of A or B.

    Lane l of threadgroup g reads row (``row``) or column (``col``) l of the 4 x 4 block that its
    threadgroup multiplies: 64 contiguous bits in memory.
    """
    threads = 2 * _THREADGROUP

    def element(index: int) -> int:
        thread, value = index % threads, index // threads
        threadgroup, lane = divmod(thread, _THREADGROUP)
        row, column = (lane, value) if order == "row" else (value, lane)
        if operand == "A":
            row += _THREADGROUP * threadgroup
        else:
            column += _THREADGROUP * threadgroup
        return row + rows * column

    assert rows * columns == threads * _PIECE_BITS // _HALF_BITS
    return fitted(element, ((2, 2, 2), (2, 2)))


# ---------------------------------------------------------------- Ampere


@cache
def _ampere(name: str, acc: Accumulator) -> MmaInstruction:
    rows, columns = 2 * _BLOCK, _BLOCK
    depth = int(name.rpartition("k")[2])
    lanes = Layout((WARP_LANES, 1), (1, 0))

    def fragment(operand: Operand, order: Order, height: int, width: int, bits: int) -> Fragment:
        layout = _blocks(height, width, is_transposed=operand == "B")
        return Fragment(name, operand, order, height, width, bits, layout, lanes)

    return MmaInstruction(
        name,
        rows,
        columns,
        depth,
        acc,
        a=fragment("A", "row", rows, depth, _HALF_BITS),
        b=fragment("B", "col", depth, columns, _HALF_BITS),
        c=fragment("C", "row", rows, columns, _HALF_BITS if acc == "f16" else 2 * _HALF_BITS),
    )


def _blocks(rows: int, columns: int, *, is_transposed: bool) -> Layout:
    """Return (lane, value) -> row + rows · column of a matrix of 8 x 8 blocks.

    Lane l holds element 2(l % 4) and the next one of row l // 4 of each block (of column l // 4, if the block is
    transposed); blocks follow one another down the columns (PTX ISA; volta.md §2).
    """

    def element(index: int) -> int:
        lane, value = index % WARP_LANES, index // WARP_LANES
        row, column = lane // 4, 2 * (lane % 4) + value % 2
        if is_transposed:
            row, column = column, row
        block = value // 2
        row += _BLOCK * (block % (rows // _BLOCK))
        column += _BLOCK * (block // (rows // _BLOCK))
        return row + rows * column

    halvings = (rows * columns // WARP_LANES).bit_length() - 1
    return fitted(element, ((2,) * 5, (2,) * halvings))
