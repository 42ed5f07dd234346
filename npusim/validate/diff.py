"""A kernel's output compared with predicted bits: where they differ, and which other choice explains it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

import numpy as np

from npusim.config.problem import KernelProblem, Problem
from npusim.errors import NpusimError, SpecError, TensorError
from npusim.formats import ARITHMETICS, get_format
from npusim.numerics.evaluate import KernelOutput, chosen, chosen_heads, execute_rows, named_choices
from npusim.numerics.paths import Place, bits_of, compute, first_unlike, parting
from npusim.schedules import find_schedule
from npusim.schedules.registry import NAMED
from npusim.simulation.evaluation import source_of, subject_of
from npusim.simulation.inputs import read_tensors
from npusim.simulation.plan import plan_of
from npusim.simulation.simulate import run_plan
from npusim.simulation.variants import Variant, Variants
from npusim.validate.neighbours import Neighbour, nearest_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from npusim.config.tiling import Tiling
    from npusim.ir.program import TileProgram
    from npusim.numerics.executor import HeadSource
    from npusim.numerics.paths import Computed
    from npusim.schedules.registry import Precision
    from npusim.simulation.plan import Plan
    from npusim.simulation.request import Request
    from npusim.simulation.result import RunData
    from npusim.simulation.simulate import BuiltPlan

#: Keys under which a file may have the output.
KEYS = ("o", "out", "output")
#: Single changes that come nearest, with which all others are tried in pairs.
NEAREST = 3
#: Share of the outputs that differ which a change makes equal at least, to be named as the nearest: one that explains
#: nothing makes as many equal as unequal by chance, and the best of some hundred a few more.
CLOSES = 0.5
#: Formats that an intermediate may have, scales of an FP8 P, keys of a tile and splits that are tried.
FORMATS = ("float32", "float16", "bfloat16")
SCALES = (1.0, 16.0, 256.0, 448.0)
#: Fields that are numbers, and their values that are tried: scales of P, and powers of two that a maximum grows by.
NUMBERS = MappingProxyType({"scale": SCALES, "p_scale": SCALES, "growth": (0.0, 4.0, 8.0)})
TILES = (16, 32, 64, 128, 256, 512)
SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Change:
    """Another value of a stated choice: a field of the precision or of the tiling."""

    kind: Literal["precision", "tiling"]
    field: str
    value: object

    def __str__(self) -> str:
        return f"{self.field}={self.value}"


@dataclass(frozen=True)
class Explanation:
    """Other values of stated choices, the number of outputs that are then equal, and the step of the difference.

    ``of``: the number of compared outputs, all or, where not all of these are equal, from the first difference's row to
    the end of its block, where not all of these are equal.
    """

    changes: tuple[Change, ...]
    matched: int
    of: int
    parted: str = ""

    def __str__(self) -> str:
        return ",".join(map(str, self.changes))


@dataclass(frozen=True)
class Difference:
    """A kernel's output compared with predicted bits, on the computed rows.

    ``first`` is the first element that differs (batch, head, row, column), ``given`` and ``predicted`` its values;
    ``explained`` are the changes that make every output equal, the simplest alone, and ``nearest`` the closest change
    where none does: the arithmetic that the device's makers state, or another choice if it makes the share `CLOSES` of
    the differing outputs equal; ``tried`` counts the changes.  ``problem`` is another problem whose float64 result is
    nearer: no choice is tried then.
    """

    run: RunData
    matched: int
    total: int
    first: tuple[int, int, int, int] | None = None
    given: float = 0.0
    predicted: float = 0.0
    explained: tuple[Explanation, ...] = ()
    nearest: Explanation | None = None
    tried: int = 0
    problem: Neighbour | None = None

    @property
    def passed(self) -> bool:
        """Whether every output is equal, or a stated choice explains why not."""
        return self.matched == self.total or bool(self.explained)


def diff(
    output: str | Path | NDArray[Any], request: Request, on_tried: Callable[[int, int], None] | None = None
) -> Difference:
    """Compare a kernel's output with the prediction of a request, and search for an explanation of the difference.

    ``output`` is (batch, heads, seq_q, value head size), the first axis left out where it is 1, in the
    run's output format or as unsigned bit patterns of its width; or a ``.npz`` or ``.safetensors`` with it under
    ``o``, ``out`` or ``output``, or alone.  ``on_tried`` gets the number of changes tried, and of all.

    Raises `TensorError` if the file is not readable or has no output, or that is of another shape or dtype; `SpecError`
    if the request is no attention, or is one of a node; `NpusimError` as `npusim.run`.
    """
    return comparison(output, request, on_tried).difference()


def comparison(
    output: str | Path | NDArray[Any], request: Request, on_tried: Callable[[int, int], None] | None = None
) -> HeldOutput:
    """Return a kernel's output with the program of a request; arguments and errors as for `diff`."""
    # A kernel's tile is its author's: what is not named is as declared, not what would be fastest.
    plan = replace(plan_of(request, is_bare=True), is_open=False)
    base = run_plan(plan)
    if not isinstance(base.problem, Problem | KernelProblem) or "o" not in base.program.tensors:
        raise SpecError(f"diff: schedule {request.schedule} has no attention's output to compare with")
    problem = subject_of(plan, base.program)
    out = _output(output, problem, base.program.tensors["o"].fmt)
    return HeldOutput(plan, base, request, problem, source_of(plan, problem), out, on_tried)


@dataclass
class HeldOutput:
    """A kernel's output (batch, heads, rows, columns), and the prediction for comparison."""

    plan: Plan
    base: RunData
    request: Request
    problem: Problem | KernelOutput
    source: HeadSource
    out: NDArray[Any]
    on_tried: Callable[[int, int], None] | None
    tried: int = 0
    total: int = 0

    @cached_property
    def _variants(self) -> Variants:
        return Variants(self.request)

    def difference(self) -> Difference:
        """Return the difference, with its explanation."""
        written = self.rows(self.base.program)
        matched, total = self._equal(written)
        at = self._first(written)
        if at is None:
            return Difference(self.base, matched, total)
        batch, head, row, column = at
        blocks = sorted(written.items())
        start, rows = next((r, b) for (n, h, r), b in blocks if (n, h) == at[:2] and r <= row < r + len(b))
        place, given, predicted = Place(row, head, batch), float(self.out[at]), float(rows[row - start, column])
        own = self.plan.schedule
        is_plain = not (own.reference or own.sees or own.is_hooked)
        if is_plain and isinstance(self.problem, Problem):
            block = self.out[batch, head, row : start + len(rows)]
            if other := nearest_problem(block, self.problem, self.source, place):
                return Difference(self.base, matched, total, at, given, predicted, problem=other)
        explained, nearest = self._explain(place, total)
        return Difference(self.base, matched, total, at, given, predicted, tuple(explained), nearest, tried=self.tried)

    def _explain(self, place: Place, total: int) -> tuple[list[Explanation], Explanation | None]:
        """Return the single changes that explain all, else the pairs that do, and the nearest where none does."""
        base = self._compute(self.base.program, place)
        singles = alternatives(self.base)
        self.total = len(singles)
        base_matched = self._probe(base, place)
        ranked = sorted(self._try([(c,) for c in singles], place, base), key=lambda e: -e.matched)
        explained = [e for e in ranked if e.matched == total and self._holds(e)]
        if explained:
            return explained, None
        better = list(islice((e for e in ranked if e.matched > base_matched and self._holds(e)), NEAREST))
        leads = [e.changes[0] for e in better]
        pairs = [(a, b) for n, a in enumerate(leads) for b in singles if b.field != a.field and b not in leads[:n]]
        self.total += len(pairs)
        ranked = sorted([*ranked, *self._try(pairs, place, base)], key=lambda e: -e.matched)
        explained = [e for e in ranked if e.matched == total and self._holds(e)]
        near = next((e for e in ranked if not any(map(self.is_foreign, e.changes)) and self._holds(e)), None)
        if explained or near is None or near.matched - base_matched < CLOSES * (near.of - base_matched):
            return explained, None
        return [], near

    def is_foreign(self, change: Change) -> bool:
        """Return whether a change is to the matrix arithmetic of another maker's device."""
        makers = {name.partition(".")[0] for name in named_choices(self.base.program)[0]}
        return change.field == "arithmetic" and str(change.value).partition(".")[0] not in makers

    def _try(self, listed: Sequence[tuple[Change, ...]], place: Place, base: Computed) -> Iterator[Explanation]:
        """Yield the results of changes on the block of the first difference; on all rows where that block is equal.

        Their programs are not checked (`_holds`): a check is slower than the bits, and few are named.
        """
        for changes in listed:
            self.tried += 1
            if self.on_tried:
                self.on_tried(self.tried, self.total)
            try:
                built = self._built(changes)
                other = self._compute(built.program, place)
            except NpusimError:
                continue  # this schedule, device or call has no such choice
            matched, of = self._probe(other, place), other.rows[place.head].size
            if matched == of:
                matched, of = self._equal(self.rows(built.program))
            yield Explanation(changes, matched, of, parting(base.events, other.events))

    def _built(self, changes: tuple[Change, ...]) -> BuiltPlan:
        tiling, precision = ({c.field: c.value for c in changes if c.kind == k} for k in ("tiling", "precision"))
        return self._variants.build(Variant(tiling=tiling, precision=precision))

    def _holds(self, explanation: Explanation) -> bool:
        """Return whether the program of an explanation passes the check of every run."""
        try:
            self._built(explanation.changes).check()
        except NpusimError:
            return False
        return True

    def _compute(self, program: TileProgram, place: Place) -> Computed:
        return compute(program, place, self.source)

    def _probe(self, computed: Computed, place: Place) -> int:
        """Return how many outputs of the block from a row on are equal."""
        rows = computed.rows[place.head]
        return _count(rows, self.out[place.batch, place.head, place.row : place.row + len(rows)])

    def rows(self, program: TileProgram) -> dict[tuple[int, int, int], NDArray[Any]]:
        """Return a program's result for the compared rows, by batch, head and first row."""
        r, problem = self.request, self.problem
        rows, heads = chosen("rows", r.rows, problem.seq_q), chosen_heads(problem, r.heads)
        return execute_rows(program, self.source, rows, heads)[1]

    def _equal(self, written: dict[tuple[int, int, int], NDArray[Any]]) -> tuple[int, int]:
        pairs = [(block, self.out[n, h, r : r + len(block)]) for (n, h, r), block in written.items()]
        return sum(_count(a, b) for a, b in pairs), sum(a.size for a, _ in pairs)

    def _first(self, written: dict[tuple[int, int, int], NDArray[Any]]) -> tuple[int, int, int, int] | None:
        for (n, h, r), block in sorted(written.items()):
            at = first_unlike(block, self.out[n, h, r : r + len(block)])
            if at is not None:
                return n, h, r + at[0], at[1]
        return None


def _count(a: NDArray[Any], b: NDArray[Any]) -> int:
    return int((bits_of(a) == bits_of(b)).sum()) if (a.dtype, a.shape) == (b.dtype, b.shape) else 0


def _output(output: str | Path | NDArray[Any], problem: Problem | KernelOutput, fmt: str) -> NDArray[Any]:
    """Return the output as (batch, heads, rows, columns) in the run's format."""
    where, values = "output", output
    if isinstance(values, str | Path):
        where = str(values)
        if not Path(values).is_file():
            raise TensorError(f"{where}: no such file; an .npz or .safetensors with the kernel's output is needed")
        values = _picked(read_tensors(Path(values)), where)
    shape = (problem.batch, problem.heads, problem.seq_q, problem.output_cols)
    if values.ndim == 3 and problem.batch == 1:
        values = values[None]
    if isinstance(problem, KernelOutput) and values.size == prod(shape):
        values = values.reshape(shape)
    if values.shape != shape:
        raise TensorError(
            f"{where}: the output has shape {values.shape}; this run's is {shape}: batch, heads, rows, head size"
        )
    dtype = get_format(fmt).dtype
    if values.dtype in (np.dtype(f"u{dtype.itemsize}"), np.dtype(f"V{dtype.itemsize}")):  # .npz has bfloat16 as V2
        return values.view(dtype)
    if values.dtype != dtype:
        raise TensorError(
            f"{where}: the output is {values.dtype}; this run's is {fmt}, or its bit patterns as u{dtype.itemsize}"
            "; another output format is asked for with --precision output=..."
        )
    return values


def _picked(arrays: dict[str, NDArray[Any]], where: str) -> NDArray[Any]:
    name = next((key for key in KEYS if key in arrays), next(iter(arrays)) if len(arrays) == 1 else None)
    if name is None:
        listed = ", ".join(arrays) or "nothing"
        raise TensorError(f"{where}: no key {', '.join(KEYS)}; it holds {listed}")
    return arrays[name]


# ---------------------------------------------------------------- other choices


def alternatives(base: RunData) -> tuple[Change, ...]:
    """Return every single change to the choices of a run that its schedule states."""
    schedule = find_schedule(base.schedule, base.device.family)
    precision = schedule.precision(base.precision)
    return tuple(dict.fromkeys([*_of_precision(base, precision), *_of_tiling(base, schedule.tiling)]))


def _of_precision(base: RunData, precision: Precision) -> Iterator[Change]:
    formats = precision.formats()
    for field in dataclasses.fields(cast("Any", precision)):
        stated = getattr(precision, field.name)
        for value in _values(base, field.name, stated, is_format=field.name in formats):
            if value != stated:
                yield Change("precision", field.name, value)


def _values(base: RunData, name: str, stated: object, *, is_format: bool) -> tuple[object, ...]:
    if is_format:
        return FORMATS
    if name == "arithmetic":
        return _arithmetics(base)
    if name == "sink" and not getattr(base.problem, "sink_logits", False):
        return ()
    if isinstance(stated, bool):
        return (not stated,)
    return NUMBERS.get(name, ()) if isinstance(stated, float) else NAMED.get(name, ())


def _arithmetics(base: RunData) -> tuple[str, ...]:
    """Return the other matrix arithmetics for the operands of the run's products."""
    used = [ARITHMETICS[name] for name in named_choices(base.program)[0]]
    operands = {(a.a_format, a.b_format, a.scale_format) for a in used}
    return tuple(
        n for n, a in ARITHMETICS.items() if (a.a_format, a.b_format, a.scale_format) in operands and a not in used
    )


def _of_tiling(base: RunData, tiling: type[Tiling]) -> Iterator[Change]:
    keys, of_run = getattr(base.problem, "seq_kv", 0), dict(base.tiling)
    for name, field in tiling.model_fields.items():
        stated = of_run.get(name)
        kind = field.annotation
        if get_origin(kind) is Literal:
            values: tuple[object, ...] = get_args(kind)
        elif kind is bool:
            values = (True, False)
        else:
            sizes = {"block_kv": TILES, "block": TILES, "splits": SPLITS}.get(name, ())
            values = tuple(size for size in sizes if size <= keys)
        yield from (Change("tiling", name, value) for value in values if value != stated)
