"""Kernels that compute only integers, from integers that are known at launch: counters, histograms, sorted tokens.

Their programs are evaluated one after another, operation by operation; if the order of programs may change a result,
the kernel is refused.  A kernel that only stores the results replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from npusim.errors import ProgramError
from npusim.kernels.triton.added_parts import has_atomics
from npusim.kernels.triton.addresses import NO_TENSOR, is_beyond
from npusim.kernels.triton.float64_walk import ALL, Array, ExactProgram, Pointer, values_of
from npusim.kernels.triton.integers import bits_of
from npusim.kernels.triton.tensor_axes import IntegerTensor
from npusim.kernels.triton.ttir_text import FORMATS, TYPES, Function, Line, Op, every_of, read, shape_of
from npusim.kernels.triton.values import AXES as TENSOR_AXES
from npusim.kernels.triton.values import MOST_ELEMENTS, Booleans, Integers, repeats

#: Largest number of operations of all programs that are evaluated individually; number of elements of a block that one
#: program stores.
MOST_OPERATIONS, MOST_BLOCK = 200_000, 1024
#: Values that stand for no program, and for several programs.
_NOBODY, _SEVERAL = -1, -2
_ATOMIC = "tt.atomic_rmw"
_ATOMICS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"add": np.add, "max": np.maximum, "min": np.minimum}
    | {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
)


class KnownKernelError(ProgramError):
    """Raised if a kernel of only integers accesses its tensors in a way that is not supported, for example in an
    undefined order.
    """


class KnownKernel(NamedTuple):
    """A kernel that stores the integers that another kernel computes, with its arguments and its grid."""

    function: Function
    arguments: dict[str, Any]
    grid: tuple[int, ...]


@dataclass
class _Cells:
    """The elements of a tensor of integers, and the program that accessed each: `_NOBODY`, one program, or `_SEVERAL`.

    ``kinds``: for an element that atomic operations changed, the number of the operation, from 1; ``is_seen``: whether
    a program uses the value that such an operation returned.
    """

    data: Integers
    readers: Integers = field(init=False)
    writers: Integers = field(init=False)
    adders: Integers = field(init=False)
    kinds: Integers = field(init=False)
    is_seen: Booleans = field(init=False)

    def __post_init__(self) -> None:
        self.data = self.data.copy()
        self.readers, self.writers, self.adders = (np.full(self.data.shape, _NOBODY) for _ in range(3))
        self.kinds, self.is_seen = np.zeros(self.data.shape, np.int64), np.zeros(self.data.shape, bool)


def _is_others(who: Integers, program: int) -> Booleans:
    """Return whether any other program has accessed some elements."""
    return np.asarray((who != _NOBODY) & (who != program))


def _joined(who: Integers, program: int) -> Integers:
    return np.where(_is_others(who, program), _SEVERAL, program)


class _KnownMemory:
    """The tensors of a launch that computes only integers."""

    def __init__(self, function: Function, arguments: Mapping[str, Any]) -> None:
        self.values = values_of(function, arguments)
        self.own = dict[str, dict[int, float]]()
        self.tensors = {n: x for n, x in arguments.items() if isinstance(x, IntegerTensor) and x.data is not None}
        self.cells = {n: _Cells(x.data) for n, x in self.tensors.items()}
        self.stored = dict[str, None]()
        self.program, self.count, self.line = 0, 0, Line("", 0)
        #: Names of the values that operations read.
        self.used = frozenset[str]()

    def fail(self, why: str) -> ProgramError:
        """Return the error of an access."""
        return KnownKernelError(f"{self.line}: {why}")

    def _at(self, pointer: Pointer) -> tuple[_Cells, Any]:
        if pointer.of not in self.cells:
            raise self.fail(f"{pointer.of}: its elements are not known at launch")
        cells = self.cells[pointer.of]
        if np.any((pointer.at < 0) | (pointer.at >= len(cells.data))):
            raise self.fail(f"{pointer.of}: a program accesses an element beyond its {len(cells.data)} elements")
        if (spans := self.tensors[pointer.of].spans) and np.any(is_beyond(spans, pointer.at)):
            raise self.fail(f"{pointer.of}: a program {NO_TENSOR}")
        return cells, pointer.at

    def load(self, pointer: Pointer) -> Array:
        """Return elements; refuse elements that another program changes."""
        cells, at = self._at(pointer)
        if np.any(_is_others(cells.writers[at], self.program) | _is_others(cells.adders[at], self.program)):
            raise self.fail(f"{pointer.of}: a program loads an element that another program changes, in any order")
        cells.readers[at] = _joined(cells.readers[at], self.program)
        return np.asarray(cells.data[at])

    def store(self, pointer: Pointer, values: Array, mask: Array, *, adds: bool = False) -> None:
        """Store elements; refuse elements that another program accesses, and two values for one place."""
        assert not adds, "atomic operations of integers have a method of their own"
        (cells, at), given = self._at(pointer._replace(at=pointer.at[mask])), np.asarray(values)[mask]
        given = self._as_stored(pointer.of, given)
        others = [_is_others(x[at], self.program) for x in (cells.readers, cells.writers, cells.adders)]
        if np.any(np.logical_or.reduce(others)):
            raise self.fail(f"{pointer.of}: a program stores an element that another program accesses, in any order")
        cells.data[at] = given
        if np.any(cells.data[at] != given):
            raise self.fail(f"{pointer.of}: a store writes two integers to one element, in an undefined order")
        cells.writers[at] = self.program
        self.stored[pointer.of] = None

    def _as_stored(self, of: str, values: Array) -> Any:
        """Return integers in the form of a signed or unsigned tensor."""
        tensor, wide = self.tensors[of], values.astype(np.int64)
        unsigned = tensor.fmt.startswith("uint") and tensor.fmt != "uint64"
        return wide & ((1 << int(tensor.fmt.removeprefix("uint"))) - 1) if unsigned else wide

    def change(self, name: str, pointer: Pointer, values: Array, mask: Array, *, is_used: bool) -> Array:
        """Change elements by an atomic operation; return their previous values."""
        (cells, at), given = self._at(pointer._replace(at=pointer.at[mask])), values[mask].astype(np.int64)
        kind = 1 + tuple(_ATOMICS).index(name)
        is_other = np.logical_or(*(_is_others(x[at], self.program) for x in (cells.readers, cells.writers)))
        is_other |= (cells.kinds[at] != 0) & (cells.kinds[at] != kind)
        if np.any(is_other):
            why = "an atomic operation changes an element that is also accessed otherwise, in any order"
            raise self.fail(f"{pointer.of}: {why}")
        cells.is_seen[at] |= is_used
        others = _is_others(cells.adders[at], self.program)
        if np.any(cells.is_seen[at] & others) or (is_used and repeats(at)):
            why = "what an atomic operation returns depends on the order of programs, or of the elements of a block"
            raise self.fail(f"{pointer.of}: {why}")
        before, dtype = cells.data[at], values.dtype
        for one, value in zip(at.reshape(-1).tolist(), given.reshape(-1).tolist(), strict=True):
            pair = np.array([cells.data[one], value]).astype(dtype)
            cells.data[one] = int(self._as_stored(pointer.of, np.asarray(_ATOMICS[name](pair[0], pair[1]))))
        cells.adders[at], cells.kinds[at] = _joined(cells.adders[at], self.program), kind
        self.stored[pointer.of] = None
        result = np.zeros(pointer.at.shape, np.int64)
        result[mask] = before
        return result


class _KnownProgram(ExactProgram):
    """One program, evaluated on integers."""

    purpose: ClassVar[str] = "in a kernel of only integers"
    memory: _KnownMemory  # type: ignore[assignment]

    def _made(self, op: Op) -> Any:
        self.memory.line = op.line
        self.memory.count += 1
        if self.memory.count > MOST_OPERATIONS:
            raise op.fail(f"a kernel of only integers has more than {MOST_OPERATIONS:,} operations in all programs")
        return super()._made(op)

    def _tt_atomic_rmw(self, op: Op, pointer: Pointer, value: Array, mask: Array = ALL) -> Array:
        """Change elements by an atomic operation of integers."""
        name = op.text.removeprefix(_ATOMIC).split(",")[0].strip()
        if name not in _ATOMICS:
            raise op.fail(f"the atomic operation {name} of integers is not supported; allowed: {', '.join(_ATOMICS)}")
        shape = pointer.at.shape
        values, held = np.broadcast_to(value, shape), np.broadcast_to(mask, shape)
        result = self.memory.change(name, pointer, values, held, is_used=op.results[0] in self.memory.used)
        return np.asarray(result, values.dtype)


def known_kernels(function: Function, arguments: Mapping[str, Any], grid: Sequence[int]) -> list[KnownKernel]:
    """Return kernels that store the results of a kernel of only integers; none for a kernel of another kind.

    Raises `ProgramError` if the order of programs may change a result, or if an operation cannot be evaluated:
    `KnownKernelError` for a kernel with atomic operations, which nothing else reads.
    """
    every = every_of(function.operations)
    if not _is_of_integers(function, every, arguments):
        return []
    memory = _KnownMemory(function, arguments)
    memory.used = frozenset(n for o in every for n in o.operands)
    try:
        for i, at in enumerate(product(*(range(n) for n in grid[::-1]))):
            memory.program = i
            _KnownProgram(function.operations, memory, at[::-1], grid)  # type: ignore[arg-type]
    except ProgramError as error:
        raise KnownKernelError(str(error)) if has_atomics(function) else error from None
    return [_storing(function, name, memory, arguments) for name in memory.stored]


def _is_of_integers(function: Function, every: Sequence[Op], arguments: Mapping[str, Any]) -> bool:
    """Return whether a kernel has only integers, and whether those of its tensors are known."""
    kinds = [shape_of(t)[1] for o in every for t in TYPES.findall(o.type)]
    pointers = [n for n, t in function.parameters.items() if t.startswith("!tt.ptr")]
    tensors = [arguments[n] for n in pointers if arguments[n] is not None]
    is_known = all(isinstance(x, IntegerTensor) and x.data is not None for x in tensors)
    return is_known and not any(k in FORMATS for k in kinds) and not any("tensordesc" in o.type for o in every)


def _storing(function: Function, root: str, memory: _KnownMemory, arguments: Mapping[str, Any]) -> KnownKernel:
    """Return a kernel that stores the integers of a tensor, block by block."""
    tensor, values = memory.tensors[root], memory.cells[root].data
    if tuple(tensor.by) != tuple(prod(tensor.sizes[i + 1 :]) for i in range(len(tensor.sizes))):
        raise memory.fail(f"{root}: integers that a kernel stores to a tensor that is not contiguous")
    if values.size > MOST_ELEMENTS:
        raise memory.fail(f"{root}: {values.size:,} integers; allowed: {MOST_ELEMENTS:,}")
    source, kind = f"{root}_known", f"i{bits_of(function.parameters[root])}"
    width = min(MOST_BLOCK, 1 << max(0, (values.size - 1).bit_length()))
    ones = (1,) * len(TENSOR_AXES)
    known = IntegerTensor(source, ones, tensor.fmt, data=values, sizes=(values.size,), by=(1,))
    result = _copying(function.name, (root, source), kind, values.size, width)
    line = memory.line
    result = result._replace(operations=[replace(op, line=line) for op in result.operations])
    given = {**arguments, root: replace(tensor, spans=()), source: known}
    return KnownKernel(result, given, (-(-values.size // width), 1, 1))


def _copying(called: str, names: tuple[str, str], kind: str, count: int, width: int) -> Function:
    """Return a kernel that stores the elements of the second tensor in the first."""
    root, source = names
    numbers, pointers = f"tensor<{width}xi32>", f"tensor<{width}x!tt.ptr<{kind}>>"
    lines = [
        "module {",
        f"tt.func public @{called}(%{root}: !tt.ptr<{kind}>, %{source}: !tt.ptr<{kind}>) attributes {{x = 1}} {{",
        "%pid = tt.get_program_id x : i32",
        f"%width = arith.constant {width} : i32",
        f"%ends = arith.constant dense<{count}> : {numbers}",
        "%start = arith.muli %pid, %width : i32",
        f"%lanes = tt.make_range {{end = {width} : i32, start = 0 : i32}} : {numbers}",
        f"%starts = tt.splat %start : i32 -> {numbers}",
        f"%at = arith.addi %starts, %lanes : {numbers}",
        f"%inside = arith.cmpi slt, %at, %ends : {numbers}",
    ]
    for i, of in enumerate(names):
        lines += [
            f"%all{i} = tt.splat %{of} : !tt.ptr<{kind}> -> {pointers}",
            f"%pointers{i} = tt.addptr %all{i}, %at : {pointers}, {numbers}",
        ]
    lines += [
        f"%values = tt.load %pointers1, %inside : {pointers}",
        f"tt.store %pointers0, %values, %inside : {pointers}",
    ]
    return read("\n".join([*lines, "tt.return", "}", "}"]))
