"""Computations of the page on Volta: layouts, instructions, kernels, and the bits of the same kernels."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.core_units import WarpMatrixEngine
from npusim.config.load import load_device
from npusim.config.problem import NormalData, Problem
from npusim.config.tiling import build_tiling
from npusim.errors import TilingError
from npusim.formats.layout.chain import chain
from npusim.formats.layout.fragment import arrangement
from npusim.formats.layout.instruction import instruction
from npusim.formats.layout.wavefronts import VOLTA_BANKS, fragment_addresses, padded, swizzled, wavefronts
from npusim.library import find_schedule
from npusim.library.volta_flash import VoltaPrecision
from npusim.machines.sm.core import SmFields
from npusim.machines.sm.lane_cost import product_cycles
from npusim.machines.sm.lanes import ChainTile, fitted
from npusim.simulation.simulate import simulate_program
from reports.parts.values import program_of, values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npusim.config.problem import DataRecipe
    from npusim.program.numerics.bits_result import NumericResult

__all__ = ["MMA", "V100", "Kernel", "bank_cycles", "chains", "instruction_times", "kernel", "numerics", "shape"]

V100, SCHEDULE, MMA = "v100", "volta_flash", "m8n8k4"
#: Each works on one warp of a group at a time: a pipe's cycles are those of four warps (v100.yaml).
SUBCORES = 4


class ChainRow(NamedTuple):
    """P's way from one accumulator to the A operand, a warp's tile of 8 columns (or what fills one)."""

    accumulator: str
    arrangement: str
    share: float
    shuffles: int
    selects: int
    permutes: int
    tile: tuple[int, int]


def chains() -> list[ChainRow]:
    """Return every accumulator in every arrangement."""
    rows = []
    for acc in ("f16", "f32"):
        for text in ("4x1", "2x2", "1x4"):
            first, where = instruction(MMA, acc=acc).c, arrangement(text, "lane")
            found = chain(first, instruction(MMA).a, arrangement=where)
            height, width = where.tile(first)
            cost = found.cost
            rows.append(
                ChainRow(
                    acc, text, found.share, cost.shuffles, cost.selects, cost.permutes, (height, width * found.tiles)
                )
            )
    return rows


def instruction_times() -> dict[str, dict[str, int]]:
    """Return cycles of m8n8k4 by accumulator: one wmma alone, a product among many, dependent ones."""
    engine = load_device(V100).engine("sm", "TENSOR")
    assert isinstance(engine, WarpMatrixEngine)
    found = {}
    for fmt in ("float16", "float32"):
        steps = engine.steps_of(fmt)
        alone = [product_cycles(steps, chains=1, depth=n) for n in (4, 5)]  # wmma has k = 16: 4 products
        many = [product_cycles(steps, chains=2 * 2 * 2, depth=n) for n in (1, 2)]
        found[fmt] = {
            "steps": steps.steps_count.value,
            "wmma_alone": alone[0],
            "dependent": alone[1] - alone[0],
            "among_many": (many[1] - many[0]) // (2 * 2 * 2),
        }
    return found


#: Layouts of rows of 64 elements in shared memory.
MEMORIES: Mapping[str, Callable[[], Callable[[int, int], int]]] = MappingProxyType(
    {
        "plain": lambda: padded(32, 64, padding=0),
        "padded by 4": lambda: padded(32, 64, padding=4),
        "padded by 8": lambda: padded(32, 64, padding=8),
        "swizzled": lambda: swizzled(32, 64),
    }
)
#: Operand, order of its rows in memory, row order of the quad pairs, bytes of a lane's access.
ACCESSES = (
    ("K as B by columns", "col", "lane", 8),
    ("K as B by columns", "col", "lane", 16),
    ("V as B by rows", "row", "lane", 8),
    ("V as B by rows", "row", "lane", 16),
    ("Q as A, rows of a quad pair", "", "group", 16),
    ("Q as A, row = lane", "", "lane", 16),
)


def bank_cycles() -> list[tuple[str, list[int]]]:
    """Return the wavefronts of each access, in the order of ``MEMORIES``; 4x1 quad pairs."""
    rows = []
    for name, order, rows_of, width in ACCESSES:
        operand = instruction(MMA, b=order).b if order else instruction(MMA).a
        where = arrangement("4x1", rows_of)
        found = []
        for make in MEMORIES.values():
            memory = make()
            seen = _turned(memory) if order == "col" else memory
            addresses = fragment_addresses(operand, where, seen, access_bytes=width)
            found.append(wavefronts(addresses, width, VOLTA_BANKS, allow_misaligned=True))
        rows.append((f"{name}, LDS.{8 * width}", found))
    return rows


def _turned(memory: Callable[[int, int], int]) -> Callable[[int, int], int]:
    return lambda row, column: memory(column, row)


# ---------------------------------------------------------------- kernels


class Kernel(NamedTuple):
    """One run of volta_flash: its time, its registers, and its counts."""

    ms: float
    cycles: int
    tflops: float
    blocks: int
    registers: int
    shares: dict[str, float]
    shuffles: float
    casts: float


def shape(
    tokens: int, *, causal: bool = False, heads: int = 32, batch: int = 8, data: DataRecipe | None = None
) -> Problem:
    """Return the problem of FastAttention's figure 8 (d = 64), or a part of its heads."""
    return Problem(
        batch=batch,
        heads=heads,
        kv_heads=heads,
        seq_q=tokens,
        seq_kv=tokens,
        head_dim=64,
        causal=causal,
        dtype="float16",
        data=data or NormalData(),
    )


def kernel(problem: Problem, precision: str, tiling: Mapping[str, object] | None = None) -> Kernel | str:
    """Return the prediction, or the reason why the fields do not fit."""
    device, chosen = load_device(V100), find_schedule(SCHEDULE, "nvidia")
    try:
        fields = build_tiling(SmFields, tiling or {})
        preset = chosen.precision(precision)
        assert isinstance(preset, VoltaPrecision)
        fields, lanes, room = fitted(ChainTile.asked(problem, preset.whole(problem.dtype)), fields, device)
        program = program_of(SCHEDULE, problem, precision, hw=V100, tiling=tiling)
    except TilingError as error:
        return str(error)
    timing = simulate_program(program, device, "auto")
    lsu, fma = "cores.sm.engines.LSU", "cores.sm.engines.FMA.ops"
    (phase,) = program.phases
    visits = fields.warps * sum(run.count for block in phase.blocks for run in block.runs)
    queues = [u for group in timing.queues for u in group if u.is_pipe]
    pipes = dict.fromkeys(u.queue for u in queues)
    shares = {
        name.rpartition(".")[2]: sum(u.busy_cycles for u in queues if u.queue == name)
        / timing.cycles
        / device.group_count.value
        for name in pipes
    }
    return Kernel(
        timing.latency_s * 1e3,
        timing.cycles,
        program.flops / timing.latency_s / 1e12,
        lanes.residents,
        room.thread_registers,
        shares,
        timing.term_cycles.get(f"{lsu}.shuffle_cycles", 0.0) / visits,
        timing.term_cycles.get(f"{fma}.cast.instructions_count", 0.0) / visits * SUBCORES,
    )


# ---------------------------------------------------------------- bits


def numerics(problem: Problem, precision: str, heads: Sequence[int] = (0,)) -> NumericResult:
    """Return bits of the last Q block of some heads, through the lanes, against float64."""
    return values(SCHEDULE, problem, precision, hw=V100, rows=(problem.seq_q - 1,), heads=tuple(heads))
