"""Programs for an Ascend device: phases of an algorithm, one after the other on one core group."""

from __future__ import annotations

from dataclasses import fields as attributes
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.errors import FlagError, TilingError
from npusim.formats import stored_format
from npusim.identity import Itself
from npusim.kernels.attention.call_blocks import dealt, in_bands
from npusim.kernels.attention.products import copy, gemm
from npusim.machines.ascend.ascend_pricing import AscendPricing
from npusim.machines.ascend.group import PING_PONG, SLICE_ELEMENTS, AscendGroup, has_registers
from npusim.machines.ascend.loop_parts import Parts
from npusim.machines.ascend.phase_writer import AscendPhase
from npusim.machines.ascend.product_plan import (
    AscendTiling,
    GemmFields,
    KernelFields,
    RegisterFields,
    RowsFields,
    VectorFields,
    gemm_tiling,
    left_alone,
    piece_plan,
    slice_elements,
)
from npusim.machines.ascend.unaligned_rows import COLUMNS_REARRANGED, ROWS_REARRANGED, is_off, off_rows
from npusim.machines.base import AttentionPace, Machine
from npusim.machines.decisions import AscendDecisions, VectorCode
from npusim.machines.frame import Frame
from npusim.machines.published_kernel import AscendKernel
from npusim.machines.published_kernels import find_kernel, kernels
from npusim.machines.transfers import BLOCK_BYTES
from npusim.program.ir.check import check_flags
from npusim.program.ir.content import kept_by_blocks
from npusim.program.ir.tile import GlobalTensor
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.config.problem import AnyProblem
    from npusim.config.tiling import Tiling
    from npusim.kernels.attention.call_blocks import BlockOrder
    from npusim.kernels.form.phase import Phase
    from npusim.program.ir.buffers import Ring
    from npusim.program.ir.tile_program import TileProgram

#: Weights for the cache of phases: the number of blocks that count as one, and the weight of a phase that shares its
#: blocks with other phases.
SHARE = 64


def attention_fields(tiling: Tiling) -> KernelFields:
    """Return a tiling's fields of attention, with defaults where it has no such field."""
    if isinstance(tiling, KernelFields):
        return tiling
    own = {n: value for n, value in dict(tiling).items() if n in KernelFields.model_fields}
    return KernelFields.model_construct(**{"depth": 1, **own})


class AscendMachine(Machine):
    """The Ascend family on one device."""

    slice_elements = SLICE_ELEMENTS
    #: The rates of the 910B2 and the 950, fitted as described in `npusim.kernels.declare.cutting`.
    pace = AttentionPace(block=4000, tile=700, bytes_per_cycle=100)

    def __init__(self, device: DeviceSpec) -> None:
        super().__init__(device)
        self.group = AscendGroup(device)
        self.row_cores = len(self.group.vector_cores)

    @cached_property
    def usual(self) -> AscendKernel:
        """The family's usual kernel."""
        return kernels(AscendKernel)[self.family.usual]

    def preset_kernel(self, precision: object) -> AscendKernel:
        """Return the published kernel of a preset; the family's usual kernel if the preset names none."""
        return find_kernel(AscendKernel, getattr(precision, "kernel", None)) or self.usual

    def fitted(self, tiling: Any, problem: Any, precision: object) -> tuple[Any, tuple[str, ...]]:
        """Return the tiling with open fields chosen, and a note on the kernel that it follows."""
        tiling = self.declared(tiling, problem, precision)
        if isinstance(tiling, GemmFields) and tiling.nd2nz == "vector" and "nd2nz" not in tiling.model_fields_set:
            off = " and ".join(off_rows(problem))
            return tiling, (
                f"nd2nz=vector: rows of {off} are not aligned to 256 bytes; vector cores rearrange them first, as "
                "in CANN",
            )
        if isinstance(tiling, RegisterFields):
            tiling = self._coded(tiling)
            if tiling.pipeline == "core" and tiling.order != "rolling":
                raise TilingError(
                    f"pipeline=core: with order={tiling.order} the pipeline ends with each block; "
                    "use order=rolling, which continues"
                )
        kernel: AscendKernel | None = tiling.published
        if kernel is not None and kernel.of == "recurrence":
            if has_registers(self.device):
                raise TilingError(
                    f"kernel={tiling.kernel}: this kernel is for vector units that read and write UB, such as "
                    f"ascend_910b2's; those of {self.device.name} work on registers"
                )
            return tiling, (f"kernel={tiling.kernel}: {kernel.whose}",)
        if "kernel" not in type(tiling).model_fields or not issubclass(type(tiling), VectorFields):
            return tiling, ()
        if has_registers(self.device):
            return self._on_registers(tiling)
        kernel = kernel or self.preset_kernel(precision)
        name = tiling.kernel or kernel.name
        return tiling.model_copy(update={"kernel": name}), (f"kernel={name}: {kernel.whose}",)

    def settings(self, tiling: Any, problem: AnyProblem | None) -> Sequence[Sequence[Mapping[str, object]]]:
        """Return the family's settings; for a named published kernel only the order in which it assigns blocks."""
        settings = self.family.settings["latent" if getattr(problem, "values_in_keys", False) else "attention"]
        if "kernel" in tiling.model_fields_set and (kernel := tiling.published) is not None:
            return ([{"deal": kernel.deal}],)
        if has_registers(self.device):  # CANN's rows and keys are tried for other kernels too
            return ({n: self.usual.register_tile[n] for n in ("block_q", "block_kv")},), *settings
        return settings

    def declared(self, tiling: Any, problem: AnyProblem | None, precision: object) -> Any:
        """Return the tiling with this machine's declared values for fields without a named value.

        A kernel without a published tile has CANN's tile and order, whatever fields of its tile are named; with
        registers, slices are whole registers in any case.  A product is CANN's too: vector cores convert unaligned rows
        to fractals.
        """
        if problem is None:
            return tiling
        product, attention = problem.product, problem.attention
        if product is not None and isinstance(tiling, GemmFields) and tiling.nd2nz is None and off_rows(product):
            values = {**dict(tiling), "nd2nz": "vector"}
            return type(tiling).model_construct(_fields_set=set(tiling.model_fields_set), **values)
        if attention is None or not isinstance(tiling, VectorFields):
            return tiling
        known, fields = type(tiling).model_fields, dict[str, object]()
        is_open = "kernel" in known and known["kernel"].default is None
        if has_registers(self.device):
            fields = {
                "vector_rows": self.usual.register_tile["vector_rows"],
                "pipeline": self.usual.fields["pipeline"],
                "barriers": None,
            }
            fields |= {**self.usual.fields, **self.usual.register_tile} if is_open else {}
        elif is_open and attention_fields(tiling).kernel is None:
            preset = self.preset_kernel(precision)
            is_decode = attention.seq_q < self.group.fractal
            is_cut = {"splits", "split_keys"} & tiling.model_fields_set or attention.values_in_keys
            if preset.is_by_name and is_decode and "splits" in known and not is_cut:
                fields = dict(self.usual.decode(attention, self.places))  # the order of the preset's kernel is unknown
            elif preset.is_by_name and not is_decode:
                keys = dict(tiling if "block_kv" in tiling.model_fields_set else self.usual.memory_tile)["block_kv"]
                fields = dict(self.usual.prefill(attention, keys))
        elif (kernel := attention_fields(tiling).published) is not None:
            fields = KernelFields.stating(kernel.decides)
        if attention_fields(tiling).order != "rolling":
            fields.pop("pipeline", None)
        named = tiling.model_fields_set
        result = {n: value for n, value in fields.items() if n in known and n not in named}
        return type(tiling).model_construct(_fields_set=set(named), **{**dict(tiling), **result})

    def by_tile(self, tiling: Tiling, precision: object) -> Mapping[str, object]:
        """Return the kernel if a tiling states the tile but no kernel: the precision's kernel, or a kernel that calls
        ND2NZ.
        """
        known, named = type(tiling).model_fields.keys(), tiling.model_fields_set
        if "nd2nz" in known - named and named & {"block_m", "block_n", "block_k"}:
            return {"nd2nz": "mte2"}
        kernel, is_open = getattr(precision, "kernel", ""), "kernel" in known - named and not has_registers(self.device)
        return {"kernel": kernel} if kernel and is_open and named & {"block_q", "block_kv"} else {}

    def _on_registers(self, tiling: Tiling) -> tuple[Any, tuple[str, ...]]:
        """Return the tiling of CANN's kernel; raise `TilingError` for fields of kernels whose vector stages work from
        UB to UB.
        """
        for name in ("kernel", "barriers", "together"):
            if name in tiling.model_fields_set and getattr(tiling, name) not in (None, self.usual.name):
                raise TilingError(
                    f"{name}={getattr(tiling, name)}: the vector unit of {self.device.name} works on registers, "
                    "without barriers within a function; the field is for devices such as ascend_910b2"
                )
        result = tiling.model_copy(update={"barriers": None, "kernel": self.usual.name})
        return result, (f"kernel={self.usual.name}: CANN's kernel, because its vector functions need no barriers",)

    def _coded(self, tiling: RegisterFields) -> RegisterFields:
        """Return the tiling with its choices of vector functions, where the unit has registers."""
        if not has_registers(self.device):
            chosen = [
                f"{name}={value}" for name in self.usual.register_code if (value := getattr(tiling, name)) is not None
            ]
            if chosen:
                raise TilingError(
                    f"{chosen[0]}: the vector unit of {self.device.name} reads and writes UB, without registers; "
                    "the field is for devices whose file has `style: registers`, such as ascend_950"
                )
            return tiling
        chains = self.usual.register_code["chains"]
        if tiling.chains not in (None, 1, chains):
            raise TilingError(f"chains: {tiling.chains}; allowed: 1, {chains}")
        return tiling

    def left_alone(self, fields: type[Tiling]) -> frozenset[str]:
        """Return the fields that describe the code of a kernel instead of the sizes of tiles."""
        return left_alone(self.device) if issubclass(fields, VectorFields) else frozenset()

    def ordered(self, phase: Phase, tiling: Tiling) -> Phase:
        """Return the phase with its blocks in the order in which they are assigned to core groups."""
        if not _is_attention(phase) or (deal := attention_fields(tiling).deal) == "round_robin":
            return phase
        return _dealt(Itself(phase), self.places, deal, self.heads_in_l2(phase))

    def fields_for(self, _called: str, phase: Phase, tiling: Tiling) -> tuple[AscendTiling, str]:
        """Return how a phase runs: its slices of rows, the number of tiles by which stages run ahead, and the tiles of
        its products.
        """
        t = attention_fields(tiling)
        decided = self._decided(phase, tiling, t)
        if not _is_attention(phase):
            if hasattr(tiling, "block_k") and any(s.is_product for s in phase.stages):
                return gemm_tiling(phase, tiling, self.group), ""
            elements = phase.slice_elements or SLICE_ELEMENTS
            buffers = tiling.buffers if isinstance(tiling, RowsFields) else 1 if decided.one_slot else PING_PONG
            return AscendTiling(elements=elements, buffers=buffers, decided=decided), ""
        share, width = self.group.largest_share(phase.sizes[phase.row_axis]), phase.sizes[phase.loop_axis]
        elements = phase.slice_elements or SLICE_ELEMENTS
        states = [n for n, what in phase.names.items() if what.start is not None and len(what.axes) > 1]
        fields = AscendTiling(
            elements=slice_elements(t.vector_rows, share, width, elements),
            ahead=0 if phase.is_recurrent else _ahead(decided, t.depth),
            spilled=tuple(states) if t.running == "gm" else (),
            is_work_list=t.deal == "work_list",
            decided=decided,
        )
        is_open = decided.code is not None and decided.code.layout == self.usual.masked_layout and t.layout is None
        return fields, (
            "layout=nd: with a mask a register holds keys of one row; this is an assumption about CANN's kernel"
        ) if is_open else ""

    def compiled(self, called: str, phase: Phase, tiling: Tiling, _down: int = 0, piece: int = 0) -> tuple[Any, str]:
        """Return how a compiled phase runs: its products are divided into the pieces of k that it loads at once."""
        fields, note = self.fields_for(called, phase, tiling)
        products = [s for s in phase.stages if s.is_product]
        if not piece or len(products) != 1:
            return fields, note
        plan = piece_plan(Frame(phase), products[0], self.group, piece)
        return replace(fields, plans={products[0].name: plan}), note

    def in_turns(self, called: str, phase: Phase, tiling: Tiling) -> AscendTiling | None:
        """Return how a phase runs if parts of its loop must take turns tile by tile; None if they need not."""
        ahead, _ = self.fields_for(called, phase, tiling)
        found = None
        for fields in (ahead, replace(ahead, ahead=0)):
            try:
                Parts(Frame(phase), fields).check()
            except TilingError:
                continue
            found = fields
            break
        return None if found is ahead else found

    def column(self, fmt: str) -> int:
        """Return the number of elements in 32 bytes, which the vendor's layouts call C0."""
        fmt_ = stored_format(fmt)
        return BLOCK_BYTES * fmt_.per_byte // fmt_.size_bytes

    def product(
        self, label: str, a: GlobalTensor, b: GlobalTensor, c: GlobalTensor, tiling: Tiling, **more: Any
    ) -> Any:
        """Return C = A B, or A B^T, of every head, after the rearrangement of its operands in the same launch.

        A block is a core's share of C; by default, a tile.
        """
        phases, operands = [], {"a": a, "b": b}
        for n, t in operands.items() if isinstance(tiling, GemmFields) and tiling.nd2nz == "vector" else ():
            if is_off(t.cols, t.fmt) and not t.column:
                moved = replace(t, name=f"{t.name}_nz", role="workspace", column=self.column(t.fmt))
                phases.append(copy(t, moved, self.row_cores * ROWS_REARRANGED, moved.name, COLUMNS_REARRANGED))
                operands[n] = moved
        rows, cols = (getattr(tiling, f"single_{n}", None) or getattr(tiling, f"block_{n}") for n in "mn")
        phases.append(gemm(label, operands["a"], operands["b"], c, (rows, cols), **more))
        # source: mat_mul_v3's kernels (ProcessNDtoNZ): vector cores rearrange, synchronise (SyncAll), and set a flag
        together = self._rows_together(tiling, b, ceil_div(c.rows, rows)) if isinstance(tiling, GemmFields) else 1
        return [
            replace(phase, is_joined=n > 0, cells=in_bands(phase.cells, together) if together > 1 else phase.cells)
            for n, phase in enumerate(phases)
        ]

    def _rows_together(self, tiling: GemmFields, b: GlobalTensor, rows: int) -> int:
        """Return the rows of tiles of C that successive blocks compute column by column; ``rows``: of all C.

        A wave of blocks along C reads the whole of B again for each row of tiles, from memory if L2 does not hold B.
        """
        is_beyond = stored_format(b.fmt).bytes_of(b.rows * b.cols) > self.device.memory.l2.capacity_bytes.value
        return tiling.swizzle or (rows if is_beyond else 1)

    def _decided(self, phase: Phase, tiling: Any, t: KernelFields) -> AscendDecisions:
        """Return the decisions of a phase's kernel; in an attention the tiling's fields replace them."""
        kernel: AscendKernel | None = tiling.published
        decided, is_attention = AscendDecisions(code=self._code(t, phase)), _is_attention(phase)
        has_product = any(s.is_product for s in phase.stages)
        if kernel is not None and decided.code is None and (has_product or phase.name in kernel.by_phase):
            decided = kernel.of_phase(phase.name) if is_attention or kernel.of == "recurrence" else decided
        if not is_attention:
            return decided
        own, decided = decided.barriers, t.in_place_of(decided)
        return decided if decided.barriers == own else decided._replace(extra=False)  # `extra` belongs to the kernel

    def _has_flags(self, rings: Sequence[Ring]) -> bool:
        """Return whether the device has the flags of a phase's rings."""
        if self.device.flags is None:
            return True
        try:
            check_flags(rings, self.device.flags)
        except FlagError:
            return False
        return True

    def _code(self, t: KernelFields, phase: Phase) -> VectorCode | None:
        """Return the form of rows for a unit with registers: that of the usual kernel by default."""
        if not has_registers(self.device):
            return None
        usual = {**self.usual.register_code, **({"layout": self.usual.masked_layout} if phase.masks else {})}
        return VectorCode(*(getattr(t, name) or value for name, value in usual.items()))

    def build(
        self, name: str, phases: Iterable[tuple[Phase, AscendTiling]], flops: int, notes: tuple[str, ...] = ()
    ) -> TileProgram:
        """Return the program; in a phase that would need too many flags with two slots for each operand, operands have
        one slot.
        """
        listed, said = list(phases), list(notes)
        while True:
            result = _written(Itself(self.device), tuple([_InAnyOrder(*both) for both in listed]))
            if isinstance(result, TilingError):
                raise result.with_traceback(None)
            short = [
                i
                for i, (phase, tiling) in enumerate(listed)
                if _may_shrink(phase, tiling) and not self._has_flags(result.rings[i])
            ]
            if not short:
                break
            for i in short:
                phase, tiling = listed[i]
                listed[i] = phase, replace(tiling, decided=tiling.decided._replace(one_slot=True), buffers=1)
                said.append(
                    f"{phase.name}: its operands have one slot each: two slots would need more flags than "
                    "the device has"
                )
        for writer, (phase, _) in zip(result.writers, listed, strict=True):
            for what, slots in writer.joint_slots.items():
                said.append(
                    f"{phase.name}: {sum(len(slot.offsets) for slot in slots)} {what} share {len(slots)} "
                    f"slot{'s' * (len(slots) > 1)}: one slot each would need more flags than the device has"
                )
        built = [writer.build(phase.cells) for writer, (phase, _) in zip(result.writers, listed, strict=True)]
        of_program = [phase for phase, _ in listed], built, result.group.queues(), result.group.allocator
        is_attention = any(tiling.decided.is_vendors for _, tiling in listed)
        return self.program(name, *of_program, AscendPricing, flops=flops, notes=tuple(said), is_attention=is_attention)


class _InAnyOrder:
    """Key of a phase and its tiling; phases that differ only in the order of their blocks have equal keys."""

    __slots__ = ("key", "phase", "tiling")

    def __init__(self, phase: Phase, tiling: AscendTiling) -> None:
        self.phase, self.tiling = phase, tiling
        others = [id(getattr(phase, f.name)) for f in attributes(phase) if f.name != "cells"]
        # Identities of objects; a reference to each object is stored here.
        self.key = (*others, frozenset(map(id, phase.cells)), len(phase.cells), tiling.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InAnyOrder) and other.key == self.key


class _Written(NamedTuple):
    """Phases on one core group, and the rings of each."""

    group: AscendGroup
    writers: list[AscendPhase]
    rings: list[list[Ring]]


@kept_by_blocks(lambda _written, _device, phases: sum(SHARE + len(p.phase.cells) // SHARE for p in phases))
def _written(device: Itself, phases: tuple[_InAnyOrder, ...]) -> _Written | TilingError:
    """Return phases in sequence on a core group, for any order of their blocks, or the reason why they do not fit."""
    group = AscendGroup(device.thing)
    writers: list[AscendPhase] = []
    rings: list[list[Ring]] = []
    try:
        for phase, tiling in ((p.phase, p.tiling) for p in phases):
            first = len(group.allocator.rings)
            group.allocator.start_phase(f"{phase.name} " if phase.is_named else "")
            writers.append(AscendPhase(group, phase, tiling))
            rings.append(group.allocator.rings[first:])
    except TilingError as error:
        return error
    return _Written(group, writers, rings)


@kept_by_blocks(lambda ordered, *_: len(ordered.cells))
def _dealt(phase: Itself, places: int, deal: BlockOrder, heads: int | None) -> Phase:
    ordered: Phase = replace(phase.thing, cells=dealt(phase.thing.cells, places, deal, heads))
    return ordered


def _ahead(decided: AscendDecisions, depth: int) -> int:
    """Return the number of tiles by which stages run ahead: in a group, the stages before its last."""
    return {"groups": max(0, depth - 1), "serial": 0}.get(decided.order, depth)


def _may_shrink(phase: Phase, tiling: AscendTiling) -> bool:
    """Return whether operands have the usual two slots and no field of the tiling reduces them."""
    return not tiling.decided.one_slot and tiling.buffers == PING_PONG


def _is_attention(phase: Phase) -> bool:
    return bool(phase.loop_axis) and any(s.is_product for s in phase.stages)
