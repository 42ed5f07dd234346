"""Kernels that gather rows by integer arithmetic, drawn as text, and a walk of that text program by program.

The walk computes whole numbers of Python and wraps them to their type after each operation, as Triton's language has
it; nothing of the importer is used.
"""

from __future__ import annotations

import ast
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROWS, COLUMNS, BLOCK = 12, 24, 32
TYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Int(NamedTuple):
    """An integer of a type of Triton's, or a block of them: an array of Python's."""

    value: Any
    kind: str

    @property
    def bits(self) -> int:
        return int(self.kind.removeprefix("u").removeprefix("int"))

    def to(self, kind: str) -> Int:
        bits = Int(0, kind).bits
        low = 0 if kind.startswith("u") else -1 << bits - 1
        return Int((self.value - low) % (1 << bits) + low, kind)


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
    ast.BitAnd: lambda a, b: a & b,
    ast.BitOr: lambda a, b: a | b,
    ast.BitXor: lambda a, b: a ^ b,
    ast.LShift: lambda a, b: a << b,
    ast.RShift: lambda a, b: a >> b,
}
_RELATIONS: dict[type, Callable[[int, int], bool]] = {
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
}


OPERATIONS = ("+", "-", "*", "*", "//", "%", "&", "|", "^", "<<", ">>", ">>", "minimum", "maximum", "where")


class Kernel(NamedTuple):
    """The text of a kernel ``k``, its grid, its arrays by parameter, and its numbers."""

    text: str
    programs: int
    arrays: dict[str, Any]
    numbers: dict[str, int]


class _Drawn:
    """Statements of a kernel as they are drawn; ``kinds``: the integers so far with their types."""

    def __init__(self, rng: np.random.Generator, kinds: Mapping[str, str]) -> None:
        self.rng, self.kinds, self.lines = rng, dict(kinds), list[str]()

    def pick(self, some: Any) -> Any:
        return some[int(self.rng.integers(len(some)))]

    def operand(self, kind: str) -> str:
        name = self.pick(list(self.kinds))
        return name if self.kinds[name] == kind else f"{name}.to(tl.{kind})"

    def literal(self, kind: str) -> int:
        bits = Int(0, kind).bits
        value = int(self.rng.integers(-(2 ** min(bits - 1, 40)), 2 ** min(bits - 1, 40)))
        value = value if self.rng.integers(2) else int(self.rng.integers(-9, 99))
        return abs(value) if kind.startswith("u") else value

    def expression(self, kind: str, how: str) -> str:
        a, b, bits = self.operand(kind), self.operand(kind), Int(0, kind).bits
        if how in ("minimum", "maximum"):
            return f"tl.{how}({a}, {b})"  # a number would have int32 there
        if how == "where":
            relation = self.pick(["<", "<=", ">", ">=", "==", "!="])
            return f"tl.where({a} {relation} {self.pick([b, self.literal(kind)])}, {b}, {self.operand(kind)})"
        if how in ("//", "%"):
            divisor = f"(({b} & 15) + 1)"
            return f"{a} {how} {divisor if kind.startswith('u') or self.rng.integers(2) else f'(0 - {divisor})'}"
        if how in ("<<", ">>"):
            return f"{a} {how} ({b} & {bits - 1})"
        return f"{a} {how} {self.pick([b, self.literal(kind)])}"

    def define(self, indent: str = "    ", name: str = "", kind: str = "", how: Sequence[str] = OPERATIONS) -> None:
        kind, name = kind or self.pick(TYPES), name or f"v{len(self.kinds)}"
        self.lines.append(f"{indent}{name} = {self.expression(kind, self.pick(how))}")
        self.kinds[name] = kind

    def choose(self) -> None:
        """Draw an if that all of a program's elements answer alike."""
        kind, name = self.pick(TYPES), f"v{len(self.kinds)}"
        self.lines.append(f"    if {self.operand(kind)} {self.pick(['<', '>=', '!='])} {self.literal(kind)}:")
        before = dict(self.kinds)
        self.define("        ", name, kind)
        self.kinds = dict(before)
        self.lines.append("    else:")
        self.define("        ", name, kind)

    def row(self, name: str, most: int) -> None:
        """Draw which of ``most`` rows, or groups of rows, a program reads, within the tensor or, sometimes, beyond."""
        last = list(self.kinds)[-1]
        self.lines.append(
            f"    {name} = "
            + self.pick(
                [
                    f"({last}.to(tl.uint32) % {most}).to(tl.int32)",
                    f"tl.minimum(tl.maximum({last}.to(tl.int32), 0), {most - 1})",
                    f"({last}.to(tl.int64) % {most} + {most - 1}).to(tl.int32) // 2",
                    f"tl.minimum({last}.to(tl.uint16), {most - 1}).to(tl.int32)",
                    f"({last}.to(tl.uint8) % {most + 1}).to(tl.int32)",
                    f"({last}.to(tl.int16) % {most}).to(tl.int32)",
                ]
            )
        )


def drawn(number: int) -> Kernel:
    """Return one of the kernels; groups of rows that are the same in all programs have no reading."""
    made = (_drawn(np.random.default_rng([7, number, i])) for i in itertools.count())
    return next(x for x in made if x.numbers["tall"] == 1 or len(set(walked(x))) > 1)


def _drawn(rng: np.random.Generator) -> Kernel:
    programs, looked = int(rng.integers(2, 9)), TYPES[int(rng.integers(len(TYPES)))]
    kinds = {"p": "int32", "n": "int32", "t": looked}
    draw = _Drawn(rng, kinds)
    for _ in range(int(rng.integers(2, 7))):
        draw.choose() if rng.integers(5) == 0 else draw.define()
    tall = int(draw.pick([1, 1, 4]))
    draw.row("i", ROWS // tall)
    if rng.integers(4) == 0:
        draw.lines.insert(0, f"    if t.to(tl.int32) % 3 {draw.pick(['==', '!='])} 0:\n        return")
    draw.lines += ["    c = tl.arange(0, B)"]
    x, y, keep = "X + i * xs + c", "Y + p * ys + c", "c < C"
    if tall > 1:
        draw.lines.append(f"    r = tl.arange(0, {tall})")
        x, y = f"X + (i * {tall} + r)[:, None] * xs + c[None]", f"Y + (p * {tall} + r)[:, None] * ys + c[None]"
        keep = "(c < C)[None]"
    draw.lines += [f"    x = tl.load({x}, mask={keep}, other=0.0)", f"    tl.store({y}, x, mask={keep})"]
    head = ["import triton", "import triton.language as tl", "", "", "@triton.jit"]
    head += ["def k(X, T, Y, n, xs, ys, C, B: tl.constexpr):", "    p = tl.program_id(0)", "    t = tl.load(T + p)"]
    info = np.iinfo(looked)
    table = rng.integers(info.min, info.max, programs, dtype=looked, endpoint=True)
    table[:2] = rng.integers(0, 9, 2)
    arrays = {"X": np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS), "T": table}
    arrays["Y"] = np.zeros((programs * tall, COLUMNS), np.float32)
    return Kernel(
        "\n".join([*head, *draw.lines, ""]), programs, arrays, {"n": int(rng.integers(2, 2**31)), "tall": tall}
    )


def drawn_block(number: int) -> Kernel:
    """Return a kernel that reads elements of its row by the integers of a block, which may be no linear ones."""
    made = (_drawn_block(np.random.default_rng([8, number, i])) for i in itertools.count())
    return next(x for x in made if len({*np.atleast_1d(Program(x, 0).names["k"].value)}) > 1)


def _drawn_block(rng: np.random.Generator) -> Kernel:
    draw = _Drawn(rng, {"p": "int32", "c": "int32"})
    for _ in range(int(rng.integers(1, 3))):
        draw.define(kind=draw.pick(["int32", "uint32", "uint8"]), how=["+", "-", "*", "//", "%", "&", ">>", "minimum"])
    last = list(draw.kinds)[-1]
    index = draw.pick([f"{last}.to(tl.int32)", f"({last}.to(tl.uint32) % {COLUMNS}).to(tl.int32)", "c", "c", "c % 10"])
    draw.lines.append(f"    k = {index}")
    some = [
        f"c < {int(rng.integers(1, BLOCK))}",
        f"{last} < {int(rng.integers(0, 40))}",
        f"k < {int(rng.integers(1, BLOCK))}",
    ]
    some += [f"(c < {COLUMNS}) & (k < {int(rng.integers(1, 40))})", *[f"c < {COLUMNS}"] * 4]
    draw.lines += [f"    m = {draw.pick(some)}", "    x = tl.load(X + p * xs + k, mask=m, other=0.0)"]
    sums = bool(rng.integers(2))
    draw.lines.append("    tl.store(Y + p, tl.sum(x))" if sums else "    tl.store(Y + p * ys + c, x, mask=c < C)")
    head = ["import triton", "import triton.language as tl", "", "", "@triton.jit"]
    head += ["def k(X, Y, n, xs, ys, C, B: tl.constexpr):", "    p = tl.program_id(0)", "    c = tl.arange(0, B)"]
    arrays = {"X": np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)}
    arrays["Y"] = np.zeros(ROWS if sums else (ROWS, COLUMNS), np.float32)
    return Kernel("\n".join([*head, *draw.lines, ""]), ROWS, arrays, {"n": 7})


def walked_blocks(kernel: Kernel) -> Any:
    """Return what a kernel of `drawn_block` stores; None where a program reads beyond the tensor."""
    flat, stores = kernel.arrays["X"].ravel(), []
    for number in range(kernel.programs):
        names = Program(kernel, number).names
        at, mask = (np.broadcast_to(x, (BLOCK,)) for x in (names["k"].value, names["m"]))
        at, mask = number * COLUMNS + at.astype(object), mask.astype(bool)
        if any(not 0 <= i < flat.size for i in at[mask]):
            return None
        stores.append([float(flat[i]) if is_read else 0.0 for i, is_read in zip(at, mask, strict=True)])
    every = np.array(stores, np.float32)
    return every.sum(1) if kernel.arrays["Y"].ndim == 1 else every[:, :COLUMNS]


class Program:
    """One program of a kernel: its integers and masks by name, up to the first load of floats."""

    def __init__(self, kernel: Kernel, number: int) -> None:
        table = kernel.arrays.get("T")
        self.looked = None if table is None else Int(int(table[number]), str(table.dtype))
        self.names: dict[str, Any] = {"p": Int(number, "int32"), "n": Int(kernel.numbers["n"], "int32")}
        (function,) = (x for x in ast.parse(kernel.text).body if isinstance(x, ast.FunctionDef))
        self.is_left = self.run(function.body)

    def run(self, body: list[ast.stmt]) -> bool:
        """Do some statements up to the first load of floats; return whether the program returns early."""
        for node in body:
            if isinstance(node, ast.Return):
                return True
            if isinstance(node, ast.If):
                if self.run(node.body if self.value(node.test) else node.orelse):
                    return True
            elif isinstance(node, ast.Assign):
                (name,) = (t.id for t in node.targets if isinstance(t, ast.Name))
                if name == "x":
                    return False
                if name not in ("p", "r"):
                    self.names[name] = self.value(node.value)
        return False

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self.names[node.id]
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(node.operand)
            case ast.BinOp(op=ast.BitAnd(), left=ast.Compare(), right=ast.Compare()):
                return np.logical_and(self.value(node.left), self.value(node.right))
            case ast.BinOp():
                a, b = self.pair(node.left, node.right)
                return Int(np.frompyfunc(_OPERATORS[type(node.op)], 2, 1)(a.value, b.value), a.kind).to(a.kind)
            case ast.Compare(ops=[relation], comparators=[right]):
                a, b = self.pair(node.left, right)
                return np.frompyfunc(_RELATIONS[type(relation)], 2, 1)(a.value, b.value)
            case ast.Call(func=ast.Attribute(attr="to"), args=[ast.Attribute(attr=kind)]):
                return self.value(node.func.value).to(kind)  # type: ignore[attr-defined]
            case ast.Call(func=ast.Attribute(attr="load")):
                return self.looked
            case ast.Call(func=ast.Attribute(attr="arange")):
                return Int(np.array([*range(BLOCK)], object), "int32")
            case ast.Call(func=ast.Attribute(attr="where"), args=[test, one, other]):
                a, b = self.pair(one, other)
                return Int(
                    np.frompyfunc(lambda t, x, y: x if t else y, 3, 1)(self.value(test), a.value, b.value), a.kind
                )
            case ast.Call(func=ast.Attribute(attr=name), args=[one, other]):
                a, b = self.pair(one, other)
                return Int(np.frompyfunc({"minimum": min, "maximum": max}[name], 2, 1)(a.value, b.value), a.kind)
        raise AssertionError(ast.unparse(node))

    def pair(self, *nodes: ast.expr) -> tuple[Int, Int]:
        """Return two operands; a number has the type of the other."""
        a, b = map(self.value, nodes)
        kind = a.kind if isinstance(a, Int) else b.kind
        one, other = (x if isinstance(x, Int) else Int(x, kind) for x in (a, b))
        assert one.kind == other.kind, kind
        return one, other


def walked(kernel: Kernel) -> list[int | None]:
    """Return the row, or group of rows, that each program reads, None of one that returns early."""
    every = [Program(kernel, i) for i in range(kernel.programs)]
    return [None if x.is_left else x.names["i"].value for x in every]
