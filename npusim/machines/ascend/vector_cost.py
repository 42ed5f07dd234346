"""What a step costs on a vector unit: instructions, repeats, and the banks they meet in.

An instruction costs ``head + slope * repeats + tail``; dependent ones follow each other with a
barrier between, so that each pays its head and tail.  The slope of an instruction with two sources
depends on where its operands lie: two that share a bank group are read one after the other.
"""

from __future__ import annotations

from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.errors import ProgramError, UnknownOpcodeError
from npusim.formats import get_format
from npusim.ir.op import Opcode, Step
from npusim.ir.tile import GlobalTile, Operand, RingTile, Tile
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from npusim.config.device import BankSpec
    from npusim.config.engine import VectorEngine, VectorOpSpec
    from npusim.config.quantity import Quantity
    from npusim.ir.cost import Terms

def vector_cycles(
    step: Step, spec: VectorEngine, banks: BankSpec | None, key: str
) -> tuple[int, Terms]:
    """Return a step's cycles and the constants behind them; ``key`` is the engine's in its file.

    Raises :class:`UnknownOpcodeError` for a step the unit has no instruction for.
    """
    row = VECTOR_COSTS.get(step.opcode)
    if row is None:
        raise UnknownOpcodeError(f"{step.opcode.name} has no cost on {key}")
    total, terms = 0.0, dict[str, float]()
    for name, count in row(step, spec):
        op = spec.op(name)
        slope_name, slope = _slope(step, op, banks)
        fixed = op.head_cycles.value + op.tail_cycles.value
        total += slope.value * count + fixed
        for part, cycles in ((slope_name, slope.value * count), ("head_cycles", float(fixed))):
            where = f"{key}.ops.{name}.{part}"
            terms[where] = terms.get(where, 0.0) + cycles
    return ceil(total), tuple(terms.items())


def signature(step: Step) -> tuple[Hashable, ...]:
    """Return what :func:`vector_cycles` looks at: the same for the same work of another core."""
    found: list[Hashable] = [step.opcode, step.attributes.order]
    for operand in (step.dst, *step.srcs):
        if isinstance(operand, (Tile, RingTile)):
            found += (operand.rows, operand.cols, operand.stride, operand.fmt, _place(operand))
        else:
            found.append(operand)
    return tuple(found)


def _slope(step: Step, op: VectorOpSpec, banks: BankSpec | None) -> tuple[str, Quantity]:
    """Return the slope that holds for the places of a step's operands, and its name."""
    tiles = [s for s in step.srcs if isinstance(s, (Tile, RingTile))]
    dst = step.dst
    free = ("slope_cycles_per_repeat", op.slope_cycles_per_repeat)
    if banks is None or dst.cols == 1:
        return free
    full = [t for t in tiles if t.cols > 1]
    if len(full) < len(tiles) and op.slope_repeated_block_cycles_per_repeat is not None:
        return "slope_repeated_block_cycles_per_repeat", op.slope_repeated_block_cycles_per_repeat
    if len(full) > 1 and op.slope_conflict_cycles_per_repeat is not None:
        first, second = (_place(t) for t in full[:2])
        if first != second and _group(first, banks) == _group(second, banks):
            return "slope_conflict_cycles_per_repeat", op.slope_conflict_cycles_per_repeat
    if op.slope_read_write_conflict_cycles_per_repeat is not None and isinstance(
        dst, (Tile, RingTile)
    ):
        target = _place(dst)
        for source in map(_place, full):
            if source != target and _bank(source, banks) == _bank(target, banks):
                return (
                    "slope_read_write_conflict_cycles_per_repeat",
                    op.slope_read_write_conflict_cycles_per_repeat,
                )
    return free


def _place(tile: Tile | RingTile) -> int:
    """Return a tile's address; a ring's slots are whole rows of banks apart, so its first will do."""
    return tile.offset_bytes + (tile.ring.offset_bytes if isinstance(tile, RingTile) else 0)


def _group(address: int, banks: BankSpec) -> int:
    return address // banks.row_bytes.value % banks.group_count.value


def _bank(address: int, banks: BankSpec) -> tuple[int, int]:
    """Return group and bank within it: addresses walk the groups first, then a bank's rows."""
    span = banks.row_bytes.value * banks.group_count.value * banks.rows_count.value
    return _group(address, banks), address // span


Instructions = list[tuple[str, int]]


def repeats(operand: Operand, spec: VectorEngine, fmt: str | None = None) -> int:
    """Return the repeats an instruction needs for a tile: whole ones for gapless rows, else per row."""
    size = get_format(fmt or operand.fmt).size_bytes
    repeat = spec.repeat_bytes.value
    stride = operand.cols if isinstance(operand, GlobalTile) else operand.stride
    if stride == operand.cols:
        return ceil_div(operand.rows * operand.cols * size, repeat)
    return operand.rows * ceil_div(operand.cols * size, repeat)


def _elementwise(name: str) -> Callable[[Step, VectorEngine], Instructions]:
    def instructions(step: Step, spec: VectorEngine) -> Instructions:
        tiles = [s for s in step.srcs if isinstance(s, (Tile, RingTile, GlobalTile))]
        chosen = "scalar" if name == "binary" and len(tiles) < len(step.srcs) else name
        if chosen in ("exp", "log", "div"):
            chosen = f"{name}_{step.dst.fmt}"
        # An operand with gaps between its rows needs repeats of its own for each row.
        whole = [step.dst, *(t for t in tiles if t.cols == step.dst.cols)]
        found = [(chosen, max(repeats(t, spec, step.dst.fmt) for t in whole))]
        # A column operand is first spread to one 32-byte block a row (brcb: 8 rows a repeat).
        for tile in tiles:
            if tile.cols == 1 and step.dst.cols > 1:
                blocks = spec.repeat_bytes.value // spec.block_bytes.value
                found.insert(0, ("broadcast", ceil_div(tile.rows, blocks)))
        return found

    return instructions


def _cast(step: Step, spec: VectorEngine) -> Instructions:
    src = step.srcs[0]
    wider = max(
        (o for o in (step.dst, src) if not isinstance(o, float)), key=lambda o: o.payload_bytes
    )
    own = f"cast_{step.dst.fmt}"
    return [(own if own in spec.ops else "cast", repeats(wider, spec))]


def _reduction(step: Step, spec: VectorEngine) -> Instructions:
    """Return the passes of a row reduction: block reductions, or a tree of halves by vector adds."""
    src = step.srcs[0]
    if isinstance(src, float):
        raise ProgramError(f"{step.opcode.name} needs a tile")
    size = get_format(src.fmt).size_bytes
    found: Instructions = []
    cols = src.cols
    order = step.attributes.order or "vector_lanes"
    if order == "tree_halves":
        while cols > 1:
            half = cols // 2
            found.append(("binary", ceil_div(src.rows * half * size, spec.repeat_bytes.value)))
            cols -= half
        return found
    if order != "vector_lanes":
        raise UnknownOpcodeError(
            f"{step.opcode.name} in order {order!r} has no cost on this vector unit; "
            "it reduces by vector_lanes or tree_halves"
        )
    lanes = spec.block_bytes.value // size
    while cols > 1:
        found.append(("block_reduce", ceil_div(src.rows * cols * size, spec.repeat_bytes.value)))
        cols = ceil_div(cols, lanes)
    return found or [("copy", 1)]


#: Instructions of the vector unit behind each primitive operation, by name in the device file.
VECTOR_COSTS: Mapping[Opcode, Callable[[Step, VectorEngine], Instructions]] = MappingProxyType(
    {
        Opcode.COPY: _elementwise("copy"),
        Opcode.FILL: _elementwise("copy"),
        Opcode.CAST: _cast,
        Opcode.ADD: _elementwise("binary"),
        Opcode.SUB: _elementwise("binary"),
        Opcode.MUL: _elementwise("binary"),
        Opcode.MAX: _elementwise("binary"),
        Opcode.DIV: _elementwise("div"),
        Opcode.EXP: _elementwise("exp"),
        Opcode.LOG: _elementwise("log"),
        Opcode.SELECT: _elementwise("select"),
        Opcode.ROW_MAX: _reduction,
        Opcode.ROW_SUM: _reduction,
    }
)
