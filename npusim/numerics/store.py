"""Memories while a program executes: poisoned on-chip buffers, and tensors head by head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npusim.errors import ProgramError
from npusim.formats import get_format

if TYPE_CHECKING:
    from npusim.ir.program import TileProgram
    from npusim.ir.tile import GlobalTensor, GlobalTile, Tile

Array = NDArray[Any]
#: Gives one head's matrix (rows, cols) of an input tensor by (name, batch, head).
HeadSource = Callable[[str, int, int], Array]
#: A NaN in float16, float32, bfloat16 and E4M3: what is read before it is written shows.
POISON = 0xFF


class BufferStore:
    """One core group's memories for ``lanes`` blocks that run in step, as bytes."""

    def __init__(self, program: TileProgram, lanes: int) -> None:
        self.lanes = lanes
        self._bytes = {space: np.full((lanes, used), POISON, np.uint8) for space, used in program.used_bytes.items()}

    def view(self, tile: Tile) -> Array:
        """Return the elements of a tile, (lanes, rows, cols), as a view of memory."""
        memory = self._bytes[tile.space]
        fmt = get_format(tile.fmt)
        size = fmt.size_bytes
        return np.ndarray(
            (self.lanes, tile.rows, tile.cols),
            fmt.dtype,
            memory,
            tile.offset_bytes,
            (memory.strides[0], tile.stride * size, size),
        )


class TensorStore:
    """Global tensors, one matrix a head; inputs are asked for when first read."""

    def __init__(self, program: TileProgram, inputs: HeadSource) -> None:
        self._inputs, self._constants = inputs, program.constants
        self._heads: dict[tuple[str, int, int], Array] = {}

    def head(self, tensor: GlobalTensor, batch: int, head: int) -> Array:
        """Return one head's matrix; outputs and workspaces start as NaN."""
        key = (tensor.name, batch, head)
        found = self._heads.get(key)
        if found is None:
            found = self._heads[key] = self._make(tensor, batch, head)
        return found

    def _make(self, tensor: GlobalTensor, batch: int, head: int) -> Array:
        if tensor.name in self._constants:
            values: Array = self._constants[tensor.name]()[batch, head]
        elif tensor.role == "input":
            heads = range(head * tensor.packed, (head + 1) * tensor.packed)
            found = [self._inputs(tensor.name, batch, h) for h in heads]
            values = found[0] if len(found) == 1 else np.concatenate(found)
        else:
            fmt = get_format(tensor.fmt)
            raw = np.full(tensor.rows * tensor.cols * fmt.size_bytes, POISON, np.uint8)
            return raw.view(fmt.dtype).reshape(tensor.rows, tensor.cols)
        if values.shape != (tensor.rows, tensor.cols):
            raise ProgramError(f"tensor {tensor.name}: {values.shape} given, {(tensor.rows, tensor.cols)} needed")
        return values

    def read(self, tiles: list[GlobalTile]) -> Array:
        """Return the cuts of all lanes, (lanes, rows, cols)."""
        return np.stack([self.cut(t) for t in tiles])

    def cut(self, tile: GlobalTile) -> Array:
        """Return one cut as a view of its head's matrix."""
        matrix = self.head(tile.tensor, tile.batch, tile.head)
        return matrix[tile.row : tile.row + tile.rows, tile.col : tile.col + tile.cols]

    def written(self, tensor: GlobalTensor) -> dict[tuple[int, int], Array]:
        """Return the matrices of a tensor that exist so far, by (batch, head)."""
        return {(b, h): m for (name, b, h), m in self._heads.items() if name == tensor.name}
