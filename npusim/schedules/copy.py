"""A copy through the vector cores' UB, to validate the memory side of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.ir.program import Item, Phase, TileProgram, Touch
from npusim.ir.tile import GlobalTensor
from npusim.schedules.gemm import STORED
from npusim.schedules.on_ascend import PING_PONG, AscendGroup, move
from npusim.schedules.registry import Schedule
from npusim.spec.kernels import CopyProblem
from npusim.spec.tiling import Field, Tiling
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npusim.schedules.steps.flash import FlashPrecision
    from npusim.spec.device import DeviceSpec


class CopyFields(Tiling):
    """Bytes of one transfer; from 16 KiB on the vendor's guide promises full bandwidth."""

    block_bytes: int = Field(
        default=32768, ge=512, le=65536, multiple_of=512, description="bytes of one transfer of a core"
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """One transfer of each vector core of a group: ``rows`` rows of the tensor from ``row``."""

    row: int
    rows: int


class AscendCopy:
    """Emits blocks of one row a vector core."""

    def __init__(self, group: AscendGroup, source: GlobalTensor, target: GlobalTensor) -> None:
        self.group, self.source, self.target = group, source, target
        # The same slot is filled from GM and stored to GM: no vector instruction touches it.
        self.rings = [
            group.allocator.ring(
                v.ub, "copy", source.cols, PING_PONG, producers=[v.load], consumers=[v.store]
            )
            for v in group.vector_cores
        ]

    def block(self, block: CopyBlock) -> Iterator[Item]:
        """Yield the transfers of one block."""
        for core, ring in zip(self.group.vector_cores[: block.rows], self.rings, strict=False):
            row = block.row + core.index
            shape = (1, self.source.cols, self.source.fmt)
            yield move("copy.load", core.load, ring.fill(*shape), self.source.tile(0, 0, row, 1))
            yield move("copy.store", core.store, self.target.tile(0, 0, row, 1), ring.front(*shape))

    def touches(self, blocks: Sequence[CopyBlock]) -> Iterator[Touch]:
        """Yield the rows a block copies."""
        for block in blocks:
            yield Touch(self.source.tile(0, 0, block.row, block.rows))
            yield Touch(self.target.tile(0, 0, block.row, block.rows), 0)


def build(
    problem: CopyProblem, tiling: CopyFields, device: DeviceSpec, _precision: FlashPrecision
) -> TileProgram:
    """Return a copy of ``problem.bytes`` (rounded up to whole transfers) for one Ascend device."""
    group = AscendGroup(device)
    rows = ceil_div(problem.bytes, tiling.block_bytes)
    source = GlobalTensor("source", 1, 1, rows, tiling.block_bytes, "int8", "input")
    target = GlobalTensor("target", 1, 1, rows, tiling.block_bytes, "int8", "output")
    copy = AscendCopy(group, source, target)
    group.allocator.check()
    blocks = tuple(CopyBlock(row, n) for row, n in chunks(rows, len(group.vector_cores)))
    return TileProgram(
        name="copy", queues=group.queues(), rings=tuple(group.allocator.rings),
        spaces=dict(group.allocator.spaces), used_bytes=dict(group.allocator.peak_bytes),
        tensors={t.name: t for t in (source, target)},
        phases=(Phase("copy", blocks, copy.block, _shape, copy.touches),), flops=0,
    )  # fmt: skip


def _shape(block: CopyBlock) -> int:
    return block.rows


SCHEDULES = (
    Schedule(
        name="copy", family="ascend", summary="a copy through UB, to validate the machine", tiling=CopyFields,
        precisions=MappingProxyType({"stored": STORED}), default_precision="stored", build=build,
        problem=CopyProblem,
    ),
)  # fmt: skip
