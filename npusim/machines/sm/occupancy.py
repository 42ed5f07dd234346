"""Occupancy: how many blocks a GPU's multiprocessor holds at a time, and what limits them.

Source: CUDA C++ Best Practices Guide, "Occupancy"; registers are dealt out warp by warp, shared
memory block by block, both in the units of the device file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.errors import BufferOverflowError, TilingError
from npusim.layout import REGISTER_BITS, WARP_LANES
from npusim.units import ceil_div, format_bytes, round_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.config.engine import WarpIssue

REGISTER_BYTES = REGISTER_BITS // 8


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """What one block needs: ``tenants`` are registers of a thread by name, without the overhead."""

    warps: int
    tenants: Mapping[str, int]
    shared: Mapping[str, int]

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory."""
        return sum(self.shared.values())


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Resident ``blocks``, as many as the tightest of ``limits`` (blocks, by what bounds them)."""

    blocks: int
    warps: int
    thread_registers: int
    shared_bytes: int
    limits: Mapping[str, int]

    @property
    def limit(self) -> str:
        """What allows no further block (the first of several)."""
        return min(self.limits, key=lambda name: self.limits[name])

    def __str__(self) -> str:
        return (
            f"{self.blocks} resident blocks of {self.warps} warps (limit: {self.limit}), "
            f"{self.thread_registers} registers a thread, {format_bytes(self.shared_bytes)} shared memory a block"
        )


def occupancy(needs: BlockNeeds, issue: WarpIssue, memory_bytes: int) -> Occupancy:
    """Return how many blocks fit one multiprocessor with ``memory_bytes`` of shared memory.

    Raises
    ------
    TilingError
        More warps than a block may have.
    BufferOverflowError
        More registers than a thread can address or than there are, or too much shared memory: names
        every tenant and the limit.
    """
    if needs.warps > issue.block_warps_count.value:
        raise TilingError(
            f"warps: a block of {needs.warps} warps, but a block has at most {issue.block_warps_count.value}"
        )
    overhead = issue.overhead_registers_count.value
    registers = sum(needs.tenants.values()) + overhead
    most = issue.thread_registers_count.value
    if registers > most:
        listed = " + ".join(f"{name} {n}" for name, n in needs.tenants.items())
        raise BufferOverflowError(
            f"registers: {listed} + overhead {overhead} = {registers} a thread, at most {most}; "
            "smaller tiles, arrangement=2x2, float16 accumulators, or more warps for a tile take fewer"
        )
    shared = round_up(needs.shared_bytes, issue.memory_unit_bytes.value)
    limit = min(issue.block_memory_bytes.value, memory_bytes)
    if shared > limit:
        listed = " + ".join(f"{name} {format_bytes(n)}" for name, n in needs.shared.items())
        raise BufferOverflowError(
            f"shared memory: {listed} = {format_bytes(shared)} > {format_bytes(limit)} a block "
            f"({shared:,} bytes needed, {limit:,} there)"
        )
    of_warp = round_up(registers * WARP_LANES, issue.register_unit_count.value)
    limits = {
        "registers": issue.registers_count.value // of_warp // needs.warps,
        "shared memory": memory_bytes // shared if shared else issue.blocks_count.value,
        "warps": issue.warps_count.value // needs.warps,
        "blocks": issue.blocks_count.value,
    }
    blocks = min(limits.values())
    if not blocks:
        raise BufferOverflowError(
            f"registers: {registers} a thread x {needs.warps * WARP_LANES} threads = "
            f"{of_warp * needs.warps:,}, but a multiprocessor has {issue.registers_count.value:,}"
        )
    return Occupancy(blocks, needs.warps, registers, shared, limits)


def thread_registers(size_bytes: int, warps: int) -> int:
    """Return the registers that a tile of ``size_bytes`` takes of each thread."""
    return ceil_div(size_bytes, warps * WARP_LANES * REGISTER_BYTES)
