"""Indices that a kernel converts to floats only to compare them: they stay integers, whose comparison is a mask.

``arange(0, n).to(float32)[:, None] >= arange(0, n).to(float32)`` is a mask of indices: the conversion is exact, so that
the integers have the same order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from npusim.kernels.triton.integers import reach
from npusim.kernels.triton.ttir_text import Op, shape_of
from npusim.kernels.triton.values import Affine, Elements, Number, constant

_CONVERTED, _COMPARED = "arith.sitofp", "arith.cmpf"
_PASSING = ("tt.expand_dims", "tt.broadcast", "tt.splat")
_OF_INDICES = re.compile(r"tt\.(make_range|get_program_id|expand_dims|broadcast|splat)|arith\.(constant|\w+i|extsi)")
#: Integers up to this one are exact in a format.
_MOST_EXACT = MappingProxyType({"f16": 1 << 11, "bf16": 1 << 8, "f32": 1 << 24, "f64": 1 << 53})
#: The relation of the opposite order of the operands.
_TURNED = MappingProxyType({"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"})


def are_only_compared(
    op: Op, readers: Callable[[Op], Sequence[Op]], made: Mapping[str, Op], made_of: Callable[[str], Sequence[str]]
) -> bool:
    """Return whether all that a kernel does with converted indices is to compare them with constants, or with other
    such indices, which stay integers too.

    ``readers``: the operations that read a result; ``made_of``: the values from which a value is computed.
    """
    waiting, seen = [op], set[Op]()
    while waiting:
        if (one := waiting.pop()) in seen:
            continue
        seen.add(one)
        sources = [made.get(n) for n in made_of(one.operands[0])]
        if any(o is not None and not _OF_INDICES.fullmatch(o.name) for o in sources):
            return False
        for reader in readers(one):
            ends = [_origin(n, made) for n in reader.operands]
            if reader.name != _COMPARED or not all(o and o.name in (_CONVERTED, "arith.constant") for o in ends):
                return False
            waiting += [o for o in ends if o is not None and o.name == _CONVERTED]
    return True


def _origin(name: str, made: Mapping[str, Op]) -> Op | None:
    """Return the operation that computes the elements of a block; None for a parameter or a state of a loop."""
    op = made.get(name)
    while op is not None and op.name in _PASSING:
        op = made.get(op.operands[0])
    return op


def is_exact(op: Op, x: Affine | Elements) -> bool:
    """Return whether the format to which indices are converted represents them exactly."""
    largest = max(map(abs, reach(x))) if isinstance(x, Affine) else int(np.abs(x.values).max())
    return largest <= _MOST_EXACT[shape_of(op.type)[1]]


def as_integers(
    op: Op, a: Affine | Elements | Number, b: Affine | Elements | Number
) -> tuple[str, Affine | Elements, Affine | Elements] | bool:
    """Return the comparison of integers that a comparison of converted indices is, or its result if that is known.

    A comparison with a number is one with the integer next to it; one with a number beyond all indices is known.
    """
    word = op.text.split()[1].rstrip(",")
    if word in ("ord", "uno"):
        return word == "ord"
    relation = word[-2:]
    if isinstance(a, Number):
        relation, a, b = _TURNED[relation], b, a
    assert not isinstance(a, Number)
    if not isinstance(b, Number):
        return _signed(relation), a, b
    if math.isnan(b.value):
        return word.startswith("u")
    if abs(b.value) > _MOST_EXACT["f64"]:  # beyond all indices
        return relation == "ne" or (relation != "eq" and (relation in ("lt", "le")) == (b.value > 0))
    if not b.value.is_integer() and relation in ("eq", "ne"):
        return relation == "ne"
    whole = math.ceil(b.value) if relation in ("lt", "ge") else math.floor(b.value)
    return _signed(relation), a, constant(whole, b.shape, bits=a.bits)


def _signed(relation: str) -> str:
    return relation if relation in ("eq", "ne") else f"s{relation}"
