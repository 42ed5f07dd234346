"""The buffers of a program's text: slots of rings, and tiles that one unit uses, each with its bytes and its name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import field
from types import MappingProxyType

from npusim.errors import ProgramError
from npusim.formats import stored_format
from npusim.late_methods import dataclass
from npusim.machines.ascend.group import GM
from npusim.machines.ascend.text_lines import Number, Slot, Sum, TextLine
from npusim.program.ir.tile import GlobalTensor, GlobalTile, RingTile, Tile

#: The word of the language that allocates a buffer, by its memory.
_ALLOCATES = MappingProxyType(
    {"L1": "alloc_L1", "L0A": "alloc_L0A", "L0B": "alloc_L0B", "L0C": "alloc_L0C", "UB": "alloc_ub"}
)
#: Formats that the language has under the same names.
_FORMATS = frozenset({"float16", "bfloat16", "float32", "int8"})
#: Names that the text uses for other purposes.
RESERVED = ("T", "tilelang", "main", "cid", "vid", "task", "block", "tiles")


def format_of(fmt: str) -> str:
    """Return the name of a format in the text; raise `ProgramError` if it has none."""
    if fmt not in _FORMATS:
        raise ProgramError(
            f"the format {fmt} has no TileLang-Ascend text; formats with one: {', '.join(sorted(_FORMATS))}"
        )
    return fmt


def identifier(text: str) -> str:
    """Return a name of the text for a name of the program."""
    return re.sub(r"\W+", "_", text).strip("_").lower() or "tile"


class TextNames:
    """Names, each of which is used for only one thing."""

    def __init__(self) -> None:
        self._of: dict[object, str] = {}
        self._taken = set(RESERVED)

    def of(self, key: object, wanted: str) -> str:
        """Return a name for a thing: the requested one, with a number appended if another thing has it."""
        if key not in self._of:
            name, number = identifier(wanted), 1
            while (result := name if number == 1 else f"{name}_{number}") in self._taken:
                number += 1
            self._taken.add(result)
            self._of[key] = result
        return self._of[key]


@dataclass(slots=True)
class TextBuffer:
    """A buffer: ``slots`` matrices of ``rows`` x ``cols`` that begin at a byte of a memory, either in the core or in
    global memory.

    ``pitch``: number of rows from one slot to the next.  It is 0 if there is one slot, and in global memory, where a
    slot has only the rows that are used.  ``used``: the first row and the number of rows of each access.
    """

    name: str
    memory: str
    address: int
    slots: int
    rows: int
    cols: int
    fmt: str
    pitch: int = 0
    used: set[tuple[int, int]] = field(default_factory=set)

    @property
    def fold(self) -> int:
        """Number of matrices for which a slot has space, if all accesses use the same first rows; else 1."""
        (row, rows), *others = self.used
        return self.pitch // rows if self.pitch and not others and not row and self.pitch % rows == 0 else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        fold = self.fold
        inner = (fold, self.rows // fold) if fold > 1 else (self.rows,)
        return (*((self.slots,) if self.slots > 1 else ()), *inner, self.cols)

    def part(self, row: int, rows: int, col: int, cols: int, generation: Sum, *first: TextLine) -> TextLine:
        """Return the text of some rows and columns of the slot of a generation."""
        fold = self.fold
        axes = [axis_text(row, rows, self.rows // fold), axis_text(col, cols, self.cols)]
        is_whole = all(a.text == ":" for a in axes)
        axes = [TextLine("0"), *axes] if fold > 1 else axes
        if self.slots > 1:
            axes.insert(0, TextLine("{}", (Slot(generation, self.slots),)))
        axes = [*first, *axes]
        return TextLine(self.name) if is_whole and len(axes) == 2 else indexed(TextLine(self.name), axes)


def axis_text(start: int | Sum, count: int, whole: int) -> TextLine:
    """Return the text of a range of an axis: ``:`` for all of it."""
    if start == 0 and count == whole:
        return TextLine(":")
    first = Sum(start) if isinstance(start, int) else start
    return TextLine("{} : {}", (first, first.plus(count)))


def indexed(of: TextLine, axes: Sequence[TextLine]) -> TextLine:
    """Return a name with the texts of its axes."""
    result = of.then("[")
    for i, axis in enumerate(axes):
        result = result.then((", " if i else "") + axis.text, *axis.numbers)
    return result.then("]")


class Buffers:
    """The buffers that contain a program's operands, by memory, place, form and format."""

    def __init__(self, names: TextNames) -> None:
        self.names, self._of = names, dict[tuple[object, ...], TextBuffer]()
        self.titles: dict[tuple[str, int], str] = {}
        # for each memory and first byte of a tile, the end of the tile's bytes
        self.spans = dict[tuple[str, int], int]()

    def suggest(self, tile: Tile, name: str) -> None:
        """Offer a name for the buffer of a tile; the shortest one is used."""
        key = _memory(tile.space), tile.offset_bytes
        known = self.titles.get(key, name)
        self.titles[key] = min(known, name, key=len)

    def of_ring(self, tile: RingTile, *, is_turned: bool) -> TextBuffer:
        """Return the buffer of a ring's slots; ``is_turned``: the slot contains the transposed matrix."""
        ring, memory = tile.ring, _memory(tile.ring.space)
        row, col = self.place(tile)
        rows, cols = row + tile.rows, tile.stride
        if is_turned:
            if col or row or tile.cols != tile.stride:
                raise ProgramError(
                    f"{ring.name}: a part of a slot is loaded transposed, which cannot be written as text"
                )
            rows, cols = tile.cols, tile.rows
        key = (memory, ring.name, cols, tile.fmt, is_turned)
        if memory == "GM":
            others = [b for k, b in self._of.items() if k[:2] == key[:2] and k != key]
            if others:
                raise ProgramError(f"{ring.name}: its slots have matrices of several widths or formats")
        result = self._made(
            key, memory, ring.name, ring.offset_bytes, ring.depth, rows, cols, tile.fmt, ring.slot_bytes
        )
        result.used.add((0 if is_turned else row, rows - (0 if is_turned else row)))
        return result

    def of_tile(self, tile: Tile) -> TextBuffer:
        """Return the buffer of a tile of one unit."""
        memory, title = _memory(tile.space), self.titles.get((_memory(tile.space), tile.offset_bytes), "tile")
        key = (memory, tile.offset_bytes, tile.stride, tile.fmt)
        begin, end = tile.offset_bytes, tile.offset_bytes + stored_format(tile.fmt).bytes_of(tile.rows * tile.stride)
        for (space, first), last in self.spans.items():
            if space == memory and first != begin and first < end and begin < last:
                raise ProgramError(
                    f"{title}: a part of its rows at a time (a slice of a vector core's rows) cannot be written as "
                    "text; for one slice of all rows, set vector_rows= to the rows of a core and use tiles with "
                    "as many keys as a head has columns"
                )
        self.spans[memory, begin] = max(end, self.spans.get((memory, begin), 0))
        result = self._made(key, memory, title, tile.offset_bytes, 1, tile.rows, tile.stride, tile.fmt, 0)
        result.used.add((0, tile.rows))
        return result

    def _made(
        self,
        key: tuple[object, ...],
        memory: str,
        title: str,
        address: int,
        slots: int,
        rows: int,
        cols: int,
        fmt: str,
        slot_bytes: int,
    ) -> TextBuffer:
        buffer = self._of.get(key)
        if buffer is None:
            ending = "" if memory == "GM" or identifier(title).endswith(memory.lower()) else f" {memory}"
            name = self.names.of(("buffer", key), title + ending)
            buffer = self._of[key] = TextBuffer(name, memory, address, slots, rows, cols, format_of(fmt))
            if slots > 1 and memory != "GM":
                row_bytes = stored_format(fmt).row_bytes(cols)
                buffer.pitch, rest = divmod(slot_bytes, row_bytes)
                if rest:
                    raise ProgramError(
                        f"{title}: slots of {slot_bytes:,} bytes are not a whole number of rows of {row_bytes:,} bytes"
                    )
                buffer.rows = buffer.pitch
        elif not buffer.pitch:
            buffer.rows = max(buffer.rows, rows)
        return buffer

    @staticmethod
    def place(tile: RingTile) -> tuple[int, int]:
        """Return the row and the column at which a part of a slot begins."""
        fmt = stored_format(tile.fmt)
        row, rest = divmod(tile.offset_bytes, fmt.row_bytes(tile.stride))
        return row, rest // max(1, fmt.row_bytes(1))

    def workspaces(self) -> list[TextBuffer]:
        """Return the buffers in global memory."""
        return [b for b in self._of.values() if b.memory == "GM"]

    def allocations(self) -> Iterator[TextLine]:
        """Yield the lines that allocate the buffers of a core and state their bytes."""
        own = [b for b in self._of.values() if b.memory != "GM"]
        for b in own:
            shape = ", ".join(map(str, b.shape))
            yield TextLine(f'{b.name} = T.{_ALLOCATES[b.memory]}([{shape}], "{b.fmt}")')
        listed = ", ".join(f"{b.name}: {b.address}" for b in own)
        yield TextLine("T.annotate_address({{" + listed + "}})")


def _memory(space: str) -> str:
    memory = "GM" if space == GM else space.rpartition(".")[2]
    if memory != "GM" and memory not in _ALLOCATES:
        raise ProgramError(
            f"the memory {space} has no TileLang-Ascend text; memories with one: {', '.join(_ALLOCATES)}"
        )
    return memory


# ---------------------------------------------------------------- tensors

#: Fields of a tensor whose arrangement in memory the text cannot state.
_PLAIN = MappingProxyType(
    {"packed": 1, "lengths": (), "stretch_rows": 0, "shared_rows": 1, "column": 0, "is_transposed": False}
)


class Tensors:
    """The tensors of a program, as parameters of the text."""

    def __init__(self, names: TextNames) -> None:
        self.names, self.used = names, dict[str, GlobalTensor]()

    def name(self, tensor: GlobalTensor) -> str:
        """Return the name of a tensor's parameter; raise `ProgramError` if text cannot express its arrangement."""
        if tensor.name not in self.used:
            odd = [n for n, plain in _PLAIN.items() if getattr(tensor, n) != plain]
            odd += [n for n in ("view", "of") if getattr(tensor, n) is not None] + (["added"] if tensor.added else [])
            if tensor.role == "constant":
                raise ProgramError(
                    f"the constant {tensor.name} (a mask, or another matrix of the schedule) cannot be written as text"
                )
            if odd:
                raise ProgramError(
                    f"the tensor {tensor.name} has an arrangement that cannot be written as text ({', '.join(odd)})"
                )
            self.used[tensor.name] = tensor
        return self.names.of(("tensor", tensor.name), tensor.name)

    def part(self, tile: GlobalTile, at: Sequence[Number]) -> TextLine:
        """Return the text of a part of a tensor; ``at``: batch, head, row and column of its first element."""
        tensor, (batch, head, row, col) = tile.tensor, at
        assert isinstance(row, Sum)
        assert isinstance(col, Sum)
        axes = [TextLine("{}", (batch,)), TextLine("{}", (head,)), _range(row, tile.rows, tensor.rows)]
        if tensor.is_interleaved:
            axes[1:] = axes[:0:-1]
        return indexed(TextLine(self.name(tensor)), [*axes, _range(col, tile.cols, tensor.cols)])

    def parameter(self, tensor: GlobalTensor) -> TextLine:
        """Return the line of a parameter."""
        sizes = [tensor.batch, tensor.heads, tensor.rows, tensor.cols]
        if tensor.is_interleaved:
            sizes = [tensor.batch, tensor.rows, tensor.heads, tensor.cols]
        kind = f'"{format_of(tensor.fmt)}"'
        return TextLine(f"{self.name(tensor)}: T.Tensor(({{}}, {{}}, {{}}, {{}}), {kind}),", tuple(map(Sum, sizes)))


def _range(start: Sum, count: int, whole: int) -> TextLine:
    return axis_text(0 if start == Sum(0) else start, count, whole)


def mixed_radix(values: Sequence[int], number: str) -> str | None:
    """Return the text of a function of the index that gives these integers: a multiple of ``number // p % q``; None if
    there is no such function.

    >>> mixed_radix([0, 0, 128, 128, 0, 0, 128, 128], "block")
    'block // 2 % 2 * 128'
    """
    first = values[0]
    each = next((i for i, v in enumerate(values) if v != first), len(values))
    if each == len(values):
        return str(first)
    step = values[each] - first
    counts = [i for i in range(2 * each, len(values), each) if values[i] == first]
    count = counts[0] // each if counts else 0
    for i, v in enumerate(values):
        turn = i // each % count if count else i // each
        if v != first + turn * step:
            return None
    text = (f"{number} // {each}" if each > 1 else number) + (f" % {count}" if count else "")
    text += f" * {step}" if step != 1 else ""
    return text + (f" + {first}" if first else "")
