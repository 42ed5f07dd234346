"""Sums and maxima of a loop in which a mask chooses the accumulator, as the same TTIR with masked terms.

``acc = where(mask, acc + x, acc)`` has the bits of ``acc = acc + where(mask, x, 0)`` if the sum begins with +0: no sum
that begins with +0 is -0.  For a maximum the term is -inf.  Both factors of a product are masked, so that compiled code
contracts the product and the addition in both forms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from npusim.kernels.triton.ttir_text import FORMATS, Op, makers, shape_of
from npusim.kernels.triton.values import float_of

#: Operations on an accumulator and a term, with the term that leaves an accumulator unchanged.
_NEUTRAL: Mapping[str, float] = MappingProxyType(
    {"arith.addf": 0.0, "arith.maxnumf": -math.inf, "arith.maximumf": -math.inf}
    | {"arith.minnumf": math.inf, "arith.minimumf": math.inf}
)
#: The same terms for a selection by the comparison ``accumulator > term``, or by its negation.
_NEUTRAL_OF_CHOICE: Mapping[str, float] = MappingProxyType({"ogt": -math.inf, "olt": math.inf})


def with_masked_terms(operations: Sequence[Op]) -> list[Op]:
    """Return a kernel's operations, with masks of terms in place of masks of accumulators in its loops."""
    result = makers(operations)
    return [replace(o, body=_masked(o, result)) if o.name == "scf.for" else o for o in operations]


def _masked(loop: Op, outer: Mapping[str, Op]) -> list[Op]:
    body, starts = loop.body, dict(zip(loop.operands[4::2], loop.operands[5::2], strict=True))
    for choice in [o for o in body if o.name == "arith.select" and o.operands[2] in starts]:
        mask, value, state = choice.operands
        known = makers(body)
        chain = _chain(value, state, known)
        if not chain or not _is_alone([*chain], choice, body):
            continue
        term, neutral = _term_of(chain, state)
        if not term or (neutral == 0.0 and not _is_zero(outer.get(starts[state]))):
            continue
        factors = _factors(known.get(term), chain[0], body)
        changed = [known[term]] if factors else chain
        fresh = [o for n in factors or (term,) for o in _choice(choice, mask, n, neutral)]
        names = {n: f"{n}@masked{choice.results[0]}" for n in factors or (term,)}
        first = min(body.index(o) for o in changed)
        at = max([first, *(body.index(known[n]) + 1 for n in (mask, *names) if n in known)])
        if at > first:
            continue
        moved = [replace(o, operands=[names.get(n, n) for n in o.operands]) if o in changed else o for o in body]
        body = [o for o in [*moved[:at], *fresh, *moved[at:]] if o is not choice]
        body = [replace(o, operands=[value if n == choice.results[0] else n for n in o.operands]) for o in body]
    return body


def _chain(value: str, state: str, known: Mapping[str, Op]) -> list[Op]:
    """Return the operations that compute an accumulator's next value from it and a term, the last one first."""
    last = known.get(value)
    if last is None or state not in last.operands:
        return []
    if last.name in _NEUTRAL:
        return [last]
    if last.name != "arith.select" or last.operands[1] != state:
        return []
    chain, waiting = [last], [last.operands[0]]
    while waiting:
        op = known.get(waiting.pop())
        if op is None or op.name not in ("arith.cmpf", "arith.ori"):
            return []
        chain.append(op)
        waiting += op.operands if op.name == "arith.ori" else []
    return chain


def _term_of(chain: Sequence[Op], state: str) -> tuple[str, float]:
    """Return the term of a chain of operations, and the number that leaves the accumulator unchanged; without such a
    chain the name is empty.
    """
    last, *compared = chain
    terms = [n for n in last.operands[-2:] if n != state]
    if len(terms) != 1:
        return "", 0.0
    if not compared:
        return terms[0], _NEUTRAL[last.name]
    relations = {o.text.split()[1].rstrip(","): o.operands[:2] for o in compared if o.name == "arith.cmpf"}
    is_nan = relations.pop("une", [state, state]) == [state, state]
    found = [_NEUTRAL_OF_CHOICE[r] for r, of in relations.items() if r in _NEUTRAL_OF_CHOICE and of == [state, *terms]]
    return (terms[0], found[0]) if is_nan and len(found) == len(relations) == 1 else ("", 0.0)


def _is_alone(chain: Sequence[Op], choice: Op, body: Sequence[Op]) -> bool:
    """Return whether only the operations of a chain and the choice read their results."""
    result = {r for o in chain for r in o.results}
    return not any(result.intersection(o.operands) for o in body if o not in chain and o is not choice)


def _factors(product: Op | None, addition: Op, body: Sequence[Op]) -> tuple[str, ...]:
    """Return the factors of a product that only an addition reads."""
    if product is None or (product.name, addition.name) != ("arith.mulf", "arith.addf"):
        return ()
    if any(product.results[0] in o.operands for o in body if o is not addition):
        return ()
    return tuple(dict.fromkeys(product.operands))


def _choice(like: Op, mask: str, term: str, neutral: float) -> list[Op]:
    """Return the choice of a term where a mask is true, and of a number elsewhere."""
    name, other, type_ = f"{term}@masked{like.results[0]}", f"{term}@other{like.results[0]}", like.type
    is_block = "tensor" in type_
    type_ = f"tensor{type_.rpartition('tensor')[2]}" if is_block else type_
    number = {0.0: "0.0", -math.inf: _infinity(type_, -1), math.inf: _infinity(type_, 1)}[neutral]
    text = f"arith.constant {f'dense<{number}>' if is_block else number} : {type_}"
    constant = Op("arith.constant", [other], [], text, type_, like.line)
    return [constant, replace(like, results=[name], operands=[mask, term, other], place="")]


def _infinity(type_: str, sign: int) -> str:
    """Return an infinity in TTIR's form: its bits."""
    bits = {"f64": 0x7FF0000000000000, "f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}
    width = {"f64": 64, "f32": 32, "f16": 16, "bf16": 16}[fmt := shape_of(type_)[1]]
    return f"0x{bits[fmt] | ((sign < 0) << (width - 1)):X}"


def _is_zero(start: Op | None) -> bool:
    """Return whether an operation is a constant +0."""
    if start is None or start.name != "arith.constant":
        return False
    text, _, type_ = start.text.removeprefix("arith.constant ").partition(" : ")
    fmt = shape_of(type_)[1]
    value = float_of(text.removeprefix("dense<").removesuffix(">"), fmt) if fmt in FORMATS else math.nan
    return value == 0.0 and math.copysign(1.0, value) > 0
