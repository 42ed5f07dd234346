"""Registers of a block whose loop has more products than that of an attention, counted from the values that are alive
at one time.
"""

from __future__ import annotations

from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.formats import stored_format
from npusim.formats.layout.fragment import WARP_LANES
from npusim.kernels.form.flow import conflicts, flow, most_alive, storage
from npusim.kernels.form.language import ONE
from npusim.machines.sm.core import REGISTER_BYTES
from npusim.machines.sm.group_cost import FRAGMENT_COLUMNS, FRAGMENT_ROWS, LANE_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.kernels.form.phase import Phase
    from npusim.machines.decisions import GpuDecisions

#: Registers of a lane in addition to the values that are alive: with products of warp groups, and with products of
#: single warps, which hold parts of both operands.  Medians over tiles of dQ and of dK and dV that Triton 3.6 compiles
#: without spills: 79 for sm_90 and 54 for sm_80; half of the tiles are within 9 and 19 registers of these medians
#: (reports/recurrences).
BESIDE: Mapping[str, int] = MappingProxyType({"wgmma": 30, "mma": 84})


def has_more(phase: Phase) -> bool:
    """Return whether the products of a loop have more results than an attention, which has S and O."""
    return len({s.rows[0].dst for loop in phase.loops if loop.axis for s in loop.stages if s.is_product}) > len("SO")


def live_registers(phase: Phase, warps: int, decided: GpuDecisions) -> int:
    """Return the registers of a lane for the tiles, vectors and states that are alive at one time, in a block of
    ``warps`` warps.

    Operands of products are in shared memory; of an operand with one row, each lane has some columns.
    """
    places, down = flow(phase), max(1, warps // (decided.across * decided.repeats))
    roots, sizes = storage(phase, places, conflicts(phase)), dict[str, float]()
    multiplied = {n for s in phase.stages if s.is_product for n in s.rows[0].srcs}
    for n, what in phase.names.items():
        if places[n] == "mask" or (places[n] == "global" and n in multiplied):
            continue
        elements, (rows, *across) = prod(phase.sizes[a] for a in what.axes), what.axes
        if not across:
            count = LANE_ROWS * elements / (down * FRAGMENT_ROWS)
        elif rows == ONE:
            count = elements / (decided.across * FRAGMENT_COLUMNS // LANE_ROWS)
        else:
            count = elements / (WARP_LANES * warps) * (decided.repeats if phase.loop_axis in what.axes else 1)
        sizes[n] = count * stored_format(what.fmt).bytes_of(REGISTER_BYTES) / REGISTER_BYTES**2
    return round(most_alive(phase, sizes, roots))


def staged_bytes(phase: Phase, tiles: int, *, leaves: bool) -> int:
    """Return the shared memory of a block: lasting operands, ``tiles`` visited operands, and complete results of rows.

    ``leaves``: the results that rows compute for products are always in shared memory, because several warps share the
    rows.
    """
    places, total = flow(phase), 0
    read = {n: r.srcs for s in phase.stages if s.is_product for r in s.rows for n in r.srcs}
    for n in read:
        what = phase.names[n]
        size = stored_format(what.fmt).bytes_of(prod(phase.sizes[a] for a in what.axes))
        if places[n] == "global":
            total += size * (tiles if phase.loop_axis in what.axes else 1)
        elif places[n] == "up" and (leaves or n in phase.factors):
            total += size
    return total
