"""Programs for an Ascend device: phases of an algorithm, one after the other on one core group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.ir.program import TileProgram
from npusim.machines.ascend.group import AscendGroup
from npusim.machines.ascend.phase import AscendPhase
from npusim.machines.ascend.pricing import AscendPricing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npusim.algorithms.phase import Phase
    from npusim.config.device import DeviceSpec
    from npusim.machines.ascend.plan import AscendTiling


class AscendMachine:
    """The Ascend family on one device, for one program."""

    def __init__(self, device: DeviceSpec) -> None:
        self.group = AscendGroup(device)

    def build(
        self, name: str, phases: Iterable[tuple[Phase, AscendTiling]], flops: int, notes: tuple[str, ...] = ()
    ) -> TileProgram:
        """Return the program.

        Raises :class:`~npusim.errors.TilingError` (or its ``BufferOverflowError``) where a phase does not
        fit a memory, or needs a route that the device has not.
        """
        group, listed = self.group, list(phases)
        built = []
        for phase, tiling in listed:
            group.allocator.start_phase()
            built.append(AscendPhase(group, phase, tiling).build())
        return TileProgram(
            name=name, queues=group.queues(), rings=tuple(group.allocator.rings),
            spaces=dict(group.allocator.spaces), used_bytes=dict(group.allocator.peak_bytes),
            tensors={t.name: t for phase, _ in listed for t in phase.all_tensors()}, phases=tuple(built), flops=flops,
            constants={n: v for phase, _ in listed for n, v in phase.all_values().items()}, notes=notes,
            pricing=AscendPricing,
        )  # fmt: skip
