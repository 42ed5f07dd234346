"""Vendor samples of single mechanisms (asc-devkit best practices), run as separate programs."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.core_units import VectorEngine
from npusim.config.load import load_device
from npusim.config.problem import CopyProblem, GemmProblem
from npusim.formats.layout.wavefronts import BankModel, wavefronts
from npusim.kernels.attention.call_blocks import grid
from npusim.kernels.attention.products import gemm
from npusim.kernels.form.phase import Instruction, Name, Phase, Stage, TileLoop
from npusim.machines.ascend.ascend_machine import AscendMachine
from npusim.machines.ascend.ascend_pricing import AscendPricing, vector_cycles
from npusim.machines.ascend.product_plan import AscendTiling, gemm_tiling
from npusim.machines.decisions import AscendDecisions
from npusim.program.ir.op import Opcode, Step
from npusim.program.ir.residency import Residency
from npusim.program.ir.tile import GlobalTensor, Tile
from npusim.run import run
from npusim.simulation.simulate import simulate_program

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram

__all__ = ["Sample", "samples"]


class Sample(NamedTuple):
    """A quantity of a sample, in microseconds."""

    name: str
    quantity: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted / self.measured - 1


def _loads(core: str, cores: int, rows: int, width: int) -> float:
    """Return the time of 302 MB in DMAs of ``rows`` pieces of 128 B, from rows of ``width`` float16."""
    device = load_device("ascend_910b2")
    source = GlobalTensor("x", 1, 1, 12288, width, "float16", "input")
    place = Tile("aic.L1" if core == "aic" else "aiv0.UB", 0, rows, 64, 64, "float16")
    step = Step(Opcode.COPY, place, (source.tile(0, 0, 0, rows, 0, 64),))
    program = run("copy", hw=device, problem=CopyProblem(bytes=1 << 20), numerics=False, trace_groups=()).program
    costs = AscendPricing(replace(program, tensors={"x": source}, phases=()), device)
    costs.residency = Residency({"x": 1.0}, {}, read_waits={"x": 1.0})  # every byte is read once
    cycles = costs.of_step(step, core, "MTE2").occupancy_cycles
    return device.seconds(cycles * 12288 * 12288 / (rows * 64) / cores) * 1e6


def _addition(rows: int, columns: int, device: DeviceSpec) -> TileProgram:
    """Return a program that adds two tensors; a load has one row of ``columns`` elements."""
    machine = AscendMachine(device)
    tensors = {n: GlobalTensor(n, 1, 1, rows, columns, "float16", "output" if n == "y" else "input") for n in "xzy"}
    names = {n: Name("result" if n == "y" else "operand", ("row", "col"), "float16") for n in tensors}
    each = len(machine.group.vector_cores)
    phase = Phase(
        name="rows",
        names=names,
        cells=grid(tensors["y"], ("row", each)),
        sizes={"row": each, "col": columns},
        loops=(TileLoop((Stage("rows", (Instruction(Opcode.ADD, "y", ("x", "z")),)),)),),
        tensors=dict(tensors),
    )
    return machine.build("rows", [(phase, AscendTiling(elements=columns))], 0)


def _added() -> dict[str, float]:
    """Return times of an addition on all AIV, with two buffers of 32 KiB for each operand."""
    device = load_device("ascend_910b2")
    timing = simulate_program(_addition(4096, 16384, device), device, "auto")
    vector = next(u.busy_cycles for u in timing.queues[0] if u.queue == "aiv0.VECTOR")
    return {"vector": device.seconds(vector) * 1e6, "task": timing.times_s["kernel"] * 1e6}


def _added_in_turn(cores: int) -> dict[str, float]:
    """Return times of an addition by loads of 8 KiB with one buffer: a pair of loads, then the sum.

    A pipe counts as busy from an instruction's issue to its end: what the loads wait for belongs to MTE2.  The store
    runs at the same time as the next loads.
    """
    device = load_device("ascend_910b2", {"group_count": "1", "cores.aiv.per_group_count": "1"})
    program = _addition(48, 4096, device)  # each row is a new one, however many there are
    costs = AscendPricing(program, device)
    x, z, y = (Tile("aiv0.UB", i * 8192, 1, 4096, 4096, "float16") for i in range(3))
    source, target = (program.tensors[n].tile(0, 0, 0, 1) for n in "xy")
    load = costs.of_step(Step(Opcode.COPY, x, (source,)), "aiv", "MTE2")
    add = costs.of_step(Step(Opcode.ADD, y, (x, z)), "aiv", "VECTOR").occupancy_cycles
    store = costs.of_step(Step(Opcode.COPY, target, (y,)), "aiv", "MTE3").occupancy_cycles
    pair = 2 * load.occupancy_cycles + load.latency_cycles
    us = device.seconds(8192 * 8192 // 4096) / cores * 1e6
    return {"MTE2": pair * us, "MTE3": store * us, "core": (pair + add) * us}


def _turned(stride: int) -> float:
    """Return the vector unit's time to turn rows into fractals, whose columns of blocks are ``stride`` blocks apart.

    A repeat writes 8 blocks of 32 bytes; those that fall into one group of banks are written one after the other.
    """
    device = load_device("ascend_910b2")
    spec, banks = device.engine("aiv", "VECTOR"), device.core("aiv").buffers["UB"].banks
    assert banks is not None
    assert isinstance(spec, VectorEngine)
    width = banks.row_bytes.value
    model = BankModel(banks.group_count.value, width, MappingProxyType({width: 8}), ())
    waves = wavefronts([block * stride * width for block in range(8)], width, model)
    rows, cols = 144, 128
    tile, other = (Tile("aiv0.UB", i * 2 * rows * cols, rows, cols, cols, "float16") for i in range(2))
    cycles, terms = vector_cycles((Step(Opcode.COPY, other, (tile,)),), spec, None, "VECTOR", AscendDecisions())
    repeats = dict(terms)["VECTOR.ops.copy.slope_cycles_per_repeat"]
    tiles = 8192 * 8192 / (rows * cols) / 48
    return device.seconds((cycles + (waves - 1) * repeats) * tiles) * 1e6


def _product() -> dict[str, float]:
    """Return times of the product of 8192^3 on all cores, as its sample tiles it."""
    result = run(
        "gemm",
        hw="ascend_910b1",
        problem=GemmProblem(m=8192, n=8192, k=8192),
        numerics=False,
        trace_groups=(),
        tiling={"block_m": 128, "block_n": 256, "block_k": 64},
    )
    assert result.timing is not None
    busy = {uses[0].queue: max(u.busy_cycles for u in uses) for uses in zip(*result.timing.queues, strict=True)}
    return {name: result.device.seconds(cycles) * 1e6 for name, cycles in busy.items()}


def _product_in_turn() -> dict[str, float]:
    """Return times of the product on one core whose L1 holds one piece of each operand (depthA1 and stepKa 1).

    Loads, both moves to L0 and the next loads follow one another; products run at the same time.
    """
    device = load_device("ascend_910b1", {"group_count": "1"})
    a, b = (GlobalTensor(n, 1, 1, 8192, 8192, "float16", "input") for n in "ab")
    c, machine = GlobalTensor("c", 1, 1, 8192, 8192, "float16", "output"), AscendMachine(device)
    phase = gemm("gemm", a, b, c, (128, 256), is_transposed=True)
    tiling = gemm_tiling(phase, {"block_m": 128, "block_n": 256, "block_k": 64, "load_k": 64}, machine.group)
    costs = AscendPricing(machine.build("gemm", [(phase, tiling)], 0), device)
    loads = moves = 0
    for tensor, rows, place in ((a, 128, "L0A"), (b, 256, "L0B")):
        piece, target = (Tile(f"aic.{at}", 0, rows, 64, 64, "float16") for at in ("L1", place))
        load = costs.of_step(Step(Opcode.COPY, piece, (tensor.tile(0, 0, 0, rows, 0, 64),)), "aic", "MTE2")
        loads += load.occupancy_cycles
        moves += costs.of_step(Step(Opcode.COPY, target, (piece,)), "aic", "MTE1").occupancy_cycles
    loads += load.latency_cycles
    left, sums = Tile("aic.L0A", 0, 128, 64, 64, "float16"), Tile("aic.L0C", 0, 128, 256, 256, "float32")
    mac = costs.of_step(Step(Opcode.MATMUL, sums, (left, target)), "aic", "CUBE").occupancy_cycles
    us = device.seconds((8192 // 128) * (8192 // 256) * (8192 // 64)) * 1e6
    return {"mac": mac * us, "MTE2": loads * us, "MTE1": moves * us, "core": (loads + moves) * us}


def samples() -> list[Sample]:
    """Return V1 to V5 and V7 of the collection, those quantities that a program here has."""
    add, alone, spread = _added(), _added_in_turn(1), _added_in_turn(48)
    own, one = _product(), _product_in_turn()
    return [
        Sample("V1 Add 8192x8192, 48 AIV, double buffer", "task", 264.02, add["task"]),
        Sample("V1 Add 8192x8192, 48 AIV", "vector, operands in one bank group", 12.846, add["vector"]),
        Sample("V1 Add 8192x8192, 48 AIV, one buffer", "MTE3", 54.33, spread["MTE3"]),
        Sample("V1 Add 8192x8192, one AIV, one buffer", "MTE2", 6208.8, alone["MTE2"]),
        Sample("V1 Add 8192x8192, one AIV, one buffer", "MTE3", 2613.2, alone["MTE3"]),
        Sample("V1 Add 8192x8192, one AIV, one buffer", "core", 6909.1, alone["core"]),
        Sample("V2 GM to UB, 302 MB in DMAs of 128 B, 48 AIV", "MTE2", 548.161, _loads("aiv", 48, 1, 12288)),
        Sample("V3 GM to L1, 302 MB in rows of 128 B, 24 AIC", "MTE2", 283.508, _loads("aic", 24, 64, 12288)),
        Sample("V3 GM to L1, rows of 24574 B, 24 AIC", "MTE2", 422, _loads("aic", 24, 64, 12287)),
        Sample("V4 rows to fractals 8192x8192, columns 144 blocks apart", "vector", 47.79, _turned(144)),
        Sample("V4 rows to fractals 8192x8192, columns 145 blocks apart", "vector", 7.133, _turned(145)),
        Sample("V5 Matmul+GELU 8192^3, matrix side", "mac", 3083.2, own["aic.CUBE"]),
        Sample("V5 Matmul+GELU 8192^3, matrix side", "MTE1", 2520.9, own["aic.MTE1"]),
        Sample("V5 Matmul+GELU 8192^3, matrix side", "MTE2", 3687.8, own["aic.MTE2"]),
        Sample("V7 product 8192^3 on one core, one buffer", "mac", 81477.2, one["mac"]),
        Sample("V7 product 8192^3 on one core, one buffer", "MTE2", 195613.4, one["MTE2"]),
        Sample("V7 product 8192^3 on one core, one buffer", "MTE1", 52003.7, one["MTE1"]),
        Sample("V7 product 8192^3 on one core, one buffer", "core", 249466.5, one["core"]),
    ]
