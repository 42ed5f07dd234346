"""Page: FastAttention's tiling-mask: exact mapping, blocks skipped, memory saved."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from npusim.config.load import load_workload
from npusim.config.problem import Problem
from npusim.kernels.attention.call_blocks import attention_cells
from npusim.kernels.attention.tiling_mask import DEFAULT_M, TilingMask
from reports.parts.document import Section, gather, number, percent, save_page, table
from reports.parts.values import program_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Visits", "check_mapping", "distinct_masks", "visits", "write"]


#: Brute force: values of M, lengths and causal offsets whose every block is compared.
MASKS, LENGTHS, OFFSETS = (1, 2, 3, 4, 5, 8), (7, 16, 23), (0, 3, -2)
GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
LONG = 65536


def write(folder: Path) -> list[Path]:
    """Write ``tiling_mask.md`` and its data to ``folder``."""
    parts = (_mapping, _skipping, _memory, _workloads)
    return save_page(folder, "tiling_mask", gather("tiling_mask", (part() for part in parts)))


def check_mapping(m: int, length: int, offset: int) -> tuple[int, int]:
    """Compare every block of every size up to M x M with its direct mask; return (blocks, wrong).

    A block (r0, c0) of rows x cols keeps key c0 + j for query r0 + i when c0 + j <= r0 + i + offset.
    """
    mask = TilingMask(m)
    matrix = mask.values()[0, 0].astype(bool)
    keep = np.arange(length)[None, :] <= np.arange(length)[:, None] + offset
    checked = wrong = 0
    for rows in range(1, min(m, length) + 1):
        for cols in range(1, min(m, length) + 1):
            for row in range(length - rows + 1):
                for col in range(length - cols + 1):
                    cut = mask.cut(row, rows, col, cols, offset)
                    found = matrix[cut.row : cut.row + rows, cut.col : cut.col + cols]
                    expected = keep[row : row + rows, col : col + cols]
                    wrong += found.tobytes() != expected.tobytes()
                    checked += 1
    return checked, wrong


def distinct_masks(block: int, m: int) -> int:
    """Return the number of different masks of square blocks at any position."""
    mask = TilingMask(m)
    matrix = mask.values()[0, 0]
    found = set()
    for diagonal in range(-2 * block, 2 * block + 1):
        row, col = max(diagonal, 0), max(-diagonal, 0)
        cut = mask.cut(row, block, col, block, 0)
        found.add(matrix[cut.row : cut.row + block, cut.col : cut.col + block].tobytes())
    return len(found)


class Visits(NamedTuple):
    """Fractions of all blocks of a causal score matrix."""

    skipped: float
    unmasked: float
    masked: float


def visits(tokens: int, block_q: int, block_kv: int) -> Visits:
    """Return the treatment by the schedules of the blocks of a causal square of ``tokens``."""
    problem = Problem(heads=1, seq_q=tokens, head_dim=64, causal=True)
    blocks = attention_cells(problem, block_q, block_kv)
    total = len(blocks) * -(-tokens // block_kv)
    masked = sum(r.count for b in blocks for r in b.runs if r.only)
    unmasked = sum(r.count for b in blocks for r in b.runs if not r.only)
    return Visits(1 - (masked + unmasked) / total, unmasked / total, masked / total)


def _mapping() -> Section:
    """Brute force over blocks, and the count of different masks."""
    checked = wrong = 0
    for m, length, offset in product(MASKS, LENGTHS, OFFSETS):
        blocks, bad = check_mapping(m, length, offset)
        checked, wrong = checked + blocks, wrong + bad
    masks = {b: distinct_masks(b, b) for b in (2, 3, 4, 8, 16)}
    fields: dict[str, object] = {
        "blocks": f"{checked:,}",
        "wrong": wrong,
        "masks": _listed(MASKS),
        "lengths": _listed(LENGTHS),
        "offsets": _listed(OFFSETS),
        "default_m": DEFAULT_M,
        "distinct": ", ".join(f"{count} for b = {b}" for b, count in masks.items()),
    }
    return fields, {"mapping": {"blocks": checked, "wrong": wrong, "distinct": masks}}


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


#: Tokens and blocks of the table of skipped blocks.
SQUARES = ((4096, 128, 128), (4096, 128, 512), (16384, 128, 128), (LONG, 128, 128), (LONG, 128, 512))


def _skipping() -> Section:
    """Fractions of blocks skipped, kept and masked."""
    rows, data = [], []
    for tokens, block_q, block_kv in SQUARES:
        found = visits(tokens, block_q, block_kv)
        formula = f"{0.5 - block_q / (2 * tokens):.4f}" if block_q == block_kv else ""
        rows.append([tokens, f"{block_q} x {block_kv}", *(f"{v:.4f}" for v in found), formula])
        data.append({"tokens": tokens, "block": [block_q, block_kv], **found._asdict()})
    header = ["tokens", "block", "skipped", "fully visible", "on the diagonal", "1/2 - b/(2S)"]
    square = [(tokens, visits(tokens, q, kv).skipped) for tokens, q, kv in SQUARES if q == kv]
    ends = zip(("short", "long"), (square[0], square[-1]), strict=True)
    fields = {f"{n}_{end}": v for end, (t, x) in ends for n, v in (("tokens", t), ("skipped", percent(x)))}
    return {"skipping": table(header, rows), **fields}, {"skipping": data}


def _memory() -> Section:
    """Bytes of the full mask and of the small matrix, by element type."""
    edge, widths = 2 * DEFAULT_M, {"FP16": 16, "int8": 8, "1 bit": 1}
    full, tile = ({n: side * side * bits // 8 for n, bits in widths.items()} for side in (LONG, edge))
    header = ["element", f"full mask, {LONG} x {LONG}", f"tiling-mask, {edge} x {edge} (M = {DEFAULT_M})"]
    rows = [[name, _size(full[name]), _size(tile[name])] for name in widths]
    return {"memory": table(header, rows)}, {"memory_bytes": {"full": full, "tiling": tile}}


#: Workloads and numbers of tokens of the programs whose masks are read.
PROGRAMS = (("pangu_38b", 4096), ("pangu_38b", 16384), ("qwen2_7b", 5632), ("llama2_70b", 16384))


def _workloads() -> Section:
    """The mask tensor of programs as built."""
    rows, data = [], {}
    for name, tokens in PROGRAMS:
        problem = load_workload(name).problem(seq=tokens)
        size = program_of("flash", problem, "fa2_fp32").tensors["mask"].size_bytes
        whole = tokens * tokens
        rows.append([f"`{name}`, {tokens} tokens", _size(whole), _size(size), whole / size])
        data[f"{name} {tokens}"] = {"full": whole, "tiling": size}
    shown = table(["workload", "full mask", "tensor `mask`", "factor"], rows)
    return {"workloads": shown}, {"workloads": data}


def _size(count: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{number(count / unit)} {name}"
    return f"{count} B"
