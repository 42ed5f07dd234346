"""Reductions by a comparison and a choice, the form in which torch.compile writes maxima, as the same TTIR with maxima
of two values.

``a > b or a is NaN`` chooses a, otherwise b: the greater operand, or NaN if an operand is NaN.  For +0 and -0, which
are equal, the result is the second operand, while a maximum is +0.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from npusim.kernels.triton.ttir_text import Function, Op, makers

#: Maximum and minimum, by the relation that chooses the first of two values.
_WORDS = MappingProxyType({"ogt": "arith.maximumf", "olt": "arith.minimumf"})


def with_maxima(function: Function) -> tuple[Function, list[Op]]:
    """Return a kernel whose reductions of that form are maxima and minima, and these reductions."""
    found = list[Op]()

    def changed(op: Op) -> Op:
        word = _word(op) if op.name == "tt.reduce" and len(op.operands) == 1 else ""
        if not word and not op.body and not op.otherwise:
            return op
        if not word:
            return replace(op, body=[*map(changed, op.body)], otherwise=[*map(changed, op.otherwise)])
        found.append(op)
        (*_, end), (first, second) = op.body, _pair(op.body)
        best = Op(word, end.operands[:1], [first, second], word, op.body[-2].type, op.line, place=op.body[-2].place)
        return replace(op, body=[best, end])

    operations = [*map(changed, function.operations)]
    return (function._replace(operations=operations) if found else function), found


def _pair(body: list[Op]) -> list[str]:
    """Return the two values between which the choice at the end of a reduction selects."""
    return body[-2].operands[1:]


def _word(op: Op) -> str:
    """Return the operation of which a reduction's region consists; empty for another region."""
    if [o.name for o in op.body if o.name != "arith.cmpf"] != ["arith.ori", "arith.select", "tt.reduce.return"]:
        return ""
    *comparisons, either, choice, end = op.body
    result, (first, second) = makers(comparisons), _pair(op.body)
    relations = {o.text.split()[1].rstrip(","): o.operands for o in comparisons}
    greater = next((r for r in relations if r in _WORDS and relations[r] == [first, second]), "")
    is_form = len(comparisons) == 2 and relations.get("une") == [first, first]
    is_form &= set(either.operands) == set(result) and choice.operands[:1] == either.results
    return _WORDS.get(greater, "") if is_form and end.operands == choice.results else ""
