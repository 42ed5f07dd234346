"""A plain matrix product, to validate the matrix side of the machine."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.algorithms.flash import FlashPrecision
from npusim.algorithms.gemm import gemm
from npusim.algorithms.precision import for_inputs
from npusim.config.kernels import GemmProblem
from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.ir.tile import GlobalTensor
from npusim.machines.ascend import AscendMachine, gemm_tiling, loaded_k
from npusim.machines.sm.core import works_beside
from npusim.schedules.gemm_gpu import GpuGemmFields, build_on_gpu
from npusim.schedules.registry import Schedule

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


ASCEND = Schedule(
    name="gemm", family="ascend", summary="a matrix product, to validate the machine", tiling=GemmFields,
    precisions=MappingProxyType({"stored": STORED}), default_precision="stored", build=build,
    problem=GemmProblem,
)  # fmt: skip
GPU = replace(
    ASCEND, family="nvidia", tiling=GpuGemmFields, build=build_on_gpu, hw="h200", runs_on=works_beside
)
SCHEDULES = (ASCEND, GPU)
