"""Warp groups of a block as a compiler lays them out, its registers and shared memory, and how many fit a core.

What Triton makes of attention (hopper.md section 2): 64 rows and more go to products of warp groups, fewer to
products of single warps beside one another along the columns; eight warps on 64 rows compute S twice.
Registers and spills are inputs where a compiler gave them, else estimated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npusim.config.device_tables import compiled_registers
from npusim.config.engine import GroupMatrixEngine, LocalMemoryPipe, WarpIssue
from npusim.errors import BufferOverflowError, TilingError
from npusim.formats import get_format
from npusim.ir.op import GroupWork
from npusim.layout.fragment import WARP_LANES
from npusim.machines.sm.occupancy import REGISTER_BYTES, BlockNeeds, occupancy
from npusim.machines.sm.plan import SM, SPILL, TENSOR, WARPS, SmTiling
from npusim.units import ceil_div, format_bytes, round_up

if TYPE_CHECKING:
    from npusim.algorithms.phase import Phase
    from npusim.config.device import DeviceSpec
    from npusim.machines.sm.fields import GroupFields

#: Rows and columns of the accumulator that a warp holds of a product (PTX ISA, mma.m16n8k16).
FRAGMENT_ROWS, FRAGMENT_COLUMNS = 16, 8
#: Rows of a warp group's product (PTX ISA, wgmma), and its warps.
GROUP_ROWS, GROUP_WARPS = 64, 4
#: Registers of a lane beyond which a tile is refused, over those that it can address: none measured has more.
MOST_REGISTERS = 8
#: How often an iteration stores and loads a spilled register, where no compiler was asked: the median of those that
#: were (hwconfigs/h200_registers.csv).
SPILL_ACCESSES = 1.45


@dataclass(frozen=True, slots=True)
class BlockTile:
    """What of an attention decides its block: rows, keys, head sizes, formats, and which kernel it is.

    ``is_awaited``: P V is used at once.
    """

    kernel: str
    dtype: str
    rows: int
    keys: int
    head_dim: int
    value_dim: int
    causal: bool = False
    is_awaited: bool = False
    output: str = "float16"

    @classmethod
    def of(cls, kernel: str, phase: Phase) -> BlockTile | None:
        """Return the block of an attention's phase: two products, the second of what rows make of the first."""
        products = [s.rows[0] for s in phase.stages if s.is_product]
        fed = [r for r in products if r.srcs[0] not in phase.tensors]
        if not fed or len(products) < 2 or not phase.loop_axis:
            return None
        first, last, names = products[0], fed[-1], phase.names
        rows, keys = (max(n) for n in zip(*((c.rows, max(r.cols for r in c.runs)) for c in phase.cells), strict=True))
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
        )


@dataclass(frozen=True, slots=True)
class Registers:
    """Registers of a lane, those spilled, shared memory of a block, who says so; an iteration's accesses to spills."""

    count: int
    spilled: int
    shared_bytes: int
    origin: str
    accesses: float = 0.0


def group_tiling(kernel: str, phase: Phase, fields: GroupFields, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return how warp groups execute a phase, and what is to be said: how many blocks a core holds, and why.

    ``kernel`` is the name under which a compiler's registers are listed; ``fields.stages`` none: a library's kernel.
    Raises `TilingError` (or its ``BufferOverflowError``) where a block does not fit, saying by how much.
    """
    tile = BlockTile.of(kernel, phase)
    if tile is None:
        return plain_tiling(device), ""
    issue, engine = device.engine(SM, WARPS), device.engine(SM, TENSOR)
    assert isinstance(issue, WarpIssue)
    assert isinstance(engine, GroupMatrixEngine)
    said = ""
    if issue.copies.value == "staged" and (fields.stages or 1) > 1:
        if "stages" in fields.model_fields_set:
            raise TilingError(
                f"stages: {fields.stages} tiles under way need asynchronous copies, which {device.name} has not: "
                "its tiles go through registers; take 1"
            )
        fields, said = fields.model_copy(update={"stages": 1}), "; 1 stage, for want of asynchronous copies"
    work, groups = layout_of(tile, fields, engine)
    found = registers_of(tile, fields, device, work, groups)
    most = issue.thread_registers_count.value
    if found.count + found.spilled > MOST_REGISTERS * most:
        raise BufferOverflowError(
            f"registers: {found.count + found.spilled} a thread for {tile.rows}x{tile.keys} with {fields.warps} warps, "
            f"{most} there, at most {MOST_REGISTERS * most} with those spilled; smaller tiles or more warps take fewer"
        )
    overhead = issue.overhead_registers_count.value
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    needs = BlockNeeds(fields.warps, {"tile": max(0, min(most, found.count) - overhead)}, {"tiles": found.shared_bytes})
    room = occupancy(needs, issue, memory)
    reserved = issue.reserved_bytes.value if issue.reserved_bytes else 0
    limits = {**room.limits, "shared memory": max(1, memory // (room.shared_bytes + reserved))}
    room = replace(room, blocks=min(limits.values()), limits=limits)
    if fields.residents and fields.residents > room.blocks:
        raise TilingError(f"residents: {fields.residents} blocks, but {room}")
    blocks = min(fields.residents or room.blocks, ceil_div(len(phase.cells), device.group_count.value))
    spilled_bytes, far = round(REGISTER_BYTES * found.accesses * WARP_LANES * work.warps), 0.0
    local = device.core(SM).engines.get(SPILL)
    if found.spilled and isinstance(local, LocalMemoryPipe):
        frames = REGISTER_BYTES * found.accesses / 2 * WARP_LANES * fields.warps * blocks
        # Shared memory is carved out for as many blocks as fit, whether or not there are as many.
        cache = local.beside(limits["registers"], room.shared_bytes + reserved)
        far = local.missing(frames, cache)
    tiling = SmTiling(
        groups=groups,
        residents=blocks,
        depth=max(1, (fields.stages or 1) - 1),
        work=work,
        stages=fields.stages or 0,
        spilled_bytes=round(spilled_bytes * (1 - far)),
        far_bytes=round(spilled_bytes * far),
    )
    spilled = f", {found.spilled} spilled" if found.spilled else ""
    return tiling, f"{room}; tiles of {tile.rows} x {tile.keys}; registers {found.origin}{spilled}{said}"


def layout_of(tile: BlockTile, fields: GroupFields, engine: GroupMatrixEngine) -> tuple[GroupWork, int]:
    """Return how a group of warps executes the block, and how many groups there are."""
    warps = fields.warps
    if not fields.stages:  # a library's kernel: warps down the rows, products of single warps
        return GroupWork(warps, generation="mma"), 1
    if tile.rows < GROUP_ROWS or engine.wgmma is None:
        down = min(warps, tile.rows // FRAGMENT_ROWS) if tile.rows >= GROUP_ROWS else 1
        return GroupWork(warps, across=warps // down, generation="mma"), 1
    groups = warps // GROUP_WARPS
    is_repeated = groups > 1 and tile.rows < GROUP_ROWS * groups
    work = GroupWork(warps, repeats=groups) if is_repeated else GroupWork(GROUP_WARPS)
    own = replace(work, is_serial=_is_serial(tile, fields, _elements(tile, work, groups)))
    return own, 1 if work.repeats > 1 else groups


def _elements(tile: BlockTile, work: GroupWork, groups: int) -> tuple[float, float]:
    """Return how many elements of S and of O a thread holds."""
    threads = WARP_LANES * work.warps * (groups if work.repeats == 1 else 1)
    across = work.across * FRAGMENT_COLUMNS
    rows = round_up(tile.rows, FRAGMENT_ROWS)
    return (rows * max(across, tile.keys) * work.repeats / threads, rows * max(across, tile.value_dim) / threads)


def _is_serial(tile: BlockTile, fields: GroupFields, held: tuple[float, float]) -> bool:
    """Return whether ptxas waits for every product: S and O do not fit beside each other (hopper.md section 2)."""
    scores, output = held
    # Registers of 4 bytes, as hopper.md section 2 has the rule.
    most, large, eight, wide = 192, 128, 8, 32
    if tile.is_awaited:
        return False
    if get_format(tile.dtype).size_bytes == 1:
        if fields.stages == 1:
            return scores + output > most
        return tile.keys > wide or fields.warps == eight
    total = scores + output
    return total > most or (total == most and scores >= large and (fields.stages or 0) > 1)


def registers_of(tile: BlockTile, fields: GroupFields, device: DeviceSpec, work: GroupWork, groups: int) -> Registers:
    """Return registers, spills and shared memory: the fields', else a compiler's, else estimated."""
    shared = estimated_shared(tile, fields, work)
    shape = tile.dtype, tile.head_dim, tile.causal, tile.rows, tile.keys, fields.stages or 0, fields.warps
    kernels = tile.kernel, f"{tile.kernel}_{'fresh' if tile.is_awaited else 'chained'}"
    row = next((r for kernel in kernels if (r := compiled_registers(device.name, kernel, *shape))), None)
    if fields.registers is not None:
        spilled = fields.spilled_registers or 0
        is_known = row is not None and row[:2] == (fields.registers, spilled)
        return Registers(
            fields.registers, spilled, shared, "as given", row[-1] if row and is_known else SPILL_ACCESSES * spilled
        )
    most = thread_registers(device)
    if not fields.stages:
        return Registers(most, 0, shared, "of a library's kernel: all there are")
    if row is not None:
        count, spilled, shared, accesses = row
        return Registers(count, spilled, shared, "of the compiler's table", accesses)
    estimate = estimated_registers(tile, fields, work, groups)
    spilled = max(0, estimate - most)
    return Registers(min(most, estimate), spilled, shared, "estimated", SPILL_ACCESSES * spilled)


def thread_registers(device: DeviceSpec) -> int:
    """Return how many registers a thread can address."""
    issue = device.engine(SM, WARPS)
    assert isinstance(issue, WarpIssue)
    return issue.thread_registers_count.value


def estimated_registers(tile: BlockTile, fields: GroupFields, work: GroupWork, groups: int) -> int:
    """Return the registers of a lane that Triton's kernels take (hopper.md section 2: median error 4, worst 34)."""
    scores, output = _elements(tile, work, groups)
    size = get_format(tile.dtype).size_bytes
    down = max(1, fields.warps // (work.across * max(1, work.repeats)))
    rows = 2 * max(1, tile.rows // (FRAGMENT_ROWS * down))
    # A warp copies 512 bytes at once.
    copies = (tile.head_dim + tile.value_dim) * tile.keys * size / (512 * fields.warps)
    # Coefficients of hopper.md section 2, "Registers".
    is_staged = fields.stages == 1
    if work.generation == "mma":
        # As above.
        return round(2 + 1.8 * scores + 1.4 * output + 9.3 * rows + (1.2 * copies if is_staged else 0))
    # As above.
    return round(22 + 1.2 * scores + output + 3 * rows + (2.4 if is_staged else 1.1) * copies)


def estimated_shared(tile: BlockTile, fields: GroupFields, work: GroupWork) -> int:
    """Return the shared memory of a block, exact for Triton's flash (hopper.md section 2)."""
    size = get_format(tile.dtype).size_bytes
    q, k, v = tile.rows * tile.head_dim * size, tile.keys * tile.head_dim * size, tile.keys * tile.value_dim * size
    out = tile.rows * tile.value_dim * get_format(tile.output).size_bytes
    if not fields.stages:
        return max(q + k + v, out)
    is_wgmma = work.generation == "wgmma"
    # Fragments of S are those of P: where no other warp has columns of its rows, P stays in registers.
    p = 0 if is_wgmma or work.across == 1 else round_up(tile.rows, FRAGMENT_ROWS) * tile.keys * size
    if fields.stages == 1:
        return max(q + max(k, v) + p, out)
    return max(q + (k + v) * (fields.stages - (0 if is_wgmma else 1)) + p, out)


def product_tiling(
    device: DeviceSpec, tile: tuple[int, int, int], size_bytes: int, stages: int, *, is_aligned: bool = True
) -> SmTiling:
    """Return how a library multiplies tiles of (m, n, k): a warp group for 64 rows, copies by warps of their own.

    Not ``is_aligned``: rows of an operand or the result are no multiple of 16 bytes.
    """
    m, n, k = tile
    engine, issue = device.engine(SM, TENSOR), device.engine(SM, WARPS)
    assert isinstance(engine, GroupMatrixEngine)
    assert isinstance(issue, WarpIssue)
    shared = stages * (m + n) * k * size_bytes
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    most = min(issue.block_memory_bytes.value, memory)
    if shared > most:
        raise BufferOverflowError(
            f"shared memory: {stages} stages of {m}x{k} and {k}x{n} = {format_bytes(shared)} > {format_bytes(most)}"
        )
    work = GroupWork(GROUP_WARPS, generation="mma" if engine.wgmma is None else "wgmma", is_specialised=True)
    if not is_aligned and issue.library is not None:
        work = replace(
            work,
            product_cycles=issue.library.unaligned_product_cycles.value,
            element_cycles=issue.library.unaligned_store_cycles.value,
            constant="unaligned_store_cycles",
        )
    groups = max(1, m // GROUP_ROWS)
    # Accumulators and as much again for addresses and operands.
    registers = m * n // (groups * GROUP_WARPS * WARP_LANES) + 64
    by_registers = issue.registers_count.value // (registers * groups * GROUP_WARPS * WARP_LANES)
    return SmTiling(groups=groups, residents=max(1, min(memory // shared, by_registers)), depth=stages, work=work)


def plain_tiling(device: DeviceSpec) -> SmTiling:
    """Return the tiling of a phase that no attention is: blocks of one warp a sub-core, half a core's warps in all."""
    issue = device.engine(SM, WARPS)
    assert isinstance(issue, WarpIssue)
    warps = issue.subcores_count.value
    return SmTiling(residents=issue.warps_count.value // (2 * warps), work=GroupWork(warps))
