"""Translates a tile program into the flat arrays of ``engine_arrays``: operations, bodies, block sequences, classes.

A body is written once for each scalar unit, as code of operations, loops and calls; loops stay loops.  Blocks that
differ only in the lengths of their loops share one body, and their calls have the counts as operands.  A core group's
blocks become a sequence of calls in which repetitions are loops too, so that the arrays grow with the number of
different bodies, not with the size of the problem.

Core groups of one class run the same blocks with the same times, so that one of them represents all: on the links its
transfers have the weight of the whole class (``npusim.program.timing.link``).  160 equal blocks on 24 groups form two
classes: sixteen groups with seven blocks, eight with six.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import field
from itertools import chain, groupby
from typing import TYPE_CHECKING

import numpy as np

from npusim.errors import ProgramError
from npusim.late_methods import dataclass
from npusim.program.ir.content import uncollected
from npusim.program.timing.engine_arrays import (
    CALL,
    END,
    HALT,
    LOOP,
    OP,
    RANGE_BITS,
    REPEAT,
    RET,
    Program,
    build_program,
)
from npusim.program.timing.link import FRACTION_BITS, NO_CATCH_UP, bytes_per_cycle

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from npusim.program.ir.tile_program import ProgramPhase
    from npusim.program.ir.walk import OpTemplate, Template
    from npusim.program.timing.engine_arrays import Ints
    from npusim.program.timing.stream import Streams, TimedOp

#: Value for an operation that has no work in parallel with other warp groups.
NO_SHARE = (-1, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class InnerBody:
    """A loop's body in another body, and its number of iterations; None: the number that the block states."""

    times: int | None
    body: int


#: A run of operations, or a loop.
Part = tuple[int, ...] | InnerBody


@dataclass(frozen=True, slots=True)
class CompiledBody:
    """Code of one body: the start of each scalar unit's code, the operations of each queue, and the nesting depth.

    ``repeats`` are the bodies whose counts a block states; ``operations`` does not include them.
    """

    parts: tuple[Part, ...]
    entry: tuple[int, ...]
    operations: tuple[int, ...]
    depth: int
    repeats: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A body with the counts of its loops; ``operand`` is the index of the first count in the table of counts.

    ``operations``: the number in each queue, with all iterations.
    """

    body: int
    counts: tuple[int, ...]
    operand: int
    operations: tuple[int, ...]


@dataclass
class Code:
    """Code of the bodies of a program, written when blocks are requested."""

    streams: Streams
    instructions: list[tuple[int, int, int]] = field(default_factory=list)
    bodies: list[CompiledBody] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    operations: list[TimedOp] = field(default_factory=list)
    operands: list[int] = field(default_factory=list)
    _bodies: dict[Hashable, int] = field(default_factory=dict)
    _blocks: dict[Hashable, int] = field(default_factory=dict)
    _operands: dict[tuple[int, ...], int] = field(default_factory=dict)
    _operations: dict[Hashable, int] = field(default_factory=dict)
    _tables: Program | None = None
    _inners: dict[Template, int] = field(default_factory=dict)
    #: Core groups by class, set by the first call of `equal_groups`.
    classes: Classes | None = None

    def __post_init__(self) -> None:
        self.streams.check_pipe_waits("block, fold, steady and reserved")

    # ---------------------------------------------------------------- blocks

    def blocks_of(self, body: Template, counts: Ints) -> list[int]:
        """Return the indices of the blocks with these iteration counts, and write their body if it is new.

        ``counts``: (blocks, loops); a loop that runs once in ``body`` does so in all of them.
        """
        parts: list[Part] = []
        repeated: list[int] = []
        loops = 0
        for part in body.parts:
            if isinstance(part, tuple):
                parts.append(self._run(part))
                continue
            parts.append(InnerBody(1 if part.count == 1 else None, self._inner(part.body)))
            repeated += [loops] if part.count > 1 else []
            loops += 1
        number, times = self._body(tuple(parts)), counts[:, repeated]
        written = self.bodies[number]
        inside = np.array([self.bodies[inner].operations for inner in written.repeats], np.int64)
        operations = np.array(written.operations) + times @ inside.reshape(len(repeated), len(written.operations))
        rows = zip(times.tolist(), operations.tolist(), strict=True)
        return [self._block(number, tuple(row), tuple(done)) for row, done in rows]

    def block_of(self, body: int, counts: tuple[int, ...]) -> int:
        """Return the number of the block with this body and these counts."""
        operations = list(self.bodies[body].operations)
        for count, inner in zip(counts, self.bodies[body].repeats, strict=True):
            for queue, inside in enumerate(self.bodies[inner].operations):
                operations[queue] += count * inside
        return self._block(body, counts, tuple(operations))

    def _block(self, body: int, counts: tuple[int, ...], operations: tuple[int, ...]) -> int:
        key = (body, counts)
        number = self._blocks.get(key)
        if number is None:
            if counts not in self._operands:
                self._operands[counts] = len(self.operands)
                self.operands += counts
            number = self._blocks[key] = len(self.blocks)
            self.blocks.append(Block(body, counts, self._operands[counts], operations))
        return number

    def operation_count(self, blocks: Iterable[int]) -> int:
        """Return the number of operations that a sequence of blocks runs."""
        return sum(often * sum(self.blocks[block].operations) for block, often in Counter(blocks).items())

    def runs_of_operations(self, blocks: Iterable[int]) -> Ints:
        """Return the number of executions of each operation in a sequence of blocks."""
        runs_of = Counter[int]()
        for number, often in Counter(blocks).items():
            block = self.blocks[number]
            runs_of[block.body] += often
            for count, inner in zip(block.counts, self.bodies[block.body].repeats, strict=True):
                runs_of[inner] += often * count
        runs = np.zeros(len(self.operations), np.int64)
        for body in range(len(self.bodies) - 1, -1, -1):  # a body is written after the bodies inside it
            for part in self.bodies[body].parts if runs_of[body] else ():
                if not isinstance(part, InnerBody):
                    np.add.at(runs, list(part), runs_of[body])
                elif part.times is not None:
                    runs_of[part.body] += runs_of[body] * part.times
        return runs

    # ---------------------------------------------------------------- bodies

    def _inner(self, body: Template) -> int:
        if body not in self._inners:
            runs = (
                self._run(p) if isinstance(p, tuple) else InnerBody(p.count, self._inner(p.body)) for p in body.parts
            )
            self._inners[body] = self._body(tuple(runs))
        return self._inners[body]

    def _run(self, run: tuple[OpTemplate, ...]) -> tuple[int, ...]:
        """Return the numbers of operations; operations with equal time and behaviour share one."""
        known, operations, numbers = self._operations, self.operations, []
        for op in map(self.streams.timed, run):
            numbers.append(known.setdefault(op.content, len(operations)))
            if numbers[-1] == len(operations):
                operations.append(op)
        return tuple(numbers)

    def _body(self, parts: tuple[Part, ...]) -> int:
        known = self._bodies.get(parts)
        if known is None:
            written = self._write(parts)
            known = self._bodies[parts] = len(self.bodies)
            self.bodies.append(written)
        return known

    def _write(self, parts: tuple[Part, ...]) -> CompiledBody:
        queues = self.streams.program.queues
        inners = [part for part in parts if isinstance(part, InnerBody)]
        operations = [0] * len(queues)
        for part in parts:
            if not isinstance(part, InnerBody):
                for op in part:
                    operations[self.operations[op].queue] += 1
            elif part.times is not None:
                for queue, inside in enumerate(self.bodies[part.body].operations):
                    operations[queue] += part.times * inside
        entry = []
        for issuer in self.streams.issuers:
            entry.append(len(self.instructions))
            repeat = 0
            for part in parts:
                if not isinstance(part, InnerBody):
                    issued = (op for op in part if queues[self.operations[op].queue].issuer == issuer)
                    self.instructions += [(OP, op, 0) for op in issued]
                elif part.times is None:
                    self.instructions.append((REPEAT, repeat, 0))
                    self._call(part.body, 0, 1)
                    self.instructions.append((END, 0, 0))
                    repeat += 1
                else:
                    self._call(part.body, 0, part.times)
            self.instructions.append((RET, 0, 0))
        depth = max((1 + (inner.times != 1) + self.bodies[inner.body].depth for inner in inners), default=1)
        repeats = tuple(inner.body for inner in inners if inner.times is None)
        return CompiledBody(parts, tuple(entry), tuple(operations), depth, repeats)

    def _call(self, body: int, operand: int, times: int) -> None:
        if times > 1:
            self.instructions.append((LOOP, times, 0))
        self.instructions.append((CALL, body, operand))
        if times > 1:
            self.instructions.append((END, 0, 0))

    # ---------------------------------------------------------------- sequences

    def sequence(self, blocks: Sequence[int]) -> int:
        """Write the blocks of a core group and return the start of its code."""
        start = len(self.instructions)
        period = shortest_period(blocks)
        times = len(blocks) // period
        if times > 1:
            self.instructions.append((LOOP, times, 0))
        self._calls(blocks[:period])
        if times > 1:
            self.instructions.append((END, 0, 0))
        self._calls(blocks[times * period :])
        self.instructions.append((HALT, 0, 0))
        return start

    def _calls(self, blocks: Sequence[int]) -> None:
        for number, same in groupby(blocks):
            block = self.blocks[number]
            self._call(block.body, block.operand, len(list(same)))

    def window(self, calls: int) -> int:
        """Reserve space for calls that are written later, and return its start."""
        start = len(self.instructions)
        self.instructions += [(HALT, 0, 0)] * (calls + 1)
        return start

    @property
    def levels(self) -> int:
        """Nesting depth of loops and calls: two loops of blocks, then the deepest body."""
        return 2 + max((body.depth for body in self.bodies), default=0)

    # ---------------------------------------------------------------- arrays

    def program(self, weights: Sequence[int], is_traced: Sequence[bool]) -> Program:
        """Return the arrays of all code written so far, for members with these weights."""
        if self._tables is None or len(self._tables.op) <= len(self.operations):
            self._tables = build_tables(self.streams, self.operations)
        tables = self._tables
        largest = int(tables.flow["bytes"].max(initial=0))
        check_range(largest, sum(weights) * len(tables.queue))
        entry = np.array([b.entry for b in self.bodies], np.int64).reshape(-1, len(self.streams.issuers))
        members = list(zip(weights, is_traced, strict=True))
        written = build_program(entry, code=self.instructions, operand=self.operands, member=members)
        return tables._replace(
            link=tables.link.copy(), **{name: getattr(written, name) for name in ("code", "operand", "entry", "member")}
        )


@dataclass(frozen=True, slots=True)
class Classes:
    """Core groups by class, and the blocks of each phase and class, as indices into :class:`Code`.

    The class with the most blocks comes first.
    """

    groups: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[tuple[int, ...], ...], ...]

    def every_block(self) -> Iterator[int]:
        """Return the blocks of one core group of each class, one by one."""
        return chain.from_iterable(chain.from_iterable(self.blocks))

    def one_by_one(self) -> Classes:
        """Return the same core groups, each as a separate class."""
        member = {g: i for i, groups in enumerate(self.groups) for g in groups}
        order = sorted(member)
        phases = (tuple(phase[member[g]] for g in order) for phase in self.blocks)
        return Classes(tuple((g,) for g in order), tuple(phases))


@uncollected()
def equal_groups(code: Code) -> Classes:
    """Return the core groups grouped by equal blocks in every phase."""
    if code.classes is None:
        phases = [blocks_by_group(code, phase) for phase in code.streams.program.phases]
        code.classes = fold_groups(list(zip(*phases, strict=True)))
    return code.classes


def fold_groups(groups: Sequence[tuple[tuple[int, ...], ...]]) -> Classes:
    """Return core groups by class; each is given by its blocks, phase by phase."""
    classes: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for group, runs in enumerate(groups):
        classes.setdefault(runs, []).append(group)
    ordered = sorted(classes, key=lambda runs: -sum(len(r) for r in runs))
    return Classes(tuple(tuple(classes[runs]) for runs in ordered), tuple(zip(*ordered, strict=True)))


def blocks_by_group(code: Code, phase: ProgramPhase, groups: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Return the blocks of a phase that each of these core groups has, by number; of all groups by default."""
    streams, numbers = code.streams, np.zeros(len(phase.blocks), np.int64)
    count = streams.device.group_count.value
    every = np.arange(len(phase.blocks))
    chosen = [every[phase.numbers_of_group(group, count)] for group in (range(count) if groups is None else groups)]
    templates = streams.templates
    for form in templates.forms(phase) if groups is None else templates.forms_of(phase, np.concatenate(chosen)):
        blocks = code.blocks_of(form.template, form.counts)
        numbers[form.numbers] = np.array(blocks)[form.which]
    return [tuple(numbers[of_group].tolist()) for of_group in chosen]


# ---------------------------------------------------------------- arrays


def code_of(streams: Streams) -> Code:
    """Return the code of a program's bodies, the same for every method that asks."""
    if streams.code is None:
        # The code's own streams do not refer to the code: objects that refer to one another are not freed with their
        # last user.
        streams.code = Code(copy(streams))
    return streams.code


def build_tables(streams: Streams, operations: Sequence[TimedOp]) -> Program:
    """Return the arrays that do not depend on the program: operations, flags, queues, links."""
    links = {name: index for index, name in enumerate(streams.device.links)}
    queues, endpoints = streams.program.queues, streams.endpoints
    owners = {q.name: i for i, q in enumerate(queues)}
    op: list[Sequence[int]] = []
    wait: list[tuple[int, int]] = []
    sets: list[int] = []
    flow: list[tuple[int, int]] = []
    take: list[tuple[int, int]] = []
    for o in operations:
        costs = (o.queue, o.occupancy, o.latency, o.issue_cycles)
        op.append((*costs, len(wait), len(sets), len(flow), len(take), *(o.share or NO_SHARE)))
        take += o.pipes
        wait += [(own, peer) for own, peer, _ in o.waits]
        sets += o.sets
        flow += [(links[name], size) for name, size in o.flows]
    op.append((0, 0, 0, 0, len(wait), len(sets), len(flow), len(take), *NO_SHARE))
    depths = zip(streams.queue_depths(), (streams.issuers.index(q.issuer) for q in queues), strict=True)
    ends = [(e.lag, e.period, streams.flag_latency(e.index), owners[e.queue]) for e in endpoints]
    return build_program(
        np.zeros((0, len(streams.issuers)), np.int64),
        op=op,
        wait=wait,
        set=sets,
        flow=flow,
        take=take,
        pipe=[0] * len(streams.pipes),
        endpoint=ends,
        pair=[(e.index, q) for e in endpoints for q in e.peers],
        queue=list(depths),
        link=[(rate, 1, 0, *NO_CATCH_UP) for rate in link_rates(streams)],
        rule=[streams.sharing] if streams.sharing else (),
    )


def link_rates(streams: Streams) -> list[int]:
    """Return the service of each link per cycle, in units of its clock, with the rounding of ``SharedLink``.

    A link that needs less than a cycle for all transfers in flight (:func:`check_range`) may as well be faster: its
    clock stays within int64.
    """
    rates = (bytes_per_cycle(streams.device, name) for name in streams.device.links)
    return [min(max(1, round(rate * (1 << FRACTION_BITS))), 1 << RANGE_BITS) for rate in rates]


def check_range(largest_bytes: int, transfers: int) -> None:
    """Raise :class:`ProgramError` if a link's clock could leave the range of int64."""
    if (largest_bytes << FRACTION_BITS) * transfers >= 1 << RANGE_BITS:
        raise ProgramError(
            f"{transfers} transfers of {largest_bytes} bytes at once exceed the range of this engine's integers; "
            "use method des"
        )


def shortest_period(values: Sequence[int]) -> int:
    """Return the smallest p with ``values[i] == values[i + p]`` throughout (Knuth-Morris-Pratt)."""
    border = [0] * (len(values) + 1)
    matched = 0
    for i in range(1, len(values)):
        while matched and values[i] != values[matched]:
            matched = border[matched]
        if values[i] == values[matched]:
            matched += 1
        border[i + 1] = matched
    return max(1, len(values) - border[-1])
