"""Units that explain random vectors (A, B, C, D) without probes: the remaining units and the excluded ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from npusim.formats import ARITHMETICS
from npusim.formats.cast import widen
from npusim.formats.mma_arithmetic import stated_name
from npusim.formats.mma_tree import AdditionTree, compute, operand_of
from npusim.studies.probe.decide import ROUNDINGS, same, widths
from npusim.studies.probe.trees import in_words, steps
from npusim.studies.validate.vectors import compare, load_vectors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from npusim.studies.validate.vectors import MmaVectors

#: Numbers of examined outputs: a few at first, then more for the units that remain.
LOOKS = (24, 400, 4000)
#: The parameters of a unit whose values are listed, by their words in the table.
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
    """The units that random vectors do not exclude; the named unit explains ``matched`` of ``total`` outputs.

    Units in ``registered`` explain every output, units in ``excluded`` do not.  Of the ``tried`` units, ``units``
    explain the ``looked_at`` drawn outputs; ``left`` contains the remaining values of each parameter.
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
    """Yield the survivors for each name of a file of random vectors; raises like `npusim.studies.validate.vectors`."""
    yield from map(survivors, load_vectors(path).values())


def survivors(v: MmaVectors) -> Survivors:
    """Return the survivors for the vectors of one name: known kinds of trees with any width and rounding."""
    named, unit = compare(v), v.arithmetic
    kind = (unit.a_format, unit.b_format, unit.acc_format)
    alike = [u for u in ARITHMETICS.values() if (u.a_format, u.b_format, u.acc_format) == kind and not u.scale_block]
    reports = {u.name: compare(replace(v, arithmetic=u)) for u in alike if v.a.shape[2] % u.k == 0}
    registered = tuple(name for name, r in reports.items() if r.matched == r.total)
    some = np.random.default_rng(0).permutation(v.d.size)[: LOOKS[-1]]
    case, row, column = np.unravel_index(some, v.d.shape)
    picked = v.a[case, row], v.b[case, :, column], v.c[case, row, column], v.d[case, row, column]
    with np.errstate(invalid="ignore"):  # NaN with any pattern
        a, b, c, d = (np.asarray(widen(np.ascontiguousarray(x)), np.float64) for x in picked)
    if unit.a.name == "tf32":  # the unit ignores the low bits
        a, b = (operand_of(x, unit.a, AdditionTree(input_bits=unit.a.mantissa_bits)) for x in (a, b))
    alive = list(hypotheses(v.a.shape[2], unit.acc.name))
    tried = len(alive)
    for n in LOOKS:
        alive = [u for u in alive if same(compute(u, (unit.a, unit.b, unit.acc), a[:n], b[:n], c[:n]), d[:n]).all()]
    left: dict[str, tuple[str, ...]] = {"which terms meet": tuple(dict.fromkeys(in_words(u.tree) for u in alive))}
    for words, field in LISTED.items():
        left[words] = tuple(dict.fromkeys("all" if (x := getattr(u, field)) is None else str(x) for u in alive))
    excluded = tuple(name for name in reports if name not in registered)
    units = tuple(stated_name(*kind, u) for u in alive)
    return Survivors(v.name, named.matched, named.total, registered, excluded, units, tried, len(d), left)


def hypotheses(depth: int, acc: str) -> Iterator[AdditionTree]:
    """Yield units of ``depth`` products: the trees of `steps`, with all widths, cuts and some roundings."""
    is_wide = acc == "float32"
    modes = [
        c
        for c in ROUNDINGS.values()
        if c["rounding"] not in ("floor", "ceil") and c["kept"] in ((None, 13) if is_wide else (None,))
    ]
    for tree, mode in product(dict.fromkeys(steps(depth)), modes):
        yield AdditionTree(tree, **mode)
        for width in widths(range(10, 31)).values():
            for lowest in (None, -(width["fraction"] + 108) if is_wide else 4 - width["fraction"]):
                yield AdditionTree(tree, lowest=lowest, **mode, **width)
