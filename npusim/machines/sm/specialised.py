"""The specialised warp groups of a published kernel (Hopper) in a block; `group_turns` has their waits.

A persistent block processes one work tile after another, whose copies run ahead.
"""

from __future__ import annotations

from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.errors import BufferOverflowError, TilingError
from npusim.formats import get_format
from npusim.kernels.form.flow import views
from npusim.machines.published_kernel import GpuKernel, KernelUse
from npusim.machines.published_kernels import kernels
from npusim.machines.sm.core import REGISTER_BYTES, SM, SmTiling, shared_memory_bytes, warp_issue
from npusim.machines.sm.group_cost import GROUP_ROWS, GROUP_WARPS
from npusim.machines.sm.live_registers import staged_bytes

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.kernels.form.phase import Phase

#: Registers of a thread by the number of groups that compute (setmaxnreg of FlashAttention-3), and the registers for
#: addresses.
REGISTERS, ADDRESS_REGISTERS = MappingProxyType({1: 240, 2: 240, 3: 160}), 24
#: Largest number of columns of B in one product; the number of keys is a multiple of the number that P V adds at once
#: (PTX ISA, wgmma).
MOST_COLUMNS, KEYS_MULTIPLE = 256, 16


def check_layout(called: str, rows: int, keys: int, dim: int) -> None:
    """Raise `TilingError` if groups have no layout for a tile: rows must fill groups, and scores and O must fit in
    registers.
    """
    groups = rows // GROUP_ROWS
    if rows % GROUP_ROWS or groups not in REGISTERS:
        allowed = ", ".join(str(GROUP_ROWS * n) for n in REGISTERS)
        raise TilingError(
            f"block_q: {rows}; kernel={called} has layouts for {allowed} rows: {GROUP_ROWS} for each warp group"
        )
    if keys % KEYS_MULTIPLE or keys > MOST_COLUMNS:
        allowed = f"multiples of {KEYS_MULTIPLE} up to {MOST_COLUMNS}"
        raise TilingError(f"block_kv: {keys}; kernel={called} has layouts for {allowed} keys")
    count = _registers(keys, dim)
    if count > REGISTERS[groups]:
        raise TilingError(
            f"block_kv: {keys}; kernel={called} has no layout for {rows} x {keys} with head_dim {dim}: scores and "
            f"O need {count} registers of the {REGISTERS[groups]} of a thread; use fewer keys"
        )


def _registers(keys: int, dim: int) -> int:
    """Return the registers of a thread: scores and O of 64 rows in float32, and addresses."""
    return keys // 2 + dim // 2 + ADDRESS_REGISTERS


def _fits_registers(groups: int, keys: int, dim: int, size_bytes: int) -> bool:
    """Return whether there are registers for P in addition to the next scores and O; otherwise P passes through shared
    memory.

    Source: MmaPV_is_RS in FlashAttention-3's hopper/tile_size.h, with which this rule agrees for all its tiles of 16
    bits.
    """
    p = keys * size_bytes // (REGISTER_BYTES * 2)
    return _registers(keys, dim) + p <= REGISTERS[groups]


def specialised_tiling(kernel: GpuKernel, phase: Phase, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return how a kernel's warps execute attention, and a note on a block's use of a core.

    Raises `TilingError` if a tensor is added to scores and the kernel has no space for its tiles during a running
    product; ``BufferOverflowError`` if the buffers do not fit in shared memory.
    """
    decided, called, sizes, names = kernel.decides, kernel.name, phase.sizes, phase.names
    if decided.ahead and (added := [n for n in phase.values if names[n].axes == ("row", phase.loop_axis)]):
        others = {name: one.decides for name, one in kernels(GpuKernel).items()}
        able = ", ".join(name for name, one in others.items() if one.alternates and not one.ahead)
        raise TilingError(
            f"kernel: {called} does not support a tensor that is added to scores, such as {added[0]}; remove "
            f"kernel, or use {able}"
        )
    rows, keys = sizes["row"], sizes[phase.loop_axis]
    size = get_format(names["q"].fmt).size_bytes
    dims = {axis: kernel.head_dim(names["q"].fmt, sizes[axis]) for axis in ("head", "value")}
    least, most_dim = kernel.turn_dims[size]
    groups, issue = rows // GROUP_ROWS, warp_issue(device)
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    most = min(issue.block_memory_bytes.value, memory)
    loaded = dims["head"] if views(phase, phase.loop_axis) else sum(dims.values())
    q, kv = rows * dims["head"] * size, keys * loaded * size
    stores = decided.ahead > 0 and not _fits_registers(groups, keys, dims["value"], size)
    p = rows * keys * size if stores else 0
    depths = product(range(decided.depth, 0, -1), range(decided.held_depth, 0, -1))
    fits = [(n, m) for n, m in depths if n * kv + m * q + p <= most]
    if not fits:
        there = f"Q{' and P' if stores else ''} of {rows} and K and V of {keys} rows"
        raise BufferOverflowError(f"shared memory: {there} need {q + p + kv:,} of {most:,} bytes")
    depth, held = fits[0]
    decided = decided._replace(
        groups=groups,
        warps=GROUP_WARPS,
        depth=depth,
        stores=stores,
        held_depth=held,
        turns=decided.turns if least <= max(dims.values()) <= most_dim else None,
        charges=kernel.paid(KernelUse(phase, device, rows, keys, dims["head"], dims["value"])),
    )
    tiling = SmTiling(widths={phase.loop_axis: keys, **dims}, decided=decided)
    return (
        tiling,
        f"kernel={called}: {groups} warp groups on tiles of {rows} x {keys}, {depth} of K and of V, {held} of Q",
    )


def specialised_gradients(kernel: GpuKernel, phase: Phase, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return how a kernel's warps execute a loop with more products than that of an attention, and a note.

    Raises `TilingError` if the keys do not fill the rows of groups; ``BufferOverflowError`` if a block does not fit.
    """
    decided, called, sizes = kernel.decides, kernel.name, phase.sizes
    rows, columns = sizes[phase.row_axis], sizes[phase.loop_axis]
    groups, issue = rows // GROUP_ROWS, warp_issue(device)
    if rows % GROUP_ROWS or groups not in REGISTERS:
        allowed = ", ".join(str(GROUP_ROWS * n) for n in REGISTERS)
        raise TilingError(
            f"tile_kv: {rows}; kernel={called} has layouts for {allowed} keys: {GROUP_ROWS} for each warp group"
        )
    most = min(issue.block_memory_bytes.value, shared_memory_bytes(device))
    depth = next((n for n in range(decided.depth, 0, -1) if staged_bytes(phase, n, leaves=False) <= most), 0)
    if not depth:
        taken = staged_bytes(phase, 1, leaves=False)
        raise BufferOverflowError(
            f"shared memory: tiles of {rows} keys and {columns} queries need {taken:,} of {most:,}"
        )
    fmt = phase.names[next(s for s in phase.stages if s.is_product).rows[0].srcs[0]].fmt
    dims = {axis: kernel.head_dim(fmt, sizes[axis]) for axis in ("key_dim", "value")}
    charges = kernel.paid(KernelUse(phase, device, rows, columns, *dims.values()))
    decided = decided._replace(groups=groups, warps=GROUP_WARPS, depth=depth, turns=None, charges=charges)
    note = (
        f"kernel={called}: {groups} warp groups on tiles of {columns} queries and {rows} keys, {depth} of Q and of dO"
    )
    return SmTiling(widths={phase.loop_axis: columns, **dims}, decided=decided), note
