"""Where a run lies under its device's roofline: arithmetic intensity, what it allows, what was reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.config.node import NodeDevice
from npusim.timing.result import Roofline

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.simulation.result import RunData


def peak_flops_per_s(device: DeviceSpec, input_format: str) -> float | None:
    """Return the matrix units' rate for a format (their fastest for one they do not multiply).

    A multiply-add is two operations.  None for a device whose file describes no matrix unit.
    """
    for name, unit in device.matrix_engines.items():
        chosen = unit.fractals.get(input_format)
        steps = [chosen] if chosen is not None else list(unit.fractals.values())
        products = max(s.m_elements.value * s.n_elements.value * s.k_elements.value for s in steps)
        cores = device.group_count.value * device.cores[name].per_group_count.value
        rate = 2 * products / unit.cycles_per_fractal.value
        return float(cores * rate * device.clock_hz.value)
    return None


def roofline_of(result: RunData) -> Roofline | None:
    """Return a run's place; None for nodes, copies, and devices without matrix unit or time."""
    timing, device = result.timing, result.device
    if timing is None or isinstance(device, NodeDevice) or not timing.cycles:
        return None
    peak = peak_flops_per_s(device, str(getattr(result.problem, "dtype", "")))
    moved = timing.link_bytes.get("hbm", 0)
    if not (peak and result.program.flops and timing.compulsory_bytes and moved):
        return None
    return Roofline(
        intensity=result.program.flops / timing.compulsory_bytes,
        moved_intensity=result.program.flops / moved,
        peak_flops_per_s=peak,
        memory_bytes_per_s=float(device.link("hbm").bytes_per_s.value),
        attained_flops_per_s=result.program.flops * timing.clock_hz / timing.cycles,
    )
