"""Tiling fields of attention on streaming multiprocessors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.machines.sm.core import has_concurrent_warp_groups

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec

#: What a compiler makes of a tile.
COMPILED = frozenset({"registers", "spilled_registers", "residents"})
#: Fields of lanes whose defaults are best, or what fits.
CHOSEN = frozenset({"q", "padding", "access_bytes", "exchange"})
#: Fields that have an effect where warp groups run concurrently.
GROUPS = frozenset({"block_q", "block_kv", "warps", "stages", "registers", "spilled_registers", "residents", "launch"})


class GroupFields(Tiling):
    """Warps, stages and registers of a block: what a kernel and its compiler decide."""

    warps: int = Field(
        default=4,
        ge=4,
        le=32,
        multiple_of=4,
        description="of a block, stacked down its rows; each sub-core has as many",
    )
    stages: int | None = Field(
        default=2,
        ge=1,
        le=4,
        description="tiles of K, and of V, that a software pipeline has under way; 1 goes through registers",
    )
    registers: int | None = Field(
        default=None, ge=16, le=255, description="of a thread, as the compiler says; default: its table, else estimated"
    )
    spilled_registers: int | None = Field(
        default=None, ge=0, description="of a thread, in local memory, as the compiler says with `registers`"
    )
    residents: int | None = Field(default=None, ge=1, description="blocks resident on a core; default: as many as fit")


class BlockFields(Tiling):
    """Rows and keys of a block."""

    block_q: int = Field(default=128, ge=8, multiple_of=8, description="query rows of a block")
    block_kv: int | None = Field(
        default=None, ge=8, multiple_of=8, description="keys of a step; default: the most of 64, 32 and 16 that fit"
    )


class SmFields(GroupFields, BlockFields):
    """Tile, warps and layouts of attention; what describes lanes, on devices whose file has warps."""

    q: Literal["auto", "registers", "shared"] = Field(
        default="auto", description="where Q stays; auto: in registers if they suffice"
    )
    arrangement: Literal["4x1", "2x2", "1x4"] = Field(
        default="4x1", description="quad pairs of a warp, down x across its tile"
    )
    smem: Literal["plain", "padded", "swizzled"] = Field(
        default="padded", description="how rows of K and V lie in shared memory"
    )
    padding: int = Field(default=8, ge=2, multiple_of=2, description="elements after each padded row")
    access_bytes: int = Field(default=16, ge=8, le=16, multiple_of=8, description="of a lane's access to shared memory")
    stages: int | None = Field(
        default=None,
        ge=1,
        le=4,
        description="tiles of K, and of V, in shared memory; none: 1, or from Ampere on a library's kernel",
    )
    exchange: Literal["shuffle", "none"] = Field(
        default="shuffle", description="whether P may cross lanes on its way to P V"
    )
    launch: Literal["in_order", "longest_first"] = Field(
        default="in_order", description="blocks start head by head, or those with most keys first"
    )

    @property
    def keys(self) -> int:
        """Keys of a step, of fields that are chosen."""
        assert self.block_kv is not None
        return self.block_kv

    def check_no_lanes(self, device: str, known: frozenset[str] = frozenset({"block_q", "block_kv"})) -> None:
        """Raise `TilingError` for fields of lanes on a device whose file says nothing of them."""
        chosen = sorted((self.model_fields_set & set(SmFields.model_fields)) - known)
        if chosen:
            raise TilingError(
                f"{', '.join(chosen)}: without effect on {device}, whose file says nothing of lanes; leave them out"
            )


def left_alone(device: DeviceSpec) -> frozenset[str]:
    """Return the fields that a search leaves at their defaults: without effect there, compiled, or chosen already."""
    lanes = set(SmFields.model_fields) - GROUPS if has_concurrent_warp_groups(device) else CHOSEN
    return COMPILED | lanes
