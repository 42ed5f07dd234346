"""Blocks of a launch as columns of numbers: all that is computed from the columns is equal to that from each block."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.load import load_device
from npusim.config.problem import KernelProblem
from npusim.kernels.attention.call_blocks import as_free
from npusim.kernels.form.phase import FAMILY, SHAPE
from npusim.kernels.form.work_table import WorkTable
from npusim.program.ir.families import families_of, shapes_of, values_of
from npusim.program.ir.opaque import numbers_of
from npusim.program.ir.residency import residency
from npusim.simulation.chosen_tile import program_of
from npusim.simulation.classes import class_key
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request

if TYPE_CHECKING:
    from npusim.program.ir.tile_program import TileProgram

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="npusim[triton] is not installed")
HERE = Path(__file__).parent
F32 = ".to('float32')"
MATMUL = (
    "plain_kernels.py::matmul[cdiv(M, BM) * cdiv(N, BN)](tensor(M, K), tensor(K, N), tensor(M, N), M, N, K, BM=64, "
    "BN=64, BK=32, GROUP=8)"
)
LAUNCHES: dict[str, tuple[str, dict[str, int]]] = {
    "rows": ("tuned_kernels.py::softmax[R](tensor(R, C), tensor(R, C), R, C, BLOCK=128)", {"R": 700, "C": 100}),
    "rows of few programs": (
        "tuned_kernels.py::softmax[P](tensor(R, C), tensor(R, C), R, C, BLOCK=128)",
        {"R": 900, "C": 64, "P": 132},
    ),
    "a weight that all rows share": (
        f"tuned_kernels.py::rms_norm[R](tensor(R, C), tensor(R, C), tensor(C), tensor(R){F32}, C, 1e-6, BLOCK=128)",
        {"R": 600, "C": 100},
    ),
    "a ragged last block": (
        "plain_kernels.py::add[cdiv(n, BLOCK)](tensor(n), tensor(n), tensor(n), n, BLOCK=256)",
        {"n": 99_000},
    ),
    "products": (MATMUL, {"M": 1000, "N": 520, "K": 96}),
}


def built(name: str, hw: str) -> TileProgram:
    text, sizes = LAUNCHES[name]
    request = Request(f"{HERE}/{text}", hw=hw, problem=KernelProblem.of(sizes), numerics=False)
    return program_of(plan_of(request, is_bare=True), is_hinted=False)[1]


def one_by_one(program: TileProgram) -> TileProgram:
    """Return the program with blocks of their own, not columns."""
    phases = list[Any]()
    for phase in program.phases:
        frame = phase.footprint.frame  # type: ignore[attr-defined]
        cells = tuple(frame.phase.cells)
        apart = type(frame)(replace(frame.phase, cells=cells))
        footprint = replace(phase.footprint, frame=apart)  # type: ignore[type-var]
        phases.append(replace(phase, blocks=tuple(phase.blocks), footprint=footprint))
    return replace(program, phases=tuple(phases))


@pytest.mark.parametrize("hw", ["h100", "ascend_910b2"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_columns_give_what_blocks_give(name: str, hw: str) -> None:
    program, device = built(name, hw), load_device(hw)
    apart = one_by_one(program)
    (phase,), (own,) = program.phases, apart.phases
    assert isinstance(phase.blocks, WorkTable)
    assert [*phase.blocks] == [*own.blocks]
    assert shapes_of(phase) == shapes_of(own)
    families, others = families_of(phase), families_of(own)
    assert families
    assert others
    for one, other in zip(families, others, strict=True):
        assert np.array_equal(one.numbers, other.numbers)
        mine, its = ([values_of(n, f.coordinates) for n in numbers_of(f.block)] for f in (one, other))
        assert len(mine) == len(its)
        assert all(map(np.array_equal, mine, its))
        assert np.array_equal(one.sizes, other.sizes)
        pairs = zip(one.coordinates.items(), other.coordinates.items(), strict=True)
        assert all((s.name, s.bounds) == (t.name, t.bounds) and np.array_equal(a, b) for (s, a), (t, b) in pairs)
    assert class_key(program, device) == class_key(apart, device)
    assert phase.place_count == own.place_count
    l2 = device.memory.l2.capacity_bytes.value
    for capacity in (l2, 100_000, 3_000):
        for how in ((False,), (True, 0.0), (True, 40_000.5), (True, None, True)):
            assert residency(program, 24, capacity, *how) == residency(apart, 24, capacity, *how)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAUNCHES)
def test_blocks_reach_the_slots_that_are_free_first(name: str) -> None:
    table = built(name, "h100").phases[0].footprint.frame.phase.cells  # type: ignore[attr-defined]
    rng = np.random.default_rng(7)
    uneven = WorkTable(table.axes, table.numbers, (*table.kinds, table.kinds[0]._replace(runs=())), table.which)
    uneven.which = rng.integers(0, len(uneven.kinds), len(table))
    for blocks in (table, uneven):
        for cores, residents in ((7, 1), (7, 3), (132, 2), (10_000, 2)):
            placed, shares = as_free(blocks, cores, residents)
            expected, dealt = as_free(tuple(blocks), cores, residents)
            assert ([*placed], shares) == ([*expected], dealt)


def test_a_key_of_its_own_is_asked_of_each_block() -> None:
    table = built("products", "h100").phases[0].blocks
    assert isinstance(table, WorkTable)
    assert table.grouped(lambda block: block.row) is None
    for key_of in (SHAPE, FAMILY):
        groups: dict[object, list[int]] = {}
        for number, block in enumerate(table):
            groups.setdefault(key_of(block), []).append(number)
        assert {key: numbers.tolist() for key, numbers in (table.grouped(key_of) or {}).items()} == groups


def test_tables_are_equal_by_content() -> None:
    one, other = (built("rows", "h100").phases[0].blocks for _ in range(2))
    assert one is not other
    assert one == other
    assert isinstance(one, WorkTable)
    assert one != one.at(np.zeros(len(one), np.int64) + 5)
    assert one[0] is one[0]
    assert one[3:5] == (one[3], one[4])
