"""A plain matrix product, to validate the matrix side of the machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.algorithms.flash import FlashPrecision
from npusim.algorithms.gemm import gemm, gemm_tiles
from npusim.algorithms.precision import for_inputs
from npusim.config.kernels import GemmProblem
from npusim.config.tiling import Field, Tiling
from npusim.errors import SpecError, TilingError
from npusim.formats import get_format
from npusim.ir.tile import GlobalTensor
from npusim.machines.ascend import AscendMachine, gemm_tiling, loaded_k
from npusim.machines.sm import SmMachine
from npusim.machines.sm.core import works_beside
from npusim.machines.sm.groups import plain_tiling, product_tiling
from npusim.schedules.registry import Schedule
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.algorithms.phase import Cell
    from npusim.config.device import DeviceSpec
    from npusim.ir.program import TileProgram


def swizzled(cells: tuple[Cell, ...], together: int, rows: int) -> tuple[Cell, ...]:
    """Return tiles of C column by column within bands of so many rows of tiles, each ``rows`` high."""

    def place(cell: Cell) -> tuple[int, ...]:
        (_, row, _), (_, col, _) = cell.spans
        return cell.batch, cell.head, row // (rows * together), col, row

    return tuple(sorted(cells, key=place)) if together > 1 else cells


class GemmFields(Tiling):
    """Tile of C and the piece of k; the defaults are the vendor's best (ascend.md section 3.2)."""

    block_m: int = Field(default=128, ge=16, multiple_of=16, description="rows of a tile of C")
    block_n: int = Field(default=256, ge=16, multiple_of=16, description="columns of a tile of C")
    block_k: int = Field(default=64, ge=16, multiple_of=16, description="piece of k multiplied at once")
    load_k: int | None = Field(
        default=None, ge=16, multiple_of=16,
        description="piece of k loaded into L1 at once, a multiple of block_k; default: 256, as the vendor's",
    )
    swizzle: int = Field(
        default=1, ge=1, description="rows of tiles of C that blocks go through together, column by column (CATLASS)"
    )
    unit_flag: bool = Field(
        default=False, description="whether one half of the accumulators drains while the other still adds up"
    )


STORED = FlashPrecision(
    "stored", scores="input", softmax="float32", exponential="float32", operand="input", running="float32",
    product="input", output="input",
)  # fmt: skip


def build(
    problem: GemmProblem, tiling: GemmFields, device: DeviceSpec, precision: FlashPrecision
) -> TileProgram:
    """Return C = A B as a tile program for one Ascend device."""
    p, t = problem, tiling
    a = GlobalTensor("a", 1, 1, p.m, p.k, p.dtype, "input")
    b = GlobalTensor("b", 1, 1, p.k, p.n, p.dtype, "input")
    c = GlobalTensor("c", 1, 1, p.m, p.n, for_inputs(precision, p.dtype).output, "output")
    phase = gemm("gemm", a, b, c, (t.block_m, t.block_n), arithmetic=precision.arithmetic)
    machine = AscendMachine(device)
    if t.load_k and t.load_k % t.block_k:
        raise TilingError(f"load_k: {t.load_k} is no multiple of block_k={t.block_k}")
    load = t.load_k or loaded_k(t.block_m, t.block_n, t.block_k, p.dtype, machine.group)
    fields = gemm_tiling("gemm", t.block_m, t.block_n, t.block_k, load, halves=2 if t.unit_flag else 1)
    phase = replace(phase, cells=swizzled(phase.cells, t.swizzle, t.block_m))
    return machine.build("gemm", [(phase, fields)], p.flops())


class GpuGemmFields(Tiling):
    """Tile of C and the piece of k on a GPU; what is left open is what a library would choose."""

    block_m: int | None = Field(default=None, ge=64, le=256, multiple_of=64, description="rows of a tile of C")
    block_n: int | None = Field(default=None, ge=16, le=256, multiple_of=16, description="columns of a tile of C")
    block_k: int = Field(default=64, ge=16, le=256, multiple_of=16, description="piece of k loaded at once")
    splits: int | None = Field(default=None, ge=1, le=64, description="blocks that share the k of a tile")
    stages: int = Field(default=3, ge=1, le=8, description="pieces of k in shared memory")


#: Tiles and splits that a library has, and what a wave of them costs (hopper.md section 3.12): over the tensor
#: cores' own time, and cycles of its start and end.
ROWS, COLUMNS, SPLITS = (64, 128), (64, 128, 256), (1, 2, 4, 8)
WAVE_FACTOR, WAVE_CYCLES = 1.15, 5000.0  # hopper.md section 3.12


def library_tile(m: int, n: int, k: int, cores: int, tiling: GpuGemmFields) -> tuple[int, int, int]:
    """Return rows, columns and splits with the least waves' time among a library's; fields that are given stay."""

    def time(choice: tuple[int, int, int]) -> tuple[float, int]:
        rows, columns, splits = choice
        waves = ceil_div(ceil_div(m, rows) * ceil_div(n, columns) * splits, cores)
        # A product of 64 x N x 16 takes N / 2 cycles (hopper.md section 1).
        busy = ceil_div(k, 16 * splits) * columns / 2 * rows / 64
        return waves * (busy * WAVE_FACTOR + WAVE_CYCLES) + (splits > 1) * WAVE_CYCLES, -rows * columns

    rows, columns, splits = (
        (value,) if value else choices
        for value, choices in zip((tiling.block_m, tiling.block_n, tiling.splits), (ROWS, COLUMNS, SPLITS), strict=True)
    )
    return min(product(rows, columns, splits), key=time)


def build_on_gpu(
    problem: GemmProblem, tiling: GpuGemmFields, device: DeviceSpec, precision: FlashPrecision
) -> TileProgram:
    """Return C = A B as a tile program for one GPU whose warp groups work beside one another."""
    p = problem
    if not works_beside(device):
        raise SpecError(f"gemm: {device.name}'s file says nothing of warp groups beside one another; h200's does")
    a = GlobalTensor("a", 1, 1, p.m, p.k, p.dtype, "input")
    b = GlobalTensor("b", 1, 1, p.k, p.n, p.dtype, "input")
    c = GlobalTensor("c", 1, 1, p.m, p.n, for_inputs(precision, p.dtype).output, "output")
    rows, columns, splits = library_tile(p.m, p.n, p.k, device.group_count.value, tiling)
    tile = rows, columns, tiling.block_k
    first, *rest = gemm_tiles(a, b, c, tile, arithmetic=precision.arithmetic, splits=splits)
    fields = product_tiling(device, tile, get_format(p.dtype).size_bytes, tiling.stages)
    phases = [(first, fields), *((phase, plain_tiling(device)) for phase in rest)]
    note = f"tiles of {rows} x {columns}, {splits} splits of k, {fields.residents} resident blocks"
    return SmMachine(device).build("gemm", phases, p.flops(), (note,))


ASCEND = Schedule(
    name="gemm", family="ascend", summary="a matrix product, to validate the machine", tiling=GemmFields,
    precisions=MappingProxyType({"stored": STORED}), default_precision="stored", build=build,
    problem=GemmProblem,
)  # fmt: skip
GPU = replace(
    ASCEND, family="nvidia", tiling=GpuGemmFields, build=build_on_gpu, hw="h200", runs_on=works_beside
)
SCHEDULES = (ASCEND, GPU)
