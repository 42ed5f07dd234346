"""The units of a core that work independently: DMA pipes, fixpipe, matrix, vector, scalar; a GPU's warps and pipes.

An engine's ``model`` names the cost function that uses the engine's numbers; a device file states these.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from npusim.config.model import SpecModel, Text, entry, fault_at
from npusim.config.quantity import Choice, Positive, PositiveWhole, Quantity, WholeQuantity
from npusim.errors import SpecError


class RouteSpec(SpecModel):
    """One path of a DMA or fixpipe: from one buffer to another, ``GM`` included.

    One of the buffers belongs to the engine's core; the other may belong to another core of its group, by name.

    ``latency_cycles`` is the time from issue to the arrival of the last byte, without the transfer time of the bytes;
    for transfers to or from ``GM`` it is the latency of an L2 hit.  ``links`` are shared with other cores: all bytes
    cross ``l2``, and bytes that miss it cross ``hbm`` as well.
    """

    source: Text = Field(description="source: a buffer of this core or of another core in its group, or GM")
    destination: Text = Field(description=("destination: a buffer of this core or of another core in its group, or GM"))
    bytes_per_cycle: Positive = Field(description="rate of the core's own port while no other core uses its links")
    latency_cycles: WholeQuantity
    row_latency_cycles: WholeQuantity | None = Field(
        default=None,
        description=(
            "latency of an instruction that moves one row of fractals; a tile of several rows needs either one "
            "such instruction for each row or a single instruction with `latency_cycles`, and the faster way is "
            "used"
        ),
    )
    scale_bytes_per_cycle: Positive | None = Field(
        default=None,
        description=(
            "rate of the scales of block-scaled operands, which move after their elements; default: the elements' rate"
        ),
    )
    links: tuple[str, ...] = Field(default=(), description="names of the shared links that a transfer crosses")
    unaligned_factor: Positive | None = Field(
        default=None,
        description=("time of rows in GM that start inside a request, relative to rows that start at its beginning"),
    )
    unaligned_bytes_per_cycle: Positive | None = Field(
        default=None, description="rate of rows in GM that start inside a block of 32 bytes"
    )
    unaligned_row_cycles: Positive | None = Field(
        default=None,
        description=(
            "smallest time of a row in GM that is shorter than a block of 32 bytes, starts inside one and is cut into "
            "fractals"
        ),
    )
    burst_overhead_cycles: Quantity | None = Field(
        default=None,
        description=(
            "additional time of each row that does not follow the previous row directly in GM; if rows are cut "
            "into fractals, of each row"
        ),
    )
    miss_bytes_per_cycle: Positive | None = Field(
        default=None,
        description=("rate of bytes that are read from memory beyond L2, or written to lines that are not in L2"),
    )
    row_cycles: Quantity | None = Field(
        default=None, description="smallest time of a row that comes from memory beyond L2 and is cut into fractals"
    )
    request_cycles: Quantity | None = Field(
        default=None,
        description=(
            "smallest time of a request (512, 256 or 128 bytes of a row cut into fractals, or the rest) while "
            "more than one core group works"
        ),
    )
    output_formats: tuple[str, ...] | None = Field(
        default=None, description="formats that a fixpipe route can write; default: the engine's formats"
    )


class RatedUnit(SpecModel):
    """Fields of all units whose operation times follow from a rate."""

    rate_factor: Positive | None = Field(default=None, description="factor of the rate, set by --scale; missing: 1")

    @property
    def rate(self) -> float:
        """The unit's rate, relative to the rate that its other numbers describe: 0.5 doubles the cycles of the unit's
        operations.
        """
        return 1.0 if self.rate_factor is None else float(self.rate_factor.value)


class _QueueSpec(RatedUnit):
    """Fields of all engines with an instruction queue."""

    queue_depth_count: PositiveWhole = Field(description="number of instructions that may wait")


class _MoverSpec(_QueueSpec):
    """Engines that move bytes along routes."""

    issue_interval_cycles: WholeQuantity = Field(
        description="shortest time between two instructions, even if they move few bytes"
    )
    routes: dict[str, RouteSpec]

    def route(self, source: str, destination: str) -> RouteSpec:
        """Return the route between two buffers; raise `SpecError` with the engine's routes if there is none."""
        for route in self.routes.values():
            if (route.source, route.destination) == (source, destination):
                return route
        known = ", ".join(f"{r.source}->{r.destination}" for r in self.routes.values())
        raise SpecError(f"no route {source}->{destination}; its routes: {known}")


class DmaEngine(_MoverSpec):
    """A pipe that copies: MTE1, MTE2, MTE3."""

    model: Literal["dma"]


class FixpipeEngine(_MoverSpec):
    """The pipe that drains the accumulator and casts during the copy: FIXP."""

    model: Literal["fixpipe"]
    elements_per_cycle: Positive = Field(description="accumulator elements that are read in a cycle")
    casts: tuple[str, ...] = Field(description="formats that the pipe can write, the format of its input included")


class FractalSpec(SpecModel):
    """The block of a product that the matrix unit multiplies in one step."""

    m_elements: PositiveWhole
    n_elements: PositiveWhole
    k_elements: PositiveWhole

    @property
    def products(self) -> int:
        """Multiply-adds of a step."""
        return self.m_elements.value * self.n_elements.value * self.k_elements.value


class MatrixEngine(_QueueSpec):
    """The matrix unit: CUBE.

    Cycles of a product are ``ceil(M/m) * ceil(N/n) * ceil(K/k) * cycles_per_fractal`` plus a start-up.  ``arithmetic``
    names how it adds, per input format (`npusim.formats`).
    """

    model: Literal["matrix"]
    fractals: dict[str, FractalSpec] = Field(description="step size by input format")
    cycles_per_fractal: Positive
    startup_cycles: WholeQuantity
    accumulator_format: Text
    arithmetic: dict[str, Choice[str]] = Field(
        description="name in the registry by input format, or a name with parameters: unit.f16.f32:(c+0..15)"
    )

    def fractal(self, input_format: str) -> FractalSpec:
        """Return the step size for a format; raise `SpecError` with the supported formats if there is none."""
        return entry(self.fractals, input_format, f"the matrix unit does not multiply {input_format}; it has: ")

    def fractal_cycles(self, _input_format: str) -> float:
        """Return the cycles of a step for a format; each format may have a different rate."""
        return float(self.cycles_per_fractal.value) / self.rate

    def arithmetic_of(self, input_format: str) -> str:
        """Return the name of the arithmetic in the registry; raise `SpecError` if the file states none for these
        formats.

        float32 factors are multiplied as tf32 where the unit supports it: their low 13 bits are dropped.
        """
        from npusim.formats import get_arithmetic

        if input_format == "float32" and "float32" not in self.arithmetic and "tf32" in self.arithmetic:
            input_format = "tf32"
        if input_format not in self.arithmetic:
            known = ", ".join(self.arithmetic)
            first = next(iter(self.arithmetic), "none")
            raise SpecError(
                f"no arithmetic is stated for {input_format}: the matrix unit multiplies {known}; "
                f"--dtype {first} rounds inputs to that"
            )
        name = self.arithmetic[input_format].value
        if (adds_up := get_arithmetic(name).acc_format) != self.accumulator_format:
            raise SpecError(f"{name} accumulates in {adds_up}, but accumulator_format is {self.accumulator_format}")
        return name


class VectorOpSpec(SpecModel):
    """Cost of an instruction: ``head + slope * repeats + tail``; a repeat is ``repeat_bytes`` of the wider operand.

    The conflict slopes apply where operands share banks of UB; absent: the file describes no bank effect.
    """

    slope_cycles_per_repeat: Positive
    head_cycles: WholeQuantity
    tail_cycles: WholeQuantity
    slope_conflict_cycles_per_repeat: Positive | None = Field(
        default=None, description=("additional time if two sources are in the same bank group")
    )
    slope_read_write_conflict_cycles_per_repeat: Positive | None = Field(
        default=None, description="additional time if a source and the destination are in the same bank"
    )
    slope_repeated_block_cycles_per_repeat: Positive | None = Field(
        default=None, description="additional time if every repeat reads the same source block again"
    )


#: Size in bytes of the widest format, so that a block has a whole number of elements of every format.
WIDEST_BYTES = 8


#: Orders in which a vector unit could add up a row, by name: from buffer to buffer, and with registers.
MemoryRowSum = Literal["vector_lanes", "tree_halves"]
RegisterRowSum = Literal["four_chains", "sequential", "vector_lanes"]
#: Rounding of halves when rows are cast: to even (CAST_RINT) or away from zero (CAST_ROUND).
CastRounding = Literal["nearest_even", "nearest_away"]
#: Number of roundings in a multiplication and the addition that follows it.
MultiplyAdd = Literal["once", "twice"]


class VectorEngine(_QueueSpec):
    """The vector unit: VECTOR."""

    row_sums: ClassVar[tuple[str, ...]] = get_args(MemoryRowSum)
    model: Literal["vector"]
    repeat_bytes: PositiveWhole = Field(description="bytes of one operand in one repeat")
    block_bytes: PositiveWhole = Field(description="bytes of one block, the unit of block reductions")
    row_sum: Choice[MemoryRowSum] = Field(description="name of the order in which the unit adds up a row")
    head_exposed: Choice[Literal["idle", "always"]] | None = Field(
        default=None,
        description=(
            "which instructions cost the time of a head: those that start on an idle pipe (idle), or all "
            "(always); absent: all"
        ),
    )
    count_mode_cycles: Quantity | None = Field(
        default=None,
        description=(
            "additional time of an instruction on a row vector, in kernels that set barriers only where needed"
        ),
    )
    row_interval_cycles: Quantity | None = Field(
        default=None,
        description=(
            "additional time of each copy in the expansion of a row or column, which needs one copy for each row"
        ),
    )
    ops: dict[str, VectorOpSpec]

    @model_validator(mode="after")
    def _repeats_are_whole_blocks(self) -> Self:
        repeat, block = self.repeat_bytes.value, self.block_bytes.value
        if block % WIDEST_BYTES:
            raise fault_at("block_bytes", f"{block} is not a multiple of {WIDEST_BYTES}, the size of a float64")
        if repeat % block:
            raise fault_at("repeat_bytes", f"{repeat} is not a multiple of block_bytes, {block}")
        return self

    def op(self, name: str) -> VectorOpSpec:
        """Return the cost of a vector instruction; raise `SpecError` with the known instructions if the name is
        unknown.
        """
        return entry(self.ops, name, f"unknown vector op {name!r}; allowed: ")


class RegisterOpSpec(SpecModel):
    """One instruction of a vector unit with registers; it processes one register.

    ``plain`` instructions start at a rate of two per cycle, or at the unit's issue rate; ``single`` ones at one per
    cycle; ``long`` ones use a separate unit; ``load`` and ``store`` access the buffer.
    """

    kind: Literal["plain", "single", "long", "load", "store"]
    latency_cycles: WholeQuantity = Field(description="time until a dependent instruction may start")
    register_cycles: Positive = Field(
        description="time for which the instruction occupies its unit, or the port of the buffer"
    )


class VectorFunctionSpec(SpecModel):
    """The cost of a sequence of hardware loops."""

    startup_cycles: WholeQuantity
    drain_cycles: WholeQuantity
    nested_cycles: WholeQuantity = Field(description="smallest time of an iteration of an outer hardware loop")
    window_count: PositiveWhole = Field(description="number of waiting instructions that may start out of order")


class RegisterVectorEngine(_QueueSpec):
    """A vector unit whose instructions work on registers: a stage is compiled into functions of hardware loops."""

    row_sums: ClassVar[tuple[str, ...]] = get_args(RegisterRowSum)
    model: Literal["vector"]
    style: Literal["registers"]
    register_bytes: PositiveWhole
    block_bytes: PositiveWhole = Field(
        description=("size of a block of the buffer, which one access moves: a row of a fractal")
    )
    row_sum: Choice[RegisterRowSum] = Field(
        description="name of the order in which the unit adds up a row, if neither kernel nor precision states one"
    )
    cast_rounding: Choice[CastRounding] | None = Field(
        default=None,
        description=(
            "rounding of casts if neither kernel nor precision states one; absent: nearest_even, not an assumption"
        ),
    )
    multiply_add: Choice[MultiplyAdd] | None = Field(
        default=None, description=("number of roundings if the precision states none; absent: two, not an assumption")
    )
    issued_per_cycle_count: PositiveWhole = Field(
        description=("number of compute instructions that may start in a cycle")
    )
    singly_issued_per_cycle_count: PositiveWhole = Field(
        description="number of compute instructions of kind single that may start in a cycle"
    )
    registers_written_per_cycle_count: PositiveWhole = Field(
        description="number of registers that loads and compute instructions may write in a cycle"
    )
    accesses_per_cycle_count: PositiveWhole = Field(
        description=("number of accesses to the buffer in a cycle; an access moves one register")
    )
    writes_per_cycle_count: PositiveWhole = Field(
        description="number of accesses to the buffer in a cycle that may be writes"
    )
    long_units_count: PositiveWhole
    long_switch_cycles: Quantity = Field(
        description="additional time if two long instructions of different kinds alternate"
    )
    function: VectorFunctionSpec
    ops: dict[str, RegisterOpSpec]

    def op(self, name: str) -> RegisterOpSpec:
        """Return an instruction; raise `SpecError` with the known instructions if the name is unknown."""
        return entry(self.ops, name, f"unknown vector op {name!r}; allowed: ")


class ScalarEngine(SpecModel):
    """The scalar unit, which issues to all queues: SCALAR."""

    model: Literal["scalar"]
    issue_cycles: Quantity | None = Field(default=None, description="time to issue one instruction")


# ---------------------------------------------------------------- a streaming multiprocessor
# A warp runs on one sub-core; all sub-cores are equal.  Numbers of lanes describe one sub-core.


class GapSpec(SpecModel):
    """Time between two steps."""

    gap_cycles: PositiveWhole


class MmaStepsSpec(SpecModel):
    """The machine instructions of one warp product, for one format of accumulators."""

    arithmetic: Choice[str] = Field(description="registry name of the arithmetic of the product")
    steps_count: PositiveWhole = Field(description="machine instructions of one product")
    step_cycles: PositiveWhole = Field(description="time for which a step occupies the pipe of its sub-core")
    lone_gaps: tuple[GapSpec, ...] = Field(
        description="time from each step of a product to the next, for a single warp"
    )
    chained_latency_cycles: PositiveWhole = Field(
        description="time from a step to the same step of the next product on the same accumulators"
    )
    result_latency_cycles: PositiveWhole = Field(
        description="time from the last step to the use of the accumulators by another pipe"
    )

    @property
    def pipe_cycles(self) -> int:
        """Cycles for which one product of a warp uses the pipe of its sub-core."""
        return self.steps_count.value * self.step_cycles.value


class IssueSpec(SpecModel):
    """Rates of a warp group that runs alone, and of warp groups that run together.

    Warps that compute and products in progress slow each other down: both need issue slots and registers.
    """

    product_issue_factor: Quantity = Field(
        description="issue slots per cycle that running products use in addition to the slots of their own instructions"
    )
    product_compare_factor: Quantity = Field(
        description="share of the pipe of comparisons and conversions that running products use"
    )
    issue_product_factor: Quantity = Field(
        description=(
            "additional time of a product, as a share of its time, for each issue slot per cycle that arithmetic uses"
        )
    )
    warp_issue_cycles: Positive = Field(description="mean time from one instruction of a single warp to the next")
    special_factor: Positive = Field(
        description="time of special functions between other instructions, relative to their time without these"
    )
    step_cycles: WholeQuantity = Field(description="time of an iteration in addition to the counted instructions")

    @property
    def slowing(self) -> float:
        """Slowdown of all arithmetic while products run, as a share of its time."""
        return 0.0


class SpecialisedSpec(IssueSpec):
    """The same constants for kernels with specialised warps, in which one group copies and the others take turns
    (cuDNN's, FlashAttention-3's).
    """

    instruction_slots_factor: Positive = Field(description="average number of issue slots that an instruction uses")
    product_slowing_factor: Quantity = Field(
        description="additional time of all arithmetic while products run, as a share of its time without them"
    )
    element_cycles: Quantity = Field(
        description="additional time at the end of a block, for each element of O that a thread has"
    )
    gradient_block_cycles: Quantity | None = Field(
        default=None,
        description="time between blocks of a kernel of gradients, in addition to the counted instructions and copies",
    )

    @property
    def slowing(self) -> float:
        """Slowdown of all arithmetic while products run, as a share of its time."""
        return self.product_slowing_factor.value


class LoopSpec(SpecModel):
    """Costs of the mutual delays between the instructions of a compiled loop and the products of other warps on the
    same core.
    """

    issue_beside_cycles: Quantity = Field(
        description=("additional cycles until the next instruction while a product runs")
    )
    narrow_beside_cycles: Quantity = Field(
        description="additional cycles until the next instruction of the half-width pipe while a product runs"
    )
    special_beside_cycles: Quantity = Field(
        description="additional cycles until the next special function while a product runs"
    )
    product_delay_cycles: Quantity = Field(
        description=("cycles by which an instruction delays a product that runs at the same time")
    )
    fill_bytes_per_cycle: Positive = Field(description="rate at which data from L2 enter shared memory or L1")
    hit_cycles: WholeQuantity = Field(description="cycles until the data of a load that hits L1 arrive")


class SharingSpec(IssueSpec):
    """How kernels in general share units; if a file states this, all blocks of a core share its pipes."""

    step_instructions_count: WholeQuantity = Field(
        description="instructions of a warp in an iteration for addresses and control"
    )
    access_instructions_count: WholeQuantity = Field(
        description="instructions of a warp for a copy or load of 16 bytes per thread"
    )
    block_start_cycles: WholeQuantity = Field(
        description="time from the end of a block to the first load of the next block in its place"
    )
    turnover_cycles: WholeQuantity | None = Field(
        default=None,
        description="time from the end of a block of compiled rows to the first instruction of the next block in its "
        "place, in addition to the turnover's block_cycles; missing: none",
    )
    warp_start_cycles: WholeQuantity | None = Field(
        default=None,
        description="time for which a sub-core issues nothing because a warp of compiled rows begins; missing: none",
    )
    row_issue_factor: Positive | None = Field(
        default=None, description="average issue slots of an instruction of compiled rows without barriers; missing: 1"
    )
    lookup_cycles: WholeQuantity = Field(description="time until a number from global memory decides the next step")
    lookup_miss_cycles: WholeQuantity | None = Field(
        default=None,
        description=(
            "additional time of such a number if it comes from memory instead of L2, averaged over blocks of "
            "several heads that read it at about the same time; if missing, and for a block's own numbers, "
            "miss_extra_latency_cycles of L2 applies"
        ),
    )
    barrier_cycles: Quantity
    barrier_warp_cycles: Quantity = Field(description="time of a barrier for each warp of the block")
    fence_cycles: WholeQuantity = Field(description="time until a product reads data that was stored to shared memory")
    copy_cycles: dict[Literal["mma", "wgmma"], WholeQuantity] = Field(
        description="time of a warp for an asynchronous copy of 16 bytes per thread, by the kind of the products"
    )
    load_cycles: dict[Literal["mma", "wgmma"], WholeQuantity] = Field(
        description="time of a warp for a load of 16 bytes per thread into registers"
    )
    special_wait_factor: Quantity = Field(
        description=("time for which a warp waits for special functions, relative to their time")
    )
    reduction_cycles: WholeQuantity = Field(
        description="time of a step of a reduction across warps, through shared memory"
    )
    in_step_count: WholeQuantity = Field(
        description="number of tiles of a loop after which blocks that read the keys of one head are out of step"
    )
    loops: LoopSpec | None = Field(default=None, description="constants of compiled loops around products")
    specialised: SpecialisedSpec | None = Field(default=None, description="constants of kernels with specialised warps")

    def of(self, consumers: int) -> SharingSpec | SpecialisedSpec:
        """Return how warp groups issue instructions: as ``consumers`` of a block with specialised warps, or as kernels
        in general do.
        """
        return self.specialised if consumers and self.specialised is not None else self


class RowSpec(SpecModel):
    """Cost of a kernel over the rows of a matrix, for one row length."""

    row_cycles: Positive = Field(description="time of a row on a multiprocessor on which all blocks work")


class CodeSpec(SpecModel):
    """Code that a block runs once from its start to its end; the next block runs it again."""

    cached_count: WholeQuantity = Field(
        description=("number of instructions of a kernel that fit in the cache next to the warps")
    )
    fetch_cycles: Positive = Field(
        description="time for which a warp waits for each instruction around a loop that exceeds the cache"
    )
    loop_count: WholeQuantity = Field(
        description=("number of instructions of a loop that stay in the instruction cache while other code runs")
    )
    crowded_cycles: Positive = Field(
        description=("additional time if a larger loop and other code run at the same time")
    )
    far_count: WholeQuantity = Field(
        description=("number of instructions of a kernel that fit in the next level of the cache")
    )
    far_cycles: Positive = Field(description="`fetch_cycles` of a kernel that fits in neither cache")


class AccessSpec(SpecModel):
    """Number of instructions, for each memory access, of a thread of an eager PyTorch operator."""

    instructions_count: PositiveWhole = Field(
        description=("number of instructions, each of which uses an issue slot of its warp")
    )
    wait_cycles: WholeQuantity = Field(
        description=("additional time for which a thread waits if no other thread works")
    )


class LibrarySpec(SpecModel):
    """Costs of a framework's kernels on a multiprocessor, if memory does not limit them."""

    tile_cycles: WholeQuantity = Field(
        description="time of a product's tile from the end of the previous tile to its first operand"
    )
    unaligned_product_cycles: Positive = Field(
        description=("time of a multiply-add if rows are not a multiple of 16 bytes, which asynchronous copies require")
    )
    unaligned_store_cycles: Positive = Field(
        description="time of an element of the result of a product with unaligned rows, in addition to memory"
    )
    softmax: dict[str, RowSpec] = Field(min_length=1, description="constants by length of row, ascending")
    masked_cycles: Positive = Field(description="additional time of an element of softmax whose result is 0")
    add_cycles: Positive = Field(description="time of an element of a sum with a matrix that all heads share")
    index: AccessSpec | None = Field(
        default=None, description=("time of an element of a tensor that is not contiguous")
    )
    join: AccessSpec | None = Field(
        default=None, description=("time of an element of two tensors that are concatenated")
    )
    sum_cycles: Positive | None = Field(default=None, description="time of an element of a row that is summed up")
    combine_cycles: Positive | None = Field(
        default=None,
        description=(
            "time of each element of O that a merge of splits computes, in addition to the time of its "
            "parts (FlashAttention-2)"
        ),
    )
    reduce_cycles: Positive | None = Field(
        default=None, description="time of an element of a sum along an axis that is not a tensor's last (PyTorch)"
    )
    code: CodeSpec | None = Field(default=None, description="constants of kernels whose instructions are counted")

    def softmax_points(self, columns: int) -> dict[str, float]:
        """Return the row lengths whose ``row_cycles`` apply to rows with this number of columns, each with its share.

        Between two stated lengths the cost is interpolated; beyond the first or last it is constant.
        """
        for left, right in pairwise(self.softmax):
            if int(left) <= columns < int(right):
                share = (columns - int(left)) / (int(right) - int(left))
                return {left: (1 - share) / int(left), right: share / int(right)}
        one = min(self.softmax, key=lambda n: abs(int(n) - columns))
        return {one: 1 / int(one)}


class LocalMemoryPipe(RatedUnit):
    """Local memory, which holds spilled registers."""

    model: Literal["local_memory"]
    bytes_per_cycle: Positive = Field(description="rate of stores and loads of the multiprocessor")
    near_factor: Positive = Field(
        description=("largest ratio of all cores' bytes in flight to the size of L2 for which all accesses hit")
    )
    far_factor: Positive = Field(description="ratio above which all accesses go to memory")

    @model_validator(mode="after")
    def _factors_ascend(self) -> Self:
        if self.far_factor.value <= self.near_factor.value:
            raise fault_at("far_factor", f"{self.far_factor.value} must be above near_factor {self.near_factor.value}")
        return self

    def missing(self, live_bytes: float, l2_bytes: float) -> float:
        """Return the share of the data that does not fit L2, 0 to 1."""
        near, far = self.near_factor.value, self.far_factor.value
        return min(1.0, max(0.0, (live_bytes / l2_bytes - near) / (far - near)))


class TurnoverPipe(RatedUnit):
    """Costs at the end of one block and the start of the next block in its place."""

    model: Literal["turnover"]
    block_cycles: Positive = Field(
        description=("time from the end of a block to the end of the next block, if blocks do no work")
    )


class SyncProductSpec(SpecModel):
    """Products of one warp with operands in its registers (mma.sync)."""

    m_elements: PositiveWhole
    n_elements: PositiveWhole
    pipe_cycles: Positive = Field(description="time for which a product occupies the pipe of its sub-core")
    format_cycles: dict[str, Positive] = Field(
        default_factory=dict,
        description="pipe_cycles by formats of operands and accumulators (mxfp8_into_float32), where the time differs",
    )
    instructions_count: PositiveWhole | None = Field(default=None, description="machine instructions; default: one")
    lane_copies_count: PositiveWhole | None = Field(
        default=None,
        description=(
            "number of lanes that hold each element of an operand, so that it is loaded for each of them; default: one"
        ),
    )
    load_cycles: Positive = Field(description="time in which a single warp loads a 16 x 16 matrix into registers")
    chain_cycles: Positive | None = Field(
        default=None,
        description=(
            "time until a product may add to the result of the previous product; missing: no product waits for it"
        ),
    )
    latency_cycles: WholeQuantity = Field(description="time from the last product of a phase to the use of its results")

    @model_validator(mode="after")
    def _shape_is_known(self) -> Self:
        # m8n8k4 is four concurrent products, 16 x 16 in all (PTX ISA).
        if (self.m_elements.value, self.n_elements.value) not in ((16, 8), (16, 16)):
            shape, known = f"m{self.m_elements.value}n{self.n_elements.value}", "m16n8, and m16n16 as four m8n8k4"
            raise fault_at("m_elements", f"unknown instruction shape {shape}; mma.sync has {known} (PTX ISA)")
        return self

    def rate(self, operand: str, accumulator: str) -> tuple[str, float]:
        """Return the pipe's cycles for an instruction; its key in the file names the formats of its operands and
        accumulators.
        """
        if (cycles := self.format_cycles.get(name := f"{operand}_into_{accumulator}")) is None:
            return "pipe_cycles", float(self.pipe_cycles.value)
        return f"format_cycles.{name}", float(cycles.value)


class GroupProductSpec(SpecModel):
    """Products of a warp group of four warps (wgmma); B, and usually A, are in shared memory."""

    m_elements: PositiveWhole
    elements_per_cycle: Positive = Field(description="columns of B of one product")
    issue_cycles: WholeQuantity = Field(
        description="time until a warp issues the next product, if the warp waits for no product"
    )
    drain_cycles: WholeQuantity = Field(description="time from the last product's end until the warps continue")
    gap_cycles: Positive = Field(
        description=(
            "time of arithmetic that compilers overlap with a product for which warps wait separately, for each "
            "16 columns of the operand"
        )
    )
    turn_cycles: WholeQuantity = Field(
        description="delay of each resident block after the previous one, so that their products alternate"
    )

    @model_validator(mode="after")
    def _shape_is_known(self) -> Self:
        if self.m_elements.value != 64:
            raise fault_at(
                "m_elements", f"unknown instruction shape m{self.m_elements.value}nN; wgmma has m64nN (PTX ISA)"
            )
        return self


class GroupMatrixEngine(MatrixEngine):
    """The matrix units of a multiprocessor: products of a warp, on Hopper also products of a warp group.

    ``fractals`` are the products of one warp by input format; `SyncProductSpec` and `GroupProductSpec` state their
    durations.
    """

    model: Literal["group_matrix"]  # type: ignore[assignment]
    mma: SyncProductSpec
    wgmma: GroupProductSpec | None = None

    @model_validator(mode="after")
    def _rates_are_of_its_formats(self) -> Self:
        for name in self.mma.format_cycles:
            operand, _, accumulator = name.partition("_into_")
            if operand not in self.fractals or not accumulator:
                known = ", ".join(f"{fmt}_into_..." for fmt in self.fractals)
                raise fault_at(f"mma.format_cycles.{name}", f"not formats of the matrix unit; its formats: {known}")
        return self

    def fractal_cycles(self, input_format: str) -> float:
        """Return the cycles of a step for a format, at the rate of the instruction with the usual accumulators."""
        _, cycles = self.mma.rate(input_format, self.accumulator_format)
        return super().fractal_cycles(input_format) * cycles / float(self.mma.pipe_cycles.value)


class WarpMatrixEngine(GroupMatrixEngine):
    """Volta's tensor cores, simulated by lane: ``fractals`` belong to one quad pair, ``mma`` to a warp.

    The machine instructions of a product depend on the accumulators' format.
    """

    model: Literal["warp_matrix"]  # type: ignore[assignment]
    steps: dict[str, MmaStepsSpec] = Field(description="constants by format of the accumulators")

    def steps_of(self, accumulator_format: str) -> MmaStepsSpec:
        """Return the steps for a format of accumulators; raise `SpecError` with the known formats if there is none."""
        return entry(self.steps, accumulator_format, f"no product accumulates in {accumulator_format}; allowed: ")


class WarpIssue(SpecModel):
    """Warps and their in-order issue: the resources of a multiprocessor that a block may use."""

    model: Literal["warps"]
    queue_depth_count: PositiveWhole = Field(description="prefetched runs of instructions")
    subcores_count: PositiveWhole
    warps_count: PositiveWhole = Field(description="largest number that is resident at a time")
    blocks_count: PositiveWhole = Field(description="largest number that is resident at a time")
    block_warps_count: PositiveWhole = Field(description="largest number of warps of one block")
    registers_count: PositiveWhole = Field(description="registers of 32 bits")
    thread_registers_count: PositiveWhole = Field(description="registers that one thread can address")
    register_unit_count: PositiveWhole = Field(
        description=("the registers of a warp are allocated in multiples of this number")
    )
    overhead_registers_count: PositiveWhole = Field(
        description="registers of a thread for addresses, counters and operands in flight"
    )
    block_memory_bytes: PositiveWhole = Field(description="largest shared memory of one block")
    memory_unit_bytes: PositiveWhole = Field(
        description=("the shared memory of a block is allocated in multiples of this number")
    )
    reserved_bytes: WholeQuantity | None = Field(default=None, description="additional shared memory of a block")
    copies: Choice[Literal["staged", "asynchronous"]] = Field(
        description="path of tiles to shared memory: through registers, or directly from global memory"
    )
    sharing: SharingSpec = Field(description="constants of the concurrency of warp groups")
    library: LibrarySpec | None = Field(
        default=None, description="kernels of a framework whose time was measured as a whole"
    )


class LaneOpSpec(SpecModel):
    """Instructions of an operation for one element, or for the elements packed in one register."""

    instructions_count: PositiveWhole


class LanePipe(RatedUnit):
    """A pipe that processes elements one warp instruction at a time: FMA, MUFU."""

    model: Literal["lanes"]
    lanes_count: PositiveWhole = Field(description="elements in a cycle")
    latency_cycles: WholeQuantity = Field(description="time until the warp can use a result")
    packed_count: PositiveWhole | None = Field(
        default=None, description="number of elements of a packed format that a lane processes at once"
    )
    packed_formats: tuple[str, ...] = ()
    packed_ops: tuple[str, ...] = Field(default=(), description="operations that process packed elements")
    ops: dict[str, LaneOpSpec]

    def op(self, name: str) -> LaneOpSpec:
        """Return the cost of an operation; raise `SpecError` with the known operations if the name is unknown."""
        return entry(self.ops, name, f"no operation {name!r} on this pipe; it has: ")

    def packed(self, name: str, fmt: str) -> int:
        """Return the number of elements of ``fmt`` that one lane processes at once in an operation."""
        is_packed = name in self.packed_ops and fmt in self.packed_formats
        return self.packed_count.value if is_packed and self.packed_count else 1


class PairSpec(SpecModel):
    """Two lanes whose results can return in the same cycle."""

    distance_count: PositiveWhole = Field(description="XOR of the indices of the two lanes")


class PhaseSpec(SpecModel):
    """Lanes that shared memory serves together."""

    lanes_count: PositiveWhole


class SharedMemoryPipe(RatedUnit):
    """LSU: shared memory, and shuffles between the lanes of a warp; one for all sub-cores."""

    model: Literal["shared_memory"]
    banks_count: PositiveWhole
    bank_bytes: PositiveWhole
    phases: dict[str, PhaseSpec] = Field(description="constants by the bits of a lane's access")
    pair_masks: tuple[PairSpec, ...] = Field(
        description="distance between two lanes whose results return in the same cycle, if all addresses are equal"
    )
    latency_cycles: WholeQuantity = Field(description="time until the warp can use the loaded data")
    shuffle_cycles: PositiveWhole = Field(description="time of one warp's shuffle")
    shuffle_latency_cycles: WholeQuantity


#: A vector unit of either style.
VectorUnit = VectorEngine | RegisterVectorEngine


def _has_style(data: object) -> str:
    """Return the kind of vector unit that a mapping or a unit describes; a unit without registers states no style."""
    style = data.get("style") if isinstance(data, dict) else getattr(data, "style", None)
    return "memory" if style is None else "registers"


EngineSpec = Annotated[
    DmaEngine
    | FixpipeEngine
    | MatrixEngine
    | WarpMatrixEngine
    | Annotated[
        Annotated[VectorEngine, Tag("memory")] | Annotated[RegisterVectorEngine, Tag("registers")],
        Discriminator(_has_style),
    ]
    | ScalarEngine
    | LanePipe
    | SharedMemoryPipe
    | WarpIssue
    | GroupMatrixEngine
    | LocalMemoryPipe
    | TurnoverPipe,
    Field(discriminator="model"),
]
