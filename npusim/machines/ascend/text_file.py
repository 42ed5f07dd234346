"""The file of a TileLang-Ascend program: a comment that states its origin, and a function that returns the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from npusim.errors import ProgramError
from npusim.machines.ascend.text_buffers import identifier
from npusim.machines.ascend.text_lines import UnlikeError, lines_of
from npusim.machines.ascend.written_text import KernelText, kernel_text

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram

#: Numbers of steps, beyond the first two lengths, for which the text for all lengths is compared with the program.
_COMPARED_AT = (2, 5)
_UNSTATED = (
    "The text has the values, the order, the buffers and the flags of the program. It does not state the time: "
    "costs, L2 and the launch are the device's. On the device, a wait for a flag between cores stops the scalar "
    "unit of its core; in npusim's program it stops one pipe. Slots of a ring in a core begin at 0 for each block. "
    "The device computes sums of rows, exponentials and products in its own way."
)


#: A length of the problem that grows: its name, first value and step, and the program for any value.
Growing = tuple[str, int, int, Callable[[int], "TileProgram"]]


def tilelang_file(
    program: TileProgram, device: DeviceSpec, growing: Growing | None = None
) -> tuple[str, tuple[str, ...]]:
    """Return a program as the text of a file, and a list of properties that the text does not state.

    The file has one function with the name of the program; with ``growing``, the length is its argument.  Raises
    `ProgramError` for parts that TileLang-Ascend cannot state.
    """
    name = identifier(program.name)
    if growing is None:
        kernel, arguments, before = kernel_text(program, device), "", []
    else:
        kernel = _for_all_lengths(program, device, growing)
        n, first, step, _ = growing
        arguments = f"{n}={first}"
        before = [
            f"    if {n} < {first} or {n} % {step} != {first % step}:",
            f'        raise ValueError("{n} must be {first}, {first + step}, {first + 2 * step}, ...")',
            f"    tiles = {n} // {step}",
            "",
        ]
    lines = [
        "import tilelang",
        "from tilelang import language as T",
        "",
        "",
        f"@tilelang.jit(out_idx={list(kernel.outputs)}, workspace_idx={list(kernel.workspaces)})",
        f"def {name}({arguments}):",
        *before,
        "    @T.prim_func",
        "    def main(",
        *lines_of(kernel.parameters, 2),
        "    ):",
        *lines_of(kernel.body, 2),
        "",
        "    return main",
        "",
    ]
    return "\n".join(lines), (_UNSTATED, *kernel.notes)


def _for_all_lengths(program: TileProgram, device: DeviceSpec, growing: Growing) -> KernelText:
    """Return the text for all lengths: that of the first two, which is compared with those of longer ones."""
    name, least, step, program_of = growing
    start = least // step

    def at(number: int) -> KernelText:
        return kernel_text(program_of(least + number * step), device, grows=True)

    try:
        first = kernel_text(program, device, grows=True)
        whole = first.with_growing(at(1), "tiles", start, 1)
        for number in _COMPARED_AT:
            if first.with_growing(at(number), "tiles", start, number) != whole:
                raise UnlikeError(f"at {name} = {least + number * step:,} other numbers differ")
    except UnlikeError as error:
        listed = f"{least:,}, {least + step:,}, ..."
        raise ProgramError(f"{program.name}: one text cannot state {name} = {listed}: {error}") from None
    return whole
