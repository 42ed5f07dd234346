"""Split-KV attention (flash-decoding): several blocks share the keys of a query, then their results are merged.

It is `flash` with its phase split along the keys; with one split it is flash itself.  The number of splits follows from
a device's file (`best_splits`), or from the rule of a published kernel (`split_rules`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from npusim.kernel import (
    ATTENTION_PRECISIONS,
    Cutting,
    Field,
    Merge,
    Phases,
    Problem,
    SplitPrecision,
    Tiling,
    cut_phases,
    schedule,
)
from npusim.machine import Machine

#: ``auto`` and the names of published kernels, whose rules choose the number of splits.
Rule = Literal["auto", "fa2", "fa3", "fa3_varlen", "fa4", "flashinfer", "flashmla", "vllm", "cann", "xqa"]


class SplitFields(Tiling):
    """Options of the split of keys, and of the merge of the splits' results."""

    splits: Annotated[int, Field(ge=1)] | Rule = Field(
        default="auto",
        description=(
            "number of blocks that share a query's keys; auto: the number with the smallest time; or a kernel's rule"
        ),
    )
    split_keys: int | None = Field(
        default=None,
        ge=16,
        multiple_of=16,
        description=("keys of a split, counted from the first key, independent of the length"),
    )
    merge: Merge = Field(default="sequential", description="order of the merge: one part after another, or in pairs")
    pack: Literal["auto", "on", "off"] = Field(
        default="auto",
        description=("put the query heads of a KV head into the rows of one block; auto: if this is faster"),
    )


def phases(problem: Problem, tiling: Any, p: SplitPrecision, machine: Machine) -> Phases:
    """Return FlashAttention-2 split along the keys, and the merge of the splits."""
    cutting = Cutting(*(getattr(tiling, name) for name in Cutting._fields))
    return cut_phases(problem, cutting, p, machine, machine.mask_kind(tiling))


SCHEDULES = schedule(
    "split_kv",
    phases,
    tiling=SplitFields,
    kind="splits",
    precisions={f: tuple(SplitPrecision(**asdict(p)) for p in listed) for f, listed in ATTENTION_PRECISIONS.items()},
    takes_lengths=True,
    takes_unseen=True,
    is_of_decoding=True,
    summary="flash-decoding: keys split among blocks, partial outputs merged",
)
