"""Vendor samples of single mechanisms (asc-devkit best practices), run as programs of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from npusim.algorithms.cells import grid
from npusim.algorithms.phase import Loop, Phase, name
from npusim.algorithms.table import Stage, row
from npusim.config.kernels import CopyProblem, GemmProblem
from npusim.config.load import load_device
from npusim.ir.op import Opcode, Step
from npusim.ir.tile import GlobalTensor, Tile
from npusim.machines.ascend import AscendMachine, AscendTiling
from npusim.machines.ascend.pricing import AscendPricing
from npusim.run import run
from npusim.simulate import simulate_program

__all__ = ["Sample", "samples"]

ONE_AIV = {"group_count": "1", "cores.aiv.per_group_count": "1"}


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
    """Return the time of 302 MB in DMAs of so many pieces of 128 B, from rows of ``width`` float16."""
    device = load_device("ascend_910b2")
    source = GlobalTensor("x", 1, 1, 12288, width, "float16", "input")
    place = Tile("aic.L1" if core == "aic" else "aiv0.UB", 0, rows, 64, 64, "float16")
    step = Step(Opcode.COPY, place, (source.tile(0, 0, 0, rows, 0, 64),))
    program = run("copy", hw=device, problem=CopyProblem(bytes=1 << 20), numerics=False, trace_groups=()).program
    costs = AscendPricing(replace(program, tensors={"x": source}, phases=()), device)
    cycles = costs.of_step(step, core, "MTE2").occupancy_cycles
    return device.seconds(cycles * 12288 * 12288 / (rows * 64) / cores) * 1e6


def _rows(columns: int, rows: int, overrides: dict[str, str] | None = None) -> dict[str, float]:
    """Return times of an addition of rows of float16."""
    device = load_device("ascend_910b2", overrides)
    machine = AscendMachine(device)
    tensors = {n: GlobalTensor(n, 1, 1, rows, columns, "float16", "output" if n == "y" else "input") for n in "xzy"}
    names = {n: name("result" if n == "y" else "operand", "row col", "float16") for n in tensors}
    each = len(machine.group.vector_cores)
    phase = Phase(
        name="rows", names=names, cells=grid(tensors["y"], ("row", each)), sizes={"row": each, "col": columns},
        loops=(Loop((Stage("rows", (row(Opcode.ADD, "y", "x", "z"),)),)),), tensors=dict(tensors),
    )  # fmt: skip
    program = machine.build("rows", [(phase, AscendTiling(elements=columns))], 0)
    timing = simulate_program(program, device, "auto")
    busy = {u.queue.rpartition(".")[2]: u.busy_cycles for u in timing.queues[0] if u.queue.startswith("aiv0")}
    found = {engine: device.seconds(cycles) * 1e6 for engine, cycles in busy.items()}
    return {**found, "task": timing.times_s["kernel"] * 1e6}


def _product(overrides: dict[str, str], **tiling: int) -> dict[str, float]:
    result = run(
        "gemm", hw="ascend_910b1", problem=GemmProblem(m=8192, n=8192, k=8192), numerics=False, trace_groups=(),
        tiling={"block_m": 128, "block_n": 256, "block_k": 64, **tiling}, overrides=overrides or None,
    )  # fmt: skip
    timing = result.timing
    assert timing is not None
    found = {u.queue: max(g[i].busy_cycles for g in timing.queues) for i, u in enumerate(timing.queues[0])}
    us = {name: result.device.seconds(cycles) * 1e6 for name, cycles in found.items()}
    return {**us, "task": timing.times_s["kernel"] * 1e6}


def samples() -> list[Sample]:
    """Return V1 to V5 and V7 of the collection, those quantities that a program here has."""
    add, alone = _rows(16384, 4096), _rows(4096, 16384, ONE_AIV)
    own, one = _product({}), _product({"group_count": "1"}, load_k=64)
    return [
        Sample("V1 Add 8192x8192, 48 AIV, double buffer", "task", 264.02, add["task"]),
        Sample("V1 Add 8192x8192, 48 AIV", "vector, operands in one bank group", 12.846, add["VECTOR"]),
        Sample("V1 Add 8192x8192, one AIV", "MTE2", 6208.8, alone["MTE2"]),
        Sample("V1 Add 8192x8192, one AIV", "MTE3", 2613.2, alone["MTE3"]),
        Sample("V2 GM to UB, 302 MB in DMAs of 128 B, 48 AIV", "MTE2", 548.161, _loads("aiv", 48, 1, 12288)),
        Sample("V3 GM to L1, 302 MB in rows of 128 B, 24 AIC", "MTE2", 283.508, _loads("aic", 24, 64, 12288)),
        Sample("V3 GM to L1, rows of 24574 B, 24 AIC", "MTE2", 422, _loads("aic", 24, 64, 12287)),
        Sample("V5 Matmul+GELU 8192^3, matrix side", "mac", 3083.2, own["aic.CUBE"]),
        Sample("V5 Matmul+GELU 8192^3, matrix side", "MTE1", 2520.9, own["aic.MTE1"]),
        Sample("V5 Matmul+GELU 8192^3, matrix side", "MTE2", 3687.8, own["aic.MTE2"]),
        Sample("V7 product 8192^3 on one core", "mac", 81477.2, one["aic.CUBE"]),
        Sample("V7 product 8192^3 on one core", "MTE2", 195613.4, one["aic.MTE2"]),
        Sample("V7 product 8192^3 on one core", "task", 249467.1, one["task"]),
    ]
