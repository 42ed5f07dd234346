"""Functions of two elements by which a user's own ``tl.reduce`` and ``tl.associative_scan`` combine, as text.

The text has the form of `npusim.formats.combine_text`: statements in the language of kernels, with the forms of
compiled code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import NamedTuple

from npusim.kernels.triton import ROUNDED
from npusim.kernels.triton.called_functions import CHOICES
from npusim.kernels.triton.kernel_draft import Choices
from npusim.kernels.triton.ttir_text import Op, shape_of
from npusim.kernels.triton.values import folded_inverse, literal, number_of

#: Largest number of rows in one element.
MOST_ROWS = 4


def is_exact(op: Op) -> bool:
    """Return whether a reduction's function rounds nothing: it chooses between its elements, or changes signs."""
    return all(each.name in (*CHOICES, "tt.reduce.return") for each in op.body)


class _Value(NamedTuple):
    """A value of a function: its text, its factors if it is a product, and the product's place.

    ``number``: the value of a constant that a compiler knows; ``is_quotient``: the product is a division by such a
    constant.
    """

    text: str
    factors: tuple[str, str] | None = None
    place: str = ""
    number: float | None = None
    is_quotient: bool = False


class Functions(NamedTuple):
    """Texts of operations on single elements: operations on two operands by their word, and functions by their
    operation.
    """

    binary: Mapping[str, str]
    written: Callable[[str, str, str], str]
    unary: Mapping[str, str]
    symbols: Mapping[str, str]


def combined_text(
    op: Op, choices: Choices, functions: Functions, known: Mapping[str, str], literals: Mapping[str, float]
) -> str:
    """Return the function of a reduction's or scan's region as text; ``known``: numbers that are defined outside the
    region.

    ``literals``: the numbers that a compiler knows.

    Raises `ProgramError` for a function of formats other than float32, if it rounds anything, or with operations that
    are not supported.
    """
    count = len(op.arguments) // 2
    if not 1 <= count <= MOST_ROWS or len(op.arguments) != 2 * count:
        raise op.fail(f"a reduction or scan of {count} blocks at once is not supported; allowed: 1 to {MOST_ROWS}")
    region = _Region(op, choices, functions)
    names = [f"{side}{i}" for side in "ab" for i in range(count)]
    region.values = {n: _Value(text, number=literals.get(n)) for n, text in known.items()}
    region.values |= {a: _Value(n) for a, n in zip(op.arguments, names, strict=True)}
    *operations, end = op.body
    for each in operations:
        region.read(each)
    results = ", ".join(region.of(each, end).text for each in end.operands)
    return "; ".join([*region.statements, results])


class _Region:
    """The operations of a function, one after another."""

    def __init__(self, op: Op, choices: Choices, functions: Functions) -> None:
        self.op, self.choices, self.functions = op, choices, functions
        self.values: dict[str, _Value] = {}
        self.statements = list[str]()
        self.formats = ("f32", "i1", "f16", "bf16") if is_exact(op) else ("f32", "i1")

    def of(self, name: str, op: Op) -> _Value:
        """Return a value by its name."""
        if name not in self.values:
            raise op.fail("a function of tl.reduce or tl.associative_scan reads a value from outside, not supported")
        return self.values[name]

    def read(self, op: Op) -> None:
        """Read one operation; refuse operations on formats other than float32 and masks."""
        what = "in a function of tl.reduce or tl.associative_scan"
        if op.name == "arith.constant":
            value, _, fmt = number_of(op)
            text = str(int(value)) if fmt == "i1" else literal(float(value))
            self.values[op.results[0]] = _Value(text, number=float(value))
            if fmt not in self.formats:
                raise op.fail(f"a constant of {fmt} {what} is not supported; allowed: f32")
            return
        if shape_of(op.type.rpartition(", ")[2])[1] not in self.formats:
            raise op.fail(f"{op.name} of {op.type} {what} is not supported; allowed: operations of float32")
        x = [self.of(n, op) for n in op.operands]
        if op.name == "arith.extf":  # narrower floats are float32 here
            self.values[op.results[0]] = x[0]
            return
        texts, relation = [each.text for each in x], op.text.split()[1].rstrip(",")
        is_product, factors, inverse = op.name == "arith.mulf", None, 0.0
        if op.name in ("arith.addf", "arith.subf") and (fused := self._fused(op, x)):
            made = fused
        elif op.name == "arith.divf" and (form := self.choices.form(op.name, "f32", "")):
            divisor = x[1].number
            inverse = 0.0 if divisor is None else folded_inverse(divisor)
            factors = (texts[0], literal(inverse)) if inverse else None
            made = self.functions.written("*", *factors) if factors else form.format(*texts)
        elif op.name in self.functions.binary:
            made = self.functions.written(self.functions.binary[op.name], *texts)
            factors = (texts[0], texts[1]) if is_product else None
        elif op.name == "math.fma":
            made = f"fma({', '.join(texts)})"
        elif op.name == "arith.cmpf":
            made = f"compare({texts[0]}, {texts[1]}, {relation!r})"
        elif op.name == "arith.select":
            made = f"where({', '.join(texts)})"
        elif op.name in ("arith.andi", "arith.ori"):
            made = f"({texts[0]} {'&' if op.name == 'arith.andi' else '|'} {texts[1]})"
        elif op.name in self.functions.unary or op.name == "tt.extern_elementwise":
            made = self._function(op, texts[0])
        else:
            raise op.fail(f"{op.name} {what} is not supported")
        name = f"t{len(self.statements)}"
        self.statements.append(f"{name} = {made}")
        place = op.place if factors else ""
        self.values[op.results[0]] = _Value(name, factors, place, is_quotient=bool(inverse))

    def _function(self, op: Op, text: str) -> str:
        symbol = next(iter(re.findall(r'symbol = "(\w*)"', op.text)), "")
        name = self.functions.symbols.get(symbol, op.name)
        if name not in self.functions.unary:
            raise op.fail(f"{symbol or op.name} in a function of tl.reduce or tl.associative_scan is not supported")
        usual = self.choices.form(name, "f32", self.functions.unary[name])
        return self.choices.form(symbol or name, "f32", usual).format(text)

    def _fused(self, op: Op, x: list[_Value]) -> str:
        """Return an addition that contracts its first product, as compiled code does; empty if no product is
        contracted.
        """
        ways, stays = [(0, 1, "minus"), (1, 0, "from")], self.choices.of_code("addends").get(op.place)
        if not self.choices.of_code("fuses") or stays == ROUNDED:
            return ""
        if stays and x[0].place == stays:
            ways.reverse()
        # ptxas creates the product of a division: only that product is contracted.
        is_further = f"{PurePath(op.line.file).name}:{op.line.number}" in self.choices.of_code("further")
        for one, other, form in ways:
            if (factors := x[one].factors) is not None and (is_further or not x[one].is_quotient):
                how = f", {form!r}" if op.name == "arith.subf" else ""
                return f"fma({factors[0]}, {factors[1]}, {x[other].text}{how})"
        return ""
