"""Puts an attention algorithm's steps, a core family's mapping and a problem together into a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.ir.op import Attributes, Opcode
from npusim.ir.program import Phase, TileProgram
from npusim.schedules.ascend_attention import AscendAttention
from npusim.schedules.attention_blocks import AttentionBlock, attention_blocks, dealt
from npusim.schedules.attention_tensors import AttentionTensors, attention_tensors
from npusim.schedules.fit import check_operands
from npusim.schedules.on_ascend import AscendGroup
from npusim.schedules.on_gpu import GpuAttention, GpuGroup
from npusim.schedules.steps.table import choose
from npusim.schedules.tiling_mask import TilingMask

if TYPE_CHECKING:
    from npusim.schedules.steps.attention import AttentionSteps
    from npusim.schedules.vector_share import AscendAttentionTiling
    from npusim.spec.device import DeviceSpec
    from npusim.spec.problem import Problem

UNTIMED = "this device has no timing model yet: values only"


def ascend_program(
    name: str, device: DeviceSpec, problem: Problem, steps: AttentionSteps, tiling: AscendAttentionTiling, *,
    is_reverse: bool = False, is_trimmed: bool = True, tensors: AttentionTensors | None = None,
    before: PhasesBefore | None = None,
) -> TileProgram:  # fmt: skip
    """Return the program of an attention call on Ascend: every Q block of every head.

    Row sums without an order of their own take the vector unit's.  ``before`` adds phases that prepare
    ``tensors``.  Raises :class:`~npusim.errors.TilingError` if a block does not fit the device or the
    mask.
    """
    group = AscendGroup(device)
    own_order = {Opcode.ROW_SUM: Attributes(order=group.row_sum)}
    steps = replace(steps, softmax=choose(steps.softmax, own_order))
    chosen = tensors or attention_tensors(problem, steps.formats["out"])
    mask = causal_mask(problem, tiling.block_q, tiling.block_kv)
    phases = before(group) if before else ()
    group.allocator.start_phase()
    attention = AscendAttention(group, chosen, steps, tiling, mask)
    blocks = attention_blocks(
        problem, tiling.block_q, tiling.block_kv, is_reverse=is_reverse, is_trimmed=is_trimmed
    )
    blocks = dealt(blocks, device.group_count.value, tiling.deal)
    return _assemble(name, group, problem, chosen, mask, phases, attention, blocks)


def gpu_program(
    name: str, device: DeviceSpec, problem: Problem, steps: AttentionSteps, block_q: int, block_kv: int, *,
    is_reverse: bool = False, is_trimmed: bool = True, tensors: AttentionTensors | None = None,
    before: PhasesBefore | None = None,
) -> TileProgram:  # fmt: skip
    """Return the program of an attention call on a GPU, for its values."""
    group = GpuGroup(device)
    chosen = tensors or attention_tensors(problem, steps.formats["out"])
    mask = causal_mask(problem, block_q, block_kv)
    phases = before(group) if before else ()
    group.allocator.start_phase()
    attention = GpuAttention(group, chosen, steps, block_q, block_kv, mask)
    group.allocator.check()
    blocks = attention_blocks(
        problem, block_q, block_kv, is_reverse=is_reverse, is_trimmed=is_trimmed
    )
    return _assemble(name, group, problem, chosen, mask, phases, attention, blocks, (UNTIMED,))


Group = AscendGroup | GpuGroup
PhasesBefore = Callable[[Group], tuple[Phase, ...]]


def causal_mask(problem: Problem, block_q: int, block_kv: int) -> TilingMask | None:
    """Return the tiling-mask of a causal problem, checked against the blocks."""
    if not problem.causal:
        return None
    mask = TilingMask()
    mask.check(min(block_q, problem.seq_q), min(block_kv, problem.seq_kv))
    return mask


def _assemble(
    name: str, group: Group, problem: Problem, tensors: AttentionTensors, mask: TilingMask | None,
    before: tuple[Phase, ...], attention: AscendAttention | GpuAttention,
    blocks: tuple[AttentionBlock, ...], notes: tuple[str, ...] = (),
) -> TileProgram:  # fmt: skip
    check_operands("Q K^T", attention.qk.arithmetic, tensors.q.fmt, tensors.k.fmt)
    check_operands("P V", attention.pv.arithmetic, attention.steps.formats["P_out"], tensors.v.fmt)
    inputs = attention_tensors(problem, tensors.o.fmt)
    listed = [inputs.q, inputs.k, inputs.v, tensors.q, tensors.k, tensors.v, tensors.o]
    listed += [mask.tensor()] if mask else []
    phase = Phase("attention", blocks, attention.block, _shape, attention.touches)
    return TileProgram(
        name=name,
        queues=group.queues(),
        rings=tuple(group.allocator.rings),
        spaces=dict(group.allocator.spaces),
        used_bytes=dict(group.allocator.peak_bytes),
        tensors={t.name: t for t in listed},
        phases=(*before, phase),
        flops=problem.flops(),
        constants={"mask": mask.values} if mask else {},
        notes=notes,
    )


def _shape(block: AttentionBlock) -> object:
    return block.shape
