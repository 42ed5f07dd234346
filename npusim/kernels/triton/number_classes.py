"""Functions of libdevice that test whether a float is NaN, infinite or finite, as comparisons; and absolute values of
integers, as the greater of an integer and its negative.

``isnan(x)`` is ``x != x``, ``isinf(x)`` is ``|x| == inf`` and ``finitef(x)`` is ``|x| < inf``; the results are the
integers 0 and 1.  An ordered comparison with NaN is false.  The absolute value of the least integer is that integer, as
in two's complement.
"""

from __future__ import annotations

import re
from types import MappingProxyType

_CALL = re.compile(
    r"^(\s*)(%[\w#-]+) = tt\.extern_elementwise (%[\w#-]+) \{[^}]*symbol = \"__nv_(isnan|isinf|finite)f\"\} : "
    r"\((.*?)\) -> (tensor<[^>]*>|\w+)(.*)$",
    re.MULTILINE,
)
_ABSOLUTE = re.compile(r"^(\s*)(%[\w#-]+) = math\.absi (%[\w#-]+) : (tensor<[^>]*>|\w+)(.*)$", re.MULTILINE)
#: These functions, by symbol.
OF_CLASSES = ("__nv_isnanf", "__nv_isinff", "__nv_finitef")
_RELATIONS = MappingProxyType({"isinf": "oeq", "finite": "olt"})


def with_classes_compared(text: str) -> str:
    """Return TTIR with comparisons in place of calls of these functions, and with maxima as absolute integers."""
    text = _ABSOLUTE.sub(_greater, text) if "math.absi" in text else text
    return _CALL.sub(_compared, text) if "extern_elementwise" in text else text


def _greater(op: re.Match[str]) -> str:
    space, result, x, kind, place = op.groups()
    lines = (
        f"{result}_zero = arith.constant {'dense<0>' if kind.startswith('tensor') else 0} : {kind}",
        f"{result}_negative = arith.subi {result}_zero, {x} : {kind}",
        f"{result} = arith.maxsi {x}, {result}_negative : {kind}",
    )
    return "\n".join(f"{space}{line}{place}" for line in lines)


def _compared(call: re.Match[str]) -> str:
    space, result, x, name, floats, whole, place = call.groups()
    mask = re.sub(r"i\d+(>?)$", r"i1\1", whole)
    infinite = "dense<0x7F800000>" if floats.startswith("tensor") else "0x7F800000"
    lines = [f"{result}_is = arith.cmpf une, {x}, {x} : {floats}"]
    if name != "isnan":
        lines = [
            f"{result}_size = math.absf {x} : {floats}",
            f"{result}_inf = arith.constant {infinite} : {floats}",
            f"{result}_is = arith.cmpf {_RELATIONS[name]}, {result}_size, {result}_inf : {floats}",
        ]
    lines.append(f"{result} = arith.extui {result}_is : {mask} to {whole}")
    return "\n".join(f"{space}{line}{place}" for line in lines)
