"""Published kernels whose warps specialise (Hopper), as settings; `turns` has what their groups wait for.

A persistent block goes from tile of work to tile of work, its copies ahead of it.

Sources: NVIDIA/cudnn-frontend 3929da2, generated/sdpa/sm90/prefill (head dims 64 and 128; that others differ in
buffers alone is inferred); Dao-AILab/flash-attention 0251105, hopper/tile_size.h, mainloop_fwd_sm90_tma_gmma_ws.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from npusim.algorithms.flow import views
from npusim.algorithms.phase import with_finite_starts
from npusim.config.load import list_devices, load_device
from npusim.errors import BufferOverflowError, TilingError
from npusim.formats import get_format
from npusim.ir.op import GroupWork
from npusim.machines.sm.core import SM, TENSOR, SmTiling, has_warps, warp_issue
from npusim.machines.sm.groups import GROUP_ROWS, GROUP_WARPS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.algorithms.phase import Phase, WorkTile
    from npusim.config.device import DeviceSpec
    from npusim.machines.sm.core import Turns

Size = tuple[int, int]
#: Registers of a thread by the number of groups that consume (setmaxnreg of FlashAttention-3), and those for addresses.
REGISTERS, ADDRESS_REGISTERS = MappingProxyType({1: 240, 2: 240, 3: 160}), 24
#: Columns of B that one product takes at most; keys are a multiple of what P V adds up at once (PTX ISA, wgmma).
MOST_COLUMNS, KEYS_MULTIPLE = 256, 16
#: Bytes of the heads whose K and V share L2: of these the longest blocks start first (hopper/tile_scheduler.hpp).
L2_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class SpecialisedKernel:
    """What a published kernel does beside its formats.

    tiles
        By the bytes of an element, then by head dim as it is computed (others are filled up to the next): rows and
        keys plain, causal, and with any other mask.
    narrow
        The same where V has 128 columns or fewer.
    depth
        Tiles of K and of V, and of Q, in shared memory; fewer where they do not fit.
    turns, turn_dims
        What groups do one after the other, and at which head dims, by the bytes of an element.
    ahead
        Tiles by which Q K^T is issued before P V.
    meets
        Whether groups begin each tile of work together.
    is_flexible
        Whether it is compiled for other tiles than its own.
    starts_longest
        Whether causal blocks start with the longest, and keys with the last; else both ascend.
    counts
        Whether blocks take their work from a counter, which a memset clears: always, or where a mask makes them differ.
    bounds
        Instructions for each score where keys end within a tile and nothing is masked.
    """

    tiles: Mapping[int, Mapping[int, tuple[Size, Size, Size]]]
    depth: tuple[int, int]
    turns: Turns
    turn_dims: Mapping[int, tuple[int, int]]
    ahead: int = 0
    meets: bool = False
    is_flexible: bool = False
    starts_longest: bool = False
    counts: Literal["always", "masked"] = "masked"
    bounds: float = 0.0
    narrow: Mapping[int, tuple[Size, Size, Size]] = field(default_factory=dict)

    def head_dim(self, called: str, fmt: str, dim: int) -> int:
        """Return the head dim that it computes; raise `TilingError` where it has no layout for one."""
        layouts = self.tiles.get(get_format(fmt).size_bytes, {})
        if not any(d >= dim for d in layouts):
            most = f"the largest is {max(layouts)}" if layouts else "none in this format"
            raise TilingError(f"kernel: {called} has no layout for head_dim {dim} in {fmt}; {most}")
        return min(d for d in layouts if d >= dim)


def _sizes(rows: int, plain: int, causal: int = 0, masked: int = 0) -> tuple[Size, Size, Size]:
    return (rows, plain), (rows, causal or plain), (rows, masked or causal or plain)


#: By the name that ``kernel`` takes.  cuDNN's tiles are in its kernels' names (64x128x{64,128,256}); FlashAttention-3's
#: in hopper/tile_size.h, its turns in mainloop_fwd_sm90_tma_gmma_ws.hpp (UseSchedulerBarrier).
KERNELS: Mapping[str, SpecialisedKernel] = MappingProxyType(
    {
        "cudnn": SpecialisedKernel(
            tiles={2: dict.fromkeys((64, 128, 192, 256), _sizes(128, 128))},
            depth=(2, 2),
            turns="exponentials",
            turn_dims={2: (0, 256)},
            meets=True,
            counts="always",
            bounds=2.0,  # fitted, decided by three of h200_cudnn's cases (s1000, s3000, s5676)
        ),
        "fa3": SpecialisedKernel(
            tiles={
                2: {
                    64: _sizes(192, 192, 128),
                    96: _sizes(192, 144, 144, 128),
                    128: _sizes(128, 176, 128),
                    192: _sizes(128, 112, 112, 96),
                    256: _sizes(128, 80, 80, 64),
                },
                1: {
                    64: _sizes(192, 160),
                    96: _sizes(192, 128),
                    128: _sizes(128, 224),
                    192: _sizes(128, 160),
                    256: _sizes(128, 128),
                },
            },
            depth=(2, 1),
            turns="products",
            turn_dims={2: (0, 128), 1: (128, 256)},
            ahead=1,
            is_flexible=True,
            starts_longest=True,
            narrow={192: _sizes(128, 128, 128, 96)},
        ),
    }
)


def check_device(called: str, device: DeviceSpec) -> None:
    """Raise `TilingError` where a device has no copies of whole tiles (TMA) or no products of warp groups (wgmma)."""
    if not _specialises(device):
        names = [name for name in list_devices() if _specialises(load_device(name))]
        raise TilingError(
            f"kernel: {called} needs asynchronous copies of whole tiles (TMA) and products of warp groups (wgmma), "
            f"which {device.name} has not; devices that have: {', '.join(names)}"
        )


def _specialises(device: DeviceSpec) -> bool:
    if not has_warps(device) or warp_issue(device).sharing.specialised is None:
        return False
    return getattr(device.engine(SM, TENSOR), "wgmma", None) is not None


def chosen_tile(called: str, tiling: Any, problem: Any, device: DeviceSpec) -> Any:
    """Return a tiling with the kernel's own tile; raise `TilingError` for what the kernel decides, or has not."""
    check_device(called, device)
    kernel, named = KERNELS[called], tiling.model_fields_set
    if fixed := sorted(named & {"warps", "stages", "registers", "spilled_registers", "residents", "launch"}):
        raise TilingError(f"{', '.join(fixed)}: without effect on kernel={called}, which decides them; leave them out")
    dim = kernel.head_dim(called, problem.dtype, max(problem.head_dim, problem.value_head_dim))
    # As in hopper/tile_size.h, for 16 bits.
    is_narrow = problem.value_head_dim <= 128 and get_format(problem.dtype).size_bytes == 2
    whole = kernel.tiles[get_format(problem.dtype).size_bytes][dim]
    sizes = kernel.narrow.get(dim, whole) if is_narrow else whole
    rows, keys = sizes[int(problem.causal) if problem.seen.is_plain else 2]
    wanted = tiling.block_q if "block_q" in named else rows, tiling.block_kv or keys
    if wanted != (rows, keys) and not kernel.is_flexible:
        raise TilingError(f"block_q, block_kv: kernel={called} has tiles of {rows} x {keys} alone; leave them out")
    _check_layout(called, *wanted, dim)
    return tiling.model_copy(update={"block_q": wanted[0], "block_kv": wanted[1]})


def _check_layout(called: str, rows: int, keys: int, dim: int) -> None:
    """Raise `TilingError` where groups have no layout for a tile: rows of whole groups, scores and O in registers."""
    groups = rows // GROUP_ROWS
    if rows % GROUP_ROWS or groups not in REGISTERS:
        allowed = ", ".join(str(GROUP_ROWS * n) for n in REGISTERS)
        raise TilingError(f"block_q: {rows}; kernel={called} has layouts for {allowed} rows: {GROUP_ROWS} a warp group")
    if keys % KEYS_MULTIPLE or keys > MOST_COLUMNS:
        allowed = f"multiples of {KEYS_MULTIPLE} up to {MOST_COLUMNS}"
        raise TilingError(f"block_kv: {keys}; kernel={called} has layouts for {allowed} keys")
    # Scores and O of 64 rows in float32; P goes through shared memory where it does not fit beside them.
    count = keys // 2 + dim // 2 + ADDRESS_REGISTERS
    if count > REGISTERS[groups]:
        raise TilingError(
            f"block_kv: {keys}; kernel={called} has no layout for {rows} x {keys} with head_dim {dim}: scores and O "
            f"take {count} registers a thread of {REGISTERS[groups]}; fewer keys"
        )


def ordered_as(called: str, phase: Phase) -> Phase:
    """Return the phase with keys and blocks in the kernel's order."""
    if not KERNELS[called].starts_longest:
        return phase
    blocks = tuple(replace(b, runs=tuple(r.reversed() for r in b.runs[::-1])) for b in phase.cells)
    if phase.masks:
        blocks = tuple(sorted(blocks, key=lambda b: (_section(phase, b), -b.tile_count)))
    return with_finite_starts(replace(phase, cells=blocks))


def _section(phase: Phase, block: WorkTile) -> int:
    """Return which of the heads whose K and V lie in L2 together a block is of."""
    tensors: list[Any] = [phase.tensors[n] for n in "kv"]
    head = sum(t.cols * t.rows * get_format(t.fmt).size_bytes for t in tensors)
    q: Any = phase.tensors["q"]
    number = block.batch * q.heads + block.head
    return int(number // max(1, L2_BYTES // max(1, head)))


def specialised_tiling(called: str, phase: Phase, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return how warps of a kernel execute attention, and a note: what a block takes of a core.

    Raises `TilingError` where a tensor is added to scores and the kernel has no room for its tiles beside a product
    that runs on, ``BufferOverflowError`` where its buffers do not fit shared memory.
    """
    kernel, sizes, names = KERNELS[called], phase.sizes, phase.names
    if kernel.ahead and (added := [n for n in phase.values if names[n].axes == ("row", phase.loop_axis)]):
        able = ", ".join(name for name, one in KERNELS.items() if not one.ahead)
        raise TilingError(
            f"kernel: {called} adds no tensor to scores, and {added[0]} is one; leave kernel out, or take {able}"
        )
    rows, keys = sizes["row"], sizes[phase.loop_axis]
    size = get_format(names["q"].fmt).size_bytes
    dims = {axis: kernel.head_dim(called, names["q"].fmt, sizes[axis]) for axis in ("head", "value")}
    least, most_dim = kernel.turn_dims[size]
    groups, issue = rows // GROUP_ROWS, warp_issue(device)
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    most = min(issue.block_memory_bytes.value, memory)
    loaded = dims["head"] if views(phase, phase.loop_axis) else sum(dims.values())
    q, kv = rows * dims["head"] * size, keys * loaded * size
    fits = [
        (n, m) for n in range(kernel.depth[0], 0, -1) for m in range(kernel.depth[1], 0, -1) if n * kv + m * q <= most
    ]
    if not fits:
        raise BufferOverflowError(
            f"shared memory: Q of {rows} and K and V of {keys} rows take {q + kv:,} of {most:,} bytes"
        )
    depth, held = fits[0]
    is_ragged = kernel.bounds and not phase.masks and any(r.cols % keys for b in phase.cells for r in b.runs)
    tiling = SmTiling(
        groups=groups,
        depth=depth,
        held_depth=held,
        work=GroupWork(GROUP_WARPS, is_specialised=True, consumers=groups),
        widths={phase.loop_axis: keys, **dims},
        turns=kernel.turns if least <= max(dims.values()) <= most_dim else None,
        ahead=kernel.ahead,
        meets=kernel.meets,
        bounds=kernel.bounds if is_ragged else 0.0,
        clears=int(kernel.counts == "always" or bool(phase.masks)),
    )
    return (
        tiling,
        f"kernel={called}: {groups} warp groups on tiles of {rows} x {keys}, {depth} of K and of V, {held} of Q",
    )
