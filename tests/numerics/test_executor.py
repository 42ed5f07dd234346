"""Execution of programs: against plain attention in numpy, in other orders, over poisoned memory."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import networkx as nx
import numpy as np
import pytest
from ir.toy import order_graph

from npusim import formats
from npusim.config.problem import Problem
from npusim.errors import TensorError
from npusim.program.ir.op import Opcode
from npusim.program.ir.walk import Walker, walk
from npusim.program.numerics.executor import (
    EAGER_ROWS,
    LANES,
    BufferStore,
    Execution,
    Lane,
    Lockstep,
    SharedTile,
    TensorStore,
    ViewKey,
    execute,
)
from npusim.program.numerics.input_tensors import array_source, recipe_source
from npusim.program.timing import des
from numerics.toy_values import Straight

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram

Array = Any


def plain_attention(q: Array, k: Array, v: Array, problem: Problem) -> Array:
    """Return softmax(scale Q K^T + mask) V in float64, one query row at a time."""
    out = np.empty((problem.batch, problem.heads, problem.seq_q, problem.value_head_dim))
    for b in range(problem.batch):
        for h in range(problem.heads):
            kv = h * problem.kv_heads // problem.heads
            keys, values = k[b, kv].astype(np.float64), v[b, kv].astype(np.float64)
            for i in range(problem.seq_q):
                seen = problem.seq_kv
                if problem.causal:
                    seen = min(seen, i + problem.causal_offset + 1)
                s = problem.scale * (keys[:seen] @ q[b, h, i].astype(np.float64))
                p = np.exp(s - np.logaddexp.reduce(s))
                out[b, h, i] = p @ values[:seen]
    return out


def draw(problem: Problem, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (problem.batch, problem.heads, problem.seq_q, problem.head_dim),
        "k": (problem.batch, problem.kv_heads, problem.seq_kv, problem.head_dim),
        "v": (problem.batch, problem.kv_heads, problem.seq_kv, problem.value_head_dim),
    }
    return {n: formats.cast(rng.standard_normal(s), problem.dtype) for n, s in shapes.items()}


def outputs(program: TileProgram, problem: Problem, tensors: dict[str, Array]) -> Array:
    done = execute(program, array_source(tensors))
    o = program.tensors["o"]
    heads = [[done.tensors.head(o, b, h) for h in range(problem.heads)] for b in range(problem.batch)]
    return np.array(heads)


#: Tiling and problem; sizes that fill no block, one row, shared heads, unequal head sizes, masks.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ragged 197": ({}, {"heads": 2, "seq_q": 197, "seq_kv": 197, "head_dim": 64}),
    "decode": ({}, {"heads": 2, "seq_q": 1, "seq_kv": 300, "head_dim": 128}),
    "decode, causal": ({}, {"heads": 1, "seq_q": 1, "seq_kv": 300, "head_dim": 64, "causal": True}),
    "one query, one key": ({}, {"heads": 1, "seq_q": 1, "seq_kv": 1, "head_dim": 16}),
    "shared heads": ({}, {"heads": 6, "kv_heads": 2, "seq_q": 70, "seq_kv": 150, "head_dim": 64}),
    "one kv head": ({}, {"heads": 3, "kv_heads": 1, "seq_q": 40, "seq_kv": 90, "head_dim": 32, "causal": True}),
    "two sequences": ({}, {"batch": 2, "heads": 2, "seq_q": 33, "seq_kv": 47, "head_dim": 32}),
    "head 16": ({"block_kv": 64}, {"heads": 1, "seq_q": 100, "seq_kv": 200, "head_dim": 16}),
    "head 192": ({"block_kv": 128}, {"heads": 1, "seq_q": 60, "seq_kv": 200, "head_dim": 192, "value_head_dim": 128}),
    "head 256": ({"block_q": 64, "block_kv": 128}, {"heads": 1, "seq_q": 70, "seq_kv": 140, "head_dim": 256}),
    "head 576 and 64": (
        {"block_kv": 64},
        {"heads": 1, "seq_q": 33, "seq_kv": 65, "head_dim": 576, "value_head_dim": 64},
    ),
    "wide values": ({"block_kv": 64}, {"heads": 1, "seq_q": 33, "seq_kv": 65, "head_dim": 32, "value_head_dim": 144}),
    "causal": ({"block_kv": 128}, {"heads": 1, "seq_q": 300, "seq_kv": 300, "head_dim": 64, "causal": True}),
    "causal, more keys": ({"block_kv": 64}, {"heads": 1, "seq_q": 100, "seq_kv": 333, "head_dim": 64, "causal": True}),
    "causal, own offset": (
        {"block_q": 32, "block_kv": 48},
        {"heads": 1, "seq_q": 90, "seq_kv": 200, "head_dim": 32, "causal": True, "causal_offset": 17},
    ),
    "causal, keys that none sees": (
        {"block_q": 16, "block_kv": 32},
        {"heads": 1, "seq_q": 20, "seq_kv": 200, "head_dim": 32, "causal": True, "causal_offset": 0},
    ),
    "tiny keys": (
        {"block_q": 32, "block_kv": 16, "depth": 3},
        {"heads": 1, "seq_q": 50, "seq_kv": 101, "head_dim": 32},
    ),
    "tiny blocks, causal": (
        {"block_q": 16, "block_kv": 16, "depth": 1},
        {"heads": 1, "seq_q": 75, "seq_kv": 75, "head_dim": 16, "causal": True},
    ),
    "slices of one row": (
        {"block_q": 16, "block_kv": 32, "vector_rows": 1},
        {"heads": 1, "seq_q": 21, "seq_kv": 65, "head_dim": 32},
    ),
    "slices that divide nothing": (
        {"block_q": 112, "block_kv": 80, "vector_rows": 13},
        {"heads": 1, "seq_q": 201, "seq_kv": 309, "head_dim": 48, "causal": True},
    ),
    "several bands": ({"block_q": 256, "block_kv": 64}, {"heads": 1, "seq_q": 256, "seq_kv": 130, "head_dim": 64}),
    "bfloat16": ({}, {"heads": 1, "seq_q": 90, "seq_kv": 90, "head_dim": 64, "dtype": "bfloat16"}),
}


@pytest.mark.parametrize("case", SHAPES)
def test_flash_is_attention(case: str, build_flash: Callable[..., TileProgram]) -> None:
    tiling, fields = SHAPES[case]
    problem = Problem(**fields)
    tensors = draw(problem, seed=1)
    got = outputs(build_flash(tiling, **fields), problem, tensors).astype(np.float64)
    expected = plain_attention(**tensors, problem=problem)
    assert np.isfinite(got).all()
    # One rounding of P to float16 (2^-11) or bfloat16 (2^-8) an element, and one of the output.
    bound = 1e-3 if problem.dtype == "float16" else 8e-3
    assert np.linalg.norm(got - expected) <= bound * np.linalg.norm(expected)


def test_one_key_gives_its_value_back_bit_for_bit(build_flash: Callable[..., TileProgram]) -> None:
    """softmax of one score is 1, and 1 * v / 1 rounds to v."""
    fields: dict[str, Any] = {"heads": 1, "seq_q": 5, "seq_kv": 1, "head_dim": 32}
    problem = Problem(**fields)
    tensors = draw(problem, seed=2)
    got = outputs(build_flash(**fields), problem, tensors)
    assert (got == tensors["v"]).all()


def test_equal_keys_average_the_values_exactly(build_flash: Callable[..., TileProgram]) -> None:
    """With K = 0 all weights are 1; sums of 64 small integers and the division by 64 are exact."""
    fields: dict[str, Any] = {"heads": 1, "seq_q": 40, "seq_kv": 64, "head_dim": 32}
    problem = Problem(**fields)
    tensors = draw(problem, seed=3)
    tensors["k"][...] = 0
    tensors["v"][...] = np.random.default_rng(3).integers(-8, 9, tensors["v"].shape)
    got = outputs(build_flash({"block_kv": 16}, **fields), problem, tensors)
    expected = tensors["v"].astype(np.float64).mean(axis=2, keepdims=True).astype(np.float16)
    assert (got == expected).all()


def test_heads_that_share_keys_get_the_same_bits_as_with_their_own(build_flash: Callable[..., TileProgram]) -> None:
    shared: dict[str, Any] = {"heads": 4, "kv_heads": 2, "seq_q": 40, "seq_kv": 60, "head_dim": 32}
    own = {**shared, "kv_heads": 4}
    tensors = draw(Problem(**shared), seed=4)
    repeated = {"q": tensors["q"], **{n: np.repeat(tensors[n], 2, axis=1) for n in ("k", "v")}}
    a = outputs(build_flash(**shared), Problem(**shared), tensors)
    b = outputs(build_flash(**own), Problem(**own), repeated)
    assert (a.view(np.uint16) == b.view(np.uint16)).all()


def test_a_query_that_sees_few_keys_ignores_the_others_bit_for_bit(build_flash: Callable[..., TileProgram]) -> None:
    """Under the mask, keys right of the diagonal may hold anything finite."""
    fields: dict[str, Any] = {"heads": 1, "seq_q": 70, "seq_kv": 70, "head_dim": 32, "causal": True}
    problem = Problem(**fields)
    program = build_flash({"block_q": 32, "block_kv": 16}, **fields)
    tensors = draw(problem, seed=5)
    changed = {n: a.copy() for n, a in tensors.items()}
    changed["k"][:, :, 30:] = 37.0
    changed["v"][:, :, 30:] = -1000.0
    a, b = outputs(program, problem, tensors), outputs(program, problem, changed)
    assert (a[:, :, :30].view(np.uint16) == b[:, :, :30].view(np.uint16)).all()
    assert (a[:, :, 30:] != b[:, :, 30:]).any()


# ---------------------------------------------------------------- grouping and order


GROUPED: dict[str, Any] = {"heads": 2 * LANES + 3, "seq_q": 20, "seq_kv": 50, "head_dim": 16, "causal": True}


def test_bits_do_not_depend_on_which_blocks_run_together(build_flash: Callable[..., TileProgram]) -> None:
    program = build_flash({"block_q": 16, "block_kv": 16}, **GROUPED)
    tensors = draw(Problem(**GROUPED), seed=6)
    together = execute(program, array_source(tensors))
    o, phase = program.tensors["o"], program.phases[-1]
    for block in phase.blocks[:: len(phase.blocks) // 7]:
        alone = execute(program, array_source(tensors), {phase.name: [block]})
        rows = slice(block.row, block.row + block.rows)
        a = together.tensors.head(o, 0, block.head)[rows]
        b = alone.tensors.head(o, 0, block.head)[rows]
        assert (a.view(np.uint16) == b.view(np.uint16)).all()


@pytest.mark.parametrize("problem", [{"kv_heads": 5}, {"kv_heads": 5, "seq_q": 1, "causal": False}], ids=str)
def test_tiles_that_lanes_share_are_loaded_once_and_change_no_bit(
    problem: dict[str, Any], build_flash: Callable[..., TileProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of a group read the same K and V; where events are counted, each lane has its own."""
    fields = {**GROUPED, **problem}
    program = build_flash({"block_q": 16, "block_kv": 16}, **fields)
    tensors, shared = draw(Problem(**fields), seed=6), list[tuple[int, int]]()

    def share(store: BufferStore, key: Any, loaded: SharedTile) -> None:
        shared.append((len(loaded.tiles), len(loaded.of)))
        of_class(store, key, loaded)

    of_class = BufferStore.share
    monkeypatch.setattr(BufferStore, "share", share)
    o, (each, once) = (
        program.tensors["o"],
        (execute(program, array_source(tensors), is_counted=n) for n in (True, False)),
    )
    assert shared
    assert all(2 * tiles <= lanes for tiles, lanes in shared)
    for head in range(fields["heads"]):
        assert each.tensors.head(o, 0, head).tobytes() == once.tensors.head(o, 0, head).tobytes()


def test_another_view_of_a_shared_tile_has_each_lanes_values() -> None:
    store = BufferStore(cast("Any", SimpleNamespace(used_bytes={"UB": 256})), 3, {})
    tiles = np.arange(16, dtype=np.float32).reshape(2, 2, 4)
    key: ViewKey = ("UB", 32, 2, 4, 4, "float32")
    store.share(key, SharedTile(tiles, np.array([1, 0, 1])))
    assert store.shared(key) is not None
    row = store.view(("UB", 48, 1, 4, 4, "float32"))
    np.testing.assert_array_equal(row, tiles[[1, 0, 1], 1:])
    assert store.shared(key) is None
    np.testing.assert_array_equal(store.view(key), tiles[[1, 0, 1]])
    assert np.isnan(store.view(("UB", 16, 1, 4, 4, "float32"))).all()
    assert np.isnan(store.view(("UB", 16, 1, 8, 8, "float32"))[:, :, :4]).all()


def test_rows_of_a_large_result_start_as_nan_when_they_are_asked_for(build_flash: Callable[..., TileProgram]) -> None:
    fields = {"heads": 1, "seq_q": 2 * EAGER_ROWS, "seq_kv": 16, "head_dim": 16}
    program = build_flash({"block_q": 16, "block_kv": 16}, **fields)
    store, o = TensorStore(program, array_source(draw(Problem(**fields), seed=1))), program.tensors["o"]
    store.started(o, (0, 0), 3, 5)[4] = 1
    part = store.started(o, (0, 0), 4, 7)
    assert np.isnan(part[[3, 5, 6]]).all()
    whole = store.head(o, 0, 0)
    assert whole[4].tolist() == [1] * 16
    assert np.isnan(np.delete(whole, 4, 0)).all()


def test_a_block_is_hashed_a_few_times_however_many_operations_it_has(
    build_flash: Callable[..., TileProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = build_flash({"block_q": 16, "block_kv": 16}, **GROUPED)
    blocks = program.phases[-1].blocks
    kind, hashed = type(blocks[0]), list[object]()
    hash_of = cast("Callable[[object], int]", kind.__hash__)

    def counted(block: object) -> int:
        hashed.append(block)
        return hash_of(block)

    monkeypatch.setattr(kind, "__hash__", counted)
    execute(program, array_source(draw(Problem(**GROUPED), seed=6)))
    assert len(hashed) <= 4 * len(blocks)


def test_a_block_writes_its_own_rows_and_no_others(build_flash: Callable[..., TileProgram]) -> None:
    fields: dict[str, Any] = {"heads": 2, "seq_q": 50, "seq_kv": 40, "head_dim": 16}
    program = build_flash({"block_q": 16, "block_kv": 16}, **fields)
    o, phase = program.tensors["o"], program.phases[-1]
    block = phase.blocks[1]
    done = execute(program, array_source(draw(Problem(**fields), seed=7)), {phase.name: [block]})
    written = done.tensors.written(o)
    assert set(written) == {(0, 0)}
    is_written = ~np.isnan(written[0, 0]).any(axis=1)
    assert list(np.nonzero(is_written)[0]) == list(range(16, 32))


ONE_BLOCK: dict[str, dict[str, Any]] = {
    "causal": {"heads": 1, "seq_q": 60, "seq_kv": 300, "head_dim": 32, "causal": True},
    "ragged": {"heads": 1, "seq_q": 61, "seq_kv": 250, "head_dim": 160},
}


def run_in_order(program: TileProgram, tensors: dict[str, Array], order: list[int]) -> Array:
    """Return the output bits of a program's only block, its operations executed in ``order``."""
    phase = program.phases[0]
    operations = list(walk(Walker(program), phase.body(phase.blocks[0])))
    state = Execution(TensorStore(program, array_source(tensors)))
    lockstep = Lockstep(program, phase, [Lane(phase.blocks[0], state.tensors)], state)
    for index in order:
        lockstep.execute(operations[index], [])
    return np.array(state.tensors.head(program.tensors["o"], 0, 0)).view(np.uint16)


def start_order(program: TileProgram, device: DeviceSpec) -> list[int]:
    """Return the operations of a program's only block in the order in which ``des`` starts them."""
    phase = program.phases[0]
    assert len(phase.blocks) == 1
    of_queue: dict[str, list[int]] = {}
    for index, op in enumerate(walk(Walker(program), phase.body(phase.blocks[0]))):
        of_queue.setdefault(op.op.queue, []).append(index)
    starts = []
    for span in des.simulate(program, device, trace_groups=(0,)).spans:
        index = of_queue[span.queue].pop(0)
        starts.append((span.start, len(starts), index))
    assert not any(of_queue.values())
    # Spans come as operations end: sort by start; a queue's own come in its order.
    return [index for _, _, index in sorted(starts)]


@pytest.mark.parametrize("case", ONE_BLOCK)
def test_bits_in_the_order_of_simulated_starts_are_those_of_program_order(
    case: str, build_flash: Callable[..., TileProgram], device: DeviceSpec
) -> None:
    program = build_flash({"block_q": 64, "block_kv": 32, "vector_rows": 8}, **ONE_BLOCK[case])
    tensors = draw(Problem(**ONE_BLOCK[case]), seed=8)
    order = start_order(program, device)
    assert order != sorted(order)  # queues do run ahead of one another
    expected = run_in_order(program, tensors, sorted(order))
    assert (run_in_order(program, tensors, order) == expected).all()


@pytest.mark.parametrize("seed", range(3))
def test_bits_are_the_same_in_any_order_that_queues_and_flags_allow(
    seed: int, build_flash: Callable[..., TileProgram]
) -> None:
    program = build_flash({"block_q": 64, "block_kv": 32, "vector_rows": 8}, **ONE_BLOCK["causal"])
    tensors = draw(Problem(**ONE_BLOCK["causal"]), seed=9)
    phase = program.phases[0]
    graph, _ = order_graph(list(walk(Walker(program), phase.body(phase.blocks[0]))))
    rng = Random(seed)
    weight = {node: rng.random() for node in graph}
    order = list(nx.lexicographical_topological_sort(graph, key=weight.__getitem__))
    expected = run_in_order(program, tensors, sorted(order))
    assert (run_in_order(program, tensors, order) == expected).all()


def test_an_order_that_breaks_a_flag_changes_bits(build_flash: Callable[..., TileProgram]) -> None:
    """The law above could fail: without waits the same shuffling reads slots too early."""
    program = build_flash({"block_q": 64, "block_kv": 32, "vector_rows": 8}, **ONE_BLOCK["causal"])
    tensors = draw(Problem(**ONE_BLOCK["causal"]), seed=9)
    phase = program.phases[0]
    operations = list(walk(Walker(program), phase.body(phase.blocks[0])))
    queue_by_queue = sorted(range(len(operations)), key=lambda i: (operations[i].queue, i))
    expected = run_in_order(program, tensors, list(range(len(operations))))
    assert (run_in_order(program, tensors, queue_by_queue) != expected).any()


# ---------------------------------------------------------------- poison and inputs


@pytest.mark.parametrize("fmt", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
def test_what_is_read_before_it_is_written_is_nan(fmt: str) -> None:
    s = Straight(4, 8, fmt)
    unwritten = s.tile("unwritten")
    s.store(unwritten)
    (y,), _ = s.run(np.zeros((4, 8), formats.get_format(fmt).dtype))
    assert np.isnan(y.astype(np.float64)).all()


def test_a_forgotten_start_of_the_running_state_reaches_the_output_as_nan(
    build_flash: Callable[..., TileProgram],
) -> None:
    fields: dict[str, Any] = {"heads": 1, "seq_q": 20, "seq_kv": 40, "head_dim": 16}
    program = build_flash({"block_kv": 16}, **fields)
    tensors = draw(Problem(**fields), seed=10)
    phase = program.phases[0]
    operations = list(walk(Walker(program), phase.body(phase.blocks[0])))
    kept = [i for i, o in enumerate(operations) if o.op.label != "state.start"]
    assert len(kept) < len(operations)
    assert np.isnan(run_in_order(program, tensors, kept).view(np.float16)).all()


def test_outputs_that_no_block_writes_stay_nan(build_flash: Callable[..., TileProgram]) -> None:
    fields: dict[str, Any] = {"heads": 1, "seq_q": 20, "seq_kv": 40, "head_dim": 16}
    program = build_flash({"block_kv": 16}, **fields)
    done = execute(program, array_source(draw(Problem(**fields), seed=1)), {program.phases[0].name: []})
    assert np.isnan(done.tensors.head(program.tensors["o"], 0, 0)).all()


def test_an_input_of_another_shape_than_the_programs_is_refused(build_flash: Callable[..., TileProgram]) -> None:
    fields: dict[str, Any] = {"heads": 1, "seq_q": 20, "seq_kv": 40, "head_dim": 16}
    tensors = draw(Problem(**{**fields, "seq_kv": 41}), seed=1)
    with pytest.raises(TensorError, match=r"tensor k: its values have shape \(41, 16\); needed: \(40, 16\)"):
        execute(build_flash(**fields), array_source(tensors))


def test_ragged_parts_of_a_tile_are_zero_filled_to_the_fractal_of_the_matrix_unit() -> None:
    """5 keys: the product's depth is filled up with zeros, not with poison."""
    s = Straight(16, 5, "float16", out_fmt="float32")
    x, total = s.tile("x"), s.tile("total", "float32", 16, 5)
    b = s.tile("b", rows=5, cols=5)
    s.load(x)
    s.step("ones", Opcode.FILL, b, 1.0)
    s.step("mmad", Opcode.MATMUL, total, x, b, arithmetic="ascend.cube.k16.f16.f32")
    s.store(total)
    values = np.arange(80, dtype=np.float16).reshape(16, 5)
    (y,), _ = s.run(values)
    assert (y == values.astype(np.float32).sum(axis=1, keepdims=True)).all()


# ---------------------------------------------------------------- recipes


def test_a_head_is_drawn_alike_whichever_others_are_asked_for() -> None:
    problem = Problem(heads=4, seq_q=10, seq_kv=12, head_dim=16)
    first, second = recipe_source(problem, seed=3), recipe_source(problem, seed=3)
    second("k", 0, 0), second("q", 0, 1)
    assert (first("q", 0, 3) == second("q", 0, 3)).all()


@pytest.mark.parametrize("other", [("q", 0, 1), ("k", 0, 0), ("q", 1, 0)])
def test_tensors_heads_and_sequences_are_drawn_apart(other: tuple[str, int, int]) -> None:
    source = recipe_source(Problem(batch=2, heads=2, seq_q=10, head_dim=16), seed=3)
    assert (source("q", 0, 0) != source(*other)).any()


def test_the_seed_of_the_call_replaces_the_recipes() -> None:
    problem = Problem(heads=1, seq_q=10, head_dim=16)
    assert (recipe_source(problem)("q", 0, 0) == recipe_source(problem, seed=0)("q", 0, 0)).all()
    assert (recipe_source(problem)("q", 0, 0) != recipe_source(problem, seed=1)("q", 0, 0)).any()
