"""Warp groups of a block as a compiler lays them out, its registers and shared memory, and how many fit a core.

What Triton makes of attention (hopper.md section 2): 64 rows and more go to products of warp groups, fewer to
products of single warps beside one another along the columns; eight warps on 64 rows compute S twice.
Registers and spills are inputs where a compiler gave them, else estimated.  A library's kernels: matrix products with
its tiles and splits of k, and a framework's operators between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Literal

from npusim.algorithms.flow import views
from npusim.config.device_tables import ESTIMATED, compiled_registers
from npusim.config.engine import GroupMatrixEngine, LocalMemoryPipe
from npusim.config.tiling import Field, Tiling
from npusim.errors import BufferOverflowError, SpecError, TilingError
from npusim.formats import get_format
from npusim.ir.op import GroupWork
from npusim.layout.fragment import WARP_LANES
from npusim.machines.frame import attention_products
from npusim.machines.sm.core import (
    REGISTER_BYTES,
    RF,
    SM,
    SMEM,
    SPILL,
    TENSOR,
    WARPS,
    GroupFields,
    Occupancy,
    SmTiling,
    engine_of,
    occupancy,
    warp_issue,
)
from npusim.machines.sm.group_cost import FRAGMENT_COLUMNS, FRAGMENT_ROWS
from npusim.machines.sm.published import XFORMERS, XFORMERS_COUNTS, fa2_cuts, fa2_instructions
from npusim.units import ceil_div, format_bytes, round_up

if TYPE_CHECKING:
    from npusim.algorithms.phase import Instruction, Phase
    from npusim.config.device import DeviceSpec
    from npusim.config.engine import CodeSpec
    from npusim.ir.tile import GlobalTensor


#: Rows of a warp group's product (PTX ISA, wgmma), and its warps.
GROUP_ROWS, GROUP_WARPS = 64, 4
#: Rows of a warp of CUTLASS's kernels before sm_80 (kernel_forward.h, WarpShape).
CUTLASS_ROWS = 32
#: Registers of a lane beyond which a tile is refused, over those that it can address: none measured has more.
MOST_REGISTERS = 8
#: Registers of a lane beside accumulators where no compiler was asked: addresses and operands.
UNNAMED_REGISTERS = 64
#: How often an iteration stores and loads a spilled register, where no compiler was asked: the median of those that
#: were (hwconfigs/sm_90_registers.csv).
SPILL_ACCESSES = 1.45
#: Registers of a lane in a block that multiplies once, and for each that its operands or its result take: of six such
#: kernels (tests/silicon/products.json) within 24, most within 6.
ONE_SHOT_REGISTERS, ONE_SHOT_FACTOR = 22, 1.2
#: Tiles under way of an unrolled loop without products, and the registers of a lane that they may take.
UNROLLED_TILES, UNROLLED_REGISTERS = 4, 64
#: Warps of a block of rows from so many elements on.  source: unsloth/kernels/utils.py, calculate_settings
ROWS_WARPS = ((32768, 32), (8192, 16), (2048, 8))
#: Instructions for each score with which FlexAttention sees where rows and keys end, in each tile if in one.
FLEX_BOUNDS = 4.0


@dataclass(frozen=True, slots=True)
class BlockTile:
    """What decides the block of an attention: sizes, formats, and which kernel it is, with its warps and stages.

    ``is_awaited``: P V is used at once.  ``stages`` 0: a library's kernel.  ``stored_bytes``: of an element of K and V
    where products read another format; 0: as they read it.  ``is_viewed``: V is a part of K's tile.
    """

    kernel: str
    dtype: str
    rows: int
    keys: int
    head_dim: int
    value_dim: int
    causal: bool
    is_awaited: bool
    output: str
    warps: int
    stages: int
    stored_bytes: int = 0
    is_viewed: bool = False

    @classmethod
    def of(cls, kernel: str, phase: Phase, products: tuple[Instruction, Instruction], fields: GroupFields) -> BlockTile:
        """Return the block of an attention's phase, of which ``products`` are the first and the last."""
        (first, last), names = products, phase.names
        shapes = {(c.rows, c.runs) for c in phase.cells}
        rows, keys = max(n for n, _ in shapes), max(r.cols for _, runs in shapes for r in runs)
        made_of = [n for s in phase.stages if first.srcs[1] in s.written for n in s.read if n in phase.tensors]
        return cls(
            kernel,
            names[first.srcs[0]].fmt,
            round_up(rows, FRAGMENT_ROWS),
            keys,
            phase.sizes[names[first.srcs[0]].axes[1]],
            phase.sizes[names[last.dst].axes[1]],
            bool(phase.masks),
            not last.attributes.accumulate,
            names["out"].fmt if "out" in names else names[last.dst].fmt,
            fields.warps,
            fields.stages or 0,
            max((get_format(names[n].fmt).size_bytes for n in made_of if len(names[n].axes) > 1), default=0),
            last.srcs[1] in views(phase, phase.loop_axis),
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of an element of Q, K and V."""
        return get_format(self.dtype).size_bytes

    @property
    def depth(self) -> int:
        """Tiles of each operand of the loop in shared memory; of K two where a library needs none for V (FlashMLA)."""
        return max(1, self.stages - 1) if self.stages or not self.is_viewed else 2

    def elements(self, work: GroupWork) -> tuple[float, float]:
        """Return how many elements of S and of O a thread holds."""
        threads, across = WARP_LANES * self.warps, work.across * FRAGMENT_COLUMNS
        scores, output = max(across, self.keys) * work.repeats, max(across, self.value_dim)
        return self.rows * scores / threads, self.rows * output / threads


#: A block's tile in words, its stages and its groups of warps.
BlockShape = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Registers:
    """Registers of a lane, those spilled, shared memory of a block, who says so; an iteration's accesses to spills."""

    count: int
    spilled: int
    shared_bytes: int
    origin: str
    accesses: float = 0.0

    @classmethod
    def estimated(cls, count: int, most: int, shared_bytes: int) -> Registers:
        """Return an estimate, of which a lane can address so many at most."""
        spilled = max(0, count - most)
        return cls(min(most, count), spilled, shared_bytes, ESTIMATED, SPILL_ACCESSES * spilled)


def group_tiling(kernel: str, phase: Phase, fields: GroupFields, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return how warp groups execute a phase, and a note: how many blocks a core holds, and why.

    ``kernel`` is the name under which a compiler's registers are listed; ``fields.stages`` none: a library's kernel.
    Raises `TilingError` (or its ``BufferOverflowError``) where a block does not fit, saying by how much.
    """
    products, note = attention_products(phase), ""
    if products is None:
        library, plain = warp_issue(device).library, one_shot_tiling(phase, device)
        cycles = library.combine_cycles if library is not None and fields.kernel == "fa2" else None
        return _unrolled(phase, plain) if cycles is None else replace(plain, combine_cycles=cycles.value), ""
    issue, engine = warp_issue(device), engine_of(device, TENSOR, GroupMatrixEngine)
    if issue.copies.value == "staged" and (fields.stages or 1) > 1:
        if "stages" in fields.model_fields_set:
            raise TilingError(
                f"stages: {fields.stages} tiles under way need asynchronous copies, which {device.name} has not: "
                "its tiles go through registers; take 1"
            )
        fields, note = fields.model_copy(update={"stages": 1}), "; 1 stage, for want of asynchronous copies"
    tile = BlockTile.of(kernel, phase, products, fields)
    if fields.kernel == "fa2":  # whole tiles, however few rows are live
        tile = replace(tile, rows=phase.sizes[phase.row_axis], keys=phase.sizes[phase.loop_axis])
    work, groups = layout_of(tile, engine, is_cutlass=fields.kernel == XFORMERS)
    work = replace(work, rows=ceil_div(tile.rows, groups))
    registers = registers_of(tile, fields, device.architecture, issue.thread_registers_count.value, work)
    size, stages = f"{tile.rows}x{tile.keys}", fields.stages or 0
    tiling, room = _resident(phase, fields, device, registers, (size, stages, groups), work)
    is_flex = fields.kernel == "triton"
    tiling = replace(
        tiling,
        depth=tile.depth,
        walks_blocks=bool(is_flex and phase.masks),
        widths={phase.loop_axis: tile.keys},
        bounds=FLEX_BOUNDS if is_flex and is_ragged(phase) else 0.0,
    )
    if issue.library is not None and (code := issue.library.code) is not None and not tile.stages:
        tiling = replace(tiling, code=fetched_code(phase, tile, tiling.residents, code, device.group_count.value))
    tiling = replace(tiling, **XFORMERS_COUNTS) if fields.kernel == XFORMERS else tiling
    spilled = f", {registers.spilled} spilled" if registers.spilled else ""
    return tiling, f"{room}; tiles of {tile.rows} x {tile.keys}; registers {registers.origin}{spilled}{note}"


def kernel_tiling(phase: Phase, fields: GroupFields, device: DeviceSpec, down: int = 0) -> tuple[SmTiling, str]:
    """Return how warps execute a compiled phase that is no attention, and a note: how many blocks a core holds.

    ``down``: warps down the rows of its product; 0: as many as across, as nobody says.  Raises as `group_tiling`.
    """
    issue = warp_issue(device)
    product_stage = next((s.rows[0] for s in phase.stages if s.is_product), None)
    stages = 1 if issue.copies.value == "staged" else fields.stages or 1
    work, groups, shared, count = GroupWork(fields.warps), 1, 0, UNNAMED_REGISTERS
    if product_stage is not None:
        left, result = (phase.names[n] for n in (product_stage.srcs[0], product_stage.dst))
        (m, k), n = (phase.sizes[a] for a in left.axes), phase.sizes[result.axes[1]]
        down = down or 1 << (fields.warps.bit_length() - 1) // 2
        engine = engine_of(device, TENSOR, GroupMatrixEngine)
        is_wgmma = engine.wgmma is not None and m >= GROUP_ROWS and down >= GROUP_WARPS
        if is_wgmma and down == fields.warps:
            work, groups = GroupWork(GROUP_WARPS), down // GROUP_WARPS
        else:
            across = fields.warps // down
            work = GroupWork(fields.warps, across=across, generation="wgmma" if is_wgmma else "mma")
            if not is_wgmma:  # a warp of each sub-core: those of other rows go on by themselves
                groups = max(1, min(down, fields.warps // GROUP_WARPS))
                work = replace(work, warps=fields.warps // groups)
        shared = (m + n) * k * get_format(left.fmt).size_bytes * max(1, stages - (not is_wgmma))
        count = m * n // (fields.warps * WARP_LANES) + UNNAMED_REGISTERS
    registers = Registers.estimated(count, issue.thread_registers_count.value, shared)
    if fields.registers is not None:
        spilled = fields.spilled_registers or 0
        registers = Registers(fields.registers, spilled, fields.shared_bytes or 0, "as given", _accesses(fields))
    size = "x".join(str(phase.sizes[a]) for a in dict.fromkeys(a for a, *_ in phase.cells[0].spans))
    tiling, room = _resident(phase, fields, device, registers, (size, stages if phase.loop_axis else 0, groups), work)
    note = f", {registers.spilled} spilled" if registers.spilled else ""
    return replace(tiling, depth=max(1, stages - 1)), f"{room}; tiles of {size}; registers {registers.origin}{note}"


def rows_tiling(phase: Phase, fields: GpuRowsFields, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return how warps execute rows that no product is beside, and a note: how many blocks a core holds."""
    size = prod(phase.sizes.values())
    warps = fields.warps or next((n for least, n in ROWS_WARPS if size >= least), GROUP_WARPS)
    return kernel_tiling(phase, GroupFields(warps=warps, stages=None), device)


def _resident(
    phase: Phase, fields: GroupFields, device: DeviceSpec, registers: Registers, shape: BlockShape, work: GroupWork
) -> tuple[SmTiling, Occupancy]:
    """Return the tiling of a block, and how many of it a core holds."""
    issue, (size, stages, groups) = warp_issue(device), shape
    most, overhead = issue.thread_registers_count.value, issue.overhead_registers_count.value
    count = registers.count + registers.spilled
    if count > MOST_REGISTERS * most:
        raise BufferOverflowError(
            f"registers: {count} a thread for {size} with {fields.warps} warps, "
            f"{most} there, at most {MOST_REGISTERS * most} with those spilled; smaller tiles or more warps take fewer"
        )
    held = {"tile": max(0, min(most, registers.count) - overhead)}
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    room = occupancy(issue, memory, fields.warps, held, {"tiles": registers.shared_bytes})
    if fields.residents and fields.residents > room.blocks:
        raise TilingError(f"residents: {fields.residents} blocks, but {room}")
    blocks = min(fields.residents or room.blocks, ceil_div(len(phase.cells), device.group_count.value))
    spilled_bytes, far = round(REGISTER_BYTES * registers.accesses * WARP_LANES * work.warps), 0.0
    local = device.core(SM).engines.get(SPILL)
    if registers.spilled and isinstance(local, LocalMemoryPipe):
        # A frame is as large as what is spilled in all, though an iteration may not touch all of it.
        frames = REGISTER_BYTES * max(registers.spilled, registers.accesses / 2) * WARP_LANES * fields.warps * blocks
        # Shared memory is carved out for as many blocks as fit, whether or not there are as many.
        reserved = issue.reserved_bytes.value if issue.reserved_bytes else 0
        far = local.missing(frames, local.beside(room.limits["registers"], room.shared_bytes + reserved))
    tiling = SmTiling(
        groups=groups,
        residents=blocks,
        work=work,
        stages=stages,
        spilled_bytes=round(spilled_bytes * (1 - far)),
        far_bytes=round(spilled_bytes * far),
        occupied=room.occupied(blocks),
    )
    return tiling, room


def fetched_code(
    phase: Phase, tile: BlockTile, residents: int, code: CodeSpec, cores: int
) -> tuple[tuple[str, float], ...]:
    """Return the instructions around its loop that a block of FlashAttention-2 waits for, by what each takes.

    None where the cache next to the warps holds all, nor where wave after wave of blocks that are all alike walk
    through the code together.  Blocks of several lengths are out of step: one's walk evicts a long loop of another.
    """
    dim, ragged = max(tile.head_dim, tile.value_dim), is_ragged(phase)
    loop, around = fa2_instructions(dim, tile.rows, tile.keys, causal=tile.causal, is_ragged=ragged)
    if loop + around <= code.cached_count.value:
        return ()
    counts = [sum(ceil_div(r.cols, tile.keys) for r in b.runs) for b in phase.cells]
    # Blocks of one wave start together, and parts of cut keys pass over some of the code.
    if residents == 1 or len(counts) <= residents * cores or fa2_cuts(dim, tile.rows, tile.keys):
        return (("fetch_cycles", around),)
    if len(set(counts)) == 1:
        return ()
    if loop + around > code.far_count.value:
        return (("far_cycles", around),)
    if loop <= code.loop_count.value:
        return (("fetch_cycles", around),)
    # Tiles that are masked one by one come before the loop (flash_fwd_kernel.h, n_masking_steps).
    masked = ceil_div(tile.rows, tile.keys) + ragged if tile.causal else 1
    looped = loop * max(0.0, sum(counts) / len(counts) - masked)
    return ("fetch_cycles", around), ("crowded_cycles", around * around / (around + looped))


def is_ragged(phase: Phase) -> bool:
    """Return whether rows or keys are no multiple of a tile, so that a kernel has to look where they end."""
    rows, keys = phase.sizes[phase.row_axis], phase.sizes[phase.loop_axis]
    return any(b.rows % rows or any(r.cols % keys for r in b.runs) for b in phase.cells)


def layout_of(tile: BlockTile, engine: GroupMatrixEngine, *, is_cutlass: bool = False) -> tuple[GroupWork, int]:
    """Return how a group of warps executes the block, and how many groups there are.

    ``is_cutlass``: warps have 32 rows each, not as few as can be.
    """
    warps = tile.warps
    if not tile.stages:  # a library's kernel: warps down the rows, products of single warps
        return GroupWork(warps, generation="mma"), 1
    if tile.rows < GROUP_ROWS or engine.wgmma is None or warps < GROUP_WARPS:
        each = CUTLASS_ROWS if is_cutlass else FRAGMENT_ROWS
        down = min(warps, tile.rows // each) if tile.rows >= GROUP_ROWS else 1
        return GroupWork(warps, across=warps // down, generation="mma"), 1
    groups = warps // GROUP_WARPS
    is_repeated = groups > 1 and tile.rows < GROUP_ROWS * groups
    work = GroupWork(warps, repeats=groups) if is_repeated else GroupWork(GROUP_WARPS)
    return replace(work, is_serial=_is_serial(tile, work)), 1 if is_repeated else groups


def _is_serial(tile: BlockTile, work: GroupWork) -> bool:
    """Return whether ptxas waits for every product: S and O do not fit beside each other (hopper.md section 2)."""
    scores, output = tile.elements(work)
    # Registers of 4 bytes, as hopper.md section 2 has the rule.
    most, large, eight, wide = 192, 128, 8, 32
    if tile.is_awaited:
        return False
    total = scores + output
    if tile.size_bytes == 1:
        return total > most if tile.stages == 1 else tile.keys > wide or tile.warps == eight
    return total > most or (total == most and scores >= large and tile.stages > 1)


def registers_of(tile: BlockTile, fields: GroupFields, architecture: str, most: int, work: GroupWork) -> Registers:
    """Return registers, spills and shared memory: the fields', else a compiler's, else estimated.

    ``architecture`` is that for which a compiler's are listed, ``most`` the registers that a thread can address.
    """
    shared = xformers_shared(tile) if fields.kernel == XFORMERS else estimated_shared(tile, work)
    shape = tile.dtype, tile.head_dim, tile.causal, tile.rows, tile.keys, tile.stages, tile.warps
    kernels = tile.kernel, f"{tile.kernel}_{'fresh' if tile.is_awaited else 'chained'}"
    rows = (
        r for kernel in kernels if not tile.stored_bytes and (r := compiled_registers(architecture, kernel, *shape))
    )
    row = next(rows, None)
    if fields.registers is not None:
        count, spilled = fields.registers, fields.spilled_registers or 0
        shared = shared if fields.shared_bytes is None else fields.shared_bytes
        is_listed = row is not None and row[:2] == (count, spilled) and fields.spilled_accesses is None
        accesses = row[-1] if row is not None and is_listed else _accesses(fields)
        return Registers(count, spilled, shared, "as given", accesses)
    if not tile.stages:
        return Registers(most, 0, shared, "of a library's kernel: all there are")
    if row is not None:
        count, spilled, shared, accesses = row
        return Registers(count, spilled, shared, "of the compiler's table", accesses)
    return Registers.estimated(estimated_registers(tile, work), most, shared)


def _accesses(fields: GroupFields) -> float:
    """Return the accesses of an iteration to registers that are spilled as given."""
    return (
        SPILL_ACCESSES * (fields.spilled_registers or 0) if fields.spilled_accesses is None else fields.spilled_accesses
    )


def estimated_registers(tile: BlockTile, work: GroupWork) -> int:
    """Return the registers of a lane that Triton's kernels take (hopper.md section 2: median error 4, worst 34)."""
    scores, output = tile.elements(work)
    down = max(1, tile.warps // (work.across * work.repeats))
    rows = 2 * max(1, tile.rows // (FRAGMENT_ROWS * down))
    # A warp copies 512 bytes at once.
    copies = (
        (tile.head_dim + (0 if tile.is_viewed else tile.value_dim)) * tile.keys * tile.size_bytes / (512 * tile.warps)
    )
    is_staged = tile.stages == 1
    # Coefficients of hopper.md section 2, "Registers".
    if work.generation == "mma":
        # As above.
        return round(2 + 1.8 * scores + 1.4 * output + 9.3 * rows + (1.2 * copies if is_staged else 0))
    # As above.
    return round(22 + 1.2 * scores + output + 3 * rows + (2.4 if is_staged else 1.1) * copies)


def estimated_shared(tile: BlockTile, work: GroupWork) -> int:
    """Return the shared memory of a block, exact for Triton's flash (hopper.md section 2)."""
    values = 0 if tile.is_viewed else tile.value_dim
    sizes = tile.rows * tile.head_dim, tile.keys * tile.head_dim, tile.keys * values
    q, k, v = (n * tile.size_bytes for n in sizes)
    out = tile.rows * tile.value_dim * get_format(tile.output).size_bytes
    is_wgmma = work.generation == "wgmma"
    if tile.stored_bytes:  # of what products read a tile lies beside the copies, or in fragments
        q += k + v if is_wgmma else 0
        k, v = (n // tile.size_bytes * tile.stored_bytes for n in (k, v))
    if not tile.stages:
        return max(q + k * tile.depth + v, out)
    # Fragments of S are those of P: where no other warp has columns of its rows, P stays in registers.
    p = 0 if is_wgmma or work.across == 1 else tile.rows * tile.keys * tile.size_bytes
    if tile.stages == 1:
        return max(q + max(k, v) + p, out)
    return max(q + (k + v) * (tile.stages - (0 if is_wgmma else 1)) + p, out)


def xformers_shared(tile: BlockTile) -> int:
    """Return the shared memory of xformers' block: two slices of Q and K, then P beside two of V."""
    slices, half = 2 * int(XFORMERS_COUNTS["slice_elements"]), tile.size_bytes
    return half * max(slices * (tile.rows + tile.keys), tile.rows * tile.keys + slices * tile.keys)


def plain_tiling(device: DeviceSpec) -> SmTiling:
    """Return the tiling of a phase that no attention is: blocks of one warp a sub-core, half a core's warps in all."""
    issue = warp_issue(device)
    warps = issue.subcores_count.value
    return SmTiling(residents=issue.warps_count.value // (2 * warps), work=GroupWork(warps))


def one_shot_tiling(phase: Phase, device: DeviceSpec) -> SmTiling:
    """Return the tiling of blocks that load, multiply and store once: resident as far as registers and memory reach."""
    plain, issue, names = plain_tiling(device), warp_issue(device), phase.names
    products = [s.rows[0] for s in phase.stages if s.is_product]
    if not products:
        return plain
    count = {n: prod(phase.sizes[a] for a in names[n].axes) for n in (*products[0].srcs, products[0].dst)}
    *staged, results = count.values()
    size, warps = get_format(names[products[0].srcs[0]].fmt).size_bytes, issue.subcores_count.value
    most = max(sum(staged) * size // REGISTER_BYTES, results) / (WARP_LANES * warps)
    registers = min(issue.thread_registers_count.value, round(ONE_SHOT_REGISTERS + ONE_SHOT_FACTOR * most))
    held = {"tile": max(0, registers - issue.overhead_registers_count.value)}
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    room = occupancy(issue, memory, warps, held, {"tiles": sum(staged) * size})
    return replace(plain, residents=room.blocks, occupied=room.occupied(room.blocks))


def _unrolled(phase: Phase, tiling: SmTiling) -> SmTiling:
    """Return the tiling of a loop without products as a compiler unrolls it: the loads of many tiles under way."""
    assert tiling.work is not None
    read = {n for loop in phase.loops if loop.axis for s in loop.stages for n in s.read if n in phase.tensors}
    sizes = [prod(phase.sizes[a] for a in phase.names[n].axes) for n in read]
    most = UNROLLED_REGISTERS * WARP_LANES * tiling.work.warps // max(sizes, default=1)
    return replace(tiling, loaded_tiles=max(tiling.loaded_tiles, min(UNROLLED_TILES, most)))


def operator_tiling(device: DeviceSpec, phase: Phase) -> SmTiling:
    """Return how an operator over a matrix is executed.

    ``copy`` reads and writes as fast as memory lets it; ``add`` reads a second matrix that all heads share, element by
    element; ``softmax`` works on whole rows.
    """
    assert phase.operator is not None
    (operator, masked), columns = phase.operator, phase.sizes[phase.loop_axis]
    tiling, issue = plain_tiling(device), warp_issue(device)
    if operator == "copy":
        return tiling
    if issue.library is None:
        raise SpecError(f"{device.name}: cores.{SM}.engines.{WARPS}.library: missing; {operator} needs it")
    if operator == "add":
        cycles, constant = issue.library.add_cycles.value, "add_cycles"
    else:
        cycles = issue.library.softmax_cycles(columns) + masked * issue.library.masked_cycles.value
        constant = f"softmax.{min(issue.library.softmax, key=lambda n: abs(int(n) - columns))}.row_cycles"
    assert tiling.work is not None
    return replace(tiling, work=replace(tiling.work, element_cycles=cycles, constant=constant))


class GpuRowsFields(Tiling):
    """What a block of norms and activations works on, and its warps."""

    elements: int = Field(default=4096, ge=256, description="of a block; one row at least where rows are summed up")
    warps: int | None = Field(
        default=None,
        ge=4,
        le=32,
        multiple_of=4,
        description="of a block; default: 4, from 2,048 elements on 8, from 8,192 on 16, from 32,768 on 32",
    )


class GpuGemmFields(Tiling):
    """Tile of C and the piece of k on a GPU; what is left open is what a library would choose."""

    block_m: int | None = Field(default=None, ge=64, le=256, multiple_of=64, description="rows of a tile of C")
    block_n: int | None = Field(default=None, ge=16, le=256, multiple_of=16, description="columns of a tile of C")
    block_k: int = Field(default=64, ge=16, le=256, multiple_of=16, description="piece of k loaded at once")
    splits: int | None = Field(default=None, ge=1, le=64, description="blocks that share the k of a tile")
    stages: int = Field(default=3, ge=1, le=8, description="pieces of k in shared memory")


#: Tiles and splits that a library has, and what a wave of them costs (hopper.md section 3.12): over the tensor
#: cores' own time, and cycles of its start and end.
ROWS, COLUMNS, SPLITS = (64, 128), (32, 64, 128, 192, 256), (1, 2, 4, 8)
WAVE_FACTOR, WAVE_CYCLES = 1.15, 5000.0  # hopper.md section 3.12
#: Stages that cuBLAS's kernels have where one block fills a core (nvjet's names, tests/silicon/products.json).
MOST_STAGES = 16
#: Cycles of a launch behind another, and bytes a cycle of memory (hopper.md section 1: 3.1 us, 4.27 TB/s, 1.98 GHz).
SPLIT_CYCLES, PART_BYTES = 6100.0, 2157.0
#: Rows of what asynchronous copies move are multiples of it (CUDA C++ Programming Guide, asynchronous copies).
ALIGNED_BYTES = 16


def library_tile(
    m: int, n: int, k: int, cores: int, tiling: GpuGemmFields, heads: int, edges: int, area: int | None
) -> tuple[int, int, int]:
    """Return rows, columns and splits with the least waves' time among a library's; fields that are given stay.

    ``edges``: rows and columns together that fit a core's shared memory, ``area``: elements that fit its registers;
    None, or where no choice fits: all are tried.
    """
    moved = heads * (m * k + k * n + m * n) * 2

    def time(choice: tuple[int, int, int]) -> tuple[float, int]:
        rows, columns, splits = choice
        waves = ceil_div(heads * ceil_div(m, rows) * ceil_div(n, columns) * splits, cores)
        # A product of 64 x N x 16 takes N / 2 cycles, its operands come at 64 bytes a cycle (hopper.md section 1).
        busy = ceil_div(k, 16 * splits) * max(columns / 2 * rows / 64, (rows + columns) / 2)
        # Parts are written and read again, in float32, by a kernel more.
        parts = SPLIT_CYCLES + heads * m * n * 4 * (splits + 1) / PART_BYTES if splits > 1 else 0.0
        # None is faster than memory: where several are as fast as it, nothing is split.
        return max(waves * (busy * WAVE_FACTOR + WAVE_CYCLES), moved / PART_BYTES) + parts, -rows * columns

    rows, columns, splits = (
        (value,) if value else choices
        for value, choices in zip((tiling.block_m, tiling.block_n, tiling.splits), (ROWS, COLUMNS, SPLITS), strict=True)
    )
    choices = list(product(rows, columns, splits))
    fitting = [c for c in choices if c[0] + c[1] <= edges and (area is None or c[0] * c[1] <= area)]
    best: tuple[int, int, int] = min(fitting or choices, key=time)
    return best


def library_tiling(
    a: GlobalTensor, b: GlobalTensor, c: GlobalTensor, fields: GpuGemmFields, device: DeviceSpec
) -> tuple[tuple[int, int, int], int, SmTiling]:
    """Return the tile (m, n, k) in which a library multiplies, its splits of k, and how warps execute it.

    A warp group for 64 rows, copies by warps of their own.
    """
    size, issue = get_format(a.fmt).size_bytes, warp_issue(device)
    is_staged = issue.copies.value == "staged"
    if is_staged:  # cuBLAS's before sm_80: two stages of 32, through registers (CUTLASS, default_gemm_configuration.h)
        sizes = {"block_k": 32, "stages": 2}
        fields = fields.model_copy(update={n: v for n, v in sizes.items() if n not in fields.model_fields_set})
    stages = fields.stages
    edges = issue.block_memory_bytes.value // (stages * fields.block_k * size)
    heads, cores = c.batch * c.heads, device.group_count.value
    # Two blocks, of which one multiplies while the other loads or stores; accumulators have half of their registers.
    area = issue.registers_count.value // 4 if is_staged else None
    m, n, splits = library_tile(c.rows, c.cols, a.cols, cores, fields, heads, edges, area)
    k = fields.block_k
    is_one_wave = heads * ceil_div(c.rows, m) * ceil_div(c.cols, n) * splits <= cores
    if is_one_wave and not is_staged and "stages" not in fields.model_fields_set:
        stages = max(stages, min(MOST_STAGES, issue.block_memory_bytes.value // ((m + n) * k * size)))
    shared, memory = stages * (m + n) * k * size, device.core(SM).buffer("SMEM").capacity_bytes.value
    most = min(issue.block_memory_bytes.value, memory)
    if shared > most:
        raise BufferOverflowError(
            f"shared memory: {stages} stages of {m}x{k} and {k}x{n} = {format_bytes(shared)} > {format_bytes(most)}"
        )
    engine = engine_of(device, TENSOR, GroupMatrixEngine)
    generation: Literal["mma", "wgmma"] = "mma" if engine.wgmma is None else "wgmma"
    work = GroupWork(GROUP_WARPS, across=2 if is_staged else 1, generation=generation, is_specialised=True)
    is_aligned = not any(t.cols * get_format(t.fmt).size_bytes % ALIGNED_BYTES for t in (a, b, c))
    if not is_aligned and issue.library is not None:
        work = replace(
            work,
            product_cycles=issue.library.unaligned_product_cycles.value,
            element_cycles=issue.library.unaligned_store_cycles.value,
            constant="unaligned_store_cycles",
        )
    groups = max(1, m // GROUP_ROWS)
    registers = m * n // (groups * GROUP_WARPS * WARP_LANES) + UNNAMED_REGISTERS
    of_block, there = registers * groups * GROUP_WARPS * WARP_LANES, issue.registers_count.value
    blocks = max(1, min(memory // shared, there // of_block))
    held = {RF: (REGISTER_BYTES * blocks * of_block, REGISTER_BYTES * there), SMEM: (blocks * shared, memory)}
    return (m, n, k), splits, SmTiling(groups, blocks, depth=stages, work=work, is_one_wave=is_one_wave, occupied=held)
