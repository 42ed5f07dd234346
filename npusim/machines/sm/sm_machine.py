"""Programs for a GPU: blocks on the places of its multiprocessors.

Several blocks are resident at a time; whenever one ends, its place takes the next block of the launch.
A device without a model of time computes values only, by one warp group.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from npusim.config.tiling import tile_fields
from npusim.errors import SpecError, TilingError
from npusim.identity import Itself
from npusim.kernels.attention.call_blocks import as_free, dealt, longest_first, masked_throughout
from npusim.kernels.attention.products import gemm_tiles
from npusim.kernels.form.phase import from_last
from npusim.machines.base import AttentionPace, Machine, program_phase
from npusim.machines.frame import Frame, attention_products
from npusim.machines.sm.block import ResidentBlock
from npusim.machines.sm.core import (
    GROUPS,
    SM,
    SMEM,
    WARPS,
    GroupFields,
    SmCore,
    SmFields,
    SmTiling,
    has_concurrent_warp_groups,
    has_warps,
    left_alone,
    shared_memory_bytes,
    warp_issue,
)
from npusim.machines.sm.groups import (
    GpuGemmFields,
    GpuRowsFields,
    decisions_of,
    group_tiling,
    kernel_tiling,
    library_fields,
    library_order,
    library_tiling,
    operator_tiling,
    plain_tiling,
    rows_tiling,
)
from npusim.machines.sm.lanes import ChainTile, fields_of, fitted, live_lanes, plain_lanes
from npusim.machines.sm.live_registers import has_more
from npusim.machines.sm.sm_pricing import SmPricing
from npusim.machines.sm.specialised import check_layout, specialised_gradients, specialised_tiling
from npusim.program.ir.content import kept_by_blocks
from npusim.program.ir.tile_program import Queue
from npusim.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.config.tiling import Tiling
    from npusim.kernels.attention.call_blocks import BlockOrder
    from npusim.kernels.attention.tiling_mask import MaskKind
    from npusim.kernels.form.phase import Phase, WorkTile
    from npusim.machines.published_kernel import GpuKernel
    from npusim.program.ir.tile import GlobalTensor
    from npusim.program.ir.tile_program import Item, ProgramPhase, TileProgram

#: Number of blocks for each multiprocessor up to which all blocks start longest first, whatever L2 holds: if blocks
#: started in groups of heads, the longest blocks of the last groups would run alone at the end (simulated: 15 to 46 %
#: longer on an A10, a T4 and a V100 with 1 to 5 blocks).
ROUNDS = 8
#: Number of keys of a step if the device's file does not describe registers.
KEYS = 64
EXPONENTIAL = "the bits of the hardware's EX2 are not public: powers of two are assumed to be correctly rounded"
#: Functions of float32 that are instructions of an H200; the architecture on which their bits were measured; the text
#: of the note on them (`FAST`).
HOPPERS, MEASURED_ON = frozenset({"exp2.hopper_ex2", "div.hopper_full"}), "sm_90"
FAST = (
    "{}: the instructions of an H200{}, to which nvcc compiles exp2f and 1 / l times O with --use_fast_math "
    "(FlashAttention-2 and -3: setup.py), and which FlashInfer uses"
)
UNTIMED = "this device has no timing model yet: values only"


#: The rates of the V100, on which the instructions of an iteration take longer than the products do (fitted as in
#: `kernels.declare.cutting`).
IN_LANES = AttentionPace(block=3100, tile=5200, bytes_per_cycle=11.2, residents=2)
#: The rates of the H200, whose warp groups run concurrently.
BESIDE = AttentionPace(block=3300, tile=730, bytes_per_cycle=18.1, residents=2)
#: The meaning of a time in the lanes of m8n8k4: published kernels of such cores take about twice as long
#: (kernel=xformers).
DESIGN = (
    "this kernel is a design, about twice as fast as any published kernel; kernel=xformers predicts the measured one"
)


class SmMachine(Machine):
    """The family of streaming multiprocessors on one device."""

    reshapes_operands = False

    def __init__(self, device: DeviceSpec) -> None:
        super().__init__(device)  # each place is one resident block; resident blocks share a multiprocessor
        self.has_groups = has_concurrent_warp_groups(device)
        self.has_lanes = device.is_timed and not self.has_groups
        self.has_rows_kernels = self.keeps_factors = not self.has_lanes
        self.has_library = has_warps(device)
        self._lanes: SmTiling | None = None  # the tiling of the program that is built

    def fitted(self, tiling: Any, problem: Any, precision: Any) -> tuple[Any, tuple[str, ...]]:
        """Return the tiling with open fields chosen, and a note on it.

        Raises `TilingError` for fields without effect here, and where nothing fits.
        """
        self._lanes = None
        kernel = tiling.published
        if not isinstance(tiling, SmFields):
            fields = type(tiling).model_fields
            return tiling if kernel is None else kernel.chosen(tiling, problem, precision, self.device, fields), ()
        if kernel is not None:
            tiling = kernel.chosen(tiling, problem, precision, self.device, SmFields.model_fields)
            if kernel.decides.alternates:
                dim = kernel.head_dim(problem.dtype, max(problem.head_dim, problem.value_head_dim))
                check_layout(kernel.name, tiling.block_q, tiling.block_kv, dim)
            if kernel.tiles:
                return tiling, ()
        if self.has_lanes:
            tiling, _, room = fitted(ChainTile.asked(problem, precision), tiling, self.device)
            if tiling.residents and tiling.residents > room.blocks:
                raise TilingError(f"residents: {tiling.residents} blocks, but {room}")
            return tiling, ()
        tiling.check_no_lanes(self.device.name, *((GROUPS,) if self.device.is_timed else ()))
        return tiling.model_copy(update={"block_kv": tiling.block_kv or KEYS}), ()

    def declared(self, tiling: Any, problem: Any, _precision: Any) -> Any:
        """Return the tiling with a published kernel's fields, or with the keys of a step of a kernel with warp groups.

        Faults of such a kernel are reported when its program is built.
        """
        if isinstance(tiling, GpuGemmFields) and has_warps(self.device):
            sizes = problem.m, problem.n, problem.k
            return library_fields(sizes, problem.dtype, problem.count, tiling, self.device)
        kernel: GpuKernel | None = tiling.published
        if not isinstance(tiling, SmFields) and kernel is None:
            is_open = isinstance(tiling, GroupFields) and "stages" not in tiling.model_fields_set
            if not (is_open and has_warps(self.device)) or warp_issue(self.device).copies.value != "staged":
                return tiling
            # Without asynchronous copies tiles pass through registers, one at a time.
            return type(tiling).model_construct(
                _fields_set=set(tiling.model_fields_set), **{**dict(tiling), "stages": 1}
            )
        own, named = dict[str, object](), set(tiling.model_fields_set)
        if kernel is not None and kernel.tiles:
            with suppress(TilingError):
                own = {} if kernel.needs(self.device) else kernel.own(problem, self.device)
        elif self.has_groups and tiling.kernel is None and tiling.block_kv is None:
            return type(tiling).model_construct(_fields_set=named, **{**dict(tiling), "block_kv": KEYS})
        own = {n: v for n, v in own.items() if n in type(tiling).model_fields and n not in named}
        return type(tiling).model_construct(_fields_set=named, **{**dict(tiling), **own}) if own else tiling

    def decided(self, tiling: Any, problem: Any = None) -> frozenset[str]:
        """Return the fields that the tiling's kernel decides; if there is a problem, only the fields without a named
        value.
        """
        kernel: GpuKernel | None = tiling.published
        if kernel is None:
            return frozenset()
        decided = kernel.decided((SmFields if isinstance(tiling, SmFields) else type(tiling)).model_fields)
        return decided if problem is None or not decided else decided - kernel.own(problem, self.device).keys()

    def settings(self, tiling: Any, _problem: Any) -> Sequence[Sequence[Mapping[str, object]]]:
        """Return the settings that an attention may try; none if a library's kernel is named (``stages=library``).

        There are also none where a kernel, not the machine, decides the tile.
        """
        fields: type[Tiling] = type(tiling)
        if "block_q" not in tile_fields(fields):
            return ()
        if (kernel := tiling.published) is not None and kernel.tiles:
            return ()
        if self.has_lanes:
            return self.family.settings["lanes"]
        if not self.has_groups or ("stages" in tiling.model_fields_set and tiling.stages is None):
            return ()
        return self.family.settings["staged" if warp_issue(self.device).copies.value == "staged" else "pipelined"]

    def left_alone(self, fields: type[Tiling]) -> frozenset[str]:
        """Return the fields that have no effect on the device, that belong to the compiler, or that have the best
        default.
        """
        return left_alone(self.device) if issubclass(fields, GroupFields) else frozenset()

    @property
    def pace(self) -> AttentionPace:
        """The model of the time of attention on a multiprocessor: concurrent warp groups, or lanes."""
        return BESIDE if self.has_groups else IN_LANES

    def mask_kind(self, _tiling: Any) -> MaskKind:
        """Return how the masks of tiles are computed: lanes compare the indices of their elements."""
        return "computed"

    def mask_block(self, tiling: Any) -> int:
        """Return the number of queries and of keys that a kernel visits and masks together; 0: those of a tile.

        Raises `TilingError` if the kernel's tiles do not divide this number.
        """
        block = decisions_of(tiling.published).mask_block
        for name in ("block_q", "block_kv") if block else ():
            if block % getattr(tiling, name):
                sizes = f"{name}: {getattr(tiling, name)} does not divide the {block}"
                raise TilingError(f"{sizes} of kernel={tiling.published.name}")
        return block

    def ordered(self, phase: Phase, tiling: Any) -> Phase:
        """Return the phase with its blocks in the order of the launch, masked as a compiled loop masks them."""
        kernel: GpuKernel | None = tiling.published
        if has_more(phase) and kernel is not None and kernel.order is not None:
            return kernel.order(phase)
        if attention_products(phase) is None:
            return phase
        is_reverse = decisions_of(kernel).from_last
        if kernel is not None and kernel.order is not None:
            if "launch" not in kernel.leaves:
                return kernel.order(from_last(phase) if is_reverse else phase)
            phase = kernel.order(phase)
        is_compiled = isinstance(tiling, SmFields) and tiling.stages and self.has_groups and not tiling.kernel
        launch = tiling.launch if isinstance(tiling, SmFields) else ""
        deal = cast("BlockOrder", getattr(tiling, "deal", "round_robin"))
        is_long = len(phase.cells) > ROUNDS * self.places
        heads = self.heads_in_l2(phase) if launch == "longest_first" and is_long else None
        is_masked = bool(is_compiled and phase.masks)
        return _ordered(Itself(phase), self.places, deal, launch, heads, is_masked=is_masked, is_reverse=is_reverse)

    def fields_for(self, called: str, phase: Phase, tiling: Any) -> tuple[SmTiling, str]:
        """Return the warps of a phase, and a note; ``called``: the schedule's name."""
        kernel: GpuKernel | None = tiling.published
        if isinstance(tiling, GpuRowsFields):
            return rows_tiling(phase, tiling, self.device)
        if phase.operator and has_warps(self.device):
            return operator_tiling(self.device, phase), ""
        if self.has_groups or kernel is not None:
            fields = tiling if isinstance(tiling, GroupFields) else GroupFields(stages=None)
            if kernel is not None and kernel.decides.alternates and has_more(phase):
                return specialised_gradients(kernel, phase, self.device)
            if kernel is not None and kernel.decides.alternates and attention_products(phase) is not None:
                return specialised_tiling(kernel, phase, self.device)
            return group_tiling(called, phase, fields, self.device)
        return self._in_lanes(phase, tiling) if self.has_lanes else (SmTiling(), "")

    def compiled(self, called: str, phase: Phase, tiling: Any, down: int = 0, _piece: int = 0) -> tuple[SmTiling, str]:
        """Return the warps of a compiled phase, and a note."""
        if self.has_groups and attention_products(phase) is None:
            return kernel_tiling(phase, tiling, self.device, down, called)
        return self.fields_for(called, phase, tiling)

    def _in_lanes(self, phase: Phase, tiling: Any) -> tuple[SmTiling, str]:
        """Return the layout of a phase in the lanes of warps; a phase that merges another's results has the layout of
        that.
        """
        tile = ChainTile.of(phase)
        if tile is None:
            if has_more(phase):
                return live_lanes(
                    phase, tiling if isinstance(tiling, GroupFields) else GroupFields(stages=None), self.device
                )
            if any(s.is_product for s in phase.stages):
                return plain_lanes(phase, tiling), ""
            columns = {what.axes[1] for what in phase.names.values() if len(what.axes) > 1}
            # the parts that are merged were computed earlier
            is_alike = self._lanes is not None and columns <= self._lanes.lanes.keys()
            return (self._lanes if is_alike and self._lanes else plain_tiling(self.device)), ""
        chosen, self._lanes, room = fitted(
            tile, tiling if isinstance(tiling, SmFields) else fields_of(phase, tiling), self.device
        )
        note = f"{room}; tiles of {chosen.block_q} x {chosen.step_keys}"
        if isinstance(tiling, SmFields):
            pairs = "" if chosen.arrangement == "4x1" else f" by {chosen.arrangement}"
            note += (
                f"{pairs}, Q in {'registers' if self._lanes.decided.holds_in_registers else 'shared memory'}; {DESIGN}"
            )
        return self._lanes, note

    def product(
        self, label: str, a: GlobalTensor, b: GlobalTensor, c: GlobalTensor, tiling: Any, **how: Any
    ) -> Sequence[Phase | tuple[Phase, SmTiling]]:
        """Return C = A B, or A B^T, of every head, as a library does it."""
        how.pop("role", None)  # the last of the accumulated tiles is the result
        fields, sizes = tiling if isinstance(tiling, GpuGemmFields) else GpuGemmFields(), (c.rows, c.cols, a.cols)
        fields = library_fields(sizes, a.fmt, c.batch * c.heads, fields, self.device)
        of_product = library_tiling(a, b, c, fields, self.device)
        m, n, k, splits = (getattr(fields, name) for name in ("block_m", "block_n", "block_k", "splits"))
        bands = library_order(c, fields)
        first, *rest = gemm_tiles(a, b, c, (m, n, k), label=label, splits=splits, bands=bands, **how)
        parts, blocks = plural(splits, "split"), plural(of_product.residents, "block")
        note = f"tiles of {m} x {n}, {splits} {parts} of k, {of_product.residents} resident {blocks}"
        first = replace(first, notes=(f"{label}: {note}",))
        return [(first, of_product), *((phase, plain_tiling(self.device)) for phase in rest)]

    def build(
        self, name: str, phases: Iterable[tuple[Phase, SmTiling]], flops: int, notes: tuple[str, ...] = ()
    ) -> TileProgram:
        """Return the program.

        Raises :class:`~npusim.errors.TilingError` (or its ``BufferOverflowError``) where a phase does not
        fit a memory, `SpecError` for a phase without warps on a device that times them.
        """
        listed = list(phases)
        most = max(tiling.residents * tiling.decided.groups for _, tiling in listed)
        has_groups = any(tiling.has_groups for _, tiling in listed)
        core = SmCore(self.device, most * self.device.memory.gm.capacity_bytes.value, has_groups=has_groups)
        queues: dict[str, Queue] = {}
        built = []
        for phase, tiling in listed:
            if core.has_warps and not tiling.decided.warps:
                raise SpecError(
                    f"{self.device.name}: {name} has no layout of its tiles in a warp's lanes, which this device's "
                    "timing needs; use flash, pasa or split_kv, which have one, or h200, which runs this schedule"
                )
            core.allocator.start_phase(f"{phase.name} " if phase.is_named else "")
            frame = Frame(phase)
            residents = [ResidentBlock(i, frame, core, tiling) for i in range(tiling.residents)]
            core.allocator.check()
            has_products = any(stage.is_product for stage in phase.stages)
            takes_turns = tiling.decided.code is not None
            takes_turns |= has_products and tiling.has_groups and tiling.decided.generation == "wgmma"
            for number, resident in enumerate(residents):
                storer, turn = resident.places.storer, takes_turns * number
                queues |= {q: Queue(q, SM, WARPS, q, turn, is_awaited=q != storer) for q in resident.queues}
            built.append(self._phase(frame, tiling, residents))
        rows = ((phase, r.attributes.variant) for phase, _ in listed for s in phase.stages for r in s.rows)
        variants = {(phase.compiled, variant) for phase, variant in rows if variant}
        if self.device.is_timed and any(variant == "exp2.correct" for _, variant in variants):
            notes = (*notes, EXPONENTIAL)
        if fast := sorted({v for is_compiled, v in variants if not is_compiled and v in HOPPERS}):
            assumed = "" if self.device.architecture == MEASURED_ON else f", assumed for {self.device.name}"
            notes = (*notes, FAST.format(", ".join(fast), assumed))
        notes = (*(() if self.device.is_timed else (UNTIMED,)), *notes)
        rooms = [replace(t.occupancy, blocks=t.residents // t.parts) for _, t in listed if t.occupancy]
        occupied = [room.occupied() for room in rooms]
        # one block per core, whose tiles use the whole shared memory of the core
        if any(t.decided.alternates for _, t in listed):
            occupied.append({SMEM: (core.allocator.peak_bytes[SMEM], shared_memory_bytes(self.device))})
        of_program = [phase for phase, _ in listed], built, queues.values(), core.allocator
        counted: dict[str, Any] = {
            "consumers": max((t.decided.consumers for _, t in listed), default=0),
            "clears": sum(t.decided.clears(is_masked=bool(phase.masks)) for phase, t in listed),
            "has_own_rows": all(t.decided.code is not None or t.has_own_rows for _, t in listed),
            "goes_on": all(t.decided.code is not None and t.decided.code.goes_on for _, t in listed),
            "is_in_step": all(t.decided.state_loop is not None for _, t in listed),
            "occupied": {n: max(of.get(n, (0, 0)) for of in occupied) for of in occupied for n in of},
            "occupancy": rooms[-1] if rooms else None,
        }
        return self.program(name, *of_program, SmPricing, flops=flops, notes=notes, **counted)

    def _phase(self, frame: Frame, tiling: SmTiling, residents: list[ResidentBlock]) -> ProgramPhase:
        blocks, shares = frame.phase.cells, tuple[tuple[int, ...], ...]()
        if self.device.is_timed:
            blocks, shares = _as_free(Itself(blocks), self.device.group_count.value, tiling.residents)

        def items(block: WorkTile) -> Iterator[Item]:
            return residents[block.place].items(block)

        return program_phase(frame, items, views=frame.views, blocks=blocks, dealt=shares)


@kept_by_blocks(lambda ordered, *_: len(ordered.cells))
def _ordered(
    phase: Itself, places: int, deal: BlockOrder, launch: str, heads: int | None, *, is_masked: bool, is_reverse: bool
) -> Phase:
    """Return a phase with its blocks in another order, all masked or not; all tilings with the same order share one
    phase.
    """
    first: Phase = from_last(phase.thing) if is_reverse else phase.thing
    blocks = dealt(first.cells, places, deal)
    blocks = tuple(map(masked_throughout, blocks)) if is_masked else blocks
    blocks = tuple(longest_first(blocks, heads)) if launch == "longest_first" else blocks
    return first if blocks is first.cells else replace(first, cells=blocks)


@kept_by_blocks(lambda _order, blocks, *_: len(blocks.thing))
def _as_free(blocks: Itself, cores: int, residents: int) -> tuple[Sequence[WorkTile], tuple[tuple[int, ...], ...]]:
    return as_free(blocks.thing, cores, residents)
