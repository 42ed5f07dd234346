"""A node program: row blocks, each a chain of kernels and a collective, as a tile program.

Core groups of the program are the node's devices; each has a queue for its cores and one for its
collectives, and a ring of partial products between them, so that ``ir.check`` and the walker treat
a node like a core.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.ir.buffers import AddressSpace, Allocator
from npusim.ir.program import Phase, Queue, TileProgram
from npusim.node.kernel import CollectiveCall, CollectiveOp, Kernel, KernelOp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npusim.ir.program import Item, Touch
    from npusim.node.collective import Algorithm, Kind

COMPUTE = "npu.COMPUTE"
MEMORY = "gm"
#: Rows of a block of the attention: cuts in between would split its tiles (ascend.md section 2.1).
ROW_GRAIN = 128


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows ``row .. row + rows`` over batch and sequence, and what computes them."""

    row: int
    rows: int
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True)
class Communication:
    """The collective after each block: its kind and way, and the row of the result it carries."""

    driver: str
    algorithm: Algorithm
    row_bytes: int
    kind: Kind = "allreduce"
    servers: int = 1
    element_bytes: int = 1

    @property
    def queue(self) -> str:
        """Return the queue it is issued to: the copy engines', or the collective library's."""
        return "npu.SDMA" if self.driver == "sdma" else "npu.HCCL"


def cut_rows(total: int, blocks: int, first_share: float | None) -> list[tuple[int, int]]:
    """Return ``(row, rows)`` of each block: the first one's share of all rows, the others equal.

    Cuts fall on whole attention blocks of 128 rows where that leaves every block some.

    Raises
    ------
    TilingError
        More blocks than rows, or a first block that leaves a block without a row.
    """
    if blocks > total:
        raise TilingError(f"blocks: {blocks} blocks of only {total} rows; at most {total}")
    share = 1.0 / blocks if first_share is None or blocks == 1 else first_share
    ends = [share + (1.0 - share) * i / max(1, blocks - 1) for i in range(blocks)]
    sizes: list[int] = []
    for grain in (ROW_GRAIN, 1) if total >= 2 * blocks * ROW_GRAIN else (1,):
        cuts = [0, *(min(total, round(total * e / grain) * grain) for e in ends[:-1]), total]
        sizes = [b - a for a, b in pairwise(cuts)]
        if min(sizes) >= 1:
            return list(zip(cuts[:-1], sizes, strict=True))
    raise TilingError(
        f"first_share: {share} of {total} rows in {blocks} blocks leaves a block without rows: {sizes}"
    )


def node_program(
    name: str, ranks: int, blocks: Sequence[RowBlock], comm: Communication, flops: int
) -> TileProgram:
    """Return the program in which each of ``ranks`` devices runs all ``blocks`` in order."""
    largest = max(b.rows for b in blocks) * comm.row_bytes
    space = AddressSpace(MEMORY, largest * len(blocks), get_format("float16").size_bytes)
    allocator = Allocator({MEMORY: space})
    partial = allocator.ring(
        MEMORY, "partial sums", largest, len(blocks), producers=[COMPUTE], consumers=[comm.queue]
    )

    def body(_rank: int) -> Iterator[Item]:
        for index, block in enumerate(blocks):
            size = block.rows * comm.row_bytes
            for kernel in block.kernels:
                is_last = kernel is block.kernels[-1]
                slot = partial.fill(1, size, "int8", first=kernel is block.kernels[0], last=is_last)
                yield KernelOp(
                    f"{kernel.role} {index}", COMPUTE, "COMPUTE", (), (slot,),
                    kernel=kernel, row=block.row, rows=block.rows,
                )  # fmt: skip
            # Without kernels the data is there already: nothing to wait for.
            ready = (partial.front(1, size, "int8"),) if block.kernels else ()
            call = CollectiveCall(
                comm.kind, comm.algorithm, comm.driver, size, len(blocks) > 1, comm.servers, comm.element_bytes
            )
            yield CollectiveOp(
                f"{comm.kind} {index}",
                comm.queue,
                comm.queue.partition(".")[2],
                (),
                ready,
                call=call,
                row=block.row,
                rows=block.rows,
            )

    queues = tuple(Queue(q, "npu", q.partition(".")[2], "host") for q in (COMPUTE, comm.queue))
    return TileProgram(
        name=name, queues=queues, rings=tuple(allocator.rings), spaces={MEMORY: space},
        used_bytes=dict(allocator.peak_bytes), tensors={},
        phases=(Phase("rows", tuple(range(ranks)), body, lambda _rank: None, _touches),), flops=flops * ranks,
    )  # fmt: skip


def _touches(_ranks: Sequence[int]) -> Iterator[Touch]:
    return iter(())
