"""Split-KV attention (flash-decoding): the keys of a query among several blocks, then a merge.

`flash` with its phase cut along the keys; one split is flash itself.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from npusim.algorithms.split import FAN, PACKED, Merge, SplitPrecision, split_kv, tiles_of
from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.machines.sm.fields import SmFields
from npusim.schedules import flash
from npusim.schedules.attention import flash_phase, may_pack
from npusim.schedules.flash_gpu import build_on_gpu
from npusim.schedules.splits import best_splits
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.algorithms.flash import FlashPrecision
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.ir.program import TileProgram
    from npusim.schedules.attention import Made


class _Splits(Tiling):
    """How keys are split, and how what splits leave is merged."""

    splits: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="blocks that share a query's keys; auto: so that a call takes least time"
    )
    merge: Merge = Field(default="sequential", description="order of the merge: one after the other, or in pairs")
    pack: Literal["auto", "on", "off"] = Field(
        default="auto", description="query heads of a KV head as rows of one block; auto: where it pays"
    )


class SplitTiling(_Splits, flash.FlashTiling):
    """Tiling fields of split-KV attention on Ascend."""


class GpuSplitTiling(_Splits, SmFields):
    """The same on streaming multiprocessors."""


def _make(
    fields: _Splits, device: DeviceSpec, problem: Problem, sizes: tuple[int, int], p: FlashPrecision, places: int
) -> Made:
    group, keys, said = problem.group_size, sizes[1], tuple[str, ...]()
    is_packed = group > 1 and fields.pack == "on"
    if fields.pack == "auto" and may_pack(problem, sizes[0]):
        cells, seen = problem.batch * problem.kv_heads, ceil_div(problem.seq_kv, keys)
        is_packed = problem.seq_q == 1 or PACKED.packs(group * problem.seq_q, cells, seen, places)
    phase = flash_phase(problem, sizes, p, is_packed=is_packed)
    tiles, splits = max(map(tiles_of, phase.cells)), fields.splits
    if fields.pack == "auto" and is_packed:
        said = (f"pack=auto: the {group} query heads of a KV head are rows of one block",)
    if splits == "auto":
        splits = best_splits(device, phase, FAN[fields.merge])
        said = (*said, f"splits=auto: {splits}, on {places} places; blocks of queries: {len(phase.cells)}")
    if splits > tiles:
        raise TilingError(
            f"splits: {splits} of {tiles} tiles of {keys} keys: a split is one tile at least; take splits={tiles} at "
            "most, or a smaller block_kv"
        )
    return split_kv(phase, splits, fields.merge, p, places), said


def _build(on: Any, problem: Problem, tiling: _Splits, device: DeviceSpec, precision: SplitPrecision) -> TileProgram:
    program: TileProgram = on(problem, tiling, device, precision, "split_kv", partial(_make, tiling, device))
    return program


SUMMARY = "flash-decoding: keys split among blocks, partial outputs merged"


def _presets(precisions: Any) -> Any:
    return MappingProxyType({n: SplitPrecision(**asdict(p)) for n, p in precisions.items()})


ASCEND = replace(
    flash.ASCEND, name="split_kv", summary=SUMMARY, tiling=SplitTiling, precisions=_presets(flash.PRECISIONS),
    build=partial(_build, flash.build_on_ascend),
)  # fmt: skip
GPU = replace(
    flash.GPU, name="split_kv", summary=SUMMARY, tiling=GpuSplitTiling, precisions=_presets(flash.GPU_PRECISIONS),
    build=partial(_build, build_on_gpu),
)  # fmt: skip
SCHEDULES = (ASCEND, GPU)
