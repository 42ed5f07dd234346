"""Pictures of fragments: the lane of each element, and the values that a chained product must move.

`picture_lines` draws a picture as text, which a terminal colours by lane.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from npusim.formats.layout.chain import Chain, Source, chain, held
from npusim.formats.layout.fragment import Arrangement, Fragment
from npusim.late_methods import dataclass
from npusim.report.text import Fact, Facts, cells, document
from npusim.units import plural

if TYPE_CHECKING:
    from npusim.formats.layout.instruction import MmaInstruction

#: Degrees on the colour circle, then four shades of each: 32 colours that are distinguishable, and on which black text
#: is readable, if a terminal has only 256 colours.
_HUES = (220, 25, 130, 325, 55, 275, 185, 95)
_SHADES = (0.84, 0.77, 0.70, 0.64)
_SATURATION = 0.7


@dataclass(frozen=True, slots=True)
class Square:
    """One element: the lane that has it, the index of its value in the lane, and the other lanes that need it."""

    lane: int
    value: int
    colour: str
    needed_by: tuple[int, ...] = ()
    is_in_place: bool = True

    def __str__(self) -> str:
        """Return ``T5V2``, value 2 of lane (thread) 5; ``T0V2>T2`` must move to lane 2, ``T0V0+T8`` is also needed in
        lane 8.
        """
        others = ",".join(f"T{lane}" for lane in self.needed_by)
        return f"T{self.lane}V{self.value}{('+' if self.is_in_place else '>') + others if others else ''}"


@dataclass(frozen=True, slots=True)
class Picture:
    """A tile of squares, row by row, with a title and facts about it.

    ``note`` explains the text of a square, and ``legend`` the marks of a chain.
    """

    title: str
    note: str
    rows: tuple[tuple[Square, ...], ...]
    facts: Facts
    legend: str = ""


# ---------------------------------------------------------------- contents of pictures


def fragment_picture(instruction: MmaInstruction, operand: str, arrangement: Arrangement | None = None) -> Picture:
    """Return the picture of an operand: one group's tile, or the tile of the warp if an arrangement is given.

    Raises `LayoutError` if there is no such operand, or if the arrangement does not fit.
    """
    fragment = instruction.operand(operand)
    seats = held(fragment, arrangement or Arrangement(fragment.groups, 1))
    rows = _squares(fragment, seats, arrangement, lambda seat: Square(*seat, _colour(fragment, seat[0])))
    facts = Facts(tuple(_fragment_facts(instruction, fragment)))
    return Picture(_title(instruction, fragment), _note(fragment, arrangement), rows, facts)


def chain_picture(instruction: MmaInstruction, operand: str, arrangement: Arrangement | None = None) -> Picture:
    """Return the picture of an accumulator and of the values that must move for its next product.

    Raises `LayoutError` if they cannot be chained or if the arrangement does not fit.
    """
    fragment = instruction.operand(operand)
    linked = chain(instruction.c, fragment, arrangement=arrangement)
    needed: dict[tuple[int, int], set[int]] = {}
    for lane, sources in enumerate(linked.sources):
        for source in sources:
            needed.setdefault(source, set()).add(lane)
    accumulator, axis = linked.accumulator, 1 if linked.operand.operand == "A" else 0
    seats = held(accumulator, linked.arrangement, linked.tiles, axis)

    def square(seat: Source) -> Square:
        others = tuple(sorted(needed[seat] - {seat[0]}))
        return Square(*seat, _colour(accumulator, seat[0]), others, seat[0] in needed[seat])

    rows = _squares(accumulator, seats, arrangement, square)
    title = f"{_title(instruction, accumulator)} as {_kind(fragment)} of the next product"
    return Picture(title, _note(accumulator, arrangement), rows, Facts(tuple(_chain_facts(linked))), _legend(rows))


def _squares(
    fragment: Fragment,
    seats: Mapping[tuple[int, int], Source],
    arrangement: Arrangement | None,
    square: Callable[[Source], Square],
) -> tuple[tuple[Square, ...], ...]:
    """Return the squares of the warp if an arrangement is given, else those of its first group."""
    drawn = {at: seat for at, seat in seats.items() if arrangement or not fragment.group(seat[0])}
    rows, columns = (1 + max(axis) for axis in zip(*drawn, strict=True))
    return tuple(tuple(square(drawn[r, c]) for c in range(columns)) for r in range(rows))


def _colour(fragment: Fragment, lane: int) -> str:
    """Return the lane's colour: eight hues, four shades; lanes at the same place in different groups share a hue; with
    one group, four successive lanes do.
    """
    if fragment.groups > 1:
        hue, shade = fragment.thread(lane), fragment.group(lane)
    else:
        hue, shade = divmod(lane, len(_SHADES))
    rgb = colorsys.hls_to_rgb(_HUES[hue] / 360, _SHADES[shade], _SATURATION)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


# ---------------------------------------------------------------- titles and facts


def _title(instruction: MmaInstruction, fragment: Fragment) -> str:
    return f"{instruction.name}: {_kind(fragment)}"


def _kind(fragment: Fragment) -> str:
    if fragment.operand == "C":
        return f"FP{fragment.bits} accumulator"
    return f"{fragment.operand} ({fragment.order}-major)"


def _legend(squares: tuple[tuple[Square, ...], ...]) -> str:
    kinds = {square.is_in_place for row in squares for square in row if square.needed_by}
    words = [">Tk: must move to lane k"] if False in kinds else []
    return "; ".join([*words, "+Tk: lane k needs it too"] if True in kinds else words)


def _note(fragment: Fragment, arrangement: Arrangement | None) -> str:
    if fragment.groups == 1:
        return "TiVj: value j of lane i"
    if arrangement is None:
        return "TiVj: value j of lane i; quad pair 0, quad pair q adds 4q to each lane"
    spread = (arrangement.m, arrangement.n)
    copies = {"A": spread[1], "B": spread[0], "C": 1}[fragment.operand]
    shared = f"; {copies} quad pairs hold copies; the picture shows the first" if copies > 1 else ""
    return f"TiVj: value j of lane i; quad pairs {arrangement}{shared}"


def _fragment_facts(instruction: MmaInstruction, fragment: Fragment) -> Iterator[Fact]:
    yield "layout", cells(f"(thread, value) -> row + {fragment.rows} column = {fragment.layout}")
    if fragment.groups > 1:
        yield "lanes", cells(f"(thread, quad pair) -> lane = {fragment.lanes}")
    yield "registers", cells(f"{fragment.registers} a lane, {_counted(fragment.values)} of {fragment.bits} bits")
    if fragment.operand == "C":
        yield "row sum", cells(_butterfly_text(fragment))
        if instruction.steps:
            each = fragment.values // len(instruction.steps)
            text = ", ".join(f"V{first} to V{first + each - 1}" for first in range(0, fragment.values, each))
            yield "steps", cells(f"HMMA.884 writes {text}")


def _butterfly_text(fragment: Fragment) -> str:
    masks = fragment.butterflies()
    if not masks:
        return "within the lane"
    return f"within the lane, then across {', '.join(f'lane ^ {mask}' for mask in masks)}"


def _chain_facts(linked: Chain) -> Iterator[Fact]:
    cost, groups = linked.cost, linked.operand.groups
    if groups > 1:
        yield "quad pairs", cells(str(linked.arrangement))
    group = "a quad pair" if groups > 1 else "the warp"
    share = f"{linked.in_place} of {linked.values} values of {group} ({linked.share:.2f})"
    yield "in place", cells(share, style="warn" if linked.moved else "good")
    lane = f"{linked.moved} of {len(linked.sources[0])} values of a lane"
    yield "must move", cells(lane if linked.moved else "nothing")
    if linked.moved:
        counts = Counter(shuffle.mask for shuffle in linked.shuffles)
        by_mask = ", ".join(f"{count} across lane ^ {mask}" for mask, count in counts.items())
        yield "shuffles", cells(f"{cost.shuffles} a lane: {by_mask}")
        yield "selects", cells(f"{cost.selects}, and {cost.permutes} byte permutes")
    if cost.conversions:
        yield "to FP16", cells(f"{_counted(cost.conversions)} a lane")


def _counted(values: int) -> str:
    return f"{values} {plural(values, 'value')}"


# ---------------------------------------------------------------- text


def picture_lines(picture: Picture) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield the tile's lines as pieces of text with a style of rich's: a lane's colour, bold for values that others
    need.
    """
    texts = [list(map(str, row)) for row in picture.rows]
    width = 1 + max(len(text) for row in texts for text in row)
    edge = len(str(len(texts) - 1)) + 2
    header = "".join(f"{column:^{width + 1}}" for column in range(len(texts[0])))
    yield ((" " * (edge + 1) + header.rstrip(), "dim"),)
    for number, (row, squares) in enumerate(zip(texts, picture.rows, strict=True)):
        pieces = [(f"{number:>{edge}} ", "dim")]
        for text, square in zip(row, squares, strict=True):
            pieces.append((f"{text:^{width + 1}}", f"{'bold ' if square.needed_by else ''}black on {square.colour}"))
        yield tuple(pieces)


# ---------------------------------------------------------------- JSON


def fragment_document(instruction: MmaInstruction, operand: str) -> dict[str, object]:
    """Return an operand's map for scripts: every element's group, row and column by lane."""
    fragment = instruction.operand(operand)
    lanes = range(fragment.lanes.size)
    return _document(
        instruction,
        fragment,
        layout=str(fragment.layout),
        lanes=str(fragment.lanes),
        groups=fragment.groups,
        registers=fragment.registers,
        row_butterflies=list(fragment.butterflies()),
        map=[[[fragment.group(lane), *fragment.coordinate(lane, v)] for v in range(fragment.values)] for lane in lanes],
    )


def chain_document(
    instruction: MmaInstruction, operand: str, arrangement: Arrangement | None = None
) -> dict[str, object]:
    """Return a chain for scripts: the source of each operand value, shuffles, counts."""
    linked = chain(instruction.c, instruction.operand(operand), arrangement=arrangement)
    moves = {
        "arrangement": str(linked.arrangement),
        "values": linked.values,
        "in_place": linked.in_place,
        "share": linked.share,
        "moved_per_lane": linked.moved,
        "tiles": linked.tiles,
        "steps": linked.steps,
        "sources": [[list(source) for source in row] for row in linked.sources],
        "shuffle_masks": [shuffle.mask for shuffle in linked.shuffles],
        "cost": asdict(linked.cost),
    }
    return _document(instruction, linked.operand, chain=moves)


def _document(instruction: MmaInstruction, fragment: Fragment, **content: Any) -> dict[str, object]:
    return document(
        "layout",
        instruction=instruction.name,
        accumulator=instruction.accumulator,
        operand=fragment.operand,
        order=fragment.order,
        rows=fragment.rows,
        columns=fragment.columns,
        **content,
    )
