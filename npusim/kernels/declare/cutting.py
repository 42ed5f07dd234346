"""Split-KV attention (flash-decoding): several blocks share the keys of a query, then their results are merged.

It is `flash` with its phase split along the keys; with one split it is flash itself.  The number of splits follows from
a device's file (`best_splits`) or from the rule of a published kernel (`split_rules`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from npusim.config.device import DeviceSpec
from npusim.config.problem import Problem
from npusim.config.seen import KeyRanges
from npusim.errors import TilingError
from npusim.formats import stored_format
from npusim.identity import Itself
from npusim.kernels.attention.call_blocks import (
    AttentionTensors,
    attention_cells,
    attention_tensors,
    below_one_another,
    depends_on_position,
    kv_runs,
    of_sequences,
)
from npusim.kernels.attention.online_softmax import FlashPrecision, attention_phase, flash
from npusim.kernels.attention.score_functions import scored, sink_of
from npusim.kernels.attention.split import (
    EXACT,
    FAN,
    FEWEST_ROWS,
    Cut,
    Merge,
    SplitPrecision,
    even,
    packs,
    sized,
    split_kv,
    tiles_of,
)
from npusim.kernels.attention.split_rules import RULES, Parts, SplitCall, call_of, seen_parts
from npusim.kernels.attention.tiling_mask import MaskKind, mask_of
from npusim.kernels.declare.define import Phases, machine_of, read_operands, scaled_queries
from npusim.kernels.form.phase import Phase, WorkTile
from npusim.machines.base import AttentionPace, Machine
from npusim.machines.published_kernel import GpuKernel, PublishedKernel
from npusim.machines.published_kernels import find_kernel
from npusim.program.ir.content import kept_by_blocks
from npusim.program.ir.tile import GlobalTensor
from npusim.units import ceil_div


@kept_by_blocks(lambda whole, *_: len(whole.cells))
def _whole(
    problem: Problem, sizes: tuple[int, int], p: SplitPrecision, kind: MaskKind | None, tensors: AttentionTensors
) -> Phase:
    """Return FlashAttention-2 with one head per block, or with all query heads of a KV head stacked."""
    packed = tensors.q.packed
    kernel, more = scored(flash, problem, p, problem.scale, packed)
    more |= {"sink": sink_of(problem, p, p.softmax, packed), "unseen": problem.unseen}
    if packed == 1:
        return attention_phase(kernel, problem, sizes, p, mask=mask_of(problem, sizes, kind), tensors=tensors, **more)
    blocks = packed_blocks(problem, sizes)
    is_masked = any(run.only for block in blocks for run in block.runs)
    mask = mask_of(problem, sizes, kind, packed=packed) if is_masked else None
    return attention_phase(kernel, problem, sizes, p, mask=mask, cells=blocks, tensors=tensors, **more)


def packed_blocks(problem: Problem, sizes: tuple[int, int]) -> tuple[WorkTile, ...]:
    """Return blocks of the rows of all query heads that share a KV head, stacked.

    With a mask a block has as many complete heads as fit.  Raises `TilingError` if these rows are not one matrix in
    memory, or if a mask leaves space for only one head.
    """
    p, height = problem, sizes[0]
    if p.seq_q > 1 and p.layout != "bnsd":
        raise TilingError(
            f"pack: {p.seq_q} queries per head cannot be packed: in layout {p.layout} they are not contiguous; "
            "packing needs one query per head (--seq-q 1), or layout bnsd; use pack=off"
        )
    if _has_whole_heads(p) and height < 2 * min(p.queries):
        raise TilingError(
            f"pack: a causal block consists of complete heads, and its {height} rows have room for only one head "
            f"of {p.seq_q} queries, so that packing changes nothing; use a block_q of {2 * p.seq_q} or more, or "
            "pack=off"
        )
    is_placed = depends_on_position(p, p.seen)
    return of_sequences(p, lambda one: _packed_blocks(one, sizes, is_placed=is_placed))


def _has_whole_heads(p: Problem) -> bool:
    return min(p.queries) > 1 and (p.causal or not p.seen.is_plain)


def _packed_blocks(p: Problem, sizes: tuple[int, int], *, is_placed: bool) -> tuple[WorkTile, ...]:
    """Return the blocks of sequences of one length; if a masked block holds only one head, each block has rows of one
    head.
    """
    (height, keys), group = sizes, p.group_size
    if _has_whole_heads(p) and height < 2 * p.seq_q:
        return below_one_another(attention_cells(p, *sizes, is_placed=is_placed), group, p.seq_q)
    runs = kv_runs(p.seen, p.causal_offset, p.seq_q, p.seq_kv, keys)
    below = p.model_copy(update={"heads": p.kv_heads, "seq_q": p.seq_q * group})
    height = height // p.seq_q * p.seq_q if _has_whole_heads(p) else height
    offset = p.causal_offset if is_placed else None
    whole = attention_cells(below, height, keys, seen=KeyRanges(p.seq_kv))
    return tuple(replace(block, runs=runs, causal_offset=offset) for block in whole)


def may_pack(problem: Problem, height: int) -> bool:
    """Return whether rows of several query heads of one KV head fit in a block of ``height`` rows."""
    is_matrix = problem.seq_q == 1 or problem.layout == "bnsd"
    return problem.group_size > 1 and is_matrix and (min(problem.queries) == 1 or 2 * min(problem.queries) <= height)


# ---------------------------------------------------------------- number of splits: estimated, not simulated


# The rates of machines are fitted to npusim's cycles, not to devices: one query of qwen2_7b, llama2_70b and pangu_38b
# on 512 to 32k keys, tiles of 32 to 1024 keys, heads of 64 and 128.  The root mean square error of calls is 3 to 7 %
# (one call of the V100 has 42 %), which is accurate enough to order splits. Time of two resident blocks relative to
# that of one (H200, 160 and 256 blocks on 132 multiprocessors).
PAIR = 1.5


#: Largest number of rows of a block that takes no longer than one row; with more rows the time grows (1 to 128 rows,
#: all four devices).
ROWS = 64


#: For a core group's time t and its share s of the memory's time, the combined time is (t^6 + s^6)^(1/6): the longer
#: time dominates, and similar times add to each other.
POWER = 6


#: Cycles of a block of a merge, and of each split that it joins (within 20 % on all four).
MERGE, MERGED_SPLIT = 1100, 390


#: Largest number of splits, as in FlashAttention's num_splits_heuristic (flash_api.cpp).
MOST = 128


class _CallTime:
    """The time of an attention by its number of splits."""

    def __init__(self, device: DeviceSpec, phase: Phase, fan: int | None) -> None:
        self.device, self.fan, self.groups = device, fan, device.group_count.value
        pace: AttentionPace = machine_of(device).pace
        self.places = self.groups * pace.residents
        counts = [tiles_of(block) for block in phase.cells]
        self.counts = counts
        self.tiles, self.total = max(counts), sum(counts)
        self.merged = sum(ceil_div(block.rows, FEWEST_ROWS) for block in phase.cells)

        inputs = {t.name: t for n in "kv" if isinstance(t := phase.tensors[n], GlobalTensor)}.values()
        elements = sum(stored_format(t.fmt).bytes_of(t.cols) for t in inputs)
        tile_bytes = phase.sizes[phase.loop_axis] * elements
        slower = max(1.0, max(block.rows for block in phase.cells) / ROWS)
        self.block = slower * pace.block
        self.tile = slower * (pace.tile + tile_bytes / pace.bytes_per_cycle)
        # Blocks with the same keys read them from memory once.
        new = min(1.0, sum(t.size_bytes for t in inputs) / (sum(counts) * tile_bytes))
        rates = [device.link(n).rate for n in ("hbm", "l2")]
        seconds = tile_bytes * max(new / rates[0], 1 / rates[1])
        self.memory = seconds * float(device.clock_hz.value)

    def _together(self, blocks: int, longest: int, mean: float) -> float:
        """Return the cycles of this number of concurrent blocks with ``mean`` tiles, ``longest`` at most."""
        alone = longest * self.tile * (PAIR if blocks > self.groups else 1)
        shared = blocks * mean * self.memory
        return self.block + float((alone**POWER + shared**POWER) ** (1 / POWER))

    def times_s(self, splits: int) -> tuple[float, float]:
        return self._times_s(len(self.counts) * splits, ceil_div(self.tiles, splits), splits)

    def times_of_parts_s(self, longest: int) -> tuple[float, float]:
        parts = sum(ceil_div(n, longest) for n in self.counts)
        return self._times_s(parts, longest, ceil_div(self.tiles, longest))

    def _times_s(self, parts: int, longest: int, splits: int) -> tuple[float, float]:
        """Return the times of a call and of its cores; for a device without launch times, both are the cores' time."""
        blocks, mean = [parts], self.total / parts
        rounds, rest = divmod(parts, self.places)
        cycles = rounds * self._together(self.places, longest, mean) if rounds else 0.0
        cycles += self._together(rest, longest, mean) if rest else 0.0
        while splits > 1:
            each = min(self.fan or splits, splits)
            splits = ceil_div(splits, each)
            blocks.append(self.merged * splits)
            cycles += ceil_div(blocks[-1], self.groups) * (MERGE + MERGED_SPLIT * each)
        core = self.device.seconds(cycles)
        call = self.device.launched(core, blocks)[0]["call"] if self.device.is_timed else core
        return call, core


def best_splits(device: DeviceSpec, phase: Phase, fan: int | None) -> int:
    """Return the number of splits with the smallest time of a call, or of its cores if calls are equal.

    ``phase`` is the attention before it is split; ``fan``: the number of partial outputs in a step of the
    merge, None for all.  A call's time is the latency that a run states.
    """
    estimate = _CallTime(device, phase, fan)
    return min(range(1, min(MOST, estimate.tiles) + 1), key=estimate.times_s)


def best_parts(device: DeviceSpec, phase: Phase, fan: int | None) -> int:
    """Return the largest number of tiles of a part for blocks of various lengths; otherwise as `best_splits`."""
    estimate = _CallTime(device, phase, fan)
    sizes = {ceil_div(estimate.tiles, splits): None for splits in range(1, min(MOST, estimate.tiles) + 1)}
    return min(sizes, key=estimate.times_of_parts_s)


# ---------------------------------------------------------------- the schedule


class Cutting(NamedTuple):
    """Fields of a tiling that decide how keys are split. Tilings with equal values of these fields have the same
    phases.

    block_q, block_kv
        Queries and keys of a tile.
    splits
        Number of parts of the keys, the name of a rule, or a rule that returns the parts of every block.
    split_keys
        Keys of a part, in place of ``splits``.
    merge
        How the partial outputs are merged.
    pack
        Whether the query heads of one KV head are the rows of one block.
    """

    block_q: int
    block_kv: int
    splits: int | str | Callable[[SplitCall], Parts] = 1
    split_keys: int | None = None
    merge: Merge = "sequential"
    pack: str = "auto"


def cut_phases(
    problem: Problem,
    cutting: Cutting,
    p: SplitPrecision,
    machine: Machine,
    kind: MaskKind | None,
    merge_rows: int = 0,
    *,
    has_unseen: bool = False,
) -> Phases:
    """Return FlashAttention-2 with keys split as ``cutting`` states, or by a kernel's rule if ``splits`` names one.

    ``merge_rows``: rows of a block of the merge; 0: the number that takes the least time. ``has_unseen``: parts without
    a key that the block's queries see are blocks too; the merge reads their partial outputs.
    """
    how: dict[str, Any] = {"prepares": machine.has_rows_kernels, "least": 0 if has_unseen else 1}
    return _phases(problem, cutting, p, Itself(machine.device), machine.places, kind, merge_rows, **how)


@kept_by_blocks(lambda phases, *_: sum(len(phase.cells) for phase in phases))
def _phases(
    problem: Problem,
    tiling: Cutting,
    p: SplitPrecision,
    device: Itself,
    places: int,
    kind: MaskKind | None,
    merge_rows: int,
    *,
    prepares: bool,
    least: int,
) -> Phases:
    if problem.unseen not in (None, "zero"):
        raise TilingError(
            f"unseen: {problem.unseen}, but a split in which a query sees no key contributes 0 to the result; use zero"
        )
    sizes, group, notes = (tiling.block_q, tiling.block_kv), problem.group_size, tuple[str, ...]()
    is_packed = group > 1 and tiling.pack == "on"
    if tiling.pack == "auto" and may_pack(problem, sizes[0]):
        seen = problem.kv_heads * sum(ceil_div(n, sizes[1]) for n in problem.keys)
        is_packed = min(problem.queries) == 1 or packs(group * problem.seq_q, seen, places)
    tensors = attention_tensors(problem, p.output, group if is_packed else 1)
    problem, scale = scaled_queries(problem, p)
    before, tensors = read_operands(tensors, p, device.thing, prepares=prepares, scale=scale)
    whole = _whole(problem, sizes, p, kind, tensors)
    tiles, splits = max(map(tiles_of, whole.cells)), tiling.splits
    if tiling.pack == "auto" and is_packed:
        notes = (f"pack=auto: the {group} query heads of a KV head are rows of one block",)
    cut, note = _cut(problem, tiling, whole, device.thing, places, least)
    if isinstance(splits, int) and splits > tiles:
        why = "an empty split has weight 0 in the merge, and its time is 0"
        notes = (
            *notes,
            (
                f"splits: {splits} splits of {tiles} tiles ({sizes[1]} keys each) leave {splits - tiles} "
                f"splits empty; {why}"
            ),
        )
    of_scores = partial(scored, problem=problem, p=p, scale=problem.scale, packed=group if is_packed else 1)
    sink = sink_of(problem, p, EXACT, group if is_packed else 1)
    first, *rest = split_kv(whole, cut, tiling.merge, p, places, of_scores, sink, merge_rows)
    notes = (*notes, note) if note else notes
    return [*before, replace(first, notes=notes) if notes else first, *rest]


def _cut(
    problem: Problem, tiling: Cutting, whole: Phase, device: DeviceSpec, places: int, least: int
) -> tuple[int | Cut, str]:
    """Return the cuts of blocks, or the number of parts, and a note if a rule states it.

    ``least``: smallest number of tiles of a part by a rule in a block under a causal mask.
    """
    block_kv, splits = tiling.block_kv, tiling.splits
    if tiling.split_keys:
        if splits != "auto" or tiling.split_keys % block_kv:
            why = (
                f"not a multiple of block_kv={block_kv}"
                if splits == "auto"
                else (f"set together with splits={splits}; set only one of them")
            )
            raise TilingError(f"split_keys: {tiling.split_keys} is {why}")
        return (lambda block: sized(tiles_of(block), tiling.split_keys // block_kv)), ""
    if isinstance(splits, int):
        return splits, ""
    if splits != "auto":
        call = call_of(problem, tiling.block_q, block_kv, device.group_count.value)
        rule = RULES[splits] if isinstance(splits, str) else splits
        parts = rule(call)
        counts = ", ".join(str(len(cut)) for cut in dict.fromkeys(parts))
        note = f"splits={rule.__name__}: {counts}"
        if call.window:
            return (lambda block: seen_parts(rule.__name__, parts[block.batch], _visited(block, block_kv))), note
        return (lambda block: _clipped(parts[block.batch], tiles_of(block), least)), note
    if not problem.lengths:
        count = best_splits(device, whole, FAN[tiling.merge])
        return count, (
            f"splits=auto: {count} splits; the device runs {places} blocks at a time, and there are "
            f"{len(whole.cells)} blocks of queries"
        )
    each = best_parts(device, whole, FAN[tiling.merge])
    note = f"splits=auto: at most {each * block_kv} keys per split; the device runs {places} blocks at a time"
    return (lambda block: even(tiles_of(block), ceil_div(tiles_of(block), each))), note


def _visited(block: WorkTile, block_kv: int) -> list[int]:
    return [run.visit(0, i).col // block_kv for run in block.runs for i in range(run.count)]


def _clipped(parts: tuple[int, ...], tiles: int, least: int) -> tuple[int, ...]:
    """Return, for each part, the number of a sequence's first tiles in it; parts with fewer than ``least`` are omitted.
    A causal block sees no other tiles.
    """
    seen = (min(end, tiles) - min(start, tiles) for start, end in pairwise(accumulate(parts, initial=0)))
    return tuple(count for count in seen if count >= least)


def by_published_rule(problem: Problem, tiling: Any, p: FlashPrecision, machine: Any) -> Phases | None:
    """Return the phases of a kernel that divides keys or packs heads by its own rule; None if it does neither."""
    kernel, tile = find_kernel(PublishedKernel, getattr(tiling, "kernel", None)), (tiling.block_q, tiling.block_kv)
    if not isinstance(kernel, GpuKernel) or kernel.split_rule is None:
        return None

    is_packed = kernel.packs(problem, tiling.block_q) and may_pack(problem, tiling.block_q)
    is_cut = kernel.cuts(problem, tile, machine.device)
    if not (is_packed or is_cut):
        return None
    pack = "on" if is_packed else "off"
    cutting = Cutting(*tile, splits=kernel.split_rule if is_cut else 1, pack=pack)
    parts, kind = SplitPrecision(**asdict(p)), machine.mask_kind(tiling)
    has_unseen = kernel.has_unseen_parts
    return cut_phases(problem, cutting, parts, machine, kind, kernel.merge_rows, has_unseen=has_unseen)
