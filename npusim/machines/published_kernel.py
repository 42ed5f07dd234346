"""The choices of a published kernel as one value; each kernel is a file of the library or of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

from npusim.config.core_units import WarpIssue
from npusim.config.load import list_devices, load_device
from npusim.config.tiling import build_tiling
from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.kernels.attention.split_rules import call_of
from npusim.kernels.form.phase import Phase
from npusim.late_methods import dataclass
from npusim.machines.decisions import AscendDecisions, Charge, GpuDecisions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from npusim.config.device import DeviceSpec
    from npusim.config.problem import KernelProblem, Problem
    from npusim.kernels.attention.call_blocks import BlockOrder
    from npusim.kernels.attention.split_rules import Parts, SplitCall

#: What a published kernel computes.
Computes = Literal["attention", "recurrence"]
#: Return types of a kernel's functions, by field; charges are checked where they are applied.
RETURNS: Mapping[str, type] = MappingProxyType(
    {
        **dict.fromkeys(("variants", "fields"), Mapping),
        **dict.fromkeys(("needs", "refuses"), str),
        **dict.fromkeys(("cut_tile", "split_rule", "charges"), tuple),
        **dict.fromkeys(("packs", "is_torchs"), bool),
        "order": Phase,
    }
)


class KernelTile(NamedTuple):
    """Rows and keys of a block, and its warps; 0 warps: other fields state the number."""

    rows: int
    keys: int
    warps: int = 0


#: Tiles without a mask, with a causal and with any other mask, by the computed head dim; other head dims are padded to
#: it.
Layout = tuple[KernelTile, KernelTile, KernelTile]
Layouts = Mapping[int, Layout]


def layout(rows: int, plain: int, causal: int = 0, masked: int = 0, *, warps: int = 0) -> Layout:
    """Return tiles of ``rows`` by keys: without a mask, with a causal one (0: ``plain``), and with any other mask (0:
    as with a causal mask).
    """
    first, second, third = (KernelTile(rows, n, warps) for n in (plain, causal or plain, masked or causal or plain))
    return first, second, third


class KernelUse(NamedTuple):
    """One phase of a kernel. Charges of the kernel depend on the phase.

    rows, keys
        Rows and keys of a complete tile.
    head_dim, value_dim
        Head sizes that the kernel computes, with padding.
    residents
        Resident blocks of a core.
    """

    phase: Phase
    device: DeviceSpec
    rows: int
    keys: int
    head_dim: int
    value_dim: int
    residents: int = 1

    @property
    def is_ragged(self) -> bool:
        """Whether rows or keys are not multiples of a tile, so that a kernel must test for their ends."""
        sizes, phase = self.phase.sizes, self.phase
        rows, keys = sizes[phase.row_axis], sizes[phase.loop_axis]
        return any(b.rows % rows or any(r.cols % keys for r in b.runs) for b in phase.cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedKernel:
    """Fields that all published kernels have.

    name, whose
        Value of the option ``kernel=`` that selects the kernel; the author, as reports show it.
    computes
        Names of the schedules for which ``kernel=`` accepts the kernel; empty: every schedule with the field
        ``kernel``.
    decides
        Decisions of the kernel, the named tuple of its core family.
    of
        ``attention``, or ``recurrence``, which computes chunk by chunk.
    is_fused
        Whether one multiply-add scales a score and subtracts the maximum before the exponential, as in FlashAttention's
        libraries (flash_attn/src/softmax.h and hopper/softmax.h, scale_apply_exp2). PyTorch builds FlashAttention-2
        with UNFUSE_FMA, which is exponent=twice (its issue 121558; measured: 2.11 on an H100, where the factor of
        rescaling is exp2((m - m') c), with unscaled maxima).
    output_of_8_bits
        Format of the output if inputs have 8 bits (hopper/flash_api.cpp, out_type); empty: the format of the inputs.
    """

    name: str
    whose: str
    computes: tuple[str, ...] = ()
    decides: AscendDecisions | GpuDecisions
    of: Computes = "attention"
    is_fused: bool = False
    output_of_8_bits: str = ""
    #: Name of the core family on which kernels of this class run.
    family: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.whose


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernel(PublishedKernel):
    """Choices of an attention kernel on a GPU, apart from its formats.

    decides
        Decisions of the kernel that hold for every tile and device.
    tiles
        Layouts of tiles by the bytes of an element, then by head dim. Empty: the kernel runs any tile.
    variants
        Function that returns layouts which replace ``tiles`` for a problem on a device.
    fields
        Function that returns the tiling fields that the kernel decides on a device in addition to its tile.
    leaves
        Tiling fields that the kernel leaves open.
    needs
        Function that returns the reason why the kernel does not run on a device; empty: it runs.
    refuses
        Function that returns the reason why the kernel does not run for a problem in some formats; empty: it runs.
    split_rule
        Rule that splits keys. None: the kernel does not split them.
    cut_tile
        Function that returns the tile for split keys. None: the same tile as for other keys.
    has_cut_pages
        Whether calls with pages have the tile for split keys even if their keys are not split.
    has_unseen_parts
        Whether a part is also a block if no query of the block sees a key of it.
    merge_rows
        Rows of a block of the merge; 0: the default.
    packs
        Function that returns whether the query heads of one KV head are rows of one block, for a number of rows.
    order
        Function that returns a phase with its blocks in the kernel's order. None: the order that the tiling states. A
        kernel that leaves ``launch`` open has its own order until a tiling states another.
    is_torchs
        Function that returns whether PyTorch's scaled_dot_product_attention selects the kernel for a problem, on
        devices where the kernel runs.
    turn_dims
        Head dims, by the bytes of an element, at which alternating groups take turns.
    charges, merge_charges
        Costs of the kernel and of the merge of its splits in addition to their steps, on devices whose file has these
        constants.
    gradients
        Kernel of the same author that computes the gradients. None: the author has none.
    sum_block
        Of a kernel of gradients: warps and elements of a block that converts the sum of dQ, each lane of which waits
        for 16 bytes before it loads more. None: not known; all loads of a block are in flight together.
    """

    family: ClassVar[str] = "nvidia"
    #: Fields of a tile's rows and keys.
    edges: ClassVar[tuple[str, str]] = ("block_q", "block_kv")
    decides: GpuDecisions = field(default_factory=GpuDecisions)
    tiles: Mapping[int, Layouts] = field(default_factory=dict)
    variants: Callable[[Problem, DeviceSpec], Layouts] = lambda _problem, _device: {}
    fields: Callable[[DeviceSpec], Mapping[str, object]] = lambda _device: {}
    leaves: frozenset[str] = frozenset()
    needs: Callable[[DeviceSpec], str] = lambda _device: ""
    refuses: Callable[[Problem, Any], str] = lambda _problem, _precision: ""
    split_rule: Callable[[SplitCall], Parts] | None = None
    cut_tile: Callable[[Problem], KernelTile] | None = None
    has_cut_pages: bool = False
    has_unseen_parts: bool = False
    merge_rows: int = 0
    packs: Callable[[Problem, int], bool] = lambda _problem, _rows: False
    order: Callable[[Phase], Phase] | None = None
    is_torchs: Callable[[Problem], bool] = lambda _problem: False
    turn_dims: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    charges: Callable[[KernelUse], Iterable[Charge]] = lambda _use: ()
    merge_charges: tuple[Charge, ...] = ()
    gradients: GradientKernel | None = None
    sum_block: tuple[int, int] | None = None

    def unmodelled(self, _name: str, _value: object) -> str:
        """Return known facts about a field's value that apply to the kernel but are not modelled; empty if there are
        none.
        """
        return ""

    def head_dim(self, fmt: str, dim: int) -> int:
        """Return the head dim that the kernel computes; raise `TilingError` if it has no layout for ``dim``."""
        layouts = self.tiles.get(get_format(fmt).size_bytes, {})
        if not any(d >= dim for d in layouts):
            most = f"the largest is {max(layouts)}" if layouts else "none in this format"
            raise TilingError(f"kernel: {self.name} has no layout for head_dim {dim} in {fmt}; {most}")
        return min(d for d in layouts if d >= dim)

    def tile(self, problem: Problem, device: DeviceSpec) -> KernelTile:
        """Return the kernel's tile for keys that are not split; raise `TilingError` if it has no layout."""
        dim = self.head_dim(problem.dtype, max(problem.head_dim, problem.value_head_dim))
        if problem.page and self.has_cut_pages and self.cut_tile is not None:
            return self.cut_tile(problem)
        layouts = {**self.tiles[get_format(problem.dtype).size_bytes], **self.variants(problem, device)}
        tile = layouts[dim][int(problem.causal) if problem.seen.is_plain else 2]
        if not isinstance(tile, KernelTile):
            raise TilingError(
                f"kernel: {self.name} has {tile!r} for head_dim {dim}; a tile must be a result of layout(...)"
            )
        return tile

    def cuts(self, problem: Problem, tile: tuple[int, int], device: DeviceSpec) -> bool:
        """Return whether the kernel's rule splits the keys of a call among blocks of ``tile``."""
        call = call_of(problem, *tile, device.group_count.value)
        return self.split_rule is not None and any(len(parts) > 1 for parts in self.split_rule(call))

    def own(self, problem: Problem, device: DeviceSpec) -> dict[str, object]:
        """Return the fields that the kernel decides for a problem; if its rule splits keys, the tile is the tile for
        split keys.
        """
        own = self._whole(problem, device)
        if self.cut_tile is not None and self.cuts(problem, (cut := self.cut_tile(problem))[:2], device):
            own |= self._fields_of(cut)
        return own

    def _whole(self, problem: Problem, device: DeviceSpec) -> dict[str, object]:
        return {**self._fields_of(self.tile(problem, device)), **self.fields(device)}

    def _fields_of(self, tile: KernelTile) -> dict[str, object]:
        rows, keys = self.edges
        return {rows: tile.rows, keys: tile.keys, **({"warps": tile.warps} if tile.warps else {})}

    def decided(self, known: Collection[str]) -> frozenset[str]:
        """Return the ``known`` fields that the kernel decides; a tiling that names another value is refused."""
        return frozenset(known) - self.leaves - {"kernel"} if self.tiles else frozenset()

    def paid(self, use: KernelUse) -> tuple[Charge, ...]:
        """Return the kernel's charges; raise `TilingError` if a charge has another type or an unknown event."""
        charges, times = tuple(self.charges(use)), {"block", "tile", "score"}
        for charge in charges:
            if not isinstance(charge, Charge) or not 0 <= charge.times < inf:
                raise TilingError(
                    f"kernel: {self.name} has the charge {charge!r}; "
                    "charges= must return Charges whose times is 0 or more"
                )
        times |= {"end"} if self.decides.alternates else {"local", "element", "output", "multiply_add"}
        times |= {"slice"} if self.decides.slice_elements else set()
        for charge in charges:
            if charge.due not in times or (charge.due == "score" and ".ops." not in charge.key):
                allowed = f"{', '.join(sorted(times))}; for each score, one of an engine's ops, such as ALU.ops.compare"
                raise TilingError(
                    f"kernel: {self.name} has the charge {charge.key} for each {charge.due}; allowed: {allowed}"
                )
        return charges

    def chosen(self, tiling: Any, problem: Problem, precision: Any, device: DeviceSpec, known: Collection[str]) -> Any:
        """Return a tiling with the kernel's values of the ``known`` fields, for split keys if its rule splits them.

        Raises `TilingError` if the kernel does not run, or if a named field has another value.
        """
        if why := self.needs(device) or self.refuses(problem, precision):
            raise TilingError(f"kernel: {self.name} {why}")
        if not self.tiles:
            return tiling
        own, whole, named = self.own(problem, device), self._whole(problem, device), tiling.model_fields_set
        values = {name: getattr(tiling, name) for name in sorted(named & self.decided(known))}
        both = [*own.items(), *whole.items()]  # the tile for complete keys is also used if a mask cuts keys
        if wrong := [f"{name}: {value}" for name, value in values.items() if (name, value) not in both]:
            warps = f" with {whole['warps']} warps" if "warps" in whole else ""
            rows, keys = (whole[edge] for edge in self.edges)
            has = f"kernel={self.name} has tiles of {rows} x {keys}{warps}, and the kernel sets all other fields"
            has += "".join(self.unmodelled(name, getattr(tiling, name)) for name in values)
            raise TilingError(f"{', '.join(wrong)}; {has}; remove {'it' if len(wrong) == 1 else 'them'}")
        try:
            build_tiling(type(tiling), own)
        except TilingError as error:
            raise TilingError(f"kernel: {self.name} decides {error}") from None
        stated = {name for name in named & self.leaves if getattr(tiling, name) is not None}
        return tiling.model_copy(update={name: value for name, value in own.items() if name not in stated})


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientKernel(GpuKernel):
    """Choices of a kernel that computes all gradients of attention. A tile consists of queries, a block of keys.

    The problems are the problems of ``flash_backward``, whose sizes are complete.
    """

    edges: ClassVar[tuple[str, str]] = ("tile_q", "tile_kv")

    def unmodelled(self, name: str, value: object) -> str:
        """Return the known facts about the deterministic order of the parts of dQ; npusim does not model its waits."""
        if (name, value) != ("method", "deterministic"):
            return ""
        # source: Dao-AILab/flash-attention, pull request 1893, and DASH, arXiv 2601.21824, abstract
        return (
            ": its deterministic form, in which blocks wait for one another before they add to dQ, is not "
            "modelled (published for FlashAttention-3: 21 % more time, 2.90 instead of 2.39 ms, on an H100, 2 x "
            "16 causal heads of 128, 8,192 tokens; up to 37.9 % less throughput on an H800 for the version that "
            "began with the first keys)"
        )

    def tile(self, problem: Problem | KernelProblem, _device: DeviceSpec) -> KernelTile:
        """Return the queries of a tile, the keys of a block, and its warps; raise `TilingError` without a layout."""
        sizes = cast("KernelProblem", problem).sizes
        dim = self.head_dim(problem.dtype, int(max(sizes["key"], sizes["value"])))
        layouts = self.tiles[get_format(problem.dtype).size_bytes][dim]
        return layouts[2 if sizes["window"] else int(bool(sizes["causal"]))]


def warps_of(device: DeviceSpec) -> WarpIssue | None:
    """Return a device file's entry on warps; None if there is none."""
    engine = device.cores["sm"].engines.get("WARPS") if "sm" in device.cores else None
    return engine if isinstance(engine, WarpIssue) else None


def _specialises(device: DeviceSpec) -> bool:
    issue = warps_of(device)
    has_warps = issue is not None and issue.sharing.specialised is not None
    return has_warps and getattr(device.engine("sm", "TENSOR"), "wgmma", None) is not None


def needs_tma(device: DeviceSpec) -> str:
    """Return why warps do not specialise on a device: no copies of tiles (TMA) or products of warp groups."""
    if _specialises(device):
        return ""
    names = ", ".join(name for name in list_devices() if _specialises(load_device(name)))
    return (
        f"needs asynchronous copies of whole tiles (TMA) and products of warp groups (wgmma), which {device.name} "
        f"does not have; devices that have them: {names}"
    )


def specialised_charges(use: KernelUse) -> tuple[Charge, ...]:
    """Return the cost of an iteration, and the cost at a block's end for each element of O in a thread's registers."""
    at = "WARPS.sharing.specialised"
    return Charge(f"{at}.step_cycles"), Charge(f"{at}.element_cycles", use.value_dim // 2, "end")


def gradient_charges(_use: KernelUse) -> tuple[Charge, ...]:
    """Return the cost of an iteration of a kernel of gradients with specialised warps, and the cost between blocks."""
    at = "WARPS.sharing.specialised"
    return Charge(f"{at}.step_cycles"), Charge(f"{at}.gradient_block_cycles", 1, "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class AscendKernel(PublishedKernel):
    """A kernel on an Ascend device.

    decides, by_phase
        Decisions of the kernel; and, by the name of the phase, decisions of phases that differ from these.
    deal
        Order in which cores get blocks.
    is_by_name
        Whether the kernel runs only if a tiling names it. If so, a tiling that names no kernel runs the vendor's.
    fields
        Tiling fields that the kernel decides for a tiling that names no kernel.
    memory_tile, prefill, decode
        For a vector unit that reads from UB and writes to UB: rows and keys of a tile; a function from the largest
        number of keys of a tile to the fields of a prefill; a function from the number of cores to the fields of a
        decode.
    register_tile, register_code, masked_layout
        For a vector unit with registers: tile and order; the form of the stages of rows; the layout of rows in a call
        with a mask.
    """

    family: ClassVar[str] = "ascend"
    decides: AscendDecisions
    by_phase: Mapping[str, AscendDecisions] = field(default_factory=dict)
    deal: BlockOrder = "round_robin"
    is_by_name: bool = False
    fields: Mapping[str, object] = field(default_factory=dict)
    memory_tile: Mapping[str, int] = field(default_factory=dict)
    prefill: Callable[[Problem, int], Mapping[str, object]] = lambda _problem, _keys: {}
    decode: Callable[[Problem, int], Mapping[str, object]] = lambda _problem, _cores: {}
    register_tile: Mapping[str, Any] = field(default_factory=dict)
    register_code: Mapping[str, Any] = field(default_factory=dict)
    masked_layout: str = ""

    def of_phase(self, name: str) -> AscendDecisions:
        """Return the kernel's decisions for the phase with this name."""
        return self.by_phase.get(name, self.decides)
