"""Classes of equal bits, by structure: all programs of one class compute the same value for every output element.

A key contains everything that determines a value: instructions with their attributes, formats, starts, constants, the
order of each sum, sizes along axes that are summed or that carry a state, and the choices of compiled code that decide
bits (`npusim.kernels.triton.compiled_choices`).  It contains neither blocks of rows and columns, nor stages, nor warps
except those of products, nor placement, because an element depends on other rows or columns only along these axes.

Tiles at the end of a loop that a mask hides completely are also omitted, because one block of rows visits them and
another does not. If the states of a loop are sums and maxima, such tiles add zeros to finite sums, so that classes hold
for finite inputs.  In other loops (PASA's means) all tiles that a row visits are part of the key.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from npusim.formats.reductions import normal_order
from npusim.kernels.form.work_table import BATCH, HEAD, SPANS, WorkTable
from npusim.kernels.triton import UNKNOWN
from npusim.program.ir.content import uncollected
from npusim.program.ir.op import Opcode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from npusim.config.device import DeviceSpec
    from npusim.kernels.form.phase import Instruction, Phase, Stage, TileLoop, TileRun
    from npusim.program.ir.tile_program import TileProgram

#: Elements that one instruction of a matrix unit adds up, from the name of its arithmetic.
_DEPTH = re.compile(r"\.k(\d+)\.")


@uncollected()
def class_key(program: TileProgram, device: DeviceSpec) -> str:
    """Return a digest; programs for one problem that have the same digest give every output the same bits.

    Products that name no arithmetic have the device's arithmetic.  The result is empty if the form of a phase, or a
    choice of its compiler, is unknown.
    """
    engines = (e for core in device.cores.values() for e in core.engines.values())
    units = (unit for e in engines if isinstance(unit := getattr(e, "arithmetic", None), dict))
    arithmetic, parts = " ".join(str(q.value) for unit in units for q in unit.values()), list[str]()
    for each in program.phases:
        frame = getattr(each.footprint, "frame", None)
        phase = None if frame is None else cast("Phase", frame.phase)
        if phase is None or phase.compiled == UNKNOWN:
            return ""
        parts += _parts(phase, arithmetic)
    text = re.sub(r"<function ([\w.]+) at 0x[0-9a-f]+>", r"\1", "\n".join(parts))
    return "" if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()[:16]


def _parts(phase: Phase, arithmetic: str) -> Iterator[str]:
    """Yield the parts that determine the values of a phase."""
    arithmetic = phase.arithmetic or " ".join((arithmetic, *sorted(phase.arithmetic_by_format.values())))
    decided = arithmetic, dict(phase.constants), phase.finite_starts, phase.operator
    yield repr((*decided, phase.compiled))
    yield repr({axis: phase.sizes.get(axis) for axis in sorted(_deciding(phase, arithmetic))})
    if phase.compiled:
        yield from _values(phase)
    else:
        yield repr({n: (name.axes, name.fmt, name.start) for n, name in phase.names.items()})
        for loop in phase.loops:
            yield repr((loop.axis, [_rows(s, phase) for s in loop.stages]))
        yield repr([_rows(s, phase) for s in phase.finish])
    yield repr(_walks(phase))


def _values(phase: Phase) -> Iterator[str]:
    """Yield the new values of each loop's states, and the results, each as a digest of everything from which it is
    computed, so that the key depends neither on names nor on repeated computations of a value.

    How often the reader writes a compiled value depends on the tile, because an expression that masks divide gets a
    name.
    """
    numbers = dict[str, str]()

    def number(n: str | float) -> str:
        if isinstance(n, float) or n not in phase.names:
            return repr(phase.constants.get(n, n) if isinstance(n, str) else n)
        name = phase.names[n]
        return numbers.get(n) or repr((n, name.axes, name.fmt, name.start, name.first))

    def compute(stages: Iterable[Stage]) -> None:
        for row in (r for s in stages for r in s.rows):
            name, is_changed = phase.names[row.dst], row.attributes.accumulate or row.only
            parts = row.opcode.name, *map(number, row.srcs), name.axes, name.fmt, row.only, _attributes(row, phase)
            text = repr((*parts, number(row.dst) if is_changed else ""))
            numbers[row.dst] = hashlib.sha256(text.encode()).hexdigest()

    states = sorted(n for n, name in phase.names.items() if name.start is not None)
    for loop in phase.loops:
        compute(loop.stages)
        yield repr((loop.axis, [(n, number(n)) for n in states]))
    compute(phase.finish)
    yield repr(sorted((n, numbers[n]) for n in phase.tensors if n in numbers))


def _walks(phase: Phase) -> object:
    """Return, for each head that differs, the starts and directions of each row's walks, or all keys that these visit.

    If a row's keys are divided into parts, each part is a separate walk that begins where the previous one ended.
    """
    is_whole = not _ignores_hidden(phase)
    if isinstance(phase.cells, WorkTable) and (known := _walks_of_table(phase.cells, is_whole=is_whole)):
        first, *others = known.values()
        return first if all(walks == first for walks in others) else sorted(known.items())
    heads = defaultdict[tuple[int, int], defaultdict[tuple[int, int], set[tuple[tuple[int, ...], ...]]]](
        lambda: defaultdict(set)
    )
    for cell in phase.cells:
        start = cell.row
        heads[cell.batch, cell.head][start, start + cell.rows].add(_walk(cell.runs, is_whole=is_whole))
    listed = list(heads.values())
    if listed and all(rows == listed[0] for rows in listed):  # a call of a million tokens has 10,000 blocks per head
        return _joined(listed[0])
    by_head = {head: _joined(rows) for head, rows in heads.items()}
    return next(iter(by_head.values())) if len(set(by_head.values())) == 1 else sorted(by_head.items())


def _walks_of_table(blocks: WorkTable, *, is_whole: bool) -> dict[tuple[int, int], Any] | None:
    """Return the walks of each head, joined; None if a span of rows has two walks."""
    walks = list(dict.fromkeys(_walk(kind.runs, is_whole=is_whole) for kind in blocks.kinds))
    kinds = np.array([walks.index(_walk(kind.runs, is_whole=is_whole)) for kind in blocks.kinds], np.int64)
    start, size = blocks.numbers[:, SPANS], blocks.numbers[:, SPANS + 1]
    batch, head = blocks.numbers[:, BATCH], blocks.numbers[:, HEAD]
    rows = np.column_stack([batch, head, start, start + size, kinds[blocks.which]])
    rows = rows[np.lexsort(rows.T[::-1])]
    rows = rows[np.concatenate([[True], (np.diff(rows, axis=0) != 0).any(1)])]
    before, after = rows[:-1], rows[1:]
    if (before[:, :4] == after[:, :4]).all(1).any():
        return None
    follows = (before[:, :2] == after[:, :2]).all(1) & (before[:, 3] == after[:, 2]) & (before[:, 4] == after[:, 4])
    firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
    ends = rows[np.append(firsts[1:], len(rows)) - 1, 3].tolist()
    by_head = defaultdict[tuple[int, int], list[tuple[int, int, Any]]](list)
    for (at_batch, at_head, first, _, kind), end in zip(rows[firsts].tolist(), ends, strict=True):
        by_head[at_batch, at_head].append((first, end, (walks[kind],)))
    return {place: tuple(of_head) for place, of_head in by_head.items()}


def _walk(runs: tuple[TileRun, ...], *, is_whole: bool) -> tuple[tuple[int, ...], ...]:
    """Return the tiles that runs visit, or the starts of the runs and their direction."""
    if is_whole:
        return tuple((r.col, r.cols, r.count, r.step) for r in runs)
    return ((runs[0].col, runs[0].step > 0),) if runs else ()


def _joined(rows: Mapping[tuple[int, int], set[tuple[tuple[int, ...], ...]]]) -> tuple[Any, ...]:
    """Return the walks of spans of rows in order; adjacent spans with equal walks are joined."""
    joined = list[tuple[int, int, Any]]()
    for (start, end), walks in sorted(rows.items()):
        ordered = tuple(sorted(walks) if len(walks) > 1 else walks)
        if joined and joined[-1][1:] == (start, ordered):
            joined[-1] = joined[-1][0], end, ordered
        else:
            joined.append((start, end, ordered))
    return tuple(joined)


def _ignores_hidden(phase: Phase) -> bool:
    """Return whether a tile of scores that are all -inf changes no state of a loop: each is a sum or a maximum."""
    rows = [row for loop in phase.loops for stage in loop.stages for row in stage.rows]
    result = {row.dst: row for row in rows}
    states = {n for n, name in phase.names.items() if name.start is not None}
    copies = [row for row in rows if row.dst in states and row.opcode is Opcode.COPY]
    sources = [(row.dst, result.get(str(row.srcs[0]))) for row in copies]
    return all(source is not None and source.opcode is Opcode.MAX and n in source.srcs for n, source in sources)


def _rows(stage: Stage, phase: Phase) -> list[Any]:
    return [(r.opcode.name, r.dst, r.srcs, r.only, _attributes(r, phase)) for r in stage.rows]


def _attributes(row: Instruction, phase: Phase) -> str:
    """Return an instruction's attributes without lanes and cost; the order of a sum is in normal form."""
    a = replace(row.attributes, warp=None, share=1.0, comparisons=0, lookups=0)
    if row.opcode is Opcode.ROW_SUM and (axes := phase.names[row.srcs[0]].axes):
        a = replace(a, order=normal_order(a.order, phase.sizes[axes[0 if row.is_down else -1]]))
    return str(a)


def _deciding(phase: Phase, arithmetic: str) -> set[str]:
    """Return the axes along which the size of a block or tile decides values."""
    axes = set[str]()
    for loop in phase.loops:
        if loop.axis and not _only_chains(loop, phase, arithmetic):
            axes.add(loop.axis)
    for stage in (*(s for loop in phase.loops for s in loop.stages), *phase.finish):
        for row in stage.rows:
            if row.opcode is Opcode.MATMUL:
                left, right = (set(phase.names[n].axes) for n in row.srcs)
                axes |= (left & right) - set(phase.names[row.dst].axes) - _chained(phase, arithmetic)
            elif row.opcode is Opcode.INVERSE:
                axes |= set(phase.names[row.dst].axes)
            elif row.opcode is Opcode.FOLD:
                along = slice(1) if row.is_down else slice(-1, None)
                axes |= {a for n in row.srcs if not isinstance(n, float) for a in phase.names[n].axes[along]}
            # the last axis, because sums end where a tile ends along this axis
            elif row.opcode in (Opcode.CUMSUM, Opcode.SCAN):
                axes.add(phase.names[row.dst].axes[-1])
            elif row.opcode is Opcode.ROW_SUM and not isinstance(row.srcs[0], float):
                axes |= set(phase.names[row.srcs[0]].axes) - set(phase.names[row.dst].axes)
    return axes


def _chained(phase: Phase, arithmetic: str) -> set[str]:
    return {loop.axis for loop in phase.loops if loop.axis and _only_chains(loop, phase, arithmetic)}


def _only_chains(loop: TileLoop, phase: Phase, arithmetic: str) -> bool:
    """Return whether a loop does nothing but add products, each to one accumulator, one instruction after another.

    The tiles of such a loop then do not affect bits, if their sizes are multiples of the matrix unit's instructions.
    """
    rows = [row for stage in loop.stages for row in stage.rows]
    states = {n for n, name in phase.names.items() if name.start is not None}
    read = {n for row in rows for n in row.srcs}
    depths = [int(k) for k in _DEPTH.findall(phase.arithmetic or arithmetic)]
    chains = [r for r in rows if r.dst in states]
    is_plain = all(r.opcode is Opcode.MATMUL and r.attributes.accumulate for r in chains)
    return (
        bool(chains)
        and is_plain
        and not states & read
        and bool(depths)
        and not any(phase.sizes[loop.axis] % k for k in depths)
    )
