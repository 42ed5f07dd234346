"""Lines of LLVM's text: blocks, and operations on numbers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MappingProxyType

from npusim.formats.kernel_values import (
    BOOL,
    FLOAT32,
    FLOAT64,
    INT64,
    UINT64,
    NumberType,
    NumberValue,
    TranslationError,
    arithmetic_type,
    common_type,
    constant,
)

_FOLDED: Mapping[type[ast.AST], Callable[[float, float], float]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: pow,
        ast.LShift: operator.lshift,
        ast.RShift: operator.rshift,
        ast.BitAnd: operator.and_,
        ast.BitOr: operator.or_,
        ast.BitXor: operator.xor,
    }
)
#: Instructions of LLVM, of whole numbers and of floats.
_WHOLE: Mapping[type[ast.AST], str] = MappingProxyType(
    {
        ast.Add: "add",
        ast.Sub: "sub",
        ast.Mult: "mul",
        ast.LShift: "shl",
        ast.BitAnd: "and",
        ast.BitOr: "or",
        ast.BitXor: "xor",
    }
)
_FLOATS: Mapping[type[ast.AST], str] = MappingProxyType(
    {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
)
#: Comparisons, by the kind of the compared numbers.
_COMPARED: Mapping[type[ast.AST], Mapping[str, str]] = MappingProxyType(
    {
        ast.Lt: {"i": "slt", "u": "ult", "f": "olt"},
        ast.LtE: {"i": "sle", "u": "ule", "f": "ole"},
        ast.Gt: {"i": "sgt", "u": "ugt", "f": "ogt"},
        ast.GtE: {"i": "sge", "u": "uge", "f": "oge"},
        ast.Eq: {"i": "eq", "u": "eq", "b": "eq", "f": "oeq"},
        ast.NotEq: {"i": "ne", "u": "ne", "b": "ne", "f": "une"},
    }
)


class CodeLines:
    """Writes the lines of one function; names of values are numbered."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self._lines: list[str] = []
        self._allocated: list[str] = []
        #: Declarations of LLVM's functions that are called.
        self.declared: dict[str, None] = {}
        self._names = 0
        self._block = "entry"
        self._is_closed = False

    def text(self) -> str:
        """Return the lines of the function: first the memory of its variables, which LLVM turns into registers."""
        return "\n".join(["entry:", *self._allocated, *self._lines])

    def _refuse(self, node: ast.AST, text: str) -> TranslationError:
        line = getattr(node, "lineno", 0)
        return TranslationError(f"{self.function.__code__.co_filename}:{line}: {self.function.__qualname__}: {text}")

    def _line(self, text: str) -> None:
        self._lines.append("  " + text)

    def _new(self, text: str) -> str:
        self._names += 1
        self._lines.append(f"  %{self._names}v = {text}".replace(f"%{self._names}v", f"%v{self._names}"))
        return f"%v{self._names}"

    def _label(self) -> str:
        self._names += 1
        return f"b{self._names}"

    def _start(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self._block, self._is_closed = label, False

    def _jump(self, label: str) -> None:
        self._line(f"br label %{label}")
        self._is_closed = True

    def _branch(self, condition: str, yes: str, no: str) -> None:
        self._line(f"br i1 {condition}, label %{yes}, label %{no}")
        self._is_closed = True

    def _allocate(self, number: NumberType) -> str:
        self._names += 1
        self._allocated.append(f"  %m{self._names} = alloca {number.stored}")
        return f"%m{self._names}"

    # ------------------------------------------------------------ numbers

    def _cast(self, value: NumberValue, to: NumberType) -> NumberValue:
        """Return a number as another type's: C's conversions; a float that is converted to bits must fit."""
        of = value.number
        if of == to:
            return value
        if value.known is not None and not (of.kind == "f" and to.kind != "f"):
            return constant(value.known, to)
        if to.kind == "b":
            zero = "0x0000000000000000" if of.kind == "f" else "0"
            return NumberValue(
                to, self._new(f"{'fcmp une' if of.kind == 'f' else 'icmp ne'} {of.text} {value.text}, {zero}")
            )
        if of.kind == "f" and to.kind == "f":
            how = "fpext" if to.bits > of.bits else "fptrunc"
        elif of.kind == "f":
            how = "fptosi" if to.kind == "i" else "fptoui"
        elif to.kind == "f":
            how = "sitofp" if of.kind == "i" else "uitofp"
        elif of.bits == to.bits:
            return NumberValue(to, value.text)
        else:
            how = "trunc" if to.bits < of.bits else "sext" if of.kind == "i" else "zext"
        return NumberValue(to, self._new(f"{how} {of.text} {value.text} to {to.text}"))

    def _operation(self, node: ast.AST, operation: type[ast.AST], a: NumberValue, b: NumberValue) -> NumberValue:
        if a.known is not None and b.known is not None:
            return self._folded(node, operation, a, b)
        if operation is ast.Div:
            both = (a.number, b.number)
            number = FLOAT32 if both == (FLOAT32, FLOAT32) else FLOAT64
        elif a.number == b.number == BOOL and operation in (ast.BitAnd, ast.BitOr, ast.BitXor):
            number = BOOL
        else:
            number = arithmetic_type(a.number, b.number)
        x, y = self._cast(a, number).text, self._cast(b, number).text
        if number.kind == "f":
            how = _FLOATS.get(operation)
        elif operation in (ast.FloorDiv, ast.Mod):
            return self._divided(operation is ast.Mod, number, x, y)
        else:
            how = ("ashr" if number.kind == "i" else "lshr") if operation is ast.RShift else _WHOLE.get(operation)
        if how is None:
            raise self._refuse(node, f"{operation.__name__} of {number.text}")
        return NumberValue(number, self._new(f"{how} {number.text} {x}, {y}"))

    def _folded(self, node: ast.AST, operation: type[ast.AST], a: NumberValue, b: NumberValue) -> NumberValue:
        """Return the result of two known numbers, which Python computes: both are of the source's types."""
        assert a.known is not None and b.known is not None
        if {a.number, b.number} <= {INT64, FLOAT64, BOOL}:
            return constant(_FOLDED[operation](a.known, b.known))
        number = arithmetic_type(a.number, b.number)
        if number in (INT64, UINT64) and operation is not ast.Div:
            return constant(_FOLDED[operation](a.known, b.known), number)
        raise self._refuse(node, "an operation on two constants of one type of NumPy")

    def _divided(self, is_rest: bool, number: NumberType, x: str, y: str) -> NumberValue:
        """Return the quotient, rounded down, or its rest; both are 0 if the divisor is 0."""
        kind, sign = number.text, "s" if number.kind == "i" else "u"
        is_zero = self._new(f"icmp eq {kind} {y}, 0")
        divisor = self._new(f"select i1 {is_zero}, {kind} 1, {kind} {y}")
        quotient = self._new(f"{sign}div {kind} {x}, {divisor}")
        rest = self._new(f"sub {kind} {x}, {self._new(f'mul {kind} {quotient}, {divisor}')}")
        if number.kind == "i":
            differs = self._new(f"icmp slt {kind} {self._new(f'xor {kind} {rest}, {divisor}')}, 0")
            is_below = self._new(f"and i1 {differs}, {self._new(f'icmp ne {kind} {rest}, 0')}")
            lower = self._new(f"sub {kind} {quotient}, 1"), self._new(f"add {kind} {rest}, {divisor}")
            quotient, rest = (
                self._new(f"select i1 {is_below}, {kind} {new}, {kind} {old}")
                for new, old in zip(lower, (quotient, rest), strict=True)
            )
        chosen = rest if is_rest else quotient
        return NumberValue(number, self._new(f"select i1 {is_zero}, {kind} 0, {kind} {chosen}"))

    def _compared(self, node: ast.AST, operation: type[ast.AST], a: NumberValue, b: NumberValue) -> NumberValue:
        number = common_type(a.number, b.number)
        how = _COMPARED[operation].get(number.kind) if operation in _COMPARED else None
        if how is None:
            raise self._refuse(node, f"{operation.__name__} of {number.text}")
        x, y = self._cast(a, number).text, self._cast(b, number).text
        return NumberValue(BOOL, self._new(f"{'fcmp' if number.kind == 'f' else 'icmp'} {how} {number.text} {x}, {y}"))

    def _of_two(self, condition: str, number: NumberType, yes: NumberValue, no: NumberValue) -> NumberValue:
        x, y = self._cast(yes, number).text, self._cast(no, number).text
        return NumberValue(number, self._new(f"select i1 {condition}, {number.text} {x}, {number.text} {y}"))

    def _loaded(self, number: NumberType, pointer: str) -> NumberValue:
        loaded = self._new(f"load {number.stored}, ptr {pointer}")
        return NumberValue(number, self._new(f"trunc i8 {loaded} to i1") if number == BOOL else loaded)

    def _stored(self, number: NumberType, pointer: str, value: NumberValue) -> None:
        text = self._cast(value, number).text
        if number == BOOL:
            text = self._new(f"zext i1 {text} to i8")
        self._line(f"store {number.stored} {text}, ptr {pointer}")

    def _least(self, a: str, b: str) -> str:
        is_less = self._new(f"icmp slt i64 {a}, {b}")
        return self._new(f"select i1 {is_less}, i64 {a}, i64 {b}")

    def _of_llvm(self, name: str, number: NumberType, scalars: Sequence[NumberValue]) -> NumberValue:
        function = f"@llvm.{name}.f{number.bits}"
        kinds = ", ".join([number.text] * len(scalars))
        self.declared[f"declare {number.text} {function}({kinds})"] = None
        passed = ", ".join(f"{number.text} {value.text}" for value in scalars)
        return NumberValue(number, self._new(f"call {number.text} {function}({passed})"))

    def _extreme(self, node: ast.AST, operation: type[ast.AST], scalars: Sequence[NumberValue]) -> NumberValue:
        """Return the smallest or largest number; an earlier one if they are equal, or if one of them is NaN."""
        first = scalars[0]
        for other in scalars[1:]:
            number = common_type(first.number, other.number)
            a, b = self._cast(first, number), self._cast(other, number)
            first = self._of_two(self._compared(node, operation, b, a).text, number, b, a)
        return first

    def _magnitude(self, value: NumberValue) -> NumberValue:
        if value.number.kind == "f":
            return self._of_llvm("fabs", value.number, [value])
        value = self._cast(value, INT64)
        is_negative, opposite = self._new(f"icmp slt i64 {value.text}, 0"), self._new(f"sub i64 0, {value.text}")
        return self._of_two(is_negative, INT64, NumberValue(INT64, opposite), value)
