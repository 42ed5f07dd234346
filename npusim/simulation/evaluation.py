"""The bits of a plan's programs, and their reference: the schedule's reference, or the kernel itself in float64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np

from npusim.config.load import load_device
from npusim.config.messages import choices
from npusim.config.outside import with_origin
from npusim.config.seen import KeyFunction
from npusim.config.tiling import build_tiling
from npusim.errors import SpecError, TensorError
from npusim.formats.cast import widen
from npusim.late_methods import dataclass
from npusim.library import schedules_called
from npusim.program.numerics.evaluate import evaluate, rows_alone, variant_rows
from npusim.program.numerics.input_tensors import (
    array_source,
    drawn_source,
    kernel_source,
    recipe_source,
    stored_source,
    with_filled_heads,
    with_followers,
    with_padding,
    without_padding,
)
from npusim.program.numerics.reference import attention

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from npusim.config.problem import Problem
    from npusim.kernels.declare.registry import ExactResults, Schedule
    from npusim.program.ir.tile import GlobalTensor
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.bits_result import NumericResult
    from npusim.program.numerics.evaluate import BlockRows, Output, Programs, Span
    from npusim.program.numerics.executor import HeadSource
    from npusim.simulation.plan import Plan

#: A device whose cores support any arithmetic, for a kernel in float64.
EXACT_DEVICE = "xeon_avx512"


@dataclass(frozen=True)
class Subject(ABC):
    """The result of a plan's program, with everything that its bits need: sizes, inputs, float64 result."""

    #: Word of `Sizes.features` for a problem with such a result.
    kind: ClassVar[str]

    @property
    @abstractmethod
    def output(self) -> Output:
        """Sizes of the result."""

    @property
    def attention(self) -> Problem | None:
        """The attention; None if the inputs are plain tensors."""
        return None

    @property
    def plain(self) -> Mapping[str, GlobalTensor]:
        """Plain tensors that the program reads, by name."""
        return {}

    @abstractmethod
    def source(self, plan: Plan) -> HeadSource:
        """Return the inputs: the given ones, or those of the recipe."""

    @abstractmethod
    def changed_source(
        self, plan: Plan, change: Callable[[HeadSource], HeadSource], seed: int, *, is_padded: bool
    ) -> HeadSource:
        """Return the inputs with ``change`` applied to the given inputs, or to inputs drawn from ``seed``.

        ``is_padded``: keys that no query sees are NaN.
        """

    @abstractmethod
    def read_heads(self, heads: Collection[int]) -> dict[str, tuple[int, int]]:
        """Return batches and heads of the inputs from which some heads of the result are computed, by name."""

    @abstractmethod
    def exact(self, plan: Plan, program: TileProgram) -> dict[str, Any]:
        """Return the arguments of `evaluate` for the float64 result; raise `TensorError` for a tensor that nothing
        reads.
        """


@dataclass(frozen=True)
class AttentionSubject(Subject):
    """The result of an attention."""

    problem: Problem
    kind: ClassVar[str] = "attention"

    @property
    def output(self) -> Output:
        """The problem, which states the sizes."""
        return self.problem

    @property
    def attention(self) -> Problem | None:
        """The problem."""
        return self.problem

    def source(self, plan: Plan) -> HeadSource:
        """Return Q, K and V: the given ones, or those of the recipe."""
        problem = self.problem
        if plan.tensors is None:
            source = drawn_source(problem)
        else:
            source = stored_source(without_padding(array_source(plan.tensors, problem.data), problem), problem)
            source = with_filled_heads(source, problem)
        return with_padding(source, problem) if plan.request.padding else source

    def changed_source(
        self, plan: Plan, change: Callable[[HeadSource], HeadSource], seed: int, *, is_padded: bool
    ) -> HeadSource:
        """Return changed Q, K and V; see `Subject`."""
        problem = self.problem
        given = plan.tensors and without_padding(array_source(plan.tensors, problem.data), problem)
        source = drawn_source(problem, change(given or recipe_source(problem, seed)))
        return with_padding(source, problem) if is_padded or plan.request.padding else source

    def read_heads(self, heads: Collection[int]) -> dict[str, tuple[int, int]]:
        """Return batches and heads of Q, K and V, complete groups."""
        p = self.problem
        of_keys = 1 + max(heads) // p.group_size
        return {"q": (p.batch, of_keys * p.group_size), "k": (p.batch, of_keys), "v": (p.batch, of_keys)}

    def exact(self, plan: Plan, _program: TileProgram) -> dict[str, Any]:
        """Return the reference of attention, and its stored results."""
        return {"reference": partial(_reference, plan), "exact": plan.exact}


@dataclass(frozen=True)
class TensorSubject(Subject):
    """The result of a kernel of plain tensors, with the attributes of an attention's problem, and its ``inputs``."""

    batch: int
    heads: int
    seq_q: int
    output_cols: int
    inputs: tuple[GlobalTensor, ...]
    kind: ClassVar[str] = "plain"
    key_count: ClassVar[int] = 1
    head_dim: ClassVar[int] = 1

    @classmethod
    def of(cls, program: TileProgram) -> Self:
        """Return the subject of a program."""
        o = result_of(program)
        inputs = (
            t
            for n, t in program.tensors.items()
            if t.role in ("input", "constant") and n not in program.constants and not t.of
        )
        return cls(o.batch, o.heads * o.packed, o.rows // o.packed, o.cols, tuple(inputs))

    @property
    def output(self) -> Output:
        """The subject itself, which states the sizes."""
        return self

    @property
    def plain(self) -> Mapping[str, GlobalTensor]:
        """The inputs by name."""
        return {t.name: t for t in self.inputs}

    @property
    def query_count(self) -> int:
        """Rows of a head in all batches."""
        return self.batch * self.seq_q

    def source(self, plan: Plan) -> HeadSource:
        """Return the inputs by name: the given ones, or drawn ones."""
        return self._source(plan)

    def changed_source(
        self, plan: Plan, change: Callable[[HeadSource], HeadSource], seed: int, *, is_padded: bool
    ) -> HeadSource:
        """Return changed inputs; see `Subject`.  Inputs are drawn with the problem's seed; there are no keys to pad."""
        return self._source(plan, change)

    def _source(self, plan: Plan, change: Callable[[HeadSource], HeadSource] | None = None) -> HeadSource:
        """Return the inputs; ``change`` is applied to inputs that are not computed from others."""
        asked = plan.request.seed
        source = kernel_source(self.inputs, plan.problem.drawn_seed if asked is None else asked, plan.tensors)
        given = plan.tensors or ()
        follows = {n: partial(of, plan.problem) for n, of in plan.schedule.follows.items() if n not in given}
        return with_followers(change(source) if change else source, self.inputs, follows)

    def read_heads(self, heads: Collection[int]) -> dict[str, tuple[int, int]]:
        """Return batches and heads of all inputs."""
        return {t.name: (t.batch, t.heads) for t in self.inputs}

    def exact(self, plan: Plan, program: TileProgram) -> dict[str, Any]:
        """Return the function for rows of the kernel in float64; raises an error if it does not use each
        given tensor.
        """
        if not plan.request.is_launch:  # tensors of a launch may include its outputs
            _check_read(plan.tensors or {}, program)
        if plan.schedule.reference is None and plan.schedule.exact is None:
            _in_float64(plan)  # refused before anything is computed
        of_results = partial(_exact_results, plan, self) if _is_exact(plan) else None
        return {"exact_rows_of": partial(_exact_rows, plan, self), "exact_results": of_results, "exact": plan.exact}


def result_of(program: TileProgram) -> GlobalTensor:
    """Return the tensor with the result of a program: ``o``, or the only output if it has another name.

    Raises `SpecError` if the program has no output, or several outputs none of which is ``o``.
    """
    written = [t for n, t in program.tensors.items() if t.role == "output" or n == "o"]
    named = [t for t in written if t.name == "o"] or written
    if len(named) != 1:
        raise SpecError(
            f"{program.name}: its outputs are {', '.join(t.name for t in named) or 'none'}; it must "
            "have exactly one output, or one named o"
        )
    return named[0]


def subject_of(plan: Plan, program: TileProgram) -> Subject:
    """Return the subject of a program of the plan: an attention, or rows of plain tensors."""
    problem = plan.problem.attention
    return TensorSubject.of(program) if problem is None else AttentionSubject(problem)


def source_of(plan: Plan, subject: Subject) -> HeadSource:
    """Return the inputs of a subject, drawn or read once per plan."""
    if subject not in plan.sources:
        plan.sources[subject] = subject.source(plan)
    return plan.sources[subject]


def bits_of(plan: Plan, program: TileProgram, **how: Any) -> NumericResult:
    """Return the bits of a program of the plan; ``how`` as for `evaluate`."""
    subject = subject_of(plan, program)
    return evaluate(program, subject.output, source_of(plan, subject), **subject.exact(plan, program), **how)


def _check_read(given: Iterable[str], program: TileProgram) -> None:
    """Raise `TensorError` for a given tensor that the program neither reads nor writes."""
    tensors = [t for n, t in program.tensors.items() if n not in program.constants]
    read, written = ([t.name for t in tensors if t.role == role] for role in ("input", "output"))
    for name in given:
        if name not in (*read, *written):
            raise TensorError(f"tensors: {program.name} does not read {name!r}{choices(name, read)}")


def compared_variants(
    plan: Plan, program: TileProgram, variants: Programs
) -> tuple[BlockRows, int, dict[str, NDArray[Any]]]:
    """Return `compared_rows` of the run, and the same rows of variants of its program."""
    subject, r = subject_of(plan, program), plan.request
    return variant_rows(program, subject.output, source_of(plan, subject), variants, rows=r.rows, heads=r.heads)


def exact_rows(plan: Plan, problem: Problem, batch: int, head: int, row: int, rows: int) -> NDArray[np.float64]:
    """Return rows of a plan's attention in float64, (rows, dv), for a ``problem`` that may have another scale."""
    source = source_of(plan, AttentionSubject(cast("Problem", plan.problem)))
    shared = {"q": head, "k": head // problem.group_size, "v": head // problem.group_size}
    q, k, v = (widen(source(n, batch, of)).astype(np.float64) for n, of in shared.items())
    of_head = _reference(plan, q[row : row + rows], k, v, problem.sequence(batch), row, head)
    return of_head[:, : problem.output_cols]


def _exact_rows(plan: Plan, subject: TensorSubject, batch: int, head: int, row: int, rows: int) -> NDArray[np.float64]:
    """Return rows of a kernel of plain tensors in float64: from its reference, or from the kernel itself."""
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
        return _exact_launch(plan).rows(source, batch, head, row, rows)
    if "kernel" not in plan.exact_programs:
        schedule = _in_float64(plan)
        own_fields = schedule.tiling.model_fields.keys() - cast("Any", schedule.tiling.__base__).model_fields.keys()
        tiling = build_tiling(schedule.tiling, {n: v for n, v in plan.tiling if n in own_fields})
        cores = load_device(EXACT_DEVICE).cores.items()
        room = {f"cores.{c}.buffers.{n}.capacity_bytes": 2**40 for c, core in cores for n in core.buffers}
        of_device = load_device(EXACT_DEVICE, room)
        precision = schedule.precision("exact")
        plan.exact_programs["kernel"] = schedule.program(plan.problem, tiling, of_device, precision)
    program = plan.exact_programs["kernel"]
    written = rows_alone(program, source, [row + rows - 1], {head}, batches={batch}, most=rows)
    return np.concatenate([written[at] for at in sorted(written) if at[0] == batch])[-rows:].astype(np.float64)


def _is_exact(plan: Plan) -> bool:
    """Return whether errors of a plan are measured from the result of its kernel in float64."""
    return plan.schedule.reference is None and plan.schedule.exact is not None


def _exact_launch(plan: Plan) -> ExactResults:
    if plan.tiling not in plan.exact_rows:
        assert plan.schedule.exact is not None
        plan.exact_rows[plan.tiling] = plan.schedule.exact(plan.problem, plan.tiling)
    return plan.exact_rows[plan.tiling]


def _exact_results(
    plan: Plan, subject: TensorSubject, computed: Mapping[str, Mapping[tuple[int, int], Span]]
) -> Mapping[tuple[str, int, int], NDArray[Any]]:
    """Return the computed rows of all results of a kernel of plain tensors in float64, from the kernel itself."""
    return _exact_launch(plan).results(source_of(plan, subject), computed)


def _in_float64(plan: Plan) -> Schedule:
    """Return a plan's schedule for cores that support every arithmetic; raise `SpecError` if the schedule has no
    float64 form.
    """
    called, family = plan.request.schedule, load_device(EXACT_DEVICE).family
    schedule = schedules_called(called).get(family)
    if schedule is None or "exact" not in schedule.precisions:
        named = ": ".join(filter(None, (plan.schedule.origin, f"schedule {plan.schedule.name}")))
        raise SpecError(
            f"{named} has no float64 result to measure errors against: pass a function reference= to schedule() "
            "(npusim help schedule), or omit bits (--no-numerics)"
        )
    return schedule


def _reference(
    plan: Plan, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], problem: Problem, row: int, head: int = 0
) -> NDArray[np.float64]:
    """Return the float64 reference of errors; a fault in a user's reference is raised with its file and line.

    ``q`` (rows, d) begins at query ``row`` of ``head``; ``k`` and ``v`` have all keys.  Raises `SpecError` for a shape
    other than (rows, dv).
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
