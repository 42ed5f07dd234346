"""A block-sparse mask and a window whose fields are the model's, and fields of the tile beside them."""

from npusim.kernel import Field, FlashPrecision, Tiling, attention, flash, part_of

FP32 = FlashPrecision(
    "fp32",
    scores="float32",
    softmax="float32",
    exponential="float32",
    operand="input",
    running="float32",
    product="float32",
    output="input",
)


class Sparse(Tiling):
    """Which blocks are seen."""

    block: int = Field(default=64, ge=16, le=256, multiple_of=16, description="queries and keys of a block of the mask")
    hint: int = Field(
        default=1, ge=1, le=4, description="of the tile, without effect", json_schema_extra=part_of("tile")
    )


def diagonal(problem, tiling):
    return lambda q, k: (k <= q) & ((q // tiling.block == k // tiling.block) | (k < tiling.block))


SPARSE = attention("sparse", flash, precisions=[FP32], fields=Sparse, sees=diagonal)
