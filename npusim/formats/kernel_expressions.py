"""Translation of a kernel's expressions to LLVM's text."""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Protocol

import numpy as np

from npusim.formats.kernel_lines import CodeLines
from npusim.formats.kernel_parts import InlinedFunction, Intrinsic
from npusim.formats.kernel_values import (
    BOOL,
    FLOAT64,
    INT64,
    NUMBERS,
    Array,
    KernelValue,
    NoValue,
    NumberValue,
    Record,
    Rows,
    Several,
    TableAt,
    VariableAt,
    common_type,
    constant,
    number_of,
    renamed,
    result_type,
    words,
)

#: Functions of NumPy on floats that are one operation of the processor.
_OF_NUMPY: Mapping[object, str] = MappingProxyType({np.floor: "floor", np.rint: "rint", np.copysign: "copysign"})
#: Comparisons of known numbers.
_KNOWN: Mapping[type[ast.AST], Callable[[float, float], bool]] = MappingProxyType(
    {
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
    }
)


class CalledFunctions(Protocol):
    """The functions that a kernel calls."""

    def function(self, function: FunctionType, arguments: Sequence[KernelValue]) -> tuple[str, KernelValue]:
        """Return the name of a function for arguments of these forms, and the form of its result."""


class Expressions(CodeLines):
    """Writes the expressions of one function."""

    def __init__(self, functions: CalledFunctions, function: FunctionType, assigned: Mapping[str, int]) -> None:
        super().__init__(function)
        self._functions, self._assigned = functions, assigned
        #: What each name stands for: the address of a number, or another value.
        self._bound: dict[str, KernelValue] = {}
        cells = function.__closure__ or ()
        free = zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True)
        self._outside: Mapping[str, object] = {**function.__globals__, **dict(free)}
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

    def _expression(self, node: ast.expr) -> KernelValue:
        write = self._expressions.get(type(node))
        if write is None:
            raise self._refuse(node, ast.unparse(node))
        return write(node)

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

    def _constant(self, node: ast.Constant) -> KernelValue:
        if node.value is None:
            return NoValue()
        if not isinstance(node.value, bool | int | float):
            raise self._refuse(node, ast.unparse(node))
        return constant(node.value)

    def _object(self, node: ast.expr) -> object:
        """Return the object that an expression names, in the module or among the variables that the function closes
        over.
        """
        if isinstance(node, ast.Name) and node.id not in self._assigned and node.id not in self._bound:
            if node.id in self._outside:
                return self._outside[node.id]
            return getattr(builtins, node.id, None)
        if isinstance(node, ast.Attribute) and self._object(node.value) is np:
            return getattr(np, node.attr)
        return None

    def _name(self, node: ast.Name) -> KernelValue:
        if node.id in self._bound:
            value = self._bound[node.id]
            if isinstance(value, VariableAt):
                return self._loaded(value.number, value.pointer)
            return value
        return self._known(node, self._object(node))

    def _known(self, node: ast.expr, value: object) -> KernelValue:
        if not isinstance(value, bool | int | float):
            raise self._refuse(node, f"{ast.unparse(node)} has no value here")
        return constant(value)

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
        """Return one of two numbers: by a selection if both are computed by arithmetic alone, else by a branch."""
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
        if value.known is not None and second.known is not None and type(operation) in _KNOWN:
            return constant(bool(_KNOWN[type(operation)](value.known, second.known)))
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
        """Read the address and the lengths of a table's array, which are constant while the kernel runs."""
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
        """Return the part of an array that indices select; a part without axes is an element."""
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
            raise self._refuse(node, f"{ast.unparse(node)}: this view is not contiguous along its last axis")
        kind, data = of.item.stored, of.data
        data = data if offset == "0" else self._new(f"getelementptr inbounds {kind}, ptr {data}, i64 {offset}")
        return Array(of.item, data, tuple(shape), tuple(strides))

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
        name, result = self._functions.function(function, arguments)
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
