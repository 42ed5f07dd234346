"""TileLang's FlashAttention, which transfers every second tile (60 to 72 % of CANN's speed, bench_mark.md)."""

from __future__ import annotations

from npusim.kernel import AscendDecisions, AscendKernel

TILELANG = AscendKernel(
    name="tilelang",
    whose="the kernel of TileLang, which passes on two tiles at a time",
    computes=("flash", "split_kv"),
    decides=AscendDecisions(together=2),
)
