"""Expert programs in our own words: published faults, their mended forms, and a small flash kernel.

A text has ``{name}`` where a flag or barrier may stand; `program` fills each from a mapping, or with nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

HEAD = """
import tilelang
from tilelang import language as T

@tilelang.jit(out_idx=[-1])
def kernel(tiles=4, n=0):
    @T.prim_func
    def main({parameters}):
"""
ONE_CORE = 'A: T.Tensor([1024, 64], "float16"), D: T.Tensor([1024, 64], "float16"), size: T.int32'
BOTH = ONE_CORE + ', W: T.Tensor([4, 64, 64], "float16")'

#: One buffer in L1 that is filled for each tile: the next fill must wait for the loads of the product.
REUSED_L1 = """
        with T.Kernel(1, is_npu=True) as (cid, vid):
            a = T.alloc_L1([64, 64], "float16")
            c = T.alloc_L0C([64, 64], "float")
            with T.Scope("C"):
                {first}
                for t in T.serial(tiles):
                    {free}
                    T.copy(A[t * 64 : (t + 1) * 64, :], a)
                    T.set_flag("MTE2", "MTE1", 0)
                    T.wait_flag("MTE2", "MTE1", 0)
                    T.gemm_v0(a, a, c, init=True)
                    {used}
                {last}
"""
REUSED_L1_MEND = {
    "first": 'T.set_flag("MTE1", "MTE2", 0)',
    "free": 'T.wait_flag("MTE1", "MTE2", 0)',
    "used": 'T.set_flag("MTE1", "MTE2", 0)',
    "last": 'T.wait_flag("MTE1", "MTE2", 0)',
}

#: A barrier inside a branch, which orders nothing where the branch is not entered.
BRANCH = """
        with T.Kernel(1, is_npu=True) as (cid, vid):
            a = T.alloc_ub([64], "float")
            b = T.alloc_ub([64], "float")
            d = T.alloc_ub([64], "float")
            with T.Scope("V"):
                T.tile.fill(a, 1.0)
                if size > 0:
                    T.tile.fill(b, 1.0)
                    T.pipe_barrier("V")
                    T.tile.add(b, b, a)
                {after}
                T.tile.add(d, a, a)
"""

#: A workspace of one slot between the two kinds of cores.
WORKSPACE = """
        with T.Kernel(1, is_npu=True) as (cid, vid):
            a = T.alloc_L1([64, 64], "float16")
            c = T.alloc_L0C([64, 64], "float")
            u = T.alloc_ub([32, 64], "float16")
            with T.Scope("C"):
                T.copy(A[0:64, :], a)
                T.barrier_all()
                for t in T.serial(tiles):
                    T.gemm_v0(a, a, c, init=True)
                    T.barrier_all()
                    {free}
                    T.copy(c, W[0, :, :])
                    T.barrier_all()
                    T.set_cross_flag("FIX", 0)
                    {again}
            with T.Scope("V"):
                {first}
                for t in T.serial(tiles):
                    T.wait_cross_flag(0)
                    T.copy(W[0, vid * 32 : (vid + 1) * 32, :], u)
                    T.barrier_all()
                    {done}
                    T.copy(u, D[t * 64 + vid * 32 : t * 64 + vid * 32 + 32, :])
                    T.barrier_all()
            {close}
"""
WORKSPACE_MEND = {
    "free": "T.wait_cross_flag(1)",
    "done": 'T.set_cross_flag("MTE2", 1)',
    "first": 'T.set_cross_flag("MTE2", 1)',
    "close": 'with T.Scope("C"):\n                T.wait_cross_flag(1)',
}

#: MTE2 writes, MTE3 and V read: V is ordered after the other reader's flag alone.
TWO_READERS = """
        with T.Kernel(1, is_npu=True) as (cid, vid):
            a = T.alloc_ub([64, 64], "float16")
            b = T.alloc_ub([64, 64], "float16")
            with T.Scope("V"):
                T.copy(A[0:64, :], a)
                T.set_flag("MTE2", "MTE3", 0)
                {set_v}
                T.wait_flag("MTE2", "MTE3", 0)
                T.copy(a, D[vid * 64 : (vid + 1) * 64, :])
                {wait_v}
                T.tile.add(b, a, a)
"""
TWO_READERS_MEND = {"set_v": 'T.set_flag("MTE2", "V", 0)', "wait_v": 'T.wait_flag("MTE2", "V", 0)'}

#: A ring of two slots with two consumers: a slot is free when both have read it, not one of them.
TWO_CONSUMERS = """
        with T.Kernel(1, is_npu=True) as (cid, vid):
            a = T.alloc_ub([2, 32, 64], "float16")
            b = T.alloc_ub([32, 64], "float16")
            with T.Scope("V"):
                for s in T.serial(2):
                    T.set_flag("MTE3", "MTE2", s)
                    {first}
                for t in T.serial(tiles):
                    s = t % 2
                    T.wait_flag("MTE3", "MTE2", s)
                    {free}
                    T.copy(A[t * 32 : (t + 1) * 32, :], a[s, :, :])
                    T.set_flag("MTE2", "MTE3", s)
                    T.set_flag("MTE2", "V", s)
                    T.wait_flag("MTE2", "MTE3", s)
                    T.copy(a[s, :, :], D[vid * 512 + t * 32 : vid * 512 + (t + 1) * 32, :])
                    T.set_flag("MTE3", "MTE2", s)
                    T.wait_flag("MTE2", "V", s)
                    T.tile.add(b, a[s, :, :], a[s, :, :])
                    {used}
                for s in T.serial(2):
                    T.wait_flag("MTE3", "MTE2", s)
                    {last}
"""
TWO_CONSUMERS_MEND = {
    "first": 'T.set_flag("V", "MTE2", s)',
    "free": 'T.wait_flag("V", "MTE2", s)',
    "used": 'T.set_flag("V", "MTE2", s)',
    "last": 'T.wait_flag("V", "MTE2", s)',
}

#: A wait for the flag of another slot than the one that is used: the phase follows the loop and not the slot.
OTHER_SLOT = TWO_CONSUMERS.replace("{first}", TWO_CONSUMERS_MEND["first"]).replace(
    'T.wait_flag("MTE2", "V", s)', 'T.wait_flag("MTE2", "V", {slot})'
)
OTHER_SLOT = OTHER_SLOT.replace("{free}", TWO_CONSUMERS_MEND["free"]).replace("{used}", TWO_CONSUMERS_MEND["used"])
OTHER_SLOT = OTHER_SLOT.replace("{last}", TWO_CONSUMERS_MEND["last"])

#: The published races of tile-ai/tilelang-ascend (PR 1109, #1824, #949, #1825, PR 1777) and of tile-ai/tilelang (#2613,
#: #2927), in this order.
#: name: (text, parameters, what the faulty form has, what the mended form has, kinds of faults of the faulty form)
PUBLISHED = {
    "reused L1": (REUSED_L1, ONE_CORE, {}, REUSED_L1_MEND, {"race", "lost set"}),
    "barrier in a branch": (BRANCH, ONE_CORE, {}, {"after": 'T.pipe_barrier("V")'}, {"race"}),
    "workspace of one slot": (WORKSPACE, BOTH, {}, WORKSPACE_MEND, {"race"}),
    "two sets for one wait": (
        WORKSPACE,
        BOTH,
        {**WORKSPACE_MEND, "again": 'T.set_cross_flag("FIX", 0)'},
        WORKSPACE_MEND,
        {"race", "left set"},
    ),
    "two readers, one flag": (TWO_READERS, ONE_CORE, {}, TWO_READERS_MEND, {"race"}),
    "two consumers of a ring": (TWO_CONSUMERS, ONE_CORE, {}, TWO_CONSUMERS_MEND, {"race", "lost set"}),
    "flag of another slot": (OTHER_SLOT, ONE_CORE, {"slot": "1 - s"}, {"slot": "s"}, {"lost set"}),
}

#: Flash attention of one head: the matrix core computes scores and outputs, the vector cores the softmax of halves.
FLASH = """
import tilelang
from tilelang import language as T

@tilelang.jit(out_idx=[3], workspace_idx=[4, 5, 6])
def flash(tiles=3, dim=64):
    block, half = 64, 32
    shape = [tiles * block, dim]

    @T.prim_func
    def main(
        Q: T.Tensor([block, dim], "float16"),
        K: T.Tensor(shape, "float16"),
        V: T.Tensor(shape, "float16"),
        O: T.Tensor([block, dim], "float16"),
        scores: T.Tensor([block, block], "float16"),
        weights: T.Tensor([block, block], "float16"),
        outputs: T.Tensor([block, dim], "float16"),
    ):
        with T.Kernel(1, is_npu=True) as (cid, vid):
            q = T.alloc_L1([block, dim], "float16")
            k = T.alloc_L1([block, dim], "float16")
            v = T.alloc_L1([block, dim], "float16")
            p = T.alloc_L1([block, block], "float16")
            s = T.alloc_L0C([block, block], "float")
            o = T.alloc_L0C([block, dim], "float")
            s_in = T.alloc_ub([half, block], "float16")
            s_ub = T.alloc_ub([half, block], "float")
            p_out = T.alloc_ub([half, block], "float16")
            o_in = T.alloc_ub([half, dim], "float16")
            o_ub = T.alloc_ub([half, dim], "float")
            total = T.alloc_ub([half, dim], "float")
            out = T.alloc_ub([half, dim], "float16")
            with T.Scope("C"):
                T.set_flag("MTE1", "MTE2", 0)
                T.set_flag("MTE1", "MTE2", 1)
                T.set_flag("FIX", "M", 0)
                T.set_flag("FIX", "M", 1)
                T.copy(Q, q)
                T.set_flag("MTE2", "MTE1", 2)
                T.wait_flag("MTE2", "MTE1", 2)
                for t in T.serial(tiles):
                    T.wait_flag("MTE1", "MTE2", 0)
                    T.copy(K[t * block : (t + 1) * block, :], k)
                    T.set_flag("MTE2", "MTE1", 0)
                    T.wait_flag("MTE2", "MTE1", 0)
                    T.wait_flag("FIX", "M", 0)
                    T.gemm_v0(q, k, s, transpose_B=True, init=True)
                    T.set_flag("MTE1", "MTE2", 0)
                    T.set_flag("M", "FIX", 0)
                    T.wait_flag("M", "FIX", 0)
                    T.copy(s, scores)
                    T.set_flag("FIX", "M", 0)
                    T.set_cross_flag("FIX", 0)
                    T.wait_flag("MTE1", "MTE2", 1)
                    T.copy(V[t * block : (t + 1) * block, :], v)
                    T.wait_cross_flag(1)
                    T.copy(weights, p)
                    T.set_flag("MTE2", "MTE1", 1)
                    T.wait_flag("MTE2", "MTE1", 1)
                    T.wait_flag("FIX", "M", 1)
                    T.gemm_v0(p, v, o, init=True)
                    T.set_flag("MTE1", "MTE2", 1)
                    T.set_flag("M", "FIX", 1)
                    T.wait_flag("M", "FIX", 1)
                    T.copy(o, outputs)
                    T.set_flag("FIX", "M", 1)
                    T.set_cross_flag("FIX", 2)
                    T.wait_cross_flag(3)
                T.wait_flag("MTE1", "MTE2", 0)
                T.wait_flag("MTE1", "MTE2", 1)
                T.wait_flag("FIX", "M", 0)
                T.wait_flag("FIX", "M", 1)
            with T.Scope("V"):
                T.tile.fill(total, 0.0)
                T.set_flag("V", "MTE2", 0)
                T.set_flag("V", "MTE2", 1)
                T.set_flag("MTE3", "V", 0)
                for t in T.serial(tiles):
                    T.wait_flag("V", "MTE2", 0)
                    T.wait_cross_flag(0)
                    T.copy(scores[vid * half : (vid + 1) * half, :], s_in)
                    T.set_flag("MTE2", "V", 0)
                    T.wait_flag("MTE2", "V", 0)
                    T.copy(s_in, s_ub)
                    T.set_flag("V", "MTE2", 0)
                    T.tile.exp(s_ub, s_ub)
                    T.wait_flag("MTE3", "V", 0)
                    T.copy(s_ub, p_out)
                    T.set_flag("V", "MTE3", 0)
                    T.wait_flag("V", "MTE3", 0)
                    T.copy(p_out, weights[vid * half : (vid + 1) * half, :])
                    T.set_flag("MTE3", "V", 0)
                    T.set_cross_flag("MTE3", 1)
                    T.wait_flag("V", "MTE2", 1)
                    T.wait_cross_flag(2)
                    T.copy(outputs[vid * half : (vid + 1) * half, :], o_in)
                    T.set_flag("MTE2", "V", 1)
                    T.set_cross_flag("MTE2", 3)
                    T.wait_flag("MTE2", "V", 1)
                    T.copy(o_in, o_ub)
                    T.set_flag("V", "MTE2", 1)
                    T.tile.add(total, total, o_ub)
                T.wait_flag("V", "MTE2", 0)
                T.wait_flag("V", "MTE2", 1)
                T.wait_flag("MTE3", "V", 0)
                T.copy(total, out)
                T.barrier_all()
                T.copy(out, O[vid * half : (vid + 1) * half, :])
                T.barrier_all()

    return main
"""
_FLAG = re.compile(r"T\.(set|wait)_(cross_)?flag|T\.(barrier_all|pipe_barrier)")


def program(text: str, parameters: str, parts: dict[str, str]) -> str:
    """Return the file of a published program with some of its parts."""
    body = re.sub(r"\{(\w+)\}", lambda m: parts.get(m[1], "pass"), text)
    return HEAD.format(parameters=parameters) + body + "\n    return main\n"


def removals(text: str) -> list[tuple[int, str, str]]:
    """Return (line, the statement, the text without it) of every flag and barrier."""
    lines = text.splitlines()
    return [
        (i + 1, line.strip(), "\n".join([*lines[:i], line[: len(line) - len(line.lstrip())] + "pass", *lines[i + 1 :]]))
        for i, line in enumerate(lines)
        if _FLAG.search(line)
    ]


def written(folder: Path, text: str, name: str = "program.py") -> Path:
    """Return a file with a text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
