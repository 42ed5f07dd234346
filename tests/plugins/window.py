"""Sliding-window attention: a query sees the last WINDOW keys; tiles that either edge crosses have a mask for it."""

from dataclasses import dataclass

from npusim.kernel import (
    FLASH,
    AttentionTiling,
    Field,
    FlashPrecision,
    Loop,
    Opcode,
    Run,
    Stage,
    TilingMask,
    attention_cells,
    attention_tensors,
    flash,
    for_inputs,
    name,
    replace,
    row,
    schedule,
)  # fmt: skip

O = Opcode  # noqa: E741
FP32 = FlashPrecision("fp32", *["float32"] * 3, "input", "float32", "float32", "input")
#: A row may be masked wholly before it has a maximum: a finite value, far below any score.
LOWEST = -(2.0**127)
SELECT = next(r for r in FLASH["softmax"].rows if r.opcode is O.SELECT)
AT = FLASH["softmax"].rows.index(SELECT) + 1
LEFT = (
    row(O.FILL, "masked_tile", "masked", only="mask_left"),
    row(O.SELECT, "S", "mask_left", "masked_tile", "S", only="mask_left"),
)  # fmt: skip


class WindowTiling(AttentionTiling):
    """The usual fields, and how far back a query sees."""

    window: int = Field(default=256, ge=1, description="keys that a query sees, itself included")


@dataclass(frozen=True)
class LeftEdge(TilingMask):
    """The same triangle ``window`` keys further left: 1 where a key is too old."""

    window: int = 0

    def cut(self, row, rows, col, cols, offset):
        return super().cut(row, rows, col, cols, (offset or 0) - self.window)


def visited(cell, problem, width, window):
    first = max(0, cell.row + cell.causal_offset - window + 1) // width * width
    end = min(problem.seq_kv, cell.row + cell.rows + cell.causal_offset)
    runs = []
    for col in range(first, end, width):
        cols = min(width, end - col)
        right = {"mask"} if col + cols > cell.row + cell.causal_offset + 1 else set()
        left = {"mask_left"} if col <= cell.row + cell.rows - 1 + cell.causal_offset - window else set()
        only = frozenset(right | left)
        if runs and (runs[-1].cols, runs[-1].only) == (cols, only):
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(Run(col, cols, 1, width, only))
    return tuple(runs)


def phases(problem, tiling, precision):
    p, sizes = for_inputs(precision, problem.dtype), (tiling.block_q, tiling.block_kv)
    mask, edge = TilingMask(), LeftEdge(window=tiling.window)
    cells = tuple(
        replace(c, runs=visited(c, problem, tiling.block_kv, tiling.window)) for c in attention_cells(problem, *sizes)
    )
    usual = flash(problem, sizes, cells, p, attention_tensors(problem, p.output), mask)
    stages = usual.loops[0].stages
    softmax = Stage("softmax", (*stages[1].rows[:AT], *LEFT, *stages[1].rows[AT:]))
    names = {"mask_left": name("mask", "row key", "int8"), "masked_tile": name("work", "row key", p.softmax)}
    return [replace(
        usual, names={**usual.names, **names}, masks={"mask": mask, "mask_left": edge},
        loops=(Loop((stages[0], softmax, *stages[2:]), "key"),), constants={**usual.constants, "masked": LOWEST},
    )]  # fmt: skip


WINDOW = schedule("window", phases, tiling=WindowTiling, precisions=[FP32], summary="sliding-window attention")
