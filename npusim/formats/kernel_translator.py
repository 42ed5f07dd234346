"""Translation of kernels to LLVM's text: one pass over the syntax tree of each function.

numba translates any function of Python, by a dozen passes over its bytecode.  Kernels are a small language, in which
the type of an expression follows from the types of its parts: numbers, arrays, tables of records, tuples, loops over
ranges, and calls of functions that are translated too.  One pass takes a tenth of the time.  The results are those of
numba (`tests/formats/test_kernel_translator.py`): its types, and its rounding after every operation.

A variable has one type; one that is a tuple, an array or a record is assigned in one place.  Indices must not be
negative, and slices must be inside their array; this is not checked.  A quotient rounds down, and is 0 if the divisor
is 0.  Anything else is refused with its line (`TranslationError`).
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MappingProxyType

import numpy as np

from npusim.formats.kernel_parts import ArgumentType, InlinedFunction, Intrinsic
from npusim.formats.kernel_values import (
    BOOL,
    FLOAT32,
    FLOAT64,
    INT64,
    NUMBERS,
    UINT64,
    WORD_BITS,
    Array,
    KernelValue,
    NoValue,
    NumberType,
    NumberValue,
    Record,
    Rows,
    Several,
    TableAt,
    TranslationError,
    argument,
    arithmetic_type,
    common_type,
    constant,
    form_of,
    number_of,
    renamed,
    words,
)

#: The name of a kernel's entry, which is called by address.
ENTRY = "kernel"
WORD_BYTES = WORD_BITS // 8
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
#: Functions of NumPy on floats that are one operation of the processor.
_OF_NUMPY: Mapping[object, str] = MappingProxyType({np.floor: "floor", np.rint: "rint", np.copysign: "copysign"})


@functools.cache
def _functions_of(path: str) -> Mapping[tuple[str, int], ast.FunctionDef]:
    """Return the functions of a source file by name and first line, decorators included."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {(f.name, min([f.lineno, *(d.lineno for d in f.decorator_list)])): f for f in found}


def source_of(function: FunctionType) -> ast.FunctionDef:
    """Return the syntax tree of a function."""
    code = function.__code__
    return _functions_of(code.co_filename)[code.co_name, code.co_firstlineno]


class Module:
    """The text of a kernel and of the functions that it calls."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.declared: dict[str, None] = {}
        self._functions: dict[object, tuple[str, KernelValue]] = {}

    def function(self, function: FunctionType, arguments: Sequence[KernelValue]) -> tuple[str, KernelValue]:
        """Return the name of a function for arguments of these forms, and the form of its result; translate it once."""
        key = function, tuple(map(form_of, arguments))
        if key not in self._functions:
            name = f'@"{function.__qualname__}.{len(self._functions)}"'
            self._functions[key] = name, NoValue()  # a call of itself is refused: it returns nothing yet
            self._functions[key] = name, self._translated(function, name, arguments)
        return self._functions[key]

    def _translated(self, function: FunctionType, name: str, arguments: Sequence[KernelValue]) -> KernelValue:
        types: dict[str, NumberType] = {}
        while True:
            numbers = map("%a{}".format, range(1 << 16))
            given = [renamed(value, numbers) for value in arguments]
            writer = FunctionWriter(self, function, given, types)
            writer.write()
            if not writer.is_stale:
                break
        parameters = ", ".join(f"{kind} {text}" for value in given for kind, text in words(value))
        result = writer.result
        # LLVM checks before a loop whether arrays overlap, and moves the check out of the loops around it, where rows
        # of one array do overlap: a function with a loop is called. Compilation is shorter, too.
        has_loop = any(isinstance(node, ast.For) for node in ast.walk(writer.source))
        attributes = "noinline nounwind" if has_loop else "nounwind"
        self.texts.append(
            f"define internal {result_type(result)} {name}({parameters}) {attributes} {{\n{writer.text()}\n}}\n"
        )
        return result


def result_type(value: KernelValue) -> str:
    """Return LLVM's type of a function's result."""
    kinds = [kind for kind, _ in words(value)]
    return "void" if not kinds else kinds[0] if isinstance(value, NumberValue) else f"{{ {', '.join(kinds)} }}"


def translated(function: FunctionType, kinds: tuple[ArgumentType, ...]) -> tuple[str, bool]:
    """Return LLVM's text of a kernel for arguments of some types, and whether it returns a number.

    The entry takes the numbers and addresses of `npusim.formats.jit`, and returns an int64: 0 for nothing.
    """
    module, parameters, lines = Module(), list[str](), list[str]()

    def new(kind: str) -> str:
        parameters.append(f"{kind} %p{len(parameters)}")
        return parameters[-1].split()[1]

    def named(text: str) -> str:
        lines.append(f"  %e{len(lines)} = {text}")
        return f"%e{len(lines) - 1}"

    given = [_entered(argument(kind, new), named) for kind in kinds]
    name, result = module.function(function, given)
    passed = ", ".join(f"{kind} {text}" for value in given for kind, text in words(value))
    if isinstance(result, NumberValue) and result.number == INT64:
        returned = named(f"call i64 {name}({passed})")
    elif isinstance(result, NoValue):
        lines.append(f"  call void {name}({passed})")
        returned = "0"
    else:
        raise TranslationError(f"{function.__qualname__}: returns neither nothing nor an int64")
    lines.append(f"  ret i64 {returned}")
    entry = f"define i64 @{ENTRY}({', '.join(parameters)}) nounwind {{\n" + "\n".join(lines) + "\n}\n"
    return "\n".join([*module.texts, entry, *module.declared, "!0 = !{}", ""]), isinstance(result, NumberValue)


def _entered(value: KernelValue, named: Callable[[str], str]) -> KernelValue:
    """Return an argument of a kernel as it is passed to functions: with strides, and truth values of one bit."""
    if isinstance(value, Several):
        return Several(tuple(_entered(entry, named) for entry in value.entries))
    if isinstance(value, NumberValue) and value.number == BOOL:
        return NumberValue(BOOL, named(f"icmp ne i8 {value.text}, 0"))
    if isinstance(value, Array):
        strides = ["1"]
        for size in value.shape[:0:-1]:
            strides.append(size if strides[-1] == "1" else named(f"mul i64 {strides[-1]}, {size}"))
        return Array(value.item, value.data, value.shape, tuple(reversed(strides[: len(value.shape)])))
    return value


class FunctionWriter:
    """Writes one function for arguments of given forms."""

    def __init__(
        self, module: Module, function: FunctionType, arguments: Sequence[KernelValue], types: dict[str, NumberType]
    ) -> None:
        self.module, self.function, self.source, self.types = module, function, source_of(function), types
        self.result: KernelValue = NoValue()
        #: Whether a variable's type has turned out wider than an earlier statement assumed: the function is written
        #: again, with the types that are known then.
        self.is_stale = False
        self._lines: list[str] = []
        self._allocated: list[str] = []
        self._names = 0
        self._block = "entry"
        self._is_closed = False
        self._loops: list[tuple[str, str]] = []
        self._bound: dict[str, KernelValue] = {}
        self._assigned = _assigned_in(self.source)
        self._outside = self._closed_over()
        self._expressions: Mapping[type[ast.AST], Callable[..., KernelValue]] = {
            ast.Constant: self._constant,
            ast.Name: self._name,
            ast.BinOp: self._binary,
            ast.UnaryOp: self._unary,
            ast.BoolOp: self._logical,
            ast.Compare: self._compare,
            ast.IfExp: self._choice,
            ast.Call: self._call,
            ast.Attribute: self._attribute,
            ast.Subscript: self._subscript,
            ast.Tuple: self._tuple,
        }
        self._statements: Mapping[type[ast.AST], Callable[..., None]] = {
            ast.Assign: self._assign,
            ast.AnnAssign: self._assign_annotated,
            ast.AugAssign: self._assign_changed,
            ast.For: self._for,
            ast.While: self._while,
            ast.If: self._if,
            ast.Return: self._return,
            ast.Expr: self._expression_statement,
            ast.Break: lambda _: self._jump(self._loops[-1][1]),
            ast.Continue: lambda _: self._jump(self._loops[-1][0]),
            ast.Pass: lambda _: None,
        }
        for name, value in zip((a.arg for a in self.source.args.args), arguments, strict=True):
            self._bind(name, value)

    def _closed_over(self) -> Mapping[str, object]:
        cells = self.function.__closure__ or ()
        free = zip(self.function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True)
        return {**self.function.__globals__, **dict(free)}

    def write(self) -> None:
        """Translate the statements."""
        self._body(self.source.body)
        if not self._is_closed:
            self._line("ret void" if isinstance(self.result, NoValue) else "unreachable")

    def text(self) -> str:
        """Return the lines of the function: first the memory of its variables, which LLVM turns into registers."""
        return "\n".join(["entry:", *self._allocated, *self._lines])

    # ------------------------------------------------------------ lines

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

    def _number(self, node: ast.expr) -> NumberValue:
        value = self._expression(node)
        if not isinstance(value, NumberValue):
            raise self._refuse(node, f"{ast.unparse(node)} is no number")
        return value

    def _index(self, node: ast.expr) -> str:
        value = self._number(node)
        if value.number.kind == "f" or (value.known is not None and value.known < 0):
            raise self._refuse(node, f"the index {ast.unparse(node)}")
        return self._cast(value, INT64).text

    def _truth(self, node: ast.expr) -> NumberValue:
        value = self._expression(node)
        if isinstance(value, NoValue):
            return constant(value=False)
        if not isinstance(value, NumberValue):
            raise self._refuse(node, f"{ast.unparse(node)} is no condition")
        return self._cast(value, BOOL)

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

    # ------------------------------------------------------------ expressions

    def _expression(self, node: ast.expr) -> KernelValue:
        write = self._expressions.get(type(node))
        if write is None:
            raise self._refuse(node, ast.unparse(node))
        return write(node)

    def _constant(self, node: ast.Constant) -> KernelValue:
        if node.value is None:
            return NoValue()
        if not isinstance(node.value, bool | int | float):
            raise self._refuse(node, ast.unparse(node))
        return constant(node.value)

    def _object(self, node: ast.expr) -> object:
        """Return the object of the module, or of what the function closes over, that an expression names."""
        if isinstance(node, ast.Name) and node.id not in self._assigned and node.id not in self._bound:
            if node.id in self._outside:
                return self._outside[node.id]
            return getattr(__builtins__, node.id, None) if not isinstance(__builtins__, dict) else __builtins__[node.id]
        if isinstance(node, ast.Attribute) and self._object(node.value) is np:
            return getattr(np, node.attr)
        return None

    def _name(self, node: ast.Name) -> KernelValue:
        if node.id in self._bound:
            value = self._bound[node.id]
            if isinstance(value, _Variable):
                return self._loaded(value.number, value.pointer)
            return value
        return self._known(node, self._object(node))

    def _known(self, node: ast.expr, value: object) -> KernelValue:
        if not isinstance(value, bool | int | float):
            raise self._refuse(node, f"{ast.unparse(node)} has no value here")
        return constant(value)

    def _loaded(self, number: NumberType, pointer: str) -> NumberValue:
        loaded = self._new(f"load {number.stored}, ptr {pointer}")
        return NumberValue(number, self._new(f"trunc i8 {loaded} to i1") if number == BOOL else loaded)

    def _stored(self, number: NumberType, pointer: str, value: NumberValue) -> None:
        text = self._cast(value, number).text
        if number == BOOL:
            text = self._new(f"zext i1 {text} to i8")
        self._line(f"store {number.stored} {text}, ptr {pointer}")

    def _tuple(self, node: ast.Tuple) -> KernelValue:
        return Several(tuple([self._expression(entry) for entry in node.elts]))

    def _binary(self, node: ast.BinOp) -> KernelValue:
        a, b = self._number(node.left), self._number(node.right)
        return self._operation(node, type(node.op), a, b)

    def _unary(self, node: ast.UnaryOp) -> KernelValue:
        if isinstance(node.op, ast.Not):
            value = self._truth(node.operand)
            if value.known is not None:
                return constant(not value.known)
            return NumberValue(BOOL, self._new(f"xor i1 {value.text}, true"))
        value = self._number(node.operand)
        if not isinstance(node.op, ast.USub):
            raise self._refuse(node, ast.unparse(node))
        if value.known is not None and value.number in (INT64, FLOAT64):
            return constant(-value.known)
        if value.number.kind == "f":
            return NumberValue(value.number, self._new(f"fneg {value.number.text} {value.text}"))
        return self._operation(node, ast.Sub, constant(0), value)

    def _logical(self, node: ast.BoolOp) -> KernelValue:
        """Write ``and`` or ``or`` of truth values; later ones are computed only if they are needed."""
        is_and = isinstance(node.op, ast.And)
        value = self._truth(node.values[0])
        for other in node.values[1:]:
            if value.known is not None:
                if bool(value.known) != is_and:
                    return value
                value = self._truth(other)
                continue
            first = value

            def computed(other: ast.expr = other) -> NumberValue:
                return self._truth(other)

            def decided() -> NumberValue:
                return constant(not is_and)

            arms = (computed, decided) if is_and else (decided, computed)
            value = self._merged(first.text, *arms)
        return value

    def _choice(self, node: ast.IfExp) -> KernelValue:
        condition = self._truth(node.test)
        if condition.known is not None:
            return self._expression(node.body if condition.known else node.orelse)
        return self._merged(condition.text, lambda: self._number(node.body), lambda: self._number(node.orelse))

    def _merged(self, condition: str, yes: Callable[[], NumberValue], no: Callable[[], NumberValue]) -> NumberValue:
        """Return one of two numbers: a selection if both are computed by arithmetic alone, else by a branch."""
        before, block = self._lines, self._block
        self._lines = []
        a, b = yes(), no()
        tried, self._lines = self._lines, before
        if self._block == block and not any(" load " in line or " call " in line or "div " in line for line in tried):
            self._lines += tried
            return self._of_two(condition, common_type(a.number, b.number), a, b)
        self._block = block
        number, ends, values = common_type(a.number, b.number), list[str](), list[str]()
        labels = self._label(), self._label()
        joined = self._label()
        self._branch(condition, *labels)
        for label, arm in zip(labels, (yes, no), strict=True):
            self._start(label)
            values.append(self._cast(arm(), number).text)
            ends.append(self._block)
            self._jump(joined)
        self._start(joined)
        pairs = ", ".join(f"[ {value}, %{end} ]" for value, end in zip(values, ends, strict=True))
        return NumberValue(number, self._new(f"phi {number.text} {pairs}"))

    def _compare(self, node: ast.Compare) -> KernelValue:
        if len(node.ops) != 1:
            raise self._refuse(node, "a chain of comparisons")
        operation, other = node.ops[0], node.comparators[0]
        if isinstance(operation, ast.Is | ast.IsNot):
            is_none = isinstance(self._expression(node.left), NoValue) == isinstance(self._expression(other), NoValue)
            return constant(is_none == isinstance(operation, ast.Is))
        value = self._number(node.left)
        if isinstance(operation, ast.In | ast.NotIn):
            if not isinstance(other, ast.Tuple):
                raise self._refuse(node, ast.unparse(node))
            text = "false"
            for entry in other.elts:
                text = self._new(f"or i1 {text}, {self._compared(node, ast.Eq, value, self._number(entry)).text}")
            return NumberValue(BOOL, self._new(f"xor i1 {text}, true") if isinstance(operation, ast.NotIn) else text)
        second = self._number(other)
        if value.known is not None and second.known is not None and type(operation) in _COMPARED:
            how = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
            how |= {ast.Eq: operator.eq, ast.NotEq: operator.ne}
            return constant(bool(how[type(operation)](value.known, second.known)))
        return self._compared(node, type(operation), value, second)

    def _attribute(self, node: ast.Attribute) -> KernelValue:
        if (value := self._object(node)) is not None:
            return self._known(node, value)
        of = self._expression(node.value)
        if isinstance(of, Record):
            return self._loaded(INT64, self._field(of, node))
        if isinstance(of, TableAt):
            return self._rows(of, node)
        if node.attr == "shape" and isinstance(of, Array | Rows):
            return Several(tuple([NumberValue(INT64, size) for size in of.shape]))
        if node.attr == "size" and isinstance(of, Array):
            size = of.shape[0]
            for other in of.shape[1:]:
                size = self._new(f"mul i64 {size}, {other}")
            return NumberValue(INT64, size)
        if node.attr == "itemsize" and isinstance(of, Array):
            return constant(of.item.item_bytes)
        raise self._refuse(node, ast.unparse(node))

    def _field(self, record: Record, node: ast.Attribute) -> str:
        if node.attr not in record.fields:
            raise self._refuse(node, f"{node.attr} is none of {' '.join(record.fields)}")
        return self._new(f"getelementptr inbounds i64, ptr {record.data}, i64 {record.fields.index(node.attr)}")

    def _rows(self, table: TableAt, node: ast.Attribute) -> Rows:
        """Read the address and the lengths of a table's array: they are constant as long as the kernel runs."""
        arrays = table.kind.arrays
        names = [name for name, _, _ in arrays]
        if node.attr not in names:
            raise self._refuse(node, f"{table.kind.name} has no {node.attr}")
        number = names.index(node.attr)
        _, dtype, dims = arrays[number]
        at = sum(1 + earlier for _, _, earlier in arrays[:number])

        def word(n: int, kind: str) -> str:
            pointer = self._new(f"getelementptr inbounds i64, ptr {table.data}, i64 {at + n}")
            return self._new(f"load {kind}, ptr {pointer}, !invariant.load !0")

        data, shape = word(0, "ptr"), tuple(word(1 + n, "i64") for n in range(dims))
        if dtype.names is None and number_of(dtype) != INT64:
            raise self._refuse(node, "a table of other numbers than int64")
        return Rows(dtype.names or (), data, shape)

    # ------------------------------------------------------------ elements

    def _subscript(self, node: ast.Subscript) -> KernelValue:
        of = self._expression(node.value)
        if isinstance(of, Several):
            return self._entry(of, node)
        if isinstance(of, Rows):
            return self._row(of, node)
        if isinstance(of, Array):
            value = self._view(of, node)
            return self._loaded(of.item, value.data) if not value.shape else value
        raise self._refuse(node, ast.unparse(node))

    def _entry(self, of: Several, node: ast.Subscript) -> KernelValue:
        index = node.slice
        if isinstance(index, ast.Slice):
            ends = [None if end is None else self._number(end).known for end in (index.lower, index.upper)]
            if index.step is None and None not in (ends[0] is None or ends[0], ends[1] is None or ends[1]):
                return Several(of.entries[slice(*(None if end is None else int(end) for end in ends))])
        elif (known := self._number(index).known) is not None:
            return of.entries[int(known)]
        raise self._refuse(node, f"{ast.unparse(node)}: an entry of a tuple by a variable")

    def _row(self, of: Rows, node: ast.Subscript) -> KernelValue:
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        at = self._index(indices[0])
        if len(of.shape) == 2:
            at = self._new(f"mul i64 {at}, {of.shape[1]}")
            if len(indices) == 2:
                at = self._new(f"add i64 {at}, {self._index(indices[1])}")
        elif len(indices) != 1 or not of.shape:
            raise self._refuse(node, ast.unparse(node))
        width = max(1, len(of.fields))
        kind = "i64" if width == 1 else f"[{width} x i64]"
        data = self._new(f"getelementptr inbounds {kind}, ptr {of.data}, i64 {at}")
        if len(indices) < len(of.shape):
            return Rows(of.fields, data, of.shape[1:])
        return Record(of.fields, data) if of.fields else self._loaded(INT64, data)

    def _view(self, of: Array, node: ast.Subscript) -> Array:
        """Return the part of an array that indices select; one without axes is an element."""
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        shape, strides, offset = list[str](), list[str](), "0"
        if len(indices) > len(of.shape):
            raise self._refuse(node, ast.unparse(node))
        for axis, (size, stride) in enumerate(zip(of.shape, of.strides, strict=True)):
            index = indices[axis] if axis < len(indices) else ast.Slice()
            start = "0"
            if isinstance(index, ast.Slice):
                if index.step is not None:
                    raise self._refuse(node, "a step of a slice")
                start = self._least(self._index(index.lower), size) if index.lower else "0"
                end = self._least(self._index(index.upper), size) if index.upper else size
                shape.append(end if start == "0" else self._new(f"sub i64 {end}, {start}"))
                strides.append(stride)
            else:
                start = self._index(index)
            if start != "0":
                step = start if stride == "1" else self._new(f"mul i64 {start}, {stride}")
                offset = step if offset == "0" else self._new(f"add i64 {offset}, {step}")
        if strides and strides[-1] != "1":
            raise self._refuse(node, f"{ast.unparse(node)}: neighbours of this view are not next to one another")
        kind, data = of.item.stored, of.data
        data = data if offset == "0" else self._new(f"getelementptr inbounds {kind}, ptr {data}, i64 {offset}")
        return Array(of.item, data, tuple(shape), tuple(strides))

    def _least(self, a: str, b: str) -> str:
        is_less = self._new(f"icmp slt i64 {a}, {b}")
        return self._new(f"select i1 {is_less}, i64 {a}, i64 {b}")

    # ------------------------------------------------------------ calls

    def _call(self, node: ast.Call) -> KernelValue:
        called = self._object(node.func)
        if node.keywords or called is None:
            raise self._refuse(node, ast.unparse(node))
        arguments = [self._expression(argument) for argument in node.args]
        if isinstance(called, InlinedFunction):
            return self._called(called, arguments)
        if called is len and isinstance(arguments[0], Array | Rows):
            return NumberValue(INT64, arguments[0].shape[0])
        scalars = [value for value in arguments if isinstance(value, NumberValue)]
        if not scalars or len(scalars) < len(arguments):
            raise self._refuse(node, ast.unparse(node))
        if isinstance(called, Intrinsic):
            return self._intrinsic(called, scalars)
        if called in (min, max):
            return self._extreme(node, ast.Lt if called is min else ast.Gt, scalars)
        if called is abs:
            return self._magnitude(scalars[0])
        if isinstance(called, type) and called.__name__.rstrip("_") in NUMBERS:
            return self._cast(scalars[0], NUMBERS[called.__name__.rstrip("_")])
        return self._of_numpy(node, called, scalars)

    def _called(self, called: InlinedFunction, arguments: Sequence[KernelValue]) -> KernelValue:
        function = called.function
        assert isinstance(function, FunctionType)
        name, result = self.module.function(function, arguments)
        passed = ", ".join(f"{kind} {text}" for value in arguments for kind, text in words(value))
        kind = result_type(result)
        if kind == "void":
            self._line(f"call void {name}({passed})")
            return result
        text = self._new(f"call {kind} {name}({passed})")
        if isinstance(result, NumberValue):
            return NumberValue(result.number, text)
        parts = [self._new(f"extractvalue {kind} {text}, {n}") for n, _ in enumerate(words(result))]
        return renamed(result, iter(parts))

    def _intrinsic(self, called: Intrinsic, scalars: Sequence[NumberValue]) -> NumberValue:
        target = NUMBERS[called.target]
        if called.source == "fma":
            return self._of_llvm("fma", target, [self._cast(value, target) for value in scalars])
        value = self._cast(scalars[0], NUMBERS[called.source])
        return NumberValue(target, self._new(f"bitcast {value.number.text} {value.text} to {target.text}"))

    def _of_llvm(self, name: str, number: NumberType, scalars: Sequence[NumberValue]) -> NumberValue:
        function = f"@llvm.{name}.f{number.bits}"
        kinds = ", ".join([number.text] * len(scalars))
        self.module.declared[f"declare {number.text} {function}({kinds})"] = None
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

    def _of_numpy(self, node: ast.Call, called: object, scalars: Sequence[NumberValue]) -> NumberValue:
        number = scalars[0].number
        if number.kind == "f" and called is np.isnan:
            return NumberValue(BOOL, self._new(f"fcmp uno {number.text} {scalars[0].text}, {scalars[0].text}"))
        try:
            name = _OF_NUMPY.get(called)
        except TypeError:
            name = None
        if name is None or any(value.number != number for value in scalars) or number.kind != "f":
            raise self._refuse(node, ast.unparse(node))
        return self._of_llvm(name, number, scalars)

    # ------------------------------------------------------------ statements

    def _body(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            if self._is_closed:
                return
            write = self._statements.get(type(statement))
            if write is None:
                raise self._refuse(statement, type(statement).__name__)
            write(statement)

    def _expression_statement(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self._expression(node.value)

    def _bind(self, name: str, value: KernelValue) -> None:
        """Give a variable a value: a number is stored, anything else is a name for it."""
        if isinstance(value, NumberValue) and name in self._assigned:
            variable = self._bound.get(name)
            number = self.types.setdefault(name, value.number)
            if number != value.number:
                wider = _unified(number, value.number)
                if wider is None:
                    raise self._refuse(self.source, f"{name} is {number.text} and {value.number.text}")
                self.is_stale |= wider != number
                self.types[name] = wider
            if not isinstance(variable, _Variable):
                variable = self._bound[name] = _Variable(number, self._allocate(number))
            self._stored(variable.number, variable.pointer, value)
        elif self._assigned.get(name, 0) > (0 if name in self._bound else 1) or isinstance(
            self._bound.get(name), _Variable
        ):
            raise self._refuse(self.source, f"{name} is assigned more than once, and not only with numbers")
        else:
            self._bound[name] = value

    def _assign(self, node: ast.Assign) -> None:
        value = self._expression(node.value)
        for target in node.targets:
            self._put(target, value)

    def _assign_annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._put(node.target, self._expression(node.value))

    def _put(self, target: ast.expr, value: KernelValue) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, value)
        elif isinstance(target, ast.Tuple):
            if not isinstance(value, Several) or len(value.entries) != len(target.elts):
                raise self._refuse(target, f"{ast.unparse(target)} = a value of another form")
            for entry, part in zip(target.elts, value.entries, strict=True):
                self._put(entry, part)
        elif isinstance(value, NumberValue):
            self._stored(*self._place(target), value)
        else:
            raise self._refuse(target, f"{ast.unparse(target)} = no number")

    def _place(self, target: ast.expr) -> tuple[NumberType, str]:
        """Return the type and the address of an element or of a field."""
        if isinstance(target, ast.Attribute):
            of = self._expression(target.value)
            if isinstance(of, Record):
                return INT64, self._field(of, target)
        elif isinstance(target, ast.Subscript):
            of = self._expression(target.value)
            if isinstance(of, Array) and not (view := self._view(of, target)).shape:
                return of.item, view.data
            if isinstance(of, Rows) and not of.fields:
                return INT64, self._element(of, target)
        raise self._refuse(target, f"{ast.unparse(target)} = ...")

    def _element(self, of: Rows, target: ast.Subscript) -> str:
        """Return the address of an int64 of a table."""
        count = len(self._lines)
        value = self._row(of, target)
        if not isinstance(value, NumberValue):
            raise self._refuse(target, f"{ast.unparse(target)} = ...")
        del self._lines[-1]  # the load of its present value
        assert len(self._lines) > count
        return self._lines[-1].split()[0]

    def _assign_changed(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            changed = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
            self._bind(node.target.id, self._binary(ast.copy_location(changed, node)))
            return
        number, pointer = self._place(node.target)
        value = self._number(node.value)
        result = self._operation(node, type(node.op), self._loaded(number, pointer), value)
        self._stored(number, pointer, result)

    def _for(self, node: ast.For) -> None:
        loop = node.iter
        is_range = isinstance(loop, ast.Call) and self._object(loop.func) is range
        if not is_range or node.orelse or not isinstance(node.target, ast.Name):
            raise self._refuse(node, "a loop over anything but a range")
        assert isinstance(loop, ast.Call)
        numbers = [self._cast(self._number(entry), INT64) for entry in loop.args]
        start, stop = (constant(0), *numbers) if len(numbers) == 1 else numbers[:2]
        step = numbers[2] if len(numbers) > 2 else constant(1)
        if step.known is None or step.known < 1:
            raise self._refuse(node, "a range whose step is not a known positive number")
        counter, labels = self._allocate(INT64), [self._label() for _ in range(4)]
        check, inside, following, after = labels
        self._stored(INT64, counter, start)
        self._jump(check)
        self._start(check)
        now = self._loaded(INT64, counter)
        self._branch(self._compared(node, ast.Lt, now, stop).text, inside, after)
        self._start(inside)
        self._bind(node.target.id, now)
        self._loop_body(node.body, following, after)
        self._start(following)
        self._stored(INT64, counter, self._operation(node, ast.Add, self._loaded(INT64, counter), step))
        self._jump(check)
        self._start(after)

    def _while(self, node: ast.While) -> None:
        check, inside, after = self._label(), self._label(), self._label()
        if node.orelse:
            raise self._refuse(node, "while ... else")
        self._jump(check)
        self._start(check)
        self._branch(self._truth(node.test).text, inside, after)
        self._start(inside)
        self._loop_body(node.body, check, after)
        self._start(after)

    def _loop_body(self, body: Sequence[ast.stmt], following: str, after: str) -> None:
        self._loops.append((following, after))
        self._body(body)
        self._loops.pop()
        if not self._is_closed:
            self._jump(following)

    def _if(self, node: ast.If) -> None:
        condition = self._truth(node.test)
        if condition.known is not None:
            self._body(node.body if condition.known else node.orelse)
            return
        yes, no, after = self._label(), self._label(), self._label()
        self._branch(condition.text, yes, no if node.orelse else after)
        closed = []
        for label, body in ((yes, node.body), (no, node.orelse)):
            if label == no and not body:
                closed.append(False)
                continue
            self._start(label)
            self._body(body)
            closed.append(self._is_closed)
            if not self._is_closed:
                self._jump(after)
        if all(closed):
            self._is_closed = True
        else:
            self._start(after)

    def _return(self, node: ast.Return) -> None:
        value = NoValue() if node.value is None else self._expression(node.value)
        result = self._unified_result(node, value)
        kind, parts = result_type(result), list(words(result))
        if kind == "void":
            self._line("ret void")
        elif isinstance(value, NumberValue) and isinstance(result, NumberValue):
            self._line(f"ret {kind} {self._cast(value, result.number).text}")
        else:
            text = "undef"
            for n, ((of, name), (_, given)) in enumerate(zip(parts, words(value), strict=True)):
                del name
                text = self._new(f"insertvalue {kind} {text}, {of} {given}, {n}")
            self._line(f"ret {kind} {text}")
        self._is_closed = True

    def _unified_result(self, node: ast.Return, value: KernelValue) -> KernelValue:
        """Return the form of the function's result, now that it may also be this value."""
        known = self.types.get("return")
        if isinstance(value, NumberValue):
            wider = value.number if known is None else _unified(known, value.number)
            if wider is None or not isinstance(self.result, NumberValue | NoValue):
                raise self._refuse(node, "results of different types")
            self.is_stale |= known is not None and wider != known
            self.types["return"] = wider
            self.result = NumberValue(wider, "")
        elif isinstance(self.result, NoValue):
            self.result = value
        elif form_of(self.result) != form_of(value):
            raise self._refuse(node, "results of different forms")
        return self.result


class _Variable(KernelValue):
    """A variable: the type and the address of its number."""

    __slots__ = ("number", "pointer")

    def __init__(self, number: NumberType, pointer: str) -> None:
        self.number, self.pointer = number, pointer


def _unified(a: NumberType, b: NumberType) -> NumberType | None:
    """Return the type of a variable that has numbers of two types; None if one would lose its value or its type."""
    if a == b:
        return a
    if {a.kind, b.kind} <= {"i", "b"}:
        return a if a.bits > b.bits else b
    return None


def _assigned_in(source: ast.FunctionDef) -> dict[str, int]:
    """Return the names that a function assigns, with the number of places where it does so."""
    counts: dict[str, int] = {}
    for name in _stored_names(source):
        counts[name] = counts.get(name, 0) + 1
    return counts


def _stored_names(source: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(source):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
