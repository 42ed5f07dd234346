"""The bits of a plan's programs, and their reference: the schedule's own, else the kernel itself in float64."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from npusim.config.load import load_device
from npusim.config.messages import choices
from npusim.config.outside import with_origin
from npusim.config.problem import Problem
from npusim.config.seen import KeyFunction
from npusim.config.tiling import build_tiling
from npusim.errors import SpecError, TensorError
from npusim.formats.cast import widen
from npusim.numerics.evaluate import KernelOutput, evaluate, execute_rows, variant_rows
from npusim.numerics.inputs import (
    array_source,
    drawn_source,
    kernel_source,
    stored_source,
    with_filled_heads,
    with_followers,
    with_padding,
    without_padding,
)
from npusim.numerics.reference import attention
from npusim.schedules import find_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from npusim.config.problem import KernelProblem
    from npusim.ir.program import TileProgram
    from npusim.numerics.evaluate import BlockRows, Programs
    from npusim.numerics.executor import HeadSource
    from npusim.numerics.result import NumericResult
    from npusim.simulation.plan import Plan

#: A device whose cores do any arithmetic, for what a kernel computes in float64.
EXACT_DEVICE = "xeon_avx512"


def subject_of(plan: Plan, program: TileProgram) -> Problem | KernelOutput:
    """Return the subject of a program of the plan: an attention, or rows of plain tensors."""
    return plan.problem if isinstance(plan.problem, Problem) else KernelOutput.of(program)


def source_of(plan: Plan, problem: Problem | KernelOutput) -> HeadSource:
    """Return the inputs: the given ones, or those of the recipe."""
    if problem in plan.sources:
        return plan.sources[problem]
    if isinstance(problem, KernelOutput):
        return plan.sources.setdefault(problem, plain_source(plan, problem))
    if plan.tensors is None:
        source = drawn_source(problem)
    else:
        source = stored_source(without_padding(array_source(plan.tensors, problem.data), problem), problem)
        source = with_filled_heads(source, problem)
    return plan.sources.setdefault(problem, with_padding(source, problem) if plan.request.padding else source)


def plain_source(
    plan: Plan, subject: KernelOutput, change: Callable[[HeadSource], HeadSource] | None = None
) -> HeadSource:
    """Return the inputs of a kernel of plain tensors, ``change`` applied to those that do not follow from others."""
    source = kernel_source(subject.inputs, cast("KernelProblem", plan.problem).seed, plan.tensors)
    given = plan.tensors or ()
    follows = {n: partial(of, plan.problem) for n, of in plan.schedule.follows.items() if n not in given}
    return with_followers(change(source) if change else source, subject.inputs, follows)


def bits_of(plan: Plan, program: TileProgram, **how: Any) -> NumericResult:
    """Return the bits of a program of the plan; ``how`` as for `evaluate`."""
    subject = subject_of(plan, program)
    if isinstance(subject, KernelOutput):
        if not plan.request.is_launch:  # tensors of a launch may include those that it writes
            _check_read(plan.tensors or {}, program)
        how["exact_rows_of"] = partial(_exact_rows, plan, subject)
    how |= {"reference": partial(_reference, plan), "exact": plan.exact}
    return evaluate(program, subject, source_of(plan, subject), **how)


def _check_read(given: Iterable[str], program: TileProgram) -> None:
    """Raise `TensorError` for a given tensor that the program neither reads nor writes."""
    tensors = [t for n, t in program.tensors.items() if n not in program.constants]
    read, written = ([t.name for t in tensors if t.role == role] for role in ("input", "output"))
    for name in given:
        if name not in (*read, *written):
            raise TensorError(f"tensors: nothing in {program.name} reads {name!r}{choices(name, read)}")


def compared_variants(
    plan: Plan, program: TileProgram, variants: Programs
) -> tuple[BlockRows, int, dict[str, NDArray[Any]]]:
    """Return `compared_rows` of the run, and the same rows of variants of its program."""
    subject, r = subject_of(plan, program), plan.request
    return variant_rows(program, subject, source_of(plan, subject), variants, rows=r.rows, heads=r.heads)


def exact_rows(plan: Plan, problem: Problem, batch: int, head: int, row: int, rows: int) -> NDArray[np.float64]:
    """Return rows of a plan's attention in float64, (rows, dv), for a ``problem`` that may have another scale."""
    source = source_of(plan, cast("Problem", plan.problem))
    shared = {"q": head, "k": head // problem.group_size, "v": head // problem.group_size}
    q, k, v = (widen(source(n, batch, of)).astype(np.float64) for n, of in shared.items())
    of_head = _reference(plan, q[row : row + rows], k, v, problem.sequence(batch), row, head)
    return of_head[:, : problem.output_cols]


def _exact_rows(plan: Plan, subject: KernelOutput, batch: int, head: int, row: int, rows: int) -> NDArray[np.float64]:
    """Return rows of a kernel of plain tensors in float64: by its own reference, else by the kernel itself."""
    source = source_of(plan, subject)

    def wide(name: str, *at: int) -> NDArray[np.float64]:
        return widen(source(name, *at)).astype(np.float64)

    if plan.schedule.reference is not None:
        if plan.tiling not in plan.exact_results:
            with with_origin(plan.schedule.origin):
                whole = plan.schedule.reference(plan.problem, subject, wide, plan.tiling)
            plan.exact_results[plan.tiling] = np.asarray(whole)
        return plan.exact_results[plan.tiling][batch, head, row : row + rows]
    if plan.schedule.exact is not None:
        if plan.tiling not in plan.exact_rows:
            plan.exact_rows[plan.tiling] = plan.schedule.exact(plan.problem, plan.tiling)
        return plan.exact_rows[plan.tiling](source, batch, head, row, rows)
    if "kernel" not in plan.exact_programs:
        schedule = find_schedule(plan.request.schedule, "cpu")
        own = schedule.tiling.model_fields.keys() - cast("Any", schedule.tiling.__base__).model_fields.keys()
        tiling = build_tiling(schedule.tiling, {n: v for n, v in plan.tiling if n in own})
        cores = load_device(EXACT_DEVICE).cores.items()
        room = {f"cores.{c}.buffers.{n}.capacity_bytes": 2**40 for c, core in cores for n in core.buffers}
        of_device = load_device(EXACT_DEVICE, room)
        precision = schedule.precision("exact")
        plan.exact_programs["kernel"] = schedule.program(plan.problem, tiling, of_device, precision)
    program = plan.exact_programs["kernel"]
    written = execute_rows(program, source, [row + rows - 1], {head}, batches={batch}, most=rows)[1]
    return np.concatenate([written[at] for at in sorted(written)])[-rows:].astype(np.float64)


def _reference(
    plan: Plan, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], problem: Problem, row: int, head: int = 0
) -> NDArray[np.float64]:
    """Return the float64 reference of errors; a fault in a user's own reference is raised with its file and line.

    ``q`` (rows, d) begins at query ``row`` of ``head``; ``k`` and ``v`` have all keys.  Raises `SpecError` for
    another shape than (rows, dv).
    """
    reference, sees = plan.schedule.reference, plan.schedule.sees
    if reference is not None:
        with with_origin(plan.schedule.origin):
            rows = np.asarray(reference(q, k, v, problem, row, plan.tiling), np.float64)
            if rows.shape != (len(q), v.shape[1]):
                shape = (len(q), v.shape[1])
                raise SpecError(f"reference: returned shape {rows.shape}, wanted (rows, dv) = {shape}")
            return rows
    seen = None if sees is None else KeyFunction(sees(problem, plan.tiling), problem.seq_kv)
    return attention(q, k, v, problem, row, head, seen)
