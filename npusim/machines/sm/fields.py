"""Tiling fields of attention on streaming multiprocessors."""

from __future__ import annotations

from typing import Literal

from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError


class SmFields(Tiling):
    """Tile, warps and layouts of attention; what describes lanes, on devices whose file has warps."""

    block_q: int = Field(default=128, ge=8, multiple_of=8, description="query rows of a block")
    block_kv: int | None = Field(
        default=None, ge=8, multiple_of=8,
        description="keys of a step; default: the most of 64, 32 and 16 that fit",
    )  # fmt: skip
    q: Literal["auto", "registers", "shared"] = Field(
        default="auto", description="where Q stays; auto: in registers if they suffice"
    )
    warps: int = Field(
        default=4, ge=4, le=32, multiple_of=4,
        description="of a block, stacked down its rows; each sub-core has as many",
    )  # fmt: skip
    arrangement: Literal["4x1", "2x2", "1x4"] = Field(
        default="4x1", description="quad pairs of a warp, down x across its tile"
    )
    smem: Literal["plain", "padded", "swizzled"] = Field(
        default="padded", description="how rows of K and V lie in shared memory"
    )
    padding: int = Field(default=8, ge=2, multiple_of=2, description="elements after each padded row")
    access_bytes: int = Field(
        default=16, ge=8, le=16, multiple_of=8, description="of a lane's access to shared memory"
    )
    stages: int = Field(default=1, ge=1, le=4, description="tiles of K, and of V, in shared memory")
    exchange: Literal["shuffle", "none"] = Field(
        default="shuffle", description="whether P may cross lanes on its way to P V"
    )
    residents: int | None = Field(
        default=None, ge=1, description="blocks resident on a core; default: as many as fit"
    )
    launch: Literal["in_order", "longest_first"] = Field(
        default="in_order", description="blocks start head by head, or those with most keys first"
    )

    @property
    def keys(self) -> int:
        """Keys of a step, of fields that are chosen."""
        assert self.block_kv is not None
        return self.block_kv

    def check_no_lanes(self, device: str) -> None:
        """Raise `TilingError` for fields of lanes on a device that is described for its values only."""
        given = sorted(self.model_fields_set - {"block_q", "block_kv"})
        if given:
            raise TilingError(
                f"{', '.join(given)}: without effect on {device}, whose file says nothing of warps; leave them out"
            )
