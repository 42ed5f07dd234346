"""Masks of a launch on plain tensors: the elements, by their indices in tensors, that comparisons of rows and keys do
not hide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.errors import ProgramError, TilingError
from npusim.kernels.attention.tiling_mask import ByIndices, MaskKind, TilingMask
from npusim.kernels.triton.element_wise import elements_in
from npusim.kernels.triton.ttir_text import Op
from npusim.kernels.triton.values import MOST_ELEMENTS, RELATIONS, Booleans, Condition, Elements, Integers

if TYPE_CHECKING:
    from npusim.kernels.triton.kernel_draft import Walk
    from npusim.kernels.triton.launch_phases import LaunchGrid


#: A comparison with 0 of ``base + a row + b key``: relation, base, a, b.
Rule = tuple[str, int, int, int]


class JoinedRules(NamedTuple):
    """Comparisons that are all true, and groups of comparisons in each of which at least one is true."""

    of: tuple[Rule, ...]
    either: tuple[tuple[JoinedRules, ...], ...] = ()

    @property
    def every(self) -> tuple[Rule, ...]:
        """All comparisons."""
        return (*self.of, *(rule for group in self.either for rules in group for rule in rules.every))


@dataclass(frozen=True, slots=True)
class RuleMask(ByIndices):
    """A mask that consists of comparisons; ``rules``: the comparisons for each kind of program, by ``offset`` of the
    program's block.
    """

    rules: tuple[JoinedRules, ...]
    is_loaded: bool = True
    shows_key_0 = False  #: whether every query sees key 0: not examined

    def part(self, batch: int, head: int, rows: slice, cols: slice) -> Any:
        """Return a part of the matrix, int8."""
        at, k = np.arange(rows.start, rows.stop)[:, None], np.arange(cols.start, cols.stop)[None]
        kept = np.ones((at.size, k.size), np.int8)
        for kind in np.unique(at // self.rows):
            here = (at // self.rows == kind)[:, 0]
            kept[here] = holds(self.rules[kind], at[here] % self.rows, k)
        return kept

    @property
    def index_work(self) -> tuple[int, int]:
        """Number of comparisons of indices that decide whether a key is visible, and number of the operands that they
        read.
        """
        return len(self.rules[0].every), 0


@dataclass(frozen=True, slots=True)
class ElementMask(ByIndices):
    """A mask that depends on integers that are not linear; ``table``: a byte for each row and key, one kind of program
    after another.


    ``work``: number of operations on indices for each element.
    """

    table: bytes
    work: int
    is_loaded: bool = True
    shows_key_0 = False  #: whether every query sees key 0: not examined

    def part(self, batch: int, head: int, rows: slice, cols: slice) -> Any:
        """Return a part of the matrix, int8."""
        return np.frombuffer(self.table, np.int8).reshape(-1, self.cols)[rows, cols]

    @property
    def index_work(self) -> tuple[int, int]:
        """Number of operations on indices that decide whether a key is visible, and number of the operands that they
        read.
        """
        return self.work, 0


def holds(rules: JoinedRules, rows: Any, keys: Any) -> Any:
    """Return where at least one comparison of each group is true, for rows and keys."""
    held = [RELATIONS[r](base + a * rows + b * keys, 0) for r, base, a, b in rules.of]
    held += [np.logical_or.reduce([holds(each, rows, keys) for each in group]) for group in rules.either]
    return np.logical_and.reduce(held)


def mask_of_plain(
    grid: LaunchGrid, kind: MaskKind | None
) -> tuple[TilingMask | RuleMask | ElementMask, list[int | None]]:
    """Return the mask of a launch on plain tensors, and the kind of each program.

    Raises `ProgramError` if the diagonal moves between tiles of a program, or if numbers other than -inf hide a row
    completely.
    """
    assert grid.walk is not None
    rules_of = _rules_of_all(grid)
    if rules_of is None:
        return _mask_of_elements(grid, kind)
    if grid.reader.hides_by_numbers:
        _check_rows(grid, rules_of)
    if (
        _form(rules_of[0]) in (((("sge", 1, -1),), ()), ((("sgt", 1, -1),), ()))
        and kind in (None, "cut")
        and not grid.number
        and "key" in grid.sizes
    ):
        mask = TilingMask()
        try:
            mask.check(grid.sizes["row"], grid.sizes["key"])
        except TilingError:
            if kind:
                raise
        else:
            return mask, [base - (r == "sgt") for ((r, base, *_),), _ in rules_of]
    starts, counts = grid.walk
    kinds, rows = tuple(dict.fromkeys(rules_of)), grid.out.shape[-2]
    keys = int(np.where(grid.is_visited, starts + counts, 0).max())
    numbers = {rules: i for i, rules in enumerate(kinds)}
    result = RuleMask(_name(grid), "int8", 1, len(kinds) - 1, rows, keys, (rows,), kinds, kind != "computed")
    return result, [numbers[rules] for rules in rules_of]


def _name(grid: LaunchGrid) -> str:
    return f"mask_{grid.number}" if grid.number else "mask"


def _rules_of_all(grid: LaunchGrid) -> list[JoinedRules] | None:
    """Return the mask of all loops in each program; None if only elements state it, or if the masks of loops differ.

    If a program has no tile of a loop, its mask is that of the loop whose tiles it has.
    """
    listed, result = list[list[JoinedRules]](), dict[int, JoinedRules]()
    for walk, here in _tiles_of_loops(grid):
        if walk.mask is None:
            continue
        if isinstance(walk.mask, Elements) or _moves(grid, walk.mask, here):
            return None
        listed.append(_rules_of(grid, walk.mask, here))
        for i in np.flatnonzero(grid.is_visited[:, here].any(1)).tolist():
            if result.setdefault(i, listed[-1][i]) != listed[-1][i]:
                return None
    if len({_form(rules) for each in listed for rules in each}) > 1:
        return None
    return [result.get(i, rules) for i, rules in enumerate(listed[0])]


def _tiles_of_loops(grid: LaunchGrid) -> Iterator[tuple[Walk, slice]]:
    """Yield each loop with its tiles among those of the launch; loops with separate statements each visit all tiles."""
    at = 0
    for walk in grid.reader.walks:
        yield walk, slice(at, at + walk.most)
        at += 0 if grid.reader.choices.is_apart else walk.most


def _mask_of_elements(grid: LaunchGrid, kind: MaskKind | None) -> tuple[ElementMask, list[int | None]]:
    """Return the mask of a loop, given by its elements, and the kind of each program.

    Programs that store the same rows and whose tables differ are of different kinds.
    """
    line = grid.stored.line
    assert grid.walk is not None
    loop, is_apart = Op("scf.for", [], [], "a mask", "", line), grid.reader.choices.is_apart
    walks = [(w, here) for w, here in _tiles_of_loops(grid) if w.mask is not None or not is_apart]
    masks = [None if w.mask is None else elements_in(loop, w.mask) for w, _ in walks]
    rows, (starts, counts) = grid.out.shape[-2], grid.walk
    keys = int(np.where(grid.is_visited, starts + counts, 0).max())
    count, tables, kinds = len(grid.reader.ids), list[Booleans](), list[int | None]()
    if rows * keys > MOST_ELEMENTS:
        size = f"{rows:,} x {keys:,}"
        raise ProgramError(
            f"{line}: npusim would have to evaluate {size} elements of a mask; allowed: {MOST_ELEMENTS:,}"
        )
    tiles = list[tuple[Booleans | None, int, int]]()
    for (w, within), mask in zip(walks, masks, strict=True):
        each = None if mask is None else np.broadcast_to(mask.values, (count, w.most, *mask.shape)) != 0
        tiles += [(each, i, within.start + i) for i in range(w.most)]
    taken = list[dict[int, bytes]]()
    for i in range(count):
        row, height = int(grid.row[i, 0]), int(grid.rows[i, 0])
        own, known = np.zeros((height, keys), bool), np.zeros(keys, bool)
        for whole, at, j in (tile for tile in tiles if grid.is_visited[i, tile[-1]]):
            here = slice(start := int(starts[i, j]), start + (n := int(counts[i, j])))
            part = np.ones((height, n), bool) if whole is None else whole[i, at, :height, :n]
            if part.shape != own[:, here].shape:
                raise ProgramError(
                    f"{line}: a mask hides elements of a product's factor, but not by row and key; "
                    "mask the factor's load instead"
                )
            if np.any((own[:, here] != part) & known[here]):
                raise ProgramError(f"{line}: two tiles of one program have the same keys and different masks")
            own[:, here], known[here] = part, True
        if grid.reader.hides_by_numbers and known.any() and not own.any(1).all():
            why = (
                f"row {row + int(np.argmin(own.any(1)))} sees no key: the mask replaces all of its scores by a "
                "finite number; use -inf"
            )
            raise ProgramError(f"{line}: {why}")
        content = known.tobytes() + own.tobytes()
        number = next((k for k, t in enumerate(taken) if t.get(row, content) == content), len(taken))
        if number == len(taken):
            taken.append({})
            tables.append(np.zeros((rows, keys), bool))
        taken[number][row] = content
        tables[number][row : row + height] = own
        kinds.append(number)
    fields = (_name(grid), "int8", 1, len(tables) - 1, rows, keys, (rows,))
    work = max(mask.work for mask in masks if mask is not None)
    return ElementMask(*fields, np.stack(tables).astype(np.int8).tobytes(), work, kind != "computed"), kinds


def _moves(grid: LaunchGrid, mask: Condition, here: slice) -> bool:
    """Return whether a comparison of rows and keys differs between the tiles of a program's loop."""
    assert grid.walk is not None
    visited = grid.is_visited[:, here]
    for _, d in mask.every:
        base = np.broadcast_to(d.base - d.steps[0] * grid.row - d.steps[1] * grid.walk[0][:, here], visited.shape)
        if np.any((base != _least(base, visited)[:, None]) & visited):
            return True
    return False


def _least(base: Integers, visited: Booleans) -> Integers:
    """Return the smallest integer of each program's tiles."""
    least: Integers = np.where(visited, base, np.iinfo(np.int64).max).min(1)
    return least


def _rules_of(grid: LaunchGrid, mask: Condition, here: slice) -> list[JoinedRules]:
    """Return a loop's mask in each program, by rows and keys of the tensors."""
    assert grid.walk is not None
    visited, starts, result = grid.is_visited[:, here], grid.walk[0][:, here], list[list[Rule]]()
    for relation, d in mask.of:
        base = np.broadcast_to(d.base - d.steps[0] * grid.row - d.steps[1] * starts, visited.shape)
        bases = np.where(visited.any(1), _least(base, visited), 0)
        result.append([(relation, int(b), d.steps[0], d.steps[1]) for b in bases])
    groups = [[_rules_of(grid, each, here) for each in group] for group in mask.either]
    return [
        JoinedRules(tuple(rule[i] for rule in result), tuple(tuple(each[i] for each in group) for group in groups))
        for i in range(len(grid.reader.ids))
    ]


def _form(rules: JoinedRules) -> Any:
    """Return comparisons without their bases, and the operations that join them."""
    return tuple((r, a, b) for r, _, a, b in rules.of), tuple(tuple(map(_form, group)) for group in rules.either)


def _check_rows(grid: LaunchGrid, rules_of: Sequence[JoinedRules]) -> None:
    """Raise `ProgramError` for a row without a visible key in its tiles: a finite fill value gives no weights of 0."""
    assert grid.walk is not None
    for i, rules in enumerate(rules_of):
        visited = np.flatnonzero(grid.is_visited[i])
        if not len(visited):
            continue
        starts, ends = grid.walk[0][i, visited], (grid.walk[0] + grid.walk[1])[i, visited]
        rows = int(grid.row[i, 0]) + np.arange(int(grid.rows[i, 0]))
        low, high = np.full(rows.shape, starts.min()), np.full(rows.shape, ends.max() - 1)
        if rules.either:
            why = "a mask that joins comparisons by | or ~ replaces scores by a finite number; use -inf"
            raise ProgramError(f"{grid.stored.line}: {why}")
        for relation, base, a, b in rules.of:
            is_strict, is_above = relation[-1] == "t", relation[-2] == "g"
            if not b:  # a condition only on rows
                high = np.where(RELATIONS[relation](base + a * rows, 0), high, low - 1)
                continue
            edge = -(base + a * rows) * b  # the keys with b k + edge above or below 0
            if relation in ("eq", "ne") or abs(b) != 1:
                raise ProgramError(
                    f"{grid.stored.line}: a mask replaces scores by a finite number, but does not compare rows "
                    "with keys"
                )
            if is_above == (b > 0):
                low = np.maximum(low, edge + is_strict)
            else:
                high = np.minimum(high, edge - is_strict)
        if np.any(low > high):
            row = int(rows[np.argmax(low > high)])
            why = f"row {row} sees no key: the mask replaces all of its scores by a finite number; use -inf"
            raise ProgramError(f"{grid.stored.line}: {why}")
