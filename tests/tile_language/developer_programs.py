"""Programs of TileLang-Ascend without flags of their own, which the tests read, and helpers that they call."""

import tilelang
from tilelang import language as T


@tilelang.jit(out_idx=[-1])
def product(rows=256, columns=192, depth=160, tile_rows=64, tile_columns=64, part=64, turned=False):
    across = T.ceildiv(columns, tile_columns)
    right_shape = (columns, depth) if turned else (depth, columns)
    tile_shape = (tile_columns, part) if turned else (part, tile_columns)

    @T.prim_func
    def main(
        A: T.Tensor((rows, depth), "float16"),
        B: T.Tensor(right_shape, "float16"),
        C: T.Tensor((rows, columns), "float16"),
    ):
        with T.Kernel(T.ceildiv(rows, tile_rows) * across, is_npu=True) as (cid, _):
            at_row, at_column = cid // across, cid % across
            left = T.alloc_L1((tile_rows, part), "float16")
            right = T.alloc_L1(tile_shape, "float16")
            total = T.alloc_L0C((tile_rows, tile_columns), "float")
            with T.Scope("C"):
                for k in T.serial(T.ceildiv(depth, part)):
                    T.copy(A[at_row * tile_rows, k * part], left)
                    if turned:
                        T.copy(B[at_column * tile_columns, k * part], right)
                    else:
                        T.copy(B[k * part, at_column * tile_columns], right)
                    T.barrier_all()
                    T.gemm_v0(left, right, total, transpose_B=turned, init=(k == 0))
                    T.barrier_all()
                T.copy(total, C[at_row * tile_rows, at_column * tile_columns])

    return main


@T.macro
def scale_rows(tile, factors, count):
    for i in range(count):
        T.tile.mul(tile[i, :], tile[i, :], factors[i])


def block_of(number, blocks, heads):
    """Return the block and the head of a program."""
    return number % blocks, number // blocks % heads


@tilelang.jit(out_idx=[3])
def attention(heads=2, length=128, dim=64, tile_rows=32, tile_columns=64, hides=False):
    blocks, scale = length // tile_rows, (1.0 / dim) ** 0.5
    shape = [heads, length, dim]

    @T.prim_func
    def main(
        Q: T.Tensor(shape, "float16"),
        K: T.Tensor(shape, "float16"),
        V: T.Tensor(shape, "float16"),
        O: T.Tensor(shape, "float16"),
    ):
        with T.Kernel(blocks * heads, threads=2, is_npu=True) as (cid):
            block, head = block_of(cid, blocks, heads)
            q = T.alloc_shared([tile_rows, dim], "float16")
            k = T.alloc_shared([tile_columns, dim], "float16")
            v = T.alloc_shared([tile_columns, dim], "float16")
            p = T.alloc_shared([tile_rows, tile_columns], "float16")
            s = T.alloc_fragment([tile_rows, tile_columns], "float")
            o = T.alloc_fragment([tile_rows, dim], "float")
            scores = T.alloc_shared([tile_rows, tile_columns], "float")
            part = T.alloc_shared([tile_rows, dim], "float")
            result = T.alloc_shared([tile_rows, dim], "float")
            largest = T.alloc_shared([tile_rows], "float")
            before = T.alloc_shared([tile_rows], "float")
            total = T.alloc_shared([tile_rows], "float")
            sums = T.alloc_shared([tile_rows], "float")
            T.tile.fill(result, 0.0)
            T.tile.fill(total, 0.0)
            T.tile.fill(largest, -(2.0**30))
            T.copy(Q[head, block * tile_rows : (block + 1) * tile_rows, :], q)
            last = T.ceildiv((block + 1) * tile_rows, tile_columns) if hides else length // tile_columns
            for j in T.Pipelined(last, num_stages=2):
                T.copy(K[head, j * tile_columns : (j + 1) * tile_columns, :], k)
                T.gemm_v0(q, k, s, transpose_B=True, init=True)
                T.copy(s, scores)
                T.copy(largest, before)
                T.tile.mul(scores, scores, scale)
                if hides:
                    for x, y in T.Parallel(tile_rows, tile_columns):
                        is_seen = block * tile_rows + x >= j * tile_columns + y
                        scores[x, y] = T.if_then_else(is_seen, scores[x, y], -(2.0**30))
                T.reduce_max(scores, largest, dim=-1)
                T.tile.max(largest, largest, before)
                T.tile.sub(before, before, largest)
                T.tile.exp(before, before)
                for i in range(tile_rows):
                    T.tile.sub(scores[i, :], scores[i, :], largest[i])
                T.tile.exp(scores, scores)
                T.reduce_sum(scores, sums, dim=-1)
                T.tile.mul(total, total, before)
                T.tile.add(total, total, sums)
                T.copy(scores, p)
                T.copy(V[head, j * tile_columns : (j + 1) * tile_columns, :], v)
                T.gemm_v0(p, v, o, init=True)
                T.copy(o, part)
                scale_rows(result, before, tile_rows)
                T.tile.add(result, result, part)
            for i in range(tile_rows):
                T.tile.div(result[i, :], result[i, :], total[i])
            T.copy(result, O[head, block * tile_rows : block * tile_rows + tile_rows, :])

    return main


@tilelang.jit(out_idx=[2])
def rms_norm(rows=96, columns=64, tile=16, eps=1e-5):
    @T.prim_func
    def main(
        X: T.Tensor((rows, columns), "float16"),
        W: T.Tensor((columns,), "float16"),
        Y: T.Tensor((rows, columns), "float16"),
    ):
        with T.Kernel(T.ceildiv(rows, tile), is_npu=True) as (cid, vid):
            half = tile // 2
            x16 = T.alloc_ub((half, columns), "float16")
            w16 = T.alloc_ub((1, columns), "float16")
            x = T.alloc_ub((half, columns), "float")
            w = T.alloc_ub((1, columns), "float")
            wide = T.alloc_ub((half, columns), "float")
            squares = T.alloc_ub((half, columns), "float")
            mean = T.alloc_ub((half, 1), "float")
            T.copy(W[0], w16)
            T.tile.cast(w, w16, "CAST_NONE", columns)
            T.copy(X[cid * tile + vid * half, 0], x16)
            T.tile.cast(x, x16, "CAST_NONE", half * columns)
            T.tile.mul(squares, x, x)
            T.reduce_sum(squares, mean, dim=-1)
            T.tile.mul(mean, mean, 1.0 / columns)
            T.tile.add(mean, mean, eps)
            T.tile.rsqrt(mean, mean)
            T.tile.broadcast(wide, mean)
            T.tile.mul(x, x, wide)
            T.tile.broadcast(wide, w)
            T.tile.mul(x, x, wide)
            T.tile.cast(x16, x, "CAST_RINT", half * columns)
            T.copy(x16, Y[cid * tile + vid * half, 0])

    return main


@tilelang.jit(out_idx=[1])
def layer_norm(rows=40, columns=96, tile=16, eps=1e-5):
    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(T.ceildiv(rows, tile), threads=1, is_npu=True) as (cid):
            x = T.alloc_shared((tile, columns), "float32")
            squares = T.alloc_shared((tile, columns), "float32")
            mean = T.alloc_shared((tile,), "float32")
            T.copy(X[cid * tile, 0], x)  # the last block has 8 rows
            T.reduce_sum(x, mean, dim=1)
            T.tile.mul(mean, mean, 1.0 / columns)
            for i in T.serial(tile):
                T.tile.sub(x[i, :], x[i, :], mean[i])
            T.tile.mul(squares, x, x)
            T.reduce_sum(squares, mean, 1)
            for i in T.Parallel(tile):
                mean[i] = 1.0 / T.sqrt(mean[i] * (1.0 / columns) + eps)
            T.tile.row_expand_mul(x, x, mean)
            T.copy(x, Y[cid * tile, 0])

    return main


@tilelang.jit(out_idx=[1])
def softmax(rows=32, columns=48, tile=8):
    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows // tile, threads=2, is_npu=True) as (cid):
            x = T.alloc_shared((tile, columns), "float32")
            rest = T.alloc_shared((tile, columns), "float32")
            one = T.alloc_shared((tile, 1), "float32")
            T.copy(X[cid * tile : (cid + 1) * tile, :], x)
            T.reduce_max(x, one)
            T.tile.broadcast(rest, one, 1)
            T.tile.sub(x, x, rest)
            T.tile.exp(x, x)
            T.reduce_sum(x, one)
            T.tile.broadcast(rest, one)
            T.tile.div(x, x, rest)
            T.copy(x, Y[cid * tile : (cid + 1) * tile, :])

    return main


@tilelang.jit(out_idx=[1])
def activation(kind="gelu", rows=64, columns=72, tile=32):
    across = T.ceildiv(columns, tile)

    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows // tile * across, threads=2, is_npu=True) as (cid):
            at = (cid // across * tile, cid % across * tile)
            x = T.alloc_shared((tile, tile), "float32")
            y = T.alloc_shared((tile, tile), "float32")
            bits = T.alloc_shared((tile * tile // 8,), "uint8")
            T.copy(X[at[0], at[1]], x)  # the last columns are a block of 8
            if kind == "gelu":
                T.tile.mul(y, x, x)
                T.tile.mul(y, y, x)
                T.tile.mul(y, y, 0.044715)
                T.tile.add(y, y, x)
                T.tile.mul(y, y, -1.5957691216)
                T.tile.exp(y, y)
                T.tile.add(y, y, 1.0)
                T.tile.div(y, x, y)
            elif kind == "silu":
                T.tile.silu(y, x)
            elif kind == "leaky":
                T.tile.leaky_relu(y, x, 0.25)
            elif kind == "chosen":
                T.tile.compare(bits, x, 0.5, "GT")
                T.tile.mul(y, x, 2.0)
                T.tile.select(y, bits, y, 1.0, "VSEL_TENSOR_SCALAR_MODE")
            else:
                for i, j in T.Parallel(tile, tile):
                    if x[i, j] > 0:
                        y[i, j] = x[i, j]
                    else:
                        y[i, j] = T.exp(x[i, j]) - 1.0
            T.copy(y, Y[at[0], at[1]])

    return main


@tilelang.jit(out_idx=[1])
def refused(kind="both", rows=64, columns=32, tile=16):
    half = tile // 2

    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows // tile, is_npu=True) as (cid, vid):
            x = T.alloc_ub((half, columns), "float32")
            y = T.alloc_ub((half, columns), "float32")
            one = T.alloc_ub((half,), "float32")
            bits = T.alloc_ub((half * columns // 8,), "uint8")
            row = cid * tile + vid * half
            T.copy(X[row, 0], x)
            if kind == "unwritten":
                T.tile.add(y, y, x)  # unwritten
            elif kind == "sizes":
                T.tile.add(y, x, one)  # sizes
            elif kind == "mode":
                T.tile.cast(y, x, "CAST_FLOOR", half * columns)  # mode
            elif kind == "count":
                T.tile.cast(y, x, "CAST_RINT", half)  # count
            elif kind == "word":
                T.tile.sort(y, x, 8)  # word
            elif kind == "pad":
                T.copy(X[row, 0], y, pad_value=cid)  # pad
            elif kind == "bits":
                T.tile.compare(bits, x, 0.0, "GT")
                T.tile.fill(bits, 0)
                T.tile.select(y, bits, x, 1.0, "VSEL_TENSOR_SCALAR_MODE")  # bits
            elif kind == "condition":
                T.tile.mul(y, x, 2.0 if cid > 1 else 3.0)  # condition
            elif kind == "slice":
                T.copy(X[row : row + cid, :], y)  # slice
            elif kind == "neighbour":
                for i in T.serial(half - 1):
                    T.tile.add(x[i, :], x[i, :], x[i + 1, :])  # neighbour
                T.copy(x, y)
            elif kind == "race":
                for i, j in T.Parallel(half, columns):
                    x[i, j] = x[i, j] - x[i, 0]  # race
                T.copy(x, y)
            elif kind == "race of two":
                for i, j in T.Parallel(half, columns):
                    x[i, j] = x[i, j] * 2.0
                    y[i, j] = x[i, columns - 1 - j]  # race of two
            elif kind == "while":
                while cid > 0:  # while
                    T.copy(x, y)
            elif kind == "real_shape":
                T.reduce_sum(x, one, dim=-1, real_shape=[half, 8])  # real_shape
            T.copy(y, Y[row, 0])

    return main


@tilelang.jit(out_idx=[3], workspace_idx=[4, 5, 6])
def two_cores(heads=2, length=128, dim=64, tile_rows=32, tile_columns=64, change=""):
    blocks, half = length // tile_rows, tile_rows // 2
    shape = [heads, length, dim]
    count = blocks * heads

    @T.prim_func
    def main(
        Q: T.Tensor(shape, "float16"),
        K: T.Tensor(shape, "float16"),
        V: T.Tensor(shape, "float16"),
        O: T.Tensor(shape, "float16"),
        scores_of: T.Tensor([count, tile_rows, tile_columns], "float"),
        weights_of: T.Tensor([count, tile_rows, tile_columns], "float16"),
        parts_of: T.Tensor([count, tile_rows, dim], "float"),
    ):
        with T.Kernel(count, is_npu=True) as (cid, vid):
            block, head = block_of(cid, blocks, heads)
            q = T.alloc_L1([tile_rows, dim], "float16")
            k = T.alloc_L1([tile_columns, dim], "float16")
            v = T.alloc_L1([tile_columns, dim], "float16")
            p = T.alloc_L1([tile_rows, tile_columns], "float16")
            s = T.alloc_L0C([tile_rows, tile_columns], "float")
            o = T.alloc_L0C([tile_rows, dim], "float")
            scores = T.alloc_ub([half, tile_columns], "float")
            weights = T.alloc_ub([half, tile_columns], "float16")
            part = T.alloc_ub([half, dim], "float")
            result = T.alloc_ub([half, dim], "float")
            narrow = T.alloc_ub([half, dim], "float16")
            largest = T.alloc_ub([half], "float")
            before = T.alloc_ub([half], "float")
            total = T.alloc_ub([half], "float")
            sums = T.alloc_ub([half], "float")
            columns = T.alloc_ub([tile_columns], "float")
            first = vid * tile_rows // 2
            if change == "places":
                T.annotate_address({scores: 0, weights: 0, part: 8192})
            with T.Scope("C"):
                T.copy(Q[head, block * tile_rows : (block + 1) * tile_rows, :], q)
                T.barrier_all()
                for j in T.serial(length // tile_columns):
                    T.copy(K[head, j * tile_columns : (j + 1) * tile_columns, :], k)
                    T.barrier_all()
                    T.gemm_v0(q, k, s, transpose_B=True, init=True)
                    T.barrier_all()
                    T.copy(s, scores_of[cid, :, :])
                    T.barrier_all()
                    T.set_cross_flag("FIX", 0)
                    if change != "unset":
                        T.wait_cross_flag(1)
                    else:
                        T.wait_cross_flag(5)  # unset
                    T.barrier_all()
                    T.copy(weights_of[cid, :, :], p)
                    T.copy(V[head, j * tile_columns : (j + 1) * tile_columns, :], v)
                    T.barrier_all()
                    T.gemm_v0(p, v, o, init=True)
                    T.barrier_all()
                    T.copy(o, parts_of[cid, :, :])
                    T.barrier_all()
                    T.set_cross_flag("FIX", 2)
                    T.wait_cross_flag(3)
            with T.Scope("V"):
                T.tile.fill(result, 0.0)
                T.tile.fill(total, 0.0)
                T.tile.fill(largest, -(2.0**30))
                T.barrier_all()
                for _ in T.serial(length // tile_columns + (1 if change == "bounds" else 0)):  # bounds
                    T.copy(largest, before)
                    T.wait_cross_flag(0)
                    if change == "halves":
                        T.copy(scores_of[cid, vid * 8 : vid * 8 + half, :], scores)  # halves
                    elif change == "same":
                        T.copy(scores_of[cid, 0:half, :], scores)  # same
                    else:
                        T.copy(scores_of[cid, first : first + half, :], scores)
                    T.barrier_all()
                    T.tile.mul(scores, scores, (1.0 / dim) ** 0.5)
                    T.barrier_all()
                    if change == "across":
                        T.reduce_max(scores, columns, dim=0)  # across
                    T.reduce_max(scores, largest, dim=-1)
                    T.barrier_all()
                    T.tile.max(largest, largest, before)
                    T.barrier_all()
                    T.tile.sub(before, before, largest)
                    T.barrier_all()
                    T.tile.exp(before, before)
                    T.barrier_all()
                    for h in range(half):
                        T.tile.sub(scores[h, :], scores[h, :], largest[h])
                        T.barrier_all()
                    T.tile.exp(scores, scores)
                    T.barrier_all()
                    T.copy(scores, weights)
                    T.barrier_all()
                    T.copy(weights, weights_of[cid, first : first + half, :])
                    T.barrier_all()
                    T.set_cross_flag("MTE3", 1)
                    T.reduce_sum(scores, sums, dim=-1)  # places
                    T.barrier_all()
                    T.tile.mul(total, total, before)
                    T.barrier_all()
                    T.tile.add(total, total, sums)
                    T.barrier_all()
                    scale_rows(result, before, half)
                    T.wait_cross_flag(2)
                    T.copy(parts_of[cid, first : first + half, :], part)
                    T.barrier_all()
                    T.tile.add(result, result, part)
                    T.barrier_all()
                    T.set_cross_flag("V", 3)
                for h in range(half):
                    T.tile.div(result[h, :], result[h, :], total[h])
                    T.barrier_all()
                T.copy(result, narrow)
                T.barrier_all()
                T.copy(narrow, O[head, block * tile_rows + first : block * tile_rows + first + half, :])

    return main


@tilelang.jit(out_idx=[3])
def product_and_sum(rows=128, columns=128, depth=96, tile=64, part=32):
    across = columns // tile

    @T.prim_func
    def main(
        A: T.Tensor((rows, depth), "float16"),
        B: T.Tensor((depth, columns), "float16"),
        D: T.Tensor((rows, columns), "float16"),
        C: T.Tensor((rows, columns), "float16"),
    ):
        with T.Kernel(rows // tile * across, is_npu=True) as (cid, vid):
            at_row, at_column = cid // across * tile, cid % across * tile
            a = T.alloc_L1((tile, part), "float16")
            b = T.alloc_L1((part, tile), "float16")
            c = T.alloc_L0C((tile, tile), "float")
            x = T.alloc_ub((tile // 2, tile), "float16")
            y = T.alloc_ub((tile // 2, tile), "float16")
            with T.Scope("C"):
                for k in T.serial(depth // part):
                    T.copy(A[at_row, k * part], a)
                    T.copy(B[k * part, at_column], b)
                    T.barrier_all()
                    if k == 0:
                        T.gemm_v0(a, b, c, init=True)
                    else:
                        T.gemm_v0(a, b, c)
                    T.barrier_all()
                T.copy(c, C[at_row, at_column])
                T.set_cross_flag("FIX", 0)
            with T.Scope("V"):
                T.wait_cross_flag(0)
                T.copy(C[at_row + vid * tile // 2, at_column], x)
                T.copy(D[at_row + vid * tile // 2, at_column], y)
                T.barrier_all()
                T.tile.add(x, x, y)
                T.barrier_all()
                T.copy(x, C[at_row + vid * tile // 2, at_column])

    return main


@tilelang.jit(out_idx=[2])
def shared_blocks(rows=128, columns=96, depth=64, tile=32, cores=5, change=""):
    @T.prim_func
    def main(
        A: T.Tensor((rows, depth), "float16"),
        B: T.Tensor((columns, depth), "float16"),
        C: T.Tensor((rows, columns), "float16"),
    ):
        with T.Kernel(cores, is_npu=True) as (cid, _):
            a = T.alloc_L1((tile, depth), "float16")
            b = T.alloc_L1((tile, depth), "float16")
            left = T.alloc_L0A((tile, depth), "float16")
            right = T.alloc_L0B((depth, tile), "float16")
            c = T.alloc_L0C((tile, tile), "float")
            with T.Scope("C"):
                if change == "once":
                    T.copy(A[0, 0], a)  # once
                for x, y in T.Persistent([rows // tile, columns // tile], cores, cid):
                    T.copy(A[x * tile, 0], a)
                    T.copy(B[(cid if change == "core" else y) * tile, 0], b)
                    T.barrier_all()
                    T.copy(a, left)
                    T.copy(b, right, transpose=True)
                    T.barrier_all()
                    T.mma(left, right, c, init=True)
                    T.barrier_all()
                    T.copy(c, C[x * tile, y * tile])  # core

    return main


@tilelang.jit
def in_place(rows=64, columns=32, tile=16):
    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows // tile, threads=2, is_npu=True) as (cid):
            x = T.alloc_shared((tile, columns), "float32")
            T.copy(X[cid * tile, 0], x)
            T.tile.mul(x, x, 3.0)
            T.copy(x, X[cid * tile, 0])

    return main


@tilelang.jit(out_idx=[1])
def by_pairs(rows=32, columns=160, tile=16, part=32, change=""):
    """Rows over 1 + the sum of their absolute values, two parts of a row an iteration, and an odd one behind them."""
    parts = columns // part

    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows // tile, threads=2, is_npu=True) as (cid):
            a = T.alloc_ub((tile, part), "float32")
            b = T.alloc_ub((tile, part), "float32")
            total = T.alloc_ub((tile, part), "float32")
            sums = T.alloc_ub((tile, 1), "float32")
            wide = T.alloc_ub((tile, part), "float32")
            T.tile.fill(total, 0.0)
            for k in T.serial(parts // 2):
                T.copy(X[cid * tile, (k * 2) * part], a)
                T.tile.abs(a, a)
                T.tile.add(total, total, a)
                T.copy(X[cid * tile, (k * 2 + 1) * part], b)
                T.tile.abs(b, b)
                T.tile.add(total, total, b)
            if parts % 2 != 0:
                T.copy(X[cid * tile, (parts - 1) * part], a)
                T.tile.abs(a, a)
                T.tile.add(total, total, a)
            T.reduce_sum(total, sums, dim=-1)
            T.tile.add(sums, sums, 1.0)
            T.tile.broadcast(wide, sums)
            for k in T.serial(parts // 2):
                T.copy(X[cid * tile, (k * 2) * part], a)
                T.tile.div(a, a, wide)
                T.copy(a, Y[cid * tile, (k * 2) * part])
                T.copy(X[cid * tile, (k * 2 + 1) * part], b)
                if change == "other":
                    T.tile.mul(b, b, wide)
                else:
                    T.tile.div(b, b, wide)
                T.copy(b, Y[cid * tile, (k * 2 + 1) * part])
            if parts % 2 != 0:
                T.copy(X[cid * tile, (parts - 1) * part], a)
                T.tile.div(a, a, wide)
                T.copy(a, Y[cid * tile, (parts - 1) * part])

    return main


@tilelang.jit(out_idx=[1])
def by_slots(rows=32, columns=128, tile=16, part=32):
    """The same by two loops, whose iterations have one of two slots each."""
    parts = columns // part

    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows // tile, threads=2, is_npu=True) as (cid):
            x = T.alloc_ub((2, tile, part), "float32")
            some = T.alloc_ub((tile, 1), "float32")
            sums = T.alloc_ub((tile, 1), "float32")
            wide = T.alloc_ub((tile, part), "float32")
            T.tile.fill(sums, 1.0)
            for k in T.serial(parts):
                slot = k % 2
                T.copy(X[cid * tile, k * part], x[slot, :, :])
                T.tile.abs(x[slot, :, :], x[slot, :, :])
                T.reduce_sum(x[slot, :, :], some, dim=-1)
                T.tile.add(sums, sums, some)
            T.tile.broadcast(wide, sums)
            for k in T.serial(parts):
                slot = k % 2
                T.copy(X[cid * tile, k * part], x[slot, :, :])
                T.tile.div(x[slot, :, :], x[slot, :, :], wide)
                T.copy(x[slot, :, :], Y[cid * tile, k * part])

    return main


@tilelang.jit(out_idx=[3], workspace_idx=[4, 5, 6, 7])
def chosen_keys(queries=4, heads=32, dim=64, length=128, count=96, part=32, order="one loop"):
    """Attention of each query to keys at loaded places, whose rows each vector core copies its half of."""
    parts, half, scale = count // part, heads // 2, dim**-0.5

    @T.macro
    def scores_and_values(cid, q, kv, s, p, o, gathered, w_s, w_p, w_o):
        T.copy(gathered[cid, 0:part, 0:dim], kv)
        T.gemm_v0(q, kv, s, transpose_B=True, init=True)
        T.copy(s, w_s[cid, 0:heads, 0:part])
        T.copy(w_p[cid, 0:heads, 0:part], p)
        T.gemm_v0(p, kv, o, init=True)
        T.copy(o, w_o[cid, 0:heads, 0:dim])

    @T.macro
    def rows_of(cid, vid, at, KV, I, gathered, places, row):
        T.copy(I[cid, at : at + part], places)
        for b in range(part // 2):
            T.copy(KV[places[b + vid * part // 2], :], row)
            T.copy(row, gathered[cid, b + vid * part // 2, :])

    @T.prim_func
    def main(
        Q: T.Tensor((queries, heads, dim), "float16"),
        KV: T.Tensor((length, dim), "float16"),
        I: T.Tensor((queries, count), "int32"),
        O: T.Tensor((queries, heads, dim), "float16"),
        gathered: T.Tensor((queries, part, dim), "float16"),
        w_s: T.Tensor((queries, heads, part), "float"),
        w_p: T.Tensor((queries, heads, part), "float16"),
        w_o: T.Tensor((queries, heads, dim), "float"),
    ):
        with T.Kernel(queries, is_npu=True) as (cid, vid):
            q = T.alloc_L1((heads, dim), "float16")
            kv = T.alloc_L1((part, dim), "float16")
            p = T.alloc_L1((heads, part), "float16")
            s = T.alloc_L0C((heads, part), "float")
            o = T.alloc_L0C((heads, dim), "float")
            places = T.alloc_ub((part,), "int32")
            row = T.alloc_ub((dim,), "float16")
            x = T.alloc_ub((half, part), "float")
            narrow = T.alloc_ub((half, part), "float16")
            largest = T.alloc_ub((half,), "float")
            before = T.alloc_ub((half,), "float")
            some = T.alloc_ub((half,), "float")
            total = T.alloc_ub((half,), "float")
            more = T.alloc_ub((half, dim), "float")
            out = T.alloc_ub((half, dim), "float")
            out_half = T.alloc_ub((half, dim), "float16")
            T.copy(Q[cid, 0:heads, :], q)
            if order == "two loops":
                for _ in T.serial(parts):
                    scores_and_values(cid, q, kv, s, p, o, gathered, w_s, w_p, w_o)
            T.tile.fill(out, 0.0)
            T.tile.fill(total, 0.0)
            T.tile.fill(largest, -(2.0**30))
            for t in T.serial(parts):
                if order == "one loop":
                    scores_and_values(cid, q, kv, s, p, o, gathered, w_s, w_p, w_o)
                rows_of(cid, vid, t * part, KV, I, gathered, places, row)
                T.copy(largest, before)
                T.copy(w_s[cid, vid * half : vid * half + half, :], x)
                for i, j in T.Parallel(half, part):
                    x[i, j] = x[i, j] * scale
                T.reduce_max(x, largest, dim=-1)
                for i in T.Parallel(half):
                    largest[i] = T.max(largest[i], before[i])
                for i in T.Parallel(half):
                    before[i] = T.exp(before[i] - largest[i])
                for i, j in T.Parallel(half, part):
                    x[i, j] = T.exp(x[i, j] - largest[i])
                T.reduce_sum(x, some, dim=-1)
                for i in T.Parallel(half):
                    total[i] = total[i] * before[i] + some[i]
                for i, j in T.Parallel(half, dim):
                    out[i, j] = out[i, j] * before[i]
                T.copy(x, narrow)
                T.copy(narrow, w_p[cid, vid * half : vid * half + half, :])
                T.copy(w_o[cid, vid * half : vid * half + half, :], more)
                for i, j in T.Parallel(half, dim):
                    out[i, j] += more[i, j]
            for i, j in T.Parallel(half, dim):
                out[i, j] = out[i, j] / total[i]
            T.copy(out, out_half)
            T.copy(out_half, O[cid, vid * half : vid * half + half, :])

    return main


@tilelang.jit(out_idx=[1])
def by_itself(rows=64, depth=96, tile=32, part=32):
    """The product of each tile of rows by itself, along all columns."""

    @T.prim_func
    def main(X: T.Tensor((rows, depth), "float16"), Y: T.Tensor((rows // tile, tile, tile), "float16")):
        with T.Kernel(rows // tile, is_npu=True) as (cid, _):
            x = T.alloc_L1((tile, part), "float16")
            y = T.alloc_L0C((tile, tile), "float")
            with T.Scope("C"):
                for k in T.serial(depth // part):
                    T.copy(X[cid * tile, k * part], x)
                    T.gemm_v0(x, x, y, transpose_B=True, init=(k == 0))
                T.copy(y, Y[cid, 0, 0])

    return main


@tilelang.jit(out_idx=[2], workspace_idx=[3])
def products_of_tasks(tasks=5, tile=32, depth=64, cores=2, leaves_set=False):
    """Twice the product of each task's tiles: cores share the tasks, and both kinds of cores are in one if."""

    @T.prim_func
    def main(
        A: T.Tensor((tasks, tile, depth), "float16"),
        B: T.Tensor((tasks, tile, depth), "float16"),
        O: T.Tensor((tasks, tile, tile), "float"),
        between: T.Tensor((cores, tile, tile), "float"),
    ):
        with T.Kernel(cores, is_npu=True) as (cid, vid):
            a = T.alloc_L1((tile, depth), "float16")
            b = T.alloc_L1((tile, depth), "float16")
            c = T.alloc_L0C((tile, tile), "float")
            x = T.alloc_ub((tile // 2, tile), "float")
            for n in T.serial(T.ceildiv(tasks, cores)):
                task = n * cores + cid
                if task < tasks:
                    with T.Scope("C"):
                        T.copy(A[task, 0, 0], a)
                        T.copy(B[task, 0, 0], b)
                        T.barrier_all()
                        T.gemm_v0(a, b, c, transpose_B=True, init=True)
                        T.barrier_all()
                        T.copy(c, between[cid, 0, 0])
                        T.set_cross_flag("FIX", 0)
                        if not leaves_set:
                            T.wait_cross_flag(1)
                    with T.Scope("V"):
                        T.wait_cross_flag(0)
                        T.copy(between[cid, vid * tile // 2, 0], x)
                        T.barrier_all()
                        T.tile.mul(x, x, 2.0)
                        T.barrier_all()
                        T.copy(x, O[task, vid * tile // 2, 0])
                        T.set_cross_flag("MTE3", 1)

    return main


@tilelang.jit(out_idx=[1])
def whole_numbers(rows=64, columns=32, tile=32, mode="CAST_RINT"):
    """Numbers of 16 bits, seven times as large, as whole numbers."""

    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float16"), Y: T.Tensor((rows, columns), "int8")):
        with T.Kernel(rows // tile, threads=2, is_npu=True) as (cid):
            x = T.alloc_ub((tile, columns), "float16")
            y = T.alloc_ub((tile, columns), "int8")
            T.copy(X[cid * tile, 0], x)
            T.tile.mul(x, x, 7.0)
            T.tile.cast(y, x, mode, tile * columns)
            T.copy(y, Y[cid * tile, 0])

    return main


@tilelang.jit(out_idx=[-1])
def wrapping(rows=16, columns=32):
    """Constants beyond the numbers of 8 bits, which wrap: 300 is 44, and 44 + 100 is -112."""

    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows // 8, threads=2, is_npu=True) as cid:
            x = T.alloc_ub((8, columns), "float32")
            wide = T.alloc_ub((8, columns), "int32")
            narrow = T.alloc_ub((8, columns), "int8")
            T.copy(X[cid * 8, 0], x)
            T.tile.fill(wide, 300)
            T.copy(wide, narrow)
            T.tile.add(narrow, narrow, 100)
            for i, j in T.Parallel(8, columns):
                x[i, j] = x[i, j] + T.cast(narrow[i, j], "float32")
            T.copy(x, Y[cid * 8, 0])

    return main


@tilelang.jit(out_idx=[-1])
def first_of_all(rows=32, columns=32):
    """A tile that is filled with an element of its own, which is read before."""

    @T.prim_func
    def main(
        X: T.Tensor((rows, columns), "float32"),
        W: T.Tensor((columns,), "float32"),
        Y: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(rows // 8, threads=2, is_npu=True) as cid:
            x = T.alloc_ub((8, columns), "float32")
            w = T.alloc_ub((columns,), "float32")
            T.copy(X[cid * 8, 0], x)
            T.copy(W[0], w)
            T.tile.fill(w, w[0])
            for i, j in T.Parallel(8, columns):
                x[i, j] *= w[j]
            T.copy(x, Y[cid * 8, 0])

    return main


@tilelang.jit(out_idx=[-1])
def shadowed(rows=64, columns=32, cores=3):
    """A name that a loop gives another value: each iteration begins with the value before the loop."""
    tasks = rows // 16

    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(cores, threads=2, is_npu=True) as cid:
            x = T.alloc_ub((16, columns), "float32")
            for i in T.serial(T.ceildiv(tasks, cores)):
                cid = i * cores + cid  # noqa: PLW2901 - what is tested
                if cid < tasks:
                    T.copy(X[cid * 16, 0], x)
                    T.tile.add(x, x, 1.0)
                    T.copy(x, Y[cid * 16, 0])

    return main


@tilelang.jit
def split_product(rows=32, columns=64, depth=128, splits=2):
    """Each program adds the product of a part of the depth to the result."""
    part = depth // splits

    @T.prim_func
    def main(
        A: T.Tensor((rows, depth), "float16"),
        B: T.Tensor((depth, columns), "float16"),
        C: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(splits, is_npu=True) as (cid, _):
            a = T.alloc_L1((rows, 32), "float16")
            b = T.alloc_L1((32, columns), "float16")
            c = T.alloc_L0C((rows, columns), "float32")
            for k in T.serial(part // 32):
                T.copy(A[0, cid * part + k * 32], a)
                T.copy(B[cid * part + k * 32, 0], b)
                T.gemm_v0(a, b, c, init=(k == 0))
            T.tile.atomic_add(C[0, 0], c)

    return main


@tilelang.jit(out_idx=[-1])
def padded_factors(groups=4, channels=5, size=64, tile=16):
    """Factors of channels, copied to a longer line whose rest is 0; two slots of a tile in an if; one vector core."""

    @T.prim_func
    def main(
        X: T.Tensor((groups, channels, size), "float16"),
        W: T.Tensor((groups, channels), "float16"),
        Y: T.Tensor((groups, channels, size), "float32"),
    ):
        with T.Kernel(groups, is_npu=True) as (cid, vid):
            if vid == 0:
                raw = T.alloc_ub((8, 1), "float16")
                wide = T.alloc_ub((8, 1), "float32")
                rows = T.alloc_ub((8, tile), "float32")
                own = T.alloc_ub((channels, tile), "float32")
                slots = T.alloc_ub((2, channels, tile), "float16")
                x = T.alloc_ub((channels, tile), "float32")
                T.copy(W[cid, 0:channels], raw, pad_value=0.0)
                T.tile.cast(wide, raw, "CAST_NONE", 8)
                T.tile.broadcast(rows, wide)
                T.copy(rows[0:channels, 0:tile], own)
                T.copy(X[cid, 0:channels, 0:tile], slots[0, :, :])
                for i in T.serial(size // tile):
                    if i < size // tile - 1:
                        T.copy(X[cid, 0:channels, (i + 1) * tile : (i + 2) * tile], slots[(i + 1) % 2, :, :])
                    T.tile.cast(x, slots[i % 2, :, :], "CAST_NONE", channels * tile)
                    T.tile.mul(x, x, own)
                    T.copy(x, Y[cid, 0:channels, i * tile : (i + 1) * tile])

    return main


@tilelang.jit(out_idx=[3])
def cleared_once(rows=32, columns=32, depth=128, part=32, how="two loops"):
    """A product whose result a condition clears: the first iterations of two loops, or a first one that may not run."""

    @T.prim_func
    def main(
        A: T.Tensor((rows, depth), "float16"),
        B: T.Tensor((depth, columns), "float16"),
        N: T.Tensor((1,), "int32"),
        C: T.Tensor((rows, columns), "float16"),
    ):
        with T.Kernel(1, is_npu=True) as (_, _):
            left = T.alloc_L1((rows, part), "float16")
            right = T.alloc_L1((part, columns), "float16")
            total = T.alloc_L0C((rows, columns), "float")
            with T.Scope("C"):
                if how == "two loops":
                    for k in T.serial(depth // part // 2):
                        for kk in T.serial(2):
                            T.copy(A[0, (k * 2 + kk) * part], left)
                            T.copy(B[(k * 2 + kk) * part, 0], right)
                            T.gemm_v0(left, right, total, init=T.And(k == 0, kk == 0))
                else:
                    if how == "zeros":
                        T.clear(total)
                    for k in T.serial(depth // part):
                        if k < N[0]:
                            T.copy(A[0, k * part], left)
                            T.copy(B[k * part, 0], right)
                            T.gemm_v0(left, right, total, init=(k == 0))  # cleared
                T.copy(total, C[0, 0])

    return main
