"""Trees of additions: derived from the weights that large terms hide, enumerated, reduced to one step, and described in
words.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats.mma_tree import C, Tree, leaf_count, leaves_of, tree_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from npusim.formats.cast import Array

#: Numbers of chains that may be independent, and numbers of successive k in one chain.
CHAIN_COUNTS, RUNS = (2, 4, 8, 16, 32), (1, 2, 4, 8, 16)


def swallowing_tree(leaves: list[int], lost: Array, weights: list[int]) -> Tree:
    """Return the tree in which each node with M loses its other terms; raise `ValueError` if there is no such tree.

    ``lost`` (leaves, leaves): the loss of a sum with M and -M at two leaves, which is the weight of the node that adds
    these leaves.
    """
    if len(leaves) == 1:
        return leaves[0]
    total, left, groups = sum(weights[k] for k in leaves), list(leaves), []
    while left:
        group, waiting = [], [left.pop(0)]
        while waiting:
            x = waiting.pop()
            group.append(x)
            waiting += [y for y in left if lost[x, y] < total]
            left = [y for y in left if y not in waiting]
        groups.append(sorted(group))
    if len(groups) == 1:
        raise ValueError("no tree")
    return tuple(swallowing_tree(g, lost, weights) for g in groups)


def exact_tree(leaves: list[int], lost: Array, weights: list[int]) -> Tree:
    """Return the tree of nodes that add exactly; raise `ValueError` if there is no such tree.

    ``lost``, as above, is the loss by earlier roundings: it is the sum of the two subtrees of the leaves before they
    are added.  The tree is built from the leaves up: leaves that are added to one another, and that have equal losses
    with all others, are one node.
    """
    items: list[Tree] = list(leaves)
    members = {x: leaves_of(x) for x in items}
    weight = {x: weights[k] for x, (k,) in members.items()}

    def is_beside(x: Tree, y: Tree) -> bool:
        first, second, sum_of_both = members[x], members[y], weight[x] + weight[y]
        return lost[first[0], second[0]] == sum_of_both and bool((lost[np.ix_(first, second)] == sum_of_both).all())

    while len(items) > 1:
        beside = {x: {y: None for y in items if y is not x and is_beside(x, y)} for x in items}
        for x in items:
            clique = [x]
            for y in beside[x]:
                if all(y in beside[z] for z in clique):
                    clique.append(y)
            inside = [k for z in clique for k in members[z]]
            outside = [k for k in leaves if k not in inside]
            if len(clique) > 1 and (lost[np.ix_(inside, outside)] == lost[inside[0], outside]).all():
                tree = normal(tuple(clique))
                members[tree], weight[tree] = inside, sum(weight[z] for z in clique)
                items = [z for z in items if z not in clique] + [tree]
                break
        else:
            raise ValueError("no tree")
    return items[0]


# ---------------------------------------------------------------- trees of trees


def nodes(tree: Tree) -> Iterator[tuple[Any, ...]]:
    """Yield all nodes of a tree, the outermost first."""
    if not isinstance(tree, int):
        yield tree
        for part in tree:
            yield from nodes(part)


def has_sums(tree: Tree) -> bool:
    """Whether some node adds only sums and no product."""
    return any(all(p == C or not isinstance(p, int) for p in node) for node in nodes(tree))


def normal(tree: Tree) -> Tree:
    """Return a tree with its parts in order: subtrees and c first, then ascending k."""
    if isinstance(tree, int):
        return tree
    return tuple(sorted(map(normal, tree), key=lambda p: (isinstance(p, int) and p != C, min(leaves_of(p)))))


def bare(tree: Tree) -> Tree:
    """Return a tree without nodes of one product."""
    if isinstance(tree, int):
        return tree
    return bare(tree[0]) if len(tree) == 1 else tuple(map(bare, tree))


def first_rounded(tree: Tree) -> Tree:
    """Return a tree in which the first of two products that are added is rounded first: a chain that starts with a
    product.
    """
    if isinstance(tree, int):
        return tree
    if len(tree) == 2 and all(isinstance(part, int) and part != C for part in tree):
        return ((tree[0],), tree[1])
    return tuple(map(first_rounded, tree))


def with_leaves(tree: Tree, of: Callable[[int], Tree | None]) -> Any:
    """Return a tree with each leaf replaced; None removes a part, and a node with a single remaining part becomes that
    part.
    """
    if isinstance(tree, int):
        return of(tree)
    parts = [part for part in (with_leaves(p, of) for p in tree) if part is not None]
    return (parts[0] if len(parts) == 1 < len(tree) else tuple(parts)) if parts else None


def products_of(tree: Tree) -> Any:
    """Return a tree without c."""
    return with_leaves(tree, lambda n: None if n == C else n)


def repeated(step: Tree, depth: int, start: Tree | None = C) -> Any:
    """Return chained steps: each step uses the result of the previous one as its c; ``start``: the c of the
    first step.
    """
    tree, size = start, leaf_count(step)
    for k in range(0, depth, size):
        tree = with_leaves(step, lambda n, k=k, before=tree: before if n == C else n + k)  # type: ignore[misc]
    return tree


def step_of(tree: Tree) -> Tree | None:
    """Return the smallest step whose repetition is this tree, including C; None if there is no such step."""
    depth, subtrees = leaf_count(tree), {frozenset(leaves_of(t)): t for t in nodes(tree)} | {frozenset({0}): 0}
    start, size = C if C in leaves_of(tree) else None, 1
    while size < depth:
        first, second = (subtrees.get(frozenset(range(0 if start is None else C, size * n))) for n in (1, 2))
        if start is None and first is not None and second is not None:
            first = _shifted(second, first, size)
        if first is not None and normal(repeated(first, depth, start)) == normal(tree):
            return normal(first)
        size *= 2
    return None if start is None else normal(tree)


def _shifted(tree: Tree, inner: Tree, size: int) -> Tree:
    """Return a tree with a subtree as C, and with its other leaves renumbered."""
    if tree == inner:
        return C
    return tree - size if isinstance(tree, int) else tuple(_shifted(part, inner, size) for part in tree)


# ---------------------------------------------------------------- known kinds of trees


def chain(leaves: Sequence[int], step: int, start: Tree | None = C) -> Any:
    """Return steps that each continue the previous one; the first step continues c, or (``start`` None) begins with its
    own products.
    """
    tree: Any = start
    for at in range(0, len(leaves), step):
        tree = (*(() if tree is None else (tree,)), *leaves[at : at + step])
    return tree


def _sequential(parts: list[Tree]) -> Tree:
    tree = parts[0]
    for part in parts[1:]:
        tree = (tree, part)
    return tree


def _pairs(parts: list[Tree], *, in_halves: bool = False) -> Tree:
    """Add neighbours, then the sums of neighbours; or add the first half to the second."""
    while len(parts) > 1:
        half = len(parts) // 2
        firsts, seconds = (parts[:half], parts[half:]) if in_halves else (parts[::2], parts[1::2])
        parts = list(zip(firsts, seconds, strict=True))
    return parts[0]


COMBINED: Mapping[str, Callable[[list[Tree]], Tree]] = MappingProxyType(
    {
        "one after the other": _sequential,
        "in pairs": _pairs,
        "in halves": partial(_pairs, in_halves=True),
        "at once": tuple,
    }
)


def chains(depth: int, count: int, run: int, step: int, how: str) -> Tree:
    """Return the tree of independent chains: consecutive k are assigned to the chains in turn, each addition has
    ``step`` products, and the chains are added at the end.
    """
    lanes = [[k for k in range(depth) if k // run % count == lane] for lane in range(count)]
    return COMBINED[how]([chain(lane, step, None) for lane in lanes])


def all_chains(depth: int) -> Iterator[tuple[int, int, int, str]]:
    """Yield the arguments of `chains` of a depth: counts, runs, steps, and how the chains are added."""
    for step, count, how in product(reversed(RUNS), CHAIN_COUNTS, COMBINED):
        for run in (*RUNS, depth // count):
            if count * run <= depth and step <= depth // count:
                yield count, run, step, how


def steps(depth: int) -> Iterator[Tree]:
    """Yield chains of steps of a power of two, ascending, descending or strided, with c in the first or last step."""
    for size in (1 << n for n in range(depth.bit_length()) if 1 << n <= depth):
        yield repeated((C, tuple(range(size))), depth)
        orders = [list(range(depth)), [k for at in range(depth - size, -1, -size) for k in range(at, at + size)]]
        lanes = depth // size
        runs = (run for run in RUNS if run < size < depth)
        orders += (sorted(range(depth), key=lambda k, run=run: k // run % lanes) for run in runs)  # type: ignore[misc]
        for order in orders:
            yield chain(order, size)
            yield (C, chain(order, size, None))


def families(depth: int) -> Iterator[Tree]:
    """Yield trees that units are known or likely to have, including c; shallow trees come first."""
    yield from steps(depth)
    for how, part, n in product(("in pairs", "in halves"), RUNS, range(depth.bit_length())):
        if part < 1 << n <= depth:
            leaves: list[Tree] = [at if part == 1 else tuple(range(at, at + part)) for at in range(0, 1 << n, part)]
            yield repeated((C, COMBINED[how](leaves)), depth)
    for lanes in all_chains(depth):
        yield (C, chains(depth, *lanes))


def as_chains(tree: Tree) -> tuple[int, int, int, str] | None:
    """Return the arguments of `chains` that give a tree; None if no arguments give this tree."""
    depth, wanted = leaf_count(tree), normal(bare(tree))
    return next((x for x in all_chains(depth) if normal(bare(chains(depth, *x))) == wanted), None)


def in_words(tree: Tree) -> str:
    """Return a tree in words: consecutive steps, independent chains, or its text."""
    if isinstance(tree, int):
        return tree_text(tree)
    step, depth = step_of(tree), leaf_count(tree)
    if step is not None and (size := leaf_count(step)) < max(depth, 2):
        if step == normal((C, *range(size))):
            return f"steps of {size}, ascending k, c in the first" if size > 1 else "a chain, ascending k, c first"
        if step == normal((C, tuple(range(size)))):
            return f"steps of {size}, ascending k, each summed and then added to c"
        return f"steps of {size}: {tree_text(step)}"
    if normal(tree) == normal((C, *range(depth))):
        return "all at once, c among them"
    if len(tree) == 2 and C in tree:
        return f"{in_words(tree[tree[0] == C]).replace(', c in the first', '')}; c added last"
    if found := as_chains(tree):
        count, run, size, how = found
        of = f"runs of {run} k in turn" if run * count < depth else f"{run} k"
        each = "" if size == 1 else f", {size} products per addition"
        return f"{count} chains of {of if run > 1 else f'k = i, i + {count}, ...'}{each}, added {how}"
    return tree_text(tree)


def continued(step: Tree, depth: int) -> dict[str, Tree]:
    """Return, by description, the trees of ``depth`` products that a unit with this step, or its library, may form."""
    size, inner, trees = leaf_count(step), products_of(step), dict[str, Tree]()
    if C in leaves_of(step):
        trees[f"the same steps of {size}, one after the other"] = repeated(step, depth)
        if size > 1 and (after := step_of(inner)) is not None:
            trees["all products, then c"] = (C, repeated(after, depth, None))
    else:
        trees[f"sums of {size} products, added one after the other"] = repeated((C, step), depth)
    if lanes := as_chains(inner):
        count, run, each, how = lanes
        trees[f"{count} chains go on"] = chains(depth, count, run if run * count < size else depth // count, each, how)
    for parts, how in product((2, 4, 8), ("one after the other", "in pairs")):
        part = depth // parts
        if part % size == 0:
            one = repeated(step, part, None)
            cut = [with_leaves(one, lambda n, by=at * part: n + by) for at in range(parts)]  # type: ignore[misc]
            trees[f"K is cut into {parts} parts, added {how}: by a library, or the unit?"] = COMBINED[how](cut)
    return trees
