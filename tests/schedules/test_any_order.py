"""Bits in the order of time: every schedule executed as its clock ran it, against program order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.load import apply_overrides
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.library import SCHEDULES
from npusim.program.ir.walk import ResolvedOp, Walker, walk
from npusim.program.numerics.executor import Execution, Lane, Lockstep, TensorStore, execute
from npusim.program.numerics.input_tensors import recipe_source
from npusim.program.timing import METHODS
from tests.turns import in_turn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import ProgramPhase, TileProgram
    from npusim.program.timing.timing_result import Span

#: Tiles so small that every ring goes around several times within a block.
TILINGS: dict[str, dict[str, Any]] = {
    "standard": {"block_rows": 32},
    "flash": {"block_q": 64, "block_kv": 64, "vector_rows": 8, "depth": 3},
    "two_level": {"block_q": 64, "block_kv": 128, "vector_rows": 16},
    "unified": {"block": 64},
    "pasa": {"block_q": 64, "block_kv": 64, "vector_rows": 8},
    "fp8_attention": {"block_q": 64, "block_kv": 64, "vector_rows": 16},
}
PROBLEMS: dict[str, dict[str, Any]] = {
    "ragged": {"heads": 2, "seq_q": 100, "seq_kv": 197, "head_dim": 32},
    "causal, shared keys, offset": {
        "heads": 2,
        "kv_heads": 1,
        "seq_q": 90,
        "seq_kv": 150,
        "head_dim": 32,
        "causal": True,
    },
}


@pytest.fixture(scope="module")
def one_group(device: DeviceSpec) -> DeviceSpec:
    """The default device with one core group, so that blocks follow one another on it."""
    return apply_overrides(device, {"group_count": "1"})


def build(schedule: str, problem: Problem, device: DeviceSpec, **changes: object) -> TileProgram:
    chosen = SCHEDULES[schedule, device.family]
    fields = build_tiling(chosen.tiling, {**TILINGS[schedule], **changes})
    return chosen.program(problem, fields, device, chosen.precision(None))


def in_order_of_time(
    program: TileProgram, phase: ProgramPhase, spans: Iterator[Span], *, by_end: bool
) -> list[ResolvedOp]:
    """Return the operations of a phase by when they started, or were done.

    A queue is in order, so that its n-th span is its n-th operation.
    """
    listed = list(walk_phase(program, phase))
    ran: list[tuple[int, int, ResolvedOp]] = []
    queues: dict[str, Iterator[Span]] = {}
    mine = [next(spans) for _ in listed]
    for queue in program.queues:
        queues[queue.name] = iter(sorted((s for s in mine if s.queue == queue.name), key=lambda s: (s.start, s.end)))
    for position, resolved in enumerate(listed):
        span = next(queues[resolved.op.queue])
        assert span.label == resolved.op.label
        ran.append((span.end if by_end else span.start, position, resolved))
    return [resolved for _, _, resolved in sorted(ran, key=lambda entry: entry[:2])]


def output_of(program: TileProgram, problem: Problem, orders: Sequence[Sequence[ResolvedOp]]) -> np.ndarray[Any, Any]:
    """Return the output after the phases' operations in the given orders, as bits."""
    state = Execution(TensorStore(program, recipe_source(problem)))
    for phase, order in zip(program.phases, orders, strict=True):
        core_group = Lockstep(program, phase, [Lane(phase.name, state.tensors)], state)
        for resolved in order:
            core_group.execute(resolved, ())
    return bits(state, program, problem)


def bits(state: Execution, program: TileProgram, problem: Problem) -> np.ndarray[Any, Any]:
    heads = [state.tensors.head(program.tensors["o"], 0, h) for h in range(problem.heads)]
    return np.stack(heads).view(np.uint16)


@pytest.mark.parametrize(("schedule", "case"), in_turn([*TILINGS], [*PROBLEMS]))
def test_bits_in_the_order_of_time_are_those_of_program_order(schedule: str, case: str, one_group: DeviceSpec) -> None:
    problem = Problem(**PROBLEMS[case])
    program = build(schedule, problem, one_group)
    expected = bits(execute(program, recipe_source(problem)), program, problem)
    spans = METHODS["des"](program, one_group, trace_groups=(0,)).spans
    by_time = sorted(spans, key=lambda s: (s.start, s.end))
    for by_end in (False, True):
        left = iter(by_time)
        orders = [in_order_of_time(program, p, left, by_end=by_end) for p in program.phases]
        assert next(left, None) is None
        moved = [
            resolved
            for phase, order in zip(program.phases, orders, strict=True)
            for resolved, listed in zip(order, walk_phase(program, phase), strict=True)
            if (resolved.op.label, resolved.path) != (listed.op.label, listed.path)
        ]
        assert moved, "time kept program order: nothing was shown"
        np.testing.assert_array_equal(output_of(program, problem, orders), expected)


def walk_phase(program: TileProgram, phase: ProgramPhase) -> Iterator[ResolvedOp]:
    walker = Walker(program)
    for block in phase.blocks:
        yield from walk(walker, phase.body(block))


def test_an_order_that_the_flags_forbid_changes_bits(one_group: DeviceSpec) -> None:
    """The comparison sees what it should: scores loaded before they are there are poison."""
    problem = Problem(heads=1, seq_q=64, seq_kv=128, head_dim=32)
    program = build("flash", problem, one_group)
    (phase,) = program.phases
    listed = list(walk_phase(program, phase))
    expected = output_of(program, problem, [listed])
    early = sorted(listed, key=lambda r: r.op.label != "S.load")
    assert (output_of(program, problem, [early]) != expected).any()


@pytest.mark.parametrize("case", list(PROBLEMS))
@pytest.mark.parametrize("precision", ["fa2_fp32", "fa16_32", "fa16"])
def test_two_level_and_unified_tiling_of_one_inner_block_give_the_same_bits(
    case: str, precision: str, device: DeviceSpec
) -> None:
    """Who handles which rows when is no part of the algorithm; flash with that block agrees too."""
    problem = Problem(**PROBLEMS[case])
    found = {}
    for schedule, fields in {
        "unified": {"block": 64},
        "two_level": {"block_q": 64, "block_kv": 64, "vector_rows": 5},
        "flash": {"block_q": 64, "block_kv": 64, "vector_rows": 7, "depth": 3},
    }.items():
        chosen = SCHEDULES[schedule, device.family]
        tiling = build_tiling(chosen.tiling, fields)
        program = chosen.program(problem, tiling, device, chosen.precision(precision))
        found[schedule] = bits(execute(program, recipe_source(problem)), program, problem)
    np.testing.assert_array_equal(found["two_level"], found["unified"])
    np.testing.assert_array_equal(found["flash"], found["unified"])


def test_another_inner_block_gives_other_bits(device: DeviceSpec) -> None:
    """So the equality above says something: the order of row sums and rescaling is in the bits."""
    problem = Problem(**PROBLEMS["ragged"])
    found = []
    for block_kv in (64, 128):
        program = build("two_level", problem, device, block_kv=block_kv)
        found.append(bits(execute(program, recipe_source(problem)), program, problem))
    assert (found[0] != found[1]).any()
