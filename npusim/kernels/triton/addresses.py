"""Pointers that a kernel computes from integers, such as addresses that it loads from a table.

The tensors to which the addresses in one argument belong are one further argument of the kernel, which `as_addressed`
names. In a recorded call this argument contains them one after another, with gaps between them. Each address is
replaced by `FIRST` plus the position of its byte in this argument, so that an address minus `FIRST` is an offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from npusim.kernels.triton.ttir_text import Op

Integers = np.ndarray[Any, np.dtype[np.int64]]
Booleans = np.ndarray[Any, np.dtype[np.bool_]]
#: The address of the first byte of a further argument.
FIRST = 1 << 40
#: Why an access by an address is refused.
NO_TENSOR = "accesses memory by an address at which the recording found no tensor"
#: An operation that TTIR does not have: it returns a pointer into the argument that is its first operand, at the byte
#: to which its second operand points in another argument.
REINTERPRETED = "npusim.reinterpreted"
#: An operation that TTIR does not have: the bytes of addresses of whole elements; others are refused.
OF_ELEMENTS = "npusim.of_elements"
_TO_POINTER = "tt.int_to_ptr"
_TABLES = ("tt.load", "tt.descriptor_load")
#: Operations whose result is an address if an operand is one, and other operations that may read an address.
_PASSING = ("arith.addi", "arith.subi", "arith.select", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape")
_READING = (_TO_POINTER, "arith.cmpi", "scf.for", "scf.if", "scf.yield")


def is_beyond(spans: Sequence[tuple[int, int]], offsets: Integers) -> Booleans:
    """Return which offsets into a further argument are in none of its tensors; ``spans``: the first element of each
    tensor, and the element after its last one.
    """
    first, end = np.array(spans, np.int64).reshape(-1, 2).T
    found = np.searchsorted(first, offsets, "right") - 1
    return np.asarray((found < 0) | (offsets >= end[found]))


def as_addressed(argument: str) -> str:
    """Return the name of the further argument with the tensors to which the addresses in ``argument`` belong."""
    return f"{argument}__addressed"


def with_addressed(
    operations: Sequence[Op], parameters: Mapping[str, str], sizes: Mapping[str, int]
) -> tuple[list[Op], dict[str, str]]:
    """Return operations in which offsets into further arguments replace pointers that are computed from integers, and
    return all parameters.

    ``sizes``: bytes of an element, by its type in TTIR.  A pointer is unchanged if it is computed from addresses in
    several arguments or in none, if it points to elements of several types, or if its address is also used as a number
    (as in a remainder), because addresses differ from run to run.
    """
    every = [o for op in operations for o in (op, *op.within())]
    pointers = [o for o in every if o.name == _TO_POINTER]
    sources = dict[str, list[str]]()
    for op in every:
        ends = [n for o in op.body[-1:] + op.otherwise[-1:] for n in o.operands]
        for r in op.results:
            sources.setdefault(r, []).extend([*op.operands, *ends])
        if op.name == "scf.for":
            for inner, start, end in zip(op.operands[4::2], op.operands[5::2], op.body[-1].operands, strict=False):
                sources.setdefault(inner, []).extend([start, end])
    loads = {r: o for o in every if o.name in _TABLES for r in o.results}
    tables, kinds = dict[str, str](), dict[str, set[str]]()
    for op in pointers:
        of = _of_addresses(op.operands[0], sources, loads, parameters)
        element = _element(op)
        if len(of) == 1 and element in sizes:
            tables[op.results[0]] = next(iter(of))
            kinds.setdefault(tables[op.results[0]], set()).add(element)
    of_tables = {r for r in loads if _of_addresses(r, sources, loads, parameters) & {*tables.values()}}
    of_pointers = [o.operands[0] for o in pointers if o.results[0] in tables]
    if _is_number(every, of_pointers, {*loads, *parameters}, of_tables):
        return list(operations), dict(parameters)
    known = {as_addressed(n): f"!tt.ptr<{next(iter(k))}>" for n, k in kinds.items() if len(k) == 1}
    if not known:
        return list(operations), dict(parameters)

    def changed(given: Sequence[Op]) -> list[Op]:
        result: list[Op] = []
        for op in given:
            name = as_addressed(tables.get(op.results[0], "")) if op.results else ""
            if op.name == _TO_POINTER and name in known:
                result += _offset(op, name, known[name], sizes[_element(op)])
                continue
            is_nested = op.body or op.otherwise
            result.append(replace(op, body=changed(op.body), otherwise=changed(op.otherwise)) if is_nested else op)
        return result

    return changed(operations), {**parameters, **known}


def as_read(argument: str, element: str) -> str:
    """Return the name of the further argument that contains the memory of ``argument`` as elements of another type."""
    return f"{argument}__as_{element}"


def root_of(argument: str) -> str:
    """Return the argument whose memory a further argument of `as_read` contains; any other argument is returned as it
    is.
    """
    return argument.partition("__as_")[0]


def is_further(argument: str) -> bool:
    """Return whether a recorded call has this argument in addition to the arguments that the program passes."""
    return root_of(argument) != argument or argument.endswith(as_addressed(""))


def with_reinterpreted(
    operations: Sequence[Op], parameters: Mapping[str, str], sizes: Mapping[str, int]
) -> tuple[list[Op], dict[str, str]]:
    """Return operations in which each pointer to elements of another type points into a further argument (`as_read`),
    and return all parameters.

    A pointer that may point into several arguments is unchanged, as is a conversion between pointers to bool and to
    bytes.
    """
    every, known = [o for op in operations for o in (op, *op.within())], dict(parameters)
    sources = dict[str, list[str]]()
    for op in every:
        if op.name == "scf.for":
            for inner, start, result in zip(op.operands[4::2], op.operands[5::2], op.results, strict=False):
                sources[inner] = sources[result] = [start]
        elif op.operands and op.name not in ("scf.if", "arith.select"):
            sources |= dict.fromkeys(op.results, op.operands[:1])

    def changed(given: Sequence[Op]) -> list[Op]:
        result: list[Op] = []
        for op in given:
            argument = next((n for n in _roots(op.operands[0], sources) if n in known), "") if op.operands else ""
            types = op.text.partition(" : ")[2].split(" -> ")
            if op.name == "tt.bitcast" and "ptr" in op.text and argument and len(types) > 1:
                of, to = (t.rpartition("!tt.ptr<")[2].partition(">")[0] for t in types)
                if of in sizes and to in sizes and {of, to} != {"i1", "i8"} and of != to:
                    name = as_read(root_of(argument), to)
                    known.setdefault(name, f"!tt.ptr<{to}>")
                    sources[op.results[0]] = [name]
                    text = f"{REINTERPRETED} {{of = {sizes[of]} : i32, to = {sizes[to]} : i32}} : {types[1]}"
                    op = replace(op, name=REINTERPRETED, operands=[name, *op.operands], text=text)  # noqa: PLW2901
            is_nested = op.body or op.otherwise
            result.append(replace(op, body=changed(op.body), otherwise=changed(op.otherwise)) if is_nested else op)
        return result

    return changed(operations), known


def _element(op: Op) -> str:
    """Return the type of the elements to which a pointer points."""
    return op.type.rpartition("!tt.ptr<")[2].partition(">")[0]


def _of_addresses(
    name: str, sources: Mapping[str, Sequence[str]], loads: Mapping[str, Op], parameters: Mapping[str, str]
) -> set[str]:
    """Return the arguments from whose 64-bit integers an address is computed."""
    result, seen, waiting = set[str](), set[str](), [name]
    while waiting:
        if (one := waiting.pop()) in seen:
            continue
        seen.add(one)
        if one in loads:
            is_wide = loads[one].type.rstrip(">").endswith("i64")
            result |= {n for n in _roots(loads[one].operands[0], sources) if n in parameters} if is_wide else set()
        elif one in parameters:
            result |= {one} if parameters[one] == "i64" else set()
        else:
            waiting += sources.get(one, ())
    tables = {n for n in result if "ptr" in parameters[n]}
    return tables or result


def _is_number(every: Sequence[Op], pointers: Sequence[str], given: set[str], of_tables: set[str]) -> bool:
    """Return whether a kernel does more with some address than to move, choose or compare it and use it as a pointer.

    ``pointers``: addresses that become pointers; ``given``: values that may be addresses, if pointers come from them;
    ``of_tables``: all values that are loaded from tables of addresses.
    """
    passing = [(r, n) for op in every for r, n in _passed(op)]
    seeds = (_closure(pointers, passing) & given) | of_tables
    held = _closure(seeds, [(n, r) for r, n in passing])
    return any(o.name not in (*_PASSING, *_READING) and held.intersection(o.operands) for o in every)


def _passed(op: Op) -> list[tuple[str, str]]:
    """Return each result of an operation, or state of a loop, with each value that it may be or be a sum with."""
    if op.name in _PASSING:
        return [(op.results[0], n) for n in op.operands[op.name == "arith.select" :]]
    if op.name == "scf.for":
        ends = op.body[-1].operands
        states = list(zip(op.operands[4::2], op.operands[5::2], op.results, ends, strict=False))
        return [(r, n) for inner, start, result, end in states for r in (inner, result) for n in (start, end)]
    if op.name == "scf.if":
        return [(r, n) for o in op.body[-1:] + op.otherwise[-1:] for r, n in zip(op.results, o.operands, strict=False)]
    return []


def _closure(first: Iterable[str], pairs: Sequence[tuple[str, str]]) -> set[str]:
    """Return names and all that follow from them by pairs of a name and one that follows from it."""
    after, result, waiting = dict[str, list[str]](), set[str](), list(first)
    for name, next_one in pairs:
        after.setdefault(name, []).append(next_one)
    while waiting:
        if (one := waiting.pop()) not in result:
            result.add(one)
            waiting += after.get(one, ())
    return result


def _roots(name: str, sources: Mapping[str, Sequence[str]]) -> set[str]:
    """Return a pointer and the first operands from which it is computed."""
    seen = set[str]()
    while name not in seen:
        seen.add(name)
        name = next(iter(sources.get(name, ())), name)
    return seen


def _offset(op: Op, argument: str, kind: str, size: int) -> list[Op]:
    """Return the operations that compute an address as an offset into an argument."""
    of, (result,) = op.text.partition(" : ")[2].partition(" -> ")[0], op.results

    def one(name: str, operands: list[str], text: str, type_: str, called: str = "") -> Op:
        return replace(op, name=name, results=[called or f"{result}@{name}"], operands=operands, text=text, type=type_)

    def number(value: int) -> Op:
        dense = f"dense<{value}>" if of.startswith("tensor") else f"{value}"
        return one("arith.constant", [], f"arith.constant {dense} : {of}", of, f"{result}@{value}")

    first = number(FIRST)
    parts = [first, one("arith.subi", [op.operands[0], *first.results], f"arith.subi : {of}", of)]
    if size > 1:
        unit, last = number(size), parts[-1].results
        parts.append(one(OF_ELEMENTS, last, f"{OF_ELEMENTS} {{size = {size} : i32}} : {of}", of))
        parts += [unit, one("arith.divsi", [*parts[-1].results, *unit.results], f"arith.divsi : {of}", of)]
    offset, pointer = parts[-1].results[0], argument
    if of.startswith("tensor"):
        parts.append(one("tt.splat", [argument], f"tt.splat : {kind} -> {op.type}", op.type))
        (pointer,) = parts[-1].results
    return [*parts, one("tt.addptr", [pointer, offset], f"tt.addptr : {op.type}, {of}", op.type, result)]
