"""Any addresses, masks and loaded integers of blocks of two axes, as an integer for each lane.

If blocks of two axes are read lane by lane, addresses need not be linear along both axes, and a mask that is known at
launch may be joined with a mask of compared values.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from npusim.formats.whole import wrapped
from npusim.kernels.triton.addresses import NO_TENSOR, is_beyond
from npusim.kernels.triton.arithmetic import MASK
from npusim.kernels.triton.element_wise import computed_elements, elements_in
from npusim.kernels.triton.integers import NonlinearError, bits_of
from npusim.kernels.triton.listed import elements_of, known_of
from npusim.kernels.triton.loads_and_stores import Memory
from npusim.kernels.triton.pulled_lanes import LanesOp
from npusim.kernels.triton.tensor_axes import IntegerTensor, View
from npusim.kernels.triton.ttir_text import FORMATS, Op, shape_of
from npusim.kernels.triton.values import (
    Affine,
    Booleans,
    Condition,
    Elements,
    Floats,
    Integers,
    Known,
    Listed,
    ListedMask,
    Number,
    Pointers,
    ValueComparison,
    affine,
    argument_of,
    refuse_many,
)

if TYPE_CHECKING:
    from npusim.kernels.triton.kernel_draft import LaneReading


def blocks_shape(x: Known) -> tuple[int, ...]:
    """Return the shape of a block of integers or of a mask."""
    assert isinstance(x, Affine | Listed | Elements | Condition | ListedMask)
    return x.shape


#: Number of bits of a pointer as an integer.
_WIDE = 64
_Block = TypeVar("_Block", Integers, Booleans)


def _pulled(blocks: Sequence[_Block], outer: tuple[int, ...], op: LanesOp) -> _Block:
    """Return the elements that `op` pulls from the joined lanes of blocks, as one block for each outer index."""
    joined: _Block = np.concatenate([np.broadcast_to(x, (*outer, x.shape[2])) for x in blocks], 2)
    return joined[..., op.lanes.reshape(-1)].reshape(*outer, *op.lanes.shape)


class LaneElements(Memory, ABC):
    """Integers and masks of blocks of two axes, element by element, where the choices ask for it."""

    def _is_by_lanes(self, shape: tuple[int, ...]) -> bool:
        """Return whether a block is read lane by lane."""
        lanes: LaneReading | None = self.choices.way("lanes")
        return lanes is not None and (1 if lanes.axes == 1 else 0) <= len(shape) <= lanes.axes

    @cached_property
    def _where_taken(self) -> list[Booleans]:
        """The programs and iterations in which the current branches are taken, each as (programs, iterations)."""
        return []

    def _stores_lanes_alone(self, operations: Sequence[Op]) -> bool:
        """Return whether operations store lanes of blocks and contain no loop, so that they may be executed under a
        mask.
        """
        lanes: LaneReading | None = self.choices.way("lanes")
        stores = [o for o in operations if o.name in ("tt.store", "tt.descriptor_store")]
        is_plain = not any(o.name in ("scf.for", "scf.while") for o in operations)
        return lanes is not None and lanes.axes > 1 and is_plain and all(map(self._is_stored_by_lanes, stores))

    def _is_stored_by_lanes(self, op: Op) -> bool:
        """Return whether the block that an operation stores is stored lane by lane."""
        return self._is_by_lanes(shape_of(op.text)[0])

    @contextmanager
    def _taken_where(self, op: Op, every: Booleans) -> Iterator[None]:
        """Hide loads and stores in programs that do not take a branch, while all programs execute it."""
        why = "the condition of an if differs between programs or iterations: npusim executes its statements in all of"
        self.notes.append(f"{op.line}: {why} them, with masked stores; the time includes these stores")
        self._where_taken.append(np.asarray(every))
        yield
        self._where_taken.pop()

    def _is_by_elements(self, shape: tuple[int, ...]) -> bool:
        """Return whether integers of a block are read element by element: those of a block of two axes."""
        return len(shape) > 1 and self._is_by_lanes(shape)

    def _integer(self, op: Op, a: Known, b: Known) -> None:
        if not self._is_by_elements(shape_of(op.type)[0]):
            super()._integer(op, a, b)
        elif op.name == "tt.addptr":
            self._set(op, self._pointers(op, a, b))
        else:
            is_of_values = any(isinstance(x, ValueComparison) for x in (a, b))
            super()._integer(op, *(self._as_block_of(op, x) if is_of_values else x for x in (a, b)))

    def _pointers(self, op: Op, pointer: Known, offset: Known) -> Known:
        """Return addresses in linear form or by a list, if they have such a form."""
        if not isinstance(pointer, Pointers) or not isinstance(offset, Pointers):
            raise op.fail("an address that the kernel computes from values is not supported; load it as an integer")
        if not isinstance(pointer, Elements) and not isinstance(offset, Elements):
            try:
                super()._integer(op, pointer, offset)
                return self.values.pop(op.results[0])
            except NonlinearError:
                pass
        each = [self._elements_at(op, x) for x in (pointer, offset)]
        if not all(np.all(known) for _, known in each):
            raise op.fail("this block of integers is used as addresses, but npusim knows only some of the integers")
        at = np.add(*(values for values, _ in each))
        return Elements(at, _WIDE, 1, of=argument_of(pointer))

    def _elements_at(self, op: Op, x: Pointers) -> tuple[Integers, Booleans]:
        """Return addresses or integers of a block, (program, iteration, *axes), and which of them are known."""
        if isinstance(x, Elements):
            return x.values, np.ones((1, 1), bool).reshape(1, 1, *(1 for _ in x.shape))
        known = known_of(op, x)
        return elements_of(op, x), np.asarray(True if known is None else known)

    def _of_masks(self, op: Op, name: str, a: Known, b: Known) -> Known:
        is_of_values = any(isinstance(x, ValueComparison) for x in (a, b))
        is_known = not is_of_values and op.name != "arith.cmpi" and self._is_by_elements(shape_of(op.type)[0])
        if not is_known:
            return super()._of_masks(op, name, a, b)
        result = self._of_tables(op, name, a, b)
        return computed_elements(replace(op, name=f"arith.{name}"), a, b) if result is None else result

    def _of_table(self, op: Op, x: ListedMask) -> ValueComparison:
        if not self._is_by_elements(x.shape):
            return super()._of_table(op, x)
        result = self._as_block_of(op, x)
        assert isinstance(result, ValueComparison)
        return result

    def _as_block_of(self, op: Op, x: Known) -> Known:
        """Return a mask that is known at launch as one of values that the kernel reads; other values as they are."""
        if not isinstance(x, ListedMask | Elements):
            return x
        block = self._known_block(op, self._unique("held"), elements_in(op, x).values, "f32")
        return ValueComparison(Floats(f"compare({block.text}, 0.0, 'une')", block.axes, MASK))

    def _npusim_reinterpreted(self, op: Op, argument: Known, pointer: Known) -> None:
        """Read a pointer to elements of another type as one into the argument with such elements."""
        of, to = op.number("of"), op.number("to")
        if not isinstance(pointer, Affine | Elements) or not isinstance(argument, Affine):
            raise op.fail("a pointer from a list of integers cannot become one to elements of another type")
        values, steps = (pointer.base, pointer.steps) if isinstance(pointer, Affine) else (pointer.values, ())
        if np.any(values * of % to) or any(s * of % to for s in steps):
            raise op.fail(f"a pointer to elements of {to} bytes must be at a multiple of {to} bytes of its tensor")
        if isinstance(pointer, Affine):
            steps = tuple(s * of // to for s in steps)
            self._set(op, replace(pointer, base=values * of // to, steps=steps, of=argument.of))
        else:
            self._set(op, replace(pointer, values=values * of // to, of=argument.of))

    def _npusim_of_elements(self, op: Op, offset: Known) -> None:
        """Refuse an address that is not at a whole number of elements of its tensor."""
        size = op.number("size")
        values, steps = (
            (offset.base, offset.steps) if isinstance(offset, Affine) else (elements_in(op, offset).values, ())
        )
        if np.any(wrong := values % size != 0) or any(s % size for s in steps):
            program = self.program(int(np.argwhere(wrong)[0, 0]) if wrong.any() else 0)
            raise op.fail(f"{program} has an address that is not at a multiple of {size} bytes of its tensor")
        self._set(op, offset)

    def _npusim_lanes(self, op: Op, *blocks: Known) -> None:
        """Read lanes of integers, masks or addresses that are known at launch, of one block after another."""
        assert isinstance(op, LanesOp)
        if all(isinstance(x, Number) for x in blocks):
            self._set(op, replace(cast("Number", blocks[0]), shape=op.lanes.shape))
            return
        each, flags = list[Integers](), list[Booleans]()
        for x in blocks:
            values, known = self._elements_at(op, x if isinstance(x, Pointers) else elements_in(op, x))
            refuse_many(op, int(np.prod(values.shape[:2])) * op.lanes.size)
            shape = np.broadcast_shapes(values.shape[:2], known.shape[:2])
            sizes = blocks_shape(x)
            each.append(np.broadcast_to(values, (*shape, *sizes)).reshape(*shape, -1))
            flags.append(np.broadcast_to(known, (*shape, *sizes)).reshape(*shape, -1))
        outer = np.broadcast_shapes(*(x.shape[:2] for x in each))
        whole, all_known = _pulled(each, outer, op), _pulled(flags, outer, op)
        bits, of = bits_of(op.type), argument_of(blocks[0]) if isinstance(blocks[0], Pointers) else ""
        linear = affine(whole, all_known) if bits > 1 and not (of and op.is_alike) else None
        if linear is None and not np.all(all_known):
            raise op.fail("npusim knows only some of the integers of this block")
        bits = _WIDE if of else bits
        if linear is not None and np.all(all_known):
            self._set(op, replace(linear, of=of, bits=bits))
        else:
            self._set(op, Elements(whole, bits, 1, "integers of a block that is reshaped", of))

    def _npusim_lane_mask(self, op: Op) -> None:
        """Read a mask that is the same in all programs."""
        assert isinstance(op, LanesOp)
        self._set(op, Elements(op.lanes[None, None], 1, 1))

    def _check_spans(self, op: Op, pointer: Known, mask: Known | None) -> None:
        """Raise `ProgramError` for an accessed element that is in none of the tensors to which addresses belong."""
        tensor = self.arguments.get(argument_of(pointer)) if isinstance(pointer, Pointers) else None
        if not isinstance(pointer, Pointers) or not isinstance(tensor, View | IntegerTensor) or not tensor.spans:
            return
        at, held = self._held_lanes(op, pointer, mask.within if isinstance(mask, ValueComparison) else mask)
        if np.any(beyond := held & is_beyond(tensor.spans, at)):
            program = self.program(int(np.argwhere(beyond)[0, 0]))
            raise op.fail(f"{program} {NO_TENSOR}")

    def _tt_load(self, op: Op, pointer: Known, mask: Known | None = None, other: Known | None = None) -> None:
        shape, kind = shape_of(op.type)
        if kind in FORMATS or not isinstance(pointer, Pointers) or not self._is_by_elements(shape):
            super()._tt_load(op, pointer, mask, other)
            return
        tensor = self.arguments[argument_of(pointer)]
        if not isinstance(tensor, IntegerTensor) or isinstance(mask, ValueComparison):
            super()._tt_load(op, pointer, mask, other)
            return
        self.looked.setdefault(tensor.name, op.line)
        self._set(op, self._integers_of_lanes(op, tensor, pointer, mask, other))

    def _integers_of_lanes(
        self, op: Op, tensor: IntegerTensor, pointer: Pointers, mask: Known | None, other: Known | None
    ) -> Elements:
        """Return integers that are data of a recorded call, lane by lane; hidden lanes have ``other``, or 0."""
        data, bits = self._data_of(op, tensor, pointer), bits_of(op.type)
        at, held = self._held_lanes(op, pointer, mask)
        self._check_looked(op, tensor.name, data, at, held)
        values = wrapped(data[np.where(held, at, 0)], bits)
        hidden: Integers = np.zeros((1, 1), np.int64).reshape(1, 1, *(1 for _ in pointer.shape))
        if other is not None:
            hidden = elements_in(op, other).values
        elif mask is not None:
            self.notes.append(
                f"{op.line}: a masked load without other=...: hidden integers are 0 here, as in compiled code for GPUs"
            )
        return Elements(np.where(held, values, hidden), bits, 1, f"{tensor.name}: integers that the kernel loads")

    def _held_lanes(self, op: Op, pointer: Pointers, mask: Known | None) -> tuple[Integers, Booleans]:
        """Return the address of each lane of a block, (program, iteration, *axes), and which of these are accessed."""
        at, known = self._elements_at(op, pointer)
        held = np.ones((1, 1, *(1 for _ in pointer.shape)), bool)
        if mask is not None:
            held = elements_in(op, mask).values != 0
        for axis, n in enumerate(pointer.shape, 2):
            first = np.take(held, [0], axis)
            # the values that are the same for all rows of a loop over rows
            if held.shape[axis] > n and np.all(held == first):
                held = first
        taken = np.logical_and.reduce(np.broadcast_arrays(np.ones((1, 1), bool), *self._where_taken))
        held = held & taken.reshape(*taken.shape, *(1 for _ in pointer.shape))
        times = max(at.shape[1], held.shape[1])
        times = times if times == 1 or self._walk is None else self._walk.most
        is_read = np.asarray(self.is_read(times))
        held = held & is_read.reshape(*is_read.shape, *(1 for _ in pointer.shape))
        shape = len(self.ids), times, *pointer.shape
        refuse_many(op, int(np.prod(shape)))
        held, known = np.broadcast_to(held, shape), np.broadcast_to(known, shape)
        if np.any(held & ~known):
            raise op.fail("npusim knows the addresses of only some lanes of this block; it needs those of all lanes")
        return np.broadcast_to(at, shape), held
