"""Checks that make a tile program safe to execute in any order its flags allow.

* program order is legal: every wait is satisfied by an operation listed before it;
* flags: ids of each ordered pair of pipes, counters between cores, and their maximum;
* loops are pure and advance every ring by a constant;
* races: two operations on the same bytes are ordered by queues and flags (``ir.races``).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from npusim.errors import FlagError, ProgramError
from npusim.ir.program import Item, Loop
from npusim.ir.races import check_races
from npusim.ir.tile import GlobalTile
from npusim.ir.walk import LoopTemplate, ResolvedOp, Template, Walker, compile_items, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from npusim.ir.buffers import Ring
    from npusim.ir.op import TileOp
    from npusim.ir.program import Phase, TileProgram
    from npusim.ir.tile import Operand


@dataclass(frozen=True, slots=True)
class FlagBudget:
    """How many flags a core group has (the device file's ``flags``)."""

    event_ids_per_pair: int
    cross_core_ids: int
    cross_core_counter_max: int


def check(program: TileProgram, budget: FlagBudget | None = None, *, thorough: bool = True) -> None:
    """Raise the first fault found: `FlagError`, `ProgramError` or `RaceError`.

    Every shape of block is checked once, its loops for as many iterations as the deepest ring has
    slots and two more: after that their flags and slots repeat.  Not ``thorough``: of each phase
    only the shapes of the first and the last block, and of each loop its ends.
    """
    for phase in program.phases:
        ends = [phase.blocks[0], phase.blocks[-1]]
        blocks = representative_blocks(phase, None if thorough else ends)
        if budget:
            used = first_operations(program, phase, blocks.values())
            check_flags({t.ring for resolved in used for t in resolved.op.ring_tiles()}, budget)
        keyed: dict[Hashable, Structure] = {}
        for block in blocks.values():
            _check_loops(program, phase.body(block), keyed, thorough=thorough)
            # Two blocks in a row: what one leaves in a ring meets what the next puts there.
            check_order(program, first_operations(program, phase, [block, block]))
            check_races(program, first_operations(program, phase, [block, block]))


def representative_blocks(phase: Phase, among: Sequence[Any] | None = None) -> dict[Hashable, Any]:
    """Return one block of each shape of a phase, or of the blocks given."""
    found: dict[Hashable, Any] = {}
    for block in phase.blocks if among is None else among:
        found.setdefault(phase.shape(block), block)
    return found


def first_operations(
    program: TileProgram, phase: Phase, blocks: Iterable[Any]
) -> Iterator[ResolvedOp]:
    """Yield the resolved operations of ``blocks``, each loop cut to its first iterations."""
    deepest = max((r.depth for r in program.rings), default=1)
    walker = Walker(program)
    for block in blocks:
        yield from walk(walker, _cut_loops(phase.body(block), deepest + 2))


def _cut_loops(items: Iterable[Item], count: int) -> Iterator[Item]:
    for item in items:
        if isinstance(item, Loop):
            yield Loop(item.name, item.indices[:count], partial(_cut_body, item.body, count))
        else:
            yield item


def _cut_body(body: Callable[[int], Iterable[Item]], count: int, index: int) -> Iterator[Item]:
    return _cut_loops(body(index), count)


def check_flags(rings: Iterable[Ring], budget: FlagBudget) -> None:
    """Raise :class:`FlagError` if the rings of one phase need more flags than there are.

    A binary ring uses one id a slot from each producer to each consumer and as many back; a
    counter ring one id each way, and a count of at most its depth.
    """
    pairs: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    counters: list[str] = []
    for ring in sorted(rings, key=lambda r: r.name):
        ends = [(p, c) for p in ring.producers for c in ring.consumers if p != c]
        if ring.flag == "counter":
            counters += [f"{ring.name} ready", f"{ring.name} free"]
            if ring.depth > budget.cross_core_counter_max:
                raise FlagError(
                    f"ring {ring.name}: {ring.depth} slots, but a cross-core flag counts to "
                    f"{budget.cross_core_counter_max} at most; use fewer slots"
                )
            continue
        for producer, consumer in ends:
            pairs[producer, consumer].append((f"{ring.name} ready", ring.depth))
            pairs[consumer, producer].append((f"{ring.name} free", ring.depth))
    for (source, target), uses in pairs.items():
        needed = sum(n for _, n in uses)
        if needed > budget.event_ids_per_pair:
            listed = ", ".join(f"{name} {n}" for name, n in uses)
            raise FlagError(
                f"flags {source} -> {target}: {needed} ids needed ({listed}), {budget.event_ids_per_pair} there; "
                "use shallower rings"
            )
    if len(counters) > budget.cross_core_ids:
        raise FlagError(
            f"cross-core flags: {len(counters)} ids needed ({', '.join(counters)}), {budget.cross_core_ids} there"
        )


def check_order(program: TileProgram, operations: Iterable[ResolvedOp]) -> None:
    """Raise :class:`ProgramError` if an operation waits for one listed after it."""
    walker = Walker(program)
    counts = [0] * len(walker.endpoints)
    for resolved in operations:
        for wait in resolved.waits:
            if counts[wait.peer] < wait.count:
                peer = walker.endpoints[wait.peer]
                verb = "commit" if peer.is_producer else "release"
                raise ProgramError(
                    f"{program.name}: {resolved} comes too early in program order; list the {verb} of ring "
                    f"{peer.ring} number {wait.count} on {peer.queue} before it"
                )
        for endpoint in resolved.sets:
            counts[endpoint] += 1


def _check_loops(
    program: TileProgram, items: Iterable[Item], keyed: dict[Hashable, Structure], *, thorough: bool
) -> None:
    """Raise :class:`ProgramError` unless every loop body is pure and uniform.

    The last iteration is compared with the first; ``thorough``: every iteration.  ``keyed`` holds
    the bodies of loops with a key, which all loops of that key must have.
    """
    walker = Walker(program)
    for item in items:
        if not isinstance(item, Loop) or not item.indices:
            continue
        first = item.indices[0]
        expected = _structure(compile_items(walker, item.body(first)))
        if _structure(compile_items(walker, item.body(first))) != expected:
            raise ProgramError(
                f"{program.name}: loop {item.name}: body({first}) differs when called twice"
            )
        for index in item.indices[1:] if thorough else item.indices[-1:]:
            _compare(
                program, item, index, expected, _structure(compile_items(walker, item.body(index)))
            )
        if item.key is not None:
            known = keyed.setdefault((item.name, item.key), expected)
            if known != expected:
                raise ProgramError(
                    f"{program.name}: loop {item.name}: two bodies for one key {item.key}"
                )
        _check_loops(program, item.body(first), keyed, thorough=thorough)


def _compare(
    program: TileProgram, loop: Loop, index: int, expected: Structure, found: Structure
) -> None:
    """Raise :class:`ProgramError` naming the first thing in which an iteration is not the first one."""
    if found == expected:
        return
    where = f"{program.name}: loop {loop.name}: iterations {loop.indices[0]} and {index}"
    if expected[-1] != found[-1]:
        raise ProgramError(f"{where} move the rings by different amounts")
    if len(expected) != len(found):
        counts = f"{len(expected) - 1} and {len(found) - 1} parts"
        raise ProgramError(f"{where} differ in length: {counts}")
    different = next((a, b) for a, b in zip(expected, found, strict=True) if a != b)
    raise ProgramError(f"{where} differ: {different[0]} against {different[1]}")


Structure = list[object]


def _structure(template: Template) -> Structure:
    """Return everything of a body that all iterations must share: operations, flags, advance."""
    found: Structure = []
    for part in template.parts:
        if isinstance(part, LoopTemplate):
            found.append((part.name, part.count, part.start, _structure(part.body)))
        else:
            found += [(o.op.label, o.op.queue, _shapes(o.op), o.waits, o.sets) for o in part]
    return [*found, template.advance]


def _shapes(op: TileOp) -> list[object]:
    """Return an operation's steps without coordinates, constants and addresses."""
    return [
        (s.opcode, s.attributes, [_shape(o) for o in s.operands()], len(s.srcs)) for s in op.steps
    ]


def _shape(operand: Operand) -> object:
    stride = None if isinstance(operand, GlobalTile) else operand.stride
    return (type(operand).__name__, operand.rows, operand.cols, stride, operand.fmt)
