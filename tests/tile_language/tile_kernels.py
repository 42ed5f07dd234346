"""TileLang kernels that the tests record, and what each computes in float64; needs the package."""

from __future__ import annotations

from typing import Any

import numpy as np
import tilelang
import tilelang.language as T
import torch
from tilelang.tools.cuda import iket

LOG2_E = 1.44269504


@tilelang.jit(out_idx=[2])
def matmul(rows: int, columns: int, depth: int, tile: int = 64, part: int = 32, stages: int = 2, swizzle: bool = False):
    @T.prim_func
    def product(
        A: T.Tensor((rows, depth), "float16"),
        B: T.Tensor((columns, depth), "float16"),
        C: T.Tensor((rows, columns), "float16"),
    ):
        with T.Kernel(T.ceildiv(columns, tile), T.ceildiv(rows, tile), threads=128) as (bx, by):
            left = T.alloc_shared((tile, part), "float16")
            right = T.alloc_shared((tile, part), "float16")
            total = T.alloc_fragment((tile, tile), "float32")
            T.use_swizzle(8, enable=swizzle)
            for k in T.Pipelined(T.ceildiv(depth, part), num_stages=stages):
                T.copy(A[by * tile, k * part], left)
                T.copy(B[bx * tile, k * part], right)
                T.gemm(left, right, total, transpose_B=True, clear_accum=k == 0, policy=T.GemmWarpPolicy.FullRow)
            T.copy(total, C[by * tile, bx * tile])

    return product


@tilelang.jit(out_idx=[3])
def flash(
    heads: int, groups: int, length: int, dim: int, causal: bool, rows: int = 64, columns: int = 64, stages: int = 1
):
    scale = dim**-0.5 * LOG2_E

    @T.prim_func
    def attention(
        Q: T.Tensor((length, heads, dim), "float16"),
        K: T.Tensor((length, heads // groups, dim), "float16"),
        V: T.Tensor((length, heads // groups, dim), "float16"),
        O: T.Tensor((length, heads, dim), "float16"),
    ):
        with T.Kernel(T.ceildiv(length, rows), heads, threads=128) as (bx, by):
            q = T.alloc_shared((rows, dim), "float16")
            k = T.alloc_shared((columns, dim), "float16")
            v = T.alloc_shared((columns, dim), "float16")
            s = T.alloc_fragment((rows, columns), "float32")
            p = T.alloc_fragment((rows, columns), "float16")
            o = T.alloc_fragment((rows, dim), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            before = T.alloc_fragment((rows,), "float32")
            factor = T.alloc_fragment((rows,), "float32")
            part = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            T.copy(Q[bx * rows : (bx + 1) * rows, by, :], q)
            T.clear(o)
            T.clear(total)
            T.fill(largest, -T.infinity("float32"))
            last = T.ceildiv((bx + 1) * rows, columns) if causal else T.ceildiv(length, columns)
            for t in T.Pipelined(last, num_stages=stages):
                T.copy(K[t * columns : (t + 1) * columns, by // groups, :], k)
                for i, j in T.Parallel(rows, columns):
                    if causal:
                        s[i, j] = T.if_then_else(bx * rows + i >= t * columns + j, 0, -T.infinity("float32"))
                    else:
                        s[i, j] = 0
                T.gemm(q, k, s, transpose_B=True)
                T.copy(largest, before)
                T.reduce_max(s, largest, dim=1, clear=False)
                for i in T.Parallel(rows):
                    factor[i] = T.exp2(before[i] * scale - largest[i] * scale)
                for i, j in T.Parallel(rows, columns):
                    s[i, j] = T.exp2(s[i, j] * scale - largest[i] * scale)
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(rows):
                    total[i] = total[i] * factor[i] + part[i]
                T.copy(s, p)
                for i, j in T.Parallel(rows, dim):
                    o[i, j] *= factor[i]
                T.copy(V[t * columns : (t + 1) * columns, by // groups, :], v)
                T.gemm(p, v, o)
            for i, j in T.Parallel(rows, dim):
                o[i, j] /= total[i]
            T.copy(o, O[bx * rows : (bx + 1) * rows, by, :])

    return attention


@tilelang.jit(out_idx=[1])
def late_read(size: int, block: int):
    """A value that is bound before its tile changes: 2 x + x, not 2 x + 2 x."""

    @T.prim_func
    def doubled(X: T.Tensor((size, block), "float32"), Y: T.Tensor((size, block), "float32")):
        with T.Kernel(size // 16, threads=128) as b:
            x = T.alloc_fragment((16, block), "float32")
            T.copy(X[b * 16, 0], x)
            for i, j in T.Parallel(16, block):
                before = x[i, j]
                x[i, j] = before * 2.0
                x[i, j] = x[i, j] + before
            T.copy(x, Y[b * 16, 0])

    return doubled


@tilelang.jit(out_idx=[1])
def no_start(size: int, block: int):
    """A sum that nothing clears."""

    @T.prim_func
    def summed(X: T.Tensor((size, block), "float32"), Y: T.Tensor((size,), "float32")):
        with T.Kernel(size // 16, threads=128) as b:
            x = T.alloc_fragment((16, block), "float32")
            y = T.alloc_fragment((16,), "float32")
            T.copy(X[b * 16, 0], x)
            T.reduce_sum(x, y, dim=1, clear=False)
            T.copy(y, Y[b * 16])

    return summed


@tilelang.jit
def added(A, B, C, block: int = 64):
    """Elements of two matrices, added by a kernel in the eager style, for any size."""
    rows, columns = T.dynamic("rows, columns")
    A: T.Tensor[[rows, columns], T.float32]
    B: T.Tensor[[rows, columns], T.float32]
    C: T.Tensor[[rows, columns], T.float32]
    with T.Kernel(T.ceildiv(columns, block), T.ceildiv(rows, 16), threads=128) as (bx, by):
        for i, j in T.Parallel(16, block):
            C[by * 16 + i, bx * block + j] = A[by * 16 + i, bx * block + j] + B[by * 16 + i, bx * block + j]


def attention_in_float64(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
    """Return softmax(q k^T / sqrt(d)) v of (length, heads, dim) arrays."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[2])
    if causal:
        s = np.where(np.tri(len(q), dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v)


def drawn(*shapes: tuple[int, ...], dtype: Any = torch.float16) -> list[torch.Tensor]:
    """Return tensors of normal numbers."""
    generator = torch.Generator().manual_seed(73)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@tilelang.autotune(configs=[{"tile": tile, "stages": stages} for tile in (32, 64) for stages in (1, 2)])
@tilelang.jit(out_idx=[1])
def doubled(rows: int, columns: int, tile: int = 16, stages: int = 0):
    """Twice a matrix, with configurations of its own."""

    @T.prim_func
    def twice(X: T.Tensor((rows, columns), "float16"), Y: T.Tensor((rows, columns), "float16")):
        with T.Kernel(T.ceildiv(rows, tile), threads=128) as b:
            x = T.alloc_shared((tile, columns), "float16")
            T.copy(X[b * tile, 0], x)
            for i, j in T.Parallel(tile, columns):
                x[i, j] = x[i, j] + x[i, j]
            T.copy(x, Y[b * tile, 0])

    return twice


@tilelang.jit(out_idx=[1])
def in_two(rows: int, columns: int):
    """Two launches in one function: a matrix, and the sums of its rows, through a buffer in global memory."""

    @T.prim_func
    def summed(A: T.Tensor((rows, columns), "float32"), B: T.Tensor((rows,), "float32")):
        between = T.alloc_global((rows, columns), "float32")
        with T.Kernel(rows // 16, threads=128) as b:
            for i, j in T.Parallel(16, columns):
                between[b * 16 + i, j] = A[b * 16 + i, j] * 2.0
        with T.Kernel(rows // 16, threads=128) as b:
            x = T.alloc_fragment((16, columns), "float32")
            y = T.alloc_fragment((16,), "float32")
            T.copy(between[b * 16, 0], x)
            T.reduce_sum(x, y, dim=1)
            T.copy(y, B[b * 16])

    return summed


@tilelang.jit
def chunk_before(chunks: int):
    """Return a kernel that copies the rows of the chunk before, of the next batch; the first chunk has none."""

    @T.prim_func
    def kernel(A: T.Tensor((3, chunks * 16, 32), "float32"), B: T.Tensor((2, chunks * 16, 32), "float32")):
        with T.Kernel(chunks, 2, threads=128) as (c, b):
            x = T.alloc_fragment((16, 32), "float32")
            for i, d in T.Parallel(16, 32):
                row = c * 16 - 16 + i
                x[i, d] = A[b + 1, row, d]
            T.copy(x, B[b, c * 16 : c * 16 + 16, 0:32])

    return kernel


@tilelang.jit
def moved_by_a_tensor(columns: int):
    """Return a kernel whose columns a tensor moves, perhaps below 0."""

    @T.prim_func
    def kernel(I: T.Tensor((4,), "int32"), A: T.Tensor((5, columns), "float32"), B: T.Tensor((4, columns), "float32")):
        with T.Kernel(4, threads=128) as b:
            x = T.alloc_fragment((columns,), "float32")
            for i in T.Parallel(columns):
                x[i] = A[b + 1, i + I[b]]
            T.copy(x, B[b, 0:columns])

    return kernel


@tilelang.jit
def through_a_view(is_global: bool):
    """Return a kernel that fills a buffer by another shape of it."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128) as _:
            x = T.alloc_shared((64,), "float32")
            T.copy(A, x)
            view = T.reshape(B if is_global else x, [8, 8])
            T.copy(x, B)
            T.fill(view, 7.0)
            T.copy(x, A)

    return kernel


@tilelang.jit
def of_each(function: str):
    """Return a kernel that applies a function of TileLang's, or a division by 3, to each element."""
    apply = getattr(T, function, None)

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128) as _:
            x = T.alloc_fragment((64,), "float32")
            for i in T.Parallel(64):
                x[i] = A[i] / 3.0 if apply is None else apply(A[i])
            T.copy(x, B)

    return kernel


@tilelang.jit
def sum_and_product(fmt: str, sums: bool):
    """Return a kernel of a product whose rows are added up, where asked."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), fmt), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((64, 64), fmt)
            c = T.alloc_fragment((64, 64), "float32")
            total = T.alloc_fragment((64,), "float32")
            T.copy(A, a, prefer_instruction="cp.async")
            T.gemm(a, a, c, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
            if sums:
                T.reduce_sum(c, total, dim=1)
            else:
                T.reduce_max(c, total, dim=1)
            T.copy(total, B)

    return kernel


@tilelang.jit
def difference():
    """Return a kernel whose arguments have an order."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32"), C: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128) as _:
            x = T.alloc_fragment((64,), "float32")
            for i in T.Parallel(64):
                x[i] = A[i] - B[i]
            T.copy(x, C)

    return kernel


@tilelang.jit(out_idx=[2])
def mixed(streams: int, columns: int):
    """Sums of a few products in parallel loops, as a mix of residual streams has them."""

    @T.prim_func
    def main(
        A: T.Tensor((streams, streams), "float32"),
        B: T.Tensor((streams, columns), "float32"),
        Y: T.Tensor((streams, columns), "float32"),
    ):
        with T.Kernel(T.ceildiv(columns, 32), threads=128) as c:
            a = T.alloc_fragment((streams, streams), "float32")
            b = T.alloc_fragment((streams, 32), "float32")
            y = T.alloc_fragment((streams, 32), "float32")
            T.copy(A[0, 0], a)
            T.copy(B[0, c * 32], b)
            for i, j in T.Parallel(streams, 32):
                y[i, j] = 0
                for k in T.serial(streams):
                    y[i, j] += a[k, i] * b[k, j]
            T.copy(y, Y[0, c * 32])

    return main


@tilelang.jit(out_idx=[3])
def padded_flash(heads: int, length: int, dim: int, group: int):
    """Attention of sequences of several lengths; ``group``: queries see keys up to the end of their own group."""
    scale = dim**-0.5 * LOG2_E

    @T.prim_func
    def attention(
        Q: T.Tensor((length, heads, dim), "float16"),
        K: T.Tensor((length, heads, dim), "float16"),
        Starts: T.Tensor((3,), "int32"),
        O: T.Tensor((length, heads, dim), "float16"),
    ):
        with T.Kernel(T.ceildiv(length, 32), heads, 2, threads=128) as (bx, by, bz):
            q = T.alloc_shared((32, dim), "float16")
            k = T.alloc_shared((32, dim), "float16")
            s = T.alloc_fragment((32, 32), "float32")
            p = T.alloc_fragment((32, 32), "float16")
            o = T.alloc_fragment((32, dim), "float32")
            largest = T.alloc_fragment((32,), "float32")
            before = T.alloc_fragment((32,), "float32")
            factor = T.alloc_fragment((32,), "float32")
            part = T.alloc_fragment((32,), "float32")
            total = T.alloc_fragment((32,), "float32")
            first = Starts[bz]
            count = Starts[bz + 1] - first
            T.copy(Q[first + bx * 32 : first + (bx + 1) * 32, by, :], q)
            T.clear(o)
            T.clear(total)
            T.fill(largest, -T.infinity("float32"))
            for t in T.Pipelined(T.ceildiv(count, 32), num_stages=1):
                T.copy(K[first + t * 32 : first + (t + 1) * 32, by, :], k)
                for i, j in T.Parallel(32, 32):
                    s[i, j] = T.if_then_else(
                        (bx * 32 + i) // group < (t * 32 + j) // group or t * 32 + j >= count or bx * 32 + i >= count,
                        -1e9,
                        0,
                    )
                T.gemm(q, k, s, transpose_B=True)
                T.copy(largest, before)
                T.reduce_max(s, largest, dim=1, clear=False)
                for i in T.Parallel(32):
                    factor[i] = T.exp2(before[i] * scale - largest[i] * scale)
                for i, j in T.Parallel(32, 32):
                    s[i, j] = T.exp2(s[i, j] * scale - largest[i] * scale)
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(32):
                    total[i] = total[i] * factor[i] + part[i]
                for i, j in T.Parallel(32, dim):
                    o[i, j] = o[i, j] * factor[i]
                T.copy(s, p)
                T.gemm(p, k, o)
            for i, j in T.Parallel(32, dim):
                if bx * 32 + i < count:
                    O[first + bx * 32 + i, by, j] = o[i, j] / total[i]

    return attention


@tilelang.jit(out_idx=[1])
def scales(size: int):
    @T.prim_func
    def widened(A: T.Tensor((size,), "float8_e8m0fnu"), B: T.Tensor((size,), "float32")):
        with T.Kernel(1, threads=128):
            b = T.alloc_fragment((size,), "float32")
            for i in T.Parallel(size):
                b[i] = T.cast(A[i], "float32")
            T.copy(b, B)

    return widened


@tilelang.jit
def split_product(rows: int, columns: int, depth: int, splits: int, kind: str = "part", tile: int = 32, part: int = 32):
    """A product whose depth several blocks share: each adds its part to the result."""

    @T.prim_func
    def product(
        A: T.Tensor((rows, depth), "float16"),
        B: T.Tensor((depth, columns), "float16"),
        C: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(columns // tile, rows // tile, splits, threads=128) as (bx, by, bz):
            left = T.alloc_shared((tile, part), "float16")
            right = T.alloc_shared((part, tile), "float16")
            total = T.alloc_fragment((tile, tile), "float32")
            T.clear(total)
            for k in T.serial(depth // splits // part):
                T.copy(A[by * tile, bz * (depth // splits) + k * part], left)
                T.copy(B[bz * (depth // splits) + k * part, bx * tile], right)
                T.gemm(left, right, total)
            if kind == "part":
                T.atomic_add(C[by * tile : (by + 1) * tile, bx * tile : (bx + 1) * tile], total)
            elif kind == "elements":
                for i, j in T.Parallel(tile, tile):
                    T.atomic_add(C[by * tile + i, bx * tile + j], total[i, j])
            else:
                for i, j in T.Parallel(tile, tile // 2):
                    T.atomic_addx2(C[by * tile + i, bx * tile + j * 2], total[i, j * 2])

    return product


@tilelang.jit
def added_rows(rows: int, columns: int):
    """All elements of a tile added to one row, which is no tile's part."""

    @T.prim_func
    def sums(A: T.Tensor((rows, columns), "float32"), C: T.Tensor((columns,), "float32")):
        with T.Kernel(rows // 16, threads=128) as bx:
            a = T.alloc_fragment((16, columns), "float32")
            T.copy(A[bx * 16, 0], a)
            for i, j in T.Parallel(16, columns):
                T.atomic_add(C[j], a[i, j])

    return sums


@tilelang.jit(out_idx=[4])
def copied_by_an_if(length: int, dim: int, tile: int = 32, hides: bool = False):
    """Each block reads the tiles before its own of one pair of tensors, and at last its own of the first half.

    ``hides``: the mask of the last one says what is hidden.
    """

    @T.prim_func
    def attended(
        Q: T.Tensor((length, dim), "float16"),
        K: T.Tensor((2 * length, dim), "float16"),
        V: T.Tensor((2 * length, dim), "float16"),
        B: T.Tensor((length,), "float32"),
        O: T.Tensor((length, dim), "float32"),
    ):
        with T.Kernel(length // tile, threads=128) as bx:
            q = T.alloc_shared((tile, dim), "float16")
            k = T.alloc_shared((tile, dim), "float16")
            v = T.alloc_shared((tile, dim), "float16")
            b = T.alloc_shared((tile,), "float32")
            s = T.alloc_fragment((tile, tile), "float32")
            p = T.alloc_fragment((tile, tile), "float16")
            o = T.alloc_fragment((tile, dim), "float32")
            T.copy(Q[bx * tile, 0], q)
            T.copy(B[bx * tile], b)
            T.clear(o)
            for t in T.Pipelined(bx + 1, num_stages=2):
                is_last = T.if_then_else(t == bx, 1, 0)
                if is_last != 0:
                    T.copy(K[bx * tile, 0], k)
                    T.copy(V[bx * tile, 0], v)
                else:
                    T.copy(K[length + t * tile, 0], k)
                    T.copy(V[length + t * tile, 0], v)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True)
                for i, j in T.Parallel(tile, tile):
                    s[i, j] = T.exp2(s[i, j] * 0.125 - b[i])
                if is_last != 0:
                    for i, j in T.Parallel(tile, tile):
                        seen = T.if_then_else(i // 4 >= j // 4, 1, 0)
                        s[i, j] = (
                            T.if_then_else(seen == 0, 0, s[i, j]) if hides else T.if_then_else(seen > 0, s[i, j], 0)
                        )
                T.copy(s, p)
                T.gemm(p, v, o)
            T.copy(o, O[bx * tile, 0])

    return attended


def attended_in_float64(q: Any, k: Any, v: Any, b: Any, tile: int = 32) -> Any:
    """Return what `copied_by_an_if` computes."""
    length, made = len(q), np.zeros((len(q), v.shape[1]))
    places = np.arange(tile)
    for first in range(0, length, tile):
        own = slice(first, first + tile)
        for t in range(0, first + tile, tile):
            keys = own if t == first else slice(length + t, length + t + tile)
            p = np.exp2(q[own] @ k[keys].T * 0.125 - b[own, None])
            hidden = (t == first) & (places[:, None] // 4 < places // 4)
            made[own] += np.where(hidden, 0, p).astype(np.float16).astype(np.float64) @ v[keys]
    return made


@tilelang.jit
def two_results_behind_a_bound(rows: int, columns: int, blocks: int):
    """Twice the first half of each row, and all of it, by the blocks that have rows."""

    @T.prim_func
    def halves(
        X: T.Tensor((rows, columns), "float32"),
        Y: T.Tensor((rows, columns // 2), "float32"),
        Z: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(blocks, threads=128) as b:
            half = T.alloc_fragment((16, columns // 2), "float32")
            whole = T.alloc_fragment((16, columns), "float32")
            if b * 16 < rows:
                T.copy(X[b * 16, 0], half)
                T.copy(X[b * 16, 0], whole)
                for i, j in T.Parallel(16, columns // 2):
                    half[i, j] *= 2.0
                for i, j in T.Parallel(16, columns):
                    whole[i, j] += 1.0
                T.copy(half, Y[b * 16, 0])
                T.copy(whole, Z[b * 16, 0])

    return halves


@tilelang.jit
def product_of_warp_groups(rows: int, columns: int, depth: int, slots: int, waits: bool = True):
    """A group copies ahead for another one's products; without ``waits`` it does not wait for these."""
    tile, part = 32, 32

    @T.prim_func
    def product(
        A: T.Tensor((rows, depth), "float16"),
        B: T.Tensor((depth, columns), "float16"),
        C: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(columns // tile, rows // tile, threads=256) as (bx, by):
            left = T.alloc_shared((slots, tile, part), "float16")
            right = T.alloc_shared((slots, part, tile), "float16")
            total = T.alloc_fragment((tile, tile), "float32")
            barriers = T.alloc_barrier([128] * slots * 2)
            with T.ws(1):
                T.clear(total)
            for k in range(depth // part):
                with T.ws(0):
                    if waits:
                        T.mbarrier_wait_parity(mbarrier=barriers[k % slots + slots], parity=(k // slots % 2) ^ 1)
                    T.tma_copy(
                        A[by * tile : (by + 1) * tile, k * part : (k + 1) * part],
                        left[k % slots, :, :],
                        barrier=barriers[k % slots],
                    )
                    T.tma_copy(
                        B[k * part : (k + 1) * part, bx * tile : (bx + 1) * tile],
                        right[k % slots, :, :],
                        barrier=barriers[k % slots],
                    )
                    T.mbarrier_arrive(mbarrier=barriers[k % slots])
                with T.ws(1):
                    T.mbarrier_wait_parity(mbarrier=barriers[k % slots], parity=k // slots % 2)
                    T.gemm(left[k % slots, :, :], right[k % slots, :, :], total)
                    T.mbarrier_arrive(mbarrier=barriers[k % slots + slots])
            with T.ws(1):
                T.copy(total, C[by * tile, bx * tile])

    return product


@tilelang.jit
def with_events(size: int):
    """Events that record times, around an assignment and in it."""

    @T.prim_func
    def above(A: T.Tensor((size,), "float32"), C: T.Tensor((size,), "float32")):
        with T.Kernel(T.ceildiv(size, 64), threads=64) as bx, iket.range("all"):
            for i in T.Parallel(64):
                iket.mark("store", payload=iket.payload(bx * 64 + i, dtype="int32"))
                C[bx * 64 + i] = A[bx * 64 + i] + 1.0

    return above


@tilelang.jit
def product_of_two_parts(rows: int, columns: int, depth: int, tail: int):
    """A tile whose parts are copied, scaled together and multiplied apart."""

    @T.prim_func
    def product(
        A: T.Tensor((rows, depth + tail), "float16"),
        B: T.Tensor((columns, depth), "float16"),
        B_tail: T.Tensor((columns, tail), "float16"),
        C: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(rows // 32, threads=128) as bx:
            left = T.alloc_shared((32, depth + tail), "float16")
            right = T.alloc_shared((columns, depth), "float16")
            right_tail = T.alloc_shared((columns, tail), "float16")
            total = T.alloc_fragment((32, columns), "float32")
            T.copy(A[bx * 32 : (bx + 1) * 32, :depth], left[:, :depth])
            T.copy(A[bx * 32 : (bx + 1) * 32, depth:], left[:, depth:])
            T.copy(B, right)
            T.copy(B_tail, right_tail)
            for i, j in T.Parallel(32, depth + tail):
                left[i, j] = left[i, j] * 2
            T.clear(total)
            T.gemm(left[:, :depth], right, total, transpose_B=True)
            T.gemm(left[:, depth:], right_tail, total, transpose_B=True)
            T.copy(total, C[bx * 32, 0])

    return product


@tilelang.jit
def sum_of_chosen_blocks(rows: int, length: int, dim: int, tile: int = 32):
    """The sum of chosen tiles of a product by that of their weights; ``seen`` says whether a program has one."""

    @T.prim_func
    def mean(
        P: T.Tensor((rows, length), "float16"),
        V: T.Tensor((length, dim), "float16"),
        W: T.Tensor((rows, length), "float32"),
        chosen: T.Tensor((rows // 32, length // tile), "bool"),
        O: T.Tensor((rows, dim), "float32"),
    ):
        with T.Kernel(rows // 32, threads=128) as bx:
            p = T.alloc_shared((32, tile), "float16")
            v = T.alloc_shared((tile, dim), "float16")
            o = T.alloc_fragment((32, dim), "float32")
            w = T.alloc_fragment((32, tile), "float32")
            part = T.alloc_fragment((32,), "float32")
            total = T.alloc_fragment((32,), "float32")
            seen = T.alloc_var("bool")
            T.clear(o)
            T.clear(total)
            seen = False
            for k in T.Pipelined(length // tile, num_stages=1):
                if chosen[bx, k]:
                    seen = True
                    T.copy(P[bx * 32, k * tile], p)
                    T.copy(V[k * tile, 0], v)
                    T.gemm(p, v, o)
                    T.copy(W[bx * 32, k * tile], w)
                    T.reduce_sum(w, part, dim=1)
                    for i in T.Parallel(32):
                        total[i] += part[i]
            if seen:
                for i, j in T.Parallel(32, dim):
                    o[i, j] /= total[i]
            T.copy(o, O[bx * 32, 0])

    return mean


@tilelang.jit
def combined_splits(rows: int, splits: int, dim: int):
    """The sum of partial results, weighted by maxima along an axis of splits."""

    @T.prim_func
    def combined(
        L: T.Tensor((splits, rows), "float32"),
        P: T.Tensor((rows, splits, dim), "float32"),
        O: T.Tensor((rows, dim), "float32"),
    ):
        with T.Kernel(rows // 32, threads=128) as bx:
            every = T.alloc_fragment((splits, 32), "float32")
            largest = T.alloc_fragment((32,), "float32")
            part = T.alloc_fragment((32, dim), "float32")
            o = T.alloc_fragment((32, dim), "float32")
            T.clear(o)
            T.copy(L[:, bx * 32 : (bx + 1) * 32], every)
            T.reduce_max(every, largest, dim=0, clear=True)
            for k in T.Pipelined(splits, num_stages=1):
                T.copy(P[bx * 32 : (bx + 1) * 32, k, :], part)
                for i, j in T.Parallel(32, dim):
                    o[i, j] += part[i, j] * T.exp2(every[k, i] - largest[i])
            T.copy(o, O[bx * 32, 0])

    return combined


@tilelang.jit
def persistent_product(rows: int, columns: int, depth: int, programs: int):
    @T.prim_func
    def product(
        A: T.Tensor((rows, depth), "float16"),
        B: T.Tensor((depth, columns), "float16"),
        C: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(programs, threads=128) as number:
            left = T.alloc_shared((32, 32), "float16")
            right = T.alloc_shared((32, 32), "float16")
            total = T.alloc_fragment((32, 32), "float32")
            for bx, by in T.Persistent([rows // 32, columns // 32], programs, number):
                T.clear(total)
                for k in T.Pipelined(depth // 32, num_stages=2):
                    T.copy(A[bx * 32, k * 32], left)
                    T.copy(B[k * 32, by * 32], right)
                    T.gemm(left, right, total)
                T.copy(total, C[bx * 32, by * 32])

    return product


@tilelang.jit
def filled_below(rows: int, columns: int, end: int):
    """Rows below a number are copied, others are another tensor's, by an if with two ways."""

    @T.prim_func
    def filled(
        A: T.Tensor((rows, columns), "float32"),
        B: T.Tensor((rows, columns), "float32"),
        C: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(rows // 32, threads=128) as bx:
            x = T.alloc_fragment((32, columns), "float32")
            for i, j in T.Parallel(32, columns):
                if bx * 32 + i < end:
                    x[i, j] = A[bx * 32 + i, j]
                else:
                    x[i, j] = B[bx * 32 + i, j] * 2.0
            T.copy(x, C[bx * 32, 0])

    return filled


@tilelang.jit
def masked_first_tile(length: int, dim: int, tile: int = 32):
    """Maxima and sums of scores; the first tile alone is masked, by a number of a tensor."""

    @T.prim_func
    def masked(
        Q: T.Tensor((length, dim), "float16"),
        K: T.Tensor((length, dim), "float16"),
        ends: T.Tensor((length // 32,), "int32"),
        O: T.Tensor((length,), "float32"),
    ):
        with T.Kernel(length // 32, threads=128) as bx:
            q = T.alloc_shared((32, dim), "float16")
            k = T.alloc_shared((tile, dim), "float16")
            s = T.alloc_fragment((32, tile), "float32")
            part = T.alloc_fragment((32,), "float32")
            total = T.alloc_fragment((32,), "float32")
            T.copy(Q[bx * 32, 0], q)
            T.clear(total)
            for t in T.Pipelined(length // tile, num_stages=1):
                T.copy(K[t * tile, 0], k)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True)
                if t == 0:
                    for i, j in T.Parallel(32, tile):
                        s[i, j] = T.if_then_else(t * tile + j >= ends[bx], -T.infinity("float32"), s[i, j])
                for i, j in T.Parallel(32, tile):
                    s[i, j] = T.exp2(s[i, j] * 0.125)
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(32):
                    total[i] += part[i]
            T.copy(total, O[bx * 32 : (bx + 1) * 32])

    return masked


@tilelang.jit
def powers_above(rows: int, columns: int):
    """The power of two above each size, from its bits, with the opposite sign, from the sign's bit."""

    @T.prim_func
    def powers(A: T.Tensor((rows, columns), "float32"), C: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows // 32, threads=128) as bx:
            x = T.alloc_fragment((32, columns), "float32")
            y = T.alloc_fragment((32, columns), "float32")
            T.copy(A[bx * 32, 0], x)
            for i, j in T.Parallel(32, columns):
                exponent = (T.reinterpret(x[i, j], "uint32") >> 23) & 0xFF
                sign = T.reinterpret(T.reinterpret(x[i, j], "uint32"), "int32") >> 31
                power = T.reinterpret((T.Cast("int32", exponent) + 1) << 23, "float32")
                y[i, j] = power * T.Cast("float32", -1 - 2 * sign)
            T.copy(y, C[bx * 32, 0])

    return powers
