"""The interface of a core family for schedules, with defaults, and the assembly of its programs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.config.family import registered
from npusim.errors import TilingError
from npusim.kernels.attention.products import gemm
from npusim.kernels.form.phase import FAMILY, SHAPE, BySize, tensor_of
from npusim.machines.footprint import Footprint
from npusim.program.ir.buffers import AddressSpace
from npusim.program.ir.tile import GlobalTensor
from npusim.program.ir.tile_program import ProgramPhase, TileProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from npusim.config.device import DeviceSpec, FlagsSpec
    from npusim.config.family import Settings
    from npusim.config.node_file import NodeSpec
    from npusim.config.problem import AnyProblem
    from npusim.config.tiling import Tiling
    from npusim.kernels.attention.tiling_mask import MaskKind
    from npusim.kernels.form.phase import Phase, WorkTile
    from npusim.machines.frame import Frame
    from npusim.program.ir.buffers import Allocator
    from npusim.program.ir.tile_program import Item, Pricing, Queue, Serves


class AttentionPace(NamedTuple):
    """The time of attention on one core group, in its cycles.

    block, tile
        The start and end of a block, and of a tile.
    bytes_per_cycle
        Rate at which the keys and values of a tile are processed.
    residents
        Blocks that a core group processes at a time.
    """

    block: float
    tile: float
    bytes_per_cycle: float
    residents: int = 1


#: Share of L2 for the keys and values of heads that are processed together: 32 of 50 MiB in FlashAttention-3.
L2_SHARE = 0.64


class Machine:
    """Machine that runs schedules on a device. A new core family is a subclass with ``build``.

    There is one object per device. All programs of the device share it, so that it stores no state of a program.
    """

    #: Whether a kernel may consist of only rows, and whether a framework's product needs the rows of each head
    #: contiguously.
    has_rows_kernels = reshapes_operands = True
    #: Whether cores store the result of rows that is computed before a loop as a left factor in the loop.
    keeps_factors = False
    #: Whether warp groups run concurrently.
    has_groups = False
    #: Cores that share the rows of a block.
    row_cores = 1
    #: Whether kernels of a library other than attention run.
    has_library = True
    #: Number of elements of a slice of rows on a core that processes rows in slices; 0: the core does not process rows
    #: in slices.
    slice_elements = 0
    #: The node that the machine represents; None for a single device.
    node: NodeSpec | None = None

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        #: The manifest of the device's family.
        self.family = registered(device.family)
        #: The device itself, or, for a node, one of its devices.
        self.single = device
        #: Number of blocks that run at full speed at the same time.
        self.places = device.group_count.value

    def fitted(self, tiling: Tiling, _problem: AnyProblem | None, _precision: object) -> tuple[Any, tuple[str, ...]]:
        """Return the tiling with open fields chosen, and a note on it."""
        return tiling, ()

    def settings(self, _tiling: Tiling, _problem: AnyProblem | None) -> Settings:
        """Return the settings of unnamed fields that a call tries, in groups; the call uses the best setting of each
        group.
        """
        return self.family.settings.get("attention", ())

    def left_alone(self, _fields: type[Tiling]) -> frozenset[str]:
        """Return the fields of a class that a search leaves at their defaults unless the user names them."""
        return frozenset()

    @property
    def flags(self) -> FlagsSpec | None:
        """The flags by which queues wait for one another, which `check` counts; None if their number has no limit."""
        return self.device.flags

    @property
    def pace(self) -> AttentionPace:
        """Estimate of the time of attention on a core group, which determines the number of splits.

        Raises `TilingError` if the family has no such estimate.
        """
        raise TilingError(f"splits=auto: npusim has no estimate of the time of {self.family.name} cores; set a number")

    def declared(self, tiling: Tiling, _problem: AnyProblem | None, _precision: object) -> Any:
        """Return the tiling with the machine's defaults of unnamed fields; these fields still count as unnamed."""
        return tiling

    def decided(self, _tiling: Tiling, _problem: AnyProblem | None = None) -> frozenset[str]:
        """Return the fields that the tiling's kernel decides; with a problem, the fields that a call must not name."""
        return frozenset()

    def by_tile(self, _tiling: Tiling, _precision: object) -> Mapping[str, object]:
        """Return the fields that follow only from the tile in measured kernels of other authors."""
        return {}

    def ordered(self, phase: Phase, _tiling: Tiling) -> Phase:
        """Return the phase with its blocks in the order in which they start."""
        return phase

    def heads_in_l2(self, phase: Phase) -> int | None:
        """Return the number of query heads whose keys and values L2 holds at a time.

        None if L2 holds the keys and values of all heads, or if no two blocks read the same keys and values.
        """
        inputs = [t for n in ("k", "v") if isinstance(t := phase.tensors.get(n), GlobalTensor)]
        size, capacity = sum(t.size_bytes for t in inputs), self.device.memory.l2.capacity_bytes.value * L2_SHARE
        q = phase.tensors.get("q")
        if size <= capacity or not isinstance(q, GlobalTensor):
            return None
        if q.heads == inputs[0].heads and phase.cells[0].rows >= q.rows:
            return None
        heads = inputs[0].batch * inputs[0].heads
        return max(1, int(capacity * heads / size)) * (q.heads // inputs[0].heads)

    def mask_kind(self, tiling: Tiling) -> MaskKind | None:
        """Return how the mask of a tile is obtained. None: in the cheapest way."""
        return getattr(tiling, "mask", None)

    def mask_block(self, _tiling: Tiling) -> int:
        """Return the side of the squares of queries and keys for which a kernel decides visits and masks; 0: the size
        of the tile.
        """
        return 0

    def fields_for(self, _called: str, _phase: Phase, tiling: Tiling) -> tuple[Any, str]:
        """Return the form in which `build` runs a phase, and a note on it; ``_called`` is the name of the schedule."""
        return tiling, ""

    def compiled(self, called: str, phase: Phase, tiling: Tiling, _down: int = 0, _piece: int = 0) -> tuple[Any, str]:
        """Return the form in which `build` runs a compiled phase, and a note, as `fields_for` does.

        ``_down``: number of warps along the rows of its product, 0 if unknown; ``_piece``: number of elements along a
        sum that are loaded at a time.
        """
        return self.fields_for(called, phase, tiling)

    def in_turns(self, _called: str, _phase: Phase, _tiling: Tiling) -> object:
        """Return the form of a phase whose loop executes its parts one after another for each tile; None if the phase
        does not need this form.
        """
        return None

    def column(self, _fmt: str) -> int:
        """Return the number of contiguous elements of a row of a matrix that is stored in fractals (NZ)."""
        raise TilingError(f"operands=nz: {self.device.name} has no fractals; allowed: nd. Ascend devices have fractals")

    def product(
        self,
        label: str,
        a: GlobalTensor,
        b: GlobalTensor,
        c: GlobalTensor,
        tiling: Any,
        *,
        is_transposed: bool = False,
        arithmetic: str = "",
        role: str = "result",
    ) -> Sequence[Phase | tuple[Phase, Any]]:
        """Return the phases of C = A B, or A B^T, for every head, in tiles of ``block_m`` x ``block_n``."""
        tile = tiling.block_m, tiling.block_n
        return [gemm(label, a, b, c, tile, is_transposed=is_transposed, arithmetic=arithmetic, role=role)]

    def build(
        self, name: str, phases: Iterable[tuple[Phase, Any]], flops: int, notes: tuple[str, ...] = ()
    ) -> TileProgram:
        """Return the program of ``built`` phases, each with its result of `fields_for`.

        Raises :class:`~npusim.errors.TilingError` (or its subclass ``BufferOverflowError``) if a phase does not fit a
        memory, or needs a route that the device does not have.
        """
        raise NotImplementedError

    def program(
        self,
        name: str,
        phases: Iterable[Phase],
        built: Iterable[ProgramPhase],
        queues: Iterable[Queue],
        allocator: Allocator,
        pricing: Callable[[TileProgram, DeviceSpec], Pricing],
        **more: Any,
    ) -> TileProgram:
        """Return the program of ``built`` phases; ``queues`` and ``allocator`` belong to one core group.

        ``more``: other attributes of the program, ``flops`` and ``notes``.
        """
        listed = list(phases)
        pairs = zip(built, serving(listed), strict=True)
        return TileProgram(
            name,
            tuple(queues),
            tuple(allocator.rings),
            dict(allocator.spaces),
            dict(allocator.peak_bytes),
            {t.name: t for phase in listed for x in phase.all_tensors() for t in (x, x.of) if t is not None},
            tuple(replace(phase, serves=serves) for phase, serves in pairs),
            constants={n: v for phase in listed for n, v in phase.all_values().items()},
            pricing=pricing,
            **more,
        )


def serving(phases: Sequence[Phase]) -> list[Serves]:
    """Return, for each phase, the rows of the output that need a block of the phase: the block's rows, all rows of the
    heads that share its KV head, or no rows.

    If a phase reads data along an axis other than its rows, or if another phase writes them along such an axis, all
    rows need these data. They also need everything that such a phase reads. No row needs a phase after the one that
    writes the output.
    """
    serves: list[Serves] = []
    whole, read_later = set[str](), set[str]()
    bound = [{n: tensor_of(t) for n, t in p.tensors.items() if not isinstance(t, BySize)} for p in phases]
    result = [{n for s in p.stages for n in s.written}.intersection(of) for p, of in zip(phases, bound, strict=True)]
    ends = (at for at, names in enumerate(result) if any(bound[at][n].name == "o" for n in names))
    final = max(ends, default=len(phases) - 1)
    for at, phase in reversed([*enumerate(phases)]):
        tensors, row_axis = {n: (t.of or t).name for n, t in bound[at].items()}, phase.row_axis
        across = {tensors[n] for n in result[at] if phase.names[n].axes[0] != row_axis}
        is_whole = bool(across & read_later) or any(tensors[n] in whole for n in result[at])
        read = tensors.keys() - result[at]
        read_later |= {tensors[n] for n in read}
        whole |= {tensors[n] for n in read if is_whole or phase.names[n].axes[0] != row_axis}
        serves.insert(0, "none" if at > final else "kv_head" if is_whole else "rows")
    return serves


def memories(device: DeviceSpec, core: str, member: str = "") -> dict[str, AddressSpace]:
    """Return the buffers of a kind of core, as the memories of one core."""
    spaces = {f"{member or core}.{name}": buffer for name, buffer in device.core(core).buffers.items()}
    return {n: AddressSpace(n, b.capacity_bytes.value, b.alignment_bytes.value) for n, b in spaces.items()}


def program_phase(
    frame: Frame,
    items: Callable[[WorkTile], Iterable[Item]],
    reread: tuple[tuple[str, int], ...] = (),
    views: Iterable[str] = (),
    parts: tuple[tuple[str, int], ...] = (),
    held: Iterable[str] = (),
    **more: Any,
) -> ProgramPhase:
    """Return a phase of the program in which a block runs ``items``.

    ``reread``: operands that each group of this number of rows of a block reads completely.  ``views``: operands that
    are loaded only as parts of other operands.  ``parts``, ``held``: as in `Footprint`.  ``more``: other attributes of
    the phase.
    """
    p = frame.phase
    described: dict[str, Any] = {"blocks": p.cells, "roles": frame.roles, "family": FAMILY, **more}
    footprint = Footprint(frame, reread, frozenset(views), parts, frozenset(held))
    return ProgramPhase(p.name, body=items, shape=SHAPE, footprint=footprint, is_joined=p.is_joined, **described)
