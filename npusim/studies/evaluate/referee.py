"""Referees: the inputs of a call, its float64 result, and the errors of correct kernels; none of these depends on the
candidate.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from npusim import formats
from npusim.config import outside
from npusim.config.outside import with_origin
from npusim.config.problem import GemmProblem
from npusim.errors import SpecError
from npusim.formats import get_format
from npusim.formats.cast import widen
from npusim.formats.float_format import format_of_dtype
from npusim.kernels.triton import is_launch
from npusim.program.ir.tile import GlobalTensor
from npusim.program.numerics.input_tensors import kernel_source
from npusim.simulation.evaluation import TensorSubject, subject_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from npusim.studies.evaluate.judged_inputs import JudgedCase, attention_cases, tensor_cases
from npusim.studies.evaluate.looks import WrongElement, first_wrong, of_attention, of_values
from npusim.studies.stress.aspects import stressed
from npusim.studies.stress.worst_search import StressedRun
from npusim.studies.validate.diff import comparison
from npusim.studies.validate.given_output import read_output
from npusim.studies.validate.judge import MEASURES, Judge, within_errors
from npusim.units import spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from npusim.config.problem import AnyProblem
    from npusim.program.numerics.evaluate import BlockRows
    from npusim.studies.validate.diff import HeldOutput
    from npusim.studies.validate.judge import Judgement

Arrays = dict[str, "NDArray[Any]"]
#: The packaged attention whose variants are correct kernels: for inputs of 8 bits, and for others.
ATTENTION = MappingProxyType({False: "flash", True: "fp8_attention"})
#: Number of correct kernels that are drawn for a function.
DRAWN = 24


class UnjudgedCaseError(SpecError):
    """At a point of stress, no result is in the range of the output's format: each result exceeds it, or rounds to
    0.
    """


@dataclass(frozen=True)
class CaseVerdict:
    """The verdict on one call: the judgement in words, the error relative to the allowed error, and the first wrong
    element.

    ``excess``: None if values are NaN or Inf.  ``is_extreme``: the inputs are those of a point of a stress search.
    ``is_resized``: the sizes differ from the given ones.
    """

    case: str
    is_right: bool
    text: str
    excess: float | None
    matched: int
    total: int
    first: WrongElement | None = None
    is_extreme: bool = False
    is_resized: bool = False


def verdict_on(case: JudgedCase, judgement: Judgement) -> CaseVerdict:
    """Return the verdict of a judgement; ``excess``: the largest error relative to its limit, infinite for NaN
    and Inf.
    """
    if case.point:  # limits of bias apply to calm inputs
        judgement = replace(judgement, measures=tuple(m for m in judgement.measures if m.name in MEASURES))
    shares = [m.value / m.allowed if m.allowed else float(m.value > 0) * np.inf for m in judgement.measures]
    excess = np.inf if judgement.lost else max(shares, default=0.0)
    return CaseVerdict(
        case.name,
        judgement.is_right,
        str(judgement),
        float(excess) if np.isfinite(excess) else None,
        judgement.matched,
        judgement.total,
        is_extreme=bool(case.point),
        is_resized=bool(case.sizes),
    )


@dataclass
class Referee(ABC):
    """Judges outputs of the calls of one problem.  ``request``: its device, options of the call, and formats."""

    request: Request
    problem: AnyProblem
    shapes: Sequence[Mapping[str, int]] = ()
    inputs: dict[tuple[str, str], Arrays] = field(default_factory=dict)
    #: Whether the referee also judges outputs other than the result.
    judges_others: ClassVar[bool] = False
    #: A lock while it draws or judges: candidates of several batches may share it.
    lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def seed(self) -> int:
        """The seed of the drawn inputs."""
        return self.request.seed or 0

    def cases(self) -> Iterator[JudgedCase]:
        """Yield the calls on which a candidate is judged."""
        problem = self.problem.attention
        if problem is not None:
            return attention_cases(problem, self.seed, self.shapes)
        return tensor_cases(self.problem, self.seed, self.shapes)

    def call(self, schedule: str, case: JudgedCase, arrays: Arrays | None) -> Request:
        """Return the request of a case for a schedule, with inputs."""
        problem = self.problem.with_seed(case.seed)
        if case.sizes:
            kind = self.problem.attention
            sized = problem.resized(case.sizes) if kind is None else kind.model_copy(update=dict(case.sizes))
            problem = sized.with_seed(case.seed)
        return Request(
            schedule,
            problem=problem,
            hw=self.request.hw,
            overrides=self.request.overrides,
            scale=self.request.scale,
            clock=self.request.clock,
            power_watts=self.request.power_watts,
            tensors=arrays,
            rows=case.rows,
            heads="all" if problem.is_plain else "sample",
        )

    @abstractmethod
    def drawn(self, case: JudgedCase, description: Mapping[str, Any]) -> Arrays:
        """Return the inputs of a case by name; ``description``: the description of the candidate's inputs."""

    @abstractmethod
    def judge(self, case: JudgedCase, description: Mapping[str, Any], file: Path) -> CaseVerdict:
        """Return the verdict on an output in a file."""


@dataclass(kw_only=True)
class KernelReferee(Referee):
    """A packaged kernel, or a user's kernel, whose float64 result and variants are the reference."""

    reference: str
    judges: dict[tuple[str, str], Judge] = field(default_factory=dict)

    def drawn(self, case: JudgedCase, description: Mapping[str, Any]) -> Arrays:
        """Return the reference's inputs at the case's point; see `Referee.drawn`."""
        key = case.name, ""
        if key not in self.inputs:
            run = StressedRun(replace(self.call(self.reference, case, None), seed=case.seed))
            plan, program = run.base
            subject = subject_of(plan, program)
            source = run.source(plan, subject, case.point)
            sizes = subject.read_heads(range(subject.output.heads))
            self.inputs[key] = {name: _gathered(partial(source, name), *size) for name, size in sizes.items()}
        return self.inputs[key]

    def judge(self, case: JudgedCase, description: Mapping[str, Any], file: Path) -> CaseVerdict:
        """Return the verdict by `npusim.studies.validate.judge`; see `Referee.judge`."""
        fmt = str(description["output"][4])
        key = case.name, fmt
        if key not in self.judges:
            call = replace(
                self.call(self.reference, case, self.drawn(case, description)), precision=self._precision(fmt)
            )
            self.judges[key] = Judge(comparison(file, call))
        judge = self.judges[key]
        held = judge.first.of(file)
        judgement = judge.decide(held)
        verdict = verdict_on(case, judgement)
        return verdict if verdict.is_right else replace(verdict, first=self._first(judge, held, judgement))

    def _precision(self, fmt: str) -> str | None:
        """Return the reference's precision with the candidate's format of the output."""
        stated = self.request.precision
        fields = getattr(self.plan.precision, "output", None)
        return (
            stated
            if fields is None or (fields in (fmt, "input") and fmt == getattr(self.problem, "dtype", fmt))
            else (",".join(filter(None, (stated, f"output={fmt}"))))
        )

    @cached_property
    def plan(self) -> Any:
        """The plan of the reference for the given call."""
        return plan_of(self.call(self.reference, JudgedCase(""), None), is_bare=True)

    def _first(self, judge: Judge, held: HeldOutput, judgement: Judgement) -> WrongElement:
        written = held.given.cut(judge.predicted)
        exact, given = held.given.cut(judge.exact), held.given.beside(written)
        allowed = next((m.allowed for m in judgement.measures if m.name == MEASURES[2]), 0.0)
        at = first_wrong(given, exact, allowed)
        looks = of_values(given, exact, allowed)
        if not looks or not looks.startswith(("zeros", "a constant", "an un", "out of")):
            looks = of_attention(held, written, at) or looks
        return _element(held.given.values, exact, at, looks)


@dataclass(kw_only=True)
class FunctionReferee(Referee):
    """A function on numpy arrays in float64; correct kernels are the same function with inputs that are rounded again.

    ``by_order``: the function receives the problem and then the inputs in their order, independent of their names in a
    candidate. A row of its result depends only on the same row of the first input, so that it is computed for the
    judged rows.

    A function returns one array, or arrays by the names of all outputs.  For a recorded call the function may also
    receive the integer arguments.

    A correct kernel rounds its inputs, values of their size, and its result, each once, to the coarsest format of its
    tensors.  Its error is therefore that of the function with inputs that differ by half a step of that format, and
    with a result that differs by half a step; `DRAWN` draws have such errors.  The kernel's operations are in float32,
    or in the output's format if that is wider, and may differ by one step of that format (`_computed`).
    """

    function: Callable[..., Any]
    origin: str
    by_order: bool = False
    judges_others: ClassVar[bool] = True
    exact: dict[tuple[str, str], tuple[NDArray[np.float64], list[NDArray[Any]]]] = field(default_factory=dict)

    def drawn(self, case: JudgedCase, description: Mapping[str, Any]) -> Arrays:
        """Return inputs of normal entries at the case's point; see `Referee.drawn`."""
        key = case.name, repr(description["inputs"])
        if key not in self.inputs:
            of_attention = self.problem.attention is not None
            if of_attention:
                attention = packaged(self.problem)
                drawing = KernelReferee(self.request, self.problem, self.shapes, self.inputs, reference=attention)
                return drawing.drawn(case, description)
            tensors = tuple(
                GlobalTensor(name, batch, heads, rows, cols, fmt, "input")
                for name, (batch, heads, rows, cols, fmt) in description["inputs"].items()
            )
            batch, heads, rows, cols, _ = description["output"]
            subject = TensorSubject(batch, heads, rows, cols, tensors)
            source = stressed(kernel_source(tensors, case.seed), subject, case.point, case.seed)
            self.inputs[key] = {t.name: _gathered(partial(source, t.name), t.batch, t.heads) for t in tensors}
        return self.inputs[key]

    def judge(self, case: JudgedCase, description: Mapping[str, Any], file: Path) -> CaseVerdict:
        """Return the verdict by the errors of correct kernels; see `Referee.judge`."""
        arrays = self.drawn(case, description)
        *sizes, fmt = description["output"]
        batch, heads, rows_each, cols = sizes
        subject = TensorSubject(batch, heads, rows_each, cols, ())
        given = read_output(file, subject, fmt)
        whole = {(n, h, 0): given.values[n, h] for n in range(batch) for h in range(heads)}
        rows = given.cut(whole)
        computed = np.flatnonzero(given.has.any((0, 1))) if self.by_order else np.arange(rows_each)
        integers = {n: hash(x.tobytes()) for n, x in description["integers"].items()}
        key = case.name, repr((sizes, fmt, description["inputs"], spans(computed), description["name"], integers))
        if key not in self.exact:
            shape = batch, heads, len(computed), cols
            self.exact[key] = self._references(case, arrays, computed, shape, description)
        exact, kernels = self.exact[key]
        rounded = widen(kernels[0])
        if case.point and (not np.isfinite(rounded).any() or (exact.any() and not rounded.any())):
            raise UnjudgedCaseError(f"{case.name}: no result is in the range of {fmt}")

        def of(values: NDArray[Any]) -> dict[BlockRows, NDArray[Any]]:
            first = {at: int(np.searchsorted(computed, at[2])) for at in rows}
            return {at: values[*at[:2], first[at] : first[at] + len(block)] for at, block in rows.items()}

        judgement = within_errors(rows, [of(k) for k in kernels], of(exact), None, f"kernels of {self.origin}")
        right = of(kernels[0])
        matched = sum(int((rows[at].view(_bits(x)) == x.view(_bits(x))).sum()) for at, x in right.items())
        judgement = replace(judgement, matched=matched)
        verdict = verdict_on(case, judgement)
        if verdict.is_right:
            return verdict
        allowed = next((m.allowed for m in judgement.measures if m.name == MEASURES[2]), 0.0)
        exact_rows = of(exact)
        at = first_wrong(rows, exact_rows, allowed)
        first = _element(given.values, exact_rows, at, of_values(rows, exact_rows, allowed))
        return replace(verdict, first=first)

    def _references(
        self,
        case: JudgedCase,
        arrays: Arrays,
        rows: NDArray[np.intp],
        shape: tuple[int, ...],
        description: Mapping[str, Any],
    ) -> tuple[NDArray[np.float64], list[NDArray[Any]]]:
        """Return the function's float64 result, and the outputs of correct kernels, ``rows`` of them."""
        wide = {name: widen(x).astype(np.float64) for name, x in arrays.items()}
        if self.by_order:
            first = next(iter(wide))
            wide[first] = wide[first][:, :, rows]
        fmt = description["output"][4]
        stored = (format_of_dtype(x.dtype) for x in arrays.values())
        step = max(2.0**-f.mantissa_bits for f in (get_format(fmt), *stored) if f is not None)
        rng = np.random.default_rng([case.seed, DRAWN])
        exact = self._called(case, wide, shape, description)
        moved = ({n: _moved(x, step, rng) for n, x in wide.items()} for _ in range(DRAWN))
        outputs = [exact, *(self._called(case, arrays, shape, description) for arrays in moved)]
        if step > 2.0 ** -get_format(fmt).mantissa_bits:  # rounding to the output's format is finer
            outputs[1:] = [_moved(x, step, rng) for x in outputs[1:]]
        computed = 2.0 ** -max(get_format(f).mantissa_bits for f in ("float32", fmt))
        outputs[1:] = [_computed(x, computed, rng) for x in outputs[1:]]
        return exact, [formats.cast(x.astype(np.float32) if fmt != "float64" else x, fmt) for x in outputs]

    def _called(
        self,
        case: JudgedCase,
        arrays: Mapping[str, NDArray[Any]],
        shape: tuple[int, ...],
        description: Mapping[str, Any],
    ) -> NDArray[np.float64]:
        call = self.call("", case, None).problem
        if self.by_order:
            value = self._named(self.function(call, *arrays.values()), description)
            return np.asarray(value, np.float64).reshape(shape)
        names = inspect.signature(self.function).parameters
        arrays = {**description["integers"], **arrays}
        sizes = {n: getattr(call, n) for n in names if n not in arrays and hasattr(call, n)}
        if missing := [n for n in names if n not in arrays and n not in sizes]:
            raise SpecError(
                f"{self.origin}: parameter {missing[0]}: neither an input ({', '.join(arrays)}) nor a size has "
                "this name"
            )
        with with_origin(self.origin):
            returned = self.function(**{n: arrays[n] for n in names if n in arrays}, **sizes)
            value = np.asarray(self._named(returned, description), np.float64)
        if value.size != np.prod(shape):
            raise SpecError(f"{self.origin}: returned shape {value.shape}; the kernel's output is {shape}")
        return value.reshape(shape)

    def _named(self, returned: object, description: Mapping[str, Any]) -> Any:
        """Return the array of an output from the function's result."""
        outputs = [description["result"], *description["others"]]
        if not isinstance(returned, Mapping):
            if len(outputs) > 1:
                raise SpecError(
                    f"{self.origin}: returned one array, but the kernel stores {', '.join(outputs)}: return a "
                    "mapping from these names to arrays"
                )
            return returned
        if {*returned} != {*outputs}:
            named = ", ".join(map(str, returned)) or "none"
            raise SpecError(f"{self.origin}: returned {named}, but the kernel stores {', '.join(outputs)}")
        return returned[description["name"]]


def packaged(problem: object, dtype: str | None = None) -> str:
    """Return the packaged attention for inputs of a problem's format, or of ``dtype``."""
    stored = dtype or getattr(problem, "dtype", None) or "float16"
    return ATTENTION[get_format(str(stored)).size_bytes == 1]


def _gathered(source: Callable[[int, int], NDArray[Any]], batches: int, heads: int) -> NDArray[Any]:
    return np.stack([np.stack([source(n, h) for h in range(heads)]) for n in range(batches)])


def _moved(x: NDArray[np.float64], step: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return float64 values, each changed by a random part of half a ``step`` at its size."""
    by = rng.random(x.shape, np.float32)  # in float32 the draws cost half as much, and 24 bits of an error are enough
    by -= np.float32(0.5)
    by *= np.float32(step)
    moved = x * by
    moved += x
    return moved


def _computed(x: NDArray[np.float64], step: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return float64 values, each changed by two parts of a ``step`` at its size: one is its own, and one belongs to
    its row.

    The operations of a kernel have these errors even on inputs that are not rounded, such as zeros: a root and a
    division have an error of a unit in the last place.  All elements that are computed from the same numbers have the
    same relative error, so that equal values remain equal; a number of a row, such as its norm, has one error in the
    whole row.
    """
    factor = np.uint64(rng.integers(2**63) | 1)
    # a hash of each element
    parts = ((np.ascontiguousarray(x).view(np.uint64) * factor) >> np.uint64(40)).astype(np.float64)
    parts = parts * 2.0**-23 - 1 + rng.uniform(-1, 1, (*x.shape[:-1], 1))
    return np.asarray(x + x * (parts * step))


def _bits(values: NDArray[Any]) -> str:
    return f"u{values.dtype.itemsize}"


def _element(
    values: NDArray[Any], exact: Mapping[BlockRows, NDArray[np.float64]], at: tuple[int, int, int, int], looks: str
) -> WrongElement:
    n, h, row, column = at
    start, block = next((r, b) for (m, g, r), b in sorted(exact.items()) if (m, g) == (n, h) and r <= row < r + len(b))
    pair = float(values[at]), float(block[row - start, column])
    own, right = (x if np.isfinite(x) else str(x) for x in pair)
    return WrongElement(
        at, own, right, looks or ("no known fault: the function differs, or its sums are of another kind")
    )


def product(problem: GemmProblem, a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return A B for float64 arrays (1, count, rows, columns); B is (n, k) if operands are ``nt``."""
    right = np.swapaxes(b, -1, -2) if problem.operands == "nt" else b
    return np.asarray(a @ right)


#: Functions of the inputs of a problem, in the inputs' order, for kinds of problems that compute only one function.
FUNCTIONS: Mapping[type, Callable[..., NDArray[Any]]] = MappingProxyType({GemmProblem: product})


@dataclass(frozen=True)
class RefereeChoice:
    """The request of a call, and the reference that its caller names: see `npusim.studies.evaluate.evaluate`."""

    request: Request
    reference: str | None
    shapes: Sequence[Mapping[str, int]]

    def referee(self) -> Referee | None:
        """Return the referee; None if no reference is named and the call is not attention."""
        reference, problem = self.reference, self.request.problem
        if reference is not None and ".py:" in reference and not is_launch(reference):
            module, name = outside.load(reference, "a reference")
            function = getattr(module, name, None)
            if inspect.isfunction(function):
                named = self._problem(self._attention)
                return FunctionReferee(self.request, named, self.shapes, function=function, origin=reference)
        if reference is None:
            if problem is not None and (known := FUNCTIONS.get(type(problem))) is not None:
                how: dict[str, Any] = {"function": known, "origin": known.__name__, "by_order": True}
                return FunctionReferee(self.request, problem, self.shapes, **how)
            if problem is not None and problem.attention is None:
                return None
            reference = self._attention
        return KernelReferee(self.request, self._problem(reference), self.shapes, reference=reference)

    @property
    def _attention(self) -> str:
        dtype = self.request.dtype
        return packaged(self.request.problem, None if dtype is None else str(dtype))

    def _problem(self, schedule: str) -> AnyProblem:
        if self.request.problem is not None:
            return self.request.problem
        plain = replace(self.request, schedule=schedule, tiling=None, args=None, grid=None, constexpr=None)
        return plan_of(plain, is_bare=True).problem
