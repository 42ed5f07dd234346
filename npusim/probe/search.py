"""Which units explain random vectors (A, B, C, D) alone, without probes: what survives, and what is excluded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats import ARITHMETICS
from npusim.formats.cast import widen
from npusim.formats.mma_arithmetic import stated_name
from npusim.formats.mma_tree import AdditionTree, C, Tree, chain, compute
from npusim.probe.decide import same
from npusim.probe.trees import in_words, repeated
from npusim.validate.vectors import compare, load_vectors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from npusim.validate.vectors import MmaVectors

#: Outputs that are looked at: first a few, then more of what is left.
LOOKS = (24, 400, 4000)
FRACTIONS = (None, *range(10, 31))
ROUNDINGS = ("toward_zero", "nearest_even", "nearest_away", "odd")
#: Parameters whose values are listed, by what they are called.
LISTED = MappingProxyType(
    {
        "bits kept in a step": "fraction",
        "how the rest is cut": "cut",
        "rounding of a step": "rounding",
        "bits of the result": "kept",
    }
)


@dataclass(frozen=True)
class Survivors:
    """What random vectors leave of a unit: its name explains ``matched`` of ``total`` outputs.

    ``registered`` explain every output, ``excluded`` do not; ``units`` of ``tried`` ones explain those ``looked_at``,
    and ``left`` has by parameter the values among them.
    """

    name: str
    matched: int
    total: int
    registered: tuple[str, ...]
    excluded: tuple[str, ...]
    units: tuple[str, ...]
    tried: int
    looked_at: int
    left: Mapping[str, tuple[str, ...]]


def identify_vectors(path: Path) -> Iterator[Survivors]:
    """Yield for each name of a file of random vectors what survives; raises as `npusim.validate.vectors`."""
    for vectors in load_vectors(path).values():
        yield survivors(vectors)


def survivors(v: MmaVectors) -> Survivors:
    """Return what the vectors of one name leave of its unit, known kinds of trees with any width and rounding."""
    named, unit = compare(v), v.arithmetic
    kind = (unit.a_format, unit.b_format, unit.acc_format)
    alike = [u for u in ARITHMETICS.values() if (u.a_format, u.b_format, u.acc_format) == kind and not u.scale_block]
    explains = {u.name: compare(replace(v, arithmetic=u)) for u in alike if v.a.shape[2] % u.k == 0}
    registered = tuple(name for name, r in explains.items() if r.matched == r.total)
    some = np.random.default_rng(0).permutation(v.d.size)[: LOOKS[-1]]
    case, row, column = np.unravel_index(some, v.d.shape)
    picked = v.a[case, row], v.b[case, :, column], v.c[case, row, column], v.d[case, row, column]
    with np.errstate(invalid="ignore"):  # NaN of any pattern
        a, b, c, d = (np.asarray(widen(np.ascontiguousarray(x)), np.float64) for x in picked)
    if unit.a.name == "tf32":  # the unit ignores the low bits
        a, b = (
            (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
            for x in (a, b)
        )
    alive = list(hypotheses(v.a.shape[2], unit.acc.name))
    tried = len(alive)
    for n in LOOKS:
        alive = [u for u in alive if same(compute(u, (unit.a, unit.b, unit.acc), a[:n], b[:n], c[:n]), d[:n]).all()]
    left: dict[str, tuple[str, ...]] = {"which terms meet": tuple(dict.fromkeys(in_words(u.tree) for u in alive))}
    for words, field in LISTED.items():
        left[words] = tuple(dict.fromkeys("all" if (x := getattr(u, field)) is None else str(x) for u in alive))
    excluded = tuple(name for name in explains if name not in registered)
    units = tuple(stated_name(*kind, u) for u in alive)
    return Survivors(v.name, named.matched, named.total, registered, excluded, units, tried, len(d), left)


def hypotheses(depth: int, acc: str) -> Iterator[AdditionTree]:
    """Yield units of ``depth`` products: steps of a power of two, c in the first or last, or interleaved halves."""
    trees: dict[Tree, None] = {}
    for size in (1 << n for n in range(depth.bit_length()) if 1 << n <= depth):
        trees |= {
            chain(depth, size): None,
            chain(depth, size, is_late=True): None,
            repeated((C, tuple(range(size))), depth): None,
        }
    for run in (1, 2, 4):
        halves = [tuple(k for k in range(depth) if k // run % 2 == half) for half in (0, 1)]
        if all(halves) and 2 * run < depth:
            trees |= {((C, *halves[0]), *halves[1]): None, (C, (halves[0], *halves[1])): None, (C, *halves): None}
    kept: tuple[Any, ...] = (None, 13) if acc == "float32" else (None,)
    for tree, fraction, rounding, bits in product(trees, FRACTIONS, ROUNDINGS, kept):
        if fraction is None:
            yield AdditionTree(tree, None, rounding=rounding, kept=bits)
            continue
        for cut, lowest in product(
            ("toward_zero", "floor", "nearest_even"), (None, -(fraction + 108) if acc == "float32" else 4 - fraction)
        ):
            yield AdditionTree(tree, fraction, cut, rounding=rounding, kept=bits, lowest=lowest)
