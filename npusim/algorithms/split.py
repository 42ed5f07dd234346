"""Keys split among blocks (flash-decoding): partial outputs with their log-sum-exp, and their merge.

A split is attention over a part of the keys, normalised by itself.  Merging goes level by level,
``fan`` neighbours at a time: all at once is *sequential*, two at a time a *tree*.  A merged output is
a partial one again, so that every level is the same table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from npusim.algorithms.flash import FINISH, FlashPrecision
from npusim.algorithms.phase import Cell, Loop, Phase, Run, Stacked, name, tensor_of
from npusim.algorithms.table import Stage, choose, row
from npusim.formats import get_format
from npusim.ir.op import Attributes, Opcode
from npusim.ir.tile import GlobalTensor
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.algorithms.phase import Name
    from npusim.algorithms.table import Table

O = Opcode  # noqa: E741 - tables read best with one letter

Merge = Literal["sequential", "tree"]
#: Partial outputs that one step of a merge order takes in; none: all.
FAN: Mapping[Merge, int | None] = MappingProxyType({"sequential": None, "tree": 2})
#: Rows of a merge, at least: fewer take as long (npusim, 910B2).
FEWEST_ROWS = 8
#: Log-sum-exps and weights of splits: as kernels keep them, whatever the attention itself keeps.
EXACT = "float32"


@dataclass(frozen=True, slots=True)
class SplitPrecision(FlashPrecision):
    """FlashAttention's formats, and ``partial``: that of an output of a split."""

    partial: str = EXACT

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}`` for reports."""
        return {**FlashPrecision.formats(self), "partial": self.partial}


#: lse = log l + m, of the rows of a part of the keys.
LOG_SUM_EXP = (
    row(O.CAST, "l_wide", "l"),
    row(O.LOG, "lse_sum", "l_wide"),
    row(O.CAST, "m_wide", "m"),
    row(O.ADD, "lse", "lse_sum", "m_wide"),
)
#: Outputs weighted by exp(lse - largest lse so far), as softmax's tiles are by their maxima.
MERGE = (
    row(O.CAST, "part_wide", "part"),
    row(O.MAX, "top_new", "top", "lse_in"),
    row(O.SUB, "decay", "top", "top_new"),
    row(O.EXP, "decay", "decay"),
    row(O.SUB, "gain", "lse_in", "top_new"),
    row(O.EXP, "gain", "gain"),
    row(O.MUL, "total", "total", "decay"),
    row(O.ADD, "total", "total", "gain"),
    row(O.MUL, "O", "O", "decay"),
    row(O.MUL, "part_wide", "part_wide", "gain"),
    row(O.ADD, "O", "O", "part_wide"),
    row(O.COPY, "top", "top_new"),
)
MERGED = (row(O.DIV, "merged", "O", "total"), row(O.CAST, "out", "merged"))
MERGED_LSE = (row(O.LOG, "lse_sum", "total"), row(O.ADD, "lse", "lse_sum", "top"))


def merge_names(partial: str, output: str, *, is_last: bool) -> dict[str, Name]:
    """Return the names of one level of a merge."""
    vector, out = "row", "row value"
    # What diagnosis sums over whole rows of softmax ends with a quotient of role output: none of these is.
    left = {"lse_sum": name("work", vector, EXACT), "lse": name("result", vector, EXACT)}
    return {
        "part": name("operand", out, partial, label="O_part"),
        "lse_in": name("operand", vector, EXACT, label="lse"),
        "O": name("output", out, EXACT, start=0.0),
        "part_wide": name("work", out, EXACT),
        "merged": name("partial", out, EXACT, over="O"),
        "out": name("result", out, output, label="O"),
        "top": name("max", vector, EXACT, start=-math.inf),
        "top_new": name("max", vector, EXACT),
        "decay": name("decay", vector, EXACT),
        "gain": name("gain", vector, EXACT),
        "total": name("sum", vector, EXACT, start=0.0),
        **({} if is_last else left),
    }


def tiles_of(cell: Cell) -> int:
    """Return how many tiles a cell's loop visits."""
    return sum(run.count for run in cell.runs)


def cut_runs(runs: tuple[Run, ...], parts: int) -> tuple[tuple[Run, ...], ...]:
    """Return the tiles of runs in ``parts`` consecutive parts, the first ones longer by one where need be.

    No part is empty: there are as many as tiles at most.
    """
    tiles = sum(run.count for run in runs)
    parts = min(parts, tiles)
    found: list[tuple[Run, ...]] = []
    left = list(runs)
    for part in range(parts):
        wanted, mine = tiles // parts + (part < tiles % parts), list[Run]()
        while wanted:
            run = left.pop(0)
            count = min(run.count, wanted)
            mine.append(replace(run, count=count))
            if count < run.count:
                left.insert(0, replace(run, col=run.col + count * run.step, count=run.count - count))
            wanted -= count
        found.append(tuple(mine))
    return tuple(found)


def split_kv(whole: Phase, splits: int, merge: Merge, p: FlashPrecision, places: int) -> tuple[Phase, ...]:
    """Return FlashAttention's phase with the tiles of each cell in ``splits`` parts, and the merge's phases.

    One split is the phase itself.  A cell with fewer tiles (causal masks) has fewer parts.  A merge's rows are dealt
    to ``places``.
    """
    if splits == 1:
        return (whole,)
    partial = p.partial if isinstance(p, SplitPrecision) else EXACT
    target = whole.tensors["out"]
    assert isinstance(target, GlobalTensor)
    stacks = _stacks(target, splits, partial, 0)
    names = {
        **whole.names, "O_normal": replace(whole.names["O_normal"], role="partial"),
        "out": replace(whole.names["out"], fmt=partial), "l_wide": name("sum", "row", EXACT),
        "lse_sum": name("work", "row", EXACT), "m_wide": name("max", "row", EXACT),
        "lse": name("result", "row", EXACT), **(_nothing_seen(whole, p) if whole.masks else {}),
    }  # fmt: skip
    cells = tuple(
        replace(cell, runs=runs, spans=(*cell.spans, ("split", i, 1)))
        for cell in whole.cells
        for i, runs in enumerate(cut_runs(cell.runs, splits))
    )
    finish = Stage("finish", _chosen((*FINISH.rows, *LOG_SUM_EXP), p))
    first = replace(
        whole, names=names, cells=cells, finish=(finish,), tensors={**whole.tensors, **stacks},
        sizes={**whole.sizes, "split": 1},
    )  # fmt: skip
    return (first, *_merge_phases(_shared(whole, places), splits, stacks, FAN[merge] or splits, p))


def _nothing_seen(whole: Phase, p: FlashPrecision) -> dict[str, Name]:
    """Return m and l that stay finite where a part of the keys shows a row nothing, or only scores of -Inf.

    m starts at the lowest number, against which a hidden score of -Inf weighs nothing whatever else there is, and l
    at the least: such a part's output is 0, its log-sum-exp below all others.  The first score seen takes both away.
    """
    lowest, least = -get_format(p.softmax).max_finite, get_format(p.running).min_subnormal
    return {n: replace(whole.names[n], start=start) for n, start in (("m", lowest), ("l", least))}


def _shared(whole: Phase, places: int) -> Phase:
    """Return the phase with the rows of its cells in parts, so that all places have some where there are enough."""
    height = max(FEWEST_ROWS, ceil_div(sum(cell.rows for cell in whole.cells), places))
    cells = tuple(
        replace(cell, spans=((axis, start + at, count), *rest))
        for cell in whole.cells
        for (axis, start, rows), *rest in (cell.spans,)
        for at, count in chunks(rows, height)
    )
    return replace(whole, cells=cells, sizes={**whole.sizes, "row": min(height, whole.sizes["row"])})


def _merge_phases(
    whole: Phase, splits: int, stacks: dict[str, Stacked], fan: int, p: FlashPrecision
) -> tuple[Phase, ...]:
    """Return the levels of a merge, each a phase."""
    target, phases = whole.tensors["out"], list[Phase]()
    counts = [min(splits, tiles_of(cell)) for cell in whole.cells]
    assert isinstance(target, GlobalTensor)
    while max(counts) > 1:
        left = [ceil_div(n, fan) for n in counts]
        is_last = max(left) == 1
        partial = tensor_of(stacks["out"]).fmt
        results = {"out": target} if is_last else _stacks(target, max(left), partial, len(phases) + 1)
        cells = tuple(
            replace(cell, spans=(*cell.spans, ("split", g, 1)), runs=(Run(g * fan, 1, min(fan, n - g * fan), 1),))
            for cell, n, groups in zip(whole.cells, counts, left, strict=True)
            for g in range(groups)
        )
        finish = (*MERGED, *(() if is_last else MERGED_LSE))
        phase = Phase(
            name=f"merge {len(phases) + 1}" if phases or not is_last else "merge",
            names=merge_names(partial, target.fmt if is_last else partial, is_last=is_last), cells=cells,
            sizes={"row": whole.sizes["row"], "value": whole.sizes["value"], "split": 1},
            loops=(Loop((Stage("merge", _chosen(MERGE, p)),), "split"),), finish=(Stage("merged", _chosen(finish, p)),),
            tensors={"part": stacks["out"], "lse_in": stacks["lse"], **results},
        )  # fmt: skip
        phases.append(phase)
        counts, stacks = left, {n: s for n, s in results.items() if isinstance(s, Stacked)}
    return tuple(phases)


def _stacks(target: GlobalTensor, count: int, fmt: str, level: int) -> dict[str, Stacked]:
    """Return workspaces for ``count`` partial outputs and their log-sum-exps."""

    def stack(what: str, cols: int, fmt: str) -> Stacked:
        batch = target.batch * count
        found = GlobalTensor(f"{what}{level or ''}", batch, target.heads, target.rows, cols, fmt, "workspace")
        return Stacked("split", count, found)

    return {"out": stack("o_part", target.cols, fmt), "lse": stack("lse", 1, EXACT)}


def _chosen(table: Table, p: FlashPrecision) -> Table:
    """Return the table with exponentials and logarithms to the base of the attention's own.

    Its variant serves float32 too where its exponentials are float32.
    """
    base, _, variant = p.exp_variant.partition(".")
    exact = variant if p.exponential == EXACT else "correct"
    log = Attributes(variant="log2.correct" if base == "exp2" else "log.correct")
    return choose(table, {O.EXP: Attributes(variant=f"{base}.{exact}"), O.LOG: log})


@dataclass(frozen=True, slots=True)
class PackRule:
    """Where several queries of the heads that share keys are rows of one block.

    rows
        So many are packed always: they take no longer than one.
    tiles
        More are packed where the KV heads alone have so many tiles a place: else cells are too few.
    """

    rows: int
    tiles: int

    def packs(self, rows: int, cells: int, tiles: int, places: int) -> bool:
        """Return whether to pack ``rows`` of a KV head's queries; ``cells`` KV heads visit ``tiles`` each."""
        return rows <= self.rows or cells * tiles >= self.tiles * places


#: As npusim times llama2_70b (8 heads, one KV head) and qwen2_7b (28, 4) with 2 to 64 causal queries on 8k keys, 910B2.
PACKED = PackRule(rows=32, tiles=2)
