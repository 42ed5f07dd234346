"""Converts a kernel's recorded operations (`npusim.kernels.form.language`) to the tables of a phase: stages, names,
storage and roles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from itertools import chain, count, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from npusim.errors import ProgramError
from npusim.kernels.form.language import ONE, TRACE, Carried, Event, Source, TileNumber, Trace, Value, fail
from npusim.kernels.form.phase import (
    BySize,
    Ends,
    Instruction,
    Mask,
    Name,
    Phase,
    Role,
    Stacked,
    Stage,
    TileLoop,
    Visit,
    nothing_per_tile,
    tensor_of,
    with_finite_starts,
)
from npusim.late_methods import dataclass
from npusim.program.ir.op import PLAIN, Attributes, goes_down
from npusim.program.ir.op import Opcode as O
from npusim.program.ir.tile import GlobalTensor

if TYPE_CHECKING:
    from npusim.kernels.form.phase import WorkTile

Bound = GlobalTensor | BySize | Stacked | Ends


class OperandForm(NamedTuple):
    """The properties of an operand, mask or result that the tables of a kernel need, without its sizes."""

    name: str
    fmt: str
    label: str
    kind: str  #: operand, mask, output or workspace


class Tables(NamedTuple):
    """The tables of a kernel for a machine, for any sizes: the corresponding fields of a `Phase`."""

    names: Mapping[str, Name]
    loops: tuple[TileLoop, ...]
    finish: tuple[Stage, ...]
    constants: Mapping[str, float]
    per_tile: Callable[[Visit], Mapping[str, float]]
    precision_fields: tuple[str, ...] | None = None


class Kernel:
    """A function in the language of kernels; `phase` binds its operands to tensors."""

    def __init__(
        self,
        function: Callable[..., Any],
        results: str,
        axes: Mapping[str, str],
        *,
        finite_starts: bool = False,
        walks: str = "",
        still: str = "",
        keeps_factors: bool = False,
        computes_factors: bool = False,
    ) -> None:
        """``keeps_factors``: cores can store values that rows compute from operands before a loop, and use them as a
        left factor in the loop.  ``computes_factors``: in a loop, rows may compute a left factor from operands alone,
        tile by tile; no tile then begins before the previous one ends.
        """
        self.finite_starts, self.walks, self.still = finite_starts, tuple(walks.split()), frozenset(still.split())
        self.keeps_factors, self.computes_factors = keeps_factors, computes_factors
        self.function, self.results, self.axes = function, tuple(results.split()), dict(axes)
        self.parameters = frozenset(inspect.signature(function).parameters)
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        known = [a for of in self.axes.values() for a in of.split()]
        if unknown := [a for a in self.walks if a not in known]:
            self.fail(f"walks={walks!r}: no operand has the axis {unknown[0]}")
        if wrong := sorted(n for n in self.still if not {*self.axes.get(n, "").split()}.intersection(self.walks)):
            self.fail(
                f"still={still!r}: {wrong[0]} is not an operand with an axis of the loop ({walks or 'walks: none'})"
            )

    def wrapped(self, function: Callable[..., Any], parameters: Iterable[str], axes: Mapping[str, str]) -> Kernel:
        """Return a kernel that calls ``function`` with this kernel; the new kernel has further ``parameters``, and
        further operands with ``axes``.
        """
        function.__name__ = self.__name__
        like = Kernel(
            function,
            " ".join(self.results),
            {**self.axes, **axes},
            finite_starts=self.finite_starts,
            walks=" ".join(self.walks),
            still=" ".join(self.still),
        )
        like.parameters = self.parameters.union(parameters)
        return like

    def phase(
        self,
        label: str,
        cells: Sequence[WorkTile],
        sizes: Mapping[str, int],
        results: Sequence[GlobalTensor | Stacked],
        *,
        arithmetic: str = "",
        values: Mapping[str, Callable[[], Any]] | None = None,
        **bound: Any,
    ) -> Phase:
        """Return the phase with the name ``label``, from its blocks, the largest span of each axis, and the tensors of
        its results.

        ``bound`` has a tensor for each operand, a value for each mask (a mask, several masks by name, or None), and a
        value for each other parameter of the function, which must be hashable (``p``, numbers, functions). Raises
        `ProgramError` with file and line.
        """
        tensors: dict[str, Bound] = {}
        masks: dict[str, Mask] = {}
        symbols: list[tuple[str, tuple[OperandForm, ...]]] = []
        for n in self.axes:
            x = bound.pop(n, None)
            if isinstance(x, Bound):
                tensors[n] = x
                first = next(iter(x.tensors.values())) if isinstance(x, BySize) else tensor_of(x)
                name = "" if isinstance(x, BySize) else first.name
                symbols.append((n, (OperandForm(n, first.fmt, name, "operand"),)))
            else:
                by_name = x if isinstance(x, Mapping) else {n: x} if x is not None else {}
                masks |= by_name
                symbols.append((n, tuple(OperandForm(m, x.tensor().fmt, "", "mask") for m, x in by_name.items())))
        outs = tuple(
            OperandForm(n, tensor_of(r).fmt, tensor_of(r).name, tensor_of(r).role)
            for n, r in zip(self.results, results, strict=True)
        )
        if len({sizes[a] for a in self.walks}) > 1:
            self.fail(
                f"walks: the tiles have {' and '.join(f'{sizes[a]} {a}s' for a in self.walks)}; all tiles of "
                "a loop must have one size"
            )
        rest = tuple((n, x) for n, x in bound.items() if n in self.parameters)
        tables = _tables(self, label, tuple(symbols), outs, rest, precision_choices(bound.get("p")))
        phase = Phase(
            name=label,
            cells=cells,
            sizes={ONE: 1, **sizes} if any(ONE in x.axes for x in tables.names.values()) else sizes,
            tensors={**tensors, **dict(zip(self.results, results, strict=True))},
            masks=masks,
            values=values or {},
            walks=self.walks,
            still=self.still,
            arithmetic=arithmetic or getattr(bound.get("p"), "arithmetic", ""),
            finite_starts=self.finite_starts,
            **tables._asdict(),
        )
        for n, x in tensors.items():
            if n not in tables.names and not isinstance(x, BySize):
                self.fail(f"no statement reads the operand {n}: remove it")
            if isinstance(x, Ends) and x.axis not in phase.walked and cells[0].span(x.axis) is None:
                self.fail(f"{n} is the last number along {x.axis}, but no block and no tile covers a part of this axis")
        return with_finite_starts(phase)

    def trace(
        self, symbols: Sequence[tuple[str, tuple[OperandForm, ...]]], rest: Mapping[str, Any]
    ) -> tuple[Trace, list[Value]]:
        """Run the function on symbols; return its record, and its results."""
        trace = Trace(row_axis=next(iter(self.axes.values())).split()[0], walks=self.walks)
        token = TRACE.set(trace)
        try:
            returned = self.function(**rest, **{n: self._symbol(n, of) for n, of in symbols})
            results = list(_yielded(returned, trace)) if inspect.isgenerator(returned) else _listed(returned, None)
            results = [(trace.moved.get(x, x) if isinstance(x, Value) else x, loop) for x, loop in results]
        except (AttributeError, ProgramError, TypeError) as error:
            if (unbound := [n for n, of in symbols if not of and n != "mask"]) and "None" in str(error):
                how = f"attention(operands={{{unbound[0]!r}: function}}) binds the operands of its score="
                what = f"{', '.join(unbound)} is None, because nothing is bound to it: {how}"
                error.args = (f"{error}; {what}, and kernel.phase({unbound[0]}=...) binds a tensor",)
            raise
        finally:
            TRACE.reset(token)
        if trace.loop is not None:
            assert trace.loop_frame is not None
            fail(
                "a loop over tiles has a break or a return, but its body describes every tile; `sees` decides "
                "which tiles are visited",
                trace.loop_frame,
                trace.left_line,
            )
        for x in trace.unstored:
            why = (
                f"{x} is a product that the kernel does not store: write ({x}).to(format), add it to a state, or "
                "remove it"
            )
            fail(why, x.frame, x.line)
        if len(results) != len(self.results) or not all(isinstance(x, Value) for x, _ in results):
            listed = ", ".join(str(x) for x, _ in results) or "nothing"
            self.fail(
                f"it returns {listed}, but must return {', '.join(self.results)}: a tile or vector for each name "
                "in kernel(results=...)"
            )
        return trace, [_own_result(trace, x, loop, [r for r, _ in results[:i]]) for i, (x, loop) in enumerate(results)]

    def _symbol(self, n: str, of: tuple[OperandForm, ...]) -> Value | tuple[Value, ...] | None:
        axes = tuple(self.axes[n].split())
        if len(set(axes)) < len(axes):
            self.fail(f"the axes of {n} are {' and '.join(axes)}: give the two axes different names")
        values = tuple(Value(axes, o.fmt, "mask" if o.kind == "mask" else "operand", o.name) for o in of)
        return values[0] if len(values) == 1 else values or None

    def fail(self, why: str, at: Event | None = None) -> NoReturn:
        """Raise `ProgramError` with the file and line of an event, or of the kernel if the event has none."""
        code = self.function.__code__
        where = f"{at.file}:{at.line}" if at and at.line else f"{code.co_filename}:{code.co_firstlineno}"
        raise ProgramError(f"{where}: {self.__name__}: {why}")


def kernel(
    *, results: str = "out", finite_starts: bool = False, walks: str = "", still: str = "", **axes: str
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a function as a kernel: the axes of each operand and mask, and the names of what it returns or yields.

    ``finite_starts``: if a mask may hide all keys of a tile from a row, a state that the function starts at -Inf starts
    at the lowest finite number (`npusim.kernels.form.phase.with_finite_starts`), and a note of the run says so. By
    default states start as written, and such a row is NaN, the result of -Inf - -Inf.

    ``walks``: axes along which one loop advances together, such as ``"row token"``: the queries and the keys of one
    chunk.  By default a loop runs along one axis.  ``still``: operands whose first rows or columns along such an axis
    are read by every tile or block, for example the decay within a chunk.
    """
    return lambda function: Kernel(function, results, axes, finite_starts=finite_starts, walks=walks, still=still)


def _listed(outputs: Any, loop: int | None) -> list[tuple[Any, int | None]]:
    return [] if outputs is None else [(x, loop) for x in (outputs if isinstance(outputs, tuple) else (outputs,))]


def _yielded(generator: Any, trace: Trace) -> list[tuple[Any, int | None]]:
    """Return the values that a kernel yields, each with its loop, and the kernel's return value."""
    results: list[tuple[Any, int | None]] = []
    while True:
        try:
            tile = next(generator)
        except StopIteration as end:
            return results + _listed(end.value, None)
        results += _listed(tile, trace.loop)


def _own_result(trace: Trace, x: Value, loop: int | None, others: Sequence[Value]) -> Value:
    """Return a result as a separate value: operands, states, and values that are read later or returned twice are
    copied; so are products that rows also read, and values that lead to a state's next value and are written in its
    place.  If rows also compute the value for a product, which reads it once, the value is computed again.
    """
    result = x.event.loop if x.event else None
    is_product = x.kind == "product" and loop is not None
    is_read_later = any(
        s is x for e in trace.events if e.loop != result or (is_product and e.opcode is not O.MATMUL) for s in e.srcs
    )
    is_step = any(c.loop == loop and c.new is not x and _leads_to(x, c.new, loop) for c in trace.carried)
    is_changed = x.event is not None and x.event.opcode is O.MATMUL and x.event.attributes.accumulate
    # A matrix unit adds a product to a value in that value's storage: a value that is returned before the addition must
    # be stored before it.
    added = [e for e in trace.events if e.loop == loop and _accumulates(e) and e.srcs[-1] is x]
    is_own = not (is_read_later or is_changed or added or is_step or _is_factor(trace, x))
    if x.kind in ("row", "product") and x.state is None and x not in others and is_own:
        return x
    copied = Value(x.axes, x.fmt)
    if x.event is not None and _is_factor(trace, x) and x.event.opcode is not O.MATMUL:
        copied.event = replace(x.event, dst=copied)
        at = next(i for i, e in enumerate(trace.events) if e is x.event)
        trace.events.insert(at + 1, copied.event)
        return copied
    last = len(trace.events) - 1  # after loops, because the kernel may return the results of loops
    if loop is not None:
        last = max((i for i, e in enumerate(trace.events) if e.loop == loop), default=last)
    if is_step:
        last = next(i for i, e in enumerate(trace.events) if e is x.event)
    at = min((i for i, e in enumerate(trace.events) if e in added), default=last + 1)
    copied.event = Event(O.COPY if x.kind == "operand" else O.CAST, copied, (x,), PLAIN, "", loop, 0, "")
    trace.events.insert(at, copied.event)
    return copied


def _leads_to(x: Value, new: Value, loop: int | None) -> bool:
    """Return whether a tile of rows is computed between a state and its next value."""
    e = new.event
    if e is None or e.loop != loop or x.kind != "row" or len(x.axes) < 2 or not _is_of_state(x):
        return False
    return any(s is x or (s.axes == x.axes and _leads_to(x, s, loop)) for s in e.read)


def _accumulates(e: Event) -> bool:
    """Return whether an event adds a product to a value in its storage."""
    return e.opcode is O.MATMUL and e.attributes.accumulate


def _is_factor(trace: Trace, x: Value) -> bool:
    """Return whether a product reads a value."""
    return any(s is x for e in trace.events if e.opcode is O.MATMUL for s in e.read[:2])


@dataclass(frozen=True, slots=True)
class PerTile:
    """Constants that differ between tiles, by name."""

    of: tuple[tuple[str, TileNumber], ...]

    def __call__(self, tile: Visit) -> Mapping[str, float]:
        """Return the constants for a tile."""
        return {n: number.of(tile) for n, number in self.of}


@lru_cache(maxsize=512)  # tables of kernels, by formats and numbers; a search needs a few of them repeatedly
def _tables(
    kernel: Kernel,
    label: str,
    symbols: tuple[tuple[str, tuple[OperandForm, ...]], ...],
    outs: tuple[OperandForm, ...],
    rest: tuple[tuple[str, Any], ...],
    choices: tuple[tuple[O, Attributes], ...],
) -> Tables:
    arguments, read = dict(rest), set[str]()
    if is_known := is_dataclass(p := arguments.get("p")):
        arguments["p"] = _recorded(p, read)
    trace, results = kernel.trace(symbols, arguments)
    for x, o in zip(results, outs, strict=True):
        if x.fmt != o.fmt:
            kernel.fail(
                f"{x} is returned as {o.name}, whose tensor {o.label} has the format {o.fmt}; write .to({o.fmt!r})",
                x.event,
            )
    lowering = _Lowering(kernel, trace, results, dict(choices))
    tables = lowering.tables(label, {o.name: o for _, of in symbols for o in of}, outs)
    return tables._replace(precision_fields=tuple(sorted(read))) if is_known else tables


def _recorded(p: Any, read: set[str]) -> Any:
    """Return a precision like ``p`` that adds the names of attributes that are read to ``read``."""

    def attribute(self: object, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(self, name)

    kind = type(type(p).__name__, (type(p),), {"__slots__": (), "__getattribute__": attribute})
    like: Any = object.__new__(kind)
    for one in fields(p):
        object.__setattr__(like, one.name, getattr(p, one.name))
    return like


def precision_choices(p: object) -> tuple[tuple[O, Attributes], ...]:
    """Return the attributes that a precision chooses for operations to which the kernel gives none."""
    return (
        (O.EXP, Attributes(variant=getattr(p, "exp_variant", ""))),
        (O.DIV, Attributes(variant=getattr(p, "div_variant", ""))),
        (O.ROW_SUM, Attributes(order=getattr(p, "sum_order", ""))),
        (O.CAST, Attributes(rounding=getattr(p, "rounding", ""))),
        (O.ADD, Attributes(variant=getattr(p, "multiply_add", ""))),
    )


class _Lowering:
    def __init__(self, kernel: Kernel, trace: Trace, results: list[Value], choices: Mapping[O, Attributes]) -> None:
        self.choices: Mapping[O, Attributes] = {o: a for o, a in choices.items() if o is not O.ADD}
        self.kernel, self.trace, self.events, self.results = kernel, trace, trace.events, results
        if choices[O.ADD].variant == "once":
            _fuse(self.events, results)
        in_loops = [e for e in self.events if e.opcode is O.MATMUL and e.loop is not None]
        result = [e.read[0] for e in in_loops if e.read[0].event is not None and e.read[0].event.loop == e.loop]
        self.is_recurrent = any(_is_of_state(s) for e in in_loops for s in e.read[:2]) or (
            kernel.computes_factors and any(map(self.is_of_operands, result))
        )
        _sink_tiles(self.events)
        if not self.is_recurrent:  # otherwise a tile begins only when the previous one ends, and no stage runs ahead
            _gather(self.events, trace.carried)
            for c in trace.carried:
                _sink(self.events, c)
        for c in trace.carried:
            _carry(self.events, c)
        self.at = {e: i for i, e in enumerate(self.events)}
        self.first_readers: dict[Value, Value] = {}
        for e in self.events:
            for s in e.read:
                self.first_readers.setdefault(s, e.dst)
        self.fed = {s for e in self.events if e.opcode is O.MATMUL for s in e.read[:2]}
        self._check_use()
        self._check_factors()
        self.groups = self._cut()
        self.name_of: dict[Value, str] = {}
        self.constants: dict[str, float] = {}
        self.numbers: dict[str, TileNumber] = {}
        self.called: dict[tuple[object, ...], str] = {}

    def _check_use(self) -> None:
        """Raise `ProgramError` for a state that is never written or read, and for a value that nothing uses."""
        versions = {v: {v, *(c.new for c in self.trace.carried if c.new.state is v)} for v in self.trace.states}
        used = set(self.results)
        # in two passes, because the operands of a state's next value come before or after it
        for e in reversed(self.events * 2):
            if e.dst in used or (e.dst.root in versions and used & versions[e.dst.root]):
                used.update(e.read)
        for v, of in versions.items():
            walks, loops = self.trace.walks, self.trace.axes
            walked = {*loops, *(walks if set(loops) & set(walks) else ())}
            if v.first is not None and (wrong := [a for a in v.axes if a in walked]):
                self.kernel.fail(
                    f"the state {v} starts as {v.first.name}, whose {wrong[0]} axis is that of a loop: a state "
                    "that starts as an operand cannot have an axis of a loop"
                )
            if len(of) == 1:
                self.kernel.fail(f"the state {v} is never written: assign to its variable in a loop over tiles")
            if not used & of:
                self.kernel.fail(f"the state {v} is read only for its own next value: remove it or return it")
        read = {s for e in self.events for s in e.read}
        for v in self._values():
            if v.event and v not in read and v not in self.results and v.state is None and v.onto is None:
                self.kernel.fail(f"{v} is never read: remove it or return it", v.event)

    def _check_factors(self) -> None:
        """Raise `ProgramError` for factors that no machine can provide: matrix units read the right factor
        from memory.
        """
        for e in self.events:
            if e.opcode is not O.MATMUL:
                continue
            left, right = e.read[:2]
            if e.loop is None and any(before.loop is not None for before in self.events[: self.at[e]]):
                self.kernel.fail(
                    f"{left.written()} is a factor of a product after a loop: multiply in the loop, tile by tile, "
                    "or return the loop's result and multiply in a separate kernel",
                    e,
                )
            is_made = self.is_of_operands(right) or (e.loop is not None and _is_of_state(right))
            if right.kind != "operand" and ((e.loop is None and not self.kernel.computes_factors) or not is_made):
                self.kernel.fail(
                    f"{right} is the right factor of a product: the right factor must be an operand, or computed from "
                    "operands of the tile in a loop, or from a state; compute it in an earlier kernel",
                    e,
                )
            if right.event is not None and right.event.loop != e.loop:
                self.kernel.fail(
                    f"{right} is the right factor of a product in a loop and is computed outside: "
                    "compute it in the loop, so that each tile's product reads its own",
                    e,
                )
            if left.kind != "operand" and e.attributes.transpose_a and e.loop is None:
                self.kernel.fail(
                    f"{left.written()}.T is the left factor of a product, where only operands can be transposed: "
                    "compute the tile with its axes swapped, from k @ q.T instead of q @ k.T; a loop over tiles "
                    "also transposes results of rows",
                    e,
                )
            is_kept = self.is_recurrent or (
                self.kernel.keeps_factors and left.event is not None and left.event.loop is None
            )
            if left.kind != "operand" and e.loop is not None and self.is_of_operands(left) and not is_kept:
                self.kernel.fail(
                    f"{left} is the left factor of a product in a loop and computed from operands only: compute it in "
                    "an earlier kernel, for all tiles at once",
                    e,
                )

    def is_of_operands(self, v: Value) -> bool:
        """Return whether a value is an operand, or whether rows compute it from operands and masks alone."""
        if v.kind != "row" or v.event is None:
            return v.kind in ("operand", "mask")
        return bool(v.event.read) and all(map(self.is_of_operands, v.event.read))

    def _values(self) -> list[Value]:
        """Return every value in the order of computation; tiles of operands and states come at their first use."""
        in_events = (x for e in self.events for s in (*e.read, e.dst) for x in (s, s.root))
        states = [c.old for c in self.trace.carried]
        values = list(dict.fromkeys((*in_events, *states)))
        return [*values, *dict.fromkeys(v.first for v in values if v.first is not None and v.first not in values)]

    def _cut(self) -> list[list[Event]]:
        """Return the events of each stage.  A stage has at most one product; rows between products are divided where
        their columns belong to another axis.
        """
        groups: list[list[Event]] = []
        for e in self.events:
            last = groups[-1] if groups else []
            of_rows = set(map(self._row_axis, (e, *last[:1])))
            is_apart = last and (e.loop != last[0].loop or len(of_rows) > 1)
            if not last or O.MATMUL in (e.opcode, last[0].opcode) or is_apart:
                groups.append([e])
            elif e.loop is not None and _column(e) and next(filter(None, map(_column, last)), _column(e)) != _column(e):
                moved = [e]  # together with the earlier vectors that only this operation reads
                while (
                    last
                    and len(last[-1].dst.axes) == 1
                    and last[-1].dst.onto is None
                    and all(f in moved for f in self.events[: self.at[e] + 1] if last[-1].dst in f.read)
                ):
                    moved.insert(0, last.pop())
                groups.append(moved)
            else:
                last.append(e)
        return [g for g in groups if g]

    def _row_axis(self, e: Event) -> str:
        """Return the axis of the rows that an event processes; for a reduction of columns, the axis of its operands'
        rows.
        """
        axes = [x.axes[0] for x in (*(e.read if goes_down(e.opcode, e.attributes) else ()), e.dst)]
        return next((a for a in axes if a != ONE), self.trace.row_axis)

    # ---------------------------------------------------------------- tables

    def tables(self, label: str, operands: Mapping[str, OperandForm], outs: tuple[OperandForm, ...]) -> Tables:
        """Return the tables; a single stage has the phase's label as its name."""
        self._name()
        called = [self._stage_name(g) for g in self.groups] if len(self.groups) > 1 else [label]
        called = [n if n not in called[:i] else f"{n} {called[: i + 1].count(n)}" for i, n in enumerate(called)]
        stages = [Stage(n, tuple(map(self._row, g))) for n, g in zip(called, self.groups, strict=True)]
        listed = zip([g[0].loop for g in self.groups], stages, strict=True)
        runs = [(at, tuple(s for _, s in run)) for at, run in groupby(listed, itemgetter(0))]
        finish = runs.pop()[1] if len(runs) > 1 and runs[-1][0] is None else ()
        return Tables(
            names=dict(self._declared(operands, outs)),
            loops=tuple(TileLoop(run, "" if at is None else self.trace.axes[at]) for at, run in runs),
            finish=finish,
            constants=self.constants,
            per_tile=PerTile(tuple(self.numbers.items())) if self.numbers else nothing_per_tile,
        )

    def _stage_name(self, group: list[Event]) -> str:
        """Return a stage's name: that of its product, or of its results."""
        last = group[-1].dst
        if group[0].opcode is O.MATMUL:
            added = group[0].read[:2] if last.onto is not None else (last,)
            return "".join(_label(v, self.name_of[v]) for v in added)
        handed = next((e.dst for e in reversed(group) if e.dst in self.fed or e.dst in self.results), None)
        if handed is None and last.onto is not None:
            return "update"
        handed = last if handed is None else handed
        return "finish" if handed in self.results else f"rows of {_label(handed, self.name_of[handed])}"

    def _row(self, e: Event) -> Instruction:
        srcs = e.srcs[:2] if e.opcode is O.MATMUL else e.srcs
        if e.opcode is O.MATMUL and e.attributes.accumulate and self._source(e.srcs[2], e) != self.name_of[e.dst]:
            why = "is read after a product was added to it in place: read the sum, or read the state earlier"
            self.kernel.fail(f"{e.srcs[2]} {why}", e)
        attributes = self.choices.get(e.opcode, PLAIN) if e.attributes == PLAIN else e.attributes
        return Instruction(
            e.opcode, self.name_of[e.dst], tuple(self._source(s, e) for s in srcs), attributes, e.only, e.line
        )

    def _source(self, s: Source, e: Event) -> str:
        if isinstance(s, TileNumber):
            if s.key not in self.called:
                used = {*self.numbers, *self.constants, *self.name_of.values()}
                names = chain([s.text], (f"{s.text} ({i})" for i in count(2)))
                self.called[s.key] = next(n for n in names if n not in used)
                self.numbers[self.called[s.key]] = s
            return self.called[s.key]
        if isinstance(s, Value):
            return self.name_of[s if s.event is not None and s.event.loop == e.loop else s.root]
        text = f"{float(s):g}"
        called = self.trace.constants.get(float(s), text)
        if called in self.name_of.values() or called in self.numbers or self.constants.get(called, s) != s:
            called = text if self.constants.get(text, s) == s else repr(float(s))
        self.constants[called] = float(s)
        return called

    def _declared(self, operands: Mapping[str, OperandForm], outs: tuple[OperandForm, ...]) -> dict[str, Name]:
        """Return names with their kinds: operands, masks and states come first, and tiles before vectors."""
        ranks = {kind: i for i, kind in enumerate(("operand", "mask", "state"))}
        labels = {o.name: o.label for o in operands.values() if o.name == o.label}
        for o in (*operands.values(), *outs):  # if operands are parts of one tensor, one operand has the tensor's name
            if o.label and o.label not in labels.values():
                labels[o.name] = o.label
        chosen = {self.name_of[v]: v.chosen_role for v in self.name_of if v.chosen_role}
        names: dict[str, Name] = {}
        roles = _Roles(self, is_partial=any(o.kind != "output" for o in outs))
        for v in sorted(self.name_of, key=lambda v: (len(v.axes) == 1, ranks.get(v.kind, len(ranks)), self._born(v))):
            n = self.name_of[v]
            if n not in names:
                role: Any = chosen.get(n) or roles.of(v)
                label = _label(v, labels.get(n, n))
                names[n] = Name(role, v.axes, v.fmt, v.start, label, "" if v.first is None else v.first.name)
        return names

    def _born(self, v: Value) -> int:
        return -1 if v.event is None else self.at[v.event]

    # ---------------------------------------------------------------- names and storage

    def _name(self) -> None:
        """Give every value a name; values with the same name share their storage."""
        used = set(self.kernel.results)

        def unique(base: str) -> str:
            name = next(x for x in chain([base], (f"{base}_{i}" for i in count(2))) if x not in used)
            used.add(name)
            return name

        values = self._values()
        for v, n in zip(self.results, self.kernel.results, strict=True):
            one: Value | None = v
            while one is not None and one.event is not None:  # also the tile that the mask cuts, in that tile's storage
                self.name_of[one] = n
                one = _masked(one.event)
        for v in values:
            if v.kind in ("operand", "mask"):
                self.name_of[v] = v.name
                used.add(v.name)
        for v in values:
            if v.kind == "state":
                self.name_of[v] = unique(v.name or "state")
        for e in self.events:
            if e.dst.name and e.dst.onto is None and e.dst not in self.name_of and _masked(e) is None:
                self.name_of[e.dst] = unique(e.dst.name)
        for e in self.events:
            tile = _masked(e)
            if e.dst.onto is not None:
                self.name_of[e.dst] = self.name_of[e.dst.onto]
            elif tile is not None:  # only some tiles have the operation, which works in the tile's storage
                if late := next((f for f in _readers(tile, self.events) if self.at[f] > self.at[e]), None):
                    does = "added a product to it" if e.opcode is O.MATMUL else "masked it"
                    made = "the sum" if e.opcode is O.MATMUL else "the result of where(...)"
                    why = (
                        f"{tile} is read after line {e.line} has {does} in place: read {made}, or read the tile earlier"
                    )
                    self.kernel.fail(why, late)
                self.name_of[e.dst] = self.name_of[tile]
            elif e.dst not in self.name_of:
                self.name_of[e.dst] = unique(self._called_after(e.dst))

    def _called_after(self, v: Value) -> str:
        """Return the name of a nameless value: the name of the value for which it is used."""
        end = ""
        while (reader := self.first_readers.get(v)) is not None:
            if reader.onto is v and not reader.name:  # the next term of a sum of products
                v = reader
                continue
            end += "_in" * (v.kind == "product")
            known = reader.name or self.name_of.get(reader, "")
            if not known and reader.onto is not None:
                known = self.name_of[reader.onto]
            if known:
                return f"{known}{end}"
            v = reader
        return f"t{end}"


def _is_of_state(v: Value, seen: frozenset[Value] = frozenset()) -> bool:
    """Return whether a value is computed from a state's tile: from the previous tiles of the loop."""
    if v.kind == "state" or v.state is not None:
        return len(v.axes) > 1
    return v.event is not None and v not in seen and any(_is_of_state(s, seen | {v}) for s in v.event.read)


def _label(v: Value, called: str) -> str:
    """Return a value's label in messages and traces: tiles of one letter are matrices, as in papers."""
    called = called.removesuffix("_in") if v.kind == "product" else called
    return called.upper() if len(called) == 1 and len(v.axes) > 1 else called


def _column(e: Event) -> tuple[str, ...]:
    return e.dst.axes[1:] or next((s.axes[1:] for s in e.read if len(s.axes) > 1), ())


def _masked(e: Event) -> Value | None:
    """Return the tile in whose place an operation works: the tile that a `where` masks, unless it is an operand or a
    number.

    Likewise the value to which the matrix unit adds a product.
    """
    if e.opcode is O.MATMUL and e.attributes.accumulate:
        return e.read[2] if e.read[2].event else None
    if e.opcode is not O.SELECT or e.read[0].kind != "mask":
        return None
    return next((s for s in e.read[1:] if s.event and s.event.opcode is not O.FILL), None)


# ---------------------------------------------------------------- states


def _readers(v: Value, events: Sequence[Event]) -> list[Event]:
    """Return the events that read a value, or a cast of it to its own format; machines store both in one place."""
    names, readers = {v}, []
    for e in events:
        if names.intersection(e.read):
            readers.append(e)
            if e.opcode is O.CAST and e.dst.fmt == v.fmt:
                names.add(e.dst)
    return readers


def _fuse(events: list[Event], results: list[Value]) -> None:
    """Combine a product of numbers and the only addition that reads it into one event, rounded once."""
    for e in [e for e in events if e.opcode is O.ADD]:
        for s in e.read:
            of = s.event
            if of is None or of.opcode is not O.MUL or s in results or s.state is not None:
                continue
            is_read_once = sum(x is s for f in events for x in f.read) == 1
            if is_read_once and (of.loop, of.only, s.axes) == (e.loop, e.only, e.dst.axes):
                e.opcode, e.srcs = O.FMA, (*of.srcs, *(x for x in e.srcs if x is not s))
                events.remove(of)
                break


def _sink_tiles(events: list[Event]) -> None:
    """Move a tile whose first readers are rows after a product to those rows: only vectors are carried past a product.

    A reader of a state is not moved, because the state's next value is written in the state's storage.
    """
    for e in [e for e in reversed(events) if e.loop is not None and e.opcode is not O.MATMUL]:
        at = events.index(e)
        reader = next((i for i, f in enumerate(events) if i > at and e.dst in f.read), at)
        between = any(f.opcode is O.MATMUL for f in events[at:reader])
        is_rows = events[reader].opcode is not O.MATMUL and events[reader].loop == e.loop
        if between and is_rows and len(e.dst.axes) > 1 and not any(s.root.kind == "state" for s in (e.dst, *e.read)):
            events.insert(reader - 1, events.pop(at))


def _gather(events: list[Event], carried: list[Carried]) -> None:
    """Move operations that a product neither computes nor needs, but that read an earlier tile, to that tile.

    Readers of a state's old value are also moved if the state's next value is computed there.  Machines carry vectors
    past a product, not tiles, and a state must be read and written on the same side of it.
    """
    for p in [e for e in events if e.loop is not None and e.opcode is O.MATMUL]:
        at = events.index(p)
        ready = {e.dst for e in events[:at] if e.loop == p.loop}
        near = {v for v in ready if len(v.axes) > 1} | {c.old for c in carried if c.new in ready}
        later, moved = [e for e in events[at + 1 :] if e.loop == p.loop], list[Event]()
        free = set(ready)  # and values that could be computed before the product
        for e in later:
            if e.opcode is not O.MATMUL and all(s.event is None or s.event.loop != p.loop or s in free for s in e.read):
                free.add(e.dst)
                if near.intersection(e.read):
                    moved.append(e)
                    near |= {e.dst} if len(e.dst.axes) > 1 else set()
        for e in reversed(later):  # the operation with its operands
            if e not in moved and any(e.dst in m.read for m in moved):
                moved.append(e)
        # a tile is not stored across a product
        while stays := [e for e in moved if _is_kept(e, moved, later, carried)]:
            moved = [e for e in moved if e not in stays]
        first = [e for e in events[at + 1 :] if e in moved]
        events[at:] = [*first, p, *(e for e in events[at + 1 :] if e not in first)]


def _is_kept(e: Event, moved: list[Event], later: list[Event], carried: list[Carried]) -> bool:
    """Return whether rows that remain after a product would read a tile of operations that were moved before it."""
    if any(c.new is e.dst or c.old in e.read for c in carried):
        return False
    stay = [f for f in later if f not in moved and f.opcode is not O.MATMUL]
    is_read = len(e.dst.axes) > 1 and any(e.dst in f.read for f in stay)
    return is_read or any(f.dst in e.read for f in stay)


def _sink(events: list[Event], c: Carried) -> None:
    """Move readers of a state's old value after the products that precede its next value.

    Where a product waits for rows, machines run the operations before the product some tiles ahead of the operations
    after it: a state must be read and written on one side of the product.  Operands of the product itself are not
    moved.
    """
    assert c.new.event is not None
    end = events.index(c.new.event)
    computed = {e.dst for e in events if e.loop == c.loop}
    products = [e for e in events[:end] if e.loop == c.loop and e.opcode is O.MATMUL]
    for p in [e for e in products if computed.intersection(e.read[:2])]:
        at = events.index(p)
        moved = [e for e in _readers(c.old, events[:at]) if e.loop == c.loop]
        for e in events[:at]:
            if e not in moved and {m.dst for m in moved}.intersection(e.read):
                moved.append(e)
        for e in reversed(events[:at]):  # with the tiles that only these operations read
            if e.loop == c.loop and e.opcode is not O.MATMUL and len(e.dst.axes) > 1 and e not in moved:
                readers = [f for f in events if e.dst in f.read]
                if any(f in moved for f in readers) and all(f in moved or events.index(f) > at for f in readers):
                    moved.append(e)
        if moved and not {m.dst for m in moved}.intersection(p.read):
            rest = [e for e in events[:at] if e not in moved]
            events[: at + 1] = [*rest, p, *(e for e in events[:at] if e in moved)]


def _carry(events: list[Event], c: Carried) -> None:
    """Write a state's next value in the state's storage if nothing reads the old value afterwards; otherwise copy it
    there.

    The copy is placed where the kernel binds the variable, or after the last reader of the old value if this is later
    or if a product is between them.
    """
    state = c.old.root
    new = c.new.event
    assert new is not None
    at = {e: i for i, e in enumerate(events)}
    last = max((at[e] for e in _readers(c.old, [e for e in events if e.loop == c.loop])), default=-1)
    if last <= at[new] and not new.only:
        step: Value | None = c.new
        # also the steps that lead to it, back to the point where the old value is no longer needed
        while step is not None:
            step.onto = state
            e = step.event
            assert e is not None
            step = next((s for s in e.read if _is_step(s, c, events, at, last, e)), None)
        return
    behind, bound = max(last, at[new]), at[c.bound_after]
    if bound > behind and all(e.opcode is not O.MATMUL for e in events[behind : bound + 1]):
        behind = bound
    copy = Value(c.old.axes, c.old.fmt, state=state, onto=state)
    copy.event = Event(O.COPY, copy, (c.new,), PLAIN, "", c.loop, c.line or new.line, new.file)
    events.insert(behind + 1, copy.event)


def _is_step(s: Value, c: Carried, events: list[Event], at: Mapping[Event, int], last: int, reader: Event) -> bool:
    """Return whether a value between a state's old value and its next value may be written in the state's storage."""
    return (
        s.event is not None
        and s.event.loop == c.loop
        and s.kind == "row"
        and s.onto is None
        and (s.axes, s.fmt) == (c.old.axes, c.old.fmt)
        and at[s.event] >= last
        and _comes_from(s, c)
        and not any(s in f.read for f in events[at[reader] + 1 :])
    )


def _comes_from(v: Value, c: Carried) -> bool:
    """Return whether a value of a loop is computed from a state's old value, through tiles of its shape."""
    if v is c.old:
        return True
    e = v.event
    return e is not None and e.loop == c.loop and any(s.axes == c.old.axes and _comes_from(s, c) for s in e.read)


# ---------------------------------------------------------------- roles


class _Roles:
    """Roles of values, from the operations that compute and use them: for diagnosis, never for storage."""

    def __init__(self, lowering: _Lowering, *, is_partial: bool) -> None:
        self.events, self.fed, self.results = lowering.events, lowering.fed, lowering.results
        self.carried, self.is_partial, self.lowering = lowering.trace.carried, is_partial, lowering
        self._known: dict[Value, Role] = {}
        #: Values that are computed elementwise and are a factor of a product, and values computed from an exponential.
        self._become_weights, self._had_exponential = set(self.fed), set[Value]()
        for e in reversed(self.events):
            if e.dst in self._become_weights:
                self._become_weights |= {
                    s for s in e.read if s.event and s.axes == e.dst.axes and s.event.loop == e.loop and s is not e.dst
                }
        for e in self.events:
            if e.opcode is O.EXP or any(s in self._had_exponential for s in e.read if s.axes == e.dst.axes):
                self._had_exponential.add(e.dst)

    def of(self, v: Value) -> Role:
        if v not in self._known:
            self._known[v] = self._of(v)
        return self._known[v]

    def _of(self, v: Value) -> Role:
        if v.kind in ("operand", "mask"):
            return "operand" if v.kind == "operand" else "mask"
        if v in self.results:
            return "result"
        return self._of_computed(v)

    def _of_computed(self, v: Value) -> Role:
        return self._of_tile(v) if len(v.axes) > 1 else self._of_state(v) if v.kind == "state" else self._of_vector(v)

    def _of_tile(self, v: Value) -> Role:
        if v.kind == "state":
            return "output"
        e = v.event
        assert e is not None
        if v.kind == "product":
            return "score" if all(map(self.lowering.is_of_operands, e.read)) else "partial"
        over = [s for s in e.read if s.event and s.event.loop is None and s.axes == v.axes]
        if e.loop is None and (e.opcode is O.DIV or any(self.of(s) == "output" for s in over)):
            return "partial" if self.is_partial else "output"
        return "weight" if v in self._become_weights and v in self._had_exponential else "work"

    def _of_state(self, v: Value) -> Role:
        assert v.start is not None
        if v.start < 0:
            return "max"
        held = [v, *(c.new for c in self.carried if c.new.state is v)]
        held += [e.dst for e in self.events if e.opcode is O.CAST and e.read[0] in held]
        return "sum" if any(e.opcode in (O.DIV, O.LOG) and e.srcs[-1] in held for e in self.events) else "mean"

    def _of_vector(self, v: Value) -> Role:
        e = v.event
        assert e is not None
        while e.opcode is O.CAST and e.read[0].event and len(e.read[0].axes) == 1:
            e = e.read[0].event
        if e.opcode in (O.ROW_MAX, O.MAX):
            return "max"
        if e.opcode is O.ROW_SUM:
            return "sum" if self.of(e.read[0]) == "weight" else "mean"
        if e.opcode is O.EXP:
            rescaled = (s for f in self.events if f.opcode is O.MUL and e.dst in _through_casts(f) for s in f.read)
            return "decay" if any(s.kind == "state" or s.state is not None for s in rescaled) else "gain"
        summed = next((s for s in e.read if s.event and s.event.opcode is O.ROW_SUM), None)
        # the sum's own role: if the sum is also a result, what is computed from the sum is not
        return self._of_computed(summed) if summed is not None and e.opcode in (O.MUL, O.ADD) else "work"


def _through_casts(e: Event) -> list[Value]:
    """Return the sources of an event, and the sources of their casts."""
    return [x for s in e.read for x in (s, *(s.event.read[:1] if s.event and s.event.opcode is O.CAST else ()))]
