"""Loads and stores of a kernel: which axes of a tensor they go along, and how much of a block masks leave."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from npusim.ttir.arithmetic import Arithmetic
from npusim.ttir.draft import Load, Stored
from npusim.ttir.text import Op, shape_of
from npusim.ttir.values import (
    COLUMNS,
    RELATIONS,
    ROWS,
    Affine,
    Condition,
    Floats,
    Integers,
    Known,
    Number,
    Tensor,
    bound_of,
)


class Memory(Arithmetic):
    """Operations that load and store blocks."""

    def _tt_load(self, op: Op, pointer: Known, mask: Known | None = None, other: Known | None = None) -> None:
        if not isinstance(pointer, Affine) or not pointer.shape:
            what = "an address that was loaded" if not isinstance(pointer, Affine) else f"one element of {pointer.of}"
            raise op.fail(f"a load of {what}: give it as an argument, a constexpr, or a table of pages (--page)")
        tensor, fmt = self.arguments[pointer.of], shape_of(op.type)[1]
        assert isinstance(tensor, Tensor)
        dims = self._dims(op, pointer, tensor)
        is_transposed = dims == (COLUMNS, ROWS)
        is_walked, left = self._walk is not None and pointer.base.shape[1] > 1, self._left(op, mask, pointer)
        pad = other.value if isinstance(other, Number) else None
        axes = self._axes(pointer.shape)
        self.cuts |= {a for a, n, some in zip(axes, pointer.shape, left, strict=True) if np.any(some < n)}
        before = next((x for x in self.loads.values() if x.of == pointer.of and x.is_walked and is_walked), None)
        if before and len(self.walks) > 1 and before.pointer.steps == pointer.steps:  # the same in the loop before
            if not self.choices.is_apart:
                before.pointer = replace(before.pointer, base=self._both(before.pointer.base, pointer.base))
                before.left = list(map(self._both, before.left, left))
            elif not all(map(np.array_equal, (before.pointer.base, *before.left), (pointer.base, *left))):
                raise op.fail(f"{pointer.of} is read in other tiles than in the loop before: let both walk the same")
            self.walks[-1].loads.append(before.name)
            self._set(op, Floats(before.name, before.axes, fmt, pad, is_transposed))
            return
        name = self._unique(tensor.name + ("j" if is_walked and self._walk and not self._walk.is_sum else ""))
        self.loads[name] = Load(name, pointer.of, pointer, axes, left, is_walked, op.line, dims)
        if is_walked:
            self.walks[-1].loads.append(name)
        self._set(op, Floats(name, axes, fmt, pad, is_transposed))

    def _both(self, a: Integers, b: Integers) -> Integers:
        """Return what is of one loop and then of the next."""
        each = zip((a, b), self.walks[-2:], strict=True)
        return np.concatenate([np.broadcast_to(x, (len(self.ids), w.most)) for x, w in each], 1)

    @staticmethod
    def _dims(op: Op, pointer: Affine, tensor: Tensor) -> tuple[int, ...]:
        """Return which of a tensor's axes, rows or columns, those of a block are."""
        blocks = list(zip(pointer.steps, pointer.shape, strict=True))
        for dims in {0: ((),), 1: ((COLUMNS,), (ROWS,)), 2: ((ROWS, COLUMNS), (COLUMNS, ROWS))}.get(
            len(pointer.shape), ()
        ):
            sides = [(*block, tensor.steps[d], tensor.shape[d]) for block, d in zip(blocks, dims, strict=True)]
            if all(n == 1 or by == step or by == 0 == whole - 1 for by, n, step, whole in sides):
                return dims
        steps, wanted = [s for s, n in blocks if n > 1], list(tensor.steps[ROWS:])
        raise op.fail(f"{pointer.of} is accessed with strides {steps}; its rows and columns have {wanted}")

    def _left(self, op: Op, mask: Known | None, pointer: Affine) -> list[Integers]:
        """Return how many elements a mask leaves along each axis, for each program and iteration."""
        known = zip(pointer.shape, pointer.limits(), strict=True)
        left = [np.full((1, 1), n, np.int64) if most is None else np.minimum(n, most) for n, most in known]
        left = [x if step else np.minimum(x, 1) for x, step in zip(left, pointer.steps, strict=True)]  # one for all
        for relation, d in mask.of if isinstance(mask, Condition) else ():
            bound = bound_of(d, relation)
            if bound is None and not any(d.steps) and self._walk:  # of a whole tile
                self.cuts.add(None)
                left = [np.where(RELATIONS[relation](d.base, 0), x, 0) for x in left]
                continue
            if bound is None:
                raise op.fail("the mask of a load or store that is no bound of its axes")
            left[bound[0]] = np.minimum(left[bound[0]], bound[1])
        return left

    def _tt_store(self, op: Op, pointer: Known, value: Known, mask: Known | None = None) -> None:
        if not isinstance(pointer, Affine) or not isinstance(value, Floats):
            raise op.fail("a store of what is no block of floats, or to an address that was loaded")
        tensor = self.arguments[pointer.of]
        if self._dims(op, pointer, tensor) == (COLUMNS, ROWS):
            raise op.fail(f"{pointer.of} is stored transposed: tl.trans of what is stored, and pointers as it lies")
        if self._walk:
            self._emit(f"yield {self.text(value)}", op.line)
        self.stored.append(
            Stored(
                name="",
                of=pointer.of,
                pointer=pointer,
                axes=value.axes,
                left=self._left(op, mask, pointer),
                is_walked=bool(self._walk),
                line=op.line,
                dims=(ROWS, COLUMNS),
                value=value,
            )
        )
