"""The choices of a published kernel as one value; each is a file of the library or of the user."""

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
#: Return types of a kernel's functions, by the field; charges are checked where they are paid.
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
    """Rows and keys of a block, and its warps; 0: other fields say how many."""

    rows: int
    keys: int
    warps: int = 0


#: Tiles without a mask, with a causal and with any other mask, by the computed head dim; other head dims are padded to
#: it.
Layout = tuple[KernelTile, KernelTile, KernelTile]
Layouts = Mapping[int, Layout]


def layout(rows: int, plain: int, causal: int = 0, masked: int = 0, *, warps: int = 0) -> Layout:
    """Return tiles of ``rows`` by keys: without a mask, with a causal one (0: ``plain``), and with another mask (0: as
    with a causal mask).
    """
    first, second, third = (KernelTile(rows, n, warps) for n in (plain, causal or plain, masked or causal or plain))
    return first, second, third


class KernelUse(NamedTuple):
    """One phase of a kernel, on which its charges depend: rows and keys of a complete tile, resident blocks of a core.

    ``head_dim`` and ``value_dim`` are the computed ones, with padding.
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
        """Whether rows or keys are no multiple of a tile, so that a kernel must check their ends."""
        sizes, phase = self.phase.sizes, self.phase
        rows, keys = sizes[phase.row_axis], sizes[phase.loop_axis]
        return any(b.rows % rows or any(r.cols % keys for r in b.runs) for b in phase.cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedKernel:
    """Fields of all published kernels: the name for ``kernel=``, the author, and what the kernel computes.

    computes
        Names of the schedules that the kernel computes, which ``kernel=`` takes it for; empty: any with this field.
    decides
        Its decisions, the named tuple of its core family.
    of
        ``attention``, or a ``recurrence``, chunk by chunk.
    is_fused, output_of_8_bits
        Whether scores are scaled by the multiply-add before an exponential, as in FlashAttention's libraries
        (flash_attn/src/softmax.h and hopper/softmax.h, scale_apply_exp2), and its output of inputs of 8 bits
        (hopper/flash_api.cpp, out_type).  PyTorch builds FlashAttention-2 with UNFUSE_FMA: exponent=twice (its issue
        121558; measured: 2.11 on an H100, where the factor of rescaling is exp2((m - m') c), with unscaled maxima).
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
        Its decisions, whatever the tile and the device.
    tiles, variants
        Layouts by the bytes of an element, then by head dim; and layouts that replace these for a problem on a device.
        Empty: the kernel runs any tile.
    fields, leaves
        Tiling fields that the kernel decides on a device in addition to its tile, and fields that it leaves open.
    needs, refuses
        Reason why the kernel does not run on a device, or for a problem in some formats; empty: it runs.
    split_rule, cut_tile, has_cut_pages, has_unseen_parts, merge_rows, packs
        The rule that splits keys, the tile of split keys if it differs, whether calls with pages have that tile even if
        their keys are not split, whether parts whose keys no query of a block sees are blocks, too, and the rows of a
        block of the merge (0: the default); whether the query heads of a KV head are rows of one block, for a number of
        rows.
    order
        Function that returns a phase with its blocks in the kernel's order; None: the tiling's order.  A kernel that
        leaves ``launch`` open has its own order until a tiling states another.
    is_torchs
        Whether PyTorch's scaled_dot_product_attention takes the kernel for a problem, on devices where it runs.
    turn_dims
        The head dims at which groups that alternate take turns, by the bytes of an element.
    charges, merge_charges
        Costs that the kernel and the merge of its splits pay in addition to their steps, on devices with such
        constants.
    gradients
        The kernel of the same author that computes the gradients; None: there is none.
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

    def unmodelled(self, _name: str, _value: object) -> str:
        """Return what is known of a field's value that the kernel has and npusim does not; empty: nothing."""
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
            raise TilingError(f"kernel: {self.name} has {tile!r} for head_dim {dim}; a tile is a result of layout(...)")
        return tile

    def cuts(self, problem: Problem, tile: tuple[int, int], device: DeviceSpec) -> bool:
        """Return whether the kernel's rule splits the keys of a call among blocks of ``tile``."""
        call = call_of(problem, *tile, device.group_count.value)
        return self.split_rule is not None and any(len(parts) > 1 for parts in self.split_rule(call))

    def own(self, problem: Problem, device: DeviceSpec) -> dict[str, object]:
        """Return the kernel's fields for a problem; the tile is the one for split keys if its rule splits them."""
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
        """Return the ``known`` fields that the kernel decides: a tiling may name no other value of them."""
        return frozenset(known) - self.leaves - {"kernel"} if self.tiles else frozenset()

    def paid(self, use: KernelUse) -> tuple[Charge, ...]:
        """Return the kernel's charges; raise `TilingError` for another type, or a moment that the kernel never has."""
        charges, times = tuple(self.charges(use)), {"block", "tile", "score"}
        for charge in charges:
            if not isinstance(charge, Charge) or not 0 <= charge.times < inf:
                raise TilingError(f"kernel: {self.name} pays {charge!r}; charges= returns Charges of 0 or more times")
        times |= {"end"} if self.decides.alternates else {"local", "element", "output", "multiply_add"}
        times |= {"slice"} if self.decides.slice_elements else set()
        for charge in charges:
            if charge.due not in times or (charge.due == "score" and ".ops." not in charge.key):
                allowed = f"{', '.join(sorted(times))}; for each score one of an engine's ops, such as ALU.ops.compare"
                raise TilingError(f"kernel: {self.name} pays {charge.key} for each {charge.due}; allowed: {allowed}")
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
        both = [*own.items(), *whole.items()]  # the tile for complete keys is its tile where it cuts keys, too
        if wrong := [f"{name}: {value}" for name, value in values.items() if (name, value) not in both]:
            warps = f" with {whole['warps']} warps" if "warps" in whole else ""
            rows, keys = (whole[edge] for edge in self.edges)
            has = f"kernel={self.name} has tiles of {rows} x {keys}{warps} and decides the rest"
            has += "".join(self.unmodelled(name, getattr(tiling, name)) for name in values)
            raise TilingError(f"{', '.join(wrong)}; {has}; leave {'it' if len(wrong) == 1 else 'them'} out")
        try:
            build_tiling(type(tiling), own)
        except TilingError as error:
            raise TilingError(f"kernel: {self.name} decides {error}") from None
        stated = {name for name in named & self.leaves if getattr(tiling, name) is not None}
        return tiling.model_copy(update={name: value for name, value in own.items() if name not in stated})


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientKernel(GpuKernel):
    """Choices of a kernel of all gradients of attention: a tile has queries, a block keys.

    Problems are those of ``flash_backward``, whose sizes are complete.
    """

    edges: ClassVar[tuple[str, str]] = ("tile_q", "tile_kv")

    def unmodelled(self, name: str, value: object) -> str:
        """Return what is known of the fixed order of the parts of dQ, whose waits are not modelled."""
        if (name, value) != ("method", "deterministic"):
            return ""
        # source: Dao-AILab/flash-attention, pull request 1893, and DASH, arXiv 2601.21824, abstract
        return (
            ": its deterministic form, in which blocks wait for one another before they add to dQ, is not modelled "
            "(published of FlashAttention-3: 21 % more time, 2.90 for 2.39 ms, on an H100, 2 x 16 causal heads of 128, "
            "8,192 tokens; up to 37.9 % less throughput on an H800 before it began with the last keys)"
        )

    def tile(self, problem: Problem | KernelProblem, _device: DeviceSpec) -> KernelTile:
        """Return the queries of a tile, the keys of a block, and its warps; raise `TilingError` without a layout."""
        sizes = cast("KernelProblem", problem).sizes
        dim = self.head_dim(problem.dtype, int(max(sizes["key"], sizes["value"])))
        layouts = self.tiles[get_format(problem.dtype).size_bytes][dim]
        return layouts[2 if sizes["window"] else int(bool(sizes["causal"]))]


def warps_of(device: DeviceSpec) -> WarpIssue | None:
    """Return a device file's entry on warps, if any."""
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
        "needs asynchronous copies of whole tiles (TMA) and products of warp groups (wgmma), "
        f"which {device.name} has not; devices that have: {names}"
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
        Its decisions, and those for phases that differ, by the phase's name.
    deal
        Order in which cores get blocks.
    is_by_name
        Whether the kernel runs only if a tiling names it; else the vendor's kernel runs.
    fields
        Tiling fields that the kernel decides if a tiling names no kernel.
    memory_tile, prefill, decode
        From UB to UB: rows and keys of a tile, and functions that return the fields of a prefill (from the most
        keys of a tile) and of a decode (from the number of cores).
    register_tile, register_code, masked_layout
        On registers: tile and order, the form of rows in vector functions, and the layout of rows of a call with a
        mask.
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
        """Return the kernel's decisions for the phase of a name."""
        return self.by_phase.get(name, self.decides)
