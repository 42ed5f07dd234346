"""Choose and run the fastest kernel that is exact for a matrix unit and a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from npusim.formats.cast import Array, cast, widen

if TYPE_CHECKING:
    from npusim.formats.mma_arithmetic import MmaArithmetic

Path = Literal["fast", "scalar"]

#: Below this many multiply-adds a matrix, preparing operands costs more than it saves.
SMALL_MACS = 4096
#: Below this many multiply-adds in all, threads cost more than they save.
THREADED_MACS = 1 << 21
#: Outputs worked on at a time: they and 16 rows of operands stay in the L2 and L1 cache.
TILE_ROWS = 64
TILE_COLUMNS = 256
_NOTHING = -100000


@dataclass(frozen=True)
class Problem:
    """A batch of products: ``out[n] = a[a_of[n]] · b[b_of[n]] + out[n]``.

    ``a`` (A batch, M, K) and ``b`` (B batch, K, N) are exact float32 values (float64 for
    float64), ``out`` (batch, M, N) holds C and receives D.
    """

    arithmetic: MmaArithmetic
    a: Array
    b: Array
    out: Array
    a_of: Array
    b_of: Array


@dataclass(frozen=True)
class Tile:
    """The outputs ``rows`` x ``columns`` of matrix ``n`` of the batch."""

    n: int
    rows: slice
    columns: slice


class Multiplier(Protocol):
    """Operands prepared for one kernel."""

    def run(self, tile: Tile, c: Array) -> None:
        """Overwrite the contiguous ``c`` (a copy of the tile's C) with D."""


def plan_numbers(arithmetic: MmaArithmetic) -> tuple[int, ...]:
    """Return the arguments of the scalar path (order: ``mma_scalar``)."""
    acc, kept = arithmetic.acc, arithmetic.kept_fraction_bits
    zero, floor = arithmetic.zero_exponent, arithmetic.min_alignment_exponent
    return (
        arithmetic.block,
        arithmetic.k,
        arithmetic.fraction_bits or 0,
        arithmetic.a.min_exponent,
        arithmetic.b.min_exponent,
        acc.mantissa_bits,
        acc.min_exponent,
        acc.max_code,
        int(arithmetic.rounding == "nearest_even"),
        0 if kept is None else acc.mantissa_bits - kept,
        _NOTHING if zero is None else zero,
        _NOTHING if floor is None else floor,
        int(arithmetic.c_mode == "late"),
        int(arithmetic.method == "exact"),
    )


class SequentialMultiplier:
    """Chains of IEEE fused multiply-adds; one order, so nothing to prepare."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def run(self, tile: Tile, c: Array) -> None:
        """See :class:`Multiplier`."""
        from npusim.formats import mma_kernels

        problem = self._problem
        a = problem.a[problem.a_of[tile.n], tile.rows]
        b = np.ascontiguousarray(problem.b[problem.b_of[tile.n], :, tile.columns])
        if c.dtype == np.float64:
            mma_kernels.sequential_float64(a, b, c)
        else:
            mma_kernels.sequential_float32(a, b, c)


class ExactMultiplier:
    """Exact block sums in float64 lanes (``mma_exact``)."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._a = problem.a.astype(np.float64)
        transposed = np.ascontiguousarray(self._a.swapaxes(-1, -2))
        self._a_ranges = self._ranges(transposed)
        self._b = [chunk.astype(np.float64) for chunk in column_chunks(problem.b)]
        self._b_ranges = [self._ranges(chunk) for chunk in self._b]

    def _ranges(self, x: Array) -> tuple[Array, Array]:
        from npusim.formats import mma_exact

        block = self._problem.arithmetic.block
        shape = (x.shape[0], x.shape[1] // block, x.shape[2])
        largest, unit = np.empty(shape), np.empty(shape)
        for n in range(x.shape[0]):
            mma_exact.block_ranges(x[n], block, largest[n], unit[n])
        return largest, unit

    def run(self, tile: Tile, c: Array) -> None:
        """See :class:`Multiplier`."""
        from npusim.formats import mma_exact

        problem = self._problem
        n, m = problem.a_of[tile.n], problem.b_of[tile.n]
        chunk = tile.columns.start // TILE_COLUMNS
        largest, unit = self._a_ranges
        b_largest, b_unit = self._b_ranges[chunk]
        rows = (
            np.ascontiguousarray(largest[n, :, tile.rows]),
            np.ascontiguousarray(unit[n, :, tile.rows]),
        )
        operands = (self._a[n, tile.rows], self._b[chunk][m])
        run = mma_exact.exact_kernel(problem.arithmetic.block)
        run(operands, rows, (b_largest[m], b_unit[m]), c)


class FusedMultiplier:
    """Truncating fused dot-adds (``mma_kernels``); NaN and Inf operands by the scalar path."""

    def __init__(self, problem: Problem) -> None:
        arithmetic = problem.arithmetic
        self._problem = problem
        # Products of formats with float32's exponent range leave the float32 range.
        wide = max(arithmetic.a.exponent_bits, arithmetic.b.exponent_bits) > 5
        lane = np.float64 if wide else np.float32
        self._a, self._a_exponents, specials = decoded(problem.a, arithmetic.a.min_exponent, lane)
        self._b: list[Array] = []
        self._b_exponents: list[Array] = []
        for chunk in column_chunks(problem.b):
            values, exponents, more = decoded(chunk, arithmetic.b.min_exponent, lane)
            self._b.append(values)
            self._b_exponents.append(exponents)
            specials += more
        self._has_specials = specials > 0

    def run(self, tile: Tile, c: Array) -> None:
        """See :class:`Multiplier`."""
        before = c.copy() if self._has_specials else c
        if self._problem.arithmetic.c_mode == "late":
            self._run_late(tile, c)
        else:
            self._run_chain(tile, slice(0, self._a.shape[-1]), c)
        if self._has_specials:
            self._repeat_specials(tile, before, c)

    def _run_chain(self, tile: Tile, depth: slice, c: Array) -> None:
        """Chain the blocks of ``depth`` onto c."""
        from npusim.formats import mma_kernels

        problem, arithmetic = self._problem, self._problem.arithmetic
        n, m = problem.a_of[tile.n], problem.b_of[tile.n]
        chunk = tile.columns.start // TILE_COLUMNS
        kept, floor = arithmetic.kept_fraction_bits, arithmetic.min_alignment_exponent
        left = (
            np.ascontiguousarray(self._a[n, tile.rows, depth]),
            np.ascontiguousarray(self._a_exponents[n, tile.rows, depth]),
        )
        right = (self._b[chunk][m, depth], self._b_exponents[chunk][m, depth])
        plan = (
            arithmetic.fraction_bits or 0,
            -300 if floor is None else floor,
            -1 if kept is None else -(1 << (arithmetic.acc.mantissa_bits - kept)),
            int(arithmetic.acc.name == "float16"),
        )
        mma_kernels.fused_kernel(arithmetic.block)(left, right, c, plan)

    def _run_late(self, tile: Tile, c: Array) -> None:
        """Sum each instruction from 0 and add it to c with an IEEE addition."""
        step = self._problem.arithmetic.k
        for start in range(0, self._a.shape[-1], step):
            products = np.zeros_like(c)
            self._run_chain(tile, slice(start, start + step), products)
            c += products
            if self._problem.arithmetic.acc.name == "float16":
                c[...] = widen(cast(c, "float16"))

    def _repeat_specials(self, tile: Tile, before: Array, c: Array) -> None:
        """Compute rows and columns with a NaN or Inf operand again, one output at a time."""
        from npusim.formats import mma_scalar

        problem = self._problem
        a = problem.a[problem.a_of[tile.n], tile.rows]
        b = np.ascontiguousarray(problem.b[problem.b_of[tile.n], :, tile.columns])
        rows, columns = ~np.isfinite(a).all(axis=1), ~np.isfinite(b).all(axis=0)
        numbers = plan_numbers(problem.arithmetic)
        mma_scalar.matmul_scalar_where((a, b), (rows, columns), before, c, numbers)


def decoded(x: Array, min_exponent: int, lane: Any) -> tuple[Array, Array, int]:
    """Return lane values, int16 exponents and the number of NaN and Inf elements."""
    from npusim.formats import mma_kernels

    values, exponents = np.empty(x.shape, lane), np.empty(x.shape, np.int16)
    count = mma_kernels.decode_operand(
        x.reshape(-1), min_exponent, values.reshape(-1), exponents.reshape(-1)
    )
    return values, exponents, int(count)


def column_chunks(b: Array) -> list[Array]:
    """Return B (batch, K, N) as contiguous pieces of at most ``TILE_COLUMNS`` columns."""
    starts = range(0, b.shape[-1], TILE_COLUMNS)
    return [np.ascontiguousarray(b[..., start : start + TILE_COLUMNS]) for start in starts]


def is_scalar_only(arithmetic: MmaArithmetic) -> bool:
    """Whether only the scalar path knows this arithmetic (none of the registry's)."""
    if arithmetic.method == "sequential":
        return False
    if arithmetic.block not in (4, 8, 16, 32) or arithmetic.zero_exponent is not None:
        return True
    if arithmetic.method == "exact":
        return False
    to_nearest = arithmetic.rounding == "nearest_even"
    return (arithmetic.fraction_bits or 0) > 25 or to_nearest != (arithmetic.acc.name == "float16")


def multiply(problem: Problem, threads: int, path: Path | None) -> None:
    """Overwrite ``problem.out``; ``path`` None takes the fast one unless matrices are tiny."""
    arithmetic = problem.arithmetic
    macs = problem.a.shape[1] * problem.a.shape[2] * problem.b.shape[2]
    sequential = arithmetic.method == "sequential"
    small = path == "scalar" or (path is None and macs <= SMALL_MACS)
    if not sequential and (small or is_scalar_only(arithmetic)):
        from npusim.formats import mma_scalar

        operands, index = (problem.a, problem.b), (problem.a_of, problem.b_of)
        mma_scalar.matmul_scalar(operands, index, problem.out, plan_numbers(arithmetic))
        return
    multiplier: Multiplier
    if sequential:
        multiplier = SequentialMultiplier(problem)
    elif arithmetic.method == "exact":
        multiplier = ExactMultiplier(problem)
    else:
        multiplier = FusedMultiplier(problem)
    run_tiles(multiplier, problem.out, threads if macs * len(problem.out) > THREADED_MACS else 1)


def run_tiles(multiplier: Multiplier, out: Array, threads: int) -> None:
    """Run every tile of the batch; tiles share nothing, so threads cannot change a bit."""
    batch, rows, columns = out.shape
    tiles = [
        Tile(n, slice(row, min(row + TILE_ROWS, rows)), slice(left, left + TILE_COLUMNS))
        for n in range(batch)
        for left in range(0, columns, TILE_COLUMNS)
        for row in range(0, rows, TILE_ROWS)
    ]

    def one(tile: Tile) -> None:
        view = out[tile.n, tile.rows, tile.columns]
        c = np.ascontiguousarray(view)
        multiplier.run(tile, c)
        if c is not view:
            view[...] = c

    if threads == 1:
        for tile in tiles:
            one(tile)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(one, tile) for tile in tiles]:
            done.result()
