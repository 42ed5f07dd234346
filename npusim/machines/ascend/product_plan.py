"""Tiling fields of an Ascend device, and how products run on its AIC: tiles in L0, staging in L1, loop order."""

from __future__ import annotations

from dataclasses import field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal

from npusim.config.tiling import Blocks, Field, Tiling, lightest, one_of
from npusim.errors import TilingError
from npusim.formats import get_format, stored_format
from npusim.kernels.attention.call_blocks import BlockOrder
from npusim.kernels.attention.tiling_mask import MaskKind
from npusim.late_methods import dataclass
from npusim.machines.ascend.group import AIV, PING_PONG, SLICE_ELEMENTS, has_registers
from npusim.machines.decisions import AscendDecisions, Barriers, Route, StageOrder
from npusim.machines.published_kernel import AscendKernel
from npusim.machines.published_kernels import find_kernel, kernels
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from npusim.config.device import DeviceSpec
    from npusim.kernels.form.phase import Phase, Stage
    from npusim.machines.ascend.group import AscendGroup
    from npusim.machines.frame import Frame


#: The part of an operand that is loaded into L1 at once.  ``held``: the whole operand, from the start of the block to
#: its end; ``whole``: the whole operand, for one product; ``panel``: a piece of N over the complete depth; ``piece``:
#: the part that one accumulation reads; ``view``: nothing, because this operand is a part of an operand that another
#: product holds.
Staging = Literal["held", "whole", "panel", "piece", "view"]


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """Plan of one product: ``m`` x ``n`` x ``k`` at a time in L0, and the staging of its operands in L1.

    loads
        Number of elements along k of A and of B that are loaded into L1 at a time: both are multiples of ``k``, and one
        is a multiple of the other. 0: ``k``.
    halves
        Number of parts of an accumulator. Each part is drained while the next part accumulates (unit flag).
    slots
        Largest number of slots of L0A, L0B and L0C; 0: as in the phase.
    panels_outside
        Whether every band of A is multiplied by a panel of B before the next panel is loaded.
    loops_over_k
        Whether the pieces along k are a loop of the program. If not, they are a list of operations.
    """

    m: int
    n: int
    k: int
    left: Staging
    right: Staging
    panels_outside: bool = False
    loops_over_k: bool = False
    left_depth: int = PING_PONG
    right_depth: int = PING_PONG
    loads: tuple[int, int] = (0, 0)
    halves: int = 1
    slots: tuple[int, ...] = (0, 0, 0)

    @property
    def load_k(self) -> int:
        """Number of elements of k that are loaded into L1 at once, for the operand for which this number is larger."""
        return max(*self.loads, self.k)


@dataclass(frozen=True, slots=True)
class AscendTiling:
    """Tiling of one phase on an Ascend device, in the form that the machine needs to build it.

    plans
        Product plans by stage. A stage without an entry has the plan of :func:`default_plan`.
    elements
        Number of elements of rows that a vector core processes at a time.
    ahead
        Number of tiles by which stages run ahead of a product that reads results of vector stages. The rings between
        the cores have one slot more than this number.
    spilled
        States that are in global memory between tiles because UB has no space for them.
    buffers
        Number of slots of the data that vector stages load and store, in phases without a product.
    is_work_list
        Whether each block goes to the first idle core group.
    decided
        Decisions of the kernel.
    """

    plans: Mapping[str, ProductPlan] = field(default_factory=dict)
    elements: int = SLICE_ELEMENTS
    ahead: int = 0
    spilled: tuple[str, ...] = ()
    buffers: int = PING_PONG
    is_work_list: bool = False
    decided: AscendDecisions = field(default_factory=AscendDecisions)

    @property
    def key(self) -> Hashable:
        """Key that equal tilings share."""
        most = self.elements, self.ahead, self.spilled, self.buffers, self.is_work_list, self.decided
        return tuple(self.plans.items()), most


#: Number of blocks with a scale that the matrix unit reads together (MmadMx: K a multiple of 64).
SCALED_K = 2
#: Number of bytes that one load of the vendor's products reads from a row of A: four pieces of 64 elements of 16 bits
#: (stepK 4 of the Ascend C guide's MDL template), or of 128 elements in MXFP8 (pto-isa 3186c38,
#: kernels/manual/a5/matmul_mxfp8_performance).
LOADED_BYTES = 512


def loaded_k(m: int, n: int, k: int, fmt: str, group: AscendGroup) -> int:
    """Return the number of elements of k that a product loads at once: full pieces of `LOADED_BYTES`, in ping-pong in
    L1.
    """
    stored = stored_format(fmt)
    room = group.capacity_bytes("L1") // PING_PONG * stored.per_byte // stored.bytes_of((m + n) * stored.per_byte)
    return max(1, min(LOADED_BYTES * stored.per_byte // stored.size_bytes, room) // k) * k


def gemm_tiling(phase: Phase, fields: Any, group: AscendGroup) -> AscendTiling:
    """Return how a plain product runs: operands stream through L1 in pieces of k, or are loaded completely for a block.

    Raises `TilingError` for pieces that are not multiples of ``block_k``, or not multiples of one another.
    """
    f, fmt = dict(fields), phase.names[phase.stages[0].rows[0].srcs[0]].fmt
    m, n, k, whole = f["block_m"], f["block_n"], f["block_k"], f.get("full_load")
    usual = f.get("load_k") or loaded_k(m, n, k, fmt, group)
    loads = [0 if whole in (x, "both") else f.get(f"load_{x}") or usual for x in "ab"]
    for name, load in zip(("load_a", "load_b"), loads, strict=True):
        if load % k:
            raise TilingError(f"{name if f.get(name) else 'load_k'}: {load} is not a multiple of block_k={k}")
    if all(loads) and max(loads) % min(loads):
        raise TilingError(f"load_a: {loads[0]} must be a multiple of load_b={loads[1]}, or the reverse")
    _check_blocks("block_k", k, fmt)
    share_m, depth, share_n = (phase.sizes[axis] for axis in phase.product_axes(phase.stages[0].rows[0]))
    repeats = (share_m <= m and share_n > n, share_n <= n and share_m > m)
    # An operand with its complete depth in L1 is not loaded again for the next tile with the same rows of A, or columns
    # of B.
    loads = [0 if again and load >= depth else load for load, again in zip(loads, repeats, strict=True)]
    plan = ProductPlan(
        m,
        n,
        k,
        left="piece" if loads[0] else "held",
        right="piece" if loads[1] else "held",
        panels_outside=_goes_down_first((share_m, share_n), (m, n), (not loads[0], not loads[1])),
        loops_over_k=all(loads),
        left_depth=f.get("slots_l1a") or (PING_PONG if loads[0] else 1),
        right_depth=f.get("slots_l1b") or (PING_PONG if loads[1] else 1),
        loads=(loads[0], loads[1]),
        halves=2 if f.get("unit_flag") else 1,
        slots=tuple(f.get(f"slots_l0{x}") or 0 for x in "abc"),
    )
    return AscendTiling({phase.name: plan})


def _goes_down_first(share: tuple[int, int], tile: tuple[int, int], held: tuple[bool, bool]) -> bool:
    """Return whether a core processes the rows of a panel of C before the next panel, as CANN's products do.

    ``share``, ``tile``: rows and columns of a core, and of one tile; ``held``: whether A and B are loaded completely.
    The inner loop reads one operand again for each step of the outer loop: of the two orders, a core uses the one that
    reads fewer bytes; if both read the same number, it processes rows first.  source: CANN's TBE,
    gemm_integrated_schedule_util, split_mn_block and reorder_l1_mn_axis.
    """
    rows, columns = share
    bands, panels = (1 if whole else ceil_div(s, t) for whole, s, t in zip(held, share, tile, strict=True))
    if bands == 1 or panels == 1:
        return bands == 1
    return rows * panels + columns <= rows + columns * bands


def _check_blocks(what: str, size: int, fmt: str) -> None:
    """Raise `TilingError` for pieces of a sum that the matrix unit does not accept for operands in blocks."""
    together = SCALED_K * stored_format(fmt).scale_block
    if together and size % together:
        raise TilingError(f"{what}: {size} is not a multiple of {together}, the step in which {fmt} is multiplied")


def slice_rows(chosen: int | None, width: int, elements: int = SLICE_ELEMENTS) -> int:
    """Return the number of rows of a slice of tiles that are ``width`` wide: the chosen number, or the one that gives
    ``elements``.
    """
    return chosen or max(1, elements // width)


def slice_elements(chosen: int | None, share: int, width: int, elements: int = SLICE_ELEMENTS) -> int:
    """Return the elements of a slice of :func:`slice_rows`, at most a vector core's ``share`` of rows."""
    return min(slice_rows(chosen, width, elements), share) * width


def default_plan(frame: Frame, stage: Stage, group: AscendGroup) -> ProductPlan:
    """Return the default plan of a product.

    N along the loop's axis (Q K^T): A stays in L1 until the block ends, B is loaded panel by panel.  M along the loop's
    axis (dS^T K, for the keys of a block): A is loaded piece by piece, B stays.  Contraction along the loop's axis (P
    V): both are loaded piece by piece.  A loop in which a state is a factor: both are loaded completely.  No loop: both
    are loaded completely if they fit L1 (M K); otherwise they stream through it, loaded by :func:`loaded_k`, in pieces,
    two of which fit L0 (a GEMM).
    """
    phase, edge = frame.phase, group.edge
    (row,) = stage.rows
    m_axis, k_axis, n_axis = phase.product_axes(row)
    m, n, k = (min(edge, phase.sizes[a]) for a in (m_axis, n_axis, k_axis))
    if phase.is_recurrent:
        left, right = (PING_PONG if x in _streamed(phase, group) else 1 for x in row.srcs)
        return ProductPlan(m, n, k, "whole", "whole", left_depth=left, right_depth=right)
    if m_axis == phase.loop_axis and not frame.is_visited(row.srcs[1]):
        return ProductPlan(m, n, k, "piece", "held", right_depth=1)
    if n_axis == phase.loop_axis:
        return ProductPlan(m, n, k, "held", "panel", panels_outside=True, left_depth=1)
    if k_axis == phase.loop_axis:
        _check_blocks(f"{k_axis}s of a tile", phase.sizes[k_axis], frame.fmt(row.srcs[0]))
        return ProductPlan(m, n, k, "piece", "piece")
    left, right = (frame.size_bytes(x, prod(phase.sizes[a] for a in frame.axes(x))) for x in row.srcs)
    if left + PING_PONG * right <= group.capacity_bytes("L1"):
        return ProductPlan(m, n, k, "whole", "whole", left_depth=1)
    m, n = phase.sizes[m_axis], phase.sizes[n_axis]
    piece = max(1, _deepest(frame, stage, group, m, n) // group.fractal) * group.fractal
    load = loaded_k(m, n, piece, phase.names[row.srcs[0]].fmt, group)
    return ProductPlan(m, n, piece, "piece", "piece", loops_over_k=True, loads=(load, load))


def _streamed(phase: Phase, group: AscendGroup) -> list[str]:
    """Return the factors in global memory that have two tiles in L1: the first factors, in their order, for which flags
    remain.
    """
    factors = list(dict.fromkeys(x for s in phase.stages if s.is_product for x in s.rows[0].srcs))
    outside, flags = [x for x in factors if x in phase.tensors], group.device.flags
    loaded = outside if group.device.has_route(AIV, "UB", "L1") else factors
    return outside[: max(0, flags.usable_event_ids_count.value - len(loaded))] if flags else outside


def piece_plan(frame: Frame, stage: Stage, group: AscendGroup, piece: int) -> ProductPlan:
    """Return the plan of a product that adds in its kernel's pieces of k, cut to sizes that L0 holds twice."""
    (row,), sizes = stage.rows, frame.phase.sizes
    m, n = (sizes[a] for a in frame.axes(row.dst))
    if m * n * get_format("float32").size_bytes > group.capacity_bytes("L0C"):
        m, n = min(m, group.edge), min(n, group.edge)
    k = next(k for k in range(min(_deepest(frame, stage, group, m, n), piece), 0, -1) if piece % k == 0)
    return ProductPlan(m, n, k, "piece", "piece", loops_over_k=True, loads=(piece, piece))


def _deepest(frame: Frame, stage: Stage, group: AscendGroup, m: int, n: int) -> int:
    """Return the largest number of elements of k such that L0A and L0B hold two pieces each, for m rows and
    n columns.
    """
    ends = zip(("L0A", "L0B"), stage.rows[0].srcs, (m, n), strict=True)
    return min(group.capacity_bytes(a) // PING_PONG // frame.size_bytes(x, size) for a, x, size in ends)


class GemmFields(Tiling):
    """Tile of C and the piece of k; the defaults are the vendor's best (ascend.md section 3.2)."""

    block_m: int = Field(default=128, ge=16, multiple_of=16, description="rows of a tile of C")
    block_n: int = Field(default=256, ge=16, multiple_of=16, description="columns of a tile of C")
    block_k: int = Field(
        default=64, ge=16, multiple_of=16, description=("length of the piece of k that is multiplied at once")
    )
    load_k: int | None = Field(
        default=None,
        ge=16,
        multiple_of=16,
        description=(
            "length of the piece of k that is loaded into L1 at once, a multiple of block_k; default: 512 "
            "bytes, as in the vendor's kernel"
        ),
    )
    load_a: int | None = Field(
        default=None, ge=16, multiple_of=16, description="load_k of A, if it differs from B's (stepKa)"
    )
    load_b: int | None = Field(
        default=None, ge=16, multiple_of=16, description="load_k of B, if it differs from A's (stepKb)"
    )
    full_load: Literal["a", "b", "both"] | None = Field(
        default=None, description=("operands that are loaded completely for all tiles of a core's share; default: none")
    )
    single_m: int | None = Field(
        default=None, ge=16, description="rows of C that one core computes (singleCoreM); default: rows of a tile"
    )
    single_n: int | None = Field(
        default=None, ge=16, description="columns of C that one core computes (singleCoreN); default: columns of a tile"
    )
    slots_l1a: int | None = Field(
        default=None, ge=1, description="number of pieces of A in L1; default: 2, or 1 if A is loaded whole"
    )
    slots_l1b: int | None = Field(
        default=None, ge=1, description="number of pieces of B in L1; default: 2, or 1 if B is loaded whole"
    )
    slots_l0a: int | None = Field(
        default=None, ge=1, description=("largest number of pieces in L0A (dbL0A); default: 2")
    )
    slots_l0b: int | None = Field(
        default=None, ge=1, description=("largest number of pieces in L0B (dbL0B); default: 2")
    )
    slots_l0c: int | None = Field(
        default=None, ge=1, description=("largest number of tiles in L0C (dbL0C); default: 2")
    )
    nd2nz: Literal["mte2", "vector"] | None = Field(
        default=None,
        description=(
            "unit that converts row-major operands to fractals: MTE2 on the way to L1, or, for rows that "
            "are not aligned to 256 bytes, vector cores before that; default: vector for unaligned rows, "
            "as CANN's MatMulV3"
        ),
    )
    swizzle: int | None = Field(
        default=None,
        ge=1,
        description="rows of tiles of C in a group, which successive blocks compute column by column (CATLASS); "
        "default: 1, or all rows if L2 holds less than B, which is then read once",
    )
    unit_flag: bool = Field(
        default=False,
        description=("whether one half of the accumulators is written out while the other still accumulates"),
    )


class RowsFields(Tiling):
    """Number of elements that a vector core processes at a time; number of slots, or number of pieces of a row, if UB
    does not hold two such parts.
    """

    elements: int = Field(
        default=4096, ge=256, description=("elements of a slice, at least one row if rows are summed")
    )
    slices: int = Field(default=16, ge=1, description="number of slices of a vector core in a block")
    buffers: int = Field(
        default=2,
        ge=1,
        le=2,
        description=("number of slots of each input and result in UB (BUFFER_NUM of Ascend C's kernels)"),
    )
    # source: CANN ops-nn, norm/add_rms_norm, add_rms_norm_tiling.cpp: UB_FACTOR_B16; longer rows use SPLIT_D
    piece: int = Field(
        default=12288,
        ge=256,
        multiple_of=16,
        description="largest number of columns of a norm at a time; a longer row is cut evenly and read twice",
    )


#: The name of a published kernel, or FILE.py:NAME.
KernelName = Annotated[str, one_of(partial(kernels, AscendKernel))]


class VectorFields(Tiling):
    """The division of rows into slices, the tiles by which stages run ahead, and the core of each block."""

    vector_rows: int | None = Field(
        default=None,
        ge=1,
        json_schema_extra={"none": "full", "elements": SLICE_ELEMENTS},
        description="rows of a softmax slice on an AIV; default: as many as give 8192 elements, if blocks are full",
    )
    depth: int = Field(
        default=2,
        ge=0,
        le=14,
        description="number of tiles that Q K^T and softmax run ahead of P V; the flag counter allows 15 slots",
        json_schema_extra=lightest("least"),
    )
    deal: BlockOrder = Field(
        default="round_robin",
        description="assignment of blocks to cores: in turn, longest first, or a persistent kernel's list",
        json_schema_extra=lightest("any"),
    )
    mask: MaskKind | None = Field(
        default=None,
        description=(
            "how the mask of a tile is produced: cut from a small constant matrix, computed by comparing indices, "
            "or loaded from a whole matrix; default: cut if one matrix suffices, else loaded"
        ),
    )


class RegisterFields(VectorFields):
    """The same fields; in addition, the way in which cores take turns, and the form of rows for a vector unit with
    registers.
    """

    order: StageOrder = Field(
        default="rolling",
        description=(
            "rolling: each stage runs `depth` tiles ahead of the next; or stages in groups of `depth` "
            "tiles, or tile after tile"
        ),
    )
    pipeline: Literal["block", "core"] | None = Field(
        default=None,
        description=(
            "whether the stages finish at the end of each block, or continue with the core's next block; "
            "default: the kernel's choice"
        ),
    )
    slots: int = Field(
        default=PING_PONG,
        ge=1,
        le=4,
        description="number of slots of each of L0A, L0B and L0C; with 1 the core waits until each result has left L0C",
    )
    route: Route | None = Field(
        default=None,
        description="path of P to the matrix unit: on the chip or through global memory; default: the shortest",
    )
    vector: Literal["fused", "stages", "calls"] | None = Field(
        default=None,
        description=(
            "vector functions: one for each rows stage (fused), separate ones for casts, or one for each "
            "instruction; default: fused"
        ),
    )
    layout: Literal["dn", "nd"] | None = Field(
        default=None,
        description=(
            "a register holds several rows of one key (dn: K Q^T) or several keys of one row (nd); default: dn; with "
            "a mask: nd"
        ),
    )
    chains: int | None = Field(
        default=None, ge=1, le=4, description="accumulators of a row's maximum and sum in dn, 1 or 4; default: 4"
    )


class KernelFields(RegisterFields):
    """The same fields, and fields in which published kernels differ."""

    kernel: KernelName | None = Field(
        default=None,
        description=(
            "published kernel, or your own FILE.py:NAME; default: the kernel of the preset, which the "
            "result names; if the preset's kernel runs only when you name it, a prefill uses CANN's kernel, "
            "with the order and the tile of CANN"
        ),
    )
    barriers: Barriers | None = Field(
        default=None,
        description=(
            "barriers between vector instructions: everywhere, or only where needed; default: the kernel's choice"
        ),
    )
    together: int | None = Field(
        default=None,
        ge=1,
        description="number of tiles that a core passes to another at a time; default: the kernel's choice",
        json_schema_extra=lightest("most"),
    )
    running: Literal["core", "gm"] = Field(
        default="core", description="place of O between tiles: the core, or global memory, with which larger blocks fit"
    )

    @property
    def published(self) -> AscendKernel | None:
        """The published kernel that the fields name."""
        return find_kernel(AscendKernel, self.kernel, "attention")

    @staticmethod
    def stating(decided: AscendDecisions) -> dict[str, object]:
        """Return a kernel's decisions that differ from these fields' defaults, for fields whose default is a value."""
        usual = {n: info.default for n, info in KernelFields.model_fields.items() if info.default is not None}
        return {n: v for n, v in decided._asdict().items() if n in usual and v != usual[n]}

    def in_place_of(self, decided: AscendDecisions) -> AscendDecisions:
        """Return a kernel's decisions, replaced by the tiling fields of the same names that are set or differ from
        their defaults.
        """
        usual, named = KernelFields.model_fields, self.model_fields_set
        values = {n: getattr(self, n) for n in decided._fields if n in usual}
        own = {n: v for n, v in values.items() if v is not None and (n in named or v != usual[n].default)}
        return decided._replace(**own)


class FlashTiling(KernelFields, Blocks):
    """Tiling fields of attention on Ascend."""


class OperatorFields(Tiling):
    """Tile of a framework's products, and rows of a block of the kernels between them."""

    block_m: int = Field(default=128, ge=16, le=128, multiple_of=16, description="rows of a tile of a product")
    block_n: int = Field(default=128, ge=16, le=256, multiple_of=16, description="columns of a tile of a product")
    block_k: int = Field(
        default=128, ge=16, le=128, multiple_of=16, description=("length of the piece of a sum that is loaded at once")
    )
    block_rows: int = Field(default=128, ge=2, description="rows of a block of the element-wise kernels")


def left_alone(device: DeviceSpec) -> frozenset[str]:
    """Return the fields that a search leaves at their defaults: those that describe the code of a kernel instead of the
    sizes of tiles.
    """
    barriers = frozenset({"barriers", "together"}) if has_registers(device) else frozenset()
    return frozenset(RegisterFields.model_fields) - frozenset(VectorFields.model_fields) | barriers
