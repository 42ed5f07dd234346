"""The text of TTIR as nested operations, each with its file and line in the kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from npusim.errors import NpusimError, ProgramError
from npusim.kernels.triton.addresses import with_addressed, with_reinterpreted
from npusim.kernels.triton.called_functions import Called, with_calls_inlined
from npusim.kernels.triton.loop_forms import with_counted_loops, with_mask_states
from npusim.kernels.triton.number_classes import with_classes_compared
from npusim.kernels.triton.releases import as_first

#: Names of formats in TTIR.
FORMATS = MappingProxyType(
    {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    | {"f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2"}
)
#: Formats of values of tiles that are integers (`npusim.kernels.triton.whole_numbers`).
WHOLE = MappingProxyType({"i8": "int8", "i16": "float32", "i32": "float32", "i64": "float32"})
#: Bytes of an element in memory, by its type.
BYTES = MappingProxyType(
    {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f64": 8, "f32": 4, "f16": 2, "bf16": 2}
    | {"f8E4M3FN": 1, "f8E5M2": 1}
)
#: Integers of 32 bits that are exact at any magnitude (`npusim.kernels.triton.exact_integers`), the ones among them
#: that are stored with 64 bits, and the formats of both.
EXACT_BITS, EXACT_WIDE = "b32", "b64"
EXACT = MappingProxyType({EXACT_BITS: "int32", EXACT_WIDE: "float64"})
_LOCATION = re.compile(r" ?loc\((#?\w+|\"[^\"]*\"(?:\([^()]*\)|[^()]*)|callsite\([^()]*\))\)")
#: One type in a list of types.
TYPES = re.compile(r"tensor<[^<>]*(?:<[^<>]*>)?[^<>]*>|!tt\.ptr<\w+>|\w+")
#: Nesting depth of regions and types of TTIR: a kernel has a few loops and ifs.
MOST_NESTED = 64
_NAMED = re.compile(r'^(#loc\w*) = loc\(("[^"]*"\(#loc\w*\))\)$', re.MULTILINE)
_FUNCTION = re.compile(r"tt\.func public @(\w+)\((.*)\) attributes")
_PRIVATE = re.compile(r"tt\.func private @([\w.$-]+)\(([^)]*)\)")


class Line(NamedTuple):
    """A place in the kernel's source."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@contextmanager
def refusing(line: Line, what: str) -> Iterator[None]:
    """Raise `ProgramError`, at a line of the kernel, for an error that no rule of the reader covers."""
    try:
        yield
    except (NpusimError, MemoryError):
        raise
    except Exception as error:
        why = f"{what}: npusim has no rule for this use of it ({type(error).__name__}: {error})"
        raise ProgramError(f"{line}: {why}; `npusim help triton` lists the rules") from error


@dataclass(eq=False)
class Op:
    """One operation: results and operands by name, its text, the type after its colon or arrow, and its regions.

    ``otherwise``: the region of an else, or for a ``while`` the region of its body.  A label of a basic block is an
    operation called ``block``, whose results are the block's arguments.  ``place``: as in `Locations.place`; for a
    reduction with the shape of its operand.  ``arguments``: the elements that the region of a reduction or scan
    combines, the first elements and then the second elements.
    """

    name: str
    results: list[str]
    operands: list[str]
    text: str
    type: str
    line: Line
    body: list[Op] = field(default_factory=list)
    otherwise: list[Op] = field(default_factory=list)
    place: str = ""
    arguments: list[str] = field(default_factory=list)

    def within(self) -> Iterator[Op]:
        """Yield the operations in its regions, each before the operations in its own regions."""
        for inner in (*self.body, *self.otherwise):
            yield inner
            yield from inner.within()

    def number(self, key: str) -> int:
        """Return an integer among its attributes."""
        return int(re.findall(rf"\b{key} = (-?\d+)", self.text)[0])

    def numbers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers among its attributes."""
        return tuple(map(int, re.findall(rf"\b{key} = array<i32: ([-\d, ]+)>", self.text)[0].split(",")))

    def fail(self, why: str) -> ProgramError:
        """Return the error of an operation without a counterpart here, at the kernel's line."""
        return ProgramError(f"{self.line}: {why}")


class Function(NamedTuple):
    """A kernel: its parameters with their types, and its operations."""

    name: str
    parameters: dict[str, str]
    operations: list[Op]


def every_of(operations: Sequence[Op]) -> list[Op]:
    """Return operations and, after them, the operations in their regions."""
    return [*operations, *(inner for op in operations for inner in op.within())]


def makers(operations: Iterable[Op]) -> dict[str, Op]:
    """Return the operation of each result; operations inside loops and branches only if they are passed too."""
    return {r: o for o in operations for r in o.results}


@lru_cache(maxsize=8)  # a run reads a kernel's text up to six times: for its faults, its bits, its exact results
def read(text: str) -> Function:
    """Return the kernel of a module of TTIR, shared by all readers; raise `ProgramError` for a text that is not such a
    module.
    """
    text = with_own_names(with_classes_compared(as_first(text)))
    where, bare = Locations(text), _LOCATION.sub("", text)
    head = _FUNCTION.search(bare)
    if head is None:
        raise ProgramError(f"the TTIR has no kernel: its {len(text):,} characters contain no public function")
    parameters = dict(re.findall(r"%(\w+): ([^,{]+)", re.sub(r"\{.*?\}", "", head[2])))
    lines = iter(enumerate(text.splitlines(), 1))
    while "tt.func public" not in next(lines)[1]:
        pass
    number = 0
    try:
        operations = _operations(((number := i, line)[1] for i, line in lines), where)
    except (LookupError, ValueError, RecursionError) as error:
        raise ProgramError(
            f"{head[1]}: line {number:,} of its TTIR is not an operation that npusim can read"
        ) from error
    if operations is None:
        raise ProgramError(f"{head[1]}: the text of its TTIR is truncated")
    _place_at(where(next(line for line in text.splitlines() if "tt.func public" in line)), operations)
    if "tt.call" in bare:
        operations = with_calls_inlined(operations, _called(text, where))
    parameters = {n: t.strip() for n, t in parameters.items()}
    if "tt.int_to_ptr" in bare:
        operations, parameters = with_addressed(operations, parameters, BYTES)
    if re.search(r"tt\.bitcast .*ptr", bare):
        operations, parameters = with_reinterpreted(operations, parameters, BYTES)
    return Function(head[1], parameters, with_mask_states(with_counted_loops(operations)))


def _called(text: str, where: Locations) -> dict[str, Called]:
    """Return the functions that a kernel may call, by name."""
    result, lines = dict[str, Called](), iter(text.splitlines())
    for line in lines:
        if head := _PRIVATE.search(_LOCATION.sub("", line)):
            operations = _operations(lines, where)
            result[head[1]] = Called(tuple(re.findall(r"%(\w+): ", head[2])), operations or [])
    return result


def _place_at(line: Line, operations: list[Op]) -> None:
    """Place operations without a line at the line of the kernel."""
    for op in operations:
        op.line = op.line if op.line.number else line
        _place_at(line, [*op.body, *op.otherwise])


def with_own_names(text: str) -> str:
    """Return TTIR whose parameters have the names of the kernel's parameters: Triton names a parameter after the
    variable to which it is bound.
    """
    head = next((line for line in text.splitlines() if "tt.func public" in line), "")
    table = dict(_NAMED.findall(text))
    renamed = dict[str, str]()
    for name, first in re.findall(r'%(\w+): [^%]*?loc\("\w+"\((#loc\w*)\)\)', head):
        own, at, seen = "", first, set[str]()
        while at in table and at not in seen:
            seen.add(at)
            own, at = re.findall(r'"([^"]*)"\((#loc\w*)\)', table[at])[0]
        renamed |= {name: own} if own.isidentifier() and own != name else {}
    if not renamed:
        return text
    free = {n: f"{n}_value" for n in renamed.values() if n not in renamed}
    names = {**free, **renamed}
    return re.sub(r"%(\w+)", lambda m: f"%{names.get(m[1], m[1])}", text)


def _operations(lines: Iterator[str], where: Locations) -> list[Op] | None:
    """Return the operations of a kernel from the lines after its head; None if its end is missing."""
    names, stack = Names(), list[list[Op]]([[]])
    for line in lines:
        bare = _LOCATION.sub("", line).strip()
        if bare.startswith("^bb") and len(stack) == 1:
            arguments = re.findall(r"%([\w#-]+)", bare)
            stack[-1].append(names.resolve(Op("block", arguments, [], bare.partition(":")[0], "", where(line))))
        if bare.startswith("^bb") and len(stack) > 1 and stack[-2][-1].name == "scf.while":
            stack[-1].append(names.resolve(Op("block", re.findall(r"%([\w#-]+)", bare), [], "", "", where(line))))
        if bare.startswith("^bb") and len(stack) > 1 and stack[-2][-1].name in ("tt.reduce", "tt.scan"):
            stack[-2][-1].arguments = names.resolve(
                Op("", re.findall(r"%([\w#-]+)", bare), [], "", "", where(line))
            ).results
        if not bare or bare.startswith(("^", "#")):
            continue
        if not bare.startswith("}"):
            op = _operation(bare, where(line))
            op.place = where.place(line)
            stack[-1].append(op)
            names.resolve(op)
            stack += [[]] if bare.endswith("{") else []
            if len(stack) > MOST_NESTED or _depth(bare) > MOST_NESTED:
                raise op.fail(f"regions or types nested more than {MOST_NESTED} deep")
            continue
        body = stack.pop()
        if not stack:
            return body
        outer = stack[-1][-1]
        if "else" in bare or bare.startswith("} do {"):
            outer.body, stack = body, [*stack, []]
            continue
        outer.body, outer.otherwise = (outer.body, body) if outer.body else (body, [])
        lines_of = [where(line), *(o.line for o in body)]
        outer.line = next((x for x in (outer.line, *lines_of) if x.number), outer.line)
        if bare.startswith("})"):
            outer.type, outer.text = bare.rpartition("->")[2].strip(), f"{outer.text} {bare}"
            outer.place = where.place(line) + operand_shape(bare)
    return None


def _depth(line: str) -> int:
    """Return the nesting depth of the brackets of a line, an upper bound if there are few."""
    if (most := sum(map(line.count, "<([{"))) <= MOST_NESTED:
        return most
    steps = [(c in "<([{") - (c in ">)]}") for c in line.replace("->", "")]
    return max(accumulate(steps))


def _operation(text: str, line: Line) -> Op:
    results = list[str]()
    if match := re.match(r"%([\w#-]+)(?::(\d+))?((?:, %[\w#-]+)*) = (.*)", text):
        name, count, others, text = match.groups()
        results = [f"{name}#{i}" for i in range(int(count))] if count else [name, *re.findall(r"%([\w#-]+)", others)]
    kind = re.findall(r'^"?([\w.]+)"?', text)[0]
    plain = text if kind == "arith.constant" else re.sub(r"\{[^}]*\}|<\{.*?\}>", "", text)
    type_ = "" if text.endswith("{") else re.split(r" -> | to | : ", plain)[-1].strip()
    return Op(kind, results, re.findall(r"%([\w#-]+)", plain), text, type_, line)


class Names:
    """Unique names: separate regions may share a name, which nothing outside them reads."""

    def __init__(self) -> None:
        self._latest: dict[str, str] = {}
        self._count = 0

    def resolve(self, op: Op) -> Op:
        """Rename an operation's operands and results to unique names, with a loop's region."""
        inner = {0, *range(4, len(op.operands), 2)} if op.name == "scf.for" else set[int]()
        inner = {*range(0, len(op.operands), 2)} if op.name == "scf.while" else inner
        op.operands = [n if i in inner else self._latest.get(n, n) for i, n in enumerate(op.operands)]
        op.operands = [self._define(n) if i in inner else n for i, n in enumerate(op.operands)]
        op.results = [self._define(n) for n in op.results]
        return op

    def _define(self, name: str) -> str:
        self._count += 1
        self._latest[name] = f"{name}@{self._count}" if name in self._latest else name
        return self._latest[name]


class Locations:
    """The meanings of the numbers of locations."""

    def __init__(self, text: str) -> None:
        self.table: dict[str, str] = dict(re.findall(r"^(#loc\w*) = loc\((.*)\)$", text, re.MULTILINE))
        self._known: dict[str, Line] = {}
        self._named: dict[str, str] = {}

    def __call__(self, line: str) -> Line:
        """Return the kernel's line that the last location of a line of text names."""
        last = re.findall(r"loc\((#loc\w*)\)", line)
        return self._resolved(last[-1]) if last else Line("", 0)

    def place(self, line: str) -> str:
        """Return the files, lines and columns that the last location of a line of text names, the innermost first.

        Folders are omitted: a place then has the same name in TTIR and in later stages, independent of the folder of
        the file.
        """
        last = re.findall(r"loc\((#loc\w*)\)", line)
        if last and last[-1] not in self._named:
            self._named[last[-1]] = " at ".join(self._places(last[-1]))
        return self._named[last[-1]] if last else ""

    def _places(self, text: str) -> list[str]:
        text = self.table.get(text, text)
        if match := re.match(r'"(?:[^"]*/)?([^"/]*)":(\d+):(\d+)$', text):
            return [":".join(match.groups())]
        if match := re.match(r"callsite\((.*) at (.*)\)$", text):
            return [*self._places(match[1]), *self._places(match[2])]
        match = re.match(r'"[^"]*"\((.*)\)$', text)
        return self._places(match[1]) if match else []

    def files(self) -> set[str]:
        """Return the files of the kernel's code, without Triton's."""
        files = (m[1] for text in self.table.values() if (m := re.match(r'"([^"]*)":\d+:\d+$', text)))
        return {f for f in files if "/triton/" not in f}

    def _resolved(self, text: str) -> Line:
        if text not in self._known:
            self._known[text] = Line("", 0)  # a location that leads back to itself
            self._known[text] = self._read(self.table.get(text, text))
        return self._known[text]

    def _read(self, text: str) -> Line:
        if match := re.match(r'"([^"]*)":(\d+):\d+$', text):
            return Line(match[1], int(match[2]))
        if match := re.match(r"callsite\((.*) at (.*)\)$", text):
            callee, caller = self._resolved(match[1]), self._resolved(match[2])
            return caller if not callee.number or "/triton/" in callee.file else callee
        match = re.match(r'"[^"]*"\((.*)\)$', text)
        return self._resolved(match[1]) if match else Line("", 0)


def operand_shape(text: str) -> str:
    """Return the sizes of the first tensor that a text names: ``[16x32]``."""
    match = re.search(r"tensor<((?:\d+x)+)", text)
    return f"[{match[1][:-1]}]" if match else "[]"


def reached(name: str, sources: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a name and all names from which it follows, directly or through others; ``sources``: those of each."""
    seen, waiting = dict[str, None](), [name]
    while waiting:
        if (one := waiting.pop()) not in seen:
            seen[one] = None
            waiting += sources.get(one, ())
    return list(seen)


@lru_cache(maxsize=4096)
def shape_of(type_: str) -> tuple[tuple[int, ...], str]:
    """Return the shape, () for a scalar, and the element type of a type; for pointers, of their target."""
    match = re.search(r"tensor<((?:\d+x)*)(.*)>", type_)
    shape, element = (tuple(map(int, match[1].split("x")[:-1])), match[2]) if match else ((), type_)
    return shape, element.removeprefix("!tt.ptr<").removesuffix(">")
