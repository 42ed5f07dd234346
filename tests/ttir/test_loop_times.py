"""Cycles of one tile of a compiled attention on an H200, by what stands where in its loop.

By its steps, which are what a loop costs whose machine code is not followed (`npusim.machines.sm.compiled_loops`).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim.machines.sm.group_work import GroupWork
from npusim.program.ir.op import TileOp
from npusim.program.timing.stream import Streams
from ttir.marks import as_measured

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npusim.program.ir.tile_program import Cost, Item

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="npusim[triton] is not installed"),
    pytest.mark.usefixtures("without_warp_code"),
]
KERNELS = Path(__file__).parent / "loop_kernels.py"
#: Rows, keys and head size of the tile, and tokens.
M, N, D, SEQ = 64, 64, 128, 256


@cache
def tile(form: str, stages: int, warps: int = 4, d: int = D) -> list[tuple[TileOp, Cost]]:
    """Return the operations of the first tile, with their costs."""
    sizes = f"1.0, {SEQ}, D={d}, BM={M}, BN={N}, FORM={form!r}"
    tensors = ", ".join(4 * [f"tensor(1, {SEQ}, {d})"])
    launch = f"{KERNELS}::attention[{SEQ // M}, 1]({tensors}, {sizes})"
    result = npusim.run(launch, hw="h200", tiling={"warps": warps, "stages": stages}, numerics=False)
    costs, phase = Streams(result.program, result.device).costs, result.program.phases[-1]
    whole = list(flat(phase.body(phase.blocks[0])))
    begin = next(i for i, op in enumerate(whole) if op.label == "S.mma")
    end = next(i for i, op in enumerate(whole) if op.label == "finish")
    return [(op, costs.of_op(op)) for op in whole[begin:end]]


def flat(items: Iterable[Item]) -> Iterator[TileOp]:
    """Yield the operations of a loop's first iteration, and all others."""
    for item in items:
        if isinstance(item, TileOp):
            yield item
        else:
            yield from flat(item.body(item.indices[0]))


def busy(form: str, stages: int, part: str, warps: int = 4) -> int:
    """Return the cycles of a part of the core in one tile."""
    shares = [cost.share for _, cost in tile(form, stages, warps) if cost.share]
    return sum(round(getattr(share, part) * share.cycles / (1 << 20)) for share in shares)


@pytest.mark.parametrize("form", ["plain", "scaled", "last"])
@pytest.mark.parametrize("stages", [1, 2])
def test_tensor_cores_execute_the_whole_of_both_products(form: str, stages: int) -> None:
    """What is left of P V runs beside arithmetic that follows, and does not vanish: 2 M N D products at 4,096 a cycle.

    (``wgmma``: 64 x N x 16 takes N / 2 cycles.)
    """
    assert busy(form, stages, "tensor") == pytest.approx(2 * M * N * D / (64 * 16 * 2), abs=4)


@pytest.mark.parametrize(("warps", "times"), [(4, 1), (8, 2)])
def test_a_scaled_q_comes_from_shared_memory_into_registers_in_every_tile(warps: int, times: int) -> None:
    """All warps that compute its rows load them, 128 bytes a cycle: twice where 8 warps compute S twice.

    Products read a Q that is not scaled from there themselves, once for each of their instructions.
    """
    scaled, q = next(cost.share for op, cost in tile("scaled", 2, warps) if op.label == "S.mma"), M * D * 2 // 128
    assert scaled is not None
    k = N * D * 2 // 128
    assert scaled.memory * scaled.cycles / (1 << 20) == pytest.approx(times * (q + k), abs=2)


@pytest.mark.parametrize(("form", "is_serial"), [("plain", False), ("scaled", True)])
@as_measured
def test_warps_wait_for_each_product_where_the_machine_code_does(form: str, is_serial: bool) -> None:
    """Of heads of 64 and three stages: an H200's tile takes 967 cycles alone, with a scaled Q 1,289."""
    work = tile(form, 3, d=64)[0][0].work
    assert isinstance(work, GroupWork)
    assert work.decided.is_serial is is_serial


@pytest.mark.parametrize(("stages", "left", "waits"), [(1, 1, True), (2, 2, True), (3, 2, False)])
def test_operands_at_loaded_places_are_a_level_behind_these(stages: int, left: int, waits: bool) -> None:
    """Triton loads the places with the stages beyond one for each level, and at once where there are none.

    SGLang's grouped decode on an H200, blocks of 32 keys: 56.3, 55.3 and 41.4 us with 1, 2 and 3 stages.
    """
    from ttir import loop_kernels

    q, k, v, o = (np.zeros((SEQ, D), np.float16) for _ in range(4))
    at = np.random.default_rng(0).permutation(SEQ).astype(np.int32)
    with npusim.record(floats=False) as calls:
        loop_kernels.listed[(SEQ // M,)](q, k, v, at, o, SEQ, D=D, BM=M, BN=N, num_stages=stages)
    call: Any = next(iter(calls))
    result = npusim.run(call, hw="h200", numerics=False)
    costs, phase = Streams(result.program, result.device).costs, result.program.phases[-1]
    ops = list(flat(phase.body(phase.blocks[0])))
    first = next(op for op in ops if op.label == "S.mma")
    assert isinstance(first.work, GroupWork)
    assert first.work.decided.stages == left
    loads = [op for op in ops if op.label.endswith(".load")]
    latencies = [costs.of_op(op).latency_cycles for op in loads]
    later = [n - latencies[0] for n in latencies[1:]]
    assert all((extra > 200) is waits for extra in later), dict(zip([op.label for op in loads], latencies, strict=True))


@pytest.mark.parametrize(("rows", "columns", "warps"), [(64, 64, 4), (128, 128, 4), (128, 64, 8), (32, 64, 2)])
def test_products_of_masked_tiles_are_those_of_whole_ones(rows: int, columns: int, warps: int) -> None:
    """A product of warp groups computes its tile whatever a mask leaves, of a left factor stored as its transpose too.

    Mamba's chunk_state on an H200, 64 x 128 of it in blocks of 128 x 256 x 64: 198 us, 104 for the part that is left.
    """
    from ttir import loop_kernels

    d, depth = min(64, rows), 32
    x, b = np.zeros((SEQ, d), np.float16), np.zeros((SEQ, 64), np.float16)
    w, o = np.zeros(SEQ, np.float32), np.zeros((d, 64), np.float32)
    with npusim.record(floats=False) as calls:
        loop_kernels.states[(1,)](x, b, w, o, d, 64, SEQ, BM=rows, BN=columns, BK=depth, num_warps=warps)
    call: Any = next(iter(calls))
    result = npusim.run(call, hw="h200", numerics=False)
    costs, phase = Streams(result.program, result.device).costs, result.program.phases[-1]
    ops = list(flat(phase.body(phase.blocks[0])))
    works = [op.work for op in ops if op.label.endswith(".mma")]
    generations = {work.decided.generation for work in works if isinstance(work, GroupWork)}
    assert generations == {"wgmma" if rows >= 64 else "mma"}
    if rows >= 64:
        whole = [costs.of_op(op) for op in ops if op.label.endswith((".mma", "copies"))]
        tensor = sum(share.tensor * share.cycles / (1 << 20) for cost in whole if (share := cost.share))
        assert tensor == pytest.approx(rows * columns * depth / (64 * 16 * 2), abs=4)
    # What rows make of the right factor passes through shared memory, whoever multiplies it.
    stores = [costs.of_op(op).share for op in ops if op.label.endswith(".store") and op.engine == "LSU"]
    assert stores
    assert all(share and share.memory for share in stores)


@pytest.mark.parametrize("block", [128, 32])
def test_a_row_that_one_tile_covers_is_one_region_of_memory(block: int, tmp_path: Path) -> None:
    """A matrix of a stack that blocks are at is walked along its columns: no matrix for each of these."""
    shares, rows, columns = import_module("ttir.loop_kernels").shares, 8, 96
    with npusim.record() as calls:
        shares[(rows,)](np.zeros((rows, columns), np.float16), np.zeros(rows, np.int64), np.zeros(rows), columns, block)
    calls.save(tmp_path / "calls.npz")
    phase = npusim.run(f"{tmp_path / 'calls.npz'}::0", hw="h200", numerics=False).program.phases[0]
    regions = [touch.region for touch in phase.footprint(list(phase.alone[:1]))]
    assert sorted((region.rows, region.cols) for region in regions) == [(1, 1), (1, 1), (1, columns), (1, columns)]
