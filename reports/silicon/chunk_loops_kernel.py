"""The kernel of chunk_loops.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def states(k, v, h, tokens, heads, WIDTH: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
           STORES: tl.constexpr, NEAR: tl.constexpr, DECAYS: tl.constexpr):  # fmt: skip
    """Store the state before each chunk, and add K^T V of the chunk's tokens."""
    i_k, i_v, i_h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k += i_h * WIDTH
    v += i_h * WIDTH
    state = tl.zeros([BK, BV], dtype=tl.float32)
    for i in range(tl.cdiv(tokens, BT)):
        at = 0 if NEAR else i
        if STORES:
            of_h = tl.make_block_ptr(h + (i * heads + i_h).to(tl.int64) * WIDTH * WIDTH, (WIDTH, WIDTH), (WIDTH, 1),
                                     (i_k * BK, i_v * BV), (BK, BV), (1, 0))  # fmt: skip
            tl.store(of_h, state.to(of_h.dtype.element_ty), boundary_check=(0, 1))
        of_k = tl.make_block_ptr(k, (WIDTH, tokens), (1, heads * WIDTH), (i_k * BK, at * BT), (BK, BT), (0, 1))
        of_v = tl.make_block_ptr(v, (tokens, WIDTH), (heads * WIDTH, 1), (at * BT, i_v * BV), (BT, BV), (1, 0))
        kj = tl.load(of_k, boundary_check=(0, 1))
        vj = tl.load(of_v, boundary_check=(0, 1))
        if DECAYS:
            since = tl.arange(0, BT)
            state *= 0.99
            vj = (vj * tl.exp((BT - 1 - since).to(tl.float32) * -0.01)[:, None]).to(vj.dtype)
        state += tl.dot(kj, vj)
    if not STORES:
        of_h = tl.make_block_ptr(h + i_h.to(tl.int64) * WIDTH * WIDTH, (WIDTH, WIDTH), (WIDTH, 1),
                                 (i_k * BK, i_v * BV), (BK, BV), (1, 0))  # fmt: skip
        tl.store(of_h, state.to(of_h.dtype.element_ty), boundary_check=(0, 1))
