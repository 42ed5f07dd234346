"""Checks whether the TTIR of a file of recorded calls fits the call's arguments; the file may come from any source."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.errors import SpecError
from npusim.kernels.triton.calls import INTEGERS, Argument
from npusim.kernels.triton.ttir_text import FORMATS, shape_of

if TYPE_CHECKING:
    from npusim.kernels.triton.calls import Call
    from npusim.kernels.triton.ttir_text import Function

#: Element types of pointers to integers, by the bytes of an element.
_ELEMENTS = MappingProxyType({1: ("i8", "i1"), 2: ("i16",), 4: ("i32",), 8: ("i64",)})


def check_arguments(function: Function, call: Call) -> None:
    """Raise `SpecError` if a kernel's parameters are not the recorded arguments: names, tensors, formats."""
    parameters = list(function.parameters.items())
    while parameters:
        name, kind = parameters.pop(0)
        at = f"{call.path}:{call.line}: {call.name}: {name}"
        if name not in call.arguments:
            raise SpecError(f"{at}: a parameter of the TTIR has no recorded argument: the file is damaged")
        value = call.arguments[name]
        if why := _unlike(kind, value):
            raise SpecError(f"{at}: the TTIR has {kind}, but the recorded argument is {why}: the file is damaged")
        if isinstance(value, Argument) and kind.startswith("!tt.tensordesc"):
            del parameters[: 2 * len(value.shape)]  # the sizes and strides of the tensor


def _unlike(kind: str, value: object) -> str:
    """Return a description of an argument that a parameter of the given type cannot accept; empty if it can."""
    block, element = shape_of(kind)
    if not kind.startswith(("!tt.ptr", "!tt.tensordesc")):
        is_number = isinstance(value, int) or (isinstance(value, float) and not re.fullmatch(r"i\d+", kind))
        return "" if is_number else "a tensor" if isinstance(value, Argument) else repr(value)
    if not isinstance(value, Argument):
        return f"{value!r}, not a tensor"
    formats = {FORMATS[element]} if element in FORMATS else {n for n, b in INTEGERS.items() if element in _ELEMENTS[b]}
    if value.fmt not in formats:
        return f"a tensor of {value.fmt}"
    return "" if block == value.block else f"a tensor in blocks of {list(value.block)}"
