"""Predicted times of the configurations of one kernel, and the order of the configurations, for ``tune`` and
``config=best``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.config.family import registered
from npusim.late_methods import dataclass
from npusim.program.timing.timing_result import Limit
from npusim.simulation.classes import class_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.config.bands import Validated
    from npusim.config.device import DeviceSpec, L2State
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.timing.timing_result import TimingResult

#: Time range, as a share of the least time, within which configurations count as equally fast: measured times of
#: memory-bound kernels differ by no more than this (issue 57), so that a rule decides among them.
TIE = 0.02
NO_LIMIT = Limit("", 0.0)


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a configuration, or the reason why it has none.

    ``us``: time of the cores, without a launch; ``key``: its class of bits (empty: not known); ``registers``: registers
    of a thread, from a compiler or an estimate, of which ``spilled`` are in memory; ``warps``: warps that are resident
    on a core; ``block_warps``: warps of a block without products; ``limit``: what limits the time, as in a run;
    ``errors``: the errors of such predicted times (None: predicted without a device).  ``reason``: why there is no
    time; ``fits``: whether a larger device would suffice.  ``launch_us``: time of each launch of a graph in addition to
    that of the cores: dispatch, end and the gap to the next launch.
    """

    us: float | None = None
    key: str = ""
    registers: int | None = None
    spilled: int = 0
    warps: int = 0
    limit: Limit = NO_LIMIT
    reason: str = ""
    fits: bool = True
    errors: Validated | None = None
    block_warps: int = 0
    launch_us: float = 0.0


def steady(l2: L2State | None, device: DeviceSpec) -> L2State | None:
    """Return the state of L2 for comparisons of configurations: the state in a stream of launches, as on a GPU."""
    return l2 or ("steady" if registered(device.family).processor == "gpu" else None)


def predicted(program: TileProgram, device: DeviceSpec, timing: TimingResult) -> Prediction:
    """Return the prediction of a configuration's program from its time."""
    us, key, room = timing.core_us, class_key(program, device), program.occupancy
    rates = {name: link.rate for name, link in device.links.items()}
    limit = replace(timing, uses=timing.uses_of_groups()).limit(rates)
    launch_us = timing.stream_s * 1e6
    if room is None:
        return Prediction(us, key, limit=limit, launch_us=launch_us)
    of_rows, warps = 0 if program.flops else room.warps, room.blocks * room.warps
    spilled = room.thread_registers, room.spilled_registers
    return Prediction(us, key, *spilled, warps, limit, block_warps=of_rows, launch_us=launch_us)


def ranked(predictions: Sequence[Prediction]) -> list[int]:
    """Return the indices of predictions with a time, the best first.

    If memory limits the best prediction, predictions within `TIE` of it count as equally fast. Among these, a
    prediction without spills comes first; then one with more resident warps; then one with fewer warps in a block of
    rows, because these wait for one another at barriers; then the faster one.
    """
    known = [i for i, p in enumerate(predictions) if p.us is not None]
    times = {i: predictions[i].us or 0.0 for i in known}
    best = min(known, key=lambda i: times[i], default=0)
    within = times[best] * (1 + TIE * (predictions[best].limit.is_link)) if known else 0.0

    def order(i: int) -> tuple[bool, bool, int, int, float, int]:
        p, is_tied = predictions[i], times[i] <= within
        resident, of_block = (-p.warps, p.block_warps) if is_tied else (0, 0)
        return not is_tied, is_tied and p.spilled > 0, resident, of_block, times[i], i

    return sorted(known, key=order)
