"""Kernels of TileLang-Ascend that work ahead: slots of tiles, batches, tasks of a core; in our own words.

``change`` makes a kernel that is not what it seems, at the line that ends with its name.
"""

import tilelang
from tilelang import language as T


@tilelang.jit(out_idx=[1])
def copied_ahead(rows=160, columns=48, tile=32, part=8, slots=2, change=""):
    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows // tile, is_npu=True) as (cid, vid):
            x = T.alloc_ub((slots, part // 2, columns), "float32")
            y = T.alloc_ub((slots, part // 2, columns), "float32")
            first = cid * tile + vid * (part // 2)
            with T.Scope("V"):
                if change != "start":
                    T.copy(X[first + (part if change == "other" else 0), 0], x[0, :, :])
                for k in T.serial(tile // part):
                    now, ahead = k % slots, (k + 1) % slots
                    if k < tile // part - (2 if change == "last" else 1):
                        T.copy(X[first + (k + 1) * part, 0], x[ahead, :, :])
                    if change == "before":
                        T.tile.mul(y[now, :, :], x[now, :, :], 1.0)
                        T.tile.add(y[now, :, :], y[now, :, :], x[(k + 2) % slots, :, :])
                    T.tile.exp(y[now, :, :], x[ahead if change == "next" else now, :, :])
                    T.copy(y[now, :, :], Y[first + k * part, 0])

    return main


@tilelang.jit(out_idx=[1])
def striding(columns=40, tile=16, cores=6, stride=6, change=""):
    rows = T.symbolic("rows")
    blocks = T.ceildiv(rows, tile)

    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(cores, threads=2, is_npu=True) as (cid):
            x = T.alloc_ub((2, tile, columns), "float32")
            total = T.alloc_ub((tile, columns), "float32")
            T.tile.fill(total, 0.0)
            for i in T.serial(T.ceildiv(blocks, cores)):  # carried
                block, slot = cid + i * stride, i % 2
                if block < blocks:
                    T.copy(X[block * tile, 0], x[slot, :, :])
                    if change == "carried":
                        T.tile.add(total, total, x[slot, :, :])
                        T.copy(total, x[slot, :, :])
                    T.tile.mul(x[slot, :, :], x[slot, :, :], 3.0)
                    T.copy(x[slot, :, :], Y[block * tile, 0])

    return main


@tilelang.jit(out_idx=[2])
def product_ahead(rows=64, columns=96, depth=128, tile=32, part=64, inner=16, cores=4):
    parts = depth // part

    @T.prim_func
    def main(
        A: T.Tensor((rows, depth), "float16"),
        B: T.Tensor((depth, columns), "float16"),
        C: T.Tensor((rows, columns), "float16"),
    ):
        with T.Kernel(cores, is_npu=True) as (cid, _):
            a = T.alloc_L1((2, tile, part), "float16")
            b = T.alloc_L1((2, part, tile), "float16")
            left = T.alloc_L0A((2, tile, inner), "float16")
            right = T.alloc_L0B((2, inner, tile), "float16")
            c = T.alloc_L0C((tile, tile), "float")
            with T.Scope("C"):
                for x, y in T.Persistent([rows // tile, columns // tile], cores, cid):
                    T.copy(A[x * tile, 0], a[0, :, :])
                    T.copy(B[0, y * tile], b[0, :, :])
                    for k in T.serial(parts):
                        if k < parts - 1:
                            T.copy(A[x * tile, (k + 1) * part], a[(k + 1) % 2, :, :])
                            T.copy(B[(k + 1) * part, y * tile], b[(k + 1) % 2, :, :])
                        for kk in T.serial(part // inner):
                            T.copy(a[k % 2, 0, kk * inner], left[kk % 2, :, :])
                            T.copy(b[k % 2, kk * inner, 0], right[kk % 2, :, :])
                            T.mma(left[kk % 2, :, :], right[kk % 2, :, :], c, init=T.And(k == 0, kk == 0))
                    T.copy(c, C[x * tile, y * tile])

    return main


@tilelang.jit(out_idx=[3], workspace_idx=[4, 5, 6])
def batched_flash(heads=3, length=160, keys=160, dim=64, tile=32, ahead=4, interval=2, cores=4, change=""):
    half, blocks, steps = tile // 2, length // tile, keys // tile
    tasks, scale = blocks * heads, dim**-0.5
    least, more = tasks // cores, tasks % cores

    def own(core):
        extra = T.if_then_else(core < more, core, more)
        return core * least + extra, least + T.if_then_else(core < more, 1, 0)

    @T.prim_func
    def main(
        Q: T.Tensor((heads, length, dim), "float16"),
        K: T.Tensor((heads, keys, dim), "float16"),
        V: T.Tensor((heads, keys, dim), "float16"),
        O: T.Tensor((heads, length, dim), "float16"),
        scores_of: T.Tensor((cores, ahead, tile, tile), "float"),
        weights_of: T.Tensor((cores, ahead, tile, tile), "float16"),
        parts_of: T.Tensor((cores, ahead, tile, dim), "float"),
    ):
        with T.Kernel(cores, is_npu=True) as (cid, vid):
            q = T.alloc_L1((tile, dim), "float16")
            k = T.alloc_L1((tile, dim), "float16")
            p = T.alloc_L1((tile, tile), "float16")
            left = T.alloc_L0A((2, tile, dim), "float16")
            right = T.alloc_L0B((2, dim, tile), "float16")
            weight = T.alloc_L0A((2, tile, tile), "float16")
            value = T.alloc_L0B((2, tile, dim), "float16")
            s = T.alloc_L0C((2, tile, tile), "float")
            o = T.alloc_L0C((2, tile, dim), "float")
            result = T.alloc_ub((half, dim), "float")
            narrow = T.alloc_ub((half, dim), "float16")
            part = T.alloc_ub((half, dim), "float")
            wide = T.alloc_ub((half, dim), "float")
            scores = T.alloc_ub((half, tile), "float")
            rows = T.alloc_ub((half, tile), "float")
            weights = T.alloc_ub((half, tile), "float16")
            largest = T.alloc_ub((2, half, 1), "float")
            factors = T.alloc_ub((ahead, half, 1), "float")
            sums = T.alloc_ub((ahead, half, 1), "float")
            total = T.alloc_ub((half, 1), "float")
            begin, count = own(cid)
            with T.Scope("C"):
                T.set_cross_flag("MTE2", 3)
                for t in T.serial(count):
                    task = begin + t
                    block, head = task % blocks, task // blocks
                    T.copy(Q[head, block * tile : (block + 1) * tile, :], q)
                    for n in T.serial(T.ceildiv(steps, ahead)):
                        here = T.if_then_else(steps - n * ahead < ahead, steps - n * ahead, ahead)
                        T.wait_cross_flag(1)
                        for i in T.serial(here):
                            at = (n * ahead + i) * tile
                            T.copy(K[head, at : at + tile, :], k)
                            if i < (1 if change == "filled" else 2):  # filled
                                T.copy(q, left[i % 2, :, :])
                            T.copy(k, right[i % 2, :, :], transpose=True)
                            T.mma(left[i % 2, :, :], right[i % 2, :, :], s[i % 2, :, :], init=True)
                            T.copy(s[i % 2, :, :], scores_of[cid, i, :, :])
                            if (i + 1) % interval == 0 or i == here - 1:
                                T.set_cross_flag("FIX", 0)
                        T.wait_cross_flag(5)
                        for i in T.serial(here):
                            at = (n * ahead + i) * tile
                            T.copy(V[head, at : at + tile, :], value[i % 2, :, :])
                            if i % interval == 0 and change != "unset":
                                T.wait_cross_flag(2)
                            T.copy(weights_of[cid, (0 if change == "slot" else i), :, :], p)
                            T.copy(p, weight[i % 2, :, :])
                            T.mma(weight[i % 2, :, :], value[i % 2, :, :], o[i % 2, :, :], init=True)
                            T.copy(o[i % 2, :, :], parts_of[cid, i, :, :])
                            if (i + 1) % interval == 0 or i == here - 1:
                                T.set_cross_flag("FIX", 4)
                        T.set_cross_flag("MTE2", 3)
            with T.Scope("V"):
                T.set_cross_flag("MTE2", 1)
                T.set_cross_flag("MTE2", 5)
                for t in T.serial(count):
                    task = begin + t
                    block, head = task % blocks, task // blocks
                    T.tile.fill(result, 0.0)
                    T.tile.fill(total, 0.0)
                    T.tile.fill(largest, -(2.0**20))
                    for n in T.serial(T.ceildiv(steps, ahead)):
                        here = T.if_then_else(steps - n * ahead < ahead, steps - n * ahead, ahead)
                        T.wait_cross_flag(3)
                        for i in T.serial(here):
                            now, before = i % 2, 1 - i % 2
                            if i % interval == 0:
                                T.wait_cross_flag(0)
                            T.copy(scores_of[cid, i, vid * half : vid * half + half, :], scores)
                            T.reduce_max(scores, largest[now, :, :], dim=-1)
                            T.tile.max(largest[now, :, :], largest[now, :, :], largest[before, :, :])
                            T.tile.broadcast(rows, largest[now, :, :])
                            T.tile.sub(scores, scores, rows)
                            T.tile.mul(scores, scores, scale)
                            T.tile.exp(scores, scores)
                            T.copy(scores, weights)
                            T.copy(weights, weights_of[cid, i, vid * half : vid * half + half, :])
                            if (i + 1) % interval == 0 or i == here - 1:
                                T.set_cross_flag("MTE3", 2)
                            T.reduce_sum(scores, sums[i, :, :], dim=-1)
                            T.tile.sub(factors[i, :, :], largest[before, :, :], largest[now, :, :])
                        T.set_cross_flag("MTE2", 1)
                        for i in T.serial(here):
                            T.tile.mul(factors[i, :, :], factors[i, :, :], scale)
                            T.tile.exp(factors[i, :, :], factors[i, :, :])
                            T.tile.mul(total, total, factors[i, :, :])
                            T.tile.add(total, total, sums[i, :, :])
                            T.tile.broadcast(wide, factors[i, :, :])
                            T.tile.mul(result, result, wide)
                            if i % interval == 0:
                                T.wait_cross_flag(4)
                            T.copy(parts_of[cid, i, vid * half : vid * half + half, :], part)
                            T.tile.add(result, result, part)
                        T.set_cross_flag("MTE2", 5)
                    T.tile.broadcast(wide, total)
                    T.tile.div(result, result, wide)
                    T.copy(result, narrow)
                    T.copy(narrow, O[head, block * tile + vid * half : block * tile + vid * half + half, :])

    return main


@tilelang.jit(out_idx=[1])
def running(rows=6, columns=32, start=0.0, reverse=False):
    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows, threads=2, is_npu=True) as (cid):
            x = T.alloc_ub((columns,), "float32")
            y = T.alloc_ub((columns,), "float32")
            T.copy(X[cid, 0], x)
            T.tile.fill(y, start)
            for i in range(columns):
                if i > 0:
                    y[i] = y[i - 1]
                y[i] = y[i] + x[i]  # start
            T.copy(y, Y[cid, 0])

    return main


@tilelang.jit(out_idx=[1])
def largest_of(rows=8, columns=72, part=32):
    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, 1), "float32")):
        with T.Kernel(1, threads=2, is_npu=True):
            x = T.alloc_ub((rows, part), "float32")
            most = T.alloc_ub((rows, 1), "float32")
            here = T.alloc_ub((rows, 1), "float32")
            T.tile.fill(most, -T.infinity("float32"))
            for k in T.serial(T.ceildiv(columns, part)):
                T.copy(X[0:rows, k * part : (k + 1) * part], x, pad_value=-T.infinity("float32"))
                T.reduce_max(x, here, dim=-1)
                T.tile.max(most, most, here)
            T.copy(most, Y[0, 0])

    return main


@tilelang.jit(out_idx=[1])
def rounded(rows=8, columns=32, mode="CAST_RINT", fmt="int8"):
    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), fmt)):
        with T.Kernel(1, threads=2, is_npu=True):
            x = T.alloc_ub((rows, columns), "float32")
            y = T.alloc_ub((rows, columns), fmt)
            T.copy(X[0, 0], x)
            if mode == "round":
                T.tile.round(y, x, rows * columns)
            else:
                T.tile.cast(y, x, mode, rows * columns)  # CAST_ROUND
            T.copy(y, Y[0, 0])

    return main


@tilelang.autotune(configs=[{"tile": 16}, {"tile": 32}])
@tilelang.jit(out_idx=[1])
def tuned(rows=64, tile=None):
    @T.prim_func
    def main(X: T.Tensor((rows, 32), "float32"), Y: T.Tensor((rows, 32), "float32")):
        with T.Kernel(rows // tile, threads=2, is_npu=True) as (cid):
            x = T.alloc_ub((tile, 32), "float32")
            T.copy(X[cid * tile, 0], x)
            T.tile.abs(x, x)
            T.copy(x, Y[cid * tile, 0])

    return main


@tilelang.jit(out_idx=[3], workspace_idx=[4])
def sum_in_parts(rows=128, columns=128, depth=64, tile=64, parts=2, change=""):
    """A product, to which the vector cores add another matrix part by part of the columns."""
    half, part = tile // 2, tile // parts

    @T.prim_func
    def main(
        A: T.Tensor((rows, depth), "float16"),
        B: T.Tensor((depth, columns), "float16"),
        D: T.Tensor((rows, columns), "float16"),
        C: T.Tensor((rows, columns), "float16"),
        W: T.Tensor((rows, columns), "float16"),
    ):
        with T.Kernel((rows // tile) * (columns // tile), is_npu=True) as (cid, vid):
            x, y = cid // (columns // tile) * tile, cid % (columns // tile) * tile
            a = T.alloc_L1((tile, depth), "float16")
            b = T.alloc_L1((depth, tile), "float16")
            c = T.alloc_L0C((tile, tile), "float")
            own = T.alloc_ub((half, part), "float16")
            other = T.alloc_ub((half, part), "float16")
            T.copy(A[x, 0], a)
            T.copy(B[0, y], b)
            T.gemm_v0(a, b, c, init=True)
            T.copy(c, W[x, y])
            for i in T.serial(parts):
                T.copy(W[x + vid * half, y + i * part], own)
                T.copy(D[x + vid * half, y + (0 if change == "same" else i * part)], other)
                if change == "number":
                    T.tile.mul(other, other, T.cast(i, "float16"))
                T.tile.add(own, own, other)
                T.copy(own, C[x + vid * half, y + i * part])

    return main


@tilelang.jit(out_idx=[2], workspace_idx=[3])
def scores_in_parts(rows=64, columns=128, depth=64, part=64, tile=32, change=""):
    """Scores of a row in several products, each into a part of a workspace, of which the rows are then divided."""
    half = tile // 2

    @T.prim_func
    def main(
        Q: T.Tensor((rows, depth), "float16"),
        K: T.Tensor((columns, depth), "float16"),
        O: T.Tensor((rows, columns), "float16"),
        W: T.Tensor((rows // tile, tile, columns), "float16"),
    ):
        with T.Kernel(rows // tile, is_npu=True) as (cid, vid):
            q = T.alloc_L1((tile, depth), "float16")
            k = T.alloc_L1((part, depth), "float16")
            c = T.alloc_L0C((tile, part), "float")
            s = T.alloc_ub((half, columns), "float16")
            wide = T.alloc_ub((half, columns), "float32")
            largest = T.alloc_ub((half, 1), "float32")
            T.copy(Q[cid * tile, 0], q)
            for i in T.serial(columns // part):
                T.copy(K[i * part, 0], k)
                T.gemm_v0(q, k, c, transpose_B=True, init=change != "adds")
                T.copy(c, W[cid, :, i * part : (i + 1) * part])
            T.copy(W[cid, vid * half : (vid + 1) * half, :], s)
            T.copy(s, wide)
            T.reduce_max(wide, largest, dim=-1)
            for i in range(half):
                T.tile.sub(wide[i, :], wide[i, :], largest[i, 0])
            T.copy(wide, s)
            T.copy(s, O[cid * tile + vid * half, 0])

    return main
