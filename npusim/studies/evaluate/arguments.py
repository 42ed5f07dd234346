"""Inputs and outputs of a candidate in the form of the reference's: tensors of a program, or arguments of a recorded
call.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim import formats
from npusim.errors import SpecError
from npusim.program.numerics.evaluate import chosen, chosen_heads, rows_alone
from npusim.program.numerics.paths import bits_of
from npusim.simulation.evaluation import TensorSubject, result_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from npusim.program.ir.tile import GlobalTensor
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.evaluate import Output
    from npusim.program.numerics.executor import HeadSource
    from npusim.simulation.evaluation import Subject
    from npusim.simulation.plan import Plan

#: Batches, heads, rows and columns.
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class JudgedOutput:
    """An output: its ``name``, ``shape`` and format, and the program's tensors that have its values, each with its
    sizes.

    ``is_argument``: the shape is that of the call's argument; each tensor of the program is a part of the argument, or
    the argument in another arrangement.
    """

    name: str
    shape: Shape
    fmt: str
    parts: tuple[tuple[GlobalTensor, Output], ...]
    is_argument: bool = False


def inputs_of(subject: Subject, *, by_parameter: bool) -> dict[str, tuple[Shape, str]]:
    """Return shape and format of the inputs by name; ``by_parameter``: the arguments of a recorded call."""
    described = dict[str, tuple[Shape, str]]()
    for t in subject.plain.values():
        is_argument = by_parameter and t.view is not None
        name = t.view.parameter if is_argument and t.view is not None else t.name
        described[name] = _shape_of(t) if is_argument else t.stored_shape, t.fmt
    return described


def outputs_of(program: TileProgram, subject: Subject, *, by_parameter: bool) -> list[JudgedOutput]:
    """Return the outputs, the result first; ``by_parameter``: the arguments that a recorded call stores to."""
    result = result_of(program)
    others = [t for t in program.tensors.values() if t.role == "output" and t.name != result.name]
    found = dict[str, JudgedOutput]()
    for t in (result, *others):
        own: Output = subject.output
        if t is not result:
            own = TensorSubject(*t.stored_shape, ())
        shape, name = (own.batch, own.heads, own.seq_q, own.output_cols), t.parameter or t.name
        if by_parameter and t.view is not None:
            before = found[name].parts if name in found else ()
            found[name] = JudgedOutput(name, _shape_of(t), t.fmt, (*before, (t, own)), is_argument=True)
        else:
            found[name if name not in found else t.name] = JudgedOutput(name, shape, t.fmt, ((t, own),))
    return list(found.values())


def _shape_of(t: GlobalTensor) -> Shape:
    """Return the shape of an argument."""
    assert t.view is not None
    return four_axes(t.view.argument)


def four_axes(shape: Sequence[int]) -> Shape:
    """Return a shape as batches, heads, rows and columns; axes before the last four are merged with the first of these.

    >>> four_axes((5, 2, 3, 4, 8)), four_axes((8,))
    ((10, 3, 4, 8), (1, 1, 1, 8))
    """
    *before, heads, rows, cols = (1, 1, 1, *shape)
    return prod(before), heads, rows, cols


def store(plan: Plan, program: TileProgram, source: HeadSource, output: JudgedOutput, file: str) -> None:
    """Store the chosen rows of an output in ``file``, with their indices."""
    parts = [(t, *_computed_rows(plan, program, source, t, own)) for t, own in output.parts]
    _, values, has = parts[0]
    if output.is_argument:
        values, elements = np.zeros(output.shape, values.dtype), np.zeros(output.shape, np.bool_)
        for t, written, computed in parts:
            assert t.view is not None
            at = t.view.array(np.arange(prod(output.shape)).reshape(t.view.argument))
            values.reshape(-1)[at] = written
            elements.reshape(-1)[at] = computed[..., None]
        has = np.any(elements, axis=-1)
        left = has[..., None] & ~elements
        if left.any():
            values[left] = _not_a_number(output)
    np.savez(file, o=values, computed=has)


def _not_a_number(output: JudgedOutput) -> Any:
    """Return the bits of an element that nothing stores."""
    if formats.get_format(output.fmt).is_integer:
        raise SpecError(f"{output.name}: elements that no program stores cannot be judged in {output.fmt}")
    return bits_of(formats.cast(np.full(1, np.nan, np.float32), output.fmt))[0]


def _computed_rows(
    plan: Plan, program: TileProgram, source: HeadSource, t: GlobalTensor, own: Output
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the bits of a tensor's chosen rows, (batch, heads, rows, columns), and the indices of these rows."""
    rows = chosen("rows", plan.request.rows, own.seq_q)
    written = rows_alone(program, source, rows, chosen_heads(own, plan.request.heads), output=t.name)
    shape = own.batch, own.heads, own.seq_q, own.output_cols
    values = np.zeros(shape, bits_of(next(iter(written.values()))).dtype)
    has = np.zeros(shape[:3], np.bool_)
    for (n, h, row), block in written.items():
        values[n, h, row : row + len(block)] = bits_of(block)
        has[n, h, row : row + len(block)] = True
    return values, has
