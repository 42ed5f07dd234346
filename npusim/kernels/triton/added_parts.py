"""Atomic additions as two kernels: one stores each program's part, and one adds the parts to the tensor.

Parts share one place in memory, to which programs add in their order; on a chip this order is free.  The time includes
one launch more than that of the single kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from npusim.errors import ProgramError
from npusim.kernels.triton.results_apart import LOADS, STORES, needed_by, roots_of, sources_of
from npusim.kernels.triton.start_values import pointers_into
from npusim.kernels.triton.tensor_axes import View
from npusim.kernels.triton.ttir_text import FORMATS, Function, Op, every_of, makers, read
from npusim.kernels.triton.values import Affine, Integers

#: Number of elements of a row that one program of the second kernel adds.
MOST_COLUMNS = 4096
ATOMIC = "tt.atomic_rmw"
_ADDS = f"{ATOMIC} fadd"
#: The refusal of other atomic operations.
ONLY = (
    "the only supported atomics are tl.atomic_add of floats without use of the old value that it returns, and those of "
    "kernels that have only integers, all known at launch; store each program's part, and add the parts in a second "
    "kernel"
)


class PartsError(ProgramError):
    """A tensor of parts does not have the number of parts that are needed (``count``)."""

    def __init__(self, message: str, count: int) -> None:
        super().__init__(message)
        self.count = count


class PartsApart(NamedTuple):
    """The kernel that stores the parts, the kernel that adds them with its grid, and the arguments of both.

    ``others``: the kernel of the other results; None if there are no others.  ``parts``: number of parts of each
    element.  ``adds_zeros``: as in `parts_apart`.
    """

    before: Function
    others: Function | None
    after: Function
    arguments: dict[str, Any]
    grid: tuple[int, ...]
    parts: int
    adds_zeros: bool = False


def has_atomics(function: Function) -> bool:
    """Return whether a kernel has atomic operations."""
    return any(o.name.startswith("tt.atomic") for o in every_of(function.operations))


def atomics_apart(function: Function) -> list[Function]:
    """Return one kernel for each tensor to which a kernel adds, and one for the tensors that it stores.

    None if it adds to only one tensor, or if it also accesses such a tensor in another way.
    """
    every, sources = every_of(function.operations), sources_of(function.operations)
    atomics = {o.results[0]: roots_of(o.operands[0], sources) for o in every if o.name.startswith("tt.atomic")}
    accessed = {r for o in every if o.name in (*LOADS, *STORES) for r in roots_of(o.operands[0], sources)}
    roots = list(dict.fromkeys(r for of in atomics.values() for r in sorted(of)))
    is_other = any(len(of) > 1 for of in atomics.values()) or accessed & {*roots}
    if len(roots) < 2 or len(atomics) > len(roots) or is_other or any({*atomics} & {*o.operands} for o in every):
        return []
    result = list[Function]()
    for root in (*roots, ""):
        kept = [o for o in every if root and atomics.get(next(iter(o.results), "")) == {root}]
        kept += [o for o in every if not root and o.name in STORES]
        if kept:
            result.append(function._replace(operations=needed_by(*_with_effects(function.operations, kept))))
    return result


def _with_effects(operations: Sequence[Op], kept: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """Return the operations that only some effects need, and those of the effects that are inside them."""
    result, having = list[Op](), list[Op]()
    for op in operations:
        if op in kept:
            result.append(op)
            having.append(op)
        elif op.name not in STORES and not op.name.startswith("tt.atomic"):
            (body, own), (otherwise, others) = (_with_effects(x, kept) for x in (op.body, op.otherwise))
            one = replace(op, body=body, otherwise=otherwise) if op.body or op.otherwise else op
            result.append(one)
            having += [one] if own or others else []
    return result, having


def parts_apart(
    function: Function,
    arguments: Mapping[str, Any],
    count: int,
    *,
    by_element: bool = False,
    is_flat: bool = False,
    adds_zeros: bool = False,
) -> PartsApart:
    """Return a kernel with atomic additions as two kernels, for this number of parts of each element.

    ``by_element``: each program of the second kernel adds one element, and not a row.  ``is_flat``: the tensor of the
    parts has all elements of one part along one axis.  ``adds_zeros``: where the last condition of its mask hides an
    element, a program adds 0.

    Raises `ProgramError` for other atomic operations, for several such tensors, and for a tensor with gaps.
    """
    every = every_of(function.operations)
    atomics = [o for o in every if o.name.startswith("tt.atomic")]
    line, (root, view) = atomics[0].line, _added_tensor(function, arguments, every, atomics)
    span = prod(view.sizes)
    (fmt,) = {n for n, f in FORMATS.items() if f == _format(function, root)}
    name, total = f"{root}_parts", f"{root}_sum"
    own = replace(view, is_workspace=True, storage=-1, described=(), described_by=())
    is_block = atomics[0].type.startswith("tensor")
    sizes, by = (view.sizes, view.by) if is_block and not is_flat else ((span,), (1,))  # each number has its own place
    sizes, by = ((count, *sizes), (span, *by)) if count > 1 else (sizes, by)
    given = {
        name: replace(own, name=name, sizes=sizes, by=by, parts=count),
        total: replace(own, name=total, sums=count),
    }
    result, pointers = makers(every), set[str]()

    def stored(operations: Sequence[Op]) -> list[Op]:
        """Return operations with a store of a part in place of each atomic addition."""
        listed = list[Op]()
        for op in operations:
            if op not in atomics:
                listed.append(replace(op, body=stored(op.body), otherwise=stored(op.otherwise)))
                continue
            pointer, value, *mask = op.operands
            chain, into = _into_parts(op, pointer, (root, name), fmt, span, result)
            pointers.add(into)
            if adds_zeros and mask:
                zeros, value, mask = _with_zeros(op, value, mask[0], result)
                chain = [*chain, *zeros]
            listed += [*chain, Op("tt.store", [], [into, value, *mask], "tt.store", "", op.line)]
        return listed

    kinds = dict.fromkeys(given, f"!tt.ptr<{fmt}>")
    parts = stored(function.operations)
    ends, rest = (
        [o for o in parts if any((i.operands[0] in own) is is_own for i in (o, *o.within()) if i.name in STORES)]
        for own, is_own in ((pointers, True), (pointers, False))
    )
    if any(o in ends for o in rest):
        raise atomics[0].fail(
            "a tl.atomic_add and a store in the same branch or loop are not supported; write a separate kernel for each"
        )
    before = function._replace(parameters={**function.parameters, **kinds}, operations=needed_by(parts, ends))
    others = function._replace(operations=needed_by(parts, rest)) if rest else None
    is_by_row = is_block and not by_element and view.sizes and view.sizes[-1] <= MOST_COLUMNS
    columns = view.sizes[-1] if is_by_row else 1
    adding = _adding(function.name, (root, total), fmt, columns)
    after = adding._replace(operations=[replace(op, line=line) for op in adding.operations])
    return PartsApart(before, others, after, {**arguments, **given}, (span // columns, 1, 1), count, adds_zeros)


def _added_tensor(
    function: Function, arguments: Mapping[str, Any], every: Sequence[Op], atomics: Sequence[Op]
) -> tuple[str, View]:
    """Return the tensor to which atomic additions add, and its name; raise `ProgramError` for other
    atomic operations.
    """
    read_names = {n for o in every for n in o.operands}
    if any(not o.text.startswith(_ADDS) or read_names.intersection(o.results) for o in atomics):
        raise atomics[0].fail(ONLY)
    sources = sources_of(function.operations)
    roots = set[str]().union(*(roots_of(o.operands[0], sources) for o in atomics))
    accessed = {r for o in every if o.name in ("tt.load", "tt.store") for r in roots_of(o.operands[0], sources)}
    (root, *more), view = sorted(roots), arguments.get(min(roots))
    if more or not isinstance(view, View) or roots & accessed or len(atomics) > 1:
        why = "a kernel may have only one tl.atomic_add, to a tensor that it neither loads nor stores"
        raise atomics[0].fail(f"{why}; write a separate kernel for each")
    if tuple(view.by) != tuple(prod(view.sizes[i + 1 :]) for i in range(len(view.sizes))):
        raise atomics[0].fail(f"{root}: tl.atomic_add to a tensor that is not contiguous is not supported")
    return root, view


def _into_parts(
    op: Op, pointer: str, names: tuple[str, str], fmt: str, span: int, made: Mapping[str, Op]
) -> tuple[list[Op], str]:
    """Return the operations that compute the addresses of a program's part, and the name of these addresses.

    A pointer that a loop moves has no operations from which it is computed: its part consists of all of its addresses.
    """
    root, name = names
    text, own = f"npusim.part {{span = {span}}}", f"{name}@own"
    origin = pointer
    while origin in made and made[origin].operands:
        origin = made[origin].operands[0]
    if origin == root:
        chain, into = pointers_into(pointer, root, own, fmt, made)
        return [Op("npusim.part", [own], [name, pointer], text, "", op.line), *chain], into
    type_ = re.sub(rf"\b{fmt}\b(?=>?$)", f"!tt.ptr<{fmt}>", op.type)
    return [Op("npusim.into_part", [own], [name, pointer], text, type_, op.line)], own


def _with_zeros(op: Op, value: str, mask: str, made: Mapping[str, Op]) -> tuple[list[Op], str, list[str]]:
    """Return the operations that choose 0 where a mask hides an element; the chosen value; and the mask without its
    last condition, none if it has only one.
    """
    zero, chosen = f"{op.results[0]}@zero", f"{op.results[0]}@chosen"
    dense = "dense<0.0>" if op.type.startswith("tensor") else "0.0"
    text = f"arith.constant {dense} : {op.type}"
    constant = Op("arith.constant", [zero], [], text, op.type, op.line)
    select = Op("arith.select", [chosen], [mask, value, zero], f"arith.select : {op.type}", op.type, op.line)
    joined = made.get(mask)
    is_joined = joined is not None and joined.name == "arith.andi"
    return [constant, select], chosen, joined.operands[:1] if joined is not None and is_joined else []


def _format(function: Function, root: str) -> str:
    fmt = function.parameters[root].removeprefix("!tt.ptr<").removesuffix(">")
    return FORMATS.get(fmt, "")


def _adding(called: str, names: tuple[str, str], fmt: str, columns: int) -> Function:
    """Return a kernel in which each program adds a row of the second tensor to a row of the first one."""
    (root, total), width = names, 1 << (columns - 1).bit_length()
    block, pointers, numbers = f"tensor<{width}x{fmt}>", f"tensor<{width}x!tt.ptr<{fmt}>>", f"tensor<{width}xi32>"
    lines = [
        "module {",
        f"tt.func public @{called}(%{root}: !tt.ptr<{fmt}>, %{total}: !tt.ptr<{fmt}>) attributes {{x = 1}} {{",
        "%pid = tt.get_program_id x : i32",
        f"%n = arith.constant {columns} : i32",
        "%row = arith.muli %pid, %n : i32",
        f"%cols = tt.make_range {{end = {width} : i32, start = 0 : i32}} : {numbers}",
        f"%ends = tt.splat %n : i32 -> {numbers}",
        f"%inside = arith.cmpi slt, %cols, %ends : {numbers}",
    ]
    for i, of in enumerate((root, total)):
        lines += [
            f"%base{i} = tt.addptr %{of}, %row : !tt.ptr<{fmt}>, i32",
            f"%all{i} = tt.splat %base{i} : !tt.ptr<{fmt}> -> {pointers}",
            f"%pointers{i} = tt.addptr %all{i}, %cols : {pointers}, {numbers}",
            f"%part{i} = tt.load %pointers{i}, %inside : {pointers}",
        ]
    lines += [f"%made = arith.addf %part0, %part1 : {block}", f"tt.store %pointers0, %made, %inside : {pointers}"]
    return read("\n".join([*lines, "tt.return", "}", "}"]))


def part_of(op: Op, base: Affine, pointer: Affine, view: View) -> Affine:
    """Return the place at which each program's part begins; programs that add to the same block have separate parts."""
    if any(not step and n > 1 for step, n in zip(pointer.steps, pointer.shape, strict=True)):
        why = "several elements of one block are added to one element of a tensor, which is not supported"
        raise op.fail(f"{why}; add them first (tl.sum) and use tl.atomic_add on the sums")
    addresses: Integers = np.broadcast_to(pointer.base, (len(pointer.base), pointer.base.shape[1]))
    every, kinds = np.unique(addresses, axis=0, return_inverse=True)
    if len(np.unique(every)) < sum(len(np.unique(each)) for each in every) and every.shape[1] > 1:
        raise op.fail("programs add to the same elements in different iterations of a loop, which is not supported")
    kinds = kinds.reshape(-1)
    order = np.argsort(kinds, kind="stable")
    first = np.searchsorted(kinds[order], kinds[order])
    part = np.empty_like(kinds)
    part[order] = np.arange(len(kinds)) - first
    count, span = int(part.max()) + 1, op.number("span")
    if count != view.parts:
        raise PartsError(f"{op.line}: up to {count} programs add to the same element", count)
    return replace(base, base=base.base + part[:, None] * span)
