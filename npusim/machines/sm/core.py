"""One streaming multiprocessor as programs see it: memories, arithmetic, and how it copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.config.engine import WarpIssue, WarpMatrixEngine
from npusim.errors import SpecError
from npusim.ir.buffers import AddressSpace, Allocator
from npusim.machines.sm.plan import FUSED, MUFU, RF, SM, SMEM, WARPS

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec


class SmCore:
    """Memories of one multiprocessor.

    Where the device file describes warps, what a block needs is counted in registers of a thread
    (`npusim.machines.sm.occupancy`), and element-wise work passes through a few of them; where it does
    not, every tile is held against the size of the register file.
    """

    def __init__(self, device: DeviceSpec, work_bytes: int = 0) -> None:
        self.device = device
        core = device.core(SM)
        self.issue = core.engines.get(WARPS)
        self.has_exponential_unit = MUFU in core.engines and not self.has_concurrent_warp_groups
        spaces = {
            f"{SM}.{name}": AddressSpace(f"{SM}.{name}", b.capacity_bytes.value, b.alignment_bytes.value)
            for name, b in core.buffers.items()
        }
        if self.has_concurrent_warp_groups:
            # What a thread has no register for is spilled; blocks that a core has no room for are not resident.
            for name in (RF, SMEM):
                spaces[name] = AddressSpace(name, work_bytes, spaces[name].alignment_bytes)
        if self.has_warps:
            # No memory of its own: as large as what passes through it.
            spaces[FUSED] = AddressSpace(FUSED, work_bytes, 1)
        self.passing = FUSED if self.has_warps else RF
        self.allocator = Allocator(spaces)

    @property
    def has_warps(self) -> bool:
        """Whether the file describes warps."""
        return isinstance(self.issue, WarpIssue)

    @property
    def has_concurrent_warp_groups(self) -> bool:
        """Whether warp groups work beside one another, each operation a run of all its instructions."""
        return has_concurrent_warp_groups(self.device)

    @property
    def is_staged(self) -> bool:
        """Whether tiles reach shared memory through registers, for want of an asynchronous copy."""
        return isinstance(self.issue, WarpIssue) and self.issue.copies.value == "staged"

    @property
    def row_sum(self) -> str:
        """Order of row sums that name none: the device's, else left to right, as golden/README.md's flash has it."""
        return "sequential" if self.device.row_sum is None else self.device.row_sum.value

    def arithmetic(self, operand: str, kept: str) -> str:
        """Return the registry name of products of ``operand``, in the accumulators ``kept`` asks for."""
        engine = self.device.matrix_engine(SM)
        if isinstance(engine, WarpMatrixEngine):
            return engine.steps_of(kept).arithmetic.value
        return engine.arithmetic_of(operand)

    def check_lanes(self, what: str, lanes: object) -> None:
        """Raise `SpecError` for a phase that says nothing of lanes on a device that times them."""
        if self.has_warps and not self.has_concurrent_warp_groups and not lanes:
            raise SpecError(
                f"{self.device.name}: {what} does not say how its tiles lie in a warp's lanes, which this device's "
                "timing needs; flash, pasa and split_kv do. h200 takes this one, for bits and time"
            )


def has_concurrent_warp_groups(device: DeviceSpec) -> bool:
    """Return whether a device's warp groups work beside one another, as its file says how."""
    issue = device.cores[SM].engines.get(WARPS) if SM in device.cores else None
    return isinstance(issue, WarpIssue) and issue.sharing is not None
