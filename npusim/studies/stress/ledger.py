"""Ledger of an execution: saturation and flushing of each step, and the first value that differs from float64.

Each step is compared with float64 on the step's operands, so that the first step with an error is its origin. Products
are checked only for overflow, because the arithmetic of their unit is stated.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats import BLOCK_FORMATS, get_format
from npusim.formats.cast import scale_values, widen
from npusim.program.ir.op import Opcode, Step
from npusim.program.numerics.executor import steps_of
from npusim.program.numerics.semantics import apply

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.executor import Moment

#: Opcodes whose variant names a function and how it is rounded: ``exp2.exp2p``.
FUNCTIONS = (Opcode.EXP, Opcode.LOG, Opcode.RSQRT, Opcode.SQRT, Opcode.TANH, Opcode.ERF)
#: Allowed error of a sum of n values, in steps of its format: n times this.
STEPS_A_VALUE = 1 / 8


@dataclass
class Entry:
    """One step of the program: how many of its values saturated, became 0, or became Inf or NaN."""

    step: str
    fmt: str
    values: int = 0
    saturated: int = 0
    flushed: int = 0
    overflowed: int = 0


class Ledger:
    """Observer of an execution that fills the ledger; a value with a relative error up to ``allowed`` is right."""

    def __init__(self, allowed: float) -> None:
        self.allowed = allowed
        self.entries: dict[tuple[str, str, int], Entry] = {}
        #: The first value with an error: step, place, and both values in words.
        self.first = ""

    def __call__(self, moment: Moment) -> None:
        """Compare an executed step with float64, and add it to the ledger."""
        step = moment.step
        if step.dst.fmt == "int8" or step.opcode in (Opcode.COPY, Opcode.FILL, Opcode.SELECT):
            return
        wide = [widen(x).astype(np.float64) for x in moment.sources]
        with np.errstate(all="ignore"):
            exact = np.broadcast_to(_exact(moment, wide), moment.result.shape)
            result = widen(moment.result).astype(np.float64)
            size, unit = _step(moment.result, step.dst.fmt, exact)
        known = np.isfinite(exact)
        key = moment.phase, moment.resolved.op.label, moment.index
        entry = self.entries.setdefault(key, Entry(_name(moment), step.dst.fmt))
        entry.values += exact.size
        entry.flushed += int((known & (result == 0) & (exact != 0)).sum())
        lost = known & ~np.isfinite(result)
        entry.overflowed += int(lost.sum())
        if step.opcode is Opcode.CAST:
            limit = unit * get_format(_element(step.dst.fmt)).max_finite
            entry.saturated += int(
                (known & ~lost & (np.abs(result) >= limit) & (np.abs(exact) > limit + size / 2)).sum()
            )
        if self.first:
            return
        if step.opcode is not Opcode.MATMUL:
            steps = STEPS_A_VALUE * wide[0].shape[step.attributes.axis] if step.opcode is Opcode.ROW_SUM else 1.0
            with np.errstate(invalid="ignore"):
                lost |= known & (np.abs(result - exact) > np.maximum(steps * size, self.allowed * np.abs(exact)))
        if lost.any():
            self.first = _described(moment, lost, result, exact)

    def worth(self) -> tuple[Entry, ...]:
        """Return the steps in which a value saturated, became 0, or became Inf or NaN, in the order of the program."""
        return tuple(e for e in self.entries.values() if e.saturated or e.flushed or e.overflowed)


def _name(moment: Moment) -> str:
    step = moment.step
    return f"{moment.phase}: {moment.resolved.op.label} {step.name or step.opcode.value}"


def _described(moment: Moment, lost: NDArray[np.bool_], result: NDArray[Any], exact: NDArray[np.float64]) -> str:
    lane, row, column = (int(x[0]) for x in np.nonzero(lost))
    at = " ".join(f"{name}={index}" for name, index in moment.resolved.path)
    values = f"{result[lane, row, column]:.6g}, in float64 {exact[lane, row, column]:.6g}"
    place = f"{moment.blocks[lane]}{at and ' '}{at} row {row} column {column}"
    return f"{_name(moment)} ({moment.step.opcode.value} to {moment.step.dst.fmt}), {place}: {values}"


def _exact(moment: Moment, wide: list[Any]) -> Any:
    """Return the step's result in float64 from its operands; for a product, without its accumulator."""
    step, how = moment.step, moment.step.attributes
    if step.opcode is Opcode.CAST:
        return wide[0]
    if step.opcode is Opcode.MATMUL:
        a, b = (
            x.swapaxes(-1, -2) if is_turned else x
            for x, is_turned in zip(wide, (how.transpose_a, how.transpose_b), strict=True)
        )
        return a @ b
    if step.opcode is Opcode.ROW_SUM:
        return math.prod(wide).sum(axis=how.axis, keepdims=True)
    if step.opcode in (Opcode.FOLD, Opcode.SCAN):  # each function of the operation, correctly rounded
        how = replace(how, variant=re.sub(r"'(\w+)\.\w+'", r"'\1.correct'", how.variant))
    elif step.opcode in FUNCTIONS:
        function = how.variant.partition(".")[0] or step.opcode.value
        how = type(how)(variant=f"{function}.correct")
    return apply(step.opcode, wide, wide[0], "float64", how)


def _element(fmt: str) -> str:
    return BLOCK_FORMATS[fmt].element if fmt in BLOCK_FORMATS else fmt


def _step(result: NDArray[Any], name: str, exact: NDArray[np.float64]) -> tuple[Any, Any]:
    """Return the step of a format at each value, and the value of an element 1 there (in block formats this is the
    scale).
    """
    fmt = get_format(_element(name))
    unit = scale_values(result["scale"]).astype(np.float64) if result.dtype.names else 1.0
    exponent = np.frexp(np.abs(exact) / unit)[1] - 1
    return np.ldexp(unit, np.maximum(exponent, fmt.min_exponent) - fmt.mantissa_bits), unit


def coarsest_step(program: TileProgram) -> float:
    """Return the largest relative step of the formats that a program's steps write; for block formats, that of an
    element.
    """
    written = {
        _element(step.dst.fmt)
        for phase in program.phases
        for step in steps_of(phase.body(phase.blocks[0]))
        if isinstance(step, Step)
    }
    return max(2.0**-fmt.mantissa_bits for fmt in map(get_format, written) if not fmt.is_integer)
