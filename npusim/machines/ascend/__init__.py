"""The decoupled Ascend core group: CUBE and vector cores that exchange tiles through global memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.config.family import CoreFamily
from npusim.machines.decisions import AscendDecisions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npusim.config.family import Settings

#: Settings that an attention tries in addition to its declared tile; the balanced order of causal blocks comes first.
SETTINGS: Settings = (
    ({"deal": "balanced"},),
    ({"splits": "auto"}, {"splits": "auto", "block_kv": 512}),
    (
        {"block_q": 64},
        {"block_q": 256},
        {"block_q": 64, "block_kv": 512},
        {"block_q": 64, "block_kv": 512, "vector_rows": 16},
        {"block": 64},
        {"block": 256},
    ),
    ({"block_kv": 128}, {"block_kv": 256}),
    ({"vector_rows": 16}, {"vector_rows": 32}),
    ({"depth": 3},),
    ({"block_q": 64}, {"block_q": 128}, {"block_kv": 256}),
)
#: Tiles for calls in which V is a part of K: L1 holds such a tile until both products have read it.
LATENT_TILES: Sequence[Mapping[str, object]] = tuple({"block_kv": keys, "depth": 1} for keys in (64, 96, 128))

ASCEND = CoreFamily(
    name="ascend",
    machine="npusim.machines.ascend.ascend_machine:AscendMachine",
    processor="npu",
    decisions=AscendDecisions,
    fields={
        "attention": "npusim.machines.ascend.product_plan:FlashTiling",
        "splits": "npusim.machines.ascend.product_plan:FlashTiling",
        "stages": "npusim.machines.ascend.product_plan:RegisterFields",
        "chunks": "",
        "compiled": "npusim.machines.ascend.product_plan:KernelFields",
        "product": "npusim.machines.ascend.product_plan:GemmFields",
        "rows": "npusim.machines.ascend.product_plan:RowsFields",
        "operators": "npusim.machines.ascend.product_plan:OperatorFields",
        "plain": "",
    },
    usual="cann",
    layer_attention="two_level",
    settings={"attention": SETTINGS, "latent": (*SETTINGS, LATENT_TILES)},
    cores=("aic", "aiv"),
    sole=("aic",),
    parts=("flags", "launch"),
    issued="npusim.machines.ascend.issued_program:IssuedProgram",
    written="npusim.machines.ascend.text_file:tilelang_file",
)
