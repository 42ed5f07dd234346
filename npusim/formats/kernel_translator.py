"""Translation of kernels to LLVM's text: one pass over the syntax tree of each function.

numba translates any function of Python, by a dozen passes over its bytecode.  Kernels are a small language, in which
the type of an expression follows from the types of its parts: numbers, arrays, tables of records, tuples, loops over
ranges, and calls of functions that are translated too.  One pass takes a tenth of the time.  The results are those of
numba (`tests/formats/test_kernel_translator.py`): its types, and its rounding after every operation.

A variable has one type; a variable that is a tuple, an array or a record is assigned in only one place.  Indices must
not be negative, and slices must be inside their array; this is not checked.  A quotient rounds down, and is 0 if the
divisor is 0.  Anything else is refused with its line (`TranslationError`).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

from npusim.formats.kernel_expressions import Expressions
from npusim.formats.kernel_values import (
    BOOL,
    INT64,
    Array,
    KernelValue,
    NoValue,
    NumberType,
    NumberValue,
    Record,
    Rows,
    Several,
    TranslationError,
    VariableAt,
    argument,
    constant,
    form_of,
    renamed,
    result_type,
    words,
)

if TYPE_CHECKING:
    from npusim.formats.kernel_parts import ArgumentType

#: The name of a kernel's entry, which is called by address.
ENTRY = "kernel"


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
            self._functions[key] = name, NoValue()  # a function that calls itself is refused: it returns nothing yet
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
        self.declared |= writer.declared
        parameters = ", ".join(f"{kind} {text}" for value in given for kind, text in words(value))
        result = writer.result
        # LLVM checks before a loop whether its arrays overlap. It would move this check out of the enclosing loops,
        # where rows of one array do overlap; so a function with a loop is called, not inlined. This also shortens
        # compilation.
        has_loop = any(isinstance(node, ast.For) for node in ast.walk(writer.source))
        attributes = "noinline nounwind" if has_loop else "nounwind"
        self.texts.append(
            f"define internal {result_type(result)} {name}({parameters}) {attributes} {{\n{writer.text()}\n}}\n"
        )
        return result


def translated(function: FunctionType, kinds: tuple[ArgumentType, ...]) -> tuple[str, bool]:
    """Return LLVM's text of a kernel for arguments of some types, and whether it returns a number.

    The entry takes the numbers and addresses of `npusim.formats.jit`, and returns an int64, which is 0 if the kernel
    returns nothing.
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
        raise TranslationError(f"{function.__qualname__}: must return nothing or an int64")
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


class FunctionWriter(Expressions):
    """Writes one function for arguments of given forms."""

    def __init__(
        self, module: Module, function: FunctionType, arguments: Sequence[KernelValue], types: dict[str, NumberType]
    ) -> None:
        self.source, self.types = source_of(function), types
        super().__init__(module, function, _assigned_in(self.source))
        self.result: KernelValue = NoValue()
        #: Whether a variable's type is wider than an earlier statement assumed. If so, the function is written again
        #: with the types that are then known.
        self.is_stale = False
        self._loops: list[tuple[str, str]] = []
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

    def write(self) -> None:
        """Translate the statements."""
        self._body(self.source.body)
        if not self._is_closed:
            self._line("ret void" if isinstance(self.result, NoValue) else "unreachable")

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
        """Give a variable a value: a number is stored in memory; of any other value the variable is only a name."""
        if isinstance(value, NumberValue) and name in self._assigned:
            variable = self._bound.get(name)
            number = self.types.setdefault(name, value.number)
            if number != value.number:
                wider = _unified(number, value.number)
                if wider is None:
                    raise self._refuse(self.source, f"{name} is {number.text} and {value.number.text}")
                self.is_stale |= wider != number
                self.types[name] = wider
            if not isinstance(variable, VariableAt):
                variable = self._bound[name] = VariableAt(number, self._allocate(number))
            self._stored(variable.number, variable.pointer, value)
        elif self._assigned.get(name, 0) > (0 if name in self._bound else 1) or isinstance(
            self._bound.get(name), VariableAt
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
        """Return the form of the function's result after one more statement returns ``value``."""
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


def _unified(a: NumberType, b: NumberType) -> NumberType | None:
    """Return the type of a variable that has integers or truth values of two types; None for other pairs of types."""
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
