"""One streaming multiprocessor as programs use it: pipes, memories, the number of blocks that it holds, and tiling
fields.

Source of the number of blocks: CUDA C++ Best Practices Guide, "Occupancy"; registers are allocated warp by warp, shared
memory block by block, both in the units of the device file.
"""

from __future__ import annotations

from dataclasses import field
from functools import partial
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from npusim.config.core_units import DmaEngine, SharedMemoryPipe, WarpIssue, WarpMatrixEngine
from npusim.config.tiling import Field, Tiling, lightest, one_of, power_of_two
from npusim.errors import BufferOverflowError, ProgramError, TilingError
from npusim.formats.layout.fragment import REGISTER_BITS, WARP_LANES
from npusim.formats.scans import of_float32
from npusim.late_methods import dataclass
from npusim.machines.base import memories
from npusim.machines.decisions import Charge, GpuDecisions
from npusim.machines.frame import Along
from npusim.machines.published_kernel import GpuKernel
from npusim.machines.published_kernels import find_kernel, kernels
from npusim.program.ir.buffers import AddressSpace, Allocator
from npusim.program.ir.op import Opcode
from npusim.program.ir.tile_program import Occupancy
from npusim.units import format_bytes, round_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.config.core_units import LanePipe
    from npusim.config.device import DeviceSpec
    from npusim.program.ir.op import Step, WarpPlan


EngineType = TypeVar("EngineType")

SM = "sm"
#: ``FUSED``: element-wise operations process their tile fragment by fragment; their values need no tile, only a few
#: registers (those that the device file states as overhead).
RF, SMEM, FUSED = "sm.RF", "sm.SMEM", "sm.FUSED"
TENSOR, FMA, MUFU, LSU, LDG, WARPS = "TENSOR", "FMA", "MUFU", "LSU", "LDG", "WARPS"
#: From Turing on: comparisons and conversions have a pipe of half the width; spilled registers go to SPILL.
ALU, SPILL = "ALU", "SPILL"
#: Bytes of spilled registers for which L2 has no space; they use a link, not a pipe.
BEYOND = "hbm"
#: Key of the rate at which a multiprocessor ends blocks.
RETIRE = "RETIRE"
REGISTER_BYTES = REGISTER_BITS // 8
#: Steps that use the pipe of special functions, in any operation.
SPECIAL = frozenset({Opcode.EXP, Opcode.LOG, Opcode.RSQRT, Opcode.SQRT, Opcode.TANH, Opcode.ERF})
#: The only root that is a single instruction; and the instructions of another root in addition to MUFU.RSQ: sqrt.rn.f32
#: as ptxas of Triton 3.6 compiles it for sm_75 and sm_90 (IADD3 and ISETP, 2 FMUL, 2 FFMA), without its branch for
#: subnormals.
APPROXIMATE_ROOT = "sqrt.hopper_approx"
ROOT: Mapping[str, int] = MappingProxyType({"mul": 2, "fma": 2, "compare": 2})
#: Costs of kernels of warp groups: an iteration, a block's start, and products that need recently stored data.
STEP, START = Charge(f"{WARPS}.sharing.step_cycles"), Charge(f"{WARPS}.sharing.block_start_cycles", due="block")
FENCE = Charge(f"{WARPS}.sharing.fence_cycles")
#: Keys of a device file: costs of an instruction in addition to those of steps, and costs of libraries' kernels.
INSTRUCTION, LIBRARY = f"{WARPS}.sharing.warp_issue_cycles", f"{WARPS}.library"


def priced_as(opcode: Opcode) -> str:
    """Return the name of an operation in device files; integers are compared, added and shifted at the same rate."""
    return "compare" if opcode is Opcode.INTEGER else opcode.name.lower()


def barriers(decided: GpuDecisions, count: int = 1) -> tuple[Charge, ...]:
    """Return the cost of ``count`` barriers that all warps of a block pass."""
    of_block, each = max(1, decided.consumers) * decided.warps, f"{WARPS}.sharing.barrier"
    return (Charge(f"{each}_cycles", count), Charge(f"{each}_warp_cycles", count * of_block)) if count else ()


def special(step: Step) -> tuple[str, Mapping[str, int]]:
    """Return the instruction of a special function on MUFU, and the number of its other instructions; if a library's
    code branches, both branches count.

    MUFU.SQRT has the rate of MUFU.RSQ.
    """
    name = step.opcode.name.lower()
    if step.opcode is Opcode.SQRT:
        return "rsqrt", {} if step.attributes.variant == APPROXIMATE_ROOT else ROOT
    return name, {name: 1} if step.opcode in (Opcode.TANH, Opcode.ERF) else {}


def listed_as(name: str, variant: str, *pipes: LanePipe) -> str:
    """Return the name of an operation in a device file: with its variant, if a pipe has a separate entry for it."""
    apart = f"{name}_{variant}"
    return apart if any(apart in pipe.ops for pipe in pipes) else name


@dataclass(frozen=True, slots=True)
class SmTiling:
    """One phase on a multiprocessor.

    residents
        Number of blocks that are resident on a multiprocessor at a time.
    lanes
        The layout of a stage's tiles in the lanes, by the axis of its columns; None: tiles have no layout.
    widths
        Number of columns along each axis that a kernel computes even for a ragged tile; None: those of the tile.
    decided
        Decisions of its kernel.
    has_own_rows
        Whether each block reads rows that no other block reads.
    occupancy
        The number of blocks that fit, and the limiting resource, if registers are not tiles of a buffer.
    parts
        Number of the phase's blocks that one block of the launch computes at once; ``residents`` counts the former.
    """

    residents: int = 1
    lanes: Mapping[str, WarpPlan] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)
    decided: GpuDecisions = field(default_factory=GpuDecisions)
    has_own_rows: bool = False
    occupancy: Occupancy | None = field(default=None, compare=False)
    parts: int = 1

    @property
    def has_groups(self) -> bool:
        """Whether warp groups execute the phase concurrently, independent of the layout in lanes."""
        return bool(self.decided.warps) and not self.lanes

    @property
    def masks_apart(self) -> bool:
        """Whether several warps of a sub-core apply masks at once: only with one block of warp groups on a core.

        With one block, warps wait for one another at barriers in every tile, and no other block's exponentials run
        during the masks: an H100 then takes 6 to 8 cycles longer for each score of a lane and warp, and 1 to 4 if two
        or more blocks are resident (reports/silicon/phases.json).  Groups that alternate each mask a tile's scores
        before its maxima, whatever the other group computes (FlashAttention-3,
        hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp).
        """
        decided = self.decided
        has_several = self.has_groups and decided.generation == "wgmma" and (decided.groups > 1 or decided.repeats > 1)
        return has_several and self.residents == 1


@dataclass
class Tally:
    """The costs of an operation so far: cycles of its warps, the share of each constant, cycles of pipes."""

    cycles: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    pipes: dict[str, float] = field(default_factory=dict)
    issued: float = 0.0  #: instructions of a sub-core's warps

    def add(self, constant: str, cycles: float) -> None:
        """Attribute cycles to a constant."""
        if cycles:
            self.terms[constant] = self.terms.get(constant, 0.0) + cycles

    def take(self, pipe: str, cycles: float, constant: str) -> None:
        """Let a pipe be busy for ``cycles`` further cycles."""
        self.pipes[pipe] = self.pipes.get(pipe, 0.0) + cycles
        self.add(constant, cycles)

    def pipe_cycles(self) -> tuple[tuple[str, int], ...]:
        """Return the pipes that are busy, each with its cycles as an integer."""
        return tuple((f"{SM}.{name}", ceil(cycles)) for name, cycles in self.pipes.items() if cycles > 0)


class SmCore:
    """Memories of one multiprocessor.

    If the device file describes warps, a block's needs are counted in registers of a thread (:func:`occupancy`), and
    element-wise work uses a few of these registers; otherwise every tile is compared with the size of the register
    file.
    """

    def __init__(self, device: DeviceSpec, work_bytes: int = 0, *, has_groups: bool = False) -> None:
        self.device = device
        core = device.core(SM)
        issue = core.engines.get(WARPS)
        self.has_warps = has_warps(device)
        #: Whether tiles reach shared memory through registers, because there is no asynchronous copy.
        self.is_staged = isinstance(issue, WarpIssue) and issue.copies.value == "staged"
        spaces = memories(device, SM)
        if has_groups:
            # Values without a register are spilled; blocks for which a core has no space are not resident.
            for name in (RF, SMEM):
                spaces[name] = AddressSpace(name, work_bytes, spaces[name].alignment_bytes, is_physical=False)
        if self.has_warps:
            # Not a separate memory: as large as the data that pass through it.
            spaces[FUSED] = AddressSpace(FUSED, work_bytes, 1, is_physical=False)
        self.passing = FUSED if self.has_warps else RF
        self.allocator = Allocator(spaces)
        #: Order of row sums for kernels that name none: the device's order, or, as in the flash kernel of
        #: golden/README.md, from left to right.
        self.row_sum = "sequential" if device.row_sum is None else device.row_sum.value
        unit = device.matrix_engine(SM).arithmetic["float16"].value
        self.along = Along("warps", "blocks", of_float32(unit))

    def arithmetic(self, operand: str, kept: str) -> str:
        """Return the registry name of the arithmetic for products of ``operand``, accumulated in ``kept``."""
        engine = self.device.matrix_engine(SM)
        if isinstance(engine, WarpMatrixEngine):
            return engine.steps_of(kept).arithmetic.value
        return engine.arithmetic_of(operand)


def warp_issue(device: DeviceSpec) -> WarpIssue:
    """Return a device file's entry on warps; raise `TilingError` if the file has no such entry."""
    issue = device.engine(SM, WARPS)
    if not isinstance(issue, WarpIssue):
        raise TilingError(f"{device.name}: {SM}.{WARPS} does not describe warps")
    return issue


#: Architectures that run the machine code of another one, and for which the tools that read code have no name (PTX ISA
#: 8.8, family-specific features: sm_121 is of the family of sm_120; nvdisasm 12.8 refuses SM121).
_SAME_CODE = MappingProxyType({"sm_121": "sm_120"})


def code_architecture(architecture: str) -> str:
    """Return the architecture whose machine code a chip of ``architecture`` runs; for most chips it is the same
    architecture.
    """
    return _SAME_CODE.get(architecture, architecture)


def shared_memory_bytes(device: DeviceSpec) -> int:
    """Return the shared memory of a multiprocessor."""
    return device.cores[SM].buffers[SMEM.partition(".")[2]].capacity_bytes.value


def engine_of(device: DeviceSpec, name: str, kind: type[EngineType]) -> EngineType:
    """Return an engine of a kind; raise `ProgramError` if the device's file has another engine under its name."""
    engine = device.engine(SM, name)
    if not isinstance(engine, kind):
        raise ProgramError(f"{device.name}: {SM}.{name} is not a {kind.__name__}")
    return engine


def fill_passes(device: DeviceSpec) -> int:
    """Return how many passes through shared memory take as long as L2 needs to fill the cache with the bytes of one
    pass; shared memory and the cache are one memory.
    """
    memory, copies = engine_of(device, LSU, SharedMemoryPipe), engine_of(device, LDG, DmaEngine)
    port = copies.route("GM", "RF")
    return ceil(
        memory.banks_count.value * memory.bank_bytes.value * memory.rate / (port.bytes_per_cycle.value * copies.rate)
    )


def counts_turnover(device: DeviceSpec) -> bool:
    """Return whether a device's file states the rate at which ended blocks are replaced."""
    return RETIRE in device.core(SM).engines


def has_warps(device: DeviceSpec) -> bool:
    """Return whether a device's file describes warps, and the concurrent speeds of their groups."""
    return SM in device.cores and isinstance(device.cores[SM].engines.get(WARPS), WarpIssue)


def has_lanes(device: DeviceSpec) -> bool:
    """Return whether tiles of attention are distributed over the lanes of a device's warps (Volta)."""
    return SM in device.cores and isinstance(device.cores[SM].engines.get(TENSOR), WarpMatrixEngine)


def has_concurrent_warp_groups(device: DeviceSpec) -> bool:
    """Return whether concurrent warp groups execute attention, for any layout of lanes."""
    return has_warps(device) and not has_lanes(device)


def occupancy(
    issue: WarpIssue,
    memory_bytes: int,
    warps: int,
    registers: Mapping[str, int],
    shared: Mapping[str, int],
    spilled: int = 0,
) -> Occupancy:
    """Return the number of blocks of ``warps`` warps that fit in one multiprocessor with ``memory_bytes`` of shared
    memory.

    ``registers``: registers of a thread by their use, without the overhead; ``shared``: bytes of a block by their use;
    ``spilled``: a thread's registers in local memory.

    Raises
    ------
    TilingError
        More warps than a block may have.
    BufferOverflowError
        More registers than a thread can address or than exist, or too much shared memory: the message names every use
        and the limit.
    """
    if warps > issue.block_warps_count.value:
        raise TilingError(f"warps: {warps} warps in a block; allowed: at most {issue.block_warps_count.value}")
    overhead, most = issue.overhead_registers_count.value, issue.thread_registers_count.value
    count = sum(registers.values()) + overhead
    if count > most:
        listed = " + ".join(f"{name} {n}" for name, n in registers.items())
        raise BufferOverflowError(
            f"registers: {listed} + overhead {overhead} = {count} for each thread; allowed: {most}; smaller tiles, "
            "arrangement=2x2, float16 accumulators, or more warps for a tile need fewer"
        )
    size = round_up(sum(shared.values()), issue.memory_unit_bytes.value)
    limit = min(issue.block_memory_bytes.value, memory_bytes)
    if size > limit:
        listed = " + ".join(f"{name} {format_bytes(n)}" for name, n in shared.items())
        raise BufferOverflowError(
            f"shared memory: {listed} = {format_bytes(size)} > {format_bytes(limit)} of a block ({size:,} bytes "
            f"needed, {limit:,} available)"
        )
    of_warp = round_up(count * WARP_LANES, issue.register_unit_count.value)
    reserved = issue.reserved_bytes.value if issue.reserved_bytes else 0
    limits = {
        "registers": issue.registers_count.value // of_warp // warps,
        "shared memory": max(1, memory_bytes // (size + reserved)) if size else issue.blocks_count.value,
        "warps": issue.warps_count.value // warps,
        "blocks": issue.blocks_count.value,
    }
    blocks = min(limits.values())
    if not blocks:
        raise BufferOverflowError(
            f"registers: {count} a thread x {warps * WARP_LANES} threads = "
            f"{of_warp * warps:,}, but a multiprocessor has {issue.registers_count.value:,}"
        )
    memories = {
        RF: (REGISTER_BYTES * of_warp * warps, REGISTER_BYTES * issue.registers_count.value),
        SMEM: (size + reserved if size else 0, memory_bytes),
    }
    return Occupancy(blocks, warps, count, size, limits, memories, spilled)


# ---------------------------------------------------------------- tiling fields of attention

#: Fields that state decisions of a compiler for a tile.
COMPILED = frozenset({"registers", "spilled_registers", "spilled_accesses", "shared_bytes", "residents", "kernel"})
#: Fields of lanes whose default is the best value, or a value that fits.
CHOSEN = frozenset({"q", "padding", "access_bytes", "exchange"})
#: Fields that have an effect where warp groups run concurrently.
GROUPS = frozenset({"block_q", "block_kv", "warps", "stages", "launch", *COMPILED})


#: The name of a published kernel, or FILE.py:NAME.
GpuKernelName = Annotated[str, one_of(partial(kernels, GpuKernel))]


class GroupFields(Tiling):
    """Warps, stages and registers of a block: decisions of a kernel and its compiler."""

    warps: Annotated[int, power_of_two()] = Field(
        default=4,
        ge=1,
        le=32,
        json_schema_extra={"also": "num_warps"},
        description=("number of warps of a block, which share its rows; fewer than 4 only in kernels without products"),
    )
    stages: int | None = Field(
        default=2,
        ge=1,
        le=4,
        json_schema_extra={"none": "library", "also": "num_stages"},
        description=(
            "number of tiles of K, and of V, in flight in a software pipeline; 1: copies go through "
            "registers; library: a library's kernel"
        ),
    )
    registers: int | None = Field(
        default=None,
        ge=16,
        le=255,
        description="registers of a thread that the compiler reports; default: from its table, else an estimate",
    )
    spilled_registers: int | None = Field(
        default=None,
        ge=0,
        description="spilled registers of a thread (in local memory) that the compiler reports; needs `registers`",
    )
    spilled_accesses: int | None = Field(
        default=None,
        ge=0,
        description=(
            "registers that an iteration stores to and loads from local memory, as the compiler reports; "
            "default: an estimate"
        ),
    )
    shared_bytes: int | None = Field(
        default=None,
        ge=0,
        description="shared memory of a block that the compiler reports; needs `registers`; default: an estimate",
    )
    residents: int | None = Field(
        default=None, ge=1, description=("number of blocks resident on a core; default: as many as fit")
    )


class BlockFields(Tiling):
    """Rows and keys of a block."""

    block_q: int = Field(default=128, ge=8, multiple_of=8, description="query rows of a block")
    block_kv: int | None = Field(
        default=None,
        ge=8,
        multiple_of=8,
        json_schema_extra={"none": "fits"},
        description="keys of a step; fits: the largest of 64, 32 and 16 that fits",
    )


class SmFields(GroupFields, BlockFields):
    """Tile, warps and layouts of attention; fields of lanes apply to devices whose file has warps."""

    warps: int = Field(
        default=4,
        ge=4,
        le=32,
        multiple_of=4,
        json_schema_extra={"also": "num_warps"},
        description="number of warps of a block, which share its rows; each sub-core has the same number",
    )
    kernel: GpuKernelName | None = Field(
        default=None,
        description=(
            "published kernel, or your own FILE.py:NAME; default: a library's kernel, or, if `stages` is set, a "
            "kernel that masks all of its tiles"
        ),
    )
    q: Literal["auto", "registers", "shared"] = Field(
        default="auto", description="where Q is stored; auto: in registers if it fits"
    )
    arrangement: Literal["4x1", "2x2", "1x4"] = Field(
        default="4x1", description="number of quad pairs of a warp, down x across its tile"
    )
    smem: Literal["plain", "padded", "swizzled"] = Field(
        default="padded", description="layout of rows of K and V in shared memory"
    )
    padding: int = Field(default=8, ge=2, multiple_of=2, description="number of padding elements after each row")
    access_bytes: int = Field(
        default=16, ge=8, le=16, multiple_of=8, description="bytes of a lane's access to shared memory"
    )
    stages: int | None = Field(
        default=None,
        ge=1,
        le=4,
        json_schema_extra={"none": "library"},
        description=(
            "number of tiles of K, and of V, in shared memory; library: 1, or, from Ampere on, a library's kernel"
        ),
    )
    exchange: Literal["shuffle", "none"] = Field(
        default="shuffle", description="whether P may be moved between lanes for P V"
    )
    launch: Literal["in_order", "longest_first"] = Field(
        default="in_order",
        description="order of blocks: head by head, or longest first among heads whose K and V stay in L2",
        json_schema_extra=lightest("any"),
    )

    @property
    def step_keys(self) -> int:
        """Keys of a step, if the field is chosen."""
        assert self.block_kv is not None
        return self.block_kv

    def check_no_lanes(self, device: str, known: frozenset[str] = frozenset({"block_q", "block_kv"})) -> None:
        """Raise `TilingError` for fields of lanes that differ from their defaults, where a device's file does not
        describe lanes.
        """
        usual = {n: field.default for n, field in SmFields.model_fields.items() if n not in known}
        chosen = sorted(n for n in self.model_fields_set & usual.keys() if getattr(self, n) != usual[n])
        if chosen:
            raise TilingError(
                f"{', '.join(chosen)}: no effect on {device}, whose file does not describe lanes; remove them"
            )

    @property
    def published(self) -> GpuKernel | None:
        """The published kernel that the fields name."""
        return find_kernel(GpuKernel, self.kernel)


def left_alone(device: DeviceSpec) -> frozenset[str]:
    """Return the fields that a search leaves at their defaults: fields without effect on this device, compiled fields,
    and fields that are already chosen.
    """
    lanes = set(SmFields.model_fields) - GROUPS if has_concurrent_warp_groups(device) else CHOSEN
    return COMPILED | lanes
