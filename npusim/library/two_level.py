"""FastAttention's tilings on Ascend, as variants of flash: two-level tiling, and one block size for both units.

Two-level tiling: Q in blocks of B_r rows, K and V in tiles of B_c keys for the matrix unit; the vector cores process
each B_r x B_c tile of scores in slices of B_b rows, and both levels are double buffered.  Unified tiling has one block
b for both units, so that the cores exchange data after every b x b tile.  (Section 4.1 and appendix B; the inverse in
equation 12 is omitted.)
"""

from __future__ import annotations

from types import MappingProxyType

from npusim.kernel import ATTENTION_PRECISIONS, Field, Tiling, attention, build_tiling, flash, lightest

#: B_r x B_c for the matrix unit, B_b rows for the vector cores. One tile of scores ahead, with two slots between the
#: cores, is the paper's double buffering.
TWO_LEVEL = MappingProxyType(
    {
        "depth": Field(
            default=1,
            ge=0,
            le=14,
            description="number of tiles that Q K^T and softmax run ahead of P V",
            json_schema_extra=lightest("least"),
        ),
        "kernel": Field(default="cann", description="published kernel"),
        "barriers": Field(
            default="every",
            description=("barriers between vector instructions: every, as in CANN 8.0, or only where needed"),
        ),
    }
)


class UnifiedTiling(Tiling):
    """One block size for both units."""

    block: int = Field(default=128, ge=16, multiple_of=16, description="query rows and keys of a block")

    def whole(self) -> Tiling:
        """Return the block size as the two levels of a tiling: a vector core processes its share of a block in one
        piece.
        """
        return build_tiling(FAST[0].tiling, {"block_q": self.block, "block_kv": self.block, "vector_rows": self.block})


FAST = attention(
    "two_level",
    flash,
    precisions=ATTENTION_PRECISIONS,
    usual=TWO_LEVEL,
    families=["ascend"],
    summary="FastAttention: large blocks for matrix units, slices for vector units",
) + attention(
    "unified",
    flash,
    precisions=ATTENTION_PRECISIONS,
    tiling=UnifiedTiling,
    families=["ascend"],
    summary="FastAttention's single-level tiling: one block for both units",
)
