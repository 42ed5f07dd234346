"""The parts of a streaming multiprocessor: its warps, and the pipes that all of them share.

A warp lives on one sub-core; sub-cores are alike.  What is said of lanes is said of one sub-core.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from npusim.config.model import SpecModel, fault_at
from npusim.config.quantity import Choice, Positive, PositiveWhole, Quantity, WholeQuantity
from npusim.errors import SpecError


class GapSpec(SpecModel):
    """Time between two steps."""

    gap_cycles: PositiveWhole


class MmaStepsSpec(SpecModel):
    """The machine instructions of one warp product, for one format of accumulators."""

    arithmetic: Choice[str] = Field(description="registry name of what it computes")
    steps_count: PositiveWhole = Field(description="machine instructions of one product")
    step_cycles: PositiveWhole = Field(description="that a step keeps the pipe of its sub-core busy")
    lone_gaps: tuple[GapSpec, ...] = Field(
        description="from each step of a product to the next, in a warp that is alone"
    )
    chained_latency_cycles: PositiveWhole = Field(
        description="from a step to the same step of a product that goes on with its accumulators"
    )
    result_latency_cycles: PositiveWhole = Field(
        description="from the last step to the use of the accumulators by another pipe"
    )

    @property
    def pipe_cycles(self) -> int:
        """Cycles of its sub-core's pipe that one product of a warp takes."""
        return self.steps_count.value * self.step_cycles.value


class SharingSpec(SpecModel):
    """How warp groups work alone and beside one another; where it is stated, all of a core's share its pipes.

    Warps that compute and products that run slow each other down: both need issue slots and registers.
    """

    product_issue_factor: Positive = Field(description="issue slots a cycle that running products take from arithmetic")
    product_compare_factor: Positive = Field(description="of the pipe of comparisons and conversions, likewise")
    issue_product_factor: Positive = Field(description="of a product's time, for each issue slot a cycle of arithmetic")
    warp_issue_cycles: Positive = Field(description="from one instruction of a lone warp to the next, on average")
    special_factor: Positive = Field(description="time of special functions among other instructions, over their own")
    step_cycles: WholeQuantity = Field(description="of an iteration, beside what is counted")
    step_instructions_count: WholeQuantity = Field(description="of a warp in an iteration, for addresses and control")
    access_instructions_count: WholeQuantity = Field(description="of a warp for a copy or load of 16 bytes a thread")
    block_start_cycles: WholeQuantity = Field(description="from one block of a place to the next's first load")
    barrier_cycles: Quantity
    barrier_warp_cycles: Quantity = Field(description="for each warp of the block")
    fence_cycles: WholeQuantity = Field(description="until a product sees what was stored to shared memory")
    copy_cycles: dict[Literal["mma", "wgmma"], WholeQuantity] = Field(
        description="of a warp for an asynchronous copy of 16 bytes a thread, by the products it feeds"
    )
    load_cycles: dict[Literal["mma", "wgmma"], WholeQuantity] = Field(
        description="of a warp for a load of 16 bytes a thread into registers"
    )
    reduction_cycles: WholeQuantity = Field(description="of a step of a reduction across warps, through shared memory")
    arrival_factor: Positive = Field(description="latency of a tile's last bytes over that of its first")
    new_head_factor: Quantity = Field(description="share of a first wave's misses that later blocks see of new heads")


class RowSpec(SpecModel):
    """A kernel over rows of a matrix, at one length of row."""

    row_cycles: Positive = Field(description="of a row, of a multiprocessor whose blocks are all at work")


class LibrarySpec(SpecModel):
    """What a framework's kernels take of a multiprocessor, whole, where memory does not hold them up."""

    tile_cycles: WholeQuantity = Field(description="of a product's tile, from the last one's end to its first operand")
    unaligned_product_cycles: Positive = Field(
        description="of a multiply-add where rows are no multiple of 16 bytes, which asynchronous copies want"
    )
    unaligned_store_cycles: Positive = Field(description="of an element of such a product's result, beside memory")
    softmax: dict[str, RowSpec] = Field(min_length=1, description="by length of row, ascending")
    masked_cycles: Positive = Field(description="that an element of softmax takes longer whose result is 0")
    add_cycles: Positive = Field(description="of an element to which one of a matrix is added that all heads share")

    def softmax_cycles(self, columns: int) -> float:
        """Return the cycles of an element in rows of so many columns, between those stated in proportion."""
        points = [(int(n), r.row_cycles.value / int(n)) for n, r in self.softmax.items()]
        for (left, low), (right, high) in pairwise(points):
            if left <= columns < right:
                return low + (high - low) * (columns - left) / (right - left)
        return points[0][1] if columns < points[0][0] else points[-1][1]


class LocalMemoryPipe(SpecModel):
    """Local memory, where spilled registers go."""

    model: Literal["local_memory"]
    capacity_bytes: PositiveWhole = Field(description="of the cache that it shares with shared memory")
    carved_bytes: tuple[PositiveWhole, ...] = Field(min_length=1, description="sizes that shared memory takes of it")
    bytes_per_cycle: Positive = Field(description="stored and loaded, of the whole multiprocessor, in that cache")
    far_bytes_per_cycle: Positive = Field(description="of what misses it")
    near_factor: Positive = Field(description="what is stored and loaded over what fits: up to it nothing misses")
    far_factor: Positive = Field(description="likewise: from it on everything misses")

    @model_validator(mode="after")
    def _factors_ascend(self) -> Self:
        if self.far_factor.value <= self.near_factor.value:
            raise fault_at("far_factor", f"{self.far_factor.value} must be above near_factor {self.near_factor.value}")
        return self

    def missing(self, frames_bytes: float, cache_bytes: float) -> float:
        """Return the share that misses a cache, 0 to 1."""
        near, far = self.near_factor.value, self.far_factor.value
        return min(1.0, max(0.0, (frames_bytes / cache_bytes - near) / (far - near)))

    def beside(self, blocks: int, shared_bytes: int) -> int:
        """Return the bytes of the cache left beside so many blocks' shared memory, or as many of them as fit."""
        sizes = sorted(s.value for s in self.carved_bytes)
        wanted = shared_bytes * min(blocks, sizes[-1] // max(1, shared_bytes))
        return max(1, self.capacity_bytes.value - next((s for s in sizes if s >= wanted), sizes[-1]))


class SyncProductSpec(SpecModel):
    """Products of one warp, operands in its registers (mma.sync)."""

    m_elements: PositiveWhole
    n_elements: PositiveWhole
    pipe_cycles: Positive = Field(description="of its sub-core")
    load_cycles: Positive = Field(description="of a lone warp for a load of a 16 x 16 matrix into registers")
    latency_cycles: WholeQuantity = Field(description="of a phase of products, from its last one to its results' use")

    @model_validator(mode="after")
    def _shape_is_known(self) -> Self:
        # m8n8k4 is four products beside one another, 16 x 16 in all (PTX ISA).
        if (self.m_elements.value, self.n_elements.value) not in ((16, 8), (16, 16)):
            shape, known = f"m{self.m_elements.value}n{self.n_elements.value}", "m16n8, and m16n16 as four m8n8k4"
            raise fault_at("m_elements", f"unknown instruction shape {shape}; mma.sync has {known} (PTX ISA)")
        return self


class GroupProductSpec(SpecModel):
    """Products of a warp group of four warps (wgmma), B and as a rule A in shared memory."""

    m_elements: PositiveWhole
    elements_per_cycle: Positive = Field(description="columns of B that a product goes through")
    drain_cycles: WholeQuantity = Field(description="from the last product's end until the warps go on")
    gap_cycles: Positive = Field(description="of arithmetic that compilers move beside a product waited for alone")

    @model_validator(mode="after")
    def _shape_is_known(self) -> Self:
        if self.m_elements.value != 64:
            raise fault_at(
                "m_elements", f"unknown instruction shape m{self.m_elements.value}nN; wgmma has m64nN (PTX ISA)"
            )
        return self


class WarpIssue(SpecModel):
    """Where warps live and issue in order: what a block may use of a multiprocessor."""

    model: Literal["warps"]
    queue_depth_count: PositiveWhole = Field(description="runs of instructions fetched ahead")
    subcores_count: PositiveWhole
    warps_count: PositiveWhole = Field(description="resident at a time, at most")
    blocks_count: PositiveWhole = Field(description="resident at a time, at most")
    block_warps_count: PositiveWhole = Field(description="of one block, at most")
    registers_count: PositiveWhole = Field(description="of 32 bits")
    thread_registers_count: PositiveWhole = Field(description="that one thread can address")
    register_unit_count: PositiveWhole = Field(description="a warp's registers are a multiple of it")
    overhead_registers_count: PositiveWhole = Field(
        description="of a thread, for addresses, counters and operands in flight"
    )
    block_memory_bytes: PositiveWhole = Field(description="shared memory of one block, at most")
    memory_unit_bytes: PositiveWhole = Field(description="a block's shared memory is a multiple of it")
    reserved_bytes: WholeQuantity | None = Field(default=None, description="shared memory that a block takes besides")
    copies: Choice[Literal["staged", "asynchronous"]] = Field(
        description="how tiles reach shared memory: through registers, or straight from global memory"
    )
    sharing: SharingSpec | None = Field(default=None, description="how warp groups work beside one another")
    library: LibrarySpec | None = Field(default=None, description="kernels of a framework that are timed whole")


class LaneOpSpec(SpecModel):
    """Instructions that an operation takes for an element, or for those packed in one register."""

    instructions_count: PositiveWhole


class LanePipe(SpecModel):
    """A pipe that works element by element, a warp instruction at a time: FMA, MUFU."""

    model: Literal["lanes"]
    lanes_count: PositiveWhole = Field(description="elements in a cycle")
    latency_cycles: WholeQuantity = Field(description="until the warp can use a result")
    packed_count: PositiveWhole | None = Field(
        default=None, description="elements of a packed format that a lane takes at once"
    )
    packed_formats: tuple[str, ...] = ()
    packed_ops: tuple[str, ...] = Field(default=(), description="operations that take packed elements")
    ops: dict[str, LaneOpSpec]

    def op(self, name: str) -> LaneOpSpec:
        """Return the cost of an operation; raise `SpecError` naming those there are."""
        if name not in self.ops:
            raise SpecError(f"no operation {name!r} on this pipe; it has: {', '.join(self.ops)}")
        return self.ops[name]

    def packed(self, name: str, fmt: str) -> int:
        """Return how many elements of ``fmt`` one lane takes at once in an operation."""
        is_packed = name in self.packed_ops and fmt in self.packed_formats
        return self.packed_count.value if is_packed and self.packed_count else 1


class PairSpec(SpecModel):
    """Lanes that can share a return."""

    distance_count: PositiveWhole = Field(description="XOR of the numbers of the two lanes")


class PhaseSpec(SpecModel):
    """Lanes that shared memory serves together."""

    lanes_count: PositiveWhole


class SharedMemoryPipe(SpecModel):
    """LSU: shared memory, and shuffles between the lanes of a warp; one for all sub-cores."""

    model: Literal["shared_memory"]
    banks_count: PositiveWhole
    bank_bytes: PositiveWhole
    phases: dict[str, PhaseSpec] = Field(description="by the bits of a lane's access")
    pair_masks: tuple[PairSpec, ...] = Field(
        description="lanes so far apart let two returns share a cycle, if all have equal addresses"
    )
    latency_cycles: WholeQuantity = Field(description="until the warp can use what it loads")
    shuffle_cycles: PositiveWhole = Field(description="of one warp's shuffle")
    shuffle_latency_cycles: WholeQuantity
