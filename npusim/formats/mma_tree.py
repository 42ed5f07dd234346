"""The slow, exact path of matrix units that no kernel computes: any tree of additions, aligned and rounded as stated.

numpy computes the lanes in float64, one node of the tree after another, for every format of at most 24 significand
bits.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from npusim.errors import FormatError
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from npusim.formats.cast import Array
    from npusim.formats.float_format import FloatFormat

    Formats = tuple[FloatFormat, FloatFormat, FloatFormat]

#: A node is a group of terms that are added and rounded once: products by their k, ``C``, and the results of other
#: nodes.
Tree = int | tuple[Any, ...]
#: The entry of a tree that represents the accumulator.
C = -1
#: Exponent of a zero, which does not affect an alignment.
NO_EXPONENT = -9999
#: Largest length of a tree's text, and largest number of its additions: enough for 64 products that are added one at a
#: time.
MOST_TEXT, MOST_NODES = 4096, 256
#: Largest number of fraction bits of an alignment: 64 terms with this number of bits are exact in float64.
MOST_FRACTION_BITS = 45
ROUNDED: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "nearest_even": np.rint,
        "nearest_away": lambda y: np.copysign(np.floor(np.abs(y) + 0.5), y),
        "toward_zero": np.trunc,
        "floor": np.floor,
        "ceil": np.ceil,
        "odd": lambda y: np.where(np.floor(y) == y, y, np.floor(y) + (np.mod(np.floor(y), 2) == 0)),
    }
)


@dataclass(frozen=True)
class AdditionTree:
    """The order and the rounding of a unit's additions of products and an accumulator.

    Attributes
    ----------
    tree
        Nested tuples of k and `C`; a product that is a node by itself is rounded before it is added.
    fraction
        Number of bits below the largest exponent of a node's terms that are used; None: all. ``cut``: the rounding of
        the cut bits.
    exponents
        Exponent of a product: the sum of its operands' exponents as ``stored``, or with subnormals ``normalised`` (as a
        wider unit reads them), or the exponent of the ``product`` itself.
    rounding, kept
        Rounding of a node's sum, and the fraction bits of its result; None: all of the accumulator's format.
    late
        Rounding of a node without products, which aligns nothing.
    lowest
        Smallest exponent to which terms are aligned; None: no limit.
    flush
        Subnormals that become 0: ``none``, ``in`` (operands), ``out`` (results), ``both``.
    overflow
        Overflow of a result: ``inf``, or ``largest`` (saturation).
    input_bits, input_rounding
        Fraction bits of operands after conversion (TF32, HF32), and its rounding; None: all.
    """

    tree: Tree = ()
    fraction: int | None = None
    cut: str = "toward_zero"
    exponents: Literal["stored", "normalised", "product"] = "stored"
    rounding: str = "nearest_even"
    kept: int | None = None
    late: str = "nearest_even"
    lowest: int | None = None
    flush: Literal["none", "in", "out", "both"] = "none"
    overflow: Literal["inf", "largest"] = "inf"
    input_bits: int | None = None
    input_rounding: str = "toward_zero"

    def __str__(self) -> str:
        """Return the text that `parse_tree` reads; without commas and spaces, so that a precision can name it."""
        default = AdditionTree()
        words = [tree_text(self.tree)]
        changed = {f.name: v for f in fields(self)[1:] if (v := getattr(self, f.name)) != getattr(default, f.name)}
        return ":".join((*words, *(f"{name}-{value}" for name, value in changed.items())))


#: The possible values of each part of an `AdditionTree`'s text; empty if they are whole numbers.
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("fraction", "kept", "lowest", "input_bits"), ()),
        **dict.fromkeys(("cut", "rounding", "late", "input_rounding"), tuple(ROUNDED)),
        "exponents": ("stored", "normalised", "product"),
        "flush": ("none", "in", "out", "both"),
        "overflow": ("inf", "largest"),
    }
)


def leaves_of(tree: Tree) -> list[int]:
    """Return the leaves of a tree from left to right."""
    return [tree] if isinstance(tree, int) else [leaf for part in tree for leaf in leaves_of(part)]


def tree_text(tree: Tree) -> str:
    """Return a tree as text: ``((c+0..15)+16..31)``."""
    if isinstance(tree, int):
        return "c" if tree == C else str(tree)
    parts, at = list[str](), 0
    while at < len(tree):
        end = at
        while tree[at] != C and isinstance(tree[end], int) and tree[end + 1 : end + 2] == (tree[end] + 1,):
            end += 1
        parts.append(tree_text(tree[at]) if end == at else f"{tree[at]}..{tree[end]}")
        at = end + 1
    return f"({'+'.join(parts)})"


def parse_tree(text: str) -> AdditionTree:
    """Return the tree that a text in `AdditionTree`'s form states; raise `FormatError` if the text is malformed."""
    tree, *words = text.split(":")
    values: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("-")
        if name not in PARTS:
            raise FormatError(f"{text!r}: unknown part {word!r}; parts are {', '.join(f'{n}-VALUE' for n in PARTS)}")
        known = PARTS[name]
        if value not in known and (known or not re.fullmatch(r"-?[0-9]{1,4}", value)):
            raise FormatError(f"{text!r}: {name}-{value}; must be {' or '.join(known) or 'a whole number'}")
        values[name] = value if known else int(value)
    if (values.get("fraction") or 0) > MOST_FRACTION_BITS:
        raise FormatError(f"{text!r}: fraction-{values['fraction']}; at most {MOST_FRACTION_BITS}")
    return AdditionTree(_read_tree(tree), **values)


def _read_tree(text: str) -> Tree:
    if len(text) > MOST_TEXT or text.count("(") > MOST_NODES:
        raise FormatError(f"{text[:40]!r}...: at most {MOST_TEXT} characters and {MOST_NODES} additions")
    tokens = re.findall(r"[0-9]+\.\.[0-9]+|[0-9]+|[c()+]", text)
    stack: list[list[Any]] = [[]]
    for token in tokens:
        if token == "(":
            stack.append([])
        elif token == ")" and len(stack) > 1:
            node = tuple(stack.pop())
            stack[-1].append(node)
        elif ".." in token:
            first, last = map(int, token.split(".."))
            stack[-1].extend(range(first, min(last, MOST_TEXT) + 1))
        elif token not in "+)":
            stack[-1].append(C if token == "c" else int(token))
    read = stack[0][0] if len(stack) == 1 and len(stack[0]) == 1 else ()
    leaves, products = sorted(leaves_of(read)), list(range(leaf_count(read)))
    if "".join(tokens) != text or isinstance(read, int) or leaves not in (products, [C, *products]):
        raise FormatError(f"{text!r}: not a tree; a tree names each k from 0 once, and c: ((c+0..15)+16..31)")
    return read


def leaf_count(tree: Tree) -> int:
    """Return the number of products that a tree adds."""
    return sum(leaf != C for leaf in leaves_of(tree))


# ---------------------------------------------------------------- the result of a tree


def _two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def odd_sum(columns: Sequence[Array]) -> Array:
    """Return the exact sum of float64 columns, element by element, rounded to odd: a later rounding to 24 bits is then
    right.

    Inf and NaN follow IEEE additions.
    """
    total, rest, left = columns[0], np.zeros(len(columns[0])), np.zeros(len(columns[0]), np.bool_)
    for column in columns[1:]:
        total, lost = _two_sum(total, column)
        rest, more = _two_sum(rest, lost)
        left |= more != 0
    total, rest = _two_sum(total, rest)
    finite = np.isfinite(total)
    for n in np.flatnonzero(left & finite).tolist():  # sums of terms on three scales, which are 53 bits apart
        row = [column[n] for column in columns]
        total[n] = math.fsum(row)
        rest[n] = math.fsum([*row, -total[n]])
    is_even = np.ascontiguousarray(total).view(np.int64) & 1 == 0
    toward = np.copysign(np.inf, rest)
    odd = np.where((rest != 0) & is_even & finite, np.nextafter(total, toward), total)
    sums: Array = np.where(finite, odd, functools.reduce(np.add, columns))
    return sums


def round_to(x: Array, fmt: FloatFormat, mode: str, kept: int | None = None, unit: AdditionTree | None = None) -> Array:
    """Round float64 values to a format of at most 24 significand bits; the values are exact, or were rounded to odd.

    ``kept``: number of fraction bits, None for that of the format; ``unit`` states the rules for overflow and for
    subnormal results.  NaN and Inf are unchanged.
    """
    bits = fmt.mantissa_bits if kept is None else kept
    q = np.maximum(np.frexp(x)[1] - 1, fmt.min_exponent) - bits
    out = np.ldexp(ROUNDED[mode](np.ldexp(x, -q)), q)
    over = (np.abs(out) > fmt.max_finite) & np.isfinite(x)
    if over.any():
        largest = fmt.max_finite if unit and unit.overflow == "largest" else np.inf
        out = np.where(over, np.copysign(largest, x), out)
    if unit and unit.flush in ("out", "both"):
        out = np.where(np.abs(out) < fmt.min_normal, 0.0, out)
    result: Array = np.where(np.isfinite(x), out, x) + 0.0
    return result


def _exponent(x: Array, lowest: int) -> Array:
    """Return the exponents of float64 values, none of which is subnormal, as their bits state them; Inf and NaN have
    1024.
    """
    stated: Array = x.view(np.int32)[..., 1::2] >> 20  # the upper halves: `ldexp` is ten times as slow with 64 bits
    stated &= 0x7FF
    stated -= 1023
    np.maximum(stated, lowest, out=stated)
    stated[x == 0] = NO_EXPONENT
    return stated


def operand_of(x: Array, fmt: FloatFormat, unit: AdditionTree) -> Array:
    """Return the operands in the form that a unit reads: float64 values of ``fmt``, cut or flushed."""
    if unit.input_bits is not None:
        x = round_to(x, fmt, unit.input_rounding, unit.input_bits)
    if unit.flush in ("in", "both"):
        x = np.where(np.abs(x) < fmt.min_normal, 0.0, x)
    return x


def compute(unit: AdditionTree, formats: Formats, a: Array, b: Array, c: Array) -> Array:
    """Return D of rows of A and columns of B, float64: ``a`` and ``b`` (n, K), ``c`` (n,), exact in their formats.

    A NaN is the canonical NaN, and a zero is +0; a finite product never overflows.
    """
    first, second, acc = formats
    with np.errstate(all="ignore"):
        # The products of one k are contiguous: they are the terms of a sum.  Operands stored so are not copied.
        a, b = (operand_of(np.ascontiguousarray(x.T), fmt, unit) for x, fmt in ((a, first), (b, second)))
        products, c = a * b, np.ascontiguousarray(c)

        @functools.cache
        def powers() -> Array:
            if unit.exponents == "product":
                return _exponent(products, NO_EXPONENT)
            low = [f.min_exponent if unit.exponents == "stored" else NO_EXPONENT for f in (first, second)]
            return np.where(products == 0, NO_EXPONENT, _exponent(a, low[0]) + _exponent(b, low[1]))

        def node(tree: tuple[Any, ...]) -> Array:
            has_product = any(part != C and isinstance(part, int) for part in tree)
            terms = [node(part) if not isinstance(part, int) else c if part == C else products[part] for part in tree]
            if unit.fraction is None or not has_product:
                total = odd_sum(terms)
            else:
                each = (
                    powers()[part] if isinstance(part, int) and part != C else _exponent(term, acc.min_exponent)
                    for part, term in zip(tree, terms, strict=True)
                )
                top = functools.reduce(np.maximum, each)
                top = top if unit.lowest is None else np.maximum(top, unit.lowest)
                top = np.where(top <= NO_EXPONENT, 0, top)
                cuts = (ROUNDED[unit.cut](np.ldexp(term, unit.fraction - top)) for term in terms)
                total = np.ldexp(functools.reduce(np.add, cuts), top - unit.fraction)
            mode, kept = (unit.rounding, unit.kept) if has_product else (unit.late, None)
            return round_to(total, acc, mode, kept, unit)

        assert isinstance(unit.tree, tuple)
        return node(unit.tree)


#: Number of products that are processed at a time.
CHUNK = 1 << 18


def multiply_tree(unit: AdditionTree, formats: Formats, a: Array, b: Array, c: Array) -> None:
    """Overwrite C (M, N) with D, chained instructions along k: ``a`` (M, K), ``b`` (K, N), values of their formats."""
    depth = leaf_count(unit.tree)
    for k in range(0, a.shape[1], depth):
        left, right = a[:, k : k + depth].astype(np.float64), b[k : k + depth].T.astype(np.float64)
        size = CHUNK // (depth * len(right)) or 1
        for rows in (slice(at, at + size) for at in range(0, len(left), size)):
            one = np.repeat(left[rows], len(right), axis=0)
            old = c[rows].astype(np.float64)
            c[rows] = compute(unit, formats, one, np.tile(right, (len(old), 1)), old.reshape(-1)).reshape(old.shape)
