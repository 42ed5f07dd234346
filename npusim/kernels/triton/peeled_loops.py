"""Loops whose first or last tiles are separate and have their own mask, as one loop in otherwise the same TTIR.

For example, a kernel processes all tiles except the last without a mask, and the last tile in a second loop with a
mask.  One loop over all tiles with the masked statements computes the same, since a mask that is true changes nothing;
when the loop is read, it is checked that the mask is true in the tiles for which the kernel has no mask (`HOLDS`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from npusim.kernels.triton.integers import DIVISIONS, bits_of, computed_of
from npusim.kernels.triton.results_apart import LOADS, STORES, roots_of, sources_of
from npusim.kernels.triton.ttir_text import Function, Op, every_of, makers, operand_shape

#: An operation that TTIR does not have: its mask must be true from iteration ``first`` up to, but not including,
#: iteration ``end``.
HOLDS = "npusim.holds"
_OF_INDICES = ("arith.cmpi", "arith.andi", "arith.ori", "tt.broadcast", "tt.expand_dims", "tt.splat", "arith.constant")
_EFFECTS = ("tt.store", "tt.descriptor", "tt.atomic", "tt.load", "cf.", "scf.", "tt.return")
#: Operations on integers that compute bounds of loops.
_INTEGERS = tuple(f"arith.{name}" for name in ("addi", "subi", "muli", "divsi", "remsi", "minsi", "maxsi"))
#: Additions, and the operation that gives one value to all lanes, which may precede or follow an addition.
_SUMS = ("tt.addptr", "arith.addi", "tt.splat")
_SAME = ("arith.extsi", "arith.trunci", "arith.index_cast")


def with_loops_joined(function: Function, arguments: Mapping[str, Any]) -> Function | None:
    """Return a kernel in which each pair of loops over one row of tiles, one of them masked, is one loop; None if there
    are no such pairs.

    Bounds of the loops must be the same in all programs.
    """
    operations, is_changed = function.operations, False
    while (result := _joined_once(operations, arguments) or _with_tile(operations, arguments)) is not None:
        operations, is_changed = result, True
    return function._replace(operations=operations) if is_changed else None


def with_loops_turned(function: Function, arguments: Mapping[str, Any]) -> Function | None:
    """Return a kernel whose loops that store independent tiles run from the last to the first; None if there are no
    such loops.  A tile of a loop that loads elements to which other tiles store may depend on an earlier one.
    """
    result, sources = _made(function.operations), sources_of(function.operations)
    loops = [o for o in function.operations if o.name == "scf.for" and not _loads_stored(o, sources)]
    turned = {id(o): _turned(o, result, arguments) for o in loops}
    if not any(turned.values()):
        return None
    return function._replace(operations=[turned.get(id(o)) or o for o in function.operations])


def _loads_stored(loop: Op, sources: dict[str, list[str]]) -> bool:
    """Return whether a loop loads from a tensor to which it stores, by other pointers than those of its stores."""
    loaded, stored = ({o.operands[0] for o in loop.within() if o.name in names} for names in (LOADS, STORES))
    tensors = {n for pointer in stored for n in roots_of(pointer, sources)}
    return any(tensors & roots_of(pointer, sources) for pointer in loaded - stored)


def _turned(loop: Op, made: Mapping[str, Op], arguments: Mapping[str, Any]) -> Op | None:
    number, *bounds = loop.operands[:4]
    low, high, step = (_whole(n, made, arguments) for n in bounds)
    if len(loop.operands) > 4 or not any(o.name in STORES for o in loop.within()):
        return None
    if low is None or high is None or step is None or step <= 0 or high <= low:
        return None
    total, new, all_, kind = 2 * low + (high - 1 - low) // step * step, f"{number}@turned", f"{number}@all", "i32"
    if bounds[0] in made:
        kind = made[bounds[0]].type or kind
    ops = [
        Op("arith.constant", [all_], [], f"arith.constant {total} : {kind}", kind, loop.line),
        Op("arith.subi", [new], [all_, number], "arith.subi", kind, loop.line),
    ]
    return replace(loop, body=[*ops, *_renamed(loop.body, {number: new})])


def _renamed(operations: Sequence[Op], names: Mapping[str, str]) -> list[Op]:
    return [
        replace(
            o,
            operands=[names.get(n, n) for n in o.operands],
            body=_renamed(o.body, names),
            otherwise=_renamed(o.otherwise, names),
        )
        for o in operations
    ]


def _made(operations: Sequence[Op]) -> dict[str, Op]:
    return makers(every_of(operations))


def _whole(name: str, made: Mapping[str, Op], arguments: Mapping[str, Any]) -> int | None:
    """Return an integer that is the same in all programs because it follows from arguments and constants; None for
    other integers.
    """
    op = made.get(name)
    if op is None:
        value = arguments.get(name)
        return value if isinstance(value, int) else None
    if op.name == "arith.constant":
        text = op.text.removeprefix("arith.constant ").partition(" : ")[0]
        return int(text) if text.lstrip("-").isdigit() else None
    values = [_whole(n, made, arguments) for n in op.operands]
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None
    if op.name in _SAME and len(known) == 1:
        return known[0]
    name = op.name.partition(".")[2]
    if op.name not in _INTEGERS or len(known) != 2 or (name in DIVISIONS and not known[1]):
        return None
    x, y = (np.array([v], np.int64) for v in known)
    return int(computed_of(op, name, x, y, bits_of(op.type))[0])


def _joined_once(operations: list[Op], arguments: Mapping[str, Any]) -> list[Op] | None:
    """Return operations with the first such pair of loops as one loop; None if there is no such pair."""
    result, at = _made(operations), [i for i, o in enumerate(operations) if o.name == "scf.for"]
    for i, j in pairwise(at):
        first, second, between = operations[i], operations[j], operations[i + 1 : j]
        read = {n for k, o in enumerate(operations) if k != j for m in (o, *o.within()) for n in m.operands}
        read |= {n for o in second.within() for n in o.operands}
        is_apart = not any(o.body or o.name.startswith(_EFFECTS) for o in between)
        if not is_apart or read & set(first.results) or not _follows(first, second, result, arguments):
            continue
        order = [first.results.index(n) if n in first.results else -1 for n in second.operands[5::2]]
        if sorted(order) != list(range(len(first.results))):
            continue
        one = _one_loop(first, second, order, result, arguments)
        if one is not None:
            return [*operations[:i], *between, one, *operations[j + 1 :]]
    return None


def _with_tile(operations: list[Op], arguments: Mapping[str, Any]) -> list[Op] | None:
    """Return operations in which a tile that is stored next to a loop is an iteration of that loop; None if there is no
    such tile.

    Compilers write a loop of one iteration in this form, for a first or last tile with a mask.
    """
    result = _made(operations)
    for at, loop in enumerate(operations):
        stores = [o for o in loop.body if o.name == "tt.store"]
        bounds = _bounds(loop, result, arguments) if loop.name == "scf.for" and len(loop.operands) == 4 else None
        if bounds is None or not bounds[3] or not stores or _has_other_effects(loop):
            continue
        low, _, step, count = bounds
        for tiles, value in ((operations[:at], low - step), (operations[at + 1 :], low + count * step)):
            beside = [o for o in tiles if o.name == "tt.store"]
            beside = beside[-len(stores) :] if value < low else beside[: len(stores)]
            one = _loop_with_tile(loop, stores, beside, value, bounds, result)
            if one is not None:
                rest = [o for o in operations if o not in beside]
                changed = [o for x in rest for o in (one if x is loop else [x])]
                return _read_ones(changed)
    return None


def _read_ones(operations: list[Op]) -> list[Op]:
    """Return operations without those outside of loops whose results nothing reads."""
    while True:
        read = {n for o in every_of(operations) for n in o.operands}
        kept = [o for o in operations if not o.results or o.name == "scf.for" or read.intersection(o.results)]
        if len(kept) == len(operations):
            return kept
        operations = kept


def _has_other_effects(loop: Op) -> bool:
    known = ("tt.store", "tt.load", "scf.yield")
    return any(o.name.startswith(_EFFECTS) and o.name not in known for o in loop.body)


def _masked_as(
    loop: Op, stores: Sequence[Op], beside: Sequence[Op], table: _Forms
) -> tuple[list[Op], list[str], dict[int, Op]]:
    """Return the operations that compute a tile's masks in a loop, these masks, and the loop's loads and stores with
    the masks.
    """
    result = table.made
    own = {table.of(r): r for o in loop.body for r in o.results if o.name != "tt.reduce"}
    loads = [o for o in result.values() if o.name == "tt.load" and o not in loop.body]
    new, masks, changed = list[Op](), list[str](), dict[int, Op]()

    def inner(name: str) -> str:
        """Return a mask of the tile as a mask of the loop."""
        if (of := table.of(name)) in own:
            return own[of]
        op = result.get(name)
        if op is None or op.name not in _OF_INDICES or not op.operands:
            return name
        operands = [inner(n) for n in op.operands]
        if operands == op.operands:
            return name
        own[of] = f"{name}@tile"
        new.append(replace(op, results=[own[of]], operands=operands))
        return own[of]

    for o in loop.body:
        like = next(
            (x for x in loads if o.name == "tt.load" and table.of(x.results[0]) == table.of(o.results[0])), None
        )
        if like is not None and len(like.operands) > 1:
            mask = inner(like.operands[1])
            masks.append(mask)
            changed[id(o)] = replace(o, operands=[o.operands[0], mask, *like.operands[2:]])
    for o, like in zip(stores, beside, strict=True):
        if len(like.operands) > 2:
            mask = inner(like.operands[2])
            masks.append(mask)
            changed[id(o)] = replace(o, operands=[*o.operands[:2], mask])
    return new, masks, changed


def _has_unlike_masks(loop: Op, table: _Forms) -> bool:
    """Return whether a tile loads the same elements under two masks, or with two numbers for hidden elements, while its
    loop loads them once.
    """
    own = {table.of(o.results[0]) for o in loop.body if o.name == "tt.load"}
    masked = dict[int, set[tuple[str, ...]]]()
    for o in table.made.values():
        if o.name == "tt.load" and o not in loop.body and (form := table.of(o.results[0])) in own:
            masked.setdefault(form, set()).add(tuple(o.operands[1:]))
    return any(len(masks) > 1 for masks in masked.values())


def _loop_with_tile(
    loop: Op,
    stores: Sequence[Op],
    beside: Sequence[Op],
    value: int,
    bounds: tuple[int, int, int, int],
    made: Mapping[str, Op],
) -> list[Op] | None:
    """Return a loop with one additional iteration, whose number is ``value``, and its new bounds; None if ``value``
    does not extend the loop.

    ``beside``: the stores of that iteration; their masks, and the masks of its loads, become those of the loop.
    """
    table, number, kind = (
        _Forms(made),
        loop.operands[0],
        made[loop.operands[1]].type if loop.operands[1] in made else "i32",
    )
    table.names[number] = table.number(("arith.constant", f"arith.constant {value} : {kind}", (), 0))
    forms = [[tuple(map(table.of, o.operands[:2])) for o in some] for some in (stores, beside)]
    if table.has_choices or len(beside) != len(stores) or forms[0] != forms[1]:
        return None
    if _has_unlike_masks(loop, table):
        return None
    new, masks, changed = _masked_as(loop, stores, beside, table)
    checks = [
        Op(HOLDS, [], [m, number], f"{HOLDS} {{first = {bounds[0]}, end = {bounds[1]}}}", "", loop.line)
        for m in dict.fromkeys(masks)
    ]
    needed = {n for o in new for n in o.operands}
    at = max((i + 1 for i, o in enumerate(loop.body) if needed & set(o.results)), default=0)
    if any(id(o) in changed for o in loop.body[:at]):
        return None
    body = [*loop.body[:at], *new, *checks, *(changed.get(id(o), o) for o in loop.body[at:])]
    is_first, name = value < bounds[0], f"{number}@bound"
    bound = value if is_first else value + 1
    given = [number, name if is_first else loop.operands[1], loop.operands[2] if is_first else name, loop.operands[3]]
    constant = Op("arith.constant", [name], [], f"arith.constant {bound} : {kind}", kind, loop.line)
    return [constant, replace(loop, operands=given, body=body)]


def _bounds(loop: Op, made: Mapping[str, Op], arguments: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
    """Return the start, end, step and number of iterations of a loop; None if they are not known."""
    low, high, step = (_whole(n, made, arguments) for n in loop.operands[1:4])
    if low is None or high is None or step is None or step <= 0:
        return None
    return low, high, step, max(0, -(-(high - low) // step))


def _step(first: tuple[int, int, int, int], second: tuple[int, int, int, int]) -> int:
    """Return the loop whose step applies to both: the step of a loop of one iteration has no effect."""
    return 1 if first[3] <= 1 else 0


def _follows(first: Op, second: Op, made: Mapping[str, Op], arguments: Mapping[str, Any]) -> bool:
    """Return whether a loop continues at the end of another one with the same steps."""
    one, other = (_bounds(loop, made, arguments) for loop in (first, second))
    if one is None or other is None or not one[3] or not other[3]:
        return False
    step = (one, other)[_step(one, other)][2]
    is_like = all(b[3] <= 1 or b[2] == step for b in (one, other))
    return is_like and other[0] == one[0] + one[3] * step


class _Forms:
    """Numbers of values of loops; they are equal for values with equal computations, if masks are true."""

    def __init__(self, made: Mapping[str, Op]) -> None:
        self.made, self.known, self.masks = made, dict[object, int](), list[str]()
        # whether masks are used for selections or as values, in addition to loads and stores
        self.has_choices = False
        self.names = dict[str, int]()

    def number(self, key: object) -> int:
        """Return the number of a form."""
        return self.known.setdefault(key, len(self.known))

    def of(self, name: str) -> int:
        """Return the number of a value."""
        if name not in self.names:
            op = self.made.get(name)
            self.names[name] = self.number(name) if op is None else self._of_op(op, name)
        return self.names[name]

    def _of_op(self, op: Op, name: str) -> int:
        if op.name == "arith.select" and self._is_of_indices(op.operands[0]):
            self.masks.append(op.operands[0])
            self.has_choices = True
            return self.of(op.operands[1])
        if op.name in ("arith.extui", "arith.uitofp") and self._is_of_indices(op.operands[0]):
            self.masks.append(op.operands[0])
            self.has_choices = True
            one = "1" if op.name == "arith.extui" else "1.000000e+00"
            kind = op.type.rpartition(" to ")[2]
            return self.number(("arith.constant", f"arith.constant dense<{one}> : {kind}", (), 0))
        operands = op.operands
        if op.name == "tt.load":
            self.masks += operands[1:2]
            return self.number((op.name, op.type, self.of(operands[0])))
        if op.name in ("arith.addi", "arith.subi") and (same := self._without_zero(op)) is not None:
            return self.of(same)
        if op.name in _SUMS and len(terms := self._terms(name)) > 1:
            return self.number(("sum", op.type, tuple(sorted(terms))))
        text = re.sub(r"%[\w#:.$-]+", "", op.text)
        regions = tuple(re.sub(r"%[\w#:.$-]+", "", o.text) for o in op.within())
        return self.number((op.name, text, tuple(map(self.of, operands)), op.results.index(name), *regions))

    def _terms(self, name: str) -> list[int]:
        """Return the forms whose sum an address or an integer is, in any order of addition."""
        op = self.made.get(name)
        if op is not None and op.name in ("tt.addptr", "arith.addi"):
            same = self._without_zero(op) if op.name == "arith.addi" else None
            return self._terms(same) if same is not None else [t for n in op.operands for t in self._terms(n)]
        if op is not None and op.name == "tt.splat":
            return [self.number(("tt.splat", operand_shape(op.text), t)) for t in self._terms(op.operands[0])]
        return [self.of(name)]

    def _without_zero(self, op: Op) -> str | None:
        """Return the other operand of a sum with 0, or of a difference whose second operand is 0; None for other
        values.
        """
        zero = self.number(("arith.constant", f"arith.constant 0 : {op.type}", (), 0))
        one, other = op.operands
        if self.of(other) == zero:
            return one
        return other if op.name == "arith.addi" and self.of(one) == zero else None

    def _is_of_indices(self, name: str) -> bool:
        """Return whether a mask consists of comparisons of integers that are not loaded."""
        op = self.made.get(name)
        if op is None or op.name not in _OF_INDICES:
            return False
        return op.name in ("arith.cmpi", "arith.constant") or all(map(self._is_of_indices, op.operands))


def _one_loop(
    first: Op, second: Op, order: Sequence[int], made: Mapping[str, Op], arguments: Mapping[str, Any]
) -> Op | None:
    """Return two loops as one; None if they differ in more than their masks, or if both have masks."""
    table = _Forms(made)
    results, masks = list[object](), list[list[str]]()
    for loop, places in ((first, range(len(order))), (second, order)):
        inner = loop.operands[4::2]
        table.names = {loop.operands[0]: table.number("number")}
        table.names |= {n: table.number(f"state {p}") for n, p in zip(inner, places, strict=True)}
        table.masks = []
        ends = dict(zip(places, map(table.of, loop.body[-1].operands if inner else ()), strict=True))
        stores = [o for o in loop.body if o.name == "tt.store"]
        if _has_other_effects(loop):
            return None
        table.masks += [n for o in stores for n in o.operands[2:3]]
        results.append((ends, [tuple(map(table.of, o.operands[:2])) for o in stores]))
        masks.append(list(dict.fromkeys(table.masks)))
    if results[0] != results[1] or all(masks):
        return None
    is_first = bool(masks[0])
    kept, other = (first, second) if is_first else (second, first)
    one, two = (_bounds(loop, made, arguments) for loop in (first, second))
    assert one is not None and two is not None
    low, end = (two[0], two[1]) if is_first else (one[0], two[0])
    body = list(kept.body)
    for mask in masks[0 if is_first else 1]:
        at = next((i + 1 for i, o in enumerate(body) if mask in o.results), 0)
        text = f"{HOLDS} {{first = {low}, end = {end}}}"
        body.insert(at, Op(HOLDS, [], [mask, kept.operands[0]], text, "", other.line))
    starts, inner = first.operands[5::2], kept.operands[4::2]
    if is_first:
        left = [second.results[order.index(p)] for p in range(len(order))]
    else:
        starts, left = [starts[p] for p in order], second.results
    step = (first, second)[_step(one, two)].operands[3]
    carried = [n for pair in zip(inner, starts, strict=True) for n in pair]
    operands = [kept.operands[0], first.operands[1], second.operands[2], step, *carried]
    return replace(kept, operands=operands, results=left, body=body)
