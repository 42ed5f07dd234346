"""A schedule of one's own to begin with, as ``npusim new schedule NAME`` writes it."""

from __future__ import annotations

import ast
import keyword
from typing import TYPE_CHECKING

from npusim.errors import OutputError, SpecError, reason_of
from npusim.schedules import SCHEDULES

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["new_schedule"]

_TEMPLATE = '''\
"""NAME: FlashAttention-2 with its softmax written out, to be changed.

    npusim run NAME.py:NAME
    npusim explore NAME.py:NAME --field block_kv=64,128,256
"""

from npusim.kernel import (
    AttentionTiling,
    Attributes,
    FlashPrecision,
    Loop,
    Opcode,
    Stage,
    attention_cells,
    attention_tensors,
    causal_mask,
    choose,
    flash,
    for_inputs,
    replace,
    row,
    schedule,
)

# One row an operation, in the order in which it happens: what it computes, into which name, from which
# names or constants.  Names ending in _in come from a matrix product, those ending in _out go to one; m, l
# and O are kept from one tile of keys to the next.
SOFTMAX = (
    row(Opcode.CAST, "S", "S_in"),
    row(Opcode.MUL, "S", "S", "scale"),
    row(Opcode.SELECT, "S", "mask", "S", "masked", only="mask"),
    row(Opcode.ROW_MAX, "m_tile", "S"),
    row(Opcode.MAX, "m_new", "m", "m_tile"),
    row(Opcode.SUB, "m_shift", "m", "m_new"),
    row(Opcode.CAST, "exponent", "m_shift"),
    row(Opcode.EXP, "alpha", "exponent"),
    row(Opcode.CAST, "rescale", "alpha"),
    row(Opcode.COPY, "m", "m_new"),
    row(Opcode.SUB, "S", "S", "m_new"),
    row(Opcode.CAST, "E", "S"),
    row(Opcode.EXP, "P", "E"),
    row(Opcode.ROW_SUM, "l_tile", "P"),
    row(Opcode.CAST, "P_out", "P"),
    row(Opcode.CAST, "l_add", "l_tile"),
    row(Opcode.MUL, "l", "l", "rescale"),
    row(Opcode.ADD, "l", "l", "l_add"),
)

# Formats of all intermediates; "input" is that of Q, K and V.  Several presets: --precision PRESET.
FP32 = FlashPrecision(
    "fp32", scores="float32", softmax="float32", exponential="float32", operand="input", running="float32",
    product="float32", output="input",
)


class Tiles(AttentionTiling):
    """Fields of -t: block_q, block_kv, vector_rows and depth; add your own with Field(...)."""


def phases(problem, tiling, precision):
    """Return the phases of the kernel, one after the other; here it is one."""
    formats, sizes = for_inputs(precision, problem.dtype), (tiling.block_q, tiling.block_kv)
    cells, mask = attention_cells(problem, *sizes), causal_mask(problem, sizes)
    usual = flash(problem, sizes, cells, formats, attention_tensors(problem, formats.output), mask)
    named = {
        Opcode.EXP: Attributes(variant=formats.exp_variant), Opcode.ROW_SUM: Attributes(order=formats.sum_order)
    }
    softmax = Stage("softmax", choose(SOFTMAX, named))
    body = tuple(softmax if stage.name == "softmax" else stage for stage in usual.loops[0].stages)
    return [replace(usual, loops=(Loop(body, "key"),))]


NAME = schedule("NAME", phases, precisions=[FP32], tiling=Tiles, summary="FlashAttention-2, softmax to be changed")
'''


def new_schedule(name: str, folder: Path) -> Path:
    """Write ``NAME.py``, a schedule that runs as it is, and return where.

    Raises `SpecError` for a name that cannot be one, `OutputError` where the file is there already or
    cannot be written.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise SpecError(f"{name!r}: write a Python name: letters, digits and _, no digit first, no keyword")
    if name in {schedule for schedule, _ in SCHEDULES}:
        raise SpecError(f"{name!r} is a schedule of npusim's own; give yours another name")
    tree = ast.parse(_TEMPLATE)
    taken = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - {"NAME"}
    if name in taken:
        raise SpecError(f"{name!r} means something else in the file; give the schedule another name")
    path = folder / f"{name}.py"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_TEMPLATE.replace("NAME", name))
    except FileExistsError:
        raise OutputError(f"{path}: is there already; give another name, or move it") from None
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {reason_of(error, path)}") from None
    return path
