"""Steps of a vector core as words of TileLang-Ascend."""

from __future__ import annotations

from math import isinf, isnan
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.errors import ProgramError
from npusim.machines.ascend.text_lines import TextLine
from npusim.program.ir.op import Opcode, goes_down

if TYPE_CHECKING:
    from typing import Protocol

    from npusim.program.ir.op import Source, Step
    from npusim.program.ir.tile import Operand

    class OperandText(Protocol):
        """The text of an operand."""

        def __call__(self, x: Operand) -> TextLine:
            """Return the text."""


_OF_TWO = MappingProxyType(
    {Opcode.ADD: "add", Opcode.SUB: "sub", Opcode.MUL: "mul", Opcode.DIV: "div", Opcode.MAX: "max", Opcode.MIN: "min"}
)
_OF_ONE = MappingProxyType({Opcode.EXP: "exp", Opcode.LOG: "ln", Opcode.SQRT: "sqrt", Opcode.RSQRT: "rsqrt"})
#: Words for operations on a tile and one number for each row.
_OF_ROWS = MappingProxyType({Opcode.SUB: "row_expand_sub", Opcode.MUL: "row_expand_mul", Opcode.DIV: "row_expand_div"})
_REDUCES = MappingProxyType({Opcode.ROW_MAX: "reduce_max", Opcode.ROW_SUM: "reduce_sum"})
_EXCHANGEABLE = frozenset({Opcode.ADD, Opcode.MUL, Opcode.MAX, Opcode.MIN})


def called(word: str, *operands: TextLine) -> TextLine:
    """Return a call up to its last operand."""
    result = TextLine(f"{word}(")
    for i, x in enumerate(operands):
        result = result.then((", " if i else "") + x.text, *x.numbers)
    return result


def refuse_rounding(step: Step) -> None:
    """Raise `ProgramError` for a cast that states a rounding."""
    if step.attributes.rounding or step.attributes.overflow:
        raise ProgramError("a cast with a stated rounding or overflow has no TileLang-Ascend text")


def vector_line(step: Step, text: OperandText) -> TextLine:
    """Return the line of a step whose operands are all in the memory of a vector core.

    Raises `ProgramError` for a step without a word.
    """
    opcode, dst, how = step.opcode, step.dst, step.attributes
    tiles = [x for x in step.srcs if not isinstance(x, float | int)]
    if not tiles and opcode is not Opcode.FILL:
        raise ProgramError(f"{_described(step)} of numbers has no TileLang-Ascend word")
    if opcode in _OF_ONE and not how.variant.startswith("exp2"):
        return called(f"T.tile.{_OF_ONE[opcode]}", text(dst), *map(text, tiles)).then(")")
    if opcode is Opcode.COPY and tiles[0].cols == dst.cols:
        return called("T.copy", text(tiles[0]), text(dst)).then(")")
    if opcode is Opcode.CAST:
        refuse_rounding(step)
        result = called("T.tile.cast", text(dst), text(tiles[0]))
        return result.then(f', "CAST_RINT", {dst.rows * dst.cols})')
    if opcode is Opcode.FILL:
        if not tiles:
            return called("T.tile.fill", text(dst)).then(f", {_number(step.srcs[0])})")
        return called("T.tile.broadcast", text(dst), text(tiles[0])).then(")")
    if opcode in _REDUCES and len(tiles) == 1 and not goes_down(opcode, how) and not how.variant:
        return called(f"T.{_REDUCES[opcode]}", text(tiles[0]), text(dst)).then(", dim=-1)")
    if opcode in _OF_TWO and not how.variant:
        return _of_two(step, text, tiles)
    raise ProgramError(f"{_described(step)} has no TileLang-Ascend word")


def _of_two(step: Step, text: OperandText, tiles: list[Operand]) -> TextLine:
    """Return the line of a function of two operands, of which the second may be one number, or one number for
    each row.
    """
    opcode, dst, (a, b) = step.opcode, step.dst, step.srcs
    if opcode in _EXCHANGEABLE and (isinstance(a, float | int) or (len(tiles) == 2 and a.cols < dst.cols)):
        a, b = b, a
    if isinstance(a, float | int) or a.cols != dst.cols or a.rows != dst.rows:
        raise ProgramError(f"{_described(step)} has no TileLang-Ascend word")
    if isinstance(b, float | int):
        return called(f"T.tile.{_OF_TWO[opcode]}", text(dst), text(a)).then(f", {_number(b)})")
    if (b.rows, b.cols) == (dst.rows, dst.cols):
        return called(f"T.tile.{_OF_TWO[opcode]}", text(dst), text(a), text(b)).then(")")
    if opcode in _OF_ROWS and (b.rows, b.cols) == (dst.rows, 1):
        return called(f"T.tile.{_OF_ROWS[opcode]}", text(dst), text(a), text(b)).then(")")
    raise ProgramError(f"{_described(step)} has no TileLang-Ascend word")


def _number(value: Source) -> str:
    assert isinstance(value, float | int)
    if isnan(value):
        raise ProgramError("a NaN has no TileLang-Ascend text")
    if isinf(value):
        return ("-" if value < 0 else "") + 'T.infinity("float32")'
    return repr(float(value))


def _described(step: Step) -> str:
    sizes = [f"{x.rows} x {x.cols}" for x in step.operands()[1:]]
    variant = f" ({step.attributes.variant})" if step.attributes.variant else ""
    how = f"of {' and '.join(sizes)} elements" if sizes else ""
    return f"{step.opcode.value}{variant} {how}".strip()
