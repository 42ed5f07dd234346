"""One-queue programs that load X, do some steps and store Y: for tests of single steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from ir.toy import UB, Toy

from npusim.program.ir.op import Opcode, Step
from npusim.program.ir.tile import GlobalTensor, Tile
from npusim.program.ir.tile_program import Item, Loop, TileProgram
from npusim.program.numerics.executor import Execution, execute

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Array = Any


class Straight:
    """A program on one queue: ``load`` a tile, ``step`` on tiles, ``store`` the result."""

    def __init__(self, rows: int, cols: int, fmt: str, *, heads: int = 1, out_fmt: str = "") -> None:
        self.toy, self.rows, self.cols, self.fmt = Toy(), rows, cols, fmt
        self.q = self.toy.queue("q")
        self.x = GlobalTensor("x", 1, heads, rows, cols, fmt, "input")
        self.y = GlobalTensor("y", 1, heads, rows, cols, out_fmt or fmt, "output")
        self.steps: list[tuple[str, Callable[[int], Step]]] = []

    def tile(self, name: str, fmt: str = "", rows: int = 0, cols: int = 0) -> Tile:
        return self.toy.allocator.tile(UB, name, rows or self.rows, cols or self.cols, fmt or self.fmt)

    def step(self, label: str, opcode: Opcode, dst: Tile, *srcs: Any, **how: Any) -> None:
        from npusim.program.ir.op import Attributes

        self.steps.append((label, lambda _head: Step(opcode, dst, srcs, Attributes(**how))))

    def load(self, dst: Tile) -> None:
        self.steps.append(("load", lambda head: Step(Opcode.COPY, dst, (self._whole(self.x, head),))))

    def store(self, src: Tile) -> None:
        self.steps.append(("store", lambda head: Step(Opcode.COPY, self._whole(self.y, head), (src,))))

    @staticmethod
    def _whole(tensor: GlobalTensor, head: int) -> Any:
        return tensor.tile(0, head, 0, tensor.rows)

    def program(self, *, loop: Sequence[int] = ()) -> TileProgram:
        """Return the program, one block a head; with ``loop`` all but the store repeat."""

        def body(head: Any) -> list[Item]:
            ops: list[Item] = [self.toy.op(label, self.q, steps=[make(head)]) for label, make in self.steps]
            return [Loop("kv", loop, lambda _i: ops[:-1]), ops[-1]] if loop else ops  # type: ignore[list-item]

        return self.toy.program(body, blocks=list(range(self.x.heads)), tensors=[self.x, self.y])

    def run(self, *values: Array, loop: Sequence[int] = ()) -> tuple[list[Array], Execution]:
        """Return Y of each head for X = ``values``, and the execution."""
        done = execute(self.program(loop=loop), lambda _name, _batch, head: values[head])
        return [np.array(done.tensors.head(self.y, 0, h)) for h in range(self.x.heads)], done
