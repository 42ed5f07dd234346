"""Warp groups of a block in a compiler's layout, the registers and shared memory of the block, and the number of such
blocks that fit on a core.

The layout is that of Triton's code for attention (hopper.md section 2): 64 or more rows use products of warp groups,
and fewer rows use adjacent products of single warps along the columns; eight warps on 64 rows compute S twice.
Registers and spills are inputs if a compiler reported them, otherwise estimated.  For a library's kernels: matrix
products with the library's tiles and splits of k, and a framework's operators between them.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

from npusim.config.core_units import GroupMatrixEngine, LocalMemoryPipe
from npusim.config.device_tables import ESTIMATED, compiled_registers, recurrence_registers
from npusim.config.family import registered
from npusim.config.tiling import Field, Tiling, power_of_two
from npusim.errors import BufferOverflowError, SpecError, TilingError
from npusim.formats import get_format, stored_format
from npusim.formats.layout.fragment import WARP_LANES
from npusim.kernels.form.flow import views
from npusim.kernels.form.phase import Stacked
from npusim.late_methods import dataclass
from npusim.machines.decisions import Charge, Generation, GpuDecisions
from npusim.machines.frame import attention_products
from npusim.machines.published_kernel import GpuKernel, KernelUse
from npusim.machines.published_kernels import find_kernel
from npusim.machines.sm import library_products
from npusim.machines.sm.core import (
    BEYOND,
    LIBRARY,
    REGISTER_BYTES,
    RF,
    SM,
    SMEM,
    SPILL,
    START,
    STEP,
    TENSOR,
    WARPS,
    GroupFields,
    SmTiling,
    barriers,
    code_architecture,
    engine_of,
    occupancy,
    warp_issue,
)
from npusim.machines.sm.group_cost import FRAGMENT_COLUMNS, FRAGMENT_ROWS, GROUP_ROWS, GROUP_WARPS, find_constant
from npusim.machines.sm.live_registers import BESIDE, has_more, live_registers, staged_bytes
from npusim.program.ir.tile import GlobalTensor
from npusim.program.ir.tile_program import Occupancy
from npusim.units import ceil_div, format_bytes, round_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.kernels.form.phase import Instruction, Phase, WorkTile


#: Number of levels of loads, if a loop loads the places of operands: first the places, then the operands.
LEVELS = 2
#: Largest number of registers of a lane, relative to the number that it can address; a tile that needs more is refused,
#: because no measured tile does.
MOST_REGISTERS = 8
#: Number of registers of a lane in addition to accumulators if no compiler was run: addresses and operands.
UNNAMED_REGISTERS = 64
#: Number of registers that an iteration stores to local memory and loads again, divided by the number of spilled
#: registers, if no compiler was run: the median of the compiled kernels (hwconfigs/sm_90_registers.csv).
SPILL_ACCESSES = 1.84
#: Registers of a lane in a block that multiplies once: a constant, and a factor of the registers of its operands or its
#: result; the error is at most 24 for six such kernels (reports/silicon/products.json), within 6 for most.
ONE_SHOT_REGISTERS, ONE_SHOT_FACTOR = 22, 1.2
#: Number of registers of a lane above which two accumulators do not fit together (hopper.md section 2).
SERIAL_REGISTERS = 192
#: Number of tiles in flight in an unrolled loop without products, and the registers of a lane that they may use.
UNROLLED_TILES, UNROLLED_REGISTERS = 4, 64
#: Warps of a block of FlashAttention-2's kernel that converts dQ, and the bytes that a lane loads before it adds them:
#: 32 of the kernel's 48 registers have sums (reports/recurrences/h200_backward.csv).  One head of 8,192 tokens, whose
#: blocks are alone on their multiprocessors, takes 3.44 us for each of 132 sums on an H100: 8 accesses of 430 ns
#: (reports/recurrences/deterministic.csv).
SUM_WARPS, ACCESS_BYTES = 8, 16
#: How operators of eager PyTorch access memory (library/operator.py): the warps of a block, as in torch's kernels, and
#: the cost of a thread's computation for each access, as a device file's key below `LIBRARY`.
ACCESSES: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "vectors": (4, ""),
        "indexed": (4, "index"),
        "pairs": (4, "index"),
        "joined": (16, "join"),
        "rows": (16, "sum_cycles"),
    }
)
#: The kind of instructions that compute an index.
INDEX = "FMA.ops.mul"
#: Costs of an index, keys of a device file.
COMPUTED = "instructions_count", "wait_cycles"
#: Lengths of a row, in elements, and the number of warps that a block has above each length.  source:
#: unsloth/kernels/utils.py, calculate_settings
ROWS_WARPS = ((32768, 32), (8192, 16), (2048, 8))


@dataclass(frozen=True, slots=True)
class BlockTile:
    """Properties that determine the block of an attention: sizes, formats, and the kernel, with its warps and stages.

    ``is_awaited``: the result of P V is used immediately.  ``stages`` 0: a library's kernel.  ``stored_bytes``: bytes
    of an element of K and V where products read another format; 0: the same format.  ``is_viewed``: V is a part of K's
    tile.
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
        """Return the block of an attention's phase; ``products`` are the first and the last product of the phase."""
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
            max((stored_format(names[n].fmt).size_bytes for n in made_of if len(names[n].axes) > 1), default=0),
            last.srcs[1] in views(phase, phase.loop_axis),
        )

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of some elements of Q, K and V, including their scales."""
        return stored_format(self.dtype).bytes_of(elements)

    @property
    def depth(self) -> int:
        """Number of tiles of each operand of the loop in shared memory; two of K if a library needs no tile for V
        (FlashMLA).
        """
        return max(1, self.stages - 1) if self.stages or not self.is_viewed else 2

    def elements(self, decided: GpuDecisions) -> tuple[float, float]:
        """Return the number of elements of S and of O in a thread."""
        threads, across = WARP_LANES * self.warps, decided.across * FRAGMENT_COLUMNS
        scores, output = max(across, self.keys) * decided.repeats, max(across, self.value_dim)
        return self.rows * scores / threads, self.rows * output / threads


@dataclass(frozen=True, slots=True)
class Registers:
    """Registers of a lane, spilled registers, shared memory of a block, and the source of these numbers; number of
    accesses of an iteration to spilled registers.
    """

    count: int
    spilled: int
    shared_bytes: int
    origin: str
    accesses: float = 0.0

    @classmethod
    def estimated(cls, count: int, most: int, shared_bytes: int) -> Registers:
        """Return an estimate of registers, limited to the number that a lane can address."""
        spilled = max(0, count - most)
        return cls(min(most, count), spilled, shared_bytes, ESTIMATED, SPILL_ACCESSES * spilled)


def group_tiling(kernel: str, phase: Phase, fields: GroupFields, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return how warp groups execute a phase, and a note on the number of blocks that a core holds, with the limiting
    resource.

    ``kernel`` is the name under which a compiler's registers are listed; ``fields.stages`` none: a library's kernel.
    Raises `TilingError` (or its ``BufferOverflowError``) if a block does not fit; the message states by how much.
    """
    products, note = attention_products(phase), ""
    published: GpuKernel | None = fields.published
    if has_more(phase):
        return _live_tiling(phase, fields, device)
    if products is None and phase.sums and not fields.stages and (published is None or published.sum_block):
        return _summing(phase, device, published), ""
    if products is None:
        plain, merge = one_shot_tiling(phase, device), () if published is None else published.merge_charges
        if merge and all(find_constant(device, charge.key) for charge in merge):
            return _paying(plain, *merge), ""
        return _unrolled(phase, plain), ""
    issue, engine = warp_issue(device), engine_of(device, TENSOR, GroupMatrixEngine)
    if issue.copies.value == "staged" and (fields.stages or 1) > 1:
        if "stages" in fields.model_fields_set:
            raise TilingError(
                f"stages: {fields.stages} tiles in flight need asynchronous copies, which {device.name} does not have: "
                "its tiles go through registers; use 1"
            )
        fields, note = fields.model_copy(update={"stages": 1}), "; 1 stage, as the device has no asynchronous copies"
    fields, awaits_places = with_places(phase, fields)
    tile, decided = BlockTile.of(kernel, phase, products, fields), decisions_of(published)
    decided = decided._replace(awaits_places=awaits_places)
    if decided.is_whole:
        tile = replace(tile, rows=phase.sizes[phase.row_axis], keys=phase.sizes[phase.loop_axis])
    decided = layout_of(tile, engine, decided)
    slices = decided.slice_elements
    shared = sliced_shared(tile, slices) if slices else estimated_shared(tile, decided)
    chip = code_architecture(device.architecture)
    registers = registers_of(tile, fields, chip, issue.thread_registers_count.value, decided, shared)
    tiling, room = _resident(phase, fields, device, registers, f"{tile.rows}x{tile.keys}", decided)
    use = KernelUse(phase, device, tile.rows, tile.keys, tile.head_dim, tile.value_dim, tiling.residents)
    paid = published.paid(use) if published else () if tile.stages else usual_charges(use)
    widths = {phase.loop_axis: tile.keys}
    if slices:  # tiles of the output are as wide as those of scores
        widths[phase.names[products[1].dst].axes[1]] = round_up(tile.value_dim, tile.keys)
    tiling = _paying(replace(tiling, widths=widths), *paid)
    spilled = f", {registers.spilled} spilled" if registers.spilled else ""
    return tiling, f"{room}; tiles of {tile.rows} x {tile.keys}; registers {registers.origin}{spilled}{note}"


def with_places(phase: Phase, fields: GroupFields) -> tuple[GroupFields, bool]:
    """Return the fields with the number of stages that remain for operands whose places the loop loads, and whether the
    loads of these operands wait for their places.

    Triton gives each level of loads an equal part of the stages beyond the first, and loads the places without a
    pipeline if no stage remains for them (AssignLatencies.cpp; TTGIR of SGLang's grouped decode with 1, 2 and 3
    stages).
    """
    if not phase.looked_up or not fields.stages:
        return fields, False
    if fields.stages < 1 + LEVELS:
        return fields, True
    return fields.model_copy(update={"stages": 1 + (fields.stages - 1) // LEVELS}), False


def usual_charges(use: KernelUse) -> tuple[Charge, ...]:
    """Return the charges of the family's usual kernel, which also apply to a kernel without a name; none if there is no
    usual kernel.
    """
    usual = find_kernel(GpuKernel, registered(use.device.family).usual)
    return () if usual is None else tuple(usual.charges(use))


def decisions_of(kernel: GpuKernel | None) -> GpuDecisions:
    """Return the decisions of a published kernel; for None, the decisions of a kernel that its tile determines
    completely.
    """
    return GpuDecisions() if kernel is None else kernel.decides


def _paying(tiling: SmTiling, *charges: Charge) -> SmTiling:
    """Return the tiling with further charges."""
    decided = tiling.decided
    return replace(tiling, decided=decided._replace(charges=decided.charges + charges))


def _live_tiling(phase: Phase, fields: GroupFields, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return how warp groups execute a loop with more products than that of an attention, and a note.

    The values that are alive at one time determine registers, and thus whether ptxas waits for every product.
    """
    issue, engine = warp_issue(device), engine_of(device, TENSOR, GroupMatrixEngine)
    is_staged, most = issue.copies.value == "staged", issue.thread_registers_count.value
    stages = fields.stages and (1 if is_staged else fields.stages)
    rows, keys = phase.sizes[phase.row_axis], phase.sizes[phase.loop_axis]
    fmt = phase.names[next(s for s in phase.stages if s.is_product).rows[0].srcs[0]].fmt
    tile = BlockTile("", fmt, rows, keys, 0, 0, bool(phase.masks), True, fmt, fields.warps, stages or 0)
    decided = layout_of(tile, engine, GpuDecisions())
    if not stages:  # warps for which no fragment of rows remains are placed along the columns
        decided = decided._replace(across=fields.warps // min(fields.warps, max(1, rows // FRAGMENT_ROWS)))
    is_wgmma = decided.generation == "wgmma"
    live = live_registers(phase, fields.warps, decided)
    decided = decided._replace(is_serial=is_wgmma and live > SERIAL_REGISTERS)
    shared = staged_bytes(phase, max(1, (stages or 1) - (not is_wgmma)), leaves=not is_wgmma and decided.across > 1)
    registers = Registers.estimated(live + BESIDE[decided.generation], most, shared)
    if fields.registers is not None:
        shared = shared if fields.shared_bytes is None else fields.shared_bytes
        given = fields.registers, fields.spilled_registers or 0
        registers = Registers(*given, shared, "as given", _accesses(fields))
    elif not stages:
        registers = Registers(most, 0, shared, "of a library's kernel, which uses all of them")
    tiling, room = _resident(phase, fields, device, registers, f"{rows}x{keys}", decided)
    spilled = f", {registers.spilled} spilled" if registers.spilled else ""
    note = f"{room}; tiles of {rows} x {keys}; {live} registers alive, {registers.origin}{spilled}"
    return replace(tiling, widths={phase.loop_axis: keys}), note


def kernel_tiling(
    phase: Phase, fields: GroupFields, device: DeviceSpec, down: int = 0, called: str = ""
) -> tuple[SmTiling, str]:
    """Return how warps execute a compiled phase other than attention, and a note on the number of blocks that a core
    holds.

    ``down``: number of warps down the rows of its product; 0 if unknown, which stands for the number of warps across.
    ``called``: the schedule under which a compiler's registers are listed.  Raises errors as `group_tiling` does.
    """
    issue = warp_issue(device)
    product_stage = next((s.rows[0] for s in phase.stages if s.is_product), None)
    stages = 1 if issue.copies.value == "staged" else fields.stages or 1
    decided, shared, count = GpuDecisions(warps=fields.warps), 0, UNNAMED_REGISTERS
    if product_stage is not None:
        left, result = (phase.names[n] for n in (product_stage.srcs[0], product_stage.dst))
        (m, k), n = (phase.sizes[a] for a in left.axes), phase.sizes[result.axes[1]]
        if down and left.axes[0] != result.axes[0]:  # stored as the transpose
            m, k = k, m
        down = down or 1 << (fields.warps.bit_length() - 1) // 2
        engine = engine_of(device, TENSOR, GroupMatrixEngine)
        is_wgmma = engine.wgmma is not None and m >= GROUP_ROWS and down >= GROUP_WARPS
        if is_wgmma and down == fields.warps:
            decided = decided._replace(groups=down // GROUP_WARPS, warps=GROUP_WARPS)
        elif is_wgmma:
            decided = decided._replace(across=fields.warps // down)
        else:  # one warp on each sub-core, because warps of other rows continue independently
            groups = max(1, min(down, fields.warps // GROUP_WARPS))
            decided = GpuDecisions(groups, fields.warps // groups, across=fields.warps // down, generation="mma")
        shared = (m + n) * stored_format(left.fmt).bytes_of(k) * max(1, stages - (not is_wgmma))
        count = m * n // (fields.warps * WARP_LANES) + UNNAMED_REGISTERS
    registers = Registers.estimated(count, issue.thread_registers_count.value, shared)
    if fields.registers is not None:
        spilled = fields.spilled_registers or 0
        registers = Registers(fields.registers, spilled, fields.shared_bytes or 0, "as given", _accesses(fields))
    elif (listed := _listed(called, phase, fields, code_architecture(device.architecture))) is not None:
        registers = Registers(*listed, "from the compiler's table", SPILL_ACCESSES * listed[1])
    places = {x.axis for x in phase.tensors.values() if isinstance(x, Stacked)}  # axes that a tile does not have
    size = "x".join(str(phase.sizes[a]) for a in dict.fromkeys(a for a, *_ in phase.cells[0].spans) if a not in places)
    if phase.loop_axis:  # without a loop, nothing is loaded in advance
        decided = decided._replace(stages=stages, depth=max(1, stages - 1))
    tiling, room = _resident(phase, fields, device, registers, size, decided)
    note = f", {registers.spilled} spilled" if registers.spilled else ""
    return tiling, f"{room}; tiles of {size}; registers {registers.origin}{note}"


def _listed(called: str, phase: Phase, fields: GroupFields, architecture: str) -> tuple[int, int, int] | None:
    """Return a compiler's registers, spills and shared memory for a recurrence's kernel, if they are listed."""
    token, key, value = (phase.sizes.get(axis, 0) for axis in ("token", "key", "value"))
    product = next((s.rows[0] for s in phase.stages if s.is_product), None)
    if product is None:
        return None
    of = phase.name, phase.names[product.srcs[0]].fmt, (token, key, value)
    return recurrence_registers(architecture, called, *of, fields.warps, fields.stages or 1)


def rows_tiling(phase: Phase, fields: GpuRowsFields, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return how warps execute rows without products, and a note on the number of blocks that a core holds."""
    size = prod(phase.sizes.values())
    warps = fields.warps or next((n for least, n in ROWS_WARPS if size >= least), GROUP_WARPS)
    tiling, note = kernel_tiling(phase, GroupFields(warps=warps, stages=None), device)
    return replace(tiling, has_own_rows=True), note


def _resident(
    phase: Phase, fields: GroupFields, device: DeviceSpec, registers: Registers, size: str, decided: GpuDecisions
) -> tuple[SmTiling, Occupancy]:
    """Return the tiling of a block, and the number of such blocks on a core; ``size``: the block's tile in words."""
    issue = warp_issue(device)
    subcores = issue.subcores_count.value
    if fields.warps > subcores and fields.warps % subcores and any(s.is_product for s in phase.stages):
        raise TilingError(
            f"warps: {fields.warps} for products; allowed: multiples of {subcores}, or fewer than {subcores}"
        )
    most, overhead = issue.thread_registers_count.value, issue.overhead_registers_count.value
    count = registers.count + registers.spilled
    if count > MOST_REGISTERS * most:
        raise BufferOverflowError(
            f"registers: {count} for each thread with {size} and {fields.warps} warps, but the device has {most}, "
            f"or {MOST_REGISTERS * most} with spilled ones: use smaller tiles or more warps"
        )
    held = {"tile": max(0, min(most, registers.count) - overhead)}
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    room = occupancy(issue, memory, fields.warps, held, {"tiles": registers.shared_bytes}, registers.spilled)
    if fields.residents and fields.residents > room.blocks:
        raise TilingError(f"residents: {fields.residents} blocks, but {room}")
    blocks = min(fields.residents or room.blocks, ceil_div(len(phase.cells), device.group_count.value))
    spilled_bytes, beyond = round(REGISTER_BYTES * registers.accesses * WARP_LANES * decided.warps), 0
    local, cores = device.core(SM).engines.get(SPILL), device.group_count.value
    if spilled_bytes and isinstance(local, LocalMemoryPipe):
        # In all resident blocks, the values that an iteration stores and loads again are live at once, in addition to
        # keys and values.
        wave = phase.cells[: blocks * cores]
        live = spilled_bytes * decided.groups * len(wave) / 2 + _visited_bytes(phase, wave)
        beyond = round(spilled_bytes * local.missing(live, device.memory.l2.capacity_bytes.value))
    spills = (Charge(f"{SPILL}.bytes_per_cycle", spilled_bytes, "local"), Charge(BEYOND, beyond, "beyond"))
    charges = (START, STEP, *barriers(decided), *(c for c in spills if c.times))
    return SmTiling(blocks, decided=decided._replace(charges=charges), occupancy=room), room


def _visited_bytes(phase: Phase, blocks: Sequence[WorkTile]) -> int:
    """Return the bytes that some blocks visit tile by tile; each head counts once."""
    visited = (t for n, t in phase.tensors.items() if n in phase.names and phase.loop_axis in phase.names[n].axes)
    tensors = [t for t in visited if isinstance(t, GlobalTensor)]
    most = max((t.heads for t in tensors), default=1)
    seen = [{(b.batch, b.head * t.heads // most) for b in blocks} for t in tensors]
    return sum(t.size_bytes // (t.batch * t.heads) * len(heads) for t, heads in zip(tensors, seen, strict=True))


def layout_of(tile: BlockTile, engine: GroupMatrixEngine, decided: GpuDecisions) -> GpuDecisions:
    """Return a kernel's decisions, completed by those of a block: its groups of warps, their layout, tiles
    and stages.
    """
    warps = tile.warps
    depth = max(decided.depth, tile.depth)
    decided = decided._replace(warps=warps, rows=tile.rows, stages=tile.stages, depth=depth)
    # such decisions wait only for copies
    if not tile.stages and decided.roles == "copying" and not warps % GROUP_WARPS:
        groups = warps // GROUP_WARPS
        rows = ceil_div(tile.rows, groups)
        return decided._replace(groups=groups, warps=GROUP_WARPS, rows=rows, generation="mma")
    if not tile.stages:  # a library's kernel: products of single warps, down the rows as far as these reach
        return decided._replace(across=warps // min(warps, ceil_div(tile.rows, FRAGMENT_ROWS)), generation="mma")
    if tile.rows < GROUP_ROWS or engine.wgmma is None or warps < GROUP_WARPS:
        down = min(warps, tile.rows // decided.warp_rows) if tile.rows >= GROUP_ROWS else 1
        return decided._replace(across=warps // down, generation="mma")
    groups = warps // GROUP_WARPS
    if groups > 1 and tile.rows < GROUP_ROWS * groups:
        decided = decided._replace(repeats=groups)
    else:
        decided = decided._replace(groups=groups, warps=GROUP_WARPS, rows=ceil_div(tile.rows, groups))
    return decided._replace(is_serial=_is_serial(tile, decided))


def _is_serial(tile: BlockTile, decided: GpuDecisions) -> bool:
    """Return whether ptxas waits for every product, because S and O do not fit together (hopper.md section 2)."""
    scores, output = tile.elements(decided)
    # The rule in hopper.md section 2 is stated in registers of 4 bytes.
    most, large, eight, wide = SERIAL_REGISTERS, 128, 8, 32
    if tile.is_awaited:
        return False
    total = scores + output
    if stored_format(tile.dtype).bits <= 8:  # the same rule for FP8
        return total > most if tile.stages == 1 else tile.keys > wide or tile.warps == eight
    return total > most or (total == most and scores >= large and tile.stages > 1)


def registers_of(
    tile: BlockTile, fields: GroupFields, architecture: str, most: int, decided: GpuDecisions, shared: int
) -> Registers:
    """Return registers, spills and shared memory: from the fields, from a compiler, or estimated (``shared``).

    ``architecture`` is the one for which registers of a compiler are listed, and ``most`` the number of registers that
    a thread can address.
    """
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
        return Registers(most, 0, shared, "of a library's kernel, which uses all of them")
    if row is not None:
        count, spilled, shared, accesses = row
        return Registers(count, spilled, shared, "from the compiler's table", accesses)
    return Registers.estimated(estimated_registers(tile, decided), most, shared)


def _accesses(fields: GroupFields) -> float:
    return (
        SPILL_ACCESSES * (fields.spilled_registers or 0) if fields.spilled_accesses is None else fields.spilled_accesses
    )


def estimated_registers(tile: BlockTile, decided: GpuDecisions) -> int:
    """Return the registers of a lane that Triton's kernels use (hopper.md section 2: median error 4, worst 34)."""
    scores, output = tile.elements(decided)
    down = max(1, tile.warps // (decided.across * decided.repeats))
    rows = 2 * max(1, tile.rows // (FRAGMENT_ROWS * down))
    visited = (tile.head_dim + (0 if tile.is_viewed else tile.value_dim)) * tile.keys
    # A warp copies 512 bytes at once (hopper.md section 2).
    copies = tile.bytes_of(visited) / (512 * tile.warps)
    is_staged = tile.stages == 1
    # Coefficients of hopper.md section 2, "Registers".
    if decided.generation == "mma":
        # As above.
        return round(2 + 1.8 * scores + 1.4 * output + 9.3 * rows + (1.2 * copies if is_staged else 0))
    # As above.
    return round(22 + 1.2 * scores + output + 3 * rows + (2.4 if is_staged else 1.1) * copies)


def estimated_shared(tile: BlockTile, decided: GpuDecisions) -> int:
    """Return the shared memory of a block, exact for Triton's flash (hopper.md section 2)."""
    values = 0 if tile.is_viewed else tile.value_dim
    sizes = tile.rows * tile.head_dim, tile.keys * tile.head_dim, tile.keys * values
    q, k, v = map(tile.bytes_of, sizes)
    out_bytes = get_format(tile.output).size_bytes
    out = 0 if decided.stores_wide_at_once and out_bytes == REGISTER_BYTES else tile.rows * tile.value_dim * out_bytes
    is_wgmma = decided.generation == "wgmma"
    if tile.stored_bytes:  # operands of products have a tile in addition to the copies, unless they are in fragments
        q += k + v if is_wgmma else 0
        k, v = (n * tile.stored_bytes for n in sizes[1:])
    q = 0 if decided.holds_in_registers else q
    if not tile.stages and decided.roles == "copying":
        return max(q + (k + v) * decided.depth, out)
    if not tile.stages:
        return max(q + k * tile.depth + v, out)
    # Fragments of S are also fragments of P: if no other warp has columns of a warp's rows, P stays in registers.
    p = 0 if is_wgmma or decided.across == 1 else tile.bytes_of(tile.rows * tile.keys)
    if tile.stages == 1:
        return max(q + max(k, v) + p, out)
    return max(q + (k + v) * (tile.stages - (0 if is_wgmma else 1)) + p, out)


def sliced_shared(tile: BlockTile, elements: int) -> int:
    """Return the shared memory of a block: two slices of Q and K with this number of elements, then P with two slices
    of V.
    """
    slices = 2 * elements
    return tile.bytes_of(max(slices * (tile.rows + tile.keys), tile.rows * tile.keys + slices * tile.keys))


def plain_tiling(device: DeviceSpec) -> SmTiling:
    """Return the tiling of a phase other than attention: blocks have one warp per sub-core, and together half of a
    core's warps.
    """
    issue = warp_issue(device)
    decided = GpuDecisions(warps=issue.subcores_count.value)
    decided = decided._replace(charges=(START, STEP, *barriers(decided)))
    return SmTiling(issue.warps_count.value // (2 * decided.warps), decided=decided)


def one_shot_tiling(phase: Phase, device: DeviceSpec) -> SmTiling:
    """Return the tiling of blocks that load, multiply and store once: registers and shared memory limit the number of
    resident blocks.
    """
    plain, issue, names = plain_tiling(device), warp_issue(device), phase.names
    products = [s.rows[0] for s in phase.stages if s.is_product]
    if not products:
        return plain
    count = {n: prod(phase.sizes[a] for a in names[n].axes) for n in (*products[0].srcs, products[0].dst)}
    *staged, results = count.values()
    size = stored_format(names[products[0].srcs[0]].fmt).bytes_of(sum(staged))
    warps = issue.subcores_count.value
    most = max(size // REGISTER_BYTES, results) / (WARP_LANES * warps)
    registers = min(issue.thread_registers_count.value, round(ONE_SHOT_REGISTERS + ONE_SHOT_FACTOR * most))
    held = {"tile": max(0, registers - issue.overhead_registers_count.value)}
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    room = occupancy(issue, memory, warps, held, {"tiles": size})
    return replace(plain, residents=room.blocks, occupancy=room)


def _summing(phase: Phase, device: DeviceSpec, published: GpuKernel | None) -> SmTiling:
    """Return the tiling of a library's blocks without products, by the phase's form (`Phase.sums`).

    ``outputs``: PyTorch's kernel; another author's has no such cost.  ``accesses``: a block has a tile's elements in
    registers, which limit the number of resident blocks.
    """
    plain, issue = plain_tiling(device), warp_issue(device)
    if phase.sums == "outputs":
        charge, plain = Charge(f"{LIBRARY}.reduce_cycles", 1, "output"), _unrolled(phase, plain)
        is_torchs = published is None and find_constant(device, charge.key) is not None
        return _paying(plain, charge) if is_torchs else plain
    warps = published.sum_block[0] if published is not None and published.sum_block else SUM_WARPS
    tile = max(prod(phase.sizes[a] for a in name.axes) for name in phase.names.values())
    registers = min(ceil_div(tile, warps * WARP_LANES), issue.thread_registers_count.value // 2)
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    room = occupancy(issue, memory, warps, {"tile": registers}, {})
    decided = plain.decided._replace(warps=warps, loaded_tiles=1, access_bytes=ACCESS_BYTES)
    decided = decided._replace(charges=(START, STEP, *barriers(decided)))
    return replace(plain, residents=room.blocks, decided=decided, occupancy=room)


def _unrolled(phase: Phase, tiling: SmTiling) -> SmTiling:
    """Return the tiling of a loop without products in a compiler's unrolled form, with the loads of many tiles in
    flight.
    """
    decided = tiling.decided
    read = {n for loop in phase.loops if loop.axis for s in loop.stages for n in s.read if n in phase.tensors}
    sizes = [prod(phase.sizes[a] for a in phase.names[n].axes) for n in read]
    most = UNROLLED_REGISTERS * WARP_LANES * decided.warps // max(sizes, default=1)
    loaded = max(decided.loaded_tiles, min(UNROLLED_TILES, most))
    return replace(tiling, decided=decided._replace(loaded_tiles=loaded))


def operator_tiling(device: DeviceSpec, phase: Phase) -> SmTiling:
    """Return how an operator over a matrix is executed.

    ``copy`` reads and writes at the speed of memory; ``add`` reads a second matrix that all heads share, element by
    element; ``softmax`` processes complete rows.
    """
    assert phase.operator is not None
    (operator, masked), columns = phase.operator, phase.sizes[phase.loop_axis]
    if operator in ACCESSES:
        return _accessing(device, phase, operator)
    tiling, issue = plain_tiling(device), warp_issue(device)
    if operator == "copy":
        return tiling
    if issue.library is None:
        raise SpecError(f"{device.name}: cores.{SM}.engines.{WARPS}.library: missing; {operator} needs it")
    if operator == "add":
        charges = (Charge(f"{LIBRARY}.add_cycles", 1, "element"),)
    else:
        masks = (Charge(f"{LIBRARY}.masked_cycles", masked, "element"),) if masked else ()
        points = issue.library.softmax_points(columns).items()
        charges = (*(Charge(f"{LIBRARY}.softmax.{n}.row_cycles", share, "element") for n, share in points), *masks)
    return _paying(tiling, *charges)


def _accessing(device: DeviceSpec, phase: Phase, access: str) -> SmTiling:
    """Return how an operator of eager PyTorch is executed: ``access`` is one of `ACCESSES`."""
    issue, (warps, computed) = warp_issue(device), ACCESSES[access]
    decided, charges = GpuDecisions(warps=warps), tuple[Charge, ...]()
    if computed:
        keys = [f"{LIBRARY}.{computed}"] if access == "rows" else [f"{LIBRARY}.{computed}.{n}" for n in COMPUTED]
        first, *_ = (find_constant(device, key) for key in keys)
        if first is None:
            raise SpecError(f"{device.name}: cores.{SM}.engines.{keys[0]}: missing; operators of eager PyTorch need it")
        charges = Charge(INDEX, float(first.value), "score"), Charge(keys[-1], due="access")
    if access == "rows":  # a vector is added before the next vector is loaded
        decided, charges = decided._replace(loaded_tiles=1), (Charge(keys[0], due="element"),)
    room = occupancy(issue, device.core(SM).buffer("SMEM").capacity_bytes.value, warps, {}, {})
    blocks = min(room.blocks, ceil_div(len(phase.cells), device.group_count.value))
    return SmTiling(blocks, decided=decided._replace(charges=charges), has_own_rows=True, occupancy=room)


class GpuRowsFields(Tiling):
    """The work of a block of norms and activations, and its warps."""

    elements: int = Field(
        default=4096, ge=256, description=("elements of a block, at least one row if rows are summed")
    )
    warps: Annotated[int | None, power_of_two()] = Field(
        default=None,
        ge=1,
        le=32,
        description=(
            "number of warps of a block; default: 4, but 8 from 2,048 elements on, 16 from 8,192, 32 from 32,768"
        ),
    )


class GpuOperatorFields(Tiling):
    """A block of the kernels between a framework's products; a library chooses these."""

    block_elements: int | None = Field(
        default=None,
        ge=256,
        le=131072,
        multiple_of=256,
        description=(
            "block size of the kernels between the products, in scores, at least one row; default: a size with "
            "which every multiprocessor has a block"
        ),
    )


#: The threads that copy a product's pieces of k.
ProductCopies = Literal["producer", "bulk", "threads"]


class GpuGemmFields(Tiling):
    """Tile of C, the piece of k and the order of tiles on a GPU; open fields have a library's choice."""

    block_m: int | None = Field(default=None, ge=16, le=256, multiple_of=16, description="rows of a tile of C")
    block_n: int | None = Field(default=None, ge=16, le=256, multiple_of=16, description="columns of a tile of C")
    block_k: int | None = Field(
        default=None, ge=16, le=256, multiple_of=16, description=("length of the piece of k that is loaded at once")
    )
    splits: int | None = Field(default=None, ge=1, le=64, description="number of blocks that share the k of a tile")
    stages: int | None = Field(default=None, ge=1, le=16, description="number of pieces of k in shared memory")
    copies: ProductCopies | None = Field(
        default=None,
        description=(
            "which threads copy pieces of k: a producer warp, one thread of the warps that multiply "
            "(bulk, one copy for each operand), or all of their threads; default: a producer"
        ),
    )
    swizzle: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description=("number of tiles in a group that successive blocks compute, along the side of C with fewer tiles"),
    )


def library_fields(
    sizes: tuple[int, int, int], fmt: str, heads: int, tiling: GpuGemmFields, device: DeviceSpec
) -> GpuGemmFields:
    """Return the tiling with a library's choice of its open fields; these fields still count as unnamed.

    ``sizes``: m, n and k of each of ``heads`` products of operands in the format ``fmt``.
    """
    rows, cols, depth = sizes
    issue = warp_issue(device)
    is_staged = issue.copies.value == "staged"
    of_library = library_products.STAGED if is_staged else library_products.COPIED
    k, stages = (given or own for given, own in zip((tiling.block_k, tiling.stages), of_library, strict=True))
    piece = stored_format(fmt).bytes_of(k)
    edges = issue.block_memory_bytes.value // (stages * piece)
    # There are two blocks: one multiplies while the other loads or stores; accumulators use half of the registers of
    # each block.
    area = issue.registers_count.value // 4 if is_staged else None
    given, cores = (tiling.block_m, tiling.block_n, tiling.splits), device.group_count.value
    m, n, splits = library_products.library_tile(rows, cols, depth, cores, given, heads, edges, area)
    is_one_wave = heads * ceil_div(rows, m) * ceil_div(cols, n) * splits <= cores
    if is_one_wave and not is_staged and tiling.stages is None:
        stages = max(stages, min(library_products.MOST_STAGES, issue.block_memory_bytes.value // ((m + n) * piece)))
    swizzle, _ = library_products.tile_order(rows, cols, (m, n), tiling.swizzle)
    values = {"block_m": m, "block_n": n, "block_k": k, "splits": splits, "stages": stages, "swizzle": swizzle}
    named = set(tiling.model_fields_set)
    return GpuGemmFields.model_construct(_fields_set=named, copies=tiling.copies or "producer", **values)


def library_order(c: GlobalTensor, fields: GpuGemmFields) -> tuple[int, bool]:
    """Return the number of adjacent tiles of C in a band, and whether they are columns of tiles."""
    assert fields.block_m and fields.block_n, "the fields of a library's product need values"
    return library_products.tile_order(c.rows, c.cols, (fields.block_m, fields.block_n), fields.swizzle)


def library_tiling(
    a: GlobalTensor, b: GlobalTensor, c: GlobalTensor, fields: GpuGemmFields, device: DeviceSpec
) -> SmTiling:
    """Return how warps execute a library's product in a tile, all of whose ``fields`` have values.

    Separate warps copy, and for every 64 elements of the tile's shorter side (rows of C, or of C^T) there is one warp
    group that multiplies.
    """
    m, n, k, splits, stages = (getattr(fields, f) for f in ("block_m", "block_n", "block_k", "splits", "stages"))
    issue = warp_issue(device)
    is_staged, blocks = issue.copies.value == "staged", c.batch * c.heads * splits
    is_one_wave = blocks * ceil_div(c.rows, m) * ceil_div(c.cols, n) <= device.group_count.value
    shared, memory = (
        stages * (m + n) * stored_format(a.fmt).bytes_of(k),
        device.core(SM).buffer("SMEM").capacity_bytes.value,
    )
    most = min(issue.block_memory_bytes.value, memory)
    if shared > most:
        raise BufferOverflowError(
            f"shared memory: {stages} stages of {m}x{k} and {k}x{n} = {format_bytes(shared)} > {format_bytes(most)}"
        )
    engine = engine_of(device, TENSOR, GroupMatrixEngine)
    generation: Generation = "mma" if engine.wgmma is None else "wgmma"
    across, is_transposed = 2 if is_staged else 1, m > n >= GROUP_ROWS or m < min(n, GROUP_ROWS)
    (rows, columns), groups = (n, m) if is_transposed else (m, n), max(1, min(m, n) // GROUP_ROWS)
    rows = ceil_div(rows, groups)  # even if a ragged tile has few rows
    goes_on = issue.library is not None and not is_one_wave
    charges = [library_products.TILE if goes_on else START]
    is_aligned = not any(stored_format(t.fmt).row_bytes(t.cols) % library_products.ALIGNED_BYTES for t in (a, b, c))
    if not is_aligned and issue.library is not None:
        charges += library_products.UNALIGNED
    warps, there = groups * GROUP_WARPS, issue.registers_count.value
    registers = m * n // (warps * WARP_LANES) + UNNAMED_REGISTERS
    of_block = registers * warps * WARP_LANES
    limits = {"shared memory": memory // shared, "registers": max(1, there // of_block)}
    held = {RF: (REGISTER_BYTES * of_block, REGISTER_BYTES * there), SMEM: (shared, memory)}
    room = Occupancy(min(limits.values()), warps, registers, shared, limits, held)
    decided = GpuDecisions(groups, GROUP_WARPS, across, generation=generation, depth=stages, roles="copying")
    if fields.copies not in (None, "producer"):
        if is_staged or generation != "mma":
            raise TilingError(f"copies: {fields.copies}; on {device.name} only a producer can copy")
        decided = decided._replace(roles="alike", stages=stages + 1, copies_in_bulk=fields.copies == "bulk")
        charges += barriers(decided)
    decided = decided._replace(rows=rows, is_transposed=is_transposed, charges=tuple(charges))
    return SmTiling(room.blocks, widths={"n": columns}, decided=decided, occupancy=room)
