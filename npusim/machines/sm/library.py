"""A library's kernels: matrix products with its tiles and splits of k, and a framework's operators between them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from npusim.config.engine import GroupMatrixEngine
from npusim.config.tiling import Field, Tiling
from npusim.errors import BufferOverflowError, SpecError
from npusim.formats import get_format
from npusim.ir.op import GroupWork
from npusim.layout.fragment import WARP_LANES
from npusim.machines.sm.core import SM, TENSOR, WARPS, SmTiling, engine_of, warp_issue
from npusim.machines.sm.groups import GROUP_ROWS, GROUP_WARPS, plain_tiling
from npusim.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from npusim.algorithms.phase import Phase
    from npusim.config.device import DeviceSpec
    from npusim.ir.tile import GlobalTensor


def operator_tiling(device: DeviceSpec, phase: Phase) -> SmTiling:
    """Return how an operator over a matrix is executed.

    ``copy`` reads and writes as fast as memory lets it; ``add`` reads a second matrix that all heads share, element by
    element; ``softmax`` works on whole rows.
    """
    assert phase.operator is not None
    (operator, masked), columns = phase.operator, phase.sizes[phase.loop_axis]
    tiling, issue = plain_tiling(device), warp_issue(device)
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


class GpuGemmFields(Tiling):
    """Tile of C and the piece of k on a GPU; what is left open is what a library would choose."""

    block_m: int | None = Field(default=None, ge=64, le=256, multiple_of=64, description="rows of a tile of C")
    block_n: int | None = Field(default=None, ge=16, le=256, multiple_of=16, description="columns of a tile of C")
    block_k: int = Field(default=64, ge=16, le=256, multiple_of=16, description="piece of k loaded at once")
    splits: int | None = Field(default=None, ge=1, le=64, description="blocks that share the k of a tile")
    stages: int = Field(default=3, ge=1, le=8, description="pieces of k in shared memory")


#: Tiles and splits that a library has, and what a wave of them costs (hopper.md section 3.12): over the tensor
#: cores' own time, and cycles of its start and end.
ROWS, COLUMNS, SPLITS = (64, 128), (64, 128, 192, 256), (1, 2, 4, 8)
WAVE_FACTOR, WAVE_CYCLES = 1.15, 5000.0  # hopper.md section 3.12
#: Cycles of a launch behind another, and bytes a cycle of memory (hopper.md section 1: 3.1 us, 4.27 TB/s, 1.98 GHz).
SPLIT_CYCLES, PART_BYTES = 6100.0, 2157.0
#: Rows of what asynchronous copies move are multiples of it (CUDA C++ Programming Guide, asynchronous copies).
ALIGNED_BYTES = 16


def library_tile(
    m: int, n: int, k: int, cores: int, tiling: GpuGemmFields, heads: int = 1, edges: int | None = None
) -> tuple[int, int, int]:
    """Return rows, columns and splits with the least waves' time among a library's; fields that are given stay.

    ``edges``: rows and columns together that fit a core's shared memory; none, or where no choice does: all are tried.
    """

    def time(choice: tuple[int, int, int]) -> tuple[float, int]:
        rows, columns, splits = choice
        waves = ceil_div(heads * ceil_div(m, rows) * ceil_div(n, columns) * splits, cores)
        # A product of 64 x N x 16 takes N / 2 cycles, its operands come at 64 bytes a cycle (hopper.md section 1).
        busy = ceil_div(k, 16 * splits) * max(columns / 2 * rows / 64, (rows + columns) / 2)
        # Parts are written and read again, in float32, by a kernel more.
        parts = SPLIT_CYCLES + heads * m * n * 4 * (splits + 1) / PART_BYTES if splits > 1 else 0.0
        return waves * (busy * WAVE_FACTOR + WAVE_CYCLES) + parts, -rows * columns

    rows, columns, splits = (
        (value,) if value else choices
        for value, choices in zip((tiling.block_m, tiling.block_n, tiling.splits), (ROWS, COLUMNS, SPLITS), strict=True)
    )
    choices = list(product(rows, columns, splits))
    return min([c for c in choices if edges is None or c[0] + c[1] <= edges] or choices, key=time)


def library_tiling(
    a: GlobalTensor, b: GlobalTensor, c: GlobalTensor, fields: GpuGemmFields, device: DeviceSpec
) -> tuple[tuple[int, int, int], int, SmTiling]:
    """Return the tile (m, n, k) in which a library multiplies, its splits of k, and how warps execute it.

    A warp group for 64 rows, copies by warps of their own.
    """
    size, stages, issue = get_format(a.fmt).size_bytes, fields.stages, warp_issue(device)
    edges = issue.block_memory_bytes.value // (stages * fields.block_k * size)
    heads, cores = c.batch * c.heads, device.group_count.value
    m, n, splits = library_tile(c.rows, c.cols, a.cols, cores, fields, heads, edges)
    k = fields.block_k
    shared, memory = stages * (m + n) * k * size, device.core(SM).buffer("SMEM").capacity_bytes.value
    most = min(issue.block_memory_bytes.value, memory)
    if shared > most:
        raise BufferOverflowError(
            f"shared memory: {stages} stages of {m}x{k} and {k}x{n} = {format_bytes(shared)} > {format_bytes(most)}"
        )
    engine = engine_of(device, TENSOR, GroupMatrixEngine)
    work = GroupWork(GROUP_WARPS, generation="mma" if engine.wgmma is None else "wgmma", is_specialised=True)
    is_aligned = not any(t.cols * get_format(t.fmt).size_bytes % ALIGNED_BYTES for t in (a, b, c))
    if not is_aligned and issue.library is not None:
        work = replace(
            work,
            product_cycles=issue.library.unaligned_product_cycles.value,
            element_cycles=issue.library.unaligned_store_cycles.value,
            constant="unaligned_store_cycles",
        )
    groups = max(1, m // GROUP_ROWS)
    # Accumulators and as much again for addresses and operands.
    registers = m * n // (groups * GROUP_WARPS * WARP_LANES) + 64
    by_registers = issue.registers_count.value // (registers * groups * GROUP_WARPS * WARP_LANES)
    blocks = max(1, min(memory // shared, by_registers))
    return (m, n, k), splits, SmTiling(groups=groups, residents=blocks, depth=stages, work=work)
