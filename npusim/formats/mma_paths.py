"""Choose and run the kernel of a matrix unit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from npusim.errors import FormatError
from npusim.formats.cast import Array, cast, widen
from npusim.formats.float_format import FloatFormat, get_format
from npusim.formats.mma_arithmetic import E8M0, Method, MmaArithmetic
from npusim.late_methods import dataclass

#: Number of multiply-adds below which threads cost more than they save.
THREADED_MACS = 1 << 21
#: Number of outputs that are processed at a time: they and 16 rows of operands fit into the L2 and L1 cache.
TILE_ROWS = 128
TILE_COLUMNS = 256


@dataclass(frozen=True)
class MmaProblem:
    """A batch of products: ``out[n] = a[a_of[n]] · b[b_of[n]] + out[n]``.

    ``a`` (A batch, M, K) and ``b`` (B batch, K, N) are in the arithmetic's formats, ``out``
    (batch, M, N) holds C and receives D as float32 values (float64 for a float64 accumulator).  ``a_scale`` (A batch,
    M, K / scale block) and ``b_scale`` (B batch, K / scale block, N): float32 values, None for 1.
    """

    arithmetic: MmaArithmetic
    a: Array
    b: Array
    out: Array
    a_of: Array
    b_of: Array
    a_scale: Array | None = None
    b_scale: Array | None = None

    @property
    def each(self) -> int:
        """The number of elements of one A, of one B and of one C."""
        return sum(math.prod(x.shape[1:]) for x in (self.a, self.b, self.out))

    def parts(self, elements: int) -> Iterator[MmaProblem]:
        """Yield the problem in parts of the batch; each has at most this number of elements of operands and outputs, or
        is one matrix.
        """
        count = max(1, elements // self.each)
        if count >= len(self.out):
            yield self
            return
        for start in range(0, len(self.out), count):
            of = slice(start, start + count)
            (a, a_scale, a_of), (b, b_scale, b_of) = (
                _used(*operand)
                for operand in ((self.a, self.a_scale, self.a_of[of]), (self.b, self.b_scale, self.b_of[of]))
            )
            yield MmaProblem(self.arithmetic, a, b, self.out[of], a_of, b_of, a_scale, b_scale)


def _used(matrices: Array, scale: Array | None, of: Array) -> tuple[Array, Array | None, Array]:
    """Return the matrices of an operand from the first used one to the last, with their scales and their numbers."""
    first, last = int(of.min()), int(of.max()) + 1
    return matrices[first:last], None if scale is None else scale[first:last], of - first


@dataclass(frozen=True)
class MmaWork:
    """Outputs that share columns of one B, each given by its matrix in the batch and its rows."""

    b_index: int
    columns: slice
    tiles: tuple[tuple[int, slice], ...]


#: Arrays that a kernel reads for an operand's matrices: their exact values first, (matrices, M, K) or (matrices, K, N),
#: or the parts into which they are split.
Lanes = tuple[Array, ...]
#: Number of elements of operands and outputs up to which all matrices are prepared and multiplied at once, and number
#: of elements of one matrix up to which a larger batch is multiplied in parts of this size: for large matrices an
#: additional call costs little.
TOGETHER, SMALL = 1 << 18, 1 << 14
#: The indices of the A and the B of each C, if there is only one A and one B.
_FIRST = np.zeros((2, 1), np.int64)


class Multiplier:
    """How one family of units prepares operands and multiplies them."""

    def __init__(self, unit: MmaArithmetic) -> None:
        self.unit = unit

    def prepare(self, values: Array, scale: Array | None, *, is_left: bool) -> Lanes:
        """Return prepared contiguous matrices of A or B, float32 or float64; ``scale``: one per block along k."""
        return (values,)

    def run(self, a: Lanes, b: Lanes, c: Array, which: Array) -> None:
        """Overwrite contiguous C (matrices, M, N) with D; ``which``: for each C the indices of its A and B."""
        raise NotImplementedError


class SequentialMultiplier(Multiplier):
    """Chains of IEEE fused multiply-adds; nothing to prepare."""

    def run(self, a: Lanes, b: Lanes, c: Array, which: Array) -> None:
        """See :class:`Multiplier`."""
        from npusim.formats import mma_kernels

        chain = mma_kernels.sequential_float64 if c.dtype == np.float64 else mma_kernels.sequential_float32
        chain(a[0], b[0], c, which)


class ExactMultiplier(Multiplier):
    """Exact block sums in float64 lanes (``mma_exact``)."""

    def prepare(self, values: Array, scale: Array | None, *, is_left: bool) -> Lanes:
        """Return the values and the ranges of their blocks; for A, blocks run along the columns of its transpose."""
        from npusim.formats import mma_exact

        lanes, block = values.astype(np.float64), self.unit.block
        if scale is not None:
            lanes *= expanded(scale, self.unit.scale_block, is_left=is_left)
        columns = np.ascontiguousarray(lanes.swapaxes(1, 2)) if is_left else lanes
        count, depth, width = columns.shape
        largest, step = np.empty((2, count, depth // block, width))
        mma_exact.block_ranges(columns, block, largest, step)
        return lanes, largest, step

    def run(self, a: Lanes, b: Lanes, c: Array, which: Array) -> None:
        """See :class:`Multiplier`."""
        from npusim.formats import mma_exact

        exact = mma_exact.exact_kernel(self.unit.block)
        exact((a[0], b[0]), a[1:], b[1:], c, which, mma_exact.scratch(c.shape[2]))


class FusedMultiplier(Multiplier):
    """Truncating fused dot-adds (``mma_kernels``)."""

    def prepare(self, values: Array, scale: Array | None, *, is_left: bool) -> Lanes:
        """Return the values with 0 in place of NaN and Inf, the exponents, the values themselves, and whether each
        block has NaN or Inf.

        Values are float32 if no product of two such operands exceeds float32's range, else float64.
        """
        from npusim.formats import mma_kernels, mma_narrow

        fmt = self.unit.a if is_left else self.unit.b
        powers = None if scale is None else expanded(scale, self.unit.scale_block, is_left=is_left)
        if powers is not None and np.isnan(powers).any():
            values = np.where(np.isnan(powers), np.float32(np.nan), values)
        lanes, exponents = np.empty(values.shape, np.float32), np.empty(values.shape, np.int16)
        specials = mma_kernels.decode_operand(
            values.reshape(-1), fmt.min_exponent, lanes.reshape(-1), exponents.reshape(-1)
        )
        if powers is not None:
            finite = np.where(np.isnan(powers), 1.0, powers)
            lanes = lanes * finite
            exponents += np.where(lanes == 0, 0, np.frexp(finite)[1] - 1).astype(np.int16)
        elif exponents.max(initial=0) > mma_narrow.LARGEST_EXPONENT:
            lanes = lanes.astype(np.float64)
        count, rows, depth = values.shape if is_left else (len(values), 1, values.shape[1])
        marks = np.zeros((count, rows, depth), np.bool_)
        if specials == 0:
            return lanes, exponents, lanes, marks
        unusual: Array = np.isnan(values) | np.isinf(values)
        if not is_left:
            unusual = np.any(unusual, axis=2, keepdims=True)
        block = self.unit.block
        marks[..., ::block] = unusual.reshape(count, rows, -1, block).any(axis=3)
        return lanes, exponents, values.astype(lanes.dtype), marks

    def run(self, a: Lanes, b: Lanes, c: Array, which: Array) -> None:
        """Overwrite C with D; if c is added last, each instruction sums from 0 and is added by an IEEE addition."""
        if self.unit.c_mode == "aligned":
            self._run_chain(a, b, c, which)
            return
        for start in range(0, a[0].shape[2], self.unit.k):
            part, products = slice(start, start + self.unit.k), np.zeros_like(c)
            left = tuple(np.ascontiguousarray(lane[..., part]) for lane in a)
            right = (*(np.ascontiguousarray(lane[:, part]) for lane in b[:-1]), np.ascontiguousarray(b[-1][..., part]))
            self._run_chain(left, right, products, which)
            c += products
            if self.unit.acc.name == "float16":
                c[...] = widen(cast(c, "float16"))

    def _run_chain(self, left: Lanes, right: Lanes, c: Array, which: Array) -> None:
        from npusim.formats import mma_kernels, mma_narrow

        unit = self.unit
        stored_bits, floor = unit.kept_fraction_bits, unit.min_alignment_exponent
        plan = (
            unit.fraction_bits or 0,
            -300 if floor is None else floor,
            -1 if stored_bits is None else -(1 << (unit.acc.mantissa_bits - stored_bits)),
            int(unit.acc.name == "float16"),
        )
        if left[0].dtype == right[0].dtype == np.float32 and mma_narrow.is_narrow(unit.block, plan[0]):
            result, scratch = c.copy(), mma_narrow.scratch(c.shape[2])
            narrow = mma_narrow.narrow_kernel(unit.block, bool(plan[3]))
            if narrow(left, right, result, which, plan, scratch) >= mma_narrow.LEAST_EXPONENT:
                c[...] = result
                return
        # Scaled products, and products of formats with float32's exponents, may exceed float32's range.
        is_wide = unit.scale_block or max(unit.a.exponent_bits, unit.b.exponent_bits) > 5
        lane = np.float64 if is_wide else np.float32
        left, right = (
            (x[0].astype(lane, copy=False), x[1], x[2].astype(lane, copy=False), x[3]) for x in (left, right)
        )
        mma_kernels.fused_kernel(unit.block)(left, right, c, which, plan, mma_kernels.scratch(c.shape[2], lane))


class GroupedMultiplier(Multiplier):
    """Exact sums of groups, scaled and then aligned by the exponents of their scales (Blackwell's FP4)."""

    def prepare(self, values: Array, scale: Array | None, *, is_left: bool) -> Lanes:
        """Return the values, groups first, and their scales as significands and exponents."""
        each = [self._prepared(x, None if scale is None else scale[n], is_left=is_left) for n, x in enumerate(values)]
        return tuple(map(np.stack, zip(*each, strict=True)))

    def _prepared(self, values: Array, scale: Array | None, *, is_left: bool) -> Lanes:
        unit = self.unit
        groups = (values if is_left else values.T).reshape(-1, values.shape[int(is_left)] // unit.group, unit.group)
        if scale is None:
            wide = np.ones(groups.shape[:2])
        else:
            wide = np.repeat((scale if is_left else scale.T).astype(np.float64), unit.scale_block // unit.group, axis=1)
        exponents = np.frexp(wide)[1] - 1
        # Subnormal scales are not normalised; a scale of 0 has the smallest exponent of float32.
        if unit.scale_format != E8M0:
            exponents = np.where(wide == 0, -126, np.maximum(exponents, get_format(unit.scale_format).min_exponent))
        significands = np.ldexp(wide, -exponents)
        exponents = np.where(np.isnan(wide), 0, exponents)
        shape = (1, 0, 2) if is_left else (1, 2, 0)
        return groups.astype(np.float64).transpose(shape), significands.T, exponents.T

    def run(self, a: Lanes, b: Lanes, c: Array, which: Array) -> None:
        """See :class:`Multiplier`."""
        for n, one in enumerate(c):
            self._run_one(tuple(x[which[0, n]] for x in a), tuple(x[which[1, n]] for x in b), one)

    def _run_one(self, a: Lanes, b: Lanes, c: Array) -> None:
        unit, (left, a_part, a_power), (right, b_part, b_power) = self.unit, a, b
        fraction = unit.fraction_bits or 0
        for first in range(0, len(left), unit.block // unit.group):
            part = slice(first, first + unit.block // unit.group)
            sums = np.zeros((*left[part].shape[:2], c.shape[1]))
            for k in range(unit.group):  # exact: multiples of 1/4, at most 576
                sums += left[part, :, k, None] * right[part, k, None, :]
            sums *= a_part[part, :, None] * b_part[part, None, :]
            powers = a_power[part, :, None] + b_power[part, None, :]
            # A c of 0 is not one of the terms.
            own = np.where(c == 0, powers.min(), np.maximum(np.frexp(np.where(np.isfinite(c), c, 0))[1] - 1, -126))
            top = np.maximum(powers.max(axis=0), own)
            total = np.trunc(np.ldexp(c.astype(np.float64), fraction - top))
            for one, power in zip(sums, powers, strict=True):  # the terms are whole numbers below 2^53
                total += np.trunc(np.ldexp(one, fraction + power - top))
            value = np.ldexp(total, top - fraction)
            rounded = value.astype(np.float32)
            away = np.abs(rounded.astype(np.float64)) > np.abs(value)
            inward = np.where(away & (np.abs(value) < 2.0**128), np.nextafter(rounded, np.float32(0.0)), rounded)
            c[...] = np.where(np.isinf(c) & ~np.isnan(total), c, inward + np.float32(0.0))


class TreeMultiplier(Multiplier):
    """Any other unit, slowly: ``mma_tree``, 10 to 30 million products a second."""

    def run(self, a: Lanes, b: Lanes, c: Array, which: Array) -> None:
        """See :class:`Multiplier`."""
        from npusim.formats.mma_tree import multiply_tree

        unit = self.unit
        assert unit.tree is not None
        for n, one in enumerate(c):
            multiply_tree(unit.tree, (unit.a, unit.b, unit.acc), a[0][which[0, n]], b[0][which[1, n]], one)


def expanded(scale: Array, block: int, *, is_left: bool) -> Array:
    """Return one float64 scale per element of an operand."""
    return np.repeat(scale.astype(np.float64), block, axis=2 if is_left else 1)


def operand_values(array: Array, fmt: FloatFormat, arithmetic: MmaArithmetic, axis: int) -> Array:
    """Return contiguous operand values, with k along ``axis`` in the order of the unit's groups.

    The values are float32, or float64 for float64 operands; tf32 drops its low 13 bits.
    """
    wide = np.ascontiguousarray(widen(array))
    if fmt.name == "tf32":
        # A NaN whose payload is in the dropped bits must remain a NaN.
        quiet = np.where(np.isnan(wide), np.float32(np.nan), wide)
        wide = (quiet.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    if arithmetic.index_groups is None:
        return wide
    order = np.concatenate([np.array(group) for group in arithmetic.index_groups])
    starts = np.arange(0, wide.shape[axis], arithmetic.k)
    permuted: Array = np.take(wide, (starts[:, None] + order).reshape(-1), axis=axis)
    return permuted


MULTIPLIERS: Mapping[Method, type[Multiplier]] = MappingProxyType(
    {
        "sequential": SequentialMultiplier,
        "exact": ExactMultiplier,
        "fused": FusedMultiplier,
        "grouped": GroupedMultiplier,
        "tree": TreeMultiplier,
    }
)


def multiply(problem: MmaProblem, threads: int) -> None:
    """Overwrite ``problem.out``; raise `FormatError` for an arithmetic that no kernel computes."""
    unit = problem.arithmetic
    if unit.method in ("exact", "fused"):
        _check_kernel(unit)
    multiplier = MULTIPLIERS[unit.method](unit)
    macs = math.prod(problem.a.shape[1:]) * problem.out.shape[2] * len(problem.out)
    run_work(multiplier, problem, threads if macs > THREADED_MACS else 1)


def _check_kernel(unit: MmaArithmetic) -> None:
    is_rounded = unit.method == "exact" or (unit.rounding == "nearest_even") == (unit.acc.name == "float16")
    if unit.block not in (4, 8, 16, 32) or (unit.fraction_bits or 0) > 25 or not is_rounded:
        raise FormatError(
            f"{unit}: no compiled kernel computes it; supported are blocks of 4, 8, 16 or 32, F of at most 25, and "
            "truncated sums that round to nearest in float16 and toward zero in float32"
        )


def works_of(problem: MmaProblem, threads: int) -> Iterator[MmaWork]:
    """Yield the outputs in pieces that share a prepared B; if possible, at least two for each thread."""
    rows, columns = problem.out.shape[1:]
    matrices: dict[int, list[int]] = {}
    for n, b_index in enumerate(problem.b_of.tolist()):
        matrices.setdefault(b_index, []).append(n)
    parts = [slice(row, min(row + TILE_ROWS, rows)) for row in range(0, rows, TILE_ROWS)]
    for b_index, those in matrices.items():
        tiles = tuple((n, part) for n in those for part in parts)
        groups = len(problem.b) * -(-columns // TILE_COLUMNS)
        pieces = 1 if threads == 1 else max(1, min(len(tiles), -(-2 * threads // groups)))
        for left in range(0, columns, TILE_COLUMNS):
            for piece in range(pieces):
                yield MmaWork(b_index, slice(left, left + TILE_COLUMNS), tiles[piece::pieces])


def run_work(multiplier: Multiplier, problem: MmaProblem, threads: int) -> None:
    """Run every piece of work; pieces share no output, so that threads cannot change a bit."""
    unit, last = problem.arithmetic, list[tuple[Array, Lanes]]()
    if threads == 1 and (problem.each <= SMALL or problem.each * len(problem.out) <= TOGETHER):
        # A shared B is prepared once, in one part: each of several parts would prepare it again.
        for part in (problem,) if 2 * len(problem.b) <= len(problem.out) else problem.parts(TOGETHER):
            left = multiplier.prepare(operand_values(part.a, unit.a, unit, 2), part.a_scale, is_left=True)
            right = multiplier.prepare(operand_values(part.b, unit.b, unit, 1), part.b_scale, is_left=False)
            multiplier.run(left, right, part.out, np.array((part.a_of, part.b_of)))
        return

    def prepared_a(n: int, rows: slice) -> Lanes:
        """Return the prepared rows of a matrix's A; the previous result if the matrix is the same constant."""
        raw = problem.a[problem.a_of[n], rows][None]
        scale = None if problem.a_scale is None else problem.a_scale[problem.a_of[n], rows][None]
        if scale is None and last:
            before, lanes = last[0]
            if before[0, 0].tobytes() == raw[0, 0].tobytes() and before.tobytes() == raw.tobytes():
                return lanes
        lanes = multiplier.prepare(operand_values(raw, unit.a, unit, 2), scale, is_left=True)
        last[:] = [(raw, lanes)]
        return lanes

    def one(work: MmaWork) -> None:
        raw = np.ascontiguousarray(problem.b[work.b_index, :, work.columns])[None]
        scale = None if problem.b_scale is None else problem.b_scale[work.b_index, :, work.columns][None]
        b = multiplier.prepare(operand_values(raw, unit.b, unit, 1), scale, is_left=False)
        for n, rows in work.tiles:
            a = prepared_a(n, rows)
            view = problem.out[n, rows, work.columns]
            c = np.ascontiguousarray(view)
            multiplier.run(a, b, c[None], _FIRST)
            if not np.may_share_memory(c, view):
                view[...] = c

    works: Any = works_of(problem, threads)
    if threads == 1:
        for work in works:
            one(work)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(one, work) for work in works]:
            done.result()
