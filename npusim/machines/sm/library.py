"""Kernels of a framework between its products: streams of a matrix, and what their instructions take of a core."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.config.gpu_engine import WarpIssue
from npusim.errors import SpecError
from npusim.machines.sm.groups import plain_tiling
from npusim.machines.sm.plan import SM, WARPS

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.machines.sm.plan import SmTiling


def operator_tiling(
    device: DeviceSpec, operator: str, columns: int, masked: float = 0.0
) -> SmTiling:
    """Return how an operator over a matrix of so many ``columns`` is executed, ``masked`` the share that is masked.

    ``copy`` reads and writes as fast as memory lets it; ``add`` reads a second matrix that all heads share, element by
    element; ``softmax`` works on whole rows.
    """
    tiling, issue = plain_tiling(device), device.engine(SM, WARPS)
    assert isinstance(issue, WarpIssue)
    if operator == "copy":
        return tiling
    if issue.library is None:
        raise SpecError(f"{device.name}: cores.{SM}.engines.{WARPS}.library: missing; {operator} needs it")
    if operator == "add":
        cycles, constant = issue.library.add_cycles.value, "add_cycles"
    else:
        cycles = issue.library.softmax_cycles(columns) + masked * issue.library.masked_cycles.value
        constant = f"softmax.{min(issue.library.softmax, key=lambda n: abs(int(n) - columns))}.row_cycles"
    assert tiling.work is not None
    return replace(tiling, work=replace(tiling.work, element_cycles=cycles, constant=constant))
