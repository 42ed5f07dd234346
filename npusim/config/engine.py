"""The units of a core that work on their own: DMA pipes, fixpipe, matrix, vector, scalar; a GPU's pipes.

An engine's ``model`` names the cost function that reads it; a device file gives the numbers.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from npusim.config.gpu_engine import (
    GroupProductSpec,
    LanePipe,
    LocalMemoryPipe,
    MmaStepsSpec,
    SharedMemoryPipe,
    SyncProductSpec,
    WarpIssue,
)
from npusim.config.model import SpecModel, Text, fault_at
from npusim.config.quantity import Choice, Positive, PositiveWhole, Quantity, WholeQuantity
from npusim.errors import SpecError


class RouteSpec(SpecModel):
    """One path of a DMA or fixpipe: from one buffer to another, ``GM`` included.

    One of them is of the engine's own core; the other may be of another core of its group, by name.

    ``latency_cycles`` runs from issue to the arrival of the last byte, less the bytes' own time; to
    or from ``GM`` it is that of an L2 hit.  ``links`` are what the bytes share with other cores:
    all of them cross ``l2``, those that miss it cross ``hbm`` as well.
    """

    source: Text = Field(description="buffer read: of the core or another of its group, or GM")
    destination: Text = Field(description="buffer written: of the core or another of its group, or GM")
    bytes_per_cycle: Positive = Field(description="the core's own port, alone on its links")
    latency_cycles: WholeQuantity
    links: tuple[str, ...] = Field(default=(), description="shared links crossed, by name")
    unaligned_factor: Positive | None = Field(
        default=None, description="time for rows in GM that start inside a request, over rows that start with one"
    )
    unaligned_bytes_per_cycle: Positive | None = Field(
        default=None, description="rate of rows in GM that start inside a block of 32 bytes"
    )
    burst_overhead_cycles: Quantity | None = Field(
        default=None, description="per row that does not continue the one before in GM; of rows cut into fractals, each"
    )
    miss_bytes_per_cycle: Positive | None = Field(
        default=None, description="of bytes read from beyond L2, or written where it does not hold them"
    )
    row_cycles: Quantity | None = Field(
        default=None, description="of a row from beyond L2 at least, cut into fractals on the way"
    )
    output_formats: tuple[str, ...] | None = Field(
        default=None, description="formats a fixpipe route can write; default: the engine's casts"
    )


class _QueueSpec(SpecModel):
    """What all engines with an instruction queue have."""

    queue_depth_count: PositiveWhole = Field(description="instructions that may wait")


class _MoverSpec(_QueueSpec):
    """Engines that move bytes along routes."""

    issue_interval_cycles: WholeQuantity = Field(
        description="shortest time between two instructions, however few bytes they move"
    )
    routes: dict[str, RouteSpec]

    def route(self, source: str, destination: str) -> RouteSpec:
        """Return the route between two buffers; raise `SpecError` naming those there are."""
        for route in self.routes.values():
            if (route.source, route.destination) == (source, destination):
                return route
        known = ", ".join(f"{r.source}->{r.destination}" for r in self.routes.values())
        raise SpecError(f"no route {source}->{destination}; routes here: {known}")


class DmaEngine(_MoverSpec):
    """A pipe that copies: MTE1, MTE2, MTE3."""

    model: Literal["dma"]


class FixpipeEngine(_MoverSpec):
    """The pipe that drains the accumulator and casts on the way: FIXP."""

    model: Literal["fixpipe"]
    elements_per_cycle: Positive = Field(description="accumulator elements read in a cycle")
    casts: tuple[str, ...] = Field(description="formats it can write, its input's own included")


class FractalSpec(SpecModel):
    """The block of a product that the matrix unit multiplies in one step."""

    m_elements: PositiveWhole
    n_elements: PositiveWhole
    k_elements: PositiveWhole


class MatrixEngine(_QueueSpec):
    """The matrix unit: CUBE.

    Cycles of a product are ``ceil(M/m) * ceil(N/n) * ceil(K/k) * cycles_per_fractal`` and a
    start-up.  ``arithmetic`` names how it adds, per input format (`npusim.formats`).
    """

    model: Literal["matrix"]
    fractals: dict[str, FractalSpec] = Field(description="step size by input format")
    cycles_per_fractal: Positive
    startup_cycles: WholeQuantity
    accumulator_format: Text
    arithmetic: dict[str, Choice[str]] = Field(description="registry name by input format")

    def fractal(self, input_format: str) -> FractalSpec:
        """Return the step size for a format; raise `SpecError` naming those supported."""
        if input_format not in self.fractals:
            known = ", ".join(self.fractals)
            raise SpecError(f"the matrix unit does not multiply {input_format}; it has: {known}")
        return self.fractals[input_format]

    def arithmetic_of(self, input_format: str) -> str:
        """Return the registry name of the arithmetic; raise `SpecError` where none is stated."""
        if input_format not in self.arithmetic:
            known = ", ".join(self.arithmetic)
            first = next(iter(self.arithmetic), "none")
            raise SpecError(
                f"no arithmetic is stated for {input_format}: the matrix unit multiplies {known}; "
                f"--dtype {first} rounds inputs to that"
            )
        return self.arithmetic[input_format].value


class WarpMatrixEngine(MatrixEngine):
    """The matrix units of a multiprocessor, fed by warps from registers: TENSOR.

    ``fractals`` are one warp's product; its machine instructions depend on the accumulators.
    """

    model: Literal["warp_matrix"]  # type: ignore[assignment]
    steps: dict[str, MmaStepsSpec] = Field(description="by format of the accumulators")

    def steps_of(self, accumulator_format: str) -> MmaStepsSpec:
        """Return the steps for a format of accumulators; raise `SpecError` naming those there are."""
        if accumulator_format not in self.steps:
            known = ", ".join(self.steps)
            raise SpecError(f"no product adds up in {accumulator_format}; there are: {known}")
        return self.steps[accumulator_format]


class GroupMatrixEngine(MatrixEngine):
    """The matrix units of a multiprocessor from Turing on: products of a warp, on Hopper also of a warp group.

    ``fractals`` are a warp's product by input format; `SyncProductSpec` and `GroupProductSpec` say how long.
    """

    model: Literal["group_matrix"]  # type: ignore[assignment]
    mma: SyncProductSpec
    wgmma: GroupProductSpec | None = None


class VectorOpSpec(SpecModel):
    """``head + slope * repeats + tail``; a repeat is ``repeat_bytes`` of the wider operand.

    The conflict slopes hold where operands share banks of UB; absent: no bank effect is known.
    """

    slope_cycles_per_repeat: Positive
    head_cycles: WholeQuantity
    tail_cycles: WholeQuantity
    slope_conflict_cycles_per_repeat: Positive | None = Field(default=None, description="two sources in one bank group")
    slope_read_write_conflict_cycles_per_repeat: Positive | None = Field(
        default=None, description="a source and the destination in one bank"
    )
    slope_repeated_block_cycles_per_repeat: Positive | None = Field(
        default=None, description="a source block read again by every repeat"
    )


#: Size of the widest format there is: blocks hold whole elements.
WIDEST_BYTES = 8


class VectorEngine(_QueueSpec):
    """The vector unit: VECTOR."""

    model: Literal["vector"]
    repeat_bytes: PositiveWhole = Field(description="bytes of one operand in one repeat")
    block_bytes: PositiveWhole = Field(description="bytes of one block: unit of block reductions")
    row_sum: Choice[Literal["vector_lanes", "tree_halves"]] = Field(
        description="in which order it adds up a row, by name"
    )
    head_exposed: Choice[Literal["idle", "always"]] | None = Field(
        default=None, description="which instructions pay their head: those that find the pipe idle, or all (absent)"
    )
    count_mode_cycles: Quantity | None = Field(
        default=None, description="of an instruction on a row vector more, in kernels with barriers where needed"
    )
    ops: dict[str, VectorOpSpec]

    @model_validator(mode="after")
    def _repeats_are_whole_blocks(self) -> Self:
        repeat, block = self.repeat_bytes.value, self.block_bytes.value
        if block % WIDEST_BYTES:
            raise fault_at("block_bytes", f"{block} is no multiple of {WIDEST_BYTES}, a float64")
        if repeat % block:
            raise fault_at("repeat_bytes", f"{repeat} is no multiple of block_bytes, {block}")
        return self

    def op(self, name: str) -> VectorOpSpec:
        """Return the cost of a vector instruction; raise `SpecError` naming those known."""
        if name not in self.ops:
            raise SpecError(f"no vector op {name!r}; known: {', '.join(self.ops)}")
        return self.ops[name]


class ScalarEngine(SpecModel):
    """The scalar unit, which issues to all queues: SCALAR."""

    model: Literal["scalar"]
    issue_cycles: Quantity | None = Field(default=None, description="time to issue one instruction")


EngineSpec = Annotated[
    DmaEngine
    | FixpipeEngine
    | MatrixEngine
    | WarpMatrixEngine
    | VectorEngine
    | ScalarEngine
    | LanePipe
    | SharedMemoryPipe
    | WarpIssue
    | GroupMatrixEngine
    | LocalMemoryPipe,
    Field(discriminator="model"),
]
