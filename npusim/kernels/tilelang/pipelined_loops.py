"""Software pipelines over tiles as plain loops.

A kernel that computes the first stages of a tile some tiles ahead of the last ones has loops before its main loop for
the first tiles in the first stages, and loops after it for the last tiles in the last stages.  Slots pass the tiles
from stage to stage.  If each slot still has the tile of an iteration when the last stages read it, all loops together
equal one loop whose iterations have all stages of one tile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

from npusim.kernels.tilelang.cores_joined import changed
from npusim.kernels.tilelang.loops import Access, accesses, sum_of
from npusim.kernels.tilelang.statements import (
    Applied,
    BufferElement,
    BufferPart,
    Conditional,
    Elementwise,
    Exposed,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    TileReduction,
    Variable,
    linear,
    number_of,
    parts_of,
    substituted,
    variables_of,
    with_bodies,
    with_inner,
)
from npusim.kernels.tilelang.tile_slots import slot_tiles

Body = tuple[Statement, ...]
#: Loops before or after the main loop, each with the indices of its statements in the main loop.
Loops = list[tuple[SerialLoop, list[int]]]
_ZERO, _TRUE, _ADDS = Literal(0), Literal(1, "bool"), Literal(0, "bool")


def without_pipelines(body: Sequence[Statement]) -> Body:
    """Return statements with one loop in place of a pipeline's loops; unchanged if there is no pipeline."""

    def level(statements: Sequence[Statement], *, is_outermost: bool = False) -> Body:
        inside = _with_peeled(tuple(with_bodies(s, level) for s in statements), may_clear=is_outermost)
        for at, s in enumerate(inside):
            if isinstance(s, SerialLoop):
                result = _Pipeline(inside[:at], s, inside[at + 1 :], uses).as_one_loop()
                if result is not None:
                    return result
        return inside

    plain = _without_private_slots(tuple(body))
    uses = Counter(x.buffer for x in accesses(plain))
    result = level(plain, is_outermost=True)
    return tuple(body) if result == plain else result


# ---------------------------------------------------------------- slots that are read directly after they are written


def _without_private_slots(body: Body) -> Body:
    """Return statements in which a tile replaces slots, each of which is written directly before all of its reads."""
    for buffer, axis in dict.fromkeys(_with_slots(body)):
        shape = tuple(1 if i == axis else n for i, n in enumerate(buffer.shape))
        if all(_is_private(run, buffer, axis) for run in _runs(body)):
            tile = replace(buffer, shape=shape)
            result = slot_tiles(body, buffer, axis, tile)
            if all(tile not in Exposed(run).reads for run in _runs(result)):
                body = result
    return body


def _with_slots(body: Body) -> Iterator[tuple[TileBuffer, int]]:
    """Yield the tiles and axes along which no access moves and not all accesses have the same place."""
    every = list(accesses(body))
    for buffer in dict.fromkeys(x.buffer for x in every if not x.buffer.is_global):
        own = [x for x in every if x.buffer is buffer]
        for axis, n in enumerate(buffer.shape):
            places = {_canonical(x.indices[axis]) for x in own}
            is_fixed = not any(x.moves(axis) or _has_elements(x.indices[axis]) for x in own)
            if n > 1 and len(places) > 1 and is_fixed:
                yield buffer, axis


def _has_elements(e: Expression) -> bool:
    """Return whether an expression reads a buffer."""
    return any(isinstance(x, BufferElement) for x in parts_of(e))


def _runs(body: Sequence[Statement]) -> Iterator[Body]:
    """Yield the statements without loops and branches between them."""
    run = list[Statement]()
    for s in body:
        inner = (s.body,) if isinstance(s, SerialLoop) else (s.then, s.otherwise) if isinstance(s, Conditional) else ()
        if not inner:
            run.append(s)
            continue
        yield tuple(run)
        run = []
        for statements in inner:
            yield from _runs(statements)
    yield tuple(run)


def _is_private(run: Body, buffer: TileBuffer, axis: int) -> bool:
    """Return whether each read of a slot follows a write of the same slot, without a write of another slot between the
    two.
    """
    last: object = None
    for s in run:
        own = [x for x in accesses([s]) if x.buffer is buffer]
        for is_write in (False, True):
            places = {_canonical(x.indices[axis]) for x in own if x.is_write is is_write}
            if len(places) > 1 or (places and not is_write and places != {last}):
                return False
            if places and is_write:
                if _adds(s) and places != {last}:
                    return False
                (last,) = places
    return True


def _adds(s: Statement) -> bool:
    """Return whether a statement that writes a tile leaves the previous values of some elements unchanged."""
    if isinstance(s, ParallelNest):
        return any(isinstance(x, Elementwise) and x.condition is not None for x in s.body)
    return s.clears != _TRUE if isinstance(s, MatrixProduct) else isinstance(s, TileReduction) and not s.clears


def _canonical(e: Expression) -> frozenset[tuple[object, float]]:
    """Return an index in a form that equal indices share: its terms, where remainders have reduced constants."""
    result = Counter[object]()
    for t, n in linear(e, {}).items():
        rest = _remainder(t)
        reduced = {} if rest is None else {u: m % rest[1] for u, m in linear(rest[0], {}).items() if m % rest[1]}
        if rest is None:
            result[t] += n  # type: ignore[assignment]  # a factor is a whole number
        elif set(reduced) <= {Literal(1)}:
            result[Literal(1)] += n * reduced.get(Literal(1), 0)  # type: ignore[assignment]
        else:
            result["%", rest[1], frozenset(reduced.items())] += n  # type: ignore[assignment]
    return frozenset((t, n) for t, n in result.items() if n)


def _remainder(e: Expression) -> tuple[Expression, int] | None:
    """Return the operands of a remainder by a number; None for another expression."""
    if isinstance(e, Applied) and e.word == "%" and isinstance(e.operands[1], Literal):
        return e.operands[0], int(e.operands[1].value)
    return None


def _reduced(e: Expression) -> Expression:
    """Return an expression in which remainders of sums of loops' numbers have reduced constants and a fixed order of
    terms.

    A remainder of a tile's element is unchanged: its format may wrap.
    """
    if (rest := _remainder(e)) is None or _has_elements(e):
        return with_inner(e, _reduced)
    number, by = rest
    terms = sorted(linear(number, {}).items(), key=lambda x: str(x[0]))
    return Applied("%", (sum_of({t: n % by for t, n in terms if n % by}), Literal(by)))


# ---------------------------------------------------------------- iterations before and after a loop


def _with_peeled(body: Body, *, may_clear: bool) -> Body:
    """Return statements in which iterations that are written out before and after a loop are iterations of the loop.

    ``may_clear``: whether the first of them may clear the result of a product to which the others add.  Inside another
    loop, an earlier iteration may have written the result.
    """
    result, rest = list[Statement](), list(body)
    while rest:
        s = rest.pop(0)
        if isinstance(s, SerialLoop) and s.low == _ZERO and isinstance(s.high, Literal) and s.body:
            size, count = len(s.body), int(s.high.value)
            last = [_form(x, s.variable, count, tile=_ZERO) for x in s.body]
            if len(rest) >= size and [_form(x, "", 0) for x in rest[:size]] == last:
                del rest[:size]
                s = replace(s, high=Literal(count + 1))
            if (longer := _with_first(result[-size:], s, may_clear=may_clear)) is not None:
                del result[-size:]
                s = longer
        result.append(s)
    return tuple(result)


def _with_first(before: Sequence[Statement], loop: SerialLoop, *, may_clear: bool) -> SerialLoop | None:
    """Return a loop that includes the statements before it as an iteration; None if they are not an iteration of it."""
    if len(before) != len(loop.body) or not isinstance(loop.high, Literal):
        return None
    by = {loop.variable: Applied("-", (Variable(loop.variable), Literal(1)))}
    body = list(changed(changed(loop.body, lambda e: substituted(e, by)), _reduced))

    def clears(first: Statement, other: MatrixProduct) -> bool:
        if not may_clear or not isinstance(first, MatrixProduct):
            return False
        return (first.clears, other.clears) == (_TRUE, _ADDS)

    for n, (first, own) in enumerate(zip(before, loop.body, strict=True)):
        one, moved = own, body[n]
        if isinstance(one, MatrixProduct) and isinstance(moved, MatrixProduct) and clears(first, one):
            one = replace(one, clears=_TRUE)
            body[n] = replace(moved, clears=Applied("eq", (Variable(loop.variable), _ZERO)))
        if _form(first, "", 0) != _form(one, loop.variable, -1, tile=_ZERO):
            return None
    return replace(loop, high=Literal(int(loop.high.value) + 1), body=tuple(body))


# ---------------------------------------------------------------- the loops of a pipeline


class _Pipeline:
    """A loop with the statements before and after it, as the main loop of a pipeline of two parts.

    The first part of a tile runs ``lag`` iterations of the main loop before the second one: loops before the main loop
    run the first part of the first tiles, and loops after it run the second part of the last tiles.
    """

    def __init__(self, before: Body, loop: SerialLoop, after: Body, uses: Mapping[TileBuffer, int]) -> None:
        self.before, self.loop, self.after, self.uses = before, loop, after, uses
        count = number_of(loop.high, {})
        self.count = count if loop.low == _ZERO and isinstance(count, int) else 0

    def as_one_loop(self) -> Body | None:
        """Return the statements with one loop; None if they are not a pipeline, or if a value would change."""
        if self.count < 1 or not all(
            isinstance(s, ParallelNest | MatrixProduct | TileReduction) for s in self.loop.body
        ):
            return None
        leads = {s.high.value for s in self.before if isinstance(s, SerialLoop) and isinstance(s.high, Literal)}
        return next((result for lag in sorted(map(int, leads)) if (result := self.with_lag(lag)) is not None), None)

    def with_lag(self, lag: int) -> Body | None:
        """Return one loop if the first part runs ``lag`` tiles ahead of the second one."""
        heads, tails = self.loops(self.before, lag, -lag), self.loops(self.after, lag, self.count)
        early, late = ([n for _, numbers in loops for n in numbers] for loops in (heads, tails))
        if not early or not late or sorted([*early, *late]) != list(range(len(self.loop.body))):
            return None
        if early != sorted(early) or late != sorted(late):
            return None
        begin = self.passed(self.before, [s for s, _ in heads])
        end = self.passed(self.after[::-1], [s for s, _ in tails])
        by = {self.loop.variable: Applied("-", (Variable(self.loop.variable), Literal(lag)))}
        moved = changed(self.loop.body, lambda e: substituted(e, by))
        of_tile = changed((moved[n] if n in early else s for n, s in enumerate(self.loop.body)), _reduced)
        if begin is None or end is None or not self.keeps_values(of_tile, heads, tails, lag):
            return None
        body = tuple(of_tile[n] for n in (*early, *late))
        return (*begin, replace(self.loop, high=Literal(self.count + lag), body=body), *end[::-1])

    def loops(self, statements: Body, lag: int, shift: int) -> Loops:
        """Return the loops of ``lag`` iterations whose statements are those of the main loop, ``shift`` iterations
        later, each with the numbers of these statements.
        """
        wanted = {_form(s, self.loop.variable, shift): n for n, s in enumerate(self.loop.body)}
        result: Loops = []
        for s in statements:
            if isinstance(s, SerialLoop) and (s.low, s.high) == (_ZERO, Literal(lag)):
                numbers = [wanted.get(_form(x, s.variable, 0)) for x in s.body]
                known = [n for n in numbers if n is not None]
                result += [(s, known)] if len(known) == len(numbers) else []
        return result

    def passed(self, statements: Body, loops: Sequence[SerialLoop]) -> Body | None:
        """Return the other statements, in order from the outside; None if a statement accesses elements that a loop
        further outside accesses.
        """
        seen, others = set[TileBuffer](), list[Statement]()
        for s in statements:
            own = {x.buffer for x in accesses([s])}
            if any(s is x for x in loops):
                seen |= own
            elif seen & own:
                return None
            else:
                others.append(s)
        return tuple(others)

    def keeps_values(self, of_tile: Sequence[Statement], heads: Loops, tails: Loops, lag: int) -> bool:
        """Return whether statements whose order changes access different elements; ``of_tile``: the main loop's
        statements for the tile with the loop's number.

        A statement of the first part then follows the second part of up to ``lag`` earlier tiles; a statement of a loop
        before or after the main loop follows the statements of later loops for earlier tiles.
        """
        parts = [[n for _, numbers in loops for n in numbers] for loops in (heads, tails)]
        pairs = list(product(*parts))
        for loops in (heads, tails):
            for (_, earlier), (_, later) in combinations(loops, 2):
                pairs += product(earlier, later)
        used = [list(accesses([s])) for s in of_tile]
        for one, other in pairs:
            common = {x.buffer for x in used[one]} & {x.buffer for x in used[other]}
            for buffer in common:
                own = [x for x in (*used[one], *used[other]) if x.buffer is buffer]
                is_apart = not any(x.is_write for x in own) or _is_apart(own, self.loop.variable, lag)
                if not is_apart and not self.is_local(buffer, parts, [*heads, *tails]):
                    return False
        return True

    def is_local(self, buffer: TileBuffer, parts: Sequence[Sequence[int]], loops: Loops) -> bool:
        """Return whether each part of each iteration writes a tile before it reads it, and whether no other statement
        reads it.
        """
        of_loops = [*(s for s, _ in loops), self.loop]
        count = sum(x.buffer is buffer for s in of_loops for x in accesses(s.body))
        is_exposed = any(buffer in Exposed(s.body).reads for s in of_loops)
        for part in parts:
            is_exposed |= buffer in Exposed([self.loop.body[n] for n in part]).reads
            at = [s for s, numbers in loops if set(numbers) <= set(part)]
            if sum(any(x.buffer is buffer for x in accesses(s.body)) for s in at) > 1:
                return False
        if buffer.is_global or is_exposed or count != self.uses[buffer]:
            return False
        writer: bool | None = None
        for n, s in enumerate(self.loop.body):
            own, is_first = [x for x in accesses([s]) if x.buffer is buffer], n in parts[0]
            is_read = any(not x.is_write for x in own) or _adds(s)
            if own and is_read and writer is not is_first:
                return False
            writer = is_first if any(x.is_write for x in own) else writer
        return True


def _is_apart(own: Sequence[Access], variable: str, lag: int) -> bool:
    """Return whether accesses of a buffer for two tiles, at most ``lag`` apart, have no element in common."""
    for axis in range(len(own[0].indices)):
        places = {_canonical(x.indices[axis]) for x in own}
        if len(places) == 1 and not any(x.moves(axis) for x in own) and _moves(own[0].indices[axis], variable, lag):
            return True
    return False


def _moves(index: Expression, variable: str, lag: int) -> bool:
    """Return whether an index differs for each of the next ``lag`` numbers of a loop."""
    number, by = _remainder(index) or (index, 0)
    terms = linear(number, {})
    step = terms.pop(Variable(variable), 0)
    if variable in variables_of(terms) or any(map(_has_elements, terms)):
        return False
    return all((step * n) % by if by else step * n for n in range(1, lag + 1))


# ---------------------------------------------------------------- forms of statements

_TILE = Variable("#tile")


def _form(s: Statement, variable: str, shift: int, tile: Expression = _TILE) -> object:
    """Return the form of a statement for a tile, if the variable of the statement's loop is the tile's number plus
    ``shift``.
    """
    later = Applied("+", (tile, Literal(shift)))
    (s,) = changed([s], lambda e: substituted(e, {variable: later}))
    if isinstance(s, MatrixProduct):
        return "product", *map(_part, (s.a, s.b, s.c)), s.transposes, _value(s.clears)
    if isinstance(s, TileReduction):
        return "reduction", _part(s.source), _part(s.target), s.word, s.axis, s.clears, s.cumulates
    if not isinstance(s, ParallelNest):
        return s
    result = list[object]()
    for x in s.body:
        if not isinstance(x, Elementwise):
            return s
        names: dict[str, Expression] = {name: Variable(f"#{i}") for i, (name, _) in enumerate(x.axes)}
        at, value = ([substituted(e, names) for e in own] for own in (x.indices, (x.value,)))
        rule = None if x.condition is None else _value(substituted(x.condition, names))
        lengths = tuple(n for _, n in x.axes)
        result.append((lengths, x.buffer, tuple(map(_canonical, at)), _value(value[0]), rule, x.is_added))
    return "nest", tuple(result)


def _part(x: BufferPart) -> object:
    return x.buffer, tuple(map(_canonical, x.start)), x.extent


def _value(e: Expression) -> object:
    """Return the form of a value; its additions keep their order."""
    if isinstance(e, BufferElement):
        return e.buffer, tuple(map(_canonical, e.indices))
    return (e.word, e.fmt, tuple(map(_value, e.operands))) if isinstance(e, Applied) else e
