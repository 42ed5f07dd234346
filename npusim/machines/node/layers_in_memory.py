"""The layers whose K and V a device stores, after weights, KV, intermediates, vocabulary and a reserve; the host stores
the K and V of the other layers.

FastAttention appendix D, equations 32 to 37, corrected: the printed form omits the bytes per element of the vocabulary,
has no gated FFN, no grouped heads and no intermediates of the FFN, and is neither rounded nor limited to the range from
0 to the number of layers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.errors import SpecError
from npusim.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from npusim.config.layers import ModelProblem
    from npusim.config.node_file import NodeDevice

#: Size in bytes of an element where equations 34 to 36 assume FP16.
HALF = 2
#: Largest length in tokens that the search tries.
LONGEST = 1 << 27


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One device's memory in bytes, and the number of the ``layers`` whose K and V are on it.

    ``tenants`` are all data except K and V; ``kv_bytes`` is the size of one layer's K and V. ``host_bytes`` is the
    capacity of the host for all devices together; None if the node has no host.
    """

    capacity_bytes: int
    tenants: dict[str, int]
    kv_bytes: int
    layers: int
    ranks: int
    host_bytes: int | None

    @property
    def free_bytes(self) -> int:
        """Return the bytes left for K and V; negative if the other data do not fit."""
        return self.capacity_bytes - sum(self.tenants.values())

    @property
    def gpu_layers(self) -> int:
        """Return L_GPU: the layers whose K and V a device holds."""
        return max(0, min(self.layers, self.free_bytes // self.kv_bytes))

    @property
    def cpu_layers(self) -> int:
        """Return L_CPU: the layers whose K and V the host holds."""
        return self.layers - self.gpu_layers

    @property
    def fits(self) -> bool:
        """Whether all data fit, with K and V of the other layers on the host."""
        host = 0 if self.host_bytes is None else self.host_bytes
        return self.free_bytes >= 0 and self.cpu_layers * self.kv_bytes * self.ranks <= host

    def listed(self) -> str:
        """Return the tenants with their bytes, the largest first."""
        all_of = {**self.tenants, "KV": self.kv_bytes * self.layers}
        ranked = sorted(all_of.items(), key=lambda t: -t[1])
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in ranked if size)


def memory_plan(p: ModelProblem, machine: NodeDevice, *, output: int = 0, bits: float = 16) -> MemoryPlan:
    """Return the corrected plan of ``p`` on a node: with its keys and ``output`` further tokens stored.

    ``bits`` are the bits of a weight for which the model names no format.
    """
    node, rows = machine.node, p.batch * p.seq_q
    gates = 2 if p.gated else 1
    attention, ffn = p.qkv_width + p.width, gates * p.ffn_width
    if p.experts is not None:
        routed = p.experts.per_token * (p.hidden + gates * ceil_div(p.experts.width, p.ranks))
        ffn = max(ffn if p.dense_layers else 0, routed)
    columns = 0 if p.tied else ceil_div(p.vocab, p.ranks)
    host = None
    if node.cpu is not None and node.pcie is not None:
        host = node.cpu.dram_capacity_bytes.value - node.cpu.reserve_bytes.value
    element = p.cached.kv_bytes() // (p.batch * p.seq_kv)
    return MemoryPlan(
        machine.each.memory.gm.capacity_bytes.value,
        {
            "weights": math.ceil(p.stored_bytes(bits) / p.ranks),
            "intermediates": HALF * rows * (2 * p.hidden + max(attention, ffn)),
            "vocabulary": HALF * (p.vocab + columns) * p.hidden,  # a rank sends its share of the logits
            "reserve": 0 if node.reserve_bytes is None else node.reserve_bytes.value,
        },
        element * p.batch * (p.seq_kv + output),
        p.layers,
        p.ranks,
        host,
    )


def longest(p: ModelProblem, machine: NodeDevice, *, is_offloaded: bool) -> int:
    """Return the longest prompt, in tokens, that fits; 0 if no prompt fits."""

    def fits(tokens: int) -> bool:
        memory = memory_plan(p.model_copy(update={"seq_q": tokens, "seq_kv": tokens}), machine)
        return memory.fits if is_offloaded else memory.free_bytes >= memory.layers * memory.kv_bytes

    return bisect_left(range(1, LONGEST + 1), True, key=lambda tokens: not fits(tokens))


def refuse_too_large(p: ModelProblem, machine: NodeDevice, layers_on_host: int, output: int) -> None:
    """Raise `SpecError` if a model does not fit: the missing bytes, the largest consumer, and remedies."""
    memory = memory_plan(p, machine, output=output)
    device_bytes = memory.kv_bytes * (memory.layers - layers_on_host)
    missing = device_bytes - memory.free_bytes
    on_host = layers_on_host * memory.kv_bytes * p.ranks
    budget = memory.host_bytes
    if missing <= 0 and (budget is None or on_host <= budget):
        return
    name = machine.node.name
    if missing <= 0:
        raise SpecError(
            f"{name}: K and V of {layers_on_host} layers need {format_bytes(on_host)}, but its host has "
            f"{format_bytes(budget or 0)}; a setting that fits: {_what_fits(p, machine, output)}"
        )
    raise SpecError(
        f"{name}: each device lacks {format_bytes(missing)}; it has {format_bytes(memory.capacity_bytes)}: "
        f"{memory.listed()}; a setting that fits: {_what_fits(p, machine, output)}"
    )


def _what_fits(p: ModelProblem, machine: NodeDevice, output: int) -> str:
    """Return the options that would make a model fit: more ranks, quantised weights, offloading, shorter prompts."""
    ways: list[str] = []

    def holds(other: ModelProblem, bits: float = 16) -> bool:
        it = memory_plan(other, machine, output=output, bits=bits)
        return it.free_bytes >= it.layers * it.kv_bytes

    more = [n for n in range(p.ranks + 1, p.heads * p.ranks + 1) if (p.heads * p.ranks) % n == 0]
    ranks = next((n for n in more if holds(_on(p, n))), None)
    ways += [f"{ranks} devices (--hw, your own node file)"] if ranks else []
    bits = next((b for b in (8, 4) if holds(p, b)), None)
    ways += [f"weights of {bits} bits (stored: {{bits: {bits}.0}} in a workload file)"] if bits else []
    offloaded = memory_plan(p, machine, output=output)
    if offloaded.fits:
        ways.append(f"offload of {offloaded.cpu_layers} of {p.layers} layers (-t offload=cooperative)")
    for is_offloaded, how in ((False, ""), (True, " offloaded")):
        tokens = longest(p.model_copy(update={"batch": 1}), machine, is_offloaded=is_offloaded)
        is_less = tokens and p.batch * p.seq_kv > tokens and (not is_offloaded or offloaded.host_bytes is not None)
        ways += [f"{tokens:,} tokens of one sequence{how}"] if is_less else []
    return ", or ".join(ways) or (
        "neither more ranks, 4-bit weights, offloading nor shorter prompts suffice; use larger devices"
    )


def _on(p: ModelProblem, ranks: int) -> ModelProblem:
    heads, kv_heads = p.heads * p.ranks, p.kv_heads * p.ranks
    return p.model_copy(update={"ranks": ranks, "heads": max(1, heads // ranks), "kv_heads": max(1, kv_heads // ranks)})
