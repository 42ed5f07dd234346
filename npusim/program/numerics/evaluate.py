"""Bits of a program's chosen blocks, compared with float64: the numeric half of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from npusim.errors import ProgramError, SpecError
from npusim.formats import get_arithmetic
from npusim.formats.cast import widen
from npusim.program.ir.op import Opcode, Step
from npusim.program.numerics.bits_result import ChoiceCounts, ErrorSummary, NumericResult
from npusim.program.numerics.diagnosis import Probe
from npusim.program.numerics.executor import (
    POISON,
    Alternative,
    Execution,
    Observer,
    Progress,
    changed_attributes,
    execute,
    steps_of,
)
from npusim.program.numerics.reference import attention, row_errors, summarise_errors

if TYPE_CHECKING:
    from npusim.config.problem import Problem
    from npusim.program.ir.tile import GlobalTensor
    from npusim.program.ir.tile_program import ProgramPhase, TileProgram
    from npusim.program.numerics.executor import EventLog, HeadSource, TensorStore

Array = NDArray[Any]


class OutputBlock(Protocol):
    """The properties of a block of a program's last phase that describe the rows it writes."""

    batch: int
    head: int
    row: int
    rows: int

    def part(self, row: int, rows: int) -> OutputBlock:
        """Return the block of some of its rows."""


class Output(Protocol):
    """Sizes of a program's result, with the names that an attention's problem has, also for a kernel of
    plain tensors.
    """

    @property
    def batch(self) -> int:
        """Number of sequences."""

    @property
    def heads(self) -> int:
        """Number of heads of a sequence."""

    @property
    def seq_q(self) -> int:
        """Number of rows of a head."""

    @property
    def query_count(self) -> int:
        """Number of rows of a head, over all sequences."""

    @property
    def output_cols(self) -> int:
        """Number of columns of a head."""

    @property
    def key_count(self) -> int:
        """Number of keys of a head, over all sequences; 1 without keys."""

    @property
    def head_dim(self) -> int:
        """Number of columns of a key; 1 without keys."""


#: Computes rows of a head in float64, ``reference(q, k, v, problem, row)``: q (rows, d) begins at query ``row``.
Reference = Callable[[Array, Array, Array, Any, int, int], NDArray[np.float64]]
#: Float64 results by batch, head, first row and number of rows, stored for other precisions on the same inputs.
References = dict[tuple[int, int, int, int], NDArray[np.float64]]
#: First row and number of rows.
Span = tuple[int, int]
#: Returns, in float64, the computed rows of all tensors that a kernel stores, NaN where it stores nothing: by name,
#: batch and head, for the given rows by name, batch and head.
ExactResultsOf = Callable[[Mapping[str, Mapping[tuple[int, int], Span]]], Mapping[tuple[str, int, int], Array]]
#: Batch, head and first row of a block of the output.
BlockRows = tuple[int, int, int]
#: Programs by name.
Programs = Mapping[str, "TileProgram"]
#: Blocks to execute, by phase.
Blocks = Mapping[str, Sequence[Any]]
#: ``sample``, ``all``, or indices, as integers or as a text (`indices`).
Choice = str | int | Sequence[int]
#: A number or a range in a text of indices; a number with more digits is not an index.
_PART = re.compile(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", re.ASCII)
#: Largest number of elements of K that a sample may read: this limits the memory and the time of the default sample.
SAMPLE_ELEMENTS = 1 << 25
#: Number of rows of a head in the default sample, whatever the tile, so that tilings are compared on the same rows;
#: fewer if these are long (`sample_rows`).
SAMPLE_ROWS, LEAST_ROWS, SAMPLE_OUTPUTS = 128, 8, 1 << 17
#: Number of rows on which variants and presets are compared. For presets of six schedules and devices, the measured
#: relative standard error of a ratio of errors is 0.25 / sqrt(rows), here 3 %: the second digit is uncertain by one or
#: two units.
COMPARED_ROWS = 64
#: If a block has at least this number of rows for each requested row, the requested rows are executed in separate
#: pieces.
SPARSE = 4


def evaluate(
    program: TileProgram,
    problem: Output,
    inputs: HeadSource,
    *,
    rows: Choice = "sample",
    heads: Choice = "sample",
    diagnose: bool = False,
    progress: Progress | None = None,
    reference: Reference = attention,
    exact: References | None = None,
    exact_rows_of: Callable[[int, int, int, int], Array] | None = None,
    exact_results: ExactResultsOf | None = None,
    variants: Programs | None = None,
    observers: Sequence[Observer] = (),
) -> NumericResult:
    """Execute the chosen blocks and return their bits, errors and events.

    ``rows``: ``"all"``, query indices (then the complete Q blocks that contain them; `indices`), or ``"sample"``: the
    last `sample_rows` of the last Q block, or of the last blocks if that block has fewer than `LEAST_ROWS`. ``heads``:
    ``"all"``, indices, or ``"sample"``: all heads, or fewer if K would be large. ``diagnose`` adds ranges, resonance,
    underflow and saturation; ``progress`` receives the completed share of all blocks, with ``exact_rows_of`` of blocks
    and of their exact results.  ``reference`` computes the float64 result for errors; ``exact`` stores it;
    ``exact_rows_of(batch, head, row, rows)`` returns it for schedules other than attention, and ``exact_results``
    returns the computed rows of all tensors that a kernel stores. ``variants`` are programs that also compute
    `compared_rows`; ``observers`` are called after every step.
    """
    rows = chosen("rows", rows, problem.seq_q)
    wanted = chosen_heads(problem, heads)
    attention_of = cast("Problem", problem)  # without `exact_rows_of`
    probe = Probe(attention_of) if diagnose else None
    needed = needed_blocks(program, rows, wanted)
    is_whole = exact_results is not None and rows == "all" and len(wanted) == problem.heads
    if is_whole:  # also blocks of other results, which the output's blocks do not need
        needed |= {p.name: list(p.blocks) for p in program.phases if p.serves == "rows"}
    among, cols = _Alternatives(program, needed, wanted, variants or {}), problem.output_cols
    watching: Sequence[Observer] = (probe, *observers) if probe else observers
    halves = [progress, None] if exact_rows_of is None else [_half(progress, 0), _half(progress, 1)]
    done = execute(program, inputs, needed, observers=watching, progress=halves[0], variants=list(among.lanes.values()))
    written = {at: o[:, :cols] for at, o in _written(program, needed, wanted, done.tensors).items()}
    others = {} if exact_results is None else _other_errors(program, done.tensors, exact_results, is_whole=is_whole)
    references, exact_rows = list[Array](), {} if exact is None else exact
    for (batch, head, row), block in written.items():
        at = (batch, head, row, len(block))
        if exact_rows_of is not None:
            exact_rows[at] = exact_rows[at] if at in exact_rows else _like(block, exact_rows_of(*at), program)
            if halves[1] is not None:
                halves[1](len(references) / len(written))
            references.append(exact_rows[at])
            continue
        q = inputs("q", batch, head)[row : row + len(block)]
        k, v = (inputs(n, batch, head // attention_of.group_size) for n in ("k", "v"))
        if at not in exact_rows:
            wide_q, wide_k, wide_v = (widen(x).astype(np.float64) for x in (q, k, v))
            exact_rows[at] = reference(wide_q, wide_k, wide_v, attention_of.sequence(batch), row, head)[:, :cols]
        references.append(exact_rows[at])
        if probe:
            probe.look_at_inputs(q, k, row, attention_of.sequence(batch))
    error = _own_error(program, list(written.values()), references)
    return numeric_result(
        error,
        done.events,
        [program],
        rows=written,
        shape=(problem.batch, problem.heads, problem.seq_q, cols),
        sample=_describe(problem, wanted, written),
        others=others or None,
        diagnosis=probe.diagnosis(error.nan_row_fraction) if probe else None,
        row_errors={at: row_errors(o, ref) for (at, o), ref in zip(written.items(), references, strict=True)},
        variants={n: x[:, :cols] for n, x in among.rows(done, inputs).items()},
    )


def _like(block: Array, exact: Array, program: TileProgram) -> Array:
    """Return a float64 result; raise `ProgramError` if it has another size than the result."""
    if exact.size != block.size:
        parts = f"{block.size:,} elements of the output, and {exact.size:,} in float64"
        raise ProgramError(f"{program.name}: npusim read {parts}, in two ways; use another block")
    return exact


def _other_errors(
    program: TileProgram, tensors: TensorStore, exact: ExactResultsOf, *, is_whole: bool
) -> dict[str, ErrorSummary | None]:
    """Return the errors of results other than the output, by tensor, over their computed elements; None if there are
    none.

    ``is_whole``: all blocks are computed, so that an element that only the reference has is counted as missing.
    """
    results = {n: t for n, t in program.tensors.items() if t.role == "output" and t.of is None}
    if not results.keys() - {"o"}:
        return {}
    written = {n: tensors.written(t) for n, t in results.items()}
    spans = {n: {at: span for at, x in of.items() if (span := _stored_span(x))[1]} for n, of in written.items()}
    of_all, errors, in_parts = exact(spans), dict[str, ErrorSummary | None](), _stored_in_parts(program)
    for name in results.keys() - {"o"}:
        computed, references = list[Array](), list[Array]()
        for at, (first, count) in spans[name].items():
            values = written[name][at][first : first + count]
            reference = of_all.get((name, *at), np.full(values.shape, np.nan))
            is_result = _is_stored(values) | (is_whole & (name not in in_parts) & ~np.isnan(reference))
            computed.append(values[is_result][:, None])
            references.append(reference[is_result][:, None])
        is_known = bool(computed) and bool(of_all)
        errors[name] = summarise_errors(computed, references, results[name].fmt) if is_known else None
    return dict(sorted(errors.items()))


def _stored_in_parts(program: TileProgram) -> set[str]:
    """Return the results that are parts of one tensor: elements that one of them does not store belong to another."""
    results = [t for t in program.tensors.values() if t.role == "output" and t.of is None]
    count = Counter(t.parameter for t in results if t.parameter)
    return {t.name for t in results if count[t.parameter] > 1}


def _own_error(program: TileProgram, computed: list[Array], references: list[Array]) -> ErrorSummary:
    """Return the error of the output's blocks; for a part of a tensor, the error of the elements that it stores.

    An integer whose bits are all set counts as not stored.
    """
    fmt = program.tensors["o"].fmt
    if "o" not in _stored_in_parts(program):
        return summarise_errors(computed, references, fmt)
    own = [_is_stored(x) for x in computed]

    def columns(blocks: Sequence[Array]) -> list[Array]:
        return [x[stored][:, None] for x, stored in zip(blocks, own, strict=True)]

    return summarise_errors(columns(computed), columns(references), fmt)


def _is_stored(values: Array) -> NDArray[np.bool_]:
    """Return the elements of a matrix of results whose bits differ from those before the first store."""
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, -1)
    return np.asarray((raw != POISON).any(-1))


def _stored_span(matrix: Array) -> Span:
    """Return the first stored row of a matrix of results, and the number of rows up to the last stored one."""
    rows = np.flatnonzero(_is_stored(matrix).any(1))
    return (int(rows[0]), int(rows[-1] - rows[0]) + 1) if rows.size else (0, 0)


def _half(progress: Progress | None, before: int) -> Progress | None:
    """Return a progress function for half of the work: the first half, or the second with the share ``before`` it."""
    return None if progress is None else lambda share: progress((before + share) / 2)


def variant_rows(
    program: TileProgram, problem: Output, inputs: HeadSource, variants: Programs, *, rows: Choice, heads: Choice
) -> tuple[BlockRows, int, dict[str, Array]]:
    """Return `compared_rows` of the result of `evaluate`, and the rows that the variants compute for them."""
    wanted = chosen_heads(problem, heads)
    needed = needed_blocks(program, chosen("rows", rows, problem.seq_q), wanted)
    among = _Alternatives(program, needed, wanted, variants)
    none: Blocks = dict.fromkeys(needed, ())
    done = execute(program, inputs, none, variants=list(among.lanes.values()))
    others = {n: x[:, : problem.output_cols] for n, x in among.rows(done, inputs).items()}
    return *compared_rows(_counts(program, needed, wanted)), others


def _counts(program: TileProgram, needed: Blocks, heads: Container[int]) -> dict[BlockRows, int]:
    """Return the number of rows that the last phase's blocks write, by batch, head and first row."""
    return {at: count for at, (_, count, _) in _outputs(program, needed, heads, "o").items()}


def compared_rows(rows: Mapping[BlockRows, int]) -> tuple[BlockRows, int]:
    """Return the rows of computed blocks on which variants are computed: the last rows of the first head, at most
    `COMPARED_ROWS`.

    ``rows`` are the lengths of blocks by batch, head and first row; returns the first row and the number of rows.
    """
    first = next(iter(rows))
    batch, head, row = max(at for at in rows if at[:2] == first[:2])
    count = min(rows[batch, head, row], COMPARED_ROWS)
    return (batch, head, row + rows[batch, head, row] - count), count


class _Alternatives:
    """Programs that also compute one block of an output: as lanes together with the main program if they are
    similar.
    """

    def __init__(
        self, program: TileProgram, needed: Blocks, heads: Container[int], of: Mapping[str, TileProgram]
    ) -> None:
        self.of, self.lanes = of, dict[str, Alternative]()
        if not of:
            return
        rows = _counts(program, needed, heads)
        (batch, head, _), self.count = compared_rows(rows)
        # All rows of the block are computed, so that these lanes have the shape of the main program's lanes and share
        # their steps.
        self.at = _, _, row = max(at for at in rows if at[:2] == (batch, head))
        self.last = row + rows[self.at] - 1
        blocks = needed_blocks(program, [self.last], {head}, batches={batch}, most=rows[self.at])
        for name, changes in changed_attributes(program, of, blocks).items():
            self.lanes[name] = Alternative(of[name], blocks, changes)

    def rows(self, done: Execution, inputs: HeadSource) -> dict[str, Array]:
        """Return the rows by name after their lanes are ``done``; programs that cannot be lanes are executed
        separately.
        """
        stores = dict(zip(self.lanes, done.variants, strict=True))
        return {name: self._rows(name, stores.get(name), inputs) for name in self.of}

    def _rows(self, name: str, tensors: TensorStore | None, inputs: HeadSource) -> Array:
        (batch, head, _), program = self.at, self.of[name]
        if tensors is not None:
            return _written(program, self.lanes[name].blocks, {head}, tensors)[self.at][-self.count :]
        written = rows_alone(program, inputs, [self.last], {head}, batches={batch}, most=self.count)
        return next(rows for at, rows in written.items() if at[:2] == (batch, head))[-self.count :]


def numeric_result(error: ErrorSummary, log: EventLog, programs: Iterable[TileProgram], **values: Any) -> NumericResult:
    """Return the result of programs: an error, the events of their log, their named choices, and other ``values``."""
    choices = [named_choices(program) for program in programs]
    return NumericResult(
        **asdict(error),
        overflow_counts=dict(log.overflow),
        nan_counts=dict(log.nan),
        first_events=tuple(log.first.values()),
        choices={n: ChoiceCounts(*map(int, counts)) for n, counts in log.chosen.items()} or None,
        arithmetic={name: evidence for arithmetic, _ in choices for name, evidence in arithmetic.items()},
        row_sum_orders=tuple(sorted({order for _, orders in choices for order in orders})),
        events=tuple(log.events),
        **values,
    )


def execute_rows(
    program: TileProgram,
    inputs: HeadSource,
    rows: Choice,
    heads: Container[int],
    *,
    output: str = "o",
    batches: Container[int] | None = None,
    most: int | None = None,
    since: int | None = None,
    observers: Sequence[Observer] = (),
    is_counted: bool = True,
    memories: dict[str, Array] | None = None,
) -> tuple[Execution, dict[BlockRows, Array]]:
    """Execute the blocks of the chosen rows of ``output``, and the blocks of earlier phases that they need.

    Returns the state after it, and by (batch, head, first row) the rows of each block.  ``batches``: all by default;
    ``most`` and ``since`` as for `needed_blocks`, ``is_counted`` and ``memories`` as for `execute`.
    """
    needed = needed_blocks(program, rows, heads, output=output, batches=batches, most=most, since=since)
    done = execute(program, inputs, needed, observers=observers, is_counted=is_counted, memories=memories)
    return done, _written(program, needed, heads, done.tensors, output)


def rows_alone(
    program: TileProgram, inputs: HeadSource, rows: Choice, heads: Container[int], **how: Any
) -> dict[BlockRows, Array]:
    """Return the rows of `execute_rows`, with its options; numeric events are not recorded."""
    return execute_rows(program, inputs, rows, heads, is_counted=False, **how)[1]


def _written(
    program: TileProgram, needed: Blocks, heads: Container[int], tensors: TensorStore, output: str = "o"
) -> dict[BlockRows, Array]:
    """Return, by batch, head and first row, the chosen heads of the last phase's blocks in ``tensors``.

    A stacked output has several matrices per block: every matrix to which a block stores is returned.
    """
    tensor, outputs = program.tensors[output], _outputs(program, needed, heads, output)
    if not is_stacked(program, output):
        return {
            (batch, head, row): tensors.started(tensor, (batch, of), at, at + count)[at : at + count]
            for (batch, head, row), (of, count, at) in outputs.items()
        }
    stored, written, ends = tensors.written(tensor), dict[BlockRows, Array](), dict[tuple[int, int], int]()
    for (_, head, row), (of, count, at) in sorted(outputs.items(), key=lambda x: (x[0][1:], -x[1][1])):
        for batch in sorted(b for b, h in stored if h == of):
            # these rows belong to a block of another batch that has more rows
            skipped = max(0, ends.get((batch, head), 0) - row)
            rows = stored[batch, of][at + skipped : at + count]
            if np.any(np.ascontiguousarray(rows).view(np.uint8) != POISON):
                written[batch, head, row + skipped] = rows
                ends[batch, head] = row + count
    return written


def is_stacked(program: TileProgram, output: str) -> bool:
    """Return whether an output has more matrices than its blocks have batches: a block may store to any of them."""
    tensor = program.tensors[output]
    return not tensor.added and tensor.batch > 1 + max(b.batch for b in _final(program).blocks)


def _outputs(
    program: TileProgram, needed: Blocks, heads: Container[int], output: str
) -> dict[BlockRows, tuple[int, int, int]]:
    """Return which rows the last phase's blocks write: the tensor's head, the number of rows, and their start in the
    head.
    """
    written: dict[BlockRows, tuple[int, int, int]] = {}
    for block in needed[_final(program).name]:
        for head, row, count, at in _parts(block, program.tensors[output]):
            if head in heads:
                written.setdefault((block.batch, head, row), (block.head, count, at))
    return written


def needed_blocks(
    program: TileProgram,
    rows: Choice,
    heads: Container[int],
    *,
    output: str = "o",
    batches: Container[int] | None = None,
    most: int | None = None,
    since: int | None = None,
) -> dict[str, Sequence[Any]]:
    """Return, by phase, the blocks that the chosen rows of ``output`` need.

    ``most``: only this number of rows at the end of the output's blocks (`sample_rows` for a sample); ``since``: only
    the rows of each head from this row on, and the rows between these heads in a block.  No operation reads one row for
    the result of another row. A stacked output needs all blocks for any ``batches``.
    """
    tensor = program.tensors[output]
    batches = None if is_stacked(program, output) else batches
    most = sample_rows(tensor) if rows == "sample" else most
    blocks = [
        b if most is None or b.rows <= most or tensor.packed > 1 else b.part(b.row + b.rows - most, most)
        for b in _blocks(_final(program), rows, tensor)
        if (batches is None or b.batch in batches) and any(h in heads for h, *_ in _parts(b, tensor))
    ]
    if since is not None:
        blocks = [part for b in blocks for part in _from_row(b, tensor, since, heads)]
    is_cut = most is not None or since is not None
    how = {"is_cut": is_cut, "may_split": since is not None}
    return {p.name: _needed(p, blocks, _heads(_final(program)), **how) for p in program.phases}


def _from_row(block: OutputBlock, output: GlobalTensor, row: int, heads: Container[int]) -> list[Any]:
    """Return a block cut to the rows of the chosen heads from ``row`` on (see `_cut`); nothing if the block has the row
    only of other packed heads.
    """
    wanted = [(at + row - r, at + n) for h, r, n, at in _parts(block, output) if h in heads and r <= row < r + n]
    return _cut(block, wanted, may_split=True) if wanted else []


def _cut(block: OutputBlock, wanted: Sequence[tuple[int, int]], *, may_split: bool) -> list[Any]:
    """Return a block cut to ranges of rows, sorted by their starts: one piece that includes the rows between them; with
    ``may_split``, if most rows are between the ranges, a piece for each range.
    """
    ranges = [[*wanted[0]]]
    for first, last in wanted[1:]:
        if first <= ranges[-1][1]:
            ranges[-1][1] = max(last, ranges[-1][1])
        else:
            ranges.append([first, last])
    first, last = ranges[0][0], ranges[-1][1]
    if not may_split or last - first < SPARSE * sum(end - start for start, end in ranges):
        return [block if last - first == block.rows else block.part(first, last - first)]
    return [block.part(start, end - start) for start, end in ranges]


def _final(program: TileProgram) -> ProgramPhase:
    """Return the phase that writes the output: its rows need no later phase."""
    return next(p for p in reversed(program.phases) if p.serves != "none")


#: Ends of error messages: the options that change the sizes of a problem.
HINTS: Mapping[str, str] = MappingProxyType(
    {
        "heads": ". These are the heads whose bits are computed; q_heads and kv_heads (--q-heads, --kv-heads) "
        "state the heads of the problem"
    }
)


def sample_rows(output: GlobalTensor) -> int:
    """Return the number of rows of an output in a sample."""
    return min(SAMPLE_ROWS, max(LEAST_ROWS, SAMPLE_OUTPUTS // output.cols))


def indices(what: str, choice: Choice, count: int, also: str = "", hint: str = "") -> list[int]:
    """Return indices in ascending order: a number or numbers from 0 to ``count`` - 1, or a text such as
    ``0,128,4000-4095``.

    Ranges are compared with ``count`` before they are expanded; ``also`` names other allowed texts, ``hint`` ends an
    error.  Raises `SpecError` for indices that do not exist, for an empty selection, and for a text that is not an
    index.
    """
    wanted = f"write {also}numbers such as 0,128,4000-4095"
    if isinstance(choice, str):
        parts = [_PART.fullmatch(part) for part in choice.split(",")]
        if not all(parts):
            raise SpecError(f"{what} {choice:.80}: {wanted}{hint}")
        ends = [(int(part[1]), int(part[2] or part[1])) for part in parts if part]
    else:
        try:
            ends = [(index(i), index(i)) for i in ([choice] if isinstance(choice, int) else choice)]
        except TypeError:
            raise SpecError(f"{what}: {choice!r}: {wanted}") from None
    for first, last in ends:
        if last < first:
            raise SpecError(f"{what} {choice}: {first}-{last}: the last number is smaller than the first")
        if first < 0 or last >= count:
            wrong = first if not 0 <= first < count else last
            raise SpecError(f"{what}: there is no {wrong}; choose from 0 to {count - 1}{hint}")
    if not ends:
        raise SpecError(f"{what}: the selection is empty; choose from 0 to {count - 1}")
    return sorted({i for first, last in ends for i in range(first, last + 1)})


def chosen(what: str, choice: Choice, count: int) -> Literal["sample", "all"] | list[int]:
    """Return ``sample`` or ``all`` unchanged, otherwise `indices`."""
    if isinstance(choice, str) and choice in ("sample", "all"):
        return "all" if choice == "all" else "sample"
    return indices(what, choice, count, "sample, all, or ", HINTS.get(what, ""))


def chosen_heads(problem: Output, heads: Choice) -> set[int]:
    """Return the heads to compute."""
    which = chosen("heads", heads, problem.heads)
    if which == "all":
        return set(range(problem.heads))
    if which == "sample":
        each = problem.key_count * problem.head_dim
        return set(range(max(1, min(problem.heads, SAMPLE_ELEMENTS // each))))
    return set(which)


def _parts(block: OutputBlock, output: GlobalTensor) -> Iterator[tuple[int, int, int, int]]:
    """Return the heads that a block writes: head, first row and rows, and their position in the tensor's head."""
    return output.heads_of(block.batch, block.head, block.row, block.rows)


def _blocks(phase: ProgramPhase, rows: Choice, output: GlobalTensor) -> list[Any]:
    if isinstance(rows, str):
        if rows == "all":
            return list(phase.blocks)
        ends = [(b, row, row + n) for b in phase.blocks for _, row, n, _ in _parts(b, output)]
        each = [output.rows_of(n) // output.packed for n in range(output.batch)]
        last = {b.batch: end - row for b, row, end in ends if end == each[b.batch]}
        # The error of a few rows is uncertain: if the last block has too few rows, the sample includes earlier blocks.
        wide = {n: 1 if count >= LEAST_ROWS else sample_rows(output) for n, count in last.items()}
        return list({id(b): b for b, _, end in ends if end > each[b.batch] - wide[b.batch]}.values())
    wanted = np.atleast_1d(rows)
    return [
        b for b in phase.blocks if any(((wanted >= r) & (wanted < r + n)).any() for _, r, n, _ in _parts(b, output))
    ]


def _heads(phase: ProgramPhase) -> int:
    blocks: Sequence[OutputBlock] = phase.blocks
    return 1 + max(b.head for b in blocks)


def _needed(
    phase: ProgramPhase, blocks: Sequence[OutputBlock], heads: int, *, is_cut: bool, may_split: bool
) -> list[Any]:
    """Return the blocks of ``phase`` that the output's ``blocks`` need, cut to their rows if ``is_cut`` (`_cut`).

    ``heads``: heads of the output's blocks; several may share one head of the phase.
    """
    if phase.serves == "none":
        return []
    if phase.serves == "kv_head":
        share = max(1, heads // _heads(phase))
        used = {(b.batch, b.head // share) for b in blocks}
        return [b for b in phase.blocks if (b.batch, b.head) in used]
    rows: dict[tuple[int, int], dict[tuple[int, int], None]] = {}  # neighbouring blocks have the same rows
    for b in blocks:
        rows.setdefault((b.batch, b.head), {})[b.row, b.row + b.rows] = None
    # Sorted by start, with the largest end up to each entry: a block finds its rows among thousands by bisection.
    starts = {place: np.array(sorted(of)) for place, of in rows.items()}
    ends = {place: np.maximum.accumulate(of[:, 1]) for place, of in starts.items()}
    needed = []
    for b in phase.blocks:
        if (place := (b.batch, b.head)) not in starts:
            continue
        begin = starts[place][:, 0]
        low = np.searchsorted(ends[place], b.row, "right")
        high = np.searchsorted(begin, b.row + b.rows)
        if low < high:
            limits = b.row, b.row + b.rows
            rows_of_b = [
                (max(limits[0], first), min(limits[1], last)) for first, last in starts[place][low:high].tolist()
            ]
            needed += _cut(b, rows_of_b, may_split=may_split) if is_cut else [b]
    return needed


def _describe(problem: Output, heads: set[int], written: dict[tuple[int, int, int], Array]) -> str:
    total = problem.heads * problem.query_count
    count = sum(len(rows) for rows in written.values())
    if count == total:
        return f"all {total} rows" if total > 1 else "its only row"
    per_head: list[tuple[int, int]] = []
    for row, end in sorted({(row, row + len(rows)) for (_, _, row), rows in written.items()}):
        is_next = per_head and per_head[-1][1] == row
        per_head.append((per_head.pop()[0] if is_next else row, end))
    spans = ", ".join(f"{a}..{b - 1}" for a, b in per_head[:3]) + (", …" if len(per_head) > 3 else "")
    return f"rows {spans} of {len(heads)} of {problem.heads} heads ({count} of {total} rows)"


def named_choices(program: TileProgram) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return ``{matrix arithmetic: evidence}`` of the program's products, and the orders of its row sums."""
    if not program.named:
        program.named.append(_named_choices(program))
    return program.named[0]


def _named_choices(program: TileProgram) -> tuple[dict[str, str], tuple[str, ...]]:
    named = {
        (step.opcode, step.attributes.arithmetic or step.attributes.order)
        for phase in program.phases
        for step in steps_of(phase.body(phase.blocks[0]))
        if isinstance(step, Step) and step.opcode in (Opcode.MATMUL, Opcode.ROW_SUM)
    }
    arithmetic = sorted(name for opcode, name in named if opcode is Opcode.MATMUL)
    orders = sorted(name for opcode, name in named if opcode is Opcode.ROW_SUM)
    return {name: get_arithmetic(name).evidence for name in arithmetic}, tuple(orders)
