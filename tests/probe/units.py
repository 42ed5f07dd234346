"""Units of every kind, drawn anew by seed: what no registry has, with the outputs of a slow model of its own."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from npusim.formats.mma_tree import AdditionTree, C, Tree
from npusim.studies.probe import trees

if TYPE_CHECKING:
    import numpy as np

    from npusim.formats.float_format import FloatFormat

K = 64
MODES = ("nearest_even", "nearest_away", "toward_zero", "floor", "ceil", "odd")


def draw_step(rng: np.random.Generator) -> tuple[str, Tree]:
    """Return a kind and a step of a unit."""
    kind = str(rng.choice(["run", "summed", "strided", "descending", "pairs", "halves", "chains", "late", "nested"]))
    size = int(rng.choice([4, 8, 16, 32]))
    if kind == "run":
        return kind, (C, *range(int(rng.choice([1, 2, 4, 8, 16, 32, 64]))))
    if kind == "summed":
        return kind, (C, tuple(range(size)))
    if kind == "strided":
        stride = 64 // size
        groups = [tuple(range(lane, 64, stride)) for lane in range(stride)]
        tree: Any = C
        for group in groups:
            tree = (tree, *group)
        return kind, tree
    if kind == "descending":
        tree = C
        for at in range(64 - size, -1, -size):
            tree = (tree, *range(at, at + size))
        return kind, tree
    if kind in ("pairs", "halves"):
        how = "in pairs" if kind == "pairs" else "in halves"
        part = int(rng.choice([1, 2, 4]))
        size = max(size, 2 * part)
        leaves: list[Any] = [tuple(range(at, at + part)) if part > 1 else at for at in range(0, size, part)]
        return kind, (C, trees.COMBINED[how](leaves))
    if kind == "chains":
        count, run, step = int(rng.choice([2, 4, 8])), int(rng.choice([1, 2, 4])), int(rng.choice([1, 2]))
        return kind, (
            C,
            trees.chains(K, count, run, step, str(rng.choice(["one after the other", "in pairs", "in halves"]))),
        )
    if kind == "late":
        tree = ()
        for at in range(0, 64, size):
            tree = (*((tree,) if tree else ()), *range(at, at + size))
        return kind, (C, tree)
    inner = tuple(tuple(range(at, at + 4)) for at in range(0, 16, 4))
    return kind, (C, *inner, *range(16, 32))


def draw_unit(rng: np.random.Generator, acc: str) -> tuple[str, AdditionTree]:
    """Return a unit in words, and the unit: C in its tree of 64 products."""
    kind, step = draw_step(rng)
    fraction = None if rng.random() < 0.3 else int(rng.choice([12, 15, 18, 22, 24, 26, 27, 30, 33]))
    values: dict[str, Any] = {"rounding": str(rng.choice(MODES)), "fraction": fraction}
    if fraction is not None:
        values["cut"] = str(rng.choice(["toward_zero", "floor", "nearest_even"]))
        values["exponents"] = str(rng.choice(["stored", "stored", "product"]))
    if acc == "float32" and rng.random() < 0.2:
        values["kept"] = int(rng.choice([10, 13]))
    values["flush"] = str(rng.choice(["none", "none", "in", "out", "both"]))
    values["overflow"] = str(rng.choice(["inf", "inf", "largest"]))
    unit = AdditionTree(trees.repeated(step, K), **values)
    return f"{kind}: {AdditionTree(step, **values)}", unit


# ---------------------------------------------------------------- a model of its own: exact rational numbers


def _power(x: Fraction) -> int:
    """Return the exponent of the leading bit."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if abs(x) >= Fraction(2) ** e else e - 1


def _cut(x: Fraction, mode: str) -> int:
    down = math.floor(x)
    rest = x - down
    if mode == "floor" or not rest:
        return down
    if mode == "ceil":
        return down + 1
    if mode == "toward_zero":
        return math.trunc(x)
    if mode == "odd":
        return down if down % 2 else down + 1
    if rest == Fraction(1, 2):
        return (down + down % 2) if mode == "nearest_even" else down + (x > 0)
    return down + (rest > Fraction(1, 2))


def scalar_product(
    unit: AdditionTree, formats: tuple[FloatFormat, FloatFormat, FloatFormat], a: Any, b: Any, c: float
) -> float:
    """Return D of one row and column, finite ones, in rational numbers: twin of `npusim.formats.mma_tree.compute`."""
    first, second, acc = formats

    def operand(x: float, f: FloatFormat) -> Fraction:
        if unit.flush in ("in", "both") and abs(x) < f.min_normal:
            return Fraction(0)
        return Fraction(x)

    def low(x: Fraction, f: FloatFormat) -> int:
        return max(_power(x), f.min_exponent)

    def exponent(x: Fraction, f: FloatFormat) -> int:
        return low(x, f) if unit.exponents == "stored" else _power(x)

    def node(tree: Any) -> float:
        terms, has_product = [], False
        for part in tree:
            if isinstance(part, int) and part != C:
                x, y = operand(a[part], first), operand(b[part], second)
                has_product = True
                if x * y:
                    terms.append(
                        (
                            x * y,
                            _power(x * y) if unit.exponents == "product" else exponent(x, first) + exponent(y, second),
                        )
                    )
            else:
                value = c if part == C else node(part)
                if not math.isfinite(value):
                    return value
                if value:
                    terms.append((Fraction(value), low(Fraction(value), acc)))
        total = sum((x for x, _ in terms), Fraction(0))
        if unit.fraction is not None and has_product and terms:
            top = max(e for _, e in terms)
            top = top if unit.lowest is None else max(top, unit.lowest)
            quantum = Fraction(2) ** (top - unit.fraction)
            total = sum((_cut(x / quantum, unit.cut) for x, _ in terms), 0) * quantum
        return rounded(total, unit.rounding if has_product else unit.late, unit.kept if has_product else None)

    def rounded(x: Fraction, mode: str, kept: int | None) -> float:
        if not x:
            return 0.0
        quantum = Fraction(2) ** (low(x, acc) - (acc.mantissa_bits if kept is None else kept))
        value = _cut(x / quantum, mode) * quantum
        if abs(value) > Fraction(acc.max_finite):
            return math.copysign(acc.max_finite if unit.overflow == "largest" else math.inf, value)
        if unit.flush in ("out", "both") and abs(value) < Fraction(acc.min_normal):
            return 0.0
        return float(value)

    return node(unit.tree)
