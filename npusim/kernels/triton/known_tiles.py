"""Integers and masks of a loop's tiles that are known at launch, as tiles of a separate tensor that the kernel reads.

If the loop continues along the tiles, the rows of the tensor are programs, and its columns are iterations; otherwise
each iteration has a separate block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npusim.kernels.triton.values import Affine, Booleans, Condition, Integers, one_hot

#: Axes of programs, and then axes of a block.
_AXES = 2


class KnownTiles(NamedTuple):
    """A tensor of known elements in the order of memory, its axes (sizes, strides), and its tiles.

    ``mask``: the elements of a tile that the tensor has; None: all.
    """

    holds: Integers
    sizes: tuple[int, ...]
    by: tuple[int, ...]
    pointer: Affine
    mask: Condition | None


def known_tiles(
    called: str,
    ids: Integers,
    values: Integers,
    left: tuple[Integers | None, ...],
    *,
    is_along: bool,
    visited: int = 0,
    missing: int | None = None,
) -> KnownTiles | None:
    """Return the elements of blocks, (program, iteration, *axes), as a tensor; None if the programs do not fill a grid.

    ``ids``: numbers of programs, (x, y, z), equal for parts of one program if ``missing`` is given; ``left``: number of
    elements along each axis that other tiles of the loop have, None: all; ``is_along``: whether the loop continues
    along the last axis; ``visited``: largest number of iterations of a program, 0: all.  ``missing``: the element for
    programs that are absent, for example because they return early; None: all programs of a grid must be present.
    """
    ids = ids if missing is None else _with_parts(ids)
    grid = ids.max(0) + 1
    is_whole = len(ids) == np.prod(grid) or missing is not None
    if not is_whole or len(np.unique(ids, axis=0)) != len(ids) or not 1 <= values.ndim - _AXES <= _AXES:
        return None
    (x, y, z), (count, most, *block) = map(int, grid), values.shape
    rows, columns = (1, *block)[-2:]
    whole = values.reshape(count, most, rows, columns)
    limits = [None if n is None else np.broadcast_to(n, (count, most)) for n in left]
    down, across = (None, *limits)[-2:]
    at = tuple(ids[:, i] for i in (2, 1, 0))
    times = np.arange(most)[None]
    in_grid = np.full((z, y, x, most, rows, columns), missing or 0, values.dtype)
    in_grid[at] = whole
    if missing is not None:
        in_grid, ids = _without_equal(in_grid, ids)
        z, y, x = in_grid.shape[:3]
    if visited:
        in_grid, most = in_grid[:, :, :, :visited], visited
        limits = [None if n is None else n[:, :visited] for n in limits]
        down, across = (None, *limits)[-2:]
    if is_along:
        last = (
            most * columns if across is None else int((times[:, :most] * columns + np.minimum(across, columns)).max())
        )
        height = x * rows if down is None else int((ids[:, :1] * rows + np.minimum(down, rows)).max())
        tensor = np.moveaxis(in_grid, 3, 4).reshape(z, y, x * rows, most * columns)[:, :, :height, :last]
        base = ((ids[:, 2] * y + ids[:, 1]) * height + ids[:, 0] * rows)[:, None] * last + times * columns
        steps = (last, 1)
    else:
        last = columns if across is None else int(np.minimum(across, columns).max())
        height = rows if down is None else int(np.minimum(down, rows).max())
        tensor = in_grid[..., :height, :last]
        base = (((ids[:, 2] * y + ids[:, 1]) * x + ids[:, 0])[:, None] * most + times) * height * last
        steps = (last, 1)
    strides = [int(np.prod(tensor.shape[i + 1 :])) for i in range(tensor.ndim)]
    sides = [side for side in zip(tensor.shape, strides, strict=True) if side[0] > 1]
    shape = tuple(block)
    rules = tuple(
        ("slt", Affine(-np.minimum(n, shape[i]), one_hot(i, shape), shape)) for i, n in enumerate(left) if n is not None
    )
    pointer = Affine(base, steps[-len(shape) :], shape, called)
    sizes, by = (tuple(side[i] for side in sides) for i in (0, 1))
    return KnownTiles(np.ascontiguousarray(tensor).reshape(-1), sizes, by, pointer, Condition(rules) if rules else None)


def _with_parts(ids: Integers) -> Integers:
    """Return the programs' numbers, in which the parts of a program are programs along the last axis of the grid."""
    _, of_each, counts = np.unique(ids, axis=0, return_inverse=True, return_counts=True)
    if (most := int(counts.max())) == 1:
        return ids
    order = np.argsort(of_each.reshape(-1), kind="stable")
    part = np.empty(len(ids), np.int64)
    part[order] = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    with_parts: Integers = ids * np.array([1, 1, most]) + part[:, None] * np.array([0, 0, 1])
    return with_parts


def _without_equal(in_grid: Integers, ids: Integers) -> tuple[Integers, Integers]:
    """Return the elements of programs in a grid, (z, y, x, ...), with one index for an axis along which all elements
    are equal; also return the places of the programs in this grid.
    """
    ids = ids.copy()
    is_there: Booleans = np.zeros(in_grid.shape[:3], bool)
    is_there[tuple(ids[:, i] for i in (2, 1, 0))] = True
    for axis in range(3):
        first = np.expand_dims(np.argmax(is_there, axis), axis)
        one = np.take_along_axis(in_grid, first[..., None, None, None], axis)
        if in_grid.shape[axis] > 1 and np.all((in_grid == one) | ~is_there[..., None, None, None]):
            in_grid, is_there = one, np.asarray(is_there.any(axis, keepdims=True))
            ids[:, 2 - axis] = 0
    return in_grid, ids
