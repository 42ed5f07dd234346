"""Trees of additions: read off the weights that large terms swallow, brought to one step of a unit, and in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats.mma_tree import C, Tree, leaf_count, leaves_of, tree_text

if TYPE_CHECKING:
    from npusim.formats.cast import Array

#: Chains that may stand beside one another, and runs of k that go to one chain.
CHAIN_COUNTS, RUNS = (2, 4, 8, 16, 32), (1, 2, 4, 8, 16)
Node = tuple[Any, ...]


def swallowing_tree(leaves: list[int], lost: Array, weights: list[int]) -> Tree:
    """Return the tree where all that meets M within a node is lost; raise `ValueError` where there is none.

    ``lost`` (leaves, leaves): what the sum lacks with M and -M at two leaves: the weight of the node where they meet.
    """
    if len(leaves) == 1:
        return leaves[0]
    total, left, groups = sum(weights[k] for k in leaves), list(leaves), []
    while left:
        group, waiting = [], [left.pop(0)]
        while waiting:
            x = waiting.pop()
            group.append(x)
            near = [y for y in left if lost[x, y] < total]
            left = [y for y in left if y not in near]
            waiting += near
        groups.append(sorted(group))
    if len(groups) == 1:
        raise ValueError("no tree")
    return tuple(swallowing_tree(g, lost, weights) for g in groups)


def exact_tree(leaves: list[int], lost: Array, weights: list[int]) -> Tree:
    """Return the tree of nodes that add exactly; raise `ValueError` where there is none.

    ``lost``, as above, is what earlier roundings swallowed: the sum of the two subtrees in which the leaves are when
    they meet.  Built from the leaves up: those that meet one another, and all others alike, are one node.
    """
    items: list[Any] = list(leaves)
    weight: dict[Any, int] = {k: weights[k] for k in leaves}
    members: dict[Any, list[int]] = {k: [k] for k in leaves}
    while len(items) > 1:
        beside = {
            x: [y for y in items if y is not x and _meet(lost, members[x], members[y], weight[x] + weight[y])]
            for x in items
        }
        found = None
        for x in items:
            clique = [x]
            for y in beside[x]:
                if all(y in beside[z] for z in clique):
                    clique.append(y)
            inside = [k for z in clique for k in members[z]]
            outside = [k for k in leaves if k not in inside]
            if len(clique) > 1 and (not outside or np.all(lost[np.ix_(inside, outside)] == lost[inside[0], outside])):
                found = clique
                break
        if found is None:
            raise ValueError("no tree")
        whole = tuple(sorted(found, key=lambda node: min(members[node])))
        members[whole] = sorted(k for z in found for k in members[z])
        weight[whole] = sum(weight[z] for z in found)
        items = [z for z in items if z not in found] + [whole]
    return items[0]  # type: ignore[no-any-return]


def _meet(lost: Array, first: list[int], second: list[int], weight: int) -> bool:
    return lost[first[0], second[0]] == weight and bool(np.all(lost[np.ix_(first, second)] == weight))


# ---------------------------------------------------------------- one step of a unit


def normal(tree: Tree) -> Tree:
    """Return a tree with its parts in order: subtrees and c first, then ascending k."""
    if isinstance(tree, int):
        return tree
    parts = [normal(part) for part in tree]
    return tuple(sorted(parts, key=lambda p: (isinstance(p, int) and p != C, min(leaves_of(p)))))


def bare(tree: Tree) -> Tree:
    """Return a tree without nodes of one product."""
    if isinstance(tree, int):
        return tree
    return bare(tree[0]) if len(tree) == 1 else tuple(map(bare, tree))


def with_leaves(tree: Tree, of: Callable[[int], Tree | None]) -> Tree | None:
    """Return a tree with each leaf replaced; None takes one away, and a node that has one part left is that part."""
    if isinstance(tree, int):
        return of(tree)
    parts = [part for part in (with_leaves(p, of) for p in tree) if part is not None]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 < len(tree) else tuple(parts)


def repeated(step: Tree, depth: int, start: Tree | None = C) -> Tree:
    """Return chained steps: each takes the result of the one before as its c; ``start``: the first one's c."""
    size, whole = leaf_count(step), start
    for k in range(0, depth, size):
        before = whole

        def leaf(n: int, k: int = k, before: Tree | None = before) -> Tree | None:
            return before if n == C else n + k

        whole = with_leaves(step, leaf)
    assert whole is not None
    return whole


def step_of(tree: Tree) -> Tree | None:
    """Return the smallest step that, repeated, is this tree, C in it; None where there is none."""
    depth, has_c, subtrees = leaf_count(tree), C in leaves_of(tree), {frozenset(leaves_of(t)): t for t in _nodes(tree)}
    start, size = {C} if has_c else set(), 1
    while size < depth:
        first, second = (frozenset({*start, *range(size * n)}) for n in (1, 2))
        if has_c:
            step = subtrees.get(first)
        elif first in subtrees and second in subtrees:
            inner = subtrees[first]
            step = _shifted(subtrees[second], inner, size)
        else:
            step = None
        if step is not None and normal(repeated(step, depth, C if has_c else None)) == normal(tree):
            return normal(step)
        size *= 2
    return normal(tree) if has_c else None


def _nodes(tree: Tree) -> Iterator[Tree]:
    yield tree
    for part in () if isinstance(tree, int) else tree:
        yield from _nodes(part)


def _shifted(tree: Tree, inner: Tree, size: int) -> Tree:
    """Return a tree with a subtree, or what of it lies flat in a node, as C, and its other leaves moved down."""
    if tree == inner:
        return C
    return tree - size if isinstance(tree, int) else tuple(_shifted(part, inner, size) for part in tree)


# ---------------------------------------------------------------- chains beside one another


def _chain(leaves: list[int], step: int) -> Tree:
    """Return steps that go on from the first one's products; a first one of a single product rounds it."""
    tree: Node = ()
    for at in range(0, len(leaves), step):
        tree = (*((tree,) if tree else ()), *leaves[at : at + step])
    return tree


def _sequential(parts: list[Tree]) -> Tree:
    whole = parts[0]
    for part in parts[1:]:
        whole = (whole, part)
    return whole


def _pairs(parts: list[Tree], apart: int = 1) -> Tree:
    """Add neighbours, then neighbours' sums; with ``apart`` 0 the first half to the second."""
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [(parts[i], parts[i + half]) if not apart else (parts[2 * i], parts[2 * i + 1]) for i in range(half)]
    return parts[0]


COMBINED: Mapping[str, Callable[[list[Tree]], Tree]] = MappingProxyType(
    {"one after the other": _sequential, "in pairs": _pairs, "in halves": partial(_pairs, apart=0), "at once": tuple}
)


def chains(depth: int, count: int, run: int, step: int, how: str) -> Tree:
    """Return chains beside one another, each of runs of k in turn, ``step`` products an addition, added at the end."""
    lanes = [[k for k in range(depth) if k // run % count == lane] for lane in range(count)]
    return COMBINED[how]([_chain(lane, step) for lane in lanes])


def families(depth: int) -> Iterator[Tree]:
    """Yield trees that units are known or likely to have, c in them: the shallow ones first."""
    sizes = [1 << n for n in range(depth.bit_length()) if 1 << n <= depth]
    for size in sizes:
        yield repeated((C, *range(size)), depth)
        yield repeated((C, tuple(range(size))), depth)
        yield (C, _chain(list(range(depth)), size))
        yield _chain_from([k for at in range(depth - size, -1, -size) for k in range(at, at + size)], size)
        for run in RUNS:
            if run < size < depth:
                count = depth // size
                yield _chain_from([k for lane in range(count) for k in range(depth) if k // run % count == lane], size)
        for how, part in product(("in pairs", "in halves"), RUNS):
            if part < size:
                leaves: list[Tree] = [_flat(range(at, at + part)) for at in range(0, size, part)]
                yield repeated((C, COMBINED[how](leaves)), depth)
    for step, count, how in product(reversed(RUNS), CHAIN_COUNTS, COMBINED):
        for run in (*RUNS, depth // count):
            if count * run <= depth and step <= depth // count:
                yield (C, chains(depth, count, run, step, how))


def _flat(leaves: range) -> Tree:
    return leaves[0] if len(leaves) == 1 else tuple(leaves)


def _chain_from(leaves: list[int], step: int) -> Tree:
    tree: Tree = C
    for at in range(0, len(leaves), step):
        tree = (tree, *leaves[at : at + step])
    return tree


def as_chains(tree: Tree) -> tuple[int, int, int, str] | None:
    """Return the count, run, step and way of `chains` that are a tree; None where none are."""
    depth, wanted = leaf_count(tree), normal(bare(tree))
    for count, how, step in product(CHAIN_COUNTS, COMBINED, RUNS):
        for run in (*RUNS, depth // count):
            if (
                count * run <= depth >= 2 * count
                and step <= depth // count
                and normal(bare(chains(depth, count, run, step, how))) == wanted
            ):
                return count, run, step, how
    return None


def in_words(tree: Tree) -> str:
    """Return a tree in words: steps that go on, chains beside one another, or its text."""
    step = step_of(tree)
    if isinstance(tree, int):
        return tree_text(tree)
    if step is not None and leaf_count(step) < max(leaf_count(tree), 2):
        size = leaf_count(step)
        if normal(step) == normal((C, *range(size))):
            return f"steps of {size}, ascending k, c in the first" if size > 1 else "a chain, ascending k, c first"
        if normal(step) == normal((C, tuple(range(size)))):
            return f"steps of {size}, ascending k, each summed and then added to c"
        return f"steps of {size}: {tree_text(step)}"
    if normal(tree) == normal((C, *range(leaf_count(tree)))):
        return "all at once, c among them"
    if len(tree) == 2 and C in tree:
        return f"{in_words(tree[1] if tree[0] == C else tree[0]).replace(', c in the first', '')}; c added last"
    if found := as_chains(tree):
        count, run, size, how = found
        of = (
            f"k = i, i + {count}, ..."
            if run == 1
            else f"runs of {run} k in turn"
            if run * count < leaf_count(tree)
            else f"{run} k"
        )
        each = "" if size == 1 else f", {size} products an addition"
        return f"{count} chains of {of}{each}, added {how}"
    return tree_text(tree)


def products_of(tree: Tree) -> Tree:
    """Return a tree without c."""
    rest = with_leaves(tree, lambda n: None if n == C else n)
    assert rest is not None
    return rest


def continued(step: Tree, depth: int) -> dict[str, Tree]:
    """Return by words the trees of ``depth`` products that a unit of this step, or a library with it, may form."""
    size, bare_step, found = leaf_count(step), products_of(step), dict[str, Tree]()
    if C in leaves_of(step):
        found[f"steps of {size} go on"] = repeated(step, depth)
        inner = step_of(bare_step)
        if size > 1 and inner is not None:
            found["all products, then c"] = (C, repeated(inner, depth, None))
    else:
        found[f"products of {size} go on one after the other"] = repeated((C, step), depth)
    if lanes := as_chains(bare_step):
        count, run, each, how = lanes
        found[f"{count} chains go on"] = chains(depth, count, run if run * count < size else depth // count, each, how)
    for parts, how in product((2, 4, 8), ("one after the other", "in pairs")):
        part = depth // parts
        if part % size == 0:
            one = repeated(step, part, None)
            cut = [_moved(one, at * part) for at in range(parts)]
            found[f"K is cut into {parts} parts, added {how}: by a library, or the unit?"] = COMBINED[how](cut)
    return found


def _moved(tree: Tree, by: int) -> Tree:
    return tree + by if isinstance(tree, int) else tuple(_moved(part, by) for part in tree)
